// SPDX-License-Identifier: Apache-2.0
// What the driver offers to tools, which the client answers alone: nothing of this file is ever sent.
#include <cuda.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "client/calls/testing/custom_fixture.h"
#include "client/core/log_buffer.h"

namespace cuda_remote::client {
namespace {

constexpr char kCut[] = "[older messages are gone]\n";
// How many messages the log keeps.
constexpr int kKept = 64;

class ToolsTest : public CustomTest {
 protected:
  void TearDown() override { EXPECT_EQ(Sent(), Calls()); }

  static void Log(const std::string& text) { LogBuffer::Add(text.data(), text.size()); }

  // A message without the time and the process that stand before it.
  static std::string Text(const std::string& line) {
    const size_t end = line.find("[CUDA][E] ");
    return end == std::string::npos ? line : line.substr(end + strlen("[CUDA][E] "));
  }
  static std::vector<std::string> Texts(const std::string& dump) {
    std::vector<std::string> texts;
    std::istringstream lines(dump);
    for (std::string line; std::getline(lines, line);) texts.push_back(Text(line));
    return texts;
  }
  // What is dumped into a buffer of `room` bytes. Checks that nothing behind the text is touched.
  static CUresult Dump(CUlogIterator* iterator, size_t room, std::string* text) {
    std::vector<char> buffer(room + 1, '#');
    size_t bytes = room;
    const CUresult result = cuLogsDumpToMemory(iterator, buffer.data(), &bytes, 0);
    EXPECT_LT(bytes, std::max<size_t>(room, 1));
    EXPECT_EQ(buffer[bytes], room == 0 ? '#' : 0);
    if (result == CUDA_SUCCESS) {
      EXPECT_TRUE(std::all_of(buffer.begin() + long(bytes) + 1, buffer.end(), [](char c) { return c == '#'; }));
    }
    text->assign(buffer.data(), bytes);
    return result;
  }
  static CUlogIterator End() {
    CUlogIterator end = 0;
    EXPECT_EQ(cuLogsCurrent(&end, 0), CUDA_SUCCESS);
    return end;
  }
};

template <typename T>
T Setting(CUcoredumpSettings attribute, bool global) {
  T value{};
  size_t bytes = sizeof value;
  EXPECT_EQ(global ? cuCoredumpGetAttributeGlobal(attribute, &value, &bytes)
                   : cuCoredumpGetAttribute(attribute, &value, &bytes),
            CUDA_SUCCESS);
  EXPECT_EQ(bytes, sizeof value);
  return value;
}
template <typename T>
CUresult Set(CUcoredumpSettings attribute, bool global, T value) {
  size_t bytes = sizeof value;
  return global ? cuCoredumpSetAttributeGlobal(attribute, &value, &bytes)
                : cuCoredumpSetAttribute(attribute, &value, &bytes);
}
std::string Name(CUcoredumpSettings attribute, bool global) {
  char value[1024];
  size_t bytes = sizeof value;
  EXPECT_EQ(global ? cuCoredumpGetAttributeGlobal(attribute, value, &bytes)
                   : cuCoredumpGetAttribute(attribute, value, &bytes),
            CUDA_SUCCESS);
  EXPECT_EQ(value[bytes - 1], 0);
  return {value, bytes - 1};
}

// The first one: the settings of the others stay.
TEST_F(ToolsTest, CoreDumpSettingsThatNobodyHasMade) {
  char host[256] = {};
  ASSERT_EQ(gethostname(host, sizeof(host) - 1), 0);
  const std::string suffix = ".cuda." + std::string(host) + "." + std::to_string(getpid());
  for (const bool global : {false, true}) {
    EXPECT_FALSE(Setting<bool>(CU_COREDUMP_ENABLE_ON_EXCEPTION, global));
    EXPECT_TRUE(Setting<bool>(CU_COREDUMP_TRIGGER_HOST, global));
    EXPECT_FALSE(Setting<bool>(CU_COREDUMP_LIGHTWEIGHT, global));
    EXPECT_FALSE(Setting<bool>(CU_COREDUMP_ENABLE_USER_TRIGGER, global));
    EXPECT_EQ(Setting<int>(CU_COREDUMP_GENERATION_FLAGS, global), 0);
    EXPECT_EQ(Name(CU_COREDUMP_FILE, global), "core" + suffix);
    EXPECT_EQ(Name(CU_COREDUMP_PIPE, global), "corepipe" + suffix);
  }
}

TEST_F(ToolsTest, ACoreDumpSettingIsOfAContextOrOfAll) {
  CUcontext other = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  Sent();
  ASSERT_EQ(Set(CU_COREDUMP_LIGHTWEIGHT, true, true), CUDA_SUCCESS);
  EXPECT_TRUE(Setting<bool>(CU_COREDUMP_LIGHTWEIGHT, true));
  EXPECT_TRUE(Setting<bool>(CU_COREDUMP_LIGHTWEIGHT, false)) << "a context has what is set for all";
  ASSERT_EQ(Set(CU_COREDUMP_LIGHTWEIGHT, false, false), CUDA_SUCCESS);
  EXPECT_FALSE(Setting<bool>(CU_COREDUMP_LIGHTWEIGHT, false)) << "its own setting comes first";
  EXPECT_TRUE(Setting<bool>(CU_COREDUMP_LIGHTWEIGHT, true));
  EXPECT_TRUE(Setting<bool>(CU_COREDUMP_TRIGGER_HOST, false)) << "another attribute";
  ASSERT_EQ(cuCtxSetCurrent(other), CUDA_SUCCESS);
  EXPECT_TRUE(Setting<bool>(CU_COREDUMP_LIGHTWEIGHT, false)) << "another context";
  ASSERT_EQ(Set(CU_COREDUMP_LIGHTWEIGHT, true, false), CUDA_SUCCESS);
  ASSERT_EQ(Set(CU_COREDUMP_GENERATION_FLAGS, false, int(CU_COREDUMP_SKIP_ABORT)), CUDA_SUCCESS);
  EXPECT_EQ(Setting<int>(CU_COREDUMP_GENERATION_FLAGS, false), CU_COREDUMP_SKIP_ABORT);
  EXPECT_EQ(Setting<int>(CU_COREDUMP_GENERATION_FLAGS, true), 0);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
  Sent();
}

TEST_F(ToolsTest, NamesOfCoreDumps) {
  // A name ends with a zero or with the buffer.
  char name[] = {'d', 'u', 'm', 'p', 0, 'x'};
  size_t bytes = sizeof name;
  ASSERT_EQ(cuCoredumpSetAttribute(CU_COREDUMP_FILE, name, &bytes), CUDA_SUCCESS);
  EXPECT_EQ(Name(CU_COREDUMP_FILE, false), "dump");
  bytes = 3;
  ASSERT_EQ(cuCoredumpSetAttribute(CU_COREDUMP_FILE, name, &bytes), CUDA_SUCCESS);
  EXPECT_EQ(Name(CU_COREDUMP_FILE, false), "dum");
  char room[8] = "#######";
  bytes = 3;
  EXPECT_EQ(cuCoredumpGetAttribute(CU_COREDUMP_FILE, room, &bytes), CUDA_ERROR_INVALID_VALUE) << "no room for the zero";
  EXPECT_STREQ(room, "#######");
  bytes = 4;
  EXPECT_EQ(cuCoredumpGetAttribute(CU_COREDUMP_FILE, room, &bytes), CUDA_SUCCESS);
  EXPECT_EQ(bytes, 4u);
  EXPECT_STREQ(room, "dum");
  EXPECT_EQ(room[4], '#');
  // Up to 1023 characters.
  std::string longest(1023, 'n');
  bytes = longest.size() + 1;
  EXPECT_EQ(cuCoredumpSetAttributeGlobal(CU_COREDUMP_PIPE, &longest[0], &bytes), CUDA_SUCCESS);
  EXPECT_EQ(Name(CU_COREDUMP_PIPE, true), longest);
  std::string longer(1024, 'm');
  bytes = longer.size() + 1;
  EXPECT_EQ(cuCoredumpSetAttributeGlobal(CU_COREDUMP_PIPE, &longer[0], &bytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Name(CU_COREDUMP_PIPE, true), longest) << "what is refused changes nothing";
}

TEST_F(ToolsTest, CoreDumpsCannotBeSwitchedOn) {
  const CUlogIterator before = End();
  for (const bool global : {false, true}) {
    for (const CUcoredumpSettings attribute : {CU_COREDUMP_ENABLE_ON_EXCEPTION, CU_COREDUMP_ENABLE_USER_TRIGGER}) {
      EXPECT_EQ(Set(attribute, global, true), CUDA_ERROR_NOT_SUPPORTED);
      EXPECT_FALSE(Setting<bool>(attribute, global));
      EXPECT_EQ(Set(attribute, global, false), CUDA_SUCCESS);
    }
  }
  std::string text;
  CUlogIterator from = before;
  EXPECT_EQ(Dump(&from, 4096, &text), CUDA_SUCCESS);
  EXPECT_NE(text.find("cuCoredumpSetAttribute "), std::string::npos) << text;
  EXPECT_NE(text.find("cuCoredumpSetAttributeGlobal "), std::string::npos) << text;
}

TEST_F(ToolsTest, CoreDumpArgumentsThatAreWrong) {
  const struct {
    CUcoredumpSettings attribute;
    size_t bytes;
  } all[] = {{CU_COREDUMP_ENABLE_ON_EXCEPTION, 1}, {CU_COREDUMP_TRIGGER_HOST, 1}, {CU_COREDUMP_LIGHTWEIGHT, 1},
             {CU_COREDUMP_ENABLE_USER_TRIGGER, 1}, {CU_COREDUMP_FILE, 1024},      {CU_COREDUMP_PIPE, 1024},
             {CU_COREDUMP_GENERATION_FLAGS, 4}};
  char value[1024] = {};
  size_t bytes;
  for (const auto& one : all) {
    SCOPED_TRACE(one.attribute);
    // Without a value, the size is what is asked for.
    for (const auto ask :
         {cuCoredumpGetAttribute, cuCoredumpGetAttributeGlobal, cuCoredumpSetAttribute, cuCoredumpSetAttributeGlobal}) {
      bytes = 0;
      EXPECT_EQ(ask(one.attribute, nullptr, &bytes), CUDA_SUCCESS);
      EXPECT_EQ(bytes, one.bytes);
      EXPECT_EQ(ask(one.attribute, value, nullptr), CUDA_ERROR_INVALID_VALUE);
      EXPECT_EQ(ask(one.attribute, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
    }
    bytes = 0;
    EXPECT_EQ(cuCoredumpGetAttribute(one.attribute, value, &bytes), CUDA_ERROR_INVALID_VALUE) << "no room";
    EXPECT_EQ(bytes, 0u);
  }
  for (const CUcoredumpSettings attribute : {CUcoredumpSettings(0), CU_COREDUMP_MAX, CUcoredumpSettings(-1)}) {
    bytes = sizeof value;
    EXPECT_EQ(cuCoredumpGetAttribute(attribute, value, &bytes), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuCoredumpSetAttributeGlobal(attribute, value, &bytes), CUDA_ERROR_INVALID_VALUE);
  }
  bytes = sizeof(int) - 1;
  EXPECT_EQ(cuCoredumpSetAttributeGlobal(CU_COREDUMP_GENERATION_FLAGS, value, &bytes), CUDA_ERROR_INVALID_VALUE);
  bytes = 0;
  EXPECT_EQ(cuCoredumpSetAttributeGlobal(CU_COREDUMP_TRIGGER_HOST, value, &bytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_TRUE(Setting<bool>(CU_COREDUMP_TRIGGER_HOST, true));
}

TEST_F(ToolsTest, CoreDumpSettingsNeedTheirContext) {
  bool value = false;
  size_t bytes = sizeof value;
  const auto get = [&] { return cuCoredumpGetAttribute(CU_COREDUMP_TRIGGER_HOST, &value, &bytes); };
  const auto set = [&] { return cuCoredumpSetAttribute(CU_COREDUMP_TRIGGER_HOST, &value, &bytes); };
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(get(), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(set(), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_TRUE(Setting<bool>(CU_COREDUMP_TRIGGER_HOST, true)) << "those of all contexts need none";
  CUcontext gone = nullptr;
  ASSERT_EQ(cuCtxCreate(&gone, nullptr, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(set(), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxPushCurrent(context_), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxDestroy(gone), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxPopCurrent(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(get(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT_EQ(set(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  Sent();
}

TEST_F(ToolsTest, TheLogFromAnIteratorOn) {
  CUlogIterator at = End();
  std::string text;
  EXPECT_EQ(Dump(&at, 4096, &text), CUDA_SUCCESS) << "there is nothing";
  EXPECT_EQ(text, "");
  Log("one");
  Log("two");
  EXPECT_EQ(Dump(&at, 4096, &text), CUDA_SUCCESS);
  EXPECT_EQ(Texts(text), (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(text.back(), '\n');
  EXPECT_EQ(text.find("[" + std::to_string(getpid()) + "][CUDA][E] one"), std::string("[hh:mm:ss.mmm]").size()) << text;
  EXPECT_EQ(at, End()) << "the iterator moves to the next message";
  Log("three");
  EXPECT_EQ(Dump(&at, 4096, &text), CUDA_SUCCESS);
  EXPECT_EQ(Texts(text), std::vector<std::string>{"three"});
  EXPECT_EQ(Dump(nullptr, 1 << 20, &text), CUDA_SUCCESS);
  const std::vector<std::string> all = Texts(text);
  ASSERT_GE(all.size(), 3u) << "without an iterator all that is kept";
  EXPECT_EQ(std::vector<std::string>(all.end() - 3, all.end()), (std::vector<std::string>{"one", "two", "three"}));
}

TEST_F(ToolsTest, TheNewestMessagesThatFit) {
  const CUlogIterator begin = End();
  for (const char* one : {"first", "second", "third"}) Log(one);
  std::string all, text;
  CUlogIterator at = begin;
  ASSERT_EQ(Dump(&at, 4096, &all), CUDA_SUCCESS);
  const auto dump = [&](size_t room) {
    at = begin;
    return Dump(&at, room, &text);
  };
  EXPECT_EQ(dump(all.size() + 1), CUDA_SUCCESS) << "just enough room";
  EXPECT_EQ(text, all);
  EXPECT_EQ(dump(all.size()), CUDA_SUCCESS);
  EXPECT_EQ(Texts(text), (std::vector<std::string>{Text(kCut).substr(0, strlen(kCut) - 1), "second", "third"}));
  EXPECT_EQ(at, End()) << "what did not fit is not dumped later";
  const size_t newest = all.size() - all.rfind('[', all.rfind("[CUDA]") - 1) + strlen("[hh:mm:ss.mmm]");
  EXPECT_EQ(dump(strlen(kCut) + newest + 1), CUDA_SUCCESS);
  EXPECT_EQ(text, kCut + all.substr(all.size() - newest));
  EXPECT_EQ(dump(strlen(kCut) + newest), CUDA_ERROR_INVALID_VALUE) << "no message fits";
  EXPECT_EQ(text, "") << "the size is 0";
  EXPECT_EQ(at, begin) << "they can be dumped into a larger buffer";
  EXPECT_EQ(dump(0), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(ToolsTest, OldMessagesGo) {
  CUlogIterator at = End();
  for (int i = 0; i < kKept + 1; ++i) Log(std::to_string(i));
  std::string text;
  EXPECT_EQ(Dump(&at, 1 << 20, &text), CUDA_SUCCESS);
  std::vector<std::string> texts = Texts(text);
  ASSERT_EQ(texts.size(), size_t(kKept) + 1);
  EXPECT_EQ(texts[0] + "\n", kCut);
  EXPECT_EQ(texts[1], "1");
  EXPECT_EQ(texts.back(), std::to_string(kKept));
  at = End();
  for (int i = 0; i < kKept; ++i) Log(std::to_string(i));
  EXPECT_EQ(Dump(&at, 1 << 20, &text), CUDA_SUCCESS);
  texts = Texts(text);
  EXPECT_EQ(texts.size(), size_t(kKept)) << "all are there still";
  EXPECT_EQ(texts[0], "0");
  Log(std::string(5000, 'l'));
  EXPECT_EQ(Dump(&at, 1 << 20, &text), CUDA_SUCCESS);
  EXPECT_LE(text.size(), 25600u / kKept) << "64 messages are at most what the driver's buffer holds";
  EXPECT_EQ(text.back(), '\n');
}

TEST_F(ToolsTest, TheLogInAFile) {
  char folder[] = "/tmp/tools-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/log";
  const auto content = [&path] {
    std::ostringstream all;
    all << std::ifstream(path).rdbuf();
    return all.str();
  };
  const CUlogIterator begin = End();
  Log("one");
  Log("two");
  CUlogIterator at = begin;
  EXPECT_EQ(cuLogsDumpToFile(&at, "/nowhere/at/all", 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(at, begin);
  // A file that cannot be written to loses nothing.
  ASSERT_EQ(access("/dev/full", W_OK), 0);
  EXPECT_NE(cuLogsDumpToFile(&at, "/dev/full", 0), CUDA_SUCCESS);
  EXPECT_EQ(at, begin);
  EXPECT_EQ(cuLogsDumpToFile(&at, path.c_str(), 0), CUDA_SUCCESS);
  EXPECT_EQ(Texts(content()), (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(at, End());
  EXPECT_EQ(cuLogsDumpToFile(&at, path.c_str(), 0), CUDA_SUCCESS);
  EXPECT_EQ(content(), "") << "a dump replaces the file";
  for (int i = 0; i < kKept + 1; ++i) Log(std::to_string(i));
  EXPECT_EQ(cuLogsDumpToFile(&at, path.c_str(), 0), CUDA_SUCCESS);
  EXPECT_EQ(content().find(kCut), 0u);
  EXPECT_EQ(Texts(content()).size(), size_t(kKept) + 1);
  EXPECT_EQ(unlink(path.c_str()), 0);
  EXPECT_EQ(rmdir(folder), 0);
}

TEST_F(ToolsTest, LogArgumentsThatAreWrong) {
  size_t bytes = 10;
  char buffer[10];
  EXPECT_EQ(cuLogsCurrent(nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuLogsDumpToFile(nullptr, nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuLogsDumpToMemory(nullptr, nullptr, &bytes, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuLogsDumpToMemory(nullptr, buffer, nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  CUlogsCallbackHandle handle = nullptr;
  EXPECT_EQ(cuLogsRegisterCallback(nullptr, nullptr, &handle), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(handle, nullptr);
  EXPECT_EQ(cuLogsUnregisterCallback(nullptr), CUDA_ERROR_INVALID_VALUE);
}

// What a callback was given.
struct Heard {
  std::vector<std::string> texts;
  CUlogsCallbackHandle until_first = nullptr;  // taken away by the callback itself
};

void Hear(void* data, CUlogLevel level, char* message, size_t length) {
  auto* const heard = static_cast<Heard*>(data);
  EXPECT_EQ(level, CU_LOG_LEVEL_ERROR);
  EXPECT_EQ(strlen(message), length);
  heard->texts.emplace_back(message, length);
  if (heard->until_first) {
    EXPECT_EQ(cuLogsUnregisterCallback(heard->until_first), CUDA_SUCCESS);
  }
}

TEST_F(ToolsTest, CallbacksHearEachMessage) {
  Heard first, second;
  CUlogsCallbackHandle handle = nullptr;
  ASSERT_EQ(cuLogsRegisterCallback(Hear, &first, &handle), CUDA_SUCCESS);
  ASSERT_EQ(cuLogsRegisterCallback(Hear, &second, &second.until_first), CUDA_SUCCESS);
  EXPECT_NE(handle, second.until_first);
  CUlogIterator at = End();
  Log("one");
  Log("two");
  EXPECT_EQ(first.texts.size(), 2u);
  EXPECT_EQ(second.texts.size(), 1u) << "it took itself away";
  EXPECT_EQ(cuLogsUnregisterCallback(second.until_first), CUDA_ERROR_INVALID_VALUE);
  std::string dump;
  EXPECT_EQ(Dump(&at, 4096, &dump), CUDA_SUCCESS);
  EXPECT_EQ(dump, first.texts[0] + "\n" + first.texts[1] + "\n");
  EXPECT_EQ(cuLogsUnregisterCallback(handle), CUDA_SUCCESS);
  EXPECT_EQ(cuLogsUnregisterCallback(handle), CUDA_ERROR_INVALID_VALUE);
  Log("three");
  EXPECT_EQ(first.texts.size(), 2u);
}

TEST_F(ToolsTest, ThereIsRoomForSomeCallbacks) {
  Heard heard;
  std::vector<CUlogsCallbackHandle> handles(16);
  for (CUlogsCallbackHandle& one : handles) ASSERT_EQ(cuLogsRegisterCallback(Hear, &heard, &one), CUDA_SUCCESS);
  CUlogsCallbackHandle more = nullptr;
  EXPECT_EQ(cuLogsRegisterCallback(Hear, &heard, &more), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(more, nullptr);
  EXPECT_EQ(cuLogsUnregisterCallback(handles[3]), CUDA_SUCCESS);
  ASSERT_EQ(cuLogsRegisterCallback(Hear, &heard, &more), CUDA_SUCCESS);
  EXPECT_EQ(std::count(handles.begin(), handles.end(), more), 0) << "old handles stay invalid";
  Log("one");
  EXPECT_EQ(heard.texts.size(), handles.size());
  handles[3] = more;
  for (const CUlogsCallbackHandle one : handles) EXPECT_EQ(cuLogsUnregisterCallback(one), CUDA_SUCCESS);
  // The handle is optional. Nobody can take such a callback away, so it stays till the end.
  static Heard always;
  EXPECT_EQ(cuLogsRegisterCallback(Hear, &always, nullptr), CUDA_SUCCESS);
}

TEST_F(ToolsTest, NoMessageIsDumpedTwice) {
  constexpr int kMessages = 2000;
  CUlogIterator at = End();
  std::atomic<int> dumps{0};
  std::atomic<bool> over{false};
  std::thread logging([&] {
    for (int i = 0; i < kMessages; ++i) {
      // Not so many at a time that the log would lose them before they are dumped.
      if (i % (kKept / 2) == 0) {
        for (const int seen = dumps; dumps < seen + 2;) std::this_thread::yield();
      }
      Log("number " + std::to_string(i));
    }
    over = true;
  });
  int last = -1;
  bool rising = true;
  for (bool more = true; more; ++dumps) {
    more = !over;
    std::string text;
    EXPECT_EQ(Dump(&at, 1 << 16, &text), CUDA_SUCCESS);
    for (const std::string& one : Texts(text)) {
      EXPECT_EQ(one.find("number "), 0u) << one;
      const int number = atoi(one.c_str() + strlen("number "));
      rising = rising && number > last;
      last = number;
    }
  }
  logging.join();
  EXPECT_TRUE(rising);
  // (A message that finds the log busy is not kept.)
  EXPECT_GT(last, kMessages / 2);
}

void Notified(CUasyncNotificationInfo*, void*, CUasyncCallbackHandle) { FAIL() << "there are no notifications"; }

TEST_F(ToolsTest, AsyncNotificationsAreOfADevice) {
  CUasyncCallbackHandle one = nullptr, other = nullptr;
  ASSERT_EQ(cuDeviceRegisterAsyncNotification(0, Notified, nullptr, &one), CUDA_SUCCESS);
  ASSERT_EQ(cuDeviceRegisterAsyncNotification(1, Notified, nullptr, &other), CUDA_SUCCESS);
  EXPECT_NE(one, other);
  EXPECT_EQ(cuDeviceUnregisterAsyncNotification(1, one), CUDA_ERROR_INVALID_VALUE) << "of another device";
  EXPECT_EQ(cuDeviceUnregisterAsyncNotification(0, one), CUDA_SUCCESS);
  EXPECT_EQ(cuDeviceUnregisterAsyncNotification(0, one), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuDeviceUnregisterAsyncNotification(1, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuDeviceUnregisterAsyncNotification(1, other), CUDA_SUCCESS);
  one = nullptr;
  for (const CUdevice device : {-1, 2}) {
    EXPECT_EQ(cuDeviceRegisterAsyncNotification(device, Notified, nullptr, &one), CUDA_ERROR_INVALID_DEVICE);
    EXPECT_EQ(cuDeviceUnregisterAsyncNotification(device, other), CUDA_ERROR_INVALID_DEVICE);
  }
  EXPECT_EQ(cuDeviceRegisterAsyncNotification(0, nullptr, nullptr, &one), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuDeviceRegisterAsyncNotification(0, Notified, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(one, nullptr);
}

}  // namespace
}  // namespace cuda_remote::client
