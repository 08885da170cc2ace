// SPDX-License-Identifier: Apache-2.0
// cr-server --metrics: what the server does, for Prometheus, over HTTP.
//
// Whoever can connect to its address can read the names of jobs, programs' owners and amounts, and nothing else.
// docs/metrics.md lists the names. Thread-safe.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_METRICS_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_METRICS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/metrics/exporter.h"
#include "server/supervisor/supervisor.h"

namespace cuda_remote::server {

// Answers at `address` (HOST:PORT, port 0: any free one) until the result ends. Fails if it cannot listen there.
absl::StatusOr<std::unique_ptr<metrics::Exporter>> ServeMetrics(const std::string& address, Supervisor* supervisor);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_METRICS_H_
