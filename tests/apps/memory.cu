// SPDX-License-Identifier: Apache-2.0
// Kinds of memory: a linked list whose device pointers are stored in device memory (so addresses must survive), pinned
// buffers, stream-ordered allocations that live across steps, pitched rows, two-dimensional copies and fills, and
// pointer attributes.
#include <vector>

#include "tests/apps/support/app.h"

struct Node {
  Node* next;
  unsigned* payload;
  unsigned long long visits;
};

constexpr int kNodes = 12;
constexpr int kWords = 64;

__global__ void LinkIn(Node* node, Node* next, unsigned* payload) {
  node->next = next;
  node->payload = payload;
  node->visits = 0;
}

// Follows the list by the pointers stored in it.
__global__ void Walk(Node* head, unsigned step, unsigned long long* sum) {
  for (Node* node = head; node; node = node->next) {
    for (int i = threadIdx.x; i < kWords; i += blockDim.x) node->payload[i] = node->payload[i] * 5u + step;
    __syncthreads();
    if (threadIdx.x == 0) {
      node->visits += step;
      *sum = *sum * 3 + node->payload[step % kWords];
    }
    __syncthreads();
  }
}

__global__ void AddRows(unsigned* image, size_t pitch, int width, int height, unsigned value) {
  int x = threadIdx.x + blockIdx.x * blockDim.x, y = blockIdx.y;
  if (x < width && y < height) {
    unsigned* row = reinterpret_cast<unsigned*>(reinterpret_cast<char*>(image) + y * pitch);
    row[x] += value * (y + 1) + x;
  }
}

__global__ void Fill(unsigned* data, int n, unsigned value) {
  int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < n) data[i] = value + i;
}

__global__ void Accumulate(const unsigned* data, int n, unsigned long long* sum) {
  unsigned long long total = 0;
  for (int i = 0; i < n; ++i) total += data[i];
  *sum += total;
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {24, 37});
  const int width = options.size, height = 9, n = 256;
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));

  Node* nodes[kNodes];
  unsigned* payloads[kNodes];
  unsigned long long* sums;
  CUDA_CHECK(cudaMalloc(&sums, 2 * sizeof(unsigned long long)));
  CUDA_CHECK(cudaMemset(sums, 0, 2 * sizeof(unsigned long long)));
  for (int i = 0; i < kNodes; ++i) {
    CUDA_CHECK(cudaMalloc(&nodes[i], sizeof(Node)));
    CUDA_CHECK(cudaMalloc(&payloads[i], kWords * sizeof(unsigned) * (i + 1)));
    CUDA_CHECK(cudaMemset(payloads[i], i, kWords * sizeof(unsigned)));
  }
  for (int i = 0; i < kNodes; ++i) LinkIn<<<1, 1>>>(nodes[i], i + 1 < kNodes ? nodes[i + 1] : nullptr, payloads[i]);
  LAUNCH_CHECK();

  unsigned* image;
  size_t pitch;
  CUDA_CHECK(cudaMallocPitch(&image, &pitch, width * sizeof(unsigned), height));
  APP_CHECK(pitch >= width * sizeof(unsigned));
  CUDA_CHECK(cudaMemset2D(image, pitch, 0, width * sizeof(unsigned), height));

  unsigned* pinned;
  CUDA_CHECK(cudaMallocHost(&pinned, width * height * sizeof(unsigned)));
  cudaPointerAttributes attributes;
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, pinned));
  APP_CHECK(attributes.type == cudaMemoryTypeHost);
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, payloads[3] + 5));
  APP_CHECK(attributes.type == cudaMemoryTypeDevice && attributes.devicePointer == payloads[3] + 5);
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, &options));
  APP_CHECK(attributes.type == cudaMemoryTypeUnregistered);
  CUDA_CHECK(cudaDeviceSynchronize());

  // The pool that every device has, as CuPy uses it: found, set, given an attribute.
  cudaMemPool_t pool, again;
  uint64_t threshold = 3 << 20, kept = 0;
  CUDA_CHECK(cudaDeviceGetMemPool(&pool, 0));
  CUDA_CHECK(cudaDeviceSetMemPool(0, pool));
  CUDA_CHECK(cudaDeviceGetDefaultMemPool(&again, 0));
  APP_CHECK(again == pool);
  CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));

  app::Digest digest;
  unsigned* carried = nullptr;  // a stream-ordered allocation that lives until the next step
  for (int step = 1; step <= options.steps; ++step) {
    Walk<<<1, 32, 0, stream>>>(nodes[0], step, sums);
    LAUNCH_CHECK();

    unsigned* fresh;
    if (step % 3 == 0) {
      CUDA_CHECK(cudaMallocAsync(reinterpret_cast<void**>(&fresh), n * sizeof(unsigned), stream));
    } else if (step % 3 == 1) {
      CUDA_CHECK(cudaMallocFromPoolAsync(reinterpret_cast<void**>(&fresh), n * sizeof(unsigned), pool, stream));
    } else {
      // From a pool that is destroyed at once: it lasts as long as its memory does.
      cudaMemPoolProps props = {};
      props.allocType = cudaMemAllocationTypePinned;
      props.location.type = cudaMemLocationTypeDevice;
      cudaMemPool_t brief;
      CUDA_CHECK(cudaMemPoolCreate(&brief, &props));
      CUDA_CHECK(cudaMallocFromPoolAsync(reinterpret_cast<void**>(&fresh), n * sizeof(unsigned), brief, stream));
      CUDA_CHECK(cudaMemPoolDestroy(brief));
    }
    Fill<<<(n + 127) / 128, 128, 0, stream>>>(fresh, n, step * 1000);
    LAUNCH_CHECK();
    if (carried) {
      Accumulate<<<1, 1, 0, stream>>>(carried, n, sums + 1);
      LAUNCH_CHECK();
      CUDA_CHECK(cudaFreeAsync(carried, stream));
    }
    carried = fresh;

    AddRows<<<dim3((width + 31) / 32, height), 32, 0, stream>>>(image, pitch, width, height, step);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemcpy2DAsync(pinned, width * sizeof(unsigned), image, pitch, width * sizeof(unsigned), height,
                                 cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    digest.Add(pinned, width * height * sizeof(unsigned));
    // Change one row on the host and send it back, so that host and device depend on each other.
    for (int x = 0; x < width; ++x) pinned[4 * width + x] ^= 0x55u * step;
    CUDA_CHECK(cudaMemcpy2DAsync(reinterpret_cast<char*>(image) + 4 * pitch, pitch, pinned + 4 * width,
                                 width * sizeof(unsigned), width * sizeof(unsigned), 1, cudaMemcpyHostToDevice,
                                 stream));
    app::Step(step);
  }
  CUDA_CHECK(cudaFreeAsync(carried, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CUDA_CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept));
  APP_CHECK(kept == threshold);

  unsigned long long got[2], visits = 0;
  CUDA_CHECK(cudaMemcpy(got, sums, sizeof(got), cudaMemcpyDeviceToHost));
  for (int i = 0; i < kNodes; ++i) {
    Node node;
    CUDA_CHECK(cudaMemcpy(&node, nodes[i], sizeof(node), cudaMemcpyDeviceToHost));
    APP_CHECK(node.payload == payloads[i] && node.next == (i + 1 < kNodes ? nodes[i + 1] : nullptr));
    visits += node.visits;
  }

  // The same on the host.
  unsigned long long walk = 0, filled = 0, want_visits = 0;
  std::vector<std::vector<unsigned>> lists(kNodes);
  for (int i = 0; i < kNodes; ++i) lists[i].assign(kWords, 0x01010101u * i);
  std::vector<unsigned> rows(width * height);
  app::Digest want_digest;
  for (int step = 1; step <= options.steps; ++step) {
    for (auto& list : lists) {
      for (unsigned& word : list) word = word * 5u + step;
      want_visits += step;
      walk = walk * 3 + list[step % kWords];
    }
    if (step > 1) {
      for (int i = 0; i < n; ++i) filled += static_cast<unsigned>((step - 1) * 1000 + i);
    }
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) rows[y * width + x] += step * (y + 1) + x;
    }
    want_digest.Add(rows.data(), rows.size() * sizeof(unsigned));
    for (int x = 0; x < width; ++x) rows[4 * width + x] ^= 0x55u * step;
  }
  APP_CHECK(got[0] == walk && got[1] == filled && visits == want_visits && digest.value() == want_digest.value());
  printf("memory width=%d steps=%d walk=%llu filled=%llu visits=%llu digest=%016" PRIx64 "\n", width, options.steps,
         got[0], got[1], visits, digest.value());

  for (int i = 0; i < kNodes; ++i) {
    CUDA_CHECK(cudaFree(nodes[i]));
    CUDA_CHECK(cudaFree(payloads[i]));
  }
  CUDA_CHECK(cudaFree(sums));
  CUDA_CHECK(cudaFree(image));
  CUDA_CHECK(cudaFreeHost(pinned));
  CUDA_CHECK(cudaStreamDestroy(stream));
  return 0;
}
