// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/own_job.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/codec/text.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kOwnNamespaces[] =
    "it is in namespaces of its user's own, so it cannot be saved; start it outside of them, with cr-run --plain";

// Whom the process runs as. False if it has the numbers of more than one user.
bool AccountOfProcess(int pid, const Account& owner, Account* account) {
  const std::vector<uint64_t> groups = StatusNumbers(pid, "Gid", 10), more = StatusNumbers(pid, "Groups", 10);
  if (groups.empty() || StatusNumbers(pid, "Uid", 10) != std::vector<uint64_t>(4, owner.user)) return false;
  *account = owner;
  account->group = gid_t(groups[0]);
  account->groups.assign(more.begin(), more.end());
  std::sort(account->groups.begin(), account->groups.end());
  return true;
}

}  // namespace

OwnersRights::OwnersRights(const std::string& name) {
  if (geteuid() != 0 || FindJob(name).ok()) return;
  const uid_t user = OwnerOfJob(name);
  if (user == 0) return;
  const absl::StatusOr<Account> owner = FindAccount(std::to_string(user));
  // A user's name may be another one's number.
  if (!owner.ok() || owner->user != user) return;
  owner_ = *owner;
  rights_.emplace(owner_);
}

absl::Status OwnersRights::Check(const std::string& directory, Job* job) const {
  if (!owner_) return absl::OkStatus();
  struct stat facts;
  Account account;
  if (lstat(directory.c_str(), &facts) != 0 || facts.st_uid != owner_->user) {
    return absl::PermissionDeniedError(
        absl::StrCat("the job in ", directory, " was started through cr-hostd, or by root: name its folder"));
  }
  if (!AccountOfProcess(job->pid(), *owner_, &account)) {
    return absl::FailedPreconditionError(
        absl::StrCat(directory, " belongs to user ", owner_->user, ", but process ", job->pid(),
                     ", which job.json there calls the job, has ended or has another user's rights"));
  }
  Job believed;
  believed.set_name(Printable(directory.substr(directory.rfind('/') + 1)));
  for (const std::string& word : job->command()) believed.add_command(Printable(word));
  for (const std::string& path : job->outputs()) believed.add_outputs(path);
  believed.set_server(job->server());
  believed.set_gpu(job->gpu());
  believed.set_runner_pid(job->runner_pid());
  believed.set_pid(job->pid());
  believed.set_inner_pid(job->inner_pid());
  believed.set_started_unix_ms(job->started_unix_ms());
  believed.set_saved_unix_ms(job->saved_unix_ms());
  believed.set_saved_bytes(job->saved_bytes());
  believed.set_saved_image(Printable(job->saved_image()));
  believed.set_directory(directory);
  believed.set_users_own(true);
  believed.set_no_checkpoint(Printable(job->no_checkpoint()));
  if (job->init_pid() != 0) {
    // Its processes are found by these, with the user's rights.
    believed.set_init_pid(job->init_pid());
    believed.set_pid_namespace(job->pid_namespace());
    believed.set_no_checkpoint(kOwnNamespaces);
  } else if (believed.no_checkpoint().empty()) {
    believed.set_inner_pid(job->pid());
    believed.set_terminal(HasTerminal(job->pid()));
  }
  SetAccount(account, &believed);
  *job = believed;
  return absl::OkStatus();
}

}  // namespace cuda_remote::checkpoint
