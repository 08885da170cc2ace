#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions of the hot driver calls in the client library, and of their requests in the worker, with
valgrind's callgrind; no GPU needed.

Usage: count.py --product DIR --programs DIR [--record FILE | --check FILE] [--tolerance PERCENT (3)]

--programs: where hot_calls and hot_requests are.

Without --record and --check the counts are printed. --check compares with recorded ones: exit code 1 if a call takes more than
PERCENT more or less, or is missing in the file. Counts depend on the compiler and the C library; with others than those of
the record the tolerance is 20 %, and a line says so. See README.md.
"""

import argparse
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from alone import harness, run_alone  # noqa: E402

OTHER_TOOLCHAIN_TOLERANCE = 20.0
# So small that a percentage says nothing: this many instructions either way are no regression.
SLACK = 3


def toolchain(library):
    """What the counts depend on besides the sources: what built the library, and the C library that it runs with."""
    comment = subprocess.run(["readelf", "-p", ".comment", library], capture_output=True, text=True).stdout
    compilers = sorted(set(re.findall(r"GCC: \([^)]*\) [\d.]+|clang version [\d.]+", comment)))
    libc = subprocess.run(["getconf", "GNU_LIBC_VERSION"], capture_output=True, text=True).stdout.strip()
    return f"{', '.join(compilers) or 'unknown compiler'}; {libc}"


def valgrind(lab, name, *options):
    """The beginning of a command that runs a program under callgrind, which puts its dumps into files called `name`."""
    return ["valgrind", "--tool=callgrind", f"--callgrind-out-file={lab.folder}/{name}", "--quiet", *options]


def dumps(lab, name):
    """{name of the dump: instructions}"""
    found = {}
    for path in glob.glob(os.path.join(lab.folder, name + "*")):
        with open(path, errors="replace") as f:
            text = f.read()
        trigger = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.M)
        if trigger and total:
            found[trigger.group(1)] = int(total.group(1))
    return found


def count(lab, programs):
    """{call: (instructions, requests, replies, quiet requests)} for one call each, as fractions where they vary inside a block."""
    if not shutil.which("valgrind"):
        raise harness.Failure("valgrind is not installed; tools/setup installs it")
    calls = [*valgrind(lab, "calls", "--collect-atstart=no"), os.path.abspath(os.path.join(programs, "hot_calls"))]
    client = json.loads(run_alone(lab, calls, "hot_calls"))
    requests = [*valgrind(lab, "requests", "--toggle-collect=*Executor::Run*"), os.path.join(programs, "hot_requests")]
    ran = subprocess.run(requests, capture_output=True, text=True, timeout=120)
    if ran.returncode != 0:
        raise harness.Failure(f"hot_requests ended with exit code {ran.returncode}\n{ran.stderr[-3000:]}")
    worker = json.loads(ran.stdout)
    counted = {**dumps(lab, "calls"), **dumps(lab, "requests")}
    numbers = {name: [number / client["block"] for number in all_of] for name, all_of in client["requests_replies_quiet"].items()}
    numbers.update({name: [1.0, 0.0, 0.0] for name in worker["nanoseconds"]})
    missing = sorted(set(numbers) - set(counted))
    if missing:
        raise harness.Failure(f"callgrind wrote nothing for: {', '.join(missing)}")
    blocks = {**{name: client["block"] for name in numbers}, **{name: worker["block"] for name in worker["nanoseconds"]}}
    return {name: (counted[name] / blocks[name], *all_of) for name, all_of in numbers.items()}


def compare(counts, recorded, tolerance):
    """The lines of what differs."""
    complaints = []
    for name, (now, _, _, quiet) in counts.items():
        then = recorded.get(name, {}).get("instructions")
        if then is None:
            complaints.append(f"{name}: not recorded")
        elif abs(now - then) > max(SLACK, then * tolerance / 100):
            complaints.append(f"{name}: {now:.1f} instructions, recorded {then:.1f} ({100 * (now / then - 1):+.1f} %)")
        if then is not None and quiet != recorded[name].get("quiet", 0):
            complaints.append(f"{name}: {quiet:g} requests are quiet, recorded {recorded[name].get('quiet', 0):g}")
    complaints += [f"{name}: recorded, but not counted any more" for name in recorded if name not in counts]
    return complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--programs", required=True)
    parser.add_argument("--record")
    parser.add_argument("--check")
    parser.add_argument("--tolerance", type=float, default=3.0)
    options = parser.parse_args()
    begin = time.monotonic()
    try:
        with harness.Lab(options.product) as lab:
            counts = count(lab, options.programs)
            built = toolchain(os.path.realpath(lab.tool("libcuda-remote.so")))
    except harness.Failure as failure:
        sys.exit(f"count: {failure}")
    print(f"{'instructions':>12} {'requests':>9} {'replies':>8} {'quiet':>6}  call")
    for name, (instructions, requests, replies, quiet) in counts.items():
        print(f"{instructions:12.1f} {requests:9.2f} {replies:8.2f} {quiet:6.2f}  {name}")
    print(f"counted in {time.monotonic() - begin:.0f} s; {built}")
    if options.record:
        calls = {n: {"instructions": round(i, 1), "requests": q, "replies": r, **({"quiet": s} if s else {})}
                 for n, (i, q, r, s) in counts.items()}  # fmt: skip
        with open(options.record, "w") as f:
            json.dump({"toolchain": built, "calls": calls}, f, indent=1)
            f.write("\n")
    if options.check:
        with open(options.check) as f:
            recorded = json.load(f)
        tolerance = options.tolerance
        if recorded["toolchain"] != built:
            tolerance = max(tolerance, OTHER_TOOLCHAIN_TOLERANCE)
            print(f"recorded with {recorded['toolchain']}: comparing within {tolerance:g} %")
        complaints = compare(counts, recorded["calls"], tolerance)
        for complaint in complaints:
            print(f"FAIL {complaint}")
        if complaints:
            print("If that is meant: bench/instructions/record")
            sys.exit(1)
        print(f"ok   all within {tolerance:g} % of the record")


if __name__ == "__main__":
    main()
