// SPDX-License-Identifier: Apache-2.0
#include "replay/log/log.h"

#include <algorithm>
#include <utility>

namespace cuda_remote::replay {

// One dependency: `user` goes when `needed` goes. In a list of the needed node, so that a context with very many
// streams forgets one of them at once.
struct Log::Edge {
  Stored* user = nullptr;
  Node* needed = nullptr;
  Edge* previous = nullptr;
  Edge* next = nullptr;
};

// A record and its place in the graph.
struct Log::Stored {
  Record record;
  Node* node = nullptr;
  std::vector<std::unique_ptr<Edge>> edges;

  size_t bytes() const {
    return sizeof(Stored) + record.message.capacity() + record.reply.capacity() +
           record.depends_on.capacity() * sizeof(ObjectKey) + edges.capacity() * (sizeof(Edge) + 2 * sizeof(void*));
  }
};

// An object that has a record, has settings, or that something depends on.
struct Log::Node {
  ObjectKey key;
  std::unique_ptr<Stored> created;
  std::map<std::pair<uint32_t, uint64_t>, std::unique_ptr<Stored>> settings;  // by call and key
  Edge* users = nullptr;
  bool doomed = false;
};

Log::Log() = default;
Log::~Log() = default;

Log::Log(Log&& other) noexcept { *this = std::move(other); }

Log& Log::operator=(Log&& other) noexcept {
  nodes_ = std::move(other.nodes_);
  images_ = std::move(other.images_);
  pending_image_ = std::exchange(other.pending_image_, std::nullopt);
  next_order_ = std::exchange(other.next_order_, 1);
  bytes_ = std::exchange(other.bytes_, 0);
  records_ = std::exchange(other.records_, 0);
  other.nodes_.clear();
  other.images_.clear();
  return *this;
}

Log::Node* Log::NodeOf(ObjectKey object) {
  std::unique_ptr<Node>& node = nodes_[object];
  if (!node) {
    node = std::make_unique<Node>();
    node->key = object;
    bytes_ += sizeof(Node);
  }
  return node.get();
}

void Log::Add(Node* node, Stored* stored) {
  stored->node = node;
  for (const ObjectKey& key : stored->record.depends_on) {
    auto edge = std::make_unique<Edge>();
    edge->user = stored;
    edge->needed = NodeOf(key);
    edge->next = edge->needed->users;
    if (edge->next) edge->next->previous = edge.get();
    edge->needed->users = edge.get();
    stored->edges.push_back(std::move(edge));
  }
  if (stored->record.image) UseImage(*stored->record.image);
  bytes_ += stored->bytes();
  ++records_;
}

void Log::UseImage(const Hash128& hash) {
  if (auto image = images_.find(hash); image != images_.end()) ++image->second.users;
  if (pending_image_ == hash) pending_image_.reset();
}

void Log::ReleaseImage(const Hash128& hash) {
  const auto image = images_.find(hash);
  if (image == images_.end() || --image->second.users > 0) return;
  bytes_ -= image->second.bytes->size();
  images_.erase(image);
}

// Takes a record out of the books. The caller frees it, and looks after nodes that nothing needs any more.
void Log::Forget(Stored* stored) {
  bytes_ -= stored->bytes();
  --records_;
  for (const std::unique_ptr<Edge>& edge : stored->edges) {
    if (edge->previous) {
      edge->previous->next = edge->next;
    } else {
      edge->needed->users = edge->next;
    }
    if (edge->next) edge->next->previous = edge->previous;
    RemoveIfUnused(edge->needed);
  }
  stored->edges.clear();
  if (stored->record.image) ReleaseImage(*stored->record.image);
}

void Log::RemoveIfUnused(Node* node) {
  if (node->doomed || node->created || !node->settings.empty() || node->users) return;
  bytes_ -= sizeof(Node);
  nodes_.erase(node->key);
}

namespace {

// Neither the object itself nor anything twice.
std::vector<ObjectKey> Distinct(ObjectKey object, const std::vector<ObjectKey>& keys) {
  std::vector<ObjectKey> distinct;
  for (const ObjectKey& key : keys) {
    if (key == object || key.id == 0 || std::find(distinct.begin(), distinct.end(), key) != distinct.end()) continue;
    distinct.push_back(key);
  }
  return distinct;
}

FrameHeader Canonical(const FrameHeader& header, size_t message_bytes) {
  FrameHeader canonical;
  canonical.call = header.call;
  canonical.context_or_result = header.context_or_result;
  canonical.message_bytes = uint32_t(message_bytes);
  return canonical;
}

}  // namespace

void Log::Create(ObjectKey object, const std::vector<ObjectKey>& depends_on, const FrameHeader& header,
                 std::string_view message, std::string_view reply_message, std::optional<Hash128> payload) {
  if (auto found = nodes_.find(object); found != nodes_.end() && found->second->created) {
    const Record& old = found->second->created->record;
    if (old.header.call == header.call && old.message == message && old.reply == reply_message &&
        old.image == payload) {
      DropPendingImage();
      return;
    }
    // Holds the image while the old record goes, if the new one has the same.
    const auto held = payload && old.image == payload ? images_.find(*payload) : images_.end();
    if (held != images_.end()) ++held->second.users;
    Destroy(object);
    if (held != images_.end()) --held->second.users;
  }
  auto stored = std::make_unique<Stored>();
  stored->record.object = object;
  stored->record.order = next_order_++;
  stored->record.header = Canonical(header, message.size());
  stored->record.message = message;
  stored->record.reply = reply_message;
  stored->record.image = payload;
  stored->record.depends_on = Distinct(object, depends_on);
  Node* const node = NodeOf(object);
  Add(node, stored.get());
  node->created = std::move(stored);
}

void Log::Modify(ObjectKey object, uint64_t key, const FrameHeader& header, std::string_view message,
                 const std::vector<ObjectKey>& depends_on) {
  auto stored = std::make_unique<Stored>();
  stored->record.object = object;
  stored->record.modifies = true;
  stored->record.key = key;
  stored->record.order = next_order_++;
  stored->record.header = Canonical(header, message.size());
  stored->record.message = message;
  stored->record.depends_on = Distinct(object, depends_on);
  Node* const node = NodeOf(object);
  Add(node, stored.get());
  std::unique_ptr<Stored>& place = node->settings[{header.call, key}];
  place.swap(stored);
  if (stored) Forget(stored.get());
}

bool Log::SetMessage(ObjectKey object, std::string_view message) {
  const auto found = nodes_.find(object);
  if (found == nodes_.end() || !found->second->created) return false;
  SetMessageOf(found->second->created.get(), message);
  return true;
}

bool Log::SetImage(ObjectKey object, std::string_view bytes) {
  const auto found = nodes_.find(object);
  if (found == nodes_.end() || !found->second->created) return false;
  std::optional<Hash128>& image = found->second->created->record.image;
  const Hash128 hash = AddImage(bytes);
  UseImage(hash);
  if (image) ReleaseImage(*image);
  image = hash;
  return true;
}

bool Log::SetSettingMessage(ObjectKey object, uint32_t call, uint64_t key, std::string_view message) {
  const auto found = nodes_.find(object);
  if (found == nodes_.end()) return false;
  const auto setting = found->second->settings.find({call, key});
  if (setting == found->second->settings.end()) return false;
  SetMessageOf(setting->second.get(), message);
  return true;
}

void Log::SetMessageOf(Stored* stored, std::string_view message) {
  bytes_ -= stored->bytes();
  stored->record.message = message;
  stored->record.header.message_bytes = uint32_t(message.size());
  bytes_ += stored->bytes();
}

const Record* Log::FindSetting(ObjectKey object, uint32_t call, uint64_t key) const {
  const auto found = nodes_.find(object);
  if (found == nodes_.end()) return nullptr;
  const auto setting = found->second->settings.find({call, key});
  return setting == found->second->settings.end() ? nullptr : &setting->second->record;
}

std::vector<Record> Log::SettingsOf(ObjectKey object, uint32_t call) const {
  std::vector<Record> records;
  const auto found = nodes_.find(object);
  if (found == nodes_.end()) return records;
  for (auto it = found->second->settings.lower_bound({call, 0});
       it != found->second->settings.end() && it->first.first == call; ++it) {
    records.push_back(it->second->record);
  }
  return records;
}

void Log::ForgetSetting(ObjectKey object, uint32_t call, uint64_t key) {
  const auto found = nodes_.find(object);
  if (found == nodes_.end()) return;
  Node* const node = found->second.get();
  const auto setting = node->settings.find({call, key});
  if (setting == node->settings.end()) return;
  Forget(setting->second.get());
  node->settings.erase(setting);
  RemoveIfUnused(node);
}

bool Log::Restore(Record record) {
  Node* const node = NodeOf(record.object);
  std::unique_ptr<Stored>* place = &node->created;
  if (record.modifies) place = &node->settings[{record.header.call, record.key}];
  if (*place) return false;
  *place = std::make_unique<Stored>();
  (*place)->record = std::move(record);
  Add(node, place->get());
  return true;
}

std::vector<ObjectKey> Log::Destroy(ObjectKey object) {
  auto found = nodes_.find(object);
  if (found == nodes_.end()) return {};
  found->second->doomed = true;
  return DestroyAll({found->second.get()});
}

std::vector<ObjectKey> Log::DestroyDependents(ObjectKey object) {
  auto found = nodes_.find(object);
  if (found == nodes_.end()) return {};
  Node* const root = found->second.get();
  root->doomed = true;  // holds it while its users go
  std::vector<Node*> doomed;
  std::vector<Stored*> settings;
  for (Edge* edge = root->users; edge; edge = edge->next) {
    if (edge->user->record.modifies) {
      settings.push_back(edge->user);
    } else if (!edge->user->node->doomed) {
      edge->user->node->doomed = true;
      doomed.push_back(edge->user->node);
    }
  }
  for (Stored* setting : settings) {
    Node* const node = setting->node;
    const std::pair<uint32_t, uint64_t> key{setting->record.header.call, setting->record.key};
    Forget(setting);
    node->settings.erase(key);
    RemoveIfUnused(node);
  }
  std::vector<ObjectKey> gone = DestroyAll(std::move(doomed));
  root->doomed = false;
  RemoveIfUnused(root);
  return gone;
}

// Removes nodes that are marked as doomed, and what depends on them.
std::vector<ObjectKey> Log::DestroyAll(std::vector<Node*> doomed) {
  for (size_t i = 0; i < doomed.size(); ++i) {
    Edge* next = nullptr;
    for (Edge* edge = doomed[i]->users; edge; edge = next) {
      next = edge->next;
      Stored* const user = edge->user;
      Node* const node = user->node;
      if (node->doomed) continue;
      // A graph without one of its settings would be another graph.
      const Kind kind = node->key.kind;
      const bool of_graphs = kind == Kind::kGraph || kind == Kind::kGraphNode || kind == Kind::kGraphExec;
      if (user->record.modifies && !of_graphs) {
        // Only the setting goes. One record has at most one edge to this node, so `next` stays.
        const std::pair<uint32_t, uint64_t> key{user->record.header.call, user->record.key};
        Forget(user);
        node->settings.erase(key);
        RemoveIfUnused(node);
      } else {
        node->doomed = true;
        doomed.push_back(node);
      }
    }
  }
  std::vector<ObjectKey> gone;
  gone.reserve(doomed.size());
  for (Node* node : doomed) {
    gone.push_back(node->key);
    if (node->created) Forget(node->created.get());
    for (auto& [key, setting] : node->settings) Forget(setting.get());
    node->created.reset();
    node->settings.clear();
  }
  for (Node* node : doomed) {
    bytes_ -= sizeof(Node);
    nodes_.erase(node->key);
  }
  return gone;
}

Hash128 Log::AddImage(std::string_view bytes) {
  const Hash128 hash = HashOf(bytes);
  if (pending_image_ == hash) return hash;
  DropPendingImage();
  Image& image = images_[hash];
  if (image.users > 0) return hash;
  image.bytes = std::make_shared<const std::string>(bytes);
  bytes_ += bytes.size();
  pending_image_ = hash;
  return hash;
}

void Log::DropPendingImage() {
  if (!pending_image_) return;
  auto image = images_.find(*pending_image_);
  if (image != images_.end() && image->second.users == 0) {
    bytes_ -= image->second.bytes->size();
    images_.erase(image);
  }
  pending_image_.reset();
}

const std::string* Log::FindImage(const Hash128& hash) const {
  const auto found = images_.find(hash);
  return found == images_.end() ? nullptr : found->second.bytes.get();
}

const Record* Log::Find(ObjectKey object) const {
  const auto found = nodes_.find(object);
  return found == nodes_.end() || !found->second->created ? nullptr : &found->second->created->record;
}

std::vector<const Record*> Log::InOrder() const {
  std::vector<const Record*> records;
  records.reserve(records_);
  for (const auto& [key, node] : nodes_) {
    if (node->created) records.push_back(&node->created->record);
    for (const auto& [which, setting] : node->settings) records.push_back(&setting->record);
  }
  std::sort(records.begin(), records.end(), [](const Record* a, const Record* b) { return a->order < b->order; });
  return records;
}

Images Log::AllImages() const {
  Images images;
  for (const auto& [hash, image] : images_) {
    if (image.users > 0) images[hash] = image.bytes;
  }
  return images;
}

}  // namespace cuda_remote::replay
