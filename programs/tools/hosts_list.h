// SPDX-License-Identifier: Apache-2.0
// What cr-ps --hosts prints.
#ifndef CUDA_REMOTE_PROGRAMS_TOOLS_HOSTS_LIST_H_
#define CUDA_REMOTE_PROGRAMS_TOOLS_HOSTS_LIST_H_

#include "host/report.pb.h"

namespace cuda_remote::client::tools {

// For people: the hosts, and then the jobs of all of them.
void PrintHosts(const host::HostReports& reports);

// One JSON object with the member "hosts".
void PrintHostsAsJson(const host::HostReports& reports);

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_PROGRAMS_TOOLS_HOSTS_LIST_H_
