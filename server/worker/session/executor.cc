// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/executor.h"

#include <chrono>
#include <exception>
#include <new>
#include <system_error>
#include <utility>

#include "proto/api/call_traits.gen.h"
#include "proto/base/clock.h"
#include "proto/codec/operations.gen.h"
#include "proto/logging/log.h"
#include "server/dispatch/malformed.h"
#include "server/worker/session/mirror_requests.h"

namespace cuda_remote::server {
namespace {

constexpr auto kWatchPeriod = std::chrono::milliseconds(2);
constexpr auto kReadAheadPause = std::chrono::microseconds(200);
// Most that is read ahead; an application that is this far ahead of its own host functions waits, as it does natively.
constexpr size_t kMaxKeptBytes = 256 << 20;

bool IsHostFuncDone(const FrameHeader& header) { return header.call == kOpHostFuncDone; }

}  // namespace

Executor::Executor(WorkerSession* session, ServerChannel* channel)
    : session_(session), channel_(channel), watcher_([this] { Watch(); }) {}

Executor::~Executor() {
  stop_ = true;
  session_->host_functions().Interrupt();
  watcher_.join();
}

bool Executor::Execute(const FrameHeader& header, const std::string& message, std::string_view payload) {
  // Nobody else changes these, so they need no locked instruction.
  const uint64_t number = calls_.load(std::memory_order_relaxed) + 1;
  calls_.store(number, std::memory_order_relaxed);
  if (!payload.empty())
    bytes_in_.store(bytes_in_.load(std::memory_order_relaxed) + payload.size(), std::memory_order_relaxed);
  if (!TraitsOf(header.call).Has(kMovesSharedMemory)) executing_.store(number, std::memory_order_release);
  const uint64_t timed_from = session_->timeline().on() ? NowNs() : 0;
  ReplyBuilder reply;
  CUresult result = CUDA_ERROR_NOT_SUPPORTED;
  const Handler handler = FindHandler(header.call);
  if (handler == nullptr) {
    logging::Warn("call {} is unknown to this version of the server", header.call);
    session_->Enter(header);
  } else {
    result = session_->Enter(header);
    if (result == CUDA_SUCCESS) {
      try {
        result = handler(*session_, Request{header, message, Payload(payload)}, &reply);
      } catch (const std::bad_alloc&) {
        logging::Error("out of memory in {}", CallName(header.call));
        result = CUDA_ERROR_OUT_OF_MEMORY;
      } catch (const std::system_error& error) {
        logging::Error("{} needs a thread, which the system does not give: {}", CallName(header.call), error.what());
        reply = ReplyBuilder();
        result = CUDA_ERROR_OUT_OF_MEMORY;
      }
    }
  }
  executing_.store(0, std::memory_order_release);
  if (result == kMalformedRequest) {
    reason_ = std::string("malformed request: ") + CallName(header.call);
    return false;
  }
  if (logging::Enabled(logging::Level::kTrace)) {
    logging::Trace("{} #{} -> {}{}", CallName(header.call), header.sequence, int(result),
                   reply.deferred ? " (waits)" : "");
  }
  if (!reply.deferred) session_->answers().Finish(result, reply);
  if (timed_from != 0) session_->timeline().Add(header.sequence, header.call, uint32_t(result), timed_from);
  return true;
}

std::string Executor::Run() {
  FrameHeader header;
  std::string message;
  PayloadView payload;
  while (true) {
    turn_.Take();
    if (has_read_ahead_) {
      bool ok = true;
      if (ExecuteKept(&ok)) {
        if (!ok) return reason_;
        continue;
      }
      if (ended_) break;
    }
    if (!channel_->Next(&header, &message, &payload)) break;
    turn_.GiveUp();
    if (!Execute(header, message, payload.view())) return reason_;
  }
  turn_.GiveUp();
  return channel_->end_reason();
}

bool Executor::ExecuteKept(bool* ok) {
  if (held_) {
    channel_->Release(hold_);
    held_ = false;
  }
  if (kept_.empty()) {
    has_read_ahead_ = ended_;
    return false;
  }
  const Kept kept = std::move(kept_.front());
  kept_.pop_front();
  kept_bytes_ -= kept.message.size() + kept.payload.size();
  turn_.GiveUp();
  session_->set_executes_kept(true);
  *ok = Execute(kept.header, kept.message, kept.payload);
  session_->set_executes_kept(false);
  return true;
}

void Executor::Watch() {
  uint64_t seen = 0;
  while (!stop_) {
    // Sleeps for as long as no host function waits: a quiet session wakes nobody.
    if (session_->host_functions().waiting() == 0) {
      seen = 0;
      session_->host_functions().AwaitTurn(stop_);
      continue;
    }
    std::this_thread::sleep_for(kWatchPeriod);
    const uint64_t now = executing_.load(std::memory_order_acquire);
    if (now != 0 && now == seen) ReadAhead(now);
    seen = now;
  }
}

// A host function needs the memory that it shares with the GPU, and may be what the executor is stuck for.
bool Executor::AnswerAhead(const FrameHeader& header, const std::string& message, std::string_view payload) {
  // A wrong request is for the executor to complain about.
  if (header.call == kOpMirrorWrite) return WriteMirrored(*session_, payload, false);
  if (header.call == kOpManagedFlush) return FlushManaged(*session_, payload) == CUDA_SUCCESS;
  if (header.call == kOpManagedFetch) return FetchAhead(header, message);
  wire::OpMirrorRead_Request in;
  if (header.call != kOpMirrorRead || !in.Decode(message)) return false;
  wire::OpMirrorRead_Reply out;
  std::string runs, answer;
  ReadMirrored(*session_, in.from, false, &out, &runs);
  out.Encode(&answer);
  channel_->Reply(header.sequence, header.call, CUDA_SUCCESS, 0, answer, runs);
  return true;
}

bool Executor::FetchAhead(const FrameHeader& header, const std::string& message) {
  wire::OpManagedFetch_Request in;
  // Who waits for the GPU waits for what the executor is stuck in.
  if (!in.Decode(message) || in.wait != 0) return false;
  std::string bytes;
  const CUresult result = FetchManaged(*session_, in.address, in.bytes, &bytes);
  // The executor can find another context.
  if (result == CUDA_ERROR_INVALID_CONTEXT) return false;
  std::string answer;
  wire::OpManagedFetch_Reply{}.Encode(&answer);
  channel_->Reply(header.sequence, header.call, result, 0, answer, bytes);
  return true;
}

void Executor::ReadAhead(uint64_t stuck) {
  while (!stop_ && executing_.load(std::memory_order_acquire) == stuck) {
    if (!turn_.TryTake()) continue;  // between two requests, so it is not stuck any more
    // With the turn, the executor stays where it is: in the request, or in front of the next one.
    const bool more = executing_.load(std::memory_order_acquire) == stuck && ReadOneAhead();
    const bool ended = ended_;
    turn_.GiveBack();
    if (ended) return;
    if (!more) std::this_thread::sleep_for(kReadAheadPause);
  }
}

bool Executor::ReadOneAhead() {
  if (ended_ || !channel_->HasNext() || kept_bytes_ > kMaxKeptBytes) return false;
  has_read_ahead_ = true;
  // The stuck call may still be reading its payload.
  if (!held_) {
    hold_ = channel_->Hold();
    held_ = true;
  }
  Kept next;
  PayloadView payload;
  if (!channel_->Next(&next.header, &next.message, &payload)) {
    ended_ = true;
    return false;
  }
  if (IsHostFuncDone(next.header)) {
    wire::OpHostFuncDone_Request done;
    if (done.Decode(next.message)) session_->host_functions().Done(done.turn);
    return true;
  }
  if (AnswerAhead(next.header, next.message, payload.view())) return true;
  next.payload.assign(payload.data, payload.bytes);
  kept_bytes_ += next.message.size() + next.payload.size();
  kept_.push_back(std::move(next));
  return true;
}

}  // namespace cuda_remote::server
