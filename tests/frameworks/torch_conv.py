# SPDX-License-Identifier: Apache-2.0
"""A convolutional network trained with Adam on made-up images."""

import hook
from torch_setup import torch
from torch import nn
from torch.nn import functional

options = hook.arguments(40)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
    nn.Dropout2d(0.1), nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 8 * 8, 10),
).cuda()  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
data = torch.Generator().manual_seed(1)
for step in range(1, options.steps + 1):
    images = torch.randn(64, 3, 32, 32, generator=data).cuda()
    labels = torch.randint(0, 10, (64,), generator=data).cuda()
    loss = functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, hook.exact(loss.item()))
    hook.step(step)
