// SPDX-License-Identifier: Apache-2.0
// Executable graphs that kernels may launch (CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH), as the host uses them: their
// handles are the driver's own, since kernels get them, and every call takes them. Some are destroyed at once, and made
// again later and in another order. The handles are kept in GPU memory and in a variable, and come from there. No
// kernel launches one here (graph_device_launch.cu). The driver API alone.
#include <cuda.h>

#include <vector>

#include "tests/apps/support/driver.h"

static const char kText[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 8 .b8 handles[512];
.visible .entry advance(.param .u64 p_word, .param .u32 p_factor, .param .u32 p_add)
{
.reg .b32 %r<5>;
.reg .b64 %rd<2>;
ld.param.u64 %rd1, [p_word];
ld.param.u32 %r1, [p_factor];
ld.param.u32 %r2, [p_add];
ld.global.u32 %r3, [%rd1];
mad.lo.u32 %r4, %r3, %r1, %r2;
st.global.u32 [%rd1], %r4;
ret;
}
)";

struct One {
  CUgraph graph = nullptr;
  CUgraphNode node = nullptr;
  CUgraphExec exec = nullptr;  // null: there is none now
  CUdeviceptr word = 0;
  unsigned factor = 3, add = 5, want = 1;
};

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {24, 7});
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction advance;
  CUstream stream;
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CU_CHECK(cuCtxSetCurrent(context));
  CU_CHECK(cuModuleLoadData(&module, kText));
  CU_CHECK(cuModuleGetFunction(&advance, module, "advance"));
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  std::vector<One> all(size_t(options.size));
  CUdeviceptr memory, variable;
  size_t variable_bytes;
  const size_t bytes = all.size() * sizeof(CUgraphExec);
  CU_CHECK(cuMemAlloc(&memory, bytes));
  CU_CHECK(cuModuleGetGlobal(&variable, &variable_bytes, module, "handles"));
  APP_CHECK(bytes <= variable_bytes);
  const auto with_kernel = [&](One& one, auto use) {
    void* arguments[] = {&one.word, &one.factor, &one.add};
    CUDA_KERNEL_NODE_PARAMS params = {};
    params.func = advance;
    params.gridDimX = params.gridDimY = params.gridDimZ = 1;
    params.blockDimX = params.blockDimY = params.blockDimZ = 1;
    params.kernelParams = arguments;
    use(&params);
  };
  const auto keep = [&](One& one) {
    const size_t offset = size_t(&one - all.data()) * sizeof(CUgraphExec);
    CU_CHECK(cuMemcpyHtoD(memory + offset, &one.exec, sizeof(CUgraphExec)));
    CU_CHECK(cuMemcpyHtoD(variable + offset, &one.exec, sizeof(CUgraphExec)));
  };
  const auto destroy = [&](One& one) {
    CUgraphExec gone = one.exec;
    CU_CHECK(cuGraphExecDestroy(gone));
    APP_CHECK(cuGraphLaunch(gone, stream) == CUDA_ERROR_INVALID_VALUE);
    one.exec = nullptr;
    keep(one);
  };
  const auto make = [&](One& one) {
    CU_CHECK(cuGraphInstantiate(&one.exec, one.graph, CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH));
    CU_CHECK(cuGraphUpload(one.exec, stream));
    cuuint64_t flags;
    CU_CHECK(cuGraphExecGetFlags(one.exec, &flags));
    APP_CHECK(flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH);
    keep(one);
  };
  for (One& one : all) {
    CU_CHECK(cuMemAlloc(&one.word, sizeof(unsigned)));
    CU_CHECK(cuMemsetD32(one.word, one.want, 1));
    CU_CHECK(cuGraphCreate(&one.graph, 0));
    with_kernel(one, [&](const CUDA_KERNEL_NODE_PARAMS* params) {
      CU_CHECK(cuGraphAddKernelNode(&one.node, one.graph, nullptr, 0, params));
    });
    make(one);
  }
  // Gaps, which the next ones fill.
  for (size_t i = 0; i + 1 < all.size(); i += 3) destroy(all[i]);
  for (int step = 1; step <= options.steps; ++step) {
    app::Step(step);
    One& chosen = all[size_t(step) * 5 % all.size()];
    if (chosen.exec == nullptr) {
      make(chosen);
    } else if (step % 4 == 0) {
      destroy(chosen);
    } else if (step % 4 == 1) {
      chosen.factor += 2;
      with_kernel(chosen, [&](const CUDA_KERNEL_NODE_PARAMS* params) {
        CU_CHECK(cuGraphExecKernelNodeSetParams(chosen.exec, chosen.node, params));
        CU_CHECK(cuGraphKernelNodeSetParams(chosen.node, params));
      });
      CU_CHECK(cuGraphUpload(chosen.exec, stream));
    } else if (step % 4 == 2) {
      chosen.add += 9;
      with_kernel(chosen, [&](const CUDA_KERNEL_NODE_PARAMS* params) {
        CU_CHECK(cuGraphKernelNodeSetParams(chosen.node, params));
      });
      CUgraphExecUpdateResultInfo info;
      CU_CHECK(cuGraphExecUpdate(chosen.exec, chosen.graph, &info));
    }
    // As kernels would find them.
    std::vector<CUgraphExec> in_memory(all.size()), in_variable(all.size());
    CU_CHECK(cuMemcpyDtoH(in_memory.data(), memory, bytes));
    CU_CHECK(cuMemcpyDtoH(in_variable.data(), variable, bytes));
    APP_CHECK(in_memory == in_variable);
    for (size_t i = 0; i < all.size(); ++i) {
      APP_CHECK(in_memory[i] == all[i].exec);
      if (in_memory[i] == nullptr) continue;
      CU_CHECK(cuGraphLaunch(in_memory[i], stream));
      all[i].want = all[i].want * all[i].factor + all[i].add;
    }
    CU_CHECK(cuStreamSynchronize(stream));
  }
  app::Digest digest;
  for (One& one : all) {
    unsigned got;
    CU_CHECK(cuMemcpyDtoH(&got, one.word, sizeof(got)));
    APP_CHECK(got == one.want);
    digest.Add(&got, sizeof(got));
    if (one.exec != nullptr) CU_CHECK(cuGraphExecDestroy(one.exec));
  }
  printf("graph_launchable graphs=%d steps=%d digest=%016" PRIx64 "\n", options.size, options.steps, digest.value());
  return 0;
}
