// SPDX-License-Identifier: Apache-2.0
// Context-local storage: values that a library keeps for each context, by a key that is any pointer.
//
// Thread-safe. Get is on the path of every call of the CUDA runtime, so the last answer is kept for each thread.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_CONTEXT_STORAGE_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_CONTEXT_STORAGE_H_

#include <cuda.h>

namespace cuda_remote::driverabi {

using StorageDestructor = void (*)(CUcontext context, void* key, void* value);

// `context` is never null in these. CUDA_ERROR_INVALID_HANDLE if the key is there already (Put) or is not there (Get,
// Delete); *value is left alone on failure.
CUresult StoragePut(CUcontext context, void* key, void* value, StorageDestructor destructor);
CUresult StorageGet(CUcontext context, void* key, void** value);
CUresult StorageDelete(CUcontext context, void* key);
// Runs the destructors of the context's values, without a lock held, and forgets them.
void StorageContextDestroyed(CUcontext context);

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_CONTEXT_STORAGE_H_
