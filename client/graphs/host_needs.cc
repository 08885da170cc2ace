// SPDX-License-Identifier: Apache-2.0
#include "client/graphs/host_needs.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "proto/codec/named.gen.h"

namespace cuda_remote::client {
namespace {

using Addresses = std::vector<uint64_t>;

template <typename Params>
bool Read(std::string_view bytes, Params* params) {
  if (bytes.size() != sizeof *params) return false;
  memcpy(params, bytes.data(), sizeof *params);
  return true;
}

// Takes the addresses of whatever a request names. Not an IgnoreNamed: nothing that has addresses must be overlooked.
struct AddressVisitor {
  std::vector<uint64_t> addresses;

  void Address(uint64_t address) { addresses.push_back(address); }

  void Fill(std::string_view params) {
    CUDA_MEMSET_NODE_PARAMS_v1 fill;
    if (Read(params, &fill)) addresses.push_back(fill.dst);
  }

  void Copy2d(std::string_view params) { Copy<CUDA_MEMCPY2D>(params); }
  void Copy3d(std::string_view params) { Copy<CUDA_MEMCPY3D>(params); }
  void Copy3dPeer(std::string_view params) { Copy<CUDA_MEMCPY3D_PEER>(params); }

  void MemoryOperations(std::string_view operations) {
    CUstreamBatchMemOpParams one;
    for (; operations.size() >= sizeof one; operations.remove_prefix(sizeof one)) {
      memcpy(&one, operations.data(), sizeof one);
      switch (one.operation) {
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        case CU_STREAM_MEM_OP_WAIT_VALUE_64:
          addresses.push_back(one.waitValue.address);
          break;
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        case CU_STREAM_MEM_OP_WRITE_VALUE_64:
          addresses.push_back(one.writeValue.address);
          break;
        default:
          break;
      }
    }
  }

  void Node(const wire::NodeParams& params) {
    Copy3d(params.copy);
    Fill(params.memset);
    MemoryOperations(params.memory_operations);
  }

  // No memory.
  void Function(uint64_t) {}
  void Event(uint64_t) {}
  void ExternalFlag(uint32_t) {}

 private:
  template <typename Params>
  void Copy(std::string_view params) {
    Params copy;
    if (!Read(params, &copy)) return;
    if (copy.srcMemoryType == CU_MEMORYTYPE_DEVICE) addresses.push_back(copy.srcDevice);
    if (copy.dstMemoryType == CU_MEMORYTYPE_DEVICE) addresses.push_back(copy.dstDevice);
    if (copy.srcMemoryType == CU_MEMORYTYPE_HOST) addresses.push_back(reinterpret_cast<uint64_t>(copy.srcHost));
    if (copy.dstMemoryType == CU_MEMORYTYPE_HOST) addresses.push_back(reinterpret_cast<uint64_t>(copy.dstHost));
  }
};

}  // namespace

std::vector<uint64_t> AddressesOf(uint32_t call, std::string_view message) {
  AddressVisitor visitor;
  wire::VisitNamed(call, message, &visitor);
  return std::move(visitor.addresses);
}

replay::ObjectKey MemoryAt(Memory* memory, uint64_t address) {
  WriterLock lock(&memory->mutex());
  const auto* const range = memory->device_ranges().Find(address);
  if (!range) {
    auto* const pinned = memory->host_ranges().Find(address);
    if (!pinned) return {};
    // The server shares it now; the next one may have to make its own (client/calls/mapped_memory.h).
    if (pinned->value.shared && !pinned->value.on_device && memory->host_mappings().shared_memory()) {
      pinned->value.on_device = true;
      pinned->value.device = pinned->start;
    }
    return {Kind::kHostMemory, pinned->start};
  }
  switch (range->value.source) {
    case DeviceRange::kGlobal:
      return {Kind::kVariable, range->start};
    case DeviceRange::kMapped:
      return {Kind::kMapping, range->start};
    case DeviceRange::kManaged:
      return {Kind::kHostMemory, range->start};
    default:
      return {Kind::kDeviceMemory, range->start};
  }
}

void AddHostNeeds(Memory* memory, uint32_t call, std::string_view message, std::vector<replay::ObjectKey>* needs) {
  for (const uint64_t address : AddressesOf(call, message)) {
    const replay::ObjectKey key = MemoryAt(memory, address);
    if (key.kind != Kind::kHostMemory || key.id == 0) continue;
    if (std::find(needs->begin(), needs->end(), key) == needs->end()) needs->push_back(key);
  }
}

}  // namespace cuda_remote::client
