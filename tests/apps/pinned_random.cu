// SPDX-License-Identifier: Apache-2.0
// Pinned and registered memory, which comes and goes at random while copies, kernels, host threads and system calls use
// it, and compared with a model: many small allocations and some large ones, with all flags, in two streams. What the
// program registers begins and ends in the middle of pages, in memory of its own or in a file that is mapped twice. The
// host uses what the work in progress leaves alone. Each of the --steps steps is --size operations.
//
// Allocations are freed without a wait for the copies that were just put into a stream: the free is the wait. A part of
// them is freed while a stream is being captured, when nothing can be waited for; what such a copy brings must not land
// in an allocation made later.
//
// CR_TEST_SEED=N chooses the operations (1 by default). A failure names the seed and the operation. With
// CR_TEST_TRANSFERS=0 no transfer into such memory (O_DIRECT) goes on while the program makes CUDA calls.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <string>
#include <thread>
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

constexpr size_t kPage = 4096;

struct Piece {
  ~Piece() {
    if (block != nullptr) munmap(block, block_bytes);
    if (other != nullptr) munmap(other, block_bytes);
  }

  unsigned char* memory = nullptr;
  std::vector<unsigned char> model;
  unsigned flags = 0;
  int busy = -1;                        // the stream whose work uses it, not waited for
  size_t busy_begin = 0, busy_end = 0;  // which part
  unsigned char* block = nullptr;       // it is registered, and lies in these pages
  unsigned char* other = nullptr;       // where the same pages are mapped, too
  size_t block_bytes = 0;
};

class Random {
 public:
  Random() : numbers_(g_seed) {
    for (cudaStream_t& stream : streams_) CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&captured_, cudaStreamNonBlocking));
    const char* const transfers = getenv("CR_TEST_TRANSFERS");
    transfers_ = transfers == nullptr || strcmp(transfers, "0") != 0;
    file_ = tmpfile();
    CHECK_BYTES(file_ != nullptr, "no temporary file");
    scratch_.resize(kMostBytes);
    for (int i = 0; i < kStreams; ++i) {
      CUDA_CHECK(cudaMalloc(&device_[i], kDeviceBytes));
      CUDA_CHECK(cudaMemset(device_[i], 0, kDeviceBytes));
      device_model_[i].resize(kDeviceBytes);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  void Operation() {
    ++g_operation;
    switch (Pick(16)) {
      case 0:
      case 1:
        return Allocate();
      case 2:
        return Register();
      case 3:
      case 4:
        return Free();
      case 10:
        return HostWritesFew();
      case 11:
        return HostThreads();
      case 12:
        return SystemCall();
      case 13:
        return OtherMapping();
      case 14:
        return DirectRead();
      case 15:
        return Kernel();
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
  // The host is going to use these bytes.
  void ForHost(const Piece& piece, size_t begin, size_t end) {
    if (piece.busy >= 0 && begin < piece.busy_end && end > piece.busy_begin) WaitFor(piece.busy);
  }
  void ForHost(const Piece& piece) { ForHost(piece, 0, piece.model.size()); }
  // The stream in which work may use these bytes: one after the other, or after a wait.
  int StreamFor(Piece* piece, size_t begin, size_t end) {
    const int stream = int(Pick(kStreams));
    if (piece->busy >= 0 && piece->busy != stream) WaitFor(piece->busy);
    piece->busy_begin = piece->busy >= 0 ? std::min(piece->busy_begin, begin) : begin;
    piece->busy_end = piece->busy >= 0 ? std::max(piece->busy_end, end) : end;
    piece->busy = stream;
    return stream;
  }
  int StreamFor(Piece* piece) { return StreamFor(piece, 0, piece->model.size()); }
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
    Fill(std::move(piece));
  }

  void Fill(std::unique_ptr<Piece> piece) {
    for (unsigned char& byte : piece->model) byte = (unsigned char)numbers_();
    memcpy(piece->memory, piece->model.data(), piece->model.size());
    pieces_.push_back(std::move(piece));
  }

  // A part of pages that are this program's own, or of a file's.
  void Register() {
    if (pieces_.size() == kMostLive) return Free();
    auto piece = std::make_unique<Piece>();
    const size_t bytes = 1 + Pick(size_t{256} << Pick(13)), begin = Pick(3) == 0 ? 0 : Pick(kPage);
    piece->block_bytes = (begin + bytes + kPage - 1) / kPage * kPage;
    const auto map = [&piece](int fd) {
      void* const got = mmap(nullptr, piece->block_bytes, PROT_READ | PROT_WRITE,
                             fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
      CHECK_BYTES(got != MAP_FAILED, "no memory");
      return static_cast<unsigned char*>(got);
    };
    if (Pick(2) == 0) {
      piece->block = map(-1);
    } else {
      const int fd = memfd_create("pinned_random", MFD_CLOEXEC);
      CHECK_BYTES(fd >= 0 && ftruncate(fd, off_t(piece->block_bytes)) == 0, "no file in memory");
      piece->block = map(fd);
      piece->other = map(fd);
      close(fd);
    }
    piece->memory = piece->block + begin;
    piece->model.resize(bytes);
    CUDA_CHECK(cudaHostRegister(piece->memory, bytes, Pick(2) == 0 ? cudaHostRegisterMapped : cudaHostRegisterDefault));
    Fill(std::move(piece));
  }

  void Free() {
    if (pieces_.empty()) return;
    std::swap(pieces_[Pick(pieces_.size())], pieces_.back());
    const Piece& piece = *pieces_.back();
    // The free waits for the work that uses it.
    if (piece.block == nullptr) {
      CUDA_CHECK(cudaFreeHost(piece.memory));
    } else {
      CUDA_CHECK(cudaHostUnregister(piece.memory));
      // It is still the program's.
      ForHost(piece);
      CHECK_BYTES(memcmp(piece.memory, piece.model.data(), piece.model.size()) == 0,
                  "memory that was registered differs");
    }
    pieces_.pop_back();
  }

  // A part of a piece that the host may use now.
  Piece* PartForHost(size_t* begin, size_t* bytes) {
    Piece* const piece = Any();
    *begin = Pick(piece->model.size());
    *bytes = 1 + Pick(piece->model.size() - *begin);
    ForHost(*piece, *begin, *begin + *bytes);
    return piece;
  }

  void HostWrites() {
    size_t begin, bytes;
    Piece* const piece = PartForHost(&begin, &bytes);
    for (size_t i = begin; i < begin + bytes; ++i)
      piece->memory[i] = piece->model[i] = (unsigned char)(i + g_operation);
  }

  void HostWritesFew() {
    Piece* const piece = Any();
    for (int i = 0; i < 5; ++i) {
      const size_t at = Pick(piece->model.size());
      ForHost(*piece, at, at + 1);
      piece->memory[at] ^= 0x5a;
      piece->model[at] ^= 0x5a;
    }
  }

  // Several threads, each its bytes of the same pages.
  void HostThreads() {
    constexpr size_t kThreads = 3;
    size_t begin, bytes;
    Piece* const piece = PartForHost(&begin, &bytes);
    std::vector<std::thread> threads;
    for (size_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([piece, begin, bytes, thread] {
        for (size_t i = begin + thread; i < begin + bytes; i += kThreads)
          piece->memory[i] += (unsigned char)(thread + 1);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < bytes; ++i) piece->model[begin + i] += (unsigned char)(i % kThreads + 1);
  }

  // The kernel writes into the memory, or reads from it.
  void SystemCall() {
    size_t begin, bytes;
    Piece* const piece = PartForHost(&begin, &bytes);
    unsigned char *const memory = piece->memory + begin, *const model = &piece->model[begin];
    const int file = fileno(file_);
    if (Pick(3) == 0) {
      CHECK_BYTES(pwrite(file, memory, bytes, 0) == ssize_t(bytes), "writing from the memory");
      CHECK_BYTES(pread(file, scratch_.data(), bytes, 0) == ssize_t(bytes), "reading the file");
      CHECK_BYTES(memcmp(scratch_.data(), model, bytes) == 0, "what was written differs");
      return;
    }
    if (Pick(2) == 0) bytes = std::min<size_t>(bytes, 6000);
    for (size_t i = 0; i < bytes; ++i) model[i] = (unsigned char)(i * 13 + g_operation);
    if (bytes > 6000) {
      CHECK_BYTES(pwrite(file, model, bytes, 0) == ssize_t(bytes), "writing the file");
      CHECK_BYTES(pread(file, memory, bytes, 0) == ssize_t(bytes), "reading into the memory");
      return;
    }
    int ends[2];
    CHECK_BYTES(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no sockets");
    CHECK_BYTES(send(ends[0], model, bytes, 0) == ssize_t(bytes), "sending");
    CHECK_BYTES(recv(ends[1], memory, bytes, MSG_WAITALL) == ssize_t(bytes), "receiving into the memory");
    close(ends[0]);
    close(ends[1]);
  }

  // As another process would, which has the file mapped.
  void OtherMapping() {
    size_t begin, bytes;
    Piece* const piece = PartForHost(&begin, &bytes);
    if (piece->other == nullptr) return;
    unsigned char* const there = piece->other + (piece->memory - piece->block);
    for (size_t i = begin; i < begin + bytes; ++i) there[i] = piece->model[i] = (unsigned char)(i * 3 + g_operation);
  }

  // Whole pages, which a device may write by itself, while a kernel is launched that uses another piece.
  void DirectRead() {
    Piece* const piece = Any();
    // Pinned memory begins on a page or not, as the driver likes.
    if (piece->block == nullptr) return;
    const size_t skip = (kPage - reinterpret_cast<uintptr_t>(piece->memory) % kPage) % kPage;
    if (piece->model.size() < skip + kPage) return;
    const size_t bytes = std::min((piece->model.size() - skip) / kPage * kPage, size_t{64} * kPage);
    ForHost(*piece, skip, skip + bytes);
    const std::string path = "/proc/self/fd/" + std::to_string(fileno(file_));
    const int fd = open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
    if (fd < 0) return;  // a file system without it
    for (size_t i = 0; i < bytes; ++i) piece->model[skip + i] = (unsigned char)(i * 17 + g_operation);
    CHECK_BYTES(pwrite(fileno(file_), &piece->model[skip], bytes, 0) == ssize_t(bytes), "writing the file");
    ssize_t got = 0;
    std::thread reader([&] { got = pread(fd, piece->memory + skip, bytes, 0); });
    if (!transfers_) reader.join();
    for (const auto& user : pieces_) {
      if (user.get() == piece || Pick(3) != 0) continue;
      Use(user.get());
      break;
    }
    if (transfers_) reader.join();
    CHECK_BYTES(got == ssize_t(bytes), "reading into the memory");
    close(fd);
  }

  void CopyToDevice() {
    Piece* const piece = Any();
    const size_t from = Pick(piece->model.size()), bytes = 1 + Pick(piece->model.size() - from);
    const int stream = StreamFor(piece, from, from + bytes);
    const size_t to = Pick(kDeviceBytes - bytes);
    CUDA_CHECK(
        cudaMemcpyAsync(device_[stream] + to, piece->memory + from, bytes, cudaMemcpyHostToDevice, streams_[stream]));
    memcpy(&device_model_[stream][to], &piece->model[from], bytes);
  }

  void CopyToHost() {
    Piece* const piece = Any();
    const size_t to = Pick(piece->model.size()), bytes = 1 + Pick(piece->model.size() - to);
    const int stream = StreamFor(piece, to, to + bytes);
    const size_t from = Pick(kDeviceBytes - bytes);
    CUDA_CHECK(
        cudaMemcpyAsync(piece->memory + to, device_[stream] + from, bytes, cudaMemcpyDeviceToHost, streams_[stream]));
    memcpy(&piece->model[to], &device_model_[stream][from], bytes);
  }

  // Through the device's pointer for it.
  void Kernel() { Use(Any()); }

  void Use(Piece* piece) {
    unsigned char* mapped;
    CUDA_CHECK(cudaHostGetDevicePointer(reinterpret_cast<void**>(&mapped), piece->memory, 0));
    const unsigned count = unsigned(std::min(piece->model.size(), kKernelBytes));
    const size_t begin = Pick(piece->model.size() - count + 1);
    const int stream = StreamFor(piece, begin, begin + count);
    Advance<<<2, 64, 0, streams_[stream]>>>(mapped + begin, count, unsigned(g_operation));
    LAUNCH_CHECK();
    AdvanceModel(&piece->model[begin], count, unsigned(g_operation));
  }

  // A long copy into the memory is on its way when it is freed. The allocation after that must not get any of it.
  void FreeInCapture() {
    if (pieces_.empty()) return;
    std::swap(pieces_[Pick(pieces_.size())], pieces_.back());
    if (pieces_.back()->block != nullptr) return;
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
  bool transfers_ = true;
  FILE* file_ = nullptr;
  std::vector<unsigned char> scratch_;
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
