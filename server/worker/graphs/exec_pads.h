// SPDX-License-Identifier: Apache-2.0
// Gives executable graphs that kernels may launch the handles that they had before.
//
// The program has the driver's own handle of such an executable, and so have its kernels. 580 on an H200: a handle is
// the address of a slot of 0xc0 bytes in 64 MiB that the driver reserves. A new executable gets the lowest slot that is
// free, whatever its graph has in it. A replay makes only those that were alive, so it meets slots that were taken
// then. It fills them with executables that nothing uses - pads - until the driver gives the right one.
//
// Executor only.
#ifndef CUDA_REMOTE_SERVER_WORKER_GRAPHS_EXEC_PADS_H_
#define CUDA_REMOTE_SERVER_WORKER_GRAPHS_EXEC_PADS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>

namespace cuda_remote::server {

class ExecPads {
 public:
  // How many pads there are at most.
  static constexpr size_t kMost = 4096;

  // Destroys an executable.
  using Destroy = std::function<void(uint64_t handle)>;

  // Makes an executable that has the handle `wanted`. `make` makes one in the context with the number `context`, and
  // returns the driver's handle, or 0 if that fails. Returns what the last `make` did: another handle if the driver
  // does not give `wanted`. The pads stay: the next executables find the free slots filled.
  uint64_t MakeAt(uint64_t wanted, uint64_t context, const std::function<uint64_t()>& make, const Destroy& destroy);

  // Destroys all pads.
  void Clear(const Destroy& destroy);
  // The context is gone, and its pads with it.
  void Forget(uint64_t context);

  size_t size() const { return pads_.size(); }

 private:
  std::map<uint64_t, uint64_t> pads_;  // handles, with the contexts that they are in
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_GRAPHS_EXEC_PADS_H_
