// SPDX-License-Identifier: Apache-2.0
// Answers to a session's requests: at once, or when a wait for the GPU has ended, which another thread does.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_ANSWERS_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_ANSWERS_H_

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "proto/channel/server_channel.h"
#include "proto/frame/frame.h"
#include "server/dispatch/session.h"
#include "server/driver/driver_table.h"
#include "server/worker/session/contexts.h"
#include "server/worker/session/output_capture.h"
#include "server/worker/session/timeline.h"
#include "server/worker/session/waiters.h"

namespace cuda_remote::server {

// What a deferred call answers besides its result.
struct Answer {
  std::string message;
  std::string payload;
  std::string_view view;         // payload that lies elsewhere; used if `payload` is empty
  std::shared_ptr<void> keeper;  // keeps that memory until the reply is sent
};

// The executor's own, but for what says that any thread may use it.
class Answers {
 public:
  // `output`: null where nothing captures what kernels print. `begin_thread` is called in each thread that waits. All
  // that is pointed to outlives this object; its destructor waits for the waits.
  Answers(const DriverTable& driver, const Contexts& contexts, ServerChannel* channel, OutputCapture* output,
          Timeline* timeline, const std::function<void()>& begin_thread);

  // The request that is executed from now on.
  void Begin(const FrameHeader& header) {
    request_ = header;
    flush_ = false;
  }
  const FrameHeader& request() const { return request_; }
  // From now on nobody waits for an answer to it, as in a request inside another; until Resume puts the outer one back.
  void Silence() { request_.flags |= kFlagNoReply; }
  void Resume(const FrameHeader& outer) { request_ = outer; }
  // Answers the request, or notes its failure if nobody waits for it.
  void Finish(CUresult result, const ReplyBuilder& reply);

  // Runs `wait` with the current context, and answers with what it returns; the executor goes on. `wait` must not touch
  // the session's members other than those that say that they may be used from any thread. `ready`, for waits that a
  // program may have any number of: whether `wait` would return at once (Waiters::Run); asked in the same context.
  using Wait = std::function<CUresult(Answer*)>;
  void Defer(ReplyBuilder* reply, Wait wait, std::function<bool()> ready = nullptr) {
    DeferIn(contexts_.current_ref(), reply, std::move(wait), std::move(ready));
  }
  void DeferIn(ContextRef context, ReplyBuilder* reply, Wait wait, std::function<bool()> ready = nullptr);
  // For the waits of side_work.h, which depend on nothing that other waits do.
  void DeferSide(ContextRef context, ReplyBuilder* reply, Wait wait);
  // In no context, and begun when all that these two have deferred before has ended, also what nobody waits for.
  void DeferBehindAll(ReplyBuilder* reply, Wait wait);
  // For waits behind work in `stream`, which end in the order in which they were given: one thread does them one after
  // the other, which is faster than many that look at the same stream. While it is busy with another stream, as Defer.
  void DeferInStream(CUstream stream, ReplyBuilder* reply, Wait wait, std::function<bool()> ready);

  // Asks `ready` for a short while whether the GPU is done, as long as no other request is waiting. True once it is:
  // the handler answers at once, which is faster than handing the wait over.
  bool SpinUntil(const std::function<bool()>& ready);
  // The reply of this request must follow the device output that exists by now.
  void FlushBeforeReply() { flush_ = true; }

  // Sends output that has appeared. Any thread.
  void FlushOutput();
  // Remembers the first failure of a call that nobody waited for. Any thread.
  void SetPendingError(CUresult result);

  // Any thread.
  uint64_t payload_bytes_out() const { return bytes_out_.load(std::memory_order_relaxed); }

 private:
  std::function<void()> Deferrable(ContextRef context, ReplyBuilder* reply, Wait wait);
  void Send(const FrameHeader& header, CUresult result, std::string_view message, std::string_view payload);

  const DriverTable& driver_;
  const Contexts& contexts_;
  ServerChannel* const channel_;
  OutputCapture* const output_;
  Timeline* const timeline_;
  const std::chrono::nanoseconds spin_limit_;
  FrameHeader request_;
  bool flush_ = false;
  std::atomic<uint32_t> pending_error_{0};
  std::atomic<uint64_t> bytes_out_{0};
  // The thread of DeferInStream serves this stream, and has so many waits.
  CUstream waited_stream_ = nullptr;
  std::atomic<int> stream_waits_{0};
  // These end first: what they wait for uses the others.
  Waiters waiters_, side_waiters_, stream_waiter_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_ANSWERS_H_
