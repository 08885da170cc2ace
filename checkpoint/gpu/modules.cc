// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/modules.h"

#include <algorithm>
#include <set>

#include "proto/api/call_names.gen.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"
#include "proto/errors/annotate.h"
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

absl::Status EnoughDevices(size_t before, size_t after, const std::string& where) {
  if (after >= before) return absl::OkStatus();
  return absl::FailedPreconditionError("it sees " + std::to_string(before) + " GPU" + (before == 1 ? "" : "s") +
                                       "; there " + (after == 1 ? "is " : "are ") + std::to_string(after) + " at " +
                                       where);
}

// The first figures of the hash, as cr-inspect prints it.
std::string ShortName(const Hash128& hash) { return ToHex(hash).substr(0, 12); }

}  // namespace

absl::Status CheckModules(const replay::Log& log, const std::vector<ckptfmt::DeviceFacts>& before,
                          const std::vector<ckptfmt::DeviceFacts>& after) {
  if (after.empty()) return absl::OkStatus();
  std::set<std::string> seen;
  std::string first;
  size_t others = 0;
  for (const replay::Record* record : log.InOrder()) {
    if (!record->image || !seen.insert(ToHex(*record->image)).second) continue;
    const std::string* const bytes = log.FindImage(*record->image);
    if (!bytes) continue;
    const StatusOr<replay::ParsedImage> image = replay::ListEntries(*bytes);
    if (!image.ok() || !AnyRuns(*image, before) || AnyRuns(*image, after)) continue;
    if (!first.empty()) {
      ++others;
      continue;
    }
    std::string code;
    for (const replay::ImageEntry& entry : image->entries) code += (code.empty() ? "" : ", ") + replay::NameOf(entry);
    first = "the job's module " + ShortName(*record->image) + " (" + CallIdName(record->header.call) + ", " +
            std::to_string(bytes->size()) + " bytes, code: " + code + ") cannot run on the GPU there, a " +
            after[0].name + " of compute capability " + std::to_string(after[0].compute_major) + "." +
            std::to_string(after[0].compute_minor);
  }
  if (first.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      first + (others > 0 ? ", and neither can " + std::to_string(others) + " more" : std::string()));
}

absl::Status CheckDevices(const replay::Log& log, const std::vector<ckptfmt::DeviceFacts>& before,
                          const std::vector<ckptfmt::DeviceFacts>& after, const std::string& where) {
  CR_RETURN_IF_ERROR(EnoughDevices(before.size(), after.size(), where));
  return CheckModules(log, before, after);
}

absl::StatusOr<std::vector<std::string>> ListRefusals(const ckptfmt::ImageReader& image,
                                                      const std::vector<ckptfmt::DeviceFacts>& after,
                                                      const std::string& where) {
  std::vector<std::string> refusals;
  const ckptfmt::ImageInfo& info = image.info();
  for (size_t i = 0; i < info.processes.size(); ++i) {
    const ckptfmt::ProcessInfo& process = info.processes[i];
    const std::string name = process.program + " (PID " + std::to_string(process.pid) + "): ";
    const absl::StatusOr<std::string> bytes = image.ReadLog(i);
    const absl::StatusOr<replay::Log> log = bytes.ok() ? ToAbsl(replay::Log::Parse(*bytes)) : bytes.status();
    if (!log.ok()) return Annotate(name + "its replay log cannot be read: ", log.status());
    for (const absl::Status& refusal :
         {EnoughDevices(process.devices.size(), after.size(), where), CheckModules(*log, process.devices, after)}) {
      if (!refusal.ok()) refusals.push_back(name + std::string(refusal.message()));
    }
  }
  return refusals;
}

}  // namespace cuda_remote::checkpoint
