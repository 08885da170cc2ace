#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""report.py and the plots: medians, ratios, each kind of bar, and that every bar names rows that exist."""

import os
import sys
import types
import unittest
import xml.dom.minidom

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../tests/matrix")]
import pause_plot  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
import stages  # noqa: E402

BARS = [
    {"rows": ["launch*"], "kind": "ratio", "ring": {"max": 0.5}, "grpc": {"max": 2}},
    {"rows": ["copy"], "kind": "ratio", "ring": {"min": 0.97}},
    {"rows": ["copy"], "kind": "of", "of": "tcp", "grpc": {"min": 0.8}},
    {"rows": ["idle"], "kind": "value", "ring": {"max": 0.5}},
    {"rows": ["scaled"], "kind": "of", "of": "base", "ring": {"min": 0.9}},
]


def row(unit="us", better="lower", **ways):
    return {"unit": unit, "better": better, "group": "calls", **ways}


class ReportTest(unittest.TestCase):
    def judge(self, **rows):
        judged = report.judge({name.replace("_", " "): value for name, value in rows.items()}, BARS)
        return {r["name"]: r for r in judged}

    def bar(self, judged, name, way):
        (bar,) = [bar for bar in judged[name]["bars"] if bar["way"] == way]
        return bar

    def test_medians_and_ratios(self):
        judged = self.judge(launch_a=row(native=[1.0, 9.0, 2.0], ring=[1.0], grpc=[5.0]))
        self.assertEqual(judged["launch a"]["native"], {"value": 2.0, "low": 1.0, "high": 9.0, "rounds": [1.0, 9.0, 2.0]})
        self.assertEqual(judged["launch a"]["ratios"], {"ring": 0.5, "grpc": 2.5})
        self.assertTrue(self.bar(judged, "launch a", "ring")["met"])
        self.assertFalse(self.bar(judged, "launch a", "grpc")["met"])

    def test_what_is_not_known_is_not_met(self):
        judged = self.judge(launch=row(native={"error": "no"}, ring=[1.0]), copy=row(native=[1.0], ring={"error": "x: y"}))
        self.assertNotIn("ratios", judged["launch"])
        self.assertNotIn("met", self.bar(judged, "launch", "ring"))
        self.assertNotIn("met", self.bar(judged, "copy", "ring"))
        text = report.table(list(judged.values()))
        self.assertIn("bar <= 0.5x: not known", text)
        self.assertIn("| copy | 1 us | y |", text)
        self.assertIn("0 met, 0 missed", text)

    def test_bars_of_other_rows(self):
        judged = self.judge(copy=row("GB/s", "higher", native=[50.0], ring=[49.0], grpc=[1.5]), tcp=row("GB/s", native=[2.0]),
                            base=row("1/s", ring=[100.0], native=[7.0]), scaled=row("1/s", ring=[80.0]))  # fmt: skip
        self.assertTrue(self.bar(judged, "copy", "ring")["met"])
        # The stream has one column only; other rows are compared within the way.
        self.assertEqual(self.bar(judged, "copy", "grpc")["is"], 0.75)
        self.assertEqual(self.bar(judged, "scaled", "ring")["is"], 0.8)
        text = report.table(list(judged.values()))
        self.assertIn("0.75x, bar >= 0.8x of tcp: **MISSED**", text)
        self.assertIn("1 met, 2 missed", text)

    def test_values_may_be_negative_or_zero(self):
        judged = self.judge(idle=row("%", native=[0.0], ring=[-0.1]))
        self.assertTrue(self.bar(judged, "idle", "ring")["met"])
        self.assertNotIn("ratios", judged["idle"])

    def test_plot_of_pauses(self):
        rows = [
            {"mib": mib, "percent": 5, "what": what, "pause_seconds": seconds}
            for mib, what, seconds in ((8192, "checkpoint", 0.1), (8192, "native", 0.625), (32768, "move, <same> GPU", 0.0))
        ]
        text = pause_plot.draw({"environment": "a GPU & its driver", "rows": rows})
        shown = xml.dom.minidom.parseString(text)
        words = [node.firstChild.data for node in shown.getElementsByTagName("text")]
        for word in ("a GPU & its driver", "0.100", "0.625", "0.000", "move, <same> GPU", "8 GiB, 5% of it rewritten in each step"):
            self.assertIn(word, words)
        bars = [float(node.getAttribute("width")) for node in shown.getElementsByTagName("rect")][1:]
        self.assertEqual(len(bars), 3)
        self.assertAlmostEqual(bars[1] / bars[0], 6.25, 2)

    def test_plot_is_xml(self):
        judged = self.judge(launch=row(native=[1.0], ring=[1000.0], grpc=[0.001]), copy=row("GB/s", "higher", native=[2.0], ring=[1.0]))
        environment = {"gpu": "<GPU> & more", "commit": "c", "date": "d"}
        text = plot.draw({"rows": list(judged.values()), "environment": environment})
        circles = xml.dom.minidom.parseString(text).getElementsByTagName("circle")
        self.assertEqual(len(circles), 2 + 3)  # the legend's, and one for each ratio

    def test_every_bar_names_rows_that_are_measured(self):
        options = types.SimpleNamespace(
            thread_counts=[1, 2, 4, 8, 16, 32, 64], session_counts=[1, 2, 4, 8, 16], checkpoint_mib=[1024]
        )
        lab = types.SimpleNamespace(software=False)
        bench = types.SimpleNamespace(ways=list(stages.WAYS), options=options, lab=lab, has_torch=True)
        names = [name for stage in stages.STAGES for name, _ in stages.expected(bench, stage)]
        for bar in report.load_bars():
            for pattern in bar["rows"] + ([bar["of"]] if "of" in bar else []):
                self.assertTrue(any(report.fnmatch.fnmatchcase(name, pattern) for name in names), pattern)
            self.assertIn(bar["kind"], ("ratio", "value", "of"))
            self.assertTrue(set(bar) & {"ring", "grpc"})


if __name__ == "__main__":
    unittest.main()
