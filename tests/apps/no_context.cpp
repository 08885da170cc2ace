// SPDX-License-Identifier: Apache-2.0
// Work given by threads without a current context, in the contexts of the objects that they name: streams, events,
// modules, functions, graphs. The main thread makes what needs a current context, and looks at the results at the end.
//
// Every step is a thread of its own, so nothing that the library remembers of a thread helps. Functions, stream-ordered
// memory and a captured graph that such threads made live on, over checkpoints too.
#include <cuda.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/apps/support/driver.h"

// data[i] = data[i] * factor + add[0], for one block of threads.
static const char kCode[] = R"(
.version 7.0
.target sm_52
.address_size 64
.visible .global .align 4 .u32 factor = 3;
.visible .entry grow(.param .u64 p_data, .param .u64 p_add)
{
  .reg .b32 %r<6>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [p_data];
  ld.param.u64 %rd2, [p_add];
  cvta.to.global.u64 %rd1, %rd1;
  cvta.to.global.u64 %rd2, %rd2;
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;
  ld.global.u32 %r2, [%rd4];
  ld.global.u32 %r3, [factor];
  ld.global.u32 %r4, [%rd2];
  mad.lo.s32 %r5, %r2, %r3, %r4;
  st.global.u32 [%rd4], %r5;
  ret;
}
)";

namespace {

constexpr unsigned kThreads = 64;

// What the steps share.
struct Work {
  CUcontext context;
  CUstream stream, other;
  CUevent begun, done;
  CUmodule module;
  CUkernel kernel;
  CUgraph empty;
  CUgraphExec nothing;
  CUdeviceptr data;
  unsigned* pinned;  // what the copy of a step reads; each step has a word of its own
  // Made without a current context.
  CUfunction grow = nullptr;
  CUdeviceptr factor = 0;
  CUdeviceptr add = 0;  // stream-ordered, a new one in each step
  CUgraph captured = nullptr;
};

void Launch(const Work& work, CUfunction function) {
  CUdeviceptr data = work.data, add = work.add;
  void* parameters[] = {&data, &add};
  CU_CHECK(cuLaunchKernel(function, 1, 1, 1, kThreads, 1, 1, 0, work.stream, parameters, nullptr));
}

void Step(Work* work, int step) {
  CUcontext none;
  CU_CHECK(cuCtxGetCurrent(&none));
  APP_CHECK(none == nullptr);
  if (!work->grow) {
    size_t bytes;
    CU_CHECK(cuModuleGetFunction(&work->grow, work->module, "grow"));
    CU_CHECK(cuFuncSetCacheConfig(work->grow, CU_FUNC_CACHE_PREFER_L1));
    CU_CHECK(cuModuleGetGlobal(&work->factor, &bytes, work->module, "factor"));
  }
  // Default streams are the current context's, and there is none.
  APP_CHECK(cuStreamQuery(nullptr) == CUDA_ERROR_INVALID_CONTEXT);
  APP_CHECK(cuEventRecord(work->begun, CU_STREAM_PER_THREAD) == CUDA_ERROR_INVALID_CONTEXT);
  APP_CHECK(cuMemsetD32Async(work->data, 0, kThreads, nullptr) == CUDA_ERROR_INVALID_CONTEXT);
  APP_CHECK(cuLaunchKernel(work->grow, 1, 1, 1, 1, 1, 1, 0, CU_STREAM_LEGACY, nullptr, nullptr) ==
            CUDA_ERROR_INVALID_CONTEXT);

  CU_CHECK(cuEventRecord(work->begun, work->stream));
  if (work->add) CU_CHECK(cuMemFreeAsync(work->add, work->stream));
  CU_CHECK(cuMemAllocAsync(&work->add, 256, work->stream));
  work->pinned[step] = unsigned(step) * 11;
  if (step % 2) {
    CU_CHECK(cuMemcpyHtoDAsync(work->add, &work->pinned[step], sizeof(unsigned), work->stream));
  } else {
    CU_CHECK(cuMemsetD32Async(work->add, unsigned(step) * 11, 1, work->stream));
  }
  Launch(*work, step % 3 ? work->grow : reinterpret_cast<CUfunction>(work->kernel));
  CU_CHECK(cuEventRecord(work->done, work->stream));
  CU_CHECK(cuStreamWaitEvent(work->other, work->done, 0));
  CU_CHECK(cuGraphLaunch(work->nothing, work->other));
  if (step % 4 == 0) {
    // The variable that the module's function, and not the library's kernel, multiplies by.
    const unsigned factor = unsigned(step) + 3;
    CU_CHECK(cuStreamSynchronize(work->stream));
    CU_CHECK(cuMemcpyHtoDAsync(work->factor, &factor, sizeof(factor), work->stream));
  }
  if (step == 2) {
    CU_CHECK(cuStreamBeginCapture(work->stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    // Of a kernel whose parameters stay what they are: the memory is the program's until the end.
    CUdeviceptr data = work->data, add = work->data;
    void* parameters[] = {&data, &add};
    CU_CHECK(cuLaunchKernel(work->grow, 1, 1, 1, kThreads, 1, 1, 0, work->stream, parameters, nullptr));
    CU_CHECK(cuStreamEndCapture(work->stream, &work->captured));
  }
  CU_CHECK(cuStreamSynchronize(work->other));
  CU_CHECK(cuStreamSynchronize(work->stream));
  CU_CHECK(cuEventQuery(work->done));
}

}  // namespace

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {20, 1});
  Work work;
  CU_CHECK(cuInit(0));
  CUdevice device;
  CU_CHECK(cuDeviceGet(&device, 0));
  // Kernels have names before there is any context.
  CUlibrary first;
  CUkernel kernel;
  const char* name = "";
  CU_CHECK(cuLibraryLoadData(&first, kCode, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU_CHECK(cuLibraryGetKernel(&kernel, first, "grow"));
  CU_CHECK(cuKernelGetName(&name, kernel));
  APP_CHECK(std::string(name) == "grow");
  CU_CHECK(cuLibraryUnload(first));
  CU_CHECK(cuCtxCreate(&work.context, nullptr, 0, device));
  CU_CHECK(cuStreamCreate(&work.stream, CU_STREAM_NON_BLOCKING));
  CU_CHECK(cuStreamCreate(&work.other, CU_STREAM_NON_BLOCKING));
  CU_CHECK(cuEventCreate(&work.begun, CU_EVENT_DEFAULT));
  CU_CHECK(cuEventCreate(&work.done, CU_EVENT_DEFAULT));
  CU_CHECK(cuModuleLoadData(&work.module, kCode));
  CUlibrary library;
  CU_CHECK(cuLibraryLoadData(&library, kCode, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU_CHECK(cuLibraryGetKernel(&work.kernel, library, "grow"));
  CU_CHECK(cuGraphCreate(&work.empty, 0));
  CUgraphNode node;
  CU_CHECK(cuGraphAddEmptyNode(&node, work.empty, nullptr, 0));
  CU_CHECK(cuGraphInstantiate(&work.nothing, work.empty, 0));
  CU_CHECK(cuMemAlloc(&work.data, kThreads * sizeof(unsigned)));
  std::vector<unsigned> start(kThreads);
  for (unsigned i = 0; i < kThreads; ++i) start[i] = i * i + 1;
  CU_CHECK(cuMemcpyHtoD(work.data, start.data(), kThreads * sizeof(unsigned)));
  void* pinned;
  CU_CHECK(cuMemHostAlloc(&pinned, (options.steps + 1) * sizeof(unsigned), 0));
  work.pinned = static_cast<unsigned*>(pinned);
  CU_CHECK(cuCtxSynchronize());  // the streams do not wait for the default one

  for (int step = 1; step <= options.steps; ++step) {
    std::thread([&work, step] { Step(&work, step); }).join();
    app::Step(step);
  }

  std::vector<unsigned> result(kThreads), want = start;
  CU_CHECK(cuMemcpyDtoH(result.data(), work.data, kThreads * sizeof(unsigned)));
  unsigned factor = 3;
  for (int step = 1; step <= options.steps; ++step) {
    for (unsigned& value : want) value = value * (step % 3 ? factor : 3) + unsigned(step) * 11;
    if (step % 4 == 0) factor = unsigned(step) + 3;
  }
  APP_CHECK(result == want);
  app::Digest digest;
  digest.Add(result.data(), kThreads * sizeof(unsigned));
  float ms = -1;
  CU_CHECK(cuEventElapsedTime(&ms, work.begun, work.done));
  APP_CHECK(ms >= 0);

  // The graph that a thread without a context captured.
  CUgraphExec exec;
  const unsigned one = 1;
  CU_CHECK(cuMemsetD32(work.data, one, kThreads));
  CU_CHECK(cuCtxSynchronize());
  CU_CHECK(cuGraphInstantiate(&exec, work.captured, 0));
  CU_CHECK(cuGraphLaunch(exec, work.stream));
  CU_CHECK(cuStreamSynchronize(work.stream));
  CU_CHECK(cuMemcpyDtoH(result.data(), work.data, kThreads * sizeof(unsigned)));
  // What is added is thread 0's value, before or after its turn; of its own result alone is it known which.
  APP_CHECK(result[0] == factor + 1);
  printf("no_context steps=%d factor=%u digest=%016" PRIx64 "\n", options.steps, factor, digest.value());

  // The objects go the same way: named by a thread without a context.
  std::thread([&work] {
    CU_CHECK(cuGraphDestroy(work.captured));
    CU_CHECK(cuMemFreeAsync(work.add, work.stream));
    CU_CHECK(cuEventDestroy(work.begun));
    CU_CHECK(cuEventDestroy(work.done));
    CU_CHECK(cuStreamDestroy(work.stream));
    CU_CHECK(cuStreamDestroy(work.other));
    CU_CHECK(cuModuleUnload(work.module));
    CU_CHECK(cuMemFree(work.data));
    CU_CHECK(cuMemFreeHost(work.pinned));
  }).join();
  CU_CHECK(cuGraphExecDestroy(exec));
  CU_CHECK(cuGraphExecDestroy(work.nothing));
  CU_CHECK(cuGraphDestroy(work.empty));
  CU_CHECK(cuLibraryUnload(library));
  CU_CHECK(cuCtxDestroy(work.context));
  return 0;
}
