#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What launches and event records cost the threads that make them, by their number; no GPU needed. See README.md.

Usage: producers.py --product DIR --program producers [--threads N,...] [--calls N] [--work NS]
"""

import argparse
import json
import os
import sys

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../instructions"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "../instructions"))
from alone import harness, run_alone  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--threads", default="1,2,4,8,16,32,64")
    parser.add_argument("--calls", type=int, default=200000, help="in all, for each number of threads")
    parser.add_argument("--work", type=int, default=0, help="nanoseconds that the reader takes over each request")
    options = parser.parse_args()
    command = [os.path.abspath(options.program), str(options.calls), str(options.work), *options.threads.split(",")]
    try:
        with harness.Lab(options.product) as lab:
            out = run_alone(lab, command, "producers")
    except harness.Failure as failure:
        sys.exit(f"producers: {failure}")
    rows = [json.loads(line) for line in out.decode().splitlines()]
    if len(rows) != 2 * len(options.threads.split(",")):
        sys.exit(f"producers: {len(rows)} rows")
    print(f"{'call':14} {'threads':>7} {'in its thread':>14} {'of all':>10} {'CPU':>10}")
    for row in rows:
        print(f"{row['call']:14} {row['threads']:7} {row['issue_ns']:11.1f} ns {row['each_ns']:7.1f} ns {row['cpu_ns']:7.1f} ns")


if __name__ == "__main__":
    main()
