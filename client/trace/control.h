// SPDX-License-Identifier: Apache-2.0
// Turning recordings on and off, and their files: by the environment (README.md), and by the job's agent.
//
// With CUDA_REMOTE_TRACE or CUDA_REMOTE_TIMELINE the first traced call starts a thread, which writes the table of calls
// every now and then (so that a process that is killed leaves one that is at most half a second old) and begins and
// ends the timeline. Without them there is no thread.
//
// Thread-safe. Part of the client library: libc and libstdc++ only.
#ifndef CUDA_REMOTE_CLIENT_TRACE_CONTROL_H_
#define CUDA_REMOTE_CLIENT_TRACE_CONTROL_H_

#include <cstdint>
#include <string>

#include "client/trace/report.h"
#include "client/trace/timeline.h"
#include "proto/base/status.h"

namespace cuda_remote::client::trace {

// The server's part of a timeline.
class Server {
 public:
  virtual ~Server() = default;
  // Makes the worker record what it executes from now on, at most `capacity` requests. False: it cannot.
  virtual bool BeginTimeline(uint64_t capacity) = 0;
  // Ends that and fetches what was recorded; events->problem says what went wrong.
  virtual void EndTimeline(WorkerEvents* events) = 0;
};

// The session is open. `server` must live for ever. Begins the worker's recording if the process's is on already.
void SetServer(Server* server);

// Begins to record single calls, and the totals of the same time. It ends by itself after `max_seconds`. Fails if a
// recording is in progress.
Status BeginSlice(uint64_t capacity, double max_seconds);

// Ends what BeginSlice began. The timeline goes to timeline_fd, the table of calls in the slice to table_fd (as JSON if
// `json`); the caller keeps both. Fails if nothing was being recorded or the files do not take it.
Status EndSlice(int timeline_fd, int table_fd, bool json);

// The table of all calls since the process began; fails if CUDA_REMOTE_TRACE is not set.
Status WriteTotals(int fd, bool json);

// Around a checkpoint: writes CUDA_REMOTE_TRACE's file, then keeps every file closed until Resume.
void Pause();
void Resume();

}  // namespace cuda_remote::client::trace

#endif  // CUDA_REMOTE_CLIENT_TRACE_CONTROL_H_
