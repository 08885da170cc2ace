#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Moves over the network: GPU memory is copied in rounds while the job runs, and the pause copies what has changed.

Usage: rounds.py --product DIR --apps DIR --programs DIR [--driver LIB] [--only CASE,...] [--keep] [--logs FILE]

Exit code: 0 all passed, 1 some failed, 2 wrong use.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../matrix"), os.path.join(os.path.dirname(os.path.realpath(__file__)), "../matrix")]
import harness  # noqa: E402
from harness import Failure, wait_for  # noqa: E402

CASES = {}
LIMIT = int(os.environ.get("CR_LIMIT", 120))  # seconds for anything that is waited for
MIB = 1 << 20


def case(function):
    CASES[function.__name__] = function
    return function


class Context:
    def __init__(self, lab, options):
        self.lab = lab
        self.options = options
        self.lab.workers = 1
        self.tools = 0

    def start(self, program, *arguments, steps, step_ms=20, first=None):
        """A job of a program that makes so many steps, and stands after the last one but one."""
        path = harness.find(self.options.programs, program) or harness.find(self.options.apps, program)
        if path is None:
            raise Failure(f"the program {program} is neither in {self.options.programs} nor in {self.options.apps}")
        self.command = [os.path.abspath(path), *([first] if first else []), "--steps", str(steps), *map(str, arguments)]
        self.last = steps - 1
        self.first = self.lab.server("first")
        self.job = self.lab.job("job", self.command, self.first.unix, step_ms=step_ms, pause_at=[self.last])
        self.job.wait_steps(3, LIMIT)
        return self.job

    def tool(self, *arguments, env=None):
        self.tools += 1
        command = [self.lab.tool("cr-migrate"), "--json", self.job.id, *arguments]
        return self.lab.start(harness.Process(self.lab, f"move{self.tools}", command, env))

    def move(self, to):
        """The report of a move, which must not be the last thing that the job sees."""
        tool = self.tool("--to", to)
        tool.expect_success(LIMIT)
        if not self.job.running() or f"paused {self.last}" in self.job.steps():
            raise Failure(f"the job was done before it was moved: the test proves nothing\n{self.job.describe()}")
        report = json.loads(tool.stdout())
        parts = report["handed_over_bytes"] + report["direct_bytes"] + report["before"]["kept_bytes"] + report["copied_bytes"]
        if parts != report["gpu_bytes"]:
            raise Failure(f"the parts are {parts} bytes: {report}")
        self.job.wait_steps(len(self.job.steps()) + 2, LIMIT)
        self.job.expect_usual_policy()
        return report

    def stopped_at(self, step):
        """A move to the second server that stands before a step of this name, and how it goes on."""
        steps = os.path.join(self.lab.folder, f"steps{self.tools}")
        tool = self.tool("--to", self.second.tcp, env={"CR_TEST_STEPS": steps + ".all"})
        tool.expect_success(LIMIT)
        self.tool("--to", self.first.unix).expect_success(LIMIT)
        with open(steps + ".all") as f:
            number = next((line.split(" ", 1)[0] for line in f if line.split(" ", 1)[1].startswith(step)), None)
        if number is None:
            raise Failure(f"there is no step {step!r}: {open(steps + '.all').read()}")
        tool = self.tool("--to", self.second.tcp, env={"CR_TEST_STEPS": steps, "CR_TEST_STOP_AT": number})
        reached = lambda: os.path.exists(steps) and any(line.startswith(number + " ") for line in open(steps))
        wait_for(lambda: reached() or not tool.running(), LIMIT, lambda: f"no step {number}\n{tool.describe()}")
        if not reached():
            raise Failure(f"the tool did not come to step {number}\n{tool.describe()}")
        return tool, lambda: open(steps + ".go", "w").close()

    def sessions(self, server):
        command = [self.lab.tool("cr-ps"), "--json", "--server", server.unix]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=harness.patient(LIMIT))
        if asked.returncode != 0:
            raise Failure(f"cr-ps: {asked.stderr}")
        return json.loads(asked.stdout)["sessions"]

    def expect_empty(self, server):
        wait_for(lambda: not self.sessions(server), LIMIT, lambda: f"left on {server.name}: {self.sessions(server)}")


@case
def a_part_changes(context):
    """A twentieth of the memory changes all the time: the pause copies little more than that, there and back."""
    second = context.lab.server("second", listen=True)
    context.start("partly", "--size", 96, steps=100000)
    for to in (second.tcp, context.first.unix, second.tcp):
        report = context.move(to)
        if report["gpu_bytes"] < 96 * MIB or report["before"]["rounds"] < 1:
            raise Failure(f"no rounds: {report}")
        if report["before"]["copied_bytes"] < 80 * MIB or report["copied_bytes"] > 96 * MIB // 6:
            raise Failure(f"too much was left for the pause: {report}")
        print(f"    to {to}: {report['before']}, {report['copied_bytes']} in the pause", flush=True)
    compare_steps(context)


def compare_steps(context):
    """Ends a job that would go on for long. The steps that it has made have the results of a native run."""
    # Its processes compare their memory with models in each step.
    if not context.job.running() or "not true" in context.job.stderr():
        raise Failure(f"a wrong result\n{context.job.describe()}")
    context.job.end()
    lines = context.job.stdout().splitlines()
    steps = len(lines) - 1  # the last line may be cut
    command = [word if word != str(context.last + 1) else str(steps + 1) for word in context.command]
    native = context.lab.native("native", command, LIMIT).splitlines()
    harness.same("moved over the network", b"\n".join(lines[:steps]), b"\n".join(native[:steps]))


@case
def all_kinds(context):
    """Memory of all kinds is freed, allocated and written to at random while it moves again and again."""
    second = context.lab.server("second", listen=True)
    context.start("busy_memory", steps=100000, step_ms=10)
    kept = 0
    for number in range(8):
        report = context.move(second.tcp if number % 2 == 0 else context.first.unix)
        kept += report["before"]["kept_bytes"]
    if not kept:
        raise Failure("the pause never had less to copy")
    compare_steps(context)


@case
def shared(context):
    """Several processes with memory of each other move together; all of them are copied in rounds."""
    second = context.lab.server("second", listen=True)
    context.start("partly", "--size", 32, steps=100000, first="--share")
    for to in (second.tcp, context.first.unix):
        wait_for(lambda: len(context.sessions(context.first)) + len(context.sessions(second)) == 2, LIMIT, context.job.describe)
        report = context.move(to)
        if report["gpu_bytes"] < 48 * MIB or report["copied_bytes"] > 8 * MIB or report["before"]["rounds"] < 1:
            raise Failure(f"too much was left for the pause: {report}")
    wait_for(lambda: len(context.sessions(context.first)) == 2, LIMIT, context.job.describe)
    compare_steps(context)


@case
def no_room(context):
    """A server that has no memory to spare gets everything in the pause; a limit of the session leaves the rest for it."""
    small = {"SOFTGPU_MEMORY": "300M"}
    context.lab.env.update(small)
    second = context.lab.server("second", listen=True)
    for name in small:
        del context.lab.env[name]
    limited = context.lab.server("limited", listen=True, extra=["--memory-limit", "120MB"])
    context.start("partly", "--size", 96, steps=100000)
    report = context.move(second.tcp)
    if report["before"]["copied_bytes"] or report["copied_bytes"] != report["gpu_bytes"]:
        raise Failure(f"a server without room took memory ahead: {report}")
    report = context.move(limited.tcp)
    if report["copied_bytes"] > 96 * MIB // 6:
        raise Failure(f"too much was left for the pause: {report}")
    compare_steps(context)


@case
def refused(context):
    """A server on which the session may not have as much memory: the job continues where it was, and nothing is left there."""
    second = context.lab.server("second", listen=True, extra=["--memory-limit", "60MB"])
    context.start("partly", "--size", 96, steps=100000)
    for _ in range(2):
        tool = context.tool("--to", second.tcp)
        if tool.wait(LIMIT) != 1 or "the job continues where it was" not in tool.stderr():
            raise Failure(f"expected a refusal\n{tool.describe()}")
        context.expect_empty(second)
        context.job.wait_steps(len(context.job.steps()) + 2, LIMIT)
    compare_steps(context)


@case
def interrupted(context):
    """Interrupted in the middle of a round, the job continues where it was, and nothing is left at the new server."""
    context.second = context.lab.server("second", listen=True)
    context.start("partly", "--size", 48, steps=100000)
    tool, go = context.stopped_at("copy the rest of it while the job runs")
    tool.kill(signal.SIGINT)
    go()
    if tool.wait(LIMIT) == 0 or not re.search("interrupted|the job continues", tool.stderr()):
        raise Failure(f"it was not interrupted\n{tool.describe()}")
    context.expect_empty(context.second)
    context.job.wait_steps(len(context.job.steps()) + 2, LIMIT)
    compare_steps(context)


@case
def ends(context):
    """The job ends in the middle of a round: the tool says so, and nothing is left at either server."""
    context.second = context.lab.server("second", listen=True)
    context.start("partly", "--size", 48, steps=100000)
    tool, go = context.stopped_at("copy the rest of it while the job runs")
    context.job.end()
    go()
    if tool.wait(LIMIT) == 0 or not tool.stderr().strip():
        raise Failure(f"expected a failure\n{tool.describe()}")
    for server in (context.first, context.second):
        context.expect_empty(server)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver")
    harness.run_cases_in_labs(parser, CASES, Context)


if __name__ == "__main__":
    main()
