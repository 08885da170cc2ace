// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/hand_over.h"

#include <deque>
#include <utility>

#include "proto/base/status_macros.h"

namespace cuda_remote::checkpoint {
namespace {

// Messages that the new session has not answered yet: it maps while the old one exports.
constexpr size_t kMostOpen = 2;

}  // namespace

bool SharedBlocks::Have(const ckptfmt::Region& region) const {
  if (region.kind != ckptfmt::RegionKind::kAllocation) return false;
  auto it = blocks_.upper_bound(region.address);
  if (it == blocks_.begin()) return false;
  --it;
  const uint64_t offset = region.address - it->first;
  return offset < it->second && region.bytes <= it->second - offset;
}

bool MayHandOver(const SideRequests& running, const ClientChannel& to) {
  return running.shared_memory() && to.welcome().shared_memory;
}

void PrepareHandOver(SideRequests* running) {
  AskForPieces<wire::OpExportBlocks_Reply>(running, wire::OpExportBlocks_Request{}, "export its memory",
                                           [](const wire::OpExportBlocks_Reply&) { return true; })
      .IgnoreError();
}

absl::StatusOr<SharedBlocks> HandOver(ClientChannel* from, ClientChannel* to) {
  SharedBlocks mapped;
  // Otherwise one of them is on another machine, as far as this process knows.
  if (!from->welcome().shared_memory || !to->welcome().shared_memory) return mapped;
  ChannelRequests offers(from), adoptions(to);
  struct Open {
    uint64_t number;
    std::map<uint64_t, uint64_t> blocks;  // address -> bytes
  };
  std::deque<Open> open;
  bool refused = false;
  const auto finish = [&]() -> absl::Status {
    const Open oldest = std::move(open.front());
    open.pop_front();
    CR_ASSIGN_OR_RETURN(const agent::SideAnswer answer, adoptions.Wait(oldest.number));
    wire::OpAdoptBlocks_Reply adopted;
    if (answer.result != 0) {
      refused = true;
      return absl::OkStatus();
    }
    if (!adopted.Decode(answer.message)) return Malformed();
    refused = refused || adopted.adopted.empty();
    for (const uint64_t address : adopted.adopted) {
      const auto block = oldest.blocks.find(address);
      if (block == oldest.blocks.end()) return Malformed();
      mapped.Add(block->first, block->second);
    }
    return absl::OkStatus();
  };
  bool first = true;
  absl::Status status;  // of what the new session was asked
  const auto adopt = [&](const wire::OpOfferBlocks_Reply& offered) {
    if (offered.blocks.empty()) return true;
    wire::OpAdoptBlocks_Request request;
    Open one;
    for (const wire::Block& block : offered.blocks) {
      request.blocks.push_back(block);
      one.blocks[block.address] = block.bytes;
    }
    const absl::StatusOr<uint64_t> number = adoptions.Begin(SideRequestOf(kOpAdoptBlocks, request));
    status = number.status();
    if (!status.ok()) return false;
    one.number = *number;
    open.push_back(std::move(one));
    // The first answer says a lot about all others.
    while (status.ok() && open.size() >= (first ? 1 : kMostOpen)) status = finish();
    first = false;
    return status.ok() && !refused;
  };
  uint32_t unwilling = 0;
  const absl::Status offered = AskForPieces<wire::OpOfferBlocks_Reply>(&offers, wire::OpOfferBlocks_Request{},
                                                                       "offer its memory", adopt, &unwilling);
  if (unwilling == 0) CR_RETURN_IF_ERROR(offered);
  CR_RETURN_IF_ERROR(status);
  while (!open.empty()) CR_RETURN_IF_ERROR(finish());
  return mapped;
}

absl::StatusOr<SharedBlocks> KeepHandedOver(ClientChannel* to) {
  ChannelRequests requests(to);
  SharedBlocks kept;
  const auto take = [&kept](const wire::OpKeepBlocks_Reply& reply) {
    for (const wire::Block& block : reply.blocks) kept.Add(block.address, block.bytes);
    return true;
  };
  CR_RETURN_IF_ERROR(AskForPieces<wire::OpKeepBlocks_Reply>(&requests, wire::OpKeepBlocks_Request{},
                                                            "keep the memory that it was handed", take));
  return kept;
}

}  // namespace cuda_remote::checkpoint
