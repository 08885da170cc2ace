// SPDX-License-Identifier: Apache-2.0
// Puts the code of a replayed module where it was, as variable_pads.h does for variables.
//
// Where the driver puts functions depends on the code that was loaded before. A replay loads what was alive, and
// kernels only when they are used again, so a module's functions come to lie in front of where they lay. Code of ours -
// pads - is loaded before them, as long as what is missing.
//
// 580 on an H100: a piece for each function and each kernel, its instructions and 0x880 bytes, rounded up to 0x100; in
// blocks of 2 MiB, the shortest hole that is long enough. A module's functions get their places when it is loaded, a
// kernel when it is first asked for. The search relies on one thing only: the same request in the same state gets the
// same place.
#ifndef CUDA_REMOTE_SERVER_WORKER_MODULES_CODE_PADS_H_
#define CUDA_REMOTE_SERVER_WORKER_MODULES_CODE_PADS_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// Addresses of a module's functions, in one context.
using CodeWords = std::vector<uint64_t>;

// `now` is where the module's functions lie, `wanted` where they belong. `reload` unloads the module, calls its
// argument, loads it again and returns where its functions lie then; the argument needs the module's context to be
// current. Returns the last such answer; the pads that have to stay for it are added to *pads. Executor only.
CodeWords MoveCodeTo(const DriverTable& driver, const CodeWords& now, const CodeWords& wanted,
                     const std::function<CodeWords(const std::function<void()>&)>& reload, std::vector<CUmodule>* pads);

// How far the functions lie from where they belong, for a log: "5 of 38 by 0x1400 (3), -0x200 (2)", most frequent
// first.
std::string DescribeDistances(const CodeWords& now, const CodeWords& wanted);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MODULES_CODE_PADS_H_
