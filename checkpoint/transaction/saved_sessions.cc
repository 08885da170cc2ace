// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/saved_sessions.h"

#include <stdlib.h>

#include <algorithm>
#include <sstream>

#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/gpu/modules.h"
#include "checkpoint/transaction/live_job.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::checkpoint {
namespace {

std::vector<const replay::Log*> Pointers(const std::vector<replay::Log>& logs) {
  std::vector<const replay::Log*> all;
  for (const replay::Log& log : logs) all.push_back(&log);
  return all;
}

}  // namespace

std::string NameOf(const ckptfmt::ProcessInfo& process) {
  return process.program + " (PID " + std::to_string(process.pid) + ")";
}

absl::Status GpuSessions::Plan(const SavedJob& saved) {
  saved_ = &saved;
  const ckptfmt::ImageInfo& info = saved.image->info();
  // What cr-checkpoint has written: "0,1,-1".
  std::vector<PlacedProcess> who;
  const auto found = info.client_info.find("ranks");
  std::istringstream ranks(found == info.client_info.end() ? "" : found->second);
  for (const ckptfmt::ProcessInfo& process : info.processes) {
    std::string rank;
    const bool known = std::getline(ranks, rank, ',') && !rank.empty();
    who.push_back({process.pid, known ? atoi(rank.c_str()) : -1, NameOf(process)});
  }
  // A server of the job's own has the one GPU only, unless processes are mapped to others.
  const bool only = places_.gpu >= 0 && (!places_.server.empty() || !places_.rules.empty());
  const Place otherwise = {places_.server, only ? std::vector<int>{places_.gpu} : std::vector<int>()};
  CR_ASSIGN_OR_RETURN(const std::vector<Place> places, PlaceProcesses(places_.rules, otherwise, who));
  for (size_t i = 0; i < places.size(); ++i) placed_.push_back({who[i].name, places[i], nullptr});
  channels_.resize(placed_.size());
  agents_.resize(placed_.size());
  return absl::OkStatus();
}

absl::Status GpuSessions::OpenHosts(const std::string& folder, const std::optional<Account>& account) {
  account_ = account;
  hosts_ = std::make_unique<GpuHosts>(GpuHostOptions{folder, /*detached=*/false, account, environment_});
  const int own = places_.rules.empty() ? places_.gpu : -1;
  const bool all_elsewhere =
      !placed_.empty() && places_.server.empty() &&
      std::none_of(placed_.begin(), placed_.end(), [](const Placed& one) { return one.place.server.empty(); });
  CR_ASSIGN_OR_RETURN(first_, hosts_->Open(all_elsewhere ? placed_.front().place.server : places_.server, own));
  for (Placed& one : placed_) {
    CR_ASSIGN_OR_RETURN(one.host, hosts_->Open(one.place.server, own));
  }
  return absl::OkStatus();
}

absl::Status GpuSessions::CheckPlaces() {
  if (places_.rules.empty()) return absl::OkStatus();
  std::vector<std::vector<ckptfmt::Region>> regions(placed_.size());
  for (const ckptfmt::Region& region : saved_->image->regions()) regions[region.process].push_back(region);
  const ActAs user(account_);  // who asks the servers
  CR_RETURN_IF_ERROR(CheckSharing(placed_, Pointers(saved_->logs)));
  return CheckRoom(placed_, regions);
}

absl::Status GpuSessions::Open(size_t process, const std::string& scope) {
  const ckptfmt::ProcessInfo& saved = Info(process);
  const Placed& placed = placed_[process];
  std::unique_ptr<ClientChannel> channel;
  {
    const ActAs user(account_);
    CR_ASSIGN_OR_RETURN(channel, OpenSession(placed.host->socket_path(), saved.pid, saved.program,
                                             saved_->image->info().job, placed.place.gpus, saved.driver_settings));
  }
  ckptfmt::ProcessInfo here;
  CR_RETURN_IF_ERROR(DescribeServer(channel.get(), &here));
  CR_RETURN_IF_ERROR(CheckDevices(saved_->logs[process], saved.devices, here.devices, ToText(placed.place)));
  for (size_t i = 0; i < saved.devices.size(); ++i) {
    if (here.devices[i].name == saved.devices[i].name) continue;
    report_.Say("GPU " + std::to_string(i) + " of " + NameOf(saved) + " was a " + saved.devices[i].name +
                "; here it is a " + here.devices[i].name);
  }
  CR_RETURN_IF_ERROR(ReplayLog(saved_->logs[process], channel.get(), scope));
  channels_[process] = std::move(channel);
  return absl::OkStatus();
}

absl::Status GpuSessions::LoadMemory(size_t process, const Continue& go_on) {
  return checkpoint::LoadMemory(*saved_->image, uint32_t(process), channels_[process].get(), go_on);
}

absl::Status GpuSessions::Give(size_t process, const std::string& directory, const std::function<bool()>& ended) {
  CR_ASSIGN_OR_RETURN(agents_[process], GiveChannel(directory, Info(process).pid, NameOf(Info(process)),
                                                    *channels_[process], placed_[process].host->server(), ended));
  return absl::OkStatus();
}

void GpuSessions::NoteSaved(size_t process, uint64_t unix_ms, uint64_t bytes) {
  const ActAs user(account_);
  TellSaved(placed_[process].host->server(), channels_[process]->welcome().session, unix_ms, bytes);
}

void GpuSessions::Unlock() {
  for (const auto& agent : agents_) {
    if (agent) agent->Unlock().IgnoreError();  // one that does not answer goes on when its connection ends
  }
  agents_.clear();
}

void GpuSessions::LetGo() {
  agents_.clear();
  channels_.clear();
}

}  // namespace cuda_remote::checkpoint
