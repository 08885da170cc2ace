// SPDX-License-Identifier: Apache-2.0
#include "replay/replayer/sharing_groups.h"

#include <algorithm>
#include <map>
#include <string>

#include "proto/api/call_traits.gen.h"
#include "proto/codec/wire.h"

namespace cuda_remote::replay {
namespace {

// By which others open what the record shares, or it opens itself; empty: the record shares nothing.
std::string SharedKey(const Record& record) {
  const uint32_t field = TraitsOf(record.header.call).key_field;
  std::string_view key;
  if (field == 0) return {};
  const bool read = wire::ReadMessage(record.message, [field, &key](wire::Reader& reader) {
    return reader.field() == field ? reader.Get(&key) : reader.Skip();
  });
  return read ? std::string(key) : std::string();
}

}  // namespace

std::vector<size_t> SharingGroups(const std::vector<const Log*>& logs) {
  std::vector<size_t> groups(logs.size());
  std::map<std::string, size_t> by;  // a key, and a log that has it
  for (size_t i = 0; i < logs.size(); ++i) {
    groups[i] = i;
    for (const Record* record : logs[i]->InOrder()) {
      const std::string key = SharedKey(*record);
      if (key.empty()) continue;
      const size_t one = groups[by.emplace(key, i).first->second], other = groups[i];
      for (size_t& group : groups) {
        if (group == one || group == other) group = std::min(one, other);
      }
    }
  }
  return groups;
}

// Which of these logs' processes share something with each other, so that their sessions must be on one server: for
// each log the number of the first one of its group.
std::vector<size_t> SharingGroups(const std::vector<const Log*>& logs);

}  // namespace cuda_remote::replay
