// SPDX-License-Identifier: Apache-2.0
// Times in the tables that people read.
#ifndef CUDA_REMOTE_CLIENT_TOOLS_TABLE_TEXT_H_
#define CUDA_REMOTE_CLIENT_TOOLS_TABLE_TEXT_H_

#include <cstdint>
#include <string>

namespace cuda_remote::client::tools {

// How long ago, in two figures or so: "12 min ago"; "-" for 0.
std::string Ago(uint64_t unix_ms);

// The same as a length of time: "12 min".
std::string Age(uint64_t unix_ms);

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_CLIENT_TOOLS_TABLE_TEXT_H_
