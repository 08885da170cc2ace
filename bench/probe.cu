// SPDX-License-Identifier: Apache-2.0
// The parts of the benchmark that a script drives from outside: each command prints one JSON object on a line, then
// does what the script measures. An ordinary CUDA program, run natively and under cuda-remote.
//
// Usage: probe first                         first kernel; "ready_ns" is CLOCK_MONOTONIC when it had run
//        probe idle FILE                     a context, a kernel, then nothing until FILE is gone
//        probe threads N COUNT               N threads launch COUNT kernels each, in streams of their own
//        probe streams N COUNT               one thread launches COUNT kernels, in N streams by turns
//        probe rate FILE SECONDS             launches for so long, once FILE is gone
//        probe allocations N FILE            N live allocations; then until FILE is gone
//        probe modules N SECONDS FILE        N live modules, or as many as can be loaded in SECONDS; then until FILE is
//        gone probe hold MIB FILE                 fills so much GPU memory, waits until FILE is gone, compares
#include <cuda.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

#define CHECK(call)                                                              \
  do {                                                                           \
    cudaError_t check_error = (call);                                            \
    if (check_error != cudaSuccess) {                                            \
      printf("{\"error\": \"%s: %s\"}\n", #call, cudaGetErrorName(check_error)); \
      fflush(stdout);                                                            \
      _exit(1);                                                                  \
    }                                                                            \
  } while (0)

#define CHECK_DRIVER(call)                                                       \
  do {                                                                           \
    CUresult check_result = (call);                                              \
    if (check_result != CUDA_SUCCESS) {                                          \
      const char* check_name = nullptr;                                          \
      driver.get_error_name(check_result, &check_name);                          \
      printf("{\"error\": \"%s: %s\"}\n", #call, check_name ? check_name : "?"); \
      fflush(stdout);                                                            \
      _exit(1);                                                                  \
    }                                                                            \
  } while (0)

__global__ void Nothing() {}

__global__ void Fill(uint64_t* words, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    words[i] = seed + i * 0x9E3779B97F4A7C15ull;
  }
}

__global__ void Compare(const uint64_t* words, size_t count, uint64_t seed, unsigned long long* wrong) {
  unsigned long long mine = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    mine += words[i] != seed + i * 0x9E3779B97F4A7C15ull;
  }
  if (mine) atomicAdd(wrong, mine);
}

const char kModule[] =
    ".version 7.0\n.target sm_52\n.address_size 64\n"
    ".visible .global .align 4 .u32 word = 3;\n"
    ".visible .entry nothing() { ret; }\n";

// The few driver functions that the runtime has no counterpart of, through the runtime: so nothing is linked with the
// driver.
struct {
  CUresult (*load)(CUmodule*, const void*);
  CUresult (*unload)(CUmodule);
  CUresult (*get_error_name)(CUresult, const char**);
} driver;

template <typename F>
void Find(const char* name, F* function) {
  cudaDriverEntryPointQueryResult found;
  CHECK(cudaGetDriverEntryPointByVersion(name, reinterpret_cast<void**>(function), 12000, cudaEnableDefault, &found));
}

uint64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

void Kernel() {
  Nothing<<<1, 1>>>();
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
}

void UntilGone(const char* file) {
  while (access(file, F_OK) == 0) usleep(20000);
}

void Threads(int threads, int count) {
  Kernel();
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<double> issue(threads);
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&, t] {
      cudaStream_t stream;
      CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      for (int i = 0; i < 10; ++i) Nothing<<<1, 1, 0, stream>>>();
      CHECK(cudaStreamSynchronize(stream));
      ++ready;
      while (!go) std::this_thread::yield();
      const uint64_t start = NowNs();
      for (int i = 0; i < count; ++i) Nothing<<<1, 1, 0, stream>>>();
      issue[t] = double(NowNs() - start) / count / 1000;
      CHECK(cudaGetLastError());
      CHECK(cudaStreamSynchronize(stream));
      CHECK(cudaStreamDestroy(stream));
    });
  }
  while (ready < threads) std::this_thread::yield();
  const uint64_t start = NowNs();
  go = true;
  for (std::thread& thread : all) thread.join();
  const double seconds = double(NowNs() - start) / 1e9;
  std::sort(issue.begin(), issue.end());
  printf("{\"issue_us\": %.4f, \"launches_per_s\": %.1f}\n", issue[threads / 2], double(threads) * count / seconds);
}

// What N threads would get if they cost nothing themselves: the driver in the worker has one thread and N streams, too.
void Streams(int count, int launches) {
  Kernel();
  std::vector<cudaStream_t> streams(count);
  for (cudaStream_t& stream : streams) {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < 10; ++i) Nothing<<<1, 1, 0, stream>>>();
    CHECK(cudaStreamSynchronize(stream));
  }
  const uint64_t start = NowNs();
  for (int i = 0; i < launches; ++i) Nothing<<<1, 1, 0, streams[i % count]>>>();
  CHECK(cudaGetLastError());
  for (cudaStream_t stream : streams) CHECK(cudaStreamSynchronize(stream));
  printf("{\"launches_per_s\": %.1f}\n", launches / (double(NowNs() - start) / 1e9));
}

void Rate(const char* file, double seconds) {
  Kernel();
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  printf("{\"ready\": true}\n");
  fflush(stdout);
  while (access(file, F_OK) == 0) usleep(1000);
  const uint64_t start = NowNs();
  const uint64_t end = start + uint64_t(seconds * 1e9);
  uint64_t count = 0;
  // In batches, so that what is counted has been done.
  for (; NowNs() < end; count += 200) {
    for (int i = 0; i < 200; ++i) Nothing<<<1, 1, 0, stream>>>();
    CHECK(cudaStreamSynchronize(stream));
  }
  printf("{\"launches_per_s\": %.1f}\n", count / (double(NowNs() - start) / 1e9));
}

// Mean time of the first and of the last tenth, in microseconds: equal if a step does not depend on how many there are.
struct Tenths {
  explicit Tenths(int count) : times(size_t(std::max(count, 1))) {}
  void Add(uint64_t ns) {
    if (used < times.size()) times[used++] = double(ns) / 1000;
  }
  double Mean(bool last) const {
    const size_t part = std::max<size_t>(1, used / 10);
    double sum = 0;
    for (size_t i = 0; i < part && i < used; ++i) sum += times[last ? used - 1 - i : i];
    return sum / double(part);
  }
  std::vector<double> times;
  size_t used = 0;
};

void Allocations(int count, const char* file) {
  Kernel();
  void* company;
  CHECK(cudaMalloc(&company, 512));
  std::vector<void*> all(size_t(count), nullptr);
  Tenths made(count), freed(count);
  const uint64_t start = NowNs();
  for (void*& memory : all) {
    const uint64_t before = NowNs();
    CHECK(cudaMalloc(&memory, 512));
    made.Add(NowNs() - before);
  }
  const double seconds = double(NowNs() - start) / 1e9;
  printf("{\"count\": %d, \"seconds\": %.3f, \"first_us\": %.4f, \"last_us\": %.4f}\n", count, seconds,
         made.Mean(false), made.Mean(true));
  fflush(stdout);
  UntilGone(file);
  for (void* memory : all) {
    const uint64_t before = NowNs();
    CHECK(cudaFree(memory));
    freed.Add(NowNs() - before);
  }
  printf("{\"free_first_us\": %.4f, \"free_last_us\": %.4f}\n", freed.Mean(false), freed.Mean(true));
}

void Modules(int count, double seconds, const char* file) {
  Kernel();
  Find("cuModuleLoadData", &driver.load);
  Find("cuModuleUnload", &driver.unload);
  Find("cuGetErrorName", &driver.get_error_name);
  std::vector<CUmodule> all;
  Tenths made(count), unloaded(count);
  const uint64_t start = NowNs();
  while (int(all.size()) < count && double(NowNs() - start) / 1e9 < seconds) {
    CUmodule module;
    const uint64_t before = NowNs();
    CHECK_DRIVER(driver.load(&module, kModule));
    made.Add(NowNs() - before);
    all.push_back(module);
  }
  printf("{\"count\": %zu, \"seconds\": %.3f, \"first_us\": %.4f, \"last_us\": %.4f}\n", all.size(),
         double(NowNs() - start) / 1e9, made.Mean(false), made.Mean(true));
  fflush(stdout);
  UntilGone(file);
  for (CUmodule module : all) {
    const uint64_t before = NowNs();
    CHECK_DRIVER(driver.unload(module));
    unloaded.Add(NowNs() - before);
  }
  printf("{\"free_first_us\": %.4f, \"free_last_us\": %.4f}\n", unloaded.Mean(false), unloaded.Mean(true));
}

void Hold(size_t mib, const char* file) {
  const size_t count = (mib << 20) / sizeof(uint64_t);
  uint64_t* words;
  unsigned long long* wrong;
  CHECK(cudaMalloc(&words, count * sizeof(uint64_t)));
  CHECK(cudaMalloc(&wrong, sizeof(*wrong)));
  CHECK(cudaMemset(wrong, 0, sizeof(*wrong)));
  Fill<<<1024, 256>>>(words, count, 4711);
  CHECK(cudaDeviceSynchronize());
  printf("{\"held_mib\": %zu}\n", mib);
  fflush(stdout);
  UntilGone(file);
  Compare<<<1024, 256>>>(words, count, 4711, wrong);
  unsigned long long result = 1;
  CHECK(cudaMemcpy(&result, wrong, sizeof(result), cudaMemcpyDeviceToHost));
  // A restored process has a monotonic clock of its own.
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  printf("{\"wrong_words\": %llu, \"done_unix_s\": %.6f}\n", result, double(now.tv_sec) + double(now.tv_nsec) / 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  const auto is = [&](const char* name, int arguments) { return command == name && argc == arguments + 2; };
  if (is("first", 0)) {
    Kernel();
    printf("{\"ready_ns\": %llu}\n", static_cast<unsigned long long>(NowNs()));
  } else if (is("idle", 1)) {
    Kernel();
    printf("{\"idle\": true}\n");
    fflush(stdout);
    // One sleep at a time, as few wake-ups as the script's patience allows.
    while (access(argv[2], F_OK) == 0) usleep(200000);
  } else if (is("threads", 2)) {
    Threads(std::max(1, atoi(argv[2])), std::max(1, atoi(argv[3])));
  } else if (is("streams", 2)) {
    Streams(std::max(1, atoi(argv[2])), std::max(1, atoi(argv[3])));
  } else if (is("rate", 2)) {
    Rate(argv[2], atof(argv[3]));
  } else if (is("allocations", 2)) {
    Allocations(std::max(1, atoi(argv[2])), argv[3]);
  } else if (is("modules", 3)) {
    Modules(std::max(1, atoi(argv[2])), atof(argv[3]), argv[4]);
  } else if (is("hold", 2)) {
    Hold(size_t(std::max(1, atoi(argv[2]))), argv[3]);
  } else {
    fprintf(stderr, "usage: see the top of bench/probe.cu\n");
    return 2;
  }
  return 0;
}
