// SPDX-License-Identifier: Apache-2.0
// One request to cr-hostd: what all of them have in common. Most start one of root's tools with the user's wishes, and
// follow it until it ends. The files beside this one have one kind of request each.
//
// The process that serves the request has one thread, but for WatchFor's.
#ifndef CUDA_REMOTE_HOST_REQUESTS_HOST_REQUEST_H_
#define CUDA_REMOTE_HOST_REQUESTS_HOST_REQUEST_H_

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/snapshot_engine.h"
#include "checkpoint/job/caller.pb.h"
#include "ckptfmt/image_reader.h"
#include "host/move.pb.h"
#include "host/peer.h"
#include "host/request.pb.h"
#include "host/signature.h"
#include "host/worker.h"

namespace cuda_remote::host {

class HostRequest;
struct Asked;

// Who asks for a tool: a user; or root for another host's cr-hostd, of a job that comes from there (`arrived`) or of a
// part of a job over several hosts (`member`).
enum class Asker { kUser, kMove, kGroup };

// A tool of root's that users may have, and what it accepts of them. Everything else, such as --user, --job-dir and
// --trust-owner, is root's to say.
struct Tool {
  const char* name;
  std::unique_ptr<HostRequest> (*make)(Asked asked);
  const char* program = nullptr;  // null: cr-NAME
  std::set<std::string> flags = {}, values = {};
  std::set<std::string> own = {};  // options that are for cr-hostd
  bool runs_job = false;           // in the foreground until the job ends
  bool takes_image = false;        // reads one
  Asker asker = Asker::kUser;
};
std::string ProgramOf(const Tool& tool);
// Null: there is no such tool.
const Tool* FindTool(const std::string& name);

// A request as it has come, from a peer who may make it.
struct Asked {
  Asked(int its_socket, const Settings& of_hostd, const Key& its_key)
      : socket(its_socket), settings(of_hostd), key(its_key) {}

  int socket;
  const Settings& settings;
  const Key& key;
  const Tool* tool = nullptr;
  Peer peer;
  Request request;
  std::vector<int> fds;  // standard input, output and error, and the working folder
};

// Limits of requests, and what tools and requests exit with.
inline constexpr size_t kMostKept = 10000;
inline constexpr int kExitNotRestarted = 125;  // as cr-restart's
inline constexpr char kCannotRead[] = "cr-hostd cannot read the request";
inline constexpr char kToolHasDied[] = "cr-checkpoint has died";  // of a move
// In a request's folder: an image, or a store of images.
inline constexpr char kImage[] = "/image";
inline constexpr char kImages[] = "/images";

class HostRequest {
 public:
  explicit HostRequest(Asked asked);
  // Removes the request's folder.
  virtual ~HostRequest();

  // If it fails, nothing was started.
  virtual absl::Status Begin() = 0;
  // Until what was started has ended. False: the tool has failed; the exit code of a job is its own.
  virtual bool Serve();
  void LogRefused(const std::string& why) const;
  void Tell(Reply::Kind kind, int value, const std::string& text = {}) const;

 protected:
  // Until the tool has ended. Returns the exit code for the user's tool.
  virtual int Follow() { return FollowTool(); }
  // What a kind of request decides.
  virtual absl::Status TakeOwnOption(const Option& option) { return absl::OkStatus(); }
  virtual void EndArguments() {}
  // What belongs to a step that the tool has announced. Gives the answer, for which the tool waits.
  virtual absl::StatusOr<std::string> Do(checkpoint::Step step);
  // In the child that becomes the tool.
  virtual void SetToolsVariables() const;
  // Whether the tool ends the job if nobody asks for it any more; it is killed then.
  virtual bool EndsWithPeer() const { return true; }
  // Of WatchFor: gives up the work; and whether work that was done counts all the same.
  virtual void CancelWork() {}
  virtual bool CountsWhenCancelled() const { return false; }

  // Steps of Begin.
  absl::Status CheckAccepts() const;
  absl::Status CheckImageIsNamed() const;
  absl::Status MakeJobsFolder();
  absl::Status FindJob();
  // Whose job it is, as another host has vouched for, and this host's cr-hostd has found right.
  absl::Status ActFor(uint32_t user, uint32_t group, const google::protobuf::RepeatedField<uint32_t>& groups);
  absl::Status ActForMember();
  absl::Status MakeSpool();
  absl::Status ListArguments();
  absl::Status StartTool();

  int FollowTool();
  // Does it, and looks meanwhile whether the user's tool gives up, or the one that holds the job has died.
  absl::Status WatchFor(const std::function<absl::Status()>& work);
  // Of a part of a job over several hosts: tells the coordinator of the step, and waits until all parts have reached
  // it.
  absl::Status AwaitOthers(SaveStep step, const std::string& checkpoint, bool restarts);
  void RemoveSpool();
  void Log(const std::string& text) const;
  // One line on the user's standard output.
  void Print(int output, const std::string& line) const;

  const int socket_;
  const Settings& settings_;
  const Key& key_;
  const Tool* const tool_;
  Peer peer_;
  Request request_;
  std::vector<int> fds_;
  std::string job_folder_, image_;
  std::vector<std::string> arguments_;  // of the tool, which is the first
  std::string spool_;                   // this request's folder, in which the tool writes an image or finds one
  int spool_fd_ = -1;
  bool fills_spool_ = false;
  // The tool holds the job until it is told to go on; it waits for others' steps.
  bool holds_ = false, waits_ = false;
  pid_t child_ = 0;
  bool peer_gone_ = false;
  std::atomic<bool> cancelled_{false};

 private:
  [[noreturn]] void BecomeTool(int facts, int announcements, int failure);
  void SilenceJob();
  void PassOn();
  void LookForRoom();
  void AnswerAnnouncement();

  int announcements_ = -1;
  bool full_ = false;
};

// A line of cr-hostd's log: "user 1000 (anna), job train: ..."
std::string LogLine(const checkpoint::Account& account, const std::string& job, const std::string& text);

// What an image says of its job, and of the job's processes.
absl::StatusOr<std::unique_ptr<ckptfmt::ImageReader>> ReadFacts(const std::string& image,
                                                                checkpoint::SavedSummary* saved);

// The kinds of requests, for FindTool's table.
std::unique_ptr<HostRequest> NewPlain(Asked asked);        // plain.cc: cr-run, cr-migrate
std::unique_ptr<HostRequest> NewSave(Asked asked);         // save.cc: cr-checkpoint
std::unique_ptr<HostRequest> NewSavePart(Asked asked);     // save_part.cc
std::unique_ptr<HostRequest> NewRestart(Asked asked);      // restart.cc: cr-restart
std::unique_ptr<HostRequest> NewRestartPart(Asked asked);  // restart_part.cc
std::unique_ptr<HostRequest> NewMove(Asked asked);         // move.cc: cr-migrate --whole
std::unique_ptr<HostRequest> NewArrival(Asked asked);      // arrival.cc
std::unique_ptr<HostRequest> NewGpus(Asked asked);         // arrival.cc
std::unique_ptr<HostRequest> NewGroup(Asked asked);        // group_request.cc: cr-checkpoint and cr-restart --hosts
std::unique_ptr<HostRequest> NewDrain(Asked asked);        // plain.cc: cr-drain
std::unique_ptr<HostRequest> NewHosts(Asked asked);        // hosts.cc: cr-ps --hosts

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_REQUESTS_HOST_REQUEST_H_
