// SPDX-License-Identifier: Apache-2.0
// What a checkpoint image says of itself, and what is in it: shared by writer, reader and tools. FORMAT.md is the
// specification of the files.
#ifndef CUDA_REMOTE_CKPTFMT_TYPES_H_
#define CUDA_REMOTE_CKPTFMT_TYPES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "proto/chunkhash/chunk_hash.h"
#include "proto/driverabi/requests.h"

namespace cuda_remote::ckptfmt {

// The version of the files that this program writes. It reads all versions from the first on, which is that of 0.9.0.
inline constexpr uint32_t kFormatVersion = 3;
inline constexpr uint32_t kFirstFormatVersion = 3;

// Memory is kept in chunks of this size, counted from the start of each region.
inline constexpr uint64_t kChunkBytes = 2u << 20;

using driverabi::RegionKind;

// One piece of saved memory. All but `bytes` is for the restart to find it again; the image only keeps it.
struct Region {
  RegionKind kind = RegionKind::kAllocation;
  uint64_t address = 0;  // at the time of the checkpoint
  uint64_t bytes = 0;
  uint64_t object = 0;  // virtual handle of the module, library, array or context
  std::string symbol;
  uint64_t context = 0;  // virtual handle
  int32_t device = 0;
  uint32_t module_index = 0;
  uint32_t process = 0;  // number in ImageInfo::processes
  // Of a symbol that holds addresses of functions: a hash of them as loading had put them there, which must be the same
  // after a restart. Else 0.
  uint64_t flags = 0;
};

// A GPU that the job could see.
struct DeviceFacts {
  std::string name;
  std::string uuid;  // 16 bytes
  int32_t compute_major = 0;
  int32_t compute_minor = 0;
  uint64_t total_memory = 0;
  std::string pci_bus_id;
};

// A file that a restart needs, where it was.
struct NeededFile {
  std::string path;
  uint64_t bytes = 0;    // its size; of a file that the job writes, at the checkpoint
  std::string build_id;  // bytes; of a program or library that has one
  std::string kept;      // not empty: the image has a copy, by its path in the image, and the machine needs none
  bool written = false;  // the job has it open for writing
};

// What a restart needs of the machine besides the image. Empty in images from before there was this.
struct Needs {
  std::string kernel;          // release that the job ran on
  std::string engine_version;  // of the engine that saved the processes
  std::vector<NeededFile> files;
};

// A process of the job that has a GPU session.
struct ProcessInfo {
  uint32_t pid = 0;  // as it knows itself
  std::string program;
  std::string server;          // address that it used
  int32_t driver_version = 0;  // as cuDriverGetVersion
  std::vector<DeviceFacts> devices;

  // The channel: what the process goes on with.
  uint64_t next_sequence = 0;
  uint32_t wire_version = 0;
  uint64_t session = 0;
  bool shared_memory = false;
  std::string driver_settings;  // proto/driverabi/driver_settings.h

  uint64_t log_records = 0;
  uint64_t log_images = 0;
};

// The manifest's own statements.
struct ImageInfo {
  uint32_t format_version = kFormatVersion;  // that it was read in
  std::string product_version;
  int64_t created_unix_ms = 0;  // 0: Commit fills it in
  std::string host;             // empty: Commit fills it in
  std::string job;
  std::string program;  // the job's command
  uint32_t pid = 0;     // of the job's program, as it knows itself
  // The job's folder, as the program knows it. Images with the same one and the same host are of one job (--keep).
  std::string job_folder;
  std::vector<ProcessInfo> processes;

  // Who saved the processes into client/: "criu", or "none" if only the GPU's side was saved.
  std::string engine = "none";
  // Whatever else the engine or the tools want to find again.
  std::map<std::string, std::string> client_info;
  Needs needs;
};

// Sizes, for the tools' messages.
struct ImageSizes {
  uint64_t region_bytes = 0;  // device memory that the image stands for
  uint64_t zero_bytes = 0;    // of it, in chunks of zeros only (not stored)
  uint64_t shared_bytes = 0;  // of it, in chunks equal to another one (stored once)
  uint64_t stored_bytes = 0;  // in data files
  uint64_t linked_bytes = 0;  // of these, in files that other images of the store have, too
  uint64_t log_bytes = 0;     // of all processes
  uint64_t client_bytes = 0;  // the engine's files
  uint64_t total_bytes = 0;   // all of it, manifest too
};

// Called now and then with the bytes done and the bytes in all.
using Progress = std::function<void(uint64_t done, uint64_t total)>;

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_TYPES_H_
