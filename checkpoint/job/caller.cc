// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/caller.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "checkpoint/job/caller.pb.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"

extern char** environ;

namespace cuda_remote::checkpoint {
namespace {

const Caller* g_caller = nullptr;

}  // namespace

absl::Status Caller::Take(int fd) {
  std::string bytes;
  CallerFacts facts;
  if (geteuid() != 0 || !ReadAll(fd, &bytes) || !facts.ParseFromString(bytes) || facts.user() == 0) {
    return absl::InvalidArgumentError("--caller is for cr-hostd, which starts the tools for ordinary users");
  }
  close(fd);
  auto* const caller = new Caller;
  // A number without a name is a user, too.
  CR_ASSIGN_OR_RETURN(caller->account_, FindAccount(std::to_string(facts.user())));
  if (caller->account_.user != facts.user()) {
    return absl::FailedPreconditionError(
        absl::StrCat("another user of this machine has the name ", facts.user(), ", which is this user's number"));
  }
  caller->account_.group = facts.group();
  caller->account_.groups.assign(facts.groups().begin(), facts.groups().end());
  std::sort(caller->account_.groups.begin(), caller->account_.groups.end());
  caller->environment_.assign(facts.environment().begin(), facts.environment().end());
  caller->addresses_.assign(facts.addresses().begin(), facts.addresses().end());
  caller->image_ = facts.image();
  caller->umask_ = mode_t(facts.umask()) & 0777;
  caller->pid_ = facts.pid();
  caller->holds_ = facts.holds();
  caller->waits_ = facts.waits();
  caller->announcements_ = facts.announcements();
  if (caller->announcements_ >= 0) fcntl(caller->announcements_, F_SETFD, FD_CLOEXEC);
  g_caller = caller;
  return absl::OkStatus();
}

const Caller* Caller::Get() { return g_caller; }

const char* Caller::Variable(const std::string& name) const {
  for (const std::string& variable : environment_) {
    if (variable.compare(0, name.size() + 1, name + "=") == 0) return variable.c_str() + name.size() + 1;
  }
  return nullptr;
}

void Caller::UseEnvironment() const {
  auto* const variables = new std::vector<char*>;
  for (const std::string& variable : environment_) variables->push_back(const_cast<char*>(variable.c_str()));
  variables->push_back(nullptr);
  environ = variables->data();
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

absl::StatusOr<std::string> Caller::Announce(const char* what) const {
  if (announcements_ < 0) return "";
  char answer[8192];
  ssize_t got = -1;
  if (send(announcements_, what, strlen(what), MSG_NOSIGNAL) == ssize_t(strlen(what))) {
    do {
      got = recv(announcements_, answer, sizeof(answer), 0);
    } while (got < 0 && errno == EINTR);
  }
  // "+": done; else what went wrong.
  const std::string text(answer + 1, size_t(got > 1 ? got - 1 : 0));
  if (got > 0 && answer[0] == '+') return text;
  if (got > 1) return absl::FailedPreconditionError(text);
  return absl::UnavailableError("the cr-hostd that started this tool has ended");
}

}  // namespace cuda_remote::checkpoint
