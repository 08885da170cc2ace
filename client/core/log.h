// SPDX-License-Identifier: Apache-2.0
// Messages of the client library to a person: one line on stderr, prefixed "cuda-remote: ".
//
// The last ones are kept for cuLogs* (log_buffer.h). No allocation, no lock that it waits for, no stdio: write(2) of a
// line formatted on the stack, so it may be called from anywhere, also while a checkpoint holds the application. Lines
// longer than 1 KiB are cut.
#ifndef CUDA_REMOTE_CLIENT_CORE_LOG_H_
#define CUDA_REMOTE_CLIENT_CORE_LOG_H_

namespace cuda_remote::client {

// Prints a line. The caller adds no newline. errno is kept.
void LogLine(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_LOG_H_
