# SPDX-License-Identifier: Apache-2.0
"""The driver API through ctypes, and a small module of PTX text, for the programs that need no framework.

Device: the process's one GPU context and module, with a buffer of COUNT 32-bit values that `mix` changes in place. One thread.
"""

import array
import ctypes

PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 launches;

// Each thread: value = value * 1664525 + 1013904223 + the number of launches before.
.visible .entry mix(.param .u64 data, .param .u32 count)
{
  .reg .pred %p;
  .reg .b32 %r<8>;
  .reg .b64 %d<4>;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r1, %r2, %r3;
  ld.param.u32 %r5, [count];
  setp.ge.u32 %p, %r4, %r5;
  @%p ret;
  ld.param.u64 %d1, [data];
  mul.wide.u32 %d2, %r4, 4;
  add.s64 %d3, %d1, %d2;
  ld.global.u32 %r6, [%d3];
  mad.lo.s32 %r6, %r6, 1664525, 1013904223;
  ld.global.u32 %r7, [launches];
  add.s32 %r6, %r6, %r7;
  st.global.u32 [%d3], %r6;
  ret;
}

.visible .entry tally()
{
  .reg .b32 %r<2>;
  ld.global.u32 %r0, [launches];
  add.s32 %r0, %r0, 1;
  st.global.u32 [launches], %r0;
  ret;
}
\0"""

COUNT = 5000
cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    """Calls a driver function; ends the program if it fails."""
    result = getattr(cuda, name)(*arguments)
    if result != 0:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(result, ctypes.byref(text))
        raise SystemExit(f"{name}: {text.value.decode() if text.value else result}")


def reference(values, launches):
    return array.array("I", [(v * 1664525 + 1013904223 + launches) & 0xFFFFFFFF for v in values])


def launch(function, stream, blocks, threads, *parameters):
    pointers = (ctypes.c_void_p * max(1, len(parameters)))(*[ctypes.addressof(p) for p in parameters])
    call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)


class Device:
    """GPU 0 with the module loaded, a stream, and memory for COUNT values."""

    def __init__(self):
        device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.stream, self.memory = ctypes.c_void_p(), ctypes.c_uint64()
        call("cuInit", 0)
        call("cuDeviceGet", ctypes.byref(device), 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        call("cuModuleLoadData", ctypes.byref(module), PTX)
        self.functions = {}
        for name in ("mix", "tally"):
            self.functions[name] = ctypes.c_void_p()
            call("cuModuleGetFunction", ctypes.byref(self.functions[name]), module, name.encode())
        call("cuStreamCreate", ctypes.byref(self.stream), 0)
        call("cuMemAlloc_v2", ctypes.byref(self.memory), ctypes.c_size_t(4 * COUNT))

    def write(self, values):
        call("cuMemcpyHtoD_v2", self.memory, ctypes.c_void_p(values.buffer_info()[0]), ctypes.c_size_t(4 * COUNT))

    def mix(self):
        """One step on the GPU; `reference` is what it does. Counts its calls in a variable of the module."""
        launch(self.functions["mix"], self.stream, (COUNT + 255) // 256, 256, self.memory, ctypes.c_uint(COUNT))
        launch(self.functions["tally"], self.stream, 1, 1)
        call("cuStreamSynchronize", self.stream)

    def read(self):
        values = array.array("I", bytes(4 * COUNT))
        call("cuMemcpyDtoH_v2", ctypes.c_void_p(values.buffer_info()[0]), self.memory, ctypes.c_size_t(4 * COUNT))
        return values
