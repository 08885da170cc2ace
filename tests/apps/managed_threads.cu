// SPDX-License-Identifier: Apache-2.0
// Managed memory and threads: host threads change memory of their own, attached to the host or to an idle stream,
// without a pause, while others launch kernels that use other memory of the same pages' neighbourhood. Nothing may be
// lost. Also what the library itself reads and writes in managed memory: arguments of kernels, symbols, results of
// calls, and what pageable copies of several lines touch. A child made by fork, which leaves its parent's memory alone.
// Threads that wait for the same kernel and go on, each at once, with their parts of its results; and long memory that
// the host goes through from one end to the other.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr int kThreads = 3;
constexpr unsigned kRounds = 40;

__device__ unsigned g_symbol[64];

__global__ void Advance(unsigned* words, unsigned count, unsigned step) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    words[i] = words[i] * 3 + step + i;
  }
}

struct Arguments {
  unsigned factor[100];
};

__global__ void Multiply(unsigned* words, unsigned count, Arguments arguments) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) words[i] *= arguments.factor[i % 100];
}

__global__ void ReadSymbol(unsigned* words) { words[threadIdx.x] += g_symbol[threadIdx.x]; }

// Kernels of all streams and the counters of all threads, in memory of 4096 bytes each that lies side by side.
void Concurrent(int step, app::Digest* digest) {
  constexpr unsigned kWords = 1024;
  struct Side {
    unsigned* host;    // a thread's own
    unsigned* shared;  // a stream's kernels', and its thread's
    cudaStream_t stream;
  };
  std::vector<Side> sides(kThreads);
  unsigned* global;
  CUDA_CHECK(cudaMallocManaged(&global, kWords * sizeof(unsigned)));
  for (Side& side : sides) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMallocManaged(&side.host, kWords * sizeof(unsigned), cudaMemAttachHost));
    CUDA_CHECK(cudaMallocManaged(&side.shared, kWords * sizeof(unsigned), cudaMemAttachHost));
    memset(side.host, 0, kWords * sizeof(unsigned));  // new memory is not cleared
    for (unsigned i = 0; i < kWords; ++i) side.shared[i] = i;
    CUDA_CHECK(cudaStreamAttachMemAsync(side.stream, side.shared));
    CUDA_CHECK(cudaStreamSynchronize(side.stream));
  }
  for (unsigned i = 0; i < kWords; ++i) global[i] = i;
  std::atomic<bool> stop{false};
  std::vector<unsigned> counts(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    // Counts in its own memory, never stopping for the GPU.
    threads.emplace_back([&, t] {
      unsigned count = 0;
      while (!stop.load() || count < 1000) {
        ++sides[t].host[(count * 7 + t) % kWords];
        ++count;
        if (count % 64 == 0) usleep(50);
      }
      counts[t] = count;
    });
  }
  std::vector<std::thread> users;
  for (int t = 0; t < kThreads; ++t) {
    // Works in turn with the kernels of its own stream, as memory attached to a stream allows.
    users.emplace_back([&, t] {
      for (unsigned round = 0; round < kRounds; ++round) {
        Advance<<<2, 64, 0, sides[t].stream>>>(sides[t].shared, kWords, round);
        LAUNCH_CHECK();
        CUDA_CHECK(cudaStreamSynchronize(sides[t].stream));
        for (unsigned i = round % 5; i < kWords; i += 5) sides[t].shared[i] ^= round + t;
      }
    });
  }
  for (unsigned round = 0; round < kRounds; ++round) Advance<<<2, 64>>>(global, kWords, round);
  LAUNCH_CHECK();
  for (std::thread& user : users) user.join();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  CUDA_CHECK(cudaDeviceSynchronize());

  for (unsigned i = 0; i < kWords; ++i) {
    unsigned expected = i;
    for (unsigned round = 0; round < kRounds; ++round) expected = expected * 3 + round + i;
    APP_CHECK(global[i] == expected);
  }
  for (int t = 0; t < kThreads; ++t) {
    std::vector<unsigned> expected(kWords);
    for (unsigned count = 0; count < counts[t]; ++count) ++expected[(count * 7 + t) % kWords];
    APP_CHECK(memcmp(sides[t].host, expected.data(), kWords * sizeof(unsigned)) == 0);
    for (unsigned i = 0; i < kWords; ++i) expected[i] = i;
    for (unsigned round = 0; round < kRounds; ++round) {
      for (unsigned i = 0; i < kWords; ++i) expected[i] = expected[i] * 3 + round + i;
      for (unsigned i = round % 5; i < kWords; i += 5) expected[i] ^= round + t;
    }
    APP_CHECK(memcmp(sides[t].shared, expected.data(), kWords * sizeof(unsigned)) == 0);
    digest->Add(sides[t].shared, kWords * sizeof(unsigned));
    CUDA_CHECK(cudaFree(sides[t].host));
    CUDA_CHECK(cudaFree(sides[t].shared));
    CUDA_CHECK(cudaStreamDestroy(sides[t].stream));
  }
  CUDA_CHECK(cudaFree(global));
  digest->Add(step);
}

// The GPU has all of it when the library comes to read or write there.
struct Block {
  Arguments arguments;
  unsigned* pointer;
  size_t pitch;
  cudaStream_t stream;
  cudaPointerAttributes attributes;
  unsigned words[2000];
};

void LibraryAccesses(int step, app::Digest* digest) {
  Block* block;
  unsigned* other;
  CUDA_CHECK(cudaMallocManaged(&block, sizeof(Block)));
  CUDA_CHECK(cudaMallocManaged(&other, 1 << 20));
  memset(other, 0, 1 << 20);
  const auto to_gpu = [&] {
    Advance<<<1, 32>>>(other, 16, 0);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaDeviceSynchronize());
  };
  for (unsigned i = 0; i < 100; ++i) block->arguments.factor[i] = i + unsigned(step);
  for (unsigned i = 0; i < 2000; ++i) block->words[i] = i;
  to_gpu();
  // Results of calls.
  CUDA_CHECK(cudaMallocPitch(&block->pointer, &block->pitch, 1000, 3));
  to_gpu();
  CUDA_CHECK(cudaStreamCreate(&block->stream));
  to_gpu();
  CUDA_CHECK(cudaPointerGetAttributes(&block->attributes, block));
  APP_CHECK(block->attributes.type == cudaMemoryTypeManaged);
  // A kernel's arguments.
  to_gpu();
  unsigned* words = block->words;
  unsigned count = 2000;
  void* list[] = {&words, &count, &block->arguments};
  CUDA_CHECK(cudaLaunchKernel((const void*)&Multiply, dim3(1), dim3(64), list, 0, nullptr));
  CUDA_CHECK(cudaDeviceSynchronize());
  for (unsigned i = 0; i < 2000; ++i) APP_CHECK(block->words[i] == i * (i % 100 + unsigned(step)));
  // Symbols, and copies of several lines, both ways.
  to_gpu();
  CUDA_CHECK(cudaMemcpyToSymbol(g_symbol, block->words, sizeof(g_symbol)));
  ReadSymbol<<<1, 64>>>(block->words);
  to_gpu();
  CUDA_CHECK(cudaMemcpyFromSymbol(block->words + 64, g_symbol, sizeof(g_symbol)));
  // Copies between the GPU's memories, as which managed memory may count, have not ended when the call returns.
  CUDA_CHECK(cudaDeviceSynchronize());
  for (unsigned i = 0; i < 64; ++i) {
    APP_CHECK(block->words[64 + i] == i * (i % 100 + unsigned(step)) && block->words[i] == 2 * block->words[64 + i]);
  }
  to_gpu();
  CUDA_CHECK(cudaMemcpy2D(block->pointer, block->pitch, block->words, 1000, 1000, 3, cudaMemcpyDefault));
  to_gpu();
  CUDA_CHECK(cudaMemcpy2D(other, 1200, block->pointer, block->pitch, 1000, 3, cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaDeviceSynchronize());
  for (int line = 0; line < 3; ++line) {
    APP_CHECK(memcmp(reinterpret_cast<char*>(other) + 1200 * line, reinterpret_cast<char*>(block->words) + 1000 * line,
                     1000) == 0);
  }
  digest->Add(block->words, sizeof(block->words));
  CUDA_CHECK(cudaStreamDestroy(block->stream));
  CUDA_CHECK(cudaFree(block->pointer));
  CUDA_CHECK(cudaFree(block));
  CUDA_CHECK(cudaFree(other));
}

// A barrier for all of `threads`.
class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned turn = turn_;
    if (++here_ == threads_) {
      here_ = 0;
      ++turn_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return turn_ != turn; });
    }
  }

 private:
  const int threads_;
  std::mutex mutex_;
  std::condition_variable all_;
  int here_ = 0;
  unsigned turn_ = 0;
};

// The same few pages in turn, so that they come with the answers to the threads' waits.
void Together(int step, app::Digest* digest) {
  constexpr unsigned kWords = 2048;
  constexpr unsigned kTurns = 60;
  unsigned* words;
  CUDA_CHECK(cudaMallocManaged(&words, kWords * sizeof(unsigned)));
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (unsigned i = 0; i < kWords; ++i) words[i] = i;
  Meeting meeting(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (unsigned turn = 0; turn < kTurns; ++turn) {
        if (t == 0) {
          Advance<<<2, 64, 0, turn % 2 ? stream : nullptr>>>(words, kWords, turn);
          LAUNCH_CHECK();
        }
        meeting.Wait();
        if (turn % 3 == 0) {
          CUDA_CHECK(cudaStreamSynchronize(turn % 2 ? stream : nullptr));
        } else {
          CUDA_CHECK(cudaDeviceSynchronize());
        }
        for (unsigned i = unsigned(t); i < kWords; i += kThreads) words[i] ^= turn + unsigned(t) * 17;
        meeting.Wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (unsigned i = 0; i < kWords; ++i) {
    unsigned expected = i;
    for (unsigned turn = 0; turn < kTurns; ++turn) expected = (expected * 3 + turn + i) ^ (turn + i % kThreads * 17);
    APP_CHECK(words[i] == expected);
  }
  digest->Add(words, kWords * sizeof(unsigned));
  digest->Add(step);
  CUDA_CHECK(cudaStreamDestroy(stream));
  CUDA_CHECK(cudaFree(words));
}

// All of 12 MiB, or a part that ends anywhere, which the host reads, or writes to here and there, or fills.
void Sequential(int step, app::Digest* digest) {
  constexpr size_t kBytes = 12 << 20, kPart = 1 << 20;
  unsigned char *managed, *device;
  CUDA_CHECK(cudaMallocManaged(&managed, kBytes));
  CUDA_CHECK(cudaMalloc(&device, kBytes));
  std::vector<unsigned char> model(kBytes), copy(kBytes);
  for (int turn = 0; turn < 4; ++turn) {
    for (size_t at = 0; at < kBytes; at += kPart) {
      const int value = int(at / kPart) * 5 + turn + step;
      CUDA_CHECK(cudaMemset(managed + at, value, kPart));
      memset(&model[at], value, kPart);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    const size_t end = turn == 3 ? kBytes : kBytes - size_t(step % 5) * 1234567 - 1;
    for (size_t at = 0; at < end; at += 512) {
      APP_CHECK(managed[at] == model[at]);
      if (turn == 1 && at % 12288 == 0) model[at] = managed[at] = (unsigned char)(at >> 9);
      if (turn == 2) memset(managed + at, int(at >> 9), 512), memset(&model[at], int(at >> 9), 512);
    }
    CUDA_CHECK(cudaMemcpy(device, managed, kBytes, cudaMemcpyDefault));
    CUDA_CHECK(cudaMemcpy(copy.data(), device, kBytes, cudaMemcpyDeviceToHost));
    APP_CHECK(copy == model);
    APP_CHECK(memcmp(managed, model.data(), kBytes) == 0);
  }
  digest->Add(copy.data(), 4096);
  CUDA_CHECK(cudaFree(device));
  CUDA_CHECK(cudaFree(managed));
}

// A thread frees memory that it has just written to, while another starts work, before which it is handed over.
void Frees() {
  constexpr size_t kBytes = 65 << 20;  // too long for the library to keep
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    for (int turn = 0; turn < 3; ++turn) {
      unsigned char* managed;
      CUDA_CHECK(cudaMallocManaged(&managed, kBytes, cudaMemAttachHost));
      managed[turn * 4096] = 1;
      CUDA_CHECK(cudaFree(managed));
    }
    stop = true;
  });
  unsigned* device;
  CUDA_CHECK(cudaMalloc(&device, 64));
  while (!stop.load()) {
    Advance<<<1, 1>>>(device, 1, 1);
    LAUNCH_CHECK();
    // A free waits for what is queued.
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  thread.join();
  CUDA_CHECK(cudaFree(device));
}

void Fork(unsigned* words, unsigned count) {
  fflush(stdout);
  const pid_t child = fork();
  APP_CHECK(child >= 0);
  if (child == 0) _exit(7);
  for (unsigned i = 0; i < count; ++i) words[i] += 5;
  int status;
  APP_CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
  Advance<<<2, 64>>>(words, count, 1);
  LAUNCH_CHECK();
  CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {12, 3000});
  const unsigned count = unsigned(options.size);
  unsigned* words;
  CUDA_CHECK(cudaMallocManaged(&words, count * sizeof(unsigned)));
  memset(words, 0, count * sizeof(unsigned));
  std::vector<unsigned> expected(count);
  app::Digest digest;
  for (int step = 0; step < options.steps; ++step) {
    Concurrent(step, &digest);
    LibraryAccesses(step, &digest);
    Together(step, &digest);
    if (step % 2 == 0) Sequential(step, &digest);
    if (step % 4 == 0) Frees();
    Fork(words, count);
    for (unsigned i = 0; i < count; ++i) expected[i] = (expected[i] + 5) * 3 + 1 + i;
    APP_CHECK(memcmp(words, expected.data(), count * sizeof(unsigned)) == 0);
    printf("step %d digest %016llx\n", step, (unsigned long long)digest.value());
    fflush(stdout);
    app::Step(step);
  }
  CUDA_CHECK(cudaFree(words));
  return 0;
}
