// SPDX-License-Identifier: Apache-2.0
// How the address space of a session's worker is laid out, as a number.
//
// The layout decides where the driver puts the variables and the code of modules. A program may keep such addresses, so
// a session has one layout for life, also in the workers that it gets by restarts and moves. Images store the number.
//
// 0: All mappings are where the kernel places them. Servers, clients and images that do not say a number mean this one.
// 1: Mappings for which nobody chose an address have addresses of their own (server/worker/mapping_places.h), so that
// they are not in the way of the driver's blocks.
#ifndef CUDA_REMOTE_PROTO_CHANNEL_ADDRESS_LAYOUT_H_
#define CUDA_REMOTE_PROTO_CHANNEL_ADDRESS_LAYOUT_H_

#include <cstdint>

namespace cuda_remote {

inline constexpr uint32_t kNewestAddressLayout = 1;

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CHANNEL_ADDRESS_LAYOUT_H_
