// SPDX-License-Identifier: Apache-2.0
// The session's side of checkpoint, restart and migration: what the agent's requests do (see client/agent/agent.h).
//
// All of it runs on the agent's thread. From Settle to Unlock no driver call is inside the library, no host function
// runs and the GPU is idle, so nothing there races with the application. Before that, Close, Look and Admit do not wait
// for either.

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "client/session/log.h"
#include "client/session/session.h"
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
constexpr uint32_t kSideOperations[] = {kOpRegions,    kOpListBlocks, kOpHashMemory,
                                        kOpPeekMemory, kOpHostMap,    kOpHostUnmap};

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// An anonymous file with `bytes` in it, positioned at its start; -1 and `error` on failure.
int MakeMemfd(const char* name, const std::string& bytes, std::string* error) {
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0) {
    *error = std::string("memfd_create: ") + strerror(errno);
    return -1;
  }
  for (size_t written = 0; written < bytes.size();) {
    const ssize_t n = write(fd, bytes.data() + written, bytes.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      *error = std::string("writing the replay log to memory: ") + strerror(errno);
      close(fd);
      return -1;
    }
    written += size_t(n);
  }
  lseek(fd, 0, SEEK_SET);
  return fd;
}

}  // namespace

agent::Info Session::GetInfo() {
  agent::Info info;
  info.pid = uint32_t(getpid());
  info.server = settings_.server;
  info.job = settings_.job;
  info.driver_settings = settings_.driver_settings;
  if (channel_) {
    info.session = channel_->welcome().session;
    info.shared_memory = channel_->welcome().shared_memory;
  }
  std::shared_lock<std::shared_mutex> lock(mutex_);
  info.log_records = log_.records();
  info.log_bytes = log_.bytes();
  return info;
}

bool Session::Close(std::string* error) {
  if (lost_.load() != CUDA_SUCCESS) {
    *error = "the job has lost its GPU server; there is no GPU state left to save";
    return false;
  }
  // Before the gate closes: a timeline that is being fetched uses the channel. What is open now would be in a snapshot.
  trace::Pause();
  admissions_ = 0;
  {
    std::lock_guard<std::mutex> lock(added_mutex_);
    added_.clear();
  }
  gate_.Close();
  if (channel_ && !taken_) host_functions_.SetChannel(channel_.get());  // after a Settle that is undone
  return true;
}

bool Session::Look(agent::Activity* activity, std::string* error) {
  const bool closed = gate_.closed();
  activity->capturing = captures_.active();
  activity->inside = closed ? gate_.AwaitEmpty(kLookMs) : gate_.inside();
  bool quiet = closed && activity->inside == 0 && !activity->capturing;
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
    question_ = channel_->TryBegin(header, message, kLookMs, &status);
    if (question_ == 0 && status != ChannelStatus::kTimeout) return ServerWentAway(status, error);
  }
  Reply reply;
  ChannelStatus status = ChannelStatus::kTimeout;
  if (question_ != 0) status = channel_->WaitFor(question_, kLookMs, &reply);
  if (status != ChannelStatus::kTimeout) {
    question_ = 0;
    if (status != ChannelStatus::kOk) return ServerWentAway(status, error);
    if (reply.pending_error != CUDA_SUCCESS) SetPendingError(CUresult(reply.pending_error));
    wire::OpDrain_Reply work;
    if (reply.result == CUDA_SUCCESS && !work.Decode(reply.message)) {
      return ServerWentAway(ChannelStatus::kProtocolError, error);
    }
    if (reply.result != CUDA_SUCCESS) return WorkFailed(CUresult(reply.result), error);
    activity->answered = true;
    activity->has_work = work.busy;
    activity->held_bytes = work.held_bytes;
    busy_streams_.assign(work.busy_streams.begin(), work.busy_streams.end());
    busy_contexts_.assign(work.busy_contexts.begin(), work.busy_contexts.end());
    if (question_admissions_ == admissions_) ForgetIdleStreams();
    quiet = quiet && question_quiet_ && question_admissions_ == admissions_ && !work.busy && work.captures == 0;
  } else {
    quiet = false;
  }
  activity->busy_streams = busy_streams_.size();
  activity->host_function_ms = host_functions_.RunningMs();
  activity->quiet = quiet && activity->host_function_ms == 0 && gate_.inside() == 0;
  const auto of = [&](uint64_t context) -> agent::Activity::Context& {
    auto& contexts = activity->contexts;
    auto at = std::find_if(contexts.begin(), contexts.end(), [&](const auto& one) { return one.context == context; });
    if (at == contexts.end()) at = contexts.insert(at, {context, 0, HasWork(context), IsAdding(context)});
    return *at;
  };
  for (const uint64_t context : busy_contexts_) of(context);
  gate_.ForEachHeld([&](const Gate::Held& held) { ++(held.asks ? activity->asking : of(held.context).calls); });
  return true;
}

void Session::NoteLeft(uint64_t stream, uint64_t context) {
  std::lock_guard<std::mutex> lock(added_mutex_);
  added_.emplace(KindOf(stream) == Kind::kStream ? stream : context, context);
}

void Session::ForgetIdleStreams() {
  std::lock_guard<std::mutex> lock(added_mutex_);
  for (auto it = added_.begin(); it != added_.end();) {
    const bool busy = std::find(busy_streams_.begin(), busy_streams_.end(), it->first) != busy_streams_.end();
    it = busy ? std::next(it) : added_.erase(it);
  }
}

bool Session::IsAdding(uint64_t context) {
  std::lock_guard<std::mutex> lock(added_mutex_);
  return std::any_of(added_.begin(), added_.end(), [&](const auto& one) { return one.second == context; });
}

bool Session::HasWork(uint64_t context) const {
  return std::find(busy_contexts_.begin(), busy_contexts_.end(), context) != busy_contexts_.end();
}

bool Session::Admit(const agent::Admission& which) {
  const bool admitted = gate_.Admit([&which](const Gate::Held& held) {
    return held.asks == which.asks && (held.asks || held.context == which.context);
  });
  if (admitted) ++admissions_;
  return admitted;
}

bool Session::Settle(int timeout_ms, const std::function<bool()>& gone, bool* settled, std::string* error) {
  *settled = false;
  // A host function or the destructor of a user object may have begun since.
  if (!gate_.closed() || gate_.inside() != 0 || captures_.active()) return true;
  if (!host_functions_.Detach(kDetachMs)) {
    host_functions_.SetChannel(channel_.get());
    return true;
  }
  // What only this side knows of is settled before anybody looks.
  staging_.GiveBack(this);
  GiveBackFreed();
  const int64_t deadline = NowNs() + int64_t(timeout_ms) * 1000000;
  bool ok = DrainUntil(deadline, gone, error);
  // From here on both sides have the same bytes: the server's are saved with its memory, ours with the process.
  if (ok && managed_mirror_.active()) {
    ChannelStatus status = managed_mirror_.Push(channel_.get());
    if (status == ChannelStatus::kOk) status = managed_mirror_.Pull(channel_.get());
    ok = status == ChannelStatus::kOk ? DrainUntil(deadline, gone, error) : ServerWentAway(status, error);
  }
  managed_mirror_.StopWatching();
  if (ok && uses_managed()) {
    const CUresult result = managed_home_.Settle(this);
    ok = result == CUDA_SUCCESS;
    if (!ok) *error = "managed memory could not be fetched: " + driverabi::DescribeError(result);
  }
  if (!ok) {
    host_functions_.SetChannel(channel_.get());
    return false;
  }
  NoteEventTimes();
  *settled = true;
  return true;
}

bool Session::DrainUntil(int64_t deadline_ns, const std::function<bool()>& gone, std::string* error) {
  while (true) {
    agent::Activity activity;
    if (!Look(&activity, error)) return false;
    if (activity.quiet) return true;
    if (gone()) {
      *error = "interrupted";
      return false;
    }
    if (NowNs() > deadline_ns) {
      *error = "the GPU server did not finish giving memory back in time; try again with a longer --timeout";
      return false;
    }
  }
}

bool Session::ServerWentAway(ChannelStatus status, std::string* error) {
  Lose(status);
  *error = "the GPU server went away while its work was finishing";
  return false;
}

bool Session::WorkFailed(CUresult result, std::string* error) {
  *error = "the GPU's work did not finish cleanly: " + driverabi::DescribeError(result) +
           "; the job's GPU state is not worth saving";
  return false;
}

void Session::NoteEventTimes() {
  noted_event_ages_.clear();
  // A request asks for the events of one context.
  std::unordered_map<uint64_t, std::vector<uint64_t>> events;
  {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    for (const replay::Record* record : log_.InOrder()) {
      if (record->object.kind != Kind::kEvent || record->modifies) continue;
      const Object* const object = handles_.Find(Kind::kEvent, record->object.id);
      if (object) events[object->parent].push_back(record->object.id);
    }
  }
  for (const auto& [context, all] : events) {
    // Pieces, so that no message comes near its limit.
    constexpr size_t kPiece = 10000;
    for (size_t first = 0; first < all.size(); first += kPiece) {
      const std::vector<uint64_t> piece(all.begin() + first, all.begin() + std::min(all.size(), first + kPiece));
      std::vector<double> ages;
      if (AskEventAges(context, piece, &ages) != CUDA_SUCCESS) continue;
      for (size_t i = 0; i < piece.size(); ++i) {
        double before = 0;
        if (ages[i] >= 0) {
          noted_event_ages_[piece[i]] = ages[i];
        } else if (EventBeforeMove(piece[i], &before)) {
          noted_event_ages_[piece[i]] = MicrosecondsSinceMove() - before;
        }
      }
    }
  }
}

CUresult Session::AskEventAges(uint64_t context, const std::vector<uint64_t>& events,
                               std::vector<double>* microseconds) {
  wire::OpEventTimes_Request request;
  request.events.assign(events.begin(), events.end());
  std::string message;
  request.Encode(&message);
  Reply reply;
  const CUresult result = Operate(kOpEventTimes, message, &reply, SlotOf(context));
  if (result != CUDA_SUCCESS) return result;
  wire::OpEventTimes_Reply ages;
  if (!ages.Decode(reply.message) || ages.microseconds.size() != events.size())
    return Lose(ChannelStatus::kProtocolError);
  microseconds->assign(ages.microseconds.begin(), ages.microseconds.end());
  return CUDA_SUCCESS;
}

bool Session::EventBeforeMove(uint64_t event, double* microseconds) {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto it = event_ages_.find(event);
  if (it == event_ages_.end()) return false;
  *microseconds = -it->second;
  return true;
}

// One file decides for all processes of the job, so that none is left on another server than the rest.
void Session::SettleMove() {
  if (!given_new_ || !former_channel_) return;
  std::string scope;
  if (ReadSharingScope(settings_.job_dir, &scope) && scope != former_scope_) return;
  LogLine("the tool that was moving the job has ended; the process goes on with the GPU server %s",
          former_server_.c_str());
  agent::Given former;
  former.fds = former_channel_->DupFds();
  former.next_sequence = former_channel_->next_sequence();
  former.welcome = former_channel_->welcome();
  std::string error;
  if (Give(std::move(former), &error)) return;
  LogLine("%s", error.c_str());
  Lose(ChannelStatus::kSystemError);
}

double Session::MicrosecondsSinceMove() const { return double(NowNs() - moved_at_ns_) / 1000; }

void Session::Unlock() {
  ForgetQuestion();
  // After a Take that led nowhere, this process is the channel's user again; the tool has moved the rings' positions
  // on.
  if (channel_ && taken_) {
    std::string error;
    std::unique_ptr<ClientChannel> again =
        ClientChannel::Adopt(channel_->DupFds(), channel_->next_sequence(), channel_->welcome(), &error);
    if (again) {
      channel_ = std::move(again);
      channel_->SetStdoutSink(&WriteDeviceOutput);
      channel_->SetStderrSink(&WriteDeviceErrors);
      channel_->SetEager(!wait_asleep_);
    } else {
      LogLine("%s", error.c_str());
      Lose(ChannelStatus::kSystemError);
    }
  }
  taken_ = false;
  if (given_new_) {
    managed_home_.ForgetFormer();
    managed_mirror_.ForgetFormer();
  }
  given_new_ = false;
  former_channel_.reset();
  if (channel_) host_functions_.SetChannel(channel_.get());
  gate_.Open();
  trace::Resume();
}

bool Session::Take(agent::Taken* taken, std::string* error) {
  if (!channel_) {
    *error = "the job holds no channel to a GPU server (it was released already)";
    return false;
  }
  if (!NoteCode(error)) return false;
  std::string log;
  {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    log_.Serialize(&log);
  }
  taken->log_fd = MakeMemfd("cuda-remote-log", log, error);
  if (taken->log_fd < 0) return false;
  ForgetQuestion();
  taken_ = true;
  taken->fds = channel_->DupFds();
  taken->next_sequence = channel_->next_sequence();
  taken->welcome = channel_->welcome();
  return true;
}

bool Session::Ask(const agent::SideRequest& request, char* out, uint64_t* sequence, std::string* error) {
  if (std::find(std::begin(kSideOperations), std::end(kSideOperations), request.operation) ==
      std::end(kSideOperations)) {
    *error = "the job's client library does not let a tool ask for this beside its calls";
    return false;
  }
  if (!channel_ || lost_.load() != CUDA_SUCCESS) {
    *error = "the job has no GPU server";
    return false;
  }
  if (request.tag != 0 && channel_->SendFd(request.tag, request.fd) != ChannelStatus::kOk) {
    *error = "the GPU server does not take a descriptor";
    return false;
  }
  FrameHeader header;
  header.call = request.operation;
  *sequence = channel_->Begin(header, request.message, {}, out, request.payload_bytes);
  if (*sequence == 0) {
    *error = "the GPU server went away";
    return false;
  }
  wire::OpHostMap_Request map;
  wire::OpHostUnmap_Request unmap;
  if (request.operation == kOpHostMap && map.Decode(request.message)) side_mapping_[*sequence] = map.address;
  if (request.operation == kOpHostUnmap && unmap.Decode(request.message)) side_maps_.erase(unmap.address);
  return true;
}

bool Session::Answer(uint64_t sequence, int timeout_ms, bool* answered, agent::SideAnswer* answer, size_t* bytes,
                     std::string* error) {
  *answered = false;
  Reply reply;
  const ChannelStatus status = channel_ ? channel_->WaitFor(sequence, timeout_ms, &reply) : ChannelStatus::kClosed;
  if (status == ChannelStatus::kTimeout) return true;
  if (status != ChannelStatus::kOk) {
    *error = "the GPU server went away";
    return false;
  }
  if (reply.pending_error != CUDA_SUCCESS) SetPendingError(CUresult(reply.pending_error));
  *answered = true;
  if (const auto mapping = side_mapping_.find(sequence); mapping != side_mapping_.end()) {
    if (reply.result == CUDA_SUCCESS) side_maps_.insert(mapping->second);
    side_mapping_.erase(mapping);
  }
  answer->result = reply.result;
  answer->message = std::move(reply.message);
  *bytes = size_t(reply.payload_bytes);
  return true;
}

void Session::EndAsking(const std::vector<uint64_t>& open) {
  if (!channel_) return;
  for (const uint64_t sequence : open) channel_->Abandon(sequence);
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
    channel_->Send(header, message, {});
  }
  side_maps_.clear();
}

void Session::ForgetQuestion() {
  if (question_ != 0 && channel_) channel_->Abandon(question_);
  question_ = 0;
}

void Session::Release() {
  channel_.reset();
  taken_ = false;
}

void Session::Abandon() {
  Lose(ChannelStatus::kClosed);
  gate_.Open();
  trace::Resume();
}

bool Session::Give(agent::Given given, std::string* error) {
  std::unique_ptr<ClientChannel> adopted = ClientChannel::Adopt(given.fds, given.next_sequence, given.welcome, error);
  if (!adopted) return false;
  ForgetQuestion();
  if (!given.new_worker && given_new_) GoBack();
  const CUresult lost_before = lost_.load();
  host_functions_.SetChannel(nullptr);
  channel_.swap(adopted);
  channel_->SetStdoutSink(&WriteDeviceOutput);
  channel_->SetStderrSink(&WriteDeviceErrors);
  channel_->SetEager(!wait_asleep_);
  // The search comes before memory is mapped that looks used and is not.
  if (given.new_worker && (!FindOldCode(error) || !ShareHostArena(error) || !MapManaged(error) || !ReplayRest(error) ||
                           !MoveManaged(error))) {
    managed_home_.MoveBack();
    channel_.swap(adopted);
    // The new worker has ended, and not the one that this process has; in a restart it has none yet.
    if (lost_.exchange(lost_before) != lost_before && channel_) {
      LogLine("that was the session that the process was to move to; it goes on with the GPU server %s",
              settings_.server.c_str());
    }
    host_functions_.SetChannel(channel_.get());
    return false;
  }
  if (given.new_worker) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    event_ages_.swap(noted_event_ages_);
    former_moved_at_ns_ = moved_at_ns_;
    moved_at_ns_ = NowNs();
    former_server_ = settings_.server;
    former_scope_.clear();
    ReadSharingScope(settings_.job_dir, &former_scope_);
    former_channel_ = std::move(adopted);
    given_new_ = true;
  }
  completions_.ForgetAll();
  answers_.Forget();  // the GPU may be another
  taken_ = false;
  if (!given.server.empty()) settings_.server = given.server;
  lost_.store(CUDA_SUCCESS);
  host_functions_.SetChannel(channel_.get());
  return true;
}

// The tool takes a new channel back, since another process of the job could not take its own; or the tool has gone.
void Session::GoBack() {
  if (lost_.load() != CUDA_SUCCESS) {
    LogLine("that was the session that the process was to move to; it goes on with the GPU server %s",
            former_server_.c_str());
  }
  former_channel_.reset();
  managed_home_.MoveBack();
  managed_mirror_.MoveBack();
  settings_.server = former_server_;
  given_new_ = false;
  std::unique_lock<std::shared_mutex> lock(mutex_);
  event_ages_.swap(noted_event_ages_);
  moved_at_ns_ = former_moved_at_ns_;
}

bool Session::ReplayRest(std::string* error) {
  replay::ChannelTarget target(*channel_);
  std::shared_lock<std::shared_mutex> lock(mutex_);
  if (replay::Replay(log_, target, nullptr, error, replay::Part::kAfterPinned)) return true;
  *error = "the job's graphs cannot be made again on this server: " + *error;
  return false;
}

bool Session::MapManaged(std::string* error) {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  for (auto& [start, range] : host_ranges_) {
    if (range.value.alias_of || !IsMirrored(range.value)) continue;
    const CUresult result = MapOwnRange(range.value.device, range.bytes);
    if (result != CUDA_SUCCESS) {
      *error = "the new server has no room for host memory that kernels use (" + driverabi::DescribeError(result) + ")";
      return false;
    }
  }
  const CUresult moved = managed_home_.MoveTo(this);
  if (moved != CUDA_SUCCESS) {
    *error = "the new server has no room for the job's managed memory (" + driverabi::DescribeError(moved) + ")";
    return false;
  }
  for (auto& [start, range] : device_ranges_) {
    if (range.value.source != DeviceRange::kManaged || ManagedHome::Contains(start)) continue;
    const CUresult result = MapManagedRange(start, range.bytes, range.value.device);
    if (result != CUDA_SUCCESS) {
      *error = "the new server has no room for the job's managed memory (" + driverabi::DescribeError(result) + ")";
      return false;
    }
  }
  return true;
}

bool Session::MoveManaged(std::string* error) {
  std::vector<ManagedMirror::Place> places = managed_home_.Mirrored(this);
  std::shared_lock<std::shared_mutex> lock(mutex_);
  for (auto& [start, range] : device_ranges_) {
    if (!range.value.managed || ManagedHome::Contains(start)) continue;
    const bool variable = range.value.source == DeviceRange::kGlobal;
    if (variable || !shared_memory()) {
      places.push_back({start, range.bytes, start, !variable, ManagedMirror::Writers::kNobodyBesideTheGpu});
    }
  }
  for (auto& [start, range] : host_ranges_) {
    if (range.value.alias_of || !IsMirrored(range.value)) continue;
    places.push_back({range.value.device, range.bytes, start, true, ManagedMirror::Writers::kAnybody});
  }
  const CUresult result = managed_mirror_.MoveTo(channel_.get(), places);
  if (result == CUDA_SUCCESS) return true;
  *error = "the new server cannot mirror the job's managed memory (" + driverabi::DescribeError(result) + ")";
  return false;
}

bool Session::ShareHostArena(std::string* error) {
  if (host_arena_.fd() < 0 || !shared_memory()) return true;
  const auto refuse = [error](const char* what, CUresult result) {
    *error = std::string("the new server cannot map the job's ") + what + " memory (" +
             driverabi::DescribeError(result) + ")";
    return false;
  };
  const CUresult segments = pinned_heap_.MapSegments(this);
  if (segments != CUDA_SUCCESS) return refuse("pinned", segments);
  std::shared_lock<std::shared_mutex> lock(mutex_);
  for (auto& [start, range] : host_ranges_) {
    const bool registered = range.value.on_device && range.value.sharing != HostRange::kNone && !range.value.alias_of;
    const bool whole = range.value.shared && !pinned_heap_.InSegment(start);
    if (!whole && !registered) continue;
    const CUresult result = registered ? MapRegisteredRange(start, range.bytes, range.value)
                                       : MapHostRange(start, range.bytes, range.value.flags);
    if (result != CUDA_SUCCESS) return refuse(registered ? "registered" : "pinned", result);
  }
  return true;
}

}  // namespace cuda_remote::client
