# SPDX-License-Identifier: Apache-2.0
"""The stages of the benchmark: each measures a group of rows, natively, over the ring and over gRPC in turns.

A stage is a function of a Bench; `expected` says which rows it must bring out. Values go to Bench.add, one for each round;
what cannot be measured goes to Bench.fail, with the reason. Python standard library only.
"""

import glob
import json
import os
import socket
import struct
import subprocess
import sys
import time

import harness

WAYS = ("native", "ring", "grpc")
HERE = os.path.dirname(os.path.realpath(__file__))


class OutOfTime(Exception):
    """The budget of the run is used up."""


class Bench:
    """What all stages share: lab, server, options, and the values so far."""

    def __init__(self, lab, options, deadline):
        self.lab = lab
        self.options = options
        self.deadline = deadline
        self.ways = [way for way in WAYS if way in options.ways.split(",")]
        self.server = lab.server(listen=True)
        self.rows = {}  # name -> {"unit", "better", "group", way: [values] or {"error"}}
        self.group = ""
        self.gpu = None
        self.number = 0
        self.has_torch = self.has_cublas = False
        # What a program needs that is started without cr-run: a folder with the client library under the driver's name.
        self.library = os.path.join(lab.folder, "lib")
        os.makedirs(self.library)
        for name in os.listdir(options.product):
            os.symlink(os.path.realpath(os.path.join(options.product, name)), os.path.join(self.library, name))
        os.symlink(os.path.realpath(lab.tool("libcuda-remote.so")), os.path.join(self.library, "libcuda.so.1"))

    def left(self):
        return self.deadline - time.monotonic()

    def limit(self, most):
        """How long the next process may take; raises OutOfTime if there is no time for one."""
        left = self.left()
        if left < 2:
            raise OutOfTime()
        return min(most, left)

    def row(self, name, unit, better="lower"):
        return self.rows.setdefault(name, {"unit": unit, "better": better, "group": self.group})

    def add(self, name, way, value, unit, better="lower"):
        row = self.row(name, unit, better)
        if not isinstance(row.get(way), dict):
            row.setdefault(way, []).append(float(value))

    def fail(self, name, way, error, unit="", better="lower"):
        self.row(name, unit, better)[way] = {"error": str(error).strip().splitlines()[0][:300]}

    def program(self, name):
        path = harness.find(self.options.programs, name)
        if path is None:
            raise harness.Failure(f"the program {name} is not in {self.options.programs}; bazel build //bench:programs")
        return os.path.abspath(path)

    def environment(self, way):
        """For a program that is started directly."""
        if way == "native":
            return self.lab.native_environment()
        old = os.environ.get("LD_LIBRARY_PATH")
        return {
            "LD_LIBRARY_PATH": self.library + (":" + old if old else ""),
            "CUDA_REMOTE_SERVER": self.server.unix if way == "ring" else self.server.tcp,
        }

    def start(self, way, command, env=None, name=""):
        """Starts a program in that way, remotely under cr-run."""
        self.number += 1
        name = f"{way}{self.number}{name}"
        if way == "native":
            environment = dict(self.lab.native_environment(), **(env or {}))
            return self.lab.start(harness.Process(self.lab, name, command, environment))
        return self.lab.job(name, command, self.server.unix if way == "ring" else self.server.tcp, env=env)

    def rounds(self, names, units, measure, better="lower", rounds=None, ways=None, warm_up=True):
        """Calls measure(way) for each way in turn, and round after round; a warm-up round goes first and is not counted.

        measure returns one value for each of `names`; `units` and `better` are one for all, or lists. After an error or a lack
        of time a way is left out.
        """
        units = [units] * len(names) if isinstance(units, str) else units
        better = [better] * len(names) if isinstance(better, str) else better
        facts = list(zip(names, units, better))
        out = set()
        rounds = rounds or self.options.rounds
        for number in range(-1 if self.options.warm_up and warm_up else 0, rounds):
            for way in ways or self.ways:
                if way in out:
                    continue
                try:
                    values = measure(way)
                except (harness.Failure, OutOfTime, ValueError, KeyError, OSError) as error:
                    out.add(way)
                    for name, unit, direction in facts:
                        if not self.rows.get(name, {}).get(way):
                            reason = "not run: out of time" if isinstance(error, OutOfTime) else error or repr(error)
                            self.fail(name, way, reason, unit, direction)
                    continue
                if number >= 0:
                    for (name, unit, direction), value in zip(facts, values):
                        self.add(name, way, value, unit, direction)


def last_json(process, line=-1):
    """The JSON object on one line of a program's output; a Failure if that is an error."""
    lines = process.stdout().decode(errors="replace").splitlines()
    try:
        value = json.loads(lines[line])
    except (IndexError, ValueError):
        raise harness.Failure(f"{process.name} printed no JSON\n{process.describe()}")
    if "error" in value:
        raise harness.Failure(value["error"])
    return value


def finish(bench, process, most):
    try:
        process.wait(bench.limit(most))
    finally:
        if process.running():
            process.end()
    if process.child.returncode != 0 and b'"error"' not in process.stdout():
        raise harness.Failure(f"{process.name} ended with exit code {process.child.returncode}\n{process.describe()}")
    return process


def wait_line(bench, process, most=60):
    """Waits until the program has printed a line."""
    until = time.monotonic() + bench.limit(most)
    while b"\n" not in process.stdout():
        if not process.running() or time.monotonic() > until:
            raise harness.Failure(f"{process.name} printed nothing\n{process.describe()}")
        time.sleep(0.01)
    return last_json(process, 0)


def table_of_program(bench, command, most, group_rows, rounds, warm_up):
    """Rows of a program that prints {"gpu", "rows"} (api_cost, pytorch.py), in rounds."""
    out = {}
    for number in range(-1 if warm_up else 0, rounds):
        for way in bench.ways:
            if way in out:
                continue
            try:
                extra = ["--quick"] if number < 0 and "--quick" not in command else []
                process = finish(bench, bench.start(way, command + extra), most)
                parsed = json.loads(process.stdout())
            except OutOfTime:
                out[way] = "not run: out of time"
                continue
            except (harness.Failure, ValueError) as error:
                out[way] = str(error)
                continue
            bench.gpu = bench.gpu or parsed["gpu"]
            for row in parsed["rows"]:
                better = "higher" if row["unit"].endswith("/s") else "lower"
                bench.row(row["name"], row["unit"], better)
                if "error" in row:
                    bench.fail(row["name"], way, row["error"], row["unit"], better)
                elif number >= 0:
                    bench.add(row["name"], way, row["value"], row["unit"], better)
    for way, error in out.items():
        for name in set(group_rows) | {n for n, r in bench.rows.items() if r["group"] == bench.group}:
            if way not in bench.row(name, ""):
                bench.fail(name, way, error)


# ------------------------------------------------------------------------------------------------------------ calls

CALL_ROWS = [
    "first kernel, from cuInit", "launch, no arguments: issue", "launch, no arguments: sustained",
    "launch, 8 arguments: issue", "launch, 8 arguments: sustained", "launch + stream synchronize",
    "memcpy 4 B device to host", "memcpy 4 B host to device", "memset 4 B", "event query",
    "event record: issue", "event record: sustained", "event record, with timing: issue", "event record, with timing: sustained",
    "cudaGetDevice", "pointer attributes", "malloc+free 2 MB", "malloc+free 1 KB",
    "mallocAsync+freeAsync 1 KB", "stream create+destroy", "pageable copy to device", "pageable copy to host",
    "pinned copy to device", "pinned copy to host", "graph of 100 kernels, launch + synchronize",
] + [f"{kind} copy {size} to {end}" for kind in ("pinned", "pageable") for size in ("64 KB", "1 MB")
     for end in ("device", "host")]  # fmt: skip


def calls(bench):
    command = [bench.program("api_cost"), "--copy-mb", str(bench.options.copy_mb)]
    table_of_program(bench, command + (["--quick"] if bench.options.quick else []), 120, CALL_ROWS,
                     bench.options.rounds, bench.options.warm_up)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- managed

MANAGED_ROWS = [
    "managed: kernel bandwidth", "managed: first use by a kernel", "managed: read by the host after a kernel",
] + [f"managed: host and kernel in turn, {size}" for size in ("64 KB", "1 MB", "64 MB")] + [
    f"{kind}: allocate + free {size}" for kind in ("managed", "pinned") for size in ("4 KB", "1 MB", "16 MB")
] + [
    f"{kind}: {kernels} on 64 KB of 256 MB + wait" for kind in ("pinned", "registered") for kernels in ("kernel", "10 kernels")
] + ["pinned: copy 4 KB beside 256 MB"] + [
    f"registered: register + unregister {size}" for size in ("4 KB", "1 MB", "1 GB")
] + [f"registered copy to {end}" for end in ("device", "host")] + [
    f"managed program: {name}" for name in ("saxpy", "molecular dynamics", "products of matrices",
                                            "9000 allocations and frees")
]  # fmt: skip
CUBLAS_ROW = "managed program: cuBLAS products"


def managed(bench):
    command = [bench.program("managed_cost"), "--mb", str(bench.options.managed_mb)]
    quick = ["--quick"] if bench.options.quick else []
    # A run is long, and its rows have their warm-ups.
    table_of_program(bench, command + quick, 150, MANAGED_ROWS, min(2, bench.options.rounds), False)
    command = [bench.options.python, os.path.join(HERE, "cublas_products.py")]
    # The software GPU does not run cuBLAS.
    bench.has_cublas = not bench.lab.software and subprocess.run(command + ["--probe"], capture_output=True).returncode == 0
    if bench.has_cublas:
        table_of_program(bench, command + quick, 90, [CUBLAS_ROW], min(2, bench.options.rounds), False)


# ------------------------------------------------------------------------------------------------------------ start

LOAD = "library load, CUDA never used"
FIRST = "start to first kernel"
FIRST_RUN = "start to first kernel, cr-run included"


def with_environment(changes):
    """This process's environment with these changes; None: the variable is not to be there."""
    return {key: value for key, value in {**os.environ, **changes}.items() if value is not None}


def time_of_start(bench, way, program, key, arguments=()):
    """Milliseconds from the start of a process, made directly, to the moment that it prints."""
    bench.limit(30)
    env = with_environment(bench.environment(way))
    command = [bench.program(program), *arguments]
    # Not a pipe: a relay that the library starts keeps standard error open for some seconds more.
    with open(os.path.join(bench.lab.folder, "start.err"), "wb") as errors:
        before = time.monotonic_ns()
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=errors, timeout=bench.limit(60))
    if done.returncode != 0:
        with open(errors.name, errors="replace") as f:
            raise harness.Failure(f"{program} failed: {done.stdout.decode(errors='replace')[-300:]} {f.read()[-300:]}")
    return (json.loads(done.stdout)[key] - before) / 1e6


def warm_worker(bench):
    """Waits until cr-server has a worker that waits for a client, and a moment more, so that nothing of it is still starting."""
    command = [bench.lab.tool("cr-ps"), "--server", bench.server.unix, "--json"]
    until = time.monotonic() + bench.limit(60)
    while time.monotonic() < until:
        done = subprocess.run(command, capture_output=True, timeout=bench.limit(30))
        if done.returncode == 0 and json.loads(done.stdout)["server"]["warm_workers"] > 0:
            time.sleep(0.05 if bench.options.smoke else 0.3)
            return
        time.sleep(0.05)
    raise harness.Failure("cr-server has no warm worker")


def start(bench):
    def load(way):
        pairs = 3 if bench.options.smoke else 15
        plain, linked = [], []
        for _ in range(pairs):
            plain.append(time_of_start(bench, way, "nothing", "main_ns"))
            linked.append(time_of_start(bench, way, "nothing_linked", "main_ns"))
        return [sorted(linked)[pairs // 2] - sorted(plain)[pairs // 2]]

    def first(way):
        warm_worker(bench)
        return [time_of_start(bench, way, "probe", "ready_ns", ["first"])]

    def first_under_run(way):
        warm_worker(bench)
        before = time.monotonic_ns()
        process = finish(bench, bench.start(way, [bench.program("probe"), "first"]), 60)
        return [(last_json(process)["ready_ns"] - before) / 1e6]

    bench.rounds([LOAD], "ms", load)
    bench.rounds([FIRST], "ms", first, rounds=max(bench.options.rounds, 1 if bench.options.smoke else 5))
    bench.rounds([FIRST_RUN], "ms", first_under_run)


# -------------------------------------------------------------------------------------------------------------- tcp

def tcp(bench):
    """The raw stream belongs to the machine: one column, and that is the native one."""
    for connections in (1, 4):
        name = f"raw TCP, {connections} stream{'s' if connections > 1 else ''}"

        def measure(_, connections=connections):
            command = [bench.program("tcp_stream"), str(connections), "0.2" if bench.options.smoke else "1"]
            done = subprocess.run(command, capture_output=True, timeout=bench.limit(30))
            if done.returncode != 0:
                raise harness.Failure("tcp_stream failed")
            return [json.loads(done.stdout)["gb_per_s"]]

        bench.rounds([name], "GB/s", measure, "higher", ways=["native"])


# -------------------------------------------------------------------------------------------------- threads, sessions

def threads(bench):
    for count in bench.options.thread_counts:
        def measure(way, count=count):
            launches = max(20, (400 if bench.options.smoke else 40000) // count)
            command = [bench.program("probe"), "threads", str(count), str(launches)]
            result = last_json(finish(bench, bench.start(way, command), 60))
            return [result["launches_per_s"], result["issue_us"]]

        names = [f"launches, {count} threads", f"launch issue, {count} threads"]
        bench.rounds(names, ["1/s", "us"], measure, ["higher", "lower"], rounds=1, warm_up=False)

        # The same streams used by one thread: what of the difference is the driver's, whose one thread in the worker has
        # them all.
        def measure_streams(way, count=count):
            launches = 400 if bench.options.smoke else 40000
            command = [bench.program("probe"), "streams", str(count), str(launches)]
            return [last_json(finish(bench, bench.start(way, command), 60))["launches_per_s"]]

        bench.rounds([f"launches, 1 thread, {count} streams"], "1/s", measure_streams, "higher", rounds=1, warm_up=False)


def sessions(bench):
    for count in bench.options.session_counts:
        def measure(way, count=count):
            seconds = 0.3 if bench.options.smoke else 2
            flag = os.path.join(bench.lab.folder, "common-start")
            open(flag, "w").close()
            command = [bench.program("probe"), "rate", flag, str(seconds)]
            processes = []
            try:
                processes += [bench.start(way, command) for _ in range(count)]
                # All have a context before anybody begins: workers beyond the warm ones are started first.
                for process in processes:
                    wait_line(bench, process, 60)
                os.unlink(flag)
                results = [last_json(finish(bench, process, 60)) for process in processes]
            finally:
                if os.path.exists(flag):
                    os.unlink(flag)
                for process in processes:
                    process.end()
            return [sum(result["launches_per_s"] for result in results)]

        bench.rounds([f"launches, {count} sessions"], "1/s", measure, "higher", rounds=1, warm_up=False)


# ---------------------------------------------------------------------------------------------------- memory and idle

def memory_mb(pid):
    with open(f"/proc/{pid}/status") as f:
        fields = dict(line.split(":", 1) for line in f if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024 / 1e6


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_named(pids, name):
    for pid in pids:
        try:
            with open(f"/proc/{pid}/comm") as f:
                if f.read().strip() == name[:15]:
                    return pid
        except OSError:
            pass
    return None


PARTS = ("client", "worker", "server", "relay")
OVERHEAD = ("memory over native, client", "memory over native, client and worker")


def parts_of(bench, way, process):
    """The PIDs of what serves one quiet program."""
    if way == "native":
        return {"client": process.pid}
    below = harness.descendants(process.pid)
    found = {"client": process_named(below, "probe"), "server": bench.server.pid}
    # The worker that has a client is the one that is not warm in reserve: it has used the most memory or CPU time.
    workers = bench.server.workers()
    found["worker"] = max(workers, key=lambda pid: (cpu_seconds(pid), memory_mb(pid))) if workers else None
    if way == "grpc":
        found["relay"] = process_named(below, "cr-relay")
    missing = [part for part, pid in found.items() if pid is None]
    if missing:
        raise harness.Failure(f"no {' and no '.join(missing)} found")
    return found


def quiet(bench):
    for way in bench.ways:
        parts = {"client"} if way == "native" else set(PARTS) - ({"relay"} if way == "ring" else set())
        names = [f"memory, {part}" for part in parts] + [f"idle CPU, {part}" for part in parts]
        names += [] if way == "native" else list(OVERHEAD)
        flag = os.path.join(bench.lab.folder, f"quiet-{way}")
        open(flag, "w").close()
        try:
            process = bench.start(way, [bench.program("probe"), "idle", flag])
            wait_line(bench, process)
            time.sleep(0.3 if bench.options.smoke else 2)
            pids = parts_of(bench, way, process)
            used = {part: memory_mb(pid) for part, pid in pids.items()}
            for part, megabytes in used.items():
                bench.add(f"memory, {part}", way, megabytes, "MB")
            native = bench.row("memory, client", "MB").get("native")
            if way != "native" and isinstance(native, list):
                bench.add(OVERHEAD[0], way, used["client"] - native[0], "MB")
                bench.add(OVERHEAD[1], way, used["client"] + used["worker"] - native[0], "MB")
            before = {part: cpu_seconds(pid) for part, pid in pids.items()}
            begin = time.monotonic()
            time.sleep(min(1 if bench.options.smoke else 10, max(0.1, bench.limit(60))))
            seconds = time.monotonic() - begin
            for part, pid in pids.items():
                bench.add(f"idle CPU, {part}", way, 100 * (cpu_seconds(pid) - before[part]) / seconds, "%")
            os.unlink(flag)
            finish(bench, process, 30)
        except (harness.Failure, OutOfTime, OSError) as error:
            for name in names:
                if way not in bench.row(name, "MB" if name.startswith("memory") else "%"):
                    bench.fail(name, way, "not run: out of time" if isinstance(error, OutOfTime) else error)
        finally:
            if os.path.exists(flag):
                os.unlink(flag)


# ---------------------------------------------------------------------------------------------------------- objects

def log_of_job(directory):
    """(records, bytes) of a job's replay log, as the agent of its program says (proto/agent/README.md has the protocol)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.settimeout(10)
        agent.connect(glob.glob(os.path.join(directory, "agent-*.sock"))[0])
        agent.send(struct.pack("<IIII", 0x41524355, 2, 1, 0))
        answer = agent.recv(65536)
    kind, length = struct.unpack_from("<II", answer, 8)
    if kind != 64:
        raise harness.Failure("the job's agent refused to say how long its log is")
    fields, at, end = [], 16, 16 + length
    # pid, server, job, session, shared memory, records, bytes, and more: texts are a number and the bytes.
    for is_text in (False, True, True, False, False, False, False):
        (number,) = struct.unpack_from("<Q", answer, at)
        at += 8
        fields.append(number)
        if is_text:
            at += number
    if at > end:
        raise harness.Failure("the job's agent is of another version")
    return fields[5], fields[6]


OBJECTS = {
    "allocations": ("allocations: all", "allocations: last to first tenth", "allocations: free, last to first tenth",
                    "replay log of an allocation"),
    "modules": ("modules: all", "modules: last to first tenth", "modules: unload, last to first tenth", "replay log of a module"),
}  # fmt: skip


def objects(bench):
    for kind, (total, growth, free_growth, log) in OBJECTS.items():
        count = bench.options.allocations if kind == "allocations" else bench.options.modules
        for way in bench.ways:
            flag = os.path.join(bench.lab.folder, f"{kind}-{way}")
            open(flag, "w").close()
            units = {total: "s", growth: "", free_growth: "", log: "B"}
            process = None
            try:
                most = min(60.0, max(5.0, bench.left() / 6))
                arguments = [str(count)] + ([str(most)] if kind == "modules" else []) + [flag]
                process = bench.start(way, [bench.program("probe"), kind, *arguments])
                made = wait_line(bench, process, 120)
                bench.add(total, way, made["seconds"], "s")
                if made["count"] < count:
                    bench.fail(total, way, f"only {made['count']} of {count} in {made['seconds']} s", "s")
                bench.add(growth, way, made["last_us"] / made["first_us"], "")
                if way != "native":
                    # Less what the program has besides: the context, its own module, a kernel.
                    records, length = log_of_job(process.directory)
                    bench.add(log, way, length / max(1, min(records, made["count"])), "B")
                os.unlink(flag)
                freed = last_json(finish(bench, process, 120))
                bench.add(free_growth, way, freed["free_last_us"] / freed["free_first_us"], "")
            except (harness.Failure, OutOfTime, OSError, struct.error, ZeroDivisionError) as error:
                for name in units:
                    if way not in bench.row(name, units[name]) and not (name == log and way == "native"):
                        bench.fail(name, way, "not run: out of time" if isinstance(error, OutOfTime) else error, units[name])
            finally:
                if os.path.exists(flag):
                    os.unlink(flag)
                if process:
                    process.end()


# ------------------------------------------------------------------------------------------------------- checkpoints

def checkpoint_rows(mib):
    """In the order in which native_checkpoint and own_checkpoint return their values. In GB of GPU memory for each second:
    of all that cr-checkpoint --stop takes, of the time that a job that goes on stands still, of the restart."""
    return [f"checkpoint {mib} MiB, in all", f"checkpoint {mib} MiB, the job's pause", f"restore {mib} MiB"]


def written_row(mib):
    return f"file of {mib} MiB, written and flushed"


def write_file(bench, mib):
    """Seconds for as many bytes as a job of this size has in GPU memory, by write() and fsync(), where images go."""
    path = os.path.join(bench.lab.folder, "written")
    piece = os.urandom(2 << 20)
    begin = time.monotonic()
    try:
        with open(path, "wb", buffering=0) as f:
            for _ in range(-(-mib // 2)):
                f.write(piece)
            os.fsync(f.fileno())
        return time.monotonic() - begin
    finally:
        os.unlink(path)


def checkpoint(bench):
    for mib in bench.options.checkpoint_mib:
        names = checkpoint_rows(mib)
        gigabytes = mib * (1 << 20) / 1e9
        # Belongs to the machine, as the raw TCP stream does: what no checkpoint that writes files can go beyond.
        bench.rounds([written_row(mib)], "GB/s", lambda way: [gigabytes / write_file(bench, mib)], "higher", 1, ["native"], False)
        if "native" in bench.ways:
            bench.rounds(names, "GB/s", lambda way: native_checkpoint(bench, mib, gigabytes), "higher", 1, ["native"], False)
        if "ring" in bench.ways:
            measure = lambda way: own_checkpoint(bench, mib, gigabytes)
            units, better = ["GB/s", "GB/s", "GB/s", "s"], ["higher", "higher", "higher", "lower"]
            bench.rounds(names + [f"pause of a checkpoint, {mib} MiB"], units, measure, better, 1, ["ring"], False)


def native_checkpoint(bench, mib, gigabytes):
    flag = os.path.join(bench.lab.folder, f"native-hold-{mib}")
    images = os.path.join(bench.lab.folder, f"native-images-{mib}")
    open(flag, "w").close()
    process = bench.start("native", [bench.program("probe"), "hold", str(mib), flag])
    try:
        wait_line(bench, process)
        env = with_environment(bench.lab.native_environment())
        # What there is without us: the driver's checkpoint, then CRIU, then the disk.
        criu = os.environ.get("CUDA_REMOTE_CRIU", "criu")
        os.mkdir(images)
        save = f'"{criu}" dump --tree {process.pid} --images-dir "{images}" --leave-running --shell-job --log-file dump.log && sync -f "{images}"'
        done = subprocess.run(
            [bench.program("native_checkpoint"), str(process.pid), flag, "sh", "-c", save],
            capture_output=True, text=True, env=env, timeout=bench.limit(120),
        )  # fmt: skip
        result = json.loads(done.stdout)
        if "error" in result:
            log = os.path.join(images, "dump.log")
            told = [line for line in open(log, errors="replace") if "Error" in line] if os.path.exists(log) else []
            raise harness.Failure(f"{result['error']} {done.stderr.strip()} {''.join(told[:3]).strip()}")
        compared = last_json(finish(bench, process, 60))
        if compared["wrong_words"] != 0:
            raise harness.Failure("memory was not restored")
        # The process stands still for the driver's part, and has its GPU memory in its own memory then.
        saved = result["checkpoint_s"] + result["command_s"]
        restored = compared["done_unix_s"] - result["restore_began_unix_s"]
        return [gigabytes / saved, gigabytes / result["checkpoint_s"], gigabytes / restored]
    finally:
        if os.path.exists(flag):
            os.unlink(flag)
        process.end()
        subprocess.run(["rm", "-rf", images])


def own_checkpoint(bench, mib, gigabytes):
    bench.number += 1
    number = bench.number
    flag = os.path.join(bench.lab.folder, f"hold-{number}")
    image = os.path.join(bench.lab.folder, f"image-{number}")
    open(flag, "w").close()
    process = bench.start("ring", [bench.program("probe"), "hold", str(mib), flag])
    restarted = None
    try:
        wait_line(bench, process)
        # As long as it takes until the server has heard from the worker what the job holds by now.
        time.sleep(1)
        going = bench.lab.run(f"pause-{number}", [bench.lab.tool("cr-checkpoint"), "--json", process.id, image], bench.limit(120))
        pause = json.loads(going.stdout())["paused_seconds"]
        # The disk need not have room for two.
        subprocess.run(["rm", "-rf", image])
        begin = time.monotonic()
        bench.lab.run(f"save-{number}", [bench.lab.tool("cr-checkpoint"), "--stop", "--json", process.id, image], bench.limit(120))
        saved = time.monotonic() - begin
        process.wait(bench.limit(30))
        os.unlink(flag)
        warm_worker(bench)
        begin = time.time()
        command = [bench.lab.tool("cr-restart"), "--times", image, "--server", bench.server.unix]
        environment = {"CUDA_REMOTE_JOB_DIR": process.directory}
        restarted = bench.lab.start(harness.Process(bench.lab, f"restart-{number}", command, environment))
        restarted.wait(bench.limit(120))
        if restarted.child.returncode != 0:
            raise harness.Failure(f"cr-restart failed: {restarted.describe()}")
        result = last_json(process)
        if result.get("wrong_words") != 0:
            raise harness.Failure("memory was not restored")
        print(f"restart of {mib} MiB, {result['done_unix_s'] - begin:.3f} s:\n{restarted.stderr()}", file=sys.stderr)
        return [gigabytes / saved, gigabytes / pause, gigabytes / (result["done_unix_s"] - begin), pause]
    finally:
        if os.path.exists(flag):
            os.unlink(flag)
        process.end()
        if restarted:
            restarted.end()
        subprocess.run(["rm", "-rf", image])


# ---------------------------------------------------------------------------------------------------------- PyTorch

PYTORCH_ROWS = ["PyTorch: MLP step", "PyTorch: transformer step", "PyTorch: one token", "PyTorch: ResNet-50 step"]


def pytorch(bench):
    python = bench.options.python
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode != 0:
        for name in PYTORCH_ROWS:
            for way in bench.ways:
                bench.fail(name, way, "not run: this Python has no torch", "ms")
        return
    bench.has_torch = True
    command = [python, os.path.join(HERE, "pytorch.py")] + (["--quick"] if bench.options.quick else [])
    # The script warms up by itself, and starting it takes as long as measuring.
    table_of_program(bench, command, 150, PYTORCH_ROWS, min(2, bench.options.rounds), False)


STAGES = {
    "calls": calls, "managed": managed, "start": start, "tcp": tcp, "threads": threads, "sessions": sessions, "quiet": quiet,
    "objects": objects, "checkpoint": checkpoint, "pytorch": pytorch,
}  # fmt: skip


def expected(bench, stage):
    """[(row, ways)] that the stage must bring out where everything works."""
    remote = [way for way in bench.ways if way != "native"]
    ring = [way for way in bench.ways if way == "ring"]
    grpc = [way for way in bench.ways if way == "grpc"]
    options = bench.options
    if stage == "calls":
        return [(name, bench.ways) for name in CALL_ROWS]
    if stage == "managed":
        return [(name, bench.ways) for name in MANAGED_ROWS + ([CUBLAS_ROW] if bench.has_cublas else [])]
    if stage == "start":
        return [(name, bench.ways) for name in (LOAD, FIRST, FIRST_RUN)]
    if stage == "tcp":
        return [("raw TCP, 1 stream", ["native"]), ("raw TCP, 4 streams", ["native"])]
    if stage == "threads":
        rows = ("launches, {} threads", "launch issue, {} threads", "launches, 1 thread, {} streams")
        return [(row.format(n), bench.ways) for n in options.thread_counts for row in rows]
    if stage == "sessions":
        return [(f"launches, {n} sessions", bench.ways) for n in options.session_counts]
    if stage == "quiet":
        ways = {"client": bench.ways, "worker": remote, "server": remote, "relay": grpc}
        rows = [(f"{what}, {part}", ways[part]) for what in ("memory", "idle CPU") for part in PARTS]
        return rows + [(name, remote) for name in OVERHEAD if "native" in bench.ways]
    if stage == "objects":
        return [(n, remote if n.startswith("replay") else bench.ways) for names in OBJECTS.values() for n in names]
    if stage == "checkpoint":
        # Natively only a real driver can.
        ways = ring + ([] if bench.lab.software else [way for way in bench.ways if way == "native"])
        rows = [(name, ways) for mib in options.checkpoint_mib for name in checkpoint_rows(mib)]
        rows += [(written_row(mib), ["native"]) for mib in options.checkpoint_mib]
        return rows + [(f"pause of a checkpoint, {mib} MiB", ring) for mib in options.checkpoint_mib]
    if stage == "pytorch" and bench.has_torch:
        return [(name, bench.ways) for name in PYTORCH_ROWS]
    return []


def run_stages(bench, names, say):
    for name in names:
        bench.group = name
        begin = time.monotonic()
        try:
            if bench.left() < 2:
                raise OutOfTime()
            STAGES[name](bench)
        except OutOfTime:
            pass
        except harness.Failure as failure:
            print(f"FAIL {name}: {failure}", file=sys.stderr, flush=True)
        for row, ways in expected(bench, name):
            for way in ways:
                if not bench.row(row, "").get(way):
                    bench.fail(row, way, "not run: out of time" if bench.left() < 2 else "no value came out")
        say(f"{name}: {time.monotonic() - begin:.0f} s")
