// SPDX-License-Identifier: Apache-2.0
#include "client/calls/jit_options.h"

#include <algorithm>
#include <cstring>

#include "client/core/call.h"

namespace cuda_remote::client {
namespace {

bool IsLogBuffer(CUjit_option option) { return option == CU_JIT_INFO_LOG_BUFFER || option == CU_JIT_ERROR_LOG_BUFFER; }

// Options that the driver writes into the caller's array.
bool IsOutput(CUjit_option option) {
  return option == CU_JIT_WALL_TIME || option == CU_JIT_THREADS_PER_BLOCK ||
         option == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES || option == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES;
}

}  // namespace

CUresult PackJitOptions(const char* name, unsigned count, const CUjit_option* options, void* const* values,
                        std::vector<uint32_t>* wire_options, std::vector<uint64_t>* wire_values) {
  if (count && (!options || !values)) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; ++i) {
    switch (options[i]) {
      case CU_JIT_GLOBAL_SYMBOL_NAMES:
      case CU_JIT_GLOBAL_SYMBOL_ADDRESSES:
      case CU_JIT_REFERENCED_KERNEL_NAMES:
      case CU_JIT_REFERENCED_VARIABLE_NAMES:
        return Call::Unsupported(name, "JIT options that name symbols are not carried over yet");
      default:
        break;
    }
    wire_options->push_back(options[i]);
    wire_values->push_back(IsLogBuffer(options[i]) ? 0 : reinterpret_cast<uint64_t>(values[i]));
  }
  return CUDA_SUCCESS;
}

void UnpackJitOptions(unsigned count, const CUjit_option* options, void* const* given, void** values,
                      const std::vector<uint64_t>& wire_values, std::string_view info_log, std::string_view error_log) {
  // The sizes that the caller gave are its buffers' room; read them before they are overwritten.
  size_t info_room = 0, error_room = 0;
  for (unsigned i = 0; i < count; ++i) {
    if (options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES) info_room = reinterpret_cast<size_t>(given[i]);
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) error_room = reinterpret_cast<size_t>(given[i]);
  }
  for (unsigned i = 0; i < count; ++i) {
    const bool info = options[i] == CU_JIT_INFO_LOG_BUFFER;
    if (IsLogBuffer(options[i]) && given[i]) {
      const std::string_view log = info ? info_log : error_log;
      const size_t room = info ? info_room : error_room;
      const size_t bytes = std::min(room, log.size());
      memcpy(given[i], log.data(), bytes);
      if (bytes < room) static_cast<char*>(given[i])[bytes] = 0;
    } else if (IsOutput(options[i]) && i < wire_values.size()) {
      values[i] = reinterpret_cast<void*>(wire_values[i]);
    }
  }
}

}  // namespace cuda_remote::client
