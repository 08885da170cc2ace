// SPDX-License-Identifier: Apache-2.0
// Copies of random sizes and kinds, from several threads, each with a stream: pageable and pinned memory, both
// directions, rectangles, batches, with kernels and fills between them, many of them queued behind a kernel that takes
// long. A model on the host does the same, and every byte that comes back is compared with it.
//
// Sources are overwritten as soon as CUDA allows: those of pageable copies up to 64 KiB and those of batches that ask
// for it when the call has returned, others when the stream has been waited for.
#include <cuda_runtime.h>

#include <random>
#include <thread>
#include <vector>

#include "tests/apps/support/app.h"

constexpr int kThreads = 3;
constexpr size_t kRegion = 2 << 20;  // device memory of each thread
constexpr size_t kSmall = 64 << 10;  // longest copy whose pageable source may be overwritten at once
constexpr size_t kFlood = 80 << 20;  // more than any buffer on the way holds
constexpr long long kClocks = 300000000;

__global__ void Spin(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {
  }
}

__global__ void Mix(unsigned char* data, unsigned count, unsigned step) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) data[i] = static_cast<unsigned char>(data[i] * 5 + step);
}

using Bytes = std::vector<unsigned char>;

// What a copy to the host must bring, once the stream has been waited for.
struct Expected {
  const unsigned char* memory;
  Bytes bytes;
  int kind;
};

struct Pinned {
  explicit Pinned(size_t bytes) { CUDA_CHECK(cudaMallocHost(&memory, bytes)); }
  ~Pinned() { cudaFreeHost(memory); }
  unsigned char* memory = nullptr;
};

class Worker {
 public:
  Worker(int number, int ops) : ops_(ops), random_(977 * number + 1), model_(kRegion, 0), up_(kRegion), down_(kRegion) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMalloc(&region_, kRegion));
    CUDA_CHECK(cudaMemsetAsync(region_, 0, kRegion, stream_));
  }

  void Step(int step, bool slowly) {
    up_used_ = down_used_ = 0;
    if (slowly) Spin<<<1, 1, 0, stream_>>>(kClocks / 4);
    for (int i = 0; i < ops_; ++i) One(step);
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    for (const Expected& want : expected_) {
      if (memcmp(want.memory, want.bytes.data(), want.bytes.size()) == 0) continue;
      fprintf(stderr, "step %d: copy of kind %d, %zu bytes\n", step, want.kind, want.bytes.size());
      app::Fail(__FILE__, __LINE__, "a copy to the host", "brought other bytes than the model has");
    }
    expected_.clear();
    for (Bytes& source : kept_) memset(source.data(), 0xee, source.size());
    kept_.clear();
    memset(up_.memory, 0xdd, kRegion);
    memset(down_.memory, 0xcc, kRegion);
    Bytes all(kRegion);
    CUDA_CHECK(cudaMemcpyAsync(all.data(), region_, kRegion, cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    for (size_t i = 0; i < kRegion; ++i) {
      if (all[i] == model_[i]) continue;
      fprintf(stderr, "step %d: byte %zu is %u, the model has %u\n", step, i, all[i], model_[i]);
      app::Fail(__FILE__, __LINE__, "the device's memory", "differs from the model");
    }
  }

  uint64_t digest() const {
    app::Digest digest;
    digest.Add(model_.data(), model_.size());
    return digest.value();
  }

 private:
  size_t Below(size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random_); }
  // As many short ones as long ones.
  size_t Length(size_t most) {
    size_t limit = 2;
    while (limit < most && Below(12) != 0) limit *= 2;
    return 1 + Below(limit < most ? limit : most);
  }
  Bytes Fresh(size_t bytes) {
    Bytes fresh(bytes);
    unsigned char value = static_cast<unsigned char>(random_());
    for (unsigned char& byte : fresh) byte = value += 7;
    return fresh;
  }
  // A part of pinned memory that nothing else uses in this step; null if there is none left.
  unsigned char* Part(Pinned* pinned, size_t* used, size_t bytes) {
    if (bytes > kRegion - *used) return nullptr;
    *used += bytes;
    return pinned->memory + *used - bytes;
  }
  void Await(const unsigned char* memory, size_t at, size_t bytes, int kind) {
    expected_.push_back({memory, Bytes(model_.begin() + at, model_.begin() + at + bytes), kind});
  }

  void One(int step) {
    const int kind = int(Below(9));
    const size_t bytes = Length(kind == 0 || kind == 3 ? kSmall : 700 << 10);
    const size_t at = Below(kRegion - bytes + 1);
    switch (kind) {
      case 0: {  // pageable to the device; the source is another's at once
        Bytes source = Fresh(bytes);
        memcpy(&model_[at], source.data(), bytes);
        CUDA_CHECK(cudaMemcpyAsync(region_ + at, source.data(), bytes, cudaMemcpyHostToDevice, stream_));
        memset(source.data(), 0xbb, bytes);
        break;
      }
      case 1: {  // pageable to the device, any length
        kept_.push_back(Fresh(bytes));
        memcpy(&model_[at], kept_.back().data(), bytes);
        CUDA_CHECK(cudaMemcpyAsync(region_ + at, kept_.back().data(), bytes, cudaMemcpyHostToDevice, stream_));
        break;
      }
      case 2:    // pinned to the device
      case 3: {  // the same in a batch, read at once
        unsigned char* const source = Part(&up_, &up_used_, bytes);
        if (!source) break;
        memcpy(source, Fresh(bytes).data(), bytes);
        memcpy(&model_[at], source, bytes);
        if (kind == 2) {
          CUDA_CHECK(cudaMemcpyAsync(region_ + at, source, bytes, cudaMemcpyHostToDevice, stream_));
          break;
        }
        if (at % 2 == 0) {
          cudaMemcpyAttributes attributes = {};
          attributes.srcAccessOrder = cudaMemcpySrcAccessOrderDuringApiCall;
          size_t first = 0, size = bytes;
          void* to = region_ + at;
          const void* from = source;
          CUDA_CHECK(cudaMemcpyBatchAsync(&to, &from, &size, 1, &attributes, &first, 1, stream_));
        } else {
          cudaMemcpy3DBatchOp box = {};
          box.src.type = box.dst.type = cudaMemcpyOperandTypePointer;
          box.src.op.ptr.ptr = source;
          box.dst.op.ptr.ptr = region_ + at;
          box.extent = make_cudaExtent(bytes, 1, 1);
          box.srcAccessOrder = cudaMemcpySrcAccessOrderDuringApiCall;
          CUDA_CHECK(cudaMemcpy3DBatchAsync(1, &box, 0, stream_));
        }
        memset(source, 0xaa, bytes);
        break;
      }
      case 4: {  // to pinned memory
        unsigned char* const target = Part(&down_, &down_used_, bytes);
        if (!target) break;
        Await(target, at, bytes, kind);
        CUDA_CHECK(cudaMemcpyAsync(target, region_ + at, bytes, cudaMemcpyDeviceToHost, stream_));
        break;
      }
      case 5: {  // to pageable memory
        kept_.push_back(Bytes(bytes, 0x99));
        Await(kept_.back().data(), at, bytes, kind);
        CUDA_CHECK(cudaMemcpyAsync(kept_.back().data(), region_ + at, bytes, cudaMemcpyDeviceToHost, stream_));
        break;
      }
      case 6: {  // a rectangle of pageable memory to the device
        const size_t width = 1 + Below(300), rows = 1 + Below(40), pitch = width + Below(50);
        const size_t corner = Below(kRegion - rows * 512);
        kept_.push_back(Fresh(rows * pitch));
        for (size_t y = 0; y < rows; ++y) memcpy(&model_[corner + y * 512], &kept_.back()[y * pitch], width);
        CUDA_CHECK(cudaMemcpy2DAsync(region_ + corner, 512, kept_.back().data(), pitch, width, rows,
                                     cudaMemcpyHostToDevice, stream_));
        break;
      }
      case 7: {  // a fill, and a copy on the device
        const size_t half = bytes < kRegion / 2 ? bytes : kRegion / 2;
        const size_t to = Below(kRegion / 2 - half + 1), from = kRegion / 2 + Below(kRegion / 2 - half + 1);
        memset(&model_[from], step, half);
        CUDA_CHECK(cudaMemsetAsync(region_ + from, step & 0xff, half, stream_));
        memcpy(&model_[to], &model_[from], half);
        CUDA_CHECK(cudaMemcpyAsync(region_ + to, region_ + from, half, cudaMemcpyDeviceToDevice, stream_));
        break;
      }
      default: {  // a kernel
        const unsigned count = unsigned(bytes < 3000 ? bytes : 3000);
        for (unsigned i = 0; i < count; ++i) model_[at + i] = static_cast<unsigned char>(model_[at + i] * 5 + step);
        Mix<<<(count + 127) / 128, 128, 0, stream_>>>(region_ + at, count, step);
        LAUNCH_CHECK();
        break;
      }
    }
  }

  const int ops_;
  std::mt19937 random_;
  cudaStream_t stream_ = nullptr;
  unsigned char* region_ = nullptr;
  Bytes model_;
  Pinned up_, down_;
  size_t up_used_ = 0, down_used_ = 0;
  std::vector<Bytes> kept_;
  std::vector<Expected> expected_;
};

// One piece of memory after the other goes to the device behind a long kernel, through one small buffer.
void Flood(int step) {
  unsigned* device = nullptr;
  cudaStream_t stream;
  CUDA_CHECK(cudaMalloc(&device, kFlood));
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Spin<<<1, 1, 0, stream>>>(kClocks);
  std::mt19937 random(step);
  std::vector<unsigned> piece(kSmall / 4);
  for (size_t done = 0; done < kFlood / 4;) {
    size_t count = 1 + random() % piece.size();
    if (count > kFlood / 4 - done) count = kFlood / 4 - done;
    for (size_t i = 0; i < count; ++i) piece[i] = unsigned(done + i) * 2654435761u + step;
    CUDA_CHECK(cudaMemcpyAsync(device + done, piece.data(), 4 * count, cudaMemcpyHostToDevice, stream));
    done += count;
  }
  std::vector<unsigned> back(kFlood / 4);
  CUDA_CHECK(cudaMemcpyAsync(back.data(), device, kFlood, cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  for (size_t i = 0; i < back.size(); ++i) {
    if (back[i] == unsigned(i) * 2654435761u + step) continue;
    fprintf(stderr, "step %d: word %zu of %zu is wrong\n", step, i, back.size());
    app::Fail(__FILE__, __LINE__, "what was queued behind a long kernel", "did not arrive");
  }
  CUDA_CHECK(cudaStreamDestroy(stream));
  CUDA_CHECK(cudaFree(device));
}

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {16, 40});
  std::vector<Worker*> workers;
  for (int t = 0; t < kThreads; ++t) workers.push_back(new Worker(t, options.size));
  for (int step = 1; step <= options.steps; ++step) {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        CUDA_CHECK(cudaSetDevice(0));
        workers[t]->Step(step, (step + t) % 4 == 0);
      });
    }
    if (step == 2) Flood(step);
    for (std::thread& thread : threads) thread.join();
    printf("step %d", step);
    for (const Worker* worker : workers) printf(" %016" PRIx64, worker->digest());
    printf("\n");
    fflush(stdout);
    app::Step(step);
  }
  return 0;
}
