// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/metrics.h"

#include <string.h>
#include <unistd.h>

#include <map>
#include <utility>
#include <vector>

#include "proto/channel/handshake.h"
#include "proto/frame/version.h"
#include "proto/nvml/query.h"

namespace cuda_remote::server {
namespace {

using metrics::Add;
using metrics::AddOne;
using metrics::ClientMetric;
using metrics::Family;
using metrics::Labels;
using metrics::MetricFamily;
using metrics::MetricType;

// cr-nvml may have to load the driver first; Prometheus waits 10 s.
constexpr int kGpuAnswerMs = 3000;

// nvmlUtilization_t and nvmlMemory_t.
struct Utilization {
  uint32_t gpu, memory;
};
struct MemoryInfo {
  uint64_t total, free, used;
};

class Collector {
 public:
  explicit Collector(Supervisor* supervisor) : supervisor_(supervisor) {}

  std::vector<MetricFamily> Collect() const {
    const MeasuredFacts facts = supervisor_->Measure();
    std::vector<MetricFamily> families;
    AddServer(facts, &families);
    AddSessions(facts, &families);
    AddGpus(facts, &families);
    return families;
  }

 private:
  static void AddServer(const MeasuredFacts& facts, std::vector<MetricFamily>* families) {
    const Totals& totals = facts.totals;
    families->push_back(Family("build_info", "The version of cuda-remote, as a label.", MetricType::Gauge));
    Add(1, {{"version", kVersion}}, &families->back());
    AddOne("uptime_seconds", "How long cr-server has run.", MetricType::Gauge, facts.server.seconds, families);
    AddOne("sessions", "Sessions now, those that wait for a worker included.", MetricType::Gauge, facts.server.sessions,
           families);
    AddOne("sessions_waiting", "Sessions that wait for a worker.", MetricType::Gauge, facts.waiting, families);
    AddOne("sessions_opened_total", "Sessions that were admitted.", MetricType::Counter,
           double(facts.server.sessions_ever), families);
    AddOne("sessions_refused_total", "Sessions that were refused, for a limit or another reason.", MetricType::Counter,
           double(totals.refused), families);
    AddOne("sessions_failed_total", "Sessions that ended by a fault of the worker's or of the server's.",
           MetricType::Counter, double(totals.failed), families);
    AddOne("workers_ready", "Workers that wait for a session.", MetricType::Gauge, facts.server.warm_workers, families);
    AddOne("worker_start_failures_total", "Workers that could not start.", MetricType::Counter,
           double(totals.start_failures), families);
    AddOne("calls_total", "Calls of all sessions.", MetricType::Counter, double(totals.calls), families);
    AddOne("received_bytes_total", "Bytes of payload from clients.", MetricType::Counter, double(totals.bytes_in),
           families);
    AddOne("sent_bytes_total", "Bytes of payload to clients.", MetricType::Counter, double(totals.bytes_out), families);
    AddOne("checkpoints_total", "Checkpoints that tools have reported as complete.", MetricType::Counter,
           double(totals.checkpoints), families);
    AddOne("checkpoint_bytes_total", "Sizes of these images together.", MetricType::Counter,
           double(totals.checkpoint_bytes), families);
    families->push_back(
        Family("session_wait_seconds", "How long sessions waited for a worker.", MetricType::Histogram));
    ClientMetric metric;
    for (size_t i = 0; i < Totals::kWaitBounds.size(); ++i) {
      metric.histogram.bucket.push_back({totals.waits_below[i], Totals::kWaitBounds[i]});
    }
    metric.histogram.sample_count = totals.waits;
    metric.histogram.sample_sum = totals.wait_seconds;
    families->back().metric.push_back(std::move(metric));
  }

  static void AddSessions(const MeasuredFacts& facts, std::vector<MetricFamily>* families) {
    MetricFamily memory = Family("session_device_memory_bytes", "GPU memory of a session.", MetricType::Gauge);
    MetricFamily calls = Family("session_calls_total", "Calls of a session.", MetricType::Counter);
    MetricFamily in =
        Family("session_received_bytes_total", "Bytes of payload from a session's client.", MetricType::Counter);
    MetricFamily out =
        Family("session_sent_bytes_total", "Bytes of payload to a session's client.", MetricType::Counter);
    MetricFamily age = Family("session_age_seconds", "How long a session has lasted.", MetricType::Gauge);
    MetricFamily saved = Family("session_saved_timestamp_seconds",
                                "When the session's job was last saved, in seconds since 1970.", MetricType::Gauge);
    for (const SessionInfo& info : facts.sessions) {
      const Labels labels = {{"session", std::to_string(info.id)}, {"job", info.hello.job}, {"owner", info.owner}};
      Add(double(info.stats.device_bytes), labels, &memory);
      Add(double(info.stats.calls), labels, &calls);
      Add(double(info.stats.bytes_in), labels, &in);
      Add(double(info.stats.bytes_out), labels, &out);
      Add(info.seconds, labels, &age);
      if (info.saved_unix_ms != 0) Add(double(info.saved_unix_ms) / 1000, labels, &saved);
    }
    for (MetricFamily* family : {&memory, &calls, &in, &out, &age, &saved}) {
      if (!family->metric.empty()) families->push_back(std::move(*family));
    }
  }

  void AddGpus(const MeasuredFacts& facts, std::vector<MetricFamily>* families) const {
    MetricFamily busy =
        Family("gpu_busy_ratio", "Part of the time in which a kernel ran, as NVML measures it.", MetricType::Gauge);
    MetricFamily used = Family("gpu_memory_used_bytes", "Memory of a GPU in use, by anybody.", MetricType::Gauge);
    MetricFamily total = Family("gpu_memory_bytes", "Memory of a GPU.", MetricType::Gauge);
    // Prometheus does not wait long. If NVML hangs, it gets the other metrics, and the rest of the GPUs are not asked.
    bool silent = false;
    for (int gpu = 0; gpu < facts.gpus && !silent; ++gpu) {
      const Labels labels = {{"gpu", std::to_string(gpu)}};
      Utilization utilization;
      MemoryInfo memory;
      if (Ask("nvmlDeviceGetUtilizationRates", gpu, &utilization, sizeof(utilization), &silent))
        Add(utilization.gpu / 100.0, labels, &busy);
      if (!silent && Ask("nvmlDeviceGetMemoryInfo", gpu, &memory, sizeof(memory), &silent)) {
        Add(double(memory.used), labels, &used);
        Add(double(memory.total), labels, &total);
      }
    }
    for (MetricFamily* family : {&busy, &used, &total}) {
      if (!family->metric.empty()) families->push_back(std::move(*family));
    }
  }

  // What NVML says of a GPU; false if it says nothing, as of the software GPU's use. *silent is set if no answer came
  // in time.
  bool Ask(const char* call, int gpu, void* out, size_t bytes, bool* silent) const {
    int sockets[2];
    if (!SocketPair(sockets)) return false;
    nvml::Question question;
    question.pid = uint32_t(getpid());
    question.call = call;
    question.device = uint32_t(gpu);
    std::string body;
    EncodeQuestion(question, &body);
    Caller own;
    own.identity = UserIdentity(geteuid());
    own.is_operator = true;
    supervisor_->SubmitQuestion(sockets[0], body, own);
    Packet packet;
    nvml::Answer answer;
    const ChannelStatus status = ReceivePacket(sockets[1], &packet, kGpuAnswerMs);
    *silent = status == ChannelStatus::kTimeout;
    const bool answered = status == ChannelStatus::kOk && packet.type == PacketType::kAnswer &&
                          DecodeAnswer(packet.body, &answer) && answer.result == nvml::kSuccess &&
                          answer.output.size() == bytes;
    close(sockets[1]);
    if (answered) memcpy(out, answer.output.data(), bytes);
    return answered;
  }

  Supervisor* const supervisor_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<metrics::Exporter>> ServeMetrics(const std::string& address, Supervisor* supervisor) {
  return metrics::Exporter::Start(address, [supervisor] { return Collector(supervisor).Collect(); });
}

}  // namespace cuda_remote::server
