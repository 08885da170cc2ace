#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Products of matrices in managed memory with cuBLAS (cublasSgemm and cublasDgemm); prints the same JSON as api_cost.

Usage: cublas_products.py [--quick] | --probe

  --probe   exit code 0 if libcublas is there, else 1

The host fills one factor before each product, and compares all of the result after it. The row's value is
the whole program's time in seconds, without loading the library and making its handle. An ordinary program: run it
natively and under cr-run and compare. libcublas is the system's or that of the Python package nvidia-cublas.
"""

import array
import ctypes
import glob
import json
import os
import sys
import time

ROW = "managed program: cuBLAS products"
ATTACH_GLOBAL = 1
NOT_TRANSPOSED = 0


def load_cublas():
    """The library; None if there is none."""
    folders = [os.path.join(folder, "nvidia") for folder in sys.path if folder]
    packaged = [path for folder in folders for path in sorted(glob.glob(os.path.join(folder, "*", "lib", "libcublas.so.*")))]
    for name in ["libcublas.so.13", "libcublas.so.12", "libcublas.so", *packaged]:
        try:
            # Beside it lies a library that it needs.
            if os.path.isabs(name):
                for lt in glob.glob(os.path.join(os.path.dirname(name), "libcublasLt.so.*")):
                    ctypes.CDLL(lt, ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            pass
    return None


def check(result, what):
    if result != 0:
        raise RuntimeError(f"{what}: error {result}")


def pattern(kind, n, first, factor):
    """n x n numbers: factor * (first, first + 1, ... first + 12, first, ...)."""
    numbers = array.array(kind, [factor * (first + i) for i in range(13)]) * (n * n // 13 + 1)
    return numbers[: n * n]


def products(cuda, cublas, handle, kind, n, rounds):
    multiply, one, zero = {
        "f": (cublas.cublasSgemm_v2, ctypes.c_float(1), ctypes.c_float(0)),
        "d": (cublas.cublasDgemm_v2, ctypes.c_double(1), ctypes.c_double(0)),
    }[kind]
    size = n * n * array.array(kind).itemsize
    matrices = [ctypes.c_uint64() for _ in range(3)]
    for matrix in matrices:
        check(cuda.cuMemAllocManaged(ctypes.byref(matrix), ctypes.c_size_t(size), ATTACH_GLOBAL), "cuMemAllocManaged")
    a, b, c = matrices
    # Twice the matrix of which nothing changes.
    diagonal = array.array(kind, [2] + [0] * n) * n
    ctypes.memmove(b.value, diagonal.buffer_info()[0], size)
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    for step in range(rounds):
        left, doubled = pattern(kind, n, step, 1), pattern(kind, n, step, 2)
        ctypes.memmove(a.value, left.buffer_info()[0], size)
        check(multiply(handle, NOT_TRANSPOSED, NOT_TRANSPOSED, n, n, n, ctypes.byref(one), a, n, b, n,
                       ctypes.byref(zero), c, n), "gemm")  # fmt: skip
        check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
        if compare(c.value, doubled.buffer_info()[0], size) != 0:
            raise RuntimeError("wrong contents")
    for matrix in matrices:
        check(cuda.cuMemFree_v2(matrix), "cuMemFree")


def main():
    cublas = load_cublas()
    if "--probe" in sys.argv:
        sys.exit(0 if cublas else 1)
    quick = "--quick" in sys.argv
    cuda = ctypes.CDLL("libcuda.so.1")
    row = {"name": ROW, "unit": "s"}
    name = ctypes.create_string_buffer(100)
    try:
        device, context, handle = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuInit(0), "cuInit")
        check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
        check(cuda.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        check(cublas.cublasCreate_v2(ctypes.byref(handle)), "cublasCreate")
        n, rounds = (256, 2) if quick else (2048, 10)
        products(cuda, cublas, handle, "f", 256, 1)  # loads the kernels
        products(cuda, cublas, handle, "d", 256, 1)
        begin = time.monotonic()
        products(cuda, cublas, handle, "f", n, rounds)
        products(cuda, cublas, handle, "d", n, rounds)
        row["value"] = time.monotonic() - begin
    except RuntimeError as error:
        row["error"] = str(error)
    print(json.dumps({"gpu": name.value.decode(), "rows": [row]}))


if __name__ == "__main__":
    main()
