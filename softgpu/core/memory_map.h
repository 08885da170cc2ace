// SPDX-License-Identifier: Apache-2.0
// What is mapped where: every byte that kernels and copies may touch.
//
// A device address is a host address of this process. The map knows each allocation, pinned host range, module variable
// and mapped piece of virtual memory. Kernels ask it through ptx::MemoryMap.
//
// Host memory that is taken out while kernels run is given back to the system when no launch that could have seen it is
// left: a kernel that uses freed memory is wrong, but must not take the process with it.
//
// Thread-safe.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_MEMORY_MAP_H_
#define CUDA_REMOTE_SOFTGPU_CORE_MEMORY_MAP_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/core/context.h"
#include "softgpu/core/memory_file.h"
#include "softgpu/ptx/ptx.h"

namespace cuda_remote::softgpu {

enum class MemoryKind {
  kDevice,      // cuMemAlloc
  kPool,        // cuMemAllocAsync
  kManaged,     // cuMemAllocManaged
  kPinned,      // cuMemHostAlloc
  kRegistered,  // cuMemHostRegister
  kSymbol,      // a variable of a module
  kMapped,      // cuMemMap
  kImported,    // cuIpcOpenMemHandle
};

struct Allocation {
  uint64_t begin = 0;
  uint64_t size = 0;
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;
  const Context* context = nullptr;
  unsigned flags = 0;
  uint64_t id = 0;        // CU_POINTER_ATTRIBUTE_BUFFER_ID
  uint64_t block_id = 0;  // CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID of mapped memory; elsewhere it is `id`
  bool readable = true;   // mapped memory: after cuMemSetAccess
  bool kernel_writable = true;
  uint64_t reached_by = ~uint64_t{0};  // mapped memory: the devices that have access, a bit for each
  uint64_t budget = 0;                 // bytes of the device's budget
  CUmemoryPool pool = nullptr;
  bool sync_memops = false;
  bool of_graph = false;          // an allocation node's: freed by the rules of graph.h
  bool of_variable = false;       // a managed variable's
  bool freed = false;             // in a stream that has not got there yet: no call knows it any more
  std::function<void()> release;  // gives the host memory back
  FileRange file;  // where it lies, for kDevice; no descriptor: nowhere that other processes can be shown

  uint64_t end() const { return begin + size; }
  bool host() const { return kind == MemoryKind::kPinned || kind == MemoryKind::kRegistered; }
  // Whether it is a module's variable in another context than this one, which the driver does not know in this one.
  bool IsVariableOfOther(const Context* current) const {
    return kind == MemoryKind::kSymbol && !of_variable && context != nullptr && context != current;
  }
  // Whether the application has mapped it itself, and for this device.
  bool mapped_for(int of_device) const {
    return kind == MemoryKind::kMapped && readable && (reached_by >> of_device & 1) != 0;
  }
};
using AllocationPtr = std::shared_ptr<Allocation>;

class MemoryMap : public ptx::MemoryMap {
 public:
  static MemoryMap& Get();

  // False if it overlaps with something that is there.
  bool Add(AllocationPtr allocation);
  // Takes out the allocation that begins at `begin`; null if there is none.
  AllocationPtr Remove(uint64_t begin);
  // The same, if `predicate` holds for it.
  AllocationPtr RemoveIf(uint64_t begin, const std::function<bool(const Allocation&)>& predicate);
  std::vector<AllocationPtr> RemoveAll(const std::function<bool(const Allocation&)>& predicate);
  // The one that holds the address; null if there is none, or only a kernels' heap or what was freed in a stream.
  AllocationPtr Find(uint64_t address) const;
  // Changes one under the map's lock.
  void Update(const AllocationPtr& allocation, const std::function<void(Allocation&)>& change);
  // All that overlap [begin, end), in order.
  std::vector<AllocationPtr> Overlapping(uint64_t begin, uint64_t end) const;

  // Whether every byte of the range is in readable memory. Neighbouring mapped pieces count as one; other allocations
  // do not.
  bool Covers(uint64_t begin, uint64_t size) const;

  // ptx::MemoryMap
  bool Lookup(uint64_t address, ptx::Interval* interval) override;

  // Gives an allocation back: its budget at once, its memory when no launch runs.
  void Release(AllocationPtr allocation);

  // Around every launch.
  void BeginLaunch();
  void EndLaunch();

 private:
  mutable SharedMutex mutex_;
  std::map<uint64_t, AllocationPtr> by_begin_ CR_GUARDED_BY(mutex_);

  Mutex launch_mutex_;
  int launches_ CR_GUARDED_BY(launch_mutex_) = 0;
  std::vector<AllocationPtr> released_ CR_GUARDED_BY(launch_mutex_);
};

// Allocation::flags of a kernels' heap (kernel_heap.h): kernels reach it, and no call of the driver knows it.
constexpr unsigned kDeviceHeapFlag = 0x80000000;

uint64_t NextBufferId();

// The reservation of virtual addresses (api/vmm.cc) in which an address lies; false if there is none.
bool FindReservation(uint64_t address, uint64_t* begin, uint64_t* size);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_MEMORY_MAP_H_
