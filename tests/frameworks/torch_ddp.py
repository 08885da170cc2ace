# SPDX-License-Identifier: Apache-2.0
"""torchrun starts one process for each GPU: DistributedDataParallel over NCCL. Where there is one GPU, two processes use it."""

import torch_ranks


def train(steps):
    import distributed_training

    rank, device, barrier = torch_ranks.join_nccl()
    distributed_training.train(rank, device, steps, 4 << 20, barrier)


if __name__ == "__main__":
    torch_ranks.main(train, 24)
