// SPDX-License-Identifier: Apache-2.0
// Names that somebody else chose - of programs, jobs, hosts - on their way to terminals, logs, JSON and protobuf
// strings, which must be UTF-8: a process that cannot be listed because of its name would keep all others from being
// listed.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_CODEC_TEXT_H_
#define CUDA_REMOTE_PROTO_CODEC_TEXT_H_

#include <string>
#include <string_view>

namespace cuda_remote {

// `text` with a '?' for each control character and for each byte that is no part of well-formed UTF-8. Any thread.
std::string Printable(std::string_view text);

// `text` as a JSON string, quotes included. Bytes that are no part of well-formed UTF-8, as names in modules may be,
// come out as \u00xx. Any thread.
std::string JsonQuoted(std::string_view text);

// A path as well-formed UTF-8, for messages that have it as a string: each byte that is no part of a character becomes
// a zero byte, which no path has, and two hexadecimal digits. PathFromUtf8 turns it back. Any thread.
std::string PathToUtf8(std::string_view path);
std::string PathFromUtf8(std::string_view text);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CODEC_TEXT_H_
