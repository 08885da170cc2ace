// SPDX-License-Identifier: Apache-2.0
#include "client/session/host_needs.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <shared_mutex>

#include "client/session/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

using Addresses = std::vector<uint64_t>;

void OfBatch(std::string_view operations, Addresses* out) {
  CUstreamBatchMemOpParams one;
  for (; operations.size() >= sizeof one; operations.remove_prefix(sizeof one)) {
    memcpy(&one, operations.data(), sizeof one);
    switch (one.operation) {
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        out->push_back(one.waitValue.address);
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        out->push_back(one.writeValue.address);
        break;
      default:
        break;
    }
  }
}

void OfFill(std::string_view params, Addresses* out) {
  CUDA_MEMSET_NODE_PARAMS_v1 fill;
  if (params.size() != sizeof fill) return;
  memcpy(&fill, params.data(), sizeof fill);
  out->push_back(fill.dst);
}

template <typename Copy>
void OfShaped(std::string_view params, Addresses* out) {
  Copy copy;
  if (params.size() != sizeof copy) return;
  memcpy(&copy, params.data(), sizeof copy);
  if (copy.srcMemoryType == CU_MEMORYTYPE_DEVICE) out->push_back(copy.srcDevice);
  if (copy.dstMemoryType == CU_MEMORYTYPE_DEVICE) out->push_back(copy.dstDevice);
  if (copy.srcMemoryType == CU_MEMORYTYPE_HOST) out->push_back(reinterpret_cast<uint64_t>(copy.srcHost));
  if (copy.dstMemoryType == CU_MEMORYTYPE_HOST) out->push_back(reinterpret_cast<uint64_t>(copy.dstHost));
}

void OfNode(const wire::NodeParams& params, Addresses* out) {
  OfShaped<CUDA_MEMCPY3D>(params.copy, out);
  OfFill(params.memset, out);
  OfBatch(params.memory_operations, out);
}

// Decodes the request and hands it on.
template <typename Request, typename Use>
void With(std::string_view message, const Use& use) {
  Request request;
  if (request.Decode(message)) use(request);
}

const auto FillOf = [](Addresses* out) { return [out](const auto& request) { out->push_back(request.dstDevice); }; };
const auto ValueOf = [](Addresses* out) { return [out](const auto& request) { out->push_back(request.addr); }; };
const auto NodeOf = [](Addresses* out) { return [out](const auto& request) { OfNode(request.params, out); }; };

}  // namespace

Addresses AddressesOf(uint32_t call, std::string_view message) {
  Addresses out;
  switch (call) {
    case kCall_cuMemcpyAsync:
      With<wire::cuMemcpyAsync_Request>(message, [&out](const auto& request) { out = {request.dst, request.src}; });
      break;
    case kCall_cuMemcpy2DAsync_v2:
      With<wire::cuMemcpy2DAsync_v2_Request>(message, [&](const auto& r) { OfShaped<CUDA_MEMCPY2D>(r.copy, &out); });
      break;
    case kCall_cuMemcpy3DAsync_v2:
      With<wire::cuMemcpy3DAsync_v2_Request>(message, [&](const auto& r) { OfShaped<CUDA_MEMCPY3D>(r.copy, &out); });
      break;
    case kCall_cuMemsetD8Async:
      With<wire::cuMemsetD8Async_Request>(message, FillOf(&out));
      break;
    case kCall_cuMemsetD16Async:
      With<wire::cuMemsetD16Async_Request>(message, FillOf(&out));
      break;
    case kCall_cuMemsetD32Async:
      With<wire::cuMemsetD32Async_Request>(message, FillOf(&out));
      break;
    case kCall_cuMemsetD2D8Async:
      With<wire::cuMemsetD2D8Async_Request>(message, FillOf(&out));
      break;
    case kCall_cuMemsetD2D16Async:
      With<wire::cuMemsetD2D16Async_Request>(message, FillOf(&out));
      break;
    case kCall_cuMemsetD2D32Async:
      With<wire::cuMemsetD2D32Async_Request>(message, FillOf(&out));
      break;
    case kCall_cuStreamWaitValue32_v2:
      With<wire::cuStreamWaitValue32_v2_Request>(message, ValueOf(&out));
      break;
    case kCall_cuStreamWaitValue64_v2:
      With<wire::cuStreamWaitValue64_v2_Request>(message, ValueOf(&out));
      break;
    case kCall_cuStreamWriteValue32_v2:
      With<wire::cuStreamWriteValue32_v2_Request>(message, ValueOf(&out));
      break;
    case kCall_cuStreamWriteValue64_v2:
      With<wire::cuStreamWriteValue64_v2_Request>(message, ValueOf(&out));
      break;
    case kCall_cuStreamBatchMemOp_v2:
      With<wire::cuStreamBatchMemOp_v2_Request>(message,
                                                [&](const auto& request) { OfBatch(request.paramArray, &out); });
      break;
    case kCall_cuGraphAddMemsetNode:
      With<wire::cuGraphAddMemsetNode_Request>(message,
                                               [&](const auto& request) { OfFill(request.memsetParams, &out); });
      break;
    case kCall_cuGraphMemsetNodeSetParams:
      With<wire::cuGraphMemsetNodeSetParams_Request>(message, [&](const auto& r) { OfFill(r.nodeParams, &out); });
      break;
    case kCall_cuGraphExecMemsetNodeSetParams:
      With<wire::cuGraphExecMemsetNodeSetParams_Request>(message, [&](const auto& r) { OfFill(r.memsetParams, &out); });
      break;
    case kCall_cuGraphAddNode_v2:
      With<wire::cuGraphAddNode_v2_Request>(message, NodeOf(&out));
      break;
    case kCall_cuGraphNodeSetParams:
      With<wire::cuGraphNodeSetParams_Request>(message, NodeOf(&out));
      break;
    case kCall_cuGraphExecNodeSetParams:
      With<wire::cuGraphExecNodeSetParams_Request>(message, NodeOf(&out));
      break;
    default:
      break;
  }
  return out;
}

replay::ObjectKey MemoryAt(Session* session, uint64_t address) {
  std::unique_lock<std::shared_mutex> lock(session->mutex());
  const auto* const range = session->device_ranges().Find(address);
  if (!range) {
    auto* const pinned = session->host_ranges().Find(address);
    if (!pinned) return {};
    // The server shares it now; the next one may have to make its own (client/custom/mapped_memory.h).
    if (pinned->value.shared && !pinned->value.on_device && session->shared_memory()) {
      pinned->value.on_device = true;
      pinned->value.device = pinned->start;
    }
    return {Kind::kHostMemory, pinned->start};
  }
  switch (range->value.source) {
    case DeviceRange::kGlobal:
      return {Kind::kVariable, range->start};
    case DeviceRange::kMapped:
      return {Kind::kMapping, range->start};
    case DeviceRange::kManaged:
      return {Kind::kHostMemory, range->start};
    default:
      return {Kind::kDeviceMemory, range->start};
  }
}

void AddHostNeeds(Session* session, uint32_t call, std::string_view message, std::vector<replay::ObjectKey>* needs) {
  for (const uint64_t address : AddressesOf(call, message)) {
    const replay::ObjectKey key = MemoryAt(session, address);
    if (key.kind != Kind::kHostMemory || key.id == 0) continue;
    if (std::find(needs->begin(), needs->end(), key) == needs->end()) needs->push_back(key);
  }
}

}  // namespace cuda_remote::client
