// SPDX-License-Identifier: Apache-2.0
// Whoever is about to connect to the job's GPU server, in any process of the job, holds this lock until the connection
// is complete: opened sessions have their agent by then, and NVML's questions are answered. A tool that takes a
// snapshot holds it alone (checkpoint/job), so it meets no connection that nobody knows of.
//
// Part of the client library: libc only. Any thread.
#ifndef CUDA_REMOTE_PROTO_FOLDER_CONNECTION_LOCK_H_
#define CUDA_REMOTE_PROTO_FOLDER_CONNECTION_LOCK_H_

#include <string>

#include "proto/base/unique_fd.h"

namespace cuda_remote {

// The file's name in the job's folder.
inline constexpr char kConnectionLockName[] = "connect.lock";

// Shared. Taking it waits while a tool has it; no descriptor is open meanwhile, so that a snapshot of a process that
// waits has none.
class ConnectionLock {
 public:
  // `folder`: the job's; empty: there is nothing to lock.
  explicit ConnectionLock(const std::string& folder);
  ~ConnectionLock();
  ConnectionLock(const ConnectionLock&) = delete;
  ConnectionLock& operator=(const ConnectionLock&) = delete;

 private:
  UniqueFd fd_;
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_FOLDER_CONNECTION_LOCK_H_
