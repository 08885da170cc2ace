// SPDX-License-Identifier: Apache-2.0
// One driver call on its way from the application to the server.
//
// Generated bodies of calls use nothing of the client library but this class: it is the admission gate, the session,
// the transport and the recorder behind one face. Hand-written ones (client/calls) use the session's parts too. A Call
// lives on the stack of the thread that made the driver call; it is not shared between threads.
//
// Order of use: Enter, check arguments, append the message to message(), Send or Transact, decode reply(), then
// Created / Destroyed / Modified as the call's semantics row says.
#ifndef CUDA_REMOTE_CLIENT_CORE_CALL_H_
#define CUDA_REMOTE_CLIENT_CORE_CALL_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "client/core/call_info.h"
#include "client/core/thread_state.h"
#include "client/memory/managed_pages.h"
#include "proto/channel/channel_types.h"
#include "proto/frame/frame.h"
#include "proto/frame/handle.h"
#include "replay/log/log.h"

namespace cuda_remote::client {

class Session;

// As the parent of a new handle: the object outlives every context.
inline constexpr uint64_t kNoParent = ~uint64_t(0);

class Call {
 public:
  explicit Call(const CallInfo& info);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Passes the gate (waits while a checkpoint holds it) and makes sure that there is a live session. Returns the error
  // that the driver call must return if not: not initialised, a forked child, the server is lost, no current context
  // (ContextOf::kThread) or one that is gone.
  CUresult Enter();

  // The request's message, empty at first; owned by the Call.
  std::string& message();

  // A buffer for putting the request together; its content is lost when the reply arrives.
  std::string& scratch() { return *reply_; }

  // Bytes that follow the message. Must stay valid until Send or Transact returns. Any length.
  void SetPayload(std::string_view payload);

  // Where the reply's payload goes: at most `capacity` bytes at `out`.
  void SetReplyPayload(void* out, size_t capacity);

  // `context`, or the thread's current one, which many calls mean by none; null if there is none either. Not checked.
  CUcontext OrCurrent(CUcontext context) const {
    return context ? context : reinterpret_cast<CUcontext>(thread_->current_context());
  }

  // The device of the context that the call is made in; -1 if there is none. For a context that is gone: its device if
  // the thread has asked about it before, else -1. May take the lock of RecordedObjects, so not under that or a lock
  // that comes after it.
  int device() {
    const uint64_t context = thread_->current_context();
    return thread_->device_context == context ? thread_->device : FindDevice(context);
  }

  // Whether `handle` is a live virtual handle of `kind`. If it is: Borrow.
  bool Valid(Kind kind, const void* handle);
  bool Valid(Kind kind, uint64_t handle);

  // The call names this object, whose handle is valid: a ContextOf::kObject call on a thread without a current context
  // is made in the object's context from here on. It is the thread's current one for the client library until the call
  // ends. Does nothing for objects of no context, and for all but the first of a context. Locks RecordedObjects.
  void Borrow(uint64_t handle) {
    if (borrows_ && !thread_->borrowed_context) BorrowFrom(handle);
  }

  // A ContextOf::kObject call has named no object of a context so far, and the thread has no context either.
  bool WithoutContext() const { return borrows_ && !thread_->borrowed_context; }

  // The stream as it goes on the wire: 0 (NULL), 1 (legacy) or a virtual handle. The per-thread default stream - asked
  // for by value, or by NULL through an entry point of the _ptsz/_ptds family - becomes this thread's hidden stream.
  // Returns CUDA_ERROR_INVALID_HANDLE for an unknown stream, and CUDA_ERROR_INVALID_CONTEXT for a default stream on a
  // thread without a current context. A stream that the application made: Borrow.
  CUresult StreamToWire(CUstream stream, bool per_thread_default, uint64_t* wire);

  // Chooses a virtual handle for an object that this call creates. `parent` (a virtual handle, 0: the current context,
  // kNoParent: none) is the object that it dies with. Given back by the destructor unless Created keeps it. 0 if the
  // table is full.
  uint64_t NewHandle(Kind kind, uint64_t parent);

  // Send need not have the request executed at once: see ClientChannel::Send. (Some kinds of requests never need that.)
  void SendQuietly() { quiet_ = true; }

  // Before a request is sent that launches a kernel: notes that the GPU is at work, where somebody looks for the host's
  // writes beside it (ManagedMirror::WatchShared). Requests that launch graphs need no call of this.
  void KernelsBegin();

  // Sends the request without waiting (waits all the same under CUDA_REMOTE_SYNC=1). Returns CUDA_SUCCESS or what
  // prevented the sending: CUDA_ERROR_NOT_SUPPORTED for a request that is longer than the channel takes.
  CUresult Send();

  // Sends the request and waits for the reply. Returns the call's own result - or, from a call that synchronises and
  // succeeds itself, the pending error of an earlier fire-and-forget call. Other calls leave that error pending, so a
  // call that made or destroyed something never fails for another's sake. reply() and reply_payload_bytes() are valid
  // afterwards. A request that is too long: as Send.
  CUresult Transact();

  // Transact for a question whose answer stays true (a row's `cached`): answered from what is known if it can be.
  // `function`: the function or kernel that it is about, since what was set of that matters, too; 0: none.
  CUresult Recall(uint64_t function = 0);

  // Transact in two halves, so that several pieces of a copy can be on their way at once. Begin sends message() and
  // returns what Finish takes (0: the channel failed); the reply's payload goes to `out`.
  uint64_t Begin(void* out, size_t bytes);
  CUresult Finish(uint64_t sequence);

  std::string_view reply() const;
  size_t reply_payload_bytes() const;

  // Recording. `object` must be one from NewHandle, or an address object. `depends_on` names what it needs besides its
  // parent; it is removed from the log with any of them. The record is the request just sent and its reply.
  // Graphs and executables among these were copied as they are now: they may be destroyed, and changed, without harm to
  // the object; the log keeps them for as long as it needs them.
  void Created(replay::ObjectKey object, std::initializer_list<replay::ObjectKey> depends_on = {});
  // Keeps a new handle without a record: of an object that cannot be alive at a checkpoint.
  void Keep(uint64_t handle);
  // The request gave handles to the graph of a capture in progress, or to its nodes: it is part of the capture's
  // record.
  void NamedInCapture(uint64_t stream, uint64_t graph);
  // Removes the object and its descendants from the log, and frees their virtual handles.
  void Destroyed(replay::ObjectKey object);
  // Records the request as a modification of `object`; the last one with the same call and `key` wins. `depends_on` as
  // in Created: a modification that cannot be made again takes its object's record with it only if that is a graph's.
  // A node among these was copied as it is now, like graphs and executables.
  void Modified(replay::ObjectKey object, uint64_t key, std::initializer_list<replay::ObjectKey> depends_on = {});
  // The request took back what Modified recorded for a request of the call `id` with the same `key`: the log forgets
  // it.
  void Undone(replay::ObjectKey object, uint32_t id, uint64_t key);

  // Names this request's own call id, where one driver call makes several kinds of requests.
  void set_id(uint32_t id) { header_.call = id; }

  // The header of the request, for those who put requests of this call into the channel themselves.
  const FrameHeader& header() const { return header_; }

  Session& session() { return *session_; }
  ThreadState& thread() { return *thread_; }
  const CallInfo& info() const { return info_; }

  // Logs the call's name and reason once and counts it. Returns CUDA_ERROR_NOT_SUPPORTED. Needs no Enter.
  static CUresult Unsupported(const char* name, const char* reason);

  // DriverExecs::Find; `driver_handle` itself without a session.
  static uint64_t ExecOfDriver(uint64_t driver_handle);

 private:
  friend class Session;
  void BorrowFrom(uint64_t handle);
  int FindDevice(uint64_t context);
  // The error of a request that the channel does not take. It is this call's alone: the session goes on.
  CUresult TooLong() const;
  // Remembers of a new event whether records of it may be sent quietly. Under the lock of RecordedObjects.
  void NoteEventLocked(uint64_t event);
  // Notes the request if it is part of a capture in progress.
  void NoteCaptured();
  // The same for a request about a graph: true if it belongs to a capture's record and not to the log. Under the
  // lock of RecordedObjects.
  bool NoteGraphLocked(replay::ObjectKey object, const std::vector<replay::ObjectKey>& needs,
                       const std::vector<uint64_t>& retains);
  // Sends what the host has changed in managed memory, before work that may read it; and fetches what the GPU has
  // changed, after work that was waited for. Only what the server does not share.
  ChannelStatus HandOverManaged(bool ends_later);
  void ShowManaged();
  // Managed memory must not be touched under the channel's locks (managed_pages.h): it goes by a buffer.
  struct ManagedBuffers;
  struct ManagedReply;
  void CopyManagedPayload();
  ManagedReply* ArriveFor(void* out, size_t bytes);  // null: it may arrive where it belongs
  void DeliverManaged(uint64_t sequence, size_t bytes);
  // Whether it is memory that belongs to no context, as CUDA says of cuMemMap, cuMemAllocAsync and
  // cuMemAllocFromPoolAsync: which one was current when it was made means nothing. Takes KnownMemory's lock.
  bool OutlivesContexts(replay::ObjectKey object);
  // The header to record for `object`, with what the record depends on besides. Under the lock of RecordedObjects.
  FrameHeader RecordedHeaderLocked(replay::ObjectKey object, std::vector<replay::ObjectKey>* needs);

  const CallInfo& info_;
  Session* session_ = nullptr;
  ThreadState* thread_ = nullptr;
  std::string* message_ = nullptr;
  std::string* reply_ = nullptr;
  std::string_view payload_;
  std::unique_ptr<ManagedBuffers> managed_buffers_;   // for calls that send from, or receive into, managed memory
  std::unique_ptr<ManagedPages::Expected> expected_;  // of calls that wait for the GPU
  void* reply_payload_ = nullptr;
  size_t reply_payload_capacity_ = 0;
  size_t reply_payload_bytes_ = 0;
  FrameHeader header_;
  uint64_t stream_ = 0;  // the last one that StreamToWire translated
  uint64_t new_handles_[8] = {};
  int new_handle_count_ = 0;
  bool entered_ = false;
  bool borrows_ = false;  // ContextOf::kObject, and no context was current
  bool show_managed_ = false;
  bool quiet_ = false;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_CALL_H_
