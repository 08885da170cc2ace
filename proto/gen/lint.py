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
            problems.append(f'{call.symbol}: semantics.textproto has no row for it. Add `call {{ name: "{call.symbol}" effect: ASKS }}` if it '
                            "only asks and the default rules understand its parameters, else what proto/api/README.md says of its "
                            'kind; or `unsupported: "why"`')
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
        problems += [f"{call.symbol}: {what}" for what in check_effect(model, call)]
    return problems + check_traits(model)


def check_effect(model, call):
    """Whether a request's row says what the request changes, and what has to be known of that kind. Nothing here has a default."""
    row = call.row
    effects = model.schema.Row.DESCRIPTOR.enum_types_by_name["Effect"].values_by_number
    stated = effects[row.effect].name if row.effect else ""
    if not call.has_wire:
        if stated and not call.errors:
            yield "states `effect`, but no request is sent that it could be about"
        return
    traits = call.traits if call.traits is not None else model.schema.Traits()
    work = model.schema.Traits.Work
    shown = [name for name, shows in (
        ("creates", bool(row.creates)), ("destroys", row.HasField("destroys")), ("modifies", row.HasField("modifies")),
        ("cached", row.cached), ("work", traits.work in (work.Value("WAITS"), work.Value("ASKS")))) if shows]
    if not stated and not shown:
        yield ("its row must state what it changes, since that has no safe default: `effect: ASKS` (nothing), `WORKS` (it gives the GPU "
               "work), `PASSES` (nothing that a restart must bring back), or what the log needs: `creates`, `destroys`, `modifies`, "
               "`effect: CREATES`, ...")
    if stated and shown:
        yield f"states `effect: {stated}`, but `{shown[0]}` says already what it changes"
    is_async = getattr(row, "async")
    if stated == "ASKS" and is_async:
        yield "is sent without waiting, so it cannot only ask"
    if stated in ("CREATES", "MODIFIES", "DESTROYS") and not call.client_custom:
        yield f"has no body in the client that could tell the log: state `{stated.lower()}` instead of `effect`"
    if stated == "DESTROYS" and not is_async and not traits.completes:
        yield "may wait for the GPU: its traits must state `completes`, what the host knows to be complete after it"
    if stated == "WORKS":
        # What the parameters do not show: a hand-written message, or a graph with anything in it.
        hides = row.HasField("wire") or takes(model, call, "GraphExec")
        if hides and not traits.events:
            yield "gives the GPU work that its parameters do not show: its traits must state `events`, which it records or waits for"
        recorded = traits.capture == model.schema.Traits.RECORDED
        if recorded and row.HasField("wire") and not traits.names:
            yield "is recorded in a capture: its traits must state what its message `names`, memory above all"


# What a field must be to hold this.
HELD_IN = {
    "ADDRESS": "uint64", "FILL": "bytes", "COPY_2D": "bytes", "COPY_3D": "bytes", "COPY_3D_PEER": "bytes",
    "MEMORY_OPERATIONS": "bytes",
    "NODE": "NodeParams", "FUNCTION": "uint64", "EVENT": "uint64", "EXTERNAL_FLAG": "uint32",
}
NOT_MEMORY = ("FUNCTION", "EVENT", "EXTERNAL_FLAG")


def takes(model, call, kind):
    """Whether the call takes a handle of this kind."""
    return any(p.stars == 0 and p.base in model.handles and model.handles[p.base].kind == kind for p in call.params)


def check_traits(model):
    """Which facts a call must state, and which do not go together. What a wrong default would do is said in schema.proto."""
    problems = []
    traits_type = model.schema.Traits
    empty = traits_type()
    holds = model.schema.Names.DESCRIPTOR.enum_types_by_name["Holds"].values_by_number

    def complain(one, what):
        problems.append(f"{one.symbol}: {what}")

    for call in model.calls:
        if call.traits is not None and not call.has_wire:
            complain(call, "has traits, but no message that they could be about")
    sendable = {one.symbol for one in model.requests()} | {"", "nothing"}
    for call in model.calls:
        if call.row is not None and (call.row.sends not in sendable or call.row.sends and not call.client_custom):
            complain(call, f"sends {call.row.sends}, which is no request, or has no body of its own")
    for op in model.operations:
        if op.traits is not None and op.event:
            complain(op, "an event has no traits")
    for one in model.requests():
        traits = one.traits if one.traits is not None else empty
        fields = {f.name: f for f in one.request.fields}
        row = getattr(one, "row", None)
        is_call = hasattr(one, "params")
        in_stream = takes(model, one, "Stream") if is_call else "stream" in fields
        is_async = row is not None and getattr(row, "async")
        destroys = row is not None and row.HasField("destroys")
        if in_stream and not traits.capture:
            complain(one, "is for a stream: its traits must state `capture`, what it is in one that is being captured")
        if is_call and not is_async and (in_stream or destroys) and not traits.completes:
            complain(one, "may wait for the GPU: its traits must state `completes`, what the host knows to be complete after it")
        if is_call and is_async and takes(model, one, "Event") and not traits.events:
            complain(one, "names an event and is not waited for: its traits must state `events`")
        if traits.work == traits_type.WAITS and traits.completes != traits_type.WORK_AND_ERRORS:
            complain(one, "waits for work, so it completes WORK_AND_ERRORS")
        shared = "key" in fields and fields["key"].type == "bytes"
        if is_call and shared != bool(traits.sharing):
            complain(one, "`sharing` goes with a request that has a key, and only with one")
        memory = set()
        for names in traits.names:
            held = holds[names.holds].name
            if names.field not in fields or fields[names.field].type != HELD_IN[held]:
                complain(one, f"names {names.field}, which is no field of the request that can hold {held}")
            if held not in NOT_MEMORY:
                memory.add(names.field)
        for field in one.request.fields:
            if field.type == "NodeParams" and field.name not in memory:
                complain(one, f"its traits must name {field.name}, which holds a NODE")
        if traits.capture == traits_type.RECORDED and row is not None and row.HasField("device_range") and (
                row.device_range.address not in memory):
            complain(one, f"is recorded in a capture: its traits must name {row.device_range.address}")
        if (traits.only_named_memory or traits.record_needs_memory) and not memory:
            complain(one, "its traits speak of named memory, but name none")
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
