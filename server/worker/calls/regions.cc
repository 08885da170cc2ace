// SPDX-License-Identifier: Apache-2.0
// What checkpoints need: a quiet GPU, the list of memory to save, and reading and writing it.

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/base/clock.h"
#include "proto/chunkhash/chunk_hash.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/address_search.h"
#include "proto/driverabi/requests.h"
#include "proto/logging/log.h"
#include "proto/threads/mutex.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/array_contents.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/calls/offers.h"
#include "server/worker/memory/address_layout.h"
#include "server/worker/memory/snapshot_memory.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

using driverabi::RegionKind;

// Bytes of regions in one reply; well below the longest message.
constexpr size_t kReplyBytes = 512 << 10;
// Most bytes that one read may ask for.
constexpr uint64_t kMaxRead = 256 << 20;
// Most chunks of one request for hashes, and what their length is a multiple of.
constexpr size_t kMostHashes = kMaxPayloadBytes / sizeof(ChunkHash) / 2;
constexpr uint64_t kHashGrain = 4096;

// The context in which a module's or library's variable is looked up.
ContextRef ContextFor(WorkerSession& session, uint64_t context) {
  if (const ContextInfo* const info = session.contexts().Find(context)) return info->ref;
  return session.contexts().Any();
}

// The context to copy a range in. That of a pool's memory, which belongs to none, may be gone: then any other of its
// GPU; 0 if there is none.
uint64_t ContextOfRange(const WorkerSession& session, const DeviceRange& range) {
  if (range.kind != DeviceRange::kStreamOrdered || session.contexts().Find(range.context) != nullptr)
    return range.context;
  for (const auto& [handle, context] : session.contexts().all()) {
    if (context.device == range.device) return handle;
  }
  return 0;
}

bool IsHeap(uint64_t object) { return object != 0 && KindOf(object) == Kind::kContext; }

struct FoundSymbol {
  wire::Region region;
  std::string name;
};

// Whether this is a `__managed__` variable that the client mirrors. Its process then has the contents, and gives all of
// them to another server.
bool IsMirrored(WorkerSession& session, uint64_t object, uint64_t address) {
  MutexLock lock(&session.mirror_mutex());
  const auto it = session.mirrored().find(address);
  return it != session.mirrored().end() && it->second.owner == object;
}

// Adds the variables of one module in one context.
void FindSymbols(WorkerSession& session, uint64_t object, const ModuleFacts& module, uint64_t context_handle,
                 const ContextInfo& context, std::vector<FoundSymbol>* found, std::vector<std::string>* refusals) {
  if (MakeCurrent(session.driver(), context.ref) != CUDA_SUCCESS) return;
  for (const replay::DataSymbol& symbol : module.symbols) {
    if (symbol.literal) continue;
    CUdeviceptr address = 0;
    size_t bytes = 0;
    const CUresult result = session.modules().FindVariable(object, module.library, symbol.name, &address, &bytes);
    // Another architecture's code in the same image may have variables that this one's does not, and a library may have
    // nothing at all for this context's GPU.
    if (result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_NO_BINARY_FOR_GPU) continue;
    if (result != CUDA_SUCCESS) {
      refusals->push_back("variable " + symbol.name + " cannot be found (CUDA error " + std::to_string(int(result)) +
                          ")");
      continue;
    }
    if (address == 0 || bytes == 0) continue;
    if (symbol.managed && IsMirrored(session, object, address)) continue;
    FoundSymbol one;
    one.name = symbol.name;
    one.region.address = address;
    one.region.bytes = bytes;
    one.region.kind = uint32_t(module.library ? RegionKind::kLibrarySymbol : RegionKind::kModuleSymbol);
    one.region.object = object;
    one.region.context = context_handle;
    one.region.device = context.device;
    one.region.module_index = module.index;
    const auto code = module.code.find(context_handle);
    if (!symbol.code_words.empty() && code != module.code.end())
      one.region.code = driverabi::HashOfAddresses(code->second);
    found->push_back(std::move(one));
  }
}

// Adds the heap of a context's kernels.
void FindHeap(WorkerSession& session, uint64_t context_handle, std::vector<FoundSymbol>* found,
              std::vector<std::string>* refusals) {
  const ContextInfo* const context = session.contexts().Find(context_handle);
  if (context == nullptr || MakeCurrent(session.driver(), context->ref) != CUDA_SUCCESS) return;
  FoundSymbol one;
  absl::StatusOr<KernelHeaps::Place> heap = session.heaps().Find(context_handle);
  if (heap.ok() && !session.loaded().software)
    heap = absl::UnimplementedError("this driver keeps a part of what it knows of a heap elsewhere");
  if (!heap.ok()) {
    const std::string problem(heap.status().message());
    for (const auto& [object, module] : session.modules().all()) {
      if (!module.kernels.allocate || (!module.library && module.context != context_handle)) continue;
      refusals->push_back("kernels of " + session.modules().NameOf(object) +
                          " allocate memory, and the heap that it comes from cannot be saved: " + problem);
      return;
    }
    refusals->push_back("the heap of a context's kernels cannot be saved: " + problem);
    return;
  }
  one.region.address = heap->base;
  one.region.bytes = heap->bytes;
  // A green context's kernels have the heap of its primary one's.
  const auto same = [&](const FoundSymbol& other) {
    return other.region.kind == uint32_t(RegionKind::kHeap) && other.region.address == one.region.address &&
           other.region.device == context->device;
  };
  if (std::any_of(found->begin(), found->end(), same)) return;
  one.region.kind = uint32_t(RegionKind::kHeap);
  one.region.object = one.region.context = context_handle;
  one.region.device = context->device;
  found->push_back(std::move(one));
}

// Whether mappings of this session cover all of the physical memory: what others have written where it has none would
// not be saved.
bool IsMappedWhole(WorkerSession& session, uint64_t handle, const PhysicalFacts& memory) {
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  for (const auto& [address, range] : session.ranges().all()) {
    if (range.kind == DeviceRange::kMapped && range.owner == handle) parts.emplace_back(range.offset, range.bytes);
  }
  std::sort(parts.begin(), parts.end());
  uint64_t covered = 0;
  for (const auto& [offset, bytes] : parts) {
    if (offset > covered) return false;
    covered = std::max(covered, offset + bytes);
  }
  return covered >= (memory.bytes != 0 ? memory.bytes : PhysicalBytes(memory.real));
}

// What others are shown, and what is theirs. Others of `together` are saved with this session.
void FindShared(WorkerSession& session, const std::set<uint64_t>& together, std::vector<std::string>* refusals) {
  session.ipc().Refusals(together, refusals);
  for (const auto& [handle, memory] : session.physical()) {
    const bool held = session.ipc().Holds(handle);
    if (held || session.ipc().Users(handle) == 0 || IsMappedWhole(session, handle, memory)) continue;
    refusals->push_back(
        "physical memory (cuMemCreate) that other processes use is not fully mapped in the process that made it");
  }
}

std::vector<FoundSymbol> CollectRegions(WorkerSession& session, std::vector<std::string>* refusals) {
  std::vector<FoundSymbol> found;
  if (HasRandomAddresses()) {
    refusals->push_back(
        "the processes of its GPU server have random addresses (cr-server --randomize-addresses), which a restart "
        "could "
        "not give back");
  }
  for (const auto& [address, range] : session.ranges().all()) {
    if (range.kind == DeviceRange::kSymbol) continue;    // found below, named or not
    if (range.kind == DeviceRange::kManaged) continue;   // the client's process has it
    if (range.kind == DeviceRange::kImported) continue;  // the session that shares it has it in its list
    if (range.kind == DeviceRange::kMapped && session.ipc().Holds(range.owner)) continue;  // likewise
    FoundSymbol one;
    one.region.address = address;
    one.region.bytes = range.bytes;
    one.region.kind = uint32_t(RegionKind::kAllocation);
    one.region.context = ContextOfRange(session, range);
    one.region.device = range.device;
    found.push_back(std::move(one));
  }
  if (!found.empty() && session.contexts().all().empty()) {
    refusals->push_back(
        "memory that outlives its context (cuMemAllocAsync, cuMemMap) is left, but the process has no context in which "
        "it could be copied");
  }
  for (const auto& [object, module] : session.modules().all()) {
    if (!module.problem.empty()) {
      refusals->push_back("a module's variables are unknown, since its image cannot be read: " + module.problem);
      continue;
    }
    if (module.kernels.bare_addresses) {
      refusals->push_back(session.modules().NameOf(object) +
                          " takes addresses of functions in its code that none of its variables holds, so it could not "
                          "be told whether these functions lie at the same addresses after a restart");
    }
    if (module.symbols.empty()) continue;
    if (!module.library) {
      if (const ContextInfo* const context = session.contexts().Find(module.context)) {
        FindSymbols(session, object, module, module.context, *context, &found, refusals);
      }
      continue;
    }
    // A library's variables exist once in each context.
    for (const auto& [handle, context] : session.contexts().all()) {
      FindSymbols(session, object, module, handle, context, &found, refusals);
    }
  }
  const auto add_array = [&](const HandleMap::Entry& entry) {
    const absl::StatusOr<ArrayLayout> layout = DescribeArray(session, entry.handle);
    if (!layout.ok()) {
      refusals->emplace_back(layout.status().message());
      return;
    }
    if (layout->bytes == 0) return;
    FoundSymbol one;
    one.region.bytes = layout->bytes;
    one.region.kind = uint32_t(RegionKind::kArray);
    one.region.object = entry.handle;
    one.region.context = layout->context;
    one.region.device = layout->device;
    found.push_back(std::move(one));
  };
  session.handles().ForEach(Kind::kArray, add_array);
  session.handles().ForEach(Kind::kMipmappedArray, add_array);
  for (const auto& [context, heap] : session.heaps().all()) FindHeap(session, context, &found, refusals);
  MakeCurrent(session.driver(), session.contexts().current_ref());
  for (const auto& [handle, memory] : session.physical()) {
    if (memory.mappings == 0 && memory.used && !memory.released && !session.ipc().Holds(handle)) {
      refusals->push_back(
          "physical memory (cuMemCreate) that was mapped and is not any more: its contents have no address");
    }
  }
  if (CapturesInProgress() != 0) refusals->push_back("a stream is being captured into a graph");
  std::stable_sort(found.begin(), found.end(),
                   [](const FoundSymbol& a, const FoundSymbol& b) { return a.region.address < b.region.address; });
  // A green context's variables may be its primary context's.
  found.erase(std::unique(found.begin(), found.end(),
                          [](const FoundSymbol& a, const FoundSymbol& b) {
                            return a.region.address == b.region.address && a.region.kind == b.region.kind &&
                                   a.region.object == b.region.object && a.name == b.name;
                          }),
              found.end());
  return found;
}

// Lets copies reach what the application has mapped and not made (quite) accessible, or not yet: a checkpoint may come
// in between. Afterwards it stays accessible, which only programs notice that count on a fault.
CUresult MakeAccessible(WorkerSession& session, uint64_t address, uint64_t bytes, bool write) {
  const DriverTable& driver = session.driver();
  const auto& all = session.ranges().all();
  auto it = all.upper_bound(address);
  if (it != all.begin()) --it;
  for (; it != all.end() && it->first < address + bytes; ++it) {
    if (it->second.kind != DeviceRange::kMapped || it->first + it->second.bytes <= address) continue;
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = it->second.device;
    unsigned long long flags = 0;
    CUresult result = driver.cuMemGetAccess(&flags, &access.location, it->first);
    const bool enough =
        flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE || (flags == CU_MEM_ACCESS_FLAGS_PROT_READ && !write);
    if (result == CUDA_SUCCESS && !enough) {
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      result = driver.cuMemSetAccess(it->first, it->second.bytes, &access, 1);
    }
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

// Where the bytes of a read or write are. `context` is the one in which they are to be copied.
template <typename In>
CUresult Resolve(WorkerSession& session, const In& in, CUdeviceptr* address, ContextRef* context) {
  *context = ContextFor(session, in.context);
  if (context->id == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (in.object == 0) {
    *address = in.address;
    if (!session.OwnsDeviceRange(in.address, in.bytes)) return CUDA_ERROR_INVALID_VALUE;
    // What the application has mapped is of no context; other GPUs' need not reach it.
    if (in.context == 0) {
      const ContextRef own = session.contexts().On(session.ranges().Find(in.address)->device);
      if (own.id != 0) *context = own;
    }
    return MakeAccessible(session, in.address, in.bytes, std::is_same_v<In, wire::OpWriteMemory_Request>);
  }
  const ModuleFacts* const module = session.modules().Find(in.object);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  CUdeviceptr start = 0;
  size_t size = 0;
  CUresult result = MakeCurrent(session.driver(), *context);
  if (result == CUDA_SUCCESS) {
    result = session.modules().FindVariable(in.object, module->library, std::string(in.symbol), &start, &size);
  }
  MakeCurrent(session.driver(), session.contexts().current_ref());
  if (result != CUDA_SUCCESS) return result;
  if (in.address > size || in.bytes > size - in.address) return CUDA_ERROR_INVALID_VALUE;
  *address = start + in.address;
  return CUDA_SUCCESS;
}

// The same for an array's contents.
CUresult ResolveArray(WorkerSession& session, uint64_t handle, ArrayLayout* layout, ContextRef* context) {
  absl::StatusOr<ArrayLayout> described = DescribeArray(session, handle);
  MakeCurrent(session.driver(), session.contexts().current_ref());
  if (!described.ok()) return CUDA_ERROR_INVALID_HANDLE;
  *layout = *std::move(described);
  *context = ContextFor(session, layout->context);
  return context->id == 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

// The same for the heap of a context's kernels, which is looked for if nobody has used it yet. The context stays
// current.
CUresult ResolveHeap(WorkerSession& session, uint64_t handle, uint64_t offset, uint64_t bytes, CUdeviceptr* address,
                     ContextRef* context) {
  const ContextInfo* const info = session.contexts().Find(handle);
  if (info == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (offset % sizeof(uint64_t) != 0 || bytes % sizeof(uint64_t) != 0) return CUDA_ERROR_INVALID_VALUE;
  *context = info->ref;
  if (const CUresult result = MakeCurrent(session.driver(), *context); result != CUDA_SUCCESS) return result;
  session.heaps().Begin(handle);
  const absl::StatusOr<KernelHeaps::Place> heap = session.heaps().Find(handle);
  if (!heap.ok()) {
    logging::Error("the heap of a context's kernels: {}", std::string(heap.status().message()));
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (offset > heap->bytes || bytes > heap->bytes - offset) return CUDA_ERROR_INVALID_VALUE;
  *address = heap->base + offset;
  return CUDA_SUCCESS;
}

// Most streams that an answer names.
constexpr size_t kMostBusy = 4096;

// Which streams have work that is not done. Those that were destroyed with work in them are not among them.
void FindWork(WorkerSession& session, wire::OpDrain_Reply* out) {
  const DriverTable& driver = session.driver();
  const auto look = [&](uint64_t handle, uint64_t context, CUstream stream) {
    if (out->busy_streams.size() == kMostBusy || driver.cuStreamQuery(stream) != CUDA_ERROR_NOT_READY) return;
    out->busy_streams.push_back(handle);
    out->busy_contexts.push_back(context);
  };
  for (const auto& [handle, context] : session.contexts().all()) {
    if (MakeCurrent(driver, context.ref) == CUDA_SUCCESS) look(handle, handle, CU_STREAM_LEGACY);
  }
  session.handles().ForEach(Kind::kStream, [&](const HandleMap::Entry& entry) {
    // A stream of a green context needs no other one to be current.
    const ContextInfo* const context = session.contexts().Find(entry.parent);
    if (context != nullptr && MakeCurrent(driver, context->ref) != CUDA_SUCCESS) return;
    look(entry.handle, entry.parent, reinterpret_cast<CUstream>(entry.real));
  });
  MakeCurrent(driver, session.contexts().current_ref());
}

// How long the next requests wait at most for the work that has begun: several steps of most jobs.
constexpr auto kIdleWait = std::chrono::milliseconds(50);
constexpr auto kIdleLook = std::chrono::microseconds(200);

// Whether all work is done, now or soon. A job that is never idle by itself becomes so here, since its next requests
// wait. Work that needs one of those ends later.
bool BecomesIdle(WorkerSession& session) {
  for (const auto end = Now() + kIdleWait;; std::this_thread::sleep_for(kIdleLook)) {
    wire::OpDrain_Reply work;
    FindWork(session, &work);
    if (work.busy_streams.empty() && session.host_functions().waiting() == 0) return true;
    if (Now() > end) return false;
  }
}

}  // namespace

CUresult OpDrain(WorkerSession& session, const Request&, const wire::OpDrain_Request& in, wire::OpDrain_Reply* now,
                 ReplyBuilder* reply) {
  const uint32_t captures = uint32_t(CapturesInProgress());
  if (in.at_once) {
    now->captures = captures;
    now->host_functions = uint32_t(session.host_functions().waiting());
    now->held_bytes = session.arena().used_bytes();
    // A question to a stream would break a capture.
    if (captures == 0) FindWork(session, now);
    // Only a wait shows other work, such as that of a stream that was destroyed. One at a time: none is ever given up.
    now->busy =
        captures != 0 || !now->busy_streams.empty() || now->host_functions != 0 || session.work().draining().load();
    if (now->busy || !in.be_sure) {
      now->Encode(&reply->message);
      return CUDA_SUCCESS;
    }
    session.work().draining() = true;
  }
  std::vector<ContextRef> contexts;
  for (const auto& [handle, context] : session.contexts().all()) contexts.push_back(context.ref);
  // Streams of a green context are its own; its CUcontext waits for them, whether the client has asked for that or not.
  std::vector<CUgreenCtx> greens;
  session.handles().ForEach(Kind::kGreenContext, [&greens](const HandleMap::Entry& entry) {
    greens.push_back(reinterpret_cast<CUgreenCtx>(entry.real));
  });
  const DriverTable* const driver = &session.driver();
  std::atomic<bool>* const draining = in.at_once ? &session.work().draining() : nullptr;
  // Contents of memory that nobody waits for may still be on their way to the driver (OpWriteMemory).
  session.answers().DeferBehindAll(reply,
                                   [driver, contexts, greens, captures, draining, out = *now](Answer* answer) mutable {
                                     struct End {
                                       std::atomic<bool>* draining;
                                       ~End() {
                                         if (draining != nullptr) *draining = false;
                                       }
                                     } end{draining};
                                     out.captures = captures;
                                     CUresult first = CUDA_SUCCESS;
                                     // Waiting for a context would break the captures in it.
                                     for (size_t i = 0; captures == 0 && i < contexts.size(); ++i) {
                                       CUresult result = MakeCurrent(*driver, contexts[i]);
                                       if (result == CUDA_SUCCESS) result = driver->cuCtxSynchronize();
                                       if (result != CUDA_SUCCESS && first == CUDA_SUCCESS) first = result;
                                     }
                                     for (size_t i = 0; captures == 0 && i < greens.size(); ++i) {
                                       CUcontext context = nullptr;
                                       CUresult result = driver->cuCtxFromGreenCtx(&context, greens[i]);
                                       if (result == CUDA_SUCCESS) result = driver->cuCtxSetCurrent(context);
                                       ForgetCurrent();
                                       if (result == CUDA_SUCCESS) result = driver->cuCtxSynchronize();
                                       if (result != CUDA_SUCCESS && first == CUDA_SUCCESS) first = result;
                                     }
                                     MakeCurrent(*driver, {});
                                     out.sticky_error = uint32_t(first);
                                     out.Encode(&answer->message);
                                     return captures != 0 ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : first;
                                   });
  return CUDA_SUCCESS;
}

CUresult OpRegions(WorkerSession& session, const Request&, const wire::OpRegions_Request& in,
                   wire::OpRegions_Reply* out, ReplyBuilder* reply) {
  // Memory that streams have freed is not to be saved; they are idle by now.
  if (CapturesInProgress() == 0) session.frees().Collect(false);
  std::vector<std::string> refusals;
  const std::vector<FoundSymbol> all = CollectRegions(session, &refusals);
  if (!in.replayed) FindShared(session, {in.sessions.begin(), in.sessions.end()}, &refusals);
  size_t bytes = 0;
  for (const std::string& refusal : refusals) {
    if (bytes > kReplyBytes / 2) break;
    bytes += refusal.size() + 8;
    out->refusals.push_back(refusal);
  }
  for (uint64_t i = in.after; i < all.size(); ++i) {
    if (bytes > kReplyBytes) {
      out->more = true;
      break;
    }
    wire::Region region = all[i].region;
    region.symbol = all[i].name;
    bytes += 80 + region.symbol.size();
    out->regions.push_back(region);
  }
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult OpReadMemory(WorkerSession& session, const Request&, const wire::OpReadMemory_Request& in,
                      wire::OpReadMemory_Reply*, ReplyBuilder* reply) {
  if (in.bytes == 0) return CUDA_SUCCESS;
  if (in.bytes > kMaxRead) return CUDA_ERROR_INVALID_VALUE;
  CUdeviceptr address;
  ContextRef context;
  if (IsArrayHandle(in.object)) {
    ArrayLayout layout;
    if (const CUresult result = ResolveArray(session, in.object, &layout, &context); result != CUDA_SUCCESS)
      return result;
    const DriverTable* const driver = &session.driver();
    StagingPool* const staging = &session.staging();
    session.answers().DeferIn(context, reply,
                              [driver, staging, layout, at = in.address, bytes = size_t(in.bytes)](Answer* answer) {
                                std::shared_ptr<char> buffer = staging->Take(bytes);
                                if (!buffer) return CUDA_ERROR_OUT_OF_MEMORY;
                                const CUresult result = CopyArrayBytes(*driver, layout, at, buffer.get(), bytes, false);
                                if (result != CUDA_SUCCESS) return result;
                                answer->view = {buffer.get(), bytes};
                                answer->keeper = std::move(buffer);
                                return CUDA_SUCCESS;
                              });
    return CUDA_SUCCESS;
  }
  if (IsHeap(in.object)) {
    const CUresult result = ResolveHeap(session, in.object, in.address, in.bytes, &address, &context);
    MakeCurrent(session.driver(), session.contexts().current_ref());
    if (result != CUDA_SUCCESS) return result;
    const DriverTable* const driver = &session.driver();
    StagingPool* const staging = &session.staging();
    const CUfunction copier = session.heaps().copier(in.object);
    session.answers().DeferIn(
        context, reply, [driver, staging, copier, address, bytes = size_t(in.bytes)](Answer* answer) {
          std::shared_ptr<char> buffer = staging->Take(bytes);
          if (!buffer) return CUDA_ERROR_OUT_OF_MEMORY;
          const CUresult result = KernelHeaps::Copy(*driver, copier, address, buffer.get(), bytes, false);
          if (result != CUDA_SUCCESS) return result;
          answer->view = {buffer.get(), bytes};
          answer->keeper = std::move(buffer);
          return CUDA_SUCCESS;
        });
    return CUDA_SUCCESS;
  }
  if (const CUresult result = Resolve(session, in, &address, &context); result != CUDA_SUCCESS) return result;
  const DriverTable* const driver = &session.driver();
  StagingPool* const staging = &session.staging();
  session.answers().DeferIn(context, reply, [driver, staging, address, bytes = size_t(in.bytes)](Answer* answer) {
    std::shared_ptr<char> buffer = staging->Take(bytes);
    if (!buffer) return CUDA_ERROR_OUT_OF_MEMORY;
    const CUresult result = driver->cuMemcpyDtoH_v2(buffer.get(), address, bytes);
    if (result != CUDA_SUCCESS) return result;
    answer->view = {buffer.get(), bytes};
    answer->keeper = std::move(buffer);
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

CUresult OpWriteMemory(WorkerSession& session, const Request& request, const wire::OpWriteMemory_Request& in,
                       wire::OpWriteMemory_Reply*, ReplyBuilder*) {
  if (request.payload.size() != in.bytes) return kMalformedRequest;
  if (in.bytes == 0) return CUDA_SUCCESS;
  CUdeviceptr address;
  ContextRef context;
  if (IsArrayHandle(in.object)) {
    ArrayLayout layout;
    if (const CUresult result = ResolveArray(session, in.object, &layout, &context); result != CUDA_SUCCESS)
      return result;
    std::shared_ptr<char> buffer = session.staging().Take(in.bytes);
    if (!buffer) return CUDA_ERROR_OUT_OF_MEMORY;
    request.payload.CopyTo(buffer.get());
    CUresult result = MakeCurrent(session.driver(), context);
    if (result == CUDA_SUCCESS) {
      result = CopyArrayBytes(session.driver(), layout, in.address, buffer.get(), in.bytes, true);
    }
    MakeCurrent(session.driver(), session.contexts().current_ref());
    return result;
  }
  if (IsHeap(in.object)) {
    CUresult result = ResolveHeap(session, in.object, in.address, in.bytes, &address, &context);
    std::shared_ptr<char> buffer = result == CUDA_SUCCESS ? session.staging().Take(in.bytes) : nullptr;
    if (result == CUDA_SUCCESS && !buffer) result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
      request.payload.CopyTo(buffer.get());
      const CUfunction copier = session.heaps().copier(in.object);
      result = KernelHeaps::Copy(session.driver(), copier, address, buffer.get(), in.bytes, true);
    }
    MakeCurrent(session.driver(), session.contexts().current_ref());
    return result;
  }
  if (const CUresult result = Resolve(session, in, &address, &context); result != CUDA_SUCCESS) return result;
  const DriverTable* const driver = &session.driver();
  if (const CUresult result = MakeCurrent(*driver, context); result != CUDA_SUCCESS) return result;
  // In the default stream, so reads and Drain come after it.
  const CUresult result = session.uploads().Copy(context, nullptr, request.payload, [&](const void* source) {
    return driver->cuMemcpyHtoDAsync_v2(address, source, in.bytes, nullptr);
  });
  MakeCurrent(*driver, session.contexts().current_ref());
  return result;
}

CUresult OpHashMemory(WorkerSession& session, const Request&, const wire::OpHashMemory_Request& in,
                      wire::OpHashMemory_Reply*, ReplyBuilder* reply) {
  if (in.chunk_bytes == 0 || in.chunk_bytes % kHashGrain != 0) return CUDA_ERROR_INVALID_VALUE;
  // Loading code and making events could break a capture.
  if (CapturesInProgress() != 0) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  std::vector<SideWork::Piece> pieces;
  ContextRef context;
  for (const wire::Region& region : in.regions) {
    if (region.bytes == 0) continue;
    if (IsArrayHandle(region.object) || IsHeap(region.object)) return CUDA_ERROR_NOT_SUPPORTED;
    wire::OpReadMemory_Request place;
    place.address = region.object == 0 ? region.address : 0;
    place.bytes = region.bytes;
    place.object = region.object;
    place.symbol = region.symbol;
    place.context = region.context;
    CUdeviceptr address;
    ContextRef of_this;
    if (const CUresult result = Resolve(session, place, &address, &of_this); result != CUDA_SUCCESS) return result;
    if (!pieces.empty() && of_this.id != context.id) return CUDA_ERROR_INVALID_CONTEXT;
    context = of_this;
    if ((region.bytes - 1) / in.chunk_bytes >= kMostHashes - pieces.size()) return CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = 0; at < region.bytes; at += in.chunk_bytes) {
      pieces.push_back({address + at, std::min(in.chunk_bytes, region.bytes - at)});
    }
  }
  if (pieces.empty()) return CUDA_SUCCESS;
  // Loading code may wait for kernels, and these for requests that come behind this one: so not while there is work.
  if (session.side_work().MustLoad(context.id) && !BecomesIdle(session)) return CUDA_ERROR_NOT_READY;
  std::shared_ptr<char> hashes;
  SideWork::Wait wait;
  CUresult result = MakeCurrent(session.driver(), context);
  if (result == CUDA_SUCCESS)
    result = session.side_work().Hash(context.id, pieces, std::max(in.every, 1u), &hashes, &wait);
  MakeCurrent(session.driver(), session.contexts().current_ref());
  if (result != CUDA_SUCCESS) return result;
  session.answers().DeferSide(context, reply,
                              [hashes, wait, bytes = pieces.size() * sizeof(ChunkHash)](Answer* answer) {
                                const CUresult state = wait();
                                answer->view = {hashes.get(), state == CUDA_SUCCESS ? bytes : 0};
                                answer->keeper = hashes;
                                return state;
                              });
  return CUDA_SUCCESS;
}

CUresult OpPeekMemory(WorkerSession& session, const Request&, const wire::OpPeekMemory_Request& in,
                      wire::OpPeekMemory_Reply*, ReplyBuilder* reply) {
  if (in.bytes == 0) return CUDA_SUCCESS;
  if (CapturesInProgress() != 0) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  CUdeviceptr address = in.address;
  ContextRef context;
  SnapshotMemory& snapshots = SnapshotMemory::Get();
  int device = 0;
  const bool from_snapshot = snapshots.Owns(in.address, in.bytes, &device);
  if (from_snapshot) {
    context = session.contexts().On(device);
    if (context.id == 0) return CUDA_ERROR_INVALID_CONTEXT;
  } else {
    wire::OpReadMemory_Request place;
    place.address = in.address;
    place.bytes = in.bytes;
    place.context = in.context;
    if (const CUresult result = Resolve(session, place, &address, &context); result != CUDA_SUCCESS) return result;
  }
  const bool to_snapshot = !from_snapshot && snapshots.Owns(in.to, in.bytes, &device);
  std::shared_ptr<char> buffer;
  if (in.to == 0) {
    if (in.bytes > kMaxPayloadBytes) return CUDA_ERROR_INVALID_VALUE;
    buffer = session.staging().Take(in.bytes);
    if (!buffer) return CUDA_ERROR_OUT_OF_MEMORY;
  } else if (!to_snapshot && !session.host_ranges().Owns(in.to, in.bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  SideWork::Wait wait;
  void* const to = buffer ? buffer.get() : reinterpret_cast<void*>(in.to);
  // A snapshot cannot go while this runs.
  const auto copy = [&] { return session.side_work().CopyOut(context.id, {address, in.bytes}, to, &wait); };
  bool copied = false;
  CUresult result = MakeCurrent(session.driver(), context);
  if (result == CUDA_SUCCESS) {
    result = to_snapshot     ? snapshots.Fill(in.to, in.bytes, copy)
             : from_snapshot ? snapshots.Read(in.address, in.bytes, to, copy, &copied)
                             : session.side_work().CopyOutInWait(context.id, {address, in.bytes}, to, &wait);
  }
  MakeCurrent(session.driver(), session.contexts().current_ref());
  if (result != CUDA_SUCCESS) return result;
  if (copied) {
    if (buffer) reply->payload.assign(buffer.get(), in.bytes);
    snapshots.WasRead(in.address, in.bytes);
    return CUDA_SUCCESS;
  }
  session.answers().DeferSide(context, reply,
                              [buffer, wait, from_snapshot, at = in.address, bytes = in.bytes](Answer* answer) {
                                const CUresult state = wait();
                                if (state == CUDA_SUCCESS && from_snapshot) SnapshotMemory::Get().WasRead(at, bytes);
                                if (buffer) answer->view = {buffer.get(), state == CUDA_SUCCESS ? bytes : 0};
                                answer->keeper = buffer;
                                return state;
                              });
  return CUDA_SUCCESS;
}

CUresult OpFetchMemory(WorkerSession& session, const Request&, const wire::OpFetchMemory_Request& in,
                       wire::OpFetchMemory_Reply*, ReplyBuilder* reply) {
  if (CapturesInProgress() != 0) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  wire::OpWriteMemory_Request place;
  place.address = in.address;
  place.bytes = in.bytes;
  place.context = in.context;
  CUdeviceptr address;
  ContextRef context;
  CUresult result = Resolve(session, place, &address, &context);
  if (result != CUDA_SUCCESS) return result;
  MappedOffer offer;
  SideWork::Wait wait;
  const DriverTable* const driver = &session.driver();
  Ipc* const ipc = &session.ipc();
  result = MakeCurrent(*driver, context);
  if (result == CUDA_SUCCESS) result = MapOffer(session, in.key, &offer);
  if (result == CUDA_SUCCESS) {
    result = offer.bytes != in.bytes
                 ? CUDA_ERROR_INVALID_VALUE
                 : session.side_work().CopyBetween(context.id, {offer.address, offer.bytes}, address, &wait);
    if (result != CUDA_SUCCESS) UnmapOffer(*driver, ipc, offer);
  }
  MakeCurrent(*driver, session.contexts().current_ref());
  if (result != CUDA_SUCCESS) return result;
  session.answers().DeferSide(context, reply, [driver, ipc, offer, wait](Answer*) {
    const CUresult state = wait();
    UnmapOffer(*driver, ipc, offer);
    return state;
  });
  return CUDA_SUCCESS;
}

CUresult OpModuleGlobals(WorkerSession& session, const Request&, const wire::OpModuleGlobals_Request& in,
                         wire::OpModuleGlobals_Reply* out, ReplyBuilder* reply) {
  const ModuleFacts* const found = session.modules().Find(in.object);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const ModuleFacts& module = *found;
  const ContextRef context = ContextFor(session, module.context);
  if (context.id == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (const CUresult result = MakeCurrent(session.driver(), context); result != CUDA_SUCCESS) return result;
  size_t bytes = 0;
  for (const replay::DataSymbol& symbol : module.symbols) {
    if (symbol.literal) continue;
    CUdeviceptr address = 0;
    size_t size = 0;
    if (session.modules().FindVariable(in.object, module.library, symbol.name, &address, &size) != CUDA_SUCCESS)
      continue;
    bytes += symbol.name.size() + 40;
    if (bytes > kReplyBytes) break;
    wire::Global global;
    global.name = symbol.name;
    global.address = address;
    global.bytes = size;
    global.constant = symbol.constant;
    out->globals.push_back(global);
  }
  MakeCurrent(session.driver(), session.contexts().current_ref());
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
