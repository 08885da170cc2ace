// SPDX-License-Identifier: Apache-2.0
// The library as a program has it (loaded by its path), against servers of every kind: right ones, ones that answer
// nonsense, and none.

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include "proto/base/testing/value_of.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"
#include "proto/nvml/query.h"

namespace cuda_remote::client {
namespace {

using nvml::Answer;
using nvml::Question;

void* Library() {
  static void* const library = dlopen("client/nvml/libcuda-remote-nvml.so", RTLD_NOW | RTLD_LOCAL);
  return library;
}

template <typename... Arguments>
int Call(const char* name, Arguments... arguments) {
  void* const function = dlsym(Library(), name);
  EXPECT_NE(function, nullptr) << name;
  return reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
}

// Answers every connection with what `reply` says: a packet's type and body; type 0: nothing, the connection ends.
class FakeServer {
 public:
  using Reply = std::function<uint32_t(const Question&, std::string* body)>;
  FakeServer(const std::string& path, Reply reply) : reply_(std::move(reply)) {
    listen_ = ValueOf(ListenUnix(path));
    fcntl(listen_.get(), F_SETFL, 0);
    thread_ = std::thread([this] { Serve(); });
  }
  ~FakeServer() {
    stop_.store(true);
    shutdown(listen_.get(), SHUT_RDWR);
    thread_.join();
  }
  int questions() const { return questions_.load(); }

 private:
  void Serve() {
    while (!stop_.load()) {
      const int socket = accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (socket < 0) continue;
      Packet packet;
      Question question;
      if (ReceivePacket(socket, &packet, 1000) == ChannelStatus::kOk && packet.type == PacketType::kQuery &&
          DecodeQuestion(packet.body, &question)) {
        questions_.fetch_add(1);
        std::string body;
        const uint32_t type = reply_(question, &body);
        if (type != 0) SendPacket(socket, PacketType(type), body, -1);
      }
      close(socket);
    }
  }
  Reply reply_;
  UniqueFd listen_;
  std::atomic<bool> stop_{false};
  std::atomic<int> questions_{0};
  std::thread thread_;
};

constexpr uint32_t kAnswer = uint32_t(PacketType::kAnswer);

uint32_t Say(std::string* body, const Answer& answer) {
  EncodeAnswer(answer, body);
  return kAnswer;
}

// Two GPUs with names; power is how often it was asked for.
FakeServer::Reply GoodServer(const std::string& prefix) {
  return [prefix, asked = 0](const Question& question, std::string* body) mutable {
    Answer answer;
    answer.result = nvml::kSuccess;
    uint32_t number = 2;
    if (question.call == "nvmlDeviceGetName") {
      answer.output = prefix + std::to_string(question.device) + (question.gpu >= 0 ? " only" : "");
      return Say(body, answer);
    }
    if (question.call == "nvmlDeviceGetPowerUsage") number = uint32_t(++asked);
    if (question.call == "nvmlDeviceGetUUID") {
      answer.output = "GPU-0" + std::to_string(question.device);
      return Say(body, answer);
    }
    if (question.call == nvml::kComputeProcesses) {
      for (uint32_t i = 0; i < 3; ++i) {
        const nvml::ProcessInfo info = {100 + i, 1000 * i, 7, 8};
        answer.output.append(reinterpret_cast<const char*>(&info), sizeof(info));
      }
      return Say(body, answer);
    }
    if (question.call == nvml::kFieldValues) {
      answer.output = question.input;
      return Say(body, answer);
    }
    answer.output.assign(reinterpret_cast<const char*>(&number), sizeof(number));
    return Say(body, answer);
  };
}

class NvmlLibrary : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(Library(), nullptr) << dlerror();
    char folder[] = "/tmp/cr-nvml-test-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    folder_ = folder;
    path_ = folder_ + "/s.sock";
    setenv("CUDA_REMOTE_SERVER", ("unix:" + path_).c_str(), 1);
    unsetenv("CUDA_REMOTE_JOB_DIR");
    unsetenv("CUDA_REMOTE_GPU");
  }
  void TearDown() override {
    while (Call("nvmlShutdown") == nvml::kSuccess) {
    }
    const std::string command = "rm -rf " + folder_;
    EXPECT_EQ(system(command.c_str()), 0);
  }
  std::string Name(void* device) {
    char name[96] = {};
    const int result = Call<void*, char*, uint32_t>("nvmlDeviceGetName", device, name, sizeof(name));
    return result == nvml::kSuccess ? name : "error " + std::to_string(result);
  }
  void* Device(uint32_t index) {
    void* device = nullptr;
    EXPECT_EQ((Call<uint32_t, void**>("nvmlDeviceGetHandleByIndex_v2", index, &device)), nvml::kSuccess);
    return device;
  }
  void SleepMs(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
  int OpenDescriptors() {
    int count = 0;
    for (int fd = 0; fd < 200; ++fd) count += fcntl(fd, F_GETFD) >= 0;
    return count;
  }
  std::string folder_, path_;
};

TEST_F(NvmlLibrary, StartsAndEndsAsNvmlDoes) {
  uint32_t count = 0;
  EXPECT_EQ(Call("nvmlDeviceGetCount_v2", &count), nvml::kUninitialized);
  EXPECT_EQ(Call("nvmlShutdown"), nvml::kUninitialized);
  EXPECT_EQ(Call("nvmlInit_v2"), nvml::kDriverNotLoaded);  // nobody listens
  FakeServer server(path_, GoodServer("gpu "));
  EXPECT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  EXPECT_EQ(Call<uint32_t>("nvmlInitWithFlags", 0), nvml::kSuccess);
  EXPECT_EQ(Call("nvmlDeviceGetCount_v2", &count), nvml::kSuccess);
  EXPECT_EQ(count, 2u);
  EXPECT_EQ(Call("nvmlShutdown"), nvml::kSuccess);
  EXPECT_EQ(Name(Device(1)), "gpu 1");
  EXPECT_EQ(Call("nvmlShutdown"), nvml::kSuccess);
  EXPECT_EQ(Call("nvmlDeviceGetCount_v2", &count), nvml::kUninitialized);
  EXPECT_EQ(Call("nvmlDeviceSetComputeMode"), nvml::kUninitialized);
}

TEST_F(NvmlLibrary, ChecksItsArguments) {
  FakeServer server(path_, GoodServer("gpu "));
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  char name[8] = "unused";
  int number = 0;
  void* device = nullptr;
  EXPECT_EQ((Call<void*, char*, uint32_t>("nvmlDeviceGetName", nullptr, name, 8)), nvml::kInvalidArgument);
  EXPECT_EQ((Call<void*, char*, uint32_t>("nvmlDeviceGetName", &number, name, 8)), nvml::kInvalidArgument);
  EXPECT_EQ((Call<uint32_t, void**>("nvmlDeviceGetHandleByIndex_v2", 2, &device)), nvml::kInvalidArgument);
  device = Device(0);
  EXPECT_EQ((Call<void*, char*, uint32_t>("nvmlDeviceGetName", device, name, 5)), nvml::kInsufficientSize);
  EXPECT_STREQ(name, "unused");
  EXPECT_EQ((Call<void*, void*>("nvmlDeviceGetPowerUsage", device, nullptr)), nvml::kInvalidArgument);
  nvml::FabricInfoV2 fabric = {};
  EXPECT_EQ((Call<void*, void*>("nvmlDeviceGetGpuFabricInfoV", device, &fabric)), nvml::kArgumentVersionMismatch);
  EXPECT_EQ(Call<void*>("nvmlDeviceSetComputeMode", device), nvml::kNotSupported);
  EXPECT_EQ((Call<const char*, void**>("nvmlDeviceGetHandleByUUID", "GPU-01", &device)), nvml::kSuccess);
  EXPECT_EQ(device, Device(1));
  EXPECT_EQ((Call<const char*, void**>("nvmlDeviceGetHandleByUUID", "GPU-09", &device)), nvml::kNotFound);
}

TEST_F(NvmlLibrary, ListsProcessesInEveryVersion) {
  FakeServer server(path_, GoodServer("gpu "));
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  void* const device = Device(0);
  uint32_t count = 0;
  EXPECT_EQ((Call<void*, uint32_t*, void*>("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, nullptr)),
            nvml::kInsufficientSize);
  EXPECT_EQ(count, 3u);
  nvml::ProcessInfo infos[4] = {};
  count = 4;
  EXPECT_EQ((Call<void*, uint32_t*, void*>("nvmlDeviceGetComputeRunningProcesses_v2", device, &count, infos)),
            nvml::kSuccess);
  EXPECT_EQ(count, 3u);
  EXPECT_EQ(infos[2].pid, 102u);
  EXPECT_EQ(infos[2].compute_instance, 8u);
  nvml::ProcessInfoV1 old[3] = {};
  count = 3;
  EXPECT_EQ((Call<void*, uint32_t*, void*>("nvmlDeviceGetComputeRunningProcesses", device, &count, old)),
            nvml::kSuccess);
  EXPECT_EQ(old[2].pid, 102u);
  EXPECT_EQ(old[2].used_bytes, 2000u);
}

TEST_F(NvmlLibrary, FieldValuesGoInPieces) {
  FakeServer server(path_, GoodServer("gpu "));
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  std::vector<nvml::FieldValue> values(600);
  for (size_t i = 0; i < values.size(); ++i) values[i] = {uint32_t(i), 1, 77, 77, 77, 77, 77};
  EXPECT_EQ((Call<void*, int, void*>("nvmlDeviceGetFieldValues", Device(0), int(values.size()), values.data())),
            nvml::kSuccess);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(values[i].field, i);
    EXPECT_EQ(values[i].value, 0u) << "what the program had there does not travel";
  }
}

TEST_F(NvmlLibrary, StillAnswersAreKeptFreshOnesAreNot) {
  FakeServer server(path_, GoodServer("gpu "));
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  void* const device = Device(0);
  const int before = server.questions();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Name(device), "gpu 0");
  EXPECT_EQ(server.questions(), before + 1);
  uint32_t first = 0, second = 0;
  EXPECT_EQ(Call("nvmlDeviceGetPowerUsage", device, &first), nvml::kSuccess);
  SleepMs(20);
  EXPECT_EQ(Call("nvmlDeviceGetPowerUsage", device, &second), nvml::kSuccess);
  EXPECT_EQ(second, first + 1);
}

TEST_F(NvmlLibrary, AsksTheServerThatTheJobUsesNow) {
  FakeServer old_server(path_, GoodServer("old ")), new_server(folder_ + "/n.sock", GoodServer("new "));
  setenv("CUDA_REMOTE_JOB_DIR", folder_.c_str(), 1);
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  void* const device = Device(1);
  EXPECT_EQ(Name(device), "old 1");
  std::ofstream(folder_ + "/gpu-server") << "unix:" << folder_ << "/n.sock\n-1\n";
  EXPECT_EQ(Name(device), "new 1");
  std::ofstream(folder_ + "/gpu-server.new") << "unix:" << folder_ << "/n.sock\n1\n";
  ASSERT_EQ(rename((folder_ + "/gpu-server.new").c_str(), (folder_ + "/gpu-server").c_str()), 0);
  EXPECT_EQ(Name(device), "new 1 only");
}

TEST_F(NvmlLibrary, NothingIsOpenBetweenCallsAndASnapshotIsWaitedFor) {
  FakeServer server(path_, GoodServer("gpu "));
  setenv("CUDA_REMOTE_JOB_DIR", folder_.c_str(), 1);
  const int before = OpenDescriptors();
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  void* const device = Device(0);
  // The server is in this process too, and closes its end after the answer has arrived.
  for (int i = 0; i < 500 && OpenDescriptors() != before; ++i) SleepMs(10);
  EXPECT_EQ(OpenDescriptors(), before);
  const int lock = open((folder_ + "/connect.lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(lock, 0);
  ASSERT_EQ(flock(lock, LOCK_EX | LOCK_NB), 0);
  std::atomic<bool> done{false};
  std::thread asks([&] {
    EXPECT_EQ(Name(device), "gpu 0");
    done.store(true);
  });
  const int questions = server.questions();
  SleepMs(100);
  EXPECT_FALSE(done.load());
  EXPECT_EQ(server.questions(), questions);
  flock(lock, LOCK_UN);
  asks.join();
  EXPECT_TRUE(done.load());
  // And it holds the lock no longer than it asks.
  EXPECT_EQ(flock(lock, LOCK_EX | LOCK_NB), 0);
  close(lock);
}

TEST_F(NvmlLibrary, WorksInAForkedChild) {
  FakeServer server(path_, GoodServer("gpu "));
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  void* const device = Device(0);
  std::atomic<bool> stop{false};
  // Children are made while another thread is in the middle of its questions.
  std::thread busy([&] {
    uint32_t power;
    while (!stop.load()) {
      Call("nvmlDeviceGetPowerUsage", device, &power);
      SleepMs(1);
    }
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      uint32_t power = 0;
      SleepMs(6);
      _exit(Call("nvmlDeviceGetPowerUsage", device, &power) == nvml::kSuccess && Name(device) == "gpu 0" ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  stop.store(true);
  busy.join();
}

TEST_F(NvmlLibrary, NonsenseIsAnErrorAndNoMore) {
  std::atomic<int> kind{-1};
  const FakeServer::Reply good = GoodServer("gpu ");
  FakeServer server(path_, [&](const Question& question, std::string* body) -> uint32_t {
    Answer answer;
    answer.result = nvml::kSuccess;
    switch (kind.load()) {
      case 0:
        return 0;  // hangs up
      case 1:
        *body = "\xff\xff\xff";
        return kAnswer;
      case 2:
        answer.output = std::string(3, 'x');  // too short for every result
        return Say(body, answer);
      case 3:
        answer.output = std::string(nvml::kMaxOutputBytes, 'x');  // far too long
        return Say(body, answer);
      case 4:
        answer.output = std::string(nvml::kMaxOutputBytes + 1, 'x');
        return Say(body, answer);
      case 5:
        *body = std::string(60000, 'w');
        return uint32_t(PacketType::kWelcome);
      case 6:
        answer.output = std::string("a\0b", 3);
        return Say(body, answer);
      case 7:
        answer.result = -12345;
        answer.output = "left over";
        return Say(body, answer);
    }
    return good(question, body);
  });
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  void* const device = Device(0);
  for (int now = 0; now < 8; ++now) {
    kind.store(now);
    SleepMs(10);
    uint32_t guarded[3] = {0xabababab, 0xabababab, 0xabababab};
    EXPECT_NE(Call("nvmlDeviceGetPowerUsage", device, &guarded[1]), nvml::kSuccess) << now;
    for (const uint32_t word : guarded) EXPECT_EQ(word, 0xabababab) << now;
    nvml::Memory memory = {1, 2, 3};
    EXPECT_NE(Call("nvmlDeviceGetMemoryInfo", device, &memory), nvml::kSuccess) << now;
    EXPECT_EQ(memory.total, 1u);
    uint32_t count = 2;
    nvml::ProcessInfo infos[2] = {};
    EXPECT_NE((Call<void*, uint32_t*, void*>("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, infos)),
              nvml::kSuccess)
        << now;
    EXPECT_EQ(infos[0].pid, 0u);
    nvml::FieldValue value = {1, 2, 3, 4, 5, 6, 7};
    EXPECT_NE((Call<void*, int, void*>("nvmlDeviceGetFieldValues", device, 1, &value)), nvml::kSuccess) << now;
    EXPECT_EQ(value.value, 7u);
    uint64_t cpus[2] = {9, 9};
    EXPECT_NE((Call<void*, uint32_t, void*>("nvmlDeviceGetCpuAffinity", device, 2, cpus)), nvml::kSuccess) << now;
    EXPECT_EQ(cpus[1], 9u);
  }
  kind.store(-1);
  SleepMs(10);
  uint32_t power = 0;
  EXPECT_EQ(Call("nvmlDeviceGetPowerUsage", device, &power), nvml::kSuccess) << "and it goes on afterwards";
}

// nvidia-smi's table, as nvidia-smi uses it: the first word is its size, then come the entries.
class NvmlTable : public NvmlLibrary {
 protected:
  static constexpr uint8_t kId[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
                                      0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};
  struct Process {
    uint32_t pid;
    uint64_t used_bytes;
    uint32_t gpu_instance, compute_instance;
    uint64_t unknown;
    char name[4096];
  };
  static_assert(sizeof(Process) == 4128);

  const uintptr_t* Table() {
    const void* table = nullptr;
    EXPECT_EQ((Call<const void**, const uint8_t*>("nvmlInternalGetExportTable", &table, kId)), nvml::kSuccess);
    return static_cast<const uintptr_t*>(table);
  }
  template <typename... Arguments>
  int Entry(size_t number, Arguments... arguments) {
    const uintptr_t* const table = Table();
    if (!table || table[0] <= number * sizeof(*table) || table[number] == 0) return -1;
    return reinterpret_cast<int (*)(Arguments...)>(table[number])(arguments...);
  }
};

TEST_F(NvmlTable, IsFoundByItsIdentifierOnly) {
  const uintptr_t* const table = Table();
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(table, Table());
  ASSERT_EQ(table[0], 264 * sizeof(*table));
  for (size_t i = 1; i < 264; ++i) EXPECT_NE(table[i], 0u) << i;
  FakeServer server(path_, GoodServer("gpu "));
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  uint8_t other[16] = {};
  for (size_t i = 0; i < 16; ++i) {
    memcpy(other, kId, sizeof(other));
    other[i] ^= 1;
    const void* found = this;
    EXPECT_EQ((Call<const void**, const uint8_t*>("nvmlInternalGetExportTable", &found, other)), nvml::kNotSupported);
    EXPECT_EQ(found, nullptr);
  }
  EXPECT_EQ((Call<const void**, const uint8_t*>("nvmlInternalGetExportTable", nullptr, kId)), nvml::kInvalidArgument);
}

TEST_F(NvmlTable, EntriesThatAreNotHereSayTheirNumber) {
  // In a process of its own, because the setting is looked at once.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto ask = [this] {
    setenv("CUDA_REMOTE_NVML_LOG", "1", 1);
    bool good = Entry(72) == nvml::kUninitialized;
    {
      FakeServer server(path_, GoodServer("gpu "));
      good &= Call("nvmlInit_v2") == nvml::kSuccess;
      good &= Entry<void*, void*>(72, Device(0), &good) == nvml::kNotSupported;
      good &= Entry(263) == nvml::kNotSupported;
      good &= Entry(264) == -1;
    }
    TearDown();
    _exit(good ? 0 : 1);
  };
  EXPECT_EXIT(ask(), ::testing::ExitedWithCode(0),
              "entry 72 of nvidia-smi's table is not supported\ncuda-remote NVML: entry 263 of nvidia-smi's table");
}

TEST_F(NvmlTable, ListsProcessesWithTheirNames) {
  FakeServer server(path_, [](const Question& question, std::string* body) {
    Answer answer;
    answer.result = nvml::kSuccess;
    const auto put = [&](uint32_t pid, uint64_t bytes) {
      const nvml::ProcessInfo info = {pid, bytes, 7, nvml::kNoInstance};
      answer.output.append(reinterpret_cast<const char*>(&info), sizeof(info));
    };
    if (question.call == nvml::kCount) {
      const uint32_t two = 2;
      answer.output.assign(reinterpret_cast<const char*>(&two), sizeof(two));
    } else if (question.call == nvml::kComputeProcesses) {
      put(3000000001, 1000);
      put(3000000002, 2000);
    } else if (question.call == nvml::kGraphicsProcesses) {
      put(3000000003, 3000);
    } else if (question.call == nvml::kProcessName && question.a == 3000000002) {
      answer.output = "/bin/trainer";
    } else if (question.call != nvml::kMpsProcesses) {
      answer.result = nvml::kNotFound;
    }
    return Say(body, answer);
  });
  std::vector<Process> list(4);
  uint32_t count = 4;
  EXPECT_EQ(Entry(213, static_cast<void*>(nullptr), &count, list.data()), nvml::kUninitialized);
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  void* const device = Device(0);
  memset(list.data(), 0x55, list.size() * sizeof(Process));
  ASSERT_EQ(Entry(213, device, &count, list.data()), nvml::kSuccess);
  ASSERT_EQ(count, 2u);
  EXPECT_EQ(list[0].pid, 3000000001u);
  EXPECT_STREQ(list[0].name, "") << "nobody knows it";
  EXPECT_EQ(list[1].pid, 3000000002u);
  EXPECT_EQ(list[1].used_bytes, 2000u);
  EXPECT_EQ(list[1].gpu_instance, 7u);
  EXPECT_EQ(list[1].compute_instance, nvml::kNoInstance);
  EXPECT_STREQ(list[1].name, "/bin/trainer");
  EXPECT_EQ(list[2].pid, 0x55555555u) << "no more than there are";
  count = 1;
  EXPECT_EQ(Entry(213, device, &count, list.data()), nvml::kInsufficientSize);
  EXPECT_EQ(count, 2u);
  count = 0xffffffff;
  EXPECT_EQ(Entry(214, device, &count, list.data()), nvml::kSuccess);
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(list[0].pid, 3000000003u);
  count = 4;
  EXPECT_EQ(Entry(215, device, &count, list.data()), nvml::kSuccess);
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(Entry(213, device, static_cast<uint32_t*>(nullptr), list.data()), nvml::kInvalidArgument);
  EXPECT_EQ(Entry(213, &count, &count, list.data()), nvml::kInvalidArgument) << "no handle";
}

TEST_F(NvmlTable, FindsGpusByTheirAddress) {
  FakeServer server(path_, [](const Question& question, std::string* body) {
    Answer answer;
    answer.result = nvml::kSuccess;
    if (question.call == nvml::kCount) {
      const uint32_t two = 2;
      answer.output.assign(reinterpret_cast<const char*>(&two), sizeof(two));
    } else {
      nvml::PciInfo info = {};
      info.domain = 0x10000;
      info.bus = 0x40 + question.device;
      info.device = 3;
      answer.output.assign(reinterpret_cast<const char*>(&info), sizeof(info));
    }
    return Say(body, answer);
  });
  uint32_t domain, bus, device, function;
  EXPECT_EQ(Entry(75, 0u, &domain, &bus, &device), nvml::kUninitialized);
  ASSERT_EQ(Call("nvmlInit_v2"), nvml::kSuccess);
  EXPECT_EQ(Entry(75, 1u, &domain, &bus, &device), nvml::kSuccess);
  EXPECT_EQ(domain, 0x10000u);
  EXPECT_EQ(bus, 0x41u);
  EXPECT_EQ(device, 3u);
  EXPECT_EQ(Entry(75, 2u, &domain, &bus, &device), nvml::kInvalidArgument);
  const auto parse = [&](const char* text) { return Entry(12, text, &domain, &bus, &device, &function); };
  EXPECT_EQ(parse("0001000A:Cb:1f.7"), nvml::kSuccess);
  EXPECT_EQ(domain, 0x1000au);
  EXPECT_EQ(bus, 0xcbu);
  EXPECT_EQ(device, 0x1fu);
  EXPECT_EQ(function, 7u);
  EXPECT_EQ(parse("c1:02.0"), nvml::kSuccess);
  EXPECT_EQ(domain, 0u);
  EXPECT_EQ(bus, 0xc1u);
  EXPECT_EQ(device, 2u);
  EXPECT_EQ(function, 0u);
  for (const char* bad : {"", ":", "c1:02", "0000:c1:02", "0000:c1:02.0 ", "c1:02.0x", "0:0:0:0.0", "x:y:z.0"}) {
    EXPECT_EQ(parse(bad), nvml::kInvalidArgument) << bad;
  }
}

TEST_F(NvmlTable, NumbersAreTextsAndMessagesGoNowhere) {
  char text[8] = {};
  EXPECT_EQ(Entry(81, 12u, text, 3u), nvml::kSuccess);
  EXPECT_STREQ(text, "12");
  EXPECT_EQ(Entry(81, 12u, text, 2u), nvml::kInsufficientSize);
  EXPECT_EQ(Entry(26, "part", "place", "text"), nvml::kSuccess);
}

TEST_F(NvmlLibrary, ErrorsHaveTexts) {
  const auto text = reinterpret_cast<const char* (*)(int)>(dlsym(Library(), "nvmlErrorString"));
  EXPECT_STREQ(text(nvml::kSuccess), "Success");
  EXPECT_STREQ(text(nvml::kNotSupported), "Not Supported");
  EXPECT_STREQ(text(12345), "Unknown Error");
}

}  // namespace
}  // namespace cuda_remote::client
