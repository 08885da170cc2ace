// SPDX-License-Identifier: Apache-2.0
// What cr-inspect knows of an image: the reader's facts, the log's records and the modules in it.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_REPLAY_INSPECT_SUMMARY_H_
#define CUDA_REMOTE_REPLAY_INSPECT_SUMMARY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/image_reader.h"
#include "replay/log/log.h"
#include "replay/modimg/modimg.h"

namespace cuda_remote::replay::inspect {

// A module or library of a process.
struct Module {
  ObjectKey object;
  std::string call;                 // that loaded it
  std::string hash;                 // of its image
  uint64_t bytes = 0;               // of its image
  std::vector<ImageEntry> entries;  // without their bytes
  uint64_t data_bytes = 0;          // of its variables
  size_t variables = 0;
  size_t process = 0;   // whose it is
  std::string problem;  // why the image could not be read; else empty
};

struct Summary {
  std::unique_ptr<ckptfmt::ImageReader> reader;
  std::vector<Log> logs;  // one for each process
  std::map<std::string, uint64_t> records_by_call;
  std::vector<Module> modules;
  std::vector<std::string> not_replayable;
};

// Opens an image and reads its logs.
absl::StatusOr<Summary> Load(const std::string& dir);

// Compares every byte of the image with its checksums.
absl::Status Verify(const Summary& summary, const ckptfmt::Progress& progress);

// Whether a GPU can run a module, and with which of its entries.
struct Fit {
  bool runs = false;
  std::string with;  // name of the entry; empty if none runs
};
// Machine code goes before PTX, as the driver chooses.
Fit FitOf(const Module& module, uint32_t arch);

// "sm_90", "compute_90", "sm_90a", "9.0" or "90" as 90; 0 if it is none of these.
uint32_t ParseArch(const std::string& text);

// What differs between two images, a line each; empty if they hold the same state. Statements that differ from run to
// run (times, process numbers) do not count.
std::vector<std::string> Compare(const Summary& a, const Summary& b);

}  // namespace cuda_remote::replay::inspect

#endif  // CUDA_REMOTE_REPLAY_INSPECT_SUMMARY_H_
