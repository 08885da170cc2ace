#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Many of something, or too little: threads that wait, descriptors, the size of files.

Usage: scarce.py --product DIR --apps DIR --programs DIR [--driver LIB] [--only CASE,...] [--keep] [--logs FILE]

Exit code: 0 all passed, 1 some failed, 2 wrong use.
"""

import argparse
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../matrix"), os.path.join(os.path.dirname(os.path.realpath(__file__)), "../matrix")]
import harness  # noqa: E402
from harness import Failure, wait_for  # noqa: E402

CASES = {}
LIMIT = int(os.environ.get("CR_LIMIT", 120))  # seconds for anything that is waited for


def case(function):
    CASES[function.__name__] = function
    return function


class Context:
    def __init__(self, lab, options):
        self.lab = lab
        self.options = options
        self.lab.workers = 1

    def program(self, name):
        path = harness.find(self.options.programs, name)
        if path is None:
            raise Failure(f"the program {name} is not in {self.options.programs}")
        return os.path.abspath(path)

    def limited(self, limit, *command):
        """The command with a limit of bash's ulimit, such as "-f 1000"."""
        return ["bash", "-c", f'ulimit {limit}; exec "$0" "$@"', *command]

    def scarce(self, name, limit, server, *arguments):
        """Runs the program under cr-run with a limit of its own, or of cr-run's server, too; its output as lines."""
        command = [self.lab.tool("cr-run"), *(["--server", server] if server else []), "--", self.program("scarce"), *arguments]
        env = {"CUDA_REMOTE_JOB_DIR": os.path.join(self.lab.folder, name + ".job")}
        return self.lab.start(harness.Process(self.lab, name, self.limited(limit, *command), env))

    def without_descriptors(self, server):
        """A job that has no descriptor left, and the file with which it goes on."""
        go = os.path.join(self.lab.folder, "go")
        job = self.lab.job("job", [self.program("scarce"), "descriptors", go], server.unix)
        wait_for(lambda: b"full" in job.stdout() or not job.running(), LIMIT, job.describe)
        return job, go


@case
def many_waits(context):
    """Three hundred threads wait for the GPU, and what they wait for comes after a later wait, over the ring and gRPC."""
    lab = context.lab
    server = lab.server(listen=True)
    for name, address in (("ring", server.unix), ("grpc", server.tcp)):
        job = lab.job(name, [context.program("waits")], address)
        job.expect_success(LIMIT)
        if b"waits ok" not in job.stdout():
            raise Failure(f"unexpected output\n{job.describe()}")


@case
def file_size(context):
    """Under a limit of file sizes (ulimit -f) memory that is shared with the server is refused in the call, and no process ends."""
    lab = context.lab
    server = lab.server()
    # Of the program alone; and of a server that cr-run starts, whose rings are such files, too.
    for name, limit, address in (("own", "-f 100000", server.unix), ("embedded", "-S -f 20000", None)):
        job = context.scarce(name, limit, address, "pinned", "200000000")
        job.expect_success(LIMIT)
        lines = job.stdout().decode().split("\n")
        if "pinned: CUDA_ERROR_OUT_OF_MEMORY" not in lines or "scarce ok" not in lines:
            raise Failure(f"unexpected output\n{job.describe()}")
        if "ulimit -f" not in job.stderr():
            raise Failure(f"the limit is not named\n{job.describe()}")


@case
def image_file_size(context):
    """A tool under a limit of file sizes says what it could not write, and the job continues."""
    lab = context.lab
    server = lab.server()
    job, go = context.without_descriptors(server)
    image = os.path.join(lab.folder, "image")
    tool = context.limited("-f 16", lab.tool("cr-checkpoint"), job.id, image)
    failed = lab.run("checkpoint-small", tool, LIMIT, expect=1)
    if "has died" in failed.stderr() or not failed.stderr().strip():
        raise Failure(f"the tool does not say why\n{failed.describe()}")
    if [name for name in os.listdir(lab.folder) if name.startswith("image") and not name.endswith(".log")]:
        raise Failure(f"left behind: {os.listdir(lab.folder)}")
    open(go, "w").close()
    job.expect_success(LIMIT)


@case
def tool_descriptors(context):
    """A tool's soft limit of descriptors, usually 1024, is no limit of how many processes a job may have."""
    lab = context.lab
    server = lab.server()
    go = os.path.join(lab.folder, "go")
    count = 8
    start = f'for i in $(seq {count}); do "$0" descriptors "$1" & done; wait'
    job = lab.job("job", ["bash", "-c", start, context.program("scarce"), go], server.unix)
    wait_for(lambda: job.stdout().count(b"full") == count or not job.running(), LIMIT, job.describe)
    image = os.path.join(lab.folder, "image")
    lab.run("checkpoint", context.limited("-S -n 30", lab.tool("cr-checkpoint"), "--stop", job.id, image), LIMIT)
    restart = context.limited("-S -n 30", lab.tool("cr-restart"), "--server", server.unix, image)
    open(go, "w").close()
    lab.run("restart", restart, LIMIT)


@case
def threads(context):
    """A program that gets no more threads is told so by the calls that need one, and goes on."""
    server = context.lab.server()
    job = context.lab.job("job", [context.program("scarce"), "threads"], server.unix)
    job.expect_success(LIMIT)
    lines = job.stdout().decode().split("\n")
    for call in ("host function", "user object"):
        if f"{call}: CUDA_ERROR_OUT_OF_MEMORY" not in lines:
            raise Failure(f"unexpected output\n{job.describe()}")
    if "scarce ok" not in lines or "ulimit -u" not in job.stderr():
        raise Failure(f"the limit is not named, or the program did not go on\n{job.describe()}")


@case
def descriptors(context):
    """A program that has no descriptor left is saved, goes on, and is restarted."""
    lab = context.lab
    server = lab.server()
    job, go = context.without_descriptors(server)
    image = os.path.join(lab.folder, "image")
    lab.run("checkpoint", [lab.tool("cr-checkpoint"), job.id, image], LIMIT)
    open(go, "w").close()
    job.expect_success(LIMIT)
    if b"scarce ok" not in job.stdout():
        raise Failure(f"unexpected output\n{job.describe()}")
    os.unlink(go)
    restart = lab.start(harness.Process(lab, "restart", [lab.tool("cr-restart"), image, "--server", server.unix]))
    wait_for(lambda: server.workers() or not restart.running(), LIMIT, restart.describe)
    open(go, "w").close()
    restart.expect_success(LIMIT)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver")
    harness.run_cases_in_labs(parser, CASES, Context)


if __name__ == "__main__":
    main()
