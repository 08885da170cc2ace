// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/modules.h"

#include <algorithm>
#include <set>

#include "proto/api/call_names.gen.h"
#include "replay/modimg/modimg.h"

namespace cuda_remote::checkpoint {
namespace {

uint32_t ArchOf(const ckptfmt::DeviceFacts& device) {
  return uint32_t(std::max(device.compute_major, 0)) * 10 + uint32_t(std::max(device.compute_minor, 0));
}

bool AnyRuns(const replay::ParsedImage& image, const std::vector<ckptfmt::DeviceFacts>& devices) {
  for (const replay::ImageEntry& entry : image.entries) {
    for (const ckptfmt::DeviceFacts& device : devices) {
      if (replay::CanRun(entry, ArchOf(device))) return true;
    }
  }
  return false;
}

// The first figures of the hash, as cr-inspect prints it.
std::string ShortName(const replay::Hash128& hash) { return replay::ToHex(hash).substr(0, 12); }

}  // namespace

bool CheckModules(const replay::Log& log, const std::vector<ckptfmt::DeviceFacts>& before,
                  const std::vector<ckptfmt::DeviceFacts>& after, std::string* error) {
  if (after.empty()) return true;
  std::set<std::string> seen;
  size_t others = 0;
  error->clear();
  for (const replay::Record* record : log.InOrder()) {
    if (!record->image || !seen.insert(replay::ToHex(*record->image)).second) continue;
    const std::string* const bytes = log.FindImage(*record->image);
    replay::ParsedImage image;
    std::string problem;
    if (!bytes || !replay::ListEntries(*bytes, &image, &problem)) continue;
    if (!AnyRuns(image, before) || AnyRuns(image, after)) continue;
    if (!error->empty()) {
      ++others;
      continue;
    }
    std::string code;
    for (const replay::ImageEntry& entry : image.entries) code += (code.empty() ? "" : ", ") + replay::NameOf(entry);
    *error = "the job's module " + ShortName(*record->image) + " (" + CallIdName(record->header.call) + ", " +
             std::to_string(bytes->size()) + " bytes, code: " + code + ") cannot run on the GPU there, a " +
             after[0].name + " of compute capability " + std::to_string(after[0].compute_major) + "." +
             std::to_string(after[0].compute_minor);
  }
  if (others > 0) *error += ", and neither can " + std::to_string(others) + " more";
  return error->empty();
}

}  // namespace cuda_remote::checkpoint
