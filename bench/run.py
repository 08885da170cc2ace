#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures cuda-remote against the driver: everything in one run, natively, over the ring and over gRPC on this machine in turns.

Usage: run.py --product DIR --programs DIR [options]

Each row has its own warm-up; the ways take turns, `--rounds` times, so that a slow moment of the machine hits all alike, and a
row's value is the median. Ratios are to native in the same run: value / native, for times and for rates. The bars
that ratios are held against are in bars.json. With the software GPU for a driver the ratios say little.

Writes a table to stdout, and to --out: results.json, table.md, plot.svg.
Exit code: 0 if every row came out (missed bars are marked, they do not fail the run), 1 if not, 2 wrong use.
"""

import argparse
import json
import os
import sys
import time

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.realpath(__file__))
for folder in (os.path.join(HERE, "../tests/matrix"), os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/matrix")):
    sys.path.insert(0, folder)
sys.path.insert(0, HERE)
import harness  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
import stages  # noqa: E402


def numbers(text):
    return [int(n) for n in text.split(",") if n]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True, help="folder with the programs of cuda-remote")
    parser.add_argument("--programs", required=True, help="folder with the programs of //bench:programs")
    parser.add_argument("--driver", help="the real libcuda.so.1 (default: the software GPU)")
    parser.add_argument("--out", help="folder for results.json, table.md and plot.svg")
    parser.add_argument("--stages", default=",".join(stages.STAGES), help="some of: %(default)s")
    parser.add_argument("--ways", default=",".join(stages.WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=540, help="seconds for all; what does not fit is marked (%(default)s)")
    parser.add_argument("--copy-mb", type=int, default=256, help="size of the big copies")
    parser.add_argument("--managed-mb", type=int, default=2048, help="size of the large managed memory")
    parser.add_argument("--thread-counts", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--session-counts", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--allocations", type=int, default=100000)
    parser.add_argument("--modules", type=int, default=10000)
    parser.add_argument("--checkpoint-mib", type=numbers, default=[1024, 8192], help="GPU memory of the jobs that are saved")
    parser.add_argument("--python", default=sys.executable, help="the Python that has torch, if there is one")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the repetitions")
    parser.add_argument("--smoke", action="store_true", help="only show that every row comes out: seconds on the software GPU")
    options = parser.parse_args()
    options.warm_up = not options.smoke
    if options.smoke:
        options.quick = True
        options.rounds = 1
        options.copy_mb = 8
        options.thread_counts, options.session_counts = [1, 4], [1, 2]
        options.allocations, options.modules, options.checkpoint_mib = 1000, 50, [16]
    wrong = [name for name in options.stages.split(",") if name not in stages.STAGES]
    wrong += [way for way in options.ways.split(",") if way not in stages.WAYS]
    if wrong:
        parser.error(f"unknown: {', '.join(wrong)}")
    options.product = os.path.abspath(options.product)
    return options


def main():
    options = parse()
    begin = time.monotonic()
    say = lambda text: print(f"bench: {text}", file=sys.stderr, flush=True)
    with harness.Lab(options.product, options.driver) as lab:
        bench = stages.Bench(lab, options, begin + options.budget)
        stages.run_stages(bench, options.stages.split(","), say)
    rows = report.judge(bench.rows, report.load_bars())
    seconds = time.monotonic() - begin
    results = {
        "format": 1,
        "environment": report.environment(bench.gpu, options.driver),
        "options": {name: value for name, value in vars(options).items()},
        "seconds": round(seconds, 1),
        "rows": rows,
        "missed": [f"{row['name']}, {bar['way']}" for row in rows for bar in row["bars"] if bar.get("met") is False],
    }
    env = results["environment"]
    text = (f"GPU: {env['gpu']}, driver {env['driver']}. Commit {env['commit']}. Linux {env['kernel']}, {env['cores']} cores. "
            f"Rounds: {options.rounds}, {seconds:.0f} s.\n\n" + report.table(rows))  # fmt: skip
    print(text)
    if options.out:
        os.makedirs(options.out, exist_ok=True)
        for name, content in (("results.json", json.dumps(results, indent=1)), ("table.md", text), ("plot.svg", plot.draw(results))):
            with open(os.path.join(options.out, name), "w") as f:
                f.write(content)
    missing = [
        f"{row}, {way}: {bench.row(row, '').get(way, {'error': 'nothing'})['error']}"
        for stage in options.stages.split(",")
        for row, ways in stages.expected(bench, stage)
        for way in ways
        if not isinstance(bench.row(row, "").get(way), list)
    ]
    for line in missing:
        print(f"FAIL no value: {line}", file=sys.stderr)
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
