# SPDX-License-Identifier: Apache-2.0
"""A process that uses CUDA with children that load its data, as PyTorch's DataLoader has them.

The children are forked after the first CUDA call and send their batches through queues, shared memory and files that have no name
any more: what a snapshot of such a job must bring back.
"""

import array
import mmap
import multiprocessing
import os
import tempfile

import hook
from driver import COUNT, Device, reference

WORKERS = 2
SLOT = 4 * COUNT


def batch(step):
    return array.array("I", ((step * 2654435761 + i * 40503) & 0xFFFFFFFF for i in range(COUNT)))


def load(requests, answers, shared, nameless):
    """Makes batches: one half goes through shared memory, the other through a file."""
    while True:
        step = requests.get()
        if step is None:
            return
        data = batch(step).tobytes()
        offset = (step % 4) * SLOT
        shared[offset : offset + SLOT // 2] = data[: SLOT // 2]
        os.pwrite(nameless, data[SLOT // 2 :], offset)
        answers.put(step)


def main():
    options = hook.arguments(16)
    device = Device()
    context = multiprocessing.get_context("fork")
    # More than snapshots take of nameless files by default.
    shared = mmap.mmap(-1, 8 << 20)
    file = tempfile.TemporaryFile(dir="/dev/shm")
    os.truncate(file.fileno(), 8 << 20)
    queues = [(context.Queue(), context.Queue()) for _ in range(WORKERS)]
    workers = [context.Process(target=load, args=(*pair, shared, file.fileno()), daemon=True) for pair in queues]
    for worker in workers:
        worker.start()
    # Always one batch ahead.
    for step in range(1, WORKERS + 1):
        queues[step % WORKERS][0].put(step)
    for step in range(1, options.steps + 1):
        requests, answers = queues[step % WORKERS]
        if answers.get() != step:
            raise SystemExit(f"step {step}: not the batch that was asked for")
        offset = (step % 4) * SLOT
        data = shared[offset : offset + SLOT // 2] + os.pread(file.fileno(), SLOT // 2, offset)
        requests.put(step + WORKERS)
        values = array.array("I", data)
        if values != batch(step):
            raise SystemExit(f"step {step}: a batch was damaged")
        device.write(values)
        device.mix()
        got = device.read()
        if got != reference(values, step - 1):
            raise SystemExit(f"step {step}: wrong values")
        print(step, hook.digest(got))
        hook.step(step)
    for requests, _ in queues:
        requests.put(None)
    for worker in workers:
        worker.join()
    print("workers:", *[worker.exitcode for worker in workers])


main()
