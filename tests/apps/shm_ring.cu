// SPDX-License-Identifier: Apache-2.0
// Ranks by fork whose kernels exchange data through host memory, as communication libraries do between GPUs that cannot
// reach each other: each rank makes a file in /dev/shm, registers its mapping with CUDA, and its neighbour maps and
// registers the same file, whose name is gone by then. The device addresses of both lie in a table in device memory.
// A kernel writes a rank's part into its own file, sets a flag there, waits for its neighbour's flag, and reads the
// neighbour's part.
#include <fcntl.h>

#include <string>
#include <vector>

#include "tests/apps/support/ranks.h"

constexpr int kBlock = 64;

// What lies in a rank's file. Two parts: one is read by the neighbour while the other is written.
struct Channel {
  unsigned head;        // rounds that are written
  unsigned tail;        // rounds that the reader has taken
  unsigned data[2][1];  // of n values each
};

// In device memory.
struct Links {
  Channel* out;
  Channel* in;
};

__device__ unsigned LoadFlag(const unsigned* flag) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ void StoreFlag(unsigned* flag, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(flag), "r"(value) : "memory");
}

// One block. `round` counts up from 1.
__global__ void Exchange(const Links* links, unsigned* state, int n, unsigned round) {
  Channel* const out = links->out;
  Channel* const in = links->in;
  const int part = round % 2 * n;
  // The reader is at most one round behind.
  if (threadIdx.x == 0) {
    while (LoadFlag(&out->tail) + 1 < round) __nanosleep(1000);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kBlock) out->data[0][part + i] = state[i] = app::Advance(state[i], unsigned(i));
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    StoreFlag(&out->head, round);
    while (LoadFlag(&in->head) < round) __nanosleep(1000);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kBlock) state[i] ^= *const_cast<volatile unsigned*>(&in->data[0][part + i]) * 3;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) StoreFlag(&in->tail, round);
}

struct Shared {
  app::Barrier barrier;
  uint64_t digests[app::kMaxRanks];
};

static unsigned Seed(int rank, int i) { return 2654435761u * unsigned(rank * 40009 + i + 1); }

// Maps and registers a rank's file; `*device` is where kernels find it.
static void* Attach(const std::string& path, size_t bytes, bool make, Channel** device) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | (make ? O_CREAT | O_EXCL : 0), 0600);
  APP_CHECK(fd >= 0);
  if (make) APP_CHECK(posix_fallocate(fd, 0, off_t(bytes)) == 0);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  APP_CHECK(memory != MAP_FAILED);
  close(fd);
  CUDA_CHECK(cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
  CUDA_CHECK(cudaHostGetDevicePointer(reinterpret_cast<void**>(device), memory, 0));
  return memory;
}

static void RunRank(int rank, int ranks, const app::Options& options, Shared* shared, const std::string& name) {
  const int n = options.size;
  // Not whole pages, as in those libraries.
  const size_t bytes = sizeof(Channel) + 2 * n * sizeof(unsigned) + sizeof(int);
  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  CUDA_CHECK(cudaSetDevice(rank % devices));
  const int from = (rank + ranks - 1) % ranks;
  const std::string own = name + std::to_string(rank), other = name + std::to_string(from);
  Links links;
  void* const out = Attach(own, bytes, true, &links.out);
  shared->barrier.Wait();
  void* const in = Attach(other, bytes, false, &links.in);
  shared->barrier.Wait();
  APP_CHECK(unlink(own.c_str()) == 0);

  Links* on_gpu;
  CUDA_CHECK(cudaMalloc(&on_gpu, sizeof(Links)));
  CUDA_CHECK(cudaMemcpy(on_gpu, &links, sizeof(Links), cudaMemcpyHostToDevice));
  std::vector<unsigned> state(n);
  for (int i = 0; i < n; ++i) state[i] = Seed(rank, i);
  unsigned* values;
  CUDA_CHECK(cudaMalloc(&values, n * sizeof(unsigned)));
  CUDA_CHECK(cudaMemcpy(values, state.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));

  for (int step = 1; step <= options.steps; ++step) {
    Exchange<<<1, kBlock>>>(on_gpu, values, n, unsigned(step));
    LAUNCH_CHECK();
    CUDA_CHECK(cudaDeviceSynchronize());
    shared->barrier.Wait();
    if (rank == 0) app::Step(step);
    shared->barrier.Wait();
  }

  CUDA_CHECK(cudaMemcpy(state.data(), values, n * sizeof(unsigned), cudaMemcpyDeviceToHost));
  // The host sees what the kernels wrote.
  APP_CHECK(static_cast<volatile Channel*>(out)->head == unsigned(options.steps));
  app::Digest digest;
  digest.Add(state.data(), n * sizeof(unsigned));
  shared->digests[rank] = digest.value();
  shared->barrier.Wait();
  for (void* const memory : {out, in}) {
    CUDA_CHECK(cudaHostUnregister(memory));
    APP_CHECK(munmap(memory, bytes) == 0);
  }
  CUDA_CHECK(cudaFree(on_gpu));
  CUDA_CHECK(cudaFree(values));
}

int main(int argc, char** argv) {
  const int ranks = app::TakeRanks(&argc, argv, 3);
  const app::Options options = app::Parse(argc, argv, {20, 512});
  Shared* const shared = app::Share<Shared>();
  shared->barrier.Init(ranks);
  const std::string name = "/dev/shm/shm_ring-" + std::to_string(getpid()) + "-";
  app::RunRanks(ranks, [&](int rank) { RunRank(rank, ranks, options, shared, name); });

  const int n = options.size;
  std::vector<std::vector<unsigned>> state(ranks, std::vector<unsigned>(n));
  for (int r = 0; r < ranks; ++r) {
    for (int i = 0; i < n; ++i) state[r][i] = Seed(r, i);
  }
  for (int step = 1; step <= options.steps; ++step) {
    for (auto& values : state) {
      for (int i = 0; i < n; ++i) values[i] = app::Advance(values[i], unsigned(i));
    }
    const auto sent = state;
    for (int r = 0; r < ranks; ++r) {
      for (int i = 0; i < n; ++i) state[r][i] ^= sent[(r + ranks - 1) % ranks][i] * 3;
    }
  }
  app::Digest all;
  for (int r = 0; r < ranks; ++r) {
    app::Digest digest;
    digest.Add(state[r].data(), n * sizeof(unsigned));
    APP_CHECK(digest.value() == shared->digests[r]);
    all.Add(shared->digests[r]);
  }
  printf("shm_ring ranks=%d n=%d steps=%d digest=%016" PRIx64 "\n", ranks, n, options.steps, all.value());
  return 0;
}
