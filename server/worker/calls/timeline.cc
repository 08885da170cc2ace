// SPDX-License-Identifier: Apache-2.0
// OpTimeline: records what the worker executes, and tells.

#include <cuda.h>
#include <unistd.h>

#include <set>

#include "proto/base/clock.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/requests.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// An event takes up to 50 bytes of a message that may be 1 MiB long.
constexpr size_t kEventsInReply = 8000;

}  // namespace

CUresult OpTimeline(WorkerSession& session, const Request&, const wire::OpTimeline_Request& in,
                    wire::OpTimeline_Reply* out, ReplyBuilder*) {
  Timeline& timeline = session.timeline();
  switch (in.action) {
    case driverabi::kTimelineBegin:
      timeline.Begin(in.capacity);
      break;
    case driverabi::kTimelineEnd:
      if (!timeline.on()) return CUDA_ERROR_NOT_READY;
      timeline.End();
      break;
    case driverabi::kTimelineRead: {
      std::set<uint32_t> calls;
      for (const Timeline::Event& event : timeline.Read(in.first, kEventsInReply)) {
        out->sequences.push_back(event.sequence);
        out->calls.push_back(event.call);
        out->starts.push_back(event.start_ns);
        out->durations.push_back(event.duration_ns);
        out->results.push_back(event.result);
        out->threads.push_back(event.thread);
        calls.insert(event.call);
      }
      for (const uint32_t call : calls) {
        out->named_calls.push_back(call);
        out->names.push_back(CallName(call));
      }
      break;
    }
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  out->now = NowNs();
  out->recorded = timeline.recorded();
  out->dropped = timeline.dropped();
  out->worker_pid = uint32_t(getpid());
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
