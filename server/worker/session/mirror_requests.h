// SPDX-License-Identifier: Apache-2.0
// What the executor, and the thread that reads ahead of it (executor.h), do with the requests of proto/mirror, and with
// those that move pages of managed memory. Defined in server/worker/calls/managed.cc and managed_memory.cc.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_MIRROR_REQUESTS_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_MIRROR_REQUESTS_H_

#include <cuda.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "proto/codec/operations.gen.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {

// `executor`: whether this is the executor's thread, which alone may look at the session's other tables. The reader
// ahead takes every range for alive: what could end its life waits in the queue.

// Writes a client's changes. False if no correct client sends them.
bool WriteMirrored(WorkerSession& session, std::string_view runs, bool executor);

// Appends what has changed here since it was last told, from address `from` on, and sets the reply's fields.
void ReadMirrored(WorkerSession& session, uint64_t from, bool executor, wire::OpMirrorRead_Reply* out,
                  std::string* runs);

// OpManagedFlush, whether the client's file is here or on another machine; and OpManagedFetch, without waiting for the
// GPU, whose bytes go into `payload` in the latter case.
CUresult FlushManaged(WorkerSession& session, std::string_view payload);
CUresult FetchManaged(WorkerSession& session, uint64_t address, uint64_t bytes, std::string* payload);

// For a request that waits for the GPU, when that is done: its payload, pairs of address and length, are pages that the
// client wants at once. They are fetched, and the reply's payload is one byte, kFetched or kFetchedInPlace
// (proto/mirror/fetched.h), if all of the session's work is done. Only in the order of the requests: the client may
// write to pages that it has asked for later.
void FetchExpected(WorkerSession& session, const Request& request, ReplyBuilder* reply);
// The same in two halves, so that the copies follow the work without a gap: before the executor itself waits for all of
// the session's work, and afterwards instead of FetchExpected. False if these pages cannot be had so. If it waits no
// longer, ManagedMemory::LeaveFetch is called instead of the second half, and whoever waits on calls NoteFetched.
bool BeginFetchExpected(WorkerSession& session, const Request& request);
void EndFetchExpected(WorkerSession& session, ReplyBuilder* reply);
// Makes `payload`, the reply's, say that the pages have been fetched; `in_place`: of ManagedMemory. Any thread.
void NoteFetched(bool in_place, std::string* payload);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_MIRROR_REQUESTS_H_
