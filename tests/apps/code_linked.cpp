// SPDX-License-Identifier: Apache-2.0
// Addresses of code in modules that were compiled in several units and linked: only there real GPUs have any
// (docs/driver-notes.md). Objects with virtual functions lie in GPU memory; tables of functions and of member functions
// in __device__, __constant__ and static variables. Each step calls through all of these in modules of two contexts (on
// two GPUs, if there are) and of a library in both, and compares with a model.
//
// Where code lies follows from what was loaded and used before. A module is loaded first and gone before the first
// step; other modules come into the room that was left, are unloaded again and come back in another order; and kernels
// are first used late. So functions may lie elsewhere after a restart, and the tables have to follow.
//
// APP_KEEP=first: GPU memory holds addresses of functions as well, of the modules that were loaded before any was
// unloaded. The software GPU brings these functions back to their places; a real one may not, and a restart is then
// refused (docs/context-state.md). APP_KEEP=all: of all modules. The driver API alone.
#include "tests/apps/code_linked.h"

#include <cuda.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/apps/support/driver.h"

extern "C" const unsigned char code_linked_image0[], code_linked_image1[], code_linked_image2[], code_linked_image3[],
    code_linked_image4[], code_linked_image5[], code_linked_image6[], code_linked_image7[];

namespace {

const unsigned char* const kImages[] = {code_linked_image0, code_linked_image1, code_linked_image2, code_linked_image3,
                                        code_linked_image4, code_linked_image5, code_linked_image6, code_linked_image7};
// The library, the modules that stay, and those that come and go.
constexpr int kLibrary = 0, kStays[2] = {1, 2}, kFirstComing = 3, kComing = 5;
// Fewer than come and go: none is loaded twice at a time.
constexpr int kSlots = 4;

// A module, or a library in one context, and what its kernels work on.
struct Unit {
  int number = 0;
  uint32_t seed = 0;
  CUcontext context = nullptr;
  CUmodule module = nullptr;    // or
  CUlibrary library = nullptr;  // one for several units
  CUfunction run = nullptr, exchange = nullptr;
  CUfunction late = nullptr;  // once it was used
  int late_from = 0;          // step
  bool exchanged = false;
  bool keeps = false;  // addresses of functions in GPU memory
  CUdeviceptr objects = 0, storage = 0, pointers = 0, values = 0;
  std::vector<uint32_t> want;
};

CUfunction Find(const Unit& unit, const char* name) {
  CUfunction function;
  if (unit.library == nullptr) {
    CU_CHECK(cuModuleGetFunction(&function, unit.module, name));
    return function;
  }
  CUkernel kernel;
  CU_CHECK(cuLibraryGetKernel(&kernel, unit.library, name));
  CU_CHECK(cuKernelGetFunction(&function, kernel));  // in the current context
  return function;
}

void Launch(CUfunction function, unsigned threads, std::vector<void*> arguments) {
  CU_CHECK(cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, nullptr, arguments.data(), nullptr));
}

uint32_t F(const Unit& unit, uint32_t which, uint32_t x) {
  return Scramble(x, uint32_t(unit.number), which, Rounds(unit.number, int(which)));
}

// What `target` makes of x.
uint32_t Model(const Unit& unit, int target, uint32_t x) {
  const auto entry = [&](std::vector<uint32_t> functions, int index, bool exchanged) {
    if (exchanged) std::swap(functions[0], functions[2]);
    return F(unit, functions[size_t(index)], x);
  };
  const auto turner = [&](uint32_t y) { return F(unit, kTurner, y ^ (unit.seed + 1)); };
  const auto other = [&](uint32_t y) { return F(unit, kPairRight, y * (2 * (unit.seed + 2) + 1)); };
  if (target == 0) return F(unit, kAdder, x + unit.seed);
  if (target == 1) return turner(x);
  if (target == 2) return F(unit, kPairLeft, x - (unit.seed + 2));
  if (target == 3) return F(unit, kChain, other(turner(x)) + unit.seed + 3);
  if (target < kOfFixed) return entry({0, 1, 2, 3}, target - kOfTable, unit.exchanged);
  if (target < kOfHidden) return entry({2, 0, 3, 1}, target - kOfFixed, false);
  if (target < kOfInner) return entry({3, 2, 1, 0}, target - kOfHidden, unit.exchanged);
  if (target < kOfMembers) return entry({1, 3, 0, 2}, target - kOfInner, unit.exchanged);
  if (target < kOfPointers) {
    const bool again = (target - kOfMembers == 1) != unit.exchanged;
    const uint32_t seed = uint32_t(target);
    return again ? F(unit, kMember + 1, x ^ seed) : F(unit, kMember, x + seed);
  }
  return unit.keeps ? entry({0, 0, 2, 1}, target - kOfPointers, false) : x;
}

// Objects, values, and perhaps addresses, for a module that was just loaded. Its context is current.
void Begin(Unit* unit) {
  CU_CHECK(cuMemAlloc(&unit->objects, kObjects * sizeof(CUdeviceptr)));
  CU_CHECK(cuMemAlloc(&unit->storage, kObjects * kObjectBytes));
  CU_CHECK(cuMemAlloc(&unit->values, kTargets * sizeof(uint32_t)));
  for (int i = 0; i < kTargets; ++i) unit->want.push_back(unit->seed * 1000003u + uint32_t(i));
  CU_CHECK(cuMemcpyHtoD(unit->values, unit->want.data(), kTargets * sizeof(uint32_t)));
  Launch(Find(*unit, "Make"), 1, {&unit->objects, &unit->storage, &unit->seed});
  if (unit->keeps) {
    CU_CHECK(cuMemAlloc(&unit->pointers, kFunctions * sizeof(CUdeviceptr)));
    Launch(Find(*unit, "Collect"), 1, {&unit->pointers});
  }
  unit->run = Find(*unit, "Run");
}

Unit Load(int number, uint32_t seed, CUcontext context, bool keeps) {
  Unit unit;
  unit.number = number;
  unit.seed = seed;
  unit.context = context;
  unit.keeps = keeps;
  CU_CHECK(cuCtxSetCurrent(context));
  CU_CHECK(cuModuleLoadData(&unit.module, kImages[number]));
  Begin(&unit);
  return unit;
}

void Unload(const Unit& unit) {
  CU_CHECK(cuCtxSetCurrent(unit.context));
  for (CUdeviceptr memory : {unit.objects, unit.storage, unit.pointers, unit.values}) {
    if (memory != 0) CU_CHECK(cuMemFree(memory));
  }
  CU_CHECK(cuModuleUnload(unit.module));
}

// Calls through everything, and compares.
void Call(Unit* unit, int step, app::Digest* digest) {
  CU_CHECK(cuCtxSetCurrent(unit->context));
  if ((step + unit->number) % 3 == 0) {
    if (unit->exchange == nullptr) unit->exchange = Find(*unit, "Exchange");
    Launch(unit->exchange, 1, {});
    unit->exchanged = !unit->exchanged;
  }
  const bool late = unit->late_from != 0 && step >= unit->late_from && step % 2 == 0;
  if (late && unit->late == nullptr) unit->late = Find(*unit, "Late");
  Launch(late ? unit->late : unit->run, kTargets, {&unit->objects, &unit->pointers, &unit->values});
  for (int i = 0; i < kTargets; ++i) {
    uint32_t& x = unit->want[size_t(i)];
    if (late) x = Scramble(x, uint32_t(unit->number), kLate, LateRounds(unit->number));
    x = Model(*unit, i, x);
  }
  std::vector<uint32_t> values(kTargets);
  CU_CHECK(cuMemcpyDtoH(values.data(), unit->values, kTargets * sizeof(uint32_t)));
  for (int i = 0; i < kTargets; ++i) {
    if (values[size_t(i)] == unit->want[size_t(i)]) continue;
    fprintf(stderr, "step %d: module %d (seed %u) called another function for its target %d\n", step, unit->number,
            unit->seed, i);
    exit(1);
  }
  digest->Add(values.data(), values.size() * sizeof(uint32_t));
}

}  // namespace

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {12, 1});
  const char* const asked = getenv("APP_KEEP");
  const bool keep_all = asked != nullptr && std::string(asked) == "all";
  const bool keep_first = keep_all || (asked != nullptr && std::string(asked) == "first");
  CU_CHECK(cuInit(0));
  int devices = 0;
  CU_CHECK(cuDeviceGetCount(&devices));
  CUdevice first, last;
  CU_CHECK(cuDeviceGet(&first, 0));
  CU_CHECK(cuDeviceGet(&last, devices - 1));
  CUcontext contexts[2];
  CU_CHECK(cuDevicePrimaryCtxRetain(&contexts[0], first));

  // What comes before, so that the other modules lie behind it, and is gone later.
  std::vector<Unit> before = {Load(kFirstComing, 1, contexts[0], false)};
  CUlibrary library;
  CU_CHECK(cuLibraryLoadData(&library, kImages[kLibrary], nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU_CHECK(cuCtxCreate(&contexts[1], nullptr, 0, last));
  before.push_back(Load(kFirstComing + 1, 2, contexts[1], false));

  // These stay. The library is first used in the second context, and late in the first.
  std::vector<Unit> stay;
  const auto use_library = [&](CUcontext context, uint32_t seed) {
    Unit unit;
    unit.number = kLibrary;
    unit.seed = seed;
    unit.context = context;
    unit.library = library;
    unit.keeps = keep_first;
    CU_CHECK(cuCtxSetCurrent(context));
    Begin(&unit);
    stay.push_back(unit);
  };
  use_library(contexts[1], 11);
  stay.push_back(Load(kStays[0], 12, contexts[0], keep_first));
  stay.push_back(Load(kStays[1], 13, contexts[1], keep_first));
  use_library(contexts[0], 14);
  for (size_t i = 0; i < stay.size(); ++i) stay[i].late_from = options.steps / 4 + 3 * int(i);
  for (const Unit& unit : before) Unload(unit);

  // These come and go, in both contexts: whichever of the modules is not there.
  Unit come[kSlots];
  uint32_t loads = 0;
  const auto load = [&](size_t slot) {
    const auto is_there = [&](int number) {
      return std::any_of(come, come + kSlots, [&](const Unit& unit) { return unit.module && unit.number == number; });
    };
    int number = kFirstComing + int((7 * ++loads + slot) % kComing);
    while (is_there(number)) number = kFirstComing + (number - kFirstComing + 1) % kComing;
    come[slot] = Load(number, 20 + loads, contexts[slot % 2], keep_all);
    come[slot].late_from = 1 + int(loads % 5);
  };
  const auto unload = [&](size_t slot) {
    Unload(come[slot]);
    come[slot] = {};
  };
  for (size_t slot = 0; slot < kSlots; ++slot) load(slot);

  app::Digest digest;
  for (int step = 1; step <= options.steps; ++step) {
    if (step % 4 == 0) {
      for (size_t slot = 0; slot < kSlots; ++slot) unload(slot);
      for (size_t slot = kSlots; slot-- > 0;) load((slot + size_t(step)) % kSlots);
    } else if (step % 2 == 0) {
      unload(size_t(step / 2) % kSlots);
      load(size_t(step / 2) % kSlots);
    }
    app::Step(step);
    for (Unit& unit : stay) Call(&unit, step, &digest);
    for (Unit& unit : come) Call(&unit, step, &digest);
  }
  printf("code_linked steps=%d digest=%016" PRIx64 "\n", options.steps, digest.value());
  return 0;
}
