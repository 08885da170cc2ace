// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/compression_choice.h"

#include "proto/threads/mutex.h"

namespace cuda_remote::ckptfmt {
namespace {

// One chunk in so many is compressed to see what it would be.
constexpr uint64_t kSampleEvery = 32;
// Waits that are shorter (10 GB/s) are no reason to compress.
constexpr double kShortWait = 1e-10;
// What compressing must gain over what it costs: it takes processors from the job.
constexpr double kGain = 1.2;
constexpr double kWeight = 0.25;

}  // namespace

void CompressionChoice::Mean::Add(double one) {
  value = known ? value + kWeight * (one - value) : one;
  known = true;
}

bool CompressionChoice::Next() {
  MutexLock lock(&mutex_);
  if (!wait_.known || wait_.value < kShortWait) return false;
  if (!ratio_.known || ++chunks_ % kSampleEvery == 0) return true;
  return (1 - ratio_.value) * wait_.value > kGain * cost_.value;
}

void CompressionChoice::Compressed(uint64_t bytes, uint64_t packed_bytes, double seconds) {
  if (bytes == 0) return;
  MutexLock lock(&mutex_);
  ratio_.Add(double(packed_bytes) / double(bytes));
  cost_.Add(seconds / double(bytes));
}

void CompressionChoice::Waited(uint64_t stored_bytes, double seconds) {
  if (stored_bytes == 0) return;
  MutexLock lock(&mutex_);
  wait_.Add(seconds / double(stored_bytes));
}

}  // namespace cuda_remote::ckptfmt
