# SPDX-License-Identifier: Apache-2.0
"""Asks NVML as pynvml does (ctypes, by soname, no CUDA), and prints the answers: one line each."""

import ctypes

nvml = ctypes.CDLL("libnvidia-ml.so.1")


class PciInfo(ctypes.Structure):
    _fields_ = [
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    ]


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def check(result):
    if result != 0:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        raise RuntimeError(nvml.nvmlErrorString(result).decode())


def text(function, *arguments):
    buffer = ctypes.create_string_buffer(96)
    check(function(*arguments, buffer, ctypes.c_uint(96)))
    return buffer.value.decode()


check(nvml.nvmlInit_v2())
count = ctypes.c_uint()
check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
print("count", count.value)
for index in range(count.value):
    device = ctypes.c_void_p()
    check(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)))
    pci, memory = PciInfo(), Memory()
    check(nvml.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(pci)))
    check(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
    print("gpu", index, text(nvml.nvmlDeviceGetUUID, device), pci.busId.decode(), memory.total)
    power = ctypes.c_uint()
    print("power", nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(power)))
print("set", nvml.nvmlDeviceSetPersistenceMode(device, ctypes.c_uint(1)))
check(nvml.nvmlShutdown())
print("after", nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
