# SPDX-License-Identifier: Apache-2.0
"""Calls cuFFT, cuRAND and cuBLAS, of whose kernels a part exists as machine code alone. Prints what came out, a line for each.

Usage: libraries.py FOLDER   FOLDER: where the libraries are
"""

import cmath
import ctypes
import os
import sys

FORWARD, C2C = -1, 0x29  # cufft.h
XORWOW = 101  # curand.h
TO_DEVICE, TO_HOST = 1, 2  # driver_types.h

load = lambda name: ctypes.CDLL(os.path.join(sys.argv[1], name))
cudart, cufft, curand, cublas = (load(f"lib{name}.so") for name in ("cudart", "cufft", "curand", "cublas"))


def check(result, what):
    if result != 0:
        raise SystemExit(f"{what} returned {result}")


def to_device(values):
    """Memory of the GPU with these floats."""
    memory = ctypes.c_void_p()
    host = (ctypes.c_float * len(values))(*values)
    check(cudart.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(ctypes.sizeof(host))), "cudaMalloc")
    check(cudart.cudaMemcpy(memory, host, ctypes.c_size_t(ctypes.sizeof(host)), TO_DEVICE), "cudaMemcpy")
    return memory


def to_host(memory, count):
    host = (ctypes.c_float * count)()
    check(cudart.cudaMemcpy(host, memory, ctypes.c_size_t(ctypes.sizeof(host)), TO_HOST), "cudaMemcpy")
    return list(host)


def fft(count):
    """Whether cuFFT's transform of `count` numbers is the one that its definition gives."""
    signal = [complex((7 * i) % 11 - 5, (3 * i) % 13 - 6) for i in range(count)]
    roots = [cmath.exp(-2j * cmath.pi * k / count) for k in range(count)]
    want = [sum(signal[i] * roots[i * k % count] for i in range(count)) for k in range(count)]
    memory = to_device([part for value in signal for part in (value.real, value.imag)])
    plan = ctypes.c_int()
    check(cufft.cufftPlan1d(ctypes.byref(plan), count, C2C, 1), "cufftPlan1d")
    check(cufft.cufftExecC2C(plan, memory, memory, FORWARD), "cufftExecC2C")
    got = to_host(memory, 2 * count)
    check(cufft.cufftDestroy(plan), "cufftDestroy")
    worst = max(abs(complex(got[2 * k], got[2 * k + 1]) - want[k]) for k in range(count))
    return "right" if worst < 1e-4 * count else f"wrong by {worst}"


def random(count):
    """Whether cuRAND's generator on the GPU gives the numbers that the same one on the host gives."""
    on_host = (ctypes.c_float * count)()
    on_gpu = to_device([0] * count)
    for make, numbers in ((curand.curandCreateGeneratorHost, on_host), (curand.curandCreateGenerator, on_gpu)):
        generator = ctypes.c_void_p()
        check(make(ctypes.byref(generator), XORWOW), "curandCreateGenerator")
        check(curand.curandSetPseudoRandomGeneratorSeed(generator, ctypes.c_ulonglong(20)), "curandSetPseudoRandomGeneratorSeed")
        check(curand.curandGenerateUniform(generator, numbers, ctypes.c_size_t(count)), "curandGenerateUniform")
        check(curand.curandDestroyGenerator(generator), "curandDestroyGenerator")
    return "right" if to_host(on_gpu, count) == list(on_host) and len(set(on_host)) > count // 2 else "wrong"


def saxpy(handle, count):
    """Whether cuBLAS's y += 3 x is right: the numbers are small enough to be exact."""
    x, y = to_device(range(count)), to_device([5 * i % 97 for i in range(count)])
    factor = ctypes.c_float(3)
    check(cublas.cublasSaxpy_v2(handle, count, ctypes.byref(factor), x, 1, y, 1), "cublasSaxpy")
    return "right" if to_host(y, count) == [3 * i + 5 * i % 97 for i in range(count)] else "wrong"


def sgemm(handle, size):
    """What the product of two matrices returns."""
    a, b, c = (to_device([1] * size * size) for _ in range(3))
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    result = cublas.cublasSgemm_v2(
        handle, 0, 0, size, size, size, ctypes.byref(one), a, size, b, size, ctypes.byref(zero), c, size
    )
    check(cudart.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
    return f"returned {result}"


for count in (64, 100, 256):
    print("fft", count, fft(count))
print("random", random(5000))
handle = ctypes.c_void_p()
check(cublas.cublasCreate_v2(ctypes.byref(handle)), "cublasCreate")
print("saxpy", saxpy(handle, 10007))
for _ in range(2):
    print("sgemm", sgemm(handle, 32))
print("saxpy", saxpy(handle, 1000))
check(cublas.cublasDestroy_v2(handle), "cublasDestroy")
