# SPDX-License-Identifier: Apache-2.0
"""124M parameters in bf16 with fused attention and fused AdamW.

CR_TEST_CPU_MB: so many MB of CPU tensors, too, written once, of which each step writes a sixteenth anew, always the same.
"""

import os

import hook
from torch_setup import torch
from torch.nn import functional

from models import Transformer

options = hook.arguments(16)
model = Transformer().cuda()
optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
data = torch.Generator().manual_seed(1)
cpu = torch.rand(int(os.environ.get("CR_TEST_CPU_MB", "0")) * 250000)
for step in range(1, options.steps + 1):
    tokens = torch.randint(0, 50304, (4, 257), generator=data).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        scores = model(tokens[:, :-1])
        loss = functional.cross_entropy(scores.float().reshape(-1, scores.shape[-1]), tokens[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    cpu[: cpu.numel() // 16] += 1
    print(step, hook.exact(loss.item()))
    hook.step(step)
