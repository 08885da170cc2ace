# SPDX-License-Identifier: Apache-2.0
"""proto/calls/LOCK: every field that was ever on the wire. A number once used keeps its name and type for good."""

from proto_gen import lint

HEADER = ("# Every message field that was ever on the wire: message, number, type, name. Written by proto/gen/update.sh, which only\n"
          "# adds lines. Changing or reusing one breaks recorded logs and other versions.\n")


def present(model):
    entries = {}
    for message in lint.all_messages(model):
        for f in message.fields:
            kind = ("repeated " if f.repeated else "optional " if f.optional else "") + f.type
            entries[message.name, f.number] = f"{kind} {f.name}"
    for call in model.calls:
        entries["id", call.id] = call.symbol
    for op in model.operations:
        entries["id", op.id] = "Op" + op.name
    return entries


def read(path):
    entries = {}
    with open(path, encoding="utf-8") as f:
        for line in f:
            line = line.strip()
            if line and not line.startswith("#"):
                message, number, rest = line.split(" ", 2)
                entries[message, int(number)] = rest
    return entries


def complaints(now, locked):
    """What `now` breaks of `locked`."""
    out = []
    for key, value in sorted(now.items(), key=str):
        if key in locked and locked[key] != value:
            out.append(f"{key[0]} {key[1]}: was '{locked[key]}', is '{value}'; take a new number")
        elif key not in locked:
            out.append(f"{key[0]} {key[1]}: '{value}' is not in the lock; run proto/gen/update.sh")
    # A message in use must not lose a field silently: its number stays locked, which is fine, so nothing to say.
    return out


def verify(model, path):
    problems = complaints(present(model), read(path))
    if problems:
        raise SystemExit("proto/calls/LOCK:\n" + "\n".join(problems[:20]))


def emit(model, args):
    entries = present(model)
    if args.lock:
        locked = read(args.lock)
        changed = [p for p in complaints(entries, locked) if "take a new number" in p]
        if changed:
            raise SystemExit("proto/calls/LOCK:\n" + "\n".join(changed))
        entries = {**locked, **entries}
    lines = [f"{m} {n} {rest}" for (m, n), rest in sorted(entries.items(), key=lambda e: (e[0][0], e[0][1]))]
    return {"LOCK": HEADER + "\n".join(lines) + "\n"}
