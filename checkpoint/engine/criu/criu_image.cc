// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/criu_image.h"

#include <string.h>
#include <sys/timerfd.h>

#include <fstream>
#include <map>
#include <protozero/pbf_writer.hpp>
#include <utility>

#include "proto/base/read_file.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

// CRIU's images: two magic numbers, then entries of a length and a message each.
constexpr uint32_t kCommonMagic = 0x54564319, kFilesMagic = 0x56303138, kStreamMagic = 0x51465506,
                   kTerminalMagic = 0x59453036, kLinksMagic = 0x59133954, kCoreMagic = 0x55053847,
                   kDescriptorsMagic = 0x56213732, kTablesMagic = 0x54432030, kQueuesMagic = 0x56264026;
// CRIU's states of a process (TASK_ALIVE, TASK_STOPPED).
constexpr char kTaskAlive = 1, kTaskStopped = 3;

uint32_t Word(std::string_view bytes, size_t at) {
  uint32_t word;
  memcpy(&word, bytes.data() + at, sizeof(word));
  return word;
}

// Of a RegFileEntry (images/regfile.proto).
constexpr protozero::pbf_tag_type kPositionField = 3, kNameField = 6, kSizeField = 8, kModeField = 10;

// The field of a FileEntry (images/fdinfo.proto) that a file of this kind is in.
protozero::pbf_tag_type FieldOf(FileKind kind) {
  switch (kind) {
    case FileKind::kRegular:
      return 3;
    case FileKind::kInternetSocket:
      return 4;
    case FileKind::kUnixSocket:
      return 16;
    case FileKind::kNetlinkSocket:
      return 7;
    case FileKind::kTimer:
      return 12;
  }
  return 0;
}

// Copies a field as it is.
void CopyField(protozero::pbf_reader* from, protozero::pbf_writer* to) {
  const protozero::pbf_tag_type tag = from->tag();
  switch (from->wire_type()) {
    case protozero::pbf_wire_type::varint:
      to->add_uint64(tag, from->get_uint64());
      break;
    case protozero::pbf_wire_type::fixed64:
      to->add_fixed64(tag, from->get_fixed64());
      break;
    case protozero::pbf_wire_type::fixed32:
      to->add_fixed32(tag, from->get_fixed32());
      break;
    default:
      to->add_bytes(tag, from->get_view());
  }
}

// The RegFileEntry as `change` wants it.
std::string ChangedEntry(protozero::data_view entry,
                         const std::function<bool(std::string_view path, FileChange* change)>& change) {
  FileChange wanted;
  bool changed = false;
  for (protozero::pbf_reader look(entry); look.next(kNameField);) {
    const protozero::data_view name = look.get_view();
    changed = change(std::string_view(name.data(), name.size()), &wanted);
  }
  if (!changed) return std::string(entry.data(), entry.size());
  std::string out;
  protozero::pbf_writer writer(out);
  for (protozero::pbf_reader field(entry); field.next();) {
    const protozero::pbf_tag_type tag = field.tag();
    if (tag == kNameField && !wanted.path.empty()) {
      field.skip();
      writer.add_string(kNameField, wanted.path);
    } else if (tag == kPositionField && wanted.other) {
      field.skip();
      writer.add_uint64(kPositionField, wanted.position);
    } else if (tag == kModeField && wanted.mode != 0) {
      field.skip();
      writer.add_uint32(kModeField, wanted.mode);
    } else if ((tag == kSizeField || tag == kModeField) && wanted.other) {
      field.skip();
    } else {
      CopyField(&field, &writer);
    }
  }
  return out;
}

}  // namespace

bool ReadEntries(std::string_view image, uint32_t magic, const std::function<void(protozero::pbf_reader)>& use) {
  if (image.size() < 8 || Word(image, 0) != kCommonMagic || Word(image, 4) != magic) return false;
  try {
    for (size_t at = 8; at < image.size();) {
      if (image.size() - at < 4) return false;
      const uint32_t bytes = Word(image, at);
      at += 4;
      if (bytes > image.size() - at) return false;
      use(protozero::pbf_reader(image.data() + at, bytes));
      at += bytes;
    }
  } catch (const protozero::exception&) {
    return false;
  }
  return true;
}

std::vector<uint64_t> NumbersIn(protozero::pbf_reader* field) {
  if (field->wire_type() == protozero::pbf_wire_type::varint) return {field->get_uint64()};
  if (field->wire_type() != protozero::pbf_wire_type::length_delimited)
    throw protozero::unknown_pbf_wire_type_exception();
  const auto packed = field->get_packed_uint64();
  return {packed.begin(), packed.end()};
}

bool ReadImageFile(const std::string& path, std::string* bytes) { return ReadWholeFile(path, bytes); }

absl::Status WriteImageFile(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (out.write(bytes.data(), std::streamsize(bytes.size())).flush()) return absl::OkStatus();
  return ErrnoStatus("cannot write " + path);
}

bool ReadFilesImage(std::string_view image, FileKind kind, const std::function<void(protozero::pbf_reader)>& entry) {
  return ReadEntries(image, kFilesMagic, [&](protozero::pbf_reader file) {
    bool of_this_kind = false;
    while (file.next()) {
      if (file.tag() == 1 && file.wire_type() == protozero::pbf_wire_type::varint) {
        of_this_kind = uint32_t(file.get_enum()) == uint32_t(kind);
      } else if (of_this_kind && file.tag() == FieldOf(kind) &&
                 file.wire_type() == protozero::pbf_wire_type::length_delimited) {
        entry(file.get_message());
      } else {
        file.skip();
      }
    }
  });
}

bool ReadStreamImage(std::string_view image, const std::function<void(protozero::pbf_reader)>& entry) {
  // The data follows the entry.
  if (image.size() < 12 || Word(image, 0) != kCommonMagic || Word(image, 4) != kStreamMagic) return false;
  const uint32_t bytes = Word(image, 8);
  if (bytes > image.size() - 12) return false;
  try {
    entry(protozero::pbf_reader(image.data() + 12, bytes));
  } catch (const protozero::exception&) {
    return false;
  }
  return true;
}

namespace {

// Of a RemapFilePathEntry (images/remap-file-path.proto): its type.
constexpr uint32_t kLinked = 0, kGhost = 1;

bool ReadRemaps(std::string_view image,
                const std::function<void(uint32_t file, uint32_t other, uint32_t type)>& entry) {
  return ReadEntries(image, kLinksMagic, [&](protozero::pbf_reader fields) {
    uint32_t file = 0, link = 0, type = kLinked;
    while (fields.next()) {
      if (fields.wire_type() != protozero::pbf_wire_type::varint) {
        fields.skip();
      } else if (fields.tag() == 1) {
        file = fields.get_uint32();
      } else if (fields.tag() == 2) {
        link = fields.get_uint32();
      } else if (fields.tag() == 3) {
        type = fields.get_uint32();
      } else {
        fields.skip();
      }
    }
    entry(file, link, type);
  });
}

bool ReadRemapsOf(uint32_t wanted, std::string_view image,
                  const std::function<void(uint32_t file, uint32_t other)>& entry) {
  return ReadRemaps(image, [&](uint32_t file, uint32_t other, uint32_t type) {
    if (type == wanted) entry(file, other);
  });
}

}  // namespace

bool ReadLinks(std::string_view image, const std::function<void(uint32_t file, uint32_t link)>& entry) {
  return ReadRemapsOf(kLinked, image, entry);
}

bool ReadGhosts(std::string_view image, const std::function<void(uint32_t file, uint32_t ghost)>& entry) {
  return ReadRemapsOf(kGhost, image, entry);
}

bool ReadNameless(std::string_view image, const std::function<void(uint32_t file)>& entry) {
  return ReadRemaps(image, [&](uint32_t file, uint32_t, uint32_t) { entry(file); });
}

bool ReadDescriptors(std::string_view image, std::map<int, uint32_t>* files) {
  // An FdinfoEntry (images/fdinfo.proto): the file's number, flags, type, and descriptor.
  return ReadEntries(image, kDescriptorsMagic, [&](protozero::pbf_reader fields) {
    uint32_t file = 0;
    int descriptor = -1;
    while (fields.next()) {
      if (fields.wire_type() == protozero::pbf_wire_type::varint && fields.tag() == 1) {
        file = fields.get_uint32();
      } else if (fields.wire_type() == protozero::pbf_wire_type::varint && fields.tag() == 4) {
        descriptor = int(fields.get_uint32());
      } else {
        fields.skip();
      }
    }
    (*files)[descriptor] = file;
  });
}

bool ReadDescriptorTable(std::string_view image, uint32_t* table) {
  // A TaskKobjIdsEntry (images/core.proto).
  bool found = false;
  const bool read = ReadEntries(image, kTablesMagic, [&](protozero::pbf_reader fields) {
    while (fields.next(2, protozero::pbf_wire_type::varint)) {
      *table = fields.get_uint32();
      found = true;
    }
  });
  return read && found;
}

namespace {

// Calls `use` with each SkPacketEntry (images/sk-packet.proto) of sk-queues.img, and the message's contents behind it.
bool ForEachMessage(std::string_view image,
                    const std::function<void(protozero::data_view entry, std::string_view contents)>& use) {
  if (image.size() < 8 || Word(image, 0) != kCommonMagic || Word(image, 4) != kQueuesMagic) return false;
  try {
    for (size_t at = 8; at < image.size();) {
      if (image.size() - at < 4) return false;
      const size_t bytes = Word(image, at);
      if (bytes > image.size() - at - 4) return false;
      const protozero::data_view entry(image.data() + at + 4, bytes);
      at += 4 + bytes;
      uint32_t length = 0;
      for (protozero::pbf_reader field(entry); field.next(2, protozero::pbf_wire_type::varint);)
        length = field.get_uint32();
      if (length > image.size() - at) return false;
      use(entry, image.substr(at, length));
      at += length;
    }
  } catch (const protozero::exception&) {
    return false;
  }
  return true;
}

}  // namespace

bool ReadMessages(std::string_view image,
                  const std::function<void(uint32_t socket, const std::vector<uint64_t>& files)>& entry) {
  return ForEachMessage(image, [&](protozero::data_view message, std::string_view) {
    uint32_t socket = 0;
    std::vector<uint64_t> files;
    for (protozero::pbf_reader field(message); field.next();) {
      if (field.tag() == 1 && field.wire_type() == protozero::pbf_wire_type::varint) {
        socket = field.get_uint32();
      } else if (field.tag() == 4 && field.wire_type() == protozero::pbf_wire_type::length_delimited) {
        for (protozero::pbf_reader rights = field.get_message(); rights.next();) {
          if (rights.tag() != 2) {
            rights.skip();
            continue;
          }
          const std::vector<uint64_t> some = NumbersIn(&rights);
          files.insert(files.end(), some.begin(), some.end());
        }
      } else {
        field.skip();
      }
    }
    entry(socket, files);
  });
}

bool EmptyMessages(std::string* image, std::string_view mark) {
  std::string out = image->substr(0, 8);
  const bool read = ForEachMessage(*image, [&](protozero::data_view entry, std::string_view contents) {
    const bool empty = contents == mark;
    if (empty) contents = {};
    std::string changed;
    protozero::pbf_writer writer(changed);
    for (protozero::pbf_reader field(entry); field.next();) {
      if (empty && field.tag() == 2) {
        field.skip();
        writer.add_uint32(2, 0);
      } else {
        CopyField(&field, &writer);
      }
    }
    const auto size = uint32_t(changed.size());
    out.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(changed).append(contents);
  });
  if (read) *image = std::move(out);
  return read;
}

bool ChangeFiles(std::string* image, const std::function<bool(std::string_view path, FileChange* change)>& change) {
  std::string out = image->substr(0, 8);
  const bool read = ReadEntries(*image, kFilesMagic, [&](protozero::pbf_reader file) {
    std::string entry;
    protozero::pbf_writer writer(entry);
    while (file.next()) {
      if (file.tag() == FieldOf(FileKind::kRegular) && file.wire_type() == protozero::pbf_wire_type::length_delimited) {
        writer.add_message(FieldOf(FileKind::kRegular), ChangedEntry(file.get_view(), change));
      } else {
        CopyField(&file, &writer);
      }
    }
    const auto length = uint32_t(entry.size());
    out.append(reinterpret_cast<const char*>(&length), sizeof(length));
    out += entry;
  });
  if (read) *image = std::move(out);
  return read;
}

bool LetGoOfTerminals(std::string* image) {
  using protozero::pbf_wire_type;
  using protozero::tag_and_type;
  // A TtyInfoEntry (CRIU's images/tty.proto): session and group.
  return ReadEntries(*image, kTerminalMagic, [&](protozero::pbf_reader entry) {
    while (entry.next()) {
      const bool own = entry.tag_and_type() == tag_and_type(6, pbf_wire_type::varint) ||
                       entry.tag_and_type() == tag_and_type(7, pbf_wire_type::varint);
      const size_t begin = size_t(entry.data().data() - image->data());
      entry.skip();
      const size_t end = size_t(entry.data().data() - image->data());
      // A zero of the same length.
      for (size_t i = begin; own && i < end; ++i) (*image)[i] = i + 1 < end ? '\x80' : '\0';
    }
  });
}

bool LetRun(std::string* image) {
  using protozero::pbf_wire_type;
  using protozero::tag_and_type;
  // Of a CoreEntry (CRIU's images/core.proto) its TaskCoreEntry, and of that the state, a number of one byte.
  return ReadEntries(*image, kCoreMagic, [&](protozero::pbf_reader core) {
    while (core.next()) {
      if (core.tag_and_type() != tag_and_type(3, pbf_wire_type::length_delimited)) {
        core.skip();
        continue;
      }
      protozero::pbf_reader task = core.get_message();
      while (task.next()) {
        const bool is_state = task.tag_and_type() == tag_and_type(1, pbf_wire_type::varint);
        const size_t at = size_t(task.data().data() - image->data());
        task.skip();
        if (is_state && (*image)[at] == kTaskStopped) (*image)[at] = kTaskAlive;
      }
    }
  });
}

namespace {

// A message whose fields may be changed where they lie in the image.
class Fields {
 public:
  Fields(protozero::pbf_reader message, std::string* image) : image_(*image) {
    while (message.next()) {
      const protozero::pbf_tag_type tag = message.tag();
      const auto here = [&] { return size_t(message.data().data() - image->data()); };
      const bool is_number = message.wire_type() == protozero::pbf_wire_type::varint;
      const bool is_message = message.wire_type() == protozero::pbf_wire_type::length_delimited;
      const size_t at = here();
      if (is_number) {
        numbers_[tag] = {at, message.get_uint64()};
      } else if (is_message) {
        messages_[tag] = message.get_view();
      } else {
        message.skip();
      }
    }
  }
  // 0 if there is none.
  uint64_t Number(protozero::pbf_tag_type tag) const {
    const auto found = numbers_.find(tag);
    return found == numbers_.end() ? 0 : found->second.second;
  }
  // Both numbers are below 128, so they take one byte.
  void Change(protozero::pbf_tag_type tag, char to) {
    const auto found = numbers_.find(tag);
    if (found != numbers_.end() && found->second.second < 128) image_[found->second.first] = to;
  }
  // Empty if there is none.
  protozero::pbf_reader Message(protozero::pbf_tag_type tag) const {
    const auto found = messages_.find(tag);
    return found == messages_.end() ? protozero::pbf_reader() : protozero::pbf_reader(found->second);
  }

 private:
  std::string& image_;
  std::map<protozero::pbf_tag_type, std::pair<size_t, uint64_t>> numbers_;  // where each lies, and its value
  std::map<protozero::pbf_tag_type, protozero::data_view> messages_;
};

}  // namespace

bool KeepTimersOn(std::string* image) {
  // Of a FileEntry (images/fdinfo.proto) its TimerfdEntry (images/timerfd.proto).
  constexpr protozero::pbf_tag_type kTimer = 12, kFlags = 6, kSeconds = 7, kNanoseconds = 8, kPeriodSeconds = 9,
                                    kPeriodNanoseconds = 10;
  return ReadEntries(*image, kFilesMagic, [&](protozero::pbf_reader file) {
    Fields timer(Fields(file, image).Message(kTimer), image);
    const bool is_periodic = timer.Number(kPeriodSeconds) != 0 || timer.Number(kPeriodNanoseconds) != 0;
    const bool has_run_out = timer.Number(kSeconds) == 0 && timer.Number(kNanoseconds) == 0;
    if (is_periodic && has_run_out) timer.Change(kNanoseconds, 1);
    // One that also ends when the clock is set must be absolute.
    if (timer.Number(kFlags) == TFD_TIMER_ABSTIME) timer.Change(kFlags, 0);
  });
}

bool KeepAlarmOn(std::string* image) {
  // Of a CoreEntry (images/core.proto) its TaskCoreEntry, of that its timers, and of those an ItimerEntry
  // (images/timer.proto).
  constexpr protozero::pbf_tag_type kTask = 3, kTimers = 7, kReal = 1, kPeriodSeconds = 1, kPeriodMicroseconds = 2,
                                    kSeconds = 3, kMicroseconds = 4;
  return ReadEntries(*image, kCoreMagic, [&](protozero::pbf_reader core) {
    const Fields timers(Fields(Fields(core, image).Message(kTask), image).Message(kTimers), image);
    Fields real(timers.Message(kReal), image);
    const bool is_periodic = real.Number(kPeriodSeconds) != 0 || real.Number(kPeriodMicroseconds) != 0;
    const bool has_run_out = real.Number(kSeconds) == 0 && real.Number(kMicroseconds) == 0;
    if (is_periodic && has_run_out) real.Change(kMicroseconds, 1);
  });
}

}  // namespace cuda_remote::checkpoint
