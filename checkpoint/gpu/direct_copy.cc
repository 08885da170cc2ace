// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/direct_copy.h"

#include <algorithm>
#include <deque>

#include "checkpoint/gpu/side_requests.h"
#include "proto/base/status_macros.h"

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
  absl::Status Begin(uint32_t operation, const Request& request, size_t region) {
    CR_ASSIGN_OR_RETURN(const uint64_t number, requests_.Begin(SideRequestOf(operation, request)));
    open_.emplace_back(number, region);
    return absl::OkStatus();
  }
  // The oldest one's.
  absl::StatusOr<agent::SideAnswer> Wait(size_t* region) {
    const uint64_t number = open_.front().first;
    *region = open_.front().second;
    open_.pop_front();
    return requests_.Wait(number);
  }

 private:
  ChannelRequests requests_;  // waits for what is left open
  std::deque<std::pair<uint64_t, size_t>> open_;
};

}  // namespace

absl::StatusOr<std::vector<bool>> CopyDirectly(ClientChannel* from, ClientChannel* to,
                                               const std::vector<Region>& regions, const Continue& go_on) {
  std::vector<bool> copied(regions.size(), false);
  // Otherwise one of them is on another machine, as far as this process knows.
  if (!from->welcome().shared_memory || !to->welcome().shared_memory) return copied;
  uint64_t total = 0, done = 0;
  for (const Region& region : regions) total += region.bytes;
  const std::vector<size_t> worth = WorthCopying(regions);
  Line offers(from), copies(to);
  size_t refused = 0;
  const auto given_up = [&] { return done == 0 && refused >= kEnough; };
  const auto finish = [&]() -> absl::Status {
    size_t region;
    CR_ASSIGN_OR_RETURN(const agent::SideAnswer answer, copies.Wait(&region));
    if (answer.result != 0) {
      ++refused;
      return absl::OkStatus();
    }
    copied[region] = true;
    done += regions[region].bytes;
    if (!go_on || go_on(done, total)) return absl::OkStatus();
    return absl::CancelledError("interrupted");
  };
  const auto take = [&]() -> absl::Status {
    size_t region;
    CR_ASSIGN_OR_RETURN(const agent::SideAnswer answer, offers.Wait(&region));
    wire::OpOfferMemory_Reply offer;
    if (answer.result != 0 || !offer.Decode(answer.message) || offer.bytes != regions[region].bytes) {
      ++refused;
      return absl::OkStatus();
    }
    while (copies.size() >= kMostCopies) CR_RETURN_IF_ERROR(finish());
    wire::OpFetchMemory_Request fetch;
    fetch.key = offer.key;
    fetch.address = regions[region].address;
    fetch.bytes = regions[region].bytes;
    fetch.context = regions[region].context;
    return copies.Begin(kOpFetchMemory, fetch, region);
  };
  for (size_t i = 0; i < worth.size() && !given_up(); ++i) {
    while (offers.size() >= kMostOffers) CR_RETURN_IF_ERROR(take());
    wire::OpOfferMemory_Request offer;
    offer.address = regions[worth[i]].address;
    CR_RETURN_IF_ERROR(offers.Begin(kOpOfferMemory, offer, worth[i]));
    // The first answer says a lot about all others.
    while (done == 0 && offers.size() + copies.size() > 0) {
      CR_RETURN_IF_ERROR(offers.size() > 0 ? take() : finish());
    }
  }
  while (offers.size() > 0) CR_RETURN_IF_ERROR(take());
  while (copies.size() > 0) CR_RETURN_IF_ERROR(finish());
  return copied;
}

}  // namespace cuda_remote::checkpoint
