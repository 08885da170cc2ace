#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of thread_safety_test.py: that clang finds a missing lock, with the project's own annotations."""

import os
import shutil
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, HERE)
import thread_safety_test  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(HERE))
CLASS = """#include "client/session/guarded.h"
namespace cuda_remote::client {
class Counter {
 public:
  int Next() {
    %s
    return ++count_;
  }
  void AddLocked() CR_REQUIRES(mutex_) { ++count_; }
  void Add() { %s }
 private:
  Mutex mutex_;
  int count_ CR_GUARDED_BY(mutex_) = 0;
};
}  // namespace cuda_remote::client
"""
LOCK = "MutexLock lock(&mutex_);"


class ThreadSafetyTest(unittest.TestCase):
    def problems(self, files):
        with tempfile.TemporaryDirectory() as root:
            guarded = os.path.join(root, thread_safety_test.ANNOTATIONS)
            os.makedirs(os.path.dirname(guarded))
            shutil.copy(os.path.join(ROOT, thread_safety_test.ANNOTATIONS), guarded)
            for path, text in files.items():
                with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                    f.write(text)
            return thread_safety_test.problems(root)

    def test_locks_that_are_held(self):
        self.assertEqual(self.problems({"client/a.h": CLASS % (LOCK, LOCK + " AddLocked();")}), (1, []))

    def test_a_missing_lock(self):
        count, found = self.problems({"client/a.h": CLASS % ("", "")})
        self.assertEqual((count, len(found)), (1, 1))
        self.assertIn("writing variable 'count_' requires holding mutex 'mutex_' exclusively", found[0])

    def test_a_function_that_wants_the_lock(self):
        _, found = self.problems({"client/a.h": CLASS % (LOCK, "AddLocked();")})
        self.assertEqual(len(found), 1)
        self.assertIn("calling function 'AddLocked' requires holding mutex", found[0])

    def test_the_source_beside_a_header(self):
        header = '#include "client/session/guarded.h"\nstruct S {\n  cuda_remote::client::Mutex mutex;\n  int n CR_GUARDED_BY(mutex);\n  void F();\n};\n'
        count, found = self.problems({"client/s.h": header, "client/s.cc": '#include "client/s.h"\nvoid S::F() { n = 1; }\n'})
        self.assertEqual((count, len(found)), (2, 1))

    def test_other_sources_are_not_looked_at(self):
        self.assertEqual(self.problems({"client/b.cc": "no C++ at all"}), (0, []))


if __name__ == "__main__":
    unittest.main()
