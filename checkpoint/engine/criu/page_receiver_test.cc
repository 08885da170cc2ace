// SPDX-License-Identifier: Apache-2.0
// A stand-in for CRIU sends memory; the files are compared with what CRIU itself would have written. snapshot_test and
// tree_test have the real one.
#include "checkpoint/engine/criu/page_receiver.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <random>
#include <utility>
#include <vector>

#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/pages_socket.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr size_t kPage = 4096;
constexpr uint32_t kOpen = 4, kAdd = 6, kForceClose = 0x1024, kPresent = 4, kLazy = 2;
constexpr uint32_t kPagemapMagic = 0x56084025;
constexpr uint64_t Process(uint64_t id) { return id << 8 | 1; }
constexpr uint64_t Shared(uint64_t id) { return id << 8 | 2; }

struct Entry {
  uint64_t address, pages;
  uint32_t flags;
};

// CRIU's end. `wide`: as version 4.2 sends.
class Sender {
 public:
  Sender(int fd, bool wide) : fd_(fd), wide_(wide) {}
  ~Sender() { End(); }
  void End() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

  // Each is false if the other end has gone.
  bool Send(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t sent = send(fd_, at, bytes, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      at += sent;
      bytes -= size_t(sent);
    }
    return true;
  }
  bool Message(uint32_t command, uint32_t flags, uint64_t pages, uint64_t address, uint64_t target) {
    std::string bytes;
    const auto append = [&](auto value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
    append(flags << 16 | command);
    append(uint32_t(wide_ ? 0 : pages));
    if (wide_) append(pages);
    append(address);
    append(target);
    return Send(bytes.data(), bytes.size());
  }
  bool Open(uint64_t target) {
    char parent = 1;
    return Message(kOpen, 0, 0, 0, target) && recv(fd_, &parent, 1, 0) == 1 && parent == 0;
  }
  bool Add(const Entry& entry, const std::string& bytes) {
    return Message(kAdd, entry.flags, entry.pages, entry.address, 0) && Send(bytes.data(), bytes.size());
  }
  bool Hide(int process, uint64_t address, uint64_t pages) {
    const HiddenPages hidden{kHidden, process, address, pages};
    return Send(&hidden, sizeof(hidden));
  }
  bool Close() {
    int32_t status = -1;
    return Message(kForceClose, 0, 0, 0, 0) && recv(fd_, &status, sizeof(status), MSG_WAITALL) == sizeof(status) &&
           status == 0;
  }

 private:
  int fd_;
  const bool wide_;
};

std::string Noise(size_t pages, unsigned seed) {
  std::mt19937_64 random(seed);
  std::string bytes(pages * kPage, '\0');
  for (size_t at = 0; at < bytes.size(); at += 8) {
    const uint64_t word = random();
    memcpy(&bytes[at], &word, 8);
  }
  return bytes;
}

class PageReceiverTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/pages-" + std::to_string(getpid());
    std::filesystem::remove_all(folder_);
    ASSERT_EQ(mkdir(folder_.c_str(), 0700), 0);
    fd_ = open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ASSERT_GE(fd_, 0);
  }
  void TearDown() override {
    close(fd_);
    std::filesystem::remove_all(folder_);
  }

  int Begin(PageReceiver* receiver, PageReceiver::ReadMemory read = nullptr) {
    absl::StatusOr<UniqueFd> end = receiver->Begin(fd_, std::move(read));
    EXPECT_EQ(end.status(), absl::OkStatus());
    return end.ok() ? end->Release() : -1;
  }

  std::string Read(const std::string& name) {
    std::string bytes;
    EXPECT_TRUE(ReadImageFile(folder_ + "/" + name, &bytes)) << name;
    return bytes;
  }

  // Of a pagemap image: the number of its pages image, and the entries.
  void ReadMap(const std::string& name, uint32_t* pages, std::vector<Entry>* entries) {
    bool first = true;
    EXPECT_TRUE(ReadEntries(Read(name), kPagemapMagic, [&](protozero::pbf_reader message) {
      Entry entry = {};
      bool has_compatible = false;
      while (message.next()) {
        if (first) {
          *pages = message.get_uint32();
        } else if (message.tag() == 1) {
          entry.address = message.get_uint64();
        } else if (message.tag() == 2) {
          has_compatible = true;  // a required field in all versions
          entry.pages += message.get_uint32();
        } else if (message.tag() == 4) {
          entry.flags = message.get_uint32();
        } else if (message.tag() == 5) {
          EXPECT_TRUE(GetParam());
          entry.pages += message.get_uint64();
        } else {
          ADD_FAILURE() << "field " << message.tag();
          message.skip();
        }
      }
      if (!first) {
        EXPECT_TRUE(has_compatible);
        entries->push_back(entry);
      }
      first = false;
    }));
  }

  std::string folder_;
  int fd_ = -1;
};

TEST_P(PageReceiverTest, WritesWhatCriuWouldHaveWritten) {
  // Some are copied at once, others by other threads. Zeros at the begin, inside and at the end are holes.
  const std::string zeros(64 * kPage, '\0'), one = Noise(3, 1), two = Noise(1, 2);
  const std::string three = zeros + Noise(700, 3) + zeros + Noise(40, 4) + zeros;
  PageReceiver receiver(1 << 23);
  Sender criu(Begin(&receiver), GetParam());
  ASSERT_TRUE(criu.Open(Process(17)));
  ASSERT_TRUE(criu.Add({0x10000, 3, kPresent}, one));
  ASSERT_TRUE(criu.Add({0x20000, 7, kLazy}, ""));
  ASSERT_TRUE(criu.Add({0x7ffff0000000, 1, kPresent | kLazy}, two));
  ASSERT_TRUE(criu.Open(Process(18)));
  ASSERT_TRUE(criu.Open(Shared(17)));
  ASSERT_TRUE(criu.Add({0, three.size() / kPage, kPresent}, three));
  ASSERT_TRUE(criu.Close());
  criu.End();
  ASSERT_EQ(receiver.Received(), absl::OkStatus());
  ASSERT_EQ(receiver.Finish(), absl::OkStatus());

  EXPECT_EQ(Read("pages-1.img"), one + two);
  EXPECT_EQ(Read("pages-2.img"), "");
  EXPECT_TRUE(Read("pages-3.img") == three);
  struct stat facts = {};
  ASSERT_EQ(stat((folder_ + "/pages-3.img").c_str(), &facts), 0);
  EXPECT_LE(uint64_t(facts.st_blocks) * 512, 741 * kPage);
  uint32_t pages = 0;
  std::vector<Entry> entries;
  ReadMap("pagemap-17.img", &pages, &entries);
  EXPECT_EQ(pages, 1u);
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[1].address, 0x20000u);
  EXPECT_EQ(entries[1].pages, 7u);
  EXPECT_EQ(entries[1].flags, kLazy);
  EXPECT_EQ(entries[2].address, 0x7ffff0000000u);
  EXPECT_EQ(entries[2].pages, 1u);
  EXPECT_EQ(entries[2].flags, kPresent | kLazy);
  ReadMap("pagemap-18.img", &pages, &entries);
  EXPECT_EQ(pages, 2u);
  EXPECT_EQ(entries.size(), 3u);
  ReadMap("pagemap-shmem-17.img", &pages, &entries);
  EXPECT_EQ(pages, 3u);
  EXPECT_EQ(entries.size(), 4u);
}

// Many times what the buffer holds, in pieces that do not divide it, through several images.
TEST_P(PageReceiverTest, TakesMoreThanItsBuffer) {
  std::mt19937 random(5);
  PageReceiver receiver(1);
  Sender criu(Begin(&receiver), GetParam());
  std::vector<std::string> images;
  for (int image = 0; image < 3; ++image) {
    images.emplace_back();
    ASSERT_TRUE(criu.Open(Process(unsigned(image + 1))));
    for (int i = 0; i < 40; ++i) {
      const std::string bytes = Noise(1 + random() % 300, random());
      ASSERT_TRUE(criu.Add({images.back().size(), bytes.size() / kPage, kPresent}, bytes));
      images.back() += bytes;
    }
  }
  ASSERT_TRUE(criu.Close());
  criu.End();
  ASSERT_EQ(receiver.Received(), absl::OkStatus());
  ASSERT_EQ(receiver.Finish(), absl::OkStatus());
  for (size_t image = 0; image < images.size(); ++image) {
    EXPECT_TRUE(Read("pages-" + std::to_string(image + 1) + ".img") == images[image]) << image;
  }
}

// What is hidden comes between what CRIU sends, at its address, however much there is and wherever it is told.
TEST_P(PageReceiverTest, ReadsWhatIsHidden) {
  std::mt19937 random(9);
  for (const uint64_t buffer : {uint64_t{1}, uint64_t{64} << 20}) {
    std::filesystem::remove_all(folder_ + "/pages-1.img");
    std::filesystem::remove_all(folder_ + "/pages-2.img");
    for (const int id : {17, 18}) std::filesystem::remove_all(folder_ + "/pagemap-" + std::to_string(id) + ".img");
    std::string memory[2];
    for (std::string& one : memory) one = Noise(3000, random());
    PageReceiver receiver(buffer);
    const auto read = [&](int process, uint64_t address, char* to, size_t bytes) {
      memory[process - 17].copy(to, bytes, address);
      return absl::OkStatus();
    };
    Sender criu(Begin(&receiver, read), GetParam());
    std::string expected[2];
    std::vector<Entry> entries[2];
    uint64_t hidden = 0;
    for (const int process : {17, 18}) {
      ASSERT_TRUE(criu.Open(Process(unsigned(process))));
      std::vector<Entry> sent;  // what CRIU sends when it has looked at several mappings
      for (uint64_t at = 0; at < 3000;) {
        const uint64_t pages = std::min<uint64_t>(1 + random() % 300, 3000 - at);
        const Entry entry{at * kPage, pages, kPresent};
        switch (random() % 3) {
          case 0:
            ASSERT_TRUE(criu.Hide(process, entry.address, pages));
            hidden += pages * kPage;
            break;
          case 1:
            sent.push_back(entry);
            break;
          default:
            at += pages;
            continue;
        }
        expected[process - 17].append(memory[process - 17], entry.address, pages * kPage);
        entries[process - 17].push_back(entry);
        at += pages;
        if (random() % 4 != 0) continue;
        for (const Entry& one : sent) {
          ASSERT_TRUE(criu.Add(one, memory[process - 17].substr(one.address, one.pages * kPage)));
        }
        sent.clear();
      }
      for (const Entry& one : sent) {
        ASSERT_TRUE(criu.Add(one, memory[process - 17].substr(one.address, one.pages * kPage)));
      }
    }
    ASSERT_TRUE(criu.Close());
    criu.End();
    ASSERT_EQ(receiver.Received(), absl::OkStatus());
    EXPECT_EQ(receiver.hidden_bytes(), hidden);
    ASSERT_EQ(receiver.Finish(), absl::OkStatus());
    for (const int process : {0, 1}) {
      EXPECT_TRUE(Read("pages-" + std::to_string(process + 1) + ".img") == expected[process]) << process;
      uint32_t pages = 0;
      std::vector<Entry> found;
      ReadMap("pagemap-" + std::to_string(process + 17) + ".img", &pages, &found);
      ASSERT_EQ(found.size(), entries[process].size());
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_EQ(found[i].address, entries[process][i].address);
        EXPECT_EQ(found[i].pages, entries[process][i].pages);
        EXPECT_EQ(found[i].flags, entries[process][i].flags);
      }
    }
  }
}

// CRIU is not answered, and the reason is told.
TEST_P(PageReceiverTest, WhatIsHiddenCannotBeRead) {
  PageReceiver receiver(1);
  std::atomic<int> reads{0};
  const auto read = [&reads](int, uint64_t, char*, size_t) {
    return ++reads < 3 ? absl::OkStatus() : absl::PermissionDeniedError("not this one");
  };
  Sender criu(Begin(&receiver, read), GetParam());
  ASSERT_TRUE(criu.Open(Process(17)));
  for (uint64_t i = 0; i < 40; ++i) {
    if (!criu.Hide(17, i << 20, 256)) break;
  }
  EXPECT_FALSE(criu.Close());
  criu.End();
  EXPECT_EQ(receiver.Received().message(), "not this one");
  EXPECT_EQ(receiver.Finish().message(), "not this one");
}

// CRIU says itself why it has ended.
TEST_P(PageReceiverTest, CriuEnds) {
  for (int after = 0; after < 4; ++after) {
    std::filesystem::remove_all(folder_ + "/pages-1.img");
    std::filesystem::remove_all(folder_ + "/pagemap-1.img");
    PageReceiver receiver(1);
    Sender criu(Begin(&receiver), GetParam());
    if (after > 0) {
      ASSERT_TRUE(criu.Open(Process(1)));
    }
    if (after > 1) {
      ASSERT_TRUE(criu.Message(kAdd, kPresent, 100, 0, 0));
    }
    if (after > 2) {
      ASSERT_TRUE(criu.Send(Noise(2, 1).data(), 2 * kPage));
    }
    criu.End();
    const absl::Status received = receiver.Received();
    EXPECT_FALSE(received.ok());
    EXPECT_EQ(received.message(), "");
    EXPECT_FALSE(receiver.Finish().ok());
  }
}

// CRIU is not answered, and so lets the processes run.
TEST_P(PageReceiverTest, AFileThatCannotBeWritten) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  for (const bool at_once : {true, false}) {
    std::filesystem::remove_all(folder_ + "/pages-1.img");
    std::filesystem::remove_all(folder_ + "/pagemap-1.img");
    rlimit small = before;
    small.rlim_cur = 1 << 20;
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    // A large buffer is written when CRIU has ended, a small one before.
    PageReceiver receiver(at_once ? 1 : 64 << 20);
    Sender criu(Begin(&receiver), GetParam());
    ASSERT_TRUE(criu.Open(Process(1)));
    bool sent = true;
    for (uint64_t i = 0; i < 30 && sent; ++i) sent = criu.Add({i << 20, 256, kPresent}, Noise(256, 7));
    sent = sent && criu.Close();
    EXPECT_EQ(sent, !at_once);
    criu.End();
    EXPECT_EQ(receiver.Received().ok(), !at_once);
    EXPECT_EQ(receiver.Finish().message(), std::string("cannot write pages-1.img: ") + strerror(EFBIG));
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  }
}

// A user's CRIU may have made files and links in the folder.
TEST_P(PageReceiverTest, LeavesOtherFilesAlone) {
  const std::string other = folder_ + "/other";
  ASSERT_EQ(close(creat(other.c_str(), 0600)), 0);
  ASSERT_EQ(symlink(other.c_str(), (folder_ + "/pagemap-1.img").c_str()), 0);
  PageReceiver receiver(1);
  Sender criu(Begin(&receiver), GetParam());
  EXPECT_FALSE(criu.Open(Process(1)));
  criu.End();
  EXPECT_EQ(receiver.Received().message(), std::string("cannot create pagemap-1.img: ") + strerror(EEXIST));
  EXPECT_EQ(std::filesystem::file_size(other), 0u);
}

TEST_P(PageReceiverTest, RefusesWhatCriuDoesNotSend) {
  const struct {
    uint32_t command;
    uint64_t pages, target;
    const char* error;
  } kCases[] = {
      {kOpen, 0, 7, "unknown memory"},
      {kAdd, 1, Process(1), "belong to no image"},
      {99, 0, Process(1), "unknown command"},
  };
  const auto read = [](int, uint64_t, char*, size_t) { return absl::OkStatus(); };
  const struct {
    bool reads;
    HiddenPages first, second;
    const char* error;
  } kHiddenCases[] = {
      {false, {kHidden, 17, 0, 1}, {}, "by itself"},
      {true, {kHidden, 0, 0, 1}, {}, "by itself"},
      {true, {kHidden, 17, 0, 0}, {}, "in another way"},
      {true, {kHidden, 17, 8192, 1}, {kHidden, 17, 4096, 1}, "in another way"},
      {true, {kHidden, 17, 8192, uint64_t{1} << 60}, {kHidden, 17, uint64_t{1} << 60, 1}, "belong to no image"},
  };
  for (const auto& one : kHiddenCases) {
    std::filesystem::remove_all(folder_ + "/pages-1.img");
    std::filesystem::remove_all(folder_ + "/pagemap-17.img");
    PageReceiver receiver(1);
    Sender criu(one.reads ? Begin(&receiver, read) : Begin(&receiver), GetParam());
    ASSERT_TRUE(criu.Open(Process(17)));
    ASSERT_TRUE(criu.Send(&one.first, sizeof(one.first)));
    if (one.second.process != 0) {
      ASSERT_TRUE(criu.Send(&one.second, sizeof(one.second)));
    }
    criu.Close();
    const std::string error(receiver.Received().message());
    EXPECT_NE(error.find(one.error), std::string::npos) << error;
  }
  for (const auto& one : kCases) {
    PageReceiver receiver(1);
    Sender criu(Begin(&receiver), GetParam());
    ASSERT_TRUE(criu.Message(one.command, kPresent, one.pages, 0, one.target));
    const std::string error(receiver.Received().message());
    EXPECT_NE(error.find(one.error), std::string::npos) << error;
  }
}

TEST_P(PageReceiverTest, EndsAtOnceWhereNobodyWaitsForIt) {
  PageReceiver receiver(1);
  Sender criu(Begin(&receiver), GetParam());
  ASSERT_TRUE(criu.Open(Process(1)));
  ASSERT_TRUE(criu.Message(kAdd, kPresent, 100, 0, 0));
}

INSTANTIATE_TEST_SUITE_P(Versions, PageReceiverTest, testing::Bool(),
                         [](const auto& version) { return version.param ? "Criu42" : "Criu41"; });

}  // namespace
}  // namespace cuda_remote::checkpoint
