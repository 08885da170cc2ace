// SPDX-License-Identifier: Apache-2.0
// What there is at this host and at others (report.proto).
//
// Thread-safe; no state.
#ifndef CUDA_REMOTE_HOST_REPORT_H_
#define CUDA_REMOTE_HOST_REPORT_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "host/move.pb.h"
#include "host/report.pb.h"
#include "host/worker.h"

namespace cuda_remote::host {

// This host, with the jobs of `user`; of all users if that is 0. Asks the GPU servers, which takes seconds if one
// hangs.
HostReport DescribeHost(const Settings& settings, uid_t user);

// Asks the cr-hostds of `hosts` (HOST or HOST:PORT), all at the same time, for the jobs of `user`, whom this host
// vouches for. A report for each, in their order, also for those that do not answer.
HostReports AskHosts(const std::vector<std::string>& hosts, const control::TlsFiles& tls, const MovedUser& user);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_REPORT_H_
