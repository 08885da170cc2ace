# SPDX-License-Identifier: Apache-2.0
"""proto/api/replay_policy.gen.h: what the log and the tools must know about a call's record."""

from proto_gen import text


def emit(model, args):
    never = [c for c in model.calls if c.row is not None and c.row.replay and c.has_wire]
    lines = ["// Calls whose record cannot be replayed: an object made or changed by one keeps a job from being checkpointed,",
             "// which is said by name before the checkpoint starts.",
             "constexpr bool Replayable(uint32_t call) {", "  switch (call) {"]
    lines += [f"    case kCall_{c.symbol}:" for c in never]
    lines += ["      return false;", "    default:", "      return true;", "  }", "}", "",
              "// Name of a call id or operation, for messages; \"?\" if unknown.", "const char* CallIdName(uint32_t call);", ""]
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
    return {"replay_policy.gen.h": text.header("proto/api/replay_policy.gen.h", ["<cstdint>", '"proto/api/call_ids.gen.h"'],
                                               "\n".join(lines), "cuda_remote"),
            "replay_policy.gen.cc": text.source(['"proto/api/replay_policy.gen.h"'], "\n".join(body), "cuda_remote")}
