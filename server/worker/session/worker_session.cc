// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/worker_session.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "proto/api/call_traits.gen.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/codec/codec.h"
#include "proto/logging/log.h"
#include "proto/threads/mutex.h"
#include "server/dispatch/malformed.h"
#include "server/worker/memory/managed_memory.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/failures.h"

namespace cuda_remote::server {
namespace {

// Threads that may wait for the GPU at the same time. What a client with more waits has beyond that, one thread polls.
constexpr size_t kMaxWaiters = 256;
constexpr size_t kSideWaiters = 32;
// How long work is held up for managed memory to go back to the device, and how often the GPU is asked meanwhile.
constexpr std::chrono::milliseconds kLongestLeave{2000};
constexpr std::chrono::microseconds kLeavePoll{20};

// How long the executor itself waits before it hands a wait over. On a small machine the time is better left to others.
std::chrono::nanoseconds SpinLimit() {
  const unsigned cores = std::thread::hardware_concurrency();
  return std::chrono::microseconds(cores <= 2 ? 0 : cores <= 4 ? 20 : 60);
}

void RelaxCaptures(const DriverTable& driver) {
  // The client keeps the capture mode of its threads; ours must not restrict them on top.
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  driver.cuThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace

WorkerSession::WorkerSession(const Parts& parts)
    : parts_(parts),
      table_(HookDriver(parts.driver->table, parts.arena, HooksOf())),
      managed_memory_(new ManagedMemory(parts.driver->table, parts.staging, 0, [this] { RelaxCaptures(table_); })),
      heaps_(table_, parts.staging),
      side_work_(table_, parts.staging, parts.driver->software),
      ipc_(parts.sharing),
      spin_limit_(SpinLimit()),
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
      waiters_(new Waiters(kMaxWaiters, [this] { RelaxCaptures(table_); })),
      side_waiters_(new Waiters(kSideWaiters, [this] { RelaxCaptures(table_); })),
      stream_waiter_(new Waiters(1, [this] { RelaxCaptures(table_); })) {
  gone_objects_->session = this;
  RelaxCaptures(table_);
}

DriverHooks WorkerSession::HooksOf() {
  DriverHooks hooks;
  hooks.collect_frees = [this](bool wait) { CollectPendingFrees(wait); };
  hooks.settle = [this] {
    uploads_.Settle();
    MakeCurrent(table_, current_ref_);
  };
  hooks.mark_legacy = [this] { MarkLegacyWork(); };
  hooks.mark_stream = [this](CUstream stream) { MarkStreamWork(stream); };
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

WorkerSession::~WorkerSession() {
  Stop();
  waiters_.reset();
  side_waiters_.reset();
  stream_waiter_.reset();
}

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
  if (several_gpus_) NameGpu(GpuOf(wire));
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
    case Kind::kLibrary: {
      const auto module = modules_.find(entry.handle);
      const bool has_symbols = module == modules_.end() || !module->second.symbols.empty();
      if (module != modules_.end()) {
        arena().Discharge(module->second.charged);
        allocating_modules_ -= module->second.kernels.allocate;
      }
      modules_.erase(entry.handle);
      // Looking through all memory for each of many modules takes quadratic time; most have no variables.
      if (!has_symbols) break;
      std::vector<uint64_t> symbols;
      for (const auto& [address, range] : ranges_.all()) {
        if (range.kind == DeviceRange::kSymbol && range.owner == entry.handle) symbols.push_back(address);
      }
      for (const uint64_t address : symbols) ranges_.Erase(address);
      break;
    }
    case Kind::kContext:
      if (const ContextInfo* const context = FindContext(entry.handle)) side_work_.Forget(context->ref.id);
      contexts_.erase(entry.handle);
      heaps_.Forget(entry.handle);
      for (auto& [module, facts] : modules_) facts.code.erase(entry.handle);
      if (current_ == entry.handle) {
        current_ = 0;
        current_ref_ = {};
      }
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
    if (const ContextInfo* const context = FindContext(handle)) return context->device;
    const HandleMap::Entry* const entry = handles_.Find(KindOf(handle), handle);
    handle = entry != nullptr ? entry->parent : 0;
  }
  return GpuReach::kAny;
}

void WorkerSession::NameGpu(int gpu) const {
  reach_.Name(gpu);
  if (TraitsOf(header_.call).Has(kMemoryOfAnyGpu)) reach_.Allow(gpu, GpuReach::kAny);
}

void WorkerSession::NameGpuOf(CUdeviceptr address) const {
  const DeviceRange* const range = ranges_.Find(address);
  // Frees of managed memory wait for all GPUs.
  if (range != nullptr && !range->managed) reach_.Name(range->device);
}

CUresult WorkerSession::Enter(const FrameHeader& header) {
  const CUresult result = EnterContext(header);
  if (several_gpus_) {
    reach_.BeginRequest(TraitsOf(header.call).work == Work::kMayStart);
    if (current_ != 0) NameGpu(GpuOf(current_));
  }
  if (result == CUDA_SUCCESS && TraitsOf(header.call).Has(kLaunchesKernels)) BeforeLaunch(0);
  return result;
}

CUresult WorkerSession::EnterContext(const FrameHeader& header) {
  header_ = header;
  flush_ = false;
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
  if (over && !code_pads_.empty()) UnloadCodePads();
  if (over && exec_pads_.size() != 0) exec_pads_.Clear([this](uint64_t exec) { DestroyExec(exec); });
  // Whatever it asks for may leave work on the GPU, until it is known to have none.
  const Work work = TraitsOf(header.call).work;
  // The end of registrations waits for nothing now.
  if (parts_.staging->has_much_unused() && idle() && MakeCurrent(table_, AnyContext()) == CUDA_SUCCESS) {
    parts_.staging->GiveBack();
  }
  if (work == Work::kMayStart) {
    const CallTraits& traits = TraitsOf(header.call);
    const bool uses_any = !traits.Has(kOnlyNamedMemory) && !traits.Has(kReadsNoManaged);
    if (uses_any && managed_memory_->on_host()) LeaveUnusedHostMemory();
    ++work_;
  }
  if (work == Work::kWaits && !uploads_.empty()) uploads_.Collect();
  if (managed_memory_->flushing() && !TraitsOf(header.call).Has(kFollowsFlushes)) {
    if (const CUresult flushed = managed_memory_->AwaitFlush(); flushed != CUDA_SUCCESS) SetPendingError(flushed);
  }
  const uint32_t slot = header.context_or_result;
  if (slot == SlotOf(current_) && (slot == 0 || current_ref_.id != 0)) return MakeCurrent(table_, current_ref_);
  current_ = 0;
  current_ref_ = {};
  if (slot != 0) {
    const HandleMap::Entry* const entry = handles_.At(slot);
    const ContextInfo* const context = entry != nullptr ? FindContext(entry->handle) : nullptr;
    if (context == nullptr) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    current_ = entry->handle;
    current_ref_ = context->ref;
  }
  return MakeCurrent(table_, current_ref_);
}

CUresult WorkerSession::EnterNested(uint32_t slot, Outer* outer) {
  *outer = {header_, current_, current_ref_};
  header_.flags |= kFlagNoReply;
  if (slot == SlotOf(current_)) return CUDA_SUCCESS;
  current_ = 0;
  current_ref_ = {};
  if (slot != 0) {
    const HandleMap::Entry* const entry = handles_.At(slot);
    const ContextInfo* const context = entry != nullptr ? FindContext(entry->handle) : nullptr;
    if (context == nullptr) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    current_ = entry->handle;
    current_ref_ = context->ref;
    if (several_gpus_) NameGpu(context->device);
  }
  return MakeCurrent(table_, current_ref_);
}

void WorkerSession::LeaveNested(const Outer& outer) {
  header_ = outer.header;
  current_ = outer.context;
  current_ref_ = outer.ref;
  MakeCurrent(table_, current_ref_);
}

void WorkerSession::Finish(CUresult result, const ReplyBuilder& reply) {
  if (flush_) FlushOutput();
  Answered(header_, result, reply.message, reply.payload);
}

void WorkerSession::Answered(const FrameHeader& header, CUresult result, std::string_view message,
                             std::string_view payload) {
  if (result != CUDA_SUCCESS) NoteResult(result);
  if (header.flags & kFlagNoReply) {
    if (result != CUDA_SUCCESS) SetPendingError(result);
    return;
  }
  bytes_out_.fetch_add(payload.size(), std::memory_order_relaxed);
  const uint32_t pending = pending_error_.exchange(0, std::memory_order_acq_rel);
  const ChannelStatus status =
      parts_.channel->Reply(header.sequence, header.call, uint32_t(result), pending, message, payload);
  if (status == ChannelStatus::kTooLarge) {
    logging::Error("the reply to call {} is too large ({} bytes)", header.call, message.size());
    parts_.channel->Reply(header.sequence, header.call, CUDA_ERROR_UNKNOWN, 0, {}, std::string_view());
  }
}

void WorkerSession::SetPendingError(CUresult result) {
  uint32_t none = 0;
  pending_error_.compare_exchange_strong(none, uint32_t(result), std::memory_order_acq_rel);
}

void WorkerSession::FlushOutput() {
  if (parts_.output == nullptr) return;
  parts_.output->Flush(
      [this](std::string_view bytes, bool to_stderr) { parts_.channel->Output(kOpStdout, bytes, to_stderr); });
}

void WorkerSession::Defer(ReplyBuilder* reply, std::function<CUresult(std::string*, std::string*)> wait) {
  DeferAnswer(reply, [wait = std::move(wait)](Answer* answer) { return wait(&answer->message, &answer->payload); });
}

void WorkerSession::DeferIn(ContextRef context, ReplyBuilder* reply, Wait wait, std::function<bool()> ready) {
  std::function<bool()> asked;
  if (ready) {
    asked = [this, context, ready = std::move(ready)] {
      return MakeCurrent(table_, context) != CUDA_SUCCESS || ready();
    };
  }
  waiters_->Run(Deferrable(context, reply, std::move(wait)), std::move(asked));
}

void WorkerSession::DeferSide(ContextRef context, ReplyBuilder* reply, Wait wait) {
  side_waiters_->Run(Deferrable(context, reply, std::move(wait)));
}

void WorkerSession::DeferBehindAll(ReplyBuilder* reply, Wait wait) {
  waiters_->RunBehind(Deferrable({}, reply, std::move(wait)));
}

void WorkerSession::DeferInStream(CUstream stream, ReplyBuilder* reply, Wait wait, std::function<bool()> ready) {
  if (stream_waits_.load(std::memory_order_acquire) != 0 && waited_stream_ != stream) {
    DeferAnswer(reply, std::move(wait), std::move(ready));
    return;
  }
  waited_stream_ = stream;
  stream_waits_.fetch_add(1, std::memory_order_acq_rel);
  stream_waiter_->Run(Deferrable(current_ref_, reply, [this, wait = std::move(wait)](Answer* answer) {
    struct Leave {
      std::atomic<int>* waits;
      ~Leave() { waits->fetch_sub(1, std::memory_order_acq_rel); }
    } leave{&stream_waits_};
    return wait(answer);
  }));
}

std::function<void()> WorkerSession::Deferrable(ContextRef context, ReplyBuilder* reply, Wait wait) {
  reply->deferred = true;
  const FrameHeader header = header_;
  return [this, header, context, wait = std::move(wait)] {
    const uint64_t timed_from = timeline_.on() ? NowNs() : 0;
    Answer answer;
    CUresult result = MakeCurrent(table_, context);
    if (result == CUDA_SUCCESS) {
      try {
        result = wait(&answer);
      } catch (const std::bad_alloc&) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
      }
    }
    FlushOutput();
    // Before the answer: the client that has it may ask for the timeline at once.
    if (timed_from != 0) timeline_.Add(header.sequence, header.call, uint32_t(result), timed_from);
    Answered(header, result, answer.message, answer.payload.empty() ? answer.view : std::string_view(answer.payload));
  };
}

bool WorkerSession::SpinUntil(const std::function<bool()>& ready) {
  if (ready()) {
    flush_ = true;
    return true;
  }
  if (spin_limit_.count() == 0) return false;
  const auto end = Now() + spin_limit_;
  while (!parts_.channel->HasNext() && Now() < end) {
    if (!ready()) continue;
    flush_ = true;
    return true;
  }
  return false;
}

const ContextInfo* WorkerSession::FindContext(uint64_t handle) const {
  const auto it = contexts_.find(handle);
  return it == contexts_.end() ? nullptr : &it->second;
}

// Copies reach the memory of every GPU from every context natively, peer access enabled or not. Memory of the arena
// must be mapped for that, which costs time, so it is done for sessions that use several GPUs.
void WorkerSession::ShareArena(int device) {
  const std::vector<DeviceFacts>& facts = parts_.driver->devices;
  const auto may_reach = [&facts](int from, int memory_of) {
    return size_t(memory_of) < facts[from].peers.size() && facts[from].peers[memory_of] != 0;
  };
  for (const auto& [handle, context] : contexts_) {
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

ContextRef WorkerSession::ContextOn(int device) const {
  if (const ContextInfo* const current = FindContext(current_); current != nullptr && current->device == device) {
    return current->ref;
  }
  for (const auto& [handle, context] : contexts_) {
    if (context.device == device) return context.ref;
  }
  return {};
}

void WorkerSession::BindContext(uint64_t handle, CUcontext real, int device, bool primary, uint64_t parent) {
  handles_.Bind(Kind::kContext, handle, reinterpret_cast<uint64_t>(real), parent);
  for (const auto& [other, info] : contexts_) several_gpus_ = several_gpus_ || info.device != device;
  ContextInfo& context = contexts_[handle];
  context.ref.real = real;
  context.ref.id = next_context_id_++;
  context.device = device;
  context.primary = primary;
  ShareArena(device);
  if (std::any_of(host_ranges_.begin(), host_ranges_.end(),
                  [](const auto& range) { return range.second.registered_in == 0; })) {
    MakeCurrent(table_, context.ref);
    RegisterHostRanges();
    MakeCurrent(table_, current_ref_);
  }
  // Libraries exist in every context.
  std::vector<std::pair<uint64_t, const ModuleFacts*>> libraries;
  for (const auto& [library, facts] : modules_) {
    if (facts.library && !facts.symbols.empty()) libraries.emplace_back(library, &facts);
  }
  std::sort(libraries.begin(), libraries.end(),
            [](const auto& a, const auto& b) { return a.second->index < b.second->index; });
  for (const auto& [library, facts] : libraries) {
    PlaceVariables(library, *facts, context.ref);
    ReadCode(library, handle);
  }
}

ContextRef WorkerSession::AnyContext() const {
  if (current_ref_.id != 0) return current_ref_;
  return contexts_.empty() ? ContextRef() : contexts_.begin()->second.ref;
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
  const ContextInfo* const context = FindContext(handle);
  const ContextRef dead = context != nullptr ? context->ref : ContextRef();
  code_pads_.erase(
      std::remove_if(code_pads_.begin(), code_pads_.end(), [&](const auto& pad) { return pad.first.id == dead.id; }),
      code_pads_.end());
  exec_pads_.Forget(dead.id);
  // Events of the context die with it; the memory that they stand for is free once it is idle.
  for (auto it = pending_frees_.begin(); it != pending_frees_.end();) {
    if (it->context.id != dead.id) {
      ++it;
      continue;
    }
    memory.push_back(it->address);
    it = pending_frees_.erase(it);
  }
  for (auto& [address, range] : host_ranges_) {
    if (range.registered_in == dead.id) range.registered_in = 0;
  }
  for (ContextValues* values : {&textures_, &surfaces_}) {
    values->erase(values->lower_bound({handle, 0}), values->upper_bound({handle, ~uint64_t{0}}));
  }
  for (std::vector<WorkMark>* marks : {&legacy_marks_, &stream_marks_}) {
    marks->erase(
        std::remove_if(marks->begin(), marks->end(), [&](const WorkMark& mark) { return mark.context_id == dead.id; }),
        marks->end());
  }
  parts_.staging->ContextDies();
  remains.lent = uploads_.ContextDies(dead.id);
  managed_memory_->ContextDies(dead.id);
  handles_.Unbind(handle, [this](const HandleMap::Entry& entry) { Gone(entry); });
  if (current_ == handle) {
    current_ = 0;
    current_ref_ = {};
  }
  return remains;
}

CUcontext WorkerSession::TakeWarmContext(int device) {
  if (warm_taken_ || device != parts_.warm_gpu) return nullptr;
  warm_taken_ = true;
  return parts_.warm_context;
}

CUresult WorkerSession::EarlyContext(int device, CUcontext* context) {
  const auto early = early_contexts_.find(device);
  if (early != early_contexts_.end()) {
    *context = early->second;
    return CUDA_SUCCESS;
  }
  const CUresult result = table_.cuDevicePrimaryCtxRetain(context, device);
  if (result == CUDA_SUCCESS) early_contexts_[device] = *context;
  return result;
}

void WorkerSession::EndEarlyContexts() {
  // The replay has made its own by now; where it has not, this ends the context, in which there is nothing.
  for (const auto& [device, context] : std::exchange(early_contexts_, {})) table_.cuDevicePrimaryCtxRelease_v2(device);
}

bool WorkerSession::OwnsHostRange(uint64_t address, uint64_t bytes) const {
  auto it = host_ranges_.upper_bound(address);
  if (it == host_ranges_.begin()) return false;
  --it;
  const uint64_t offset = address - it->first;
  return offset < it->second.bytes && bytes <= it->second.bytes - offset;
}

bool WorkerSession::OverlapsHostRange(uint64_t address, uint64_t bytes) const {
  const auto next = host_ranges_.lower_bound(address + bytes);
  if (bytes == 0 || next == host_ranges_.begin()) return false;
  const auto last = std::prev(next);
  return last->first + last->second.bytes > address;
}

CUresult WorkerSession::RegisterWithDriver(uint64_t address, const HostRange& range) {
  unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  if (range.of_pages) flags |= range.flags & CU_MEMHOSTREGISTER_READ_ONLY;
  return table_.cuMemHostRegister_v2(reinterpret_cast<void*>(address), range.bytes, flags);
}

void WorkerSession::PrepareManagedMemory() {
  for (const auto& [handle, context] : contexts_) managed_memory_->UseContext(context.device, context.ref);
}

void WorkerSession::RegisterHostRanges() {
  const ContextRef context = AnyContext();
  if (context.id == 0) return;
  for (auto& [address, range] : host_ranges_) {
    if (range.registered_in != 0) continue;
    const CUresult result = RegisterWithDriver(address, range);
    // Portable: where another context had it registered and is gone, this one still has it.
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) {
      range.registered_in = context.id;
    } else {
      logging::Warn("cannot register {} pinned bytes: CUDA error {}", range.bytes, int(result));
    }
  }
}

bool WorkerSession::NoteModule(uint64_t handle, bool library, std::string_view image, VariablePlaces* placed) {
  ModuleFacts& module = modules_[handle];
  module.library = library;
  module.context = library ? 0 : current_;
  module.index = next_module_++;
  std::vector<uint32_t> arches;
  for (const DeviceFacts& facts : parts_.driver->devices) {
    arches.push_back(uint32_t(facts.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] * 10 +
                              facts.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR]));
  }
  if (const Status found = replay::DataSymbols(image, arches, &module.symbols, &module.kernels); !found.ok())
    module.problem = found.message();
  prints_ = prints_ || module.kernels.print;
  allocating_modules_ += module.kernels.allocate;
  uint64_t bytes = 0;
  for (const replay::DataSymbol& symbol : module.symbols) {
    if (!symbol.managed && __builtin_add_overflow(bytes, symbol.size, &bytes)) return false;
  }
  if (!ChargeWithRoom(bytes)) return false;
  module.charged = bytes;
  *placed = PlaceVariables(handle);
  ReadCode(handle);
  return true;
}

void WorkerSession::ReadCode(uint64_t handle, uint64_t context) {
  ModuleFacts& module = modules_[handle];
  const ContextInfo* const info = FindContext(context);
  const bool any = std::any_of(module.symbols.begin(), module.symbols.end(),
                               [](const replay::DataSymbol& symbol) { return !symbol.code_words.empty(); });
  if (!any || info == nullptr) return;
  CodeWords words;
  std::vector<CodePlace> places;
  CUresult result = MakeCurrent(table_, info->ref);
  // In a stream of its own: work that is under way is nobody's concern here, and is not waited for.
  CUstream stream = nullptr;
  if (result == CUDA_SUCCESS) result = table_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  for (size_t i = 0; i < module.symbols.size() && result == CUDA_SUCCESS; ++i) {
    const replay::DataSymbol& symbol = module.symbols[i];
    CUdeviceptr address = 0;
    size_t bytes = 0;
    if (symbol.code_words.empty() ||
        FindVariable(handle, module.library, symbol.name, &address, &bytes) != CUDA_SUCCESS)
      continue;
    const uint64_t begin = symbol.code_words.front();
    const uint64_t end = std::min<uint64_t>(bytes, symbol.code_words.back() + sizeof(uint64_t));
    if (begin >= end) continue;
    std::string contents(size_t(end - begin) + sizeof(uint64_t), '\0');
    result = table_.cuMemcpyDtoHAsync_v2(contents.data(), address + begin, size_t(end - begin), stream);
    if (result == CUDA_SUCCESS) result = table_.cuStreamSynchronize(stream);
    for (const uint64_t offset : symbol.code_words) {
      uint64_t word = 0;
      if (offset < end) memcpy(&word, contents.data() + (offset - begin), sizeof(word));
      words.push_back(word);
      places.push_back({i, offset});
    }
  }
  if (stream != nullptr) table_.cuStreamDestroy_v2(stream);
  MakeCurrent(table_, current_ref_);
  if (result != CUDA_SUCCESS) {
    module.problem = "the addresses of its functions cannot be read (CUDA error " + std::to_string(int(result)) + ")";
    return;
  }
  module.code[context] = std::move(words);
  module.code_places[context] = std::move(places);
}

void WorkerSession::ReadCode(uint64_t handle) {
  const ModuleFacts& module = modules_[handle];
  if (!module.library) {
    ReadCode(handle, module.context);
    return;
  }
  std::vector<uint64_t> contexts;
  for (const auto& [context, info] : contexts_) contexts.push_back(context);
  for (const uint64_t context : contexts) ReadCode(handle, context);
}

CUresult WorkerSession::MoveCode(uint64_t handle, VariablePlaces* placed, const std::vector<uint64_t>& contexts,
                                 const std::vector<uint64_t>& code, const std::function<uint64_t()>& load) {
  const size_t count = contexts.empty() ? 0 : code.size() / contexts.size();
  if (count == 0) return CUDA_SUCCESS;
  const bool library = modules_[handle].library;
  bool loaded = true;
  for (size_t i = 0; i < contexts.size() && loaded; ++i) {
    const ContextInfo* const info = FindContext(contexts[i]);
    const auto now = modules_[handle].code.find(contexts[i]);
    const CodeWords wanted(code.begin() + ptrdiff_t(i * count), code.begin() + ptrdiff_t((i + 1) * count));
    modules_[handle].code_before[contexts[i]] = wanted;
    if (info == nullptr || now == modules_[handle].code.end() || now->second == wanted) continue;
    const auto reload = [&](const std::function<void()>& between) -> CodeWords {
      if (!loaded) return {};
      UnloadModule(handle, library);
      MakeCurrent(table_, info->ref);
      between();
      MakeCurrent(table_, current_ref_);
      const uint64_t real = load();
      if (real == 0) {
        loaded = false;
        return {};
      }
      handles_.Rebind(library ? Kind::kLibrary : Kind::kModule, handle, real);
      *placed = PlaceVariables(handle);
      ReadCode(handle);
      return modules_[handle].code[contexts[i]];
    };
    std::vector<CUmodule> pads;
    const CodeWords found = MoveCodeTo(table_, now->second, wanted, reload, &pads);
    for (const CUmodule pad : pads) code_pads_.emplace_back(info->ref, pad);
    // The tool that replays finds out whether the job can go on with that (OpCodeWords).
    if (loaded && found != wanted) {
      logging::Info("{}: its functions lie elsewhere than before: {} ({} pads)", NameOfModule(handle),
                    DescribeDistances(found, wanted), pads.size());
    }
  }
  placed->loaded = loaded;
  return loaded ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void WorkerSession::UnloadCodePads() {
  for (const auto& [context, pad] : code_pads_) {
    if (MakeCurrent(table_, context) == CUDA_SUCCESS) table_.cuModuleUnload(pad);
  }
  code_pads_.clear();
}

void WorkerSession::InstantiateAt(uint64_t wanted, const std::function<uint64_t()>& instantiate) {
  exec_pads_.MakeAt(wanted, current_ref_.id, instantiate, [this](uint64_t exec) { DestroyExec(exec); });
}

void WorkerSession::DestroyExec(uint64_t real) { table_.cuGraphExecDestroy(reinterpret_cast<CUgraphExec>(real)); }

std::string WorkerSession::NameOfModule(uint64_t handle) {
  const char* name = nullptr;
  CUlibrary library;
  CUmodule module;
  CUkernel kernel;
  CUfunction function;
  if (Session::Real(Kind::kLibrary, handle, &library)) {
    if (table_.cuLibraryEnumerateKernels(&kernel, 1, library) == CUDA_SUCCESS) table_.cuKernelGetName(&name, kernel);
  } else if (Session::Real(Kind::kModule, handle, &module)) {
    if (table_.cuModuleEnumerateFunctions(&function, 1, module) == CUDA_SUCCESS) table_.cuFuncGetName(&name, function);
  }
  return name != nullptr ? std::string("the module with the kernel ") + name : "a module without kernels";
}

void WorkerSession::BeginHeaps(uint64_t owner) {
  const auto begin = [this](uint64_t context) {
    const ContextInfo* const info = FindContext(context);
    if (info == nullptr || heaps_.begun(context) || MakeCurrent(table_, info->ref) != CUDA_SUCCESS) return;
    heaps_.Begin(context);
    MakeCurrent(table_, current_ref_);
  };
  if (owner != 0) {
    const auto module = modules_.find(owner);
    if (module != modules_.end() && module->second.kernels.allocate) begin(current_);
    return;
  }
  for (const auto& [handle, module] : modules_) {
    if (module.kernels.allocate) begin(module.library ? current_ : module.context);
  }
}

VariablePlaces WorkerSession::PlaceVariables(uint64_t handle) {
  const ModuleFacts& module = modules_[handle];
  VariablePlaces places{true, {}};
  const auto place_in = [&](uint64_t context, ContextRef ref) {
    std::vector<VariablePart> parts = PlaceVariables(handle, module, ref);
    if (!parts.empty()) places.contexts.push_back({context, std::move(parts)});
  };
  if (!module.library) {
    place_in(module.context, current_ref_);
  } else {
    for (const uint64_t context : ContextsOldestFirst()) place_in(context, FindContext(context)->ref);
  }
  return places;
}

std::vector<uint64_t> WorkerSession::ContextsOldestFirst() const {
  std::vector<uint64_t> contexts;
  for (const auto& [context, info] : contexts_) contexts.push_back(context);
  std::sort(contexts.begin(), contexts.end(),
            [this](uint64_t a, uint64_t b) { return FindContext(a)->ref.id < FindContext(b)->ref.id; });
  return contexts;
}

CUresult WorkerSession::MoveVariables(uint64_t handle, VariablePlaces* placed, const std::vector<VariablePlace>& wanted,
                                      const std::function<uint64_t()>& load) {
  if (AreAt(*placed, wanted)) return CUDA_SUCCESS;
  const bool library = modules_[handle].library;
  const Kind kind = library ? Kind::kLibrary : Kind::kModule;
  const auto enter = [&](uint64_t context) { return MakeCurrent(table_, FindContext(context)->ref); };
  // The thread that loaded a library need not have had a context.
  for (const VariablePlace& place : wanted) {
    if (const CUresult result = enter(place.context); result != CUDA_SUCCESS) return result;
  }
  const auto load_again = [&]() -> VariablePlaces {
    MakeCurrent(table_, current_ref_);
    const uint64_t real = load();
    if (real == 0) return {};
    handles_.Rebind(kind, handle, real);
    return PlaceVariables(handle);
  };
  *placed = MoveVariablesTo(
      table_, *placed, wanted, enter, [&] { UnloadModule(handle, library); }, load_again);
  MakeCurrent(table_, current_ref_);
  if (!placed->loaded) return CUDA_ERROR_OUT_OF_MEMORY;
  ReadCode(handle);  // it was loaded again, and its functions may have gone elsewhere
  if (AreAt(*placed, wanted)) return CUDA_SUCCESS;
  for (const VariablePlace& place : wanted) LogMisplaced(handle, *placed, place);
  return CUDA_ERROR_INVALID_ADDRESS_SPACE;
}

void WorkerSession::LogMisplaced(uint64_t handle, const VariablePlaces& placed, const VariablePlace& wanted) {
  const VariablePlace* const found = FindPlace(placed, wanted.context);
  const size_t count = found != nullptr ? found->parts.size() : 0;
  const ContextInfo& context = *FindContext(wanted.context);
  for (size_t i = 0; i < std::min(count, wanted.parts.size()); ++i) {
    if (found->parts[i].lowest == wanted.parts[i].lowest) continue;
    logging::Error("{} of {} would be at {:#x} in context {} (GPU {}) instead of {:#x}, the address that pointers hold",
                   NameOfPart(handle, i), NameOfModule(handle), found->parts[i].lowest, context.ref.id, context.device,
                   wanted.parts[i].lowest);
  }
  if (count != wanted.parts.size()) {
    logging::Error("{} had {} variables in context {} (GPU {}) and has {}", NameOfModule(handle), wanted.parts.size(),
                   context.ref.id, context.device, count);
  }
}

void WorkerSession::UnloadModule(uint64_t handle, bool library) {
  CUlibrary real_library;
  CUmodule real_module;
  if (library && Session::Real(Kind::kLibrary, handle, &real_library)) {
    table_.cuLibraryUnload(real_library);
  } else if (!library && Session::Real(Kind::kModule, handle, &real_module)) {
    table_.cuModuleUnload(real_module);
  }
}

CUresult WorkerSession::FindVariable(uint64_t handle, bool library, const std::string& name, CUdeviceptr* address,
                                     size_t* bytes) {
  if (!library) {
    CUmodule module;
    if (!Session::Real(Kind::kModule, handle, &module)) return CUDA_ERROR_INVALID_HANDLE;
    return table_.cuModuleGetGlobal_v2(address, bytes, module, name.c_str());
  }
  CUlibrary real;
  if (!Session::Real(Kind::kLibrary, handle, &real)) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult result = table_.cuLibraryGetGlobal(address, bytes, real, name.c_str());
  return result == CUDA_ERROR_NOT_FOUND ? table_.cuLibraryGetManaged(address, bytes, real, name.c_str()) : result;
}

std::vector<VariablePart> WorkerSession::PlaceVariables(uint64_t handle, const ModuleFacts& module,
                                                        ContextRef context) {
  if (module.symbols.empty() || MakeCurrent(table_, context) != CUDA_SUCCESS) return {};
  std::vector<VariablePart> parts(1);  // the constants
  bool any = false;
  for (const replay::DataSymbol& symbol : module.symbols) {
    if (symbol.managed) continue;
    CUdeviceptr address = 0;
    size_t bytes = 0;
    // Not every variable need be there: the driver chose one of the image's entries, or none for this context's GPU.
    if (FindVariable(handle, module.library, symbol.name, &address, &bytes) != CUDA_SUCCESS) address = bytes = 0;
    any = any || address != 0;
    if (!symbol.constant) {
      parts.push_back({address, bytes});
    } else if (address != 0) {
      VariablePart& constants = parts[0];
      const uint64_t end = std::max<uint64_t>(constants.lowest + constants.extent, address + bytes);
      if (constants.lowest == 0 || address < constants.lowest) constants.lowest = address;
      constants.extent = end - constants.lowest;
    }
  }
  if (!any) parts.clear();
  MakeCurrent(table_, current_ref_);
  return parts;
}

std::string WorkerSession::NameOfPart(uint64_t handle, size_t part) {
  if (part == 0) return "what is __constant__";
  for (const replay::DataSymbol& symbol : modules_[handle].symbols) {
    if (!symbol.managed && !symbol.constant && --part == 0) return "variable " + symbol.name;
  }
  return "a variable";
}

CUresult WorkerSession::QueryAll(const std::vector<ContextRef>& contexts) {
  CUresult first = CUDA_SUCCESS;
  const auto note = [&first](CUresult state) {
    if (first == CUDA_SUCCESS || state == CUDA_ERROR_NOT_READY) first = state;
  };
  for (const ContextRef& context : contexts) {
    if (MakeCurrent(table_, context) == CUDA_SUCCESS) note(table_.cuStreamQuery(CU_STREAM_LEGACY));
    if (first == CUDA_ERROR_NOT_READY) return first;
  }
  handles_.ForEach(Kind::kStream, [&](const HandleMap::Entry& entry) {
    if (first != CUDA_ERROR_NOT_READY) note(table_.cuStreamQuery(reinterpret_cast<CUstream>(entry.real)));
  });
  for (const WorkMark& mark : stream_marks_) {
    if (first != CUDA_ERROR_NOT_READY) note(table_.cuEventQuery(mark.event.get()));
  }
  return first;
}

void WorkerSession::LeaveUnusedHostMemory() {
  if (!managed_memory_->NoteWork()) return;
  bool done = false;
  if (contexts_.size() == 1 && CapturesInProgress() == 0) {
    // What the GPU has now is little, but kernels may have become slow. It may also be waiting for the program.
    const auto is_idle = [this] { return idle() || QueryAll({contexts_.begin()->second.ref}) == CUDA_SUCCESS; };
    const auto end = Now() + kLongestLeave;
    while (!(done = is_idle()) && Now() < end) std::this_thread::sleep_for(kLeavePoll);
  }
  if (done) {
    managed_memory_->LeaveHost();
  } else {
    managed_memory_->StayOnHost();
  }
}

void WorkerSession::NoteSynchronized(uint64_t work) {
  uint64_t before = synced_.load(std::memory_order_relaxed);
  while (before < work && !synced_.compare_exchange_weak(before, work, std::memory_order_acq_rel)) {
  }
}

bool WorkerSession::BlockingStreamIsCaptured() const {
  bool captured = false;
  const auto look = [&captured](uint64_t real) {
    const CUstream stream = reinterpret_cast<CUstream>(real);
    captured = captured || (IsBlocking(stream) && IsCaptured(stream));
  };
  handles_.ForEach(Kind::kStream, [&look](const HandleMap::Entry& entry) { look(entry.real); });
  // A capture that is made again has streams of its own.
  for (const auto& [handle, real] : substitutes_) {
    if (KindOf(handle) == Kind::kStream) look(real);
  }
  return captured;
}

void WorkerSession::NoteHostFunction(uint64_t stream, uint64_t id) {
  // This request has been counted.
  if (work_ != last_function_work_ + 1) last_functions_.clear();
  last_function_work_ = work_;
  for (LastFunction& last : last_functions_) {
    if (last.stream == stream && last.context.id == current_ref_.id) {
      last.id = id;
      return;
    }
  }
  last_functions_.push_back({current_ref_, stream, id});
}

std::vector<WorkerSession::LastFunction> WorkerSession::LastFunctions() const {
  return work_ == last_function_work_ ? last_functions_ : std::vector<LastFunction>();
}

void WorkerSession::MarkLegacyWork() {
  // Then nothing can have been put into a legacy stream since the last time.
  if (BlockingStreamIsCaptured()) return;
  legacy_marks_.clear();
  if (idle()) return;
  for (const auto& [handle, context] : contexts_) {
    if (MakeCurrent(table_, context.ref) != CUDA_SUCCESS) continue;
    AddMark(context, CU_STREAM_LEGACY, &legacy_marks_);
  }
}

void WorkerSession::MarkStreamWork(CUstream stream) {
  const auto done = [this](const WorkMark& mark) {
    return table_.cuEventQuery(mark.event.get()) != CUDA_ERROR_NOT_READY;
  };
  stream_marks_.erase(std::remove_if(stream_marks_.begin(), stream_marks_.end(), done), stream_marks_.end());
  if (idle()) return;
  CUcontext real = nullptr;
  if (table_.cuStreamGetCtx(stream, &real) != CUDA_SUCCESS) return;
  for (const auto& [handle, context] : contexts_) {
    if (context.ref.real != real || MakeCurrent(table_, context.ref) != CUDA_SUCCESS) continue;
    AddMark(context, stream, &stream_marks_);
    return;
  }
}

void WorkerSession::AddMark(const ContextInfo& context, CUstream stream, std::vector<WorkMark>* marks) {
  CUresult result = CUDA_SUCCESS;
  const CUevent event = EventBehindWork(table_, stream, &result);
  if (event == nullptr) return;  // its work is done
  const DriverTable* const driver = &table_;
  marks->push_back(
      {context.ref.id, context.device, {event, [driver](CUevent mark) { driver->cuEventDestroy_v2(mark); }}});
}

void WorkerSession::CollectPendingFrees(bool wait) {
  // What a stream has freed is free in the order of the frees, so one that is not yet speaks for those behind it; and
  // only so many are looked at, since this is done for every allocation.
  constexpr int kMostBusy = 32;
  uint64_t busy_stream = 0;
  uint64_t busy_context = 0;
  int busy = 0;
  for (auto it = pending_frees_.begin(); it != pending_frees_.end() && busy < kMostBusy;) {
    if (!wait && busy > 0 && it->stream == busy_stream && it->context.id == busy_context) {
      ++busy;
      ++it;
      continue;
    }
    if (MakeCurrent(table_, it->context) != CUDA_SUCCESS) {
      ++it;
      continue;
    }
    const CUresult state = wait ? table_.cuEventSynchronize(it->event) : table_.cuEventQuery(it->event);
    if (state != CUDA_SUCCESS) {
      if (!wait) {
        busy_stream = it->stream;
        busy_context = it->context.id;
        ++busy;
      }
      ++it;
      continue;
    }
    table_.cuEventDestroy_v2(it->event);
    arena().Free(it->address);
    it = pending_frees_.erase(it);
  }
  MakeCurrent(table_, current_ref_);
}

}  // namespace cuda_remote::server
