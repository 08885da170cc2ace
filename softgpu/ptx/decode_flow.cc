// SPDX-License-Identifier: Apache-2.0
// Branches, calls, returns, ends.
#include <algorithm>

#include "softgpu/ptx/decoder.h"

namespace cuda_remote::softgpu::ptx {
namespace {

const Op* Branch(const Op* op, uint64_t*, Thread*) { return op->target; }
const Op* BranchIf(const Op* op, uint64_t* r, Thread*) { return (r[op->a] & 1) != 0 ? op->target : op + 1; }
const Op* BranchUnless(const Op* op, uint64_t* r, Thread*) { return (r[op->a] & 1) == 0 ? op->target : op + 1; }
const Op* BranchIndexed(const Op* op, uint64_t* r, Thread* t) {
  const auto& table = *static_cast<const std::vector<const Op*>*>(op->aux);
  const uint32_t index = uint32_t(r[op->a]);
  if (index >= table.size()) return Raise(t, op, Fault::kInvalidCode, "branch index outside of its table");
  return table[index];
}

const Op* End(const Op*, uint64_t*, Thread* t) {
  Exit(t);
  return nullptr;
}
const Op* Trap(const Op* op, uint64_t*, Thread* t) { return Raise(t, op, Fault::kTrap, "trap"); }

// Where a value lies in a frame of the thread.
uint8_t* PlaceOf(Thread* t, const Frame& frame, int32_t slot, uint32_t offset) {
  if (slot >= 0) return reinterpret_cast<uint8_t*>(&t->registers[frame.register_base + uint32_t(slot)]);
  return t->local.data() + frame.local_base + offset;
}
uint32_t BytesAt(int32_t slot, uint32_t size) { return slot >= 0 ? std::min<uint32_t>(size, 16) : size; }

const Op* Jump(const Op* op, Thread* t, const CallInfo& call, const Code* callee) {
  const auto& formals = callee->function->params;
  const auto& returns = callee->function->returns;
  if (formals.size() != call.args.size() || returns.size() < call.results.size()) {
    return Raise(t, op, Fault::kInvalidCode, "call of a function with other parameters: " + callee->function->name);
  }
  const size_t depth = t->frames.size();
  if (!Enter(t, op, callee, op)) return nullptr;
  const Frame &caller = t->frames[depth - 1], &frame = t->frames[depth];
  for (size_t i = 0; i < formals.size(); ++i) {
    const Formal& formal = formals[i];
    const Passed& arg = call.args[i];
    const int32_t slot = formal.slot >= 0 ? formal.slot + kFirstRegister : -1;
    const uint32_t bytes = std::min(BytesAt(slot, formal.size), BytesAt(arg.slot, arg.bytes));
    std::memcpy(PlaceOf(t, frame, slot, formal.offset), PlaceOf(t, caller, arg.slot, arg.offset), bytes);
  }
  return callee->ops.data();
}

const Op* Call(const Op* op, uint64_t*, Thread* t) {
  const auto& call = *static_cast<const CallInfo*>(op->aux);
  return Jump(op, t, call, call.callee);
}
const Op* CallIndirect(const Op* op, uint64_t* r, Thread* t) {
  const auto& call = *static_cast<const CallInfo*>(op->aux);
  const auto& known = t->block->launch->prepared->by_address;
  const auto it = known.find(r[op->a]);
  if (it == known.end()) return Raise(t, op, Fault::kInvalidCode, "call of an address that is no function");
  if (!it->second->unsupported.empty()) return Raise(t, op, Fault::kUnsupported, it->second->unsupported);
  return Jump(op, t, call, it->second);
}
const Op* CallSystem(const Op* op, uint64_t*, Thread* t) {
  return RunSystemCall(op, t, *static_cast<const CallInfo*>(op->aux));
}

const Op* Return(const Op* op, uint64_t* r, Thread* t) {
  if (t->frames.size() <= 1) return End(op, r, t);
  const Frame callee = t->frames.back();
  const Frame& caller = t->frames[t->frames.size() - 2];
  const auto& call = *static_cast<const CallInfo*>(callee.back->aux);
  const auto& returns = callee.code->function->returns;
  for (size_t i = 0; i < call.results.size(); ++i) {
    const Passed& result = call.results[i];
    const int32_t slot = returns[i].slot >= 0 ? returns[i].slot + kFirstRegister : -1;
    const uint32_t bytes = std::min(BytesAt(slot, returns[i].size), BytesAt(result.slot, result.bytes));
    std::memcpy(PlaceOf(t, caller, result.slot, result.offset), PlaceOf(t, callee, slot, returns[i].offset), bytes);
  }
  t->frames.pop_back();
  t->local.resize(callee.local_base);
  t->r = t->registers.data() + caller.register_base;
  return callee.back + 1;
}

bool DecodeBra(Decoder& d) {
  if (!d.Allow("uni") || !d.Operands(1, 1)) return false;
  uint32_t label = 0;
  if (!d.Label(d.in().operands[0], &label)) return false;
  if (d.in().guard >= 0) {
    // The guard's own skip was just emitted; one op does both.
    d.code().ops.pop_back();
    d.Emit(d.in().guard_negated ? BranchUnless : BranchIf, 0, d.in().guard + kFirstRegister);
    d.Patch(label);
    return true;
  }
  d.Emit(Branch);
  d.Patch(label);
  return true;
}

bool DecodeBrx(Decoder& d) {
  if (!d.Allow("idx uni") || !d.Operands(2, 2)) return false;
  const Operand& list = d.in().operands[1];
  const Symbol* symbol = list.kind == Operand::Kind::kName ? d.function().Find(list.scope, list.name) : nullptr;
  if (symbol == nullptr || symbol->kind != Symbol::Kind::kTargets) return d.Fail("branch targets expected");
  std::vector<uint32_t> labels;
  for (const auto& target : d.function().targets[symbol->value]) {
    uint32_t label = 0;
    if (!d.Label(target, &label)) return false;
    labels.push_back(label);
  }
  const int32_t index = d.Src(0, Type::kU32);
  d.code().tables.push_back(std::make_unique<std::vector<const Op*>>());
  auto* table = d.code().tables.back().get();
  d.Emit(BranchIndexed, 0, index).aux = table;
  d.PatchTable(table, labels);
  return true;
}

bool PassedOf(Decoder& d, const Operand& operand, bool argument, Passed* passed) {
  if (operand.kind == Operand::Kind::kName) {
    const Symbol* symbol = d.function().Find(operand.scope, operand.name);
    if (symbol == nullptr || symbol->kind != Symbol::Kind::kFrame || operand.offset != 0) {
      return d.Fail("'" + operand.name + "' cannot be passed");
    }
    passed->offset = symbol->value;
    passed->bytes = symbol->size;
    return true;
  }
  passed->slot = argument ? d.Source(operand, Type::kB64) : d.Destination(operand);
  passed->bytes = 8;
  return true;
}

SystemCall SystemCallOf(const std::string& name) {
  if (name == "vprintf") return SystemCall::kPrintf;
  if (name == "__assertfail" || name == "__assert_fail") return SystemCall::kAssert;
  if (name == "malloc") return SystemCall::kMalloc;
  if (name == "free") return SystemCall::kFree;
  if (name == "cudaGraphSetConditional") return SystemCall::kSetConditional;
  return SystemCall::kNone;
}

bool DecodeCall(Decoder& d) {
  if (!d.Allow("uni")) return false;
  const auto& operands = d.in().operands;
  auto call = std::make_unique<CallInfo>();
  size_t at = 0;
  if (at < operands.size() && operands[at].kind == Operand::Kind::kVector) {
    for (const auto& element : operands[at].elements) {
      call->results.emplace_back();
      if (!PassedOf(d, element, false, &call->results.back())) return false;
    }
    ++at;
  }
  if (at >= operands.size()) return d.Fail("function expected");
  const Operand& callee = operands[at++];
  if (at < operands.size() && operands[at].kind == Operand::Kind::kVector) {
    for (const auto& element : operands[at].elements) {
      call->args.emplace_back();
      if (!PassedOf(d, element, true, &call->args.back())) return false;
    }
    ++at;
  }
  if (operands.size() > at + 1) return d.Fail("wrong number of operands");
  const CallInfo* info = call.get();
  if (callee.kind == Operand::Kind::kReg) {
    d.code().calls.push_back(std::move(call));
    d.Emit(CallIndirect, 0, d.Source(callee, Type::kU64)).aux = info;
    return true;
  }
  if (callee.kind != Operand::Kind::kName) return d.Fail("function expected");
  const Program* owner = nullptr;
  const Function* function = d.program().FindFunction(callee.name, &owner);
  if (function == nullptr) {
    call->system = SystemCallOf(callee.name);
    if (call->system == SystemCall::kNone) return d.Fail("function '" + callee.name + "' is not defined or supported");
    d.code().calls.push_back(std::move(call));
    d.Emit(CallSystem).aux = info;
    return true;
  }
  const auto known = d.prepared().by_function.find(function);
  if (known == d.prepared().by_function.end() || function->entry) {
    return d.Fail("'" + callee.name + "' cannot be called");
  }
  if (function->params.size() != call->args.size() || function->returns.size() < call->results.size()) {
    return d.Fail("'" + callee.name + "' has other parameters");
  }
  call->callee = known->second;
  d.code().calls.push_back(std::move(call));
  d.Emit(Call).aux = info;
  return true;
}

bool DecodeRet(Decoder& d) {
  if (!d.Allow("uni") || !d.Operands(0, 0)) return false;
  d.Emit(Return);
  return true;
}
bool DecodeExit(Decoder& d) {
  if (!d.Allow("") || !d.Operands(0, 0)) return false;
  d.Emit(End);
  return true;
}
bool DecodeTrap(Decoder& d) {
  if (!d.Allow("")) return false;
  d.Emit(Trap);
  return true;
}
bool DecodeNothing(Decoder&) { return true; }

// alloca: d the address in local memory, a the size, n the alignment.
const Op* Alloca(const Op* op, uint64_t* r, Thread* t) {
  const uint64_t base = (t->local.size() + op->n - 1) / op->n * op->n, bytes = r[op->a];
  const uint64_t limit = t->block->launch->options->stack_bytes;
  if (base > limit || bytes > limit - base) return Raise(t, op, Fault::kStackOverflow, "stack overflow in alloca");
  t->local.resize(base + bytes);
  r[op->d] = base;
  return op + 1;
}
const Op* StackSave(const Op* op, uint64_t* r, Thread* t) {
  r[op->d] = t->local.size();
  return op + 1;
}
const Op* StackRestore(const Op* op, uint64_t* r, Thread* t) {
  const Frame& frame = t->frames.back();
  if (r[op->a] < uint64_t(frame.local_base) + frame.code->frame_bytes || r[op->a] > t->local.size()) {
    return Raise(t, op, Fault::kInvalidCode, "stackrestore of something that was not saved");
  }
  t->local.resize(r[op->a]);
  return op + 1;
}

bool DecodeAlloca(Decoder& d) {
  if (!d.Allow("") || !d.Operands(2, 3)) return false;
  uint64_t align = 8;
  if (d.in().operands.size() == 3) {
    if (d.in().operands[2].kind != Operand::Kind::kImm) return d.Fail("the alignment must be a number");
    align = d.in().operands[2].bits;
  }
  if (align == 0 || align > 4096 || (align & (align - 1)) != 0) return d.Fail("the alignment must be a power of two");
  const int32_t size = d.Src(1, d.TypeFromEnd());
  d.Emit(Alloca, d.Dst(0), size).n = uint16_t(align);
  return true;
}
bool DecodeStack(Decoder& d) {
  if (!d.Allow("") || !d.Operands(1, 1)) return false;
  if (d.in().opcode == "stacksave") {
    d.Emit(StackSave, d.Dst(0));
  } else {
    d.Emit(StackRestore, 0, d.Src(0, Type::kU64));
  }
  return true;
}

}  // namespace

void AddFlowOps(DecodeTable* table) {
  (*table)["bra"] = DecodeBra;
  (*table)["brx"] = DecodeBrx;
  (*table)["call"] = DecodeCall;
  (*table)["ret"] = DecodeRet;
  (*table)["exit"] = DecodeExit;
  (*table)["trap"] = DecodeTrap;
  (*table)["brkpt"] = DecodeTrap;
  (*table)["alloca"] = DecodeAlloca;
  (*table)["stacksave"] = DecodeStack;
  (*table)["stackrestore"] = DecodeStack;
  for (const char* name : {"pmevent", "nop", "setmaxnreg", "griddepcontrol"}) (*table)[name] = DecodeNothing;
}

}  // namespace cuda_remote::softgpu::ptx
