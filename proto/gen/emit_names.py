# SPDX-License-Identifier: Apache-2.0
"""proto/api/call_names.gen.h: names of calls and operations."""

from proto_gen import text


def emit(model, args):
    lines = ["// Name of a call id or operation, for messages; \"?\" if unknown.", "const char* CallIdName(uint32_t call);", ""]
    names = {c.id: c.symbol for c in model.calls}
    last = max(names)
    body = ["namespace {", "", f"const char* const kNames[{last + 1}] = {{"]
    body += [f"    {text.c_string(names[i]) if i in names else 'nullptr'}," for i in range(last + 1)]
    body += ["};", ""]
    ops = {o.number: o for o in model.operations}
    last_op = max(ops)
    body += [f"const char* const kOperationNames[{last_op + 1}] = {{"]
    body += [f"    {text.c_string('Op' + ops[i].name) if i in ops else 'nullptr'}," for i in range(last_op + 1)]
    body += ["};", "", "}  // namespace", "", "const char* CallIdName(uint32_t call) {",
             "  const char* name = nullptr;",
             f"  if (call >= kFirstOperation && call - kFirstOperation <= {last_op}) name = kOperationNames[call - kFirstOperation];",
             f"  if (call <= {last}) name = kNames[call];",
             '  return name == nullptr ? "?" : name;', "}", ""]
    return {"call_names.gen.h": text.header("proto/api/call_names.gen.h", ["<cstdint>", '"proto/api/call_ids.gen.h"'],
                                            "\n".join(lines), "cuda_remote"),
            "call_names.gen.cc": text.source(['"proto/api/call_names.gen.h"'], "\n".join(body), "cuda_remote")}
