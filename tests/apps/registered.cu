// SPDX-License-Identifier: Apache-2.0
// Registered memory, used by its host pointer in kernels, fills and copies: memory of malloc in two registrations that
// meet in the middle of a page, shared memory, private and shared mappings of files, locked memory, a thread's stack,
// memory that kernels may only read. Asynchronous copies stand behind a host function that ends only after the program
// has made the call. Registrations come and go, also while work is queued; children made by fork have their own copy.
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/apps/support/app.h"

__global__ void Advance(unsigned* data, int n, unsigned step) {
  int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < n) data[i] = data[i] * 5 + step + i;
}

__global__ void AddTo(unsigned* sums, const unsigned* data, int n) {
  int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < n) sums[i] += data[i];
}

// Memory that is registered, and what it should hold.
struct Memory {
  unsigned* data;
  std::vector<unsigned> expected;
};

std::atomic<bool> go{false};
void CUDART_CB WaitToGo(void*) {
  while (!go) std::this_thread::yield();
}

void* Map(size_t bytes, int flags, int fd) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  APP_CHECK(memory != MAP_FAILED);
  return memory;
}

int File(size_t bytes) {
  const int fd = memfd_create("registered", 0);
  APP_CHECK(fd >= 0 && ftruncate(fd, bytes) == 0);
  return fd;
}

// A thread that has memory on its stack, until this object ends.
class StackMemory {
 public:
  static constexpr int kWords = 3000;
  StackMemory() {
    thread_ = std::thread([this] {
      unsigned words[kWords];
      std::unique_lock<std::mutex> lock(mutex_);
      words_ = words;
      changed_.notify_all();
      changed_.wait(lock, [this] { return ends_; });
    });
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return words_ != nullptr; });
  }
  ~StackMemory() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  unsigned* words() { return words_; }

 private:
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned* words_ = nullptr;
  bool ends_ = false;
};

void Register(unsigned* data, size_t bytes, unsigned flags = cudaHostRegisterDefault) {
  CUDA_CHECK(cudaHostRegister(data, bytes, flags));
  unsigned* device;
  CUDA_CHECK(cudaHostGetDevicePointer(&device, data + 1, 0));
  APP_CHECK(device == data + 1);
}

// A child sees what was there, and changes nothing here.
void Fork(const std::vector<Memory>& memories) {
  const pid_t child = fork();
  APP_CHECK(child >= 0);
  if (child == 0) {
    bool right = true;
    for (const Memory& memory : memories) {
      const size_t bytes = memory.expected.size() * sizeof(unsigned);
      right = right && memcmp(memory.data, memory.expected.data(), bytes) == 0;
    }
    memset(memories[0].data, 0xee, 100);
    _exit(right ? 0 : 1);
  }
  int status = 0;
  APP_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {15, StackMemory::kWords});
  const int n = options.size < StackMemory::kWords ? options.size : StackMemory::kWords, blocks = (n + 127) / 128;
  const size_t bytes = n * sizeof(unsigned);
  int can_use = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&can_use, cudaDevAttrCanUseHostPointerForRegisteredMem, 0));
  APP_CHECK(can_use == 1);
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  unsigned *device, *sums;
  CUDA_CHECK(cudaMalloc(&device, bytes));
  CUDA_CHECK(cudaMalloc(&sums, bytes));
  CUDA_CHECK(cudaMemset(sums, 0, bytes));
  CUDA_CHECK(cudaDeviceSynchronize());

  // The first two meet in the middle of a page, and neither begins or ends at the border of one.
  std::vector<unsigned> heap(2 * n + 20, 7);
  std::vector<unsigned*> places = {heap.data() + 9, heap.data() + 9 + n};
  const int file = File(bytes), private_file = File(bytes);
  places.push_back(static_cast<unsigned*>(Map(bytes, MAP_SHARED | MAP_ANONYMOUS, -1)));
  places.push_back(static_cast<unsigned*>(Map(bytes, MAP_SHARED, file)));
  places.push_back(static_cast<unsigned*>(Map(bytes, MAP_PRIVATE, private_file)));
  places.push_back(static_cast<unsigned*>(Map(bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1)));
  StackMemory stack;
  places.push_back(stack.words());
  close(file);
  close(private_file);
  std::vector<Memory> memories;
  for (unsigned* const place : places) {
    Memory memory = {place, std::vector<unsigned>(n)};
    for (int i = 0; i < n; ++i) place[i] = memory.expected[i] = i * 3u + memories.size();
    Register(place, bytes);
    memories.push_back(memory);
  }
  // What the server may have to read only.
  int read_only = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&read_only, cudaDevAttrHostRegisterReadOnlySupported, 0));
  unsigned* const constants = static_cast<unsigned*>(Map(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1));
  for (int i = 0; i < n; ++i) constants[i] = i ^ 0x1234u;
  if (read_only) APP_CHECK(mprotect(constants, bytes, PROT_READ) == 0);
  Register(constants, bytes, read_only ? cudaHostRegisterReadOnly : cudaHostRegisterDefault);

  app::Digest digest;
  for (int step = 1; step <= options.steps; ++step) {
    for (Memory& memory : memories) {
      std::vector<unsigned>& expected = memory.expected;
      memory.data[(step * 7) % n] += step;
      expected[(step * 7) % n] += step;
      CUDA_CHECK(cudaMemsetAsync(memory.data + 16, step, 64, stream));
      Advance<<<blocks, 128, 0, stream>>>(memory.data, n, step);
      LAUNCH_CHECK();
      for (int i = 16; i < 32; ++i) expected[i] = 0x01010101u * step;
      for (int i = 0; i < n; ++i) expected[i] = expected[i] * 5 + step + i;
    }
    AddTo<<<blocks, 128, 0, stream>>>(sums, constants, n);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (const Memory& memory : memories) APP_CHECK(memcmp(memory.data, memory.expected.data(), bytes) == 0);

    // Copies that the program does not wait for: it could not.
    go = false;
    CUDA_CHECK(cudaLaunchHostFunc(stream, WaitToGo, nullptr));
    for (Memory& memory : memories) {
      CUDA_CHECK(cudaMemcpyAsync(device, memory.data, bytes, cudaMemcpyHostToDevice, stream));
      CUDA_CHECK(cudaMemsetAsync(device + 40, step, 80, stream));
      CUDA_CHECK(cudaMemcpyAsync(memory.data, device, bytes, cudaMemcpyDefault, stream));
      for (int i = 40; i < 60; ++i) memory.expected[i] = 0x01010101u * step;
    }
    go = true;
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (const Memory& memory : memories) {
      APP_CHECK(memcmp(memory.data, memory.expected.data(), bytes) == 0);
      digest.Add(memory.data, bytes);
    }
    APP_CHECK(heap[8] == 7 && heap[9 + 2 * n] == 7);

    // One of two that share a page goes while work that uses it is queued, and comes again; what is beside it changes
    // meanwhile.
    Memory& gone = memories[step % 2];
    Advance<<<blocks, 128, 0, stream>>>(gone.data, n, 1);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaHostUnregister(gone.data));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < n; ++i) gone.expected[i] = gone.expected[i] * 5 + 1 + i;
    APP_CHECK(memcmp(gone.data, gone.expected.data(), bytes) == 0);
    cudaPointerAttributes facts;
    CUDA_CHECK(cudaPointerGetAttributes(&facts, gone.data));
    APP_CHECK(facts.type == cudaMemoryTypeUnregistered);
    for (int i = 0; i < n; ++i) gone.data[i] ^= gone.expected[i] ^ (gone.expected[i] + 3);
    for (unsigned& word : gone.expected) word += 3;
    Memory& stays = memories[1 - step % 2];
    Advance<<<blocks, 128, 0, stream>>>(stays.data, n, 2);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < n; ++i) stays.expected[i] = stays.expected[i] * 5 + 2 + i;
    APP_CHECK(memcmp(stays.data, stays.expected.data(), bytes) == 0);
    APP_CHECK(memcmp(gone.data, gone.expected.data(), bytes) == 0);
    Register(gone.data, bytes);
    if (step % 4 == 1) Fork(memories);
    app::Step(step);
  }
  std::vector<unsigned> added(n);
  CUDA_CHECK(cudaMemcpy(added.data(), sums, bytes, cudaMemcpyDeviceToHost));
  for (int i = 0; i < n; ++i) APP_CHECK(added[i] == options.steps * (i ^ 0x1234u));
  printf("registered n=%d steps=%d digest=%016" PRIx64 "\n", n, options.steps, digest.value());
  for (const Memory& memory : memories) {
    CUDA_CHECK(cudaHostUnregister(memory.data));
    APP_CHECK(memcmp(memory.data, memory.expected.data(), bytes) == 0);
  }
  CUDA_CHECK(cudaHostUnregister(constants));
  APP_CHECK(constants[n - 1] == (unsigned(n - 1) ^ 0x1234u));
  CUDA_CHECK(cudaFree(device));
  CUDA_CHECK(cudaFree(sums));
  CUDA_CHECK(cudaStreamDestroy(stream));
  return 0;
}
