// SPDX-License-Identifier: Apache-2.0
// Tokens of PTX text.
//
// Not thread-safe. Keeps a view of the text, which must outlive it. Comments, `.loc` and `.file` lines are skipped.
// Text that is no token gives kBad; nothing here reads outside the text.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_LEXER_H_
#define CUDA_REMOTE_SOFTGPU_PTX_LEXER_H_

#include <cstdint>
#include <string_view>

namespace cuda_remote::softgpu::ptx {

enum class TokenKind : uint8_t {
  kEnd,
  kIdent,    // names, with a leading % where there is one
  kDot,      // .something; `text` is without the dot, "::" included (shared::cta)
  kInteger,  // value in `bits`
  kF32,      // 0f...: bits of a float
  kF64,      // 0d... and decimal: bits of a double
  kString,   // without the quotes
  kPunct,    // one character, in `punct`
  kBad,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  char punct = 0;
  bool is_unsigned = false;
  uint32_t line = 1;
  uint64_t bits = 0;
  std::string_view text;

  bool Is(char c) const { return kind == TokenKind::kPunct && punct == c; }
  bool IsDot(std::string_view name) const { return kind == TokenKind::kDot && text == name; }
};

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}

  // The next token; kEnd forever at the end.
  Token Next();

 private:
  void SkipBlanks();
  Token Number(Token token);

  std::string_view text_;
  size_t at_ = 0;
  uint32_t line_ = 1;
};

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_LEXER_H_
