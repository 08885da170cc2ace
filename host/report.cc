// SPDX-License-Identifier: Apache-2.0
#include "host/report.h"

#include <grpcpp/grpcpp.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "checkpoint/engine/engines.h"
#include "checkpoint/gpu/ask_server.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/job.h"
#include "host/move.grpc.pb.h"
#include "host/move_source.h"
#include "host/wire.h"
#include "proto/base/clock.h"
#include "proto/codec/text.h"
#include "proto/control/server_control.h"
#include "proto/control/status_text.h"
#include "proto/folder/private_folder.h"
#include "proto/frame/version.h"
#include "proto/nvml/query.h"

namespace cuda_remote::host {
namespace {

constexpr auto kDeadline = std::chrono::seconds(10);

void AddJob(const std::string& directory, const checkpoint::Job& job, HostReport* report) {
  HostJob* const one = report->add_jobs();
  one->set_name(job.name().empty() ? directory.substr(directory.rfind('/') + 1) : job.name());
  one->set_user(job.has_user() ? job.user().id() : 0);
  one->set_user_name(job.has_user() ? job.user().name() : "root");
  one->set_pid(job.pid());
  one->set_running(checkpoint::JobIsAlive(job));
  if (one->running()) one->set_processes(uint32_t(checkpoint::StartedProcessesOf(job).size()));
  one->set_started_unix_ms(job.started_unix_ms());
  one->set_saved_unix_ms(job.saved_unix_ms());
  const std::string moved = checkpoint::GpuServerOf(directory);
  if (!job.server().empty()) one->set_server(moved.empty() ? job.server() : moved);
  for (const std::string& word : job.command()) one->add_command(word);
  one->set_no_checkpoint(job.no_checkpoint());
}

// What the server says of itself or of a GPU; empty: nothing.
std::string AskServer(const std::string& address, const char* call, int gpu) {
  nvml::Question question;
  question.call = call;
  question.device = uint32_t(gpu);
  nvml::Answer answer;
  return checkpoint::AskServer(address, question, &answer) ? answer.output : std::string();
}

void AddGpus(const std::string& address, HostServer* server) {
  uint32_t count = 0;
  const std::string said = AskServer(address, nvml::kCount, 0);
  if (said.size() == sizeof(count)) memcpy(&count, said.data(), sizeof(count));
  for (int i = 0; i < int(std::min(count, nvml::kMaxGpus)); ++i) {
    HostGpu* const gpu = server->add_gpus();
    gpu->set_name(AskServer(address, "nvmlDeviceGetName", i));
    gpu->set_uuid(AskServer(address, "nvmlDeviceGetUUID", i));
    const std::string capability = AskServer(address, "nvmlDeviceGetCudaComputeCapability", i);
    int32_t numbers[2] = {};
    if (capability.size() == sizeof(numbers)) memcpy(numbers, capability.data(), sizeof(numbers));
    gpu->set_compute_major(numbers[0]);
    gpu->set_compute_minor(numbers[1]);
    const std::string memory = AskServer(address, "nvmlDeviceGetMemoryInfo", i);
    nvml::Memory bytes = {};
    if (memory.size() == sizeof(bytes)) memcpy(&bytes, memory.data(), sizeof(bytes));
    gpu->set_total_memory(bytes.total);
  }
}

void AddServer(const std::string& address, HostReport* report) {
  HostServer* const one = report->add_servers();
  one->set_address(address);
  const auto server = control::ServerControl::Open(address, {});
  const auto info = server.ok() ? (*server)->Info() : server.status();
  if (!info.ok()) {
    one->set_error(std::string(info.status().message()));
    return;
  }
  one->set_driver(info->driver());
  one->set_software_gpu(info->software_gpu());
  one->set_sessions(info->sessions());
  one->set_most_sessions(info->limits().sessions());
  AddGpus(address, one);
}

}  // namespace

HostReport DescribeHost(const Settings& settings, uid_t user) {
  HostReport report;
  utsname system = {};
  uname(&system);
  report.set_host(system.nodename);
  report.set_version(::cuda_remote::kVersion);
  report.set_kernel(system.release);
  report.set_engine_version(checkpoint::NewEngine()->Version());
  struct statvfs room;
  if (statvfs(settings.spool.c_str(), &room) == 0) report.set_free_bytes(uint64_t(room.f_bavail) * room.f_frsize);
  report.set_draining(checkpoint::DrainingReason(settings.socket));
  for (const checkpoint::FoundJob& found : checkpoint::JobsOfHostd(settings.socket, user))
    AddJob(found.directory, found.job, &report);
  if (user == 0) {
    for (const checkpoint::FoundJob& found : checkpoint::AllJobs()) AddJob(found.directory, found.job, &report);
  }
  for (const std::string& address : settings.gpu_servers) AddServer(address, &report);
  const std::string own = RuntimeFolders().front() + "/session.sock";
  if (settings.gpu_servers.empty() && access(own.c_str(), F_OK) == 0) AddServer("unix:" + own, &report);
  return report;
}

HostReports AskHosts(const std::vector<std::string>& hosts, const control::TlsFiles& tls, const MovedUser& user) {
  struct Question {
    std::unique_ptr<Hosts::Stub> stub;
    grpc::ClientContext context;
    grpc::Status status;
    HostReport answer;
    std::unique_ptr<grpc::ClientAsyncResponseReader<HostReport>> reader;
    std::string error;
  };
  DescribeRequest request;
  request.set_version(kVersion);
  *request.mutable_user() = user;
  // Without a thread for each: a user chooses how many there are.
  grpc::CompletionQueue queue;
  std::vector<Question> questions(hosts.size());
  const auto credentials = control::ClientTls(tls);
  for (size_t i = 0; i < hosts.size(); ++i) {
    Question& one = questions[i];
    if (!credentials.ok()) {
      one.error = std::string(credentials.status().message());
      continue;
    }
    one.stub = Hosts::NewStub(HostsChannel(hosts[i], *credentials));
    one.context.set_deadline(WallNow() + kDeadline);
    one.reader = one.stub->AsyncDescribe(&one.context, request, &queue);
    one.reader->Finish(&one.answer, &one.status, &one);
  }
  void* answered = nullptr;
  bool ok = false;
  queue.Shutdown();  // there are no more questions
  while (queue.Next(&answered, &ok)) {
    Question& one = *static_cast<Question*>(answered);
    const bool refused = one.status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
                         one.status.error_code() == grpc::StatusCode::FAILED_PRECONDITION;
    if (one.status.error_code() == grpc::StatusCode::UNIMPLEMENTED)
      one.error = "its cr-hostd is older and does not support this request; install the same version on both hosts";
    else if (!one.status.ok())
      one.error = (refused ? "" : "its cr-hostd does not answer: ") + control::StatusText(one.status);
  }
  HostReports reports;
  for (size_t i = 0; i < hosts.size(); ++i) {
    HostReport* const report = reports.add_hosts();
    if (questions[i].error.empty()) *report = std::move(questions[i].answer);
    report->set_host(hosts[i]);
    report->set_error(Printable(questions[i].error));
  }
  return reports;
}

}  // namespace cuda_remote::host
