// SPDX-License-Identifier: Apache-2.0
// Textures and surfaces through their objects and through references: tex, tld4, suld, sust, txq, suq.
#include <algorithm>

#include "softgpu/ptx/decoder.h"
#include "softgpu/ptx/texture.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// What an instruction asks for; in Op::imm.
union Ask {
  int64_t imm;
  struct {
    uint8_t dimensions;
    bool layered;
    bool integers;    // coordinates
    bool level;       // the last slot of `more` is the level
    uint8_t bytes;    // surfaces: of one component; tld4: the component
    uint8_t count;    // components
    uint8_t outside;  // surfaces: what an address outside means
    bool cube;
  } what;
};
static_assert(sizeof(Ask) == sizeof(int64_t), "");

enum Outside : uint8_t { kTrap, kClamp, kZero };

const Texture* TextureOf(const Op* op, uint64_t* r, Thread* t) {
  TextureUnit* unit = t->block->launch->options->textures;
  const Texture* texture = unit != nullptr ? unit->FindTexture(r[op->a]) : nullptr;
  if (texture == nullptr) Raise(t, op, Fault::kIllegalAddress, "no texture object has this handle");
  return texture;
}

// Checks elements in device memory as any access of a kernel is checked.
class Checked : public ElementAccess {
 public:
  Checked(Thread* thread, const Op* op) : thread_(thread), op_(op) {}
  bool MayRead(const uint8_t* element, uint32_t bytes) override {
    // One fault is enough.
    if (!failed_) failed_ = GlobalRange(thread_, op_, uint64_t(element), bytes, false) == nullptr;
    return !failed_;
  }
  bool failed() const { return failed_; }

 private:
  Thread* const thread_;
  const Op* const op_;
  bool failed_ = false;
};

// more: destinations (4), layer, coordinates (3), level.
const Op* RunTex(const Op* op, uint64_t* r, Thread* t) {
  const Texture* texture = TextureOf(op, r, t);
  if (texture == nullptr) return nullptr;
  const auto ask = Ask{op->imm}.what;
  const int32_t* slots = op->more + 4;
  const uint32_t layer = ask.layered ? uint32_t(r[slots[0]]) : 0;
  Texel texel;
  Checked access(t, op);
  if (ask.cube != texture->cube) {
    return Raise(t, op, Fault::kIllegalAddress, "the texture object is a cube where none is expected, or is none");
  }
  if (ask.integers) {
    int32_t at[3] = {};
    for (int i = 0; i < ask.dimensions; ++i) at[i] = Get<int32_t>(r[slots[1 + i]]);
    texel = Fetch(*texture, ask.dimensions, at, layer, ask.level ? uint32_t(r[slots[4]]) : 0, &access);
  } else {
    float at[3] = {};
    for (int i = 0; i < ask.dimensions; ++i) at[i] = Get<float>(r[slots[1 + i]]);
    const float level = ask.level ? Get<float>(r[slots[4]]) : 0.0f;
    texel =
        ask.cube ? SampleCube(*texture, at, layer, level) : Sample(*texture, ask.dimensions, at, layer, level, &access);
  }
  if (access.failed()) return nullptr;
  for (int i = 0; i < 4; ++i) r[op->more[i]] = texel.word[i];
  return op + 1;
}

const Op* RunGather(const Op* op, uint64_t* r, Thread* t) {
  const Texture* texture = TextureOf(op, r, t);
  if (texture == nullptr) return nullptr;
  const float at[2] = {Get<float>(r[op->more[5]]), Get<float>(r[op->more[6]])};
  Checked access(t, op);
  const Texel texel = Gather(*texture, at, Ask{op->imm}.what.bytes, &access);
  if (access.failed()) return nullptr;
  for (int i = 0; i < 4; ++i) r[op->more[i]] = texel.word[i];
  return op + 1;
}

// Where a surface access goes. *where is null if it goes nowhere. False: the fault is raised.
bool SurfacePlace(const Op* op, uint64_t* r, Thread* t, const int32_t* slots, uint8_t** where) {
  *where = nullptr;
  TextureUnit* unit = t->block->launch->options->textures;
  const Surface* surface = unit != nullptr ? unit->FindSurface(r[op->a]) : nullptr;
  if (surface == nullptr) {
    Raise(t, op, Fault::kIllegalAddress, "no surface object has this handle");
    return false;
  }
  const auto ask = Ask{op->imm}.what;
  const Image& image = surface->image;
  const int64_t bytes = int64_t{ask.bytes} * ask.count;
  // x in bytes, then y, then the slice or layer.
  int64_t at[3] = {0, 0, 0};
  for (int i = 0; i < ask.dimensions; ++i) at[i] = Get<int32_t>(r[slots[1 + i]]);
  if (ask.layered) at[2] = int64_t(uint32_t(r[slots[0]]));
  const int64_t row = int64_t(image.width * surface->element_bytes);
  const int64_t most[3] = {row - bytes, int64_t(image.height) - 1, int64_t(image.depth) - 1};
  if (most[0] < 0 || at[0] % bytes != 0) {
    Raise(t, op, Fault::kMisaligned, "a surface access that does not fit the surface's elements");
    return false;
  }
  for (int i = 0; i < 3; ++i) {
    if (at[i] >= 0 && at[i] <= most[i]) continue;
    if (ask.outside == kZero) return true;
    if (ask.outside == kTrap) {
      Raise(t, op, Fault::kTrap, "outside of the surface");
      return false;
    }
    at[i] = std::clamp<int64_t>(at[i], 0, most[i]);
  }
  *where = image.data + uint64_t(at[2]) * image.slice_bytes + uint64_t(at[1]) * image.row_bytes + uint64_t(at[0]);
  return true;
}

// more: components (4), layer, coordinates (3).
const Op* RunSurfaceLoad(const Op* op, uint64_t* r, Thread* t) {
  uint8_t* from;
  if (!SurfacePlace(op, r, t, op->more + 4, &from)) return nullptr;
  const auto ask = Ask{op->imm}.what;
  for (int i = 0; i < ask.count; ++i) {
    uint64_t value = 0;
    if (from != nullptr) std::memcpy(&value, from + i * ask.bytes, ask.bytes);
    r[op->more[i]] = value;
  }
  return op + 1;
}

const Op* RunSurfaceStore(const Op* op, uint64_t* r, Thread* t) {
  uint8_t* to;
  if (!SurfacePlace(op, r, t, op->more + 4, &to)) return nullptr;
  const auto ask = Ask{op->imm}.what;
  for (int i = 0; to != nullptr && i < ask.count; ++i) std::memcpy(to + i * ask.bytes, &r[op->more[i]], ask.bytes);
  return op + 1;
}

enum Question : int64_t { kWidth, kHeight, kDepth, kLevels };

const Op* RunQuery(const Op* op, uint64_t* r, Thread* t) {
  const Image* image = nullptr;
  size_t levels = 1;
  if (op->n == 0) {
    const Texture* texture = TextureOf(op, r, t);
    if (texture == nullptr) return nullptr;
    image = &texture->levels[0];
    levels = texture->levels.size();
  } else {
    TextureUnit* unit = t->block->launch->options->textures;
    const Surface* surface = unit != nullptr ? unit->FindSurface(r[op->a]) : nullptr;
    if (surface == nullptr) return Raise(t, op, Fault::kIllegalAddress, "no surface object has this handle");
    image = &surface->image;
  }
  const uint64_t answers[] = {image->width, image->height, image->depth, levels};
  r[op->d] = answers[op->imm];
  return op + 1;
}

// The slot of the handle: an object's number in a register, or the address of a reference.
bool DecodeHandle(Decoder& d, const Operand& operand, int32_t* handle) {
  using Kind = Operand::Kind;
  const bool found = operand.kind == Kind::kAddress && !operand.elements.empty() && operand.offset == 0;
  const Kind kind = found ? operand.elements[0].kind : Kind::kNone;
  if (kind != Kind::kReg && kind != Kind::kName) return d.Fail("a texture or surface is expected");
  *handle = d.Source(operand.elements[0], Type::kU64);
  return true;
}

// The handle's slot and those of the coordinates out of [handle, {coordinates}]: layer, then three.
bool DecodePlace(Decoder& d, const Operand& operand, bool layered, int dimensions, Type coordinate, int32_t* handle,
                 std::vector<int32_t>* slots) {
  if (!DecodeHandle(d, operand, handle)) return false;
  if (operand.elements.size() != 2) return d.Fail("samplers apart from textures are not supported");
  const Operand& vector = operand.elements[1];
  const size_t first = layered ? 1 : 0;
  const bool single = vector.kind == Operand::Kind::kReg && first + size_t(dimensions) == 1;
  if (!single && (vector.kind != Operand::Kind::kVector || vector.elements.size() < first + size_t(dimensions))) {
    return d.Fail("wrong number of coordinates");
  }
  slots->push_back(layered ? d.Source(vector.elements[0], Type::kU32) : d.Const(0));
  for (int i = 0; i < 3; ++i) {
    slots->push_back(i >= dimensions ? d.Const(0)
                     : single        ? d.Source(vector, coordinate)
                                     : d.Source(vector.elements[first + size_t(i)], coordinate));
  }
  return true;
}

bool Geometry(Decoder& d, int* dimensions, bool* layered) {
  *layered = d.Has("a1d") || d.Has("a2d") || d.Has("acube");
  *dimensions = d.Has("1d") || d.Has("a1d")                      ? 1
                : d.Has("2d") || d.Has("a2d")                    ? 2
                : d.Has("3d") || d.Has("cube") || d.Has("acube") ? 3
                                                                 : 0;
  return *dimensions != 0 || d.Unsupported();
}

// Where the components go or come from: always four slots, those beyond the vector are of no use to anybody.
bool DecodeComponents(Decoder& d, const Operand& operand, bool load, Type type, std::vector<int32_t>* slots) {
  const std::vector<Operand> single = {operand};
  const std::vector<Operand>& all = operand.kind == Operand::Kind::kVector ? operand.elements : single;
  if (all.empty() || all.size() > 4) return d.Fail("wrong number of elements");
  for (const Operand& one : all) slots->push_back(load ? d.Destination(one) : d.Source(one, type));
  while (slots->size() < 4) slots->push_back(d.Temp());
  return true;
}

bool DecodeTex(Decoder& d) {
  if (!d.Allow("1d 2d 3d a1d a2d cube acube v4 level base") || !d.Operands(2, 3)) return false;
  int dimensions;
  bool layered;
  if (!Geometry(d, &dimensions, &layered)) return false;
  const Type coordinate = d.TypeFromEnd(0), result = d.TypeFromEnd(1);
  const bool plain = result == Type::kF32 || result == Type::kS32 || result == Type::kU32;
  if ((coordinate != Type::kF32 && coordinate != Type::kS32) || !plain || !d.Has("v4")) return d.Unsupported();
  if (d.Has("level") != (d.in().operands.size() == 3)) return d.Unsupported();
  std::vector<int32_t> slots;
  int32_t handle = 0;
  if (!DecodeComponents(d, d.in().operands[0], true, result, &slots)) return false;
  if (!DecodePlace(d, d.in().operands[1], layered, dimensions, coordinate, &handle, &slots)) return false;
  slots.push_back(d.Has("level") ? d.Src(2, coordinate) : d.Const(0));
  Ask ask = {};
  ask.what.dimensions = uint8_t(dimensions);
  ask.what.layered = layered;
  ask.what.integers = coordinate == Type::kS32;
  ask.what.level = d.Has("level");
  ask.what.cube = d.Has("cube") || d.Has("acube");
  if (ask.what.cube && ask.what.integers) return d.Unsupported();
  const int32_t* more = d.List(slots);
  Op& op = d.Emit(RunTex, 0, handle);
  op.imm = ask.imm;
  op.more = more;
  op.cache = d.NextCache();
  return true;
}

bool DecodeGather(Decoder& d) {
  if (!d.Allow("r g b a 2d v4") || !d.Operands(2, 2) || !d.Has("2d") || d.TypeFromEnd(0) != Type::kF32) {
    return d.Unsupported();
  }
  std::vector<int32_t> slots;
  int32_t handle = 0;
  if (!DecodeComponents(d, d.in().operands[0], true, d.TypeFromEnd(1), &slots)) return false;
  if (!DecodePlace(d, d.in().operands[1], false, 2, Type::kF32, &handle, &slots)) return false;
  Ask ask = {};
  ask.what.bytes = d.Has("g") ? 1 : d.Has("b") ? 2 : d.Has("a") ? 3 : 0;
  const int32_t* more = d.List(slots);
  Op& op = d.Emit(RunGather, 0, handle);
  op.imm = ask.imm;
  op.more = more;
  return true;
}

bool DecodeSurface(Decoder& d) {
  if (!d.Allow("b 1d 2d 3d a1d a2d v2 v4 trap clamp zero ca cg cs cv wb wt") || !d.Has("b") || !d.Operands(2, 2)) {
    return d.Unsupported();
  }
  const bool load = d.in().opcode == "suld";
  int dimensions;
  bool layered;
  if (!Geometry(d, &dimensions, &layered)) return false;
  const Type type = d.TypeFromEnd();
  const size_t count = d.Has("v4") ? 4 : d.Has("v2") ? 2 : 1;
  const uint32_t bytes = SizeOf(type);
  if (bytes == 0 || bytes > 8 || count * bytes > 16) return d.Unsupported();
  const Operand& data = d.in().operands[load ? 0 : 1];
  if ((data.kind == Operand::Kind::kVector ? data.elements.size() : 1) != count)
    return d.Fail("wrong number of elements");
  std::vector<int32_t> slots;
  int32_t handle = 0;
  if (!DecodeComponents(d, data, load, type, &slots)) return false;
  if (!DecodePlace(d, d.in().operands[load ? 1 : 0], layered, dimensions, Type::kS32, &handle, &slots)) return false;
  Ask ask = {};
  ask.what.dimensions = uint8_t(dimensions);
  ask.what.layered = layered;
  ask.what.bytes = uint8_t(bytes);
  ask.what.count = uint8_t(count);
  ask.what.outside = d.Has("zero") ? kZero : d.Has("clamp") ? kClamp : kTrap;
  const int32_t* more = d.List(slots);
  Op& op = d.Emit(load ? RunSurfaceLoad : RunSurfaceStore, 0, handle);
  op.imm = ask.imm;
  op.more = more;
  return true;
}

bool DecodeQuery(Decoder& d) {
  if (!d.Allow("width height depth array_size num_mipmap_levels") || !d.Operands(2, 2)) return d.Unsupported();
  int32_t handle = 0;
  if (!DecodeHandle(d, d.in().operands[1], &handle)) return false;
  const int32_t destination = d.Dst(0);
  Op& op = d.Emit(RunQuery, destination, handle);
  op.imm = d.Has("width")                          ? kWidth
           : d.Has("height")                       ? kHeight
           : d.Has("depth") || d.Has("array_size") ? kDepth
                                                   : kLevels;
  op.n = d.in().opcode == "txq" ? 0 : 1;
  return true;
}

}  // namespace

void AddTextureOps(DecodeTable* table) {
  (*table)["tex"] = DecodeTex;
  (*table)["tld4"] = DecodeGather;
  for (const char* name : {"suld", "sust"}) (*table)[name] = DecodeSurface;
  for (const char* name : {"txq", "suq"}) (*table)[name] = DecodeQuery;
}

}  // namespace cuda_remote::softgpu::ptx
