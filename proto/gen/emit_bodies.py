# SPDX-License-Identifier: Apache-2.0
"""client/calls: the bodies of driver calls that need no hand-written one, and the declarations of all bodies."""

from proto_gen import text
from proto_gen.emit_server import size_expression

KIND = "Kind::k"


def body_name(call):
    return ("Custom_" if call.client_custom else "Call_") + call.symbol


def object_key(p):
    """The log's name of the object in a parameter. Some parameters accept two kinds; the handle says which it is."""
    return f"ObjectOf({p.name + '_wire' if p.role == 'stream' else 'uint64_t(' + p.name + ')'})"


# What graphs need is kept for as long as they need it (client/graphs/graph_records.h).
OF_GRAPHS = ("Graph", "GraphExec", "UserObject")


def setting_of(call):
    """The object that a setting is of, and what else it names: once that is gone, the setting cannot be made again."""
    modified, needs = call.row.modifies.param, []
    for p in call.params:
        if p.name == modified or p.kind in OF_GRAPHS:
            continue
        if p.kind == "GraphNode" and p.name in call.row.modifies.key:
            continue  # which node of an executable the setting is for; any other was copied
        if p.role == "handle":
            needs.append(object_key(p))
        elif p.role == "scalar" and p.base.startswith("CUdeviceptr"):
            needs.append(f"MemoryKey(call, {p.name})")
    if any("current_context" in key for key in call.row.modifies.key):
        needs.append("CurrentContextKey(call)")
    if modified == "context":
        return "CurrentContextKey(call)", needs
    p = call.param(modified)
    return (f"StreamKey(call, {p.name}_wire)" if p.role == "stream" else object_key(p)), needs


def parameters(call):
    parts = [f"{p.type} {p.name}" for p in call.params]
    if call.per_thread:
        parts.append("bool per_thread")
    return parts


def stub(model, call):
    """The body of a generated call."""
    pre, fill, post = [], [], []
    row = call.row
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
    if row.HasField("destroys"):
        q = call.param(row.destroys.param)
        post.append(f"  call.Destroyed({object_key(q)});")
    if row.HasField("modifies"):
        keys = [k for k in row.modifies.key if k != "*"]
        key = "0"
        if "*" in row.modifies.key:
            key = "UniqueKey()"
        elif keys:
            key = "Key(" + ", ".join(f"uint64_t({k})" for k in keys) + ")"
        modified, needs = setting_of(call)
        if row.modifies.undoes:
            post.append(f"  call.Undone({modified}, kCall_{row.modifies.undoes}, {key});")
        else:
            depends_on = ", {" + ", ".join(needs) + "}" if needs else ""
            post.append(f"  call.Modified({modified}, {key}{depends_on});")
    is_async = getattr(row, "async")
    lines = []
    lines.append(text.wrap(f"CUresult Call_{call.symbol}(", parameters(call), ") {", "    "))
    lines.append(f"  constexpr const CallInfo& kInfo = info::k_{call.symbol};")
    if row.per_thread_forward:
        target = model.by_symbol(row.per_thread_forward)
        lines.append(f"  if (per_thread) return {body_name(target)}({call.arguments('nullptr', 'true')});")
    lines.append("  Call call(kInfo);")
    lines.append("  if (CUresult rc = call.Enter(); rc != CUDA_SUCCESS) return rc;")
    for expression in row.valid:
        lines.append(f"  if (!({expression})) return CUDA_ERROR_INVALID_VALUE;")
    lines += pre
    for expression in row.check:
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
        if row.cached:
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


def header(model):
    lines = ["// The body of each driver call that this library supports, for the entry points and for each other's use: Call_cuX is",
             "// generated, Custom_cuX is hand-written in client/calls (a missing one is a link error). `per_thread` is true when the",
             "// call came through its per-thread-default-stream variant.", ""]
    for c in model.calls:
        if c.has_body:
            lines.append(text.wrap(f"CUresult {body_name(c)}(", parameters(c), ");"))
    return text.header("client/calls/bodies.gen.h",
                       ['"client/core/call.h"', '"client/core/call_info.gen.h"', '"proto/api/cuda_versions.h"'],
                       "\n".join(lines), "cuda_remote::client")


def emit(model, args):
    out = {"bodies.gen.h": header(model)}
    for family in model.families:
        lines = []
        for c in model.family_calls(family.name):
            if c.has_body and not c.client_custom:
                lines += stub(model, c)
        includes = ["<cuda.h>", "<algorithm>", '"client/calls/bodies.gen.h"', '"client/calls/runtime.h"', '"client/core/call.h"',
                    '"proto/api/call_ids.gen.h"', f'"proto/codec/{family.name}.gen.h"', '"proto/codec/wire.h"']
        out[f"bodies_{family.name}.gen.cc"] = text.source(
            includes, "\n".join(lines), "cuda_remote::client", ["__CUDA_API_VERSION_INTERNAL  // no macros over the exported names"])
    return out
