# SPDX-License-Identifier: Apache-2.0
"""torchrun starts two processes that share one GPU: DistributedDataParallel over gloo, which sends gradients through TCP."""

import os

import torch_ranks


def train(steps):
    import distributed_training
    from torch import distributed

    distributed.init_process_group("gloo")
    distributed_training.train(int(os.environ["RANK"]), 0, steps, 1 << 20)


if __name__ == "__main__":
    torch_ranks.main(train, 24, lambda: 2)
