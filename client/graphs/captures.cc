// SPDX-License-Identifier: Apache-2.0
#include "client/graphs/captures.h"

#include <cuda.h>

#include <algorithm>

#include "client/graphs/graph_edges.h"
#include "client/graphs/host_needs.h"
#include "proto/api/call_traits.gen.h"
#include "proto/codec/codec.h"
#include "proto/codec/decode_as.h"
#include "proto/codec/named.gen.h"
#include "proto/codec/operations.gen.h"

namespace cuda_remote::client {
namespace {

void AddOnce(uint64_t value, std::vector<uint64_t>* to) {
  if (std::find(to->begin(), to->end(), value) == to->end()) to->push_back(value);
}

void AddOnce(const replay::ObjectKey& key, std::vector<replay::ObjectKey>* to) {
  if (key.id != 0 && std::find(to->begin(), to->end(), key) == to->end()) to->push_back(key);
}

// Appends a request. Its flags and numbers are the log's: none.
void Append(const FrameHeader& header, std::string_view message, uint64_t context, CaptureRecord* to) {
  FrameHeader kept;
  kept.call = header.call;
  kept.context_or_result = context ? header.context_or_result : 0;
  kept.message_bytes = uint32_t(message.size());
  to->frames.append(reinterpret_cast<const char*>(&kept), sizeof kept);
  to->frames.append(message);
  to->frames.resize((to->frames.size() + 7) / 8 * 8);
  if (context) AddOnce(replay::ObjectKey{Kind::kContext, context}, &to->needs);
}

// What a request on a captured stream needs at its replay, besides its streams and events, for which others are used
// then.
std::vector<replay::ObjectKey> NeedsOf(Memory* memory, uint32_t call, std::string_view message) {
  struct : wire::IgnoreNamed {
    std::vector<replay::ObjectKey> needs;
    void Function(uint64_t function) { needs.push_back({KindOf(function), function}); }
  } named;
  wire::VisitNamed(call, message, &named);
  if (TraitsOf(call).Has(kRecordNeedsMemory)) {
    for (const uint64_t address : AddressesOf(call, message)) named.needs.push_back(MemoryAt(memory, address));
  } else {
    // Other memory that the application still has is there when graphs are made again.
    AddHostNeeds(memory, call, message, &named.needs);
  }
  return named.needs;
}

// The event that a request records or waits for, and whether its node in a graph names the event itself.
struct NamedEvent : wire::IgnoreNamed {
  uint64_t event = 0;
  bool external = false;
  void Event(uint64_t handle) { event = handle; }
  void ExternalFlag(uint32_t flags) { external = (flags & CU_EVENT_RECORD_EXTERNAL) != 0; }
};
static_assert(uint32_t(CU_EVENT_RECORD_EXTERNAL) == uint32_t(CU_EVENT_WAIT_EXTERNAL), "NamedEvent takes them for one");

}  // namespace

CaptureRecord* Captures::OfStreamLocked(uint64_t stream) const {
  for (const auto& capture : captures_) {
    if (std::find(capture->streams.begin(), capture->streams.end(), stream) != capture->streams.end()) {
      return capture.get();
    }
  }
  return nullptr;
}

void Captures::BeginLocked(uint64_t stream, uint64_t graph) {
  auto capture = std::make_unique<CaptureRecord>();
  capture->origin = stream;
  capture->graph = graph;
  capture->own_graph = graph == 0;
  capture->streams.push_back(stream);
  captures_.push_back(std::move(capture));
  CountLocked();
}

void Captures::CountLocked() {
  count_.store(int(captures_.size()), std::memory_order_release);
  concerns_.store(captures_.size() + captured_events_.size(), std::memory_order_release);
}

bool Captures::WaitsForCaptured(uint32_t call, std::string_view message) {
  const Events events = TraitsOf(call).events;
  if (events != Events::kRecords && events != Events::kWaitsFor) return false;
  NamedEvent named;
  wire::VisitNamed(call, message, &named);
  if (events == Events::kRecords) ForgetEvent(named.event);
  MutexLock lock(&mutex_);
  return events == Events::kWaitsFor && captured_events_.count(named.event) != 0;
}

void Captures::ForgetEvent(uint64_t event) {
  if (!concern_events()) return;
  MutexLock lock(&mutex_);
  captured_events_.erase(event);
  CountLocked();
}

void Captures::Note(const FrameHeader& header, std::string_view message, bool has_payload, uint64_t stream,
                    uint64_t context, const char* name) {
  if (KindOf(stream) != Kind::kStream) return;
  const CallTraits& traits = TraitsOf(header.call);
  const Capture role = traits.capture;
  if (role == Capture::kLeftOut) return;
  // Before the lock: KnownMemory has one of its own, which this one's holders do not take.
  std::vector<replay::ObjectKey> needs;
  if (role != Capture::kObstacle) needs = NeedsOf(memory_, header.call, message);
  MutexLock lock(&mutex_);
  if (role == Capture::kBegins) {
    wire::cuStreamBeginCaptureToGraph_Request into;
    BeginLocked(stream, wire::DecodeAs(header.call, message, &into) ? into.hGraph : 0);
  }
  CaptureRecord* capture = OfStreamLocked(stream);
  const bool records = traits.events == Events::kRecords;
  const bool waits = traits.events == Events::kWaitsFor;
  if (records || waits) {
    NamedEvent named;
    wire::VisitNamed(header.call, message, &named);
    const uint64_t event = named.event;
    const bool external = named.external;
    if (records && !capture) {
      of_event_.erase(event);
      captured_events_.erase(event);
      CountLocked();
    }
    if (records && capture && !external) {
      of_event_[event] = capture;
      captured_events_.insert(event);
      CountLocked();
      AddOnce(event, &capture->events);
    }
    if (waits && !external && !capture) {
      const auto joined = of_event_.find(event);
      if (joined != of_event_.end()) {
        capture = joined->second;
        capture->streams.push_back(stream);
      }
    }
    if (capture && external) AddOnce(event, &capture->events);
  }
  // Questions that named nothing are no part of it; the others come by Named. Graphs in streams that are not captured
  // run.
  if (!capture || traits.Has(kRecordedIfNamed)) return;
  if (role == Capture::kObstacle || has_payload) {
    if (capture->obstacle.empty()) capture->obstacle = name;
    return;
  }
  wire::cuGraphLaunch_Request launch;
  if (wire::DecodeAs(header.call, message, &launch)) AddOnce(launch.hGraph, &capture->retains);
  for (const replay::ObjectKey& key : needs) AddOnce(key, &capture->needs);
  Append(header, message, context, capture);
}

bool Captures::NoteGraph(uint64_t graph, const FrameHeader& header, std::string_view message, uint64_t context,
                         const std::vector<replay::ObjectKey>& needs, const std::vector<uint64_t>& retains) {
  if (graph == 0 || !active()) return false;
  MutexLock lock(&mutex_);
  for (const auto& capture : captures_) {
    if (capture->graph != graph) continue;
    if (TraitsOf(header.call).capture != Capture::kRecorded && capture->obstacle.empty()) {
      capture->obstacle = "a change to the graph of a capture in progress";
    }
    if (!AddsNode(header.call) && header.call != wire::OpGraphNames_Request::kCallId) capture->edits = true;
    Append(header, message, context, capture.get());
    for (const replay::ObjectKey& key : needs) {
      if (key.id != graph) AddOnce(key, &capture->needs);
    }
    for (const uint64_t one : retains) AddOnce(one, &capture->retains);
    return true;
  }
  return false;
}

void Captures::Named(uint64_t stream, uint64_t graph, const FrameHeader& header, std::string_view message,
                     uint64_t context) {
  MutexLock lock(&mutex_);
  CaptureRecord* const capture = OfStreamLocked(stream);
  if (!capture) return;
  if (capture->graph == 0) capture->graph = graph;
  Append(header, message, context, capture);
}

void Captures::Goes(const wire::CapturedStream& stream) {
  MutexLock lock(&mutex_);
  if (CaptureRecord* const capture = OfStreamLocked(stream.stream)) capture->gone_streams.push_back(stream);
}

void Captures::Goes(const wire::CapturedEvent& event) {
  MutexLock lock(&mutex_);
  for (const auto& capture : captures_) {
    const std::vector<uint64_t>& events = capture->events;
    if (std::find(events.begin(), events.end(), event.event) != events.end()) capture->gone_events.push_back(event);
  }
}

std::vector<uint64_t> Captures::StreamsOf(uint64_t stream) const {
  MutexLock lock(&mutex_);
  const CaptureRecord* const capture = OfStreamLocked(stream);
  return capture && capture->origin == stream ? capture->streams : std::vector<uint64_t>();
}

bool Captures::EndedInside(uint64_t graph) {
  MutexLock lock(&mutex_);
  for (const auto& capture : captures_) {
    if (capture->graph != graph) continue;
    if (capture->obstacle.empty()) capture->obstacle = "a capture inside of it";
    return true;
  }
  return false;
}

bool Captures::IsGraphOfOne(uint64_t graph) const {
  if (!active()) return false;
  MutexLock lock(&mutex_);
  return std::any_of(captures_.begin(), captures_.end(), [graph](const auto& one) { return one->graph == graph; });
}

bool Captures::DestroyLater(uint64_t graph, uint64_t child) {
  MutexLock lock(&mutex_);
  for (const auto& capture : captures_) {
    if (capture->graph != graph) continue;
    capture->children.push_back(child);
    return true;
  }
  return false;
}

bool Captures::IsCaptured(uint64_t stream) const {
  if (!active()) return false;
  MutexLock lock(&mutex_);
  return OfStreamLocked(stream) != nullptr;
}

void Captures::NoteRefused() {
  MutexLock lock(&mutex_);
  refused_ = !captures_.empty();
}

bool Captures::MayRefuse(uint64_t stream) const {
  MutexLock lock(&mutex_);
  return refused_ || OfStreamLocked(stream) == nullptr;
}

uint64_t Captures::GraphOf(uint64_t stream) const {
  if (!active()) return 0;
  MutexLock lock(&mutex_);
  const CaptureRecord* const capture = OfStreamLocked(stream);
  return capture ? capture->graph : 0;
}

uint64_t Captures::OwnGraphOf(uint64_t stream) const {
  if (!active()) return 0;
  MutexLock lock(&mutex_);
  const CaptureRecord* const capture = OfStreamLocked(stream);
  return capture && capture->own_graph ? capture->graph : 0;
}

bool Captures::OnlyAddsNodes(uint64_t stream) const {
  MutexLock lock(&mutex_);
  const CaptureRecord* const capture = OfStreamLocked(stream);
  return capture && !capture->own_graph && !capture->edits;
}

uint64_t Captures::OriginOf(uint64_t stream) const {
  if (!active()) return 0;
  MutexLock lock(&mutex_);
  const CaptureRecord* const capture = OfStreamLocked(stream);
  return capture ? capture->origin : 0;
}

std::unique_ptr<CaptureRecord> Captures::End(uint64_t stream) {
  MutexLock lock(&mutex_);
  for (auto it = captures_.begin(); it != captures_.end(); ++it) {
    if ((*it)->origin != stream) continue;
    std::unique_ptr<CaptureRecord> ended = std::move(*it);
    captures_.erase(it);
    for (auto event = of_event_.begin(); event != of_event_.end();) {
      event = event->second == ended.get() ? of_event_.erase(event) : std::next(event);
    }
    CountLocked();
    refused_ = refused_ && !captures_.empty();
    return ended;
  }
  return nullptr;
}

}  // namespace cuda_remote::client
