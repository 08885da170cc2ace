// SPDX-License-Identifier: Apache-2.0
// The frame of manifest.pb and memory/index: magic, format version, a serialized message, and a checksum of all three.
// FORMAT.md is the specification. Both are messages with the same four fields (manifest.proto).
#ifndef CUDA_REMOTE_CKPTFMT_ENVELOPE_H_
#define CUDA_REMOTE_CKPTFMT_ENVELOPE_H_

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ckptfmt/types.h"
#include "proto/base/hash.h"

namespace cuda_remote::ckptfmt {

// The same message gives the same bytes.
template <typename Message>
std::string Serialize(const Message& message) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    message.SerializeToCodedStream(&coded);
  }
  return bytes;
}

// The version is part of what the checksum covers, so damage to it does not pass for a newer image.
inline Hash128 HashOfContents(uint32_t magic, uint32_t version, const std::string& contents) {
  Hasher hasher;
  std::string head;
  for (const uint32_t number : {magic, version}) {
    for (int shift = 0; shift < 32; shift += 8) head += char(number >> shift);
  }
  hasher.Add(head);
  hasher.Add(contents);
  return hasher.Get();
}

// The bytes of a file. `set_contents`: a setter of File for its field 3.
template <typename File>
std::string Seal(uint32_t magic, const std::string& contents, void (*set_contents)(File*, const std::string&)) {
  File out;
  out.set_magic(magic);
  out.set_format_version(kFormatVersion);
  set_contents(&out, contents);
  out.set_hash(ToBytes(HashOfContents(magic, kFormatVersion, contents)));
  return Serialize(out);
}

// Any input is safe. kDataLoss for damage, kFailedPrecondition for a version that this program does not read. `name` is
// for messages.
template <typename File>
absl::Status Unseal(std::string_view bytes, const std::string& name, uint32_t magic,
                    const std::string& (*contents)(const File&), File* in, uint32_t* version) {
  const auto damaged = [&](const char* what) { return absl::DataLossError(absl::StrCat(name, " is damaged: ", what)); };
  if (bytes.size() > INT32_MAX || !in->ParseFromArray(bytes.data(), int(bytes.size()))) {
    return damaged("it cannot be parsed");
  }
  if (in->magic() != magic) return damaged("it does not start as it should");
  Hash128 expected;
  if (!FromBytes(in->hash(), &expected) || HashOfContents(magic, in->format_version(), contents(*in)) != expected) {
    return damaged("its checksum is wrong");
  }
  *version = in->format_version();
  if (*version < kFirstFormatVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, ": the image has format version ", *version,
                     ", which is from before cuda-remote 0.9.0 and is not "
                     "read any more; restart the job with the cuda-remote that wrote the image, or start it anew"));
  }
  if (*version > kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(name, ": the image has format version ", *version,
                                                      ", this program reads versions up to ", kFormatVersion,
                                                      "; use the cuda-remote that wrote it, or a newer one"));
  }
  // There is one way to write the file: what else the parser accepts is damage that it did not see.
  in->DiscardUnknownFields();
  if (Serialize(*in) != bytes) return damaged("it has bytes that do not belong there");
  return absl::OkStatus();
}

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_ENVELOPE_H_
