// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/hand_over.h"

#include <deque>
#include <utility>

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
  std::string ignored;
  AskForPieces<wire::OpExportBlocks_Reply>(
      running, wire::OpExportBlocks_Request{}, "export its memory",
      [](const wire::OpExportBlocks_Reply&) { return true; }, &ignored);
}

bool HandOver(ClientChannel* from, ClientChannel* to, SharedBlocks* mapped, std::string* error) {
  // Otherwise one of them is on another machine, as far as this process knows.
  if (!from->welcome().shared_memory || !to->welcome().shared_memory) return true;
  ChannelRequests offers(from), adoptions(to);
  struct Open {
    uint64_t number;
    std::map<uint64_t, uint64_t> blocks;  // address -> bytes
  };
  std::deque<Open> open;
  bool refused = false;
  const auto finish = [&] {
    agent::SideAnswer answer;
    const Open oldest = std::move(open.front());
    open.pop_front();
    if (!adoptions.Wait(oldest.number, &answer, error)) return false;
    wire::OpAdoptBlocks_Reply adopted;
    if (answer.result != 0) {
      refused = true;
      return true;
    }
    if (!adopted.Decode(answer.message)) return Malformed(error);
    refused = refused || adopted.adopted.empty();
    for (const uint64_t address : adopted.adopted) {
      const auto block = oldest.blocks.find(address);
      if (block == oldest.blocks.end()) return Malformed(error);
      mapped->Add(block->first, block->second);
    }
    return true;
  };
  bool first = true, ok = true;
  const auto adopt = [&](const wire::OpOfferBlocks_Reply& offered) {
    if (offered.blocks.empty()) return true;
    wire::OpAdoptBlocks_Request request;
    Open one;
    for (const wire::Block& block : offered.blocks) {
      request.blocks.push_back(block);
      one.blocks[block.address] = block.bytes;
    }
    ok = adoptions.Begin(SideRequestOf(kOpAdoptBlocks, request), &one.number, error);
    if (ok) open.push_back(std::move(one));
    // The first answer says a lot about all others.
    while (ok && open.size() >= (first ? 1 : kMostOpen)) ok = finish();
    first = false;
    return ok && !refused;
  };
  uint32_t unwilling = 0;
  ok = AskForPieces<wire::OpOfferBlocks_Reply>(&offers, wire::OpOfferBlocks_Request{}, "offer its memory", adopt, error,
                                               &unwilling) &&
       ok;
  if (!ok && unwilling == 0) return false;
  while (!open.empty()) {
    if (!finish()) return false;
  }
  return true;
}

bool KeepHandedOver(ClientChannel* to, SharedBlocks* kept, std::string* error) {
  ChannelRequests requests(to);
  const auto take = [kept](const wire::OpKeepBlocks_Reply& reply) {
    for (const wire::Block& block : reply.blocks) kept->Add(block.address, block.bytes);
    return true;
  };
  return AskForPieces<wire::OpKeepBlocks_Reply>(&requests, wire::OpKeepBlocks_Request{},
                                                "keep the memory that it was handed", take, error);
}

}  // namespace cuda_remote::checkpoint
