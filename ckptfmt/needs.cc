// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/needs.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ckptfmt/file.h"
#include "proto/base/text.h"

namespace cuda_remote::ckptfmt {
namespace {

// A file may be anything; what is larger is no note of a linker's.
constexpr uint64_t kMostNoteBytes = 1 << 20;
constexpr size_t kMostHeaders = 1024;

template <typename T>
bool ReadAt(int fd, uint64_t offset, size_t count, std::vector<T>* out) {
  out->resize(count);
  const ssize_t bytes = pread(fd, out->data(), count * sizeof(T), off_t(offset));
  return bytes == ssize_t(count * sizeof(T));
}

size_t Padded(size_t bytes) { return (bytes + 3) / 4 * 4; }

// The build id among the notes; empty if there is none.
std::string FindBuildId(const std::vector<char>& notes) {
  size_t at = 0;
  while (notes.size() - at >= sizeof(Elf64_Nhdr)) {
    Elf64_Nhdr note;
    memcpy(&note, notes.data() + at, sizeof(note));
    at += sizeof(note);
    const size_t name = Padded(note.n_namesz), contents = Padded(note.n_descsz);
    if (name > notes.size() - at || note.n_descsz > notes.size() - at - name) return {};
    const bool gnu = note.n_namesz == sizeof("GNU") && memcmp(notes.data() + at, "GNU", sizeof("GNU")) == 0;
    if (gnu && note.n_type == NT_GNU_BUILD_ID) return std::string(notes.data() + at + name, note.n_descsz);
    if (contents > notes.size() - at - name) return {};
    at += name + contents;
  }
  return {};
}

}  // namespace

std::string BuildIdOf(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts;
  if (fd.get() < 0 || fstat(fd.get(), &facts) != 0 || !S_ISREG(facts.st_mode)) return {};
  std::vector<Elf64_Ehdr> header;
  if (!ReadAt(fd.get(), 0, 1, &header) || memcmp(header[0].e_ident, ELFMAG, SELFMAG) != 0 ||
      header[0].e_ident[EI_CLASS] != ELFCLASS64 || header[0].e_phentsize != sizeof(Elf64_Phdr)) {
    return {};
  }
  std::vector<Elf64_Phdr> segments;
  if (!ReadAt(fd.get(), header[0].e_phoff, std::min<size_t>(header[0].e_phnum, kMostHeaders), &segments)) return {};
  for (const Elf64_Phdr& segment : segments) {
    std::vector<char> notes;
    if (segment.p_type != PT_NOTE || segment.p_filesz > kMostNoteBytes ||
        !ReadAt(fd.get(), segment.p_offset, size_t(segment.p_filesz), &notes)) {
      continue;
    }
    if (std::string id = FindBuildId(notes); !id.empty()) return id;
  }
  return {};
}

std::string PrintBuildId(const std::string& build_id) { return HexBytes(build_id); }

std::vector<std::string> MissingHere(const Needs& needs,
                                     const std::function<std::string(const std::string& path)>& here) {
  std::vector<std::string> problems;
  for (const NeededFile& file : needs.files) {
    if (!file.kept.empty()) continue;
    const std::string path = here ? here(file.path) : file.path;
    struct stat facts;
    if (stat(path.c_str(), &facts) != 0) {
      problems.push_back(absl::StrCat(file.path, errno == ENOENT || errno == ENOTDIR
                                                     ? " is not on this machine"
                                                     : absl::StrCat(" cannot be read: ", strerror(errno))));
    } else if (!file.build_id.empty()) {
      const std::string found = BuildIdOf(path);
      if (found == file.build_id) continue;
      problems.push_back(absl::StrCat(file.path, " is another version: build id ",
                                      found.empty() ? "none" : PrintBuildId(found), ", the image needs ",
                                      PrintBuildId(file.build_id)));
    } else if (!file.written && S_ISREG(facts.st_mode) && uint64_t(facts.st_size) != file.bytes) {
      problems.push_back(
          absl::StrCat(file.path, " has changed: ", facts.st_size, " bytes, ", file.bytes, " at the checkpoint"));
    }
  }
  return problems;
}

}  // namespace cuda_remote::ckptfmt
