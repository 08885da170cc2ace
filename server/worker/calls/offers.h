// SPDX-License-Identifier: Apache-2.0
// The end of a move at the new worker: memory that the old one offers, mapped for one copy.
#ifndef CUDA_REMOTE_SERVER_WORKER_CALLS_OFFERS_H_
#define CUDA_REMOTE_SERVER_WORKER_CALLS_OFFERS_H_

#include <cuda.h>

#include <cstdint>
#include <string_view>

#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {

// Offered memory that is mapped.
struct MappedOffer {
  uint64_t address = 0;  // what is offered
  uint64_t bytes = 0;
  uint64_t mapping = 0;
  uint64_t mapping_bytes = 0;
};

// Takes the offer with this key and maps it for the GPU of the current context. Executor only.
CUresult MapOffer(WorkerSession& session, std::string_view key, MappedOffer* offer);

// Once the copy is over. Any thread.
void UnmapOffer(const DriverTable& driver, Ipc* ipc, const MappedOffer& offer);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_CALLS_OFFERS_H_
