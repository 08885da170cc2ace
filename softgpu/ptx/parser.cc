// SPDX-License-Identifier: Apache-2.0
#include "softgpu/ptx/parser.h"

#include <cstdlib>

namespace cuda_remote::softgpu::ptx {

bool Parser::Fail(const std::string& what) {
  if (!error_.empty()) return false;
  error_ = "line " + std::to_string(token_.line) + ": " + what + ": " + std::string(program_.LineText(token_.line));
  return false;
}

bool Parser::Advance() {
  token_ = lexer_.Next();
  if (token_.kind == TokenKind::kBad) return Fail("unexpected text '" + std::string(token_.text.substr(0, 40)) + "'");
  return true;
}

bool Parser::Expect(char c) {
  if (!token_.Is(c)) return Fail(std::string("'") + c + "' expected");
  return Advance();
}

bool Parser::SkipTo(char c) {
  while (!token_.Is(c)) {
    if (token_.kind == TokenKind::kEnd) return Fail(std::string("'") + c + "' expected before the end");
    if (!Advance()) return false;
  }
  return Advance();
}

bool Parser::SkipBraces() {
  // Sections of debug information hold anything; only the braces count.
  while (!token_.Is('{')) {
    if (token_.kind == TokenKind::kEnd) return Fail("'{' expected");
    token_ = lexer_.Next();
  }
  int depth = 0;
  do {
    if (token_.Is('{')) ++depth;
    if (token_.Is('}')) --depth;
    if (token_.kind == TokenKind::kEnd) return Fail("'}' expected before the end");
    token_ = lexer_.Next();
  } while (depth > 0);
  if (token_.kind == TokenKind::kBad) return Fail("unexpected text");
  return true;
}

bool Parser::Version() {
  if (!Advance()) return false;
  if (token_.kind != TokenKind::kF64 && token_.kind != TokenKind::kInteger) return Fail("version number expected");
  const std::string text(token_.text);
  const size_t dot = text.find('.');
  program_.version_major = std::atoi(text.c_str());
  program_.version_minor = dot == std::string::npos ? 0 : std::atoi(text.c_str() + dot + 1);
  return Advance();
}

bool Parser::Directive() {
  const std::string name(token_.text);
  if (name == "version") return Version();
  if (name == "target") {
    if (!Advance()) return false;
    for (;;) {
      if (token_.kind != TokenKind::kIdent) return Fail("target name expected");
      if (token_.text.substr(0, 3) == "sm_") program_.target = std::atoi(std::string(token_.text.substr(3)).c_str());
      if (!Advance()) return false;
      if (!token_.Is(',')) return true;
      if (!Advance()) return false;
    }
  }
  if (name == "address_size") {
    if (!Advance()) return false;
    if (token_.kind != TokenKind::kInteger || token_.bits != 64) return Fail("only .address_size 64 is implemented");
    return Advance();
  }
  if (name == "section") return SkipBraces();
  if (name == "pragma") return SkipTo(';');
  if (name == "alias") {
    if (!Advance()) return false;
    const std::string alias(token_.text);
    if (token_.kind != TokenKind::kIdent || !Advance() || !Expect(',')) return Fail("'.alias name, function' expected");
    if (token_.kind != TokenKind::kIdent) return Fail("function name expected");
    program_.aliases[alias] = std::string(token_.text);
    return Advance() && Expect(';');
  }
  return ModuleItem();
}

bool Parser::ModuleItem() {
  Linkage linkage;
  for (;;) {
    if (token_.IsDot("visible")) {
      linkage.visible = true;
    } else if (token_.IsDot("weak") || token_.IsDot("common")) {
      linkage.visible = linkage.weak = true;
    } else if (token_.IsDot("extern")) {
      linkage.external = true;
    } else {
      break;
    }
    if (!Advance()) return false;
  }
  if (token_.IsDot("entry")) return Advance() && FunctionItem(linkage, true);
  if (token_.IsDot("func")) return Advance() && FunctionItem(linkage, false);
  if (token_.IsDot("global")) return Advance() && GlobalVar(linkage, Space::kGlobal);
  if (token_.IsDot("const")) return Advance() && GlobalVar(linkage, Space::kConst);
  if (token_.IsDot("tex")) return Advance() && GlobalVar(linkage, Space::kGlobal);
  if (token_.IsDot("shared")) return Advance() && SharedDecl(linkage, nullptr);
  return Fail("declaration expected");
}

bool Parser::Parse() {
  if (!Advance()) return false;
  if (!token_.IsDot("version")) return Fail(".version expected at the start");
  while (token_.kind != TokenKind::kEnd) {
    if (token_.Is('@')) {  // @@DWARF lines of old compilers
      const uint32_t line = token_.line;
      while (token_.line == line && token_.kind != TokenKind::kEnd) token_ = lexer_.Next();
      continue;
    }
    if (token_.Is(';')) {
      if (!Advance()) return false;
      continue;
    }
    if (token_.kind != TokenKind::kDot) return Fail("directive expected");
    if (!Directive()) return Fail("not understood");
  }
  // Aliases are functions under a second name.
  for (const auto& [alias, name] : program_.aliases) {
    const auto it = program_.function_names.find(name);
    if (it != program_.function_names.end() && it->second->defined) program_.function_names[alias] = it->second;
  }
  for (const auto& [name, line] : taken_) {
    const auto it = program_.function_names.find(name);
    if (it != program_.function_names.end()) program_.address_taken.push_back(it->second);
  }
  for (const auto& global : program_.globals) {
    for (const auto& relocation : global.relocations) {
      const auto it = program_.function_names.find(relocation.symbol);
      if (it != program_.function_names.end()) program_.address_taken.push_back(it->second);
    }
  }
  return true;
}

}  // namespace cuda_remote::softgpu::ptx
