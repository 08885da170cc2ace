// SPDX-License-Identifier: Apache-2.0
// Reading a file at once.
//
// Thread-safe. Part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_READ_FILE_H_
#define CUDA_REMOTE_PROTO_BASE_READ_FILE_H_

#include <string>

namespace cuda_remote {

// All bytes of a file. False if it cannot be opened or read, as a file in /proc of a process that ends meanwhile;
// *bytes is then what came before. (An std::ifstream throws there, if its buffer is read directly.)
bool ReadWholeFile(const std::string& path, std::string* bytes);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_READ_FILE_H_
