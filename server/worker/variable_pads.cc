#include "server/worker/variable_pads.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace cuda_remote::server {
namespace {

// Loads of the module, and of pads, before it is given up.
constexpr int kMostMoves = 100;
constexpr int kMostPads = 300;
// So many of one size before a smaller one is tried.
constexpr int kSamePads = 6;
// The driver's variables begin at multiples of it.
constexpr uint64_t kUnit = 256;
// The driver's blocks. Larger variables have blocks of their own, and a pad like that would take the addresses of a
// block.
constexpr uint64_t kBlock = 2 << 20;

uint64_t RoundUp(uint64_t bytes) { return std::max(bytes + kUnit - 1, kUnit) / kUnit * kUnit; }

struct Range {
  uint64_t begin = 0, end = 0;
  bool Touches(uint64_t place, uint64_t bytes) const { return place < end && begin < place + bytes; }
};

class Pads {
 public:
  // No pad may touch where the parts of `wanted`, as long as those of `now`, belong.
  Pads(const DriverTable& driver, const VariablePlace& now, const VariablePlace& wanted) : driver_(driver) {
    for (size_t i = 0; i < kept_free_.size(); ++i) {
      if (wanted.parts[i].lowest == 0) continue;
      kept_free_[i] = {wanted.parts[i].lowest, wanted.parts[i].lowest + RoundUp(now.parts[i].extent)};
    }
  }
  ~Pads() {
    for (const CUmodule module : modules_) driver_.cuModuleUnload(module);
  }

  // Takes `place`, where a part of `extent` bytes has just been, and what is free between that and `wanted`. False if
  // it cannot be done.
  bool Take(uint64_t place, uint64_t wanted, uint64_t extent) {
    extent = RoundUp(extent);
    if (place > wanted) {
      // A pad as long as the part goes where the part went; what it leaves there, or elsewhere, may suit a longer one.
      const bool taken = Add(extent) == place;
      for (uint64_t bytes = kBlock / 8; taken && bytes > extent; bytes /= 2) Add(bytes);
      return taken;
    }
    const uint64_t gap = wanted - place;
    if (gap >= extent) {
      // As much at once as possible.
      uint64_t bytes = extent >= kBlock / 2 ? gap : std::min(gap, std::max(extent, kBlock / 2));
      for (;; bytes = std::max(bytes / 2 / kUnit * kUnit, extent)) {
        for (int again = 0; again < kSamePads; ++again) {
          const uint64_t at = Add(bytes);
          if (at == place) return true;
          if (at == 0) break;
        }
        if (bytes == extent) return false;
      }
    }
    // A pad that just fits may find room elsewhere that the part does not. All that is taken, by longer pads first.
    const Range in_between = {place, wanted + extent};
    for (uint64_t bytes = extent; bytes > gap; bytes = std::max(bytes / 2 / kUnit * kUnit, gap)) {
      while (Add(bytes, in_between) != 0) {
      }
    }
    while (true) {
      const uint64_t at = Add(gap);
      if (at == place) return true;
      if (at == 0) return false;
    }
  }

 private:
  // One more pad of `bytes`, which may touch neither `not_here` nor what is kept free: where it is. 0 if it would, or
  // there can be no more.
  uint64_t Add(uint64_t bytes, const Range& not_here = {}) {
    if (++tried_ > kMostPads) return 0;
    const std::string image =
        ".version 6.3\n.target sm_75\n.address_size 64\n.visible .global .align 256 .b8 cuda_remote_pad[" +
        std::to_string(bytes) + "];\n";
    CUmodule module = nullptr;
    if (driver_.cuModuleLoadData(&module, image.c_str()) != CUDA_SUCCESS) return 0;
    CUdeviceptr place = 0;
    size_t size = 0;
    driver_.cuModuleGetGlobal_v2(&place, &size, module, "cuda_remote_pad");
    bool in_the_way = place == 0 || not_here.Touches(place, bytes);
    for (const Range& range : kept_free_) in_the_way = in_the_way || range.Touches(place, bytes);
    if (in_the_way) {
      driver_.cuModuleUnload(module);
      return 0;
    }
    modules_.push_back(module);
    return place;
  }

  const DriverTable& driver_;
  std::array<Range, 2> kept_free_;
  std::vector<CUmodule> modules_;
  int tried_ = 0;
};

}  // namespace

bool SamePlace(const VariablePlace& a, const VariablePlace& b) {
  return a.parts[0].lowest == b.parts[0].lowest && a.parts[1].lowest == b.parts[1].lowest;
}

VariablePlace MoveVariablesTo(const DriverTable& driver, const VariablePlace& now, const VariablePlace& wanted,
                              const std::function<void()>& unload, const std::function<VariablePlace()>& load) {
  Pads pads(driver, now, wanted);
  VariablePlace place = now;
  for (int move = 0; move < kMostMoves && place.loaded && !SamePlace(place, wanted); ++move) {
    unload();
    bool taken = true;
    // Constants are placed first.
    for (const size_t i : {1, 0}) {
      const VariablePart& part = place.parts[i];
      const uint64_t goal = wanted.parts[i].lowest;
      if (part.lowest == goal) continue;
      taken = part.lowest != 0 && goal != 0 && pads.Take(part.lowest, goal, part.extent);
      break;  // the other part's place may depend on this one's
    }
    place = load();
    if (!taken) break;
  }
  return place;
}

}  // namespace cuda_remote::server
