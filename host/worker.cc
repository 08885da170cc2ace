// SPDX-License-Identifier: Apache-2.0
#include "host/worker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "checkpoint/job/account.h"
#include "host/exchange.h"
#include "host/peer.h"
#include "host/report.h"
#include "host/requests/host_request.h"
#include "host/wire.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/codec/text.h"
#include "proto/errors/absl_status.h"
#include "proto/logging/log.h"

namespace cuda_remote::host {
namespace {

// The first message must be there by then.
constexpr auto kFirstMessageTime = std::chrono::seconds(10);

// What a tool of root's writes to a file of these kinds could mean more than when the user writes it.
bool IsHarmless(int fd) {
  struct statfs facts;
  if (fstatfs(fd, &facts) != 0) return false;
  constexpr uint32_t kKernels[] = {PROC_SUPER_MAGIC, SYSFS_MAGIC,   CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC,
                                   DEBUGFS_MAGIC,    TRACEFS_MAGIC, SECURITYFS_MAGIC,   BPF_FS_MAGIC};
  return std::find(std::begin(kKernels), std::end(kKernels), uint32_t(facts.f_type)) == std::end(kKernels);
}

// One without a name.
bool IsPipe(int fd) {
  struct statfs facts;
  return fstatfs(fd, &facts) == 0 && facts.f_type == PIPEFS_MAGIC;
}

absl::Status ReadRequest(Asked* asked) {
  const bool read = Receive(asked->socket, &asked->request, &asked->fds, Now() + kFirstMessageTime);
  struct stat facts;
  if (!read || asked->fds.size() != kMostDescriptors || fstat(asked->fds[3], &facts) != 0 || !S_ISDIR(facts.st_mode)) {
    return absl::InvalidArgumentError(kCannotRead);
  }
  if (asked->request.version() != kVersion) {
    return absl::UnimplementedError("cr-hostd speaks version " + std::to_string(kVersion) + " and this tool version " +
                                    std::to_string(asked->request.version()) + "; install the same version of both");
  }
  for (size_t i = 0; i < 3; ++i) {
    if (IsHarmless(asked->fds[i])) continue;
    return absl::PermissionDeniedError("descriptor " + std::to_string(i) +
                                       " is a file of the kernel's, to which cr-hostd does not write; use a pipe");
  }
  asked->tool = FindTool(asked->request.tool());
  if (!asked->tool) return absl::UnimplementedError("cr-hostd does not know the tool " + asked->request.tool());
  // The engine opens a pipe once more, for which it must be the user's: it is not to become hers by that.
  for (size_t i = 0; asked->tool->takes_image && i < 3; ++i) {
    if (!IsPipe(asked->fds[i]) || fstat(asked->fds[i], &facts) != 0 || facts.st_uid == asked->peer.account.user)
      continue;
    return absl::PermissionDeniedError("descriptor " + std::to_string(i) + " is a pipe that belongs to user " +
                                       std::to_string(facts.st_uid) + ", not to " + NameOf(asked->peer.account) +
                                       "; use a file, or a pipe of that user");
  }
  return absl::OkStatus();
}

// What an operator asks for is done as the job's owner. Nothing that the operator has decided, such as an environment,
// goes to processes that run as the owner.
absl::Status ActForOwner(Asked* asked) {
  const bool drains = asked->tool->name == std::string(kDrainTool);
  if (asked->request.user().empty() && !drains) return absl::OkStatus();
  if (!IsOperator(asked->settings.operators, asked->peer.account)) {
    return absl::PermissionDeniedError(
        NameOf(asked->peer.account) + " is not an operator of this host (cr-hostd --operator); " +
        (drains ? "cr-drain needs root, or an operator" : "users save their own jobs only"));
  }
  if (drains) return absl::OkStatus();
  if (asked->tool->name != std::string("checkpoint"))
    return absl::PermissionDeniedError("operators save other users' jobs, and do nothing else with them");
  CR_ASSIGN_OR_RETURN(const checkpoint::Account owner, checkpoint::FindAccount(asked->request.user()));
  logging::Info("{}", LogLine(asked->peer.account, asked->request.job(), "asks as an operator for " + NameOf(owner)));
  asked->peer.account = owner;
  asked->request.clear_environment();
  return absl::OkStatus();
}

// Reads what the peer wants, and checks that it may. *elsewhere: what refuses it is not the request, but who asks.
absl::Status TakeRequest(Asked* asked, bool* elsewhere) {
  *elsewhere = true;
  ucred facts = {};
  socklen_t size = sizeof(facts);
  const bool root = getsockopt(asked->socket, SOL_SOCKET, SO_PEERCRED, &facts, &size) == 0 && facts.uid == 0;
  if (!root) CR_RETURN_IF_ERROR(FindPeer(asked->socket, &asked->peer));
  *elsewhere = false;
  CR_RETURN_IF_ERROR(ReadRequest(asked));
  // Root may ask for it, too.
  if (asked->tool->name == std::string(kHostsTool)) return absl::OkStatus();
  const Asker asker = asked->tool->asker;
  if (root != (asker != Asker::kUser) || asked->request.has_arrived() != (asker == Asker::kMove) ||
      asked->request.has_member() != (asker == Asker::kGroup)) {
    *elsewhere = root;
    if (root) return absl::FailedPreconditionError("root needs no cr-hostd: start the tool without it");
    return absl::UnimplementedError("cr-hostd does not know the tool " + asked->request.tool());
  }
  if (!root) CR_RETURN_IF_ERROR(ActForOwner(asked));
  // The user's names of files are meant from there, and are only used with her rights.
  return fchdir(asked->fds[3]) == 0 ? absl::OkStatus() : ErrnoStatus("cr-hostd cannot enter the working folder");
}

}  // namespace

bool IsJobName(const std::string& name) {
  const auto is_bad = [](unsigned char byte) { return byte <= ' ' || byte == '/' || byte >= 127; };
  return !name.empty() && name.size() <= kMostName && name[0] != '.' && name[0] != '-' &&
         std::none_of(name.begin(), name.end(), is_bad);
}

void ServeRequest(int socket, const Settings& settings, const Key& key) {
  Asked asked(socket, settings, key);
  bool elsewhere = false;
  absl::Status begun = TakeRequest(&asked, &elsewhere);
  const Tool* const tool = asked.tool;
  const std::string refused = LogLine(asked.peer.account, asked.request.job(), "refused: ");
  std::unique_ptr<HostRequest> request;
  if (begun.ok()) {
    request = tool->make(std::move(asked));
    begun = request->Begin();
  }
  const bool served = begun.ok() && request->Serve();
  settings.counters->CountRequest(tool ? tool->name : "", !served);
  if (begun.ok()) return;
  const std::string error(begun.message());
  if (request) {
    request->LogRefused(error);
  } else {
    logging::Warn("{}", refused + Printable(error));
  }
  Reply reply;
  reply.set_kind(elsewhere ? Reply::ELSEWHERE : Reply::REFUSED);
  reply.set_text(Printable(error));
  Send(socket, reply);
}

void CleanSpool(const Settings& settings) {
  DIR* const list = opendir(settings.spool.c_str());
  while (const dirent* const entry = list ? readdir(list) : nullptr) {
    if (entry->d_name[0] == '.') continue;
    const std::string path = settings.spool + "/" + entry->d_name;
    const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    // A worker has its folder locked.
    if (folder >= 0 && flock(folder, LOCK_EX | LOCK_NB) == 0) RemoveOwnFolder(path);
    if (folder >= 0) close(folder);
  }
  if (list) closedir(list);
}

}  // namespace cuda_remote::host
