// SPDX-License-Identifier: Apache-2.0
// The last messages of this library, for cuLogs*: natively the driver keeps its own, and to the application this
// library is the driver.
//
// Adding takes no memory and waits for nobody for long, since LogLine may be called from anywhere: a message that finds
// the buffer busy is not kept. Thread-safe.
#ifndef CUDA_REMOTE_CLIENT_CORE_LOG_BUFFER_H_
#define CUDA_REMOTE_CLIENT_CORE_LOG_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cuda_remote::client {

class LogBuffer {
 public:
  // What a callback gets: its own pointer, and the message, ended by a zero that `length` does not count.
  using Callback = void (*)(void* data, int level, char* message, size_t length);

  // Keeps a message (without newline; a time and the process are put before it) and hands it to the callbacks.
  static void Add(const char* text, size_t length);

  // The number that the next message gets.
  static uint32_t Next();
  // The messages from `first` on that are still there, each with its newline. *lost: whether older ones are gone.
  // *next: the number of the message that comes after them.
  static std::vector<std::string> Since(uint32_t first, bool* lost, uint32_t* next);

  // A handle from 1 on; 0 if there is no room for another one.
  static uint64_t Register(Callback callback, void* data);
  // False if there is no such callback.
  static bool Unregister(uint64_t handle);
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_LOG_BUFFER_H_
