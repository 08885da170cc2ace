#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Jobs of several CUDA processes whose processes are placed on servers and GPUs by --map.

Usage: places.py --product DIR --apps DIR --programs DIR [--driver LIB] [--only CASE,...] [--keep] [--logs FILE]

Most cases need the software GPU, whose number of GPUs and memory they set. Exit code: 0 all passed, 1 some failed, 2 wrong use.
With --driver, on a machine with one GPU or more: over_tcp; with two or more: spread_and_gathered, shared_and_swapped,
spinning_and_swapped.
"""

import argparse
import json
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../matrix"), os.path.join(os.path.dirname(os.path.realpath(__file__)), "../matrix")]
import harness  # noqa: E402
from harness import Failure, wait_for  # noqa: E402

CASES = {}
LIMIT = int(os.environ.get("CR_LIMIT", 90))  # seconds for anything that is waited for


def case(function):
    CASES[function.__name__] = function
    return function


class Context:
    def __init__(self, lab, options):
        self.lab = lab
        self.options = options
        self.lab.workers = 1
        self.tools = 0

    def path(self, name):
        return os.path.join(self.lab.folder, name)

    def program(self, name):
        path = harness.find(self.options.programs, name) or harness.find(self.options.apps, name)
        if path is None:
            raise Failure(f"the program {name} is neither in {self.options.programs} nor in {self.options.apps}")
        return os.path.abspath(path)

    def server(self, name, gpus=1, memory="64M", **options):
        self.lab.env.update({"SOFTGPU_DEVICES": str(gpus), "SOFTGPU_MEMORY": memory})
        try:
            return self.lab.server(name, **options)
        finally:
            del self.lab.env["SOFTGPU_DEVICES"], self.lab.env["SOFTGPU_MEMORY"]

    def sessions(self, server):
        """The GPUs of each session of a server, by the process's number in the job."""
        command = [self.lab.tool("cr-ps"), "--json", "--server", server.unix]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=harness.patient(LIMIT))
        if asked.returncode != 0:
            raise Failure(f"cr-ps: {asked.stderr}")
        return {session["pid"]: session["gpus"] or [session["gpu"]] for session in json.loads(asked.stdout)["sessions"]}

    def tool(self, name, *arguments, refused=None):
        self.tools += 1
        tool = self.lab.start(harness.Process(self.lab, f"{name}{self.tools}", [self.lab.tool(name), *arguments]))
        code = tool.wait(LIMIT)
        if (code == 0) != (refused is None):
            raise Failure(f"{name} ended with {code}\n{tool.describe()}")
        if refused and not re.search(refused, tool.stderr()):
            raise Failure(f"expected {refused!r}\n{tool.describe()}")
        return tool

    def beside(self):
        """Arguments for a restart beside the job that still runs."""
        return ["--job-dir", self.path("copy"), "--output", self.path("copy.out"), "--error", self.path("copy.err")]

    def restart(self, image, *arguments, env=None):
        self.tools += 1
        command = [self.lab.tool("cr-restart"), image, *arguments]
        return self.lab.start(harness.Process(self.lab, f"restart{self.tools}", command, env))


class Ranks:
    """A job of the program apart: ranks that need nobody, and compare their own results."""

    def __init__(self, context, server, count, size=16, gpu=0):
        self.context = context
        self.count = count
        command = [context.program("apart"), "--ranks", str(count), "--size", str(size)]
        self.job = context.lab.job("job", command, server.tcp or server.unix, gpu=gpu)
        self.expect_running(self.job)

    def rank(self, number):
        try:
            with open(f"{self.job.sync}.rank.{number}") as f:
                return tuple(int(word) for word in f.read().split())
        except (OSError, ValueError):
            return None

    def pids(self):
        return [self.rank(number)[1] for number in range(self.count)]

    def expect_running(self, carrier):
        seen = [set() for _ in range(self.count)]

        def all_go_on():
            for number in range(self.count):
                seen[number].add(self.rank(number))
            return all(len(one - {None}) >= 3 for one in seen)

        wait_for(lambda: all_go_on() or not carrier.running(), LIMIT, carrier.describe)
        if not carrier.running():
            raise Failure(f"the job has ended\n{carrier.describe()}\n{self.job.describe()}")

    def expect_places(self, carrier, places):
        """`places`: of each rank, the server and its GPUs."""
        self.expect_running(carrier)
        pids = self.pids()
        servers = {server for server, _ in places}
        got = {(server.unix, pid): gpus for server in servers for pid, gpus in self.context.sessions(server).items()}
        want = {(server.unix, pid): gpus for pid, (server, gpus) in zip(pids, places)}
        if got != want:
            raise Failure(f"the ranks {pids} are at {got}, not at {want}\n{carrier.describe()}")

    def stop(self, carrier, image):
        """Saves the job, whose end it waits for."""
        self.context.tool("cr-checkpoint", "--stop", self.job.id, image)
        if carrier.wait(LIMIT) != 121:
            raise Failure(f"the job was not stopped\n{carrier.describe()}")

    def finish(self, carrier):
        open(self.job.sync + ".end", "w").close()
        carrier.expect_success(LIMIT)
        right = sorted(int(number) for number in re.findall(r"rank (\d+) right\n", self.job.stdout().decode()))
        if right != list(range(self.count)):
            raise Failure(f"right: {right}\n{self.job.describe()}\n{carrier.describe()}")


@case
def servers_and_gpus(context):
    """Four ranks move to two GPUs of two servers each, and come back from an image on one server's two, and on one GPU."""
    first = context.server("first")
    two, other = context.server("two", gpus=2), context.server("other", gpus=2)
    ranks = Ranks(context, first, 4)
    move = ["cr-migrate", ranks.job.id, "--to", two.unix, "--gpu", "0"]
    context.tool(*move, "--map", "1=:1", "--map", f"2={other.unix}:0", "--map", f"3={other.unix}:1")
    ranks.expect_places(ranks.job, [(two, [0]), (two, [1]), (other, [0]), (other, [1])])
    # What is on several servers is saved as a whole.
    image = context.path("image")
    ranks.stop(ranks.job, image)
    for server in (two, other):
        wait_for(lambda: not context.sessions(server), LIMIT, lambda: f"sessions are left on {server.unix}")
    carrier = context.restart(image, "--map", f"0-1={two.unix}:1", "--map", f"2-3={two.unix}:0")
    ranks.expect_places(carrier, [(two, [1]), (two, [1]), (two, [0]), (two, [0])])
    # From there to several servers, by their numbers.
    pids = ranks.pids()
    by_pid = [word for pid in pids[1:] for word in ("--map", f"pid:{pid}={other.unix}:1")]
    context.tool("cr-migrate", ranks.job.id, "--to", first.unix, *by_pid)
    ranks.expect_places(carrier, [(first, [0]), (other, [1]), (other, [1]), (other, [1])])
    # A process that begins to use CUDA later goes to the job's server.
    open(f"{ranks.job.sync}.add.0", "w").close()
    ranks.count += 1
    ranks.expect_places(carrier, [(first, [0]), (other, [1]), (other, [1]), (other, [1]), (first, [0])])
    context.tool("cr-checkpoint", ranks.job.id, context.path("again"))
    ranks.finish(carrier)


@case
def spread_and_gathered(context):
    """Four ranks move from one GPU to two, come back from an image with the GPUs swapped, and move to one GPU together."""
    first, second = context.server("first", gpus=2), context.server("second", gpus=2)
    ranks = Ranks(context, first, 4)
    ranks.expect_places(ranks.job, [(first, [0])] * 4)
    context.tool("cr-migrate", ranks.job.id, "--to", second.unix, "--map", "0-1=:0", "--map", "2-3=:1")
    ranks.expect_places(ranks.job, [(second, [0])] * 2 + [(second, [1])] * 2)
    image = context.path("image")
    ranks.stop(ranks.job, image)
    carrier = context.restart(image, "--server", first.unix, "--map", "0-1=:1", "--map", "2-3=:0")
    ranks.expect_places(carrier, [(first, [1])] * 2 + [(first, [0])] * 2)
    context.tool("cr-migrate", ranks.job.id, "--to", second.unix, "--map", "0-3=:1")
    ranks.expect_places(carrier, [(second, [1])] * 4)
    ranks.finish(carrier)


@case
def over_tcp(context):
    """Two ranks with servers that are reached over TCP: they move to two of them, and come back from an image the other way round."""
    first, second, third = (context.server(name, listen=True) for name in ("first", "second", "third"))
    ranks = Ranks(context, first, 2)
    # Each is mapped to one GPU, so that it needs no more where a server has several.
    context.tool("cr-migrate", ranks.job.id, "--map", f"0={second.tcp}:0", "--map", f"1={third.tcp}:0")
    ranks.expect_places(ranks.job, [(second, [0]), (third, [0])])
    image = context.path("image")
    ranks.stop(ranks.job, image)
    carrier = context.restart(image, "--map", f"0={third.tcp}:0", "--map", f"1={second.tcp}:0")
    ranks.expect_places(carrier, [(third, [0]), (second, [0])])
    # From there to a server over a socket of this machine, and to one over TCP.
    context.tool("cr-migrate", ranks.job.id, "--map", f"0={second.unix}:0", "--map", f"1={first.tcp}:0")
    ranks.expect_places(carrier, [(second, [0]), (first, [0])])
    ranks.finish(carrier)


@case
def without_the_host(context):
    """Memory goes from worker to worker on the same GPU and to another one; where the driver refuses that, the move goes as ever."""
    first, second = context.server("first", gpus=2), context.server("second", gpus=2)
    context.lab.env["SOFTGPU_FAIL"] = "cuMemImportFromShareableHandle:0:801"
    cannot_map = context.server("cannot_map", gpus=2)
    context.lab.env["SOFTGPU_FAIL"] = "cuMemExportToShareableHandle:0:801"
    cannot_offer = context.server("cannot_offer", gpus=2)
    del context.lab.env["SOFTGPU_FAIL"]
    ranks = Ranks(context, first, 2)
    memory = 2 * 16 << 10
    # What cannot_offer has got goes on from there all the same: by the descriptor with which it came.
    for number, (server, gpu, handed_over, direct) in enumerate((
        (second, 0, memory, 0), (first, 1, 0, memory), (second, 1, memory, 0), (cannot_map, 1, 0, 0),
        (cannot_offer, 1, memory, 0), (second, 1, memory, 0), (cannot_offer, 0, 0, memory), (second, 0, 0, 0),
        (first, 0, memory, 0), (second, 0, memory, 0),
    )):  # fmt: skip
        tool = context.tool("cr-migrate", "--json", ranks.job.id, "--to", server.unix, "--gpu", str(gpu))
        ranks.expect_places(ranks.job, [(server, [gpu])] * 2)
        report = json.loads(tool.stdout())
        if (report["handed_over_bytes"], report["direct_bytes"]) != (handed_over, direct) or report["gpu_bytes"] < memory:
            raise Failure(
                f"move {number}: {report}, and not {handed_over} bytes handed over and {direct} copied without the host"
                f"\n{tool.describe()}"
            )
    ranks.finish(ranks.job)


@case
def more_than_half(context):
    """A job that has more than half of the GPU moves on that GPU, and is saved and restarted after that; elsewhere it finds no room."""
    context.lab.env["SOFTGPU_MEMORY_FILE"] = context.path("memory")
    first, second = context.server("first", memory="7M"), context.server("second", memory="7M")
    kib = 2048
    ranks = Ranks(context, first, 2, size=kib)
    for server in (second, first, second):
        tool = context.tool("cr-migrate", "--json", ranks.job.id, "--to", server.unix)
        ranks.expect_places(ranks.job, [(server, [0])] * 2)
        report = json.loads(tool.stdout())
        if report["handed_over_bytes"] != 2 * kib << 10:
            raise Failure(f"{report}\n{tool.describe()}")
    # By --map, too, which compares the memory that is needed with what is free.
    context.tool("cr-migrate", ranks.job.id, "--map", f"0-1={first.unix}")
    ranks.expect_places(ranks.job, [(first, [0])] * 2)
    # Nothing of the way here is left: the job's memory is there once.
    context.lab.env["SOFTGPU_FAIL"] = "cuMemImportFromShareableHandle:0:801"
    cannot_map = context.server("cannot_map", memory="7M")
    del context.lab.env["SOFTGPU_FAIL"]
    context.tool("cr-migrate", ranks.job.id, "--to", cannot_map.unix, refused="CUDA_ERROR_OUT_OF_MEMORY")
    ranks.expect_places(ranks.job, [(first, [0])] * 2)
    image = context.path("image")
    ranks.stop(ranks.job, image)
    wait_for(lambda: not context.sessions(first), LIMIT, lambda: f"sessions are left on {first.unix}")
    carrier = context.restart(image, "--server", second.unix)
    ranks.expect_places(carrier, [(second, [0])] * 2)
    ranks.finish(carrier)


@case
def code_ahead(context):
    """Modules are made before the job stands still, unless that could take memory that it needs."""
    first, second = context.server("first", memory="2G"), context.server("second", memory="2G")
    small = context.server("small")
    ranks = Ranks(context, first, 2)
    for number, (server, ahead) in enumerate(((second, True), (small, False), (first, True))):
        tool = context.tool("cr-migrate", "--json", ranks.job.id, "--to", server.unix)
        ranks.expect_places(ranks.job, [(server, [0])] * 2)
        report = json.loads(tool.stdout())
        if (report["objects_ahead"] > 0) != ahead or report["objects_ahead"] >= report["objects"]:
            raise Failure(f"move {number}: {report}\n{tool.describe()}")
    ranks.finish(ranks.job)


@case
def own_server(context):
    """Ranks come back on the two GPUs of a server of the job's own."""
    ranks = Ranks(context, context.server("first"), 4)
    image = context.path("image")
    context.tool("cr-checkpoint", "--stop", ranks.job.id, image)
    ranks.job.wait(LIMIT)
    gpus = {"SOFTGPU_DEVICES": "2", "SOFTGPU_MEMORY": "64M", "CUDA_REMOTE_SERVER": None}
    carrier = context.restart(image, "--map", "0-1=:0", "--map", "2-3=:1", env=gpus)
    ranks.expect_running(carrier)
    own = os.path.join(ranks.job.directory, "server", "session.sock")
    server = type("Own", (), {"unix": "unix:" + own})
    ranks.expect_places(carrier, [(server, [0]), (server, [0]), (server, [1]), (server, [1])])
    ranks.finish(carrier)


@case
def launcher(context):
    """The ranks of a launcher count, in whatever order the processes were started."""
    first, second = context.server("first"), context.server("second", gpus=2)
    app = context.program("stencil")
    starts = " & ".join(f"RANK={rank} {app} --steps 200" for rank in (2, 0, 1))
    job = context.lab.job("job", ["sh", "-c", f"export OMPI_COMM_WORLD_RANK=0; {starts} & wait"], first.unix, gpu=0, step_ms=50)
    wait_for(lambda: len(context.sessions(first)) == 3 or not job.running(), LIMIT, job.describe)
    job.wait_steps(6, LIMIT)

    def ranks_at(server):
        found = {}
        for pid in harness.descendants(job.pid):
            try:
                with open(f"/proc/{pid}/status") as f:
                    inner = int(re.search(r"^NSpid:.*\s(\d+)$", f.read(), re.M).group(1))
                with open(f"/proc/{pid}/environ") as f:
                    rank = re.search(r"(?:^|\0)RANK=(\d)", f.read())
            except OSError:
                continue
            if rank:
                found[inner] = int(rank.group(1))
        return {found.get(pid): gpus for pid, gpus in context.sessions(server).items()}

    context.tool("cr-migrate", job.id, "--to", first.unix, "--map", f"1={second.unix}:1", "--map", f"2={second.unix}:0")
    at = [ranks_at(server) for server in (first, second)]
    if at != [{0: [0]}, {1: [1], 2: [0]}]:
        raise Failure(f"the ranks are at {at}\n{job.describe()}")
    # The image knows the ranks, too.
    image = context.path("image")
    context.tool("cr-checkpoint", "--stop", job.id, image)
    job.wait(LIMIT)
    carrier = context.restart(image, "--server", second.unix, "--gpu", "0", "--map", f"1={first.unix}", "--map", "2=:1")
    # The sessions are there before the processes.
    job = carrier
    wait_for(lambda: 1 in ranks_at(first) or not carrier.running(), LIMIT, carrier.describe)
    at = [ranks_at(server) for server in (first, second)]
    if at != [{1: [0]}, {0: [0], 2: [1]}]:
        raise Failure(f"the restarted ranks are at {at}\n{carrier.describe()}")
    carrier.expect_success(LIMIT)
    want = sorted(3 * context.lab.native("native", [app, "--steps", "200"]).splitlines())
    got = sorted(open(context.path("job.out"), "rb").read().splitlines())
    if got != want:
        raise Failure(f"other results than natively\n{carrier.describe()}")


@case
def refused(context):
    """What cannot be placed is refused by name before anything is moved, and the job continues where it was."""
    first, two = context.server("first"), context.server("two", gpus=2)
    # On another GPU: on the same one, memory is handed over.
    context.lab.env["SOFTGPU_UUID"] = "another"
    small = context.server("small", memory="3M")
    del context.lab.env["SOFTGPU_UUID"]
    ranks = Ranks(context, first, 4, size=1024)
    image = context.path("image")
    context.tool("cr-checkpoint", ranks.job.id, image)
    stay = [(first, [0])] * 4
    for words, arguments in (
        (r"there is no rank 4; the job's processes with CUDA are rank 0: apart \(PID \d+\), pid:\d+, rank 1:", ["4=:0"]),
        (r"both place apart \(PID \d+\)", ["0-2=:0", "2=:1"]),
        (r"--map 0=gpu8 is not understood", ["0=gpu8"]),
        (r"there is no GPU 7", ["0=:7"]),
        (r"GPU 0 of unix:\S*small\S* has \S+ MiB of free memory, too little for 4\.0 MiB of apart \(PID \d+\) \(1\.0 MiB\), apart",
         [f"0-3={small.unix}:0"]),
    ):  # fmt: skip
        maps = [word for argument in arguments for word in ("--map", argument)]
        context.tool("cr-migrate", ranks.job.id, "--to", two.unix, *maps, refused=words)
        ranks.expect_places(ranks.job, stay)
        copy = [*context.beside(), "--server", two.unix]
        context.tool("cr-restart", image, *copy, *maps, refused=words)
        for server in (two, small):
            wait_for(lambda: not context.sessions(server), LIMIT, lambda: f"sessions are left on {server.unix}")
    context.tool("cr-migrate", ranks.job.id, "--map", f"0={two.unix}:0", refused=r"apart \(PID \d+\) has no server to go to")
    context.tool("cr-migrate", ranks.job.id, refused="no server given")
    ranks.expect_places(ranks.job, stay)
    # Two of them fit.
    context.tool("cr-migrate", ranks.job.id, "--to", two.unix, "--gpu", "1", "--map", f"0-1={small.unix}")
    ranks.expect_places(ranks.job, [(small, [0])] * 2 + [(two, [1])] * 2)
    ranks.finish(ranks.job)


@case
def fewer_gpus(context):
    """A process that sees two GPUs needs two at its place; which ones, and in which order, the map says."""
    two, three = context.server("two", gpus=2), context.server("three", gpus=3)
    ranks = Ranks(context, two, 2, gpu=None)
    before = context.sessions(two)
    words = r"apart \(PID \d+\): it sees 2 GPUs; there is 1 at GPU 2 of"
    context.tool("cr-migrate", ranks.job.id, "--to", three.unix, "--map", "1=:2", refused=words)
    ranks.expect_running(ranks.job)
    if context.sessions(two) != before or context.sessions(three):
        raise Failure(f"something was moved\n{ranks.job.describe()}")
    context.tool("cr-migrate", ranks.job.id, "--to", three.unix, "--map", "0=:2,0", "--map", "1=:1,2")
    ranks.expect_running(ranks.job)
    if sorted(context.sessions(three)) != sorted(ranks.pids()) or context.sessions(two):
        raise Failure(f"the ranks were not moved\n{ranks.job.describe()}")
    ranks.finish(ranks.job)


@case
def sharing(context):
    """Processes that share GPU memory go to one server; otherwise the tools name them."""
    first, two = context.server("first"), context.server("two", gpus=2)
    command = [context.program("ipc_ring"), "--steps", "60"]
    job = context.lab.job("job", command, first.unix, gpu=0, pause_at=[10, 20])
    job.wait_paused(10, LIMIT)
    count = len(context.sessions(first))
    image = context.path("image")
    context.tool("cr-checkpoint", job.id, image)
    words = r"ipc_ring \(PID \d+\) and ipc_ring \(PID \d+\) share GPU memory.*need one server, but they are to go to unix:\S+ and unix:\S+"
    apart = ["--map", f"{count - 1}={first.unix}"]
    context.tool("cr-migrate", job.id, "--to", two.unix, "--gpu", "0", *apart, refused=words)
    copy = [*context.beside(), "--server", two.unix, "--gpu", "0"]
    context.tool("cr-restart", image, *copy, *apart, refused=words)
    if len(context.sessions(first)) != count or context.sessions(two):
        raise Failure(f"something was moved\n{job.describe()}")
    # Each sees one GPU, so that what one opens of the others must be on that.
    words = "cuIpcOpenMemHandle.*the job continues where it was"
    context.tool("cr-migrate", job.id, "--to", two.unix, "--gpu", "0", "--map", f"{count - 1}=:1", refused=words)
    context.tool("cr-migrate", job.id, "--map", f"0-{count - 1}={two.unix}:1")
    if list(context.sessions(two).values()) != [[1]] * count:
        raise Failure(f"the processes are on {context.sessions(two)}\n{job.describe()}")
    job.go(10)
    job.wait_paused(20, LIMIT)
    context.tool("cr-checkpoint", "--stop", job.id, image)
    job.wait(LIMIT)
    job.go(20)
    carrier = context.restart(image, "--map", f"0-1={two.unix}:0", "--map", f"2-{count - 1}={two.unix}:0")
    carrier.expect_success(LIMIT)
    harness.same("placed", job.stdout(), context.lab.native("native", command))


def swap_shared(context, program):
    """A job whose ranks share memory of two GPUs is moved with the GPUs swapped, comes back from an image, and is moved again."""
    first, second = context.server("first", gpus=2), context.server("second", gpus=2)
    command = [context.program(program), "--steps", "100"]
    # It is saved and moved while it runs: a rank that stands still keeps the others' kernels waiting. Real GPUs need seconds to
    # start, so that the steps must last longer there.
    job = context.lab.job("job", command, first.unix, step_ms=300 if context.lab.software else 1000)
    job.wait_steps(3, LIMIT)
    ranks = len(context.sessions(first))

    def place(server, gpus):
        return ["--map", f"0-{ranks - 1}={server.unix}:{gpus}"]

    def go_on(server, carrier):
        wait_for(lambda: len(context.sessions(server)) == ranks or not carrier.running(), LIMIT, carrier.describe)
        steps = len(job.steps())
        wait_for(lambda: len(job.steps()) > steps + 1 or not carrier.running(), LIMIT, carrier.describe)
        if not carrier.running():
            raise Failure(f"the job has ended\n{carrier.describe()}\n{job.describe()}")

    def move(server, gpus, stays, carrier):
        tool = context.tool("cr-migrate", "--json", job.id, *place(server, gpus))
        report = json.loads(tool.stdout())
        # Memory is handed over to the new session where that is on the same GPU.
        if (report["handed_over_bytes"] > 0) != stays or report["gpu_bytes"] == 0:
            raise Failure(f"the move to {gpus} of {server.name}: {report}\n{tool.describe()}")
        go_on(server, carrier)

    move(second, "1,0", False, job)
    image = context.path("image")
    context.tool("cr-checkpoint", "--stop", job.id, image)
    job.wait(LIMIT)
    carrier = context.restart(image, *place(first, "0,1"))
    go_on(first, carrier)
    move(second, "0,1", True, carrier)
    move(first, "1,0", False, carrier)
    job.hurry()
    carrier.expect_success(LIMIT)
    context.lab.env["SOFTGPU_DEVICES"] = "2"
    harness.same("with the GPUs swapped", job.stdout(), context.lab.native("native", command))


@case
def shared_and_swapped(context):
    """Ranks around a ring of memory and events that they share, on two GPUs (ipc_ring)."""
    swap_shared(context, "ipc_ring")


@case
def spinning_and_swapped(context):
    """Ranks whose kernels wait for each other in memory that they share, on two GPUs (peer_spin)."""
    swap_shared(context, "peer_spin")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", help="the driver library for the servers (default: the software GPU)")
    harness.run_cases_in_labs(parser, CASES, Context)


if __name__ == "__main__":
    main()
