// SPDX-License-Identifier: Apache-2.0
// Which requests make up the record of a captured graph.
//
// A capture is recorded as the requests that were sent for its streams and its graph; a replay sends them again in
// order. The client keeps those of this list, and the server accepts no others inside an OpGraphCapture.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_API_CAPTURED_CALLS_H_
#define CUDA_REMOTE_PROTO_API_CAPTURED_CALLS_H_

#include <cstdint>

#include "proto/api/call_ids.gen.h"

namespace cuda_remote {

enum class CaptureRole {
  kRecorded,  // part of the capture: sent again
  kBegins,    // begins one: the first request of a record, and only that
  kQuestion,  // changes nothing: left out
  kOther,     // cannot be sent again: a capture with one in it is not recorded
};

constexpr CaptureRole CaptureRoleOf(uint32_t call) {
  switch (call) {
    case kCall_cuStreamBeginCapture_v2:
    case kCall_cuStreamBeginCaptureToGraph:
      return CaptureRole::kBegins;
    case kCall_cuLaunchKernel:
    case kCall_cuMemcpyAsync:
    case kCall_cuMemcpyPeerAsync:
    case kCall_cuMemcpy2DAsync_v2:
    case kCall_cuMemcpy3DAsync_v2:
    case kCall_cuMemcpy3DPeerAsync:
    case kCall_cuMemsetD8Async:
    case kCall_cuMemsetD16Async:
    case kCall_cuMemsetD32Async:
    case kCall_cuMemsetD2D8Async:
    case kCall_cuMemsetD2D16Async:
    case kCall_cuMemsetD2D32Async:
    case kCall_cuEventRecord:
    case kCall_cuEventRecordWithFlags:
    case kCall_cuStreamWaitEvent:
    case kCall_cuStreamWaitValue32_v2:
    case kCall_cuStreamWaitValue64_v2:
    case kCall_cuStreamWriteValue32_v2:
    case kCall_cuStreamWriteValue64_v2:
    case kCall_cuStreamBatchMemOp_v2:
    case kCall_cuStreamSetAttribute:
    case kCall_cuStreamGetCaptureInfo_v3:  // where it gave handles to the graph and its nodes
    case kCall_cuStreamUpdateCaptureDependencies:
    case kCall_cuStreamUpdateCaptureDependencies_v2:
    case kOpLaunchHostFunc:
    case kCall_cuGraphLaunch:
    case kCall_cuGraphAddEmptyNode:
    case kCall_cuGraphAddMemsetNode:
    case kCall_cuGraphAddEventRecordNode:
    case kCall_cuGraphAddEventWaitNode:
    case kCall_cuGraphAddChildGraphNode:
    case kCall_cuGraphAddNode_v2:
    case kCall_cuGraphDestroyNode:
    case kCall_cuGraphAddDependencies:
    case kCall_cuGraphAddDependencies_v2:
    case kCall_cuGraphRemoveDependencies:
    case kCall_cuGraphRemoveDependencies_v2:
    case kCall_cuGraphNodeSetParams:
    case kCall_cuGraphMemsetNodeSetParams:
    case kCall_cuGraphEventRecordNodeSetEvent:
    case kCall_cuGraphEventWaitNodeSetEvent:
    case kCall_cuGraphKernelNodeSetAttribute:
    case kCall_cuGraphKernelNodeCopyAttributes:
    case kCall_cuGraphChildGraphNodeGetGraph:
    case kCall_cuGraphConditionalHandleCreate:
    case kCall_cuGraphRetainUserObject:
    case kCall_cuGraphReleaseUserObject:
    case kOpGraphNames:
      return CaptureRole::kRecorded;
    case kCall_cuStreamEndCapture:
    case kCall_cuStreamIsCapturing:
    case kCall_cuStreamGetCaptureInfo:
    case kCall_cuStreamGetPriority:
    case kCall_cuStreamGetFlags:
    case kCall_cuStreamGetId:
    case kCall_cuStreamGetDevice:
    case kCall_cuStreamGetAttribute:
    case kCall_cuStreamQuery:        // an error in a capture
    case kCall_cuStreamSynchronize:  // the same
    case kCall_cuStreamDestroy_v2:
      return CaptureRole::kQuestion;
    default:
      return CaptureRole::kOther;
  }
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_API_CAPTURED_CALLS_H_
