#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the generator: defaults refuse to guess, the lint finds what it should, the lock locks, no call names in code."""

import glob
import os
import re
import sys
import types
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
API = os.path.join(HERE, "..", "api")
package = types.ModuleType("proto_gen")
package.__path__ = [HERE]
sys.modules["proto_gen"] = package
sys.dont_write_bytecode = True

from google.protobuf import text_format  # noqa: E402
from proto_gen import defaults, emit_client, emit_infos, emit_lock, emit_traits, lint, model as model_module  # noqa: E402

SCHEMA = model_module.load_schema(API)

TYPES = """
  type { name: "int" class: INTEGER repr: "int" } type { name: "size_t" class: INTEGER repr: "size_t" }
  type { name: "unsigned int" class: INTEGER repr: "unsigned int" } type { name: "char" class: INTEGER repr: "char" }
  type { name: "Thing" class: HANDLE repr: "void *" } type { name: "Desc" class: STRUCT }
  type { name: "Mode" class: ENUM repr: "int" }
"""
STRUCTS = """
  handle { type: "Thing" kind: "Array" } family { name: "x" prefix: "x" }
"""


def join(signature, semantics="", structs="", operations=""):
    sig = text_format.Parse('signature { name: "xGetIt" symbol: "xGetIt" abi: 1 since: 2000 id: 1 ' + signature + " }" + TYPES,
                            SCHEMA.Signatures())
    model = model_module.join(SCHEMA, sig, text_format.Parse(semantics, SCHEMA.Semantics()),
                              text_format.Parse(STRUCTS + structs, SCHEMA.Structs()),
                              text_format.Parse(operations, SCHEMA.Operations()), defaults)
    return model


def problems(*args, **kwargs):
    return "\n".join(lint.check(join(*args, **kwargs)))


class DefaultsTest(unittest.TestCase):
    def setUp(self):
        self.saved = defaults.GETTER
        defaults.GETTER = re.compile(r"\w*Get")

    def tearDown(self):
        defaults.GETTER = self.saved

    def test_context(self):
        takes = 'param { type: "Thing" name: "thing" }'
        of = lambda kind, family="", row="": join(  # noqa: E731
            takes, row, structs=f'handle {{ type: "Other" kind: "{kind}" }} {family}').calls[0].context
        self.assertEqual(of("Library"), "thread")  # an array by itself says nothing
        self.assertEqual(of("Library", row='call { name: "xGetIt" context: OF_OBJECT }'), "object")
        takes = 'param { type: "Other" name: "thing" }'
        types = 'type { name: "Other" class: HANDLE repr: "void *" }'
        takes += " } " + types + ' signature { name: "xGetThat" symbol: "xGetThat" abi: 1 since: 2000 id: 2'
        self.assertEqual([of(kind) for kind in ("Stream", "Event", "Function", "Module", "Kernel")], ["object"] * 4 + ["thread"])
        self.assertEqual(of("Stream", row='call { name: "xGetIt" context: NEEDED }'), "thread")
        self.assertEqual(of("Stream", family='family { name: "y" prefix: "xGetI" no_context: true }'), "none")

    def test_plain_call(self):
        model = join('param { type: "int *" name: "value" } param { type: "Thing" name: "thing" } param { type: "Mode" name: "m" }')
        self.assertEqual(lint.check(model), [])
        call = model.calls[0]
        self.assertEqual([p.role for p in call.params], ["out", "handle", "scalar"])
        self.assertEqual([(f.name, f.type, f.number) for f in call.request.fields], [("thing", "uint64", 2), ("m", "int32", 3)])
        self.assertEqual([(f.name, f.type, f.number) for f in call.reply.fields], [("value", "int32", 1)])

    def test_refuses_to_guess(self):
        for param in ("Thing *", "char *", "Desc *", "void *", "const void *", "void **", "const Desc *", "Desc", "Thing **"):
            self.assertIn("p", problems('param { type: "%s" name: "p" }' % param), param)

    def test_refuses_pointers_beside_a_count(self):
        for count in ("count", "numThings", "nbThings", "len", "length"):
            self.assertIn("beside it", problems('param { type: "int *" name: "p" } param { type: "int" name: "%s" }' % count))

    def test_refuses_results_of_calls_that_do_not_get(self):
        defaults.GETTER = re.compile(r"Fetch")
        self.assertIn("result or an argument", problems('param { type: "int *" name: "p" }'))

    def test_rows(self):
        model = join('param { type: "Thing *" name: "p" }', 'call { name: "xGetIt" creates { param: "p" kind: "Array" } }')
        self.assertEqual(lint.check(model), [])
        self.assertEqual(model.calls[0].params[0].role, "creates")
        self.assertIn("no parameter", problems("", 'call { name: "xGetIt" out: "q" }'))
        self.assertIn("does not exist", problems("", 'call { name: "xOther" }'))
        self.assertIn("two semantics rows", problems("", 'call { name: "xGetIt" } call { name: "xGetIt" }'))

    def test_async_calls_have_no_results(self):
        self.assertIn("async", problems('param { type: "int *" name: "p" }', 'call { name: "xGetIt" async: true }'))

    def test_operations(self):
        field = 'request { name: "a" type: "uint32" number: 1 }'
        self.assertIn("used twice", problems("", operations='operation { number: 1 name: "A" %s %s }' % (field, field)))
        self.assertIn("unknown type", problems("", operations='operation { number: 1 name: "A" request { name: "a" type: "u9" number: 1 } }'))
        self.assertIn("used twice", problems("", operations='operation { number: 1 name: "A" } operation { number: 1 name: "B" }'))


class TraitsTest(unittest.TestCase):
    """What a call must state about itself, so that a new one cannot be overlooked."""

    STRUCTS = 'handle { type: "Stream" kind: "Stream" } handle { type: "Event" kind: "Event" }'
    TYPES = 'type { name: "Stream" class: HANDLE repr: "void *" } type { name: "Event" class: HANDLE repr: "void *" }'

    def complaints(self, params="", row="", operations=""):
        # join() closes the signature after what it is given.
        params += " } " + self.TYPES + ' signature { name: "xGetThat" symbol: "xGetThat" abi: 1 since: 2000 id: 2'
        return problems(params, f'call {{ name: "xGetIt" {row} }}', self.STRUCTS, operations)

    def test_calls_for_streams(self):
        stream = 'param { type: "Stream" name: "s" }'
        self.assertIn("must state `capture`", self.complaints(stream, "traits { completes: NO_WORK }"))
        self.assertIn("must state `completes`", self.complaints(stream, "traits { capture: OBSTACLE }"))
        self.assertEqual(self.complaints(stream, "traits { capture: OBSTACLE completes: NO_WORK }"), "")
        self.assertEqual(self.complaints(stream, "async: true traits { capture: OBSTACLE }"), "")
        self.assertIn("Opx: is for a stream", self.complaints(
            operations='operation { number: 1 name: "x" request { name: "stream" type: "uint64" number: 1 } }'))

    def test_calls_that_destroy(self):
        thing = 'param { type: "Thing" name: "t" }'
        self.assertIn("must state `completes`", self.complaints(thing, 'destroys { param: "t" }'))
        self.assertEqual(self.complaints(thing, 'destroys { param: "t" } traits { completes: WORK }'), "")

    def test_calls_for_events(self):
        event = 'param { type: "Event" name: "e" }'
        self.assertIn("must state `events`", self.complaints(event, "async: true"))
        self.assertEqual(self.complaints(event, "async: true traits { events: RECORDS }"), "")

    def test_shared_things_have_keys(self):
        wire = 'custom: BOTH wire { request { name: "%s" type: "bytes" number: 3 } }'
        self.assertIn("goes with a request that has a key", self.complaints("", wire % "key"))
        self.assertIn("goes with a request that has a key", self.complaints("", wire % "other" + " traits { sharing: OPENS }"))
        self.assertEqual(self.complaints("", wire % "key" + " traits { sharing: OPENS }"), "")

    def test_names_are_fields(self):
        value = 'param { type: "size_t" name: "at" }'
        self.assertEqual(self.complaints(value, 'traits { names { field: "at" } only_named_memory: true }'), "")
        self.assertIn("no field of the request", self.complaints(value, 'traits { names { field: "to" } }'))
        self.assertIn("no field of the request", self.complaints(value, 'traits { names { field: "at" holds: COPY_2D } }'))
        self.assertIn("name none", self.complaints(value, "traits { only_named_memory: true }"))

    def test_waiting_reports_errors(self):
        self.assertIn("completes WORK_AND_ERRORS", self.complaints("", "traits { work: WAITS }"))

    def test_traits_are_about_requests(self):
        self.assertIn("no message", self.complaints("", "custom: CLIENT local: true traits { work: ASKS }"))

    def test_bodies_send_requests(self):
        self.assertIn("sends OpNo, which is no request", self.complaints("", 'custom: CLIENT local: true sends: "OpNo"'))
        self.assertIn("sends xGetThat", self.complaints("", 'sends: "xGetThat"'))
        self.assertEqual(self.complaints("", 'custom: CLIENT local: true sends: "xGetThat"'), "")
        sent = lambda row: emit_infos.sent_id(join("", f'call {{ name: "xGetIt" {row} }}').calls[0])  # noqa: E731
        self.assertEqual([sent(row) for row in ("custom: CLIENT", "custom: CLIENT local: true", 'custom: CLIENT sends: "nothing"',
                                                'custom: CLIENT local: true sends: "OpPing"')],
                         ["kCall_xGetIt", "0", "0", "kOpPing"])

    def test_table(self):
        model = join('param { type: "size_t" name: "at" }', 'call { name: "xGetIt" traits { work: ASKS completes: WORK not_urgent: true } }')
        self.assertEqual(emit_traits.table_row(model, model.calls[0]),
                         "{Work::kAsks, Completes::kWork, Capture::kObstacle, Events::kNoEvents, Sharing::kNotShared, 0, kNotUrgent}")


class LockTest(unittest.TestCase):
    def test_numbers_are_never_used_again(self):
        locked = {("M", 1): "uint32 a", ("M", 2): "uint32 gone"}
        self.assertEqual(emit_lock.complaints({("M", 1): "uint32 a"}, locked), [])
        self.assertIn("new number", emit_lock.complaints({("M", 2): "uint32 b"}, locked)[0])
        self.assertIn("new number", emit_lock.complaints({("M", 1): "uint64 a"}, locked)[0])
        self.assertIn("not in the lock", emit_lock.complaints({("M", 3): "uint32 c"}, locked)[0])


class RealTablesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = model_module.load(API)

    def test_lint(self):
        self.assertEqual(lint.check(self.model), [])

    def test_every_call_is_decided(self):
        for call in self.model.calls:
            self.assertTrue(call.status, call.symbol)
            if call.status == "unsupported":
                self.assertGreater(len(call.reason), 10, call.symbol)

    def test_every_entry_point_is_exported_once(self):
        exports = emit_client.exports(self.model)
        self.assertEqual(len(exports), len(set(exports)))
        self.assertGreaterEqual(len(exports), 700)

    def test_families_of_the_build_rules(self):
        with open(os.path.join(HERE, "gen.bzl"), encoding="utf-8") as f:
            listed = re.search(r"FAMILIES = \[(.*?)\]", f.read(), re.S).group(1)
        self.assertEqual(re.findall(r'"(\w+)"', listed), [f.name for f in self.model.families])

    def test_custom_calls_only_shrink(self):
        # The ratchet: more hand-written bodies need a reason and a new number here. The last ones: waits and queries of
        # events and streams, which the client answers itself once it knows that they are done; captures, host functions and
        # user objects of graphs; managed memory with its advice and prefetches, which the client keeps and answers, texture
        # and surface objects, which have no virtual handles, and batches of 3D copies: all refused before.
        # Then: linking, green contexts, what processes share, lists of functions and kernels, the old launch interface, and
        # logs and core dumps, which are the client library's own: all refused before. And whether a stream is being captured,
        # which the client knows as long as nothing is. And graphs that kernels launch, refused whichever call makes them.
        # And what memory pools say of themselves, which the client keeps since their memory is not the driver's. And the first
        # version of cuDevicePrimaryCtxSetFlags, which refuses a context that is active. And memory of graphs, which is not the
        # driver's either, with what depends on it (launching, uploading, cloning, a node's type), conditional handles, and
        # children that an executable is given: all but the last refused before.
        count = sum(1 for c in self.model.calls if c.client_custom or c.server_custom)
        self.assertLessEqual(count, 267)

    def test_parameters_do_not_shadow_generated_names(self):
        for call in self.model.calls:
            for p in call.params:
                self.assertNotIn(p.name, ("rc", "in", "out", "reply", "session", "request", "call", "kInfo", "per_thread"), call.symbol)


class NoCallNamesTest(unittest.TestCase):
    def test_generator_names_no_call(self):
        for path in glob.glob(os.path.join(HERE, "*.py")):
            if os.path.basename(path) in ("generator_test.py", "parity_test.py"):
                continue
            with open(path, encoding="utf-8") as f:
                for number, line in enumerate(f, 1):
                    self.assertIsNone(re.search(r"""["'][^"']*\bcu[A-Z]\w+""", line.replace("cuX", "")), f"{path}:{number}: {line}")


if __name__ == "__main__":
    unittest.main()
