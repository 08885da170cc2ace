// SPDX-License-Identifier: Apache-2.0
// What our libraries may believe of the environment of the program that they are in.
//
// A set-user-ID program has the rights of its owner and the environment of its caller. A library in it that obeyed a
// variable would give the caller the owner's rights: to write files, or to talk to a server of the caller's choice. The
// kernel marks such programs with AT_SECURE: set-user-ID, set-group-ID and those with file capabilities. The mark stays
// when the program gives its rights up.
//
// //tests/layers:layers_test sees to it that the libraries read variables here only.
//
// Needs the C library alone. Any thread, also between fork and exec.
#ifndef CUDA_REMOTE_PROTO_BASE_ENVIRONMENT_H_
#define CUDA_REMOTE_PROTO_BASE_ENVIRONMENT_H_

#include <stdlib.h>
#include <sys/auxv.h>

namespace cuda_remote {

// Whether this process's program runs with rights that its caller does not have.
inline bool HasMoreRightsThanCaller() { return getauxval(AT_SECURE) != 0; }

// The value of an environment variable, which belongs to the environment. Null: it is not set, or the process has more
// rights than its caller.
inline const char* TrustedVariable(const char* name) { return HasMoreRightsThanCaller() ? nullptr : getenv(name); }

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_ENVIRONMENT_H_
