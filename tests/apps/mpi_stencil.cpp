// SPDX-License-Identifier: Apache-2.0
// Heat diffusion on a square, cut in slabs, one for each MPI rank: halo rows go through host buffers by MPI_Sendrecv,
// one of them pinned and one pageable, and all ranks learn the sum and the greatest change by MPI_Allreduce in every
// step. Rank 0 compares the result with a reference computed on the host.
#include "tests/apps/mpi_stencil.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/apps/support/app.h"

#define GPU_CHECK(call)                                                                                          \
  do {                                                                                                           \
    cudaError_t gpu_check_error = (call);                                                                        \
    if (gpu_check_error != cudaSuccess) app::Fail(__FILE__, __LINE__, #call, cudaGetErrorName(gpu_check_error)); \
  } while (0)
#define MPI_CHECK(call) APP_CHECK((call) == MPI_SUCCESS)

static float Start(int i) { return static_cast<float>((i * 7919) % 1009) / 16.0f; }

static void ReferenceStep(const std::vector<float>& in, std::vector<float>* out, int n) {
  for (int y = 0; y < n; ++y) {
    for (int x = 0; x < n; ++x) {
      float center = in[y * n + x];
      float left = x > 0 ? in[y * n + x - 1] : center;
      float right = x < n - 1 ? in[y * n + x + 1] : center;
      float up = y > 0 ? in[(y - 1) * n + x] : 0.0f;
      float down = y < n - 1 ? in[(y + 1) * n + x] : 0.0f;
      (*out)[y * n + x] = center + 0.1875f * (left + right + up + down - 4.0f * center);
    }
  }
}

// To be called before MPI_Finalize. There, MPICH before 4.2.0 waits for an answer from each rank that it has sent to
// over TCP (UCX), and then in hydra's barrier, where it answers nobody. That ends if each rank has such an answer to
// wait for from all others, and none of them is still in an earlier call, in which it would answer too soon.
static void LeaveTogether(int rank, int ranks) {
#ifdef MPICH_VERSION
  for (int distance = 1; distance < ranks; ++distance) {
    char out = 0, in = 0;
    MPI_CHECK(MPI_Sendrecv(&out, 1, MPI_CHAR, (rank + distance) % ranks, 3, &in, 1, MPI_CHAR,
                           (rank + ranks - distance) % ranks, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
  }
  const char* const hydra = getenv("PMI_FD");
  if (!hydra) return;
  const std::string asks = "cmd=barrier_in\n";
  APP_CHECK(write(atoi(hydra), asks.data(), asks.size()) == ssize_t(asks.size()));
  for (char answer = 0; answer != '\n';) APP_CHECK(read(atoi(hydra), &answer, 1) == 1);
#else
  static_cast<void>(rank + ranks);
#endif
}

int main(int argc, char** argv) {
  MPI_CHECK(MPI_Init(&argc, &argv));
  int rank = 0, ranks = 0, devices = 0;
  MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
  const app::Options options = app::Parse(argc, argv, {24, 64});
  const int rows = (options.size + ranks - 1) / ranks, n = rows * ranks;
  const size_t row_bytes = n * sizeof(float), bytes = (rows + 2) * row_bytes;
  GPU_CHECK(cudaGetDeviceCount(&devices));
  GPU_CHECK(cudaSetDevice(rank % devices));

  // Halo rows, which are 0 at the square's edge.
  std::vector<float> slab((rows + 2) * n, 0.0f);
  for (int y = 0; y < rows + 2; ++y) {
    const int row = rank * rows + y - 1;
    for (int x = 0; x < n && row >= 0 && row < n; ++x) slab[y * n + x] = Start(row * n + x);
  }
  float *cur, *next, *pinned;
  unsigned long long* sum;
  unsigned* change;
  cudaStream_t stream;
  GPU_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  GPU_CHECK(cudaMalloc(&cur, bytes));
  GPU_CHECK(cudaMalloc(&next, bytes));
  GPU_CHECK(cudaMalloc(&sum, sizeof(*sum)));
  GPU_CHECK(cudaMalloc(&change, sizeof(*change)));
  GPU_CHECK(cudaMallocHost(&pinned, 2 * row_bytes));
  GPU_CHECK(cudaMemcpy(cur, slab.data(), bytes, cudaMemcpyHostToDevice));
  GPU_CHECK(cudaMemset(next, 0, bytes));
  GPU_CHECK(cudaDeviceSynchronize());  // the stream does not wait for the default one
  std::vector<float> arrived(2 * n);
  const int above = rank > 0 ? rank - 1 : MPI_PROC_NULL, below = rank < ranks - 1 ? rank + 1 : MPI_PROC_NULL;

  app::Digest history;
  for (int step = 1; step <= options.steps; ++step) {
    GPU_CHECK(cudaMemsetAsync(sum, 0, sizeof(*sum), stream));
    GPU_CHECK(cudaMemsetAsync(change, 0, sizeof(*change), stream));
    GPU_CHECK(LaunchDiffuse(cur, next, n, rows, sum, change, stream));
    GPU_CHECK(cudaMemcpyAsync(pinned, next + n, row_bytes, cudaMemcpyDeviceToHost, stream));
    GPU_CHECK(cudaMemcpyAsync(pinned + n, next + rows * n, row_bytes, cudaMemcpyDeviceToHost, stream));
    GPU_CHECK(cudaStreamSynchronize(stream));
    std::fill(arrived.begin(), arrived.end(), 0.0f);
    MPI_CHECK(MPI_Sendrecv(pinned, n, MPI_FLOAT, above, 1, arrived.data() + n, n, MPI_FLOAT, below, 1, MPI_COMM_WORLD,
                           MPI_STATUS_IGNORE));
    MPI_CHECK(MPI_Sendrecv(pinned + n, n, MPI_FLOAT, below, 2, arrived.data(), n, MPI_FLOAT, above, 2, MPI_COMM_WORLD,
                           MPI_STATUS_IGNORE));
    GPU_CHECK(cudaMemcpyAsync(next, arrived.data(), row_bytes, cudaMemcpyHostToDevice, stream));
    GPU_CHECK(cudaMemcpyAsync(next + (rows + 1) * n, arrived.data() + n, row_bytes, cudaMemcpyHostToDevice, stream));
    unsigned long long own_sum = 0, all_sum = 0;
    unsigned own_change = 0, all_change = 0;
    GPU_CHECK(cudaMemcpyAsync(&own_sum, sum, sizeof(own_sum), cudaMemcpyDeviceToHost, stream));
    GPU_CHECK(cudaMemcpyAsync(&own_change, change, sizeof(own_change), cudaMemcpyDeviceToHost, stream));
    GPU_CHECK(cudaStreamSynchronize(stream));
    MPI_CHECK(MPI_Allreduce(&own_sum, &all_sum, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD));
    MPI_CHECK(MPI_Allreduce(&own_change, &all_change, 1, MPI_UNSIGNED, MPI_MAX, MPI_COMM_WORLD));
    history.Add(all_sum);
    history.Add(all_change);
    std::swap(cur, next);
    if (rank == 0) app::Step(step);
  }

  GPU_CHECK(cudaMemcpy(slab.data(), cur, bytes, cudaMemcpyDeviceToHost));
  std::vector<float> result(rank == 0 ? n * n : 0);
  MPI_CHECK(MPI_Gather(slab.data() + n, rows * n, MPI_FLOAT, result.data(), rows * n, MPI_FLOAT, 0, MPI_COMM_WORLD));
  // All ranks have seen the same.
  unsigned long long seen = history.value(), least = 0, most = 0;
  MPI_CHECK(MPI_Allreduce(&seen, &least, 1, MPI_UNSIGNED_LONG_LONG, MPI_MIN, MPI_COMM_WORLD));
  MPI_CHECK(MPI_Allreduce(&seen, &most, 1, MPI_UNSIGNED_LONG_LONG, MPI_MAX, MPI_COMM_WORLD));
  APP_CHECK(least == seen && most == seen);
  if (rank == 0) {
    std::vector<float> reference(n * n), other(n * n);
    for (int i = 0; i < n * n; ++i) reference[i] = Start(i);
    for (int step = 0; step < options.steps; ++step) {
      ReferenceStep(reference, &other, n);
      reference.swap(other);
    }
    for (int i = 0; i < n * n; ++i) APP_CHECK(app::Near(result[i], reference[i], 1e-4));
    app::Digest digest;
    digest.Add(result.data(), result.size() * sizeof(float));
    printf("mpi_stencil ranks=%d n=%d steps=%d history=%016" PRIx64 " digest=%016" PRIx64 "\n", ranks, n, options.steps,
           history.value(), digest.value());
  }
  GPU_CHECK(cudaFreeHost(pinned));
  for (void* memory :
       {static_cast<void*>(cur), static_cast<void*>(next), static_cast<void*>(sum), static_cast<void*>(change)}) {
    GPU_CHECK(cudaFree(memory));
  }
  GPU_CHECK(cudaStreamDestroy(stream));
  LeaveTogether(rank, ranks);
  MPI_CHECK(MPI_Finalize());
  return 0;
}
