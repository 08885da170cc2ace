// Keeps the low numbers of texture and surface objects for a replay.
//
// The driver numbers them from 1 on, and makes some for itself: on an H200 (580) a replay's first texture got number 7 in one
// process of two, where the program's own first one had got 1. Kernels keep these numbers in memory, so they must come
// back. Before anything else is replayed in a context, objects of ours take the low numbers; each one makes room for the
// object that had its number, and the rest go when the program goes on.
//
// Executor only.
#ifndef CUDA_REMOTE_SERVER_WORKER_TEXTURE_NUMBERS_H_
#define CUDA_REMOTE_SERVER_WORKER_TEXTURE_NUMBERS_H_

#include <cuda.h>

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

class TextureNumbers {
 public:
  // At least so much memory of the GPU is needed, for all contexts on it.
  static constexpr uint64_t kBytes = 256;
  // Takes the low numbers in the current context, whose ContextRef::id is `context`, with objects that look at `memory`.
  void Reserve(const DriverTable& driver, uint64_t context, CUdeviceptr memory);
  // Gives a number free, if it is reserved in that context, which is current.
  void Release(const DriverTable& driver, uint64_t context, uint64_t number);
  // The contexts in which there are reservations.
  std::vector<uint64_t> contexts() const;
  // Gives all of the context free, which is current; or which is gone, and its objects with it.
  void ReleaseAll(const DriverTable& driver, uint64_t context, bool gone);
  bool empty() const { return reserved_.empty(); }

 private:
  std::map<uint64_t, std::set<uint64_t>> reserved_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_TEXTURE_NUMBERS_H_
