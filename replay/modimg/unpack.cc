// SPDX-License-Identifier: Apache-2.0
#include "replay/modimg/unpack.h"

#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <memory>

namespace cuda_remote::replay {

Status UnpackLz4(std::string_view packed, uint64_t bytes, std::string* out) {
  // A byte of LZ4 stands for at most 255, so a small input cannot claim much memory.
  if (bytes / 255 > packed.size() || bytes > LZ4_MAX_INPUT_SIZE || packed.size() > LZ4_MAX_INPUT_SIZE) {
    return Error("the unpacked size of an LZ4 entry is impossible");
  }
  out->resize(size_t(bytes));
  const int done = LZ4_decompress_safe(packed.data(), out->data(), int(packed.size()), int(bytes));
  if (done < 0 || uint64_t(done) != bytes) return Error("an LZ4 entry does not unpack");
  return OkStatus();
}

Status UnpackZstd(std::string_view packed, uint64_t bytes, std::string* out) {
  const std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context(ZSTD_createDCtx(), &ZSTD_freeDCtx);
  if (!context) return Error("no memory");
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
      return Error(std::string("a Zstandard entry does not unpack (") + ZSTD_getErrorName(result) + ")");
    }
    const bool stuck = buffer.pos == done && in.pos == in.size;
    done = buffer.pos;
    if (done > bytes || (stuck && result != 0)) return Error("the size of a Zstandard entry differs from its header");
    if (result == 0 && in.pos == in.size) break;
  }
  out->resize(done);
  if (done != bytes) return Error("the size of a Zstandard entry differs from its header");
  return OkStatus();
}

}  // namespace cuda_remote::replay
