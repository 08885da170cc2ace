#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of sizes_test.py: what it counts in small texts, and when it complains."""

import os
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import sizes_test  # noqa: E402

SOURCE = """#include <x>

namespace a {

struct Pair {
  int first = 0;
};

constexpr int kTable[] = {
  1,
};

int Short(int x) {
  return x;
}

template <typename T>
int Long(
    T x) {
""" + "  x();\n" * 70 + """  return 0;
}

}  // namespace a
"""

HEADER = """class CR_CAPABILITY("mutex") Room final : public House {
 public:
  Room();
  // Not this(one);
  int size() const { return size_; }
  absl::Status Open(const std::string& path,
                    int flags) CR_REQUIRES(mutex_);
  using Name = std::function<void()>;
  struct Inside {
    int not_counted_ = 0;
    void Nor();
  };

 private:
  void Hidden();
  int size_ = 0;
  std::map<int, int> doors_ CR_GUARDED_BY(mutex_);
  Mutex mutex_;
};
"""


class SizesTest(unittest.TestCase):
    def test_functions(self):
        self.assertEqual([lines for _, lines in sizes_test.functions(SOURCE)], [3, 75])

    def test_classes(self):
        self.assertEqual(list(sizes_test.classes(HEADER)), [("Room", 3, 3)])

    def test_rooms(self):
        self.assertEqual(sizes_test.room("client/core/call.cc"), "client/core")
        self.assertEqual(sizes_test.room("host/move.cc"), "host")
        self.assertEqual(sizes_test.room("server/worker/calls/copy.cc"), "server/worker")

    def test_only_growth_is_wrong(self):
        limits = {"lines": {"a": 10}, "functions of more than 60 lines": 1}
        self.assertEqual(sizes_test.grown(limits, {"lines": {"a": 9}, "functions of more than 60 lines": 1}, {}), [])
        self.assertIn("lines of a: 11", sizes_test.grown(limits, {"lines": {"a": 11}, "functions of more than 60 lines": 0}, {})[0])
        self.assertIn("lines of b: 1", sizes_test.grown(limits, {"lines": {"b": 1}, "functions of more than 60 lines": 0}, {})[0])
        self.assertIn("60 lines: 2", sizes_test.grown(limits, {"lines": {}, "functions of more than 60 lines": 2}, {})[0])


if __name__ == "__main__":
    unittest.main()
