# SPDX-License-Identifier: Apache-2.0
"""What the framework programs share: the command line, printing, and the hook for checkpoint tests.

The same hook as tests/apps/support/app.h: after each step the environment decides whether to note it (CR_TEST_SYNC_FILE), to wait
there (CR_TEST_PAUSE_AT), or to sleep (CR_TEST_STEP_MS, until CR_TEST_SYNC_FILE.fast exists). Without these variables it does nothing. No file stays open, so a snapshot
of the process never finds one. One thread.

On SIGUSR1 a program writes the stacks of all its threads to its stderr; the tests ask for them when a case takes too long.
"""

import argparse
import faulthandler
import hashlib
import os
import signal
import time

faulthandler.register(signal.SIGUSR1)


def arguments(steps):
    """The command line: --steps N, with this default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps)
    return parser.parse_args()


def step(number):
    """To be called after step `number`, from 1."""
    sync = os.environ.get("CR_TEST_SYNC_FILE")
    if sync:
        pauses = [int(text) for text in os.environ.get("CR_TEST_PAUSE_AT", "").split(",") if text]
        with open(sync, "a") as f:
            f.write(f"{'paused' if number in pauses else 'step'} {number}\n")
        if number in pauses:
            while not os.path.exists(f"{sync}.go.{number}"):
                time.sleep(0.005)
    if not (sync and os.path.exists(f"{sync}.fast")):
        time.sleep(int(os.environ.get("CR_TEST_STEP_MS", "0")) / 1000)


def exact(value):
    """A float with every bit of it."""
    return float(value).hex()


def digest(*buffers):
    """A short hash of the bytes of all buffers (NumPy arrays, bytes)."""
    total = hashlib.sha256()
    for buffer in buffers:
        total.update(memoryview(buffer).cast("B"))
    return total.hexdigest()[:16]
