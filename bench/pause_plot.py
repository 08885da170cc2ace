#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws how long jobs stood still, from the JSON of pause.py, as SVG: a bar for each checkpoint and move.

Usage: pause_plot.py PAUSES.json PLOT.svg

Python's standard library only; any browser shows the file.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import plot  # noqa: E402

COLORS = {"checkpoint": "#1f77b4", "native": "#999999", "move": "#d95f02"}
NAMES = {"native": "the driver's own (lock and checkpoint)", "checkpoint": "live checkpoint"}


def draw(results):
    """The SVG's text for what pause.py --json wrote."""
    jobs = {}
    for row in results["rows"]:
        jobs.setdefault((row["mib"], row["percent"]), []).append(row)
    groups = []
    for (mib, percent), rows in sorted(jobs.items()):
        kind = lambda what: "move" if what.startswith("move") else what
        found = [(NAMES.get(row["what"], row["what"]), row["pause_seconds"], COLORS.get(kind(row["what"]), "#555"))
                 for row in sorted(rows, key=lambda one: one["pause_seconds"])]  # fmt: skip
        groups.append((f"{mib / 1024:g} GiB, {percent}% of it rewritten in each step", found))
    return plot.bars("How long a job stands still, in seconds", results["environment"], groups)


if __name__ == "__main__":
    plot.convert(draw, __doc__)
