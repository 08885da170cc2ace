// SPDX-License-Identifier: Apache-2.0
#include "server/worker/modules/jit_options.h"

#include <algorithm>

namespace cuda_remote::server {
namespace {

// Longest compiler log that is made for a client; four of them must fit a reply.
constexpr uint64_t kMaxLog = 192 << 10;
constexpr size_t kMaxOptions = 64;

}  // namespace

bool JitOptions::Read(const std::vector<uint32_t>& options, const std::vector<uint64_t>& wire_values) {
  if (options.size() != wire_values.size() || options.size() > kMaxOptions) return false;
  uint64_t info_bytes = 0, error_bytes = 0;
  for (size_t i = 0; i < options.size(); ++i) {
    if (options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES) info_bytes = std::min(wire_values[i], kMaxLog);
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) error_bytes = std::min(wire_values[i], kMaxLog);
  }
  info_log.assign(info_bytes + 1, 0);
  error_log.assign(error_bytes + 1, 0);
  for (size_t i = 0; i < options.size(); ++i) {
    uint64_t value = wire_values[i];
    switch (options[i]) {
      case CU_JIT_INFO_LOG_BUFFER:
        value = reinterpret_cast<uint64_t>(&info_log[0]);
        break;
      case CU_JIT_ERROR_LOG_BUFFER:
        value = reinterpret_cast<uint64_t>(&error_log[0]);
        break;
      case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
        value = info_bytes;
        break;
      case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
        value = error_bytes;
        break;
      case CU_JIT_GLOBAL_SYMBOL_NAMES:
      case CU_JIT_GLOBAL_SYMBOL_ADDRESSES:
      case CU_JIT_REFERENCED_KERNEL_NAMES:
      case CU_JIT_REFERENCED_VARIABLE_NAMES:
        return false;  // pointers
      default:
        if (options[i] >= CU_JIT_NUM_OPTIONS) return false;
    }
    names.push_back(CUjit_option(options[i]));
    values.push_back(reinterpret_cast<void*>(value));
  }
  return true;
}

std::vector<uint64_t> JitOptions::Outputs() const {
  std::vector<uint64_t> out;
  for (size_t i = 0; i < names.size(); ++i) {
    const bool pointer = names[i] == CU_JIT_INFO_LOG_BUFFER || names[i] == CU_JIT_ERROR_LOG_BUFFER;
    out.push_back(pointer ? 0 : reinterpret_cast<uint64_t>(values[i]));
  }
  return out;
}

}  // namespace cuda_remote::server
