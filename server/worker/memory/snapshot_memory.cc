// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/snapshot_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "proto/base/clock.h"
#include "proto/logging/log.h"
#include "proto/machine/machine_memory.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"
#include "server/worker/memory/device_arena.h"
#include "server/worker/memory/side_reads.h"

namespace cuda_remote::server {
namespace {

using driverabi::kSnapshotBase;
using driverabi::kSnapshotBytes;

// How often it is seen whether somebody still reads.
constexpr auto kWatchEvery = std::chrono::milliseconds(200);

uint64_t RoundUp(uint64_t bytes) {
  return (bytes + SnapshotMemory::kGrain - 1) / SnapshotMemory::kGrain * SnapshotMemory::kGrain;
}

DriverTable g_real;

template <auto kFunction>
struct Again;

template <typename... Args, CUresult (CUDAAPI* DriverTable::*kFunction)(Args...)>
struct Again<kFunction> {
  static CUresult CUDAAPI Call(Args... args) {
    const CUresult result = (g_real.*kFunction)(args...);
    if (result != CUDA_ERROR_OUT_OF_MEMORY || !SnapshotMemory::Get().GiveWay()) return result;
    return (g_real.*kFunction)(args...);
  }
};

template <auto... kFunctions>
void Replace(DriverTable* table) {
  ((table->*kFunctions = &Again<kFunctions>::Call), ...);
}

}  // namespace

SnapshotMemory& SnapshotMemory::Get() {
  static SnapshotMemory* const memory = new SnapshotMemory;  // never destroyed: the driver may be gone by then
  return *memory;
}

void SnapshotMemory::GiveWayIn(DriverTable* table) {
  real_ = g_real = *table;
  using T = DriverTable;
  Replace<&T::cuMemCreate, &T::cuModuleLoadData, &T::cuModuleLoadDataEx, &T::cuModuleLoadFatBinary,
          &T::cuModuleGetGlobal_v2, &T::cuModuleGetFunction, &T::cuLibraryLoadData, &T::cuLibraryGetModule,
          &T::cuLibraryGetGlobal, &T::cuKernelGetFunction, &T::cuFuncLoad, &T::cuLaunchKernel, &T::cuLaunchKernelEx,
          &T::cuLaunchCooperativeKernel, &T::cuGraphInstantiateWithParams, &T::cuGraphUpload, &T::cuGraphLaunch,
          &T::cuStreamCreate, &T::cuStreamCreateWithPriority, &T::cuEventCreate, &T::cuCtxCreate_v4,
          &T::cuDevicePrimaryCtxRetain, &T::cuCtxSetLimit, &T::cuMemHostRegister_v2, &T::cuMemHostAlloc,
          &T::cuArrayCreate_v2, &T::cuArray3DCreate_v2, &T::cuMipmappedArrayCreate>(table);
}

CUresult SnapshotMemory::Allocate(int device, uint64_t bytes, uint64_t* address) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&mutex_);
  size_t free = 0, total = 0;
  CUcontext context = nullptr;
  CUresult result = real_.cuMemGetInfo_v2(&free, &total);
  if (result == CUDA_SUCCESS) result = real_.cuCtxGetCurrent(&context);
  if (result != CUDA_SUCCESS) return result;
  const uint64_t reserve = std::max<uint64_t>(total / 100 * kReservePercent, kLeastReserve);
  if (bytes > kSnapshotBytes || free < reserve || free - reserve < RoundUp(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  bytes = RoundUp(bytes);
  if (reserved_ == 0) {
    reserved_ = ReserveAddressesAt(real_, kSnapshotBase, kSnapshotBytes, &result);
    if (reserved_ == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (pieces_.empty()) next_ = kSnapshotBase;
  if (bytes > kSnapshotBase + reserved_ - next_) return CUDA_ERROR_OUT_OF_MEMORY;
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  CUmemGenericAllocationHandle physical = 0;
  result = real_.cuMemCreate(&physical, bytes, &prop, 0);
  if (result != CUDA_SUCCESS) return result;
  result = real_.cuMemMap(next_, bytes, 0, physical, 0);
  real_.cuMemRelease(physical);  // the mapping keeps it
  if (result != CUDA_SUCCESS) return result;
  CUmemAccessDesc access = {};
  access.location = prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  result = real_.cuMemSetAccess(next_, bytes, &access, 1);
  if (result != CUDA_SUCCESS) {
    real_.cuMemUnmap(next_, bytes);
    return result;
  }
  if (!watched_) {
    // Without the watcher nobody would make room for the job.
    std::thread watcher = StartThread([this] { Watch(); });
    if (!watcher.joinable()) {
      real_.cuMemUnmap(next_, bytes);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    watcher.detach();
    watched_ = true;
  }
  *address = next_;
  next_ += bytes;
  Piece& piece = pieces_[*address];
  piece.bytes = bytes;
  piece.device = device;
  piece.context = context;
  used_ = Now();
  return CUDA_SUCCESS;
}

std::map<uint64_t, SnapshotMemory::Piece>::iterator SnapshotMemory::FindLocked(uint64_t address, uint64_t bytes) {
  auto piece = pieces_.upper_bound(address);
  if (piece == pieces_.begin()) return pieces_.end();
  --piece;
  const uint64_t offset = address - piece->first;
  return bytes <= piece->second.bytes && offset <= piece->second.bytes - bytes ? piece : pieces_.end();
}

bool SnapshotMemory::Owns(uint64_t address, uint64_t bytes, int* device) {
  MutexLock lock(&mutex_);
  const auto piece = FindLocked(address, bytes);
  if (piece == pieces_.end()) return false;
  *device = piece->second.device;
  return true;
}

// Waits for what reads or fills it.
void SnapshotMemory::UnmapLocked(uint64_t address, uint64_t bytes) {
  AwaitSideReads();
  real_.cuMemUnmap(address, bytes);
}

void SnapshotMemory::FreeLocked(std::map<uint64_t, Piece>::iterator piece) {
  if (piece->second.host != nullptr) {
    AwaitSideReads();
    munmap(piece->second.host, piece->second.bytes);
  } else if (!piece->second.lost) {
    UnmapLocked(piece->first, piece->second.bytes);
  }
  pieces_.erase(piece);
}

bool SnapshotMemory::Free(uint64_t address) {
  MutexLock lock(&mutex_);
  const auto piece = pieces_.find(address);
  if (piece == pieces_.end()) return false;
  FreeLocked(piece);
  return true;
}

CUresult SnapshotMemory::Fill(uint64_t address, uint64_t bytes, const std::function<CUresult()>& copy) {
  MutexLock lock(&mutex_);
  const auto piece = FindLocked(address, bytes);
  if (piece == pieces_.end()) return CUDA_ERROR_INVALID_VALUE;
  if (piece->second.host != nullptr || piece->second.lost) return CUDA_ERROR_OUT_OF_MEMORY;
  used_ = Now();
  const CUresult result = copy();
  if (result == CUDA_SUCCESS) piece->second.unread += bytes;
  return result;
}

CUresult SnapshotMemory::Read(uint64_t address, uint64_t bytes, void* to, const std::function<CUresult()>& copy,
                              bool* copied) {
  *copied = false;
  MutexLock lock(&mutex_);
  const auto piece = FindLocked(address, bytes);
  if (piece == pieces_.end()) return CUDA_ERROR_INVALID_VALUE;
  if (piece->second.lost) return CUDA_ERROR_OUT_OF_MEMORY;
  used_ = Now();
  if (piece->second.host == nullptr) return copy();
  memcpy(to, piece->second.host + (address - piece->first), bytes);
  *copied = true;
  return CUDA_SUCCESS;
}

void SnapshotMemory::WasRead(uint64_t address, uint64_t bytes) {
  MutexLock lock(&mutex_);
  const auto piece = FindLocked(address, bytes);
  if (piece == pieces_.end()) return;
  piece->second.unread -= std::min(piece->second.unread, bytes);
  if (piece->second.unread == 0) FreeLocked(piece);
}

bool SnapshotMemory::GiveWay() {
  MutexLock lock(&mutex_);
  const bool none = std::all_of(pieces_.begin(), pieces_.end(),
                                [](const auto& one) { return one.second.host != nullptr || one.second.lost; });
  if (none) return false;
  AwaitSideReads();  // of what is still on its way into the pieces
  uint64_t moved = 0, lost = 0;
  for (auto& [address, piece] : pieces_) {
    if (piece.host != nullptr || piece.lost) continue;
    void* host = MAP_FAILED;
    if (AvailableMemory() / 5 * 4 > piece.bytes) {
      host = mmap(nullptr, piece.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    CUresult result = host == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : real_.cuCtxPushCurrent_v2(piece.context);
    if (result == CUDA_SUCCESS) {
      // Beside the job's streams, if the driver has room for one more.
      CUstream stream = nullptr;
      if (real_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) stream = nullptr;
      result = real_.cuMemcpyDtoHAsync_v2(host, address, piece.bytes, stream);
      const CUresult done = real_.cuStreamSynchronize(stream);
      if (result == CUDA_SUCCESS) result = done;
      if (stream != nullptr) real_.cuStreamDestroy_v2(stream);
      CUcontext popped = nullptr;
      real_.cuCtxPopCurrent_v2(&popped);
    }
    if (result == CUDA_SUCCESS) {
      piece.host = static_cast<char*>(host);
      moved += piece.bytes;
    } else {
      if (host != MAP_FAILED) munmap(host, piece.bytes);
      piece.lost = true;
      lost += piece.bytes;
    }
    UnmapLocked(address, piece.bytes);
  }
  logging::Info("the job needs device memory: {} bytes of a checkpoint moved to host memory, {} were dropped", moved,
                lost);
  return true;
}

void SnapshotMemory::Watch() {
  while (true) {
    std::this_thread::sleep_for(kWatchEvery);
    MutexLock lock(&mutex_);
    if (pieces_.empty() || Now() - used_ < patience_) continue;
    logging::Warn("freed GPU memory of a checkpoint that nothing has read for a minute");
    while (!pieces_.empty()) FreeLocked(pieces_.begin());
  }
}

uint64_t SnapshotMemory::bytes_on(int device) {
  MutexLock lock(&mutex_);
  uint64_t bytes = 0;
  for (const auto& [address, piece] : pieces_) {
    if (piece.device == device && piece.host == nullptr && !piece.lost) bytes += piece.bytes;
  }
  return bytes;
}

void SnapshotMemory::SetPatience(std::chrono::milliseconds patience) {
  MutexLock lock(&mutex_);
  patience_ = patience;
}

}  // namespace cuda_remote::server
