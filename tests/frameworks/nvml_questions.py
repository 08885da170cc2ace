# SPDX-License-Identifier: Apache-2.0
"""What monitoring tools ask NVML, by way of nvidia-smi (if there is one) and of the library itself. Prints what does not change."""

import ctypes
import re
import shutil
import subprocess

import hook

options = hook.arguments(2)
nvml = ctypes.CDLL("libnvidia-ml.so.1")


class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def ask(name, *arguments):
    result = getattr(nvml, name)(*arguments)
    if result != 0:
        raise SystemExit(f"{name}: NVML error {result}")


for step in range(1, options.steps + 1):
    ask("nvmlInit_v2")
    count = ctypes.c_uint()
    ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
    version = ctypes.create_string_buffer(80)
    ask("nvmlSystemGetDriverVersion", version, 80)
    print(step, count.value, version.value.decode())
    for index in range(count.value):
        device, memory, name, uuid = ctypes.c_void_p(), Memory(), ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
        major, minor = ctypes.c_int(), ctypes.c_int()
        ask("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
        ask("nvmlDeviceGetName", device, name, 96)
        ask("nvmlDeviceGetUUID", device, uuid, 96)
        ask("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        ask("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
        if not 0 < memory.free <= memory.total or memory.used > memory.total:
            raise SystemExit("impossible memory figures")
        print(index, name.value.decode(), uuid.value.decode(), memory.total, f"{major.value}.{minor.value}")
    ask("nvmlShutdown")
    smi = shutil.which("nvidia-smi")
    if smi:
        fields = "index,name,uuid,pci.bus_id,driver_version,memory.total,compute_cap"
        for command in ([smi, "-L"], [smi, f"--query-gpu={fields}", "--format=csv"]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            print(done.stdout + done.stderr, end="")
        table = subprocess.run([smi], capture_output=True, text=True, timeout=60)
        print("nvidia-smi", table.returncode)
        for line in table.stdout.splitlines():
            # The heading, and the line of each GPU that its power and temperature are not in.
            if "CUDA Version" in line or re.search(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.0", line):
                print(line)
    hook.step(step)
