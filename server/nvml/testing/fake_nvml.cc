// SPDX-License-Identifier: Apache-2.0
// A stand-in for NVIDIA's libnvidia-ml.so.1 with two GPUs whose order is not CUDA's, for answerer_test. It writes past
// nothing, checks what it is given, and has no function that its test does not expect.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/nvml/types.h"

using namespace cuda_remote::nvml;  // NOLINT: a test library

namespace {

struct Device {
  const char* bus;
  const char* name;
  const char* uuid;
  uint32_t power;
} g_devices[2] = {
    {"0000:20:00.0", "Fake GPU B", "GPU-bbbbbbbb-0000-0000-0000-000000000000", 222},
    {"0000:10:00.0", "Fake GPU A", "GPU-aaaaaaaa-0000-0000-0000-000000000000", 111},
};
int g_initialized = 0;

bool Valid(const Device* device) { return g_initialized > 0 && (device == g_devices || device == g_devices + 1); }

}  // namespace

extern "C" {

int nvmlInit_v2() {
  ++g_initialized;
  return getenv("FAKE_NVML_BROKEN") ? kDriverNotLoaded : kSuccess;
}
int nvmlSystemGetNVMLVersion(char* version, uint32_t length) {
  return snprintf(version, length, "13.580.1") < int(length) ? kSuccess : kInsufficientSize;
}
int nvmlSystemGetDriverVersion(char* version, uint32_t length) {
  return snprintf(version, length, "580.1") < int(length) ? kSuccess : kInsufficientSize;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, Device** device) {
  for (Device& candidate : g_devices) {
    if (strcmp(bus, candidate.bus) != 0) continue;
    *device = &candidate;
    return kSuccess;
  }
  return kNotFound;
}
int nvmlDeviceGetName(Device* device, char* name, uint32_t length) {
  if (!Valid(device)) return kInvalidArgument;
  return snprintf(name, length, "%s", device->name) < int(length) ? kSuccess : kInsufficientSize;
}
int nvmlDeviceGetPowerUsage(Device* device, uint32_t* power) {
  if (!Valid(device)) return kInvalidArgument;
  *power = device->power;
  return kSuccess;
}
int nvmlDeviceGetTotalEnergyConsumption(Device* device, uint64_t* energy) {
  if (!Valid(device)) return kInvalidArgument;
  *energy = uint64_t{1} << 40;
  return kSuccess;
}
int nvmlDeviceValidateInforom(Device* device) {
  if (!Valid(device)) return kInvalidArgument;
  return device == g_devices ? kCorruptedInforom : kSuccess;
}
int nvmlDeviceGetFanSpeed(Device*, uint32_t*) { return kNotSupported; }
int nvmlDeviceGetRemappedRows(Device* device, uint32_t* a, uint32_t* b, uint32_t* c, uint32_t* d) {
  if (!Valid(device)) return kInvalidArgument;
  *a = 1, *b = 2, *c = 3, *d = 4;
  return kSuccess;
}
int nvmlDeviceGetMinMaxClockOfPState(Device* device, uint32_t type, uint32_t state, uint32_t* min, uint32_t* max) {
  if (!Valid(device)) return kInvalidArgument;
  *min = type * 100;
  *max = state * 100;
  return kSuccess;
}
int nvmlDeviceGetGpuFabricInfoV(Device* device, FabricInfoV3* info) {
  if (!Valid(device)) return kInvalidArgument;
  info->status = kSuccess;
  info->clique = 7;
  info->state = 3;
  info->health_mask = 0x1234;
  if (info->version == VersionWord(sizeof(FabricInfoV3), 3)) info->health_summary = 1;
  return kSuccess;
}
int nvmlDeviceGetFieldValues(Device* device, int count, FieldValue* values) {
  if (!Valid(device)) return kInvalidArgument;
  for (int i = 0; i < count; ++i) {
    values[i].result = values[i].field == 999 ? kNotSupported : kSuccess;
    values[i].value = values[i].field * 10 + values[i].scope;
  }
  return kSuccess;
}
int nvmlDeviceGetP2PStatus(Device* a, Device* b, uint32_t index, uint32_t* status) {
  if (!Valid(a) || !Valid(b)) return kInvalidArgument;
  *status = a == b ? 100 : index;
  return kSuccess;
}
int nvmlDeviceGetCpuAffinity(Device* device, uint32_t words, uint64_t* set) {
  if (!Valid(device)) return kInvalidArgument;
  for (uint32_t i = 0; i < words; ++i) set[i] = i + 1;
  return kSuccess;
}
// Only the second version, as drivers before CUDA 12 have it.
int nvmlDeviceGetComputeRunningProcesses_v2(Device* device, uint32_t* count, ProcessInfo* infos) {
  if (!Valid(device) || *count < 2) return kInvalidArgument;
  infos[0] = {5001, 1000, 0xffffffff, 0xffffffff};
  infos[1] = {9999, 2000, 0xffffffff, 0xffffffff};
  *count = device == g_devices + 1 ? 2 : 0;
  return kSuccess;
}

}  // extern "C"
