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

WIDTH, LEFT, RIGHT, LINE, GAP = 900, 250, 90, 22, 16
COLORS = {"checkpoint": "#1f77b4", "native": "#999999", "move": "#d95f02"}
NAMES = {"native": "the driver's own (lock and checkpoint)", "checkpoint": "live checkpoint"}


def draw(results):
    """The SVG's text for what pause.py --json wrote."""
    groups = {}
    for row in results["rows"]:
        groups.setdefault((row["mib"], row["percent"]), []).append(row)
    longest = max([row["pause_seconds"] for row in results["rows"]] + [0.1])
    step = next(s for s in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 1e9) if longest / s <= 10)
    where = lambda seconds: LEFT + seconds / longest * (WIDTH - LEFT - RIGHT)
    lines, y = [], 28

    def text(*words, **options):
        lines.append(plot.text_element(*words, **options))

    text(10, y, "How long a job stands still, in seconds", 15, weight="bold")
    y += 18
    text(10, y, results["environment"], 11, color="#555")
    y += 22
    top = y
    body = []
    for (mib, percent), rows in sorted(groups.items()):
        y += GAP
        body.append((text, (10, y + 4, f"{mib / 1024:g} GiB, {percent}% of it rewritten in each step"),
                     {"weight": "bold"}))
        y += LINE / 2
        for row in sorted(rows, key=lambda one: one["pause_seconds"]):
            y += LINE
            kind = "move" if row["what"].startswith("move") else row["what"]
            name = NAMES.get(row["what"], row["what"])
            width = where(row["pause_seconds"]) - LEFT
            body.append((text, (LEFT - 8, y - 6, name, 11, "end"), {}))
            body.append((lines.append, (f'<rect x="{LEFT}" y="{y - LINE + 5}" width="{max(width, 1):.1f}" '
                                        f'height="{LINE - 8}" fill="{COLORS.get(kind, "#555")}"/>',), {}))
            body.append((text, (LEFT + width + 6, y - 6, f"{row['pause_seconds']:.3f}", 11), {}))
    at = 0.0
    while at <= longest:
        lines.append(f'<line x1="{where(at):.1f}" x2="{where(at):.1f}" y1="{top}" y2="{y}" stroke="#ddd"/>')
        text(where(at), top - 3, f"{at:g}", 10, "middle", "#777")
        at = round(at + step, 6)
    for function, words, options in body:
        function(*words, **options)
    height = y + 20
    return plot.picture(WIDTH, f"{height:.0f}", lines)


if __name__ == "__main__":
    plot.convert(draw, __doc__)
