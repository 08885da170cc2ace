// SPDX-License-Identifier: Apache-2.0
// The session's part in tracing: what the agent's requests do, and the worker's side of a timeline.

#include <string>

#include "client/core/session.h"
#include "proto/base/clock.h"
#include "proto/codec/operations.gen.h"
#include "proto/codec/text.h"
#include "proto/driverabi/requests.h"

namespace cuda_remote::client {
namespace {

// More than a client ever asks for; a server that goes on for ever must not keep us.
constexpr size_t kMaxEvents = 200000000;
constexpr size_t kMaxNameBytes = 200;

bool AskTimeline(Session* session, uint32_t action, uint64_t argument, Reply* reply, wire::OpTimeline_Reply* out) {
  wire::OpTimeline_Request request;
  request.action = action;
  (action == driverabi::kTimelineBegin ? request.capacity : request.first) = argument;
  std::string message;
  request.Encode(&message);
  return session->requests().Operate(kOpTimeline, message, reply) == CUDA_SUCCESS && out->Decode(reply->message);
}

// Appends what a reply holds. False if it makes no sense.
bool Append(const wire::OpTimeline_Reply& in, int64_t offset, trace::WorkerEvents* events) {
  const size_t count = in.sequences.size();
  if (in.calls.size() != count || in.starts.size() != count || in.durations.size() != count ||
      in.results.size() != count || in.threads.size() != count || in.names.size() != in.named_calls.size()) {
    return false;
  }
  for (size_t i = 0; i < in.names.size(); ++i)
    events->names[in.named_calls[i]] = Printable(in.names[i].substr(0, kMaxNameBytes));
  for (size_t i = 0; i < count; ++i) {
    trace::WorkerEvent event;
    event.start_ns = in.starts[i] - uint64_t(offset);
    event.end_ns = event.start_ns + (in.durations[i] >> 62 ? 0 : in.durations[i]);
    event.sequence = in.sequences[i];
    event.call = in.calls[i];
    event.thread = in.threads[i];
    event.result = in.results[i];
    events->events.push_back(event);
  }
  return true;
}

// A checkpoint waits until the channel is not in use here.
class GatePass {
 public:
  explicit GatePass(Gate* gate) : gate_(gate) { gate_->Enter(); }
  ~GatePass() { gate_->Leave(); }

 private:
  Gate* const gate_;
};

}  // namespace

bool Session::BeginTimeline(uint64_t capacity) {
  GatePass pass(&gate_);
  Reply reply;
  wire::OpTimeline_Reply out;
  return lost() == CUDA_SUCCESS && AskTimeline(this, driverabi::kTimelineBegin, capacity, &reply, &out);
}

void Session::EndTimeline(trace::WorkerEvents* events) {
  GatePass pass(&gate_);
  events->problem = "the GPU server recorded nothing: the job was moved meanwhile, or the server is gone";
  Reply reply;
  wire::OpTimeline_Reply out;
  const uint64_t before = uint64_t(NowNs());
  if (lost() != CUDA_SUCCESS || !AskTimeline(this, driverabi::kTimelineEnd, 0, &reply, &out)) return;
  const uint64_t after = uint64_t(NowNs());
  // Worker and client on one machine have one clock, unless the process was restored: then its clock goes on where it
  // was. The worker's "now" was somewhere between ours.
  const int64_t round_trip = int64_t(after - before);
  int64_t offset = int64_t(out.now - (before + (after - before) / 2));
  if (offset >= -round_trip && offset <= round_trip) {
    offset = 0;
  } else {
    events->clock_error_ns = round_trip / 2;
  }
  events->pid = out.worker_pid;
  events->dropped = out.dropped;
  const uint64_t recorded = out.recorded < kMaxEvents ? out.recorded : kMaxEvents;
  while (events->events.size() < recorded) {
    const size_t so_far = events->events.size();
    wire::OpTimeline_Reply piece;
    if (!AskTimeline(this, driverabi::kTimelineRead, so_far, &reply, &piece) || !Append(piece, offset, events) ||
        events->events.size() == so_far) {
      events->problem = "the GPU server did not give all that it recorded";
      return;
    }
  }
  events->problem.clear();
}

}  // namespace cuda_remote::client
