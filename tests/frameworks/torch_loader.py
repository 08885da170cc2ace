# SPDX-License-Identifier: Apache-2.0
"""DataLoader with forked workers: children of a process that uses CUDA, and pinned memory in a thread."""

import hook
from torch_setup import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

options = hook.arguments(30)


class Numbers(Dataset):
    def __len__(self):
        return 64 * options.steps

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(32, generator=generator), index % 10


model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
loader = DataLoader(Numbers(), batch_size=64, num_workers=2, pin_memory=True, multiprocessing_context="fork")
for step, (inputs, labels) in enumerate(loader, 1):
    loss = functional.cross_entropy(model(inputs.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, hook.exact(loss.item()))
    hook.step(step)
