// SPDX-License-Identifier: Apache-2.0
// Where a context's code lies: addresses of functions, as a driver would place them.
//
// The real driver (580) keeps code in blocks of 2 MiB, a piece for each function or kernel: the shortest hole that is
// long enough, of several the one that came to be first; blocks that are empty go. So an address depends on what was
// loaded and unloaded before, and a restart finds another one unless the same is done again. No memory is behind these
// addresses: nothing can be read there.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_CODE_SPACE_H_
#define CUDA_REMOTE_SOFTGPU_CORE_CODE_SPACE_H_

#include <cstdint>
#include <map>
#include <vector>

namespace cuda_remote::softgpu {

class CodeSpace {
 public:
  CodeSpace() = default;
  ~CodeSpace();
  CodeSpace(const CodeSpace&) = delete;
  CodeSpace& operator=(const CodeSpace&) = delete;

  // A place for code of that many instructions.
  uint64_t Take(uint64_t instructions);
  void Give(uint64_t address);

 private:
  struct Hole {
    uint64_t begin = 0, bytes = 0;
  };
  void AddBlocks(uint64_t bytes);

  int slot_ = -1;                        // which part of the address space; from the first Take on
  std::vector<Hole> holes_;              // in the order in which they came to be
  std::map<uint64_t, uint64_t> pieces_;  // by address: their lengths
  std::map<uint64_t, uint64_t> blocks_;  // the same
};

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_CODE_SPACE_H_
