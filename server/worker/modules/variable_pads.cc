// SPDX-License-Identifier: Apache-2.0
#include "server/worker/modules/variable_pads.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <string>
#include <vector>

namespace cuda_remote::server {
namespace {

// Loads of pads for one module. A cubin takes 0.05 ms, a PTX text, which the driver compiles, 5 ms.
constexpr int kMostCubinPads = 20000;
constexpr int kMostPtxPads = 400;
// GPU memory that fillers may take.
constexpr uint64_t kMostBytes = uint64_t{1} << 30;
// The driver's pieces begin at multiples of it, and are that long.
constexpr uint64_t kUnit = 256;
// The driver's blocks. Longer pieces have blocks of their own.
constexpr uint64_t kBlock = 2 << 20;
// Units by which a module's constants may be longer than those that have names.
constexpr int kHiddenUnits = 16;
// Holes of one length that are older than the one that a piece has just left.
constexpr int kMostTies = 24;
// Ways to leave holes for one module.
constexpr int kMostArrangements = 100;
// Pads in a row that come to where none may be.
constexpr int kMostTries = 4;

uint64_t RoundUp(uint64_t bytes) { return std::max(bytes + kUnit - 1, kUnit) / kUnit * kUnit; }

struct Range {
  uint64_t begin = 0, end = 0;
  bool Touches(uint64_t place, uint64_t bytes) const { return place < end && begin < place + bytes; }
};

// One part's piece: where it belongs.
struct Piece {
  uint64_t goal = 0;
  uint64_t bytes = 0;
};

// Pieces that belong directly behind each other, in the order in which they are placed: one hole for all of them.
struct Run {
  uint64_t goal = 0;
  uint64_t bytes = 0;
  uint64_t room = 0;     // bytes behind it that stay free as well, so that its hole is longer than another one
  bool limited = false;  // its hole has an end: a filler just behind it
  bool Has(uint64_t place) const { return place >= goal && place < goal + bytes + room; }
};

// A pad that is loaded.
struct Pad {
  CUmodule module = nullptr;
  uint64_t at = 0;  // 0: it could not be loaded
};

// Images of pads: a cubin of the driver's own linker whose size is then set, or a PTX text where that does not work.
class PadImages {
 public:
  explicit PadImages(const DriverTable& driver) {
    const std::string text = Ptx(kUnit);
    CUlinkState state = nullptr;
    void* image = nullptr;
    size_t bytes = 0;
    if (!driver.cuLinkCreate_v2 || driver.cuLinkCreate_v2(0, nullptr, nullptr, &state) != CUDA_SUCCESS) return;
    if (driver.cuLinkAddData_v2(state, CU_JIT_INPUT_PTX, const_cast<char*>(text.c_str()), text.size() + 1, "pad", 0,
                                nullptr, nullptr) == CUDA_SUCCESS &&
        driver.cuLinkComplete(state, &image, &bytes) == CUDA_SUCCESS) {
      cubin_.assign(static_cast<const char*>(image), bytes);
      if (!SetPadSize(&cubin_, kUnit)) cubin_.clear();
    }
    driver.cuLinkDestroy(state);
  }
  bool compiled() const { return !cubin_.empty(); }
  std::string Image(uint64_t bytes) const {
    std::string image = cubin_;
    return compiled() && SetPadSize(&image, bytes) ? image : Ptx(bytes);
  }

 private:
  static std::string Ptx(uint64_t bytes) {
    // With a kernel: without one, the assembler adds a table of the variable's address, which is a piece of its own.
    return ".version 6.3\n.target sm_75\n.address_size 64\n.visible .global .align 256 .b8 cuda_remote_pad[" +
           std::to_string(bytes) + "];\n.visible .entry cuda_remote_nothing() { ret; }\n";
  }
  std::string cubin_;
};

// Those for the current context's GPU. Made once for each: executor only.
const PadImages& ImagesForCurrent(const DriverTable& driver) {
  static std::map<CUdevice, PadImages> images;
  CUdevice device = 0;
  driver.cuCtxGetDevice(&device);
  return images.try_emplace(device, driver).first->second;
}

class Pads {
 public:
  Pads(const DriverTable& driver, const PadImages& images)
      : driver_(driver), images_(images), left_(images.compiled() ? kMostCubinPads : kMostPtxPads) {}
  ~Pads() {
    Release();
    GiveBack();
    for (const Filler& filler : fillers_) Unload(filler.pad);
  }

  // No filler may lie where these belong; those that do go.
  void KeepFree(const std::vector<Run>& runs) {
    kept_free_.clear();
    for (const Run& run : runs) kept_free_.push_back({run.goal, run.goal + run.bytes + run.room});
    for (const Range& range : kept_free_) Vacate(range);
  }
  // Fillers that lie there go.
  void Vacate(const Range& range) {
    const auto in_the_way = [&](const Filler& filler) { return range.Touches(filler.pad.at, filler.bytes); };
    for (const Filler& filler : fillers_) {
      if (in_the_way(filler)) Unload(filler.pad);
    }
    fillers_.erase(std::remove_if(fillers_.begin(), fillers_.end(), in_the_way), fillers_.end());
  }

  // Brings a pad of `bytes` to `goal`, until Release. False if it cannot be done.
  bool Hold(uint64_t goal, uint64_t bytes) {
    own_ = {goal, goal + bytes};
    const bool held = TakeAndKeep(goal, bytes);
    own_ = {};
    GiveBack();
    return held;
  }

  // Loads `pieces` in their order. The first one that does not come to its goal, or their number; and where that one
  // came to instead. If nothing belongs there, the place is filled.
  size_t Rehearse(const std::vector<Piece>& pieces, uint64_t* instead) {
    std::vector<Pad> loaded;
    size_t right = 0;
    for (; right < pieces.size(); ++right) {
      const Pad pad = Load(pieces[right].bytes);
      if (pad.at != pieces[right].goal) {
        *instead = pad.at;
        if (pad.at == 0) break;
        Unload(pad);
        TakeHoleBeside(pad.at, pieces[right].bytes, {});
        break;
      }
      loaded.push_back(pad);
    }
    for (const Pad& pad : loaded) Unload(pad);
    return right;
  }
  // A filler just behind what is held at `run`, if there is room.
  void Limit(const Run& run) {
    Pad pad;
    const uint64_t end = run.goal + run.bytes + run.room;
    const auto held =
        std::find_if(held_.begin(), held_.end(), [&](const Held& h) { return h.range.begin == run.goal; });
    if (held == held_.end() || !held->room_behind || !MayLie(end, kUnit)) return;
    if (Bring(end, kUnit, &pad)) KeepFiller(pad, kUnit);
    GiveBack();
  }

  // Gives the places free, those of `runs` first and in their order: of two holes of one length the older one is used
  // first.
  void Release(const std::vector<Run>& runs = {}) {
    const auto rank = [&](const Held& held) {
      const auto of_held = [&](const Run& run) { return run.goal == held.range.begin; };
      return std::find_if(runs.begin(), runs.end(), of_held) - runs.begin();
    };
    std::stable_sort(held_.begin(), held_.end(), [&](const Held& a, const Held& b) { return rank(a) < rank(b); });
    for (const Held& held : held_) Unload(held.pad);
    held_.clear();
  }

 private:
  struct Held {
    Pad pad;
    Range range;
    bool room_behind;
  };
  struct Filler {
    Pad pad;
    uint64_t bytes;
  };

  bool TakeAndKeep(uint64_t goal, uint64_t bytes) {
    Pad pad;
    if (!Bring(goal, bytes, &pad)) return false;
    // Once more: now the place is the youngest of its length, and must still be the one that is taken. Others as long
    // are filled.
    for (int tries = 0; tries < kMostTies; ++tries) {
      Unload(pad);
      pad = Load(bytes);
      if (pad.at == goal) {
        Unload(pad);
        // With room behind it, a longer one would come there, too.
        const bool room = PlaceOf(bytes + kUnit) == goal;
        pad = Load(bytes);
        if (pad.at == goal) {
          held_.push_back({pad, {goal, goal + bytes}, room});
          return true;
        }
      }
      if (pad.at == 0 || (!Lend(pad, bytes) && !KeepFiller(pad, bytes)) || !Bring(goal, bytes, &pad)) return false;
    }
    Unload(pad);
    return false;
  }

  // A pad that lies where another run belongs stays there until GiveBack, out of the way of this one. False if it does
  // not lie in such a place.
  bool Lend(const Pad& pad, uint64_t bytes) {
    if (pad.at == 0 || MayLie(pad.at, bytes) || own_.Touches(pad.at, bytes)) return false;
    lent_.push_back(pad);
    return true;
  }
  void GiveBack() {
    for (const Pad& pad : lent_) Unload(pad);
    lent_.clear();
  }

  // Fills what is in the way until a pad of `bytes` comes to `place`; that one is the caller's then.
  bool Bring(uint64_t place, uint64_t bytes, Pad* pad) {
    // What may not be filled has become the youngest hole of its length, so that another one may be next.
    for (int refused = 0; refused < kMostTries;) {
      *pad = Load(bytes);
      if (pad->at == place) return true;
      if (pad->at == 0) return false;
      if (Lend(*pad, bytes)) continue;
      Unload(*pad);
      if (!TakeHole(pad->at, bytes, {place, place + bytes})) ++refused;
    }
    return false;
  }

  // Fills the hole at `place`, where a piece of `bytes` would go next, as far as it reaches or `goal` begins.
  bool TakeHole(uint64_t place, uint64_t bytes, const Range& goal) {
    kept_free_.push_back(goal);
    const bool taken = TakeHoleBeside(place, bytes, goal);
    kept_free_.pop_back();
    return taken;
  }
  bool TakeHoleBeside(uint64_t place, uint64_t bytes, const Range& goal) {
    Pad pad;
    if (goal.Touches(place, bytes)) {
      // The hole begins in front of the goal by less than a piece. (Or within it: then somebody else is there.)
      return place < goal.begin && Bring(place, goal.begin - place, &pad) && KeepFiller(pad, goal.begin - place);
    }
    if (!MayLie(place, bytes)) return false;
    // As much at once as will go there: all up to the goal, or ever twice as much.
    uint64_t most = bytes;
    if (bytes <= kBlock) {
      const bool in_front = place < goal.begin && place / kBlock == goal.begin / kBlock;
      if (in_front && GoesTo(place, goal.begin - place)) {
        most = goal.begin - place;
      } else {
        while (2 * most <= kBlock && GoesTo(place, 2 * most)) most *= 2;
      }
    }
    // It need not come to this place, now that this hole is the youngest of its length; then another one is full.
    for (int tries = 0; tries < kMostTries; ++tries) {
      pad = Load(most);
      if (pad.at == 0) return false;
      if (KeepFiller(pad, most)) return true;
    }
    return false;
  }

  bool MayLie(uint64_t place, uint64_t bytes) const {
    return std::none_of(kept_free_.begin(), kept_free_.end(), [&](const Range& r) { return r.Touches(place, bytes); });
  }
  // Whether a filler may lie there and would.
  bool GoesTo(uint64_t place, uint64_t bytes) { return MayLie(place, bytes) && PlaceOf(bytes) == place; }
  uint64_t PlaceOf(uint64_t bytes) {
    const Pad pad = Load(bytes);
    if (pad.at) Unload(pad);
    return pad.at;
  }

  // False, and it is gone, if it may not stay.
  bool KeepFiller(const Pad& pad, uint64_t bytes) {
    filled_bytes_ += bytes;
    if (filled_bytes_ <= kMostBytes && MayLie(pad.at, bytes)) {
      fillers_.push_back({pad, bytes});
      return true;
    }
    Unload(pad);
    return false;
  }

  Pad Load(uint64_t bytes) {
    Pad pad;
    if (left_-- <= 0) return pad;
    if (driver_.cuModuleLoadData(&pad.module, images_.Image(bytes).c_str()) != CUDA_SUCCESS) return {};
    CUdeviceptr place = 0;
    size_t size = 0;
    if (driver_.cuModuleGetGlobal_v2(&place, &size, pad.module, "cuda_remote_pad") != CUDA_SUCCESS || place == 0) {
      Unload(pad);
      return {};
    }
    pad.at = place;
    return pad;
  }
  void Unload(const Pad& pad) { driver_.cuModuleUnload(pad.module); }

  const DriverTable& driver_;
  const PadImages& images_;
  std::vector<Range> kept_free_;
  std::vector<Held> held_;
  std::vector<Pad> lent_;
  Range own_;  // the run that is being held
  std::vector<Filler> fillers_;
  int left_;
  uint64_t filled_bytes_ = 0;
};

// The runs that the pieces make, in the order of their first pieces.
std::vector<Run> RunsOf(const std::vector<Piece>& pieces) {
  std::vector<Run> runs;
  for (const Piece& piece : pieces) {
    const auto before =
        std::find_if(runs.begin(), runs.end(), [&](const Run& run) { return run.goal + run.bytes == piece.goal; });
    if (before != runs.end() && piece.goal % kBlock != 0) {
      before->bytes += piece.bytes;
    } else {
      runs.push_back({piece.goal, piece.bytes});
    }
  }
  return runs;
}

// The pads of one context, which is current in all calls.
class Arrangement {
 public:
  // `now`: null if the module had no variables there when it was last loaded.
  Arrangement(const DriverTable& driver, const VariablePlace* now, const VariablePlace& wanted)
      : wanted_(wanted), pads_(driver, ImagesForCurrent(driver)) {
    const size_t count = now != nullptr ? std::min(now->parts.size(), wanted.parts.size()) : 0;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t goal = wanted.parts[i].lowest;
      if (now->parts[i].lowest == 0 || goal == 0) continue;
      pieces_.push_back({goal / kUnit * kUnit, RoundUp(goal % kUnit + now->parts[i].extent)});
      has_constants_ = has_constants_ || i == 0;
    }
    runs_ = RunsOf(pieces_);
  }
  const VariablePlace& wanted() const { return wanted_; }

  // Arranges the holes so that the pieces come to their goals. False if no way was found.
  bool Make();
  // Leaves the blocks in which another context's pieces belong, and none of its own.
  void Vacate(const Arrangement& other) {
    for (const Piece& piece : other.pieces_) {
      pads_.Vacate({piece.goal / kBlock * kBlock, (piece.goal + piece.bytes + kBlock - 1) / kBlock * kBlock});
    }
  }
  // The module did not come to its place nevertheless: there may be more to its constants than those that have names.
  // False if that cannot be the reason.
  bool LengthenConstants() {
    if (!has_constants_ || ++hidden_units_ > kHiddenUnits) return false;
    pieces_[0].bytes += kUnit;
    runs_ = RunsOf(pieces_);
    return true;
  }

 private:
  using RunPlace = std::vector<Run>::iterator;
  RunPlace RunOf(uint64_t place) {
    return std::find_if(runs_.begin(), runs_.end(), [place](const Run& run) { return run.Has(place); });
  }
  template <typename Iterator>
  bool HoldAll(Iterator begin, Iterator end);

  const VariablePlace& wanted_;
  Pads pads_;
  std::vector<Piece> pieces_;  // in the order in which the driver places them
  std::vector<Run> runs_;
  bool has_constants_ = false;
  int hidden_units_ = 0;
};

template <typename Iterator>
bool Arrangement::HoldAll(Iterator begin, Iterator end) {
  for (auto run = begin; run != end; ++run) {
    if (!pads_.Hold(run->goal, run->bytes + run->room)) {
      pads_.Release();
      return false;
    }
    if (run->limited) pads_.Limit(*run);
  }
  return true;
}

bool Arrangement::Make() {
  for (int tries = 0; tries < kMostArrangements; ++tries) {
    pads_.KeepFree(runs_);
    // What stands in for the one may come to where the other belongs; that one first, then.
    if (!HoldAll(runs_.begin(), runs_.end()) && !HoldAll(runs_.rbegin(), runs_.rend())) return false;
    pads_.Release(runs_);
    uint64_t instead = 0;
    size_t right = pads_.Rehearse(pieces_, &instead);
    // Once more: what has just been freed is the youngest now.
    if (right == pieces_.size()) right = pads_.Rehearse(pieces_, &instead);
    if (right == pieces_.size()) return true;
    // Another one's hole suits it better: its own gets shorter, or that one longer.
    const RunPlace own = RunOf(pieces_[right].goal), other = RunOf(instead);
    if (other == runs_.end()) continue;
    if (own == other) return false;  // they do not come in the order of their places
    if (!own->limited) {
      own->limited = true;
    } else {
      other->room = std::max(other->room + kUnit, own->bytes + own->room + kUnit - std::min(other->bytes, own->bytes));
      other->limited = false;
    }
  }
  return false;
}

}  // namespace

const VariablePlace* FindPlace(const VariablePlaces& places, uint64_t context) {
  for (const VariablePlace& place : places.contexts) {
    if (place.context == context) return &place;
  }
  return nullptr;
}

bool AreAt(const VariablePlaces& now, const VariablePlace& wanted) {
  const VariablePlace* const place = FindPlace(now, wanted.context);
  const auto same = [](const VariablePart& x, const VariablePart& y) { return x.lowest == y.lowest; };
  return place != nullptr &&
         std::equal(place->parts.begin(), place->parts.end(), wanted.parts.begin(), wanted.parts.end(), same);
}

bool AreAt(const VariablePlaces& now, const std::vector<VariablePlace>& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const VariablePlace& place) { return AreAt(now, place); });
}

bool SetPadSize(std::string* cubin, uint64_t bytes) {
  std::string changed = *cubin;
  const auto at = [&changed](uint64_t offset, uint64_t count) -> char* {
    return offset <= changed.size() && count <= changed.size() - offset ? &changed[offset] : nullptr;
  };
  const auto* const head = reinterpret_cast<const Elf64_Ehdr*>(at(0, sizeof(Elf64_Ehdr)));
  if (!head || memcmp(head->e_ident, ELFMAG, SELFMAG) != 0 || head->e_ident[EI_CLASS] != ELFCLASS64 ||
      head->e_shentsize != sizeof(Elf64_Shdr) || head->e_phentsize != sizeof(Elf64_Phdr)) {
    return false;
  }
  auto* const sections = reinterpret_cast<Elf64_Shdr*>(at(head->e_shoff, head->e_shnum * sizeof(Elf64_Shdr)));
  auto* const segments = reinterpret_cast<Elf64_Phdr*>(at(head->e_phoff, head->e_phnum * sizeof(Elf64_Phdr)));
  if (!sections || !segments) return false;
  // Its only memory without contents is the variable, which a segment ends with.
  int variable = 0, found = 0;
  for (int i = 0; i < head->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_NOBITS || !(sections[i].sh_flags & SHF_ALLOC) || sections[i].sh_size == 0) continue;
    if (variable) return false;
    variable = i;
  }
  if (!variable) return false;
  for (int i = 0; i < head->e_phnum; ++i) {
    Elf64_Phdr& segment = segments[i];
    if (segment.p_type != PT_LOAD || segment.p_offset + segment.p_filesz != sections[variable].sh_offset ||
        segment.p_memsz != segment.p_filesz + sections[variable].sh_size) {
      continue;
    }
    segment.p_memsz = segment.p_filesz + bytes;
    ++found;
  }
  if (found != 1) return false;
  sections[variable].sh_size = bytes;
  for (int i = 0; i < head->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const uint64_t count = sections[i].sh_size / sizeof(Elf64_Sym);
    auto* const symbols = reinterpret_cast<Elf64_Sym*>(at(sections[i].sh_offset, count * sizeof(Elf64_Sym)));
    if (!symbols) return false;
    for (uint64_t s = 0; s < count; ++s) {
      if (symbols[s].st_shndx != variable || ELF64_ST_TYPE(symbols[s].st_info) != STT_OBJECT) continue;
      symbols[s].st_size = bytes;
      ++found;
    }
  }
  if (found != 2) return false;
  cubin->swap(changed);
  return true;
}

VariablePlaces MoveVariablesTo(const DriverTable& driver, const VariablePlaces& now,
                               const std::vector<VariablePlace>& wanted,
                               const std::function<void(uint64_t context)>& enter, const std::function<void()>& unload,
                               const std::function<VariablePlaces()>& load) {
  if (AreAt(now, wanted)) return now;
  unload();
  std::list<Arrangement> all;
  for (const VariablePlace& place : wanted) {
    enter(place.context);
    all.emplace_back(driver, FindPlace(now, place.context), place);
  }
  VariablePlaces places;
  for (bool again = true; again;) {
    bool made = true;
    for (Arrangement& one : all) {
      enter(one.wanted().context);
      made = made && one.Make();
      for (const Arrangement& other : all) {
        if (&other != &one) one.Vacate(other);
      }
    }
    places = load();
    again = made && places.loaded && !AreAt(places, wanted);
    for (Arrangement& one : all) again = again && (AreAt(places, one.wanted()) || one.LengthenConstants());
    if (again) unload();
  }
  while (!all.empty()) {
    enter(all.front().wanted().context);
    all.pop_front();
  }
  return places;
}

}  // namespace cuda_remote::server
