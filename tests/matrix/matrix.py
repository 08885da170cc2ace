#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs test programs in every way and compares the bytes that they print with those of a native run. No line on stderr may
accuse one of breaking CUDA's rules for managed memory.

Usage:
  matrix.py --product DIR --apps DIR [--driver LIB] [--only APP,...] [--modes MODE,...] [--json FILE]
            [--case-limit S] [--total-limit S] [--run-seconds S] [--seed N] [--keep]

  --product   a folder with the built product (cr-run, cr-server, libcuda-remote.so, ...), searched recursively
  --apps      a folder with the test programs (executables, or NAME.py), searched recursively
  --driver    the driver library for the servers: a path; default: the software GPU beside the product
  --modes     any of those below (default: all)
  --seed      a number from which every random choice of every case follows (default: another one in each run, which prints it)

Modes:
  native        straight on the driver: what all others are compared with
  ring          under cr-run, server on the same machine, shared-memory ring
  embedded      under cr-run without --server
  grpc          under cr-run through the relay and gRPC over TCP
  tls           the same with TLS both ways
  restart       checkpoint with --stop at three random steps of one run, each restarted against a new server: the second
                and third are checkpoints of a restarted job; then the first image once more
  live          checkpoint at a random time while the job continues; the job and the restarted image both give the result
  restart_grpc  the same from the ring to gRPC, from gRPC to gRPC, and from there to the ring
  migrate       to another server, which has other work, and back, while running
  migrate_grpc  from the ring to gRPC and back, while running
  migrate_ten   ten moves between two servers in one run
  clients       four jobs at once on one server
  late_MODE     MODE with a software GPU that does all work as late as CUDA allows (SOFTGPU_LATE_MS, softgpu), and a
                worker that overwrites the memory that it has done with (CUDA_REMOTE_POISON) and moves managed memory
                between host and device all the time (CUDA_REMOTE_RESTLESS)

Exit code: 0 all passed, 1 some failed, 2 wrong use.
"""

import argparse
import contextlib
import json
import os
import random
import socket
import sys
import tempfile
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness  # noqa: E402

# Each program with the number of steps of a test run; the size is the program's own default.
APPS = {
    "copies": 16,
    "shortcuts": 8,
    "sockets": 30,
    "stencil": 40,
    "stencil_fat": 24,
    "reduce": 24,
    "histogram": 20,
    "matmul": 12,
    "nbody": 18,
    "peers": 20,
    "free_apart": 20,
    "pipeline": 30,
    "globals": 60,
    "busy_memory": 40,
    "globals_plain": 30,
    "device_random": 24,
    "driver_ptx": 40,
    "driver_link": 28,
    "unloads": 30,
    "unloads_constants": 30,
    "code_linked": 24,
    "code_places": 24,
    "code_tables": 20,
    "context_state": 24,
    "kernel_heap": 24,
    "no_context": 20,
    "resets": 24,
    "graph_copies": 20,
    "graph_conditional": 40,
    "graph_launchable": 24,
    "graph_memory": 24,
    "graph_moved": 20,
    "graph_pageable": 18,
    "graph_random": 20,
    "graphs": 24,
    "memory": 24,
    "memory_answers": 8,
    "pools": 24,
    "pools_outlive": 24,
    "threads": 24,
    "threads_ptds": 18,
    "printer": 12,
    "mathmix": 15,
    "managed": 20,
    "managed_gpus": 12,
    "managed_random": 42,
    "managed_threads": 12,
    "pinned_random": 24,
    "mapped": 20,
    "polling": 12,
    "registered": 15,
    "texture_globals": 16,
    "texture_memory": 8,
    "texture_references": 24,
    "textures": 16,
    "vmm": 14,
    "clusters": 16,
    "tensor_maps": 16,
    # Of several processes:
    "engine": 24,
    "host_barrier": 24,
    "ipc_memory": 24,
    "ipc_ring": 40,
    "mpi_stencil_mpich": 16,
    "mpi_stencil_mpich_2": 8,
    "mpi_stencil_mpich_8": 8,
    "mpi_stencil_openmpi": 16,
    "mpi_stencil_openmpi_2": 8,
    "mpi_stencil_openmpi_8": 8,
    "peer_spin": 20,
    "serving": 24,
    "shm_ring": 20,
    "spawner": 12,
}

# The same for programs that need a real GPU (--driver).
ON_GPUS = {
    "graph_device_launch": 20,
    "kernel_launches": 20,
}

# What starts a program of several processes that does not start them itself.
MPICH = ("mpirun.mpich", "-n")
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n")  # with fewer cores than ranks, those that wait yield
LAUNCHERS = {
    "mpi_stencil_mpich": (*MPICH, "3"),
    "mpi_stencil_mpich_2": (*MPICH, "2"),
    "mpi_stencil_mpich_8": (*MPICH, "8"),
    "mpi_stencil_openmpi": (*OPEN_MPI, "4"),
    "mpi_stencil_openmpi_2": (*OPEN_MPI, "2"),
    "mpi_stencil_openmpi_8": (*OPEN_MPI, "8"),
}

# Python programs of tests/frameworks, and which modules each needs.
FRAMEWORKS = {
    "ctypes_daemon": (16, ()),
    "ctypes_ptx": (20, ()),
    "ctypes_cublas": (20, ("torch",)),  # which brings libcublas
    "ctypes_spawn": (16, ()),
    "ctypes_workers": (16, ()),
    "torch_conv": (40, ("torch",)),
    "torch_transformer": (40, ("torch",)),
    "torch_gpt": (16, ("torch",)),
    "torch_resnet": (12, ("torch",)),
    "torch_graph": (40, ("torch",)),
    "torch_compile": (30, ("torch", "triton")),
    "torch_libraries": (12, ("torch",)),
    "torch_segments": (24, ("torch",)),
    "torch_memory": (18, ("torch",)),
    "torch_loader": (30, ("torch",)),
    "torch_multiprocessing": (20, ("torch",)),
    "torch_gloo": (24, ("torch",)),
    "cupy_mix": (20, ("cupy",)),
    "cupy_pools": (20, ("cupy",)),
    "jax_train": (30, ("jax",)),
    "jax_autotune": (20, ("jax",)),
    "numba_mix": (20, ("numba", "numba_cuda")),
    "triton_kernels": (20, ("torch", "triton")),
    "nvml_questions": (2, ()),
    "torch_nccl": (24, ("torch",)),
    "torch_nccl_shm": (24, ("torch",)),
    "torch_ddp": (24, ("torch",)),
    "torch_ddp_shm": (24, ("torch",)),
    "torch_tensor_parallel": (24, ("torch",)),
    "torch_tensor_parallel_shm": (24, ("torch",)),
}

# Programs under another name, and what the environment then says.
VARIANTS = {
    # NCCL sends through memory of the host, and not from GPU to GPU.
    **{app + "_shm": (app, {"NCCL_P2P_DISABLE": "1"}) for app in ("torch_nccl", "torch_ddp", "torch_tensor_parallel")},
    # With another number of ranks: the rest of the name.
    **{name: (name.rstrip("_0123456789"), {}) for name in LAUNCHERS if name[-1].isdigit()},
}

# More options of cr-run.
RUN_OPTIONS = {"ctypes_daemon": ("--adopt",)}

# The programs of frameworks that need several GPUs, real ones. On one GPU the ranks of the others meet through TCP, in any case.
SEVERAL_GPUS = {app: 2 for app in ("torch_nccl", "torch_nccl_shm", "torch_ddp_shm", "torch_tensor_parallel_shm")}

# Programs that the other modes are not for: without CUDA there is no session to save or to move.
LIMITED = {"nvml_questions": ("native", "ring", "grpc")}
# Host and kernels look at each other's writes, which the relay does not carry while a kernel runs.
LIMITED["polling"] = ("native", "ring", "restart", "live", "migrate", "late_ring", "late_restart", "late_migrate")
LIMITED["shm_ring"] = ("native", "ring", "restart", "live", "migrate", "late_ring")
# A real driver's kernel heap cannot be saved (docs/context-state.md): for tests/gpu/run.
LIMITED_ON_GPUS = {"kernel_heap": ("native", "ring", "embedded", "grpc", "tls", "clients")}
# NVIDIA's driver (580) crashes in these programs natively.
LIMITED_ON_GPUS["graph_launchable"] = ()
LIMITED_ON_GPUS["pools_outlive"] = ()
# While one rank stands still at a step, for the test, the kernels of the others wait for its own, and no GPU becomes idle:
# tests/faults saves and moves this program while it runs.
LIMITED["peer_spin"] = ("native", "ring", "grpc", "embedded", "clients", "late_ring", "late_grpc")
for nccl in ("torch_ddp", "torch_ddp_shm", "torch_nccl_shm", "torch_tensor_parallel", "torch_tensor_parallel_shm"):
    LIMITED[nccl] = ("native", "ring", "grpc", "restart", "live", "migrate")
LIMITED["torch_nccl"] = (*LIMITED["torch_ddp"], "migrate_ten")

# Python deletes the folder of its queues' sockets when it ends, so that an older image finds it gone: restarted no more than
# once from each.
DELETES_ITS_FILES = ("torch_loader",)


# Late modes: how long a stream waits for somebody to wait for it.
LATE_MS = 20

# Programs for several GPUs, and how many of them the software GPU then has.
SOFTWARE_GPUS = {
    "code_linked": 2,
    "code_places": 2,
    "code_tables": 2,
    "free_apart": 2,
    "kernel_heap": 2,
    "managed_gpus": 2,
    "peers": 2,
    "vmm": 2,
}


# What programs get in their environment on the software GPU alone.
SOFTWARE_ENVIRONMENT = {
    "code_linked": {"APP_KEEP": "first"},
    "managed_random": {"CUDA_REMOTE_RESTLESS": "1"},
    "managed_threads": {"CUDA_REMOTE_RESTLESS": "1"},
}


class Case:
    """One program in one lab: its command and its native output, made once."""

    def __init__(self, lab, app, path, limit, run_seconds, pick):
        self.lab = lab
        self.pick = pick  # every random choice
        self.app = app
        self.path = path
        self.steps = FRAMEWORKS[app][0] if app in FRAMEWORKS else {**APPS, **ON_GPUS}[app]
        self.limit = limit
        self.run_seconds = run_seconds
        self._native = None
        self.notes = {}

    @property
    def command(self):
        """To be started once."""
        launcher = [sys.executable] if self.path.endswith(".py") else list(LAUNCHERS.get(self.app, ()))
        # Not beside others': of those that begin and end at the same moment, one finds their folder missing, or there.
        if "openmpi" in self.app:
            launcher[1:1] = ["--mca", "orte_tmpdir_base", tempfile.mkdtemp(prefix="ompi-", dir=self.lab.folder)]
        return launcher + [self.path, "--steps", str(self.steps)]

    @property
    def expected(self):
        if self._native is None:
            start = time.monotonic()
            self._native = self.lab.native("native", self.command, self.limit)
            self.notes["native_s"] = round(time.monotonic() - start, 3)
            if not self._native.strip():
                raise harness.Failure("the native run printed nothing")
        return self._native

    def step_ms(self, part):
        """How long each step of a job lasts that is to be caught while it runs."""
        return max(20, int(1000 * part * self.run_seconds) // self.steps)

    def points(self):
        """Three steps in order, after each of which there is something left to do."""
        return sorted(self.pick.sample(range(1, self.steps - 1), 3))


def native(case):
    case.expected


def finish(case, job, what):
    job.expect_success(case.limit)
    harness.same(what, job.stdout(), case.expected)


def ring(case):
    server = case.lab.server()
    finish(case, case.lab.job("job", case.command, server.unix), "ring")


def embedded(case):
    finish(case, case.lab.job("job", case.command, None), "embedded server")


def grpc(case):
    server = case.lab.server(listen=True)
    finish(case, case.lab.job("job", case.command, server.tcp), "gRPC")


def tls(case):
    certificates = harness.Certificates(os.path.join(case.lab.folder, "tls"))
    server = case.lab.server(listen=True, tls=certificates)
    finish(case, case.lab.job("job", case.command, server.tcp, tls=certificates), "gRPC with TLS")
    # Without a certificate of its own nobody gets in.
    stranger = case.lab.job("stranger", case.command, server.tcp)
    if stranger.wait(case.limit) == 0:
        raise harness.Failure("a client without a certificate was served")


def checkpoint(case, job, image, stop=True, limit=None):
    command = [case.lab.tool("cr-checkpoint")] + (["--stop"] if stop else []) + [job.id, image]
    start = time.monotonic()
    case.lab.run("checkpoint-" + os.path.basename(image), command, limit or case.limit)
    case.notes.setdefault("checkpoint_s", []).append(round(time.monotonic() - start, 3))
    if not os.path.isdir(image) or os.path.exists(image + ".partial"):
        raise harness.Failure(f"cr-checkpoint succeeded but {image} is not there, or {image}.partial is still there")


class Restarted(harness.Process):
    """A job brought back by cr-restart, which stays in the foreground until the job ends."""

    def __init__(self, case, job, image, address, name, tls=None):
        self.job = job
        command = [case.lab.tool("cr-restart"), image] + (["--server", address] if address else [])
        super().__init__(case.lab, name, command, harness.tls_environment(tls) if tls else None)


def restart(case, job, image, address, name):
    return case.lab.start(Restarted(case, job, image, address, name))


def finish_restarted(case, job, restarted, what):
    restarted.expect_success(case.limit)
    harness.same(what, job.stdout(), case.expected)


def wait_stopped(case, job):
    """After --stop the job's processes are gone."""
    job.wait(30)


def three_points(case, addresses):
    """Stops at three points and goes on from each on the next of `addresses` (callables that start a server)."""
    expected = case.expected
    points = case.notes["steps"] = case.points()
    job = case.lab.job("job", case.command, addresses[0](), pause_at=points)
    carrier = job  # the process whose life stands for the job's
    sizes = []
    for number, step in enumerate(points):
        job.wait_paused(step, case.limit, carrier)
        image = os.path.join(case.lab.folder, f"image{number}")
        checkpoint(case, job, image)
        carrier.wait(30)
        sizes.append(os.path.getsize(job.out))
        carrier = restart(case, job, image, addresses[number + 1](), f"restart{number}")
        job.go(step)
    carrier.expect_success(case.limit)
    harness.same("restarted three times", job.stdout(), expected)
    return job, sizes


def restart_mode(case):
    servers = iter(range(100))
    fresh = lambda: case.lab.server(f"server{next(servers)}").unix
    job, sizes = three_points(case, [fresh, fresh, fresh, fresh])
    if case.app not in DELETES_ITS_FILES:
        # An image can be used again: the output is put back to what it was then.
        os.truncate(job.out, sizes[0])
        again = restart(case, job, os.path.join(case.lab.folder, "image0"), fresh(), "again")
        finish_restarted(case, job, again, "the first image once more")
    case.lab.run("verify", [case.lab.tool("cr-inspect"), "--verify", os.path.join(case.lab.folder, "image1")])


def restart_grpc(case):
    servers = iter(range(100))
    local = lambda: case.lab.server(f"server{next(servers)}").unix
    remote = lambda: case.lab.server(f"server{next(servers)}", listen=True).tcp
    three_points(case, [local, remote, remote, local])


def live(case):
    """Checkpoints while the program computes, at a random time, and lets it go on."""
    expected = case.expected
    server = case.lab.server()
    step_ms = case.step_ms(0.6)
    last = case.steps - 1
    job = case.lab.job("job", case.command, server.unix, step_ms=step_ms, pause_at=[last])
    step = case.pick.randint(1, max(1, case.steps // 2))
    case.notes["steps"] = [step]
    job.wait_steps(step, case.limit)
    time.sleep(case.pick.random() * 0.05)
    image = os.path.join(case.lab.folder, "image")
    checkpoint(case, job, image, stop=False)
    written = os.path.getsize(job.out)
    job.hurry()
    job.go(last)
    finish(case, job, "checkpointed while running")
    os.truncate(job.out, 0)
    again = restart(case, job, image, case.lab.server("server2").unix, "again")
    again.expect_success(case.limit)
    # What it had written by the time of the checkpoint (at most `written` bytes) is not written again.
    rest = job.stdout()
    if not expected.endswith(rest) or len(rest) < len(expected) - written:
        harness.same("restarted from a checkpoint taken while running", rest, expected[-len(rest) :])
        raise harness.Failure(f"restarted from a checkpoint: of {len(expected)} bytes, {written} before it, only {len(rest)} came")


def migrate_between(case, first, second):
    """Runs on `first`, moves to `second` (which has other work), and back."""
    case.expected
    step_ms = case.step_ms(1)
    # Neither ends before the moves are made, however slow the machine is: there is other work on the server all the time.
    last = case.steps - 1
    job = case.lab.job("job", case.command, first, step_ms=step_ms, pause_at=[last])
    other = case.lab.job("other", case.command, second, step_ms=2 * step_ms, pause_at=[last])
    move = lambda name, to: case.lab.run(name, [case.lab.tool("cr-migrate"), job.id, "--to", to], case.limit)
    job.wait_steps(max(1, case.steps // 8), case.limit)
    other.wait_steps(1, case.limit)
    start = time.monotonic()
    move("there", second)
    case.notes["migrate_s"] = round(time.monotonic() - start, 3)
    steps = len(job.steps())
    if not job.running():
        raise harness.Failure("the job ended before it could be moved back: the test proves nothing")
    job.wait_steps(min(steps + 2, case.steps - 2), case.limit)
    move("back", first)
    for each in (job, other):
        each.hurry()
        each.go(last)
    finish(case, job, "moved there and back")
    other.expect_success(case.limit)
    harness.same("the other job on the second server", other.stdout(), case.expected)


def migrate(case):
    migrate_between(case, case.lab.server("first").unix, case.lab.server("second").unix)


def migrate_grpc(case):
    migrate_between(case, case.lab.server("first").unix, case.lab.server("second", listen=True).tcp)


def migrate_ten(case):
    case.expected
    addresses = [case.lab.server("first").unix, case.lab.server("second").unix]
    moves = 10
    last = case.steps - 1
    job = case.lab.job("job", case.command, addresses[0], step_ms=case.step_ms(2), pause_at=[last])
    job.wait_steps(1, case.limit)
    took = []
    for move in range(moves):
        if not job.running():
            raise harness.Failure(f"the job ended after {move} of {moves} moves: the test proves too little")
        start = time.monotonic()
        case.lab.run(f"move{move}", [case.lab.tool("cr-migrate"), job.id, "--to", addresses[(move + 1) % 2]], case.limit)
        took.append(round(time.monotonic() - start, 3))
    case.notes["migrate_s"] = took
    job.hurry()
    job.go(last)
    finish(case, job, "moved ten times")


@contextlib.contextmanager
def open_mpi_folder(base):
    """Keeps the folder in `base` in which each mpirun of Open MPI makes its own. Of those that begin and end at the same
    moment, one otherwise finds it missing and then cannot make it."""
    folder = f"{base}/ompi.{socket.gethostname().split('.')[0]}.{os.geteuid()}"
    while True:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        try:
            kept = tempfile.mkdtemp(dir=folder)
            break
        except FileNotFoundError:
            continue  # another mpirun has ended meanwhile
    try:
        yield
    finally:
        os.rmdir(kept)


def clients(case):
    case.expected
    server = case.lab.server()
    with open_mpi_folder(case.lab.folder) if "openmpi" in case.app else contextlib.nullcontext():
        jobs = [case.lab.job(f"job{i}", case.command, server.unix) for i in range(4)]
        for number, job in enumerate(jobs):
            finish(case, job, f"client {number} of four")


MODES = {
    "native": native,
    "ring": ring,
    "embedded": embedded,
    "grpc": grpc,
    "tls": tls,
    "restart": restart_mode,
    "live": live,
    "restart_grpc": restart_grpc,
    "migrate": migrate,
    "migrate_grpc": migrate_grpc,
    "migrate_ten": migrate_ten,
    "clients": clients,
}
LATE = "late_"
ALL_MODES = list(MODES) + [LATE + mode for mode in MODES if mode != "native"]


def run_case(options, app, mode):
    """Returns a result: app, mode, ok, seconds, error, notes."""
    start = time.monotonic()
    result = {"app": app, "mode": mode, "ok": False, "error": ""}
    try:
        program, environment = VARIANTS.get(app, (app, {}))
        path = harness.find(options.apps, program + ".py" if app in FRAMEWORKS else program)
        if path is None:
            raise harness.Failure(f"the program {program} is not in {options.apps}")
        with harness.Lab(options.product, options.driver, options.keep) as lab:
            # As on a large machine, whatever this one has: threads for large copies.
            lab.env["CUDA_REMOTE_COPY_THREADS"] = "3"
            # Of programs that do things at random; the same in all modes.
            lab.env["CR_TEST_SEED"] = str(options.seed)
            lab.env.update(environment)
            lab.workers = options.workers
            lab.run_options = RUN_OPTIONS.get(app, ())
            if app in SOFTWARE_GPUS:
                lab.env["SOFTGPU_DEVICES"] = str(SOFTWARE_GPUS[app])
            if lab.software:
                lab.env.update(SOFTWARE_ENVIRONMENT.get(app, {}))
            if mode.startswith(LATE):
                lab.env["SOFTGPU_LATE_MS"] = str(LATE_MS)
                lab.env["CUDA_REMOTE_POISON"] = "1"
                lab.env["CUDA_REMOTE_RESTLESS"] = "1"
            pick = random.Random(f"{options.seed} {app} {mode}")
            case = Case(lab, app, os.path.abspath(path), options.case_limit, options.run_seconds, pick)
            try:
                MODES[mode[len(LATE) :] if mode.startswith(LATE) else mode](case)
                for process in lab.processes:
                    harness.not_accused(process)
                result["ok"] = True
            except Exception:
                if options.logs:
                    harness.keep_logs(lab, options.logs, f"{app} {mode}")
                raise
            finally:
                result["notes"] = case.notes
    except harness.Failure as failure:
        result["error"] = str(failure)
    except Exception:
        result["error"] = traceback.format_exc()
    if result["error"] and "steps" in result.get("notes", {}):
        result["error"] += f"\ncheckpoints after steps {result['notes']['steps']}; again with --seed {options.seed}"
    result["seconds"] = round(time.monotonic() - start, 2)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--apps", required=True)
    parser.add_argument("--driver")
    parser.add_argument("--workers", type=int, help="that servers keep ready (default: as cr-server does)")
    parser.add_argument("--only", default=",".join(APPS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--json")
    parser.add_argument("--logs", help="append the logs of failed cases to this file")
    parser.add_argument("--case-limit", type=float, default=60)
    parser.add_argument("--total-limit", type=float, default=1e9)
    parser.add_argument(
        "--run-seconds", type=float, default=2.5, help="how long a job takes that moves while it runs; a real GPU needs seconds to start"
    )
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--keep", action="store_true", help="keep the folders of all cases")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    apps, modes = options.only.split(","), options.modes.split(",")
    for name, known in [(app, {**APPS, **ON_GPUS, **FRAMEWORKS}) for app in apps] + [(mode, ALL_MODES) for mode in modes]:
        if name not in known:
            parser.error(f"{name} is not one of: {' '.join(known)}")
    cases = [(app, mode) for mode in modes for app in apps if mode in LIMITED.get(app, modes)]
    if not cases:
        parser.error("none of these programs runs in these modes")

    if not options.driver:  # else libraries for several GPUs may want to see the machine's network
        harness.own_network()
    started = time.monotonic()
    ended = harness.fail_on_sigterm()
    results = []
    for app, mode in cases:
        if ended or time.monotonic() - started > options.total_limit:
            results.append({"app": app, "mode": mode, "ok": False, "error": "not run: out of time", "seconds": 0})
            continue
        result = run_case(options, app, mode)
        results.append(result)
        steps = ", ".join(str(step) for step in result.get("notes", {}).get("steps", []))
        steps = f"  checkpoints after steps {steps}" if steps else ""
        print(f"{'ok  ' if result['ok'] else 'FAIL'} {app:14} {mode:13} {result['seconds']:7.2f} s{steps}", flush=True)
        if not result["ok"]:
            print("    " + result["error"].replace("\n", "\n    "), flush=True)
        if options.json:
            with open(options.json + ".tmp", "w") as f:
                json.dump(results, f, indent=1)
            os.replace(options.json + ".tmp", options.json)
    failed = [r for r in results if not r["ok"]]
    print(f"{len(results) - len(failed)} of {len(results)} passed in {time.monotonic() - started:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
