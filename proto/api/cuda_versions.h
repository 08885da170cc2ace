// SPDX-License-Identifier: Apache-2.0
// cuda.h, plus the type names of the oldest ABI versions of driver calls.
//
// cuda.h declares those types only for the driver's own use (__CUDA_API_VERSION_INTERNAL). The calls that take them are
// never carried out, so their names are enough: the structs stay incomplete here.
#ifndef CUDA_REMOTE_PROTO_API_CUDA_VERSIONS_H_
#define CUDA_REMOTE_PROTO_API_CUDA_VERSIONS_H_

#include <cuda.h>
#include <cudaProfiler.h>

#ifndef __CUDA_API_VERSION_INTERNAL
typedef unsigned int CUdeviceptr_v1;
typedef struct CUDA_MEMCPY2D_v1_st CUDA_MEMCPY2D_v1;
typedef struct CUDA_MEMCPY3D_v1_st CUDA_MEMCPY3D_v1;
typedef struct CUDA_ARRAY_DESCRIPTOR_v1_st CUDA_ARRAY_DESCRIPTOR_v1;
typedef struct CUDA_ARRAY3D_DESCRIPTOR_v1_st CUDA_ARRAY3D_DESCRIPTOR_v1;
#endif

#endif  // CUDA_REMOTE_PROTO_API_CUDA_VERSIONS_H_
