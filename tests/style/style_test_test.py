#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of style_test.py: what it finds in small trees of its own."""

import os
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import style_test  # noqa: E402

GOOD = "int main() { return 0; }\n"
BAD = "int  main( ) {return 0;}\n"


class StyleTest(unittest.TestCase):
    def problems(self, files):
        with tempfile.TemporaryDirectory() as root:
            files = dict(files, **{".clang-format": "BasedOnStyle: Google\n"})
            for path, text in files.items():
                os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                    f.write(text)
            return style_test.problems(root)

    def test_formatted_files(self):
        self.assertEqual(self.problems({"proto/a.cc": GOOD, "server/b.h": GOOD}), (2, []))

    def test_a_file_that_is_not_formatted(self):
        count, found = self.problems({"proto/a.cc": GOOD, "server/b.cu": BAD})
        self.assertEqual((count, len(found)), (2, 1))
        self.assertIn("server/b.cu: is not formatted. Run: clang-format-14 -i server/b.cu", found[0])

    def test_mistakes_in_python(self):
        files = {"proto/a.cc": GOOD, "tests/a.py": "import re\nprint(command)\n", "tests/b.py": "print(1)\n", "tests/c.py": "print(\n"}
        count, found = self.problems(files)
        found = "\n".join(found)
        self.assertEqual(count, 4)
        for mistake in ("tests/a.py:1:1: 're' imported but unused", "tests/a.py:2:7: undefined name 'command'", "tests/c.py:1:"):
            self.assertIn(mistake, found)
        self.assertNotIn("tests/b.py", found)

    def test_other_files_are_not_sources(self):
        self.assertEqual(self.problems({"proto/a.cc": GOOD, "proto/a.sh": BAD, "third_party/a.cc": BAD})[0], 1)

    def test_a_tree_without_sources_is_a_mistake(self):
        with self.assertRaises(RuntimeError):
            self.problems({"docs/a.md": GOOD})


if __name__ == "__main__":
    unittest.main()
