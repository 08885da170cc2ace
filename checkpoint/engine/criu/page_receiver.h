// SPDX-License-Identifier: Apache-2.0
// Takes the memory of a job's processes from a CRIU that saves them, and writes it to files while they run on.
//
// CRIU copies memory by itself at the speed of the file system, page by page, and the processes stand still meanwhile.
// With a page server (`--page-server --ps-socket`) it sends references to their pages through a socket. This end copies
// them into a buffer that was filled beforehand, with several threads, and writes the files that CRIU would have
// written: pagemap-ID.img, pagemap-shmem-ID.img and pages-N.img. What does not fit into the buffer is written at once.
// Pages of zeros are holes in the files.
//
// What is most of it need not go through CRIU, whose one thread takes 0.1 s for a GB: the library in CRIU
// (criu_preload.cc) hides it from CRIU and says where it is (kHidden, pages_socket.h), and the threads of this end read
// it out of the processes.
//
// The protocol is that of criu/page-xfer.c, in the layouts of CRIU 3.17 to 4.1 and of 4.2. CRIU waits for an answer
// before it lets the processes go, so all pages have been copied by then. If this end is closed before, CRIU fails and
// the processes run on. CRIU may have a user's rights: any input is safe.
//
// For one thread; threads of its own receive and write.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PAGE_RECEIVER_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PAGE_RECEIVER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/criu/socket_copier.h"
#include "proto/base/unique_fd.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {

class PageReceiver {
 public:
  // `bytes`: how much memory the processes have, as far as is known. The buffer has BytesFor(bytes), but not more than
  // `most_bytes` or a quarter of what the machine has left. It takes its memory now.
  explicit PageReceiver(uint64_t bytes, uint64_t most_bytes = kUsualBytes);
  // Ends what Begin has begun.
  ~PageReceiver();
  PageReceiver(const PageReceiver&) = delete;
  PageReceiver& operator=(const PageReceiver&) = delete;

  // Reads `bytes` at `address` of the process that is `process` for CRIU. Called by several threads.
  using ReadMemory = std::function<absl::Status(int process, uint64_t address, char* to, size_t bytes)>;
  // Begins to receive into the open folder `folder`. Gives CRIU's end of the socket, to be closed at the latest when
  // CRIU has ended. Null `read`: hidden memory is an error. Once only.
  absl::StatusOr<UniqueFd> Begin(int folder, ReadMemory read = nullptr);
  // After CRIU has ended and its end is closed: waits for what it has sent. Fails if that is not all of a dump, or if a
  // file cannot be written; without a message if the reason is that CRIU has ended, which then says why.
  absl::Status Received();
  // A number that grows while something is received or written. Any thread.
  uint64_t progress() const CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    return received_ + written_;
  }
  // After Received: how much of it was hidden from CRIU.
  uint64_t hidden_bytes() const { return hidden_bytes_; }
  // Waits until all files are written. They are not flushed to the disk. Fails without a message as Received.
  absl::Status Finish();

  // A little more, since the processes change while they are looked at.
  static constexpr uint64_t BytesFor(uint64_t bytes) { return bytes + bytes / 8; }
  // What it takes where nothing is said.
  static constexpr uint64_t kUsualBytes = uint64_t{640} << 20;

 private:
  // One kind of message for all commands, as CRIU sends it, and HiddenPages.
  struct Message {
    uint32_t command = 0, flags = 0;
    uint64_t pages = 0, address = 0, target = 0;
    int process = 0;  // of kHidden
  };
  class File;
  // Bytes in the buffer that belong to one file.
  struct Piece {
    std::shared_ptr<File> file;
    uint64_t bytes;
  };

  void Receive();
  bool ReceiveAll();
  bool ReadMessage(Message* message);
  bool OpenImage(uint64_t target);
  bool CloseImage(SocketCopier* copier);
  bool AddPages(const Message& message, SocketCopier* copier);
  // The hidden pages below `end`, which CRIU does not follow with lower ones.
  bool AddHidden(uint64_t end, SocketCopier* copier);
  void Write();
  bool WriteMap();
  std::shared_ptr<File> Create(const std::string& name);
  bool Fail(const absl::Status& error);

  const uint64_t size_;
  // From how much on it is written while more is received. What fits can wait: writing takes time from receiving.
  const uint64_t write_at_;
  char* buffer_ = nullptr;
  UniqueFd folder_;
  UniqueFd socket_;
  ReadMemory read_;
  std::thread receiver_, writer_;

  // Of the receiver.
  uint64_t taken_ = 0;  // bytes, of the buffer, from the begin
  bool wide_ = true;    // the layout of CRIU 4.2: a number of pages has 64 bits
  bool layout_known_ = false;
  uint32_t images_ = 0;
  std::shared_ptr<File> pages_, map_;  // the open pages-N.img and its pagemap image
  std::string entries_;                // what goes to the latter
  std::deque<Message> hidden_;         // of the open image, in the order of their addresses, not added yet
  uint64_t hidden_bytes_ = 0;

  mutable Mutex mutex_;
  Condition changed_;
  std::deque<Piece> pieces_ CR_GUARDED_BY(mutex_);                                   // oldest first
  uint64_t received_ CR_GUARDED_BY(mutex_) = 0, written_ CR_GUARDED_BY(mutex_) = 0;  // bytes, through the buffer
  bool complete_ CR_GUARDED_BY(mutex_) = false;                                      // CRIU has said that this was all
  bool over_ CR_GUARDED_BY(mutex_) = false;                                          // nothing more is received
  absl::Status error_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PAGE_RECEIVER_H_
