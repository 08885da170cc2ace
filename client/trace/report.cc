// SPDX-License-Identifier: Apache-2.0
#include "client/trace/report.h"

#include <stdio.h>

#include <algorithm>

#include "proto/codec/json.h"

namespace cuda_remote::client::trace {
namespace {

std::vector<Row> Sorted(const Report& report) {
  std::vector<Row> rows = report.rows;
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return a.total_ns != b.total_ns ? a.total_ns > b.total_ns : a.name < b.name;
  });
  return rows;
}

template <typename... Values>
void Print(std::string* out, const char* format, Values... values) {
  char line[512];
  const int length = snprintf(line, sizeof(line), format, values...);
  if (length > 0) out->append(line, std::min(size_t(length), sizeof(line) - 1));
}

using Number = unsigned long long;

}  // namespace

std::string TextReport(const Report& report) {
  std::string out = "cuda-remote: driver calls of " + report.program;
  Print(&out, ", process %u, %.3f s%s\n", report.pid, report.seconds, report.finished ? "" : ", so far");
  Print(&out, "%12s %8s %6s %14s %14s %12s %10s %12s  %s\n", "calls", "errors", "unsup.", "sent B", "received B",
        "total ms", "mean us", "max us", "call");
  Row sum;
  for (const Row& row : Sorted(report)) {
    Print(&out, "%12llu %8llu %6llu %14llu %14llu %12.3f %10.3f %12.3f  ", Number(row.count), Number(row.errors),
          Number(row.unsupported), Number(row.sent), Number(row.received), row.total_ns / 1e6,
          row.count ? row.total_ns / 1e3 / row.count : 0.0, row.max_ns / 1e3);
    out += row.name + "\n";
    sum.count += row.count;
    sum.errors += row.errors;
    sum.unsupported += row.unsupported;
    sum.sent += row.sent;
    sum.received += row.received;
    sum.total_ns += row.total_ns;
    sum.max_ns = std::max(sum.max_ns, row.max_ns);
  }
  Print(&out, "%12llu %8llu %6llu %14llu %14llu %12.3f %10.3f %12.3f  all\n", Number(sum.count), Number(sum.errors),
        Number(sum.unsupported), Number(sum.sent), Number(sum.received), sum.total_ns / 1e6,
        sum.count ? sum.total_ns / 1e3 / sum.count : 0.0, sum.max_ns / 1e3);
  return out;
}

std::string JsonReport(const Report& report) {
  JsonWriter json(JsonWriter::kSpaced);
  json.BeginOutput();
  json.Member("program", report.program);
  json.Member("pid", report.pid);
  json.RealMember("seconds", report.seconds, 6);
  json.Member("finished", report.finished);
  json.Begin("calls", '[');
  for (const Row& row : Sorted(report)) {
    json.Line();
    json.Begin('{');
    json.Member("name", row.name);
    json.Member("count", row.count);
    json.Member("errors", row.errors);
    json.Member("unsupported", row.unsupported);
    json.Member("sent_bytes", row.sent);
    json.Member("received_bytes", row.received);
    json.RealMember("total_us", row.total_ns / 1e3, 3);
    if (row.count != 0) json.RealMember("mean_us", row.total_ns / 1e3 / row.count, 3);
    json.RealMember("max_us", row.max_ns / 1e3, 3);
    json.End('}');
  }
  json.End(']');
  json.End('}');
  return json.text() + "\n";
}

std::string ExpandPath(const std::string& pattern, const std::string& directory, const std::string& job, uint32_t pid) {
  const std::string number = std::to_string(pid);
  std::string path;
  bool named = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char next = pattern[i] == '%' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (next == 'p' || next == 'j') {
      path += next == 'p' ? number : job;
      named = true;
      ++i;
    } else {
      path += pattern[i];
      if (next == '%') ++i;
    }
  }
  if (!named) {
    const size_t slash = path.rfind('/');
    const size_t start = slash == std::string::npos ? 0 : slash + 1;
    size_t dot = path.rfind('.');
    if (dot == std::string::npos || dot <= start) dot = path.size();
    path.insert(dot, (job.empty() ? "" : "." + job) + "." + number);
  }
  if (!path.empty() && path[0] != '/' && !directory.empty()) path = directory + "/" + path;
  return path;
}

}  // namespace cuda_remote::client::trace
