// SPDX-License-Identifier: Apache-2.0
// Facts: about the GPUs, functions, pointers, recorded events.

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "proto/codec/operations.gen.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// Whether that is what a query answers for an event that was last recorded in a capture. 580 on an H100 says
// CUDA_ERROR_CAPTURED_EVENT while the capture goes on, and CUDA_ERROR_INVALID_VALUE afterwards.
bool IsCapturedEvent(CUresult query) { return query == CUDA_ERROR_CAPTURED_EVENT || query == CUDA_ERROR_INVALID_VALUE; }

// Kernels have at most 4096 parameters; a driver that never says "no more" must not keep us here.
constexpr size_t kMaxParameters = 4096;

// Bytes that the driver writes for an attribute that may be asked for; 0: may not.
size_t PointerAttributeBytes(int32_t attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return 4;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return 8;
    default:
      return 0;
  }
}

}  // namespace

CUresult OpPing(WorkerSession&, const Request&, const wire::OpPing_Request& in, wire::OpPing_Reply* out,
                ReplyBuilder*) {
  out->value = in.value;
  return CUDA_SUCCESS;
}

CUresult OpSessionInfo(WorkerSession& session, const Request&, const wire::OpSessionInfo_Request&,
                       wire::OpSessionInfo_Reply* out, ReplyBuilder* reply) {
  const LoadedDriver& driver = session.loaded();
  for (const DeviceFacts& facts : driver.devices) {
    wire::DeviceInfo info;
    info.name = facts.name;
    info.uuid = facts.uuid;
    info.luid = facts.luid;
    info.luid_node_mask = facts.luid_node_mask;
    // A limited session has that much memory and no more.
    const uint64_t limit = session.arena().memory_limit();
    info.total_memory = limit != 0 ? std::min(limit, facts.total_memory) : facts.total_memory;
    info.pci_bus_id = facts.pci_bus_id;
    info.attributes = facts.attributes;
    info.primary_flags = facts.primary_flags;
    // Whether the session warmed a context up ahead of need is no business of the client's.
    info.primary_active = false;
    info.peers = facts.peers;
    out->devices.push_back(std::move(info));
  }
  out->driver_version = driver.version;
  out->software_gpu = driver.software;
  out->arena_base = session.arena().base();
  out->arena_bytes = session.arena().bytes();
  out->driver_path = driver.path;
  out->worker_pid = uint32_t(getpid());
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult OpFunctionInfo(WorkerSession& session, const Request&, const wire::OpFunctionInfo_Request& in,
                        wire::OpFunctionInfo_Reply* out, ReplyBuilder* reply) {
  const DriverTable& driver = session.driver();
  CUfunction function = nullptr;
  CUkernel kernel = nullptr;
  if (!session.Real(Kind::kFunction, in.function, &function) && !session.Real(Kind::kKernel, in.function, &kernel)) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (in.device < 0 || size_t(in.device) >= session.loaded().devices.size()) return CUDA_ERROR_INVALID_DEVICE;
  const char* name = nullptr;
  CUresult result = function ? driver.cuFuncGetName(&name, function) : driver.cuKernelGetName(&name, kernel);
  if (result != CUDA_SUCCESS) return result;
  for (size_t i = 0; i < kMaxParameters; ++i) {
    size_t offset = 0, size = 0;
    result = function ? driver.cuFuncGetParamInfo(function, i, &offset, &size)
                      : driver.cuKernelGetParamInfo(kernel, i, &offset, &size);
    if (result == CUDA_ERROR_INVALID_VALUE) break;  // no more
    if (result != CUDA_SUCCESS) return result;
    wire::Parameter parameter;
    parameter.offset = uint32_t(offset);
    parameter.size = uint32_t(size);
    out->parameters.push_back(parameter);
  }
  for (int i = 0; i < CU_FUNC_ATTRIBUTE_MAX; ++i) {
    int value = 0;
    result = function ? driver.cuFuncGetAttribute(&value, CUfunction_attribute(i), function)
                      : driver.cuKernelGetAttribute(&value, CUfunction_attribute(i), kernel, in.device);
    out->attributes.push_back(result == CUDA_SUCCESS ? value : kRefusedAttribute);
  }
  out->name = name != nullptr ? name : "";
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult OpPointerAttribute(WorkerSession& session, const Request&, const wire::OpPointerAttribute_Request& in,
                            wire::OpPointerAttribute_Reply* out, ReplyBuilder* reply) {
  const size_t bytes = PointerAttributeBytes(in.attribute);
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (!session.OwnsDeviceRange(in.address, 1) && !session.host_ranges().Owns(in.address, 1))
    return CUDA_ERROR_INVALID_VALUE;
  char value[64] = {};
  const CUresult result = session.driver().cuPointerGetAttribute(value, CUpointer_attribute(in.attribute), in.address);
  if (result != CUDA_SUCCESS) return result;
  out->value = std::string_view(value, bytes);
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

// How long ago each event completed: the time to an event that is recorded now, in a stream that waits for no other.
// The request names the context that the events belong to.
CUresult OpEventTimes(WorkerSession& session, const Request&, const wire::OpEventTimes_Request& in,
                      wire::OpEventTimes_Reply* out, ReplyBuilder*) {
  const DriverTable& driver = session.driver();
  CUstream stream = nullptr;
  CUevent now = nullptr;
  CUresult result = driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS) result = driver.cuEventCreate(&now, CU_EVENT_DEFAULT);
  if (result == CUDA_SUCCESS) result = driver.cuEventRecord(now, stream);
  if (result == CUDA_SUCCESS) result = driver.cuStreamSynchronize(stream);
  for (size_t i = 0; result == CUDA_SUCCESS && i < in.events.size(); ++i) {
    CUevent event = nullptr;
    if (!session.Real(Kind::kEvent, in.events[i], &event)) {
      result = CUDA_ERROR_INVALID_HANDLE;
      break;
    }
    // Fails for an event that was not recorded, has not passed, or has no timing.
    float milliseconds = 0;
    const bool captured = in.ask_captured && IsCapturedEvent(driver.cuEventQuery(event));
    const bool known = !captured && driver.cuEventElapsedTime_v1(&milliseconds, event, now) == CUDA_SUCCESS;
    if (captured) out->captured.push_back(in.events[i]);
    out->microseconds.push_back(known ? std::max(0.0, double(milliseconds) * 1000) : -1);
  }
  if (now) driver.cuEventDestroy_v2(now);
  if (stream) driver.cuStreamDestroy_v2(stream);
  return result;
}

}  // namespace cuda_remote::server
