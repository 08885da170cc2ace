// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/answers.h"

#include <new>
#include <thread>
#include <utility>

#include "proto/api/call_ids.gen.h"
#include "proto/base/clock.h"
#include "proto/logging/log.h"
#include "server/worker/session/failures.h"

namespace cuda_remote::server {
namespace {

// Threads that may wait for the GPU at the same time. What a client with more waits has beyond that, one thread polls.
constexpr size_t kMaxWaiters = 256;
constexpr size_t kSideWaiters = 32;

// How long the executor itself waits before it hands a wait over. On a small machine the time is better left to others.
std::chrono::nanoseconds SpinLimit() {
  const unsigned cores = std::thread::hardware_concurrency();
  return std::chrono::microseconds(cores <= 2 ? 0 : cores <= 4 ? 20 : 60);
}

}  // namespace

Answers::Answers(const DriverTable& driver, const Contexts& contexts, ServerChannel* channel, OutputCapture* output,
                 Timeline* timeline, const std::function<void()>& begin_thread)
    : driver_(driver),
      contexts_(contexts),
      channel_(channel),
      output_(output),
      timeline_(timeline),
      spin_limit_(SpinLimit()),
      waiters_(kMaxWaiters, begin_thread),
      side_waiters_(kSideWaiters, begin_thread),
      stream_waiter_(1, begin_thread) {}

void Answers::Finish(CUresult result, const ReplyBuilder& reply) {
  if (flush_) FlushOutput();
  Send(request_, result, reply.message, reply.payload);
}

void Answers::Send(const FrameHeader& header, CUresult result, std::string_view message, std::string_view payload) {
  if (result != CUDA_SUCCESS) NoteResult(result);
  if (header.flags & kFlagNoReply) {
    if (result != CUDA_SUCCESS) SetPendingError(result);
    return;
  }
  bytes_out_.fetch_add(payload.size(), std::memory_order_relaxed);
  const uint32_t pending = pending_error_.exchange(0, std::memory_order_acq_rel);
  const ChannelStatus status =
      channel_->Reply(header.sequence, header.call, uint32_t(result), pending, message, payload);
  if (status == ChannelStatus::kTooLarge) {
    logging::Error("the reply to call {} is too large ({} bytes)", header.call, message.size());
    channel_->Reply(header.sequence, header.call, CUDA_ERROR_UNKNOWN, 0, {}, std::string_view());
  }
}

void Answers::SetPendingError(CUresult result) {
  uint32_t none = 0;
  pending_error_.compare_exchange_strong(none, uint32_t(result), std::memory_order_acq_rel);
}

void Answers::FlushOutput() {
  if (output_ == nullptr) return;
  output_->Flush([this](std::string_view bytes, bool to_stderr) { channel_->Output(kOpStdout, bytes, to_stderr); });
}

void Answers::DeferIn(ContextRef context, ReplyBuilder* reply, Wait wait, std::function<bool()> ready) {
  std::function<bool()> asked;
  if (ready) {
    asked = [this, context, ready = std::move(ready)] {
      return MakeCurrent(driver_, context) != CUDA_SUCCESS || ready();
    };
  }
  waiters_.Run(Deferrable(context, reply, std::move(wait)), std::move(asked));
}

void Answers::DeferSide(ContextRef context, ReplyBuilder* reply, Wait wait) {
  side_waiters_.Run(Deferrable(context, reply, std::move(wait)));
}

void Answers::DeferBehindAll(ReplyBuilder* reply, Wait wait) {
  waiters_.RunBehind(Deferrable({}, reply, std::move(wait)));
}

void Answers::DeferInStream(CUstream stream, ReplyBuilder* reply, Wait wait, std::function<bool()> ready) {
  if (stream_waits_.load(std::memory_order_acquire) != 0 && waited_stream_ != stream) {
    Defer(reply, std::move(wait), std::move(ready));
    return;
  }
  waited_stream_ = stream;
  stream_waits_.fetch_add(1, std::memory_order_acq_rel);
  stream_waiter_.Run(Deferrable(contexts_.current_ref(), reply, [this, wait = std::move(wait)](Answer* answer) {
    struct Leave {
      std::atomic<int>* waits;
      ~Leave() { waits->fetch_sub(1, std::memory_order_acq_rel); }
    } leave{&stream_waits_};
    return wait(answer);
  }));
}

std::function<void()> Answers::Deferrable(ContextRef context, ReplyBuilder* reply, Wait wait) {
  reply->deferred = true;
  const FrameHeader header = request_;
  return [this, header, context, wait = std::move(wait)] {
    const uint64_t timed_from = timeline_->on() ? NowNs() : 0;
    Answer answer;
    CUresult result = MakeCurrent(driver_, context);
    if (result == CUDA_SUCCESS) {
      try {
        result = wait(&answer);
      } catch (const std::bad_alloc&) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
      }
    }
    FlushOutput();
    // Before the answer: the client that has it may ask for the timeline at once.
    if (timed_from != 0) timeline_->Add(header.sequence, header.call, uint32_t(result), timed_from);
    Send(header, result, answer.message, answer.payload.empty() ? answer.view : std::string_view(answer.payload));
  };
}

bool Answers::SpinUntil(const std::function<bool()>& ready) {
  if (ready()) {
    flush_ = true;
    return true;
  }
  if (spin_limit_.count() == 0) return false;
  const auto end = Now() + spin_limit_;
  while (!channel_->HasNext() && Now() < end) {
    if (!ready()) continue;
    flush_ = true;
    return true;
  }
  return false;
}

}  // namespace cuda_remote::server
