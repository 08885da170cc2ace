# SPDX-License-Identifier: Apache-2.0
"""Two processes: DistributedDataParallel over NCCL, with a GPU each. Where there is one GPU, both use it.

NCCL refuses two processes on one GPU, unless it takes them for processes of two hosts. Then it sends through TCP.
"""

import os
import socket

import distributed_training
import hook
from torch_setup import torch
from torch import distributed, multiprocessing

RANKS = 2


def train(rank, steps, port, step_done):
    gpus = torch.cuda.device_count()
    if gpus < RANKS:
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(rank % gpus)
    # Not a file: the job would delete it in the end, and what is restarted from an image after that would wait for it.
    distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    # While one process waits for a test in hook.step, the other must not wait for it in a kernel: no GPU would be idle.
    distributed_training.train(rank, rank % gpus, steps, 4 << 20, step_done.wait)


if __name__ == "__main__":
    options = hook.arguments(24)
    step_done = multiprocessing.get_context("spawn").Barrier(RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(train, (options.steps, port, step_done), nprocs=RANKS)
