# SPDX-License-Identifier: Apache-2.0
"""The default rules, and how a semantics row overrides them. They refuse to guess: what no rule explains is an error.

Roles that a parameter can get:
  scalar       by value, or an address of the GPU       in
  handle       by value                                 in, translated
  stream       by value                                 in, per-thread default streams substituted
  string       const char*                              in
  struct       pointer to one struct, or by value       in, as bytes, handles inside translated
  value        pointer to one scalar                    in
  array        pointer to `count` elements              in or out
  handles      pointer to `count` handles               in or out
  bytes        untyped memory of `count` bytes          in or out
  out          pointer to one scalar                    out
  out_struct   pointer to one struct                    out
  inout        pointer to one scalar or struct          both ways
  creates      pointer to one handle                    out, a new object
  refers       pointer to one handle                    out, an object that the client knows
  null         must be NULL or zero
"""

import re

GETTER = re.compile(r"^cu\w*?(Get|Query|Can|Is|Max|Min|Create|Range)")  # of any call: a word, not a name
COUNT = re.compile(r"^(count|n[A-Z]\w*|num\w*|nb\w*|len\w*|length|size)$")

INTEGER_WIRE = {
    "int": "int32", "char": "int32", "unsigned int": "uint32", "unsigned": "uint32", "unsigned char": "uint32",
    "unsigned short": "uint32", "cuuint32_t": "uint32", "size_t": "uint64", "unsigned long long": "uint64",
    "cuuint64_t": "uint64", "long long": "int64",
}


def wire_type(model, base):
    """Wire type of a scalar C type; None if it is not one."""
    cls, representation = model.types.get(base, ("UNKNOWN", ""))
    if cls == "INTEGER":
        return INTEGER_WIRE.get(representation)
    if cls == "ENUM":
        return "int32"
    if cls == "FLOAT":
        return base
    return None


# Objects whose context a call takes that names them, where the thread has none.
OF_A_CONTEXT = ("Stream", "Event", "Function", "Module")


def context_of(model, call):
    """Whose context the call is made in, as far as its parameters say."""
    if call.family.no_context:
        return "none"
    named = (model.handles[p.base].kind for p in call.params if p.stars == 0 and p.base in model.handles)
    return "object" if any(kind in OF_A_CONTEXT for kind in named) else "thread"


def plan(model, call, schema):
    """Decides status, roles and messages of one call."""
    from proto_gen.model import Field, Message, fields_from
    row = call.row
    call.context = context_of(model, call)
    if row is not None and row.context:
        call.context = {schema.Row.NEEDED: "thread", schema.Row.NOT_NEEDED: "none", schema.Row.OF_OBJECT: "object"}[row.context]
    if row is not None and row.unsupported:
        call.status, call.reason = "unsupported", row.unsupported
        return
    if row is not None and row.forward:
        call.status = "forward"
        target = model.by_symbol(row.forward)
        if target is None or [p.type for p in target.params] != [p.type for p in call.params]:
            call.errors.append(f"forward: {row.forward} does not exist or has other parameters")
        return
    custom = row.custom if row is not None else schema.Row.NO
    call.status = {schema.Row.NO: "generated", schema.Row.CLIENT: "client", schema.Row.SERVER: "server",
                   schema.Row.BOTH: "both"}[custom]
    if row is not None and row.local:
        call.status = "local"
        if custom != schema.Row.CLIENT:
            call.errors.append("local: only with custom: CLIENT")
        return
    if row is not None and row.HasField("wire"):
        if custom != schema.Row.BOTH:
            call.errors.append("wire: only with custom: BOTH, since generated code knows the parameters only")
        call.request = Message(call.symbol + "_Request", fields_from(row.wire.request))
        call.reply = Message(call.symbol + "_Reply", fields_from(row.wire.reply))
        return
    assign_roles(model, call, row)
    if call.errors:
        return
    request, reply = [], []
    for p in call.params:
        number = p.index + 1
        if p.role in ("scalar", "stream", "value", "inout") and p.cls != "STRUCT":
            kind = "uint64" if p.role == "stream" or p.stars and p.role == "scalar" else wire_type(model, p.base)
            request.append(Field(p.name, kind, number, optional=p.role == "value" and p.optional))
            if p.role == "inout":
                reply.append(Field(p.name, kind, number))
        elif p.role == "handle":
            request.append(Field(p.name, "uint64", number))
        elif p.role == "string":
            request.append(Field(p.name, "bytes", number, optional=p.optional))
        elif p.role in ("struct", "inout"):
            request.append(Field(p.name, "bytes", number, optional=p.optional, comment=p.base))
            if p.role == "inout":
                reply.append(Field(p.name, "bytes", number, comment=p.base))
        elif p.role in ("array", "handles"):
            kind = "bytes" if p.role == "array" else "handles"
            if p.direction == "in":
                request.append(Field(p.name, kind, number, optional=p.optional and kind == "bytes", comment=p.base + "[]"))
                if p.optional and kind == "handles":
                    request.append(Field("has_" + p.name, "bool", number + 32))
            else:
                request.append(Field("want_" + p.name, "bool", number))
                reply.append(Field(p.name, kind, number, comment=p.base + "[]"))
        elif p.role == "bytes":
            (request if p.direction == "in" else reply).append(
                Field(p.name, "bytes", number, optional=p.optional and p.direction == "in"))
        elif p.role == "out":
            reply.append(Field(p.name, wire_type(model, p.base), number))
        elif p.role == "out_struct":
            reply.append(Field(p.name, "bytes", number, comment=p.base))
        elif p.role == "creates":
            request.append(Field(p.name, "uint64", number, comment="new virtual handle"))
        elif p.role == "refers":
            reply.append(Field(p.name, "uint64", number))
        elif p.role == "count":
            request.append(Field(p.name, wire_type(model, p.base), number))
            reply.append(Field(p.name, wire_type(model, p.base), number))
    call.request = Message(call.symbol + "_Request", request)
    call.reply = Message(call.symbol + "_Reply", reply)


def struct_rule(model, call, p):
    rule = model.structs.get(p.base)
    if rule is None:
        call.errors.append(f"{p.name}: struct {p.base} has no rule in structs.textproto")
    elif rule.custom:
        call.errors.append(f"{p.name}: struct {p.base} needs a custom body ({rule.custom})")
    p.struct = rule


def assign_roles(model, call, row):
    named = set()

    def take(name):
        p = call.param(name)
        if p is None:
            call.errors.append(f"row names {name}, which is no parameter")
        elif name in named:
            call.errors.append(f"row gives {name} two roles")
        named.add(name)
        return p

    optional = set(row.optional) if row is not None else set()
    if row is not None:
        for c in row.creates:
            p = take(c.param)
            if p:
                p.role, p.kind, p.parent, p.depends = "creates", c.kind, c.parent or "context", tuple(c.depends)
        for r in row.refers:
            p = take(r.param)
            if p:
                p.role, p.kind = "refers", r.kind
        for name in row.out:
            p = take(name)
            if p:
                p.role = "out_struct" if p.cls == "STRUCT" else "out"
        for name in row.inout:
            p = take(name)
            if p:
                p.role = "inout"
        for name in getattr(row, "in"):
            p = take(name)
            if p:
                p.role = "struct" if p.cls == "STRUCT" else "value"
        for a in row.array:
            p = take(a.param)
            if p:
                p.role = "handles" if p.base in model.handles else "array"
                p.direction = "out" if a.direction else "in"
                p.count, p.optional = a.count, a.optional
                p.kind = model.handles[p.base].kind if p.role == "handles" else ""
                if a.count.startswith("*"):
                    counter = call.param(a.count[1:])
                    if counter:
                        counter.role = "count"
                        named.add(counter.name)
        for b in row.bytes:
            p = take(b.param)
            if p:
                p.role, p.count, p.direction, p.optional = "bytes", b.size, "out" if b.direction else "in", b.optional
        for name in row.device_address:
            p = take(name)
            if p:
                p.role = "scalar"
        for name in row.null:
            p = take(name)
            if p:
                p.role = "null"
    for p in call.params:
        if p.name in optional:
            p.optional = True
        if not p.role:
            default_role(model, call, p)
        if p.role == "stream" and row is not None and row.destroys.param == p.name:
            p.role = "handle"  # the default streams cannot be destroyed
        if p.role in ("struct", "out_struct", "inout", "array") and p.cls == "STRUCT":
            struct_rule(model, call, p)
        if p.base in model.handles and model.handles[p.base].error:
            p.error = model.handles[p.base].error
        if p.role in ("handle", "stream") and p.base in model.handles:
            handle = model.handles[p.base]
            p.kind, p.also = handle.kind, handle.also
            if not handle.kind:
                call.errors.append(f"{p.name}: there are no objects of type {p.base} here")


def default_role(model, call, p):
    others = [q for q in call.params if q is not p]
    if p.stars == 0:
        if p.base in model.handles:
            p.role = "stream" if model.handles[p.base].kind == "Stream" else "handle"
        elif p.cls in ("INTEGER", "ENUM", "FLOAT"):
            p.role = "scalar"
        elif p.cls == "STRUCT":
            p.role = "struct"
        else:
            call.errors.append(f"{p.name}: no rule for a {p.cls.lower()} of type {p.type}")
    elif p.stars == 1 and p.const and p.base == "char":
        p.role = "string"
    elif p.stars == 1 and p.const and p.cls == "STRUCT":
        if any(COUNT.match(q.name) and q.stars == 0 for q in others):
            call.errors.append(f"{p.name}: one {p.base} or several? there is a count beside it")
        p.role = "struct"
    elif p.stars == 1 and not p.const and p.base in model.handles:
        call.errors.append(f"{p.name}: a handle goes out; say creates or refers")
    elif p.stars == 1 and not p.const and p.cls in ("INTEGER", "ENUM", "FLOAT") and p.base != "char":
        if any(COUNT.match(q.name) and q.stars == 0 for q in others):
            call.errors.append(f"{p.name}: one {p.base} or several? there is a count beside it")
        elif not GETTER.match(call.symbol):
            call.errors.append(f"{p.name}: a result or an argument? the call's name does not say that it gets something")
        p.role = "out"
    else:
        call.errors.append(f"{p.name}: no rule for {p.type}")
