// SPDX-License-Identifier: Apache-2.0
#include "replay/modimg/modimg.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "proto/base/status_macros.h"
#include "replay/modimg/format.h"
#include "replay/modimg/unpack.h"

namespace cuda_remote::replay {
namespace {

bool IsElf(std::string_view image) {
  return image.size() >= sizeof(format::ElfHeader) &&
         memcmp(image.data(), format::kElfMagic, sizeof(format::kElfMagic)) == 0;
}

uint32_t MagicOf(std::string_view image) {
  uint32_t magic = 0;
  if (image.size() >= sizeof(magic)) memcpy(&magic, image.data(), sizeof(magic));
  return magic;
}

std::string_view WithoutTrailingZeros(std::string_view text) {
  while (!text.empty() && text.back() == '\0') text.remove_suffix(1);
  return text;
}

Status CubinArch(std::string_view cubin, ImageEntry* entry) {
  if (!IsElf(cubin)) return Error("a cubin that is not an ELF file");
  format::ElfHeader header;
  memcpy(&header, cubin.data(), sizeof(header));
  if (header.ident[4] != format::kElfClass64 || header.ident[5] != format::kElfLittleEndian ||
      header.machine != format::kElfMachineCuda) {
    return Error("an ELF file that is not for a GPU (machine " + std::to_string(header.machine) + ")");
  }
  entry->kind = ImageEntry::kSass;
  if (header.ident[8] >= format::kElfAbiArchInSecondByte) {
    entry->arch = header.flags >> 8 & 0xff;
    entry->arch_specific = header.flags & 0x8;
  } else {
    entry->arch = header.flags & 0xff;
    entry->arch_specific = header.flags & 0x800;
  }
  return OkStatus();
}

// Reads `.target sm_90a` of a text.
Status PtxArch(std::string_view text, ImageEntry* entry) {
  entry->kind = ImageEntry::kPtx;
  for (size_t line = 0; line < text.size();) {
    const size_t end = std::min(text.find('\n', line), text.size());
    std::string_view here = text.substr(line, end - line);
    line = end + 1;
    here.remove_prefix(std::min(here.find_first_not_of(" \t\r"), here.size()));
    if (here.substr(0, 7) != ".target") continue;
    const size_t name = here.find("sm_");
    if (name == std::string_view::npos) break;
    size_t at = name + 3;
    while (at < here.size() && here[at] >= '0' && here[at] <= '9' && entry->arch < 10000) {
      entry->arch = entry->arch * 10 + uint32_t(here[at++] - '0');
    }
    entry->arch_specific = at < here.size() && here[at] == 'a';
    entry->family_specific = at < here.size() && here[at] == 'f';
    return OkStatus();
  }
  return Error("a PTX text without .target");
}

// Walks the image's entries. `use` gets the entry without its bytes, and a function that unpacks them, and says whether
// to go on.
class Walker {
 public:
  using Unpack = std::function<Status(std::string*)>;
  using Use = std::function<StatusOr<bool>(ImageEntry&, const Unpack& unpack)>;

  Walker(std::string_view image, uint64_t max_unpacked) : image_(image), left_(max_unpacked) {}

  Status Walk(const Use& use, size_t* other_entries) {
    if (MagicOf(image_) == format::kFatbinMagic) return WalkFatbins(use, other_entries);
    ImageEntry entry;
    const std::string_view bytes = IsElf(image_) ? image_ : WithoutTrailingZeros(image_);
    if (IsElf(image_)) {
      CR_RETURN_IF_ERROR(CubinArch(image_, &entry));
    } else if (bytes.find(".version") == std::string_view::npos || bytes.find('\0') != std::string_view::npos) {
      return Error("neither fat binary, cubin nor PTX");
    } else {
      CR_RETURN_IF_ERROR(PtxArch(bytes, &entry));
    }
    const auto unpack = [&](std::string* out) {
      out->assign(bytes);
      return OkStatus();
    };
    return use(entry, unpack).status();
  }

 private:
  static Status Damaged(size_t at, const std::string& what) {
    return Error("the fat binary is damaged at offset " + std::to_string(at) + ": " + what);
  }

  Status WalkFatbins(const Use& use, size_t* other_entries) {
    size_t at = 0;
    while (at < image_.size()) {
      format::FatbinHeader header;
      if (image_.size() - at < sizeof(header)) {
        // What pads the section that it lay in.
        if (image_.find_first_not_of('\0', at) == std::string_view::npos) return OkStatus();
        return Damaged(at, "too short");
      }
      memcpy(&header, image_.data() + at, sizeof(header));
      if (header.magic == 0 && image_.find_first_not_of('\0', at) == std::string_view::npos) return OkStatus();
      if (header.magic != format::kFatbinMagic || header.version != 1 || header.header_bytes < sizeof(header) ||
          header.header_bytes > image_.size() - at) {
        return Damaged(at, "no header of version 1");
      }
      if (header.body_bytes > image_.size() - at - header.header_bytes) return Damaged(at, "it is cut off");
      CR_ASSIGN_OR_RETURN(const bool more,
                          WalkEntries(at + header.header_bytes, header.body_bytes, use, other_entries));
      if (!more) return OkStatus();
      at += size_t(header.header_bytes + header.body_bytes);
    }
    return OkStatus();
  }

  // Whether to go on.
  StatusOr<bool> WalkEntries(size_t at, uint64_t body, const Use& use, size_t* other_entries) {
    const size_t end = at + size_t(body);
    while (at < end) {
      format::FatbinEntry fixed;
      if (end - at < sizeof(fixed)) return Damaged(at, "an entry's header is cut off");
      memcpy(&fixed, image_.data() + at, sizeof(fixed));
      if (fixed.header_bytes < sizeof(fixed) || fixed.header_bytes > end - at)
        return Damaged(at, "an entry's header size");
      const size_t start = at + fixed.header_bytes;
      if (fixed.padded_bytes > end - start) return Damaged(at, "an entry's size");
      std::string_view payload = image_.substr(start, size_t(fixed.padded_bytes));
      const size_t entry_at = at;
      at = start + size_t(fixed.padded_bytes);
      if (fixed.kind != format::kEntryPtx && fixed.kind != format::kEntryElf) {
        ++*other_entries;
        continue;
      }
      ImageEntry entry;
      entry.kind = fixed.kind == format::kEntryPtx ? ImageEntry::kPtx : ImageEntry::kSass;
      entry.arch = fixed.arch;
      entry.arch_specific = fixed.flags & format::kEntryArchSpecific;
      entry.family_specific = fixed.flags & format::kEntryFamilySpecific;
      entry.compressed = fixed.flags & (format::kEntryLz4 | format::kEntryZstd);
      if (entry.compressed) {
        if (fixed.packed_bytes > payload.size()) return Damaged(entry_at, "an entry's compressed size");
        payload = payload.substr(0, fixed.packed_bytes);
      }
      const auto unpack = [&](std::string* out) { return UnpackEntry(entry_at, fixed, payload, out); };
      CR_ASSIGN_OR_RETURN(const bool more, use(entry, unpack));
      if (!more) return false;
    }
    return true;
  }

  Status UnpackEntry(size_t at, const format::FatbinEntry& fixed, std::string_view payload, std::string* out) {
    const bool packed = fixed.flags & (format::kEntryLz4 | format::kEntryZstd);
    const uint64_t bytes = packed ? fixed.unpacked_bytes : payload.size();
    if (bytes > left_) return Damaged(at, "its entries are too large when unpacked");
    left_ -= bytes;
    if (!packed) {
      out->assign(payload);
    } else {
      const Status unpacked =
          fixed.flags & format::kEntryLz4 ? UnpackLz4(payload, bytes, out) : UnpackZstd(payload, bytes, out);
      if (!unpacked.ok()) return Damaged(at, unpacked.message());
    }
    if (fixed.kind == format::kEntryPtx) out->resize(WithoutTrailingZeros(*out).size());
    return OkStatus();
  }

  std::string_view image_;
  uint64_t left_;
};

}  // namespace

Status ForEachEntry(std::string_view image, const std::function<bool(ImageEntry&)>& use, uint64_t max_unpacked) {
  size_t other = 0;
  return Walker(image, max_unpacked)
      .Walk(
          [&](ImageEntry& entry, const auto& unpack) -> StatusOr<bool> {
            CR_RETURN_IF_ERROR(unpack(&entry.bytes));
            return use(entry);
          },
          &other);
}

StatusOr<ParsedImage> ParseImage(std::string_view image, uint64_t max_unpacked) {
  ParsedImage parsed;
  CR_RETURN_IF_ERROR(Walker(image, max_unpacked)
                         .Walk(
                             [&](ImageEntry& entry, const auto& unpack) -> StatusOr<bool> {
                               CR_RETURN_IF_ERROR(unpack(&entry.bytes));
                               parsed.entries.push_back(std::move(entry));
                               return true;
                             },
                             &parsed.other_entries));
  return parsed;
}

StatusOr<ParsedImage> ListEntries(std::string_view image) {
  ParsedImage parsed;
  CR_RETURN_IF_ERROR(Walker(image, 0).Walk(
      [&](ImageEntry& entry, const auto&) {
        parsed.entries.push_back(std::move(entry));
        return true;
      },
      &parsed.other_entries));
  return parsed;
}

bool CanRun(const ImageEntry& entry, uint32_t arch) {
  if (entry.arch_specific) return entry.arch == arch;
  const bool same_family = entry.arch / 10 == arch / 10 && entry.arch <= arch;
  return entry.kind == ImageEntry::kSass || entry.family_specific ? same_family : entry.arch <= arch;
}

std::string NameOf(const ImageEntry& entry) {
  return (entry.kind == ImageEntry::kPtx ? "PTX compute_" : "sm_") + std::to_string(entry.arch) +
         (entry.arch_specific     ? "a"
          : entry.family_specific ? "f"
                                  : "");
}

namespace {

// Keeps `words` sorted.
void AddWords(const std::vector<uint64_t>& more, std::vector<uint64_t>* words) {
  std::vector<uint64_t> all;
  std::set_union(words->begin(), words->end(), more.begin(), more.end(), std::back_inserter(all));
  words->swap(all);
}

}  // namespace

Status DataSymbols(std::string_view image, const std::vector<uint32_t>& arches, std::vector<DataSymbol>* symbols,
                   KernelFacts* kernels, uint64_t max_unpacked) {
  symbols->clear();
  KernelFacts facts;
  std::unordered_map<std::string, size_t> seen;
  const auto add = [&](ImageEntry& entry, const Walker::Unpack& unpack) -> StatusOr<bool> {
    const auto can_run = [&entry](uint32_t arch) { return CanRun(entry, arch); };
    if (!arches.empty() && std::none_of(arches.begin(), arches.end(), can_run)) return true;
    CR_RETURN_IF_ERROR(unpack(&entry.bytes));
    std::vector<DataSymbol> found;
    const Status status = entry.kind == ImageEntry::kPtx ? PtxSymbols(entry.bytes, &found, &facts)
                                                         : CubinSymbols(entry.bytes, &found, &facts);
    for (DataSymbol& symbol : found) {
      const auto [place, is_new] = seen.emplace(symbol.name, symbols->size());
      if (is_new) {
        symbols->push_back(std::move(symbol));
      } else {
        DataSymbol& known = (*symbols)[place->second];
        known.size = std::max(known.size, symbol.size);
        known.managed = known.managed || symbol.managed;
        AddWords(symbol.code_words, &known.code_words);
      }
    }
    CR_RETURN_IF_ERROR(status);
    return true;
  };
  size_t other = 0;
  const Status walked = Walker(image, max_unpacked).Walk(add, &other);
  if (kernels) *kernels = facts;
  return walked;
}

}  // namespace cuda_remote::replay
