// SPDX-License-Identifier: Apache-2.0
// Device memory between processes. A handle names the process, the memory file of its device (memory_file.h) and the
// range there; another process of the same user maps that range.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <tuple>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/pool.h"

using namespace cuda_remote::softgpu;

namespace {

constexpr uint64_t kMark = 0x4d454d5550474653;  // in every handle that is made here
constexpr uint64_t kPage = 4096;

struct Name {
  uint64_t mark;
  int32_t pid;
  int32_t fd;
  uint64_t inode;
  uint64_t offset;  // in the file
  uint64_t bytes;
  char uuid[16];
};
static_assert(sizeof(Name) <= sizeof(CUipcMemHandle));

// Memory of another process that is open here. Opening it again gives the same address.
struct Import {
  uint64_t address = 0;
  uint64_t opened = 0;  // how often
};

struct Imports {
  Mutex mutex;
  std::map<std::tuple<int32_t, uint64_t, uint64_t>, Import> by_name CR_GUARDED_BY(mutex);  // process, file, offset
};

Imports& TheImports() {
  static auto* imports = new Imports;
  return *imports;
}

int DeviceOf(const Name& name) {
  for (int device = 0; device < DeviceCount(); ++device) {
    if (std::memcmp(GetDevice(device)->uuid().bytes, name.uuid, sizeof name.uuid) == 0) return device;
  }
  return -1;
}

// The file of a name, or -1.
int OpenFile(const Name& name) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return -1;
  struct stat facts;
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool good = fstat(fd, &facts) == 0 && facts.st_ino == name.inode && seals >= 0 &&
                    (seals & F_SEAL_SHRINK) != 0 && name.bytes != 0 && uint64_t(facts.st_size) >= name.bytes &&
                    name.offset <= uint64_t(facts.st_size) - name.bytes;
  if (good) return fd;
  close(fd);
  return -1;
}

}  // namespace

SOFTGPU_API cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address) {
  SOFTGPU_ENTER_CONTEXT(context);
  const AllocationPtr allocation = MemoryMap::Get().Find(address);
  if (out == nullptr || !allocation || allocation->kind != MemoryKind::kDevice || allocation->file.fd < 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  struct stat facts = {};
  if (fstat(allocation->file.fd, &facts) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
  Name name = {kMark, getpid(), allocation->file.fd, facts.st_ino, allocation->file.offset, allocation->size, {}};
  std::memcpy(name.uuid, GetDevice(allocation->device)->uuid().bytes, sizeof name.uuid);
  *out = {};
  std::memcpy(out, &name, sizeof name);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuIpcOpenMemHandle_v2(CUdeviceptr* out, CUipcMemHandle handle, unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  Name name;
  std::memcpy(&name, &handle, sizeof name);
  if (name.mark != kMark) return CUDA_ERROR_INVALID_VALUE;
  if (name.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;  // the memory is this process's own
  const int device = DeviceOf(name);
  if (device < 0) return CUDA_ERROR_INVALID_DEVICE;
  Imports& imports = TheImports();
  MutexLock lock(&imports.mutex);
  Import& import = imports.by_name[{name.pid, name.inode, name.offset}];
  const AllocationPtr known = import.opened != 0 ? MemoryMap::Get().Find(import.address) : nullptr;
  if (known && known->kind == MemoryKind::kImported) {
    ++import.opened;
    *out = import.address;
    return CUDA_SUCCESS;
  }
  const int fd = OpenFile(name);
  if (fd < 0) return CUDA_ERROR_MAP_FAILED;
  // Small pieces share pages with others.
  const uint64_t before = name.offset % kPage, mapped = (before + name.bytes + kPage - 1) / kPage * kPage;
  void* const memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd,
                            static_cast<off_t>(name.offset - before));
  close(fd);
  if (memory == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
  auto allocation = std::make_shared<Allocation>();
  allocation->begin = reinterpret_cast<uint64_t>(memory) + before;
  allocation->size = name.bytes;
  allocation->kind = MemoryKind::kImported;
  allocation->device = device;
  allocation->context = context.get();
  allocation->release = [memory, mapped] { munmap(memory, mapped); };
  MemoryMap::Get().Add(allocation);
  import = {allocation->begin, 1};
  *out = allocation->begin;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuIpcOpenMemHandle(CUdeviceptr* out, CUipcMemHandle handle, unsigned int flags) {
  return cuIpcOpenMemHandle_v2(out, handle, flags);
}

SOFTGPU_API cuIpcCloseMemHandle(CUdeviceptr address) {
  SOFTGPU_ENTER_CONTEXT(context);
  const AllocationPtr allocation = MemoryMap::Get().Find(address);
  if (!allocation || allocation->kind != MemoryKind::kImported || allocation->begin != address) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  context->Synchronize();
  Imports& imports = TheImports();
  MutexLock lock(&imports.mutex);
  for (auto it = imports.by_name.begin(); it != imports.by_name.end(); ++it) {
    if (it->second.address != address) continue;
    if (--it->second.opened != 0) return CUDA_SUCCESS;
    imports.by_name.erase(it);
    break;
  }
  GiveBack(MemoryMap::Get().RemoveIf(address,
                                     [](const Allocation& memory) { return memory.kind == MemoryKind::kImported; }));
  return CUDA_SUCCESS;
}
