// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/side_requests.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "proto/base/status_macros.h"
#include "proto/driverabi/error_names.h"

namespace cuda_remote::checkpoint {
namespace {

using ckptfmt::kChunkBytes;
using ckptfmt::Region;
using ckptfmt::RegionKind;

// Of one request for hashes: what an agent's message and a reply have room for. And how many are open.
constexpr size_t kMostRegions = 200;
constexpr size_t kMostChunks = 16384;
constexpr size_t kMostOpen = 8;

// A part of a region, whose first chunk is `first`.
struct Part {
  size_t region;
  uint64_t first, chunks;
};

bool IsWorthHashing(const Region& region) {
  return region.kind == RegionKind::kAllocation && region.bytes >= kWorthHashing;
}

}  // namespace

absl::Status Gone(ClientChannel* channel, ChannelStatus status) {
  const std::string reason = channel->end_reason();
  return absl::UnavailableError("the session with the GPU server was lost: " +
                                (reason.empty() ? ChannelStatusName(status) : reason));
}

absl::Status Failed(const std::string& what, uint32_t result) {
  return absl::FailedPreconditionError("the GPU server could not " + what + ": " + driverabi::DescribeError(result));
}

absl::Status Malformed() {
  return absl::DataLossError("the GPU server's answer is malformed: it is of another version");
}

absl::StatusOr<agent::SideAnswer> AskAndWait(SideRequests* requests, const agent::SideRequest& request) {
  CR_ASSIGN_OR_RETURN(const uint64_t number, requests->Begin(request));
  return requests->Wait(number);
}

bool AppendRegions(const wire::OpRegions_Reply& listed, std::vector<Region>* regions) {
  for (const wire::Region& from : listed.regions) {
    Region region;
    if (from.kind < 1 || from.kind > uint32_t(RegionKind::kHeap)) return false;
    region.kind = RegionKind(from.kind);
    region.address = from.address;
    region.bytes = from.bytes;
    region.object = from.object;
    region.symbol = std::string(from.symbol);
    region.context = from.context;
    region.device = from.device;
    region.module_index = from.module_index;
    region.flags = from.code;
    regions->push_back(std::move(region));
  }
  return true;
}

ChannelRequests::~ChannelRequests() {
  while (!payloads_.empty()) Wait(payloads_.begin()->first).IgnoreError();
}

absl::StatusOr<uint64_t> ChannelRequests::Begin(const agent::SideRequest& request) {
  if (request.tag != 0) {
    const ChannelStatus status = channel_->SendFd(request.tag, request.fd);
    if (status != ChannelStatus::kOk) return Gone(channel_, status);
  }
  auto payload = std::make_unique<std::string>(request.payload_bytes, 0);
  FrameHeader header;
  header.call = request.operation;
  const uint64_t number = channel_->Begin(header, request.message, {}, &(*payload)[0], payload->size());
  if (number == 0) return Gone(channel_, ChannelStatus::kClosed);
  payloads_[number] = std::move(payload);
  return number;
}

absl::StatusOr<agent::SideAnswer> ChannelRequests::Wait(uint64_t number) {
  Reply reply;
  agent::SideAnswer answer;
  const ChannelStatus status = channel_->Wait(number, &reply);
  const auto payload = payloads_.find(number);
  if (payload != payloads_.end()) {
    answer.payload = std::move(*payload->second);
    payloads_.erase(payload);
  }
  if (status != ChannelStatus::kOk) return Gone(channel_, status);
  answer.payload.resize(std::min<size_t>(answer.payload.size(), reply.payload_bytes));
  answer.result = reply.result;
  answer.message = std::move(reply.message);
  return answer;
}

absl::StatusOr<std::vector<Region>> ListNow(SideRequests* requests) {
  std::vector<Region> regions;
  for (bool more = true; more;) {
    wire::OpRegions_Request request;
    request.after = regions.size();
    request.replayed = true;  // whether it is shared with others is no matter yet
    CR_ASSIGN_OR_RETURN(const agent::SideAnswer answer, AskAndWait(requests, SideRequestOf(kOpRegions, request)));
    if (answer.result != 0) return Failed("list its memory", answer.result);
    wire::OpRegions_Reply listed;
    if (!listed.Decode(answer.message) || !AppendRegions(listed, &regions)) return Malformed();
    more = listed.more && !listed.regions.empty();
  }
  return regions;
}

absl::StatusOr<std::vector<std::vector<ChunkHash>>> HashRegions(SideRequests* requests,
                                                                const std::vector<Region>& regions, uint32_t* refused,
                                                                uint32_t every) {
  if (refused) *refused = 0;
  std::vector<std::vector<ChunkHash>> hashes(regions.size());
  // One request is about one context.
  std::map<std::pair<uint64_t, int32_t>, std::vector<size_t>> by_context;
  for (size_t i = 0; i < regions.size(); ++i) {
    if (!IsWorthHashing(regions[i])) continue;
    by_context[{regions[i].context, regions[i].device}].push_back(i);
    hashes[i].resize((regions[i].bytes + kChunkBytes - 1) / kChunkBytes);
  }
  std::vector<std::vector<Part>> batches;
  for (const auto& [context, members] : by_context) {
    size_t chunks = kMostChunks;  // full
    for (const size_t i : members) {
      const uint64_t all = hashes[i].size();
      for (uint64_t first = 0; first < all;) {
        if (chunks == kMostChunks || batches.back().size() == kMostRegions) {
          batches.emplace_back();
          chunks = 0;
        }
        const uint64_t count = std::min<uint64_t>(all - first, kMostChunks - chunks);
        batches.back().push_back({i, first, count});
        first += count;
        chunks += count;
      }
    }
  }
  std::deque<std::pair<uint64_t, const std::vector<Part>*>> open;
  const auto finish = [&]() -> absl::Status {
    const auto [number, parts] = open.front();
    open.pop_front();
    CR_ASSIGN_OR_RETURN(const agent::SideAnswer answer, requests->Wait(number));
    if (answer.result != 0) {
      if (refused) *refused = answer.result;
      return Failed("hash its memory", answer.result);
    }
    size_t at = 0;
    for (const Part& part : *parts) {
      const size_t bytes = part.chunks * sizeof(ChunkHash);
      if (answer.payload.size() - at < bytes) return Malformed();
      memcpy(&hashes[part.region][part.first], answer.payload.data() + at, bytes);
      at += bytes;
    }
    return absl::OkStatus();
  };
  absl::Status status;
  for (const std::vector<Part>& parts : batches) {
    if (open.size() >= kMostOpen) status = finish();
    if (!status.ok()) break;
    wire::OpHashMemory_Request request;
    request.chunk_bytes = kChunkBytes;
    request.every = every;
    size_t chunks = 0;
    for (const Part& part : parts) {
      const Region& from = regions[part.region];
      wire::Region region;
      region.kind = uint32_t(from.kind);
      region.address = from.address + part.first * kChunkBytes;
      region.bytes = std::min(from.bytes - part.first * kChunkBytes, part.chunks * kChunkBytes);
      region.context = from.context;
      request.regions.push_back(region);
      chunks += part.chunks;
    }
    agent::SideRequest asked = SideRequestOf(kOpHashMemory, request);
    asked.payload_bytes = chunks * sizeof(ChunkHash);
    const absl::StatusOr<uint64_t> number = requests->Begin(asked);
    status = number.status();
    if (!status.ok()) break;
    open.emplace_back(*number, &parts);
  }
  while (!open.empty()) {
    if (status.ok()) {
      status = finish();
      continue;
    }
    requests->Wait(open.front().first).IgnoreError();
    open.pop_front();
  }
  CR_RETURN_IF_ERROR(status);
  return hashes;
}

}  // namespace cuda_remote::checkpoint
