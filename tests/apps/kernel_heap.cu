// SPDX-License-Identifier: Apache-2.0
// Memory that kernels allocate: lists of objects with virtual functions that live in the kernels' heap, some of them
// given back and others allocated in each step.
#include <cuda_runtime.h>

#include <vector>

#include "tests/apps/support/app.h"

struct Item {
  Item* next;
  unsigned long long value;
  __device__ explicit Item(unsigned long long v) : next(nullptr), value(v) {}
  __device__ virtual ~Item() {}
  __device__ virtual unsigned long long Weight() const = 0;
};
struct Single : Item {
  __device__ explicit Single(unsigned long long v) : Item(v) {}
  __device__ unsigned long long Weight() const override { return value * 3 + 1; }
};
struct Row : Item {
  unsigned count;
  unsigned* numbers;
  __device__ Row(unsigned long long v, unsigned n) : Item(v), count(n), numbers(new unsigned[n]) {
    for (unsigned i = 0; i < n; ++i) numbers[i] = unsigned(v) * 31 + i;
  }
  __device__ ~Row() override { delete[] numbers; }
  __device__ unsigned long long Weight() const override {
    unsigned long long sum = value;
    for (unsigned i = 0; i < count; ++i) sum = sum * 7 + numbers[i];
    return sum;
  }
};

__host__ __device__ unsigned Length(unsigned thread, unsigned step) { return 1 + (thread * 13 + step * 29) % 60; }

// Each thread's list gets one item in front; from the fourth step on the last one goes.
__global__ void Change(Item** lists, unsigned threads, unsigned step, unsigned* failed) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= threads) return;
  const unsigned long long value = step * 1000ull + i;
  Item* const item = (i + step) % 2 ? static_cast<Item*>(new Single(value)) : new Row(value, Length(i, step));
  if (item == nullptr) {
    atomicAdd(failed, 1);
    return;
  }
  item->next = lists[i];
  lists[i] = item;
  if (step <= 3) return;
  Item** last = &lists[i];
  while ((*last)->next != nullptr) last = &(*last)->next;
  delete *last;
  *last = nullptr;
}

__global__ void Weigh(Item* const* lists, unsigned threads, unsigned long long* weights) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= threads) return;
  unsigned long long sum = 0;
  for (const Item* item = lists[i]; item != nullptr; item = item->next) sum = sum * 1000003 + item->Weight();
  weights[i] = sum;
}

static unsigned long long WeightOf(unsigned thread, unsigned step) {
  unsigned long long value = step * 1000ull + thread;
  if ((thread + step) % 2) return value * 3 + 1;
  const unsigned first = unsigned(value) * 31;
  for (unsigned i = 0; i < Length(thread, step); ++i) value = value * 7 + (first + i);
  return value;
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {16, 300});
  const unsigned threads = unsigned(options.size);
  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  devices = devices < 2 ? 1 : 2;
  std::vector<Item**> lists;
  std::vector<unsigned long long*> weights;
  std::vector<unsigned*> failed;
  for (int device = 0; device < devices; ++device) {
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, size_t(device + 1) * (16 << 20)));
    Item** list;
    unsigned long long* weight;
    unsigned* fail;
    CUDA_CHECK(cudaMalloc(&list, threads * sizeof(Item*)));
    CUDA_CHECK(cudaMemset(list, 0, threads * sizeof(Item*)));
    CUDA_CHECK(cudaMalloc(&weight, threads * sizeof(*weight)));
    CUDA_CHECK(cudaMalloc(&fail, sizeof(*fail)));
    CUDA_CHECK(cudaMemset(fail, 0, sizeof(*fail)));
    lists.push_back(list);
    weights.push_back(weight);
    failed.push_back(fail);
  }
  app::Digest digest;
  const unsigned blocks = (threads + 63) / 64;
  for (int step = 1; step <= options.steps; ++step) {
    for (int device = 0; device < devices; ++device) {
      CUDA_CHECK(cudaSetDevice(device));
      Change<<<blocks, 64>>>(lists[device], threads, unsigned(step), failed[device]);
      LAUNCH_CHECK();
    }
    app::Step(step);  // a restart here finds pointers into the heap
    for (int device = 0; device < devices; ++device) {
      CUDA_CHECK(cudaSetDevice(device));
      Weigh<<<blocks, 64>>>(lists[device], threads, weights[device]);
      LAUNCH_CHECK();
      std::vector<unsigned long long> found(threads);
      CUDA_CHECK(cudaMemcpy(found.data(), weights[device], threads * sizeof(found[0]), cudaMemcpyDeviceToHost));
      unsigned fails = 0;
      CUDA_CHECK(cudaMemcpy(&fails, failed[device], sizeof(fails), cudaMemcpyDeviceToHost));
      APP_CHECK(fails == 0);
      for (unsigned i = 0; i < threads; ++i) {
        unsigned long long want = 0;
        for (int s = step; s > 0 && s > step - 3; --s) want = want * 1000003 + WeightOf(i, unsigned(s));
        APP_CHECK(found[i] == want);
      }
      digest.Add(found.data(), found.size() * sizeof(found[0]));
    }
  }
  printf("kernel_heap threads=%u steps=%d digest=%016" PRIx64 "\n", threads, options.steps, digest.value());
  return 0;
}
