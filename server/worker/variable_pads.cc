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

// Bytes of constants that a module may have.
constexpr uint64_t kMostConstants = 64 << 10;

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
    Release();
    for (const CUmodule module : modules_) driver_.cuModuleUnload(module);
  }

  // Whether pads from here on are constants: whether the driver has blocks for these alone is not known.
  void MakeConstants(bool constants) { constants_ = constants; }

  // Brings a pad of `extent` bytes to `goal`, until Release. False if it cannot be done.
  bool Hold(uint64_t goal, uint64_t extent) {
    while (true) {
      CUmodule module = nullptr;
      const uint64_t at = Load(RoundUp(extent), &module);
      if (at == goal) {
        held_.push_back(module);
        return true;
      }
      if (module != nullptr) driver_.cuModuleUnload(module);
      if (at == 0 || !Take(at, goal, extent)) return false;
    }
  }
  void Release() {
    for (const CUmodule module : held_) driver_.cuModuleUnload(module);
    held_.clear();
  }

  // Takes what room there is in small pieces.
  void Fill() {
    for (const bool constants : {true, false}) {
      MakeConstants(constants);
      for (uint64_t bytes = kBlock / 8; bytes >= kUnit; bytes /= 2) {
        for (int again = 0; again < kSamePads && Add(bytes) != 0; ++again) {
        }
      }
    }
  }
  // Pads that are there, but for those of Hold.
  size_t count() const { return modules_.size(); }

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
    CUmodule module = nullptr;
    const uint64_t place = Load(bytes, &module);
    if (module == nullptr) return 0;
    bool in_the_way = place == 0 || not_here.Touches(place, bytes);
    for (const Range& range : kept_free_) in_the_way = in_the_way || range.Touches(place, bytes);
    if (in_the_way) {
      driver_.cuModuleUnload(module);
      return 0;
    }
    modules_.push_back(module);
    return place;
  }

  // Loads a pad. Returns where it is; 0, and no module, if there can be no more.
  uint64_t Load(uint64_t bytes, CUmodule* module) {
    if (++tried_ > kMostPads || (constants_ && bytes > kMostConstants)) return 0;
    const std::string image = std::string(".version 6.3\n.target sm_75\n.address_size 64\n.visible ") +
                              (constants_ ? ".const" : ".global") + " .align 256 .b8 cuda_remote_pad[" +
                              std::to_string(bytes) + "];\n";
    if (driver_.cuModuleLoadData(module, image.c_str()) != CUDA_SUCCESS) {
      *module = nullptr;
      return 0;
    }
    CUdeviceptr place = 0;
    size_t size = 0;
    driver_.cuModuleGetGlobal_v2(&place, &size, *module, "cuda_remote_pad");
    return place;
  }

  const DriverTable& driver_;
  std::array<Range, 2> kept_free_;
  std::vector<CUmodule> held_;
  bool constants_ = false;
  std::vector<CUmodule> modules_;
  int tried_ = 0;
};

}  // namespace

bool SamePlace(const VariablePlace& a, const VariablePlace& b) {
  return a.parts[0].lowest == b.parts[0].lowest && a.parts[1].lowest == b.parts[1].lowest;
}

namespace {

// The same for a module with both parts: pads are brought to where they belong, one after the other, and the module
// takes their places. Whatever it likes better than those has to be taken first.
VariablePlace MoveBoth(const DriverTable& driver, const VariablePlace& now, const VariablePlace& wanted,
                       const std::function<void()>& unload, const std::function<VariablePlace()>& load) {
  Pads pads(driver, now, wanted);
  const auto hold = [&](size_t part) {
    pads.MakeConstants(part == 1);
    return pads.Hold(wanted.parts[part].lowest, now.parts[part].extent);
  };
  // One part's pads may not lie where the other belongs. Once that has its place, there is no more need.
  const auto hold_both = [&] {
    if (hold(1) && hold(0)) return true;
    pads.Release();
    if (hold(0) && hold(1)) return true;
    pads.Release();
    return false;
  };
  VariablePlace place = now;
  for (int move = 0; move < kMostMoves && place.loaded && !SamePlace(place, wanted); ++move) {
    const VariablePlace before = place;
    const size_t pads_before = pads.count();
    unload();
    const bool held = hold_both();
    if (held && move > 0) pads.Fill();
    pads.Release();
    place = load();
    const bool stuck = move > 0 && SamePlace(place, before) && pads.count() == pads_before;
    if (!held || stuck) break;
  }
  return place;
}

}  // namespace

VariablePlace MoveVariablesTo(const DriverTable& driver, const VariablePlace& now, const VariablePlace& wanted,
                              const std::function<void()>& unload, const std::function<VariablePlace()>& load) {
  const auto has_both = [](const VariablePlace& place) {
    return place.parts[0].lowest != 0 && place.parts[1].lowest != 0;
  };
  if (has_both(now) && has_both(wanted)) return MoveBoth(driver, now, wanted, unload, load);
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
      pads.MakeConstants(i == 1);
      taken = part.lowest != 0 && goal != 0 && pads.Take(part.lowest, goal, part.extent);
      break;  // the other part's place may depend on this one's
    }
    place = load();
    if (!taken) break;
  }
  return place;
}

}  // namespace cuda_remote::server
