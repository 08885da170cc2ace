// SPDX-License-Identifier: Apache-2.0
// The new end of a move over the network: memory that is filled while the job still runs elsewhere.

#include <cuda.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "proto/codec/operations.gen.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/memory/snapshot_memory.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// Blocks in one message.
constexpr size_t kMostBlocks = 4096;

// A context of a device is current while it lives. Before the replay the session may have none: then it is the primary
// one, until EndEarlyContexts.
class OnDevice {
 public:
  OnDevice(WorkerSession& session, int device) : worker_(session) {
    if (const ContextRef context = session.contexts().On(device); context.id != 0) {
      result_ = MakeCurrent(session.driver(), context);
      return;
    }
    CUcontext early = nullptr;
    result_ = session.contexts().Early(device, &early);
    if (result_ == CUDA_SUCCESS) result_ = session.driver().cuCtxSetCurrent(early);
    ForgetCurrent();
  }
  ~OnDevice() { MakeCurrent(worker_.driver(), worker_.contexts().current_ref()); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  CUresult result() const { return result_; }

 private:
  WorkerSession& worker_;
  CUresult result_;
};

// Whether the current context's GPU can spare so much. The job may run on it, and must not miss what is made ahead.
bool LeavesEnough(const DriverTable& driver, uint64_t bytes) {
  size_t free = 0, total = 0;
  if (driver.cuMemGetInfo_v2(&free, &total) != CUDA_SUCCESS) return false;
  const uint64_t reserve =
      std::max<uint64_t>(total / 100 * SnapshotMemory::kReservePercent, SnapshotMemory::kLeastReserve);
  return bytes <= free && free - bytes >= reserve;
}

}  // namespace

CUresult OpListBlocks(WorkerSession& session, const Request&, const wire::OpListBlocks_Request& in,
                      wire::OpListBlocks_Reply* out, ReplyBuilder* reply) {
  const std::vector<DeviceArena::Block> blocks = session.arena().LiveBlocks(in.after, kMostBlocks);
  for (const DeviceArena::Block& block : blocks) {
    wire::Block listed;
    listed.address = block.address;
    listed.bytes = block.bytes;
    listed.device = block.device;
    out->blocks.push_back(listed);
  }
  if (blocks.size() == kMostBlocks) out->next = blocks.back().address + blocks.back().bytes;
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult OpStageBlocks(WorkerSession& session, const Request&, const wire::OpStageBlocks_Request& in,
                       wire::OpStageBlocks_Reply* out, ReplyBuilder* reply) {
  if (in.blocks.size() > kMostBlocks || in.drop.size() > kMostBlocks) return kMalformedRequest;
  DeviceArena& arena = session.arena();
  for (const uint64_t address : in.drop) arena.Unstage(address);
  for (const wire::Block& block : in.blocks) {
    if (block.device < 0 || size_t(block.device) >= session.loaded().devices.size()) continue;
    const OnDevice current(session, block.device);
    // As the driver says it: the session's limits are the arena's.
    if (current.result() != CUDA_SUCCESS || !LeavesEnough(session.loaded().table, block.bytes)) continue;
    if (arena.Stage({block.address, block.bytes, block.device}) == CUDA_SUCCESS) out->staged.push_back(block.address);
  }
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

CUresult OpFillBlock(WorkerSession& session, const Request& request, const wire::OpFillBlock_Request& in,
                     wire::OpFillBlock_Reply*, ReplyBuilder*) {
  const size_t bytes = request.payload.size();
  if (bytes == 0) return CUDA_SUCCESS;
  int device = 0;
  if (!session.arena().IsStaged(in.address, bytes, &device)) return CUDA_ERROR_INVALID_VALUE;
  const OnDevice current(session, device);
  if (current.result() != CUDA_SUCCESS) return current.result();
  const std::shared_ptr<char> buffer = session.staging().Take(bytes);
  if (!buffer) return CUDA_ERROR_OUT_OF_MEMORY;
  request.payload.CopyTo(buffer.get());
  return session.driver().cuMemcpyHtoD_v2(in.address, buffer.get(), bytes);
}

}  // namespace cuda_remote::server
