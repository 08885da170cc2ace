// SPDX-License-Identifier: Apache-2.0
// The per-thread default stream variants: the plain calls, inside a PerThreadScope.
//
// One line for each _ptsz and _ptds symbol of the driver.
#include <cuda.h>

#include "softgpu/core/stream.h"

#define PER_THREAD(base, variant, parameters, arguments)                                  \
  extern "C" CUresult CUDAAPI base parameters;                                            \
  extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI variant parameters { \
    ::cuda_remote::softgpu::PerThreadScope scope;                                         \
    return base arguments;                                                                \
  }

PER_THREAD(cuEventRecord, cuEventRecord_ptsz, (CUevent hEvent, CUstream hStream), (hEvent, hStream))
PER_THREAD(cuStreamQuery, cuStreamQuery_ptsz, (CUstream hStream), (hStream))
PER_THREAD(cuStreamSynchronize, cuStreamSynchronize_ptsz, (CUstream hStream), (hStream))
PER_THREAD(cuGraphicsMapResources, cuGraphicsMapResources_ptsz,
           (unsigned int count, CUgraphicsResource *resources, CUstream hStream), (count, resources, hStream))
PER_THREAD(cuGraphicsUnmapResources, cuGraphicsUnmapResources_ptsz,
           (unsigned int count, CUgraphicsResource *resources, CUstream hStream), (count, resources, hStream))
PER_THREAD(cuMemsetD8Async, cuMemsetD8Async_ptsz,
           (CUdeviceptr_v2 dstDevice, unsigned char uc, size_t N, CUstream hStream), (dstDevice, uc, N, hStream))
PER_THREAD(cuMemsetD16Async, cuMemsetD16Async_ptsz,
           (CUdeviceptr_v2 dstDevice, unsigned short us, size_t N, CUstream hStream), (dstDevice, us, N, hStream))
PER_THREAD(cuMemsetD32Async, cuMemsetD32Async_ptsz,
           (CUdeviceptr_v2 dstDevice, unsigned int ui, size_t N, CUstream hStream), (dstDevice, ui, N, hStream))
PER_THREAD(cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz,
           (CUdeviceptr_v2 dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height, CUstream hStream),
           (dstDevice, dstPitch, uc, Width, Height, hStream))
PER_THREAD(cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz,
           (CUdeviceptr_v2 dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height,
            CUstream hStream),
           (dstDevice, dstPitch, us, Width, Height, hStream))
PER_THREAD(cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz,
           (CUdeviceptr_v2 dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height, CUstream hStream),
           (dstDevice, dstPitch, ui, Width, Height, hStream))
PER_THREAD(cuMemsetD8_v2, cuMemsetD8_v2_ptds, (CUdeviceptr_v2 dstDevice, unsigned char uc, size_t N),
           (dstDevice, uc, N))
PER_THREAD(cuMemsetD16_v2, cuMemsetD16_v2_ptds, (CUdeviceptr_v2 dstDevice, unsigned short us, size_t N),
           (dstDevice, us, N))
PER_THREAD(cuMemsetD32_v2, cuMemsetD32_v2_ptds, (CUdeviceptr_v2 dstDevice, unsigned int ui, size_t N),
           (dstDevice, ui, N))
PER_THREAD(cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds,
           (CUdeviceptr_v2 dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height),
           (dstDevice, dstPitch, uc, Width, Height))
PER_THREAD(cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds,
           (CUdeviceptr_v2 dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height),
           (dstDevice, dstPitch, us, Width, Height))
PER_THREAD(cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds,
           (CUdeviceptr_v2 dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height),
           (dstDevice, dstPitch, ui, Width, Height))
PER_THREAD(cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds, (CUdeviceptr_v2 dstDevice, const void *srcHost, size_t ByteCount),
           (dstDevice, srcHost, ByteCount))
PER_THREAD(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz,
           (CUdeviceptr_v2 dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream),
           (dstDevice, srcHost, ByteCount, hStream))
PER_THREAD(cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds, (void *dstHost, CUdeviceptr_v2 srcDevice, size_t ByteCount),
           (dstHost, srcDevice, ByteCount))
PER_THREAD(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz,
           (void *dstHost, CUdeviceptr_v2 srcDevice, size_t ByteCount, CUstream hStream),
           (dstHost, srcDevice, ByteCount, hStream))
PER_THREAD(cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds,
           (CUdeviceptr_v2 dstDevice, CUdeviceptr_v2 srcDevice, size_t ByteCount), (dstDevice, srcDevice, ByteCount))
PER_THREAD(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz,
           (CUdeviceptr_v2 dstDevice, CUdeviceptr_v2 srcDevice, size_t ByteCount, CUstream hStream),
           (dstDevice, srcDevice, ByteCount, hStream))
PER_THREAD(cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds, (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount),
           (dstHost, srcArray, srcOffset, ByteCount))
PER_THREAD(cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz,
           (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, CUstream hStream),
           (dstHost, srcArray, srcOffset, ByteCount, hStream))
PER_THREAD(cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds,
           (CUdeviceptr_v2 dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount),
           (dstDevice, srcArray, srcOffset, ByteCount))
PER_THREAD(cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds,
           (CUarray dstArray, size_t dstOffset, CUdeviceptr_v2 srcDevice, size_t ByteCount),
           (dstArray, dstOffset, srcDevice, ByteCount))
PER_THREAD(cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds,
           (CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset, size_t ByteCount),
           (dstArray, dstOffset, srcArray, srcOffset, ByteCount))
PER_THREAD(cuMemcpy2D_v2, cuMemcpy2D_v2_ptds, (const CUDA_MEMCPY2D_v2 *pCopy), (pCopy))
PER_THREAD(cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds, (const CUDA_MEMCPY2D_v2 *pCopy), (pCopy))
PER_THREAD(cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz, (const CUDA_MEMCPY2D_v2 *pCopy, CUstream hStream),
           (pCopy, hStream))
PER_THREAD(cuMemcpy3D_v2, cuMemcpy3D_v2_ptds, (const CUDA_MEMCPY3D_v2 *pCopy), (pCopy))
PER_THREAD(cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz, (const CUDA_MEMCPY3D_v2 *pCopy, CUstream hStream),
           (pCopy, hStream))
PER_THREAD(cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds,
           (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount),
           (dstArray, dstOffset, srcHost, ByteCount))
PER_THREAD(cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz,
           (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount, CUstream hStream),
           (dstArray, dstOffset, srcHost, ByteCount, hStream))
PER_THREAD(cuStreamWaitEvent, cuStreamWaitEvent_ptsz, (CUstream hStream, CUevent hEvent, unsigned int Flags),
           (hStream, hEvent, Flags))
PER_THREAD(cuMemcpy, cuMemcpy_ptds, (CUdeviceptr_v2 dst, CUdeviceptr_v2 src, size_t ByteCount), (dst, src, ByteCount))
PER_THREAD(cuMemcpyAsync, cuMemcpyAsync_ptsz,
           (CUdeviceptr_v2 dst, CUdeviceptr_v2 src, size_t ByteCount, CUstream hStream), (dst, src, ByteCount, hStream))
PER_THREAD(cuLaunchKernel, cuLaunchKernel_ptsz,
           (CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
            unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
            void **kernelParams, void **extra),
           (f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams,
            extra))
PER_THREAD(cuMemcpyPeer, cuMemcpyPeer_ptds,
           (CUdeviceptr_v2 dstDevice, CUcontext dstContext, CUdeviceptr_v2 srcDevice, CUcontext srcContext,
            size_t ByteCount),
           (dstDevice, dstContext, srcDevice, srcContext, ByteCount))
PER_THREAD(cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz,
           (CUdeviceptr_v2 dstDevice, CUcontext dstContext, CUdeviceptr_v2 srcDevice, CUcontext srcContext,
            size_t ByteCount, CUstream hStream),
           (dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream))
PER_THREAD(cuMemcpy3DPeer, cuMemcpy3DPeer_ptds, (const CUDA_MEMCPY3D_PEER_v1 *pCopy), (pCopy))
PER_THREAD(cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz, (const CUDA_MEMCPY3D_PEER_v1 *pCopy, CUstream hStream),
           (pCopy, hStream))
PER_THREAD(cuStreamAddCallback, cuStreamAddCallback_ptsz,
           (CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags),
           (hStream, callback, userData, flags))
PER_THREAD(cuStreamGetPriority, cuStreamGetPriority_ptsz, (CUstream hStream, int *priority), (hStream, priority))
PER_THREAD(cuStreamGetFlags, cuStreamGetFlags_ptsz, (CUstream hStream, unsigned int *flags), (hStream, flags))
PER_THREAD(cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz,
           (CUstream hStream, CUdeviceptr_v2 dptr, size_t length, unsigned int flags), (hStream, dptr, length, flags))
PER_THREAD(cuStreamWaitValue32, cuStreamWaitValue32_ptsz,
           (CUstream stream, CUdeviceptr_v2 addr, cuuint32_t value, unsigned int flags), (stream, addr, value, flags))
PER_THREAD(cuStreamWriteValue32, cuStreamWriteValue32_ptsz,
           (CUstream stream, CUdeviceptr_v2 addr, cuuint32_t value, unsigned int flags), (stream, addr, value, flags))
PER_THREAD(cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz,
           (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags),
           (stream, count, paramArray, flags))
PER_THREAD(cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz,
           (CUdeviceptr_v2 devPtr, size_t count, CUdevice_v1 dstDevice, CUstream hStream),
           (devPtr, count, dstDevice, hStream))
PER_THREAD(cuStreamWaitValue64, cuStreamWaitValue64_ptsz,
           (CUstream stream, CUdeviceptr_v2 addr, cuuint64_t value, unsigned int flags), (stream, addr, value, flags))
PER_THREAD(cuStreamWriteValue64, cuStreamWriteValue64_ptsz,
           (CUstream stream, CUdeviceptr_v2 addr, cuuint64_t value, unsigned int flags), (stream, addr, value, flags))
PER_THREAD(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz,
           (CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
            unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
            void **kernelParams),
           (f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams))
PER_THREAD(cuStreamGetCtx, cuStreamGetCtx_ptsz, (CUstream hStream, CUcontext *pctx), (hStream, pctx))
PER_THREAD(cuSignalExternalSemaphoresAsync, cuSignalExternalSemaphoresAsync_ptsz,
           (const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1 *paramsArray,
            unsigned int numExtSems, CUstream stream),
           (extSemArray, paramsArray, numExtSems, stream))
PER_THREAD(cuWaitExternalSemaphoresAsync, cuWaitExternalSemaphoresAsync_ptsz,
           (const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1 *paramsArray,
            unsigned int numExtSems, CUstream stream),
           (extSemArray, paramsArray, numExtSems, stream))
PER_THREAD(cuStreamBeginCapture, cuStreamBeginCapture_ptsz, (CUstream hStream), (hStream))
PER_THREAD(cuStreamEndCapture, cuStreamEndCapture_ptsz, (CUstream hStream, CUgraph *phGraph), (hStream, phGraph))
PER_THREAD(cuStreamIsCapturing, cuStreamIsCapturing_ptsz, (CUstream hStream, CUstreamCaptureStatus *captureStatus),
           (hStream, captureStatus))
PER_THREAD(cuGraphLaunch, cuGraphLaunch_ptsz, (CUgraphExec hGraph, CUstream hStream), (hGraph, hStream))
PER_THREAD(cuLaunchHostFunc, cuLaunchHostFunc_ptsz, (CUstream hStream, CUhostFn fn, void *userData),
           (hStream, fn, userData))
PER_THREAD(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz,
           (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out),
           (hStream, captureStatus_out, id_out))
PER_THREAD(cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz, (CUstream hStream, CUstreamCaptureMode mode),
           (hStream, mode))
PER_THREAD(cuStreamCopyAttributes, cuStreamCopyAttributes_ptsz, (CUstream dstStream, CUstream srcStream),
           (dstStream, srcStream))
PER_THREAD(cuStreamGetAttribute, cuStreamGetAttribute_ptsz,
           (CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue_v1 *value), (hStream, attr, value))
PER_THREAD(cuStreamSetAttribute, cuStreamSetAttribute_ptsz,
           (CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue_v1 *param), (hStream, attr, param))
PER_THREAD(cuGraphUpload, cuGraphUpload_ptsz, (CUgraphExec hGraph, CUstream hStream), (hGraph, hStream))
PER_THREAD(cuMemMapArrayAsync, cuMemMapArrayAsync_ptsz,
           (CUarrayMapInfo_v1 * mapInfoList, unsigned int count, CUstream hStream), (mapInfoList, count, hStream))
PER_THREAD(cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz, (CUevent hEvent, CUstream hStream, unsigned int flags),
           (hEvent, hStream, flags))
PER_THREAD(cuMemAllocAsync, cuMemAllocAsync_ptsz, (CUdeviceptr_v2 * dptr, size_t bytesize, CUstream hStream),
           (dptr, bytesize, hStream))
PER_THREAD(cuMemFreeAsync, cuMemFreeAsync_ptsz, (CUdeviceptr_v2 dptr, CUstream hStream), (dptr, hStream))
PER_THREAD(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz,
           (CUdeviceptr_v2 * dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream),
           (dptr, bytesize, pool, hStream))
PER_THREAD(cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz,
           (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out,
            const CUgraphNode **dependencies_out, size_t *numDependencies_out),
           (hStream, captureStatus_out, id_out, graph_out, dependencies_out, numDependencies_out))
PER_THREAD(cuStreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies_ptsz,
           (CUstream hStream, CUgraphNode *dependencies, size_t numDependencies, unsigned int flags),
           (hStream, dependencies, numDependencies, flags))
PER_THREAD(cuLaunchKernelEx, cuLaunchKernelEx_ptsz,
           (const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra),
           (config, f, kernelParams, extra))
PER_THREAD(cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz,
           (CUgraphExec * phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams),
           (phGraphExec, hGraph, instantiateParams))
PER_THREAD(cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz,
           (CUstream stream, CUdeviceptr_v2 addr, cuuint32_t value, unsigned int flags), (stream, addr, value, flags))
PER_THREAD(cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz,
           (CUstream stream, CUdeviceptr_v2 addr, cuuint64_t value, unsigned int flags), (stream, addr, value, flags))
PER_THREAD(cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz,
           (CUstream stream, CUdeviceptr_v2 addr, cuuint32_t value, unsigned int flags), (stream, addr, value, flags))
PER_THREAD(cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz,
           (CUstream stream, CUdeviceptr_v2 addr, cuuint64_t value, unsigned int flags), (stream, addr, value, flags))
PER_THREAD(cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz,
           (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags),
           (stream, count, paramArray, flags))
PER_THREAD(cuStreamGetId, cuStreamGetId_ptsz, (CUstream hStream, unsigned long long *streamId), (hStream, streamId))
PER_THREAD(cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz,
           (CUdeviceptr_v2 devPtr, size_t count, CUmemLocation_v1 location, unsigned int flags, CUstream hStream),
           (devPtr, count, location, flags, hStream))
PER_THREAD(cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz,
           (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
            size_t numDependencies, CUstreamCaptureMode mode),
           (hStream, hGraph, dependencies, dependencyData, numDependencies, mode))
PER_THREAD(cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz,
           (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out,
            const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out),
           (hStream, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out, numDependencies_out))
PER_THREAD(cuStreamUpdateCaptureDependencies_v2, cuStreamUpdateCaptureDependencies_v2_ptsz,
           (CUstream hStream, CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies,
            unsigned int flags),
           (hStream, dependencies, dependencyData, numDependencies, flags))
PER_THREAD(cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz, (CUstream hStream, CUcontext *pctx, CUgreenCtx *pGreenCtx),
           (hStream, pctx, pGreenCtx))
PER_THREAD(cuMemBatchDecompressAsync, cuMemBatchDecompressAsync_ptsz,
           (CUmemDecompressParams * paramsArray, size_t count, unsigned int flags, size_t *errorIndex, CUstream stream),
           (paramsArray, count, flags, errorIndex, stream))
PER_THREAD(cuStreamGetDevice, cuStreamGetDevice_ptsz, (CUstream hStream, CUdevice *device), (hStream, device))
PER_THREAD(cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz,
           (CUdeviceptr_v2 * dsts, CUdeviceptr_v2 *srcs, size_t *sizes, size_t count, CUmemcpyAttributes_v1 *attrs,
            size_t *attrIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream),
           (dsts, srcs, sizes, count, attrs, attrIdxs, numAttrs, failIdx, hStream))
PER_THREAD(cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_ptsz,
           (size_t numParams, CUDA_MEMCPY3D_BATCH_OP_v1 *opList, size_t *failIdx, unsigned long long flags,
            CUstream hStream),
           (numParams, opList, failIdx, flags, hStream))
PER_THREAD(cuMemPrefetchBatchAsync, cuMemPrefetchBatchAsync_ptsz,
           (CUdeviceptr_v2 * dptrs, size_t *sizes, size_t count, CUmemLocation_v1 *prefetchLocs,
            size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags, CUstream hStream),
           (dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream))
PER_THREAD(cuMemDiscardBatchAsync, cuMemDiscardBatchAsync_ptsz,
           (CUdeviceptr_v2 * dptrs, size_t *sizes, size_t count, unsigned long long flags, CUstream hStream),
           (dptrs, sizes, count, flags, hStream))
PER_THREAD(cuMemDiscardAndPrefetchBatchAsync, cuMemDiscardAndPrefetchBatchAsync_ptsz,
           (CUdeviceptr_v2 * dptrs, size_t *sizes, size_t count, CUmemLocation_v1 *prefetchLocs,
            size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags, CUstream hStream),
           (dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream))
PER_THREAD(cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz,
           (CUdeviceptr_v2 * dsts, CUdeviceptr_v2 *srcs, size_t *sizes, size_t count, CUmemcpyAttributes_v1 *attrs,
            size_t *attrIdxs, size_t numAttrs, CUstream hStream),
           (dsts, srcs, sizes, count, attrs, attrIdxs, numAttrs, hStream))
PER_THREAD(cuMemcpy3DBatchAsync_v2, cuMemcpy3DBatchAsync_v2_ptsz,
           (size_t numParams, CUDA_MEMCPY3D_BATCH_OP_v1 *opList, unsigned long long flags, CUstream hStream),
           (numParams, opList, flags, hStream))
