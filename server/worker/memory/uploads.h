// SPDX-License-Identifier: Apache-2.0
// The one way from a request's payload to the driver.
//
// A driver may read the source of an asynchronous copy as late as the copy's turn in its stream, pinned or not (CUDA
// driver API, "API synchronization behavior"). A payload lies in the channel's memory, which the client fills again as
// soon as the handler has returned. So a copy's source is memory of the worker's own, lent to the driver until an event
// behind the copy has passed. The channel's memory is never registered with the driver, and a handler cannot get at a
// payload's address (Payload, session.h).
//
// Payloads are put one behind the other into blocks from the staging pool. One event for each block and stream says
// when the block is free again, not one for each copy.
//
// Executor only.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_UPLOADS_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_UPLOADS_H_

#include <cuda.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "server/dispatch/session.h"
#include "server/driver/driver_table.h"
#include "server/worker/memory/staging.h"
#include "server/worker/session/current_context.h"

namespace cuda_remote::server {

class Uploads {
 public:
  // Beyond so many bytes clients that ask (client/memory/upload_limit.h) wait before they send more.
  static constexpr size_t kPlenty = size_t{256} << 20;
  // Most bytes that are lent at a time, however much is sent: beyond that the executor waits for the oldest.
  static constexpr size_t kMostLent = size_t{1} << 30;

  Uploads(const DriverTable& driver, StagingPool* staging) : driver_(driver), staging_(staging) {}
  // What is still lent is never given back: the GPU may be reading it.
  ~Uploads();
  Uploads(const Uploads&) = delete;
  Uploads& operator=(const Uploads&) = delete;

  // Calls enqueue(source), which puts work into `stream` that reads payload.size() bytes at `source`. They stay as they
  // are until that work is done. `context` is current, before and afterwards. Not for a stream that is being captured.
  template <typename Enqueue>
  CUresult Copy(ContextRef context, CUstream stream, const Payload& payload, Enqueue enqueue) {
    char* const source = Take(payload.size());
    if (source == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    payload.CopyTo(source);
    MakeCurrent(driver_, context);
    // Also after an error: it may be an earlier call's.
    const CUresult result = enqueue(static_cast<const void*>(source));
    Used(context, stream);
    return result;
  }

  // Records what is left to record. To be called before a stream is destroyed, and before a capture begins: afterwards
  // streams may not be touched. May change the current context.
  void Settle();

  // Takes back what the GPU has read. May change the current context.
  void Collect();
  bool empty() const { return lent_.empty(); }
  bool plenty() const { return lent_bytes_ > kPlenty; }

  // A context is about to be destroyed, and events in it with it. Returns what is lent to its streams: to be kept until
  // the context is gone.
  std::vector<std::shared_ptr<char>> ContextDies(uint64_t context_id);

 private:
  // A stream that reads from a block, and the event behind that.
  struct Reader {
    ContextRef context;
    CUstream stream;
    CUevent event;
  };
  struct Block {
    std::shared_ptr<char> memory;
    size_t bytes = 0;
    size_t used = 0;
    std::vector<Reader> readers;
  };
  char* Take(size_t bytes);
  void Used(ContextRef context, CUstream stream);
  // Whether all readers are done, or one of them was found busy, whose stream goes to *busy.
  bool IsRead(Block* block, std::vector<CUstream>* busy);
  void AwaitOldest();

  const DriverTable& driver_;
  StagingPool* const staging_;
  Block open_;  // payloads are put here; its readers have no events yet
  std::deque<Block> lent_;
  size_t lent_bytes_ = 0;
};

// Makes an event behind all work that is in `stream` by now, whichever context the stream belongs to. Null on failure,
// after which the stream has been waited for instead.
CUevent EventBehind(const DriverTable& driver, CUstream stream, CUresult* result);

// The same, but also null if the stream has nothing to do. For events that the worker records of its own accord: a
// program that has waited for a stream knows that it is idle, and asks again (OpManagedFetch). An event would make the
// stream busy for a moment. Executor only; the stream's context is current if it is a default stream.
CUevent EventBehindWork(const DriverTable& driver, CUstream stream, CUresult* result);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_UPLOADS_H_
