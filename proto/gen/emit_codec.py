# SPDX-License-Identifier: Apache-2.0
"""proto/codec/*.gen.{h,cc}: a struct with Encode and Decode for each message."""

from proto_gen import text

CPP = {"bool": "bool", "uint32": "uint32_t", "int32": "int32_t", "uint64": "uint64_t", "int64": "int64_t",
       "float": "float", "double": "double", "string": "std::string_view", "bytes": "std::string_view",
       "handles": "std::string_view"}
DEFAULT = {"bool": " = false", "uint32": " = 0", "int32": " = 0", "uint64": " = 0", "int64": " = 0", "float": " = 0",
           "double": " = 0"}


def declare(message, call_id=""):
    lines = []
    if message.comment:
        lines.append(f"// {message.comment}")
    lines.append(f"struct {message.name} {{")
    if call_id:
        lines.append(f"  static constexpr uint32_t kCallId = {call_id};")
    for f in message.fields:
        base = CPP.get(f.type, f.type)
        comment = f"  // {f.comment}" if f.comment else ""
        if f.repeated:
            lines.append(f"  std::vector<{base}> {f.name};{comment}")
        else:
            lines.append(f"  {base} {f.name}{DEFAULT.get(f.type, '')};{comment}")
            if f.optional:
                lines.append(f"  bool has_{f.name} = false;")
    if message.fields:
        lines.append("")
    lines += ["  // Appends the encoded message to *out.", "  void Encode(std::string* out) const;",
              "  // Reads a message that may be hostile; views point into `in`. False if it is malformed.",
              "  bool Decode(std::string_view in);", "};", ""]
    return lines


def encode_field(f):
    n = f.name
    if f.repeated:
        if f.type in ("uint32", "int32"):
            return [f"  PutPacked(out, {f.number}, {n});"]
        if f.type == "uint64":
            return [f"  PutPackedUnsigned(out, {f.number}, {n});"]
        if f.type == "double":
            return [f"  PutPackedDouble(out, {f.number}, {n});"]
        if f.type in ("string", "bytes"):
            return [f"  for (std::string_view value : {n}) PutBytesAlways(out, {f.number}, value);"]
        return [f"  for (const {f.type}& value : {n}) {{", "    std::string inner;", "    value.Encode(&inner);",
                f"    PutBytesAlways(out, {f.number}, inner);", "  }"]
    if f.type in ("string", "bytes", "handles"):
        if f.optional:
            return [f"  if (has_{n}) PutBytesAlways(out, {f.number}, {n});"]
        return [f"  PutBytes(out, {f.number}, {n});"]
    if f.optional:
        return [f"  if (has_{n}) {{", f"    PutTag(out, {f.number}, kVarint);",
                f"    PutVarint(out, uint64_t(int64_t({n})));", "  }"]
    put = {"float": "PutFloat", "double": "PutDouble", "int32": "PutInt", "int64": "PutInt"}.get(f.type, "PutUint")
    if f.type not in CPP:
        return ["  {", "    std::string inner;", f"    {n}.Encode(&inner);", f"    PutBytes(out, {f.number}, inner);", "  }"]
    return [f"  {put}(out, {f.number}, {n});"]


PUT_SCALAR = {"float": "Float", "double": "Double", "int32": "Int", "int64": "Int"}


def is_scalar(f):
    """Whether a field is one number, written only if it is not zero."""
    return not f.repeated and not f.optional and DEFAULT.get(f.type) is not None


def encode_fields(fields):
    """Numbers that follow one another are put together first and appended at once."""
    lines = []
    group = 0
    while fields:
        run = 0
        while run < len(fields) and is_scalar(fields[run]):
            run += 1
        if run < 2:
            lines += encode_field(fields[0])
            fields = fields[1:]
            continue
        group += 1
        name = "numbers" if group == 1 else f"numbers{group}"
        lines.append(f"  Numbers<{run}> {name};")
        for f in fields[:run]:
            lines.append(f"  {name}.{PUT_SCALAR.get(f.type, 'Uint')}({f.number}, {f.name});")
        lines.append(f"  {name}.AppendTo(out);")
        fields = fields[run:]
    return lines


def decode_field(f):
    n = f.name
    lines = [f"      case {f.number}:"]
    if f.type not in CPP:
        lines[0] += " {"
        lines += ["        std::string_view inner;", "        if (!reader.Get(&inner)) return false;"]
        if f.repeated:
            lines += [f"        if (!{n}.emplace_back().Decode(inner)) return false;"]
        else:
            lines += [f"        if (!{n}.Decode(inner)) return false;"]
        lines += ["        break;", "      }"]
        return lines
    lines.append(f"        if (!reader.{'Add' if f.repeated else 'Get'}(&{n})) return false;")
    if f.type == "handles":
        lines.append(f"        if ({n}.size() % 8 != 0) return false;")
    if f.optional:
        lines.append(f"        has_{n} = true;")
    lines.append("        break;")
    return lines


def define(message):
    name = message.name
    lines = [f"void {name}::Encode(std::string* out) const {{"]
    if not message.fields:
        lines.append("  (void)out;")
    lines += encode_fields(message.fields)
    lines += ["}", "", f"bool {name}::Decode(std::string_view in) {{", "  Reader reader(in);", "  while (reader.Next()) {"]
    if message.fields:
        lines.append("    switch (reader.field()) {")
        for f in message.fields:
            lines += decode_field(f)
        lines += ["      default:", "        if (!reader.Skip()) return false;", "    }"]
    else:
        lines.append("    if (!reader.Skip()) return false;")
    lines += ["  }", "  return reader.ok();", "}", ""]
    return lines


def uses_shared(messages, shared):
    """Whether a field of these messages is of a message type of the operations."""
    return any(f.type in shared for m in messages for f in m.fields)


def files(name, messages, about, shared=(), ids=None):
    head = [line for m in messages for line in declare(m, (ids or {}).get(m.name, ""))]
    body = [line for m in messages for line in define(m)]
    path = f"proto/codec/{name}.gen.h"
    return {
        f"{name}.gen.h": text.header(path, ["<cstdint>", "<string>", "<string_view>", "<vector>", '"proto/api/call_ids.gen.h"'] +
                                     (['"proto/codec/operations.gen.h"'] if uses_shared(messages, shared) else []),
                                     "\n".join(head), "cuda_remote::wire", about),
        f"{name}.gen.cc": text.source([f'"{path}"', '"proto/codec/numbers.h"', '"proto/codec/wire.h"'], "\n".join(body), "cuda_remote::wire"),
    }


def emit(model, args):
    out = {}
    shared = list(model.messages)
    for op in model.operations:
        shared += [op.request] + ([op.reply] if op.reply else [])
    out.update(files("operations", shared, "Messages of our own operations (proto/api/operations.textproto).",
                     ids={op.request.name: f"k{op.symbol}" for op in model.operations}))
    for family in model.families:
        messages = [m for c in model.family_calls(family.name) if c.has_wire for m in (c.request, c.reply)]
        out.update(files(family.name, messages, f"Messages of the calls of the {family.name} family.",
                         {m.name for m in model.messages},
                         {c.request.name: f"kCall_{c.symbol}" for c in model.family_calls(family.name) if c.has_wire}))
    includes = "".join(f'#include "proto/codec/{f.name}.gen.h"\n' for f in model.families)
    g = text.guard("proto/codec/calls.gen.h")
    out["calls.gen.h"] = (text.BANNER + "// The messages of all calls. Prefer the family's header.\n" +
                          f"#ifndef {g}\n#define {g}\n{includes}#endif  // {g}\n")
    return out
