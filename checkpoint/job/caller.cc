// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/caller.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::checkpoint {

absl::StatusOr<std::unique_ptr<const Caller>> Caller::From(int fd) {
  if (fd < 0) return nullptr;
  std::string bytes;
  CallerFacts facts;
  if (geteuid() != 0 || !ReadAll(fd, &bytes) || !facts.ParseFromString(bytes) || facts.user() == 0) {
    return absl::InvalidArgumentError("--caller is for cr-hostd, which starts the tools for ordinary users");
  }
  close(fd);
  // A number without a name is a user, too.
  CR_ASSIGN_OR_RETURN(Account account, FindAccount(std::to_string(facts.user())));
  if (account.user != facts.user()) {
    return absl::FailedPreconditionError(
        absl::StrCat("another user of this machine has the name ", facts.user(), ", which is this user's number"));
  }
  if (facts.announcements() >= 0) fcntl(facts.announcements(), F_SETFD, FD_CLOEXEC);
  return std::make_unique<const Caller>(facts, std::move(account), std::make_unique<HostdGate>(facts.announcements()));
}

Caller::Caller(const CallerFacts& facts, Account account, std::unique_ptr<StepGate> gate)
    : account_(std::move(account)),
      environment_(facts.environment().begin(), facts.environment().end()),
      addresses_(facts.addresses().begin(), facts.addresses().end()),
      image_(facts.image()),
      umask_(mode_t(facts.umask()) & 0777),
      pid_(facts.pid()),
      holds_(facts.holds()),
      waits_(facts.waits()),
      gate_(std::move(gate)) {
  account_.group = facts.group();
  account_.groups.assign(facts.groups().begin(), facts.groups().end());
  std::sort(account_.groups.begin(), account_.groups.end());
}

const char* Caller::Variable(const std::string& name) const {
  for (const std::string& variable : environment_) {
    if (variable.compare(0, name.size() + 1, name + "=") == 0) return variable.c_str() + name.size() + 1;
  }
  return nullptr;
}

absl::Status Caller::CheckSaved(const std::optional<Account>& saved) const {
  if (!saved || saved->user != account_.user) {
    return absl::PermissionDeniedError(
        absl::StrCat("the image is of a job of ", saved ? NameOf(*saved) : "root", ", not of ", NameOf(account_)));
  }
  std::vector<gid_t> wanted = saved->groups;
  wanted.push_back(saved->group);
  for (const gid_t group : wanted) {
    if (group == account_.group || std::binary_search(account_.groups.begin(), account_.groups.end(), group)) continue;
    return absl::PermissionDeniedError(
        absl::StrCat("the job has the rights of group ", group, ", which ", NameOf(account_), " does not have now"));
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::checkpoint
