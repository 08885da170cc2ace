// SPDX-License-Identifier: Apache-2.0
// Managed memory, used at random from all sides and compared byte for byte with a model of what CUDA promises: host
// threads, kernels, copies, fills, prefetches, advice, system calls, host functions, allocations and frees, in two
// streams, with memory attached to streams and to the host, and `__managed__` variables. Each of the --steps steps is
// 250 operations, with the hook for checkpoints anywhere among them.
//
// The rules of devices without concurrentManagedAccess are kept: the host leaves memory alone while work may use it
// that has not been waited for, and memory that is attached to one stream only while that stream has work. Nothing else
// is relied upon that CUDA does not promise: new memory is not cleared, and a copy that does not end in host memory may
// still be going on when cudaMemcpy returns.
//
// CR_TEST_SEED=N chooses the operations (1 by default). A failure names the seed, the operation's number and what
// differs. CR_TEST_WITHOUT=system-calls leaves out those that pass managed memory to a system call.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr unsigned kOperations = 250;
constexpr int kStreams = 2;
constexpr size_t kMostRanges = 14;
constexpr int kNobody = -1;

unsigned g_seed = 1;
bool g_system_calls = true;
long g_operation = 0;
const char* g_name = "start";

#define CHECK_BYTES(condition, what)                                                           \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      fprintf(stderr, "seed %u, operation %ld (%s): %s\n", g_seed, g_operation, g_name, what); \
      app::Fail(__FILE__, __LINE__, #condition, "not true");                                   \
    }                                                                                          \
  } while (0)

constexpr size_t kVariableBytes = 40001;
__managed__ unsigned char g_variable[kVariableBytes];
__managed__ unsigned char g_short_variable[5] = {1, 2, 3, 4, 5};

__global__ void Advance(unsigned char* bytes, unsigned count, unsigned stride, unsigned salt) {
  for (unsigned i = (blockIdx.x * blockDim.x + threadIdx.x) * stride; i < count; i += gridDim.x * blockDim.x * stride) {
    bytes[i] = (unsigned char)(bytes[i] * 3 + salt + i);
  }
}

__global__ void Mix(unsigned char* to, const unsigned char* from, unsigned count) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] ^= from[i];
}

void AdvanceModel(unsigned char* bytes, unsigned count, unsigned stride, unsigned salt) {
  for (unsigned i = 0; i < count; i += stride) bytes[i] = (unsigned char)(bytes[i] * 3 + salt + i);
}

constexpr size_t kPage = 4096;
// One range is longer than the others. Kernels, which the software GPU interprets, leave it alone.
constexpr size_t kLong = 5 << 20;

struct Range {
  unsigned char* memory = nullptr;
  unsigned char* allocation = nullptr;  // in which `memory` lies
  bool on_page = false;                 // memory begins on a page, wherever the allocation does
  std::vector<unsigned char> model;
  int busy = kNobody;      // the stream whose work uses it, not waited for
  int attached = kNobody;  // to this stream
  bool host_attached = false;
  bool variable = false;  // a __managed__ one
};

class Random {
 public:
  explicit Random(int size) : size_(size), numbers_(g_seed) {
    for (cudaStream_t& stream : streams_) CreateStream(&stream);
    CUDA_CHECK(cudaMalloc(&device_, Longest()));
    CUDA_CHECK(cudaMallocHost(&pinned_, Longest()));
    CUDA_CHECK(cudaMemset(device_, 0, Longest()));
    CUDA_CHECK(cudaDeviceSynchronize());
    memset(pinned_, 0, Longest());
    device_model_.resize(Longest());
    pageable_.resize(Longest());
    CUDA_CHECK(cudaMallocManaged(&long_.memory, kLong));
    long_.model.resize(kLong);
    memset(long_.memory, 0, kLong);
    file_ = tmpfile();
    CHECK_BYTES(file_ != nullptr, "no temporary file");
    CHECK_BYTES(pipe(pipe_) == 0, "no pipe");
    AddVariable(g_variable, kVariableBytes);
    AddVariable(g_short_variable, sizeof(g_short_variable));
    for (int i = 0; i < 4; ++i) Allocate();
  }

  void Operation() {
    ++g_operation;
    switch (Pick(30)) {
      case 0:
        return Name("host writes"), HostWrites();
      case 1:
        return Name("host writes bytes"), HostWritesFew();
      case 2:
        return Name("host reads"), HostReads();
      case 3:
        return Name("host threads"), HostThreads();
      case 4:
      case 5:
      case 6:
        return Name("kernel"), Kernel();
      case 7:
        return Name("kernel of two ranges"), KernelOfTwo();
      case 8:
        return Name("fill"), Fill();
      case 9:
        return Name("copy to device memory"), CopyOut();
      case 10:
        return Name("copy from device memory"), CopyIn();
      case 11:
        return Name("copy between ranges"), CopyBetween();
      case 12:
        return Name("copy with pageable memory"), CopyPageable();
      case 13:
        return Name("copy with pinned memory"), CopyPinned();
      case 14:
        return Name("prefetch"), Prefetch();
      case 15:
        return Name("advice"), Advise();
      case 16:
        return SystemCall("read(2)", &Random::ReadCall);
      case 17:
        return SystemCall("write(2)", &Random::WriteCall);
      case 18:
        return SystemCall("pipe", &Random::Pipe);
      case 19:
        return Name("allocate"), Allocate();
      case 20:
        return Name("free"), Free();
      case 21:
        return Name("wait"), Wait();
      case 22:
        return Name("attach"), Attach();
      case 23:
        return SystemCall("send(2)", &Random::SendCall);
      case 24:
        return SystemCall("O_DIRECT", &Random::DirectCalls);
      case 25:
        return Name("copy of lines"), CopyLines();
      case 26:
        return Name("long range"), UseLong();
      case 27:
        return Name("in turn"), InTurn();
      case 28:
        return Name("new stream"), NewStream();
      default:
        return Name("host function"), HostFunction();
    }
  }

  // The operations of a step. Somewhere among them is the hook where checkpoints and moves come, so that they find
  // pages that either side has written, and work in flight.
  void Operations(int step) {
    const unsigned hook = Pick(kOperations);
    for (unsigned i = 0; i < kOperations; ++i) {
      Operation();
      if (i == hook) app::Step(step);
    }
  }

  // Everything, once in a while.
  unsigned long long Compare() {
    Name("compare");
    WaitForAll();
    app::Digest digest;
    Same(long_, 0, kLong);
    digest.Add(long_.model.data() + Pick(kLong - kPage), kPage);
    for (const auto& range : ranges_) {
      Same(*range, 0, range->model.size());
      digest.Add(range->model.data(), range->model.size());
    }
    std::vector<unsigned char> now(Longest());
    CUDA_CHECK(cudaMemcpy(now.data(), device_, now.size(), cudaMemcpyDeviceToHost));
    CHECK_BYTES(now == device_model_, "device memory differs");
    digest.Add(now.data(), now.size());
    return digest.value();
  }

 private:
  size_t Longest() const { return size_t(size_) * 300; }
  static void Name(const char* name) { g_name = name; }
  unsigned Pick(size_t most) { return unsigned(numbers_() % most); }

  Range& Any() { return *ranges_[Pick(ranges_.size())]; }

  // A part of a range: often short, sometimes all of it.
  void Part(const Range& range, size_t* begin, size_t* bytes) {
    const size_t all = range.model.size();
    *begin = Pick(all);
    const size_t most = Pick(3) == 0 ? all - *begin : std::min<size_t>(all - *begin, 9000);
    *bytes = 1 + Pick(most);
    if (Pick(20) == 0) *begin = 0, *bytes = all;
  }

  void Same(const Range& range, size_t begin, size_t bytes) {
    if (memcmp(range.memory + begin, &range.model[begin], bytes) == 0) return;
    size_t at = begin;
    while (range.memory[at] == range.model[at]) ++at;
    size_t wrong = 0;
    for (size_t i = begin; i < begin + bytes; ++i) wrong += range.memory[i] != range.model[i];
    fprintf(stderr, "byte %zu of %zu is %u, not %u; %zu of %zu differ, range at %p%s\n", at, range.model.size(),
            range.memory[at], range.model[at], wrong, bytes, (void*)range.memory,
            range.host_attached         ? " (the host's)"
            : range.attached != kNobody ? " (a stream's)"
                                        : "");
    CHECK_BYTES(false, "managed memory differs");
  }

  void WaitForStream(int stream) {
    CUDA_CHECK(cudaStreamSynchronize(streams_[stream]));
    busy_[stream] = false;
    for (const auto& range : ranges_) {
      if (range->busy == stream) range->busy = kNobody;
    }
    if (device_busy_ == stream) device_busy_ = kNobody;
    if (pinned_busy_ == stream) pinned_busy_ = kNobody;
  }

  void WaitForAll() {
    for (int stream = 0; stream < kStreams; ++stream) {
      if (busy_[stream]) WaitForStream(stream);
    }
  }

  // The host is going to use it.
  void ForHost(Range& range) {
    if (range.host_attached) return;
    if (range.attached != kNobody) {
      if (busy_[range.attached]) WaitForStream(range.attached);
      return;
    }
    WaitForAll();
  }

  // Work in a stream is going to use it: which stream. Such memory is never the host's.
  int ForWork(Range& range, int wanted = kNobody) {
    int stream = wanted != kNobody ? wanted : range.attached != kNobody ? range.attached : int(Pick(kStreams));
    if (range.busy != kNobody && range.busy != stream) WaitForStream(range.busy);
    return stream;
  }
  void Uses(Range& range, int stream) {
    range.busy = stream;
    busy_[stream] = true;
  }
  void UsesDevice(int stream) {
    if (device_busy_ != kNobody && device_busy_ != stream) WaitForStream(device_busy_);
    device_busy_ = stream;
    busy_[stream] = true;
  }

  void HostWrites() {
    Range& range = Any();
    ForHost(range);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    const unsigned salt = Pick(251);
    for (size_t i = begin; i < begin + bytes; ++i) range.memory[i] = range.model[i] = (unsigned char)(i * 7 + salt);
  }

  void HostWritesFew() {
    Range& range = Any();
    ForHost(range);
    for (int i = 0; i < 5; ++i) {
      const size_t at = Pick(range.model.size());
      range.memory[at] ^= 0x5a;
      range.model[at] ^= 0x5a;
    }
  }

  void HostReads() {
    Range& range = Any();
    ForHost(range);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    Same(range, begin, bytes);
  }

  // Several threads, each its bytes of the same pages.
  void HostThreads() {
    Range& range = Any();
    ForHost(range);
    constexpr size_t kThreads = 3;
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    std::vector<std::thread> threads;
    for (size_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&range, begin, bytes, thread] {
        for (size_t i = begin + thread; i < begin + bytes; i += kThreads)
          range.memory[i] += (unsigned char)(thread + 1);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < bytes; ++i) range.model[begin + i] += (unsigned char)(i % kThreads + 1);
  }

  void Kernel() {
    Range& range = Any();
    if (range.host_attached) return;
    const int stream = ForWork(range);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    const unsigned stride = 1 + Pick(3), salt = Pick(251);
    Advance<<<2, 64, 0, streams_[stream]>>>(range.memory + begin, unsigned(bytes), stride, salt);
    LAUNCH_CHECK();
    AdvanceModel(&range.model[begin], unsigned(bytes), stride, salt);
    Uses(range, stream);
  }

  void KernelOfTwo() {
    Range &to = Any(), &from = Any();
    if (&to == &from || to.host_attached || from.host_attached) return;
    if (to.attached != from.attached) return;
    const int stream = ForWork(to);
    ForWork(from, stream);
    const size_t bytes = std::min(to.model.size(), from.model.size());
    Mix<<<2, 64, 0, streams_[stream]>>>(to.memory, from.memory, unsigned(bytes));
    LAUNCH_CHECK();
    for (size_t i = 0; i < bytes; ++i) to.model[i] ^= from.model[i];
    Uses(to, stream);
    Uses(from, stream);
  }

  void Fill() {
    Range& range = Any();
    if (range.host_attached) return;
    const int stream = ForWork(range);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    const unsigned value = Pick(256);
    CUDA_CHECK(cudaMemsetAsync(range.memory + begin, int(value), bytes, streams_[stream]));
    memset(&range.model[begin], int(value), bytes);
    Uses(range, stream);
  }

  void CopyOut() {
    Range& range = Any();
    if (range.host_attached) return;
    const int stream = ForWork(range);
    UsesDevice(stream);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    const cudaMemcpyKind kinds[] = {cudaMemcpyDefault, cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice};
    CUDA_CHECK(cudaMemcpyAsync(device_ + begin, range.memory + begin, bytes, kinds[Pick(3)], streams_[stream]));
    memcpy(&device_model_[begin], &range.model[begin], bytes);
    Uses(range, stream);
  }

  void CopyIn() {
    Range& range = Any();
    if (range.host_attached) return;
    const int stream = ForWork(range);
    UsesDevice(stream);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    const cudaMemcpyKind kinds[] = {cudaMemcpyDefault, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice};
    CUDA_CHECK(cudaMemcpyAsync(range.memory + begin, device_ + begin, bytes, kinds[Pick(3)], streams_[stream]));
    memcpy(&range.model[begin], &device_model_[begin], bytes);
    Uses(range, stream);
  }

  void CopyBetween() {
    Range &to = Any(), &from = Any();
    if (&to == &from || to.host_attached || from.host_attached || to.attached != from.attached) return;
    const size_t bytes = 1 + Pick(std::min(to.model.size(), from.model.size()));
    const size_t at = to.model.size() - bytes;
    if (Pick(2) == 0) {
      WaitForAll();
      CUDA_CHECK(cudaMemcpy(to.memory + at, from.memory, bytes, cudaMemcpyDefault));
      CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
    } else {
      const int stream = ForWork(to);
      ForWork(from, stream);
      CUDA_CHECK(cudaMemcpyAsync(to.memory + at, from.memory, bytes, cudaMemcpyDefault, streams_[stream]));
      Uses(to, stream);
      Uses(from, stream);
    }
    memcpy(&to.model[at], &from.model[0], bytes);
  }

  void CopyPageable() {
    Range& range = Any();
    if (range.host_attached) return;
    WaitForAll();
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    if (Pick(2) == 0) {
      for (size_t i = 0; i < bytes; ++i) pageable_[i] = (unsigned char)(i * 5 + g_operation);
      CUDA_CHECK(cudaMemcpy(range.memory + begin, pageable_.data(), bytes, cudaMemcpyDefault));
      CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
      memcpy(&range.model[begin], pageable_.data(), bytes);
    } else {
      CUDA_CHECK(cudaMemcpy(pageable_.data(), range.memory + begin, bytes, cudaMemcpyDefault));
      CHECK_BYTES(memcmp(pageable_.data(), &range.model[begin], bytes) == 0, "what was copied differs");
    }
  }

  void CopyPinned() {
    Range& range = Any();
    if (range.host_attached) return;
    if (pinned_busy_ != kNobody) WaitForStream(pinned_busy_);
    const int stream = ForWork(range);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    if (Pick(2) == 0) {
      for (size_t i = 0; i < bytes; ++i) pinned_[i] = (unsigned char)(i * 11 + g_operation);
      CUDA_CHECK(cudaMemcpyAsync(range.memory + begin, pinned_, bytes, cudaMemcpyDefault, streams_[stream]));
      memcpy(&range.model[begin], pinned_, bytes);
      pinned_busy_ = stream;
      Uses(range, stream);
    } else {
      CUDA_CHECK(cudaMemcpyAsync(pinned_, range.memory + begin, bytes, cudaMemcpyDefault, streams_[stream]));
      Uses(range, stream);
      WaitForStream(stream);
      CHECK_BYTES(memcmp(pinned_, &range.model[begin], bytes) == 0, "what was copied differs");
    }
  }

  void Prefetch() {
    Range& range = Any();
    if (range.host_attached) return;
    const int stream = ForWork(range);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    cudaMemLocation place = {};
    place.type = Pick(2) == 0 ? cudaMemLocationTypeDevice : cudaMemLocationTypeHost;
    CUDA_CHECK(cudaMemPrefetchAsync(range.memory + begin, bytes, place, 0, streams_[stream]));
    Uses(range, stream);
  }

  void Advise() {
    Range& range = Any();
    const cudaMemoryAdvise advice[] = {cudaMemAdviseSetReadMostly,        cudaMemAdviseUnsetReadMostly,
                                       cudaMemAdviseSetPreferredLocation, cudaMemAdviseUnsetPreferredLocation,
                                       cudaMemAdviseSetAccessedBy,        cudaMemAdviseUnsetAccessedBy};
    cudaMemLocation place = {};
    place.type = Pick(2) == 0 ? cudaMemLocationTypeDevice : cudaMemLocationTypeHost;
    CUDA_CHECK(cudaMemAdvise(range.memory, range.model.size(), advice[Pick(6)], place));
  }

  void SystemCall(const char* name, void (Random::*operation)()) {
    if (g_system_calls) return Name(name), (this->*operation)();
  }

  // From a file into managed memory.
  void ReadCall() {
    Range& range = Any();
    ForHost(range);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    for (size_t i = 0; i < bytes; ++i) pageable_[i] = (unsigned char)(i * 13 + g_operation);
    CHECK_BYTES(pwrite(fileno(file_), pageable_.data(), bytes, 0) == ssize_t(bytes), "writing the file");
    if (bytes > 1 && Pick(2) == 0) {
      const iovec parts[2] = {{range.memory + begin, bytes / 2}, {range.memory + begin + bytes / 2, bytes - bytes / 2}};
      CHECK_BYTES(preadv(fileno(file_), parts, 2, 0) == ssize_t(bytes), "reading into managed memory");
    } else {
      CHECK_BYTES(pread(fileno(file_), range.memory + begin, bytes, 0) == ssize_t(bytes),
                  "reading into managed memory");
    }
    memcpy(&range.model[begin], pageable_.data(), bytes);
  }

  // And back.
  void WriteCall() {
    Range& range = Any();
    ForHost(range);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    CHECK_BYTES(pwrite(fileno(file_), range.memory + begin, bytes, 0) == ssize_t(bytes), "writing from managed memory");
    CHECK_BYTES(pread(fileno(file_), pageable_.data(), bytes, 0) == ssize_t(bytes), "reading the file");
    CHECK_BYTES(memcmp(pageable_.data(), &range.model[begin], bytes) == 0, "what was written differs");
  }

  void Pipe() {
    Range& range = Any();
    ForHost(range);
    const size_t bytes = std::min<size_t>(range.model.size() / 2, 4000);
    if (bytes == 0) return;
    unsigned char* const end = range.memory + range.model.size() - bytes;
    CHECK_BYTES(write(pipe_[1], range.memory, bytes) == ssize_t(bytes), "writing from managed memory");
    CHECK_BYTES(read(pipe_[0], end, bytes) == ssize_t(bytes), "reading into managed memory");
    memcpy(&range.model[range.model.size() - bytes], &range.model[0], bytes);
  }

  // Out of one range and into another one, through a socket.
  void SendCall() {
    Range &from = Any(), &to = Any();
    ForHost(from);
    ForHost(to);
    const size_t bytes = std::min({from.model.size(), to.model.size(), size_t{6000}});
    const size_t begin = to.model.size() - bytes;
    int ends[2];
    CHECK_BYTES(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no sockets");
    iovec part = {from.memory, bytes};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    const ssize_t sent = Pick(2) == 0 ? send(ends[0], from.memory, bytes, 0) : sendmsg(ends[0], &message, 0);
    CHECK_BYTES(sent == ssize_t(bytes), "sending managed memory");
    const std::vector<unsigned char> copy(from.model.begin(), from.model.begin() + long(bytes));
    CHECK_BYTES(recv(ends[1], to.memory + begin, bytes, MSG_WAITALL) == ssize_t(bytes),
                "receiving into managed memory");
    memcpy(&to.model[begin], copy.data(), bytes);
    close(ends[0]);
    close(ends[1]);
  }

  // Whole pages, which the device of the file (or, for files in memory, the kernel) reads and writes by itself.
  void DirectCalls() {
    Range& range = Any();
    ForHost(range);
    if (!range.on_page || range.model.size() < kPage) return;
    const size_t pages = range.model.size() / kPage, first = Pick(pages);
    const size_t begin = first * kPage, bytes = (1 + Pick(pages - first)) * kPage;
    const std::string path = "/proc/self/fd/" + std::to_string(fileno(file_));
    const int fd = open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
    if (fd < 0) return;  // a file system without it
    if (Pick(2) == 0) {
      for (size_t i = 0; i < bytes; ++i) pageable_[i] = (unsigned char)(i * 17 + g_operation);
      CHECK_BYTES(pwrite(fileno(file_), pageable_.data(), bytes, 0) == ssize_t(bytes), "writing the file");
      CHECK_BYTES(pread(fd, range.memory + begin, bytes, 0) == ssize_t(bytes), "reading into managed memory");
      memcpy(&range.model[begin], pageable_.data(), bytes);
    } else {
      CHECK_BYTES(pwrite(fd, range.memory + begin, bytes, 0) == ssize_t(bytes), "writing from managed memory");
      CHECK_BYTES(pread(fileno(file_), pageable_.data(), bytes, 0) == ssize_t(bytes), "reading the file");
      CHECK_BYTES(memcmp(pageable_.data(), &range.model[begin], bytes) == 0, "what was written differs");
    }
    close(fd);
  }

  // A rectangle of one range into another one.
  void CopyLines() {
    Range &to = Any(), &from = Any();
    if (&to == &from || to.host_attached || from.host_attached || to.attached != from.attached) return;
    const size_t most = std::min(to.model.size(), from.model.size());
    if (most < 8) return;
    const size_t pitch = 4 + Pick(std::min<size_t>(most / 2, 700) - 3), lines = most / pitch, width = 1 + Pick(pitch);
    const int stream = ForWork(to);
    ForWork(from, stream);
    CUDA_CHECK(
        cudaMemcpy2DAsync(to.memory, pitch, from.memory, pitch, width, lines, cudaMemcpyDefault, streams_[stream]));
    for (size_t line = 0; line < lines; ++line) memcpy(&to.model[line * pitch], &from.model[line * pitch], width);
    Uses(to, stream);
    Uses(from, stream);
  }

  // Megabytes that the host writes or reads from one end to the other, and the GPU in between.
  void UseLong() {
    WaitForAll();
    const size_t begin = Pick(kLong), bytes = 1 + Pick(kLong - begin);
    unsigned char *const memory = long_.memory + begin, *const model = &long_.model[begin];
    switch (Pick(3)) {
      case 0: {
        const unsigned char salt = (unsigned char)(g_operation);
        for (size_t i = 0; i < bytes; ++i) memory[i] = model[i] = (unsigned char)(i * 7 + (i >> 12) + salt);
        break;
      }
      case 1:
        CUDA_CHECK(cudaMemsetAsync(memory, int(g_operation % 251), bytes, streams_[0]));
        memset(model, int(g_operation % 251), bytes);
        break;
      default: {
        const size_t half = bytes / 2;
        if (half == 0) return;
        CUDA_CHECK(cudaMemcpyAsync(memory + half, memory, half, cudaMemcpyDefault, streams_[0]));
        memcpy(model + half, model, half);
      }
    }
    busy_[0] = true;
    if (Pick(2) == 0) return;
    WaitForAll();
    Same(long_, 0, kLong);
  }

  void Allocate() {
    if (ranges_.size() == kMostRanges) return;
    auto range = std::make_unique<Range>();
    const size_t sizes[] = {1 + Pick(300), 4096, 1 + Pick(20000), 1 + Pick(Longest() / 4), Longest()};
    range->model.resize(std::min(sizes[Pick(5)], Longest()));
    range->host_attached = Pick(5) == 0;
    range->on_page = Pick(2) == 0;
    CUDA_CHECK(cudaMallocManaged(&range->allocation, range->model.size() + (range->on_page ? kPage - 1 : 0),
                                 range->host_attached ? cudaMemAttachHost : cudaMemAttachGlobal));
    const size_t past = reinterpret_cast<size_t>(range->allocation) % kPage;
    range->memory = range->allocation + (range->on_page && past != 0 ? kPage - past : 0);
    const unsigned value = Pick(256);
    memset(range->model.data(), int(value), range->model.size());
    // The host may use what is new at once only if it is its own, or nothing runs.
    if (!range->host_attached) WaitForAll();
    if (range->host_attached || Pick(2) == 0) {
      memset(range->memory, int(value), range->model.size());
    } else {
      CUDA_CHECK(cudaMemsetAsync(range->memory, int(value), range->model.size(), streams_[0]));
      Uses(*range, 0);
    }
    ranges_.push_back(std::move(range));
  }

  void AddVariable(unsigned char* memory, size_t bytes) {
    auto range = std::make_unique<Range>();
    range->memory = range->allocation = memory;
    range->model.assign(memory, memory + bytes);
    range->variable = true;
    ranges_.push_back(std::move(range));
  }

  void Free() {
    const size_t index = Pick(ranges_.size());
    if (ranges_.size() <= 5 || ranges_[index]->variable) return;
    WaitForAll();
    CUDA_CHECK(cudaFree(ranges_[index]->allocation));
    ranges_.erase(ranges_.begin() + long(index));
  }

  void Wait() {
    if (Pick(3) == 0) {
      CUDA_CHECK(cudaDeviceSynchronize());
      return WaitForAll();
    }
    WaitForStream(int(Pick(kStreams)));
  }

  // The same few pages again and again, so that the library comes to know them.
  void InTurn() {
    Range& range = Any();
    if (range.host_attached) return;
    WaitForAll();
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    bytes = std::min<size_t>(bytes, 9000);
    const unsigned turns = 1 + Pick(10);
    for (unsigned turn = 0; turn < turns; ++turn) {
      for (size_t i = begin; i < begin + bytes; i += 1 + turn % 3) {
        range.memory[i] += (unsigned char)(turn + 1);
        range.model[i] += (unsigned char)(turn + 1);
      }
      const bool legacy = range.attached == kNobody && Pick(2) == 0;
      const cudaStream_t stream = legacy ? nullptr : streams_[ForWork(range)];
      Advance<<<2, 64, 0, stream>>>(range.memory + begin, unsigned(bytes), 1, turn);
      LAUNCH_CHECK();
      AdvanceModel(&range.model[begin], unsigned(bytes), 1, turn);
      if (Pick(4) == 0) {
        CUDA_CHECK(cudaStreamSynchronize(stream));
      } else {
        CUDA_CHECK(cudaDeviceSynchronize());
      }
      Same(range, begin, bytes);
    }
    // And then the GPU goes on alone for a while.
    if (Pick(8) != 0) return;
    const int stream = ForWork(range);
    for (unsigned launch = 0; launch < 140; ++launch) {
      Advance<<<1, 1, 0, streams_[stream]>>>(range.memory + begin, 1, 1, launch);
      LAUNCH_CHECK();
      AdvanceModel(&range.model[begin], 1, 1, launch);
    }
    Uses(range, stream);
  }

  void CreateStream(cudaStream_t* stream) {
    CUDA_CHECK(cudaStreamCreateWithFlags(stream, Pick(2) == 0 ? cudaStreamNonBlocking : cudaStreamDefault));
  }

  void NewStream() {
    const int stream = int(Pick(kStreams));
    for (const auto& range : ranges_) {
      if (range->attached == stream) return;
    }
    WaitForAll();
    CUDA_CHECK(cudaStreamDestroy(streams_[stream]));
    CreateStream(&streams_[stream]);
  }

  void Attach() {
    Range& range = Any();
    WaitForAll();
    const int stream = int(Pick(kStreams));
    switch (Pick(3)) {
      case 0:
        CUDA_CHECK(cudaStreamAttachMemAsync(streams_[stream], range.allocation, 0, cudaMemAttachGlobal));
        range.attached = kNobody, range.host_attached = false;
        break;
      case 1:
        CUDA_CHECK(cudaStreamAttachMemAsync(streams_[stream], range.allocation, 0, cudaMemAttachHost));
        range.attached = kNobody, range.host_attached = true;
        break;
      default:
        CUDA_CHECK(cudaStreamAttachMemAsync(streams_[stream], range.allocation, 0, cudaMemAttachSingle));
        range.attached = stream, range.host_attached = false;
    }
    CUDA_CHECK(cudaStreamSynchronize(streams_[stream]));
  }

  struct Work {
    unsigned char* bytes;
    size_t count;
  };
  static void CUDART_CB Change(void* data) {
    Work* const work = static_cast<Work*>(data);
    for (size_t i = 0; i < work->count; ++i) work->bytes[i] = (unsigned char)(work->bytes[i] * 5 + 1);
    delete work;
  }

  // A kernel, a function of the host, a kernel, all in one stream and on the same bytes; other streams have nothing to
  // do.
  void HostFunction() {
    Range& range = Any();
    if (range.host_attached) return;
    WaitForAll();
    const int stream = ForWork(range);
    size_t begin, bytes;
    Part(range, &begin, &bytes);
    bytes = std::min<size_t>(bytes, 20000);
    Advance<<<2, 64, 0, streams_[stream]>>>(range.memory + begin, unsigned(bytes), 1, 3);
    CUDA_CHECK(cudaLaunchHostFunc(streams_[stream], &Change, new Work{range.memory + begin, bytes}));
    Advance<<<2, 64, 0, streams_[stream]>>>(range.memory + begin, unsigned(bytes), 2, 5);
    LAUNCH_CHECK();
    AdvanceModel(&range.model[begin], unsigned(bytes), 1, 3);
    for (size_t i = begin; i < begin + bytes; ++i) range.model[i] = (unsigned char)(range.model[i] * 5 + 1);
    AdvanceModel(&range.model[begin], unsigned(bytes), 2, 5);
    Uses(range, stream);
    // The function may use managed memory only while no other stream has work.
    WaitForStream(stream);
  }

  const int size_;
  std::mt19937 numbers_;
  cudaStream_t streams_[kStreams];
  bool busy_[kStreams] = {};
  std::vector<std::unique_ptr<Range>> ranges_;
  Range long_;
  unsigned char *device_, *pinned_;
  std::vector<unsigned char> device_model_, pageable_;
  int device_busy_ = kNobody, pinned_busy_ = kNobody;
  FILE* file_;
  int pipe_[2];
};

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {42, 1000});
  if (const char* seed = getenv("CR_TEST_SEED")) g_seed = unsigned(strtoul(seed, nullptr, 10));
  const char* const without = getenv("CR_TEST_WITHOUT");
  g_system_calls = !without || strcmp(without, "system-calls") != 0;
  Random random(options.size);
  for (int step = 0; step < options.steps; ++step) {
    random.Operations(step);
    printf("step %d digest %016llx\n", step, random.Compare());
    fflush(stdout);
  }
  return 0;
}
