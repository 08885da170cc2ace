# SPDX-License-Identifier: Apache-2.0
"""A whole training step, dropout and optimizer included, captured once and replayed."""

import hook
from torch_setup import torch
from torch import nn
from torch.nn import functional

options = hook.arguments(40)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters(), 1e-3, capturable=True)
images, labels = torch.zeros(128, 64, device="cuda"), torch.zeros(128, dtype=torch.long, device="cuda")
data = torch.Generator().manual_seed(1)


def train():
    optimizer.zero_grad(set_to_none=True)
    loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        train()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    static_loss = train()
for step in range(1, options.steps + 1):
    images.copy_(torch.randn(128, 64, generator=data))
    labels.copy_(torch.randint(0, 10, (128,), generator=data))
    graph.replay()
    print(step, hook.exact(static_loss.item()))
    hook.step(step)
