# SPDX-License-Identifier: Apache-2.0
"""CuPy: array maths, a kernel of the program's own through NVRTC, FFT, linear algebra, random numbers."""

import cupy
import numpy

import hook

options = hook.arguments(20)
logistic = cupy.RawKernel(
    r"""
extern "C" __global__ void logistic(double* x, int n, double r) {
  int i = blockDim.x * blockIdx.x + threadIdx.x;
  if (i < n) x[i] = r * x[i] * (1 - x[i]);
}""",
    "logistic",
)
square_sum = cupy.ReductionKernel("float64 x", "float64 y", "x * x", "a + b", "y = a", "0", "square_sum")
random = cupy.random.RandomState(5)
state = random.uniform(0.1, 0.9, 4096)
for step in range(1, options.steps + 1):
    logistic(((state.size + 127) // 128,), (128,), (state, numpy.int32(state.size), numpy.float64(3.7)))
    matrix = random.standard_normal((64, 64))
    parts = [
        state,
        cupy.matmul(matrix, matrix.T),
        cupy.linalg.svd(matrix, compute_uv=False),
        cupy.linalg.solve(matrix + 64 * cupy.eye(64), matrix),
        cupy.abs(cupy.fft.rfft(state)),
        cupy.sort(state),
        cupy.where(state > 0.5, cupy.sin(state), cupy.cos(state)),
    ]
    print(step, hook.exact(square_sum(state).item()), hook.digest(*[numpy.ascontiguousarray(cupy.asnumpy(p)) for p in parts]))
    hook.step(step)
