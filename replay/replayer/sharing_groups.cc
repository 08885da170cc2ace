// SPDX-License-Identifier: Apache-2.0
#include "replay/replayer/sharing_groups.h"

#include <algorithm>
#include <map>
#include <string>

#include "proto/codec/memory.gen.h"
#include "proto/codec/pool.gen.h"
#include "proto/codec/virtual.gen.h"

namespace cuda_remote::replay {
namespace {

template <typename Request>
std::string KeyIn(const Record& record) {
  Request request;
  return request.Decode(record.message) ? std::string(request.key) : std::string();
}

// By which others open what the record shares, or it opens itself; empty: the record shares nothing.
std::string SharedKey(const Record& record) {
  switch (record.header.call) {
    case kCall_cuIpcGetMemHandle:
      return KeyIn<wire::cuIpcGetMemHandle_Request>(record);
    case kCall_cuIpcOpenMemHandle_v2:
      return KeyIn<wire::cuIpcOpenMemHandle_v2_Request>(record);
    case kCall_cuIpcGetEventHandle:
      return KeyIn<wire::cuIpcGetEventHandle_Request>(record);
    case kCall_cuIpcOpenEventHandle:
      return KeyIn<wire::cuIpcOpenEventHandle_Request>(record);
    case kCall_cuMemExportToShareableHandle:
      return KeyIn<wire::cuMemExportToShareableHandle_Request>(record);
    case kCall_cuMemImportFromShareableHandle:
      return KeyIn<wire::cuMemImportFromShareableHandle_Request>(record);
    case kCall_cuMemPoolExportToShareableHandle:
      return KeyIn<wire::cuMemPoolExportToShareableHandle_Request>(record);
    case kCall_cuMemPoolImportFromShareableHandle:
      return KeyIn<wire::cuMemPoolImportFromShareableHandle_Request>(record);
    case kCall_cuMemPoolExportPointer:
      return KeyIn<wire::cuMemPoolExportPointer_Request>(record);
    case kCall_cuMemPoolImportPointer:
      return KeyIn<wire::cuMemPoolImportPointer_Request>(record);
    default:
      return {};
  }
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

// Which of these logs' processes share something with each other, so that their sessions must be on one server: for each
// log the number of the first one of its group.
std::vector<size_t> SharingGroups(const std::vector<const Log*>& logs);

}  // namespace cuda_remote::replay
