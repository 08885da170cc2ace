// SPDX-License-Identifier: Apache-2.0
// cr-ps --hosts: what there is at this host and at others. There is no tool.
#include <sstream>

#include "checkpoint/job/account.h"
#include "host/group.h"
#include "host/report.h"
#include "host/requests/host_request.h"
#include "host/wire.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::host {
namespace {

constexpr size_t kMostHosts = 512;

// "HOST,HOST:PORT"
std::vector<std::string> SplitHosts(const std::string& list) {
  std::vector<std::string> hosts;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    if (!name.empty()) hosts.push_back(name);
  }
  return hosts;
}

class HostsReport : public HostRequest {
 public:
  using HostRequest::HostRequest;

  absl::Status Begin() override { return absl::OkStatus(); }
  bool Serve() override;
};

bool HostsReport::Serve() {
  std::vector<std::string> hosts;
  for (const Option& option : request_.options()) {
    if (option.name() == "hosts" && !option.flag()) hosts = SplitHosts(option.value());
  }
  const bool named = !hosts.empty();
  if (!named) hosts = settings_.known_hosts;
  Reply reply;
  reply.set_kind(Reply::HOSTS);
  // Operators see what root sees.
  const uid_t user = IsOperator(settings_.operators, peer_.account) ? 0 : peer_.account.user;
  const auto ask = [&]() -> absl::Status {
    if (hosts.size() > kMostHosts) {
      return absl::InvalidArgumentError(std::to_string(hosts.size()) + " hosts are more than the " +
                                        std::to_string(kMostHosts) + " that can be asked at the same time");
    }
    if (!hosts.empty() && settings_.tls.empty()) {
      return absl::FailedPreconditionError(
          "this cr-hostd asks no other hosts: it has no certificate (cr-hostd --tls-cert)");
    }
    checkpoint::Account account;
    if (user != 0) {
      CR_ASSIGN_OR_RETURN(account, checkpoint::FindAccount(std::to_string(user)));
    }
    MovedUser moved;
    moved.set_id(user);
    moved.set_name(account.name);
    moved.set_group(peer_.account.group);
    for (const gid_t group : peer_.account.groups) moved.add_groups(group);
    // This host is one of them, if nobody has said which.
    if (!named) *reply.mutable_hosts()->add_hosts() = DescribeHost(settings_, user);
    reply.mutable_hosts()->MergeFrom(AskHosts(hosts, settings_.tls, moved));
    return absl::OkStatus();
  };
  const absl::Status asked = ask();
  if (asked.ok()) Send(socket_, reply);
  if (!asked.ok()) Tell(Reply::REFUSED, 0, std::string(asked.message()));
  return true;
}

}  // namespace

std::unique_ptr<HostRequest> NewHosts(Asked asked) { return std::make_unique<HostsReport>(std::move(asked)); }

}  // namespace cuda_remote::host
