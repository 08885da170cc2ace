#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bad input and broken machines, end to end: each gives a clear error, harms nothing else, and loses nothing committed.

Usage: faults.py --product DIR --apps DIR --programs DIR [--driver LIB] [--only CASE,...] [--keep] [--logs FILE]

  --programs   a folder with the programs of this folder (forker, million, guest), searched recursively
  --only       cases by name; default: all. `faults.py --list` prints them.

Exit code: 0 all passed, 1 some failed, 2 wrong use.
"""

import argparse
import contextlib
import difflib
import fcntl
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../matrix"), os.path.join(os.path.dirname(os.path.realpath(__file__)), "../matrix")]
import harness  # noqa: E402
from harness import Failure, wait_for  # noqa: E402

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Context:
    """The lab of one case and shorthands."""

    def __init__(self, lab, options):
        self.lab = lab
        self.options = options

    def app(self, name="globals", steps=40):
        path = harness.find(self.options.apps, name)
        if path is None:
            raise Failure(f"the program {name} is not in {self.options.apps}")
        return [os.path.abspath(path), "--steps", str(steps)]

    def program(self, name):
        path = harness.find(self.options.programs, name)
        if path is None:
            raise Failure(f"the program {name} is not in {self.options.programs}")
        return os.path.abspath(path)

    def path(self, name):
        return os.path.join(self.lab.folder, name)

    def expected(self, command):
        if not hasattr(self, "_expected"):
            self._expected = {}
        key = tuple(command)
        if key not in self._expected:
            self._expected[key] = self.lab.native(f"native{len(self._expected)}", command)
        return self._expected[key]

    def check_works(self, server, name="afterwards"):
        """A fresh job on `server` gives the right result."""
        command = self.app()
        job = self.lab.job(name, command, server.unix)
        job.expect_success(60)
        harness.same(name, job.stdout(), self.expected(command))

    def stopped_image(self, command=None, step=10, name="image"):
        """A job stopped at a checkpoint: the job, and the image's folder."""
        command = command or self.app()
        server = self.lab.server("first")
        job = self.lab.job("job", command, server.unix, pause_at=[step])
        image = self.stopped_at(job, step, name)
        server.end()
        return job, image

    def stopped_at(self, job, step, name="image", limit=60):
        """Saves a job that pauses at this step, and ends it. Restarted, it goes on at once. Returns the image."""
        job.wait_paused(step, limit)
        image = self.path(name)
        self.lab.run("checkpoint-" + name, [self.lab.tool("cr-checkpoint"), "--stop", job.id, image])
        job.wait(30)
        job.go(step)
        return image

    def restart(self, image, server, name="restart", address=None):
        """Restarts the image on `server`, at `address` if that is another one of the server's."""
        command = [self.lab.tool("cr-restart"), image, "--server", address or server.unix]
        return self.lab.start(harness.Process(self.lab, name, command))


def names_below(process):
    """The names of the processes that it has started, and theirs."""
    names = set()
    for pid in harness.descendants(process.pid):
        try:
            with open(f"/proc/{pid}/comm") as f:
                names.add(f.read().strip())
        except OSError:
            pass
    return names


def must_fail(process, limit=60, mention=None):
    """The process ends with an error that says something, and does not crash."""
    code = process.wait(limit)
    text = process.stderr()
    if code == 0:
        raise Failure(f"{process.name} succeeded, though it must not\n{process.describe()}")
    if code < 0:
        raise Failure(f"{process.name} was killed by signal {-code}\n{process.describe()}")
    if not text.strip():
        raise Failure(f"{process.name} failed without a word\n{process.describe()}")
    if mention and not re.search(mention, text, re.I):
        raise Failure(f"{process.name} failed, but its message does not match {mention!r}\n{process.describe()}")
    return text


def files_of(image):
    found = []
    for folder, _, leaves in os.walk(image):
        found += [os.path.join(folder, leaf) for leaf in leaves]
    return sorted(path for path in found if os.path.getsize(path) > 0 and not os.path.islink(path))


@case
def damaged_image(context):
    """Flipped bits, truncation and absence, for every file of an image; the undamaged image still works afterwards."""
    lab = context.lab
    command = context.app()
    job, image = context.stopped_image(command)
    steps = job.steps()
    expected = context.expected(command)
    server = lab.server("second")
    verify = lambda name: lab.start(harness.Process(lab, name, [lab.tool("cr-inspect"), "--verify", image]))
    verify("verify-good").expect_success(60)
    pick = random.Random(1)
    restarts = 0
    for number, path in enumerate(files_of(image)):
        with open(path, "rb") as f:
            good = f.read()
        for kind in ("flip", "truncate", "longer", "missing"):
            if kind == "flip":
                bad = bytearray(good)
                for position in {0, len(bad) - 1, pick.randrange(len(bad))} if len(bad) < 64 else {pick.randrange(len(bad))}:
                    bad[position] ^= 1 << pick.randrange(8)
            elif kind == "truncate":
                bad = good[: len(good) // 2]
            elif kind == "longer":
                bad = good + b"\0"
            if kind == "missing":
                os.rename(path, path + ".away")
                shutil.move(path + ".away", context.path("away"))
            else:
                with open(path, "wb") as f:
                    f.write(bad)
            what = f"{os.path.relpath(path, image)}-{kind}".replace("/", "_")
            try:
                must_fail(verify(f"verify-{what}"))
                # cr-restart does the same verification; it is slower, so not for every kind.
                if kind == "flip" or number == 0:
                    restarts += 1
                    must_fail(context.restart(image, server, f"restart-{what}"))
                    if job.steps() != steps:
                        raise Failure("the process ran, although the restart failed")
            except Failure as failure:
                raise Failure(f"{os.path.relpath(path, image)}, {kind}: {failure}")
            finally:
                if kind == "missing":
                    shutil.move(context.path("away"), path)
                else:
                    with open(path, "wb") as f:
                        f.write(good)
    if restarts < 3:
        raise Failure(f"only {restarts} damaged images were tried: {files_of(image)}")
    # Every one of those failures can be tried again with the good image.
    context.restart(image, server, "restart-good").expect_success(60)
    harness.same("restarted after failed restarts", job.stdout(), expected)


@case
def restart_retry(context):
    """A restart that fails because there is no server, or because it is stopped half way, can be tried again."""
    lab = context.lab
    command = context.app(steps=40)
    job, image = context.stopped_image(command)
    nowhere = ["--server", "unix:" + context.path("nowhere.sock")]
    must_fail(lab.start(harness.Process(lab, "nowhere", [lab.tool("cr-restart"), image] + nowhere)), mention="nowhere.sock")
    # CRIU had begun by then.
    if os.path.exists(job.directory):
        raise Failure(f"the failed restart left {os.listdir(job.directory)} in the job's folder")
    server = lab.server("second")
    for number in range(4):
        attempt = context.restart(image, server, f"killed{number}")
        time.sleep(0.02 + 0.06 * number)
        below = harness.descendants(attempt.pid)
        attempt.kill()
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        attempt.wait(10)
        time.sleep(0.2)
        os.truncate(job.out, 0)
    context.restart(image, server, "restart").expect_success(60)
    harness.same("restarted after failed restarts", job.stdout(), context.expected(command))


@case
def ends_in_restart(context):
    """A job that ends by itself as soon as it is restored: its exit code is the restart's, whenever it ended."""
    lab = context.lab
    for name, arguments in (("at_once", []), ("after_a_call", ["--call"])):
        server = lab.server(f"server_{name}")
        job = lab.job(f"job_{name}", [context.program("leaver")] + arguments, server.unix, pause_at=[1])
        image = context.stopped_at(job, 1, f"image_{name}")
        for number in range(4):
            attempt = context.restart(image, server, f"restart_{name}{number}")
            if attempt.wait(60) != 7:
                raise Failure(f"the job's exit code was lost\n{attempt.describe()}")
        server.end()


@case
def no_image(context):
    """Things that are no image."""
    lab = context.lab
    server = lab.server()
    os.makedirs(context.path("empty"))
    with open(context.path("a-file"), "w") as f:
        f.write("nothing")
    for name in ("does-not-exist", "empty", "a-file"):
        must_fail(context.restart(context.path(name), server, f"restart-{name}"), mention=name)
        inspect = [lab.tool("cr-inspect"), context.path(name)]
        must_fail(lab.start(harness.Process(lab, f"inspect-{name}", inspect)), mention=name)
    must_fail(lab.start(harness.Process(lab, "checkpoint", [lab.tool("cr-checkpoint"), "no-such-job", context.path("x")])))
    must_fail(lab.start(harness.Process(lab, "migrate", [lab.tool("cr-migrate"), "no-such-job", "--to", server.unix])))


# Reads the second half of a file after a checkpoint, and shares memory with a child by a named file.
NAMES = """
import mmap, os, sys, time
data, shared, flag = sys.argv[1:4]
with open(shared, "wb") as file:
    file.write(bytes(4096))
with open(shared, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 4096)
file = open(data)
read = file.readline()
if os.fork() == 0:
    while not os.path.exists(flag):
        time.sleep(0.02)
    memory[0:4] = b"five"
    os._exit(0)
open(flag + ".ready", "w").close()
os.wait()
print(read + file.read() + memory[0:4].decode(), flush=True)
"""


@case
def names(context):
    """Files whose names are not UTF-8: those that the job has open, shares memory by and writes its output to, and the image."""
    lab = context.lab
    server = lab.server()
    data, out, shared, image = (context.path(name) for name in ("d\udce9ta", "\udce9.out", "sh\udcffred", "im\udce9ge"))
    flag, directory = context.path("flag"), context.path("job.job")
    with open(data, "w") as file:
        file.write("one\ntwo\n")
    program = [sys.executable, "-c", NAMES, data, shared, flag]
    run = [lab.tool("cr-run"), *lab.run_options, "--server", server.unix, "--", *program]
    redirected = ["sh", "-c", 'out=$1; shift; exec "$@" > "$out"', "sh", out, *run]
    job = lab.start(harness.Process(lab, "job", redirected, {"CUDA_REMOTE_JOB_DIR": directory}))
    wait_for(lambda: os.path.exists(flag + ".ready") or not job.running(), 60, job.describe)
    lab.run("checkpoint", [lab.tool("cr-checkpoint"), "--stop", directory, image])
    job.wait(30)
    lab.run("verify", [lab.tool("cr-inspect"), "--verify", image])
    os.unlink(shared)
    open(flag, "w").close()
    context.restart(image, server).expect_success(60)
    with open(out) as file:
        if (found := file.read()) != "one\ntwo\nfive\n":
            raise Failure(f"the restarted job wrote {found!r}")


@case
def full_disk(context):
    """A checkpoint onto a full disk fails with a clear message and leaves no image; the job continues."""
    lab = context.lab
    command = context.app("stencil", 40)
    server = lab.server()
    job = lab.job("job", command, server.unix, pause_at=[10])
    job.wait_paused(10, 60)
    small = context.path("small")
    os.makedirs(small)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode != 0:
        raise Failure(f"this test mounts a small tmpfs and needs root: {mounted.stderr}")
    try:
        for stop in ([], ["--stop"]):
            checkpoint = [lab.tool("cr-checkpoint"), *stop, job.id, os.path.join(small, "image")]
            # It names the image, what that needs, and what is free, and no path of the tool's own.
            told = rf"(?s)^(?!.*/proc/self/fd)(?=.*No space left)(?=.*The image {small}/image needs up to \d.*, and {small} has \d.* free)"
            must_fail(lab.start(harness.Process(lab, f"checkpoint{len(stop)}", checkpoint)), mention=told)
            # CRIU's log of a failure stays, for whoever wants to know more.
            if set(os.listdir(small)) - {"image.criu-dump.log"}:
                raise Failure(f"left behind on the full disk: {os.listdir(small)}")
            if not job.running():
                raise Failure(f"the job did not survive the failed checkpoint\n{job.describe()}")
    finally:
        subprocess.run(["umount", "-l", small])
    image = context.path("image")
    lab.run("checkpoint-good", [lab.tool("cr-checkpoint"), job.id, image])
    job.go(10)
    job.expect_success(60)
    harness.same("after failed checkpoints", job.stdout(), context.expected(command))


@case
def checkpoint_killed(context):
    """cr-checkpoint killed at any moment: the job continues, and there is a whole image or none."""
    lab = context.lab
    command = context.app("memory", 24)
    expected = context.expected(command)
    server = lab.server()
    job = lab.job("job", command, server.unix, step_ms=150)
    job.wait_steps(2, 60)
    for number in range(5):
        image = context.path(f"image{number}")
        tool = lab.start(harness.Process(lab, f"checkpoint{number}", [lab.tool("cr-checkpoint"), job.id, image]))
        time.sleep(0.01 + 0.05 * number)
        below = harness.descendants(tool.pid)
        tool.kill()
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        tool.wait(10)
        if os.path.exists(image):
            lab.run(f"verify{number}", [lab.tool("cr-inspect"), "--verify", image])
        if not job.running():
            if job.child.returncode == 0:
                break
            raise Failure(f"the job did not survive the killed checkpoint\n{job.describe()}")
        steps = len(job.steps())
        wait_for(
            lambda: len(job.steps()) > steps or not job.running(),
            20,
            lambda: f"the job stands still after cr-checkpoint was killed\n{job.describe()}",
        )
    job.expect_success(60)
    harness.same("after killed checkpoints", job.stdout(), expected)


def listed(context, store, name):
    """What cr-inspect says of a store, which must be all that is there."""
    run = context.lab.run(name, [context.lab.tool("cr-inspect"), "--json", "--verify", store])
    told = json.loads(run.stdout())
    # Small files take whole blocks.
    files = sum(len(leaves) for _, _, leaves in os.walk(store))
    if harness.disk_bytes(store) > told["total_bytes"] + 8192 * files:
        raise Failure(f"{store} takes {harness.disk_bytes(store)} bytes, and its images need {told['total_bytes']}")
    names = [os.path.basename(image["image"]) for image in told["images"]]
    if sorted(os.listdir(store)) != [*names, "lock"]:
        raise Failure(f"{store} holds {sorted(os.listdir(store))}, and the images are {names}")
    return told["images"]


@case
def store(context):
    """cr-checkpoint --keep: the last images stay and share, each restarts, and two tools do not meet."""
    lab = context.lab
    command = context.app("stencil", 8) + ["--size", "2048"]
    expected = context.expected(command)
    server = lab.server()
    job = lab.job("job", command, server.unix, pause_at=[2, 3, 4, 5])
    store = context.path("store")
    checkpoint = [lab.tool("cr-checkpoint"), "--json", "--keep", "3"]
    for step in (2, 3, 4, 5):
        job.wait_paused(step, 60)
        told = json.loads(lab.run(f"checkpoint{step}", checkpoint + [job.id, store]).stdout())
        if told["image"] != f"{store}/image-00000{step - 1}":
            raise Failure(f"the image has another name: {told['image']}")
        if step < 5:
            job.go(step)
    images = listed(context, store, "list")
    if [os.path.basename(image["image"]) for image in images] != [f"image-00000{n}" for n in (2, 3, 4)]:
        raise Failure(f"not the last three images: {images}")
    # Nothing has changed since.
    same = json.loads(lab.run("same", checkpoint + [job.id, store]).stdout())
    if not 0 < same["linked_bytes"] <= same["total_bytes"] - same["client_bytes"]:
        raise Failure(f"an image of the same memory shares nothing: {same}")
    if same["unread_bytes"] < 0.9 * same["gpu_bytes"]:
        raise Failure(f"memory that an earlier image has was read again: {same}")
    own = listed(context, store, "list-same")[-1]
    if own["own_bytes"] > same["total_bytes"] - same["linked_bytes"]:
        raise Failure(f"an image of the same memory takes space for it: {own}, {same}")
    # Two tools, and an interval.
    other = lab.job("other", command, server.unix, pause_at=[2])
    other.wait_paused(2, 60)
    # Two processes with the same GPU memory take the space of one.
    twins = lab.job("twins", ["sh", "-c", f"{' '.join(command)} & {' '.join(command)}; wait"], server.unix, pause_at=[2])
    wait_for(lambda: twins.steps().count("paused 2") == 2, 60, twins.describe)

    def stored(name, one):
        told = json.loads(lab.run(name, [lab.tool("cr-checkpoint"), "--json", "--compress", "0", one.id, context.path(name)]).stdout())
        return told["gpu_bytes"], told["total_bytes"] - told["client_bytes"]

    (one_bytes, one), (two_bytes, two) = stored("of-one", other), stored("of-two", twins)
    if two_bytes != 2 * one_bytes or not 0.4 * one_bytes < one <= two < 1.2 * one:
        raise Failure(f"{one_bytes} bytes of one process take {one}, {two_bytes} of two take {two}")
    twins.end()
    tools = [
        lab.start(harness.Process(lab, f"tool{n}", [lab.tool("cr-checkpoint"), "--every", "0.1s", "--keep", "2", one.id, store]))
        for n, one in enumerate((job, other))
    ]
    # A failed attempt names the last image, too.
    saved = lambda tool: len(re.findall(r"/store/image-\d+ in ", tool.stderr()))
    wait_for(lambda: all(saved(tool) >= 3 for tool in tools), 120, lambda: "\n".join(tool.describe() for tool in tools))
    for tool in tools:
        os.kill(tool.pid, signal.SIGINT)
    for tool in tools:
        if tool.wait(60) != 3:
            raise Failure(f"interrupted, it must end with 3\n{tool.describe()}")
    images = listed(context, store, "list-two")
    jobs = [image["job_folder"] for image in images]
    if len(jobs) != 4 or jobs.count(jobs[0]) != 2:
        raise Failure(f"not the last two images of each job: {images}")
    of_job = [image["image"] for image in images if image["job_folder"] == own["job_folder"]]
    other.go(2)
    other.expect_success(60)
    harness.same("beside another tool", other.stdout(), expected)
    # A certain image, the newest, and one that was copied out.
    lab.run("stop", [lab.tool("cr-checkpoint"), "--stop", "--keep", "5", job.id, store])
    job.wait(30)
    size = os.path.getsize(job.out)
    lab.run("export", [lab.tool("cr-inspect"), "--export", store, context.path("exported")])
    for step in (2, 3, 4, 5):
        job.go(step)
    for name, image in (("newest", store), ("certain", of_job[0]), ("copied", context.path("exported"))):
        os.truncate(job.out, size)
        again = context.restart(image, server, name)
        again.expect_success(60)
        harness.same(name, job.stdout(), expected)


@case
def store_killed(context):
    """cr-checkpoint --keep, killed at each thing that it does to files, or with a full disk at each write, loses and leaks nothing."""
    lab = context.lab
    command = context.app("globals", 400)
    server = lab.server()
    job = lab.job("job", command, server.unix, pause_at=range(1, 400))
    step = 1
    store = context.path("store")
    log = context.path("what")
    checkpoint = [lab.tool("cr-checkpoint"), "--keep", "2", job.id, store]
    preload = context.program("libdying.so")

    def attempt(name, way, at):
        if os.path.exists(log):
            os.unlink(log)
        env = {"LD_PRELOAD": preload, "DYING_UNDER": store, "DYING_WAY": way, "DYING_AT": str(at), "DYING_LOG": log}
        tool = lab.start(harness.Process(lab, name, checkpoint, env))
        code = tool.wait(60)
        with open(log) as lines:
            return tool, code, lines.read().splitlines()

    def go_on():
        # Other memory for the next image. The job has its session, whenever the tool was killed.
        nonlocal step
        job.go(step)
        step += 1
        job.wait_paused(step, 60)

    job.wait_paused(step, 60)
    for name in ("first", "second"):
        lab.run(name, checkpoint)
        go_on()
    newest = lambda: sorted(name for name in os.listdir(store) if name[6:].isdigit())[-1]
    seen, finished, at = {}, False, 0
    while not finished:
        at += 1
        before = newest()
        tool, code, what = attempt(f"killed{at}", "kill", at)
        finished = code == 0
        if not finished:
            text = tool.stderr()
            # Other threads, which take memory from CRIU, may have got on by a few before the end.
            if len(what) < at or "has died" not in text:
                raise Failure(f"it was to be killed at number {at}, and did {what}\n{tool.describe()}")
            seen[what[at - 1].split()[0]] = what[at - 1]
        lab.run(f"verify{at}", [lab.tool("cr-inspect"), "--verify", f"{store}/{newest()}"])
        if newest() < before:
            raise Failure(f"killed at {what[-1]}: the newest image was {before}, and is {newest()}")
        # Whether the job still has its session.
        go_on()
    if at < 30 or not {"write", "create", "mkdir", "link", "remove", "rename", "fsync"} <= set(seen):
        raise Failure(f"killed only {at} times, at {seen}")
    if len(listed(context, store, "after-kills")) != 2:
        raise Failure(f"not two images after {at} killed checkpoints: {os.listdir(store)}")
    finished, at = False, 0
    while not finished:
        at += 1
        before = sorted(os.listdir(store))
        tool, code, what = attempt(f"full{at}", "full", at)
        finished = code == 0
        if not finished and (code != 1 or "No space left" not in tool.stderr()):
            raise Failure(f"a full disk at write {at} is not told\n{tool.describe()}")
        if not finished and sorted(os.listdir(store)) != before:
            raise Failure(f"a full disk at write {at} leaves {os.listdir(store)} instead of {before}")
        listed(context, store, f"after-full{at}")
        go_on()
    if at < 4:
        raise Failure(f"only {at} writes")
    # And the newest image restarts.
    lab.run("stop", checkpoint[:1] + ["--stop"] + checkpoint[1:])
    job.wait(30)
    again = context.restart(store, server)
    for number in range(1, 400):
        job.go(number)
    again.expect_success(120)
    harness.same("after all that", job.stdout(), context.expected(command))


@case
def memory_pool(context):
    """GPU memory that fits into the pool of a checkpoint is waited for; more than fits goes through it; both images are right."""
    lab = context.lab
    command = context.app("stencil", 6) + ["--size", "1600"]
    server = lab.server()
    job = lab.job("job", command, server.unix, pause_at=[3])
    job.wait_paused(3, 60)

    # One image has a name that would end a JSON string, or be no text at all, if it were printed as it is.
    images = {"large": context.path('large "image"\\,\n\udcff'), "small": context.path("small"), "stopped": context.path("stopped")}

    def checkpoint(name, *options):
        run = lab.run(name, [lab.tool("cr-checkpoint"), "--json", *options, job.id, images[name]])
        lab.run(f"verify-{name}", [lab.tool("cr-inspect"), "--verify", images[name]])
        told = json.loads(run.stdout())
        if told["image"] != images[name].replace("\udcff", "\xff"):
            raise Failure(f"cr-checkpoint --json names another image than {images[name]!r}: {told}")
        shown = json.loads(lab.run(f"inspect-{name}", [lab.tool("cr-inspect"), "--json", images[name]]).stdout())
        if shown["image"] != told["image"]:
            raise Failure(f"cr-inspect --json names another image than {images[name]!r}: {shown['image']!r}")
        return told

    large = checkpoint("large")
    small = checkpoint("small", "--pool", "1")
    if not large["prepared_bytes"] >= large["gpu_bytes"] > 16 << 20:
        raise Failure(f"not all memory was ready before the pause: {large}")
    if not small["prepared_bytes"] <= 16 << 20 < small["gpu_bytes"]:
        raise Failure(f"the pool took more than it was allowed: {small}")
    size = os.path.getsize(job.out)
    checkpoint("stopped", "--stop", "--pool", "1")
    job.wait(30)
    job.go(3)
    expected = context.expected(command)
    for name in ("stopped", "large", "small"):
        os.truncate(job.out, size)
        context.restart(images[name], server, f"restart-{name}").expect_success(60)
        harness.same(f"restarted from {name}", job.stdout(), expected)


# Runs a command and writes how much memory it had at most, in bytes, to a file.
MOST_MEMORY = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10))
sys.exit(code)
"""

# A process with MIB of memory that is its own, a third of it zeros, and a file that it has read through a mapping. When
# the file FLAG is there, it compares all.
HOLDER = """
import mmap, os, sys, time
mib, path, flag = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(path, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
seen = sum(mapped[::4096])
third = mib // 3 << 20
words, zeros, more = b"w" * third, b"\\0" * third, b"m" * third
with open(flag + ".ready", "w"):
    pass
while not os.path.exists(flag):
    time.sleep(0.02)
same = words.count(b"w") == more.count(b"m") == third and zeros.count(0) == third and sum(mapped[::4096]) == seen
print("same" if same else "different", flush=True)
"""


@case
def process_memory(context):
    """A large process: the tool takes less than 1 GB besides its pool; zeros and mapped files take no space in the image."""
    lab = context.lab
    server = lab.server()
    mib, file_mib = 900, 200
    path, flag, image, most = (context.path(name) for name in ("file", "flag", "image", "most"))
    with open(path, "wb") as file:
        for _ in range(file_mib):
            file.write(os.urandom(1 << 20))
    job = lab.job("job", [sys.executable, "-c", HOLDER, str(mib), path, flag], server.unix)
    wait_for(lambda: os.path.exists(flag + ".ready") or not job.running(), 120, job.describe)
    pool = 64 << 20
    for name, options in (("live", []), ("stopped", ["--stop"])):
        tool = [lab.tool("cr-checkpoint"), "--json", "--pool", str(pool), *options, job.id, image]
        lab.run(name, [sys.executable, "-c", MOST_MEMORY, most, *tool])
        with open(most) as file:
            taken = int(file.read())
        if taken - pool >= 1000 << 20:
            raise Failure(f"cr-checkpoint took {taken >> 20} MiB with a pool of {pool >> 20} MiB")
        size = sum(os.stat(file).st_blocks * 512 for file in files_of(image)) >> 20
        if not 2 * mib // 3 <= size < 2 * mib // 3 + 50:
            raise Failure(f"the image of {mib} MiB, a third of it zeros, has {size} MiB")
    job.wait(30)
    open(flag, "w").close()
    restarted = context.restart(image, server)
    restarted.expect_success(120)
    if "same" not in job.stdout().decode() + restarted.stdout().decode():
        raise Failure(f"the restarted process has other memory\n{restarted.describe()}")


@case
def managed_once(context):
    """An image has managed memory once, whether the host or the GPU wrote it last, and brings it back."""
    lab = context.lab
    mib = 48
    command = [context.program("halves"), "--size", str(mib)]
    expected = context.expected(command)
    for way in ("ring", "grpc"):
        server = lab.server(f"server-{way}", listen=True)
        job = lab.job(f"job-{way}", command, server.unix if way == "ring" else server.tcp, pause_at=[6])
        image = context.stopped_at(job, 6, f"image-{way}")
        size = sum(os.stat(path).st_blocks * 512 for path in files_of(image)) >> 20
        # The program has as much ordinary memory: its model.
        if not 2 * mib <= size < 2.6 * mib:
            raise Failure(f"the image of {mib} MiB of managed memory and as much ordinary memory has {size} MiB")
        context.restart(image, server, f"restart-{way}").expect_success(60)
        harness.same(f"restarted {way}", job.stdout(), expected)


@case
def connections(context):
    """A job with a TCP connection to somebody else is saved with --tcp-close only; it goes on, and is without it after a restart."""
    lab = context.lab
    command = context.app("sockets", 12)
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen():
            while True:
                try:
                    peer = listener.accept()[0]
                except OSError:
                    return
                heard.append(0)
                while data := peer.recv(4096):
                    heard[-1] += len(data)
                peer.close()

        threading.Thread(target=listen, daemon=True).start()
        server = lab.server()
        port = listener.getsockname()[1]
        job = lab.job("job", command, server.unix, pause_at=[4], env={"CR_TEST_CONNECT": str(port)})
        job.wait_paused(4, 60)
        checkpoint = [lab.tool("cr-checkpoint"), job.id, context.path("image")]
        must_fail(lab.start(harness.Process(lab, "refused", checkpoint)), mention=f"-> 127.0.0.1:{port}; with --tcp-close")
        if os.path.exists(context.path("image")):
            raise Failure("the refused checkpoint left an image")
        lab.run("checkpoint", checkpoint + ["--tcp-close"])
        size = os.path.getsize(job.out)
        job.go(4)
        job.expect_success(60)
        expected = context.expected(command)
        harness.same("after the checkpoint", job.stdout(), expected)
        tell = lambda: f"{heard} bytes were heard, by connection"
        wait_for(lambda: heard == [12 * 4], 10, tell)
        os.truncate(job.out, size)
        context.restart(context.path("image"), server, "restart").expect_success(60)
        harness.same("restarted", job.stdout(), expected)
        wait_for(lambda: heard == [12 * 4, 9 * 4], 10, tell)


@case
def migrate_to_nowhere(context):
    """A migration that cannot work leaves the job where it is."""
    lab = context.lab
    command = context.app("pipeline", 30)
    server = lab.server()
    job = lab.job("job", command, server.unix, step_ms=60, pause_at=[29])
    job.wait_steps(3, 60)
    for to in ("unix:" + context.path("nowhere.sock"), "127.0.0.1:1"):
        tool = lab.start(harness.Process(lab, "migrate" + to[-1], [lab.tool("cr-migrate"), job.id, "--to", to]))
        must_fail(tool)
    if lab.software:
        # There the process, which has host functions, has its new session when it finds that it cannot have its pinned memory.
        lab.env["SOFTGPU_FAIL"] = "cuMemHostRegister_v2:0:2"
        pinless = lab.server("pinless")
        del lab.env["SOFTGPU_FAIL"]
        for number in range(3):
            tool = lab.start(harness.Process(lab, f"pinless{number}", [lab.tool("cr-migrate"), job.id, "--to", pinless.unix]))
            must_fail(tool, mention="did not take its new session.*the job continues where it was")
    job.hurry()
    job.go(29)
    job.expect_success(60)
    harness.same("after failed migrations", job.stdout(), context.expected(command))


def is_holding_up(context, modes):
    """Work that depends on the program's next calls: checkpoints and moves at random times get through, and change no answer."""
    lab = context.lab
    first, second = lab.server("first"), lab.server("second")
    pick = random.Random(len(modes))
    for mode in modes:
        command = [context.program("held"), mode, "--steps", "60"]
        expected = context.expected(command)
        job = lab.job(f"job_{mode}", command, first.unix, step_ms=30)
        job.wait_steps(1, 60)
        image = context.path(f"image_{mode}")
        saved = False
        for number in range(3):
            time.sleep(pick.random() * 0.2)
            tool = [lab.tool("cr-checkpoint"), "--timeout", "60", "--json", job.id, image]
            if number == 1:
                tool = [lab.tool("cr-migrate"), "--timeout", "60", job.id, "--to", second.unix]
            attempt = lab.start(harness.Process(lab, f"{mode}{number}", tool))
            code = attempt.wait(120)
            if code != 0 and "ended" in attempt.stderr():
                break  # the machine is slow
            if code != 0:
                raise Failure(f"{mode}: the tool failed\n{attempt.describe()}")
            saved = saved or (code == 0 and number != 1)
        job.expect_success(90)
        harness.same(mode, job.stdout(), expected)
        if not saved:
            raise Failure(f"{mode}: the job ended before its first checkpoint")
        # The image was made in the middle of a step, and the rest of it comes out as well.
        os.truncate(job.out, 0)
        context.restart(image, second, f"restart_{mode}").expect_success(90)
        harness.same(f"{mode}, restarted", job.stdout(), expected)


@case
def held_function(context):
    """A host function waits for the program's next calls: locks get through, and no answer changes."""
    is_holding_up(context, ("query", "work", "sync", "destroyed"))


@case
def held_value(context):
    """A stream waits for a value, a kernel polls memory: the same."""
    is_holding_up(context, ("value", "poll", "poll_copy"))


@case
def never_idle(context):
    """Work or a capture that does not end: the lock is undone at its deadline, says why, and the job continues and can be saved later."""
    lab = context.lab
    server, other = lab.server("first"), lab.server("second")
    for mode, why in (
        ("endless", "1 stream has work"),
        ("function", "a host function .* has been running for"),
        ("capture", "a stream is being captured into a graph"),
    ):
        command = [context.program("held"), mode, "--steps", "5"]
        job = lab.job(f"job_{mode}", command, server.unix, pause_at=[3])
        wait_for(lambda: "held 1" in job.steps() or not job.running(), 60, job.describe)
        image = context.path(f"image_{mode}")
        words = f"did not become idle in 1.0 s: .*{why}.*the job continues"
        tools = (
            [lab.tool("cr-checkpoint"), "--timeout", "1", job.id, image],
            [lab.tool("cr-migrate"), "--timeout", "1", job.id, "--to", other.unix],
        )
        for number, tool in enumerate(tools):
            must_fail(lab.start(harness.Process(lab, f"{mode}{number}", tool)), mention=words)
        if os.path.exists(image) or not job.running():
            raise Failure(f"{mode}: there is an image, or no job\n{job.describe()}")
        open(job.sync + ".end", "w").close()
        job.wait_paused(3, 60)
        lab.run(f"save_{mode}", [lab.tool("cr-checkpoint"), "--stop", job.id, image])
        job.wait(30)
        job.go(3)
        context.restart(image, other, f"restart_{mode}").expect_success(60)
        harness.same(mode, job.stdout(), context.expected(command))


@case
def lock_killed(context):
    """A tool that is killed while it waits for a lock leaves no trace: the job continues at once, and another tool finds it free."""
    lab = context.lab
    server = lab.server()
    command = [context.program("held"), "busy", "--steps", "1000"]
    job = lab.job("job", command, server.unix, step_ms=15)
    job.wait_steps(5, 60)
    for number in range(6):
        image = context.path(f"image{number}")
        tool = lab.start(harness.Process(lab, f"tool{number}", [lab.tool("cr-checkpoint"), job.id, image]))
        time.sleep(0.05 + 0.1 * number)
        # The one that the user has started, or the one that does the work, which is not below it.
        for pid in [tool.pid] if number % 2 == 0 else harness.processes_with(image):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        tool.wait(10)
        steps = len(job.steps())
        wait_for(
            lambda: len(job.steps()) > steps + 20 or not job.running(),
            20,
            lambda: f"the job stands still after the tool was killed\n{job.describe()}",
        )
        again = [lab.tool("cr-checkpoint"), "--timeout", "0.2", job.id, image]
        must_fail(lab.start(harness.Process(lab, f"again{number}", again)), mention="did not become idle in 0.2 s")
    open(job.sync + ".end", "w").close()
    job.expect_success(90)
    harness.same("after killed locks", job.stdout(), context.expected(command))


@case
def two_tools(context):
    """A tool that meets another one says which. One that is killed with the session loses nothing, also if its keeper is killed, too."""
    lab = context.lab
    server = lab.server()
    job = lab.job("job", context.app("reduce", 10000), server.unix, step_ms=20)
    job.wait_steps(2, 60)
    image = context.path("image")
    checkpoint = [lab.tool("cr-checkpoint"), job.id, image]
    lab.run("first", checkpoint)
    with open(os.path.join(job.directory, "tool.lock"), "w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.write("cr-something (PID 7)")
        held.flush()
        must_fail(lab.start(harness.Process(lab, "meets", checkpoint)), mention=r"cr-something \(PID 7\) is working on this job")
        move = [lab.tool("cr-migrate"), job.id, "--to", server.unix]
        must_fail(lab.start(harness.Process(lab, "meets-too", move)), mention=r"cr-something \(PID 7\) is working on this job")
        held.truncate(0)
    lab.run("free", checkpoint)
    # Killed once CRIU has begun, when the process has given its session to the tool; which may be done sooner.
    log = os.path.join(job.directory, "engine-dump.log")

    def kill_in_dump(name, with_keeper):
        if os.path.exists(log):
            os.unlink(log)
        again = context.path(name)
        tool = lab.start(harness.Process(lab, f"dies-{name}", [lab.tool("cr-checkpoint"), job.id, again]))
        while not os.path.exists(log) and tool.running():
            time.sleep(0.0005)
        # The process that was started passes on what the keeper of the one that works says.
        killed = [pid for pid in harness.processes_with(again) if with_keeper or pid != tool.pid]
        if with_keeper:
            killed = [child for pid in killed for child in harness.children_of(pid, "cr-keeper")] + killed
        for pid in killed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        after = lab.start(harness.Process(lab, f"after-{name}", checkpoint))
        tool.wait(60)
        return tool, after

    kept, words = 0, "has them again and continues"
    for number in range(10):
        tool, after = kill_in_dump(f"kept{number}", with_keeper=False)
        after.expect_success(60)
        steps = len(job.steps())
        wait_for(lambda: len(job.steps()) > steps or not job.running(), 60, job.describe)
        kept += words in tool.stderr()
    if not kept:
        raise Failure(f"no tool was killed while it had the session\n{tool.describe()}")
    # cr-run has the sessions, too.
    for number in range(20):
        tool, after = kill_in_dump(f"held{number}", with_keeper=True)
        after.expect_success(60)
        steps = len(job.steps())
        wait_for(lambda: len(job.steps()) > steps or not job.running(), 60, job.describe)
    if f"a tool and its cr-keeper were killed while they had the job's GPU sessions; the job {words}" not in job.stderr():
        raise Failure(f"no tool was killed with its keeper while they had the session\n{job.describe()}")
    job.kill(signal.SIGTERM)
    job.wait(60)
    steps = len(job.steps())
    os.truncate(job.out, 0)
    restarted = context.restart(image, server)
    wait_for(lambda: len(job.steps()) > steps or not restarted.running(), 60, restarted.describe)
    if not restarted.running():
        raise Failure(f"the image does not go on\n{restarted.describe()}")


class Piped:
    """A tool whose output, and one more descriptor, is a pipe, as in `tool 2>&1 | cat`."""

    def __init__(self, lab, command, env=None):
        self.command = command
        self.reader, writer = os.pipe()
        environment = {key: value for key, value in {**os.environ, **lab.env, **(env or {})}.items() if value is not None}
        self.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, pass_fds=[writer], env=environment, cwd=lab.folder,
            start_new_session=True,
        )  # fmt: skip
        os.close(writer)
        self.text = b""

    def read_to_end(self, limit):
        """What the tool printed, once nobody can print any more."""
        deadline = time.monotonic() + harness.patient(limit)
        while select.select([self.reader], [], [], max(0, deadline - time.monotonic()))[0]:
            part = os.read(self.reader, 65536)
            if not part:
                return self.text.decode(errors="replace")
            self.text += part
        raise Failure(f"{' '.join(self.command)}: no end of its output after {limit} s; it printed {self.text!r}")


@case
def piped_output(context):
    """What tools leave behind - a relay, cr-keeper, CRIU - keeps nobody waiting who reads their output to its end."""
    lab = context.lab
    here, there = lab.server("here"), lab.server("there", listen=True)
    command = context.app("reduce", 10000)
    job = lab.job("job", command, here.unix, step_ms=20)
    job.wait_steps(2, 60)
    move = Piped(lab, [lab.tool("cr-migrate"), job.id, "--to", there.tcp, "--json"])
    text = move.read_to_end(60)
    if move.child.wait(harness.patient(60)) != 0:
        raise Failure(f"cr-migrate failed: {text}")
    log = os.path.join(job.directory, "relay.log")
    if not harness.processes_with(os.path.join(job.directory, "relay.sock")) or not os.path.exists(log):
        raise Failure(f"the job does not use a relay that the tool left behind\n{job.describe()}")
    steps = len(job.steps())
    wait_for(lambda: len(job.steps()) > steps or not job.running(), 60, job.describe)

    # cr-keeper is stopped before the tool is killed, so it cannot end. CRIU may be done before that.
    image, log = context.path("image"), os.path.join(job.directory, "engine-dump.log")
    killed = False
    while not killed:
        tool = Piped(lab, [lab.tool("cr-checkpoint"), job.id, image])
        while not os.path.exists(log) and tool.child.poll() is None:
            time.sleep(0.0005)
        tools = harness.processes_with(image)
        keepers = [child for pid in tools for child in harness.children_of(pid, "cr-keeper")]
        try:
            for pid, number in [(pid, signal.SIGSTOP) for pid in keepers] + [(pid, signal.SIGKILL) for pid in tools]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            tool.read_to_end(60)
        finally:
            for pid in keepers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        killed = tool.child.wait(harness.patient(60)) < 0 and bool(keepers)
    steps = len(job.steps())
    wait_for(lambda: len(job.steps()) > steps or not job.running(), 60, job.describe)
    if not job.running():
        raise Failure(f"the job does not go on\n{job.describe()}")

    # A program without cr-run, whose relay is the library's.
    folder = context.path("library")
    os.makedirs(folder)
    os.symlink(os.path.realpath(lab.tool("libcuda-remote.so")), os.path.join(folder, "libcuda.so.1"))
    expected = context.expected(context.app()).decode()
    program = Piped(lab, context.app(), {"LD_LIBRARY_PATH": folder, "CUDA_REMOTE_SERVER": there.tcp})
    text = program.read_to_end(60)
    if program.child.wait(harness.patient(60)) != 0 or text != expected:
        raise Failure(f"the program printed {text!r} instead of {expected!r}")


@case
def several_processes(context):
    """A job with two CUDA processes is saved and moved as a whole, or not at all: who does not become idle is named."""
    lab = context.lab
    server, other = lab.server("first"), lab.server("second")
    held = context.program("held")
    both = f"{held} busy --steps 3 & {held} busy --steps 3; wait"
    job = lab.job("job", ["sh", "-c", both], server.unix)
    # Then the kernel of each runs, and does not end before the test says so.
    wait_for(lambda: job.steps().count("step 1") == 2, 60, lambda: f"not both are busy\n{job.describe()}")
    image = context.path("image")
    # On a busy machine a server may need some time for its answer.
    words = r"held \(PID \d+\) did not become idle in 3.0 s.*held \(PID \d+\) did not become idle"
    for number, tool in enumerate(
        ([lab.tool("cr-checkpoint"), job.id, image], [lab.tool("cr-migrate"), job.id, "--to", other.unix])
    ):
        tool = tool + ["--timeout", "3"]
        must_fail(lab.start(harness.Process(lab, f"refused{number}", tool)), mention=words + ".*the job continues")
    if os.path.exists(image) or len(sessions_of(lab, other)) != 0:
        raise Failure("one of the two was saved or moved")
    open(job.sync + ".end", "w").close()
    job.expect_success(60)

    # Of these, the output says what has become of each rank. The kernels of the second wait for each other.
    for app, ranks in (("host_barrier", 4), ("peer_spin", 3)):
        command = context.app(app, 150)
        job = lab.job(app, command, server.unix, step_ms=20)
        job.wait_steps(5, 60)
        lab.run(f"move-{app}", [lab.tool("cr-migrate"), job.id, "--to", other.unix])
        if len(sessions_of(lab, other)) != ranks or len(sessions_of(lab, server)) != 0:
            raise Failure(f"not all of the ranks have moved\n{job.describe()}")
        image = context.path(f"{app}.image")
        lab.run(f"save-{app}", [lab.tool("cr-checkpoint"), "--stop", job.id, image])
        job.wait(60)
        restarted = context.restart(image, server, f"restart-{app}")
        restarted.expect_success(90)
        harness.same(f"{app}, moved and restarted", job.stdout(), context.expected(command))


def sessions_of(lab, server):
    ps = lab.run(f"ps{time.monotonic_ns()}", [lab.tool("cr-ps"), "--json", "--server", server.unix]).stdout().decode()
    return re.findall(r'"worker_pid":\s*"?(\d+)', ps)


@case
def every(context):
    """cr-checkpoint --every goes on after a failure, keeps the last image, and its exit code says how it ended."""
    lab = context.lab
    command = context.app("stencil", 400)
    server = lab.server()
    job = lab.job("job", command, server.unix, step_ms=50)
    job.wait_steps(1, 60)
    small = context.path("small")
    os.makedirs(small)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode != 0:
        raise Failure(f"this test mounts a small tmpfs and needs root: {mounted.stderr}")
    image = os.path.join(small, "image")
    try:
        tool = [lab.tool("cr-checkpoint"), "--every", "0.3s", job.id, image]
        repeated = lab.start(harness.Process(lab, "every", tool))
        told = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: no checkpoint of .*; the job continues\. There is no image"
        wait_for(lambda: len(re.findall(told, repeated.stderr())) >= 2, 60, repeated.describe)
        subprocess.run(["mount", "-o", "remount,size=200m", small], check=True)
        wait_for(lambda: os.path.exists(image), 60, repeated.describe)
        lab.run("verify", [lab.tool("cr-inspect"), "--verify", image])
        # A tool that holds the job for a while.
        with open(os.path.join(job.directory, "tool.lock"), "w") as held:
            fcntl.lockf(held, fcntl.LOCK_EX)
            held.write("cr-something (PID 7)")
            held.flush()
            told = r"cr-something \(PID 7\) is working on this job.*; the job continues\. .*small/image is still the image of \d{4}-"
            wait_for(lambda: re.search(told, repeated.stderr()), 60, repeated.describe)
            lab.run("verify-again", [lab.tool("cr-inspect"), "--verify", image])
            held.truncate(0)
        count = repeated.stderr().count(": " + image + " in ")
        wait_for(lambda: repeated.stderr().count(": " + image + " in ") > count, 60, repeated.describe)
        os.kill(repeated.pid, signal.SIGINT)
        if repeated.wait(60) != 3 or not job.running():
            raise Failure(f"interrupted, with the job alive, it must end with 3\n{repeated.describe()}")
        last = lab.start(harness.Process(lab, "every-to-the-end", tool))
        job.expect_success(120)
        last.expect_success(60)
        harness.same("saved again and again", job.stdout(), context.expected(command))
    finally:
        subprocess.run(["umount", "-l", small])


@case
def older_gpu(context):
    """A GPU that cannot run the job's code is refused, and the module named, before anything is moved."""
    lab = context.lab
    if not lab.software:
        return  # a real GPU is what it is
    command = context.app("reduce", 30)
    job = lab.job("job", command, lab.server().unix, pause_at=[5])
    job.wait_paused(5, 60)
    image = context.path("image")
    lab.run("checkpoint", [lab.tool("cr-checkpoint"), job.id, image], 60)
    # nvcc's default code is for 7.5 and later.
    lab.env["SOFTGPU_CAPABILITY"] = "7.0"
    old = lab.server("old")
    del lab.env["SOFTGPU_CAPABILITY"]
    words = r"the job's module \w+ .*cannot run on the GPU there.*compute capability 7\.0"
    moved = lab.start(harness.Process(lab, "migrate", [lab.tool("cr-migrate"), job.id, "--to", old.unix]))
    must_fail(moved, mention=words + ".*the job continues where it was")
    inspected = lab.start(harness.Process(lab, "inspect", [lab.tool("cr-inspect"), "--can-run-on", "7.0", image]))
    if inspected.wait(60) != 3:
        raise Failure(f"cr-inspect --can-run-on does not say so\n{inspected.describe()}")
    job.go(5)
    job.expect_success(60)
    harness.same("after the refused migration", job.stdout(), context.expected(command))
    os.truncate(job.out, 0)
    refused = lab.start(harness.Process(lab, "restart", [lab.tool("cr-restart"), image, "--server", old.unix]))
    must_fail(refused, mention=words)
    fitting = lab.server("new")
    again = lab.start(harness.Process(lab, "again", [lab.tool("cr-restart"), image, "--server", fitting.unix]))
    again.expect_success(60)


def refuse_other_places(context, name, command, words):
    """The job `name` is neither moved nor restarted where code and heaps have other places; with `words` for the reason."""
    lab = context.lab
    # It waits meanwhile: the new server searches for the old places for seconds, and does so while the job runs.
    job = lab.job(name, command, lab.server(name + "-first").unix, pause_at=[5])
    job.wait_paused(5, 60)
    image = context.path(name + ".image")
    lab.run(name + "-checkpoint", [lab.tool("cr-checkpoint"), job.id, image], 60)
    lab.env["SOFTGPU_PLACES"] = "process"
    other = lab.server(name + "-other")
    del lab.env["SOFTGPU_PLACES"]
    moved = lab.start(harness.Process(lab, name + "-migrate", [lab.tool("cr-migrate"), job.id, "--to", other.unix]))
    must_fail(moved, mention=words + ".*the job continues where it was")
    job.go(5)
    job.expect_success(60)
    harness.same("after the refused migration", job.stdout(), context.expected(command))
    os.truncate(job.out, 0)
    must_fail(context.restart(image, other, name + "-restart"), mention=words)
    context.restart(image, lab.server(name + "-new"), name + "-again").expect_success(60)


@case
def elsewhere(context):
    """Functions, heaps and graphs that would lie elsewhere are noticed before the job continues, and the old side does."""
    if not context.lab.software:
        return  # a real GPU puts them where it does
    for app, words in (
        ("code_places", r"GPU memory at 0x\w+ holds the address of a GPU function that lies elsewhere on this server"),
        ("kernel_heap", r"the heap of the job's kernels lies at 0x\w+ on this server .*, but at 0x\w+ before"),
        (
            "graph_launchable",
            r"an executable graph that kernels may launch has the handle 0x\w+ on this server, but 0x\w+ before",
        ),
    ):
        refuse_other_places(context, app, context.app(app, 16), words)


@case
def other_places(context):
    """Functions that lie elsewhere, in three processes one after the other, are called by the tables that name them."""
    lab = context.lab
    if not lab.software:
        return  # a real GPU puts them where it does
    lab.env["SOFTGPU_PLACES"] = "process"
    command = context.app("code_tables", 300)
    # It runs while it is moved, and does not end before.
    job = lab.job("tables", command, lab.server("one").unix, step_ms=60, pause_at=[299])
    job.wait_steps(3, 60)
    images = []
    for number in range(3):
        lab.run(f"migrate{number}", [lab.tool("cr-migrate"), job.id, "--to", lab.server(f"to{number}").unix], 60)
        images.append(context.path(f"image{number}"))
        lab.run(f"checkpoint{number}", [lab.tool("cr-checkpoint"), job.id, images[-1]], 60)
    job.go(299)
    job.expect_success(60)
    harness.same("after three moves", job.stdout(), context.expected(command))
    for number, image in enumerate(images):
        os.truncate(job.out, 0)
        restart = [lab.tool("cr-restart"), image, "--server", lab.server(f"again{number}").unix]
        again = lab.start(harness.Process(lab, f"restart{number}", restart))
        again.expect_success(60)
        harness.same("after a restart", job.stdout().splitlines()[-1:], context.expected(command).splitlines()[-1:])


@case
def kept_addresses(context):
    """A copy of such an address in GPU memory or in the program's own is found, and the job continues where it was."""
    lab = context.lab
    if not lab.software:
        return
    own = r"the program's own memory at 0x\w+"
    for kept, words in (("device", r"GPU memory at 0x\w+"), ("host", own), ("packed", own)):
        words += " holds the address of a GPU function that lies elsewhere on this server than before"
        lab.env["APP_COPY"] = kept
        refuse_other_places(context, kept, context.app("code_tables", 16), words)


@case
def behind_streams(context):
    """Variables whose place follows from the streams made before: a move, which loads modules ahead of all else, starts once more."""
    lab = context.lab
    lab.env["SOFTGPU_PLACES"] = "streams"
    command = context.app("context_state", 16)
    first, second = (lab.server(name) for name in ("first", "second"))
    job = lab.job("job", command, first.unix, pause_at=[5, 9])
    job.wait_paused(5, 60)
    lab.run("migrate", [lab.tool("cr-migrate"), job.id, "--to", second.unix], 60)
    job.go(5)
    job.wait_paused(9, 60)
    lab.run("back", [lab.tool("cr-migrate"), job.id, "--to", first.unix], 60)
    job.go(9)
    job.expect_success(60)
    harness.same("after two moves", job.stdout(), context.expected(command))
    with open(os.path.join(second.directory, "..", "second-server.err")) as f:
        sessions = len(re.findall(r"session \d+ of \S+ started", f.read()))
    if sessions != 2:
        raise Failure(f"the move made {sessions} sessions: with one, modules that were loaded ahead are no other case here")


@case
def pointers_like_addresses(context):
    """A pointer of the program whose bytes, read from an odd place, are such an address does not stop a move or a restart."""
    lab = context.lab
    if not lab.software:
        return  # a real GPU puts functions where it does
    lab.env["APP_COPY"] = "pointer"
    command = context.app("code_tables", 16)
    job = lab.job("pointer", command, lab.server("first").unix, pause_at=[5])
    job.wait_paused(5, 60)
    image = context.path("image")
    lab.run("checkpoint", [lab.tool("cr-checkpoint"), job.id, image], 60)
    lab.env["SOFTGPU_PLACES"] = "process"
    other = lab.server("other")
    del lab.env["SOFTGPU_PLACES"]
    lab.run("migrate", [lab.tool("cr-migrate"), job.id, "--to", other.unix], 60)
    job.go(5)
    job.expect_success(60)
    harness.same("after the move", job.stdout(), context.expected(command))
    os.truncate(job.out, 0)
    context.restart(image, other, "restart").expect_success(60)
    harness.same("after the restart", job.stdout().splitlines()[-1:], context.expected(command).splitlines()[-1:])


@case
def bare_addresses(context):
    """A module that takes addresses of functions nobody can compare later is named before anything is saved or moved."""
    lab = context.lab
    command = context.app("code_bare", 16)
    first = lab.server("first")
    job = lab.job("job", command, first.unix, pause_at=[3])
    job.wait_paused(3, 60)
    words = "the module with the kernel (Make|Collect|Exchange|Run|Late) takes addresses of functions in its code"
    for tool in (
        [lab.tool("cr-checkpoint"), job.id, context.path("image")],
        [lab.tool("cr-migrate"), job.id, "--to", lab.server("second").unix],
    ):
        must_fail(lab.start(harness.Process(lab, os.path.basename(tool[0]), tool)), mention=words)
    if os.path.exists(context.path("image")):
        raise Failure("there is an image although the checkpoint was refused")
    job.go(3)
    job.expect_success(60)
    harness.same("after what was refused", job.stdout(), context.expected(command))


@case
def kept_linked(context):
    """Addresses of linked functions in GPU memory, where modules lie in the room of others: right after a move and a restart, or
    refused by the name of a place."""
    lab = context.lab
    lab.env["APP_KEEP"] = "all"
    points = (5, 13)
    command = context.app("code_linked", 16)
    expected = context.expected(command)
    words = r"GPU memory at 0x\w+ holds the address of a GPU function that lies elsewhere on this server than before"
    refused = 0

    def goes_on(process, mention):
        nonlocal refused
        if process.wait(90) == 0:
            return True
        must_fail(process, mention=mention)
        refused += 1
        return False

    job = lab.job("job", command, lab.server("first").unix, pause_at=points)
    images = []
    for step in points:
        job.wait_paused(step, 60)
        images.append(context.path(f"image{step}"))
        lab.run(f"checkpoint{step}", [lab.tool("cr-checkpoint"), job.id, images[-1]])
        move = [lab.tool("cr-migrate"), job.id, "--to", lab.server(f"to{step}").unix]
        goes_on(lab.start(harness.Process(lab, f"migrate{step}", move)), words + ".*the job continues where it was")
        job.go(step)
    job.expect_success(60)
    harness.same("after the moves", job.stdout(), expected)
    for number, image in enumerate(images):
        os.truncate(job.out, 0)
        if goes_on(context.restart(image, lab.server(f"again{number}"), f"restart{number}"), words):
            harness.same(f"restarted from {image}", job.stdout(), expected)
    print(f"     {refused} of {2 * len(points)} were refused", flush=True)
    if lab.software and refused == 0:
        raise Failure("nothing was refused, so this shows nothing: code lay in the room of other code")


def move_and_restart_linked(context, name, settings):
    """A job of linked modules, with `settings` in its environment, is moved and then restarted from an image, and is right."""
    lab = context.lab
    command = context.app("code_linked", 16)
    first, second = (lab.server(f"{server}-{name}") for server in ("first", "second"))
    job = lab.job(f"job-{name}", command, first.unix, pause_at=[6, 9], env=settings)
    job.wait_paused(6, 60)
    lab.run(f"move-{name}", [lab.tool("cr-migrate"), job.id, "--to", second.unix])
    job.go(6)
    job.wait_paused(9, 60)
    image = context.path(f"image-{name}")
    lab.run(f"checkpoint-{name}", [lab.tool("cr-checkpoint"), "--stop", job.id, image])
    job.wait(30)
    restarted = context.restart(image, first, f"restart-{name}")
    job.go(9)
    restarted.expect_success(60)
    harness.same(f"{name}, moved and restarted", job.stdout(), context.expected(command))


@case
def module_loading(context):
    """Linked modules whose kernels the driver loads at once, or when they are first used, are moved and restarted."""
    lab = context.lab
    if lab.software:
        lab.env["APP_KEEP"] = "first"
    command = context.app("code_linked", 16)
    for loading in ("LAZY", "EAGER"):
        settings = {"CUDA_MODULE_LOADING": loading}
        native = lab.run(f"native-{loading}", command, 60, dict(lab.native_environment(), **settings))
        harness.same(f"{loading}, natively", native.stdout(), context.expected(command))
        move_and_restart_linked(context, loading, settings)


@case
def loaded_again(context):
    """Linked modules that a replay loads twice, so that their variables come to their places: their functions lie elsewhere then,
    and tables follow."""
    context.lab.env["SOFTGPU_PLACES"] = "loads"
    # Loaded at once: else only kernels that were used are in each other's way.
    move_and_restart_linked(context, "again", {"CUDA_MODULE_LOADING": "EAGER"})


@case
def kernel_heap_refused(context):
    """Where the heap of the driver's kernels cannot be saved, the kernel that allocates is named, and the job continues."""
    lab = context.lab
    if lab.software:  # whose heap is saved, if a worker knows it by its name
        lab.env["CUDA_REMOTE_DRIVER"] = shutil.copy(lab.driver, context.path("libcuda.so.1"))
    command = context.app("kernel_heap", 16)
    job = lab.job("job", command, lab.server("first").unix, pause_at=[5])
    job.wait_paused(5, 60)
    image = context.path("image")
    words = (
        "kernels of the module with the kernel .*(Change|Weigh).* allocate memory, and the heap that it comes from cannot be saved"
    )
    for tool in (
        [lab.tool("cr-checkpoint"), job.id, image],
        [lab.tool("cr-checkpoint"), "--stop", job.id, image],
        [lab.tool("cr-migrate"), job.id, "--to", lab.server("second").unix],
    ):
        must_fail(lab.start(harness.Process(lab, f"tool{len(lab.processes)}", tool)), mention=words)
    if os.path.exists(image) or not job.running():
        raise Failure(f"there is an image, or no job\n{job.describe()}")
    job.go(5)
    job.expect_success(60)
    harness.same("after refused tools", job.stdout(), context.expected(command))


@case
def random_addresses(context):
    """With --randomize-addresses, programs compute the same, workers are randomised, and nothing is saved or moved."""
    lab = context.lab
    command = context.app("stencil", 16)
    servers = {name: lab.server(name, extra=extra) for name, extra in (("fixed", ()), ("random", ("--randomize-addresses",)))}
    no_randomization = 0x0040000  # ADDR_NO_RANDOMIZE
    for name, server in servers.items():
        wait_for(server.workers, 60, server.describe)
        for pid in server.workers():
            def personality(path=f"/proc/{pid}/personality"):
                with open(path) as f:
                    return int(f.read(), 16)

            # A worker is started a second time to fix its addresses.
            if name == "fixed":
                wait_for(lambda: personality() & no_randomization, 60, lambda: f"worker {pid} has the personality {personality():x}")
            elif personality() & no_randomization:
                raise Failure(f"worker {pid} has no random addresses")
    job = lab.job("job", command, servers["random"].unix, pause_at=[5])
    job.wait_paused(5, 60)
    image = context.path("image")
    for tool in (
        [lab.tool("cr-checkpoint"), job.id, image],
        [lab.tool("cr-checkpoint"), "--stop", job.id, image],
        [lab.tool("cr-migrate"), job.id, "--to", servers["fixed"].unix],
    ):
        must_fail(lab.start(harness.Process(lab, f"tool{len(lab.processes)}", tool)), mention="cr-server --randomize-addresses")
    if os.path.exists(image) or not job.running():
        raise Failure(f"there is an image, or no job\n{job.describe()}")
    job.go(5)
    job.expect_success(60)
    harness.same("with random addresses", job.stdout(), context.expected(command))


@case
def client_killed(context):
    """kill -9 in mid-call: the server frees the session's worker; the other job is not disturbed."""
    lab = context.lab
    server = lab.server()
    other_command = context.app("stencil", 60)
    # It has not ended before the others are killed, however slow the machine is.
    other = lab.job("other", other_command, server.unix, step_ms=30, pause_at=[59])
    other.wait_steps(1, 60)
    for number, name in enumerate(("nbody", "pipeline", "memory")):
        victim = lab.job(f"victim{number}", context.app(name, 10000), server.unix)
        victim.wait_steps(3, 60)
        before = set(server.workers())
        victim.kill()
        victim.wait(10)
        # The worker that served it must go; warm ones may stay or come.
        wait_for(
            lambda: len(set(server.workers()) & before) < len(before), 20, lambda: f"all of {before} still run after the kill"
        )
    other.go(59)
    other.expect_success(60)
    harness.same("the other job", other.stdout(), context.expected(other_command))
    context.check_works(server)


@case
def worker_killed(context):
    """A worker killed: its client gets a clear error, the other job and the server go on."""
    lab = context.lab
    server = lab.server()
    other_command = context.app("stencil", 60)
    other = lab.job("other", other_command, server.unix, step_ms=30, pause_at=[59])
    other.wait_steps(1, 60)
    victim = lab.job("victim", context.app("histogram", 10000), server.unix)
    victim.wait_steps(2, 60)
    ps = lab.run("ps", [lab.tool("cr-ps"), "--json", "--server", server.unix]).stdout().decode()
    pids = [int(pid) for pid in re.findall(r'"worker_pid":\s*"?(\d+)', ps)]
    programs = re.findall(r'"program":\s*"([^"]*)"', ps)
    if len(pids) != 2 or len(programs) != 2:
        raise Failure(f"cr-ps --json does not show two sessions with worker_pid and program:\n{ps}")
    target = pids[[("histogram" in program) for program in programs].index(True)]
    os.kill(target, signal.SIGKILL)
    text = must_fail(victim, 30, mention="cuda-remote")
    if "CUDA_ERROR" not in text and "cudaError" not in text:
        raise Failure(f"the program saw no CUDA error:\n{text}")
    other.go(59)
    other.expect_success(60)
    harness.same("the other job", other.stdout(), context.expected(other_command))
    context.check_works(server)


@case
def server_restarted(context):
    """The server is killed: jobs get a clear error; a new server in the same folder serves at once."""
    lab = context.lab
    server = lab.server("server")
    job = lab.job("job", context.app("histogram", 10000), server.unix)
    job.wait_steps(2, 60)
    workers = server.workers()
    os.kill(server.pid, signal.SIGKILL)
    server.wait(10)
    must_fail(job, 30, mention="cuda-remote")
    gone = lambda: not any(harness.state_of(pid) not in ("", "Z") for pid in workers)
    wait_for(gone, 20, lambda: f"the killed server's workers {workers} still run")
    again = lab.start(harness.Server(lab, "server"))
    context.check_works(again)
    # A clean shutdown: no socket stays behind, no worker.
    workers = again.workers()
    again.kill(signal.SIGTERM)
    code = again.wait(20)
    if code != 0:
        raise Failure(f"cr-server ended with {code} on SIGTERM\n{again.describe()}")
    wait_for(gone, 20, lambda: f"the server's workers {workers} still run")
    if os.path.exists(os.path.join(again.directory, "session.sock")):
        raise Failure("session.sock is still there after a clean shutdown")


@case
def garbage(context):
    """Random bytes to every socket of the server; a client whose ring turns to garbage; nobody else notices."""
    lab = context.lab
    server = lab.server(listen=True)
    command = context.app("stencil", 80)
    other = lab.job("other", command, server.unix, step_ms=30)
    other.wait_steps(1, 60)
    pick = random.Random(7)
    sockets = [os.path.join(server.directory, name) for name in os.listdir(server.directory) if name.endswith(".sock")]
    if len(sockets) < 2:
        raise Failure(f"expected session.sock and control.sock in {server.directory}: {sockets}")
    for round_number in range(40):
        data = pick.randbytes(pick.choice([1, 7, 24, 100, 4096, 60000]))
        if round_number % 4 == 1:
            data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + data
        for path in sockets:
            for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                with socket.socket(socket.AF_UNIX, kind) as s:
                    s.settimeout(2)
                    try:
                        s.connect(path)
                        s.sendall(data)
                        if round_number % 3 == 0:
                            s.settimeout(0.05)
                            s.recv(4096)
                    except OSError:
                        pass
        host, port = server.tcp.split(":")
        with socket.create_connection((host, int(port)), 2) as s:
            try:
                s.sendall(data)
            except OSError:
                pass
    # Sessions that begin well and then write garbage all over their shared memory.
    for seed in range(6):
        victim = lab.job(f"victim{seed}", context.app("reduce", 100000), server.unix, step_ms=1)
        victim.wait_steps(3, 60)
        scribble(victim, pick, seed)
        victim.kill()
        victim.wait(10)
    if not server.running():
        raise Failure(f"the server died of garbage\n{server.describe()}")
    other.expect_success(90)
    harness.same("the other job", other.stdout(), context.expected(command))
    context.check_works(server)


def scribble(job, pick, seed):
    """Writes random bytes into the shared ring of a running job, from outside."""
    targets = []
    for pid in [job.pid] + harness.descendants(job.pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                cmdline = f.read()
            with open(f"/proc/{pid}/maps") as f:
                maps = f.read()
        except OSError:
            continue
        if b"cr-" in cmdline.split(b"\0")[0]:
            continue
        for line in maps.split("\n"):
            if "memfd:" in line and " rw-s " in line:
                start, end = (int(value, 16) for value in line.split()[0].split("-"))
                targets.append((pid, start, end))
    if not targets:
        raise Failure(f"no shared memory found in {job.name}: is the ring not a memfd any more?\n{job.describe()}")
    for pid, start, end in targets:
        try:
            with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                for _ in range(200):
                    # The header page with the positions, and the beginnings of the data areas.
                    offset = pick.randrange(min(4096, end - start)) if seed % 2 == 0 else pick.randrange(end - start)
                    memory.seek(start + offset)
                    memory.write(pick.randbytes(min(pick.choice([1, 4, 8, 64]), end - start - offset)))
        except OSError:
            pass  # the job saw it and ended
    time.sleep(0.2)


@case
def other_protobuf_and_grpc(context):
    """The library in a process with another protobuf and gRPC; and it exports the driver's names and nothing else."""
    lab = context.lab
    library = lab.tool("libcuda-remote.so")
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True)
    if symbols.returncode != 0:
        raise Failure(f"nm failed: {symbols.stderr}")
    names = [line.split()[-1].split("@")[0] for line in symbols.stdout.splitlines() if line.split()[-2] != "A"]
    # The driver's names: its calls, and the debugger's and the ELF tools' entry points, which it exports too.
    strangers = [name for name in names if not re.fullmatch(r"cu(da|dbg)?[A-Z][A-Za-z0-9_]*", name)]
    if strangers or len(names) < 600:
        raise Failure(f"{len(names)} symbols are exported; these are no driver calls: {strangers[:20]}")
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    heavy = re.findall(r"NEEDED.*\[(lib(?:grpc|protobuf|absl|stdc\+\+|spdlog)[^\]]*)\]", needed)
    if heavy:
        raise Failure(f"the client library needs {heavy}")
    server = lab.server()
    environment = {"CUDA_REMOTE_SERVER": server.unix}
    guest = lab.run("guest", [context.program("guest"), library], env=environment)
    if guest.stdout() != b"guest ok\n":
        raise Failure(guest.describe())


@case
def fork(context):
    """A forked child is inert; the parent goes on."""
    server = context.lab.server()
    job = context.lab.job("job", [context.program("forker")], server.unix)
    job.expect_success(60)
    harness.same("forker", job.stdout(), b"forker ok\n")


@case
def sharing(context):
    """Two jobs share memory, events, pools and physical memory; neither can be saved or moved while they do."""
    lab = context.lab
    server, second = lab.server(), lab.server("second")
    move = lambda job: [lab.tool("cr-migrate"), job.id, "--to", second.unix]
    command = lambda role: [context.program("sharer"), context.path("s"), role]
    exporter = lab.job("exporter", command("export"), server.unix, pause_at=[2, 4])
    importer = lab.job("importer", command("import"), server.unix)
    exporter.wait_paused(2, 60)
    for job in (exporter, importer):
        image = context.path(f"image-{job.name}")
        save = [lab.tool("cr-checkpoint"), job.id, image]
        for what, words in (("move", move(job)), ("save", save), ("stop", save[:1] + ["--stop"] + save[1:])):
            refused = lab.start(harness.Process(lab, f"{what}-{job.name}", words))
            # The two have a socket as well.
            shared = r"process [0-9]+ \(sharer, session [0-9]+\), which is not saved with it"
            must_fail(refused, mention=shared if what == "move" else r"to sharer \(PID [0-9]+\), which is not of the job|" + shared)
        if os.path.exists(image):
            raise Failure(f"there is an image of {job.name}")
    exporter.go(2)
    exporter.wait_paused(4, 60)
    lab.run("move", move(exporter))
    exporter.go(4)
    for job in (exporter, importer):
        job.expect_success(60)
    # What the one wrote the other one read: the first two numbers are of memory that both change in turn.
    lines = lambda job: [line.split() for line in job.stdout().decode().splitlines()]
    wrote, read = lines(exporter), lines(importer)
    if wrote[-1] != ["done"] or read[-1] != ["done"] or len(wrote) != 4 or len(read) != 4:
        raise Failure(f"exporter: {wrote}\nimporter: {read}")
    for mine, other in zip(wrote[:3], read[:3]):
        if mine[4:] != other[4:] or mine[2:4] == other[2:4]:
            raise Failure(f"exporter saw {mine}, importer {other}")
    context.check_works(server)


@case
def sharing_relay(context):
    """The same through the relay: what is shared is the server's."""
    lab = context.lab
    server = lab.server(listen=True)
    jobs = [lab.job(role, [context.program("sharer"), context.path("s"), role], server.tcp) for role in ("export", "import")]
    for job in jobs:
        job.expect_success(60)
        if not job.stdout().endswith(b"done\n"):
            raise Failure(f"{job.name} did not end well\n{job.describe()}")


@case
def sharing_killed(context):
    """The one who shares is killed: the other one gets errors or old memory, and the server goes on."""
    lab = context.lab
    server = lab.server()
    command = lambda role: [context.program("sharer"), context.path("s"), role]
    exporter = lab.job("exporter", command("export"), server.unix, pause_at=[2])
    importer = lab.job("importer", command("import"), server.unix)
    exporter.wait_paused(2, 60)
    exporter.kill()
    must_fail(importer)
    context.check_works(server)


@case
def kernel_faults(context):
    """Failing kernels give the errors that they give natively, print what they print, and harm no other job. A job with such an
    error is not saved, and the error is named."""
    lab = context.lab
    server, elsewhere = lab.server(), lab.server("elsewhere")
    other = lab.job("other", context.app(steps=200), server.unix, step_ms=10)
    for kind in ("none", "assert", "illegal", "misaligned", "trap", "wild"):
        command = [context.program("failing"), kind]
        native = lab.run(f"native-{kind}", command, 60, lab.native_environment())
        job = lab.job(f"job-{kind}", command, server.unix, pause_at=[] if kind == "none" else [1])
        if kind != "none":
            job.wait_paused(1, 60)
            error = re.search(rb"stream synchronize: cuda(Error\w+)", native.stdout()).group(1).decode()
            # The tools name the driver's error.
            name = "CUDA_" + "_".join(re.findall("[A-Z][a-z]*", error.replace("Failure", "Failed"))).upper()
            image = context.path(f"image-{kind}")
            for number, tool in enumerate((["cr-checkpoint", job.id, image], ["cr-migrate", job.id, "--to", elsewhere.unix])):
                attempt = harness.Process(lab, f"save-{kind}-{number}", [lab.tool(tool[0]), *tool[1:]])
                must_fail(lab.start(attempt), mention=f"the GPU's work did not finish cleanly: {name} ")
            if os.path.exists(image) or not job.running():
                raise Failure(f"{kind}: there is an image, or no job\n{job.describe()}")
            job.go(1)
        job.expect_success(60)
        harness.same(kind, job.stdout(), native.stdout())
        if kind == "assert":
            # With a server of the job's own, whose log is the job's standard error, too.
            own = lab.run("own", [lab.tool("cr-run"), "--", *command], 60)
            for process in (native, job, own):
                said = r"^\S*failing\.cu:\d+: .*thread: \[2,0,0\] Assertion `data\[threadIdx\.x\] < 3` failed"
                times = len(re.findall(said, process.stderr(), re.MULTILINE))
                if times != 1:
                    raise Failure(f"{process.name}: the assertion's text is there {times} times\n{process.describe()}")
    other.expect_success(120)
    harness.same("other", other.stdout(), context.expected(context.app(steps=200)))
    context.check_works(server)


@case
def libraries(context):
    """NVIDIA's libraries on the software GPU: what is PTX is right, what is machine code alone is an error, and one line says why."""
    lab = context.lab
    folder = "/usr/local/cuda/lib64"
    names = [f"lib{name}.so" for name in ("cudart", "cufft", "curand", "cublas")]
    absent = [name for name in names if not os.path.exists(f"{folder}/{name}")]
    if absent:
        raise Failure(f"{', '.join(absent)} not in {folder}: this case needs NVIDIA's packages libcublas, libcufft and libcurand")
    command = [sys.executable, context.program("libraries.py"), folder]
    failed = "sgemm returned 13\n"  # CUBLAS_STATUS_EXECUTION_FAILED
    results = f"fft 64 right\nfft 100 right\nfft 256 right\nrandom right\nsaxpy right\n{failed}{failed}saxpy right\n"
    server = lab.server(listen=True)
    # Under cr-run the program's user sees what the server's driver prints, too.
    ours, drivers = "cuda-remote: the server's GPU cannot run the code of a module", "softgpu: the image has machine code alone"
    for way, start, lines in (
        ("directly", lambda: lab.run("directly", command, 120, lab.native_environment()), [drivers]),
        ("ring", lambda: lab.job("ring", command, server.unix), [ours, drivers]),
        ("grpc", lambda: lab.job("grpc", command, server.tcp), [ours, drivers]),
    ):
        process = start()
        process.expect_success(120)
        harness.same(way, process.stdout(), results.encode())
        said = sorted(process.stderr().splitlines())
        if len(said) != len(lines) or not all(one.startswith(line) for one, line in zip(said, lines)):
            raise Failure(f"{way}: stderr is not one line of each of these: {lines}\n{process.describe()}")


@case
def no_context(context):
    """On a thread without a current context every call answers as it does natively, and what is accepted is done."""
    lab = context.lab
    server = lab.server(listen=True)
    command = [context.program("nocontext")]
    native = lab.run("native", command, 60, lab.native_environment())
    for name, address in (("ring", server.unix), ("grpc", server.tcp)):
        job = lab.job(name, command, address)
        job.expect_success(60)
        answers = [output.decode().splitlines() for output in (native.stdout(), job.stdout())]
        other = list(difflib.unified_diff(*answers, "native", name, n=0, lineterm=""))
        if other:
            raise Failure("\n".join(["other answers than natively", *other]))


@case
def visible_devices(context):
    """CUDA_VISIBLE_DEVICES, any list of ordinals and UUIDs, shows what it shows natively; so does choosing one GPU."""
    lab = context.lab
    machine = {"SOFTGPU_DEVICES": "3", "SOFTGPU_MEMORY": "256M", "SOFTGPU_UUID": "GPU-00112233-4455-6677-8899-aabbccddee00"}
    os.environ.update(machine)
    try:
        server = lab.server()
        command = [context.program("devices")]
        uuid = lambda last: f"GPU-00112233-4455-6677-8899-aabbccddee0{last}"
        values = ["0,1,2", "0", "2", "2,0", "1,7,0", "0,0", "", "-1", uuid(1), f"{uuid(2)},0", "GPU-0011", "GPU-ff"]
        for number, value in enumerate(values):
            native = lab.run(f"listed{number}", command, 60, dict(lab.native_environment(), CUDA_VISIBLE_DEVICES=value))
            job = lab.job(f"job{number}", command, server.unix, env={"CUDA_VISIBLE_DEVICES": value})
            job.expect_success(60)
            harness.same(f"CUDA_VISIBLE_DEVICES={value}", job.stdout(), native.stdout())
        one = lab.run("native-one", command, 60, dict(lab.native_environment(), CUDA_VISIBLE_DEVICES="1"))
        job = lab.start(harness.Process(lab, "gpu1", [lab.tool("cr-run"), "--server", server.unix, "--gpu", "1", "--"] + command))
        job.expect_success(60)
        harness.same("--gpu 1", job.stdout(), one.stdout())
        job = lab.job("chosen", command, server.unix, env={"CUDA_REMOTE_GPU": "1"})
        job.expect_success(60)
        harness.same("CUDA_REMOTE_GPU=1", job.stdout(), one.stdout())
        own = lab.start(harness.Process(lab, "own1", [lab.tool("cr-run"), "--gpu", "1", "--"] + command))
        own.expect_success(60)
        harness.same("--gpu 1 with an own server", own.stdout(), one.stdout())
        listed = lab.run("native-listed", command, 60, dict(lab.native_environment(), CUDA_VISIBLE_DEVICES="1,0"))
        own = lab.start(harness.Process(lab, "own2", [lab.tool("cr-run"), "--"] + command, {"CUDA_VISIBLE_DEVICES": "1,0"}))
        own.expect_success(60)
        harness.same("CUDA_VISIBLE_DEVICES with an own server", own.stdout(), listed.stdout())
        missing = lab.start(harness.Process(lab, "gpu9", [lab.tool("cr-run"), "--server", server.unix, "--gpu", "9", "--"] + command))
        alone = lab.start(harness.Process(lab, "gpu9-alone", [lab.tool("cr-run"), "--gpu", "9", "--"] + command))
        for one in (missing, alone):
            one.wait(60)
            said = [line for line in one.stderr().splitlines() if "cuda-remote" in line or "cr-" in line]
            if len(said) != 1 or "there is no GPU 9" not in said[0] or "libcuda" in said[0]:
                raise Failure(f"a GPU that is not there is not named, in one line\n{one.describe()}")
        # A job that sees some GPUs only is checkpointed and restarted like any other.
        app = context.app()
        job = lab.job("job", app, server.unix, pause_at=[10], env={"CUDA_VISIBLE_DEVICES": "1,0"})
        image = context.stopped_at(job, 10)
        size = os.path.getsize(job.out)
        restarted = context.restart(image, server)
        restarted.expect_success(60)
        if not job.stdout()[size:] or job.stdout() != context.expected(app):
            raise Failure(f"the restarted job's output is not right\n{job.describe()}")
    finally:
        for name in machine:
            del os.environ[name]


@case
def driver_settings(context):
    """Environment variables that the driver reads do what they do natively, also after a move and a restart."""
    lab = context.lab
    machine = {"SOFTGPU_DEVICES": "3", "SOFTGPU_MEMORY": "256M", "SOFTGPU_LAST_IS_FASTEST": "1"}
    os.environ.update(machine)
    # The operator's own settings are for programs that say nothing.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    try:
        server = lab.server(listen=True)
        del os.environ["CUDA_MODULE_LOADING"]
        other = lab.server("other")
        command = [context.program("devices")]
        order, eager = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {"CUDA_MODULE_LOADING": "EAGER"}
        lazy, some = {"CUDA_MODULE_LOADING": "LAZY"}, {"CUDA_VISIBLE_DEVICES": "2,0"}
        chosen = ({}, order, eager, {**order, **some}, {**order, **eager}, {**eager, **some}, {**order, **eager, **some})
        seen = set()
        for number, settings in enumerate(chosen):
            settings = {**lazy, **settings}
            native = lab.run(f"native{number}", command, 60, dict(lab.native_environment(), **settings)).stdout()
            seen.add(native)
            for name, address in (("ring", server.unix), ("grpc", server.tcp)):
                job = lab.job(f"{name}{number}", command, address, env=settings)
                job.expect_success(60)
                harness.same(f"{settings}, {name}", job.stdout(), native)
        if len(seen) != len(chosen):
            raise Failure(f"natively only {len(seen)} of {len(chosen)} settings make a difference, so this shows nothing")

        def check_worker(at, loading):
            """The only session of the server has a driver that was started so."""
            (worker,) = sessions_of(lab, at)
            with open(f"/proc/{worker}/environ") as f:
                environment = dict(one.split("=", 1) for one in f.read().split("\0") if "=" in one)
            if environment.get("CUDA_MODULE_LOADING", "LAZY") != loading:
                raise Failure(f"the worker {worker} of {at.name} has lost CUDA_MODULE_LOADING={loading}")

        for loading in ("EAGER", "LAZY"):
            go = context.path(f"go-{loading}")
            settings = {**order, "CUDA_MODULE_LOADING": loading}
            job = lab.job(f"job-{loading}", command + [go], other.unix, env=settings)
            wait_for(lambda: b"loaded" in job.stdout(), 60, job.describe)
            check_worker(other, loading)
            lab.run(f"move-{loading}", [lab.tool("cr-migrate"), job.id, "--to", server.unix])
            check_worker(server, loading)
            image = context.path(f"image-{loading}")
            lab.run(f"checkpoint-{loading}", [lab.tool("cr-checkpoint"), "--stop", job.id, image])
            job.wait(30)
            restarted = context.restart(image, other, f"restart-{loading}")
            wait_for(lambda: len(sessions_of(lab, other)) == 1, 60, restarted.describe)
            check_worker(other, loading)
            # A process that ends while CRIU still lets go of its threads fails the restore (CRIU issue 2072).
            wait_for(lambda: names_below(restarted) - {"cr-init"} == {"devices"}, 60, lambda: f"{names_below(restarted)}")
            open(go, "w").close()
            restarted.expect_success(60)
    finally:
        for name in (*machine, "CUDA_MODULE_LOADING"):
            os.environ.pop(name, None)


@case
def across_gpus(context):
    """A running job moves from one GPU of a server to the other and back, and restarts on the other. Needs two GPUs."""
    lab = context.lab
    lab.env["SOFTGPU_DEVICES"] = "2"
    server = lab.server()
    command = context.app(steps=60)

    def move(job, gpu):
        lab.run(f"move-to-{gpu}", [lab.tool("cr-migrate"), job.id, "--to", server.unix, "--gpu", str(gpu)])
        check_gpu(f"after-{gpu}", gpu)

    def check_gpu(when, gpu):
        listed = lab.run(f"ps-{when}", [lab.tool("cr-ps"), "--server", server.unix, "--json"])
        gpus = [session["gpu"] for session in json.loads(listed.stdout())["sessions"]]
        if gpus != [gpu]:
            raise Failure(f"the job is not on GPU {gpu} alone: {gpus}")

    job = lab.job("job", command, server.unix, pause_at=[10, 20, 30], gpu=0)
    job.wait_paused(10, 60)
    check_gpu("first", 0)
    move(job, 1)
    job.go(10)
    job.wait_paused(20, 60)
    move(job, 0)
    job.go(20)
    image = context.stopped_at(job, 30)
    restarted = lab.start(harness.Process(lab, "restart", [lab.tool("cr-restart"), image, "--server", server.unix, "--gpu", "1"]))
    restarted.expect_success(60)
    harness.same("moved between GPUs", job.stdout(), context.expected(command))


class SmallGpu:
    """A GPU with little free memory: the software GPU is small, of a real one another process holds the rest.

    `free_mib` holds for what is started in a `with` of it: each process's own on the software GPU, which it says so to
    what is started by its environment; altogether on a real one, contexts included.
    """

    def __init__(self, context, free_mib):
        self.context = context
        self.free_mib = free_mib
        self.before = None
        self.holder = None

    def __enter__(self):
        lab = self.context.lab
        if lab.software:
            self.before = lab.env.get("SOFTGPU_MEMORY")
            lab.env["SOFTGPU_MEMORY"] = f"{self.free_mib}M"
            return self
        command = [self.context.program("exhaust"), "hold", str(self.free_mib)]
        self.holder = lab.start(harness.Process(lab, f"holder{len(lab.processes)}", command))
        wait_for(
            lambda: self.holder.stdout() or not self.holder.running(), 60, lambda: f"no memory is held\n{self.holder.describe()}"
        )
        if self.holder.stdout() != b"holding\n":
            raise Failure(f"no memory is held\n{self.holder.describe()}")
        return self

    def __exit__(self, kind, value, trace):
        if self.holder:
            self.holder.end()
        elif self.before is None:
            del self.context.lab.env["SOFTGPU_MEMORY"]
        else:
            self.context.lab.env["SOFTGPU_MEMORY"] = self.before


@case
def out_of_memory(context):
    """A program that runs out of device memory in every way is told what it is told natively, over the ring and gRPC; it is
    checkpointed with memory nearly full and restarted; a GPU with too little free memory is refused. Nothing else may use the GPU."""
    lab = context.lab
    lab.workers = 0  # each one takes memory for a context
    # A real context takes about half a GiB.
    enough, little, piece = (64, 32, 4) if lab.software else (2048, 1024, 64)
    command = [context.program("exhaust"), "--size", str(piece)]
    with SmallGpu(context, enough):
        native = lab.run("native", command, 60, lab.native_environment()).stdout()

        def compare(job):
            answers = [output.decode().splitlines() for output in (native, job.stdout())]
            other = list(difflib.unified_diff(*answers, "native", job.name, lineterm=""))
            if other:
                raise Failure("\n".join(["other answers than natively", *other, job.stderr()[-2000:]]))

        server = lab.server(listen=True)
        for name, address in (("ring", server.unix), ("grpc", server.tcp)):
            job = lab.job(name, command, address)
            job.expect_success(120)
            compare(job)
            wait_for(lambda: not server.workers(), 30, lambda: "the worker of a job that has ended keeps its memory")
        job = lab.job("job", command, server.unix, pause_at=[1])
        job.wait_paused(1, 120)
        too_little = r"too little|out of memory"
        # On a real GPU the job itself has taken it.
        with SmallGpu(context, little) if lab.software else contextlib.nullcontext():
            small = lab.server("small")
            move = [lab.tool("cr-migrate"), job.id, "--to", small.unix]
            must_fail(lab.start(harness.Process(lab, "move", move)), mention=too_little)
            small.end()
        image = context.path("image")
        lab.run("checkpoint", [lab.tool("cr-checkpoint"), "--stop", job.id, image])
        job.wait(30)
        job.go(1)
        server.end()
        with SmallGpu(context, little):
            small = lab.server("small-too")
            must_fail(context.restart(image, small, "refused"), mention=too_little)
            small.end()
        context.restart(image, lab.server("again"), "restart").expect_success(120)
        compare(job)


@case
def managed_beyond(context):
    """A program uses more managed memory than the GPU has, over the ring and gRPC, and across a restart."""
    lab = context.lab
    lab.workers = 0  # each one takes memory for a context
    # A real context takes about half a GiB.
    enough, much = (64, 160) if lab.software else (1024, 1024)
    command = [context.program("beyond"), "--size", str(much)]
    with SmallGpu(context, enough):
        expected = context.expected(command)
        server = lab.server("first", listen=True)
        for name, address in (("ring", server.unix), ("grpc", server.tcp)):
            job = lab.job(name, command, address)
            job.expect_success(120)
            harness.same(name, job.stdout(), expected)
        job = lab.job("job", command, server.unix, pause_at=[1])
        image = context.stopped_at(job, 1, limit=120)
        context.restart(image, server).expect_success(120)
        harness.same("restarted", job.stdout(), expected)


@case
def managed_while_busy(context):
    """The host uses managed memory while kernels do: such accesses wait, and are right; what can be lost is said, each once."""
    lab = context.lab
    server = lab.server(listen=True)
    waits = "while the GPU was at work"
    lost = "what the host wrote is lost", "what the kernel wrote is lost"
    for way, address in (("ring", server.unix), ("grpc", server.tcp)):
        job = lab.job(way, [context.program("touches")], address)
        job.expect_success(60)
        for line in (waits, *lost):
            if job.stderr().count(line) != 1:
                raise Failure(f"{way}: not once on stderr: {line!r}\n{job.describe()}")
        # A program that keeps the rules.
        job = lab.job(f"{way}-managed", context.app("managed", 20), address)
        job.expect_success(60)
        harness.not_accused(job)


@case
def managed_rules_kept(context):
    """A program that keeps CUDA's rules for managed memory is accused of nothing, on the GPU and on the host, and restarted."""
    lab = context.lab
    # What a stream still has to do, and nobody waits for, stays there for a while.
    lab.env["SOFTGPU_LATE_MS"] = "20"
    server = lab.server()
    command = context.app("managed_random", 10)
    for seed in (1, 2, 3):
        lab.env["CR_TEST_SEED"] = str(seed)
        expected = lab.native(f"native-{seed}", command)
        for place, env in (("gpu", {}), ("host", {"CUDA_REMOTE_MANAGED": "host"})):
            name = f"{place}-{seed}"
            job = lab.job(name, command, server.unix, env=env, pause_at=[5])
            image = context.stopped_at(job, 5, f"image-{name}")
            context.restart(image, server, f"restart-{name}").expect_success(60)
            harness.same(name, job.stdout(), expected)
            harness.not_accused(job)


@case
def managed_fork(context):
    """A child made by fork has no managed memory: before the first kernel, after it, after a live checkpoint, restarted, over ring and gRPC."""
    lab = context.lab
    server = lab.server(listen=True)
    command = [context.program("forks")]
    for way, address, env in (("ring", server.unix, {}), ("grpc", server.tcp, {}), ("host", server.unix, {"CUDA_REMOTE_MANAGED": "host"})):
        job = lab.job(way, command, address, pause_at=[1], env=env)
        job.wait_paused(1, 60)
        image = context.path(f"image-{way}")
        lab.run(f"checkpoint-{way}", [lab.tool("cr-checkpoint"), job.id, image])
        job.go(1)
        job.expect_success(60)
        printed = job.stdout()
        context.restart(image, server, f"restart-{way}").expect_success(60)
        # It goes on behind the checkpoint's step, and writes behind what the job has written since.
        harness.same(f"restarted {way}", job.stdout(), printed + printed[printed.index(b"step 2") :])


@case
def managed_sums(context):
    """Where managed memory is host memory that the server shares, the first use beside a kernel is said, and no other one."""
    lab = context.lab
    server = lab.server()
    text = "the host wrote to managed memory while the GPU was at work"
    for name, size, count in (("in-turn", 1, 0), ("at-once", 2, 1)):
        job = lab.job(name, [context.program("sums"), "--size", str(size)], server.unix, env={"CUDA_REMOTE_MANAGED": "host"})
        job.expect_success(60)
        if job.stderr().count(text) != count:
            raise Failure(f"{name}: not {count} times on stderr: {text!r}\n{job.describe()}")


def travels(context, name, mib, bounds, env):
    """Runs `few` over gRPC. `bounds`: for each step the least and most bytes to the worker, and the least and most back."""
    lab = context.lab
    server = lab.server(name, listen=True)
    command = [context.program("few"), "--size", str(mib)]
    job = lab.job(f"{name}-job", command, server.tcp, pause_at=range(5), env=env)

    def travelled(least):
        """Bytes to the worker and back, when there are at least so many, and its figures, which it sends twice a second, no
        longer change."""
        last = None
        while True:
            listed = lab.run(f"ps{time.monotonic_ns()}", [lab.tool("cr-ps"), "--server", server.unix, "--json"])
            session = json.loads(listed.stdout())["sessions"][0]
            now = session["bytes_in"], session["bytes_out"]
            if now == last and ((now[0] >= least[0] and now[1] >= least[1]) or over.over()):
                return now
            last = now
            harness.pause(1.2)

    before = (0, 0)
    for step, (least_in, most_in, least_out, most_out) in enumerate(bounds):
        job.wait_paused(step, 60)
        over = harness.Limit(60)
        now = travelled((before[0] + least_in, before[1] + least_out))
        to_worker, back = now[0] - before[0], now[1] - before[1]
        if not (least_in <= to_worker <= most_in and least_out <= back <= most_out):
            raise Failure(f"{name}, step {step}: {to_worker} bytes to the worker, {back} back")
        before = now
        job.go(step)
    job.expect_success(60)
    harness.same(name, job.stdout(), context.expected(command))
    server.end()


@case
def managed_few(context):
    """Over gRPC no more managed memory travels than the host has used, and than it has changed."""
    mib = 32
    # A read brings 64 KiB, a write sends its page. Besides, there are the program's own requests.
    most, few, other = mib << 20, 3 * (64 << 10), 64 << 10
    travels(context, "managed", mib, (
        (most, most + (1 << 20), 0, other),
        (0, other, 3 * 4096, few + other),
        (3 * 4096, few + other, 0, few + other),
        (0, other, 0, other),
        (0, other, most, most + other),
    ), None)  # fmt: skip


@case
def mapped_few(context):
    """Over gRPC no more mapped pinned and registered memory travels than host and kernels have changed, however that is found."""
    mib = 32
    # A kernel changes a word of each page. Each is sent with its address and length, and so is what the host has written
    # between bytes that are zero, as before.
    most, changed, other = mib << 20, (mib << 20) // 4096 * 24, 64 << 10
    for memory in ("pinned", "registered"):
        for how in ("auto", "compare", "track"):
            travels(context, f"{memory}-{how}", mib, (
                (most, most * 9 // 8, changed, changed + other),
                (0, other, changed, changed + other),
                (3 * 24, other, changed, changed + other),
                (0, other, 11 * changed, 11 * changed + other),
                (0, other, 0, other),
            ), {"CR_TEST_MEMORY": memory, "CUDA_REMOTE_MAPPED": how})  # fmt: skip


@case
def managed_on_host(context):
    """Where managed memory cannot live on the GPU, it is host memory: with the same results, over the ring and gRPC, and restarted."""
    lab = context.lab
    server = lab.server(listen=True)
    env = {"CUDA_REMOTE_MANAGED": "host"}
    command = context.app("managed_random", 12)
    for way, address in (("ring", server.unix), ("grpc", server.tcp)):
        job = lab.job(way, command, address, env=env, pause_at=[6])
        image = context.stopped_at(job, 6, f"image-{way}", limit=120)
        context.restart(image, server, f"restart-{way}").expect_success(120)
        harness.same(way, job.stdout(), context.expected(command))


@case
def mapped_tracked(context):
    """With CUDA_REMOTE_MAPPED=track programs compute the same, over gRPC, restarted and moved."""
    lab = context.lab
    server = lab.server(listen=True)
    env = {"CUDA_REMOTE_MAPPED": "track", "CR_TEST_TRANSFERS": "0"}
    for name, steps in (("pinned_random", 12), ("mapped", 12)):
        command = context.app(name, steps)
        job = lab.job(name, command, server.tcp, env=env, pause_at=[4, 8])
        job.wait_paused(4, 120)
        other = lab.server(f"{name}-other", listen=True)
        lab.run(f"migrate-{name}", [lab.tool("cr-migrate"), job.id, "--to", other.tcp])
        job.go(4)
        image = context.stopped_at(job, 8, f"image-{name}", limit=120)
        context.restart(image, other, f"restart-{name}", other.tcp).expect_success(120)
        harness.same(name, job.stdout(), context.expected(command))


@case
def log_size(context):
    """Very many objects made and destroyed leave the client's memory, and the image's log, as they were."""
    lab = context.lab
    server = lab.server()
    count = context.options.objects
    job = lab.job("job", [context.program("million"), str(count)], server.unix)
    job.expect_success(60)
    print("    " + [line for line in job.stderr().splitlines() if line.startswith("million:")][0], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver")
    parser.add_argument("--objects", type=int, default=100000, help="for the case log_size")
    harness.run_cases_in_labs(parser, CASES, Context)


if __name__ == "__main__":
    main()
