// SPDX-License-Identifier: Apache-2.0
// What the tests of this folder share: a folder of their own, and a sample image.
#ifndef CUDA_REMOTE_CKPTFMT_TESTING_H_
#define CUDA_REMOTE_CKPTFMT_TESTING_H_

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "ckptfmt/file.h"
#include "ckptfmt/image_reader.h"
#include "ckptfmt/image_writer.h"

namespace cuda_remote::ckptfmt {

// A new empty folder; removed with all in it at the end.
class TestFolder {
 public:
  TestFolder() {
    const char* base = getenv("TEST_TMPDIR");
    path_ = std::string(base ? base : "/tmp") + "/ckptfmt-XXXXXX";
    if (!mkdtemp(path_.data())) abort();
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

inline void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// How this process has a file open: O_RDONLY, O_WRONLY or O_RDWR; -1: not at all.
inline int AccessTo(const std::string& path) {
  struct stat named, opened;
  if (stat(path.c_str(), &named) != 0) return -1;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = atoi(entry.path().filename().c_str());
    if (fstat(fd, &opened) != 0 || opened.st_ino != named.st_ino || opened.st_dev != named.st_dev) continue;
    return fcntl(fd, F_GETFL) & O_ACCMODE;
  }
  return -1;
}

// Whether somebody on another host could lock a file, to read or alone. A network file system grants the latter only to
// who has the file open for writing.
inline bool CouldLock(const std::string& path, int operation) {
  const int fd = open(path.c_str(), operation == LOCK_EX ? O_RDWR : O_RDONLY);
  const bool locked = flock(fd, operation | LOCK_NB) == 0;
  close(fd);
  return locked;
}

// As if each process, and each descriptor, were on another host: nobody sees the locks of folders.
class OtherHosts {
 public:
  OtherHosts() { g_no_folder_locks_for_testing = true; }
  ~OtherHosts() { g_no_folder_locks_for_testing = false; }
};

// Bytes that look random but are always the same.
inline std::string Noise(size_t size, uint64_t seed) {
  std::string bytes(size, '\0');
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (char& c : bytes) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    c = char(state >> 32);
  }
  return bytes;
}

struct SampleRegion {
  Region region;
  std::string bytes;
};

// Regions of many sizes: empty, small, of zeros, with equal chunks, of several chunks with an odd end.
inline std::vector<SampleRegion> SampleRegions(bool small = false) {
  std::vector<SampleRegion> samples;
  const auto add = [&](uint64_t address, std::string bytes) {
    Region region;
    region.address = address;
    region.bytes = bytes.size();
    region.context = 0x10;
    samples.push_back({region, std::move(bytes)});
  };
  add(0x1000'0000'0000, Noise(1000, 1));
  add(0x1000'0020'0000, std::string(5000, '\0'));
  add(0x1000'0040'0000, "");
  if (!small) {
    std::string large = Noise(kChunkBytes, 2) + std::string(kChunkBytes, '\0') + Noise(kChunkBytes, 2);
    large += std::string(kChunkBytes, 'x') + Noise(12345, 3);
    add(0x1000'1000'0000, large);
    add(0x1000'2000'0000, Noise(kChunkBytes, 2));
  }
  add(0x1000'3000'0000, std::string(3000, 'y'));
  samples.back().region.kind = RegionKind::kModuleSymbol;
  samples.back().region.object = 0x4000000000010;
  samples.back().region.symbol = "_ZN5space7counterE";
  samples.back().region.module_index = 2;
  samples.back().region.device = 1;
  samples.back().region.flags = 5;
  return samples;
}

inline ImageInfo SampleInfo() {
  ImageInfo info;
  info.product_version = "0.1.0";
  info.created_unix_ms = 1700000000123;
  info.host = "host.example";
  info.job = "job-1";
  info.program = "/usr/bin/program";
  info.pid = 4242;
  info.job_folder = "/run/jobs/job-1";
  ProcessInfo process;
  process.pid = 4242;
  process.program = "program";
  process.server = "unix:/run/session.sock";
  process.driver_version = 13000;
  process.devices.push_back({"GPU name", std::string("\x01\x02\x00\x04", 4) + std::string(12, 'u'), 9, 0,
                             uint64_t{141} << 30, "0000:1b:00.0"});
  process.next_sequence = 77777;
  process.wire_version = 1;
  process.session = 12;
  process.shared_memory = true;
  process.driver_settings = "CUDA_MODULE_LOADING=EAGER";
  process.log_records = 3;
  process.log_images = 1;
  info.processes.push_back(process);
  info.engine = "criu";
  info.client_info = {{"criu.version", "4.1"}, {"root_pid", "4242"}};
  info.needs.kernel = "6.1.0-amd64";
  info.needs.engine_version = "4.2.1";
  info.needs.files = {{"/lib/libc.so.6", 1922136, std::string("\x8f\x00\x1a", 3), "", false},
                      {"/opt/libcuda-remote.so", 4000000, "\x11\x22", "client/kept/libcuda-remote.so", false},
                      {"/data/log", 17, "", "", true}};
  return info;
}

inline const char kSampleLog[] = "stands for a replay log";

// Writes the sample up to, not including, Commit.
inline absl::Status FillSample(ImageWriter& writer, bool small = false) {
  for (const SampleRegion& sample : SampleRegions(small)) {
    if (absl::Status status = writer.BeginRegion(sample.region); !status.ok()) return status;
    // In pieces that fit nothing.
    for (size_t at = 0; at < sample.bytes.size(); at += 700001) {
      if (absl::Status status = writer.AddData(std::string_view(sample.bytes).substr(at, 700001)); !status.ok()) {
        return status;
      }
    }
    if (absl::Status status = writer.EndRegion(); !status.ok()) return status;
  }
  if (absl::Status status = writer.WriteLog(kSampleLog); !status.ok()) return status;
  std::filesystem::create_directories(writer.client_dir() + "/sub");
  WriteFile(writer.client_dir() + "/pages-1.img", Noise(small ? 3000 : 3000000, 9));
  WriteFile(writer.client_dir() + "/sub/empty", "");
  WriteFile(writer.client_dir() + "/sub/core.img", "core");
  return absl::OkStatus();
}

// One writer, unless told otherwise, and no secret: the same bytes every time.
inline WriterOptions OneWriter() {
  WriterOptions options;
  options.writers = 1;
  options.secret = std::string(192, 's');
  return options;
}

inline absl::Status WriteSample(const std::string& dir, bool small = false,
                                const WriterOptions& options = OneWriter()) {
  auto writer = ImageWriter::Create(dir, options);
  if (!writer.ok()) return writer.status();
  if (absl::Status status = FillSample(**writer, small); !status.ok()) return status;
  return (*writer)->Commit(SampleInfo());
}

// Reads everything: what opens and reads without an error must be the sample.
inline absl::Status ReadAll(const std::string& dir, std::vector<std::string>* regions = nullptr) {
  auto reader = ImageReader::Open(dir);
  if (!reader.ok()) return reader.status();
  if (absl::Status status = (*reader)->Verify(); !status.ok()) return status;
  for (size_t i = 0; i < (*reader)->regions().size(); ++i) {
    std::string bytes;
    const absl::Status status = (*reader)->ReadRegion(i, [&](uint64_t, std::string_view chunk, bool) {
      bytes += chunk;
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    if (regions) regions->push_back(std::move(bytes));
  }
  return (*reader)->ReadLog().status();
}

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_TESTING_H_
