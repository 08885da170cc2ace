// SPDX-License-Identifier: Apache-2.0
// The program's own virtual memory, as allocators with growing segments use it: one large reservation in which pieces
// of physical memory come and go at its end and in its middle, the same piece mapped at two addresses, handles that are
// released while mapped and retained again by address, access rights set over several mappings at once. Kernels run
// over the seams, and pointers into it are kept in device memory. With two GPUs, the other one has a piece that only it
// reaches.
#include <cuda.h>

#include <deque>
#include <vector>

#include "tests/apps/support/driver.h"

__device__ unsigned* segment;  // where the reservation begins

// Every word of [first, first + count) in the segment.
__global__ void Work(size_t first, size_t count, unsigned stride, unsigned step) {
  for (size_t i = threadIdx.x + size_t(blockIdx.x) * blockDim.x; i * stride < count;
       i += size_t(blockDim.x) * gridDim.x) {
    segment[first + i * stride] = segment[first + i * stride] * 3u + step + unsigned(i);
  }
}

// Memory of the last GPU's own, if there are several: mapped for that one alone. The first is current again afterwards.
struct Far {
  int device = 0;
  CUdeviceptr at = 0;
  size_t bytes = 0;
  unsigned model = 0;

  void Make() {
    int count = 0;
    CUDA_CHECK(cudaGetDeviceCount(&count));
    device = count - 1;
    if (device == 0) return;
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    CUmemAccessDesc access = {};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUmemGenericAllocationHandle handle;
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaFree(nullptr));
    CU_CHECK(cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    CU_CHECK(cuMemAddressReserve(&at, bytes, 0, 0, 0));
    CU_CHECK(cuMemCreate(&handle, bytes, &prop, 0));
    CU_CHECK(cuMemMap(at, bytes, 0, handle, 0));
    CU_CHECK(cuMemSetAccess(at, bytes, &access, 1));
    CU_CHECK(cuMemRelease(handle));
    CU_CHECK(cuMemcpyHtoD(at, &model, sizeof(model)));
    CUDA_CHECK(cudaSetDevice(0));
  }
  void Step(unsigned step) {
    if (device == 0) return;
    CUDA_CHECK(cudaSetDevice(device));
    unsigned got = ~model;
    CU_CHECK(cuMemcpyDtoH(&got, at, sizeof(got)));
    APP_CHECK(got == model);
    model = model * 5 + step;
    CU_CHECK(cuMemcpyHtoD(at, &model, sizeof(model)));
    CUDA_CHECK(cudaSetDevice(0));
  }
  void End() {
    if (device == 0) return;
    CU_CHECK(cuMemUnmap(at, bytes));
    CU_CHECK(cuMemAddressFree(at, bytes));
  }
};

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {14, 4});
  const int most = options.size + 1;
  CUDA_CHECK(cudaFree(nullptr));
  int device;
  CUDA_CHECK(cudaGetDevice(&device));
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  size_t piece = 0;
  CU_CHECK(cuMemGetAllocationGranularity(&piece, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  const size_t words = piece / sizeof(unsigned);
  CUmemAccessDesc access = {};
  access.location = prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

  CUdeviceptr base = 0, alias = 0;
  CU_CHECK(cuMemAddressReserve(&base, piece * (most + 64), 0, 0, 0));
  CU_CHECK(cuMemAddressReserve(&alias, piece, 0, 0, 0));
  CUDA_CHECK(cudaMemcpyToSymbol(segment, &base, sizeof(base)));
  // Written, then made inaccessible until the end; and mapped, but never made accessible.
  CUdeviceptr closed = 0;
  CUmemGenericAllocationHandle closed_memory[2];
  CU_CHECK(cuMemAddressReserve(&closed, 2 * piece, piece, 0, 0));
  for (int i = 0; i < 2; ++i) {
    CU_CHECK(cuMemCreate(&closed_memory[i], piece, &prop, 0));
    CU_CHECK(cuMemMap(closed + i * piece, piece, 0, closed_memory[i], 0));
  }
  CU_CHECK(cuMemSetAccess(closed, piece, &access, 1));
  CU_CHECK(cuMemsetD32(closed, 0x1234567, words));
  CUDA_CHECK(cudaDeviceSynchronize());
  CUmemAccessDesc none = access;
  none.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  CU_CHECK(cuMemSetAccess(closed, piece, &none, 1));
  Far far;
  far.Make();
  // One word in so many is touched: pieces are large.
  const unsigned stride = 4096;

  // Handles are released at once, as allocators do, except for those of even pieces.
  struct Mapped {
    CUmemGenericAllocationHandle handle;
    bool released;
    std::vector<unsigned> model;
  };
  std::deque<Mapped> pieces;
  const auto grow = [&] {
    Mapped mapped = {};
    const CUdeviceptr at = base + piece * pieces.size();
    CU_CHECK(cuMemCreate(&mapped.handle, piece, &prop, 0));
    CU_CHECK(cuMemMap(at, piece, 0, mapped.handle, 0));
    CU_CHECK(cuMemSetAccess(at, piece, &access, 1));
    mapped.released = pieces.size() % 2 == 1;
    if (mapped.released) CU_CHECK(cuMemRelease(mapped.handle));
    CUDA_CHECK(cudaMemset(reinterpret_cast<void*>(at), 0, piece));
    mapped.model.assign(words / stride, 0);
    pieces.push_back(mapped);
  };
  const auto shrink = [&] {
    const CUdeviceptr at = base + piece * (pieces.size() - 1);
    CU_CHECK(cuMemUnmap(at, piece));
    if (!pieces.back().released) CU_CHECK(cuMemRelease(pieces.back().handle));
    pieces.pop_back();
  };
  grow();
  grow();

  for (int step = 1; step <= options.steps; ++step) {
    if (step % 3 == 0 && int(pieces.size()) < most) grow();
    if (step % 7 == 0 && pieces.size() > 2) shrink();
    far.Step(step);
    const size_t count = words * pieces.size();
    Work<<<2, 64>>>(0, count, stride, step);
    LAUNCH_CHECK();
    unsigned i = 0;
    for (Mapped& mapped : pieces) {
      for (unsigned& word : mapped.model) word = word * 3u + step + i++;
    }

    // A piece whose handle is asked for by its address, mapped a second time elsewhere and changed there.
    const int chosen = step % int(pieces.size());
    CUmemGenericAllocationHandle again = 0;
    CU_CHECK(cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(base + piece * chosen + 4096)));
    CUmemAllocationProp back = {};
    CU_CHECK(cuMemGetAllocationPropertiesFromHandle(&back, again));
    APP_CHECK(back.location.id == device && back.type == CU_MEM_ALLOCATION_TYPE_PINNED);
    CU_CHECK(cuMemMap(alias, piece, 0, again, 0));
    CU_CHECK(cuMemSetAccess(alias, piece, &access, 1));
    CUDA_CHECK(cudaDeviceSynchronize());
    CU_CHECK(cuMemsetD32(alias, 17u * step, 1));
    CUDA_CHECK(cudaDeviceSynchronize());
    pieces[chosen].model[0] = 17u * step;
    // A checkpoint here finds two mappings of one piece; every other time the alias stays over the pause.
    if (step % 2 == 0) app::Step(step);
    CU_CHECK(cuMemUnmap(alias, piece));
    CU_CHECK(cuMemRelease(again));

    unsigned long long sum = 0;
    std::vector<unsigned> got(words);
    for (size_t p = 0; p < pieces.size(); ++p) {
      CUDA_CHECK(cudaMemcpy(got.data(), reinterpret_cast<void*>(base + piece * p), piece, cudaMemcpyDefault));
      for (size_t w = 0; w < pieces[p].model.size(); ++w) {
        if (got[w * stride] != pieces[p].model[w]) app::Fail(__FILE__, __LINE__, "piece", "wrong contents");
        sum = sum * 31 + got[w * stride];
      }
    }
    printf("step %d pieces %d sum %llu\n", step, int(pieces.size()), sum);
    fflush(stdout);
    if (step % 2 == 1) app::Step(step);
  }
  far.End();
  while (!pieces.empty()) shrink();
  std::vector<unsigned> kept(words);
  CU_CHECK(cuMemSetAccess(closed, 2 * piece, &access, 1));
  CUDA_CHECK(cudaMemcpy(kept.data(), reinterpret_cast<void*>(closed), piece, cudaMemcpyDefault));
  APP_CHECK(kept == std::vector<unsigned>(words, 0x1234567));
  CUDA_CHECK(cudaMemset(reinterpret_cast<void*>(closed + piece), 1, piece));
  CUDA_CHECK(cudaDeviceSynchronize());
  CU_CHECK(cuMemUnmap(closed, 2 * piece));
  CU_CHECK(cuMemAddressFree(closed, 2 * piece));
  for (CUmemGenericAllocationHandle memory : closed_memory) CU_CHECK(cuMemRelease(memory));
  CU_CHECK(cuMemAddressFree(base, piece * (most + 64)));
  CU_CHECK(cuMemAddressFree(alias, piece));
  return 0;
}
