// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/gpu_state.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "checkpoint/gpu/ask_server.h"
#include "checkpoint/gpu/direct_copy.h"
#include "checkpoint/gpu/side_requests.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/channel/handshake.h"
#include "proto/chunkhash/chunk_hash.h"
#include "proto/codec/operations.gen.h"
#include "proto/control/control.pb.h"
#include "proto/control/socket_call.h"
#include "proto/driverabi/address_search.h"
#include "proto/driverabi/error_names.h"
#include "proto/errors/absl_status.h"
#include "proto/errors/annotate.h"
#include "proto/nvml/query.h"
#include "replay/replayer/channel_target.h"
#include "replay/replayer/replayer.h"

namespace cuda_remote::checkpoint {
namespace {

// For copies from server to server: enough for all that is on the way.
constexpr uint64_t kCopyPool = uint64_t{64} * ChunkPool::kSlotBytes;
constexpr int kTellMs = 3000;
// Less is through the channel before the servers have mapped shared buffers.
constexpr uint64_t kWorthAttaching = 16 << 20;

// One request that is answered. The message of the reply is what answers point into.
template <typename Request>
absl::StatusOr<Reply> Ask(ClientChannel* channel, uint32_t operation, const Request& request, const std::string& what) {
  std::string message;
  request.Encode(&message);
  FrameHeader header;
  header.call = operation;
  Reply reply;
  const ChannelStatus status = channel->Call(header, message, {}, nullptr, 0, &reply);
  if (status != ChannelStatus::kOk) return Gone(channel, status);
  if (reply.result != 0) return Failed(what, reply.result);
  if (reply.pending_error != 0) return Failed(what, reply.pending_error);
  return reply;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ClientChannel>> OpenSession(const std::string& path, uint32_t pid,
                                                           const std::string& program, const std::string& job,
                                                           const std::vector<int>& gpus,
                                                           const std::string& driver_settings) {
  Hello hello;
  hello.pid = pid;
  hello.program = program;
  hello.job = job;
  if (gpus.size() == 1) hello.gpu = gpus[0];
  for (size_t i = 0; gpus.size() > 1 && i < gpus.size(); ++i) {
    hello.visible_devices += (i == 0 ? "" : ",") + std::to_string(gpus[i]);
  }
  hello.driver_settings = driver_settings;
  hello.replaying = true;
  Welcome welcome;
  StatusOr<std::unique_ptr<ClientChannel>> channel = ClientChannel::Connect(path, hello, &welcome);
  if (channel.ok()) return *std::move(channel);
  return absl::UnavailableError("cannot open a session with the GPU server at " + path + ": " +
                                channel.status().message());
}

namespace {

void Tell(const std::string& address, uint64_t session, control::NoteSavedRequest note) {
  const std::optional<std::string> path = SocketPathOf(address);
  if (!path) return;
  note.set_id(session);
  control::ControlCall call;
  *call.mutable_note_saved() = std::move(note);
  control::CallOnSocket(*path, call, kTellMs).IgnoreError();
}

control::NoteSavedRequest SavedNote(uint64_t unix_ms, uint64_t bytes) {
  control::NoteSavedRequest note;
  note.set_unix_ms(unix_ms);
  note.set_bytes(bytes);
  return note;
}

}  // namespace

void TellSaved(const std::string& address, uint64_t session, uint64_t unix_ms, uint64_t bytes) {
  if (unix_ms != 0) Tell(address, session, SavedNote(unix_ms, bytes));
}

void TellStopped(const std::string& address, uint64_t session, uint64_t unix_ms, uint64_t bytes) {
  control::NoteSavedRequest note = SavedNote(unix_ms, bytes);
  note.set_end(control::NoteSavedRequest::STOPPED);
  Tell(address, session, std::move(note));
}

void TellMoved(const std::string& address, uint64_t session, const std::string& to) {
  control::NoteSavedRequest note;
  note.set_end(control::NoteSavedRequest::MOVED);
  note.set_to(to);
  Tell(address, session, std::move(note));
}

std::string NotReplayableIn(const replay::Log& log) {
  std::string calls;
  for (const std::string& call : replay::NotReplayable(log)) calls += (calls.empty() ? "" : ", ") + call;
  return calls;
}

bool AskFreeMemory(const std::string& address, int gpu, uint64_t* bytes) {
  nvml::Question question;
  question.call = "nvmlDeviceGetMemoryInfo";
  question.gpu = gpu;
  nvml::Answer answer;
  nvml::Memory memory;
  if (!AskServer(address, std::move(question), &answer) || answer.output.size() != sizeof(memory)) return false;
  memcpy(&memory, answer.output.data(), sizeof(memory));
  *bytes = memory.free;
  return true;
}

absl::Status Drain(ClientChannel* channel) {
  CR_ASSIGN_OR_RETURN(const Reply reply, Ask(channel, kOpDrain, wire::OpDrain_Request{}, "finish its work"));
  wire::OpDrain_Reply drained;
  if (!drained.Decode(reply.message)) return Malformed();
  if (drained.sticky_error != 0) {
    return absl::FailedPreconditionError("the job's GPU work has failed with " +
                                         driverabi::DescribeError(drained.sticky_error));
  }
  if (drained.captures != 0) {
    return absl::FailedPreconditionError(
        "the job is recording a CUDA graph (stream capture); try again when it is done");
  }
  return absl::OkStatus();
}

// `request` says what is no refusal.
static absl::StatusOr<std::vector<ckptfmt::Region>> ListRegions(ClientChannel* channel,
                                                                wire::OpRegions_Request request) {
  std::vector<ckptfmt::Region> regions;
  bool more = true;
  while (more) {
    request.after = regions.size();
    CR_ASSIGN_OR_RETURN(const Reply reply, Ask(channel, kOpRegions, request, "list its memory"));
    wire::OpRegions_Reply listed;
    if (!listed.Decode(reply.message)) return Malformed();
    if (!listed.refusals.empty()) {
      std::string refusals;
      for (std::string_view refusal : listed.refusals) {
        refusals += (refusals.empty() ? " " : "; ") + std::string(refusal);
      }
      return absl::FailedPreconditionError("the job has GPU state that cannot be saved:" + refusals);
    }
    if (!AppendRegions(listed, &regions)) return Malformed();
    more = listed.more && !listed.regions.empty();
  }
  return regions;
}

absl::StatusOr<std::vector<ckptfmt::Region>> ListRegions(ClientChannel* channel,
                                                         const std::vector<uint64_t>& sessions) {
  wire::OpRegions_Request request;
  request.sessions = sessions;
  return ListRegions(channel, request);
}

absl::Status DescribeServer(ClientChannel* channel, ckptfmt::ProcessInfo* info) {
  CR_ASSIGN_OR_RETURN(const Reply reply,
                      Ask(channel, kOpSessionInfo, wire::OpSessionInfo_Request{}, "describe itself"));
  wire::OpSessionInfo_Reply facts;
  if (!facts.Decode(reply.message)) return Malformed();
  info->driver_version = facts.driver_version;
  for (const wire::DeviceInfo& from : facts.devices) {
    // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
    constexpr size_t kMajor = 75, kMinor = 76;
    ckptfmt::DeviceFacts device;
    device.name = std::string(from.name);
    device.uuid = std::string(from.uuid);
    device.total_memory = from.total_memory;
    device.pci_bus_id = std::string(from.pci_bus_id);
    if (from.attributes.size() > kMinor) {
      device.compute_major = from.attributes[kMajor];
      device.compute_minor = from.attributes[kMinor];
    }
    info->devices.push_back(std::move(device));
  }
  return absl::OkStatus();
}

uint64_t PoolBytesFor(const std::vector<ckptfmt::Region>& regions, const SkipChunk& skip) {
  std::vector<size_t> chunks;
  for (size_t i = 0; i < regions.size(); ++i) {
    for (uint64_t at = 0; at < regions[i].bytes; at += ckptfmt::kChunkBytes) {
      if (skip && skip(i, at / ckptfmt::kChunkBytes)) continue;
      chunks.push_back(size_t(std::min(ckptfmt::kChunkBytes, regions[i].bytes - at)));
    }
  }
  return ChunkPool::MostTaken(chunks);
}

// The hashes of the chunks, as HashRegions. The job stands still, and its GPU is idle. Nothing without an answer: then
// all is read.
static std::vector<std::vector<ChunkHash>> HashesInPause(ClientChannel* channel,
                                                         const std::vector<ckptfmt::Region>& regions) {
  ChannelRequests requests(channel);
  return HashRegions(&requests, regions).value_or(std::vector<std::vector<ChunkHash>>(regions.size()));
}

absl::Status SaveMemory(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions,
                        ckptfmt::ImageWriter* image, ChunkPool* pool, bool holds, SharedBuffers* shared,
                        Precopy* copies, GpuSnapshot* snapshot, UseChunk* later, const Continue& go_on,
                        SaveTimes* times) {
  std::vector<uint32_t> numbers;
  for (const ckptfmt::Region& region : regions) {
    CR_ASSIGN_OR_RETURN(const uint32_t number, image->AddRegion(region));
    numbers.push_back(number);
  }
  const UseChunk use = [numbers, image, pool](size_t region, uint64_t index, char* slot, size_t bytes) {
    return image->AddChunk(numbers[region], index, {slot, bytes}, [pool, slot] { pool->Give(slot); });
  };
  // What need not be read from here on. Without hashes that is nothing.
  std::vector<std::vector<bool>> given(regions.size());
  const bool copied = copies && copies->held_bytes() != 0;
  if (copied || image->keeps_gpu_hashes()) {
    const Moment asked = Now();
    const std::vector<std::vector<ChunkHash>> hashes = HashesInPause(channel, regions);
    times->hashing += SecondsSince(asked);
    if (copied) copies->Compare(regions, hashes);
    for (size_t i = 0; i < regions.size(); ++i) {
      given[i].resize(hashes[i].size());
      for (uint64_t index = 0; index < hashes[i].size(); ++index) {
        const ChunkHash& hash = hashes[i][index];
        const size_t bytes = size_t(std::min(ckptfmt::kChunkBytes, regions[i].bytes - index * ckptfmt::kChunkBytes));
        if (image->AddUnread(numbers[i], index, hash)) {
          given[i][index] = true;
          times->unread_bytes += bytes;
        } else if (char* const slot = copied ? copies->Take(regions[i], index) : nullptr) {
          CR_RETURN_IF_ERROR(use(i, index, slot, bytes));
          given[i][index] = true;
        }
      }
    }
    if (copied) copies->Clear();
  }
  const auto is_given = [&](size_t region, uint64_t index) {
    return index < given[region].size() && given[region][index];
  };
  if (snapshot) {
    *later = use;
    const Moment taking = Now();
    CR_RETURN_IF_ERROR(snapshot->Take(channel, regions, is_given));
    times->taking += SecondsSince(taking);
  }
  const auto skip = [&](size_t region, uint64_t index) {
    return is_given(region, index) || (snapshot && snapshot->Has(region, index));
  };
  // With one slot to spare.
  if (holds && PoolBytesFor(regions, skip) + ChunkPool::kSlotBytes > pool->free_bytes()) image->ReleaseChunks();
  const Moment start = Now();
  SharedBuffers* const attached = shared && shared->Attach(channel) ? shared : nullptr;
  times->attaching += SecondsSince(start);
  absl::Status status = ReadMemory(channel, regions, pool, attached, use, go_on, &times->reading, skip);
  const Moment read = Now();
  if (attached) attached->Detach();
  times->detaching += SecondsSince(read);
  return status;
}

absl::StatusOr<MovedCode> FindMovedCode(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions) {
  MovedCode moved;
  const auto holds_code = [](const ckptfmt::Region& region) {
    return region.flags != 0 &&
           (region.kind == ckptfmt::RegionKind::kModuleSymbol || region.kind == ckptfmt::RegionKind::kLibrarySymbol);
  };
  if (std::none_of(regions.begin(), regions.end(), holds_code)) return moved;
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> hashes;  // by module and context
  wire::OpCodeWords_Request request;
  for (bool more = true; more;) {
    CR_ASSIGN_OR_RETURN(const Reply reply, Ask(channel, kOpCodeWords, request, "tell where functions lie"));
    wire::OpCodeWords_Reply found;
    if (!found.Decode(reply.message)) return Malformed();
    std::set<uint64_t> modules;
    for (wire::ModuleCode& one : found.modules) {
      modules.insert(one.module);
      for (std::vector<uint64_t>* words : {&one.before, &one.now}) {
        for (uint64_t& word : *words) word = ~word;
      }
      hashes[{one.module, one.context}] = driverabi::HashOfAddresses(one.before);
      if (one.counts.size() != one.symbols.size() || one.now.size() != one.offsets.size()) return Malformed();
      // Other variables than before: the hash says so below.
      if (one.before.size() != one.now.size()) {
        hashes[{one.module, one.context}] = 0;
        continue;
      }
      size_t next = 0;
      for (size_t i = 0; i < one.symbols.size(); ++i) {
        if (one.counts[i] > one.offsets.size() - next) return Malformed();
        std::vector<MovedCode::Word> words;
        for (const size_t end = next + one.counts[i]; next < end; ++next) {
          words.push_back({one.offsets[next], one.before[next], one.now[next]});
        }
        moved.Add(one.module, one.context, std::string(one.symbols[i]), words);
      }
    }
    request.after += modules.size();
    more = found.more && !modules.empty();
  }
  for (const ckptfmt::Region& region : regions) {
    const auto known = hashes.find({region.object, region.context});
    if (!holds_code(region) || (known != hashes.end() && known->second == region.flags)) continue;
    return absl::FailedPreconditionError(
        "the GPU functions whose addresses the variable " + region.symbol +
        " holds lie elsewhere on this server than before, and it is not known where they lay");
  }
  return moved;
}

// The driver places variables and the kernels' heaps; the program, and other variables, may hold their addresses.
// Variables that the program asked for by name are compared in the replay; this finds the others, and heaps.
static absl::Status ComparePlaces(ClientChannel* channel, const std::vector<ckptfmt::Region>& wanted, bool heaps) {
  const auto is_variable = [heaps](const ckptfmt::Region& region) {
    return region.kind == ckptfmt::RegionKind::kModuleSymbol || region.kind == ckptfmt::RegionKind::kLibrarySymbol ||
           (heaps && region.kind == ckptfmt::RegionKind::kHeap);
  };
  if (std::none_of(wanted.begin(), wanted.end(), is_variable)) return absl::OkStatus();
  wire::OpRegions_Request request;
  request.replayed = true;
  CR_ASSIGN_OR_RETURN(const std::vector<ckptfmt::Region> found, ListRegions(channel, request));
  using Name = std::tuple<uint64_t, uint64_t, std::string>;
  std::map<Name, const ckptfmt::Region*> here;
  for (const ckptfmt::Region& region : found) {
    if (is_variable(region)) here[Name(region.object, region.context, region.symbol)] = &region;
  }
  for (const ckptfmt::Region& region : wanted) {
    if (!is_variable(region)) continue;
    const auto there = here.find(Name(region.object, region.context, region.symbol));
    if (region.kind == ckptfmt::RegionKind::kHeap && there != here.end() &&
        (there->second->address != region.address || there->second->bytes != region.bytes)) {
      return absl::FailedPreconditionError(
          "the heap of the job's kernels lies at " + Hex(there->second->address) + " on this server (" +
          std::to_string(there->second->bytes) + " bytes), but at " + Hex(region.address) + " before (" +
          std::to_string(region.bytes) + " bytes), and addresses in it would be wrong");
    }
    if (there == here.end() || there->second->address != region.address) {
      return absl::FailedPreconditionError(
          "the GPU variable " + region.symbol + " lies at " +
          (there == here.end() ? std::string("no address") : Hex(there->second->address)) + " on this server, but at " +
          Hex(region.address) + " before, and the job may have kept that address");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckVariables(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions) {
  return ComparePlaces(channel, regions, /*heaps=*/false);
}

absl::Status LoadMemory(const ckptfmt::ImageReader& image, uint32_t process, ClientChannel* channel,
                        const Continue& go_on) {
  std::vector<ckptfmt::Region> regions;
  std::vector<size_t> numbers;  // in the image
  for (size_t i = 0; i < image.regions().size(); ++i) {
    if (image.regions()[i].process != process) continue;
    regions.push_back(image.regions()[i]);
    numbers.push_back(i);
  }
  CR_ASSIGN_OR_RETURN(const MovedCode moved, FindMovedCode(channel, regions));
  const auto fill = [&](size_t region, uint64_t index, char* out, size_t bytes) {
    bool zero;
    const absl::Status status = image.ReadChunk(numbers[region], index, out, &zero);
    if (!status.ok() || zero) return status;
    return moved.Translate(regions[region], index * ckptfmt::kChunkBytes, out, bytes);
  };
  const std::unique_ptr<SharedBuffers> shared = SharedBuffers::Make();
  SharedBuffers* const attached = shared && shared->Attach(channel) ? shared.get() : nullptr;
  const absl::Status written = WriteMemory(channel, regions, attached, fill, go_on);
  if (attached) attached->Detach();
  CR_RETURN_IF_ERROR(written);
  CR_RETURN_IF_ERROR(Drain(channel));
  return ComparePlaces(channel, regions, /*heaps=*/true);
}

absl::Status CopyMemory(ClientChannel* from, const std::vector<ckptfmt::Region>& regions, ClientChannel* to,
                        const MovedCode& moved, const SharedBlocks& handed_over, const SkipChunk& is_there,
                        SharedBuffers* shared, const Continue& go_on, CopiedBytes* bytes) {
  uint64_t before = 0, total = 0;
  std::vector<ckptfmt::Region> to_copy;
  std::vector<size_t> numbers;  // of these in `regions`
  for (size_t i = 0; i < regions.size(); ++i) {
    total += regions[i].bytes;
    if (handed_over.Have(regions[i])) {
      before += regions[i].bytes;
    } else {
      to_copy.push_back(regions[i]);
      numbers.push_back(i);
    }
  }
  bytes->handed_over += before;
  // The translation would change the old server's memory, too.
  if (before != 0 && !moved.empty()) {
    return absl::FailedPreconditionError(
        "functions lie elsewhere on the new server, and its memory is still the old one's");
  }
  const Continue go_on_with_copies = [&](uint64_t done, uint64_t) { return !go_on || go_on(before + done, total); };
  std::vector<bool> copied(to_copy.size(), false);
  // Addresses that have changed are looked for, and changed, on the way through the host.
  if (moved.empty()) {
    CR_ASSIGN_OR_RETURN(copied, CopyDirectly(from, to, to_copy, go_on_with_copies));
  }
  std::vector<ckptfmt::Region> rest;
  std::vector<size_t> rest_numbers;
  uint64_t direct = 0, there = 0;
  const bool has_some = is_there && moved.empty();
  for (size_t i = 0; i < to_copy.size(); ++i) {
    const ckptfmt::Region& region = to_copy[i];
    if (copied[i]) {
      direct += region.bytes;
      continue;
    }
    rest.push_back(region);
    rest_numbers.push_back(numbers[i]);
    for (uint64_t at = 0; has_some && at < region.bytes; at += ckptfmt::kChunkBytes) {
      if (is_there(numbers[i], at / ckptfmt::kChunkBytes)) there += std::min(ckptfmt::kChunkBytes, region.bytes - at);
    }
  }
  const auto skip = [&](size_t region, uint64_t index) { return has_some && is_there(rest_numbers[region], index); };
  before += direct + there;
  bytes->direct += direct;
  bytes->there += there;
  bytes->copied += total - before;
  const Continue go_on_with_rest = [&](uint64_t done, uint64_t) { return !go_on || go_on(before + done, total); };
  ChunkPool pool(kCopyPool);
  if (!pool.ok()) {
    return absl::ResourceExhaustedError("out of memory: no buffer for copies between the host and the GPU");
  }
  const auto use = [&](size_t region, uint64_t index, char* slot, size_t count) {
    const uint64_t offset = index * ckptfmt::kChunkBytes;
    absl::Status status = moved.Translate(rest[region], offset, slot, count);
    if (status.ok()) status = SendBytes(to, rest[region], offset, {slot, count});
    pool.Give(slot);
    return status;
  };
  const bool worth = total - before >= kWorthAttaching;
  SharedBuffers* const attached = worth && shared && shared->Attach(from) ? shared : nullptr;
  absl::Status status;
  if (attached && attached->Attach(to)) {
    const auto change = [&](size_t region, uint64_t index, char* data, size_t count) {
      return moved.Translate(rest[region], index * ckptfmt::kChunkBytes, data, count);
    };
    status = CopyBetween(from, to, rest, attached, change, go_on_with_rest, skip);
  } else {
    status = ReadMemory(from, rest, &pool, attached, use, go_on_with_rest, nullptr, skip);
  }
  if (attached) attached->Detach();
  CR_RETURN_IF_ERROR(status);
  CR_RETURN_IF_ERROR(Drain(to));
  return ComparePlaces(to, regions, /*heaps=*/true);
}

absl::Status ReplayLog(const replay::Log& log, ClientChannel* channel, const std::string& scope,
                       const replay::Log* ahead) {
  replay::ChannelTarget target(*channel);
  // The session that it replaces may still be there, and answers for the same keys.
  std::string own = scope;
  if (own.empty() && replay::Shares(log)) {
    own.resize(16);
    if (getrandom(&own[0], own.size(), 0) != ssize_t(own.size())) own.clear();
  }
  if (!own.empty()) CR_RETURN_IF_ERROR(ToAbsl(replay::ShareIn(own, target)));
  const absl::Status replayed = ToAbsl(replay::Replay(log, target, nullptr, replay::Part::kBeforePinned, ahead));
  if (!replayed.ok()) return Annotate("the job's GPU objects cannot be recreated on this server: ", replayed);
  return Drain(channel);
}

bool ReplayCode(const replay::Log& log, ClientChannel* channel) {
  replay::ChannelTarget target(*channel);
  return replay::ReplayCode(log, target).ok();
}

}  // namespace cuda_remote::checkpoint
