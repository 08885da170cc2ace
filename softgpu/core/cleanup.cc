// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/cleanup.h"

#include "proto/driverabi/export_tables.h"
#include "proto/threads/mutex.h"
#include "softgpu/core/array.h"
#include "softgpu/core/event.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/module.h"
#include "softgpu/core/pool.h"

namespace cuda_remote::softgpu {

void DestroyObjectsOf(const ContextPtr& context) {
  const Context* raw = context.get();
  driverabi::ContextDestroyed(context->handle());
  for (const ModulePtr& module :
       Registry<Module>::Get().RemoveIf([raw](const Module& m) { return m.context() == raw; })) {
    module->Unload();
  }
  // Libraries are loaded again where they are used again.
  Registry<Library>::Get().ForEach([raw](Library& library) {
    MutexLock lock(&library.mutex);
    library.modules.erase(raw);
  });
  Registry<Event>::Get().RemoveIf([raw](const Event& event) { return event.context.get() == raw; });
  Registry<GraphExec>::Get().RemoveIf([raw](const GraphExec& exec) { return exec.context.get() == raw; });
  DestroyArraysOf(raw);
  // Pool and mapped memory belong to the device and stay.
  std::vector<AllocationPtr> memory = MemoryMap::Get().RemoveAll([raw](const Allocation& allocation) {
    return allocation.context == raw && allocation.kind != MemoryKind::kMapped && allocation.kind != MemoryKind::kPool;
  });
  for (AllocationPtr& allocation : memory) GiveBack(std::move(allocation));
}

}  // namespace cuda_remote::softgpu
