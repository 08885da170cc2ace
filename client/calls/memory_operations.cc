// SPDX-License-Identifier: Apache-2.0
// Waits of streams for values in memory, and writes of values. An operation that looks right is sent without waiting;
// one that looks wrong is sent and waited for, so that the error is the driver's own and comes from the call, as
// natively.

#include <cuda.h>

#include <algorithm>
#include <string_view>

#include "client/calls/bodies.gen.h"
#include "client/calls/copy.h"
#include "client/calls/runtime.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// The driver's own limit of a batch.
constexpr unsigned kMostOperations = 256;

// What can be told of an operation without knowing the memory. Other flags than these may be wrong, or need what not
// every GPU can do.
bool IsPlain(CUdeviceptr address, uint64_t bytes, bool waits, unsigned flags) {
  const unsigned most = waits ? unsigned(CU_STREAM_WAIT_VALUE_AND) : unsigned(CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER);
  return address % bytes == 0 && flags <= most;
}

// One operation, of a value of 4 or 8 bytes.
template <typename Request, typename Value>
CUresult One(const CallInfo& info, CUstream stream, CUdeviceptr address, Value value, unsigned flags, bool waits,
             bool per_thread) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Request request;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &request.stream); result != CUDA_SUCCESS) {
    return result;
  }
  request.addr = address;
  request.value = value;
  request.flags = flags;
  request.Encode(&call.message());
  const bool looks_valid =
      IsPlain(address, sizeof(value), waits, flags) && KnowsDeviceRange(call, address, sizeof(value));
  return looks_valid ? call.Send() : call.Transact();
}

bool LooksValid(Call& call, const CUstreamBatchMemOpParams& operation) {
  const bool waits =
      operation.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 || operation.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
  const bool writes =
      operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32 || operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
  if (!waits && !writes) return false;
  // Both kinds have address and flags in the same places.
  const uint64_t bytes =
      operation.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64 || operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64
          ? 8
          : 4;
  const CUdeviceptr address = operation.waitValue.address;
  if (!IsPlain(address, bytes, waits, operation.waitValue.flags)) return false;
  uint64_t reached;
  return KnowsDeviceRange(call, address, bytes) ||
         IsSharedHostMemory(call.session(), reinterpret_cast<const void*>(address), bytes, &reached);
}

}  // namespace

CUresult Custom_cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags,
                                       bool per_thread) {
  return One<wire::cuStreamWaitValue32_v2_Request>(info::k_cuStreamWaitValue32_v2, stream, addr, value, flags, true,
                                                   per_thread);
}

CUresult Custom_cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags,
                                       bool per_thread) {
  return One<wire::cuStreamWaitValue64_v2_Request>(info::k_cuStreamWaitValue64_v2, stream, addr, value, flags, true,
                                                   per_thread);
}

CUresult Custom_cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags,
                                        bool per_thread) {
  return One<wire::cuStreamWriteValue32_v2_Request>(info::k_cuStreamWriteValue32_v2, stream, addr, value, flags, false,
                                                    per_thread);
}

CUresult Custom_cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags,
                                        bool per_thread) {
  return One<wire::cuStreamWriteValue64_v2_Request>(info::k_cuStreamWriteValue64_v2, stream, addr, value, flags, false,
                                                    per_thread);
}

CUresult Custom_cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* paramArray,
                                      unsigned int flags, bool per_thread) {
  Call call(info::k_cuStreamBatchMemOp_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuStreamBatchMemOp_v2_Request request;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &request.stream); result != CUDA_SUCCESS) {
    return result;
  }
  if (!paramArray && count != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!Fits(count, sizeof *paramArray)) return TooLong(call.info());
  request.count = count;
  request.paramArray = ArrayBytes(paramArray, count);
  request.flags = flags;
  request.Encode(&call.message());
  const bool looks_valid =
      flags == 0 && count <= kMostOperations &&
      std::all_of(paramArray, paramArray + count, [&call](const auto& one) { return LooksValid(call, one); });
  return looks_valid ? call.Send() : call.Transact();
}

}  // namespace cuda_remote::client
