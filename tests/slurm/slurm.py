#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Jobs of a real Slurm (munged, slurmctld, slurmds on this machine) that are saved, requeued and restarted.

Each case has a cluster and a network namespace of its own; the nodes are this machine, or hosts made of namespaces. Needs root, CRIU and Slurm (tools/setup-slurm prints where
it is). Python 3 standard library only.

Usage: slurm.py --product FOLDER --apps FOLDER --slurm FOLDER[:FOLDER] [--only CASE,CASE] [--keep] [--list]
"""

import argparse
import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "matrix"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "matrix"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "hosts"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "hosts"))
import harness  # noqa: E402
import hosts  # noqa: E402
from harness import Failure  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = int(os.environ.get("CR_LIMIT", 60))  # seconds for anything that is waited for
CASES = {}

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost({controller})
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
{plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait={kill}
SlurmdTimeout={lost}
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{more}
{nodes}
"""

ON_THIS_MACHINE = """
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17001-17002] CPUs={cpus} {gres}
PartitionName=low Nodes=n[1-2] Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=high Nodes=n[1-2] MaxTime=INFINITE PriorityTier=10
"""

# n1 and n2 have no GPU, g1 and g2 have two.
WITH_GPU_NODES = """
GresTypes=gpu
NodeName=n1 NodeAddr=10.98.0.1 CPUs=1
NodeName=n2 NodeAddr=10.98.0.2 CPUs=1
NodeName=g1 NodeAddr=10.98.0.3 CPUs=1 Gres=gpu:2
NodeName=g2 NodeAddr=10.98.0.4 CPUs=1 Gres=gpu:2
PartitionName=cpu Nodes=n[1-2] Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=gpu Nodes=g[1-2] MaxTime=INFINITE PriorityTier=1
PartitionName=high Nodes=n[1-2],g[1-2] MaxTime=INFINITE PriorityTier=10
"""


# Hosts of their own, and so are the nodes of a job on several.
WITHOUT_GPU_NODES = """
NodeName=n1 NodeAddr=10.98.0.1 CPUs=4
NodeName=n2 NodeAddr=10.98.0.2 CPUs=4
NodeName=n3 NodeAddr=10.98.0.3 CPUs=4
NodeName=n4 NodeAddr=10.98.0.4 CPUs=4
PartitionName=low Nodes=n[1-4] Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=high Nodes=n[1-4] MaxTime=INFINITE PriorityTier=10
"""


def case(function):
    CASES[function.__name__] = function
    return function


class Cluster:
    """A Slurm with the nodes n1 and n2, which are both this machine."""

    names, controller = ("n1", "n2"), "127.0.0.1"

    def __init__(self, context, more="", gres="", cpus=1):
        self.context, self.lab = context, context.lab
        self.folder = os.path.join(self.lab.folder, "slurm")
        for name in ("", "munge", "state", *self.names):
            os.makedirs(os.path.join(self.folder, name), mode=0o755, exist_ok=True)
        plugins = os.path.join(context.slurm[0], "..", "lib", "slurm-wlm")
        plugins = f"PluginDir={os.path.realpath(plugins)}" if os.path.isdir(plugins) else ""
        words = {"folder": self.folder, "controller": self.controller, "plugins": plugins, "more": more}
        with open(self.path("slurm.conf"), "w") as f:
            # On a machine that has other work, saving a job takes longer, and a slow node must not count as lost.
            limits = {"kill": int(30 * harness.slowness()), "lost": int(10 * harness.slowness())}
            f.write(CONFIGURATION.format(nodes=self.node_lines(gres, cpus), **limits, **words))
        with open(os.open(self.path("munge/key"), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as f:
            f.write(os.urandom(128))
        munge = self.path("munge/socket")
        self.daemon("munged", "munged", "--foreground", "--force", "--socket=" + munge,
                    "--key-file=" + self.path("munge/key"), "--pid-file=" + self.path("munge/pid"),
                    "--log-file=" + self.path("munge/log"),
                    "--seed-file=" + self.path("munge/seed"))  # fmt: skip
        harness.wait_for(lambda: os.path.exists(munge), LIMIT, lambda: "munged does not start")
        self.control = self.daemon("slurmctld", "slurmctld", "-D")
        self.nodes = {}
        for name in self.names:
            self.start_node(name)
        # Each in two partitions.
        states = lambda: self.ask("sinfo", "--noheader", "-N", "-o", "%T").split()
        idle = lambda: states() == 2 * len(self.names) * ["idle"]
        harness.wait_for(idle, LIMIT, lambda: f"no idle nodes: {self.ask('sinfo')}\n{self.control.describe()}")

    def node_lines(self, gres, cpus):
        return ON_THIS_MACHINE.format(gres=gres, cpus=cpus)

    def path(self, name):
        return os.path.join(self.folder, name)

    def daemon(self, name, program, *words, enter=()):
        command = [*enter, self.context.find(program), *words]
        return self.lab.start(harness.Process(self.lab, name, command, {"SLURM_CONF": self.path("slurm.conf")}))

    def start_node(self, name):
        self.nodes[name] = self.daemon(name, "slurmd", "-D", "-N", name, "-d", self.context.find("slurmstepd"))

    def kill_node(self, name):
        """As when a machine loses its power, as far as Slurm's own processes go."""
        self.nodes[name].kill()
        self.nodes[name].child.wait()
        for pid in processes_here():
            if harness.command_of(pid).startswith("slurmstepd:"):
                os.kill(pid, signal.SIGKILL)

    def command(self, program, *words, env=None, expect=0, user=None):
        environment = {**os.environ, **self.lab.env, "SLURM_CONF": self.path("slurm.conf"), **(env or {})}
        environment["PATH"] = ":".join(self.context.slurm) + ":" + os.environ.get("PATH", "/usr/bin:/bin")
        environment = {key: value for key, value in environment.items() if value is not None}
        done = subprocess.run([self.context.find(program), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=harness.patient(LIMIT), env=environment, cwd=self.context.folder,
                              **as_user(user))  # fmt: skip
        if expect is not None and done.returncode != expect:
            raise Failure(f"{program} {' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def ask(self, *words):
        return self.command(*words, expect=None).stdout

    def submit(self, *words, env=None):
        """The number of a job that cr-sbatch has submitted."""
        said = self.command("cr-sbatch", *words, env=env, user=self.context.user).stdout
        return re.fullmatch(r"Submitted batch job (\d+)\n", said).group(1)

    def facts(self, job):
        """What Slurm knows of a job: JobState, Restarts, ExitCode, ... Of a heterogeneous one, of its first component."""
        first = self.ask("scontrol", "show", "job", job).split("\n\n")[0]
        return dict(re.findall(r"(\w+)=(\S*)", first))

    def wait_state(self, job, state, *, restarts=None, limit=LIMIT):
        def reached():
            facts = self.facts(job)
            return facts.get("JobState") == state and (restarts is None or facts.get("Restarts") == str(restarts))

        harness.wait_for(reached, limit, lambda: f"job {job} is not {state}: {self.facts(job)}\n{self.shown_output()}")

    def start_again(self, job, restarts=1, limit=LIMIT):
        """Lets a requeued job start, which otherwise waits two minutes."""
        self.wait_state(job, "PENDING", restarts=restarts, limit=limit)
        time.sleep(2)  # slurmd starts no job in the second in which it has ended it ("Job credential revoked")
        self.command("scontrol", "update", f"jobid={job}", "StartTime=now")

    def output(self, name="out"):
        with open(self.context.path(name)) as f:
            return f.read()

    def shown_output(self):
        names = [name for name in os.listdir(self.context.folder) if name.startswith("out")]
        return "\n".join(f"== {name}\n{self.output(name)[-3000:]}" for name in names)

    def check_result(self, job, want, *, name="out", restarts=1, limit=LIMIT):
        """The job ends well, and its output is that of an uninterrupted run, but for lines of Slurm and the tools."""
        self.wait_state(job, "COMPLETED", limit=limit)
        facts = self.facts(job)
        if (facts["Restarts"], facts["ExitCode"]) != (str(restarts), "0:0"):
            raise Failure(f"{facts['Restarts']} restarts, exit code {facts['ExitCode']}\n{self.shown_output()}")
        text = re.sub(r"^(cr-[a-z-]+:|slurmstepd-[ng]\d:|srun:|\S+ \S+ warning cr-(server|relay):).*\n", "", self.output(name), flags=re.M)
        if text != want:
            raise Failure(f"another output than uninterrupted\n--- uninterrupted\n{want}\n--- got\n{self.shown_output()}")


class Host:
    """A node that is a host of its own, made of mount, network and UTS namespaces, at 10.98.0.NUMBER."""

    PREPARE = """
    set -e
    hostname {name}
    mount -t tmpfs -o mode=1777 none /dev/shm
    mount -t tmpfs -o mode=755 none {state}
    ip link set lo up
    ip link set {name} up
    ip address add 10.98.0.{number}/24 dev {name}
    """

    def __init__(self, lab, name, number, state):
        """`state`: a folder, which becomes the host's own."""
        self.address = f"10.98.0.{number}"
        words = ["unshare", "--mount", "--net", "--uts", "--propagation", "private", "/bin/sleep", "100000"]
        self.holder = lab.start(harness.Process(lab, "host-" + name, words))
        network = f"/proc/{self.holder.pid}/ns/net"
        apart = lambda: os.readlink(network) not in NETWORKS and harness.state_of(self.holder.pid) == "S"
        harness.wait_for(apart, LIMIT, lambda: "this machine gives the test no namespaces")
        keep_network(self.holder.pid)
        self.enter = ("nsenter", "--target", str(self.holder.pid), "--mount", "--net", "--uts", "--")
        port = "to-" + name
        run("ip", "link", "add", name, "type", "veth", "peer", "name", port)
        run("ip", "link", "set", port, "master", "lan", "up")
        run("ip", "link", "set", name, "netns", str(self.holder.pid))
        run(*self.enter, "/bin/sh", "-c", self.PREPARE.format(name=name, number=number, state=state))

    def processes(self):
        """Those that Slurm, cr-hostd and the jobs have there."""
        network = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        return [pid for pid in processes_here() if pid != self.holder.pid and network_of(pid) == network]


class HostCluster(Cluster):
    """A Slurm whose nodes are hosts of their own, each with a cr-hostd."""

    names, controller = ("n1", "n2", "n3", "n4"), "10.98.0.254"
    without_hostd = ()

    def __init__(self, context):
        run("ip", "link", "add", "lan", "type", "bridge")
        run("ip", "link", "set", "lan", "up")
        run("ip", "address", "add", self.controller + "/24", "dev", "lan")
        state = os.path.dirname(context.lab.env["CUDA_REMOTE_HOSTD"])
        authority = hosts.Authority(os.path.join(context.lab.folder, "tls"), "hosts")
        self.hosts = {name: Host(context.lab, name, i + 1, state) for i, name in enumerate(self.names)}
        self.hostds = {}
        for name, host in self.hosts.items():
            if name not in self.without_hostd:
                words = ["--listen", f"{host.address}:{hosts.PORT}", "--allow-address", "10.98.0.0/24"]
                self.hostds[name] = context.start_hostd("hostd-" + name, host.enter, [*words, *authority.options(name, host.address)])
        super().__init__(context)

    def node_lines(self, gres, cpus):
        return WITHOUT_GPU_NODES

    def start_node(self, name):
        words = ("-D", "-N", name, "-d", self.context.find("slurmstepd"))
        self.nodes[name] = self.daemon(name, "slurmd", *words, enter=self.hosts[name].enter)

    def kill_node(self, name):
        """As when a machine loses its power: nothing of it speaks any more, and nobody is told."""
        run("ip", "link", "set", "to-" + name, "down")
        kill_all(with_descendants(self.hosts[name].processes()))
        self.nodes[name].child.wait()

    def drain(self, *names):
        self.command("scontrol", "update", "nodename=" + ",".join(names), "state=drain", "reason=test")

    def resume(self, *names):
        self.command("scontrol", "update", "nodename=" + ",".join(names), "state=resume")


class GpuCluster(HostCluster):
    """n1 and n2 without GPUs, g1 and g2 with two. Each n has a cr-hostd."""

    names, without_hostd = ("n1", "n2", "g1", "g2"), ("g1", "g2")

    def __init__(self, context):
        context.lab.env["SOFTGPU_DEVICES"] = "2"
        os.mkdir(os.path.join(context.lab.folder, "slurm"))
        devices = os.path.join(context.lab.folder, "slurm", "gpu")
        for minor in range(2):
            os.mknod(devices + str(minor), 0o600 | stat.S_IFCHR, os.makedev(195, minor))
        with open(os.path.join(context.lab.folder, "slurm", "gres.conf"), "w") as f:
            f.write(f"NodeName=g[1-2] Name=gpu File={devices}[0-1]\n")
        super().__init__(context)

    def node_lines(self, gres, cpus):
        return WITH_GPU_NODES

    def pair(self, job):
        """The nodes of the components of a job that runs."""
        return re.findall(r" NodeList=(\S+)", self.ask("scontrol", "show", "job", job))

    def servers(self):
        """The GPU servers that run: node, and what of its GPUs is theirs."""
        found = []
        for name, host in self.hosts.items():
            for pid in host.processes():
                if "cr-server --dir" in harness.command_of(pid):
                    with open(f"/proc/{pid}/environ", "rb") as f:
                        gpus = re.findall(r"\0CUDA_VISIBLE_DEVICES=([^\0]*)", f.read().decode())
                    found.append((name, *gpus))
        return found


def run(*words):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise Failure(f"{' '.join(words)} ended with {done.returncode}: {done.stdout}")


def as_user(user):
    """For subprocess: what runs as this user, with no groups but one."""
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}


NETWORKS = {}  # the network namespaces of these cases, and what keeps each: the kernel gives the number of one that is gone to another


def keep_network(pid):
    """The network namespace of process `pid` is one of the case's from now on."""
    kept = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    NETWORKS[os.readlink(f"/proc/self/fd/{kept}")] = kept


def network_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def processes_here():
    """All other processes of this case's network namespaces, but those that this one descends from."""
    above, pid = set(), os.getpid()
    while pid > 0:
        above.add(pid)
        with open(f"/proc/{pid}/stat") as f:
            pid = int(f.read().rpartition(") ")[2].split()[1])
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in above and network_of(entry) in NETWORKS:
            found.append(int(entry))
    return found


def with_descendants(pids):
    """Also what they have in network namespaces of their own."""
    parents = {}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit():
                with open(f"/proc/{entry}/stat") as f:
                    parents[int(entry)] = int(f.read().rpartition(") ")[2].split()[1])
        except OSError:
            pass  # it has ended
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def kill_all(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # with another one


def own_network():
    """A network namespace for this case. Slurm looks names up only if there is another address than 127.0.0.1."""
    before = os.readlink("/proc/self/ns/net")
    harness.own_network()
    if os.readlink("/proc/self/ns/net") == before:
        raise Failure("this machine gives the test no network namespace of its own")
    keep_network("self")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        address = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton("127.0.0.2"))
        fcntl.ioctl(s, 0x8916, address)  # SIOCSIFADDR, netdevice(7)


def own_users(folder, names):
    """Numbers of users that this process and what it starts from now on know by these names, and nobody else."""
    unshare_mounts, recursive, private, bind = 0x20000, 0x4000, 1 << 18, 0x1000  # unshare(2), mount(2)
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result):
        if result != 0:
            raise Failure(f"no users of the test's own: {os.strerror(ctypes.get_errno())}")

    check(libc.unshare(unshare_mounts))
    check(libc.mount(b"none", b"/", None, recursive | private, None))
    numbers = [1_400_000_000 + os.getpid() * 4 + i for i in range(len(names))]
    for file, line in (("passwd", "{0}:x:{1}:{1}::/:/bin/sh\n"), ("group", "{0}:x:{1}:\n")):
        path = os.path.join(folder, file)
        with open(path, "w") as f, open("/etc/" + file) as old:
            f.write(old.read() + "".join(line.format(*one) for one in zip(names, numbers)))
        check(libc.mount(path.encode(), f"/etc/{file}".encode(), None, bind, None))
    return numbers


class Context:
    user = None  # whose jobs these are; None: root's

    def __init__(self, lab, options):
        self.lab = lab
        self.folder = lab.folder  # where jobs are submitted
        os.chmod(lab.folder, 0o755)
        self.slurm, self.apps = options.slurm.split(":"), options.apps
        self.program = os.path.realpath(harness.find(options.apps, "globals"))
        lab.env["XDG_RUNTIME_DIR"] = self.path("runtime")
        os.mkdir(self.path("runtime"), mode=0o700)
        self.sync = self.path("sync")

    def become_user(self, own_hosts=False):
        """The jobs are an ordinary user's from now on, who has a cr-hostd. `own_hosts`: hosts will have theirs."""
        self.user, self.other = own_users(self.lab.folder, ("anna", "bert"))
        # Programs and folders that she can reach.
        product = os.path.join(self.lab.folder, "product")
        shutil.copytree(self.lab.product, product)
        shutil.copy(self.program, product)
        for leaf in os.listdir(product):
            os.chmod(os.path.join(product, leaf), 0o755)
        self.lab.product, self.lab._paths = product, {}
        self.program = os.path.join(product, "globals")
        self.lab.env["CUDA_REMOTE_DRIVER"] = self.lab.driver = self.lab.tool("libsoftgpu.so")
        self.folder = self.home("home", self.user)
        self.sync = self.path("sync")
        host = os.path.join(self.lab.folder, "host")
        os.mkdir(host)
        del self.lab.env["XDG_RUNTIME_DIR"]
        self.lab.env["CUDA_REMOTE_HOSTD"] = host + "/hostd.sock"
        if not own_hosts:
            self.start_hostd("hostd")

    def start_hostd(self, name, enter=(), more=()):
        socket = self.lab.env["CUDA_REMOTE_HOSTD"]
        key = os.path.join(self.lab.folder, "hostd.key")  # all have the same one
        if not os.path.exists(key):
            with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as f:
                f.write(os.urandom(32))
        state = os.path.join(os.path.dirname(socket), "state")
        command = [*enter, self.lab.tool("cr-hostd"), "--socket", socket, "--state", state, "--key", key, *more]
        hostd = self.lab.start(harness.Process(self.lab, name, command))
        harness.wait_for(lambda: "serving" in hostd.stderr(), LIMIT, lambda: hostd.describe())
        return hostd

    def home(self, name, user):
        path = os.path.join(self.lab.folder, name)
        os.mkdir(path, mode=0o700)
        os.chown(path, user, user)
        return path

    def path(self, name):
        return os.path.join(self.folder, name)

    def find(self, program):
        for folder in self.slurm:
            if os.path.exists(os.path.join(folder, program)):
                return os.path.join(folder, program)
        return self.lab.tool(program)

    def script(self, text, name="job.sh"):
        with open(self.path(name), "w") as f:
            f.write("#!/bin/bash\n" + text)
        return self.path(name)

    def uninterrupted(self, script):
        environment = {**os.environ, **self.lab.env, **self.lab.native_environment()}
        environment = {key: value for key, value in environment.items() if value is not None}
        done = subprocess.run(["/bin/bash", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=harness.patient(LIMIT),
                              env=environment, cwd=self.folder, **as_user(self.user))  # fmt: skip
        if done.returncode != 0:
            raise Failure(f"the uninterrupted run ended with {done.returncode}: {done.stdout}")
        return done.stdout

    def stencil(self, mpi):
        """An MPI program that the jobs can start."""
        found = harness.find(self.apps, "mpi_stencil_" + mpi)
        if found is None:
            raise Failure(f"the program mpi_stencil_{mpi} is not in {self.apps}")
        program = shutil.copy(found, os.path.join(self.lab.folder, "stencil_" + mpi))
        os.chmod(program, 0o755)
        return program

    def native_stencil(self, mpi, program, ranks, steps):
        """What it prints without cuda-remote."""
        alone = "--allow-run-as-root --oversubscribe" if mpi == "openmpi" else ""
        return self.uninterrupted(self.script(f"mpirun.{mpi} {alone} -n {ranks} {program} --steps {steps}\n", "native.sh"))

    def standing(self, *steps):
        """Variables for a program that waits after these steps."""
        return {"CR_TEST_SYNC_FILE": self.sync, "CR_TEST_PAUSE_AT": ",".join(map(str, steps))}

    def wait_step(self, step, cluster, kind="paused"):
        reached = lambda: os.path.exists(self.sync) and f"{kind} {step}" in open(self.sync).read().split("\n")
        harness.wait_for(reached, LIMIT, lambda: f"the program did not reach step {step}\n{cluster.shown_output()}")

    def go(self, step):
        open(f"{self.sync}.go.{step}", "w").close()


# Two programs in turn, and what the shell itself knows.
SCRIPT = """
#SBATCH --time=10
set -e
echo first
{program} --steps 12
known=$((40 + 7))
{program} --steps 20 --size 64
echo known $known arguments "$@"
"""


@case
def requeued(context):
    """scontrol requeue: saved on SIGTERM, then restarted on whatever node; the output is continued."""
    requeue_on(context, Cluster(context))


def requeue_on(context, cluster, meanwhile=lambda job: None):
    script = context.script(SCRIPT.format(program=context.program))
    want = context.uninterrupted(script)
    job = cluster.submit("-o", "out", script, env=context.standing(15))
    context.wait_step(15, cluster)
    cluster.command("scontrol", "requeue", job)
    cluster.wait_state(job, "PENDING", restarts=1)
    meanwhile(job)
    cluster.start_again(job)
    context.go(15)
    cluster.check_result(job, want)
    if "restarting" not in cluster.output() or "starts from the beginning" in cluster.output():
        raise Failure(f"the job was not restarted from an image:\n{cluster.output()}")
    if os.listdir(context.path("checkpoints")):
        raise Failure(f"the images of the job are left: {os.listdir(context.path('checkpoints'))}")


@case
def timed_out(context):
    """Slurm warns the job before its time is over: it is saved, requeues itself, and goes on."""
    cluster = Cluster(context)
    script = context.script(SCRIPT.format(program=context.program))
    want = context.uninterrupted(script)
    # Slurm looks at times every 30 s.
    job = cluster.submit("--checkpoint-warning=58", "--time=1", "-o", "out", script, env=context.standing(15))
    context.wait_step(15, cluster)
    cluster.start_again(job)
    context.go(15)
    cluster.check_result(job, want)
    if "Slurm's warning has come" not in cluster.output():
        raise Failure(f"the job was not warned:\n{cluster.output()}")


@case
def preempted(context):
    """A job of a partition with priority takes the node: the job is saved, waits, and goes on after it."""
    cluster = Cluster(context)
    script = context.script(SCRIPT.format(program=context.program))
    want = context.uninterrupted(script)
    job = cluster.submit("-o", "out", script, "some", "words", env=context.standing(15))
    want = want.replace("arguments\n", "arguments some words\n")
    context.wait_step(15, cluster)
    urgent = cluster.command("sbatch", "--parsable", "-p", "high", "-N2", "--wrap", "sleep 2").stdout.strip()
    cluster.wait_state(urgent, "RUNNING")
    cluster.start_again(job)
    context.go(15)
    cluster.check_result(job, want)
    facts = cluster.facts(urgent)
    if facts["JobState"] != "COMPLETED":
        raise Failure(f"the urgent job is {facts['JobState']}")


# Writes a line for each of 60 programs, so that what is written twice or lost shows.
LINES = """
set -e
for i in $(seq 60); do
  echo line $i
  {program} --steps 3 --size $i
done
"""


# Before line 40 of LINES, the job waits until the test lets it go on.
STANDS = "[ $i != 40 ] || until [ -e go ]; do sleep 0.1; done; "


def lose_node(context, lose, kind=Cluster):
    """The job goes on from its last image on the other node, and no line comes twice.

    `lose(cluster, node, processes)` makes Slurm lose the node; `processes()` are those of the job on it. However long
    Slurm takes until it gives the node up, the job has not ended: it stands until it runs elsewhere.
    """
    cluster = kind(context)
    # Also in a file that the script has open all the time.
    twice = LINES.format(program=context.program).replace("echo line $i", STANDS + "echo line $i; echo line $i >&3")
    script = context.script("exec 3> results\n" + twice)
    go = context.path("go")
    open(go, "w").close()
    want = context.uninterrupted(script)
    os.unlink(go)
    results = cluster.output("results")
    job = cluster.submit("--checkpoint-cut", "results", "--checkpoint-interval", "2s", "--checkpoint-output", "out-%j.own",
                         "--checkpoint-error", "out-%j.errors", "-o", "out", script, env={"CR_TEST_STEP_MS": "100"})  # fmt: skip
    own = f"out-{job}.own"
    lines = lambda: cluster.output(own).count("line") if os.path.exists(context.path(own)) else 0
    folder = context.path(f"checkpoints/job-{job}/images")
    images = lambda: os.path.isdir(folder) and [name for name in os.listdir(folder) if re.fullmatch(r"image-\d+", name)]
    harness.wait_for(lambda: lines() > 0 and images(), LIMIT, lambda: f"no image\n{cluster.shown_output()}")
    cluster.wait_state(job, "RUNNING")
    node = cluster.facts(job)["NodeList"]
    here = lambda: [pid for pid in processes_here() if f"job-{job}/script" in harness.command_of(pid)]
    lose(cluster, node, here)
    had, old = lines(), set(here())
    cluster.start_again(job, limit=3 * LIMIT)
    cluster.wait_state(job, "RUNNING", restarts=1)
    if cluster.facts(job)["NodeList"] == node:
        raise Failure("the job is on the dead node")
    open(go, "w").close()
    cluster.wait_state(job, "COMPLETED", limit=3 * LIMIT)
    if old & set(here()):
        raise Failure(f"processes of the job are left on the lost node: {old & set(here())}")
    if not 0 < had < lines():
        raise Failure(f"the node has failed at line {had}")
    if cluster.output(own) != want:
        raise Failure(f"another output than uninterrupted\n{cluster.shown_output()}")
    if cluster.output("results") != results:
        raise Failure(f"other results than uninterrupted\n{cluster.output('results')}")
    if "restarting" not in cluster.output():
        raise Failure(f"the job was not restarted from an image:\n{cluster.output()}")


@case
def node_failed(context):
    """slurmd and slurmstepd are killed: the job continues elsewhere."""

    def kill(cluster, node, processes):
        cluster.kill_node(node)
        harness.wait_for(lambda: not processes(), 10, lambda: "the job has survived slurmstepd")

    lose_node(context, kill)


@case
def node_unreachable(context):
    """Slurm loses a node on which the job continues: it ends there when it starts elsewhere."""

    def stop(cluster, node, processes):
        os.kill(cluster.nodes[node].pid, signal.SIGSTOP)
        if not processes():
            raise Failure("the job does not run")

    lose_node(context, stop)


@case
def arrays(context):
    """Each task of an array has images of its own, and goes on from them."""
    cluster = Cluster(context)
    script = context.script('set -e\necho task $SLURM_ARRAY_TASK_ID\n' + LINES.format(program=context.program))
    want = context.uninterrupted(script)
    array = cluster.submit("--array=1-2", "-o", "out-%a", script, env={"CR_TEST_STEP_MS": "100"})
    names = [f"{array}_1", f"{array}_2"]
    has_begun = lambda name: os.path.exists(context.path(name)) and "line 3" in cluster.output(name)
    harness.wait_for(lambda: has_begun("out-1") and has_begun("out-2"), LIMIT, cluster.shown_output)
    # One task has the number of the array, by which Slurm also knows all tasks. Only that one requeues itself.
    itself = next(name for name in names if cluster.facts(name)["JobId"] == array)
    other = next(name for name in names if name != itself)
    cluster.command("scancel", "--signal=USR1", "--batch", itself)
    cluster.start_again(itself)
    facts = cluster.facts(other)
    if (facts["JobState"], facts["Restarts"]) != ("RUNNING", "0"):
        raise Failure(f"{other} is {facts['JobState']} after {facts['Restarts']} restarts")
    cluster.command("scontrol", "requeue", other)
    cluster.start_again(other)
    for i, name in enumerate(names, 1):
        cluster.check_result(name, want.replace("task", f"task {i}"), name=f"out-{i}")
        if f"job-{name}/images/image-" not in cluster.output(f"out-{i}"):
            raise Failure(f"{name} was not restarted from its own image:\n{cluster.output(f'out-{i}')}")


@case
def unwritable(context):
    """An image that cannot be written leaves the job running, which says so; the next one is written."""
    cluster = Cluster(context)
    script = context.script(SCRIPT.format(program=context.program))
    want = context.uninterrupted(script)
    job = cluster.submit("--checkpoint-dir", "images", "-o", "out", script, env=context.standing(15))
    context.wait_step(15, cluster)
    folder = context.path(f"images/job-{job}/images")
    with open(folder, "w"):  # nobody can make the folder now
        pass
    cluster.command("scancel", "--signal=USR1", "--batch", job)
    goes_on = "could not be saved and continues; it has no image"
    harness.wait_for(lambda: goes_on in cluster.output(), LIMIT, cluster.shown_output)
    cluster.wait_state(job, "RUNNING", restarts=0)
    os.unlink(folder)
    cluster.command("scancel", "--signal=USR1", "--batch", job)
    cluster.start_again(job)
    context.go(15)
    cluster.check_result(job, want)


@case
def failed_program(context):
    """A program's exit code is the job's, and images of a job that failed stay."""
    cluster = Cluster(context)
    job = cluster.submit("-o", "out", "--wrap", f"{context.program} --steps 9; exit 7", env=context.standing(5))
    context.wait_step(5, cluster)
    cluster.command("scontrol", "requeue", job)
    cluster.start_again(job)
    context.go(5)
    cluster.wait_state(job, "FAILED", restarts=1)
    if cluster.facts(job)["ExitCode"] != "7:0":
        raise Failure(f"exit code {cluster.facts(job)['ExitCode']}")
    if not os.listdir(context.path(f"checkpoints/job-{job}/images")):
        raise Failure("the images of a job that failed are gone")


@case
def other_gpus(context):
    """A job that gets another GPU of the node after a restart computes on that one; its program sees it as 0."""
    context.lab.env["SOFTGPU_DEVICES"] = "2"
    slurm = os.path.join(context.lab.folder, "slurm")
    os.mkdir(slurm)
    files = [slurm + "/gpu0", slurm + "/gpu1"]
    for minor, path in enumerate(files):
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(195, minor))
    with open(slurm + "/gres.conf", "w") as f:
        f.write(f"Name=gpu File={slurm}/gpu[0-1]\n")
    cluster = Cluster(context, "GresTypes=gpu", "Gres=gpu:2", cpus=2)
    script = context.script(SCRIPT.format(program=context.program) + 'echo sees "$CUDA_VISIBLE_DEVICES"\n')
    want = context.uninterrupted(script).replace("sees \n", "sees 0\n")
    place = ("-w", "n1", "--gres=gpu:1")
    job = cluster.submit(*place, "-o", "out", script, env=context.standing(15))

    def gpus_of_server():
        for pid in processes_here():
            if "cr-server --dir" in harness.command_of(pid):
                with open(f"/proc/{pid}/environ", "rb") as f:
                    return re.findall(r"CUDA_VISIBLE_DEVICES=([^\0]*)", f.read().decode())
        return None

    context.wait_step(15, cluster)
    if gpus_of_server() != ["0"]:
        raise Failure(f"Slurm gives GPU 0, and the job's server has {gpus_of_server()}")
    cluster.command("scontrol", "requeue", job)
    cluster.wait_state(job, "PENDING", restarts=1)
    holds = "echo $CUDA_VISIBLE_DEVICES; sleep 1000"
    other = cluster.command("sbatch", "--parsable", *place, "-o", "out-other", "--wrap", holds).stdout.strip()
    has_it = lambda: os.path.exists(context.path("out-other")) and cluster.output("out-other") == "0\n"
    harness.wait_for(has_it, LIMIT, cluster.shown_output)
    cluster.start_again(job)
    cluster.wait_state(job, "RUNNING", restarts=1)
    harness.wait_for(lambda: gpus_of_server() == ["1"], LIMIT, lambda: f"the job's server has {gpus_of_server()}")
    context.go(15)
    cluster.check_result(job, want)
    cluster.command("scancel", other)


def submit_and_cancel(context, cluster):
    """A job that scancel saves and ends while it stands after step 15. Returns its number and what it is to print."""
    script = context.script(SCRIPT.format(program=context.program))
    want = context.uninterrupted(script)
    job = cluster.submit("-o", "out", script, env=context.standing(15))
    context.wait_step(15, cluster)
    cluster.command("scancel", job)
    cluster.wait_state(job, "CANCELLED", restarts=0)
    return job, want


@case
def cancelled(context):
    """scancel saves the job and ends it; scontrol requeue lets it go on later."""
    cluster = Cluster(context)
    job, want = submit_and_cancel(context, cluster)
    cluster.command("scontrol", "requeue", job)
    cluster.start_again(job)
    context.go(15)
    cluster.check_result(job, want)


@case
def other_signals(context):
    """With --checkpoint-on=timeout the program gets SIGTERM itself, and the job is not saved then."""
    cluster = Cluster(context)
    script = context.script("trap 'echo got TERM; exit 3' TERM\necho begun\nwhile :; do sleep 0.1; done\n")
    job = cluster.submit("--checkpoint-on=timeout", "-o", "out", script)
    harness.wait_for(lambda: os.path.exists(context.path("out")) and "begun" in cluster.output(), LIMIT, cluster.shown_output)
    cluster.command("scontrol", "requeue", job)
    cluster.wait_state(job, "PENDING", restarts=1)
    harness.wait_for(lambda: "got TERM" in cluster.output(), LIMIT, cluster.shown_output)
    if "saving" in cluster.output():
        raise Failure(f"the job was saved:\n{cluster.output()}")


@case
def own_script(context):
    """A script that calls cr-slurm-run itself: what stands before it runs at each start. A server that others share."""
    cluster = Cluster(context)
    server = context.lab.server()
    run = context.lab.tool("cr-slurm-run")
    lines = "#SBATCH --requeue --open-mode=append --signal=B:USR1@120\necho start\n"
    script = context.script(f"{lines}exec {run} --checkpoint-interval 1s -- {context.program} --steps 30\n")
    want = "start\nstart\n" + context.uninterrupted(context.script(f"{context.program} --steps 30\n", "native.sh"))
    variables = {**context.standing(15), "CUDA_REMOTE_SERVER": server.unix}
    job = cluster.command("sbatch", "--parsable", "-o", "out", script, env=variables).stdout.strip()
    context.wait_step(15, cluster)
    cluster.command("scontrol", "requeue", job)
    cluster.start_again(job)
    context.go(15)
    cluster.check_result(job, want)
    if "session 2 of" not in server.stderr():
        raise Failure(f"the restarted job does not use the server\n{server.stderr()}")


@case
def plugin(context):
    """With the plugin, sbatch takes the options, on the command line and in the script; other jobs are as before."""
    compiled = os.path.join(context.lab.folder, "cuda_remote.so")
    source = os.path.join(HERE, "..", "..", "programs", "slurm", "spank_plugin.c")
    headers = os.path.join(context.slurm[0], "..", "include")
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *warnings, "-shared", "-fPIC", "-I", headers, "-o", compiled, source], check=True)
    stack = os.path.join(context.lab.folder, "plugstack.conf")
    with open(stack, "w") as f:
        f.write(f"required {compiled} CR_SBATCH={context.lab.tool('cr-sbatch')}\n")
    cluster = Cluster(context, f"PlugStackConfig={stack}")
    for option in ("interval", "dir", "on", "keep", "warning", "output", "error", "cut", "addresses"):
        if f"--checkpoint-{option}=" not in cluster.ask("sbatch", "--help"):
            raise Failure(f"sbatch --help lacks --checkpoint-{option}")
    lines = "#SBATCH --checkpoint-dir=images --checkpoint-keep=1\n"
    script = context.script(lines + SCRIPT.format(program=context.program))
    want = context.uninterrupted(script).replace("arguments\n", "arguments some words\n")
    variables = context.standing(15)
    words = ("--parsable", "--checkpoint-interval", "1s", "-o", "out", script, "some", "words")
    job = cluster.command("sbatch", *words, env=variables, user=context.user).stdout.strip()
    context.wait_step(15, cluster)
    folder = context.path(f"images/job-{job}/images")
    many = lambda: os.path.exists(f"{folder}/image-000002") and not os.path.exists(f"{folder}/image-000001")
    harness.wait_for(many, LIMIT, lambda: f"the options have no effect\n{cluster.shown_output()}")
    cluster.command("scontrol", "requeue", job)
    cluster.start_again(job)
    context.go(15)
    cluster.check_result(job, want)
    plain = cluster.command("sbatch", "--parsable", "-o", "plain", "--wrap", "echo $0", user=context.user).stdout.strip()
    cluster.wait_state(plain, "COMPLETED")
    if "slurm_script" not in cluster.output("plain"):
        raise Failure(f"a job without the options has changed: {cluster.output('plain')}")


def run_ranks(context, run):
    """Two processes of an mpirun, which starts them itself and not through Slurm, are saved together and go on."""
    cluster = Cluster(context, cpus=2)
    # Each has a terminal of mpirun's, and so their lines come in any order.
    script = context.script(f"set -eo pipefail\necho begin\n{run} {context.program} --steps 20 | sort\necho end\n")
    want = context.uninterrupted(script)
    job = cluster.submit("-n2", "-o", "out", script, env=context.standing(15))
    both = lambda: os.path.exists(context.sync) and open(context.sync).read().count("paused 15") == 2
    harness.wait_for(both, LIMIT, cluster.shown_output)
    cluster.command("scontrol", "requeue", job)
    cluster.start_again(job)
    context.go(15)
    cluster.check_result(job, want)


@case
def ranks_openmpi(context):
    """Processes of Open MPI's mpirun are saved together and go on."""
    # It does not take a network with two loopback addresses for one.
    run_ranks(context, "mpirun.openmpi --mca oob_tcp_if_include lo --allow-run-as-root --oversubscribe -n 2")


@case
def ranks_mpich(context):
    """The same with MPICH's."""
    run_ranks(context, "mpirun.mpich -n 2")


# A step without MPI, whose tasks know their numbers; one with MPI; one that is refused.
STEPS = """
set -e
srun -n 2 /bin/bash -c 'echo task $SLURM_PROCID has $SLURM_LOCALID of $SLURM_NTASKS' | sort
{run} {stencil} --steps 20
srun --gres=gpu:1 {stencil} || echo refused: $?
srun -n 2 --mpi=none /bin/bash -c 'exit $((3 + SLURM_PROCID))' || echo failed: $?
"""
STEPS_SAY = """task 0 has 0 of 2
task 1 has 1 of 2
{stencil}refused: 2
failed: 4
"""


def run_steps(context, mpi, run):
    """Tasks that the script starts by srun are in the job, are saved with it, and go on."""
    context.lab.env["OMPI_MCA_oob_tcp_if_include"] = "lo"
    cluster = Cluster(context, cpus=2)
    stencil = context.stencil(mpi)
    want = STEPS_SAY.format(stencil=context.native_stencil(mpi, stencil, 2, 20))
    script = context.script(STEPS.format(run=run, stencil=stencil))
    job = cluster.submit("-n2", "-o", "out", script, env=context.standing(8))
    context.wait_step(8, cluster)
    cluster.command("scontrol", "requeue", job)
    cluster.start_again(job)
    context.go(8)
    cluster.check_result(job, want)
    if "restarting" not in cluster.output() or "cr-srun: a step in this job cannot have the option --gres" not in cluster.output():
        raise Failure(f"the job was not restarted from an image, or took --gres:\n{cluster.output()}")


@case
def srun_pmix(context):
    """Tasks of srun --mpi=pmix: a program of Open MPI."""
    run_steps(context, "openmpi", "srun -n 2 --mpi=pmix")


@case
def srun_pmi2(context):
    """The same with --mpi=pmi2 and MPICH; here Slurm's default says so."""
    context.lab.env["SLURM_MPI_TYPE"] = "pmi2"
    run_steps(context, "mpich", "srun")


def has_rights_of_user(context):
    """What the programs of the job run as."""
    for pid in processes_here():
        if context.program in harness.command_of(pid):
            facts = os.stat(f"/proc/{pid}")
            if facts.st_uid != context.user:
                raise Failure(f"process {pid} of the job runs as {facts.st_uid}")


@case
def user_requeued(context):
    """A job of an ordinary user, through cr-hostd: as `requeued`, and restarted on another host."""
    context.become_user(own_hosts=True)
    cluster = HostCluster(context)
    requeue_on(context, cluster, lambda job: cluster.drain("n1"))
    for name, saved in (("n1", ": cr-checkpoint, image"), ("n2", ": cr-restart, image")):
        if saved not in cluster.hostds[name].stderr():
            raise Failure(f"the cr-hostd of {name} has done nothing: {cluster.hostds[name].describe()}")


@case
def user_timed_out(context):
    """The same, as `timed_out`."""
    context.become_user()
    timed_out(context)


@case
def user_preempted(context):
    """The same, as `preempted`."""
    context.become_user()
    preempted(context)


@case
def user_node_failed(context):
    """A host is lost, with its cr-hostd and the job, which goes on from its last image on another host."""
    context.become_user(own_hosts=True)

    def kill(cluster, node, processes):
        has_rights_of_user(context)
        cluster.kill_node(node)

    lose_node(context, kill, kind=HostCluster)


@case
def user_slurmstepd_killed(context):
    """As `node_failed`: through cr-hostd, too, the job ends with slurmstepd, and goes on from its last image."""
    context.become_user()

    def kill(cluster, node, processes):
        has_rights_of_user(context)
        cluster.kill_node(node)
        harness.wait_for(lambda: not processes(), 10, lambda: "the job has survived slurmstepd")

    lose_node(context, kill)


@case
def user_arrays(context):
    """The same, as `arrays`."""
    context.become_user()
    arrays(context)


@case
def user_other_gpus(context):
    """The same, as `other_gpus`."""
    context.become_user()
    other_gpus(context)


@case
def user_plugin(context):
    """The same, as `plugin`."""
    context.become_user()
    plugin(context)


# Pretends that the job was saved before, with the images that the script's user has copied.
OTHERS_IMAGES = """
mkdir -p mine/job-$SLURM_JOB_ID
cp -r {images} mine/job-$SLURM_JOB_ID/images
SLURM_RESTART_COUNT=1 exec {run} --checkpoint-dir mine -- sleep 600
"""


ON_TWO_NODES = """#SBATCH -p cpu --time=10
#SBATCH hetjob
#SBATCH -p gpu --gres=gpu:1 --time=10
"""


def begin_on_two_nodes(context, *words):
    """A job of an ordinary user on n1, which uses a GPU of g1. It stands after step 15, and does so again after step 18.

    Returns the cluster, the job's number and the native output.
    """
    context.become_user(own_hosts=True)
    cluster = GpuCluster(context)
    script = context.script(ON_TWO_NODES + SCRIPT.format(program=context.program))
    want = context.uninterrupted(script)
    job = cluster.submit(*words, "-o", "out", script, env=context.standing(15, 18))
    context.wait_step(15, cluster)
    has_rights_of_user(context)
    if cluster.pair(job) != ["n1", "g1"] or cluster.servers() != [("g1", "0")]:
        raise Failure(f"the job is on {cluster.pair(job)}; servers: {cluster.servers()}")
    return cluster, job, want


def goes_on_elsewhere(context, cluster, job, want):
    """The job is in the queue and goes on on n2 and g2. Slurm's warning comes there, and it goes on once more."""
    for restarts, step in ((1, 15), (2, 18)):
        harness.wait_for(lambda: not cluster.servers(), LIMIT, lambda: f"servers are left: {cluster.servers()}")
        cluster.start_again(job, restarts)
        cluster.wait_state(job, "RUNNING", restarts=restarts)
        harness.wait_for(lambda: cluster.servers() == [("g2", "0")], LIMIT, lambda: f"servers: {cluster.servers()}")
        if cluster.pair(job) != ["n2", "g2"]:
            raise Failure(f"the job continues on {cluster.pair(job)}")
        context.go(step)
        if step == 15:
            context.wait_step(18, cluster)
            cluster.command("scancel", "--signal=USR1", "--batch", job, user=context.user)
    cluster.check_result(job, want, restarts=2)
    if cluster.output().count("restarting") != 2 or "starts from the beginning" in cluster.output():
        raise Failure(f"the job was not restarted from images:\n{cluster.output()}")
    harness.wait_for(lambda: not cluster.servers(), LIMIT, lambda: f"servers are left: {cluster.servers()}")
    if os.listdir(context.path("checkpoints")):
        raise Failure(f"something of the job is left: {os.listdir(context.path('checkpoints'))}")


@case
def user_remote_gpu(context):
    """A job on a node without GPUs uses one of another node, which others cannot use; preempted, it goes on on other nodes."""
    cluster, job, want = begin_on_two_nodes(context)
    commands = map(harness.command_of, cluster.hosts["n1"].processes())
    relays = [command for command in commands if "cr-relay --connect" in command]
    server = relays[0].split()[2]
    keys = context.path(f"checkpoints/job-{job}/keys-0")
    tls = {"CUDA_REMOTE_TLS_CERT": keys + "/job.pem", "CUDA_REMOTE_TLS_KEY": keys + "/job.key", "CUDA_REMOTE_TLS_CA": keys + "/ca.pem"}

    def sessions(host, user, tls):
        words = [*cluster.hosts[host].enter, "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
        command = [*words, context.lab.tool("cr-ps"), "--server", server, "--json"]
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              timeout=harness.patient(LIMIT), env={**os.environ, **tls})  # fmt: skip

    done = sessions("n1", context.user, tls)
    if done.returncode != 0 or "globals" not in done.stdout:
        raise Failure(f"the job has no session with {server}: {done.stdout}\n{done.stderr}")
    # Another user has certificates of his own.
    mine = context.home("mine", context.other)
    words = ["setpriv", f"--reuid={context.other}", f"--regid={context.other}", "--clear-groups", "--"]
    run(*words, context.lab.tool("cr-server"), "--init-tls", mine, "--tls-client", "job")
    own = {name: path.replace(keys, mine) for name, path in tls.items()}
    for what, variables in (("her keys", tls), ("his own keys", own), ("no keys", {})):
        for host in ("n1", "n2", "g1"):
            done = sessions(host, context.other, variables)
            if done.returncode == 0 or "globals" in done.stdout:
                raise Failure(f"another user reaches the server from {host} with {what}: {done.stdout}")
    urgent = cluster.command("sbatch", "--parsable", "-p", "high", "-N2", "-w", "n1,g1", "--wrap", "sleep 2").stdout.strip()
    cluster.wait_state(job, "PENDING", restarts=1)
    cluster.wait_state(urgent, "COMPLETED")
    cluster.command("scontrol", "update", "nodename=n1,g1", "state=drain", "reason=test")
    goes_on_elsewhere(context, cluster, job, want)


@case
def user_gpu_node_failed(context):
    """The node with the GPU is lost: no CUDA call fails until Slurm requeues the job, which goes on from its last image."""
    cluster, job, want = begin_on_two_nodes(context, "--checkpoint-interval", "1s")
    folder = context.path(f"checkpoints/job-{job}/images")

    def newest():
        names = os.listdir(folder) if os.path.isdir(folder) else []
        return max([int(name[6:]) for name in names if re.fullmatch(r"image-\d+", name)], default=0)

    # One that was begun after the job has come to stand; the next one may have been before.
    before = newest()
    harness.wait_for(lambda: newest() >= before + 2, LIMIT, lambda: f"no image\n{cluster.shown_output()}")
    cluster.kill_node("g1")
    context.go(15)
    cluster.wait_state(job, "PENDING", restarts=1, limit=2 * LIMIT)
    cluster.command("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    # Launches are not waited for, so the program may have come to the next place with a GPU that was gone.
    running = lambda: [pid for pid in cluster.hosts["n1"].processes() if context.program in harness.command_of(pid)]
    harness.wait_for(lambda: not running(), LIMIT, lambda: f"the program still runs: {running()}")
    os.unlink(context.sync)
    goes_on_elsewhere(context, cluster, job, want)


# After the restarts, too, the script starts tasks on all nodes.
ON_NODES = """
set -e
echo begin
{run} {stencil} --steps 24
srun --mpi=none -n 3 /bin/bash -c 'echo task $SLURM_PROCID is $SLURM_LOCALID on node $SLURM_NODEID' | sort
echo end
"""
ON_NODES_SAY = """begin
{stencil}task 0 is 0 on node 0
task 1 is 1 on node 0
task 2 is 0 on node 1
end
"""


def run_on_nodes(context, mpi, run, lost):
    """Three ranks of an ordinary user's job on two nodes. Preempted, they go on on two others; when one of these is lost,
    from the last images, on the first two; and at the end all on one node.

    `lost`: which node of the two."""
    context.become_user(own_hosts=True)
    context.lab.env.update(HOME=context.folder, SHELL="/bin/sh")
    cluster = HostCluster(context)
    stencil = context.stencil(mpi)
    want = ON_NODES_SAY.format(stencil=context.native_stencil(mpi, stencil, 3, 24))
    script = context.script(ON_NODES.format(run=run, stencil=stencil))
    words = ("--checkpoint-addresses", "10.98.0.50-10.98.0.99", "--checkpoint-interval", "1s", "-N2", "-n3", "-w", "n1,n2")
    job = cluster.submit(*words, "-o", "out", "-e", "out-errors", script, env=context.standing(8, 12, 16))
    context.wait_step(8, cluster)
    folder = context.path(f"checkpoints/job-{job}/images")

    def complete():
        names = os.listdir(folder) if os.path.isdir(folder) else []
        return [int(name[6:]) for name in names if all(os.path.exists(f"{folder}/{name}/member-{i}/manifest.pb") for i in (1, 2))]

    def goes_on(restarts, step, *nodes):
        cluster.start_again(job, restarts)
        cluster.wait_state(job, "RUNNING", restarts=restarts)
        got = cluster.ask("scontrol", "show", "hostnames", cluster.facts(job)["NodeList"]).split()
        if got != list(nodes):
            raise Failure(f"the job continues on {got}, not on {nodes}")
        context.go(step)

    urgent = cluster.command("sbatch", "--parsable", "-p", "high", "--exclusive", "-w", "n1,n2", "--wrap", "sleep 2").stdout.strip()
    cluster.wait_state(job, "PENDING", restarts=1)
    cluster.command("scontrol", "update", f"jobid={job}", "ReqNodeList=")
    cluster.wait_state(urgent, "COMPLETED")
    cluster.drain("n1", "n2")
    goes_on(1, 8, "n3", "n4")
    context.wait_step(12, cluster)
    # One that was begun after the job has come to stand; the next one may have been before.
    before = max(complete(), default=0)
    harness.wait_for(lambda: max(complete(), default=0) >= before + 2, LIMIT, lambda: f"no images\n{cluster.shown_output()}")
    cluster.kill_node(lost)
    os.unlink(context.sync)
    cluster.wait_state(job, "PENDING", restarts=2, limit=3 * LIMIT)
    cluster.drain("n3", "n4")
    cluster.resume("n1", "n2")
    goes_on(2, 12, "n1", "n2")
    context.wait_step(16, cluster)
    cluster.command("scontrol", "requeue", job)
    cluster.wait_state(job, "PENDING", restarts=3)
    cluster.drain("n1")
    cluster.command("scontrol", "update", f"jobid={job}", "NumNodes=1")
    goes_on(3, 16, "n2")
    cluster.check_result(job, want, restarts=3, limit=2 * LIMIT)
    errors = cluster.output("out-errors")
    if errors.count("restarting") != 3 or "starts from the beginning" in errors:
        raise Failure(f"the job was not restarted from images:\n{errors}")
    # What Open MPI's mpirun says of a SIGCONT, and what becomes of it while tasks are started.
    if "Forwarding signal" in errors or "ORTE does not know" in errors:
        raise Failure(f"a checkpoint was noticed:\n{errors}")
    if os.listdir(context.path("checkpoints")):
        raise Failure(f"something of the job is left: {os.listdir(context.path('checkpoints'))}")


@case
def user_nodes_mpirun(context):
    """A job on two nodes with Open MPI's mpirun; the batch script's node is lost."""
    run_on_nodes(context, "openmpi", "mpirun.openmpi -n 3", "n3")


@case
def user_nodes_pmix(context):
    """The same with srun --mpi=pmix; the other node is lost."""
    run_on_nodes(context, "openmpi", "srun --mpi=pmix", "n4")


@case
def user_nodes_pmi2(context):
    """The same with srun --mpi=pmi2 and MPICH."""
    run_on_nodes(context, "mpich", "srun --mpi=pmi2", "n4")


@case
def user_foreign_image(context):
    """Another user cannot have the image of a job restarted by a job of his."""
    context.become_user()
    cluster = Cluster(context)
    job, want = submit_and_cancel(context, cluster)
    images = context.path(f"checkpoints/job-{job}/images")
    copy, anna, folder = os.path.join(context.lab.folder, "copy"), context.user, context.folder
    shutil.copytree(images, copy)
    for above, folders, leaves in os.walk(copy):
        os.chmod(above, 0o755)
        for leaf in leaves:
            os.chmod(os.path.join(above, leaf), 0o644)
    context.user, context.folder = context.other, context.home("bert", context.other)
    text = OTHERS_IMAGES.format(images=copy, run=context.lab.tool("cr-slurm-run"))
    his = cluster.command("sbatch", "--parsable", "-o", "out", context.script(text), user=context.other).stdout.strip()
    cluster.wait_state(his, "FAILED")
    if f"is of a job of user {anna}" not in cluster.output() or cluster.facts(his)["ExitCode"] != "125:0":
        raise Failure(f"another user's image was not refused: {cluster.facts(his)}\n{cluster.output()}")
    context.user, context.folder = anna, folder
    cluster.command("scontrol", "requeue", job)
    cluster.start_again(job)
    context.go(15)
    cluster.check_result(job, want)


def run_one(name, options):
    if os.geteuid() != 0:
        raise Failure("slurm.py needs root")
    own_network()
    with harness.Lab(options.product, keep=options.keep) as lab:
        try:
            CASES[name](Context(lab, options))
        except Exception:
            logs = os.path.join(lab.folder, "all-logs")
            harness.keep_logs(lab, logs, name)
            print(open(logs, errors="replace").read(), flush=True)
            raise
        finally:
            kill_all(processes_here())
            for kept in NETWORKS.values():
                os.close(kept)
            NETWORKS.clear()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--slurm", required="--list" not in sys.argv)
    harness.run_cases(arguments, CASES, run_one)
