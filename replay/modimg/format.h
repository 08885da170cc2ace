// SPDX-License-Identifier: Apache-2.0
// Layout of the containers that CUDA code travels in. README.md says where each fact was seen.
//
// Part of the client library (image_size): no dependencies.
#ifndef CUDA_REMOTE_REPLAY_MODIMG_FORMAT_H_
#define CUDA_REMOTE_REPLAY_MODIMG_FORMAT_H_

#include <cstdint>
#include <string_view>

namespace cuda_remote::replay::format {

// What nvcc puts into a program for the runtime: points to the fat binary (toolkit header fatbinary_section.h).
inline constexpr uint32_t kWrapperMagic = 0x466243b1;
struct FatbinWrapper {
  uint32_t magic;
  uint32_t version;  // 1, or 2: linked by nvlink
  const void* data;
  const void* filename_or_fatbins;
};

inline constexpr uint32_t kFatbinMagic = 0xba55ed50;
struct FatbinHeader {
  uint32_t magic;
  uint16_t version;       // 1
  uint16_t header_bytes;  // 16
  uint64_t body_bytes;    // of all entries
};
static_assert(sizeof(FatbinHeader) == 16);

// One piece of code in a fat binary. The payload follows after `header_bytes`, padded to `padded_bytes`.
struct FatbinEntry {
  uint16_t kind;          // EntryKind
  uint16_t version;       // 0x101
  uint32_t header_bytes;  // at least 64
  uint64_t padded_bytes;
  uint32_t packed_bytes;  // compressed size without padding; 0 if not compressed
  uint32_t options_offset;
  uint16_t minor;  // PTX: of the ISA version
  uint16_t major;
  uint32_t arch;  // 90 for sm_90
  uint32_t name_offset;
  uint32_t name_bytes;
  uint64_t flags;  // EntryFlags
  uint64_t reserved;
  uint64_t unpacked_bytes;  // 0 if not compressed
};
static_assert(sizeof(FatbinEntry) == 64);

enum EntryKind : uint16_t { kEntryPtx = 1, kEntryElf = 2 };

enum EntryFlags : uint64_t {
  kEntryLz4 = 0x2000,
  kEntryZstd = 0x8000,
  kEntryArchSpecific = 0x100000,    // sm_90a: runs on exactly this architecture
  kEntryFamilySpecific = 0x200000,  // sm_100f: runs on its family
};

// ELF, as far as it is needed (64-bit little-endian).
struct ElfHeader {
  uint8_t ident[16];
  uint16_t type;
  uint16_t machine;
  uint32_t version;
  uint64_t entry;
  uint64_t program_offset;
  uint64_t section_offset;
  uint32_t flags;
  uint16_t header_bytes;
  uint16_t program_entry_bytes;
  uint16_t program_count;
  uint16_t section_entry_bytes;
  uint16_t section_count;
  uint16_t names_index;
};
static_assert(sizeof(ElfHeader) == 64);

struct ElfSection {
  uint32_t name;
  uint32_t type;
  uint64_t flags;
  uint64_t address;
  uint64_t offset;
  uint64_t bytes;
  uint32_t link;
  uint32_t info;
  uint64_t alignment;
  uint64_t entry_bytes;
};
static_assert(sizeof(ElfSection) == 64);

struct ElfSegment {
  uint32_t type;
  uint32_t flags;
  uint64_t offset;
  uint64_t address;
  uint64_t physical;
  uint64_t file_bytes;
  uint64_t memory_bytes;
  uint64_t alignment;
};
static_assert(sizeof(ElfSegment) == 56);

struct ElfSymbol {
  uint32_t name;
  uint8_t info;
  uint8_t other;
  uint16_t section;
  uint64_t value;
  uint64_t bytes;
};
static_assert(sizeof(ElfSymbol) == 24);

inline constexpr uint8_t kElfMagic[4] = {0x7f, 'E', 'L', 'F'};
inline constexpr uint8_t kElfClass64 = 2;       // ident[4]
inline constexpr uint8_t kElfLittleEndian = 1;  // ident[5]
inline constexpr uint16_t kElfMachineCuda = 190;
// The addend of the first kind is what the place holds.
struct ElfRelocation {
  uint64_t offset;
  uint64_t info;  // number of the symbol, and type in the lower half
};
struct ElfAddendRelocation {
  uint64_t offset;
  uint64_t info;
  int64_t addend;
};
static_assert(sizeof(ElfRelocation) == 16 && sizeof(ElfAddendRelocation) == 24);

inline constexpr uint32_t kSectionSymbols = 2;
inline constexpr uint32_t kSectionAddendRelocations = 4;
inline constexpr uint32_t kSectionRelocations = 9;
inline constexpr uint32_t kSectionNoBits = 8;
inline constexpr uint8_t kSymbolObject = 1;
inline constexpr uint8_t kSymbolFunction = 2;
// Types of relocations that are the target of a call, and put no address where a kernel could read it: up to sm_89, and
// from sm_90 on.
inline constexpr uint32_t kRelocationCall75 = 0x3a;
inline constexpr uint32_t kRelocationCall90 = 0x4b;
// The descriptor of a kernel, with which kernels launch it: as a word, and as the two halves in instructions.
inline constexpr uint32_t kRelocationKernel = 0x23;
inline constexpr uint32_t kRelocationKernelLow = 0x3e;
inline constexpr uint32_t kRelocationKernelHigh = 0x3f;
inline constexpr uint8_t kSymbolManaged = 4;  // bit of `other`
// ident[8], the ABI version, says where in `flags` the architecture stands.
inline constexpr uint8_t kElfAbiArchInSecondByte = 8;

// Whether the compiler has made this variable for a string of the source.
inline bool IsLiteral(std::string_view name) { return name.substr(0, 4) == "$str"; }

}  // namespace cuda_remote::replay::format

#endif  // CUDA_REMOTE_REPLAY_MODIMG_FORMAT_H_
