// SPDX-License-Identifier: Apache-2.0
// cuInit, devices, errors, entry points by name, private tables.
#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>

#include "proto/api/entry_points.gen.h"
#include "proto/driverabi/error_names.h"
#include "proto/driverabi/export_tables.h"
#include "softgpu/api/api.h"
#include "softgpu/core/array.h"
#include "softgpu/core/module.h"

using namespace cuda_remote;
using namespace cuda_remote::softgpu;

extern "C" {
// The names that no header declares, by address only.
#define DECLARE(symbol) CUresult CUDAAPI symbol();
CUDA_REMOTE_UNDOCUMENTED_ENTRY_POINTS(DECLARE)
#undef DECLARE
#define DECLARE(symbol, type, parameters, arguments) type CUDAAPI symbol parameters;
CUDA_REMOTE_ENTRY_POINTS(DECLARE)
#undef DECLARE
}

namespace {

#define ENTRY(name, since, per_thread, symbol) {name, since, per_thread != 0, reinterpret_cast<void*>(&symbol)},
const ProcEntry kProcTable[] = {CUDA_REMOTE_PROC_ADDRESSES(ENTRY)};
#undef ENTRY
constexpr size_t kProcEntries = sizeof kProcTable / sizeof *kProcTable;

// What an H100 keeps for every stream; cuBLASLt and cuFFT do not start without it.
CUresult StreamValue(CUcontext, CUstream, uint64_t* value) {
  *value = 7;
  return CUDA_SUCCESS;
}

// All pairs of multiprocessors in one cluster: any of them may work together.
CUresult PairLayout(std::vector<uint8_t>* clusters, std::vector<uint8_t>* numbers) {
  for (int pair = 0; pair < kMultiprocessors / 2; ++pair) {
    clusters->push_back(0);
    numbers->push_back(uint8_t(pair));
  }
  return CUDA_SUCCESS;
}

void SetUpExportTables() {
  static constexpr driverabi::RealTables kTables = {&StreamValue, &PairLayout};
  driverabi::Host host = {};
  host.real = &kTables;
  host.driver_version = &cuDriverGetVersion;
  host.device_count = &cuDeviceGetCount;
  host.device_uuid = [](CUdevice device, CUuuid* uuid) { return cuDeviceGetUuid_v2(uuid, device); };
  host.device_attribute = &DeviceAttribute;
  host.primary_context = [](CUcontext* context, CUdevice ordinal) {
    Device* device = GetDevice(ordinal);
    if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    *context = device->primary()->handle();
    return CUDA_SUCCESS;
  };
  host.current_context = []() -> CUcontext {
    ContextPtr context = CurrentContext();
    return context ? context->handle() : nullptr;
  };
  host.module_functions = &ModuleFunctions;
  host.log = [](const char* line) { Log(line); };
  driverabi::SetHost(host);
}

}  // namespace

SOFTGPU_API cuInit(unsigned int flags) {
  if (CUresult injected = InjectedFailure(__func__); injected != CUDA_SUCCESS) return injected;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (DeviceCount() == 0) return DeviceNamedTwice() ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_NO_DEVICE;
  static const bool once = [] {
    SetUpExportTables();
    SetInitialized();
    return true;
  }();
  (void)once;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGet(CUdevice* device, int ordinal) {
  SOFTGPU_ENTER();
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetCount(int* count) {
  SOFTGPU_ENTER();
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = DeviceCount();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetName(char* name, int len, CUdevice ordinal) {
  SOFTGPU_ENTER();
  if (name == nullptr || len == 0) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, len < 0 ? INT_MAX : len, "cuda-remote software GPU");
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) {
  SOFTGPU_ENTER();
  Device* device = GetDevice(ordinal);
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *uuid = device->uuid();
  return CUDA_SUCCESS;
}
SOFTGPU_API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice ordinal) { return cuDeviceGetUuid(uuid, ordinal); }

SOFTGPU_API cuDeviceTotalMem_v2(size_t* bytes, CUdevice ordinal) {
  SOFTGPU_ENTER();
  Device* device = GetDevice(ordinal);
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = device->total();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  SOFTGPU_ENTER();
  return DeviceAttribute(value, attribute, device);
}

SOFTGPU_API cuDeviceComputeCapability(int* major, int* minor, CUdevice ordinal) {
  SOFTGPU_ENTER();
  if (major == nullptr || minor == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *major = ComputeMajor();
  *minor = ComputeMinor();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetProperties(CUdevprop* prop, CUdevice ordinal) {
  SOFTGPU_ENTER();
  if (prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *prop = {1024, {1024, 1024, 64}, {2147483647, 65535, 65535},  kSharedPerBlock, 65536,
           32,   2147483647,       kRegistersPerMultiprocessor, 1000000,         512};
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetPCIBusId(char* text, int len, CUdevice ordinal) {
  SOFTGPU_ENTER();
  if (text == nullptr || len < 13) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(text, len, "%04X:%02X:%02X.0", 0, 0x50 + GetDevice(ordinal)->number(), 0);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetByPCIBusId(CUdevice* device, const char* text) {
  SOFTGPU_ENTER();
  if (device == nullptr || text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  unsigned domain = 0, bus = 0, slot = 0;
  if (std::sscanf(text, "%x:%x:%x", &domain, &bus, &slot) < 3) {
    domain = 0;
    if (std::sscanf(text, "%x:%x", &bus, &slot) < 2) return CUDA_ERROR_INVALID_VALUE;
  }
  for (int i = 0; domain == 0 && slot == 0 && i < DeviceCount(); ++i) {
    if (bus != 0x50u + static_cast<unsigned>(GetDevice(i)->number())) continue;
    *device = i;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

SOFTGPU_API cuDeviceGetLuid(char*, unsigned int*, CUdevice) {
  SOFTGPU_ENTER();
  return CUDA_ERROR_NOT_SUPPORTED;  // as everywhere but on Windows
}

SOFTGPU_API cuDeviceCanAccessPeer(int* can, CUdevice from, CUdevice to) {
  SOFTGPU_ENTER();
  if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(from) == nullptr || GetDevice(to) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *can = from != to;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to) {
  SOFTGPU_ENTER();
  if (value == nullptr || from == to) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(from) == nullptr || GetDevice(to) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED ||
           attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetTexture1DLinearMaxWidth(size_t* width, CUarray_format format, unsigned channels,
                                               CUdevice ordinal) {
  SOFTGPU_ENTER();
  ptx::Channel channel;
  if (width == nullptr || !ChannelOf(format, &channel)) return CUDA_ERROR_INVALID_VALUE;
  if (channels != 1 && channels != 2 && channels != 4) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *width = 1 << 27;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetExecAffinitySupport(int* value, CUexecAffinityType, CUdevice ordinal) {
  SOFTGPU_ENTER();
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *value = 0;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope) {
  SOFTGPU_ENTER_CONTEXT(context);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuProfilerStart() {
  SOFTGPU_ENTER_CONTEXT(context);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuProfilerStop() {
  SOFTGPU_ENTER_CONTEXT(context);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGetErrorName(CUresult error, const char** name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *name = driverabi::ErrorName(error);
  return *name != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SOFTGPU_API cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *text = driverabi::ErrorString(error);
  return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SOFTGPU_API cuGetProcAddress_v2(const char* symbol, void** address, int version, cuuint64_t flags,
                                CUdriverProcAddressQueryResult* status) {
  return FindProc(kProcTable, kProcEntries, symbol, version, flags, kDriverVersion, address, status);
}

SOFTGPU_API cuGetProcAddress(const char* symbol, void** address, int version, cuuint64_t flags) {
  return FindProcFirstVersion(kProcTable, kProcEntries, symbol, version, flags, kDriverVersion, address);
}

SOFTGPU_API cuGetExportTable(const void** table, const CUuuid* id) {
  // The runtime asks before cuInit.
  static const bool once = (SetUpExportTables(), true);
  (void)once;
  return driverabi::GetExportTable(table, id);
}
