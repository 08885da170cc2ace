// SPDX-License-Identifier: Apache-2.0
// Tokens: what clients show instead of a certificate, over TLS (cr-server --tokens).
//
// The server's file has a line for each: a name, and the SHA-256 of the token in hexadecimal digits. Who reads the file
// has no token. A token is 32 random bytes, so that nobody guesses one and a plain hash hides it. Lines that are empty
// or begin with # are skipped. Thread-safe: no state.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_TOKENS_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_TOKENS_H_

#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace cuda_remote::server {

// By hash: the name.
using TokenNames = std::map<std::string, std::string>;

std::string TokenHash(std::string_view token);

// Fails if the file cannot be read, others may write it, or it is wrong.
absl::StatusOr<TokenNames> ReadTokens(const std::string& path);

// A new token for `name`, of which a line is added to the file (made with mode 0600). Fails also if there is such a
// name.
absl::StatusOr<std::string> MakeToken(const std::string& path, const std::string& name);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_TOKENS_H_
