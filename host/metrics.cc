// SPDX-License-Identifier: Apache-2.0
#include "host/metrics.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <vector>

#include "absl/status/status.h"
#include "host/report.h"
#include "host/worker.h"
#include "proto/frame/version.h"

namespace cuda_remote::host {
namespace {

using metrics::Add;
using metrics::AddOne;
using metrics::Family;
using metrics::MetricFamily;
using metrics::MetricType;

void AddHost(const HostReport& report, std::vector<MetricFamily>* families) {
  const auto running =
      std::count_if(report.jobs().begin(), report.jobs().end(), [](const HostJob& job) { return job.running(); });
  AddOne("host_jobs", "Jobs of users that run on this host through cr-hostd.", MetricType::Gauge, double(running),
         families);
  AddOne("host_free_bytes", "Room for images on their way (cr-hostd --state).", MetricType::Gauge,
         double(report.free_bytes()), families);
  AddOne("host_draining", "1 if the host accepts no jobs at present (cr-drain), else 0.", MetricType::Gauge,
         report.draining().empty() ? 0 : 1, families);
  MetricFamily up =
      Family("host_gpu_server_up", "1 if this GPU server of the host's answers, else 0.", MetricType::Gauge);
  MetricFamily sessions =
      Family("host_gpu_server_sessions", "Sessions of a GPU server of the host's.", MetricType::Gauge);
  MetricFamily gpus = Family("host_gpu_server_gpus", "GPUs of a GPU server of the host's.", MetricType::Gauge);
  for (const HostServer& server : report.servers()) {
    const metrics::Labels labels = {{"server", server.address()}};
    Add(server.error().empty() ? 1 : 0, labels, &up);
    if (!server.error().empty()) continue;
    Add(server.sessions(), labels, &sessions);
    if (server.gpus_size() > 0) Add(server.gpus_size(), labels, &gpus);
  }
  for (MetricFamily* family : {&up, &sessions, &gpus}) {
    if (!family->metric.empty()) families->push_back(std::move(*family));
  }
}

void AddCounters(const Counters& counters, std::vector<MetricFamily>* families) {
  MetricFamily requests =
      Family("host_requests_total", "Requests of users and of other hosts that have ended.", MetricType::Counter);
  MetricFamily failures =
      Family("host_request_failures_total", "Requests that were refused or have failed.", MetricType::Counter);
  for (size_t i = 0; i < Counters::kCount; ++i) {
    Add(double(counters.requests[i]), {{"tool", Counters::kTools[i]}}, &requests);
    Add(double(counters.failures[i]), {{"tool", Counters::kTools[i]}}, &failures);
  }
  families->push_back(std::move(requests));
  families->push_back(std::move(failures));
  MetricFamily bytes = Family("host_moved_bytes_total",
                              "Bytes of jobs that have gone to other hosts: sent while they ran, and in the pause.",
                              MetricType::Counter);
  Add(double(counters.bytes_before), {{"when", "running"}}, &bytes);
  Add(double(counters.bytes_in_pause), {{"when", "paused"}}, &bytes);
  families->push_back(std::move(bytes));
  AddOne("host_paused_seconds_total", "How long these jobs stood still.", MetricType::Counter,
         double(counters.paused_us) / 1e6, families);
}

}  // namespace

Counters* Counters::Make() {
  void* const memory = mmap(nullptr, sizeof(Counters), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return new (memory) Counters();
}

void Counters::CountRequest(const std::string& tool, bool failed) {
  const auto found = std::find(std::begin(kTools), std::end(kTools), tool);
  const size_t i = found == std::end(kTools) ? kCount - 1 : size_t(found - std::begin(kTools));
  ++requests[i];
  if (failed) ++failures[i];
}

absl::StatusOr<std::unique_ptr<metrics::Exporter>> ServeMetrics(const Settings& settings) {
  const auto collect = [&settings] {
    std::vector<MetricFamily> families = {
        Family("host_build_info", "The version of cuda-remote, as a label.", MetricType::Gauge)};
    Add(1, {{"version", ::cuda_remote::kVersion}}, &families.back());
    AddHost(DescribeHost(settings, 0), &families);
    AddCounters(*settings.counters, &families);
    return families;
  };
  return metrics::Exporter::Start(settings.metrics, collect);
}

}  // namespace cuda_remote::host
