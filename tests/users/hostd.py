#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""cr-hostd: ordinary users save, restart and move jobs of their own, and get at nothing else by that.

Needs root: the users are played by processes with their numbers. Python 3 standard library only.

Usage: hostd.py --product FOLDER --apps FOLDER [--only CASE,CASE] [--keep] [--list]
"""

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import hmac
import json
import os
import resource
import select
import shutil
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import termios
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import users  # noqa: E402
from users import ATTACKER, LIMIT, PYTHON, VICTIM, Failure, harness, paused_at, refused, worked  # noqa: E402

CASES = {}
BOTH = 900_001  # a group that both users are in
HOSTD_VERSION = 2  # kVersion of host/wire.h


def case(function):
    CASES[function.__name__] = function
    return function


def accepts(path):
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


class Host:
    """A cr-hostd with folders of its own, and users who know of it."""

    def __init__(self, context, name="host", more=(), memory=None, **variables):
        self.context = context
        self.folder = context.folder(name, 0o755)
        if memory:  # as /run is: a file system of this size
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=755,size={memory}", "none", self.folder], check=True)
        self.socket = self.folder + "/hostd.sock"
        self.state = self.folder + "/state"
        self.key = self.state + "/hostd.key"
        self.home = self.folder + "/home"
        os.mkdir(self.home)
        os.chown(self.home, VICTIM, VICTIM)
        os.chmod(self.home, 0o700)
        self.variables, self.more = variables, more
        self.daemon = None
        self.start()

    def start_again(self, steps, **variables):
        """With other variables, and without what was noted of steps in the file `steps`."""
        for path in (steps, steps + ".go"):
            if os.path.exists(path):
                os.unlink(path)
        self.variables = variables
        self.daemon.kill()
        self.daemon.wait()
        self.start()

    def start(self):
        command = [self.context.tool("cr-hostd"), "--socket", self.socket, "--state", self.state, *self.more]
        self.daemon = self.context.start(0, command, **self.variables)
        up = lambda: accepts(self.socket) or self.daemon.poll() is not None
        harness.wait_for(up, LIMIT, lambda: "cr-hostd does not start")
        if self.daemon.poll() is not None:
            raise Failure(f"cr-hostd has ended: {self.daemon.stderr.read()}")

    def env(self, variables):
        return {"CUDA_REMOTE_HOSTD": self.socket, **variables}

    def run(self, user, tool, *words, **variables):
        return self.context.run(user, [self.context.tool(tool), *words], **self.env(variables))

    def begin(self, user, tool, *words, **variables):
        return self.context.start(user, [self.context.tool(tool), *words], **self.env(variables))

    def job(self, name, user=VICTIM):
        return f"{self.folder}/users/{user}/cuda-remote/jobs/{name}"

    def facts(self, name):
        return json.load(open(self.job(name) + "/job.json"))

    def wait_for_job(self, name, child, user=VICTIM):
        harness.wait_for(
            lambda: os.path.exists(self.job(name, user) + "/job.json") or child.poll() is not None, LIMIT, lambda: f"no job {name}"
        )
        if child.poll() is not None:
            raise Failure(f"the job has ended with {child.returncode}: {child.stderr.read()}")


def ended(child, code=0):
    """What a process has written, once it has ended with this code."""
    try:
        out, errors = child.communicate(timeout=harness.patient(LIMIT))
    except subprocess.TimeoutExpired:
        raise Failure(f"{child.args} does not end")
    if child.returncode != code:
        raise Failure(f"{child.args} ended with {child.returncode}, not {code}:\n{out}\n{errors}")
    return out


def status_of(pid):
    return dict(line.split(":", 1) for line in open(f"/proc/{pid}/status").read().splitlines() if ":" in line)


def has_only_rights_of(pid, user, groups=()):
    facts = status_of(pid)
    numbers = [facts[name].split() for name in ("Uid", "Gid", "Groups")]
    if numbers != [[str(user)] * 4, [str(user)] * 4, [str(group) for group in groups]]:
        raise Failure(f"process {pid} runs as {numbers}, not as {user}")
    for name in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
        if int(facts[name], 16) != 0:
            raise Failure(f"process {pid} has capabilities: {name} {facts[name]}")


def belongs_to(path, user):
    for folder, _, leaves in os.walk(path):
        for one in [folder] + [os.path.join(folder, leaf) for leaf in leaves]:
            facts = os.lstat(one)
            if facts.st_uid != user or facts.st_mode & 0o077:
                raise Failure(f"{one} is not the user's alone: {facts.st_uid}, {stat.filemode(facts.st_mode)}")


def spool_is_empty(host):
    left = lambda: os.listdir(host.state + "/spool")
    harness.wait_for(lambda: not left(), LIMIT, lambda: f"cr-hostd has left {left()} in its folder")


@case
def whole_way(context):
    """A user starts a job, saves it while it runs, moves it, stops it and restarts it; it ends as if nothing had been."""
    host = Host(context)
    image, sync = host.home + "/image", host.home + "/sync"
    want = worked(host.run(VICTIM, "cr-run", "--plain", "--", *context.command())).stdout
    child = host.begin(
        VICTIM, "cr-run", "--name", "hers", "--", *context.command(), CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3,9,15"
    )
    paused_at(sync, 3, child)
    pid = host.facts("hers")["pid"]
    has_only_rights_of(pid, VICTIM)
    listed = json.loads(worked(host.run(VICTIM, "cr-ps", "--json")).stdout)["jobs"]
    if [(one["name"], one["running"], one["processes"]) for one in listed] != [("hers", True, 1)]:
        raise Failure(f"cr-ps of the user does not show the running job: {listed}")
    saved = worked(host.run(VICTIM, "cr-checkpoint", "hers", image, "--json"))
    if json.loads(saved.stdout)["image"] != image:
        raise Failure(f"cr-checkpoint names another image: {saved.stdout}")
    belongs_to(image, VICTIM)
    server = context.start(VICTIM, [context.tool("cr-server"), "--dir", host.home + "/server"])
    harness.wait_for(lambda: harness.connects(host.home + "/server/session.sock"), LIMIT, lambda: "no server")
    worked(host.run(VICTIM, "cr-migrate", "hers", "--to", f"unix:{host.home}/server"))
    sessions = json.loads(worked(context.run(VICTIM, [context.tool("cr-ps"), "--server", f"unix:{host.home}/server", "--json"])).stdout)
    if [str(VICTIM) in one["owner"] for one in sessions["sessions"]] != [True]:
        raise Failure(f"the moved session is not the user's: {sessions}")
    open(sync + ".go.3", "w").close()
    paused_at(sync, 9, child)
    worked(host.run(VICTIM, "cr-checkpoint", "--stop", str(pid), image))
    ended(child, 121)
    if os.path.exists(host.job("hers")):
        raise Failure("the stopped job has left its folder")
    spool_is_empty(host)
    again = host.begin(VICTIM, "cr-restart", image)
    host.wait_for_job("hers", again)
    has_only_rights_of(host.facts("hers")["pid"], VICTIM)
    if host.facts("hers")["image"] != image:
        raise Failure(f"the restarted job names another image: {host.facts('hers')['image']}")
    spool_is_empty(host)
    worked(host.run(VICTIM, "cr-checkpoint", "hers", image))
    for step in (9, 15):
        open(f"{sync}.go.{step}", "w").close()
    out = ended(again)
    if out != want:
        raise Failure(f"the restarted job wrote\n{out}\nexpected\n{want}")
    spool_is_empty(host)
    server.terminate()


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field(number, value):
    """A field of a protobuf message: a number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def option(name, value=None):
    return field(3, field(1, name.encode()) + (field(3, 1) if value is None else field(2, value.encode())))


ASK = """
import os, socket, struct, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
body = bytes.fromhex(sys.argv[2])
null = os.open("/dev/null", os.O_RDWR)
streams = [0, 1, 2] if sys.argv[3] == "own" else [null] * 3
socket.send_fds(s, [struct.pack("<I", len(body)) + body], streams + [os.open("/", os.O_RDONLY)])
print(s.recv(65536))
"""


def asked(host, user, *fields, streams="none"):
    """What cr-hostd answers to a hand-made request."""
    body = field(1, HOSTD_VERSION) + b"".join(fields)
    return worked(host.context.run(user, [PYTHON, "-c", ASK, host.socket, body.hex(), streams])).stdout


def start_sleeper(host, name, user=VICTIM):
    child = host.begin(user, "cr-run", "--name", name, "--", "/bin/sleep", "600")
    host.wait_for_job(name, child, user)
    return child


@case
def named(context):
    """A job keeps its name on the way through cr-hostd, and is called as its program without one, as without cr-hostd."""
    host = Host(context)
    own = ["/bin/sh", "-c", "echo $CUDA_REMOTE_JOB"]
    for words, name in ((["--name", "train"], "train"), ([], "sh")):
        told = worked(host.run(VICTIM, "cr-run", *words, "--", *own)).stdout
        if told != name + "\n":
            raise Failure(f"the job that cr-run {words} starts is called {told!r}")
    told = worked(host.run(VICTIM, "cr-run", "--", *own, CUDA_REMOTE_JOB="set")).stdout
    if told != "set\n":
        raise Failure(f"the job is not called as CUDA_REMOTE_JOB says: {told!r}")
    # Nor does a program start there without its server.
    nowhere = host.home + "/none.sock"
    start = ["--server", "unix:" + nowhere, "--", "/bin/touch", host.home + "/started"]
    refused(host.run(VICTIM, "cr-run", *start), f"the GPU server unix:{nowhere} cannot be reached")
    if os.path.exists(host.home + "/started"):
        raise Failure("the program was started without its server")
    worked(host.run(VICTIM, "cr-run", "--no-check", *start))


@case
def drained_beside(context):
    """cr-drain of a cr-hostd at another socket leaves root's jobs alone, and --dry-run leaves all alone."""
    host, drained = Host(context), context.folder("drained", 0o755)
    own = {"XDG_RUNTIME_DIR": context.folder("runtime", 0o700)}
    child = start_sleeper(host, "hers")
    roots = context.start(0, [context.tool("cr-run"), "--name", "rooted", "--", "/bin/sleep", "600"], **own)
    job = own["XDG_RUNTIME_DIR"] + "/cuda-remote/jobs/rooted/job.json"
    harness.wait_for(lambda: os.path.exists(job) or roots.poll() is not None, LIMIT, lambda: "root's job does not start")
    told = worked(host.run(0, "cr-drain", "--save", drained, "--dry-run", **own)).stdout
    if "0 would move, 1 would be saved, 0 would be left" not in told or "job hers of" not in told or "rooted" in told:
        raise Failure(f"cr-drain --dry-run says {told}")
    worked(host.run(VICTIM, "cr-run", "--", "/bin/true"))
    if child.poll() is not None or os.listdir(drained):
        raise Failure("cr-drain --dry-run has done something")
    told = worked(host.run(0, "cr-drain", "--save", drained, **own)).stdout
    if "0 moved, 1 saved, 0 left" not in told:
        raise Failure(f"cr-drain says {told}")
    ended(child, 121)
    if roots.poll() is not None:
        raise Failure("cr-drain has ended root's job")
    roots.terminate()
    roots.wait(LIMIT)


@case
def other_users(context):
    """Nobody gets at another user's job or image, or at what is root's to say."""
    host = Host(context)
    image, theirs = host.home + "/image", context.folder("theirs", 0o700, ATTACKER)
    child = start_sleeper(host, "hers")
    job = host.job("hers")
    for name in ("hers", job, str(host.facts("hers")["pid"])):
        for command in (["cr-checkpoint", name, theirs + "/image"], ["cr-migrate", name, "--to", "unix:/none"]):
            users.refused(host.run(ATTACKER, *command), "")
    if host.run(ATTACKER, "cr-ps").stdout.find("hers") >= 0:
        raise Failure("cr-ps shows another user's job")
    tool, image_there = field(2, b"checkpoint"), field(5, (theirs + "/image").encode())
    for name in ("hers", f"../../../{VICTIM}/cuda-remote/jobs/hers", f"../{VICTIM}", ".", "..", "", "a/b", "-x", "a b"):
        answer = asked(host, ATTACKER, tool, image_there, field(4, name.encode()))
        if "no job in" not in answer and "cannot be the name" not in answer:
            raise Failure(f"cr-hostd answers {answer} to the name {name!r}")
    for words in (option("user", "root"), option("job-dir", "/tmp/x"), option("caller", "0"), option("keep", "3"), option("plain")):
        answer = asked(host, ATTACKER, field(2, b"run"), field(4, b"mine"), field(6, b"/bin/id"), words)
        if "is not available" not in answer:
            raise Failure(f"cr-hostd takes an option that is root's: {answer}")
    answer = asked(host, ATTACKER, field(2, b"restart"), image_there, option("trust-owner"))
    if "no checkpoint image" not in answer:
        raise Failure(f"cr-hostd takes --trust-owner: {answer}")
    # The test's pipes are root's; CRIU would have to make them the user's.
    answer = asked(host, ATTACKER, field(2, b"restart"), image_there, streams="own")
    if "a pipe that belongs to user 0" not in answer:
        raise Failure(f"cr-hostd takes root's pipe: {answer}")
    for body in (b"", b"\xff" * 100, field(2, b"reboot")):
        if "b''" in asked(host, ATTACKER, body):
            raise Failure("cr-hostd does not answer")
    # What the user has said for root's tools is not theirs.
    evil = host.home + "/criu"
    context.python(VICTIM, "import os, sys; open(sys.argv[1], 'w').write('#!/bin/sh\\nid >' + sys.argv[1] + '.ran\\n'); os.chmod(sys.argv[1], 0o755)", evil)
    worked(host.run(VICTIM, "cr-checkpoint", "hers", image, CUDA_REMOTE_CRIU=evil))
    if os.path.exists(evil + ".ran"):
        raise Failure("root's tool has run the user's program")
    # A copy of her image, as if she had given it.
    copy = theirs + "/copy"
    shutil.copytree(image, copy)
    for folder, _, leaves in os.walk(copy):
        for one in [folder] + [os.path.join(folder, leaf) for leaf in leaves]:
            os.chown(one, ATTACKER, ATTACKER)
    refused(host.run(ATTACKER, "cr-restart", image), "Permission denied")
    refused(host.run(ATTACKER, "cr-restart", copy), f"of a job of user {VICTIM}")
    # A folder that somebody else has prepared, and a place of somebody else's.
    open_folder = context.folder("open", 0o1777)
    context.python(ATTACKER, "import os, sys; os.mkdir(sys.argv[1], 0o777)", open_folder + "/image.partial")
    refused(host.run(VICTIM, "cr-checkpoint", "hers", open_folder + "/image"), f"belongs to user {ATTACKER}")
    refused(host.run(VICTIM, "cr-checkpoint", "hers", theirs + "/image"), "Permission denied")
    refused(host.run(VICTIM, "cr-checkpoint", "hers", "/root-only/image"), "does not exist")
    if child.poll() is not None or sorted(os.listdir(theirs)) != ["copy"]:
        raise Failure(f"the job was disturbed, or there is an image: {os.listdir(theirs)}")
    spool_is_empty(host)


@case
def images(context):
    """An image that is not as cr-hostd has signed it is refused, and names what is wrong."""
    host = Host(context)
    image = host.home + "/image"
    child = start_sleeper(host, "hers")
    worked(host.run(VICTIM, "cr-checkpoint", "--stop", "hers", image))
    ended(child, 121)
    core = next(name for name in sorted(os.listdir(image + "/client")) if name.startswith("core-"))

    def refuse(change, *words):
        broken = host.home + "/broken"
        shutil.rmtree(broken, ignore_errors=True)
        worked(context.run(VICTIM, ["/bin/cp", "-a", image, broken]))
        context.python(VICTIM, "import os, sys; os.chdir(sys.argv[1])\n" + change, broken)
        refused(host.run(VICTIM, "cr-restart", broken), *words)

    flip = "f = open({!r}, 'r+b'); f.seek({}); b = f.read(1); f.seek(-1, 1); f.write(bytes([b[0] ^ 1])); f.close()"
    for path in ("client/" + core, "client/pages-1.img", "manifest.pb", "memory/index"):
        refuse(flip.format(path, 20), path, "the image was changed")
    refuse(f"open('client/{core}', 'ab').write(b'x')", core, "the image was changed")
    refuse(f"os.unlink('client/{core}')", core, "the image was changed")
    refuse(f"os.rename('client/{core}', 'a'); os.symlink('../a', 'client/{core}')", core, "the image was changed")
    refuse(f"os.unlink('client/{core}'); os.mkfifo('client/{core}')", core, "the image was changed")
    refuse(flip.format("signature", 30), "signature")
    refuse("os.unlink('signature')", "is not signed")
    refuse("open('signature', 'wb').write(b'x' * 100)", "is not a signature of cr-hostd")
    # A whole host with another key; then with the same one.
    other = Host(context, "other")
    refused(other.run(VICTIM, "cr-restart", image), "signed with another key")
    spool_is_empty(host)
    again = host.begin(VICTIM, "cr-restart", image)
    host.wait_for_job("hers", again)
    has_only_rights_of(host.facts("hers")["pid"], VICTIM)


def digest(data, bits=128):
    """XXH3 of `data` as images have it: the halves of 128 bits big-endian, 64 bits little-endian."""
    library = ctypes.CDLL("libxxhash.so.0")

    class Halves(ctypes.Structure):
        _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]

    library.XXH3_128bits.restype, library.XXH3_64bits.restype = Halves, ctypes.c_uint64
    if bits == 64:
        return struct.pack("<Q", library.XXH3_64bits(data, ctypes.c_size_t(len(data))))
    halves = library.XXH3_128bits(data, ctypes.c_size_t(len(data)))
    return struct.pack(">QQ", halves.high, halves.low)


def fields_of(data):
    """The fields of a protobuf message: number and value."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        length = {0: 0, 1: 8, 2: None, 5: 4}[tag & 7]
        if tag & 7 == 0:
            yield tag >> 3, number()
            continue
        length = number() if length is None else length
        at += length
        yield tag >> 3, data[at - length : at]


def replaced(data, old, new):
    if data.count(old) == 0 or len(old) != len(new):
        raise Failure("the image is not as this test expects it")
    return data.replace(old, new)


def forge(image, key, path, old, new):
    """Changes a file of the image, its checksums and the signature, as somebody with cr-hostd's key could."""
    read = lambda name: open(os.path.join(image, name), "rb").read()

    def write(name, data):
        with open(os.path.join(image, name), "r+b") as f:
            f.write(data)

    before, manifest = read(path), read("manifest.pb")
    after = replaced(before, old, new)
    contents = dict(fields_of(manifest))
    inner = replaced(contents[3], digest(before), digest(after))
    inner = replaced(inner, digest(before, 64), digest(after, 64))
    head = contents[1] + struct.pack("<I", contents[2])
    fresh = replaced(replaced(manifest, contents[3], inner), digest(head + contents[3]), digest(head + inner))
    statement = dict(fields_of(read("signature")))[1]
    signed = replaced(statement, hashlib.sha256(before).digest(), hashlib.sha256(after).digest())
    signed = replaced(signed, hashlib.sha256(manifest).digest(), hashlib.sha256(fresh).digest())
    write(path, after)
    write("manifest.pb", fresh)
    code = lambda text: hmac.new(open(key, "rb").read(), text, "sha256").digest()
    write("signature", replaced(replaced(read("signature"), statement, signed), code(statement), code(signed)))


@case
def forged(context):
    """Behind the signature: an image that asks for root's number, a group of root's or capabilities is refused all the
    same, also from somebody who has the key."""
    host = Host(context)
    image, broken = host.home + "/image", host.home + "/broken"
    child = start_sleeper(host, "hers")
    worked(host.run(VICTIM, "cr-checkpoint", "--stop", "hers", image))
    ended(child, 121)
    core = next("client/" + name for name in sorted(os.listdir(image + "/client")) if name.startswith("core-"))
    number = varint(VICTIM)
    root = b"\x80" * (len(number) - 1) + b"\0"
    user, capabilities = field(1, VICTIM), b"".join(field(9, 0) * 2 for _ in range(1)) + field(10, 0) * 2
    effective = field(10, 0) * 2 + field(11, 0) * 2
    for old, new, words in (
        (user, b"\x08" + root, "user 0"),
        (field(5, VICTIM), b"\x28" + root, "user 0"),
        (field(4, VICTIM), b"\x20" + root, "group 0"),
        (effective, (field(10, 127) + field(10, 1)) + (field(11, 127) + field(11, 1)), "capabilities"),
        (capabilities, field(9, 1) + field(9, 0) + field(10, 0) * 2, "capabilities"),
    ):
        shutil.rmtree(broken, ignore_errors=True)
        worked(context.run(VICTIM, ["/bin/cp", "-a", image, broken]))
        forge(broken, host.key, core, old, new)
        refused(host.run(VICTIM, "cr-restart", broken), "does not have", words)
    # The same with nothing changed is a good image.
    shutil.rmtree(broken)
    worked(context.run(VICTIM, ["/bin/cp", "-a", image, broken]))
    forge(broken, host.key, core, user, user)
    again = host.begin(VICTIM, "cr-restart", broken)
    host.wait_for_job("hers", again)
    spool_is_empty(host)


HOLDING = """
import os, sys, time
mine, other = sys.argv[1:]
os.chdir(mine + "/folder")
held = [open(mine + "/secret"), open(other), open(mine + "/ghost", "w+")]
held[2].write("as it was")
held[2].flush()
os.unlink(mine + "/ghost")
time.sleep(600)
"""


@case
def forged_paths(context):
    """Behind the signature: an image whose files, folders and deleted files are root's instead of the user's gives her
    nothing of root's, and makes nothing of root's."""
    host = Host(context)
    image, broken = host.home + "/image", host.home + "/broken"
    mine, roots = context.folder("mine", 0o755, VICTIM), context.folder("root", 0o700)
    through = "/proc/1/root" + roots + "/secret"
    other = os.path.join(mine, "x" * (len(through) - len(mine) - 1))
    for folder, owner in ((mine, VICTIM), (roots, 0)):
        os.mkdir(folder + "/folder", 0o700)
        os.chown(folder + "/folder", owner, owner)
    for path, owner in ((mine + "/secret", VICTIM), (other, VICTIM), (roots + "/secret", 0)):
        with open(path, "w") as f:
            f.write("as it was")
        os.chown(path, owner, owner)
        os.chmod(path, 0o600)
    child = host.begin(VICTIM, "cr-run", "--name", "hers", "--", PYTHON, "-c", HOLDING, mine, other)
    host.wait_for_job("hers", child)
    ready = lambda: os.path.exists(f"/proc/{host.facts('hers')['pid']}/cwd") and not os.path.exists(mine + "/ghost")
    harness.wait_for(lambda: ready() and os.readlink(f"/proc/{host.facts('hers')['pid']}/cwd") == mine + "/folder", LIMIT, lambda: "no job")
    held = lambda: [os.readlink(f"/proc/{host.facts('hers')['pid']}/fd/{fd}") for fd in os.listdir(f"/proc/{host.facts('hers')['pid']}/fd")]
    harness.wait_for(lambda: mine + "/ghost (deleted)" in held(), LIMIT, lambda: f"the job has {held()}")
    worked(host.run(VICTIM, "cr-checkpoint", "--stop", "hers", image))
    ended(child, 121)
    named = lambda begin: next("client/" + name for name in sorted(os.listdir(image + "/client")) if name.startswith(begin))
    # After a magic number of 8 bytes and a length.
    entry = lambda path: dict(fields_of(open(f"{image}/{path}", "rb").read()[12:]))
    ids = {number: value for number, value in entry(named("fs-")).items() if number in (1, 2)}
    ghost = entry(named("ghost-file-"))
    # A root of the user's choice, in which a program would find files of hers instead of the system's.
    root = field(1, ids[1]) + field(2, ids[2]), field(1, ids[1]) + field(2, ids[1])
    number, mode = varint(VICTIM), varint(ghost[3])
    as_root = b"\x80" * (len(number) - 1) + b"\0", varint(0o104755)
    owner = b"\x08" + number + b"\x10" + number + b"\x18" + mode, (b"\x08" + as_root[0] + b"\x10" + as_root[0] + b"\x18" + as_root[1])
    if ghost[1] != VICTIM or len(mode) != len(as_root[1]):
        raise Failure(f"the image is not as this test expects it: {ghost}")
    text = lambda old, new: (old.encode(), new.encode())
    for path, (old, new), words in (
        ("client/files.img", text(mine + "/secret", roots + "/secret"), roots + "/secret open, which"),
        ("client/files.img", text(other, through), through + " open, which"),
        ("client/files.img", text(mine + "/folder", roots + "/folder"), "Permission denied"),
        (named("fs-"), root, "a root folder that is not the job's"),
        (named("ghost-file-"), owner, "ownership"),
    ):
        shutil.rmtree(broken, ignore_errors=True)
        worked(context.run(VICTIM, ["/bin/cp", "-a", image, broken]))
        forge(broken, host.key, path, old, new)
        before = sorted(os.listdir(mine)), sorted(os.listdir(roots)), sorted(os.listdir(host.home))
        refused(host.run(VICTIM, "cr-restart", broken), words)
        after = sorted(os.listdir(mine)), sorted(os.listdir(roots)), sorted(os.listdir(host.home))
        if before != after or os.path.exists(host.job("hers")) or open(roots + "/secret").read() != "as it was":
            raise Failure(f"{path}: a refused restart has changed something: {before} {after}")
    # The same with nothing changed is a good image.
    again = host.begin(VICTIM, "cr-restart", image)
    host.wait_for_job("hers", again)
    spool_is_empty(host)


SURROUNDINGS = """
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (77, 99))
os.umask(0o027)
os.nice(3)
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
os.chdir(sys.argv[1])
os.execv(sys.argv[2], sys.argv[2:])
"""
SHOW = "ulimit -n; ulimit -Hn; umask; nice; pwd; id -G; echo $WORD; grep -c . <&0; grep NoNewPrivs /proc/self/status; cat /proc/self/cgroup"


@case
def surroundings(context):
    """A job has what is around the process that starts it, and no more; and cr-hostd does nothing for one in a sandbox."""
    host = Host(context)
    command = [PYTHON, "-c", SURROUNDINGS, host.home, context.tool("cr-run")]
    run = lambda words, **more: subprocess.run(
        command + words, input="one\ntwo\n", capture_output=True, text=True, timeout=harness.patient(LIMIT), cwd="/", user=VICTIM, group=VICTIM,
        extra_groups=[BOTH], env=context.environment(host.env({"WORD": "and more words"})), **more,
    )  # fmt: skip
    got = worked(run(["--name", "shown", "--", "sh", "-c", SHOW])).stdout
    native = worked(run(["--plain", "--", "sh", "-c", SHOW])).stdout
    if got != native or f"{VICTIM} {BOTH}" not in got or host.home not in got:
        raise Failure(f"through cr-hostd the program sees\n{got}\nand without it\n{native}")
    if worked(run(["--output", "out", "--", "sh", "-c", "exec echo hers"])).stdout:
        raise Failure("--output was not used")
    facts = os.lstat(host.home + "/out")
    if (facts.st_uid, stat.S_IMODE(facts.st_mode)) != (VICTIM, 0o640):
        raise Failure(f"the output file is {facts.st_uid}'s, {stat.filemode(facts.st_mode)}")
    for code in (0, 7, 126, 127):
        words = {126: ["/etc/passwd"], 127: ["/nothing/there"]}.get(code, ["sh", "-c", f"exit {code}"])
        if run(["--"] + words).returncode != code:
            raise Failure(f"{words} does not end with {code}")
    # A sandbox is not left by cr-hostd: the program runs, in it.
    inside = ["/usr/bin/unshare", "--net", "/usr/bin/setpriv", f"--reuid={VICTIM}", f"--regid={VICTIM}", "--clear-groups"]
    command = inside + [context.tool("cr-run"), "--", "readlink", "/proc/self/ns/net"]
    there = worked(context.run(0, command, **host.env({})))
    if os.readlink("/proc/self/ns/net") in there.stdout or "another network namespace" not in there.stderr:
        raise Failure(f"the job has left its network namespace: {there.stdout} {there.stderr}")
    signalled = start_sleeper(host, "signalled")
    os.kill(signalled.pid, signal.SIGTERM)
    ended(signalled, 128 + signal.SIGTERM)
    # Who kills cr-run ends its job.
    killed = start_sleeper(host, "killed")
    pid = host.facts("killed")["pid"]
    os.kill(killed.pid, signal.SIGKILL)
    harness.wait_for(lambda: not os.path.exists(f"/proc/{pid}"), LIMIT, lambda: "the job continues")


def promtool():
    return shutil.which("promtool") or "/opt/cuda-remote/promtool/promtool"


@case
def metrics(context):
    """cr-hostd --metrics counts what it does, in a form that Prometheus takes, and says what there is on the host."""
    port = harness.free_port()
    home = context.folder("server", 0o755)
    server = context.start(0, [context.tool("cr-server"), "--dir", home + "/one"])
    harness.wait_for(lambda: harness.connects(home + "/one/session.sock"), LIMIT, lambda: "no server")
    more = ["--metrics", f"127.0.0.1:{port}", "--gpu-server", f"unix:{home}/one", "--gpu-server", "unix:/none"]
    host = Host(context, more=more)

    def scraped():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=harness.patient(LIMIT)) as answer:
            text = answer.read().decode()
        checked = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True, timeout=harness.patient(LIMIT))
        if checked.returncode != 0:
            raise Failure(f"promtool says {checked.stdout}{checked.stderr}")
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("cuda_remote_host_")]
        return {name[len("cuda_remote_host_") :]: float(value) for name, value in lines}

    def shows(**wanted):
        now = scraped()
        got = {name: now.get(name.replace("__", '{tool="') + '"}' if "__" in name else name) for name in wanted}
        if got != wanted:
            raise Failure(f"the metrics are {got}, not {wanted}: {now}")

    shows(jobs=0, draining=0, requests_total__run=0, request_failures_total__run=0)
    child = start_sleeper(host, "hers")
    worked(host.run(VICTIM, "cr-checkpoint", "hers", host.home + "/image"))
    refused(host.run(VICTIM, "cr-checkpoint", "hers", "/root-only/image"), "")
    refused(host.run(VICTIM, "cr-restart", host.home), "")
    shows(jobs=1, requests_total__checkpoint=2, request_failures_total__checkpoint=1, request_failures_total__restart=1)
    up = {name: value for name, value in scraped().items() if name.startswith("gpu_server_")}
    want = {f'gpu_server_up{{server="unix:{home}/one"}}': 1, 'gpu_server_up{server="unix:/none"}': 0}
    if not set(want.items()) <= set(up.items()) or up.get(f'gpu_server_gpus{{server="unix:{home}/one"}}') != 1:
        raise Failure(f"the metrics of GPU servers are {up}")
    free = os.statvfs(host.state)
    if not 0.5 < scraped()["free_bytes"] / (free.f_bavail * free.f_frsize) < 2:
        raise Failure(f"free bytes: {scraped()['free_bytes']}")
    worked(host.run(0, "cr-drain", "--save", context.folder("drained", 0o755)))
    ended(child, 121)
    shows(jobs=0, draining=1, requests_total__run=1, request_failures_total__run=0)
    server.terminate()


@case
def silent(context):
    """More silent connections than cr-hostd's soft limit of descriptors keep away neither hosts nor Prometheus."""
    cert, key = context.lab.folder + "/host.pem", context.lab.folder + "/host.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-keyout", key, "-out",
         cert, "-subj", "/CN=host", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True,
    )  # fmt: skip
    listen, metrics = harness.free_port(), harness.free_port()
    more = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", cert, "--listen", f"127.0.0.1:{listen}", "--metrics", f"127.0.0.1:{metrics}"]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        Host(context, more=more)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.ExitStack() as open_ones:
        for number in range(1000):
            for port in (listen, metrics):
                source = (f"127.1.{number % 50}.1", 0)
                open_ones.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT, source))
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=LIMIT) as answer:
            if b"cuda_remote_host_jobs" not in answer.read():
                raise Failure("the metrics are not there")
        tls = ssl.create_default_context(cafile=cert)
        tls.load_cert_chain(cert, key)
        tls.set_alpn_protocols(["h2"])
        with tls.wrap_socket(socket.create_connection(("127.0.0.1", listen), LIMIT), server_hostname="127.0.0.1") as other:
            other.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))  # and no settings
            if len(other.recv(9)) != 9:
                raise Failure("cr-hostd does not speak HTTP/2 to another host")


OPERATORS = 900_002  # a group


@case
def operators(context):
    """Who is an operator, by name or group, lists, saves and drains others' jobs; images are their owners'. Others do not."""
    host = Host(context, more=["--operator", str(ATTACKER), "--operator", f"@{OPERATORS}"])
    child = start_sleeper(host, "hers")
    image, drained = host.home + "/image", context.folder("drained", 0o755)
    someone = ATTACKER + 1

    def ask(user, tool, *words, group=None):
        return subprocess.run(
            [context.tool(tool), *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=harness.patient(LIMIT), cwd="/", user=user,
            group=user, extra_groups=[group] if group else [], env=context.environment(host.env({})),
        )  # fmt: skip

    names = lambda done: [job["name"] for report in json.loads(worked(done).stdout)["hosts"] for job in report["jobs"]]
    for user, group, may in ((ATTACKER, None, True), (someone, OPERATORS, True), (someone, None, False)):
        saved = ask(user, "cr-checkpoint", "hers", image, "--user", str(VICTIM), group=group)
        if names(ask(user, "cr-ps", "--hosts", "--json", group=group)) != (["hers"] if may else []):
            raise Failure(f"user {user} with group {group} sees other jobs than it should")
        if may:
            worked(saved)
            belongs_to(image, VICTIM)
            shutil.rmtree(image)
        else:
            refused(saved, "is not an operator of this host", "--operator")
            refused(ask(user, "cr-drain", "--save", drained), "is not an operator of this host")
    if os.path.exists(image):
        raise Failure("somebody who is no operator has saved a job")
    # Only that, and where the owner may write; root makes and opens no folders for an operator.
    theirs = context.folder("theirs", 0o700, ATTACKER)
    refused(ask(ATTACKER, "cr-checkpoint", "hers", theirs + "/image", "--user", str(VICTIM)), "Permission denied")
    for tool in (b"restart", b"migrate", b"move", b"run"):
        answer = asked(host, ATTACKER, field(2, tool), field(4, b"hers"), field(5, image.encode()), field(6, b"/bin/id"), field(11, str(VICTIM).encode()))
        if "and do nothing else" not in answer:
            raise Failure(f"cr-hostd lets an operator {tool}: {answer}")
    closed, absent = context.folder("closed", 0o700), context.lab.folder + "/absent"
    for folder in (closed, absent):
        done = ask(ATTACKER, "cr-drain", "--save", folder)
        if done.returncode != 4 or "not a folder of root" not in done.stdout:
            raise Failure(f"cr-drain ended with {done.returncode}: {done.stdout} {done.stderr}")
    if os.path.exists(absent) or os.stat(closed).st_mode & 0o077 or child.poll() is not None:
        raise Failure("an operator had root make or open a folder, or has ended the job")
    done = worked(ask(ATTACKER, "cr-drain", "--save", drained))
    if "0 moved, 1 saved, 0 left" not in done.stdout:
        raise Failure(f"cr-drain says {done.stdout}{done.stderr}")
    ended(child, 121)
    belongs_to(f"{drained}/{VICTIM}/hers", VICTIM)
    refused(host.run(VICTIM, "cr-run", "--name", "late", "--", "/bin/true"), "accepts no jobs at present")
    worked(ask(ATTACKER, "cr-drain", "--undo"))
    worked(host.run(VICTIM, "cr-run", "--name", "late", "--", "/bin/true"))
    again = host.begin(VICTIM, "cr-restart", f"{drained}/{VICTIM}/hers")
    host.wait_for_job("hers", again)
    spool_is_empty(host)


@case
def stores(context):
    """A user keeps several images of a job, also at intervals, and restarts the newest under another name and into other
    files."""
    host = Host(context)
    store, sync = host.home + "/store", host.home + "/sync"
    out, rest = host.home + "/out", host.home + "/rest"
    want = worked(host.run(VICTIM, "cr-run", "--plain", "--", *context.command())).stdout
    child = host.begin(
        VICTIM, "cr-run", "--name", "hers", "--output", out, "--", *context.command(), CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3,9",
    )  # fmt: skip
    paused_at(sync, 3, child)
    image = lambda number: f"{store}/image-{number:06}"
    numbers = lambda: sorted(int(name[6:]) for name in os.listdir(store) if name[6:].isdigit())
    # By the job's name, and by the number of her own cr-run.
    for number, job in enumerate(("hers", str(child.pid), "hers"), 1):
        saved = worked(host.run(VICTIM, "cr-checkpoint", "--keep", "2", job, store, "--json"))
        if json.loads(saved.stdout)["image"] != image(number):
            raise Failure(f"cr-checkpoint names another image than {number}: {saved.stdout}")
    if sorted(os.listdir(store)) != ["image-000002", "image-000003", "lock"]:
        raise Failure(f"of three images, --keep 2 has left {os.listdir(store)}")
    belongs_to(store, VICTIM)
    saving = host.begin(VICTIM, "cr-checkpoint", "--every", "0.1s", "--keep", "2", "hers", store)
    several = lambda: numbers()[-1] >= 6 or saving.poll() is not None
    harness.wait_for(several, LIMIT, lambda: f"--every has made {numbers()}")
    os.kill(saving.pid, signal.SIGTERM)
    ended(saving, 3)
    # A folder of somebody else's is no place for them.
    theirs = context.folder("theirs", 0o777, ATTACKER)
    refused(host.run(VICTIM, "cr-checkpoint", "--keep", "2", "hers", theirs), f"belongs to user {ATTACKER}")
    refused(host.run(VICTIM, "cr-checkpoint", "--keep", "2", "hers", host.home), "holds other things than images")
    open(sync + ".go.3", "w").close()
    paused_at(sync, 9, child)
    worked(host.run(VICTIM, "cr-checkpoint", "--stop", "--keep", "2", "hers", store))
    ended(child, 121)
    if len(numbers()) != 2 or sorted(os.listdir(store)) != [*(f"image-{number:06}" for number in numbers()), "lock"]:
        raise Failure(f"--keep 2 has left {os.listdir(store)}")
    spool_is_empty(host)
    refused(host.run(VICTIM, "cr-restart", "--job-dir", host.home + "/copy", store), "without slashes")
    # As a checkpoint has the image that it removes, on this host and on another one.
    newest = image(numbers()[-1])
    for path, access in ((newest, os.O_RDONLY), (newest + "/manifest.pb", os.O_RDWR)):
        held = os.open(path, access)
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(host.run(VICTIM, "cr-restart", "--job-dir", "copy", store), "is being removed")
        os.close(held)
    again = host.begin(VICTIM, "cr-restart", "--job-dir", "copy", "--output", rest, "--append", store)
    host.wait_for_job("copy", again)
    has_only_rights_of(host.facts("copy")["pid"], VICTIM)
    if host.facts("copy")["image"] != image(numbers()[-1]):
        raise Failure(f"the restarted job names the image {host.facts('copy')['image']}, not the newest of {numbers()}")
    worked(host.run(VICTIM, "cr-checkpoint", "--keep", "2", str(again.pid), store))
    open(sync + ".go.9", "w").close()
    ended(again)
    got = open(out).read() + open(rest).read()
    if got != want or os.lstat(rest).st_uid != VICTIM:
        raise Failure(f"the restarted job wrote\n{got}\nexpected\n{want}")
    spool_is_empty(host)


def data_files(image):
    return sorted(f"{image}/memory/{name}" for name in os.listdir(image + "/memory") if name.startswith("data-"))


class StoredJob:
    """A job of the victim's with some GPU memory, and a store of its images. It pauses after each step."""

    def __init__(self, host, size, steps):
        context = host.context
        self.host, self.store, self.sync, self.step = host, host.home + "/store", host.home + "/sync", 1
        program = shutil.copy(harness.find(context.apps, "stencil"), context.product)
        command = [program, "--size", str(size), "--steps", str(steps)]
        self.steps = steps
        self.want = worked(host.run(VICTIM, "cr-run", "--plain", "--", *command)).stdout
        pauses = ",".join(str(step) for step in range(1, steps))
        self.child = host.begin(
            VICTIM, "cr-run", "--name", "hers", "--", *command, CR_TEST_SYNC_FILE=self.sync, CR_TEST_PAUSE_AT=pauses
        )
        paused_at(self.sync, 1, self.child)

    def image(self, number):
        return f"{self.store}/image-{number:06}"

    def numbers(self):
        return sorted(int(name[6:]) for name in os.listdir(self.store) if name[6:].isdigit())

    def save(self, keep):
        saved = worked(self.host.run(VICTIM, "cr-checkpoint", "--json", "--keep", str(keep), "hers", self.store))
        if saved.stderr:
            raise Failure(f"cr-checkpoint says {saved.stderr}")
        return json.loads(saved.stdout)

    def go_on(self):
        """To other GPU memory."""
        open(f"{self.sync}.go.{self.step}", "w").close()
        self.step += 1
        paused_at(self.sync, self.step, self.child)

    def finish(self):
        for step in range(1, self.steps):
            open(f"{self.sync}.go.{step}", "w").close()
        if ended(self.child) != self.want:
            raise Failure("the job that was saved has another result")

    def restarts(self, image):
        """Whether it comes to the same result from there. After `finish`."""
        out = ended(self.host.begin(VICTIM, "cr-restart", image))
        if out != self.want:
            raise Failure(f"{image} was restarted and wrote\n{out}\nexpected\n{self.want}")

    def listed(self):
        """What cr-inspect says of the store to its user, which must be all that is there."""
        told = json.loads(worked(self.host.run(VICTIM, "cr-inspect", "--json", "--verify", self.store)).stdout)
        files = sum(len(leaves) for _, _, leaves in os.walk(self.store))
        # Signatures are not counted; small files take whole blocks.
        if harness.disk_bytes(self.store) > told["total_bytes"] + 8192 * files:
            raise Failure(f"{self.store} takes {harness.disk_bytes(self.store)} bytes, and its images need {told['total_bytes']}")
        names = [os.path.basename(image["image"]) for image in told["images"]]
        if sorted(os.listdir(self.store)) != [*names, "lock"]:
            raise Failure(f"{self.store} holds {sorted(os.listdir(self.store))}, and the images are {names}")
        return told["images"]


def with_other_secret(index):
    """The memory/index of an image, with its checksum, as if it had been written with another secret."""
    contents = dict(fields_of(index))
    (secret,) = (value for _, value in fields_of(contents[3]) if isinstance(value, bytes) and len(value) == 192)
    inner = replaced(contents[3], secret, bytes(192))
    head = contents[1] + struct.pack("<I", contents[2])
    return replaced(replaced(index, contents[3], inner), digest(head + contents[3]), digest(head + inner))


def is_full(told):
    """Whether the image shares nothing, and all of the memory was read."""
    return told["linked_bytes"] == 0 and told["unread_bytes"] == 0


@case
def shared_store(context):
    """The images of a user's store share what is the same in them; it is neither read nor written again. Each restarts by
    itself, and so does a copy. Nobody else gets at them."""
    host = Host(context)
    job = StoredJob(host, 1024, 5)
    if not is_full(first := job.save(3)):
        raise Failure(f"the first image shares something: {first}")
    before = harness.disk_bytes(job.store)
    same = job.save(3)
    memory = lambda told: told["total_bytes"] - told["client_bytes"]
    if same["unread_bytes"] < 0.9 * same["gpu_bytes"] or same["linked_bytes"] < 0.9 * memory(same):
        raise Failure(f"an image of the same memory has it once more: {same}")
    if harness.disk_bytes(job.store) - before > same["client_bytes"] + 0.03 * memory(first) + (1 << 20):
        raise Failure(f"an image of the same memory takes {harness.disk_bytes(job.store) - before} bytes: {same}")
    for _ in range(2):
        job.go_on()
        job.save(3)
    if job.numbers() != [2, 3, 4]:
        raise Failure(f"of four images, --keep 3 has left {job.numbers()}")
    job.listed()
    belongs_to(job.store, VICTIM)
    # Repeatedly: by one tool of root's.
    saving = host.begin(VICTIM, "cr-checkpoint", "--every", "0.1s", "--keep", "3", "hers", job.store)
    several = lambda: job.numbers()[-1] >= 7 or saving.poll() is not None
    harness.wait_for(several, LIMIT, lambda: f"--every has made {job.numbers()}")
    os.kill(saving.pid, signal.SIGTERM)
    ended(saving, 3)
    if (last := job.listed()[-1])["own_bytes"] > same["client_bytes"] + 0.03 * memory(first) + (1 << 20):
        raise Failure(f"an image of --every takes space for the same memory: {last}")
    # An image that was saved by itself has another signature; nothing is shared with it.
    worked(host.run(VICTIM, "cr-checkpoint", "hers", job.image(90)))
    if not job.save(3)["linked_bytes"] > 0 or len(job.numbers()) != 3:
        raise Failure(f"beside an image of another kind there are {job.numbers()}")
    theirs = context.folder("theirs", 0o700, ATTACKER)
    os.chmod(host.home, 0o711)
    for tool in ("cr-inspect", "cr-restart"):
        refused(host.run(ATTACKER, tool, job.store), "ermission denied")
    his = start_sleeper(host, "his", ATTACKER)
    refused(host.run(ATTACKER, "cr-checkpoint", "--keep", "3", "his", job.store), "Permission denied")
    copied = theirs + "/store"
    shutil.copytree(job.store, copied)
    for folder, _, leaves in os.walk(copied):
        for one in [folder] + [os.path.join(folder, leaf) for leaf in leaves]:
            os.chown(one, ATTACKER, ATTACKER)
    refused(host.run(ATTACKER, "cr-restart", copied), f"of a job of user {VICTIM}")
    worked(host.run(ATTACKER, "cr-checkpoint", "--keep", "9", "his", copied))
    if any(os.stat(path).st_nlink > 1 for path in data_files(f"{copied}/{sorted(os.listdir(copied))[-2]}")):
        raise Failure("an image shares with one of another user")
    his.terminate()
    job.finish()
    for number in job.numbers():
        job.restarts(job.image(number))
    copy = host.home + "/copy"
    worked(context.run(VICTIM, ["/bin/cp", "-r", job.image(job.numbers()[0]), copy]))
    exported = host.home + "/exported"
    worked(host.run(VICTIM, "cr-inspect", "--export", job.image(job.numbers()[1]), exported))
    shutil.rmtree(job.store)
    job.restarts(copy)
    job.restarts(exported)
    spool_is_empty(host)


@case
def hostile_store(context):
    """What a user has changed in a store is not believed: a restart refuses an image whose memory is another one, and a
    checkpoint writes in full what it cannot share. Nothing is followed as root."""
    host = Host(context)
    job = StoredJob(host, 512, 5)
    job.save(9)
    job.go_on()
    job.save(9)
    kept = host.home + "/kept"
    worked(context.run(VICTIM, ["/bin/cp", "-a", job.store, kept]))
    first, second = job.image(1), job.image(2)
    change = lambda text: context.python(VICTIM, "import os, shutil, sys\nos.chdir(sys.argv[1])\n" + text, job.store)
    data = lambda image: os.path.relpath(data_files(image)[0], job.store)
    # All of it: some bytes of a data file are no image's.
    flip = "f = open({!r}, 'r+b'); b = f.read(); f.seek(0); f.write(b.translate(bytes(i ^ 1 for i in range(256)))); f.close()"
    shared = os.path.relpath(data_files(second)[0], job.store)
    restarting = [
        # The link's other file has the same bytes, so only the link itself is refused.
        (f"os.rename({shared!r}, 'x'); os.symlink(os.path.abspath('x'), {shared!r})", shared),
        (f"os.unlink({shared!r})", shared),
        (f"os.unlink({shared!r}); os.symlink({host.key!r}, {shared!r})", shared),
        (f"os.unlink({shared!r}); os.mkfifo({shared!r})", shared),
        (f"os.truncate({shared!r}, 4096)", shared),
        (flip.format(shared), shared),
        (f"s = os.stat({shared!r}).st_size; os.unlink({shared!r}); open({shared!r}, 'w'); os.truncate({shared!r}, s)", shared),
        ("shutil.copy('image-000001/manifest.pb', 'image-000002/manifest.pb')", "image-000002/manifest.pb"),
        ("shutil.copy('image-000001/memory/index', 'image-000002/memory/index')", "image-000002/memory/index"),
        ("shutil.rmtree('image-000002/memory'); os.symlink('/', 'image-000002/memory')", "image-000002/memory"),
        ("open('image-000002/signature', 'r+b').write(b'\\0' * 40)", "signature"),
        ("os.unlink('image-000002/signature')", "is not signed"),
        ("shutil.copy('image-000001/signature', 'image-000002/signature')", "the image was changed"),
    ]

    def put_back():
        shutil.rmtree(job.store)
        worked(context.run(VICTIM, ["/bin/cp", "-a", kept, job.store]))

    for text, word in restarting:
        change(text)
        refused(host.run(VICTIM, "cr-restart", "--job-dir", "copy", second), word)
        put_back()
    # What a checkpoint shares with. None of these images is one to share with.
    gone = "for image in ('image-000001', 'image-000002'):\n  for name in os.listdir(image + '/memory'):\n    path = image + '/memory/' + name\n    if not name.startswith('data-'): continue\n    "
    saving = [
        gone + "os.unlink(path)",
        gone + f"os.unlink(path); os.symlink({host.key!r}, path)",
        gone + "os.unlink(path); os.mkfifo(path)",
        gone + "os.truncate(path, 4096)",
        "for n in '12': os.unlink(f'image-00000{n}/signature')",
        "for n in '12': open(f'image-00000{n}/memory/index', 'ab').write(b'x')",
        "for n in '12': os.unlink(f'image-00000{n}/memory/index'); os.symlink('/dev/zero', f'image-00000{n}/memory/index')",
        "for n in '12': open(f'image-00000{n}/manifest.pb', 'r+b').write(b'xxxx')",
        "for n in '12': open(f'image-00000{n}/signature', 'r+b').write(b'xxxx')",
        "for n in '12': shutil.rmtree(f'image-00000{n}/memory'); os.symlink('/etc', f'image-00000{n}/memory')",
        f"for n in '12': shutil.rmtree(f'image-00000{{n}}'); os.symlink({kept!r} + f'/image-00000{{n}}', f'image-00000{{n}}')",
    ]
    whole = []
    for number, text in enumerate(saving):
        change(text)
        told = job.save(9)
        if not is_full(told):
            raise Failure(f"a checkpoint shares with images after {text}: {told}")
        whole.append(f"{host.home}/whole{number}")
        worked(context.run(VICTIM, ["/bin/cp", "-r", told["image"], whole[-1]]))
        put_back()
    # An index that is right in itself, with all checksums, and not as it was signed.
    for image in (first, second):
        signature, index = open(image + "/signature", "rb").read(), open(image + "/memory/index", "rb").read()
        forge(image, host.key, "memory/index", index, with_other_secret(index))
        with open(image + "/signature", "wb") as f:
            f.write(signature)
    worked(host.run(VICTIM, "cr-inspect", "--verify", second))
    if not is_full(told := job.save(9)):
        raise Failure(f"a checkpoint believes an index that was changed: {told}")
    put_back()
    # With one good image beside a bad one, it shares with that.
    change(f"os.unlink({data(first)!r})")
    if is_full(job.save(9)):
        raise Failure("a checkpoint does not share with a good image")
    put_back()
    # Links to what is root's, in the place of an image and of the next one.
    for name in ("image-000001", "image-000003.partial"):
        change(f"shutil.rmtree({name!r}, ignore_errors=True); os.symlink({host.state!r}, {name!r})")
        refused(host.run(VICTIM, "cr-checkpoint", "--keep", "9", "hers", job.store), name)
        put_back()
    # Without hard links nothing is shared, and the user hears of it.
    preload = shutil.copy(harness.find(os.path.join(context.apps, "..", "faults"), "libdying.so"), context.product)
    host.daemon.kill()
    host.daemon.wait()
    host.variables = {"LD_PRELOAD": preload, "DYING_PROGRAM": "cr-hostd", "DYING_UNDER": job.store, "DYING_WAY": "links"}
    host.start()
    saved = worked(host.run(VICTIM, "cr-checkpoint", "--json", "--keep", "9", "hers", job.store))
    if not is_full(json.loads(saved.stdout)) or "shares nothing with earlier ones: cannot make a hard link" not in saved.stderr:
        raise Failure(f"without hard links cr-checkpoint says {saved.stdout} {saved.stderr}")
    host.daemon.kill()
    host.daemon.wait()
    host.variables = {}
    host.start()
    put_back()
    # A chunk that was changed is not read again; the new image is damaged, too.
    for path in {os.stat(path).st_ino: path for image in (first, second) for path in data_files(image)}.values():
        change(flip.format(path))
    told = job.save(9)
    if is_full(told):
        raise Failure("a checkpoint has read what it was to share")
    refused(host.run(VICTIM, "cr-restart", "--job-dir", "copy", told["image"]), "the image was changed")
    put_back()
    job.finish()
    for image in [first, second, *whole]:
        job.restarts(image)
    spool_is_empty(host)


@case
def store_killed(context):
    """What is killed at any of the things that it does to a user's store, cr-hostd's worker or the process that writes for
    her, loses and leaks nothing; and so does a full disk."""
    host = Host(context)
    job = StoredJob(host, 256, 400)
    log = context.lab.folder + "/what"
    preload = shutil.copy(harness.find(os.path.join(context.apps, "..", "faults"), "libdying.so"), context.product)
    for _ in range(2):
        job.save(2)
        job.go_on()

    def attempt(way, at):
        open(log, "w").close()
        os.chmod(log, 0o666)
        host.daemon.kill()
        host.daemon.wait()
        host.variables = {
            "LD_PRELOAD": preload, "DYING_PROGRAM": "cr-hostd", "DYING_UNDER": job.store, "DYING_WAY": way, "DYING_AT": str(at), "DYING_LOG": log,
        }  # fmt: skip
        host.start()
        tool = host.run(VICTIM, "cr-checkpoint", "--keep", "2", "hers", job.store)
        harness.wait_for(lambda: not tools_of(host) and not workers_of(host), LIMIT, lambda: "root's tool does not give up")
        return tool.returncode, open(log).read().splitlines()

    seen, at, code = set(), 0, 1
    while code != 0:
        at += 1
        before = job.numbers()[-1]
        code, what = attempt("kill", at)
        seen.update(line.split()[0] for line in what)
        worked(host.run(VICTIM, "cr-inspect", "--verify", job.image(job.numbers()[-1])))
        if job.numbers()[-1] < before:
            raise Failure(f"killed at {what[-1:]}: the newest image was {before}, and is {job.numbers()[-1]}")
        job.go_on()
    if at < 30 or not {"write", "create", "mkdir", "link", "remove", "rename", "fsync"} <= seen:
        raise Failure(f"killed only {at} times, at {seen}")
    host.variables = {}
    if len(job.listed()) != 2:
        raise Failure(f"not two images after {at} killed checkpoints: {os.listdir(job.store)}")
    at, code = 0, 1
    while code != 0:
        at += 1
        before = sorted(os.listdir(job.store))
        code, what = attempt("full", at)
        if code != 0 and sorted(os.listdir(job.store)) != before:
            raise Failure(f"a full disk at write {at} leaves {os.listdir(job.store)} instead of {before}")
        job.listed()
        job.go_on()
    if at < 4:
        raise Failure(f"only {at} writes")
    job.save(2)
    job.finish()
    for number in job.numbers():
        job.restarts(job.image(number))
    spool_is_empty(host)


@case
def store_steps(context):
    """Root's tool, or cr-hostd's worker, is killed in each step of a checkpoint into a user's store: the images stay, and the
    next one shares with them."""
    host, steps = Host(context), context.lab.folder + "/steps"
    job = StoredJob(host, 256, 200)

    host.start_again(steps, CR_TEST_STEPS=steps)
    job.save(2)
    count = len(open(steps).read().splitlines())
    for number in range(1, count + 1):
        job.go_on()
        before = job.numbers()
        host.start_again(steps, CR_TEST_STEPS=steps, CR_TEST_STOP_AT=str(number))
        saving = host.begin(VICTIM, "cr-checkpoint", "--keep", "2", "hers", job.store)
        reached = lambda: os.path.exists(steps) and any(line.startswith(f"{number} ") for line in open(steps))
        harness.wait_for(lambda: reached() or saving.poll() is not None, LIMIT, lambda: f"step {number} was not reached")
        for pid in tools_of(host) if number % 2 else workers_of(host):
            os.kill(pid, signal.SIGKILL)
        open(steps + ".go", "w").close()
        saving.wait(harness.patient(LIMIT))
        harness.wait_for(lambda: not tools_of(host) and not workers_of(host), LIMIT, lambda: "root's tool does not give up")
        # The process that writes for the user sees that nobody asks it any more.
        harness.wait_for(lambda: not any(name.endswith(".partial") for name in os.listdir(job.store)), LIMIT, lambda: "a half image")
        if not set(before[-1:]) <= set(job.numbers()):
            raise Failure(f"at step {number}: there were {before}, and there are {job.numbers()}")
        host.start_again(steps)
        if is_full(job.save(2)) or len(job.listed()) != 2:
            raise Failure(f"after step {number}: the next image shares nothing, or there are {job.numbers()}")
    if count < 15:
        raise Failure(f"only {count} steps")
    job.finish()
    for number in job.numbers():
        job.restarts(job.image(number))
    spool_is_empty(host)


def workers_of(host):
    below = open(f"/proc/{host.daemon.pid}/task/{host.daemon.pid}/children").read().split()
    return [int(pid) for pid in below]


def tools_of(host):
    """The processes of root's tools that work with an image in cr-hostd's folder."""
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and host.state + "/spool" in harness.command_of(pid)]


@case
def killed(context):
    """When cr-hostd or its worker is killed, the job continues, there is no half image, and the next cr-hostd works."""
    steps = context.lab.folder + "/steps"
    host = Host(context)
    image = host.home + "/image"
    child = start_sleeper(host, "hers")
    lines = lambda: open(steps).read().splitlines() if os.path.exists(steps) else []
    tool_waits = lambda: any(line.startswith(f"{number} ") for line in lines())
    for number in (1, 3, 6, 9):
        for path in (steps, steps + ".go"):
            if os.path.exists(path):
                os.unlink(path)
        host.daemon.kill()
        host.daemon.wait()
        host.variables = {"CR_TEST_STEPS": steps, "CR_TEST_STOP_AT": str(number)}
        host.start()
        spool_is_empty(host)
        saving = host.begin(VICTIM, "cr-checkpoint", "hers", image)
        over = lambda: tool_waits() or saving.poll() is not None
        harness.wait_for(over, LIMIT, lambda: f"step {number} was not reached")
        if saving.poll() is not None:
            raise Failure(f"cr-checkpoint did not wait at step {number}: {saving.stderr.read()}")
        (worker,) = workers_of(host)
        os.kill(worker, signal.SIGKILL)
        if saving.wait(harness.patient(LIMIT)) != 1:
            raise Failure(f"cr-checkpoint ended with {saving.returncode}")
        open(steps + ".go", "w").close()
        gone = lambda: not os.path.exists(image + ".partial")
        harness.wait_for(gone, LIMIT, lambda: "the half image stays")
        harness.wait_for(lambda: not tools_of(host), LIMIT, lambda: "root's tool does not give up")
        if os.path.exists(image) or child.poll() is not None:
            raise Failure(f"at step {number}: there is an image, or the job has ended")
    # cr-hostd itself: requests that are in progress come to their end.
    os.unlink(steps)
    os.unlink(steps + ".go")
    number = 6
    host.variables = {"CR_TEST_STEPS": steps, "CR_TEST_STOP_AT": str(number)}
    host.daemon.kill()
    host.daemon.wait()
    host.start()
    saving = host.begin(VICTIM, "cr-checkpoint", "hers", image)
    harness.wait_for(tool_waits, LIMIT, lambda: f"step {number} was not reached")
    host.daemon.kill()
    host.daemon.wait()
    open(steps + ".go", "w").close()
    ended(saving)
    belongs_to(image, VICTIM)
    host.variables = {}
    host.start()
    worked(host.run(VICTIM, "cr-checkpoint", "--stop", "hers", image))
    ended(child, 121)
    spool_is_empty(host)


@case
def tool_killed(context):
    """Root's tool is killed in each step in which it has the GPU session of a user's job, or will have it: the job continues."""
    host = Host(context)
    image, sync, steps = host.home + "/image", host.home + "/sync", context.lab.folder + "/steps"
    want = worked(host.run(VICTIM, "cr-run", "--plain", "--", *context.command())).stdout
    child = host.begin(
        VICTIM, "cr-run", "--name", "hers", "--", *context.command(), CR_TEST_SYNC_FILE=sync, CR_TEST_PAUSE_AT="3,9,15"
    )
    paused_at(sync, 3, child)

    host.start_again(steps, CR_TEST_STEPS=steps)
    worked(host.run(VICTIM, "cr-checkpoint", "hers", image))
    names = [line.split(" ", 1)[1] for line in open(steps).read().splitlines()]
    first, last = names.index("keep the sessions") + 1, names.index("give back 1/1") + 1
    if not first < names.index("save processes") + 1 < last:
        raise Failure(f"steps in another order: {names}")
    for number in range(first, last + 2):
        host.start_again(steps, CR_TEST_STEPS=steps, CR_TEST_STOP_AT=str(number))
        saving = host.begin(VICTIM, "cr-checkpoint", "hers", image)
        reached = lambda: os.path.exists(steps) and f"\n{number} " in open(steps).read()
        harness.wait_for(lambda: reached() or saving.poll() is not None, LIMIT, lambda: f"step {number} was not reached")
        for pid in tools_of(host):
            os.kill(pid, signal.SIGKILL)
        open(steps + ".go", "w").close()
        if saving.wait(harness.patient(LIMIT)) == 0:
            raise Failure(f"at step {number}: the tool was not killed")
        worked(host.run(VICTIM, "cr-checkpoint", "hers", image))
        belongs_to(image, VICTIM)
    host.start_again(steps)
    for step in (3, 9, 15):
        open(f"{sync}.go.{step}", "w").close()
    if ended(child) != want:
        raise Failure("another result than without the killed tools")
    spool_is_empty(host)


def streams_at(pid, terminal):
    """Which descriptors of a process are this terminal, and how they are open (os.O_RDONLY, ...)."""
    streams = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        if os.readlink(f"/proc/{pid}/fd/{fd}") == terminal:
            flags = dict(line.split(":", 1) for line in open(f"/proc/{pid}/fdinfo/{fd}").read().splitlines() if ":" in line)
            streams[int(fd)] = int(flags["flags"], 8) & os.O_ACCMODE
    return streams


def only_writes_to(terminal, below, user, name):
    """A program of the user's below this process, which another one of hers could take over: it has not root's terminal,
    into which it could type, and cannot read from it."""

    def theirs():
        found = []
        for pid in harness.descendants(below):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid == user and name in harness.command_of(pid):
                    found.append(pid)
        return found

    found = []
    harness.wait_for(lambda: found.extend(theirs()) or found, LIMIT, lambda: f"no {name} of the user's")
    for pid in found:
        own = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[4]
        streams = streams_at(pid, terminal)
        if own != "0" or set(streams.values()) - {os.O_WRONLY}:
            raise Failure(f"{name} of the user's has root's terminal: its own is {own}, its streams there are {streams}")
        if not streams:
            raise Failure(f"{name} of the user's says nothing at root's terminal")


def begin_at_terminal(context, command, **variables):
    """A process of root's with a terminal of its own: it, the test's end of the terminal, and the terminal's name."""
    main, end = os.openpty()
    take = lambda: (os.setsid(), fcntl.ioctl(end, termios.TIOCSCTTY, 0))
    child = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, preexec_fn=take, cwd="/", env=context.environment(variables))
    context.lab.processes.append(users.Started(child))
    name = os.ttyname(end)
    os.close(end)
    return child, main, name


@case
def terminal(context):
    """What cr-drain and cr-run of root's start as a user leaves root's terminal alone."""
    steps, drained = context.lab.folder + "/steps", context.folder("drained", 0o755)
    own = {"XDG_RUNTIME_DIR": context.folder("runtime", 0o755)}
    run = [context.tool("cr-run"), "--user", str(VICTIM), "--job-dir", context.lab.folder + "/job", "--", "/bin/sleep", "600"]
    running, _, name = begin_at_terminal(context, run, **own)
    only_writes_to(name, running.pid, VICTIM, "cr-server")
    running.terminate()
    running.wait(harness.patient(LIMIT))
    host = Host(context)
    child = start_sleeper(host, "hers")
    host.daemon.kill()
    host.daemon.wait()
    host.variables = {"CR_TEST_STEPS": steps, "CR_TEST_STOP_AT": "1"}
    host.start()
    draining, main, name = begin_at_terminal(context, [context.tool("cr-drain"), "--save", drained], **host.env(own))
    harness.wait_for(lambda: os.path.exists(steps) or draining.poll() is not None, LIMIT, lambda: "cr-drain saves nothing")
    only_writes_to(name, draining.pid, VICTIM, "cr-checkpoint")
    # What it runs for the user gives up with it.
    draining.terminate()
    draining.wait(harness.patient(LIMIT))
    # The signal comes to root's tool, which waits, by way of cr-checkpoint and cr-hostd. Nothing tells when.
    harness.pause(2)
    open(steps + ".go", "w").close()
    harness.wait_for(lambda: not tools_of(host), LIMIT, lambda: "the checkpoint goes on without cr-drain")
    # cr-hostd's worker removes the unfinished one after its tool has ended.
    left = lambda: os.listdir(f"{drained}/{VICTIM}")
    harness.wait_for(lambda: not left(), LIMIT, lambda: f"cr-drain has gone, and there is {left()}")
    if child.poll() is not None:
        raise Failure("the job has ended")
    draining, main, name = begin_at_terminal(context, [context.tool("cr-drain"), "--save", drained], **host.env(own))
    if draining.wait(harness.patient(LIMIT)) != 0:
        raise Failure(f"cr-drain ended with {draining.returncode}: {os.read(main, 65536)}")
    ended(child, 121)
    spool_is_empty(host)


FILL = """
import os, sys
for path in sys.argv[1:]:
    try:
        with open(path, "r+" if os.path.exists(path) else "w") as file:
            for _ in range(20):
                file.write("x" * (1 << 20))
                file.flush()
    except OSError as error:
        print(path, error)
"""


@case
def full_run(context):
    """What a user writes into the folder of his job takes no room from others where the folders are in memory."""
    host = Host(context, memory="32m")
    his = start_sleeper(host, "his", ATTACKER)
    job = host.job("his", ATTACKER)
    context.python(ATTACKER, FILL, job + "/user/junk", job + "/connect.lock")
    if os.statvfs(host.folder).f_bavail * os.statvfs(host.folder).f_frsize < 24 << 20:
        raise Failure("a user has filled the file system of cr-hostd's folder")
    hers = start_sleeper(host, "hers")
    image = host.home + "/image"
    worked(host.run(VICTIM, "cr-checkpoint", "hers", image))
    # Another one, in the same folder, also of a cr-hostd that has just started.
    worked(host.run(ATTACKER, "cr-run", "--", "/bin/true"))
    for child in (his, hers):
        child.terminate()
        child.wait(harness.patient(LIMIT))
    again = host.begin(VICTIM, "cr-restart", image)
    host.wait_for_job("hers", again)


STOP_TOOLS = """
import os, signal, time
while True:
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{number}/comm").read() == "cr-checkpoint\\n" and os.stat(f"/proc/{number}").st_uid == os.geteuid():
                os.kill(int(number), signal.SIGSTOP)
                print(number, flush=True)
        except OSError:
            pass
    time.sleep(0.01)
"""


@case
def stalled_drain(context):
    """Who stops the tool that saves his job for cr-drain keeps neither others' jobs nor cr-drain waiting."""
    steps, drained = context.lab.folder + "/steps", context.folder("drained", 0o755)
    # Root's tools wait until his, who asks for one of them, is stopped.
    host = Host(context, CR_TEST_STEPS=steps, CR_TEST_STOP_AT="1")
    his, hers = start_sleeper(host, "his", ATTACKER), start_sleeper(host, "hers")
    stopping = context.start(ATTACKER, [PYTHON, "-c", STOP_TOOLS])
    draining = host.begin(0, "cr-drain", "--save", drained, "--limit", "15")
    stopped = int(stopping.stdout.readline())
    open(steps + ".go", "w").close()
    ended(hers, 121)
    if not os.path.exists(f"/proc/{stopped}"):
        raise Failure("the job of another user was not saved before the tool was given up that had been stopped")
    done = ended(draining, 4)
    if "1 saved, 1 left" not in done or "left: job his of" not in done or "--limit" not in done:
        raise Failure(f"cr-drain says {done}")
    stopping.kill()
    if os.path.exists(f"/proc/{stopped}"):
        raise Failure("what cr-drain has started for a user is still there")
    if his.poll() is None:
        his.terminate()
        his.wait(harness.patient(LIMIT))


# Stops every later process with this user's number that is called so, again and again, and says which was the first.
STOP_CALLED = """
import os, signal, sys, time
first, earlier = True, set(os.listdir("/proc"))
while True:
    for pid in filter(str.isdigit, set(os.listdir("/proc")) - earlier):
        try:
            if open(f"/proc/{pid}/comm").read().strip() != sys.argv[1]: continue
            os.kill(int(pid), signal.SIGSTOP)  # fails for those of other users
        except OSError: continue
        if first: print(pid, flush=True)
        first = False
    time.sleep(0.0005)
"""


@case
def stopped_helpers(context):
    """Who stops the process that cr-hostd has made his, or CRIU, keeps no operator waiting, who may also interrupt it."""
    host = Host(context, more=["--operator", str(ATTACKER)])
    child = start_sleeper(host, "hers")
    image = host.home + "/image"
    for name, interrupted in (("cr-hostd", False), ("cr-hostd", True), ("criu", False), ("criu", True)):
        while True:
            stopping = context.start(VICTIM, [PYTHON, "-c", STOP_CALLED, name])
            saving = host.begin(ATTACKER, "cr-checkpoint", "hers", image, "--user", str(VICTIM))
            has_stopped = lambda: bool(select.select([stopping.stdout], [], [], 0)[0])
            harness.wait_for(lambda: has_stopped() or saving.poll() is not None, LIMIT, lambda: "cr-checkpoint does nothing")
            if has_stopped():
                break
            # It was done before it was seen.
            stopping.kill()
            stopping.wait(LIMIT)
            worked(saving)
            shutil.rmtree(image)
        stopped = int(stopping.stdout.readline())
        if interrupted:
            saving.send_signal(signal.SIGINT)
        code, said = saving.wait(LIMIT), saving.stderr.read()
        stopping.kill()
        stopping.wait(LIMIT)
        if code != (3 if interrupted else 1) or (not interrupted and "was stopped" not in said):
            raise Failure(f"{name}, {interrupted}: cr-checkpoint ended with {code}: {said}")
        harness.wait_for(lambda: not os.path.exists(f"/proc/{stopped}"), LIMIT, lambda: f"the stopped {name} is still there")
        if child.poll() is not None or os.path.exists(image):
            raise Failure("the job has ended, or there is an image")
    # Nothing of this is left: the job can be saved.
    worked(context.run(ATTACKER, [context.tool("cr-checkpoint"), "hers", image, "--user", str(VICTIM)], **host.env({})))
    belongs_to(image, VICTIM)
    spool_is_empty(host)


@contextlib.contextmanager
def small_state(host, size):
    """cr-hostd's folder is a file system of this size."""
    host.daemon.kill()
    host.daemon.wait()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=700,size={size}", "none", host.state], check=True)
    try:
        host.start()
        yield
    finally:
        subprocess.run(["umount", "--lazy", host.state], check=True)


HOLD = "import os, sys, time; kept = os.urandom(int(sys.argv[1]) << 20); open(sys.argv[2], 'w'); time.sleep(600)"


@case
def full_disk(context):
    """Whatever requests come at the same time, a twentieth of the file system of --state stays free; what does not fit is
    refused, and says so."""
    steps = context.lab.folder + "/steps"
    host = Host(context)
    image, ready, keys = host.home + "/image", host.home + "/ready", context.lab.folder + "/key"
    child = host.begin(VICTIM, "cr-run", "--name", "hers", "--", PYTHON, "-c", HOLD, "40", ready)
    harness.wait_for(lambda: os.path.exists(ready) or child.poll() is not None, LIMIT, lambda: "no job")
    shutil.copy(host.key, keys)
    host.more = ["--key", keys]
    with small_state(host, "100m"):
        worked(host.run(VICTIM, "cr-checkpoint", "hers", image))
        # The disk gets full while the job is saved.
        host.daemon.kill()
        host.daemon.wait()
        host.variables = {"CR_TEST_STEPS": steps, "CR_TEST_STOP_AT": "3"}
        host.start()
        saving = host.begin(VICTIM, "cr-checkpoint", "hers", host.home + "/late")
        reached = lambda: os.path.exists(steps) and "\n3 " in open(steps).read()
        harness.wait_for(lambda: reached() or saving.poll() is not None, LIMIT, lambda: "step 3 was not reached")
        free = os.statvfs(host.state)
        with open(host.state + "/full", "wb") as f:
            f.write(bytes(free.f_bavail * free.f_frsize - (1 << 20)))
        said = saving.stderr.readline()
        if "no room left" not in said:
            raise Failure(f"cr-checkpoint says {said!r}")
        open(steps + ".go", "w").close()
        saving.wait(harness.patient(LIMIT))
        if saving.returncode == 0 or os.path.exists(host.home + "/late") or child.poll() is not None:
            raise Failure(f"cr-checkpoint ended with {saving.returncode}; the job: {child.poll()}")
        os.unlink(host.state + "/full")
        spool_is_empty(host)
        host.variables = {}
        worked(host.run(VICTIM, "cr-checkpoint", "--stop", "hers", image))
        ended(child, 121)
    bytes_of = lambda path: sum(os.lstat(os.path.join(folder, leaf)).st_size for folder, _, leaves in os.walk(path) for leaf in leaves)
    # Room for one and a half: each request alone finds enough.
    with small_state(host, f"{bytes_of(image) * 3 // 2 >> 10}k"):
        host.daemon.send_signal(signal.SIGSTOP)
        asking = [host.begin(VICTIM, "cr-restart", "--job-dir", name, image) for name in ("one", "two")]
        harness.wait_for(lambda: all(is_waiting(one.pid) for one in asking), LIMIT, lambda: "cr-restart does not ask")
        host.daemon.send_signal(signal.SIGCONT)
        is_job = lambda name: os.path.exists(host.job(name) + "/job.json")
        over = lambda: all(one.poll() is not None or is_job(name) for one, name in zip(asking, ("one", "two")))
        harness.wait_for(over, LIMIT, lambda: "cr-restart neither restarts nor refuses")
        refusals = [one.stderr.read() for one in asking if one.poll() is not None]
        if not refusals or any("has no room for a copy of the image" not in one for one in refusals):
            raise Failure(f"two restarts in room for one: {refusals}")
        spool_is_empty(host)


def is_waiting(pid):
    """Whether this tool of a user's waits for cr-hostd's answer, in poll."""
    return open(f"/proc/{pid}/syscall").read().split()[0] == "7"


SLOWLY = """
import os, select, socket, struct, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
body, streams = bytes.fromhex(sys.argv[2]), [os.open("/dev/null", os.O_RDWR)] * 3 + [os.open("/", os.O_RDONLY)]
whole = struct.pack("<I", len(body)) + body
answered = lambda seconds: select.select([s], [], [], seconds)[0]
if sys.argv[3] == "words":
    body += bytes([6 << 3 | 2, 0]) * 3_000_000
    socket.send_fds(s, [struct.pack("<I", len(body))], streams)
    s.sendall(body)
elif sys.argv[3] == "first":
    socket.send_fds(s, [whole[:1]], streams)
    for byte in whole[1:] + bytes(100):
        if answered(0.5):
            break
        try:
            s.send(bytes([byte]))
        except OSError:
            pass  # it has answered at this moment
else:
    socket.send_fds(s, [whole], streams)
    s.recv(65536)
    s.send(b"\\x02\\x00")
    answered(None)
print(s.recv(65536))
"""


@case
def greedy_messages(context):
    """No message takes much memory of cr-hostd. Nobody keeps a worker waiting by half a message: neither before its tool is
    started, nor while the tool works and the worker has to watch the room on the disk."""
    steps = context.lab.folder + "/steps"
    host = Host(context)
    child = start_sleeper(host, "hers")
    body = field(1, HOSTD_VERSION) + field(2, b"checkpoint") + field(4, b"hers") + field(5, (host.home + "/image").encode())
    ask = lambda which: [PYTHON, "-c", SLOWLY, host.socket, body.hex(), which]
    # A short message of many empty words takes much memory of root's.
    for which in ("words", "first"):
        answer = worked(context.run(VICTIM, ask(which))).stdout
        if "cannot read the request" not in answer:
            raise Failure(f"cr-hostd answers {answer}: {which}")
    host.daemon.kill()
    host.daemon.wait()
    host.variables = {"CR_TEST_STEPS": steps, "CR_TEST_STOP_AT": "1"}
    host.start()
    asking = context.start(VICTIM, ask("later"))
    harness.wait_for(lambda: os.path.exists(steps) or asking.poll() is not None, LIMIT, lambda: "cr-checkpoint does not begin")
    open(steps + ".go", "w").close()
    ended(asking)
    harness.wait_for(lambda: not workers_of(host), LIMIT, lambda: "the worker waits for the rest of a message")
    if child.poll() is not None:
        raise Failure("the job has ended")
    spool_is_empty(host)


def run_one(name, options):
    if os.geteuid() != 0:
        raise Failure("hostd.py plays several users, which needs root")
    with harness.Lab(options.product, keep=options.keep) as lab:
        CASES[name](users.Context(lab, options))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.run_cases(arguments, CASES, run_one)
