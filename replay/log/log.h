// SPDX-License-Identifier: Apache-2.0
// The replay log: the calls that made the objects which are still alive. It recreates them on another server.
//
// It has one record for each live object (the call that made it), and one for each live setting of an object (the last
// call that made the setting). When an object is destroyed, its records are removed, and so are those of everything
// that depended on it. So the log's size follows what is alive, not how long the job ran. Each module image is kept
// once, by its contents.
//
// Part of the client library: no exceptions of its own, no abseil, no libprotobuf. Not thread-safe; the owner locks.
// The log copies everything that it is given.
#ifndef CUDA_REMOTE_REPLAY_LOG_LOG_H_
#define CUDA_REMOTE_REPLAY_LOG_LOG_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "proto/base/hash.h"
#include "proto/base/status.h"
#include "proto/frame/frame.h"
#include "proto/frame/handle.h"

namespace cuda_remote::replay {

// Names an object: `id` is its virtual handle, or its address for the kinds that have no handle.
struct ObjectKey {
  Kind kind = Kind::kNone;
  uint64_t id = 0;
};
inline bool operator==(const ObjectKey& a, const ObjectKey& b) { return a.kind == b.kind && a.id == b.id; }
inline bool operator!=(const ObjectKey& a, const ObjectKey& b) { return !(a == b); }

struct ObjectKeyHash {
  size_t operator()(const ObjectKey& key) const {
    return size_t((key.id ^ uint64_t(key.kind) << 56) * 0x9e3779b97f4a7c15u >> 7);
  }
};

// One call to send again.
struct Record {
  ObjectKey object;
  bool modifies = false;  // a setting of `object`; else the call that made it
  uint64_t key = 0;       // of a setting: which one, together with the call
  uint64_t order = 0;     // rising with time; replay goes by it
  FrameHeader header;     // call and context count; flags, sequence and aux are 0
  std::string message;
  std::string reply;             // of a making call: what the server answered, and must answer again
  std::optional<Hash128> image;  // the payload, in the log's store of images
  std::vector<ObjectKey> depends_on;
};

// Module images by their hashes. Shared: an image is large, and never changes.
using Images = std::map<Hash128, std::shared_ptr<const std::string>>;

// Gives images to `write` as bytes, piece by piece, until it returns false; and reads such bytes. Parse fails for
// anything that Write did not write; any input is safe. Thread-safe.
bool WriteImages(const Images& images, const std::function<bool(std::string_view)>& write);
StatusOr<Images> ParseImages(std::string_view bytes);

class Log {
 public:
  Log();
  ~Log();
  Log(Log&&) noexcept;
  Log& operator=(Log&&) noexcept;

  // Records that the call in `header` and `message` made `object`. The record is removed when any object of
  // `depends_on` is destroyed; those need not have records of their own. If the same call has made the same object
  // before, nothing changes (a module's variable is looked up many times). If another call has, the old object and its
  // dependents count as destroyed.
  void Create(ObjectKey object, const std::vector<ObjectKey>& depends_on, const FrameHeader& header,
              std::string_view message, std::string_view reply_message, std::optional<Hash128> payload);

  // Records a setting of `object`. It replaces an earlier setting by the same call with the same `key`. It is removed
  // when any object of `depends_on` is destroyed; then `object` is removed too if it is a graph, a node or an
  // executable.
  void Modify(ObjectKey object, uint64_t key, const FrameHeader& header, std::string_view message,
              const std::vector<ObjectKey>& depends_on = {});

  // Replaces the message of the call that made `object`; nothing else changes. False if there is no such record.
  bool SetMessage(ObjectKey object, std::string_view message);

  // The same for its payload.
  bool SetImage(ObjectKey object, std::string_view bytes);

  // The same for the message of one setting.
  bool SetSettingMessage(ObjectKey object, uint32_t call, uint64_t key, std::string_view message);

  // The record of one setting; null if there is none.
  const Record* FindSetting(ObjectKey object, uint32_t call, uint64_t key) const;

  // Copies of the records of all settings of `object` that `call` made, in no order.
  std::vector<Record> SettingsOf(ObjectKey object, uint32_t call) const;

  // Forgets one setting. Nothing happens if there is none.
  void ForgetSetting(ObjectKey object, uint32_t call, uint64_t key);

  // The order number of the latest record, 0 if there never was one.
  uint64_t last_order() const { return next_order_ - 1; }

  // Removes the object and everything that depended on it, directly or not. Returns those that the log knew, the object
  // itself first.
  std::vector<ObjectKey> Destroy(ObjectKey object);

  // As Destroy, but `object`, its record and its settings stay.
  std::vector<ObjectKey> DestroyDependents(ObjectKey object);

  // Stores one copy of a payload for records to name, and returns its hash. The copy is removed with the last record
  // that names it; if none does, when the next image is added.
  Hash128 AddImage(std::string_view bytes);

  // The image's bytes; null if the log has none of this hash.
  const std::string* FindImage(const Hash128& hash) const;

  // The record that made `object`; null if there is none.
  const Record* Find(ObjectKey object) const;

  // All records in the order in which they must be sent. The pointers are valid until the log changes.
  std::vector<const Record*> InOrder() const;
  // All images.
  Images AllImages() const;

  // Appends the log as bytes (README.md has the format). `without`: hashes of images that are left out.
  void Serialize(std::string* out, const std::set<Hash128>& without = {}) const;

  // What `bytes` describe. Fails for anything that Serialize did not write. Any input is safe. `others`: images that
  // may be missing from `bytes`.
  static StatusOr<Log> Parse(std::string_view bytes, const Images& others = {});

  // Approximate memory of the records and images, in bytes.
  size_t bytes() const { return bytes_; }
  size_t records() const { return records_; }
  size_t images() const { return images_.size(); }

 private:
  struct Node;
  struct Stored;
  struct Edge;
  struct Image {
    std::shared_ptr<const std::string> bytes;
    size_t users = 0;
  };

  Node* NodeOf(ObjectKey object);
  void Add(Node* node, Stored* stored);
  void Forget(Stored* stored);
  void SetMessageOf(Stored* stored, std::string_view message);
  // Adds a record that Parse read; false if there is such a one already.
  bool Restore(Record record);
  void RemoveIfUnused(Node* node);
  std::vector<ObjectKey> DestroyAll(std::vector<Node*> doomed);
  void DropPendingImage();
  void UseImage(const Hash128& hash);
  void ReleaseImage(const Hash128& hash);

  std::unordered_map<ObjectKey, std::unique_ptr<Node>, ObjectKeyHash> nodes_;
  std::map<Hash128, Image> images_;       // with at least one user, but for the pending one
  std::optional<Hash128> pending_image_;  // added, and named by no record yet
  uint64_t next_order_ = 1;
  size_t bytes_ = 0;
  size_t records_ = 0;
};

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_LOG_LOG_H_
