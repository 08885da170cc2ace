#include "client/tools/open_files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <protozero/pbf_reader.hpp>
#include <set>

namespace cuda_remote::client::tools {
namespace {

// CRIU's images: two magic numbers, then entries of a length and a message each (images/fdinfo.proto, regfile.proto).
constexpr uint32_t kCommonMagic = 0x54564319, kFilesMagic = 0x56303138;
constexpr uint32_t kRegularFile = 1;

uint32_t Word(std::string_view bytes, size_t at) {
  uint32_t word;
  memcpy(&word, bytes.data() + at, sizeof(word));
  return word;
}

// False if the entry is no regular file, or one without a length.
bool ParseEntry(std::string_view bytes, const Job& job, SavedFile* file) {
  using protozero::pbf_wire_type;
  using protozero::tag_and_type;
  protozero::pbf_reader entry(bytes.data(), bytes.size());
  bool regular = false, has_size = false, external = false;
  while (entry.next()) {
    switch (entry.tag_and_type()) {
      case tag_and_type(1, pbf_wire_type::varint):
        regular = entry.get_enum() == int32_t(kRegularFile);
        continue;
      case tag_and_type(3, pbf_wire_type::length_delimited):
        break;
      default:
        entry.skip();
        continue;
    }
    protozero::pbf_reader facts = entry.get_message();
    while (facts.next()) {
      switch (facts.tag_and_type()) {
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
  }
  if (!regular || !has_size) return false;
  if (!external) return true;
  for (const InheritedFile& inherited : job.files()) {
    if (inherited.id() != file->path) continue;
    file->path = inherited.path();
    return true;
  }
  return false;
}

}  // namespace

bool ParseFiles(std::string_view image, const Job& job, std::vector<SavedFile>* files) {
  files->clear();
  if (image.size() < 8 || Word(image, 0) != kCommonMagic || Word(image, 4) != kFilesMagic) return false;
  std::set<std::string> known;
  try {
    for (size_t at = 8; at < image.size();) {
      if (image.size() - at < 4) return false;
      const uint32_t bytes = Word(image, at);
      at += 4;
      if (bytes > image.size() - at) return false;
      SavedFile file;
      if (ParseEntry(image.substr(at, bytes), job, &file) && known.insert(file.path).second)
        files->push_back(std::move(file));
      at += bytes;
    }
  } catch (const protozero::exception&) {
    return false;
  }
  return true;
}

bool CompareFiles(const std::vector<SavedFile>& files, std::vector<SavedFile>* longer, std::string* error) {
  for (const SavedFile& file : files) {
    struct stat now;
    // A file that was deleted while it was open is in the image itself.
    if (stat(file.path.c_str(), &now) != 0 || !S_ISREG(now.st_mode)) continue;
    const uint64_t bytes = uint64_t(now.st_size);
    if (bytes == file.bytes) continue;
    if (file.written && bytes > file.bytes) {
      longer->push_back(file);
      continue;
    }
    *error = "the file " + file.path + ", which the job has open, has changed: " + std::to_string(file.bytes) +
             " bytes at the checkpoint, " + std::to_string(bytes) + " now";
    return false;
  }
  return true;
}

bool CutBack(const std::vector<SavedFile>& longer, std::string* error) {
  for (const SavedFile& file : longer) {
    if (truncate(file.path.c_str(), off_t(file.bytes)) == 0) continue;
    *error = "cannot cut " + file.path + " back: " + strerror(errno);
    return false;
  }
  return true;
}

}  // namespace cuda_remote::client::tools
