// SPDX-License-Identifier: Apache-2.0
// Events: recording them, asking whether they are done, and the times between them, also where the job has moved to
// another server in between.

#include <cuda.h>

#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/wait.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// What the server's driver says. Both versions of the call mean the same and have the same message.
CUresult Ask(const CallInfo& info, uint64_t start, uint64_t end, float* milliseconds) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kEvent, start) || !call.Valid(Kind::kEvent, end)) return CUDA_ERROR_INVALID_HANDLE;
  wire::cuEventElapsedTime_Request request;
  request.hStart = start;
  request.hEnd = end;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuEventElapsedTime_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  *milliseconds = reply.pMilliseconds;
  return CUDA_SUCCESS;
}

// Places an event on the session's time line. Events of the time before the move are known from the lock; the others
// completed on this server some time ago.
CUresult Place(const CallInfo& info, uint64_t event, double* microseconds) {
  float none;
  const CUresult result = Ask(info, event, event, &none);
  if (result == CUDA_ERROR_INVALID_HANDLE) {
    return Session::Get()->event_times().Before(event, microseconds) ? CUDA_SUCCESS : result;
  }
  if (result != CUDA_SUCCESS) return result;
  Call call(info);
  if (const CUresult error = call.Enter(); error != CUDA_SUCCESS) return error;
  Session& session = call.session();
  uint64_t context = 0;
  {
    ReaderLock lock(&session.objects().mutex());
    if (const Object* const object = session.objects().handles().Find(Kind::kEvent, event)) context = object->parent;
  }
  std::vector<double> ages;
  if (const CUresult error = session.requests().AskEventAges(context, {event}, &ages); error != CUDA_SUCCESS)
    return error;
  if (ages[0] < 0) return CUDA_ERROR_INVALID_HANDLE;
  *microseconds = session.event_times().Now() - ages[0];
  return CUDA_SUCCESS;
}

CUresult Elapsed(const CallInfo& info, float* milliseconds, CUevent start, CUevent end) {
  if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
  const auto from = reinterpret_cast<uint64_t>(start), to = reinterpret_cast<uint64_t>(end);
  const CUresult result = Ask(info, from, to, milliseconds);
  if (result != CUDA_ERROR_INVALID_HANDLE) return result;
  // Recorded before the job moved to this server? Then the server does not know; the time in between, when the job did
  // not exist, does not count.
  double before, after;
  const EventTimes& times = Session::Get()->event_times();
  if (!times.Before(from, &before) && !times.Before(to, &after)) return result;
  if (const CUresult error = Place(info, from, &before); error != CUDA_SUCCESS) return error;
  if (const CUresult error = Place(info, to, &after); error != CUDA_SUCCESS) return error;
  *milliseconds = float((after - before) / 1000);
  return CUDA_SUCCESS;
}

template <typename Request>
CUresult OfEvent(const CallInfo& info, CUevent event, bool waits) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Question question{Kind::kEvent, reinterpret_cast<uint64_t>(event), 0, waits};
  if (!call.Valid(question.kind, question.object)) return CUDA_ERROR_INVALID_HANDLE;
  if (IsKnown(call.session(), &question)) return AnswerKnown(call.session(), question);
  Request request;
  request.hEvent = question.object;
  request.Encode(&call.message());
  return AskServer(call, question);
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

CUresult Custom_cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  return Elapsed(info::k_cuEventElapsedTime, pMilliseconds, hStart, hEnd);
}

CUresult Custom_cuEventElapsedTime_v2(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  return Elapsed(info::k_cuEventElapsedTime_v2, pMilliseconds, hStart, hEnd);
}

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

}  // namespace cuda_remote::client
