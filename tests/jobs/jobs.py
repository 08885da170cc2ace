#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Jobs as people start them: environments made anew, a driver of the machine's own, terminals, and what killed jobs leave.

Needs root and CRIU. Python 3 standard library only.

Usage: jobs.py --product FOLDER --apps FOLDER [--only CASE,CASE] [--keep] [--list]
"""

import argparse
import contextlib
import fcntl
import glob
import json
import os
import pty
import random
import re
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "matrix"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "matrix"))
import harness  # noqa: E402
from harness import Failure  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = int(os.environ.get("CR_LIMIT", 60))  # seconds for anything that is waited for
PYTHON = "/usr/bin/python3"  # one that other users can run, too
USER = 1_400_000_000 + os.getpid()
CASES = {}

# A driver of the machine's own: it says so and ends the program.
MACHINE_DRIVER = """
#include <stdlib.h>
#include <unistd.h>
static void Say(void) { (void)!write(1, "MACHINE DRIVER\\n", 15); _exit(77); }
int cuInit(unsigned flags) { Say(); return flags != 0; }
int cuDriverGetVersion(int* version) { Say(); return *version; }
int cuGetProcAddress_v2(const char* name, void** result, int version, unsigned long long flags, void* status) {
  Say(); return 0;
}
int cuGetProcAddress(const char* name, void** result, int version, unsigned long long flags) { Say(); return 0; }
int nvmlInit_v2(void) { Say(); return 0; }
"""

# Loads the driver as told, and asks it for its number of devices.
LOADER = """
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
int main(int count, char** words) {
  void* library = dlopen(words[1], RTLD_NOW);
  if (!library) { printf("no library: %s\\n", dlerror()); return 2; }
  const char* init = strstr(words[1], "nvidia-ml") ? "nvmlInit_v2" : "cuInit";
  int (*call)(unsigned) = (int (*)(unsigned))dlsym(library, init);
  if (!call) { printf("no %s\\n", init); return 3; }
  printf("result %d\\n", call(0));
  return 0;
}
"""

# Linked to the driver.
LINKED = """
#include <stdio.h>
int cuInit(unsigned);
int main(void) { printf("result %d\\n", cuInit(0)); return 0; }
"""


def case(function):
    CASES[function.__name__] = function
    return function


class Context:
    def __init__(self, lab, options):
        self.lab = lab
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
        self.variables = {"CUDA_REMOTE_DRIVER": self.tool("libsoftgpu.so"), "XDG_RUNTIME_DIR": self.folder("runtime")}

    def folder(self, name, mode=0o700):
        path = os.path.join(self.lab.folder, name)
        os.mkdir(path)
        os.chmod(path, mode)
        return path

    def path(self, name):
        return os.path.join(self.lab.folder, name)

    def tool(self, name):
        return os.path.join(self.product, name)

    def environment(self, more):
        full = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "XDG_", "LD_", "CONDA"))}
        full.update(self.variables)
        full.update(more)
        return full

    def run(self, command, limit=LIMIT, user=None, expect=0, **variables):
        who = {"user": user, "group": user, "extra_groups": []} if user else {}
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=harness.patient(limit),
                env=self.environment(variables), cwd="/", **who,
            )  # fmt: skip
        except subprocess.TimeoutExpired as ended:
            raise Failure(f"{shown(command)} did not end within {limit} s:\n{ended.stdout}\n{ended.stderr}")
        if expect is not None and ended.returncode != expect:
            raise Failure(f"{shown(command)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
        return ended

    def start(self, name, command, **variables):
        env = self.environment(variables)
        for key in os.environ:
            env.setdefault(key, None)
        process = harness.Process(self.lab, name, command, env)
        return self.lab.start(process)

    def expected(self, steps=20):
        native = self.folder("native") if not os.path.isdir(self.path("native")) else self.path("native")
        link = os.path.join(native, "libcuda.so.1")
        if not os.path.islink(link):
            os.symlink(self.tool("libsoftgpu.so"), link)
        return self.run([self.program, "--steps", str(steps)], LD_LIBRARY_PATH=native).stdout

    def script(self, name, text):
        path = self.path(name)
        with open(path, "w") as f:
            f.write("#!/bin/bash\n" + text)
        os.chmod(path, 0o755)
        return path

    def compile(self, name, text, *options):
        source, path = self.path(name + ".c"), self.path(name)
        with open(source, "w") as f:
            f.write(text)
        subprocess.run(["gcc", "-o", path, source, *options], check=True, cwd=self.lab.folder)
        os.chmod(path, 0o755)
        return path

    def on_machine_with_driver(self, command):
        """`command` where /usr/local/lib has a driver and NVML of the machine's own, which the loader's cache names."""
        driver = self.path("libmachine.so")
        if not os.path.exists(driver):
            self.compile("libmachine.so", MACHINE_DRIVER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
            self.script(
                "machine",
                f"""set -e
mount -t tmpfs -o mode=0755 none /usr/local/lib
cp {driver} /usr/local/lib/libcuda.so.580.1
ln -s libcuda.so.580.1 /usr/local/lib/libcuda.so.1
ln -s libcuda.so.1 /usr/local/lib/libcuda.so
cp {driver} /usr/local/lib/libnvidia-ml.so.580.1
ln -s libnvidia-ml.so.580.1 /usr/local/lib/libnvidia-ml.so.1
cache=$(mktemp {self.lab.folder}/cache-XXXXXX)
/sbin/ldconfig -X -C $cache
chmod 644 $cache
mount --bind $cache /etc/ld.so.cache
exec "$@"
""",
            )
        return ["unshare", "--mount", "--propagation", "private", self.path("machine")] + command


def shown(command):
    return " ".join(shlex.quote(word) for word in command)


def same(what, got, want):
    if got != want:
        raise Failure(f"{what}: expected\n{want}\ngot\n{got}")


ENVIRONMENTS = {
    "env -i": "exec env -i {program}",
    "LD_LIBRARY_PATH anew": "export LD_LIBRARY_PATH=/usr/lib\nexec {program}",
    "LD_LIBRARY_PATH unset": "unset LD_LIBRARY_PATH\n{program}",
    "module script": 'module() {{ eval "export LD_LIBRARY_PATH=/opt/none/lib; export PATH=/usr/bin:/bin"; }}\nmodule load none\n{program}',
    "su -": "exec su - root -c '{program}'",
    "su": "exec su root -s /bin/sh -c '{program}'",
    "nested shells": "exec env -i bash -c 'bash --norc -c \"sh -c \\\"env -i {program}\\\"\"'",
    "launcher": "exec {python} {launcher} {program}",
    "daemon": "exec {python} {launcher} --orphan {program}",
}

# Starts its ranks as MPI's daemons do: through a process of its own, with an environment made from a list.
LAUNCHER = """
import os, subprocess, sys
words = sys.argv[1:]
orphan = words[0] == "--orphan"
if orphan: words = words[1:]
ends = os.pipe()
if os.fork() == 0:
    os.setsid()
    if orphan and os.fork(): os._exit(0)
    code = subprocess.run(words, env={"PMI_RANK": "0", "PMI_SIZE": "1", "PATH": "/usr/bin:/bin"}).returncode
    os.write(ends[1], bytes([code]))
    os._exit(0)
os.close(ends[1])
sys.exit(os.read(ends[0], 1)[0])
"""


def starts(context, steps=20):
    launcher = context.path("launcher.py")
    with open(launcher, "w") as f:
        f.write(LAUNCHER)
    program = f"{context.program} --steps {steps}"
    for name, text in ENVIRONMENTS.items():
        text = text.format(program=program, python=PYTHON, launcher=launcher)
        yield name, context.script("start-" + re.sub(r"\W+", "-", name), text + "\n")


@case
def environment(context):
    """Programs whose environment is made anew find the library and the job, on a machine without a driver."""
    want = context.expected()
    for name, script in starts(context):
        if name not in ("launcher", "daemon"):
            same(name, context.run([context.tool("cr-run"), "--", script]).stdout, want)


@case
def launchers(context):
    """Programs below a launcher that makes their environment anew, and whose parent ends."""
    want = context.expected()
    for name, script in starts(context):
        if name in ("launcher", "daemon"):
            same(name, context.run([context.tool("cr-run"), "--", script]).stdout, want)


@case
def machine_driver(context):
    """The same where the machine has a driver: by the loader's cache, by RPATH, by path, and by ldconfig -p."""
    want = context.expected()
    run = [context.tool("cr-run"), "--"]
    native = context.run(context.on_machine_with_driver([context.program, "--steps", "20"]), expect=77).stdout
    same("natively", native, "MACHINE DRIVER\n")
    for name, script in starts(context):
        same(name, context.run(context.on_machine_with_driver(run + [script])).stdout, want)
    loader = context.compile("loader", LOADER, "-ldl")
    for path in ("/usr/local/lib/libcuda.so.1", "/usr/local/lib/libcuda.so.580.1", "/usr/local/lib/libcuda.so", "libcuda.so.1",
                 "libcuda.so", "/usr/local/lib/libnvidia-ml.so.1", "libnvidia-ml.so.1"):  # fmt: skip
        for clean in ([], ["env", "-i"]):
            got = context.run(context.on_machine_with_driver(run + clean + [loader, path])).stdout
            same(f"{clean} {path}", got, "result 0\n")
    # As conda's programs: an RPATH that leads to a folder with the driver's library, stronger than LD_LIBRARY_PATH.
    os.makedirs(context.path("env/bin"))
    os.makedirs(context.path("env/lib"))
    shutil.copy(context.path("libmachine.so"), context.path("env/lib/libcuda.so.1"))
    linked = context.compile(
        "env/bin/linked", LINKED, f"{context.path('env/lib')}/libcuda.so.1", "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../lib"
    )  # fmt: skip
    got = context.run(context.on_machine_with_driver([linked]), expect=77).stdout
    same("RPATH, natively", got, "MACHINE DRIVER\n")
    got = context.run(context.on_machine_with_driver(run + [linked]), CONDA_PREFIX=context.path("env")).stdout
    same("RPATH", got, "result 0\n")
    # What tools do with the answer of ldconfig -p: take the folder.
    for wrap in (lambda command: command, context.on_machine_with_driver):
        script = context.script(
            "ask-ldconfig",
            f"folder=$(dirname $(/sbin/ldconfig -p | grep 'libcuda.so.1 ' | head -1 | sed 's/.*=> //'))\n"
            f"exec env -i {loader} $folder/libcuda.so.1\n",
        )
        same("ldconfig -p", context.run(wrap(run + [script])).stdout, "result 0\n")
    # Outside of the job nothing has changed.
    same("afterwards", context.run(context.on_machine_with_driver([loader, "libcuda.so.1"]), expect=77).stdout, "MACHINE DRIVER\n")


# A program without the dynamic loader that gives what it starts an empty environment, as BusyBox's env -i does.
STATIC_LAUNCHER = """
#include <unistd.h>
int main(int count, char** words) {
  char* none[] = {0};
  execve(words[1], words + 1, none);
  return 9;
}
"""


@case
def plain(context):
    """Without mounts (--plain), for root and for a user: programs whose environment is made anew find the library and the job."""
    want = context.expected()
    run = [context.tool("cr-run"), "--plain", "--"]
    for name, script in starts(context):
        same(name, context.run(run + [script]).stdout, want)

    # cr-run finds the job it is in, and what belongs to another job is that one's alone.
    nested = 'echo "$LD_PRELOAD"'
    inside = context.script("inside", f"{nested}\nenv -i {context.tool('cr-run')} -- bash -c '{nested}'\n")
    lines = context.run(run + [inside]).stdout.splitlines()
    same("cr-run in the job", len(set(lines)), 1)
    for plain_too in ([], ["--plain"]):
        other = context.path("other" + "-plain" * len(plain_too))
        shows = context.script("shows", 'echo "$LD_PRELOAD ${LD_LIBRARY_PATH%%:*}"\n')
        inner = [context.tool("cr-run"), "--job-dir", other, *plain_too, "--", "env", "-i", shows]
        outer = [context.tool("cr-run"), "--job-dir", context.path("outer"), "--plain", "--"]
        library = f"{other}/lib/libcuda-remote-preload.so {other}/lib\n"
        same(f"another job {plain_too}", context.run(outer + inner).stdout, library if plain_too else " \n")

    home = context.folder("home")
    os.chown(home, USER, USER)
    run = [context.tool("cr-run"), "--job-dir", home + "/job", "--plain", "--"]
    for name, script in starts(context):
        if not name.startswith("su"):
            same(f"{name}, as a user", context.run(run + [script], user=USER).stdout, want)

    # A folder that LD_PRELOAD cannot name.
    spaced = context.run([context.tool("cr-run"), "--job-dir", context.path("a b"), "--plain", "--", context.program, "--steps", "20"])
    same("a space in the job's folder", spaced.stdout, want)
    if "--job-dir" not in spaced.stderr or "ERROR" in spaced.stderr:
        raise Failure(f"the message does not help: {spaced.stderr}")


@case
def plain_machine_driver(context):
    """The same where the machine has a driver: by the loader's cache, by path, and by ldconfig -p; and what does find it."""
    want = context.expected()
    run = [context.tool("cr-run"), "--plain", "--"]
    here = lambda command, **more: context.run(context.on_machine_with_driver(command), **more).stdout
    for name, script in starts(context):
        same(name, here(run + [script]), want)
    loader = context.compile("loader", LOADER, "-ldl")
    for path in ("/usr/local/lib/libcuda.so.1", "/usr/local/lib/libcuda.so.580.1", "/usr/local/lib/libcuda.so", "libcuda.so.1",
                 "libcuda.so", "/usr/local/lib/libnvidia-ml.so.1", "libnvidia-ml.so.1"):  # fmt: skip
        for clean in ([], ["env", "-i"]):
            same(f"{clean} {path}", here(run + clean + [loader, path]), "result 0\n")
    script = context.script(
        "ask-ldconfig",
        f"folder=$(dirname $(/sbin/ldconfig -p | grep 'libcuda.so.1 ' | head -1 | sed 's/.*=> //'))\n"
        f"exec env -i {loader} $folder/libcuda.so.1\n",
    )
    same("ldconfig -p", here(run + [script]), "result 0\n")
    os.makedirs(context.path("env/bin"))
    os.makedirs(context.path("env/lib"))
    shutil.copy(context.path("libmachine.so"), context.path("env/lib/libcuda.so.1"))
    library = f"{context.path('env/lib')}/libcuda.so.1"
    runpath = context.compile("env/bin/runpath", LINKED, library, "-Wl,--enable-new-dtags,-rpath,$ORIGIN/../lib")
    same("RUNPATH, natively", here([runpath], expect=77), "MACHINE DRIVER\n")
    same("RUNPATH", here(run + ["env", "-i", runpath]), "result 0\n")

    # What docs/tools.md says that it does not reach.
    rpath = context.compile("env/bin/rpath", LINKED, library, "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../lib")
    same("RPATH", here(run + [rpath], expect=77), "MACHINE DRIVER\n")
    preload = f"LD_PRELOAD=$CUDA_REMOTE_JOB_DIR/lib/libcuda.so.1 exec {rpath}"
    same("RPATH, with the library preloaded", here(run + ["bash", "-c", preload]), "result 0\n")
    static = context.compile("static-launcher", STATIC_LAUNCHER, "-static")
    same("a static program", here(run + [static, context.program], expect=77), "MACHINE DRIVER\n")
    same("afterwards", here([loader, "libcuda.so.1"], expect=77), "MACHINE DRIVER\n")


# Waits for a byte on a pipe by an io_uring if there is one, else by poll, as libuv and others choose; runs its arguments as
# a program; and waits again, by what it had chosen at first.
WAITER = """
#define _GNU_SOURCE
#include <linux/io_uring.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
static int ring = -1;
static struct io_uring_params facts;
static char *queue, *entries;
static void Wait(int fd) {
  char byte;
  if (ring < 0) {
    struct pollfd waiting = {fd, POLLIN, 0};
    if (poll(&waiting, 1, -1) != 1 || read(fd, &byte, 1) != 1) _exit(2);
    return;
  }
  struct io_uring_sqe* entry = (struct io_uring_sqe*)entries;
  memset(entry, 0, sizeof *entry);
  entry->opcode = IORING_OP_READ;
  entry->fd = fd;
  entry->addr = (unsigned long)&byte;
  entry->len = 1;
  unsigned* tail = (unsigned*)(queue + facts.sq_off.tail);
  ((unsigned*)(queue + facts.sq_off.array))[*tail & *(unsigned*)(queue + facts.sq_off.ring_mask)] = 0;
  __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
  if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1) _exit(3);
}
int main(int count, char** words) {
  int ends[2], status;
  if (pipe(ends) != 0) return 4;
  ring = syscall(SYS_io_uring_setup, 4, &facts);
  if (ring >= 0) {
    queue = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    entries = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    if (queue == MAP_FAILED || entries == MAP_FAILED) return 5;
  }
  printf("waits by %s\\n", ring < 0 ? "poll" : "io_uring");
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    if (ring >= 0) close(ring);
    execv(words[1], words + 1);
    _exit(6);
  }
  if (write(ends[1], "x", 1) != 1) return 7;
  Wait(ends[0]);
  if (waitpid(child, &status, 0) != child || status != 0) return 8;
  if (write(ends[1], "x", 1) != 1) return 9;
  Wait(ends[0]);
  printf("waited\\n");
  return 0;
}
"""


@case
def io_uring(context):
    """A program that uses io_uring where there is one finds none and is saved; with --io-uring it has one and is refused by name."""
    waiter = context.compile("waiter", WAITER)
    if context.run([waiter, "/bin/true"]).stdout != "waits by io_uring\nwaited\n":
        raise Failure("this machine has no io_uring, which this test needs")
    run = [context.tool("cr-run")]
    same("in a job", context.run(run + ["--", waiter, "/bin/true"]).stdout, "waits by poll\nwaited\n")
    nested = run + ["--"] + run + ["--", "env", "-i", waiter, "/bin/true"]
    same("in a job in a job", context.run(nested).stdout, "waits by poll\nwaited\n")
    same("--io-uring", context.run(run + ["--io-uring", "--", waiter, "/bin/true"]).stdout, "waits by io_uring\nwaited\n")
    # A job that cannot be saved anyway is left alone: by its wish, or because its user is not root.
    same("--plain", context.run(run + ["--plain", "--", waiter, "/bin/true"]).stdout, "waits by io_uring\nwaited\n")
    home = context.folder("home")
    os.chown(home, USER, USER)
    ordinary = context.run(run + ["--job-dir", home + "/job", "--", waiter, "/bin/true"], user=USER)
    same("not root", ordinary.stdout, "waits by io_uring\nwaited\n")

    # Programs with the setuid bit gain rights as before.
    who = context.compile("who", "#include <stdio.h>\n#include <unistd.h>\nint main() { printf(\"%d\\n\", (int)geteuid()); }\n")
    os.chmod(who, 0o4755)
    drop = [PYTHON, "-c", f"import os, sys; os.setgid({USER}); os.setuid({USER}); os.execv(sys.argv[1], sys.argv[1:])"]
    same("setuid, outside", context.run(drop + [who]).stdout, "0\n")
    same("setuid, in a job", context.run(run + ["--"] + drop + [who]).stdout, "0\n")

    # Saved, restarted, saved again and restarted: the filter is there again each time.
    variables = f"CR_TEST_SYNC_FILE={context.path('waiting.sync')} CR_TEST_PAUSE_AT=5,12"
    around = ("waits by poll\n", "waited\n")
    saved_and_restarted(context, "waiting", f"env -i {variables} {waiter} {context.program} --steps 30", around=around)

    # With one, the job is refused, and goes on.
    sync, job = context.path("sync"), context.path("refused.job")
    having = context.start(
        "having", run + ["--io-uring", "--job-dir", job, "--", waiter, context.program, "--steps", "30"],
        CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="5", CUDA_REMOTE_TRACE=context.path("trace"),
    )  # fmt: skip
    harness.wait_for(lambda: os.path.exists(sync) and "paused 5" in open(sync).read(), LIMIT, having.describe)
    refused = context.run([context.tool("cr-checkpoint"), job, context.path("refused")], expect=1)
    if not re.search(r"waiter \(PID \d+\) uses io_uring.*cr-run --io-uring.*the job continues", refused.stderr):
        raise Failure(f"the message does not help: {refused.stderr}")
    open(sync + ".go.5", "w").close()
    having.expect_success(LIMIT)


@case
def other_user(context):
    """A process of root's job that runs as another user is told why it has no GPU; it does not take the machine's."""
    loader = context.compile("loader", LOADER, "-ldl")
    switch = [PYTHON, "-c", f"import os, sys; os.setgid({USER}); os.setuid({USER}); os.execv(sys.argv[1], sys.argv[1:])"]
    command = [context.tool("cr-run"), "--"] + switch + [loader, "libcuda.so.1"]
    ended = context.run(["env", f"PATH={os.environ['PATH']}"] + context.on_machine_with_driver(command), expect=None)
    if "MACHINE" in ended.stdout or not re.search(r"result [1-9]", ended.stdout):
        raise Failure(f"expected an error of cuda-remote's library:\n{ended.stdout}\n{ended.stderr}")
    if "user" not in ended.stderr:
        raise Failure(f"the message does not say that it is another user's process:\n{ended.stderr}")


@case
def ordinary_user(context):
    """The same for a user who is not root, in a user namespace; and its own numbers and rights stay."""
    want = context.expected()
    home = context.folder("home")
    os.chown(home, USER, USER)
    os.chmod(home, 0o700)
    run = [context.tool("cr-run"), "--job-dir", home + "/job", "--"]
    probe = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10020000) != 0)"
    if context.run([PYTHON, "-c", probe], user=USER, expect=None).returncode:
        raise Failure("ordinary users may have no user namespaces here, which this test needs")
    for name, script in starts(context):
        if "su" in name or "python" in open(script).read():
            continue
        same(name, context.run(run + [script], user=USER).stdout, want)
    same("numbers", context.run(run + ["sh", "-c", "id -u; id -g"], user=USER).stdout, f"{USER}\n{USER}\n")
    # Files are written as by the user outside.
    context.run(run + ["sh", "-c", f"umask 077; echo x > {home}/file"], user=USER)
    facts = os.stat(home + "/file")
    same("owner", (facts.st_uid, facts.st_gid), (USER, USER))


def saved_and_restarted(context, name, command, wrap=lambda command: command, times=1, around=("", ""),
                        between=lambda time: None, **variables):
    """Saves the job in the middle, restarts it, and does so once more: its output is that of so many runs. `between` is
    called while the job is an image only, with the number of that time."""
    want = around[0] + context.expected(30) * times + around[1]
    job, image = context.path(name + ".job"), context.path(name + ".image")
    out, sync = context.path(name + ".text"), context.path(name + ".sync")
    script = context.script(name + "-start", f"exec >{out} 2>{out}.err\n{command}\n")
    child = context.start(name, wrap([context.tool("cr-run"), "--job-dir", job, "--", script]), **variables)
    paused = lambda step: os.path.exists(sync) and f"paused {step}" in open(sync).read()
    harness.wait_for(lambda: paused(5) or not child.running(), LIMIT, lambda: f"no step 5: {child.describe()}")
    if not paused(5):
        raise Failure(f"the job has ended: {child.describe()} {open(out + '.err').read()}")
    context.run([context.tool("cr-checkpoint"), "--stop", job, image])
    child.wait(LIMIT)
    open(sync + ".go.5", "w").close()
    between(1)
    restarted = context.start(name + "-again", wrap([context.tool("cr-restart"), image]), **variables)
    harness.wait_for(lambda: paused(12) or not restarted.running(), LIMIT, lambda: f"no step 12: {restarted.describe()}")
    if not paused(12):
        raise Failure(f"the restarted job has ended: {restarted.describe()} {open(out + '.err').read()}")
    # A restarted job is saved as well.
    context.run([context.tool("cr-checkpoint"), "--stop", job, image])
    restarted.wait(LIMIT)
    open(sync + ".go.12", "w").close()
    between(2)
    last = context.start(name + "-last", wrap([context.tool("cr-restart"), image]), **variables)
    last.expect_success(LIMIT)
    same(name, open(out).read(), want)


@case
def restart_without_environment(context):
    """A job whose programs have another environment is saved and restarted; processes started later find it, too."""
    sync = context.path("clean.sync")
    program = f"env -i CR_TEST_SYNC_FILE={sync} CR_TEST_PAUSE_AT=5,12 {context.program} --steps 30"
    # The second one begins after both restarts.
    saved_and_restarted(context, "clean", f"{program}\nenv -i {context.program} --steps 30", times=2)


@case
def nested(context):
    """What cr-run starts in a job, once more in that or with another environment, is of this job, and is saved with it."""
    sync, run = context.path("nested.sync"), context.tool("cr-run")
    first = f"{run} -- env -i {run} -- env CR_TEST_SYNC_FILE={sync} CR_TEST_PAUSE_AT=5,12 {context.program} --steps 30"
    # Both at once; the second one's output follows the first one's.
    both = f"{run} -- {context.program} --steps 30 >{context.path('beside')} & {first}; wait; cat {context.path('beside')}"
    saved_and_restarted(context, "nested", f"{both}\n{run} -- {context.program} --steps 30", times=3)


@case
def namespaces(context):
    """Processes in namespaces of their own, as in a container or in a job that is started in this one, are refused by name."""
    run, ready = context.tool("cr-run"), context.path("ready")
    alone = f"env -u CUDA_REMOTE_JOB_DIR -u CUDA_REMOTE_SERVER {run} --name apart --no-check --server unix:/none --"
    for name, apart in (("PID", "unshare --pid --fork"), ("PID", alone), ("uts", "unshare --uts"), ("user", "unshare --user"),
                        ("ipc", "unshare --ipc"), ("mnt", "unshare --mount"), ("net", "unshare --net")):  # fmt: skip
        job, image = context.path("job"), context.path("image")
        inner = f"touch {ready}; while [ -e {ready} ]; do sleep 0.05; done"
        child = context.start("outer", [run, "--no-check", "--server", "unix:/none", "--job-dir", job, "--", "sh", "-c", f"{apart} sh -c '{inner}'; exit 5"])
        there = lambda: os.path.exists(ready) and os.path.exists(job + "/job.json")
        harness.wait_for(lambda: there() or not child.running(), LIMIT, child.describe)
        ended = context.run([context.tool("cr-checkpoint"), job, image], expect=1)
        if f"is in a {name} namespace of its own" not in ended.stderr or "CRIU" in ended.stderr:
            raise Failure(f"{apart}: it is not said what is refused, or in CRIU's words: {ended.stderr}")
        os.unlink(ready)
        same(f"{apart}: the job's exit code", child.wait(LIMIT), 5)


@case
def restart_on_machine_with_driver(context):
    """A program that has loaded the library in the place of the machine's driver, by its path, is saved and restarted."""
    context.on_machine_with_driver([])
    sync = context.path("driver.sync")
    program = f"env -i CR_TEST_SYNC_FILE={sync} CR_TEST_PAUSE_AT=5,12 {context.program} --steps 30"
    saved_and_restarted(context, "driver", program, context.on_machine_with_driver)


@case
def upgraded(context):
    """Images survive an upgrade that replaces the client library, and one that puts all of cuda-remote elsewhere."""
    sync, program = context.path("upgraded.sync"), context.path("globals")
    shutil.copy(context.program, program)
    old = os.path.realpath(context.tool("libcuda-remote.so"))
    os.chmod(old, 0o700)  # as in a clone that is closed to others
    image = context.path("upgraded.image")

    def upgrade(time):
        listed = json.loads(context.run([context.tool("cr-inspect"), "--json", image]).stdout)["needs"]
        kept = [file for file in listed["files"] if "kept" in file]
        kept.sort(key=lambda file: file["kept"])
        names = ["libcuda-remote-preload.so", "libcuda-remote.so"]
        if [file["kept"] for file in kept] != ["client/kept/" + name for name in names] or not all("build_id" in file for file in kept):
            raise Failure(f"the image has no copy of the client library, or of the preloaded one: {listed}")
        libc = [file for file in listed["files"] if os.path.basename(file["path"]) == "libc.so.6"]
        if len(libc) != 1 or "build_id" not in libc[0] or not {"kernel", "engine_version"} <= listed.keys():
            raise Failure(f"the image does not say what it needs: {listed}")
        if time == 1:
            # As a package manager does it: another file under the same name.
            for name in ("libcuda-remote.so", "libcuda-remote-nvml.so", "libcuda-remote-preload.so"):
                path = context.tool(name)
                shutil.copy(path, path + ".new")
                with open(path + ".new", "ab") as f:
                    f.write(b"another version")
                os.rename(path + ".new", path)
            same("the path in the first image", kept[1]["path"], old)
        else:
            os.rename(context.product, context.product + "-2")
            context.product += "-2"
            context.variables["CUDA_REMOTE_DRIVER"] = context.tool("libsoftgpu.so")

    # As a program of a user's own job has it.
    preload = "LD_PRELOAD=$CUDA_REMOTE_JOB_DIR/lib/libcuda-remote-preload.so"
    command = f"{preload} CR_TEST_SYNC_FILE={sync} CR_TEST_PAUSE_AT=5,12 {program} --steps 30"
    saved_and_restarted(context, "upgraded", command, between=upgrade)


def churns(context, kind, *options, times=6):
    """A job whose processes and connections come and go is saved at any moment: nothing of it is lost or repeated, and it
    is never refused for what passes by itself."""
    program = [PYTHON, os.path.join(HERE, "churn.py"), kind]
    job, image, stop = context.path(kind + ".job"), context.path(kind + ".image"), context.path(kind + ".stop")
    out = context.path(kind + ".text")
    command = [context.tool("cr-run"), "--job-dir", job, "--output", out, *options, "--", *program, stop]
    lines = lambda: open(out).read().count("\n") if os.path.exists(out) else 0
    process = context.start(kind, command)
    moments = random.Random(7)

    def wait_for_more():
        before = lines()
        harness.wait_for(lambda: lines() > before or not process.running(), LIMIT, lambda: f"no more lines: {process.describe()}")

    for time_ in range(times):
        wait_for_more()
        time.sleep(moments.uniform(0, 0.1))
        ends = ["--stop"] if time_ % 2 else []
        context.run([context.tool("cr-checkpoint"), *ends, job, image])
        if ends:
            process.wait(LIMIT)
            process = context.start(f"{kind}-{time_}", [context.tool("cr-restart"), image])
            wait_for_more()
        shutil.rmtree(image)
    open(stop, "w").close()
    process.expect_success(LIMIT)
    same(kind, open(out).read(), context.run([*program, str(lines())]).stdout)


@case
def churn(context):
    """Processes, programs that are just starting, and connections."""
    for kind in ("shells", "forks", "pairs", "connections", "signals"):
        churns(context, kind)


@case
def churn_orphans(context):
    """Processes that have lost their parents."""
    churns(context, "orphans", "--adopt")


@case
def replaced_file(context):
    """A file that the job has open and somebody has replaced comes back as it was. The new file of that name is left alone.
    So does a file of /proc that tells of a process of the job."""
    path = context.path("replaced.data")
    variables = f"CR_TEST_SYNC_FILE={context.path('replaced.sync')} CR_TEST_PAUSE_AT=5,12"
    command = f"""printf 'old contents\\n' > {path}
exec 3<> {path} 4< /proc/self/status
echo new > {path}.new
mv {path}.new {path}
{variables} {context.program} --steps 30
cat - {path} <&3
head -n 1 <&4
"""
    saved_and_restarted(context, "replaced", command, around=("", "old contents\nnew\nName:\treplaced-start\n"))
    same("the new file", open(path).read(), "new\n")


@case
def bound(context):
    """A job that is bound to a processor is so after a restart, and again after the next one."""
    processors = os.sched_getaffinity(0)
    if len(processors) < 2:
        raise Failure("this machine has one processor only; the test needs two")
    one = max(processors)
    variables = f"CR_TEST_SYNC_FILE={context.path('bound.sync')} CR_TEST_PAUSE_AT=5,12"
    command = f"""taskset -p -c {one} $$ > /dev/null
{variables} {context.program} --steps 30
grep Cpus_allowed_list /proc/self/status
"""
    # Its GPU memory is back long before the processes are.
    slow = context.script("slow-criu", f'[[ " $* " != *" restore "* ]] || sleep 1\nexec {harness.criu_here()} "$@"\n')
    saved_and_restarted(context, "bound", command, around=("", f"Cpus_allowed_list:\t{one}\n"), CUDA_REMOTE_CRIU=slow)


# Uses the GPU with its standard streams closed, and prints all the time until FOLDER/go is there.
CLOSED = """
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static void Report(const char* folder, const char* name, const char* text) {
  char path[4096], part[4096];
  snprintf(path, sizeof(path), "%s/%s", folder, name);
  snprintf(part, sizeof(part), "%s.part", path);
  FILE* file = fopen(part, "w");
  fputs(text, file);
  fclose(file);
  rename(part, path);
}
int main(int count, char** words) {
  for (int fd = 0; fd < 3; ++fd) close(fd);
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
  int (*create)(void**, unsigned, int) = (int (*)(void**, unsigned, int))dlsym(cuda, "cuCtxCreate_v2");
  int (*allocate)(unsigned long long*, size_t) = (int (*)(unsigned long long*, size_t))dlsym(cuda, "cuMemAlloc_v2");
  int (*set)(unsigned long long, int, size_t) = (int (*)(unsigned long long, int, size_t))dlsym(cuda, "cuMemsetD8_v2");
  int (*copy)(void*, unsigned long long, size_t) = (int (*)(void*, unsigned long long, size_t))dlsym(cuda, "cuMemcpyDtoH_v2");
  void* context;
  unsigned long long memory;
  char go[4096], got[4096], want[4096], text[100];
  if (init(0) || create(&context, 0, 0) || allocate(&memory, sizeof(got)) || set(memory, 7, sizeof(got))) return 1;
  memset(want, 7, sizeof(want));
  snprintf(go, sizeof(go), "%s/go", words[1]);
  int result = 0, same = 1;
  for (int round = 0; result == 0 && (round < 20 || access(go, F_OK) != 0); ++round) {
    for (int fd = 0; fd < 3; ++fd) result -= write(fd, "nobody reads this\\n", 18) >= 0;
    if (result == 0) result = copy(got, memory, sizeof(got));
    same = same && memcmp(got, want, sizeof(got)) == 0;
    if (round == 10) Report(words[1], "ready", "");
    usleep(1000);
  }
  snprintf(text, sizeof(text), "result %d, same %d", result, same);
  Report(words[1], "result", text);
  return 0;
}
"""


@case
def closed_streams(context):
    """A program that has closed its standard streams uses the GPU, is saved and restarted. What it prints goes nowhere."""
    folder = context.folder("closed")
    program, job, image = context.compile("closes", CLOSED, "-ldl"), context.path("closed.job"), context.path("closed.image")
    result = os.path.join(folder, "result")
    child = context.start("closes-first", [context.tool("cr-run"), "--job-dir", job, "--", program, folder])
    harness.wait_for(lambda: os.path.exists(folder + "/ready") or not child.running(), LIMIT, child.describe)
    if child.running():
        context.run([context.tool("cr-checkpoint"), job, image])
    open(folder + "/go", "w").close()
    child.expect_success(LIMIT)
    same("the first run", open(result).read(), "result 0, same 1")
    os.unlink(result)
    context.start("closes-again", [context.tool("cr-restart"), image]).expect_success(LIMIT)
    same("the restarted one", open(result).read(), "result 0, same 1")


@case
def missing_files(context):
    """What an image needs and this machine lacks is named before anything is started; the image stays of use."""
    sync, program = context.path("missing.sync"), context.path("globals")
    library = context.compile("liblinked.so", "int linked(void) { return 1; }\n", "-shared", "-fPIC")
    shutil.copy(context.program, program)
    image = context.path("missing.image")
    libstdcpp = subprocess.run(["ldd", program], stdout=subprocess.PIPE, text=True).stdout
    libstdcpp = [line.split()[2] for line in libstdcpp.splitlines() if "libstdc++" in line][0]

    def take_away(time):
        if time != 1:
            return
        restart = [context.tool("cr-restart"), image]
        # The library is gone, then another version, then there again.
        away = library + ".away"
        os.rename(library, away)
        refused = context.run(restart, expect=125).stderr
        if f"{library} is not on this machine" not in refused or "CRIU" in refused:
            raise Failure(f"the missing library is not named: {refused}")
        inspected = context.run([context.tool("cr-inspect"), "--files-here", image], expect=3).stdout
        if f"{library} is not on this machine" not in inspected or libstdcpp in inspected:
            raise Failure(f"cr-inspect does not name the missing library alone: {inspected}")
        context.compile("liblinked.so", "int linked(void) { return 2; }\n", "-shared", "-fPIC")
        refused = context.run(restart, expect=125).stderr
        if f"{library} is another version: build id" not in refused:
            raise Failure(f"the other library is not named: {refused}")
        os.rename(away, library)
        context.run([context.tool("cr-inspect"), "--files-here", image])

    command = f"LD_PRELOAD={library} CR_TEST_SYNC_FILE={sync} CR_TEST_PAUSE_AT=5,12 {program} --steps 30"
    saved_and_restarted(context, "missing", command, between=take_away)


CONNECTED = """
import os, socket, subprocess, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect(sys.argv[1])
sys.exit(subprocess.call(sys.argv[2:], close_fds=False))
"""


@case
def connected_to_others(context):
    """A connection with a program outside of the job is named before the job is stopped, with what to do; the job continues."""
    want = context.expected(30)
    path, sync, image = context.path("other.sock"), context.path("connected.sync"), context.path("connected.image")
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    other.bind(path)
    other.listen(1)
    script = context.path("connected.py")
    with open(script, "w") as f:
        f.write(CONNECTED)
    child = context.start(
        "connected", [context.tool("cr-run"), "--name", "connected", "--", PYTHON, script, path, context.program, "--steps", "30"],
        CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="5", CUDA_REMOTE_TRACE=context.path("trace"),
    )  # fmt: skip
    harness.wait_for(lambda: os.path.exists(sync) and "paused 5" in open(sync).read(), LIMIT, child.describe)
    accepted = other.accept()[0]
    refused = context.run([context.tool("cr-checkpoint"), "connected", image], expect=1).stderr
    for text in ("has a connection to", f"(PID {os.getpid()})", f"at {path}", "close the connection"):
        if text not in refused:
            raise Failure(f"cr-checkpoint does not say {text!r}: {refused}")
    if "CRIU" in refused or "unix" in refused or os.path.exists(image) or os.path.exists(image + ".partial"):
        raise Failure(f"the checkpoint was begun, or its message has CRIU's words: {refused}")
    open(sync + ".go.5", "w").close()
    child.expect_success(LIMIT)
    same("connected", child.stdout().decode(), want)
    accepted.close()
    other.close()


@case
def without_cr_run(context):
    """A process that was not started by cr-run, but has the library and CUDA_REMOTE_JOB_DIR, is traced and moved."""
    want = context.expected(30)
    servers = []
    for name in ("first", "second"):
        server = context.start(name, [context.tool("cr-server"), "--dir", context.folder(name + ".server")])
        path = context.path(name + ".server/session.sock")
        harness.wait_for(lambda: harness.connects(path), LIMIT, server.describe)
        servers.append("unix:" + path)
    library, folder, sync = context.folder("library"), context.folder("own"), context.path("own.sync")
    os.symlink(context.tool("libcuda-remote.so"), os.path.join(library, "libcuda.so.1"))
    child = context.start(
        "plain", [context.program, "--steps", "30"], LD_LIBRARY_PATH=library, CUDA_REMOTE_SERVER=servers[0],
        CUDA_REMOTE_JOB_DIR=folder, CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="5,12", CR_TEST_STEP_MS="50",
    )  # fmt: skip
    paused = lambda step: lambda: os.path.exists(sync) and f"paused {step}" in open(sync).read()
    harness.wait_for(paused(5), LIMIT, child.describe)
    refused = context.run([context.tool("cr-checkpoint"), folder, context.path("own.image")], expect=4).stderr
    if "cr-run did not start it" not in refused:
        raise Failure(f"cr-checkpoint does not say why: {refused}")
    context.run([context.tool("cr-migrate"), folder, "--to", servers[1]])
    sessions = json.loads(context.run([context.tool("cr-ps"), "--server", servers[1], "--json"]).stdout)["sessions"]
    if len(sessions) != 1:
        raise Failure(f"the process is not on the second server: {sessions}")
    trace = context.start("trace", [context.tool("cr-trace"), str(child.pid), "--seconds", "5"])
    # It sleeps while the process records.
    harness.wait_for(lambda: harness.sleeps(trace.pid), LIMIT, trace.describe)
    open(sync + ".go.5", "w").close()
    trace.expect_success(LIMIT)
    if "cuLaunchKernel" not in trace.stdout().decode():
        raise Failure(f"the trace has no launches: {trace.stdout().decode()}")
    harness.wait_for(paused(12), LIMIT, child.describe)
    context.run([context.tool("cr-migrate"), str(child.pid), "--to", servers[0]])
    open(sync + ".go.12", "w").close()
    child.expect_success(LIMIT)
    same("plain", child.stdout().decode(), want)
    if os.path.exists(os.path.join(folder, "job.json")):
        raise Failure("the tools have made a job of it")


class Talker:
    """A job that writes before its checkpoint at step 5 and afterwards, and stands at step 12, too."""

    def __init__(self, context, name):
        self.context, self.name = context, name
        self.sync, self.job, self.image = (context.path(f"{name}.{part}") for part in ("sync", "job", "image"))
        self.script = context.script(
            name + "-talks",
            f"echo begin\nCR_TEST_SYNC_FILE={self.sync} CR_TEST_PAUSE_AT=5,12 {context.program} --steps 30\necho end\n",
        )
        self.rest = context.expected(30) + "end\n"
        self.whole = "begin\n" + self.rest

    def run(self, *options, **how):
        tool = self.context.tool("cr-run")
        return self.start([tool, "--job-dir", self.job, *options, "--", self.script], "", 5, **how)

    def restart(self, *options, suffix="-again", step=12, **how):
        return self.start([self.context.tool("cr-restart"), self.image, *options], suffix, step, **how)

    def start(self, command, suffix, step, out=None):
        env = self.context.environment({})
        for key in os.environ:
            env.setdefault(key, None)
        if out:  # as a shell does it
            command = ["sh", "-c", f'exec "$@" >{out}', "sh"] + command
        child = self.context.lab.start(harness.Process(self.context.lab, self.name + suffix, command, env))
        paused = lambda: os.path.exists(self.sync) and f"paused {step}" in open(self.sync).read()
        harness.wait_for(lambda: paused() or not child.running(), LIMIT, child.describe)
        if not child.running():
            raise Failure(f"{child.name} has ended: {child.describe()}")
        return child

    def refused(self, *options):
        return self.context.run([self.context.tool("cr-restart"), self.image, *options], expect=125).stderr

    def go(self, step):
        open(f"{self.sync}.go.{step}", "w").close()

    def again(self):
        """Forgets the steps that were made after the checkpoint."""
        lines = open(self.sync).read().split("\n")
        with open(self.sync, "w") as f:
            f.write("\n".join(lines[: lines.index("paused 5") + 1]) + "\n")
        if os.path.exists(self.sync + ".go.12"):
            os.unlink(self.sync + ".go.12")


def says(text, *words):
    for word in words:
        if word not in text:
            raise Failure(f"{word!r} is not said: {text}")


@case
def own_outputs(context):
    """--output, --error and --append: a file is one job's own, is cut back as such, and can be exchanged at a restart."""
    out, errors = context.path("own.text"), context.path("own.errors")
    run = [context.tool("cr-run"), "--job-dir", context.path("small.job"), "--output", out]
    context.run(run + ["--error", errors, "--", "sh", "-c", "echo one; echo two >&2"])
    same("output", open(out).read(), "one\n")
    same("error", open(errors).read(), "two\n")
    context.run(run + ["--error", out, "--append", "--", "sh", "-c", "echo three; echo four >&2"])
    same("both, appended", open(out).read(), "one\nthree\nfour\n")
    context.run(run + ["--", "sh", "-c", "echo five"])
    same("emptied", open(out).read(), "five\n")

    talker = Talker(context, "own")
    child = talker.run("--output", out, "--error", out)
    says(context.run(run + ["--", "echo", "lost"], expect=125).stderr, out, "is the output of another running job")
    same("the other job's file", open(out).read(), "begin\n")
    context.run([context.tool("cr-checkpoint"), talker.job, talker.image])
    talker.go(5)
    talker.go(12)
    child.expect_success(LIMIT)
    same("the whole run", open(out).read(), talker.whole)
    # All that is more than at the checkpoint is the job's own.
    talker.again()
    says(talker.refused(), out, "has grown since the checkpoint, from 6 bytes", "by what the job wrote; --cut-back")
    child = talker.restart("--cut-back")
    # A second copy gets another file, or none.
    second = ["--job-dir", context.path("second.job")]
    says(talker.refused(*second), "is writing to " + out, "--output")
    says(talker.refused(*second, "--output", out), out, "is the output of another running job")
    talker.go(12)
    child.expect_success(LIMIT)
    same("cut back", open(out).read(), talker.whole)
    talker.again()
    other = context.path("other.text")
    with open(other, "w") as f:
        f.write("of before\n")
    child = talker.restart("--output", other, "--append", suffix="-other")
    context.run([context.tool("cr-checkpoint"), "--stop", talker.job, talker.image])
    child.wait(LIMIT)
    talker.go(12)
    os.unlink(out)
    context.start("last", [context.tool("cr-restart"), talker.image]).expect_success(LIMIT)
    same("the other file", open(other).read(), "of before\n" + talker.rest)


@case
def shared_outputs(context):
    """What others have written to the job's output file is not cut away, and the message does not say that the job did."""
    out = context.path("batch.log")
    talker = Talker(context, "batch")
    child = talker.run(out=out)
    context.run([context.tool("cr-checkpoint"), "--stop", talker.job, talker.image])
    child.wait(LIMIT)
    talker.go(5)
    with open(out, "a") as f:
        f.write("of the batch script\n")
    before = open(out).read()
    for options in ((), ("--cut-back",)):
        text = talker.refused(*options)
        says(text, out, "has grown since the checkpoint, from 6 bytes", "by the job or by others", "--cut " + out)
        if "gone on writing" in text:
            raise Failure(f"what is not known to be true is said: {text}")
    same("the log", open(out).read(), before)
    fresh = context.path("fresh.text")
    child = talker.restart("--output", fresh)
    talker.go(12)
    child.expect_success(LIMIT)
    same("the new file", open(fresh).read(), talker.rest)
    same("the log afterwards", open(out).read(), before)
    talker.again()
    child = talker.restart("--cut", out, suffix="-cut")
    talker.go(12)
    child.expect_success(LIMIT)
    same("the log, cut by name", open(out).read(), talker.whole)


# A CRIU that fails, and says why in its log.
FAILING_CRIU = """#!/bin/sh
[ "$1" = --version ] && exec {criu} --version
[ "$1" = {fails} ] || exec {criu} "$@"
while [ $# -gt 0 ]; do
  [ "$1" = --work-dir ] && work=$2
  [ "$1" = --log-file ] && log=$2
  shift
done
echo '(00.1) Error (criu/odd.c:1): odd: something that only CRIU knows' > "$work/$log"
exit 1
"""


@case
def criu_log(context):
    """What CRIU says of its failure stays in a file that the message names, when the job's folder has gone."""
    criu = harness.criu_here()
    sync, job, image = context.path("log.sync"), context.path("log.job"), context.path("log.image")
    failing = {step: context.script("failing-" + step, FAILING_CRIU.format(criu=criu, fails=step)) for step in ("dump", "restore")}
    child = context.start(
        "log", [context.tool("cr-run"), "--job-dir", job, "--", context.program, "--steps", "20"],
        CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="5", CUDA_REMOTE_TRACE=context.path("trace"),
    )  # fmt: skip
    harness.wait_for(lambda: os.path.exists(sync) and "paused 5" in open(sync).read(), LIMIT, child.describe)

    def fails(step, command):
        kept = f"{image}.criu-{step}.log"
        ended = context.run(command, expect=None, CUDA_REMOTE_CRIU=failing[step])
        if ended.returncode == 0 or f"CRIU's log is {kept}" not in ended.stderr or "something that only CRIU" not in ended.stderr:
            raise Failure(f"{step}: {ended.returncode} {ended.stderr}")
        if not os.path.exists(kept) or "odd.c" not in open(kept).read() or os.stat(kept).st_mode & 0o077:
            raise Failure(f"CRIU's log is not in {kept}")

    fails("dump", [context.tool("cr-checkpoint"), job, image])
    if os.path.exists(image) or os.path.exists(image + ".partial"):
        raise Failure("there is something of the image")
    context.run([context.tool("cr-checkpoint"), "--stop", job, image])
    if os.path.exists(image + ".criu-dump.log"):
        raise Failure("the log of an earlier attempt stays beside an image")
    child.wait(LIMIT)
    open(sync + ".go.5", "w").close()
    fails("restore", [context.tool("cr-restart"), image])
    if os.path.exists(job):
        raise Failure("the failed restart has left the job's folder")
    context.start("again", [context.tool("cr-restart"), image]).expect_success(LIMIT)


@case
def capabilities(context):
    """Root without a capability, as in a container, is told which one is missing; the job continues, and the image stays of use."""
    job, image = context.path("capable.job"), context.path("capable.image")
    child = context.start("capable", [context.tool("cr-run"), "--job-dir", job, "--", "sleep", "600"])
    harness.wait_for(lambda: os.path.exists(job + "/job.json"), LIMIT, child.describe)

    def without(name, words, *command, expect):
        lacking = ["setpriv", "--bounding-set", "-" + name, "--inh-caps", "-" + name]
        text = context.run([*lacking, *command], expect=expect).stderr
        says(text, *words, f"the capability CAP_{name.upper()}, which is missing; a container gets it with --cap-add {name.upper()}")

    needed, perhaps = ["saving and restoring processes needs"], ["Perhaps it needs"]
    for name in ("sys_admin", "sys_ptrace"):
        without(name, needed, context.tool("cr-checkpoint"), job, image, expect=1)
    if not child.running() or os.path.exists(image):
        raise Failure("the job has ended, or there is an image")
    context.run([context.tool("cr-checkpoint"), "--stop", job, image])
    child.wait(LIMIT)
    restart = [context.tool("cr-restart"), image, "--output", context.path("capable.out"), "--error", context.path("capable.out")]
    for name in ("sys_admin", "sys_ptrace"):
        without(name, needed, *restart, expect=125)
    # What the job had and cannot get back.
    without("checkpoint_restore", perhaps, *restart, expect=125)
    again = context.start("capable-again", restart)
    harness.wait_for(lambda: os.path.exists(job + "/job.json") or not again.running(), LIMIT, again.describe)
    context.run([context.tool("cr-checkpoint"), "--stop", job, image])


OPENS = """
import os, sys, time
go = sys.argv[1]
def wait(path):
    while not os.path.exists(path): time.sleep(0.05)
open(go + ".started", "w").close()
wait(go)
device = open("/dev/nvidia0")
open(go + ".opened", "w").close()
wait(go + ".end")
"""


def in_dev_with_gpu(context):
    """What to put before a command that is to find a device /dev/nvidia0, which can be opened anywhere, in a /dev of its own."""
    dev = context.script(
        "dev",
        """set -e
new=$(mktemp -d)
mount -t tmpfs -o mode=0755,dev none $new
for name in null zero full random urandom tty; do touch $new/$name; mount --bind /dev/$name $new/$name; done
mkdir $new/pts $new/shm; mount --bind /dev/pts $new/pts; mount --bind /dev/shm $new/shm
ln -s pts/ptmx $new/ptmx; ln -s /proc/self/fd $new/fd
mknod -m 666 $new/nvidia0 c 1 3
mount --move $new /dev
rmdir $new
exec "$@"
""",
    )
    return ["unshare", "--mount", "--propagation", "private", dev]


@case
def machine_gpu(context):
    """A process that opens NVIDIA's devices is reported on stderr and by cr-ps, and keeps the job from being saved."""
    server = context.start("server", [context.tool("cr-server"), "--dir", context.folder("server"), "--workers", "0"])
    address = "unix:" + context.path("server/session.sock")
    harness.wait_for(lambda: harness.connects(context.path("server/session.sock")), LIMIT, server.describe)
    go, job = context.path("go"), context.path("runtime/cuda-remote/jobs/own")
    script = context.path("opens.py")
    with open(script, "w") as f:
        f.write(OPENS)
    run = in_dev_with_gpu(context) + [context.tool("cr-run"), "--server", address, "--name", "own", "--"]
    child = context.start("job", run + [PYTHON, script, go])
    exists = lambda path: lambda: os.path.exists(path)
    harness.wait_for(exists(go + ".started"), LIMIT, child.describe)
    harness.wait_for(exists(job + "/job.json"), LIMIT, child.describe)
    if "nvidia0" in child.stderr():
        raise Failure(f"reported before anything was opened: {child.stderr()}")
    open(go, "w").close()
    harness.wait_for(exists(go + ".opened"), LIMIT, child.describe)
    harness.wait_for(lambda: "/dev/nvidia0" in child.stderr(), LIMIT, lambda: f"not reported: {child.describe()}")
    ps = json.loads(context.run([context.tool("cr-ps"), "--server", address, "--json"]).stdout)
    own = [j for j in ps["jobs"] if j["directory"] == job]
    if len(own) != 1 or [user["device"] for user in own[0]["machine_gpu"]] != ["/dev/nvidia0"]:
        raise Failure(f"cr-ps --json does not show it: {ps}")
    table = context.run([context.tool("cr-ps"), "--server", address]).stdout
    if "/dev/nvidia0" not in table:
        raise Failure(f"cr-ps does not show it: {table}")
    refused = context.run([context.tool("cr-checkpoint"), job, context.path("image")], expect=1)
    if "/dev/nvidia0" not in refused.stderr:
        raise Failure(f"cr-checkpoint does not say why: {refused.stderr}")
    open(go + ".end", "w").close()
    child.expect_success(LIMIT)
    if child.stderr().count("/dev/nvidia0") != 1:
        raise Failure(f"reported more than once: {child.stderr()}")


@case
def machine_gpu_plain(context):
    """The same in a user's job without namespaces, of a process that has outlived its parent."""
    home = context.folder("home")
    os.chown(home, USER, USER)
    go, job = home + "/go", home + "/job"
    script = context.path("opens.py")
    with open(script, "w") as f:
        f.write(OPENS)
    os.chmod(script, 0o644)
    program = context.script("leaves", f"({PYTHON} {script} {go} &)\nuntil [[ -e {go}.end ]]; do sleep 0.05; done\n")
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    run = [context.tool("cr-run"), "--job-dir", job, "--plain", "--no-check", "--server", "unix:" + home + "/none.sock", "--", program]
    child = context.start("job", in_dev_with_gpu(context) + user + run)
    exists = lambda path: lambda: os.path.exists(path)
    harness.wait_for(exists(go + ".started"), LIMIT, child.describe)
    harness.wait_for(exists(job + "/job.json"), LIMIT, child.describe)
    open(go, "w").close()
    harness.wait_for(lambda: "/dev/nvidia0" in child.stderr(), LIMIT, lambda: f"not reported: {child.describe()}")
    refused = context.run([context.tool("cr-checkpoint"), job, context.path("image")], expect=1)
    if "/dev/nvidia0" not in refused.stderr:
        raise Failure(f"cr-checkpoint does not say why: {refused.stderr}")
    open(go + ".end", "w").close()
    child.expect_success(LIMIT)


class Terminal:
    """A shell with job control in a pseudo-terminal, as a person has it."""

    def __init__(self, context, command=("/bin/bash", "--norc", "--noprofile", "-i"), rows=24, columns=80, **variables):
        env = context.environment({"PS1": "ready> ", "TERM": "dumb", "HISTFILE": "/dev/null", **variables})
        self.text = ""
        self.child, self.master = pty.fork()
        if self.child == 0:
            os.execve(command[0], list(command), env)
        # Not for the next one's programs.
        os.set_inheritable(self.master, False)
        self.resize(rows, columns)
        context.lab.processes.append(self)
        self.pid = self.child
        self.name = "terminal"
        self.log = self.out = os.devnull
        self.prompt()

    def resize(self, rows, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def running(self):
        try:
            return os.waitpid(self.child, os.WNOHANG) == (0, 0)
        except ChildProcessError:
            return False

    def end(self):
        for pid in harness.descendants(self.child) + [self.child]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            os.waitpid(self.child, 0)
        except ChildProcessError:
            pass
        os.close(self.master)

    def type(self, text):
        os.write(self.master, text.encode())

    def read(self, seconds=0.1):
        if select.select([self.master], [], [], seconds)[0]:
            try:
                self.text += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                return False
        return True

    def expect(self, pattern, limit=LIMIT):
        """Reads until `pattern` comes, and takes all up to its end."""
        patience = harness.Limit(limit)
        while True:
            found = re.search(pattern, self.text)
            if found:
                before = self.text[: found.end()]
                self.text = self.text[found.end() :]
                return before
            if patience.over() or not self.read():
                raise Failure(f"the terminal did not show {pattern!r}:\n{self.text[-2000:]!r}")

    def prompt(self):
        """Waits until the shell is back: what is typed before may be the program's."""
        return self.expect("ready> $")

    def command(self, text):
        """Types a command of the shell's and waits for its end: what it has shown."""
        self.type(text + "; echo en''d-$?\n")
        return self.expect(r"end-\d+\r\n") + self.prompt()


def state_of(name):
    """The states of all processes with this name in their command line."""
    states = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as f:
                stat = f.read()
        except OSError:
            continue
        words = harness.command_of(entry)
        if name in words and "cr-run" not in words:
            states.append(stat[stat.rindex(")") + 2])
    return states


def run_in_terminal(context):
    return f"{context.tool('cr-run')} --no-check --server unix:/none"


@case
def programs_in_turn(context):
    """A job that runs CUDA programs one after another is saved, restarted and moved before the first, between two, and during one."""
    servers = []
    for name in ("one", "two"):
        server = context.start("server-" + name, [context.tool("cr-server"), "--dir", context.folder(name), "--workers", "0"])
        harness.wait_for(lambda: harness.connects(context.path(name + "/session.sock")), LIMIT, server.describe)
        servers.append("unix:" + context.path(name + "/session.sock"))
    sync, out, job = context.path("turn.sync"), context.path("turn.text"), context.path("turn.job")
    # A shell that waits starts and ends a process again and again.
    script = context.script(
        "in-turn",
        f"""exec >{out} 2>{out}.err
stand() {{ touch {sync}.at.$1; until [ -e {sync}.on.$1 ]; do sleep 0.05; done; }}
stand first
CR_TEST_PAUSE_AT=5 {context.program} --steps 30
stand between
env -i CR_TEST_SYNC_FILE={sync}.2 CR_TEST_PAUSE_AT=7 {context.program} --steps 30
stand last
{context.program} --steps 30
""",
    )
    carrier = context.start(
        "turn", [context.tool("cr-run"), "--server", servers[0], "--job-dir", job, "--", script], CR_TEST_SYNC_FILE=sync
    )  # fmt: skip
    there = lambda name: os.path.exists(f"{sync}.at.{name}")
    paused = lambda file, step: os.path.exists(file) and f"paused {step}\n" in open(file).read()
    places = (
        ("first", lambda: there("first"), f"{sync}.on.first", 0),
        ("in the first program", lambda: paused(sync, 5), f"{sync}.go.5", 1),
        ("between", lambda: there("between"), f"{sync}.on.between", 0),
        ("in the second program", lambda: paused(sync + ".2", 7), f"{sync}.2.go.7", 1),
        ("last", lambda: there("last"), f"{sync}.on.last", 0),
    )

    def sessions():
        asked = [json.loads(context.run([context.tool("cr-ps"), "--server", one, "--json"]).stdout) for one in servers]
        return [len(answer["sessions"]) for answer in asked]

    for number, (name, reached, go_on, processes) in enumerate(places):
        harness.wait_for(lambda: reached() or not carrier.running(), LIMIT, lambda: f"not {name}: {carrier.describe()}")
        if not reached():
            raise Failure(f"the job ended before {name}: {carrier.describe()} {open(out + '.err').read()}")
        same(f"{name}: sessions", sessions(), [processes, 0])
        image = context.path(f"image{number}")
        context.run([context.tool("cr-checkpoint"), job, image])
        context.run([context.tool("cr-inspect"), "--verify", image])
        # It moves, also if that only means where its next program goes, and is stopped there.
        context.run([context.tool("cr-migrate"), job, "--to", servers[1]])
        same(f"{name}, moved: sessions", sessions(), [0, processes])
        context.run([context.tool("cr-checkpoint"), "--stop", job, image])
        same(f"{name}: exit code of the stopped job", carrier.wait(LIMIT), 121)
        carrier = context.start(f"turn{number}", [context.tool("cr-restart"), image, "--server", servers[1]])
        harness.wait_for(lambda: sessions() == [0, processes], LIMIT, lambda: f"{name}: {sessions()} {carrier.describe()}")
        open(go_on, "w").close()
        # What comes next is on the server that it was restarted or moved to.
        servers.reverse()
    carrier.expect_success(LIMIT)
    same("output", open(out).read(), context.expected(30) * 3)


@case
def terminal_stop(context):
    """Ctrl-Z stops the program, also one in the middle of a computation; fg and bg let it go on."""
    terminal = Terminal(context)
    mark = f"mark{os.getpid()}"
    # A shell that has just waited for a child which ended by itself goes on after Ctrl-C.
    count = context.script(
        mark,
        """exec python3 -c 'import signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
i = 0
while True:
    i += 1
    print("tick", i, flush=True)
    time.sleep(0.05)
' $0
""",
    )
    terminal.type(f"{run_in_terminal(context)} -- {count}\n")
    terminal.expect("tick 3\r\n")
    terminal.type("\x1a")
    terminal.expect(r"Stopped.*\n")
    harness.wait_for(lambda: set(state_of(mark)) == {"T"}, LIMIT, lambda: f"the program is not stopped: {state_of(mark)}")
    terminal.prompt()
    # The terminal is the shell's again: what is typed is shown.
    if "echo shown-again" not in terminal.command("echo shown-again"):
        raise Failure("the terminal was not given back as it was")
    terminal.type("fg\n")
    terminal.expect(r"tick \d+\r\n")
    terminal.type("\x1a")
    terminal.expect(r"Stopped.*\n")
    terminal.prompt()
    terminal.type("bg\n")
    terminal.expect(r"tick \d+\r?\n")
    # In the background: keys are the shell's, and the program goes on.
    terminal.type("echo a''ha\n")
    terminal.expect(r"aha\r?\n")
    terminal.expect(r"tick \d+\r?\n")
    terminal.type("fg\n")
    terminal.expect(r"cr-run .*\n")
    terminal.expect(r"tick \d+\r\n")
    harness.pause(0.5)
    terminal.type("\x03")
    harness.wait_for(lambda: not state_of(mark), LIMIT, lambda: f"Ctrl-C did not end it: {state_of(mark)}")
    terminal.prompt()
    # A script around it stops with it.
    around = context.script("around", f"{run_in_terminal(context)} -- {count}\n")
    terminal.type(around + "\n")
    terminal.expect("tick 2\r\n")
    terminal.type("\x1a")
    terminal.expect(r"Stopped.*\n")
    terminal.prompt()
    terminal.type("fg\n")
    terminal.expect(r"tick \d+\r\n")
    terminal.type("\x03")
    harness.wait_for(lambda: not state_of(mark), LIMIT, lambda: f"Ctrl-C did not end it: {state_of(mark)}")


@case
def terminal_keys(context):
    """The program reads lines and single keys, sees the window's size and its changes, and an interrupt is its own."""
    terminal = Terminal(context, rows=31, columns=93)
    run = run_in_terminal(context)
    shows = terminal.command(f"{run} -- stty size")
    if "31 93\r\n" not in shows:
        raise Failure(f"another window size: {shows}")
    terminal.type(f"{run} -- bash -c 'trap \"stty size\" WINCH; trap exit INT; echo wait; while :; do sleep 0.05; done'\n")
    terminal.expect("wait\r\n")
    terminal.resize(40, 120)
    terminal.expect("40 120\r\n")
    terminal.type("\x03")
    terminal.prompt()
    terminal.type(f"{run} -- bash -c 'read -p name: x; echo got-$x; read -s -n 1 y; echo key-$y'\n")
    terminal.expect("name:")
    terminal.type("some\n")
    terminal.expect("got-some\r\n")
    terminal.type("k")
    terminal.expect("key-k\r\n")
    terminal.prompt()
    terminal.type(f"{run} -- bash -c 'trap \"echo caught; exit 5\" INT; echo wait; while :; do sleep 0.05; done'\n")
    terminal.expect("wait\r\n")
    terminal.type("\x03")
    terminal.expect("caught\r\n")
    terminal.prompt()
    if "code-5" not in terminal.command("echo code-$?"):
        raise Failure("another exit code after an interrupt that the program has caught")
    # Ctrl-D ends its input.
    terminal.type(f"{run} -- bash -c 'cat; echo over'\n")
    harness.pause(0.3)
    terminal.type("line\n\x04")
    terminal.expect("over\r\n")
    terminal.prompt()
    # Streams that are no terminal stay what they are.
    shows = terminal.command(f"echo from-pipe | {run} -- bash -c '[ -t 0 ] && echo bad-0; [ -t 1 ] && echo bad-1; [ -t 2 ] || echo bad-2; cat' | cat")
    if "\nfrom-pipe\r\n" not in shows or re.search(r"\nbad", shows):
        raise Failure(f"a pipe was replaced: {shows}")
    shows = terminal.command("stty -a | grep -c -- ' echo '")
    if "1\r\n" not in shows:
        raise Failure(f"the terminal is not as before: {shows}")


@case
def terminal_background(context):
    """A job in the background leaves the shell's input alone, and gets it in the foreground."""
    terminal = Terminal(context)
    terminal.type(f"{run_in_terminal(context)} -- bash -c 'echo st''arted; read x; echo got-$x' &\n")
    terminal.expect(r"started\r?\n")
    terminal.type("\n")
    terminal.prompt()
    for i in range(5):
        shows = terminal.command(f"echo line-{i}-$((1+1))")
        if f"line-{i}-2" not in shows:
            raise Failure(f"the shell lost its input: {shows}")
    terminal.type("fg\n")
    terminal.expect("cr-run .*\n")
    harness.pause(1)
    terminal.type("input\n")
    terminal.expect("got-input\r\n")
    terminal.prompt()


@case
def terminal_shell(context):
    """A shell as the program has job control of its own."""
    terminal = Terminal(context)
    terminal.type(f"{run_in_terminal(context)} -- /bin/bash --norc --noprofile -i\n")
    shows = terminal.expect("ready> $")
    if "no job control" in shows or "cannot set terminal" in shows:
        raise Failure(f"no job control: {shows}")
    terminal.type("sleep 1000\n")
    harness.pause(0.5)
    terminal.type("\x1a")
    terminal.expect(r"Stopped\s+sleep 1000")
    terminal.prompt()
    if "1" not in terminal.command("jobs | wc -l"):
        raise Failure("the inner shell does not know its job")
    terminal.type("kill %1; fg\n")
    terminal.expect("Terminated")
    terminal.prompt()
    terminal.type("exit 9\n")
    terminal.prompt()
    if "code-9" not in terminal.command("echo code-$?"):
        raise Failure("another exit code")


@case
def terminal_none(context):
    """With all streams elsewhere the program still stops with its job, and goes on."""
    terminal = Terminal(context)
    mark = f"quiet{os.getpid()}"
    count = context.script(mark, "while :; do sleep 0.05; done\n")
    terminal.type(f"{run_in_terminal(context)} -- {count} </dev/null >/dev/null 2>&1\n")
    harness.wait_for(lambda: state_of(mark), LIMIT, lambda: "the program did not start")
    harness.pause(0.5)
    terminal.type("\x1a")
    terminal.expect(r"Stopped.*\n")
    harness.wait_for(lambda: set(state_of(mark)) == {"T"}, LIMIT, lambda: f"the program is not stopped: {state_of(mark)}")
    terminal.prompt()
    terminal.type("fg\n")
    harness.wait_for(lambda: "T" not in state_of(mark), LIMIT, lambda: "the program does not go on")
    terminal.type("\x03")
    harness.wait_for(lambda: not state_of(mark), LIMIT, lambda: "Ctrl-C did not end it")


@case
def terminal_restart(context):
    """A job with a terminal, with a program in the foreground of a shell, is saved and restarted in another terminal."""
    terminal = Terminal(context)
    job, image = context.path("job"), context.path("image")
    sync = context.path("sync")
    terminal.type(f"{context.tool('cr-run')} --job-dir {job} -- /bin/bash --norc --noprofile -i\n")
    terminal.expect("ready> $")
    terminal.type(f"known=47; CR_TEST_SYNC_FILE={sync} CR_TEST_PAUSE_AT=5 {context.program} --steps 30\n")
    harness.wait_for(lambda: os.path.exists(sync) and "paused 5" in open(sync).read(), LIMIT, lambda: "no step 5")
    context.run([context.tool("cr-checkpoint"), "--stop", job, image])
    terminal.expect(r"cr-restart.*\n")
    terminal.prompt()
    open(sync + ".go.5", "w").close()
    other = Terminal(context, rows=33, columns=99)
    other.type(f"{context.tool('cr-restart')} {image}\n")
    want = context.expected(30).strip().split("\n")[-1]
    other.expect(re.escape(want))
    other.expect("ready> $")
    # The name of a file that is not there tells this cat from others.
    cat = lambda states: harness.wait_for(lambda: state_of(f"{sync}.cat") == states, LIMIT, lambda: f"cat: {state_of(sync + '.cat')}")
    other.type(f"echo known-$known; stty size; echo $(tty) $([ -c $(tty) ] && echo fou''nd); cat - {sync}.cat\n")
    other.expect("known-47\r\n")
    other.expect("33 99\r\n")
    other.expect(r"/dev/pts/\d+ found\r\n")
    cat(["S"])
    other.type("\x1a")
    other.expect(r"Stopped\s+cat")
    other.prompt()
    other.type("fg\n")
    other.expect("\\.cat\r\n")
    cat(["S"])  # bash has given it the terminal before it goes on
    other.type("\x03")
    other.prompt()
    other.type("exit 3\n")
    other.prompt()
    if "code-3" not in other.command("echo code-$?"):
        raise Failure("another exit code after the restart")


# Has pseudo-terminals of its own, one with a program at it, and one whose number is not the next after the other's.
PTYS = """
import os, subprocess, sys, time
folder = sys.argv[1]
pairs = [os.openpty() for _ in range(3)]
for fd in pairs.pop(1): os.close(fd)
cat = subprocess.Popen(["/bin/cat"], stdin=pairs[0][1], stdout=pairs[0][1])
def read(fd, size):
    got = b""
    while len(got) < size: got += os.read(fd, size - len(got))
    return got
for step in range(3):
    open(f"{folder}/at.{step}", "w").close()
    while not os.path.exists(f"{folder}/go.{step}"): time.sleep(0.02)
    line = b"line %d" % step
    os.write(pairs[0][0], line + b"\\n")
    os.write(pairs[1][1], line + b"\\n")
    # Once as an echo, once by cat.
    assert read(pairs[0][0], 2 * len(line) + 4) == 2 * (line + b"\\r\\n")
    assert read(pairs[1][0], len(line) + 2) == line + b"\\r\\n"
    print([os.ttyname(slave) for _, slave in pairs], flush=True)
os.write(pairs[0][0], b"\\x04")
sys.exit(cat.wait())
"""


@case
def pseudo_terminals(context):
    """A job with pseudo-terminals is restarted where other programs have all of their numbers."""
    folder, program, job, image = context.folder("ptys"), context.path("ptys.py"), context.path("job"), context.path("image")
    out = context.path("ptys.text")
    with open(program, "w") as f:
        f.write(PTYS)
    child = context.start("ptys", [context.tool("cr-run"), "--job-dir", job, "--output", out, "--", PYTHON, program, folder])

    def at(step):
        there = lambda: os.path.exists(f"{folder}/at.{step}") and os.path.exists(job + "/job.json")
        harness.wait_for(lambda: there() or not child.running(), LIMIT, lambda: f"not at {step}: {child.describe()}")
        if not there():
            raise Failure(f"the job has ended before step {step}: {child.describe()}")

    for step in range(2):
        at(step)
        context.run([context.tool("cr-checkpoint"), "--stop", job, image])
        child.wait(LIMIT)
        # More than the job and this machine's other programs have.
        taken = [os.openpty() for _ in range(24)]
        child = context.start(f"ptys-{step}", [context.tool("cr-restart"), image])
        open(f"{folder}/go.{step}", "w").close()
        at(step + 1)
        for fd in sum(taken, ()):
            os.close(fd)
    open(f"{folder}/go.2", "w").close()
    child.expect_success(LIMIT)
    same("names", open(out).read(), "['/dev/pts/0', '/dev/pts/2']\n" * 3)


@case
def terminal_names(context):
    """A program finds the terminal that it was given by its name, also beside pseudo-terminals of its own."""
    terminal = Terminal(context)
    run = run_in_terminal(context)
    own = re.search(r"/dev/pts/\d+", terminal.command("tty"))[0]
    # Where only some streams are the terminal, it is the user's.
    shows = terminal.command(f"{run} -- bash -c 'tty <&2' | cat")
    if f"\n{own}\r\n" not in shows:
        raise Failure(f"the terminal {own} has another name in a job: {shows}")
    same_device = "[ $(stat -c %d:%i -L /proc/self/fd/0) = $(stat -c %d:%i $(tty)) ] && echo sa''me"
    beside = f"{PYTHON} -c \"import os; a = [os.openpty() for _ in range(40)]; print(os.ttyname(0), os.ttyname(a[-1][1]))\""
    shows = terminal.command(f"{run} -- bash -c '{same_device.replace(chr(39), chr(34))}; {beside}'")
    if "\nsame\r\n" not in shows or not re.search(r"\n/dev/pts/\d+ /dev/pts/\d+\r\n", shows):
        raise Failure(f"a job does not find its terminal by its name: {shows}")


@case
def terminal_of_user(context):
    """An ordinary user's own job is in the session and group of her shell. Root saves it there, and restarts it at another
    terminal, where the keys work."""
    home, image = context.folder("home"), context.path("image")
    os.chown(home, USER, USER)
    answers = context.script("answers", "echo begun; while read line; do echo got-$line; [ $line = end ] && exit 7; done\n")
    hers = Terminal(context, ("/usr/bin/setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups", "/bin/bash",
                              "--norc", "--noprofile", "-i"))  # fmt: skip
    os.chown(os.readlink(f"/proc/{hers.pid}/fd/0"), USER, -1)
    hers.type(f"cd /; {context.tool('cr-run')} --plain --job-dir {home}/job -- {answers}\n")
    hers.expect("begun")
    stopped = lambda: harness.wait_for(lambda: state_of(answers) == ["T"], LIMIT, lambda: f"not stopped: {state_of(answers)}")
    hers.type("\x1a")
    hers.prompt()
    # Her shell waits for cr-run only. The program, until it stops in its turn, may still read what is typed.
    stopped()
    hers.type("fg\n")
    harness.wait_for(lambda: state_of(answers) == ["S"], LIMIT, lambda: f"does not go on: {state_of(answers)}")
    context.run([context.tool("cr-checkpoint"), home + "/job", image])
    hers.type("one\n")
    hers.expect("got-one")
    context.run([context.tool("cr-checkpoint"), "--stop", home + "/job", image])
    hers.prompt()
    if "code-121" not in hers.command("echo code-$?"):
        raise Failure("another exit code of the stopped job")

    roots = Terminal(context)
    for key, code in (("\x03", 130), ("end\n", 7)):
        roots.type(f"{context.tool('cr-restart')} --job-dir {context.path('job')} {image}\n")
        # What is typed before the job has the terminal is the shell's.
        harness.wait_for(lambda: roots.read() and state_of(answers), 20, lambda: f"no restart: {roots.text}")
        roots.type("two\n")
        roots.expect("got-two")
        roots.type("\x1a")
        roots.prompt()
        stopped()
        roots.type("fg\n")
        roots.type("three\n")
        roots.expect("got-three")
        roots.type(key)
        roots.prompt()
        if f"code-{code}" not in roots.command("echo code-$?"):
            raise Failure("another exit code after the restart")


@case
def stale_folders(context):
    """What a killed cr-run leaves goes with the next one, or with cr-ps --prune; running jobs stay."""
    jobs = context.path("runtime/cuda-remote/jobs")
    run = [context.tool("cr-run"), "--no-check", "--server", "unix:/none"]
    lasting = context.start("lasting", run + ["--name", "lasting", "--", "sleep", "1000"])
    plain = context.start("plain", run + ["--plain", "--name", "plain", "--", "sleep", "1000"])
    exists = lambda name: os.path.exists(f"{jobs}/{name}/job.json")
    harness.wait_for(lambda: exists("lasting") and exists("plain"), LIMIT, lambda: "the jobs did not start")

    def killed(name):
        process = context.start(name, run + ["--name", name, "--", "sleep", "1000"])
        harness.wait_for(lambda: exists(name), LIMIT, process.describe)
        init = json.load(open(f"{jobs}/{name}/job.json"))["init_pid"]
        os.kill(process.pid, signal.SIGKILL)
        process.child.wait()
        gone = lambda: not os.path.exists(f"/proc/{init}") or open(f"/proc/{init}/stat").read().split(") ")[1][0] == "Z"
        harness.wait_for(gone, LIMIT, lambda: "the job's processes are still there")

    killed("one")
    same("left behind", sorted(os.listdir(jobs)), ["lasting", "one", "plain"])
    context.run(run + ["--name", "next", "--", "true"])
    same("after the next cr-run", sorted(os.listdir(jobs)), ["lasting", "plain"])
    killed("two")
    said = context.run([context.tool("cr-migrate"), "two", "--to", "unix:/none"], expect=1).stderr
    same("a move of what was killed", said, "cr-migrate: two was not moved: the job has ended\n")
    # A folder in which nothing was begun yet.
    os.makedirs(f"{jobs}/three/lib", mode=0o700)
    told = context.run([context.tool("cr-ps"), "--prune"]).stdout
    same("after cr-ps --prune", sorted(os.listdir(jobs)), ["lasting", "plain"])
    same("told", sorted(told.split()), sorted(["removed", f"{jobs}/two", "removed", f"{jobs}/three"]))
    if not lasting.running() or not plain.running():
        raise Failure("a running job was ended")
    # What is not a job's own stays.
    killed("four")
    open(f"{jobs}/four/mine", "w").close()
    context.run([context.tool("cr-ps"), "--prune"])
    same("a file of the user's", sorted(os.listdir(jobs)), ["four", "lasting", "plain"])


def stands_and_is_listed(context, job, name, *syncs):
    """Waits until programs of the job stand after their step 3, and it is known: cr-run writes that down while they run."""
    listed = context.path(f"runtime/cuda-remote/jobs/{name}/job.json")
    stand = lambda: all(os.path.exists(sync) and "paused 3" in open(sync).read() for sync in syncs)
    harness.wait_for(lambda: stand() and os.path.exists(listed) or not job.running(), LIMIT, job.describe)


@case
def host_pids(context):
    """cr-ps shows the PIDs of this machine and each job's folder, also of two copies of an image; the tools take them."""
    server = context.start("server", [context.tool("cr-server"), "--dir", context.folder("server"), "--workers", "0"])
    address = "unix:" + context.path("server/session.sock")
    harness.wait_for(lambda: harness.connects(context.path("server/session.sock")), LIMIT, server.describe)
    jobs = context.path("runtime/cuda-remote/jobs")
    sync, image = context.path("sync"), context.path("image")
    job = context.start(
        "job", [context.tool("cr-run"), "--server", address, "--name", "first", "--", context.program, "--steps", "1000"],
        CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3",
    )  # fmt: skip
    stands_and_is_listed(context, job, "first", sync)

    def sessions():
        listed = json.loads(context.run([context.tool("cr-ps"), "--server", address, "--json"]).stdout)["sessions"]
        return {session["directory"]: session["host_pid"] for session in listed}

    found = sessions()
    same("folders", list(found), [jobs + "/first"])
    program = lambda pid: os.path.realpath(f"/proc/{pid}/exe")
    same("the program of the PID", program(found[jobs + "/first"]), os.path.realpath(context.program))
    pid = str(found[jobs + "/first"])
    table = context.run([context.tool("cr-ps"), "--server", address]).stdout
    if not re.search(rf"^\s*\d+\s+{pid}\s", table, re.M) or jobs + "/first" not in table:
        raise Failure(f"the table does not show {pid} and the folder:\n{table}")
    context.run([context.tool("cr-checkpoint"), pid, image])
    again = context.start(
        "again",
        [context.tool("cr-restart"), image, "--server", address, "--job-dir", jobs + "/second", "--output",
         context.path("again.text"), "--error", context.path("again.text")],
    )  # fmt: skip
    harness.wait_for(lambda: os.path.exists(jobs + "/second/job.json") and len(sessions()) == 2, LIMIT, again.describe)
    found = sessions()
    same("folders", sorted(found), [jobs + "/first", jobs + "/second"])
    if len(set(found.values())) != 2:
        raise Failure(f"both copies have one PID: {found}")
    listed = json.loads(context.run([context.tool("cr-ps"), "--json"]).stdout)["jobs"]
    same("last images", [one["saved_image"] for one in listed if one["directory"] in found], [image, image])
    for pid in found.values():
        same("the program of the PID", program(pid), os.path.realpath(context.program))
    # The second copy, by its own number.
    context.run([context.tool("cr-checkpoint"), "--stop", str(found[jobs + "/second"]), context.path("image2")])
    again.wait(LIMIT)
    same("after the end of one", list(sessions()), [jobs + "/first"])
    context.run([context.tool("cr-checkpoint"), "--stop", str(found[jobs + "/first"]), context.path("image3")])


def jobs_of(context):
    """What cr-ps says of this case's jobs. It lists root's other jobs on this machine, too."""
    listed = json.loads(context.run([context.tool("cr-ps"), "--json"]).stdout)["jobs"]
    return [one for one in listed if one["directory"].startswith(context.path("runtime/"))]


@case
def jobs_here(context):
    """cr-ps without --server lists this user's jobs on this machine, whether a server of his runs or not; --watch repeats it."""
    ps = context.tool("cr-ps")
    # Root may have other jobs on this machine; the number of this user is nobody else's.
    same("without a job", context.run([ps], user=USER).stdout.splitlines()[0], "no jobs of this user on this machine")
    server = context.start("server", [context.tool("cr-server"), "--dir", context.folder("server"), "--workers", "0"])
    address = "unix:" + context.path("server/session.sock")
    harness.wait_for(lambda: harness.connects(context.path("server/session.sock")), LIMIT, server.describe)
    sync = context.path("sync")
    job = context.start(
        "job", [context.tool("cr-run"), "--server", address, "--name", "first", "--", context.program, "--steps", "1000"],
        CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3",
    )  # fmt: skip
    stands_and_is_listed(context, job, "first", sync)

    def row():
        rows = [line.split() for line in context.run([ps]).stdout.splitlines() if line.startswith("first ")]
        same("rows of the job", len(rows), 1)
        return rows[0]

    pid = json.load(open(context.path("runtime/cuda-remote/jobs/first/job.json")))["pid"]
    same("name, state, PID, processes, not saved", row()[:5], ["first", "running", str(pid), "1", "-"])
    for word in (address, context.program):
        if word not in row():
            raise Failure(f"the job's row lacks {word}: {row()}")
    image = context.path("image")
    if image in row():
        raise Failure(f"the job's row names an image before there is one: {row()}")
    context.run([context.tool("cr-checkpoint"), "first", image])
    saved = row()
    if saved[5:7] != ["s", "ago"] or not saved[7].isdigit() or image not in saved:
        raise Failure(f"the job's row does not say when it was saved, how old it is, and its image: {saved}")
    listed = jobs_of(context)
    same("the last image", [one["saved_image"] for one in listed], [image])
    same("jobs", [(one["name"], one["running"], one["processes"]) for one in listed], [("first", True, 1)])
    if listed[0]["saved_unix_ms"] <= listed[0]["started_unix_ms"]:
        raise Failure(f"the times are wrong: {listed}")

    watch = context.start("watch", [ps, "--watch", "0.2"])
    output = lambda: [line for line in watch.stdout().decode().splitlines() if line.startswith("first ")]
    harness.wait_for(lambda: len(output()) >= 3, LIMIT, watch.describe)
    if not watch.running():
        raise Failure("cr-ps --watch has ended")
    watch.kill()


@case
def ends_in_log(context):
    """cr-server's log says that a job was saved or has moved, and how each session has ended."""
    servers = {}
    for name in ("from", "to"):
        servers[name] = context.start(name, [context.tool("cr-server"), "--dir", context.folder(name), "--workers", "0"])
        harness.wait_for(lambda: harness.connects(context.path(f"{name}/session.sock")), LIMIT, servers[name].describe)
    address = {name: "unix:" + context.path(f"{name}/session.sock") for name in servers}
    image = context.path("image")

    def begin(name):
        job = context.start(
            name, [context.tool("cr-run"), "--server", address["from"], "--name", name, "--", context.program, "--steps", "10"],
            CR_TEST_SYNC_FILE=context.path(name), CR_TEST_PAUSE_AT="3",
        )  # fmt: skip
        stands_and_is_listed(context, job, name, context.path(name))
        return job

    def logged(server, job, *texts):
        lines = lambda: [line for line in servers[server].stderr().splitlines() if f"job {job}" in line and all(text in line for text in texts)]
        harness.wait_for(lambda: len(lines()) == 1, LIMIT, lambda: f"not one line of job {job} with {texts}\n{servers[server].describe()}")
        if not re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (info|error) cr-server: ", lines()[0]):
            raise Failure(f"a line without time and level: {lines()}")

    job = begin("itself")
    open(context.path("itself.go.3"), "w").close()
    job.expect_success(LIMIT)
    logged("from", "itself", "ended after", "(end: its program has ended")

    begin("moved")
    context.run([context.tool("cr-checkpoint"), "moved", image])
    logged("from", "moved", "was saved, ", " bytes")
    context.run([context.tool("cr-migrate"), "moved", "--to", address["to"]])
    logged("from", "moved", "ended after", f"(move: its job has moved to {address['to']}")
    logged("to", "moved", "started by a restart or a move")
    context.run([context.tool("cr-checkpoint"), "--stop", "moved", image])
    logged("to", "moved", "ended after", "(stop: its job was saved, and ended by cr-checkpoint --stop")

    for name in ("asked", "lost"):
        begin(name)
        sessions = json.loads(context.run([context.tool("cr-ps"), "--server", address["from"], "--json"]).stdout)["sessions"]
        [session] = [one for one in sessions if one["job"] == name]
        if name == "asked":
            context.run([context.tool("cr-ps"), "--server", address["from"], "--end", str(session["id"]), "--reason", "we test"])
            logged("from", name, "ended after", "(request: ended by the operator: we test")
        else:
            os.kill(session["worker_pid"], signal.SIGKILL)
            logged("from", name, "ended after", "(lost: worker ")


@case
def processes_here(context):
    """cr-ps lists the processes of each job, with CUDA and without, and their sessions."""
    ps = context.tool("cr-ps")
    syncs = [context.path("a.sync"), context.path("b.sync")]
    script = context.script(
        "two", "".join(f"CR_TEST_SYNC_FILE={sync} CR_TEST_PAUSE_AT=3 {context.program} --steps 10 &\n" for sync in syncs) + "wait\n"
    )
    job = context.start("job", [context.tool("cr-run"), "--name", "two", "--", script])
    stands_and_is_listed(context, job, "two", *syncs)
    [listed] = jobs_of(context)
    found = sorted((one["program"], "session" in one) for one in listed["process_list"])
    same("processes", found, [("bash", False), ("globals", True), ("globals", True)])
    same("sessions", len({one.get("session") for one in listed["process_list"]}), 3)
    text = context.run([ps]).stdout
    for one in listed["process_list"]:
        same("program", os.path.realpath(f"/proc/{one['pid']}/exe") == os.path.realpath(context.program), "session" in one)
        what = f"session {one['session']}" if "session" in one else "no GPU session"
        if not re.search(rf"^ +{one['pid']} {one['program']}, {what}$", text, re.M):
            raise Failure(f"{one} is not in the list:\n{text}")
    for sync in syncs:
        open(sync + ".go.3", "w").close()
    job.expect_success(LIMIT)


@case
def sessions_of_servers(context):
    """cr-ps tells the processes of a job apart that are on two servers and have the same session number there."""
    servers = []
    for name in ("first", "second", "third"):
        server = context.start(name, [context.tool("cr-server"), "--dir", context.folder(name), "--workers", "0"])
        harness.wait_for(lambda: harness.connects(context.path(name + "/session.sock")), LIMIT, server.describe)
        servers.append("unix:" + context.path(name + "/session.sock"))
    first, second, third = servers
    syncs = [context.path("a.sync"), context.path("b.sync")]
    script = context.script(
        "two", "".join(f"CR_TEST_SYNC_FILE={sync} CR_TEST_PAUSE_AT=3 {context.program} --steps 10 &\n" for sync in syncs) + "wait\n"
    )
    job = context.start("job", [context.tool("cr-run"), "--server", first, "--name", "two", "--", script])
    paused = lambda: all(os.path.exists(sync) and "paused 3" in open(sync).read() for sync in syncs)
    harness.wait_for(lambda: paused() or not job.running(), LIMIT, job.describe)

    def sessions(address):
        listed = json.loads(context.run([context.tool("cr-ps"), "--server", address, "--json"]).stdout)["sessions"]
        return [(one["id"], one["pid"], one["host_pid"], os.path.basename(one["directory"])) for one in listed]

    def inner_pid(pid):
        return int(re.search(r"^NSpid:.*\s(\d+)$", open(f"/proc/{pid}/status").read(), re.M).group(1))

    pids = [pid for _, pid, _, _ in sessions(first)]
    same("sessions of the first server", len(pids), 2)
    context.run([context.tool("cr-migrate"), "two", "--to", second, "--map", f"pid:{pids[1]}={third}"])
    [at_second], [at_third] = sessions(second), sessions(third)
    same("the number of both sessions", at_second[0], at_third[0])
    for (_, pid, host_pid, job_name), want in ((at_second, pids[0]), (at_third, pids[1])):
        same("the process in the job, its number here, and the job", (pid, inner_pid(host_pid), job_name), (want, want, "two"))
    [listed] = jobs_of(context)
    same("processes with a session", len([one for one in listed["process_list"] if "session" in one]), 2)
    for sync in syncs:
        open(sync + ".go.3", "w").close()
    job.expect_success(LIMIT)


@contextlib.contextmanager
def looked_at_by(context, *commands):
    """Runs each command again and again, in a process each. Yields these processes, and a function that says how often each
    command has succeeded."""
    stop, counted = context.path("stop"), [context.path(f"looks{i}") for i in range(len(commands))]
    loop = "until [ -e {} ]; do {} >/dev/null && echo >>{}; done"
    lookers = [
        context.start(f"looker{i}", ["/bin/bash", "-c", loop.format(stop, command, looks)])
        for i, (command, looks) in enumerate(zip(commands, counted))
    ]
    yield lookers, lambda: [os.path.getsize(looks) if os.path.exists(looks) else 0 for looks in counted]
    open(stop, "w").close()
    for looker in lookers:
        looker.wait(LIMIT)


@case
def looked_at(context):
    """A job is saved, moved and restarted while others look at it all the time: they never come between a tool and a process."""
    servers = []
    for name in ("one", "two"):
        server = context.start("server-" + name, [context.tool("cr-server"), "--dir", context.folder(name), "--workers", "0"])
        harness.wait_for(lambda: harness.connects(context.path(name + "/session.sock")), LIMIT, server.describe)
        servers.append("unix:" + context.path(name + "/session.sock"))
    sync, image = context.path("sync"), context.path("image")
    job = os.path.join(context.variables["XDG_RUNTIME_DIR"], "cuda-remote", "jobs", "seen")
    carrier = context.start(
        "job", [context.tool("cr-run"), "--server", servers[0], "--name", "seen", "--", context.program, "--steps", "20"],
        CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="5", CUDA_REMOTE_TRACE=context.path("trace"),
    )  # fmt: skip
    harness.wait_for(lambda: os.path.exists(sync) and "paused 5" in open(sync).read(), LIMIT, carrier.describe)
    with looked_at_by(context, *[f"{context.tool('cr-ps')} --json", f"{context.tool('cr-trace')} --totals {job}"] * 2) as (_, counts):
        for round_ in range(4):
            for _ in range(3):
                context.run([context.tool("cr-checkpoint"), "seen", image])
                shutil.rmtree(image)
            context.run([context.tool("cr-migrate"), "seen", "--to", servers[1]])
            servers.reverse()
            context.run([context.tool("cr-checkpoint"), "--stop", "seen", image])
            same("exit code of the stopped job", carrier.wait(LIMIT), 121)
            carrier = context.start(f"again{round_}", [context.tool("cr-restart"), image, "--server", servers[0]])
            before = counts()
            harness.wait_for(
                lambda: all(now > old for now, old in zip(counts(), before)) or not carrier.running(), LIMIT, carrier.describe
            )  # fmt: skip
            shutil.rmtree(image)
    open(sync + ".go.5", "w").close()
    carrier.expect_success(LIMIT)


@case
def looked_at_by_user(context):
    """Root saves and restarts the job of a user, as cr-hostd does. That user looks at it all the time."""
    image = context.path("image")
    job = context.path(f"host/users/{USER}/cuda-remote/jobs/hers")
    os.makedirs(os.path.dirname(job))
    os.chown(context.folder("hers"), USER, USER)
    sync = context.path("hers/sync")
    out = ["--output", context.path("hers/out"), "--error", context.path("hers/errors")]
    run = [context.tool("cr-run"), "--user", str(USER), "--job-dir", job, *out, "--", context.program, "--steps", "20"]
    carrier = context.start("job", run, CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="5", CUDA_REMOTE_TRACE=context.path("hers/trace"))
    harness.wait_for(lambda: os.path.exists(sync) and "paused 5" in open(sync).read(), LIMIT, carrier.describe)
    # Before the first tool comes, and later.
    user = f"/usr/bin/setpriv --reuid {USER} --regid {USER} --clear-groups env CUDA_REMOTE_HOSTD={context.path('host')}/hostd.sock"
    look = f"{user} {context.tool('cr-trace')} --totals {job}"
    with looked_at_by(context, look, look, look) as (lookers, counts):

        def await_looks():
            harness.wait_for(lambda: os.path.exists(job + "/job.json") or not carrier.running(), LIMIT, carrier.describe)
            before = sum(counts())
            harness.wait_for(lambda: sum(counts()) > before + 2 or not carrier.running(), LIMIT, lookers[0].describe)
            if not carrier.running():
                raise Failure(f"the job has ended\n{carrier.describe()}")

        for round_ in range(2):
            await_looks()
            for _ in range(4):
                context.run([context.tool("cr-checkpoint"), job, image])
                shutil.rmtree(image)
            context.run([context.tool("cr-checkpoint"), "--stop", job, image])
            same("exit code of the stopped job", carrier.wait(LIMIT), 121)
            carrier = context.start(f"again{round_}", [context.tool("cr-restart"), image])
            await_looks()
            shutil.rmtree(image)
    open(sync + ".go.5", "w").close()
    carrier.expect_success(LIMIT)


@case
def in_the_way(context):
    """A program that asks for nobody's leave speaks to a process just when a tool wants to: the tool waits for its end."""
    server = context.start("server", [context.tool("cr-server"), "--dir", context.folder("server"), "--workers", "0"])
    harness.wait_for(lambda: harness.connects(context.path("server/session.sock")), LIMIT, server.describe)
    place = "unix:" + context.path("server/session.sock")
    job, image, sync = context.path("job"), context.path("image"), context.path("sync")
    carrier = context.start(
        "run", [context.tool("cr-run"), "--server", place, "--job-dir", job, "--", context.program, "--steps", "20"],
        CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="5",
    )  # fmt: skip
    harness.wait_for(lambda: os.path.exists(sync) and "paused 5" in open(sync).read(), LIMIT, carrier.describe)

    def hindered(number, step, *words):
        steps = context.path(f"steps{number}")
        tool = context.start(f"tool{number}", [context.tool(words[0]), *words[1:]], CR_TEST_STEPS=steps, CR_TEST_STOP_AT=step)
        harness.wait_for(lambda: os.path.exists(steps) and step in open(steps).read(), LIMIT, tool.describe)
        [path] = glob.glob(job + "/agent-*.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
            guest.connect(path)
            time.sleep(0.1)  # the process accepts it
            open(steps + ".go", "w").close()
            time.sleep(0.5)
            if not tool.running():
                raise Failure(f"the tool did not wait for the guest\n{tool.describe()}")
        return tool

    hindered(1, "find processes", "cr-checkpoint", job, image).expect_success(LIMIT)
    hindered(2, "give back 1/1", "cr-checkpoint", job, image).expect_success(LIMIT)
    hindered(3, "find processes", "cr-migrate", job, "--to", place).expect_success(LIMIT)
    context.run([context.tool("cr-checkpoint"), "--stop", job, image])
    carrier.wait(LIMIT)
    carrier = hindered(4, "give the session 1/1", "cr-restart", image, "--server", place)
    open(sync + ".go.5", "w").close()
    carrier.expect_success(LIMIT)


@case
def stopped(context):
    """One of a job's processes with CUDA is stopped: no tool waits for it, each says which one it is, and the job goes on."""
    syncs = [context.path("a.sync"), context.path("b.sync")]
    script = context.script(
        "two", "".join(f"CR_TEST_SYNC_FILE={sync} CR_TEST_PAUSE_AT=3 {context.program} --steps 10 &\n" for sync in syncs) + "wait\n"
    )
    server = context.start("server", [context.tool("cr-server"), "--dir", context.folder("server"), "--workers", "0"])
    harness.wait_for(lambda: harness.connects(context.path("server/session.sock")), LIMIT, server.describe)
    job = context.start("job", [context.tool("cr-run"), "--name", "two", "--", script], CUDA_REMOTE_TRACE=context.path("trace"))
    stands_and_is_listed(context, job, "two", *syncs)

    def sessions():
        [listed] = jobs_of(context)
        return {one["pid"]: one.get("session") for one in listed["process_list"] if one["program"] == "globals"}

    before = sessions()
    pid = min(before)
    os.kill(pid, signal.SIGSTOP)
    harness.wait_for(lambda: harness.state_of(pid) == "T", LIMIT, job.describe)
    same("sessions", sessions(), {**before, pid: None})
    for command in (
        ["cr-checkpoint", "two", context.path("image")],
        ["cr-migrate", "two", "--to", "unix:" + context.path("server/session.sock")],
        ["cr-trace", "--totals", "--pid", str(pid), "two"],
    ):
        said = context.run([context.tool(command[0]), *command[1:]], expect=1).stderr
        if f"globals (PID {pid}) is stopped by a signal" not in said:
            raise Failure(f"{command[0]} does not name the stopped process: {said}")
    os.kill(pid, signal.SIGCONT)
    context.run([context.tool("cr-checkpoint"), "two", context.path("image")])
    same("sessions", sessions(), before)
    for sync in syncs:
        open(sync + ".go.3", "w").close()
    job.expect_success(LIMIT)


@case
def at_work(context):
    """While a checkpoint works, cr-ps says so and counts the job's processes only, and cr-trace waits; a stopped job is shown as that."""
    sync, steps, image = context.path("sync"), context.path("steps"), context.path("image")
    script = context.script("two", f"CR_TEST_SYNC_FILE={sync} CR_TEST_PAUSE_AT=3 {context.program} --steps 10\nexit\n")
    job = context.start("job", [context.tool("cr-run"), "--name", "two", "--", script], CUDA_REMOTE_TRACE=context.path("trace"))
    stands_and_is_listed(context, job, "two", sync)
    ps = lambda: context.run([context.tool("cr-ps")]).stdout
    row = lambda: next(line.split() for line in ps().splitlines() if line.startswith("two "))
    before = row()
    same("state before", before[1], "running")
    tool = context.start("tool", [context.tool("cr-checkpoint"), "two", image], CR_TEST_STEPS=steps, CR_TEST_STOP_AT="write the logs")
    harness.wait_for(lambda: os.path.exists(steps) and "write the logs" in open(steps).read(), LIMIT, tool.describe)
    text = ps()
    same("state and processes while it is saved", (row()[1], row()[3]), ("saving", before[3]))
    if "no GPU session" in text or not re.search(r"cr-checkpoint \(PID \d+\) works on the job", text):
        raise Failure(f"cr-ps does not say that a checkpoint works:\n{text}")
    trace = context.start("trace", [context.tool("cr-trace"), "--totals", "two"])
    says = lambda: re.search(r"waiting for cr-checkpoint \(PID \d+\)", trace.stderr())
    harness.wait_for(lambda: says() or not trace.running(), LIMIT, trace.describe)
    said = context.run([context.tool("cr-trace"), "--totals", "--wait", "0", "two"], expect=1).stderr
    if "is working on this job" not in said:
        raise Failure(f"cr-trace --wait 0 says {said}")
    open(steps + ".go", "w").close()
    tool.expect_success(LIMIT)
    trace.expect_success(LIMIT)
    # cr-ps and cr-trace have the same number for the process.
    [listed] = jobs_of(context)
    [pid] = [one["pid"] for one in listed["process_list"] if one.get("session")]
    if not re.search(rf"^globals \(PID {pid}\) on this machine is process \d+ in the job$", trace.stdout().decode(), re.M):
        raise Failure(f"cr-trace does not name process {pid}: {trace.describe()}")
    first = listed["pid"]
    os.kill(first, signal.SIGSTOP)
    harness.wait_for(lambda: harness.state_of(first) == "T", LIMIT, job.describe)
    same("state of a stopped job", row()[1], "stopped")
    os.kill(first, signal.SIGCONT)
    harness.wait_for(lambda: harness.state_of(first) != "T", LIMIT, job.describe)
    same("state afterwards", row()[1], "running")
    open(sync + ".go.3", "w").close()
    job.expect_success(LIMIT)


@case
def same_name(context):
    """A job is killed while its image is written, and another one begins under its name: what the tool notes is not of that one."""
    jobs, steps = context.path("runtime/cuda-remote/jobs"), context.path("steps")

    def begin(name):
        sync = context.path(name)
        process = context.start(
            name, [context.tool("cr-run"), "--name", "train", "--", context.program, "--steps", "20"],
            CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3",
        )  # fmt: skip
        harness.wait_for(lambda: os.path.exists(sync) and "paused 3" in open(sync).read(), LIMIT, process.describe)
        return process

    for number, ends in enumerate(([], ["--stop"])):
        first = begin(f"first{number}")
        noted = f"{steps}{number}"
        tool = context.start(
            f"tool{number}", [context.tool("cr-checkpoint"), *ends, "train", context.path(f"image{number}")],
            CR_TEST_STEPS=noted, CR_TEST_STOP_AT="commit the image",
        )  # fmt: skip
        harness.wait_for(lambda: os.path.exists(noted) and "commit the image" in open(noted).read(), LIMIT, tool.describe)
        with open(jobs + "/train/job.json") as f:
            pid = json.load(f)["pid"]
        os.kill(first.pid, signal.SIGKILL)
        first.wait(LIMIT)
        harness.wait_for(lambda: not os.path.exists(f"/proc/{pid}"), LIMIT, lambda: "the job's processes are still there")
        second = begin(f"second{number}")
        open(noted + ".go", "w").close()
        tool.expect_success(LIMIT)
        [listed] = jobs_of(context)
        same("saved", (listed.get("saved_unix_ms"), listed.get("saved_image")), (None, None))
        same("stopped", os.path.exists(jobs + "/train/stopped"), False)
        open(context.path(f"second{number}") + ".go.3", "w").close()
        second.expect_success(LIMIT)


# What a tool may say that finds another one at work, or comes where the job is not (yet).
IN_THE_WAY = re.compile(r"is working on this job|is restarting this job|was killed, and the job is being given its GPU sessions back")
NOT_THERE = re.compile(
    IN_THE_WAY.pattern + r"|there is no job|cannot read .*/job.json|no process of the job uses CUDA|has ended"
    r"|cannot connect to|has closed the connection|asks the job's processes"
)


class Crowd:
    """A job of three CUDA processes, and of short ones, on which tools work that a seed chooses."""

    def __init__(self, context, seed):
        self.context, self.pick = context, random.Random(seed)
        self.servers, self.started, self.kept = [], 0, []
        for name in ("one", "two"):
            server = context.start("server-" + name, [context.tool("cr-server"), "--dir", context.folder(name), "--workers", "1"])
            harness.wait_for(lambda: harness.connects(context.path(name + "/session.sock")), LIMIT, server.describe)
            self.servers.append("unix:" + context.path(name + "/session.sock"))
        self.job = os.path.join(context.variables["XDG_RUNTIME_DIR"], "cuda-remote", "jobs", "crowd")
        self.image, self.sync = context.path("image"), context.path("sync")
        ranks = "".join(f"CR_TEST_SYNC_FILE={self.sync} {context.program} --steps 2000 >{context.path(str(i))} &\n" for i in range(3))
        short = f"until [ -e {self.sync}.fast ]; do CR_TEST_STEP_MS=1 {context.program} --steps 3; done >{context.path('short')} &\n"
        script = context.script("script", ranks + short + "wait\n")
        self.carrier = context.start(
            "job", [context.tool("cr-run"), "--server", self.servers[0], "--name", "crowd", "--adopt", "--", script],
            CR_TEST_STEP_MS="40", CUDA_REMOTE_TRACE=context.path("trace"),
        )  # fmt: skip
        self.await_steps()

    def await_steps(self):
        """The job makes steps."""
        made = lambda: os.path.getsize(self.sync) if os.path.exists(self.sync) else 0
        before = made()
        harness.wait_for(lambda: made() > before + 30 or not self.carrier.running(), LIMIT, self.carrier.describe)
        if not self.carrier.running():
            raise Failure(f"the job has ended\n{self.carrier.describe()}")

    def begin(self, *words):
        self.started += 1
        return self.context.start(f"tool{self.started}", [self.context.tool(words[0]), *words[1:]])

    def expect(self, tool, *codes, unless=None):
        """The tool has ended with one of these codes, or says something of `unless`. Whether the first code was it."""
        code = tool.wait(LIMIT)
        if code not in codes and not (unless and unless.search(tool.stderr())):
            raise Failure(f"a tool ended with {code}\n{tool.describe()}")
        return code == codes[0]

    def again(self):
        """Once the job was saved and stopped: brings it back. Who does that may be killed."""
        same("exit code of the stopped job", self.carrier.wait(LIMIT), 121)
        restart = ["cr-restart", self.image, "--cut", self.context.path("short"), "--server", self.servers[0]]
        if self.pick.random() < 0.4:
            tool = self.begin(*restart)
            time.sleep(self.pick.uniform(0, 0.6))
            tool.kill()
            tool.wait(LIMIT)
        self.carrier = self.begin(*restart)
        self.await_steps()

    def checkpoint(self):
        self.expect(self.begin("cr-checkpoint", "crowd", self.image), 0)

    def move(self):
        self.expect(self.begin("cr-migrate", "crowd", "--to", self.servers[1]), 0)
        self.servers.reverse()

    def stop(self):
        self.expect(self.begin("cr-checkpoint", "--stop", "crowd", self.image), 0)
        self.again()

    def two(self):
        """Of two tools at one moment, each works or names the other."""
        checkpoint = self.begin("cr-checkpoint", "crowd", self.image)
        time.sleep(self.pick.choice((0, 0, 0.02, 0.2)))
        move = self.begin("cr-migrate", "crowd", "--to", self.servers[1])
        saved = self.expect(checkpoint, 0, unless=IN_THE_WAY)
        moved = self.expect(move, 0, unless=IN_THE_WAY)
        if moved:
            self.servers.reverse()
        if not saved and not moved:
            raise Failure(f"neither of two tools\n{checkpoint.describe()}\n{move.describe()}")

    def killed(self):
        """A tool is killed: what a person has started, or the process that does the work."""
        words = self.pick.choice((["cr-checkpoint", "crowd", self.image], ["cr-migrate", "crowd", "--to", self.servers[1]]))
        tool = self.begin(*words)
        time.sleep(self.pick.uniform(0, 0.5))
        at_work = lambda: harness.processes_with(self.context.tool(words[0]))
        for pid in [tool.pid] if self.pick.random() < 0.5 else [pid for pid in at_work() if pid != tool.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        tool.wait(LIMIT)
        harness.wait_for(lambda: not at_work(), LIMIT, lambda: f"{words[0]} goes on")
        with open(self.job + "/gpu-server") as f:
            if f.readline().strip() != self.servers[0]:
                self.servers.reverse()

    def look(self, stop, failed):
        """Looks at the job all the time, from several threads."""
        ways = [["cr-ps", "--json"], ["cr-trace", "--totals", "crowd"], ["cr-trace", "-s", "0.1", "crowd"]]

        def one(words):
            while not stop.is_set():
                command = [self.context.tool(words[0]), *words[1:]]
                try:
                    ended = self.context.run(command, expect=None)
                except Failure as failure:
                    failed.append(str(failure))
                    return
                if ended.returncode != 0 and not NOT_THERE.search(ended.stderr):
                    failed.append(f"{shown(command)} ended with {ended.returncode}: {ended.stderr}")

        return [threading.Thread(target=one, args=(words,)) for words in ways]


@case
def at_once(context):
    """Tools come at any moment, several at a time, and are killed: the job's output is that of an uninterrupted run."""
    seed, seconds = int(os.environ.get("CR_SEED", 1)), float(os.environ.get("CR_SECONDS", 15))
    crowd = Crowd(context, seed)
    stop, failed = threading.Event(), []
    lookers = crowd.look(stop, failed)
    for looker in lookers:
        looker.start()
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            action = crowd.pick.choice(("checkpoint", "move", "stop", "two", "two", "killed", "killed", "killed"))
            print(f"    {action}", flush=True)
            getattr(crowd, action)()
            crowd.await_steps()
            if failed:
                raise Failure(failed[0])
    finally:
        stop.set()
        for looker in lookers:
            looker.join()
    if failed:
        raise Failure(failed[0])
    open(crowd.sync + ".fast", "w").close()
    crowd.carrier.expect_success(LIMIT)
    for i in range(3):
        same(f"process {i}", open(context.path(str(i))).read(), context.expected(2000))
    short, want = open(context.path("short")).read(), context.expected(3)
    if not short:
        raise Failure("no short process has ended")
    same("short processes", short, want * (len(short) // len(want)))


def run_one(name, options):
    if os.geteuid() != 0:
        raise Failure("jobs.py needs root")
    try:
        with harness.Lab(options.product, keep=options.keep) as lab:
            CASES[name](Context(lab, options))
    finally:
        shutil.rmtree(f"/tmp/cuda-remote-{USER}", ignore_errors=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.run_cases(arguments, CASES, run_one)
