# SPDX-License-Identifier: Apache-2.0
"""One process with all GPUs: data-parallel training, NCCL, and peer copies."""

import hook
from torch_setup import torch
from torch import nn
from torch.nn import functional

options = hook.arguments(24)
gpus = list(range(torch.cuda.device_count()))
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).cuda()
parallel = nn.DataParallel(model, device_ids=gpus)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
data = torch.Generator().manual_seed(1)
for step in range(1, options.steps + 1):
    inputs = torch.randn(128, 64, generator=data).cuda()
    labels = torch.randint(0, 10, (128,), generator=data).cuda()
    loss = functional.cross_entropy(parallel(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    # More than the gradients' few kilobytes.
    parts = [torch.full((1 << 20,), float(step + gpu), device=f"cuda:{gpu}") for gpu in gpus]
    torch.cuda.nccl.all_reduce(parts)
    print(step, hook.exact(loss.item()), *(hook.exact(part.sum().item()) for part in parts))
    hook.step(step)
