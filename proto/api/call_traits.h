// SPDX-License-Identifier: Apache-2.0
// Facts about requests that client, replayer and worker act on. proto/api/call_traits.gen.h has them, one row for each
// call and operation; schema.proto (`Traits`) says what each one means, and semantics.textproto and
// operations.textproto state them.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_API_CALL_TRAITS_H_
#define CUDA_REMOTE_PROTO_API_CALL_TRAITS_H_

#include <cstdint>

namespace cuda_remote {

// A capture is recorded as the requests that were sent for its streams and its graph; a replay sends them again in
// order. The client keeps those that are kRecorded behind the one that kBegins it, and the server accepts no others
// inside an OpGraphCapture.

// The enums of `Traits`, under the same names. Of all the first value is what counts where nothing is known.
enum class Work : uint8_t { kMayStart, kWaits, kAsks, kStartsNone };
enum class Completes : uint8_t { kNoWork, kWork, kWorkAndErrors };
enum class Capture : uint8_t { kObstacle, kRecorded, kBegins, kLeftOut };
enum class Events : uint8_t { kNoEvents, kRecords, kRecordsAny, kWaitsFor };
enum class Sharing : uint8_t { kNotShared, kShares, kOpens };

// The flags of `Traits`.
enum CallFlag : uint16_t {
  kOnlyNamedMemory = 1,
  kRecordNeedsMemory = 2,
  kReadsNoManaged = 4,
  kNotUrgent = 8,
  kEventItself = 16,
  kReplyMayDiffer = 32,
  kInPieces = 64,
  kSettingInQuestions = 128,
  kRecordedIfNamed = 256,
  kMustSucceed = 512,
  kLaunchesKernels = 1024,
  kMovesSharedMemory = 2048,
  kNotReplayable = 4096,  // the row says `replay: NEVER`
  kMemoryOfAnyGpu = 8192,
  kFollowsFlushes = 16384,
};

struct CallTraits {
  Work work = Work::kMayStart;
  Completes completes = Completes::kNoWork;
  Capture capture = Capture::kObstacle;
  Events events = Events::kNoEvents;
  Sharing sharing = Sharing::kNotShared;
  uint8_t key_field = 0;  // number of the request's field `key`; 0: it shares nothing
  uint16_t flags = 0;

  constexpr bool Has(CallFlag flag) const { return (flags & flag) != 0; }
  // Adds nothing to what the GPU has to do, and changes nothing.
  constexpr bool only_asks() const { return work == Work::kWaits || work == Work::kAsks; }
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_API_CALL_TRAITS_H_
