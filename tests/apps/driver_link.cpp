// SPDX-License-Identifier: Apache-2.0
// Rarer parts of the driver API: the JIT linker with its state open across steps, listing a module's functions and a
// library's kernels, the launch interface of before CUDA 4, green contexts with streams of their own, the settings of
// GPU core dumps and the driver's log.
#include <cuda.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/apps/support/driver.h"

// data[i] = twist(data[i], step) + salt + own, where twist and salt are the other text's, and `own` is a name that both
// have.
static const char kMix[] = R"(.version 7.0
.target sm_52
.address_size 64
.extern .func (.param .b32 result) twist(.param .b32 a, .param .b32 b);
.extern .global .align 4 .b32 salt;
.global .align 4 .b32 own = 3;
.visible .entry mix(.param .u64 p_data, .param .u32 p_count, .param .u32 p_step)
{
  .reg .pred %p<2>;
  .reg .b32 %r<14>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [p_data];
  ld.param.u32 %r1, [p_count];
  ld.param.u32 %r2, [p_step];
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, %ntid.x;
  mov.u32 %r5, %tid.x;
  mad.lo.s32 %r6, %r3, %r4, %r5;
  setp.ge.u32 %p1, %r6, %r1;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.u32 %rd3, %r6, 4;
  add.s64 %rd4, %rd2, %rd3;
  ld.global.u32 %r7, [%rd4];
  {
    .param .b32 in0;
    .param .b32 in1;
    .param .b32 out0;
    st.param.b32 [in0], %r7;
    st.param.b32 [in1], %r2;
    call.uni (out0), twist, (in0, in1);
    ld.param.b32 %r8, [out0];
  }
  ld.global.u32 %r9, [salt];
  ld.global.u32 %r10, [own];
  add.s32 %r11, %r8, %r9;
  add.s32 %r12, %r11, %r10;
  st.global.u32 [%rd4], %r12;
DONE:
  ret;
}
)";

// twist(a, b) = a * own + b.
static const char kTwist[] = R"(.version 7.0
.target sm_52
.address_size 64
.visible .global .align 4 .b32 salt = 1000;
.global .align 4 .b32 own = 7;
.visible .func (.param .b32 result) twist(.param .b32 a, .param .b32 b)
{
  .reg .b32 %r<6>;
  ld.param.b32 %r1, [a];
  ld.param.b32 %r2, [b];
  ld.global.u32 %r3, [own];
  mad.lo.s32 %r4, %r1, %r3, %r2;
  st.param.b32 [result], %r4;
  ret;
}
.visible .entry idle() { ret; }
)";

// Two kernels of a library: data[i] += 5, and data[i] ^= 0x55.
static const char kLibrary[] = R"(.version 7.0
.target sm_52
.address_size 64
.visible .entry plus(.param .u64 p_data)
{
  .reg .b32 %r<8>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [p_data];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r1, %r2, %r3;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.u32 %rd3, %r4, 4;
  add.s64 %rd4, %rd2, %rd3;
  ld.global.u32 %r5, [%rd4];
  add.s32 %r6, %r5, 5;
  st.global.u32 [%rd4], %r6;
  ret;
}
.visible .entry flip(.param .u64 p_data)
{
  .reg .b32 %r<8>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [p_data];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r1, %r2, %r3;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.u32 %rd3, %r4, 4;
  add.s64 %rd4, %rd2, %rd3;
  ld.global.u32 %r5, [%rd4];
  xor.b32 %r6, %r5, 85;
  st.global.u32 [%rd4], %r6;
  ret;
}
)";

// The linker's results come in these, for as long as the state lives.
struct LinkOptions {
  char errors[4096] = {};
  char infos[4096] = {};
  CUjit_option names[4] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_INFO_LOG_BUFFER,
                           CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES};
  void* values[4] = {errors, reinterpret_cast<void*>(sizeof(errors)), infos, reinterpret_cast<void*>(sizeof(infos))};
};

// Errors come from the call that natively gives them, with a log.
static void CheckLinkErrors() {
  LinkOptions options;
  CUlinkState state;
  CU_CHECK(cuLinkCreate(4, options.names, options.values, &state));
  std::string wrong = ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry k(.param .nothing p) { ret; }\n";
  APP_CHECK(cuLinkAddData(state, CU_JIT_INPUT_PTX, &wrong[0], wrong.size() + 1, "wrong", 0, nullptr, nullptr) !=
            CUDA_SUCCESS);
  APP_CHECK(cuLinkAddFile(state, CU_JIT_INPUT_PTX, "/nowhere/at/all.ptx", 0, nullptr, nullptr) ==
            CUDA_ERROR_FILE_NOT_FOUND);
  CU_CHECK(cuLinkDestroy(state));
  LinkOptions more;
  CU_CHECK(cuLinkCreate(4, more.names, more.values, &state));
  std::string open = kMix;
  CU_CHECK(cuLinkAddData(state, CU_JIT_INPUT_PTX, &open[0], open.size() + 1, "mix", 0, nullptr, nullptr));
  void* image = nullptr;
  size_t bytes = 0;
  APP_CHECK(cuLinkComplete(state, &image, &bytes) != CUDA_SUCCESS);
  APP_CHECK(strstr(more.errors, "twist") || strstr(more.errors, "salt"));
  CU_CHECK(cuLinkDestroy(state));
}

static void CheckTools() {
  bool enabled = true;
  size_t size = sizeof(enabled);
  // The software GPU by itself has none of this, nor the old launch interface.
  const CUresult result = cuCoredumpGetAttributeGlobal(CU_COREDUMP_ENABLE_ON_EXCEPTION, &enabled, &size);
  if (result == CUDA_ERROR_NOT_SUPPORTED) return;
  CU_CHECK(result);
  APP_CHECK(!enabled);
  char name[64] = "dump.of.this";
  size = sizeof(name);
  CU_CHECK(cuCoredumpSetAttributeGlobal(CU_COREDUMP_FILE, name, &size));
  char back[1024] = {};
  size = sizeof(back);
  CU_CHECK(cuCoredumpGetAttributeGlobal(CU_COREDUMP_FILE, back, &size));
  APP_CHECK(!strcmp(back, "dump.of.this"));
  CUlogIterator iterator;
  CU_CHECK(cuLogsCurrent(&iterator, 0));
  char log[512];
  size = sizeof(log);
  CU_CHECK(cuLogsDumpToMemory(&iterator, log, &size, 0));
  APP_CHECK(size == 0);
}

// Launches as it was done before CUDA 4. Parameters stay from launch to launch, so `first` sets what `again` leaves as
// it is.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static void LaunchMix(CUfunction mix, CUdeviceptr data, unsigned n, unsigned block, int step, bool first) {
  if (cuFuncSetBlockShape(mix, int(block), 1, 1) == CUDA_ERROR_NOT_SUPPORTED) {
    void* parameters[] = {&data, &n, &step};
    CU_CHECK(cuLaunchKernel(mix, n / block, 1, 1, block, 1, 1, 0, nullptr, parameters, nullptr));
    return;
  }
  if (first) {
    CU_CHECK(cuFuncSetSharedSize(mix, 0));
    CU_CHECK(cuParamSetv(mix, 0, &data, sizeof(data)));
    CU_CHECK(cuParamSeti(mix, 8, n));
    CU_CHECK(cuParamSetSize(mix, 16));
  }
  CU_CHECK(cuParamSeti(mix, 12, unsigned(step)));
  CU_CHECK(first ? cuLaunchGrid(mix, int(n / block), 1) : cuLaunchGridAsync(mix, int(n / block), 1, nullptr));
}
#pragma GCC diagnostic pop

struct Green {
  CUgreenCtx context = nullptr;
  CUcontext converted = nullptr;
  CUstream stream = nullptr;
  CUevent done = nullptr;
};

static Green MakeGreen(CUdevice device) {
  Green green;
  CUdevResource all, part[1], rest;
  CU_CHECK(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
  unsigned groups = 0;
  CU_CHECK(cuDevSmResourceSplitByCount(nullptr, &groups, &all, nullptr, 0, 2));
  APP_CHECK(groups >= 1);
  groups = 1;
  CU_CHECK(cuDevSmResourceSplitByCount(part, &groups, &all, &rest, 0, 2));
  APP_CHECK(groups == 1 && part[0].sm.smCount >= 2 && part[0].sm.smCount <= all.sm.smCount);
  CUdevResourceDesc description;
  CU_CHECK(cuDevResourceGenerateDesc(&description, part, 1));
  CU_CHECK(cuGreenCtxCreate(&green.context, description, device, CU_GREEN_CTX_DEFAULT_STREAM));
  CU_CHECK(cuGreenCtxStreamCreate(&green.stream, green.context, CU_STREAM_NON_BLOCKING, 0));
  CU_CHECK(cuEventCreate(&green.done, CU_EVENT_DISABLE_TIMING));
  CUdevResource mine;
  CU_CHECK(cuGreenCtxGetDevResource(green.context, &mine, CU_DEV_RESOURCE_TYPE_SM));
  APP_CHECK(mine.sm.smCount == part[0].sm.smCount);
  return green;
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {24, 4096});
  const unsigned block = 128, n = unsigned(options.size) / block * block;
  CU_CHECK(cuInit(0));
  CUdevice device;
  CUcontext context;
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CU_CHECK(cuCtxSetCurrent(context));
  CheckTools();
  CheckLinkErrors();

  CUlibrary library;
  CU_CHECK(cuLibraryLoadData(&library, kLibrary, nullptr, nullptr, 0, nullptr, nullptr, 0));
  unsigned count = 0;
  CU_CHECK(cuLibraryGetKernelCount(&count, library));
  APP_CHECK(count == 2);
  std::vector<CUkernel> kernels(count);
  CU_CHECK(cuLibraryEnumerateKernels(kernels.data(), count, library));
  CUkernel plus, flip;
  CU_CHECK(cuLibraryGetKernel(&plus, library, "plus"));
  CU_CHECK(cuLibraryGetKernel(&flip, library, "flip"));
  APP_CHECK(std::count(kernels.begin(), kernels.end(), plus) == 1 &&
            std::count(kernels.begin(), kernels.end(), flip) == 1);

  CUdeviceptr data;
  CU_CHECK(cuMemAlloc(&data, n * sizeof(unsigned)));
  CU_CHECK(cuMemsetD32(data, 17, n));
  CU_CHECK(cuCtxSynchronize());
  std::vector<unsigned> want(n, 17);

  LinkOptions link_options;
  CUlinkState state = nullptr;
  CUmodule module = nullptr;
  CUfunction mix = nullptr;
  Green green;
  for (int step = 1; step <= options.steps; ++step) {
    switch (step % 4) {
      case 1: {
        link_options = LinkOptions();
        link_options.values[0] = link_options.errors;
        link_options.values[2] = link_options.infos;
        CU_CHECK(cuLinkCreate(4, link_options.names, link_options.values, &state));
        std::string text = kMix;
        CU_CHECK(cuLinkAddData(state, CU_JIT_INPUT_PTX, &text[0], text.size() + 1, "mix", 0, nullptr, nullptr));
        break;
      }
      case 2: {
        // Process numbers repeat where each job has its own.
        char path[] = "/tmp/driver_link.XXXXXX";
        FILE* const file = fdopen(mkstemp(path), "w");
        APP_CHECK(file && fputs(kTwist, file) >= 0 && fclose(file) == 0);
        CU_CHECK(cuLinkAddFile(state, CU_JIT_INPUT_PTX, path, 0, nullptr, nullptr));
        unlink(path);
        void* image = nullptr;
        size_t bytes = 0;
        CU_CHECK(cuLinkComplete(state, &image, &bytes));
        APP_CHECK(image && bytes > 0);
        CU_CHECK(cuModuleLoadData(&module, image));
        unsigned functions = 0;
        CU_CHECK(cuModuleGetFunctionCount(&functions, module));
        APP_CHECK(functions == 2);
        CUfunction both[2];
        CU_CHECK(cuModuleEnumerateFunctions(both, 2, module));
        CU_CHECK(cuModuleGetFunction(&mix, module, "mix"));
        APP_CHECK((both[0] == mix) != (both[1] == mix));
        LaunchMix(mix, data, n, block, step, true);
        break;
      }
      case 3:
        CU_CHECK(cuLinkDestroy(state));
        LaunchMix(mix, data, n, block, step, false);
        break;
      default:
        CU_CHECK(cuModuleUnload(module));
    }
    if (step % 4 == 2 || step % 4 == 3) {
      for (unsigned& x : want) x = x * 7 + step + 1000 + 3;
    }
    CU_CHECK(cuCtxSynchronize());

    if (step % 8 == 1) green = MakeGreen(device);
    if (green.context) {
      void* parameters[] = {&data};
      CU_CHECK(cuLaunchKernel(reinterpret_cast<CUfunction>(step % 2 ? plus : flip), n / block, 1, 1, block, 1, 1, 0,
                              green.stream, parameters, nullptr));
      for (unsigned& x : want) x = step % 2 ? x + 5 : x ^ 0x55;
      CU_CHECK(cuGreenCtxRecordEvent(green.context, green.done));
      CU_CHECK(cuEventSynchronize(green.done));
      CUgreenCtx owner = nullptr;
      CU_CHECK(cuStreamGetGreenCtx(green.stream, &owner));
      APP_CHECK(owner == green.context);
      CUcontext converted = nullptr;
      CU_CHECK(cuCtxFromGreenCtx(&converted, green.context));
      APP_CHECK(converted && (!green.converted || converted == green.converted));
      green.converted = converted;
      // As the current context it takes launches to its own default stream.
      CU_CHECK(cuCtxPushCurrent(converted));
      CU_CHECK(cuLaunchKernel(reinterpret_cast<CUfunction>(plus), n / block, 1, 1, block, 1, 1, 0, nullptr, parameters,
                              nullptr));
      for (unsigned& x : want) x += 5;
      CU_CHECK(cuCtxSynchronize());
      CUcontext popped;
      CU_CHECK(cuCtxPopCurrent(&popped));
      APP_CHECK(popped == converted);
    }
    if (step % 8 == 7) {
      CU_CHECK(cuEventDestroy(green.done));
      CU_CHECK(cuStreamDestroy(green.stream));
      CU_CHECK(cuGreenCtxDestroy(green.context));
      green = Green();
    }
    app::Step(step);
  }

  std::vector<unsigned> result(n);
  CU_CHECK(cuMemcpyDtoH(result.data(), data, n * sizeof(unsigned)));
  APP_CHECK(result == want);
  app::Digest digest;
  digest.Add(result.data(), n * sizeof(unsigned));
  printf("driver_link n=%u steps=%d digest=%016" PRIx64 "\n", n, options.steps, digest.value());
  CU_CHECK(cuLibraryUnload(library));
  CU_CHECK(cuMemFree(data));
  CU_CHECK(cuDevicePrimaryCtxRelease(device));
  return 0;
}
