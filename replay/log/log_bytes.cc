// SPDX-License-Identifier: Apache-2.0
// The log as bytes: Log::Serialize and Log::Parse. README.md is the specification.

#include <cstddef>
#include <cstring>
#include <set>
#include <utility>

#include "replay/log/log.h"

namespace cuda_remote::replay {
namespace {

constexpr char kMagic[8] = {'C', 'R', 'R', 'E', 'P', 'L', 'A', 'Y'};
constexpr uint32_t kVersion = 1;

struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t reserved;
  uint64_t images;
  uint64_t records;
  uint64_t next_order;
  uint64_t bytes;  // of the whole log, trailer included
};
static_assert(sizeof(FileHeader) == 48);

struct ImageHeader {
  uint64_t hash_low;
  uint64_t hash_high;
  uint64_t bytes;
};
static_assert(sizeof(ImageHeader) == 24);

struct RecordHeader {
  uint8_t kind;
  uint8_t modifies;
  uint8_t has_image;
  uint8_t reserved;
  uint32_t dependencies;
  uint64_t id;
  uint64_t key;
  uint64_t order;
  uint64_t image_low;
  uint64_t image_high;
  uint32_t reply_bytes;
  uint32_t reserved2;
};
static_assert(sizeof(RecordHeader) == 56);

struct Dependency {
  uint64_t kind;
  uint64_t id;
};

template <typename T>
void Put(const T& value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Everything in the log starts at a multiple of 8 from its beginning.
void Pad(size_t start, std::string* out) { out->append((8 - (out->size() - start) % 8) % 8, '\0'); }

// Reads from the front of `bytes`; every Take says whether there was enough.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  bool Take(T* value) {
    if (bytes_.size() - at_ < sizeof(T)) return false;
    memcpy(value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }
  bool Take(uint64_t count, std::string_view* view) {
    if (bytes_.size() - at_ < count) return false;
    *view = bytes_.substr(at_, size_t(count));
    at_ += size_t(count);
    return true;
  }
  bool TakePadding() {
    while (at_ % 8 != 0) {
      if (at_ == bytes_.size() || bytes_[at_] != 0) return false;
      ++at_;
    }
    return true;
  }
  size_t at() const { return at_; }
  bool done() const { return at_ == bytes_.size(); }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
};

}  // namespace

void Log::Serialize(std::string* out) const {
  const size_t start = out->size();
  out->reserve(start + bytes_ + sizeof(FileHeader) + 64);
  const std::vector<const Record*> records = InOrder();
  const auto images = Images();
  FileHeader header{};
  memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.images = images.size();
  header.records = records.size();
  header.next_order = next_order_;
  Put(header, out);
  for (const auto& [hash, bytes] : images) {
    Put(ImageHeader{hash.low, hash.high, bytes->size()}, out);
    out->append(*bytes);
    Pad(start, out);
  }
  for (const Record* record : records) {
    RecordHeader fixed{};
    fixed.kind = uint8_t(record->object.kind);
    fixed.modifies = record->modifies;
    fixed.has_image = record->image.has_value();
    fixed.dependencies = uint32_t(record->depends_on.size());
    fixed.id = record->object.id;
    fixed.key = record->key;
    fixed.order = record->order;
    if (record->image) {
      fixed.image_low = record->image->low;
      fixed.image_high = record->image->high;
    }
    fixed.reply_bytes = uint32_t(record->reply.size());
    Put(fixed, out);
    for (const ObjectKey& key : record->depends_on) Put(Dependency{uint64_t(key.kind), key.id}, out);
    Put(record->header, out);
    out->append(record->message);
    Pad(start, out);
    out->append(record->reply);
    Pad(start, out);
  }
  const uint64_t total = out->size() - start + sizeof(Hash128);
  memcpy(&(*out)[start + offsetof(FileHeader, bytes)], &total, sizeof(total));
  Put(HashOf(out->data() + start, out->size() - start), out);
}

bool Log::Parse(std::string_view bytes, Log* log, std::string* error) {
  size_t at = 0;
  const auto fail = [&](const char* what) {
    *error = "the replay log is damaged at offset " + std::to_string(at) + ": " + what;
    return false;
  };
  FileHeader header;
  if (bytes.size() < sizeof(header) + sizeof(Hash128)) return fail("too short");
  memcpy(&header, bytes.data(), sizeof(header));
  if (memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return fail("this is no replay log");
  if (header.version != kVersion) {
    *error = "the replay log has format version " + std::to_string(header.version) + "; this program reads version " +
             std::to_string(kVersion) + (header.version > kVersion ? "; use a newer cuda-remote" : "");
    return false;
  }
  if (header.bytes != bytes.size()) return fail("its size is not what its header says (truncated?)");
  const std::string_view body = bytes.substr(0, bytes.size() - sizeof(Hash128));
  Hash128 expected;
  memcpy(&expected, bytes.data() + body.size(), sizeof(expected));
  if (HashOf(body) != expected) return fail("its checksum is wrong");
  if (header.reserved != 0) return fail("reserved bytes are set");

  Reader reader(body);
  Log parsed;
  reader.Take(&header);
  for (uint64_t i = 0; i < header.images; ++i) {
    at = reader.at();
    ImageHeader fixed;
    std::string_view image;
    if (!reader.Take(&fixed) || !reader.Take(fixed.bytes, &image) || !reader.TakePadding())
      return fail("a module image");
    const Hash128 hash{fixed.hash_low, fixed.hash_high};
    if (HashOf(image) != hash) return fail("a module image's checksum");
    const auto [place, is_new] = parsed.images_.try_emplace(hash);
    if (!is_new) return fail("the same module image again");
    place->second.bytes = image;
    parsed.bytes_ += image.size();
  }
  uint64_t last_order = 0;
  for (uint64_t i = 0; i < header.records; ++i) {
    at = reader.at();
    RecordHeader fixed;
    if (!reader.Take(&fixed)) return fail("a record is cut off");
    if (fixed.reserved != 0 || fixed.reserved2 != 0 || fixed.modifies > 1 || fixed.has_image > 1 || fixed.kind == 0 ||
        fixed.id == 0) {
      return fail("a record's header");
    }
    if (fixed.order <= last_order || fixed.order >= header.next_order) return fail("a record is out of order");
    last_order = fixed.order;
    Record record;
    record.object = {Kind(fixed.kind), fixed.id};
    record.modifies = fixed.modifies;
    record.key = fixed.key;
    record.order = fixed.order;
    for (uint32_t d = 0; d < fixed.dependencies; ++d) {
      Dependency dependency;
      if (!reader.Take(&dependency)) return fail("a record's dependencies");
      if (dependency.kind == 0 || dependency.kind > 255 || dependency.id == 0) return fail("a record's dependencies");
      record.depends_on.push_back({Kind(dependency.kind), dependency.id});
      if (record.depends_on.back() == record.object) return fail("a record depends on itself");
    }
    std::set<std::pair<uint8_t, uint64_t>> distinct;
    for (const ObjectKey& key : record.depends_on) {
      if (!distinct.insert({uint8_t(key.kind), key.id}).second) return fail("a record has a dependency twice");
    }
    std::string_view message, reply;
    if (!reader.Take(&record.header)) return fail("a record's frame");
    const FrameHeader& frame = record.header;
    if (frame.message_bytes > kMaxMessageBytes || frame.payload_bytes != 0 || frame.flags != 0 || frame.sequence != 0 ||
        frame.aux != 0 || frame.call == 0) {
      return fail("a record's frame");
    }
    if (!reader.Take(frame.message_bytes, &message) || !reader.TakePadding()) return fail("a record's message");
    if (fixed.reply_bytes > kMaxMessageBytes || !reader.Take(fixed.reply_bytes, &reply) || !reader.TakePadding()) {
      return fail("a record's reply");
    }
    record.message = message;
    record.reply = reply;
    if (fixed.has_image) {
      record.image = Hash128{fixed.image_low, fixed.image_high};
      if (parsed.images_.count(*record.image) == 0) return fail("a record's module image is missing");
    } else if (fixed.image_low != 0 || fixed.image_high != 0) {
      return fail("a record's header");
    }
    if (record.modifies ? record.image.has_value() || !record.reply.empty() : record.key != 0) {
      return fail("a record's header");
    }
    if (!parsed.Restore(std::move(record))) return fail("the same object or setting again");
  }
  at = reader.at();
  if (!reader.done()) return fail("bytes after the last record");
  for (const auto& [hash, image] : parsed.images_) {
    if (image.users == 0) return fail("a module image that no record names");
  }
  parsed.next_order_ = header.next_order;
  *log = std::move(parsed);
  return true;
}

}  // namespace cuda_remote::replay
