#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several users of one machine: what an attacker prepares must not reach the victim's or root's programs.

Needs root: the users are played by processes with their numbers. Python 3 standard library only.

Usage: users.py --product FOLDER --apps FOLDER [--only CASE,CASE] [--keep] [--list]
"""

import argparse
import ctypes
import json
import os
import pwd
import shutil
import signal
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
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=harness.patient(limit),
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
                self.child.wait(harness.patient(10))
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self.child.wait(harness.patient(10))


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
                [context.tool("cr-run"), "--no-check", "--server", "unix:/none", "--", PYTHON, "-c",
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
def trace_file_of_another(context):
    """What another user has put in the place of a trace stays, also where the victim could replace it; traces are closed to others."""
    home, shared = context.folder("home", 0o700, VICTIM), context.folder("open", 0o777)
    places = {"plain": "open(sys.argv[1], 'w').write('hers')", "link": "os.symlink('hers', sys.argv[1])", "fifo": "os.mkfifo(sys.argv[1])"}
    for name, text in places.items():
        path = f"{shared}/t-{name}.json"
        context.python(ATTACKER, "import os, sys; " + text, path)
        before = os.lstat(path)
        ended = worked(context.run(
            VICTIM, [context.tool("cr-run"), "--job-dir", f"{home}/{name}", "--"] + context.command(), CUDA_REMOTE_TRACE=shared + "/t-%j.json"
        ))  # fmt: skip
        if (os.lstat(path).st_ino, os.lstat(path).st_uid) != (before.st_ino, ATTACKER) or os.listdir(shared) != [f"t-{name}.json"]:
            raise Failure(f"the attacker's {name} was replaced, or files are left: {os.listdir(shared)}")
        if f"cannot write {path}" not in ended.stderr:
            raise Failure(f"nobody says that the trace is missing:\n{ended.stderr}")
        os.unlink(path)
    worked(context.run(
        VICTIM, [context.tool("cr-run"), "--job-dir", home + "/own", "--"] + context.command(), umask=0,
        CUDA_REMOTE_TRACE=home + "/own-%j.json", CUDA_REMOTE_TIMELINE=home + "/line-%j.json",
    ))  # fmt: skip
    for name in ("own-own.json", "line-own.json"):
        mode = stat.S_IMODE(os.stat(f"{home}/{name}").st_mode)
        if mode != 0o600:
            raise Failure(f"{name} has mode {mode:o}")


# What a program with the libraries says of itself.
ASKS = """
import ctypes, os
cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
print(os.getuid(), os.geteuid(), cuda.cuInit(0), cuda.cuInit(0), nvml.nvmlInit_v2())
"""
CUDA_NO_DEVICE, NVML_NO_DRIVER = 100, 9


@case
def set_user_id(context):
    """A set-user-ID program in the attacker's job obeys none of the attacker's variables, and gets no GPU."""
    home = context.folder("home", 0o700, VICTIM)
    profile = home + "/.profile"
    context.python(VICTIM, "import sys; open(sys.argv[1], 'w').write('as it was')", profile)
    program = os.path.join(context.product, "asks")
    shutil.copy(PYTHON, program)
    jobs = context.folder("jobs", 0o755)
    traces = {"CUDA_REMOTE_TRACE": home + "/.%j", "CUDA_REMOTE_TIMELINE": home + "/timeline", "CUDA_REMOTE_NVML_LOG": "1"}
    for name, owner, mode, found in (("control", ATTACKER, 0o755, [0, 0, 0]), ("profile", VICTIM, 0o4755, None)):
        os.chown(program, owner, owner)
        os.chmod(program, mode)
        run = [context.tool("cr-run"), "--user", str(ATTACKER), "--job-dir", f"{jobs}/{name}", "--", program, "-c", ASKS]
        ended = worked(context.run(0, run, **traces))
        expected = [ATTACKER, owner] + (found or [CUDA_NO_DEVICE, CUDA_NO_DEVICE, NVML_NO_DRIVER])
        if ended.stdout.split() != [str(one) for one in expected]:
            raise Failure(f"{name}: expected {expected}, got {ended.stdout}\n{ended.stderr}")
    if open(profile).read() != "as it was" or os.listdir(home) != [".profile"]:
        raise Failure(f"the attacker has changed the victim's files: {os.listdir(home)}")
    if ended.stderr.count("cuda-remote") != 1 or "rights that its caller does not have" not in ended.stderr:
        raise Failure(f"not one line says why there is no GPU:\n{ended.stderr}")


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
        "('gpu-server', 'gpu-server.new', 'job.json.new', 'connect.lock', 'stopped', 'engine-dump.log')]",
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
def slurm_folder(context):
    """The folder of a Slurm job's images, with the script that a restart runs, made beforehand by somebody else."""
    folder, script = os.path.join(context.shared, "job-77"), os.path.join(context.product, "batch")
    with open(script, "w") as f:
        f.write("#!/bin/sh\necho the own script\n")
    os.chmod(script, 0o755)
    run = [context.tool("cr-slurm-run"), "--checkpoint-dir", context.shared, "--script-line", "1", "--", script]
    own = context.folder("own", 0o700, VICTIM)
    attacks = [
        "os.mkdir(at, 0o777); open(at + '/script', 'w').write('#!/bin/sh\\necho ATTACKED\\n'); os.chmod(at + '/script', 0o755)",
        f"os.symlink({own!r}, at)",
    ]
    for user in (VICTIM, 0):
        slurm = lambda: context.run(user, run, SLURM_JOB_ID="77", XDG_RUNTIME_DIR=context.folder(f"r{time.monotonic_ns()}", 0o700, user))
        for attack in attacks:
            context.python(ATTACKER, "import os, sys; at = sys.argv[1]; " + attack, folder)
            ended = slurm()
            refused(ended, folder, "--checkpoint-dir")
            if "ATTACKED" in ended.stdout or os.listdir(own):
                raise Failure(f"the other user's script ran, or his link was followed: {ended.stdout}")
            os.unlink(folder) if os.path.islink(folder) else shutil.rmtree(folder)
        # One of the user's own that others may write to: they may have put the script there.
        os.mkdir(folder)
        os.chown(folder, user, user)
        os.chmod(folder, 0o777)
        refused(slurm(), folder, "may be written by other users", "--checkpoint-dir")
        os.rmdir(folder)
        if "the own script" not in worked(slurm()).stdout:
            raise Failure("with nothing in the way the script did not run")


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
    child.wait(harness.patient(LIMIT))
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


def has_rights_of(pid, user, groups=None):
    """Every number of the process's rights is the user's, and it has no capability."""
    facts = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status").read().splitlines() if ":" in line)
    numbers = [facts[name].split() for name in ("Uid", "Gid", "Groups")]
    if numbers != [[str(user)] * 4, [str(user)] * 4, [str(user)] if groups is None else groups]:
        raise Failure(f"process {pid} runs as {numbers}, not as {user}")
    for name in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
        if int(facts[name], 16) != 0:
            raise Failure(f"process {pid} has capabilities: {name} {facts[name]}")


def is_roots(image):
    for folder, names, leaves in os.walk(image):
        for path in [folder] + [os.path.join(folder, name) for name in names + leaves]:
            status = os.lstat(path)
            if status.st_uid != 0 or status.st_mode & 0o022 or (path == image and status.st_mode & 0o077):
                raise Failure(f"{path} is open to others: user {status.st_uid}, {stat.filemode(status.st_mode)}")


def sessions_at(context, address):
    found = json.loads(worked(context.run(VICTIM, [context.tool("cr-ps"), "--server", address, "--json"])).stdout)
    return [session["owner"] for session in found["sessions"]]


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
        return sessions_at(context, address)

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
    is_roots(image)
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
    if child.wait(harness.patient(LIMIT)) != 121 or os.path.exists(job):
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
            again.wait(harness.patient(LIMIT))
            continue
        for step in (9, 15):
            open(f"{sync}.go.{step}", "w").close()
        out, errors = again.communicate(timeout=harness.patient(LIMIT))
        if again.returncode != 0 or out != want:
            raise Failure(f"the restarted job ended with {again.returncode}:\n{out}\n{errors}\nexpected\n{want}")


@case
def managed_memory(context):
    """An ordinary user's managed memory lives on the GPU if root's server passes /dev/userfaultfd on, or with
    CUDA_REMOTE_MANAGED=protect; else it is host memory."""
    # The server admits only users that the machine knows.
    user, worker = pwd.getpwnam("nobody").pw_uid, "daemon"
    if not os.path.exists("/dev/userfaultfd"):
        raise Failure("this machine has no /dev/userfaultfd: Linux 6.1 or newer is needed")
    if open("/proc/sys/vm/unprivileged_userfaultfd").read().strip() != "0":
        raise Failure("vm.unprivileged_userfaultfd must be 0 for this test")
    program = os.path.join(context.product, "managed_random")
    shutil.copy(harness.find(context.apps, "managed_random"), program)
    command = [program, "--steps", "6"]
    # Where it lies tells what it is (docs/memory.md).
    where = """import ctypes
cuda, memory, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0 and cuda.cuMemAllocManaged(ctypes.byref(memory), ctypes.c_size_t(4 << 20), 1) == 0
print("gpu" if memory.value >= 0x220000000000 else "host")
"""
    plain = [context.tool("cr-run"), "--job-dir", context.folder("plain", 0o700, user) + "/job", "--"] + command
    # Its promise: no system call is passed managed memory.
    protect = {"CUDA_REMOTE_MANAGED": "protect", "CR_TEST_WITHOUT": "system-calls"}
    for number, (options, variables, place) in enumerate((([], {}, "host"), ([], protect, "gpu"), (["--userfaultfd"], {}, "gpu"))):
        want = worked(context.run(user, plain, **{**variables, "CUDA_REMOTE_MANAGED": "host"})).stdout
        folder = context.folder(f"server-{number}", 0o755)
        server = context.start(0, [context.tool("cr-server"), "--dir", folder, "--allow-user", str(user),
                                   "--session-user", worker] + options)  # fmt: skip
        harness.wait_for(lambda: harness.connects(folder + "/session.sock"), LIMIT, lambda: server.stderr.read())
        run = [context.tool("cr-run"), "--server", f"unix:{folder}/session.sock"]
        jobs = context.folder(f"jobs-{number}", 0o700, user)
        got = worked(context.run(user, run + ["--job-dir", jobs + "/where", "--", PYTHON, "-c", where], **variables)).stdout.strip()
        if got != place:
            raise Failure(f"with {options} and {variables} managed memory is on the {got}")
        done = worked(context.run(user, run + ["--job-dir", jobs + "/random", "--"] + command, **variables))
        if done.stdout != want:
            raise Failure(f"with {options} and {variables} managed_random printed\n{done.stdout}\nnot\n{want}")
        if harness.ACCUSES in done.stderr:
            raise Failure(f"with {options} and {variables} managed_random is accused of what it does not do:\n{done.stderr}")
        server.terminate()


def started_own(context, name, options, command, user=VICTIM, folder=None, around=(), **variables):
    """A job that the user starts by herself, and its folder."""
    job = (folder or f"/tmp/cuda-remote-{user}") + f"/jobs/{name}"
    child = context.start(user, [*around, context.tool("cr-run"), *options, "--name", name, "--", *command], **variables)
    harness.wait_for(
        lambda: os.path.exists(job + "/job.json") or child.poll() is not None, LIMIT, lambda: f"the job {name} does not run",
    )  # fmt: skip
    if child.poll() is not None:
        raise Failure(f"the job {name} has ended with {child.returncode}: {child.stderr.read()}")
    return child, job


@case
def own_job(context):
    """A user starts a job by herself, without cr-hostd, in a user namespace: by cr-run, for mounts of its own, or by
    herself. It cannot be saved, and root is told why and what to do. Root's cr-migrate and cr-trace work as that user."""
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
    for name, around, folder, place, why in (
        (f"hers-{os.getpid()}", [], None, {}, "has mounts of its own in a user namespace"),
        ("inside", ["unshare", "--user", "--map-root-user"], runtime + "/cuda-remote", {"XDG_RUNTIME_DIR": runtime},
         "namespaces of its user's own"),
    ):  # fmt: skip
        sync = f"{home}/{name}.sync"
        child, job = started_own(
            context, name, ["--server", f"unix:{servers[0]}"], context.command(), folder=folder, around=around,
            CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3", **place,
        )  # fmt: skip
        paused_at(sync, 3, child)
        before = open(job + "/job.json").read()
        for command in (
            ["cr-checkpoint", job, image], ["cr-checkpoint", "--stop", job, image],
            *([["cr-checkpoint", name, image], ["cr-checkpoint", str(child.pid), image]] if not around else []),
        ):  # fmt: skip
            refused(context.run(0, [context.tool(command[0])] + command[1:]), why, "cr-run --plain")
        if child.poll() is not None or open(job + "/job.json").read() != before or os.path.exists(image):
            raise Failure(f"root's cr-checkpoint changed the job {name}")
        if not around:
            her = lambda *command: context.run(VICTIM, [context.tool(command[0]), *command[1:]])
            refused(her("cr-checkpoint", name, image), "start it where cr-hostd runs", "cr-run --plain", "cr-run --user")
            worked(her("cr-migrate", name, "--to", f"unix:{servers[1]}"))
            if "calls" not in worked(context.run(0, [context.tool("cr-trace"), "--seconds", "0.1", name])).stdout:
                raise Failure("root's cr-trace has no table")
            worked(context.run(0, [context.tool("cr-migrate"), job, "--to", f"unix:{servers[0]}"]))
            owners = [sessions_at(context, f"unix:{server}") for server in servers]
            if owners[1] or [str(VICTIM) in owner for owner in owners[0]] != [True]:
                raise Failure(f"root's cr-migrate did not move the user's session as hers: {owners}")
            for folder, _, leaves in os.walk(job):
                for path in [folder] + [os.path.join(folder, leaf) for leaf in leaves]:
                    if os.lstat(path).st_uid != VICTIM:
                        raise Failure(f"root's tools have left {path} in the user's folder")
        open(sync + ".go.3", "w").close()
        out, errors = child.communicate(timeout=harness.patient(LIMIT))
        if child.returncode != 0 or out != want:
            raise Failure(f"the job {name} ended with {child.returncode}:\n{out}\n{errors}\nexpected\n{want}")
    shutil.rmtree(runtime)


# As where user namespaces are not allowed: unshare fails with EPERM.
NO_NAMESPACES = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
code = ctypes.create_string_buffer(struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, 272, 6, 0, 0, 0x50001, 6, 0, 0, 0x7FFF0000))
class Filter(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Filter(4, ctypes.addressof(code)))) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


@case
def own_job_saved(context):
    """A user's own job without a user namespace: root saves it, moves it, stops it and restarts it. It always has that
    user's rights, its sessions are hers, the image is root's, and the result is right."""
    home = context.folder("home", 0o700, VICTIM)
    images = context.folder("images", 0o700)
    runtime = context.folder("runtime", 0o755)
    image, tools = images + "/image", {"XDG_RUNTIME_DIR": runtime}
    server = context.start(VICTIM, [context.tool("cr-server"), "--dir", home + "/server"])
    harness.wait_for(lambda: harness.connects(home + "/server/session.sock"), LIMIT, lambda: server.stderr.read())
    want = worked(context.run(VICTIM, [context.tool("cr-run"), "--job-dir", home + "/plain", "--"] + context.command())).stdout
    root = lambda *command: worked(context.run(0, [context.tool(command[0]), *command[1:]], **tools))
    for kind, options, around in (
        ("plain", ["--plain"], []),
        ("denied", [], [PYTHON, "-c", NO_NAMESPACES]),
    ):
        name = f"{kind}-{os.getpid()}"  # no other user's job has it
        sync = f"{home}/{name}.sync"
        # The program has the preloaded library, and no variable but these.
        clean = ["env", "-i", f"CR_TEST_SYNC_FILE={sync}", "CR_TEST_PAUSE_AT=3,9,15"]
        child, job = started_own(context, name, options, clean + context.command(), around=around)
        paused_at(sync, 3, child)
        pid = json.load(open(job + "/job.json"))["pid"]
        filters = lambda: [line for line in open(f"/proc/{pid}/status") if line.startswith(("Seccomp:", "NoNewPrivs:"))]
        before = filters()
        owners = sessions_at(context, f"unix:{job}/user/server")
        if len(owners) != 1 or str(VICTIM) not in owners[0]:
            raise Failure(f"the session is not the user's: {owners}")
        refused(
            context.run(VICTIM, [context.tool("cr-checkpoint"), name, home + "/image"]), "needs root", "can save this job", job,
        )  # fmt: skip
        for which in (job, name, str(pid), str(child.pid)):
            root("cr-checkpoint", which, image)
            is_roots(image)
        if child.poll() is not None:
            raise Failure(f"the job ended at a checkpoint: {child.stderr.read()}")
        root("cr-migrate", name, "--to", f"unix:{home}/server")
        if sessions_at(context, f"unix:{home}/server") != owners:
            raise Failure("the moved session is not the user's")
        open(sync + ".go.3", "w").close()
        paused_at(sync, 9, child)
        refused(context.run(0, [context.tool("cr-restart"), image], **tools), "there is a running job", job)
        root("cr-checkpoint", "--stop", name, image)
        is_roots(image)
        if child.wait(harness.patient(LIMIT)) != 121 or os.path.exists(job):
            raise Failure(f"the stopped job ended with {child.returncode}, or has left its folder")
        refused(context.run(ATTACKER, [context.tool("cr-restart"), image]), image)

        place = f"{runtime}/cuda-remote/jobs/{name}@{VICTIM}"
        for step, where in ((9, []), (15, ["--server", f"unix:{home}/server"])):
            again = context.start(0, [context.tool("cr-restart"), image] + where, **tools)
            harness.wait_for(
                lambda: os.path.exists(place + "/job.json") or again.poll() is not None, LIMIT, lambda: "no restart",
            )  # fmt: skip
            if again.poll() is not None:
                raise Failure(f"the restart failed: {again.stderr.read()}")
            pid = json.load(open(place + "/job.json"))["pid"]
            has_rights_of(pid, VICTIM, groups=[])  # as she started it
            if filters() != before:
                raise Failure(f"the restarted job has {filters()}, it had {before}")
            if sessions_at(context, where[1] if where else f"unix:{place}/user/server") != owners:
                raise Failure("the restarted session is not the user's")
            open(f"{sync}.go.{step}", "w").close()
            if step == 9:
                # A restarted job is saved as any that root has started for a user.
                paused_at(sync, 15, again)
                root("cr-checkpoint", "--stop", f"{name}@{VICTIM}", image)
                again.wait(harness.patient(LIMIT))
        out, errors = again.communicate(timeout=harness.patient(LIMIT))
        if again.returncode != 0 or out != want:
            raise Failure(f"the restarted job ended with {again.returncode}:\n{out}\n{errors}\nexpected\n{want}")
        if os.path.exists(job) or os.path.exists(place):
            raise Failure("the restarted job has left its folders")


TREE = """
import mmap, os, socket, sys, time
go, out = sys.argv[1:]
listener = socket.create_server(("127.0.0.1", 0))
shared, memory = mmap.mmap(-1, 4096), os.memfd_create("memory")
os.ftruncate(memory, 4096)
mapped = mmap.mmap(memory, 4096)
back = os.pipe()
child = os.fork()
if child == 0:
    peer = socket.create_connection(listener.getsockname())
    while byte := peer.recv(1):
        shared[0] = mapped[0] = byte[0]
        os.write(back[1], byte)
    os._exit(5)
peer, _ = listener.accept()
numbers = os.getpid(), child  # as they were
for i in range(200):
    peer.send(bytes([i]))
    if not os.read(back[0], 1)[0] == shared[0] == mapped[0] == i: sys.exit("wrong at %d" % i)
    if i == 100:
        open(go + ".ready", "w").close()
        while not os.path.exists(go): time.sleep(0.02)
peer.close()
os.close(back[1])
print(*numbers, numbers == (os.getpid(), child), os.getuid(), os.waitpid(child, 0)[1] >> 8, file=open(out, "w"))
"""


@case
def own_job_tree(context):
    """A user's own job of several processes without CUDA, with TCP between them, is saved while it runs and when it is
    stopped; restarted by root, the processes have their numbers and what they share."""
    home, image = context.folder("home", 0o700, VICTIM), os.path.join(context.lab.folder, "image")
    go, out = home + "/go", home + "/out"
    child, job = started_own(context, "tree", ["--plain"], [PYTHON, "-c", TREE, go, out])
    harness.wait_for(lambda: os.path.exists(go + ".ready") or child.poll() is not None, LIMIT, lambda: "the job does not run")
    pid = json.load(open(job + "/job.json"))["pid"]
    worked(context.run(0, [context.tool("cr-checkpoint"), job, image]))
    worked(context.run(0, [context.tool("cr-checkpoint"), "--stop", job, image]))
    child.wait(harness.patient(LIMIT))
    open(go, "w").close()
    worked(context.run(0, [context.tool("cr-restart"), image]))
    told = open(out).read().split()
    if told[:1] != [str(pid)] or told[2:] != ["True", str(VICTIM), "5"]:
        raise Failure(f"the restarted processes say {told}, the first one was {pid}")


@case
def own_job_tool_killed(context):
    """Root's cr-checkpoint, and with it or not its cr-keeper, is killed in each step in which it has the GPU session of a
    user's own job: the job continues."""
    home, image = context.folder("home", 0o700, VICTIM), os.path.join(context.lab.folder, "image")
    sync, steps = home + "/sync", home + "/steps"
    want = worked(context.run(VICTIM, [context.tool("cr-run"), "--job-dir", home + "/plain", "--"] + context.command())).stdout
    child, job = started_own(
        context, "hers", ["--plain"], context.command(), CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3",
    )  # fmt: skip
    paused_at(sync, 3, child)
    save = [context.tool("cr-checkpoint"), job, image]

    def clear():
        if os.path.exists(steps + ".go"):
            os.unlink(steps + ".go")
        # The tool writes to it with root's rights, and with hers.
        open(steps, "w").close()
        os.chown(steps, VICTIM, VICTIM)

    def named(name):
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_named(pid, name)]

    def is_named(pid, name):
        words = harness.command_of(pid)
        return words.startswith(name) and (name == "cr-keeper" or job in words)

    clear()
    worked(context.run(0, save, CR_TEST_STEPS=steps))
    names = [line.split(" ", 1)[1] for line in open(steps).read().splitlines()]
    first, last = names.index("keep the sessions") + 1, names.index("give back 1/1") + 1
    if not first < names.index("save processes") + 1 < last:
        raise Failure(f"steps in another order: {names}")
    for number in range(first, last + 2):
        for keeper_too in (False, True):
            clear()
            saving = context.start(0, save, CR_TEST_STEPS=steps, CR_TEST_STOP_AT=str(number))
            reached = lambda: f"{number} {names[number - 1]}\n" in open(steps).read()
            harness.wait_for(lambda: reached() or saving.poll() is not None, LIMIT, lambda: f"step {number} was not reached")
            tools = named(save[0])
            keepers = [pid for pid in named("cr-keeper") if harness.parent_of(pid) in tools]
            if len(keepers) != 1:
                raise Failure(f"the keepers of {tools} are {keepers}")
            for pid in (keepers if keeper_too else []) + tools:
                os.kill(pid, signal.SIGKILL)
            open(steps + ".go", "w").close()
            if saving.wait(harness.patient(LIMIT)) == 0:
                raise Failure(f"at step {number}: the tool was not killed")
            worked(context.run(0, save))
    open(sync + ".go.3", "w").close()
    out, errors = child.communicate(timeout=harness.patient(LIMIT))
    if child.returncode != 0 or out != want:
        raise Failure(f"the job ended with {child.returncode}:\n{out}\n{errors}\nexpected\n{want}")


def remove_segments(user):
    """A user's System V memory: it outlives the programs that made it, also those of an earlier test with the same user."""
    with open("/proc/sysvipc/shm", encoding="ascii") as f:
        columns = f.readline().split()
        for line in f:
            segment = dict(zip(columns, line.split()))
            if int(segment["uid"]) == user:
                ctypes.CDLL(None).shmctl(int(segment["shmid"]), 0, None)  # IPC_RMID


@case
def own_job_named(context):
    """What of a user's own job cannot be saved is named, and the job continues."""
    remove_segments(VICTIM)
    image = os.path.join(context.lab.folder, "image")
    sleep = os.path.join(context.product, "sleep")
    shutil.copy("/bin/sleep", sleep)
    os.chmod(sleep, 0o4755)  # as sudo and passwd are
    for name, command, words in (
        ("outlived", ["sh", "-c", "(sleep 600 &); exec sleep 601"], ["(sleep) of the job has outlived"]),
        ("changed", [sleep, "600"], ["has another user's rights"]),
        ("below", ["sh", "-c", f"{sleep} 600 & exec sleep 601"], ["(sleep) has other rights than the job"]),
        ("unshared", ["sh", "-c", "unshare --user sleep 600 & exec sleep 601"], ["(sleep) has another user namespace"]),
        ("segments", [PYTHON, "-c", "import ctypes, time; ctypes.CDLL(None).shmget(0, 4096, 0o1600); time.sleep(600)"],
         ["System V memory"]),
    ):  # fmt: skip
        child, job = started_own(context, name, ["--plain"], command)
        ended = lambda: context.run(0, [context.tool("cr-checkpoint"), job, image])
        harness.wait_for(lambda: all(word in ended().stderr for word in words), 20, lambda: f"{name}: {ended().stderr}")
        refused(ended(), *words)
        if child.poll() is not None or os.path.exists(image):
            raise Failure(f"the job {name} was disturbed, or there is an image")
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(harness.patient(LIMIT))
    remove_segments(VICTIM)
    both = f"both-{os.getpid()}"
    for user in (VICTIM, ATTACKER):
        started_own(context, both, ["--plain"], ["sleep", "600"], user=user)
    refused(context.run(0, [context.tool("cr-checkpoint"), both, image]), "several users have a job", both)


@case
def own_job_hostile(context):
    """A user prepares the folder of her own job for root's tools: they refuse, and neither wait for ever nor touch what she
    may not."""
    precious = os.path.join(context.lab.folder, "precious")
    with open(precious, "w") as f:
        f.write("as it was\n")
    os.chmod(precious, 0o600)
    image = os.path.join(context.lab.folder, "image")
    home = context.folder("home", 0o700, ATTACKER)
    other, others_job = started_own(
        context, "other", ["--plain"], context.command(), CR_TEST_SYNC_FILE=context.shared + "/other", CR_TEST_PAUSE_AT="3",
    )  # fmt: skip
    paused_at(context.shared + "/other", 3, other)
    others_pid = json.load(open(others_job + "/job.json"))["pid"]
    others_agent = f"{others_job}/user/agent-{others_pid}.sock"
    assert os.path.exists(others_agent)
    listen = (
        "import os, socket, sys, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind(sys.argv[1]); "
        "os.chmod(sys.argv[1], 0o777); s.listen(9); time.sleep(600)"
    )
    others_socket, own_socket = context.shared + "/others", context.shared + "/own"
    for user, path in ((VICTIM, others_socket), (ATTACKER, own_socket)):
        listener = context.start(user, [PYTHON, "-c", listen, path])
        harness.wait_for(lambda: harness.connects(path) or listener.poll() is not None, LIMIT, lambda: "no socket")
    link = "os.path.lexists(at) and os.unlink(at); os.symlink(what, at)"
    attempts = [
        # What is done as her in the folder "at", and what root is told; nothing: the job is saved, and no harm is done.
        ("job.json", f"at += '/job.json'; {link}", precious, ["cannot read"]),
        ("fifo", "at += '/job.json'; os.unlink(at); os.mkfifo(at)", "", ["cannot read"]),
        ("long", "os.truncate(at + '/job.json', 1 << 40)", "", ["cannot read"]),
        ("of root", "rewrite(at, pid=1)", "", ["process 1,", "another user's rights"]),
        ("of another", "rewrite(at, pid=int(what))", str(others_pid), [f"process {others_pid},", "another user's rights"]),
        ("tool.lock", f"at += '/tool.lock'; {link}", precious, ["tool.lock"]),
        ("connect.lock", f"at += '/connect.lock'; {link}", precious, ["connect.lock"]),
        ("dump.lock", f"at += '/engine-dump.lock'; {link}", precious, ["engine-dump.lock"]),
        ("agent", f"at += '/user/agent-' + str(facts(at)['pid']) + '.sock'; {link}", others_agent, ["cannot connect"]),
        ("other's agent", f"at += '/user/agent-' + str(facts(at)['pid']) + '.sock'; {link}", others_socket, ["another user"]),
        ("own agent", f"at += '/user/agent-' + str(facts(at)['pid']) + '.sock'; {link}", own_socket, ["another process"]),
        ("sockets", "os.rename(at + '/user', at + '/away'); os.symlink(what, at + '/user')", others_job + "/user", []),
        ("stopped", f"at += '/stopped'; {link}", precious, None),
        ("log", f"at += '/engine-dump.log'; {link}", precious, None),
        ("more", "rewrite(at, init_pid=1, pid_namespace=str(os.stat('/proc/self/ns/pid').st_ino))", "", ["user's own"]),
        ("network", "rewrite(at, network={'address': '10.0.0.1', 'prefix': 8}, user={'id': 1, 'name': 'root'}, stand_ins="
         "[{'path': '/etc/passwd'}], directory='/etc')", "", None),
    ]  # fmt: skip
    head = (
        "import json, os, sys; at, what = sys.argv[1:]\n"
        "def facts(at): return json.load(open(at + '/job.json'))\n"
        "def rewrite(at, **fields):\n"
        "    new = facts(at)\n    new.update(fields)\n    open(at + '/job.json', 'w').write(json.dumps(new))\n"
    )
    sync = home + "/sync"
    for number, (name, text, what, words) in enumerate(attempts):
        sync = f"{home}/sync{number}"
        child, job = started_own(
            context, f"job{number}", ["--plain"], context.command(), user=ATTACKER, CR_TEST_SYNC_FILE=sync,
            CR_TEST_PAUSE_AT="3",
        )  # fmt: skip
        paused_at(sync, 3, child)
        context.python(ATTACKER, head + text, job, what)
        stop = ["--stop"] if name in ("stopped", "log") else []
        ended = context.run(0, [context.tool("cr-checkpoint"), *stop, job, image])
        if words is not None:
            refused(ended, *words)
            if child.poll() is not None or os.path.exists(image):
                raise Failure(f"{name}: the job has ended, or there is an image")
        else:
            worked(ended)
            is_roots(image)
            shutil.rmtree(image)
        if other.poll() is not None:
            raise Failure(f"{name}: the other user's job has ended: {other.stderr.read()}")
        with open(precious) as f:
            if f.read() != "as it was\n" or os.stat(precious).st_uid != 0:
                raise Failure(f"{name}: a file of root's was changed")
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(harness.patient(LIMIT))
    os.unlink(context.shared + "/other")

    # A link in the place of her folder, in which root's cr-restart is to show another one.
    sync = home + "/last"
    child, job = started_own(
        context, "last", ["--plain"], context.command(), user=ATTACKER, CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3",
    )  # fmt: skip
    paused_at(sync, 3, child)
    worked(context.run(0, [context.tool("cr-checkpoint"), "--stop", job, image]))
    child.wait(harness.patient(LIMIT))
    for target in ("/etc", others_job):
        context.python(ATTACKER, "import os, sys; os.path.lexists(sys.argv[1]) and os.unlink(sys.argv[1]); "
                       "os.symlink(sys.argv[2], sys.argv[1])", job, target)  # fmt: skip
        refused(context.run(0, [context.tool("cr-restart"), image]), job)


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


@case
def folder_of_user_job(context):
    """The folder of a job of root's for a user is the user's to list, and not that of the user's group."""
    job = context.lab.folder + "/job"
    child = context.start(0, [context.tool("cr-run"), "--user", str(VICTIM), "--job-dir", job, "--", "/bin/sleep", "600"])
    harness.wait_for(lambda: os.path.exists(job + "/job.json") or child.poll() is not None, LIMIT, lambda: "the job does not run")
    look = [PYTHON, "-c", "import os, sys; os.listdir(sys.argv[1])", job]
    for user, group, may in ((VICTIM, VICTIM, True), (VICTIM, ATTACKER, True), (ATTACKER, VICTIM, False), (ATTACKER, ATTACKER, False)):
        ended = subprocess.run(look, capture_output=True, text=True, timeout=LIMIT, cwd="/", user=user, group=group, extra_groups=[])
        if (ended.returncode == 0) != may or (not may and "Permission denied" not in ended.stderr):
            raise Failure(f"user {user} with group {group} and the job's folder: {ended.stderr or 'may list it'}")


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
    child.wait(harness.patient(LIMIT))
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
        for user in (VICTIM, ATTACKER):
            shutil.rmtree(f"/tmp/cuda-remote-{user}", ignore_errors=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.run_cases(arguments, CASES, run_one)
