#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a job stands still for a checkpoint and for a move, by GPU memory and by how much of it changes.

Usage: pause.py --product DIR --programs DIR [--mib N,...] [--changing P,...] [--moves] [--far] [--no-checkpoints] [--native] [--seconds S] [--json FILE]
       pause.py --product DIR --program COMMAND [--checkpoints N] [--seconds S]

DIR of the product: cr-run, cr-server, cr-checkpoint, cr-migrate. Prints a table, a row for each job. The first column
of times is what the tools report, the last one what the job saw: the longest time between two of its steps. `native`
is the driver's own checkpoint (cuCheckpointProcess*: lock and checkpoint). Needs root and CRIU for checkpoints.

With `--program`, live checkpoints of one program that prints a line for each of its steps, such as
"python3 tests/frameworks/torch_gpt.py --steps 100000". A row for each; the last column is the memory that is the
process's own at that time.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

STEP_MS = 20


def log(*words):
    print(*words, file=sys.stderr, flush=True)


class Job:
    def __init__(self, options, folder, name, mib, percent, native=False):
        self.out = os.path.join(folder, name + ".out")
        self.name = name
        command = [os.path.join(options.programs, "pause_job"), str(mib), str(percent), str(STEP_MS), "100000"]
        if not native:
            run = [os.path.join(options.product, "cr-run"), "--server", options.server, "--name", name, "--"]
            command = run + command
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)

    def text(self):
        return open(self.out, errors="replace").read()

    def wait_ready(self, limit):
        end = time.monotonic() + limit
        while "ready" not in self.text():
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"{self.name} did not begin: {self.text()[-300:]}")
            time.sleep(0.05)

    def lines(self):
        """(steps a second, longest ms, wrong words) of each second so far."""
        found = re.findall(r"steps (\d+) in ([\d.]+) s, longest ([\d.]+) ms, wrong (\d+)", self.text())
        return [(int(a) / float(b), float(c), int(d)) for a, b, c, d in found]

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def tool(options, limit, *words):
    command = [os.path.join(options.product, words[0])] + list(words[1:])
    # Files, since a cr-relay that the tool leaves behind has its output, too.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, stdout=out, stderr=errors, timeout=limit)
        out.seek(0)
        errors.seek(0)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {errors.read().strip()[-400:]}")
        return json.loads(out.read())


def measure(options, job, what):
    """Runs `what`; returns its result and what the job saw meanwhile: longest ms, rate before and during."""
    time.sleep(options.seconds)
    before = job.lines()
    result = what()
    time.sleep(1.2)
    after = job.lines()
    wrong = max((line[2] for line in after), default=0)
    if wrong:
        raise RuntimeError(f"{job.name}: {wrong} wrong words")
    usual = sorted(line[0] for line in before[1:])
    during = sorted(line[0] for line in after[len(before):])
    middle = lambda values: values[len(values) // 2] if values else 0
    return result, max((line[1] for line in after[len(before):]), default=0), middle(usual), middle(during)


def private_bytes(pid):
    """What the process and its children have changed of their memory, which a checkpoint copies."""
    total = 0
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        total = sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Private_Dirty:"))
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return total + sum(private_bytes(int(child)) for child in children.read().split())


def program(options, folder):
    """Live checkpoints of options.program, one every options.seconds, and their rows."""
    out = os.path.join(folder, "program.out")
    image = os.path.join(folder, "image")
    command = [os.path.join(options.product, "cr-run"), "--server", options.server, "--name", "pause-program", "--"]
    with open(out, "w") as stream:
        process = subprocess.Popen(command + shlex.split(options.program), stdout=stream, stderr=stream,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
    steps = lambda: open(out, errors="replace").read().count("\n")
    try:
        end = time.monotonic() + options.limit
        while steps() < 5:
            if time.monotonic() > end or process.poll() is not None:
                raise RuntimeError("the program did not begin: " + open(out, errors="replace").read()[-300:])
            time.sleep(0.1)
        for number in range(options.checkpoints):
            before = steps()
            time.sleep(options.seconds)
            rate = (steps() - before) / options.seconds
            got = tool(options, options.limit, "cr-checkpoint", "--json", "pause-program", image)
            PAUSES.append({"mib": got["gpu_bytes"] >> 20, "percent": None, "what": "program",
                           "pause_seconds": got["paused_seconds"]})
            row(number + 1, f"{got['paused_seconds']:.3f}", f"{got['reading_seconds']:.3f}",
                f"{got['dumping_seconds']:.3f}", f"{got['seconds']:.1f}", f"{rate:.1f}", f"{got['gpu_bytes'] / 1e9:.2f}",
                f"{private_bytes(process.pid) / 1e6:.0f}")
            shutil.rmtree(image)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


PAUSES = []


def note(mib, percent, what, seconds):
    PAUSES.append({"mib": mib, "percent": percent, "what": what, "pause_seconds": seconds})


def row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def checkpoint(options, folder, mib, percent):
    job = Job(options, folder, f"pause-{mib}-{percent}", mib, percent)
    image = os.path.join(folder, "image")
    try:
        job.wait_ready(60)
        got, longest, usual, during = measure(
            options, job, lambda: tool(options, options.limit, "cr-checkpoint", "--json", job.name, image))
        note(mib, percent, "checkpoint", got["paused_seconds"])
        before, behind = got.get("before", {}), got.get("behind", {})
        row(mib, f"{percent}%", "checkpoint", f"{got['paused_seconds']:.3f}", f"{got['reading_seconds']:.3f}",
            f"{got['dumping_seconds']:.3f}", f"{before.get('seconds', 0):.2f}", before.get("rounds", "-"),
            f"{before.get('copied_bytes', 0) / 1e9:.2f}", f"{before.get('kept_bytes', 0) / 1e9:.2f}",
            f"{behind.get('bytes', 0) / 1e9:.2f} in {behind.get('taking_seconds', 0):.3f} s",
            f"{got['seconds']:.1f}", f"{usual:.1f} / {during:.1f}", f"{longest / 1e3:.3f}")
    finally:
        job.end()
        shutil.rmtree(image, ignore_errors=True)


def move(options, folder, mib, percent, to, what):
    job = Job(options, folder, f"move-{mib}-{percent}-{what.replace(' ', '-')}", mib, percent)
    try:
        job.wait_ready(60)
        got, longest, usual, during = measure(
            options, job, lambda: tool(options, options.limit, "cr-migrate", "--json", job.name, "--to", *to))
        note(mib, percent, what, got["paused_seconds"])
        before = got["before"]
        row(mib, f"{percent}%", what, f"{got['paused_seconds']:.3f}",
            f"{got['copying_seconds']:.3f} for {got['copied_bytes'] / 1e9:.2f} GB",
            f"{got['handing_over_seconds']:.3f} + {got['replaying_seconds']:.3f}", f"{got['ahead_seconds']:.2f}", before["rounds"],
            f"{before['copied_bytes'] / 1e9:.2f}", f"{before['kept_bytes'] / 1e9:.2f}",
            f"{got['handed_over_bytes'] / 1e9:.2f} + {got['direct_bytes'] / 1e9:.2f}", f"{got['seconds']:.1f}",
            f"{usual:.1f} / {during:.1f}", f"{longest / 1e3:.3f}")
    finally:
        job.end()


def native(options, folder, mib, percent):
    job = Job(options, folder, f"native-{mib}-{percent}", mib, percent, native=True)
    flag = os.path.join(folder, "flag")
    open(flag, "w").close()
    try:
        job.wait_ready(60)
        done = subprocess.run([os.path.join(options.programs, "native_checkpoint"), str(job.process.pid), flag, "true"],
                              capture_output=True, text=True, timeout=options.limit)
        got = json.loads(done.stdout)
        if "error" in got:
            raise RuntimeError(got["error"])
        note(mib, percent, "native", got["checkpoint_s"])
        row(mib, f"{percent}%", "native", f"{got['checkpoint_s']:.3f}", *["-"] * 10)
    finally:
        job.end()


class Server:
    def __init__(self, options, folder, gpu, far=False):
        self.unix = "unix:" + folder + "/session.sock"
        self.tcp = None
        command = [os.path.join(options.product, "cr-server"), "--dir", folder, "--workers", "2", "--log-level", "warn"]
        if gpu is not None:
            command += ["--gpu", str(gpu)]
        if far:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.tcp = f"127.0.0.1:{free.getsockname()[1]}"
            command += ["--listen", self.tcp, "--insecure-tcp", "127.0.0.1"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while not os.path.exists(folder + "/session.sock"):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError("cr-server did not start")
            time.sleep(0.05)
        time.sleep(1)

    def end(self):
        self.process.terminate()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--programs", help="folder of pause_job and native_checkpoint")
    parser.add_argument("--program", help="command of a program to checkpoint, instead of pause_job")
    parser.add_argument("--checkpoints", type=int, default=6, help="how many, with --program")
    parser.add_argument("--mib", default="8192,32768", help="GPU memory of the jobs")
    parser.add_argument("--changing", default="5,100", help="percent of it that is rewritten in each step")
    parser.add_argument("--moves", action="store_true", help="moves to a second server, too")
    parser.add_argument("--far", action="store_true", help="moves to a server through gRPC over loopback, too")
    parser.add_argument("--no-checkpoints", action="store_true", help="moves only")
    parser.add_argument("--second-gpu", type=int, help="moves to this GPU, too")
    parser.add_argument("--native", action="store_true", help="the driver's own checkpoint, too")
    parser.add_argument("--seconds", type=float, default=4, help="how long a job runs before it is disturbed")
    parser.add_argument("--json", help="file for the pauses; pause_plot.py draws them")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a checkpoint or a move")
    options = parser.parse_args()
    if bool(options.programs) == bool(options.program):
        parser.error("one of --programs and --program is needed")
    folder = tempfile.mkdtemp(prefix="cr-pause-", dir=os.environ.get("CR_PAUSE_DIR"))
    servers, far = [], None
    if options.program:
        os.mkdir(os.path.join(folder, "server"), 0o700)
        server = Server(options, os.path.join(folder, "server"), None)
        options.server = server.unix
        row("checkpoint", "pause s", "of it GPU", "of it process", "all s", "steps/s", "GPU GB", "process MB")
        row(*["---"] * 8)
        try:
            program(options, folder)
        finally:
            server.end()
            shutil.rmtree(folder, ignore_errors=True)
        return 0
    row("MiB", "changing", "what", "pause s", "of it GPU", "of it process, or handing over + replay", "before s", "rounds", "copied GB",
        "still right GB", "handed over + copied without the host GB", "all s", "steps/s before / during", "seen by the job s")
    row(*["---"] * 14)
    failed = 0
    try:
        names = [("server", None)] + ([("other", None)] if options.moves else [])
        if options.second_gpu is not None:
            names = [("server", 0), ("other", 0), ("second", options.second_gpu)]
        for name, gpu in names:
            os.mkdir(os.path.join(folder, name), 0o700)
            servers.append(Server(options, os.path.join(folder, name), gpu))
        if options.far:
            os.mkdir(os.path.join(folder, "far"), 0o700)
            far = Server(options, os.path.join(folder, "far"), names[0][1], far=True)
        options.server = servers[0].unix
        for mib in map(int, options.mib.split(",")):
            for percent in map(int, options.changing.split(",")):
                work = [] if options.no_checkpoints else [lambda: checkpoint(options, folder, mib, percent)]
                if len(servers) > 1:
                    work.append(lambda: move(options, folder, mib, percent, [servers[1].unix], "move, same GPU"))
                if len(servers) > 2:
                    work.append(lambda: move(options, folder, mib, percent, [servers[2].unix], "move, second GPU"))
                if far:
                    work.append(lambda: move(options, folder, mib, percent, [far.tcp], "move, gRPC over loopback"))
                if options.native:
                    work.append(lambda: native(options, folder, mib, percent))
                for one in work:
                    try:
                        one()
                    except (RuntimeError, subprocess.TimeoutExpired, ValueError) as error:
                        failed += 1
                        log(f"{mib} MiB, {percent}%: {error}")
    finally:
        for server in servers + ([far] if far else []):
            server.end()
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        seen = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True).stdout.splitlines()
        with open(options.json, "w") as f:
            json.dump({"environment": "; ".join(seen), "rows": PAUSES}, f, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
