// SPDX-License-Identifier: Apache-2.0
// Memory that changes all the time, in every way, and memory that never does: kernels, copies, fills, frees and
// allocations at addresses that were just freed, memory of pools, arrays, memory mapped by the program. The host has a
// model of all of it, and compares some of it in each step and all in the end. For checkpoints that copy memory while
// it is written to: a byte of another moment is a wrong byte here.
#include <cuda.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kAllocations = 8;
constexpr unsigned kSide = 192;  // of the array

__global__ void AddTo(unsigned char* bytes, size_t count, size_t stride, unsigned char what) {
  const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * stride;
  if (i < count) bytes[i] += what;
}

std::mt19937 random_numbers;
unsigned Random(unsigned below) { return random_numbers() % below; }

enum class Kind { kPlain, kPool, kMapped };

struct Memory {
  unsigned char* device = nullptr;
  std::string model;
  Kind kind = Kind::kPlain;
};

cudaStream_t stream;

void Fill(Memory* memory) {
  const unsigned seed = random_numbers();
  for (size_t i = 0; i < memory->model.size(); i += 64) memory->model[i] = char(seed + i / 64 * 7);
  CUDA_CHECK(cudaMemcpy(memory->device, memory->model.data(), memory->model.size(), cudaMemcpyHostToDevice));
}

// Physical memory of the program's own; its handle goes, the mapping keeps it.
void Map(Memory* memory, size_t bytes) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemGenericAllocationHandle handle;
  CUdeviceptr address = 0;
  CUmemAccessDesc access = {};
  access.location = prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  APP_CHECK(cuMemCreate(&handle, bytes, &prop, 0) == CUDA_SUCCESS);
  APP_CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0) == CUDA_SUCCESS);
  APP_CHECK(cuMemMap(address, bytes, 0, handle, 0) == CUDA_SUCCESS);
  APP_CHECK(cuMemSetAccess(address, bytes, &access, 1) == CUDA_SUCCESS);
  APP_CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
  memory->device = reinterpret_cast<unsigned char*>(address);
}

void Allocate(Memory* memory) {
  memory->kind = Kind(Random(8) == 0 ? 2 : Random(2));
  size_t bytes = 65536 + Random(3 * kMiB);
  if (memory->kind == Kind::kMapped) bytes = 2 * kMiB;
  void* pointer = nullptr;
  switch (memory->kind) {
    case Kind::kPlain:
      CUDA_CHECK(cudaMalloc(&pointer, bytes));
      break;
    case Kind::kPool:
      CUDA_CHECK(cudaMallocAsync(&pointer, bytes, stream));
      CUDA_CHECK(cudaStreamSynchronize(stream));
      break;
    case Kind::kMapped:
      Map(memory, bytes);
      break;
  }
  if (pointer) memory->device = static_cast<unsigned char*>(pointer);
  CUDA_CHECK(cudaMemset(memory->device, 0, bytes));
  memory->model.assign(bytes, 0);
  Fill(memory);
}

void Free(Memory* memory) {
  switch (memory->kind) {
    case Kind::kPlain:
      CUDA_CHECK(cudaFree(memory->device));
      break;
    case Kind::kPool:
      CUDA_CHECK(cudaFreeAsync(memory->device, stream));
      break;
    case Kind::kMapped: {
      CUDA_CHECK(cudaDeviceSynchronize());
      const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(memory->device);
      APP_CHECK(cuMemUnmap(address, memory->model.size()) == CUDA_SUCCESS);
      APP_CHECK(cuMemAddressFree(address, memory->model.size()) == CUDA_SUCCESS);
      break;
    }
  }
  memory->device = nullptr;
}

void Change(Memory* memory, Memory* other) {
  std::string& model = memory->model;
  const size_t at = Random(unsigned(model.size())), most = model.size() - at;
  switch (Random(4)) {
    case 0: {
      const size_t stride = 1 + Random(2000), threads = std::min<size_t>((most + stride - 1) / stride, 512);
      const unsigned char what = (unsigned char)(1 + Random(255));
      AddTo<<<unsigned((threads + 127) / 128), 128, 0, stream>>>(memory->device + at, std::min(most, threads * stride),
                                                                 stride, what);
      LAUNCH_CHECK();
      for (size_t i = 0; i < std::min(most, threads * stride); i += stride) model[at + i] = char(model[at + i] + what);
      break;
    }
    case 1: {
      const size_t count = std::min<size_t>(most, 1 + Random(300000));
      const int what = int(Random(256));
      CUDA_CHECK(cudaMemsetAsync(memory->device + at, what, count, stream));
      memset(&model[at], what, count);
      break;
    }
    case 2: {
      const size_t count = std::min(most, std::min<size_t>(other->model.size(), 1 + Random(500000)));
      if (memory == other) break;
      CUDA_CHECK(cudaMemcpyAsync(memory->device + at, other->device, count, cudaMemcpyDeviceToDevice, stream));
      memcpy(&model[at], other->model.data(), count);
      break;
    }
    default: {
      const std::string bytes(std::min<size_t>(most, 1 + Random(100000)), char(Random(256)));
      CUDA_CHECK(cudaMemcpy(memory->device + at, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
      memcpy(&model[at], bytes.data(), bytes.size());
      break;
    }
  }
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void Compare(const Memory& memory, app::Digest* digest) {
  std::string found(memory.model.size(), 0);
  CUDA_CHECK(cudaMemcpy(&found[0], memory.device, found.size(), cudaMemcpyDeviceToHost));
  APP_CHECK(found == memory.model);
  digest->Add(found.data(), std::min<size_t>(found.size(), 4096));
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {40, 1});
  random_numbers.seed(4711);
  CUDA_CHECK(cudaStreamCreate(&stream));
  std::vector<Memory> all(kAllocations);
  for (Memory& memory : all) Allocate(&memory);
  Memory still;
  still.model.assign(options.size * 6 * kMiB, 0);
  void* pointer = nullptr;
  CUDA_CHECK(cudaMalloc(&pointer, still.model.size()));
  still.device = static_cast<unsigned char*>(pointer);
  Fill(&still);
  Memory busy;  // all of it, in each step
  busy.model.assign(options.size * 5 * kMiB, 0);
  CUDA_CHECK(cudaMalloc(&pointer, busy.model.size()));
  busy.device = static_cast<unsigned char*>(pointer);
  cudaArray_t array;
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<unsigned char>();
  CUDA_CHECK(cudaMallocArray(&array, &format, kSide, kSide));
  std::string array_model(kSide * kSide, 0), found(kSide * kSide, 0);

  for (int step = 1; step <= options.steps; ++step) {
    app::Digest digest;
    CUDA_CHECK(cudaMemset(busy.device, step, busy.model.size()));
    std::fill(busy.model.begin(), busy.model.end(), char(step));
    std::fill(array_model.begin(), array_model.end(), char(step * 3));
    CUDA_CHECK(cudaMemcpy2DToArray(array, 0, 0, array_model.data(), kSide, kSide, kSide, cudaMemcpyHostToDevice));
    for (int i = 0; i < 12; ++i) Change(&all[Random(kAllocations)], &all[Random(kAllocations)]);
    // The next one of this size often gets the same address.
    Memory* const one = &all[Random(kAllocations)];
    Free(one);
    Allocate(one);
    Compare(all[Random(kAllocations)], &digest);
    Compare(busy, &digest);
    if (step % 8 == 0 || step == options.steps) {
      for (const Memory& memory : all) Compare(memory, &digest);
      Compare(still, &digest);
      CUDA_CHECK(cudaMemcpy2DFromArray(&found[0], kSide, array, 0, 0, kSide, kSide, cudaMemcpyDeviceToHost));
      APP_CHECK(found == array_model);
    }
    printf("step %d: %016" PRIx64 "\n", step, digest.value());
    fflush(stdout);
    app::Step(step);
  }
  return 0;
}
