// SPDX-License-Identifier: Apache-2.0
// Several GPUs in one process: each computes on what its neighbour has made, which reaches it by a copy between
// devices, and by loads through the neighbour's own addresses where the two can do that. With one GPU it is its own
// neighbour. Who may reach mapped memory and pools is set in several calls, whose sets of GPUs overlap.
#include <vector>

#include "tests/apps/support/driver.h"

constexpr int kMost = 4;

__global__ void Step(unsigned* own, const unsigned* left, const unsigned* right, int n, unsigned salt) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) own[i] = own[i] * 1664525u + (left[i] ^ (right[n - 1 - i] >> 3)) + salt;
}

__global__ void Fill(unsigned* own, int n, unsigned seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) own[i] = seed + unsigned(i) * 2654435761u;
}

struct Device {
  cudaStream_t stream;
  cudaEvent_t computed, copied;
  unsigned *own, *copy, *plane;
  bool reaches_next = false;
};

// Mapped memory and a pool of the first GPU's that the last one reaches, too. What was set last counts for each GPU by
// itself.
struct Rights {
  int last = 0;
  CUdeviceptr at = 0;
  size_t bytes = 0;
  cudaMemPool_t pool = nullptr;

  void Make(int count) {
    int can = 0;
    if (count > 1) CUDA_CHECK(cudaDeviceCanAccessPeer(&can, count - 1, 0));
    if (!can) return;
    last = count - 1;
    CUDA_CHECK(cudaSetDevice(0));
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemGenericAllocationHandle handle;
    CU_CHECK(cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    CU_CHECK(cuMemAddressReserve(&at, bytes, 0, 0, 0));
    CU_CHECK(cuMemCreate(&handle, bytes, &prop, 0));
    CU_CHECK(cuMemMap(at, bytes, 0, handle, 0));
    CU_CHECK(cuMemRelease(handle));
    CUmemAccessDesc both[2] = {};
    both[0].location = both[1].location = prop.location;
    both[1].location.id = last;
    both[0].flags = both[1].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CU_CHECK(cuMemSetAccess(at, bytes, both, 2));
    CU_CHECK(cuMemSetAccess(at, bytes, both, 1));
    cudaMemPoolProps of = {};
    of.allocType = cudaMemAllocationTypePinned;
    of.location.type = cudaMemLocationTypeDevice;
    CUDA_CHECK(cudaMemPoolCreate(&pool, &of));
    for (int device : {last, 0}) {
      cudaMemAccessDesc one = {};
      one.location = of.location;
      one.location.id = device;
      one.flags = cudaMemAccessFlagsProtReadWrite;
      CUDA_CHECK(cudaMemPoolSetAccess(pool, &one, 1));
    }
  }
  void Check() const {
    for (int device : {0, last}) {
      if (!last) return;
      CUmemLocation place = {};
      place.type = CU_MEM_LOCATION_TYPE_DEVICE;
      place.id = device;
      unsigned long long flags = 0;
      CU_CHECK(cuMemGetAccess(&flags, &place, at));
      APP_CHECK(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
      cudaMemLocation location = {};
      location.type = cudaMemLocationTypeDevice;
      location.id = device;
      cudaMemAccessFlags rights = cudaMemAccessFlagsProtNone;
      CUDA_CHECK(cudaMemPoolGetAccess(&rights, pool, &location));
      APP_CHECK(rights == cudaMemAccessFlagsProtReadWrite);
    }
  }
  void End() {
    if (!last) return;
    CU_CHECK(cuMemUnmap(at, bytes));
    CU_CHECK(cuMemAddressFree(at, bytes));
    CUDA_CHECK(cudaMemPoolDestroy(pool));
  }
};

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {20, 1 << 16});
  const int n = options.size, blocks = (n + 255) / 256;
  const size_t bytes = size_t(n) * sizeof(unsigned);
  int count = 0;
  CUDA_CHECK(cudaGetDeviceCount(&count));
  if (count > kMost) count = kMost;
  std::vector<Device> devices(count);
  for (int d = 0; d < count; ++d) {
    Device& device = devices[d];
    CUDA_CHECK(cudaSetDevice(d));
    CUDA_CHECK(cudaStreamCreateWithFlags(&device.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&device.computed, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&device.copied, cudaEventDisableTiming));
    CUDA_CHECK(cudaMalloc(&device.own, bytes));
    CUDA_CHECK(cudaMalloc(&device.copy, bytes));
    CUDA_CHECK(cudaMalloc(&device.plane, bytes));
    const int next = (d + 1) % count;
    if (next != d) {
      int can = 0;
      CUDA_CHECK(cudaDeviceCanAccessPeer(&can, d, next));
      if (can) {
        CUDA_CHECK(cudaDeviceEnablePeerAccess(next, 0));
        APP_CHECK(cudaDeviceEnablePeerAccess(next, 0) == cudaErrorPeerAccessAlreadyEnabled);
        APP_CHECK(cudaGetLastError() == cudaErrorPeerAccessAlreadyEnabled);
        device.reaches_next = true;
      }
    }
    Fill<<<blocks, 256, 0, device.stream>>>(device.own, n, 1000u + unsigned(d));
    LAUNCH_CHECK();
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
    cudaPointerAttributes attributes;
    CUDA_CHECK(cudaPointerGetAttributes(&attributes, device.own));
    APP_CHECK(attributes.device == d && attributes.type == cudaMemoryTypeDevice);
  }

  Rights rights;
  rights.Make(count);
  std::vector<unsigned> host(n);
  for (int step = 1; step <= options.steps; ++step) {
    rights.Check();
    // Access that was given back, and given once more.
    for (int d = 0; d < count; ++d) {
      if (!devices[d].reaches_next || step % 4) continue;
      CUDA_CHECK(cudaSetDevice(d));
      CUDA_CHECK(cudaDeviceDisablePeerAccess((d + 1) % count));
      CUDA_CHECK(cudaDeviceEnablePeerAccess((d + 1) % count, 0));
    }
    // Everybody takes a copy of both neighbours before anybody computes.
    for (int d = 0; d < count; ++d) {
      Device& device = devices[d];
      const int before = (d + count - 1) % count, next = (d + 1) % count;
      CUDA_CHECK(cudaSetDevice(d));
      CUDA_CHECK(cudaMemcpyPeerAsync(device.copy, d, devices[before].own, before, bytes, device.stream));
      // By the addresses alone, or as a copy between devices that the whole of both waits for.
      if (step % 2) {
        CUDA_CHECK(cudaMemcpyAsync(device.plane, devices[next].own, bytes, cudaMemcpyDefault, device.stream));
      } else {
        CUDA_CHECK(cudaMemcpyPeer(device.plane, d, devices[next].own, next, bytes));
        CUDA_CHECK(cudaStreamSynchronize(nullptr));  // for the others' streams, which do not wait for the null stream
      }
      CUDA_CHECK(cudaEventRecord(device.copied, device.stream));
    }
    for (int d = 0; d < count; ++d) {
      Device& device = devices[d];
      CUDA_CHECK(cudaSetDevice(d));
      // Events of other devices' streams.
      for (const Device& other : devices) CUDA_CHECK(cudaStreamWaitEvent(device.stream, other.copied, 0));
      Step<<<blocks, 256, 0, device.stream>>>(device.own, device.copy, device.plane, n, unsigned(step));
      LAUNCH_CHECK();
      CUDA_CHECK(cudaEventRecord(device.computed, device.stream));
    }
    // One after the other, so that what is read through a neighbour's addresses is always its new state.
    for (int d = 0; d < count; ++d) {
      Device& device = devices[d];
      const Device& next = devices[(d + 1) % count];
      CUDA_CHECK(cudaSetDevice(d));
      CUDA_CHECK(cudaStreamWaitEvent(device.stream, next.computed, 0));
      const unsigned* plane = next.own;
      if (!device.reaches_next) {
        CUDA_CHECK(cudaMemcpyPeerAsync(device.plane, d, next.own, (d + 1) % count, bytes, device.stream));
        plane = device.plane;
      }
      Step<<<blocks, 256, 0, device.stream>>>(device.own, device.copy, plane, n, 77u);
      LAUNCH_CHECK();
      CUDA_CHECK(cudaEventRecord(device.computed, device.stream));
      CUDA_CHECK(cudaStreamSynchronize(device.stream));
    }
    app::Digest digest;
    for (int d = 0; d < count; ++d) {
      CUDA_CHECK(cudaMemcpy(host.data(), devices[d].own, bytes, cudaMemcpyDeviceToHost));
      digest.Add(host.data(), bytes);
    }
    printf("step %d: %016" PRIx64 "\n", step, digest.value());
    fflush(stdout);
    app::Step(step);
  }
  for (int d = 0; d < count; ++d) {
    Device& device = devices[d];
    CUDA_CHECK(cudaSetDevice(d));
    if (device.reaches_next) CUDA_CHECK(cudaDeviceDisablePeerAccess((d + 1) % count));
    CUDA_CHECK(cudaEventDestroy(device.computed));
    CUDA_CHECK(cudaEventDestroy(device.copied));
    CUDA_CHECK(cudaStreamDestroy(device.stream));
    CUDA_CHECK(cudaFree(device.own));
    CUDA_CHECK(cudaFree(device.copy));
    CUDA_CHECK(cudaFree(device.plane));
  }
  rights.End();
  printf("peers devices=%d steps=%d\n", count, options.steps);
  return 0;
}
