# SPDX-License-Identifier: Apache-2.0
"""server/dispatch: a handler for each call and operation, and the interface of the hand-written ones."""

from proto_gen import text

KIND = "Kind::k"


def custom_handlers(model):
    """(member of CustomCalls, message) of each hand-written handler: calls first, then our own operations."""
    return ([(c.member, c.symbol) for c in model.calls if c.server_custom] +
            [("Op" + op.name, "Op" + op.name) for op in model.operations if not op.event])


def parameters(message):
    return ["const Request& request", f"const wire::{message}_Request& in", f"wire::{message}_Reply* out", "ReplyBuilder* reply"]


def custom_header(model):
    lines = ["// The hand-written handlers, which the worker implements (Session::custom). A generated handler decodes the request into",
             "// `in` and calls the function. The views in `in` are valid until that function returns. What it leaves in *out is",
             "// encoded into the reply when it returns, unless it deferred (Session::Defer). A function whose views in *out point to",
             "// its own locals encodes by itself: out->Encode(&reply->message).",
             "class CustomCalls {", " public:", "  virtual ~CustomCalls() = default;"]
    lines += ["  " + text.wrap(f"virtual CUresult {member}(", parameters(message), ") = 0;").replace("\n", "\n  ")
              for member, message in custom_handlers(model)]
    lines += ["};"]
    includes = ["<cuda.h>", '"proto/codec/calls.gen.h"', '"proto/codec/operations.gen.h"', '"server/dispatch/session.h"']
    return text.header("server/dispatch/custom_calls.gen.h", includes, "\n".join(lines), "cuda_remote::server")


def wrapper(name, message, target, empty_reply):
    return [f"CUresult Handle_{name}(Session& session, const Request& request, ReplyBuilder* reply) {{",
            f"  wire::{message}_Request in;",
            "  if (!in.Decode(request.message)) return kMalformedRequest;",
            f"  wire::{message}_Reply out;",
            f"  const CUresult rc = {target}(request, in, &out, reply);",
            "  if (!reply->deferred && reply->message.empty()) out.Encode(&reply->message);" if not empty_reply else "  (void)out;",
            "  return rc;", "}", ""]


def count_expression(call, p):
    """C++ expression for an array's length on the server, over the local variables of the handler."""
    return p.count.replace("*", "")


def handle_lookup(kind, also, source, target, ctype):
    cond = f"session.Real({KIND}{kind}, {source}, &{target})"
    if also:
        cond = f"({cond} || session.Real({KIND}{also}, {source}, &{target}))"
    return cond


def struct_handles(p, n, to_real):
    """Statements that translate the handles inside a struct `n`."""
    lines = []
    for h in (p.struct.handle if p.struct else []):
        member = f"{n}.{h.member}"
        cond = f"({h.when.replace('s.', n + '.')})" if h.when else ""
        if to_real:
            check = (f"!session.Real({KIND}{h.kind}, uint64_t({member}), &{member})")
            if h.optional:
                check = f"{member} != nullptr && {check}"
            cond_text = f"{cond} && {check}" if cond else check
            lines.append(f"  if ({cond_text}) return CUDA_ERROR_INVALID_HANDLE;")
        else:
            cond_text = f"if {cond} " if cond else ""
            lines.append(f"  {cond_text}{member} = (decltype({member}))session.Virtual({KIND}{h.kind}, uint64_t({member}));")
    return lines


def handler(call):
    pre, args, post = [], [], []
    first = []  # scalars come first: array lengths are expressions over them
    row = call.row
    for p in call.params:
        n = p.name
        value = p.base
        if p.role == "scalar":
            first.append(f"  const auto {n} = ({p.type})in.{n};")
            args.append(n)
        elif p.role == "stream":
            pre.append(f"  CUstream {n} = nullptr;")
            pre.append(f"  if (!session.RealStream(in.{n}, &{n})) return CUDA_ERROR_INVALID_HANDLE;")
            args.append(n)
        elif p.role == "handle":
            pre.append(f"  {value} {n} = {{}};")
            guard = f"in.{n} != 0 && " if p.optional else ""
            pre.append(f"  if ({guard}!{handle_lookup(p.kind, p.also, 'in.' + n, n, value)}) return {p.error};")
            args.append(n)
        elif p.role == "string":
            pre.append(f"  const std::string {n}(in.{n});")
            args.append(f"in.has_{n} ? {n}.c_str() : nullptr" if p.optional else f"{n}.c_str()")
        elif p.role in ("struct", "inout") and p.cls == "STRUCT":
            pre.append(f"  {value} {n} = {{}};")
            has = f"in.has_{n}" if p.optional else ""
            pre.append(f"  if ({has + ' && ' if has else ''}!CopyExactly(in.{n}, &{n}, sizeof {n})) return kMalformedRequest;")
            translated = struct_handles(p, n, True)
            if has and translated:
                pre.append(f"  if ({has}) {{")
                pre += ["  " + line for line in translated]
                pre.append("  }")
            else:
                pre += translated
            for member in (p.struct.null if p.struct else []):
                pre.append(f"  {n}.{member} = nullptr;")
            if p.stars == 0:
                args.append(n)
            else:
                args.append(f"{has} ? &{n} : nullptr" if has else f"&{n}")
            if p.role == "inout":
                post.append(f"  out.{n} = wire::BytesOf({n});")
        elif p.role == "value":
            pre.append(f"  {value} {n} = ({value})in.{n};")
            args.append(f"in.has_{n} ? &{n} : nullptr" if p.optional else f"&{n}")
        elif p.role == "inout":
            pre.append(f"  {value} {n} = ({value})in.{n};")
            args.append(f"&{n}")
            post.append(f"  out.{n} = (decltype(out.{n})){n};")
        elif p.role == "count":
            first.append(f"  {value} {n} = ({value})in.{n};")
            args.append(f"&{n}")
            post.append(f"  out.{n} = (decltype(out.{n})){n};")
        elif p.role in ("array", "handles") and p.direction == "in":
            has = f"in.has_{n}" if p.optional else ""
            pre.append(f"  std::vector<{value}> {n};")
            copy = "CopyHandles(session, " + (f"{KIND}{p.kind}, " if p.role == "handles" else "") if p.role == "handles" else "CopyArray("
            guard = f"{has} && " if has else ""
            result = p.error if p.role == "handles" else "kMalformedRequest"
            pre.append(f"  if ({guard}!{copy}in.{n}, {count_expression(call, p)}, &{n})) return {result};")
            args.append(f"{has} ? {n}.data() : nullptr" if has else f"{n}.data()")
        elif p.role in ("array", "handles"):
            count = p.count.replace("*", "")
            pre.append(f"  std::vector<{value}> {n};")
            pre.append(f"  if (in.want_{n} && !Room({count}, &{n})) return kMalformedRequest;")
            args.append(f"in.want_{n} ? {n}.data() : nullptr")
            if p.role == "array":
                post.append(f"  if (in.want_{n}) out.{n} = Filled({n}, {count});")
            else:
                post.append(f"  std::string {n}_virtual;")
                post.append(f"  if (in.want_{n} && !VirtualHandles(session, {KIND}{p.kind}, {n}, {count}, &{n}_virtual)) "
                            f"return UnknownHandle(request);")
                post.append(f"  out.{n} = {n}_virtual;")
        elif p.role == "bytes" and p.direction == "in":
            pre.append(f"  std::vector<char> {n}(in.{n}.begin(), in.{n}.end());")
            pre.append(f"  if ({n}.size() != size_t({size_expression(p)})) return kMalformedRequest;")
            args.append(f"{n}.data()")
        elif p.role == "bytes":
            pre.append(f"  std::vector<char> {n}(size_t({size_expression(p)}));")
            args.append(f"{n}.data()")
            post.append(f"  out.{n} = {{{n}.data(), {n}.size()}};")
        elif p.role == "out":
            pre.append(f"  {value} {n} = {{}};")
            args.append(f"&{n}")
            post.append(f"  out.{n} = (decltype(out.{n})){n};")
        elif p.role == "out_struct":
            pre.append(f"  {value} {n} = {{}};")
            args.append(f"&{n}")
            post += struct_handles(p, n, False)
            post.append(f"  out.{n} = wire::BytesOf({n});")
        elif p.role == "creates":
            pre.append(f"  if (!session.MayBind({KIND}{p.kind}, in.{n})) return kMalformedRequest;")
            pre.append(f"  {value} {n} = {{}};")
            args.append(f"&{n}")
            parent = {"context": "session.CurrentContext()", "none": "0"}.get(p.parent, f"in.{p.parent}")
            post.append(f"  session.Bind({KIND}{p.kind}, in.{n}, (uint64_t){n}, {parent});")
        elif p.role == "refers":
            pre.append(f"  {value} {n} = {{}};")
            args.append(f"&{n}")
            post.append(f"  out.{n} = session.Virtual({KIND}{p.kind}, (uint64_t){n});")
            post.append(f"  if ({n} != {{}} && out.{n} == 0) return UnknownHandle(request);".replace("!= {}", "!= nullptr"))
        elif p.role == "null":
            args.append("{}")
        else:
            raise SystemExit(f"{call.symbol}: role '{p.role}' of {n} has no handler code")
    if row.HasField("destroys"):
        post.append(f"  session.Unbind(in.{row.destroys.param});")
    name = call.symbol
    lines = [f"CUresult Handle_{name}(Session& session, const Request& request, ReplyBuilder* reply) {{",
             f"  wire::{name}_Request in;", "  if (!in.Decode(request.message)) return kMalformedRequest;"]
    lines += first + pre
    if row.HasField("device_range"):
        # Small allocations share pages, so the driver does not see where one ends.
        lines.append(f"  if (!session.MayUse({row.device_range.address}, {row.device_range.bytes})) return CUDA_ERROR_INVALID_VALUE;")
    lines.append(text.wrap(f"  const CUresult rc = session.driver().{call.member}(", args, ");", "      "))
    if call.reply.fields or post:
        lines.append("  if (rc != CUDA_SUCCESS) return rc;")
    if call.reply.fields:
        lines.append(f"  wire::{name}_Reply out;")
    lines += post
    if call.reply.fields:
        lines.append("  out.Encode(&reply->message);")
    else:
        lines.append("  (void)reply;")
    lines += ["  return rc;", "}", ""]
    return lines


def size_expression(p):
    """The size of untyped memory: a number, a parameter, or a named function of parameters (runtime.h)."""
    function, _, rest = p.count.partition("(")
    if not rest:
        return p.count
    return "".join(w.capitalize() for w in function.split("_")) + "(" + rest


def family_file(model, family):
    lines = []
    for c in model.family_calls(family.name):
        if not c.has_wire:
            continue
        lines += ["// " + describe(c)]
        if c.server_custom:
            lines += wrapper(c.symbol, c.symbol, f"session.custom().{c.member}", not c.reply.fields)
        else:
            lines += handler(c)
    includes = ['"server/dispatch/runtime.h"', f'"proto/codec/{family.name}.gen.h"', '"proto/codec/wire.h"',
                '"server/dispatch/custom_calls.gen.h"', '"server/dispatch/handlers.gen.h"']
    return text.source(includes, "\n".join(lines), "cuda_remote::server")


def describe(call):
    row = call.row
    facts = [f"call {call.id}", "custom body" if call.server_custom else "by the rules"]
    facts += [f"creates {c.kind}" for c in row.creates]
    if row.HasField("destroys"):
        facts.append(f"destroys {row.destroys.param}")
    return f"{call.symbol}: " + ", ".join(facts)


def emit(model, args):
    out = {"custom_calls.gen.h": custom_header(model)}
    lines = [f"CUresult Handle_{c.symbol}(Session& session, const Request& request, ReplyBuilder* reply);"
             for c in model.calls if c.has_wire]
    lines += [f"CUresult Handle_Op{op.name}(Session& session, const Request& request, ReplyBuilder* reply);"
              for op in model.operations if not op.event]
    out["handlers.gen.h"] = text.header("server/dispatch/handlers.gen.h", ['"server/dispatch/session.h"'], "\n".join(lines), "cuda_remote::server")
    for family in model.families:
        out[f"dispatch_{family.name}.gen.cc"] = family_file(model, family)
    lines = []
    for op in model.operations:
        if not op.event:
            lines += wrapper(f"Op{op.name}", f"Op{op.name}", f"session.custom().Op{op.name}", not op.reply.fields)
    out["dispatch_operations.gen.cc"] = text.source(
        ['"server/dispatch/runtime.h"', '"proto/codec/operations.gen.h"', '"server/dispatch/custom_calls.gen.h"', '"server/dispatch/handlers.gen.h"'],
        "\n".join(lines), "cuda_remote::server")
    last = max(c.id for c in model.calls)
    lines = ["namespace {", "", "struct Entry {", "  const char* name;", "  Handler handler;", "};", "",
             "// Indexed by call id.", f"const Entry kCalls[{last + 1}] = {{"]
    by_id = {c.id: c for c in model.calls}
    by_id.update({c.sig.per_thread.id: c for c in model.calls if c.per_thread and c.sig.per_thread.id <= last})
    for number in range(last + 1):
        c = by_id.get(number)
        name = text.c_string(c.symbol) if c else "nullptr"
        own = c is not None and c.id == number and c.has_wire
        lines.append(f"    {{{name}, {'Handle_' + c.symbol if own else 'nullptr'}}},")
    last_op = max(o.number for o in model.operations)
    lines += ["};", "", f"const Entry kOperations[{last_op + 1}] = {{"]
    ops = {o.number: o for o in model.operations}
    for number in range(last_op + 1):
        o = ops.get(number)
        name = text.c_string("Op" + o.name) if o else "nullptr"
        lines.append(f"    {{{name}, {'Handle_Op' + o.name if o and not o.event else 'nullptr'}}},")
    lines += ["};", "", "const Entry* Find(uint32_t call) {",
              "  if (call >= kFirstOperation) {", "    const uint32_t index = call - kFirstOperation;",
              "    return index < sizeof kOperations / sizeof *kOperations ? &kOperations[index] : nullptr;", "  }",
              "  return call < sizeof kCalls / sizeof *kCalls ? &kCalls[call] : nullptr;", "}", "", "}  // namespace", "",
              "Handler FindHandler(uint32_t call) {", "  const Entry* entry = Find(call);",
              "  return entry == nullptr ? nullptr : entry->handler;", "}", "",
              "const char* CallName(uint32_t call) {", "  const Entry* entry = Find(call);",
              '  return entry == nullptr || entry->name == nullptr ? "?" : entry->name;', "}", ""]
    out["dispatch.gen.cc"] = text.source(['"server/dispatch/handlers.gen.h"'], "\n".join(lines), "cuda_remote::server")
    return out
