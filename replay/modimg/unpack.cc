// SPDX-License-Identifier: Apache-2.0
#include "replay/modimg/unpack.h"

#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <memory>

namespace cuda_remote::replay {

bool UnpackLz4(std::string_view packed, uint64_t bytes, std::string* out, std::string* error) {
  // A byte of LZ4 stands for at most 255, so a small input cannot claim much memory.
  if (bytes / 255 > packed.size() || bytes > LZ4_MAX_INPUT_SIZE || packed.size() > LZ4_MAX_INPUT_SIZE) {
    *error = "the unpacked size of an LZ4 entry is impossible";
    return false;
  }
  out->resize(size_t(bytes));
  const int done = LZ4_decompress_safe(packed.data(), out->data(), int(packed.size()), int(bytes));
  if (done < 0 || uint64_t(done) != bytes) {
    *error = "an LZ4 entry does not unpack";
    return false;
  }
  return true;
}

bool UnpackZstd(std::string_view packed, uint64_t bytes, std::string* out, std::string* error) {
  const std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context(ZSTD_createDCtx(), &ZSTD_freeDCtx);
  if (!context) {
    *error = "no memory";
    return false;
  }
  out->clear();
  ZSTD_inBuffer in{packed.data(), packed.size(), 0};
  size_t done = 0;
  for (;;) {
    // One byte more than promised, to see what goes on too long.
    const uint64_t room = std::min(bytes + 1 - done, std::max<uint64_t>(done, 1u << 18));
    out->resize(done + size_t(room));
    ZSTD_outBuffer buffer{out->data(), out->size(), done};
    const size_t result = ZSTD_decompressStream(context.get(), &buffer, &in);
    if (ZSTD_isError(result)) {
      *error = std::string("a Zstandard entry does not unpack (") + ZSTD_getErrorName(result) + ")";
      return false;
    }
    const bool stuck = buffer.pos == done && in.pos == in.size;
    done = buffer.pos;
    if (done > bytes || (stuck && result != 0)) {
      *error = "the size of a Zstandard entry differs from its header";
      return false;
    }
    if (result == 0 && in.pos == in.size) break;
  }
  out->resize(done);
  if (done != bytes) {
    *error = "the size of a Zstandard entry differs from its header";
    return false;
  }
  return true;
}

}  // namespace cuda_remote::replay
