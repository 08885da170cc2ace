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
import pause  # noqa: E402
import pause_plot  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
import stages  # noqa: E402
import timings  # noqa: E402

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
        found = timings.Timings("Pauses", [{"what": "checkpoint", "max": 0.2, "of": "s"}])
        for gib, what, seconds in ((8, "checkpoint", 0.1), (8, "native", 1.0), (32, "move, <same> GPU", 0.0), (8, "slowdown", 9.0)):
            found.add(what, seconds, group=f"{gib} GiB, 5%", name=what)
        text = pause_plot.draw({"title": "Pauses", "environment": "a GPU & its driver", "rows": found.rows})
        shown = xml.dom.minidom.parseString(text)
        words = [node.firstChild.data for node in shown.getElementsByTagName("text")]
        for word in ("a GPU & its driver", "0.100", "1.000", "0.000", "move, <same> GPU", "8 GiB, 5%", "32 GiB, 5%"):
            self.assertIn(word, words)
        bars = [float(node.getAttribute("width")) for node in shown.getElementsByTagName("rect")][1:]
        self.assertEqual(len(bars), 3)
        # From 0.01 s on, 0.1 s is half of the way to 1 s.
        self.assertAlmostEqual(bars[1] / bars[0], 2, 2)
        limits = [node for node in shown.getElementsByTagName("line") if node.getAttribute("stroke") == "#c00"]
        self.assertEqual(len(limits), 1)

    def test_bars_of_timings(self):
        found = timings.Timings("", [
            {"what": "checkpoint", "gb": 32, "percent": 100, "room": True, "max": 0.15, "of": "s"},
            {"what": "checkpoint", "gb": 32, "percent": 5, "room": False, "max": 0.25, "of": "s"},
            {"what": "changed", "max": 0.15, "of": "of the first"},
        ])  # fmt: skip

        def add(what, seconds, **more):
            row = found.add(what, seconds, group="g", name="n", **more)
            return [(bar["max"], bar["is"], bar["met"]) for bar in row["bars"]], row["limit"]

        self.assertEqual(add("checkpoint", 0.2, beside=0.08, mib=32768, percent=100), ([(0.15, 0.12, True)], 0.23))
        self.assertEqual(add("checkpoint", 0.2, beside=0.02, mib=30518, percent=100), ([(0.15, 0.18, False)], 0.17))
        self.assertEqual(add("checkpoint", 0.2, mib=32768, percent=5, room=False), ([(0.25, 0.2, True)], 0.25))
        for other in ({"mib": 8192, "percent": 100}, {"mib": 32768, "percent": 5}, {"mib": 32768, "percent": 100, "room": False}):
            self.assertEqual(add("checkpoint", 9, **other), ([], None))
        self.assertEqual(add("changed", 2, first=20), ([(0.15, 0.1, True)], 3))
        self.assertEqual(add("changed", 2, value=0.2), ([(0.15, 0.2, False)], None))
        self.assertEqual([line.split(":")[0] for line in found.verdicts()], ["met", "missed", "met", "met", "missed"])

    def test_steps_seen_of_a_pause(self):
        line = pause.Line
        # A second of 10 steps, one of rounds with 9, and a pause of half a second.
        lines = [line(1, 1, 1, 1), line(10, 1, 0.1, 2), line(7, 0.7, 0.1, 2.7), line(9, 1, 0.1, 3.7), line(1, 0.5, 0.5, 4.2), line(10, 1, 0.1, 5.2)]
        seen = pause.Seen(lines, 2.5, 1)
        self.assertEqual((seen.longest, seen.before), (0.5, 10))
        self.assertAlmostEqual(seen.during, 9)
        self.assertAlmostEqual(seen.slowdown(), 0.1)
        self.assertIsNone(pause.Seen(lines, 2.5, 0).slowdown())

    def test_slowdown_counts_rounds_only(self):
        # 1000 steps a second; nothing for 0.01 s of the first look, 500 while host memory is made ready, 900 in the rounds,
        # 1000 until the pause, none in it.
        rates = {2.0: 1000, 2.01: 0, 2.05: 1000, 2.45: 500, 3.0: 900, 3.03: 1000, 3.1: 0, 4: 1000}

        def steps_until(moment):
            steps, begin = 0, 0
            for end, rate in rates.items():
                steps += rate * max(0, min(end, moment) - begin)
                begin = end
            return steps

        ends = [0.01 * number for number in range(401)]
        lines = [
            pause.Line(steps_until(end) - steps_until(begin), end - begin, 0.01, end) for begin, end in zip(ends, ends[1:])
        ]
        (still,) = [line for line in lines if line.begin < 3.055 < line.end]
        still.longest = 0.07
        steps = dict(zip(pause.PARTS.values(), (2.05, 2.45, 3.0)))
        # Of 0.15 s until the first look was over, it took 0.05 s, and the rounds 0.55 s.
        seen = pause.Seen(lines, 1.9, 0.6, steps)
        self.assertAlmostEqual(seen.before, 1000)
        lost = {part: (round(lost, 3), round(seconds, 3)) for part, (lost, seconds) in seen.lost.items()}
        self.assertEqual(lost, {"looking": (0.01, 0.15), "preparing": (0.2, 0.4), "copying": (0.055, 0.55)})
        self.assertAlmostEqual(seen.slowdown(), 0.065 / 0.6)
        self.assertEqual(seen.seconds, 0.6)

    def test_plot_is_xml(self):
        judged = self.judge(launch=row(native=[1.0], ring=[1000.0], grpc=[0.001]), copy=row("GB/s", "higher", native=[2.0], ring=[1.0]))
        environment = {"gpu": "<GPU> & more", "commit": "c", "date": "d"}
        text = plot.draw({"rows": list(judged.values()), "environment": environment})
        circles = xml.dom.minidom.parseString(text).getElementsByTagName("circle")
        self.assertEqual(len(circles), 2 + 3)  # the legend's, and one for each ratio

    def test_every_bar_names_rows_that_are_measured(self):
        options = types.SimpleNamespace(
            thread_counts=[1, 2, 4, 8, 16, 32, 64], session_counts=[1, 2, 4, 8, 16], checkpoint_mib=[1024, 32768]
        )
        lab = types.SimpleNamespace(software=False)
        bench = types.SimpleNamespace(ways=list(stages.WAYS), options=options, lab=lab, has_torch=True, has_cublas=True)
        names = [name for stage in stages.STAGES for name, _ in stages.expected(bench, stage)]
        for bar in report.load_bars():
            for pattern in bar["rows"] + ([bar["of"]] if "of" in bar else []):
                self.assertTrue(any(report.fnmatch.fnmatchcase(name, pattern) for name in names), pattern)
            self.assertIn(bar["kind"], ("ratio", "value", "of"))
            self.assertTrue(set(bar) & {"ring", "grpc"})


if __name__ == "__main__":
    unittest.main()
