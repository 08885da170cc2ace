// Copies between ordinary memory of the application and the GPU inside a graph.
//
// Natively such a copy reads or writes the application's memory whenever the graph runs. Here it goes through pinned memory
// that the server reaches: a host function in the graph moves the bytes between the two, and the graph's own copy is one of
// pinned memory. The pinned piece belongs to the graph and what is made from it (a user object says when they are gone) and
// is used again by later graphs; it is never given back.
//
// Thread-safe.
#ifndef CUDA_REMOTE_CLIENT_SESSION_STAGED_COPIES_H_
#define CUDA_REMOTE_CLIENT_SESSION_STAGED_COPIES_H_

#include <cstddef>
#include <mutex>
#include <vector>

namespace cuda_remote::client {

// One copy. The graph's host function gets its address.
struct StagedCopy {
  char* pinned = nullptr;
  size_t capacity = 0;
  void* to = nullptr;  // one of these two is `pinned`
  const void* from = nullptr;
  size_t bytes = 0;

  // What the host function does. Takes a StagedCopy*.
  static void Run(void* data);
};

class StagedCopies {
 public:
  // A free piece of at least `bytes`; null if there is none.
  StagedCopy* Take(size_t bytes);
  // Gives pieces back, or adds new ones.
  void Give(const std::vector<StagedCopy*>& pieces);

 private:
  std::mutex mutex_;
  std::vector<StagedCopy*> free_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_STAGED_COPIES_H_
