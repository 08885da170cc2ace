// SPDX-License-Identifier: Apache-2.0
#include "client/memory/memory.h"

#include <string>

#include "proto/codec/operations.gen.h"
#include "proto/frame/handle.h"

namespace cuda_remote::client {

void Memory::GiveBack(const std::vector<FreedMemory::Block>& blocks) {
  for (const FreedMemory::Block& block : blocks) {
    wire::OpMemFree_Request request;
    request.address = block.address;
    uint32_t context_slot = 0;
    {
      WriterLock lock(&objects_->mutex());
      objects_->DropLocked({Kind::kDeviceMemory, block.address});
      const Object* const context = objects_->handles().Find(Kind::kContext, block.context);
      if (context && context->active) context_slot = SlotOf(block.context);
      // Without the context or the stream, the server waits until the GPU is idle.
      request.stream_ordered = context_slot != 0 && (KindOf(block.stream) != Kind::kStream ||
                                                     objects_->handles().Find(Kind::kStream, block.stream));
    }
    if (request.stream_ordered) request.stream = block.stream;
    std::string message;
    request.Encode(&message);
    requests_->Send(kOpMemFree, message, context_slot);
  }
}

bool Memory::GiveBackFreed() {
  const std::vector<FreedMemory::Block> blocks = TakeFreed();
  GiveBack(blocks);
  const bool managed = uses_managed() && managed_home_.DropKept();
  return managed || !blocks.empty();
}

}  // namespace cuda_remote::client
