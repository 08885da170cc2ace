#include "client/tools/shared_buffers.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>

#include "client/tools/parallel.h"
#include "proto/codec/operations.gen.h"

namespace cuda_remote::client::tools {
namespace {

constexpr size_t kAllBytes = SharedBuffers::kCount * SharedBuffers::kBytes;
// The end of the addresses that a worker accepts for shared host memory. The job's own begins at the other end, 4 TiB
// away.
constexpr uint64_t kAddress = 0x200000000000 + (uint64_t{1} << 42) - kAllBytes;

// More do not make the kernel's shared memory faster.
constexpr unsigned kMostThreads = 8;

// Names a descriptor. The job numbers its own from 1, and one that a tool sent just before it died must not be meant.
uint64_t NewTag() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return uint64_t{1} << 63 | uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

template <typename Request>
bool Ask(ClientChannel* channel, uint32_t operation, const Request& request) {
  std::string message;
  request.Encode(&message);
  FrameHeader header;
  header.call = operation;
  Reply reply;
  return channel->Call(header, message, {}, nullptr, 0, &reply) == ChannelStatus::kOk && reply.result == 0;
}

bool Unmap(ClientChannel* channel) {
  wire::OpHostUnmap_Request request;
  request.address = kAddress;
  return Ask(channel, kOpHostUnmap, request);
}

}  // namespace

std::unique_ptr<SharedBuffers> SharedBuffers::Make() {
  std::unique_ptr<SharedBuffers> buffers(new SharedBuffers);
  buffers->fd_ = memfd_create("cuda-remote-transfer", MFD_CLOEXEC);
  if (buffers->fd_ < 0 || ftruncate(buffers->fd_, kAllBytes) != 0) return nullptr;
  void* const memory = mmap(nullptr, kAllBytes, PROT_READ | PROT_WRITE, MAP_SHARED, buffers->fd_, 0);
  if (memory == MAP_FAILED) return nullptr;
  buffers->memory_ = static_cast<char*>(memory);
  // All of it now: the first touch of such memory is slow, and a signal where there is none left. (Linux 5.14; before
  // that the channel has to do.)
  std::atomic<bool> there{true};
  InParallel(kCount, kMostThreads, [&](size_t index, bool) {
    if (madvise(buffers->data(index), kBytes, MADV_POPULATE_WRITE) != 0) there = false;
    return there.load();
  });
  if (!there) return nullptr;
  return buffers;
}

SharedBuffers::~SharedBuffers() {
  Detach();
  if (memory_) munmap(memory_, kAllBytes);
  if (fd_ >= 0) close(fd_);
}

uint64_t SharedBuffers::address(size_t index) const { return kAddress + index * kBytes; }

bool SharedBuffers::Attach(ClientChannel* channel) {
  if (attached_ || !channel->welcome().shared_memory) return false;
  // What a tool that died left there.
  Unmap(channel);
  wire::OpHostMap_Request request;
  request.tag = NewTag();
  if (channel->SendFd(request.tag, fd_) != ChannelStatus::kOk) return false;
  request.address = kAddress;
  request.bytes = kAllBytes;
  if (!Ask(channel, kOpHostMap, request)) return false;
  attached_ = channel;
  return true;
}

void SharedBuffers::Detach() {
  // A session that is gone has nothing mapped.
  if (attached_) Unmap(attached_);
  attached_ = nullptr;
}

}  // namespace cuda_remote::client::tools
