// SPDX-License-Identifier: Apache-2.0
#include "softgpu/ptx/lexer.h"

#include <cstdlib>
#include <cstring>
#include <string>

namespace cuda_remote::softgpu::ptx {
namespace {

bool IsNameStart(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%';
}
bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsName(char c) { return (IsNameStart(c) && c != '%') || IsDigit(c); }

int HexValue(char c) {
  if (IsDigit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

void Lexer::SkipBlanks() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c == '\n') {
      ++line_;
      ++at_;
    } else if (c == ' ' || c == '\t' || c == '\r' || c == '\0' || c == '\f' || c == '\v') {
      ++at_;  // a trailing zero byte is common in module images
    } else if (c == '/' && text_.substr(at_, 2) == "//") {
      while (at_ < text_.size() && text_[at_] != '\n') ++at_;
    } else if (c == '/' && text_.substr(at_, 2) == "/*") {
      at_ += 2;
      while (at_ < text_.size() && text_.substr(at_, 2) != "*/") {
        if (text_[at_] == '\n') ++line_;
        ++at_;
      }
      at_ = at_ + 2 < text_.size() ? at_ + 2 : text_.size();
    } else {
      return;
    }
  }
}

Token Lexer::Number(Token token) {
  const size_t begin = at_;
  const auto rest = text_.substr(at_);
  token.kind = TokenKind::kInteger;
  auto hex_digits = [&](size_t digits, TokenKind kind) {
    token.kind = kind;
    at_ += 2;
    for (size_t i = 0; i < digits; ++i) {
      const int value = at_ < text_.size() ? HexValue(text_[at_]) : -1;
      if (value < 0) {
        token.kind = TokenKind::kBad;
        break;
      }
      token.bits = token.bits << 4 | unsigned(value);
      ++at_;
    }
  };
  if (rest.size() >= 2 && rest[0] == '0' && (rest[1] == 'f' || rest[1] == 'F')) {
    hex_digits(8, TokenKind::kF32);
  } else if (rest.size() >= 2 && rest[0] == '0' && (rest[1] == 'd' || rest[1] == 'D')) {
    hex_digits(16, TokenKind::kF64);
  } else {
    unsigned base = 10;
    if (rest.size() >= 2 && rest[0] == '0') {
      if (rest[1] == 'x' || rest[1] == 'X') {
        base = 16;
        at_ += 2;
      } else if (rest[1] == 'b' || rest[1] == 'B') {
        base = 2;
        at_ += 2;
      } else if (IsDigit(rest[1])) {
        base = 8;
      }
    }
    bool bad = at_ >= text_.size() || HexValue(text_[at_]) < 0;
    while (at_ < text_.size()) {
      const int value = HexValue(text_[at_]);
      if (value < 0 || unsigned(value) >= base) break;
      token.bits = token.bits * base + unsigned(value);
      ++at_;
    }
    const bool fraction = at_ + 1 < text_.size() && text_[at_] == '.' && IsDigit(text_[at_ + 1]);
    const bool trailing_point =
        at_ < text_.size() && text_[at_] == '.' && !(at_ + 1 < text_.size() && IsName(text_[at_ + 1]));
    const bool exponent = at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E');
    if ((base == 10 || base == 8) && (fraction || trailing_point || exponent)) {
      size_t end = at_;
      while (end < text_.size() && (IsDigit(text_[end]) || text_[end] == '.')) ++end;
      if (end < text_.size() && (text_[end] == 'e' || text_[end] == 'E')) {
        ++end;
        if (end < text_.size() && (text_[end] == '+' || text_[end] == '-')) ++end;
        while (end < text_.size() && IsDigit(text_[end])) ++end;
      }
      const double value = std::strtod(std::string(text_.substr(begin, end - begin)).c_str(), nullptr);
      std::memcpy(&token.bits, &value, 8);
      token.kind = TokenKind::kF64;
      at_ = end;
    } else {
      if (at_ < text_.size() && text_[at_] == 'U') {
        token.is_unsigned = true;
        ++at_;
      }
      if (bad) token.kind = TokenKind::kBad;
    }
  }
  token.text = text_.substr(begin, at_ - begin);
  if (at_ < text_.size() && IsName(text_[at_])) token.kind = TokenKind::kBad;
  return token;
}

Token Lexer::Next() {
  for (;;) {
    SkipBlanks();
    Token token;
    token.line = line_;
    if (at_ >= text_.size()) return token;
    const size_t begin = at_;
    const char c = text_[at_];
    if (IsNameStart(c)) {
      ++at_;
      while (at_ < text_.size() && IsName(text_[at_])) ++at_;
      token.kind = TokenKind::kIdent;
      token.text = text_.substr(begin, at_ - begin);
      return token;
    }
    if (IsDigit(c)) return Number(token);
    if (c == '.') {
      ++at_;
      while (at_ < text_.size()) {
        if (IsName(text_[at_])) {
          ++at_;
        } else if (text_.substr(at_, 2) == "::") {
          at_ += 2;
        } else {
          break;
        }
      }
      token.kind = at_ == begin + 1 ? TokenKind::kBad : TokenKind::kDot;
      token.text = text_.substr(begin + 1, at_ - begin - 1);
      if (token.text == "loc" || token.text == "file") {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
        continue;
      }
      return token;
    }
    if (c == '"') {
      ++at_;
      while (at_ < text_.size() && text_[at_] != '"') {
        if (text_[at_] == '\n') ++line_;
        if (text_[at_] == '\\' && at_ + 1 < text_.size()) ++at_;
        ++at_;
      }
      token.kind = at_ < text_.size() ? TokenKind::kString : TokenKind::kBad;
      token.text = text_.substr(begin + 1, at_ - begin - 1);
      if (at_ < text_.size()) ++at_;
      return token;
    }
    ++at_;
    token.punct = c;
    token.kind = std::strchr("{}[]()<>,;:|!@+-=*/~&^?", c) != nullptr ? TokenKind::kPunct : TokenKind::kBad;
    token.text = text_.substr(begin, 1);
    return token;
  }
}

}  // namespace cuda_remote::softgpu::ptx
