// SPDX-License-Identifier: Apache-2.0
#include "proto/driverabi/visible_devices.h"

#include <algorithm>
#include <cstddef>

#include "proto/base/text.h"

namespace cuda_remote::driverabi {
namespace {

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
  }
  return lower;
}

// The device of a UUID, or of the beginning of one; -1 if there is none, or several.
int FindUuid(std::string_view entry, const std::vector<std::string>& uuids) {
  const std::string wanted = Lower(entry.substr(4));
  int found = -1;
  for (size_t i = 0; i < uuids.size(); ++i) {
    if (UuidName(uuids[i]).compare(4, wanted.size(), wanted) != 0) continue;
    if (found >= 0) return -1;
    found = int(i);
  }
  return wanted.empty() ? -1 : found;
}

// As strtol: what follows the digits does not count.
int FindOrdinal(std::string_view entry, size_t devices) {
  size_t at = !entry.empty() && entry[0] == '+' ? 1 : 0;
  if (at == entry.size() || entry[at] < '0' || entry[at] > '9') return -1;
  size_t ordinal = 0;
  for (; at < entry.size() && entry[at] >= '0' && entry[at] <= '9'; ++at) {
    ordinal = ordinal * 10 + size_t(entry[at] - '0');
    if (ordinal >= devices) return -1;
  }
  return int(ordinal);
}

}  // namespace

std::vector<int> VisibleDevices(std::string_view value, const std::vector<std::string>& uuids, bool* twice) {
  if (twice) *twice = false;
  std::vector<int> devices;
  while (!value.empty()) {
    const size_t comma = std::min(value.find(','), value.size());
    std::string_view entry = value.substr(0, comma);
    value.remove_prefix(std::min(comma + 1, value.size()));
    while (!entry.empty() && (entry.front() == ' ' || entry.front() == '\t')) entry.remove_prefix(1);
    while (!entry.empty() && (entry.back() == ' ' || entry.back() == '\t')) entry.remove_suffix(1);
    const bool uuid = entry.substr(0, 4) == "GPU-" || entry.substr(0, 4) == "MIG-";
    const int device = uuid ? FindUuid(entry, uuids) : FindOrdinal(entry, uuids.size());
    if (device < 0) break;
    if (std::find(devices.begin(), devices.end(), device) != devices.end()) {
      if (twice) *twice = true;
      return {};
    }
    devices.push_back(device);
  }
  return devices;
}

}  // namespace cuda_remote::driverabi
