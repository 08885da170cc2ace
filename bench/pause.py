#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a job stands still for a checkpoint and for a move, by GPU memory and by how much of it changes.

Usage: pause.py --product DIR --programs DIR [--mib N,...] [--changing P,...] [--moves] [--far] [--no-checkpoints] [options]
       pause.py --product DIR --programs DIR --program COMMAND [--checkpoints N] [options]

DIR of the product: cr-run, cr-server, cr-checkpoint, cr-migrate. Prints a table, a row for each job, and then which
bars are met. The first column of times is what the tools report, the last one what the job saw: the longest time
between two of its steps. `native` is the driver's own checkpoint (cuCheckpointProcess*: lock and checkpoint), once for
each amount of memory. Needs root and CRIU for checkpoints.

With `--at-once`, the one checkpoint of a job comes right after it has filled its memory, when its server has not counted
that yet. It is an error if such a checkpoint prepares no host memory before the pause.

With `--program`, live checkpoints of one program that prints a line for each of its steps, such as
"python3 tests/frameworks/torch_gpt.py --steps 100000". A row for each, and one with the longest times of all; the last
column is the memory that is the process's own at that time.

Steps before and during: steps a second before the tool began, and while it looked at GPU memory and copied it in rounds.
Lost: the seconds that the job lost in each part of that time (see PARTS), of how many. The bar is on looking and copying
together. Use --step-ms 0 for the job's slowdown: a job that waits between its steps hides it.
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
import threading
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import timings  # noqa: E402


def log(*words):
    print(*words, file=sys.stderr, flush=True)


class Line:
    """Steps of a job that follow each other, `seconds` in all up to the moment `end` (time.monotonic)."""

    def __init__(self, steps, seconds, longest, end):
        self.steps, self.seconds, self.longest, self.end = steps, seconds, longest, end
        self.begin = end - seconds


def within(lines, begin, end):
    """Steps and seconds of what lies of the lines between two moments."""
    steps = seconds = 0
    for line in lines:
        part = min(line.end, end) - max(line.begin, begin)
        if part > 0:
            steps += line.steps * part / line.seconds
            seconds += part
    return steps, seconds


# What cr-checkpoint does while the job runs, and the step (--times) with whose end each part ends. cr-checkpoint makes host
# memory ready between the first look at GPU memory and the rounds.
PARTS = {
    "looking": "looking at GPU memory while the job runs",
    "preparing": "making host memory ready",
    "copying": "copying GPU memory while the job runs",
}


def parts_of(ends, began):
    """When each of PARTS began and ended, by the ends of the steps. The first one has the tool's start in it."""
    moments = [began] + [ends[step] for step in PARTS.values()]
    return dict(zip(PARTS, zip(moments, moments[1:])))


class Seen:
    """What a job saw of a checkpoint or a move that began at the moment `began` and looked at memory and copied it for
    `rounds` seconds before the pause: the longest time between two steps, and the steps a second before it all and in the
    rounds (0: not known). `ends`: of the tool's steps; without it, the rounds are taken to end with the line before the
    pause.
    """

    def __init__(self, lines, began, rounds, ends=None):
        self.longest = max((line.longest for line in lines if line.end > began), default=0)
        # The first look can stop a job for a moment, too.
        since = ends[PARTS["copying"]] if ends else began
        pause = max((line for line in lines if line.end > since), key=lambda line: line.longest, default=None)
        # The first line has the start of the job in it.
        before = [line for line in lines[1:] if line.end <= began]
        before_seconds = sum(line.seconds for line in before)
        self.before = sum(line.steps for line in before) / before_seconds if before_seconds else 0
        parts = {}
        if pause and rounds:
            parts = parts_of(ends, began) if ends else {"copying": (pause.begin - rounds, pause.begin)}
        running = [line for line in lines if pause and line.end <= pause.begin + 1e-3]
        seen = {part: within(running, begin, end) for part, (begin, end) in parts.items()}
        # Of each part: how many seconds the job lost, and of how many.
        self.lost = {
            part: (seconds - steps / self.before, seconds) for part, (steps, seconds) in seen.items() if self.before
        }
        # What the rounds cost of their seconds; 0 seconds: not known.
        self.seconds = rounds if self.lost else 0
        self.rounds_lost = sum(lost for part, (lost, _) in self.lost.items() if part != "preparing")
        self.during = self.before * (1 - self.slowdown()) if self.seconds else 0

    def slowdown(self):
        """The part of the steps that the rounds cost; None: not known."""
        return self.rounds_lost / self.seconds if self.seconds else None

    def lost_text(self):
        return ", ".join(f"{part} {lost:.3f} of {seconds:.3f}" for part, (lost, seconds) in self.lost.items()) or "-"


class Job:
    def __init__(self, options, folder, name, mib, percent, native=False):
        self.out = os.path.join(folder, name + ".out")
        self.name = name
        command = [os.path.join(options.programs, "pause_job"), str(mib), str(percent), str(options.step_ms), "100000"]
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
        """What it has printed so far: a Line for each of its lines."""
        found = re.findall(r"steps (\d+) in ([\d.]+) s, longest ([\d.]+) ms, wrong (\d+), at ([\d.]+)\n", self.text())
        wrong = max((int(line[3]) for line in found), default=0)
        if wrong:
            raise RuntimeError(f"{self.name}: {wrong} wrong words")
        return [Line(int(a), float(b), float(c) / 1e3, float(e)) for a, b, c, _, e in found]

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def tool(options, limit, *words):
    """What a tool prints as JSON."""
    command = [os.path.join(options.product, words[0])] + list(words[1:])
    # Files, since a cr-relay that the tool leaves behind has its output, too.
    with tempfile.TemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as errors:
        watch = Watch(errors.name)
        try:
            done = subprocess.run(command, stdout=out, stderr=errors, timeout=limit)
        finally:
            watch.end()
        out.seek(0)
        errors.seek(0)
        told = errors.read()
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {told.strip()[-400:]}")
        result = json.loads(out.read())
    result["told"] = list(zip(told.splitlines(), watch.times))
    return result


def checkpoint_tool(options, job, image):
    """As tool, of cr-checkpoint; under "ends" when each of its steps ended."""
    result = tool(options, options.limit, "cr-checkpoint", "--json", "--times", *options.checkpoint_option, job, image)
    steps = [(re.fullmatch(r"cr-checkpoint: +[\d.]+ s  (\S.*)", line), when) for line, when in result["told"]]
    result["ends"] = {found.group(1): when for found, when in steps if found}
    return result


def measure(options, job, what):
    """Runs `what`; returns its result and what the job saw of it."""
    time.sleep(options.seconds)
    began = time.monotonic()
    result = what()
    time.sleep(0.5)
    return result, Seen(job.lines(), began, result.get("before", {}).get("seconds", 0), result.get("ends"))


class FullGpu:
    """While it is entered, other programs find no more than options.leave_free MiB free on the GPU."""

    def __init__(self, options):
        self.options, self.process = options, None

    def __enter__(self):
        if self.options.leave_free is None:
            return self
        # cr-server starts another worker for the next session, which takes memory of the GPU, too.
        time.sleep(2)
        self.process = subprocess.Popen([os.path.join(self.options.programs, "hold_gpu"), str(self.options.leave_free)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        line = self.process.stdout.readline()
        try:
            got = json.loads(line)
        except ValueError:
            got = {"error": f"hold_gpu printed {line!r}"}
        if "error" in got:
            self.__exit__()
            raise RuntimeError(got["error"])
        log(f"{got['free_mib']} MiB are free on the GPU, another program holds {got['held_mib']} MiB")
        return self

    def __exit__(self, *_):
        if self.process:
            self.process.communicate()


def private_bytes(pid):
    """What the process and its children have changed of their memory, which a checkpoint copies."""
    total = 0
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        total = sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Private_Dirty:"))
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return total + sum(private_bytes(int(child)) for child in children.read().split())


class Watch:
    """Notes when each line of a program's output came, as Lines of one step."""

    def __init__(self, path):
        self.path, self.times, self.stopped = path, [], threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        with open(self.path, "rb") as f:
            over = False
            while not over:
                over = self.stopped.wait(0.001)
                self.times += [time.monotonic()] * f.read().count(b"\n")

    def lines(self):
        times = list(self.times)
        return [Line(1, end - begin, end - begin, end) for begin, end in zip(times, times[1:])]

    def end(self):
        """Notes what has come until now, and no more."""
        self.stopped.set()
        self.thread.join()


def start_program(options, folder, native=False):
    """(process, Watch) of options.program, after its first steps."""
    out = os.path.join(folder, "native.out" if native else "program.out")
    command = [os.path.join(options.product, "cr-run"), "--server", options.server, "--name", "pause-program", "--"]
    with open(out, "w") as stream:
        process = subprocess.Popen(([] if native else command) + shlex.split(options.program), stdout=stream, stderr=stream,
                                   stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    watch = Watch(out)
    end = time.monotonic() + options.limit
    while len(watch.times) < 5:
        if time.monotonic() > end or process.poll() is not None:
            end_program(process, watch)
            raise RuntimeError("the program did not begin: " + open(out, errors="replace").read()[-300:])
        time.sleep(0.1)
    return process, watch


def end_program(process, watch):
    watch.end()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def program(options, folder, found):
    """Live checkpoints of options.program, one every options.seconds, and their rows."""
    image = os.path.join(folder, "image")
    process, watch = start_program(options, folder)
    lost, seconds, group, times = 0, 0, "", []
    try:
        for number in range(options.checkpoints):
            time.sleep(options.seconds)
            began = time.monotonic()
            got = checkpoint_tool(options, "pause-program", image)
            time.sleep(0.5)
            # Not what the checkpoint before has to do with.
            lines = [line for line in watch.lines() if line.begin >= began - options.seconds]
            seen = Seen(lines, began, got["before"]["seconds"], got["ends"])
            lost += seen.rounds_lost
            seconds += seen.seconds
            group = f"{os.path.basename(program_name(options))}, {got['gpu_bytes'] / 1e9:.1f} GB on the GPU"
            found.add("program", got["paused_seconds"], group=group, name=f"live checkpoint {number + 1}")
            row(number + 1, f"{got['paused_seconds']:.3f}", f"{got['reading_seconds']:.3f}",
                f"{got['dumping_seconds']:.3f}", f"{got['seconds']:.1f}", f"{got['before']['seconds']:.2f}",
                f"{seen.before:.1f} / {seen.during:.1f}", seen.lost_text(), f"{seen.longest:.3f}",
                f"{got['gpu_bytes'] / 1e9:.2f}", f"{private_bytes(process.pid) / 1e6:.0f}")  # fmt: skip
            times.append([got[part] for part in ("paused_seconds", "reading_seconds", "dumping_seconds", "seconds")])
            shutil.rmtree(image)
    finally:
        end_program(process, watch)
    row("longest", *(f"{max(column):.3f}" for column in zip(*times)), *["-"] * 6)
    # Of all together: one checkpoint's rounds are a few steps only.
    if seconds:
        slowdown(found, group, lost / seconds, seconds)
    if options.native:
        process, watch = start_program(options, folder, native=True)
        try:
            time.sleep(options.seconds)
            seconds = native_seconds(options, folder, process.pid)
        finally:
            end_program(process, watch)
        found.add("native", seconds, group=group, name=NATIVE)
        row(NATIVE, f"{seconds:.3f}", *["-"] * 9)


def program_name(options):
    """The word that tells what options.program is: "python3 x.py" is x.py."""
    words = [word for word in shlex.split(options.program) if not word.startswith("-")]
    return words[1] if len(words) > 1 and os.path.basename(words[0]).startswith("python") else words[0]


NATIVE = "the driver's own (lock and checkpoint)"


def slowdown(found, group, lost, seconds):
    """Notes what part of its steps a job lost in the rounds, which took `seconds`."""
    found.add("slowdown", seconds, group=group, name="steps while rounds ran", value=lost)


def row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def group_of(mib):
    return f"{mib / 1024:.3g} GiB"


def checkpoint(options, folder, found, mib, percent):
    job = Job(options, folder, f"pause-{mib}-{percent}", mib, percent)
    image = os.path.join(folder, "image")
    room = options.leave_free is None
    try:
        job.wait_ready(60)
        with FullGpu(options):
            got, seen = measure(options, job, lambda: checkpoint_tool(options, job.name, image))
        before, behind = got.get("before", {}), got.get("behind", {})
        name = f"live checkpoint, {percent}% changing" + ("" if room else f", {options.leave_free} MiB free")
        found.add("checkpoint", got["paused_seconds"], group=group_of(mib), name=name, mib=mib, percent=percent, room=room,
                  beside=got["dumping_seconds"])  # fmt: skip
        row(mib, f"{percent}%", "checkpoint", f"{got['paused_seconds']:.3f}", f"{got['reading_seconds']:.3f}",
            f"{got['dumping_seconds']:.3f}", f"{before.get('seconds', 0):.2f}", before.get("rounds", "-"),
            f"{before.get('copied_bytes', 0) / 1e9:.2f}", f"{before.get('kept_bytes', 0) / 1e9:.2f}",
            f"{behind.get('bytes', 0) / 1e9:.2f} in {behind.get('taking_seconds', 0):.3f} s",
            f"{got['seconds']:.1f}", f"{seen.before:.1f} / {seen.during:.1f}", seen.lost_text(), f"{seen.longest:.3f}")
        if seen.slowdown() is not None:
            slowdown(found, f"{group_of(mib)}, {name}", seen.slowdown(), seen.seconds)
    finally:
        job.end()
        shutil.rmtree(image, ignore_errors=True)


def at_once(options, folder, found, mib):
    job = Job(options, folder, f"pause-{mib}-at-once", mib, 0)
    image = os.path.join(folder, "image")
    try:
        job.wait_ready(60)
        got = checkpoint_tool(options, job.name, image)
        found.add("at once", got["paused_seconds"], group=group_of(mib), name="live checkpoint, at once", mib=mib, percent=0)
        row(mib, "0%", f"checkpoint at once, {got['prepared_bytes'] / 1e9:.2f} GB prepared", f"{got['paused_seconds']:.3f}",
            f"{got['reading_seconds']:.3f}", f"{got['dumping_seconds']:.3f}", *["-"] * 5, f"{got['seconds']:.1f}", "-", "-", "-")
        if got["prepared_bytes"] == 0:
            raise RuntimeError("the checkpoint prepared no host memory")
    finally:
        job.end()
        shutil.rmtree(image, ignore_errors=True)


def move(options, folder, found, mib, percent, to, what):
    job = Job(options, folder, f"move-{mib}-{percent}-{what.replace(' ', '-')}", mib, percent)
    try:
        job.wait_ready(60)
        got, seen = measure(
            options, job, lambda: tool(options, options.limit, "cr-migrate", "--json", job.name, "--to", *to))
        before, name = got["before"], f"{what}, {percent}% changing"
        found.add(what, got["paused_seconds"], group=group_of(mib), name=name, mib=mib, percent=percent)
        row(mib, f"{percent}%", what, f"{got['paused_seconds']:.3f}",
            f"{got['copying_seconds']:.3f} for {got['copied_bytes'] / 1e9:.2f} GB",
            f"{got['handing_over_seconds']:.3f} + {got['replaying_seconds']:.3f}", f"{got['ahead_seconds']:.2f}", before["rounds"],
            f"{before['copied_bytes'] / 1e9:.2f}", f"{before['kept_bytes'] / 1e9:.2f}",
            f"{got['handed_over_bytes'] / 1e9:.2f} + {got['direct_bytes'] / 1e9:.2f}", f"{got['seconds']:.1f}",
            f"{seen.before:.1f} / {seen.during:.1f}", seen.lost_text(), f"{seen.longest:.3f}")
        if before["rounds"] and seen.slowdown() is not None:
            slowdown(found, f"{group_of(mib)}, {name}", seen.slowdown(), seen.seconds)
    finally:
        job.end()


def native_seconds(options, folder, pid):
    """How long the driver's own checkpoint of that process takes."""
    flag = os.path.join(folder, "flag")
    open(flag, "w").close()
    done = subprocess.run([os.path.join(options.programs, "native_checkpoint"), str(pid), flag, "true"],
                          capture_output=True, text=True, timeout=options.limit)  # fmt: skip
    got = json.loads(done.stdout)
    if "error" in got:
        raise RuntimeError(got["error"])
    return got["checkpoint_s"]


def native(options, folder, found, mib, percent):
    job = Job(options, folder, f"native-{mib}-{percent}", mib, percent, native=True)
    try:
        job.wait_ready(60)
        seconds = native_seconds(options, folder, job.process.pid)
        found.add("native", seconds, group=group_of(mib), name=NATIVE, mib=mib)
        row(mib, "any", "native", f"{seconds:.3f}", *["-"] * 11)
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
    parser.add_argument("--programs", help="folder of pause_job, native_checkpoint and hold_gpu")
    parser.add_argument("--program", help="command of a program to checkpoint, instead of pause_job")
    parser.add_argument("--checkpoints", type=int, default=6, help="how many, with --program")
    parser.add_argument("--mib", default="8192,32768", help="GPU memory of the jobs")
    parser.add_argument("--changing", default="5,100", help="percent of it that is rewritten in each step")
    parser.add_argument("--at-once", action="store_true", help="checkpoints right after the jobs have their memory, in place of others")
    parser.add_argument("--moves", action="store_true", help="moves to a second server, too")
    parser.add_argument("--far", action="store_true", help="moves to a server through gRPC over loopback, too")
    parser.add_argument("--no-checkpoints", action="store_true", help="moves only")
    parser.add_argument("--second-gpu", type=int, help="moves to this GPU, too")
    parser.add_argument("--native", action="store_true", help="the driver's own checkpoint, too")
    parser.add_argument("--seconds", type=float, default=4, help="how long a job runs before it is disturbed")
    parser.add_argument("--step-ms", type=int, default=20, help="milliseconds from one step of a job to the next (%(default)s)")
    parser.add_argument("--leave-free", type=int, metavar="MIB",
                        help="another program takes all memory of the GPU but this before each checkpoint")
    parser.add_argument("--checkpoint-option", action="append", default=[], metavar="OPTION", help="one more for cr-checkpoint")
    parser.add_argument("--json", help="file for the pauses; pause_plot.py draws them")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a checkpoint or a move (%(default)s)")
    options = parser.parse_args()
    if not options.programs and (not options.program or options.native):
        parser.error("--programs is needed")
    found = timings.Timings("How long a job stands still, in seconds")
    folder = tempfile.mkdtemp(prefix="cr-pause-", dir=os.environ.get("CR_PAUSE_DIR"))
    servers, far = [], None
    if options.program:
        os.mkdir(os.path.join(folder, "server"), 0o700)
        server = Server(options, os.path.join(folder, "server"), None)
        options.server = server.unix
        row("checkpoint", "pause s", "of it GPU", "of it process", "all s", "before s", "steps/s before / during",
            "lost s", "seen by the job s", "GPU GB", "process MB")
        row(*["---"] * 11)
        failed = 0
        try:
            program(options, folder, found)
        except (RuntimeError, subprocess.TimeoutExpired, ValueError) as error:
            failed += 1
            log(f"{options.program}: {error}")
        finally:
            server.end()
            shutil.rmtree(folder, ignore_errors=True)
        found.finish(options.json)
        return 1 if failed else 0
    row("MiB", "changing", "what", "pause s", "of it GPU", "of it process, or handing over + replay", "before s", "rounds", "copied GB",
        "still right GB", "handed over + copied without the host GB", "all s", "steps/s before / during", "lost s", "seen by the job s")
    row(*["---"] * 15)
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
            percents = [int(percent) for percent in options.changing.split(",")]
            for percent in percents:
                if options.at_once:
                    work = [lambda: at_once(options, folder, found, mib)] if percent == percents[0] else []
                else:
                    work = [] if options.no_checkpoints else [lambda: checkpoint(options, folder, found, mib, percent)]
                if len(servers) > 1:
                    work.append(lambda: move(options, folder, found, mib, percent, [servers[1].unix], "move, same GPU"))
                if len(servers) > 2:
                    work.append(lambda: move(options, folder, found, mib, percent, [servers[2].unix], "move, second GPU"))
                if far:
                    work.append(lambda: move(options, folder, found, mib, percent, [far.tcp], "move, gRPC over loopback"))
                if options.native and percent == percents[0]:
                    work.append(lambda: native(options, folder, found, mib, percent))
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
    found.finish(options.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
