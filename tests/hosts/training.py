# SPDX-License-Identifier: Apache-2.0
"""What torchrun starts on each host: DistributedDataParallel over gloo. PyTorch is one without CUDA, so the layer's forward and
backward are functions of liblinear.so (linear.cu) on the GPU.

Usage: training.py [--steps N], with liblinear.so and tests/frameworks/hook.py beside it.
"""

import ctypes
import os

import hook
import torch
from torch import distributed, nn

ROWS, COLUMNS, RATE = 256, 64, 0.02
library = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "liblinear.so"))


def call(function, *arguments):
    plain = [ctypes.c_void_p(one.data_ptr()) if torch.is_tensor(one) else one for one in arguments]
    code = getattr(library, function)(*plain)
    if code != 0:
        raise RuntimeError(f"{function}: CUDA error {code}")


class OnGpu(torch.autograd.Function):
    """Half the mean square of the errors of the rows that are in GPU memory."""

    @staticmethod
    def forward(context, weights):
        errors = torch.empty(ROWS)
        call("linear_forward", weights, errors)
        return errors.square().mean() / 2

    @staticmethod
    def backward(context, loss):
        gradient = torch.empty(COLUMNS)
        call("linear_backward", gradient)
        return gradient * loss


class Linear(nn.Module):
    def __init__(self, inputs, targets):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(COLUMNS))
        call("linear_open", ROWS, COLUMNS, inputs, targets)

    def forward(self):
        return OnGpu.apply(self.weights)


def train(rank, steps):
    data = torch.Generator().manual_seed(1 + rank)
    inputs = torch.randn(ROWS, COLUMNS, generator=data)
    model = Linear(inputs, inputs @ torch.linspace(-1, 1, COLUMNS) + torch.randn(ROWS, generator=data) / 10)
    parallel = nn.parallel.DistributedDataParallel(model)
    for step in range(1, steps + 1):
        loss = parallel()
        model.zero_grad()
        loss.backward()
        call("linear_step", model.weights.grad, ctypes.c_float(RATE), model.weights)
        many = torch.full((1 << 16,), float(step + rank))  # the gradient has a few hundred bytes
        distributed.all_reduce(many)
        total = loss.detach().clone()
        distributed.all_reduce(total)
        if rank == 0:
            weights = hook.digest(model.weights.detach().numpy())
            print(step, hook.exact(total.item()), weights, hook.exact(many.sum().item()), flush=True)
            hook.step(step)


if __name__ == "__main__":
    options = hook.arguments(24)
    distributed.init_process_group("gloo")
    train(distributed.get_rank(), options.steps)
    distributed.destroy_process_group()
