// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/side_work.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "proto/chunkhash/chunk_hash.h"
#include "proto/chunkhash/steps.h"
#include "proto/driverabi/job_addresses.h"
#include "proto/threads/mutex.h"
#include "server/worker/memory/hash_kernel.gen.h"
#include "server/worker/memory/side_reads.h"

namespace cuda_remote::server {
namespace {

// Copies to the host have pieces, so that what the job copies need not wait for long: 2 MiB take 40 us.
constexpr uint64_t kCopyBytes = 2 << 20;

// Reads on their way. C function pointers carry no state, and a worker is one process.
Mutex g_mutex;
Condition g_ended;
std::set<uint64_t> g_reads CR_GUARDED_BY(g_mutex);  // their numbers
uint64_t g_next_read CR_GUARDED_BY(g_mutex) = 0;
DriverTable g_real;

// One read, until the last copy of it is gone.
class Read {
 public:
  static std::shared_ptr<Read> Begin() { return std::make_shared<Read>(); }
  Read() {
    MutexLock lock(&g_mutex);
    number_ = g_next_read++;
    g_reads.insert(number_);
  }
  ~Read() {
    MutexLock lock(&g_mutex);
    g_reads.erase(number_);
    g_ended.NotifyAll();
  }
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;

 private:
  uint64_t number_;
};

template <auto kFunction>
struct Guarded;

template <typename... Args, CUresult (CUDAAPI* DriverTable::*kFunction)(Args...)>
struct Guarded<kFunction> {
  static CUresult CUDAAPI Call(Args... args) {
    AwaitSideReads();
    return (g_real.*kFunction)(args...);
  }
};

template <auto... kFunctions>
void Guard(DriverTable* table) {
  ((table->*kFunctions = &Guarded<kFunctions>::Call), ...);
}

}  // namespace

bool SideReadsAreUnderWay() {
  MutexLock lock(&g_mutex);
  return !g_reads.empty();
}

// Later ones do not read what is about to go: the session owns it no more.
void AwaitSideReads() {
  MutexLock lock(&g_mutex);
  const uint64_t next = g_next_read;
  while (!g_reads.empty() && *g_reads.begin() < next) g_ended.Wait(&g_mutex);
}

CUresult UnmapAtOnce(const DriverTable& driver, uint64_t address, uint64_t bytes) {
  const auto unmap = g_real.cuMemUnmap != nullptr ? g_real.cuMemUnmap : driver.cuMemUnmap;
  return unmap(address, bytes);
}

void GuardUnmapping(DriverTable* table) {
  g_real = *table;
  using T = DriverTable;
  Guard<&T::cuMemUnmap, &T::cuMemFree_v2, &T::cuMemHostUnregister, &T::cuMemFreeHost, &T::cuModuleUnload,
        &T::cuLibraryUnload, &T::cuCtxDestroy_v2, &T::cuDevicePrimaryCtxRelease_v2, &T::cuDevicePrimaryCtxReset_v2,
        &T::cuGreenCtxDestroy>(table);
}

CUresult SideWork::StreamIn(uint64_t context, CUstream* stream) {
  Place& place = places_[context];
  if (place.stream == nullptr) {
    int least = 0, greatest = 0;
    CUresult result = driver_.cuCtxGetStreamPriorityRange(&least, &greatest);
    if (result == CUDA_SUCCESS) {
      result = driver_.cuStreamCreateWithPriority(&place.stream, CU_STREAM_NON_BLOCKING, least);
    }
    if (result != CUDA_SUCCESS) return result;
  }
  *stream = place.stream;
  return CUDA_SUCCESS;
}

CUresult SideWork::KernelIn(uint64_t context, CUfunction* kernel) {
  Place& place = places_[context];
  if (place.hash == nullptr) {
    CUmodule module = nullptr;
    // Compiling takes the driver some 10 ms, in which the job's calls wait. Another GPU or an older driver needs it.
    CUresult result = driver_.cuModuleLoadData(&module, kCompiledHashKernel);
    if (result != CUDA_SUCCESS) result = driver_.cuModuleLoadData(&module, kHashKernel);
    if (result == CUDA_SUCCESS) result = driver_.cuModuleGetFunction(&place.hash, module, "cuda_remote_hash");
    if (result != CUDA_SUCCESS) return result;
  }
  *kernel = place.hash;
  return CUDA_SUCCESS;
}

CUresult SideWork::WaitFor(CUstream stream, Wait* wait) {
  CUevent event = nullptr;
  CUresult result = driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
  if (result == CUDA_SUCCESS) result = driver_.cuEventRecord(event, stream);
  if (result != CUDA_SUCCESS) {
    // What has begun must end before anything of it goes.
    driver_.cuStreamSynchronize(stream);
    if (event != nullptr) driver_.cuEventDestroy_v2(event);
    return result;
  }
  *wait = [driver = &driver_, event, read = Read::Begin()]() mutable {
    const CUresult state = driver->cuEventSynchronize(event);
    driver->cuEventDestroy_v2(event);
    read.reset();
    return state;
  };
  return CUDA_SUCCESS;
}

CUresult SideWork::Hash(uint64_t context, const std::vector<Piece>& pieces, uint32_t every,
                        std::shared_ptr<char>* hashes, Wait* wait) {
  static_assert(sizeof(Piece) == 16 && sizeof(ChunkHash) == 16);
  const size_t bytes = pieces.size() * sizeof(Piece);
  const std::shared_ptr<char> buffer = staging_->Take(2 * bytes);
  if (!buffer) return CUDA_ERROR_OUT_OF_MEMORY;
  *hashes = std::shared_ptr<char>(buffer, buffer.get() + bytes);
  if (software_) {
    *wait = [pieces, every, to = *hashes, read = Read::Begin()]() mutable {
      for (size_t i = 0; i < pieces.size(); ++i) {
        const ChunkHash hash = HashRows(reinterpret_cast<const void*>(pieces[i].address), pieces[i].bytes, every);
        memcpy(to.get() + i * sizeof(hash), &hash, sizeof(hash));
      }
      read.reset();
      return CUDA_SUCCESS;
    };
    return CUDA_SUCCESS;
  }
  memcpy(buffer.get(), pieces.data(), bytes);
  CUstream stream = nullptr;
  CUfunction kernel = nullptr;
  CUdeviceptr table = 0;
  CUresult result = StreamIn(context, &stream);
  if (result == CUDA_SUCCESS) result = KernelIn(context, &kernel);
  if (result == CUDA_SUCCESS) result = driver_.cuMemHostGetDevicePointer_v2(&table, buffer.get(), 0);
  if (result != CUDA_SUCCESS) return result;
  CUdeviceptr results = table + bytes;
  uint64_t rows = every;
  void* parameters[] = {&table, &results, &rows};
  result = driver_.cuLaunchKernel(kernel, unsigned(pieces.size()), 1, 1, chunkhash::kLanes, 1, 1, 0, stream, parameters,
                                  nullptr);
  return result == CUDA_SUCCESS ? WaitFor(stream, wait) : result;
}

CUresult SideWork::CopyOut(uint64_t context, const Piece& piece, void* to, Wait* wait) {
  const uint64_t target = reinterpret_cast<uint64_t>(to);
  const bool inside =
      target >= driverabi::kSnapshotBase && target - driverabi::kSnapshotBase < driverabi::kSnapshotBytes;
  if (inside) return CopyBetween(context, piece, target, wait);
  CUstream stream = nullptr;
  CUresult result = StreamIn(context, &stream);
  if (result == CUDA_SUCCESS) result = GiveCopies(stream, piece, to);
  return result == CUDA_SUCCESS ? WaitFor(stream, wait) : result;
}

CUresult SideWork::CopyOutInWait(uint64_t context, const Piece& piece, void* to, Wait* wait) {
  CUstream stream = nullptr;
  CUevent event = nullptr;
  CUresult result = StreamIn(context, &stream);
  // Here, where no stream is being captured.
  if (result == CUDA_SUCCESS) result = driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
  if (result != CUDA_SUCCESS) return result;
  // The read has begun: what ends addresses or the context waits from now on.
  *wait = [this, stream, event, piece, to, read = Read::Begin()]() mutable {
    CUresult state = GiveCopies(stream, piece, to);
    if (state == CUDA_SUCCESS) {
      state = driver_.cuEventRecord(event, stream);
      const CUresult end =
          state == CUDA_SUCCESS ? driver_.cuEventSynchronize(event) : driver_.cuStreamSynchronize(stream);
      if (state == CUDA_SUCCESS) state = end;
    }
    driver_.cuEventDestroy_v2(event);
    read.reset();
    return state;
  };
  return CUDA_SUCCESS;
}

CUresult SideWork::GiveCopies(CUstream stream, const Piece& piece, void* to) const {
  CUresult result = CUDA_SUCCESS;
  for (uint64_t at = 0; result == CUDA_SUCCESS && at < piece.bytes; at += kCopyBytes) {
    result = driver_.cuMemcpyDtoHAsync_v2(static_cast<char*>(to) + at, piece.address + at,
                                          std::min(kCopyBytes, piece.bytes - at), stream);
    // What has begun must end before anything of it goes.
    if (result != CUDA_SUCCESS && at > 0) driver_.cuStreamSynchronize(stream);
  }
  return result;
}

CUresult SideWork::CopyBetween(uint64_t context, const Piece& piece, uint64_t to, Wait* wait) {
  CUstream stream = nullptr;
  CUresult result = StreamIn(context, &stream);
  if (result == CUDA_SUCCESS) result = driver_.cuMemcpyDtoDAsync_v2(to, piece.address, piece.bytes, stream);
  return result == CUDA_SUCCESS ? WaitFor(stream, wait) : result;
}

}  // namespace cuda_remote::server
