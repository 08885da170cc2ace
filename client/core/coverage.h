// SPDX-License-Identifier: Apache-2.0
// Counts calls that are not supported, so that none passes silently.
#ifndef CUDA_REMOTE_CLIENT_CORE_COVERAGE_H_
#define CUDA_REMOTE_CLIENT_CORE_COVERAGE_H_

#include <cstdint>

namespace cuda_remote::client {

// Counts one use of the unsupported call `name` and, the first time, says so on stderr with the reason. Thread-safe.
// `name` must live for ever (a string literal).
void CountUnsupported(const char* name, const char* reason);

// How many unsupported calls the application made.
uint64_t UnsupportedCalls();

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_COVERAGE_H_
