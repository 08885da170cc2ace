// SPDX-License-Identifier: Apache-2.0
// Runs a program in a PID namespace of its own, under a small init process, so that its process numbers can be had
// again wherever a snapshot of it is restored.
//
// The namespace has its own /proc. What else is the job's own, the plan says, which the snapshot engine has completed
// (SnapshotEngine::PrepareStart). Everything else is seen as outside. The init process forwards signals to the program,
// reaps what it leaves behind, and ends with it (which ends whatever is left in the namespace). It ends with the tool
// that started it, too. Needs root.
//
// For single-threaded tools: functions that start something fork.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_ISOLATE_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_ISOLATE_H_

#include <poll.h>
#include <signal.h>
#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/account.h"

namespace cuda_remote::checkpoint {

// A file or folder that is seen at `target`, in whose place it is.
struct Mount {
  std::string source, target;
};

struct Plan {
  std::vector<std::string> command;
  std::vector<std::string> environment;  // NAME=VALUE, all of it

  // Not 0: `command` is a restorer that makes the program with this number appear (in the namespace) and ends with 0
  // then. Its output goes to `restorer_output`.
  pid_t restored_pid = 0;
  int restorer_output = -1;

  // What the engine needs that is to save the program, or that restores it.
  // A PID namespace: the program is to be started with StartIsolated, not StartPlain.
  bool own_processes = false;
  // Where process numbers of the namespace begin, if the kernel allows that; they go up from there. 0: at 2.
  pid_t first_pid = 0;
  bool own_ipc = false;   // an IPC namespace
  bool own_ptys = false;  // pseudo-terminals of its own (own_ptys.h)
  // The program and what it starts can make no io_uring (io_uring.h).
  bool withhold_io_uring = false;
  // Nor MPTCP sockets (mptcp.h).
  bool withhold_mptcp = false;
  // Processes of the job whose parents end become the program's children, and stay in the tree that is saved.
  bool adopt = false;

  // Not empty: this folder is seen as `seen_as` in the namespace, which is a folder of root's, or of the account's
  // (`of_account`): then it is looked for with his rights.
  std::string folder, seen_as;
  bool of_account = false;
  // What else is seen elsewhere. One that cannot be is reported on standard error, and the rest goes on.
  std::vector<Mount> mounts;
  // Not -1: the network namespace that all of it runs in (network.h); else it has the caller's.
  int network = -1;
  // Whom the program runs as; of a restorer: whose rights it has. And the capabilities that it keeps besides.
  std::optional<Account> account;
  std::vector<int> kept_capabilities;
  std::optional<mode_t> umask;  // of the program; none: this tool's
  // What else is to be done in the namespace, by its init, before anything starts there.
  std::function<void()> prepare;

  // Terminals from outside that the program gets (PtyNames).
  std::vector<std::string> outside_ptys;
  // Not -1: the job's own terminal (terminal.h), which controls its session; the init process leads that, so that the
  // program can be stopped. The program gets it as these of its standard streams.
  int terminal = -1;
  std::vector<int> terminal_streams;
  // With restored_pid: the group of processes that had the terminal.
  pid_t terminal_group = 0;
  // With restored_pid: the program was in the group of a shell, and gets one of its own.
  bool own_group = false;
};

struct Isolated {
  pid_t init = 0;       // the init process, to forward signals to; a child of the caller
  pid_t pid = 0;        // the program, seen from outside
  pid_t inner_pid = 0;  // in the namespace
  int report = -1;      // for WaitIsolated
};

// A first_pid at random, for a new job: programs name files and jobs that others see after their process number
// (mpirun), which would otherwise be the same in every job.
pid_t ChooseFirstPid();

// Why a job that this program starts in a user namespace cannot be saved.
extern const char kInUserNamespace[];

// Starts `plan`; returns once the program was executed, or restored. On failure nothing is left, and *code is what a
// shell would return for it (126: cannot be executed, 127: not there, 125: anything else).
// The sentence is empty where a restorer failed, which has written why to its output.
absl::StatusOr<Isolated> StartIsolated(const Plan& plan, int* code);
// The same in two steps, for whoever has something to do meanwhile: either AwaitIsolated or EndIsolated must follow.
absl::StatusOr<Isolated> BeginIsolated(const Plan& plan);
absl::Status AwaitIsolated(Isolated* isolated, int* code);
// Kills all that is in the namespace, and waits for that.
void EndIsolated(Isolated* isolated);

// Whether this user may have mounts of his own, in a user namespace.
bool MayMount();

// Starts it without a PID namespace, as a child of the caller; with plan.mounts, in a user namespace that has them.
// Returns the program's number. On failure *code is as above.
absl::StatusOr<pid_t> StartPlain(const Plan& plan, int* code);

// Blocks the signals that WaitForwarding waits for. Before anything is started, so that none is lost.
void BlockForwardedSignals();
// Whether one of those that ask a program to end has come since.
bool Interrupted();
// Restores what was blocked before, in a child.
void UnblockInChild();

// What WaitForwarding does beside waiting. Each may be empty.
struct Beside {
  // Another child ended.
  std::function<void(pid_t, int)> ended;
  // Other children that end are left for a later call.
  bool leave_others = false;
  // The child was stopped by this signal.
  std::function<void(int)> stopped;
  // What a terminal has sent goes to the child's whole group, as it would there.
  bool to_group = false;
  // A signal came; true: it is dealt with, and is not forwarded.
  std::function<bool(int)> take;
  // Adds descriptors to wait for; returns how many milliseconds to wait at most, -1: no limit.
  std::function<int(std::vector<pollfd>*)> ask;
  // Called after each wait, with those descriptors.
  std::function<void(const std::vector<pollfd>&)> ready;
};

// Waits until `child` ends, forwarding signals to it meanwhile. `terminal_too`: also those that the terminal has sent
// to the whole process group. Returns the wait status.
int WaitForwarding(pid_t child, bool terminal_too, const Beside& beside = {});

// Reads from a namespace whether the program there was stopped since: the number of the signal, 0 if it was not.
int StopOf(const Isolated& isolated);

// Stops this program's process group as the terminal does, and returns when it goes on. False if there is nobody who
// could let it go on.
bool StopOwnGroup();

// Whether everything in the namespace has ended, waiting up to `timeout_ms` for it. WaitForwarding must still follow.
bool HasEnded(const Isolated& isolated, int timeout_ms);

// After init has ended: the program's own wait status. False if init died without telling.
bool ProgramStatus(const Isolated& isolated, int* status);

// What a shell makes of a wait status.
int ExitCode(int status);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_ISOLATE_H_
