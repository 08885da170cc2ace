// SPDX-License-Identifier: Apache-2.0
// What a driver may answer or reuse without asking the GPU: events and streams that are known to be done - and are not
// any more, once something new was recorded, launched or captured - stream-ordered memory that comes back to the stream
// that freed it, and pageable copies too large for one piece. A host function that holds its stream makes "not done"
// certain.
#include <atomic>
#include <vector>

#include "tests/apps/support/app.h"

__global__ void Stamp(unsigned* data, int n, unsigned value) {
  int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < n) data[i] = data[i] * 3u + value + i;
}

__global__ void Hash(const unsigned* data, int n, unsigned long long* sum) {
  unsigned long long total = *sum;
  for (int i = 0; i < n; ++i) total = total * 31 + data[i];
  *sum = total;
}

// A host function that waits until it is let go; not for ever, so that a failed check can end the program.
struct Gate {
  std::atomic<bool> open{false};
  static void CUDART_CB Wait(void* gate) {
    for (int i = 0; i < 100000 && !static_cast<Gate*>(gate)->open.load(); ++i) usleep(200);
  }
};

// Both queries, of a stream that is held or has been waited for.
static bool Done(cudaEvent_t event, cudaStream_t stream) {
  cudaError_t of_event = cudaEventQuery(event), of_stream = cudaStreamQuery(stream);
  for (cudaError_t result : {of_event, of_stream}) APP_CHECK(result == cudaSuccess || result == cudaErrorNotReady);
  APP_CHECK(of_event == of_stream);
  return of_event == cudaSuccess;
}

static void Questions(cudaStream_t stream, cudaStream_t other, cudaEvent_t event, cudaEvent_t marker, unsigned* data,
                      int n, unsigned step) {
  APP_CHECK(cudaEventQuery(event) == cudaSuccess);
  for (int round = 0; round < 2; ++round) {
    Gate gate;
    CUDA_CHECK(cudaLaunchHostFunc(stream, Gate::Wait, &gate));
    // Nothing was recorded since: the event is still done, the stream is not.
    APP_CHECK(cudaEventQuery(event) == cudaSuccess);
    APP_CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    CUDA_CHECK(cudaEventRecord(event, stream));
    CUDA_CHECK(cudaEventRecord(marker, other));
    for (int i = 0; i < 3; ++i) APP_CHECK(!Done(event, stream));
    CUDA_CHECK(cudaEventSynchronize(marker));
    APP_CHECK(cudaEventQuery(marker) == cudaSuccess);
    CUDA_CHECK(cudaStreamSynchronize(other));
    APP_CHECK(Done(marker, other));
    APP_CHECK(!Done(event, stream));
    gate.open = true;
    if (round == 0) {
      CUDA_CHECK(cudaEventSynchronize(event));
      APP_CHECK(cudaEventQuery(event) == cudaSuccess);
    }
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 3; ++i) APP_CHECK(Done(event, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    Stamp<<<(n + 63) / 64, 64, 0, stream>>>(data, n, step);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    APP_CHECK(Done(event, stream));
  }
}

// A node of a graph records the event; the launch names no event.
static void GraphQuestions(cudaStream_t stream, cudaEvent_t event) {
  cudaGraph_t graph;
  cudaGraphNode_t node;
  cudaGraphExec_t exec;
  CUDA_CHECK(cudaGraphCreate(&graph, 0));
  CUDA_CHECK(cudaGraphAddEventRecordNode(&node, graph, nullptr, 0, event));
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  APP_CHECK(Done(event, stream));
  Gate gate;
  CUDA_CHECK(cudaLaunchHostFunc(stream, Gate::Wait, &gate));
  CUDA_CHECK(cudaGraphLaunch(exec, stream));
  // Whether the event counts as recorded before its node's turn is the driver's own affair.
  cudaError_t state = cudaEventQuery(event);
  APP_CHECK(state == cudaSuccess || state == cudaErrorNotReady);
  APP_CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
  gate.open = true;
  CUDA_CHECK(cudaStreamSynchronize(stream));
  APP_CHECK(Done(event, stream));
  CUDA_CHECK(cudaGraphExecDestroy(exec));
  CUDA_CHECK(cudaGraphDestroy(graph));
}

// Allocations come and go in two streams; each one's contents are its own until it is freed, whoever had the memory
// before.
static void Memory(cudaStream_t stream, cudaStream_t other, unsigned long long* sum, int n, unsigned step) {
  std::vector<unsigned*> held;
  for (int round = 0; round < 12; ++round) {
    cudaStream_t in = round % 3 == 2 ? other : stream;
    unsigned *a, *b;
    CUDA_CHECK(cudaMallocAsync(&a, n * sizeof(unsigned), in));
    CUDA_CHECK(cudaMallocAsync(&b, (n + round % 2) * sizeof(unsigned), in));
    APP_CHECK(a != b);
    for (unsigned* h : held) APP_CHECK(h != a && h != b);
    CUDA_CHECK(cudaMemsetAsync(a, round, n * sizeof(unsigned), in));
    CUDA_CHECK(cudaMemsetAsync(b, round + step, n * sizeof(unsigned), in));
    Stamp<<<(n + 63) / 64, 64, 0, in>>>(a, n, step + round);
    Stamp<<<(n + 63) / 64, 64, 0, in>>>(b, n, step * 7 + round);
    Hash<<<1, 1, 0, in>>>(a, n, sum + (in == other));
    LAUNCH_CHECK();
    CUDA_CHECK(cudaFreeAsync(a, in));
    if (round % 4 == 0) {
      held.push_back(b);
      continue;
    }
    Hash<<<1, 1, 0, in>>>(b, n, sum + (in == other));
    CUDA_CHECK(cudaFreeAsync(b, in));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  for (unsigned* h : held) {
    Hash<<<1, 1, 0, other>>>(h, n, sum + 1);
    CUDA_CHECK(cudaFreeAsync(h, other));
  }
  LAUNCH_CHECK();
  // A stream that goes while it has freed memory.
  cudaStream_t brief;
  CUDA_CHECK(cudaStreamCreate(&brief));
  void* gone;
  CUDA_CHECK(cudaMallocAsync(&gone, 4096, brief));
  CUDA_CHECK(cudaFreeAsync(gone, brief));
  CUDA_CHECK(cudaStreamDestroy(brief));
  CUDA_CHECK(cudaDeviceSynchronize());
}

// Large copies, odd sizes and addresses; what lies around the destination must stay.
static void Copies(char* device, std::vector<unsigned char>& from, std::vector<unsigned char>& to, unsigned step,
                   app::Digest* digest) {
  const size_t all = from.size();
  const size_t skip = step % 7, bytes = all - 4096 - step * 1237 % 70000;
  for (size_t i = 0; i < all; i += 61) from[i] = (unsigned char)(i * 7 + step);
  CUDA_CHECK(cudaMemcpy(device + skip, from.data() + 3, bytes, cudaMemcpyHostToDevice));
  for (size_t piece : {bytes, bytes / 5, size_t(65536 + step), size_t(100)}) {
    memset(to.data(), 0xee, 64);
    memset(to.data() + 11 + piece, 0xee, 64);
    CUDA_CHECK(cudaMemcpy(to.data() + 11, device + skip, piece, cudaMemcpyDeviceToHost));
    APP_CHECK(memcmp(to.data() + 11, from.data() + 3, piece) == 0);
    for (int i = 0; i < 11; ++i) APP_CHECK(to[i] == 0xee);
    for (int i = 0; i < 64; ++i) APP_CHECK(to[11 + piece + i] == 0xee);
  }
  digest->Add(to.data(), 256);
}

// What is answered without the driver before a capture is the driver's to refuse during one. (What it does is
// documented, or was seen with driver 580.)
static void InCapture(cudaStream_t stream) {
  const auto flags_of = [stream] {
    unsigned flags = 0;
    const cudaError_t result = cudaStreamGetFlags(stream, &flags);
    APP_CHECK(result != cudaSuccess || flags == cudaStreamNonBlocking);
    return result;
  };
  cudaEvent_t inside;
  CUDA_CHECK(cudaEventCreateWithFlags(&inside, cudaEventDisableTiming));
  for (int question = 0; question < 5; ++question) {
    CUDA_CHECK(flags_of());
    CUDA_CHECK(cudaStreamQuery(stream));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    CUDA_CHECK(cudaEventRecord(inside, stream));
    const cudaError_t answer = question == 0   ? flags_of()
                               : question == 1 ? cudaStreamQuery(stream)
                               : question == 2 ? cudaDeviceSynchronize()
                               : question == 3 ? cudaStreamSynchronize(stream)
                                               : cudaEventQuery(inside);
    // Whether asking for an event of the capture invalidates it, is not documented.
    const bool of_event = question == 4;
    APP_CHECK(answer == (of_event ? cudaErrorCapturedEvent : cudaErrorStreamCaptureUnsupported));
    cudaStreamCaptureStatus status;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    if (!of_event) APP_CHECK(status == cudaStreamCaptureStatusInvalidated);
    cudaGraph_t graph = nullptr;
    const cudaError_t end = cudaStreamEndCapture(stream, &graph);
    if (!of_event) APP_CHECK(end == cudaErrorStreamCaptureInvalidated);
    if (end == cudaSuccess) CUDA_CHECK(cudaGraphDestroy(graph));
    cudaGetLastError();  // takes the errors above away
  }
  CUDA_CHECK(flags_of());
  CUDA_CHECK(cudaEventDestroy(inside));
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {8, 300});
  const int n = options.size;
  const size_t copied = size_t(17) << 20;
  cudaStream_t stream, other;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  cudaEvent_t event, marker;
  CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CUDA_CHECK(cudaEventCreate(&marker));
  unsigned* data;
  unsigned long long* sums;
  char* large;
  CUDA_CHECK(cudaMalloc(&data, n * sizeof(unsigned)));
  CUDA_CHECK(cudaMemset(data, 0, n * sizeof(unsigned)));
  CUDA_CHECK(cudaMalloc(&sums, 2 * sizeof(*sums)));
  CUDA_CHECK(cudaMemset(sums, 0, 2 * sizeof(*sums)));
  CUDA_CHECK(cudaMalloc(&large, copied));
  CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<unsigned char> from(copied), to(copied + 256);

  app::Digest digest;
  for (int step = 1; step <= options.steps; ++step) {
    Questions(stream, other, event, marker, data, n, step);
    GraphQuestions(stream, event);
    InCapture(other);
    Memory(stream, other, sums, n, step);
    if (step % 3 == 1) Copies(large, from, to, step, &digest);
    std::vector<unsigned> host(n);
    unsigned long long sum[2];
    CUDA_CHECK(cudaMemcpy(host.data(), data, n * sizeof(unsigned), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(sum, sums, sizeof(sum), cudaMemcpyDeviceToHost));
    digest.Add(host.data(), n * sizeof(unsigned));
    digest.Add(sum);
    printf("step %d: %016llx %016llx %016" PRIx64 "\n", step, sum[0], sum[1], digest.value());
    fflush(stdout);
    // Freed memory is with both streams over the pause.
    app::Step(step);
    APP_CHECK(Done(event, stream));
  }
  CUDA_CHECK(cudaFree(large));
  CUDA_CHECK(cudaFree(sums));
  CUDA_CHECK(cudaFree(data));
  CUDA_CHECK(cudaEventDestroy(event));
  CUDA_CHECK(cudaEventDestroy(marker));
  CUDA_CHECK(cudaStreamDestroy(stream));
  CUDA_CHECK(cudaStreamDestroy(other));
  printf("done %016" PRIx64 "\n", digest.value());
  return 0;
}
