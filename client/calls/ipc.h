// SPDX-License-Identifier: Apache-2.0
// Memory of other sessions, as cuMemFree sees it.
#ifndef CUDA_REMOTE_CLIENT_CALLS_IPC_H_
#define CUDA_REMOTE_CLIENT_CALLS_IPC_H_

#include <cuda.h>

namespace cuda_remote::client {

// Whether cuMemPoolImportPointer returned this address; such memory is given back with cuMemFree.
bool IsPoolImport(CUdeviceptr address);
// Lets go of memory of another session. Waits until this session's work is done with it.
CUresult CloseImport(CUdeviceptr address);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_IPC_H_
