// SPDX-License-Identifier: Apache-2.0
#include "replay/modimg/image_size.h"

#include <cstdint>
#include <cstring>

#include "proto/base/text.h"
#include "replay/modimg/format.h"

namespace cuda_remote::replay {
namespace {

// Images in a program's data have any alignment.
template <typename T>
T Read(const void* at) {
  T value;
  memcpy(&value, at, sizeof(value));
  return value;
}

bool IsFatbin(const void* image) { return Read<uint32_t>(image) == format::kFatbinMagic; }

bool FatbinSize(const void* image, size_t* size, std::string* error) {
  const auto header = Read<format::FatbinHeader>(image);
  if (header.version != 1 || header.header_bytes < sizeof(header)) {
    *error = "a fat binary of version " + std::to_string(header.version) + "; only version 1 is known";
    return false;
  }
  if (header.body_bytes > kMaxImageBytes - header.header_bytes) {
    *error = "a fat binary that says it is " + std::to_string(header.body_bytes) + " bytes long";
    return false;
  }
  *size = size_t(header.header_bytes + header.body_bytes);
  return true;
}

// The furthest byte that headers, sections and segments reach.
bool ElfSize(const void* image, size_t* size, std::string* error) {
  const auto header = Read<format::ElfHeader>(image);
  if (header.ident[4] != format::kElfClass64 || header.ident[5] != format::kElfLittleEndian) {
    *error = "an ELF image that is not 64-bit little-endian";
    return false;
  }
  if (header.machine != format::kElfMachineCuda) {
    *error = "an ELF image for machine " + std::to_string(header.machine) + ", not for a GPU";
    return false;
  }
  uint64_t end = sizeof(header);
  bool sane = true;
  const auto extend = [&](uint64_t offset, uint64_t bytes) {
    if (bytes == 0) return;
    sane = sane && offset <= kMaxImageBytes && bytes <= kMaxImageBytes - offset;
    if (sane && offset + bytes > end) end = offset + bytes;
  };
  const auto* const bytes = static_cast<const uint8_t*>(image);
  if (header.section_offset != 0) {
    sane = sane && header.section_entry_bytes >= sizeof(format::ElfSection);
    extend(header.section_offset, sizeof(format::ElfSection));
    uint64_t count = header.section_count;
    // More than 65279 sections: the first section's size is their number.
    if (sane && count == 0) count = Read<format::ElfSection>(bytes + header.section_offset).bytes;
    if (count > kMaxImageBytes / sizeof(format::ElfSection)) sane = false;
    if (sane) extend(header.section_offset, count * header.section_entry_bytes);
    for (uint64_t i = 0; sane && i < count; ++i) {
      const auto section = Read<format::ElfSection>(bytes + header.section_offset + i * header.section_entry_bytes);
      // The first section describes nothing; its fields are counts.
      if (i > 0 && section.type != 0 && section.type != format::kSectionNoBits) extend(section.offset, section.bytes);
    }
  }
  if (header.program_count != 0) {
    sane = sane && header.program_entry_bytes >= sizeof(format::ElfSegment);
    extend(header.program_offset, uint64_t(header.program_count) * header.program_entry_bytes);
    for (uint64_t i = 0; sane && i < header.program_count; ++i) {
      const auto segment = Read<format::ElfSegment>(bytes + header.program_offset + i * header.program_entry_bytes);
      extend(segment.offset, segment.file_bytes);
    }
  }
  if (!sane) {
    *error = "a cubin (ELF) with invalid headers";
    return false;
  }
  *size = size_t(end);
  return true;
}

// Whether a text starts as PTX: blanks and comments, then a directive.
bool IsPtx(const char* text) {
  for (;;) {
    while (*text == ' ' || (*text >= '\t' && *text <= '\r')) ++text;
    if (text[0] == '/' && text[1] == '/') {
      while (*text && *text != '\n') ++text;
    } else if (text[0] == '/' && text[1] == '*') {
      text += 2;
      while (*text && !(text[0] == '*' && text[1] == '/')) ++text;
      if (!*text) return false;
      text += 2;
    } else {
      return strncmp(text, ".version", 8) == 0;
    }
  }
}

}  // namespace

bool LocateImage(const void* image, const void** start, size_t* size, std::string* error) {
  if (!image) {
    *error = "a null pointer";
    return false;
  }
  // Fewer than four bytes can only be a text that ends.
  const char* const text = static_cast<const char*>(image);
  const bool four_bytes = text[0] && text[1] && text[2] && text[3];
  if (four_bytes && Read<uint32_t>(image) == format::kWrapperMagic) {
    const auto wrapper = Read<format::FatbinWrapper>(image);
    if (wrapper.version != 1 && wrapper.version != 2) {
      *error = "a fat binary wrapper of version " + std::to_string(wrapper.version) + "; only 1 and 2 are known";
      return false;
    }
    if (!wrapper.data || !IsFatbin(wrapper.data)) {
      *error = "a fat binary wrapper that points to no fat binary";
      return false;
    }
    image = wrapper.data;
  }
  *start = image;
  if (four_bytes && IsFatbin(image)) return FatbinSize(image, size, error);
  if (four_bytes && memcmp(image, format::kElfMagic, sizeof(format::kElfMagic)) == 0)
    return ElfSize(image, size, error);
  if (IsPtx(text)) {
    const size_t length = strnlen(text, kMaxImageBytes);
    if (length == kMaxImageBytes) {
      *error = "a PTX text without an end";
      return false;
    }
    *size = length + 1;
    return true;
  }
  const std::string first = four_bytes ? "bytes " + HexBytes({text, 4}, " ") : "nothing";
  *error = "neither fat binary, cubin nor PTX: it starts with " + first;
  return false;
}

}  // namespace cuda_remote::replay
