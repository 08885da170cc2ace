// SPDX-License-Identifier: Apache-2.0
// Brings a job with an address of its own to a standstill in which each of its TCP connections is some process's.
//
// The kernel has connections that are no process's, which CRIU cannot save, and whose other ends would be reset after a
// restart: those that are being made, those that nobody has accepted yet, and those that were closed and still have
// something to send. As long as the network works, they pass: the job accepts them, or the other machine's kernel
// acknowledges what was sent, also for a process that stands still. So new callers are kept out first, then the
// processes stand still, and then the rest is awaited. If that has interrupted a call of connect() whose connection is
// there now, the processes run on for a moment.
//
// Not thread-safe. Needs root.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PASSING_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PASSING_H_

#include <chrono>
#include <functional>
#include <istream>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/job/job.h"

namespace cuda_remote::checkpoint {

// Whether that comes about within the time. Looks every millisecond.
bool Becomes(const std::function<bool()>& condition, std::chrono::milliseconds limit);

// What /proc/PID/net/tcp or tcp6 lists of such connections, for a message.
std::vector<std::string> ParsePassing(std::istream& lines);

// Lets no machine but this job itself connect to where these processes listen; lets all connect again. A connection
// that is begun meanwhile is made later, since its first packet is sent again. Sockets with a filter of their own stay
// as they are.
void KeepCallersOut(const Job& job);
void LetCallersIn(const Job& job);

// The connections that were made while a thread, which stands still now, waited for them in connect(). Its call begins
// anew. In a process that goes on it then succeeds, but the socket of a restored one would refuse it (EISCONN).
std::vector<std::string> MadeInConnect(const std::vector<int>& pids);

// Stops the processes at a moment when no connection passes, by `stop`, which sends SIGSTOP; `run_on` ends that again.
// Fails, with the name of a connection, if there is no such moment for ten seconds; the processes may be stopped then.
// Callers are kept out afterwards in any case.
absl::Status BringToStandstill(const Job& job, const std::function<void()>& stop, const std::function<void()>& run_on);

// The processes of the job that SIGSTOP has stopped, as numbered inside.
std::set<int> StoppedProcesses(const Job& job);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PASSING_H_
