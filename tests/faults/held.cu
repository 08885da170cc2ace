// SPDX-License-Identifier: Apache-2.0
// GPU work that depends on what the program does next: a lock that holds all CUDA calls back until the GPU is idle
// waits for ever. Every step has such work, and the program asks what a program may ask about it; a wrong answer ends
// it.
//
// Usage: held MODE [--steps N] [--size N]
//   query       a host function waits for a thread that asks for the stream first
//   work        a host function waits for a thread that first puts work into this and other streams
//   value       a stream waits for a value (cuStreamWaitValue32), which another stream writes later
//   poll        a kernel polls pinned memory, which the host writes after some copies
//   poll_copy   a kernel polls device memory, which a later copy in another stream writes
//   sync        one thread waits for the stream (cudaStreamSynchronize), another makes what lets it go on
//   endless     a kernel runs until the file FILE.end exists (FILE: CR_TEST_SYNC_FILE); the program makes no CUDA call
//               before that
//   function    the same with a host function
//   capture     a stream is captured until that file exists
//   busy        the same kernel, and the program goes on with work in another stream
//   destroyed   a stream is destroyed with a host function in it that waits, so that no stream shows the work
#include <cuda.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr int kCount = 1024;

std::atomic<bool> g_released{false};
std::atomic<bool> g_entered{false};

void CUDART_CB Wait(void*) {
  g_entered = true;
  while (!g_released) usleep(200);
}

__global__ void Mix(unsigned* data, unsigned seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) data[i] = data[i] * 1664525u + 1013904223u + seed;
}

__global__ void Await(volatile unsigned* flag, unsigned value, unsigned* data) {
  while (*flag != value) {
  }
  data[0] = data[0] * 3 + value;
}

void MustBeHeld(cudaStream_t stream) {
  const cudaError_t state = cudaStreamQuery(stream);
  if (state != cudaErrorNotReady) app::Fail(__FILE__, __LINE__, "cudaStreamQuery", "the stream is not held");
}

void MustBeDone(cudaStream_t stream) { CUDA_CHECK(cudaStreamQuery(stream)); }

class Held {
 public:
  Held() {
    // Loading a kernel may wait for those that run (CUDA C++ Programming Guide, "Lazy Loading"), and these may wait for
    // calls of ours that come after it.
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, Mix));
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, Await));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&other_, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMalloc(&data_, kCount * sizeof(unsigned)));
    CUDA_CHECK(cudaMemset(data_, 0, kCount * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc(&more_, kCount * sizeof(unsigned)));
    CUDA_CHECK(cudaMemset(more_, 0, kCount * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc(&flag_, sizeof(unsigned)));
    CUDA_CHECK(cudaMemset(flag_, 0, sizeof(unsigned)));
    CUDA_CHECK(cudaHostAlloc(&pinned_, sizeof(unsigned), cudaHostAllocMapped));
    *const_cast<unsigned*>(pinned_) = 0;
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  void Query(int step) {
    Hold(stream_);
    for (int i = 0; i < 5; ++i) {
      usleep(2000);
      MustBeHeld(stream_);
    }
    g_released = true;
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    MustBeDone(stream_);
    Launch(stream_, data_, step);
  }

  void Work(int step) {
    Hold(stream_);
    for (int i = 0; i < 20; ++i) {
      Launch(other_, more_, step + i);
      if (i % 4 == 0) {
        Launch(stream_, data_, step);
        CUDA_CHECK(cudaStreamSynchronize(other_));
      }
      MustBeHeld(stream_);
    }
    g_released = true;
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  void Value(int step) {
    const CUdeviceptr flag = reinterpret_cast<CUdeviceptr>(flag_);
    APP_CHECK(cuStreamWaitValue32(stream_, flag, unsigned(step), CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS);
    Launch(stream_, data_, step);
    for (int i = 0; i < 5; ++i) {
      usleep(2000);
      Launch(other_, more_, step + i);
      MustBeHeld(stream_);
    }
    APP_CHECK(cuStreamWriteValue32(other_, flag, unsigned(step), 0) == CUDA_SUCCESS);
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    MustBeDone(stream_);
  }

  void PollHost(int step) {
    unsigned* device;
    CUDA_CHECK(cudaHostGetDevicePointer(&device, const_cast<unsigned*>(pinned_), 0));
    Await<<<1, 1, 0, stream_>>>(device, unsigned(step), data_);
    LAUNCH_CHECK();
    std::vector<unsigned> values(kCount, unsigned(step));
    for (int i = 0; i < 10; ++i) {
      usleep(1000);
      CUDA_CHECK(cudaMemcpyAsync(more_, values.data(), kCount * sizeof(unsigned), cudaMemcpyHostToDevice, other_));
      Launch(other_, more_, i);
      MustBeHeld(stream_);
    }
    *pinned_ = unsigned(step);
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    CUDA_CHECK(cudaStreamSynchronize(other_));
  }

  void PollCopy(int step) {
    Await<<<1, 1, 0, stream_>>>(flag_, unsigned(step), data_);
    LAUNCH_CHECK();
    for (int i = 0; i < 5; ++i) {
      usleep(2000);
      MustBeHeld(stream_);
    }
    const unsigned value = unsigned(step);
    CUDA_CHECK(cudaMemcpyAsync(flag_, &value, sizeof value, cudaMemcpyHostToDevice, other_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    CUDA_CHECK(cudaStreamSynchronize(other_));
  }

  void Sync(int step) {
    Hold(stream_);
    Launch(stream_, data_, step);
    std::atomic<bool> returned{false};
    std::thread waiting([&] {
      CUDA_CHECK(cudaStreamSynchronize(stream_));
      if (!g_released) app::Fail(__FILE__, __LINE__, "cudaStreamSynchronize", "returned too early");
      returned = true;
    });
    for (int i = 0; i < 5; ++i) {
      usleep(2000);
      MustBeHeld(stream_);
      if (returned) app::Fail(__FILE__, __LINE__, "cudaStreamSynchronize", "returned too early");
      Launch(other_, more_, step + i);
    }
    g_released = true;
    waiting.join();
    MustBeDone(stream_);
    CUDA_CHECK(cudaStreamSynchronize(other_));
  }

  void Endless(int step) {
    if (step == 1) {
      unsigned* device;
      CUDA_CHECK(cudaHostGetDevicePointer(&device, const_cast<unsigned*>(pinned_), 0));
      Await<<<1, 1, 0, stream_>>>(device, 1, data_);
      LAUNCH_CHECK();
      MustBeHeld(stream_);
      SayHeld();
      AwaitEnd();
      MustBeHeld(stream_);
      *pinned_ = 1;
      CUDA_CHECK(cudaStreamSynchronize(stream_));
    }
    Launch(stream_, data_, step);
  }

  void Function(int step) {
    if (step == 1) {
      Hold(stream_);
      MustBeHeld(stream_);
      SayHeld();
      AwaitEnd();
      MustBeHeld(stream_);
      g_released = true;
      CUDA_CHECK(cudaStreamSynchronize(stream_));
    }
    Launch(stream_, data_, step);
  }

  void Capture(int step) {
    if (step == 1) {
      CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
      Launch(stream_, data_, 1);
      SayHeld();
      AwaitEnd();
      Launch(stream_, data_, 2);
      cudaGraph_t graph;
      CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
      size_t nodes = 0;
      CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
      APP_CHECK(nodes == 2);
      CUDA_CHECK(cudaGraphInstantiate(&graph_, graph, 0));
      CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaGraphLaunch(graph_, stream_));
    Launch(other_, more_, step);
  }

  void Busy(int step) {
    if (step == 1) {
      unsigned* device;
      CUDA_CHECK(cudaHostGetDevicePointer(&device, const_cast<unsigned*>(pinned_), 0));
      Await<<<1, 1, 0, stream_>>>(device, 1, data_);
      LAUNCH_CHECK();
    }
    if (Ends()) *pinned_ = 1;
    Launch(other_, more_, step);
    CUDA_CHECK(cudaStreamSynchronize(other_));
  }
  void FinishBusy() {
    AwaitEnd();
    *pinned_ = 1;
  }

  void Destroyed(int step) {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Hold(stream);
    Launch(stream, data_, step);
    CUDA_CHECK(cudaStreamDestroy(stream));
    for (int i = 0; i < 5; ++i) {
      usleep(2000);
      Launch(other_, more_, step + i);
      CUDA_CHECK(cudaStreamSynchronize(other_));
    }
    g_released = true;
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  void Print(int step) {
    unsigned values[2][kCount];
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(values[0], data_, sizeof values[0], cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(values[1], more_, sizeof values[1], cudaMemcpyDeviceToHost));
    app::Digest digest;
    digest.Add(values);
    printf("step %d %016" PRIx64 "\n", step, digest.value());
  }

 private:
  static bool Ends() {
    const char* const file = getenv("CR_TEST_SYNC_FILE");
    return !file || access((std::string(file) + ".end").c_str(), F_OK) == 0;
  }
  // Tells the test that there is work that does not end by itself.
  static void SayHeld() {
    if (const char* const file = getenv("CR_TEST_SYNC_FILE")) app::AppendLine(file, "held", 1);
  }
  static void AwaitEnd() {
    while (!Ends()) usleep(1000);
  }
  static void Launch(cudaStream_t stream, unsigned* data, int seed) {
    Mix<<<kCount / 128, 128, 0, stream>>>(data, unsigned(seed));
    LAUNCH_CHECK();
  }
  static void Hold(cudaStream_t stream) {
    g_released = g_entered = false;
    CUDA_CHECK(cudaLaunchHostFunc(stream, Wait, nullptr));
    while (!g_entered) usleep(100);
  }

  cudaStream_t stream_, other_;
  unsigned *data_, *more_, *flag_;
  volatile unsigned* pinned_;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const struct {
    const char* name;
    void (Held::*run)(int step);
  } modes[] = {{"query", &Held::Query},     {"work", &Held::Work},          {"value", &Held::Value},
               {"poll", &Held::PollHost},   {"poll_copy", &Held::PollCopy}, {"sync", &Held::Sync},
               {"endless", &Held::Endless}, {"function", &Held::Function},  {"capture", &Held::Capture},
               {"busy", &Held::Busy},       {"destroyed", &Held::Destroyed}};
  for (const auto& one : modes) {
    if (mode != one.name) continue;
    const app::Options options = app::Parse(argc - 1, argv + 1, {20, 1});
    Held held;
    for (int step = 1; step <= options.steps; ++step) {
      (held.*one.run)(step);
      if (mode != "busy") held.Print(step);
      app::Step(step);
    }
    if (mode == "busy") {
      held.FinishBusy();
      held.Print(options.steps);
    }
    return 0;
  }
  fprintf(stderr,
          "usage: %s query|work|value|poll|poll_copy|sync|endless|function|capture|busy|destroyed [--steps N]\n",
          argv[0]);
  return 2;
}
