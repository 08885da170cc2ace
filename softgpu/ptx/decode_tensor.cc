// SPDX-License-Identifier: Apache-2.0
// cp.async.bulk.tensor and cp.reduce.async.bulk.tensor, carried out at once: boxes of tensors in global memory, tiled
// mode.
#include <algorithm>
#include <iterator>

#include "softgpu/ptx/mbarrier.h"
#include "softgpu/ptx/tensor_map.h"

namespace cuda_remote::softgpu::ptx {

uint32_t TensorBytes(TensorType type) {
  switch (type) {
    case TensorType::kU8:
      return 1;
    case TensorType::kU16:
    case TensorType::kF16:
    case TensorType::kBf16:
      return 2;
    case TensorType::kU32:
    case TensorType::kS32:
    case TensorType::kF32:
      return 4;
    case TensorType::kU64:
    case TensorType::kS64:
    case TensorType::kF64:
      return 8;
    default:
      return 0;
  }
}

bool IsTensorMap(const TensorMap& map) {
  if (map.magic != TensorMap::kMagic || map.rank == 0 || map.rank > kTensorDimensions ||
      map.type >= TensorType::kCount || map.nan > 1 ||
      (map.span != 0 && map.span != 32 && map.span != 64 && map.span != 128)) {
    return false;
  }
  for (uint32_t i = 0; i < kTensorDimensions; ++i) {
    const bool used = i < map.rank;
    if (map.box[i] == 0 || map.box[i] > (used ? kTensorBox : 1) || map.step[i] == 0 || map.step[i] > kTensorStep ||
        map.dim[i] == 0 || map.dim[i] > (used ? uint64_t{1} << 32 : 1)) {
      return false;
    }
    if (i > 0 && (map.stride[i - 1] >> 40 != 0 || map.stride[i - 1] % 16 != 0)) return false;
  }
  return map.address % 16 == 0 && map.step[0] == 1 && (map.span == 0 || map.box[0] * TensorBytes(map.type) == map.span);
}

namespace {

// Op::more of a tensor copy, which is at op->a + imm.
enum : int {
  kShared,        // slot of the address in shared memory
  kSharedOffset,  // slot of what is added to it
  kBarrier,       // of a load: the same of the barrier
  kBarrierOffset,
  kBlocks,       // slot of the mask of blocks, -1: none
  kCoordinates,  // slots, as many as dimensions
};

// Op::n: the low 4 bits are the number of dimensions, those above the reduction of a store.
enum Reduction : uint16_t { kStore, kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor };
constexpr const char* kReductions[] = {"", "add", "min", "max", "inc", "dec", "and", "or", "xor"};

bool ReadMap(Thread* t, const Op* op, uint64_t address, TensorMap* map) {
  for (uint32_t half = 0; half < 2; ++half) {
    const uint8_t* from = Pointer<Where::kGeneric>(t, op, address + half * 64, 64, false);
    if (from == nullptr) return false;
    std::memcpy(reinterpret_cast<uint8_t*>(map) + half * 64, from, 64);
  }
  if (!IsTensorMap(*map)) {
    Raise(t, op, Fault::kInvalidCode, "the bytes at the address are no tensor map");
    return false;
  }
  if (map->rank != (op->n & 15)) {
    Raise(t, op, Fault::kInvalidCode, "the tensor map has another number of dimensions");
    return false;
  }
  return true;
}

// A box at a place: calls `row(offset, elements, before, address)` for each of its rows in order. `offset`: of the
// row's first byte in the packed box; the row has `elements` elements from `before` on inside of the tensor, at
// `address`.
template <class F>
bool ForEachRow(const TensorMap& map, const int32_t* at, F row) {
  const uint32_t bytes = TensorBytes(map.type);
  uint64_t count[kTensorDimensions];
  for (uint32_t i = 0; i < kTensorDimensions; ++i) count[i] = (map.box[i] + map.step[i] - 1u) / map.step[i];
  const int64_t begin = std::max<int64_t>(at[0], 0);
  const int64_t end = std::min<int64_t>(int64_t(at[0]) + map.box[0], int64_t(map.dim[0]));
  const uint64_t rows = count[1] * count[2] * count[3] * count[4];
  for (uint64_t index = 0; index < rows; ++index) {
    uint64_t rest = index, address = map.address;
    bool inside = begin < end;
    for (uint32_t i = 1; i < kTensorDimensions; ++i) {
      const int64_t place = int64_t(at[i]) + int64_t(rest % count[i] * map.step[i]);
      rest /= count[i];
      inside &= place >= 0 && place < int64_t(map.dim[i]);
      address += uint64_t(place) * map.stride[i - 1];
    }
    const uint64_t elements = inside ? uint64_t(end - begin) : 0, before = inside ? uint64_t(begin - at[0]) : 0;
    if (!row(index * map.box[0] * bytes, elements, before, address + uint64_t(begin) * bytes)) return false;
  }
  return true;
}

uint64_t BoxBytes(const TensorMap& map) {
  uint64_t bytes = TensorBytes(map.type);
  for (uint32_t i = 0; i < kTensorDimensions; ++i) bytes *= (map.box[i] + map.step[i] - 1u) / map.step[i];
  return bytes;
}

// Where a byte of the packed box lies when the box begins at `shared`: pieces of 16 bytes change places within a row,
// depending on the address.
uint64_t Swizzled(const TensorMap& map, uint64_t shared, uint64_t offset) {
  if (map.span == 0) return offset;
  const uint64_t address = shared + offset;
  return (address ^ ((address >> 7 & (map.span / 16 - 1u)) << 4)) - shared;
}

// Bits of what lies outside of the tensor.
uint64_t Outside(const TensorMap& map) {
  if (map.nan == 0) return 0;
  switch (map.type) {
    case TensorType::kF16:
    case TensorType::kBf16:
      return 0x7fff;
    case TensorType::kF32:
      return 0x7fffffff;
    default:
      return 0x7fffffffffffffff;
  }
}

struct Box {
  TensorMap map;
  int32_t at[kTensorDimensions] = {0, 0, 0, 0, 0};
  uint64_t shared = 0;  // address of its place in shared memory
  uint64_t offset = 0;  // the same in the block that it is in
  uint64_t bytes = 0;
};

bool ReadBox(const Op* op, uint64_t* r, Thread* t, Box* box) {
  if (!ReadMap(t, op, r[op->a] + uint64_t(op->imm), &box->map)) return false;
  for (int i = 0; i < (op->n & 15); ++i) box->at[i] = int32_t(uint32_t(r[op->more[kCoordinates + i]]));
  box->shared = uint32_t(r[op->more[kShared]] + r[op->more[kSharedOffset]]);
  box->offset = box->shared & ((1u << kRankShift) - 1);
  box->bytes = BoxBytes(box->map);
  if (int64_t(box->at[0]) * TensorBytes(box->map.type) % 16 != 0) {
    Raise(t, op, Fault::kIllegalInstruction, "a box must begin at a multiple of 16 bytes in the first dimension");
    return false;
  }
  if (box->offset % 128 != 0) {
    Raise(t, op, Fault::kMisaligned, "the place of a box in shared memory must be a multiple of 128");
    return false;
  }
  if (box->bytes > t->block->shared_bytes) {
    Raise(t, op, Fault::kIllegalAddress, "the box is larger than the block's shared memory");
    return false;
  }
  return true;
}

// The block that an address in shared memory means.
uint32_t BlockOf(const Thread* t, uint64_t shared) {
  return shared >> kRankShift == 0 ? t->block->rank : uint32_t(shared >> kRankShift) - 1;
}

const Op* LoadBox(const Op* op, uint64_t* r, Thread* t) {
  Box box;
  if (!ReadBox(op, r, t, &box)) return nullptr;
  const uint32_t bytes = TensorBytes(box.map.type);
  std::vector<uint8_t> packed(box.bytes), data(box.bytes);
  if (const uint64_t outside = Outside(box.map); outside != 0) {
    for (uint64_t i = 0; i < box.bytes; i += bytes) std::memcpy(&packed[i], &outside, bytes);
  }
  const bool read =
      ForEachRow(box.map, box.at, [&](uint64_t offset, uint64_t elements, uint64_t before, uint64_t from) {
        if (elements == 0) return true;
        const uint8_t* data = GlobalRange(t, op, from, elements * bytes, false);
        if (data != nullptr) std::memcpy(&packed[offset + before * bytes], data, elements * bytes);
        return data != nullptr;
      });
  if (!read) return nullptr;
  for (uint64_t i = 0; i < box.bytes; i += 16) {
    std::memcpy(&data[Swizzled(box.map, box.offset, i)], &packed[i], std::min<uint64_t>(16, box.bytes - i));
  }
  const uint64_t barrier = uint32_t(r[op->more[kBarrier]] + r[op->more[kBarrierOffset]]);
  const uint32_t blocks = op->more[kBlocks] >= 0 ? uint16_t(r[op->more[kBlocks]]) : 1u << (BlockOf(t, box.shared) & 31);
  return Multicast(t, op, blocks, box.shared, barrier, data) ? op + 1 : nullptr;
}

template <class T, class F>
void Apply(uint8_t* place, const uint8_t* value, F combine) {
  T given, old, made;
  std::memcpy(&given, value, sizeof(T));
  T* there = reinterpret_cast<T*>(place);  // aligned: so is the tensor, and so are its strides
  __atomic_load(there, &old, __ATOMIC_RELAXED);
  do {
    made = combine(old, given);
  } while (!__atomic_compare_exchange(there, &old, &made, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
}

template <class T>
bool ReduceInteger(Reduction reduction, uint8_t* place, const uint8_t* value) {
  using U = std::make_unsigned_t<T>;
  switch (reduction) {
    case kAdd:
      Apply<T>(place, value, [](T a, T b) { return T(U(a) + U(b)); });
      return true;
    case kMin:
      Apply<T>(place, value, [](T a, T b) { return std::min(a, b); });
      return true;
    case kMax:
      Apply<T>(place, value, [](T a, T b) { return std::max(a, b); });
      return true;
    case kInc:
      Apply<T>(place, value, [](T a, T b) { return a >= b ? T(0) : T(a + 1); });
      return std::is_unsigned<T>::value && sizeof(T) == 4;
    case kDec:
      Apply<T>(place, value, [](T a, T b) { return a == 0 || a > b ? b : T(a - 1); });
      return std::is_unsigned<T>::value && sizeof(T) == 4;
    case kAnd:
      Apply<T>(place, value, [](T a, T b) { return T(a & b); });
      return true;
    case kOr:
      Apply<T>(place, value, [](T a, T b) { return T(a | b); });
      return true;
    case kXor:
      Apply<T>(place, value, [](T a, T b) { return T(a ^ b); });
      return true;
    default:
      return false;
  }
}

// False: there is no such reduction for the type, or it is not supported.
bool Reduce(Reduction reduction, TensorType type, uint8_t* place, const uint8_t* value) {
  switch (type) {
    case TensorType::kU32:
      return ReduceInteger<uint32_t>(reduction, place, value);
    case TensorType::kS32:
      return ReduceInteger<int32_t>(reduction, place, value);
    case TensorType::kU64:
      return ReduceInteger<uint64_t>(reduction, place, value);
    case TensorType::kS64:
      return ReduceInteger<int64_t>(reduction, place, value);
    case TensorType::kF32:
      if (reduction != kAdd) return false;
      Apply<float>(place, value, [](float a, float b) { return a + b; });
      return true;
    case TensorType::kF64:
      if (reduction != kAdd) return false;
      Apply<double>(place, value, [](double a, double b) { return a + b; });
      return true;
    default:
      return false;
  }
}

const Op* StoreBox(const Op* op, uint64_t* r, Thread* t) {
  Box box;
  if (!ReadBox(op, r, t, &box)) return nullptr;
  if (*std::min_element(std::begin(box.at), std::end(box.at)) < 0) {
    return Raise(t, op, Fault::kIllegalInstruction, "a box that is stored must not begin before the tensor");
  }
  const uint32_t bytes = TensorBytes(box.map.type);
  const uint8_t* shared = SharedOfBlock(t, op, BlockOf(t, box.shared), box.offset, uint32_t(box.bytes), 128);
  if (shared == nullptr) return nullptr;
  std::vector<uint8_t> packed(box.bytes);
  for (uint64_t i = 0; i < box.bytes; i += 16) {
    std::memcpy(&packed[i], shared + Swizzled(box.map, box.offset, i), std::min<uint64_t>(16, box.bytes - i));
  }
  const auto reduction = Reduction(op->n >> 4);
  // What is in the box goes to `place`.
  const auto put = [&](uint8_t* place, const uint8_t* from, uint64_t count) {
    if (reduction == kStore) {
      std::memcpy(place, from, count);
      return true;
    }
    for (uint64_t i = 0; i < count; i += bytes) {
      if (Reduce(reduction, box.map.type, place + i, from + i)) continue;
      Raise(t, op, Fault::kUnsupported, "this reduction of elements of the tensor's type is not supported");
      return false;
    }
    return true;
  };
  const bool written =
      ForEachRow(box.map, box.at, [&](uint64_t offset, uint64_t elements, uint64_t before, uint64_t to) {
        if (elements == 0) return true;
        const uint64_t count = elements * bytes, first = offset + before * bytes;
        uint8_t* place = GlobalRange(t, op, to, count, true);
        if (place == nullptr || !put(place, &packed[first], count)) return false;
        // The hardware writes pieces of 16 bytes, so a row that does not end with one is followed by more of the box,
        // if there is memory.
        const uint64_t more = (16 - count % 16) % 16;
        Interval interval;
        if (more == 0 || !t->block->launch->options->memory->Lookup(to + count, &interval) || !interval.writable ||
            interval.end - (to + count) < more) {
          return true;
        }
        return put(place + count, &packed[first + count], more);
      });
  return written ? op + 1 : nullptr;
}

}  // namespace

bool DecodeTensorCopy(Decoder& d) {
  if (d.Has("prefetch")) return true;  // a hint
  const bool reduce = d.Has("reduce"), load = d.Has("mbarrier::complete_tx::bytes");
  const bool allowed =
      load ? d.Allow(
                 "async bulk tensor 1d 2d 3d 4d 5d tile shared::cta shared::cluster global "
                 "mbarrier::complete_tx::bytes multicast::cluster L2::cache_hint")
      : reduce ? d.Allow(
                     "reduce async bulk tensor 1d 2d 3d 4d 5d tile shared::cta global bulk_group add min max inc dec "
                     "and or xor L2::cache_hint")
               : d.Allow("async bulk tensor 1d 2d 3d 4d 5d tile shared::cta global bulk_group L2::cache_hint");
  if (!allowed) return false;
  uint16_t rank = 0;
  for (uint16_t i = 1; i <= kTensorDimensions; ++i) {
    if (d.Has(std::to_string(i) + "d")) rank = i;
  }
  uint16_t reduction = kStore;
  for (uint16_t i = kAdd; i <= kXor; ++i) {
    if (reduce && d.Has(kReductions[i])) reduction = i;
  }
  const bool multicast = d.Has("multicast::cluster");
  const size_t count = (load ? 3 : 2) + (multicast ? 1 : 0) + (d.Has("L2::cache_hint") ? 1 : 0);
  if (rank == 0 || (reduce && reduction == kStore) || (!load && !d.Has("bulk_group"))) return d.Unsupported();
  if (!d.Operands(count, count)) return false;
  const Operand& tensor = d.in().operands[load ? 1 : 0];
  if (tensor.kind != Operand::Kind::kAddress || tensor.elements.size() != 2 ||
      tensor.elements[1].kind != Operand::Kind::kVector || tensor.elements[1].elements.size() != rank) {
    return d.Fail("a tensor map with as many coordinates as dimensions expected");
  }
  Operand at = tensor;
  at.elements.resize(1);
  Decoder::Address map, shared, barrier;
  if (!d.ResolveAddress(at, Where::kGeneric, false, &map) ||
      !d.ResolveAddress(d.in().operands[load ? 0 : 1], Where::kShared, false, &shared) ||
      (load && !d.ResolveAddress(d.in().operands[2], Where::kShared, false, &barrier))) {
    return false;
  }
  std::vector<int32_t> slots = {shared.slot, d.Const(uint64_t(shared.offset)), barrier.slot,
                                d.Const(uint64_t(barrier.offset)), multicast ? d.Src(3, Type::kU16) : -1};
  for (const Operand& coordinate : tensor.elements[1].elements) slots.push_back(d.Source(coordinate, Type::kS32));
  if (map.where == Where::kParam) return d.Unsupported();  // its generic address is what compilers give
  const int32_t* more = d.List(slots);
  Op& op = d.Emit(load ? LoadBox : StoreBox, 0, map.slot);
  op.imm = map.offset;
  op.more = more;
  op.n = uint16_t(rank | reduction << 4);
  op.cache = d.NextCache();
  return true;
}

}  // namespace cuda_remote::softgpu::ptx
