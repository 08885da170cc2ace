#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the ratios of a benchmark's JSON as SVG: one line for each row, native at 1, ring and gRPC as dots, bars as ticks.

Usage: plot.py RESULTS.json PLOT.svg

The scale is logarithmic. Rows of which less is better and rows of which more is better stand apart. Needs Python's standard
library only; any browser shows the file.
"""

import html
import json
import math
import sys

WIDTH, LEFT, RIGHT, LINE = 1000, 340, 60, 20
COLORS = {"ring": "#1f77b4", "grpc": "#d95f02"}
NAMES = {"ring": "ring", "grpc": "gRPC, loopback"}


def text_element(x, y, what, size=12, anchor="start", color="#222", weight="normal"):
    """A line of text that begins, or has its middle or its end (`anchor`), at this point."""
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
            f'font-weight="{weight}">{html.escape(what)}</text>')  # fmt: skip


def picture(width, height, lines):
    """The SVG's text, of its elements."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *lines, "</svg>\n"])


def bars(title, subtitle, groups, unit_steps=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10), least=None):
    """The SVG's text for horizontal bars: groups of (heading, [(name, value, color) or (name, value, color, limit), ...]), on
    one scale from 0, or a logarithmic one from `least`. A limit is a red line; None: there is none.
    """
    width, left, right, line, gap = 900, 250, 90, 22, 16
    groups = [(heading, [(*one, None)[:4] for one in rows]) for heading, rows in groups]
    longest = max([value for _, rows in groups for _, *values in rows for value in values[::2] if value] + [0.1])
    if least is None:
        step = next((s for s in unit_steps if longest / s <= 10), longest)
        ticks = [round(n * step, 6) for n in range(int(longest / step) + 1)]
        part = lambda value: value / longest
    else:
        ticks = [tick for tick in (least * 10**n for n in range(9)) if tick <= longest * 1.001]
        part = lambda value: math.log(max(value, least) / least) / math.log(longest / least)
    where = lambda value: left + part(value) * (width - left - right)
    top = y = 68
    grid, body = [], []
    for heading, rows in groups:
        y += gap
        body.append(text_element(10, y + 4, heading, weight="bold"))
        y += line / 2
        for name, value, color, limit in rows:
            y += line
            body.append(text_element(left - 8, y - 6, name, 11, "end"))
            body.append(f'<rect x="{left}" y="{y - line + 5}" width="{max(where(value) - left, 1):.1f}" '
                        f'height="{line - 8}" fill="{color}"/>')  # fmt: skip
            body.append(text_element(where(value) + 6, y - 6, f"{value:.3f}", 11))
            if limit is not None:
                body.append(f'<line x1="{where(limit):.1f}" x2="{where(limit):.1f}" y1="{y - line + 3}" y2="{y - 1}" '
                            f'stroke="#c00" stroke-width="2"/>')  # fmt: skip
    for tick in ticks:
        grid.append(f'<line x1="{where(tick):.1f}" x2="{where(tick):.1f}" y1="{top}" y2="{y}" stroke="#ddd"/>')
        grid.append(text_element(where(tick), top - 3, f"{tick:g}", 10, "middle", "#777"))
    head = [text_element(10, 28, title, 15, weight="bold"), text_element(10, 46, subtitle, 11, color="#555")]
    return picture(width, f"{y + 20:.0f}", head + grid + body)


def convert(draw, usage):
    """The program PLOT INPUT.json OUTPUT.svg: what `draw` makes of the JSON."""
    if len(sys.argv) != 3:
        sys.exit(usage)
    with open(sys.argv[1]) as f:
        results = json.load(f)
    with open(sys.argv[2], "w") as f:
        f.write(draw(results))


def draw(results):
    """The SVG's text for what run.py --json wrote."""
    parts = {"lower": [], "higher": []}
    for row in results["rows"]:
        if row.get("ratios"):
            parts[row["better"]].append(row)
    ratios = [r for part in parts.values() for row in part for r in row["ratios"].values() if r > 0] or [1]
    low = math.floor(math.log10(min(ratios + [0.5])))
    high = math.ceil(math.log10(max(ratios + [2])))
    where = lambda ratio: LEFT + (math.log10(max(ratio, 10.0**low)) - low) / (high - low) * (WIDTH - LEFT - RIGHT)
    lines, y = [], 30

    def text(*words, **options):
        lines.append(text_element(*words, **options))

    env = results["environment"]
    text(10, y, "cuda-remote: cost of calls, ratio to native in the same run", 15, weight="bold")
    y += 20
    text(10, y, f"{env['gpu']}, commit {env['commit']}, {env['date']}", 11, color="#555")
    for place, way in enumerate(("ring", "grpc")):
        lines.append(f'<circle cx="{WIDTH - 330 + 90 * place}" cy="{y - 4}" r="5" fill="{COLORS[way]}"/>')
        text(WIDTH - 320 + 90 * place, y, NAMES[way], 11)
    lines.append(f'<line x1="{WIDTH - 110}" x2="{WIDTH - 110}" y1="{y - 10}" y2="{y + 2}" stroke="#222" stroke-width="2"/>')
    text(WIDTH - 104, y, "bar", 11)
    for better, title in (("lower", "Less is better"), ("higher", "More is better")):
        rows = parts[better]
        if not rows:
            continue
        y += 36
        text(10, y, title, 13, weight="bold")
        top = y + 10
        bottom = top + LINE * len(rows)
        for decade in range(low, high + 1):
            x = where(10.0**decade)
            lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#ddd"/>')
            text(x, top - 2, f"{10.0**decade:g}x", 10, "middle", "#777")
        lines.append(f'<line x1="{where(1):.1f}" x2="{where(1):.1f}" y1="{top}" y2="{bottom}" stroke="#333"/>')
        y = top
        for row in rows:
            y += LINE
            middle = y - LINE / 2
            text(LEFT - 10, middle + 4, row["name"], 11, "end")
            for way, ratio in row["ratios"].items():
                missed = any(b["way"] == way and b["kind"] == "ratio" and b.get("met") is False for b in row["bars"])
                ring = ' stroke="#c00" stroke-width="2.5"' if missed else ""
                place = middle + (-3 if way == "ring" else 3)
                lines.append(f'<circle cx="{where(ratio):.1f}" cy="{place:.1f}" r="5" fill="{COLORS[way]}"{ring}>'
                             f"<title>{html.escape(row['name'])}, {NAMES[way]}: {ratio:.3g}x</title></circle>")  # fmt: skip
            for bar in row["bars"]:
                if bar["kind"] == "ratio":
                    x = where(bar.get("max", bar.get("min")))
                    lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{middle - 8:.1f}" y2="{middle + 8:.1f}" '
                                 f'stroke="{COLORS[bar["way"]]}" stroke-width="2"/>')  # fmt: skip
    height = y + 40
    text(10, height - 12, "A red rim: the bar is missed.", 11, color="#555")
    return picture(WIDTH, height, lines)


if __name__ == "__main__":
    convert(draw, __doc__)
