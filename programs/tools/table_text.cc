// SPDX-License-Identifier: Apache-2.0
#include "programs/tools/table_text.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "proto/base/clock.h"
#include "proto/base/text.h"

namespace cuda_remote::client::tools {
namespace {

bool Continues(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

// In characters.
size_t WidthOf(const std::string& text) {
  return text.size() - size_t(std::count_if(text.begin(), text.end(), Continues));
}

// The first `width` characters.
std::string Cut(const std::string& text, size_t width) {
  size_t end = 0;
  while (end < text.size() && (width > 0 || Continues(text[end]))) width -= Continues(text[end++]) ? 0 : 1;
  return text.substr(0, end);
}

}  // namespace

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  Row headings;
  for (const Column& column : columns_) headings.cells.emplace_back(column.heading);
  rows_.push_back(std::move(headings));
}

void Table::Add(std::vector<std::string> cells, std::string note) {
  rows_.push_back({std::move(cells), std::move(note)});
}

std::string Table::Text() const {
  std::vector<size_t> widths(columns_.size());
  for (const Row& row : rows_) {
    for (size_t i = 0; i < row.cells.size(); ++i) widths[i] = std::max(widths[i], WidthOf(row.cells[i]));
  }
  std::string text;
  for (const Row& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.cells.size(); ++i) {
      const std::string padding(widths[i] - WidthOf(row.cells[i]), ' ');
      line += (i == 0 ? "" : "  ") + (columns_[i].left ? row.cells[i] + padding : padding + row.cells[i]);
    }
    line += row.note.empty() ? "" : " " + row.note;
    line.resize(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string FitToScreen(const std::string& text, size_t rows, size_t columns) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(columns == 0 ? line : Cut(line, columns));
  // The cursor stands in a line of its own at the end.
  const size_t room = rows < 2 ? lines.size() : rows - 1;
  if (lines.size() > room) {
    const size_t more = lines.size() - room + 1;
    lines.resize(room);
    lines.back() = "... " + std::to_string(more) + " more lines";
  }
  std::string shown;
  for (const std::string& line : lines) shown += line + "\n";
  return shown;
}

std::string Ago(uint64_t unix_ms) { return unix_ms == 0 ? "-" : Age(unix_ms) + " ago"; }

std::string Age(uint64_t unix_ms) {
  if (unix_ms == 0) return "-";
  return AgeText(UnixMs() - int64_t(unix_ms));
}

}  // namespace cuda_remote::client::tools
