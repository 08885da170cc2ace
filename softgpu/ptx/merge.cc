// SPDX-License-Identifier: Apache-2.0
#include "softgpu/ptx/merge.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "softgpu/ptx/lexer.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// Functions that the GPU's system provides.
bool IsSystem(std::string_view name) {
  static const std::set<std::string_view> kNames = {"vprintf", "malloc", "free", "__assertfail"};
  return kNames.count(name) != 0 || name.rfind("cuda", 0) == 0 || name.rfind("__nv", 0) == 0;
}

struct Piece {
  size_t begin, end;
  std::string text;  // in its place
};

struct Declared {
  bool external = false;
  bool global = false;  // seen by other texts
  bool defined = false;
};

struct Scan {
  std::vector<Piece> cuts;                // header directives
  std::map<std::string, Declared> names;  // of the module level
  std::pair<int, int> version{0, 0};
  int target = 0;
};

size_t LineEnd(const std::string& text, size_t at) {
  const size_t end = text.find('\n', at);
  return end == std::string::npos ? text.size() : end;
}

// The module level of one text.
Scan ScanText(const std::string& text) {
  Scan scan;
  Lexer lexer(text);
  int depth = 0;
  Token token = lexer.Next();
  Declared item;
  bool section = false, function = false;
  std::string name;
  const auto finish = [&](bool body) {
    if (!name.empty()) {
      Declared& known = scan.names[name];
      const bool defined = function ? body : !item.external;
      known.external = known.external || item.external;
      known.global = known.global || item.global;
      known.defined = known.defined || defined;
    }
    item = Declared();
    section = function = false;
    name.clear();
  };
  while (token.kind != TokenKind::kEnd && token.kind != TokenKind::kBad) {
    if (token.kind == TokenKind::kDot && depth == 0) {
      const size_t at = size_t(token.text.data() - text.data());
      if (token.text == "version" || token.text == "target" || token.text == "address_size") {
        const size_t end = LineEnd(text, at);
        const std::string rest = text.substr(at + token.text.size(), end - at - token.text.size());
        if (token.text == "version") {
          char* dot = nullptr;
          const int major = int(strtol(rest.c_str(), &dot, 10));
          scan.version = {major, *dot == '.' ? atoi(dot + 1) : 0};
        } else if (token.text == "target") {
          const size_t number = rest.find_first_of("0123456789");
          scan.target = number == std::string::npos ? 0 : atoi(rest.c_str() + number);
        }
        scan.cuts.push_back({at - 1, end, ""});
        // The rest of the line is no declaration.
        do {
          token = lexer.Next();
        } while (token.kind != TokenKind::kEnd && token.kind != TokenKind::kBad &&
                 size_t(token.text.data() - text.data()) < end && !token.text.empty());
        continue;
      }
      if (token.text == "extern") item.external = item.global = true;
      if (token.text == "visible" || token.text == "weak" || token.text == "common") item.global = true;
      if (token.text == "section") section = true;
      if (token.text == "func" || token.text == "entry") {
        function = true;
        if (token.text == "entry") item.global = true;
      }
    } else if (token.kind == TokenKind::kIdent && depth == 0 && name.empty() && !section) {
      name = std::string(token.text);
    } else if (token.kind == TokenKind::kPunct) {
      const char c = token.punct;
      if (c == '{') {
        if (depth++ == 0 && (function || section)) {
          // A body, up to its end.
          for (token = lexer.Next(); depth > 0 && token.kind != TokenKind::kEnd && token.kind != TokenKind::kBad;
               token = lexer.Next()) {
            if (token.Is('{')) ++depth;
            if (token.Is('}') && --depth == 0) break;
          }
          finish(true);
          depth = 0;
        }
      } else if (c == '(' || c == '[') {
        ++depth;
      } else if (c == '}' || c == ')' || c == ']') {
        if (depth > 0) --depth;
      } else if (c == ';' && depth == 0) {
        finish(false);
      }
    }
    if (token.kind == TokenKind::kEnd || token.kind == TokenKind::kBad) break;
    token = lexer.Next();
  }
  return scan;
}

}  // namespace

StatusOr<std::string> Merge(const std::vector<std::string>& texts) {
  std::vector<Scan> scans;
  std::pair<int, int> version{0, 0};
  int target = 0;
  std::map<std::string, Declared> all;
  for (const std::string& text : texts) {
    scans.push_back(ScanText(text));
    version = std::max(version, scans.back().version);
    target = std::max(target, scans.back().target);
    for (const auto& [name, declared] : scans.back().names) {
      if (!declared.global) continue;
      Declared& known = all[name];
      known.external = known.external || declared.external;
      known.defined = known.defined || declared.defined;
    }
  }
  for (const auto& [name, declared] : all) {
    if (declared.defined || !declared.external || IsSystem(name)) continue;
    // Shared memory of any size is declared like this too; the launch gives it.
    bool shared = false;
    for (const std::string& text : texts) {
      for (size_t at = text.find(name); at != std::string::npos && !shared; at = text.find(name, at + 1)) {
        const size_t line = text.rfind('\n', at) + 1;
        const std::string_view head(text.data() + line, at - line);
        shared = head.find(".extern") != head.npos && head.find(".shared") != head.npos;
      }
    }
    if (!shared) return Error("undefined reference to '" + name + "'");
  }
  std::string merged = ".version " + std::to_string(version.first) + "." + std::to_string(version.second) +
                       "\n.target sm_" + std::to_string(target) + "\n.address_size 64\n";
  std::set<std::string> taken;
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string& text = texts[i];
    std::vector<Piece> pieces = scans[i].cuts;
    std::set<std::string> renamed;
    for (const auto& [name, declared] : scans[i].names) {
      if (!declared.global && (taken.count(name) != 0 || all.count(name) != 0)) renamed.insert(name);
      taken.insert(name);
    }
    if (!renamed.empty()) {
      const std::string suffix = "$unit" + std::to_string(i);
      Lexer lexer(text);
      for (Token token = lexer.Next(); token.kind != TokenKind::kEnd && token.kind != TokenKind::kBad;
           token = lexer.Next()) {
        if (token.kind != TokenKind::kIdent || renamed.count(std::string(token.text)) == 0) continue;
        const size_t at = size_t(token.text.data() - text.data()) + token.text.size();
        pieces.push_back({at, at, suffix});
      }
    }
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    size_t at = 0;
    for (const Piece& piece : pieces) {
      if (piece.begin < at) continue;
      merged.append(text, at, piece.begin - at);
      merged += piece.text;
      at = piece.end;
    }
    merged.append(text, at, std::string::npos);
    merged += '\n';
  }
  return merged;
}

}  // namespace cuda_remote::softgpu::ptx
