// SPDX-License-Identifier: Apache-2.0
// Managed memory: a list built by the host out of managed nodes and walked by both sides, arrays that host and kernels
// change in turn, `__managed__` variables (with and without a first value, written by either side, their address taken
// on the device), bytes of one block changed by both sides in turn, advice and prefetches, system calls on managed
// pages, graphs that copy and fill managed memory, and copies between managed, pinned, pageable and device memory.
// Nothing is touched by the host while a kernel runs.
#include <memory>
#include <vector>

#include "tests/apps/support/app.h"

struct Node {
  Node* next;
  unsigned value;
  unsigned visits;
};

constexpr int kNodes = 9;
constexpr int kTable = 300;

__managed__ unsigned long long device_sum = 17;
__managed__ unsigned table[kTable];
__managed__ unsigned* table_on_device;
__device__ __managed__ struct {
  double mean;
  int rounds;
} statistics = {0.5, 3};

__global__ void TakeAddress() { table_on_device = table; }

__global__ void Walk(Node* head, unsigned step) {
  for (Node* node = head; node; node = node->next) {
    node->value = node->value * 5 + step;
    ++node->visits;
    device_sum = device_sum * 3 + node->value;
  }
}

__global__ void Advance(unsigned* data, int n, unsigned step) {
  int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < n) data[i] = data[i] * 3 + step + i;
  if (i < kTable) table[i] += step * (i + 1);
  if (i == 0) ++statistics.rounds;
}

// Odd bytes only: the even ones of the same words are the host's.
__global__ void OddBytes(unsigned char* bytes, int n, unsigned step) {
  int i = 2 * (threadIdx.x + blockIdx.x * blockDim.x) + 1;
  if (i < n) bytes[i] += (unsigned char)(step + i);
}

__global__ void Mix(unsigned* data, int n) {
  int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < n) data[i] = data[i] * 3 + i;
}

// Two graphs, one captured and one built, that copy and fill managed memory, which the host changes between launches.
// Their executables outlive them.
class Graphs {
 public:
  Graphs(int n, cudaStream_t stream) : n_(n), stream_(stream), expected_(n) {
    const size_t bytes = n * sizeof(unsigned), half = n / 2 * sizeof(unsigned);
    CUDA_CHECK(cudaMallocManaged(&managed_, bytes));
    memset(managed_, 0, bytes);  // new memory is not cleared
    CUDA_CHECK(cudaMalloc(&device_, bytes));
    CUDA_CHECK(cudaMemset(device_, 0, bytes));
    CUDA_CHECK(cudaDeviceSynchronize());  // a fill of device memory goes on when the call has returned
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CUDA_CHECK(cudaMemcpyAsync(device_, managed_, bytes, cudaMemcpyDefault, stream));
    Mix<<<(n + 127) / 128, 128, 0, stream>>>(device_, n);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemsetAsync(managed_, 3, half, stream));
    CUDA_CHECK(cudaMemcpyAsync(managed_ + n / 2, device_ + n / 2, bytes - half, cudaMemcpyDefault, stream));
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&captured_, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));

    CUDA_CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t fill, in, out;
    cudaMemsetParams params = {};
    params.dst = managed_;
    params.value = 0x1234567;
    params.elementSize = 4;
    params.width = 8;
    params.height = 1;
    CUDA_CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &params));
    CUDA_CHECK(cudaGraphAddMemcpyNode1D(&in, graph, &fill, 1, device_, managed_, 32, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaGraphAddMemcpyNode1D(&out, graph, &in, 1, managed_ + 8, device_, 32, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaGraphInstantiate(&built_, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
  }
  ~Graphs() {
    CUDA_CHECK(cudaGraphExecDestroy(captured_));
    CUDA_CHECK(cudaGraphExecDestroy(built_));
    CUDA_CHECK(cudaFree(managed_));
    CUDA_CHECK(cudaFree(device_));
  }

  void Step(int step) {
    managed_[(step * 5) % n_] ^= step;
    managed_[n_ - step % 16 - 1] += 77u * step;
    expected_[(step * 5) % n_] ^= step;
    expected_[n_ - step % 16 - 1] += 77u * step;
    CUDA_CHECK(cudaGraphLaunch(captured_, stream_));
    CUDA_CHECK(cudaGraphLaunch(built_, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    for (int i = 0; i < n_; ++i) expected_[i] = i < n_ / 2 ? 0x03030303u : expected_[i] * 3 + i;
    for (int i = 0; i < 16; ++i) expected_[i] = 0x1234567;
    APP_CHECK(memcmp(managed_, expected_.data(), n_ * sizeof(unsigned)) == 0);
  }

 private:
  int n_;
  cudaStream_t stream_;
  unsigned *managed_, *device_;
  std::vector<unsigned> expected_;
  cudaGraphExec_t captured_, built_;
};

// What was advised about parts of an allocation, as the questions about it answer: what holds for all pages.
class Advised {
 public:
  explicit Advised(int device) : device_(device) {
    // Advice is for whole pages, and allocations need not begin with one.
    CUDA_CHECK(cudaMallocManaged(&allocation_, (kParts + 1) * kPart));
    memory_ = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(allocation_) + kPart - 1) / kPart * kPart);
    const cudaMemLocation here = {cudaMemLocationTypeDevice, device}, host = {cudaMemLocationTypeHost, 0};
    Advise(1, 4, cudaMemAdviseSetReadMostly, here);
    Advise(2, 6, cudaMemAdviseSetPreferredLocation, host);
    Advise(5, 6, cudaMemAdviseSetPreferredLocation, here);
    Advise(0, 3, cudaMemAdviseSetAccessedBy, here);
    Advise(1, 8, cudaMemAdviseSetAccessedBy, host);
    CUDA_CHECK(cudaMemPrefetchAsync(memory_, 2 * kPart, here, 0, nullptr));
    CUDA_CHECK(cudaMemPrefetchAsync(memory_ + 4 * kPart, 2 * kPart, host, 0, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  ~Advised() {
    const cudaMemLocation host = {cudaMemLocationTypeHost, 0};
    Advise(2, 3, cudaMemAdviseUnsetReadMostly, host);
    Advise(2, 3, cudaMemAdviseUnsetPreferredLocation, host);
    Advise(2, 3, cudaMemAdviseUnsetAccessedBy, host);
    APP_CHECK(Ask(cudaMemRangeAttributeReadMostly, 1, 4) == 0 && Ask(cudaMemRangeAttributeReadMostly, 3, 4) == 1);
    APP_CHECK(Ask(cudaMemRangeAttributePreferredLocation, 2, 3) == cudaInvalidDeviceId);
    APP_CHECK(!IsAccessedBy(cudaCpuDeviceId, 1, 8) && IsAccessedBy(cudaCpuDeviceId, 3, 8));
    CUDA_CHECK(cudaFree(allocation_));
  }

  void Check() const {
    APP_CHECK(Ask(cudaMemRangeAttributeReadMostly, 1, 4) == 1 && Ask(cudaMemRangeAttributeReadMostly, 0, 2) == 0);
    const cudaMemRangeAttribute preferred = cudaMemRangeAttributePreferredLocation;
    APP_CHECK(Ask(preferred, 2, 5) == cudaCpuDeviceId && Ask(preferred, 5, 6) == device_);
    APP_CHECK(Ask(preferred, 4, 6) == cudaInvalidDeviceId && Ask(preferred, 0, 1) == cudaInvalidDeviceId);
    APP_CHECK(Ask(cudaMemRangeAttributePreferredLocationType, 2, 5) == cudaMemLocationTypeHost);
    APP_CHECK(Ask(cudaMemRangeAttributePreferredLocationType, 1, 5) == cudaMemLocationTypeInvalid);
    APP_CHECK(IsAccessedBy(device_, 0, 3) && !IsAccessedBy(device_, 0, 4));
    APP_CHECK(IsAccessedBy(cudaCpuDeviceId, 1, 8) && !IsAccessedBy(cudaCpuDeviceId, 0, 8));
    const cudaMemRangeAttribute last = cudaMemRangeAttributeLastPrefetchLocation;
    APP_CHECK(Ask(last, 0, 2) == device_ && Ask(last, 4, 6) == cudaCpuDeviceId);
    APP_CHECK(Ask(last, 1, 5) == cudaInvalidDeviceId);
    // Several questions at once.
    cudaMemRangeAttribute attributes[] = {cudaMemRangeAttributeReadMostly, preferred, cudaMemRangeAttributeAccessedBy,
                                          last};
    int read_mostly, location, devices[2], prefetched;
    void* answers[] = {&read_mostly, &location, devices, &prefetched};
    size_t sizes[] = {sizeof(int), sizeof(int), sizeof(devices), sizeof(int)};
    CUDA_CHECK(cudaMemRangeGetAttributes(answers, sizes, attributes, 4, memory_ + 2 * kPart, kPart));
    APP_CHECK(read_mostly == 1 && location == cudaCpuDeviceId && prefetched == cudaInvalidDeviceId);
    APP_CHECK(devices[0] + devices[1] == device_ + cudaCpuDeviceId);
  }

 private:
  static constexpr size_t kPart = 64 << 10, kParts = 8;

  void Advise(size_t first, size_t last, cudaMemoryAdvise advice, cudaMemLocation place) {
    CUDA_CHECK(cudaMemAdvise(memory_ + first * kPart, (last - first) * kPart, advice, place));
  }
  int Ask(cudaMemRangeAttribute attribute, size_t first, size_t last) const {
    int answer = -7;
    CUDA_CHECK(
        cudaMemRangeGetAttribute(&answer, sizeof(answer), attribute, memory_ + first * kPart, (last - first) * kPart));
    return answer;
  }
  bool IsAccessedBy(int device, size_t first, size_t last) const {
    int devices[4];
    CUDA_CHECK(cudaMemRangeGetAttribute(devices, sizeof(devices), cudaMemRangeAttributeAccessedBy,
                                        memory_ + first * kPart, (last - first) * kPart));
    for (const int one : devices) {
      if (one == device) return true;
    }
    return false;
  }

  const int device_;
  unsigned char *allocation_ = nullptr, *memory_ = nullptr;
};

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {20, 2500});
  const int n = options.size;
  int device;
  CUDA_CHECK(cudaGetDevice(&device));

  unsigned *data, *device_data, *pinned;
  unsigned char* bytes;
  CUDA_CHECK(cudaMallocManaged(&data, n * sizeof(unsigned)));
  CUDA_CHECK(cudaMallocManaged(&bytes, n, cudaMemAttachHost));
  CUDA_CHECK(cudaMalloc(&device_data, n * sizeof(unsigned)));
  CUDA_CHECK(cudaMallocHost(&pinned, n * sizeof(unsigned)));
  std::vector<unsigned> expected(n), pageable(n);
  std::vector<unsigned char> expected_bytes(n);
  for (int i = 0; i < n; ++i) {
    data[i] = expected[i] = i * 7u;
    bytes[i] = 0;
  }

  cudaPointerAttributes attributes;
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, data + 5));
  APP_CHECK(attributes.type == cudaMemoryTypeManaged && attributes.hostPointer == data + 5 &&
            attributes.devicePointer == data + 5);
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, &table[3]));
  APP_CHECK(attributes.type == cudaMemoryTypeManaged);

  // A list out of managed pieces, built by the host.
  Node* head = nullptr;
  std::vector<Node> model(kNodes);
  for (int i = kNodes - 1; i >= 0; --i) {
    Node* node;
    CUDA_CHECK(cudaMallocManaged(&node, sizeof(Node)));
    *node = Node{head, unsigned(i * i + 1), 0};
    model[i] = *node;
    head = node;
  }

  APP_CHECK(device_sum == 17 && statistics.mean == 0.5 && statistics.rounds == 3);
  unsigned long long sum = device_sum;
  std::vector<unsigned> table_model(kTable);
  for (int i = 0; i < kTable; ++i) {
    APP_CHECK(table[i] == 0);
    table[i] = table_model[i] = 11u * i;
  }
  TakeAddress<<<1, 1>>>();
  LAUNCH_CHECK();
  CUDA_CHECK(cudaDeviceSynchronize());
  APP_CHECK(table_on_device == table);

  auto advised = std::make_unique<Advised>(device);
  cudaMemLocation here = {cudaMemLocationTypeDevice, device}, host = {cudaMemLocationTypeHost, 0};

  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  const int blocks = (n + 127) / 128;
  auto graphs = std::make_unique<Graphs>(n, stream);
  for (int step = 1; step <= options.steps; ++step) {
    // The host's turn.
    data[step % n] += 1000u * step;
    expected[step % n] += 1000u * step;
    table[(step * 7) % kTable] ^= 0x5a5au;
    table_model[(step * 7) % kTable] ^= 0x5a5au;
    statistics.mean += 0.25;
    for (int i = 0; i < n; i += 2) expected_bytes[i] = bytes[i] = (unsigned char)(bytes[i] * 3 + step);

    if (step % 5 == 0) CUDA_CHECK(cudaMemPrefetchAsync(data, n * sizeof(unsigned), here, 0, stream));
    Advance<<<blocks, 128, 0, stream>>>(data, n, step);
    LAUNCH_CHECK();
    OddBytes<<<blocks, 64, 0, stream>>>(bytes, n, step);
    LAUNCH_CHECK();
    Walk<<<1, 1, 0, stream>>>(head, step);
    LAUNCH_CHECK();
    if (step % 5 == 0) CUDA_CHECK(cudaMemPrefetchAsync(data, n * sizeof(unsigned), host, 0, stream));
    if (step % 3 == 0) {
      CUDA_CHECK(cudaStreamSynchronize(stream));
    } else {
      CUDA_CHECK(cudaDeviceSynchronize());
    }

    // The host looks, and has its own idea of what happened.
    for (int i = 0; i < n; ++i) expected[i] = expected[i] * 3 + step + i;
    for (int i = 0; i < kTable && i < blocks * 128; ++i) table_model[i] += step * (i + 1);
    for (int i = 1; i < n; i += 2) expected_bytes[i] += (unsigned char)(step + i);
    int at = 0;
    for (Node* node = head; node; node = node->next, ++at) {
      model[at].value = model[at].value * 5 + step;
      sum = sum * 3 + model[at].value;
      APP_CHECK(node->value == model[at].value && node->visits == unsigned(step));
    }
    APP_CHECK(device_sum == sum);
    APP_CHECK(statistics.rounds == 3 + step && statistics.mean == 0.5 + 0.25 * step);
    APP_CHECK(memcmp(data, expected.data(), n * sizeof(unsigned)) == 0);
    APP_CHECK(memcmp(bytes, expected_bytes.data(), n) == 0);
    APP_CHECK(memcmp(table, table_model.data(), sizeof(table)) == 0);

    // Copies in stream order, behind kernels that write their source; managed memory as either side.
    switch (step % 4) {
      case 0:
        Advance<<<blocks, 128, 0, stream>>>(data, n, 0);
        CUDA_CHECK(cudaMemcpyAsync(device_data, data, n * sizeof(unsigned), cudaMemcpyDefault, stream));
        CUDA_CHECK(cudaMemsetAsync(data, 0, n * sizeof(unsigned), stream));
        CUDA_CHECK(cudaMemcpyAsync(data, device_data, n * sizeof(unsigned), cudaMemcpyDefault, stream));
        break;
      case 1:
        Advance<<<blocks, 128, 0, stream>>>(data, n, 0);
        CUDA_CHECK(cudaMemcpyAsync(pinned, data, n * sizeof(unsigned), cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaMemsetAsync(data, 0xff, n * sizeof(unsigned), stream));
        CUDA_CHECK(cudaMemcpyAsync(data, pinned, n * sizeof(unsigned), cudaMemcpyHostToDevice, stream));
        break;
      case 2:
        Advance<<<blocks, 128, 0, stream>>>(data, n, 0);
        CUDA_CHECK(cudaMemcpyAsync(device_data, data, n * sizeof(unsigned), cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaMemsetAsync(data, 1, n * sizeof(unsigned), stream));
        CUDA_CHECK(cudaMemcpyAsync(data, device_data, n * sizeof(unsigned), cudaMemcpyDeviceToHost, stream));
        break;
      default:
        Advance<<<blocks, 128, 0, stream>>>(data, n, 0);
        CUDA_CHECK(cudaMemcpyAsync(pageable.data(), data, n * sizeof(unsigned), cudaMemcpyDefault, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        CUDA_CHECK(cudaMemcpy(data, pageable.data(), n * sizeof(unsigned), cudaMemcpyDefault));
        // It may return before the bytes are in the GPU's memory.
        CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
    }
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < n; ++i) expected[i] = expected[i] * 3 + i;
    if (memcmp(data, expected.data(), n * sizeof(unsigned)) != 0)
      app::Fail(__FILE__, __LINE__, "copies", "wrong bytes");
    ++statistics.mean;
    --statistics.mean;
    statistics.rounds = 3 + step;

    // A system call writes managed memory that a kernel has just written.
    int pipe_ends[2];
    APP_CHECK(pipe(pipe_ends) == 0);
    APP_CHECK(write(pipe_ends[1], table, 64) == 64 && read(pipe_ends[0], data, 64) == 64);
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    memcpy(expected.data(), table, 64);
    memcpy(table_model.data(), table, sizeof(table));

    // Memory that comes and goes.
    unsigned* short_lived;
    CUDA_CHECK(cudaMallocManaged(&short_lived, 70000));
    short_lived[25] = 0;
    short_lived[17000] = step;
    CUDA_CHECK(cudaMemsetAsync(short_lived, 1, 100, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    APP_CHECK(short_lived[17000] == unsigned(step) && short_lived[24] == 0x01010101u && short_lived[25] == 0);
    CUDA_CHECK(cudaFree(short_lived));

    graphs->Step(step);
    advised->Check();

    if (step % 5 == 0) {
      app::Digest digest;
      digest.Add(data, n * sizeof(unsigned));
      digest.Add(bytes, n);
      digest.Add(table, sizeof(table));
      for (Node* node = head; node; node = node->next) digest.Add(node->value);
      printf("step %d %016" PRIx64 " sum %llu mean %.17g\n", step, digest.value(), (unsigned long long)device_sum,
             statistics.mean);
      fflush(stdout);
    }
    app::Step(step);
  }
  advised.reset();
  graphs.reset();
  while (head) {
    Node* next = head->next;
    CUDA_CHECK(cudaFree(head));
    head = next;
  }
  CUDA_CHECK(cudaFree(data));
  CUDA_CHECK(cudaFree(bytes));
  CUDA_CHECK(cudaFree(device_data));
  CUDA_CHECK(cudaFreeHost(pinned));
  CUDA_CHECK(cudaStreamDestroy(stream));
  return 0;
}
