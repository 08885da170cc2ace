// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/page_receiver.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <protozero/pbf_writer.hpp>
#include <utility>

#include "checkpoint/engine/criu/pages_socket.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"
#include "proto/machine/machine_memory.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::checkpoint {
namespace {

// Of criu/page-xfer.c.
enum Command : uint32_t { kOpen = 4, kAdd = 6, kClose = 0x1023, kForceClose = 0x1024 };
constexpr uint32_t kCommandBits = 16, kTargetBits = 8;
enum Target : uint64_t { kProcess = 1, kSharedMemory = 2 };
constexpr size_t kNarrowBytes = 24, kWideBytes = 32;
// Of criu/include/pagemap.h.
constexpr uint32_t kPresent = 1 << 2;
// A pagemap image (images/pagemap.proto): two magic numbers, then messages with their lengths.
constexpr uint32_t kCommonMagic = 0x54564319, kPagemapMagic = 0x56084025;
enum HeadField : protozero::pbf_tag_type { kPagesId = 1 };
enum EntryField : protozero::pbf_tag_type { kAddress = 1, kPages32 = 2, kFlags = 4, kPages64 = 5 };

constexpr uint64_t kPageBytes = 4096, kHugeBytes = uint64_t{2} << 20;
constexpr uint64_t kMostPages = uint64_t{1} << 36;   // of one message: the address space
constexpr uint64_t kWriteBytes = uint64_t{8} << 20;  // at a time
constexpr uint64_t kPartBytes = uint64_t{1} << 20;   // that one thread copies
constexpr int kSocketBytes = 8 << 20;

uint64_t BufferBytes(uint64_t bytes, uint64_t most_bytes) {
  const uint64_t most = std::min({PageReceiver::BytesFor(bytes), most_bytes, AvailableMemory() / 4});
  return std::max(kHugeBytes, (most + kHugeBytes - 1) / kHugeBytes * kHugeBytes);
}

// How many bytes at `data`, which is the begin of a page, are pages of zeros, or are none.
size_t Alike(const char* data, size_t bytes, bool* zeros) {
  const auto is_zero = [&](size_t at) {
    const size_t page = std::min<size_t>(kPageBytes, bytes - at);
    return data[at] == 0 && memcmp(data + at, data + at + 1, page - 1) == 0;
  };
  *zeros = is_zero(0);
  size_t end = 0;
  do end = std::min<size_t>(end + kPageBytes, bytes);
  while (end < bytes && is_zero(end) == *zeros);
  return end;
}

void AppendWord(uint32_t word, std::string* to) { to->append(reinterpret_cast<const char*>(&word), sizeof(word)); }

void AppendMessage(const std::string& message, std::string* to) {
  AppendWord(uint32_t(message.size()), to);
  *to += message;
}

template <typename T>
T Load(const char* from) {
  T value;
  memcpy(&value, from, sizeof(value));
  return value;
}

}  // namespace

// An open file, which is closed when nobody needs it any more.
class PageReceiver::File {
 public:
  File(std::string name, int fd) : name_(std::move(name)), fd_(fd) {}

  // Whole pages. Those of zeros are left out.
  absl::Status WritePages(const char* data, size_t bytes) {
    while (bytes > 0) {
      bool zeros = false;
      const size_t alike = Alike(data, bytes, &zeros);
      CR_RETURN_IF_ERROR(zeros ? Skip(alike) : Write(data, alike));
      data += alike;
      bytes -= alike;
    }
    return absl::OkStatus();
  }
  absl::Status Write(const char* data, size_t bytes) const {
    while (bytes > 0) {
      const ssize_t done = write(fd_.get(), data, bytes);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return ErrnoStatus("cannot write " + name_);
      data += done;
      bytes -= size_t(done);
    }
    return absl::OkStatus();
  }

 private:
  // A hole, also at the end of the file.
  absl::Status Skip(size_t bytes) const {
    const off_t end = lseek(fd_.get(), off_t(bytes), SEEK_CUR);
    return end >= 0 && ftruncate(fd_.get(), end) == 0 ? absl::OkStatus() : ErrnoStatus("cannot write " + name_);
  }

  const std::string name_;
  const UniqueFd fd_;
};

PageReceiver::PageReceiver(uint64_t bytes, uint64_t most_bytes)
    : size_(BufferBytes(bytes, most_bytes)), write_at_(bytes <= size_ ? size_ - size_ / 16 : size_ / 4) {
  void* const memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;
  buffer_ = static_cast<char*>(memory);
  madvise(buffer_, size_, MADV_HUGEPAGE);
  // CRIU is started by a fork, after which each page would have to be taken anew.
  madvise(buffer_, size_, MADV_DONTFORK);
  // Not while the processes stand still.
  for (uint64_t at = 0; at < size_; at += kPageBytes) buffer_[at] = 1;
}

PageReceiver::~PageReceiver() {
  if (socket_.ok()) shutdown(socket_.get(), SHUT_RDWR);
  {
    MutexLock lock(&mutex_);
    error_.Update(absl::CancelledError("it was cancelled"));
  }
  changed_.NotifyAll();
  if (receiver_.joinable()) receiver_.join();
  if (writer_.joinable()) writer_.join();
  if (buffer_) munmap(buffer_, size_);
}

absl::StatusOr<UniqueFd> PageReceiver::Begin(int folder, ReadMemory read) {
  int ends[2];
  read_ = std::move(read);
  if (buffer_) folder_.Reset(fcntl(folder, F_DUPFD_CLOEXEC, 3));
  if (!folder_.ok() || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoStatus("cannot receive the memory of processes", buffer_ ? errno : ENOMEM);
  }
  // So that CRIU need not wait for each copy. With less the same comes to pass, later.
  setsockopt(ends[1], SOL_SOCKET, SO_SNDBUFFORCE, &kSocketBytes, sizeof(kSocketBytes));
  socket_.Reset(ends[0]);
  UniqueFd criu_end(ends[1]);
  receiver_ = StartThread([this] { Receive(); });
  if (receiver_.joinable()) writer_ = StartThread([this] { Write(); });
  if (!writer_.joinable()) return ErrnoStatus("cannot start a thread to receive the memory of processes", EAGAIN);
  return criu_end;
}

absl::Status PageReceiver::Received() {
  receiver_.join();
  MutexLock lock(&mutex_);
  return complete_ ? absl::OkStatus() : error_.ok() ? absl::UnavailableError("") : error_;
}

absl::Status PageReceiver::Finish() {
  writer_.join();
  MutexLock lock(&mutex_);
  return complete_ || !error_.ok() ? error_ : absl::UnavailableError("");
}

bool PageReceiver::Fail(const absl::Status& error) {
  MutexLock lock(&mutex_);
  error_.Update(error);
  changed_.NotifyAll();
  return false;
}

void PageReceiver::Receive() {
  const bool all = ReceiveAll();
  MutexLock lock(&mutex_);
  over_ = true;
  if (all && error_.ok()) {
    // The processes go on when CRIU has this.
    const int32_t done = 0;
    complete_ = send(socket_.get(), &done, sizeof(done), MSG_NOSIGNAL) == sizeof(done);
  }
  if (!complete_) shutdown(socket_.get(), SHUT_RDWR);
  changed_.NotifyAll();
}

bool PageReceiver::ReceiveAll() {
  SocketCopier copier(socket_.get(), /*fetches=*/read_ != nullptr);
  for (Message message; ReadMessage(&message);) {
    switch (message.command) {
      case kOpen: {
        const char has_parent = 0;
        if (!CloseImage(&copier) || !OpenImage(message.target)) return false;
        if (send(socket_.get(), &has_parent, 1, MSG_NOSIGNAL) != 1) return false;
        break;
      }
      case kAdd:
        if (!AddHidden(message.address, &copier) || !AddPages(message, &copier)) return false;
        break;
      case kHidden:
        if (!read_ || message.process == 0) return Fail(absl::UnimplementedError("CRIU hides memory by itself"));
        if (message.pages == 0 || hidden_.size() >= kMostHidden ||
            (!hidden_.empty() && message.address < hidden_.back().address)) {
          return Fail(absl::DataLossError("CRIU hides memory in another way than it should"));
        }
        hidden_.push_back(message);
        break;
      case kClose:
      case kForceClose:
        return CloseImage(&copier) && copier.Finish();
      default:
        return Fail(
            absl::UnimplementedError("CRIU sends an unknown command (" + std::to_string(message.command) + ")"));
    }
  }
  return false;
}

bool PageReceiver::ReadMessage(Message* message) {
  char bytes[kWideBytes];
  const auto read = [&](size_t from, size_t to) {
    while (from < to) {
      const ssize_t got = recv(socket_.get(), bytes + from, to - from, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      from += size_t(got);
    }
    return true;
  };
  if (!read(0, kNarrowBytes)) return false;
  if (!layout_known_) {
    // The first message names a target and has neither pages nor an address.
    wide_ = Load<uint64_t>(bytes + 16) == 0;
    layout_known_ = true;
  }
  static_assert(sizeof(HiddenPages) == kNarrowBytes);
  if (const auto hidden = Load<HiddenPages>(bytes); hidden.command == kHidden) {
    *message = {kHidden, kPresent, hidden.pages, hidden.address, 0, hidden.process};
    return true;
  }
  if (wide_ && !read(kNarrowBytes, kWideBytes)) return false;
  const uint32_t word = Load<uint32_t>(bytes);
  message->command = word & ((1u << kCommandBits) - 1);
  message->flags = word >> kCommandBits;
  message->pages = wide_ ? Load<uint64_t>(bytes + 8) : Load<uint32_t>(bytes + 4);
  message->address = Load<uint64_t>(bytes + (wide_ ? 16 : 8));
  message->target = Load<uint64_t>(bytes + (wide_ ? 24 : 16));
  return true;
}

std::shared_ptr<PageReceiver::File> PageReceiver::Create(const std::string& name) {
  const int file = openat(folder_.get(), name.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file >= 0) return std::make_shared<File>(name, file);
  Fail(ErrnoStatus("cannot create " + name));
  return nullptr;
}

bool PageReceiver::OpenImage(uint64_t target) {
  const uint64_t kind = target & ((1u << kTargetBits) - 1);
  const std::string id = std::to_string(target >> kTargetBits);
  if (kind != kProcess && kind != kSharedMemory)
    return Fail(absl::UnimplementedError("CRIU sends unknown memory (" + std::to_string(kind) + ")"));
  map_ = Create((kind == kProcess ? "pagemap-" : "pagemap-shmem-") + id + ".img");
  pages_ = Create("pages-" + std::to_string(++images_) + ".img");
  if (!map_ || !pages_) return false;
  AppendWord(kCommonMagic, &entries_);
  AppendWord(kPagemapMagic, &entries_);
  std::string head;
  protozero::pbf_writer(head).add_uint32(kPagesId, images_);
  AppendMessage(head, &entries_);
  return true;
}

bool PageReceiver::WriteMap() {
  const absl::Status status = map_->Write(entries_.data(), entries_.size());
  entries_.clear();
  return status.ok() || Fail(status);
}

bool PageReceiver::AddHidden(uint64_t end, SocketCopier* copier) {
  for (; !hidden_.empty() && hidden_.front().address < end; hidden_.pop_front()) {
    if (!AddPages(hidden_.front(), copier)) return false;
    hidden_bytes_ += hidden_.front().pages * kPageBytes;
  }
  return true;
}

bool PageReceiver::CloseImage(SocketCopier* copier) {
  if (!AddHidden(UINT64_MAX, copier)) return false;
  if (!map_) return true;
  const bool ok = WriteMap();
  map_ = pages_ = nullptr;
  return ok;
}

bool PageReceiver::AddPages(const Message& message, SocketCopier* copier) {
  if (!pages_ || message.pages > kMostPages)
    return Fail(absl::DataLossError("CRIU sent pages that belong to no image"));
  std::string entry;
  protozero::pbf_writer writer(entry);
  writer.add_uint64(kAddress, message.address);
  writer.add_uint32(kPages32, wide_ ? 0 : uint32_t(message.pages));
  writer.add_uint32(kFlags, message.flags);
  if (wide_) writer.add_uint64(kPages64, message.pages);
  AppendMessage(entry, &entries_);
  if (entries_.size() > kWriteBytes && !WriteMap()) return false;
  if (!(message.flags & kPresent)) return true;
  uint64_t address = message.address;
  for (uint64_t left = message.pages * kPageBytes; left > 0;) {
    uint64_t room;
    {
      MutexLock lock(&mutex_);
      while (taken_ - written_ >= size_ && error_.ok()) changed_.Wait(&mutex_);
      if (!error_.ok()) return false;
      room = size_ - (taken_ - written_);
    }
    const uint64_t at = taken_ % size_;
    const uint64_t bytes = std::min({left, room, size_ - at, kPartBytes});
    const auto done = [this, file = pages_, bytes] {
      MutexLock lock(&mutex_);
      received_ += bytes;
      if (pieces_.empty() || pieces_.back().file != file) {
        pieces_.push_back({file, bytes});
      } else {
        pieces_.back().bytes += bytes;
      }
      if (received_ - written_ > write_at_) changed_.NotifyAll();
    };
    const auto fetch = [this, process = message.process, address, to = buffer_ + at, bytes] {
      const absl::Status status = read_(process, address, to, bytes);
      return status.ok() || Fail(status);
    };
    const bool begun = message.command == kHidden ? copier->Fetch(buffer_ + at, bytes, fetch, done)
                                                  : copier->Copy(buffer_ + at, bytes, done);
    if (!begun) return false;
    taken_ += bytes;
    address += bytes;
    left -= bytes;
  }
  return true;
}

void PageReceiver::Write() {
  MutexLock lock(&mutex_);
  while (true) {
    while (!over_ && error_.ok() && received_ - written_ <= write_at_) changed_.Wait(&mutex_);
    if (!error_.ok() || (over_ && !complete_) || pieces_.empty()) break;
    const Piece piece = pieces_.front();
    const uint64_t at = written_ % size_;
    const uint64_t bytes = std::min({piece.bytes, kWriteBytes, size_ - at});
    lock.Unlock();
    const absl::Status written = piece.file->WritePages(buffer_ + at, bytes);
    lock.Lock();
    error_.Update(written);
    written_ += bytes;
    if ((pieces_.front().bytes -= bytes) == 0) pieces_.pop_front();
    changed_.NotifyAll();
  }
}

}  // namespace cuda_remote::checkpoint
