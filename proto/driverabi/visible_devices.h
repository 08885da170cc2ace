// SPDX-License-Identifier: Apache-2.0
// CUDA_VISIBLE_DEVICES: which GPUs a program sees, and in which order. The client library applies it to the server's
// GPUs, the software GPU to its own.
//
// Part of the client library: no exceptions of its own but std::bad_alloc, no logging. Thread-safe.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_VISIBLE_DEVICES_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_VISIBLE_DEVICES_H_

#include <string>
#include <string_view>
#include <vector>

namespace cuda_remote::driverabi {

// The devices that a value of the variable names, as indices into `uuids` (16 bytes each), by the driver's rules:
// ordinals, or UUIDs that may be cut short as long as they mean one device ("GPU-" or "MIG-" first); the list ends
// before the first entry that is no device. A device that is named twice makes it empty, and *twice true: cuInit then
// fails with CUDA_ERROR_INVALID_DEVICE instead of CUDA_ERROR_NO_DEVICE (580 with two H200).
std::vector<int> VisibleDevices(std::string_view value, const std::vector<std::string>& uuids, bool* twice = nullptr);

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_VISIBLE_DEVICES_H_
