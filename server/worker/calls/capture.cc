// SPDX-License-Identifier: Apache-2.0
// The end of a capture; captures made again, and events that were recorded in captures.
//
// A replay has other streams and events than those of the first time: they may be gone by then, and those that are not
// must not change by it. For the duration of the capture fresh ones take their places (WorkerSession::substitutes).

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "proto/api/call_traits.gen.h"
#include "proto/base/hash.h"
#include "proto/codec/decode_as.h"
#include "proto/codec/event.gen.h"
#include "proto/codec/graph.gen.h"
#include "proto/codec/launch.gen.h"
#include "proto/codec/named.gen.h"
#include "proto/codec/operations.gen.h"
#include "proto/codec/stream.gen.h"
#include "proto/logging/log.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/graphs/graph_nodes.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// How many edges of a graph are between nodes other than these.
CUresult CountEdges(const DriverTable& driver, CUgraph graph, const std::set<CUgraphNode>& without, size_t* edges) {
  *edges = 0;
  size_t count = 0;
  CUresult result = driver.cuGraphGetEdges_v2(graph, nullptr, nullptr, nullptr, &count);
  if ((result != CUDA_SUCCESS && result != CUDA_ERROR_LOSSY_QUERY) || count == 0) return result;
  std::vector<CUgraphNode> from(count), to(count);
  std::vector<CUgraphEdgeData> data(count);
  result = driver.cuGraphGetEdges_v2(graph, from.data(), to.data(), data.data(), &count);
  for (size_t i = 0; i < std::min(count, from.size()); ++i) {
    if (without.count(from[i]) == 0 && without.count(to[i]) == 0) ++*edges;
  }
  return result;
}

// What can be said of a graph without looking into its nodes' parameters. `before`: null, or nodes that do not count.
CUresult ShapeOf(const DriverTable& driver, CUgraph graph, const std::vector<CUgraphNode>* before,
                 wire::GraphShape* shape) {
  std::vector<CUgraphNode> nodes;
  CUresult result = NodesOf(driver, graph, &nodes);
  if (result != CUDA_SUCCESS) return result;
  size_t edges = 0;
  if (before != nullptr) {
    const std::set<CUgraphNode> without(before->begin(), before->end());
    nodes.erase(std::remove_if(nodes.begin(), nodes.end(), [&](CUgraphNode node) { return without.count(node) != 0; }),
                nodes.end());
    result = CountEdges(driver, graph, without, &edges);
    if (result != CUDA_SUCCESS) return result;
  } else {
    result = driver.cuGraphGetEdges_v2(graph, nullptr, nullptr, nullptr, &edges);
    // Lossy: edges have data, which nobody asked for.
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_LOSSY_QUERY) return result;
  }
  std::string types;
  for (const CUgraphNode node : nodes) {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    result = driver.cuGraphNodeGetType(node, &type);
    if (result != CUDA_SUCCESS) return result;
    types += char(type);
  }
  shape->nodes = nodes.size();
  shape->edges = edges;
  shape->types = Hash64Of(types);
  return CUDA_SUCCESS;
}

// The stand-ins of one replayed capture. Destroys them when it goes.
class StandIns {
 public:
  explicit StandIns(WorkerSession* session) : worker_(session) {}
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;
  ~StandIns() {
    worker_->substitutes().clear();
    const DriverTable& driver = worker_->driver();
    for (CUevent event : events_) driver.cuEventDestroy_v2(event);
    for (CUstream stream : streams_) driver.cuStreamDestroy_v2(stream);
  }

  CUresult Add(const wire::CapturedStream& captured) {
    if (KindOf(captured.stream) != Kind::kStream || Has(captured.stream)) return kMalformedRequest;
    CUstream stream = nullptr;
    const DriverTable& driver = worker_->driver();
    CUresult result;
    if (CUgreenCtx green; static_cast<Session*>(worker_)->Real(Kind::kGreenContext, captured.context, &green)) {
      result = driver.cuGreenCtxStreamCreate(&stream, green, captured.flags, captured.priority);
    } else {
      result = In(captured.context,
                  [&] { return driver.cuStreamCreateWithPriority(&stream, captured.flags, captured.priority); });
    }
    if (result != CUDA_SUCCESS) return result;
    streams_.push_back(stream);
    // What its attributes were at the time is not known; they rarely change.
    CUstream original;
    if (static_cast<Session*>(worker_)->Real(Kind::kStream, captured.stream, &original)) {
      driver.cuStreamCopyAttributes(stream, original);
    }
    pending_[captured.stream] = reinterpret_cast<uint64_t>(stream);
    return CUDA_SUCCESS;
  }

  CUresult Add(const wire::CapturedEvent& captured) {
    if (KindOf(captured.event) != Kind::kEvent || Has(captured.event)) return kMalformedRequest;
    CUevent event = nullptr;
    const DriverTable& driver = worker_->driver();
    const CUresult result = In(captured.context, [&] { return driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING); });
    if (result != CUDA_SUCCESS) return result;
    events_.push_back(event);
    pending_[captured.event] = reinterpret_cast<uint64_t>(event);
    return CUDA_SUCCESS;
  }

  void Use() { worker_->substitutes() = std::move(pending_); }
  // Requests about nodes of event records and waits mean the events themselves.
  void UseEvents(bool use) {
    auto& now = worker_->substitutes();
    if (use) {
      now.insert(aside_.begin(), aside_.end());
      aside_.clear();
      return;
    }
    for (auto it = now.begin(); it != now.end();) {
      if (KindOf(it->first) != Kind::kEvent) {
        ++it;
        continue;
      }
      aside_.insert(*it);
      it = now.erase(it);
    }
  }

 private:
  bool Has(uint64_t handle) const { return pending_.count(handle) != 0; }

  template <typename Make>
  CUresult In(uint64_t context, Make make) {
    WorkerSession::Outer outer;
    CUresult result = worker_->EnterNested(SlotOf(context), &outer);
    if (result == CUDA_SUCCESS && worker_->contexts().current_ref().id == 0) result = CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS) result = make();
    worker_->LeaveNested(outer);
    return result;
  }

  WorkerSession* const worker_;
  std::vector<CUstream> streams_;
  std::vector<CUevent> events_;
  std::unordered_map<uint64_t, uint64_t> pending_, aside_;
};

// Reads the next request of the record. False at the end, and for what no client writes (*malformed).
bool NextRequest(std::string_view* frames, FrameHeader* header, std::string_view* message, bool* malformed) {
  if (frames->empty()) return false;
  *malformed = true;
  if (frames->size() < sizeof *header) return false;
  std::memcpy(header, frames->data(), sizeof *header);
  frames->remove_prefix(sizeof *header);
  const size_t padded = (size_t(header->message_bytes) + 7) / 8 * 8;
  if (header->message_bytes > kMaxMessageBytes || frames->size() < padded || header->payload_bytes != 0 ||
      header->flags != 0) {
    return false;
  }
  *message = frames->substr(0, header->message_bytes);
  frames->remove_prefix(padded);
  *malformed = false;
  return true;
}

// Kernels that a driver loads at their first use are loaded now: during a capture that might not be allowed.
void LoadKernels(WorkerSession& session, std::string_view frames) {
  const DriverTable& driver = session.driver();
  std::set<uint64_t> seen;
  FrameHeader header;
  std::string_view message;
  bool malformed = false;
  while (NextRequest(&frames, &header, &message, &malformed)) {
    wire::cuLaunchKernel_Request launch;
    if (!wire::DecodeAs(header.call, message, &launch) || !seen.insert(launch.f).second) continue;
    WorkerSession::Outer outer;
    if (session.EnterNested(header.context_or_result, &outer) == CUDA_SUCCESS) {
      CUfunction function = nullptr;
      CUkernel kernel = nullptr;
      if (session.Real(Kind::kKernel, launch.f, &kernel)) driver.cuKernelGetFunction(&function, kernel);
      if (function != nullptr || session.Real(Kind::kFunction, launch.f, &function)) driver.cuFuncLoad(function);
    }
    session.LeaveNested(outer);
  }
}

// Records of events for others than the capture's streams, and waits for such, become nodes that name the event itself.
bool NamesEventItself(const FrameHeader& header, std::string_view message) {
  struct : wire::IgnoreNamed {
    bool external = false;
    void ExternalFlag(uint32_t flags) { external = (flags & CU_EVENT_RECORD_EXTERNAL) != 0; }
  } named;
  static_assert(uint32_t(CU_EVENT_RECORD_EXTERNAL) == uint32_t(CU_EVENT_WAIT_EXTERNAL), "one flag for both");
  return TraitsOf(header.call).Has(kEventItself) || (wire::VisitNamed(header.call, message, &named) && named.external);
}

}  // namespace

// Puts the driver's event into the state of one that was last recorded in a capture which is over.
CUresult OpCaptureEvent(WorkerSession& session, const Request& request, const wire::OpCaptureEvent_Request& in,
                        wire::OpCaptureEvent_Reply*, ReplyBuilder*) {
  if (!request.replay()) return kMalformedRequest;
  CUevent event = nullptr;
  if (!session.Real(Kind::kEvent, in.event, &event)) return CUDA_ERROR_INVALID_HANDLE;
  const DriverTable& driver = session.driver();
  CUstream stream = nullptr;
  CUresult result = driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  if (result != CUDA_SUCCESS) return result;
  result = driver.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
  if (result == CUDA_SUCCESS) {
    result = driver.cuEventRecord(event, stream);
    CUgraph graph = nullptr;
    const CUresult ended = driver.cuStreamEndCapture(stream, &graph);
    if (graph != nullptr) driver.cuGraphDestroy(graph);
    if (result == CUDA_SUCCESS) result = ended;
  }
  driver.cuStreamDestroy_v2(stream);
  return result;
}

// A graph that got its handle while it was captured died with the stream until now.
static void OutliveStream(Session& session, uint64_t graph, uint64_t stream) {
  if (session.IsUnder(graph, stream)) session.SetParent(Kind::kGraph, graph, 0);
}

CUresult Custom_cuStreamEndCapture(WorkerSession& session, const Request&, const wire::cuStreamEndCapture_Request& in,
                                   wire::cuStreamEndCapture_Reply* out, ReplyBuilder*) {
  if (!session.MayBind(Kind::kGraph, in.phGraph)) return kMalformedRequest;
  CUstream stream;
  if (!session.RealStream(in.hStream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  const DriverTable& driver = session.driver();
  CUgraph graph = nullptr;
  const std::vector<CUgraphNode> before = NodesBeforeCapture(stream);
  CUresult result = driver.cuStreamEndCapture(stream, &graph);
  if (result != CUDA_SUCCESS) {
    // The next graph may have the address of the one that is gone.
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    const bool over = driver.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS;
    if (KindOf(in.graph) == Kind::kGraph && over && status == CU_STREAM_CAPTURE_STATUS_NONE) session.Unbind(in.graph);
    return result;
  }
  const uint64_t real = reinterpret_cast<uint64_t>(graph);
  out->graph = session.Virtual(Kind::kGraph, real);
  if (out->graph == 0) {
    session.Bind(Kind::kGraph, in.phGraph, real, 0);
    out->graph = in.phGraph;
  }
  OutliveStream(session, out->graph, in.hStream);
  for (const uint64_t handle : in.streams) {
    CUstream one;
    unsigned flags = 0;
    int priority = 0;
    // One that was destroyed meanwhile had no more part in it.
    if (session.RealStream(handle, &one)) {
      driver.cuStreamGetFlags(one, &flags);
      driver.cuStreamGetPriority(one, &priority);
    }
    out->flags.push_back(flags);
    out->priorities.push_back(priority);
  }
  return ShapeOf(driver, graph, in.added_only ? &before : nullptr, &out->shape);
}

CUresult OpGraphCapture(WorkerSession& session, const Request& request, const wire::OpGraphCapture_Request& in,
                        wire::OpGraphCapture_Reply* out, ReplyBuilder*) {
  if (!request.replay()) return kMalformedRequest;
  StandIns stand_ins(&session);
  for (const wire::CapturedStream& stream : in.streams) {
    if (const CUresult result = stand_ins.Add(stream); result != CUDA_SUCCESS) return result;
  }
  for (const wire::CapturedEvent& event : in.events) {
    const CUresult result = stand_ins.Add(event);
    // The context of an event that had nothing to do with the capture's may be gone.
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_CONTEXT_IS_DESTROYED) return result;
  }
  stand_ins.Use();
  CUstream origin;
  if (!session.Real(Kind::kStream, in.stream, &origin)) return kMalformedRequest;

  // A copy that cannot change: it is read twice.
  std::string record;
  request.payload.AppendTo(&record);
  LoadKernels(session, record);
  std::string_view frames = record;
  FrameHeader header;
  std::string_view message;
  bool malformed = false;
  bool begun = false;
  size_t failures = 0;
  while (NextRequest(&frames, &header, &message, &malformed)) {
    if (TraitsOf(header.call).capture != (begun ? Capture::kRecorded : Capture::kBegins)) return kMalformedRequest;
    const Handler handler = FindHandler(header.call);
    if (handler == nullptr) return kMalformedRequest;
    const bool itself = NamesEventItself(header, message);
    WorkerSession::Outer outer;
    CUresult result = session.EnterNested(header.context_or_result, &outer);
    if (result == CUDA_SUCCESS) {
      if (itself) stand_ins.UseEvents(false);
      ReplyBuilder unused;
      result = handler(session, Request{header, message, {}}, &unused);
      if (itself) stand_ins.UseEvents(true);
    }
    session.LeaveNested(outer);
    if (result == kMalformedRequest) return result;
    if (!begun && result != CUDA_SUCCESS) return result;
    begun = true;
    // A kernel would set another condition.
    if (result != CUDA_SUCCESS && TraitsOf(header.call).Has(kMustSucceed)) return result;
    if (result != CUDA_SUCCESS) {
      // It may have failed the first time too: the graph's shape will tell.
      if (++failures == 1)
        logging::Warn("recreating a captured graph: {} failed with CUDA error {}", CallName(header.call), int(result));
    }
  }
  CUgraph graph = nullptr;
  const std::vector<CUgraphNode> before = NodesBeforeCapture(origin);
  CUresult result = begun ? session.driver().cuStreamEndCapture(origin, &graph) : CUDA_ERROR_INVALID_VALUE;
  if (malformed) return kMalformedRequest;
  if (result != CUDA_SUCCESS) return result;
  const uint64_t real = reinterpret_cast<uint64_t>(graph);
  const uint64_t known = session.Virtual(Kind::kGraph, real);
  if (known == 0 && !session.MayBind(Kind::kGraph, in.graph)) return kMalformedRequest;
  if (known == 0) session.Bind(Kind::kGraph, in.graph, real, 0);
  if (known != 0 && known != in.graph) return CUDA_ERROR_INVALID_VALUE;
  OutliveStream(session, in.graph, in.stream);
  return ShapeOf(session.driver(), graph, in.added_only ? &before : nullptr, &out->shape);
}

}  // namespace cuda_remote::server
