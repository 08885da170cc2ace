// SPDX-License-Identifier: Apache-2.0
// Managed memory with a home on the GPU: server/worker/memory/managed_memory.h does the work, this is what clients may
// ask.

#include "server/worker/memory/managed_memory.h"

#include <cuda.h>
#include <sys/stat.h>

#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/base/unique_fd.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/requests.h"
#include "proto/mirror/fetched.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/calls/work.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/mirror_requests.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// The descriptor was sent before the request, on another way.
constexpr int kDescriptorTimeoutMs = 5000;
// Up to so many bytes the executor copies itself: handing the copy over takes longer.
constexpr uint64_t kShortCopy = 256 << 10;
// Bytes of a reply: no client asks for more.
constexpr uint64_t kMostCarried = 32 << 20;

using driverabi::kAtOnce, driverabi::kForStream, driverabi::kUnlessBusy, driverabi::kUnlessStreamBusy;
using driverabi::kUnmapClear, driverabi::kUnmapFree, driverabi::kUnmapWaitOnly;

bool FileHolds(int fd, uint64_t offset, uint64_t bytes) {
  struct stat facts;
  if (fstat(fd, &facts) != 0 || !S_ISREG(facts.st_mode)) return false;
  const uint64_t size = uint64_t(facts.st_size);
  return offset <= size && bytes <= size - offset;
}

// All GPUs, if all of them reach the memory of `device`; else none.
std::vector<int> DevicesThatReach(WorkerSession& session, int device) {
  const std::vector<DeviceFacts>& facts = session.loaded().devices;
  std::vector<int> devices;
  for (int other = 0; size_t(other) < facts.size(); ++other) {
    const std::vector<uint32_t>& peers = facts[size_t(other)].peers;
    if (other != device && (size_t(device) >= peers.size() || peers[size_t(device)] == 0)) return {};
    devices.push_back(other);
  }
  return devices;
}

// Whether the driver has noted the end of all of it. Leaves another context current.
bool HasEnded(WorkerSession& session, const Work& work) {
  const DriverTable& driver = session.driver();
  for (const auto& [context, stream] : work.streams) {
    if (MakeCurrent(driver, context) == CUDA_SUCCESS && driver.cuStreamQuery(stream) == CUDA_ERROR_NOT_READY)
      return false;
  }
  for (const WorkMark& mark : work.marks) {
    if (driver.cuEventQuery(mark.event.get()) == CUDA_ERROR_NOT_READY) return false;
  }
  if (work.contexts.empty()) return true;
  return session.work().QueryAll(work.contexts) != CUDA_ERROR_NOT_READY;
}

// If the last work of the session are functions of the host's, and the client has run them: waits until the driver has
// noted that. A program may go by such a function (CUDA C++ Programming Guide, "Managing Data Visibility and Concurrent
// CPU + GPU Access with Streams"). Leaves another context current. False if it is not so.
bool AwaitEndedFunctions(WorkerSession& session) {
  const std::vector<LastFunction> functions = session.work().LastFunctions();
  if (functions.empty() || CapturesInProgress() != 0) return false;
  for (const auto& [context, handle, id] : functions) {
    if (!session.host_functions().IsDone(id)) return false;
  }
  for (const auto& [context, handle, id] : functions) {
    CUstream stream;
    if (!session.RealStream(handle, &stream) || MakeCurrent(session.driver(), context) != CUDA_SUCCESS) continue;
    session.driver().cuStreamSynchronize(stream);
  }
  return true;
}

// Whether all of it is done, as far as the program can know. Leaves another context current.
bool IsDone(WorkerSession& session, const Work& work) {
  return HasEnded(session, work) || (AwaitEndedFunctions(session) && HasEnded(session, work));
}

}  // namespace

void NoteFetched(bool in_place, std::string* payload) {
  payload->assign(1, in_place ? mirror::kFetchedInPlace : mirror::kFetched);
}

void EndFetchExpected(WorkerSession& session, ReplyBuilder* reply) {
  NoteFetched(session.managed_memory().EndFetch(), &reply->payload);
  MakeCurrent(session.driver(), session.contexts().current_ref());
}

void FetchExpected(WorkerSession& session, const Request& request, ReplyBuilder* reply) {
  const std::string_view runs = request.payload.unstable();
  if (runs.empty() || session.executes_kept() || !IsDone(session, AllWork(session))) return;
  session.PrepareManagedMemory();
  bool in_place;
  if (session.managed_memory().FetchAtWait(runs, &in_place) == CUDA_SUCCESS) NoteFetched(in_place, &reply->payload);
  MakeCurrent(session.driver(), session.contexts().current_ref());
}

bool BeginFetchExpected(WorkerSession& session, const Request& request) {
  const std::string_view runs = request.payload.unstable();
  // A host function may use the pages before what was begun here ends.
  if (runs.empty() || session.executes_kept() || session.work().idle() || session.host_functions().Any()) return false;
  if (session.contexts().all().size() != 1 || CapturesInProgress() != 0 || !session.work().stream_marks().empty())
    return false;
  bool all_block = true;
  session.handles().ForEach(Kind::kStream, [&](const HandleMap::Entry& entry) {
    all_block = all_block && IsBlocking(reinterpret_cast<CUstream>(entry.real));
  });
  if (!all_block) return false;
  session.PrepareManagedMemory();
  return session.managed_memory().BeginFetch(runs);
}

CUresult OpManagedMap(WorkerSession& session, const Request&, const wire::OpManagedMap_Request& in,
                      wire::OpManagedMap_Reply*, ReplyBuilder*) {
  constexpr uint64_t kPage = ManagedMemory::kPage;
  const bool aligned = in.address % kPage == 0 && in.bytes % kPage == 0 && in.offset % kPage == 0;
  const bool inside = in.address >= kManagedBase && in.bytes != 0 && in.bytes <= kManagedBytes &&
                      in.address - kManagedBase <= kManagedBytes - in.bytes;
  if (!aligned || !inside) return kMalformedRequest;
  const UniqueFd file(in.tag == 0 ? -1 : session.channel().TakeFd(in.tag, kDescriptorTimeoutMs));
  const int fd = file.get();
  if (in.tag != 0 && fd < 0) return CUDA_ERROR_INVALID_VALUE;
  if (fd >= 0 && !FileHolds(fd, in.offset, in.bytes)) return kMalformedRequest;
  if (in.device < 0 || size_t(in.device) >= session.loaded().devices.size()) return CUDA_ERROR_INVALID_DEVICE;
  if (session.host_ranges().Overlaps(in.address, in.bytes)) return CUDA_ERROR_INVALID_VALUE;
  const std::vector<int> devices = DevicesThatReach(session, in.device);
  if (devices.empty()) return CUDA_ERROR_NOT_SUPPORTED;
  if (!ChargeWithRoom(in.bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  session.PrepareManagedMemory();
  ManagedMemory& managed = session.managed_memory();
  CUresult result = managed.Map(in.address, in.bytes, in.device, devices, fd, in.offset);
  if (result == CUDA_ERROR_OUT_OF_MEMORY && CapturesInProgress() == 0) {
    session.frees().Collect(true);
    session.arena().Trim();
    result = managed.Map(in.address, in.bytes, in.device, devices, fd, in.offset);
  }
  MakeCurrent(session.driver(), session.contexts().current_ref());
  if (result != CUDA_SUCCESS) {
    session.arena().Discharge(in.bytes);
    return result;
  }
  DeviceRange range;
  range.kind = DeviceRange::kManaged;
  range.managed = true;
  range.bytes = in.bytes;
  range.device = in.device;
  range.context = session.CurrentContext();
  session.ranges().Insert(in.address, range);
  return CUDA_SUCCESS;
}

CUresult OpManagedUnmap(WorkerSession& session, const Request&, const wire::OpManagedUnmap_Request& in,
                        wire::OpManagedUnmap_Reply*, ReplyBuilder* reply) {
  ManagedMemory* const managed = &session.managed_memory();
  if (in.action > kUnmapWaitOnly) return kMalformedRequest;
  const uint64_t bytes = managed->BytesAt(in.address);
  if (bytes == 0 && in.action != kUnmapWaitOnly) return CUDA_ERROR_INVALID_VALUE;
  if (in.action == kUnmapFree) session.ranges().Erase(in.address);
  session.PrepareManagedMemory();
  DeviceArena* const arena = &session.arena();
  const DriverTable* const driver = &session.driver();
  const auto finish = [managed, arena, bytes, address = in.address, action = in.action] {
    if (action == kUnmapWaitOnly) return CUDA_SUCCESS;
    if (action == kUnmapClear) return managed->Clear(address);
    const CUresult result = managed->Unmap(address);
    arena->Discharge(bytes);
    return result;
  };
  if (session.work().idle()) {
    const CUresult result = finish();
    MakeCurrent(*driver, session.contexts().current_ref());
    return result;
  }
  // Work in progress ends first, as natively.
  const std::function<CUresult()> wait = WaitFor(session, AllWork(session));
  session.answers().DeferIn(session.contexts().Any(), reply, [=](Answer*) {
    const CUresult result = wait();
    const CUresult finished = finish();
    return result == CUDA_SUCCESS ? finished : result;
  });
  return CUDA_SUCCESS;
}

CUresult FlushManaged(WorkerSession& session, std::string_view payload) {
  ManagedMemory& managed = session.managed_memory();
  return managed.carried() ? managed.Write(payload) : managed.Flush(payload);
}

CUresult FetchManaged(WorkerSession& session, uint64_t address, uint64_t bytes, std::string* payload) {
  ManagedMemory& managed = session.managed_memory();
  return managed.carried() ? managed.Read(address, bytes, payload) : managed.Fetch(address, bytes);
}

CUresult OpManagedFlush(WorkerSession& session, const Request& request, const wire::OpManagedFlush_Request&,
                        wire::OpManagedFlush_Reply*, ReplyBuilder*) {
  session.PrepareManagedMemory();
  ManagedMemory& managed = session.managed_memory();
  const std::string_view payload = request.payload.unstable();
  const bool idle = session.work().idle() && session.contexts().all().size() == 1 && CapturesInProgress() == 0;
  const CUresult result = managed.carried() ? managed.Write(payload) : managed.BeginFlush(payload, idle);
  MakeCurrent(session.driver(), session.contexts().current_ref());
  return result == CUDA_ERROR_INVALID_VALUE ? kMalformedRequest : result;
}

CUresult OpManagedFetch(WorkerSession& session, const Request&, const wire::OpManagedFetch_Request& in,
                        wire::OpManagedFetch_Reply* out, ReplyBuilder* reply) {
  ManagedMemory& managed = session.managed_memory();
  if (in.wait > kUnlessStreamBusy || in.bytes == 0 || !managed.Contains(in.address, in.bytes)) return kMalformedRequest;
  if (managed.carried() && in.bytes > kMostCarried) return kMalformedRequest;
  session.PrepareManagedMemory();
  const DriverTable* const driver = &session.driver();
  Work work;
  CUstream stream = nullptr;
  if (in.wait == kForStream || in.wait == kUnlessStreamBusy) {
    // A stream that is gone has nothing to do any more.
    if (in.stream > 2 && session.RealStream(in.stream, &stream) && !IsCaptured(stream)) {
      work.streams.emplace_back(session.contexts().Any(), stream);
    }
  } else if (in.wait != kAtOnce) {
    work = AllWork(session);
  }
  const bool done = IsDone(session, work);
  if (!done && (in.wait == kUnlessBusy || in.wait == kUnlessStreamBusy)) {
    out->busy = true;
    MakeCurrent(*driver, session.contexts().current_ref());
    return CUDA_SUCCESS;
  }
  if (in.bytes <= kShortCopy && done) {
    const CUresult result = FetchManaged(session, in.address, in.bytes, &reply->payload);
    MakeCurrent(*driver, session.contexts().current_ref());
    return result;
  }
  MakeCurrent(*driver, session.contexts().current_ref());
  std::string message;
  out->Encode(&message);
  WorkerSession* const self = &session;
  const std::function<CUresult()> wait = WaitFor(session, done ? Work() : work);
  session.answers().DeferIn({}, reply, [=](Answer* answer) {
    answer->message = message;
    const CUresult result = wait();
    const CUresult fetched = FetchManaged(*self, in.address, in.bytes, &answer->payload);
    return result == CUDA_SUCCESS ? fetched : result;
  });
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
