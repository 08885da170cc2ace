#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of messages.py: what it makes of small files, and what it refuses."""

import os
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import messages  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(HERE))
START = 'syntax = "proto3";\npackage cuda_remote.test;\nimport "proto/gen/options.proto";\n'


class MessagesTest(unittest.TestCase):
    def make(self, text):
        """Header and source for a file with this text."""
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "x.proto"), "w", encoding="utf-8") as f:
                f.write(START + text)
            out = os.path.join(folder, "out")
            subprocess.run(["protoc", f"-I{ROOT}", f"-I{folder}", "--include_imports", "--include_source_info",
                            f"--descriptor_set_out={out}", "x.proto", "proto/gen/options.proto"], check=True,
                           stderr=subprocess.DEVNULL)
            return messages.generate(messages.Reader(out, "x.proto"))

    def refused(self, text, why):
        with self.assertRaises(messages.Problem) as problem:
            self.make(text)
        self.assertIn(why, str(problem.exception))

    def test_a_message(self):
        header, source = self.make('// Says who.\nmessage M {\n  uint32 n = 3 [(initially) = "kN"];  // how many\n'
                                   '  string s = 7 [(most) = "5", (cut) = true];\n}\n')
        self.assertIn("namespace cuda_remote::test {", header)
        self.assertIn("// Says who.\nstruct M {\n  uint32_t n = kN;  // how many\n  std::string s;\n};", header)
        self.assertIn("wire::PutUint(out, 3, message.n);", source)
        self.assertIn("wire::PutBytes(out, 7, std::string_view(message.s).substr(0, 5));", source)
        self.assertIn("message->n = 0;", source)
        self.assertIn("return reader.Get(&message->s, 5);", source)

    def test_a_message_that_is_not_in_the_bytes_is_zero(self):
        _, source = self.make('message I {\n  int32 n = 1 [(initially) = "-1"];\n}\n'
                              "message M {\n  I one = 1;\n  repeated I more = 2;\n}\n")
        self.assertIn("  DecodeI(std::string_view(), &message->one);\n  const bool read", source)
        self.assertNotIn("DecodeI(std::string_view(), &message->more", source)

    def test_an_enum_has_no_zero(self):
        header, source = self.make("enum CallKind {\n  CALL_KIND_NONE = 0;\n  CALL_KIND_LONG_ONE = 4;  // why\n}\n")
        self.assertIn("enum class CallKind : uint32_t {\n  kLongOne = 4,  // why\n};", header)
        self.assertNotIn("kNone", header + source)
        self.assertIn("case CallKind::kLongOne:", source)

    def test_fields_in_order(self):
        _, source = self.make("option (in_order) = true;\nmessage M {\n  bool b = 1;\n  optional string s = 2;\n}\n")
        self.assertIn("out->Number(message.b);\n  if (!message.has_s) return;\n  out->Text(message.s);", source)
        self.assertIn("if (in->done()) return true;\n  message->has_s = true;", source)

    def test_what_it_refuses(self):
        self.refused("message M {\n  double d = 1;\n}\n", "a type that this generator does not know")
        self.refused("message M {\n  repeated string s = 1;\n}\n", "lists are of messages or of uint64")
        self.refused("message M {\n  string s = 1 [(cut) = true];\n}\n", "cut to what?")
        self.refused("message M {\n  uint32 n = 1 [(printable) = true];\n}\n", "are for texts")
        self.refused("message M {\n  optional uint32 n = 1;\n}\n", "optional fields are for messages in order")
        self.refused("enum E {\n  X = 0;\n}\n", "must begin with E_")
        order = "option (in_order) = true;\n"
        self.refused(order + "message M {\n  uint32 n = 2;\n}\n", "numbered from 1 on")
        self.refused(order + "message M {\n  optional uint32 n = 1;\n  uint32 m = 2;\n}\n", "must be optional, too")
        self.refused(order + "message M {\n  int32 n = 1;\n}\n", "not made for fields in order")
        self.refused(order + "message I {\n  optional uint32 n = 1;\n}\nmessage M {\n  I i = 1;\n  uint32 n = 2;\n}\n",
                     "must be the last")


if __name__ == "__main__":
    unittest.main()
