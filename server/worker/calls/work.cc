// SPDX-License-Identifier: Apache-2.0
#include "server/worker/calls/work.h"

#include <set>

#include "server/worker/memory/uploads.h"
#include "server/worker/session/driver_hooks.h"

namespace cuda_remote::server {

namespace {

// An event behind all work of the current context. Null if the driver makes none: those before CUDA 12.5.
CUevent EventBehindAll(const DriverTable& driver, const ContextRef& context) {
  CUevent event = nullptr;
  if (driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) return nullptr;
  if (driver.cuCtxRecordEvent(context.real, event) == CUDA_SUCCESS) return event;
  driver.cuEventDestroy_v2(event);
  return nullptr;
}

// All work of the session on these GPUs.
Work WorkOn(WorkerSession& session, const std::function<bool(int gpu)>& included) {
  Work work;
  if (session.work().idle()) return work;
  std::set<uint64_t> contexts;  // ContextRef::id
  for (const auto& [handle, context] : session.contexts().all()) {
    if (included(context.device)) contexts.insert(context.ref.id);
  }
  const bool all = contexts.size() == session.contexts().all().size();
  const auto add_contexts = [&](const auto& add) {
    for (const auto& [handle, context] : session.contexts().all()) {
      if (contexts.count(context.ref.id) != 0) add(context.ref);
    }
  };
  if (CapturesInProgress() == 0) {
    add_contexts([&](const ContextRef& context) { work.contexts.push_back(context); });
    if (all) work.session = session.work().given();
    return work;
  }
  session.handles().ForEach(Kind::kStream, [&](const HandleMap::Entry& entry) {
    const CUstream stream = reinterpret_cast<CUstream>(entry.real);
    if (IsCaptured(stream)) return;
    const int gpu = session.GpuOf(entry.handle);
    if (all || gpu == GpuReach::kAny || included(gpu)) work.streams.emplace_back(session.contexts().Any(), stream);
  });
  const auto add_marks = [&](const std::vector<WorkMark>& marks) {
    for (const WorkMark& mark : marks) {
      if (included(mark.gpu)) work.marks.push_back(mark);
    }
  };
  add_marks(session.work().stream_marks());
  if (session.work().BlockingStreamIsCaptured()) {
    add_marks(session.work().legacy_marks());
  } else {
    add_contexts([&](const ContextRef& context) { work.streams.emplace_back(context, CU_STREAM_LEGACY); });
  }
  return work;
}

}  // namespace

Work AllWork(WorkerSession& session) {
  return WorkOn(session, [](int) { return true; });
}

Work WorkOnMemoryOf(WorkerSession& session, int gpu) {
  return WorkOn(session, [&session, gpu](int user) { return session.MayUseMemoryOf(user, gpu); });
}

std::function<CUresult()> WaitFor(WorkerSession& session, const Work& work) {
  const DriverTable* const driver = &session.driver();
  CUresult marked = CUDA_SUCCESS;
  std::vector<CUevent> events;
  for (const auto& [context, stream] : work.streams) {
    CUresult result = MakeCurrent(*driver, context);
    if (result == CUDA_SUCCESS) {
      if (const CUevent event = EventBehind(*driver, stream, &result)) events.push_back(event);
    }
    if (marked == CUDA_SUCCESS) marked = result;
  }
  // A wait for a context would invalidate a capture that begins meanwhile; a wait for an event does not.
  std::vector<ContextRef> contexts;
  for (const ContextRef& context : work.contexts) {
    if (MakeCurrent(*driver, context) != CUDA_SUCCESS) continue;
    if (const CUevent event = EventBehindAll(*driver, context)) {
      events.push_back(event);
    } else {
      contexts.push_back(context);
    }
  }
  if (!work.streams.empty() || !work.contexts.empty()) MakeCurrent(*driver, session.contexts().current_ref());
  GpuWork* const session_work = &session.work();
  return [driver, session_work, marked, events, contexts, marks = work.marks, all = work.session] {
    CUresult result = marked;
    const auto note = [&result](CUresult other) {
      if (result == CUDA_SUCCESS) result = other;
    };
    for (const ContextRef& context : contexts) {
      if (MakeCurrent(*driver, context) == CUDA_SUCCESS) note(driver->cuCtxSynchronize());
    }
    for (const CUevent event : events) {
      note(driver->cuEventSynchronize(event));
      driver->cuEventDestroy_v2(event);
    }
    for (const WorkMark& mark : marks) note(driver->cuEventSynchronize(mark.event.get()));
    if (result == CUDA_SUCCESS && all != 0) session_work->NoteSynchronized(all);
    return result;
  };
}

std::function<CUresult()> WaitBesideSideWork(WorkerSession& session, const ContextRef& context) {
  const DriverTable& driver = session.driver();
  Work work;
  bool blocking = false;
  session.handles().ForEach(Kind::kStream, [&](const HandleMap::Entry& entry) {
    const CUstream stream = reinterpret_cast<CUstream>(entry.real);
    if (driver.cuStreamQuery(stream) != CUDA_ERROR_NOT_READY) return;
    blocking = blocking || IsBlocking(stream);
    work.streams.emplace_back(context, stream);
  });
  // An event in the legacy stream would be behind the work of such streams, and later work of others behind the event:
  // an order that the program has not asked for, and that may never come about.
  if (blocking) return nullptr;
  work.streams.emplace_back(context, CU_STREAM_LEGACY);
  work.marks = session.work().stream_marks();
  return WaitFor(session, work);
}

void GiveBackStaging(WorkerSession& session) {
  if (!session.staging().has_much_unused() || CapturesInProgress() != 0) return;
  std::vector<ContextRef> contexts;
  for (const auto& [handle, context] : session.contexts().all()) contexts.push_back(context.ref);
  const bool nothing = session.work().QueryAll(contexts) == CUDA_SUCCESS;
  if (nothing && MakeCurrent(session.driver(), session.contexts().Any()) == CUDA_SUCCESS) session.staging().GiveBack();
  MakeCurrent(session.driver(), session.contexts().current_ref());
}

}  // namespace cuda_remote::server
