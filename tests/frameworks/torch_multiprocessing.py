# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors sent between processes: a pipeline of two workers and queues, by torch.multiprocessing (start method spawn).

Each step's tensor is made by the first process, changed in place by the first worker, which sends a copy on; the second
worker turns that into a new one, which is read by the first process. One tensor is shared by all of them from the first
step to the last. All is on one GPU, in whole numbers, so every step has one right answer, which the first process also
computes on the CPU.
"""

import hook
from torch_setup import torch
from torch import multiprocessing

SIZE = 1 << 16
MODULUS = 1000003


def start(step):
    return (torch.arange(SIZE, dtype=torch.int64) * (step * 7919 + 1)) % MODULUS


def change(tensor, step):
    tensor.mul_(31).add_(step).remainder_(MODULUS)


def turn(tensor, total):
    return (tensor.flip(0) * 17 + total) % MODULUS


def changer(received, sent, shared):
    """Changes the producer's memory in place, and counts in the shared tensor."""
    for step, tensor in iter(received.get, None):
        change(tensor, step)
        shared[0] += tensor.sum()
        torch.cuda.synchronize()
        sent.put((step, tensor.clone()))  # PyTorch does not send on what another process has made
        del tensor
    sent.put(None)


def turner(received, sent, shared, done):
    """Makes a new tensor of what it receives, and keeps it until the first process has read it."""
    for step, tensor in iter(received.get, None):
        result = turn(tensor, shared[0])
        torch.cuda.synchronize()
        sent.put((step, result))
        del tensor, result
    done.wait()


def main():
    options = hook.arguments(20)
    spawning = multiprocessing.get_context("spawn")
    first, second, third = spawning.Queue(), spawning.Queue(), spawning.Queue()
    done = spawning.Event()
    shared = torch.zeros(4, dtype=torch.int64, device="cuda")
    workers = [
        spawning.Process(target=changer, args=(first, second, shared)),
        spawning.Process(target=turner, args=(second, third, shared, done)),
    ]
    for worker in workers:
        worker.start()
    total = 0
    kept = []
    for step in range(1, options.steps + 1):
        sent = start(step).cuda()
        torch.cuda.synchronize()
        first.put((step, sent))
        number, result = third.get()
        want = start(step)
        change(want, step)
        total += int(want.sum())
        wanted = turn(want, total)
        right = number == step and torch.equal(result.cpu(), wanted) and int(shared[0]) == total
        if not right or not torch.equal(sent.cpu(), want):
            raise SystemExit(f"step {step}: wrong result")
        # Some results stay open across steps, and with them the other process's memory.
        kept = (kept + [result])[-3:]
        print(step, hook.digest(result.cpu().numpy()), total, flush=True)
        del sent, result
        hook.step(step)
    kept.clear()
    first.put(None)
    done.set()
    for worker in workers:
        worker.join()
        if worker.exitcode != 0:
            raise SystemExit(f"a worker ended with {worker.exitcode}")


if __name__ == "__main__":
    main()
