// SPDX-License-Identifier: Apache-2.0
// The memory files in which device memory lies: one for each device, sparse, so that memory costs nothing until it is
// touched and one descriptor serves all of it. Another process of the same user can map a range of one.
//
// Thread-safe. Ranges are never used twice, so nothing fragments; holes are punched when they are given back.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_MEMORY_FILE_H_
#define CUDA_REMOTE_SOFTGPU_CORE_MEMORY_FILE_H_

#include <cstdint>

namespace cuda_remote::softgpu {

struct FileRange {
  int fd = -1;  // the file's, not to be closed
  uint64_t offset = 0;
};

// `bytes` (whole pages) of the device's file. False if the system has no memory file to give.
bool TakeFileRange(int device, uint64_t bytes, FileRange* range);
void GiveFileRange(const FileRange& range, uint64_t bytes);

// Memory of any size and where it lies in the device's file, 512-byte aligned; small pieces share pages. Null if there
// is none.
void* MapDeviceMemory(int device, uint64_t bytes, FileRange* range);
// Gives back what MapDeviceMemory gave, with the same arguments.
void UnmapDeviceMemory(int device, void* memory, uint64_t bytes, const FileRange& range);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_MEMORY_FILE_H_
