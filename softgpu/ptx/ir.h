// SPDX-License-Identifier: Apache-2.0
// A parsed module: what the parser makes and the decoder reads.
//
// Plain data, immutable once parsed; owned by Program. Registers are already numbered (slots of a frame); names of
// variables, functions and labels are resolved by the decoder through the scopes.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_IR_H_
#define CUDA_REMOTE_SOFTGPU_PTX_IR_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/ptx/ptx.h"

namespace cuda_remote::softgpu::ptx {

struct Function;
struct Prepared;

struct Operand {
  enum class Kind : uint8_t {
    kNone,
    kReg,      // slot
    kImm,      // bits
    kF32,      // bits of a float
    kF64,      // bits of a double
    kSpecial,  // %tid.x and so on, in name
    kName,     // variable, function, label or prototype, + offset
    kVector,   // {..} or (..): elements
    kAddress,  // [..]: elements[0] + offset; more elements for forms like [a, {b}]
    kSink,     // _
  };
  Kind kind = Kind::kNone;
  bool negated = false;  // !p
  int32_t slot = -1;
  int32_t pair = -1;   // d|p: the slot of p, -2 for _
  int32_t scope = -1;  // where the name was written
  uint64_t bits = 0;
  int64_t offset = 0;
  std::string name;
  std::vector<Operand> elements;
};

struct Instruction {
  std::string opcode;                  // "ld"
  std::vector<std::string> modifiers;  // "global", "v4", "f32"
  std::vector<Operand> operands;
  int32_t guard = -1;  // slot of the predicate
  bool guard_negated = false;
  uint32_t line = 0;

  bool Has(std::string_view modifier) const {
    for (const auto& m : modifiers) {
      if (m == modifier) return true;
    }
    return false;
  }
};

struct SharedVar {
  std::string name;
  uint64_t size = 0;  // 0: .extern, the dynamic part
  uint32_t align = 1;
  bool external = false;
};

// A formal parameter or a return value of a function.
struct Formal {
  std::string name;
  uint32_t size = 0;
  uint32_t align = 1;
  int32_t slot = -1;    // of a .reg parameter
  uint32_t offset = 0;  // of a .param one: in the parameter block (kernel) or in the frame's memory (function)
};

struct Symbol {
  enum class Kind : uint8_t { kReg, kFrame, kKernelParam, kShared, kLabel, kPrototype, kTargets };
  Kind kind = Kind::kReg;
  bool param = false;  // kFrame: declared .param
  uint32_t value = 0;  // slot, frame offset, parameter offset, index into shared, instruction index, index
  uint32_t size = 0;
};

struct RegRange {
  uint32_t base = 0;
  uint32_t count = 0;
};

struct Scope {
  int32_t parent = -1;
  std::unordered_map<std::string, Symbol> names;
  std::unordered_map<std::string, RegRange> ranges;
};

struct Prototype {
  std::vector<Formal> returns, params;
};

struct Function {
  std::string name;
  bool entry = false;
  bool defined = false;
  bool visible = false;
  uint32_t line = 0;
  std::vector<Formal> returns, params;
  uint32_t param_bytes = 0;  // kernels
  uint32_t frame_bytes = 0;  // .local variables and .param space of functions and calls
  uint32_t local_bytes = 0;  // .local variables alone
  uint32_t slots = 0;
  uint32_t register_words = 0;
  std::vector<Scope> scopes;  // [0] is the function's own
  std::vector<Instruction> code;
  std::vector<Prototype> prototypes;
  std::vector<std::vector<Operand>> targets;  // .branchtargets lists
  std::vector<std::unique_ptr<SharedVar>> shared;
  uint64_t code_address = 0;

  // The symbol as seen from `scope`; null: not of this function.
  const Symbol* Find(int32_t scope, const std::string& name) const {
    for (int32_t s = scope; s >= 0; s = scopes[size_t(s)].parent) {
      const auto& names = scopes[size_t(s)].names;
      const auto it = names.find(name);
      if (it != names.end()) return &it->second;
    }
    return nullptr;
  }
};

struct Program {
  Program();
  ~Program();
  std::string text;
  std::vector<uint32_t> line_starts;
  int version_major = 0, version_minor = 0, target = 0;
  std::vector<std::unique_ptr<Function>> functions;
  std::unordered_map<std::string, Function*> function_names;
  std::vector<std::unique_ptr<SharedVar>> shared;
  std::unordered_map<std::string, SharedVar*> shared_names;
  std::vector<GlobalInfo> globals;
  std::unordered_map<std::string, size_t> global_names;
  std::unordered_map<std::string, std::string> aliases;
  std::vector<KernelInfo> kernels;
  std::unordered_map<std::string, size_t> kernel_names;
  // Functions whose address may be in a register or in memory.
  std::vector<const Function*> address_taken;
  SymbolAddresses addresses;
  std::vector<const Program*> others;

  mutable Mutex mutex;
  mutable std::unordered_map<std::string, std::shared_ptr<const Prepared>> prepared CR_GUARDED_BY(mutex);

  // The text of a line, without blanks around it.
  std::string_view LineText(uint32_t line) const;
  // A defined function, here or in the linked modules; null: none.
  const Function* FindFunction(const std::string& name, const Program** owner) const;
};

// Where a kernel's shared variables lie; computed once for a kernel from everything that it can reach.
struct SharedLayout {
  std::unordered_map<const SharedVar*, uint32_t> offsets;
  uint32_t static_bytes = 0;
  uint32_t dynamic_offset = 0;
};

struct Reachable {
  std::vector<std::pair<const Function*, const Program*>> functions;  // the kernel first
  std::set<const Function*> direct;                                   // not only through a function pointer
  SharedLayout shared;
};

// Everything that `kernel` can call, and the layout of its shared memory.
Reachable Reach(const Program& program, const Function& kernel);

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_IR_H_
