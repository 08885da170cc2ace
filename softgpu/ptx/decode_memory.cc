// SPDX-License-Identifier: Apache-2.0
// ld, st and what goes with them.
#include "softgpu/ptx/mbarrier.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// A loaded signed number fills the whole register, which may be wider.
template <class T>
inline uint64_t Loaded(T value) {
  return std::is_signed<T>::value ? uint64_t(int64_t(value)) : uint64_t(value);
}

template <Where where, class T>
const Op* Load(const Op* op, uint64_t* r, Thread* t) {
  const uint8_t* from = Pointer<where>(t, op, r[op->a] + uint64_t(op->imm), sizeof(T), false);
  if (from == nullptr) return nullptr;
  T value;
  std::memcpy(&value, from, sizeof(T));
  r[op->d] = Loaded(value);
  return op + 1;
}
// volatile, relaxed, acquire
template <Where where, class T>
const Op* LoadAtomic(const Op* op, uint64_t* r, Thread* t) {
  const uint8_t* from = Pointer<where>(t, op, r[op->a] + uint64_t(op->imm), sizeof(T), false);
  if (from == nullptr) return nullptr;
  r[op->d] = Loaded(__atomic_load_n(reinterpret_cast<const T*>(from), __ATOMIC_ACQUIRE));
  return op + 1;
}
// From the kernel's parameters; the offset was checked by the decoder.
template <class T>
const Op* LoadParam(const Op* op, uint64_t* r, Thread* t) {
  T value;
  std::memcpy(&value, t->block->launch->params + op->imm, sizeof(T));
  r[op->d] = Loaded(value);
  return op + 1;
}
template <Where where, class T>
const Op* LoadVector(const Op* op, uint64_t* r, Thread* t) {
  const uint32_t n = op->n;
  const uint8_t* from = Pointer<where>(t, op, r[op->a] + uint64_t(op->imm), n * sizeof(T), false);
  if (from == nullptr) return nullptr;
  T values[8];
  std::memcpy(values, from, n * sizeof(T));
  for (uint32_t i = 0; i < n; ++i) r[op->more[i]] = Loaded(values[i]);
  return op + 1;
}
template <Where where, class T>
const Op* Store(const Op* op, uint64_t* r, Thread* t) {
  uint8_t* to = Pointer<where>(t, op, r[op->a] + uint64_t(op->imm), sizeof(T), true);
  if (to == nullptr) return nullptr;
  const T value = Get<T>(r[op->b]);
  std::memcpy(to, &value, sizeof(T));
  return op + 1;
}
template <Where where, class T>
const Op* StoreAtomic(const Op* op, uint64_t* r, Thread* t) {
  uint8_t* to = Pointer<where>(t, op, r[op->a] + uint64_t(op->imm), sizeof(T), true);
  if (to == nullptr) return nullptr;
  __atomic_store_n(reinterpret_cast<T*>(to), Get<T>(r[op->b]), __ATOMIC_RELEASE);
  return op + 1;
}
template <Where where, class T>
const Op* StoreVector(const Op* op, uint64_t* r, Thread* t) {
  const uint32_t n = op->n;
  uint8_t* to = Pointer<where>(t, op, r[op->a] + uint64_t(op->imm), n * sizeof(T), true);
  if (to == nullptr) return nullptr;
  T values[8];
  for (uint32_t i = 0; i < n; ++i) values[i] = Get<T>(r[op->more[i]]);
  std::memcpy(to, values, n * sizeof(T));
  return op + 1;
}

enum class Kind { kLoad, kLoadAtomic, kLoadVector, kLoadParam, kStore, kStoreAtomic, kStoreVector };

template <Where where, class T>
Handler PickKind(Kind kind) {
  switch (kind) {
    case Kind::kLoad:
      return Load<where, T>;
    case Kind::kLoadAtomic:
      return LoadAtomic<where, T>;
    case Kind::kLoadVector:
      return LoadVector<where, T>;
    case Kind::kLoadParam:
      return LoadParam<T>;
    case Kind::kStore:
      return Store<where, std::make_unsigned_t<T>>;
    case Kind::kStoreAtomic:
      return StoreAtomic<where, std::make_unsigned_t<T>>;
    default:
      return StoreVector<where, std::make_unsigned_t<T>>;
  }
}

template <Where where>
Handler PickType(Kind kind, Type type) {
  switch (type) {
    case Type::kS8:
      return PickKind<where, int8_t>(kind);
    case Type::kS16:
      return PickKind<where, int16_t>(kind);
    case Type::kS32:
      return PickKind<where, int32_t>(kind);
    default:
      break;
  }
  switch (SizeOf(type)) {
    case 1:
      return PickKind<where, uint8_t>(kind);
    case 2:
      return PickKind<where, uint16_t>(kind);
    case 4:
      return PickKind<where, uint32_t>(kind);
    case 8:
      return PickKind<where, uint64_t>(kind);
    default:
      return nullptr;
  }
}

Handler PickHandler(Where where, Kind kind, Type type) {
  switch (where) {
    case Where::kGeneric:
      return PickType<Where::kGeneric>(kind, type);
    case Where::kGlobal:
      return PickType<Where::kGlobal>(kind, type);
    case Where::kShared:
      return PickType<Where::kShared>(kind, type);
    case Where::kLocal:
      return PickType<Where::kLocal>(kind, type);
    default:
      return PickType<Where::kParam>(kind, type);
  }
}

constexpr const char* kMemoryModifiers =
    "weak volatile relaxed acquire release mmio cta cluster gpu sys const global local param param::func param::entry "
    "shared shared::cta shared::cluster nc ca cg cs lu cv wb wt v2 v4 v8 unified L1::evict_normal L1::evict_unchanged "
    "L1::evict_first L1::evict_last L1::no_allocate L2::evict_normal L2::evict_first L2::evict_last L2::cache_hint "
    "L2::64B L2::128B L2::256B";
constexpr const char* kAsyncStoreModifiers = "async weak shared::cluster mbarrier::complete_tx::bytes v2 v4";

}  // namespace

bool SpaceOf(Decoder& d, Where* where, bool* param) {
  *param = false;
  *where = Where::kGeneric;
  if (d.Has("global") || d.Has("const")) *where = Where::kGlobal;
  if (d.Has("shared") || d.Has("shared::cta") || d.Has("shared::cluster")) *where = Where::kShared;
  if (d.Has("local")) *where = Where::kLocal;
  if (d.Has("param") || d.Has("param::func") || d.Has("param::entry")) {
    *where = Where::kParam;
    *param = true;
  }
  return true;
}

namespace {

bool DecodeAccess(Decoder& d) {
  const bool load = d.in().opcode != "st", async = !load && d.Has("async");
  if (!d.Allow(async ? kAsyncStoreModifiers : kMemoryModifiers)) return false;
  const size_t least = async || d.Has("L2::cache_hint") ? 3 : 2;
  if (!d.Operands(least, least)) return false;
  const Operand& place = d.in().operands[load ? 1 : 0];
  const Operand& data = d.in().operands[load ? 0 : 1];
  Type type = d.TypeFromEnd();
  if (d.types().size() != 1 || SizeOf(type) == 0 || type == Type::kPred) return d.Unsupported();
  Where where;
  bool param = false;
  SpaceOf(d, &where, &param);
  Decoder::Address address;
  if (!d.ResolveAddress(place, where, param, &address)) return false;

  uint16_t count = d.Has("v2") ? 2 : d.Has("v4") ? 4 : d.Has("v8") ? 8 : 1;
  std::vector<int32_t> slots;
  if (type == Type::kB128) {  // two registers of 64 bits that lie side by side
    if (count != 1) return d.Unsupported();
    count = 2;
    type = Type::kB64;
    const int32_t slot = load ? d.Destination(data) : d.Source(data, Type::kB128);
    slots = {slot, slot + 1};
  } else if (count > 1) {
    if (data.kind != Operand::Kind::kVector || data.elements.size() != count) return d.Fail("wrong number of elements");
    for (const auto& element : data.elements) {
      slots.push_back(load ? d.Destination(element) : d.Source(element, type));
    }
  } else if (data.kind == Operand::Kind::kVector) {
    return d.Fail("unexpected vector");
  }
  const bool atomic = d.Has("volatile") || d.Has("relaxed") || d.Has("acquire") || d.Has("release") || d.Has("mmio");
  Kind kind;
  if (count > 1) {
    kind = load ? Kind::kLoadVector : Kind::kStoreVector;
  } else {
    kind = load ? (atomic ? Kind::kLoadAtomic : Kind::kLoad) : (atomic ? Kind::kStoreAtomic : Kind::kStore);
  }
  if (!load && address.where == Where::kParam) return d.Fail("a kernel's parameters cannot be written");
  if (address.fixed_param && kind == Kind::kLoad) {
    if (address.offset < 0 || address.offset + SizeOf(type) > d.function().param_bytes) {
      return d.Fail("outside of the parameters");
    }
    kind = Kind::kLoadParam;
  }
  const Handler fn = PickHandler(address.where, kind, type);
  if (fn == nullptr) return d.Unsupported();
  const int32_t* more = count > 1 ? d.List(slots) : nullptr;
  int32_t destination = 0, value = 0;
  if (count == 1) (load ? destination : value) = load ? d.Destination(data) : d.Source(data, type);
  Op& op = d.Emit(fn, destination, address.slot, value);
  op.imm = address.offset;
  op.n = count;
  op.more = more;
  op.cache = d.NextCache();
  return !async || EmitAsyncCompletion(d, count * SizeOf(type));
}

// Hints change nothing; their addresses need not be valid.
bool DecodeHint(Decoder&) { return true; }

struct Same {
  static uint64_t Do(uint64_t a) { return a; }
};

bool DecodeCreatePolicy(Decoder& d) {
  if (!d.Operands(1, 4)) return false;
  const int32_t zero = d.Const(0);
  d.Emit(RunUnary<uint64_t, Same>, d.Dst(0), zero);
  return true;
}

}  // namespace

void AddMemoryOps(DecodeTable* table) {
  for (const char* name : {"ld", "ldu", "st"}) (*table)[name] = DecodeAccess;
  for (const char* name : {"prefetch", "prefetchu", "applypriority", "discard"}) (*table)[name] = DecodeHint;
  (*table)["createpolicy"] = DecodeCreatePolicy;
}

}  // namespace cuda_remote::softgpu::ptx
