// SPDX-License-Identifier: Apache-2.0
// atom and red.
#include <cmath>

#include "proto/threads/mutex.h"
#include "softgpu/ptx/mbarrier.h"
#include "softgpu/ptx/number.h"

namespace cuda_remote::softgpu::ptx {

bool SpaceOf(Decoder& d, Where* where, bool* param);  // decode_memory.cc

namespace {

struct Add {
  template <class T>
  static T Do(T old, T b) {
    return T(old + b);
  }
};
struct And {
  template <class T>
  static T Do(T old, T b) {
    return old & b;
  }
};
struct Or {
  template <class T>
  static T Do(T old, T b) {
    return old | b;
  }
};
struct Xor {
  template <class T>
  static T Do(T old, T b) {
    return old ^ b;
  }
};
struct Exch {
  template <class T>
  static T Do(T, T b) {
    return b;
  }
};
struct Min {
  template <class T>
  static T Do(T old, T b) {
    return b < old ? b : old;
  }
};
struct Max {
  template <class T>
  static T Do(T old, T b) {
    return b > old ? b : old;
  }
};
struct Inc {
  template <class T>
  static T Do(T old, T b) {
    return old >= b ? 0 : old + 1;
  }
};
struct Dec {
  template <class T>
  static T Do(T old, T b) {
    return old == 0 || old > b ? b : old - 1;
  }
};
// Floats travel as their bits.
template <class F, class Bits>
struct AddFloat {
  static Bits Do(Bits old, Bits b) { return Bits(Put(Get<F>(old) + Get<F>(b))); }
};
template <bool bf>
struct AddHalf {
  static uint16_t Do(uint16_t old, uint16_t b) {
    const Format& format = bf ? kBfloat : kHalf;
    return uint16_t(Pack(FusedOdd(1.0, Unpack(old, format), Unpack(b, format)), format, Round::kNearest, false));
  }
};
template <bool bf>
struct AddHalf2 {
  static uint32_t Do(uint32_t old, uint32_t b) {
    return uint32_t(AddHalf<bf>::Do(uint16_t(old), uint16_t(b))) |
           uint32_t(AddHalf<bf>::Do(uint16_t(old >> 16), uint16_t(b >> 16))) << 16;
  }
};

template <Where where>
uint8_t* Place(const Op* op, uint64_t* r, Thread* t, uint32_t bytes) {
  return Pointer<where>(t, op, r[op->a] + uint64_t(op->imm), bytes, true);
}

// d = old; [a] = F(old, b). Other host threads may work on the same word, unless it is shared memory.
template <Where where, class T, class F>
const Op* Atomic(const Op* op, uint64_t* r, Thread* t) {
  T* place = reinterpret_cast<T*>(Place<where>(op, r, t, sizeof(T)));
  if (place == nullptr) return nullptr;
  const T b = Get<T>(r[op->b]);
  T old;
  if (where == Where::kShared) {
    old = *place;
    *place = F::Do(old, b);
  } else {
    old = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(place, &old, F::Do(old, b), true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
  }
  r[op->d] = Put(old);
  return op + 1;
}

template <Where where, class T>
const Op* Cas(const Op* op, uint64_t* r, Thread* t) {
  T* place = reinterpret_cast<T*>(Place<where>(op, r, t, sizeof(T)));
  if (place == nullptr) return nullptr;
  T expected = Get<T>(r[op->b]);
  __atomic_compare_exchange_n(place, &expected, Get<T>(r[op->c]), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  r[op->d] = Put(expected);
  return op + 1;
}

// 128 bits under one lock: such words are touched by nothing narrower in sensible programs.
template <Where where, bool exchange>
const Op* Wide(const Op* op, uint64_t* r, Thread* t) {
  static Mutex* mutex = new Mutex;
  uint8_t* place = Place<where>(op, r, t, 16);
  if (place == nullptr) return nullptr;
  uint64_t old[2];
  {
    MutexLock lock(mutex);
    std::memcpy(old, place, 16);
    if (exchange) {
      std::memcpy(place, &r[op->b], 16);
    } else if (std::memcmp(old, &r[op->b], 16) == 0) {
      std::memcpy(place, &r[op->c], 16);
    }
  }
  r[op->d] = old[0];
  r[op->d + 1] = old[1];
  return op + 1;
}

template <Where where>
Handler Pick(const std::string& operation, Type type) {
  const bool wide = SizeOf(type) == 8;
  if (operation == "add") {
    switch (type) {
      case Type::kU32:
      case Type::kS32:
        return Atomic<where, uint32_t, Add>;
      case Type::kU64:
      case Type::kS64:
        return Atomic<where, uint64_t, Add>;
      case Type::kF32:
        return Atomic<where, uint32_t, AddFloat<float, uint32_t>>;
      case Type::kF64:
        return Atomic<where, uint64_t, AddFloat<double, uint64_t>>;
      case Type::kF16:
        return Atomic<where, uint16_t, AddHalf<false>>;
      case Type::kBf16:
        return Atomic<where, uint16_t, AddHalf<true>>;
      case Type::kF16x2:
        return Atomic<where, uint32_t, AddHalf2<false>>;
      case Type::kBf16x2:
        return Atomic<where, uint32_t, AddHalf2<true>>;
      default:
        return nullptr;
    }
  }
  if (operation == "cas") {
    switch (SizeOf(type)) {
      case 2:
        return Cas<where, uint16_t>;
      case 4:
        return Cas<where, uint32_t>;
      case 8:
        return Cas<where, uint64_t>;
      case 16:
        return Wide<where, false>;
      default:
        return nullptr;
    }
  }
  if (operation == "exch" && type == Type::kB128) return Wide<where, true>;
  if (SizeOf(type) != 4 && SizeOf(type) != 8) return nullptr;
  if (operation == "exch") return wide ? Atomic<where, uint64_t, Exch> : Atomic<where, uint32_t, Exch>;
  if (IsFloat(type)) return nullptr;
  if (operation == "and") return wide ? Atomic<where, uint64_t, And> : Atomic<where, uint32_t, And>;
  if (operation == "or") return wide ? Atomic<where, uint64_t, Or> : Atomic<where, uint32_t, Or>;
  if (operation == "xor") return wide ? Atomic<where, uint64_t, Xor> : Atomic<where, uint32_t, Xor>;
  if (operation == "inc" && type == Type::kU32) return Atomic<where, uint32_t, Inc>;
  if (operation == "dec" && type == Type::kU32) return Atomic<where, uint32_t, Dec>;
  if (operation == "min") {
    if (IsSigned(type)) return wide ? Atomic<where, int64_t, Min> : Atomic<where, int32_t, Min>;
    return wide ? Atomic<where, uint64_t, Min> : Atomic<where, uint32_t, Min>;
  }
  if (operation == "max") {
    if (IsSigned(type)) return wide ? Atomic<where, int64_t, Max> : Atomic<where, int32_t, Max>;
    return wide ? Atomic<where, uint64_t, Max> : Atomic<where, uint32_t, Max>;
  }
  return nullptr;
}

bool DecodeAtomic(Decoder& d) {
  const bool reduce = d.in().opcode == "red", async = reduce && d.Has("async");
  if (async
          ? !d.Allow(
                "async relaxed cluster shared::cluster mbarrier::complete_tx::bytes inc dec min max add and or xor")
          : !d.Allow(
                "relaxed acquire release acq_rel cta cluster gpu sys global shared shared::cta shared::cluster add and "
                "or xor exch cas min max inc dec noftz L2::cache_hint")) {
    return false;
  }
  std::string operation;
  for (const char* name : {"add", "and", "or", "xor", "exch", "cas", "min", "max", "inc", "dec"}) {
    if (d.Has(name)) operation = name;
  }
  const Type type = d.TypeFromEnd();
  const bool cas = operation == "cas";
  const size_t first = reduce ? 0 : 1;
  const size_t count = first + (cas ? 3 : 2) + (async || d.Has("L2::cache_hint") ? 1 : 0);
  if (d.types().size() != 1 || !d.Operands(count, count)) return d.Unsupported();
  Where where;
  bool param = false;
  SpaceOf(d, &where, &param);
  Decoder::Address address;
  if (!d.ResolveAddress(d.in().operands[first], where, param, &address)) return false;
  Handler fn;
  switch (address.where) {
    case Where::kGeneric:
      fn = Pick<Where::kGeneric>(operation, type);
      break;
    case Where::kGlobal:
      fn = Pick<Where::kGlobal>(operation, type);
      break;
    case Where::kShared:
      fn = Pick<Where::kShared>(operation, type);
      break;
    default:
      return d.Unsupported();
  }
  if (fn == nullptr) return d.Unsupported();
  const int32_t b = d.Src(first + 1, type);
  const int32_t c = cas ? d.Src(first + 2, type) : 0;
  Operand sink;
  sink.kind = Operand::Kind::kSink;
  const int32_t destination = reduce ? d.Destination(sink) : d.Dst(0);
  Op& op = d.Emit(fn, destination, address.slot, b, c);
  op.imm = address.offset;
  op.cache = d.NextCache();
  return !async || EmitAsyncCompletion(d, SizeOf(type));
}

}  // namespace

void AddAtomicOps(DecodeTable* table) {
  (*table)["atom"] = DecodeAtomic;
  (*table)["red"] = DecodeAtomic;
}

}  // namespace cuda_remote::softgpu::ptx
