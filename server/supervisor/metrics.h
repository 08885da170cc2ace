// SPDX-License-Identifier: Apache-2.0
// cr-server --metrics: what the server does, for Prometheus, over HTTP.
//
// GET /metrics, in Prometheus' text format, at an address of its own. Whoever can connect to it can read the names of
// jobs, programs' owners and amounts, and nothing else. docs/metrics.md lists the names. Thread-safe.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_METRICS_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_METRICS_H_

#include <memory>
#include <string>

#include "server/supervisor/supervisor.h"

namespace cuda_remote::server {

class Metrics {
 public:
  // Answers at `address` (HOST:PORT, port 0: any free one) until the object ends, from threads of its own. Null and one
  // sentence in *error if it cannot listen there.
  static std::unique_ptr<Metrics> Start(const std::string& address, Supervisor* supervisor, std::string* error);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  int port() const;

 private:
  struct Parts;
  explicit Metrics(std::unique_ptr<Parts> parts);
  const std::unique_ptr<Parts> parts_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_METRICS_H_
