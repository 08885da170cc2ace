# SPDX-License-Identifier: Apache-2.0
"""torchrun starts two processes that share one GPU: DistributedDataParallel over gloo, which sends gradients through TCP."""

import os
import sys

import hook

RANKS = 2


def train(steps):
    import distributed_training
    from torch import distributed

    distributed.init_process_group("gloo")
    distributed_training.train(int(os.environ["RANK"]), 0, steps, 1 << 20)


if __name__ == "__main__":
    options = hook.arguments(24)
    if "RANK" in os.environ:
        train(options.steps)
    else:
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        os.execv(sys.executable, [sys.executable, *run, os.path.abspath(__file__), f"--steps={options.steps}"])
