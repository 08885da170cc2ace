# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism over NCCL: torchrun starts one process for each GPU, and each has a part of every layer's weights.

A layer split by columns has a part of the outputs on each rank; one split by rows takes a part of the inputs on each rank and
adds up what all have. What travels between the ranks, forward and backward, is part of the graph of autograd.
"""

import hook
import torch_ranks

INPUTS, HIDDEN, CLASSES = 64, 256, 16  # HIDDEN and CLASSES are divided among the ranks


def train(steps):
    from torch_setup import torch
    from torch import distributed, nn
    from torch.nn import functional

    rank, _, barrier = torch_ranks.join_nccl()
    ranks = distributed.get_world_size()

    class ToAll(torch.autograd.Function):
        """The same inputs on all ranks: each has a part of their gradients, which are added up."""

        @staticmethod
        def forward(ctx, inputs):
            return inputs

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            distributed.all_reduce(gradient)
            return gradient

    class SumOfAll(torch.autograd.Function):
        """The sum of what the ranks have; each has the whole gradient of it."""

        @staticmethod
        def forward(ctx, part):
            total = part.clone()
            distributed.all_reduce(total)
            return total

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class JoinColumns(torch.autograd.Function):
        """The columns of all ranks beside each other; each rank keeps the gradient of its own."""

        @staticmethod
        def forward(ctx, part):
            parts = [torch.empty_like(part) for _ in range(ranks)]
            distributed.all_gather(parts, part.contiguous())
            return torch.cat(parts, dim=1)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.chunk(ranks, dim=1)[rank].contiguous()

    class ByColumns(nn.Linear):
        """A layer of whose `outputs` this rank has its part, with their biases."""

        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs // ranks)

        def forward(self, inputs):
            return super().forward(ToAll.apply(inputs))

    class ByRows(nn.Linear):
        """A layer of whose `inputs` this rank takes its part. The biases are added on all ranks, once, so all have the same."""

        def __init__(self, inputs, outputs):
            super().__init__(inputs // ranks, outputs, bias=False)
            self.shared_bias = nn.Parameter(torch.zeros(outputs))

        def forward(self, inputs):
            return SumOfAll.apply(super().forward(inputs)) + self.shared_bias

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.widen, self.narrow = ByColumns(INPUTS, HIDDEN), ByRows(HIDDEN, INPUTS)
            self.classify = ByColumns(INPUTS, CLASSES)

        def forward(self, inputs):
            hidden = inputs + self.narrow(functional.gelu(self.widen(inputs)))
            return JoinColumns.apply(self.classify(hidden))

    torch.manual_seed(20 + rank)  # other weights on each rank: they are parts of one layer
    model = Model().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data = torch.Generator().manual_seed(1)  # the same data on each
    for step in range(1, steps + 1):
        inputs = torch.randn(64, INPUTS, generator=data).cuda()
        labels = torch.randint(0, CLASSES, (64,), generator=data).cuda()
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mine = torch.cat([loss.detach().view(1)] + [weights.detach().flatten() for weights in model.parameters()])
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        distributed.all_gather(parts, mine)
        if rank == 0:
            print(step, hook.exact(loss.item()), *(hook.digest(part.cpu().numpy()) for part in parts), flush=True)
            hook.step(step)
        barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch_ranks.main(train, 24)
