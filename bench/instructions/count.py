#!/usr/bin/env python3
"""Counts the instructions of the hot driver calls in the client library, with valgrind's callgrind; no GPU needed.

Usage: count.py --product DIR --program hot_calls [--record FILE | --check FILE] [--tolerance PERCENT (3)]

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


def count(lab, program):
    """{call: (instructions, requests, replies)} for one call each, as fractions where they vary inside a block."""
    if not shutil.which("valgrind"):
        raise harness.Failure("valgrind is not installed; tools/setup installs it")
    command = ["valgrind", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={lab.folder}/counts",
               "--quiet", os.path.abspath(program)]  # fmt: skip
    result = json.loads(run_alone(lab, command, "hot_calls"))
    block = result["block"]
    counts = {}
    for path in glob.glob(os.path.join(lab.folder, "counts*")):
        with open(path, errors="replace") as f:
            text = f.read()
        trigger = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.M)
        if trigger and total:
            requests, replies = result["requests_and_replies"][trigger.group(1)]
            counts[trigger.group(1)] = (int(total.group(1)) / block, requests / block, replies / block)
    missing = sorted(set(result["requests_and_replies"]) - set(counts))
    if missing:
        raise harness.Failure(f"callgrind wrote nothing for: {', '.join(missing)}")
    return {name: counts[name] for name in result["requests_and_replies"]}


def compare(counts, recorded, tolerance):
    """The lines of what differs."""
    complaints = []
    for name, (now, _, _) in counts.items():
        then = recorded.get(name, {}).get("instructions")
        if then is None:
            complaints.append(f"{name}: not recorded")
        elif abs(now - then) > max(SLACK, then * tolerance / 100):
            complaints.append(f"{name}: {now:.1f} instructions, recorded {then:.1f} ({100 * (now / then - 1):+.1f} %)")
    complaints += [f"{name}: recorded, but not counted any more" for name in recorded if name not in counts]
    return complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--record")
    parser.add_argument("--check")
    parser.add_argument("--tolerance", type=float, default=3.0)
    options = parser.parse_args()
    begin = time.monotonic()
    try:
        with harness.Lab(options.product) as lab:
            counts = count(lab, options.program)
            built = toolchain(os.path.realpath(lab.tool("libcuda-remote.so")))
    except harness.Failure as failure:
        sys.exit(f"count: {failure}")
    print(f"{'instructions':>12} {'requests':>9} {'replies':>8}  call")
    for name, (instructions, requests, replies) in counts.items():
        print(f"{instructions:12.1f} {requests:9.2f} {replies:8.2f}  {name}")
    print(f"counted in {time.monotonic() - begin:.0f} s; {built}")
    if options.record:
        calls = {n: {"instructions": round(i, 1), "requests": q, "replies": r} for n, (i, q, r) in counts.items()}
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
