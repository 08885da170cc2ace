// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/work.h"

#include <time.h>

#include <cstring>

#include "proto/threads/mutex.h"
#include "softgpu/core/event.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/settings.h"
#include "softgpu/core/stream.h"
#include "softgpu/core/texture_objects.h"

namespace cuda_remote::softgpu {
namespace {

thread_local GraphValues* t_values = nullptr;

CUresult FaultResult(ptx::Fault fault) {
  switch (fault) {
    case ptx::Fault::kNone:
      return CUDA_SUCCESS;
    case ptx::Fault::kIllegalAddress:
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    case ptx::Fault::kMisaligned:
      return CUDA_ERROR_MISALIGNED_ADDRESS;
    case ptx::Fault::kIllegalInstruction:
      return CUDA_ERROR_ILLEGAL_INSTRUCTION;
    case ptx::Fault::kTrap:
      return CUDA_ERROR_LAUNCH_FAILED;
    case ptx::Fault::kAssert:
      return CUDA_ERROR_ASSERT;
    case ptx::Fault::kUnsupported:
      return CUDA_ERROR_NOT_SUPPORTED;
    case ptx::Fault::kDeadlock:
      return CUDA_ERROR_LAUNCH_TIMEOUT;
    case ptx::Fault::kStackOverflow:
      return CUDA_ERROR_LAUNCH_FAILED;
    case ptx::Fault::kInvalidLaunch:
      return CUDA_ERROR_INVALID_VALUE;
    case ptx::Fault::kInvalidCode:
      return CUDA_ERROR_INVALID_PC;
    case ptx::Fault::kCancelled:
      return CUDA_ERROR_LAUNCH_FAILED;
  }
  return CUDA_ERROR_UNKNOWN;
}

CUresult PerformKernel(const KernelWork& work, Context& context) {
  ptx::LaunchOptions options;
  options.grid = work.grid;
  options.block = work.block;
  options.cluster = work.cluster;
  options.explicit_cluster = work.explicit_cluster;
  options.dynamic_shared_bytes = work.shared_bytes;
  options.params = work.params;
  options.memory = &MemoryMap::Get();
  options.textures = &Textures();
  options.print = [&context](std::string_view text) { context.Print(text); };
  options.complain = [&context](std::string_view text) { context.Complain(text); };
  options.cancel = context.cancel();
  options.cooperative = work.cooperative;
  options.host_threads = GetSettings().kernel_threads;
  options.max_shared_bytes = kSharedPerBlockOptin;
  static std::atomic<uint64_t> grids{1};
  options.grid_id = grids++;
  const ContextPtr home = context.Home();
  options.device_malloc = [&home](uint64_t bytes) { return home->heap.Take(*home, bytes); };
  options.device_free = [&home](uint64_t address) { home->heap.Give(address); };
  if (GraphValues* const values = t_values) {
    options.set_conditional = [values](uint64_t handle, uint32_t value) {
      MutexLock lock(&values->mutex);
      if (handle - 1 < values->values.size()) values->values[handle - 1] = value;
    };
  }
  MemoryMap::Get().BeginLaunch();
  ptx::LaunchResult result = work.module->code().Launch(work.function->name, options);
  MemoryMap::Get().EndLaunch();
  // After this, calls give the error and wait for nothing: what the kernel has printed comes out now.
  if (!result.ok()) context.FlushOutput();
  if (!result.ok() && result.fault != ptx::Fault::kCancelled) Log("kernel failed: " + result.message);
  return FaultResult(result.fault);
}

CUresult PerformCopy(const CopyWork& work) {
  auto* to = reinterpret_cast<char*>(work.to);
  const char* from = work.staged ? work.staged->data() : reinterpret_cast<const char*>(work.from);
  uint64_t from_pitch = work.staged ? work.width : work.from_pitch;
  uint64_t from_slice = work.staged ? work.width * work.height : work.from_slice;
  for (uint64_t z = 0; z < work.depth; ++z) {
    for (uint64_t y = 0; y < work.height; ++y) {
      std::memmove(to + z * work.to_slice + y * work.to_pitch, from + z * from_slice + y * from_pitch, work.width);
    }
  }
  return CUDA_SUCCESS;
}

template <typename T>
void Fill(const MemsetWork& work) {
  for (uint64_t y = 0; y < work.height; ++y) {
    T* row = reinterpret_cast<T*>(work.to + y * work.pitch);
    for (uint64_t x = 0; x < work.width; ++x) row[x] = static_cast<T>(work.value);
  }
}

CUresult PerformMemset(const MemsetWork& work) {
  switch (work.element) {
    case 1: {
      for (uint64_t y = 0; y < work.height; ++y) {
        std::memset(reinterpret_cast<void*>(work.to + y * work.pitch), static_cast<int>(work.value), work.width);
      }
      break;
    }
    case 2:
      Fill<uint16_t>(work);
      break;
    default:
      Fill<uint32_t>(work);
      break;
  }
  return CUDA_SUCCESS;
}

bool ValueReached(uint64_t now, const ValueWork& work) {
  if (!work.wide) {
    uint32_t have = static_cast<uint32_t>(now), want = static_cast<uint32_t>(work.value);
    switch (work.flags & 3) {
      case CU_STREAM_WAIT_VALUE_GEQ:
        return static_cast<int32_t>(have - want) >= 0;
      case CU_STREAM_WAIT_VALUE_EQ:
        return have == want;
      case CU_STREAM_WAIT_VALUE_AND:
        return (have & want) != 0;
      default:
        return ~(have | want) != 0;
    }
  }
  switch (work.flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return static_cast<int64_t>(now - work.value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return now == work.value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (now & work.value) != 0;
    default:
      return ~(now | work.value) != 0;
  }
}

CUresult PerformValue(const ValueWork& work, Context& context) {
  auto* narrow = reinterpret_cast<uint32_t*>(work.address);
  auto* wide = reinterpret_cast<uint64_t*>(work.address);
  if (!work.wait) {
    if (work.wide) {
      __atomic_store_n(wide, work.value, __ATOMIC_RELEASE);
    } else {
      __atomic_store_n(narrow, static_cast<uint32_t>(work.value), __ATOMIC_RELEASE);
    }
    return CUDA_SUCCESS;
  }
  for (unsigned round = 0;; ++round) {
    uint64_t now = work.wide ? __atomic_load_n(wide, __ATOMIC_ACQUIRE) : __atomic_load_n(narrow, __ATOMIC_ACQUIRE);
    if (ValueReached(now, work)) return CUDA_SUCCESS;
    if (context.cancel()->load() || context.error() != CUDA_SUCCESS) return CUDA_SUCCESS;
    timespec pause = {0, round < 100 ? 2000 : 50000};
    nanosleep(&pause, nullptr);
  }
}

struct Performer {
  Context& context;
  CUresult operator()(const EmptyWork&) const { return CUDA_SUCCESS; }
  CUresult operator()(const KernelWork& work) const {
    Delay();
    return PerformKernel(work, context);
  }
  CUresult operator()(const CopyWork& work) const {
    Delay();
    return PerformCopy(work);
  }
  CUresult operator()(const MemsetWork& work) const { return PerformMemset(work); }
  CUresult operator()(const HostWork& work) const {
    work.function(work.data);
    return CUDA_SUCCESS;
  }
  CUresult operator()(const EventRecordWork& work) const {
    work.event->RecordNow();
    return CUDA_SUCCESS;
  }
  CUresult operator()(const EventWaitWork& work) const {
    if (auto record = work.event->latest(); record && record->task) record->task->Wait();
    return CUDA_SUCCESS;
  }
  CUresult operator()(const ChildGraphWork& work) const { return PerformGraph(*work.graph); }
  CUresult operator()(const ConditionalWork& work) const {
    if (work.type == CU_GRAPH_COND_TYPE_WHILE) {
      while (ValueOf(work.handle) != 0) {
        if (context.cancel()->load() || context.error() != CUDA_SUCCESS) return CUDA_SUCCESS;
        if (CUresult result = PerformGraph(*work.bodies[0]); result != CUDA_SUCCESS) return result;
      }
      return CUDA_SUCCESS;
    }
    const uint32_t value = ValueOf(work.handle);
    const uint32_t body = work.type == CU_GRAPH_COND_TYPE_SWITCH ? value : value == 0;
    return body < work.bodies.size() ? PerformGraph(*work.bodies[body]) : CUDA_SUCCESS;
  }
  CUresult operator()(const ValueWork& work) const { return PerformValue(work, context); }

 private:
  CUresult PerformGraph(const Graph& graph) const {
    std::vector<Work> works;
    {
      RecursiveMutexLock lock(&CaptureMutex());
      std::vector<GraphNode*> order;
      graph.Order(&order);
      for (GraphNode* node : order) {
        if (node->enabled) works.push_back(node->work);
      }
    }
    for (const Work& each : works) {
      if (CUresult result = Perform(each, context); result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  }
  static uint32_t ValueOf(uint64_t handle) {
    if (t_values == nullptr) return 0;
    MutexLock lock(&t_values->mutex);
    return handle - 1 < t_values->values.size() ? t_values->values[handle - 1] : 0;
  }
};

}  // namespace

void Stage(CopyWork* work) {
  work->staged = std::make_shared<std::string>();
  work->staged->reserve(work->width * work->height * work->depth);
  for (uint64_t z = 0; z < work->depth; ++z) {
    for (uint64_t y = 0; y < work->height; ++y) {
      work->staged->append(reinterpret_cast<const char*>(work->from + z * work->from_slice + y * work->from_pitch),
                           work->width);
    }
  }
}

GraphValuesScope::GraphValuesScope(GraphValues* values) : before_(t_values) { t_values = values; }
GraphValuesScope::~GraphValuesScope() { t_values = before_; }

CUresult Perform(const Work& work, Context& context) { return std::visit(Performer{context}, work); }

namespace {

// Copies and the like use memory of other devices without peer access.
void NoteMemory(const Work& work, int device) {
  const auto note = [device](uint64_t address) {
    const AllocationPtr allocation = MemoryMap::Get().Find(address);
    if (allocation && allocation->device != device) NoteReach(device, allocation->device);
  };
  if (const auto* const copy = std::get_if<CopyWork>(&work)) {
    note(copy->to);
    if (!copy->staged) note(copy->from);
  } else if (const auto* const fill = std::get_if<MemsetWork>(&work)) {
    note(fill->to);
  } else if (const auto* const value = std::get_if<ValueWork>(&work)) {
    note(value->address);
  }
}

}  // namespace

CUresult Issue(const StreamPtr& stream, Work work) {
  if (std::shared_ptr<Capture> capture = CaptureOf(stream)) return CaptureWork(stream, capture, std::move(work));
  if (CUresult result = CheckLegacyCapture(stream); result != CUDA_SUCCESS) return result;
  Context* context = stream->context().get();  // the stream, which runs it, holds the context
  if (DeviceCount() > 1) NoteMemory(work, context->device());
  stream->Submit([context, work = std::move(work)] { return Perform(work, *context); });
  return CUDA_SUCCESS;
}

CUresult IssueAndWait(const StreamPtr& stream, Work work) {
  if (CaptureOf(stream)) return ForbiddenInCapture(stream);
  if (CUresult result = CheckLegacyCapture(stream); result != CUDA_SUCCESS) return result;
  Context* context = stream->context().get();
  TaskPtr task = stream->Submit([context, work = std::move(work)] { return Perform(work, *context); });
  task->Wait();
  context->FlushOutput();
  return context->error();
}

}  // namespace cuda_remote::softgpu
