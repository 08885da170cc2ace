# SPDX-License-Identifier: Apache-2.0
"""client/entry: one exported function for each entry point, the declarations of hand-written bodies, and the exports."""

from proto_gen import text
from proto_gen.emit_server import size_expression

KIND = "Kind::k"
CONTEXT = {"none": "ContextOf::kNone", "thread": "ContextOf::kThread", "object": "ContextOf::kObject"}


def impl_name(call):
    return ("Custom_" if call.client_custom else "Call_") + call.symbol


def object_key(p):
    """The log's name of the object in a parameter. Some parameters accept two kinds; the handle says which it is."""
    return f"ObjectOf({p.name + '_wire' if p.role == 'stream' else 'uint64_t(' + p.name + ')'})"


def parameters(call):
    parts = [f"{p.type} {p.name}" for p in call.params]
    if call.per_thread:
        parts.append("bool per_thread")
    return parts


def stub(model, call):
    """The body of a generated call."""
    pre, fill, post = [], [], []
    row = call.row
    deps = {}
    for p in call.params:
        n = p.name
        must = not p.optional
        if p.stars and p.role not in ("null", "scalar", "bytes", "array", "handles") and must:
            pre.append(f"  if ({n} == nullptr) return CUDA_ERROR_INVALID_VALUE;")
        if p.role == "scalar":
            fill.append(f"  in.{n} = (decltype(in.{n})){n};")
        elif p.role == "stream":
            flag = "per_thread" if call.per_thread else "false"
            pre.append(f"  uint64_t {n}_wire = 0;")
            pre.append(f"  if (CUresult rc = call.StreamToWire({n}, {flag}, &{n}_wire); rc != CUDA_SUCCESS) return rc;")
            fill.append(f"  in.{n} = {n}_wire;")
        elif p.role == "handle":
            none = "0" if p.cls == "INTEGER" else "nullptr"
            bad = f"!call.Valid({KIND}{p.kind}, {n})"
            if p.also:
                bad += f" && !call.Valid({KIND}{p.also}, {n})"
            if p.optional:
                bad = f"{n} != {none} && {bad}"
            if p.optional and p.kind == "Context":  # a replay is told which is the current one
                pre.append(f"  {n} = call.OrCurrent({n});")
            pre.append(f"  if ({bad}) return {p.error};")
            fill.append(f"  in.{n} = (uint64_t){n};")
        elif p.role == "string":
            if p.optional:
                fill.append(f"  if ((in.has_{n} = {n} != nullptr)) in.{n} = {n};")
            else:
                fill.append(f"  in.{n} = {n};")
        elif p.role in ("struct", "inout") and p.cls == "STRUCT":
            access = f"{n}->" if p.stars else f"{n}."
            for member in (p.struct.null if p.struct else []):
                guard = f"{n} != nullptr && " if p.optional else ""
                pre.append(f"  if ({guard}{access}{member} != nullptr) return Call::Unsupported(kInfo.name, "
                           f"{text.c_string(p.name + '->' + member + ' is not carried over')});")
            value = f"wire::BytesOf(*{n})" if p.stars else f"wire::BytesOf({n})"
            if p.optional:
                fill.append(f"  if ((in.has_{n} = {n} != nullptr)) in.{n} = {value};")
            else:
                fill.append(f"  in.{n} = {value};")
            if p.role == "inout":
                post.append(f"  if (!TakeExactly(out.{n}, {n}, sizeof *{n})) return kBadReply;")
        elif p.role in ("value", "inout"):
            if p.role == "value" and p.optional:
                fill.append(f"  if ((in.has_{n} = {n} != nullptr)) in.{n} = (decltype(in.{n}))*{n};")
            else:
                fill.append(f"  in.{n} = (decltype(in.{n}))*{n};")
            if p.role == "inout":
                post.append(f"  *{n} = ({p.base})out.{n};")
        elif p.role == "count":
            fill.append(f"  in.{n} = (decltype(in.{n}))*{n};")
        elif p.role in ("array", "handles") and p.direction == "in":
            count = p.count
            if p.optional:
                pre_check = f"  if ({n} != nullptr && !Fits({count}, sizeof *{n})) return TooLong(kInfo);"
            else:
                pre.append(f"  if ({n} == nullptr && ({count}) != 0) return CUDA_ERROR_INVALID_VALUE;")
                pre_check = f"  if (!Fits({count}, sizeof *{n})) return TooLong(kInfo);"
            pre.append(pre_check)
            if p.role == "handles":
                guard = f"{n} != nullptr && " if p.optional else ""
                pre.append(f"  if ({guard}!AllValid(call, {KIND}{p.kind}, {n}, {count})) return {p.error};")
            value = f"ArrayBytes({n}, {count})"
            if p.optional:
                fill.append(f"  if ((in.has_{n} = {n} != nullptr)) in.{n} = {value};")
            else:
                fill.append(f"  in.{n} = {value};")
        elif p.role in ("array", "handles"):
            if p.role == "handles" and p.kind == "GraphNode" and "NameNodesOf" not in "".join(pre):
                # The answer names nodes that the application may never have seen.
                owner = next(q.name for q in call.params if q.role == "handle")
                pre.append(f"  if (CUresult rc = NameNodesOf(call, uint64_t({owner})); rc != CUDA_SUCCESS) return rc;")
            if p.optional:
                fill.append(f"  in.want_{n} = {n} != nullptr;")
            else:
                pre.append(f"  if ({n} == nullptr) return CUDA_ERROR_INVALID_VALUE;")
                fill.append(f"  in.want_{n} = true;")
            take = "TakeArray"
            guard = f"{n} != nullptr && " if p.optional else ""
            post.append(f"  if ({guard}!{take}(out.{n}, {p.count}, {n})) return kBadReply;")
            if p.role == "handles" and p.count.startswith("*"):
                # What is offered and not needed becomes NULL.
                post.append(f"  if ({n} != nullptr) std::fill({n} + {p.count}, {n} + in.{p.count[1:]}, nullptr);")
        elif p.role == "bytes":
            size = size_expression(p)
            pre.append(f"  if ({n} == nullptr) return CUDA_ERROR_INVALID_VALUE;")
            if p.direction == "in":
                fill.append(f"  in.{n} = {{static_cast<const char*>(static_cast<const void*>({n})), size_t({size})}};")
            else:
                post.append(f"  if (!TakeExactly(out.{n}, {n}, size_t({size}))) return kBadReply;")
        elif p.role in ("out", "refers"):
            assign = f"*{n} = ({p.base})out.{n};"
            post.append(f"  if ({n} != nullptr) {assign}" if p.optional else f"  {assign}")
        elif p.role == "out_struct":
            guard = f"{n} != nullptr && " if p.optional else ""
            post.append(f"  if ({guard}!TakeExactly(out.{n}, {n}, sizeof *{n})) return kBadReply;")
        elif p.role == "creates":
            parent = {"context": "0", "none": "kNoParent"}.get(p.parent, f"uint64_t({p.parent})")
            fill.append(f"  const uint64_t {n}_handle = call.NewHandle({KIND}{p.kind}, {parent});")
            fill.append(f"  if ({n}_handle == 0) return CUDA_ERROR_OUT_OF_MEMORY;")
            fill.append(f"  in.{n} = {n}_handle;")
            depends = []
            for name in p.depends:
                q = call.param(name)
                depends.append(object_key(q))
            extra = ", {" + ", ".join(depends) + "}" if depends else ""
            post.append(f"  *{n} = ({p.base}){n}_handle;")
            post.append(f"  call.Created({{{KIND}{p.kind}, {n}_handle}}{extra});")
        elif p.role == "null":
            pre.append(f"  if ({n}) return Call::Unsupported(kInfo.name, {text.c_string(n + ' is not carried over')});")
        else:
            raise SystemExit(f"{call.symbol}: role '{p.role}' of {n} has no client code")
    if row is not None and row.HasField("destroys"):
        q = call.param(row.destroys.param)
        post.append(f"  call.Destroyed({object_key(q)});")
    if row is not None and row.HasField("modifies"):
        keys = [k for k in row.modifies.key if k != "*"]
        key = "0"
        if "*" in row.modifies.key:
            key = "UniqueKey()"
        elif keys:
            key = "Key(" + ", ".join(f"uint64_t({k})" for k in keys) + ")"
        modified = "CurrentContextKey(call)" if row.modifies.param == "context" else object_key(call.param(row.modifies.param))
        if row.modifies.undoes:
            post.append(f"  call.Undone({modified}, kCall_{row.modifies.undoes}, {key});")
        else:
            post.append(f"  call.Modified({modified}, {key});")
    is_async = row is not None and getattr(row, "async")
    lines = []
    lines.append(f"constexpr CallInfo kInfo_{call.symbol}{{kCall_{call.symbol}, {text.c_string(call.symbol)}, {CONTEXT[call.context]}}};")
    lines.append(text.wrap(f"CUresult Call_{call.symbol}(", parameters(call), ") {", "    "))
    lines.append(f"  const CallInfo& kInfo = kInfo_{call.symbol};")
    if row is not None and row.per_thread_forward:
        target = model.by_symbol(row.per_thread_forward)
        lines.append(f"  if (per_thread) return {impl_name(target)}({call.arguments('nullptr', 'true')});")
    lines.append("  Call call(kInfo);")
    lines.append("  if (CUresult rc = call.Enter(); rc != CUDA_SUCCESS) return rc;")
    for expression in row.valid if row is not None else []:
        lines.append(f"  if (!({expression})) return CUDA_ERROR_INVALID_VALUE;")
    lines += pre
    for expression in row.check if row is not None else []:
        lines.append(f"  if (const CUresult rc = {expression}; rc != CUDA_SUCCESS) return rc;")
    lines.append(f"  wire::{call.symbol}_Request in;")
    lines += fill
    lines.append("  in.Encode(&call.message());")
    if is_async and row.HasField("device_range"):
        # A wrong address fails natively at the call, so whatever looks wrong is waited for.
        memory = row.device_range
        lines.append(f"  const CUresult rc = KnowsDeviceRange(call, {memory.address}, {memory.bytes}) ? call.Send() : call.Transact();")
    else:
        how = "Send()" if is_async else "Transact()"
        if row is not None and row.cached:
            about = [p.name for p in call.params if p.role == "handle" and p.kind in ("Function", "Kernel")]
            how = f"Recall(reinterpret_cast<uint64_t>({about[0]}))" if about else "Recall()"
        lines.append(f"  const CUresult rc = call.{how};")
    if call.reply.fields or post:
        lines.append("  if (rc != CUDA_SUCCESS) return rc;")
    if call.reply.fields:
        lines.append(f"  wire::{call.symbol}_Reply out;")
        lines.append("  if (!out.Decode(call.reply())) return kBadReply;")
        for p in call.params:
            if p.role == "count":
                post.insert(0, f"  *{p.name} = ({p.base})out.{p.name};")
        # An array's results must fit into what the caller offered.
        for p in call.params:
            if p.role in ("array", "handles") and p.direction == "out" and p.count.startswith("*"):
                counter = p.count[1:]
                check = f"  if (out.{counter} > in.{counter} && in.want_{p.name}) return kBadReply;"
                if check not in post:
                    post.insert(0, check)
    lines += post
    lines += ["  return rc;", "}", ""]
    return lines


def entry_body(model, call, per_thread):
    args = [f"VirtualExec({p.name})" if p.type == "CUgraphExec" else p.name for p in call.params]
    if call.status == "unsupported":
        return f"Call::Unsupported({text.c_string(call.symbol)}, {text.c_string(call.reason)})"
    target = call
    if call.status == "forward":
        target = model.by_symbol(call.row.forward)
        if target.status == "unsupported":
            return f"Call::Unsupported({text.c_string(call.symbol)}, {text.c_string(target.reason)})"
    if target.per_thread:
        args.append("true" if per_thread else "false")
    return f"{impl_name(target)}({', '.join(args)})"


def exported(model, call, numbers):
    lines = []
    suffixes = [("", False)] + ([("_" + call.per_thread, True)] if call.per_thread else [])
    for suffix, per_thread in suffixes:
        lines.append(text.wrap(f"CR_EXPORT CUresult CUDAAPI {call.symbol}{suffix}(", [f"{p.type} {p.name}" for p in call.params],
                               ") {", "    "))
        lines.append(f"  CR_RETURN_TRACED({numbers[call.symbol + suffix]}, {entry_body(model, call, per_thread)});")
        lines.append("}")
    return lines


def sent_id(model, call):
    """Id of the request that a hand-written body sends."""
    sends = call.row.sends
    if sends == "nothing" or call.status == "local" and not sends:
        return "0"
    return ("k" if sends.startswith("Op") else "kCall_") + (sends or call.symbol)


def custom_header(model):
    lines = ["// Hand-written bodies of driver calls, declared here and defined in client/custom under the same names; a missing",
             "// one is a link error. `per_thread` is true when the call came through its per-thread-default-stream variant.", ""]
    for c in model.calls:
        if c.client_custom:
            lines.append(text.wrap(f"CUresult Custom_{c.symbol}(", parameters(c), ");"))
    lines += ["", "// The facts that Call needs, for the bodies above.", "namespace info {"]
    for c in model.calls:
        if c.client_custom:
            lines.append(f"inline constexpr CallInfo k_{c.symbol}{{{sent_id(model, c)}, {text.c_string(c.sig.name)}, {CONTEXT[c.context]}}};")
    for op in model.operations:
        if not op.event:
            lines.append(f"inline constexpr CallInfo k_{op.symbol}{{k{op.symbol}, {text.c_string(op.symbol)}, {CONTEXT[op.context]}}};")
    lines += ["}  // namespace info"]
    return text.header("client/entry/custom.gen.h", ['"client/session/call.h"', '"proto/api/call_ids.gen.h"', '"proto/api/cuda_versions.h"'],
                       "\n".join(lines), "cuda_remote::client")


def family_file(model, family, numbers):
    calls = model.family_calls(family.name)
    generated = [c for c in calls if c.status in ("generated", "server")]
    lines = []
    forwards = {model.by_symbol(c.row.per_thread_forward).symbol: model.by_symbol(c.row.per_thread_forward)
                for c in generated if c.row is not None and c.row.per_thread_forward}
    lines += ["namespace {", ""]
    for target in forwards.values():
        if target.status in ("generated", "server"):
            lines.append(text.wrap(f"CUresult Call_{target.symbol}(", parameters(target), ");"))
    for c in generated:
        lines += stub(model, c)
    lines += ["}  // namespace", "", 'extern "C" {', ""]
    for c in calls:
        lines += exported(model, c, numbers)
    lines += ["", '}  // extern "C"']
    includes = ["<cuda.h>", "<cudaProfiler.h>", "<algorithm>", '"client/entry/custom.gen.h"', '"client/entry/runtime.h"', '"client/session/call.h"',
                '"proto/api/call_ids.gen.h"', f'"proto/codec/{family.name}.gen.h"', '"proto/codec/wire.h"']
    return text.source(includes, "\n".join(lines), "cuda_remote::client", ["__CUDA_API_VERSION_INTERNAL  // no macros over the exported names"])


def emit(model, args):
    symbols = exports(model)
    # The number by which client/trace knows each entry point.
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    out = {"custom.gen.h": custom_header(model)}
    for family in model.families:
        out[f"entry_{family.name}.gen.cc"] = family_file(model, family, numbers)
    lines = ['extern "C" {', ""]
    for u in model.undocumented:
        lines.append(f"CR_EXPORT CUresult CUDAAPI {u.symbol}() {{")
        lines.append(f"  CR_RETURN_TRACED({numbers[u.symbol]}, "
                     f"Call::Unsupported({text.c_string(u.symbol)}, \"no description of this entry point\"));")
        lines.append("}")
    lines += ["", '}  // extern "C"']
    out["entry_undocumented.gen.cc"] = text.source(['"client/entry/runtime.h"', '"client/session/call.h"'], "\n".join(lines),
                                                   "cuda_remote::client", ["__CUDA_API_VERSION_INTERNAL"])
    # Declared first, or constants would be this file's own.
    lines = ["extern const uint32_t kNameCount;", "extern const char* const kNames[];", "",
             f"const uint32_t kNameCount = {len(symbols)};", "const char* const kNames[] = {"]
    lines += [f"    {text.c_string(symbol)}," for symbol in symbols] + ["};"]
    out["trace_names.gen.cc"] = text.source(["<cstdint>"], "\n".join(lines), "cuda_remote::client::trace")
    out["libcuda.lds"] = "{\n  global:\n" + "".join(f"    {s};\n" for s in symbols) + "  local:\n    *;\n};\n"
    out["exports.txt"] = "".join(s + "\n" for s in symbols)
    return out


def exports(model):
    symbols = []
    for c in model.calls:
        symbols.append(c.symbol)
        if c.per_thread:
            symbols.append(c.symbol + "_" + c.per_thread)
    return sorted(symbols + [u.symbol for u in model.undocumented])
