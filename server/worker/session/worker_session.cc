// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/worker_session.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "proto/api/call_traits.gen.h"
#include "proto/base/clock.h"
#include "proto/codec/codec.h"
#include "proto/logging/log.h"
#include "server/dispatch/custom_calls.gen.h"
#include "server/worker/memory/managed_memory.h"

namespace cuda_remote::server {
namespace {

// How long work is held up for managed memory to go back to the device, and how often the GPU is asked meanwhile.
constexpr std::chrono::milliseconds kLongestLeave{2000};
constexpr std::chrono::microseconds kLeavePoll{20};

void RelaxCaptures(const DriverTable& driver) {
  // The client keeps the capture mode of its threads; ours must not restrict them on top.
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  driver.cuThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace

WorkerSession::WorkerSession(const Parts& parts)
    : parts_(parts),
      table_(HookDriver(parts.driver->table, parts.arena, HooksOf())),
      contexts_(table_, handles_, parts.warm_gpu, parts.warm_context),
      host_ranges_(table_),
      managed_memory_(new ManagedMemory(parts.driver->table, parts.staging, 0, [this] { RelaxCaptures(table_); })),
      heaps_(table_, parts.staging),
      modules_({&table_, &parts.driver->devices, parts.arena, &ranges_, &handles_, &contexts_, &heaps_}),
      side_work_(table_, parts.staging, parts.driver->software),
      frees_(table_, contexts_, parts.arena),
      ipc_(parts.sharing),
      work_(table_, contexts_, handles_, substitutes_),
      host_functions_([this](uint64_t id, uint64_t turn, CUresult status) {
        wire::OpHostFunc_Request event;
        event.id = id;
        event.status = uint32_t(status);
        event.turn = turn;
        std::string message;
        event.Encode(&message);
        parts_.channel->Event(kOpHostFunc, 0, message);
      }),
      uploads_(table_, parts.staging),
      calls_(parts.calls(*this)),
      answers_(table_, contexts_, parts.channel, parts.output, &timeline_, [this] { RelaxCaptures(table_); }) {
  custom_ = calls_.get();
  gone_objects_->session = this;
  RelaxCaptures(table_);
}

DriverHooks WorkerSession::HooksOf() {
  DriverHooks hooks;
  hooks.collect_frees = [this](bool wait) { frees_.Collect(wait); };
  hooks.settle = [this] {
    uploads_.Settle();
    contexts_.Restore();
  };
  hooks.mark_legacy = [this] { work_.MarkLegacy(); };
  hooks.mark_stream = [this](CUstream stream) { work_.MarkStream(stream); };
  hooks.allow = [this](int user, int owner) { reach_.Allow(user, owner); };
  return hooks;
}

AddressSpace* WorkerSession::ReservationSpace() {
  if (!reservation_space_) {
    CUresult result;
    const uint64_t bytes = ReserveAddressesAt(table_, kReservationBase, kReservationBytes, &result);
    if (bytes == 0) return nullptr;
    reservation_space_.emplace(DeviceArena::kPage);
    reservation_space_->Give(kReservationBase, bytes);
  }
  for (const auto& [start, bytes] : ipc_.TakeReturned()) reservation_space_->Give(start, bytes);
  return &*reservation_space_;
}

WorkerSession::~WorkerSession() { Stop(); }

void WorkerSession::GoneObjects::Announce(uint64_t handle) {
  wire::OpUserObjectGone_Request event;
  event.object = handle;
  std::string message;
  event.Encode(&message);
  MutexLock lock(&mutex);
  if (session == nullptr) return;
  handles.push_back(handle);
  any.store(true, std::memory_order_release);
  session->channel().Event(kOpUserObjectGone, 0, message);
}

void WorkerSession::Stop() {
  {
    MutexLock lock(&gone_objects_->mutex);
    gone_objects_->session = nullptr;
  }
  host_functions_.Stop();
}

bool WorkerSession::Real(Kind kind, uint64_t handle, uint64_t* real) const {
  if (!substitutes_.empty()) {
    const auto it = substitutes_.find(handle);
    if (it != substitutes_.end() && KindOf(handle) == kind) {
      *real = it->second;
      return true;
    }
  }
  const HandleMap::Entry* const entry = handles_.Find(kind, handle);
  if (entry == nullptr) return false;
  *real = entry->real;
  return true;
}

uint64_t WorkerSession::KernelOfFunction(CUfunction function) const {
  uint64_t found = 0;
  handles_.ForEach(Kind::kKernel, [&](const HandleMap::Entry& entry) {
    CUfunction its = nullptr;
    if (found == 0 && table_.cuKernelGetFunction(&its, reinterpret_cast<CUkernel>(entry.real)) == CUDA_SUCCESS &&
        its == function) {
      found = entry.handle;
    }
  });
  return found;
}

bool WorkerSession::RealStream(uint64_t wire, CUstream* real) const {
  if (wire <= 2) {
    *real = reinterpret_cast<CUstream>(wire);
    return true;
  }
  if (contexts_.on_several_gpus()) NameGpu(GpuOf(wire));
  return Session::Real(Kind::kStream, wire, real);
}

void WorkerSession::Bind(Kind kind, uint64_t handle, uint64_t real, uint64_t parent) {
  handles_.Bind(kind, handle, real, parent);
  if (kind == Kind::kPhysicalMemory) physical_[handle].real = real;
}

void WorkerSession::Gone(const HandleMap::Entry& entry) {
  switch (KindOf(entry.handle)) {
    case Kind::kStream:
      ForgetStream(reinterpret_cast<CUstream>(entry.real));
      break;
    case Kind::kModule:
    case Kind::kLibrary:
      modules_.Forget(entry.handle);
      break;
    case Kind::kContext:
      if (const ContextInfo* const context = contexts_.Find(entry.handle)) {
        side_work_.Forget(context->ref.id);
        modules_.ForgetContext(entry.handle, context->ref.id);
      }
      heaps_.Forget(entry.handle);
      contexts_.Remove(entry.handle);
      break;
    case Kind::kLinkState:
      links_.erase(entry.handle);
      break;
    case Kind::kArray:
    case Kind::kMipmappedArray:
      ArrayGone(entry.real);
      break;
    case Kind::kEvent:
    case Kind::kPhysicalMemory:
    case Kind::kMemoryPool:
      ipc_.Forget(entry.handle);
      break;
    default:
      break;
  }
}

void WorkerSession::Unbind(uint64_t handle) {
  handles_.Unbind(handle, [this](const HandleMap::Entry& entry) { Gone(entry); });
}

int WorkerSession::GpuOf(uint64_t handle) const {
  while (handle != 0) {
    if (const ContextInfo* const context = contexts_.Find(handle)) return context->device;
    const HandleMap::Entry* const entry = handles_.Find(KindOf(handle), handle);
    handle = entry != nullptr ? entry->parent : 0;
  }
  return GpuReach::kAny;
}

void WorkerSession::NameGpu(int gpu) const {
  reach_.Name(gpu);
  if (TraitsOf(answers_.request().call).Has(kMemoryOfAnyGpu)) reach_.Allow(gpu, GpuReach::kAny);
}

void WorkerSession::NameGpuOf(CUdeviceptr address) const {
  const DeviceRange* const range = ranges_.Find(address);
  // Frees of managed memory wait for all GPUs.
  if (range != nullptr && !range->managed) reach_.Name(range->device);
}

CUresult WorkerSession::Enter(const FrameHeader& header) {
  const CUresult result = EnterContext(header);
  if (contexts_.on_several_gpus()) {
    reach_.BeginRequest(TraitsOf(header.call).work == Work::kMayStart);
    if (contexts_.current() != 0) NameGpu(GpuOf(contexts_.current()));
  }
  if (result == CUDA_SUCCESS && TraitsOf(header.call).Has(kLaunchesKernels)) modules_.BeforeLaunch(0);
  return result;
}

CUresult WorkerSession::EnterContext(const FrameHeader& header) {
  answers_.Begin(header);
  if (gone_objects_->any.load(std::memory_order_acquire)) {
    std::vector<uint64_t> gone;
    {
      MutexLock lock(&gone_objects_->mutex);
      gone.swap(gone_objects_->handles);
      gone_objects_->any.store(false, std::memory_order_release);
    }
    for (const uint64_t handle : gone) Unbind(handle);
  }
  // With the first call of the application the replay is over, and so is the need for what it has put in place.
  const bool over = header.call < kFirstOperation && !(header.flags & kFlagReplay);
  if (over) modules_.EndPads();
  if (over && exec_pads_.size() != 0) exec_pads_.Clear([this](uint64_t exec) { DestroyExec(exec); });
  // Whatever it asks for may leave work on the GPU, until it is known to have none.
  const Work kind = TraitsOf(header.call).work;
  // The end of registrations waits for nothing now.
  if (parts_.staging->has_much_unused() && work_.idle() && MakeCurrent(table_, contexts_.Any()) == CUDA_SUCCESS) {
    parts_.staging->GiveBack();
  }
  if (kind == Work::kMayStart) {
    const CallTraits& traits = TraitsOf(header.call);
    const bool uses_any = !traits.Has(kOnlyNamedMemory) && !traits.Has(kReadsNoManaged);
    if (uses_any && managed_memory_->on_host()) LeaveUnusedHostMemory();
    work_.Begin();
  }
  if (kind == Work::kWaits && !uploads_.empty()) uploads_.Collect();
  if (managed_memory_->flushing() && !TraitsOf(header.call).Has(kFollowsFlushes)) {
    if (const CUresult flushed = managed_memory_->AwaitFlush(); flushed != CUDA_SUCCESS)
      answers_.SetPendingError(flushed);
  }
  return contexts_.Enter(header.context_or_result);
}

CUresult WorkerSession::EnterNested(uint32_t slot, Outer* outer) {
  *outer = {answers_.request(), contexts_.current(), contexts_.current_ref()};
  answers_.Silence();
  if (slot == SlotOf(contexts_.current())) return CUDA_SUCCESS;
  const CUresult result = contexts_.Enter(slot);
  if (const ContextInfo* const context = contexts_.Find(contexts_.current()); context && contexts_.on_several_gpus()) {
    NameGpu(context->device);
  }
  return result;
}

void WorkerSession::LeaveNested(const Outer& outer) {
  answers_.Resume(outer.header);
  contexts_.Return(outer.context, outer.ref);
}

void WorkerSession::Defer(ReplyBuilder* reply, std::function<CUresult(std::string*, std::string*)> wait) {
  answers_.Defer(reply, [wait = std::move(wait)](Answer* answer) { return wait(&answer->message, &answer->payload); });
}

// Copies reach the memory of every GPU from every context natively, peer access enabled or not. Memory of the arena
// must be mapped for that, which costs time, so it is done for sessions that use several GPUs.
void WorkerSession::ShareArena(int device) {
  const std::vector<DeviceFacts>& facts = parts_.driver->devices;
  const auto may_reach = [&facts](int from, int memory_of) {
    return size_t(memory_of) < facts[from].peers.size() && facts[from].peers[memory_of] != 0;
  };
  for (const auto& [handle, context] : contexts_.all()) {
    const int other = context.device;
    if (other == device) continue;
    for (const auto& [from, memory_of] : {std::pair(device, other), std::pair(other, device)}) {
      if (!may_reach(from, memory_of)) continue;
      const CUresult result = arena().EnablePeer(memory_of, from);
      if (result != CUDA_SUCCESS)
        logging::Warn("GPU {} cannot reach GPU {}: CUDA error {}", from, memory_of, int(result));
    }
  }
}

void WorkerSession::BindContext(uint64_t handle, CUcontext real, int device, bool primary, uint64_t parent) {
  handles_.Bind(Kind::kContext, handle, reinterpret_cast<uint64_t>(real), parent);
  const ContextInfo& context = contexts_.Add(handle, real, device, primary);
  ShareArena(device);
  if (!host_ranges_.AllRegistered()) {
    MakeCurrent(table_, context.ref);
    host_ranges_.RegisterAll(contexts_.Any());
    contexts_.Restore();
  }
  modules_.PlaceLibraries(handle);
}

ContextRemains WorkerSession::ForgetContext(uint64_t handle) {
  ContextRemains remains;
  std::vector<uint64_t>& memory = remains.memory;
  std::vector<uint64_t> symbols;
  for (const auto& [address, range] : ranges_.all()) {
    if (range.context != handle) continue;
    if (range.kind == DeviceRange::kAllocation) memory.push_back(address);
    if (range.kind == DeviceRange::kSymbol) symbols.push_back(address);
  }
  for (const uint64_t address : memory) {
    ranges_.Erase(address);
    ipc_.Forget(address);
  }
  for (const uint64_t address : symbols) ranges_.Erase(address);
  for (auto it = ipc_.imports().begin(); it != ipc_.imports().end();) {
    if (it->second.context != handle) {
      ++it;
      continue;
    }
    ranges_.Erase(it->second.address);
    remains.imports.push_back(it->second);
    it = ipc_.imports().erase(it);
  }
  const ContextInfo* const context = contexts_.Find(handle);
  const ContextRef dead = context != nullptr ? context->ref : ContextRef();
  exec_pads_.Forget(dead.id);
  frees_.ForgetContext(dead.id, &memory);
  host_ranges_.ForgetContext(dead.id);
  work_.ForgetContext(dead.id);
  for (ContextValues* values : {&textures_, &surfaces_}) {
    values->erase(values->lower_bound({handle, 0}), values->upper_bound({handle, ~uint64_t{0}}));
  }
  parts_.staging->ContextDies();
  remains.lent = uploads_.ContextDies(dead.id);
  managed_memory_->ContextDies(dead.id);
  Unbind(handle);
  contexts_.Remove(handle);
  return remains;
}

void WorkerSession::PrepareManagedMemory() {
  for (const auto& [handle, context] : contexts_.all()) managed_memory_->UseContext(context.device, context.ref);
}

void WorkerSession::InstantiateAt(uint64_t wanted, const std::function<uint64_t()>& instantiate) {
  exec_pads_.MakeAt(wanted, contexts_.current_ref().id, instantiate, [this](uint64_t exec) { DestroyExec(exec); });
}

void WorkerSession::DestroyExec(uint64_t real) { table_.cuGraphExecDestroy(reinterpret_cast<CUgraphExec>(real)); }

void WorkerSession::LeaveUnusedHostMemory() {
  if (!managed_memory_->NoteWork()) return;
  bool done = false;
  if (contexts_.all().size() == 1 && CapturesInProgress() == 0) {
    // What the GPU has now is little, but kernels may have become slow. It may also be waiting for the program.
    const auto is_idle = [this] {
      return work_.idle() || work_.QueryAll({contexts_.all().begin()->second.ref}) == CUDA_SUCCESS;
    };
    const auto end = Now() + kLongestLeave;
    while (!(done = is_idle()) && Now() < end) std::this_thread::sleep_for(kLeavePoll);
  }
  if (done) {
    managed_memory_->LeaveHost();
  } else {
    managed_memory_->StayOnHost();
  }
}

}  // namespace cuda_remote::server
