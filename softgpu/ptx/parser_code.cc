// SPDX-License-Identifier: Apache-2.0
// Functions: signatures, statements, instructions, operands.
#include <algorithm>
#include <cstring>

#include "softgpu/ptx/parser.h"

namespace cuda_remote::softgpu::ptx {

// One list of parameters or return values; the token is behind '('.
bool Parser::Formals(bool entry, Function* function, std::vector<Formal>* formals, bool names_needed) {
  while (!token_.Is(')')) {
    const bool in_register = token_.IsDot("reg");
    if (!in_register && !token_.IsDot("param")) return Fail(".param or .reg expected");
    if (!Advance()) return false;
    VarType type;
    if (!TypeOf(&type)) return false;
    Formal formal;
    formal.align = type.align;
    if (token_.kind == TokenKind::kIdent) {
      formal.name = std::string(token_.text);
      if (!Advance()) return false;
    } else if (names_needed) {
      return Fail("parameter name expected");
    }
    uint64_t bytes = 0;
    std::vector<uint64_t> dims;
    bool open = false;
    if (!Dimensions(type, &bytes, &dims, &open)) return false;
    if (bytes > kMaxFrameBytes) return Fail("parameter too large");
    formal.size = uint32_t(bytes);
    if (function != nullptr) {
      Symbol symbol;
      symbol.size = formal.size;
      if (in_register) {
        symbol.kind = Symbol::Kind::kReg;
        symbol.value = NewSlots(type.bytes > 8 ? 2 : 1, type.bytes);
        formal.slot = int32_t(symbol.value);
      } else if (entry) {
        const uint64_t at = (uint64_t(function->param_bytes) + formal.align - 1) / formal.align * formal.align;
        if (at + bytes > kMaxFrameBytes) return Fail("too many parameters");
        symbol.kind = Symbol::Kind::kKernelParam;
        symbol.value = formal.offset = uint32_t(at);
        function->param_bytes = uint32_t(at + bytes);
      } else {
        symbol.kind = Symbol::Kind::kFrame;
        symbol.param = true;
        symbol.value = formal.offset = NewFrameBytes(bytes, formal.align);
      }
      if (!error_.empty()) return false;
      if (!formal.name.empty() && formal.name != "_" && !Declare(formal.name, symbol)) return false;
    }
    formals->push_back(std::move(formal));
    if (formals->size() > 65536) return Fail("too many parameters");
    if (token_.Is(',')) {
      if (!Advance()) return false;
    } else if (!token_.Is(')')) {
      return Fail("',' or ')' expected");
    }
  }
  return Advance();
}

bool Parser::FunctionDirectives(Function* function, KernelInfo* kernel) {
  (void)function;
  while (token_.kind == TokenKind::kDot) {
    const std::string name(token_.text);
    if (!Advance()) return false;
    if (name == "pragma") {
      if (!SkipTo(';')) return false;
      continue;
    }
    uint64_t values[3] = {1, 1, 1};
    int count = 0;
    while (token_.kind == TokenKind::kInteger) {
      if (count < 3) values[count++] = token_.bits;
      if (!Advance()) return false;
      if (!token_.Is(',')) break;
      if (!Advance()) return false;
    }
    if (name == "maxntid" || name == "reqntid") {
      uint64_t product = 1;
      for (int i = 0; i < 3; ++i) {
        if (values[i] == 0 || values[i] > 1024) return Fail("block dimension out of range");
        product *= values[i];
      }
      kernel->max_threads = uint32_t(std::min<uint64_t>(product, 1024));
      if (name == "reqntid") {
        for (int i = 0; i < 3; ++i) kernel->required_block[i] = uint32_t(values[i]);
      }
    } else if (name == "reqnctapercluster") {
      uint64_t product = 1;
      for (int i = 0; i < 3; ++i) {
        if (values[i] == 0 || values[i] > kMaxCluster) return Fail("cluster dimension out of range");
        product *= values[i];
        kernel->required_cluster[i] = uint32_t(values[i]);
      }
      if (product > kMaxCluster) return Fail("cluster too large");
    } else if (name == "explicitcluster") {
      kernel->needs_cluster = true;
    } else if (name == "maxclusterrank") {
      kernel->max_cluster = uint32_t(std::min<uint64_t>(values[0], kMaxCluster));
    } else if (name == "maxnreg" || name == "minnctapersm" || name == "maxnctapersm" || name == "noreturn" ||
               name == "unified" || name == "abi_preserve" || name == "abi_preserve_control" || name == "attribute" ||
               name == "language") {
      if (name == "attribute" && (!Expect('(') || !SkipTo(')'))) return false;
    } else {
      return Fail("unknown directive ." + name);
    }
  }
  return true;
}

bool Parser::FunctionItem(const Linkage& linkage, bool entry) {
  auto function = std::make_unique<Function>();
  function_ = function.get();
  function->entry = entry;
  function->visible = linkage.visible;
  function->line = token_.line;
  function->scopes.emplace_back();
  scope_ = 0;
  KernelInfo kernel;
  while (token_.kind == TokenKind::kDot) {  // .attribute(.unified(..)) and the like in front of the name
    if (!token_.IsDot("attribute")) return Fail("function name expected");
    if (!Advance() || !Expect('(')) return false;
    int depth = 1;
    while (depth > 0) {
      if (token_.kind == TokenKind::kEnd) return Fail("')' expected");
      depth += token_.Is('(') ? 1 : token_.Is(')') ? -1 : 0;
      if (!Advance()) return false;
    }
  }
  if (token_.Is('(')) {
    if (entry) return Fail("a kernel returns nothing");
    if (!Advance() || !Formals(false, function_, &function->returns, false)) return false;
  }
  if (token_.kind != TokenKind::kIdent) return Fail("function name expected");
  function->name = std::string(token_.text);
  if (!Advance()) return false;
  if (token_.Is('(') && (!Advance() || !Formals(entry, function_, &function->params, false))) return false;
  if (!FunctionDirectives(function_, &kernel)) return false;
  if (token_.Is('{')) {
    if (!Advance()) return false;
    function->defined = true;
    if (!Body()) return false;
  } else if (!Expect(';')) {
    return false;
  }
  function_ = nullptr;
  scope_ = -1;

  const std::string name = function->name;
  const auto existing = program_.function_names.find(name);
  if (existing != program_.function_names.end()) {
    if (!function->defined) return true;
    if (existing->second->defined) {
      if (linkage.weak) return true;
      return Fail("function " + name + " defined twice");
    }
  }
  if (entry && function->defined) {
    kernel.name = name;
    kernel.line = function->line;
    for (const auto& formal : function->params) {
      ParamInfo param;
      param.name = formal.name;
      param.offset = formal.offset;
      param.size = formal.size;
      param.align = formal.align;
      kernel.params.push_back(std::move(param));
    }
    kernel.param_bytes = function->param_bytes;
    kernel.local_bytes = function->local_bytes;
    // ptxas reuses registers; a third of the virtual ones is about what it needs.
    kernel.register_estimate = std::min<uint32_t>(255, 16 + function->register_words / 3);
    program_.kernel_names[name] = program_.kernels.size();
    program_.kernels.push_back(std::move(kernel));
  }
  program_.function_names[name] = function.get();
  program_.functions.push_back(std::move(function));
  return true;
}

// The statements up to the function's '}', whose '{' is read.
bool Parser::Body() {
  for (;;) {
    if (token_.Is('}')) {
      if (scope_ == 0) return Advance();
      scope_ = function_->scopes[size_t(scope_)].parent;
      if (!Advance()) return false;
      continue;
    }
    if (token_.kind == TokenKind::kEnd) return Fail("'}' expected before the end");
    if (token_.Is('{')) {
      if (function_->scopes.size() > 1000000) return Fail("too many scopes");
      Scope inner;
      inner.parent = scope_;
      int depth = 0;
      for (int32_t s = scope_; s >= 0; s = function_->scopes[size_t(s)].parent) ++depth;
      if (depth > 64) return Fail("scopes nested too deeply");
      scope_ = int32_t(function_->scopes.size());
      function_->scopes.push_back(std::move(inner));
      if (!Advance()) return false;
      continue;
    }
    if (!Statement()) return Fail("not understood");
  }
}

bool Parser::Statement() {
  if (token_.Is(';')) return Advance();
  if (token_.kind == TokenKind::kDot) {
    Linkage linkage;
    while (token_.IsDot("extern") || token_.IsDot("visible") || token_.IsDot("weak")) {
      linkage.external |= token_.IsDot("extern");
      if (!Advance()) return false;
    }
    const std::string name(token_.text);
    if (name == "pragma") return SkipTo(';');
    if (name == "section") return SkipBraces();
    if (name == "branchtargets" || name == "calltargets") return Fail("label expected in front of ." + name);
    if (!Advance()) return false;
    if (name == "reg") return Registers();
    if (name == "local") return FrameVar(false);
    if (name == "param") return FrameVar(true);
    if (name == "shared") return SharedDecl(linkage, function_);
    if (name == "global") return GlobalVar(linkage, Space::kGlobal);
    if (name == "const") return GlobalVar(linkage, Space::kConst);
    return Fail("unknown directive ." + name);
  }
  return ParseInstruction();
}

bool Parser::LabelOrPrototype(const std::string& name) {
  Symbol symbol;
  if (token_.IsDot("callprototype")) {
    Prototype prototype;
    if (!Advance()) return false;
    if (token_.Is('(') && (!Advance() || !Formals(false, nullptr, &prototype.returns, false))) return false;
    if (token_.kind != TokenKind::kIdent || token_.text != "_") return Fail("'_' expected");
    if (!Advance()) return false;
    if (token_.Is('(') && (!Advance() || !Formals(false, nullptr, &prototype.params, false))) return false;
    KernelInfo unused;
    if (!FunctionDirectives(function_, &unused)) return false;
    symbol.kind = Symbol::Kind::kPrototype;
    symbol.value = uint32_t(function_->prototypes.size());
    function_->prototypes.push_back(std::move(prototype));
    return Declare(name, symbol) && Expect(';');
  }
  if (token_.IsDot("branchtargets") || token_.IsDot("calltargets")) {
    symbol.kind = Symbol::Kind::kTargets;
    symbol.value = uint32_t(function_->targets.size());
    if (!Advance()) return false;
    std::vector<Operand> targets;
    for (;;) {
      Operand target;
      if (!ParseOperand(&target, 0)) return false;
      targets.push_back(std::move(target));
      if (token_.Is(';')) break;
      if (!Expect(',')) return false;
    }
    function_->targets.push_back(std::move(targets));
    return Declare(name, symbol) && Expect(';');
  }
  symbol.kind = Symbol::Kind::kLabel;
  symbol.value = uint32_t(function_->code.size());
  return Declare(name, symbol);
}

bool Parser::ParseInstruction() {
  Instruction instruction;
  instruction.line = token_.line;
  if (token_.Is('@')) {
    if (!Advance()) return false;
    if (token_.Is('!')) {
      instruction.guard_negated = true;
      if (!Advance()) return false;
    }
    if (token_.kind != TokenKind::kIdent || !FindRegister(std::string(token_.text), &instruction.guard)) {
      return Fail("predicate expected");
    }
    if (!Advance()) return false;
  }
  if (token_.kind != TokenKind::kIdent) return Fail("instruction expected");
  instruction.opcode = std::string(token_.text);
  instruction.line = token_.line;
  if (!Advance()) return false;
  if (instruction.guard < 0 && token_.Is(':')) return Advance() && LabelOrPrototype(instruction.opcode);
  while (token_.kind == TokenKind::kDot) {
    instruction.modifiers.emplace_back(token_.text);
    if (instruction.modifiers.size() > 32) return Fail("too many modifiers");
    if (!Advance()) return false;
  }
  if (!token_.Is(';')) {
    for (;;) {
      Operand operand;
      if (!ParseOperand(&operand, 0)) return false;
      instruction.operands.push_back(std::move(operand));
      if (token_.Is(';')) break;
      if (!Expect(',')) return false;
    }
  }
  function_->code.push_back(std::move(instruction));
  return Advance();
}

bool Parser::ParseList(char close, Operand* operand, int depth) {
  operand->kind = Operand::Kind::kVector;
  while (!token_.Is(close)) {
    Operand element;
    if (!ParseOperand(&element, depth + 1)) return false;
    operand->elements.push_back(std::move(element));
    if (token_.Is(',')) {
      if (!Advance()) return false;
    } else if (!token_.Is(close)) {
      return Fail(std::string("',' or '") + close + "' expected");
    }
  }
  return Advance();
}

bool Parser::ParseOperand(Operand* operand, int depth) {
  if (depth > 8) return Fail("operand nested too deeply");
  operand->scope = scope_;
  if (token_.Is('{')) return Advance() && ParseList('}', operand, depth);
  if (token_.Is('(')) return Advance() && ParseList(')', operand, depth);
  if (token_.Is('[')) {
    if (!Advance() || !ParseList(']', operand, depth)) return false;
    operand->kind = Operand::Kind::kAddress;
    return true;
  }
  if (token_.Is('!')) {
    operand->negated = true;
    if (!Advance()) return false;
  }
  bool minus = false, invert = false;
  while (token_.Is('-') || token_.Is('+') || token_.Is('~')) {
    if (token_.Is('-')) minus = !minus;
    if (token_.Is('~')) invert = !invert;
    if (!Advance()) return false;
  }
  switch (token_.kind) {
    case TokenKind::kInteger:
      operand->kind = Operand::Kind::kImm;
      operand->bits = invert ? ~token_.bits : token_.bits;
      if (minus) operand->bits = 0 - operand->bits;
      return Advance();
    case TokenKind::kF32:
      operand->kind = Operand::Kind::kF32;
      operand->bits = minus ? token_.bits ^ 0x80000000u : token_.bits;
      return Advance();
    case TokenKind::kF64:
      operand->kind = Operand::Kind::kF64;
      operand->bits = minus ? token_.bits ^ (uint64_t{1} << 63) : token_.bits;
      return Advance();
    case TokenKind::kIdent:
      break;
    default:
      return Fail("operand expected");
  }
  if (minus || invert) return Fail("a sign in front of a name");
  std::string name(token_.text);
  if (!Advance()) return false;
  if (name == "_") {
    operand->kind = Operand::Kind::kSink;
  } else if (!ResolveName(name, operand)) {
    return false;
  }
  if (token_.Is('|')) {  // d|p
    if (!Advance()) return false;
    if (token_.kind != TokenKind::kIdent) return Fail("predicate expected");
    const std::string second(token_.text);
    if (second == "_") {
      operand->pair = -2;
    } else if (!FindRegister(second, &operand->pair)) {
      return Fail("'" + second + "' is no register");
    }
    return Advance();
  }
  while (token_.Is('+') || token_.Is('-')) {
    const bool negative = token_.Is('-');
    if (!Advance()) return false;
    bool flip = false;
    while (token_.Is('-')) {
      flip = !flip;
      if (!Advance()) return false;
    }
    if (token_.kind != TokenKind::kInteger) return Fail("offset expected");
    const uint64_t bits = negative != flip ? 0 - token_.bits : token_.bits;
    operand->offset = int64_t(uint64_t(operand->offset) + bits);
    if (!Advance()) return false;
  }
  return true;
}

// A name inside an operand: register, special register, or something for the decoder.
bool Parser::ResolveName(const std::string& name, Operand* operand) {
  std::string full = name;
  if (FindRegister(name, &operand->slot)) {
    operand->kind = Operand::Kind::kReg;
    if (token_.kind == TokenKind::kDot) {  // element of a vector register
      const size_t index = token_.text.size() == 1 ? std::string_view("xyzw").find(token_.text[0]) : std::string::npos;
      const Symbol* symbol = function_->Find(scope_, name);
      if (index == std::string::npos || symbol == nullptr || symbol->size <= index) return Fail("no such element");
      operand->slot += int32_t(index);
      return Advance();
    }
    return true;
  }
  if (name == "WARP_SZ") {
    operand->kind = Operand::Kind::kImm;
    operand->bits = 32;
    return true;
  }
  if (name[0] == '%') {
    operand->kind = Operand::Kind::kSpecial;
    while (token_.kind == TokenKind::kDot) {
      full += "." + std::string(token_.text);
      if (!Advance()) return false;
    }
    operand->name = full;
    return true;
  }
  operand->kind = Operand::Kind::kName;
  operand->name = name;
  taken_.emplace(name, token_.line);
  return true;
}

bool Parser::FindRegister(const std::string& name, int32_t* slot) const {
  size_t digits = name.size();
  while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9') --digits;
  uint64_t index = 0;
  const bool numbered = digits < name.size() && name.size() - digits <= 7;
  if (numbered) index = std::stoull(name.substr(digits));
  for (int32_t s = scope_; s >= 0; s = function_->scopes[size_t(s)].parent) {
    const Scope& scope = function_->scopes[size_t(s)];
    const auto found = scope.names.find(name);
    if (found != scope.names.end()) {
      if (found->second.kind != Symbol::Kind::kReg) return false;
      *slot = int32_t(found->second.value);
      return true;
    }
    if (!numbered) continue;
    // %r<5> declares %r0 to %r4; the prefix itself may end in digits.
    for (size_t cut = digits; cut < name.size(); ++cut) {
      const auto range = scope.ranges.find(name.substr(0, cut));
      if (range == scope.ranges.end()) continue;
      if (name[cut] == '0' && cut + 1 < name.size()) continue;
      index = std::stoull(name.substr(cut));
      if (index >= range->second.count) continue;
      *slot = int32_t(range->second.base + index);
      return true;
    }
  }
  return false;
}

bool Parser::Declare(const std::string& name, const Symbol& symbol) {
  auto& names = function_->scopes[size_t(scope_)].names;
  if (!names.emplace(name, symbol).second) return Fail("'" + name + "' declared twice");
  return true;
}

}  // namespace cuda_remote::softgpu::ptx
