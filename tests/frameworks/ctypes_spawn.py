# SPDX-License-Identifier: Apache-2.0
"""A process that uses CUDA with children that are started anew (start method spawn), as libraries with threads ask for.

The children share a queue, a lock, an event and a counter with it, which are POSIX semaphores whose files have names,
and batches in named shared memory.
"""

import array
import multiprocessing
from multiprocessing import shared_memory

import hook
from driver import COUNT, Device, reference

WORKERS = 2
SLOT = 4 * COUNT


def batch(step):
    return array.array("I", ((step * 2246822519 + i * 40503) & 0xFFFFFFFF for i in range(COUNT)))


def load(number, name, requests, answers, made, lock, done):
    """Makes batches until there is no request left, and counts them together with the others."""
    memory = shared_memory.SharedMemory(name)
    for step in iter(requests.get, None):
        memory.buf[number * SLOT : (number + 1) * SLOT] = batch(step).tobytes()
        with lock:
            made.value += 1
        answers.put(step)
    done.wait()
    memory.close()


def main():
    options = hook.arguments(16)
    device = Device()
    context = multiprocessing.get_context("spawn")
    memory = shared_memory.SharedMemory(create=True, size=WORKERS * SLOT)
    made, lock, done = context.Value("i", 0, lock=False), context.Lock(), context.Event()
    queues = [(context.Queue(), context.Queue()) for _ in range(WORKERS)]
    workers = [
        context.Process(target=load, args=(number, memory.name, *pair, made, lock, done), daemon=True)
        for number, pair in enumerate(queues)
    ]
    for worker in workers:
        worker.start()
    for step in range(1, options.steps + 1):
        number = step % WORKERS
        requests, answers = queues[number]
        requests.put(step)
        if answers.get() != step:
            raise SystemExit(f"step {step}: not the batch that was asked for")
        values = array.array("I", bytes(memory.buf[number * SLOT : (number + 1) * SLOT]))
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
    done.set()
    for worker in workers:
        worker.join()
    print("made:", made.value, "workers:", *[worker.exitcode for worker in workers])
    memory.close()
    memory.unlink()


if __name__ == "__main__":
    main()
