#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps the last result of each thing that was run on a GPU, and writes the page that shows them.

Usage: results.py [--root DIR] [--print]    writes docs/gpu-results.md from docs/gpu-results.json, or prints it
       results.py [--root DIR] add OUT...   first adds the results in these folders: those of tests/gpu/run (results.json,
                                            bench.json) or of bench/run.py (results.json)

A result is known by what ran (a program, a fault case, a row of the benchmark) and by the way in which it ran (natively, over
the ring, restarted, ...). A newer result takes the place of an older one. What had no time to run is not a result.
"""

import argparse
import json
import os
import sys

ROOT = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../..")
WAYS = {
    "native": "native", "ring": "ring", "embedded": "own server", "grpc": "gRPC", "tls": "gRPC with TLS", "restart": "restart",
    "restart_grpc": "restart over gRPC", "live": "live checkpoint", "migrate": "move", "migrate_grpc": "move over gRPC",
    "migrate_ten": "ten moves", "clients": "several clients", "case": "case",
}  # fmt: skip
# What `others` holds has no way that is right or wrong as a whole: its outcome says how much was.
KINDS = {"programs": "Programs", "frameworks": "Frameworks", "faults": "Faults, traces and every call", "others": "Programs of others"}
MOST_LINES = 200
HEAD = """# Results on a real GPU

This page has the last result of each thing that was run on a GPU: with which GPU, which driver,
which commit, and when. `tests/gpu/results.py` writes it from `gpu-results.json`; do not edit it.
[driver-notes.md](driver-notes.md) says what was learned about NVIDIA's driver, and
[tests/gpu](../tests/gpu/README.md) how to run the same.

A program's result is *the native output* if it printed the bytes that the native run printed.
*Restart* means: saved after random steps and restarted, three times in one run. *Live checkpoint*
means: restarted from an image of a job that continued. *Move* means: moved to another server and
back while it ran.
"""
MEASURES = """Program and server ran on one machine, also for gRPC. The ratio to the native value of the same run
is in brackets: for times, less than 1 is faster than native; for rates, more than 1 is. A *bar* is
the limit that the project sets itself (`bench/bars.json`). Rows without a bar are in
`gpu-results.json` only.
"""


def gpus(listing):
    """`nvidia-smi --query-gpu=name,...` in few words: "2 H200"."""
    models = [line.split(",")[0].replace("NVIDIA ", "").split(" ")[0] for line in listing.splitlines() if line.strip()]
    return ", ".join(f"{models.count(model)} {model}" for model in sorted(set(models))) or "none"


def run_key(run):
    return f"{run['date']} {run['commit']} {run['gpu']}"


class Results:
    """What docs/gpu-results.json holds: `runs` by key, results as {kind: {name: {way: {"run", "outcome"}}}}, and measures as
    {group: {row: {"run", "native", "ring", "grpc"}}} with values as text."""

    def __init__(self, path):
        self.path = path
        self.data = {"format": 1, "runs": {}, "programs": {}, "frameworks": {}, "faults": {}, "others": {}, "measures": {}}
        if os.path.exists(path):
            with open(path) as f:
                self.data = json.load(f)

    def _newer(self, old, run):
        return old is None or self.data["runs"][old["run"]]["date"] <= run["date"]

    def _keep(self, run):
        key = run_key(run)
        self.data["runs"][key] = run
        return key

    def add(self, kind, name, way, outcome, run):
        """`outcome`: "ok", or one sentence that says what happened instead. `run`: gpu, driver, commit, date (YYYY-MM-DD)."""
        ways = self.data[kind].setdefault(name, {})
        if self._newer(ways.get(way), run):
            ways[way] = {"run": self._keep(run), "outcome": outcome}

    def measure(self, group, name, cells, run):
        """`cells`: way -> text with unit, ratio and bar."""
        rows = self.data["measures"].setdefault(group, {})
        if self._newer(rows.get(name), run):
            rows[name] = {"run": self._keep(run), **cells}

    def save(self):
        used = {cell["run"] for kind in KINDS for ways in self.data[kind].values() for cell in ways.values()}
        used |= {cell["run"] for rows in self.data["measures"].values() for cell in rows.values()}
        self.data["runs"] = {key: self.data["runs"][key] for key in sorted(used)}
        with open(self.path, "w") as f:
            f.write(self.text())

    def text(self):
        """One result a line, so that a change shows what it changed."""
        lines = ["{", f' "format": {self.data["format"]},']
        sections = ["runs", *KINDS, "measures"]
        for section in sections:
            lines.append(f" {json.dumps(section)}: {{")
            lines += self._lines(self.data[section], 2, section == "runs")
            lines.append(" }" + ("," if section != sections[-1] else ""))
        return "\n".join(lines + ["}", ""])

    def _lines(self, table, depth, leaf):
        out = []
        for i, (name, value) in enumerate(sorted(table.items())):
            comma = "," if i + 1 < len(table) else ""
            if leaf:
                out.append(" " * depth + f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}{comma}")
            else:
                out.append(" " * depth + f"{json.dumps(name)}: {{")
                out += self._lines(value, depth + 1, True)
                out.append(" " * depth + "}" + comma)
        return out


def add_folder(results, folder, frameworks):
    """Adds what tests/gpu/run, or bench/run.py, left in a folder. `frameworks`: the names of the programs that are listed apart."""
    with open(os.path.join(folder, "results.json")) as f:
        found = json.load(f)
    if "environment" in found:
        add_bench(results, found)
        return
    add_run(results, found, frameworks)
    bench = os.path.join(folder, "bench.json")
    if os.path.exists(bench):
        with open(bench) as f:
            add_bench(results, json.load(f))


def add_run(results, found, frameworks):
    """Adds the cases in the results of tests/gpu/run."""
    run = found["run"]
    for result in found["matrix"]:
        if not result["error"].startswith("not run"):
            kind = "frameworks" if result["app"] in frameworks else "programs"
            results.add(kind, result["app"], result["mode"], outcome_of(result), run)
    for result in found["faults"]:
        if not result["error"].startswith("not run"):
            results.add("faults", result["case"], "case", outcome_of(result), run)


def outcome_of(result):
    if result["ok"]:
        return "ok"
    lines = [line for line in result["error"].splitlines() if line.strip()]
    return (lines[0].strip() if lines else "failed, without a word")[:160]


def add_bench(results, found):
    import report

    environment = found["environment"]
    run = {
        "gpu": gpus(environment["gpu"]),
        "driver": environment["driver"],
        "commit": environment["commit"],
        "date": environment["date"][:10],
    }
    for row in found["rows"]:
        cells = {way: report.cell(row, way) for way in ("native", "ring", "grpc")}
        if any("value" in row.get(way, {}) for way in cells):
            results.measure(row["group"], row["name"], cells, run)


def names(items):
    return ", ".join(f"`{item}`" for item in sorted(items))


def where(run):
    return f"{run['gpu']}, {run['driver']} | {run['commit']} | {run['date']}"


def page(data):
    """The page's text."""
    runs = data["runs"]
    lines = HEAD.strip().split("\n")
    for kind, title in KINDS.items():
        right, told = {}, []
        for name, ways in data[kind].items():
            by_run = {}
            for way, cell in ways.items():
                if cell["outcome"] == "ok":
                    by_run.setdefault(cell["run"], []).append(way)
                else:
                    told.append((cell["run"], name, way, cell["outcome"]))
            for run, its in by_run.items():
                right.setdefault(run, {}).setdefault(tuple(way for way in WAYS if way in its), []).append(name)
        count = sum(len(ways) for ways in data[kind].values())
        if not count:
            continue
        lines += ["", f"## {title}", ""]
        if kind != "others":
            lines += [f"{count - len(told)} of {count} last results are right.", ""]
        if right:
            lines += ["| right | GPU, driver | commit | date |", "| --- | --- | --- | --- |"]
        for run, groups in sorted(right.items(), key=lambda item: (runs[item[0]]["date"], item[0]), reverse=True):
            texts = [(f"{', '.join(WAYS[way] for way in its)}: " if its != ("case",) else "") + names(found) for its, found in sorted(groups.items())]
            lines.append(f"| {'; '.join(texts)} | {where(runs[run])} |")
        if told:
            lines += [""] if right else []
            lines += ["| what | way | what happened | GPU, driver | commit | date |", "| --- |" + " --- |" * 5]
            for run, name, way, outcome in sorted(told, key=lambda row: row[1:3]):
                lines.append(f"| {name if kind == 'others' else names([name])} | {WAYS[way]} | {outcome.replace('|', '/')} | {where(runs[run])} |")
    if not data["measures"]:
        return "\n".join(lines) + "\n"
    lines += ["", "## What it costs", "", *MEASURES.strip().split("\n")]
    lines += ["", "| | native | ring | gRPC, loopback | GPU, commit, date |", "| --- | --- | --- | --- | --- |"]
    for group, rows in sorted(data["measures"].items()):
        lines.append(f"| **{group}** | | | | |")
        for name, row in sorted(rows.items()):
            run = runs[row["run"]]
            cells = [row.get(way, "") for way in ("native", "ring", "grpc")]
            if not any("bar" in cell for cell in cells):
                continue
            lines.append("| " + " | ".join([name, *cells, f"{run['gpu']}, {run['commit']}, {run['date']}"]) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=ROOT, help="the workspace")
    parser.add_argument("--print", action="store_true", help="write the page to stdout, and change nothing")
    parser.add_argument("what", nargs="?", choices=["add"])
    parser.add_argument("folders", nargs="*", metavar="OUT")
    options = parser.parse_args()
    for folder in ("tests/matrix", "bench"):
        sys.path.insert(0, os.path.join(options.root, folder))
    results = Results(os.path.join(options.root, "docs/gpu-results.json"))
    if options.folders:
        import matrix

        for folder in options.folders:
            add_folder(results, folder, matrix.FRAMEWORKS)
        results.save()
    text = page(results.data)
    if text.count("\n") > MOST_LINES:
        sys.exit(f"results.py: the page would have {text.count(chr(10))} lines, and may have {MOST_LINES}")
    if options.print:
        sys.stdout.write(text)
        return
    with open(os.path.join(options.root, "docs/gpu-results.md"), "w") as f:
        f.write(text)


if __name__ == "__main__":
    main()
