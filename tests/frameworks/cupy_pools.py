# SPDX-License-Identifier: Apache-2.0
"""CuPy with the driver's stream-ordered memory pool: its figures, a cooperative kernel, a captured stream, sparse matrices."""

import cupy
import numpy
from cupyx.scipy import ndimage, sparse

import hook

options = hook.arguments(20)
pool = cupy.cuda.MemoryAsyncPool()
cupy.cuda.set_allocator(pool.malloc)
module = cupy.RawModule(
    code=r"""
#include <cooperative_groups.h>
extern "C" __global__ void ring(unsigned* values) {
  auto grid = cooperative_groups::this_grid();
  const unsigned i = grid.thread_rank(), next = (i + 1) % grid.size();
  const unsigned mine = values[next];
  grid.sync();
  values[i] = values[i] * 5 + mine;
}""",
    options=("--std=c++17",),
    enable_cooperative_groups=True,
)
ring = module.get_function("ring")
values = cupy.arange(512, dtype=cupy.uint32)
matrix = sparse.random(200, 200, 0.05, format="csr", random_state=1, dtype=cupy.float64)
picture = cupy.sin(cupy.arange(64 * 64, dtype=cupy.float64)).reshape(64, 64)
stream = cupy.cuda.Stream(non_blocking=True)
counted = cupy.zeros(1000, dtype=cupy.int64)
cupy.cuda.Device().synchronize()
with stream:
    stream.begin_capture()
    counted += 3
    graph = stream.end_capture()
for step in range(1, options.steps + 1):
    ring((8,), (64,), (values,))
    matrix.data *= 0.5 + 1 / step
    picture = ndimage.gaussian_filter(picture, 1.5) * 1.01
    graph.launch(stream)
    stream.synchronize()
    parts = [values, (matrix @ matrix).toarray(), picture, counted]
    before = pool.used_bytes()
    block = cupy.empty(1000 * step, dtype=cupy.uint8)
    taken = pool.used_bytes() - before
    del block
    # Of what is reserved it is only promised that it is enough.
    assert 0 < before == pool.used_bytes() <= pool.total_bytes() and pool.free_bytes() >= 0
    print(step, taken, int(counted[7]), hook.digest(*[numpy.ascontiguousarray(cupy.asnumpy(part)) for part in parts]))
    hook.step(step)
