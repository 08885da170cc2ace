#!/usr/bin/env python3
"""Runs api_cost natively, over the ring and over gRPC on this machine, and prints the results side by side.

Usage: run.py --product DIR --program api_cost [--driver LIB] [--rounds N (3)] [--quick] [--copy-mb N]
              [--json FILE] [--markdown FILE] [--limit S (120)]

The ways take turns, `rounds` times each, so that a slow moment of the machine hits all alike; a row's value is the median
over the rounds (and inside a round the median of api_cost's own repetitions). Ratios are to native in the same run: for
times and for rates alike, value / native. One warm-up run of each way goes before and is not counted.
"""

import argparse
import json
import os
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "../tests/matrix"))
import harness  # noqa: E402

WAYS = ("native", "ring", "grpc")


def measure(lab, way, server, command, limit, number):
    """One run of the program: {row name: row}, and the GPU's name."""
    name = f"{way}{number}"
    if way == "native":
        process = lab.run(name, command, limit, lab.native_environment())
    else:
        process = lab.job(name, command, server.unix if way == "ring" else server.tcp)
        process.expect_success(limit)
    try:
        parsed = json.loads(process.stdout())
    except json.JSONDecodeError as error:
        raise harness.Failure(f"{name} printed no JSON ({error})\n{process.describe()}")
    return {row["name"]: row for row in parsed["rows"]}, parsed["gpu"]


def combine(rounds):
    """The median over rounds for each row; an error if any round had one."""
    combined = {}
    for name, row in rounds[0].items():
        rows = [r[name] for r in rounds if name in r]
        errors = [r["error"] for r in rows if "error" in r]
        if errors:
            combined[name] = {"unit": row["unit"], "error": errors[0]}
        else:
            values = [r["value"] for r in rows]
            combined[name] = {"unit": row["unit"], "value": statistics.median(values), "rounds": values}
    return combined


def table(results):
    lines = ["| | native | ring | gRPC, loopback |", "| --- | --- | --- | --- |"]
    for name, row in results.get("native", next(iter(results.values()))).items():
        cells = []
        base = results.get("native", {}).get(name, {}).get("value")
        for way in WAYS:
            cell = results.get(way, {}).get(name)
            if cell is None:
                cells.append("not run")
            elif "error" in cell:
                cells.append(cell["error"].split(": ")[-1])
            else:
                text = f"{cell['value']:.3g} {row['unit']}"
                if way != "native" and base:
                    text += f" ({cell['value'] / base:.2f}x)"
                cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--driver")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--copy-mb", type=int, default=256)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    parser.add_argument("--limit", type=float, default=120)
    options = parser.parse_args()
    command = [os.path.abspath(options.program), "--copy-mb", str(options.copy_mb)]
    command += ["--quick"] if options.quick else []

    results, failures, gpu = {}, {}, "unknown"
    with harness.Lab(options.product, options.driver) as lab:
        server = lab.server(listen=True)
        ways = options.ways.split(",")
        rounds = {way: [] for way in ways}
        for number in range(options.rounds + 1):
            for way in ways:
                if way in failures:
                    continue
                try:
                    warm_up = number == 0
                    rows, gpu = measure(lab, way, server, command + (["--quick"] if warm_up else []), options.limit, number)
                    if not warm_up:
                        rounds[way].append(rows)
                except harness.Failure as failure:
                    failures[way] = str(failure)
                    print(f"FAIL {way}: {failure}", file=sys.stderr, flush=True)
        for way in ways:
            if rounds[way]:
                results[way] = combine(rounds[way])
    text = f"GPU: {gpu}. Rounds: {options.rounds}. Copies: {options.copy_mb} MiB.\n\n" + (table(results) if results else "")
    for way, failure in failures.items():
        text += f"\n{way} failed: {failure.splitlines()[0]}\n"
    print(text)
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"gpu": gpu, "results": results, "failures": failures}, f, indent=1)
    if options.markdown:
        with open(options.markdown, "w") as f:
            f.write(text)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
