# SPDX-License-Identifier: Apache-2.0
"""torchrun starts two processes that share one GPU: DistributedDataParallel over gloo, which sends gradients through TCP."""

import os
import sys

import hook

RANKS = 2


def train(steps):
    from torch_setup import torch
    from torch import distributed, nn
    from torch.nn import functional

    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).cuda()
    parallel = nn.parallel.DistributedDataParallel(model)
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
        many = torch.full((1 << 20,), float(step + rank), device="cuda")
        distributed.all_reduce(many)
        total = loss.detach().clone()
        distributed.all_reduce(total)
        if rank == 0:
            print(step, hook.exact(total.item()), hook.exact(many.sum().item()), flush=True)
            hook.step(step)
    distributed.destroy_process_group()


if __name__ == "__main__":
    options = hook.arguments(24)
    if "RANK" in os.environ:
        train(options.steps)
    else:
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        os.execv(sys.executable, [sys.executable, *run, os.path.abspath(__file__), f"--steps={options.steps}"])
