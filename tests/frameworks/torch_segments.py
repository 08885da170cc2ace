# SPDX-License-Identifier: Apache-2.0
"""The caching allocator with expandable segments: it reserves addresses and maps memory by itself."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import hook  # noqa: E402
from torch_setup import torch  # noqa: E402

options = hook.arguments(24)
data = torch.Generator().manual_seed(3)
kept = []
for step in range(1, options.steps + 1):
    size = int(torch.randint(1, 24, (1,), generator=data)) << 20
    block = torch.full((size,), float(step), device="cuda")
    kept.append(block * 2 + torch.arange(size, device="cuda") % 97)
    if len(kept) > 5:
        del kept[int(torch.randint(0, 5, (1,), generator=data))]
    if step % 6 == 0:
        torch.cuda.empty_cache()
    print(step, [hook.exact(k.double().sum().item()) for k in kept])
    hook.step(step)
