// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/control_messages.h"

#include "proto/frame/frame.h"

namespace cuda_remote::server {
namespace {

// What each entry of a list takes besides itself.
constexpr size_t kEntryHead = 8;
// A server with more users shows an operator as many; the rest are counted in the list of sessions.
constexpr size_t kMostUsages = 100;

void ToMessage(const SessionInfo& info, control::SessionInfo* out) {
  out->set_id(info.id);
  out->set_pid(info.hello.pid);
  out->set_program(info.hello.program);
  out->set_job(info.hello.job);
  out->set_transport(info.transport);
  out->set_peer(info.peer);
  out->set_worker_pid(uint32_t(info.worker_pid));
  out->set_gpu(info.gpu);
  out->set_driver(info.driver);
  out->set_seconds(info.seconds);
  out->set_device_bytes(info.stats.device_bytes);
  out->set_calls(info.stats.calls);
  out->set_bytes_in(info.stats.bytes_in);
  out->set_bytes_out(info.stats.bytes_out);
  out->set_calls_per_second(info.calls_per_second);
  out->set_bytes_per_second(info.bytes_per_second);
  out->set_replaying(info.hello.replaying);
  out->set_saved_unix_ms(info.saved_unix_ms);
  out->set_saved_bytes(info.saved_bytes);
  out->set_owner(info.owner);
  for (const int gpu : info.gpus) out->add_gpus(gpu);
}

}  // namespace

void ToMessage(const ServerFacts& facts, control::ServerInfo* out) {
  out->set_name(facts.name);
  out->set_pid(uint32_t(facts.pid));
  out->set_wire_version(kWireVersion);
  out->set_warm_workers(uint32_t(facts.warm_workers));
  out->set_sessions(uint32_t(facts.sessions));
  out->set_sessions_ever(facts.sessions_ever);
  out->set_seconds(facts.seconds);
  out->set_driver(facts.driver);
  out->set_software_gpu(facts.software);
  out->set_worker_error(facts.worker_error);
  const Policy& policy = facts.policy;
  control::Limits* const limits = out->mutable_limits();
  limits->set_sessions(uint32_t(policy.max_sessions));
  limits->set_session_memory(policy.memory_limit);
  limits->set_session_gpus(uint32_t(policy.session_gpus));
  limits->set_user_sessions(uint32_t(policy.user_sessions));
  limits->set_user_memory(policy.user_memory_limit);
  limits->set_user_gpus(uint32_t(policy.user_gpus));
  for (const Usage& usage : facts.usage) {
    if (out->usage_size() >= int(kMostUsages)) break;
    control::Usage* const one = out->add_usage();
    one->set_identity(usage.identity);
    one->set_limited(usage.limited);
    one->set_sessions(uint32_t(usage.sessions));
    one->set_device_bytes(usage.device_bytes);
    for (const int gpu : usage.gpus) one->add_gpus(gpu);
  }
}

void AddSessions(const std::vector<SessionInfo>& sessions, uint64_t after, size_t most_bytes,
                 control::ListSessionsReply* out) {
  size_t bytes = 0;
  for (const SessionInfo& info : sessions) {
    if (info.id <= after) continue;
    control::SessionInfo one;
    ToMessage(info, &one);
    bytes += one.ByteSizeLong() + kEntryHead;
    if (bytes > most_bytes && out->sessions_size() > 0) {
      out->set_more(true);
      break;
    }
    *out->add_sessions() = std::move(one);
  }
}

}  // namespace cuda_remote::server
