# SPDX-License-Identifier: Apache-2.0
"""Runs a program that becomes its own server: it makes CUDA calls with a real worker first, says "ready", the worker is stopped for
good, and the program goes on by itself (hot_calls.cc, ../producers/producers.cc)."""

import os
import signal
import subprocess
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
for folder in (os.path.join(HERE, "../../tests/matrix"), os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/matrix")):
    sys.path.insert(0, folder)
sys.dont_write_bytecode = True
import harness  # noqa: E402


def run_alone(lab, command, what):
    """What the program, called `what` in complaints, prints after "ready", as bytes."""
    server = lab.server()
    libraries = os.path.join(lab.folder, "lib")
    os.makedirs(libraries)
    os.symlink(os.path.realpath(lab.tool("libcuda-remote.so")), os.path.join(libraries, "libcuda.so.1"))
    environment = dict(os.environ, LD_LIBRARY_PATH=libraries, CUDA_REMOTE_SERVER=server.unix)
    for name in ("CUDA_REMOTE_TRACE", "CUDA_REMOTE_TIMELINE", "CUDA_REMOTE_JOB_DIR", "CUDA_REMOTE_SYNC"):
        environment.pop(name, None)
    before = set(server.workers())
    with open(os.path.join(lab.folder, "errors"), "wb") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment)
    try:
        said = process.stdout.readline()
        if said != b"ready\n":
            process.wait(60)
            with open(errors.name, errors="replace") as f:
                raise harness.Failure(f"{what} did not get ready: {said!r}\n{f.read()[-3000:]}")
        # All workers are idle; the client's is one of them.
        for pid in set(server.workers()) | before:
            try:
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:
                pass
        out, _ = process.communicate(b"go\n", timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for pid in set(server.workers()) | before:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    if process.returncode != 0:
        with open(errors.name, errors="replace") as f:
            raise harness.Failure(f"{what} ended with exit code {process.returncode}\n{f.read()[-3000:]}")
    return out
