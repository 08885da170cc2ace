// SPDX-License-Identifier: Apache-2.0
// Virtual memory: reserve addresses, make physical memory, map one to the other.
//
// A reservation is a piece of this process's address space without access. Physical memory is a range of the device's
// memory file (memory_file.h), or a file of its own if it can be exported. Mapping is mmap at the reserved address;
// access is mprotect.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <string>

#include "proto/base/text.h"
#include "proto/base/unique_fd.h"
#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/memory_map.h"

using namespace cuda_remote::softgpu;

namespace {

struct Physical {
  int device = 0;
  uint64_t size = 0;
  CUmemAllocationProp prop = {};
  cuda_remote::UniqueFd own_file;  // where it has one of its own
  int fd = -1;                     // that one, or a borrowed one
  uint64_t offset = 0;
  bool imported = false;  // and so not exported again
  bool taken = false;     // from the device's budget
  uint64_t id = NextBufferId();

  // The number of its own file is the same in all processes that have it.
  uint64_t thing() const {
    struct stat facts;
    return own_file.ok() && fstat(fd, &facts) == 0 ? facts.st_ino : 0;
  }
  bool Take() { return taken = GetDevice(device)->TakeMemory(size, thing()); }

  ~Physical() {
    if (taken) GetDevice(device)->GiveMemory(size, thing());
    if (!own_file.ok() && fd >= 0) GiveFileRange({fd, offset}, size);
  }
};
using PhysicalPtr = std::shared_ptr<Physical>;

struct Mapping {
  PhysicalPtr physical;
  uint64_t size = 0;
  AllocationPtr allocation;
};

struct VirtualMemory {
  Mutex mutex;
  std::map<uint64_t, uint64_t> reservations CR_GUARDED_BY(mutex);  // begin -> size
  std::map<CUmemGenericAllocationHandle, std::pair<PhysicalPtr, int>> handles
      CR_GUARDED_BY(mutex);                                   // handle -> what, references
  std::map<uint64_t, Mapping> mappings CR_GUARDED_BY(mutex);  // begin -> what
  CUmemGenericAllocationHandle next_handle CR_GUARDED_BY(mutex) = 0x10001;
};

VirtualMemory& Vm() {
  static auto* vm = new VirtualMemory;
  return *vm;
}

bool Aligned(uint64_t value) { return value % kGranularity == 0; }

// The name of a memory file that other processes may get says which GPU its memory is of.
constexpr char kSharedName[] = "softgpu-shared-";
std::string SharedName(int device) {
  const CUuuid uuid = GetDevice(device)->uuid();
  return kSharedName + cuda_remote::HexBytes({uuid.bytes, sizeof(uuid.bytes)});
}

// The GPU that a memory file of SharedName is for; kHidden: one that this process does not see, kNone: no such file.
constexpr int kHidden = -1, kNone = -2;
int DeviceOfShared(int fd) {
  char link[64], target[256] = {};
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (readlink(link, target, sizeof target - 1) <= 0) return kNone;
  for (int device = 0; device < DeviceCount(); ++device) {
    if (std::string(target).find(SharedName(device)) != std::string::npos) return device;
  }
  return std::string(target).find(kSharedName) != std::string::npos ? kHidden : kNone;
}

CUresult CheckProp(const CUmemAllocationProp* prop) {
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (GetDevice(prop->location.id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if ((prop->requestedHandleTypes & ~unsigned{CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR}) != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

// Whether one reservation holds all of the range.
bool Reserved(uint64_t begin, uint64_t size) CR_REQUIRES(Vm().mutex) {
  auto it = Vm().reservations.upper_bound(begin);
  if (it == Vm().reservations.begin()) return false;
  --it;
  return begin - it->first < it->second && size <= it->second - (begin - it->first);
}

// Mappings that lie in [begin, begin + size); false unless they fill it exactly.
bool MappingsIn(uint64_t begin, uint64_t size, std::vector<uint64_t>* found) CR_REQUIRES(Vm().mutex) {
  uint64_t at = begin;
  for (auto it = Vm().mappings.find(begin); it != Vm().mappings.end() && it->first == at && at < begin + size; ++it) {
    found->push_back(it->first);
    at += it->second.size;
  }
  return at == begin + size;
}

void SynchronizeAll() {
  Registry<Context>::Get().ForEach([](Context& context) {
    if (context.active()) context.Synchronize();
  });
}

constexpr uint64_t kLeastHinted = 64 << 20;

void* MapNothing(uint64_t begin, uint64_t size) {
  return mmap(reinterpret_cast<void*>(begin), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
              -1, 0);
}

}  // namespace

namespace cuda_remote::softgpu {

bool FindReservation(uint64_t address, uint64_t* begin, uint64_t* size) {
  MutexLock lock(&Vm().mutex);
  auto it = Vm().reservations.upper_bound(address);
  if (it == Vm().reservations.begin()) return false;
  --it;
  if (address - it->first >= it->second) return false;
  *begin = it->first;
  *size = it->second;
  return true;
}

}  // namespace cuda_remote::softgpu

SOFTGPU_API cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                          CUmemAllocationGranularity_flags) {
  SOFTGPU_ENTER();
  if (granularity == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult result = CheckProp(prop); result != CUDA_SUCCESS) return result;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemAddressReserve(CUdeviceptr* out, size_t size, size_t alignment, CUdeviceptr hint,
                                unsigned long long flags) {
  SOFTGPU_ENTER();
  if (out == nullptr || size == 0 || !Aligned(size) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (alignment != 0 && (alignment & (alignment - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (hint % sysconf(_SC_PAGESIZE) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (alignment < kGranularity) alignment = kGranularity;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  uint64_t begin = 0;
#ifdef __SANITIZE_THREAD__
  hint = 0;  // these addresses are the sanitizer's
#endif
  // A hint is honoured where the driver does, if nothing is there; else any place will do. The driver ignores those of
  // small reservations.
  if (hint != 0 && size >= kLeastHinted && hint % alignment == 0 && hint >= 0x100000000000) {
    void* got = mmap(reinterpret_cast<void*>(hint), size, PROT_NONE, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != MAP_FAILED && reinterpret_cast<uint64_t>(got) != hint) {
      munmap(got, size);  // a kernel that does not know MAP_FIXED_NOREPLACE
    } else if (got != MAP_FAILED) {
      begin = hint;
    }
  }
  if (begin == 0) {
    uint64_t room;
    if (__builtin_add_overflow(size, alignment, &room)) return CUDA_ERROR_OUT_OF_MEMORY;
    void* got = mmap(nullptr, room, PROT_NONE, kFlags, -1, 0);
    if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    auto start = reinterpret_cast<uint64_t>(got);
    begin = (start + alignment - 1) / alignment * alignment;
    if (begin != start) munmap(got, begin - start);
    if (begin + size != start + room) munmap(reinterpret_cast<void*>(begin + size), start + room - begin - size);
  }
  MutexLock lock(&Vm().mutex);
  Vm().reservations[begin] = size;
  *out = begin;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemAddressFree(CUdeviceptr address, size_t size) {
  SOFTGPU_ENTER();
  MutexLock lock(&Vm().mutex);
  auto it = Vm().reservations.find(address);
  if (it == Vm().reservations.end() || it->second != size) return CUDA_ERROR_INVALID_VALUE;
  auto mapped = Vm().mappings.lower_bound(address);
  if (mapped != Vm().mappings.end() && mapped->first < address + size) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(address), size);
  Vm().reservations.erase(it);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemCreate(CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp* prop,
                        unsigned long long flags) {
  SOFTGPU_ENTER();
  if (out == nullptr || size == 0 || !Aligned(size) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult result = CheckProp(prop); result != CUDA_SUCCESS) return result;
  auto physical = std::make_shared<Physical>();
  physical->device = prop->location.id;
  physical->size = size;
  physical->prop = *prop;
  MutexLock lock(&Vm().mutex);
  if (prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE) {
    physical->own_file.Reset(memfd_create(SharedName(prop->location.id).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    physical->fd = physical->own_file.get();
    // What other processes get must not be cut short by one of them.
    if (physical->own_file.ok() && (ftruncate(physical->fd, static_cast<off_t>(size)) != 0 ||
                                    fcntl(physical->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  if (!physical->Take()) return CUDA_ERROR_OUT_OF_MEMORY;
  // Without a descriptor to spare it is memory like other memory, which cannot be exported.
  if (!physical->own_file.ok()) {
    FileRange range;
    if (!TakeFileRange(prop->location.id, size, &range)) return CUDA_ERROR_OUT_OF_MEMORY;
    physical->fd = range.fd;  // borrowed
    physical->offset = range.offset;
  }
  *out = Vm().next_handle++;
  Vm().handles[*out] = {physical, 1};
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemRelease(CUmemGenericAllocationHandle handle) {
  SOFTGPU_ENTER();
  MutexLock lock(&Vm().mutex);
  auto it = Vm().handles.find(handle);
  if (it == Vm().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--it->second.second == 0) Vm().handles.erase(it);  // mappings keep the memory
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                     unsigned long long flags) {
  SOFTGPU_ENTER();
  if (size == 0 || !Aligned(size) || !Aligned(address) || !Aligned(offset) || flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&Vm().mutex);
  auto it = Vm().handles.find(handle);
  if (it == Vm().handles.end() || !Reserved(address, size)) return CUDA_ERROR_INVALID_VALUE;
  PhysicalPtr physical = it->second.first;
  if (offset != 0 || size > physical->size) return CUDA_ERROR_INVALID_VALUE;  // the driver takes no offset either
  auto allocation = std::make_shared<Allocation>();
  allocation->begin = address;
  allocation->size = size;
  allocation->kind = MemoryKind::kMapped;
  allocation->device = physical->device;
  allocation->readable = false;
  allocation->kernel_writable = false;
  allocation->reached_by = 0;
  allocation->flags = physical->prop.requestedHandleTypes;
  allocation->block_id = physical->id;
  if (!MemoryMap::Get().Add(allocation)) return CUDA_ERROR_INVALID_VALUE;
  void* got = mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                   physical->fd, static_cast<off_t>(physical->offset + offset));
  if (got == MAP_FAILED) {
    MemoryMap::Get().Remove(address);
    MapNothing(address, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  Vm().mappings[address] = {physical, size, allocation};
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* list, size_t count) {
  SOFTGPU_ENTER();
  if (list == nullptr || count == 0 || size == 0) return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&Vm().mutex);
  std::vector<uint64_t> pieces;
  if (!MappingsIn(address, size, &pieces)) return CUDA_ERROR_INVALID_VALUE;
  // The rights of devices that are not in the list stay. Kernels of all devices see the same memory: the widest of all
  // rights. Copies look whose they are.
  bool write = false;
  uint64_t given = 0, granted = 0;
  for (size_t i = 0; i < count; ++i) {
    if (list[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
      return CUDA_ERROR_INVALID_VALUE;  // no host memory is mapped
    if (GetDevice(list[i].location.id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    const uint64_t device = uint64_t{1} << list[i].location.id;
    given |= device;
    if (list[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) granted |= device;
    write = write || list[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  for (uint64_t piece : pieces) {
    const Mapping& mapping = Vm().mappings[piece];
    const uint64_t others = mapping.allocation->reached_by & ~given;
    // Copies by the host run in this process too, so a read-only piece stays writable for them.
    const int protection = (others | granted) != 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
    if (mprotect(reinterpret_cast<void*>(piece), mapping.size, protection) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    MemoryMap::Get().Update(mapping.allocation, [&](Allocation& allocation) {
      allocation.reached_by = others | granted;
      allocation.readable = allocation.reached_by != 0;
      allocation.kernel_writable = write || (others != 0 && allocation.kernel_writable);
    });
  }
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  SOFTGPU_ENTER();
  if (flags == nullptr || location == nullptr || address == 0) return CUDA_ERROR_INVALID_VALUE;
  *flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  if (allocation->kind != MemoryKind::kMapped) return CUDA_SUCCESS;  // so says driver 580
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(location->id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (!allocation->mapped_for(location->id)) return CUDA_SUCCESS;
  *flags = allocation->kernel_writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemUnmap(CUdeviceptr address, size_t size) {
  SOFTGPU_ENTER();
  SynchronizeAll();  // kernels may still use it, and would find a hole in the process
  MutexLock lock(&Vm().mutex);
  std::vector<uint64_t> pieces;
  if (size == 0 || !MappingsIn(address, size, &pieces)) return CUDA_ERROR_INVALID_VALUE;
  for (uint64_t piece : pieces) MemoryMap::Get().Remove(piece);
  MapNothing(address, size);
  for (uint64_t piece : pieces) Vm().mappings.erase(piece);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* address) {
  SOFTGPU_ENTER();
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&Vm().mutex);
  auto begin = reinterpret_cast<uint64_t>(address);
  auto it = Vm().mappings.upper_bound(begin);
  if (it == Vm().mappings.begin()) return CUDA_ERROR_INVALID_VALUE;
  --it;
  if (begin - it->first >= it->second.size) return CUDA_ERROR_INVALID_VALUE;
  for (auto& [handle, entry] : Vm().handles) {
    if (entry.first != it->second.physical) continue;
    ++entry.second;
    *out = handle;
    return CUDA_SUCCESS;
  }
  *out = Vm().next_handle++;
  Vm().handles[*out] = {it->second.physical, 1};
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
  SOFTGPU_ENTER();
  MutexLock lock(&Vm().mutex);
  auto it = Vm().handles.find(handle);
  if (prop == nullptr || it == Vm().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *prop = it->second.first->prop;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                         unsigned long long flags) {
  SOFTGPU_ENTER();
  if (out == nullptr || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&Vm().mutex);
  auto it = Vm().handles.find(handle);
  if (it == Vm().handles.end() || !it->second.first->own_file.ok() || it->second.first->imported) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  int fd = fcntl(it->second.first->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(out) = fd;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* os_handle,
                                           CUmemAllocationHandleType type) {
  SOFTGPU_ENTER();
  if (out == nullptr || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  int fd = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(os_handle)), F_DUPFD_CLOEXEC, 0);
  off_t size = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
  const int device = fd < 0 ? kNone : DeviceOfShared(fd);
  // A GPU that reaches another one's memory does so whether this process sees that one or not.
  if (device == kNone || size <= 0 || !Aligned(static_cast<uint64_t>(size))) {
    if (fd >= 0) close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto physical = std::make_shared<Physical>();
  physical->device = device;
  physical->size = static_cast<uint64_t>(size);
  physical->own_file.Reset(fd);
  physical->fd = fd;
  physical->imported = true;
  physical->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  physical->prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  physical->prop.location.id = device;
  physical->prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (device != kHidden && !physical->Take()) return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&Vm().mutex);
  *out = Vm().next_handle++;
  Vm().handles[*out] = {physical, 1};
  return CUDA_SUCCESS;
}
