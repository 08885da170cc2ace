// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/open_files.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <utility>

#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/descriptors.h"
#include "checkpoint/job/isolation/stand_ins.h"
#include "checkpoint/job/job.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

// A RegFileEntry of CRIU's (images/regfile.proto). False if it has no length.
bool ParseEntry(protozero::pbf_reader facts, const ProcessFacts& process_facts, SavedFile* file, uint32_t* id) {
  using protozero::pbf_wire_type;
  using protozero::tag_and_type;
  bool has_size = false, external = false;
  while (facts.next()) {
    switch (facts.tag_and_type()) {
      case tag_and_type(1, pbf_wire_type::varint):
        *id = facts.get_uint32();
        break;
      case tag_and_type(2, pbf_wire_type::varint):
        file->written = (facts.get_uint32() & O_ACCMODE) != O_RDONLY;
        break;
      case tag_and_type(6, pbf_wire_type::length_delimited):
        file->path = facts.get_string();
        break;
      case tag_and_type(8, pbf_wire_type::varint):
        file->bytes = facts.get_uint64();
        has_size = true;
        break;
      case tag_and_type(9, pbf_wire_type::varint):
        external = facts.get_bool();
        break;
      default:
        facts.skip();
    }
  }
  if (!has_size) return false;
  if (!external) return true;
  for (const InheritedFile& inherited : process_facts.files()) {
    if (inherited.id() != file->path) continue;
    file->path = inherited.path();
    return true;
  }
  return false;
}

// Whether the descriptor behind this entry of /proc/PID/fd may write.
bool Writes(const std::string& process, const std::string& number) {
  std::ifstream facts(process + "/fdinfo/" + number);
  for (std::string line; std::getline(facts, line);) {
    if (line.compare(0, 6, "flags:") == 0) return (strtoul(line.c_str() + 6, nullptr, 8) & O_ACCMODE) != O_RDONLY;
  }
  return false;
}

}  // namespace

bool ParseFiles(std::string_view image, std::string_view remaps, const ProcessFacts& process_facts,
                std::vector<SavedFile>* files) {
  files->clear();
  std::set<std::string> known;
  // A program that was just starting has it open.
  if (process_facts.own_loader_cache()) known.insert(kLoaderCache);
  std::set<uint32_t> nameless;
  if (!remaps.empty() && !ReadNameless(remaps, [&](uint32_t file) { nameless.insert(file); })) return false;
  return ReadFilesImage(image, FileKind::kRegular, [&](protozero::pbf_reader entry) {
    SavedFile file;
    uint32_t id = 0;
    if (!ParseEntry(entry, process_facts, &file, &id) || nameless.count(id) != 0) return;
    if (known.insert(file.path).second) files->push_back(std::move(file));
  });
}

absl::StatusOr<std::vector<SavedFile>> CompareFiles(const std::vector<SavedFile>& files) {
  std::vector<SavedFile> longer;
  for (const SavedFile& file : files) {
    struct stat now;
    // A file that was deleted while it was open is in the image itself.
    if (stat(file.path.c_str(), &now) != 0 || !S_ISREG(now.st_mode)) continue;
    const uint64_t bytes = uint64_t(now.st_size);
    if (bytes == file.bytes) continue;
    if (file.written && bytes > file.bytes) {
      longer.push_back(file);
      continue;
    }
    return absl::FailedPreconditionError("the file " + file.path +
                                         ", which the job has open, has changed: " + std::to_string(file.bytes) +
                                         " bytes at the checkpoint, " + std::to_string(bytes) + " now");
  }
  return longer;
}

std::string OtherWriter(const std::string& path) {
  struct stat wanted;
  if (stat(path.c_str(), &wanted) != 0 || !S_ISREG(wanted.st_mode)) return {};
  const uint64_t own = PidNamespace(getpid());
  // Jobs that can be saved have a PID namespace of their own. The shell that has started this tool has not.
  const auto is_elsewhere = [own](int pid) {
    const uint64_t space = PidNamespace(pid);
    return space != 0 && space != own;
  };
  return FindUserOfFile(is_elsewhere, [&](const std::string& process, const std::string& number) {
    struct stat facts;
    return stat((process + "/fd/" + number).c_str(), &facts) == 0 && facts.st_dev == wanted.st_dev &&
           facts.st_ino == wanted.st_ino && Writes(process, number);
  });
}

absl::Status CutBack(const std::vector<SavedFile>& longer) {
  for (const SavedFile& file : longer) {
    if (truncate(file.path.c_str(), off_t(file.bytes)) != 0) return ErrnoStatus("cannot cut " + file.path + " back");
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::checkpoint
