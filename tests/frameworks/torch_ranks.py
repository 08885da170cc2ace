# SPDX-License-Identifier: Apache-2.0
"""Programs of several ranks, started by torchrun on this machine: how many there are, and how they meet over NCCL."""

import os
import subprocess
import sys

import hook

# In a process of its own: the one that becomes torchrun has used no CUDA.
ASK_FOR_GPUS = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(count.value if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0)
"""


def count():
    """How many ranks there are: CR_TEST_RANKS if that is set, otherwise one for each GPU, and at least two."""
    if "CR_TEST_RANKS" in os.environ:
        return int(os.environ["CR_TEST_RANKS"])
    asked = subprocess.run([sys.executable, "-c", ASK_FOR_GPUS], stdout=subprocess.PIPE, text=True, check=True)
    return max(2, int(asked.stdout))


def main(train, steps, ranks=count):
    """The whole of a program: torchrun starts it again as `ranks()` ranks, each of which calls train(STEPS).

    `steps`: the default of --steps. In a rank, torchrun has set RANK, LOCAL_RANK, WORLD_SIZE, and where the ranks meet.
    """
    options = hook.arguments(steps)
    if "RANK" in os.environ:
        train(options.steps)
        return
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks()}"]
    os.execv(sys.executable, [sys.executable, *torchrun, os.path.abspath(sys.argv[0]), f"--steps={options.steps}"])


def join_nccl():
    """Sets up torch.distributed over NCCL in a rank that torchrun has started.

    Returns the rank, its GPU, which is the current one then, and a barrier: a function that returns once all ranks have
    called it. The ranks wait for it on the host. While one rank waits for a test in hook.step, the others must not wait for it
    in a kernel: their GPUs would not become idle.

    NCCL refuses two ranks on one GPU, unless it takes them for ranks of two hosts. Then it sends through TCP.
    """
    from torch_setup import torch
    from torch import distributed

    rank, gpus = int(os.environ["RANK"]), torch.cuda.device_count()
    device = int(os.environ["LOCAL_RANK"]) % gpus
    if int(os.environ["WORLD_SIZE"]) > gpus:
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl")
    host = distributed.new_group(backend="gloo")
    return rank, device, lambda: distributed.barrier(host)
