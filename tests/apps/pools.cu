// SPDX-License-Identifier: Apache-2.0
// What memory pools say of themselves: how much is used, to the byte and at once, and its high-water mark; how much is
// reserved, of which only what the documentation promises is looked at. Three pools: the device's own one, one that
// keeps all it has, and one that is the device's current pool half of the time. Memory is carried from step to step,
// and so are the figures.
#include <cuda.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr size_t kMiB = size_t{1} << 20;

uint64_t Get(cudaMemPool_t pool, cudaMemPoolAttr attribute) {
  uint64_t value = 0;
  CUDA_CHECK(cudaMemPoolGetAttribute(pool, attribute, &value));
  return value;
}

// One pool, and what the program itself knows of it.
struct Pool {
  const char* name;
  cudaMemPool_t handle = nullptr;
  uint64_t used = 0, used_high = 0;
  struct Piece {
    void* address;
    size_t bytes;
    int step;
  };
  std::deque<Piece> pieces;

  uint64_t reserved() const { return Get(handle, cudaMemPoolAttrReservedMemCurrent); }

  void Took(void* address, size_t bytes, int step) {
    CUmemoryPool of = nullptr;
    APP_CHECK(cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, CUdeviceptr(address)) == CUDA_SUCCESS);
    APP_CHECK(of == handle);
    pieces.push_back({address, bytes, step});
    used += bytes;
    used_high = std::max(used_high, used);
  }

  void Free(cudaStream_t stream) {
    CUDA_CHECK(cudaFreeAsync(pieces.front().address, stream));
    used -= pieces.front().bytes;
    pieces.pop_front();
  }

  void Check() const {
    APP_CHECK(Get(handle, cudaMemPoolAttrUsedMemCurrent) == used);
    APP_CHECK(Get(handle, cudaMemPoolAttrUsedMemHigh) == used_high);
    const uint64_t high = Get(handle, cudaMemPoolAttrReservedMemHigh);
    APP_CHECK(reserved() >= used && high >= reserved() && high >= used_high);
  }

  void ResetHighs() {
    uint64_t zero = 0, one = 1;
    // No other value may be set, and the current figures not at all.
    APP_CHECK(cudaMemPoolSetAttribute(handle, cudaMemPoolAttrUsedMemHigh, &one) == cudaErrorInvalidValue);
    APP_CHECK(cudaMemPoolSetAttribute(handle, cudaMemPoolAttrReservedMemCurrent, &zero) == cudaErrorInvalidValue);
    cudaGetLastError();
    CUDA_CHECK(cudaMemPoolSetAttribute(handle, cudaMemPoolAttrUsedMemHigh, &zero));
    CUDA_CHECK(cudaMemPoolSetAttribute(handle, cudaMemPoolAttrReservedMemHigh, &zero));
    used_high = used;
    APP_CHECK(Get(handle, cudaMemPoolAttrReservedMemHigh) == reserved());
  }

  void Print(int step) const {
    printf("step %d %s: used %" PRIu64 " high %" PRIu64 "\n", step, name, Get(handle, cudaMemPoolAttrUsedMemCurrent),
           Get(handle, cudaMemPoolAttrUsedMemHigh));
  }
};

cudaMemPool_t NewPool() {
  cudaMemPoolProps props = {};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  cudaMemPool_t pool;
  CUDA_CHECK(cudaMemPoolCreate(&pool, &props));
  return pool;
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {24, 1});
  cudaStream_t stream, other;
  CUDA_CHECK(cudaStreamCreate(&stream));
  CUDA_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));

  Pool own{"own"}, keeper{"keeper"}, current{"current"};
  // Before the pool has been asked for, so that it is known by its device alone.
  void* first = nullptr;
  CUDA_CHECK(cudaMallocAsync(&first, 12345, stream));
  CUDA_CHECK(cudaDeviceGetDefaultMemPool(&own.handle, 0));
  own.Took(first, 12345, 0);
  keeper.handle = NewPool();
  uint64_t all = UINT64_MAX;
  CUDA_CHECK(cudaMemPoolSetAttribute(keeper.handle, cudaMemPoolAttrReleaseThreshold, &all));
  current.handle = NewPool();
  Pool* const pools[] = {&own, &keeper, &current};

  uint64_t kept = 0;  // what `keeper` has reserved, from when it was full until it is trimmed
  for (int step = 1; step <= options.steps; ++step) {
    // What names no pool comes from the device's current one.
    Pool& now = step % 4 < 2 ? own : current;
    CUDA_CHECK(cudaDeviceSetMemPool(0, now.handle));
    for (int i = 0; i < 3; ++i) {
      void* p;
      const size_t bytes = size_t(options.size) * (step % 5 * 1000 + i * 70000 + 1);
      CUDA_CHECK(cudaMallocAsync(&p, bytes, i == 1 ? other : stream));
      now.Took(p, bytes, step);
      CUDA_CHECK(cudaMemsetAsync(p, step, bytes, i == 1 ? other : stream));
      CUDA_CHECK(cudaMallocFromPoolAsync(&p, bytes / 2 + 1, keeper.handle, stream));
      keeper.Took(p, bytes / 2 + 1, step);
    }
    for (Pool* pool : pools) pool->Check();
    CUDA_CHECK(cudaStreamSynchronize(other));

    // A free counts at once, and what it makes free serves the next allocation: neither is used twice.
    for (Pool* pool : pools) {
      while (!pool->pieces.empty() && pool->pieces.front().step < step - 2) pool->Free(stream);
      pool->Check();
    }
    if (step % 6 == 2) {
      void* p;
      for (int i = 0; i < 2; ++i) {
        CUDA_CHECK(cudaMallocFromPoolAsync(&p, 40 * kMiB, keeper.handle, stream));
        keeper.Took(p, 40 * kMiB, step);
        keeper.Check();
        std::rotate(keeper.pieces.begin(), keeper.pieces.end() - 1, keeper.pieces.end());
        keeper.Free(stream);
        keeper.Check();
      }
      // All is kept, whoever waits, until it is trimmed.
      kept = keeper.reserved();
      APP_CHECK(kept >= keeper.used + 40 * kMiB);
    }
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaDeviceSynchronize());
    if (kept != 0) APP_CHECK(keeper.reserved() >= kept);
    if (step % 6 == 4) {
      const uint64_t least = keeper.used + 4 * kMiB, had = keeper.reserved();
      CUDA_CHECK(cudaMemPoolTrimTo(keeper.handle, least));
      APP_CHECK(keeper.reserved() >= std::min(least, had) && keeper.reserved() <= had);
      CUDA_CHECK(cudaMemPoolTrimTo(keeper.handle, 0));
      APP_CHECK(keeper.reserved() >= keeper.used);
      if (kept != 0) APP_CHECK(keeper.reserved() < had);
      kept = 0;
    }

    if (step % 4 == 3) {
      // Without a threshold what is free goes with the next wait.
      void* p;
      CUDA_CHECK(cudaMallocAsync(&p, 50 * kMiB, stream));
      const uint64_t had = current.reserved();
      APP_CHECK(had >= current.used + 50 * kMiB);
      CUDA_CHECK(cudaFreeAsync(p, stream));
      CUDA_CHECK(cudaStreamSynchronize(stream));
      current.used_high = std::max(current.used_high, current.used + 50 * kMiB);
      APP_CHECK(current.reserved() < had);
      // A pool that goes while it is current leaves the device its own one.
      cudaMemPool_t brief = NewPool(), then = nullptr;
      CUDA_CHECK(cudaDeviceSetMemPool(0, brief));
      CUDA_CHECK(cudaMallocAsync(&p, 3000, stream));
      APP_CHECK(Get(brief, cudaMemPoolAttrUsedMemCurrent) == 3000);
      CUDA_CHECK(cudaMemPoolDestroy(brief));
      CUDA_CHECK(cudaDeviceGetMemPool(&then, 0));
      APP_CHECK(then == own.handle);
      void* q;
      CUDA_CHECK(cudaMallocAsync(&q, 4000, stream));
      own.Took(q, 4000, step);
      CUDA_CHECK(cudaFreeAsync(p, stream));
    }
    if (step % 7 == 5) {
      for (Pool* pool : pools) pool->ResetHighs();
    }
    for (Pool* pool : pools) {
      pool->Check();
      pool->Print(step);
    }
    fflush(stdout);
    app::Step(step);
  }

  CUDA_CHECK(cudaDeviceSetMemPool(0, own.handle));
  for (Pool* pool : pools) {
    while (!pool->pieces.empty()) pool->Free(stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaMemPoolTrimTo(pool->handle, 0));
    APP_CHECK(pool->used == 0);
    pool->Check();
    printf("at last %s: high %" PRIu64 "\n", pool->name, Get(pool->handle, cudaMemPoolAttrUsedMemHigh));
    if (pool != &own) CUDA_CHECK(cudaMemPoolDestroy(pool->handle));
  }
  CUDA_CHECK(cudaStreamDestroy(stream));
  CUDA_CHECK(cudaStreamDestroy(other));
  return 0;
}
