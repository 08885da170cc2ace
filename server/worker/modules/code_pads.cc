// SPDX-License-Identifier: Apache-2.0
#include "server/worker/modules/code_pads.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "proto/base/clock.h"
#include "proto/base/text.h"

namespace cuda_remote::server {
namespace {

constexpr uint64_t kBlock = 2 << 20;
// What an instruction takes, and a pad without any: only where the search begins.
constexpr uint64_t kInstruction = 16, kEmptyPad = 0xa00;
// Pads for one module; sizes to try for one pad; lengths to try for one pad.
constexpr int kMostPads = 16, kMostSizes = 5, kMostLengths = 4;
// A module with more addresses than this, such as NCCL's 670, takes a second to load, and lies in several blocks; no
// way was ever found for one.
constexpr size_t kMostWords = 256;
// Blocks to fill in vain.
constexpr int kMostFilled = 3;
// Loads of one module in all: a large one takes a second each, and the job waits. No more begin after this time.
constexpr int kMostReloads = 10;
constexpr std::chrono::seconds kLongest(3);

uint64_t BlockOf(uint64_t address) { return address / kBlock; }

// A pad that takes `bytes`, as far as can be said beforehand.
uint64_t InstructionsFor(uint64_t bytes) { return bytes > kEmptyPad ? (bytes - kEmptyPad) / kInstruction : 0; }

// Loads a kernel with that many instructions more than an empty one.
CUmodule LoadPad(const DriverTable& driver, uint64_t instructions) {
  std::string text =
      ".version 6.3\n.target sm_75\n.address_size 64\n.visible .entry cuda_remote_pad(.param .u64 at) {\n"
      ".reg .b64 %rd<2>;\n.reg .b32 %r<2>;\nld.param.u64 %rd1, [at];\n";
  for (uint64_t i = 0; i < instructions; ++i) text += "ld.volatile.global.u32 %r1, [%rd1];\n";
  text += "ret;\n}\n";
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  if (driver.cuModuleLoadData(&module, text.c_str()) != CUDA_SUCCESS) return nullptr;
  // Its code gets its place when it is asked for.
  if (driver.cuModuleGetFunction(&function, module, "cuda_remote_pad") == CUDA_SUCCESS) return module;
  driver.cuModuleUnload(module);
  return nullptr;
}

size_t Wrong(const CodeWords& now, const CodeWords& wanted) {
  if (now.size() != wanted.size()) return std::max(now.size(), wanted.size());
  size_t wrong = 0;
  for (size_t i = 0; i < now.size(); ++i) wrong += now[i] != wanted[i];
  return wrong;
}

// How far the functions of each block have to go on in it: by distance, the first word with it. Most frequent first.
std::vector<std::pair<uint64_t, size_t>> Distances(const CodeWords& now, const CodeWords& wanted) {
  std::map<uint64_t, std::pair<size_t, size_t>> found;  // distance -> how many, first word
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] >= wanted[i] || BlockOf(now[i]) != BlockOf(wanted[i])) continue;
    ++found.try_emplace(wanted[i] - now[i], 0, i).first->second.first;
  }
  std::vector<std::pair<uint64_t, size_t>> distances;
  for (const auto& [distance, of_it] : found) distances.emplace_back(distance, of_it.second);
  std::stable_sort(distances.begin(), distances.end(),
                   [&](const auto& a, const auto& b) { return found[a.first].first > found[b.first].first; });
  if (distances.size() > size_t(kMostLengths)) distances.resize(kMostLengths);
  return distances;
}

class Search {
 public:
  Search(const DriverTable& driver, CodeWords now, const CodeWords& wanted,
         const std::function<CodeWords(const std::function<void()>&)>& reload)
      : driver_(driver), now_(std::move(now)), wanted_(wanted), reload_module_(reload) {}

  CodeWords Run(std::vector<CUmodule>* pads) {
    while (Wrong(now_, wanted_) != 0 && now_.size() == wanted_.size() && pads->size() < kMostPads) {
      const CUmodule pad = NextPad();
      if (!pad) break;
      pads->push_back(pad);
    }
    return now_;
  }

 private:
  bool TriedEnough() const { return reloads_ >= kMostReloads || Now() - start_ > kLongest; }

  CodeWords Reload(const std::function<void()>& between) {
    ++reloads_;
    return reload_module_(between);
  }

  // A pad with which fewer functions lie where they do not belong; null: there is none.
  CUmodule NextPad() {
    const CodeWords before = now_;
    for (const auto& [distance, word] : Distances(before, wanted_)) {
      if (TriedEnough()) return nullptr;
      const CUmodule pad = Shift(before, word, distance);
      if (pad && Wrong(now_, wanted_) < Wrong(before, wanted_)) {
        filled_ = 0;
        return pad;
      }
      Drop(pad);
    }
    // All that is left of a block in which no function belongs.
    std::set<uint64_t> wanted_blocks;
    for (const uint64_t address : wanted_) wanted_blocks.insert(BlockOf(address));
    std::map<uint64_t, size_t> first;  // by block: the word with the lowest address
    for (size_t i = 0; i < before.size(); ++i) {
      if (wanted_blocks.count(BlockOf(before[i])) != 0) continue;
      const auto [place, is_new] = first.emplace(BlockOf(before[i]), i);
      if (!is_new && before[i] < before[place->second]) place->second = i;
    }
    for (const auto& entry : first) {
      const uint64_t block = entry.first;
      const size_t word = entry.second;
      if (filled_++ == kMostFilled || TriedEnough()) break;
      CUmodule pad = nullptr;
      now_ = Reload([&] { pad = LoadPad(driver_, InstructionsFor((block + 1) * kBlock - before[word])); });
      if (pad && now_.size() == before.size() && BlockOf(now_[word]) != block) return pad;
      Drop(pad);
    }
    return nullptr;
  }

  // A pad that moves the function of `word` on by `distance`.
  CUmodule Shift(const CodeWords& before, size_t word, uint64_t distance) {
    uint64_t instructions = InstructionsFor(distance);
    CUmodule pad = nullptr;
    for (int tries = 0; tries < kMostSizes && (tries == 0 || !TriedEnough()); ++tries) {
      now_ = Reload([&] {
        if (pad) driver_.cuModuleUnload(pad);
        pad = LoadPad(driver_, instructions);
      });
      if (!pad || now_.size() != before.size() || now_[word] == before[word] + distance) break;
      const int64_t moved = int64_t(now_[word] - before[word]);
      if (BlockOf(now_[word]) != BlockOf(before[word])) break;
      const int64_t more = (int64_t(distance) - moved) / int64_t(kInstruction);
      if (more == 0 || int64_t(instructions) + more < 0) break;
      instructions = uint64_t(int64_t(instructions) + more);
    }
    return pad;
  }

  void Drop(CUmodule pad) {
    if (pad) now_ = Reload([&] { driver_.cuModuleUnload(pad); });
  }

  const DriverTable& driver_;
  int filled_ = 0;
  CodeWords now_;
  const CodeWords& wanted_;
  const std::function<CodeWords(const std::function<void()>&)>& reload_module_;
  int reloads_ = 0;
  const Moment start_ = Now();
};

}  // namespace

std::string DescribeDistances(const CodeWords& now, const CodeWords& wanted) {
  constexpr size_t kMostNamed = 8;
  if (now.size() != wanted.size()) return std::to_string(now.size()) + " instead of " + std::to_string(wanted.size());
  std::map<int64_t, int> counts;
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] != wanted[i]) ++counts[int64_t(now[i] - wanted[i])];
  }
  std::vector<std::pair<int64_t, int>> distances(counts.begin(), counts.end());
  std::stable_sort(distances.begin(), distances.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text = std::to_string(Wrong(now, wanted)) + " of " + std::to_string(now.size()) + " by ";
  for (size_t i = 0; i < distances.size() && i < kMostNamed; ++i) {
    const auto [distance, count] = distances[i];
    text += std::string(i == 0 ? "" : ", ") + (distance < 0 ? "-" : "") +
            Hex(uint64_t(distance < 0 ? -distance : distance)) + " (" + std::to_string(count) + ")";
  }
  return distances.size() > kMostNamed ? text + ", ..." : text;
}

CodeWords MoveCodeTo(const DriverTable& driver, const CodeWords& now, const CodeWords& wanted,
                     const std::function<CodeWords(const std::function<void()>&)>& reload,
                     std::vector<CUmodule>* pads) {
  if (wanted.size() > kMostWords) return now;
  return Search(driver, now, wanted, reload).Run(pads);
}

}  // namespace cuda_remote::server
