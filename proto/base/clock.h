// SPDX-License-Identifier: Apache-2.0
// The one place that reads a clock.
//
// `Now` and `NowNs` read the same clock (CLOCK_MONOTONIC), which no setting of the date moves: for durations, limits
// and timelines. All processes of a machine see the same values. `WallNow` and `UnixMs` are the date: for people, files
// and gRPC's deadlines.
//
// Thread-safe, and safe in a signal handler. Part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_CLOCK_H_
#define CUDA_REMOTE_PROTO_BASE_CLOCK_H_

#include <time.h>

#include <chrono>
#include <cstdint>

namespace cuda_remote {

// A point in time of the clock that never goes back.
using Moment = std::chrono::steady_clock::time_point;

inline Moment Now() { return std::chrono::steady_clock::now(); }

// Seconds from `start` until now.
inline double SecondsSince(Moment start) { return std::chrono::duration<double>(Now() - start).count(); }

namespace clock_internal {
inline int64_t ReadNs(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}
}  // namespace clock_internal

// `Now` as nanoseconds and as whole milliseconds.
inline int64_t NowNs() { return clock_internal::ReadNs(CLOCK_MONOTONIC); }
inline int64_t NowMs() { return NowNs() / 1000000; }

// The processor's time that this thread has used, in nanoseconds.
inline int64_t ThreadTimeNs() { return clock_internal::ReadNs(CLOCK_THREAD_CPUTIME_ID); }

// The date.
inline std::chrono::system_clock::time_point WallNow() { return std::chrono::system_clock::now(); }

// The date as milliseconds since the beginning of 1970 (UTC).
inline int64_t UnixMs() { return clock_internal::ReadNs(CLOCK_REALTIME) / 1000000; }

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_CLOCK_H_
