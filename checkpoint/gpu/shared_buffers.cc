// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/shared_buffers.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "checkpoint/gpu/parallel.h"
#include "proto/base/clock.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/job_addresses.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr size_t kAllBytes = SharedBuffers::kCount * SharedBuffers::kBytes;
constexpr size_t kMapped = kAllBytes + SharedBuffers::kBytes;
// The end of the addresses for the job's host memory.
constexpr uint64_t kAddress = driverabi::kManagedBase - kAllBytes;

// Buffers that one thread makes present, and how many threads: more do not make the kernel's shared memory faster.
constexpr size_t kShare = 4;
constexpr unsigned kMostThreads = 8;
static_assert(SharedBuffers::kCount % kShare == 0);

// Asks for a huge page for each piece of kBytes (Linux 6.1, whatever the system's setting for shared memory is). One
// takes 0.2 to 0.5 ms; where memory is in pieces it takes many times that, and small pages are the better way.
constexpr int kCollapse = 25;  // MADV_COLLAPSE
constexpr int64_t kQuickNs = 3000000;

// Names a descriptor. The job numbers its own from 1, and one that a tool sent just before it died must not be meant.
uint64_t NewTag() { return uint64_t{1} << 63 | uint64_t(NowNs()); }

// Makes all pages of the range there, a multiple of kBytes and so aligned: huge ones if they are to be had quickly.
// They are made, mapped by the worker, registered with the driver and given back ten times as fast as small ones.
bool MakePresent(char* memory, size_t bytes) {
  const int64_t begin = ThreadTimeNs();
  // The kernel wants to see one page there.
  for (size_t at = 0; at < bytes; at += SharedBuffers::kBytes) madvise(memory + at, 1, MADV_POPULATE_WRITE);
  const bool quick = madvise(memory, SharedBuffers::kBytes, kCollapse) == 0 && ThreadTimeNs() - begin < kQuickNs;
  if (quick) madvise(memory + SharedBuffers::kBytes, bytes - SharedBuffers::kBytes, kCollapse);
  return madvise(memory, bytes, MADV_POPULATE_WRITE) == 0;
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
  buffers->fd_.Reset(memfd_create("cuda-remote-transfer", MFD_CLOEXEC));
  if (!buffers->fd_.ok() || ftruncate(buffers->fd_.get(), kAllBytes) != 0) return nullptr;
  // Huge pages need an address that is aligned as they are.
  buffers->mapping_ = mmap(nullptr, kMapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (buffers->mapping_ == MAP_FAILED) {
    buffers->mapping_ = nullptr;
    return nullptr;
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(buffers->mapping_);
  char* const memory = reinterpret_cast<char*>((start + kBytes - 1) & ~uintptr_t(kBytes - 1));
  if (mmap(memory, kAllBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, buffers->fd_.get(), 0) == MAP_FAILED) {
    return nullptr;
  }
  buffers->memory_ = memory;
  // All of it now: the first touch of such memory is slow, and a signal where there is none left. (Linux 5.14; before
  // that the channel has to do.)
  std::atomic<bool> there{true};
  InParallel(kCount / kShare, kMostThreads, [&](size_t share, bool) {
    if (!MakePresent(buffers->data(share * kShare), kShare * kBytes)) there = false;
    return there.load();
  });
  if (!there) return nullptr;
  return buffers;
}

SharedBuffers::~SharedBuffers() {
  Detach();
  if (mapping_) munmap(mapping_, kMapped);
}

uint64_t SharedBuffers::address(size_t index) const { return kAddress + index * kBytes; }

bool SharedBuffers::Attach(ClientChannel* channel) {
  const bool again = std::find(attached_.begin(), attached_.end(), channel) != attached_.end();
  if (again || attached_.size() >= 2 || !channel->welcome().shared_memory) return false;
  // What a tool that died left there.
  Unmap(channel);
  wire::OpHostMap_Request request;
  request.tag = NewTag();
  if (channel->SendFd(request.tag, fd_.get()) != ChannelStatus::kOk) return false;
  request.address = kAddress;
  request.bytes = kAllBytes;
  if (!Ask(channel, kOpHostMap, request)) return false;
  attached_.push_back(channel);
  return true;
}

void SharedBuffers::MapRequest(agent::SideRequest* request) const {
  request->operation = kOpHostMap;
  request->tag = NewTag();
  request->fd = fd_.get();
  wire::OpHostMap_Request map;
  map.tag = request->tag;
  map.address = kAddress;
  map.bytes = kAllBytes;
  map.Encode(&request->message);
}

void SharedBuffers::Detach() {
  // A session that is gone has nothing mapped.
  for (ClientChannel* const channel : attached_) Unmap(channel);
  attached_.clear();
}

}  // namespace cuda_remote::checkpoint
