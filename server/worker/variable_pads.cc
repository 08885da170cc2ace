#include "server/worker/variable_pads.h"

#include <algorithm>
#include <string>
#include <vector>

namespace cuda_remote::server {
namespace {

// Loads of the module, and of pads, before it is given up.
constexpr int kMostMoves = 200;
constexpr int kMostPads = 1000;
// So many of one size before a smaller one is tried.
constexpr int kSamePads = 6;
// The driver's variables begin at multiples of it.
constexpr uint64_t kUnit = 256;
// The driver's blocks. Larger variables have blocks of their own, and a pad like that would take the addresses of a
// block.
constexpr uint64_t kBlock = 2 << 20;

class Pads {
 public:
  Pads(const DriverTable& driver, uint64_t wanted, uint64_t extent)
      : driver_(driver), wanted_(wanted), extent_(extent) {}
  ~Pads() {
    for (const CUmodule module : modules_) driver_.cuModuleUnload(module);
  }

  // Takes `place`, where the module has just been, and what is free between that and the wanted place. False if it
  // cannot be done.
  bool Take(uint64_t place) {
    if (place > wanted_) {
      // A pad as long as the module goes where the module went; what it leaves there, or elsewhere, may suit a longer
      // one.
      const bool taken = Add(extent_, wanted_) == place;
      for (uint64_t bytes = kBlock / 8; taken && bytes > extent_; bytes /= 2) Add(bytes, wanted_);
      return taken;
    }
    const uint64_t gap = wanted_ - place;
    if (gap >= extent_) {
      // As much at once as possible.
      uint64_t bytes = extent_ >= kBlock / 2 ? gap : std::min(gap, std::max(extent_, kBlock / 2));
      for (;; bytes = std::max(bytes / 2 / kUnit * kUnit, extent_)) {
        for (int again = 0; again < kSamePads; ++again) {
          const uint64_t at = Add(bytes, wanted_);
          if (at == place) return true;
          if (at == 0) break;
        }
        if (bytes == extent_) return false;
      }
    }
    // A pad that just fits may find room elsewhere that the module does not. All that is taken, by longer pads first.
    for (uint64_t bytes = extent_; bytes > gap; bytes = std::max(bytes / 2 / kUnit * kUnit, gap)) {
      while (Add(bytes, place) != 0) {
      }
    }
    while (true) {
      const uint64_t at = Add(gap, wanted_);
      if (at == place) return true;
      if (at == 0) return false;
    }
  }

 private:
  // One more pad of `bytes`, which may not touch [from, the wanted place's end): where it is. 0 if it would, or there
  // can be no more.
  uint64_t Add(uint64_t bytes, uint64_t from) {
    if (++tried_ > kMostPads) return 0;
    const std::string image =
        ".version 6.3\n.target sm_75\n.address_size 64\n.visible .global .align 256 .b8 cuda_remote_pad[" +
        std::to_string(bytes) + "];\n";
    CUmodule module = nullptr;
    if (driver_.cuModuleLoadData(&module, image.c_str()) != CUDA_SUCCESS) return 0;
    CUdeviceptr place = 0;
    size_t size = 0;
    driver_.cuModuleGetGlobal_v2(&place, &size, module, "cuda_remote_pad");
    if (place == 0 || (place < wanted_ + extent_ && from < place + bytes)) {
      driver_.cuModuleUnload(module);
      return 0;
    }
    modules_.push_back(module);
    return place;
  }

  const DriverTable& driver_;
  const uint64_t wanted_;
  const uint64_t extent_;
  std::vector<CUmodule> modules_;
  int tried_ = 0;
};

}  // namespace

uint64_t MoveVariablesTo(const DriverTable& driver, uint64_t lowest, uint64_t wanted, uint64_t extent,
                         const std::function<void()>& unload, const std::function<uint64_t()>& load) {
  Pads pads(driver, wanted, std::max(extent + kUnit - 1, kUnit) / kUnit * kUnit);
  for (int move = 0; move < kMostMoves && lowest != 0 && lowest != wanted; ++move) {
    unload();
    const bool taken = pads.Take(lowest);
    lowest = load();
    if (!taken) break;
  }
  return lowest;
}

}  // namespace cuda_remote::server
