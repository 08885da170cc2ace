// SPDX-License-Identifier: Apache-2.0
// Classes of code_linked's kernels. Their functions are in code_linked_classes.cu, so kernels reach them by virtual
// tables and by the linker alone.
#ifndef CUDA_REMOTE_TESTS_APPS_CODE_LINKED_CLASSES_H_
#define CUDA_REMOTE_TESTS_APPS_CODE_LINKED_CLASSES_H_

#include "tests/apps/code_linked.h"

using Function = uint32_t (*)(uint32_t);

class Left {
 public:
  __device__ explicit Left(uint32_t seed) : seed_(seed) {}
  __device__ virtual ~Left() {}
  __device__ virtual uint32_t Apply(uint32_t x) const = 0;

 protected:
  uint32_t seed_;
};

class Right {
 public:
  __device__ virtual ~Right() {}
  __device__ virtual uint32_t Other(uint32_t x) const = 0;
};

class Adder : public Left {
 public:
  using Left::Left;
  __device__ uint32_t Apply(uint32_t x) const override;
};

class Turner : public Left {
 public:
  using Left::Left;
  __device__ uint32_t Apply(uint32_t x) const override;
};

// Two virtual tables, the second with a thunk.
class Pair : public Left, public Right {
 public:
  using Left::Left;
  __device__ uint32_t Apply(uint32_t x) const override;
  __device__ uint32_t Other(uint32_t x) const override;
};

// Calls other objects.
class Chain : public Left {
 public:
  __device__ Chain(uint32_t seed, const Left* first, const Right* second)
      : Left(seed), first_(first), second_(second) {}
  __device__ uint32_t Apply(uint32_t x) const override;

 private:
  const Left* first_;
  const Right* second_;
};

// Without virtual functions: pointers to its member functions are addresses.
struct Plain {
  uint32_t seed;
  __device__ uint32_t Once(uint32_t x);
  __device__ uint32_t Again(uint32_t x);
};

// Functions of the other unit that tables of this one hold.
__device__ uint32_t Outer0(uint32_t x);
__device__ uint32_t Outer1(uint32_t x);

#endif  // CUDA_REMOTE_TESTS_APPS_CODE_LINKED_CLASSES_H_
