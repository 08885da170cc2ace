# SPDX-License-Identifier: Apache-2.0
"""What each process does in the programs that train with DistributedDataParallel."""

import hook
from torch_setup import torch
from torch import distributed, nn
from torch.nn import functional


def train(rank, device, steps, words, after_step=lambda: None):
    """Trains on the GPU `device` for `steps` steps; each adds up `words` words of all processes besides the gradients.

    torch.distributed is set up before. The process of rank 0 prints each step and calls hook.step; then all call after_step.
    """
    torch.cuda.set_device(device)
    torch.manual_seed(20)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).cuda()
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[device])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data = torch.Generator().manual_seed(1 + rank)
    for step in range(1, steps + 1):
        inputs = torch.randn(64, 64, generator=data).cuda()
        labels = torch.randint(0, 10, (64,), generator=data).cuda()
        loss = functional.cross_entropy(parallel(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        many = torch.full((words,), float(step + rank), device="cuda")  # the gradients have a few kilobytes
        distributed.all_reduce(many)
        total = loss.detach().clone()
        distributed.all_reduce(total)
        if rank == 0:
            print(step, hook.exact(total.item()), hook.exact(many.sum().item()), flush=True)
            hook.step(step)
        after_step()
    distributed.destroy_process_group()
