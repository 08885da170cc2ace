// SPDX-License-Identifier: Apache-2.0
// The helpers that every folder uses: descriptors, clocks, texts and mappings.

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "proto/base/clock.h"
#include "proto/base/mappings.h"
#include "proto/base/proc.h"
#include "proto/base/read_file.h"
#include "proto/base/text.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote {
namespace {

int AnyFile() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }
bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

TEST(Proc, LinksAndNumbers) {
  char folder[] = "/tmp/cr-base-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string link = std::string(folder) + "/link", target(3000, 'x');
  EXPECT_EQ(ReadLink(link), "");
  ASSERT_EQ(symlink(target.c_str(), link.c_str()), 0);
  EXPECT_EQ(ReadLink(link), target);
  EXPECT_EQ(ReadLink(folder), "") << "it is no link";
  EXPECT_EQ(ReadLink("/proc/self/exe").find(OwnFolder()), 0u);
  EXPECT_EQ(OwnFolder().back(), '/');
  unlink(link.c_str());
  rmdir(folder);
  for (const char* const text : {"0", "12", "999999999"}) EXPECT_TRUE(IsNumber(text)) << text;
  for (const char* const text : {"", "-1", "1a", " 1", "1 ", "1234567890"}) EXPECT_FALSE(IsNumber(text)) << text;
}

TEST(Proc, ReadAllIsFromTheBeginning) {
  char path[] = "/tmp/cr-base-XXXXXX";
  const UniqueFd file(mkstemp(path));
  unlink(path);
  const std::string text(100000, 't');
  ASSERT_EQ(write(file.get(), text.data(), text.size()), ssize_t(text.size()));
  std::string bytes = "before";
  ASSERT_TRUE(ReadAll(file.get(), &bytes));
  EXPECT_EQ(bytes, text);
  EXPECT_FALSE(ReadAll(-1, &bytes));
}

TEST(Proc, StatBehindAnyName) {
  const char kFields[] =
      "S 11 12 13 34816 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 100 200 18446744073709551615 1 2 140731 0 0 0 0 0 0 "
      "0 0 "
      "0 17 3 0 0 0 0 0 1 2 3 4711 4799 5 0\n";
  for (const char* const name : {"plain", "with space", "a) R 1 (b", "line\nend", ""}) {
    const ProcessStat stat = ParseStat("10 (" + std::string(name) + ") " + kFields);
    EXPECT_EQ(stat.state, 'S') << name;
    EXPECT_EQ(stat.parent, 11);
    EXPECT_EQ(stat.group, 12);
    EXPECT_EQ(stat.session, 13);
    EXPECT_EQ(stat.terminal, 34816);
    EXPECT_EQ(stat.foreground, -1);
    EXPECT_EQ(stat.start, 98765u);
    EXPECT_EQ(stat.stack, 140731u);
    EXPECT_EQ(stat.arguments, 4711u);
    EXPECT_EQ(stat.arguments_end, 4799u);
  }
  for (const char* const text : {"", "10", "10 (name)", "10 (name) "}) EXPECT_EQ(ParseStat(text).state, 0) << text;
}

TEST(Proc, OwnProcess) {
  const ProcessStat stat = StatOf(getpid());
  EXPECT_EQ(stat.state, 'R');
  EXPECT_EQ(stat.parent, getppid());
  EXPECT_EQ(stat.session, getsid(0));
  EXPECT_GT(stat.arguments_end, stat.arguments);
  EXPECT_EQ(StatOf(1 << 29).state, 0);
  EXPECT_EQ(StatusField(getpid(), "Pid"), std::to_string(getpid()));
  EXPECT_EQ(StatusField(getpid(), "pid"), "");
  EXPECT_EQ(StatusField(1 << 29, "Pid"), "");
  EXPECT_EQ(CommOf(getpid()), StatusField(getpid(), "Name"));
  const std::vector<int> all = AllProcesses(), threads = NumbersIn(getpid(), "task"), files = NumbersIn(getpid(), "fd");
  for (const auto& [numbers, one] : {std::pair(all, getpid()), std::pair(threads, getpid()), std::pair(files, 2)}) {
    EXPECT_NE(std::find(numbers.begin(), numbers.end(), one), numbers.end()) << one;
  }
}

TEST(ReadWholeFile, ReadsFilesWithoutASizeAndFailsWithoutAnException) {
  std::string bytes = "before";
  ASSERT_TRUE(ReadWholeFile("/proc/self/status", &bytes));
  EXPECT_NE(bytes.find("Threads:"), std::string::npos);
  EXPECT_TRUE(ReadWholeFile("/dev/null", &bytes));
  EXPECT_EQ(bytes, "");
  EXPECT_FALSE(ReadWholeFile("/nothing/there", &bytes));
  // It can be opened, and reading it fails, as a file in /proc whose process has ended.
  EXPECT_FALSE(ReadWholeFile("/", &bytes));
  EXPECT_EQ(bytes, "");
  // More than is read at a time.
  char path[] = "/tmp/cr-base-XXXXXX";
  const UniqueFd file(mkstemp(path));
  const std::string long_text(100000, 't');
  ASSERT_EQ(write(file.get(), long_text.data(), long_text.size()), ssize_t(long_text.size()));
  EXPECT_TRUE(ReadWholeFile(path, &bytes));
  EXPECT_EQ(bytes, long_text);
  unlink(path);
}

TEST(UniqueFd, ClosesWhatItOwns) {
  const int number = AnyFile();
  ASSERT_GE(number, 0);
  {
    const UniqueFd fd(number);
    EXPECT_TRUE(fd.ok());
    EXPECT_EQ(fd.get(), number);
    errno = ENOTTY;
  }
  EXPECT_EQ(errno, ENOTTY);
  EXPECT_FALSE(IsOpen(number));
  EXPECT_FALSE(UniqueFd().ok());
}

TEST(UniqueFd, HasOneOwner) {
  const int number = AnyFile();
  UniqueFd first(number), second(std::move(first));
  EXPECT_FALSE(first.ok());
  EXPECT_EQ(second.get(), number);
  first = std::move(second);
  EXPECT_EQ(first.get(), number);
  UniqueFd& same = first;
  first = std::move(same);
  EXPECT_TRUE(IsOpen(number));
  EXPECT_EQ(first.Release(), number);
  EXPECT_FALSE(first.ok());
  EXPECT_TRUE(IsOpen(number));

  first.Reset(number);
  const int other = AnyFile();
  first.Reset(other);
  EXPECT_FALSE(IsOpen(number));
  EXPECT_TRUE(IsOpen(other));
  first.Close();
  first.Close();
  EXPECT_FALSE(IsOpen(other));
}

TEST(Clock, NeverGoesBack) {
  const Moment start = Now();
  const int64_t ns = NowNs();
  EXPECT_GE(SecondsSince(start), 0);
  // One clock.
  EXPECT_LE(std::chrono::nanoseconds(start.time_since_epoch()).count(), ns);
  EXPECT_LE(ns, std::chrono::nanoseconds(Now().time_since_epoch()).count());
  EXPECT_LE(ns / 1000000, NowMs());
}

TEST(Clock, UnixMsIsTheDate) {
  using std::chrono::duration_cast, std::chrono::milliseconds;
  const int64_t before = UnixMs();
  EXPECT_LE(before, duration_cast<milliseconds>(WallNow().time_since_epoch()).count());
  EXPECT_GT(before, int64_t{1700000000} * 1000);
}

TEST(Text, Hex) {
  EXPECT_EQ(Hex(0), "0x0");
  EXPECT_EQ(Hex(0x7f00c0de), "0x7f00c0de");
  EXPECT_EQ(Hex(UINT64_MAX), "0xffffffffffffffff");
}

TEST(Text, HexBytes) {
  const std::string bytes("\x00\x9f\xff", 3);
  EXPECT_EQ(HexBytes(bytes), "009fff");
  EXPECT_EQ(HexBytes(bytes, ":"), "00:9f:ff");
  EXPECT_EQ(HexBytes(""), "");
  std::string read;
  ASSERT_TRUE(BytesOfHex("009FfF", &read));
  EXPECT_EQ(read, bytes);
  for (const char* wrong : {"0", "0g", "g0", " 0", "0x00", "+1"}) EXPECT_FALSE(BytesOfHex(wrong, &read)) << wrong;
  EXPECT_EQ(read, bytes);
  ASSERT_TRUE(BytesOfHex("", &read));
  EXPECT_EQ(read, "");
}

TEST(Text, UuidsAreAsUsual) {
  const std::string uuid("\xab\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\x02", 16);
  EXPECT_EQ(UuidName(uuid), "GPU-ab112233-4455-6677-8899-aabbccddee02");
}

TEST(Text, Bytes) {
  EXPECT_EQ(ByteText(0), "0 B");
  EXPECT_EQ(ByteText(300), "300 B");
  EXPECT_EQ(ByteText(999), "999 B");
  EXPECT_EQ(ByteText(1000), "1.0 KiB");
  EXPECT_EQ(ByteText(1.25 * (1 << 30)), "1.2 GiB");
  EXPECT_EQ(ByteText(17 << 20), "17 MiB");
  EXPECT_EQ(ByteText(double(uint64_t{3} << 50)), "3.0 PiB");
}

TEST(Text, Ages) {
  EXPECT_EQ(AgeText(-5), "0 s");
  EXPECT_EQ(AgeText(119999), "119 s");
  EXPECT_EQ(AgeText(120000), "2 min");
  EXPECT_EQ(AgeText(int64_t{3} * 3600 * 1000), "3 h");
  EXPECT_EQ(AgeText(int64_t{49} * 3600 * 1000), "2 days");
}

TEST(Mappings, Lines) {
  Mapping mapping;
  ASSERT_TRUE(ParseMapping("7f0000001000-7f0000003000 rw-s 00002000 103:0a 4711    /tmp/a file (deleted)", &mapping));
  EXPECT_EQ(mapping.begin, 0x7f0000001000u);
  EXPECT_EQ(mapping.end, 0x7f0000003000u);
  EXPECT_TRUE(mapping.readable && mapping.writable && mapping.shared);
  EXPECT_EQ(mapping.offset, 0x2000u);
  EXPECT_EQ(mapping.major, 0x103u);
  EXPECT_EQ(mapping.minor, 10u);
  EXPECT_EQ(mapping.inode, 4711u);
  EXPECT_EQ(mapping.name, "/tmp/a file (deleted)");
  EXPECT_EQ(MapFile("/proc/7", mapping), "/proc/7/map_files/7f0000001000-7f0000003000");
  ASSERT_TRUE(ParseMapping("00400000-00401000 --xp 00000000 00:00 0 ", &mapping));
  EXPECT_FALSE(mapping.readable || mapping.writable || mapping.shared);
  EXPECT_EQ(mapping.name, "");
  ASSERT_TRUE(ParseMapping("00400000-00401000 r-xp 00000000 00:00 0", &mapping));
  EXPECT_EQ(mapping.name, "");
  for (const char* wrong : {"", "nothing", "2-1 r--p 0 0:0 0 ", "1-2 r--p 0 0:0"}) {
    EXPECT_FALSE(ParseMapping(wrong, &mapping)) << wrong;
  }
}

// The two ways to ask the kernel say the same.
TEST(Mappings, FromAnAddress) {
  const auto files_from = [](uint64_t from) {
    std::vector<std::string> lines;
    EXPECT_TRUE(ForEachMapping(
        "/proc/self",
        [&](const Mapping& one) {
          if (one.inode == 0 && one.name != "[stack]") return true;
          lines.push_back(std::to_string(one.begin) + " " + std::to_string(one.end) + " " + one.name + " " +
                          std::to_string(one.offset) + " " + std::to_string(one.inode) + " " +
                          std::to_string(one.major) + ":" + std::to_string(one.minor) + (one.readable ? " r" : " -") +
                          (one.writable ? "w" : "-") + (one.shared ? "s" : "p"));
          return true;
        },
        from));
    return lines;
  };
  const std::vector<std::string> all = files_from(0);
  EXPECT_GT(all.size(), 5u);
  EXPECT_EQ(files_from(1), all);
  Mapping code;
  const auto here = reinterpret_cast<uint64_t>(&ParseMapping);
  ASSERT_TRUE(ForEachMapping(
      "/proc/self",
      [&](const Mapping& one) {
        code = one;
        return false;
      },
      here));
  EXPECT_LE(code.begin, here);
  EXPECT_GT(code.end, here);
  int calls = 0;
  const auto count = [&](const Mapping&) { return ++calls < 2; };
  EXPECT_TRUE(ForEachMapping("/proc/self", count, UINT64_MAX));
  EXPECT_EQ(calls, 0);
  EXPECT_FALSE(ForEachMapping("/proc/0", count, 1));
}

TEST(Mappings, OfThisProcess) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const int fd = memfd_create("base_test", MFD_CLOEXEC);
  const UniqueFd file(fd);
  ASSERT_EQ(ftruncate(fd, off_t(2 * page)), 0);
  void* const memory = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, off_t(page));
  ASSERT_NE(memory, MAP_FAILED);
  int found = 0;
  ASSERT_TRUE(ForEachMapping("/proc/self", [&](const Mapping& mapping) {
    if (mapping.begin != reinterpret_cast<uint64_t>(memory)) return true;
    ++found;
    EXPECT_EQ(mapping.end - mapping.begin, page);
    EXPECT_TRUE(mapping.readable && mapping.writable && mapping.shared);
    EXPECT_EQ(mapping.offset, page);
    EXPECT_EQ(mapping.name.substr(0, 16), "/memfd:base_test");
    return true;
  }));
  EXPECT_EQ(found, 1);
  munmap(memory, page);
  int calls = 0;
  ASSERT_TRUE(ForEachMapping("/proc/self", [&](const Mapping&) { return ++calls < 2; }));
  EXPECT_EQ(calls, 2);
  EXPECT_FALSE(ForEachMapping("/proc/0", [](const Mapping&) { return true; }));
}

}  // namespace
}  // namespace cuda_remote
