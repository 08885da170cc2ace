#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every handled call, directly on the driver and under cr-run over the ring and over gRPC: the same answers, case by case.

Usage: every_call.py --product DIR --program FILE [--driver LIB] [--parallel N] [--only FAMILY,...] [--except CASE,...]
                     [--limit SECONDS] [--lists DIR] [--results FILE]

  --program   every_call, which makes the calls and prints a line for each case
  --except    cases (patterns for their names, which begin with their call's) that are left out
  --limit     after so many seconds nothing new is begun, and what there is is compared
  --lists     a folder with not_natively.txt, differences.txt and differences_software.txt or differences_driver.txt (default: this
              file's). With the software GPU they are exact: a line that is not true any more is a failure.
  --results   MODE, tab, CASE, tab, ANSWER of every case go there

A case in which the driver itself crashes is not compared: with the software GPU that is a failure, with another one it is said.
Nor is one that the software GPU answers with CUDA_ERROR_NOT_SUPPORTED, of which there may only be fewer (MOST_WITHOUT_ANSWER).
Exit code: 0 the same everywhere, 1 not, 2 wrong use.
"""

import argparse
import collections
import concurrent.futures
import fnmatch
import os
import signal
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../matrix"), os.path.join(os.path.dirname(os.path.realpath(__file__)), "../matrix")]
import harness  # noqa: E402
from harness import Failure  # noqa: E402

MODES = ("native", "ring", "grpc")
START_AGAIN = 3
PIECE = 400  # cases of one process
LIMIT = 240  # seconds for it
MOST_WITHOUT_ANSWER = 190  # cases that the software GPU does not support, and that are answered remotely
DEVICES = {"SOFTGPU_DEVICES": "2"}


class Piece:
    """Some cases of one family, in one mode."""

    def __init__(self, mode, family, first, end):
        self.mode, self.family, self.first, self.end = mode, family, first, end

    def run(self, start, deadline):
        """{case: answer}. `start(name, arguments)` starts the program; a case that ends it is answered with how."""
        answers = {}
        number, full = self.first, 0
        while number < self.end and time.monotonic() < deadline:
            name = f"{self.mode}-{self.family}-{number}" + (f"-{full}" if full else "")
            process = start(name, [self.family, str(number), str(self.end)])
            late = False
            try:
                code = process.wait(min(LIMIT, max(1, deadline - time.monotonic())))
            except Failure:
                process.kill()
                process.wait(10)
                late = time.monotonic() >= deadline
                code = -signal.SIGALRM
            last, case = number - 1, None
            for line in process.stdout().decode(errors="replace").split("\n"):
                head, tab, answer = line.partition("\t")
                if not tab:
                    if line and case:
                        answers[case] += " / " + line
                    continue
                text, case = head.split(" ", 1)
                last = int(text)
                answers[case] = answer
            if late:
                answers.pop(case, None)
                break
            if code == 0:
                break
            if last < number and "OUT_OF_MEMORY" in process.stderr():
                # Others ask for more than there is just now, so that a GPU has no room for one more context.
                full += 1
                time.sleep(1)
                continue
            if last < number:
                raise Failure(f"{process.name} made no case\n{process.describe()}")
            if code != START_AGAIN:
                # cr-run passes a signal on as 128 + its number.
                died = -code if code < 0 else code - 128 if code > 128 else None
                how = signal.Signals(died).name if died in list(signal.Signals) else f"exit code {code}"
                answers[case] = "crashed: hangs" if how == "SIGALRM" else f"crashed: {how}"
            number = last + 1
        return answers


def read_list(path):
    """[(pattern, reason)] of a list's lines."""
    found = []
    with open(path) as f:
        for line in f:
            line = line.rstrip("\n")
            if line and not line.startswith("#"):
                pattern, _, reason = line.partition("\t")
                if not reason:
                    raise Failure(f"{path}: a line without a reason: {line}")
                found.append((pattern, reason))
    return found


def compare(native, remote, differences, used, late, software):
    """What is other than natively: lines to print, how many cases were compared, and how many the software GPU does not support."""
    problems, compared, without = [], 0, 0
    for case, answer in native.items():
        got = remote.get(case)
        if answer.startswith("crashed") or (late and got is None):
            continue
        if software and got != answer and "CUDA_ERROR_NOT_SUPPORTED" in answer and got and not got.startswith("crashed"):
            without += 1
            continue
        compared += 1
        known = [pattern for pattern, _ in differences if fnmatch.fnmatchcase(case, pattern)]
        if got == answer:
            continue
        if known:
            used.update(known)
            continue
        problems.append(f"{case}\n    natively {answer}\n    remotely {got}")
    return problems, compared, without


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--driver")
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="")
    parser.add_argument("--except", dest="left_out", default="")
    parser.add_argument("--limit", type=float, default=3600)
    parser.add_argument("--lists", default=HERE)
    parser.add_argument("--results")
    options = parser.parse_args()
    os.environ.update(DEVICES)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("every_call: ended from outside"))  # with what was started
    started = time.monotonic()
    with harness.Lab(options.product, options.driver) as lab:
        os.environ["TMPDIR"] = lab.folder  # the files of cases that end their process go with it
        problems = check(lab, options)
    print(f"{'FAIL' if problems else 'ok  '} every_call, {time.monotonic() - started:.1f} s", flush=True)
    for problem in problems[:400]:
        print(problem, flush=True)
    if len(problems) > 400:
        print(f"... and {len(problems) - 400} more")
    sys.exit(1 if problems else 0)


def check(lab, options):
    """Runs everything; returns what is wrong."""
    program = os.path.abspath(options.program)
    of_driver = "differences_software.txt" if lab.software else "differences_driver.txt"
    differences = [row for name in ("differences.txt", of_driver) for row in read_list(os.path.join(options.lists, name))]
    not_natively = dict(read_list(os.path.join(options.lists, "not_natively.txt")))

    listed = lab.run("list", [program, "--list"], 20, lab.native_environment()).stdout().decode().split("\n")
    sizes, calls = collections.Counter(), []
    left_out = [pattern for pattern in options.left_out.split(",") if pattern]
    for line in filter(None, listed):
        family, symbol, count = line.split(" ")
        chosen = not options.only or family in options.only.split(",")
        if chosen and not any(fnmatch.fnmatchcase(symbol + " valid", pattern) for pattern in left_out):
            calls.append(symbol)
        sizes[family] += int(count)
    families = options.only.split(",") if options.only else list(sizes)

    server = lab.server(listen=True)
    addresses = {"ring": server.unix, "grpc": server.tcp}

    skip = [word for pattern in left_out for word in ("--skip", pattern)]
    native_environment = lab.native_environment()

    def start(mode, prefix=""):
        command = [program] + skip
        if mode == "native":
            return lambda name, arguments: lab.start(harness.Process(lab, prefix + name, command + arguments, native_environment))
        return lambda name, arguments: lab.job(prefix + name, command + arguments, addresses[mode])

    # The modes of one piece after each other: what there is when the time is up can be compared.
    pieces = [
        Piece(mode, family, first, min(first + PIECE, sizes[family]))
        for family in families
        for first in range(0, sizes[family], PIECE)
        for mode in MODES
    ]
    answers, home = collections.defaultdict(dict), {}
    deadline = time.monotonic() + options.limit
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool, open(options.results or os.devnull, "w") as results:
        runs = {pool.submit(piece.run, start(piece.mode), deadline): piece for piece in pieces}
        for run in concurrent.futures.as_completed(runs):
            mode, got = runs[run].mode, run.result()
            answers[mode].update(got)
            home.update((case, (runs[run].family, runs[run].first)) for case in got)
            results.writelines(f"{mode}\t{case}\t{answer}\n" for case, answer in got.items())
            results.flush()
    # A GPU has room for so many contexts: what had none beside the others is asked again alone.
    crowded = {home[case] for case in home if len({"CUDA_ERROR_OUT_OF_MEMORY" in answers[mode].get(case, "") for mode in MODES}) > 1}
    for piece in pieces:
        if (piece.family, piece.first) in crowded:
            answers[piece.mode].update(piece.run(start(piece.mode, "again-"), deadline))
    late = time.monotonic() >= deadline
    if late:
        print("the time was up before the last case", flush=True)
    native = answers["native"]

    problems, used = [], set()
    for mode in MODES[1:]:
        other, compared, without = compare(native, answers[mode], differences, used, late, lab.software)
        problems += [f"{mode}: {text}" for text in other]
        if without > MOST_WITHOUT_ANSWER:
            problems.append(f"{mode}: {without} cases without an answer of the software GPU, up from {MOST_WITHOUT_ANSWER}")
        print(f"{mode}: {compared} cases compared, {len(other)} differ; {without} the software GPU does not support", flush=True)
    crashed = [case for case, answer in native.items() if answer.startswith("crashed")]
    for case in crashed:
        text = f"{case}: the driver itself {native[case]}, so there is nothing to compare"
        problems.append(text) if lab.software else print(text, flush=True)
    succeeded = [symbol for symbol in calls if native.get(symbol + " valid", "").startswith("CUDA_SUCCESS")]
    print(f"{len(calls)} calls in {len(native)} cases; {len(succeeded)} of them succeed natively with valid arguments", flush=True)
    without = [symbol for symbol in calls if symbol + " valid" not in native and not late]
    problems += [f"{symbol}: no case was made" for symbol in without]
    for symbol in calls:
        answer = native.get(symbol + " valid", "")
        if symbol in succeeded or not answer:
            continue
        if not lab.software:
            print(f"not natively: {symbol} {answer}", flush=True)
        elif symbol not in not_natively:
            problems.append(f"{symbol}: does not succeed natively with valid arguments, and not_natively.txt does not say why: {answer}")
    if lab.software and not options.only:
        problems += [f"not_natively.txt: {symbol} succeeds: take the line out" for symbol in not_natively if symbol in succeeded]
        problems += [f"not_natively.txt: {symbol} is no call that is handled" for symbol in not_natively if symbol not in calls]
        problems += [f"differences.txt or {of_driver}: nothing differs any more in {pattern}" for pattern, _ in differences if pattern not in used]
    return problems


if __name__ == "__main__":
    main()
