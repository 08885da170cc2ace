// SPDX-License-Identifier: Apache-2.0
#include "proto/nvml/query.h"

namespace cuda_remote::nvml {
namespace {

constexpr Life kStill = Life::kStill;
constexpr Life kFresh = Life::kFresh;

// A parameter pack cannot be sliced by a macro; this takes what there is and fills up with zeros.
constexpr std::array<uint16_t, 4> Sizes(size_t a, size_t b = 0, size_t c = 0, size_t d = 0) {
  return {uint16_t(a), uint16_t(b), uint16_t(c), uint16_t(d)};
}

#define NVML_OUT(name, life, ...) {#name, Call::kResults, false, 0, life, Sizes(__VA_ARGS__)},
#define NVML_IN1_OUT(name, life, ...) {#name, Call::kResults, false, 1, life, Sizes(__VA_ARGS__)},
#define NVML_IN2_OUT(name, life, ...) {#name, Call::kResults, false, 2, life, Sizes(__VA_ARGS__)},
#define NVML_TEXT(name, life) {#name, Call::kText, false, 0, life, Sizes(0)},
#define NVML_IN1_TEXT(name, life) {#name, Call::kText, false, 1, life, Sizes(0)},
#define NVML_STRUCT(name, life, v1, v2, v3) {#name, Call::kStruct, false, 0, life, Sizes(v1, v2, v3)},
#define NVML_SYSTEM_OUT(name, life, bytes) {#name, Call::kResults, true, 0, life, Sizes(bytes)},
#define NVML_SYSTEM_STRUCT(name, life, v1, v2, v3) {#name, Call::kStruct, true, 0, life, Sizes(v1, v2, v3)},
#define NVML_SYSTEM_TEXT(name, life) {#name, Call::kText, true, 0, life, Sizes(0)},

constexpr Call kCalls[] = {
#include "proto/nvml/calls.inc"
    {nullptr, Call::kResults, false, 0, kStill, {}},
};

}  // namespace

size_t Call::StructBytes(uint32_t word) const {
  for (uint32_t version = 1; version <= 3; ++version) {
    const size_t size = bytes[version - 1];
    if (size != 0 && VersionWord(size, version) == word) return size;
  }
  return 0;
}

const Call* AllCalls() { return kCalls; }

const Call* FindCall(std::string_view name) {
  for (const Call* call = kCalls; call->name; ++call) {
    if (name == call->name) return call;
  }
  return nullptr;
}

}  // namespace cuda_remote::nvml
