// SPDX-License-Identifier: Apache-2.0
// A job's folder: where it is, what is in it, and how a person names a job.
//
//     agent-PID.sock  the checkpoint agent of a process with a GPU session (client/agent); PID as it knows itself
//     user/           of a job that runs as another user (cr-run --user): that user's folder, with agent-PID.sock,
//                     relay*.sock and server/; the rest is root's, and this user may read what its processes need. Of a
//                     user's own job that root's tools can save: the same, as that job is to find it after a restart
//     job.json        Job (job.proto)
//     lib/            libcuda.so.1 and libnvidia-ml.so.1, links to the client library and to our NVML; job, ld.so.cache
//                     (stand_ins.h) and libcuda-remote-preload.so (client/preload), for processes with another
//                     environment
//     gpu-server      which server the job uses now (proto/folder/this_job.h)
//                     and in which scope its sessions share, once it was restarted or moved
//     sharing-scope   that scope, for older client libraries
//     connect.lock    held by whoever connects to that server, and by a tool that keeps others from it
//     tool.lock       held by the tool that works on the job (job_claim.h)
//     engine-*        what the engine that saves and restores the job's processes has there (kEngineFiles)
//     relay*.sock, server/   sockets of the relay or of the job's own server
//     stopped         the image that cr-checkpoint --stop has left, while it ends the job
//
// No state.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_JOB_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_JOB_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/job.pb.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {

// How the names of an engine's files in a job's folder begin.
inline constexpr char kEngineFiles[] = "engine-";

// Exit codes of tools that take a JOB (cr-checkpoint, cr-migrate, cr-trace), besides 0; and what JOB may be, for
// --help.
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitNoJob = 4;
inline constexpr char kWhichJob[] =
    "\nJOB is the job's folder, its name (cr-run --name), or the PID of the program or of its cr-run.\n";

// Where job folders are made: "jobs" in the first of RuntimeFolders (proto/folder).
std::string JobsFolder();
// All folders that may hold jobs of this user: the settings of who started them may have differed.
std::vector<std::string> JobsFolders();

// `path` without links to the current folder in it: absolute, no trailing slash.
std::string Absolute(const std::string& path);

// Makes `directory` and locks it until this process ends, however it ends: that is how others see whether the folder is
// in use. Fails if another program runs or begins a job there.
absl::Status ClaimJobFolder(const std::string& directory);

// Whether somebody has it locked so.
bool IsInUse(const std::string& directory);

// Makes `directory` (mode 0700) and what is missing above it. An existing one must be this user's, and nobody else may
// be able to change it or a folder above it.
absl::Status MakeJobFolder(const std::string& directory);
// Likewise, of a restarted job, the one that it knows and in whose place it sees another. A job that runs may have it:
// then its users' rights stay.
absl::Status MakeShownFolder(const std::string& directory);

// Lets the processes of `account` into this user's job folder, and makes their folder in it. `seen_as`: the job's
// folder as the program knows it. Fails if they cannot enter a folder above it.
absl::Status OpenToUser(const std::string& directory, const std::string& seen_as, const Account& account);

// Makes the folder of sockets in this user's own job folder, where they stay if root restarts the job.
absl::Status MakeSocketFolder(const std::string& directory);

// The libraries of ours that the job's processes load: the client library, our NVML, and the preloaded one.
inline constexpr char kClientLibrary[] = "libcuda-remote.so", kNvmlLibrary[] = "libcuda-remote-nvml.so";
inline constexpr const char* kJobLibraries[] = {kClientLibrary, kNvmlLibrary, kPreloadedLibrary};

// Where the processes of a restarted job find one of these that the image has a copy of.
std::string KeptLibrary(const std::string& directory, const std::string& library);

// Puts links to these libraries, which are beside this program, into the folder lib, by the names that programs look
// for. Returns that folder.
absl::StatusOr<std::string> LinkLibrary(const std::string& directory);

// Writes for the job's processes which server they use from now on, and makes the lock for connecting to it. `address`:
// as in CUDA_REMOTE_SERVER; `gpu`: the only GPU, -1: all.
absl::Status WriteGpuServer(const std::string& directory, const std::string& address, int gpu);

// Writes for processes of the job that have another environment which job they are in (proto/folder/this_job.h).
// `seen_as`: the job's folder as the program sees it.
absl::Status WriteThisJob(const std::string& directory, const std::string& seen_as, const std::string& name);

// As WriteGpuServer, and also writes the scope in which a restarted or moved job shares from now on (replay::ShareIn).
// Both change in one step, which decides a move: processes whose tool is killed then go on where this file says
// (client/agent/agent.h).
absl::Status WriteJobServer(const std::string& directory, const std::string& address, int gpu,
                            const std::string& scope);

// The destructor restores the files that WriteJobServer changes, unless Keep was called.
class ServerChange {
 public:
  explicit ServerChange(std::string directory);
  ~ServerChange();
  ServerChange(const ServerChange&) = delete;
  ServerChange& operator=(const ServerChange&) = delete;
  void Keep() { kept_ = true; }

 private:
  const std::string directory_;
  std::map<std::string, std::string> before_;  // files' contents, by name
  bool kept_ = false;
};

// Leaves word for the job's cr-run that the job was stopped, and is at `where` now.
void NoteStopped(const std::string& directory, const std::string& where);

// A scope for sessions that are opened together (replay::ShareIn): 16 random bytes.
std::string NewSharingScope();

// The address in it; empty if there is none.
std::string GpuServerOf(const std::string& directory);

// Keeps the job's processes from connecting to the GPU server (proto/folder/connection_lock.h): none of them can begin
// to use CUDA, and cuda-remote's NVML asks nothing. The destructor releases it, and so does the end of this process.
class ConnectionPause {
 public:
  ConnectionPause() = default;
  ~ConnectionPause() { Release(); }
  ConnectionPause(const ConnectionPause&) = delete;
  ConnectionPause& operator=(const ConnectionPause&) = delete;
  // Waits until sessions that are being opened are open and questions are answered, `timeout_ms` at most.
  absl::Status Take(const std::string& directory, int timeout_ms);
  void Release();

 private:
  int fd_ = -1;
};

// Writes and reads job.json. Writing replaces it in one step. Reading fails if another user could have written it,
// because that user could then direct the tool at processes and files of the tool's user.
absl::Status WriteJob(const std::string& directory, const Job& job);
absl::StatusOr<Job> ReadJob(const std::string& directory);

// Whether both were written of the same processes: a job may have ended, and another one begun in its folder.
bool IsSameRun(const Job& job, const Job& other);

// The job as text, for people to read or on one line, and back.
std::string JobToJson(const Job& job, bool one_line);
bool JobFromJson(const std::string& text, Job* job);

struct FoundJob {
  std::string directory;
  Job job;
};

// The jobs in JobsFolders(), also those that have ended without removing their folder.
std::vector<FoundJob> AllJobs();

// The jobs that the cr-hostd with this socket has started for `user`; for all users if that is 0. For root.
std::vector<FoundJob> JobsOfHostd(const std::string& socket, uid_t user);

// Finds the job that a person calls `name`: its folder, the name of one in JobsFolders(), or a PID.
absl::StatusOr<FoundJob> FindJob(const std::string& name);

// The user whose own the job of that name may be, without a look at what its folder says; 0: there is none, or it is
// root's or cr-hostd's. For root's tools (own_job.h).
uid_t OwnerOfJob(const std::string& name);

// Removes the folders of this user's jobs that have ended without doing so: their cr-run was killed. Returns those that
// were removed.
std::vector<std::string> RemoveStaleJobs();

// The processes of the job, as this machine numbers them: those of its namespace but its init, else the program and
// what descends from it.
std::vector<int> ProcessesOf(const Job& job);

// Of a job without an init process: those whose parents have ended, so that they are children of its cr-run or
// cr-restart now, and what descends from them.
std::vector<int> OutlivedProcessesOf(const Job& job);

// Removes what the tools put into the folder, and the folder if nothing else is in it.
void RemoveJobFolder(const std::string& directory);

// The path of a file that belongs to the product, as installed beside this program or in the build tree; empty if it is
// nowhere. `folder`: where the build tree has it, from its root; empty: where the programs and libraries are.
std::string FindCompanion(const std::string& name, const std::string& folder = {});

// A unique inode of a process's PID namespace; 0 if there is no such process.
uint64_t PidNamespace(int pid);

// The number of a process in its own PID namespace; 0 if it has ended.
int InnerPid(int pid);

// Whether a terminal controls it.
bool HasTerminal(int pid);

// A line of /proc/PID/status as its numbers; none if there is no such process or line.
std::vector<uint64_t> StatusNumbers(int pid, const std::string& name, int base);

// The threads of a process, as this machine numbers them; none if it has ended.
std::vector<int> ThreadsOf(int pid);

// The state of a process or thread as in /proc/PID/stat, such as 'T' for one that a signal has stopped; 0 if there is
// none.
char StateOf(int pid);

// Whether a process or thread is there and has not ended, noticed by its parent or not.
bool IsRunning(int pid);

// Tells whether a process still runs the program that it ran before: it has another number after each exec (where the
// kernel has put its stack), and the same one after a restart. 0: this user may not know.
uint64_t ProgramMark(int pid);

// The process that started `pid`, or adopted it; 0 if `pid` is not there.
int ParentOf(int pid);

// Whether the job's processes are still there.
bool JobIsAlive(const Job& job);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_JOB_H_
