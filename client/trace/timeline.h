// SPDX-License-Identifier: Apache-2.0
// The single calls of a slice of time, and how they are written: the JSON trace format of Chrome, which ui.perfetto.dev
// and chrome://tracing open.
//
// Recording is lock-free: each call takes the next free place of one buffer. When the buffer is full, calls are counted
// as dropped. The buffer's memory is used as it fills, and given back at the end.
//
// Thread-safe, but Begin, End and Take are for one thread at a time (trace.cc sees to that). Part of the client
// library.
#ifndef CUDA_REMOTE_CLIENT_TRACE_TIMELINE_H_
#define CUDA_REMOTE_CLIENT_TRACE_TIMELINE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cuda_remote::client::trace {

// A call of the application.
struct ClientEvent {
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint64_t sequence = 0;  // of the last request that it sent; 0: none, it was answered here
  uint32_t number = 0;    // of its name
  uint32_t thread = 0;
  uint32_t result = 0;
  uint32_t sent = 0;  // bytes, 4 GiB - 1 at most
  uint32_t received = 0;
};

// A request in the server. Times are on this machine's clock already.
struct WorkerEvent {
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint64_t sequence = 0;
  uint32_t call = 0;
  uint32_t thread = 0;
  uint32_t result = 0;
};

struct WorkerEvents {
  uint32_t pid = 0;
  uint64_t dropped = 0;
  int64_t clock_error_ns = 0;  // how far the server's times may be off, 0 on the same machine
  std::map<uint32_t, std::string> names;
  std::vector<WorkerEvent> events;
  std::string problem;  // why there are none, or not all; a sentence for a person
};

class EventBuffer {
 public:
  // Forgets everything and makes room for `capacity` events. False if there is no memory.
  bool Begin(size_t capacity);
  // Any thread, at any time.
  void Add(const ClientEvent& event);
  // What was recorded, in no particular order, and how many were dropped. Gives the memory back.
  std::vector<ClientEvent> Take(uint64_t* dropped);

 private:
  struct Slot {
    ClientEvent event;
    std::atomic<uint32_t> whole;
  };
  std::atomic<Slot*> slots_{nullptr};
  std::atomic<size_t> capacity_{0};
  std::atomic<size_t> next_{0};
  size_t mapped_bytes_ = 0;
};

struct Timeline {
  uint32_t pid = 0;
  std::string program;
  uint64_t begin_ns = 0;
  uint64_t end_ns = 0;
  uint64_t dropped = 0;
  std::vector<std::string> names;  // by ClientEvent::number
  std::vector<ClientEvent> client;
  WorkerEvents worker;
};

// Writes the whole file to `fd`. Client calls are slices by thread, the worker's requests slices by thread of the
// worker, and an arrow goes from each call to its last request. False if the file does not take it (errno is set).
bool WriteChromeTrace(const Timeline& timeline, int fd);

// Writes all of `bytes`. False and errno on failure.
bool WriteAll(int fd, const char* bytes, size_t count);

}  // namespace cuda_remote::client::trace

#endif  // CUDA_REMOTE_CLIENT_TRACE_TIMELINE_H_
