// SPDX-License-Identifier: Apache-2.0
// What saves and restores the processes of a job. CRIU is one engine (criu/); nothing outside of an engine's folder
// knows its files, options or processes, nor its name, and no message does. Tests have one that saves nothing
// (testing/fake_engine.h).
//
// An engine saves all processes of a job at one moment, whether they use CUDA or not. It is called while those that do
// have let go of their GPU sessions (JobProcess::Release), so that it meets ordinary processes.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_SNAPSHOT_ENGINE_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_SNAPSHOT_ENGINE_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/isolation/terminal.h"
#include "checkpoint/job/job.h"
#include "ckptfmt/types.h"

namespace cuda_remote::checkpoint {

// What an engine can do: the tools say what they can do with it, and refuse the rest.
struct EngineCapabilities {
  bool needs_root = false;
  bool keeps_tcp = false;      // of a job with an address of its own, connections with other machines go on
  bool several_hosts = false;  // a job's parts on several hosts can be saved at one moment (OnStill)
};

// What others must know of saved processes, such as a host that they are to go to.
struct SavedSummary {
  struct Stream {
    int fd = 0;          // a standard one of the job's program
    std::string target;  // the file, or what the kernel calls it
    bool stays = false;  // a pipe or a terminal, at whose other end nobody is on another host, or later
  };
  std::vector<Stream> streams;
  std::vector<std::string> instruction_sets;  // that they may use (instruction_sets.h); none: not known
  std::vector<std::string> kernel_features;   // that they use, for MissingFeatures; none: not known
};

// How a job is to be saved.
struct SaveOptions {
  // Connections with processes outside the job are closed after a restart; else such a job is not saved.
  bool close_tcp = false;
  // Asked while the engine's own processes, which may be a user's, are awaited: whether to give up. Null: never.
  std::function<bool()> cancelled;
};

// How a job is to be restored.
struct RestoreOptions {
  // Another file for a standard stream: descriptor, path, and where the job continues in it.
  struct Output {
    int fd = 1;
    std::string path;
    uint64_t position = 0;
  };
  std::vector<Output> outputs;
  // Files that have grown since the checkpoint are cut back to their length then: those of the job's own
  // (Job::outputs), and these.
  bool cut_back = false;
  std::vector<std::string> cut;
  const ckptfmt::Needs* needs = nullptr;  // what the image says that it needs
  std::function<bool()> cancelled;
  std::function<void(const std::string&)> say;  // a sentence for the person who waits
};

// Saved processes on their way back, in a new namespace, beside other work.
class ProcessRestore {
 public:
  // Unless Finish has succeeded, ends the restored processes. They have not run.
  virtual ~ProcessRestore() = default;

  // Waits until the processes are restored, and still held. Fails if that cannot come about; if there is no message
  // then, Finish says why.
  virtual absl::Status AwaitHeld() { return absl::UnimplementedError("these processes cannot be held"); }
  // Waits until the processes are restored, and lets them run.
  virtual absl::StatusOr<Isolated> Finish() = 0;

  // The process that copies the job's terminal to standard output, if there is one; 0 otherwise.
  virtual pid_t copier() const { return 0; }
  // The job's own terminal beside this program's, if there is one; after Finish.
  virtual std::unique_ptr<JobTerminal> TakeTerminal() { return nullptr; }
};

// An image's processes, as an engine finds them at a restart.
class SavedProcesses {
 public:
  virtual ~SavedProcesses() = default;

  // Checks, before anything is started, that the programs, libraries, files and ports that the processes need are
  // there. Waits for ports that will become free without help.
  virtual absl::Status Check(const RestoreOptions& options) = 0;
  // After Check: files of the image's that the processes need no more, since their streams go elsewhere
  // (RestoreOptions::outputs).
  virtual std::vector<std::string> Exchanged() const { return {}; }
  // Whether Begin changes files that are there (RestoreOptions::cut_back): then it comes after all that can fail.
  virtual bool ChangesFiles() const = 0;
  // Starts the restore and does not wait for it. The caller must have one thread only. `directory`: the job's new
  // folder, which the job sees at the place of its old one; `mounts`: other files that it sees (stand_ins.h);
  // `network`: the network namespace of a job with an address of its own (job/network.h), which must be silent until
  // AwaitHeld has returned; -1: this program's.
  virtual absl::StatusOr<std::unique_ptr<ProcessRestore>> Begin(const std::string& directory, std::vector<Mount> mounts,
                                                                int network) = 0;
};

class SnapshotEngine {
 public:
  virtual ~SnapshotEngine() = default;

  // In lower case, as the image's manifest has it.
  virtual std::string Name() const = 0;
  virtual EngineCapabilities Capabilities() const = 0;
  // What must be installed for it, for people: a name, and in parentheses how to get it.
  virtual std::string Requirement() const = 0;
  // The environment variables from which it takes settings.
  virtual std::vector<std::string> Environment() const = 0;
  // Where it leaves what it says of a failure: in files whose paths begin so.
  virtual void KeepLogs(const std::string& prefix) = 0;
  // Whether it can work here at all: it is installed, and this user may use it.
  virtual absl::Status CheckUsable() const = 0;
  // Of what it uses here, such as "4.2"; as ckptfmt::Needs::engine_version has it. Empty: not installed, or not known.
  virtual std::string Version() const = 0;

  // Before a job is started, by cr-run: adds to *plan what the job needs from its start so that it can be saved later.
  // Fails if such jobs cannot be saved here; they can be started all the same.
  virtual absl::Status PrepareStart(Plan* plan) = 0;

  // Collects in *facts what an image must record of the job's processes besides their memory. Fails if something cannot
  // be saved, and says what it is, and what to do. Called twice: while the job runs, and again while it is stopped,
  // with the *facts of the first call, since processes may have changed. The image keeps *facts for Open.
  virtual absl::Status Describe(const Job& job, const SaveOptions& options, std::string* facts) = 0;

  // About how many bytes of host memory PrepareDump can use.
  virtual uint64_t PreparedBytes(const Job& job) const { return 0; }
  // Before the job stops for a Dump: makes ready what would take time then, and takes no more than `most_bytes` of host
  // memory for it. May be left out.
  virtual void PrepareDump(const Job& job, uint64_t most_bytes) {}
  // What a Dump calls before it saves anything, once all is at a standstill that may change: the processes of a job
  // with an address of its own stand still, and what they have sent has arrived. If it fails, so does the Dump.
  virtual void OnStill(std::function<absl::Status()> still) {}
  // After a Dump: run on, or stand still until Resume or End.
  enum class After { kRun, kStop };
  // Saves the processes that Describe has seen into `image`, an empty folder. Logs of a failure go to the folder
  // `work`, the job's, where names of an engine's files begin with kEngineFiles (job.h). On failure the processes run
  // on. The contents of their memory may still be on their way then.
  virtual absl::Status Dump(const Job& job, const std::string& facts, const std::string& image, const std::string& work,
                            After after) = 0;
  // Whether what a Dump has failed at passes by itself, such as a connection that was just being made, so that another
  // try soon is worth it.
  virtual bool FailurePasses() const { return false; }
  // After a Dump: waits until all of its files are written. The processes may run on meanwhile, or be ended.
  virtual absl::Status FinishFiles() { return absl::OkStatus(); }
  // After the process that called Dump was killed: waits until what that has started comes to its end. The processes
  // are then as after that Dump, or as after its failure.
  virtual void AwaitDump(const Job& job, const std::string& work, After after) = 0;
  // After a Dump, while the job's processes are as they were then: what a restart needs of a machine besides the image.
  // May add files to it.
  virtual absl::Status ListNeeds(const Job& job, const std::string& facts, const std::string& image,
                                 ckptfmt::Needs* needs) = 0;
  // After a Dump that left them stopped, with its facts: lets them run on, or ends them.
  virtual bool Resume(const Job& job, const std::string& facts) = 0;
  virtual bool End(const Job& job, const std::string& facts) = 0;

  // What of these features (SavedSummary) processes of this user cannot use here, and what the engine itself lacks of
  // the kernel; a sentence each. Call it if CheckUsable says yes.
  virtual std::vector<std::string> MissingFeatures(const std::vector<std::string>& wanted, const Account& user) const {
    return {};
  }
  // What the facts of an image say. Fails if they cannot be understood.
  virtual absl::StatusOr<SavedSummary> Summarize(const std::string& facts) const = 0;

  // The processes in the folder `image`, with the facts of Describe. `job`: as the image has it; outlives the result.
  // Fails if they cannot be understood.
  virtual absl::StatusOr<std::unique_ptr<SavedProcesses>> Open(const Job& job, const std::string& facts,
                                                               const std::string& image) = 0;

  // Begins work that makes later calls faster, in the background. It ends with the returned object. Null: there is
  // none.
  virtual std::shared_ptr<void> BeginUpkeep() { return nullptr; }
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_SNAPSHOT_ENGINE_H_
