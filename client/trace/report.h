// SPDX-License-Identifier: Apache-2.0
// The table of all calls: what is in it, and how it is written.
//
// No state; nothing throws beyond std::bad_alloc. Part of the client library: libc and libstdc++ only.
#ifndef CUDA_REMOTE_CLIENT_TRACE_REPORT_H_
#define CUDA_REMOTE_CLIENT_TRACE_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace cuda_remote::client::trace {

// All uses of one driver function.
struct Row {
  std::string name;
  uint64_t count = 0;
  uint64_t errors = 0;       // returned something other than CUDA_SUCCESS and CUDA_ERROR_NOT_READY
  uint64_t unsupported = 0;  // of these: the library or the server does not have it
  uint64_t sent = 0;         // bytes to the server, frame headers included
  uint64_t received = 0;     // bytes from the server
  uint64_t total_ns = 0;     // in the caller
  uint64_t max_ns = 0;
};

struct Report {
  uint32_t pid = 0;
  std::string program;
  double seconds = 0;     // from the first call on
  bool finished = false;  // written at the process's end; else it may have made more calls
  std::vector<Row> rows;
};

// Most expensive calls first. Text ends with the totals; JSON is one object with "calls".
std::string TextReport(const Report& report);
std::string JsonReport(const Report& report);

// Replaces %p by the PID, %j by the job's name and %% by %. In a pattern without %p and %j both are put in before the
// suffix, so that processes never write over each other's file: "t.json" becomes "t.JOB.PID.json", or "t.PID.json"
// without a job. A relative pattern is taken from `directory`.
std::string ExpandPath(const std::string& pattern, const std::string& directory, const std::string& job, uint32_t pid);

}  // namespace cuda_remote::client::trace

#endif  // CUDA_REMOTE_CLIENT_TRACE_REPORT_H_
