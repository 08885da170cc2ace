// SPDX-License-Identifier: Apache-2.0
#include "programs/tools/hosts_list.h"

#include <stdio.h>

#include <map>
#include <string>

#include "programs/tools/table_text.h"
#include "proto/base/text.h"
#include "proto/codec/json.h"
#include "proto/codec/text.h"

namespace cuda_remote::client::tools {
namespace {

// "2 x NVIDIA H100, 1 x NVIDIA L4"
std::string GpusText(const host::HostServer& server) {
  std::map<std::string, int> names;
  for (const host::HostGpu& gpu : server.gpus()) ++names[gpu.name()];
  std::string text;
  for (const auto& [name, count] : names) text += (text.empty() ? "" : ", ") + std::to_string(count) + " x " + name;
  return text;
}

// "NVIDIA driver 13.0, 2 x NVIDIA H100, 2 of 128 sessions"
std::string ServerText(const host::HostServer& server) {
  if (!server.error().empty()) return server.address() + ": " + server.error();
  std::string text = server.address() + ": " + (server.driver().empty() ? "no worker was ready yet" : server.driver());
  if (server.gpus_size() > 0) text += ", " + GpusText(server);
  text += ", " + std::to_string(server.sessions());
  if (server.most_sessions() > 0) text += " of " + std::to_string(server.most_sessions());
  return text + (server.sessions() == 1 && server.most_sessions() == 0 ? " session" : " sessions");
}

std::string UserText(const host::HostJob& job) {
  return job.user_name().empty() ? std::to_string(job.user()) : Printable(job.user_name());
}

}  // namespace

void PrintHosts(const host::HostReports& reports) {
  Table hosts({{"HOST", true}, {"STATE", true}, {"JOBS"}, {"FREE"}, {"GPU SERVERS", true}});
  int jobs = 0;
  for (const host::HostReport& host : reports.hosts()) {
    const std::string name = Printable(host.host());
    if (!host.error().empty()) {
      hosts.Add({name, "unknown", "-", "-", Printable(host.error())});
      continue;
    }
    jobs += host.jobs_size();
    const char* const state = host.draining().empty() ? "open" : "drained";
    for (int i = 0; i == 0 || i < host.servers_size(); ++i) {
      const std::string server = i < host.servers_size() ? Printable(ServerText(host.servers(i))) : "-";
      if (i > 0) {
        hosts.Add({"", "", "", "", server});
      } else {
        hosts.Add({name, state, std::to_string(host.jobs_size()), ByteText(double(host.free_bytes())), server});
      }
    }
  }
  fputs(hosts.Text().c_str(), stdout);
  for (const host::HostReport& host : reports.hosts()) {
    if (!host.draining().empty())
      printf("%s accepts no jobs: %s\n", Printable(host.host()).c_str(), Printable(host.draining()).c_str());
    if (host.error().empty() && host.engine_version().empty())
      printf("%s has no snapshot engine that works: jobs cannot be saved or restarted there\n",
             Printable(host.host()).c_str());
  }
  if (jobs == 0) return;
  Table table({{"HOST", true},
               {"JOB", true},
               {"USER", true},
               {"STATE", true},
               {"PID"},
               {"PROCESSES"},
               {"SAVED"},
               {"AGE"},
               {"PROGRAM", true}});
  for (const host::HostReport& host : reports.hosts()) {
    for (const host::HostJob& job : host.jobs()) {
      std::string program;
      for (const std::string& word : job.command()) program += (program.empty() ? "" : " ") + Printable(word);
      const char* const state = !job.running() ? "killed" : job.no_checkpoint().empty() ? "running" : "unsaved";
      table.Add({Printable(host.host()), Printable(job.name()), UserText(job), state, std::to_string(job.pid()),
                 std::to_string(job.processes()), Ago(job.saved_unix_ms()), Age(uint64_t(job.started_unix_ms())),
                 program});
    }
  }
  printf("\n%s", table.Text().c_str());
}

void PrintHostsAsJson(const host::HostReports& reports) {
  JsonWriter json(JsonWriter::kSpaced);
  json.BeginOutput();
  json.Line(2);
  json.Begin("hosts", '[');
  for (const host::HostReport& host : reports.hosts()) {
    json.Line(4);
    json.Begin('{');
    json.Member("host", host.host());
    if (!host.error().empty()) {
      json.Member("error", host.error());
      json.End('}');
      continue;
    }
    json.Member("product_version", host.version());
    json.MemberIf("kernel", host.kernel());
    json.MemberIf("engine_version", host.engine_version());
    json.Member("free_bytes", host.free_bytes());
    json.MemberIf("draining", host.draining());
    json.Begin("jobs", '[');
    for (const host::HostJob& job : host.jobs()) {
      json.Begin('{');
      json.Member("name", job.name());
      json.Member("user", uint64_t(job.user()));
      json.MemberIf("user_name", job.user_name());
      json.MemberIf("pid", job.pid());
      json.Member("processes", uint64_t(job.processes()));
      json.Member("running", job.running());
      json.Member("started_unix_ms", uint64_t(job.started_unix_ms()));
      json.MemberIf("saved_unix_ms", job.saved_unix_ms());
      json.MemberIf("server", job.server());
      json.MemberIf("no_checkpoint", job.no_checkpoint());
      json.Begin("command", '[');
      for (const std::string& word : job.command()) json.Value(word);
      json.End(']');
      json.End('}');
    }
    json.End(']');
    json.Begin("servers", '[');
    for (const host::HostServer& server : host.servers()) {
      json.Begin('{');
      json.Member("address", server.address());
      if (!server.error().empty()) {
        json.Member("error", server.error());
        json.End('}');
        continue;
      }
      json.MemberIf("driver", server.driver());
      json.Member("software_gpu", server.software_gpu());
      json.Member("sessions", uint64_t(server.sessions()));
      json.MemberIf("most_sessions", uint64_t(server.most_sessions()));
      json.Begin("gpus", '[');
      for (const host::HostGpu& gpu : server.gpus()) {
        json.Begin('{');
        json.Member("name", gpu.name());
        json.Member("uuid", gpu.uuid());
        json.Member("compute_capability",
                    std::to_string(gpu.compute_major()) + "." + std::to_string(gpu.compute_minor()));
        json.Member("total_memory_bytes", gpu.total_memory());
        json.End('}');
      }
      json.End(']');
      json.End('}');
    }
    json.End(']');
    json.End('}');
  }
  json.End(']');
  json.End('}');
  puts(json.text().c_str());
}

}  // namespace cuda_remote::client::tools
