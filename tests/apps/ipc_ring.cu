// SPDX-License-Identifier: Apache-2.0
// Ranks, one process each, in a ring: each computes on its state and puts the result into the next rank's inbox, which
// it has opened with cudaIpcOpenMemHandle, by a kernel or by a copy. Only events of the other processes order the work
// on the GPUs; the host's barriers order the calls alone. Every step is compared with a reference that each rank
// computes of the whole ring. Half way through, each rank opens a buffer whose key it has had since the start, and from
// time to time it closes the inbox and opens it again.
//
//   ipc_ring [--steps N] [--size N] [--ranks N (4)]
#include <vector>

#include "tests/apps/support/app.h"
#include "tests/apps/support/ranks.h"

struct Keys {
  cudaIpcMemHandle_t inbox, late;
  cudaIpcEventHandle_t taken, sent;
};

struct Board {
  app::Barrier barrier;
  Keys keys[app::kMaxRanks];
  unsigned long long digests[app::kMaxRanks];
};

__host__ __device__ inline unsigned Mix(unsigned own, unsigned received, unsigned step) {
  return own * 1664525u + (received ^ (own >> 7)) + step;
}

__host__ __device__ inline unsigned Message(unsigned own, int i, int rank) {
  return (own << 5 | own >> 27) + unsigned(i) * 2654435761u + unsigned(rank);
}

__global__ void Compute(unsigned* own, const unsigned* inbox, int n, unsigned step) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) own[i] = Mix(own[i], inbox[i], step);
}

__global__ void Prepare(unsigned* message, const unsigned* own, int n, int rank) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) message[i] = Message(own[i], i, rank);
}

// The address of the other process's memory stands in device memory.
__global__ void Send(unsigned* const* next, const unsigned* own, int n, int rank) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) (*next)[i] = Message(own[i], i, rank);
}

__global__ void Fill(unsigned* own, int n, unsigned seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) own[i] = seed + unsigned(i) * 40503u;
}

__global__ void Tick(unsigned long long* counters, int rank) { counters[rank] += rank + 1; }

unsigned long long DigestOf(const unsigned* data, size_t bytes) {
  app::Digest digest;
  digest.Add(data, bytes);
  return digest.value();
}

void Run(const app::Options& options, int count, int rank, Board& board) {
  const int n = options.size, blocks = (n + 127) / 128;
  const size_t bytes = size_t(n) * sizeof(unsigned);
  const int next = (rank + 1) % count, previous = (rank + count - 1) % count;
  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  CUDA_CHECK(cudaSetDevice(rank % devices));
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  unsigned *own, *inbox, *message;
  unsigned** slot;
  unsigned long long* late;  // counters of the rank before, opened there half way through
  CUDA_CHECK(cudaMalloc(&own, bytes));
  CUDA_CHECK(cudaMalloc(&message, bytes));
  CUDA_CHECK(cudaMalloc(&inbox, bytes));
  CUDA_CHECK(cudaMalloc(&slot, sizeof(*slot)));
  CUDA_CHECK(cudaMalloc(&late, 64 * sizeof(*late)));
  CUDA_CHECK(cudaMemset(late, 0, 64 * sizeof(*late)));
  const unsigned interprocess = cudaEventInterprocess | cudaEventDisableTiming;
  cudaEvent_t taken, sent, copied[2];
  CUDA_CHECK(cudaEventCreateWithFlags(&taken, interprocess));
  CUDA_CHECK(cudaEventCreateWithFlags(&sent, interprocess));
  for (cudaEvent_t& event : copied) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  unsigned* seen[2];
  for (unsigned*& buffer : seen) CUDA_CHECK(cudaMallocHost(&buffer, bytes));
  Fill<<<blocks, 128, 0, stream>>>(own, n, 1000u + unsigned(rank));
  Fill<<<blocks, 128, 0, stream>>>(inbox, n, 77u * unsigned(rank));
  LAUNCH_CHECK();
  CUDA_CHECK(cudaDeviceSynchronize());

  Keys& keys = board.keys[rank];
  CUDA_CHECK(cudaIpcGetMemHandle(&keys.inbox, inbox));
  CUDA_CHECK(cudaIpcGetMemHandle(&keys.late, late));
  CUDA_CHECK(cudaIpcGetEventHandle(&keys.taken, taken));
  CUDA_CHECK(cudaIpcGetEventHandle(&keys.sent, sent));
  board.barrier.Wait();
  unsigned* next_inbox;
  const auto open_inbox = [&] {
    void* opened;
    CUDA_CHECK(cudaIpcOpenMemHandle(&opened, board.keys[next].inbox, cudaIpcMemLazyEnablePeerAccess));
    next_inbox = static_cast<unsigned*>(opened);
    CUDA_CHECK(cudaMemcpyAsync(slot, &next_inbox, sizeof(next_inbox), cudaMemcpyHostToDevice, stream));
  };
  open_inbox();
  cudaEvent_t next_taken, previous_sent;
  CUDA_CHECK(cudaIpcOpenEventHandle(&next_taken, board.keys[next].taken));
  CUDA_CHECK(cudaIpcOpenEventHandle(&previous_sent, board.keys[previous].sent));
  unsigned long long* next_late = nullptr;

  // The reference: all states and inboxes.
  std::vector<std::vector<unsigned>> states(count), inboxes(count);
  for (int r = 0; r < count; ++r) {
    for (int i = 0; i < n; ++i) {
      states[r].push_back(1000u + unsigned(r) + unsigned(i) * 40503u);
      inboxes[r].push_back(77u * unsigned(r) + unsigned(i) * 40503u);
    }
  }
  std::vector<unsigned> expected[2];
  const auto verify = [&](int step) {
    CUDA_CHECK(cudaEventSynchronize(copied[step % 2]));
    APP_CHECK(!memcmp(seen[step % 2], expected[step % 2].data(), bytes));
    board.digests[rank] = DigestOf(seen[step % 2], bytes);
  };
  const auto print = [&](int step) {
    if (rank != 0) return;
    app::Digest digest;
    for (int r = 0; r < count; ++r) digest.Add(board.digests[r]);
    printf("step %d: %016" PRIx64 "\n", step, digest.value());
    fflush(stdout);
  };

  const int half = (options.steps + 1) / 2;
  for (int step = 1; step <= options.steps; ++step) {
    Compute<<<blocks, 128, 0, stream>>>(own, inbox, n, unsigned(step));
    LAUNCH_CHECK();
    CUDA_CHECK(cudaEventRecord(taken, stream));
    CUDA_CHECK(cudaMemcpyAsync(seen[step % 2], own, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaEventRecord(copied[step % 2], stream));
    for (int r = 0; r < count; ++r) {
      for (int i = 0; i < n; ++i) states[r][i] = Mix(states[r][i], inboxes[r][i], unsigned(step));
    }
    for (int r = 0; r < count; ++r) {
      for (int i = 0; i < n; ++i) inboxes[(r + 1) % count][i] = Message(states[r][i], i, r);
    }
    expected[step % 2] = states[rank];
    // The one before, while this one runs.
    if (step > 1) verify(step - 1);

    board.barrier.Wait();  // every rank has recorded `taken`
    if (step > 1) print(step - 1);
    CUDA_CHECK(cudaStreamWaitEvent(stream, next_taken, 0));
    if (step % 3) {
      Send<<<blocks, 128, 0, stream>>>(slot, own, n, rank);
      LAUNCH_CHECK();
    } else {
      Prepare<<<blocks, 128, 0, stream>>>(message, own, n, rank);
      LAUNCH_CHECK();
      CUDA_CHECK(cudaMemcpyAsync(next_inbox, message, bytes, cudaMemcpyDefault, stream));
    }
    if (step == half) {
      void* opened;
      CUDA_CHECK(cudaIpcOpenMemHandle(&opened, board.keys[next].late, cudaIpcMemLazyEnablePeerAccess));
      next_late = static_cast<unsigned long long*>(opened);
    }
    if (step >= half) {
      Tick<<<1, 1, 0, stream>>>(next_late, rank);
      LAUNCH_CHECK();
    }
    CUDA_CHECK(cudaEventRecord(sent, stream));
    board.barrier.Wait();  // every rank has recorded `sent`
    CUDA_CHECK(cudaStreamWaitEvent(stream, previous_sent, 0));
    if (step % 8 == 0) {
      CUDA_CHECK(cudaStreamSynchronize(stream));
      CUDA_CHECK(cudaIpcCloseMemHandle(next_inbox));
      open_inbox();
    }
    if (rank == 0) app::Step(step);
  }
  verify(options.steps);
  board.barrier.Wait();
  print(options.steps);

  CUDA_CHECK(cudaStreamSynchronize(stream));
  std::vector<unsigned long long> counters(64);
  CUDA_CHECK(cudaMemcpy(counters.data(), late, 64 * sizeof(*late), cudaMemcpyDeviceToHost));
  for (int r = 0; r < 64; ++r) {
    const bool ticks = r == previous;
    APP_CHECK(counters[r] == (ticks ? (unsigned long long)(options.steps - half + 1) * (r + 1) : 0));
  }
  CUDA_CHECK(cudaIpcCloseMemHandle(next_inbox));
  CUDA_CHECK(cudaIpcCloseMemHandle(next_late));
  CUDA_CHECK(cudaEventDestroy(next_taken));
  CUDA_CHECK(cudaEventDestroy(previous_sent));
  board.barrier.Wait();  // nobody uses the others' memory any more
  CUDA_CHECK(cudaFree(inbox));
  CUDA_CHECK(cudaFree(late));
}

int main(int argc, char** argv) {
  const int count = app::TakeRanks(&argc, argv, 4);
  const app::Options options = app::Parse(argc, argv, {40, 2048});
  Board* const board = app::Share<Board>();
  board->barrier.Init(count);
  app::RunRanks(count, [&](int rank) { Run(options, count, rank, *board); });
  printf("%d ranks, %d steps: every value as expected\n", count, options.steps);
  return 0;
}
