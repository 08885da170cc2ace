// SPDX-License-Identifier: Apache-2.0
// A loop from generated stub to generated handler to a fake driver, all in one process: Call and Session are replaced
// by stand-ins that pass the encoded message straight on. Hand-written bodies are left out.
#ifndef CUDA_REMOTE_TESTS_CONFORMANCE_LOOPBACK_H_
#define CUDA_REMOTE_TESTS_CONFORMANCE_LOOPBACK_H_

#include <cstdint>
#include <cstring>
#include <map>
#include <set>

#include "proto/api/attribute_sizes.h"
#include "proto/frame/handle.h"
#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// Refuse every call (server_stand_ins.gen.cc).
class CustomCalls;
CustomCalls* StandInCalls();

}  // namespace cuda_remote::server

namespace cuda_remote::loopback {

// The fake driver's functions; cases put their own in.
server::DriverTable& Driver();

// What happened since Reset.
extern int g_driver_calls;
extern int g_modified;
extern std::map<uint64_t, uint64_t> g_bound;  // virtual handle -> real
extern std::set<uint64_t> g_created, g_destroyed, g_unbound;
extern bool g_null;  // the present round passes NULL for optional parameters

void Reset();

// A live virtual handle for parameter `index`, and the real handle that the fake session keeps for it.
uint64_t VirtualFor(Kind kind, int index);
uint64_t RealFor(uint64_t handle);

// Fills memory with bytes that tell `seed`; whether it has them; whether it is still as memset(0x5a) left it.
void Pattern(void* memory, size_t bytes, int seed);
bool HasPattern(const void* memory, size_t bytes, int seed);
bool Untouched(const void* memory, size_t bytes);

}  // namespace cuda_remote::loopback

#endif  // CUDA_REMOTE_TESTS_CONFORMANCE_LOOPBACK_H_
