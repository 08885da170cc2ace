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

bool EnoughDevices(size_t before, size_t after, const std::string& where, std::string* error) {
  if (after >= before) return true;
  *error = "it sees " + std::to_string(before) + " GPU" + (before == 1 ? "" : "s") + "; there " +
           (after == 1 ? "is " : "are ") + std::to_string(after) + " at " + where;
  return false;
}

// The first figures of the hash, as cr-inspect prints it.
std::string ShortName(const Hash128& hash) { return ToHex(hash).substr(0, 12); }

}  // namespace

bool CheckModules(const replay::Log& log, const std::vector<ckptfmt::DeviceFacts>& before,
                  const std::vector<ckptfmt::DeviceFacts>& after, std::string* error) {
  if (after.empty()) return true;
  std::set<std::string> seen;
  size_t others = 0;
  error->clear();
  for (const replay::Record* record : log.InOrder()) {
    if (!record->image || !seen.insert(ToHex(*record->image)).second) continue;
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

bool CheckDevices(const replay::Log& log, const std::vector<ckptfmt::DeviceFacts>& before,
                  const std::vector<ckptfmt::DeviceFacts>& after, const std::string& where, std::string* error) {
  return EnoughDevices(before.size(), after.size(), where, error) && CheckModules(log, before, after, error);
}

bool ListRefusals(const ckptfmt::ImageReader& image, const std::vector<ckptfmt::DeviceFacts>& after,
                  const std::string& where, std::vector<std::string>* refusals, std::string* error) {
  const ckptfmt::ImageInfo& info = image.info();
  for (size_t i = 0; i < info.processes.size(); ++i) {
    const ckptfmt::ProcessInfo& process = info.processes[i];
    const std::string name = process.program + " (PID " + std::to_string(process.pid) + "): ";
    const absl::StatusOr<std::string> bytes = image.ReadLog(i);
    replay::Log log;
    if (!bytes.ok()) *error = std::string(bytes.status().message());
    if (!bytes.ok() || !replay::Log::Parse(*bytes, &log, error)) {
      *error = name + "its replay log cannot be read: " + *error;
      return false;
    }
    std::string refusal;
    if (!EnoughDevices(process.devices.size(), after.size(), where, &refusal)) refusals->push_back(name + refusal);
    if (!CheckModules(log, process.devices, after, &refusal)) refusals->push_back(name + refusal);
  }
  return true;
}

}  // namespace cuda_remote::checkpoint
