// SPDX-License-Identifier: Apache-2.0
// The user whom a job of root's tools runs as (cr-run --user), and acting as that user.
//
// Such a job's folder is root's, so the tools may believe what is in it (but own_job.h). The sockets of the job's
// processes are in its folder "user", which is theirs (SocketFolder, proto/folder/this_job.h). Files that this user
// could exchange are opened and changed with his rights only.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_ACCOUNT_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_ACCOUNT_H_

#include <sys/types.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/job.pb.h"

namespace cuda_remote::checkpoint {

struct Account {
  std::string name;  // empty: a number without a name
  std::string home, shell;
  uid_t user = 0;
  gid_t group = 0;
  std::vector<gid_t> groups;  // sorted
};

// A user by name or number. Fails if there is none, or if it is root.
absl::StatusOr<Account> FindAccount(const std::string& name);

// Whom the job runs as; nothing: as the user of who started it.
std::optional<Account> AccountOf(const Job& job);
void SetAccount(const Account& account, Job* job);

// For an image from elsewhere or from long ago: whether the account is still the same person's here, with these groups.
absl::Status CheckAccount(const Account& account);

// For messages, of the first one of `needed` (with its name, "SYS_ADMIN") that this thread does not have: "the
// capability CAP_SYS_ADMIN, which is missing; ...". Empty if it has all.
std::string MissingCapability(std::initializer_list<std::pair<int, const char*>> needed);

// For messages: "user anna (1000)".
std::string NameOf(const Account& account);

// In a child that is to become another user (Become) and keeps this program's standard streams. All processes of that
// user can look into it, so it must not be able to type into this program's terminal, or to
// read what is typed there: begins a session without a terminal; standard input is /dev/null; where output and error
// are a terminal, it can only be written to. False and errno on failure.
bool LeaveTerminal();

// In a child, before an execution: becomes that user, and keeps of its capabilities these only. False and errno on
// failure.
bool Become(const Account& account, const std::vector<int>& kept = {});

// While it lives, this thread has the rights of that user; other threads keep theirs, and new ones begin with this
// one's. Throws std::runtime_error if that is not possible. Changes nothing if it is null, or if the thread acts as
// that user already.
class ActAs {
 public:
  explicit ActAs(const Account* account);
  explicit ActAs(const std::optional<Account>& account) : ActAs(account ? &*account : nullptr) {}
  ~ActAs();
  ActAs(const ActAs&) = delete;
  ActAs& operator=(const ActAs&) = delete;

 private:
  bool changed_ = false;
  gid_t group_ = 0;
  std::vector<gid_t> groups_;
};

// While it lives, a thread of root's that acts as a user (ActAs) has root's rights again. Changes nothing elsewhere.
class AsRoot {
 public:
  AsRoot();
  ~AsRoot();
  AsRoot(const AsRoot&) = delete;
  AsRoot& operator=(const AsRoot&) = delete;

 private:
  bool changed_ = false;
  uid_t user_ = 0;
  gid_t group_ = 0;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_ACCOUNT_H_
