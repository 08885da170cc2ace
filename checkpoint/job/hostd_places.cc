// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/hostd_places.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>

#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kDraining[] = "draining";
constexpr char kUsualSocket[] = "/run/cuda-remote/hostd.sock";
constexpr size_t kMostReason = 1000;

std::string Beside(const std::string& socket, const char* name) {
  return socket.substr(0, socket.rfind('/') + 1) + name;
}

}  // namespace

std::string HostdSocket() {
  const char* const named = getenv("CUDA_REMOTE_HOSTD");
  return named && *named ? named : kUsualSocket;
}

bool IsUsualHostd(const std::string& socket) { return socket == kUsualSocket; }

std::string UsersFolder(const std::string& socket) { return Beside(socket, "users"); }

std::string UserFolder(const std::string& socket, uid_t user) {
  return UsersFolder(socket) + "/" + std::to_string(user);
}

std::string UserJobsFolder(const std::string& socket, uid_t user) {
  return UserFolder(socket, user) + "/cuda-remote/jobs";
}

std::string DrainingReason(const std::string& socket) {
  std::string reason(kMostReason, '\0');
  const int fd = open(Beside(socket, kDraining).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return {};
  const ssize_t got = read(fd, &reason[0], reason.size());
  close(fd);
  reason.resize(size_t(std::max<ssize_t>(got, 0)));
  return reason.empty() ? "it is being drained" : reason;
}

absl::Status SetDrainingReason(const std::string& socket, const std::string& reason) {
  const std::string path = Beside(socket, kDraining), fresh = path + ".new";
  bool done;
  if (reason.empty()) {
    done = unlink(path.c_str()) == 0 || errno == ENOENT;
  } else {
    const std::string text = reason.substr(0, kMostReason);
    unlink(fresh.c_str());
    const int fd = open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    done = fd >= 0 && write(fd, text.data(), text.size()) == ssize_t(text.size()) &&
           rename(fresh.c_str(), path.c_str()) == 0;
    if (fd >= 0) close(fd);
  }
  return done ? absl::OkStatus() : ErrnoStatus("cannot change " + path);
}

}  // namespace cuda_remote::checkpoint
