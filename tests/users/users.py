#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several users of one machine: what an attacker prepares must not reach the victim's or root's programs.

Needs root: the users are played by processes with their numbers. Python 3 standard library only.

Usage: users.py --product FOLDER --apps FOLDER [--only CASE,CASE] [--keep] [--list]
"""

import argparse
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "matrix"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "matrix"))
import harness  # noqa: E402
from harness import Failure  # noqa: E402

# Numbers that no machine gives to its users. A run takes its own ones, so that two runs do not meet in /tmp.
VICTIM = 1_500_000_000 + os.getpid() * 2
ATTACKER = VICTIM + 1
LIMIT = 60
PYTHON = "/usr/bin/python3"  # one that other users can run, too
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Context:
    def __init__(self, lab, options):
        self.lab = lab
        # Others must be able to read it. Folders below are as a case makes them.
        os.chmod(lab.folder, 0o755)
        self.product = os.path.join(lab.folder, "product")
        shutil.copytree(options.product, self.product, symlinks=False)
        for folder, _, leaves in os.walk(self.product):
            os.chmod(folder, 0o755)
            for leaf in leaves:
                os.chmod(os.path.join(folder, leaf), 0o755)
        program = harness.find(options.apps, "globals")
        if program is None:
            raise Failure(f"the program globals is not in {options.apps}")
        self.program = os.path.join(self.product, "globals")
        shutil.copy(program, self.program)
        self.apps = options.apps
        self.demo = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "demo")
        self.shared = self.folder("shared", 0o1777)
        # Where jobs of the victim's see their libraries.
        shutil.rmtree(f"/tmp/cuda-remote-{VICTIM}", ignore_errors=True)

    def folder(self, name, mode, owner=0):
        path = os.path.join(self.lab.folder, name)
        os.mkdir(path)
        os.chown(path, owner, owner)
        os.chmod(path, mode)
        return path

    def tool(self, name):
        return os.path.join(self.product, name)

    def command(self, steps=40):
        return [self.program, "--steps", str(steps)]

    def environment(self, variables):
        full = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_REMOTE", "XDG_"))}
        full["CUDA_REMOTE_DRIVER"] = self.tool("libsoftgpu.so")
        full.update(variables)
        return full

    def run(self, user, command, limit=LIMIT, umask=0o022, **variables):
        """The ended process, with its output as text."""
        try:
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=limit,
                env=self.environment(variables), cwd="/", user=user, group=user, extra_groups=[], umask=umask,
            )  # fmt: skip
        except subprocess.TimeoutExpired as ended:
            raise Failure(f"{' '.join(command)} did not end within {limit} s: {ended.stderr}")

    def start(self, user, command, **variables):
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment(variables), cwd="/", user=user, group=user, extra_groups=[], start_new_session=True,
        )  # fmt: skip
        self.lab.processes.append(Started(child))
        return child

    def python(self, user, text, *arguments):
        """Runs `text` as `user`, with no umask."""
        ended = self.run(user, [PYTHON, "-c", text, *arguments], umask=0)
        if ended.returncode != 0:
            raise Failure(f"the other user's part failed: {ended.stderr}")


class Started:
    """A process for the lab to end."""

    def __init__(self, child):
        self.child = child
        self.pid = child.pid
        self.log = self.out = os.devnull
        self.name = "process"

    def running(self):
        return self.child.poll() is None

    def end(self):
        if self.running():
            os.killpg(self.pid, signal.SIGTERM)
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self.child.wait(10)


def refused(ended, *words):
    """The process ended by itself with an error that has all of these words."""
    if ended.returncode <= 0:
        raise Failure(f"{ended.args} ended with {ended.returncode}, but must refuse:\n{ended.stdout}\n{ended.stderr}")
    for word in words:
        if word not in ended.stderr:
            raise Failure(f"{ended.args} does not say {word!r}:\n{ended.stderr}")


def worked(ended):
    if ended.returncode != 0:
        raise Failure(f"{ended.args} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended


PREPARE = """
import os, sys
for path in sys.argv[1:]:
    os.mkdir(path, 0o777)
"""


@case
def job_folder(context):
    """The folder in /tmp where a user's jobs will be is made beforehand by somebody else, openly or as a link."""
    base = f"/tmp/cuda-remote-{VICTIM}"
    run = [context.tool("cr-run"), "--", "/bin/echo", "it ran"]
    try:
        context.python(ATTACKER, PREPARE, base, base + "/jobs")
        refused(context.run(VICTIM, run), base, f"belongs to user {ATTACKER}")
        if os.listdir(base + "/jobs"):
            raise Failure("cr-run has made something in the attacker's folder")
        # The victim can name another place.
        home = context.folder("home", 0o700, VICTIM)
        worked(context.run(VICTIM, run, XDG_RUNTIME_DIR=home))
        worked(context.run(VICTIM, run[:1] + ["--job-dir", home + "/job"] + run[1:]))
        # A link of the attacker's, to a folder that is the victim's own.
        shutil.rmtree(base)
        context.python(ATTACKER, "import os, sys; os.symlink(sys.argv[1], sys.argv[2])", home, base)
        refused(context.run(VICTIM, run), base, f"belongs to user {ATTACKER}")
        os.unlink(base)
        # With nothing there it works, and what it makes is closed.
        worked(context.run(VICTIM, run))
        facts = os.lstat(base)
        if facts.st_uid != VICTIM or facts.st_mode & 0o077:
            raise Failure(f"{base} is open to others: {stat.filemode(facts.st_mode)}")
    finally:
        if os.path.islink(base):
            os.unlink(base)
        shutil.rmtree(base, ignore_errors=True)


@case
def renamed_folder(context):
    """A folder above the job's that others may write to: they could rename the job's folder and put theirs there."""
    for user, mode in ((VICTIM, 0o777), (VICTIM, 0o770), (0, 0o777), (0, 0o775)):
        base = context.folder(f"base-{user}-{mode:o}", mode, user)
        os.mkdir(base + "/jobs", 0o700)
        os.chown(base + "/jobs", user, user)
        ended = context.run(user, [context.tool("cr-run"), "--job-dir", base + "/jobs/one", "--", "/bin/echo", "it ran"])
        refused(ended, base, "may be written by other users")
        # As it is often made: by hand, and open.
        inner = context.folder(f"inner-{user}-{mode:o}", 0o755, user)
        os.mkdir(inner + "/cuda-remote")
        os.mkdir(inner + "/cuda-remote/jobs")
        for path in (inner + "/cuda-remote", inner + "/cuda-remote/jobs"):
            os.chown(path, user, user)
        os.chmod(inner + "/cuda-remote/jobs", mode)
        ended = context.run(user, [context.tool("cr-run"), "--", "/bin/echo", "it ran"], XDG_RUNTIME_DIR=inner)
        refused(ended, inner + "/cuda-remote/jobs", "may be written by other users")


@case
def own_library(context):
    """The attack itself: somebody else's libcuda.so.1 in the job's folder is never loaded, however he tries."""
    source = os.path.join(context.lab.folder, "bad.c")
    library = os.path.join(context.lab.folder, "bad.so")
    with open(source, "w") as f:
        f.write(
            '#include <stdio.h>\n#include <unistd.h>\n__attribute__((constructor)) static void Run(void) '
            '{ dprintf(1, "ATTACKED %d\\n", (int)geteuid()); }\n'
        )
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    os.chmod(library, 0o755)
    attack = """
import os, shutil, sys
base, library = sys.argv[1:]
while True:
    for step in (lambda: os.mkdir(base), lambda: os.mkdir(base + "/jobs"), lambda: os.chmod(base, 0o777),
                 lambda: os.chmod(base + "/jobs", 0o777)):
        try: step()
        except OSError: pass
    for folder, names, _ in os.walk(base):
        for name in names:
            if name == "lib":
                path = os.path.join(folder, name, "libcuda.so.1")
                try:
                    os.unlink(path); os.symlink(library, path)
                except OSError: pass
            else:
                path = os.path.join(folder, name)
                try:
                    os.rename(path, path + ".away"); os.makedirs(path + "/lib"); os.symlink(library, path + "/lib/libcuda.so.1")
                except OSError: pass
    try:
        if os.stat(base).st_uid == os.geteuid(): shutil.rmtree(base, ignore_errors=True)
    except OSError: pass
"""
    for user in (VICTIM, 0):
        base = os.path.join(context.shared, f"runtime-{user}")
        attacker = context.start(ATTACKER, [PYTHON, "-c", attack, base + "/cuda-remote", library])
        attempts, ran = 0, 0
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline or ran + attempts < 3:
            os.makedirs(base, exist_ok=True)
            os.chown(base, user, user)
            os.chmod(base, 0o1777)
            attempts += 1
            ended = context.run(
                user,
                [context.tool("cr-run"), "--server", "unix:/none", "--", PYTHON, "-c",
                 "import ctypes, time; time.sleep(0.05); ctypes.CDLL('libcuda.so.1'); print('loaded')"],
                XDG_RUNTIME_DIR=base,
            )  # fmt: skip
            if "ATTACKED" in ended.stdout:
                raise Failure(f"attempt {attempts} as user {user} ran the attacker's code:\n{ended.stdout}")
            if ended.returncode == 0:
                ran += 1
            elif "cr-run:" not in ended.stderr:
                raise Failure(f"attempt {attempts} failed in another way:\n{ended.stdout}\n{ended.stderr}")
            shutil.rmtree(base + "/cuda-remote", ignore_errors=True)
        if attacker.poll() is not None:
            raise Failure(f"the attacker has ended by itself: {attacker.stderr.read()}")
        attacker.kill()
        attacker.wait()
        print(f"    user {user}: {attempts} attempts, {ran} ran with their own library", flush=True)


@case
def server_folder(context):
    """cr-server makes no sockets where somebody else could replace them, and cr-ps asks nobody there."""
    base = f"/tmp/cuda-remote-{VICTIM}"
    server = [context.tool("cr-server"), "--workers", "0"]
    try:
        context.python(ATTACKER, PREPARE, base)
        refused(context.run(VICTIM, server), base, f"belongs to user {ATTACKER}")
        refused(context.run(VICTIM, [context.tool("cr-ps")]), base, f"belongs to user {ATTACKER}")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    open_one = context.folder("open", 0o777, VICTIM)
    refused(context.run(VICTIM, server + ["--dir", open_one]), open_one, "may be written by other users")
    below = context.folder("above", 0o777, VICTIM) + "/server"
    os.mkdir(below, 0o700)
    os.chown(below, VICTIM, VICTIM)
    refused(context.run(VICTIM, server + ["--dir", below]), "may be written by other users")


@case
def foreign_server(context):
    """A server of another user is not given a program's data."""
    theirs = context.folder("theirs", 0o711, ATTACKER)
    path = theirs + "/session.sock"
    # It takes whatever comes.
    listen = "import os, socket, sys, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); " \
             "s.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777); s.listen(8); time.sleep(600)"  # fmt: skip
    context.start(ATTACKER, [PYTHON, "-c", listen, path])
    harness.wait_for(lambda: harness.connects(path), LIMIT, lambda: "the attacker's server does not listen")
    home = context.folder("home", 0o700, VICTIM)
    for user in (VICTIM, 0):
        ended = context.run(
            user, [context.tool("cr-run"), "--server", "unix:" + path, "--job-dir", f"{home if user else context.lab.folder}/job", "--"]
            + context.command(),
        )  # fmt: skip
        # In the victim's user namespace the attacker has no number of his own.
        refused(ended, "runs as user", path)


@case
def trace_file(context):
    """A link in the place of the file that a trace is written to first does not lead to a file of the victim's."""
    home, shared = context.folder("home", 0o700, VICTIM), context.folder("open", 0o777)
    precious = home + "/precious"
    context.python(VICTIM, "import sys; open(sys.argv[1], 'w').write('as it was')", precious)
    context.python(ATTACKER, "import os, sys; os.symlink(sys.argv[1], sys.argv[2])", precious, shared + "/t-one.json.new")
    worked(context.run(
        VICTIM, [context.tool("cr-run"), "--job-dir", home + "/one", "--"] + context.command(), CUDA_REMOTE_TRACE=shared + "/t-%j.json"
    ))  # fmt: skip
    if open(precious).read() != "as it was":
        raise Failure("a file of the victim's was written over through the attacker's link")
    if "cuInit" not in open(shared + "/t-one.json").read():
        raise Failure("the trace was not written")


@case
def foreign_job(context):
    """A job folder that another user has made: root's tools and the victim's neither believe nor touch what is in it."""
    job = os.path.join(context.shared, "job")
    precious = os.path.join(context.lab.folder, "precious")
    with open(precious, "w") as f:
        f.write("as it was\n")
    facts = {
        "name": "job", "command": ["x"], "pid": os.getpid(), "inner_pid": 2, "runner_pid": os.getpid(), "gpu": -1,
        "init_pid": os.getpid(), "pid_namespace": str(os.stat("/proc/self/ns/pid").st_ino), "directory": job,
    }  # fmt: skip
    context.python(
        ATTACKER,
        "import os, sys; job, facts, precious = sys.argv[1:]; os.mkdir(job, 0o755); "
        "open(job + '/job.json', 'w').write(facts); "
        "[os.symlink(precious, job + '/' + name) for name in "
        "('gpu-server', 'gpu-server.new', 'job.json.new', 'connect.lock', 'stopped', 'criu-dump.log')]",
        job, json.dumps(facts), precious,
    )  # fmt: skip
    image = os.path.join(context.lab.folder, "image")
    for user in (0, VICTIM):
        for command in (
            [context.tool("cr-checkpoint"), job, image],
            [context.tool("cr-checkpoint"), "--stop", job, image],
            [context.tool("cr-migrate"), job, "--to", "unix:/none"],
            [context.tool("cr-trace"), "--seconds", "1", job],
            [context.tool("cr-run"), "--job-dir", job, "--", "/bin/echo", "it ran"],
        ):
            refused(context.run(user, command), job, f"belongs to user {ATTACKER}")
    with open(precious) as f:
        if f.read() != "as it was\n":
            raise Failure("a file of root's was changed through the attacker's links")
    if os.path.exists(image) or os.path.exists(image + ".partial"):
        raise Failure("an image of the attacker's job was begun")


@case
def closed_home(context):
    """The demonstration by sudo in a clone that lies in a home which is closed to others, and is not root's."""
    home = context.folder("home", 0o700, VICTIM)
    clone = os.path.join(home, "clone")
    shutil.copytree(context.product, os.path.join(clone, "product"))
    os.mkdir(os.path.join(clone, "tools"))
    shutil.copy(context.demo, os.path.join(clone, "tools", "demo"))
    for folder, names, leaves in os.walk(clone):
        for path in [folder] + [os.path.join(folder, leaf) for leaf in leaves]:
            os.chown(path, VICTIM, VICTIM)
            os.chmod(path, 0o700)
    # What others cannot read, root without capabilities cannot either.
    if context.run(ATTACKER, ["/bin/ls", clone]).returncode == 0:
        raise Failure(f"{clone} is open to others")
    product = os.path.join(clone, "product")
    ended = worked(context.run(
        0, [os.path.join(clone, "tools", "demo"), "--product", product, os.path.join(product, "globals"), "--steps", "40"],
        limit=4 * LIMIT, CUDA_REMOTE_DRIVER=os.path.join(product, "libsoftgpu.so"), SUDO_UID=str(VICTIM), SUDO_USER="victim",
        HOME=home,
    ))  # fmt: skip
    same = ended.stdout.count("The result is the native one")
    if same != 2 or "== Done" not in ended.stdout:
        raise Failure(f"{same} of 2 results are the native one:\n{ended.stdout}\n{ended.stderr}")
    # The server says that it keeps what it gives up elsewhere.
    server = context.start(0, [os.path.join(product, "cr-server"), "--dir", context.folder("server", 0o700), "--workers", "0"])
    line = server.stderr.readline()
    if "closed to root without capabilities" not in line:
        raise Failure(f"cr-server does not say that it keeps its capabilities: {line}")


def image_of_root(context, name="image"):
    """A stopped job of root's: its image."""
    job = os.path.join(context.lab.folder, name + ".job")
    image = os.path.join(context.lab.folder, name)
    sync = os.path.join(context.lab.folder, name + ".sync")
    child = context.start(
        0, [context.tool("cr-run"), "--job-dir", job, "--"] + context.command(), CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3"
    )  # fmt: skip
    paused = lambda: os.path.exists(sync) and "paused 3" in open(sync).read()
    harness.wait_for(lambda: paused() or child.poll() is not None, LIMIT, lambda: "the job did not come to step 3")
    worked(context.run(0, [context.tool("cr-checkpoint"), "--stop", job, image]))
    child.wait(LIMIT)
    open(sync + ".go.3", "w").close()
    return image


@case
def partial_folder(context):
    """A DIR.partial, DIR or DIR.old in a folder that all may write to, made beforehand by somebody else."""
    job = os.path.join(context.lab.folder, "job")
    sync = os.path.join(context.lab.folder, "sync")
    child = context.start(
        0, [context.tool("cr-run"), "--job-dir", job, "--"] + context.command(), CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3"
    )  # fmt: skip
    paused = lambda: os.path.exists(sync) and "paused 3" in open(sync).read()
    harness.wait_for(lambda: paused() or child.poll() is not None, LIMIT, lambda: "the job did not come to step 3")
    image = os.path.join(context.shared, "image")
    save = [context.tool("cr-checkpoint"), job, image]
    context.python(ATTACKER, PREPARE, image + ".partial")
    refused(context.run(0, save), image + ".partial", f"belongs to user {ATTACKER}")
    os.rmdir(image + ".partial")
    # A link to a folder of root's own.
    kept = context.folder("kept", 0o700)
    os.mkdir(kept + "/memory")
    context.python(ATTACKER, "import os, sys; os.symlink(sys.argv[1], sys.argv[2])", kept, image + ".partial")
    refused(context.run(0, save), image + ".partial")
    if not os.path.isdir(kept + "/memory"):
        raise Failure("what the attacker's link leads to was removed")
    os.unlink(image + ".partial")
    # Something that looks like an image, to be replaced, or to be put back.
    for name in (image, image + ".old"):
        context.python(ATTACKER, PREPARE, name)
        context.python(ATTACKER, "import sys; open(sys.argv[1] + '/manifest.pb', 'w')", name)
        ended = context.run(0, save)
        if name == image:
            refused(ended, image, f"belongs to user {ATTACKER}")
        else:
            worked(ended)
            shutil.rmtree(image)
        shutil.rmtree(name)
    # A folder of root's own that others may write to: they may have put links there.
    os.mkdir(image + ".partial")
    os.chmod(image + ".partial", 0o777)
    refused(context.run(0, save), image + ".partial", "may be written by other users")
    os.rmdir(image + ".partial")
    # With nothing in the way the image is root's, and closed.
    worked(context.run(0, save))
    for folder, names, leaves in os.walk(image):
        for path in [folder] + [os.path.join(folder, name) for name in names + leaves]:
            facts = os.lstat(path)
            if facts.st_uid != 0 or facts.st_mode & 0o022:
                raise Failure(f"{path} is open to others: user {facts.st_uid}, {stat.filemode(facts.st_mode)}")


@case
def foreign_image(context):
    """An image that another user owns, or may write to in any part of it, is not run by root unless told so."""
    image = image_of_root(context)
    restart = [context.tool("cr-restart"), image]
    parts = [image] + [os.path.join(f, name) for f, names, leaves in os.walk(image) for name in names + leaves]
    for path in parts[:3] + [p for p in parts if "/client/" in p][:2] + [image + "/memory/index", image + "/client"]:
        before = os.lstat(path)
        os.chown(path, ATTACKER, ATTACKER)
        refused(context.run(0, restart), path, f"belongs to user {ATTACKER}", "--trust-owner")
        os.chown(path, 0, 0)
        os.chmod(path, before.st_mode | 0o020)
        refused(context.run(0, restart), path, "may be written by other users", "--trust-owner")
        os.chmod(path, before.st_mode & 0o7777)
    # Others may look at it.
    for path in parts:
        os.chown(path, ATTACKER, ATTACKER)
    worked(context.run(0, [context.tool("cr-inspect"), "--verify", image]))
    refused(context.run(0, restart), f"belongs to user {ATTACKER}")
    worked(context.run(0, restart + ["--trust-owner"]))


@case
def links_in_image(context):
    """A symbolic link in an image, or in the place of one of its folders, is refused."""
    image = image_of_root(context)
    restart = [context.tool("cr-restart"), "--trust-owner", image]
    for path in (image + "/more", image + "/client/more.img", image + "/memory/more"):
        os.symlink("/etc/passwd", path)
        refused(context.run(0, restart), path, "symbolic link")
        os.unlink(path)
    for name in ("client", "memory"):
        moved = os.path.join(context.lab.folder, "moved")
        os.rename(f"{image}/{name}", moved)
        os.symlink(moved, f"{image}/{name}")
        refused(context.run(0, restart), f"{image}/{name}", "symbolic link")
        os.unlink(f"{image}/{name}")
        os.rename(moved, f"{image}/{name}")
    os.mkfifo(image + "/client/pipe")
    refused(context.run(0, restart), "neither a file nor a folder")
    os.unlink(image + "/client/pipe")
    # A link to the image is the user's own way to name it.
    link = os.path.join(context.lab.folder, "link")
    os.symlink(image, link)
    worked(context.run(0, restart[:-1] + [link]))


def paused_at(sync, step, child):
    paused = lambda: os.path.exists(sync) and f"paused {step}" in open(sync).read()
    harness.wait_for(lambda: paused() or child.poll() is not None, LIMIT, lambda: f"the job did not come to step {step}")
    if child.poll() is not None:
        raise Failure(f"the job has ended with {child.returncode}: {child.stderr.read()}")


def has_rights_of(pid, user):
    """Every number of the process's rights is the user's, and it has no capability."""
    facts = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status").read().splitlines() if ":" in line)
    numbers = [facts[name].split() for name in ("Uid", "Gid", "Groups")]
    if numbers != [[str(user)] * 4, [str(user)] * 4, [str(user)]]:
        raise Failure(f"process {pid} runs as {numbers}, not as {user}")
    for name in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
        if int(facts[name], 16) != 0:
            raise Failure(f"process {pid} has capabilities: {name} {facts[name]}")


@case
def job_of_user(context):
    """Root runs a program as another user, saves it, moves it, stops it and restarts it: it always has that user's rights,
    its sessions are that user's, and no ordinary user can do any of this."""
    home, runtime = context.folder("home", 0o700, VICTIM), context.folder("runtime", 0o755)
    image = os.path.join(context.folder("images", 0o755), "image")
    sync, tools = home + "/sync", {"XDG_RUNTIME_DIR": runtime}
    job = runtime + "/cuda-remote/jobs/hers"
    run = [context.tool("cr-run"), "--user", str(VICTIM), "--name", "hers", "--"] + context.command()
    refused(context.run(VICTIM, run), "only root can run a program as another user")
    refused(context.run(0, [run[0], "--user", "root", "--", "true"]), "is root")
    want = worked(context.run(VICTIM, [context.tool("cr-run"), "--job-dir", home + "/plain", "--"] + context.command())).stdout
    pause = {"CR_TEST_SYNC_FILE": sync, "CR_TEST_PAUSE_AT": "3,9,15"}
    child = context.start(0, run, **tools, **pause)
    paused_at(sync, 3, child)

    def facts():
        return json.load(open(job + "/job.json"))

    def sessions(address):
        found = json.loads(worked(context.run(VICTIM, [context.tool("cr-ps"), "--server", address, "--json"])).stdout)
        return [session["owner"] for session in found["sessions"]]

    has_rights_of(facts()["pid"], VICTIM)
    owners = sessions(f"unix:{job}/user/server")
    if len(owners) != 1 or str(VICTIM) not in owners[0]:
        raise Failure(f"the session is not the user's: {owners}")
    listed = json.loads(worked(context.run(0, [context.tool("cr-ps"), "--json"], **tools)).stdout)["jobs"]
    if [(one["name"], one["user"]) for one in listed] != [("hers", VICTIM)]:
        raise Failure(f"cr-ps does not show the job: {listed}")

    # Neither the attacker nor the user herself gets at what root's tools use.
    for user in (ATTACKER, VICTIM):
        for tool in (["cr-checkpoint", job, home + "/stolen"], ["cr-checkpoint", "--stop", job, home + "/stolen"],
                     ["cr-migrate", job, "--to", "unix:/none"]):  # fmt: skip
            refused(context.run(user, [context.tool(tool[0])] + tool[1:], **tools), job)
    open_agent = "import os, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])"
    agent = f"{job}/user/agent-{facts()['inner_pid']}.sock"
    if "PermissionError" not in context.run(ATTACKER, [PYTHON, "-c", open_agent, agent]).stderr:
        raise Failure("the attacker can reach the job's agent")

    worked(context.run(0, [context.tool("cr-checkpoint"), "hers", image], **tools))
    for folder, names, leaves in os.walk(image):
        for path in [folder] + [os.path.join(folder, name) for name in names + leaves]:
            status = os.lstat(path)
            if status.st_uid != 0 or status.st_mode & 0o022 or (path == image and status.st_mode & 0o077):
                raise Failure(f"{path} is open to others: user {status.st_uid}, {stat.filemode(status.st_mode)}")
    refused(context.run(ATTACKER, [context.tool("cr-restart"), image]), image)

    # Her own server, which a session of root's would not be hers at.
    server = context.start(VICTIM, [context.tool("cr-server"), "--dir", home + "/server"])
    harness.wait_for(lambda: harness.connects(home + "/server/session.sock"), LIMIT, lambda: server.stderr.read())
    worked(context.run(0, [context.tool("cr-migrate"), "hers", "--to", f"unix:{home}/server"], **tools))
    if not sessions(f"unix:{home}/server") == owners:
        raise Failure(f"the moved session is not the user's: {sessions(f'unix:{home}/server')}")
    open(sync + ".go.3", "w").close()
    paused_at(sync, 9, child)
    worked(context.run(0, [context.tool("cr-checkpoint"), "--stop", "hers", image], **tools))
    if child.wait(LIMIT) != 121 or os.path.exists(job):
        raise Failure(f"the stopped job ended with {child.returncode}, or has left its folder")

    for options in ([], ["--server", f"unix:{home}/server"], ["--job-dir", context.lab.folder + "/elsewhere"]):
        again = context.start(0, [context.tool("cr-restart"), image] + options, **tools)
        place = options[1] if options and options[0] == "--job-dir" else job
        harness.wait_for(lambda: os.path.exists(place + "/job.json") or again.poll() is not None, LIMIT, lambda: "no restart")
        if again.poll() is not None:
            raise Failure(f"the restart failed: {again.stderr.read()}")
        pid = json.load(open(place + "/job.json"))["pid"]
        has_rights_of(pid, VICTIM)
        address = options[1] if options[:1] == ["--server"] else f"unix:{place}/user/server"
        if sessions(address) != owners:
            raise Failure(f"the restarted session is not the user's: {sessions(address)}")
        if options != ["--job-dir", context.lab.folder + "/elsewhere"]:
            worked(context.run(0, [context.tool("cr-checkpoint"), "--stop", "hers", image], **tools))
            again.wait(LIMIT)
            continue
        for step in (9, 15):
            open(f"{sync}.go.{step}", "w").close()
        out, errors = again.communicate(timeout=LIMIT)
        if again.returncode != 0 or out != want:
            raise Failure(f"the restarted job ended with {again.returncode}:\n{out}\n{errors}\nexpected\n{want}")


@case
def own_job(context):
    """A user starts a job by herself, without cr-hostd, also in a user namespace of her own. Root's tools touch nothing of
    it, and say whose it is and what to do; she can move it, and is told how it can be saved."""
    home = context.folder("home", 0o700, VICTIM)
    image = os.path.join(context.folder("images", 0o777), "image")
    # Where she has a user namespace of her own, what is root's on the way belongs to nobody: below /tmp it must be hers.
    runtime = tempfile.mkdtemp(dir="/tmp")
    os.chown(runtime, VICTIM, VICTIM)
    servers = [home + "/one", home + "/two"]
    for folder in servers:
        server = context.start(VICTIM, [context.tool("cr-server"), "--dir", folder])
        harness.wait_for(lambda: harness.connects(folder + "/session.sock"), LIMIT, lambda: server.stderr.read())
    want = worked(context.run(VICTIM, [context.tool("cr-run"), "--job-dir", home + "/plain", "--"] + context.command())).stdout
    saved = "must have been started through cr-hostd, or by root with cr-run --user"
    usual = f"/tmp/cuda-remote-{VICTIM}"
    for name, around, folder, place in (
        ("hers", [], usual, {}),
        ("inside", ["unshare", "--user", "--map-root-user"], runtime + "/cuda-remote", {"XDG_RUNTIME_DIR": runtime}),
    ):
        sync = f"{home}/{name}.sync"
        run = around + [context.tool("cr-run"), "--server", f"unix:{servers[0]}", "--name", name, "--"]
        child = context.start(VICTIM, run + context.command(), CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3", **place)
        paused_at(sync, 3, child)
        job = f"{folder}/jobs/{name}"
        before = open(job + "/job.json").read()
        for command in (
            ["cr-checkpoint", job, image], ["cr-checkpoint", "--stop", job, image],
            ["cr-checkpoint", str(child.pid), image], ["cr-migrate", job, "--to", f"unix:{servers[1]}"],
            ["cr-trace", "--seconds", "1", str(child.pid)], *([["cr-checkpoint", name, image]] if not around else []),
        ):  # fmt: skip
            ended = context.run(0, [context.tool(command[0])] + command[1:])
            refused(ended, f"belongs to user {VICTIM}", "as that user", saved)
        if child.poll() is not None or open(job + "/job.json").read() != before or os.path.exists(image):
            raise Failure(f"root's tools changed the job {name}")
        if not around:
            her = lambda *command: context.run(VICTIM, [context.tool(command[0]), *command[1:]])
            refused(her("cr-checkpoint", name, image), "start it where cr-hostd runs", "cr-run --user")
            worked(her("cr-migrate", name, "--to", f"unix:{servers[1]}"))
        open(sync + ".go.3", "w").close()
        out, errors = child.communicate(timeout=LIMIT)
        if child.returncode != 0 or out != want:
            raise Failure(f"the job {name} ended with {child.returncode}:\n{out}\n{errors}\nexpected\n{want}")
    shutil.rmtree(runtime)


@case
def rights_in_user_job(context):
    """A cr-run in the user's job starts its program there; a process with other rights than hers is named, and not saved."""
    job, image = context.lab.folder + "/job", context.lab.folder + "/image"
    run = [context.tool("cr-run"), "--user", str(VICTIM), "--job-dir", job, "--"]
    nested = worked(context.run(0, run + [context.tool("cr-run"), "--", "sh", "-c", "id -u; echo $CUDA_REMOTE_JOB_DIR"]))
    if nested.stdout.split() != [str(VICTIM), job]:
        raise Failure(f"the program in the job is not the user's, or not in the job: {nested.stdout}")
    # As sudo and passwd are.
    sleep = os.path.join(context.product, "sleep")
    shutil.copy("/bin/sleep", sleep)
    os.chmod(sleep, 0o4755)
    child = context.start(0, run + [sleep, "600"])
    harness.wait_for(lambda: os.path.exists(job + "/job.json") or child.poll() is not None, LIMIT, lambda: "the job does not run")
    refused(context.run(0, [context.tool("cr-checkpoint"), job, image]), "(sleep) has other rights than the job", str(VICTIM))
    if child.poll() is not None or os.path.exists(image):
        raise Failure("the job was disturbed, or there is an image")


HOLDS = """
import os, sys, time
held, go, out = open(sys.argv[1], "r+"), sys.argv[2], sys.argv[3]
open(go + ".ready", "w").close()
while not os.path.exists(go): time.sleep(0.02)
with open(out, "w") as f: f.write(held.read())
"""


@case
def files_of_user_job(context):
    """At a restart by root, what a user has put in the place of her job's file is opened with her rights only: a link to a
    file of root's is refused."""
    home, image = context.folder("home", 0o700, VICTIM), os.path.join(context.lab.folder, "image")
    secret, held, go, out = os.path.join(context.lab.folder, "secret"), home + "/held", home + "/go", home + "/out"
    with open(secret, "w") as f:
        f.write("of root\n")
    os.chmod(secret, 0o600)
    context.python(VICTIM, "import os, sys; open(sys.argv[1], 'w').write('of hers\\n'); os.chmod(sys.argv[1], 0o600)", held)
    job = context.lab.folder + "/job"
    child = context.start(0, [context.tool("cr-run"), "--user", str(VICTIM), "--job-dir", job, "--", PYTHON, "-c", HOLDS, held, go, out])
    harness.wait_for(lambda: os.path.exists(go + ".ready") or child.poll() is not None, LIMIT, lambda: "the job does not run")
    worked(context.run(0, [context.tool("cr-checkpoint"), "--stop", job, image]))
    child.wait(LIMIT)
    context.python(
        VICTIM, "import os, sys; os.rename(sys.argv[1], sys.argv[1] + '.away'); os.symlink(sys.argv[2], sys.argv[1]); "
        "open(sys.argv[3], 'w').close()", held, secret, go,
    )  # fmt: skip
    refused(context.run(0, [context.tool("cr-restart"), image]), "Permission denied")
    if os.path.exists(out) or open(secret).read() != "of root\n":
        raise Failure("the user has got at a file of root's")
    context.python(VICTIM, "import os, sys; os.rename(sys.argv[1] + '.away', sys.argv[1])", held)
    worked(context.run(0, [context.tool("cr-restart"), image]))
    if open(out).read() != "of hers\n" or os.stat(out).st_uid != VICTIM:
        raise Failure("the restarted job did not go on with its own file, or not as its user")


def run_one(name, options):
    if os.geteuid() != 0:
        raise Failure("users.py plays several users, which needs root")
    try:
        with harness.Lab(options.product, keep=options.keep) as lab:
            CASES[name](Context(lab, options))
    finally:
        shutil.rmtree(f"/tmp/cuda-remote-{VICTIM}", ignore_errors=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.run_cases(arguments, CASES, run_one)
