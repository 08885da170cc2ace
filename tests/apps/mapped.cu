// SPDX-License-Identifier: Apache-2.0
// Host memory that kernels use in place: allocated as mapped, pinned and given to kernels as it is, and the program's
// own pages, registered where they lie (in the middle of a page) and reached through their device pointer. Host and
// kernels change it in turn; copies read it behind the kernels that write it; a host function looks at it; graphs use
// it; pieces of it are named by pointers in device memory; ranges come and go. Nothing is touched by the host while a
// kernel works on it.
#include <cstdlib>
#include <vector>

#include "tests/apps/support/app.h"

struct Pieces {
  unsigned *mapped, *registered;
};

__global__ void Advance(unsigned* data, int n, unsigned step) {
  int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < n) data[i] = data[i] * 5 + step + i;
}

// Every third word only: the others are the host's.
__global__ void Thirds(const Pieces* pieces, int n, unsigned step) {
  int i = 3 * (threadIdx.x + blockIdx.x * blockDim.x);
  if (i >= n) return;
  pieces->mapped[i] += step;
  pieces->registered[i] ^= pieces->mapped[i] + step;
}

struct Look {
  const unsigned* data;
  int n;
  unsigned sum;
};

void CUDART_CB Sum(void* data) {
  Look* look = static_cast<Look*>(data);
  look->sum = 0;
  for (int i = 0; i < look->n; ++i) look->sum = look->sum * 31 + look->data[i];
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {20, 2500});
  const int n = options.size, blocks = (n + 127) / 128;
  const size_t bytes = n * sizeof(unsigned);
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

  unsigned *mapped, *mapped_device, *pinned, *device, *registered_device;
  CUDA_CHECK(cudaHostAlloc(&mapped, bytes, cudaHostAllocMapped));
  CUDA_CHECK(cudaHostGetDevicePointer(&mapped_device, mapped, 0));
  CUDA_CHECK(cudaMallocHost(&pinned, bytes));
  CUDA_CHECK(cudaMalloc(&device, bytes));
  // Not at the start of a page, and longer than one.
  std::vector<unsigned> own(n + 8);
  unsigned* const registered = own.data() + 5;
  CUDA_CHECK(cudaHostRegister(registered, bytes, cudaHostRegisterMapped));
  CUDA_CHECK(cudaHostGetDevicePointer(&registered_device, registered, 0));
  cudaPointerAttributes facts;
  CUDA_CHECK(cudaPointerGetAttributes(&facts, registered + 3));
  APP_CHECK(facts.type == cudaMemoryTypeHost && facts.devicePointer == registered_device + 3 &&
            facts.hostPointer == registered + 3);
  unsigned* inside;
  CUDA_CHECK(cudaHostGetDevicePointer(&inside, registered + 100, 0));
  APP_CHECK(inside == registered_device + 100);

  Pieces* pieces;
  Pieces here = {mapped_device, registered_device};
  CUDA_CHECK(cudaMalloc(&pieces, sizeof here));
  CUDA_CHECK(cudaMemcpy(pieces, &here, sizeof here, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaDeviceSynchronize());  // short copies may return early, and the stream below does not wait for them

  std::vector<unsigned> m(n), p(n), r(n), back(n);
  for (int i = 0; i < n; ++i) {
    mapped[i] = m[i] = i * 3u;
    pinned[i] = p[i] = i ^ 0x55u;
    registered[i] = r[i] = 1000u - i;
  }
  // Graphs, one captured and one built, whose kernels and fill use pinned memory that nothing else uses.
  unsigned *in_graph, *in_built;
  CUDA_CHECK(cudaMallocHost(&in_graph, bytes));
  CUDA_CHECK(cudaMallocHost(&in_built, bytes));
  cudaGraph_t graph;
  cudaGraphExec_t captured, built;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  Advance<<<blocks, 128, 0, stream>>>(in_graph, n, 3);
  LAUNCH_CHECK();
  CUDA_CHECK(cudaMemsetAsync(in_graph + 10, 1, 40, stream));
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&captured, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));
  CUDA_CHECK(cudaGraphCreate(&graph, 0));
  cudaGraphNode_t node;
  cudaKernelNodeParams kernel = {};
  unsigned three = 3;
  int count = n;
  void* arguments[] = {&in_built, &count, &three};
  kernel.func = reinterpret_cast<void*>(Advance);
  kernel.gridDim = dim3(blocks);
  kernel.blockDim = dim3(128);
  kernel.kernelParams = arguments;
  CUDA_CHECK(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &kernel));
  CUDA_CHECK(cudaGraphAddMemcpyNode1D(&node, graph, &node, 1, device, in_built, bytes, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaGraphInstantiate(&built, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));
  for (int i = 0; i < n; ++i) in_graph[i] = in_built[i] = i;
  std::vector<unsigned> g(in_graph, in_graph + n), b(g);

  app::Digest digest;
  for (int step = 1; step <= options.steps; ++step) {
    // The host's turn.
    mapped[(step * 7) % n] += 9u * step;
    m[(step * 7) % n] += 9u * step;
    pinned[(step * 11) % n] ^= step;
    p[(step * 11) % n] ^= step;
    registered[(step * 13) % n] -= step;
    r[(step * 13) % n] -= step;

    Advance<<<blocks, 128, 0, stream>>>(mapped_device, n, step);
    LAUNCH_CHECK();
    Advance<<<blocks, 128, 0, stream>>>(pinned, n, step);  // the host's own pointer
    LAUNCH_CHECK();
    Advance<<<blocks, 128, 0, stream>>>(registered_device, n, step);
    LAUNCH_CHECK();
    Thirds<<<blocks, 128, 0, stream>>>(pieces, n, step);
    LAUNCH_CHECK();
    for (int i = 0; i < n; ++i) {
      m[i] = m[i] * 5 + step + i;
      p[i] = p[i] * 5 + step + i;
      r[i] = r[i] * 5 + step + i;
      if (i % 3 != 0) continue;
      m[i] += step;
      r[i] ^= m[i] + step;
    }
    // Copies behind the kernels, and a host function between.
    Look look = {pinned, n, 0};
    switch (step % 4) {
      case 0:
        CUDA_CHECK(cudaMemcpyAsync(device, registered, bytes, cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, stream));
        p = r;
        break;
      case 1:
        CUDA_CHECK(cudaMemcpyAsync(device, mapped, bytes, cudaMemcpyDefault, stream));
        CUDA_CHECK(cudaMemcpyAsync(registered, device, bytes, cudaMemcpyDeviceToHost, stream));
        r = m;
        break;
      case 2:
        CUDA_CHECK(cudaMemcpy2DAsync(device, 64, pinned, 128, 64, n / 32, cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaMemcpy2DAsync(mapped, 128, device, 64, 64, n / 32, cudaMemcpyDeviceToHost, stream));
        for (int y = 0; y < n / 32; ++y) {
          for (int x = 0; x < 16; ++x) m[y * 32 + x] = p[y * 32 + x];
        }
        break;
      default:
        CUDA_CHECK(cudaLaunchHostFunc(stream, Sum, &look));
        CUDA_CHECK(cudaMemcpyAsync(back.data(), registered_device, bytes, cudaMemcpyDefault, stream));
    }
    if (step % 2 != 0) {
      CUDA_CHECK(cudaStreamSynchronize(stream));
    } else {
      CUDA_CHECK(cudaDeviceSynchronize());
    }
    APP_CHECK(memcmp(mapped, m.data(), bytes) == 0);
    APP_CHECK(memcmp(pinned, p.data(), bytes) == 0);
    APP_CHECK(memcmp(registered, r.data(), bytes) == 0);
    APP_CHECK(own[4] == 0 && own[n + 5] == 0);
    if (step % 4 == 3) {
      Look expected = {p.data(), n, 0};
      Sum(&expected);
      APP_CHECK(look.sum == expected.sum && memcmp(back.data(), r.data(), bytes) == 0);
    }

    in_graph[step] += step;
    g[step] += step;
    in_built[2 * step] ^= step;
    b[2 * step] ^= step;
    CUDA_CHECK(cudaGraphLaunch(captured, stream));
    CUDA_CHECK(cudaGraphLaunch(built, stream));
    CUDA_CHECK(cudaMemcpyAsync(back.data(), device, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < n; ++i) {
      g[i] = i >= 10 && i < 20 ? 0x01010101u : g[i] * 5 + 3 + i;
      b[i] = b[i] * 5 + 3 + i;
    }
    APP_CHECK(memcmp(in_graph, g.data(), bytes) == 0 && memcmp(in_built, b.data(), bytes) == 0 && back == b);

    // Pinned memory as what copies and fills take for the device's side.
    unsigned* spare;
    CUDA_CHECK(cudaMallocHost(&spare, bytes));
    CUDA_CHECK(cudaMemsetAsync(spare, step, bytes, stream));
    CUDA_CHECK(cudaMemcpyAsync(spare + 8, back.data(), bytes / 2, cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaMemcpyAsync(device, spare, bytes, cudaMemcpyDeviceToDevice, stream));
    CUDA_CHECK(cudaMemcpyAsync(spare, registered_device, 32, cudaMemcpyDeviceToDevice, stream));
    std::vector<unsigned> from_pinned(n), from_device(n), expected(n, 0x01010101u * step);
    CUDA_CHECK(cudaMemcpyAsync(from_pinned.data(), spare, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(from_device.data(), device, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    memcpy(expected.data() + 8, back.data(), bytes / 2);
    APP_CHECK(from_device == expected);
    memcpy(expected.data(), registered, 32);
    APP_CHECK(from_pinned == expected && memcmp(spare, expected.data(), bytes) == 0);
    CUDA_CHECK(cudaFreeHost(spare));

    // Ranges that come and go.
    std::vector<unsigned> short_lived(900, step);
    unsigned *there, *buffer;
    CUDA_CHECK(cudaHostRegister(short_lived.data(), 3600, cudaHostRegisterDefault));
    CUDA_CHECK(cudaHostGetDevicePointer(&there, short_lived.data(), 0));
    CUDA_CHECK(cudaHostAlloc(&buffer, 70000, cudaHostAllocMapped | cudaHostAllocPortable));
    buffer[17000] = step;
    Advance<<<8, 128, 0, stream>>>(there, 900, 1);
    Advance<<<1, 1, 0, stream>>>(buffer + 17000, 1, 1);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    APP_CHECK(short_lived[899] == step * 5u + 1 + 899 && buffer[17000] == step * 5u + 1);
    CUDA_CHECK(cudaHostUnregister(short_lived.data()));
    CUDA_CHECK(cudaFreeHost(buffer));

    digest.Add(mapped, bytes);
    digest.Add(pinned, bytes);
    digest.Add(registered, bytes);
    app::Step(step);
  }
  printf("mapped n=%d steps=%d digest=%016" PRIx64 "\n", n, options.steps, digest.value());
  CUDA_CHECK(cudaGraphExecDestroy(captured));
  CUDA_CHECK(cudaGraphExecDestroy(built));
  CUDA_CHECK(cudaFreeHost(in_graph));
  CUDA_CHECK(cudaFreeHost(in_built));
  CUDA_CHECK(cudaHostUnregister(registered));
  CUDA_CHECK(cudaFreeHost(mapped));
  CUDA_CHECK(cudaFreeHost(pinned));
  CUDA_CHECK(cudaFree(device));
  CUDA_CHECK(cudaFree(pieces));
  CUDA_CHECK(cudaStreamDestroy(stream));
  return 0;
}
