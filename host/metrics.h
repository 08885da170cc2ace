// SPDX-License-Identifier: Apache-2.0
// cr-hostd --metrics: what cr-hostd does, for Prometheus (proto/metrics/exporter.h).
//
// Workers are processes of their own, which count in memory that all of them share. Thread-safe.
#ifndef CUDA_REMOTE_HOST_METRICS_H_
#define CUDA_REMOTE_HOST_METRICS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/metrics/exporter.h"

namespace cuda_remote::host {

struct Settings;

// Since cr-hostd has started.
struct Counters {
  // In memory that is shared with all processes that this one forks, and never given back. Throws std::bad_alloc.
  static Counters* Make();

  // `tool`: as in Request::tool; others are counted together.
  void CountRequest(const std::string& tool, bool failed);

  // The tools of a request, and one for what cr-hostd has not understood.
  static constexpr const char* kTools[] = {"run",    "checkpoint", "restart", "migrate", "move",  "group", "regroup",
                                           "arrive", "member",     "rejoin",  "gpus",    "hosts", "drain", "other"};
  static constexpr size_t kCount = sizeof(kTools) / sizeof(kTools[0]);
  std::atomic<uint64_t> requests[kCount], failures[kCount];
  // Of jobs that have gone to another host: sent while they ran, and in the pause; and the pauses.
  std::atomic<uint64_t> bytes_before, bytes_in_pause, paused_us;
};

// Answers at Settings::metrics. Fails if it cannot listen there. `settings` outlives it.
absl::StatusOr<std::unique_ptr<metrics::Exporter>> ServeMetrics(const Settings& settings);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_METRICS_H_
