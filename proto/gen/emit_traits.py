# SPDX-License-Identifier: Apache-2.0
"""proto/api/call_traits.gen.h: the facts of each call and operation, one row for each."""

from proto_gen import text

# Members of CallTraits (proto/api/call_traits.h) with an enum of their own, and the bits of its flags.
ENUMS = (("work", "Work"), ("completes", "Completes"), ("capture", "Capture"), ("events", "Events"), ("sharing", "Sharing"))
FLAGS = ("only_named_memory", "record_needs_memory", "reads_no_managed", "not_urgent", "event_itself", "reply_may_differ", "in_pieces",
         "setting_in_questions", "recorded_if_named", "must_succeed", "launches_kernels", "moves_shared_memory",
         "memory_of_any_gpu", "follows_flushes")
# What is not stated counts as this (lint.py says where it has to be).
UNSTATED = {"completes": "NO_WORK", "capture": "OBSTACLE", "events": "NO_EVENTS"}


def constant(name):
    """RECORDS_ANY: kRecordsAny."""
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def value_name(model, traits, member, enum):
    number = getattr(traits, member)
    if number == 0 and member in UNSTATED:
        return UNSTATED[member]
    return model.schema.Traits.DESCRIPTOR.enum_types_by_name[enum].values_by_number[number].name


def table_row(model, one):
    never = getattr(one, "row", None) is not None and one.row.replay
    if one.traits is None and not never:
        return "{}"
    traits = one.traits if one.traits is not None else model.schema.Traits()
    parts = [f"{enum}::{constant(value_name(model, traits, member, enum))}" for member, enum in ENUMS]
    keys = [f.number for f in one.request.fields if f.name == "key" and traits.sharing]
    parts.append(str(keys[0] if keys else 0))
    flags = [constant(flag) for flag in FLAGS if getattr(traits, flag)]
    if never:
        flags.append("kNotReplayable")
    parts.append(" | ".join(flags) or "0")
    return "{" + ", ".join(parts) + "}"


def table(model, name, ones, last):
    rows = {number: (one.symbol, table_row(model, one)) for number, one in ones}
    lines = [f"inline constexpr CallTraits {name}[{last + 1}] = {{"]
    gap = None
    for number in range(last + 1):
        if number in rows:
            lines.append(f"    {rows[number][1]},  // {number} {rows[number][0]}")
            gap = None
        elif gap is None or len(lines[gap]) > 110:
            gap = len(lines)
            lines.append("    {},")
        else:
            lines[gap] += " {},"
    lines += ["};", ""]
    return lines


def emit(model, args):
    calls = [(c.id, c) for c in model.calls if c.has_wire]
    operations = [(o.number, o) for o in model.operations if not o.event]
    last, last_op = max(c.id for c in model.calls), max(o.number for o in model.operations)
    lines = ["// Indexed by call id. Numbers without a request: what is safe of a request that nobody knows."]
    lines += table(model, "kCallTraits", calls, last)
    lines += ["// Indexed by the operation's number."]
    lines += table(model, "kOperationTraits", operations, last_op)
    lines += ["// The facts of a request, by call id.", "constexpr const CallTraits& TraitsOf(uint32_t call) {",
              f"  if (call <= {last}) return kCallTraits[call];",
              f"  return kOperationTraits[call >= kFirstOperation && call - kFirstOperation <= {last_op} ? call - kFirstOperation : 0];",
              "}"]
    return {"call_traits.gen.h": text.header("proto/api/call_traits.gen.h", ['"proto/api/call_traits.h"', '"proto/frame/frame.h"'],
                                             "\n".join(lines), "cuda_remote")}
