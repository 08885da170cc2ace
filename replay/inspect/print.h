// SPDX-License-Identifier: Apache-2.0
// An image's summary for people and for programs.
#ifndef CUDA_REMOTE_REPLAY_INSPECT_PRINT_H_
#define CUDA_REMOTE_REPLAY_INSPECT_PRINT_H_

#include <string>
#include <vector>

#include "ckptfmt/image_store.h"
#include "replay/inspect/summary.h"

namespace cuda_remote::replay::inspect {

// Several lines. `all`: every region and file, else the first ones.
std::string PrintText(const Summary& summary, bool all);

// One JSON object; README.md lists its members. `arch`: adds whether each module runs there; 0: does not.
// `differences`: adds this list, unless null.
std::string PrintJson(const Summary& summary, uint32_t arch, const std::vector<std::string>* differences);

// A store's images, a line each, and as one JSON object. `now_ms`: for their ages.
std::string PrintStore(const ckptfmt::StoreListing& store, int64_t now_ms);
std::string PrintStoreJson(const ckptfmt::StoreListing& store, int64_t now_ms);

// A line for each module: whether a GPU of that architecture can run it. `all_run`: whether all can.
std::string PrintFits(const Summary& summary, uint32_t arch, bool* all_run);

}  // namespace cuda_remote::replay::inspect

#endif  // CUDA_REMOTE_REPLAY_INSPECT_PRINT_H_
