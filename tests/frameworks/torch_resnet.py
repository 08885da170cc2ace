# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 with momentum, channels last."""

import hook
from torch_setup import torch
from torch.nn import functional

from models import resnet50

options = hook.arguments(12)
model = resnet50().cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
data = torch.Generator().manual_seed(1)
for step in range(1, options.steps + 1):
    images = torch.randn(32, 3, 224, 224, generator=data).cuda().to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (32,), generator=data).cuda()
    loss = functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, hook.exact(loss.item()))
    hook.step(step)
