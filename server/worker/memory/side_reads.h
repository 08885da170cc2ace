// SPDX-License-Identifier: Apache-2.0
// What side_work.h has on its way.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_SIDE_READS_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_SIDE_READS_H_

namespace cuda_remote::server {

// Whether copies or hashes are on their way. Any thread.
bool SideReadsAreUnderWay();

// Waits until all copies and hashes are done that had begun before. Any thread but those that wait for these.
void AwaitSideReads();

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_SIDE_READS_H_
