// SPDX-License-Identifier: Apache-2.0
// Pinned memory, allocated and freed at random while copies and kernels use it, and compared with a model: many small
// allocations and some large ones, with all flags, in two streams. Each of the --steps steps is --size operations.
//
// Allocations are freed without a wait for the copies that were just put into a stream: the free is the wait. A part of
// them is freed while a stream is being captured, when nothing can be waited for; what such a copy brings must not land
// in an allocation made later.
//
// CR_TEST_SEED=N chooses the operations (1 by default). A failure names the seed and the operation.
#include <memory>
#include <random>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr int kStreams = 2;
constexpr size_t kMostLive = 60;
constexpr size_t kMostBytes = 3 << 20;
constexpr size_t kDeviceBytes = 4 << 20;
constexpr size_t kKernelBytes = 4096;  // what a kernel changes of an allocation: the software GPU interprets it

unsigned g_seed = 1;
long g_operation = 0;

#define CHECK_BYTES(condition, what)                                              \
  do {                                                                            \
    if (!(condition)) {                                                           \
      fprintf(stderr, "seed %u, operation %ld: %s\n", g_seed, g_operation, what); \
      app::Fail(__FILE__, __LINE__, #condition, "not true");                      \
    }                                                                             \
  } while (0)

__global__ void Advance(unsigned char* bytes, unsigned count, unsigned salt) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    bytes[i] = (unsigned char)(bytes[i] * 5 + salt + i);
  }
}

void AdvanceModel(unsigned char* bytes, unsigned count, unsigned salt) {
  for (unsigned i = 0; i < count; ++i) bytes[i] = (unsigned char)(bytes[i] * 5 + salt + i);
}

struct Piece {
  unsigned char* memory = nullptr;
  std::vector<unsigned char> model;
  unsigned flags = 0;
  int busy = -1;  // the stream whose work uses it, not waited for
};

class Random {
 public:
  Random() : numbers_(g_seed) {
    for (cudaStream_t& stream : streams_) CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&captured_, cudaStreamNonBlocking));
    for (int i = 0; i < kStreams; ++i) {
      CUDA_CHECK(cudaMalloc(&device_[i], kDeviceBytes));
      CUDA_CHECK(cudaMemset(device_[i], 0, kDeviceBytes));
      device_model_[i].resize(kDeviceBytes);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  void Operation() {
    ++g_operation;
    switch (Pick(10)) {
      case 0:
      case 1:
      case 2:
        return Allocate();
      case 3:
      case 4:
        return Free();
      case 5:
        return HostWrites();
      case 6:
        return CopyToDevice();
      case 7:
        return CopyToHost();
      case 8:
        return Kernel();
      default:
        return Pick(8) == 0 ? FreeInCapture() : Compare(Pick(pieces_.size() + 1));
    }
  }

  unsigned long long Digest() {
    app::Digest digest;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      Compare(i);
      const std::vector<unsigned char>& model = pieces_[i]->model;
      digest.Add(model.data(), std::min<size_t>(model.size(), 20000));
    }
    std::vector<unsigned char> now(kDeviceBytes);
    for (int i = 0; i < kStreams; ++i) {
      WaitFor(i);
      CUDA_CHECK(cudaMemcpy(now.data(), device_[i], kDeviceBytes, cudaMemcpyDeviceToHost));
      CHECK_BYTES(now == device_model_[i], "device memory differs");
    }
    return digest.value();
  }

 private:
  unsigned Pick(size_t most) { return unsigned(numbers_() % most); }

  void WaitFor(int stream) {
    CUDA_CHECK(cudaStreamSynchronize(streams_[stream]));
    for (auto& piece : pieces_) {
      if (piece->busy == stream) piece->busy = -1;
    }
  }
  void ForHost(const Piece& piece) {
    if (piece.busy >= 0) WaitFor(piece.busy);
  }
  // The stream in which work may use the piece: one after the other, or after a wait.
  int StreamFor(Piece* piece) {
    const int stream = int(Pick(kStreams));
    if (piece->busy >= 0 && piece->busy != stream) WaitFor(piece->busy);
    piece->busy = stream;
    return stream;
  }
  Piece* Any() {
    if (pieces_.empty()) Allocate();
    return pieces_[Pick(pieces_.size())].get();
  }

  void Allocate() {
    if (pieces_.size() == kMostLive) return Free();
    static constexpr unsigned kFlags[] = {cudaHostAllocDefault, cudaHostAllocPortable, cudaHostAllocMapped,
                                          cudaHostAllocMapped | cudaHostAllocPortable};
    auto piece = std::make_unique<Piece>();
    const size_t bytes = Pick(12) == 0 ? 1 + Pick(kMostBytes) : 1 + Pick(size_t{64} << Pick(13));
    piece->flags = kFlags[Pick(4)];
    CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&piece->memory), bytes, piece->flags));
    CHECK_BYTES(reinterpret_cast<uintptr_t>(piece->memory) % 64 == 0, "memory is not aligned");
    cudaPointerAttributes attributes;
    CUDA_CHECK(cudaPointerGetAttributes(&attributes, piece->memory + bytes - 1));
    CHECK_BYTES(attributes.type == cudaMemoryTypeHost, "not host memory");
    piece->model.resize(bytes);
    for (unsigned char& byte : piece->model) byte = (unsigned char)numbers_();
    memcpy(piece->memory, piece->model.data(), bytes);
    pieces_.push_back(std::move(piece));
  }

  void Free() {
    if (pieces_.empty()) return;
    std::swap(pieces_[Pick(pieces_.size())], pieces_.back());
    // The free waits for the work that uses it.
    CUDA_CHECK(cudaFreeHost(pieces_.back()->memory));
    pieces_.pop_back();
  }

  void HostWrites() {
    Piece* const piece = Any();
    ForHost(*piece);
    const size_t begin = Pick(piece->model.size()), bytes = 1 + Pick(piece->model.size() - begin);
    for (size_t i = begin; i < begin + bytes; ++i)
      piece->memory[i] = piece->model[i] = (unsigned char)(i + g_operation);
  }

  void CopyToDevice() {
    Piece* const piece = Any();
    const int stream = StreamFor(piece);
    const size_t from = Pick(piece->model.size()), bytes = 1 + Pick(piece->model.size() - from);
    const size_t to = Pick(kDeviceBytes - bytes);
    CUDA_CHECK(
        cudaMemcpyAsync(device_[stream] + to, piece->memory + from, bytes, cudaMemcpyHostToDevice, streams_[stream]));
    memcpy(&device_model_[stream][to], &piece->model[from], bytes);
  }

  void CopyToHost() {
    Piece* const piece = Any();
    const int stream = StreamFor(piece);
    const size_t to = Pick(piece->model.size()), bytes = 1 + Pick(piece->model.size() - to);
    const size_t from = Pick(kDeviceBytes - bytes);
    CUDA_CHECK(
        cudaMemcpyAsync(piece->memory + to, device_[stream] + from, bytes, cudaMemcpyDeviceToHost, streams_[stream]));
    memcpy(&piece->model[to], &device_model_[stream][from], bytes);
  }

  // Through the device's pointer for it.
  void Kernel() {
    Piece* const piece = Any();
    const int stream = StreamFor(piece);
    unsigned char* mapped;
    CUDA_CHECK(cudaHostGetDevicePointer(reinterpret_cast<void**>(&mapped), piece->memory, 0));
    const unsigned count = unsigned(std::min(piece->model.size(), kKernelBytes));
    const size_t begin = Pick(piece->model.size() - count + 1);
    Advance<<<2, 64, 0, streams_[stream]>>>(mapped + begin, count, unsigned(g_operation));
    LAUNCH_CHECK();
    AdvanceModel(&piece->model[begin], count, unsigned(g_operation));
  }

  // A long copy into the memory is on its way when it is freed. The allocation after that must not get any of it.
  void FreeInCapture() {
    if (pieces_.empty()) return;
    std::swap(pieces_[Pick(pieces_.size())], pieces_.back());
    const std::unique_ptr<Piece> piece = std::move(pieces_.back());
    pieces_.pop_back();
    const int stream = StreamFor(piece.get());
    CUDA_CHECK(
        cudaMemcpyAsync(piece->memory, device_[stream], piece->model.size(), cudaMemcpyDeviceToHost, streams_[stream]));
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(captured_, cudaStreamCaptureModeRelaxed));
    CUDA_CHECK(cudaFreeHost(piece->memory));
    if (pieces_.size() < kMostLive) Allocate();
    CUDA_CHECK(cudaStreamEndCapture(captured_, &graph));
    CUDA_CHECK(cudaGraphDestroy(graph));
    WaitFor(stream);
    if (!pieces_.empty()) Compare(pieces_.size() - 1);
  }

  void Compare(size_t index) {
    if (index >= pieces_.size()) return;
    const Piece& piece = *pieces_[index];
    ForHost(piece);
    CHECK_BYTES(memcmp(piece.memory, piece.model.data(), piece.model.size()) == 0, "pinned memory differs");
  }

  std::mt19937 numbers_;
  std::vector<std::unique_ptr<Piece>> pieces_;
  cudaStream_t streams_[kStreams] = {};
  cudaStream_t captured_ = nullptr;
  unsigned char* device_[kStreams] = {};
  std::vector<unsigned char> device_model_[kStreams];
};

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {24, 60});
  if (const char* seed = getenv("CR_TEST_SEED")) g_seed = unsigned(strtoul(seed, nullptr, 10));
  Random random;
  for (int step = 1; step <= options.steps; ++step) {
    for (int i = 0; i < options.size; ++i) random.Operation();
    printf("step %d: %016llx\n", step, random.Digest());
    fflush(stdout);
    app::Step(step);
  }
}
