#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Structs with encoder and decoder for the messages and enums of one hand-written .proto file: small messages beside the
driver's calls, such as those of a session socket. No libprotobuf in what it makes.

Usage: messages.py --descriptors FILE --proto proto/channel/handshake.proto --out FOLDER

FILE is what protoc wrote for it and options.proto with --include_imports and --include_source_info. Makes NAME.gen.h and NAME.gen.cc in FOLDER. A
message M of the package a.b becomes the struct a::b::M, with EncodeM and DecodeM. options.proto has the options.
"""

import argparse
import os
import re
import sys

from google.protobuf import descriptor_pb2, descriptor_pool

OPTIONS = "proto/gen/options.proto"
FIELD = descriptor_pb2.FieldDescriptorProto
CPP = {FIELD.TYPE_BOOL: "bool", FIELD.TYPE_UINT32: "uint32_t", FIELD.TYPE_INT32: "int32_t", FIELD.TYPE_UINT64: "uint64_t",
       FIELD.TYPE_INT64: "int64_t", FIELD.TYPE_STRING: "std::string", FIELD.TYPE_BYTES: "std::string"}
ZERO = {"bool": "false", "uint32_t": "0", "int32_t": "0", "uint64_t": "0", "int64_t": "0"}

OF_FIELD = ("most", "cut", "keep_end", "initially", "printable", "needed")


class Problem(Exception):
    """The file says something that this generator has no code for."""


class Field:
    """One field of a message."""

    def __init__(self, proto, options, lead, trail):
        self.name, self.number = proto.name, proto.number
        self.repeated = proto.label == FIELD.LABEL_REPEATED
        self.optional = proto.proto3_optional
        self.message = proto.type == FIELD.TYPE_MESSAGE
        self.type = proto.type_name.split(".")[-1] if self.message else CPP.get(proto.type)
        self.proto_type = proto.type_name
        self.text = self.type == "std::string"
        self.most, self.cut, self.keep_end = options["most"], options["cut"], options["keep_end"]
        self.initially = options["initially"]
        self.printable, self.needed = options["printable"], options["needed"]
        self.lead, self.trail = lead, trail
        if self.type is None:
            raise Problem(f"{self.name}: a type that this generator does not know")
        if self.repeated and not self.message and self.type != "uint64_t":
            raise Problem(f"{self.name}: lists are of messages or of uint64")
        if (self.printable or self.needed or self.cut) and not (self.text and not self.repeated):
            raise Problem(f"{self.name}: printable, needed and cut are for texts")
        if self.cut and not self.most:
            raise Problem(f"{self.name}: cut to what? It has no `most`")
        if self.most and not self.text and not self.repeated:
            raise Problem(f"{self.name}: `most` is for texts and lists")


class Message:
    """A message with what is declared inside it."""

    def __init__(self, proto, path, reader, outer=""):
        self.name = proto.name
        self.cpp = f"{outer}{proto.name}"       # Activity::Context
        self.function = self.cpp.replace("::", "")
        self.lead, self.trail = reader.comments(path)
        self.nested = [Message(one, path + (3, i), reader, self.cpp + "::") for i, one in enumerate(proto.nested_type)]
        self.fields = [Field(one, reader.options(one), *reader.comments(path + (2, i))) for i, one in enumerate(proto.field)]
        self.by_type = {".".join(["", reader.package, self.cpp.replace("::", ".")]): self}
        for one in self.nested:
            self.by_type.update(one.by_type)


class Reader:
    """One file of the set, with its comments and options."""

    def __init__(self, path, name):
        with open(path, "rb") as f:
            raw = f.read()
        files = descriptor_pb2.FileDescriptorSet.FromString(raw)
        pool = descriptor_pool.Default()
        try:
            pool.FindFileByName(OPTIONS)
        except KeyError:
            pool.AddSerializedFile(next(one for one in files.file if one.name == OPTIONS).SerializeToString())
        # Once more: the options are known now.
        files = descriptor_pb2.FileDescriptorSet.FromString(raw)
        self.files = {one.name: one for one in files.file}
        self.file = self.files[name]
        self.package = self.file.package
        self.extensions = {n: pool.FindExtensionByName("cuda_remote." + n) for n in OF_FIELD + ("in_order", "header")}
        self.where = {tuple(one.path): one for one in self.file.source_code_info.location}
        self.in_order = self.file.options.Extensions[self.extensions["in_order"]]
        self.headers = list(self.file.options.Extensions[self.extensions["header"]])
        self.messages = [Message(one, (4, i), self) for i, one in enumerate(self.file.message_type)]

    def options(self, field):
        return {n: field.options.Extensions[self.extensions[n]] for n in OF_FIELD}

    def comments(self, path):
        one = self.where.get(path)
        if one is None:
            return [], ""
        lead = [line.rstrip() for line in one.leading_comments.rstrip("\n").split("\n")] if one.leading_comments else []
        return lead, " ".join(one.trailing_comments.split())


def comment(lead, indent):
    return [f"{indent}//{line}" for line in lead]


def declare(message, indent=""):
    lines = comment(message.lead, indent) + [f"{indent}struct {message.name} {{"]
    for one in message.nested:
        lines += declare(one, indent + "  ")
    for f in message.fields:
        lines += comment(f.lead, indent + "  ")
        kind = f"std::vector<{f.type}>" if f.repeated else f.type
        start = "" if f.repeated else f.initially or ZERO.get(f.type, "")
        lines.append(f"{indent}  {kind} {f.name}" + (f" = {start}" if start else "") + ";" + (f"  // {f.trail}" if f.trail else ""))
        if f.optional:
            lines.append(f"{indent}  bool has_{f.name} = false;")
    return lines + [f"{indent}}};", ""]


def flat(messages):
    """Each message after those inside it."""
    for one in messages:
        yield from flat(one.nested)
        yield one


def functions(message):
    return [f"void Encode{message.function}(const {message.cpp}& message, std::string* out);",
            f"bool Decode{message.function}(std::string_view bytes, {message.cpp}* message);"]


def put(f, function_of):
    """Lines that append a field in protobuf's encoding."""
    value = f"message.{f.name}"
    if f.optional:
        raise Problem(f"{f.name}: optional fields are for messages in order")
    if f.message:
        inner = ["    std::string inner;", f"    Encode{function_of(f)}({value + '[i]' if f.repeated else value}, &inner);"]
        if f.repeated:
            count = f"std::min<size_t>({value}.size(), {f.most})" if f.most else f"{value}.size()"
            return [f"  for (size_t i = 0; i < {count}; ++i) {{"] + inner + [f"    wire::PutBytesAlways(out, {f.number}, inner);", "  }"]
        return ["  {"] + inner + [f"    wire::PutBytes(out, {f.number}, inner);", "  }"]
    if f.repeated:
        return [f"  wire::PutPackedUnsigned(out, {f.number}, {value});"]
    if f.text:
        return [f"  wire::PutBytes(out, {f.number}, {cut(f, value)});"]
    put_it = "PutInt" if f.type in ("int32_t", "int64_t") else "PutUint"
    return [f"  wire::{put_it}(out, {f.number}, {value});"]


def cut(f, value):
    if not f.cut:
        return value
    start = f"{value}.size() - std::min<size_t>({value}.size(), {f.most})" if f.keep_end else "0"
    return f"std::string_view({value}).substr({start}, {f.most})"


def get(f, function_of):
    """Lines of the decoder's switch."""
    value = f"message->{f.name}"
    lines = [f"      case {f.number}:"]
    if f.message:
        lines[0] += " {"
        lines += ["        std::string_view inner;", "        if (!reader.Get(&inner)) return false;"]
        target = f"&{value}"
        if f.repeated:
            if f.most:
                lines.append(f"        if ({value}.size() >= {f.most}) return false;")
            lines.append(f"        {value}.emplace_back();")
            target = f"&{value}.back()"
        lines += [f"        return Decode{function_of(f)}(inner, {target});", "      }"]
        return lines
    if f.repeated:
        bound = f" && {value}.size() <= {f.most}" if f.most else ""
        return lines + [f"        return reader.Add(&{value}){bound};"]
    most = f", {f.most}" if f.most else ""
    return lines + [f"        return reader.Get(&{value}{most});"]


def define(message, function_of):
    out = [f"void Encode{message.function}(const {message.cpp}& message, std::string* out) {{"]
    for f in message.fields:
        out += put(f, function_of)
    out += ["}", "", f"bool Decode{message.function}(std::string_view bytes, {message.cpp}* message) {{",
            f"  *message = {message.cpp}();"]
    out += [f"  message->{f.name} = {ZERO.get(f.type, '{}')};" for f in message.fields if f.initially]
    # So is a message that is not in the bytes. What it says of a field that is `needed` does not count then.
    out += [f"  Decode{function_of(f)}(std::string_view(), &message->{f.name});"
            for f in message.fields if f.message and not f.repeated]
    out += ["  const bool read = wire::ReadMessage(bytes, [&](wire::Reader& reader) {", "    switch (reader.field()) {"]
    for f in message.fields:
        out += get(f, function_of)
    out += ["      default:", "        return reader.Skip();", "    }", "  });"]
    out += [f"  message->{f.name} = Printable(message->{f.name});" for f in message.fields if f.printable]
    needed = "".join(f" && !message->{f.name}.empty()" for f in message.fields if f.needed)
    return out + [f"  return read{needed};", "}", ""]


def check_in_order(message, by_type):
    if [f.number for f in message.fields] != list(range(1, len(message.fields) + 1)):
        raise Problem(f"{message.cpp}: fields in order are numbered from 1 on, without gaps")
    missing = False
    for f in message.fields:
        if missing and not f.optional:
            raise Problem(f"{message.cpp}.{f.name}: stands behind a field that may be missing, so it must be optional, too")
        missing = f.optional
        if f.printable or f.needed or f.repeated and not f.message or f.type in ("int32_t", "int64_t"):
            raise Problem(f"{message.cpp}.{f.name}: not made for fields in order")
        if f.message and any(g.optional for g in by_type[f.proto_type].fields) and f is not message.fields[-1]:
            raise Problem(f"{message.cpp}.{f.name}: may be shorter than others of its type, so it must be the last field")


def define_in_order(message, function_of, by_type):
    """The same in order. Put and Read take part in an outer message's."""
    check_in_order(message, by_type)
    out = ["namespace {", "", f"void Put{message.function}(const {message.cpp}& message, wire::FieldWriter* out) {{"]
    for f in message.fields:
        value = f"message.{f.name}"
        if f.optional:
            out.append(f"  if (!message.has_{f.name}) return;")
        if f.repeated:
            count = f"std::min<size_t>({value}.size(), {f.most})" if f.most else f"{value}.size()"
            out += [f"  const size_t {f.name}_count = {count};", f"  out->Number({f.name}_count);",
                    f"  for (size_t i = 0; i < {f.name}_count; ++i) Put{function_of(f)}({value}[i], out);"]
        elif f.message:
            out.append(f"  Put{function_of(f)}({value}, out);")
        elif f.text:
            out.append(f"  out->Text({cut(f, value)});")
        else:
            out.append(f"  out->Number({value});")
    out += ["}", "", f"bool Read{message.function}(wire::FieldReader* in, {message.cpp}* message) {{"]
    for f in message.fields:
        value = f"message->{f.name}"
        if f.optional:
            out += ["  if (in->done()) return true;", f"  message->has_{f.name} = true;"]
        if f.repeated:
            out += [f"  uint64_t {f.name}_count = 0;",
                    f"  if (!in->Get(&{f.name}_count)" + (f" || {f.name}_count > {f.most}" if f.most else "") + ") return false;",
                    f"  for (uint64_t i = 0; i < {f.name}_count; ++i) {{", f"    {value}.emplace_back();",
                    f"    if (!Read{function_of(f)}(in, &{value}.back())) return false;", "  }"]
        elif f.message:
            out.append(f"  if (!Read{function_of(f)}(in, &{value})) return false;")
        else:
            most = f", {f.most}" if f.most else ""
            out.append(f"  if (!in->Get(&{value}{most})) return false;")
    return out + ["  return true;", "}", "", "}  // namespace", "",
                  f"void Encode{message.function}(const {message.cpp}& message, std::string* out) {{",
                  "  wire::FieldWriter writer(out);", f"  Put{message.function}(message, &writer);", "}", "",
                  f"bool Decode{message.function}(std::string_view bytes, {message.cpp}* message) {{",
                  f"  *message = {message.cpp}();", "  wire::FieldReader reader(bytes);",
                  f"  return Read{message.function}(&reader, message) && reader.done();", "}", ""]


def enum_lines(proto, path, reader):
    """enum class, without the zero that proto3 asks for, and a check of a number that came from somewhere."""
    lead, _ = reader.comments(path)
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", proto.name).upper() + "_"
    lines = comment(lead, "") + [f"enum class {proto.name} : uint32_t {{"]
    names = []
    for i, value in enumerate(proto.value):
        if not value.name.startswith(prefix):
            raise Problem(f"{value.name}: must begin with {prefix}")
        if value.number == 0:
            continue
        name = "k" + "".join(part.capitalize() for part in value.name[len(prefix):].split("_"))
        over, trail = reader.comments(path + (2, i))
        names.append(name)
        lines += comment(over, "  ") + [f"  {name} = {value.number}," + (f"  // {trail}" if trail else "")]
    lines += ["};", f"bool Is{proto.name}(uint32_t number);", ""]
    body = [f"bool Is{proto.name}(uint32_t number) {{", f"  switch ({proto.name}(number)) {{"]
    body += [f"    case {proto.name}::{name}:" for name in names]
    return lines, body + ["      return true;", "  }", "  return false;", "}", ""]


def generate(reader):
    """The header's text and the source's."""
    name = reader.file.name
    stem = name[:-len(".proto")]
    namespace = reader.package.replace(".", "::")
    by_type = {}
    for one in reader.messages:
        by_type.update(one.by_type)

    def function_of(f):
        # A message of another file is known by its own name.
        return by_type[f.proto_type].function if f.proto_type in by_type else f.type

    head, body = [], []
    for i, one in enumerate(reader.file.enum_type):
        declared, defined = enum_lines(one, (5, i), reader)
        head, body = head + declared, body + defined
    for one in reader.messages:
        head += declare(one)
    head += ["// EncodeX appends the message to *out. DecodeX reads bytes that may be hostile; false if they are malformed. Any thread."]
    for one in flat(reader.messages):
        head += functions(one)
        body += define_in_order(one, function_of, by_type) if reader.in_order else define(one, function_of)
    imports = [one for one in reader.file.dependency if not one.startswith("google/") and one != OPTIONS]
    includes = ["<cstddef>", "<cstdint>", "<string>", "<string_view>", "<vector>", ""]
    includes += [f'"{one}"' for one in sorted([p[:-len(".proto")] + ".gen.h" for p in imports] + reader.headers)]
    guard = "CUDA_REMOTE_" + re.sub(r"[^A-Z0-9]", "_", stem.upper()) + "_GEN_H_"
    banner = f"// Generated by proto/gen/messages.py from {name}. Do not edit.\n"
    include = lambda names: "\n".join(f"#include {one}" if one else "" for one in names)
    header = (f"{banner}#ifndef {guard}\n#define {guard}\n\n{include(includes)}\n\nnamespace {namespace} {{\n\n" +
              "\n".join(head).rstrip() + f"\n\n}}  // namespace {namespace}\n\n#endif  // {guard}\n")
    codec = '"proto/codec/in_order.h"' if reader.in_order else '"proto/codec/wire.h"'
    texts = ['"proto/codec/text.h"'] if any(f.printable for m in flat(reader.messages) for f in m.fields) else []
    own = [f'"{stem}.gen.h"', "", "<algorithm>", "", *texts, codec]
    source = (f"{banner}{include(own)}\n\nnamespace {namespace} {{\n\n" +
              "\n".join(body).rstrip() + f"\n\n}}  // namespace {namespace}\n")
    return header, source


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--descriptors", required=True)
    parser.add_argument("--proto", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    try:
        header, source = generate(Reader(args.descriptors, args.proto))
    except Problem as problem:
        print(f"{args.proto}: {problem}", file=sys.stderr)
        return 1
    stem = os.path.join(args.out, os.path.basename(args.proto)[:-len(".proto")])
    for path, text in ((stem + ".gen.h", header), (stem + ".gen.cc", source)):
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
