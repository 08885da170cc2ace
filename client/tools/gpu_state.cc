#include "client/tools/gpu_state.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "proto/channel/handshake.h"
#include "proto/codec/operations.gen.h"
#include "proto/nvml/query.h"
#include "replay/replayer/channel_target.h"
#include "replay/replayer/replayer.h"

namespace cuda_remote::client::tools {
namespace {

constexpr uint64_t kPiece = kMaxPayloadBytes;
constexpr size_t kWindow = 16;
constexpr int kTellMs = 3000;

std::string Hex(uint64_t value) {
  char text[24];
  snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

bool Gone(ClientChannel* channel, ChannelStatus status, std::string* error) {
  const std::string reason = channel->end_reason();
  *error = "the session with the GPU server was lost: " + (reason.empty() ? ChannelStatusName(status) : reason);
  return false;
}

bool Failed(const std::string& what, uint32_t result, std::string* error) {
  *error = "the GPU server could not " + what + ": CUDA error " + std::to_string(result);
  return false;
}

// One request that is answered. The message of `reply` is what answers point into.
template <typename Request>
bool Ask(ClientChannel* channel, uint32_t operation, const Request& request, const std::string& what, Reply* reply,
         std::string* error) {
  std::string message;
  request.Encode(&message);
  FrameHeader header;
  header.call = operation;
  const ChannelStatus status = channel->Call(header, message, {}, nullptr, 0, reply);
  if (status != ChannelStatus::kOk) return Gone(channel, status, error);
  if (reply->result != 0) return Failed(what, reply->result, error);
  if (reply->pending_error != 0) return Failed(what, reply->pending_error, error);
  return true;
}

bool Malformed(std::string* error) {
  *error = "the GPU server's answer is malformed: it is of another version";
  return false;
}

template <typename Request>
Request Place(const ckptfmt::Region& region, uint64_t offset, uint64_t bytes) {
  Request request;
  const bool named = region.kind != ckptfmt::RegionKind::kAllocation;
  request.address = named ? offset : region.address + offset;
  request.bytes = bytes;
  if (named) {
    request.object = region.object;
    request.symbol = region.symbol;
  }
  request.context = region.context;
  return request;
}

std::string NameOf(const ckptfmt::Region& region) {
  if (region.kind == ckptfmt::RegionKind::kArray) return "the CUDA array " + Hex(region.object);
  return region.kind == ckptfmt::RegionKind::kAllocation ? "GPU memory at " + Hex(region.address)
                                                         : "the GPU variable " + region.symbol;
}

uint64_t TotalOf(const std::vector<ckptfmt::Region>& regions) {
  uint64_t total = 0;
  for (const ckptfmt::Region& region : regions) total += region.bytes;
  return total;
}

// Reads all regions in order with several requests on the way; `use` gets each piece.
bool ReadAll(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions,
             const std::function<bool(size_t region, uint64_t offset, std::string_view bytes)>& use,
             const Continue& go_on, std::string* error) {
  struct Piece {
    size_t region;
    uint64_t offset, bytes;
    uint64_t sequence;
    std::unique_ptr<char[]> buffer;
  };
  std::deque<Piece> on_the_way;
  std::vector<std::unique_ptr<char[]>> free_buffers;
  const uint64_t total = TotalOf(regions);
  uint64_t done = 0;
  size_t region = 0;
  uint64_t offset = 0;
  bool ok = true;
  Reply reply;
  while (true) {
    while (ok && on_the_way.size() < kWindow && region < regions.size()) {
      if (offset == regions[region].bytes) {
        ++region;
        offset = 0;
        continue;
      }
      Piece piece{region, offset, std::min(kPiece, regions[region].bytes - offset), 0, nullptr};
      if (free_buffers.empty()) {
        piece.buffer.reset(new char[kPiece]);
      } else {
        piece.buffer = std::move(free_buffers.back());
        free_buffers.pop_back();
      }
      FrameHeader header;
      header.call = kOpReadMemory;
      std::string message;
      Place<wire::OpReadMemory_Request>(regions[region], offset, piece.bytes).Encode(&message);
      piece.sequence = channel->Begin(header, message, {}, piece.buffer.get(), piece.bytes);
      if (piece.sequence == 0) {
        ok = Gone(channel, ChannelStatus::kClosed, error);
        break;
      }
      offset += piece.bytes;
      on_the_way.push_back(std::move(piece));
    }
    if (on_the_way.empty()) return ok;
    // After a failure too: the channel writes into the buffers until each request is answered.
    Piece piece = std::move(on_the_way.front());
    on_the_way.pop_front();
    const ChannelStatus status = channel->Wait(piece.sequence, &reply);
    if (!ok) continue;
    if (status != ChannelStatus::kOk) {
      ok = Gone(channel, status, error);
    } else if (reply.result != 0 || reply.payload_bytes != piece.bytes) {
      ok = Failed("read " + NameOf(regions[piece.region]), reply.result, error);
    } else {
      ok = use(piece.region, piece.offset, std::string_view(piece.buffer.get(), piece.bytes));
      done += piece.bytes;
      free_buffers.push_back(std::move(piece.buffer));
      if (ok && go_on && !go_on(done, total)) {
        *error = "interrupted";
        ok = false;
      }
    }
  }
}

// Nobody waits for it; Drain tells whether all went well.
bool Write(ClientChannel* channel, const ckptfmt::Region& region, uint64_t offset, std::string_view bytes,
           std::string* error) {
  for (uint64_t at = 0; at < bytes.size(); at += kPiece) {
    const std::string_view piece = bytes.substr(at, kPiece);
    FrameHeader header;
    header.call = kOpWriteMemory;
    std::string message;
    Place<wire::OpWriteMemory_Request>(region, offset + at, piece.size()).Encode(&message);
    const ChannelStatus status = channel->Send(header, message, piece);
    if (status != ChannelStatus::kOk) return Gone(channel, status, error);
  }
  return true;
}

}  // namespace

std::unique_ptr<ClientChannel> OpenSession(const std::string& path, uint32_t pid, const std::string& program,
                                           const std::string& job, int gpu, std::string* error) {
  Hello hello;
  hello.pid = pid;
  hello.program = program;
  hello.job = job;
  hello.gpu = gpu;
  hello.replaying = true;
  Welcome welcome;
  std::unique_ptr<ClientChannel> channel = ClientChannel::Connect(path, hello, &welcome, error);
  if (!channel) *error = "cannot open a session with the GPU server at " + path + ": " + *error;
  return channel;
}

void TellSaved(const std::string& address, uint64_t session, uint64_t unix_ms, uint64_t bytes) {
  static constexpr char kUnix[] = "unix:";
  if (unix_ms == 0 || address.compare(0, sizeof(kUnix) - 1, kUnix) != 0) return;
  std::string error, body;
  const int socket = ConnectUnix(address.substr(sizeof(kUnix) - 1), &error);
  if (socket < 0) return;
  const nvml::SavedNote note = {session, unix_ms, bytes};
  nvml::Question question;
  question.pid = uint32_t(getpid());
  question.call = nvml::kSaved;
  question.input.assign(reinterpret_cast<const char*>(&note), sizeof(note));
  EncodeQuestion(question, &body);
  Packet answer;
  if (SendPacket(socket, PacketType::kQuery, body, -1) == ChannelStatus::kOk &&
      ReceivePacket(socket, &answer, kTellMs) == ChannelStatus::kOk && answer.fd >= 0) {
    close(answer.fd);
  }
  close(socket);
}

bool Drain(ClientChannel* channel, std::string* error) {
  Reply reply;
  if (!Ask(channel, kOpDrain, wire::OpDrain_Request{}, "finish its work", &reply, error)) return false;
  wire::OpDrain_Reply drained;
  if (!drained.Decode(reply.message)) return Malformed(error);
  if (drained.sticky_error != 0) {
    *error = "the job's GPU work has failed (CUDA error " + std::to_string(drained.sticky_error) + ")";
    return false;
  }
  if (drained.captures != 0) {
    *error = "the job is recording a CUDA graph (stream capture); try again when it is done";
    return false;
  }
  return true;
}

bool ListRegions(ClientChannel* channel, std::vector<ckptfmt::Region>* regions, std::string* error) {
  regions->clear();
  bool more = true;
  while (more) {
    wire::OpRegions_Request request;
    request.after = regions->size();
    Reply reply;
    if (!Ask(channel, kOpRegions, request, "list its memory", &reply, error)) return false;
    wire::OpRegions_Reply listed;
    if (!listed.Decode(reply.message)) return Malformed(error);
    if (!listed.refusals.empty()) {
      *error = "the job has GPU state that cannot be saved:";
      for (std::string_view refusal : listed.refusals) *error += " " + std::string(refusal) + ";";
      error->pop_back();
      return false;
    }
    for (const wire::Region& from : listed.regions) {
      ckptfmt::Region region;
      if (from.kind < 1 || from.kind > uint32_t(ckptfmt::RegionKind::kArray)) return Malformed(error);
      region.kind = ckptfmt::RegionKind(from.kind);
      region.address = from.address;
      region.bytes = from.bytes;
      region.object = from.object;
      region.symbol = std::string(from.symbol);
      region.context = from.context;
      region.device = from.device;
      region.module_index = from.module_index;
      regions->push_back(std::move(region));
    }
    more = listed.more && !listed.regions.empty();
  }
  return true;
}

bool DescribeServer(ClientChannel* channel, ckptfmt::ImageInfo* info, std::string* error) {
  Reply reply;
  if (!Ask(channel, kOpSessionInfo, wire::OpSessionInfo_Request{}, "describe itself", &reply, error)) return false;
  wire::OpSessionInfo_Reply facts;
  if (!facts.Decode(reply.message)) return Malformed(error);
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
  return true;
}

bool SaveMemory(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions, ckptfmt::ImageWriter* image,
                const Continue& go_on, std::string* error) {
  const auto check = [error](const absl::Status& status) {
    if (!status.ok()) *error = std::string(status.message());
    return status.ok();
  };
  size_t open = regions.size();  // none
  const auto use = [&](size_t region, uint64_t offset, std::string_view bytes) {
    if (open != region) {
      if (open != regions.size() && !check(image->EndRegion())) return false;
      if (!check(image->BeginRegion(regions[region]))) return false;
      open = region;
    }
    (void)offset;
    return check(image->AddData(bytes));
  };
  if (!ReadAll(channel, regions, use, go_on, error)) return false;
  return open == regions.size() || check(image->EndRegion());
}

// The driver places variables; the program, and other variables, may hold their addresses. Those that the program asked
// for by name are compared in the replay; this finds the others.
static bool CheckVariables(ClientChannel* channel, const std::vector<ckptfmt::Region>& wanted, std::string* error) {
  const auto is_variable = [](const ckptfmt::Region& region) {
    return region.kind == ckptfmt::RegionKind::kModuleSymbol || region.kind == ckptfmt::RegionKind::kLibrarySymbol;
  };
  if (std::none_of(wanted.begin(), wanted.end(), is_variable)) return true;
  std::vector<ckptfmt::Region> found;
  if (!ListRegions(channel, &found, error)) return false;
  using Name = std::tuple<uint64_t, uint64_t, std::string>;
  std::map<Name, uint64_t> addresses;
  for (const ckptfmt::Region& region : found) {
    if (is_variable(region)) addresses[Name(region.object, region.context, region.symbol)] = region.address;
  }
  for (const ckptfmt::Region& region : wanted) {
    if (!is_variable(region)) continue;
    const auto there = addresses.find(Name(region.object, region.context, region.symbol));
    if (there != addresses.end() && there->second == region.address) continue;
    *error = "the GPU variable " + region.symbol + " lies at " +
             (there == addresses.end() ? std::string("no address") : Hex(there->second)) + " on this server, but at " +
             Hex(region.address) + " before, and the job may have kept that address";
    return false;
  }
  return true;
}

bool LoadMemory(const ckptfmt::ImageReader& image, ClientChannel* channel, const Continue& go_on, std::string* error) {
  const uint64_t total = TotalOf(image.regions());
  uint64_t done = 0;
  for (size_t i = 0; i < image.regions().size(); ++i) {
    const ckptfmt::Region& region = image.regions()[i];
    const absl::Status status = image.ReadRegion(i, [&](uint64_t offset, std::string_view bytes, bool) -> absl::Status {
      if (!Write(channel, region, offset, bytes, error)) return absl::UnavailableError(*error);
      done += bytes.size();
      if (go_on && !go_on(done, total)) return absl::CancelledError("interrupted");
      return absl::OkStatus();
    });
    if (!status.ok()) {
      *error = std::string(status.message());
      return false;
    }
  }
  return Drain(channel, error) && CheckVariables(channel, image.regions(), error);
}

bool CopyMemory(ClientChannel* from, const std::vector<ckptfmt::Region>& regions, ClientChannel* to,
                const Continue& go_on, std::string* error) {
  const auto use = [&](size_t region, uint64_t offset, std::string_view bytes) {
    return Write(to, regions[region], offset, bytes, error);
  };
  return ReadAll(from, regions, use, go_on, error) && Drain(to, error) && CheckVariables(to, regions, error);
}

bool ReplayLog(const replay::Log& log, ClientChannel* channel, std::string* error) {
  replay::ChannelTarget target(*channel);
  if (replay::Replay(log, target, nullptr, error, replay::Part::kBeforePinned)) return Drain(channel, error);
  *error = "the job's GPU objects cannot be made again on this server: " + *error;
  return false;
}

}  // namespace cuda_remote::client::tools
