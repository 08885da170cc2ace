// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/hand_over.h"

#include <deque>
#include <utility>

namespace cuda_remote::checkpoint {
namespace {

// Messages that the new session has not answered yet: it maps while the old one exports.
constexpr size_t kMostOpen = 2;

bool Malformed(std::string* error) {
  *error = "the GPU server's answer is malformed: it is of another version";
  return false;
}

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
  wire::OpExportBlocks_Request ask;
  for (bool more = true; more;) {
    agent::SideAnswer answer;
    std::string ignored;
    wire::OpExportBlocks_Reply reply;
    if (!AskAndWait(running, SideRequestOf(kOpExportBlocks, ask), &answer, &ignored) || answer.result != 0 ||
        !reply.Decode(answer.message) || (reply.next != 0 && reply.next <= ask.after)) {
      return;
    }
    more = reply.next != 0;
    ask.after = reply.next;
  }
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
  wire::OpOfferBlocks_Request ask;
  bool first = true;
  for (bool more = true; more && !refused;) {
    agent::SideAnswer answer;
    if (!AskAndWait(&offers, SideRequestOf(kOpOfferBlocks, ask), &answer, error)) return false;
    wire::OpOfferBlocks_Reply offered;
    if (answer.result != 0) break;
    if (!offered.Decode(answer.message) || (offered.next != 0 && offered.next <= ask.after)) return Malformed(error);
    more = offered.next != 0;
    ask.after = offered.next;
    if (offered.blocks.empty()) continue;
    wire::OpAdoptBlocks_Request adopt;
    Open one;
    for (const wire::Block& block : offered.blocks) {
      adopt.blocks.push_back(block);
      one.blocks[block.address] = block.bytes;
    }
    if (!adoptions.Begin(SideRequestOf(kOpAdoptBlocks, adopt), &one.number, error)) return false;
    open.push_back(std::move(one));
    // The first answer says a lot about all others.
    while (open.size() >= (first ? 1 : kMostOpen)) {
      if (!finish()) return false;
    }
    first = false;
  }
  while (!open.empty()) {
    if (!finish()) return false;
  }
  return true;
}

bool KeepHandedOver(ClientChannel* to, SharedBlocks* kept, std::string* error) {
  ChannelRequests requests(to);
  wire::OpKeepBlocks_Request ask;
  for (bool more = true; more;) {
    agent::SideAnswer answer;
    if (!AskAndWait(&requests, SideRequestOf(kOpKeepBlocks, ask), &answer, error)) return false;
    wire::OpKeepBlocks_Reply reply;
    if (answer.result != 0 || !reply.Decode(answer.message) || (reply.next != 0 && reply.next <= ask.after)) {
      return Malformed(error);
    }
    for (const wire::Block& block : reply.blocks) kept->Add(block.address, block.bytes);
    more = reply.next != 0;
    ask.after = reply.next;
  }
  return true;
}

}  // namespace cuda_remote::checkpoint
