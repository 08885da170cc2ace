#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""count.py's comparison: small differences pass, large ones and missing calls are named."""

import os
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import count  # noqa: E402

RECORDED = {"launch": {"instructions": 1000.0}, "tiny": {"instructions": 10.0}}


class CompareTest(unittest.TestCase):
    def compare(self, tolerance=3, quiet=0, **counts):
        return count.compare({name: (value, 1, 0, quiet) for name, value in counts.items()}, RECORDED, tolerance)

    def test_same(self):
        self.assertEqual(self.compare(launch=1029, tiny=13), [])

    def test_more_and_less(self):
        self.assertIn("+3.2 %", self.compare(launch=1032, tiny=10)[0])
        self.assertIn("-10.0 %", self.compare(launch=900, tiny=10)[0])
        self.assertEqual(self.compare(20, launch=900, tiny=10), [])

    def test_requests_that_become_quiet(self):
        self.assertIn("quiet", self.compare(launch=1000, tiny=10, quiet=1)[0])

    def test_missing_ones(self):
        self.assertEqual(self.compare(launch=1000), ["tiny: recorded, but not counted any more"])
        self.assertEqual(self.compare(launch=1000, tiny=10, new=5), ["new: not recorded"])


if __name__ == "__main__":
    unittest.main()
