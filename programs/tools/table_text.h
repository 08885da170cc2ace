// SPDX-License-Identifier: Apache-2.0
// Tables that people read, and times in them. Not thread-safe.
#ifndef CUDA_REMOTE_PROGRAMS_TOOLS_TABLE_TEXT_H_
#define CUDA_REMOTE_PROGRAMS_TOOLS_TABLE_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace cuda_remote::client::tools {

// How long ago, in two figures or so: "12 min ago"; "-" for 0.
std::string Ago(uint64_t unix_ms);

// The same as a length of time: "12 min".
std::string Age(uint64_t unix_ms);

// A table whose columns are as wide as their longest cell.
class Table {
 public:
  struct Column {
    const char* heading;
    bool left = false;  // aligned to the left
  };
  explicit Table(std::vector<Column> columns);
  // A row; one that has fewer cells than the table has columns ends there, and `note` follows behind its last cell.
  void Add(std::vector<std::string> cells, std::string note = {});
  // All lines, each with its end.
  std::string Text() const;

 private:
  struct Row {
    std::vector<std::string> cells;
    std::string note;
  };
  const std::vector<Column> columns_;
  std::vector<Row> rows_;
};

// `text` as a terminal of so many rows and columns can show it without scrolling: longer lines are cut, and the last
// line says how many more there are. 0: no limit.
std::string FitToScreen(const std::string& text, size_t rows, size_t columns);

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_PROGRAMS_TOOLS_TABLE_TEXT_H_
