// SPDX-License-Identifier: Apache-2.0
// What the library in CRIU (criu_preload.cc) and page_receiver.h say to each other beside CRIU.
//
// Most of a process's memory is in large pieces that only it has. CRIU is not told of their pages (the kernel's answer
// to PAGEMAP_SCAN is changed), so that it does not send them, and the receiver is told instead. Their messages go
// through CRIU's own socket, and so stand between CRIU's: after the one that begins the process, before the pages that
// CRIU sends of a higher address.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PAGES_SOCKET_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PAGES_SOCKET_H_

#include <cstdint>

namespace cuda_remote::checkpoint {

// Environment variable of CRIU: the number of the socket that CRIU sends pages through. Without it nothing is hidden.
constexpr char kPagesSocketVariable[] = "CUDA_REMOTE_PAGES_SOCKET";

// Pieces of one process, at most. CRIU sends what there is beyond them.
constexpr uint32_t kMostHidden = 1 << 20;

// No command of CRIU's.
constexpr uint32_t kHidden = 0x48494445;

// As long as the shorter of CRIU's messages; in the order of the processor's bytes.
struct HiddenPages {
  uint32_t command = kHidden;
  int32_t process = 0;   // as CRIU numbers it
  uint64_t address = 0;  // of the first page
  uint64_t pages = 0;    // all there, of 4096 bytes
};
static_assert(sizeof(HiddenPages) == 24);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PAGES_SOCKET_H_
