// SPDX-License-Identifier: Apache-2.0
// Whether events and streams are done. What is known to be done is answered here (client/core/completion.h); everything
// else is asked of the server.
#ifndef CUDA_REMOTE_CLIENT_CALLS_WAIT_H_
#define CUDA_REMOTE_CLIENT_CALLS_WAIT_H_

#include <cuda.h>

#include <cstdint>

#include "client/core/call.h"

namespace cuda_remote::client {

// A question about an event or a stream: `object` is where the answer is remembered.
struct Question {
  Kind kind = Kind::kNone;
  uint64_t object = 0;
  uint64_t stamp = 0;
  bool waits = false;  // for device output too, so that an answer to a query is not enough
};

// True if the answer is known; fills in the stamp that a new answer counts from. False and no stamp for a dead handle.
bool IsKnown(Session& session, Question* question);

// The call's result where it is known.
CUresult AnswerKnown(Session& session, const Question& question);

// Asks the server with the call's message; an answer "done" is remembered.
CUresult AskServer(Call& call, const Question& question);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_WAIT_H_
