// SPDX-License-Identifier: Apache-2.0
#include "client/calls/staged_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// To the host: a shorter reply is as fast through the channel.
constexpr size_t kLeastToHost = 16 << 10;
// To the device: copies through the channel need not wait for the GPU, so only the threads' bandwidth makes up for it.
constexpr size_t kLeastToDevice = 16 << 20;
// From this size on, other threads are worth waking.
constexpr size_t kLeastForThreads = 512 << 10;
constexpr size_t kLeastPiece = 128 << 10;
// Of a request for a piece: five integers and a truth value.
constexpr size_t kMostMessageBytes = 128;

// One copy, shared by its threads.
struct Copy {
  Session* session;
  FrameHeader header;
  bool to_host;
  char* host;
  uint64_t device;
  size_t bytes;
  uint64_t stream;
  size_t piece;
  size_t slots;  // of each thread
  std::atomic<size_t> next{0};
  std::atomic<CUresult> error{CUDA_SUCCESS};

  void Fail(CUresult result) {
    CUresult none = CUDA_SUCCESS;
    error.compare_exchange_strong(none, result);
  }
};

// A piece that the GPU works on.
struct Slot {
  uint64_t sequence;
  size_t offset;
  size_t bytes;
};

uint64_t Begin(const Copy& copy, const Slot& slot, char* buffer, std::string* message) {
  wire::cuMemcpyAsync_Request request;
  const uint64_t device = copy.device + slot.offset;
  request.dst = copy.to_host ? reinterpret_cast<uint64_t>(buffer) : device;
  request.src = copy.to_host ? device : reinterpret_cast<uint64_t>(buffer);
  request.bytes = slot.bytes;
  request.stream = copy.stream;
  request.blocking = true;
  message->clear();
  request.Encode(message);
  return copy.session->channel().Begin(copy.header, *message, {}, nullptr, 0);
}

CUresult Finish(const Copy& copy, const Slot& slot) {
  Reply reply;
  const ChannelStatus status = copy.session->channel().Wait(slot.sequence, &reply);
  if (status != ChannelStatus::kOk) return copy.session->Lose(status);
  if (reply.pending_error != CUDA_SUCCESS) copy.session->SetPendingError(CUresult(reply.pending_error));
  return CUresult(reply.result);
}

// One thread's part: takes pieces as it gets on, and has a few under way at a time.
void Share(Copy* copy, int thread) {
  Slot slots[Staging::kPieces];
  // Memory is taken before anything is under way: nothing below may leave the GPU at work on the buffers.
  std::string message;
  message.reserve(kMostMessageBytes);
  size_t oldest = 0, used = 0;
  bool more = true;
  while (more || used > 0) {
    if (more && used < copy->slots) {
      const size_t offset = copy->next.fetch_add(copy->piece, std::memory_order_relaxed);
      more = offset < copy->bytes && copy->error.load(std::memory_order_relaxed) == CUDA_SUCCESS;
      if (!more) continue;
      const size_t index = (oldest + used) % copy->slots;
      char* const buffer = copy->session->memory().staging().piece(size_t(thread) * copy->slots + index);
      Slot& slot = slots[index];
      slot.offset = offset;
      slot.bytes = std::min(copy->piece, copy->bytes - offset);
      if (!copy->to_host) memcpy(buffer, copy->host + offset, slot.bytes);
      slot.sequence = Begin(*copy, slot, buffer, &message);
      if (slot.sequence == 0) {
        copy->Fail(copy->session->Lose(ChannelStatus::kClosed));
        more = false;
        continue;
      }
      ++used;
      continue;
    }
    const Slot& slot = slots[oldest];
    const char* const buffer = copy->session->memory().staging().piece(size_t(thread) * copy->slots + oldest);
    // Also after an error: the GPU must be done with the buffers.
    const CUresult result = Finish(*copy, slot);
    if (result != CUDA_SUCCESS) {
      copy->Fail(result);
    } else if (copy->to_host) {
      memcpy(copy->host + slot.offset, buffer, slot.bytes);
    }
    oldest = (oldest + 1) % copy->slots;
    --used;
  }
}

bool Run(Call& call, Copy* copy, CUresult* result) {
  Session& session = call.session();
  Staging& staging = session.memory().staging();
  // In a stream that is being captured, the buffers would become part of the graph.
  if (!session.shared_memory() || session.graphs().captures().active()) return false;
  if (!staging.Acquire(copy->bytes)) return false;
  const int threads = copy->bytes >= kLeastForThreads ? staging.threads() : 1;
  call.set_id(kCall_cuMemcpyAsync);
  copy->session = &session;
  copy->header = call.header();
  copy->slots = Staging::kPieces / size_t(threads);
  // Pieces small enough that the GPU and all threads get to work soon.
  copy->piece = std::clamp(copy->bytes / (4 * size_t(threads)), kLeastPiece, Staging::kPieceBytes);
  staging.Run(threads, [copy](int thread) {
    try {
      Share(copy, thread);
    } catch (...) {  // memory for a message
      copy->Fail(CUDA_ERROR_OUT_OF_MEMORY);
    }
  });
  staging.Release();
  session.completions().WorkSent();
  *result = copy->error.load();
  if (*result == CUDA_SUCCESS && copy->to_host) *result = session.TakePendingError();
  return true;
}

}  // namespace

bool StagedCopyToHost(Call& call, void* dst, CUdeviceptr src, size_t bytes, uint64_t stream, CUresult* result) {
  if (bytes < kLeastToHost) return false;
  Copy copy{};
  copy.to_host = true;
  copy.host = static_cast<char*>(dst);
  copy.device = src;
  copy.bytes = bytes;
  copy.stream = stream;
  return Run(call, &copy, result);
}

bool StagedCopyToDevice(Call& call, CUdeviceptr dst, const void* src, size_t bytes, uint64_t stream, CUresult* result) {
  if (bytes < kLeastToDevice || call.session().memory().staging().threads() == 1) return false;
  Copy copy{};
  copy.to_host = false;
  copy.host = const_cast<char*>(static_cast<const char*>(src));
  copy.device = dst;
  copy.bytes = bytes;
  copy.stream = stream;
  return Run(call, &copy, result);
}

}  // namespace cuda_remote::client
