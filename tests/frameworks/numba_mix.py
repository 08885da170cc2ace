# SPDX-License-Identifier: Apache-2.0
"""Numba: kernels compiled in the process, shared memory, atomics."""

import numpy

# numba-cuda asks for this name; numpy 2.5 dropped it.
if not hasattr(numpy, "row_stack"):
    numpy.row_stack = numpy.vstack

from numba import cuda, int32  # noqa: E402

import hook  # noqa: E402

options = hook.arguments(20)


@cuda.jit
def mix(values):
    i = cuda.grid(1)
    if i < values.size:
        values[i] = (values[i] * 1103515245 + 12345) & 0x7FFFFFFF


@cuda.jit
def histogram(values, bins):
    local = cuda.shared.array(64, int32)
    if cuda.threadIdx.x < 64:
        local[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    if i < values.size:
        cuda.atomic.add(local, values[i] % 64, 1)
    cuda.syncthreads()
    if cuda.threadIdx.x < 64:
        cuda.atomic.add(bins, cuda.threadIdx.x, local[cuda.threadIdx.x])


values = cuda.to_device(numpy.arange(20000, dtype=numpy.int64))
bins = cuda.to_device(numpy.zeros(64, dtype=numpy.int32))
expected = numpy.zeros(64, dtype=numpy.int64)
host = numpy.arange(20000, dtype=numpy.int64)
for step in range(1, options.steps + 1):
    mix[157, 128](values)
    histogram[157, 128](values, bins)
    host = (host * 1103515245 + 12345) & 0x7FFFFFFF
    expected += numpy.bincount(host % 64, minlength=64)
    got = bins.copy_to_host()
    if not (got == expected).all():
        raise SystemExit(f"step {step}: wrong counts")
    print(step, hook.digest(got, values.copy_to_host()))
    hook.step(step)
