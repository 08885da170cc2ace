# SPDX-License-Identifier: Apache-2.0
"""proto/codec/interop.gen.cc: every message's codec behind one type of function, for tests and fuzzers."""

from proto_gen import lint, text


def emit(model, args):
    lines = ["namespace {", "", "template <typename T>", "bool RoundTrip(std::string_view in, std::string* out) {",
             "  T message;", "  if (!message.Decode(in)) return false;", "  message.Encode(out);", "  return true;", "}", "",
             "}  // namespace", "", "const MessageCodec kMessages[] = {"]
    lines += [f"    {{{text.c_string(m.name)}, &RoundTrip<{m.name}>}}," for m in lint.all_messages(model)]
    lines += ["};", "const size_t kMessageCount = sizeof kMessages / sizeof *kMessages;", ""]
    return {"interop.gen.cc": text.source(['"proto/codec/interop.h"', '"proto/codec/calls.gen.h"', '"proto/codec/operations.gen.h"'],
                                          "\n".join(lines), "cuda_remote::wire")}
