// SPDX-License-Identifier: Apache-2.0
// The log as bytes: Log::Serialize and Log::Parse. README.md is the specification.

#include <cstddef>
#include <cstring>
#include <protozero/exception.hpp>
#include <protozero/pbf_builder.hpp>
#include <protozero/pbf_message.hpp>
#include <set>
#include <utility>

#include "replay/log/log.h"

namespace cuda_remote::replay {
namespace {

constexpr char kMagic[8] = {'C', 'R', 'R', 'E', 'P', 'L', 'A', 'Y'};
constexpr uint32_t kVersion = 2;
// Of a header; none is this long.
constexpr uint32_t kMaxHeader = 64u << 20;

using WireType = protozero::pbf_wire_type;

// The fields of log.proto, which the client library reads and writes without libprotobuf.
enum class LogField : protozero::pbf_tag_type { kImages = 1, kRecords = 2, kNextOrder = 3, kBytes = 4 };
enum class ImageField : protozero::pbf_tag_type { kHash = 1, kBytes = 2 };
enum class RecordField : protozero::pbf_tag_type {
  kKind = 1,
  kId = 2,
  kModifies = 3,
  kKey = 4,
  kOrder = 5,
  kImage = 6,
  kDependencies = 7,
  kCall = 8,
  kContext = 9,
  kMessageBytes = 10,
  kReplyBytes = 11,
};
enum class DependencyField : protozero::pbf_tag_type { kKind = 1, kId = 2 };

struct LogHeader {
  uint64_t images = 0;
  uint64_t records = 0;
  uint64_t next_order = 0;
  uint64_t bytes = 0;  // of the whole log, trailer included
};

// A record but its message and its reply, which follow.
struct RecordHeader {
  Record record;
  uint64_t reply_bytes = 0;
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

std::string BytesOf(const Hash128& hash) {
  return std::string(reinterpret_cast<const char*>(&hash.low), 8) +
         std::string(reinterpret_cast<const char*>(&hash.high), 8);
}

bool HashFrom(protozero::data_view bytes, Hash128* hash) {
  if (bytes.size() != 16) return false;
  memcpy(&hash->low, bytes.data(), 8);
  memcpy(&hash->high, bytes.data() + 8, 8);
  return true;
}

// Numbers that are 0 are left out, as protobuf does.
template <typename Field>
void AddNumber(protozero::pbf_builder<Field>* message, Field field, uint64_t number) {
  if (number != 0) message->add_uint64(field, number);
}

std::string Encode(const LogHeader& header) {
  std::string bytes;
  protozero::pbf_builder<LogField> message(bytes);
  AddNumber(&message, LogField::kImages, header.images);
  AddNumber(&message, LogField::kRecords, header.records);
  AddNumber(&message, LogField::kNextOrder, header.next_order);
  // The last one, and always as long.
  message.add_fixed64(LogField::kBytes, header.bytes);
  return bytes;
}

std::string Encode(const Hash128& hash, uint64_t image_bytes) {
  std::string bytes;
  protozero::pbf_builder<ImageField> message(bytes);
  message.add_bytes(ImageField::kHash, BytesOf(hash));
  AddNumber(&message, ImageField::kBytes, image_bytes);
  return bytes;
}

std::string Encode(const Record& record, uint64_t reply_bytes) {
  std::string bytes;
  protozero::pbf_builder<RecordField> message(bytes);
  AddNumber(&message, RecordField::kKind, uint64_t(record.object.kind));
  if (record.object.id != 0) message.add_fixed64(RecordField::kId, record.object.id);
  AddNumber(&message, RecordField::kModifies, record.modifies);
  AddNumber(&message, RecordField::kKey, record.key);
  AddNumber(&message, RecordField::kOrder, record.order);
  if (record.image) message.add_bytes(RecordField::kImage, BytesOf(*record.image));
  for (const ObjectKey& key : record.depends_on) {
    protozero::pbf_builder<DependencyField> dependency(message, RecordField::kDependencies);
    AddNumber(&dependency, DependencyField::kKind, uint64_t(key.kind));
    if (key.id != 0) dependency.add_fixed64(DependencyField::kId, key.id);
  }
  AddNumber(&message, RecordField::kCall, record.header.call);
  AddNumber(&message, RecordField::kContext, record.header.context_or_result);
  AddNumber(&message, RecordField::kMessageBytes, record.header.message_bytes);
  AddNumber(&message, RecordField::kReplyBytes, reply_bytes);
  return bytes;
}

template <typename Message, typename Field>
bool Is(const Message& message, Field field, WireType type) {
  return message.tag_and_type() == protozero::tag_and_type(field, type);
}

// Each of these is false for what Encode has not written.
bool Decode(std::string_view bytes, LogHeader* header) {
  protozero::pbf_message<LogField> message(bytes.data(), bytes.size());
  while (message.next()) {
    if (Is(message, LogField::kImages, WireType::varint)) {
      header->images = message.get_uint64();
    } else if (Is(message, LogField::kRecords, WireType::varint)) {
      header->records = message.get_uint64();
    } else if (Is(message, LogField::kNextOrder, WireType::varint)) {
      header->next_order = message.get_uint64();
    } else if (Is(message, LogField::kBytes, WireType::fixed64)) {
      header->bytes = message.get_fixed64();
    } else {
      return false;
    }
  }
  return Encode(*header) == bytes;
}

bool Decode(std::string_view bytes, Hash128* hash, uint64_t* image_bytes) {
  protozero::pbf_message<ImageField> message(bytes.data(), bytes.size());
  while (message.next()) {
    if (Is(message, ImageField::kHash, WireType::length_delimited)) {
      if (!HashFrom(message.get_view(), hash)) return false;
    } else if (Is(message, ImageField::kBytes, WireType::varint)) {
      *image_bytes = message.get_uint64();
    } else {
      return false;
    }
  }
  return Encode(*hash, *image_bytes) == bytes;
}

bool DecodeDependency(protozero::data_view bytes, ObjectKey* key) {
  protozero::pbf_message<DependencyField> message(bytes);
  uint64_t kind = 0;
  key->id = 0;
  while (message.next()) {
    if (Is(message, DependencyField::kKind, WireType::varint)) {
      kind = message.get_uint64();
    } else if (Is(message, DependencyField::kId, WireType::fixed64)) {
      key->id = message.get_fixed64();
    } else {
      return false;
    }
  }
  key->kind = Kind(kind);
  return kind != 0 && kind <= 255 && key->id != 0;
}

bool Decode(std::string_view bytes, RecordHeader* header) {
  Record& record = header->record;
  protozero::pbf_message<RecordField> message(bytes.data(), bytes.size());
  uint64_t kind = 0, modifies = 0, call = 0, context = 0, message_bytes = 0;
  while (message.next()) {
    switch (message.tag_and_type()) {
      case protozero::tag_and_type(RecordField::kKind, WireType::varint):
        kind = message.get_uint64();
        break;
      case protozero::tag_and_type(RecordField::kId, WireType::fixed64):
        record.object.id = message.get_fixed64();
        break;
      case protozero::tag_and_type(RecordField::kModifies, WireType::varint):
        modifies = message.get_uint64();
        break;
      case protozero::tag_and_type(RecordField::kKey, WireType::varint):
        record.key = message.get_uint64();
        break;
      case protozero::tag_and_type(RecordField::kOrder, WireType::varint):
        record.order = message.get_uint64();
        break;
      case protozero::tag_and_type(RecordField::kImage, WireType::length_delimited):
        record.image.emplace();
        if (!HashFrom(message.get_view(), &*record.image)) return false;
        break;
      case protozero::tag_and_type(RecordField::kDependencies, WireType::length_delimited): {
        ObjectKey key;
        if (!DecodeDependency(message.get_view(), &key)) return false;
        record.depends_on.push_back(key);
        break;
      }
      case protozero::tag_and_type(RecordField::kCall, WireType::varint):
        call = message.get_uint64();
        break;
      case protozero::tag_and_type(RecordField::kContext, WireType::varint):
        context = message.get_uint64();
        break;
      case protozero::tag_and_type(RecordField::kMessageBytes, WireType::varint):
        message_bytes = message.get_uint64();
        break;
      case protozero::tag_and_type(RecordField::kReplyBytes, WireType::varint):
        header->reply_bytes = message.get_uint64();
        break;
      default:
        return false;
    }
  }
  if (kind > 255 || modifies > 1 || call > UINT32_MAX || context > UINT32_MAX || message_bytes > UINT32_MAX)
    return false;
  record.object.kind = Kind(kind);
  record.modifies = modifies != 0;
  record.header.call = uint32_t(call);
  record.header.context_or_result = uint32_t(context);
  record.header.message_bytes = uint32_t(message_bytes);
  return Encode(record, header->reply_bytes) == bytes;
}

// A header and its length before it, from and to a multiple of 8.
void PutHeader(const std::string& header, size_t start, std::string* out) {
  Put(uint32_t(header.size()), out);
  out->append(header);
  Pad(start, out);
}

bool TakeHeader(Reader* reader, std::string_view* header) {
  uint32_t size = 0;
  return reader->Take(&size) && size <= kMaxHeader && reader->Take(size, header) && reader->TakePadding();
}

bool TakeImage(Reader* reader, Hash128* hash, uint64_t* bytes) {
  std::string_view header;
  return TakeHeader(reader, &header) && Decode(header, hash, bytes);
}

bool TakeRecord(Reader* reader, RecordHeader* header) {
  std::string_view bytes;
  return TakeHeader(reader, &bytes) && Decode(bytes, header);
}

}  // namespace

bool WriteImages(const Images& images, const std::function<bool(std::string_view)>& write) {
  for (const auto& [hash, bytes] : images) {
    std::string header, end;
    PutHeader(Encode(hash, bytes->size()), 0, &header);
    end.assign((8 - bytes->size() % 8) % 8, '\0');
    if (!write(header) || !write(*bytes) || !write(end)) return false;
  }
  return true;
}

StatusOr<Images> ParseImages(std::string_view bytes) try {
  Reader reader(bytes);
  Images parsed;
  while (!reader.done()) {
    Hash128 hash;
    uint64_t size = 0;
    std::string_view image;
    if (!TakeImage(&reader, &hash, &size) || !reader.Take(size, &image) || !reader.TakePadding() ||
        HashOf(image) != hash || !parsed.emplace(hash, std::make_shared<const std::string>(image)).second) {
      return Error("the module images are damaged at offset " + std::to_string(reader.at()));
    }
  }
  return parsed;
} catch (const protozero::exception&) {
  return Error("the module images are damaged: a header of theirs cannot be parsed");
}

void Log::Serialize(std::string* out, const std::set<Hash128>& without) const {
  const size_t start = out->size();
  const std::vector<const Record*> records = InOrder();
  Images images = AllImages();
  size_t omitted = 0;
  for (const Hash128& hash : without) {
    const auto image = images.find(hash);
    if (image == images.end()) continue;
    omitted += image->second->size();
    images.erase(image);
  }
  out->reserve(start + bytes_ - omitted + 256);
  LogHeader header;
  header.images = images.size();
  header.records = records.size();
  header.next_order = next_order_;
  out->append(kMagic, sizeof(kMagic));
  Put(kVersion, out);
  const std::string encoded = Encode(header);
  const size_t length_at = out->size() + sizeof(uint32_t) + encoded.size() - sizeof(uint64_t);
  PutHeader(encoded, start, out);
  for (const auto& [hash, bytes] : images) {
    PutHeader(Encode(hash, bytes->size()), start, out);
    out->append(*bytes);
    Pad(start, out);
  }
  for (const Record* record : records) {
    PutHeader(Encode(*record, record->reply.size()), start, out);
    out->append(record->message);
    Pad(start, out);
    out->append(record->reply);
    Pad(start, out);
  }
  const uint64_t total = out->size() - start + sizeof(Hash128);
  memcpy(&(*out)[length_at], &total, sizeof(total));
  Put(HashOf(std::string_view(*out).substr(start)), out);
}

StatusOr<Log> Log::Parse(std::string_view bytes, const Images& others) try {
  size_t at = 0;
  const auto fail = [&](const char* what) {
    return Error("the replay log is damaged at offset " + std::to_string(at) + ": " + what);
  };
  if (bytes.size() < sizeof(Hash128)) return fail("too short");
  const std::string_view body = bytes.substr(0, bytes.size() - sizeof(Hash128));
  Reader reader(body);
  char magic[sizeof(kMagic)];
  uint32_t version = 0;
  if (!reader.Take(&magic) || !reader.Take(&version)) return fail("too short");
  if (memcmp(magic, kMagic, sizeof(kMagic)) != 0) return fail("this is no replay log");
  if (version != kVersion) {
    return Error("the replay log has format version " + std::to_string(version) + "; this program reads version " +
                 std::to_string(kVersion) +
                 (version > kVersion ? "; use a newer cuda-remote" : ", which is cuda-remote 0.9.0's"));
  }
  Hash128 expected;
  memcpy(&expected, bytes.data() + body.size(), sizeof(expected));
  if (HashOf(body) != expected) return fail("its checksum is wrong");
  LogHeader header;
  std::string_view encoded;
  if (!TakeHeader(&reader, &encoded) || !Decode(encoded, &header)) return fail("its header");
  if (header.bytes != bytes.size()) return fail("its size is not what its header says (truncated?)");

  Log parsed;
  for (uint64_t i = 0; i < header.images; ++i) {
    at = reader.at();
    Hash128 hash;
    uint64_t image_bytes = 0;
    std::string_view image;
    if (!TakeImage(&reader, &hash, &image_bytes) || !reader.Take(image_bytes, &image) || !reader.TakePadding()) {
      return fail("a module image");
    }
    if (HashOf(image) != hash) return fail("a module image's checksum");
    const auto [place, is_new] = parsed.images_.try_emplace(hash);
    if (!is_new) return fail("the same module image again");
    place->second.bytes = std::make_shared<const std::string>(image);
    parsed.bytes_ += image.size();
  }
  uint64_t last_order = 0;
  for (uint64_t i = 0; i < header.records; ++i) {
    at = reader.at();
    RecordHeader read;
    if (!TakeRecord(&reader, &read)) return fail("a record's header");
    Record& record = read.record;
    if (uint8_t(record.object.kind) == 0 || record.object.id == 0) return fail("a record's header");
    if (record.order <= last_order || record.order >= header.next_order) return fail("a record is out of order");
    last_order = record.order;
    std::set<std::pair<uint8_t, uint64_t>> distinct;
    for (const ObjectKey& key : record.depends_on) {
      if (key == record.object) return fail("a record depends on itself");
      if (!distinct.insert({uint8_t(key.kind), key.id}).second) return fail("a record has a dependency twice");
    }
    std::string_view message, reply;
    const FrameHeader& frame = record.header;
    if (frame.message_bytes > kMaxMessageBytes || frame.payload_bytes != 0 || frame.flags != 0 || frame.sequence != 0 ||
        frame.aux != 0 || frame.call == 0) {
      return fail("a record's frame");
    }
    if (!reader.Take(frame.message_bytes, &message) || !reader.TakePadding()) return fail("a record's message");
    if (read.reply_bytes > kMaxMessageBytes || !reader.Take(read.reply_bytes, &reply) || !reader.TakePadding()) {
      return fail("a record's reply");
    }
    record.message = message;
    record.reply = reply;
    if (record.image && parsed.images_.count(*record.image) == 0) {
      const auto other = others.find(*record.image);
      if (other == others.end()) return fail("a record's module image is missing");
      parsed.images_[*record.image].bytes = other->second;
      parsed.bytes_ += other->second->size();
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
  return parsed;
} catch (const protozero::exception&) {
  return Error("the replay log is damaged: a header in it cannot be parsed");
}

}  // namespace cuda_remote::replay
