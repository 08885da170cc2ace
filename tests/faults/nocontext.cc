// SPDX-License-Identifier: Apache-2.0
// Calls on a thread without a current context: prints what each one answers. The objects that the calls name were made
// by a thread with one. The driver makes such calls in the context of the object; default streams, and calls that name
// nothing, it refuses.
//
// Work that was accepted must have been done, too: what it has left in memory is printed at the end.
#include <cuda.h>
#include <cudaProfiler.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "tests/faults/driver.h"

namespace {

using cuda_remote::faults::NameOf;

// k adds 1 to v; w adds its argument.
const char kCode[] = R"(
.version 7.0
.target sm_52
.address_size 64
.visible .global .align 4 .u32 v = 7;
.visible .entry k()
{
  .reg .b32 %r<3>;
  ld.global.u32 %r1, [v];
  add.u32 %r2, %r1, 1;
  st.global.u32 [v], %r2;
  ret;
}
.visible .entry w(.param .u32 by)
{
  .reg .b32 %r<4>;
  ld.param.u32 %r3, [by];
  ld.global.u32 %r1, [v];
  add.u32 %r2, %r1, %r3;
  st.global.u32 [v], %r2;
  ret;
}
)";

// One line for each call. The text is the call's own.
#define ASK(call)                               \
  do {                                          \
    const CUresult asked = (call);              \
    printf("%-86s %s\n", #call, NameOf(asked)); \
  } while (0)

// What the main thread made, with its context current.
struct Objects {
  CUdevice device;
  CUcontext context;
  CUstream s;
  CUgreenCtx green;
  CUstream of_green;
  CUevent e, e2;
  CUmodule m;
  CUfunction f, w;
  CUlibrary library;
  CUkernel kernel;
  CUfunction of_kernel;
  CUmodule of_library;
  CUgraph g;
  CUgraphExec ge;
  CUmemoryPool pool;
  CUarray a;
  CUmipmappedArray mips;
  CUtexObject texture;
  CUdeviceptr p, v;
  char* h;
};

void Make(Objects* o) {
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDeviceGet(&o->device, 0));
  CU_CHECK(cuCtxCreate(&o->context, nullptr, 0, o->device));
  CU_CHECK(cuStreamCreate(&o->s, CU_STREAM_NON_BLOCKING));
  CU_CHECK(cuEventCreate(&o->e, 0));
  CU_CHECK(cuEventCreate(&o->e2, 0));
  CU_CHECK(cuModuleLoadData(&o->m, kCode));
  CU_CHECK(cuModuleGetFunction(&o->f, o->m, "k"));
  CU_CHECK(cuModuleGetFunction(&o->w, o->m, "w"));
  size_t bytes;
  CU_CHECK(cuModuleGetGlobal(&o->v, &bytes, o->m, "v"));
  CU_CHECK(cuLibraryLoadData(&o->library, kCode, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU_CHECK(cuLibraryGetKernel(&o->kernel, o->library, "k"));
  CU_CHECK(cuKernelGetFunction(&o->of_kernel, o->kernel));
  CU_CHECK(cuLibraryGetModule(&o->of_library, o->library));
  CU_CHECK(cuGraphCreate(&o->g, 0));
  CUgraphNode node;
  CU_CHECK(cuGraphAddEmptyNode(&node, o->g, nullptr, 0));
  CU_CHECK(cuGraphInstantiate(&o->ge, o->g, 0));
  CUmemPoolProps properties{};
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CU_CHECK(cuMemPoolCreate(&o->pool, &properties));
  CUDA_ARRAY_DESCRIPTOR flat{};
  flat.Width = 16;
  flat.Height = 4;
  flat.Format = CU_AD_FORMAT_UNSIGNED_INT8;
  flat.NumChannels = 1;
  CU_CHECK(cuArrayCreate(&o->a, &flat));
  CUDA_ARRAY3D_DESCRIPTOR levels{};
  levels.Width = 16;
  levels.Height = 4;
  levels.Format = CU_AD_FORMAT_UNSIGNED_INT8;
  levels.NumChannels = 1;
  CU_CHECK(cuMipmappedArrayCreate(&o->mips, &levels, 2));
  CUDA_RESOURCE_DESC resource{};
  resource.resType = CU_RESOURCE_TYPE_ARRAY;
  resource.res.array.hArray = o->a;
  CUDA_TEXTURE_DESC sampling{};
  CU_CHECK(cuTexObjectCreate(&o->texture, &resource, &sampling, nullptr));
  CU_CHECK(cuMemAlloc(&o->p, 4096));
  CU_CHECK(cuMemsetD8(o->p, 1, 4096));
  void* host;
  CU_CHECK(cuMemHostAlloc(&host, 4096, 0));
  o->h = static_cast<char*>(host);
  memset(o->h, 5, 4096);
  CU_CHECK(cuCtxSynchronize());
}

// A green context: its streams lie in no CUcontext that anybody has asked for.
void MakeGreen(Objects* o) {
  CUdevResource all;
  CUdevResourceDesc described;
  CU_CHECK(cuDeviceGetDevResource(o->device, &all, CU_DEV_RESOURCE_TYPE_SM));
  CU_CHECK(cuDevResourceGenerateDesc(&described, &all, 1));
  CU_CHECK(cuGreenCtxCreate(&o->green, described, o->device, CU_GREEN_CTX_DEFAULT_STREAM));
  CU_CHECK(cuGreenCtxStreamCreate(&o->of_green, o->green, CU_STREAM_NON_BLOCKING, 0));
}

void Contexts(const Objects& o) {
  CUcontext c;
  CUdevice device;
  unsigned u;
  unsigned long long id;
  size_t bytes;
  int least, greatest;
  ASK(cuCtxGetCurrent(&c));
  ASK(cuCtxGetDevice(&device));
  ASK(cuCtxGetFlags(&u));
  ASK(cuCtxGetApiVersion(nullptr, &u));
  ASK(cuCtxGetApiVersion(o.context, &u));
  ASK(cuCtxGetId(nullptr, &id));
  ASK(cuCtxGetId(o.context, &id));
  ASK(cuCtxGetLimit(&bytes, CU_LIMIT_STACK_SIZE));
  ASK(cuCtxGetStreamPriorityRange(&least, &greatest));
  ASK(cuCtxSynchronize());
  ASK(cuCtxPopCurrent(&c));
  ASK(cuCtxEnablePeerAccess(o.context, 0));
  ASK(cuProfilerStart());
}

void Streams(const Objects& o) {
  unsigned u;
  int i;
  unsigned long long id;
  CUcontext c;
  CUgreenCtx green;
  CUdevice device;
  CUstreamCaptureStatus status;
  CUstreamAttrValue value{};
  CUstream made;
  ASK(cuStreamCreate(&made, 0));
  ASK(cuStreamQuery(o.s));
  ASK(cuStreamQuery(nullptr));
  ASK(cuStreamQuery(CU_STREAM_LEGACY));
  ASK(cuStreamQuery(CU_STREAM_PER_THREAD));
  ASK(cuStreamSynchronize(o.s));
  ASK(cuStreamSynchronize(nullptr));
  ASK(cuStreamGetFlags(o.s, &u));
  ASK(cuStreamGetFlags(nullptr, &u));
  ASK(cuStreamGetPriority(o.s, &i));
  c = nullptr;
  ASK(cuStreamGetCtx(o.s, &c));
  printf("the stream's context: %s\n", c == o.context ? "right" : "wrong");
  ASK(cuStreamGetCtx(nullptr, &c));
  ASK(cuStreamGetCtx_v2(o.s, &c, &green));
  ASK(cuStreamGetGreenCtx(o.s, &green));
  ASK(cuStreamGetGreenCtx(o.of_green, &green));
  printf("the stream's green context: %s\n", green == o.green ? "right" : "wrong");
  ASK(cuStreamGetId(o.s, &id));
  ASK(cuStreamGetId(nullptr, &id));
  ASK(cuStreamGetDevice(o.s, &device));
  ASK(cuStreamIsCapturing(o.s, &status));
  ASK(cuStreamIsCapturing(nullptr, &status));
  ASK(cuStreamGetAttribute(o.s, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value));
  value.syncPolicy = CU_SYNC_POLICY_AUTO;
  ASK(cuStreamSetAttribute(o.s, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value));
  ASK(cuStreamCopyAttributes(o.s, o.s));
  ASK(cuStreamWaitEvent(o.s, o.e, 0));
  ASK(cuStreamWaitEvent(nullptr, o.e, 0));
  ASK(cuLaunchHostFunc(
      o.s, [](void*) {}, nullptr));
  ASK(cuLaunchHostFunc(
      nullptr, [](void*) {}, nullptr));
  ASK(cuStreamAddCallback(
      o.s, [](CUstream, CUresult, void*) {}, nullptr, 0));
  ASK(cuStreamWriteValue32(o.s, o.p + 64, 9, 0));
  ASK(cuStreamWaitValue32(o.s, o.p + 64, 9, CU_STREAM_WAIT_VALUE_EQ));
  ASK(cuStreamWriteValue32(nullptr, o.p + 64, 9, 0));
  CUgraph captured;
  ASK(cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_RELAXED));
  ASK(cuStreamBeginCapture(o.s, CU_STREAM_CAPTURE_MODE_RELAXED));
  ASK(cuStreamGetCaptureInfo(o.s, &status, nullptr, nullptr, nullptr, nullptr, nullptr));
  ASK(cuLaunchKernel(o.f, 1, 1, 1, 1, 1, 1, 0, o.s, nullptr, nullptr));
  ASK(cuStreamEndCapture(o.s, &captured));
  size_t nodes = 0;
  ASK(cuGraphGetNodes(captured, nullptr, &nodes));
  printf("captured nodes: %zu\n", nodes);
  ASK(cuGraphDestroy(captured));
}

void Events(const Objects& o) {
  CUevent made;
  float ms;
  ASK(cuEventCreate(&made, 0));
  ASK(cuEventRecord(o.e, o.s));
  ASK(cuEventRecord(o.e, nullptr));
  ASK(cuEventRecord(o.e, CU_STREAM_PER_THREAD));
  ASK(cuEventRecordWithFlags(o.e2, o.s, 0));
  ASK(cuEventSynchronize(o.e2));
  ASK(cuEventQuery(o.e));
  ASK(cuEventElapsedTime(&ms, o.e, o.e2));
}

void Functions(const Objects& o) {
  CUmodule loaded;
  CUfunction got;
  CUdeviceptr address;
  size_t bytes, offset;
  unsigned count;
  int value;
  const char* name;
  CUmodule owner;
  CUfunction all[2];
  CUlinkState link;
  ASK(cuLinkCreate(0, nullptr, nullptr, &link));
  ASK(cuModuleLoadData(&loaded, kCode));
  ASK(cuModuleGetFunction(&got, o.m, "w"));
  printf("the function: %s\n", got == o.w ? "right" : "wrong");
  ASK(cuModuleGetFunction(&got, o.m, "none"));
  ASK(cuModuleGetGlobal(&address, &bytes, o.m, "v"));
  printf("the variable: %s\n", address == o.v && bytes == 4 ? "right" : "wrong");
  ASK(cuModuleGetFunctionCount(&count, o.m));
  ASK(cuModuleEnumerateFunctions(all, 2, o.m));
  ASK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, o.f));
  ASK(cuFuncSetAttribute(o.f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1024));
  ASK(cuFuncSetCacheConfig(o.f, CU_FUNC_CACHE_PREFER_L1));
  owner = nullptr;
  ASK(cuFuncGetModule(&owner, o.f));
  printf("the function's module: %s\n", owner == o.m ? "right" : "wrong");
  ASK(cuFuncGetModule(&owner, o.of_kernel));
  printf("the kernel function's module: %s\n", owner == o.of_library ? "right" : "wrong");
  ASK(cuFuncGetName(&name, o.f));
  ASK(cuFuncGetParamInfo(o.f, 0, &offset, &bytes));
  ASK(cuFuncGetParamInfo(o.w, 0, &offset, &bytes));
  ASK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, o.of_kernel));
  ASK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&value, o.f, 128, 0));
  ASK(cuOccupancyAvailableDynamicSMemPerBlock(&bytes, o.f, 1, 128));
  unsigned by = 100;
  void* parameters[] = {&by};
  ASK(cuLaunchKernel(o.w, 1, 1, 1, 1, 1, 1, 0, o.s, parameters, nullptr));
  ASK(cuLaunchKernel(o.w, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr));
  ASK(cuLaunchKernel(o.w, 1, 1, 1, 1, 1, 1, 0, CU_STREAM_PER_THREAD, parameters, nullptr));
  CUlaunchConfig shape{};
  shape.gridDimX = shape.gridDimY = shape.gridDimZ = 1;
  shape.blockDimX = shape.blockDimY = shape.blockDimZ = 1;
  shape.hStream = o.s;
  ASK(cuLaunchKernelEx(&shape, o.w, parameters, nullptr));
  ASK(cuLaunchKernel(o.of_kernel, 1, 1, 1, 1, 1, 1, 0, o.s, nullptr, nullptr));
}

void Libraries(const Objects& o) {
  CUlibrary loaded, owner;
  CUkernel got, again;
  CUmodule module;
  CUfunction function;
  CUdeviceptr address;
  size_t bytes, offset;
  const char* name;
  int value;
  unsigned count;
  ASK(cuLibraryLoadData(&loaded, kCode, nullptr, nullptr, 0, nullptr, nullptr, 0));
  ASK(cuLibraryGetKernel(&got, loaded, "w"));
  ASK(cuLibraryGetKernel(&again, o.library, "k"));
  printf("the kernel: %s\n", again == o.kernel ? "right" : "wrong");
  ASK(cuLibraryGetModule(&module, loaded));
  ASK(cuLibraryGetGlobal(&address, &bytes, loaded, "v"));
  ASK(cuKernelGetFunction(&function, got));
  name = "";
  ASK(cuKernelGetName(&name, got));
  printf("the kernel's name: %s\n", name);
  ASK(cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, got, o.device));
  ASK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1024, got, o.device));
  ASK(cuKernelGetParamInfo(got, 0, &offset, &bytes));
  ASK(cuKernelGetLibrary(&owner, got));
  ASK(cuLibraryGetKernelCount(&count, loaded));
  ASK(cuLaunchKernel((CUfunction)o.kernel, 1, 1, 1, 1, 1, 1, 0, o.s, nullptr, nullptr));
  ASK(cuLaunchKernel((CUfunction)o.kernel, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  ASK(cuLibraryUnload(loaded));
}

void Memory(const Objects& o) {
  CUdeviceptr q = 0;
  size_t bytes;
  char b[16] = {};
  static char pageable[4096];
  void* host;
  unsigned u;
  uint64_t word;
  ASK(cuMemAlloc(&q, 4096));
  ASK(cuMemHostAlloc(&host, 4096, 0));
  ASK(cuMemHostRegister(pageable, 4096, 0));
  ASK(cuMemHostUnregister(pageable));
  ASK(cuMemGetInfo(&bytes, &bytes));
  ASK(cuMemGetAddressRange(&q, &bytes, o.p));
  ASK(cuMemHostGetFlags(&u, o.h));
  ASK(cuMemHostGetDevicePointer(&q, o.h, 0));
  ASK(cuPointerGetAttribute(&u, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, o.p));
  ASK(cuMemcpyHtoD(o.p, b, 4));
  ASK(cuMemcpyDtoH(b, o.p, 4));
  ASK(cuMemcpyDtoD(o.p, o.p + 64, 4));
  ASK(cuMemcpyHtoDAsync(o.p, o.h, 16, o.s));
  ASK(cuMemcpyHtoDAsync(o.p, o.h, 16, nullptr));
  ASK(cuMemcpyHtoDAsync(o.p + 16, "pageable memory", 16, o.s));
  ASK(cuMemcpyAsync(o.p + 32, o.p, 4, o.s));
  ASK(cuMemcpyDtoDAsync(o.p + 36, o.p, 4, o.s));
  ASK(cuMemcpyDtoHAsync(o.h + 64, o.p, 16, o.s));
  ASK(cuMemcpyDtoHAsync(b, o.p + 16, 16, o.s));
  ASK(cuMemcpyDtoHAsync(b, o.p + 16, 16, nullptr));
  ASK(cuStreamSynchronize(o.s));
  printf("copied: %d, %s\n", o.h[64], b);
  CUDA_MEMCPY2D flat{};
  flat.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  flat.srcDevice = o.p;
  flat.dstMemoryType = CU_MEMORYTYPE_ARRAY;
  flat.dstArray = o.a;
  flat.WidthInBytes = 16;
  flat.Height = 1;
  ASK(cuMemcpy2DAsync(&flat, o.s));
  ASK(cuMemcpy2DAsync(&flat, nullptr));
  ASK(cuMemcpy2D(&flat));
  ASK(cuMemcpyHtoAAsync(o.a, 0, o.h, 16, o.s));
  ASK(cuMemcpyHtoA(o.a, 0, o.h, 16));
  ASK(cuMemsetD8(o.p + 128, 3, 4));
  ASK(cuMemsetD8Async(o.p + 128, 3, 4, o.s));
  ASK(cuMemsetD8Async(o.p + 128, 4, 4, nullptr));
  ASK(cuMemsetD8Async(o.p + 400, 6, 4, o.of_green));
  ASK(cuStreamSynchronize(o.of_green));
  ASK(cuMemsetD32Async(o.p + 132, 0x01020304, 1, o.s));
  ASK(cuMemsetD2D8Async(o.p + 256, 64, 2, 8, 2, o.s));
  ASK(cuMemAllocAsync(&q, 64, nullptr));
  ASK(cuMemAllocAsync(&q, 64, o.s));
  ASK(cuMemsetD8Async(q, 1, 64, o.s));
  ASK(cuMemFreeAsync(q, nullptr));
  ASK(cuMemFreeAsync(q, o.s));
  ASK(cuMemAllocFromPoolAsync(&q, 64, o.pool, o.s));
  ASK(cuMemFreeAsync(q, o.s));
  ASK(cuMemPoolGetAttribute(o.pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &word));
  ASK(cuMemPoolTrimTo(o.pool, 0));
  CUmemLocation place{};
  place.type = CU_MEM_LOCATION_TYPE_DEVICE;
  place.id = o.device;
  ASK(cuMemAllocManaged(&q, 4096, CU_MEM_ATTACH_GLOBAL));
  ASK(cuMemPrefetchAsync(o.p, 4096, place, 0, o.s));
  ASK(cuMemPrefetchAsync(o.p, 4096, place, 0, nullptr));
  ASK(cuMemAdvise(o.p, 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, place));
}

void Graphs(const Objects& o) {
  CUgraph made;
  CUgraphNode node;
  CUgraphExec exec;
  ASK(cuGraphCreate(&made, 0));
  ASK(cuGraphAddEmptyNode(&node, made, nullptr, 0));
  // Not cuGraphAddKernelNode: the driver (580) crashes in it without a context.
  ASK(cuGraphInstantiate(&exec, made, 0));
  CUgraphExecUpdateResultInfo info;
  ASK(cuGraphExecUpdate(o.ge, o.g, &info));
  ASK(cuGraphUpload(o.ge, o.s));
  ASK(cuGraphLaunch(o.ge, o.s));
  ASK(cuGraphLaunch(o.ge, nullptr));
  ASK(cuGraphDestroy(made));
}

void Arrays(const Objects& o) {
  CUDA_ARRAY_DESCRIPTOR flat{};
  CUDA_ARRAY3D_DESCRIPTOR facts{};
  CUarray level;
  CUDA_RESOURCE_DESC resource{};
  CUtexObject texture;
  CUDA_TEXTURE_DESC sampling{};
  ASK(cuArrayGetDescriptor(&flat, o.a));
  ASK(cuArray3DGetDescriptor(&facts, o.a));
  ASK(cuMipmappedArrayGetLevel(&level, o.mips, 1));
  resource.resType = CU_RESOURCE_TYPE_ARRAY;
  resource.res.array.hArray = o.a;
  ASK(cuTexObjectCreate(&texture, &resource, &sampling, nullptr));
  ASK(cuTexObjectGetResourceDesc(&resource, o.texture));
}

// What destroys the objects, in this order.
void Destroy(const Objects& o) {
  ASK(cuTexObjectDestroy(o.texture));
  ASK(cuMipmappedArrayDestroy(o.mips));
  ASK(cuMemFree(o.p));
  ASK(cuMemFreeHost(o.h));
  ASK(cuGraphExecDestroy(o.ge));
  ASK(cuGraphDestroy(o.g));
  ASK(cuMemPoolDestroy(o.pool));
  ASK(cuEventDestroy(o.e));
  ASK(cuEventDestroy(o.e2));
  ASK(cuStreamDestroy(o.s));
  ASK(cuStreamDestroy(nullptr));
  ASK(cuStreamDestroy(o.of_green));
  ASK(cuGreenCtxDestroy(o.green));
  ASK(cuLibraryUnload(o.library));
  ASK(cuModuleUnload(o.m));
}

}  // namespace

int main() {
  setvbuf(stdout, nullptr, _IOLBF, 0);  // what was printed by the time of a crash names the call
  Objects o;
  Make(&o);
  MakeGreen(&o);
  std::thread([&o] {
    CUcontext current;
    CU_CHECK(cuCtxGetCurrent(&current));
    EXPECT(current == nullptr);
    Contexts(o);
    Streams(o);
    Events(o);
    Functions(o);
    Libraries(o);
    Memory(o);
    Graphs(o);
    Arrays(o);
    CU_CHECK(cuCtxGetCurrent(&current));
    printf("current at the end: %s\n", current == nullptr ? "none" : "one");
  }).join();
  CU_CHECK(cuCtxSynchronize());
  unsigned v = 0;
  unsigned char p[512] = {};
  CU_CHECK(cuMemcpyDtoH(&v, o.v, sizeof(v)));
  CU_CHECK(cuMemcpyDtoH(p, o.p, sizeof(p)));
  printf("variable %u, memory", v);
  for (const int at : {0, 15, 16, 32, 36, 64, 128, 132, 135, 256, 263, 264, 320, 384, 400}) printf(" %d", p[at]);
  printf("\n");
  // The kernel of the library has a variable of its own.
  CUdeviceptr other;
  size_t bytes;
  CU_CHECK(cuLibraryGetGlobal(&other, &bytes, o.library, "v"));
  CU_CHECK(cuMemcpyDtoH(&v, other, sizeof(v)));
  printf("the library's variable %u\n", v);
  std::thread([&o] { Destroy(o); }).join();
  CU_CHECK(cuArrayDestroy(o.a));
  CU_CHECK(cuCtxDestroy(o.context));
  return 0;
}
