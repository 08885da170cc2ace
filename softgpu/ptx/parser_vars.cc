// SPDX-License-Identifier: Apache-2.0
// Declarations of variables and registers.
#include <algorithm>
#include <cstring>

#include "softgpu/ptx/parser.h"

namespace cuda_remote::softgpu::ptx {
namespace {

struct TypeSize {
  const char* name;
  uint32_t bytes;
  bool is_float;
};

constexpr TypeSize kTypes[] = {
    {"b8", 1, false},     {"u8", 1, false},         {"s8", 1, false},      {"b16", 2, false},    {"u16", 2, false},
    {"s16", 2, false},    {"f16", 2, false},        {"bf16", 2, false},    {"b32", 4, false},    {"u32", 4, false},
    {"s32", 4, false},    {"f32", 4, true},         {"f16x2", 4, false},   {"bf16x2", 4, false}, {"tf32", 4, false},
    {"b64", 8, false},    {"u64", 8, false},        {"s64", 8, false},     {"f64", 8, true},     {"b128", 16, false},
    {"texref", 8, false}, {"samplerref", 8, false}, {"surfref", 8, false},
};

}  // namespace

// .align, .attribute, .v2 and the type, in any order; stops at the name.
bool Parser::TypeOf(VarType* type) {
  bool pointee = false;
  while (token_.kind == TokenKind::kDot) {
    const std::string name(token_.text);
    if (name == "align") {
      if (!Advance()) return false;
      if (token_.kind != TokenKind::kInteger || token_.bits == 0 || token_.bits > 4096 ||
          (token_.bits & (token_.bits - 1)) != 0) {
        return Fail("alignment must be a power of two");
      }
      if (!pointee) type->align = uint32_t(token_.bits);
    } else if (name == "v2" || name == "v4" || name == "v8") {
      type->vector = uint32_t(name[1] - '0');
    } else if (name == "pred") {
      type->bytes = 1;
      type->pred = true;
    } else if (name == "attribute") {
      if (!Advance() || !Expect('(')) return false;
      while (!token_.Is(')')) {
        if (token_.IsDot("managed")) type->managed = true;
        if (token_.kind == TokenKind::kEnd) return Fail("')' expected");
        if (!Advance()) return false;
      }  // the ')' itself is passed below
    } else if (name == "ptr") {
      pointee = true;  // an .align behind it is that of the memory pointed to
    } else if (name == "global" || name == "const" || name == "shared" || name == "local" || name == "param" ||
               name == "noalias") {
      // .ptr .global of parameters: says what a pointer points to
    } else {
      const auto* found =
          std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeSize& entry) { return name == entry.name; });
      if (found == std::end(kTypes)) return Fail("unknown type ." + name);
      type->bytes = found->bytes;
      type->is_float = found->is_float;
      type->name = name;
    }
    if (!Advance()) return false;
  }
  if (type->bytes == 0) return Fail("type expected");
  if (type->align == 0) type->align = type->bytes * type->vector;
  return true;
}

// [n][m] after a name; *bytes is the whole size.
bool Parser::Dimensions(const VarType& type, uint64_t* bytes, std::vector<uint64_t>* dims, bool* open) {
  *bytes = uint64_t(type.bytes) * type.vector;
  *open = false;
  while (token_.Is('[')) {
    if (!Advance()) return false;
    uint64_t count = 0;
    if (token_.kind == TokenKind::kInteger) {
      count = token_.bits;
      if (!Advance()) return false;
    } else {
      *open = true;
    }
    if (!Expect(']')) return false;
    if (dims->size() >= 16) return Fail("too many dimensions");
    dims->push_back(count);
    if (count != 0 && *bytes > kMaxVariableBytes / count) return Fail("variable too large");
    *bytes *= count;
  }
  return true;
}

bool Parser::GlobalVar(const Linkage& linkage, Space space) {
  if (token_.Is('[')) {  // .const[bank] of old PTX
    if (!Advance() || !Advance() || !Expect(']')) return false;
  }
  VarType type;
  if (!TypeOf(&type)) return false;
  for (;;) {
    if (token_.kind != TokenKind::kIdent) return Fail("variable name expected");
    GlobalInfo global;
    global.name = std::string(token_.text);
    global.space = space;
    global.align = type.align;
    global.visible = linkage.visible;
    global.external = linkage.external;
    global.managed = type.managed;
    if (type.name == "texref") global.reference = Reference::kTexture;
    if (type.name == "surfref") global.reference = Reference::kSurface;
    if (!Advance()) return false;
    std::vector<uint64_t> dims;
    bool open = false;
    if (!Dimensions(type, &global.size, &dims, &open)) return false;
    if (token_.Is('=')) {
      if (!Advance() || !Initializer(type, dims, &global)) return false;
      if (open) global.size = global.initial.size();
    }
    const auto existing = program_.global_names.find(global.name);
    if (existing == program_.global_names.end()) {
      program_.global_names[global.name] = program_.globals.size();
      program_.globals.push_back(std::move(global));
    } else if (program_.globals[existing->second].external) {
      program_.globals[existing->second] = std::move(global);
    } else if (!linkage.external && !linkage.weak) {
      return Fail("variable declared twice");
    }
    if (token_.Is(';')) return Advance();
    if (!Expect(',')) return false;
  }
}

bool Parser::Initializer(const VarType& type, const std::vector<uint64_t>& dims, GlobalInfo* global) {
  uint64_t used = 0;
  std::vector<uint64_t> all = dims;
  if (type.vector > 1) all.push_back(type.vector);
  init_depth_ = 0;
  const uint64_t end = !all.empty() && all[0] == 0 ? kMaxVariableBytes : global->size;
  if (token_.Is('{')) return InitLevel(type, all, 0, 0, end, global, &used);
  return InitValue(type, 0, global);
}

// One brace level: elements of dimension `level`, from byte `at`.
bool Parser::InitLevel(const VarType& type, const std::vector<uint64_t>& dims, size_t level, uint64_t at, uint64_t end,
                       GlobalInfo* global, uint64_t* used) {
  if (++init_depth_ > 20) return Fail("initializer too deep");
  uint64_t element = type.bytes;
  for (size_t i = level + 1; i < dims.size(); ++i) element *= dims[i];
  if (!Expect('{')) return false;
  while (!token_.Is('}')) {
    if (at + type.bytes > end) return Fail("initializer longer than the variable");
    if (token_.Is('{')) {
      uint64_t inner = 0;
      if (!InitLevel(type, dims, level + 1, at, std::min(end, at + element), global, &inner)) return false;
      at += element;
    } else {
      if (!InitValue(type, at, global)) return false;
      at += type.bytes;
    }
    if (token_.Is(',')) {
      if (!Advance()) return false;
    } else if (!token_.Is('}')) {
      return Fail("',' or '}' expected");
    }
  }
  *used = at;
  --init_depth_;
  return Advance();
}

bool Parser::InitValue(const VarType& type, uint64_t at, GlobalInfo* global) {
  bool negative = false;
  while (token_.Is('-') || token_.Is('+')) {
    negative ^= token_.Is('-');
    if (!Advance()) return false;
  }
  if (token_.kind == TokenKind::kIdent) {
    return negative ? Fail("a sign in front of a name") : InitSymbol(type, at, global);
  }
  uint64_t bits = token_.bits;
  bool passed = false;
  if (token_.kind == TokenKind::kF32 || token_.kind == TokenKind::kF64) {
    double value;
    if (token_.kind == TokenKind::kF32) {
      float single;
      const uint32_t low = uint32_t(bits);
      std::memcpy(&single, &low, 4);
      value = single;
    } else {
      std::memcpy(&value, &bits, 8);
    }
    if (type.bytes == 4) {
      float single = token_.kind == TokenKind::kF32 ? 0 : float(value);
      uint32_t low = uint32_t(bits);
      if (token_.kind == TokenKind::kF64) std::memcpy(&low, &single, 4);
      bits = negative ? low ^ 0x80000000u : low;
    } else {
      std::memcpy(&bits, &value, 8);
      if (negative) bits ^= uint64_t{1} << 63;
    }
  } else if (token_.kind == TokenKind::kInteger) {
    if (bits != 0 && !negative) {
      if (!Advance()) return false;
      if (token_.Is('(')) {  // 0xFF00(name): one byte of an address
        if (!Advance() || !InitSymbol(type, at, global)) return false;
        auto& relocation = global->relocations.back();
        while ((bits >> relocation.shift & 1) == 0) ++relocation.shift;
        relocation.bytes = std::min<uint32_t>(type.bytes, 8);
        return Expect(')');
      }
      passed = true;
    }
    if (negative) bits = 0 - bits;
    if (type.is_float) {  // 1 stands for 1.0
      const double value = double(int64_t(bits));
      const float single = float(value);
      bits = 0;
      if (type.bytes == 4) {
        std::memcpy(&bits, &single, 4);
      } else {
        std::memcpy(&bits, &value, 8);
      }
    }
  } else {
    return Fail("value expected");
  }
  if (at + type.bytes > global->size && global->size != 0) return Fail("initializer longer than the variable");
  if (global->initial.size() < at + type.bytes) {
    // Nested braces may skip elements; a hostile text must not make us fill gigabytes.
    if (at > global->initial.size() + (1 << 26)) return Fail("initializer too sparse");
    global->initial.resize(at + type.bytes, '\0');
  }
  std::memcpy(&global->initial[at], &bits, std::min<uint32_t>(type.bytes, 8));
  return passed || Advance();
}

// name, name+offset, generic(name)+offset, mask(any of these).
bool Parser::InitSymbol(const VarType& type, uint64_t at, GlobalInfo* global) {
  Relocation relocation;
  relocation.offset = uint32_t(at);
  relocation.bytes = type.bytes;
  int open = 0;
  while (token_.kind == TokenKind::kIdent && token_.text == "generic") {
    if (!Advance() || !Expect('(')) return false;
    if (++open > 4) return Fail("symbol expected");
  }
  if (token_.kind != TokenKind::kIdent) return Fail("symbol expected");
  relocation.symbol = std::string(token_.text);
  if (!Advance()) return false;
  while (token_.Is(')') && open > 0) {
    --open;
    if (!Advance()) return false;
  }
  while (token_.Is('+') || token_.Is('-')) {
    const bool negative = token_.Is('-');
    if (!Advance()) return false;
    if (token_.kind != TokenKind::kInteger) return Fail("offset expected");
    relocation.addend += int64_t(negative ? 0 - token_.bits : token_.bits);
    if (!Advance()) return false;
  }
  while (open > 0) {
    if (!Expect(')')) return false;
    --open;
  }
  global->relocations.push_back(relocation);
  if (global->initial.size() < at + type.bytes) {
    if (at > global->initial.size() + (1 << 26)) return Fail("initializer too sparse");
    global->initial.resize(at + type.bytes, '\0');
  }
  return true;
}

bool Parser::SharedDecl(const Linkage& linkage, Function* function) {
  VarType type;
  if (!TypeOf(&type)) return false;
  for (;;) {
    if (token_.kind != TokenKind::kIdent) return Fail("variable name expected");
    auto var = std::make_unique<SharedVar>();
    var->name = std::string(token_.text);
    var->align = type.align;
    var->external = linkage.external;
    if (!Advance()) return false;
    std::vector<uint64_t> dims;
    bool open = false;
    if (!Dimensions(type, &var->size, &dims, &open)) return false;
    if (open || (linkage.external && var->size == 0)) {
      var->size = 0;
      var->external = true;
    }
    if (var->size > (1 << 24)) return Fail("shared variable too large");
    if (function != nullptr) {
      Symbol symbol;
      symbol.kind = Symbol::Kind::kShared;
      symbol.value = uint32_t(function->shared.size());
      if (!Declare(var->name, symbol)) return false;
      function->shared.push_back(std::move(var));
    } else if (program_.shared_names.count(var->name) == 0) {
      program_.shared_names[var->name] = var.get();
      program_.shared.push_back(std::move(var));
    }
    if (token_.Is(';')) return Advance();
    if (!Expect(',')) return false;
  }
}

uint32_t Parser::NewFrameBytes(uint64_t bytes, uint32_t align) {
  const uint64_t at = (uint64_t(function_->frame_bytes) + align - 1) / align * align;
  if (bytes > kMaxFrameBytes || at + bytes > kMaxFrameBytes) {
    Fail("the function's local memory is too large");
    return 0;
  }
  function_->frame_bytes = uint32_t(at + bytes);
  return uint32_t(at);
}

// .local, and .param inside a body.
bool Parser::FrameVar(bool param) {
  VarType type;
  if (!TypeOf(&type)) return false;
  for (;;) {
    if (token_.kind != TokenKind::kIdent) return Fail("variable name expected");
    const std::string name(token_.text);
    if (!Advance()) return false;
    uint64_t bytes = 0;
    std::vector<uint64_t> dims;
    bool open = false;
    if (!Dimensions(type, &bytes, &dims, &open)) return false;
    Symbol symbol;
    symbol.kind = Symbol::Kind::kFrame;
    symbol.param = param;
    symbol.value = NewFrameBytes(bytes, type.align);
    symbol.size = uint32_t(bytes);
    if (!param) function_->local_bytes += uint32_t(bytes);
    if (!error_.empty() || !Declare(name, symbol)) return false;
    if (token_.Is(';')) return Advance();
    if (!Expect(',')) return false;
  }
}

uint32_t Parser::NewSlots(uint32_t count, uint32_t bytes) {
  const uint32_t base = function_->slots;
  if (count > kMaxSlots || base + count > kMaxSlots) {
    Fail("too many registers");
    return 0;
  }
  function_->slots += count;
  function_->register_words += count * (bytes > 4 ? 2 : 1);
  return base;
}

bool Parser::Registers() {
  VarType type;
  if (!TypeOf(&type)) return false;
  for (;;) {
    if (token_.kind != TokenKind::kIdent) return Fail("register name expected");
    const std::string name(token_.text);
    if (!Advance()) return false;
    const uint32_t words = type.bytes > 8 ? 2 : 1;  // a 128-bit register is two slots
    if (token_.Is('<')) {
      if (!Advance()) return false;
      if (token_.kind != TokenKind::kInteger || token_.bits > kMaxSlots) return Fail("number of registers expected");
      RegRange range;
      range.count = uint32_t(token_.bits);
      range.base = NewSlots(range.count * words, type.bytes);
      if (words == 2) {
        for (uint32_t i = 0; i < range.count; ++i) {
          Symbol symbol;
          symbol.value = range.base + 2 * i;
          if (!Declare(name + std::to_string(i), symbol)) return false;
        }
      } else {
        function_->scopes[size_t(scope_)].ranges[name] = range;
      }
      if (!Advance() || !Expect('>')) return false;
    } else {
      Symbol symbol;
      symbol.value = NewSlots(words * type.vector, type.bytes);
      symbol.size = type.vector;
      if (!Declare(name, symbol)) return false;
    }
    if (!error_.empty()) return false;
    if (token_.Is(';')) return Advance();
    if (!Expect(',')) return false;
  }
}

}  // namespace cuda_remote::softgpu::ptx
