// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/outputs.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "checkpoint/job/job.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

bool IsPlain(int fd) {
  struct stat facts;
  return fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode);
}

bool IsSame(int fd, int other) {
  struct stat facts, others;
  return fstat(fd, &facts) == 0 && fstat(other, &others) == 0 && facts.st_dev == others.st_dev &&
         facts.st_ino == others.st_ino;
}

std::string Taken(const std::string& path) {
  return path + " is the output of another running job; give this one another file with --output or --error";
}

}  // namespace

Outputs::~Outputs() { Hide(); }

absl::Status Outputs::Lock(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) continue;  // it is said where the file is needed
    // Standard output and error may be one file.
    const bool ours =
        std::any_of(locks_.begin(), locks_.end(), [&](const UniqueFd& locked) { return IsSame(fd, locked.get()); });
    locks_.emplace_back(fd);
    if (ours) continue;
    if (IsPlain(fd) && flock(fd, LOCK_EX | LOCK_NB) != 0) return absl::FailedPreconditionError(Taken(path));
  }
  return absl::OkStatus();
}

absl::Status Outputs::OpenOne(const std::string& path, bool append, int index) {
  paths_[index] = Absolute(path);
  files_[index].Reset(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : 0), 0666));
  return files_[index].ok() ? absl::OkStatus() : ErrnoStatus("cannot write " + path);
}

absl::Status Outputs::Open(const OutputOptions& options) {
  if (!options.output.empty()) CR_RETURN_IF_ERROR(OpenOne(options.output, options.append, 0));
  if (!options.error.empty()) CR_RETURN_IF_ERROR(OpenOne(options.error, options.append, 1));
  if (files_[0].ok() && files_[1].ok() && IsSame(files_[0].get(), files_[1].get())) {
    // One position for both, as with 2>&1.
    files_[1].Reset(fcntl(files_[0].get(), F_DUPFD_CLOEXEC, 3));
  }
  CR_RETURN_IF_ERROR(Lock(all()));
  for (int i = 0; i < 2; ++i) {
    struct stat facts;
    if (!files_[i].ok() || fstat(files_[i].get(), &facts) != 0 || !S_ISREG(facts.st_mode)) continue;
    if (!options.append && ftruncate(files_[i].get(), 0) != 0) return ErrnoStatus("cannot empty " + paths_[i]);
    sizes_[i] = options.append ? uint64_t(facts.st_size) : 0;
  }
  return absl::OkStatus();
}

void Outputs::Show() {
  fflush(nullptr);
  for (int i = 0; i < 2; ++i) {
    if (!files_[i].ok() || before_[i].ok()) continue;
    before_[i].Reset(fcntl(i + 1, F_DUPFD_CLOEXEC, 3));
    dup2(files_[i].get(), i + 1);
  }
}

void Outputs::Hide() {
  fflush(nullptr);
  for (int i = 0; i < 2; ++i) {
    if (!before_[i].ok()) continue;
    dup2(before_[i].get(), i + 1);
    before_[i].Close();
  }
}

std::vector<std::string> Outputs::all() const {
  std::vector<std::string> paths;
  for (const std::string& path : paths_) {
    if (!path.empty() && std::find(paths.begin(), paths.end(), path) == paths.end()) paths.push_back(path);
  }
  return paths;
}

}  // namespace cuda_remote::checkpoint
