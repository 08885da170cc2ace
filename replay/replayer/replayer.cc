// SPDX-License-Identifier: Apache-2.0
#include "replay/replayer/replayer.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "proto/api/call_names.gen.h"
#include "proto/api/call_traits.gen.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/codec/decode_as.h"
#include "proto/codec/graph.gen.h"
#include "proto/codec/operations.gen.h"
#include "proto/codec/virtual.gen.h"
#include "proto/driverabi/error_names.h"

namespace cuda_remote::replay {
namespace {

// Requests under way carry their images; this much of them at once is enough to keep the server busy.
constexpr uint64_t kMaxPayloadUnderWay = 64u << 20;

std::string Describe(const Record& record) {
  return std::string(CallIdName(record.header.call)) + " (object " + Hex(record.object.id) + ", record " +
         std::to_string(record.order) + ")";
}

// CUDA_ERROR_OUT_OF_MEMORY; this folder does without cuda.h.
constexpr uint32_t kOutOfMemory = 2;

std::string FirstBytes(std::string_view bytes) {
  constexpr size_t kMost = 24;
  std::string text = HexBytes(bytes.substr(0, kMost));
  if (bytes.size() > kMost) text += "... (" + std::to_string(bytes.size()) + " bytes)";
  return text.empty() ? "nothing" : text;
}

struct UnderWay {
  const Record* record;
  uint64_t ticket;
  uint64_t payload_bytes;
};

std::string Printable(std::string text) {
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text;
}

Status Check(const Record& record, const ReplayTarget::Answer& answer) {
  const CallTraits& traits = TraitsOf(record.header.call);
  if (answer.result != 0) {
    // What opens something says what it waited for.
    const bool says_more = traits.sharing == Sharing::kOpens && !answer.message.empty();
    return Error("the new server cannot replay " + Describe(record) + ": " + driverabi::DescribeError(answer.result) +
                 (says_more ? ": " + Printable(answer.message) : "") +
                 (answer.result == kOutOfMemory
                      ? "; the job needs a GPU with more free memory, or a higher limit for its "
                        "sessions there (cr-server --memory-limit)"
                      : ""));
  }
  wire::cuGraphInstantiateWithParams_Request instantiated;
  wire::cuGraphInstantiateWithParams_Reply now;
  if (wire::DecodeAs(record.header.call, record.message, &instantiated) && instantiated.expected != 0 &&
      now.Decode(answer.message) && now.handle != instantiated.expected) {
    return Error("an executable graph that kernels may launch has the handle " + Hex(now.handle) +
                 " on this server, but " + Hex(instantiated.expected) +
                 " before, and the job's kernels may have kept that handle (record " + std::to_string(record.order) +
                 ")");
  }
  if (!record.modifies && !traits.Has(kReplyMayDiffer) && answer.message != record.reply) {
    return Error("the replay diverged at " + Describe(record) + ": it answered " + FirstBytes(answer.message) +
                 ", but " + FirstBytes(record.reply) + " before");
  }
  return OkStatus();
}

bool IsOfGraphs(Kind kind) {
  return kind == Kind::kGraph || kind == Kind::kGraphNode || kind == Kind::kGraphExec || kind == Kind::kCapture;
}

// Texture and surface objects are numbers, which must come back. A driver gives them out from the lowest one on, and
// one that was given back only when it likes (580 on an H200: not while there is work): in the order of the numbers,
// none is needed that was given back before. Nothing is made from these objects, so all of them can wait for the last
// one.
void OrderNumbers(std::vector<const Record*>* records) {
  const auto is_number = [](const Record* record) {
    return record->object.kind == Kind::kTexture || record->object.kind == Kind::kSurface;
  };
  std::vector<const Record*> numbers;
  std::copy_if(records->begin(), records->end(), std::back_inserter(numbers), is_number);
  if (numbers.empty()) return;
  const auto last = std::find_if(records->rbegin(), records->rend(), is_number).base();
  const auto rest = std::stable_partition(records->begin(), last, [&](const Record* r) { return !is_number(r); });
  // The number is the lower part of the key, the context the upper one; both kinds share the numbers.
  std::sort(numbers.begin(), numbers.end(),
            [](const Record* a, const Record* b) { return a->object.id < b->object.id; });
  std::copy(numbers.begin(), numbers.end(), rest);
}

bool IsOfCode(const Record* record) {
  const auto is_code = [](const ObjectKey& key) {
    return key.kind == Kind::kContext || key.kind == Kind::kModule || key.kind == Kind::kLibrary ||
           key.kind == Kind::kFunction || key.kind == Kind::kKernel;
  };
  return is_code(record->object) && std::all_of(record->depends_on.begin(), record->depends_on.end(), is_code);
}

std::vector<const Record*> CodeOf(const Log& log) {
  std::vector<const Record*> records = log.InOrder();
  records.erase(std::remove_if(records.begin(), records.end(), [](const Record* record) { return !IsOfCode(record); }),
                records.end());
  return records;
}

// Nothing but graphs is made from graphs and user objects, and nothing from references, so they can all wait, in their
// own order.
bool CanWait(const Record* record) {
  const Kind kind = record->object.kind;
  return IsOfGraphs(kind) || kind == Kind::kUserObject || kind == Kind::kTextureReference ||
         kind == Kind::kSurfaceReference;
}

std::vector<const Record*> RecordsOf(const Log& log, Part part, const Log* ahead) {
  std::vector<const Record*> records = log.InOrder();
  if (ahead) {
    const uint64_t last = ahead->last_order();
    const auto is_there = [last](const Record* record) { return record->order <= last && IsOfCode(record); };
    records.erase(std::remove_if(records.begin(), records.end(), is_there), records.end());
  }
  OrderNumbers(&records);
  if (part == Part::kAll) return records;
  const bool they_wait = std::any_of(records.begin(), records.end(), [](const Record* record) {
    return CanWait(record) && std::any_of(record->depends_on.begin(), record->depends_on.end(),
                                          [](const ObjectKey& key) { return key.kind == Kind::kHostMemory; });
  });
  const auto other_part = [&](const Record* record) {
    return (they_wait && CanWait(record)) != (part == Part::kAfterPinned);
  };
  records.erase(std::remove_if(records.begin(), records.end(), other_part), records.end());
  return records;
}

}  // namespace

bool Shares(const Log& log) {
  const std::vector<const Record*> records = log.InOrder();
  return std::any_of(records.begin(), records.end(),
                     [](const Record* record) { return TraitsOf(record->header.call).sharing != Sharing::kNotShared; });
}

Status ShareIn(std::string_view scope, ReplayTarget& target) {
  wire::OpShareIn_Request request;
  request.scope = scope;
  std::string message;
  request.Encode(&message);
  FrameHeader header;
  header.call = kOpShareIn;
  const uint64_t ticket = target.Begin(header, message, {});
  if (!ticket) return Error("the new server was lost before the replay: the connection has ended");
  const StatusOr<ReplayTarget::Answer> answer = target.Finish(ticket);
  if (!answer.ok()) return Error("the new server was lost before the replay: " + answer.status().message());
  if (answer->result == 0) return OkStatus();
  return Error("the new session cannot share with those of its job: " + driverabi::DescribeError(answer->result));
}

std::vector<std::string> NotReplayable(const Log& log) {
  std::vector<std::string> names;
  for (const Record* record : log.InOrder()) {
    if (!TraitsOf(record->header.call).Has(kNotReplayable)) continue;
    const std::string name = CallIdName(record->header.call);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

namespace {

Status CanBeReplayed(const Log& log) {
  const std::vector<std::string> refused = NotReplayable(log);
  if (refused.empty()) return OkStatus();
  std::string why = "the log has calls that cannot be replayed:";
  for (const std::string& name : refused) why += " " + name;
  return Error(std::move(why));
}

// Sends these records of the log.
Status Send(const Log& log, const std::vector<const Record*>& records, ReplayTarget& target,
            const ReplayProgress& progress) {
  std::deque<UnderWay> under_way;
  uint64_t payload_under_way = 0;
  uint64_t done = 0;
  Status result;
  // Waits for the oldest request. After a failure the rest is still waited for: every Begin needs its Finish.
  const auto finish_one = [&] {
    const UnderWay oldest = under_way.front();
    under_way.pop_front();
    payload_under_way -= oldest.payload_bytes;
    const StatusOr<ReplayTarget::Answer> answer = target.Finish(oldest.ticket);
    if (!result.ok()) return;
    if (!answer.ok()) {
      result = Error("the new server was lost at " + Describe(*oldest.record) + ": " + answer.status().message());
      return;
    }
    ++done;
    if (progress) progress(done, records.size());
    result = Check(*oldest.record, *answer);
  };
  for (const Record* record : records) {
    std::string_view payload;
    if (record->image) {
      const std::string* const image = log.FindImage(*record->image);
      if (!image) {
        result = Error("the log has no module image for " + Describe(*record));
        break;
      }
      payload = *image;
    }
    while (result.ok() && !under_way.empty() &&
           (under_way.size() >= std::max<size_t>(target.window(), 1) ||
            payload_under_way + payload.size() > kMaxPayloadUnderWay)) {
      finish_one();
    }
    if (!result.ok()) break;
    FrameHeader header = record->header;
    header.flags = kFlagReplay;
    const uint64_t ticket = target.Begin(header, record->message, payload);
    if (!ticket) {
      result = Error("the new server was lost before " + Describe(*record));
      break;
    }
    under_way.push_back({record, ticket, payload.size()});
    payload_under_way += payload.size();
  }
  while (!under_way.empty()) finish_one();
  return result;
}

}  // namespace

Status Replay(const Log& log, ReplayTarget& target, const ReplayProgress& progress, Part part, const Log* ahead) {
  CR_RETURN_IF_ERROR(CanBeReplayed(log));
  return Send(log, RecordsOf(log, part, ahead), target, progress);
}

Status ReplayCode(const Log& log, ReplayTarget& target) {
  CR_RETURN_IF_ERROR(CanBeReplayed(log));
  return Send(log, CodeOf(log), target, nullptr);
}

size_t CodeRecords(const Log& log) { return CodeOf(log).size(); }

bool HasCodeOf(const Log& ahead, const Log& log) {
  std::map<uint64_t, const Record*> now;
  for (const Record* record : log.InOrder()) now[record->order] = record;
  const std::vector<const Record*> code = CodeOf(ahead);
  return std::all_of(code.begin(), code.end(), [&](const Record* record) {
    const auto found = now.find(record->order);
    if (found == now.end()) return false;
    const Record& same = *found->second;
    return IsOfCode(&same) && same.object == record->object && same.modifies == record->modifies &&
           same.key == record->key && same.header.call == record->header.call &&
           same.header.context_or_result == record->header.context_or_result && same.message == record->message &&
           same.reply == record->reply && same.image == record->image;
  });
}

}  // namespace cuda_remote::replay
