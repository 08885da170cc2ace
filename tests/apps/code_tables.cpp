// SPDX-License-Identifier: Apache-2.0
// Functions that are called by the addresses in __device__ and __constant__ tables, and whose addresses are nowhere
// else: of modules, and of a library that was loaded before one of the contexts was made. A kernel exchanges entries,
// so the tables are not what loading made of them. A restart may put the functions elsewhere (docs/context-state.md).
// With APP_COPY=device or APP_COPY=host one address is kept in GPU memory or in the program's memory as well; then it
// may not. APP_COPY=packed keeps it in the program's memory at an odd place. With APP_COPY=pointer the same bytes are a
// zero and a pointer to the program's own memory; then it may. The driver API alone.
#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/apps/support/driver.h"

static const int kFunctions = 3;

// What function `index` of module `number` makes of x.
static uint64_t Expected(int number, int index, uint64_t x) {
  return (x * uint64_t(2 * index + 3) + uint64_t(number)) ^ (x >> (index + 1));
}

// Two words whose bytes from the eighth on are the function address at `table`, which is a multiple of 256. Where
// `mapped`, the second one is a pointer to memory, as an allocator's lists are full of.
static void KeepPacked(CUdeviceptr table, bool mapped, uint64_t words[2]) {
  uint64_t function;
  CU_CHECK(cuMemcpyDtoH(&function, table, sizeof(function)));
  APP_CHECK(function % 256 == 0);
  words[0] = 0;
  words[1] = function >> 8;
  explicit_bzero(&function, sizeof(function));
  void* const page = reinterpret_cast<void*>(words[1] / 4096 * 4096);
  if (mapped) {
    APP_CHECK(mmap(page, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) ==
              page);
  }
}

static std::string Image(int number) {
  std::string text = ".version 7.0\n.target sm_75\n.address_size 64\n", names[kFunctions];
  const std::string id = std::to_string(number);
  for (int i = 0; i < kFunctions; ++i) {
    names[i] = "t_" + id + "_" + std::to_string(i);
    text += ".visible .func (.param .b64 result) " + names[i] + "(.param .b64 argument)\n{\n.reg .b64 %rd<5>;\n" +
            "ld.param.u64 %rd1, [argument];\nmul.lo.u64 %rd2, %rd1, " + std::to_string(2 * i + 3) + ";\n" +
            "add.u64 %rd2, %rd2, " + id + ";\nshr.u64 %rd3, %rd1, " + std::to_string(i + 1) + ";\n" +
            "xor.b64 %rd4, %rd2, %rd3;\nst.param.b64 [result], %rd4;\nret;\n}\n";
  }
  text += ".visible .global .align 8 .u64 table[3] = {" + names[0] + ", " + names[1] + ", " + names[2] + "};\n";
  text += ".visible .const .align 8 .u64 fixed[3] = {" + names[2] + ", " + names[0] + ", " + names[1] + "};\n";
  // Thread i: values[i] = (*pointer)(values[i]), by an entry of `table`, from the fourth on by one of `fixed`.
  text += R"(.visible .entry apply(.param .u64 p_values)
{
.reg .pred %p<2>;
.reg .b32 %r<3>;
.reg .b64 %rd<9>;
ld.param.u64 %rd1, [p_values];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 8;
add.u64 %rd3, %rd1, %rd2;
setp.ge.u32 %p1, %r1, 3;
@%p1 bra FIXED;
mov.u64 %rd4, table;
add.u64 %rd4, %rd4, %rd2;
ld.global.u64 %rd5, [%rd4];
bra CALL;
FIXED:
sub.u32 %r2, %r1, 3;
mul.wide.u32 %rd2, %r2, 8;
mov.u64 %rd4, fixed;
add.u64 %rd4, %rd4, %rd2;
ld.const.u64 %rd5, [%rd4];
CALL:
ld.global.u64 %rd6, [%rd3];
{
.param .b64 argument;
.param .b64 result;
st.param.b64 [argument], %rd6;
prototype: .callprototype (.param .b64 _) _ (.param .b64 _);
call (result), %rd5, (argument), prototype;
ld.param.b64 %rd7, [result];
}
st.global.u64 [%rd3], %rd7;
ret;
}
.visible .entry exchange()
{
.reg .b64 %rd<4>;
mov.u64 %rd1, table;
ld.global.u64 %rd2, [%rd1];
ld.global.u64 %rd3, [%rd1+16];
st.global.u64 [%rd1], %rd3;
st.global.u64 [%rd1+16], %rd2;
ret;
}
)";
  return text;
}

// Modules with a short kernel, so that code lies elsewhere in each process that loads others.
static std::string PlainImage(int number) {
  std::string text =
      ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry plain(.param .u64 p)\n{\n"
      ".reg .b64 %rd<3>;\nld.param.u64 %rd1, [p];\nld.global.u64 %rd2, [%rd1];\n";
  for (int i = 0; i < number * 7 % 40; ++i) text += "add.u64 %rd2, %rd2, " + std::to_string(i) + ";\n";
  return text + "st.global.u64 [%rd1], %rd2;\nret;\n}\n";
}

struct Taking {
  int number = 0;
  CUcontext context = nullptr;
  CUfunction apply = nullptr, exchange = nullptr;
  CUdeviceptr values = 0;
  std::vector<uint64_t> want;
  bool exchanged = false;
};

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {12, 4});
  const char* const asked = getenv("APP_COPY");
  const std::string copy = asked ? asked : "";
  CU_CHECK(cuInit(0));
  int devices = 0;
  CU_CHECK(cuDeviceGetCount(&devices));
  CUdevice first, last;
  CU_CHECK(cuDeviceGet(&first, 0));
  CU_CHECK(cuDeviceGet(&last, devices - 1));
  CUcontext contexts[2];
  CU_CHECK(cuDevicePrimaryCtxRetain(&contexts[0], first));
  CU_CHECK(cuCtxSetCurrent(contexts[0]));
  const auto load_plain = [](int number) {
    CUmodule module;
    CUfunction function;
    CUdeviceptr word;
    CU_CHECK(cuMemAlloc(&word, 8));
    CU_CHECK(cuMemsetD32(word, 0, 2));
    CU_CHECK(cuModuleLoadData(&module, PlainImage(number).c_str()));
    CU_CHECK(cuModuleGetFunction(&function, module, "plain"));
    void* parameters[] = {&word};
    CU_CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr));
    CU_CHECK(cuCtxSynchronize());
    CU_CHECK(cuMemFree(word));
    return module;
  };
  CUmodule before = load_plain(3);
  CUlibrary library;
  CU_CHECK(cuLibraryLoadData(&library, Image(100).c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU_CHECK(cuCtxCreate(&contexts[1], nullptr, 0, last));

  std::vector<Taking> all;
  const auto begin = [&](int number, CUcontext context, CUfunction apply, CUfunction exchange) {
    Taking one;
    one.number = number;
    one.context = context;
    one.apply = apply;
    one.exchange = exchange;
    CU_CHECK(cuMemAlloc(&one.values, 6 * sizeof(uint64_t)));
    for (int i = 0; i < 6; ++i) one.want.push_back(uint64_t(number) * 1000003 + uint64_t(i));
    CU_CHECK(cuMemcpyHtoD(one.values, one.want.data(), 6 * sizeof(uint64_t)));
    all.push_back(one);
  };
  CUkernel apply_kernel, exchange_kernel;
  CU_CHECK(cuLibraryGetKernel(&apply_kernel, library, "apply"));
  CU_CHECK(cuLibraryGetKernel(&exchange_kernel, library, "exchange"));
  for (CUcontext context : contexts) {
    CU_CHECK(cuCtxSetCurrent(context));
    begin(100, context, reinterpret_cast<CUfunction>(apply_kernel), reinterpret_cast<CUfunction>(exchange_kernel));
  }
  CUmodule one_module = nullptr;
  for (int i = 0; i < options.size; ++i) {
    CU_CHECK(cuCtxSetCurrent(contexts[i % 2]));
    load_plain(i);
    CUfunction apply, exchange;
    CU_CHECK(cuModuleLoadData(&one_module, Image(i).c_str()));
    CU_CHECK(cuModuleGetFunction(&apply, one_module, "apply"));
    CU_CHECK(cuModuleGetFunction(&exchange, one_module, "exchange"));
    begin(i, contexts[i % 2], apply, exchange);
  }
  CUdeviceptr table, kept_there = 0;
  size_t bytes;
  CU_CHECK(cuModuleGetGlobal(&table, &bytes, one_module, "table"));
  const auto kept_here = std::make_unique<uint64_t[]>(2);
  if (copy == "host") CU_CHECK(cuMemcpyDtoH(kept_here.get(), table + 8, 8));
  if (copy == "packed" || copy == "pointer") KeepPacked(table + 8, copy == "pointer", kept_here.get());
  if (copy == "device") {
    CU_CHECK(cuMemAlloc(&kept_there, 64));
    CU_CHECK(cuMemsetD32(kept_there, 0, 16));
    CU_CHECK(cuMemcpyDtoD(kept_there + 16, table + 8, 8));
  }
  CU_CHECK(cuCtxSetCurrent(contexts[0]));
  CU_CHECK(cuModuleUnload(before));

  for (int step = 1; step <= options.steps; ++step) {
    app::Step(step);
    for (Taking& one : all) {
      CU_CHECK(cuCtxSetCurrent(one.context));
      if ((step + one.number) % 3 == 0) {
        CU_CHECK(cuLaunchKernel(one.exchange, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
        one.exchanged = !one.exchanged;
      }
      void* parameters[] = {&one.values};
      CU_CHECK(cuLaunchKernel(one.apply, 1, 1, 1, 6, 1, 1, 0, nullptr, parameters, nullptr));
      const int behind[6] = {one.exchanged ? 2 : 0, 1, one.exchanged ? 0 : 2, 2, 0, 1};
      for (int i = 0; i < 6; ++i) one.want[size_t(i)] = Expected(one.number, behind[i], one.want[size_t(i)]);
    }
  }
  app::Digest digest;
  for (const Taking& one : all) {
    uint64_t values[6];
    CU_CHECK(cuCtxSetCurrent(one.context));
    CU_CHECK(cuMemcpyDtoH(values, one.values, sizeof(values)));
    for (int i = 0; i < 6; ++i) APP_CHECK(values[i] == one.want[size_t(i)]);
    digest.Add(values, sizeof(values));
  }
  printf("code_tables modules=%d steps=%d digest=%016" PRIx64 "\n", options.size, options.steps, digest.value());
  return kept_here[0] == 1 ? 1 : 0;  // it is there to the end
}
