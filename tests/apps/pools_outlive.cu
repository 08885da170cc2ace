// SPDX-License-Identifier: Apache-2.0
// Memory of pools that was allocated in the stream of a context which is gone: it belongs to the pool, is there until
// it is freed, and then counts as free. Some is in use at each step. With the device's own pool and another one.
//
// NVIDIA's driver 580 crashes in this program now and then, natively (docs/driver-notes.md).
#include <cuda.h>

#include <deque>
#include <vector>

#include "tests/apps/support/driver.h"

namespace {

struct Piece {
  CUdeviceptr address;
  size_t bytes;
  int step;
};

uint64_t Used(CUmemoryPool pool) {
  cuuint64_t used = 0;
  CU_CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
  return used;
}

CUmemoryPool NewPool(CUdevice device) {
  CUmemPoolProps props = {};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  props.location.id = device;
  CUmemoryPool pool;
  CU_CHECK(cuMemPoolCreate(&pool, &props));
  return pool;
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {24, 1});
  CUdevice device;
  CUcontext primary;
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuDevicePrimaryCtxRetain(&primary, device));
  CUmemoryPool pools[2];
  CU_CHECK(cuDeviceGetDefaultMemPool(&pools[0], device));
  pools[1] = NewPool(device);
  std::deque<Piece> pieces[2];
  uint64_t used[2] = {};
  for (int step = 1; step <= options.steps; ++step) {
    if (step % 3 == 1) {
      CUcontext context;
      CUstream stream;
      CU_CHECK(cuCtxCreate(&context, nullptr, 0, device));
      CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
      for (int i = 0; i < 2; ++i) {
        Piece piece{0, size_t(3000 * options.size + step), step};
        CU_CHECK(i == 0 ? cuMemAllocAsync(&piece.address, piece.bytes, stream)
                        : cuMemAllocFromPoolAsync(&piece.address, piece.bytes, pools[i], stream));
        CU_CHECK(cuMemsetD8Async(piece.address, uint8_t(step), piece.bytes, stream));
        pieces[i].push_back(piece);
        used[i] += piece.bytes;
      }
      // Free again before its context goes.
      CUdeviceptr freed;
      CU_CHECK(cuMemAllocFromPoolAsync(&freed, 7000, pools[1], stream));
      CU_CHECK(cuMemFreeAsync(freed, stream));
      CU_CHECK(cuStreamSynchronize(stream));
      CU_CHECK(cuCtxDestroy(context));
    }
    CU_CHECK(cuCtxSetCurrent(primary));
    for (int i = 0; i < 2; ++i) {
      for (const Piece& piece : pieces[i]) {
        std::vector<uint8_t> contents(piece.bytes);
        CU_CHECK(cuMemcpyDtoH(contents.data(), piece.address, piece.bytes));
        APP_CHECK(contents == std::vector<uint8_t>(piece.bytes, uint8_t(piece.step)));
      }
      APP_CHECK(Used(pools[i]) == used[i]);
      while (!pieces[i].empty() && pieces[i].front().step < step - 3) {
        CU_CHECK(cuMemFreeAsync(pieces[i].front().address, nullptr));
        used[i] -= pieces[i].front().bytes;
        pieces[i].pop_front();
      }
      APP_CHECK(Used(pools[i]) == used[i]);
      printf("step %d: used %" PRIu64 "\n", step, Used(pools[i]));
    }
    fflush(stdout);
    app::Step(step);
  }
  return 0;
}
