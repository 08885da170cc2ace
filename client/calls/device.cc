// SPDX-License-Identifier: Apache-2.0
// Start-up and device queries, answered from what the server told once about its devices.

#include <cuda.h>

#include <cstdlib>
#include <cstring>

#include "client/calls/bodies.gen.h"
#include "client/core/session.h"

namespace cuda_remote::client {
namespace {

// The session, if cuInit has been called; else the error that the call must return.
CUresult Initialized(Session** session) {
  *session = Session::Get();
  if (!*session || !(*session)->initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  return CUDA_SUCCESS;
}

CUresult FindDevice(CUdevice ordinal, const Device** device) {
  Session* session;
  if (const CUresult result = Initialized(&session); result != CUDA_SUCCESS) return result;
  if (ordinal < 0 || size_t(ordinal) >= session->devices().size()) return CUDA_ERROR_INVALID_DEVICE;
  *device = &session->devices()[ordinal];
  return CUDA_SUCCESS;
}

CUresult Uuid(CUuuid* uuid, CUdevice dev) {
  const Device* device;
  if (!uuid) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = FindDevice(dev, &device); result != CUDA_SUCCESS) return result;
  *uuid = device->uuid;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuInit(unsigned int Flags) {
  if (Flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Session* session;
  if (const CUresult result = Session::Connect(&session); result != CUDA_SUCCESS) return result;
  if (session->devices().empty()) return CUDA_ERROR_NO_DEVICE;
  session->set_initialized();
  return CUDA_SUCCESS;
}

// Works before cuInit, as natively; the version is the server's driver's, so the first question opens the session. It
// cannot fail for lack of a server: the runtime would say that the driver is too old for it. Without a session the
// answer is the version that this library was built for, and the calls that follow say what is wrong.
CUresult Custom_cuDriverGetVersion(int* driverVersion) {
  if (!driverVersion) return CUDA_ERROR_INVALID_VALUE;
  Session* session;
  const bool connected = Session::Connect(&session) == CUDA_SUCCESS;
  *driverVersion = connected ? session->driver_version() : CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceGetCount(int* count) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  Session* session;
  if (const CUresult result = Initialized(&session); result != CUDA_SUCCESS) return result;
  *count = int(session->devices().size());
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceGet(CUdevice* device, int ordinal) {
  const Device* found;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = FindDevice(ordinal, &found); result != CUDA_SUCCESS) return result;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceGetName(char* name, int len, CUdevice dev) {
  const Device* device;
  if (!name || len == 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = FindDevice(dev, &device); result != CUDA_SUCCESS) return result;
  const size_t count =
      std::min(device->name.size(), size_t(len) - 1);  // the driver, too, takes a negative length for a long one
  memcpy(name, device->name.data(), count);
  name[count] = 0;
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceGetUuid(CUuuid* uuid, CUdevice dev) { return Uuid(uuid, dev); }
CUresult Custom_cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev) { return Uuid(uuid, dev); }

CUresult Custom_cuDeviceGetLuid(char* luid, unsigned int* deviceNodeMask, CUdevice dev) {
  const Device* device;
  if (!luid || !deviceNodeMask) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = FindDevice(dev, &device); result != CUDA_SUCCESS) return result;
  if (!device->has_luid) return CUDA_ERROR_NOT_SUPPORTED;  // what the driver says on Linux
  memcpy(luid, device->luid.data(), device->luid.size());
  *deviceNodeMask = device->luid_node_mask;
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceTotalMem_v2(size_t* bytes, CUdevice dev) {
  const Device* device;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = FindDevice(dev, &device); result != CUDA_SUCCESS) return result;
  *bytes = device->total_memory;
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
  const Device* device;
  if (!pi) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = FindDevice(dev, &device); result != CUDA_SUCCESS) return result;
  if (int(attrib) <= 0 || size_t(attrib) >= device->attributes.size()) return CUDA_ERROR_INVALID_VALUE;
  if (device->attributes[attrib] == kRefused) return CUDA_ERROR_INVALID_VALUE;
  *pi = device->attributes[attrib];
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceComputeCapability(int* major, int* minor, CUdevice dev) {
  const Device* device;
  if (!major || !minor) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = FindDevice(dev, &device); result != CUDA_SUCCESS) return result;
  *major = device->Attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  *minor = device->Attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceGetProperties(CUdevprop* prop, CUdevice dev) {
  const Device* device;
  if (!prop) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = FindDevice(dev, &device); result != CUDA_SUCCESS) return result;
  *prop = CUdevprop{};
  prop->maxThreadsPerBlock = device->Attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  prop->maxThreadsDim[0] = device->Attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X);
  prop->maxThreadsDim[1] = device->Attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y);
  prop->maxThreadsDim[2] = device->Attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z);
  prop->maxGridSize[0] = device->Attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X);
  prop->maxGridSize[1] = device->Attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y);
  prop->maxGridSize[2] = device->Attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z);
  prop->sharedMemPerBlock = device->Attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  prop->totalConstantMemory = device->Attribute(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  prop->SIMDWidth = device->Attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  prop->memPitch = device->Attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  prop->regsPerBlock = device->Attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
  prop->clockRate = device->Attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  prop->textureAlign = device->Attribute(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceGetPCIBusId(char* pciBusId, int len, CUdevice dev) {
  const Device* device;
  if (!pciBusId || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = FindDevice(dev, &device); result != CUDA_SUCCESS) return result;
  if (size_t(len) <= device->pci_bus_id.size()) return CUDA_ERROR_INVALID_VALUE;
  memcpy(pciBusId, device->pci_bus_id.c_str(), device->pci_bus_id.size() + 1);
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceCanAccessPeer(int* canAccessPeer, CUdevice dev, CUdevice peerDev) {
  const Device* device;
  const Device* peer;
  if (!canAccessPeer) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = FindDevice(dev, &device); result != CUDA_SUCCESS) return result;
  if (const CUresult result = FindDevice(peerDev, &peer); result != CUDA_SUCCESS) return result;
  *canAccessPeer = size_t(peerDev) < device->peers.size() ? int(device->peers[peerDev]) : 0;
  return CUDA_SUCCESS;
}

// Takes [domain]:bus:device.function, domain and function optional, all hexadecimal.
CUresult Custom_cuDeviceGetByPCIBusId(CUdevice* dev, const char* pciBusId) {
  if (!dev || !pciBusId) return CUDA_ERROR_INVALID_VALUE;
  Session* session;
  if (const CUresult result = Initialized(&session); result != CUDA_SUCCESS) return result;
  unsigned domain = 0, bus = 0, slot = 0;
  if (sscanf(pciBusId, "%x:%x:%x", &domain, &bus, &slot) != 3) {
    domain = 0;
    if (sscanf(pciBusId, "%x:%x", &bus, &slot) != 2) return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < session->devices().size(); ++i) {
    const Device& device = session->devices()[i];
    if (unsigned(device.Attribute(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)) == domain &&
        unsigned(device.Attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)) == bus &&
        unsigned(device.Attribute(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)) == slot) {
      *dev = CUdevice(i);
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

}  // namespace cuda_remote::client
