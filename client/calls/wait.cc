// SPDX-License-Identifier: Apache-2.0
// Recording events, and asking whether events and streams are done. What is known to be done is answered here
// (client/core/completion.h); everything else is asked of the server.

#include <cuda.h>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// A question about an event or a stream: `object` is where the answer is remembered.
struct Question {
  Kind kind = Kind::kNone;
  uint64_t object = 0;
  uint64_t stamp = 0;
  bool waits = false;  // for device output too, so that an answer to a query is not enough
};

// True if the answer is known; fills in the stamp that a new answer counts from. False and no stamp for a dead handle.
bool Known(Session& session, Question* question) {
  ReaderLock lock(&session.objects().mutex());
  const Object* const object = session.objects().handles().Find(question->kind, question->object);
  if (!object || object->between_processes) return false;
  const Completions& completions = session.completions();
  question->stamp = question->kind == Kind::kEvent ? completions.EventStamp(question->object)
                                                   : completions.WorkStamp(session.channel().last_marked());
  if (session.settings().sync) return false;
  return (question->waits ? object->synchronized_at : object->done_at).load(std::memory_order_relaxed) ==
         question->stamp;
}

// What is known to be done need not be asked about.
CUresult Done(Session& session, const Question& question) {
  if (question.waits) session.memory().NoteWaited();
  return session.TakePendingError();
}

// Asks the server with the call's message; an answer "done" is remembered.
CUresult Ask(Call& call, const Question& question) {
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  ReaderLock lock(&session.objects().mutex());
  if (Object* const object = session.objects().handles().Find(question.kind, question.object)) {
    object->done_at.store(question.stamp, std::memory_order_relaxed);
    if (question.waits) object->synchronized_at.store(question.stamp, std::memory_order_relaxed);
  }
  return result;
}

template <typename Request>
CUresult OfEvent(const CallInfo& info, CUevent event, bool waits) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Question question{Kind::kEvent, reinterpret_cast<uint64_t>(event), 0, waits};
  if (!call.Valid(question.kind, question.object)) return CUDA_ERROR_INVALID_HANDLE;
  if (Known(call.session(), &question)) return Done(call.session(), question);
  Request request;
  request.hEvent = question.object;
  request.Encode(&call.message());
  return Ask(call, question);
}

template <typename Request>
CUresult OfStream(const CallInfo& info, CUstream stream, bool per_thread, bool waits) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Request request;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &request.hStream); result != CUDA_SUCCESS) {
    return result;
  }
  // The default stream is each context's own.
  Question question{Kind::kStream, request.hStream, 0, waits};
  if (KindOf(request.hStream) != Kind::kStream) {
    question.kind = Kind::kContext;
    question.object = call.thread().current_context();
  }
  if (Known(call.session(), &question)) return Done(call.session(), question);
  request.Encode(&call.message());
  return Ask(call, question);
}

// Whether event and stream are of different contexts. The driver refuses to record it then, and only a caller that
// waits hears of that from this call.
bool OfTwoContexts(Call& call, uint64_t event, uint64_t stream) {
  RecordedObjects& objects = call.session().objects();
  if (!objects.several_contexts()) return false;
  const uint64_t of_event = objects.WholeContextOf(event);
  const uint64_t place = KindOf(stream) == Kind::kStream ? stream : call.thread().current_context();
  return of_event != 0 && of_event != objects.WholeContextOf(place);
}

// The wire's request of either way to record.
template <typename Request>
CUresult Record(const CallInfo& info, CUevent event, CUstream stream, bool per_thread, Request request) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  request.hEvent = reinterpret_cast<uint64_t>(event);
  if (!call.Valid(Kind::kEvent, event)) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &request.hStream); result != CUDA_SUCCESS) {
    return result;
  }
  request.Encode(&call.message());
  if (call.session().objects().RecordsQuietly(request.hEvent)) call.SendQuietly();
  const CUresult result = OfTwoContexts(call, request.hEvent, request.hStream) ? call.Transact() : call.Send();
  call.session().completions().EventRecorded(request.hEvent);
  return result;
}

}  // namespace

CUresult Custom_cuEventRecord(CUevent hEvent, CUstream hStream, bool per_thread) {
  return Record(info::k_cuEventRecord, hEvent, hStream, per_thread, wire::cuEventRecord_Request());
}

CUresult Custom_cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags, bool per_thread) {
  wire::cuEventRecordWithFlags_Request request;
  request.flags = flags;
  return Record(info::k_cuEventRecordWithFlags, hEvent, hStream, per_thread, request);
}

CUresult Custom_cuEventQuery(CUevent hEvent) {
  return OfEvent<wire::cuEventQuery_Request>(info::k_cuEventQuery, hEvent, false);
}

CUresult Custom_cuEventSynchronize(CUevent hEvent) {
  return OfEvent<wire::cuEventSynchronize_Request>(info::k_cuEventSynchronize, hEvent, true);
}

CUresult Custom_cuStreamQuery(CUstream hStream, bool per_thread) {
  return OfStream<wire::cuStreamQuery_Request>(info::k_cuStreamQuery, hStream, per_thread, false);
}

CUresult Custom_cuStreamSynchronize(CUstream hStream, bool per_thread) {
  return OfStream<wire::cuStreamSynchronize_Request>(info::k_cuStreamSynchronize, hStream, per_thread, true);
}

}  // namespace cuda_remote::client
