#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CUDA_REMOTE_TRACE, CUDA_REMOTE_TIMELINE and cr-trace, end to end, with a program that makes known calls.

Usage: trace_cases.py --product DIR --program PATH [--driver LIB] [--only CASE,...]

Exit code: 0 all passed, 1 some failed.
"""

import argparse
import glob
import json
import os
import re
import signal
import sys
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../matrix"), os.path.join(os.path.dirname(os.path.realpath(__file__)), "../matrix")]
import harness  # noqa: E402
from harness import Failure, wait_for  # noqa: E402

CASES = {}
COUNT = 200
UNSUPPORTED = "cuGraphicsMapResources"


def case(function):
    CASES[function.__name__] = function
    return function


def check(condition, text, *what):
    if not condition:
        raise Failure(text + "".join(f"\n{w}" for w in what))


def calls_of(path):
    """{name: row} of a table in JSON."""
    with open(path) as f:
        report = json.load(f)
    return {row["name"]: row for row in report["calls"]}, report


def only_file(lab, pattern):
    found = [p for p in glob.glob(os.path.join(lab.folder, pattern)) if not os.path.islink(p)]
    check(len(found) == 1, f"expected one file {pattern}, found {found}")
    return found[0]


def check_known_calls(calls, copies=COUNT, questions=COUNT):
    """What the program `calls` does, once."""
    names = sorted(calls)
    check("cuMemcpyHtoD_v2" in calls, "no copies in the table", names)
    copy = calls["cuMemcpyHtoD_v2"]
    check(copy["count"] == copies, f"{copies} copies were made", copy)
    check(copy["errors"] == 0 and copies * 1000 < copy["sent_bytes"] < copies * 1200, "the copies' bytes", copy)
    check(copy["total_us"] >= copy["max_us"] >= copy["mean_us"] > 0, "the copies' times", copy)
    # Answered in the library: no bytes.
    question = calls["cuCtxGetCurrent"]
    check(question["count"] == questions and question["sent_bytes"] == 0, "questions for the current context", question)
    table = calls.get("private table 42d85a81[2]")
    check(table and table["count"] == 1 and table["errors"] == 0, "the private table's function", names)
    check(calls["cuMemFree_v2"]["errors"] == 1, "the wrong free", calls["cuMemFree_v2"])
    # Known by habit, the server is asked once or twice (once more after the limit was changed).
    for name, most in (("cuCtxGetLimit", 6), ("cuStreamIsCapturing", 1), ("cuKernelSetAttribute", 3), ("cuLaunchKernelEx", 3)):
        habit = calls[name]
        check(habit["count"] >= min(copies, COUNT) // 2, name, habit)
        check(habit["received_bytes"] <= most * 64, f"{name} is answered by the server every time", habit)
    refused = calls[UNSUPPORTED]
    check(refused["count"] == refused["errors"] == refused["unsupported"] == 1, "the unsupported call", refused)
    check(calls["cuInit"]["count"] == 1 and calls["cuCtxCreate_v4"]["count"] == 1, "cuInit and cuCtxCreate", names)


def traced(lab, program, way, server, env, name=None, expect=0, count=COUNT):
    job = lab.job(name or "job-" + way.strip("_"), [program, str(count), way], server, env=env)
    code = job.wait(60)
    check(code == expect, f"exit code {code}, expected {expect}", job.describe())
    return job


@case
def table(lab, program):
    """Text and JSON, on both channels; nothing changes for the program."""
    server = lab.server(listen=True)
    for channel, address in (("ring", server.unix), ("grpc", server.tcp)):
        for suffix in ("json", "txt"):
            traced(lab, program, "exit", address, {"CUDA_REMOTE_TRACE": f"{channel}.{suffix}"}, f"{channel}-{suffix}")
        calls, report = calls_of(only_file(lab, f"{channel}.*.json"))
        check(report["finished"], "the table of a process that ended by itself is final")
        check_known_calls(calls)
        # The name that was asked for leads to the file.
        check(calls_of(os.path.join(lab.folder, f"{channel}.json"))[0] == calls, "the link to the table")
        with open(os.path.join(lab.folder, f"{channel}.txt")) as f:
            lines = f.read().splitlines()
        rows = {line.split()[-1]: line.split() for line in lines[2:]}
        check(rows["cuMemcpyHtoD_v2"][0] == str(COUNT), "the copies in the text", *lines)
        check(rows[UNSUPPORTED][:3] == ["1", "1", "1"], "the unsupported call in the text", *lines)
        check(int(rows["all"][0]) == sum(int(r[0]) for n, r in rows.items() if n != "all"), "the sum in the text", *lines)


@case
def endings(lab, program):
    """A process that does not end by itself leaves its table all the same."""
    server = lab.server()
    for way, code in (("_exit", 0), ("abort", 128 + signal.SIGABRT), ("kill", 128 + signal.SIGKILL)):
        traced(lab, program, way, server.unix, {"CUDA_REMOTE_TRACE": f"{way}-%p.json"}, expect=code)
        calls, report = calls_of(only_file(lab, f"{way}-*.json"))
        check_known_calls(calls)
        check(not report["finished"], f"after {way} nobody could say that the table is final")


@case
def processes(lab, program):
    """Children by fork and by exec have files of their own."""
    server = lab.server()
    traced(lab, program, "exec", server.unix, {"CUDA_REMOTE_TRACE": "exec.json", "CUDA_REMOTE_JOB_DIR": None})
    files = [p for p in glob.glob(os.path.join(lab.folder, "exec.*.json"))]
    check(len(files) == 2, "two processes, two tables", *files)
    counts = sorted(calls_of(p)[0]["cuMemcpyHtoD_v2"]["count"] for p in files)
    check(counts == [3, COUNT], "the two tables' copies", counts)
    traced(lab, program, "fork", server.unix, {"CUDA_REMOTE_TRACE": "fork-%p.json"})
    reports = [calls_of(p)[0] for p in glob.glob(os.path.join(lab.folder, "fork-*.json"))]
    check(len(reports) == 2, "two processes, two tables", *reports)
    child, parent = sorted(reports, key=len)
    check_known_calls(parent)
    check(list(child) == ["cuDriverGetVersion"] and child["cuDriverGetVersion"]["count"] == 5, "the forked child's table", child)
    traced(lab, program, "threads", server.unix, {"CUDA_REMOTE_TRACE": "threads-%p.json"})
    check_known_calls(calls_of(only_file(lab, "threads-*.json"))[0])
    # A program that never calls the driver leaves nothing.
    lab.job("never", ["/bin/true"], server.unix, env={"CUDA_REMOTE_TRACE": "never.json"}).expect_success(20)
    check(not glob.glob(os.path.join(lab.folder, "never*.json")), "a program without CUDA has no table")


def check_timeline(path, copies=None):
    with open(path) as f:
        trace = json.load(f)
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    client = [e for e in slices if e["cat"] == "client"]
    worker = [e for e in slices if e["cat"] == "worker"]
    check(client and worker, f"{len(client)} calls, {len(worker)} requests", trace["otherData"])
    check("problem" not in trace["otherData"], "a problem", trace["otherData"])
    if copies is not None:
        check(sum(e["name"] == "cuMemcpyHtoD_v2" for e in client) == copies, "the copies in the timeline")
        check(sum(e["name"].startswith("cuMemcpyHtoD") for e in worker) >= copies, "the copies in the worker")
    # Slices of one thread do not overlap: each begins after the one before has ended.
    threads = {}
    for event in slices:
        check(event["dur"] >= 0, "a slice that ends before it begins", event)
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for events_of_thread in threads.values():
        events_of_thread.sort(key=lambda e: e["ts"])
        for before, after in zip(events_of_thread, events_of_thread[1:]):
            check(after["ts"] >= before["ts"] + before["dur"] - 0.002, "two slices of a thread overlap", before, after)
    # Each arrow has two ends, and no request begins before its call did.
    ends = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    check(ends["s"] and set(ends["s"]) == set(ends["f"]), f"{len(ends['s'])} arrows begin, {len(ends['f'])} end")
    # Where the clocks had to be compared, the comparison has an error.
    slack = 0.002 + trace["otherData"]["server_clock_error_us"]
    for number, start in ends["s"].items():
        check(ends["f"][number]["ts"] >= start["ts"] - slack, "a request before its call", start, ends["f"][number])
    named = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    check("executor" in named and any(name.startswith("main thread") for name in named), "the threads' names", named)
    return trace


@case
def timeline(lab, program):
    server = lab.server(listen=True)
    for channel, address in (("ring", server.unix), ("grpc", server.tcp)):
        env = {"CUDA_REMOTE_TIMELINE": f"{channel}-%p.json", "CUDA_REMOTE_TIMELINE_SECONDS": "60"}
        traced(lab, program, "threads", address, env, "timeline-" + channel)
        check_timeline(only_file(lab, f"{channel}-*.json"), COUNT)
    # A slice in the middle of the run, and fewer places than calls.
    steady = os.path.join(lab.folder, "steady")
    open(steady, "w").close()
    env = {"CUDA_REMOTE_TIMELINE": "slice-%p.json", "CUDA_REMOTE_TIMELINE_START": "0.5", "CUDA_REMOTE_TIMELINE_SECONDS": "0.5",
           "CUDA_REMOTE_TIMELINE_EVENTS": "150", "CALLS_WHILE": steady}  # fmt: skip
    job = lab.job("slice", [program, "20", "steady"], server.unix, env=env)
    wait_for(lambda: glob.glob(os.path.join(lab.folder, "slice-*.json")) or not job.running(), 20, job.describe)
    os.unlink(steady)
    job.expect_success(20)
    trace = check_timeline(only_file(lab, "slice-*.json"))
    check(trace["otherData"]["dropped_calls"] > 0, "150 places are too few", trace["otherData"])
    check(0.4 < trace["otherData"]["seconds"] < 0.9, "half a second", trace["otherData"])
    check(not any(e["name"] == "cuInit" for e in trace["traceEvents"]), "cuInit was before the slice")


@case
def tool(lab, program):
    """cr-trace: a job that was started without any settings, twice; and the totals of one that was."""
    server = lab.server()
    steady = os.path.join(lab.folder, "steady")
    open(steady, "w").close()
    plain = lab.job("plain", [program, "20", "steady"], server.unix, env={"CALLS_WHILE": steady})
    env = {"CALLS_WHILE": steady, "CUDA_REMOTE_TRACE": "totals.json"}
    counted = lab.job("counted", [program, "20", "steady"], server.unix, env=env)
    for job in (plain, counted):
        wait_for(lambda: b"steady" in job.stdout() or not job.running(), 20, job.describe)
    for number in range(2):
        out = os.path.join(lab.folder, f"slice{number}.json")
        name = f"cr-trace{number}"
        shown = lab.run(name, [lab.tool("cr-trace"), plain.id, "--seconds", "0.5", "-o", out, "--json"], 20)
        calls = {row["name"]: row for row in json.loads(shown.stdout())["calls"]}
        check("cuInit" not in calls, "cuInit was before the slice", calls)
        copies = calls["cuMemcpyHtoD_v2"]
        check(copies["count"] >= 20 and copies["sent_bytes"] >= 1000 * copies["count"] and copies["max_us"] > 0, "copies", copies)
        trace = check_timeline(out)
        drawn = sum(e["name"] == "cuMemcpyHtoD_v2" and e["ph"] == "X" for e in trace["traceEvents"])
        check(abs(drawn - copies["count"]) <= 2, f"{drawn} copies drawn", copies)
    lab.run("no-totals", [lab.tool("cr-trace"), plain.id, "--totals"], 20, expect=1)
    shown = lab.run("totals", [lab.tool("cr-trace"), counted.id, "--totals"], 20).stdout().decode()
    check("cuInit" in shown and "so far" in shown, "the totals", shown)
    check(not [p for p in os.listdir(lab.folder) if re.search(r"\.(json|txt)\.\w{6}$", p)], "half-written files", *os.listdir(lab.folder))
    lab.run("nobody", [lab.tool("cr-trace"), "no-such-job"], 20, expect=4)
    # A tool that is killed leaves the job running, and recording ends by itself.
    killed = lab.start(harness.Process(lab, "killed", [lab.tool("cr-trace"), plain.id, "--seconds", "0.2"]))
    time.sleep(0.1)
    killed.kill()
    os.unlink(steady)
    plain.expect_success(20)
    counted.expect_success(20)
    check_known = calls_of(only_file(lab, "totals.*.json"))
    check(check_known[1]["finished"] and check_known[0]["cuInit"]["count"] == 1, "the totals at the end", check_known)


@case
def restored(lab, program):
    """The counting goes on across a checkpoint and a restart, and a timeline of the restored process is right."""
    steady = os.path.join(lab.folder, "steady")
    open(steady, "w").close()
    env = {"CALLS_WHILE": steady, "CUDA_REMOTE_TRACE": os.path.join(lab.folder, "restored-%p.json")}
    job = lab.job("saved", [program, "20", "steady"], lab.server("first").unix, env=env)
    wait_for(lambda: b"steady" in job.stdout() or not job.running(), 20, job.describe)
    image = os.path.join(lab.folder, "image")
    lab.run("save", [lab.tool("cr-checkpoint"), "--stop", job.id, image], 60)
    job.wait(20)
    before = calls_of(only_file(lab, "restored-*.json"))[0]["cuMemcpyHtoD_v2"]["count"]
    command = [lab.tool("cr-restart"), image, "--server", lab.server("second").unix]
    restored = lab.start(harness.Process(lab, "restored", command))
    counted = lambda: calls_of(only_file(lab, "restored-*.json"))[0]["cuMemcpyHtoD_v2"]["count"]
    wait_for(lambda: counted() > before + 100 or not restored.running(), 30, restored.describe)
    out = os.path.join(lab.folder, "slice.json")
    lab.run("cr-trace", [lab.tool("cr-trace"), job.id, "--seconds", "0.3", "-o", out], 20)
    check_timeline(out)
    os.unlink(steady)
    restored.expect_success(30)
    calls, report = calls_of(only_file(lab, "restored-*.json"))
    check(report["finished"] and calls["cuInit"]["count"] == 1, "the table at the end", report)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--driver")
    parser.add_argument("--only", default=",".join(CASES))
    options = parser.parse_args()
    failed = 0
    for name in options.only.split(","):
        begin = time.monotonic()
        try:
            with harness.Lab(options.product, options.driver) as lab:
                CASES[name](lab, os.path.abspath(options.program))
            print(f"ok   {name} ({time.monotonic() - begin:.1f} s)", flush=True)
        except (Failure, KeyError, ValueError, OSError) as error:
            failed += 1
            print(f"FAIL {name}: {error if isinstance(error, Failure) else traceback.format_exc()}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
