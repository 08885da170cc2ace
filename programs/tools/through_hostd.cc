// SPDX-License-Identifier: Apache-2.0
#include "programs/tools/through_hostd.h"

#include <unistd.h>

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/job.h"
#include "programs/tools/foreground.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;

std::string JobOfHostd(const std::string& job) {
  if (geteuid() == 0) return {};
  const absl::StatusOr<FoundJob> found = FindJob(job);
  if (!found.ok()) return {};
  const std::string& directory = found->directory;
  const std::string jobs = UserJobsFolder(HostdSocket(), geteuid()) + "/";
  return directory.compare(0, jobs.size(), jobs) == 0 ? directory.substr(jobs.size()) : std::string();
}

bool NameOfHostdFolder(const std::string& folder, std::string* name) {
  const std::string jobs = UserJobsFolder(HostdSocket(), geteuid()) + "/";
  *name = folder.compare(0, jobs.size(), jobs) == 0 ? folder.substr(jobs.size()) : folder;
  return !name->empty() && name->find('/') == std::string::npos;
}

int ThroughHostd(const char* tool, host::Request request, int failed) {
  const auto hostd = host::Hostd::Connect();
  if (hostd.ok() && *hostd) return (*hostd)->Run(tool, std::move(request), failed);
  Say(tool, hostd.ok() ? "the job was started through cr-hostd, which does not run here now (" + HostdSocket() + ")"
                       : std::string(hostd.status().message()));
  return failed;
}

}  // namespace cuda_remote::client::tools
