// SPDX-License-Identifier: Apache-2.0
// Very many threads wait for the GPU, each for its own stream, and what they wait for comes only after a later wait
// has ended: that of one more thread.
//
// Usage: waits [THREADS (300)]
#include <cuda.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "tests/faults/driver.h"

namespace {

CUcontext g_context;
CUdeviceptr g_words;
std::atomic<int> g_waiting{0};

// What is done when the word is 1.
CUevent When(CUdeviceptr word) {
  CUstream stream;
  CUevent event;
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU_CHECK(cuStreamWaitValue32(stream, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
  CU_CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CU_CHECK(cuEventRecord(event, stream));
  return event;
}

// Waits for it, in each of the ways.
CUstream WaitFor(CUevent event, int way) {
  CUstream stream;
  CU_CHECK(cuCtxSetCurrent(g_context));
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU_CHECK(cuStreamWaitEvent(stream, event, 0));
  ++g_waiting;
  if (way % 3 == 0) CU_CHECK(cuStreamSynchronize(stream));
  if (way % 3 == 1) CU_CHECK(cuEventSynchronize(event));
  if (way % 3 == 2) {
    uint32_t word = 0;
    CU_CHECK(cuMemcpyDtoHAsync(&word, g_words, sizeof(word), stream));
    CU_CHECK(cuStreamSynchronize(stream));
  }
  return stream;
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 300;
  CUdevice device;
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuCtxCreate(&g_context, nullptr, 0, device));
  CU_CHECK(cuMemAlloc(&g_words, 8));
  CU_CHECK(cuMemsetD32(g_words, 0, 2));
  const CUevent last = When(g_words + 4), all = When(g_words);
  std::vector<std::thread> threads;
  const auto all_wait = [&] {
    while (g_waiting < int(threads.size())) usleep(1000);
    usleep(100000);  // until the last one's request has been read; the test needs it only to find something
  };
  for (int i = 0; i < count; ++i) threads.emplace_back([all, i] { WaitFor(all, i); });
  all_wait();
  threads.emplace_back([last] {
    const CUstream stream = WaitFor(last, 0);
    CU_CHECK(cuStreamWriteValue32(stream, g_words, 1, 0));
  });
  all_wait();
  CUstream stream;
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU_CHECK(cuStreamWriteValue32(stream, g_words + 4, 1, 0));
  for (std::thread& thread : threads) thread.join();
  printf("waits ok: %d threads\n", count);
  return 0;
}
