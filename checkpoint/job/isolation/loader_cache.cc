// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/isolation/loader_cache.h"

#include <string.h>

#include <cstdint>

namespace cuda_remote::checkpoint {
namespace {

constexpr std::string_view kOldMagic = "ld.so-1.7.0", kMagic = "glibc-ld.so.cache1.1";
constexpr uint32_t kExtensionMagic = 0xeaa42174, kHwcapsTag = 1;
// FLAG_ELF_LIBC6 | FLAG_X8664_LIB64
constexpr int32_t kFlags = 0x0303;
constexpr size_t kOldHeaderBytes = 16, kOldEntryBytes = 12;

struct Header {
  char magic[20];
  uint32_t libraries;
  uint32_t string_bytes;
  uint8_t flags;
  uint8_t padding[3];
  uint32_t extension;  // offset, 0: none
  uint32_t unused[3];
};
static_assert(sizeof(Header) == 48);

struct Entry {
  int32_t flags;
  uint32_t name, path;  // offsets of strings
  uint32_t os_version;
  uint64_t hwcap;
};
static_assert(sizeof(Entry) == 24);

struct Section {
  uint32_t tag, flags, offset, bytes;
};

template <typename T>
bool Get(std::string_view bytes, size_t at, T* value) {
  if (at > bytes.size() || bytes.size() - at < sizeof(T)) return false;
  memcpy(value, bytes.data() + at, sizeof(T));
  return true;
}

template <typename T>
void Put(const T& value, size_t at, std::string* bytes) {
  memcpy(&(*bytes)[at], &value, sizeof(T));
}

// The part in today's format; empty if there is none. Offsets count from its start.
std::string_view NewPart(std::string_view bytes) {
  if (bytes.substr(0, kOldMagic.size()) == kOldMagic) {
    uint32_t entries = 0;
    if (!Get(bytes, kOldHeaderBytes - 4, &entries)) return {};
    const size_t end = (kOldHeaderBytes + size_t{entries} * kOldEntryBytes + 7) & ~size_t{7};
    bytes = end < bytes.size() ? bytes.substr(end) : std::string_view();
  }
  return bytes.substr(0, kMagic.size()) == kMagic ? bytes : std::string_view();
}

bool ReadEntries(std::string_view part, Header* header, std::vector<Entry>* entries) {
  if (!Get(part, 0, header) || (part.size() - sizeof(Header)) / sizeof(Entry) < header->libraries) return false;
  entries->resize(header->libraries);
  for (size_t i = 0; i < entries->size(); ++i) {
    Get(part, sizeof(Header) + i * sizeof(Entry), &(*entries)[i]);
    if ((*entries)[i].name >= part.size() || (*entries)[i].path >= part.size()) return false;
  }
  return true;
}

std::string StringAt(std::string_view part, uint32_t offset) {
  const std::string_view rest = part.substr(offset);
  return std::string(rest.substr(0, rest.find('\0')));
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// The loader's order of names: numbers in them count as numbers.
int Compare(const char* a, const char* b) {
  while (*a) {
    if (IsDigit(*a) && IsDigit(*b)) {
      int left = 0, right = 0;
      while (IsDigit(*a)) left = left * 10 + (*a++ - '0');
      while (IsDigit(*b)) right = right * 10 + (*b++ - '0');
      if (left != right) return left - right;
    } else if (IsDigit(*a)) {
      return 1;
    } else if (IsDigit(*b)) {
      return -1;
    } else if (*a != *b) {
      return *a - *b;
    } else {
      ++a;
      ++b;
    }
  }
  return *a - *b;
}

// All that stands behind the entries moves by `bytes`; so must the offsets in the extensions.
bool MoveExtension(uint32_t at, uint32_t bytes, std::string* part) {
  uint32_t magic, count;
  if (!Get(*part, at, &magic) || !Get(*part, at + 4, &count) || magic != kExtensionMagic) return false;
  for (uint32_t i = 0; i < count; ++i) {
    const size_t where = at + 8 + size_t{i} * sizeof(Section);
    Section section;
    if (!Get(*part, where, &section)) return false;
    section.offset += bytes;
    Put(section, where, part);
    if (section.tag != kHwcapsTag) continue;
    for (uint32_t done = 0; done + 4 <= section.bytes; done += 4) {
      uint32_t text;
      if (!Get(*part, size_t{section.offset} + done, &text)) return false;
      Put(text + bytes, size_t{section.offset} + done, part);
    }
  }
  return true;
}

}  // namespace

bool ReadLoaderCache(std::string_view bytes, std::vector<CachedLibrary>* libraries) {
  libraries->clear();
  const std::string_view part = NewPart(bytes);
  Header header;
  std::vector<Entry> entries;
  if (!ReadEntries(part, &header, &entries)) return false;
  for (const Entry& entry : entries) {
    if (entry.flags == kFlags) libraries->push_back({StringAt(part, entry.name), StringAt(part, entry.path)});
  }
  return true;
}

bool AddToLoaderCache(std::string_view bytes, const std::vector<CachedLibrary>& more, std::string* result) {
  const std::string_view part = NewPart(bytes);
  Header header;
  std::vector<Entry> entries;
  if (!ReadEntries(part, &header, &entries)) return false;
  const uint32_t moved = uint32_t(more.size() * sizeof(Entry));
  const size_t behind = sizeof(Header) + entries.size() * sizeof(Entry);
  std::string strings;
  const size_t strings_at = part.size() + moved;
  for (Entry& entry : entries) {
    entry.name += moved;
    entry.path += moved;
  }
  const auto name_of = [&](const Entry& entry) {
    return entry.name >= strings_at ? std::string(strings.c_str() + (entry.name - strings_at))
                                    : StringAt(part, entry.name - moved);
  };
  for (const CachedLibrary& library : more) {
    Entry added = {};
    added.flags = kFlags;
    added.name = uint32_t(strings_at + strings.size());
    strings += library.name + '\0';
    added.path = uint32_t(strings_at + strings.size());
    strings += library.path + '\0';
    // The order is descending.
    auto place = entries.begin();
    while (place != entries.end() && Compare(name_of(*place).c_str(), library.name.c_str()) > 0) ++place;
    entries.insert(place, added);
  }
  result->assign(part.substr(0, sizeof(Header)));
  for (const Entry& entry : entries) result->append(reinterpret_cast<const char*>(&entry), sizeof(entry));
  result->append(part.substr(behind));
  result->append(strings);
  header.libraries = uint32_t(entries.size());
  header.string_bytes += uint32_t(strings.size());
  if (header.extension != 0) {
    header.extension += moved;
    if (!MoveExtension(header.extension, moved, result)) return false;
  }
  Put(header, 0, result);
  return true;
}

}  // namespace cuda_remote::checkpoint
