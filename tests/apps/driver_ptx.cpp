// SPDX-License-Identifier: Apache-2.0
// The driver API alone, without the runtime: a context of its own, PTX text loaded with cuModuleLoadData, module
// globals, kernel parameters by pointer array and by packed buffer, a second module that comes and goes in every step,
// events and streams. Linked with -lcuda, so the loader resolves the driver's symbols by name.
#include <cuda.h>

#include <cstddef>
#include <vector>

#include "tests/apps/support/driver.h"

// data[i] = data[i] * factor + step + table[i & 3]; rounds += 1 by thread 0 of block 0.
static const char kMain[] = R"(
.version 7.0
.target sm_52
.address_size 64

.visible .global .align 8 .u64 rounds = 5;
.visible .const .align 4 .b32 table[4] = {1, 20, 300, 4000};
.global .align 4 .u32 hidden = 77;

.visible .entry advance(.param .u64 p_data, .param .u32 p_count, .param .u32 p_factor, .param .u32 p_step)
{
  .reg .pred %p<4>;
  .reg .b32 %r<20>;
  .reg .b64 %rd<12>;

  ld.param.u64 %rd1, [p_data];
  ld.param.u32 %r1, [p_count];
  ld.param.u32 %r2, [p_factor];
  ld.param.u32 %r3, [p_step];
  mov.u32 %r4, %ctaid.x;
  mov.u32 %r5, %ntid.x;
  mov.u32 %r6, %tid.x;
  mad.lo.s32 %r7, %r4, %r5, %r6;
  setp.ge.u32 %p1, %r7, %r1;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.u32 %rd3, %r7, 4;
  add.s64 %rd4, %rd2, %rd3;
  and.b32 %r8, %r7, 3;
  mul.wide.u32 %rd5, %r8, 4;
  mov.u64 %rd6, table;
  add.s64 %rd7, %rd6, %rd5;
  ld.const.u32 %r9, [%rd7];
  ld.global.u32 %r10, [%rd4];
  mad.lo.s32 %r11, %r10, %r2, %r3;
  add.s32 %r12, %r11, %r9;
  st.global.u32 [%rd4], %r12;
  setp.ne.u32 %p2, %r7, 0;
  @%p2 bra DONE;
  ld.global.u64 %rd8, [rounds];
  add.s64 %rd9, %rd8, 1;
  st.global.u64 [rounds], %rd9;
  ld.global.u32 %r13, [hidden];
  mad.lo.s32 %r14, %r13, 3, %r3;
  st.global.u32 [hidden], %r14;
DONE:
  ret;
}

.visible .entry reveal(.param .u64 p_out)
{
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [p_out];
  cvta.to.global.u64 %rd2, %rd1;
  ld.global.u32 %r1, [hidden];
  st.global.u32 [%rd2], %r1;
  ret;
}
)";

// A small module that is loaded, used and unloaded in every step: out[0] += bonus.
static const char kGuest[] = R"(
.version 7.0
.target sm_52
.address_size 64
.visible .global .align 4 .u32 bonus = 3;
.visible .entry visit(.param .u64 p_out)
{
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [p_out];
  cvta.to.global.u64 %rd2, %rd1;
  ld.global.u32 %r1, [%rd2];
  ld.global.u32 %r2, [bonus];
  add.u32 %r3, %r1, %r2;
  st.global.u32 [%rd2], %r3;
  ret;
}
)";

// A packed buffer that is shorter than the parameters is taken, in a launch and in a graph's node; what the kernel
// finds in the rest is not defined, so here it is the step, which shifts all values alike. A longer buffer and an empty
// one are refused. `values` are those at `data`.
static void ShortBuffers(CUfunction advance, CUstream stream, CUdeviceptr data, std::vector<unsigned> values) {
  const unsigned table[4] = {1, 20, 300, 4000};
  struct {
    CUdeviceptr data;
    unsigned count, factor, step, more[20];
  } packed = {data, unsigned(values.size()), 3, 1000, {}};
  size_t bytes = offsetof(decltype(packed), step);
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  const unsigned block = 128, grid = (packed.count + block - 1) / block;
  CU_CHECK(cuLaunchKernel(advance, grid, 1, 1, block, 1, 1, 0, stream, nullptr, extra));

  CUDA_KERNEL_NODE_PARAMS node = {};
  node.func = advance;
  node.gridDimX = grid;
  node.blockDimX = block;
  node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1;
  node.extra = extra;
  CUgraph graph;
  CUgraphNode added;
  CUgraphExec executable;
  CU_CHECK(cuGraphCreate(&graph, 0));
  CU_CHECK(cuGraphAddKernelNode(&added, graph, nullptr, 0, &node));
  CU_CHECK(cuGraphInstantiate(&executable, graph, 0));
  CU_CHECK(cuGraphLaunch(executable, stream));
  CU_CHECK(cuStreamSynchronize(stream));

  std::vector<unsigned> got(values.size());
  CU_CHECK(cuMemcpyDtoH(got.data(), data, got.size() * sizeof(unsigned)));
  for (size_t i = 0; i < values.size(); ++i) {
    for (int round = 0; round < 2; ++round) values[i] = values[i] * packed.factor + table[i & 3];
  }
  const unsigned shift = got[0] - values[0];
  for (size_t i = 0; i < values.size(); ++i) APP_CHECK(got[i] - values[i] == shift);

  bytes = sizeof(packed);
  APP_CHECK(cuLaunchKernel(advance, grid, 1, 1, block, 1, 1, 0, stream, nullptr, extra) ==
            CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  APP_CHECK(cuGraphAddKernelNode(&added, graph, nullptr, 0, &node) == CUDA_ERROR_INVALID_VALUE);
  bytes = 0;
  APP_CHECK(cuLaunchKernel(advance, grid, 1, 1, block, 1, 1, 0, stream, nullptr, extra) == CUDA_ERROR_INVALID_VALUE);
  APP_CHECK(cuGraphAddKernelNode(&added, graph, nullptr, 0, &node) == CUDA_ERROR_INVALID_VALUE);
  CU_CHECK(cuStreamSynchronize(stream));
  CU_CHECK(cuGraphExecDestroy(executable));
  CU_CHECK(cuGraphDestroy(graph));
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {40, 4096});
  const unsigned n = options.size;
  CU_CHECK(cuInit(0));
  CUdevice device;
  CUcontext context;
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuCtxCreate(&context, nullptr, 0, device));
  CUcontext current = nullptr;
  CU_CHECK(cuCtxGetCurrent(&current));
  APP_CHECK(current == context);

  CUmodule module;
  CUfunction advance, reveal;
  CU_CHECK(cuModuleLoadData(&module, kMain));
  CU_CHECK(cuModuleGetFunction(&advance, module, "advance"));
  CU_CHECK(cuModuleGetFunction(&reveal, module, "reveal"));
  CUfunction missing;
  APP_CHECK(cuModuleGetFunction(&missing, module, "no_such_kernel") == CUDA_ERROR_NOT_FOUND);

  CUdeviceptr rounds, data, word;
  size_t bytes = 0;
  CU_CHECK(cuModuleGetGlobal(&rounds, &bytes, module, "rounds"));
  APP_CHECK(bytes == sizeof(unsigned long long));
  CU_CHECK(cuMemAlloc(&data, n * sizeof(unsigned)));
  CU_CHECK(cuMemAlloc(&word, sizeof(unsigned)));
  CU_CHECK(cuMemsetD32(data, 17, n));
  CU_CHECK(cuMemsetD32(word, 0, 1));

  CUstream stream;
  CUevent begin, end;
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU_CHECK(cuEventCreate(&begin, CU_EVENT_DEFAULT));
  CU_CHECK(cuEventCreate(&end, CU_EVENT_DEFAULT));
  CU_CHECK(cuCtxSynchronize());

  const unsigned block = 128, grid = (n + block - 1) / block;
  for (int step = 1; step <= options.steps; ++step) {
    unsigned factor = 2 * step + 1, step_argument = step, count = n;
    CU_CHECK(cuEventRecord(begin, stream));
    if (step % 2) {
      void* parameters[] = {&data, &count, &factor, &step_argument};
      CU_CHECK(cuLaunchKernel(advance, grid, 1, 1, block, 1, 1, 0, stream, parameters, nullptr));
    } else {
      struct {
        CUdeviceptr data;
        unsigned count, factor, step;
      } packed = {data, count, factor, step_argument};
      size_t packed_bytes = 20;
      void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &packed_bytes,
                       CU_LAUNCH_PARAM_END};
      CU_CHECK(cuLaunchKernel(advance, grid, 1, 1, block, 1, 1, 0, stream, nullptr, extra));
    }
    CU_CHECK(cuEventRecord(end, stream));
    CUmodule guest;
    CUfunction visit;
    CU_CHECK(cuModuleLoadData(&guest, kGuest));
    CU_CHECK(cuModuleGetFunction(&visit, guest, "visit"));
    void* visit_parameters[] = {&word};
    CU_CHECK(cuLaunchKernel(visit, 1, 1, 1, 1, 1, 1, 0, stream, visit_parameters, nullptr));
    CU_CHECK(cuStreamSynchronize(stream));
    CU_CHECK(cuModuleUnload(guest));
    app::Step(step);
  }
  float ms = -1;
  CU_CHECK(cuEventElapsedTime(&ms, begin, end));
  APP_CHECK(ms >= 0);

  std::vector<unsigned> result(n), want(n, 17);
  unsigned long long counted = 0;
  unsigned visits = 0, hidden = 0, want_hidden = 77;
  CU_CHECK(cuMemcpyDtoH(result.data(), data, n * sizeof(unsigned)));
  CU_CHECK(cuMemcpyDtoH(&counted, rounds, sizeof(counted)));
  CU_CHECK(cuMemcpyDtoH(&visits, word, sizeof(visits)));
  void* reveal_parameters[] = {&word};
  CU_CHECK(cuLaunchKernel(reveal, 1, 1, 1, 1, 1, 1, 0, nullptr, reveal_parameters, nullptr));
  CU_CHECK(cuMemcpyDtoH(&hidden, word, sizeof(hidden)));
  const unsigned table[4] = {1, 20, 300, 4000};
  for (int step = 1; step <= options.steps; ++step) {
    for (unsigned i = 0; i < n; ++i) want[i] = want[i] * (2 * step + 1) + step + table[i & 3];
    want_hidden = want_hidden * 3 + step;
  }
  APP_CHECK(result == want);
  APP_CHECK(counted == 5u + options.steps && visits == 3u * options.steps && hidden == want_hidden);

  app::Digest digest;
  digest.Add(result.data(), n * sizeof(unsigned));
  printf("driver_ptx n=%u steps=%d rounds=%llu visits=%u hidden=%u digest=%016" PRIx64 "\n", n, options.steps, counted,
         visits, hidden, digest.value());

  ShortBuffers(advance, stream, data, result);

  CU_CHECK(cuEventDestroy(begin));
  CU_CHECK(cuEventDestroy(end));
  CU_CHECK(cuStreamDestroy(stream));
  CU_CHECK(cuMemFree(data));
  CU_CHECK(cuMemFree(word));
  CU_CHECK(cuModuleUnload(module));
  CU_CHECK(cuCtxDestroy(context));
  return 0;
}
