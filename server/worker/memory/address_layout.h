// SPDX-License-Identifier: Apache-2.0
// Makes the driver put the variables of modules at the same addresses in every worker.
//
// A program may have stored the address of a `__device__` variable anywhere, so after a restart the variable must lie
// where it lay. Unlike allocations (DeviceArena) variables are placed by the driver: in 2 MiB blocks, wherever the
// process's address space has room when the block is needed. So the workers' address spaces have to look alike, and
// blocks should be taken early. Replay notices a variable that lies elsewhere all the same, and stops.
//
// mapping_places.h keeps other mappings out of the driver's way. A change of where the driver puts variables raises
// kWireVersion (proto/frame/frame.h), since jobs and images from before do not fit any more.
//
// For one thread, before the worker's other threads start.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_ADDRESS_LAYOUT_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_ADDRESS_LAYOUT_H_

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// Turns address space randomisation off, which takes a new start of the program: first thing in main. Returns if that
// has been done, or cannot be (a line is logged then). `random`: leaves it on; the session can then not be saved.
void FixAddressLayout(char** argv, bool random);

// Whether it was left on.
bool HasRandomAddresses();

// Loads what the driver would load at its first compilation of PTX - or not at all, if its cache on disk has the
// result.
void PreloadCompiler();

// Takes the first block for variables. The context that will serve the session is current.
void TakeFirstVariableBlock(const DriverTable& driver);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_ADDRESS_LAYOUT_H_
