// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/loaded_driver.h"

#include <unistd.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"
#include "proto/driverabi/error_names.h"
#include "proto/logging/log.h"

namespace cuda_remote::server {
namespace {

constexpr char kSoftware[] = "libsoftgpu.so";

// Loads one library and counts its devices, whose facts are not known yet. kNotFound: the library itself is all right,
// it just shows no GPU.
absl::StatusOr<LoadedDriver> Try(const std::string& path) {
  LoadedDriver driver;
  CR_ASSIGN_OR_RETURN(driver.table, LoadDriver(path));
  CUresult result = driver.table.cuInit(0);
  if (result != CUDA_SUCCESS) {
    const auto code =
        result == CUDA_ERROR_NO_DEVICE ? absl::StatusCode::kNotFound : absl::StatusCode::kFailedPrecondition;
    return absl::Status(code, path + ": cuInit fails with " + driverabi::DescribeError(result));
  }
  int devices = 0;
  result = driver.table.cuDeviceGetCount(&devices);
  if (result != CUDA_SUCCESS || devices <= 0)
    return absl::NotFoundError(path + ": no GPU: " + driverabi::DescribeError(result));
  driver.path = path;
  driver.devices.resize(size_t(devices));
  return driver;
}

// The machine's own, else the software GPU.
absl::StatusOr<LoadedDriver> TryAll() {
  absl::StatusOr<LoadedDriver> own = Try("libcuda.so.1");
  if (own.ok()) return own;
  absl::Status last = own.status();
  for (const std::string& place : {OwnFolder(), OwnFolder() + "../lib/", OwnFolder() + "../../softgpu/"}) {
    const std::string candidate = place + kSoftware;
    if (access(candidate.c_str(), R_OK) != 0) continue;
    absl::StatusOr<LoadedDriver> software = Try(candidate);
    if (software.ok()) {
      logging::Info("no usable GPU ({}): this worker computes with the software GPU",
                    std::string(own.status().message()));
      return software;
    }
    last = software.status();
    break;
  }
  const auto code = absl::IsNotFound(own.status()) ? own.status().code() : last.code();
  return absl::Status(code, absl::StrCat("no usable GPU (", own.status().message(),
                                         ") and no software GPU beside the worker (", last.message(), ")"));
}

void Look(const DriverTable& table, int device, int count, DeviceFacts* facts) {
  char text[256] = {};
  if (table.cuDeviceGetName(text, sizeof text, device) == CUDA_SUCCESS) facts->name = text;
  CUuuid uuid = {};
  if (table.cuDeviceGetUuid_v2(&uuid, device) == CUDA_SUCCESS) facts->uuid.assign(uuid.bytes, sizeof uuid.bytes);
  char luid[8] = {};
  if (table.cuDeviceGetLuid(luid, &facts->luid_node_mask, device) == CUDA_SUCCESS)
    facts->luid.assign(luid, sizeof luid);
  size_t bytes = 0;
  if (table.cuDeviceTotalMem_v2(&bytes, device) == CUDA_SUCCESS) facts->total_memory = bytes;
  char bus[32] = {};
  if (table.cuDeviceGetPCIBusId(bus, sizeof bus, device) == CUDA_SUCCESS) facts->pci_bus_id = bus;
  facts->attributes.assign(CU_DEVICE_ATTRIBUTE_MAX, kRefusedAttribute);
  for (int i = 1; i < CU_DEVICE_ATTRIBUTE_MAX; ++i) {
    int value = 0;
    if (table.cuDeviceGetAttribute(&value, CUdevice_attribute(i), device) == CUDA_SUCCESS) facts->attributes[i] = value;
  }
  // What this system does not offer, though the GPU could: memory that the host and the GPU both touch at will, and
  // memory handed to other processes.
  for (const CUdevice_attribute without :
       {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
        CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
        CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED}) {
    if (facts->attributes[without] != kRefusedAttribute) facts->attributes[without] = 0;
  }
  if (facts->attributes[CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES] != kRefusedAttribute) {
    facts->attributes[CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES] &= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  }
  for (int peer = 0; peer < count; ++peer) {
    int can = 0;
    if (peer != device) table.cuDeviceCanAccessPeer(&can, device, peer);
    facts->peers.push_back(uint32_t(can));
  }
  int active = 0;
  table.cuDevicePrimaryCtxGetState(device, &facts->primary_flags, &active);
  facts->primary_active = active != 0;
}

}  // namespace

std::string LoadedDriver::Describe() const {
  return (software ? "software GPU, " : "driver ") + std::to_string(version / 1000) + "." +
         std::to_string(version % 1000 / 10) + ", " + path;
}

absl::StatusOr<LoadedDriver> ChooseDriver(const std::string& path) {
  CR_ASSIGN_OR_RETURN(LoadedDriver driver, path.empty() ? TryAll() : Try(path));
  driver.software = driver.path.find(kSoftware) != std::string::npos;
  driver.table.cuDriverGetVersion(&driver.version);
  const int count = int(driver.devices.size());
  for (int i = 0; i < count; ++i) Look(driver.table, i, count, &driver.devices[i]);
  return driver;
}

}  // namespace cuda_remote::server
