// SPDX-License-Identifier: Apache-2.0
// A checkpoint or a restart of a job that runs on several hosts, as one transaction through their cr-hostds
// (move.proto). Of a checkpoint, all lock, all are dumped, all images are complete, or there is none and the job goes
// on everywhere. Of a restart, all parts are restored and stand still, then all run, or none does. This is the
// coordinator's side, in the worker of the user who asks.
//
// It is decided by one entry in the first host's folder of states (move_state.h), which a host asks for that has lost
// the connection (Hosts::Settle). Before the entry nothing counts; whoever asks then has decided that nothing will.
//
// Not thread-safe but for Cancel.
#ifndef CUDA_REMOTE_HOST_GROUP_H_
#define CUDA_REMOTE_HOST_GROUP_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/move.grpc.pb.h"
#include "host/signature.h"
#include "proto/control/credentials.h"

namespace cuda_remote::host {

// Before what is signed, so that it is nothing else that the key has signed.
inline constexpr char kSaveText[] = "checkpoint over hosts\n";
// In the value of an option, for the number of the part.
inline constexpr char kPartNumber[] = "%n";

// One part of such a job: where it is, and what it is called there.
struct GroupPart {
  std::string host;  // HOST or HOST:PORT
  std::string job;
};

// From "HOST[:PORT][/JOB],...", in which JOB is `job` if it is missing. Fails if one is named twice, or none is.
absl::StatusOr<std::vector<GroupPart>> ParseGroup(const std::string& list, const std::string& job);

class Group {
 public:
  static absl::StatusOr<std::unique_ptr<Group>> Open(const std::vector<GroupPart>& parts, const control::TlsFiles& tls);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Saves the job's parts, each into `image`/member-N, or restarts them from there. `begin` says which, and the rest
  // but for the id. `note`: for the user.
  absl::Status Run(SaveBegin begin, const std::string& image, const Key& key,
                   const std::function<void(const std::string&)>& note);

  // How long a part of the job stood still at most, in seconds. After Run.
  double paused_seconds() const { return paused_seconds_; }

  // From any thread: if it is not decided yet, Run fails.
  void Cancel();

 private:
  struct Member {
    std::string host, job;
    std::unique_ptr<Hosts::Stub> stub;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<SaveUp, SaveDown>> stream;
    bool finished = false;
    std::string checkpoint;  // of the image that is restarted
  };
  absl::Status Await(Member* member, SaveStep step, const std::function<void(const std::string&)>& note);
  absl::Status Reach(SaveStep step, const std::function<void(const std::string&)>& note);
  absl::Status GoOn(SaveStep step);
  absl::Status Begin(SaveBegin* begin, const std::string& image, const Key& key);
  absl::Status Save(const std::function<void(const std::string&)>& note);
  absl::Status Restart(const std::string& image, const std::function<void(const std::string&)>& note);
  absl::Status Decide(const std::string& id, const char* unknown);

  Group() = default;
  std::vector<std::unique_ptr<Member>> members_;
  double paused_seconds_ = 0;
};

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_GROUP_H_
