// SPDX-License-Identifier: Apache-2.0
// For tests in which jobs of several processes are saved by CRIU, ended and restored.
//
// Each subject is a function that runs in the job: it starts its processes, says that it is ready (Pause), waits for
// "go" and looks whether everything is as it was. The test's program is the subject's, too: its main() is
// RunTestsOrSubject.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_TESTING_SAVED_TREE_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_TESTING_SAVED_TREE_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/criu_engine.h"
#include "checkpoint/engine/criu/free_numbers.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/job.h"
#include "proto/base/proc.h"

namespace cuda_remote::checkpoint {

inline constexpr char kSubject[] = "--subject";
inline constexpr int kExit = 9;
inline constexpr int kEnd = -7;
inline std::string g_folder;  // of the job, in a subject

[[noreturn]] inline void Fail(int line, const std::string& what) {
  std::ofstream(g_folder + "/failed", std::ios::app)
      << "line " << line << ": " << what << ": " << strerror(errno) << "\n";
  _exit(1);
}

#define MUST(condition)                           \
  do {                                            \
    if (!(condition)) Fail(__LINE__, #condition); \
  } while (0)

inline void Touch(const std::string& name) { std::ofstream(g_folder + "/" + name) << "\n"; }
inline bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// In the process that the test waits for.
inline void Pause() {
  Touch("ready");
  while (!Exists(g_folder + "/go")) usleep(5000);
}

// A child that runs `body`.
inline pid_t Child(const std::function<void()>& body) {
  const pid_t child = fork();
  MUST(child >= 0);
  if (child > 0) return child;
  body();
  _exit(0);
}

inline void Join(pid_t child) {
  int status = -1;
  MUST(waitpid(child, &status, 0) == child);
  MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// A child that, each time it is asked through a socket, does `work` and answers with its result.
class Worker {
 public:
  explicit Worker(const std::function<int(int)>& work, int type = SOCK_STREAM) {
    int ends[2];
    MUST(socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends) == 0);
    child_ = Child([&] {
      close(ends[0]);
      int number;
      while (recv(ends[1], &number, sizeof(number), 0) == sizeof(number) && number != kEnd) {
        number = work(number);
        MUST(send(ends[1], &number, sizeof(number), MSG_NOSIGNAL) == sizeof(number));
      }
    });
    close(ends[1]);
    socket_ = ends[0];
  }
  void Send(int number) { MUST(send(socket_, &number, sizeof(number), MSG_NOSIGNAL) == sizeof(number)); }
  int Receive() {
    int answer = -1;
    MUST(recv(socket_, &answer, sizeof(answer), 0) == sizeof(answer));
    return answer;
  }
  int Ask(int number) {
    Send(number);
    return Receive();
  }
  void End() {
    Send(kEnd);  // children started later have this end, too: closing it would not do
    close(socket_);
    Join(child_);
  }
  pid_t pid() const { return child_; }

 private:
  int socket_;
  pid_t child_;
};

inline std::string Contents(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Saves, ends and restores the processes of a subject.
class SavedTree : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(geteuid(), 0u) << "this test saves and restores processes: run it as root";
    char name[] = "/tmp/tree-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    g_folder = name;
    for (const char* part : {"/image", "/job"}) ASSERT_EQ(mkdir((g_folder + part).c_str(), 0700), 0);
    BlockForwardedSignals();
  }
  void TearDown() override {
    UnblockInChild();
    if (getenv("CR_TEST_KEEP")) return;
    ASSERT_EQ(system(("rm -rf " + g_folder).c_str()), 0);
  }

  void Run(const Plan& plan) {
    int code;
    const absl::StatusOr<Isolated> isolated = StartIsolated(plan, &code);
    ASSERT_TRUE(isolated.ok()) << isolated.status().message() << CriuErrors(g_folder + "/job/engine-restore.log");
    isolated_ = *isolated;
    job_.set_inner_pid(isolated_.inner_pid);
    job_.set_init_pid(isolated_.init);
    job_.set_pid(isolated_.pid);
    job_.set_pid_namespace(PidNamespace(isolated_.init));
  }

  void Start(const std::vector<std::string>& command, bool io_uring = false) {
    Plan plan;
    ASSERT_EQ(CriuEngine().PrepareStart(&plan), absl::OkStatus());
    if (io_uring) plan.withhold_io_uring = false;
    plan.adopt = adopt_;
    plan.command = command;
    for (char** variable = environ; *variable; ++variable) plan.environment.push_back(*variable);
    const int before[] = {fcntl(0, F_DUPFD_CLOEXEC, 10), fcntl(1, F_DUPFD_CLOEXEC, 10), fcntl(2, F_DUPFD_CLOEXEC, 10)};
    const int out = open((g_folder + "/out").c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    fflush(stdout);
    dup2(null, 0);
    dup2(out, 1);
    dup2(out, 2);
    Run(plan);
    for (int fd : {0, 1, 2}) {
      dup2(before[fd], fd);
      close(before[fd]);
    }
    close(out);
    close(null);
  }

  void StartSubject(const std::string& name, bool io_uring = false) {
    Start({ReadLink("/proc/self/exe"), kSubject, name, g_folder}, io_uring);
    for (int i = 0; i < 6000 && !Exists(g_folder + "/ready"); ++i) usleep(10000);
    ASSERT_TRUE(Exists(g_folder + "/ready")) << Contents(g_folder + "/failed");
  }

  // `still`: between the look at the processes and the dump.
  virtual void Save(bool stop, const std::function<absl::Status()>& still = nullptr) {
    ASSERT_EQ(DescribeProcesses(job_, /*close_tcp=*/false, &facts_), absl::OkStatus());
    PageReceiver pages(SavedBytes(job_));
    ASSERT_EQ(DumpProcesses(job_, facts_, g_folder + "/image", g_folder + "/job", stop, still, &pages, &found_),
              absl::OkStatus())
        << LastLines(g_folder + "/job/engine-dump.log");
    ASSERT_EQ(pages.Finish(), absl::OkStatus());
  }

  virtual void Kill() {
    ASSERT_TRUE(KillProcesses(job_));
    WaitForwarding(isolated_.init, true);
    int status;
    ProgramStatus(isolated_, &status);
  }

  virtual void Restore() {
    Plan plan;
    plan.restored_pid = job_.inner_pid();
    plan.own_processes = plan.own_ipc = plan.own_ptys = true;
    const absl::StatusOr<int> free = FreeNumberBeside(g_folder + "/image");
    ASSERT_TRUE(free.ok()) << free.status().message();
    plan.first_pid = *free;
    plan.restorer_output = 2;
    plan.environment = {std::string("PATH=") + getenv("PATH")};
    std::vector<int> opened;
    const std::string image = g_folder + "/image";
    ASSERT_EQ(RestoreCommand(job_, facts_, image, image, g_folder + "/job", -1, &plan.command, &opened),
              absl::OkStatus());
    Run(plan);
    for (int fd : opened) close(fd);
  }

  void Finish(int expected = kExit) {
    Touch("go");
    WaitForwarding(isolated_.init, true);
    int status = -1;
    ASSERT_TRUE(ProgramStatus(isolated_, &status));
    EXPECT_EQ(ExitCode(status), expected) << Contents(g_folder + "/failed") << Contents(g_folder + "/out");
  }

  // The subject is saved twice, restored, and finds all as it was. `meanwhile`: after it has ended.
  void SaveAndRestore(
      const std::string& name, const std::function<void()>& meanwhile = [] {}) {
    ASSERT_NO_FATAL_FAILURE(StartSubject(name));
    for (int i = 0; i < 2; ++i) {
      ASSERT_NO_FATAL_FAILURE(Save(true));
      ASSERT_NO_FATAL_FAILURE(Kill());
      meanwhile();
      ASSERT_NO_FATAL_FAILURE(Restore());
      usleep(100000);
      if (i == 0) EmptyImage();
    }
    Finish();
  }

  void EmptyImage() { ASSERT_EQ(system(("rm -r " + g_folder + "/image/*").c_str()), 0); }

  static std::string LastLines(const std::string& path) {
    const std::string text = Contents(path);
    return text.substr(text.size() > 3000 ? text.size() - 3000 : 0);
  }

  Isolated isolated_;
  Job job_;
  ProcessFacts facts_;
  DumpFacts found_;
  bool adopt_ = false;
};

// What main() of such a test does: the subject that the command line names (kSubject, name, folder), else the tests.
// Returns the exit status.
inline int RunTestsOrSubject(int argc, char** argv, const std::map<std::string, void (*)()>& subjects) {
  if (argc == 4 && strcmp(argv[1], kSubject) == 0) {
    g_folder = argv[3];
    subjects.at(argv[2])();
    return kExit;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_TESTING_SAVED_TREE_H_
