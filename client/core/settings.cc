// SPDX-License-Identifier: Apache-2.0
#include "client/core/settings.h"

#include <stdlib.h>

#include "proto/base/environment.h"
#include "proto/driverabi/driver_settings.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::client {
namespace {

std::string Variable(const char* name) {
  const char* const value = TrustedVariable(name);
  return value ? value : "";
}

}  // namespace

Settings ReadSettings() {
  Settings settings;
  settings.server = Variable("CUDA_REMOTE_SERVER");
  settings.job = Variable("CUDA_REMOTE_JOB");
  settings.job_dir = Variable("CUDA_REMOTE_JOB_DIR");
  const std::string gpu = Variable("CUDA_REMOTE_GPU");
  if (!gpu.empty()) settings.gpu = atoi(gpu.c_str());
  // A process of a job whose environment was made anew.
  if (settings.server.empty()) FindThisJob(&settings.job_dir, &settings.job);
  // A job that was restarted or moved has another server than its environment says.
  std::string server;
  int only = -1;
  if (!settings.job_dir.empty() && ReadGpuServer(settings.job_dir, &server, &only)) {
    settings.server = server;
    if (only >= 0) settings.gpu = only;
  }
  const std::string sync = Variable("CUDA_REMOTE_SYNC");
  const driverabi::DriverSettings driver = driverabi::OwnDriverSettings();
  settings.driver_settings = driverabi::DriverSettingsText(driver);
  settings.sync = (!sync.empty() && sync != "0") || driverabi::LaunchesBlock(driver);
  settings.copy_threads = atoi(Variable("CUDA_REMOTE_COPY_THREADS").c_str());
  const std::string managed = Variable("CUDA_REMOTE_MANAGED");
  settings.managed_on_gpu = managed != "host";
  if (managed == "protect") settings.managed_accesses = PageFaults::Accesses::kProgram;
  const std::string mapped = Variable("CUDA_REMOTE_MAPPED");
  if (mapped == "track") settings.mapped_writers = ManagedMirror::Writers::kReported;
  if (mapped == "compare") settings.mapped_writers = ManagedMirror::Writers::kAnybody;
  settings.has_visible_devices = TrustedVariable("CUDA_VISIBLE_DEVICES") != nullptr;
  settings.visible_devices = Variable("CUDA_VISIBLE_DEVICES");
  return settings;
}

}  // namespace cuda_remote::client
