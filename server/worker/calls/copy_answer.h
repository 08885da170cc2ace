// SPDX-License-Identifier: Apache-2.0
// How copies are answered once the GPU has done them.
#ifndef CUDA_REMOTE_SERVER_WORKER_CALLS_COPY_ANSWER_H_
#define CUDA_REMOTE_SERVER_WORKER_CALLS_COPY_ANSWER_H_

#include <cstddef>
#include <memory>

#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {

// Answers the request when all that is in `stream` by now is done. `buffer` is kept until then; its first `bytes` are
// the reply's payload.
CUresult AnswerBehind(WorkerSession& session, CUstream stream, std::shared_ptr<char> buffer, size_t bytes,
                      ReplyBuilder* reply);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_CALLS_COPY_ANSWER_H_
