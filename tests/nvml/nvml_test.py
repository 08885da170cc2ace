#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Our NVML end to end: programs that load libnvidia-ml.so.1 by its soname, under cr-run.

Usage: nvml_test.py --product DIR --probe PROGRAM --ask SCRIPT [--only CASE,...]

Cases: ring, grpc, embedded (the answers agree with CUDA's), restart, migrate (they come from the new server; a thread asks
all the time while the job is checkpointed), select (pynvml's way, without CUDA; which GPUs are seen), no_server, hostile.

Exit code: 0 all passed, 1 some failed.
"""

import argparse
import json
import os
import random
import signal
import socket
import struct
import sys
import traceback

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(here, "../matrix")]
import harness  # noqa: E402

LIMIT = 90
MEMORY = 1 << 30
BYTES = 48 << 20  # what the probe allocates


def uuid(number, ordinal=0):
    return f"GPU-0000000{number}-0000-0000-0000-00000000000{ordinal}"


def start_server(lab, number, gpus=1, **options):
    """A server whose first GPU has the UUID of that number."""
    lab.env.update(SOFTGPU_UUID=f"0000000{number}" + "0" * 24, SOFTGPU_DEVICES=str(gpus), SOFTGPU_MEMORY=str(MEMORY))
    return lab.server(f"server{number}", **options)


def expect_lines(job, *lines):
    got = job.stdout().decode().splitlines()
    if got != list(lines):
        raise harness.Failure(f"expected {list(lines)}, got {got}\n{job.describe()}")


def plain(lab, options, address, env=None):
    job = lab.job("job", [options.probe], address, env=env)
    job.expect_success(LIMIT)
    expect_lines(job, f"before: 2 GPUs, first {uuid(1)}", f"after: 2 GPUs, first {uuid(1)}", "done")


def ring(lab, options):
    # NVML tells of all GPUs, whatever CUDA may see of them.
    plain(lab, options, start_server(lab, 1, gpus=2).unix, env={"CUDA_VISIBLE_DEVICES": "0"})


def grpc(lab, options):
    plain(lab, options, start_server(lab, 1, gpus=2, listen=True).tcp)


def embedded(lab, options):
    lab.env.update(SOFTGPU_UUID="00000001" + "0" * 24, SOFTGPU_DEVICES="2", SOFTGPU_MEMORY=str(MEMORY))
    plain(lab, options, None)


def saved_session(lab, server):
    """The server's only session as cr-ps shows it; it must have been saved."""
    def look():
        shown = lab.run("ps", [lab.tool("cr-ps"), "--server", server.unix, "--json"], LIMIT)
        text = shown.stdout().decode()
        os.remove(shown.out)
        return json.loads(text)["sessions"]

    # An image has the same bytes once.
    good = lambda s: s.get("saved_unix_ms") and s["saved_bytes"] > 0 and s["device_bytes"] >= BYTES
    harness.wait_for(
        lambda: [good(s) for s in look()] == [True],
        LIMIT,
        lambda: f"cr-ps does not show what the session holds and what was saved: {look()}",
    )
    table = lab.run("ps-table", [lab.tool("cr-ps"), "--server", server.unix], LIMIT)
    if "s ago" not in table.stdout().decode():
        raise harness.Failure(f"cr-ps's table does not show it\n{table.describe()}")


def moved(job):
    expect_lines(job, f"before: 1 GPUs, first {uuid(1)}", f"after: 1 GPUs, first {uuid(2)}", "done")


def restart(lab, options):
    first = start_server(lab, 1)
    job = lab.job("job", [options.probe], first.unix, pause_at=[1])
    job.wait_paused(1, LIMIT)
    image = os.path.join(lab.folder, "image")
    # While it runs on: the thread that asks must not be hurt.
    lab.run("live", [lab.tool("cr-checkpoint"), job.id, image + ".live"], LIMIT)
    saved_session(lab, first)
    lab.run("checkpoint", [lab.tool("cr-checkpoint"), "--stop", job.id, image], LIMIT)
    job.wait(LIMIT)
    server = start_server(lab, 2, listen=True)
    again = lab.start(harness.Process(lab, "restart", [lab.tool("cr-restart"), image, "--server", server.tcp]))
    saved_session(lab, server)
    job.go(1)
    again.expect_success(LIMIT)
    moved(job)


def migrate(lab, options):
    job = lab.job("job", [options.probe], start_server(lab, 1).unix, pause_at=[1])
    job.wait_paused(1, LIMIT)
    lab.run("live", [lab.tool("cr-checkpoint"), job.id, os.path.join(lab.folder, "image")], LIMIT)
    server = start_server(lab, 2)
    lab.run("migrate", [lab.tool("cr-migrate"), job.id, "--to", server.unix], LIMIT)
    saved_session(lab, server)
    job.go(1)
    job.expect_success(LIMIT)
    moved(job)


def select(lab, options):
    server = start_server(lab, 1, gpus=3)
    command = ["/usr/bin/python3", options.ask]
    gpu = lambda index, ordinal: [f"gpu {index} {uuid(1, ordinal)} 00000000:{0x50 + ordinal:02X}:00.0 {MEMORY}", "power 3"]
    end = ["set 3", "after 1"]
    every = lab.job("every", command, server.unix, env={"CUDA_VISIBLE_DEVICES": ""})
    every.expect_success(LIMIT)
    expect_lines(every, "count 3", *gpu(0, 0), *gpu(1, 1), *gpu(2, 2), *end)
    second = lab.start(
        harness.Process(lab, "second", [lab.tool("cr-run"), "--server", server.unix, "--gpu", "1", "--"] + command)
    )
    second.expect_success(LIMIT)
    expect_lines(second, "count 1", *gpu(0, 1), *end)
    # CUDA sees the same one.
    probe = lab.start(
        harness.Process(lab, "probe", [lab.tool("cr-run"), "--server", server.unix, "--gpu", "1", "--", options.probe])
    )
    probe.expect_success(LIMIT)
    expect_lines(probe, f"before: 1 GPUs, first {uuid(1, 1)}", f"after: 1 GPUs, first {uuid(1, 1)}", "done")
    missing = lab.start(
        harness.Process(lab, "missing", [lab.tool("cr-run"), "--server", server.unix, "--gpu", "7", "--", options.probe])
    )
    if missing.wait(LIMIT) == 0:
        raise harness.Failure("a GPU that the server does not have was served")
    # And the server goes on for others.
    every = lab.job("again", [options.probe], server.unix)
    every.expect_success(LIMIT)
    # A server that has been given one of its machine's GPUs.
    own = lab.start(harness.Process(lab, "own", [lab.tool("cr-run"), "--gpu", "2", "--"] + command))
    own.expect_success(LIMIT)
    expect_lines(own, "count 1", *gpu(0, 2), *end)
    both = lab.start(harness.Process(lab, "both", [lab.tool("cr-run"), "--gpu", "2", "--", options.probe]))
    both.expect_success(LIMIT)
    expect_lines(both, f"before: 1 GPUs, first {uuid(1, 2)}", f"after: 1 GPUs, first {uuid(1, 2)}", "done")


def no_server(lab, options):
    """Without cr-run and without a server, NVML fails as it does without a driver."""
    folder = os.path.join(lab.folder, "lib")
    os.mkdir(folder)
    os.symlink(lab.tool("libcuda-remote-nvml.so"), os.path.join(folder, "libnvidia-ml.so.1"))
    env = {"LD_LIBRARY_PATH": folder, "CUDA_REMOTE_SERVER": None, "CUDA_REMOTE_NVML_LOG": "1"}
    failed = lab.run("alone", ["/usr/bin/python3", options.ask], LIMIT, env, expect=None)
    for words in ("Driver Not Loaded", "no GPU server"):
        if words not in failed.stderr():
            raise harness.Failure(f"it does not say {words!r}\n{failed.describe()}")
    # Not under cr-run, but told of a server on another machine: it starts a relay for itself.
    server = start_server(lab, 1, listen=True)
    alone = lab.run("relayed", ["/usr/bin/python3", options.ask], LIMIT, dict(env, CUDA_REMOTE_SERVER=server.tcp))
    if f"gpu 0 {uuid(1)}" not in alone.stdout().decode():
        raise harness.Failure(f"no answer through a relay of its own\n{alone.describe()}")


def hostile(lab, options):
    """Bytes that are no questions, a flood of connections, and a cr-nvml that dies: the server answers the next one."""
    server = start_server(lab, 1)
    path = os.path.join(server.directory, "session.sock")
    pick = random.Random(5)
    for round in range(60):
        body = bytes(pick.randrange(256) for _ in range(pick.choice((0, 1, 40, 5000, 60000))))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.settimeout(30)
            s.connect(path)
            s.send(struct.pack("<II", 0x50524355, 5) + body)
            if round % 3 == 0:
                continue  # and away
            magic, kind = struct.unpack("<II", s.recv(65536)[:8])
            if (magic, kind) != (0x50524355, 6):
                raise harness.Failure(f"not an answer: {magic:x} {kind}")
    command = ["/usr/bin/python3", options.ask]
    for attempt in ("first", "second"):
        job = lab.job(attempt, command, server.unix)
        job.expect_success(LIMIT)
        (monitor,) = harness.children_of(server.pid, "cr-nvml")
        os.kill(monitor, signal.SIGKILL)
        harness.wait_for(
            lambda: monitor not in harness.children_of(server.pid, "cr-nvml"), LIMIT, lambda: "cr-nvml does not go away"
        )
    if not server.running():
        raise harness.Failure(f"the server ended\n{server.describe()}")


CASES = {case.__name__: case for case in (ring, grpc, embedded, restart, migrate, select, no_server, hostile)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--probe", required=True)
    parser.add_argument("--ask", required=True)
    parser.add_argument("--only", default=",".join(CASES))
    options = parser.parse_args()
    options.probe, options.ask = os.path.realpath(options.probe), os.path.realpath(options.ask)
    failed = 0
    for name in options.only.split(","):
        try:
            with harness.Lab(options.product) as lab:
                CASES[name](lab, options)
            print(f"ok   {name}", flush=True)
        except Exception as failure:
            failed += 1
            print(f"FAIL {name}", flush=True)
            print(failure if isinstance(failure, harness.Failure) else traceback.format_exc(), file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
