# SPDX-License-Identifier: Apache-2.0
"""A worker that uses CUDA is started as daemons are: in a session of its own, by a process that ends at once.

It is nobody's child that this program has started. Both talk through two pipes; the results are compared with a calculation
here.
"""

import array
import os

import hook

SEED = array.array("I", [(i * 2654435761 + 12345) & 0xFFFFFFFF for i in range(5000)])


def work(requests, replies):
    """In the worker: one step for each request, until there are no more. Replies with the digest of the values."""
    import driver

    device = driver.Device()
    device.write(SEED)
    while os.read(requests, 1):
        device.mix()
        os.write(replies, hook.digest(device.read()).encode())


def main():
    options = hook.arguments(16)
    requests, replies = os.pipe(), os.pipe()
    starter = os.fork()
    if starter == 0:
        if os.fork() == 0:
            os.setsid()
            os.close(requests[1])
            work(requests[0], replies[1])
        os._exit(0)
    os.waitpid(starter, 0)
    os.close(requests[0])
    os.close(replies[1])
    values = SEED
    for step in range(1, options.steps + 1):
        os.write(requests[1], b"x")
        result = os.read(replies[0], 64).decode()
        values = array.array("I", [(v * 1664525 + 1013904223 + step - 1) & 0xFFFFFFFF for v in values])
        if result != hook.digest(values):
            raise SystemExit(f"step {step}: wrong result {result!r}")
        print(step, result, flush=True)
        hook.step(step)
    os.close(requests[1])
    if os.read(replies[0], 1):
        raise SystemExit("the worker said more than it was asked")


if __name__ == "__main__":
    main()
