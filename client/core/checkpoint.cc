// SPDX-License-Identifier: Apache-2.0
#include "client/core/checkpoint.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "client/core/log.h"
#include "client/core/session.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/error_names.h"
#include "proto/folder/this_job.h"
#include "replay/replayer/channel_target.h"
#include "replay/replayer/replayer.h"

namespace cuda_remote::client {
namespace {

// A look at what is going on waits this long at most for each of the calls that are inside, and the server's answer.
constexpr int kLookMs = 5;
// How long the thread of host functions may take to let go of a channel on which nothing arrives.
constexpr int kDetachMs = 1000;
// What a tool may ask the server for beside the job's calls.
constexpr uint32_t kSideOperations[] = {kOpRegions,    kOpListBlocks, kOpExportBlocks, kOpHashMemory,
                                        kOpPeekMemory, kOpHostMap,    kOpHostUnmap};

// An anonymous file with what `fill` gives to the function that it gets, positioned at its start.
StatusOr<UniqueFd> MakeMemfd(const char* name,
                             const std::function<bool(const std::function<bool(std::string_view)>&)>& fill) {
  UniqueFd file(memfd_create(name, MFD_CLOEXEC));
  if (!file.ok()) return ErrnoError("memfd_create");
  const auto put = [fd = file.get()](std::string_view bytes) {
    for (size_t written = 0; written < bytes.size();) {
      const ssize_t n = write(fd, bytes.data() + written, bytes.size() - written);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      written += size_t(n);
    }
    return true;
  };
  if (!fill(put)) return ErrnoError("writing the replay log to memory");
  lseek(file.get(), 0, SEEK_SET);
  return file;
}

}  // namespace

ClientChannel* Checkpoint::channel() const { return session_->connection().get(); }

agent::Info Checkpoint::GetInfo() {
  agent::Info info;
  info.pid = uint32_t(getpid());
  info.server = session_->settings().server;
  info.job = session_->settings().job;
  info.driver_settings = session_->settings().driver_settings;
  if (channel()) {
    info.session = channel()->welcome().session;
    info.shared_memory = channel()->welcome().shared_memory;
  }
  ReaderLock lock(&session_->objects().mutex());
  info.log_records = session_->objects().log().records();
  info.log_bytes = session_->objects().log().bytes();
  return info;
}

Status Checkpoint::Close() {
  if (session_->lost() != CUDA_SUCCESS) {
    return Error("the job has lost its GPU server; there is no GPU state left to save");
  }
  // Before the gate closes: a timeline that is being fetched uses the channel. What is open now would be in a snapshot.
  trace::Pause();
  admissions_ = 0;
  added_.Clear();
  session_->gate().Close();
  if (channel() && !taken_) session_->host_functions().SetChannel(channel());  // after a Settle that is undone
  return OkStatus();
}

StatusOr<agent::Activity> Checkpoint::Look() {
  agent::Activity activity;
  const bool closed = session_->gate().closed();
  activity.capturing = session_->graphs().captures().active();
  activity.inside = closed ? session_->gate().AwaitEmpty(kLookMs) : session_->gate().inside();
  bool quiet = closed && activity.inside == 0 && !activity.capturing;
  if (question_ == 0) {
    question_quiet_ = quiet;
    question_admissions_ = admissions_;
    FrameHeader header;
    header.call = kOpDrain;
    std::string message;
    wire::OpDrain_Request request;
    request.at_once = true;
    request.be_sure = quiet;
    request.Encode(&message);
    ChannelStatus status = ChannelStatus::kOk;
    question_ = channel()->TryBegin(header, message, kLookMs, &status);
    if (question_ == 0 && status != ChannelStatus::kTimeout) return ServerWentAway(status);
  }
  Reply reply;
  ChannelStatus status = ChannelStatus::kTimeout;
  if (question_ != 0) status = channel()->WaitFor(question_, kLookMs, &reply);
  if (status != ChannelStatus::kTimeout) {
    question_ = 0;
    if (status != ChannelStatus::kOk) return ServerWentAway(status);
    if (reply.pending_error != CUDA_SUCCESS) session_->SetPendingError(CUresult(reply.pending_error));
    wire::OpDrain_Reply work;
    if (reply.result == CUDA_SUCCESS && !work.Decode(reply.message)) {
      return ServerWentAway(ChannelStatus::kProtocolError);
    }
    if (reply.result != CUDA_SUCCESS) return WorkFailed(CUresult(reply.result));
    activity.answered = true;
    activity.has_work = work.busy;
    activity.held_bytes = work.held_bytes;
    busy_streams_.assign(work.busy_streams.begin(), work.busy_streams.end());
    busy_contexts_.assign(work.busy_contexts.begin(), work.busy_contexts.end());
    if (question_admissions_ == admissions_) added_.KeepBusy(busy_streams_);
    quiet = quiet && question_quiet_ && question_admissions_ == admissions_ && !work.busy && work.captures == 0;
  } else {
    quiet = false;
  }
  activity.busy_streams = busy_streams_.size();
  activity.host_function_ms = session_->host_functions().RunningMs();
  activity.quiet = quiet && activity.host_function_ms == 0 && session_->gate().inside() == 0;
  const auto of = [&](uint64_t context) -> agent::Activity::Context& {
    auto& contexts = activity.contexts;
    auto at = std::find_if(contexts.begin(), contexts.end(), [&](const auto& one) { return one.context == context; });
    if (at == contexts.end()) at = contexts.insert(at, {context, 0, HasWork(context), added_.In(context)});
    return *at;
  };
  for (const uint64_t context : busy_contexts_) of(context);
  session_->gate().ForEachHeld(
      [&](const Gate::Held& held) { ++(held.asks ? activity.asking : of(held.context).calls); });
  return activity;
}

bool Checkpoint::HasWork(uint64_t context) const {
  return std::find(busy_contexts_.begin(), busy_contexts_.end(), context) != busy_contexts_.end();
}

bool Checkpoint::Admit(const agent::Admission& which) {
  const bool admitted = session_->gate().Admit([&which](const Gate::Held& held) {
    return held.asks == which.asks && (held.asks || held.context == which.context);
  });
  if (admitted) ++admissions_;
  return admitted;
}

StatusOr<bool> Checkpoint::Settle(int timeout_ms, const std::function<bool()>& gone) {
  // A host function or the destructor of a user object may have begun since.
  if (!session_->gate().closed() || session_->gate().inside() != 0 || session_->graphs().captures().active())
    return false;
  if (!session_->host_functions().Detach(kDetachMs)) {
    session_->host_functions().SetChannel(channel());
    return false;
  }
  // What only this side knows of is settled before anybody looks.
  session_->memory().staging().GiveBack();
  session_->memory().GiveBackFreed();
  const int64_t deadline = NowNs() + int64_t(timeout_ms) * 1000000;
  Status status = DrainUntil(deadline, gone);
  // From here on both sides have the same bytes, and the process's are saved.
  if (status.ok() && session_->memory().managed_mirror().active()) {
    ChannelStatus same = session_->memory().managed_mirror().Push(channel());
    if (same == ChannelStatus::kOk) same = session_->memory().managed_mirror().Pull(channel());
    status = same == ChannelStatus::kOk ? DrainUntil(deadline, gone) : ServerWentAway(same);
  }
  session_->memory().managed_mirror().StopWatching();
  if (status.ok() && session_->memory().uses_managed()) {
    const CUresult result = session_->memory().managed_home().Settle();
    if (result != CUDA_SUCCESS) {
      status = Error("managed memory could not be fetched: " + driverabi::DescribeError(result));
    }
  }
  if (!status.ok()) {
    session_->host_functions().SetChannel(channel());
    return status;
  }
  NoteEvents();
  return true;
}

Status Checkpoint::DrainUntil(int64_t deadline_ns, const std::function<bool()>& gone) {
  while (true) {
    CR_ASSIGN_OR_RETURN(const agent::Activity activity, Look());
    if (activity.quiet) return OkStatus();
    if (gone()) return Error("interrupted");
    if (NowNs() > deadline_ns) {
      return Error("the GPU server did not finish giving memory back in time; try again with a longer --timeout");
    }
  }
}

Status Checkpoint::ServerWentAway(ChannelStatus status) {
  session_->Lose(status);
  return Error("the GPU server went away while its work was finishing");
}

Status Checkpoint::WorkFailed(CUresult result) {
  return Error("the GPU's work did not finish cleanly: " + driverabi::DescribeError(result) +
               "; the GPU state is damaged, so it is not saved");
}

void Checkpoint::NoteEvents() {
  EventTimes& times = session_->event_times();
  times.ForgetNoted();
  // A request asks for the events of one context.
  std::unordered_map<uint64_t, std::vector<uint64_t>> events;
  {
    ReaderLock lock(&session_->objects().mutex());
    for (const replay::Record* record : session_->objects().log().InOrder()) {
      if (record->object.kind != Kind::kEvent || record->modifies) continue;
      const Object* const object = session_->objects().handles().Find(Kind::kEvent, record->object.id);
      if (object) events[object->parent].push_back(record->object.id);
    }
  }
  for (const auto& [context, all] : events) {
    // Pieces, so that no message comes near its limit.
    constexpr size_t kPiece = 10000;
    for (size_t first = 0; first < all.size(); first += kPiece) {
      const std::vector<uint64_t> piece(all.begin() + first, all.begin() + std::min(all.size(), first + kPiece));
      std::vector<double> ages;
      std::set<uint64_t> captured;
      if (session_->requests().AskEventAges(context, piece, &ages, &captured) != CUDA_SUCCESS) continue;
      for (size_t i = 0; i < piece.size(); ++i) {
        const bool is_captured = captured.count(piece[i]) != 0;
        double before = 0;
        NoteCaptured(context, piece[i], is_captured);
        if (is_captured) continue;
        if (ages[i] >= 0) {
          times.Note(piece[i], ages[i]);
        } else if (times.Before(piece[i], &before)) {
          times.Note(piece[i], times.Now() - before);
        }
      }
    }
  }
}

void Checkpoint::NoteCaptured(uint64_t context, uint64_t event, bool captured) {
  const replay::ObjectKey key{Kind::kEvent, event};
  WriterLock lock(&session_->objects().mutex());
  replay::Log& log = session_->objects().log();
  if (!captured) return log.ForgetSetting(key, kOpCaptureEvent, 0);
  FrameHeader header;
  header.call = kOpCaptureEvent;
  header.context_or_result = SlotOf(context);
  wire::OpCaptureEvent_Request request;
  request.event = event;
  std::string message;
  request.Encode(&message);
  log.Modify(key, 0, header, message);
}

// One file decides for all processes of the job, so that none is left on another server than the rest.
void Checkpoint::SettleMove() {
  if (!given_new_ || !former_channel_) return;
  std::string scope;
  if (ReadSharingScope(session_->settings().job_dir, &scope) && scope != former_scope_) return;
  LogLine("the tool that was moving the job has ended; the process continues with the GPU server %s",
          NamedServer(former_server_).c_str());
  agent::Given former;
  former.fds = former_channel_->DupFds();
  former.next_sequence = former_channel_->next_sequence();
  former.welcome = former_channel_->welcome();
  const Status given = Give(std::move(former));
  if (given.ok()) return;
  LogLine("%s", given.message().c_str());
  session_->Lose(ChannelStatus::kSystemError);
}

void Checkpoint::Unlock() {
  ForgetQuestion();
  // After a Take that led nowhere, this process is the channel's user again; the tool has moved the rings' positions
  // on.
  if (channel() && taken_) {
    StatusOr<std::unique_ptr<ClientChannel>> again =
        ClientChannel::Adopt(channel()->DupFds(), channel()->next_sequence(), channel()->welcome());
    if (again.ok()) {
      session_->connection().Replace(*std::move(again));
    } else {
      LogLine("%s", again.status().message().c_str());
      session_->Lose(ChannelStatus::kSystemError);
    }
  }
  taken_ = false;
  if (given_new_) {
    session_->memory().managed_home().ForgetFormer();
    session_->memory().managed_mirror().ForgetFormer();
  }
  given_new_ = false;
  former_channel_.reset();
  if (channel()) session_->host_functions().SetChannel(channel());
  session_->gate().Open();
  trace::Resume();
}

StatusOr<UniqueFd> Checkpoint::GiveImages(uint64_t* number) {
  given_images_number_ = 0;
  replay::Images images;
  {
    ReaderLock lock(&session_->objects().mutex());
    images = session_->objects().log().AllImages();
  }
  // The job's calls do not wait for this.
  CR_ASSIGN_OR_RETURN(UniqueFd file, MakeMemfd("cuda-remote-images", [&images](const auto& put) {
                        return replay::WriteImages(images, put);
                      }));
  given_images_.clear();
  for (const auto& [hash, bytes] : images) given_images_.insert(hash);
  *number = given_images_number_ = uint64_t(NowNs());
  return file;
}

StatusOr<agent::Taken> Checkpoint::Take(uint64_t images) {
  if (!channel()) return Error("the job holds no channel to a GPU server (it was released already)");
  CR_RETURN_IF_ERROR(NoteCode());
  std::string log;
  {
    ReaderLock lock(&session_->objects().mutex());
    const bool has_images = images != 0 && images == given_images_number_;
    session_->objects().log().Serialize(&log, has_images ? given_images_ : std::set<Hash128>());
  }
  CR_ASSIGN_OR_RETURN(UniqueFd file, MakeMemfd("cuda-remote-log", [&log](const auto& put) { return put(log); }));
  agent::Taken taken;
  taken.fds = channel()->DupFds();
  if (taken.fds.socket < 0) return ErrnoError("no descriptors for the tool");
  ForgetQuestion();
  taken_ = true;
  taken.log_fd = file.Release();
  taken.next_sequence = channel()->next_sequence();
  taken.welcome = channel()->welcome();
  return taken;
}

StatusOr<uint64_t> Checkpoint::Ask(const agent::SideRequest& request, char* out) {
  if (std::find(std::begin(kSideOperations), std::end(kSideOperations), request.operation) ==
      std::end(kSideOperations)) {
    return Error("the job's client library does not let a tool ask for this beside its calls");
  }
  if (!channel() || session_->lost() != CUDA_SUCCESS) return Error("the job has no GPU server");
  if (request.tag != 0 && channel()->SendFd(request.tag, request.fd) != ChannelStatus::kOk) {
    return Error("the GPU server does not take a descriptor");
  }
  FrameHeader header;
  header.call = request.operation;
  const uint64_t sequence = channel()->Begin(header, request.message, {}, out, request.payload_bytes);
  if (sequence == 0) return Error("the GPU server went away");
  wire::OpHostMap_Request map;
  wire::OpHostUnmap_Request unmap;
  if (request.operation == kOpHostMap && map.Decode(request.message)) side_mapping_[sequence] = map.address;
  if (request.operation == kOpHostUnmap && unmap.Decode(request.message)) side_maps_.erase(unmap.address);
  return sequence;
}

Status Checkpoint::Answer(uint64_t sequence, int timeout_ms, bool* answered, agent::SideAnswer* answer, size_t* bytes) {
  *answered = false;
  Reply reply;
  const ChannelStatus status = channel() ? channel()->WaitFor(sequence, timeout_ms, &reply) : ChannelStatus::kClosed;
  if (status == ChannelStatus::kTimeout) return OkStatus();
  if (status != ChannelStatus::kOk) return Error("the GPU server went away");
  if (reply.pending_error != CUDA_SUCCESS) session_->SetPendingError(CUresult(reply.pending_error));
  *answered = true;
  if (const auto mapping = side_mapping_.find(sequence); mapping != side_mapping_.end()) {
    if (reply.result == CUDA_SUCCESS) side_maps_.insert(mapping->second);
    side_mapping_.erase(mapping);
  }
  answer->result = reply.result;
  answer->message = std::move(reply.message);
  *bytes = size_t(reply.payload_bytes);
  return OkStatus();
}

void Checkpoint::EndAsking(const std::vector<uint64_t>& open) {
  if (!channel()) return;
  for (const uint64_t sequence : open) channel()->Abandon(sequence);
  // Whether memory is mapped of which no answer has come is not known: the next tool unmaps it. Nobody waits for the
  // answers to these, so that a refusal would become the application's error.
  side_mapping_.clear();
  for (const uint64_t address : side_maps_) {
    wire::OpHostUnmap_Request unmap;
    unmap.address = address;
    std::string message;
    unmap.Encode(&message);
    FrameHeader header;
    header.call = kOpHostUnmap;
    channel()->Send(header, message, {});
  }
  side_maps_.clear();
}

void Checkpoint::ForgetQuestion() {
  if (question_ != 0 && channel()) channel()->Abandon(question_);
  question_ = 0;
}

void Checkpoint::Release() {
  session_->connection().Replace(nullptr);
  taken_ = false;
}

void Checkpoint::Abandon() {
  session_->Lose(ChannelStatus::kClosed);
  session_->gate().Open();
  trace::Resume();
}

Status Checkpoint::Give(agent::Given given) {
  CR_ASSIGN_OR_RETURN(std::unique_ptr<ClientChannel> adopted,
                      ClientChannel::Adopt(given.fds, given.next_sequence, given.welcome));
  ForgetQuestion();
  if (!given.new_worker && given_new_) GoBack();
  const CUresult lost_before = session_->lost();
  session_->host_functions().SetChannel(nullptr);
  adopted = session_->connection().Replace(std::move(adopted));
  if (const Status moved = given.new_worker ? MoveToNewServer() : OkStatus(); !moved.ok()) {
    session_->memory().managed_home().MoveBack();
    adopted = session_->connection().Replace(std::move(adopted));
    // The new worker has ended, and not the one that this process has; in a restart it has none yet.
    if (session_->connection().Restore(lost_before) != lost_before && channel()) {
      LogLine(
          "the move has ended: this was the session that the process was to move to. The process continues with the "
          "GPU server %s",
          NamedServer(session_->settings().server).c_str());
    }
    // The tool still has the rings: Unlock takes them back, and destroys this channel.
    if (!taken_) session_->host_functions().SetChannel(channel());
    return moved;
  }
  if (given.new_worker) {
    session_->event_times().Moved(NowNs());
    former_server_ = session_->settings().server;
    former_scope_.clear();
    ReadSharingScope(session_->settings().job_dir, &former_scope_);
    former_channel_ = std::move(adopted);
    given_new_ = true;
  }
  session_->completions().ForgetAll();
  session_->answers().Forget();  // the GPU may be another
  taken_ = false;
  if (!given.server.empty()) session_->set_server(given.server);
  session_->connection().Restore(CUDA_SUCCESS);
  session_->host_functions().SetChannel(channel());
  return OkStatus();
}

Status Checkpoint::MoveToNewServer() {
  // The search comes before memory is mapped that looks used and is not.
  CR_RETURN_IF_ERROR(FindOldCode());
  CR_RETURN_IF_ERROR(ShareHostArena());
  CR_RETURN_IF_ERROR(MapManaged());
  CR_RETURN_IF_ERROR(ReplayRest());
  return MoveManaged();
}

// The tool takes a new channel back, since another process of the job could not take its own; or the tool has gone.
void Checkpoint::GoBack() {
  if (session_->lost() != CUDA_SUCCESS) {
    LogLine(
        "the move has ended: this was the session that the process was to move to. The process continues with the GPU "
        "server %s",
        former_server_.c_str());
  }
  former_channel_.reset();
  session_->memory().managed_home().MoveBack();
  session_->memory().managed_mirror().MoveBack();
  session_->set_server(former_server_);
  given_new_ = false;
  session_->event_times().MoveBack();
}

Status Checkpoint::ReplayRest() {
  replay::ChannelTarget target(*channel());
  ReaderLock lock(&session_->objects().mutex());
  const Status made = replay::Replay(session_->objects().log(), target, nullptr, replay::Part::kAfterPinned);
  if (made.ok()) return made;
  return Error("the job's graphs cannot be recreated on this server: " + made.message());
}

Status Checkpoint::MapManaged() {
  ReaderLock lock(&session_->memory().mutex());
  for (auto& [start, range] : session_->memory().host_ranges()) {
    if (range.value.alias_of || !session_->memory().host_mappings().IsMirrored(range.value)) continue;
    const bool at_its_own = session_->memory().host_mappings().IsRegistered(range);
    const CUresult result =
        at_its_own ? session_->memory().host_mappings().RegisterOwn(start, range.bytes, NewPagesOf(start, range.bytes))
                   : session_->memory().host_mappings().MapOwn(range.value.device, range.bytes);
    if (result != CUDA_SUCCESS) {
      return Error("the new server has no room for host memory that kernels use (" + driverabi::DescribeError(result) +
                   ")");
    }
  }
  const CUresult moved = session_->memory().managed_home().MoveTo();
  if (moved != CUDA_SUCCESS) {
    return Error("the new server has no room for the job's managed memory (" + driverabi::DescribeError(moved) + ")");
  }
  for (auto& [start, range] : session_->memory().device_ranges()) {
    if (range.value.source != DeviceRange::kManaged || HostArena::IsManaged(start)) continue;
    const CUresult result = session_->memory().host_mappings().MapManaged(start, range.bytes, range.value.device);
    if (result != CUDA_SUCCESS) {
      return Error("the new server has no room for the job's managed memory (" + driverabi::DescribeError(result) +
                   ")");
    }
  }
  return OkStatus();
}

Status Checkpoint::MoveManaged() {
  std::vector<ManagedMirror::Place> places = session_->memory().managed_home().Mirrored();
  ReaderLock lock(&session_->memory().mutex());
  for (auto& [start, range] : session_->memory().device_ranges()) {
    if (!range.value.managed || HostArena::IsManaged(start)) continue;
    const bool variable = range.value.source == DeviceRange::kGlobal;
    if (variable || !session_->shared_memory()) {
      places.push_back({start, range.bytes, start, !variable, ManagedMirror::Writers::kNobodyBesideTheGpu});
    }
  }
  for (auto& [start, range] : session_->memory().host_ranges()) {
    if (range.value.alias_of || !session_->memory().host_mappings().IsMirrored(range.value)) continue;
    places.push_back({range.value.device, range.bytes, start, true,
                      session_->memory().host_mappings().WritersOf(start, range.bytes, range.value)});
  }
  const CUresult result = session_->memory().managed_mirror().MoveTo(channel(), places);
  if (result == CUDA_SUCCESS) return OkStatus();
  return Error("the new server cannot mirror the job's managed memory (" + driverabi::DescribeError(result) + ")");
}

// The pages of a registration that those before it do not have: the server gets registrations in the order of their
// addresses.
HostMappings::Pages Checkpoint::NewPagesOf(uint64_t start, uint64_t bytes)
    CR_REQUIRES_SHARED(session_->memory().mutex()) {
  return HostMappings::PagesOf(&session_->memory().host_ranges(), start, bytes, [this, start](const auto& other) {
    return other.start < start && session_->memory().host_mappings().IsRegistered(other);
  });
}

Status Checkpoint::ShareHostArena() {
  if (!session_->shared_memory()) return OkStatus();
  const auto refuse = [](const char* what, CUresult result) {
    return Error(std::string("the new server cannot map the job's ") + what + " memory (" +
                 driverabi::DescribeError(result) + ")");
  };
  if (session_->memory().host_arena().fd() >= 0) {
    const CUresult segments = session_->memory().pinned_heap().MapSegments();
    if (segments != CUDA_SUCCESS) return refuse("pinned", segments);
  }
  ReaderLock lock(&session_->memory().mutex());
  for (auto& [start, range] : session_->memory().host_ranges()) {
    if (!range.value.shared || range.value.alias_of) continue;
    if (range.value.registered) {
      const HostMappings::Pages pages = NewPagesOf(start, range.bytes);
      const CUresult result = session_->memory().host_mappings().RegisterShared(
          start, range.bytes, range.value.flags,
          pages.bytes == 0 ? std::vector<PageBacking>()
                           : FindBacking(pages.start, pages.bytes, session_->memory().host_arena().fd()));
      if (result != CUDA_SUCCESS) return refuse("registered", result);
    } else if (!session_->memory().pinned_heap().InSegment(start)) {
      const CUresult result = session_->memory().host_mappings().Map(start, range.bytes, range.value.flags);
      if (result != CUDA_SUCCESS) return refuse("pinned", result);
    }
  }
  return OkStatus();
}

Status Checkpoint::BeginTrace(uint64_t events, double max_seconds) { return trace::BeginSlice(events, max_seconds); }

Status Checkpoint::EndTrace(int timeline_fd, int table_fd, bool json) {
  return trace::EndSlice(timeline_fd, table_fd, json);
}

Status Checkpoint::TraceTotals(int table_fd, bool json) { return trace::WriteTotals(table_fd, json); }

}  // namespace cuda_remote::client
