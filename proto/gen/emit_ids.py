# SPDX-License-Identifier: Apache-2.0
"""proto/api/call_ids.gen.h: the numbers of calls and operations, and their names."""

from proto_gen import text


def emit(model, args):
    lines = ["// Call ids: the vendor's numbers, by exported symbol.", "enum CallId : uint32_t {"]
    lines += [f"  kCall_{c.symbol} = {c.id}," for c in model.calls]
    lines += ["};", "", "// Our own operations.", "enum OperationId : uint32_t {"]
    for op in model.operations:
        lines.append(f"  kOp{op.name} = kFirstOperation + {op.number}," + (f"  // {op.comment}" if op.comment else ""))
    lines += ["};", ""]
    return {"call_ids.gen.h": text.header("proto/api/call_ids.gen.h", ["<cstdint>", "", '"proto/frame/frame.h"'],
                                          "\n".join(lines), "cuda_remote").replace("#include \n", "\n")}
