// SPDX-License-Identifier: Apache-2.0
// What has been recorded so far, between the calls that record (trace.h) and the files (control.h).
//
// Thread-safe unless said otherwise. Part of the client library: libc and libstdc++ only.
#ifndef CUDA_REMOTE_CLIENT_TRACE_RECORDER_H_
#define CUDA_REMOTE_CLIENT_TRACE_RECORDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/trace/report.h"
#include "client/trace/timeline.h"

namespace cuda_remote::client::trace {

// One row for each number that was ever given out, in their order; rows that were never used have a count of 0.
std::vector<Row> Totals();
// How many calls there were in all: cheap enough to ask often.
uint64_t TotalCalls();
// When the first call was recorded; 0: none was.
uint64_t FirstCallNs();

// The names by number.
std::vector<std::string> Names();

// The buffer of the timeline. Its recording is on while kTimeline is set in g_recording.
EventBuffer& Events();
// When the timeline's recording ends by itself.
void SetDeadline(uint64_t ns);

// Called by each Span that begins while there may be something to do besides recording. Set once, before any recording.
void SetFirstCallHook(void (*hook)());
// Called after each outermost Span from now on: the process is ending and the files have been written.
void SetLateCallHook(void (*hook)());

// In fork's child: forgets the parent's calls. No other thread may run.
void ForgetAfterFork();

}  // namespace cuda_remote::client::trace

#endif  // CUDA_REMOTE_CLIENT_TRACE_RECORDER_H_
