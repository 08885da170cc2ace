#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws how long jobs stood still, or how long checkpoints took, from the JSON of pause.py or incremental.py, as SVG.

Usage: pause_plot.py TIMES.json PLOT.svg

A bar for each checkpoint and move, and a red line where it should end (bars.json), on a logarithmic scale. Python's standard library only; any
browser shows the file.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import plot  # noqa: E402

LEAST = 0.01  # seconds: where the scale begins
COLORS = {"native": "#999999", "move": "#d95f02"}


def color(what):
    return COLORS.get("move" if what.startswith("move") else what, "#1f77b4")


def draw(results):
    """The SVG's text for what Timings.finish wrote."""
    groups = {}
    for row in results["rows"]:
        if row["what"] == "slowdown" or row["name"].endswith(": space"):
            continue  # no time
        name = row["name"].removesuffix(": time")
        groups.setdefault(row["group"], []).append((name, row["seconds"], color(row["what"]), row["limit"]))
    return plot.bars(results["title"], results["environment"], list(groups.items()), least=LEAST)


if __name__ == "__main__":
    plot.convert(draw, __doc__)
