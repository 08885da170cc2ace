// SPDX-License-Identifier: Apache-2.0
// Ranks by fork that share device memory by CUDA IPC and reduce over it in kernels that spin: each block writes its
// part into its own rank's memory, sets a flag in every peer's, and waits for the flags of all peers. So no rank's
// kernel ends before all ranks have launched theirs, as with the collective operations of communication libraries. Rank
// 0 calls the hook while the kernels of the others are running and wait for its own.
#include <vector>

#include "tests/apps/support/ranks.h"

constexpr int kBlock = 64;
constexpr int kBlocks = 2;
constexpr int kReductions = 2;  // in a step, one after another without a wait on the host

// A rank's shared memory. Two buffers: one is read by peers while the other is written.
struct Mailbox {
  unsigned arrived[kBlocks][app::kMaxRanks];
  unsigned data[2][1];  // of n values each
};

struct Peers {
  Mailbox* mailbox[app::kMaxRanks];
};

__device__ unsigned LoadFlag(const unsigned* flag) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ void StoreFlag(unsigned* flag, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(flag), "r"(value) : "memory");
}

// Each value of `state` becomes a function of the sum over all ranks. `round` counts up from 1.
__global__ void Reduce(Peers peers, unsigned* state, int n, int rank, int ranks, unsigned round) {
  Mailbox* const own = peers.mailbox[rank];
  const int half = round % 2;
  for (int i = blockIdx.x * kBlock + threadIdx.x; i < n; i += kBlocks * kBlock) {
    state[i] = app::Advance(state[i], unsigned(i));
    own->data[0][half * n + i] = state[i];
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < ranks) {
    StoreFlag(&peers.mailbox[threadIdx.x]->arrived[blockIdx.x][rank], round);
    while (LoadFlag(&own->arrived[blockIdx.x][threadIdx.x]) < round) __nanosleep(1000);
  }
  __syncthreads();
  for (int i = blockIdx.x * kBlock + threadIdx.x; i < n; i += kBlocks * kBlock) {
    unsigned sum = 0;
    for (int r = 0; r < ranks; ++r) sum += *const_cast<volatile unsigned*>(&peers.mailbox[r]->data[0][half * n + i]);
    state[i] ^= sum;
  }
}

struct Shared {
  app::Barrier barrier;
  cudaIpcMemHandle_t handles[app::kMaxRanks];
  uint64_t digests[app::kMaxRanks];
};

static unsigned Seed(int rank, int i) { return 2654435761u * unsigned(rank * 50021 + i + 1); }

static void RunRank(int rank, int ranks, const app::Options& options, Shared* shared) {
  const int n = options.size;
  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  CUDA_CHECK(cudaSetDevice(rank % devices));
  Peers peers = {};
  CUDA_CHECK(cudaMalloc(&peers.mailbox[rank], sizeof(Mailbox) + 2 * n * sizeof(unsigned)));
  CUDA_CHECK(cudaMemset(peers.mailbox[rank], 0, sizeof(Mailbox)));
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaIpcGetMemHandle(&shared->handles[rank], peers.mailbox[rank]));
  shared->barrier.Wait();
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    CUDA_CHECK(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&peers.mailbox[r]), shared->handles[r],
                                    cudaIpcMemLazyEnablePeerAccess));
  }
  std::vector<unsigned> state(n);
  for (int i = 0; i < n; ++i) state[i] = Seed(rank, i);
  unsigned* on_gpu;
  CUDA_CHECK(cudaMalloc(&on_gpu, n * sizeof(unsigned)));
  CUDA_CHECK(cudaMemcpy(on_gpu, state.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaDeviceSynchronize());

  for (int step = 1; step <= options.steps; ++step) {
    for (int k = 1; k <= kReductions; ++k) {
      Reduce<<<kBlocks, kBlock>>>(peers, on_gpu, n, rank, ranks, unsigned((step - 1) * kReductions + k));
      LAUNCH_CHECK();
      // In the middle of the step: the others wait for this rank, each in another place.
      if (rank == 0 && k == 1) app::Step(step);
    }
    if (step % 3 != rank % 3) CUDA_CHECK(cudaDeviceSynchronize());
  }

  CUDA_CHECK(cudaMemcpy(state.data(), on_gpu, n * sizeof(unsigned), cudaMemcpyDeviceToHost));
  app::Digest digest;
  digest.Add(state.data(), n * sizeof(unsigned));
  shared->digests[rank] = digest.value();
  for (int r = 0; r < ranks; ++r) {
    if (r != rank) CUDA_CHECK(cudaIpcCloseMemHandle(peers.mailbox[r]));
  }
  shared->barrier.Wait();
  CUDA_CHECK(cudaFree(peers.mailbox[rank]));
  CUDA_CHECK(cudaFree(on_gpu));
}

int main(int argc, char** argv) {
  const int ranks = app::TakeRanks(&argc, argv, 3);
  const app::Options options = app::Parse(argc, argv, {20, 512});
  Shared* const shared = app::Share<Shared>();
  shared->barrier.Init(ranks);
  app::RunRanks(ranks, [&](int rank) { RunRank(rank, ranks, options, shared); });

  const int n = options.size;
  std::vector<std::vector<unsigned>> state(ranks, std::vector<unsigned>(n));
  for (int r = 0; r < ranks; ++r) {
    for (int i = 0; i < n; ++i) state[r][i] = Seed(r, i);
  }
  for (int round = 0; round < options.steps * kReductions; ++round) {
    for (int i = 0; i < n; ++i) {
      unsigned sum = 0;
      for (int r = 0; r < ranks; ++r) sum += state[r][i] = app::Advance(state[r][i], unsigned(i));
      for (int r = 0; r < ranks; ++r) state[r][i] ^= sum;
    }
  }
  app::Digest all;
  for (int r = 0; r < ranks; ++r) {
    app::Digest digest;
    digest.Add(state[r].data(), n * sizeof(unsigned));
    APP_CHECK(digest.value() == shared->digests[r]);
    all.Add(shared->digests[r]);
  }
  printf("peer_spin ranks=%d n=%d steps=%d digest=%016" PRIx64 "\n", ranks, n, options.steps, all.value());
  return 0;
}
