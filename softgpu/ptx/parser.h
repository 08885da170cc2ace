// SPDX-License-Identifier: Apache-2.0
// PTX text to a Program.
//
// Not thread-safe; one Parser for one text. Any text gives a Program or an error, in time and memory proportional to
// the text (declared sizes are bounded).
#ifndef CUDA_REMOTE_SOFTGPU_PTX_PARSER_H_
#define CUDA_REMOTE_SOFTGPU_PTX_PARSER_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "softgpu/ptx/ir.h"
#include "softgpu/ptx/lexer.h"

namespace cuda_remote::softgpu::ptx {

class Parser {
 public:
  // Fills `program`, whose text is set. False: error() says why.
  explicit Parser(Program* program) : program_(*program), lexer_(program->text) {}
  bool Parse();
  const std::string& error() const { return error_; }

 private:
  struct Linkage {
    bool visible = false, external = false, weak = false;
  };
  // What stands between a state space and a variable's name.
  struct VarType {
    uint32_t align = 0;
    uint32_t vector = 1;
    uint32_t bytes = 0;  // of one element; 0: none named
    bool is_float = false;
    bool managed = false;
    bool pred = false;
    std::string name;
  };

  // parser.cc: tokens, module level.
  bool Fail(const std::string& what);
  bool Advance();
  bool Expect(char c);
  bool SkipTo(char c);
  bool SkipBraces();
  bool ModuleItem();
  bool Section();
  bool Directive();
  bool Version();

  // parser_vars.cc: declarations of variables.
  bool TypeOf(VarType* type);
  bool Dimensions(const VarType& type, uint64_t* bytes, std::vector<uint64_t>* dims, bool* open);
  bool GlobalVar(const Linkage& linkage, Space space);
  bool Initializer(const VarType& type, const std::vector<uint64_t>& dims, GlobalInfo* global);
  bool InitLevel(const VarType& type, const std::vector<uint64_t>& dims, size_t level, uint64_t at, uint64_t end,
                 GlobalInfo* global, uint64_t* used);
  bool InitValue(const VarType& type, uint64_t at, GlobalInfo* global);
  bool InitSymbol(const VarType& type, uint64_t at, GlobalInfo* global);
  bool SharedDecl(const Linkage& linkage, Function* function);
  bool FrameVar(bool param);
  bool Registers();

  // parser_code.cc: functions.
  bool FunctionItem(const Linkage& linkage, bool entry);
  bool Formals(bool entry, Function* function, std::vector<Formal>* formals, bool names_needed);
  bool FunctionDirectives(Function* function, KernelInfo* kernel);
  bool Body();
  bool Statement();
  bool LabelOrPrototype(const std::string& name);
  bool ParseInstruction();
  bool ParseOperand(Operand* operand, int depth);
  bool ParseList(char close, Operand* operand, int depth);
  bool ResolveName(const std::string& name, Operand* operand);
  bool FindRegister(const std::string& name, int32_t* slot) const;
  uint32_t NewSlots(uint32_t count, uint32_t bytes);
  uint32_t NewFrameBytes(uint64_t bytes, uint32_t align);
  bool Declare(const std::string& name, const Symbol& symbol);

  Program& program_;
  Lexer lexer_;
  Token token_;
  std::string error_;
  Function* function_ = nullptr;
  int32_t scope_ = -1;
  int init_depth_ = 0;
  std::map<std::string, uint32_t> taken_;  // names used as values, with their lines
};

constexpr uint64_t kMaxVariableBytes = uint64_t{1} << 33;
constexpr uint32_t kMaxSlots = 1 << 20;
constexpr uint32_t kMaxFrameBytes = 1 << 24;

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_PARSER_H_
