// SPDX-License-Identifier: Apache-2.0
// The driver that this worker serves, and what it said about its GPUs.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_LOADED_DRIVER_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_LOADED_DRIVER_H_

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// In the place of an attribute that the driver refuses.
inline constexpr int32_t kRefusedAttribute = INT32_MIN;

struct DeviceFacts {
  std::string name;
  std::string uuid;  // 16 bytes
  std::string luid;  // 8 bytes or empty
  uint32_t luid_node_mask = 0;
  uint64_t total_memory = 0;
  std::string pci_bus_id;
  std::vector<int32_t> attributes;
  std::vector<uint32_t> peers;
  uint32_t primary_flags = 0;
  bool primary_active = false;
};

struct LoadedDriver {
  DriverTable table = {};
  std::string path;
  bool software = false;
  int version = 0;
  std::vector<DeviceFacts> devices;

  std::string Describe() const;
};

// Loads the library at `path`; if that is empty, the machine's own driver if it has a usable GPU, else the software
// GPU. Calls cuInit and collects the facts. Fails if there is nothing to serve: kNotFound if a driver was loaded all
// the same, and only shows no GPU.
absl::StatusOr<LoadedDriver> ChooseDriver(const std::string& path);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_LOADED_DRIVER_H_
