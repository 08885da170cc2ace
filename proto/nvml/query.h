// SPDX-License-Identifier: Apache-2.0
// Questions about a server's GPUs, in NVML's terms: what our libnvidia-ml.so.1 sends and a cr-server answers.
//
// A question is one NVML call, by its name, with its arguments; the answer has the call's return code and the bytes of
// its results. It travels outside of sessions: packet Query on a session socket, answered by packet Answer and the end
// of the connection (proto/WIRE.md). calls.inc lists the calls that both sides treat alike; the others that may be
// asked are below.
//
// Nothing here throws but std::bad_alloc; bytes that arrive are checked. Thread-safe: no state.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_NVML_QUERY_H_
#define CUDA_REMOTE_PROTO_NVML_QUERY_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "proto/frame/frame.h"
#include "proto/nvml/limits.h"
#include "proto/nvml/query.gen.h"
#include "proto/nvml/types.h"

namespace cuda_remote::nvml {

inline constexpr size_t kMaxFields = 256;  // in one nvmlDeviceGetFieldValues question
inline constexpr uint32_t kMaxGpus = 256;

// Questions beside those of calls.inc.
// Result: uint32 number of GPUs.
inline constexpr char kCount[] = "nvmlDeviceGetCount_v2";
// Two devices (`device`, `a`); result: uint32 level.
inline constexpr char kCommonAncestor[] = "nvmlDeviceGetTopologyCommonAncestor";
// Two devices (`device`, `a`) and an index `b`; result: uint32 status.
inline constexpr char kP2PStatus[] = "nvmlDeviceGetP2PStatus";
// Two devices; result: int32.
inline constexpr char kOnSameBoard[] = "nvmlDeviceOnSameBoard";
// Results: ProcessInfo, one for each process.
inline constexpr char kComputeProcesses[] = "nvmlDeviceGetComputeRunningProcesses_v3";
inline constexpr char kGraphicsProcesses[] = "nvmlDeviceGetGraphicsRunningProcesses_v3";
inline constexpr char kMpsProcesses[] = "nvmlDeviceGetMPSComputeRunningProcesses_v3";
// `a`: PID; result: the name, no terminating zero.
inline constexpr char kProcessName[] = "nvmlSystemGetProcessName";
// Input and result: FieldValue, up to kMaxFields.
inline constexpr char kFieldValues[] = "nvmlDeviceGetFieldValues";
// `a`: scope (affinity within a scope) or unused; `b`: number of 64-bit words; result: that many words.
inline constexpr char kCpuAffinity[] = "nvmlDeviceGetCpuAffinity";
inline constexpr char kCpuAffinityScope[] = "nvmlDeviceGetCpuAffinityWithinScope";
inline constexpr char kMemoryAffinity[] = "nvmlDeviceGetMemoryAffinity";
inline constexpr uint32_t kMaxAffinityWords = 512;

// A call of calls.inc.
enum class Life : uint8_t { kStill, kFresh };
struct Call {
  const char* name;
  enum Shape : uint8_t { kResults, kText, kStruct } shape;
  bool system;     // has no device
  uint8_t inputs;  // unsigned arguments before the results
  Life life;
  std::array<uint16_t, 4> bytes;  // kResults: of each result; kStruct: of versions 1, 2, 3
  // All results together.
  size_t output_bytes() const { return size_t(bytes[0]) + bytes[1] + bytes[2] + bytes[3]; }
  // The size of a struct whose first word is `word`; 0 if the call has no such version.
  size_t StructBytes(uint32_t word) const;
};

// Null if calls.inc does not have it.
const Call* FindCall(std::string_view name);
// All of calls.inc, ended by an entry without name.
const Call* AllCalls();

}  // namespace cuda_remote::nvml

#endif  // CUDA_REMOTE_PROTO_NVML_QUERY_H_
