# SPDX-License-Identifier: Apache-2.0
"""Checks of the joined description that no single emitter could make. check() returns a list of complaints."""

import re

PROTO_TYPES = {"bool", "uint32", "int32", "uint64", "int64", "float", "double", "string", "bytes", "handles"}


def check(model):
    problems = list(model.errors)
    for call in model.calls:
        problems += [f"{call.symbol}: {e}" for e in call.errors]
    ids = {}
    for call in model.calls:
        for number, symbol in [(call.id, call.symbol)] + (
                [(call.sig.per_thread.id, call.symbol + "_" + call.per_thread)] if call.per_thread else []):
            if number in ids:
                problems.append(f"{symbol}: call number {number} is also {ids[number]}'s")
            ids[number] = symbol
            if not 0 < number < 0x10000:
                problems.append(f"{symbol}: call number {number} is out of range")
    known = {m.name for m in model.messages}
    numbers = set()
    for op in model.operations:
        if op.number in numbers:
            problems.append(f"operation {op.name}: number {op.number} is used twice")
        numbers.add(op.number)
    for message in all_messages(model):
        seen_numbers, seen_names = set(), set()
        for field in message.fields:
            if field.type not in PROTO_TYPES and field.type not in known:
                problems.append(f"{message.name}.{field.name}: unknown type {field.type}")
            if field.number in seen_numbers or field.number < 1:
                problems.append(f"{message.name}.{field.name}: field number {field.number} is used twice or invalid")
            if field.name in seen_names:
                problems.append(f"{message.name}.{field.name}: two fields of this name")
            if not re.fullmatch(r"[A-Za-z_]\w*", field.name):
                problems.append(f"{message.name}.{field.name}: not a name")
            seen_numbers.add(field.number)
            seen_names.add(field.name)
    for call in model.calls:
        row = call.row
        if row is None:
            continue
        for name in ([row.destroys.param] if row.HasField("destroys") else []):
            p = call.param(name)
            if call.has_wire and (p is None or p.role not in ("handle", "stream")) and not row.HasField("wire"):
                problems.append(f"{call.symbol}: destroys {name}, which is no handle parameter")
        if row.HasField("modifies") and row.modifies.param != "context" and not row.HasField("wire"):
            p = call.param(row.modifies.param)
            if p is None or (call.has_wire and p.role not in ("handle", "stream")):
                problems.append(f"{call.symbol}: modifies {row.modifies.param}, which is no handle parameter")
        if row.cached and (row.creates or row.refers or getattr(row, "async") or row.HasField("modifies")):
            problems.append(f"{call.symbol}: cached, but it does more than to ask")
        if row.modifies.undoes:
            undone = model.by_symbol(row.modifies.undoes)
            if undone is None or undone.row is None or undone.row.modifies.key != row.modifies.key:
                problems.append(f"{call.symbol}: undoes {row.modifies.undoes}, which is no modification of the same key")
        if getattr(row, "async") and call.reply is not None and call.reply.fields:
            problems.append(f"{call.symbol}: async, but it has results")
        if row.HasField("device_range") and (call.param(row.device_range.address) is None or not getattr(row, "async")):
            problems.append(f"{call.symbol}: device_range names no parameter of an async call")
        if row.per_thread_forward and model.by_symbol(row.per_thread_forward) is None:
            problems.append(f"{call.symbol}: per_thread_forward names no call")
    return problems


def all_messages(model):
    for message in model.messages:
        yield message
    for op in model.operations:
        yield op.request
        if op.reply is not None:
            yield op.reply
    for call in model.calls:
        if call.has_wire:
            yield call.request
            yield call.reply
