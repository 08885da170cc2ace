// SPDX-License-Identifier: Apache-2.0
// Numbers and bytes as text, for messages and names.
//
// Thread-safe. Part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_TEXT_H_
#define CUDA_REMOTE_PROTO_BASE_TEXT_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace cuda_remote {

// "0x7f00c0de": lower-case digits without leading zeros. For addresses, handles and flags.
std::string Hex(uint64_t number);

// Two lower-case digits for each byte, and `between` between two bytes: "00ff", "00:ff".
std::string HexBytes(std::string_view bytes, std::string_view between = "");

// The opposite of HexBytes, digits of either case. False, and *bytes unchanged, if `digits` is anything else.
bool BytesOfHex(std::string_view digits, std::string* bytes);

// The UUID of a GPU, 16 bytes, as the driver and nvidia-smi print it: "GPU-12345678-9abc-...".
std::string UuidName(std::string_view uuid);

// An amount of memory for people: "300 B", "1.2 GiB", "17 MiB".
std::string ByteText(double bytes);

// A length of time for people, in its largest unit: "90 s", "12 min", "30 h", "3 days". Negative: "0 s".
std::string AgeText(int64_t milliseconds);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_TEXT_H_
