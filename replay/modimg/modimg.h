// SPDX-License-Identifier: Apache-2.0
// What is in a module image: the code for each architecture, the variables in it, and what its kernels do with memory.
//
// Takes what the driver takes: a fat binary (compressed or not), a cubin, or PTX text; also several fat binaries one
// after the other. Pure functions, any thread. Any input is safe: sizes are checked before they are used, and what
// unpacking may take is limited.
#ifndef CUDA_REMOTE_REPLAY_MODIMG_MODIMG_H_
#define CUDA_REMOTE_REPLAY_MODIMG_MODIMG_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace cuda_remote::replay {

// Most bytes that the unpacked entries of one image may take together.
inline constexpr uint64_t kMaxUnpackedBytes = uint64_t{4} << 30;

// Code for one architecture.
struct ImageEntry {
  enum Kind { kPtx, kSass };
  Kind kind = kPtx;
  uint32_t arch = 0;             // 90 for sm_90 and compute_90
  bool compressed = false;       // in the image; `bytes` are not
  bool arch_specific = false;    // sm_90a: for exactly this architecture
  bool family_specific = false;  // sm_100f: for later ones of its family too
  std::string bytes;             // PTX text without terminating zeros, or the cubin; empty from ListEntries
};

struct ParsedImage {
  std::vector<ImageEntry> entries;
  // Entries of other kinds (intermediate code for link-time optimisation), which no driver can load by themselves.
  size_t other_entries = 0;
};

// Takes an image apart. Fails for anything damaged or unknown.
StatusOr<ParsedImage> ParseImage(std::string_view image, uint64_t max_unpacked = kMaxUnpackedBytes);

// As ParseImage without unpacking anything.
StatusOr<ParsedImage> ListEntries(std::string_view image);

// Unpacks one entry after the other, so that only one is in memory. `use` returns false to stop early, which is no
// failure.
Status ForEachEntry(std::string_view image, const std::function<bool(ImageEntry&)>& use,
                    uint64_t max_unpacked = kMaxUnpackedBytes);

// Whether a GPU of compute capability `arch` (90 for 9.0) can run this entry: machine code of the same major version
// for the same or a lower minor one, PTX of the same or a lower version.
bool CanRun(const ImageEntry& entry, uint32_t arch);

// "sm_90a", "PTX compute_75".
std::string NameOf(const ImageEntry& entry);

// A __device__, __constant__ or __managed__ variable.
struct DataSymbol {
  std::string name;
  uint64_t size = 0;
  bool constant = false;
  bool managed = false;
  bool literal = false;  // a string of the compiler's (`$str`): it has a place as others do, but nothing can change it
  // Offsets of the words in which loading puts addresses of functions: tables of function pointers, virtual tables.
  // Not those of whole programs (README.md).
  std::vector<uint64_t> code_words;
};

// What the kernels of an image may do, as far as a checkpoint has to know it.
struct KernelFacts {
  bool print = false;  // printf: they name `vprintf`
  // They name `malloc`: they use the heap of their context. One that names `free` alone, as any virtual destructor
  // does, has nothing to give back.
  bool allocate = false;
  // Instructions take addresses of functions that no variable holds (DataSymbol::code_words), so nothing that can be
  // read tells where these functions lie.
  bool bare_addresses = false;
};

// The variables, in the order in which they are found (that of the symbol table or the text); a variable that several
// entries have is listed once.
// Only entries that one of the GPUs `arches` (as for CanRun) can run are looked at, and unpacked; if `arches` is empty,
// all. *kernels, unless null: what any of these entries' kernels may do. On failure both hold what was found before.
Status DataSymbols(std::string_view image, const std::vector<uint32_t>& arches, std::vector<DataSymbol>* symbols,
                   KernelFacts* kernels = nullptr, uint64_t max_unpacked = kMaxUnpackedBytes);

// The same for one cubin, and for one PTX text; appended to `symbols` without looking for doubles, and added to
// *kernels.
Status CubinSymbols(std::string_view cubin, std::vector<DataSymbol>* symbols, KernelFacts* kernels = nullptr);
Status PtxSymbols(std::string_view text, std::vector<DataSymbol>* symbols, KernelFacts* kernels = nullptr);

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_MODIMG_MODIMG_H_
