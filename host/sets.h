// SPDX-License-Identifier: Apache-2.0
// Sets of images of a job on several hosts (cr-checkpoint --hosts --keep). DIR/image-000007/member-2, on the second
// host, is the image of the second part in the seventh set. A set is complete if every host has its part's image and
// all are of one checkpoint. A checkpoint that fails, or a host that is lost, leaves a set that is not; nobody counts
// it.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_HOST_SETS_H_
#define CUDA_REMOTE_HOST_SETS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/account.h"
#include "host/group.h"
#include "host/move.pb.h"
#include "host/signature.h"
#include "proto/control/credentials.h"

namespace cuda_remote::host {

// Before what is signed, so that it is nothing else that the key has signed.
inline constexpr char kSetsText[] = "sets over hosts\n";

// What one host has in `folder` of the part with this number. For a user, with her rights.
SetsReply ListSets(const checkpoint::Account& account, const Key& key, const std::string& folder, uint32_t part);
// Removes that part's images of these sets, except those that somebody has open, and frees the memory that no other
// image of the part needs.
absl::Status RemoveSets(const checkpoint::Account& account, const Key& key, const std::string& folder, uint32_t part,
                        const std::vector<uint64_t>& numbers);
// The paths of the images that the new one DIR/image-N/member-M is to share memory with: those of its part in these
// sets.
std::vector<std::string> EarlierInSets(const std::string& image, const std::vector<uint64_t>& numbers);

// The sets that are complete, by what each host has: their numbers, rising. `job`: only those of the job that the user
// calls so; empty: of any.
std::vector<uint64_t> CompleteSets(const std::vector<SetsReply>& hosts, const std::string& job);
// What a host may remove, so that the `keep` newest complete sets of the job stay: what is older than all of them.
std::vector<uint64_t> OldSets(const SetsReply& host, const std::vector<uint64_t>& complete, const std::string& job,
                              size_t keep);

// The side of the one who saves or restarts all parts.
class Sets {
 public:
  // `folder`: DIR, absolute. `key` outlives this.
  Sets(std::vector<GroupPart> parts, const control::TlsFiles& tls, const Key& key, const MovedUser& user,
       const std::string& folder)
      : parts_(std::move(parts)), tls_(tls), key_(key), user_(user), folder_(folder) {}

  // Asks all hosts what they have. All else is about their last answers.
  absl::Status Look();

  // Where the next set goes. Fails if DIR is an image of all parts itself.
  absl::StatusOr<std::string> Next() const;
  // The complete sets of the job, with which the next one shares memory.
  std::vector<uint64_t> Complete(const std::string& job) const { return CompleteSets(hosts_, job); }
  // The newest complete set. DIR, if that is an image of all parts itself, or if there are no sets. Fails if there are
  // sets, and none is complete.
  absl::StatusOr<std::string> Newest() const;
  // Looks again and removes, on all hosts, what is older than the `keep` newest complete sets of the job.
  absl::Status Prune(const std::string& job, size_t keep);

 private:
  absl::Status Ask(size_t part, const std::vector<uint64_t>& remove);
  bool IsOne() const;

  const std::vector<GroupPart> parts_;
  const control::TlsFiles tls_;
  const Key& key_;
  const MovedUser user_;
  const std::string folder_;
  std::vector<SetsReply> hosts_;
};

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_SETS_H_
