// SPDX-License-Identifier: Apache-2.0
// The entry points of proto/nvml/calls.inc, one line each there.
//
// No header declares them: programs know them from NVML's own.
#include "client/nvml/library.h"
#include "proto/nvml/query.h"

using cuda_remote::client::NvmlDevice;
using cuda_remote::client::PlainCall;
using cuda_remote::client::TextCall;

#define EXPORT extern "C" __attribute__((visibility("default"))) int

// NVML's functions have as many results as the call has; x86-64 passes what is not given as nothing in particular, and
// PlainCall looks at as many places as calls.inc says.
#define NVML_OUT(name, life, ...)                                          \
  EXPORT name(NvmlDevice device, void* o0, void* o1, void* o2, void* o3) { \
    void* const out[4] = {o0, o1, o2, o3};                                 \
    return PlainCall(#name, device, 0, 0, out);                            \
  }
#define NVML_IN1_OUT(name, life, ...)                              \
  EXPORT name(NvmlDevice device, uint32_t a, void* o0, void* o1) { \
    void* const out[4] = {o0, o1, nullptr, nullptr};               \
    return PlainCall(#name, device, a, 0, out);                    \
  }
#define NVML_IN2_OUT(name, life, ...)                                          \
  EXPORT name(NvmlDevice device, uint32_t a, uint32_t b, void* o0, void* o1) { \
    void* const out[4] = {o0, o1, nullptr, nullptr};                           \
    return PlainCall(#name, device, a, b, out);                                \
  }
#define NVML_TEXT(name, life) \
  EXPORT name(NvmlDevice device, char* text, uint32_t length) { return TextCall(#name, device, 0, text, length); }
#define NVML_IN1_TEXT(name, life)                                           \
  EXPORT name(NvmlDevice device, uint32_t a, char* text, uint32_t length) { \
    return TextCall(#name, device, a, text, length);                        \
  }
#define NVML_STRUCT(name, life, v1, v2, v3)               \
  EXPORT name(NvmlDevice device, void* o0) {              \
    void* const out[4] = {o0, nullptr, nullptr, nullptr}; \
    return PlainCall(#name, device, 0, 0, out);           \
  }
#define NVML_SYSTEM_OUT(name, life, bytes)                \
  EXPORT name(void* o0) {                                 \
    void* const out[4] = {o0, nullptr, nullptr, nullptr}; \
    return PlainCall(#name, nullptr, 0, 0, out);          \
  }
#define NVML_SYSTEM_STRUCT(name, life, v1, v2, v3) NVML_SYSTEM_OUT(name, life, v1)
#define NVML_SYSTEM_TEXT(name, life) \
  EXPORT name(char* text, uint32_t length) { return TextCall(#name, nullptr, 0, text, length); }

#include "proto/nvml/calls.inc"
