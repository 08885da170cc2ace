// SPDX-License-Identifier: Apache-2.0
// Job folders: how they are made, found and removed.

#include "checkpoint/job/job.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/job/account.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/job_claim.h"
#include "proto/base/unique_fd.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

class JobTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/job-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    setenv("XDG_RUNTIME_DIR", name, 1);
  }
  void TearDown() override { ASSERT_EQ(system(("rm -rf " + folder_).c_str()), 0); }

  Job Some() {
    Job job;
    job.set_name("train");
    job.add_command("./program");
    job.add_command("with \"quotes\"\nand a line");
    job.set_pid(getpid());
    job.set_runner_pid(getppid());
    job.set_gpu(-1);
    return job;
  }

  std::string folder_;
};

TEST_F(JobTest, AbsolutePaths) {
  EXPECT_EQ(Absolute("/a/./b//c/../d/"), "/a/b/d");
  EXPECT_EQ(Absolute("/"), "/");
  EXPECT_EQ(Absolute("/.."), "/");
  char here[4096];
  ASSERT_NE(getcwd(here, sizeof(here)), nullptr);
  EXPECT_EQ(Absolute("x"), std::string(here) + "/x");
}

TEST_F(JobTest, WrittenAndRead) {
  const std::string directory = JobsFolder() + "/train";
  EXPECT_EQ(JobsFolder(), folder_ + "/cuda-remote/jobs");
  ASSERT_EQ(MakeJobFolder(directory), absl::OkStatus());
  struct stat facts;
  ASSERT_EQ(stat(directory.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700u);
  ASSERT_EQ(WriteJob(directory, Some()), absl::OkStatus());
  const absl::StatusOr<Job> job = ReadJob(directory);
  ASSERT_EQ(job.status(), absl::OkStatus());
  EXPECT_EQ(job->command(1), "with \"quotes\"\nand a line");
  EXPECT_EQ(job->SerializeAsString(), Some().SerializeAsString());
}

TEST_F(JobTest, FoundByFolderNameAndPid) {
  const std::string directory = JobsFolder() + "/train";
  ASSERT_EQ(MakeJobFolder(directory), absl::OkStatus());
  ASSERT_EQ(WriteJob(directory, Some()), absl::OkStatus());
  for (const std::string& name :
       {directory, directory + "/", std::string("train"), std::to_string(getpid()), std::to_string(getppid())}) {
    const absl::StatusOr<FoundJob> found = FindJob(name);
    ASSERT_EQ(found.status(), absl::OkStatus()) << name;
    EXPECT_EQ(found->directory, directory) << name;
    EXPECT_EQ(found->job.name(), "train");
  }
  for (const char* name : {"other", "1", "/nowhere/at/all", "", "999999999999999999999"}) {
    const absl::Status none = FindJob(name).status();
    EXPECT_EQ(none.code(), absl::StatusCode::kNotFound) << name << ": " << none;
    EXPECT_NE(none.message(), "") << name;
  }
}

TEST_F(JobTest, FoundWhileItBegins) {
  const std::string directory = folder_ + "/begins";
  ASSERT_EQ(mkdir(directory.c_str(), 0700), 0);
  std::thread begins([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    Job made;
    made.set_name("begins");
    EXPECT_EQ(WriteJob(directory, made), absl::OkStatus());
  });
  // cr-run has not come so far.
  EXPECT_FALSE(FindJob(directory).ok());
  std::ofstream(directory + "/gpu-server") << "server\n";
  const absl::StatusOr<FoundJob> found = FindJob(directory);
  begins.join();
  ASSERT_EQ(found.status(), absl::OkStatus());
  EXPECT_EQ(found->job.name(), "begins");
}

TEST_F(JobTest, DamagedFileIsAnError) {
  const std::string directory = folder_ + "/job";
  ASSERT_EQ(MakeJobFolder(directory), absl::OkStatus());
  std::ofstream(directory + "/job.json") << "{\"name\": ";
  EXPECT_EQ(ReadJob(directory).status(), absl::DataLossError(directory + "/job.json is damaged"));
}

TEST_F(JobTest, FieldsOfANewerVersionAreNoError) {
  Job job;
  EXPECT_TRUE(JobFromJson("{\"name\": \"n\", \"what_comes_later\": [1, {}]}", &job));
  EXPECT_EQ(job.name(), "n");
}

TEST_F(JobTest, FolderThatOthersCouldEnterIsClosed) {
  const std::string directory = folder_ + "/open";
  ASSERT_EQ(mkdir(directory.c_str(), 0777), 0);
  ASSERT_EQ(MakeJobFolder(directory), absl::OkStatus());
  struct stat facts;
  ASSERT_EQ(stat(directory.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700u);
  std::ofstream(folder_ + "/file") << "x";
  EXPECT_FALSE(MakeJobFolder(folder_ + "/file").ok());
  EXPECT_FALSE(MakeJobFolder(folder_ + "/file/below").ok());
}

TEST_F(JobTest, RemovedButForWhatIsNotOurs) {
  const std::string directory = folder_ + "/job";
  ASSERT_EQ(MakeJobFolder(directory), absl::OkStatus());
  ASSERT_EQ(WriteJob(directory, Some()), absl::OkStatus());
  for (const char* name : {"/agent-2.sock", "/relay.sock", "/relay2.sock", "/relay2.server", "/engine-dump.log"})
    std::ofstream(directory + name) << "x";
  std::ofstream(directory + "/mine") << "x";
  RemoveJobFolder(directory);
  EXPECT_EQ(access((directory + "/mine").c_str(), F_OK), 0);
  EXPECT_NE(access((directory + "/job.json").c_str(), F_OK), 0);
  unlink((directory + "/mine").c_str());
  RemoveJobFolder(directory);
  EXPECT_NE(access(directory.c_str(), F_OK), 0);
}

TEST_F(JobTest, StaleFoldersAreRemoved) {
  for (const char* name : {"/dead", "/begun", "/alive", "/claimed", "/mine"}) {
    ASSERT_EQ(MakeJobFolder(JobsFolder() + name), absl::OkStatus());
  }
  Job job = Some();
  ASSERT_EQ(WriteJob(JobsFolder() + "/alive", job), absl::OkStatus());
  job.set_pid(0);
  ASSERT_EQ(WriteJob(JobsFolder() + "/dead", job), absl::OkStatus());
  ASSERT_EQ(WriteJob(JobsFolder() + "/mine", job), absl::OkStatus());
  std::ofstream(JobsFolder() + "/mine/notes") << "x";
  // Whoever has only begun to start a job has its folder locked.
  ASSERT_EQ(ClaimJobFolder(JobsFolder() + "/claimed"), absl::OkStatus());
  const std::vector<std::string> removed = RemoveStaleJobs();
  const auto gone = [&](const std::string& name) { return access((JobsFolder() + name).c_str(), F_OK) != 0; };
  EXPECT_TRUE(gone("/dead"));
  EXPECT_TRUE(gone("/begun"));
  EXPECT_FALSE(gone("/alive"));
  EXPECT_FALSE(gone("/claimed"));
  EXPECT_FALSE(gone("/mine"));
  EXPECT_EQ(removed.size(), 2u);
}

TEST_F(JobTest, OneJobInAFolder) {
  const std::string directory = folder_ + "/job";
  ASSERT_EQ(ClaimJobFolder(directory), absl::OkStatus());
  // Another program: the lock is an open file's.
  EXPECT_EQ(ClaimJobFolder(directory), absl::AlreadyExistsError("another job runs in " + directory + ", or begins to"));
}

// As cr-ps does, and a cr-run that removes what killed jobs have left.
TEST_F(JobTest, WhoLooksAtAFolderKeepsNobodyFromIt) {
  for (const int lock : {LOCK_SH, LOCK_EX}) {
    const std::string own = folder_ + "/job" + std::to_string(lock);
    ASSERT_EQ(MakeJobFolder(own), absl::OkStatus());
    const int look = open(own.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ASSERT_EQ(flock(look, lock), 0);
    std::thread leaves([look] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      close(look);
    });
    EXPECT_EQ(ClaimJobFolder(own), absl::OkStatus());
    leaves.join();
  }
}

TEST_F(JobTest, AnotherProgramInAProcess) {
  int go[2];
  ASSERT_EQ(pipe(go), 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte;
    if (read(go[0], &byte, 1) == 1) execl("/bin/sleep", "sleep", "1000", nullptr);
    _exit(1);
  }
  CudaProcess process{child, child, "test", ProgramMark(child)};
  EXPECT_NE(process.mark, 0u);
  EXPECT_EQ(process.mark, ProgramMark(getpid()));
  EXPECT_FALSE(HasEnded(process));
  ASSERT_EQ(write(go[1], "x", 1), 1);
  close(go[0]);
  close(go[1]);
  EXPECT_TRUE(EndsNow(process));
  EXPECT_TRUE(IsRunning(child));
  // Of one whose memory this user may not see.
  process.mark = 0;
  EXPECT_FALSE(HasEnded(process));
  kill(child, SIGKILL);
  EXPECT_TRUE(EndsNow(process));
  waitpid(child, nullptr, 0);
}

// A debugger holds it where it ends.
TEST_F(JobTest, AProcessThatIsKilledIsEnding) {
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  const CudaProcess process{child, child, "test", 0};
  ASSERT_EQ(ptrace(PTRACE_SEIZE, child, nullptr, PTRACE_O_TRACEEXIT), 0);
  EXPECT_FALSE(IsEnding(process));
  kill(child, SIGKILL);
  int status;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_FALSE(HasEnded(process));
  EXPECT_TRUE(IsEnding(process));
  ASSERT_EQ(ptrace(PTRACE_CONT, child, nullptr, nullptr), 0);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(HasEnded(process));
}

TEST_F(JobTest, AProcessMayHaveAnyName) {
  int named[2];
  ASSERT_EQ(pipe2(named, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_NAME, "a) Z 1\n2) Z 1");
    if (write(named[1], "x", 1) == 1) pause();
    _exit(1);
  }
  char byte;
  ASSERT_EQ(read(named[0], &byte, 1), 1);
  EXPECT_TRUE(IsRunning(child));
  EXPECT_EQ(ParentOf(child), getpid());
  EXPECT_EQ(ProgramMark(child), ProgramMark(getpid()));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  for (const int end : named) close(end);
}

TEST_F(JobTest, AStoppedProcessIsNamed) {
  const pid_t child = fork();
  if (child == 0) {
    while (true) pause();
  }
  const CudaProcess process{child, child, "test", 0};
  EXPECT_EQ(CheckNotStopped(process), absl::OkStatus());
  kill(child, SIGSTOP);
  ASSERT_EQ(waitpid(child, nullptr, WUNTRACED), child);
  const std::string number = std::to_string(child);
  EXPECT_EQ(CheckNotStopped(process),
            absl::FailedPreconditionError("test (PID " + number +
                                          ") is stopped by a signal and answers nobody; let it continue (kill -CONT " +
                                          number + "), and try again"));
  std::thread continues([child] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    kill(child, SIGCONT);
  });
  EXPECT_EQ(CheckNotStopped(process), absl::OkStatus());
  continues.join();
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST_F(JobTest, Liveness) {
  Job job = Some();
  EXPECT_TRUE(JobIsAlive(job));
  EXPECT_NE(PidNamespace(getpid()), 0u);
  job.set_init_pid(getpid());
  job.set_pid_namespace(PidNamespace(getpid()));
  EXPECT_TRUE(JobIsAlive(job));
  // Dead, but its parent has not looked yet.
  const pid_t child = fork();
  if (child == 0) _exit(0);
  siginfo_t ended;
  ASSERT_EQ(waitid(P_PID, id_t(child), &ended, WEXITED | WNOWAIT), 0);
  job.set_init_pid(child);
  EXPECT_FALSE(JobIsAlive(job));
  waitpid(child, nullptr, 0);
  job.set_init_pid(getpid());
  // The number now belongs to another process.
  job.set_pid_namespace(PidNamespace(getpid()) + 1);
  EXPECT_FALSE(JobIsAlive(job));
}

// The job has ended, and its namespace's number is that of a new one, whose processes are not the job's.
TEST_F(JobTest, NoProcessesOfANamespaceThatIsAnothers) {
  Job job = Some();
  job.set_init_pid(getpid());
  job.set_pid_namespace(PidNamespace(getpid()));
  const pid_t other = fork();
  if (other == 0) {
    pause();
    _exit(0);
  }
  const std::vector<int> alive = ProcessesOf(job);
  EXPECT_NE(std::find(alive.begin(), alive.end(), other), alive.end());
  const pid_t init = fork();
  if (init == 0) _exit(0);
  waitpid(init, nullptr, 0);
  job.set_init_pid(init);
  EXPECT_TRUE(ProcessesOf(job).empty());
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
}

// What enters a job's namespace from outside, as CRIU does, is not listed as the job's.
TEST_F(JobTest, StartedProcessesAreThoseOfTheJob) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(unshare(CLONE_NEWPID), 0) << "this test makes a namespace, which needs root";
  // The namespace's first process, which has a child.
  const pid_t init = fork();
  if (init == 0) {
    if (fork() == 0 && write(ends[1], "x", 1) != 1) _exit(1);
    pause();
    _exit(0);
  }
  char byte;
  ASSERT_EQ(read(ends[0], &byte, 1), 1);
  // Processes that this one starts from now on are in the namespace, and not below its first one.
  const pid_t guest = fork();
  if (guest == 0) {
    pause();
    _exit(0);
  }
  Job job = Some();
  job.set_init_pid(init);
  job.set_pid_namespace(PidNamespace(init));
  const std::vector<int> all = ProcessesOf(job), started = StartedProcessesOf(job);
  EXPECT_EQ(all.size(), 2u);
  EXPECT_EQ(std::count(all.begin(), all.end(), guest), 1);
  EXPECT_EQ(started.size(), 1u);
  EXPECT_EQ(std::count(started.begin(), started.end(), guest), 0);
  for (const pid_t one : {guest, init}) {
    kill(one, SIGKILL);
    waitpid(one, nullptr, 0);
  }
  const UniqueFd own(open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(setns(own.get(), CLONE_NEWPID), 0);
  for (const int end : ends) close(end);
}

// cr-trace writes a long timeline, which takes longer than a look.
TEST_F(JobTest, AToolWaitsForThoseThatLook) {
  const std::string directory = folder_ + "/job";
  ASSERT_EQ(MakeJobFolder(directory), absl::OkStatus());
  ASSERT_EQ(JobClaim::Prepare(directory), absl::OkStatus());
  int looks[2], ends[2];
  ASSERT_EQ(pipe(looks) + pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    JobLook look;
    char byte = look.Take(directory).ok() ? 'y' : 'n';
    if (write(looks[1], &byte, 1) != 1 || read(ends[0], &byte, 1) != 1) _exit(1);
    _exit(0);
  }
  char byte;
  ASSERT_EQ(read(looks[0], &byte, 1), 1);
  ASSERT_EQ(byte, 'y');
  // The tool asks each 20 ms whether it is cancelled: 150 times is longer than a look takes.
  int asked = 0;
  JobClaim claim;
  const absl::Status taken = claim.Take(directory, "cr-test", [&] {
    if (++asked == 150) {
      EXPECT_EQ(write(ends[1], "x", 1), 1);
    }
    return false;
  });
  EXPECT_EQ(taken, absl::OkStatus());
  EXPECT_GE(asked, 150);
  if (asked < 150) {
    EXPECT_EQ(write(ends[1], "x", 1), 1);
  }
  waitpid(child, nullptr, 0);
  // Who comes then is told which tool is at work.
  const pid_t other = fork();
  if (other == 0) {
    JobLook look;
    _exit(!look.Take(directory).ok() && look.tool() == "cr-test (PID " + std::to_string(getppid()) + ")" ? 0 : 1);
  }
  int status = 1;
  waitpid(other, &status, 0);
  EXPECT_EQ(status, 0);
  for (const int end : {looks[0], looks[1], ends[0], ends[1]}) close(end);
}

TEST_F(JobTest, ServerAndScopeChangeInOneStep) {
  const std::string directory = folder_ + "/job";
  ASSERT_EQ(MakeJobFolder(directory), absl::OkStatus());
  std::string scope, address;
  int gpu = 0;
  ASSERT_EQ(WriteGpuServer(directory, "unix:/one", 3), absl::OkStatus());
  EXPECT_FALSE(ReadSharingScope(directory, &scope));
  const std::string wanted = NewSharingScope();
  ASSERT_EQ(WriteJobServer(directory, "unix:/two", -1, wanted), absl::OkStatus());
  ASSERT_TRUE(ReadSharingScope(directory, &scope));
  EXPECT_EQ(scope, wanted);
  ASSERT_TRUE(ReadGpuServer(directory, &address, &gpu));
  EXPECT_EQ(address, "unix:/two");
  EXPECT_EQ(gpu, -1);
}

TEST_F(JobTest, AccountsByNameOrNumber) {
  const absl::StatusOr<Account> number = FindAccount("4000000000");
  ASSERT_EQ(number.status(), absl::OkStatus());
  EXPECT_EQ(number->user, 4000000000u);
  EXPECT_EQ(number->groups, std::vector<gid_t>{4000000000u});
  const absl::StatusOr<Account> named = FindAccount("nobody");
  ASSERT_EQ(named.status(), absl::OkStatus());
  EXPECT_EQ(named->name, "nobody");
  EXPECT_EQ(FindAccount("no-such-user").status(), absl::NotFoundError("there is no user no-such-user on this machine"));
  EXPECT_EQ(FindAccount("").status(), absl::NotFoundError("there is no user  on this machine"));
  for (const std::string name : {"root", "0", "4294967295"}) {
    EXPECT_EQ(FindAccount(name).status(), absl::InvalidArgumentError("user " + name + " is root: omit --user"));
  }
}

TEST_F(JobTest, AnImagesAccountMustBeTheSameHere) {
  const absl::StatusOr<Account> nobody = FindAccount("nobody");
  ASSERT_EQ(nobody.status(), absl::OkStatus());
  EXPECT_EQ(CheckAccount(*nobody), absl::OkStatus());
  Account other = *nobody;
  other.groups.push_back(4000000000u);
  EXPECT_EQ(CheckAccount(other), absl::PermissionDeniedError("the job has the rights of group 4000000000, of which " +
                                                             NameOf(other) + " is not a member on this host"));
  other = *nobody;
  ++other.user;
  EXPECT_EQ(CheckAccount(other),
            absl::PermissionDeniedError("the job is " + NameOf(other) + "'s, and here nobody has the number " +
                                        std::to_string(nobody->user)));
  other.name = "no-such-user";
  EXPECT_EQ(CheckAccount(other).code(), absl::StatusCode::kNotFound);
  other.user = 0;
  EXPECT_EQ(CheckAccount(other),
            absl::PermissionDeniedError("the image says that it is of another user's job, and that this user is root"));
  other.name.clear();
  EXPECT_FALSE(CheckAccount(other).ok());
  other.user = 4000000000u;
  EXPECT_EQ(CheckAccount(other), absl::OkStatus());
}

// A process that runs `begin` and then waits to be killed.
class Other {
 public:
  explicit Other(const std::function<bool()>& begin) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) {
      const char ok = begin();
      if (write(ready[1], &ok, 1) != 1) _exit(1);
      while (true) pause();
    }
    char ok = 0;
    EXPECT_EQ(read(ready[0], &ok, 1), 1);
    EXPECT_TRUE(ok);
    close(ready[0]);
    close(ready[1]);
  }
  ~Other() { End(); }
  void End() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  std::string Text(const std::string& tool) const { return tool + " (PID " + std::to_string(pid_) + ")"; }

 private:
  pid_t pid_ = 0;
};

// After a move that has failed, whatever root's umask: the job's processes may run as another user.
TEST_F(JobTest, TheFormerServerIsThereForAllProcessesAgain) {
  const std::string directory = folder_ + "/job", server = directory + "/gpu-server";
  ASSERT_EQ(MakeJobFolder(directory), absl::OkStatus());
  ASSERT_EQ(WriteGpuServer(directory, "unix:/before", 0), absl::OkStatus());
  const mode_t before = umask(077);
  {
    const ServerChange change(directory);
    ASSERT_EQ(WriteGpuServer(directory, "unix:/after", 1), absl::OkStatus());
  }
  umask(before);
  EXPECT_EQ(GpuServerOf(directory), "unix:/before");
  struct stat facts;
  ASSERT_EQ(stat(server.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0644u);
}

// cr-ps asks a job's processes which sessions they have, but not while a tool saves them.
TEST_F(JobTest, NobodyLooksAtAClaimedJob) {
  const std::string directory = folder_ + "/job";
  ASSERT_EQ(MakeJobFolder(directory), absl::OkStatus());
  const auto never = [] { return false; };
  const auto look = [&] {
    JobLook one;
    return one.Take(directory);
  };
  // No tool has been there.
  EXPECT_EQ(look(), absl::OkStatus());
  EXPECT_NE(access((directory + "/" + kClaimName).c_str(), F_OK), 0);
  JobClaim mine, other;
  KeeperClaim keeper(KeeperClaim::Whose::kKeeper);
  ASSERT_EQ(mine.Take(directory, "cr-migrate", never), absl::OkStatus());
  mine.Release();
  EXPECT_EQ(look(), absl::OkStatus());
  {
    Other tool([&] { return other.Take(directory, "cr-checkpoint", never).ok(); });
    EXPECT_EQ(look().message(), tool.Text("cr-checkpoint") + " is working on this job; try again when it has ended");
  }
  {
    Other keeps([&] { return keeper.Take(directory); });
    EXPECT_FALSE(look().ok());
  }
  EXPECT_EQ(look(), absl::OkStatus());
  // One looks at a time, and one that claims waits for it, but neither for ever.
  JobLook theirs;
  Other looks([&] { return theirs.Take(directory).ok(); });
  EXPECT_EQ(look().message(), "another tool asks the job's processes; try again");
  int asked = 0;
  const auto end_it = [&] {
    if (++asked == 3) looks.End();
    return false;
  };
  ASSERT_EQ(mine.Take(directory, "cr-migrate", end_it), absl::OkStatus());
  EXPECT_EQ(asked, 3);
  mine.Release();
  JobLook again;
  const Other stays([&] { return again.Take(directory).ok(); });
  ASSERT_EQ(mine.Take(directory, "cr-migrate", never), absl::OkStatus());
  // Also a claim that has not waited to the end keeps others from looking.
  JobLook late;
  const Other tries([&] { return !late.Take(directory).ok(); });
}

TEST_F(JobTest, OneToolAtATime) {
  const std::string directory = folder_ + "/job";
  ASSERT_EQ(MakeJobFolder(directory), absl::OkStatus());
  const auto never = [] { return false; };
  const auto at_once = [] { return true; };
  JobClaim mine, other;
  KeeperClaim keeper(KeeperClaim::Whose::kKeeper), holder(KeeperClaim::Whose::kHolder);
  {
    Other restart([&] { return other.Take(directory, "cr-restart", never).ok(); });
    EXPECT_EQ(mine.Take(directory, "cr-migrate", at_once).message(),
              restart.Text("cr-restart") + " is restarting this job; try again when the job runs");
  }
  Other tool([&] { return other.Take(directory, "cr-checkpoint", never).ok(); });
  EXPECT_EQ(mine.Take(directory, "cr-migrate", at_once).message(),
            tool.Text("cr-checkpoint") + " is working on this job; try again when it has ended");
  Other keeps([&] { return keeper.Take(directory); });
  const std::string killed = tool.Text("cr-checkpoint");
  tool.End();
  // The tool is gone at once; what it had is in good hands.
  EXPECT_EQ(mine.Take(directory, "cr-migrate", at_once).message(),
            killed + " was killed, and the job is being given its GPU sessions back; try again in a moment");
  int looks = 0;
  const auto ends_it = [&] {
    if (++looks == 3) keeps.End();
    return false;
  };
  ASSERT_EQ(mine.Take(directory, "cr-migrate", ends_it), absl::OkStatus());
  EXPECT_EQ(mine.killed(), killed);
  // Its own keeper has what it needs, and so has the job's holder.
  Other own([&] { return keeper.Take(directory); });
  Other holds([&] { return holder.Take(directory); });
  own.End();
  mine.Release();
  const absl::Status kept = mine.Take(directory, "cr-migrate", at_once);
  EXPECT_NE(kept.message().find("the job is being given its GPU sessions back"), absl::string_view::npos) << kept;
  holds.End();
  EXPECT_EQ(mine.Take(directory, "cr-migrate", never), absl::OkStatus());
}

// cr-hostd answers several hosts at a time, which ask for different users.
TEST(Account, IsFoundInSeveralThreads) {
  const std::vector<std::string> names = {"daemon", "bin", "sys", "nobody"};
  std::vector<Account> accounts;
  for (const std::string& name : names) {
    const auto account = FindAccount(name);
    ASSERT_TRUE(account.ok()) << account.status();
    accounts.push_back(*account);
  }
  std::vector<int> wrong(names.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < names.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int look = 0; look < 2000; ++look) {
        const auto found = FindAccount(std::to_string(accounts[i].user));
        const bool right = found.ok() && found->name == names[i] && found->user == accounts[i].user &&
                           found->group == accounts[i].group && found->home == accounts[i].home;
        if (!right) ++wrong[i];
      }
    });
  }
  for (std::thread& one : threads) one.join();
  EXPECT_EQ(wrong, std::vector<int>(names.size(), 0));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
