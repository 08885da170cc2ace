// SPDX-License-Identifier: Apache-2.0
// What the client library remembers of the objects behind virtual handles.
#ifndef CUDA_REMOTE_CLIENT_CORE_OBJECTS_H_
#define CUDA_REMOTE_CLIENT_CORE_OBJECTS_H_

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace cuda_remote::client {

// In the place of an attribute that the driver does not answer (INT32_MIN on the wire).
inline constexpr int32_t kRefused = INT32_MIN;

// One parameter of a kernel in its parameter block.
struct KernelParam {
  uint32_t offset;
  uint32_t bytes;
};

// What the server told about a CUfunction or CUkernel. Immutable once made, but for the attributes that the application
// sets, which change under RecordedObjects::mutex().
struct FunctionInfo {
  std::string name;
  std::vector<KernelParam> params;
  uint32_t params_bytes = 0;        // size of the parameter block
  std::vector<int32_t> attributes;  // by CUfunction_attribute; kRefused where the driver refuses it
  int device = 0;                   // of a kernel, which has attributes on each: whose these are
  // A launch of it was waited for and succeeded.
  mutable std::atomic<bool> accepted{false};
};

// What cuKernelSetAttribute has set, which a kernel's functions take over, and the same as bytes: as long as these are
// equal, so is all that depends on it. Libraries set values anew before every launch, and back.
struct KernelSettings {
  std::map<uint64_t, int> values;  // by device and attribute
  std::string text;
};

// A function or kernel that was asked for by name, so that asking again gives the same handle, as natively.
using NamedChildren = std::map<std::string, uint64_t>;

// The client's part of an object. Only the members that fit its kind are set.
struct Object {
  uint64_t parent = 0;  // virtual handle that it dies with, 0 if none

  // Context.
  int device = 0;
  unsigned flags = 0;
  bool primary = false;

  // Changed by RecordedObjects::SetActiveLocked only. False: the application may not use the handle now, but it stays
  // taken. A primary context that nobody retains (its handle is the same for ever, as natively), or a destroyed graph
  // with live executables.
  bool active = true;
  uint64_t id = 0;   // cuCtxGetId
  int attached = 0;  // cuCtxAttach calls that no cuCtxDetach has taken back

  // Context made from a green context: that one. Green context: the context made from it, 0 if none was.
  uint64_t green = 0;

  // Function, kernel.
  std::shared_ptr<FunctionInfo> info;
  // Under other settings, by their text; of a kernel on another device, by OnDevice of the settings' text.
  std::unique_ptr<std::map<std::string, std::shared_ptr<FunctionInfo>>> other_infos;
  std::unique_ptr<KernelSettings> settings;  // kernel
  uint64_t owner = 0;                        // module or library, or the kernel that a function came from

  // Library's module, kernel's function: the context that it is for. (Others die with their context.)
  uint64_t context = 0;

  // Physical memory: mappings of it, and whether the application has released its handle.
  int mappings = 0;
  bool released = false;
  int retained = 0;  // by cuMemRetainAllocationHandle, besides the handle of cuMemCreate

  // Event that other processes may record too: whether it is done is never known here. Set under
  // RecordedObjects::mutex().
  bool between_processes = false;

  // Event, stream, context (for its default stream): the stamp (completion.h) at which all was known to be done, and at
  // which it was waited for. Set under the shared lock.
  static constexpr uint64_t kNoStamp = ~uint64_t(0);
  std::atomic<uint64_t> done_at{kNoStamp};
  std::atomic<uint64_t> synchronized_at{kNoStamp};

  // Module, library: functions and kernels by name. Kernel: functions by context. Array, mipmapped array: planes and
  // levels by number.
  std::unique_ptr<NamedChildren> children;
};

// One GPU of the session, asked for once.
struct Device {
  std::string name;
  CUuuid uuid{};
  std::array<char, 8> luid{};
  unsigned luid_node_mask = 0;
  bool has_luid = false;
  uint64_t total_memory = 0;
  std::string pci_bus_id;
  std::vector<int32_t> attributes;  // by CUdevice_attribute; kRefused where the driver refuses it
  std::vector<uint32_t> peers;      // cuDeviceCanAccessPeer by the other device

  // Value of an attribute that every driver has; 0 if it is missing.
  int Attribute(CUdevice_attribute attribute) const {
    return size_t(attribute) < attributes.size() && attributes[attribute] != kRefused ? attributes[attribute] : 0;
  }
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_OBJECTS_H_
