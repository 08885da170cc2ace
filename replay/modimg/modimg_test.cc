// SPDX-License-Identifier: Apache-2.0
// Tests of the image parser with what nvcc writes.
#include "replay/modimg/modimg.h"

#include <gtest/gtest.h>
#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "proto/base/testing/value_of.h"
#include "replay/modimg/format.h"
#include "replay/modimg/image_size.h"

namespace cuda_remote::replay {
namespace {

std::string Image(const std::string& name) {
  std::ifstream file("replay/modimg/" + name, std::ios::binary);
  EXPECT_TRUE(file) << name;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

const char* const kFatbins[] = {"plain.fatbin", "default.fatbin", "all.fatbin", "size.fatbin", "speed.fatbin"};

// Every variable of testdata/variables.cu.
void ExpectAllVariables(const std::string& image) {
  std::vector<DataSymbol> symbols;
  ASSERT_EQ(DataSymbols(image, {}, &symbols).message(), "");
  std::map<std::string, DataSymbol> by_name;
  size_t literals = 0;
  for (const DataSymbol& symbol : symbols) {
    literals += symbol.literal;
    if (symbol.literal) continue;
    EXPECT_TRUE(by_name.emplace(symbol.name, symbol).second) << symbol.name << " twice";
  }
  const std::map<std::string, uint64_t> expected = {{"counter", 4},
                                                    {"table", 4000},
                                                    {"coefficients", 128},
                                                    {"filled", 6},
                                                    {"hidden", 8},
                                                    {"managed", 4},
                                                    {"vectors", 96},
                                                    {"pairs", 64},
                                                    {"_ZN5space5namedE", 3},
                                                    {"_Z9templatedILi3EE", 4},
                                                    {"_ZZ6KernelPiE5calls", 8}};
  for (const auto& [name, size] : expected) {
    // The names of static variables have a suffix in whole programs.
    const auto found = std::find_if(by_name.begin(), by_name.end(), [&, &name = name](const auto& entry) {
      return entry.first == name || entry.first.find("_" + name) != std::string::npos;
    });
    ASSERT_NE(found, by_name.end()) << name;
    EXPECT_EQ(found->second.size, size) << name;
    EXPECT_EQ(found->second.constant, name == "coefficients" || name == "filled") << name;
    EXPECT_EQ(found->second.managed, name == "managed") << name;
  }
  EXPECT_EQ(by_name.size(), expected.size());
  EXPECT_EQ(literals, 1u);
}

TEST(ParseImage, FatbinsInEveryPacking) {
  std::vector<std::string> plain;
  for (const char* name : kFatbins) {
    SCOPED_TRACE(name);
    const std::string image = Image(name);
    const ParsedImage parsed = ValueOf(ParseImage(image));
    ASSERT_EQ(parsed.entries.size(), 4u);
    EXPECT_EQ(parsed.other_entries, 0u);
    std::multiset<std::string> names;
    std::vector<std::string> contents;
    for (const ImageEntry& entry : parsed.entries) {
      names.insert(NameOf(entry));
      contents.push_back(entry.bytes);
      if (entry.kind == ImageEntry::kPtx) {
        EXPECT_NE(entry.bytes.find(".version"), std::string::npos);
        EXPECT_NE(entry.bytes.back(), '\0');
      } else {
        EXPECT_EQ(entry.bytes.substr(1, 3), "ELF");
      }
    }
    EXPECT_EQ(names, (std::multiset<std::string>{"sm_75", "sm_90", "sm_90a", "PTX compute_90"}));
    // Packed or not, it is the same code.
    if (plain.empty()) plain = contents;
    ASSERT_EQ(contents.size(), plain.size());
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(contents[i], plain[i]) << "entry " << i;
    ExpectAllVariables(image);
    const ParsedImage listed = ValueOf(ListEntries(image));
    ASSERT_EQ(listed.entries.size(), 4u);
    EXPECT_EQ(listed.entries[1].arch, parsed.entries[1].arch);
    EXPECT_TRUE(listed.entries[1].bytes.empty());
  }
}

TEST(DataSymbols, OnlyOfWhatTheGpusCanRun) {
  const std::string image = Image("default.fatbin");
  std::vector<DataSymbol> all, some;
  ASSERT_EQ(DataSymbols(image, {}, &all).message(), "");
  for (const std::vector<uint32_t>& arches : {std::vector<uint32_t>{90}, {50, 75}, {100}}) {
    ASSERT_EQ(DataSymbols(image, arches, &some).message(), "");
    EXPECT_EQ(some.size(), all.size()) << arches[0];
  }
  ASSERT_EQ(DataSymbols(image, {50, 70}, &some).message(), "");
  EXPECT_TRUE(some.empty());
  // What no GPU here can run is not unpacked either.
  EXPECT_EQ(DataSymbols(image, {70}, &some, nullptr, 1).message(), "");
  EXPECT_FALSE(DataSymbols(image, {75}, &some, nullptr, 1).ok());
}

TEST(ParseImage, BothCompressionsAreInUse) {
  // Else the test above would not test what it says.
  const auto flags = [](const std::string& image) {
    format::FatbinEntry entry;
    memcpy(&entry, image.data() + sizeof(format::FatbinHeader), sizeof(entry));
    return entry.flags;
  };
  EXPECT_TRUE(flags(Image("size.fatbin")) & format::kEntryZstd);
  EXPECT_TRUE(flags(Image("speed.fatbin")) & format::kEntryLz4);
  EXPECT_FALSE(flags(Image("plain.fatbin")) & (format::kEntryLz4 | format::kEntryZstd));
}

TEST(ParseImage, CubinPtxAndMore) {
  ParsedImage parsed = ValueOf(ParseImage(Image("variables.cubin")));
  ASSERT_EQ(parsed.entries.size(), 1u);
  EXPECT_EQ(NameOf(parsed.entries[0]), "sm_90");
  ExpectAllVariables(Image("variables.cubin"));
  for (const std::string& text : {Image("variables.ptx"), Image("variables.ptx") + '\0'}) {
    parsed = ValueOf(ParseImage(text));
    ASSERT_EQ(parsed.entries.size(), 1u);
    EXPECT_EQ(NameOf(parsed.entries[0]), "PTX compute_75");
    EXPECT_EQ(parsed.entries[0].bytes, Image("variables.ptx"));
    ExpectAllVariables(text);
  }
  parsed = ValueOf(ParseImage(Image("family.fatbin")));
  ASSERT_EQ(parsed.entries.size(), 2u);
  EXPECT_TRUE(parsed.entries[0].family_specific);
  parsed = ValueOf(ParseImage(Image("lto.fatbin")));
  EXPECT_EQ(parsed.other_entries, 1u);
  // Several fat binaries in one section, and what pads it.
  parsed = ValueOf(ParseImage(Image("all.fatbin") + Image("plain.fatbin") + std::string(24, '\0')));
  EXPECT_EQ(parsed.entries.size(), 8u);
}

TEST(ParseImage, LocateImageFindsTheirEnds) {
  for (const char* name : {"variables.cubin", "plain.fatbin", "all.fatbin", "lto.fatbin", "variables.ptx"}) {
    const std::string image = Image(name);
    const std::string more = image + '\0' + std::string(100, 'x');
    const std::string_view found = ValueOf(LocateImage(more.data()));
    EXPECT_EQ(found.data(), more.data());
    EXPECT_EQ(found.size(), image.size() + (std::string(name) == "variables.ptx")) << name;
  }
}

TEST(ParseImage, RefusesWhatItCannotTake) {
  for (const std::string& image :
       {std::string(), std::string("hello"),
        std::string("\x7f"
                    "ELF"),
        std::string(100, '\0'), std::string(".version 8.0\n"), Image("plain.fatbin").substr(0, 5000)}) {
    EXPECT_NE(ParseImage(image).status().message(), "");
  }
  const std::string error = ParseImage(Image("size.fatbin"), 1000).status().message();
  EXPECT_NE(error.find("too large"), std::string::npos) << error;
}

TEST(ParseImage, DamageIsHarmless) {
  for (const char* name : {"all.fatbin", "speed.fatbin", "variables.cubin"}) {
    const std::string image = Image(name);
    for (size_t i = 0; i < image.size(); i += i < 600 ? 1 : 37) {
      std::string damaged = image;
      damaged[i] ^= char(1 << i % 8);
      std::vector<DataSymbol> symbols;
      const Status status = DataSymbols(damaged, {}, &symbols, nullptr, 64 << 20);
      EXPECT_NE(status.ok(), !status.message().empty());
      (void)DataSymbols(image.substr(0, i), {}, &symbols, nullptr, 64 << 20);
    }
  }
}

TEST(PtxSymbols, Declarations) {
  std::vector<DataSymbol> symbols;
  ASSERT_EQ(PtxSymbols(R"(
.version 8.0 // .global .u32 commented;
.target sm_70
.file 1 "a \" .global .u32 quoted;"
/* .global .u32 commented; */
.extern .global .u32 elsewhere;
.visible .global .align 16 .v4 .f32 quad[2] = {1, 2, 3, 4, 5, 6, 7, 8};
.weak .const .align 8 .u64 pointers[0x10][2] = {generic(quad), quad+4};
.global .u8 text[] = {65, 66, 67};
.global .attribute(.managed, .unified(1,2)) .s16 one = -1, two[3];
.global .texref texture;
.global .samplerref sampler = { addr_mode_0 = clamp_to_edge };
.shared .align 4 .b8 shared[100];
.global .b128 wide;
.func (.param .b32 r) f(.param .b32 a) { .global .u32 inner; ret; }
.entry k() { .reg .b32 %r; { .local .b8 depot[4]; } ret; }
.global .f64 last;)",
                       &symbols)
                .message(),
            "");
  std::map<std::string, uint64_t> sizes;
  for (const DataSymbol& symbol : symbols) sizes[symbol.name] = symbol.size;
  EXPECT_EQ(sizes,
            (std::map<std::string, uint64_t>{
                {"quad", 32}, {"pointers", 256}, {"text", 3}, {"one", 2}, {"two", 6}, {"wide", 16}, {"last", 8}}));
  EXPECT_TRUE(symbols[1].constant);
  EXPECT_TRUE(symbols[3].managed);
  EXPECT_TRUE(symbols[4].managed);
}

TEST(PtxSymbols, Nonsense) {
  std::vector<DataSymbol> symbols;
  for (const char* text : {".global .u32 a[x];", ".global .u32 a[99999999999999][9999999999999999];", ".global .u32 a",
                           ".global .u32 a[3", ".global .u32 a b;"}) {
    const std::string error = PtxSymbols(text, &symbols).message();
    EXPECT_NE(error.find("line 1"), std::string::npos) << error;
  }
}

TEST(CanRun, FollowsTheVendorsRules) {
  ImageEntry sass;
  sass.kind = ImageEntry::kSass;
  sass.arch = 80;
  EXPECT_TRUE(CanRun(sass, 80));
  EXPECT_TRUE(CanRun(sass, 86));
  EXPECT_FALSE(CanRun(sass, 75));
  EXPECT_FALSE(CanRun(sass, 90));
  ImageEntry ptx;
  ptx.arch = 80;
  EXPECT_TRUE(CanRun(ptx, 120));
  EXPECT_FALSE(CanRun(ptx, 75));
  sass.arch = ptx.arch = 90;
  sass.arch_specific = ptx.arch_specific = true;
  EXPECT_TRUE(CanRun(sass, 90));
  EXPECT_FALSE(CanRun(ptx, 100));
  ImageEntry family;
  family.arch = 100;
  family.family_specific = true;
  EXPECT_TRUE(CanRun(family, 103));
  EXPECT_FALSE(CanRun(family, 120));
}

TEST(Modimg, WhatKernelsDo) {
  const std::string head = ".version 7.0\n.target sm_52\n.address_size 64\n";
  std::vector<DataSymbol> symbols;
  KernelFacts facts;
  const auto read = [&](const std::string& text) {
    facts = {};
    facts.print = facts.allocate = facts.bare_addresses = true;
    return DataSymbols(head + text, {}, &symbols, &facts).message();
  };
  ASSERT_EQ(read(".visible .entry k() { ret; }\n"), "");
  EXPECT_FALSE(facts.print || facts.allocate || facts.bare_addresses);
  ASSERT_EQ(read(".extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 a);\n"), "");
  EXPECT_TRUE(facts.print);
  EXPECT_FALSE(facts.allocate || facts.bare_addresses);
  ASSERT_EQ(read(".extern .func (.param .b64 r) malloc (.param .b64 a);\n"), "");
  EXPECT_TRUE(facts.allocate);
  EXPECT_FALSE(facts.print || facts.bare_addresses);
  ASSERT_EQ(read(".extern .func free (.param .b64 a);\n"), "");
  EXPECT_FALSE(facts.allocate);
  const std::string function =
      ".visible .func (.param .b32 r) f(.param .b32 a) { ret; }\n.weak .func g() { ret; }\n.func own() { ret; }\n";
  const std::string call = ".entry k() { .reg .b64 %rd<3>; @%p1 call.uni (r), f, (a); $L_1: call g; ret; }\n";
  ASSERT_EQ(read(function + call), "");
  EXPECT_FALSE(facts.bare_addresses);
  for (const char* taken : {".entry k() { .reg .b64 %rd<3>; mov.u64 %rd1, f; ret; }\n",
                            ".entry k() { { $L_1: @!%p3 mov.u64 %rd1,g; } ret; }\n",
                            ".entry j() { ret; } .entry k() { mov.u64 %rd1, j; ret; }\n"}) {
    ASSERT_EQ(read(function + call.substr(0, call.find(".entry")) + taken), "");
    EXPECT_TRUE(facts.bare_addresses) << taken;
    EXPECT_TRUE(symbols.empty());
  }
  // In a variable, too: that one tells where it lies.
  ASSERT_EQ(read(function + ".global .u64 t[2] = {0, f};\n.entry k() { mov.u64 %rd1, f; ret; }\n"), "");
  EXPECT_FALSE(facts.bare_addresses);
  EXPECT_EQ(symbols[0].code_words, std::vector<uint64_t>{8});
  // The address of a function that nobody else can see is a number.
  ASSERT_EQ(read(function + ".global .u64 t[2] = {0, own};\n.entry k() { mov.u64 %rd1, own; ret; }\n"), "");
  EXPECT_FALSE(facts.bare_addresses);
  EXPECT_TRUE(symbols[0].code_words.empty());
  // Kernels that launch kernels.
  ASSERT_EQ(read(".extern .func (.param .b32 r) cudaLaunchDeviceV2(.param .b64 a);\n" + function +
                 ".entry j() { ret; } .entry k() { mov.u64 %rd1, j; ret; }\n"),
            "");
  EXPECT_FALSE(facts.bare_addresses);
  // Neither a comment nor a string nor a register is a name.
  ASSERT_EQ(read(function + ".entry k() { mov.u64 %f, %g; // g\n .pragma \"f\"; /* f */ ret; }\n"), "");
  EXPECT_FALSE(facts.bare_addresses);
}

TEST(Modimg, WordsOfFunctionAddressesInPtx) {
  const std::string text = R"(.version 7.0
.target sm_52
.visible .func f() { ret; }
.weak .func g() { ret; }
.func h() { ret; }
.global .align 8 .u64 table[4] = {0, f, x, g+16};
.global .align 8 .b8 bytes[24] = {1, 2, 3, 4, 5, 6, 7, 8, 0xFF(f), 0xFF00(f), 0xFF0000(f), 0, 0, 0, 0, 0, 7};
.const .align 8 .u64 one = generic(g), two = 5;
.global .align 8 .u64 nested[2][2] = {{0}, {f}};
.global .align 8 .u64 plain[3] = {table, 2, h};
)";
  std::vector<DataSymbol> symbols;
  KernelFacts facts;
  ASSERT_EQ(PtxSymbols(text, &symbols, &facts).message(), "");
  EXPECT_FALSE(facts.bare_addresses);
  std::map<std::string, std::vector<uint64_t>> words;
  for (const DataSymbol& symbol : symbols) words[symbol.name] = symbol.code_words;
  EXPECT_EQ(
      words,
      (std::map<std::string, std::vector<uint64_t>>{
          {"table", {8, 24}}, {"bytes", {8}}, {"one", {0}}, {"two", {}}, {"nested", {0, 8, 16, 24}}, {"plain", {}}}));
}

// testdata/functions.cu as the compiler and the linker leave it.
TEST(Modimg, WordsOfFunctionAddressesInCubins) {
  for (const char* name : {"functions_75.cubin", "functions_90.cubin"}) {
    SCOPED_TRACE(name);
    std::vector<DataSymbol> symbols;
    KernelFacts facts;
    ASSERT_EQ(DataSymbols(Image(name), {}, &symbols, &facts).message(), "");
    EXPECT_TRUE(facts.allocate && facts.print);
    EXPECT_TRUE(facts.bare_addresses);  // of Down
    std::map<std::string, std::vector<uint64_t>> words;
    for (const DataSymbol& symbol : symbols) {
      if (!symbol.code_words.empty()) words[symbol.name] = symbol.code_words;
    }
    EXPECT_EQ(words, (std::map<std::string, std::vector<uint64_t>>{
                         {"table", {0, 16}}, {"fixed", {8}}, {"_ZTV6Square", {16}}}));
  }
  // Calls, recursive ones too, and addresses of variables are none.
  for (const char* name : {"calls_75.cubin", "calls_90.cubin"}) {
    SCOPED_TRACE(name);
    std::vector<DataSymbol> symbols;
    KernelFacts facts;
    ASSERT_EQ(DataSymbols(Image(name), {}, &symbols, &facts).message(), "");
    EXPECT_FALSE(facts.bare_addresses || facts.allocate || facts.print);
    EXPECT_EQ(symbols.size(), 2u);
  }
  // In whole programs pointers to functions are numbers, which no loading changes.
  std::vector<DataSymbol> symbols;
  KernelFacts facts;
  ASSERT_EQ(DataSymbols(Image("functions_whole.cubin"), {}, &symbols, &facts).message(), "");
  EXPECT_FALSE(facts.bare_addresses);
  EXPECT_TRUE(facts.allocate && facts.print);
  for (const DataSymbol& symbol : symbols) EXPECT_TRUE(symbol.code_words.empty()) << symbol.name;
}

}  // namespace
}  // namespace cuda_remote::replay
