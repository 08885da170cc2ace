// SPDX-License-Identifier: Apache-2.0
#include "softgpu/ptx/decoder.h"

#include <algorithm>

namespace cuda_remote::softgpu::ptx {
namespace {

struct TypeName {
  const char* name;
  Type type;
  uint32_t bytes;
};

constexpr TypeName kNames[] = {
    {"b8", Type::kB8, 1},         {"u8", Type::kU8, 1},     {"s8", Type::kS8, 1},     {"b16", Type::kB16, 2},
    {"u16", Type::kU16, 2},       {"s16", Type::kS16, 2},   {"b32", Type::kB32, 4},   {"u32", Type::kU32, 4},
    {"s32", Type::kS32, 4},       {"b64", Type::kB64, 8},   {"u64", Type::kU64, 8},   {"s64", Type::kS64, 8},
    {"b128", Type::kB128, 16},    {"f16", Type::kF16, 2},   {"bf16", Type::kBf16, 2}, {"f16x2", Type::kF16x2, 4},
    {"bf16x2", Type::kBf16x2, 4}, {"f32", Type::kF32, 4},   {"f64", Type::kF64, 8},   {"tf32", Type::kTf32, 4},
    {"pred", Type::kPred, 1},     {"e4m3", Type::kE4m3, 1}, {"e5m2", Type::kE5m2, 1}, {"e4m3x2", Type::kE4m3x2, 2},
    {"e5m2x2", Type::kE5m2x2, 2},
};

const DecodeTable& Table() {
  static const DecodeTable* table = [] {
    auto* made = new DecodeTable;
    AddIntegerOps(made);
    AddBitOps(made);
    AddFloatOps(made);
    AddMathOps(made);
    AddCompareOps(made);
    AddMoveOps(made);
    AddConvertOps(made);
    AddMemoryOps(made);
    AddAtomicOps(made);
    AddFlowOps(made);
    AddSyncOps(made);
    AddWarpOps(made);
    AddAsyncOps(made);
    AddMbarrierOps(made);
    AddTextureOps(made);
    AddMatrixOps(made);
    AddVideoOps(made);
    return made;
  }();
  return *table;
}

const Op* SkipUnless(const Op* op, uint64_t* r, Thread*) { return op + ((r[op->a] & 1) != 0 ? 1 : op->imm); }
const Op* SkipIf(const Op* op, uint64_t* r, Thread*) { return op + ((r[op->a] & 1) == 0 ? 1 : op->imm); }
const Op* NotPredicate(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = (r[op->a] & 1) ^ 1;
  return op + 1;
}
const Op* AddOffset(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = r[op->a] + uint64_t(op->imm);
  return op + 1;
}
const Op* EndOfCode(const Op* op, uint64_t*, Thread* t) {
  return Raise(t, op, Fault::kInvalidCode, "execution ran past the end of the function");
}

}  // namespace

bool DecodeSpecial(Decoder& d, const std::string& name, int32_t slot);

Type ParseType(std::string_view name) {
  for (const auto& entry : kNames) {
    if (name == entry.name) return entry.type;
  }
  return Type::kNone;
}

uint32_t SizeOf(Type type) {
  for (const auto& entry : kNames) {
    if (type == entry.type) return entry.bytes;
  }
  return 0;
}

bool IsSigned(Type type) { return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64; }

bool IsFloat(Type type) { return type == Type::kF32 || type == Type::kF64; }

Type Unsigned(Type type) {
  switch (type) {
    case Type::kS8:
    case Type::kB8:
      return Type::kU8;
    case Type::kS16:
    case Type::kB16:
      return Type::kU16;
    case Type::kS32:
    case Type::kB32:
      return Type::kU32;
    case Type::kS64:
    case Type::kB64:
      return Type::kU64;
    default:
      return type;
  }
}

bool Decoder::Fail(const std::string& what) {
  if (error_.empty()) {
    const uint32_t line = in_ != nullptr ? in_->line : function_.line;
    error_ = "line " + std::to_string(line) + ": " + what + ": " + std::string(code_.program->LineText(line));
  }
  return false;
}

bool Decoder::Allow(std::string_view list) {
  for (const auto& modifier : in_->modifiers) {
    if (ParseType(modifier) != Type::kNone) continue;
    bool found = false;
    for (size_t at = list.find(modifier); at != std::string_view::npos && !found; at = list.find(modifier, at + 1)) {
      const size_t end = at + modifier.size();
      found = (at == 0 || list[at - 1] == ' ') && (end == list.size() || list[end] == ' ');
    }
    if (!found) return Fail("." + modifier + " is not supported here");
  }
  return true;
}

bool Decoder::Operands(size_t least, size_t most) {
  const size_t count = in_->operands.size();
  return (count >= least && count <= most) || Fail("wrong number of operands");
}

int32_t Decoder::Temp() {
  code_.frame.push_back(0);
  return int32_t(code_.frame.size() - 1);
}

int32_t Decoder::Const(uint64_t bits) {
  const auto found = consts_.find(bits);
  if (found != consts_.end()) return found->second;
  const int32_t slot = Temp();
  code_.frame[size_t(slot)] = bits;
  consts_[bits] = slot;
  return slot;
}

const int32_t* Decoder::List(const std::vector<int32_t>& slots) {
  auto list = std::make_unique<int32_t[]>(slots.size() + 1);
  std::copy(slots.begin(), slots.end(), list.get());
  code_.lists.push_back(std::move(list));
  return code_.lists.back().get();
}

Op& Decoder::Emit(Handler fn, int32_t d, int32_t a, int32_t b, int32_t c) {
  Op op;
  op.fn = fn;
  op.d = d;
  op.a = a;
  op.b = b;
  op.c = c;
  op.line = in_ != nullptr ? in_->line : function_.line;
  code_.ops.push_back(op);
  return code_.ops.back();
}

// The value of a variable's or function's name as a number.
bool Decoder::NameValue(const Operand& operand, uint64_t* bits, bool* frame_relative) {
  *frame_relative = false;
  const Symbol* symbol = function_.Find(operand.scope, operand.name);
  if (symbol != nullptr) {
    switch (symbol->kind) {
      case Symbol::Kind::kFrame:
        *frame_relative = true;
        *bits = symbol->value;
        return true;
      case Symbol::Kind::kKernelParam:
        *bits = symbol->value;
        return true;
      case Symbol::Kind::kShared: {
        const SharedVar* var = function_.shared[symbol->value].get();
        const auto it = prepared_.reach.shared.offsets.find(var);
        if (it == prepared_.reach.shared.offsets.end()) return Fail("shared variable has no place");
        *bits = it->second;
        return true;
      }
      default:
        return Fail("'" + operand.name + "' is no variable");
    }
  }
  const Program& program = *code_.program;
  const auto shared = program.shared_names.find(operand.name);
  if (shared != program.shared_names.end()) {
    const auto it = prepared_.reach.shared.offsets.find(shared->second);
    if (it == prepared_.reach.shared.offsets.end()) return Fail("shared variable has no place");
    *bits = it->second;
    return true;
  }
  if (program.global_names.count(operand.name) != 0) {
    const auto address = program.addresses.find(operand.name);
    if (address == program.addresses.end()) return Fail("variable '" + operand.name + "' has no address");
    *bits = address->second;
    return true;
  }
  const Program* owner = nullptr;
  const Function* function = program.FindFunction(operand.name, &owner);
  if (function != nullptr) {
    *bits = function->code_address;
    return true;
  }
  return Fail("'" + operand.name + "' is not defined");
}

int32_t Decoder::Source(const Operand& operand, Type type) {
  int32_t slot = kBaseSlot;
  switch (operand.kind) {
    case Operand::Kind::kReg:
      slot = operand.slot + kFirstRegister;
      if (operand.offset != 0) {
        const int32_t temp = Temp();
        Emit(AddOffset, temp, slot).imm = operand.offset;
        slot = temp;
      }
      break;
    case Operand::Kind::kImm: {
      uint64_t bits = operand.bits + uint64_t(operand.offset);
      if (IsFloat(type)) {  // 1 stands for 1.0
        const double value = double(int64_t(bits));
        bits = type == Type::kF32 ? Put(float(value)) : Put(value);
      } else if (type == Type::kPred) {
        bits = bits != 0;
      }
      slot = Const(bits);
      break;
    }
    case Operand::Kind::kF32:
      slot = Const(type == Type::kF64 ? Put(double(Get<float>(operand.bits))) : operand.bits);
      break;
    case Operand::Kind::kF64:
      slot = Const(type == Type::kF32 ? Put(float(Get<double>(operand.bits))) : operand.bits);
      break;
    case Operand::Kind::kSpecial:
      slot = Temp();
      if (!DecodeSpecial(*this, operand.name, slot)) return kBaseSlot;
      break;
    case Operand::Kind::kName: {
      uint64_t bits = 0;
      bool relative = false;
      if (!NameValue(operand, &bits, &relative)) return kBaseSlot;
      bits += uint64_t(operand.offset);
      if (relative) {
        slot = Temp();
        Emit(AddOffset, slot, kBaseSlot).imm = int64_t(bits);
      } else {
        slot = Const(bits);
      }
      break;
    }
    case Operand::Kind::kSink:
      slot = Const(0);
      break;
    default:
      Fail("this kind of operand is not supported here");
      return kBaseSlot;
  }
  if (operand.negated) {
    const int32_t temp = Temp();
    Emit(NotPredicate, temp, slot);
    slot = temp;
  }
  return slot;
}

int32_t Decoder::Destination(const Operand& operand) {
  if (operand.kind == Operand::Kind::kReg) return operand.slot + kFirstRegister;
  if (operand.kind == Operand::Kind::kSink) {
    if (sink_ < 0) {
      sink_ = Temp();
      Temp();  // room for 128 bits
    }
    return sink_;
  }
  Fail("the destination must be a register");
  return kBaseSlot;
}

int32_t Decoder::Pair(const Operand& operand) {
  if (operand.pair >= 0) return operand.pair + kFirstRegister;
  Operand sink;
  sink.kind = Operand::Kind::kSink;
  return Destination(sink);
}

bool Decoder::Simple(Handler fn, Type type, size_t sources) {
  if (fn == nullptr) return Unsupported();
  if (!Operands(sources + 1, sources + 1)) return false;
  const int32_t a = Src(1, type);
  const int32_t b = sources > 1 ? Src(2, type) : 0;
  const int32_t c = sources > 2 ? Src(3, type) : 0;
  const int32_t dst = Dst(0);
  Emit(fn, dst, a, b, c);
  return error_.empty();
}

bool Decoder::ResolveAddress(const Operand& operand, Where space, bool param_space, Address* address) {
  address->where = space;
  if (operand.kind != Operand::Kind::kAddress || operand.elements.size() != 1) {
    return Fail("this form of address is not supported");
  }
  const Operand& base = operand.elements[0];
  address->offset = base.offset;
  if (base.kind == Operand::Kind::kReg) {
    address->slot = base.slot + kFirstRegister;
    if (param_space) address->where = function_.entry ? Where::kParam : Where::kLocal;
    return true;
  }
  if (base.kind == Operand::Kind::kImm) {
    address->slot = Const(base.bits);
    return true;
  }
  if (base.kind != Operand::Kind::kName) return Fail("this form of address is not supported");
  const Symbol* symbol = function_.Find(base.scope, base.name);
  if (symbol != nullptr && symbol->kind == Symbol::Kind::kReg) {  // a .reg parameter's name is found by the parser
    return Fail("not a variable");
  }
  uint64_t bits = 0;
  bool relative = false;
  if (!NameValue(base, &bits, &relative)) return false;
  if (relative) {
    address->where = Where::kLocal;
    address->slot = kBaseSlot;
    address->offset = int64_t(bits) + base.offset;
    return true;
  }
  if (symbol != nullptr && symbol->kind == Symbol::Kind::kKernelParam) {
    address->where = Where::kParam;
    address->fixed_param = true;
    address->offset = int64_t(bits) + base.offset;
    address->slot = Const(0);
    return true;
  }
  if (space == Where::kGeneric) {  // ld [name]: the variable's own space
    const bool shared =
        (symbol != nullptr && symbol->kind == Symbol::Kind::kShared) || program().shared_names.count(base.name) != 0;
    address->where = shared ? Where::kShared : Where::kGlobal;
  }
  address->slot = Const(bits);
  return true;
}

bool Decoder::Label(const Operand& operand, uint32_t* index) {
  if (operand.kind != Operand::Kind::kName) return Fail("label expected");
  const Symbol* symbol = function_.Find(operand.scope, operand.name);
  if (symbol == nullptr || symbol->kind != Symbol::Kind::kLabel) return Fail("no label '" + operand.name + "'");
  *index = symbol->value;
  return true;
}

void Decoder::Patch(uint32_t instruction_index) { patches_.emplace_back(code_.ops.size() - 1, instruction_index); }

void Decoder::PatchTable(std::vector<const Op*>* table, const std::vector<uint32_t>& labels) {
  table_patches_.emplace_back(table, labels);
}

bool Decoder::One(const Instruction& instruction) {
  in_ = &instruction;
  types_.clear();
  for (const auto& modifier : instruction.modifiers) {
    const Type type = ParseType(modifier);
    if (type != Type::kNone) types_.push_back(type);
  }
  size_t guard = 0;
  if (instruction.guard >= 0) {
    guard = code_.ops.size();
    Emit(instruction.guard_negated ? SkipIf : SkipUnless, 0, instruction.guard + kFirstRegister);
  }
  const auto found = Table().find(instruction.opcode);
  if (found == Table().end()) return Fail("instruction '" + instruction.opcode + "' is not supported");
  if (!found->second(*this) || !error_.empty()) return Fail("not understood");
  if (instruction.guard >= 0) code_.ops[guard].imm = int64_t(code_.ops.size() - guard);
  return true;
}

bool Decoder::Run() {
  code_.frame.assign(size_t(kFirstRegister) + function_.slots, 0);
  code_.frame_bytes = (function_.frame_bytes + 15) / 16 * 16;
  starts_.reserve(function_.code.size() + 1);
  for (const auto& instruction : function_.code) {
    starts_.push_back(uint32_t(code_.ops.size()));
    if (!One(instruction)) return false;
  }
  in_ = nullptr;
  starts_.push_back(uint32_t(code_.ops.size()));
  Emit(EndOfCode);
  code_.frame.resize(code_.frame.size() + 2);  // whatever takes two slots stays inside
  for (const auto& [op, index] : patches_) code_.ops[op].target = &code_.ops[starts_[index]];
  for (const auto& [table, labels] : table_patches_) {
    for (const uint32_t label : labels) table->push_back(&code_.ops[starts_[label]]);
  }
  return true;
}

}  // namespace cuda_remote::softgpu::ptx
