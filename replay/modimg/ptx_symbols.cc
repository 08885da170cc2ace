// SPDX-License-Identifier: Apache-2.0
// The variables of a PTX text: its .global and .const declarations outside of functions; and where it uses the names of
// functions as values.

#include <algorithm>
#include <cstdlib>
#include <unordered_set>

#include "replay/modimg/format.h"
#include "replay/modimg/modimg.h"

namespace cuda_remote::replay {
namespace {

// Gives the text's tokens: words (directives, names, numbers), single punctuation, strings as "\"". Comments are
// skipped.
class Tokens {
 public:
  explicit Tokens(std::string_view text) : text_(text) { Next(); }

  std::string_view now() const { return token_; }
  bool done() const { return token_.empty(); }
  size_t line() const { return line_; }

  void Next() {
    SkipBlanks();
    if (at_ >= text_.size()) {
      token_ = {};
      return;
    }
    const size_t start = at_;
    if (text_[at_] == '"') {
      SkipString();
      token_ = text_.substr(start, 1);
      return;
    }
    while (at_ < text_.size() && IsWord(text_[at_])) ++at_;
    if (at_ == start) ++at_;
    token_ = text_.substr(start, at_ - start);
  }

  // Skips a function's body; the current token is its opening brace. Adds to `named` those of `functions` that
  // instructions other than calls name. Bodies are nearly all of a text, so they are not cut into tokens.
  void SkipBody(const std::unordered_set<std::string_view>& functions, std::unordered_set<std::string_view>* named) {
    bool begins = true;  // a statement: its first word is the instruction
    bool is_call = false;
    for (int depth = 1; depth > 0;) {
      if (at_ >= text_.size()) break;
      const char c = text_[at_];
      if (c == '"') {
        SkipString();
      } else if (c == '/' && at_ + 1 < text_.size() && (text_[at_ + 1] == '/' || text_[at_ + 1] == '*')) {
        SkipBlanks();
      } else if (IsWord(c)) {
        const size_t start = at_;
        while (at_ < text_.size() && IsWord(text_[at_])) ++at_;
        const std::string_view word = text_.substr(start, at_ - start);
        if (begins && c != '%') {  // '%': its guard
          begins = false;
          is_call = word.substr(0, 4) == "call";
        } else if (!begins && !is_call && c != '%' && functions.count(word) != 0) {
          named->insert(word);
        }
      } else {
        begins = begins || c == ';' || c == ':' || c == '{' || c == '}';
        depth += (c == '{') - (c == '}');
        line_ += c == '\n';
        ++at_;
      }
    }
    Next();
  }

 private:
  static bool IsWord(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$' ||
           c == '%' || c == '.';
  }

  void SkipString() {
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\') ++at_;
    }
    at_ = std::min(at_ + 1, text_.size());
  }

  void SkipBlanks() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\n') ++line_;
      if (c == ' ' || (c >= '\t' && c <= '\r')) {
        ++at_;
      } else if (text_.substr(at_, 2) == "//") {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (text_.substr(at_, 2) == "/*") {
        const size_t end = std::min(text_.find("*/", at_ + 2), text_.size());
        for (; at_ < end; ++at_) line_ += text_[at_] == '\n';
        at_ = std::min(end + 2, text_.size());
      } else {
        return;
      }
    }
  }

  std::string_view text_;
  std::string_view token_;
  size_t at_ = 0;
  size_t line_ = 1;
};

// Bytes of a fundamental type's value; 0 for anything else (textures, samplers, surfaces are no memory).
uint64_t TypeBytes(std::string_view type) {
  if (type.size() < 3 || type[0] != '.') return 0;
  if (type == ".pred") return 0;
  if (type == ".f16x2" || type == ".bf16x2") return 4;
  if (type == ".bf16") return 2;
  const char letter = type[1];
  if (letter != 'b' && letter != 'u' && letter != 's' && letter != 'f') return 0;
  const std::string_view bits = type.substr(2);
  if (bits == "8") return 1;
  if (bits == "16") return 2;
  if (bits == "32") return 4;
  if (bits == "64") return 8;
  if (bits == "128") return 16;
  return 0;
}

bool Number(std::string_view token, uint64_t* value) {
  const std::string text(token);
  char* end = nullptr;
  if (text.empty() || text[0] < '0' || text[0] > '9') return false;
  *value = strtoull(text.c_str(), &end, 0);
  return *end == '\0' || (*end == 'U' && end[1] == '\0');
}

constexpr uint64_t kMaxVariableBytes = uint64_t{1} << 40;
constexpr uint64_t kMaxNestedBytes = 1 << 20;

}  // namespace

Status PtxSymbols(std::string_view text, std::vector<DataSymbol>* symbols, KernelFacts* kernels) {
  KernelFacts ignored;
  if (!kernels) kernels = &ignored;
  // Those whose addresses are addresses: functions that others can see, and kernels. Of the rest a compiler makes
  // numbers (README.md). A function is declared before its name is used. The system's own are only called.
  std::unordered_set<std::string_view> functions, entries, in_variables, in_code;
  bool launches = false;
  Tokens tokens(text);
  const auto fail = [&](const char* what) {
    return Error("line " + std::to_string(tokens.line()) + " of the PTX: " + what);
  };
  bool is_extern = false, is_visible = false;  // of the declaration that is being read
  while (!tokens.done()) {
    const std::string_view token = tokens.now();
    if (token == "{") {
      tokens.SkipBody(functions, &in_code);
      is_extern = is_visible = false;
      continue;
    }
    if (token == ".extern") is_extern = true;
    if (token == ".extern" || token == ".visible" || token == ".weak" || token == ".entry") is_visible = true;
    if (token == ";") is_visible = false;
    if (token == ";" || token == ".visible" || token == ".weak" || token == ".common") is_extern = false;
    if (token == ".func" || token == ".entry") {
      const bool entry = token == ".entry";
      tokens.Next();
      // Attributes, and what a function returns.
      while (!tokens.done() && (tokens.now()[0] == '.' || tokens.now() == "(")) {
        if (tokens.now() != "(") {
          tokens.Next();
          continue;
        }
        while (!tokens.done() && tokens.now() != ")") tokens.Next();
        tokens.Next();
      }
      const std::string_view name = tokens.now();
      kernels->print = kernels->print || name == "vprintf";
      const bool of_heap = name == "malloc" || name == "free";
      kernels->allocate = kernels->allocate || name == "malloc";
      launches = launches || name.find("LaunchDevice") != std::string_view::npos;
      if (entry) entries.insert(name);
      if (is_visible && !of_heap && name != "vprintf" && name != "__assertfail") functions.insert(name);
      continue;
    }
    if (token != ".global" && token != ".const") {
      tokens.Next();
      continue;
    }
    DataSymbol symbol;
    symbol.constant = token == ".const";
    uint64_t element = 0;
    uint64_t vector = 1;
    tokens.Next();
    // Attributes, alignment and type, in any order.
    while (!tokens.done() && tokens.now()[0] == '.') {
      const std::string_view word = tokens.now();
      if (word == ".attribute") {
        tokens.Next();
        int depth = 0;
        do {
          if (tokens.now() == "(") ++depth;
          if (tokens.now() == ")") --depth;
          if (tokens.now() == ".managed") symbol.managed = true;
          tokens.Next();
        } while (depth > 0 && !tokens.done());
        continue;
      }
      tokens.Next();
      if (word == ".align") {
        tokens.Next();
      } else if (word == ".v2" || word == ".v4" || word == ".v8") {
        vector = uint64_t(word[2] - '0');
      } else if (const uint64_t bytes = TypeBytes(word)) {
        element = bytes;
      }
    }
    // Names, each perhaps with dimensions and an initial value.
    while (!tokens.done() && tokens.now() != ";") {
      symbol.name = tokens.now();
      symbol.size = element * vector;
      symbol.code_words.clear();
      tokens.Next();
      bool counted = true;
      while (tokens.now() == "[") {
        tokens.Next();
        uint64_t dimension = 0;
        if (tokens.now() == "]") {
          counted = false;  // the initial value says how many
        } else {
          if (!Number(tokens.now(), &dimension)) return fail("the size of an array is not a number");
          if (dimension != 0 && symbol.size > kMaxVariableBytes / dimension) return fail("a variable is too large");
          symbol.size *= dimension;
          tokens.Next();
        }
        if (tokens.now() != "]") return fail("an array's size has no end");
        tokens.Next();
      }
      if (tokens.now() == "=") {
        tokens.Next();
        uint64_t values = 1;
        // Where names of functions stand. Of nested lists it is not clear which place a value has: any one then.
        bool nested = false;
        const auto note_name = [&](uint64_t place) {
          if (functions.count(tokens.now()) == 0) return;
          symbol.code_words.push_back(place);
          in_variables.insert(tokens.now());
        };
        if (tokens.now() == "{") {
          tokens.Next();
          for (int depth = 1; depth > 0 && !tokens.done(); tokens.Next()) {
            nested = nested || tokens.now() == "{";
            if (tokens.now() == "{" || tokens.now() == "(") ++depth;
            if (tokens.now() == "}" || tokens.now() == ")") --depth;
            if (tokens.now() == "," && depth == 1) ++values;
            note_name((values - 1) * element / 8 * 8);
          }
        } else {
          for (; !tokens.done() && tokens.now() != ";" && tokens.now() != ","; tokens.Next()) note_name(0);
        }
        if (nested && !symbol.code_words.empty() && symbol.size <= kMaxNestedBytes) {
          symbol.code_words.clear();
          for (uint64_t place = 0; place < symbol.size; place += 8) symbol.code_words.push_back(place);
        }
        if (!counted) {
          if (symbol.size > kMaxVariableBytes / values) return fail("a variable is too large");
          symbol.size *= values;
          counted = true;
        }
      }
      if (!is_extern && counted && symbol.size != 0) {
        symbol.literal = format::IsLiteral(symbol.name);
        std::vector<uint64_t>& words = symbol.code_words;
        words.erase(std::unique(words.begin(), words.end()), words.end());
        symbols->push_back(symbol);
      }
      if (tokens.now() == ",") {
        tokens.Next();
      } else if (tokens.now() != ";") {
        return fail("a variable's declaration has no end");
      }
    }
    is_extern = is_visible = false;
  }
  for (const std::string_view name : in_code) {
    if (launches && entries.count(name) != 0) continue;  // that is what it takes a kernel's address for
    kernels->bare_addresses = kernels->bare_addresses || in_variables.count(name) == 0;
  }
  return OkStatus();
}

}  // namespace cuda_remote::replay
