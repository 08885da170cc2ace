#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the generator: defaults refuse to guess, the lint finds what it should, the lock locks, no call names in code."""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
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


def with_effects(signatures, semantics):
    """Adds what every row must state, for tests of something else."""
    named = {name for row in semantics.call for name in row.name}
    for signature in signatures.signature:
        if signature.symbol not in named:
            semantics.call.add(name=[signature.symbol])
    work = SCHEMA.Traits.Work
    for row in semantics.call:
        shown = row.creates or row.HasField("destroys") or row.HasField("modifies") or row.cached
        asks = row.traits.work in (work.Value("WAITS"), work.Value("ASKS"))
        if not (row.effect or shown or asks or row.local):
            row.effect = SCHEMA.Row.WORKS if getattr(row, "async") else SCHEMA.Row.ASKS
    return semantics


def join(signature, semantics="", structs="", operations="", complete=with_effects):
    sig = text_format.Parse('signature { name: "xGetIt" symbol: "xGetIt" abi: 1 since: 2000 id: 1 ' + signature + " }" + TYPES,
                            SCHEMA.Signatures())
    rows = text_format.Parse(semantics, SCHEMA.Semantics())
    model = model_module.join(SCHEMA, sig, complete(sig, rows) if complete else rows,
                              text_format.Parse(STRUCTS + structs, SCHEMA.Structs()),
                              text_format.Parse(operations, SCHEMA.Operations()), defaults)
    return model


def problems(*args, **kwargs):
    return "\n".join(lint.check(join(*args, **kwargs)))


def read(name):
    with open(os.path.join(API, name), encoding="utf-8") as f:
        return f.read()


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


class EffectTest(unittest.TestCase):
    """What a call changes has no default."""

    def complaints(self, params="", rows='call { name: "xGetIt" }', structs=""):
        return problems(params, rows, structs, complete=None)

    def test_every_call_has_a_row(self):
        said = self.complaints(rows="")
        self.assertIn('xGetIt: semantics.textproto has no row for it. Add `call { name: "xGetIt" effect: ASKS }`', said)
        self.assertEqual(self.complaints(rows='call { name: "xGetIt" effect: ASKS }'), "")
        self.assertEqual(self.complaints(rows='call { name: "xGetIt" unsupported: "a test" }'), "")
        self.assertEqual(self.complaints(rows='call { name: "xGetIt" custom: CLIENT local: true }'), "")

    def test_every_row_states_its_effect(self):
        row = lambda what: self.complaints('param { type: "Thing" name: "t" }', f'call {{ name: "xGetIt" {what} }}')  # noqa: E731
        for what in ("", "async: true", "custom: CLIENT", "custom: BOTH wire { }", "traits { work: STARTS_NONE }"):
            self.assertIn("xGetIt: its row must state what it changes", row(what), what)
            self.assertEqual(row(what + " effect: PASSES"), "", what)
        for what in ('destroys { param: "t" } async: true', 'modifies { param: "t" }', "cached: true",
                     "traits { work: ASKS }", "traits { work: WAITS completes: WORK_AND_ERRORS }"):
            self.assertEqual(row(what), "", what)
            self.assertIn("says already what it changes", row(what + " effect: PASSES"), what)
        self.assertIn("no request", row("effect: ASKS custom: CLIENT local: true"))

    def test_effects_that_cannot_be(self):
        row = lambda what: self.complaints("", f'call {{ name: "xGetIt" {what} }}')  # noqa: E731
        self.assertIn("cannot only ask", row("effect: ASKS async: true"))
        for effect in ("CREATES", "MODIFIES", "DESTROYS"):
            said = row(f"effect: {effect} traits {{ completes: WORK }}")
            self.assertIn(f"state `{effect.lower()}` instead", said)
            self.assertEqual(row(f"effect: {effect} custom: CLIENT traits {{ completes: WORK }}"), "")

    def test_what_destroys_says_what_is_complete(self):
        self.assertIn("must state `completes`", self.complaints(rows='call { name: "xGetIt" effect: DESTROYS custom: CLIENT }'))

    def test_work_that_the_parameters_do_not_show(self):
        row = lambda traits: self.complaints("", 'call { name: "xGetIt" effect: WORKS custom: BOTH '  # noqa: E731
                                             'wire { request { name: "at" type: "uint64" number: 1 } } traits { ' + traits + " } }")
        self.assertIn("must state `events`", row("capture: OBSTACLE"))
        self.assertEqual(row("capture: OBSTACLE events: NO_EVENTS"), "")
        self.assertIn("what its message `names`", row("capture: RECORDED events: NO_EVENTS"))
        self.assertEqual(row('capture: RECORDED events: NO_EVENTS names { field: "at" }'), "")
        graph = self.complaints('param { type: "Exec" name: "e" } } type { name: "Exec" class: HANDLE repr: "void *"',
                                'call { name: "xGetIt" effect: WORKS }', 'handle { type: "Exec" kind: "GraphExec" }')
        self.assertIn("must state `events`", graph)


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

    def test_no_call_can_be_left_out(self):
        signatures = text_format.Parse(read("signatures.textproto"), SCHEMA.Signatures())
        structs = text_format.Parse(read("structs.textproto"), SCHEMA.Structs())
        operations = text_format.Parse(read("operations.textproto"), SCHEMA.Operations())
        empty = model_module.join(SCHEMA, signatures, SCHEMA.Semantics(), structs, operations, defaults)
        said = set(re.findall(r"^(\w+): semantics.textproto has no row", "\n".join(lint.check(empty)), re.M))
        self.assertEqual(said, {call.symbol for call in self.model.calls})

    def test_a_call_without_a_row_does_not_build(self):
        """As the build runs the generator, with a call that nobody has described."""
        with tempfile.TemporaryDirectory() as folder:
            api, out = os.path.join(folder, "api"), os.path.join(folder, "out")
            shutil.copytree(API, api, ignore=shutil.ignore_patterns("*.h", "*.cc", "*.md"))
            with open(os.path.join(api, "signatures.textproto"), "a", encoding="utf-8") as f:
                f.write('signature { name: "cuCtxNew" symbol: "cuCtxNew" abi: 1 since: 13000 id: 9000 }\n')
            command = [sys.executable, os.path.join(HERE, "generate.py"), "--api", api, "--emit", "traits", "--out", out]
            built = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(built.returncode, 1)
            self.assertRegex(built.stderr, r"^lint: cuCtxNew: semantics.textproto has no row for it")
            self.assertFalse(os.path.exists(out))
            with open(os.path.join(api, "semantics.textproto"), "a", encoding="utf-8") as f:
                f.write('call { name: "cuCtxNew" }\n')
            built = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertRegex(built.stderr, r"^lint: cuCtxNew: its row must state what it changes")
            with open(os.path.join(api, "semantics.textproto"), "w", encoding="utf-8") as f:
                f.write(read("semantics.textproto") + 'call { name: "cuCtxNew" effect: PASSES }\n')
            built = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual((built.returncode, built.stderr), (0, ""))
            self.assertTrue(os.path.exists(os.path.join(out, "call_traits.gen.h")))

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
        # children that an executable is given: all but the last refused before. And copies of a stream's attributes, which the
        # log has as what was copied. And whether a node is enabled, which the client keeps of copies of pageable memory.
        # And operations on memory by streams, whose errors come from the call, array levels and planes, and what a pointer
        # was told of synchronous operations, which the client keeps. And rights to mapped memory, which a checkpoint extends.
        count = sum(1 for c in self.model.calls if c.client_custom or c.server_custom)
        self.assertLessEqual(count, 278)

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
