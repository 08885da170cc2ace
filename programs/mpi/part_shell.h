// SPDX-License-Identifier: Apache-2.0
// Commands in other parts of a job on several hosts: what ssh is for between hosts, between the parts of one job, and
// inside of the job. So it is saved, moved and restarted with the job, at the addresses of the parts.
//
// A part serves at its address. Who asks must know the job's key, a file that only the job's user can read: the server
// sends random bytes, and the answer has an HMAC-SHA256 over them and the command. What then passes is not encrypted,
// as what MPI sends between the parts.
//
// For single-threaded programs.
#ifndef CUDA_REMOTE_PROGRAMS_MPI_PART_SHELL_H_
#define CUDA_REMOTE_PROGRAMS_MPI_PART_SHELL_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::client::mpi {

// Names the file with the job's key.
inline constexpr char kPartsKey[] = "CUDA_REMOTE_PARTS_KEY";

// Makes a key that only this user can read, in the place of an older file.
absl::Status MakePartsKey(const std::string& path);
absl::StatusOr<std::string> ReadPartsKey(const std::string& path);

// Listens at `ip` ("0.0.0.0": at all addresses) and `port` (0: any, and *port is which).
absl::StatusOr<UniqueFd> ListenForParts(const std::string& ip, int* port);
// Serves until the process is ended: runs commands of those who know the key, each by /bin/sh, in this process's
// environment and folder. A command whose asker ends gets SIGTERM.
[[noreturn]] void ServeParts(int listening, const std::string& key);

// Runs a command in the part at `ip`, waits for it, and copies what it prints to `output`. Waits up to `seconds` for a
// part that does not serve yet. Gives the command's exit code, or 128 + N if signal N ended it.
absl::StatusOr<int> RunInPart(const std::string& ip, int port, const std::string& key, const std::string& command,
                              int seconds, int output);

// The port of all parts, each of which has an address of its own.
inline constexpr int kPartsPort = 7072;

}  // namespace cuda_remote::client::mpi

#endif  // CUDA_REMOTE_PROGRAMS_MPI_PART_SHELL_H_
