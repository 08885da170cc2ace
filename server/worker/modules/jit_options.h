// SPDX-License-Identifier: Apache-2.0
// JIT options of a client, with buffers of our own in place of its pointers. Not thread-safe.
#ifndef CUDA_REMOTE_SERVER_WORKER_MODULES_JIT_OPTIONS_H_
#define CUDA_REMOTE_SERVER_WORKER_MODULES_JIT_OPTIONS_H_

#include <cuda.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_remote::server {

// Must not move between Read and the last call that was given `names` and `values`: the driver writes into them.
struct JitOptions {
  std::vector<CUjit_option> names;
  std::vector<void*> values;
  std::string info_log, error_log;

  JitOptions() = default;
  JitOptions(const JitOptions&) = delete;
  JitOptions& operator=(const JitOptions&) = delete;

  // Takes the options over from the wire. False if no correct client sends this.
  bool Read(const std::vector<uint32_t>& options, const std::vector<uint64_t>& wire_values);

  unsigned count() const { return unsigned(names.size()); }
  // For the driver: null if there are no options.
  CUjit_option* name_array() { return names.empty() ? nullptr : names.data(); }
  void** value_array() { return values.empty() ? nullptr : values.data(); }

  // What the driver wrote into the values; addresses of buffers stay here.
  std::vector<uint64_t> Outputs() const;
  std::string_view info() const { return info_log.c_str(); }
  std::string_view error() const { return error_log.c_str(); }
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MODULES_JIT_OPTIONS_H_
