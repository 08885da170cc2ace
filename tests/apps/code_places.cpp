// SPDX-License-Identifier: Apache-2.0
// Addresses of functions in GPU memory, in __device__ and in __constant__ variables, of modules and of a library that
// is in several contexts. Where code lies follows from what was loaded and used before: other modules come in between
// and are gone later, and kernels are first used at any time, so a restart has to see to it that the functions lie
// where they lay. No code comes to lie where other code was unloaded before all of these functions are there: a restart
// would be refused (docs/context-state.md). The driver API alone.
#include <cuda.h>

#include <string>
#include <vector>

#include "tests/apps/support/driver.h"

static const int kFunctions = 3;

static std::string Head() { return ".version 7.0\n.target sm_75\n.address_size 64\n"; }

// What function `index` of module `number` makes of x.
static uint64_t Expected(int number, int index, uint64_t x) {
  return (x * uint64_t(2 * index + 3) + uint64_t(number)) ^ (x >> (index + 1));
}

// A module whose functions are long, in a table, in a constant one, and one in a table with something else in front, as
// an object's virtual functions are. `collect` writes all addresses to memory, `apply` calls what it finds there.
static std::string TakingImage(int number, int length) {
  std::string text = Head(), names[kFunctions];
  const std::string id = std::to_string(number);
  for (int i = 0; i < kFunctions; ++i) {
    names[i] = "f_" + id + "_" + std::to_string(i);
    text += ".visible .func (.param .b64 result) " + names[i] + "(.param .b64 argument)\n{\n.reg .b64 %rd<5>;\n" +
            "ld.param.u64 %rd1, [argument];\nmul.lo.u64 %rd2, %rd1, " + std::to_string(2 * i + 3) + ";\n" +
            "add.u64 %rd2, %rd2, " + id + ";\nshr.u64 %rd3, %rd1, " + std::to_string(i + 1) + ";\n";
    // There and back again: only length.
    for (int k = 0; k < length * (i + 1); ++k) {
      text += "xor.b64 %rd2, %rd2, " + std::to_string(k * 2654435761u + 1) + ";\n";
    }
    for (int k = length * (i + 1); k-- > 0;) {
      text += "xor.b64 %rd2, %rd2, " + std::to_string(k * 2654435761u + 1) + ";\n";
    }
    text += "xor.b64 %rd4, %rd2, %rd3;\nst.param.b64 [result], %rd4;\nret;\n}\n";
  }
  text +=
      ".visible .global .align 8 .u64 table_" + id + "[3] = {" + names[0] + ", " + names[1] + ", " + names[2] + "};\n";
  text +=
      ".visible .const .align 8 .u64 fixed_" + id + "[3] = {" + names[2] + ", " + names[0] + ", " + names[1] + "};\n";
  text +=
      ".visible .global .align 8 .u64 virtual_" + id + "[4] = {0, " + id + ", " + names[1] + ", " + names[0] + "};\n";
  text +=
      ".visible .entry collect(.param .u64 p_to)\n{\n.reg .b64 %rd<8>;\nld.param.u64 %rd1, [p_to];\n"
      "mov.u64 %rd2, table_" +
      id + ";\nmov.u64 %rd3, fixed_" + id + ";\n";
  for (int i = 0; i < kFunctions; ++i) {
    text += "ld.global.u64 %rd4, [%rd2+" + std::to_string(8 * i) + "];\nst.global.u64 [%rd1+" + std::to_string(8 * i) +
            "], %rd4;\nld.const.u64 %rd4, [%rd3+" + std::to_string(8 * i) + "];\nst.global.u64 [%rd1+" +
            std::to_string(24 + 8 * i) + "], %rd4;\n";
  }
  // An object: the address of its table; and a function's address that no table gave.
  text += "mov.u64 %rd5, virtual_" + id + ";\nst.global.u64 [%rd1+48], %rd5;\nmov.u64 %rd6, " + names[2] +
          ";\nst.global.u64 [%rd1+56], %rd6;\nret;\n}\n";
  // Thread i: values[i] = (*pointers[i])(values[i]); thread 6 calls the second function of the object.
  text += R"(.visible .entry apply(.param .u64 p_from, .param .u64 p_values)
{
.reg .pred %p<2>;
.reg .b32 %r<2>;
.reg .b64 %rd<9>;
ld.param.u64 %rd1, [p_from];
ld.param.u64 %rd2, [p_values];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 8;
add.u64 %rd4, %rd1, %rd3;
add.u64 %rd5, %rd2, %rd3;
ld.global.u64 %rd6, [%rd4];
setp.ne.u32 %p1, %r1, 6;
@%p1 bra CALL;
ld.global.u64 %rd6, [%rd6+16];
CALL:
ld.global.u64 %rd7, [%rd5];
{
.param .b64 argument;
.param .b64 result;
st.param.b64 [argument], %rd7;
prototype: .callprototype (.param .b64 _) _ (.param .b64 _);
call (result), %rd6, (argument), prototype;
ld.param.b64 %rd8, [result];
}
st.global.u64 [%rd5], %rd8;
ret;
}
)";
  return text;
}

// Which function is behind each of the eight addresses.
static const int kBehind[8] = {0, 1, 2, 2, 0, 1, 1, 2};

// A module with a short kernel and nothing else.
static std::string PlainImage(int number) {
  std::string text = Head() +
                     ".visible .entry plain(.param .u64 p)\n{\n.reg .b64 %rd<3>;\nld.param.u64 %rd1, [p];\n"
                     "ld.global.u64 %rd2, [%rd1];\n";
  for (int i = 0; i < number * 7 % 40; ++i) text += "add.u64 %rd2, %rd2, " + std::to_string(i) + ";\n";
  return text + "st.global.u64 [%rd1], %rd2;\nret;\n}\n";
}

struct Taking {
  int number = 0;
  CUcontext context = nullptr;
  CUfunction apply = nullptr;
  CUdeviceptr addresses = 0, values = 0;
  std::vector<uint64_t> want;
};

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {12, 6});
  CU_CHECK(cuInit(0));
  int devices = 0;
  CU_CHECK(cuDeviceGetCount(&devices));
  std::vector<CUcontext> contexts;
  for (int i = 0; i < (devices < 2 ? 1 : 2); ++i) {
    CUdevice device;
    CUcontext primary;
    CU_CHECK(cuDeviceGet(&device, i));
    CU_CHECK(cuDevicePrimaryCtxRetain(&primary, device));
    contexts.push_back(primary);
  }
  CUdevice first;
  CUcontext own;
  CU_CHECK(cuDeviceGet(&first, 0));
  CU_CHECK(cuCtxCreate(&own, nullptr, 0, first));
  contexts.push_back(own);

  std::vector<Taking> taking;
  const auto begin = [&](int number, CUcontext context, CUfunction collect, CUfunction apply) {
    Taking one;
    one.number = number;
    one.context = context;
    one.apply = apply;
    CU_CHECK(cuMemAlloc(&one.addresses, 8 * sizeof(CUdeviceptr)));
    CU_CHECK(cuMemAlloc(&one.values, 8 * sizeof(uint64_t)));
    for (int i = 0; i < 8; ++i) one.want.push_back(uint64_t(number) * 1000003 + uint64_t(i));
    CU_CHECK(cuMemcpyHtoD(one.values, one.want.data(), 8 * sizeof(uint64_t)));
    void* parameters[] = {&one.addresses};
    CU_CHECK(cuLaunchKernel(collect, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr));
    taking.push_back(one);
  };
  std::vector<CUmodule> plain;
  int next_plain = 0;
  CUdeviceptr word;
  CU_CHECK(cuCtxSetCurrent(contexts[0]));
  CU_CHECK(cuMemAlloc(&word, 8));
  CU_CHECK(cuMemsetD32(word, 0, 2));
  const auto load_plain = [&] {
    CUmodule module;
    CUfunction function;
    CU_CHECK(cuCtxSetCurrent(contexts[0]));
    CU_CHECK(cuModuleLoadData(&module, PlainImage(next_plain++).c_str()));
    CU_CHECK(cuModuleGetFunction(&function, module, "plain"));
    void* parameters[] = {&word};
    CU_CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr));
    plain.push_back(module);
  };
  const auto unload_plain = [&](size_t which) {
    CU_CHECK(cuCtxSetCurrent(contexts[0]));
    CU_CHECK(cuModuleUnload(plain[which % plain.size()]));
    plain.erase(plain.begin() + long(which % plain.size()));
  };

  // A library in all contexts, whose kernels are used later than those of the modules that are loaded behind it.
  CUlibrary library;
  for (int i = 0; i < 5; ++i) load_plain();
  CU_CHECK(cuLibraryLoadData(&library, TakingImage(100, 400).c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  CUkernel collect_kernel, apply_kernel;
  CU_CHECK(cuLibraryGetKernel(&collect_kernel, library, "collect"));
  CU_CHECK(cuLibraryGetKernel(&apply_kernel, library, "apply"));
  for (size_t i = contexts.size(); i-- > 0;) {
    CU_CHECK(cuCtxSetCurrent(contexts[i]));
    begin(100, contexts[i], reinterpret_cast<CUfunction>(collect_kernel), reinterpret_cast<CUfunction>(apply_kernel));
  }
  for (int i = 0; i < options.size; ++i) {
    for (int k = 0; k < i % 3; ++k) load_plain();
    CU_CHECK(cuCtxSetCurrent(contexts[size_t(i) % contexts.size()]));
    CUmodule module;
    CUfunction collect, apply;
    CU_CHECK(cuModuleLoadData(&module, TakingImage(i, 300 + 50 * i).c_str()));
    CU_CHECK(cuModuleGetFunction(&apply, module, "apply"));
    CU_CHECK(cuModuleGetFunction(&collect, module, "collect"));
    begin(i, contexts[size_t(i) % contexts.size()], collect, apply);
  }
  for (int step = 1; step <= options.steps; ++step) {
    load_plain();
    if (step % 2 == 0) unload_plain(size_t(step) * 5);
    app::Step(step);  // a restart here finds addresses in GPU memory that must still be right
    for (Taking& one : taking) {
      CU_CHECK(cuCtxSetCurrent(one.context));
      void* parameters[] = {&one.addresses, &one.values};
      CU_CHECK(cuLaunchKernel(one.apply, 1, 1, 1, 8, 1, 1, 0, nullptr, parameters, nullptr));
      for (int i = 0; i < 8; ++i) one.want[size_t(i)] = Expected(one.number, kBehind[i], one.want[size_t(i)]);
    }
  }
  app::Digest digest;
  for (const Taking& one : taking) {
    uint64_t values[8];
    CU_CHECK(cuCtxSetCurrent(one.context));
    CU_CHECK(cuMemcpyDtoH(values, one.values, sizeof(values)));
    for (int i = 0; i < 8; ++i) APP_CHECK(values[i] == one.want[size_t(i)]);
    digest.Add(values, sizeof(values));
  }
  printf("code_places modules=%d steps=%d digest=%016" PRIx64 "\n", options.size, options.steps, digest.value());
  return 0;
}
