# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests share: finding the product's files, starting servers and jobs, and waiting with a limit.

Python 3 standard library only, so that it also runs on a GPU machine that has nothing else. Every process that is started
here is ended here, also after a failure; every wait has a limit; every failure says what was run and shows its output.

Not thread-safe; one Lab for each test.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback

TOOLS = (
    "cr-run", "cr-server", "cr-worker", "cr-nvml", "cr-relay", "cr-checkpoint", "cr-restart", "cr-migrate", "cr-inspect", "cr-ps",
    "cr-trace", "cr-sbatch", "cr-slurm-run", "cr-srun",
)  # fmt: skip
LIBRARIES = ("libcuda-remote.so", "libcuda-remote-nvml.so", "libcuda-remote-preload.so", "libsoftgpu.so")

# Ranks of MPI wait by asking again and again. Where there are few processors, they are to let others run meanwhile.
if os.cpu_count() < 8:
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")


def disk_bytes(folder):
    """What the files below a folder take on the disk; each once, however many names it has."""
    files = {}
    for place, _, leaves in os.walk(folder):
        for leaf in leaves:
            facts = os.lstat(os.path.join(place, leaf))
            files[facts.st_ino] = facts.st_blocks * 512
    return sum(files.values())


class Failure(Exception):
    """A test that did not go as it should; the text is for a person."""


def criu_here():
    """The CRIU with which the tools save and restore processes; None if there is none."""
    criu = os.environ.get("CUDA_REMOTE_CRIU") or "/opt/cuda-remote/criu/criu"
    return criu if os.access(criu, os.X_OK) else shutil.which("criu", path=os.environ["PATH"] + ":/usr/sbin:/usr/local/sbin")


def find(root, name):
    """The file called `name` under `root`, links followed; None if there is none."""
    for folder, _, leaves in os.walk(root, followlinks=True):
        if name in leaves:
            return os.path.join(folder, name)
    return None


def stage_from_runfiles(root, into):
    """Copies the product's files out of Bazel's runfiles into one folder, as an installation has them.

    Real files, not links: the programs look for their companions beside themselves.
    """
    os.makedirs(into, exist_ok=True)
    missing = []
    for name in TOOLS + LIBRARIES:
        source = find(root, name)
        if source is None:
            missing.append(name)
            continue
        target = os.path.join(into, name)
        try:
            os.link(os.path.realpath(source), target)
        except OSError:
            shutil.copy2(os.path.realpath(source), target)
    return missing


class Process:
    """A process with its output in files, in a process group of its own."""

    def __init__(self, lab, name, command, env=None, stdout=None):
        self.name = name
        self.command = command
        self.log = os.path.join(lab.folder, name + ".err")
        self.out = stdout or os.path.join(lab.folder, name + ".out")
        full = dict(os.environ)
        full.update(lab.env)
        full.update(env or {})
        full = {key: value for key, value in full.items() if value is not None}
        with open(self.out, "ab") as out, open(self.log, "ab") as log:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=full, cwd=lab.folder, start_new_session=True
            )

    @property
    def pid(self):
        return self.child.pid

    def running(self):
        return self.child.poll() is None

    def wait(self, limit):
        """The exit code; raises Failure after `limit` seconds (Limit)."""
        patience = Limit(limit)
        while not patience.over():
            try:
                return self.child.wait(1)
            except subprocess.TimeoutExpired:
                continue
        raise Failure(f"{self.name} did not end within {limit} s\n{self.describe()}")

    def expect_success(self, limit):
        code = self.wait(limit)
        if code != 0:
            raise Failure(f"{self.name} ended with exit code {code}\n{self.describe()}")

    def stdout(self):
        with open(self.out, "rb") as f:
            return f.read()

    def stderr(self):
        with open(self.log, "rb") as f:
            return f.read().decode(errors="replace")

    def describe(self):
        tail = self.stderr()[-3000:]
        return f"  command: {' '.join(self.command)}\n  stderr: {tail}\n  stdout: {self.stdout()[-1000:].decode(errors='replace')}"

    def kill(self, sig=signal.SIGKILL):
        try:
            os.killpg(self.child.pid, sig)
        except (ProcessLookupError, PermissionError):
            pass

    def end(self):
        if self.running():
            self.kill(signal.SIGTERM)
            try:
                self.child.wait(3)
            except subprocess.TimeoutExpired:
                self.kill()
                self.child.wait(patient(5))


class Server(Process):
    """A cr-server with its own folder; `address` is what clients are told."""

    def __init__(self, lab, name, listen=False, tls=None, extra=()):
        self.directory = os.path.join(lab.folder, name)
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        command = [lab.tool("cr-server"), "--dir", self.directory]
        self.unix = "unix:" + os.path.join(self.directory, "session.sock")
        self.tcp = None
        self.tls = tls
        if listen:
            self.tcp = f"127.0.0.1:{free_port()}"
            command += ["--listen", self.tcp]
            if tls:
                command += ["--tls-cert", tls.server_cert, "--tls-key", tls.server_key, "--tls-ca", tls.ca]
            else:
                command += ["--insecure-tcp", "127.0.0.1"]
        if lab.workers is not None:
            command += ["--workers", str(lab.workers)]
        command += list(extra)
        super().__init__(lab, name + "-server", command)
        self.lab = lab
        path = os.path.join(self.directory, "session.sock")
        wait_for(lambda: connects(path) or not self.running(), 30, lambda: f"{self.name} does not answer\n{self.describe()}")
        if not self.running():
            raise Failure(f"{self.name} ended at once\n{self.describe()}")
        if self.tcp:
            host, port = self.tcp.split(":")
            wait_for(lambda: tcp_connects(host, int(port)), 20, lambda: f"{self.tcp} does not answer\n{self.describe()}")

    def workers(self):
        """The PIDs of its worker processes."""
        return children_of(self.pid, "cr-worker")


def children_of(parent, name):
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as f:
                text = f.read()
        except OSError:
            continue
        comm = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        if int(fields[1]) == parent and comm.startswith(name[:15]) and fields[0] != "Z":
            found.append(int(entry))
    return found


def handles_of(pids):
    """Descriptors of those processes that are there: a number may be another process's once one has ended."""
    handles = []
    for pid in pids:
        try:
            handles.append(os.pidfd_open(pid))
        except ProcessLookupError:
            pass
    return handles


def descendants(parent):
    """The PIDs of all processes below `parent`, nearest first."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as f:
                    text = f.read()
            except OSError:
                continue
            children.setdefault(int(text[text.rindex(")") + 2 :].split()[1]), []).append(int(entry))
    found, queue = [], [parent]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def relays_at(path):
    """The PIDs of the cr-relays whose socket this is: one, or none where a cr-server listens there."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as f:
                words = f.read().split(b"\0")
        except OSError:
            continue
        if os.path.basename(words[0]) == b"cr-relay" and os.fsencode(path) in words:
            found.append(int(entry))
    return found


def expect_usual_policy(pids):
    """None of these processes' threads gives way to other processes, or goes before them."""
    for pid in pids:
        try:
            policies = {int(thread): os.sched_getscheduler(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}
            with open(f"/proc/{pid}/comm") as f:
                name = f.read().strip()
            group = ""
            if os.path.exists(f"/proc/{pid}/autogroup"):
                with open(f"/proc/{pid}/autogroup") as f:
                    group = f.read().strip()
        except OSError:
            continue  # it has ended
        if set(policies.values()) != {os.SCHED_OTHER} or (group and not group.endswith(" nice 0")):
            raise Failure(f"scheduling of {name} (PID {pid}): policies {policies}, {group}")


def connects(path):
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.settimeout(1)
            s.connect(path)
            return True
    except OSError:
        return False


def tcp_connects(host, port):
    try:
        socket.create_connection((host, port), 1).close()
        return True
    except OSError:
        return False


def own_network():
    """From now on this process and what it starts have the loopback interface and all TCP ports to themselves, if the caller may.

    The ports of a stopped job are free for everybody. Another test that runs beside this one would take one of them now
    and then, and then the job could not be restarted.
    """
    unshare_network, get_flags, set_flags, up = 0x40000000, 0x8913, 0x8914, 1  # unshare(2), netdevice(7)
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(unshare_network) != 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = bytearray(struct.pack("16sh22x", b"lo", 0))
        fcntl.ioctl(any_socket, get_flags, request)
        flags = struct.unpack_from("h", request, 16)[0]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh22x", b"lo", flags | up))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def slowness():
    """How many times longer everything takes now than on an idle machine: the processes that want to run, for each processor."""
    with open("/proc/loadavg") as f:
        average, _, _, counts, _ = f.read().split()
    return max(1.0, max(float(average), int(counts.split("/")[0])) / os.cpu_count())


class Limit:
    """A time limit, in seconds of an idle machine. On a busy one it is over later: it is there for what hangs."""

    def __init__(self, seconds):
        self.left, self.looked = seconds, time.monotonic()

    def over(self):
        """To be asked about once a second or more often."""
        now = time.monotonic()
        self.left -= (now - self.looked) / slowness()
        self.looked = now
        return self.left < 0


def patient(seconds):
    """The same for functions that take a number: `seconds`, and more on a busy machine or one that becomes busy."""
    return seconds * max(10, slowness())


def sleeps(pid):
    """Whether this process of one thread is in clock_nanosleep."""
    return open(f"/proc/{pid}/syscall").read().split()[0] == "230"


def pause(seconds):
    """For what nothing tells of: sleeps so long on an idle machine, and longer on a busy one."""
    time.sleep(seconds * slowness())


def wait_for(condition, limit, message):
    """Polls until `condition()` is true; raises Failure with `message()` after `limit` seconds (Limit)."""
    patience = Limit(limit)
    pause = 0.005
    while not condition():
        if patience.over():
            raise Failure(f"after {limit} s: {message()}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


class Certificates:
    """A certificate authority, a server's certificate for 127.0.0.1 and a client's, made by openssl."""

    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        path = lambda name: os.path.join(folder, name)
        self.ca, self.server_cert, self.server_key = path("ca.pem"), path("server.pem"), path("server.key")
        self.client_cert, self.client_key = path("client.pem"), path("client.key")
        run = lambda *args: subprocess.run(args, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        run("openssl", "req", "-x509", *curve, "-keyout", path("ca.key"), "-out", self.ca, "-subj", "/CN=test authority")
        for name, cert, key in (("server", self.server_cert, self.server_key), ("client", self.client_cert, self.client_key)):
            run("openssl", "req", *curve, "-keyout", key, "-out", path(name + ".csr"), "-subj", f"/CN={name}")
            with open(path(name + ".ext"), "w") as f:
                f.write("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
            run("openssl", "x509", "-req", "-in", path(name + ".csr"), "-CA", self.ca, "-CAkey", path("ca.key"),
                "-CAcreateserial", "-out", cert, "-days", "2", "-extfile", path(name + ".ext"))  # fmt: skip


class Job(Process):
    """A program under cr-run, with its hook's file."""

    def __init__(self, lab, name, command, server, pause_at=(), step_ms=0, env=None, tls=None, gpu=None):
        self.lab = lab
        self.sync = os.path.join(lab.folder, name + ".sync")
        self.directory = os.path.join(lab.folder, name + ".job")
        variables = {"CR_TEST_SYNC_FILE": self.sync, "CUDA_REMOTE_JOB_DIR": self.directory}
        if pause_at:
            variables["CR_TEST_PAUSE_AT"] = ",".join(str(step) for step in pause_at)
        if step_ms:
            variables["CR_TEST_STEP_MS"] = str(step_ms)
        variables.update(env or {})
        full = [lab.tool("cr-run"), *lab.run_options]
        if server:
            full += ["--server", server]
        if gpu is not None:
            full += ["--gpu", str(gpu)]
        if tls:
            variables.update(tls_environment(tls))
        super().__init__(lab, name, full + ["--"] + command, variables)

    @property
    def id(self):
        """How the tools are told which job is meant."""
        return self.directory

    def expect_usual_policy(self, carrier=None):
        """A tool has left no process of the job with its own scheduling policy, nor the relay that the job uses now."""
        with open(os.path.join(self.directory, "gpu-server")) as f:
            server = f.readline().strip()
        carrier = carrier or self
        expect_usual_policy([carrier.pid, *descendants(carrier.pid), *relays_at(server.removeprefix("unix:"))])

    def steps(self):
        try:
            with open(self.sync) as f:
                return f.read().split("\n")
        except OSError:
            return []

    def wait_paused(self, step, limit, carrier=None):
        """Waits until the job stands after `step`. `carrier`: the process that the job now depends on, a cr-restart."""
        carrier = carrier or self
        wait_for(
            lambda: f"paused {step}" in self.steps() or not carrier.running(),
            limit,
            lambda: f"{carrier.name} did not reach step {step}\n{carrier.describe()}",
        )
        if f"paused {step}" not in self.steps():
            raise Failure(f"{carrier.name} ended before step {step}\n{carrier.describe()}")

    def wait_steps(self, count, limit):
        """Waits until the job has made at least `count` steps."""
        reached = lambda: len(self.steps()) > count
        wait_for(
            lambda: reached() or not self.running(), limit, lambda: f"{self.name} did not make {count} steps\n{self.describe()}"
        )
        if not reached():
            raise Failure(f"{self.name} ended before {count} steps\n{self.describe()}")

    def hurry(self):
        """From the next step on it sleeps no more (step_ms)."""
        open(f"{self.sync}.fast", "w").close()

    def go(self, step):
        open(f"{self.sync}.go.{step}", "w").close()


def tls_environment(tls):
    return {
        "CUDA_REMOTE_TLS_CA": tls.ca,
        "CUDA_REMOTE_TLS_CERT": tls.client_cert,
        "CUDA_REMOTE_TLS_KEY": tls.client_key,
    }


class Lab:
    """A folder, the product's files, and everything that was started; use it in a `with`.

    All its servers use one driver library, also those that cr-run starts: `driver`, or the software GPU among the product's
    files. Never the machine's own unless it is named: a machine with a GPU must test the same as one without.
    """

    def __init__(self, product, driver=None, keep=False):
        self.product = os.path.abspath(product)
        # Short: the path of a Unix socket may have 107 characters.
        self.folder = tempfile.mkdtemp(prefix="crt-", dir=os.environ.get("CR_TEST_DIR", "/tmp"))
        self.keep = keep
        self.workers = None  # that servers keep ready; None: as many as they like
        self.run_options = ()  # more options of cr-run
        self.processes = []
        self._paths = {}
        self.driver = driver or self.tool("libsoftgpu.so")
        self.software = "softgpu" in os.path.basename(self.driver)
        self.env = {"CUDA_REMOTE_LOG": os.environ.get("CUDA_REMOTE_LOG"), "CUDA_REMOTE_DRIVER": self.driver}

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        for process in reversed(self.processes):
            below = handles_of(descendants(process.pid)) if process.running() else []
            process.end()
            for handle in below:
                try:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                os.close(handle)
        if self.keep or (kind is not None and os.environ.get("CR_TEST_KEEP")):
            print(f"kept: {self.folder}", flush=True)
        else:
            # cr-hostd mounts some where the folder is in memory.
            places = [line.split()[4] for line in open("/proc/self/mountinfo")]
            for place in reversed([place for place in places if place.startswith(self.folder + "/")]):
                subprocess.run(["umount", "--lazy", place])
            shutil.rmtree(self.folder, ignore_errors=True)

    def tool(self, name):
        if name not in self._paths:
            path = find(self.product, name)
            if path is None:
                raise Failure(f"{name} is not in {self.product}; build the product first")
            self._paths[name] = path
        return self._paths[name]

    def start(self, process):
        self.processes.append(process)
        return process

    def server(self, name="server", **options):
        return self.start(Server(self, name, **options))

    def job(self, name, command, server, **options):
        return self.start(Job(self, name, command, server, **options))

    def run(self, name, command, limit=120, env=None, expect=0):
        """Runs a command to its end; Failure unless its exit code is `expect` (None: any but 0)."""
        process = self.start(Process(self, name, command, env))
        code = process.wait(limit)
        if (expect is None and code == 0) or (expect is not None and code != expect):
            raise Failure(f"{name} ended with exit code {code}\n{process.describe()}")
        return process

    def native_environment(self):
        """What makes a program find the software GPU (or, with a real driver, nothing)."""
        if not self.software:
            return {}
        folder = os.path.join(self.folder, "native")
        if not os.path.isdir(folder):
            os.makedirs(folder)
            os.symlink(os.path.realpath(self.driver), os.path.join(folder, "libcuda.so.1"))
        return {"LD_LIBRARY_PATH": folder, "SOFTGPU_LATE_MS": None}

    def native(self, name, command, limit=120):
        """The program's output without cuda-remote."""
        return self.run(name, command, limit, self.native_environment()).stdout()


def same(what, got, want):
    if got == want:
        return
    show = lambda data: data.decode(errors="replace")[-1500:]
    raise Failure(f"{what}: the output differs from the native run's\n--- native\n{show(want)}\n--- got\n{show(got)}")


# What each line says that accuses a program of breaking CUDA's rules for managed memory.
ACCUSES = "which devices without concurrentManagedAccess do not allow"


def not_accused(process):
    """Its program keeps the rules, and nothing on its stderr says otherwise."""
    if ACCUSES in process.stderr():
        raise Failure(f"{process.name}: the program is accused of what it does not do\n{process.describe()}")


def describe_processes(lab):
    """What every process of a lab is doing, for a person who looks for the reason why a case did not end: one text.

    Those that catch SIGUSR1 as the programs of tests/frameworks do write the stacks of their threads to their stderr.
    """
    text = []
    for process in lab.processes:
        if not process.running():
            continue
        for pid in [process.pid] + descendants(process.pid):
            try:
                folder = f"/proc/{pid}"
                with open(f"{folder}/status") as f:
                    status = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
                command = command_of(pid)
                lines = [f"== {process.name}: PID {pid}: {command[:300]}"]
                fields = ("State", "PPid", "NSpid", "TracerPid", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")
                lines.append("   " + ", ".join(f"{field} {status[field].strip()}" for field in fields if field in status))
                for thread in sorted(os.listdir(f"{folder}/task"), key=int):
                    task = f"{folder}/task/{thread}"
                    what = [f"   thread {thread} {read(task + '/comm')} {state_of(thread)}", read(task + "/wchan")]
                    what += ["syscall " + read(task + "/syscall"), " < ".join(read(task + "/stack").split("\n"))]
                    lines.append("; ".join(part for part in what if part))
                text += lines
                catches = int(status["SigCgt"], 16) >> (signal.SIGUSR1 - 1) & 1
                if catches and os.path.basename(command.partition(" ")[0]).startswith("python"):
                    handle = os.pidfd_open(pid)
                    signal.pidfd_send_signal(handle, signal.SIGUSR1)
                    os.close(handle)
            except (OSError, ValueError, KeyError) as error:
                text.append(f"== {process.name}: PID {pid}: {error}")
    time.sleep(2 if text else 0)  # until the stacks are written
    return "\n".join(text)


def read(path):
    """The text of a short file, without the end of its last line; "" if it cannot be read."""
    try:
        with open(path, errors="replace") as f:
            return f.read().strip()
    except OSError:
        return ""


def keep_logs(lab, path, title):
    """Appends to one file what the processes of a failed case are doing and the ends of all their logs."""
    processes = describe_processes(lab)
    with open(path, "ab") as out:
        out.write(f"\n######## {title}\n{processes}\n".encode())
        for process in lab.processes:
            for kind, name in (("stderr", process.log), ("stdout", process.out)):
                try:
                    with open(name, "rb") as f:
                        data = f.read()
                except OSError:
                    continue
                if data:
                    out.write(f"==== {process.name} {kind}\n".encode() + data[-40000 if kind == "stderr" else -6000 :] + b"\n")
        for folder, _, leaves in os.walk(lab.folder):
            for leaf in leaves:
                if leaf.endswith(".log"):
                    with open(os.path.join(folder, leaf), "rb") as f:
                        out.write(f"==== {os.path.join(folder, leaf)}\n".encode() + f.read()[-6000:] + b"\n")


def state_of(pid):
    """The state of a process: one letter, as in proc(5); "" if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def parent_of(pid):
    """The PID of a process's parent; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return int(f.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command_of(pid):
    """The command line of a process, a space behind each word but the last; empty for one that is gone.
    Any bytes may stand in it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def processes_with(word):
    """The processes that were started with `word` in their command line."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as f:
                if word.encode() in f.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            pass
    return found


def fail_on_sigterm():
    """From now on SIGTERM makes the case that runs fail, as if a limit of its own were over, so that its logs are kept and its
    processes ended. Returns a list that is not empty after that: no other case must be started then.
    """
    ended = []

    def end(*_):
        ended.append(True)
        raise Failure("not done when this test was ended (SIGTERM)")

    signal.signal(signal.SIGTERM, end)
    return ended


def run_cases(parser, cases, run_one):
    """The rest of a script that runs named cases: parses the command line, runs the chosen ones one after the other, prints a
    line for each and what failed, and exits with 1 if any did.

    `parser` has the script's own options; --product, --apps, --only, --keep and --list are added. `cases`: functions by name,
    whose first line of documentation --list shows. `run_one(name, options)` runs one; what it raises is the failure.
    """
    needed = "--list" not in sys.argv
    parser.add_argument("--product", required=needed)
    parser.add_argument("--apps", required=needed)
    parser.add_argument("--only", default=",".join(cases))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    width = max(map(len, cases))
    if options.list:
        for name, function in cases.items():
            print(f"{name:{width}} {function.__doc__}")
        return
    if not getattr(options, "driver", None):  # else libraries for several GPUs may want to see the machine's network
        own_network()
    ended = fail_on_sigterm()
    failed = 0
    for name in options.only.split(","):
        if ended:
            break
        if name not in cases:
            parser.error(f"{name} is not one of: {' '.join(cases)}")
        start = time.monotonic()
        error = None
        try:
            run_one(name, options)
        except Failure as failure:
            error = str(failure)
        except Exception:
            error = traceback.format_exc()
        failed += error is not None
        print(f"{'FAIL' if error else 'ok  '} {name:{width}} {time.monotonic() - start:7.2f} s", flush=True)
        if error:
            print("    " + error.replace("\n", "\n    "), flush=True)
    sys.exit(1 if failed else 0)


def run_cases_in_labs(parser, cases, context):
    """run_cases for cases that each have a lab of their own: calls the case with what `context(lab, options)` makes.

    --programs and --logs are added too. With --logs, what the processes of a case that failed wrote is kept there.
    """
    parser.add_argument("--programs", required="--list" not in sys.argv)
    parser.add_argument("--logs")

    def run_one(name, options):
        with Lab(options.product, getattr(options, "driver", None), options.keep) as lab:
            try:
                cases[name](context(lab, options))
            except Exception:
                if options.logs:
                    keep_logs(lab, options.logs, name)
                raise

    run_cases(parser, cases, run_one)
