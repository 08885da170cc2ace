# SPDX-License-Identifier: Apache-2.0
"""The driver API from Python, with nothing but ctypes: memory, a module of PTX text, a stream, launches."""

import array

import hook
from driver import COUNT, Device, reference

options = hook.arguments(20)
device = Device()
values = array.array("I", range(COUNT))
device.write(values)
for step in range(1, options.steps + 1):
    device.mix()
    values = reference(values, step - 1)
    got = device.read()
    if got != values:
        raise SystemExit(f"step {step}: wrong values")
    print(step, hook.digest(got))
    hook.step(step)
