// SPDX-License-Identifier: Apache-2.0
// Modules with variables that come and go, so that the addresses of those alive follow from a history that no log
// keeps: the driver puts a module's variables where there is room. Addresses of variables are kept in GPU memory and
// followed there by a kernel, as a program's own tables of pointers would be. Modules have one to three variables,
// which the driver places one by one. The driver API alone.
#include <cuda.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/apps/support/driver.h"

// Thread i: *table[i] += add + i; sums[0] += *table[i] for all.
static const char kFollow[] = R"(
.version 7.0
.target sm_52
.address_size 64
.visible .entry follow(.param .u64 p_table, .param .u64 p_sum, .param .u32 p_add)
{
  .reg .b32 %r<8>;
  .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [p_table];
  ld.param.u64 %rd2, [p_sum];
  ld.param.u32 %r1, [p_add];
  mov.u32 %r2, %tid.x;
  mul.wide.u32 %rd3, %r2, 8;
  add.s64 %rd4, %rd1, %rd3;
  ld.global.u64 %rd5, [%rd4];
  ld.global.u32 %r3, [%rd5];
  add.u32 %r4, %r3, %r1;
  add.u32 %r5, %r4, %r2;
  st.global.u32 [%rd5], %r5;
  atom.global.add.u32 %r6, [%rd2], %r5;
  ret;
}
)";

// Whether a module has a constant, too, and its first word.
#ifdef APP_CONSTANTS
static bool HasConstant(int number) { return number % 3 == 0; }
#else
static bool HasConstant(int) { return false; }
#endif
static unsigned ConstantOf(int number) { return 1000u + unsigned(number); }

// A module with variables of these lengths.
static std::string Image(int number, const std::vector<size_t>& bytes) {
  std::string text = ".version 7.0\n.target sm_52\n.address_size 64\n";
  for (size_t i = 0; i < bytes.size(); ++i) {
    text += ".visible .global .align 8 .b8 place_" + std::to_string(i) + "[" + std::to_string(bytes[i]) + "];\n";
  }
  if (HasConstant(number)) {
    text += ".visible .const .align 4 .b32 fixed[" + std::to_string(1 + number * 7 % 500) + "] = {" +
            std::to_string(ConstantOf(number)) + "};\n";
  }
  return text + ".visible .entry nothing_" + std::to_string(number) + "() { ret; }\n";
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {40, 24});
  const unsigned slots = options.size;
  CU_CHECK(cuInit(0));
  CUdevice device;
  CUcontext context;
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CU_CHECK(cuCtxSetCurrent(context));
  CUmodule follow_module;
  CUfunction follow;
  CU_CHECK(cuModuleLoadData(&follow_module, kFollow));
  CU_CHECK(cuModuleGetFunction(&follow, follow_module, "follow"));

  std::vector<CUmodule> modules(slots);
  std::vector<std::vector<CUdeviceptr>> places(slots);
  std::vector<CUdeviceptr> constants(slots);
  std::vector<int> numbers(slots);
  std::vector<std::vector<unsigned>> want(slots);
  uint64_t random = 12345;
  const auto next = [&random](uint64_t below) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    return (random >> 33) % below;
  };
  int number = 0;
  const auto load = [&](unsigned slot) {
    std::vector<size_t> bytes(1 + next(3));
    for (size_t& one : bytes) {
      // Most small, some large, a few with blocks of their own.
      const uint64_t kind = next(24);
      one = 4 * (1 + next(kind == 0 ? 1 << 20 : kind < 6 ? 1 << 16 : 1 << 9));
    }
    numbers[slot] = number;
    CU_CHECK(cuModuleLoadData(&modules[slot], Image(number++, bytes).c_str()));
    size_t size = 0;
    places[slot].resize(bytes.size());
    for (size_t i = 0; i < bytes.size(); ++i) {
      CU_CHECK(cuModuleGetGlobal(&places[slot][i], &size, modules[slot], ("place_" + std::to_string(i)).c_str()));
      APP_CHECK(size == bytes[i]);
    }
    if (HasConstant(numbers[slot])) CU_CHECK(cuModuleGetGlobal(&constants[slot], &size, modules[slot], "fixed"));
    want[slot].assign(bytes.size(), 0);
  };
  // One that a thread without a context loads; where its variable comes to lie is up to what was there before, too.
  load(0);
  CUlibrary library;
  std::thread([&library] {
    CU_CHECK(cuLibraryLoadData(&library, Image(1000000, {64}).c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  }).join();
  CUdeviceptr in_library;
  size_t in_library_bytes = 0;
  CU_CHECK(cuLibraryGetGlobal(&in_library, &in_library_bytes, library, "place_0"));
  CU_CHECK(cuMemsetD32(in_library, 4711, 1));
  for (unsigned slot = 1; slot < slots; ++slot) load(slot);
  CUdeviceptr table, sum;
  CU_CHECK(cuMemAlloc(&table, 3 * slots * sizeof(CUdeviceptr)));
  CU_CHECK(cuMemAlloc(&sum, sizeof(unsigned)));
  CU_CHECK(cuMemsetD32(sum, 0, 1));
  unsigned want_sum = 0;
  for (int step = 1; step <= options.steps; ++step) {
    for (int i = 0; i < 3; ++i) {
      const unsigned slot = unsigned(next(slots));
      CU_CHECK(cuModuleUnload(modules[slot]));
      // Another one goes before it comes again, so that places are taken by others.
      const unsigned other = unsigned(next(slots));
      if (other != slot) {
        CU_CHECK(cuModuleUnload(modules[other]));
        load(other);
      }
      load(slot);
    }
    std::vector<CUdeviceptr> all;
    for (const auto& of_slot : places) all.insert(all.end(), of_slot.begin(), of_slot.end());
    CU_CHECK(cuMemcpyHtoD(table, all.data(), all.size() * sizeof(CUdeviceptr)));
    app::Step(step);  // a restart here finds addresses in GPU memory that must still be right
    unsigned add = unsigned(step);
    void* parameters[] = {&table, &sum, &add};
    CU_CHECK(cuLaunchKernel(follow, 1, 1, 1, unsigned(all.size()), 1, 1, 0, nullptr, parameters, nullptr));
    unsigned thread = 0;
    for (auto& of_slot : want) {
      for (unsigned& one : of_slot) want_sum += one += add + thread++;
    }
  }
  app::Digest digest;
  for (unsigned slot = 0; slot < slots; ++slot) {
    for (size_t i = 0; i < places[slot].size(); ++i) {
      unsigned value = 0;
      CU_CHECK(cuMemcpyDtoH(&value, places[slot][i], sizeof(value)));
      APP_CHECK(value == want[slot][i]);
      digest.Add(&value, sizeof(value));
    }
    if (HasConstant(numbers[slot])) {
      unsigned constant = 0;
      CU_CHECK(cuMemcpyDtoH(&constant, constants[slot], sizeof(constant)));
      APP_CHECK(constant == ConstantOf(numbers[slot]));
    }
  }
  unsigned kept = 0;
  CU_CHECK(cuMemcpyDtoH(&kept, in_library, sizeof(kept)));
  APP_CHECK(kept == 4711);
  unsigned total = 0;
  CU_CHECK(cuMemcpyDtoH(&total, sum, sizeof(total)));
  APP_CHECK(total == want_sum);
  printf("unloads slots=%u steps=%d modules=%d sum=%u digest=%016" PRIx64 "\n", slots, options.steps, number, total,
         digest.value());
  return 0;
}
