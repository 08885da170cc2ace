// SPDX-License-Identifier: Apache-2.0
#include "client/core/devices.h"

#include <cstring>
#include <utility>

#include "proto/codec/operations.gen.h"

namespace cuda_remote::client {

std::vector<Device> ReadDevices(const wire::OpSessionInfo_Reply& info, int most) {
  std::vector<Device> devices;
  for (const auto& from : info.devices) {
    if (most >= 0 && devices.size() == size_t(most)) break;
    Device device;
    device.name = std::string(from.name);
    if (from.uuid.size() == sizeof(device.uuid)) memcpy(&device.uuid, from.uuid.data(), sizeof(device.uuid));
    if (from.luid.size() == device.luid.size()) {
      memcpy(device.luid.data(), from.luid.data(), device.luid.size());
      device.has_luid = true;
    }
    device.luid_node_mask = from.luid_node_mask;
    device.total_memory = from.total_memory;
    device.pci_bus_id = std::string(from.pci_bus_id);
    device.attributes.assign(from.attributes.begin(), from.attributes.end());
    // What the GPU could do with the memory of the process that drives it, which is not the application.
    for (const CUdevice_attribute local :
         {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
          CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST}) {
      if (size_t(local) < device.attributes.size() && device.attributes[local] != kRefused)
        device.attributes[local] = 0;
    }
    device.peers.assign(from.peers.begin(), from.peers.end());
    // Ways of sharing that end at the server's machine, and host memory that only the server's process has: programs
    // ask first, and then take another one.
    for (const CUdevice_attribute none :
         {CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED, CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED}) {
      if (size_t(none) < device.attributes.size()) device.attributes[none] = 0;
    }
    devices.push_back(std::move(device));
  }
  return devices;
}

}  // namespace cuda_remote::client
