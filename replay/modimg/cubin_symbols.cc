// The variables of a cubin, from its ELF symbol table.

#include <cstring>

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

}  // namespace

bool CubinSymbols(std::string_view cubin, std::vector<DataSymbol>* symbols, std::string* error) {
  const auto fail = [&](const char* what) {
    *error = std::string("the cubin is damaged: ") + what;
    return false;
  };
  format::ElfHeader header;
  if (cubin.size() < sizeof(header)) return fail("too short");
  memcpy(&header, cubin.data(), sizeof(header));
  if (memcmp(header.ident, format::kElfMagic, 4) != 0 || header.ident[4] != format::kElfClass64 ||
      header.machine != format::kElfMachineCuda) {
    return fail("no ELF file for a GPU");
  }
  if (header.section_offset == 0) return true;
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
  for (size_t table = 0; table < elf.sections.size(); ++table) {
    if (elf.sections[table].type != format::kSectionSymbols) continue;
    std::string_view entries, names, wide;
    if (!elf.Contents(table, &entries)) return fail("its symbol table");
    if (!elf.Contents(elf.sections[table].link, &names)) return fail("its symbol names");
    for (size_t i = 0; i < elf.sections.size(); ++i) {
      constexpr uint32_t kSectionIndices = 18;  // SHT_SYMTAB_SHNDX
      if (elf.sections[i].type == kSectionIndices && elf.sections[i].link == table) elf.Contents(i, &wide);
    }
    for (size_t i = 0; (i + 1) * sizeof(format::ElfSymbol) <= entries.size(); ++i) {
      format::ElfSymbol symbol;
      memcpy(&symbol, entries.data() + i * sizeof(symbol), sizeof(symbol));
      uint32_t section = symbol.section;
      if (section == 0xffff && (i + 1) * sizeof(section) <= wide.size()) {
        memcpy(&section, wide.data() + i * sizeof(section), sizeof(section));
      }
      if ((symbol.info & 15) != format::kSymbolObject || section >= kinds.size() || kinds[section] == 0) continue;
      const std::string_view name = NameAt(names, symbol.name);
      if (name.empty() || symbol.bytes == 0) continue;
      symbols->push_back({std::string(name), symbol.bytes, kinds[section] == 2,
                          (symbol.other & format::kSymbolManaged) != 0, format::IsLiteral(name)});
    }
  }
  return true;
}

}  // namespace cuda_remote::replay
