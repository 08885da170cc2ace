// SPDX-License-Identifier: Apache-2.0
// Recreates a job's objects on another server by sending the calls of its replay log.
//
// Not thread-safe: a replay needs its target for itself. No exceptions, no abseil. Failures name the call and the
// reason.
#ifndef CUDA_REMOTE_REPLAY_REPLAYER_REPLAYER_H_
#define CUDA_REMOTE_REPLAY_REPLAYER_REPLAYER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"
#include "proto/frame/frame.h"
#include "replay/log/log.h"

namespace cuda_remote::replay {

// What the replay talks to; channel_target.h is the real one.
class ReplayTarget {
 public:
  struct Answer {
    uint32_t result = 0;  // CUresult
    std::string message;
  };

  virtual ~ReplayTarget() = default;

  // Sends a request that the server answers. Returns a ticket for Finish; 0 if the server is gone. The views must be
  // valid during the call only.
  virtual uint64_t Begin(const FrameHeader& header, std::string_view message, std::string_view payload) = 0;

  // Waits for the answer to a Begin. Called once for each Begin, in the same order. Fails if the server is gone or its
  // answer is malformed.
  virtual StatusOr<Answer> Finish(uint64_t ticket) = 0;

  // How many requests may be under way at once.
  virtual size_t window() const { return 1; }
};

// Called now and then with the number of records done and in all.
using ReplayProgress = std::function<void(uint64_t done, uint64_t total)>;

// Sessions that are replayed together on one server share GPU objects with each other only. For that, give each of them
// the same `scope` before its replay: 16 random bytes, new ones for each restart and each move. Their replays must run
// at the same time: a session that imports what another one exports waits until that one has replayed the export.
Status ShareIn(std::string_view scope, ReplayTarget& target);

// Whether the log's process shares anything with others, or has opened what they share.
bool Shares(const Log& log);

// Names of the calls in the log that cannot be replayed, each once. Ask before a checkpoint starts, and before a
// restart.
std::vector<std::string> NotReplayable(const Log& log);

// Pinned memory belongs to the process, so a new server can share it only once the process is restored. If graphs copy
// such memory, or texture references show it, the records about both must wait for that.
enum class Part {
  kAll,
  kBeforePinned,  // all that needs no pinned memory
  kAfterPinned,   // the rest: nothing for most jobs
};

// Sends every record with kFlagReplay in the order of the log, with images as payload. Each must succeed and return the
// recorded bytes, except a compiler's messages. Stops at the first that does not, and fails; close the target's session
// then, since it has a part of the objects.
//
// `ahead`: null, or an earlier state of the log, of which ReplayCode has sent the code already.
Status Replay(const Log& log, ReplayTarget& target, const ReplayProgress& progress, Part part = Part::kAll,
              const Log* ahead = nullptr);

// Contexts, modules, libraries and what was looked up in them: most of a replay's time. They hold none of the job's
// memory and can be made before the rest, while the job runs on: the code of `log` now, and later what Replay adds.
Status ReplayCode(const Log& log, ReplayTarget& target);

// How many records ReplayCode sends.
size_t CodeRecords(const Log& log);

// Whether `log` has all that ReplayCode sent of `ahead`, as it was then. If not, the target is of no use.
bool HasCodeOf(const Log& ahead, const Log& log);

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_REPLAYER_REPLAYER_H_
