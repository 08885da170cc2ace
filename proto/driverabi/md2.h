// SPDX-License-Identifier: Apache-2.0
// MD2 (RFC 1319) and its HMAC (RFC 2104): what the CUDA runtime's driver check is made of. No maintained library still
// ships MD2, and nothing here protects anything: it is a format, not a defence.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_MD2_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_MD2_H_

#include <array>
#include <cstdint>
#include <string_view>

namespace cuda_remote::driverabi {

using Md2Digest = std::array<uint8_t, 16>;

// Digest of `bytes`. Thread-safe, allocates nothing.
Md2Digest Md2(std::string_view bytes);

// HMAC-MD2 with MD2's 16-byte block. `key` has at most 16 bytes.
Md2Digest HmacMd2(std::string_view key, std::string_view message);

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_MD2_H_
