// SPDX-License-Identifier: Apache-2.0
// What a program measures, for Prometheus: GET /metrics over HTTP, in Prometheus' text format, at an address of its
// own. It does not ask who the client is.
#ifndef CUDA_REMOTE_PROTO_METRICS_EXPORTER_H_
#define CUDA_REMOTE_PROTO_METRICS_EXPORTER_H_

#include <prometheus/metric_family.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace cuda_remote::metrics {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

// One without values yet. `name`: without "cuda_remote_", with which all begin.
MetricFamily Family(const std::string& name, const std::string& help, MetricType type);
// A value of a counter or a gauge.
void Add(double value, Labels labels, MetricFamily* family);
// A family with one value, without labels.
void AddOne(const std::string& name, const std::string& help, MetricType type, double value,
            std::vector<MetricFamily>* families);

class Exporter {
 public:
  // Answers at `address` (HOST:PORT, port 0: any free one) until the object ends, from a thread of its own, which calls
  // `collect` for each question. Clients that send or read nothing keep no other one waiting. Fails if it cannot listen
  // there.
  static absl::StatusOr<std::unique_ptr<Exporter>> Start(const std::string& address,
                                                         std::function<std::vector<MetricFamily>()> collect);
  ~Exporter();
  Exporter(const Exporter&) = delete;
  Exporter& operator=(const Exporter&) = delete;

  int port() const;

 private:
  class Server;
  explicit Exporter(std::unique_ptr<Server> server);
  const std::unique_ptr<Server> server_;
};

}  // namespace cuda_remote::metrics

#endif  // CUDA_REMOTE_PROTO_METRICS_EXPORTER_H_
