// SPDX-License-Identifier: Apache-2.0
// From parsed instructions to Ops.
//
// One Decoder for one function; the parts for groups of opcodes are in decode_*.cc and found through a table. Not
// thread-safe; what it makes is immutable afterwards.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_DECODER_H_
#define CUDA_REMOTE_SOFTGPU_PTX_DECODER_H_

#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "softgpu/ptx/machine.h"

namespace cuda_remote::softgpu::ptx {

enum class Type : uint8_t {
  kNone,
  kB8,
  kU8,
  kS8,
  kB16,
  kU16,
  kS16,
  kB32,
  kU32,
  kS32,
  kB64,
  kU64,
  kS64,
  kB128,
  kF16,
  kBf16,
  kF16x2,
  kBf16x2,
  kF32,
  kF64,
  kTf32,
  kPred,
  kE4m3,
  kE5m2,
  kE4m3x2,
  kE5m2x2,
};

Type ParseType(std::string_view name);
uint32_t SizeOf(Type type);
bool IsSigned(Type type);
bool IsFloat(Type type);  // f32 and f64
// The unsigned type of the same size; Type itself for what is no integer.
Type Unsigned(Type type);

class Decoder {
 public:
  Decoder(Prepared* prepared, Code* code) : prepared_(*prepared), code_(*code), function_(*code->function) {}

  // Decodes the whole function. False: error().
  bool Run();
  const std::string& error() const { return error_; }

  // For the groups of opcodes. `instruction()` is the one that is being decoded.
  const Instruction& in() const { return *in_; }
  const std::vector<Type>& types() const { return types_; }
  // The k-th type from the end; kNone: there is none.
  Type TypeFromEnd(size_t k = 0) const { return k < types_.size() ? types_[types_.size() - 1 - k] : Type::kNone; }
  bool Has(std::string_view modifier) const { return in_->Has(modifier); }
  // Every modifier must be a type or in the blank-separated list.
  bool Allow(std::string_view list);
  bool Operands(size_t least, size_t most);
  bool Fail(const std::string& what);
  bool Unsupported() { return Fail("not supported"); }

  int32_t Src(size_t operand, Type type) { return Source(in_->operands[operand], type); }
  int32_t Dst(size_t operand) { return Destination(in_->operands[operand]); }
  int32_t Source(const Operand& operand, Type type);
  int32_t Destination(const Operand& operand);
  // The slot of d|p's p; a slot that nobody reads where there is none.
  int32_t Pair(const Operand& operand);
  int32_t Const(uint64_t bits);
  int32_t Temp();
  const int32_t* List(const std::vector<int32_t>& slots);
  Op& Emit(Handler fn, int32_t d = 0, int32_t a = 0, int32_t b = 0, int32_t c = 0);
  // handler, with sources of `type` in operands 1.., destination operand 0
  bool Simple(Handler fn, Type type, size_t sources);

  // [name + 4]: the space, the slot to add and the offset.
  struct Address {
    Where where = Where::kGeneric;
    int32_t slot = 0;
    int64_t offset = 0;
    bool fixed_param = false;  // of the kernel's parameter block, at `offset`
  };
  bool ResolveAddress(const Operand& operand, Where space, bool param_space, Address* address);
  bool Label(const Operand& operand, uint32_t* index);
  // The branch's target is filled in when all is decoded.
  void Patch(uint32_t instruction_index);
  void PatchTable(std::vector<const Op*>* table, const std::vector<uint32_t>& labels);
  uint16_t NextCache() { return cache_++; }

  const Function& function() const { return function_; }
  const Program& program() const { return *code_.program; }
  Prepared& prepared() { return prepared_; }
  Code& code() { return code_; }

 private:
  bool One(const Instruction& instruction);
  bool NameValue(const Operand& operand, uint64_t* bits, bool* frame_relative);

  Prepared& prepared_;
  Code& code_;
  const Function& function_;
  const Instruction* in_ = nullptr;
  std::vector<Type> types_;
  std::string error_;
  std::map<uint64_t, int32_t> consts_;
  std::vector<uint32_t> starts_;  // of each instruction in ops
  std::vector<std::pair<size_t, uint32_t>> patches_;
  std::vector<std::pair<std::vector<const Op*>*, std::vector<uint32_t>>> table_patches_;
  uint16_t cache_ = 0;
  int32_t sink_ = -1;
};

using DecodeFunction = bool (*)(Decoder& d);
using DecodeTable = std::unordered_map<std::string_view, DecodeFunction>;

void AddIntegerOps(DecodeTable* table);   // decode_int.cc
void AddBitOps(DecodeTable* table);       // decode_bits.cc
void AddFloatOps(DecodeTable* table);     // decode_float.cc: add, mul, ... for all kinds of numbers
void AddMathOps(DecodeTable* table);      // decode_math.cc: sqrt, sin, ...
void AddCompareOps(DecodeTable* table);   // decode_compare.cc
void AddMoveOps(DecodeTable* table);      // decode_move.cc
void AddConvertOps(DecodeTable* table);   // decode_convert.cc
void AddMemoryOps(DecodeTable* table);    // decode_memory.cc
void AddAtomicOps(DecodeTable* table);    // decode_atomic.cc
void AddFlowOps(DecodeTable* table);      // decode_flow.cc
void AddSyncOps(DecodeTable* table);      // decode_sync.cc
void AddWarpOps(DecodeTable* table);      // decode_warp.cc
void AddAsyncOps(DecodeTable* table);     // decode_async.cc
void AddMbarrierOps(DecodeTable* table);  // decode_mbarrier.cc
void AddTextureOps(DecodeTable* table);   // decode_texture.cc
void AddMatrixOps(DecodeTable* table);    // decode_matrix.cc
void AddVideoOps(DecodeTable* table);     // decode_video.cc

// add, sub, mul, ... of integers, when the opcode is shared with floats.
bool DecodeIntegerArithmetic(Decoder& d);
bool DecodeHalf(Decoder& d);  // decode_half.cc: f16, bf16 and their pairs

bool DecodeWarpBarrier(Decoder& d);  // decode_warp.cc: bar.warp.sync

// A kernel with everything that it calls; Prepared::error says what is wrong.
std::shared_ptr<const Prepared> Prepare(const Program& program, const Function& kernel);

// Handlers of one, two and three sources out of a function object F with T Do(T...).
template <class T, class F>
const Op* RunUnary(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = Put(F::Do(Get<T>(r[op->a])));
  return op + 1;
}
template <class T, class F>
const Op* RunBinary(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = Put(F::Do(Get<T>(r[op->a]), Get<T>(r[op->b])));
  return op + 1;
}
template <class T, class F>
const Op* RunTernary(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = Put(F::Do(Get<T>(r[op->a]), Get<T>(r[op->b]), Get<T>(r[op->c])));
  return op + 1;
}

#define CUDA_REMOTE_PICK_INTEGER(run, type, F) \
  switch (type) {                              \
    case Type::kU16:                           \
    case Type::kB16:                           \
      return run<uint16_t, F>;                 \
    case Type::kS16:                           \
      return run<int16_t, F>;                  \
    case Type::kU32:                           \
    case Type::kB32:                           \
      return run<uint32_t, F>;                 \
    case Type::kS32:                           \
      return run<int32_t, F>;                  \
    case Type::kU64:                           \
    case Type::kB64:                           \
      return run<uint64_t, F>;                 \
    case Type::kS64:                           \
      return run<int64_t, F>;                  \
    default:                                   \
      return nullptr;                          \
  }

// The handler of F for 16-, 32- or 64-bit integers; null: `type` is something else.
template <class F>
Handler PickUnary(Type type) {
  CUDA_REMOTE_PICK_INTEGER(RunUnary, type, F)
}
template <class F>
Handler PickBinary(Type type) {
  CUDA_REMOTE_PICK_INTEGER(RunBinary, type, F)
}
template <class F>
Handler PickTernary(Type type) {
  CUDA_REMOTE_PICK_INTEGER(RunTernary, type, F)
}

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_DECODER_H_
