// SPDX-License-Identifier: Apache-2.0
// Whether compressing makes writing faster: found out while writing, from how long writers wait for the disk, and from
// how small and how fast chunks get. Thread-safe.
#ifndef CUDA_REMOTE_CKPTFMT_COMPRESSION_CHOICE_H_
#define CUDA_REMOTE_CKPTFMT_COMPRESSION_CHOICE_H_

#include <cstdint>

#include "proto/threads/mutex.h"

namespace cuda_remote::ckptfmt {

class CompressionChoice {
 public:
  // Whether to compress the next chunk: because it pays, or now and then to see whether it would.
  bool Next();
  // A chunk was compressed.
  void Compressed(uint64_t bytes, uint64_t packed_bytes, double seconds);
  // A writer has waited for the disk to take these bytes.
  void Waited(uint64_t stored_bytes, double seconds);

 private:
  // A mean over the last ones.
  struct Mean {
    double value = 0;
    bool known = false;
    void Add(double one);
  };
  Mutex mutex_;
  uint64_t chunks_ CR_GUARDED_BY(mutex_) = 0;
  Mean wait_ CR_GUARDED_BY(mutex_);   // seconds for a stored byte
  Mean cost_ CR_GUARDED_BY(mutex_);   // seconds for a byte to compress
  Mean ratio_ CR_GUARDED_BY(mutex_);  // of the compressed bytes
};

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_COMPRESSION_CHOICE_H_
