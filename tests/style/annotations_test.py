#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests that clang-tidy finds a missing lock, with the project's own checks and annotations (proto/threads/mutex.h)."""

import os
import subprocess
import tempfile
import unittest

# As in tidy.bzl.
CLANG_TIDY = "clang-tidy-14"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
CLASSES = """#include "proto/threads/mutex.h"
namespace cuda_remote::client {
class Counter {
 public:
  int Next() {
    %s
    return ++count_;
  }
  int Look() {
    %s
    return count_;
  }
  void AddLocked() CR_REQUIRES(mutex_) { ++count_; }
  void WaitLocked() CR_REQUIRES(own_) {
    while (!done_) changed_.Wait(&own_);
  }
  void Pause() {
    MutexLock lock(&own_);
    done_ = false;
    lock.Unlock();
    %s
    lock.Lock();
    done_ = true;
  }
  void Again() {
    RecursiveMutexLock lock(&again_);
    ++depth_;
  }
  SharedMutex& mutex() CR_RETURNS(mutex_) { return mutex_; }
  int& count() CR_REQUIRES_SHARED(mutex_) { return count_; }
 private:
  friend class Log;
  SharedMutex mutex_;
  int count_ CR_GUARDED_BY(mutex_) = 0;
  Mutex own_;
  Condition changed_;
  bool done_ CR_GUARDED_BY(own_) = false;
  RecursiveMutex again_;
  int depth_ CR_GUARDED_BY(again_) = 0;
};
class Log {
 public:
  SharedMutex& mutex() CR_RETURNS(mutex_) { return mutex_; }
 private:
  SharedMutex mutex_ CR_ACQUIRED_AFTER(&Counter::mutex_);
};
void Use(Counter* counter, Log* log) {
  %s
}
}  // namespace cuda_remote::client
"""
WRITES, LOOKS = "WriterLock lock(&mutex_);", "ReaderLock lock(&mutex_);"
OUTSIDE = "WriterLock lock(&counter->mutex()); "


class AnnotationsTest(unittest.TestCase):
    def complaints(self, writes, looks, uses, pauses=""):
        """What clang-tidy says of the classes with these bodies, of Next, Look, Use and Pause."""
        with tempfile.NamedTemporaryFile("w", suffix=".cc") as source:
            source.write(CLASSES % (writes, looks, pauses, uses))
            source.flush()
            done = subprocess.run([CLANG_TIDY, "--quiet", f"--config-file={ROOT}/.clang-tidy", source.name, "--", "-std=c++17", "-iquote", ROOT],
                                  capture_output=True, text=True, check=False)  # fmt: skip
        self.assertEqual(done.returncode != 0, "error:" in done.stdout, done.stdout + done.stderr)
        return done.stdout

    def test_locks_that_are_held(self):
        self.assertEqual(self.complaints(WRITES, LOOKS, OUTSIDE + "counter->AddLocked(); ++counter->count();"), "")

    def test_a_missing_lock(self):
        self.assertIn("writing variable 'count_' requires holding mutex 'mutex_' exclusively", self.complaints("", LOOKS, ""))

    def test_a_lock_for_looking_only(self):
        self.assertIn("writing variable 'count_' requires holding mutex 'mutex_' exclusively", self.complaints(LOOKS, LOOKS, ""))

    def test_a_function_that_wants_the_lock(self):
        self.assertIn("calling function 'AddLocked' requires holding mutex 'counter->mutex_' exclusively",
                      self.complaints(WRITES, LOOKS, "counter->AddLocked();"))  # fmt: skip

    def test_what_a_part_gives_out(self):
        self.assertIn("calling function 'count' requires holding mutex 'counter->mutex_'", self.complaints(WRITES, LOOKS, "counter->count();"))

    def test_a_lock_that_was_let_go_of(self):
        self.assertIn("requires holding mutex", self.complaints(WRITES, LOOKS, OUTSIDE + "lock.Unlock(); counter->AddLocked();"))

    def test_the_order_of_locks(self):
        first, second = "WriterLock one(&counter->mutex()); ", "ReaderLock other(&log->mutex()); "
        self.assertEqual(self.complaints(WRITES, LOOKS, first + second), "")
        self.assertIn("must be acquired before", self.complaints(WRITES, LOOKS, second + first))

    def test_what_is_done_in_a_pause(self):
        self.assertIn("writing variable 'done_' requires holding mutex 'own_' exclusively", self.complaints(WRITES, LOOKS, "", "done_ = true;"))


if __name__ == "__main__":
    unittest.main()
