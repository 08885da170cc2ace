// SPDX-License-Identifier: Apache-2.0
#include "client/tools/table_text.h"

#include <stdio.h>

#include <algorithm>

#include "proto/base/clock.h"

namespace cuda_remote::client::tools {

std::string Bytes(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  char text[32];
  snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
  return text;
}

std::string Ago(uint64_t unix_ms) { return unix_ms == 0 ? "-" : Age(unix_ms) + " ago"; }

std::string Age(uint64_t unix_ms) {
  if (unix_ms == 0) return "-";
  const int64_t now = UnixMs();
  const int64_t seconds = std::max<int64_t>(now - int64_t(unix_ms), 0) / 1000;
  if (seconds < 120) return std::to_string(seconds) + " s";
  if (seconds < 2 * 3600) return std::to_string(seconds / 60) + " min";
  if (seconds < 48 * 3600) return std::to_string(seconds / 3600) + " h";
  return std::to_string(seconds / 86400) + " d";
}

}  // namespace cuda_remote::client::tools
