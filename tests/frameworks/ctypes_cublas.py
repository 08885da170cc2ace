# SPDX-License-Identifier: Apache-2.0
"""cuBLAS calls with their result on the host, or on the GPU and copied, also inside a capture: what they return, and what
the launches of such graphs bring.

libcublas is that of NVIDIA's Python packages, which PyTorch brings, or of the CUDA toolkit.
"""

import ctypes
import glob
import sys

import hook
from driver import Device, call, cuda

N = 1000
THREAD_LOCAL = 1  # CUstreamCaptureMode
HOST, DEVICE = 0, 1  # cublasPointerMode_t


def find_cublas():
    places = [f"{folder}/nvidia/*/lib" for folder in sys.path if folder] + ["/usr/local/cuda/lib64"]
    found = [path for place in places for path in sorted(glob.glob(f"{place}/libcublas.so.[0-9]*"))]
    if not found:
        raise SystemExit("there is no libcublas.so here: install NVIDIA's Python package nvidia-cublas, or the CUDA toolkit")
    return ctypes.CDLL(found[0])


options = hook.arguments(20)
cublas = find_cublas()
device = Device()
handle = ctypes.c_void_p()
x, y, on_gpu = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
print("create", cublas.cublasCreate_v2(ctypes.byref(handle)))
print("stream", cublas.cublasSetStream_v2(handle, device.stream))
for memory in (x, y, on_gpu):
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 * N))
# Each has a result of its own, which its graphs go on writing to.
RESULTS = {
    (name, mode): ctypes.c_float() for name in ("cublasSdot_v2", "cublasSnrm2_v2", "cublasSasum_v2") for mode in (HOST, DEVICE)
}


def compute(name, mode):
    """Calls the function; its result comes to the host by itself or by a copy. Returns what the calls return."""
    vectors = (x, 1, y, 1) if name == "cublasSdot_v2" else (x, 1)
    result = ctypes.byref(RESULTS[name, mode])
    cublas.cublasSetPointerMode_v2(handle, mode)
    if mode == HOST:
        return getattr(cublas, name)(handle, N, *vectors, result)
    status = getattr(cublas, name)(handle, N, *vectors, ctypes.c_void_p(on_gpu.value))
    return status, cuda.cuMemcpyDtoHAsync_v2(result, on_gpu, ctypes.c_size_t(4), device.stream)


def capture(name, mode):
    """The executable graph of one computation, None if there is none, and what the calls on the way have returned."""
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuStreamBeginCapture_v2", device.stream, THREAD_LOCAL)
    status = compute(name, mode)
    ended = cuda.cuStreamEndCapture(device.stream, ctypes.byref(graph))
    if ended != 0 or not graph:
        return None, (status, ended)
    count = ctypes.c_size_t()
    call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    made = cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
    call("cuGraphDestroy", graph)
    return executable if made == 0 else None, (status, ended, count.value, made)


graphs = {}
for step in range(1, options.steps + 1):
    for memory, factor in ((x, step), (y, 3)):
        values = (ctypes.c_float * N)(*[(i * factor) % 17 - 8 for i in range(N)])
        call("cuMemcpyHtoD_v2", memory, values, ctypes.c_size_t(4 * N))
    for key, result in RESULTS.items():
        result.value = -1
        answers = compute(*key), cuda.cuStreamSynchronize(device.stream)
        print(step, *key, *answers, result.value.hex())
        if step % 5 == 1:
            graphs[key], answers = capture(*key)
            print(step, *key, "captured", *answers)
        result.value = -2
        if graphs[key]:
            answers = cuda.cuGraphLaunch(graphs[key], device.stream), cuda.cuStreamSynchronize(device.stream)
            print(step, *key, "launched", *answers, result.value.hex())
    hook.step(step)
print("destroy", cublas.cublasDestroy_v2(handle))
