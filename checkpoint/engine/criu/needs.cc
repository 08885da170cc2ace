// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/needs.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/job/isolation/stand_ins.h"
#include "ckptfmt/needs.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"
#include "proto/errors/annotate.h"
#include "proto/folder/connection_lock.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kKeptFolder[] = "kept";
// Of a kept library in a job's folder; CRIU compares it.
constexpr mode_t kKeptMode = 0755;
constexpr char kProcesses[] = "/proc/";
constexpr char kFilesImage[] = "/files.img", kRemapsImage[] = "/remap-fpath.img";

// A RegFileEntry of CRIU's (images/regfile.proto).
struct Entry {
  uint32_t id = 0;
  std::string path;
  ckptfmt::NeededFile file;
  bool has_size = false, external = false, plain = true;
};

Entry ParseEntry(protozero::pbf_reader facts) {
  using protozero::pbf_wire_type;
  using protozero::tag_and_type;
  Entry entry;
  while (facts.next()) {
    switch (facts.tag_and_type()) {
      case tag_and_type(1, pbf_wire_type::varint):
        entry.id = facts.get_uint32();
        break;
      case tag_and_type(2, pbf_wire_type::varint):
        entry.file.written = (facts.get_uint32() & O_ACCMODE) != O_RDONLY;
        break;
      case tag_and_type(6, pbf_wire_type::length_delimited):
        entry.path = facts.get_string();
        break;
      case tag_and_type(8, pbf_wire_type::varint):
        entry.file.bytes = facts.get_uint64();
        entry.has_size = true;
        break;
      case tag_and_type(9, pbf_wire_type::varint):
        entry.external = facts.get_bool();
        break;
      case tag_and_type(10, pbf_wire_type::varint):
        entry.plain = S_ISREG(facts.get_uint32());
        break;
      case tag_and_type(11, pbf_wire_type::varint): {
        const uint32_t word = facts.get_uint32();
        for (int shift = 0; shift < 32; shift += 8) entry.file.build_id += char(word >> shift);
        break;
      }
      default:
        facts.skip();
    }
  }
  entry.file.path = entry.path;
  return entry;
}

// Such as /proc/57/status: it is there again when the process is.
bool IsOfProcess(const std::string& path) {
  return path.compare(0, strlen(kProcesses), kProcesses) == 0 &&
         isdigit(static_cast<unsigned char>(path[strlen(kProcesses)]));
}

// A path of the job's, seen from here while the job is there.
std::string InJob(const Job& job, const std::string& path) {
  return "/proc/" + std::to_string(job.pid()) + "/root" + path;
}

// By which this process can open it again.
std::string PathOf(const UniqueFd& file) { return "/proc/self/fd/" + std::to_string(file.get()); }

bool ExistsInJob(const Job& job, const std::string& path) { return access(InJob(job, path).c_str(), F_OK) == 0; }

// Where the job sees which of our libraries.
std::map<std::string, std::string> LibrariesOf(const Job& job) {
  std::map<std::string, std::string> libraries;
  for (const char* library : kJobLibraries) {
    libraries[FindCompanion(library)] = library;
    // Where the job's folder is a user's (own_job.h), no restart has put them there.
    if (job.init_pid() > 0) libraries[KeptLibrary(job.directory(), library)] = library;
  }
  for (const StandIn& stand_in : job.stand_ins())
    libraries[stand_in.path()] = stand_in.nvml() ? kNvmlLibrary : kClientLibrary;
  return libraries;
}

// `to` appears when it is whole.
absl::Status Copy(const std::string& from, const std::string& to, mode_t mode) {
  std::ifstream in(from, std::ios::binary | std::ios::ate);
  std::string bytes(in ? size_t(in.tellg()) : 0, 0);
  if (bytes.empty() || !in.seekg(0).read(&bytes[0], std::streamsize(bytes.size())))
    return ErrnoStatus("cannot read " + from, errno ? errno : ENODATA);
  const std::string fresh = to + ".new";
  unlink(fresh.c_str());
  const int fd = open(fresh.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, mode);
  size_t done = 0;
  while (fd >= 0 && done < bytes.size()) {
    const ssize_t written = write(fd, bytes.data() + done, bytes.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    done += size_t(written);
  }
  const bool ok = fd >= 0 && done == bytes.size() && fchmod(fd, mode) == 0 && rename(fresh.c_str(), to.c_str()) == 0;
  const absl::Status status = ok ? absl::OkStatus() : ErrnoStatus("cannot write " + to);
  if (fd >= 0) close(fd);
  if (!ok) unlink(fresh.c_str());
  return status;
}

}  // namespace

bool ReadNeeds(std::string_view image, std::string_view remaps, const Job& job, const ProcessFacts& process_facts,
               bool (*exists)(const Job& job, const std::string& path), ckptfmt::Needs* needs) {
  utsname system;
  if (uname(&system) == 0) needs->kernel = system.release;
  // Those that a restart makes itself.
  std::set<std::string> known;
  for (const FileFacts& file : process_facts.shared_files()) known.insert(file.path());
  // A process that was about to connect to its GPU server has it open.
  if (!job.directory().empty()) known.insert(job.directory() + "/" + kConnectionLockName);
  // A program that was just starting has it open.
  if (process_facts.own_loader_cache()) known.insert(kLoaderCache);
  // Another file may have taken such a name since.
  std::set<uint32_t> nameless;
  if (!remaps.empty() && !ReadNameless(remaps, [&](uint32_t file) { nameless.insert(file); })) return false;
  return ReadFilesImage(image, FileKind::kRegular, [&](protozero::pbf_reader facts) {
    Entry entry = ParseEntry(facts);
    if (!entry.plain || entry.path.empty() || nameless.count(entry.id) != 0) return;
    if (entry.external) {
      for (const InheritedFile& file : process_facts.files()) {
        if (file.id() == entry.path) entry.file.path = file.path();
      }
      if (entry.file.path == entry.path) return;
    } else if (entry.path[0] != '/' || IsOfProcess(entry.path) || (exists && !exists(job, entry.path))) {
      return;
    }
    // Without a size it is only appended to: then any will do.
    if (!entry.has_size) entry.file.written = true;
    if (known.insert(entry.file.path).second) needs->files.push_back(std::move(entry.file));
  });
}

absl::Status DescribeNeeds(const Job& job, const ProcessFacts& facts, const std::string& client_folder,
                           ckptfmt::Needs* needs, std::vector<KeptFile>* kept) {
  const std::string path = client_folder + kFilesImage;
  std::string image, remaps;
  const auto unreadable = [] {
    return absl::UnimplementedError("cannot read from this CRIU version's image which files the job has open");
  };
  const std::string remaps_path = client_folder + kRemapsImage;
  if (access(remaps_path.c_str(), F_OK) == 0 && !ReadImageFile(remaps_path, &remaps)) return unreadable();
  if (!ReadImageFile(path, &image) || !ReadNeeds(image, remaps, job, facts, &ExistsInJob, needs)) return unreadable();
  needs->engine_version = facts.criu_version();
  const std::map<std::string, std::string> libraries = LibrariesOf(job);
  std::set<std::string> copied;
  for (ckptfmt::NeededFile& file : needs->files) {
    const auto found = libraries.find(file.path);
    if (found == libraries.end() || file.build_id.empty()) continue;
    // One that was replaced while the job ran is not what the job has mapped.
    UniqueFd library(open(InJob(job, file.path).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!library.ok() || ckptfmt::BuildIdOf(PathOf(library)) != file.build_id) continue;
    const std::string name = std::string(kKeptFolder) + "/" + found->second;
    if (copied.insert(name).second) kept->push_back({std::move(library), file.path, client_folder + "/" + name});
    file.kept = "client/" + name;
  }
  const auto rename = [&](std::string_view from, FileChange* change) {
    for (const ckptfmt::NeededFile& file : needs->files) {
      if (file.kept.empty() || file.path != from) continue;
      change->path = KeptLibrary(job.directory(), file.kept.substr(file.kept.rfind('/') + 1));
      change->mode = S_IFREG | kKeptMode;  // whatever it is where cuda-remote is installed
      return true;
    }
    return false;
  };
  if (copied.empty()) return absl::OkStatus();
  if (!ChangeFiles(&image, rename)) return unreadable();
  return WriteImageFile(path, image);
}

absl::Status CopyKeptLibraries(const std::vector<KeptFile>& kept) {
  for (const KeptFile& file : kept) {
    const std::string folder = file.to.substr(0, file.to.rfind('/'));
    if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return ErrnoStatus("cannot make the folder " + folder);
    CR_RETURN_IF_ERROR(AnnotateBehind(Copy(PathOf(file.from), file.to, 0600), " (" + file.path + ")"));
  }
  return absl::OkStatus();
}

absl::Status PutKeptLibraries(const std::string& client_folder, const std::string& directory) {
  for (const char* library : kJobLibraries) {
    const std::string kept = client_folder + "/" + kKeptFolder + "/" + library;
    if (access(kept.c_str(), F_OK) != 0) continue;
    CR_RETURN_IF_ERROR(Copy(kept, KeptLibrary(directory, library), kKeptMode));
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::checkpoint
