// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/process_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <string>

#include "proto/base/unique_fd.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

ssize_t ReadMemoryFile(int pid, uint64_t address, char* to, size_t bytes) {
  const UniqueFd file(open(("/proc/" + std::to_string(pid) + "/mem").c_str(), O_RDONLY | O_CLOEXEC));
  return file.ok() ? pread(file.get(), to, bytes, off_t(address)) : -1;
}

}  // namespace

bool ProcessMemory::MayRead() const {
  for (const int pid : pids_) {
    // Nothing is ever there.
    char byte;
    iovec to{&byte, 1}, from{nullptr, 1};
    if (process_vm_readv(pid, &to, 1, &from, 1, 0) < 0 && errno != EFAULT && errno != ESRCH) return false;
  }
  return true;
}

// Its number outside of the job; 0 if the job has none such.
int ProcessMemory::Outside(int process) {
  MutexLock lock(&mutex_);
  if (const auto found = outside_.find(process); found != outside_.end()) return found->second;
  if (outside_.empty()) Note(pids_);
  // It may have been started after those.
  if (outside_.count(process) == 0) Note(ProcessesOf(job_));
  const auto found = outside_.find(process);
  return found != outside_.end() ? found->second : 0;
}

void ProcessMemory::Note(const std::vector<int>& pids) {
  for (const int pid : pids) outside_[InnerPid(pid)] = pid;
}

absl::Status ProcessMemory::Read(int process, uint64_t address, char* to, size_t bytes) {
  const int pid = Outside(process);
  if (pid == 0)
    return absl::NotFoundError("the job has no process " + std::to_string(process) + " whose memory could be saved");
  for (size_t done = 0; done < bytes;) {
    iovec local{to + done, bytes - done}, remote{reinterpret_cast<void*>(address + done), bytes - done};
    ssize_t got = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (got < 0 && errno == EINTR) continue;
    // Memory that may only be written, which the other file gives, more slowly.
    if (got < 0 && errno == EFAULT) got = ReadMemoryFile(pid, address + done, to + done, bytes - done);
    if (got <= 0) return ErrnoStatus("cannot read the memory of process " + std::to_string(process));
    done += size_t(got);
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::checkpoint
