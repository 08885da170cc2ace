// SPDX-License-Identifier: Apache-2.0
// The state behind the library's entry points: how often it was initialised, the device handles, answers that may be
// used again.
//
// Thread-safe. Nothing throws; a want of memory is an answer of kMemoryError. After fork the child has the same state
// and asks by itself.
#ifndef CUDA_REMOTE_CLIENT_NVML_LIBRARY_H_
#define CUDA_REMOTE_CLIENT_NVML_LIBRARY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "proto/nvml/query.h"
#include "proto/nvml/types.h"

// What programs hold as nvmlDevice_t.
struct nvmlDevice_st;

namespace cuda_remote::client {

using NvmlDevice = nvmlDevice_st*;

// Counted, as NVML's; kDriverNotLoaded if no server answers. A server without GPUs is fine.
int Initialize();
int Shutdown();
bool Initialized();

// kSuccess and the index of `device`; kUninitialized, or kInvalidArgument for what is no handle of ours.
int IndexOf(NvmlDevice device, uint32_t* index);
NvmlDevice HandleOf(uint32_t index);
// How many GPUs there are now.
int CountGpus(uint32_t* count);

// Asks the server, or takes the answer that it gave to the same question a moment ago. The return code of the call.
int Ask(const nvml::Question& question, nvml::Life life, std::string* output);

// Entry points of calls.inc: check, ask, and copy the results. `out`: four places, one for each result, the rest null.
// A versioned struct is taken from out[0] and put there.
int PlainCall(const char* name, NvmlDevice device, uint32_t a, uint32_t b, void* const* out);
int TextCall(const char* name, NvmlDevice device, uint32_t a, char* text, uint32_t length);
// Texts: kInsufficientSize if it does not fit.
int PutText(const std::string& value, char* text, uint32_t length);

// One that is not supported: kNotSupported (kUninitialized before nvmlInit), and a line, once for each name, if
// CUDA_REMOTE_NVML_LOG is set.
int Unsupported(const char* name);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_NVML_LIBRARY_H_
