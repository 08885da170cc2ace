#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws how long jobs stood still, from the JSON of pause.py, as SVG: a bar for each checkpoint and move.

Usage: pause_plot.py PAUSES.json PLOT.svg

Python's standard library only; any browser shows the file.
"""

import html
import json
import sys

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

    def text(x, at, what, size=12, anchor="start", color="#222", weight="normal"):
        lines.append(f'<text x="{x:.1f}" y="{at:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
                     f'font-weight="{weight}">{html.escape(what)}</text>')  # fmt: skip

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
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>', *lines, "</svg>\n"])


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as f:
        results = json.load(f)
    with open(sys.argv[2], "w") as f:
        f.write(draw(results))


if __name__ == "__main__":
    main()
