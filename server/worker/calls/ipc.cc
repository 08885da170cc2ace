// SPDX-License-Identifier: Apache-2.0
// Memory, events and pools that sessions of this server show each other (server/worker/session/ipc.h has the way
// between them).

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include "proto/codec/memory.gen.h"
#include "proto/codec/operations.gen.h"
#include "proto/codec/pool.gen.h"
#include "proto/codec/virtual.gen.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/calls/offers.h"
#include "server/worker/calls/work.h"
#include "server/worker/memory/side_work.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

constexpr CUmemAllocationHandleType kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

void SetDevice(const WorkerSession& session, int device, IpcFacts* facts) {
  const std::string& uuid = session.loaded().devices[size_t(device)].uuid;
  std::memcpy(facts->device.data(), uuid.data(), std::min(uuid.size(), facts->device.size()));
}

int FindDevice(const WorkerSession& session, const IpcFacts& facts) {
  const auto& devices = session.loaded().devices;
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].uuid == std::string(facts.device.data(), facts.device.size())) return int(i);
  }
  return -1;
}

// How long a replay waits for what another session has to replay first: its modules may be large.
constexpr int kPatienceSeconds = 300;

// None in the first run: there the other session has shared by the time that its key is here.
std::chrono::milliseconds PatienceOf(const Request& request) {
  if (!request.replay()) return std::chrono::milliseconds(0);
  const char* const seconds = std::getenv("CUDA_REMOTE_SHARING_PATIENCE");
  return std::chrono::seconds(seconds != nullptr ? std::atoi(seconds) : kPatienceSeconds);
}

// What a replay says about opening in vain.
CUresult NotOpened(const Request& request, const char* what, CUresult result, ReplyBuilder* reply) {
  if (result == CUDA_SUCCESS || !request.replay()) return result;
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(PatienceOf(request)).count();
  if (result == CUDA_ERROR_INVALID_HANDLE) {
    reply->message = std::string("waited ") + std::to_string(waited) + " s for the session that shared this " + what +
                     "; no session that is replayed on this server with this one has shared it";
    return CUDA_ERROR_TIMEOUT;
  }
  if (result == CUDA_ERROR_OPERATING_SYSTEM) {
    reply->message = std::string("the session that shares this ") + what + " does not answer";
  }
  return result;
}

// A replay keeps the key.
std::string KeyFor(const Request& request, std::string_view key) {
  return request.replay() ? std::string(key) : std::string();
}

// Blocks in one message. Of offered ones, each is a descriptor until it is taken.
constexpr size_t kMostOffered = 64, kMostKept = 4096;
// The job's calls wait meanwhile.
constexpr size_t kMostExported = 4;

// Some context is current while it lives: drivers may want one to import memory, and before a replay there is none.
class AnyCurrent {
 public:
  explicit AnyCurrent(WorkerSession& session) : worker_(session) {
    if (const ContextRef context = session.contexts().Any(); context.id != 0) {
      MakeCurrent(session.driver(), context);
      return;
    }
    CUcontext primary = nullptr;  // of the first GPU, since it exists already
    retained_ = session.driver().cuDevicePrimaryCtxRetain(&primary, 0) == CUDA_SUCCESS;
    if (retained_) session.driver().cuCtxSetCurrent(primary);
    ForgetCurrent();
  }
  ~AnyCurrent() {
    MakeCurrent(worker_.driver(), worker_.contexts().current_ref());
    if (retained_) worker_.driver().cuDevicePrimaryCtxRelease_v2(0);
  }
  AnyCurrent(const AnyCurrent&) = delete;
  AnyCurrent& operator=(const AnyCurrent&) = delete;

 private:
  WorkerSession& worker_;
  bool retained_ = false;
};

// The key of an allocation of the arena. The whole of what lies behind it is shown, as natively: small ones have
// neighbours. *key: KeyFor.
CUresult ShareAllocation(WorkerSession& session, IpcKind kind, uint64_t address, std::string* key) {
  // The driver natively takes any address in an allocation and shows all of it.
  auto it = session.ranges().all().upper_bound(address);
  if (it == session.ranges().all().begin()) return CUDA_ERROR_INVALID_VALUE;
  --it;
  const DeviceRange& range = it->second;
  const auto wanted = kind == IpcKind::kMemory ? DeviceRange::kAllocation : DeviceRange::kStreamOrdered;
  if (address - it->first >= range.bytes || range.kind != wanted) return CUDA_ERROR_INVALID_VALUE;
  if (session.ipc().Shared(kind, it->first, key)) return CUDA_SUCCESS;
  IpcFacts facts;
  uint64_t start = 0;
  if (!session.arena().Backing(it->first, &start, &facts.mapping_bytes)) return CUDA_ERROR_INVALID_VALUE;
  facts.offset = it->first - start;
  facts.bytes = range.bytes;
  SetDevice(session, range.device, &facts);
  int fd = -1;
  if (const CUresult result = session.arena().Export(start, &fd); result != CUDA_SUCCESS) return result;
  return session.ipc().Share(kind, it->first, facts, fd, key);
}

// At `at` if that is not 0.
CUresult Reserve(WorkerSession& session, uint64_t bytes, uint64_t at, CUdeviceptr* address) {
  AddressSpace* const space = session.ReservationSpace();
  if (space == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  if (at != 0) {
    *address = at;
    return space->TakeAt(at, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  }
  *address = space->Take(bytes, 0);
  return *address != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// Maps memory of another session for `devices`, so that the allocation is at `at` if that is not 0. Does not take `fd`
// over.
CUresult MapFor(WorkerSession& session, const IpcFacts& facts, int fd, uint64_t at, const std::vector<int>& devices,
                CUdeviceptr* mapping) {
  if ((at != 0 && (at < facts.offset || (at - facts.offset) % DeviceArena::kPage != 0)) || fd < 0 || facts.bytes == 0 ||
      facts.mapping_bytes == 0 || facts.mapping_bytes > kReservationBytes ||
      facts.mapping_bytes % DeviceArena::kPage != 0 || facts.offset >= facts.mapping_bytes ||
      facts.bytes > facts.mapping_bytes - facts.offset) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  const DriverTable& driver = session.driver();
  CUmemGenericAllocationHandle physical = 0;
  CUresult result =
      driver.cuMemImportFromShareableHandle(&physical, reinterpret_cast<void*>(intptr_t(fd)), kDescriptor);
  if (result != CUDA_SUCCESS) return result;
  result = Reserve(session, facts.mapping_bytes, at != 0 ? at - facts.offset : 0, mapping);
  if (result != CUDA_SUCCESS) {
    driver.cuMemRelease(physical);
    return result;
  }
  result = driver.cuMemMap(*mapping, facts.mapping_bytes, 0, physical, 0);
  driver.cuMemRelease(physical);  // the mapping keeps it
  if (result == CUDA_SUCCESS) {
    std::vector<CUmemAccessDesc> access(devices.size());
    for (size_t i = 0; i < devices.size(); ++i) {
      access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access[i].location.id = devices[i];
      access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    result = driver.cuMemSetAccess(*mapping, facts.mapping_bytes, access.data(), access.size());
    if (result != CUDA_SUCCESS) driver.cuMemUnmap(*mapping, facts.mapping_bytes);
  }
  if (result != CUDA_SUCCESS) session.ReservationSpace()->Give(*mapping, facts.mapping_bytes);
  return result;
}

// The same for what the application opens, on the GPU that has it. The GPU of the current context reaches it, too; in a
// replay without one, so do all that can.
CUresult MapShared(WorkerSession& session, const IpcFacts& facts, int fd, uint64_t at, IpcImport* import, int* device) {
  *device = FindDevice(session, facts);
  if (*device < 0) return CUDA_ERROR_INVALID_DEVICE;
  std::vector<int> devices = {*device};
  const ContextInfo* const current = session.contexts().Find(session.CurrentContext());
  if (current != nullptr && current->device != *device) devices.push_back(current->device);
  int count = 0;
  if (current == nullptr) session.driver().cuDeviceGetCount(&count);
  for (int other = 0; other < count; ++other) {
    int can = 0;
    if (other == *device) continue;
    if (session.driver().cuDeviceCanAccessPeer(&can, other, *device) == CUDA_SUCCESS && can) devices.push_back(other);
  }
  CUdeviceptr mapping = 0;
  const CUresult result = MapFor(session, facts, fd, at, devices, &mapping);
  if (result != CUDA_SUCCESS) return result;
  import->address = mapping + facts.offset;
  import->mapping = mapping;
  import->mapping_bytes = facts.mapping_bytes;
  return CUDA_SUCCESS;
}

// Either way to open.
template <typename In, typename Out>
CUresult OpenMemory(WorkerSession& session, IpcKind kind, const Request& request, const In& in, Out* out,
                    ReplyBuilder* reply) {
  // Memory of a pool outlives the context in which it was opened: its record names none.
  const bool of_pool = kind == IpcKind::kPoolMemory;
  std::optional<AnyCurrent> borrowed;
  if (session.contexts().current_ref().id == 0) {
    if (!of_pool || !request.replay()) return CUDA_ERROR_INVALID_CONTEXT;
    borrowed.emplace(session);
  }
  auto& imports = session.ipc().imports();
  auto it = imports.find(std::string(in.key));
  if (it == imports.end()) {
    IpcFacts facts;
    int fd = -1, device = -1;
    IpcImport import;
    CUresult result =
        session.ipc().Open(in.key, kind, kind == IpcKind::kMemory, PatienceOf(request), &facts, &fd, &import.use);
    if (result != CUDA_SUCCESS) return NotOpened(request, "memory", result, reply);
    result = MapShared(session, facts, fd, request.replay() ? in.at : 0, &import, &device);
    if (fd >= 0) close(fd);
    if (result != CUDA_SUCCESS) return result;
    import.context = of_pool ? 0 : session.CurrentContext();
    DeviceRange range;
    range.kind = DeviceRange::kImported;
    range.bytes = facts.bytes;
    range.device = device;
    range.context = import.context;
    session.ranges().Insert(import.address, range);
    it = imports.emplace(std::string(in.key), import).first;
  }
  const DeviceRange* const range = session.ranges().At(it->second.address);
  if (range == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  out->address = it->second.address;
  out->bytes = range->bytes;
  out->device = range->device;
  out->opened = ++it->second.references;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult MapOffer(WorkerSession& session, std::string_view key, MappedOffer* offer) {
  IpcFacts facts;
  int fd = -1;
  IpcUse use;
  CUresult result = session.ipc().Open(key, IpcKind::kOffer, true, std::chrono::milliseconds(0), &facts, &fd, &use);
  if (result != CUDA_SUCCESS) return result;
  use.connection->Close();
  int device = -1;
  CUdeviceptr mapping = 0;
  result = session.driver().cuCtxGetDevice(&device);
  if (result == CUDA_SUCCESS) result = MapFor(session, facts, fd, 0, {device}, &mapping);
  if (fd >= 0) close(fd);
  if (result != CUDA_SUCCESS) return result;
  *offer = {mapping + facts.offset, facts.bytes, mapping, facts.mapping_bytes};
  return CUDA_SUCCESS;
}

void UnmapOffer(const DriverTable& driver, Ipc* ipc, const MappedOffer& offer) {
  // Addresses that could not be unmapped are not used again.
  if (UnmapAtOnce(driver, offer.mapping, offer.mapping_bytes) == CUDA_SUCCESS) {
    ipc->Return(offer.mapping, offer.mapping_bytes);
  }
}

CUresult OpOfferMemory(WorkerSession& session, const Request&, const wire::OpOfferMemory_Request& in,
                       wire::OpOfferMemory_Reply* out, ReplyBuilder* reply) {
  const DeviceRange* const range = session.ranges().At(in.address);
  if (range == nullptr) return CUDA_ERROR_INVALID_VALUE;
  IpcFacts facts;
  facts.bytes = range->bytes;
  uint64_t start = in.address;
  if (range->kind == DeviceRange::kMapped) {
    const auto memory = session.physical().find(range->owner);
    if (memory == session.physical().end()) return CUDA_ERROR_INVALID_VALUE;
    facts.offset = range->offset;
    facts.mapping_bytes = memory->second.bytes != 0 ? memory->second.bytes : PhysicalBytes(memory->second.real);
  } else if (range->kind == DeviceRange::kAllocation || range->kind == DeviceRange::kStreamOrdered) {
    if (!session.arena().Backing(in.address, &start, &facts.mapping_bytes)) return CUDA_ERROR_INVALID_VALUE;
    facts.offset = in.address - start;
  } else {
    return CUDA_ERROR_INVALID_VALUE;
  }
  int fd = -1;
  CUresult result = session.arena().Export(start, &fd);
  if (result != CUDA_SUCCESS) return result;
  std::string key;
  result = session.ipc().Offer(in.address, facts, fd, &key);
  if (result != CUDA_SUCCESS) return result;
  out->key = key;
  out->bytes = facts.bytes;
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult OpOfferBlocks(WorkerSession& session, const Request&, const wire::OpOfferBlocks_Request& in,
                       wire::OpOfferBlocks_Reply* out, ReplyBuilder* reply) {
  const std::vector<DeviceArena::Block> blocks = session.arena().LiveBlocks(in.after, kMostOffered);
  std::vector<std::string> keys(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const DeviceArena::Block& block = blocks[i];
    int fd = -1;
    if (session.arena().Export(block.address, &fd) != CUDA_SUCCESS) continue;
    IpcFacts facts;
    facts.mapping_bytes = facts.bytes = block.bytes;
    SetDevice(session, block.device, &facts);
    if (session.ipc().Offer(block.address, facts, fd, &keys[i]) != CUDA_SUCCESS) continue;
    wire::Block offered;
    offered.address = block.address;
    offered.bytes = block.bytes;
    offered.device = block.device;
    offered.key = keys[i];
    out->blocks.push_back(offered);
  }
  if (blocks.size() == kMostOffered) out->next = blocks.back().address + blocks.back().bytes;
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult OpExportBlocks(WorkerSession& session, const Request&, const wire::OpExportBlocks_Request& in,
                        wire::OpExportBlocks_Reply* out, ReplyBuilder* reply) {
  // What the driver is asked may be what invalidates a capture.
  if (CapturesInProgress() == 0) {
    const std::vector<DeviceArena::Block> blocks = session.arena().LiveBlocks(in.after, kMostExported);
    for (const DeviceArena::Block& block : blocks) session.arena().ExportAhead(block.address);
    if (blocks.size() == kMostExported) out->next = blocks.back().address + blocks.back().bytes;
  }
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult OpAdoptBlocks(WorkerSession& session, const Request&, const wire::OpAdoptBlocks_Request& in,
                       wire::OpAdoptBlocks_Reply* out, ReplyBuilder* reply) {
  if (in.blocks.size() > kMostOffered) return kMalformedRequest;
  const auto& devices = session.loaded().devices;
  const AnyCurrent current(session);
  std::vector<std::string_view> keys;
  for (const wire::Block& block : in.blocks) keys.push_back(block.key);
  const std::vector<IpcOffered> offered = session.ipc().TakeOffers(keys);
  for (size_t i = 0; i < offered.size(); ++i) {
    const wire::Block& block = in.blocks[i];
    const auto& [taken, fd, facts, peer] = offered[i];
    const bool same = taken && fd >= 0 && block.device >= 0 && size_t(block.device) < devices.size() &&
                      facts.offset == 0 && facts.bytes == block.bytes && facts.mapping_bytes == block.bytes &&
                      devices[size_t(block.device)].uuid == std::string(facts.device.data(), facts.device.size());
    if (same && session.arena().Adopt({block.address, block.bytes, block.device}, fd,
                                      session.ipc().IsOfThisServer(peer)) == CUDA_SUCCESS) {
      out->adopted.push_back(block.address);
    }
    if (fd >= 0) close(fd);
  }
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult OpKeepBlocks(WorkerSession& session, const Request&, const wire::OpKeepBlocks_Request& in,
                      wire::OpKeepBlocks_Reply* out, ReplyBuilder* reply) {
  if (in.after == 0) {
    session.arena().DropUnclaimed();
    session.contexts().EndEarly();
  }
  const std::vector<DeviceArena::Block> blocks = session.arena().ClaimedBlocks(in.after, kMostKept);
  for (const DeviceArena::Block& block : blocks) {
    wire::Block kept;
    kept.address = block.address;
    kept.bytes = block.bytes;
    kept.device = block.device;
    out->blocks.push_back(kept);
  }
  if (blocks.size() == kMostKept) out->next = blocks.back().address + blocks.back().bytes;
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult OpShareIn(WorkerSession& session, const Request&, const wire::OpShareIn_Request& in, wire::OpShareIn_Reply*,
                   ReplyBuilder*) {
  return session.ipc().SetScope(in.scope) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

CUresult Custom_cuIpcGetMemHandle(WorkerSession& session, const Request& request,
                                  const wire::cuIpcGetMemHandle_Request& in, wire::cuIpcGetMemHandle_Reply* out,
                                  ReplyBuilder* reply) {
  std::string key = KeyFor(request, in.key);
  const CUresult result = ShareAllocation(session, IpcKind::kMemory, in.address, &key);
  if (result != CUDA_SUCCESS) return result;
  out->key = key;
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemPoolExportPointer(WorkerSession& session, const Request& request,
                                       const wire::cuMemPoolExportPointer_Request& in,
                                       wire::cuMemPoolExportPointer_Reply* out, ReplyBuilder* reply) {
  std::string key = KeyFor(request, in.key);
  const CUresult result = ShareAllocation(session, IpcKind::kPoolMemory, in.address, &key);
  if (result != CUDA_SUCCESS) return result;
  out->key = key;
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult Custom_cuIpcOpenMemHandle_v2(WorkerSession& session, const Request& request,
                                      const wire::cuIpcOpenMemHandle_v2_Request& in,
                                      wire::cuIpcOpenMemHandle_v2_Reply* out, ReplyBuilder* reply) {
  if (in.flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  return OpenMemory(session, IpcKind::kMemory, request, in, out, reply);
}

CUresult Custom_cuMemPoolImportPointer(WorkerSession& session, const Request& request,
                                       const wire::cuMemPoolImportPointer_Request& in,
                                       wire::cuMemPoolImportPointer_Reply* out, ReplyBuilder* reply) {
  // In a replay the pool may be gone, though its memory is not.
  if (!request.replay() && !session.ipc().Holds(in.pool)) return CUDA_ERROR_INVALID_VALUE;
  return OpenMemory(session, IpcKind::kPoolMemory, request, in, out, reply);
}

// Work of this session may still use the memory: a waiter unmaps it once all of it has ended.
CUresult Custom_cuIpcCloseMemHandle(WorkerSession& session, const Request&, const wire::cuIpcCloseMemHandle_Request& in,
                                    wire::cuIpcCloseMemHandle_Reply* out, ReplyBuilder* reply) {
  auto& imports = session.ipc().imports();
  const auto it =
      std::find_if(imports.begin(), imports.end(), [&in](const auto& one) { return one.second.address == in.address; });
  if (it == imports.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--it->second.references != 0) {
    out->left = it->second.references;
    return CUDA_SUCCESS;
  }
  const IpcImport import = it->second;
  imports.erase(it);
  session.ranges().Erase(import.address);
  const ContextInfo* const owner = session.contexts().Find(import.context);
  const ContextRef context = owner != nullptr ? owner->ref : session.contexts().Any();
  const DriverTable* const driver = &session.driver();
  Ipc* const ipc = &session.ipc();
  const std::function<CUresult()> wait = WaitFor(session, AllWork(session));
  session.answers().DeferIn(context, reply, [driver, ipc, context, wait, import](Answer* answer) {
    wait();  // a context that is stuck with an error lets go all the same
    MakeCurrent(*driver, context);
    const CUresult result = ipc->LetGo(*driver, import);
    wire::cuIpcCloseMemHandle_Reply nothing_left;
    nothing_left.Encode(&answer->message);
    return result;
  });
  return CUDA_SUCCESS;
}

CUresult Custom_cuIpcGetEventHandle(WorkerSession& session, const Request& request,
                                    const wire::cuIpcGetEventHandle_Request& in, wire::cuIpcGetEventHandle_Reply* out,
                                    ReplyBuilder* reply) {
  CUevent event;
  if (!session.Real(Kind::kEvent, in.event, &event)) return CUDA_ERROR_INVALID_HANDLE;
  std::string key = KeyFor(request, in.key);
  if (!session.ipc().Shared(IpcKind::kEvent, in.event, &key)) {
    CUipcEventHandle handle = {};
    CUresult result = session.driver().cuIpcGetEventHandle(&handle, event);
    if (result != CUDA_SUCCESS) return result;
    IpcFacts facts;
    static_assert(sizeof(handle) == sizeof(facts.handle));
    std::memcpy(facts.handle.data(), &handle, sizeof(handle));
    result = session.ipc().Share(IpcKind::kEvent, in.event, facts, -1, &key);
    if (result != CUDA_SUCCESS) return result;
  }
  out->key = key;
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult Custom_cuIpcOpenEventHandle(WorkerSession& session, const Request& request,
                                     const wire::cuIpcOpenEventHandle_Request& in, wire::cuIpcOpenEventHandle_Reply*,
                                     ReplyBuilder* reply) {
  if (!session.MayBind(Kind::kEvent, in.event)) return kMalformedRequest;
  IpcFacts facts;
  int fd = -1;
  IpcUse use;
  CUresult result = session.ipc().Open(in.key, IpcKind::kEvent, true, PatienceOf(request), &facts, &fd, &use);
  if (result != CUDA_SUCCESS) return NotOpened(request, "event", result, reply);
  if (fd >= 0) close(fd);
  CUipcEventHandle handle;
  std::memcpy(&handle, facts.handle.data(), sizeof(handle));
  CUevent event = nullptr;
  result = session.driver().cuIpcOpenEventHandle(&event, handle);
  if (result != CUDA_SUCCESS) return result;
  session.Bind(Kind::kEvent, in.event, reinterpret_cast<uint64_t>(event), session.CurrentContext());
  session.ipc().Hold(in.event, use);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemExportToShareableHandle(WorkerSession& session, const Request& request,
                                             const wire::cuMemExportToShareableHandle_Request& in,
                                             wire::cuMemExportToShareableHandle_Reply* out, ReplyBuilder* reply) {
  const auto memory = session.physical().find(in.handle);
  CUmemGenericAllocationHandle real;
  if (memory == session.physical().end() || memory->second.released ||
      !session.Real(Kind::kPhysicalMemory, in.handle, &real)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::string key = KeyFor(request, in.key);
  if (!session.ipc().Shared(IpcKind::kPhysical, in.handle, &key)) {
    int fd = -1;
    CUresult result = session.driver().cuMemExportToShareableHandle(&fd, real, kDescriptor, 0);
    if (result != CUDA_SUCCESS) return result;
    IpcFacts facts;
    facts.bytes = memory->second.bytes != 0 ? memory->second.bytes : PhysicalBytes(real);
    result = session.ipc().Share(IpcKind::kPhysical, in.handle, facts, fd, &key);
    if (result != CUDA_SUCCESS) return result;
  }
  out->key = key;
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemImportFromShareableHandle(WorkerSession& session, const Request& request,
                                               const wire::cuMemImportFromShareableHandle_Request& in,
                                               wire::cuMemImportFromShareableHandle_Reply* out, ReplyBuilder* reply) {
  if (!session.MayBind(Kind::kPhysicalMemory, in.handle)) return kMalformedRequest;
  out->bytes = in.bytes;
  out->prop = in.prop;
  IpcFacts facts;
  int fd = -1;
  IpcUse use;
  CUresult result = session.ipc().Open(in.key, IpcKind::kPhysical, false, PatienceOf(request), &facts, &fd, &use);
  result = NotOpened(request, "memory (cuMemImportFromShareableHandle)", result, reply);
  if (result == CUDA_ERROR_INVALID_HANDLE) return CUDA_ERROR_INVALID_VALUE;
  if (result != CUDA_SUCCESS) return result;
  CUmemGenericAllocationHandle real = 0;
  result = session.driver().cuMemImportFromShareableHandle(&real, reinterpret_cast<void*>(intptr_t(fd)), kDescriptor);
  if (fd >= 0) close(fd);
  CUmemAllocationProp prop = {};
  if (result == CUDA_SUCCESS && !request.replay()) {
    result = session.driver().cuMemGetAllocationPropertiesFromHandle(&prop, real);
    out->bytes = facts.bytes;
    out->prop = {reinterpret_cast<const char*>(&prop), sizeof(prop)};
    if (result != CUDA_SUCCESS) session.driver().cuMemRelease(real);
  }
  if (result != CUDA_SUCCESS) return result;
  session.Bind(Kind::kPhysicalMemory, in.handle, real, 0);
  session.physical()[in.handle].bytes = facts.bytes;
  session.ipc().Hold(in.handle, use);
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

// Allocations of pools are the arena's, so there is nothing of the pool itself to show but which GPU it is for.
CUresult Custom_cuMemPoolExportToShareableHandle(WorkerSession& session, const Request& request,
                                                 const wire::cuMemPoolExportToShareableHandle_Request& in,
                                                 wire::cuMemPoolExportToShareableHandle_Reply* out,
                                                 ReplyBuilder* reply) {
  CUmemoryPool pool;
  if (!session.Real(Kind::kMemoryPool, in.pool, &pool)) return CUDA_ERROR_INVALID_VALUE;
  std::string key = KeyFor(request, in.key);
  if (!session.ipc().Shared(IpcKind::kPool, in.pool, &key)) {
    CUmemPoolProps props;
    // Pools that are not meant to be shared cannot be, as natively.
    if (!PropsOfPool(pool, &props) || (props.handleTypes & kDescriptor) == 0) return CUDA_ERROR_INVALID_VALUE;
    if (props.location.type != CU_MEM_LOCATION_TYPE_DEVICE || props.location.id < 0 ||
        size_t(props.location.id) >= session.loaded().devices.size()) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    IpcFacts facts;
    SetDevice(session, props.location.id, &facts);
    const CUresult result = session.ipc().Share(IpcKind::kPool, in.pool, facts, -1, &key);
    if (result != CUDA_SUCCESS) return result;
  }
  out->key = key;
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemPoolImportFromShareableHandle(WorkerSession& session, const Request& request,
                                                   const wire::cuMemPoolImportFromShareableHandle_Request& in,
                                                   wire::cuMemPoolImportFromShareableHandle_Reply*,
                                                   ReplyBuilder* reply) {
  if (!session.MayBind(Kind::kMemoryPool, in.pool)) return kMalformedRequest;
  IpcFacts facts;
  int fd = -1;
  IpcUse use;
  CUresult result = session.ipc().Open(in.key, IpcKind::kPool, false, PatienceOf(request), &facts, &fd, &use);
  result = NotOpened(request, "memory pool", result, reply);
  if (result == CUDA_ERROR_INVALID_HANDLE) return CUDA_ERROR_INVALID_VALUE;
  if (result != CUDA_SUCCESS) return result;
  if (fd >= 0) close(fd);
  // A pool of this session's own stands for it, so that its attributes can be asked for and its access be set.
  CUmemPoolProps props = {};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  props.location.id = FindDevice(session, facts);
  CUmemoryPool pool = nullptr;
  result = props.location.id < 0 ? CUDA_ERROR_INVALID_DEVICE : session.driver().cuMemPoolCreate(&pool, &props);
  if (result != CUDA_SUCCESS) return result;
  session.Bind(Kind::kMemoryPool, in.pool, reinterpret_cast<uint64_t>(pool), 0);
  session.ipc().Hold(in.pool, use);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
