// SPDX-License-Identifier: Apache-2.0
// Features of the kernel that saved processes need where they are restored, and that not every machine has: by name, as
// images list them.
//
// Thread-safe; no state.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_KERNEL_FEATURES_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_KERNEL_FEATURES_H_

#include <set>
#include <string>
#include <vector>

#include "checkpoint/job/account.h"
#include "proto/base/mappings.h"

namespace cuda_remote::checkpoint {

// What a running process with these mappings uses.
std::set<std::string> KernelFeaturesOf(const std::vector<Mapping>& mappings);

// Those of `wanted` that processes of this user cannot use here, a sentence each. A name that is unknown here is one.
std::vector<std::string> MissingKernelFeatures(const std::set<std::string>& wanted, const Account& user);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_KERNEL_FEATURES_H_
