// SPDX-License-Identifier: Apache-2.0
// Two processes that share GPU memory, pools and events are moved together to new sessions, once and twice.

#include <cuda.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/agent/agent_client.h"
#include "proto/base/testing/value_of.h"
#include "proto/channel/client_channel.h"
#include "proto/channel/handshake.h"
#include "proto/codec/operations.gen.h"
#include "replay/log/log.h"
#include "replay/replayer/channel_target.h"
#include "replay/replayer/replayer.h"
#include "server/driver/driver_table.h"

namespace cuda_remote {
namespace {

using agent::AgentClient;

constexpr char kProduct[] = "tests/matrix/product/";
constexpr size_t kBytes = 3 << 20, kSmall = 4096;
constexpr uint64_t kSequenceGap = uint64_t{1} << 32;  // between the process's requests and the test's

std::string Product(const std::string& name) { return std::string(get_current_dir_name()) + "/" + kProduct + name; }

// --------------------------------------------------------------------------------------------------- in the processes

// The library that the product gives to programs. Loaded in the children alone.
server::DriverTable& Cu() {
  static server::DriverTable* const table =
      new server::DriverTable(ValueOf(server::LoadDriver(Product("libcuda-remote.so"))));
  return *table;
}

#define CU(call)                                                                                             \
  do {                                                                                                       \
    const CUresult cu_result = Cu().call;                                                                    \
    if (cu_result != CUDA_SUCCESS) throw std::runtime_error(#call " returned " + std::to_string(cu_result)); \
  } while (0)

#define MUST(condition)                                                    \
  do {                                                                     \
    if (!(condition)) throw std::runtime_error(#condition " is not true"); \
  } while (0)

struct Keys {
  CUipcMemHandle memory, unopened;
  CUipcEventHandle event;
  CUmemPoolPtrExportData pooled;
};

void SendFds(int socket, const void* data, size_t bytes, const std::vector<int>& fds) {
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  memcpy(CMSG_DATA(head), fds.data(), fds.size() * sizeof(int));
  MUST(sendmsg(socket, &message, 0) == ssize_t(bytes));
  for (const int fd : fds) close(fd);
}

std::vector<int> ReceiveFds(int socket, void* data, size_t bytes, size_t count) {
  iovec part{data, bytes};
  msghdr message{};
  std::vector<char> control(CMSG_SPACE(count * sizeof(int)));
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  MUST(recvmsg(socket, &message, 0) == ssize_t(bytes));
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  MUST(head != nullptr && head->cmsg_len == CMSG_LEN(count * sizeof(int)));
  std::vector<int> fds(count);
  memcpy(fds.data(), CMSG_DATA(head), count * sizeof(int));
  return fds;
}

struct Process {
  int peer;  // the other one
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  size_t granule = 0;
  Keys keys = {};
  CUevent event = nullptr;
  CUmemoryPool pool = nullptr;
  CUdeviceptr memory = 0, unopened = 0, pooled = 0, physical = 0, late = 0, extra = 0;
  int late_fd = -1;

  void Begin() {
    CU(cuInit(0));
    CU(cuDevicePrimaryCtxRetain(&context, 0));
    CU(cuCtxSetCurrent(context));
    CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    const CUmemAllocationProp prop = Prop();
    CU(cuMemGetAllocationGranularity(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  }
  static CUmemAllocationProp Prop() {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    return prop;
  }
  CUdeviceptr Map(CUmemGenericAllocationHandle handle) {
    CUdeviceptr at = 0;
    CU(cuMemAddressReserve(&at, granule, 0, 0, 0));
    CU(cuMemMap(at, granule, 0, handle, 0));
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CU(cuMemSetAccess(at, granule, &access, 1));
    CU(cuMemRelease(handle));
    return at;
  }
  void Fill(CUdeviceptr at, unsigned char value, size_t bytes) {
    if (at == 0) return;
    CU(cuMemsetD8Async(at, value, bytes, stream));
    CU(cuStreamSynchronize(stream));
  }
  void Expect(CUdeviceptr at, unsigned char value, size_t bytes) {
    if (at == 0) return;
    std::string found(bytes, 0);
    CU(cuMemcpyDtoH_v2(&found[0], at, bytes));
    for (size_t i = 0; i < bytes; ++i) {
      if ((unsigned char)(found[i]) == value) continue;
      throw std::runtime_error("byte " + std::to_string(i) + " is " + std::to_string((unsigned char)(found[i])) +
                               " and not " + std::to_string(value));
    }
  }
  // All that is shared, with values from `first` on.
  void FillAll(unsigned char first) {
    Fill(memory, first, kBytes);
    Fill(unopened, first + 1, kSmall);
    Fill(physical, first + 2, granule);
    Fill(pooled, first + 3, kSmall);
    Fill(late, first + 4, granule);
  }
  void ExpectAll(unsigned char first) {
    Expect(memory, first, kBytes);
    Expect(unopened, first + 1, kSmall);
    Expect(physical, first + 2, granule);
    Expect(pooled, first + 3, kSmall);
    Expect(late, first + 4, granule);
  }

  int MakePhysical(CUdeviceptr* at) {
    const CUmemAllocationProp prop = Prop();
    CUmemGenericAllocationHandle handle;
    CU(cuMemCreate(&handle, granule, &prop, 0));
    int fd = -1;
    CU(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    *at = Map(handle);
    return fd;
  }
  CUdeviceptr TakePhysical(int fd) {
    CUmemGenericAllocationHandle handle;
    CU(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(intptr_t(fd)),
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    return Map(handle);
  }

  void Share() {
    Begin();
    CUdeviceptr neighbour;  // small allocations lie in one page
    CU(cuMemAlloc_v2(&memory, kBytes));
    CU(cuMemAlloc_v2(&neighbour, 100));
    CU(cuMemAlloc_v2(&unopened, kSmall));
    CU(cuIpcGetMemHandle(&keys.memory, memory + 512));
    CU(cuIpcGetMemHandle(&keys.unopened, unopened));
    CU(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
    CU(cuIpcGetEventHandle(&keys.event, event));
    CUmemPoolProps props = {};
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CU(cuMemPoolCreate(&pool, &props));
    CU(cuMemAllocFromPoolAsync(&pooled, kSmall, pool, stream));
    CU(cuMemPoolExportPointer(&keys.pooled, pooled));
    std::vector<int> fds(3, -1);
    CU(cuMemPoolExportToShareableHandle(&fds[0], pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    fds[1] = MakePhysical(&physical);
    fds[2] = MakePhysical(&late);
    FillAll(0x10);
    SendFds(peer, &keys, sizeof(keys), fds);
  }
  void Open() {
    Begin();
    // Its own exports come after what it opens, and before: each waits for the other in turn.
    CU(cuMemAlloc_v2(&extra, kSmall));
    CUipcMemHandle own;
    CU(cuIpcGetMemHandle(&own, extra));
    const std::vector<int> fds = ReceiveFds(peer, &keys, sizeof(keys), 3);
    CU(cuIpcOpenMemHandle_v2(&memory, keys.memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    CUdeviceptr again;
    CU(cuIpcOpenMemHandle_v2(&again, keys.memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    MUST(again == memory);
    CU(cuIpcGetMemHandle(&own, extra));
    CU(cuIpcOpenEventHandle(&event, keys.event));
    CU(cuMemPoolImportFromShareableHandle(&pool, reinterpret_cast<void*>(intptr_t(fds[0])),
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    close(fds[0]);
    CU(cuMemPoolImportPointer(&pooled, pool, &keys.pooled));
    physical = TakePhysical(fds[1]);
    late_fd = fds[2];
    MUST(write(peer, &own, sizeof(own)) == sizeof(own));
  }
  void OpenExtra() {
    CUipcMemHandle handle;
    MUST(read(peer, &handle, sizeof(handle)) == sizeof(handle));
    CU(cuIpcOpenMemHandle_v2(&extra, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    Fill(extra, 0x99, kSmall);
    // Once more: the record of it must not come behind what was opened since.
    CUipcMemHandle key;
    CU(cuIpcGetMemHandle(&key, memory));
    MUST(memcmp(&key, &keys.memory, sizeof(key)) == 0);
  }
  // The other process has it open still.
  void GiveUpPhysical() {
    CU(cuMemUnmap(physical, granule));
    CU(cuMemAddressFree(physical, granule));
    physical = 0;
  }
  // After the move: what nobody had opened; then every byte.
  void OpenRest() {
    Expect(extra, 0x99, kSmall);
    CU(cuIpcOpenMemHandle_v2(&unopened, keys.unopened, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    late = TakePhysical(late_fd);
    ExpectAll(0x10);
    FillAll(0x20);
    CU(cuEventRecord(event, stream));
  }
  void Look() {
    CU(cuEventSynchronize(event));
    ExpectAll(0x20);
    Expect(extra, 0x99, kSmall);
    FillAll(0x30);
  }
  void LookAtPhysical() { Expect(physical, 0x22, granule); }
  void LookBack() {
    ExpectAll(0x30);
    FillAll(0x40);
  }
  void ShareMore() {
    ExpectAll(0x40);
    CUdeviceptr more;
    CU(cuMemAlloc_v2(&more, kBytes));
    Fill(more, 0x77, kBytes);
    CUipcMemHandle key;
    CU(cuIpcGetMemHandle(&key, more));
    MUST(write(peer, &key, sizeof(key)) == sizeof(key));
  }
  void OpenMore() {
    CUipcMemHandle key;
    CUdeviceptr more;
    MUST(read(peer, &key, sizeof(key)) == sizeof(key));
    CU(cuIpcOpenMemHandle_v2(&more, key, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    Expect(more, 0x77, kBytes);
    CU(cuIpcCloseMemHandle(more));
    // The memory was opened twice.
    CU(cuIpcCloseMemHandle(memory));
    Expect(memory, 0x40, kBytes);
    CU(cuIpcCloseMemHandle(memory));
    MUST(Cu().cuIpcCloseMemHandle(memory) == CUDA_ERROR_INVALID_VALUE);
    CU(cuIpcCloseMemHandle(unopened));
    CU(cuMemFree_v2(pooled));
    CU(cuMemPoolDestroy(pool));
    CU(cuEventDestroy_v2(event));
    for (const CUdeviceptr at : {physical, late}) {
      CU(cuMemUnmap(at, granule));
      CU(cuMemAddressFree(at, granule));
    }
  }
  void CloseExtra() { CU(cuIpcCloseMemHandle(extra)); }
};

using Step = void (Process::*)();

// ------------------------------------------------------------------------------------------------------- in the test

struct Held {
  std::unique_ptr<AgentClient> agent;
  agent::Taken taken;
  std::unique_ptr<ClientChannel> channel, fresh;
  replay::Log log;
};

class SharingTest : public testing::Test {
 protected:
  void SetUp() override {
    // A socket's path must be short.
    std::string pattern = "/tmp/cr-sharing-XXXXXX";
    folder_ = mkdtemp(&pattern[0]);
    server_ = StartServer();
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, between_), 0);
    for (int i = 0; i < 2; ++i) StartProcess(i);
  }
  void TearDown() override {
    for (const pid_t pid : processes_) Kill(pid);
    Kill(server_);
    const std::string command = "rm -rf '" + folder_ + "'";
    EXPECT_EQ(system(command.c_str()), 0);
  }
  static void Kill(pid_t pid) {
    if (pid <= 0) return;
    kill(pid, SIGTERM);
    for (int i = 0; i < 300 && waitpid(pid, nullptr, WNOHANG) == 0; ++i) usleep(10000);
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }

  std::string Socket() const { return folder_ + "/server/session.sock"; }
  std::string JobFolder(int i) const { return folder_ + "/job" + std::to_string(i); }

  pid_t StartServer() {
    mkdir((folder_ + "/server").c_str(), 0700);
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("CUDA_REMOTE_DRIVER", Product("libsoftgpu.so").c_str(), 1);
      execl(Product("cr-server").c_str(), "cr-server", "--dir", (folder_ + "/server").c_str(), nullptr);
      _exit(127);
    }
    // There before it is listened at.
    for (int i = 0; i < 6000 && !ConnectUnix(Socket()).ok(); ++i) usleep(20000);
    return pid;
  }

  void StartProcess(int i) {
    int commands[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, commands), 0);
    mkdir(JobFolder(i).c_str(), 0700);
    processes_[i] = fork();
    if (processes_[i] == 0) {
      close(commands[0]);
      setenv("CUDA_REMOTE_SERVER", ("unix:" + Socket()).c_str(), 1);
      setenv("CUDA_REMOTE_JOB_DIR", JobFolder(i).c_str(), 1);
      Process process{between_[i]};
      Step step;
      while (read(commands[1], &step, sizeof(step)) == sizeof(step)) {
        std::string answer = "ok";
        try {
          (process.*step)();
        } catch (const std::exception& problem) {
          answer = problem.what();
        }
        if (write(commands[1], answer.data(), answer.size()) < 0) _exit(1);
      }
      _exit(0);
    }
    close(commands[1]);
    commands_[i] = commands[0];
  }

  // Has a process do a step, and says how that went.
  std::string Do(int i, Step step) {
    char answer[512];
    if (write(commands_[i], &step, sizeof(step)) != sizeof(step)) return "the process has ended";
    const ssize_t bytes = read(commands_[i], answer, sizeof(answer));
    return bytes > 0 ? std::string(answer, size_t(bytes)) : "the process has ended";
  }

  template <typename Request>
  static std::string Ask(ClientChannel* channel, uint32_t call, const Request& request, std::string_view payload = {},
                         std::string* out = nullptr) {
    std::string message;
    request.Encode(&message);
    FrameHeader header;
    header.call = call;
    Reply reply;
    EXPECT_EQ(channel->Call(header, message, payload, out ? &(*out)[0] : nullptr, out ? out->size() : 0, &reply),
              ChannelStatus::kOk);
    EXPECT_EQ(reply.result, 0u) << call;
    return reply.message;
  }

  static std::string ReadFile(int fd) {
    struct stat facts;
    fstat(fd, &facts);
    std::string bytes(size_t(facts.st_size), 0);
    EXPECT_EQ(pread(fd, &bytes[0], bytes.size(), 0), ssize_t(bytes.size()));
    close(fd);
    return bytes;
  }

  void Hold(std::vector<Held>* held) {
    std::vector<agent::Lockable*> all;
    for (int i = 0; i < 2; ++i) {
      const std::string name = "process " + std::to_string(i);
      (*held)[i].agent = ValueOf(AgentClient::Connect(JobFolder(i), uint32_t(processes_[i]), name));
      all.push_back((*held)[i].agent.get());
    }
    ASSERT_EQ(agent::LockAll(all, {}).status().message(), "");
    for (Held& one : *held) {
      one.taken = ValueOf(one.agent->Take(0));
      one.channel =
          ValueOf(ClientChannel::Adopt(one.taken.fds, one.taken.next_sequence + kSequenceGap, one.taken.welcome));
      one.log = ValueOf(replay::Log::Parse(ReadFile(one.taken.log_fd)));
    }
  }

  // Asks for what is to be saved of one of these processes if all of them are saved.
  static wire::OpRegions_Request Together(const std::vector<Held>& held) {
    wire::OpRegions_Request request;
    for (const Held& one : held) request.sessions.push_back(one.channel->welcome().session);
    return request;
  }

  static void Give(Held* to, const ClientChannel& channel, uint64_t next_sequence, bool new_worker) {
    agent::Given given;
    given.fds = channel.DupFds();
    given.next_sequence = next_sequence;
    given.welcome = channel.welcome();
    given.new_worker = new_worker;
    ASSERT_EQ(to->agent->Give(given).message(), "");
    close(given.fds.socket);
    if (given.fds.ring >= 0) close(given.fds.ring);
  }

  // What cr-migrate does if the second process cannot take its new channel: the first one gives its own back.
  static void GoBack(std::vector<Held>* held) {
    Held& first = (*held)[0];
    ASSERT_NO_FATAL_FAILURE(Give(&first, *first.fresh, first.fresh->next_sequence(), /*new_worker=*/true));
    const agent::Taken dropped = ValueOf(first.agent->Take(0));
    for (const int fd : {dropped.log_fd, dropped.fds.socket, dropped.fds.ring}) close(fd);
    ASSERT_NO_FATAL_FAILURE(Give(&first, *first.channel, first.taken.next_sequence, /*new_worker=*/false));
    for (Held& one : *held) ASSERT_EQ(one.agent->Unlock().message(), "");
  }

  // What cr-migrate does, with both processes at once.
  void Move(bool may_go = true) {
    std::vector<Held> held(2);
    ASSERT_NO_FATAL_FAILURE(Hold(&held));
    const std::string scope = "scope " + std::to_string(++moves_) + std::string(9, '.');
    // The one that opens begins; the other one follows.
    std::vector<std::thread> replays;
    Status results[2];
    for (const int i : {1, 0}) {
      replays.emplace_back([this, i, &held, &results, &scope] {
        Hello hello;
        hello.pid = uint32_t(processes_[i]);
        hello.program = "sharing_test";
        hello.replaying = true;
        Welcome welcome;
        StatusOr<std::unique_ptr<ClientChannel>> fresh = ClientChannel::Connect(Socket(), hello, &welcome);
        results[i] = fresh.status();
        if (!fresh.ok()) return;
        held[i].fresh = *std::move(fresh);
        replay::ChannelTarget target(*held[i].fresh);
        results[i] = replay::ShareIn(scope, target);
        if (!results[i].ok()) return;
        results[i] = replay::Replay(held[i].log, target, nullptr, replay::Part::kBeforePinned);
      });
      usleep(100000);
    }
    for (std::thread& replay : replays) replay.join();
    for (const Status& result : results) ASSERT_EQ(result.message(), "");
    const wire::OpRegions_Request together = Together(held);
    uint64_t bytes = 0;
    for (Held& one : held) {
      const std::string listed = Ask(one.channel.get(), kOpRegions, together);
      wire::OpRegions_Reply regions;
      ASSERT_TRUE(regions.Decode(listed));
      for (const std::string_view refusal : regions.refusals) ADD_FAILURE() << refusal;
      for (const wire::Region& region : regions.regions) {
        std::string content(region.bytes, 0);
        wire::OpReadMemory_Request read;
        read.address = region.address;
        read.bytes = region.bytes;
        read.object = region.object;
        read.symbol = region.symbol;
        read.context = region.context;
        Ask(one.channel.get(), kOpReadMemory, read, {}, &content);
        wire::OpWriteMemory_Request write;
        write.address = region.address;
        write.bytes = region.bytes;
        write.object = region.object;
        write.symbol = region.symbol;
        write.context = region.context;
        Ask(one.fresh.get(), kOpWriteMemory, write, content);
        bytes += region.bytes;
      }
      // One that is not told who else is saved names the other one.
      const std::string alone = Ask(one.channel.get(), kOpRegions, wire::OpRegions_Request());
      ASSERT_TRUE(regions.Decode(alone));
      EXPECT_FALSE(regions.refusals.empty());
    }
    moved_bytes_ = bytes;
    for (Held& one : held) Ask(one.fresh.get(), kOpDrain, wire::OpDrain_Request());
    if (!may_go) return GoBack(&held);
    for (Held& one : held) {
      ASSERT_NO_FATAL_FAILURE(Give(&one, *one.fresh, one.fresh->next_sequence(), /*new_worker=*/true));
      ASSERT_EQ(one.agent->Unlock().message(), "");
    }
  }

  void ShareAndOpen() {
    ASSERT_EQ(Do(0, &Process::Share), "ok");
    ASSERT_EQ(Do(1, &Process::Open), "ok");
    ASSERT_EQ(Do(0, &Process::OpenExtra), "ok");
  }
  void GoOn() {
    ASSERT_EQ(Do(1, &Process::OpenRest), "ok");
    ASSERT_EQ(Do(0, &Process::Look), "ok");
    ASSERT_EQ(Do(1, &Process::LookBack), "ok");
    ASSERT_EQ(Do(0, &Process::ShareMore), "ok");
  }
  void End() {
    ASSERT_EQ(Do(1, &Process::OpenMore), "ok");
    ASSERT_EQ(Do(0, &Process::CloseExtra), "ok");
  }

  std::string folder_;
  pid_t server_ = -1;
  int between_[2];
  pid_t processes_[2] = {-1, -1};
  int commands_[2] = {-1, -1};
  int moves_ = 0;
  uint64_t moved_bytes_ = 0;
};

TEST_F(SharingTest, WithoutAMove) {
  ASSERT_NO_FATAL_FAILURE(ShareAndOpen());
  ASSERT_NO_FATAL_FAILURE(GoOn());
  ASSERT_NO_FATAL_FAILURE(End());
}

TEST_F(SharingTest, MovedTogether) {
  ASSERT_NO_FATAL_FAILURE(ShareAndOpen());
  ASSERT_NO_FATAL_FAILURE(Move());
  // Shared memory is moved once: the two physical pieces, the memory, and four small allocations.
  EXPECT_LT(moved_bytes_, 2 * (size_t(2) << 20) + kBytes + 5 * kSmall);
  ASSERT_NO_FATAL_FAILURE(GoOn());
  ASSERT_NO_FATAL_FAILURE(End());
}

// One of the two could not take its new session: both go on with those that they had, and can move later.
TEST_F(SharingTest, GoesBackTogether) {
  ASSERT_NO_FATAL_FAILURE(ShareAndOpen());
  ASSERT_NO_FATAL_FAILURE(Move(/*may_go=*/false));
  ASSERT_NO_FATAL_FAILURE(GoOn());
  ASSERT_NO_FATAL_FAILURE(Move());
  ASSERT_NO_FATAL_FAILURE(End());
}

// Physical memory lives for as long as anybody has it.
// The tools refuse to save the processes then (docs/memory.md), which go on with all that they have.
TEST_F(SharingTest, OwnerHasItNoMore) {
  ASSERT_NO_FATAL_FAILURE(ShareAndOpen());
  ASSERT_EQ(Do(0, &Process::GiveUpPhysical), "ok");
  std::vector<Held> held(2);
  ASSERT_NO_FATAL_FAILURE(Hold(&held));
  wire::OpRegions_Reply regions;
  std::string answer;
  for (int i = 0; i < 3000 && regions.refusals.empty(); ++i) {
    usleep(10000);
    answer = Ask(held[1].channel.get(), kOpRegions, Together(held));
    ASSERT_TRUE(regions.Decode(answer));
  }
  ASSERT_EQ(regions.refusals.size(), 1u);
  const std::string refusal(regions.refusals[0]);
  EXPECT_NE(refusal.find("shared and no longer has is still in use"), std::string::npos) << refusal;
  for (Held& one : held) ASSERT_EQ(one.agent->Unlock().message(), "");
  ASSERT_EQ(Do(1, &Process::OpenRest), "ok");
  ASSERT_EQ(Do(0, &Process::Look), "ok");
  ASSERT_EQ(Do(1, &Process::LookAtPhysical), "ok");
}

TEST_F(SharingTest, MovedAgain) {
  ASSERT_NO_FATAL_FAILURE(ShareAndOpen());
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(Move());
  ASSERT_NO_FATAL_FAILURE(GoOn());
  ASSERT_NO_FATAL_FAILURE(Move());
  ASSERT_NO_FATAL_FAILURE(End());
}

}  // namespace
}  // namespace cuda_remote
