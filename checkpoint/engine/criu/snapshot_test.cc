// SPDX-License-Identifier: Apache-2.0
// A program in its namespace is saved by CRIU, ended, and restored elsewhere: with threads, a shared mapping, a
// listening socket, TCP connections, and each kind of standard output. Needs root and a CRIU that works
// (tools/setup-criu).

#include <fcntl.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/criu_engine.h"
#include "checkpoint/engine/criu/free_numbers.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/job.h"
#include "proto/base/proc.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kSubject[] = "--subject";
constexpr int kExit = 9;

// A TCP socket that listens at the loopback interface, at a port of the kernel's choice.
int Listen(sockaddr_in* address) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  *address = {};
  address->sin_family = AF_INET;
  address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(*address);
  if (bind(listener, reinterpret_cast<sockaddr*>(address), length) != 0 || listen(listener, 4) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(address), &length) != 0) {
    return -1;
  }
  return listener;
}

int Connect(const sockaddr_in& address) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  return connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? fd : -1;
}

// A connection of the program's with itself. What was listened at for it stays open.
struct Pair {
  Pair() {
    sockaddr_in address;
    const int listener = Listen(&address);
    near = Connect(address);
    far = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  }
  int near, far;
};

// One in which the kernel holds back what is sent for a while, so that there is something not sent at any time.
struct HeldBack : Pair {
  HeldBack() { Hold(1); }
  void Hold(int on) { setsockopt(near, IPPROTO_TCP, TCP_CORK, &on, sizeof(on)); }
  void Use() {
    ++sent;
    send(near, &sent, sizeof(sent), MSG_NOSIGNAL);
    while (Receive(MSG_DONTWAIT)) {
    }
  }
  bool Receive(int how) {
    int number = 0;
    if (recv(far, &number, sizeof(number), how) != sizeof(number)) return false;
    return number == ++got;
  }
  // Whether everything came, in its order.
  bool End() {
    Hold(0);
    while (got < sent) {
      if (!Receive(MSG_WAITALL)) return false;
    }
    return got == sent;
  }
  int sent = 0, got = 0;
};

// Two of the program's with itself, and one with a port of somebody else's (0: none).
struct Connections : Pair {
  explicit Connections(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(uint16_t(port));
    if (port > 0) other = Connect(address);
  }
  // What a message through each of them has come to.
  std::string Use(int number) {
    int got = -1;
    std::string text = send(near, &number, sizeof(number), MSG_NOSIGNAL) == sizeof(number) &&
                               recv(far, &got, sizeof(got), MSG_WAITALL) == sizeof(got) && got == number
                           ? " self"
                           : " lost";
    if (other >= 0) text += send(other, &number, sizeof(number), MSG_NOSIGNAL) == sizeof(number) ? " other" : " lost";
    held_back.Use();
    return text;
  }
  HeldBack held_back;
  int other = -1;
};

// Memory of all kinds that CRIU may send or not: long mappings with gaps, of all rights, and a short one.
class Memory {
 public:
  Memory() {
    for (Piece& piece : pieces_) {
      void* const memory = mmap(nullptr, piece.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) abort();
      piece.words = static_cast<uint64_t*>(memory);
      madvise(memory, piece.bytes, MADV_NOHUGEPAGE);
      if (piece.named) prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, memory, piece.bytes, "piece");
      ForEach(piece, [](uint64_t* word, uint64_t value) { *word = value; });
      mprotect(memory, piece.bytes, piece.rights);
    }
  }
  // One more page each time.
  void Change(int step) {
    Piece& piece = pieces_[0];
    piece.words[size_t(step) % (piece.bytes / kPage) * kPageWords + 7] = uint64_t(step);
  }
  bool IsRight(int step) {
    bool right = pieces_[0].words[size_t(step) % (pieces_[0].bytes / kPage) * kPageWords + 7] == uint64_t(step);
    for (const Piece& piece : pieces_) {
      if (piece.rights == PROT_NONE) mprotect(piece.words, piece.bytes, PROT_READ);
      ForEach(piece, [&right](const uint64_t* word, uint64_t value) { right = right && *word == value; });
      if (piece.rights == PROT_NONE) mprotect(piece.words, piece.bytes, PROT_NONE);
    }
    return right;
  }
  // Bytes of what has no need of CRIU: two pages of three.
  static constexpr uint64_t kHidden = (size_t{24} + 12) * 2 / 3 << 20;

 private:
  static constexpr size_t kPage = 4096, kPageWords = kPage / sizeof(uint64_t);
  struct Piece {
    size_t bytes;
    int rights;
    bool named;
    uint64_t* words = nullptr;
  };
  // The words that are written at the begin, of two pages of three. The others are zero, or nowhere.
  template <typename Do>
  static void ForEach(const Piece& piece, const Do& action) {
    for (size_t page = 0; page < piece.bytes / kPage; ++page) {
      for (const size_t at : {size_t{0}, kPageWords - 1}) {
        if (page % 3 != 0) action(piece.words + page * kPageWords + at, page << 20 | at | uint64_t{1} << 60);
      }
    }
  }
  Piece pieces_[7] = {{24 << 20, PROT_READ | PROT_WRITE, false},
                      {12 << 20, PROT_READ | PROT_WRITE, true},
                      {8 << 20, PROT_READ, false},
                      {2 << 20, PROT_WRITE, false},
                      {4 << 20, PROT_READ | PROT_EXEC, false},
                      {4 << 20, PROT_NONE, false},
                      {1 << 20, PROT_READ | PROT_WRITE, false}};
};

// The program that is saved: counts on standard output, in a shared mapping, while a thread serves a socket. Before its
// last step it waits until there is a file "go" in `folder`. `port`: see Connections; -1: without them.
int Subject(const char* folder, int steps, int port) {
  static std::string path;
  path = std::string(folder) + "/agent.sock";
  pthread_t thread;
  pthread_create(
      &thread, nullptr,
      [](void*) -> void* {
        const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
        if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || listen(listener, 4) != 0) {
          return nullptr;
        }
        while (true) {
          const int peer = accept(listener, nullptr, nullptr);
          if (peer < 0) continue;
          send(peer, "hello", 5, MSG_NOSIGNAL);
          close(peer);
        }
      },
      nullptr);
  const int memory = memfd_create("arena", MFD_CLOEXEC);
  if (ftruncate(memory, 1 << 20) != 0) return 1;
  auto* const count = static_cast<volatile int*>(mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0));
  const pid_t pid = getpid();
  std::optional<Connections> connections;
  if (port >= 0) connections.emplace(port);
  Memory pieces;
  while (*count < steps) {
    while (*count == steps - 1 && access((std::string(folder) + "/go").c_str(), F_OK) != 0) usleep(5000);
    if (!pieces.IsRight(*count)) {
      printf("the memory is wrong\n");
      return 1;
    }
    *count = *count + 1;
    pieces.Change(*count);
    printf("%d %d%s\n", int(*count), getpid() == pid, connections ? connections->Use(*count).c_str() : "");
    fflush(stdout);
    usleep(20000);
  }
  if (connections) printf("%s\n", connections->held_back.End() ? "all came" : "something was lost");
  return kExit;
}

std::string Contents(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string Expected(int steps, const std::string& behind = "") {
  std::string text;
  for (int i = 1; i <= steps; ++i) text += std::to_string(i) + " 1" + behind + "\n";
  return text;
}

class SnapshotTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(geteuid(), 0u) << "this test saves and restores processes: run it as root";
    char name[] = "/tmp/snapshot-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    for (const char* part : {"/image", "/image2", "/job"}) ASSERT_EQ(mkdir((folder_ + part).c_str(), 0700), 0);
    BlockForwardedSignals();
  }
  void TearDown() override {
    UnblockInChild();
    ASSERT_EQ(system(("rm -rf " + folder_).c_str()), 0);
  }

  // Starts `plan` with standard output at `out`.
  void Start(const Plan& plan, int out, Isolated* isolated) {
    const int before = fcntl(1, F_DUPFD_CLOEXEC, 10);
    fflush(stdout);
    dup2(out, 1);
    int code;
    const absl::StatusOr<Isolated> started = StartIsolated(plan, &code);
    dup2(before, 1);
    close(before);
    ASSERT_TRUE(started.ok()) << started.status().message() << CriuErrors(folder_ + "/job/engine-restore.log");
    *isolated = *started;
  }

  void StartSubject(int steps, int out, int port = -1) {
    Plan plan;
    ASSERT_EQ(CriuEngine().PrepareStart(&plan), absl::OkStatus());
    plan.command = {ReadLink("/proc/self/exe"), kSubject, folder_ + "/job", std::to_string(steps),
                    std::to_string(port)};
    plan.environment = {"A=B"};
    Start(plan, out, &isolated_);
    job_.set_inner_pid(isolated_.inner_pid);
    Describe();
  }

  void Describe() {
    job_.set_init_pid(isolated_.init);
    job_.set_pid(isolated_.pid);
    job_.set_pid_namespace(PidNamespace(isolated_.init));
    ASSERT_GT(job_.pid(), 0);
  }

  void Save(const std::string& image, bool stop) {
    ASSERT_EQ(DescribeProcesses(job_, close_tcp_, &facts_), absl::OkStatus());
    PageReceiver pages(SavedBytes(job_));
    ASSERT_EQ(DumpProcesses(job_, facts_, folder_ + image, folder_ + "/job", stop, nullptr, &pages, &found_),
              absl::OkStatus());
    ASSERT_EQ(pages.Finish(), absl::OkStatus());
    if (MayHide()) {
      EXPECT_GE(pages.hidden_bytes(), Memory::kHidden);
    }
  }

  // Whether CRIU and the kernel have what it takes (criu_preload.cc).
  static bool MayHide() {
    utsname kernel;
    uname(&kernel);
    int major = 0, minor = 0;
    sscanf(kernel.release, "%d.%d", &major, &minor);
    const absl::StatusOr<std::string> criu = FindCriu();
    return (major > 6 || (major == 6 && minor >= 7)) && criu.ok() && atoi(CriuVersion(*criu).c_str()) >= 4;
  }

  void Kill() {
    ASSERT_TRUE(KillProcesses(job_));
    EXPECT_EQ(Wait(), 128 + SIGKILL);
  }

  void Restore(const std::string& image, int out) {
    Plan plan;
    plan.restored_pid = job_.inner_pid();
    plan.own_processes = plan.own_ipc = plan.own_ptys = true;
    const absl::StatusOr<int> free = FreeNumberBeside(folder_ + image);
    ASSERT_TRUE(free.ok()) << free.status().message();
    plan.first_pid = *free;
    plan.restorer_output = 2;
    plan.environment = {std::string("PATH=") + getenv("PATH")};
    const int before = fcntl(1, F_DUPFD_CLOEXEC, 10);
    fflush(stdout);
    dup2(out, 1);
    std::vector<int> opened;
    const absl::Status status =
        RestoreCommand(job_, facts_, folder_ + image, folder_ + image, folder_ + "/job", -1, &plan.command, &opened);
    dup2(before, 1);
    close(before);
    ASSERT_EQ(status, absl::OkStatus());
    Start(plan, out, &isolated_);
    for (int fd : opened) close(fd);
    EXPECT_EQ(isolated_.inner_pid, job_.inner_pid());
    Describe();
  }

  // Lets the program make its last step.
  void Go() { std::ofstream(folder_ + "/job/go"); }

  // Waits until the program has written `more` more lines than `path` has in `before`, or stands before its last step.
  void AwaitLines(const std::string& path, int steps, int more, const std::string& before = "") {
    const auto lines = [](const std::string& text) { return int(std::count(text.begin(), text.end(), '\n')); };
    const int wanted = std::min(lines(before) + more, steps - 1);
    while (lines(Contents(path)) < wanted) {
      ASSERT_EQ(kill(job_.pid(), 0), 0) << "the program has ended: " << Contents(path);
      usleep(5000);
    }
  }

  int Wait() {
    WaitForwarding(isolated_.init, true);
    int status = -1;
    EXPECT_TRUE(ProgramStatus(isolated_, &status));
    return ExitCode(status);
  }

  bool Serves() {
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    strncpy(address.sun_path, (folder_ + "/job/agent.sock").c_str(), sizeof(address.sun_path) - 1);
    char text[8] = {};
    const bool ok = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                    recv(fd, text, sizeof(text), 0) == 5 && strcmp(text, "hello") == 0;
    close(fd);
    return ok;
  }

  std::string folder_;
  Isolated isolated_;
  Job job_;
  ProcessFacts facts_;
  DumpFacts found_;
  bool close_tcp_ = false;
};

TEST_F(SnapshotTest, TwiceWithOutputInAFile) {
  const std::string path = folder_ + "/out";
  const int out = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  StartSubject(60, out);
  close(out);
  AwaitLines(path, 60, 5);
  EXPECT_TRUE(Serves());
  Save("/image", true);
  Kill();
  const std::string before = Contents(path);
  EXPECT_GT(before.size(), 4u);
  usleep(200000);
  EXPECT_EQ(Contents(path), before) << "it went on after the checkpoint";
  Restore("/image", 2);
  EXPECT_TRUE(Serves());
  AwaitLines(path, 60, 5, before);
  Save("/image2", true);
  Kill();
  Restore("/image2", 2);
  EXPECT_TRUE(Serves());
  Go();
  EXPECT_EQ(Wait(), kExit);
  EXPECT_EQ(Contents(path), Expected(60));
}

TEST_F(SnapshotTest, GoesOnAfterASave) {
  const std::string path = folder_ + "/out";
  const int out = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  StartSubject(50, out);
  close(out);
  AwaitLines(path, 50, 3);
  Save("/image", false);
  EXPECT_TRUE(Serves());
  Go();
  EXPECT_EQ(Wait(), kExit);
  EXPECT_EQ(Contents(path), Expected(50));
}

TEST_F(SnapshotTest, StoppedAndContinued) {
  const std::string path = folder_ + "/out";
  const int out = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  StartSubject(50, out);
  close(out);
  AwaitLines(path, 50, 3);
  Save("/image", true);
  EXPECT_TRUE(ContinueProcesses(job_));
  Go();
  EXPECT_EQ(Wait(), kExit);
  EXPECT_EQ(Contents(path), Expected(50));
}

TEST_F(SnapshotTest, OutputInAPipe) {
  int first[2], second[2];
  ASSERT_EQ(pipe2(first, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(second, O_CLOEXEC), 0);
  StartSubject(40, first[1]);
  close(first[1]);
  std::string text;
  char buffer[4096];
  ssize_t got = read(first[0], buffer, sizeof(buffer));
  ASSERT_GT(got, 0);
  text.append(buffer, size_t(got));
  Save("/image", true);
  Kill();
  while ((got = read(first[0], buffer, sizeof(buffer))) > 0) text.append(buffer, size_t(got));
  Restore("/image", second[1]);
  close(second[1]);
  Go();
  EXPECT_EQ(Wait(), kExit);
  while ((got = read(second[0], buffer, sizeof(buffer))) > 0) text.append(buffer, size_t(got));
  EXPECT_EQ(text, Expected(40));
}

TEST_F(SnapshotTest, ConnectionsWithItselfAreKept) {
  const std::string path = folder_ + "/out";
  const int out = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  StartSubject(150, out, 0);
  close(out);
  AwaitLines(path, 150, 5);
  Save("/image", false);
  AwaitLines(path, 150, 5, Contents(path));
  Save("/image2", true);
  EXPECT_TRUE(ContinueProcesses(job_)) << "as after a checkpoint --stop that has failed at last";
  AwaitLines(path, 150, 5, Contents(path));
  ASSERT_EQ(system(("rm -r " + folder_ + "/image2/*").c_str()), 0);
  Save("/image2", true);
  Kill();
  Restore("/image2", 2);
  Go();
  EXPECT_EQ(Wait(), kExit);
  EXPECT_EQ(Contents(path), Expected(150, " self") + "all came\n");
}

TEST_F(SnapshotTest, ConnectionsWithOthersAreRefusedOrClosed) {
  sockaddr_in address;
  const int listener = Listen(&address);
  ASSERT_GE(listener, 0);
  const std::string path = folder_ + "/out";
  const int out = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  StartSubject(120, out, ntohs(address.sin_port));
  close(out);
  const int peer = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  ASSERT_GE(peer, 0);
  AwaitLines(path, 120, 5);
  std::string error(DescribeProcesses(job_, close_tcp_, &facts_).message());
  EXPECT_NE(error.find("-> 127.0.0.1:" + std::to_string(ntohs(address.sin_port)) + ";"), std::string::npos) << error;
  EXPECT_NE(error.find("--tcp-close"), std::string::npos) << error;
  close_tcp_ = true;
  Save("/image", false);
  AwaitLines(path, 120, 5, Contents(path));
  const std::string before = Contents(path);
  EXPECT_EQ(before.find("lost"), std::string::npos) << "the saved job goes on as if nothing had been\n" << before;
  ASSERT_EQ(system(("rm -r " + folder_ + "/image/*").c_str()), 0);
  Save("/image", true);
  Kill();
  Restore("/image", 2);
  Go();
  EXPECT_EQ(Wait(), kExit);
  close(peer);
  close(listener);
  const std::string text = Contents(path), last = "120 1 self lost\nall came\n";
  ASSERT_GT(text.size(), last.size());
  EXPECT_EQ(text.substr(text.size() - last.size()), last) << text;
  EXPECT_EQ(text.compare(0, 9, "1 1 self "), 0) << text;
}

TEST_F(SnapshotTest, EndedJobIsRefused) {
  const int out = open("/dev/null", O_WRONLY | O_CLOEXEC);
  StartSubject(1, out);
  close(out);
  Go();
  EXPECT_EQ(Wait(), kExit);
  std::string error(DescribeProcesses(job_, close_tcp_, &facts_).message());
  EXPECT_NE(error.find("ended"), std::string::npos) << error;
  job_.set_no_checkpoint("it was started with --plain");
  error = std::string(DescribeProcesses(job_, close_tcp_, &facts_).message());
  EXPECT_NE(error.find("--plain"), std::string::npos) << error;
}

}  // namespace
}  // namespace cuda_remote::checkpoint

int main(int argc, char** argv) {
  if (argc == 5 && strcmp(argv[1], cuda_remote::checkpoint::kSubject) == 0)
    return cuda_remote::checkpoint::Subject(argv[2], atoi(argv[3]), atoi(argv[4]));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
