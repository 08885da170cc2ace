# SPDX-License-Identifier: Apache-2.0
"""Results of the benchmark: medians, ratios, bars, the table. Python standard library only."""

import fnmatch
import json
import os
import platform
import statistics
import subprocess
import time

HERE = os.path.dirname(os.path.realpath(__file__))


def load_bars(path=os.path.join(HERE, "bars.json")):
    with open(path) as f:
        return json.load(f)["bars"]


def number(value):
    """Three significant digits, without exponents for what people meet."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def bars_of(bars, name, way):
    for bar in bars:
        if way in bar and any(fnmatch.fnmatchcase(name, pattern) for pattern in bar["rows"]):
            yield bar


def judge(rows, bars):
    """Adds medians, ratios and bars to the rows of stages.Bench; returns a list as it goes into the JSON file."""
    out = []
    for name, row in rows.items():
        result = {"name": name, "group": row["group"], "unit": row["unit"], "better": row["better"]}
        for way in ("native", "ring", "grpc"):
            cell = row.get(way)
            if isinstance(cell, dict):
                result[way] = {"error": cell["error"]}
            elif cell:
                result[way] = {"value": statistics.median(cell), "low": min(cell), "high": max(cell), "rounds": cell}
        out.append(result)
    values = {row["name"]: {way: row[way]["value"] for way in ("native", "ring", "grpc") if "value" in row.get(way, {})} for row in out}
    for row in out:
        mine = values[row["name"]]
        if mine.get("native", 0) > 0:
            row["ratios"] = {way: mine[way] / mine["native"] for way in ("ring", "grpc") if way in mine}
        row["bars"] = []
        for way in ("ring", "grpc"):
            for bar in bars_of(bars, row["name"], way):
                judged = {"way": way, "kind": bar["kind"], **bar[way]}
                if bar["kind"] == "of":
                    judged["of"] = bar["of"]
                    other = values.get(bar["of"], {})
                    base = other.get(way, other.get("native"))
                else:
                    base = mine.get("native") if bar["kind"] == "ratio" else 1
                if way in mine and base:
                    judged["is"] = mine[way] / base
                    judged["met"] = judged["is"] <= bar[way].get("max", float("inf")) and judged["is"] >= bar[way].get("min", float("-inf"))
                row["bars"].append(judged)
    return out


def bar_text(bar, unit):
    limit = f"<= {number(bar['max'])}" if "max" in bar else f">= {number(bar['min'])}"
    suffix = {"ratio": "x", "value": f" {unit}".rstrip(), "of": f"x of {bar.get('of')}"}[bar["kind"]]
    if "met" not in bar:
        return f"bar {limit}{suffix}: not known"
    is_text = f"{number(bar['is'])}x, " if bar["kind"] == "of" else ""
    return f"{is_text}bar {limit}{suffix}" + ("" if bar["met"] else ": **MISSED**")


def cell(row, way):
    result = row.get(way)
    if result is None:
        return ""
    if "error" in result:
        return result["error"].split(": ")[-1][:60]
    text = f"{number(result['value'])} {row['unit']}".rstrip()
    extra = [f"{number(row['ratios'][way])}x"] if way in row.get("ratios", {}) else []
    extra += [bar_text(bar, row["unit"]) for bar in row["bars"] if bar["way"] == way]
    return text + (f" ({'; '.join(extra)})" if extra else "")


def table(rows):
    """Markdown, a section for each group."""
    lines, group = [], None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            lines += ["", f"### {group}", "", "| | native | ring | gRPC, loopback |", "| --- | --- | --- | --- |"]
        lines.append(f"| {row['name']} | " + " | ".join(cell(row, way) for way in ("native", "ring", "grpc")) + " |")
    judged = [bar for row in rows for bar in row["bars"]]
    missed = [(row, bar) for row in rows for bar in row["bars"] if bar.get("met") is False]
    lines += ["", f"Bars: {sum(bar.get('met') is True for bar in judged)} met, {len(missed)} missed, "
              f"{sum('met' not in bar for bar in judged)} not known.", ""]  # fmt: skip
    for row, bar in missed:
        lines.append(f"- missed: {row['name']}, {bar['way']}: {number(bar['is'])}, {bar_text(bar, row['unit']).split(':')[0]}")
    return "\n".join(lines).strip() + "\n"


def output_of(command, cwd=None):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=cwd)
        return done.stdout.strip() if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


def commit():
    """Of the sources beside this file; a bundle for a GPU machine brings a file with it."""
    for path in (os.path.join(HERE, "commit"), os.path.join(HERE, "../commit")):
        if os.path.exists(path):
            with open(path) as f:
                return f.read().strip()
    found = output_of(["git", "describe", "--always", "--dirty", "--abbrev=12"], HERE)
    return found or "unknown"


def environment(gpu, driver):
    """What the numbers depend on besides the code."""
    model, memory = "unknown", 0
    try:
        with open("/proc/cpuinfo") as f:
            model = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), model)
        with open("/proc/meminfo") as f:
            memory = int(f.readline().split()[1]) * 1024
    except OSError:
        pass
    return {
        "gpu": gpu or "unknown",
        "driver": output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0] or "none",
        "driver_library": driver or "software GPU",
        "kernel": platform.release(),
        "processor": model,
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
    }
