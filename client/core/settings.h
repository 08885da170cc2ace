// SPDX-License-Identifier: Apache-2.0
// What the environment tells the client library. Read once, at the first driver call that needs a session.
//
// docs/settings.md lists the same variables for users.
#ifndef CUDA_REMOTE_CLIENT_CORE_SETTINGS_H_
#define CUDA_REMOTE_CLIENT_CORE_SETTINGS_H_

#include <cstdint>
#include <string>

#include "client/memory/managed_mirror.h"
#include "client/memory/page_faults.h"

namespace cuda_remote::client {

struct Settings {
  // CUDA_REMOTE_SERVER: "unix:PATH" (the socket of a cr-server or cr-relay on this machine, or its folder) or
  // "host:port" (the library starts a cr-relay). Empty: no server, cuInit fails and says so.
  std::string server;
  // CUDA_REMOTE_GPU: ordinal of the only GPU that the session may see, -1 for all.
  int gpu = -1;
  // CUDA_VISIBLE_DEVICES, about the server's GPUs; whether it is set at all.
  bool has_visible_devices = false;
  std::string visible_devices;
  // What the program's environment says to the driver (proto/driverabi/driver_settings.h).
  std::string driver_settings;
  // CUDA_REMOTE_SYNC=1, or CUDA_LAUNCH_BLOCKING=1: every call waits for its reply, so each error comes from the call
  // that caused it.
  bool sync = false;
  // CUDA_REMOTE_COPY_THREADS: threads for a large copy of pageable memory, 0: by the number of processors.
  int copy_threads = 0;
  // CUDA_REMOTE_MANAGED=host: managed memory stays in host memory, which kernels reach over the bus.
  bool managed_on_gpu = true;
  // `protect`: it is on the GPU also where only the program's own accesses to it can be watched, because the program
  // passes none of it to system calls.
  PageFaults::Accesses managed_accesses = PageFaults::Accesses::kAll;
  // CUDA_REMOTE_MAPPED: how the host's changes to mirrored pinned and registered memory are found. `track`: no transfer
  // into it is in progress while the program makes driver calls; the other two: see ManagedMirror::Writers.
  ManagedMirror::Writers mapped_writers = ManagedMirror::Writers::kTransfers;
  // CUDA_REMOTE_JOB: the job's name, as cr-ps shows it.
  std::string job;
  // CUDA_REMOTE_JOB_DIR: where the agent's socket goes. Empty: no agent, the job cannot be checkpointed.
  std::string job_dir;
};

Settings ReadSettings();

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_SETTINGS_H_
