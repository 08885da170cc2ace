// SPDX-License-Identifier: Apache-2.0
// The variables of a cubin, from its ELF symbol table; addresses of functions, from its relocations.

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "replay/modimg/format.h"
#include "replay/modimg/modimg.h"

namespace cuda_remote::replay {
namespace {

bool StartsWith(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

// A zero-terminated string in a string table; empty if it has no end.
std::string_view NameAt(std::string_view table, uint64_t at) {
  if (at >= table.size()) return {};
  const size_t end = table.find('\0', size_t(at));
  return end == std::string_view::npos ? std::string_view() : table.substr(size_t(at), end - size_t(at));
}

struct Elf {
  std::string_view bytes;
  std::vector<format::ElfSection> sections;

  bool Contents(size_t index, std::string_view* contents) const {
    if (index >= sections.size() || sections[index].type == format::kSectionNoBits) return false;
    const format::ElfSection& section = sections[index];
    if (section.offset > bytes.size() || section.bytes > bytes.size() - section.offset) return false;
    *contents = bytes.substr(size_t(section.offset), size_t(section.bytes));
    return true;
  }
};

struct SymbolTable {
  std::string_view entries;
  std::string_view wide;  // numbers of sections that do not fit into an entry

  size_t size() const { return entries.size() / sizeof(format::ElfSymbol); }
  // A symbol and the number of its section.
  std::pair<format::ElfSymbol, uint32_t> At(size_t i) const {
    format::ElfSymbol symbol;
    memcpy(&symbol, entries.data() + i * sizeof(symbol), sizeof(symbol));
    uint32_t section = symbol.section;
    if (section == 0xffff && (i + 1) * sizeof(section) <= wide.size()) {
      memcpy(&section, wide.data() + i * sizeof(section), sizeof(section));
    }
    return {symbol, section};
  }
};

// By section of variables: the offsets, ascending, of words that hold addresses of functions.
using CodeWords = std::map<uint32_t, std::vector<uint64_t>>;

// What the relocations say of functions' addresses.
struct Addresses {
  CodeWords words;
  std::set<uint64_t> in_variables, in_code, kernels_in_code;  // numbers of symbols
};

// An instruction that loads an address inside its own function loads where a call returns to.
Addresses FindAddresses(const Elf& elf, size_t symbol_table, const SymbolTable& symbols,
                        const std::vector<uint8_t>& kinds, std::string_view section_names) {
  Addresses found;
  for (size_t i = 0; i < elf.sections.size(); ++i) {
    const format::ElfSection& section = elf.sections[i];
    const bool with_addend = section.type == format::kSectionAddendRelocations;
    if ((!with_addend && section.type != format::kSectionRelocations) || section.link != symbol_table ||
        section.info >= elf.sections.size()) {
      continue;
    }
    const uint32_t target = section.info;
    const std::string_view target_name = NameAt(section_names, elf.sections[target].name);
    const bool variables = kinds[target] != 0;
    // Bank 4 is the compiler's table of addresses that instructions load.
    if (!variables && !StartsWith(target_name, ".text") && target_name != ".nv.constant4") continue;
    std::string_view entries;
    if (!elf.Contents(i, &entries)) continue;
    const size_t bytes = with_addend ? sizeof(format::ElfAddendRelocation) : sizeof(format::ElfRelocation);
    for (size_t at = 0; entries.size() - at >= bytes; at += bytes) {
      format::ElfAddendRelocation one = {};
      memcpy(&one, entries.data() + at, bytes);
      const uint64_t number = one.info >> 32;
      const uint32_t type = uint32_t(one.info);
      if (number >= symbols.size()) continue;
      const auto [symbol, home] = symbols.At(size_t(number));
      if ((symbol.info & 15) != format::kSymbolFunction) continue;
      if (variables) {
        found.words[target].push_back(one.offset);
        found.in_variables.insert(number);
      } else if (home == 0 || type == format::kRelocationCall75 || type == format::kRelocationCall90) {
        // Only called; the system's own functions (malloc, vprintf) always are.
      } else if (type == format::kRelocationKernel || type == format::kRelocationKernelLow ||
                 type == format::kRelocationKernelHigh) {
        found.kernels_in_code.insert(number);
      } else if (!(home == target && one.addend != 0)) {
        found.in_code.insert(number);
      }
    }
  }
  for (auto& [section, offsets] : found.words) std::sort(offsets.begin(), offsets.end());
  return found;
}

}  // namespace

Status CubinSymbols(std::string_view cubin, std::vector<DataSymbol>* symbols, KernelFacts* kernels) {
  const auto fail = [&](const char* what) { return Error(std::string("the cubin is damaged: ") + what); };
  format::ElfHeader header;
  if (cubin.size() < sizeof(header)) return fail("too short");
  memcpy(&header, cubin.data(), sizeof(header));
  if (memcmp(header.ident, format::kElfMagic, 4) != 0 || header.ident[4] != format::kElfClass64 ||
      header.machine != format::kElfMachineCuda) {
    return fail("no ELF file for a GPU");
  }
  if (header.section_offset == 0) return OkStatus();
  if (header.section_entry_bytes < sizeof(format::ElfSection) || header.section_offset > cubin.size()) {
    return fail("its section table");
  }
  Elf elf{cubin, {}};
  const uint64_t room = (cubin.size() - header.section_offset) / header.section_entry_bytes;
  const auto section_at = [&](uint64_t i) {
    format::ElfSection section;
    memcpy(&section, cubin.data() + header.section_offset + i * header.section_entry_bytes, sizeof(section));
    return section;
  };
  if (room == 0) return fail("its section table");
  // More than 65279 sections: the first one's fields tell.
  const uint64_t count = header.section_count ? header.section_count : section_at(0).bytes;
  const uint64_t names_index = header.names_index == 0xffff ? section_at(0).link : header.names_index;
  if (count > room) return fail("its section table");
  for (uint64_t i = 0; i < count; ++i) elf.sections.push_back(section_at(i));
  std::string_view section_names;
  if (!elf.Contents(size_t(names_index), &section_names)) return fail("its section names");

  // What each section's objects are: 0 nothing of ours, 1 device memory, 2 constants.
  std::vector<uint8_t> kinds(elf.sections.size());
  for (size_t i = 0; i < kinds.size(); ++i) {
    const std::string_view name = NameAt(section_names, elf.sections[i].name);
    if (name == ".nv.global" || name == ".nv.global.init" || StartsWith(name, ".nv.global.")) kinds[i] = 1;
    // Bank 3 holds __constant__ variables; the others kernel parameters and the compiler's own constants.
    if (name == ".nv.constant3") kinds[i] = 2;
  }
  KernelFacts ignored;
  if (!kernels) kernels = &ignored;
  for (size_t table = 0; table < elf.sections.size(); ++table) {
    if (elf.sections[table].type != format::kSectionSymbols) continue;
    SymbolTable all;
    std::string_view names;
    if (!elf.Contents(table, &all.entries)) return fail("its symbol table");
    if (!elf.Contents(elf.sections[table].link, &names)) return fail("its symbol names");
    for (size_t i = 0; i < elf.sections.size(); ++i) {
      constexpr uint32_t kSectionIndices = 18;  // SHT_SYMTAB_SHNDX
      if (elf.sections[i].type == kSectionIndices && elf.sections[i].link == table) elf.Contents(i, &all.wide);
    }
    const Addresses addresses = FindAddresses(elf, table, all, kinds, section_names);
    bool launches = false;  // kernels launch kernels: that is what they take descriptors for
    for (size_t i = 0; i < all.size(); ++i) {
      const auto [symbol, section] = all.At(i);
      const std::string_view name = NameAt(names, symbol.name);
      if ((symbol.info & 15) == format::kSymbolFunction && section == 0) {
        kernels->print = kernels->print || name == "vprintf";
        kernels->allocate = kernels->allocate || name == "malloc";
        launches = launches || name.find("LaunchDevice") != std::string_view::npos;
      }
      if ((symbol.info & 15) != format::kSymbolObject || section >= kinds.size() || kinds[section] == 0) continue;
      if (name.empty() || symbol.bytes == 0) continue;
      DataSymbol found{std::string(name),       symbol.bytes,
                       kinds[section] == 2,     (symbol.other & format::kSymbolManaged) != 0,
                       format::IsLiteral(name), {}};
      const auto own = addresses.words.find(section);
      if (own != addresses.words.end()) {
        const std::vector<uint64_t>& offsets = own->second;
        for (auto at = std::lower_bound(offsets.begin(), offsets.end(), symbol.value);
             at != offsets.end() && *at - symbol.value < symbol.bytes; ++at) {
          found.code_words.push_back(*at - symbol.value);
        }
      }
      symbols->push_back(std::move(found));
    }
    const auto bare = [&](uint64_t number) { return addresses.in_variables.count(number) == 0; };
    kernels->bare_addresses =
        kernels->bare_addresses || std::any_of(addresses.in_code.begin(), addresses.in_code.end(), bare) ||
        (!launches && std::any_of(addresses.kernels_in_code.begin(), addresses.kernels_in_code.end(), bare));
  }
  return OkStatus();
}

}  // namespace cuda_remote::replay
