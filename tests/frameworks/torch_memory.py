# SPDX-License-Identifier: Apache-2.0
"""What PyTorch says of its memory and of the GPU, after each of several kinds of work.

PyTorch takes the sizes of workspaces, and the choice of algorithms, from what the driver answers. If one answer were
another under cr-run, it would show here before it shows anywhere else.
"""

import hook
from torch_setup import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def matmul():
    a = torch.randn(1024, 1024, device="cuda")
    return (a @ a).sum()


def matmul_half():
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    return (a @ a).sum()


def convolution():
    layer = nn.Conv2d(16, 64, 3, padding=1).cuda()
    loss = layer(torch.randn(8, 16, 64, 64, device="cuda")).square().mean()
    loss.backward()
    return loss


def attention():
    q = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum()


def recurrent():
    layer = nn.LSTM(128, 256, 2).cuda()
    return layer(torch.randn(30, 16, 128, device="cuda"))[0].sum()


def decomposition():
    return torch.linalg.svd(torch.randn(128, 128, device="cuda"))[1].sum()


def transform():
    return torch.fft.fft(torch.randn(1024, 512, device="cuda")).abs().sum()


def sorting():
    return torch.sort(torch.randn(1 << 20, device="cuda"))[0][:: 1 << 12].sum()


def training():
    """Steps of Adam over batches that come through pinned memory."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 16 * 16, 512), nn.ReLU(), nn.Linear(512, 10),
    ).cuda()  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,)))
    for pixels, labels in DataLoader(images, batch_size=64, pin_memory=True):
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(pixels.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
    return loss


KINDS = (matmul, matmul_half, convolution, attention, recurrent, decomposition, transform, sorting, training)

options = hook.arguments(18)
print(torch.cuda.get_device_properties(0))
print(torch.cuda.get_device_capability(0), torch.cuda.mem_get_info()[1], torch.backends.cudnn.version())
for step in range(1, options.steps + 1):
    kind = KINDS[(step - 1) % len(KINDS)]
    torch.cuda.reset_peak_memory_stats()
    value = kind().item()
    print(step, kind.__name__, hook.exact(value))
    for key, figure in sorted(torch.cuda.memory_stats().items()):
        print("  ", key, figure)
    print("  ", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    hook.step(step)
