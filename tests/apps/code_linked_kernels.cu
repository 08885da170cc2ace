// SPDX-License-Identifier: Apache-2.0
// The modules of code_linked: compiled with APP_MODULE=0 to 7, each in two units that nvlink links for real GPUs,
// so that functions have addresses (replay/modimg/README.md); with APP_WHOLE as one unit of PTX for the software GPU.
#ifdef APP_WHOLE
#include "tests/apps/code_linked_classes.cu"
#else
#include "tests/apps/code_linked_classes.h"
#define SCRAMBLE(x, which) Scramble(x, APP_MODULE, which, Rounds(APP_MODULE, which))
#endif

__device__ void* operator new(size_t, void* place) noexcept;

__device__ uint32_t Inner2(uint32_t x) { return SCRAMBLE(x, 2); }
__device__ uint32_t Inner3(uint32_t x) { return SCRAMBLE(x, 3); }

__device__ Function table[kFunctions] = {Outer0, Outer1, Inner2, Inner3};
__constant__ Function fixed[kFunctions] = {Inner2, Outer0, Inner3, Outer1};
static __device__ Function hidden[kFunctions] = {Inner3, Inner2, Outer1, Outer0};

using Member = uint32_t (Plain::*)(uint32_t);
__device__ Member members[2] = {&Plain::Once, &Plain::Again};

#ifdef APP_BARE
// Its address is in no variable.
__device__ __noinline__ uint32_t Bare(uint32_t x) { return SCRAMBLE(x, 2); }
#endif

__device__ Function* InnerTable() {
  static __device__ Function inner[kFunctions] = {Outer1, Inner3, Outer0, Inner2};
  return inner;
}

// Objects at storage, kObjectBytes each, and pointers to them.
extern "C" __global__ void Make(const Left** objects, char* storage, uint32_t seed) {
  Pair* const pair = new (storage + 2 * kObjectBytes) Pair(seed + 2);
  objects[0] = new (storage) Adder(seed);
  objects[1] = new (storage + kObjectBytes) Turner(seed + 1);
  objects[2] = pair;
  objects[3] = new (storage + 3 * kObjectBytes) Chain(seed + 3, objects[1], pair);
}

// Addresses of functions in memory that no module knows.
extern "C" __global__ void Collect(Function* pointers) {
  for (int i = 0; i < kFunctions; ++i) pointers[i] = i % 2 == 0 ? table[i] : fixed[i];
#ifdef APP_BARE
  pointers[2] = Bare;
#endif
}

// What loading has put into the tables is there no more.
extern "C" __global__ void Exchange() {
  const auto exchange = [](Function* functions) {
    const Function first = functions[0];
    functions[0] = functions[2];
    functions[2] = first;
  };
  exchange(table);
  exchange(hidden);
  exchange(InnerTable());
  const Member first = members[0];
  members[0] = members[1];
  members[1] = first;
}

// What thread `target` calls.
static __device__ uint32_t Call(int target, const Left* const* objects, const Function* pointers, uint32_t x) {
  if (target < kOfTable) return objects[target]->Apply(x);
  if (target < kOfFixed) return table[target - kOfTable](x);
  if (target < kOfHidden) return fixed[target - kOfFixed](x);
  if (target < kOfInner) return hidden[target - kOfHidden](x);
  if (target < kOfMembers) return InnerTable()[target - kOfInner](x);
  if (target < kOfPointers) {
    Plain plain = {uint32_t(target)};
    return (plain.*members[target - kOfMembers])(x);
  }
  return pointers != nullptr ? pointers[target - kOfPointers](x) : x;
}

// Each of kTargets threads calls its target, `pointers` may be null.
extern "C" __global__ void Run(const Left* const* objects, const Function* pointers, uint32_t* values) {
  values[threadIdx.x] = Call(int(threadIdx.x), objects, pointers, values[threadIdx.x]);
}

// The same, for a kernel that is first used late, with code that is longer than that of most others.
extern "C" __global__ void Late(const Left* const* objects, const Function* pointers, uint32_t* values) {
  const uint32_t x = Scramble(values[threadIdx.x], APP_MODULE, kLate, LateRounds(APP_MODULE));
  values[threadIdx.x] = Call(int(threadIdx.x), objects, pointers, x);
}
