# SPDX-License-Identifier: Apache-2.0
"""torch.compile: the kernels are Triton's."""

import hook
from torch_setup import torch
from torch import nn
from torch.nn import functional

options = hook.arguments(30)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
        self.norm = nn.LayerNorm(256)

    def forward(self, x):
        x = functional.gelu(self.a(x))
        x = self.norm(x + torch.sin(self.b(x)))
        return self.c(x * torch.sigmoid(x))


model = Net().cuda()
compiled = torch.compile(model)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
data = torch.Generator().manual_seed(1)
for step in range(1, options.steps + 1):
    images = torch.randn(128, 64, generator=data).cuda()
    labels = torch.randint(0, 10, (128,), generator=data).cuda()
    loss = functional.cross_entropy(compiled(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, hook.exact(loss.item()))
    hook.step(step)
