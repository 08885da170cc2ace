# SPDX-License-Identifier: Apache-2.0
"""client/core/call_info.gen.h: what a Call needs to know of each driver function and operation."""

from proto_gen import text

CONTEXT = {"none": "ContextOf::kNone", "thread": "ContextOf::kThread", "object": "ContextOf::kObject"}


def sent_id(call):
    """Id of the request that a call's body sends."""
    sends = call.row.sends
    if sends == "nothing" or call.status == "local" and not sends:
        return "0"
    return ("k" if sends.startswith("Op") else "kCall_") + (sends or call.symbol)


def emit(model, args):
    lines = ["namespace info {"]
    rows = [(c.symbol, sent_id(c), c.sig.name, c.context) for c in model.calls if c.has_body]
    rows += [(op.symbol, "k" + op.symbol, op.symbol, op.context) for op in model.operations if not op.event]
    for symbol, request, name, context in rows:
        lines.append(f"inline constexpr CallInfo k_{symbol}{{{request}, {text.c_string(name)}, {CONTEXT[context]}}};")
    lines += ["}  // namespace info"]
    return {"call_info.gen.h": text.header("client/core/call_info.gen.h",
                                           ['"client/core/call_info.h"', '"proto/api/call_ids.gen.h"'],
                                           "\n".join(lines), "cuda_remote::client")}
