// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/account.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr uint32_t kVersion = _LINUX_CAPABILITY_VERSION_3;
constexpr int kMostGroups = 65536;
constexpr size_t kTextBytes = 4096, kMostTextBytes = 1u << 20;  // of an entry of the user database

std::vector<gid_t> GroupsOf(const std::string& name, gid_t group) {
  std::vector<gid_t> groups(64);
  int count = int(groups.size());
  while (getgrouplist(name.c_str(), group, groups.data(), &count) < 0 && count <= kMostGroups) {
    groups.resize(size_t(std::max(count, int(groups.size()) * 2)));
    count = int(groups.size());
  }
  groups.resize(size_t(std::max(count, 0)));
  std::sort(groups.begin(), groups.end());
  return groups;
}

// `ask` takes room for the entry's texts, which *texts has as long as the entry is used.
const passwd* FindEntry(std::vector<char>* texts, const std::function<int(char*, size_t, passwd**)>& ask) {
  passwd* found = nullptr;
  texts->resize(kTextBytes);
  while (ask(texts->data(), texts->size(), &found) == ERANGE && texts->size() < kMostTextBytes) {
    texts->resize(texts->size() * 2);
  }
  return found;
}

bool SetCapabilities(const std::vector<int>& kept) {
  __user_cap_header_struct header = {kVersion, 0};
  __user_cap_data_struct data[2] = {};
  if (syscall(SYS_capget, &header, data) != 0) return false;
  __user_cap_data_struct wanted[2] = {};
  for (const int one : kept) {
    const uint32_t bit = uint32_t{1} << (one % 32);
    wanted[one / 32].permitted |= data[one / 32].permitted & bit;
  }
  for (auto& word : wanted) word.effective = word.inheritable = word.permitted;
  header = {kVersion, 0};
  if (syscall(SYS_capset, &header, wanted) != 0) return false;
  prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  for (const int one : kept) {
    const bool have = (wanted[one / 32].permitted >> (one % 32) & 1) != 0;
    if (have && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, one, 0, 0) != 0) return false;
  }
  return true;
}

// Whether this thread is root's and acts as somebody else.
bool Acts() { return getuid() == 0 && geteuid() != 0; }

bool ChangeUser(const Account& account) {
  if (Acts() && setresuid(uid_t(-1), 0, uid_t(-1)) != 0) return false;
  return setgroups(account.groups.size(), account.groups.data()) == 0 &&
         setresgid(account.group, account.group, account.group) == 0 &&
         setresuid(account.user, account.user, account.user) == 0;
}

}  // namespace

absl::StatusOr<Account> FindAccount(const std::string& name) {
  const bool number = !name.empty() && name.size() <= 10 && name.find_first_not_of("0123456789") == std::string::npos;
  // cr-hostd asks in several threads.
  passwd facts = {};
  std::vector<char> texts;
  const passwd* entry = FindEntry(&texts, [&](char* text, size_t bytes, passwd** found) {
    return getpwnam_r(name.c_str(), &facts, text, bytes, found);
  });
  if (!entry && number) {
    entry = FindEntry(&texts, [&](char* text, size_t bytes, passwd** found) {
      return getpwuid_r(uid_t(strtoul(name.c_str(), nullptr, 10)), &facts, text, bytes, found);
    });
  }
  Account account;
  if (entry) {
    account.name = entry->pw_name;
    account.home = entry->pw_dir;
    account.shell = entry->pw_shell;
    account.user = entry->pw_uid;
    account.group = entry->pw_gid;
    account.groups = GroupsOf(account.name, account.group);
  } else if (number) {
    account.user = account.group = uid_t(strtoul(name.c_str(), nullptr, 10));
    account.groups = {account.group};
  } else {
    return absl::NotFoundError(absl::StrCat("there is no user ", name, " on this machine"));
  }
  if (account.user == 0 || account.user == uid_t(-1)) {
    return absl::InvalidArgumentError(absl::StrCat("user ", name, " is root: omit --user"));
  }
  return account;
}

std::optional<Account> AccountOf(const Job& job) {
  if (!job.has_user()) return std::nullopt;
  Account account;
  account.name = job.user().name();
  account.user = job.user().id();
  account.group = job.user().group();
  account.groups.assign(job.user().groups().begin(), job.user().groups().end());
  return account;
}

void SetAccount(const Account& account, Job* job) {
  job->mutable_user()->set_name(account.name);
  job->mutable_user()->set_id(account.user);
  job->mutable_user()->set_group(account.group);
  for (const gid_t group : account.groups) job->mutable_user()->add_groups(group);
}

absl::Status CheckAccount(const Account& account) {
  if (account.user == 0 || account.user == uid_t(-1)) {
    return absl::PermissionDeniedError("the image says that it is of another user's job, and that this user is root");
  }
  if (account.name.empty()) return absl::OkStatus();
  CR_ASSIGN_OR_RETURN(const Account here, FindAccount(account.name));
  if (here.user != account.user) {
    return absl::PermissionDeniedError(
        absl::StrCat("the job is ", NameOf(account), "'s, and here ", account.name, " has the number ", here.user));
  }
  for (const gid_t group : account.groups) {
    if (std::binary_search(here.groups.begin(), here.groups.end(), group)) continue;
    return absl::PermissionDeniedError(absl::StrCat("the job has the rights of group ", group, ", of which ",
                                                    NameOf(account), " is not a member on this host"));
  }
  return absl::OkStatus();
}

std::string MissingCapability(std::initializer_list<std::pair<int, const char*>> needed) {
  __user_cap_header_struct header = {kVersion, 0};
  __user_cap_data_struct data[2] = {};
  const bool known = syscall(SYS_capget, &header, data) == 0;
  for (const auto& [number, name] : needed) {
    if (known && (data[number / 32].effective >> (number % 32) & 1) != 0) continue;
    return std::string("the capability CAP_") + name + ", which is missing; a container gets it with --cap-add " + name;
  }
  return {};
}

std::string NameOf(const Account& account) {
  return "user " + (account.name.empty() ? "" : account.name + " (") + std::to_string(account.user) +
         (account.name.empty() ? "" : ")");
}

bool LeaveTerminal() {
  if (setsid() < 0) return false;
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (null < 0 || dup2(null, 0) < 0) return false;
  for (const int fd : {1, 2}) {
    if (!isatty(fd)) continue;
    const int out = open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC);
    if (dup2(out >= 0 ? out : null, fd) < 0) return false;
    if (out >= 0) close(out);
  }
  close(null);
  return true;
}

bool Become(const Account& account, const std::vector<int>& kept) {
  if (!kept.empty() && prctl(PR_SET_KEEPCAPS, 1) != 0) return false;
  return ChangeUser(account) && SetCapabilities(kept);
}

// glibc's functions change all threads of the process; the kernel's change one.
ActAs::ActAs(const Account* account) {
  if (!account || (Acts() && geteuid() == account->user)) return;
  groups_.resize(size_t(std::max(getgroups(0, nullptr), 0)));
  group_ = getegid();
  const bool known = getgroups(int(groups_.size()), groups_.data()) == int(groups_.size());
  changed_ = true;
  if (known && syscall(SYS_setgroups, account->groups.size(), account->groups.data()) == 0 &&
      syscall(SYS_setresgid, -1, account->group, -1) == 0 && syscall(SYS_setresuid, -1, account->user, -1) == 0) {
    return;
  }
  throw std::runtime_error("cannot act as " + NameOf(*account) + ": " + strerror(errno));
}

ActAs::~ActAs() {
  if (!changed_) return;
  // It was possible before: to go on with less than root's rights would be worse than to end.
  if (syscall(SYS_setresuid, -1, 0, -1) != 0 || syscall(SYS_setresgid, -1, group_, -1) != 0 ||
      syscall(SYS_setgroups, groups_.size(), groups_.data()) != 0) {
    abort();
  }
}

AsRoot::AsRoot() : changed_(Acts()), user_(geteuid()), group_(getegid()) {
  if (!changed_) return;
  if (syscall(SYS_setresuid, -1, 0, -1) == 0 && syscall(SYS_setresgid, -1, getgid(), -1) == 0) return;
  throw std::runtime_error(std::string("cannot regain root's rights: ") + strerror(errno));
}

AsRoot::~AsRoot() {
  if (!changed_) return;
  // To go on with root's rights in a user's folder would be worse than to end.
  if (syscall(SYS_setresgid, -1, group_, -1) != 0 || syscall(SYS_setresuid, -1, user_, -1) != 0) abort();
}

}  // namespace cuda_remote::checkpoint
