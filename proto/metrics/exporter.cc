// SPDX-License-Identifier: Apache-2.0
#include "proto/metrics/exporter.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>

#include <exception>
#include <utility>

namespace cuda_remote::metrics {
namespace {

constexpr size_t kThreads = 2;

class Collector final : public prometheus::Collectable {
 public:
  explicit Collector(std::function<std::vector<MetricFamily>()> collect) : collect_(std::move(collect)) {}
  std::vector<MetricFamily> Collect() const override { return collect_(); }

 private:
  const std::function<std::vector<MetricFamily>()> collect_;
};

}  // namespace

MetricFamily Family(const std::string& name, const std::string& help, MetricType type) {
  MetricFamily family;
  family.name = "cuda_remote_" + name;
  family.help = help;
  family.type = type;
  return family;
}

void Add(double value, Labels labels, MetricFamily* family) {
  ClientMetric metric;
  metric.label = std::move(labels);
  (family->type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  family->metric.push_back(std::move(metric));
}

void AddOne(const std::string& name, const std::string& help, MetricType type, double value,
            std::vector<MetricFamily>* families) {
  families->push_back(Family(name, help, type));
  Add(value, {}, &families->back());
}

struct Exporter::Parts {
  std::shared_ptr<Collector> collector;
  std::unique_ptr<prometheus::Exposer> exposer;  // ends first
};

Exporter::Exporter(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Exporter::~Exporter() = default;

absl::StatusOr<std::unique_ptr<Exporter>> Exporter::Start(const std::string& address,
                                                          std::function<std::vector<MetricFamily>()> collect) {
  auto parts = std::make_unique<Parts>();
  parts->collector = std::make_shared<Collector>(std::move(collect));
  try {
    parts->exposer = std::make_unique<prometheus::Exposer>(address, kThreads);
    parts->exposer->RegisterCollectable(parts->collector);
  } catch (const std::exception&) {
    return absl::InvalidArgumentError(
        "cannot listen at " + address +
        " (--metrics): this is not an address of this machine (such as 127.0.0.1:9400), or another program listens "
        "there");
  }
  return std::unique_ptr<Exporter>(new Exporter(std::move(parts)));
}

int Exporter::port() const {
  const std::vector<int> ports = parts_->exposer->GetListeningPorts();
  return ports.empty() ? 0 : ports[0];
}

}  // namespace cuda_remote::metrics
