# SPDX-License-Identifier: Apache-2.0
"""A small transformer with dropout, trained with Adam."""

import hook
from torch_setup import torch
from torch import nn
from torch.nn import functional

options = hook.arguments(40)
layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
model = nn.Sequential(
    nn.Embedding(1000, 128), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 1000)
).cuda()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
data = torch.Generator().manual_seed(1)
for step in range(1, options.steps + 1):
    tokens = torch.randint(0, 1000, (8, 32), generator=data).cuda()
    loss = functional.cross_entropy(model(tokens).reshape(-1, 1000), tokens.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, hook.exact(loss.item()))
    hook.step(step)
