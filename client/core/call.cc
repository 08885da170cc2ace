// SPDX-License-Identifier: Apache-2.0
#include "client/core/call.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "client/core/coverage.h"
#include "client/core/own_calls.h"
#include "client/core/session.h"
#include "client/graphs/host_needs.h"
#include "client/trace/trace.h"
#include "proto/api/call_traits.gen.h"
#include "proto/codec/codec.h"
#include "proto/codec/decode_as.h"

namespace cuda_remote::client {

namespace {

// Requests that use no memory but what they name; its addresses. Kernels use any.
bool NamedMemory(uint32_t id, std::string_view message, std::vector<uint64_t>* addresses) {
  if (TraitsOf(id).Has(kOnlyNamedMemory)) *addresses = AddressesOf(id, message);
  return !addresses->empty();
}

// Requests that wait for the GPU, and whose payload may say which pages of managed memory are to be fetched then.
bool FetchesAhead(const CallTraits& traits) { return traits.work == Work::kWaits && traits.Has(kMovesSharedMemory); }

// Errors that a call has because of a stream that is captured.
bool IsOfCapture(int32_t result) {
  return result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

// Graphs and what is made of them.
bool IsOfGraphs(Kind kind) { return kind == Kind::kGraph || kind == Kind::kGraphNode || kind == Kind::kGraphExec; }

}  // namespace

struct Call::ManagedReply {
  uint64_t sequence;
  void* out;
  std::string arrived;
};
struct Call::ManagedBuffers {
  std::string payload;
  std::list<ManagedReply> replies;  // the channel writes into them: they stay where they are
};

Call::Call(const CallInfo& info) : info_(info) { header_.call = info.id; }

Call::~Call() {
  if (!entered_) return;
  if (show_managed_) ShowManaged();
  if (borrows_) thread_->borrowed_context = 0;
  if (new_handle_count_ > 0) {
    WriterLock lock(&session_->objects().mutex());
    for (int i = 0; i < new_handle_count_; ++i) {
      if (new_handles_[i]) session_->objects().handles().Drop(new_handles_[i]);
    }
  }
  if (--thread_->depth != 0) return;
  Gate& gate = session_->gate();
  if (gate.closed() && !TraitsOf(info_.id).only_asks())
    session_->checkpoint().NoteLeft(stream_, thread_->current_context());
  gate.Leave(thread_->lane);
}

CUresult Call::Enter() {
  session_ = Session::Get();
  if (!session_) return CUDA_ERROR_NOT_INITIALIZED;  // also in a forked child, as natively
  thread_ = ThreadState::Get();
  if (!thread_ || thread_->depth >= ThreadState::kMaxDepth) return CUDA_ERROR_OUT_OF_MEMORY;
  if (thread_->depth == 0 && !session_->gate().TryEnter(thread_->lane)) {
    // 0: what the client answers by itself.
    const bool asks = info_.id == 0 || TraitsOf(info_.id).only_asks();
    session_->gate().Enter(thread_->lane, {asks, thread_->current_context()});
  }
  message_ = &thread_->messages[thread_->depth];
  reply_ = &thread_->replies[thread_->depth];
  ++thread_->depth;
  entered_ = true;
  message_->clear();
  reply_->clear();
  if (!session_->initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (session_->lost() != CUDA_SUCCESS) return session_->lost();
  const uint64_t context = thread_->current_context();
  if (context == 0) {
    borrows_ = info_.context == ContextOf::kObject;
    return info_.context == ContextOf::kThread ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
  }
  header_.context_or_result = SlotOf(context);
  if (!Valid(Kind::kContext, context)) {
    if (info_.context != ContextOf::kNone) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    header_.context_or_result = 0;
  }
  return CUDA_SUCCESS;
}

std::string& Call::message() { return *message_; }

void Call::SetPayload(std::string_view payload) { payload_ = payload; }

void Call::SetReplyPayload(void* out, size_t capacity) {
  reply_payload_ = out;
  reply_payload_capacity_ = capacity;
}

int Call::FindDevice(uint64_t context) {
  const int device = session_->objects().DeviceOf(context);
  if (device < 0) return device;
  thread_->device = device;
  thread_->device_context = context;
  return device;
}

bool Call::Valid(Kind kind, uint64_t handle) {
  if (!session_->objects().Usable(kind, handle)) return false;
  Borrow(handle);
  return true;
}

bool Call::Valid(Kind kind, const void* handle) { return Valid(kind, reinterpret_cast<uint64_t>(handle)); }

void Call::BorrowFrom(uint64_t handle) {
  uint64_t context = session_->objects().ContextOf(handle);
  if (KindOf(context) == Kind::kGreenContext) {
    // What is made from it lies in the context that belongs to it.
    if (ContextOfGreen(context, &context) != CUDA_SUCCESS) return;
  }
  thread_->borrowed_context = context;
  header_.context_or_result = SlotOf(context);
}

CUresult Call::StreamToWire(CUstream stream, bool per_thread_default, uint64_t* wire) {
  const bool hidden = stream == CU_STREAM_PER_THREAD || (stream == nullptr && per_thread_default);
  *wire = stream_ = reinterpret_cast<uint64_t>(stream);
  if (!hidden && stream != nullptr && stream != CU_STREAM_LEGACY) {
    return Valid(Kind::kStream, *wire) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  }
  // Default streams are each context's own, and only of one that is current.
  const uint64_t context = thread_->current_context();
  if (context == 0 || borrows_) return CUDA_ERROR_INVALID_CONTEXT;
  if (!hidden) return CUDA_SUCCESS;
  if (!Valid(Kind::kContext, context)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  const auto known = std::find_if(thread_->hidden_streams.begin(), thread_->hidden_streams.end(),
                                  [context](const auto& one) { return one.first == context; });
  if (known != thread_->hidden_streams.end()) {
    *wire = stream_ = known->second;
    if (Valid(Kind::kStream, known->second)) return CUDA_SUCCESS;
    // The context was reset since, and is there again under the same handle.
    thread_->hidden_streams.erase(known);
  }
  // An ordinary blocking stream keeps the per-thread default stream's one promise towards others: it and the legacy
  // default stream wait for each other.
  if (const CUresult result = CreateStream(CU_STREAM_DEFAULT, wire); result != CUDA_SUCCESS) return result;
  stream_ = *wire;
  thread_->hidden_streams.emplace_back(context, *wire);
  return CUDA_SUCCESS;
}

uint64_t Call::NewHandle(Kind kind, uint64_t parent) {
  if (new_handle_count_ == int(sizeof(new_handles_) / sizeof(new_handles_[0]))) return 0;
  if (parent == 0) parent = thread_->current_context();
  if (parent == kNoParent) parent = 0;
  WriterLock lock(&session_->objects().mutex());
  const uint64_t handle = session_->objects().handles().New(kind, parent);
  if (!handle) return 0;
  session_->objects().handles().Find(kind, handle)->parent = parent;
  new_handles_[new_handle_count_++] = handle;
  return handle;
}

CUresult Call::TooLong() const { return Unsupported(info_.name, "its arguments are longer than a request can be"); }

CUresult Call::Send() {
  const CallTraits& traits = TraitsOf(header_.call);
  // The order of events matters to other processes that have them open.
  if (const auto waits = session_->waits(); waits != Session::Waits::kNone) {
    if (waits == Session::Waits::kAll || traits.events != Events::kNoEvents) return Transact();
  }
  // An error that has to do with a capture is the call's own. Found later, it would be that of a call after the
  // capture.
  if (Captures& captures = session_->graphs().captures(); captures.concern_events()) {
    const bool at_once = captures.active() ? traits.events != Events::kNoEvents || captures.MayRefuse(stream_)
                                           : captures.WaitsForCaptured(header_.call, *message_);
    if (at_once) return Transact();
  }
  if (WithoutContext()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!session_->channel().Fits(message_->size(), payload_.size())) return TooLong();
  std::shared_lock<std::shared_mutex> sending;
  if (session_->memory().managed_home().pages().active()) {
    CopyManagedPayload();
    sending = std::shared_lock<std::shared_mutex>(session_->memory().managed_home().pages().sending());
  }
  if (const ChannelStatus status = HandOverManaged(true); status != ChannelStatus::kOk) return session_->Lose(status);
  header_.flags |= kFlagNoReply;
  uint64_t sequence = 0;
  const ChannelStatus status = session_->channel().Send(header_, *message_, payload_, &sequence, !traits.only_asks(),
                                                        quiet_ || traits.Has(kNotUrgent));
  if (sending) {
    session_->memory().managed_home().pages().EndHandOver();
    sending.unlock();
  }
  if (trace::On()) trace::Sent(sizeof(FrameHeader) + message_->size() + payload_.size(), sequence);
  if (traits.events == Events::kRecordsAny) session_->completions().SomeEventsRecorded();
  if (status != ChannelStatus::kOk) return session_->Lose(status);
  if (session_->graphs().captures().active()) NoteCaptured();
  return CUDA_SUCCESS;
}

CUresult Call::Transact() {
  if (WithoutContext()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!session_->channel().Fits(message_->size(), payload_.size())) return TooLong();
  const uint64_t sequence = Begin(reply_payload_, reply_payload_capacity_);
  const CUresult result = sequence ? Finish(sequence) : session_->Lose(ChannelStatus::kClosed);
  // What this process keeps for later allocations of its streams is free, and may be what is missing.
  if (result != CUDA_ERROR_OUT_OF_MEMORY || !session_->memory().GiveBackFreed()) return result;
  const uint64_t again = Begin(reply_payload_, reply_payload_capacity_);
  return again ? Finish(again) : session_->Lose(ChannelStatus::kClosed);
}

CUresult Call::Recall(uint64_t function) {
  // The driver may refuse to answer about a stream that is captured, and invalidate the capture. It is to say so
  // itself.
  if (session_->graphs().captures().IsCaptured(stream_)) return Transact();
  Answers& answers = session_->answers();
  std::string question(reinterpret_cast<const char*>(&header_.call), sizeof(header_.call));
  question.append(reinterpret_cast<const char*>(&header_.context_or_result), sizeof(header_.context_or_result));
  question += *message_;
  if (function) session_->objects().AppendSettings(function, &question);
  if (answers.Find(question, reply_)) return CUDA_SUCCESS;
  const uint64_t stamp = answers.stamp();
  const CUresult result = Transact();
  if (result == CUDA_SUCCESS) answers.Keep(stamp, question, *reply_);
  return result;
}

uint64_t Call::Begin(void* out, size_t bytes) {
  const CallTraits& traits = TraitsOf(header_.call);
  ManagedReply* arriving = nullptr;
  std::shared_lock<std::shared_mutex> sending;
  if (session_->memory().managed_home().pages().active()) {
    CopyManagedPayload();
    arriving = ArriveFor(out, bytes);
    if (arriving) out = &arriving->arrived[0];
    sending = std::shared_lock<std::shared_mutex>(session_->memory().managed_home().pages().sending());
  }
  if (HandOverManaged(false) != ChannelStatus::kOk) return 0;
  header_.flags &= ~uint32_t(kFlagNoReply);
  std::string_view payload = payload_;
  std::unique_lock<Mutex> expecting;
  if (sending && FetchesAhead(traits)) {
    expecting = session_->memory().managed_home().pages().Expect(&expected_);
    if (expected_) payload = expected_->payload(), out = &expected_->answer, bytes = sizeof expected_->answer;
  }
  const uint64_t sequence = session_->channel().Begin(header_, *message_, payload, out, bytes, !traits.only_asks());
  if (arriving) arriving->sequence = sequence;
  if (trace::On()) trace::Sent(sizeof(FrameHeader) + message_->size() + payload_.size(), sequence);
  if (traits.events == Events::kRecordsAny) session_->completions().SomeEventsRecorded();
  return sequence;
}

CUresult Call::Finish(uint64_t sequence) {
  Reply reply;
  reply.message.swap(*reply_);  // reuse its storage
  const ChannelStatus status = session_->channel().Wait(sequence, &reply);
  reply_->swap(reply.message);
  const std::unique_ptr<ManagedPages::Expected> expected = std::move(expected_);
  if (status != ChannelStatus::kOk) return session_->Lose(status);
  reply_payload_bytes_ = reply.payload_bytes;
  if (managed_buffers_) DeliverManaged(sequence, reply.payload_bytes);
  if (trace::On()) trace::Received(sizeof(FrameHeader) + reply_->size() + reply.payload_bytes);
  if (reply.pending_error != CUDA_SUCCESS) {
    session_->SetPendingError(CUresult(reply.pending_error));
    session_->answers().Forget();
  }
  if (reply.result != CUDA_SUCCESS) {
    if (reply.result != CUDA_ERROR_NOT_READY) session_->answers().Forget();
    if (IsOfCapture(reply.result)) session_->graphs().captures().NoteRefused();
    return CUresult(reply.result);
  }
  const CallTraits& traits = TraitsOf(header_.call);
  if (session_->graphs().captures().active() || traits.capture == Capture::kBegins) NoteCaptured();
  if (session_->memory().managed_mirror().watches_shared() && traits.completes != Completes::kNoWork) {
    session_->memory().managed_mirror().WorkEnded();
  }
  if (session_->memory().managed_mirror().active() && traits.completes != Completes::kNoWork) {
    // A copy to the host comes in many pieces: once, when the driver call is done.
    show_managed_ = true;
    if (!traits.Has(kInPieces)) ShowManaged();
  }
  if (traits.work == Work::kWaits) {
    session_->memory().NoteWaited();
    ManagedPages& pages = session_->memory().managed_home().pages();
    if (expected && reply_payload_bytes_ == sizeof expected->answer) {
      pages.Arrived(&session_->channel(), *expected, sequence);
    }
    pages.Anticipate(&session_->channel());
  }
  return traits.completes == Completes::kWorkAndErrors ? session_->TakePendingError() : CUDA_SUCCESS;
}

void Call::CopyManagedPayload() {
  if (!session_->memory().managed_home().pages().Overlaps(payload_.data(), payload_.size())) return;
  if (!managed_buffers_) managed_buffers_ = std::make_unique<ManagedBuffers>();
  managed_buffers_->payload.assign(payload_);
  payload_ = managed_buffers_->payload;
}

Call::ManagedReply* Call::ArriveFor(void* out, size_t bytes) {
  if (!session_->memory().managed_home().pages().Overlaps(out, bytes)) return nullptr;
  if (!managed_buffers_) managed_buffers_ = std::make_unique<ManagedBuffers>();
  managed_buffers_->replies.push_back({0, out, std::string(bytes, '\0')});
  return &managed_buffers_->replies.back();
}

void Call::DeliverManaged(uint64_t sequence, size_t bytes) {
  std::list<ManagedReply>& replies = managed_buffers_->replies;
  for (auto it = replies.begin(); it != replies.end(); ++it) {
    if (it->sequence != sequence) continue;
    memcpy(it->out, it->arrived.data(), bytes);
    replies.erase(it);
    return;
  }
}

ChannelStatus Call::HandOverManaged(bool ends_later) {
  ManagedMirror& mirror = session_->memory().managed_mirror();
  ManagedPages& pages = session_->memory().managed_home().pages();
  if (TraitsOf(header_.call).Has(kLaunchesKernels)) KernelsBegin();
  if ((!mirror.active() && !pages.touched()) || TraitsOf(header_.call).Has(kReadsNoManaged)) return ChannelStatus::kOk;
  ClientChannel* const channel = &session_->channel();
  std::vector<uint64_t> named;
  const bool only_named = NamedMemory(header_.call, *message_, &named);
  if (pages.touched()) {
    const CUresult result = only_named ? pages.HandOver(channel, named) : pages.HandOver(channel, ends_later);
    if (result == CUDA_ERROR_DEVICE_UNAVAILABLE) return ChannelStatus::kClosed;
    if (result != CUDA_SUCCESS) return ChannelStatus::kSystemError;
  }
  if (!mirror.active()) return ChannelStatus::kOk;
  return only_named ? mirror.Push(channel, named) : mirror.Push(channel);
}

void Call::KernelsBegin() {
  ManagedMirror& mirror = session_->memory().managed_mirror();
  // What is captured does not begin.
  if (mirror.watches_shared() && !session_->graphs().captures().active()) mirror.WorkBegins();
}

void Call::ShowManaged() {
  show_managed_ = false;
  const ChannelStatus status = session_->memory().managed_mirror().Pull(&session_->channel());
  if (status != ChannelStatus::kOk) session_->Lose(status);
}

std::string_view Call::reply() const { return *reply_; }
size_t Call::reply_payload_bytes() const { return reply_payload_bytes_; }

void Call::Created(replay::ObjectKey object, std::initializer_list<replay::ObjectKey> depends_on) {
  if (object.kind == Kind::kStream) session_->NoteStream();
  if (object.kind == Kind::kContext) session_->objects().NoteContext();
  Keep(object.id);
  std::vector<replay::ObjectKey> needs;
  std::vector<uint64_t> retains;
  for (const replay::ObjectKey& need : depends_on) {
    if (IsOfGraphs(object.kind) && (need.kind == Kind::kGraph || need.kind == Kind::kGraphExec)) {
      retains.push_back(need.id);
    } else {
      needs.push_back(need);
    }
  }
  if (IsOfGraphs(object.kind)) AddHostNeeds(&session_->memory(), header_.call, *message_, &needs);
  WriterLock lock(&session_->objects().mutex());
  NoteEventLocked(object.id);
  if (NoteGraphLocked(object, needs, retains)) return;
  const Object* const created = session_->objects().handles().Find(object.kind, object.id);
  const uint64_t parent = created ? created->parent : 0;
  if (parent != 0) needs.push_back({KindOf(parent), parent});
  if (KindOf(parent) == Kind::kGraphNode) {
    // As in Modified: the node may have no record of its own that would go with its graph.
    const Object* const node = session_->objects().handles().Find(Kind::kGraphNode, parent);
    if (node && node->parent) needs.push_back({KindOf(node->parent), node->parent});
  }
  const FrameHeader recorded = RecordedHeaderLocked(object, &needs);
  std::optional<Hash128> image;
  if (!payload_.empty()) image = session_->objects().log().AddImage(payload_);
  session_->objects().log().Create(object, needs, recorded, *message_, *reply_, image);
  if (object.kind == Kind::kGraphNode)
    session_->objects().graph_records().NoteEdges(*session_->objects().log().Find(object));
  for (size_t i = 0; i < retains.size(); ++i) session_->objects().graph_records().Retain(object.id, i, retains[i]);
}

void Call::NoteEventLocked(uint64_t event) CR_REQUIRES(session_->objects().mutex()) {
  wire::cuEventCreate_Request request;
  if (!wire::DecodeAs(header_.call, *message_, &request)) return;
  // The time that a record takes down, and what another process waits for, should not be late.
  const bool quiet = (request.Flags & CU_EVENT_DISABLE_TIMING) != 0 && (request.Flags & CU_EVENT_INTERPROCESS) == 0;
  session_->objects().NoteEventLocked(event, quiet);
}

void Call::NoteCaptured() {
  session_->graphs().captures().Note(header_, *message_, !payload_.empty(), stream_, thread_->current_context(),
                                     info_.name);
}

void Call::NamedInCapture(uint64_t stream, uint64_t graph) {
  session_->graphs().captures().Named(stream, graph, header_, *message_, thread_->current_context());
}

bool Call::NoteGraphLocked(replay::ObjectKey object, const std::vector<replay::ObjectKey>& needs,
                           const std::vector<uint64_t>& retains) CR_REQUIRES_SHARED(session_->objects().mutex()) {
  if (!session_->graphs().captures().active() || !IsOfGraphs(object.kind)) return false;
  for (uint64_t at = object.id; at != 0;) {
    if (KindOf(at) == Kind::kGraph &&
        session_->graphs().captures().NoteGraph(at, header_, *message_, thread_->current_context(), needs, retains)) {
      return true;
    }
    const Object* const here = session_->objects().handles().Find(KindOf(at), at);
    at = here ? here->parent : 0;
  }
  return false;
}

void Call::Keep(uint64_t handle) {
  for (uint64_t& reserved : new_handles_) {
    if (reserved == handle) reserved = 0;
  }
}

bool Call::OutlivesContexts(replay::ObjectKey object) {
  if (object.kind == Kind::kReservation || object.kind == Kind::kMapping) return true;
  if (object.kind != Kind::kDeviceMemory) return false;
  ReaderLock lock(&session_->memory().mutex());
  const auto* const range = session_->memory().device_ranges().At(object.id);
  return range &&
         (range->value.source == DeviceRange::kStreamOrdered || range->value.source == DeviceRange::kPoolImported);
}

FrameHeader Call::RecordedHeaderLocked(replay::ObjectKey object, std::vector<replay::ObjectKey>* needs)
    CR_REQUIRES_SHARED(session_->objects().mutex()) {
  FrameHeader recorded = header_;
  recorded.flags = 0;
  const uint64_t context = thread_->current_context();
  if (context == 0) return recorded;
  // Replay makes a record's context current, so the record has to die with that context. An object that outlives it (a
  // library's kernel, say) was only made while it happened to be current: its record names no context.
  const bool of_context = object.kind >= Kind::kDeviceMemory && !OutlivesContexts(object);
  bool belongs = of_context || object.id == context || IsOfGraphs(object.kind);
  for (const replay::ObjectKey& need : *needs) belongs = belongs || need.id == context;
  for (uint64_t ancestor = object.id; !belongs && ancestor != 0;) {
    const Object* above = session_->objects().handles().Find(KindOf(ancestor), ancestor);
    ancestor = above ? above->parent : 0;
    belongs = ancestor == context;
  }
  if (!belongs) {
    recorded.context_or_result = 0;
  } else if (object.id != context) {
    needs->push_back({Kind::kContext, context});
  }
  return recorded;
}

void Call::Destroyed(replay::ObjectKey object) {
  if (object.kind == Kind::kStream && session_->graphs().captures().active()) {
    if (const auto failed = session_->graphs().captures().End(object.id)) session_->graphs().CaptureFailed(*failed);
  }
  {
    WriterLock lock(&session_->objects().mutex());
    if (session_->objects().MarkDestroyedLocked(object)) {
      // Something was made from it. Its record stays, and a replay destroys it again when it has served.
      std::vector<replay::ObjectKey> needs;
      const FrameHeader recorded = RecordedHeaderLocked(object, &needs);
      session_->objects().log().Modify(object, 0, recorded, *message_, needs);
      if (object.kind == Kind::kGraph) session_->graphs().ForgetAskedLocked(session_->objects(), object.id);
    } else {
      session_->objects().DropLocked(object);
    }
  }
  if (object.kind == Kind::kGraph || object.kind == Kind::kGraphExec) session_->graphs().Destroyed(object);
}

void Call::Modified(replay::ObjectKey object, uint64_t key, std::initializer_list<replay::ObjectKey> depends_on) {
  std::vector<replay::ObjectKey> needs;
  std::vector<uint64_t> retains;
  for (const replay::ObjectKey& need : depends_on) {
    if (IsOfGraphs(need.kind)) {
      retains.push_back(need.id);
    } else {
      needs.push_back(need);
    }
  }
  const bool of_kernel = object.kind == Kind::kKernel && !TraitsOf(header_.call).Has(kSettingInQuestions);
  if (object.kind == Kind::kContext || object.kind == Kind::kStream || object.kind == Kind::kFunction || of_kernel) {
    session_->answers().Forget();
  }
  if (IsOfGraphs(object.kind)) AddHostNeeds(&session_->memory(), header_.call, *message_, &needs);
  WriterLock lock(&session_->objects().mutex());
  for (uint64_t& one : retains) one = session_->objects().RetainedForLocked(object.id, one);
  if (NoteGraphLocked(object, needs, retains)) return;
  const FrameHeader recorded = RecordedHeaderLocked(object, &needs);
  if (object.kind == Kind::kGraphNode) {
    // A node that a capture or a listing named has no record of its own that would go with its graph.
    const Object* const node = session_->objects().handles().Find(object.kind, object.id);
    if (node && node->parent) needs.push_back({KindOf(node->parent), node->parent});
    key = session_->objects().graph_records().ModifyNode(object, key, recorded, *message_, needs);
  } else if (object.kind == Kind::kGraphExec) {
    key = session_->objects().graph_records().ModifyExec(object, key, recorded, *message_, needs);
  } else {
    if (session_->objects().user_object_records().Modify(object, recorded, *message_, needs)) return;
    session_->objects().log().Modify(object, key, recorded, *message_, needs);
    if (object.kind == Kind::kGraph) {
      session_->objects().graph_records().NoteEdges(*session_->objects().log().FindSetting(object, header_.call, key));
    }
  }
  for (const uint64_t one : retains)
    session_->objects().graph_records().Retain(object.id, GraphRecords::SlotOfSetting(header_.call, key), one);
}

void Call::Undone(replay::ObjectKey object, uint32_t id, uint64_t key) {
  WriterLock lock(&session_->objects().mutex());
  session_->objects().log().ForgetSetting(object, id, key);
}

uint64_t Call::ExecOfDriver(uint64_t driver_handle) {
  Session* const session = Session::Get();
  return session ? session->graphs().driver_execs().Find(driver_handle) : driver_handle;
}

CUresult Call::Unsupported(const char* name, const char* reason) {
  CountUnsupported(name, reason);
  if (trace::On()) trace::Unsupported();
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace cuda_remote::client
