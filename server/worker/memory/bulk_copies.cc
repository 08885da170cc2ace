// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/bulk_copies.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "proto/threads/mutex.h"

namespace cuda_remote::server {
namespace {

bool ReadAll(const BulkCopies::Part& part, char* to) {
  for (uint64_t done = 0; done < part.bytes;) {
    const ssize_t got = pread(part.file, to + done, part.bytes - done, off_t(part.offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += uint64_t(got);
  }
  return true;
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

// False if the file has no room for it.
bool WriteAll(const BulkCopies::Part& part, const char* from) {
  // One call for all pages costs less than a fault for each, and fails where those would end the process. Linux before
  // 5.14 does not know it.
  while (madvise(part.memory, part.bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINVAL) break;
    if (errno != EINTR && errno != EAGAIN) return false;
  }
  memcpy(part.memory, from, part.bytes);
  return true;
}

size_t ThreadsOfMachine() { return std::max(2u, std::thread::hardware_concurrency() / 2); }

}  // namespace

struct BulkCopies::Job {
  ContextRef context;
  bool to_device = false;
  std::vector<Part> pieces;
  std::atomic<size_t> next{0};
  std::atomic<CUresult> result{CUDA_SUCCESS};  // the first failure
  Mutex mutex;
  Condition left;
  size_t inside CR_GUARDED_BY(mutex) = 0;    // helpers that work on it
  bool closed CR_GUARDED_BY(mutex) = false;  // no more of them

  void Fail(CUresult failure) {
    CUresult none = CUDA_SUCCESS;
    if (failure != CUDA_SUCCESS) result.compare_exchange_strong(none, failure);
  }
};

BulkCopies::BulkCopies(const DriverTable& driver, StagingPool* staging, unsigned threads, std::function<void()> start)
    : driver_(driver),
      staging_(staging),
      threads_(std::min(kMostThreads, threads != 0 ? size_t{threads} : ThreadsOfMachine())),
      helpers_(std::max<size_t>(1, threads_ - 1), std::move(start)) {}

void BulkCopies::Work(Job* job, Lane* lane) const {
  if (const CUresult result = MakeCurrent(driver_, job->context); result != CUDA_SUCCESS) return job->Fail(result);
  struct Slot {
    std::shared_ptr<char> buffer;
    const Part* piece = nullptr;  // in progress
  } slots[kBuffers];
  // Ends what the slot has in progress.
  const auto finish = [&](size_t i) {
    Slot& slot = slots[i];
    if (!slot.piece) return;
    const CUresult result = driver_.cuStreamSynchronize(lane->streams[i]);
    job->Fail(result);
    if (result == CUDA_SUCCESS && !job->to_device && !WriteAll(*slot.piece, slot.buffer.get())) {
      job->Fail(CUDA_ERROR_OPERATING_SYSTEM);
    }
    slot.piece = nullptr;
  };
  for (size_t turn = 0;; ++turn) {
    const size_t at = job->next.fetch_add(1, std::memory_order_relaxed), i = turn % kBuffers;
    if (at >= job->pieces.size() || job->result.load(std::memory_order_relaxed) != CUDA_SUCCESS) break;
    finish(i);
    Slot& slot = slots[i];
    const Part& piece = job->pieces[at];
    if (!slot.buffer) slot.buffer = staging_->Take(kMostPiece);
    if (!slot.buffer) {
      job->Fail(CUDA_ERROR_OUT_OF_MEMORY);
      break;
    }
    CUresult result;
    if (!job->to_device) {
      result = driver_.cuMemcpyDtoHAsync_v2(slot.buffer.get(), piece.device, piece.bytes, lane->streams[i]);
    } else if (ReadAll(piece, slot.buffer.get())) {
      result = driver_.cuMemcpyHtoDAsync_v2(piece.device, slot.buffer.get(), piece.bytes, lane->streams[i]);
    } else {
      result = CUDA_ERROR_OPERATING_SYSTEM;
    }
    job->Fail(result);
    if (result == CUDA_SUCCESS) slot.piece = &piece;
  }
  for (size_t i = 0; i < kBuffers; ++i) finish(i);
}

CUresult BulkCopies::Copy(ContextRef context, const std::vector<Part>& parts, bool to_device) {
  if (const CUresult result = MakeCurrent(driver_, context); result != CUDA_SUCCESS) return result;
  std::vector<Lane>& lanes = lanes_[context.id];
  while (lanes.size() < threads_) {
    Lane lane;
    for (CUstream& stream : lane.streams) {
      if (const CUresult made = driver_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING); made != CUDA_SUCCESS)
        return made;
    }
    lanes.push_back(lane);
  }
  // Helpers may come to it when all is done, and find it closed.
  const auto job = std::make_shared<Job>();
  job->context = context;
  job->to_device = to_device;
  uint64_t all = 0;
  for (const Part& part : parts) all += part.bytes;
  // Enough pieces for all buffers of all threads.
  constexpr uint64_t kPage = 4096;
  const uint64_t share = all / (threads_ * kBuffers) / kPage * kPage;
  const uint64_t most = std::clamp(share, kLeastPiece, kMostPiece);
  for (const Part& part : parts) {
    for (uint64_t at = 0; at < part.bytes; at += most) {
      job->pieces.push_back(
          {part.file, part.offset + at, part.memory + at, part.device + at, std::min(most, part.bytes - at)});
    }
  }
  for (size_t i = 1; i < std::min(threads_, job->pieces.size()); ++i) {
    try {
      helpers_.Run([this, job, lane = &lanes[i]] { Help(job.get(), lane); });
    } catch (const std::system_error&) {
      break;  // no threads to be had: this one does it all
    }
  }
  Work(job.get(), &lanes[0]);
  MutexLock lock(&job->mutex);
  job->closed = true;
  while (job->inside != 0) job->left.Wait(&job->mutex);
  return job->result;
}

void BulkCopies::Help(Job* job, Lane* lane) const {
  {
    MutexLock lock(&job->mutex);
    if (job->closed) return;
    ++job->inside;
  }
  Work(job, lane);
  MutexLock lock(&job->mutex);
  if (--job->inside == 0) job->left.NotifyOne();
}

}  // namespace cuda_remote::server
