// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/direct_copy.h"

#include <algorithm>
#include <deque>

#include "checkpoint/gpu/side_requests.h"

namespace cuda_remote::checkpoint {
namespace {

using ckptfmt::Region;
using ckptfmt::RegionKind;

// Two requests, and mapping and unmapping, take about 0.2 ms. From so many bytes on that is less than a copy through
// the host takes; of the others a few go along, since a job that has no more needs no shared buffers then.
constexpr uint64_t kWorthIt = 8 << 20, kLeast = 4096;
constexpr size_t kFew = 32;
// Offers that wait to be taken, and copies on their way.
constexpr size_t kMostOffers = 16, kMostCopies = 24;
// So many refusals before the first success are enough.
constexpr size_t kEnough = 8;

std::vector<size_t> WorthCopying(const std::vector<Region>& regions) {
  std::vector<size_t> worth;
  for (size_t i = 0; i < regions.size(); ++i) {
    if (regions[i].kind == RegionKind::kAllocation && regions[i].bytes >= kLeast) worth.push_back(i);
  }
  std::stable_sort(worth.begin(), worth.end(), [&](size_t a, size_t b) { return regions[a].bytes > regions[b].bytes; });
  size_t count = std::min(worth.size(), kFew);
  while (count < worth.size() && regions[worth[count]].bytes >= kWorthIt) ++count;
  worth.resize(count);
  return worth;
}

// Requests to one server, whose answers are awaited in their order.
class Line {
 public:
  explicit Line(ClientChannel* channel) : requests_(channel) {}

  size_t size() const { return open_.size(); }
  template <typename Request>
  bool Begin(uint32_t operation, const Request& request, size_t region, std::string* error) {
    uint64_t number = 0;
    if (!requests_.Begin(SideRequestOf(operation, request), &number, error)) return false;
    open_.emplace_back(number, region);
    return true;
  }
  // The oldest one's.
  bool Wait(agent::SideAnswer* answer, size_t* region, std::string* error) {
    const uint64_t number = open_.front().first;
    *region = open_.front().second;
    open_.pop_front();
    return requests_.Wait(number, answer, error);
  }

 private:
  ChannelRequests requests_;  // waits for what is left open
  std::deque<std::pair<uint64_t, size_t>> open_;
};

}  // namespace

bool CopyDirectly(ClientChannel* from, ClientChannel* to, const std::vector<Region>& regions, const Continue& go_on,
                  std::vector<bool>* copied, std::string* error) {
  copied->assign(regions.size(), false);
  // Otherwise one of them is on another machine, as far as this process knows.
  if (!from->welcome().shared_memory || !to->welcome().shared_memory) return true;
  uint64_t total = 0, done = 0;
  for (const Region& region : regions) total += region.bytes;
  const std::vector<size_t> worth = WorthCopying(regions);
  Line offers(from), copies(to);
  size_t refused = 0;
  const auto given_up = [&] { return done == 0 && refused >= kEnough; };
  const auto finish = [&] {
    agent::SideAnswer answer;
    size_t region;
    if (!copies.Wait(&answer, &region, error)) return false;
    if (answer.result != 0) {
      ++refused;
      return true;
    }
    (*copied)[region] = true;
    done += regions[region].bytes;
    if (!go_on || go_on(done, total)) return true;
    *error = "interrupted";
    return false;
  };
  const auto take = [&] {
    agent::SideAnswer answer;
    size_t region;
    if (!offers.Wait(&answer, &region, error)) return false;
    wire::OpOfferMemory_Reply offer;
    if (answer.result != 0 || !offer.Decode(answer.message) || offer.bytes != regions[region].bytes) {
      ++refused;
      return true;
    }
    while (copies.size() >= kMostCopies) {
      if (!finish()) return false;
    }
    wire::OpFetchMemory_Request fetch;
    fetch.key = offer.key;
    fetch.address = regions[region].address;
    fetch.bytes = regions[region].bytes;
    fetch.context = regions[region].context;
    return copies.Begin(kOpFetchMemory, fetch, region, error);
  };
  for (size_t i = 0; i < worth.size() && !given_up(); ++i) {
    while (offers.size() >= kMostOffers) {
      if (!take()) return false;
    }
    wire::OpOfferMemory_Request offer;
    offer.address = regions[worth[i]].address;
    if (!offers.Begin(kOpOfferMemory, offer, worth[i], error)) return false;
    // The first answer says a lot about all others.
    while (done == 0 && offers.size() + copies.size() > 0) {
      if (!(offers.size() > 0 ? take() : finish())) return false;
    }
  }
  while (offers.size() > 0) {
    if (!take()) return false;
  }
  while (copies.size() > 0) {
    if (!finish()) return false;
  }
  return true;
}

}  // namespace cuda_remote::checkpoint
