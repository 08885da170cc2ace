// What device printf writes: the driver prints to this process's standard output, which is a file in memory from Install
// on; the bytes go to the client before the reply of the call that made them appear. Thread-safe after Install.
#ifndef CUDA_REMOTE_SERVER_WORKER_OUTPUT_CAPTURE_H_
#define CUDA_REMOTE_SERVER_WORKER_OUTPUT_CAPTURE_H_

#include <functional>
#include <mutex>
#include <string>
#include <string_view>

namespace cuda_remote::server {

class OutputCapture {
 public:
  // Puts a memory file in the place of descriptor 1. Once for each process. False and *error if that fails.
  bool Install(std::string* error);

  // Hands all bytes that were written since the last time to `send`, in order. Cheap if there are none.
  void Flush(const std::function<void(std::string_view)>& send);

 private:
  std::mutex mutex_;
  int fd_ = -1;
  uint64_t taken_ = 0;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_OUTPUT_CAPTURE_H_
