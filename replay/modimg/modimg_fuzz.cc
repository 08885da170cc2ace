// SPDX-License-Identifier: Apache-2.0
// Fuzz target: module images of any kind, and the PTX scanner.

#include <lz4.h>
#include <zstd.h>

#include <cstring>
#include <string>

#include "replay/modimg/format.h"
#include "replay/modimg/modimg.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote::replay;  // NOLINT: a test program

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  constexpr uint64_t kLimit = 16u << 20;
  std::vector<DataSymbol> symbols;
  if (const auto parsed = ParseImage(bytes, kLimit); parsed.ok()) {
    const auto listed = ListEntries(bytes);
    if (!listed.ok() || listed->entries.size() != parsed->entries.size()) __builtin_trap();
  }
  (void)DataSymbols(bytes, {}, &symbols, nullptr, kLimit);
  symbols.clear();
  (void)PtxSymbols(bytes, &symbols);
  symbols.clear();
  (void)CubinSymbols(bytes, &symbols);
  return 0;
}

namespace {

constexpr char kPtx[] =
    ".version 9.0\n.target sm_90a\n.address_size 64\n.global .align 4 .u32 counter = 5;\n"
    ".const .align 8 .b8 table[16] = {1, 2};\n.global .attribute(.managed) .v4 .f32 m[2][3];\n"
    ".visible .entry k(.param .u64 p) { .reg .b64 %rd<2>; ret; }\n";

template <typename T>
void Put(const T& value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string Cubin() {
  const std::string section_names("\0.nv.global\0.nv.constant3\0", 26);
  const std::string names("\0counter\0table\0", 15);
  format::ElfHeader header{};
  memcpy(header.ident, format::kElfMagic, 4);
  header.ident[4] = 2;
  header.ident[5] = 1;
  header.ident[8] = 8;
  header.machine = format::kElfMachineCuda;
  header.flags = 90 << 8;
  header.section_offset = 64;
  header.section_entry_bytes = 64;
  header.section_count = 6;
  header.names_index = 1;
  const uint64_t data = 64 + 6 * 64;
  format::ElfSection sections[6]{};
  sections[1] = {0, 3, 0, 0, data, section_names.size(), 0, 0, 1, 0};
  sections[2] = {0, 3, 0, 0, data + 26, names.size(), 0, 0, 1, 0};
  sections[3] = {0, format::kSectionSymbols, 0, 0, data + 41, 48, 2, 0, 8, 24};
  sections[4] = {1, format::kSectionNoBits, 3, 0, data, 4, 0, 0, 4, 0};
  sections[5] = {12, 1, 2, 0, data, 16, 0, 0, 4, 0};
  std::string out;
  Put(header, &out);
  Put(sections, &out);
  out += section_names + names;
  Put(format::ElfSymbol{1, 1, 0, 4, 0, 4}, &out);
  Put(format::ElfSymbol{9, 1, 0, 5, 0, 16}, &out);
  return out;
}

void PutEntry(uint16_t kind, uint64_t flags, const std::string& payload, uint64_t unpacked, std::string* body) {
  format::FatbinEntry entry{};
  entry.kind = kind;
  entry.version = 0x101;
  entry.header_bytes = sizeof(entry);
  entry.padded_bytes = (payload.size() + 7) / 8 * 8;
  entry.packed_bytes = flags ? uint32_t(payload.size()) : 0;
  entry.arch = 90;
  entry.flags = flags;
  entry.unpacked_bytes = flags ? unpacked : 0;
  Put(entry, body);
  *body += payload;
  body->resize((body->size() + 7) / 8 * 8);
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  const std::string ptx = kPtx;
  const std::string cubin = Cubin();
  std::string lz4(size_t(LZ4_compressBound(int(ptx.size()))), '\0');
  lz4.resize(size_t(LZ4_compress_default(ptx.data(), lz4.data(), int(ptx.size()), int(lz4.size()))));
  std::string zstd(ZSTD_compressBound(cubin.size()), '\0');
  zstd.resize(ZSTD_compress(zstd.data(), zstd.size(), cubin.data(), cubin.size(), 3));
  std::string body;
  PutEntry(1, 0, ptx, 0, &body);
  PutEntry(2, 0, cubin, 0, &body);
  PutEntry(1, format::kEntryLz4, lz4, ptx.size(), &body);
  PutEntry(2, format::kEntryZstd, zstd, cubin.size(), &body);
  PutEntry(8, 0, "something else", 0, &body);
  std::string fatbin;
  Put(format::FatbinHeader{format::kFatbinMagic, 1, 16, body.size()}, &fatbin);
  fatbin += body;
  return {ptx, cubin, fatbin};
}
