// SPDX-License-Identifier: Apache-2.0
// A job's own network address (cr-run --address), which it has on every machine that it runs on.
//
// Such a job runs in a network namespace of its own, with a loopback interface and an interface "eth0". If the
// interface of the machine is a bridge, eth0 is one end of a veth pair whose other end is in the bridge; otherwise it
// is a macvlan on that interface. The hardware address follows from the address, so neighbours find the job without
// asking again.
//
// While the job is saved, and until a restored job may run, eth0 is silent: it neither receives nor sends. It keeps its
// address and its routes, so sockets can be bound and connected. What is lost meanwhile the kernel sends again (TCP).
//
// The address is one of IPv4 or of IPv6. No state; NetworkNamespace is not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_NETWORK_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_NETWORK_H_

#include <sys/types.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/job.pb.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

// The name of the interface in the job's network.
inline constexpr char kJobInterface[] = "eth0";

// "ADDRESS[/PREFIX][@INTERFACE]". Without PREFIX, the network's prefix() is 0 until CheckNetwork.
absl::StatusOr<JobNetwork> ParseNetwork(const std::string& text);

// As ParseNetwork reads it.
std::string ToText(const JobNetwork& network);

// Whether this machine has what the address needs: the interface, and the rights. Fills in a missing prefix. `allowed`:
// null, or the networks, "ADDRESS/PREFIX[@INTERFACE]", in one of which the address must be.
absl::Status CheckNetwork(JobNetwork* network, const std::vector<std::string>* allowed);

// Whether `rule` is "ADDRESS/PREFIX[@INTERFACE]", where ADDRESS is a network's.
absl::Status CheckNetworkRule(const std::string& rule);

// Whether a rule allows the address on this interface of the machine.
bool RuleAllows(const std::string& rule, const std::string& address, const std::string& interface);

// The hardware address that goes with an address.
std::array<unsigned char, 6> HardwareAddress(const std::string& address);

class NetworkNamespace {
 public:
  // Makes a namespace whose eth0 is silent. It ends with this object, and with the last process in it. `ask`: fails if
  // another machine answers for the address. `network` as CheckNetwork leaves it.
  static absl::StatusOr<std::unique_ptr<NetworkNamespace>> Make(const JobNetwork& network, bool ask);
  NetworkNamespace(const NetworkNamespace&) = delete;
  NetworkNamespace& operator=(const NetworkNamespace&) = delete;

  // Closed on an execution.
  int fd() const { return fd_.get(); }
  // Ends the silence, and tells the neighbours where the address is.
  absl::Status Connect();
  // Before what runs there is ended although its connections are to go on elsewhere.
  void Silence();
  // When all processes in it have ended. The kernel keeps connections whose other end does not answer, and with them
  // the namespace, for minutes: nobody may answer for the address in that time. `flush`: first waits a few seconds at
  // most, until others have what the job has sent.
  void Leave(bool flush);

 private:
  NetworkNamespace(int fd, std::string address) : fd_(fd), address_(std::move(address)) {}
  const UniqueFd fd_;
  const std::string address_;
};

// The same for a running job, found by its init process: silent; and connected again.
absl::Status SilenceNetwork(pid_t init);
absl::Status ConnectNetwork(pid_t init, const JobNetwork& network);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_NETWORK_H_
