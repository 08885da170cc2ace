// SPDX-License-Identifier: Apache-2.0
// An image's summary for people and for programs.
#ifndef CUDA_REMOTE_REPLAY_INSPECT_PRINT_H_
#define CUDA_REMOTE_REPLAY_INSPECT_PRINT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ckptfmt/image_store.h"
#include "replay/inspect/summary.h"

namespace cuda_remote::replay::inspect {

// Several lines. `all`: every region and file, else the first ones.
std::string PrintText(const Summary& summary, bool all);

// What was asked of an image, with the answers. The pointers must be valid during the call.
struct Answers {
  const absl::Status* verified = nullptr;                 // --verify: not OK says what is damaged; null: not asked
  uint32_t arch = 0;                                      // --can-run-on; 0: not asked
  const std::vector<std::string>* missing = nullptr;      // --files-here, a sentence each; null: not asked
  const std::vector<std::string>* differences = nullptr;  // from a second image; null: there is none
};

// One JSON object; docs/json.md lists its fields.
std::string PrintJson(const Summary& summary, const Answers& answers);
// The answer to --verify about an image that is too damaged to be read.
std::string PrintDamagedJson(const std::string& image, const absl::Status& damage);
// The answer to --export, which has verified every byte.
std::string PrintExportJson(const std::string& image, const std::string& exported);

// A store's images, a line each, and as one JSON object. `now_ms`: for their ages.
std::string PrintStore(const ckptfmt::StoreListing& store, int64_t now_ms);
// `verified`: the answers to --verify, by the images' paths; empty: not asked.
std::string PrintStoreJson(const ckptfmt::StoreListing& store, int64_t now_ms,
                           const std::map<std::string, absl::Status>& verified);

// A line for each module: whether a GPU of that architecture can run it. `all_run`: whether all can.
std::string PrintFits(const Summary& summary, uint32_t arch, bool* all_run);

}  // namespace cuda_remote::replay::inspect

#endif  // CUDA_REMOTE_REPLAY_INSPECT_PRINT_H_
