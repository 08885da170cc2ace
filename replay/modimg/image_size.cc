// SPDX-License-Identifier: Apache-2.0
#include "replay/modimg/image_size.h"

#include <cstdint>
#include <cstring>

#include "proto/base/status_macros.h"
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

StatusOr<size_t> FatbinSize(const void* image) {
  const auto header = Read<format::FatbinHeader>(image);
  if (header.version != 1 || header.header_bytes < sizeof(header)) {
    return Error("a fat binary of version " + std::to_string(header.version) + "; only version 1 is known");
  }
  if (header.body_bytes > kMaxImageBytes - header.header_bytes) {
    return Error("a fat binary that says it is " + std::to_string(header.body_bytes) + " bytes long");
  }
  return size_t(header.header_bytes + header.body_bytes);
}

// The furthest byte that headers, sections and segments reach.
StatusOr<size_t> ElfSize(const void* image) {
  const auto header = Read<format::ElfHeader>(image);
  if (header.ident[4] != format::kElfClass64 || header.ident[5] != format::kElfLittleEndian) {
    return Error("an ELF image that is not 64-bit little-endian");
  }
  if (header.machine != format::kElfMachineCuda) {
    return Error("an ELF image for machine " + std::to_string(header.machine) + ", not for a GPU");
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
  if (!sane) return Error("a cubin (ELF) with invalid headers");
  return size_t(end);
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

StatusOr<std::string_view> LocateImage(const void* image) {
  if (!image) return Error("a null pointer");
  // Fewer than four bytes can only be a text that ends.
  const char* const text = static_cast<const char*>(image);
  const bool four_bytes = text[0] && text[1] && text[2] && text[3];
  if (four_bytes && Read<uint32_t>(image) == format::kWrapperMagic) {
    const auto wrapper = Read<format::FatbinWrapper>(image);
    if (wrapper.version != 1 && wrapper.version != 2) {
      return Error("a fat binary wrapper of version " + std::to_string(wrapper.version) + "; only 1 and 2 are known");
    }
    if (!wrapper.data || !IsFatbin(wrapper.data)) return Error("a fat binary wrapper that points to no fat binary");
    image = wrapper.data;
  }
  const bool is_elf = four_bytes && memcmp(image, format::kElfMagic, sizeof(format::kElfMagic)) == 0;
  if (is_elf || (four_bytes && IsFatbin(image))) {
    CR_ASSIGN_OR_RETURN(const size_t size, is_elf ? ElfSize(image) : FatbinSize(image));
    return std::string_view(static_cast<const char*>(image), size);
  }
  if (IsPtx(text)) {
    const size_t length = strnlen(text, kMaxImageBytes);
    if (length == kMaxImageBytes) return Error("a PTX text without an end");
    return std::string_view(text, length + 1);
  }
  const std::string first = four_bytes ? "bytes " + HexBytes({text, 4}, " ") : "nothing";
  return Error("neither fat binary, cubin nor PTX: it starts with " + first);
}

}  // namespace cuda_remote::replay
