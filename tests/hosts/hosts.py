#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whole jobs of an ordinary user move between two hosts, each with a cr-hostd, and go on where they were if they cannot.

A host is made of mount, network and UTS namespaces: what it has in /dev/shm, in /tmp, in the user's home and in cr-hostd's
folders is its own; the test's other folders are common to all. Needs root, CRIU and iproute2. Python 3 standard library only.

Usage: hosts.py --product FOLDER --apps FOLDER [--only CASE,CASE] [--keep] [--list]
"""

import argparse
import collections
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "users"))
sys.path.insert(0, os.path.join(HERE, "..", "users"))
sys.path.insert(0, os.path.join(HERE, "..", "product"))
import hostd  # noqa: E402
import json_fields  # noqa: E402
import users  # noqa: E402
from hostd import ended, has_only_rights_of  # noqa: E402
from users import LIMIT, VICTIM, Failure, harness, paused_at, refused, worked  # noqa: E402

CASES = {}
PORT = 7071

PREPARE = """
set -e
hostname {name}
cd {lab}
for folder in /dev/shm /tmp; do mount -t tmpfs -o mode=1777 none $folder; done
mkdir -p {lab}
mount --no-canonicalize --bind . {lab}
cd /
for folder in {home} {host}; do mount -t tmpfs -o mode=755 none $folder; done
chown {user}:{user} {home}
chmod 700 {home}
ip link set lo up
ip link set {link} up
{bridge}
ip address add {address}/24 dev {device}
"""
# Its hardware address is that of its part with the lowest one. This is a high one, as virtual machines' are: that of a
# job's part must be higher, or the bridge would change its own when the job comes and goes.
BRIDGE = (
    "ip link set {link} address fe:fe:00:00:00:01 && ip link add {device} type bridge && ip link set {device} up && "
    "ip link set {link} master {device}"
)


def case(function):
    CASES[function.__name__] = function
    return function


def tool(*words):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise Failure(f"{' '.join(words)} ended with {done.returncode}: {done.stdout}")


class Authority:
    """Signs certificates of hosts."""

    def __init__(self, folder, name):
        os.makedirs(folder)
        self.folder, self.ca = folder, os.path.join(folder, "ca.pem")
        self.curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        tool("openssl", "req", "-x509", *self.curve, "-keyout", self.path("ca.key"), "-out", self.ca, "-subj", f"/CN={name}")

    def path(self, name):
        return os.path.join(self.folder, name)

    def options(self, name, address):
        """A certificate for a host, as cr-hostd's options."""
        cert, key = self.path(name + ".pem"), self.path(name + ".key")
        if not os.path.exists(cert):
            with open(self.path(name + ".ext"), "w") as f:
                f.write(f"subjectAltName=IP:{address}\n")
            tool("openssl", "req", *self.curve, "-keyout", key, "-out", self.path(name + ".csr"), "-subj", f"/CN={name}")
            tool("openssl", "x509", "-req", "-in", self.path(name + ".csr"), "-CA", self.ca, "-CAkey", self.path("ca.key"),
                 "-CAcreateserial", "-out", cert, "-days", "2", "-extfile", self.path(name + ".ext"))  # fmt: skip
        return ["--tls-cert", cert, "--tls-key", key, "--tls-ca", self.ca]


class Machine:
    """A host. Its paths are the same as the other one's; what is behind some of them is not."""

    def __init__(self, lab, name, number):
        self.lab, self.context, self.name = lab, lab.context, name
        self.address, self.address_6, self.link = f"10.99.0.{number}", f"fd00:99::{number}", f"host{number}"
        words = ["unshare", "--mount", "--net", "--uts", "--propagation", "private", "/bin/sh", "-c", "echo up; exec sleep 100000"]
        self.holder = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.context.lab.processes.append(users.Started(self.holder))
        if self.holder.stdout.readline() != "up\n":
            raise Failure("this machine gives the test no namespaces of its own")
        self.folder, self.home = lab.folder, lab.home
        self.socket, self.state = self.folder + "/hostd.sock", self.folder + "/state"
        self.daemon = None

    def prepare(self, bridge=None):
        """`bridge`: the name of one, which has the host's address; else its link has that."""
        words = {"link": self.link, "device": bridge or self.link}
        made = BRIDGE.format(**words) if bridge else ""
        text = PREPARE.format(name=self.name, lab=self.context.lab.folder, home=self.home, host=self.folder, user=VICTIM, address=self.address, bridge=made, **words)
        tool(*self.enter(0), "/bin/sh", "-c", text)

    def enter(self, user):
        words = ["nsenter", "--target", str(self.holder.pid), "--mount", "--net", "--uts", "--"]
        return words if user == 0 else words + ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]

    def path(self, path):
        """A path of this host's, as the test sees it."""
        return f"/proc/{self.holder.pid}/root{path}"

    def start(self, authority=None, key=b"k" * 32, more=(), **variables):
        """Its cr-hostd."""
        if not os.path.isdir(self.path(self.state)):
            os.mkdir(self.path(self.state), 0o700)
        with open(os.open(self.path(self.state + "/hostd.key"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
            f.write(key)
        words = (authority or self.lab.authority).options(self.name, self.address)
        words = ["--listen", f"{self.address}:{PORT}", *words, *more]
        command = [*self.enter(0), self.context.tool("cr-hostd"), "--socket", self.socket, "--state", self.state, *words]
        self.log = os.path.join(self.context.lab.folder, f"{self.name}.log")
        with open(self.log, "a") as log:
            self.daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                                           env=self.context.environment(variables))  # fmt: skip
        self.context.lab.processes.append(users.Started(self.daemon))
        up = lambda: hostd.accepts(self.path(self.socket)) or self.daemon.poll() is not None
        harness.wait_for(up, LIMIT, lambda: f"cr-hostd does not start: {self.said()}")
        if self.daemon.poll() is not None:
            raise Failure(f"cr-hostd has ended: {self.said()}")

    def said(self):
        return open(self.log).read()

    def stop(self):
        self.daemon.kill()
        self.daemon.wait()

    def restart(self, **options):
        self.stop()
        self.start(**options)

    def run(self, user, name, *words, **variables):
        command = [*self.enter(user), self.context.tool(name), *words]
        return self.context.run(0, command, CUDA_REMOTE_HOSTD=self.socket, **variables)

    def begin(self, user, name, *words, **variables):
        command = [*self.enter(user), self.context.tool(name), *words]
        return self.context.start(0, command, CUDA_REMOTE_HOSTD=self.socket, **variables)

    def read(self, path):
        return open(self.path(path)).read() if os.path.exists(self.path(path)) else ""

    def hide(self, path, *options):
        """Mounts something else there, until show."""
        tool(*self.enter(0), "mount", *options, path)

    def show(self, path):
        tool(*self.enter(0), "umount", path)

    def write(self, path, text):
        with open(self.path(path), "w") as f:
            f.write(text)
        os.chown(self.path(path), VICTIM, VICTIM)

    def job(self, name):
        return self.path(f"{self.folder}/users/{VICTIM}/cuda-remote/jobs/{name}")

    def facts(self, name):
        return json.load(open(self.job(name) + "/job.json"))

    def has_job(self, name):
        return os.path.exists(self.job(name) + "/job.json")

    def left(self):
        """What its cr-hostd has of images."""
        doubtful = [name for name in os.listdir(self.path(self.state)) if name.startswith("doubtful")]
        return doubtful + os.listdir(self.path(self.state + "/spool"))

    def is_clean(self, limit=LIMIT):
        harness.wait_for(lambda: not self.left(), limit, lambda: f"cr-hostd of {self.name} has left {self.left()}")


# With what is a job's own, besides its GPU memory: shared memory, a file without a name, and the script's variables.
JOB = """
set -e
exec 7<>/dev/shm/{tag}
echo in shared memory >&7
exec 8<>{home}/gone
echo in a file without a name >&8
rm {home}/gone
word='in a variable'
{program} --steps 20
cat /dev/shm/{tag} /proc/self/fd/8
echo $word
rm /dev/shm/{tag}
"""


class Lab:
    """Two hosts, A and B, and a user who is on both."""

    def __init__(self, context):
        self.context = context
        self.folder, self.home = context.folder("host", 0o755), context.folder("home", 0o755)
        self.authority = Authority(os.path.join(context.lab.folder, "tls"), "hosts")
        self.connect()
        self.sync = context.shared + "/sync"
        self.out, self.errors = self.home + "/out", self.home + "/errors"

    def connect(self):
        tool("ip", "link", "add", "host1", "type", "veth", "peer", "name", "host2")
        self.a, self.b = Machine(self, "a", 1), Machine(self, "b", 2)
        for machine in (self.a, self.b):
            tool("ip", "link", "set", machine.link, "netns", str(machine.holder.pid))
            machine.prepare()

    def script(self, text=JOB, **words):
        path = os.path.join(self.context.shared, "job.sh")
        words = {"program": self.context.program, "home": self.home, "tag": f"cr-move-{os.getpid()}", **words}
        with open(path, "w") as f:
            f.write("#!/bin/bash\n" + text.format(**words))
        os.chmod(path, 0o755)
        return path

    def uninterrupted(self, script):
        return worked(self.a.run(VICTIM, "cr-run", "--plain", "--", "/bin/bash", script)).stdout

    def begin(self, machine, script, *pauses, name="hers", more=(), **variables):
        """The job, standing after the first of these steps."""
        words = ("--name", name, *more, "--output", self.out, "--error", self.errors, "--", "/bin/bash", script)
        at = ",".join(map(str, pauses))
        child = machine.begin(VICTIM, "cr-run", *words, CR_TEST_SYNC_FILE=self.sync, CR_TEST_PAUSE_AT=at, **variables)
        paused_at(self.sync, pauses[0], child)
        return child

    def go(self, step):
        open(f"{self.sync}.go.{step}", "w").close()

    def stands(self, step):
        reached = lambda: f"paused {step}" in open(self.sync).read().split("\n")
        harness.wait_for(reached, LIMIT, lambda: f"the job does not reach step {step}: {self.a.said()} {self.b.said()}")

    def to(self, machine):
        """Where cr-migrate is to take a job, and what the job writes."""
        return ("--whole", "--to-host", machine.address, "--output", self.out, "--error", self.errors)

    def move(self, source, to, *words, **variables):
        return source.run(VICTIM, "cr-migrate", "hers", *self.to(to), *words, **variables)

    def is_output(self, want):
        """All that the job has written, on whichever host."""
        got = lambda: self.a.read(self.out) + self.b.read(self.out)
        harness.wait_for(lambda: got() == want, LIMIT, lambda: f"the job wrote\n{got()}\nexpected\n{want}\n{self.b.said()}")


class Lan(Lab):
    """Three hosts on a switch: A and B as in Lab, where B's address is on a bridge, and C, whose programs speak with the job."""

    def connect(self):
        self.a, self.b, self.c = (Machine(self, name, i + 1) for i, name in enumerate("abc"))
        switch = Machine(self, "switch", 4)
        inside = switch.enter(0)
        tool(*inside, "ip", "link", "add", "lan", "type", "bridge")
        tool(*inside, "ip", "link", "set", "lan", "up")
        for machine in (self.a, self.b, self.c):
            port = "to" + machine.link
            tool(*inside, "ip", "link", "add", machine.link, "type", "veth", "peer", "name", port)
            tool(*inside, "ip", "link", "set", port, "master", "lan", "up")
            tool(*inside, "ip", "link", "set", machine.link, "netns", str(machine.holder.pid))
            machine.prepare(bridge="br0" if machine is self.b else None)

    def use_ipv6(self):
        """Gives the hosts addresses of IPv6 as well."""
        for machine in (self.a, self.b, self.c):
            device = "br0" if machine is self.b else machine.link
            tool(*machine.enter(0), "ip", "address", "add", machine.address_6 + "/64", "dev", device, "nodad")


def goes_on(lab, child, want, steps):
    """The job is still on A, and comes to its end there as if nothing had been."""
    for step in steps:
        lab.go(step)
    ended(child)
    if lab.a.read(lab.out) != want:
        raise Failure(f"the job wrote\n{lab.a.read(lab.out)}\nexpected\n{want}")
    if lab.b.has_job("hers"):
        raise Failure("the job is on B, too")
    lab.a.is_clean()
    lab.b.is_clean()


def logged(machine, job, *texts):
    """The log of cr-hostd has lines with these texts, with time, level, user and job."""
    lines = re.findall(r"^\d{4}(?:-\d\d){2} [\d:.]{12} (?:info|warning) cr-hostd: user [^,]*, job ([^:]+): (.*)$", machine.said(), re.MULTILINE)
    for text in texts:
        if not any(name == job and text in said for name, said in lines):
            raise Failure(f"cr-hostd's log on {machine.name} has no line of job {job} with {text!r}:\n{machine.said()}")


def as_documented(section, text):
    """What a tool has printed with --json, which has all fields of that section of docs/json.md and no others."""
    fields = json_fields.Section(section)
    output = fields.check(text)
    fields.complete()
    return output


def last_image(machine):
    """What cr-ps says of the only job there: its last image, and when that was made."""
    [job] = json.loads(worked(machine.run(VICTIM, "cr-ps", "--json")).stdout)["jobs"]
    return job.get("saved_image"), job.get("saved_unix_ms")


@case
def moved(context):
    """A job goes to the other host with its shared memory, nameless files and one whose name is not UTF-8, is saved there,
    and goes back."""
    lab = Lab(context)
    lab.a.start()
    lab.b.start()
    lab.a.write(lab.context.shared + "/d\udce9ta", "in a file with a name\n")
    script = lab.script("exec 9<{shared}/d$'\\xe9'ta\n" + JOB + "cat <&9\n", shared=context.shared)
    want = lab.uninterrupted(script)
    if "in a file with a name" not in want:
        raise Failure(f"the script does not find its file: {want}")
    child = lab.begin(lab.a, script, 3, 9, 15)
    done = as_documented("cr-migrate --whole", worked(lab.move(lab.a, lab.b, "--json")).stdout)
    if done["host"] != lab.b.address or not 0 < done["paused_seconds"] <= done["seconds"]:
        raise Failure(f"cr-migrate reports {done}")
    if done["rounds"] != len(done["bytes_before"]) or 0 in [done["rounds"], done["bytes_in_pause"], *done["bytes_before"]]:
        raise Failure(f"cr-migrate reports {done}")
    _, said = child.communicate(timeout=harness.patient(LIMIT))
    if child.returncode != 121 or f"the job was moved to {lab.b.address}" not in said:
        raise Failure(f"cr-run ended with {child.returncode}: {said}")
    if lab.a.has_job("hers"):
        raise Failure("the job is still on A")
    logged(lab.a, "hers", "cr-run", "cr-migrate --whole, to", "moved to " + lab.b.address)
    logged(lab.b, "hers", "it comes from a", "the job arrives from another host")
    facts = lab.b.facts("hers")
    has_only_rights_of(facts["pid"], VICTIM)
    if os.readlink(f"/proc/{facts['pid']}/ns/net") != os.readlink(f"/proc/{lab.b.holder.pid}/ns/net"):
        raise Failure("the job is not in B's network")
    lab.a.is_clean()
    lab.b.is_clean()
    if last_image(lab.b) != (None, None):
        raise Failure(f"a job that was moved and never saved has the image {last_image(lab.b)}")
    worked(lab.b.run(VICTIM, "cr-checkpoint", "hers", lab.home + "/image"))
    saved = last_image(lab.b)
    if saved[0] != lab.home + "/image":
        raise Failure(f"the job's last image is {saved}")
    lab.go(3)
    lab.stands(9)
    worked(lab.move(lab.b, lab.a))
    harness.wait_for(lambda: not lab.b.has_job("hers"), LIMIT, lambda: "the job is still on B")
    if last_image(lab.a) != saved:
        raise Failure(f"the last image was {saved} before the move, and is {last_image(lab.a)}")
    has_only_rights_of(lab.a.facts("hers")["pid"], VICTIM)
    lab.go(9)
    lab.stands(15)
    lab.go(15)
    lab.is_output(want)
    harness.wait_for(lambda: not lab.a.has_job("hers"), LIMIT, lambda: "the ended job's folder stays")
    for machine in (lab.a, lab.b):
        machine.is_clean()
        if "gRPC" in machine.said():
            raise Failure(f"gRPC complains in {machine.name}: {machine.said()}")


@case
def moved_restarted(context):
    """A restarted job, whose output files CRIU has opened, can get others when it moves."""
    lab = Lab(context)
    lab.a.start()
    lab.b.start()
    script = lab.script()
    want = lab.uninterrupted(script)
    child = lab.begin(lab.a, script, 3, 9)
    image = lab.home + "/image"
    worked(lab.a.run(VICTIM, "cr-checkpoint", "--stop", "hers", image))
    ended(child, 121)
    again = lab.a.begin(VICTIM, "cr-restart", image)
    harness.wait_for(lambda: lab.a.has_job("hers") or again.poll() is not None, LIMIT, lambda: "the job is not restarted")
    lab.go(3)
    lab.stands(9)
    worked(lab.move(lab.a, lab.b))
    ended(again, 121)
    lab.go(9)
    lab.is_output(want)
    lab.a.is_clean()
    lab.b.is_clean()


@case
def moved_in_rounds(context):
    """What changes all the time is sent again while the job runs, page by page, and little of it is left for the pause."""
    lab = Lab(context)
    lab.a.start()
    lab.b.start()
    program = shutil.copy(os.path.join(context.apps, "..", "hosts", "mostly_still"), context.product)
    os.chmod(program, 0o755)
    stop = context.shared + "/stop"
    words = ("--name", "hers", "--output", lab.out, "--error", lab.errors, "--", program, stop)
    child = lab.a.begin(VICTIM, "cr-run", *words)
    over = lambda: lab.a.read(lab.out) == "begins\n" or child.poll() is not None
    harness.wait_for(over, LIMIT, lambda: f"the program does not begin: {lab.a.read(lab.errors)}")
    for source, to in ((lab.a, lab.b), (lab.b, lab.a)):
        done = json.loads(worked(lab.move(source, to, "--json")).stdout)
        first, *more = done["bytes_before"]
        if first < 320 << 20 or not more or done["rounds"] != 1 + len(more):
            raise Failure(f"cr-migrate reports {done}")
        # A twentieth of the pages of the host's memory has changed, and of the GPU's memory two chunks of 2 MiB.
        if done["bytes_in_pause"] >= first / 4 or max(more) >= first / 4:
            raise Failure(f"cr-migrate sends what has not changed: {done}")
        harness.wait_for(lambda: not source.has_job("hers"), LIMIT, lambda: f"the job is still on {source.name}")
    ended(child, 121)
    open(stop, "w").close()
    lab.is_output("begins\nall is as it must be\n")
    lab.a.is_clean()
    lab.b.is_clean()


def new_cgroups(name):
    """Makes control groups of this name in what hierarchies this machine lets the test."""
    made = []
    for line in open("/proc/self/mountinfo"):
        fields = line.split()
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        # A new group of cpuset has no processors.
        if not kind.startswith("cgroup") or "cpuset" in options:
            continue
        try:
            os.makedirs(f"{fields[4]}/{name}")
            made.append(f"{fields[4]}/{name}")
        except OSError:
            pass  # not writable
    if not made:
        raise Failure("this machine lets the test make no control groups")
    return made


@case
def moved_cgroup(context):
    """A job that has come from another host, and a part that is restarted over hosts, is in its user's control group."""
    parent = f"cr-test-{os.getpid()}"
    group = f"{parent}/user-{VICTIM}"
    made = new_cgroups(group)
    try:
        lab = Lan(context)
        there = ["--user-cgroup", f"{parent}/user-%u", *ALLOWED]
        lab.a.start(more=ALLOWED)
        for machine in (lab.b, lab.c):
            machine.start(more=there)

        def is_in_group(machine, name):
            facts = machine.facts(name)
            for pid in [facts["pid"], *harness.descendants(facts["pid"])]:
                lines = open(f"/proc/{pid}/cgroup").read().splitlines()
                if sum(f"/{group}" in line for line in lines) != len(made):
                    raise Failure(f"process {pid} on {machine.name} is in {lines}, not in {made}")

        script = lab.script()
        want = lab.uninterrupted(script)
        child = lab.begin(lab.a, script, 3)
        worked(lab.move(lab.a, lab.b))
        ended(child, 121)
        is_in_group(lab.b, "hers")
        lab.go(3)
        lab.is_output(want)
        ring = Ring(lab, 3)
        ring.save_and_end()
        worked(lab.a.run(VICTIM, "cr-restart", ring.image, "--hosts", f"{lab.b.address},{lab.c.address}", "--cut-back"))
        for part, machine in zip(ring.parts, (lab.b, lab.c)):
            part.runs_on(machine)
            is_in_group(machine, "ring")
        ring.finish(3)
        # One that is not there is named, before anything is sent.
        lab.b.restart(more=["--user-cgroup", parent + "/none-%u"])
        child = lab.begin(lab.a, script, 9, name="late")
        refused(lab.a.run(VICTIM, "cr-migrate", "late", *lab.to(lab.b)), f"no control group {parent}/none-{VICTIM}", "continues")
        lab.go(9)
        ended(child)
    finally:
        for folder in made:
            gone = lambda: not any(open(path + "/cgroup.procs").read() for path, _, _ in os.walk(folder))
            harness.wait_for(gone, LIMIT, lambda: f"processes stay in {folder}")
            for path, _, _ in os.walk(folder, topdown=False):
                os.rmdir(path)
            os.rmdir(os.path.dirname(folder))


@case
def moved_ranks(context):
    """A job of MPI's ranks goes to the other host and back with what they have in common: session folders of Open MPI in
    /tmp, which each host has for itself, and shared memory."""
    lab = Lab(context)
    lab.a.start()
    lab.b.start()
    program = os.path.join(context.product, "mpi_stencil_openmpi")
    os.chmod(shutil.copy(harness.find(context.apps, "mpi_stencil_openmpi"), program), 0o755)
    # Its ranks speak through shared memory alone.
    command = ["mpirun.openmpi", "--oversubscribe", "--mca", "btl", "self,vader", "-n", "2", program, "--steps", "24"]
    native = ["env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", *command]
    want = context.lab.native("native", native).decode()
    sync = {"CR_TEST_SYNC_FILE": lab.sync, "CR_TEST_PAUSE_AT": "4,8,12", **VARIABLES(lab)}
    words = ("--name", "hers", "--output", lab.out, "--error", lab.errors, "--", *command)
    child = lab.a.begin(VICTIM, "cr-run", *words, **sync)
    paused_at(lab.sync, 4, child)
    sessions = lambda machine: [name for name in os.listdir(machine.path("/tmp")) if name.startswith("ompi.")]
    if not sessions(lab.a) or sessions(lab.b):
        raise Failure(f"Open MPI has {sessions(lab.a)} in A's /tmp, and {sessions(lab.b)} in B's")
    for source, to, step, then in ((lab.a, lab.b, 4, 8), (lab.b, lab.a, 8, 12)):
        worked(lab.move(source, to))
        harness.wait_for(lambda: not source.has_job("hers"), LIMIT, lambda: f"the job is still on {source.name}")
        if not sessions(to):
            raise Failure(f"{to.name} has no session folder of Open MPI")
        lab.go(step)
        lab.stands(then)
    ended(child, 121)
    lab.go(12)
    lab.is_output(want)
    harness.wait_for(lambda: not lab.a.has_job("hers"), LIMIT, lambda: "the ended job's folder stays")
    lab.a.is_clean()
    lab.b.is_clean()


def sent_by(machine):
    """How many bytes it has sent to other hosts."""
    path = f"/sys/class/net/{machine.link}/statistics/tx_bytes"
    return int(subprocess.run([*machine.enter(0), "sh", "-c", f"mount -t sysfs none /sys; cat {path}; umount /sys"],
                              stdout=subprocess.PIPE, text=True, check=True).stdout)  # fmt: skip


def one_of_two_builds(lab):
    """A library of which B has another build."""
    paths = [os.path.join(lab.context.shared, f"library-{number}.so") for number in (1, 2)]
    for number, path in enumerate(paths):
        source = path + ".c"
        with open(source, "w") as f:
            f.write(f"int version = {number};\n")
        tool("gcc", "-shared", "-fPIC", "-Wl,--build-id", "-o", path, source)
    lab.b.hide(paths[0], "--bind", paths[1])
    return paths[0]


@case
def lacking(context):
    """What B lacks is listed before anything is sent, and the job continues."""
    lab = Lab(context)
    lab.a.start()
    lab.b.start()
    data, other = lab.home + "/data", lab.home + "/other"
    for machine in (lab.a, lab.b):
        machine.write(data, "data" if machine is lab.a else "other data")
    lab.a.write(other, "only here")
    library = one_of_two_builds(lab)
    script = lab.script("exec 5<{home}/data 6<{home}/other\n" + JOB.replace("{program}", "LD_PRELOAD=" + library + " {program}"))
    want = lab.uninterrupted(script)
    child = lab.begin(lab.a, script, 3, SOFTGPU_DEVICES="2")
    before = sent_by(lab.a)
    # Two GPUs are one there, for which its module is too new: all of it is said at once.
    gpus = ("globals (PID", "it sees 2 GPUs; there is 1 at " + lab.b.address, "of compute capability 3.5", "nothing was sent")
    own = f"{library} is another version"
    refused(lab.move(lab.a, lab.b, SOFTGPU_CAPABILITY="3.5"), *gpus, f"{data} has changed", own, "continues where it was")
    server = lab.b.begin(VICTIM, "cr-server", "--dir", lab.home + "/server", SOFTGPU_CAPABILITY="3.5")
    path = lab.b.path(lab.home + "/server/session.sock")
    harness.wait_for(lambda: harness.connects(path), LIMIT, lambda: "no server on B")
    refused(lab.move(lab.a, lab.b, "--to", f"unix:{lab.home}/server"), *gpus)
    server.terminate()
    server.wait(harness.patient(LIMIT))
    refused(lab.move(lab.a, lab.b, "--to", f"unix:{lab.home}/server"), "GPUs for the job: ", "cannot open a session")
    lab.b.restart(CUDA_REMOTE_CRIU="/none")
    refused(lab.move(lab.a, lab.b), "/none, which cannot be executed", f"{data} has changed")
    lab.b.stop()
    lab.b.hide(lab.b.state, "-t", "tmpfs", "-o", "size=1m,mode=700", "none")
    lab.b.start()
    refused(lab.move(lab.a, lab.b), "room for the image", f"{data} has changed")
    lab.b.stop()
    lab.b.show(lab.b.state)
    lab.b.show(library)
    lab.b.start()
    changed, gone = f"{data} has changed: 10 bytes, 4", f"{other} is not on this machine"
    refused(lab.move(lab.a, lab.b), "lacks what the job needs", changed, gone, "continues where it was")
    if sent_by(lab.a) - before > 1 << 20:
        raise Failure(f"A has sent {sent_by(lab.a) - before} bytes, although B lacks something")
    # A pipe stays where it is.
    piped = lab.a.begin(VICTIM, "cr-run", "--name", "piped", "--", "/bin/sleep", "600")
    harness.wait_for(lambda: lab.a.has_job("piped"), LIMIT, lambda: "no job piped")
    to_b = ("--whole", "--to-host", lab.b.address)
    refused(lab.a.run(VICTIM, "cr-migrate", "piped", *to_b), "descriptor 1 is a pipe", "--output")
    refused(lab.a.run(VICTIM, "cr-migrate", "piped", *to_b, "--output", lab.out), "descriptor 2 is a pipe", "--error")
    # Two of one name.
    hers = lab.b.begin(VICTIM, "cr-run", "--name", "hers", "--", "/bin/sleep", "600")
    harness.wait_for(lambda: lab.b.has_job("hers"), LIMIT, lambda: "no job hers on B")
    lab.b.write(data, "data")
    lab.b.write(other, "only here")
    refused(lab.move(lab.a, lab.b), "a job hers of this user runs there")
    for one in (hers, piped):
        one.terminate()
        one.wait(harness.patient(LIMIT))
    # Nobody moves what is not his.
    refused(lab.a.run(users.ATTACKER, "cr-migrate", lab.a.job("hers"), *to_b), "is none")
    refused(lab.a.run(VICTIM, "cr-migrate", "hers", "--whole"), "--to-host")
    goes_on(lab, child, want, [3])


UNFIT_CRIU = """#!/bin/sh
[ "$1" = check ] && {{ echo "Error (criu/cr-check.c:100): no feature of that kind"; exit 1; }}
exec {criu} "$@"
"""
# As in a container that has capabilities, but may not write to /proc/sys.
CONTAINED_CRIU = """#!/bin/sh
if [ "$*" = check ]; then
  echo "Error (criu/tun.c:85): tun: Unable to create tun: No such file or directory"
  echo "Error (criu/cr-check.c:160): sys/kernel/ns_last_pid sysctl is inaccessible: Read-only file system"
  echo "Warn  (criu/cr-check.c:1674): Does not look good."
  exit 1
fi
exec {criu} "$@"
"""


def write_criu(context, name, text):
    path = os.path.join(context.lab.folder, name)
    with open(path, "w") as f:
        f.write(text.format(criu=harness.criu_here()))
    os.chmod(path, 0o755)
    return path


@case
def lacking_features(context):
    """Features of the kernel that the job uses and its user does not have on B are listed before anything is sent."""
    lab = Lab(context)
    facts = os.stat("/dev/userfaultfd")
    for machine in (lab.a, lab.b):
        # The same device; who may use it is each host's own affair.
        words = f"mount -t tmpfs none /mnt && mknod /mnt/u c {os.major(facts.st_rdev)} {os.minor(facts.st_rdev)}"
        tool(*machine.enter(0), "sh", "-c", words + " && mount --bind /mnt/u /dev/userfaultfd && umount -l /mnt")
    tool(*lab.a.enter(0), "chmod", "666", "/dev/userfaultfd")
    lab.a.start()
    lab.b.start(CUDA_REMOTE_CRIU=write_criu(context, "unfit", UNFIT_CRIU))
    program = os.path.join(context.product, "managed")
    os.chmod(shutil.copy(harness.find(context.apps, "managed"), program), 0o755)
    script = lab.script(program=program)
    want = lab.uninterrupted(script)
    child = lab.begin(lab.a, script, 3, 9)
    before = sent_by(lab.a)
    refused(lab.move(lab.a, lab.b), "leave to use userfaultfd", "criu check", "no feature of that kind", "nothing was sent")
    lab.b.restart(CUDA_REMOTE_CRIU=write_criu(context, "contained", CONTAINED_CRIU))
    without = lab.move(lab.a, lab.b)
    refused(without, "leave to use userfaultfd", "continues where it was")
    if "criu check" in without.stderr:
        raise Failure(f"what a container lacks and a restore does not need is a reason to refuse: {without.stderr}")
    if sent_by(lab.a) - before > 1 << 20:
        raise Failure(f"A has sent {sent_by(lab.a) - before} bytes, although B lacks something")
    tool(*lab.b.enter(0), "chmod", "666", "/dev/userfaultfd")
    worked(lab.move(lab.a, lab.b))
    ended(child, 121)
    lab.go(3)
    lab.stands(9)
    lab.go(9)
    lab.is_output(want)
    lab.a.is_clean()
    lab.b.is_clean()


@case
def strangers(context):
    """B takes nothing from a host without a certificate of the cluster, an image of another key, or of a user whom it knows
    by another name; and A sends nothing to a host that is not of the cluster."""
    lab = Lab(context)
    lab.a.start()
    lab.b.start(more=["--allow-host", "CN=other"])
    script = lab.script()
    want = lab.uninterrupted(script)
    child = lab.begin(lab.a, script, 3)
    refused(lab.move(lab.a, lab.b), "accepts nothing from a host with the certificate of", "CN=a", "continues")
    foreign = Authority(os.path.join(context.lab.folder, "foreign"), "strangers")
    lab.b.restart(authority=foreign)
    refused(lab.move(lab.a, lab.b), "does not answer", "continues")
    lab.b.restart(key=b"x" * 32)
    refused(lab.move(lab.a, lab.b), "signed with another key", "continues")
    passwd = os.path.join(context.lab.folder, "passwd")
    with open(passwd, "w") as f:
        f.write(open("/etc/passwd").read() + f"somebody:x:{VICTIM}:{VICTIM}::/:/bin/sh\n")
    tool(*lab.b.enter(0), "mount", "--bind", passwd, "/etc/passwd")
    lab.b.restart()
    refused(lab.move(lab.a, lab.b), "is somebody", "the same users", "continues")
    tool(*lab.b.enter(0), "umount", "/etc/passwd")
    refused(lab.a.run(VICTIM, "cr-migrate", "hers", "--whole", "--to-host", "10.99.0.77:1"), "does not answer", "continues")
    goes_on(lab, child, want, [3])


ADDRESS, ADDRESS_6 = "10.99.0.50", "fd00:99::50"
ALLOWED = ["--allow-address", "10.99.0.0/24", "--allow-address", "fd00:99::/64"]

# In the job: connections to a program on another host, from one, and between two processes, all at the job's address. Each
# block that is sent must come back as it was.
TALK = """
import os, random, socket, sys
own, other, stop = sys.argv[1:]
family = socket.AF_INET6 if ":" in own else socket.AF_INET

def all_of(connection, size):
    got = b""
    while len(got) < size:
        part = connection.recv(size - len(got))
        if not part: raise EOFError(f"{len(got)} of {size} bytes")
        got += part
    return got

def echo(connection):
    while part := connection.recv(1 << 16): connection.sendall(part)

inside = socket.create_server((own, 7001), family=family)
outside = socket.create_server((own, 7000), family=family)
if os.fork() == 0:
    echo(socket.create_connection((own, 7001)))
    os._exit(0)
if os.fork() == 0:
    echo(outside.accept()[0])
    os._exit(0)
connections = [inside.accept()[0], socket.create_connection((other, 9000))]
numbers = random.Random(7)
while not os.path.exists(stop):
    block = numbers.randbytes(numbers.randrange(1, 100000))
    for one in connections:
        one.sendall(block)
        if all_of(one, len(block)) != block: raise ValueError("another block")
for one in connections: one.close()
for _ in range(2):
    if os.wait()[1] != 0: raise ChildProcessError("an echo has failed")
"""

# On C: the other ends. Says how many blocks it has had of each.
PEER = """
import os, random, socket, sys, threading, time
own, other, stop, counts = sys.argv[1:]
server = socket.create_server((own, 9000), family=socket.AF_INET6 if ":" in own else socket.AF_INET)
blocks = [0, 0]

def tell(which):
    blocks[which] += 1
    with open(f"{counts}.{which}.new", "w") as f: f.write(str(blocks[which]))
    os.rename(f"{counts}.{which}.new", f"{counts}.{which}")

def serve():
    connection = server.accept()[0]
    while part := connection.recv(1 << 16):
        connection.sendall(part)
        tell(0)

def ask():
    while True:
        try: connection = socket.create_connection((other, 7000)); break
        except OSError: time.sleep(0.1)
    numbers = random.Random(8)
    while not os.path.exists(stop):
        block = numbers.randbytes(numbers.randrange(1, 100000))
        connection.sendall(block)
        got = b""
        while len(got) < len(block):
            part = connection.recv(len(block) - len(got))
            if not part: raise EOFError()
            got += part
        if got != block: raise ValueError("another block")
        tell(1)
    connection.close()

def watched(work):
    try: work()
    except BaseException as problem:
        print(work.__name__, repr(problem), file=sys.stderr, flush=True)
        os._exit(1)

serving = threading.Thread(target=watched, args=[serve])
serving.start()
watched(ask)
serving.join()
"""


class Talk:
    """A job with an address of its own that speaks all the time with C, beside its GPU program."""

    def __init__(self, lab, machine, *pauses, address=ADDRESS):
        self.lab, self.machine = lab, machine
        shared = lab.context.shared
        self.stop, self.counts, talk = shared + "/stop", shared + "/counts", shared + "/talk.py"
        with open(talk, "w") as f:
            f.write(TALK)
        self.want = lab.uninterrupted(lab.script()) + "talked\n"
        own, other = address.split("@")[0], lab.c.address_6 if ":" in address else lab.c.address
        words = f"/usr/bin/python3 {talk} {own} {other} {self.stop} &\ntalk=$!\n"
        script = lab.script(JOB.replace("set -e\n", "set -e\n" + words) + "wait $talk\necho talked\n")
        command = [*lab.c.enter(VICTIM), users.PYTHON, "-c", PEER, other, own, self.stop, self.counts]
        self.peer = lab.context.start(0, command)
        self.child = lab.begin(machine, script, *pauses, more=("--address", address))
        self.goes_on("at first")

    def blocks(self):
        return [int(open(f"{self.counts}.{i}").read()) if os.path.exists(f"{self.counts}.{i}") else 0 for i in range(2)]

    def goes_on(self, what):
        """Both connections with C carry data now."""
        before = self.blocks()
        more = lambda: all(now > then + 2 for now, then in zip(self.blocks(), before))
        over = lambda: more() or self.peer.poll() is not None
        said = lambda: f"{self.lab.a.said()} {self.lab.b.said()} {self.lab.a.read(self.lab.errors)} {self.lab.b.read(self.lab.errors)}"
        harness.wait_for(over, LIMIT, lambda: f"{what}: blocks {before} -> {self.blocks()}; {said()}")
        if self.peer.poll() is not None:
            raise Failure(f"{what}: C's program has ended: {self.peer.stderr.read()} {said()}")

    def finish(self, *steps):
        for step in steps:
            self.lab.go(step)
        open(self.stop, "w").close()
        self.lab.is_output(self.want)
        ended(self.peer)


def has_address(machine, name, address):
    """The job's network is its own."""
    words = ["nsenter", "--target", str(machine.facts(name)["pid"]), "--net", "ip", "-o", "address", "show", "dev", "eth0"]
    got = subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout
    # IPv6 needs one for the link on each interface.
    want = [f"{address}/64", "fe80::"] if ":" in address else [f"{address}/24"]
    if got.count("\n") != len(want) or not all(f" {one}" in got for one in want):
        raise Failure(f"the job has the addresses {got}")


def moves_with_address(context, address):
    """A job with an address of its own is saved, moves to the other host and back, is stopped and restarted: its connections
    with a third host, from both sides, and within the job lose nothing."""
    lab = Lan(context)
    lab.a.start(more=ALLOWED)
    lab.b.start(more=ALLOWED)
    if ":" in address:
        lab.use_ipv6()
    talk = Talk(lab, lab.a, 3, 9, 15, address=address)
    has_address(lab.a, "hers", address)
    image = context.shared + "/image"
    worked(lab.a.run(VICTIM, "cr-checkpoint", "hers", image))
    talk.goes_on("after a checkpoint")
    worked(lab.move(lab.a, lab.b))
    has_address(lab.b, "hers", address)
    talk.goes_on("after the move to B")
    lab.go(3)
    lab.stands(9)
    worked(lab.move(lab.b, lab.a))
    harness.wait_for(lambda: not lab.b.has_job("hers"), LIMIT, lambda: "the job is still on B")
    talk.goes_on("after the move to A")
    worked(lab.a.run(VICTIM, "cr-checkpoint", "--stop", "hers", image))
    again = lab.a.begin(VICTIM, "cr-restart", image)
    harness.wait_for(lambda: lab.a.has_job("hers") or again.poll() is not None, LIMIT, lambda: "no restart")
    if again.poll() is not None:
        raise Failure(f"cr-restart has ended: {again.stderr.read()}")
    talk.goes_on("after the restart")
    lab.go(9)
    lab.stands(15)
    talk.finish(15)
    ended(again)
    lab.a.is_clean()
    lab.b.is_clean()


@case
def addressed(context):
    """Connections of a job with an address of its own go on, wherever it goes."""
    moves_with_address(context, ADDRESS)


@case
def addressed_6(context):
    """The same with an address of IPv6."""
    moves_with_address(context, ADDRESS_6)


@case
def address_stays(context):
    """A move that fails takes the address back to A: nothing is lost. What B lacks for it is said before anything is sent."""
    lab = Lan(context)
    lab.a.start(more=ALLOWED)
    lab.b.start()
    talk = Talk(lab, lab.a, 3, address=f"{ADDRESS}@{lab.a.link}")
    refused(lab.move(lab.a, lab.b), "lacks what the job needs", f"no interface {lab.a.link}", "continues")
    tool(*lab.b.enter(0), "ip", "link", "set", "br0", "down")
    tool(*lab.b.enter(0), "ip", "link", "set", "br0", "name", lab.a.link, "up")
    refused(lab.move(lab.a, lab.b), "lacks what the job needs", f"no job the address {ADDRESS}", "--allow-address", "continues")
    talk.goes_on("after the refusals")
    broken = os.path.join(context.lab.folder, "criu")
    with open(broken, "w") as f:
        f.write(FAILING_CRIU.format(criu=harness.criu_here()))
    os.chmod(broken, 0o755)
    lab.b.restart(more=ALLOWED, CUDA_REMOTE_CRIU=broken)
    refused(lab.move(lab.a, lab.b), "CRIU could not restore", "continues")
    talk.goes_on("after the failed restart on B")
    # The processes are restored there, and have not run.
    steps = os.path.join(context.lab.folder, "steps")
    lab.b.restart(more=ALLOWED, CR_TEST_STEPS=steps, CR_TEST_STOP_AT="3")
    moving = lab.a.begin(VICTIM, "cr-migrate", "hers", *lab.to(lab.b))
    stands = lambda: os.path.exists(steps) and any(line.startswith("3 ") for line in open(steps).read().splitlines())
    harness.wait_for(lambda: stands() or moving.poll() is not None, LIMIT, lambda: f"no step 3: {lab.b.said()}")
    if moving.poll() is not None:
        raise Failure(f"cr-migrate has ended: {moving.stderr.read()}")
    lab.b.stop()
    if moving.wait(harness.patient(LIMIT)) != 1:
        raise Failure(f"cr-migrate ended with {moving.returncode}")
    open(steps + ".go", "w").close()
    talk.goes_on("after B's cr-hostd was killed")
    lab.b.start(more=ALLOWED)
    worked(lab.move(lab.a, lab.b))
    talk.goes_on("after the move to B")
    talk.finish(3)


@case
def addresses(context):
    """Which addresses a job cannot have, and what it says."""
    lab = Lan(context)
    lab.a.start()
    run = ("--", "/bin/true")
    refused(lab.a.run(VICTIM, "cr-run", "--address", ADDRESS, *run), f"no job the address {ADDRESS}", "--allow-address")
    lab.a.restart(more=["--allow-address", "10.99.0.48/28@host1", "--allow-address", "10.98.0.0/16"])
    worked(lab.a.run(VICTIM, "cr-run", "--address", ADDRESS, *run))
    refused(lab.a.run(VICTIM, "cr-run", "--address", "10.99.0.70", *run), "no job the address 10.99.0.70 on host1")
    lab.a.stop()
    refused(lab.a.run(VICTIM, "cr-run", "--address", ADDRESS, *run), "only root gives a job an address")
    refused(lab.a.run(0, "cr-run", "--address", "10.99.0", *run), "is not ADDRESS[/PREFIX][@INTERFACE]")
    refused(lab.a.run(0, "cr-run", "--plain", "--address", ADDRESS, *run), "--plain")
    refused(lab.a.run(0, "cr-run", "--address", ADDRESS + "@nowhere", *run), "no interface nowhere")
    refused(lab.a.run(0, "cr-run", "--address", "10.97.0.50", *run), "no interface of this machine is in the network")
    refused(lab.a.run(0, "cr-run", "--address", lab.a.address, *run), "is this machine's own, on host1")
    refused(lab.a.run(0, "cr-run", "--address", lab.c.address, *run), f"the address {lab.c.address} is in use")
    no_network = [*lab.a.enter(0), "setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin"]
    refused(context.run(0, [*no_network, context.tool("cr-run"), "--address", ADDRESS, *run]), "CAP_NET_ADMIN", "missing")
    place = context.lab.folder + "/first"
    first = lab.b.begin(0, "cr-run", "--job-dir", place, "--address", ADDRESS, "--", "/bin/sleep", "600")
    there = lambda: os.path.exists(place + "/job.json") or first.poll() is not None
    harness.wait_for(there, LIMIT, lambda: "no first job")
    refused(lab.a.run(0, "cr-run", "--address", ADDRESS, *run), f"the address {ADDRESS} is in use")
    first.terminate()
    first.wait(harness.patient(LIMIT))
    worked(lab.a.run(0, "cr-run", "--address", ADDRESS, *run))


@case
def addresses_6(context):
    """The same of IPv6."""
    lab = Lan(context)
    lab.use_ipv6()
    run = ("--", "/bin/true")
    lab.a.start(more=["--allow-address", "fd00:99::40/122@host1"])
    worked(lab.a.run(VICTIM, "cr-run", "--address", ADDRESS_6, *run))
    refused(lab.a.run(VICTIM, "cr-run", "--address", "fd00:99::80", *run), "no job the address fd00:99::80 on host1")
    refused(lab.a.run(VICTIM, "cr-run", "--address", ADDRESS, *run), f"no job the address {ADDRESS}")
    lab.a.stop()
    refused(lab.a.run(0, "cr-run", "--address", "fd00:98::50", *run), "no interface of this machine is in the network", "/64@")
    refused(lab.a.run(0, "cr-run", "--address", lab.a.address_6, *run), "is this machine's own, on host1")
    refused(lab.a.run(0, "cr-run", "--address", "fd00:99::", *run), "cannot be a machine's address in a network of 64 bits")
    refused(lab.a.run(0, "cr-run", "--address", "fe80::50@host1", *run), "fe80::50 cannot be a machine's address")
    refused(lab.a.run(0, "cr-run", "--address", lab.c.address_6, *run), f"the address {lab.c.address_6} is in use")
    # Routers are known by other addresses.
    tool(*lab.a.enter(0), "ip", "route", "add", "default", "via", "fe80::9", "dev", lab.a.link)
    routes = worked(lab.a.run(0, "cr-run", "--address", ADDRESS_6, "--", "ip", "-6", "route", "show", "default")).stdout
    if "via fe80::9 dev eth0" not in routes:
        raise Failure(f"the job has the routes {routes}")
    # A job answers for its address, too.
    place = context.lab.folder + "/first"
    first = lab.b.begin(0, "cr-run", "--job-dir", place, "--address", ADDRESS_6, "--", "/bin/sleep", "600")
    there = lambda: os.path.exists(place + "/job.json") or first.poll() is not None
    harness.wait_for(there, LIMIT, lambda: "no first job")
    refused(lab.a.run(0, "cr-run", "--address", ADDRESS_6, *run), f"the address {ADDRESS_6} is in use")
    first.terminate()
    first.wait(harness.patient(LIMIT))
    # Neighbours hear of it where it begins to run.
    entry, wrong = [*lab.c.enter(0), "ip", "neighbour"], "02:00:00:00:00:01"
    tool(*entry, "replace", ADDRESS_6, "lladdr", wrong, "dev", lab.c.link, "nud", "stale")
    worked(lab.a.run(0, "cr-run", "--address", ADDRESS_6, *run))
    known = subprocess.run([*entry, "show", ADDRESS_6], stdout=subprocess.PIPE, text=True).stdout
    if "lladdr 02:36:" not in known:
        raise Failure(f"C knows the address as {known}")


# A part of a job on several hosts: blocks go round by TCP. Says by UDP how many it has had.
RING = """
import os, random, socket, sys, threading, time
own, following, first, stop = sys.argv[1:]
family = socket.AF_INET6 if ":" in own else socket.AF_INET
count = 0

def tell():
    asked = socket.socket(family, socket.SOCK_DGRAM)
    asked.bind((own, 7002))
    while True:
        who = asked.recvfrom(100)[1]
        asked.sendto(str(count).encode(), who)

threading.Thread(target=tell, daemon=True).start()
server = socket.create_server((own, 7000), family=family)
while True:
    try: sends = socket.create_connection((following, 7000)); break
    except OSError: time.sleep(0.1)
takes = server.accept()[0]
numbers = random.Random(7)
while first == "1" and not os.path.exists(stop):
    block = numbers.randbytes(numbers.randrange(1, 100000))
    sends.sendall(block)
    got = b""
    while len(got) < len(block):
        part = takes.recv(len(block) - len(got))
        if not part: raise EOFError()
        got += part
    if got != block: raise ValueError("another block")
    count += 1
while first != "1" and (part := takes.recv(1 << 16)):
    sends.sendall(part)
    count += 1
sends.close()
if takes.recv(1): raise ValueError("more than was sent")
"""

ASK = """
import socket, sys
asked = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
asked.settimeout(1)
asked.sendto(b"?", (sys.argv[1], 7002))
print(asked.recvfrom(100)[0].decode())
"""


def count(lab, address):
    """How many blocks or connections the part with this address has had; -1: it does not answer."""
    done = lab.context.run(0, [*lab.a.enter(VICTIM), users.PYTHON, "-c", ASK, address])
    return int(done.stdout) if done.returncode == 0 else -1


class Part:
    """The job's part on one host: its exchange with the other part, and a GPU program that stands at steps of its own."""

    def __init__(self, ring, machine, number, pauses):
        self.ring, self.machine, self.number = ring, machine, number
        self.context, self.address = ring.lab.context, f"{ring.network}{50 + number}"
        shared = self.context.shared
        self.sync, self.out, self.errors = (f"{shared}/{name}-{number}" for name in ("sync", "out", "errors"))
        script = f"{shared}/part-{number}.sh"
        with open(script, "w") as f:
            other = f"{ring.network}{50 + 3 - number}"
            f.write(
                f"#!/bin/bash\nset -e\n/usr/bin/python3 {ring.program} {self.address} {other} {int(number == 1)} {ring.stop} &\n"
                f"ring=$!\n{' '.join(ring.command)}\nwait $ring\necho round\n"
            )
        words = ("--name", "ring", "--address", self.address, "--output", self.out, "--error", self.errors, "--", "/bin/bash", script)
        at = ",".join(map(str, pauses))
        self.child = machine.begin(VICTIM, "cr-run", *words, CR_TEST_SYNC_FILE=self.sync, CR_TEST_PAUSE_AT=at)
        self.errors_now = lambda: self.machine.read(self.errors)

    def stands(self, step):
        reached = lambda: os.path.exists(self.sync) and f"paused {step}" in open(self.sync).read().split("\n")
        over = lambda: reached() or (self.child and self.child.poll() is not None)
        harness.wait_for(over, LIMIT, lambda: f"part {self.number} does not reach step {step}: {self.errors_now()}")
        if self.child and self.child.poll() is not None:
            raise Failure(f"part {self.number} has ended: {self.child.stderr.read()} {self.errors_now()}")

    def go(self, step):
        open(f"{self.sync}.go.{step}", "w").close()

    def count(self):
        return count(self.ring.lab, self.address)

    def runs_on(self, machine, name="ring"):
        """It was restarted there, without a cr-run or cr-restart of the test's."""
        self.machine, self.name, self.child = machine, name, None
        if not machine.has_job(name):
            raise Failure(f"part {self.number} is not on {machine.name}")

    def ended(self):
        if self.child:
            return ended(self.child)
        gone = lambda: not self.machine.has_job(self.name)
        harness.wait_for(gone, LIMIT, lambda: f"part {self.number} does not end: {self.errors_now()}")

    def restart(self, machine, image):
        self.machine = machine
        self.child = machine.begin(VICTIM, "cr-restart", image)


class Ring:
    """A job on B and C. A is where the user asks."""

    def __init__(self, lab, *pauses, network="10.99.0.", command=None):
        self.lab, self.network, self.command = lab, network, command or lab.context.command(20)
        shared = lab.context.shared
        self.program, self.stop, self.image = shared + "/ring.py", shared + "/stop", shared + "/images"
        with open(self.program, "w") as f:
            f.write(RING)
        self.want = worked(lab.a.run(VICTIM, "cr-run", "--plain", "--", *self.command)).stdout + "round\n"
        self.parts = [Part(self, lab.b, 1, pauses), Part(self, lab.c, 2, pauses)]
        for part in self.parts:
            part.stands(pauses[0])
        self.goes_round("at first")

    def goes_round(self, what):
        before = [part.count() for part in self.parts]
        more = lambda: all(part.count() > then + 2 for part, then in zip(self.parts, before))
        said = lambda: "".join(machine.said() for machine in (self.lab.a, self.lab.b, self.lab.c))
        errors = lambda: [part.errors_now() for part in self.parts]
        harness.wait_for(more, LIMIT, lambda: f"{what}: {before} -> {[part.count() for part in self.parts]} {errors()} {said()}")

    def save(self, *words, hosts=None):
        return ("cr-checkpoint", "ring", self.image, "--hosts", hosts or f"{self.lab.b.address},{self.lab.c.address}", *words)

    def save_and_end(self, **options):
        """Saves all parts and ends them."""
        worked(self.lab.a.run(VICTIM, *self.save("--stop", **options)))
        for part in self.parts:
            if part.child:
                ended(part.child, 121)
            else:
                part.ended()

    def has_images(self):
        return [os.path.exists(f"{self.image}/member-{i}/manifest.pb") for i in (1, 2)]

    def finish(self, *steps):
        for part in self.parts:
            for step in steps:
                part.go(step)
        open(self.stop, "w").close()
        for part in self.parts:
            part.ended()
            if part.machine.read(part.out) != self.want:
                raise Failure(f"part {part.number} wrote\n{part.machine.read(part.out)}\nexpected\n{self.want}")


def start_all(lab):
    for machine in (lab.a, lab.b, lab.c):
        machine.start(more=ALLOWED)


def group_over(context, network):
    """A job on two hosts is saved as one, goes on, is saved and stopped, and restarted with its parts on each other's hosts."""
    lab = Lan(context)
    start_all(lab)
    if ":" in network:
        lab.use_ipv6()
    ring = Ring(lab, 3, 9, network=network)
    done = as_documented("cr-checkpoint --hosts", worked(lab.a.run(VICTIM, *ring.save("--json"))).stdout)
    if done["image"] != ring.image or not 0 < done["paused_seconds"] <= done["seconds"]:
        raise Failure(f"cr-checkpoint reports {done}")
    ring.goes_round("after the checkpoint")
    for part in ring.parts:
        part.go(3)
        part.stands(9)
    worked(lab.a.run(VICTIM, *ring.save("--stop")))
    for part in ring.parts:
        ended(part.child, 121)
    # Some time between them: the first sends to nobody at first.
    ring.parts[0].restart(lab.c, ring.image + "/member-1")
    harness.wait_for(lambda: lab.c.has_job("ring"), LIMIT, lambda: "no restart on C")
    ring.parts[1].restart(lab.b, ring.image + "/member-2")
    ring.goes_round("after the restart")
    ring.finish(9)
    for machine in (lab.a, lab.b, lab.c):
        machine.is_clean()


@case
def group(context):
    """A job on two hosts is saved as one and restarted with its parts on each other's hosts."""
    group_over(context, "10.99.0.")


@case
def group_6(context):
    """The same with addresses of IPv6."""
    group_over(context, "fd00:99::")


@case
def group_restarts(context):
    """One cr-restart brings back all parts of a job on two hosts: on each other's hosts, and on one. It takes only images of
    one checkpoint."""
    lab = Lan(context)
    start_all(lab)
    ring = Ring(lab, 3, 9)
    older, mixed = context.shared + "/older", context.shared + "/mixed"
    worked(lab.a.run(VICTIM, *ring.save()))
    os.rename(ring.image, older)
    ring.save_and_end()
    swapped = f"{lab.c.address},{lab.b.address}"

    def restart(image, hosts, *words):
        return lab.a.run(VICTIM, "cr-restart", image, "--hosts", hosts, *words)

    os.mkdir(mixed)
    tool("cp", "-a", ring.image + "/member-1", mixed)
    tool("cp", "-a", older + "/member-2", mixed)
    refused(restart(mixed, swapped), "are not of one checkpoint", "no part of it runs")
    refused(restart(ring.image, f"{lab.c.address},{lab.c.address}"), "different hosts")
    refused(restart(ring.image, f"{swapped},{lab.a.address}"), "member-3", "no part of it runs")
    refused(restart(ring.image, swapped, "--job-dir", "other"), "--job-dir")
    for machine in (lab.a, lab.b, lab.c):
        if machine.has_job("ring"):
            raise Failure(f"a part runs on {machine.name}")
        machine.is_clean()
    worked(restart(ring.image, swapped))
    for part, machine in zip(ring.parts, (lab.c, lab.b)):
        part.runs_on(machine)
    ring.goes_round("after the restart on each other's hosts")
    for part in ring.parts:
        part.go(3)
        part.stands(9)
    ring.save_and_end(hosts=swapped)
    worked(restart(ring.image, f"{lab.c.address},{lab.c.address}/ring-2"))
    for part, name in zip(ring.parts, ("ring", "ring-2")):
        part.runs_on(lab.c, name)
    ring.goes_round("after the restart on one host")
    ring.finish(9)
    for machine in (lab.a, lab.b, lab.c):
        machine.is_clean()


@case
def group_restart_fails(context):
    """Whatever dies in whichever step of a restart over hosts, no part runs, and the images can be restarted again."""
    lab = Lan(context)
    start_all(lab)
    ring = Ring(lab, 3)
    ring.save_and_end()
    steps = os.path.join(context.lab.folder, "steps")
    hosts = f"{lab.b.address},{lab.c.address}"
    said = lambda: lab.a.said() + lab.b.said() + lab.c.said()

    def at(number, what, act, decided=False, lost=()):
        """`decided`: whether all parts run; None: all do or none does. `lost`: the hosts whose parts have died with them."""
        for path in (steps, steps + ".go"):
            if os.path.exists(path):
                os.unlink(path)
        lab.a.restart(more=ALLOWED, CR_TEST_STEPS=steps, CR_TEST_STOP_AT=str(number))
        stands = lambda: os.path.exists(steps) and any(line.startswith(f"{number} ") for line in open(steps).read().splitlines())
        # A part that was ended again may have written by then that it has lost the other one.
        restarting = lab.a.begin(VICTIM, "cr-restart", ring.image, "--hosts", hosts, "--cut-back")
        over = lambda: stands() or restarting.poll() is not None
        harness.wait_for(over, LIMIT, lambda: f"{what} at {number}: not reached {said()}")
        if restarting.poll() is not None:
            raise Failure(f"{what} at {number}: cr-restart has ended: {restarting.stderr.read()} {said()}")
        act(restarting)
        open(steps + ".go", "w").close()
        code = restarting.wait(harness.patient(LIMIT))
        if decided is None:
            decided = code == 0
        elif code == 0 and not lost:  # all ran when B died
            raise Failure(f"{what} at {number}: cr-restart ended with 0: {restarting.stderr.read()}")
        # A host that has died leaves the job's folder.
        lives = lambda machine: machine.has_job("ring") and os.path.exists(f"/proc/{machine.facts('ring')['init_pid']}")
        running = lambda: [lives(machine) for machine in (lab.b, lab.c)]
        # Whoever has lost the connection asks. Until then a part may just begin to run.
        settled = lambda: not lab.b.left() and not lab.c.left() and running() == [decided and machine not in lost for machine in (lab.b, lab.c)]
        harness.wait_for(settled, 2 * LIMIT, lambda: f"{what} at {number}: {running()} {said()}")
        if lost:
            # The connection to the part that is gone does not end by itself; what needs no other part goes on.
            lab.a.restart(more=ALLOWED)
            init = lab.c.facts("ring")["init_pid"]
            states = [harness.state_of(pid) for pid in [init, *harness.descendants(init)]]
            if len(states) < 2 or set(states) - set("SR"):
                raise Failure(f"{what} at {number}: the processes of the part on C are in the states {states}")
            os.kill(init, signal.SIGKILL)
            harness.wait_for(lambda: not lives(lab.c), LIMIT, lambda: "the part on C does not end")
        elif decided:
            lab.a.restart(more=ALLOWED)
            ring.goes_round(f"{what} at {number}")
            for part, machine in zip(ring.parts, (lab.b, lab.c)):
                part.runs_on(machine)
            ring.save_and_end()
        elif any(part.count() >= 0 for part in ring.parts):
            raise Failure(f"{what} at {number}: a part runs")
        for machine in (lab.a, lab.b, lab.c):
            machine.is_clean()

    def kill_asker(restarting):
        for pid in harness.descendants(lab.a.daemon.pid):
            os.kill(pid, signal.SIGKILL)

    def kill_b(restarting):
        lab.b.stop()
        lab.b.start(more=ALLOWED)

    def kill_host(restarting):
        """B's cr-hostd, its workers and all of its jobs."""
        init = lab.b.facts("ring")["init_pid"] if lab.b.has_job("ring") else 0
        for pid in [*harness.descendants(lab.b.daemon.pid), lab.b.daemon.pid, init]:
            try:
                if pid:
                    os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # with another one
        # Else the kernel keeps the job's network, and answers for it, as long as it sends what connections still have.
        # One may go by itself meanwhile.
        ports = f"ip -o link show master br0 | cut -d: -f2 | cut -d@ -f1 | grep -v {lab.b.link} | xargs -r -n1 ip link del || true"
        tool(*lab.b.enter(0), "/bin/sh", "-c", ports)
        lab.b.daemon.wait()
        lab.b.start(more=ALLOWED)

    for number in range(1, 5):
        at(number, "B's cr-hostd is killed", kill_b)
        at(number, "the asking worker is killed", kill_asker)
        at(number, "B dies", kill_host)
    at(2, "the user gives up", lambda restarting: restarting.send_signal(signal.SIGTERM))
    at(5, "the asking worker is killed", kill_asker, decided=True)
    at(5, "B dies", kill_host, decided=True, lost=[lab.b])
    worked(lab.a.run(VICTIM, "cr-restart", ring.image, "--hosts", hosts, "--cut-back"))
    for part, machine in zip(ring.parts, (lab.b, lab.c)):
        part.runs_on(machine)
    ring.goes_round("after all")
    ring.finish(3)


@case
def group_fails(context):
    """Whatever dies in whichever step of a checkpoint over hosts, there is no image and the others go on."""
    lab = Lan(context)
    start_all(lab)
    ring = Ring(lab, 3)
    refused(lab.a.run(VICTIM, *ring.save()[:4], f"{lab.b.address},{lab.b.address}"), "different hosts")
    refused(lab.a.run(VICTIM, *ring.save()[:4], f"{lab.b.address},{lab.a.address}"), lab.a.address, "continues")
    refused(lab.a.run(users.ATTACKER, *ring.save()), "ring")
    steps = os.path.join(context.lab.folder, "steps")

    def at(number, what, act, decided=False, left=(lab.b, lab.c)):
        """`decided`: whether the images count; None: all do or none does. `left`: the hosts that are still there."""
        for path in (steps, steps + ".go"):
            if os.path.exists(path):
                os.unlink(path)
        lab.a.restart(more=ALLOWED, CR_TEST_STEPS=steps, CR_TEST_STOP_AT=str(number))
        saving = lab.a.begin(VICTIM, *ring.save())
        stands = lambda: os.path.exists(steps) and any(line.startswith(f"{number} ") for line in open(steps).read().splitlines())
        said = lambda: lab.a.said() + lab.b.said() + lab.c.said()
        harness.wait_for(lambda: stands() or saving.poll() is not None, LIMIT, lambda: f"{what} at {number}: not reached {said()}")
        if saving.poll() is not None:
            raise Failure(f"{what} at {number}: cr-checkpoint has ended: {saving.stderr.read()}")
        act(saving)
        open(steps + ".go", "w").close()
        code = saving.wait(harness.patient(LIMIT))
        if decided is None:
            decided = code == 0
        elif code == 0:
            raise Failure(f"{what} at {number}: cr-checkpoint ended with 0: {saving.stderr.read()}")
        # Whoever has lost the connection asks.
        if decided:
            harness.wait_for(lambda: all(ring.has_images()), LIMIT, lambda: f"{what} at {number}: images {ring.has_images()} {said()}")
        if lab.b in left:
            ring.goes_round(f"{what} at {number}")
        for machine in left:
            machine.is_clean(2 * LIMIT)  # it asks a first host that does not answer for a minute (kSettleTime)
        if any(ring.has_images()) != decided:
            raise Failure(f"{what} at {number}: there are images {ring.has_images()}")
        shutil.rmtree(ring.image, ignore_errors=True)

    def kill_asker(saving):
        for pid in harness.descendants(lab.a.daemon.pid):
            os.kill(pid, signal.SIGKILL)

    def kill_b(saving):
        lab.b.stop()
        lab.b.start(more=ALLOWED)

    for number in range(1, 6):
        at(number, "B's cr-hostd is killed", kill_b)
        at(number, "the asking worker is killed", kill_asker)
    at(6, "B's cr-hostd is killed", kill_b, decided=None)
    at(6, "the asking worker is killed", kill_asker)
    at(7, "the asking worker is killed", kill_asker, decided=True)
    at(5, "the user gives up", lambda saving: saving.send_signal(signal.SIGTERM))

    # Now all of B: C's GPU program goes on. Its connection with B may end.
    def kill_host(saving):
        facts = lab.b.facts("ring")
        for pid in [*harness.descendants(lab.b.daemon.pid), lab.b.daemon.pid, facts["init_pid"]]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # with another one

    # C has a complete image, and asks B whether it counts.
    at(5, "B dies", kill_host, left=[lab.c])
    part = ring.parts[1]
    if part.child.poll() is not None:
        raise Failure(f"the part on C has ended: {part.child.stderr.read()} {part.errors_now()}")
    open(part.sync + ".go.3", "w").close()
    gpu = ring.want.replace("round\n", "")
    harness.wait_for(lambda: gpu in lab.c.read(part.out), LIMIT, lambda: f"C's part wrote {lab.c.read(part.out)}")


def power_off(machine, name):
    """As if the host had no power any more: others hear nothing of it, not even that connections end."""
    tool(*machine.enter(0), "ip", "link", "set", machine.link, "down")
    end_job(machine, name)
    kill_all([*harness.descendants(machine.daemon.pid), machine.daemon.pid])
    machine.daemon.wait()


def end_job(machine, name):
    """Ends a job and its address at once. Else the kernel keeps both as long as it sends what connections still have."""
    init = machine.facts(name)["init_pid"]
    tool("nsenter", "--target", str(init), "--net", "ip", "link", "del", "eth0")
    kill_all([init])
    harness.wait_for(lambda: harness.state_of(init) in ("", "Z"), LIMIT, lambda: "the job does not end")


def host_dies(context, index, numbers):
    """The host of part `index` loses its power before each of these steps of a checkpoint: there is no image, the other
    part's GPU program comes to its end, and an earlier image brings both parts back."""
    lab = Lan(context)
    soon = {"CR_TEST_SETTLE_SECONDS": "5"}
    for machine in (lab.a, lab.b, lab.c):
        machine.start(more=ALLOWED, **soon)
    ring = Ring(lab, 3)
    base, hosts = f"{context.shared}/base", f"{lab.b.address},{lab.c.address}"
    worked(lab.a.run(VICTIM, "cr-checkpoint", "ring", base, "--hosts", hosts))
    part, other = ring.parts[index], ring.parts[1 - index]
    gpu = ring.want.replace("round\n", "")
    said = lambda: lab.a.said() + lab.b.said() + lab.c.said()
    for number in numbers:
        what = f"{part.machine.name} dies at {number}"
        steps = f"{context.lab.folder}/steps-{number}"
        lab.a.restart(more=ALLOWED, CR_TEST_STEPS=steps, CR_TEST_STOP_AT=str(number), **soon)
        saving = lab.a.begin(VICTIM, *ring.save())
        stands = lambda: os.path.exists(steps) and any(line.startswith(f"{number} ") for line in open(steps).read().splitlines())
        harness.wait_for(lambda: stands() or saving.poll() is not None, LIMIT, lambda: f"{what}: not reached {said()}")
        if saving.poll() is not None:
            raise Failure(f"{what}: cr-checkpoint has ended: {saving.stderr.read()}")
        power_off(part.machine, "ring")
        open(steps + ".go", "w").close()
        if saving.wait(2 * LIMIT) == 0:
            raise Failure(f"{what}: cr-checkpoint ended with 0")
        other.machine.is_clean(2 * LIMIT)
        if any(ring.has_images()):
            raise Failure(f"{what}: there are images {ring.has_images()}")
        other.go(3)
        done = lambda: other.machine.read(other.out) == gpu
        harness.wait_for(done, LIMIT, lambda: f"{what}: the other part wrote {other.machine.read(other.out)} {said()}")
        end_job(other.machine, "ring")
        tool(*part.machine.enter(0), "ip", "link", "set", part.machine.link, "up")
        part.machine.start(more=ALLOWED, **soon)
        os.unlink(f"{other.sync}.go.3")
        worked(lab.a.run(VICTIM, "cr-restart", base, "--hosts", hosts, "--cut-back"))
        for one, machine in zip(ring.parts, (lab.b, lab.c)):
            one.runs_on(machine)
        ring.goes_round(f"after {what}")
    ring.finish(3)
    for machine in (lab.a, lab.b, lab.c):
        machine.is_clean()


@case
def group_decider_dies(context):
    """The host that knows what was decided loses its power, last just before the decision."""
    host_dies(context, 0, (1, 3, 5, 6))


@case
def group_host_dies(context):
    """Another host loses its power before the decision."""
    host_dies(context, 1, (1, 2, 4, 5))


# A part of a job on two hosts, which opens and closes connections with the other one all the time. Each byte and each end must
# arrive, in order and once. Says by UDP how many connections have come to their end.
STREAMS = """
import os, random, socket, struct, sys, threading, time, traceback
own, other, stop = sys.argv[1:]
family = socket.AF_INET6 if ":" in own else socket.AF_INET
CALLERS, PORT, HEAD, HELLO = 8, 7100, struct.Struct("<IQI"), 4
opened, served, lock = [0] * 4, [0] * 4, threading.Lock()

def tell():
    asked = socket.socket(family, socket.SOCK_DGRAM)
    asked.bind((own, 7002))
    while True:
        who = asked.recvfrom(100)[1]
        asked.sendto(str(min(sum(opened), sum(served))).encode(), who)

def watched(work, *arguments):
    try: work(*arguments)
    except BaseException:
        print(work.__name__, arguments, traceback.format_exc(), file=sys.stderr, flush=True)
        os._exit(1)

def begin(work, *arguments):
    thread = threading.Thread(target=watched, args=[work, *arguments], daemon=True)
    thread.start()
    return thread

def send(connection, seed, size):
    # In parts, some of them late.
    data, numbers = random.Random(seed).randbytes(size), random.Random()
    while data:
        part = numbers.randrange(1, 20000)
        connection.sendall(data[:part])
        data = data[part:]
        if numbers.random() < 0.2: time.sleep(numbers.random() * 0.02)

def take(connection, seed, size, end):
    wanted, got = random.Random(seed).randbytes(size), b""
    while len(got) < size + end:
        part = connection.recv(size + end - len(got))
        if not part: break
        got += part
    if got != wanted: raise ValueError(f"{len(got)} bytes of {size}, {'the same' if wanted.startswith(got) else 'others'}")

# What both ends do: one ends its direction while the other goes on, both at once, or one is gone with its last word.
def call(connection, way, seed, size):
    if way == 0:
        send(connection, seed, size)
        connection.shutdown(socket.SHUT_WR)
        take(connection, seed + 1, size, end=True)
    elif way == 1:
        take(connection, seed, size, end=True)
        send(connection, seed + 1, size)
    elif way == 2:
        send(connection, seed, size)
    else:
        send(connection, seed, size)
        take(connection, seed + 1, size, end=False)
    connection.close()

def answer(connection, way, seed, size):
    if way == 0:
        take(connection, seed, size, end=True)
        time.sleep(random.random() * 0.05)
        send(connection, seed + 1, size)
    elif way == 1:
        send(connection, seed, size)
        connection.shutdown(socket.SHUT_WR)
        take(connection, seed + 1, size, end=True)
    elif way == 2:
        take(connection, seed, size, end=True)
    else:
        take(connection, seed, size, end=False)
        send(connection, seed + 1, size)
        take(connection, 0, 0, end=True)
    connection.close()

def serve():
    while True: begin(answer_one, listener.accept()[0])

def answer_one(connection):
    head = connection.recv(HEAD.size, socket.MSG_WAITALL)
    way, seed, size = HEAD.unpack(head)
    if way == HELLO: return
    answer(connection, way, seed, size)
    with lock: served[way] += 1

def calls(number):
    numbers = random.Random(f"{own} {number}")
    while not os.path.exists(stop):
        way, seed, size = numbers.randrange(4), numbers.randrange(1 << 60), numbers.randrange(1, 30000)
        connection = socket.create_connection((other, PORT))
        connection.sendall(HEAD.pack(way, seed, size))
        call(connection, way, seed, size)
        with lock: opened[way] += 1

listener = socket.create_server((own, PORT), backlog=64, family=family)
begin(tell)
begin(serve)
while True:
    try: first = socket.create_connection((other, PORT)); break
    except OSError: time.sleep(0.05)
first.sendall(HEAD.pack(HELLO, 0, 0))
first.close()
callers = [begin(calls, number) for number in range(CALLERS)]
for caller in callers: caller.join()
if listener.getsockopt(socket.SOL_SOCKET, 26): raise ValueError("a filter is left")  # SO_GET_FILTER
print("opened", *opened, flush=True)
while not os.path.exists(stop + ".all"): time.sleep(0.05)
print("served", *served, flush=True)
"""


class Streams:
    """A job on two hosts that does so."""

    def __init__(self, lab, machines, network):
        self.lab, self.machines, self.network = lab, machines, network
        shared = lab.context.shared
        self.stop, self.image, program = shared + "/stop", shared + "/images", shared + "/streams.py"
        with open(program, "w") as f:
            f.write(STREAMS)
        self.children, self.outputs = [], []
        for number, machine in enumerate(machines):
            out = f"{shared}/out-{number}"
            words = ("--name", "streams", "--address", self.address(number), "--output", out, "--error", out + ".errors")
            command = ("--", "/usr/bin/python3", program, self.address(number), self.address(1 - number), self.stop)
            self.children.append(machine.begin(VICTIM, "cr-run", *words, *command))
            self.outputs.append(out)
        self.go_on("at first")

    def address(self, number):
        return f"{self.network}{51 + number}"

    def hosts(self):
        return ",".join(f"{machine.address}/{name}" for machine, name in zip(self.machines, self.names()))

    def names(self):
        return ["streams", "streams" if self.machines[0] is not self.machines[1] else "streams-2"]

    def said(self):
        said = [machine.read(out + ".errors") for machine, out in zip(self.machines, self.outputs)]
        return f"{said} " + "".join(machine.said() for machine in (self.lab.a, self.lab.b, self.lab.c))

    def counts(self):
        return [count(self.lab, self.address(number)) for number in (0, 1)]

    def go_on(self, what):
        """Connections come to their end on both sides, now."""
        before = self.counts()
        more = lambda: all(now > max(then, 0) + 50 for now, then in zip(self.counts(), before))
        fails = lambda: any(machine.read(out + ".errors") for machine, out in zip(self.machines, self.outputs))
        harness.wait_for(lambda: more() or fails(), LIMIT, lambda: f"{what}: {before} -> {self.counts()} {self.said()}")
        if fails():
            raise Failure(f"{what}: {self.said()}")

    def save(self, *words):
        worked(self.lab.a.run(VICTIM, "cr-checkpoint", "streams", self.image, "--hosts", self.hosts(), *words))

    def move(self, *machines):
        """Saves and ends it, and restarts it on these."""
        self.save("--stop")
        for machine, name in zip(self.machines, self.names()):
            harness.wait_for(lambda: not machine.has_job(name), LIMIT, lambda: f"{name} stays: {self.said()}")
        self.machines = machines
        worked(self.lab.a.run(VICTIM, "cr-restart", self.image, "--hosts", self.hosts()))

    def finish(self):
        """What one has opened, the other one has served."""
        open(self.stop, "w").close()
        read = lambda number: self.machines[number].read(self.outputs[number])
        opened = lambda: [read(number).startswith("opened") for number in (0, 1)]
        harness.wait_for(lambda: all(opened()), LIMIT, lambda: f"connections have no end: {opened()} {self.said()}")
        words = lambda: [read(number).split("\n") for number in (0, 1)]
        open(self.stop + ".all", "w").close()
        harness.wait_for(lambda: all(len(lines) == 3 for lines in words()), LIMIT, lambda: f"no end: {self.said()}")
        (one, one_served, _), (other, other_served, _) = words()
        if one.split()[1:] != other_served.split()[1:] or other.split()[1:] != one_served.split()[1:]:
            raise Failure(f"{one} {one_served}, {other} {other_served} {self.said()}")


def streams_over(context, network):
    """Connections between hosts that are opened, half closed and closed all the time lose nothing: not when the job is saved
    while it runs, and not when it is restarted on the same hosts, on others, and on one."""
    lab = Lan(context)
    start_all(lab)
    if ":" in network:
        lab.use_ipv6()
    job = Streams(lab, (lab.b, lab.c), network)
    for number in range(5):
        job.save()
        job.go_on(f"after checkpoint {number}")
    for number in range(2):
        for machines in ((lab.b, lab.c), (lab.c, lab.b), (lab.c, lab.c)):
            job.move(*machines)
            job.go_on(f"after restart {number} on {machines[0].name} and {machines[1].name}")
    job.finish()
    for machine in (lab.a, lab.b, lab.c):
        machine.is_clean()


@case
def streams(context):
    """Connections that are opened and closed all the time lose nothing."""
    streams_over(context, "10.99.0.")


@case
def streams_6(context):
    """The same with addresses of IPv6."""
    streams_over(context, "fd00:99::")


@case
def group_sets(context):
    """The newest sets of images that are complete on all hosts stay, also when a part fails between its save and the
    commit, and others' sets. A restart takes the newest complete one, or the one that is named."""
    lab = Lan(context)
    start_all(lab)
    ring = Ring(lab, 3, 9)
    ring.image = lab.home + "/sets"  # each host has its own
    hosts = f"{lab.b.address},{lab.c.address}"
    steps = os.path.join(context.lab.folder, "steps")

    def sets(machine, part):
        """The numbers of the sets of which the host has its image."""
        folder = machine.path(ring.image)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        return [int(name[6:]) for name in names if os.path.exists(f"{folder}/{name}/member-{part}/manifest.pb")]

    def has(on_b, on_c, what):
        if (sets(lab.b, 1), sets(lab.c, 2)) != (on_b, on_c):
            raise Failure(f"{what}: B has {sets(lab.b, 1)}, C has {sets(lab.c, 2)}, not {on_b} and {on_c}")

    def has_no_other_names(what):
        """The data files have no names but those in the sets."""
        for machine in (lab.b, lab.c):
            facts = lambda: [os.stat(path) for path in glob.glob(machine.path(ring.image) + "/image-*/member-[12]/memory/data-*")]
            names = lambda files: collections.Counter(one.st_ino for one in files)
            fits = lambda files: files and all(one.st_nlink == names(files)[one.st_ino] for one in files)
            harness.wait_for(lambda: fits(facts()), LIMIT, lambda: f"{what}: files on {machine.name} have other names, too")

    def stopped_at(step, act):
        """A checkpoint that stands at a step of the coordinator's while `act` is done: exit code and what it says."""
        for path in (steps, steps + ".go"):
            if os.path.exists(path):
                os.unlink(path)
        lab.a.restart(more=ALLOWED, CR_TEST_STEPS=steps, CR_TEST_STOP_AT=step)
        saving = lab.a.begin(VICTIM, *ring.save("--keep", "2"))
        stands = lambda: os.path.exists(steps) and open(steps).read().endswith(f" {step}\n")
        over = lambda: stands() or saving.poll() is not None
        harness.wait_for(over, LIMIT, lambda: f"step {step} is not reached: {lab.a.said()} {lab.b.said()}")
        if saving.poll() is not None:
            raise Failure(f"cr-checkpoint has ended before step {step}: {saving.stderr.read()}")
        act()
        open(steps + ".go", "w").close()
        _, said = saving.communicate(timeout=harness.patient(LIMIT))
        lab.a.restart(more=ALLOWED)
        return saving.returncode, said

    def kill_part():
        """B's worker that saves the part."""
        workers = [pid for pid in harness.descendants(lab.b.daemon.pid) if harness.children_of(pid, "cr-checkpoint")]
        if len(workers) != 1:
            raise Failure(f"B has the workers {workers}")
        tools = harness.children_of(workers[0], "cr-checkpoint")
        os.kill(workers[0], signal.SIGKILL)
        # Its tool gives up.
        gone = lambda: all(harness.state_of(pid) in ("", "Z") for pid in tools)
        harness.wait_for(gone, LIMIT, lambda: f"cr-checkpoint goes on without its worker: {lab.b.said()}")

    for _ in range(3):
        worked(lab.a.run(VICTIM, *ring.save("--keep", "2")))
    has([2, 3], [2, 3], "after three checkpoints")
    worked(lab.a.run(VICTIM, "cr-checkpoint", "other", ring.image, "--keep", "1", "--hosts", f"{lab.b.address}/ring,{lab.c.address}/ring"))
    has([2, 3, 4], [2, 3, 4], "after one of another job")
    code, said = stopped_at("all hosts are dumped", kill_part)
    if code == 0 or "continues" not in said:
        raise Failure(f"cr-checkpoint ended with {code}: {said}")
    has([2, 3, 4], [2, 3, 4], "after one that has failed between save and commit")
    has_no_other_names("after that")
    ring.goes_round("after that")
    code, said = stopped_at("decide", kill_part)
    if code != 0 or "is not known" not in said:
        raise Failure(f"cr-checkpoint ended with {code}: {said}")
    has([2, 3, 4], [2, 3, 4, 5], "after one whose part on B was lost after the others had theirs")
    ring.goes_round("after the checkpoints")

    def end():
        worked(lab.a.run(VICTIM, "cr-checkpoint", "ring", lab.home + "/other", "--hosts", hosts, "--stop"))
        for part in ring.parts:
            ended(part.child, 121) if part.child else part.ended()

    def restart(image, wanted):
        end()
        said = worked(lab.a.run(VICTIM, "cr-restart", image, "--hosts", hosts)).stderr
        if f"{ring.image}/image-{wanted:06}/member-N" not in said:
            raise Failure(f"cr-restart says {said}")
        for part in ring.parts:
            part.runs_on(part.machine)
        ring.goes_round(f"restarted from {image}")

    restart(ring.image, 4)
    restart(ring.image + "/image-000002", 2)
    refused(lab.a.run(VICTIM, "cr-checkpoint", "ring", lab.home + "/other", "--hosts", hosts, "--keep", "2"), "leave out --keep")

    def repeated(until):
        """Checkpoints at intervals, until set `until` is complete: the one that makes them."""
        saving = lab.a.begin(VICTIM, *ring.save("--every", "1s", "--keep", "2"))
        fewest = []

        def reached():
            both = sorted(set(sets(lab.b, 1)) & set(sets(lab.c, 2)))
            fewest.append(len([number for number in both if number != 4]))
            return both[-1] >= until or saving.poll() is not None

        harness.wait_for(reached, LIMIT, lambda: f"sets {sets(lab.b, 1)} {sets(lab.c, 2)}: {lab.a.said()}")
        if saving.poll() is not None:
            raise Failure(f"cr-checkpoint has ended: {saving.stderr.read()}")
        if min(fewest) < 2:
            raise Failure(f"there were only {min(fewest)} complete sets")
        return saving

    saving = repeated(8)
    saving.send_signal(signal.SIGTERM)
    if saving.wait(harness.patient(LIMIT)) != 3:
        raise Failure(f"cr-checkpoint ended with {saving.returncode}: {saving.stderr.read()}")
    last = max(sets(lab.b, 1))
    worked(lab.a.run(VICTIM, *ring.save("--keep", "2")))
    now = [4, *(number for number in (last, last + 1))]
    has(now, now, "after checkpoints at intervals")
    # Without --keep, each one replaces the one before.
    manifest = lab.c.path(lab.home + "/other/member-2/manifest.pb")
    before = os.stat(manifest).st_ino
    saving = lab.a.begin(VICTIM, "cr-checkpoint", "ring", lab.home + "/other", "--hosts", hosts, "--every", "1s")
    harness.wait_for(lambda: os.stat(manifest).st_ino != before, LIMIT, lambda: f"the image is the old one: {lab.a.said()}")
    saving.send_signal(signal.SIGTERM)
    if saving.wait(harness.patient(LIMIT)) != 3:
        raise Failure(f"cr-checkpoint ended with {saving.returncode}: {saving.stderr.read()}")
    saving = repeated(last + 2)
    ring.finish(3, 9)
    if saving.wait(harness.patient(LIMIT)) != 0:
        raise Failure(f"cr-checkpoint ended with {saving.returncode}: {saving.stderr.read()}")
    lab.b.restart(more=ALLOWED)  # removes what the killed workers have left
    for machine in (lab.a, lab.b, lab.c):
        machine.is_clean()


@case
def group_sets_share(context):
    """Each host's part of a set shares the memory that did not change with the same part of the complete sets of the job,
    and with nothing else. What no set needs takes no space. Each set restarts by itself, unless somebody has changed
    memory of it."""
    lab = Lan(context)
    start_all(lab)
    program = shutil.copy(harness.find(context.apps, "stencil"), context.product)
    ring = Ring(lab, 3, 4, 5, command=[program, "--size", "1024", "--steps", "8"])
    ring.image = lab.home + "/sets"  # each host has its own
    hosts = f"{lab.b.address},{lab.c.address}"
    members = ((lab.b, 1), (lab.c, 2))

    def image(number, machine, part):
        return machine.path(f"{ring.image}/image-{number:06}/member-{part}")

    def has(*numbers, on_b=None, on_c=None):
        wanted = [[f"image-{number:06}" for number in own or numbers] for own in (on_b, on_c)]
        found = [sorted(os.listdir(machine.path(ring.image))) for machine, _ in members]
        if found != wanted:
            raise Failure(f"the sets are {found}, not {wanted}")

    def written(number, machine, part):
        """Which part of an image's data it shares with no other: 1 if it is whole."""
        facts = [os.stat(path) for path in hostd.data_files(image(number, machine, part))]
        return sum(one.st_size for one in facts if one.st_nlink == 1) / sum(one.st_size for one in facts)

    def is_whole(number, *where):
        for machine, part in where or members:
            if written(number, machine, part) != 1:
                raise Failure(f"set {number} shares memory on {machine.name}: {written(number, machine, part)}")

    def save(name="ring", keep=2):
        words = ("cr-checkpoint", name, ring.image, "--keep", str(keep), "--hosts", f"{lab.b.address}/ring,{lab.c.address}/ring")
        saved = worked(lab.a.run(VICTIM, *words, "--json"))
        if saved.stderr:
            raise Failure(f"cr-checkpoint says {saved.stderr}")

    def go(step):
        for part in ring.parts:
            part.go(step)
            part.stands(step + 1)

    save()
    is_whole(1)
    save()
    has(1, 2)
    for machine, part in members:
        if written(2, machine, part) > 0.01:
            raise Failure(f"the same memory is written again on {machine.name}: {written(2, machine, part)}")
    first = {machine: {os.stat(path).st_ino for path in hostd.data_files(image(1, machine, part))} for machine, part in members}
    # A step changes one of two fields.
    go(3)
    save()
    has(2, 3)
    save()
    has(3, 4)
    for machine, part in members:
        files = [os.stat(path) for path in hostd.data_files(image(4, machine, part))]
        old = [one for one in files if one.st_ino in first[machine]]
        new = [one for one in files if one.st_ino not in first[machine]]
        # Its name is in both sets that are left.
        if not old or not new or any(one.st_nlink != 2 for one in old):
            raise Failure(f"set 4 on {machine.name} has {len(old)} files of set 1, and {len(new)} newer ones")
        if sum(one.st_blocks * 512 for one in old) > 0.7 * sum(one.st_size for one in old):
            raise Failure(f"memory that no set needs still takes space on {machine.name}")
        for number in (3, 4):
            worked(machine.run(VICTIM, "cr-inspect", "--verify", f"{ring.image}/image-{number:06}/member-{part}"))
    # Images that a user has changed are nothing to share with.
    for number in (3, 4):
        for path in hostd.data_files(image(number, lab.c, 2)):
            os.unlink(path)
    save(keep=3)
    has(3, 4, 5)
    is_whole(5, (lab.c, 2))
    if written(5, lab.b, 1) > 0.01:
        raise Failure("B shares nothing because C has nothing to share")
    # No set is complete any more.
    shutil.rmtree(lab.c.path(ring.image))
    save()
    has(on_b=[3, 4, 5, 6], on_c=[6])
    is_whole(6)
    save()
    has(6, 7)
    if max(written(7, *where) for where in members) > 0.01:
        raise Failure("a set shares nothing with the only one that is complete")
    save("other", 1)
    has(6, 7, 8)
    is_whole(8)
    go(4)
    save("other", 2)
    for machine, part in members:
        if not 0.01 < written(9, machine, part) < 0.9:
            raise Failure(f"the other job's next set has written {written(9, machine, part)} on {machine.name}")
    # A copy by hard links, which the user has elsewhere, keeps all that it has.
    linked = lab.home + "/linked"
    worked(context.run(0, [*lab.b.enter(VICTIM), "/bin/cp", "-al", f"{ring.image}/image-000008/member-1", linked]))
    save("other", 1)
    has(6, 7, 10)
    worked(lab.b.run(VICTIM, "cr-inspect", "--verify", linked))
    worked(lab.a.run(VICTIM, "cr-checkpoint", "ring", lab.home + "/single", "--hosts", hosts, "--stop"))
    for part in ring.parts:
        ended(part.child, 121)
    set_7, set_10 = (f"{ring.image}/image-{number:06}" for number in (7, 10))

    def change():
        """Memory of set 6, and once more: as it was."""
        for path in hostd.data_files(image(6, lab.c, 2)):
            with open(path, "r+b") as f:
                turned = bytes(255 - byte for byte in f.read())
                f.seek(0)
                f.write(turned)

    def restart(path):
        return lab.a.run(VICTIM, "cr-restart", path, "--hosts", hosts, "--cut-back")

    change()
    refused(restart(set_7), "is not as cr-hostd has signed it", "no part of it runs")
    change()
    # A set that is removed takes nothing away from others.
    for machine, _ in members:
        shutil.rmtree(machine.path(f"{ring.image}/image-000006"))
    for path in (set_7, set_10):
        worked(restart(path))
        for part in ring.parts:
            part.runs_on(part.machine)
        ring.goes_round(f"restarted from {path}")
        ring.finish(4, 5)
        os.unlink(ring.stop)
    for machine in (lab.a, lab.b, lab.c):
        machine.is_clean()


# In the place of ssh: AGENT HOST COMMAND. What it asks runs as the user on that host, with the agent's streams.
AGENT = """#!/usr/bin/python3
import socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect({path!r})
socket.send_fds(asked, ["\\0".join(sys.argv[1:]).encode()], [0, 1, 2])
code = asked.recv(16)
sys.exit(int(code) if code else 255)
"""


# What a shell of the user's has, who has a number and no name.
VARIABLES = lambda lab: {"HOME": lab.home, "SHELL": "/bin/sh"}


class Login:
    """What serves the agent."""

    def __init__(self, lab):
        self.lab = lab
        shared = lab.context.shared
        self.agent, path = shared + "/agent", shared + "/login.sock"
        with open(self.agent, "w") as f:
            f.write(AGENT.format(path=path))
        os.chmod(self.agent, 0o755)
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.bind(path)
        os.chmod(path, 0o777)
        self.server.listen(16)
        self.names = {machine.name: machine for machine in (lab.a, lab.b, lab.c)}
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            threading.Thread(target=self.run, args=[self.server.accept()[0]], daemon=True).start()

    def run(self, asked):
        words, fds, _, _ = socket.recv_fds(asked, 1 << 17, 3)
        name, command = words.decode().split("\0", 1)
        machine = self.names.get(name)
        code = 255
        if machine:
            child = subprocess.Popen([*machine.enter(VICTIM), "/bin/sh", "-c", command], stdin=fds[0], stdout=fds[1], stderr=fds[2],
                                     env=self.lab.context.environment(VARIABLES(self.lab)), cwd="/", start_new_session=True)  # fmt: skip
            self.lab.context.lab.processes.append(users.Started(child))
        for fd in fds:
            os.close(fd)
        if machine:
            code = child.wait()
        asked.send(str(code).encode())


class Spread:
    """A job of several parts, each on a host, whose rank 0 stands at steps."""

    STEPS = 24

    def __init__(self, lab, name, machines, *pauses):
        self.lab, self.context, self.machines, self.name = lab, lab.context, machines, name
        shared = lab.context.shared
        self.sync, self.out, self.errors = shared + "/sync", shared + "/out", shared + "/errors"
        self.variables = {"CR_TEST_SYNC_FILE": self.sync, "CR_TEST_PAUSE_AT": ",".join(map(str, pauses)), **VARIABLES(lab)}
        self.names = [name] * len(machines)
        self.children = self.begin()
        self.stands(pauses[0])

    def said(self):
        """For messages: what all have said so far."""
        errors = self.machines[0].read(self.errors)
        ended = [child.stderr.read() for child in self.children if child.poll() is not None]
        return f"{errors} {ended} " + "".join(machine.said() for machine in (self.lab.a, self.lab.b, self.lab.c))

    def stands(self, step):
        reached = lambda: os.path.exists(self.sync) and f"paused {step}" in open(self.sync).read().split("\n")
        over = lambda: reached() or any(child.poll() is not None for child in self.children)
        harness.wait_for(over, LIMIT, lambda: f"step {step} is not reached: {self.said()}")
        if not reached():
            raise Failure(f"a part has ended before step {step}: {self.said()}")

    def go(self, step, then=None):
        open(f"{self.sync}.go.{step}", "w").close()
        if then is not None:
            self.stands(then)

    def save(self, image, members, *words):
        hosts = ",".join(members)
        return worked(self.lab.a.run(VICTIM, "cr-checkpoint", self.name, image, "--hosts", hosts, *words))

    def stop(self, image, members):
        """Saves all parts and ends them."""
        self.save(image, members, "--stop")
        for child in self.children:
            ended(child, 121)
        self.are_gone()

    def are_gone(self):
        for machine, name in zip(self.machines, self.names):
            harness.wait_for(lambda: not machine.has_job(name), LIMIT, lambda: f"{name} stays on {machine.name}: {self.said()}")

    def restart(self, image, machines, names=None):
        """Part N on the machine N, as the job of that name there."""
        self.machines, self.children = machines, []
        self.names = names = names or [self.name] * len(machines)
        for number, (machine, name) in enumerate(zip(machines, names), 1):
            words = [] if name == self.name else ["--job-dir", name]
            self.children.append(machine.begin(VICTIM, "cr-restart", f"{image}/member-{number}", *words))
        for machine, name in zip(machines, names):
            over = lambda: machine.has_job(name) or any(child.poll() is not None for child in self.children)
            harness.wait_for(over, LIMIT, lambda: f"no restart of {name} on {machine.name}: {self.said()}")
            if not machine.has_job(name):
                raise Failure(f"a restart has failed: {self.said()}")

    def restart_as_one(self, image, machines, names=None):
        """All by one cr-restart."""
        self.machines, self.children = machines, []
        self.names = names or [self.name] * len(machines)
        hosts = ",".join(f"{machine.address}/{name}" for machine, name in zip(machines, self.names))
        worked(self.lab.a.run(VICTIM, "cr-restart", image, "--hosts", hosts))

    def finish(self):
        for child in self.children:
            ended(child)
        self.are_gone()
        got = self.machines[0].read(self.out)
        if got != self.want:
            raise Failure(f"the job wrote\n{got}\nexpected\n{self.want}\n{self.said()}")


class Stencil(Spread):
    """An MPI program, begun by one cr-mpirun on the first host."""

    def __init__(self, lab, mpi, machines, ranks, *pauses):
        self.mpi, self.ranks = mpi, ranks
        super().__init__(lab, "stencil", machines, *pauses)

    def begin(self):
        name = "mpi_stencil_" + self.mpi
        found = harness.find(self.context.apps, name)
        if found is None:
            raise Failure(f"the program {name} is not in {self.context.apps}")
        program = shutil.copy(found, os.path.join(self.context.product, name))
        os.chmod(program, 0o755)
        command = ["mpirun." + self.mpi, "-n", str(sum(self.ranks)), program, "--steps", str(self.STEPS)]
        alone = ["--allow-run-as-root", "--oversubscribe"] if self.mpi == "openmpi" else []
        self.want = self.context.lab.native("native", [command[0], *alone, *command[1:]]).decode()
        parts = [f"--part={machine.name}=10.99.0.{51 + i}:{self.ranks[i]}" for i, machine in enumerate(self.machines)]
        words = ["--name", self.name, *parts, "--agent", Login(self.lab).agent, "--output", self.out, "--error", self.errors]
        return [self.machines[0].begin(VICTIM, "cr-mpirun", *words, "--", *command, **self.variables)]


class Training(Spread):
    """training.py, begun by torchrun in each part."""

    def __init__(self, lab, machines, ranks, *pauses):
        self.ranks = ranks
        super().__init__(lab, "train", machines, *pauses)

    def begin(self):
        setup = os.path.join(HERE, "..", "..", "tools", "setup-torch")
        found = subprocess.run([setup, "--check"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if found.returncode != 0:
            raise Failure(found.stdout)
        folder = self.context.folder("training", 0o755)
        library = os.path.join(self.context.apps, "..", "hosts", "liblinear.so")
        for path in (library, os.path.join(HERE, "training.py"), os.path.join(HERE, "..", "frameworks", "hook.py")):
            os.chmod(shutil.copy(path, folder), 0o644)
        program = [folder + "/training.py", "--steps", str(self.STEPS)]

        def torchrun(nodes, ranks, *words):
            # Without files for the ranks' output, as by default: that of this PyTorch does not work with Python 3.11.
            default = ["--redirects=9:3", "--tee=9:3"]
            words = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc_per_node={ranks}", *words, *default, *program]
            return [found.stdout.strip(), *words]

        alone = torchrun(1, sum(self.ranks), "--master_addr=127.0.0.1", f"--master_port={harness.free_port()}")
        self.want = self.context.lab.native("native", ["env", "GLOO_SOCKET_IFNAME=lo", *alone]).decode()
        children = []
        for i, (machine, ranks) in enumerate(zip(self.machines, self.ranks)):
            files = [name + (f"-{i}" if i else "") for name in (self.out, self.errors)]
            words = ["--name", self.name, "--address", f"10.99.0.{51 + i}", "--output", files[0], "--error", files[1]]
            command = torchrun(len(self.machines), ranks, f"--node_rank={i}", "--master_addr=10.99.0.51", "--master_port=29500")
            children.append(machine.begin(VICTIM, "cr-run", *words, "--", *command, **self.variables))
        return children


def spread_on(context, count, begin):
    """The job on `count` hosts is saved and goes on, is saved and restarted on the same hosts, on others, and on fewer; its
    result is the native run's."""
    lab = Lan(context)
    start_all(lab)
    machines = [lab.a, lab.b, lab.c][:count]
    addresses = [machine.address for machine in machines]
    images = [f"{context.shared}/image-{i}" for i in range(5)]
    job = begin(lab, machines, 4, 8, 12, 16, 20)
    done = json.loads(job.save(images[0], addresses, "--json").stdout)
    if not 0 < done["paused_seconds"] <= done["seconds"]:
        raise Failure(f"cr-checkpoint reports {done}")
    job.go(4, then=8)
    job.stop(images[1], addresses)
    # Open MPI has pseudo-terminals, whose numbers others have now.
    taken = [os.openpty() for _ in range(16)]
    job.restart(images[1], machines)
    job.go(8, then=12)
    job.stop(images[2], addresses)
    others = [lab.b, lab.c, lab.a][:count]
    job.restart_as_one(images[2], others)
    job.go(12, then=16)
    job.stop(images[3], [machine.address for machine in others])
    # All on one host, which has several jobs then, each with its address; and from there on two again.
    names = [job.name, job.name + "-2", job.name + "-3"][:count]
    job.restart_as_one(images[3], [lab.c] * count, names)
    job.go(16, then=20)
    job.stop(images[4], [f"{lab.c.address}/{name}" for name in names])
    job.restart(images[4], [lab.a, lab.b, lab.b][:count], [job.name, job.name, job.name + "-2"][:count])
    job.go(20)
    job.finish()
    for fd in sum(taken, ()):
        os.close(fd)
    for machine in (lab.a, lab.b, lab.c):
        machine.is_clean()


def mpi_on(context, mpi, count, ranks):
    """One cr-mpirun starts the ranks."""
    spread_on(context, count, lambda lab, machines, *pauses: Stencil(lab, mpi, machines, ranks, *pauses))


@case
def openmpi_two(context):
    """Open MPI on two hosts."""
    mpi_on(context, "openmpi", 2, [2, 1])


@case
def openmpi_three(context):
    """Open MPI on three hosts."""
    mpi_on(context, "openmpi", 3, [1, 1, 1])


@case
def mpich_two(context):
    """MPICH on two hosts."""
    mpi_on(context, "mpich", 2, [2, 1])


@case
def mpich_three(context):
    """MPICH on three hosts."""
    mpi_on(context, "mpich", 3, [1, 1, 1])


@case
def torchrun_two(context):
    """torchrun on two hosts, with gloo."""
    spread_on(context, 2, lambda lab, machines, *pauses: Training(lab, machines, [2, 1], *pauses))


FAILING_CRIU = """#!/bin/sh
for word; do [ "$word" = restore ] && exit 1; done
exec {criu} "$@"
"""


def named(machine, name):
    """The processes of this name that its cr-hostd has started."""

    def name_of(pid):
        try:
            return open(f"/proc/{pid}/comm").read().strip()
        except (FileNotFoundError, ProcessLookupError):
            return ""  # it has ended meanwhile

    return [pid for pid in harness.descendants(machine.daemon.pid) if name_of(pid) == name]


def kill_all(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # with another one


def stands_at(lab, what, number):
    """A move from A to B, whose cr-restart on B stands before that step: its cr-migrate."""
    steps = os.path.join(lab.context.lab.folder, "steps")
    for path in (steps, steps + ".go"):
        if os.path.exists(path):
            os.unlink(path)
    lab.b.restart(CR_TEST_STEPS=steps, CR_TEST_STOP_AT=str(number))
    moving = lab.a.begin(VICTIM, "cr-migrate", "hers", *lab.to(lab.b))
    waits = lambda: os.path.exists(steps) and any(line.startswith(f"{number} ") for line in open(steps).read().splitlines())
    over = lambda: waits() or moving.poll() is not None
    harness.wait_for(over, LIMIT, lambda: f"{what}: step {number} was not reached\n{lab.b.said()}")
    if moving.poll() is not None:
        raise Failure(f"{what}: cr-migrate has ended: {moving.stderr.read()}")
    moving.steps = steps
    return moving


def stays_on_a(lab, what, moving, child):
    """The move has failed, and the job is where it was, and nothing is left of the move."""
    try:
        moving.wait(harness.patient(LIMIT))
    except subprocess.TimeoutExpired:
        raise Failure(f"{what}: cr-migrate does not end")
    errors = moving.stderr.read()
    open(moving.steps + ".go", "w").close()
    if moving.returncode in (0, None) or not lab.a.has_job("hers") or child.poll() is not None:
        raise Failure(f"{what}: cr-migrate ended with {moving.returncode}: {errors}; cr-run: {child.poll()}")
    harness.wait_for(lambda: not lab.b.has_job("hers"), LIMIT, lambda: f"{what}: the job is on B")
    lab.a.is_clean()


@case
def failing_source(context):
    """Whatever is killed on A, or if B falls silent, before the job runs on B, it goes on at A. A's cr-hostd is not needed
    for a move that has begun."""
    lab = Lab(context)
    lab.a.start()
    script = lab.script()
    want = lab.uninterrupted(script)
    lab.b.start()
    child = lab.begin(lab.a, script, 3, 9, 15)

    def in_the_middle(what, act):
        moving = stands_at(lab, what, 3)
        act()
        stays_on_a(lab, what, moving, child)

    workers = lambda: [pid for pid in named(lab.a, "cr-hostd") if harness.children_of(pid, "cr-checkpoint")]
    in_the_middle("A's cr-checkpoint is killed", lambda: kill_all(named(lab.a, "cr-checkpoint")))
    in_the_middle("A's worker is killed", lambda: kill_all(workers()))
    tool_of_b = lambda *words: tool(*lab.b.enter(0), "ip", "link", "set", lab.b.link, *words)
    in_the_middle("B falls silent", lambda: tool_of_b("down"))
    tool_of_b("up")
    lab.go(3)
    lab.stands(9)
    lab.b.is_clean()
    lab.b.restart()
    moving = stands_at(lab, "A's cr-hostd is killed", 3)
    lab.a.stop()
    open(moving.steps + ".go", "w").close()
    ended(moving)
    lab.a.start()
    ended(child, 121)
    lab.go(9)
    lab.stands(15)
    lab.go(15)
    lab.is_output(want)
    lab.a.is_clean()
    lab.b.is_clean()


@case
def failing(context):
    """However B fails before the job runs there, and whoever gives up, the job continues at A."""
    lab = Lab(context)
    lab.a.start()
    broken = os.path.join(context.lab.folder, "criu")
    with open(broken, "w") as f:
        f.write(FAILING_CRIU.format(criu=harness.criu_here()))
    os.chmod(broken, 0o755)
    lab.b.start(CUDA_REMOTE_CRIU=broken)
    script = lab.script()
    want = lab.uninterrupted(script)
    child = lab.begin(lab.a, script, 3, 9)
    refused(lab.move(lab.a, lab.b), "CRIU could not restore", "continues where it was")
    if not lab.a.has_job("hers") or child.poll() is not None:
        raise Failure("the job does not go on")

    def in_the_middle(what, act, number=3):
        moving = stands_at(lab, what, number)
        act(moving)
        stays_on_a(lab, what, moving, child)

    kill_tool = lambda moving: kill_all(named(lab.b, "cr-restart"))

    def drain(moving):
        draining = lab.b.begin(0, "cr-drain", "--save", lab.folder + "/drained")
        reason = lambda: os.path.exists(lab.b.path(lab.folder + "/draining"))
        harness.wait_for(lambda: reason() or draining.poll() is not None, LIMIT, lambda: "cr-drain does not begin")
        open(moving.steps + ".go", "w").close()
        draining.wait(harness.patient(LIMIT))
        worked(lab.b.run(0, "cr-drain", "--undo"))

    def give_up(moving):
        moving.send_signal(signal.SIGTERM)
        # Although it would wait there for long.
        harness.wait_for(lambda: not named(lab.b, "cr-restart"), LIMIT, lambda: "B's cr-restart waits for nobody")

    in_the_middle("the user gives up", give_up)
    in_the_middle("B's cr-restart is killed", kill_tool)
    in_the_middle("B's cr-hostd is killed", lambda moving: lab.b.stop())
    in_the_middle("B is drained meanwhile", drain)
    in_the_middle("it is killed at the beginning", lambda moving: lab.b.stop(), number=1)
    lab.b.start()
    lab.go(3)
    lab.stands(9)
    goes_on(lab, child, want, [9])


@case
def blocked_output(context):
    """A restart on B that waits for ever, as for the reader of a pipe that the user names, ends with the user's cr-migrate."""
    lab = Lab(context)
    lab.a.start()
    lab.b.start()
    script = lab.script()
    want = lab.uninterrupted(script)
    child = lab.begin(lab.a, script, 3)
    os.mkfifo(lab.b.path(lab.out))
    os.chown(lab.b.path(lab.out), VICTIM, VICTIM)
    moving = lab.a.begin(VICTIM, "cr-migrate", "hers", *lab.to(lab.b))
    restarts = lambda: any(lab.out in harness.command_of(pid) for pid in named(lab.b, "cr-restart"))
    harness.wait_for(lambda: restarts() or moving.poll() is not None, LIMIT, lambda: f"no restart on B: {lab.b.said()}")
    if moving.poll() is not None:
        raise Failure(f"cr-migrate has ended: {moving.stderr.read()}")
    moving.terminate()
    moving.wait(harness.patient(LIMIT))
    harness.wait_for(lambda: not named(lab.b, "cr-restart"), LIMIT, lambda: "B's cr-restart waits for ever")
    lab.b.is_clean()
    os.unlink(lab.b.path(lab.out))
    goes_on(lab, child, want, [3])


@case
def in_doubt(context):
    """B's cr-hostd dies when the job was let go on there: A asks the next one, and does not run the job a second time."""
    lab = Lab(context)
    steps = os.path.join(context.lab.folder, "steps")
    lab.a.start()
    lab.b.start(CR_TEST_STEPS=steps, CR_TEST_STOP_AT="4")
    script = lab.script()
    want = lab.uninterrupted(script)
    child = lab.begin(lab.a, script, 3)
    moving = lab.a.begin(VICTIM, "cr-migrate", "hers", *lab.to(lab.b))
    lines = lambda: open(steps).read().splitlines() if os.path.exists(steps) else []
    waits = lambda: any(line.startswith("4 give the session") for line in lines())
    harness.wait_for(lambda: waits() or moving.poll() is not None, LIMIT, lambda: f"the last step was not reached: {lines()}")
    if moving.poll() is not None:
        raise Failure(f"cr-migrate has ended: {moving.stderr.read()} {lines()}")
    lab.b.restart()
    open(steps + ".go", "w").close()
    ended(moving)
    ended(child, 121)
    lab.go(3)
    lab.is_output(want)
    lab.a.is_clean()
    lab.b.is_clean()


@case
def listed(context):
    """cr-ps --hosts shows the jobs of who asks on all hosts, all of them to root, and says which host does not answer."""
    lab = Lab(context)
    lab.a.start(more=["--known-host", lab.b.address, "--gpu-server", f"unix:{lab.folder}/nowhere"])
    lab.b.start()
    script = lab.script()
    want = lab.uninterrupted(script)
    child = lab.begin(lab.a, script, 3)
    on_b = lab.b.begin(VICTIM, "cr-run", "--name", "other", "--", "/bin/sleep", "600")
    harness.wait_for(lambda: lab.b.has_job("other"), LIMIT, lambda: "no job other on B")

    fields = json_fields.Section("cr-ps --hosts")

    def hosts(machine, user, *which, code=0):
        done = machine.run(user, "cr-ps", "--json", "--hosts", *which)
        if done.returncode != code:
            raise Failure(f"cr-ps ended with {done.returncode}: {done.stderr}")
        return fields.check(done.stdout)["hosts"]

    names = lambda reports: [[job["name"] for job in report.get("jobs", [])] for report in reports]
    here, there = hosts(lab.a, VICTIM)
    if names([here, there]) != [["hers"], ["other"]] or (here["host"], there["host"]) != ("a", lab.b.address):
        raise Failure(f"cr-ps --hosts shows {here} {there}")
    job = here["jobs"][0]
    if job["user"] != VICTIM or job["processes"] < 2 or job["pid"] != lab.a.facts("hers")["pid"] or not job["running"]:
        raise Failure(f"cr-ps --hosts shows {job}")
    if here["free_bytes"] == 0 or "draining" in here or "engine_version" not in here:
        raise Failure(f"cr-ps --hosts shows {here}")
    if ["error" in server for server in here["servers"]] != [True]:
        raise Failure(f"a GPU server that is not there answers: {here['servers']}")
    if names(hosts(lab.a, users.ATTACKER)) != [[], []]:
        raise Failure("another user's jobs are shown")
    # Each part has connections of root's process.
    many = ",".join(f"10.99.0.77/{number}" for number in range(513))
    refused(lab.a.run(VICTIM, "cr-checkpoint", "hers", lab.home + "/image", "--hosts", many), "513 parts, more than the 512")
    if names(hosts(lab.a, 0)) != [["hers"], ["other"]]:
        raise Failure("root does not see all jobs")
    answered, silent = hosts(lab.b, VICTIM, f"{lab.a.address}:{PORT},10.99.0.77:1", code=1)
    if names([answered]) != [["hers"]] or "does not answer" not in silent["error"] or "jobs" in silent:
        raise Failure(f"cr-ps --hosts shows {answered} {silent}")
    table = worked(lab.a.run(VICTIM, "cr-ps", "--hosts")).stdout
    for text in ("GPU SERVERS", lab.b.address, "open", "hers", "other", "/bin/sleep 600"):
        if text not in table:
            raise Failure(f"{text} is missing in\n{table}")
    # A GPU server that answers is shown with its GPUs.
    server = lab.b.begin(0, "cr-server", "--dir", lab.folder + "/server", SOFTGPU_DEVICES="2")
    path = lab.b.path(lab.folder + "/server/session.sock")
    harness.wait_for(lambda: harness.connects(path), LIMIT, lambda: "no server on B")
    lab.b.restart(more=["--gpu-server", f"unix:{lab.folder}/server"])
    (there,) = hosts(lab.a, VICTIM, lab.b.address)
    if len(there["servers"]) != 1 or "error" in there["servers"][0] or len(there["servers"][0]["gpus"]) != 2:
        raise Failure(f"cr-ps --hosts shows {there}")
    gpu = there["servers"][0]["gpus"][1]
    if not gpu["name"] or gpu["total_memory_bytes"] == 0 or gpu["compute_capability"] != "9.0" or not gpu["uuid"].startswith("GPU-"):
        raise Failure(f"cr-ps --hosts shows {gpu}")
    if f"2 x {gpu['name']}" not in worked(lab.a.run(VICTIM, "cr-ps", "--hosts", lab.b.address)).stdout:
        raise Failure("cr-ps --hosts does not name the GPUs")
    # A job that was saved, and one of root's at that server, which cannot be saved.
    worked(lab.b.run(VICTIM, "cr-checkpoint", "other", lab.home + "/other.image"))
    roots = lab.b.begin(0, "cr-run", "--name", "roots", "--plain", "--server", f"unix:{lab.folder}/server", "--", "/bin/sleep", "600")
    found = lambda: {job["name"]: job for job in hosts(lab.a, 0, lab.b.address)[0]["jobs"]}
    harness.wait_for(lambda: "roots" in found(), LIMIT, lambda: f"root's job is not shown: {found()}")
    if "saved_unix_ms" not in found()["other"] or not {"no_checkpoint", "server", "user_name"} <= found()["roots"].keys():
        raise Failure(f"cr-ps --hosts shows {found()}")
    roots.terminate()
    roots.wait(harness.patient(LIMIT))
    server.terminate()
    server.wait(harness.patient(LIMIT))
    # Who is not admitted learns nothing.
    lab.b.restart(more=["--allow-host", "CN=other"])
    here, there = hosts(lab.a, VICTIM, f"{lab.a.address},{lab.b.address}", code=1)
    if "accepts nothing from a host with the certificate of" not in there["error"] or "jobs" in there:
        raise Failure(f"B tells a stranger {there}")
    on_b.terminate()
    on_b.wait(harness.patient(LIMIT))
    goes_on(lab, child, want, [3])
    worked(lab.a.run(0, "cr-drain", "--save", lab.folder + "/saved"))
    if "draining" not in hosts(lab.a, 0, code=1)[0]:
        raise Failure("cr-ps --hosts does not show that A is drained")
    fields.complete()


@case
def drained(context):
    """cr-drain empties a host: what can move goes on elsewhere, the rest is saved, and nothing new begins until --undo."""
    lab = Lab(context)
    lab.a.start()
    lab.b.start()
    script = lab.script()
    want = lab.uninterrupted(script)
    child = lab.begin(lab.a, script, 3)
    # Its output is a pipe, which stays on this host.
    piped = lab.a.begin(VICTIM, "cr-run", "--name", "piped", "--", "/bin/sleep", "600")
    harness.wait_for(lambda: lab.a.has_job("piped"), LIMIT, lambda: "no job piped")
    refused(lab.a.run(0, "cr-drain"), "--to-host", "--save")
    refused(lab.a.run(VICTIM, "cr-drain", "--save", lab.home), "needs root")
    # Without a folder, what cannot move is left, goes on, and is named.
    done = lab.a.run(0, "cr-drain", "--to-host", lab.b.address, "--reason", "new memory")
    if done.returncode != 4 or "1 moved, 0 saved, 1 left" not in done.stdout or "left: job piped of" not in done.stdout:
        raise Failure(f"cr-drain ended with {done.returncode}: {done.stdout}{done.stderr}")
    ended(child, 121)
    if piped.poll() is not None or not lab.b.has_job("hers"):
        raise Failure("cr-drain did more, or less, than it says")
    # Nothing begins, and nothing comes.
    refused(lab.a.run(VICTIM, "cr-run", "--name", "late", "--", "/bin/true"), "accepts no jobs at present", "new memory")
    refused(lab.move(lab.b, lab.a), "a host that accepts jobs at present", "new memory", "continues where it was")
    shown = worked(lab.b.run(VICTIM, "cr-ps", "--hosts", lab.a.address)).stdout
    if "drained" not in shown or f"{lab.a.address} accepts no jobs: new memory" not in shown:
        raise Failure(f"cr-ps --hosts shows {shown}")
    saved = lab.folder + "/saved"
    done = worked(lab.a.run(0, "cr-drain", "--to-host", lab.b.address, "--save", saved))
    if "0 moved, 1 saved, 0 left" not in done.stdout:
        raise Failure(f"cr-drain says {done.stdout}{done.stderr}")
    piped.wait(harness.patient(LIMIT))
    image = f"{saved}/{VICTIM}/piped"
    if os.stat(lab.a.path(image)).st_uid != VICTIM:
        raise Failure("the image is not its user's")
    worked(lab.a.run(0, "cr-drain", "--undo"))
    worked(lab.a.run(VICTIM, "cr-run", "--name", "late", "--", "/bin/true"))
    again = lab.a.begin(VICTIM, "cr-restart", image, "--output", lab.home + "/piped", "--error", lab.home + "/piped")
    harness.wait_for(lambda: lab.a.has_job("piped"), LIMIT, lambda: f"the saved job does not go on: {lab.a.said()}")
    again.terminate()
    again.wait(harness.patient(LIMIT))
    worked(lab.move(lab.b, lab.a))
    lab.go(3)
    lab.is_output(want)
    lab.a.is_clean()
    lab.b.is_clean()


def run_one(name, options):
    if os.geteuid() != 0:
        raise Failure("hosts.py needs root")
    with harness.Lab(options.product, keep=options.keep) as lab:
        CASES[name](users.Context(lab, options))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.run_cases(arguments, CASES, run_one)
