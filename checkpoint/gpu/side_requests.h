// SPDX-License-Identifier: Apache-2.0
// Requests that look at a session's memory: through the job's process while it runs (its agent sends them beside the
// job's calls), or through a channel that a tool has.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_SIDE_REQUESTS_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_SIDE_REQUESTS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/types.h"
#include "proto/agent/types.h"
#include "proto/base/status_macros.h"
#include "proto/channel/client_channel.h"
#include "proto/chunkhash/chunk_hash.h"
#include "proto/codec/operations.gen.h"

namespace cuda_remote::checkpoint {

// "the session with the GPU server was lost: WHY", "the GPU server could not DO: ERROR", and what is said of an answer
// that nobody can read or that makes no sense.
absl::Status Gone(ClientChannel* channel, ChannelStatus status);
absl::Status Failed(const std::string& what, uint32_t result);
absl::Status Malformed();

// Not thread-safe. Functions fail if there is no answer to be had; what the server refuses is an answer.
class SideRequests {
 public:
  virtual ~SideRequests() = default;
  // Whether the server can map this process's memory.
  virtual bool shared_memory() const = 0;
  // The request's number. At most kMostAsked (proto/agent/message.h) may be open at one time; each needs one Wait.
  virtual absl::StatusOr<uint64_t> Begin(const agent::SideRequest& request) = 0;
  virtual absl::StatusOr<agent::SideAnswer> Wait(uint64_t number) = 0;
};

// A request with this message and nothing else.
template <typename Request>
agent::SideRequest SideRequestOf(uint32_t operation, const Request& message) {
  agent::SideRequest request;
  request.operation = operation;
  message.Encode(&request.message);
  return request;
}

// Begin and Wait in one.
absl::StatusOr<agent::SideAnswer> AskAndWait(SideRequests* requests, const agent::SideRequest& request);

// Asks for a list that the server gives in pieces: each request says `after` what, each reply what is `next`, or 0 at
// the end. take(const List&) says whether to go on. `to_do`: for the error, as Failed wants it. *refused, if not null:
// the server's error; 0 if it could not be asked.
template <typename List, typename Request, typename Take>
absl::Status AskForPieces(SideRequests* requests, Request request, const std::string& to_do, const Take& take,
                          uint32_t* refused = nullptr) {
  if (refused) *refused = 0;
  for (bool more = true; more;) {
    CR_ASSIGN_OR_RETURN(const agent::SideAnswer answer, AskAndWait(requests, SideRequestOf(Request::kCallId, request)));
    if (answer.result != 0) {
      if (refused) *refused = answer.result;
      return Failed(to_do, answer.result);
    }
    List list;
    if (!list.Decode(answer.message) || (list.next != 0 && list.next <= request.after)) return Malformed();
    more = take(list) && list.next != 0;
    request.after = list.next;
  }
  return absl::OkStatus();
}

// Adds the regions of an answer to kOpRegions. False if they make no sense: the server is of another version.
bool AppendRegions(const wire::OpRegions_Reply& listed, std::vector<ckptfmt::Region>* regions);

// Through a channel that the tool has.
class ChannelRequests final : public SideRequests {
 public:
  explicit ChannelRequests(ClientChannel* channel) : channel_(channel) {}
  ~ChannelRequests() override;
  bool shared_memory() const override { return channel_->welcome().shared_memory; }
  absl::StatusOr<uint64_t> Begin(const agent::SideRequest& request) override;
  absl::StatusOr<agent::SideAnswer> Wait(uint64_t number) override;

 private:
  ClientChannel* const channel_;
  std::map<uint64_t, std::unique_ptr<std::string>> payloads_;  // of open requests
};

// The session's memory as it is now: of what a checkpoint would save (ListRegions), also while it could not.
absl::StatusOr<std::vector<ckptfmt::Region>> ListNow(SideRequests* requests);

// Smaller allocations, and chunks, are read as fast as they are hashed.
inline constexpr uint64_t kWorthHashing = 64 << 10;

// The hashes of all chunks of each region, computed by the GPU; none of regions that are not worth it: small ones, and
// all but allocations. *refused, if not null: the server's error, as when a region is not there any more; 0 if it could
// not be asked. `every`: of one row in so many (HashRows).
absl::StatusOr<std::vector<std::vector<ChunkHash>>> HashRegions(SideRequests* requests,
                                                                const std::vector<ckptfmt::Region>& regions,
                                                                uint32_t* refused = nullptr, uint32_t every = 1);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_SIDE_REQUESTS_H_
