// SPDX-License-Identifier: Apache-2.0
// Which tool works on a job: one at a time.
//
// A tool that stops a job, takes its GPU session, or restores it claims the job's folder first: a lock on a file there,
// with the tool's name and number in it. The kernel drops the lock when the tool ends, however it ends. Text without a
// lock means that a tool was killed in the middle.
//
// A tool may have a keeper: a process that gives the job's sessions back if the tool is killed while it alone has them
// (checkpoint/transaction/session_keeper.h), and so has the job itself (session_holder.h there). Both hold locks of
// their own on the same file, and the next tool waits until these are free, too.
//
// Other tools, such as cr-ps, only ask a job's processes something. They look at jobs that nobody has claimed: a
// connection of theirs would hinder the dump of a process, or be in the way of who gives it its session back. A tool
// that claims a job waits for those that look at it, up to half a minute. That may be the user whose processes they
// are: the file is that user's.
//
// Not thread-safe. The claim is the process's that took it, and one for each folder and process.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_JOB_CLAIM_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_JOB_CLAIM_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

class JobClaim {
 public:
  JobClaim() = default;
  ~JobClaim() { Release(); }
  JobClaim(const JobClaim&) = delete;
  JobClaim& operator=(const JobClaim&) = delete;

  // Claims the job in `directory` for `tool`. One that another tool has is waited for, a few seconds, as long as
  // `cancelled` is false: the other may be about to end. A keeper is waited for longer: it comes to its end by itself.
  // Fails with a sentence that names the other one.
  absl::Status Take(const std::string& directory, const char* tool, const std::function<bool()>& cancelled);
  void Release();

  // For a job that begins, whose first tool comes later: makes the file that those lock who look at the job.
  static absl::Status Prepare(const std::string& directory);

  // The tool that had the claim before and was killed with it, as in "cr-checkpoint (PID 12)"; empty if there is none.
  const std::string& killed() const { return killed_; }

 private:
  int fd_ = -1;
  std::string killed_;
};

// A look at a job's processes by a tool that claims none.
class JobLook {
 public:
  // Waits a little for others that look, since a process speaks to one tool at a time. Fails with a sentence that names
  // the tool that works on the job in `directory`. A folder that no tool has claimed so far, or that this user may not
  // write to, is looked at without a lock.
  absl::Status Take(const std::string& directory);
  // The tool for which Take has failed, as in "cr-checkpoint (PID 12)"; else empty.
  const std::string& tool() const { return tool_; }

 private:
  std::string tool_;
  UniqueFd fd_;
};

// A keeper's lock.
class KeeperClaim {
 public:
  enum class Whose { kKeeper, kHolder };
  explicit KeeperClaim(Whose whose) : whose_(whose) {}
  ~KeeperClaim() { Release(); }
  KeeperClaim(const KeeperClaim&) = delete;
  KeeperClaim& operator=(const KeeperClaim&) = delete;

  // Does not wait. A process has one of these for each folder, and no JobClaim beside it.
  bool Take(const std::string& directory);
  void Release();

 private:
  const Whose whose_;
  int fd_ = -1;
};

// The file's name in the job's folder.
inline constexpr char kClaimName[] = "tool.lock";

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_JOB_CLAIM_H_
