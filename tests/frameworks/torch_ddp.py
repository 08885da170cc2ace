# SPDX-License-Identifier: Apache-2.0
"""Two processes, a GPU each: DistributedDataParallel over NCCL."""

import os
import tempfile

import hook
from torch_setup import torch
from torch import distributed, multiprocessing, nn
from torch.nn import functional

RANKS = 2


def train(rank, steps, meeting, step_done):
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    torch.manual_seed(20)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).cuda()
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data = torch.Generator().manual_seed(1 + rank)
    for step in range(1, steps + 1):
        inputs = torch.randn(64, 64, generator=data).cuda()
        labels = torch.randint(0, 10, (64,), generator=data).cuda()
        loss = functional.cross_entropy(parallel(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # More than the gradients' few kilobytes.
        many = torch.full((4 << 20,), float(step + rank), device="cuda")
        distributed.all_reduce(many)
        total = loss.detach().clone()
        distributed.all_reduce(total)
        if rank == 0:
            print(step, hook.exact(total.item()), hook.exact(many.sum().item()), flush=True)
            hook.step(step)
        # While one process waits for a test in hook.step, the other must not wait for it in a kernel: no GPU would be idle.
        step_done.wait()
    distributed.destroy_process_group()


if __name__ == "__main__":
    options = hook.arguments(24)
    step_done = multiprocessing.get_context("spawn").Barrier(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (options.steps, os.path.join(folder, "meeting"), step_done), nprocs=RANKS)
