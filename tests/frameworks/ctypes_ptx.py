"""The driver API from Python, with nothing but ctypes: memory, a module of PTX text, a stream, launches."""

import array
import ctypes

import hook

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

.visible .entry count()
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


def main():
    options = hook.arguments(20)
    device, context, module, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), PTX)
    functions = {}
    for name in ("mix", "count"):
        functions[name] = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(functions[name]), module, name.encode())
    call("cuStreamCreate", ctypes.byref(stream), 0)
    values = array.array("I", range(COUNT))
    nbytes = ctypes.c_size_t(4 * COUNT)
    memory = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(memory), nbytes)
    call("cuMemcpyHtoD_v2", memory, ctypes.c_void_p(values.buffer_info()[0]), nbytes)
    for step in range(1, options.steps + 1):
        launch(functions["mix"], stream, (COUNT + 255) // 256, 256, memory, ctypes.c_uint(COUNT))
        launch(functions["count"], stream, 1, 1)
        call("cuStreamSynchronize", stream)
        values = reference(values, step - 1)
        got = array.array("I", bytes(4 * COUNT))
        call("cuMemcpyDtoH_v2", ctypes.c_void_p(got.buffer_info()[0]), memory, nbytes)
        if got != values:
            raise SystemExit(f"step {step}: wrong values")
        print(step, hook.digest(got))
        hook.step(step)
    call("cuMemFree_v2", memory)


main()
