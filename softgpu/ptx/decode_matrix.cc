// SPDX-License-Identifier: Apache-2.0
// Matrices of a warp: mma, wmma, ldmatrix, stmatrix, movmatrix.
//
// The threads of a warp meet at each of these (Meet::kMatrix), so that what one thread has written to memory before is
// there, and the last one to come does the work of all.
#include <cmath>
#include <memory>
#include <vector>

#include "softgpu/ptx/decoder.h"
#include "softgpu/ptx/matrix.h"

namespace cuda_remote::softgpu::ptx {
namespace {

constexpr uint32_t kAllLanes = 0xffffffff;
constexpr uint32_t kMostElements = 4096;  // of a matrix: 16 x 256

// A decoded instruction; Op::aux.
struct MatrixOp {
  // Does the work of the warp's 32 threads; false: the fault is raised.
  bool (*run)(const MatrixOp& matrix, const Op* op, Thread* threads) = nullptr;
  Tiles a, b, c, d;
  std::vector<int32_t> a_slots, b_slots, c_slots, d_slots;
  bool saturate = false;   // satfinite
  bool exclusive = false;  // b1: xor instead of and
  // Loads and stores.
  Where where = Where::kGeneric;
  int32_t address = 0, stride = 0;
  int64_t offset = 0;
  bool store = false, row_major = true, transposed = false;
  uint32_t count = 0;  // matrices of ldmatrix
};

const Op* RunMatrix(const Op* op, uint64_t* r, Thread* t) { return WaitForWarp(t, op, Meet::kMatrix, kAllLanes, 0); }

uint8_t* Reach(Thread* t, const Op* op, Where where, uint64_t address, uint32_t bytes, bool write) {
  switch (where) {
    case Where::kGlobal:
      return Pointer<Where::kGlobal>(t, op, address, bytes, write);
    case Where::kShared:
      return Pointer<Where::kShared>(t, op, address, bytes, write);
    default:
      return Pointer<Where::kGeneric>(t, op, address, bytes, write);
  }
}

// A thread's element, whose registers are `slots`.
uint64_t Take(const Tiles& tiles, const std::vector<int32_t>& slots, const uint64_t* r, uint32_t index) {
  const uint32_t packed = tiles.packed(), bits = ElementBits(tiles.element);
  const uint64_t word = r[slots[index / packed]];
  return bits == 64 ? word : word >> (bits * (index % packed)) & ((uint64_t{1} << bits) - 1);
}

// The matrix of all threads, as numbers: rows times columns, or the other way for kB, so that k is the inner index.
template <class T, class Number>
void Gather(const Tiles& tiles, const std::vector<int32_t>& slots, const Thread* threads, uint32_t quad,
            const Number& number, T* out) {
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t i = 0; i < tiles.count(); ++i) {
      const Place place = tiles.At(lane, i);
      if (place.quad != quad) continue;
      const uint32_t at =
          tiles.use == Use::kB ? place.column * tiles.shape.k + place.row : place.row * tiles.columns() + place.column;
      out[at] = number(Take(tiles, slots, threads[lane].r, i));
    }
  }
}

// Gives every thread its elements of the result. `bits` has them row by row.
template <class T>
void Scatter(const Tiles& tiles, const std::vector<int32_t>& slots, Thread* threads, uint32_t quad, const T* bits) {
  const uint32_t packed = tiles.packed();
  for (uint32_t lane = 0; lane < 32; ++lane) {
    uint64_t* const r = threads[lane].r;
    for (uint32_t i = 0; i < tiles.count(); ++i) {
      const Place place = tiles.At(lane, i);
      if (place.quad != quad) continue;
      const uint64_t value = bits[place.row * tiles.columns() + place.column];
      const uint32_t shift = ElementBits(tiles.element) * (i % packed);
      uint64_t& word = r[slots[i / packed]];
      word = shift == 0 ? value : word | value << shift;
    }
  }
}

bool MultiplyFloats(const MatrixOp& op, const Op*, Thread* threads) {
  const Shape shape = op.a.shape;
  double a[kMostElements], b[kMostElements], c[kMostElements / 4];
  uint32_t out[kMostElements / 4];
  const auto number = [](const Tiles& tiles) {
    return [element = tiles.element](uint64_t bits) { return NumberOf(element, bits); };
  };
  const bool bytes = ElementBits(op.a.element) == 8;
  for (uint32_t quad = 0; quad < (op.a.quads() ? 4u : 1u); ++quad) {
    Gather(op.a, op.a_slots, threads, quad, number(op.a), a);
    Gather(op.b, op.b_slots, threads, quad, number(op.b), b);
    Gather(op.c, op.c_slots, threads, quad, number(op.c), c);
    for (uint32_t row = 0; row < shape.m; ++row) {
      for (uint32_t column = 0; column < shape.n; ++column) {
        out[row * shape.n + column] = DotFloat(a + row * shape.k, b + column * shape.k, shape.k,
                                               c[row * shape.n + column], op.d.element, bytes ? 32 : 16);
      }
    }
    Scatter(op.d, op.d_slots, threads, quad, out);
  }
  return true;
}

// One fma after the other, along k.
bool MultiplyDoubles(const MatrixOp& op, const Op*, Thread* threads) {
  const Shape shape = op.a.shape;
  double a[kMostElements], b[kMostElements], c[kMostElements / 4];
  uint64_t out[kMostElements / 4];
  const auto number = [](uint64_t bits) { return Get<double>(bits); };
  Gather(op.a, op.a_slots, threads, 0, number, a);
  Gather(op.b, op.b_slots, threads, 0, number, b);
  Gather(op.c, op.c_slots, threads, 0, number, c);
  for (uint32_t row = 0; row < shape.m; ++row) {
    for (uint32_t column = 0; column < shape.n; ++column) {
      double sum = c[row * shape.n + column];
      for (uint32_t i = 0; i < shape.k; ++i) sum = std::fma(a[row * shape.k + i], b[column * shape.k + i], sum);
      out[row * shape.n + column] = Put(sum);
    }
  }
  Scatter(op.d, op.d_slots, threads, 0, out);
  return true;
}

bool MultiplyIntegers(const MatrixOp& op, const Op*, Thread* threads) {
  const Shape shape = op.a.shape;
  int32_t a[kMostElements], b[kMostElements], c[kMostElements / 4];
  uint32_t out[kMostElements / 4];
  const auto number = [](const Tiles& tiles) {
    return [element = tiles.element](uint64_t bits) {
      switch (element) {
        case Element::kS8:
          return int32_t(int8_t(bits));
        case Element::kS4:
          return int32_t(bits ^ 8) - 8;
        default:
          return int32_t(bits);
      }
    };
  };
  Gather(op.a, op.a_slots, threads, 0, number(op.a), a);
  Gather(op.b, op.b_slots, threads, 0, number(op.b), b);
  Gather(op.c, op.c_slots, threads, 0, number(op.c), c);
  const bool bits = op.a.element == Element::kB1;
  for (uint32_t row = 0; row < shape.m; ++row) {
    for (uint32_t column = 0; column < shape.n; ++column) {
      int64_t sum = c[row * shape.n + column];
      for (uint32_t i = 0; i < shape.k; ++i) {
        const int32_t x = a[row * shape.k + i], y = b[column * shape.k + i];
        sum += !bits ? x * y : op.exclusive ? x ^ y : x & y;
      }
      if (op.saturate) sum = sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum;
      out[row * shape.n + column] = uint32_t(sum);
    }
  }
  Scatter(op.d, op.d_slots, threads, 0, out);
  return true;
}

// wmma.load and wmma.store. The fragment may hold each element several times, as that of f16 does.
bool MoveFragment(const MatrixOp& matrix, const Op* op, Thread* threads) {
  const Tiles& tiles = matrix.d;
  const uint32_t bits = ElementBits(tiles.element), packed = tiles.packed(), registers = tiles.registers();
  const uint32_t bytes = bits < 8 ? 4 : bits / 8;
  const uint32_t step = bits < 8 ? packed : 1;  // elements that are moved at once
  for (uint32_t lane = 0; lane < 32; ++lane) {
    Thread* const t = &threads[lane];
    const uint64_t base = t->r[matrix.address] + uint64_t(matrix.offset), stride = uint32_t(t->r[matrix.stride]);
    for (uint32_t i = 0; i < tiles.count(); i += step) {
      const Place place = tiles.At(lane, i);
      const uint64_t element = matrix.row_major ? place.row * stride + place.column : place.column * stride + place.row;
      uint8_t* const at = Reach(t, op, matrix.where, base + element * bits / 8, bytes, matrix.store);
      if (at == nullptr) return false;
      if (matrix.store) {
        const uint64_t value = bits < 8 ? t->r[matrix.d_slots[i / packed]] : Take(tiles, matrix.d_slots, t->r, i);
        std::memcpy(at, &value, bytes);
        continue;
      }
      uint64_t value = 0;
      std::memcpy(&value, at, bytes);
      for (size_t copy = i / packed; copy < matrix.d_slots.size(); copy += registers) {
        uint64_t& word = t->r[matrix.d_slots[copy]];
        const uint32_t shift = bits < 8 ? 0 : bits * (i % packed);
        word = shift == 0 ? value : word | value << shift;
      }
    }
  }
  return true;
}

// Rows of eight 16-bit elements, whose addresses the threads give: eight for each matrix. A thread has two elements of
// a row, or of a column if the matrix is transposed.
bool MoveRows(const MatrixOp& matrix, const Op* op, Thread* threads) {
  uint8_t* rows[32];
  for (uint32_t i = 0; i < 8 * matrix.count; ++i) {
    Thread* const t = &threads[i];
    rows[i] = Reach(t, op, matrix.where, t->r[matrix.address] + uint64_t(matrix.offset), 16, matrix.store);
    if (rows[i] == nullptr) return false;
  }
  const std::vector<int32_t>& slots = matrix.d_slots;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t i = 0; i < matrix.count; ++i) {
      uint64_t& word = threads[lane].r[slots[i]];
      uint16_t pair[2];
      const uint32_t value = uint32_t(word);
      std::memcpy(pair, &value, sizeof(pair));
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = matrix.transposed ? 2 * (lane % 4) + half : lane / 4;
        const uint32_t column = matrix.transposed ? lane / 4 : 2 * (lane % 4) + half;
        uint8_t* const at = rows[8 * i + row] + 2 * column;
        if (matrix.store) {
          std::memcpy(at, &pair[half], 2);
        } else {
          std::memcpy(&pair[half], at, 2);
        }
      }
      if (!matrix.store) word = pair[0] | uint32_t(pair[1]) << 16;
    }
  }
  return true;
}

bool Transpose(const MatrixOp& matrix, const Op*, Thread* threads) {
  uint16_t element[8][8];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t word = uint32_t(threads[lane].r[matrix.a_slots[0]]);
    element[lane / 4][2 * (lane % 4)] = uint16_t(word);
    element[lane / 4][2 * (lane % 4) + 1] = uint16_t(word >> 16);
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    threads[lane].r[matrix.d_slots[0]] =
        element[2 * (lane % 4)][lane / 4] | uint32_t(element[2 * (lane % 4) + 1][lane / 4]) << 16;
  }
  return true;
}

// ------------------------------------------------------------------------------------------------------------ decoding

bool Slots(Decoder& d, size_t operand, bool destination, Type type, std::vector<int32_t>* slots) {
  const Operand& all = d.in().operands[operand];
  const std::vector<Operand> single = {all};
  for (const Operand& one : all.kind == Operand::Kind::kVector ? all.elements : single) {
    slots->push_back(destination ? d.Destination(one) : d.Source(one, type));
  }
  return true;
}

// The type that a register of such elements has, for immediate operands.
Type RegisterType(Element element) {
  return element == Element::kF64 ? Type::kF64 : element == Element::kF32 ? Type::kF32 : Type::kB32;
}

bool EmitMatrix(Decoder& d, std::unique_ptr<MatrixOp> matrix) {
  Op& op = d.Emit(RunMatrix);
  op.aux = matrix.get();
  op.cache = d.NextCache();
  d.code().owned.push_back(std::shared_ptr<void>(std::move(matrix)));
  return true;
}

// Fragments with as many registers as the shape and the types give; `repeated`: or a multiple of them.
bool CheckRegisters(Decoder& d, const Tiles& tiles, const std::vector<int32_t>& slots, bool repeated) {
  if (tiles.shape.m * tiles.shape.k > kMostElements || tiles.shape.n * tiles.shape.k > kMostElements ||
      tiles.shape.m * tiles.shape.n > kMostElements / 4 || tiles.count() == 0 || tiles.count() % tiles.packed() != 0) {
    return d.Unsupported();
  }
  const size_t wanted = tiles.registers();
  const bool fits = repeated ? !slots.empty() && slots.size() % wanted == 0 : slots.size() == wanted;
  return fits || d.Fail("wrong number of registers for this shape");
}

// Combinations that the PTX manual has. `k` of an element in one block of four lanes goes into every shape.
bool IsShape(const MatrixOp& op, bool wmma) {
  struct Known {
    Element element;
    bool wmma;
    uint32_t m, n, k;
  };
  using E = Element;
  static constexpr Known kKnown[] = {
      {E::kF16, false, 8, 8, 4},    {E::kF16, false, 16, 8, 8},   {E::kF16, false, 16, 8, 16},
      {E::kBf16, false, 16, 8, 8},  {E::kBf16, false, 16, 8, 16}, {E::kTf32, false, 16, 8, 4},
      {E::kTf32, false, 16, 8, 8},  {E::kF64, false, 8, 8, 4},    {E::kF64, false, 16, 8, 4},
      {E::kF64, false, 16, 8, 8},   {E::kF64, false, 16, 8, 16},  {E::kE4m3, false, 16, 8, 16},
      {E::kE4m3, false, 16, 8, 32}, {E::kS8, false, 8, 8, 16},    {E::kS8, false, 16, 8, 16},
      {E::kS8, false, 16, 8, 32},   {E::kS4, false, 8, 8, 32},    {E::kS4, false, 16, 8, 32},
      {E::kS4, false, 16, 8, 64},   {E::kB1, false, 8, 8, 128},   {E::kB1, false, 16, 8, 128},
      {E::kB1, false, 16, 8, 256},  {E::kF16, true, 16, 16, 16},  {E::kF16, true, 32, 8, 16},
      {E::kF16, true, 8, 32, 16},   {E::kBf16, true, 16, 16, 16}, {E::kBf16, true, 32, 8, 16},
      {E::kBf16, true, 8, 32, 16},  {E::kTf32, true, 16, 16, 8},  {E::kF64, true, 8, 8, 4},
      {E::kS8, true, 16, 16, 16},   {E::kS8, true, 32, 8, 16},    {E::kS8, true, 8, 32, 16},
      {E::kS4, true, 8, 8, 32},     {E::kB1, true, 8, 8, 128}};
  const auto family = [](Element element) {
    switch (element) {
      case E::kU8:
        return E::kS8;
      case E::kU4:
        return E::kS4;
      case E::kE5m2:
        return E::kE4m3;
      default:
        return element;
    }
  };
  if (family(op.a.element) != family(op.b.element)) return false;
  for (const Known& known : kKnown) {
    if (known.element == family(op.a.element) && known.wmma == wmma && known.m == op.a.shape.m &&
        known.n == op.a.shape.n && known.k == op.a.shape.k) {
      return true;
    }
  }
  return false;
}

// The shape and the element types among the modifiers, in their order.
bool FindShape(Decoder& d, Shape* shape, std::vector<Element>* elements) {
  bool found = false;
  for (const std::string& modifier : d.in().modifiers) {
    if (ParseShape(modifier, shape)) {
      found = true;
    } else if (const Element element = ParseElement(modifier); element != Element::kNone) {
      elements->push_back(element);
    }
  }
  return found || d.Unsupported();
}

constexpr char kShapes[] =
    "m8n8k4 m8n8k16 m8n8k32 m8n8k128 m16n8k4 m16n8k8 m16n8k16 m16n8k32 m16n8k64 m16n8k128 m16n8k256 m16n16k16 "
    "m32n8k16 m8n32k16 m16n16k8 s4 u4 b1 ";

// mma and wmma.mma.
bool DecodeMultiply(Decoder& d, bool wmma) {
  const std::string allowed = std::string(kShapes) + "mma sync aligned row col satfinite xor and popc rn kind::f8f6f4";
  if (!d.Allow(allowed) || !d.Operands(4, 4)) return false;
  auto matrix = std::make_unique<MatrixOp>();
  Shape shape;
  std::vector<Element> elements;
  if (!FindShape(d, &shape, &elements)) return false;
  // d, a, b, c; wmma leaves those of f16 products out.
  if (elements.size() == 2 && wmma) elements = {elements[0], Element::kF16, Element::kF16, elements[1]};
  if (elements.size() != 4) return d.Unsupported();
  std::vector<std::string> layouts;
  for (const std::string& modifier : d.in().modifiers) {
    if (modifier == "row" || modifier == "col") layouts.push_back(modifier);
  }
  if (layouts.size() != 2) return d.Unsupported();
  Tiles* const all[] = {&matrix->d, &matrix->a, &matrix->b, &matrix->c};
  for (int i = 0; i < 4; ++i) {
    all[i]->shape = shape;
    all[i]->element = elements[size_t(i)];
    all[i]->wmma = wmma;
    all[i]->use = i == 1 ? Use::kA : i == 2 ? Use::kB : Use::kC;
  }
  matrix->a.row_major = layouts[0] == "row";
  matrix->b.row_major = layouts[1] == "row";
  // Only the first of all, for GPUs before these, has its fragments in more than one order.
  if (!wmma && !matrix->a.quads() && (!matrix->a.row_major || matrix->b.row_major)) return d.Unsupported();
  if (!IsShape(*matrix, wmma)) return d.Unsupported();
  const Element a = matrix->a.element, c = matrix->c.element, result = matrix->d.element;
  if (a == Element::kF64) {
    if (c != Element::kF64 || result != Element::kF64) return d.Unsupported();
    matrix->run = MultiplyDoubles;
  } else if (IsInteger(a)) {
    if (c != Element::kS32 || result != Element::kS32) return d.Unsupported();
    if ((a == Element::kB1) != d.Has("popc")) return d.Unsupported();
    matrix->run = MultiplyIntegers;
  } else {
    const bool narrow = a == Element::kF16 || a == Element::kE4m3 || a == Element::kE5m2;  // may have f16 sums
    for (const Element sum : {c, result}) {
      if (sum != Element::kF32 && (sum != Element::kF16 || !narrow)) return d.Unsupported();
    }
    matrix->run = MultiplyFloats;
  }
  matrix->saturate = d.Has("satfinite");
  matrix->exclusive = d.Has("xor");
  if (!Slots(d, 0, true, Type::kB32, &matrix->d_slots) || !Slots(d, 1, false, RegisterType(a), &matrix->a_slots) ||
      !Slots(d, 2, false, RegisterType(a), &matrix->b_slots) ||
      !Slots(d, 3, false, RegisterType(c), &matrix->c_slots)) {
    return false;
  }
  if (!CheckRegisters(d, matrix->a, matrix->a_slots, wmma) || !CheckRegisters(d, matrix->b, matrix->b_slots, wmma) ||
      !CheckRegisters(d, matrix->c, matrix->c_slots, false) || !CheckRegisters(d, matrix->d, matrix->d_slots, false)) {
    return false;
  }
  return EmitMatrix(d, std::move(matrix));
}

bool Address(Decoder& d, size_t operand, MatrixOp* matrix) {
  const Where space = d.Has("global")                           ? Where::kGlobal
                      : d.Has("shared") || d.Has("shared::cta") ? Where::kShared
                                                                : Where::kGeneric;
  Decoder::Address address;
  if (!d.ResolveAddress(d.in().operands[operand], space, false, &address)) return false;
  if (address.where == Where::kParam || address.where == Where::kLocal) return d.Unsupported();
  matrix->where = address.where;
  matrix->address = address.slot;
  matrix->offset = address.offset;
  return true;
}

bool DecodeFragment(Decoder& d) {
  const std::string allowed =
      std::string(kShapes) + "load store a b c d sync aligned row col global shared shared::cta";
  if (!d.Allow(allowed) || !d.Operands(2, 3)) return false;
  auto matrix = std::make_unique<MatrixOp>();
  Tiles& tiles = matrix->d;
  std::vector<Element> elements;
  if (!FindShape(d, &tiles.shape, &elements)) return false;
  if (elements.size() != 1) return d.Unsupported();
  tiles.element = elements[0];
  tiles.wmma = true;
  tiles.use = d.Has("a") ? Use::kA : d.Has("b") ? Use::kB : Use::kC;
  matrix->run = MoveFragment;
  matrix->store = d.Has("store");
  matrix->row_major = d.Has("row");
  const size_t data = matrix->store ? 1 : 0;
  if (!Slots(d, data, !matrix->store, RegisterType(tiles.element), &matrix->d_slots) ||
      !Address(d, 1 - data, matrix.get())) {
    return false;
  }
  if (!CheckRegisters(d, tiles, matrix->d_slots, tiles.use != Use::kC)) return false;
  const bool bits = ElementBits(tiles.element) < 8;
  // Elements of less than a byte lie along k in memory, too.
  if (bits && matrix->row_major != (tiles.use == Use::kA)) return d.Unsupported();
  matrix->stride =
      d.in().operands.size() == 3 ? d.Src(2, Type::kU32) : d.Const(matrix->row_major ? tiles.columns() : tiles.rows());
  return EmitMatrix(d, std::move(matrix));
}

bool DecodeWmma(Decoder& d) { return d.Has("mma") ? DecodeMultiply(d, true) : DecodeFragment(d); }
bool DecodeMma(Decoder& d) { return DecodeMultiply(d, false); }

bool DecodeRows(Decoder& d) {
  if (!d.Allow("sync aligned m8n8 x1 x2 x4 trans shared shared::cta") || !d.Operands(2, 2) || !d.Has("m8n8") ||
      d.TypeFromEnd() != Type::kB16) {
    return d.Unsupported();
  }
  auto matrix = std::make_unique<MatrixOp>();
  matrix->run = MoveRows;
  matrix->store = d.in().opcode == "stmatrix";
  matrix->transposed = d.Has("trans");
  matrix->count = d.Has("x4") ? 4 : d.Has("x2") ? 2 : 1;
  const size_t data = matrix->store ? 1 : 0;
  if (!Slots(d, data, !matrix->store, Type::kB32, &matrix->d_slots) || !Address(d, 1 - data, matrix.get()))
    return false;
  if (matrix->d_slots.size() != matrix->count) return d.Fail("wrong number of registers");
  return EmitMatrix(d, std::move(matrix));
}

bool DecodeMovmatrix(Decoder& d) {
  if (!d.Allow("sync aligned m8n8 trans") || !d.Operands(2, 2) || d.TypeFromEnd() != Type::kB16) return d.Unsupported();
  auto matrix = std::make_unique<MatrixOp>();
  matrix->run = Transpose;
  if (!Slots(d, 0, true, Type::kB32, &matrix->d_slots) || !Slots(d, 1, false, Type::kB32, &matrix->a_slots))
    return false;
  return EmitMatrix(d, std::move(matrix));
}

}  // namespace

bool FinishMatrix(Block* block, uint32_t warp, uint32_t members) {
  Thread* const threads = &block->threads[size_t{warp} * 32];
  const Op* const op = threads[__builtin_ctz(members)].pc;
  Thread* const first = &threads[__builtin_ctz(members)];
  if (members != kAllLanes) {
    Raise(first, op, Fault::kIllegalInstruction, "matrix instructions need all 32 threads of a warp");
    return false;
  }
  for (uint32_t lane = 1; lane < 32; ++lane) {
    if (threads[lane].pc == op) continue;
    Raise(first, op, Fault::kIllegalInstruction, "the threads of the warp are at different matrix instructions");
    return false;
  }
  const auto* const matrix = static_cast<const MatrixOp*>(op->aux);
  return matrix->run(*matrix, op, threads);
}

void AddMatrixOps(DecodeTable* table) {
  (*table)["mma"] = DecodeMma;
  (*table)["wmma"] = DecodeWmma;
  for (const char* name : {"ldmatrix", "stmatrix"}) (*table)[name] = DecodeRows;
  (*table)["movmatrix"] = DecodeMovmatrix;
}

}  // namespace cuda_remote::softgpu::ptx
