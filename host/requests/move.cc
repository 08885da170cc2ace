// SPDX-License-Identifier: Apache-2.0
// cr-migrate --whole: a job leaves for another host. Root's cr-checkpoint saves it into a store in the request's
// folder, while it runs, as often as it is worth while, and a last time; what is new of each image is sent. The other
// host restarts the job, and only if it runs there it ends here.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "absl/strings/str_join.h"
#include "checkpoint/gpu/modules.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/job.h"
#include "ckptfmt/folder.h"
#include "host/move_rounds.h"
#include "host/move_source.h"
#include "host/requests/host_request.h"
#include "host/wire.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/codec/json.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::host {
namespace {

class MoveAway : public HostRequest {
 public:
  explicit MoveAway(Asked asked) : HostRequest(std::move(asked)) { fills_spool_ = true; }

  absl::Status Begin() override {
    CR_RETURN_IF_ERROR(FindJob());
    CR_RETURN_IF_ERROR(MakeSpool());
    CR_RETURN_IF_ERROR(ListArguments());
    CR_RETURN_IF_ERROR(BeginMove());
    Log("cr-migrate --whole, to " + host_);
    return StartTool();
  }

 private:
  int Follow() override { return FinishMove(FollowTool()); }
  absl::Status TakeOwnOption(const Option& option) override;

  void EndArguments() override {
    arguments_.insert(arguments_.end(), {"--quiet", "--json", "--keep=2", job_folder_, spool_ + kImages});
  }

  void CancelWork() override {
    if (move_) move_->Cancel();
  }

  absl::StatusOr<std::string> Do(checkpoint::Step step) override;
  absl::Status BeginMove();
  absl::Status OpenStreams();
  absl::Status MoveImage();
  absl::Status AnnounceMove(const std::string& image);
  void KeepDoubtful();
  int FinishMove(int code);
  void Report() const;

  std::string host_, server_, output_, error_output_;
  int gpu_ = -1;
  bool json_ = false, quiet_ = false;
  std::unique_ptr<MoveSource> move_;
  checkpoint::Job job_;
  bool last_ = false;  // the tool's last run, after which the job ends here
  bool moved_ = false, doubtful_ = false;
  std::string move_problem_;
  int user_output_ = -1, tool_output_ = -1, tool_errors_ = -1;
  MoveRounds rounds_;
  const Moment begun_ = Now();
};

// What the tool has written to one of its streams.
std::string Said(int fd) {
  std::string text(4000, '\0');
  text.resize(size_t(std::max<ssize_t>(pread(fd, &text[0], text.size(), 0), 0)));
  return text;
}

absl::Status MoveAway::TakeOwnOption(const Option& option) {
  const std::string& name = option.name();
  if (name == "to-host") host_ = option.value();
  if (name == "to") server_ = option.value();
  if (name == "output") output_ = option.value();
  if (name == "error") error_output_ = option.value();
  if (name == "gpu") gpu_ = atoi(option.value().c_str());
  if (name == "json") json_ = true;
  if (name == "quiet") quiet_ = true;
  return absl::OkStatus();
}

// Streams for the tool, whose words are this worker's to say.
absl::Status MoveAway::OpenStreams() {
  fds_ = {open("/dev/null", O_RDWR | O_CLOEXEC), memfd_create("output", MFD_CLOEXEC),
          memfd_create("errors", MFD_CLOEXEC)};
  for (int* const kept : {&tool_output_, &tool_errors_}) {
    if (*kept >= 0) close(*kept);
  }
  tool_output_ = fcntl(fds_[1], F_DUPFD_CLOEXEC, 3);
  tool_errors_ = fcntl(fds_[2], F_DUPFD_CLOEXEC, 3);
  if (fds_[0] >= 0 && tool_output_ >= 0 && tool_errors_ >= 0) return absl::OkStatus();
  return ErrnoStatus("no descriptors");
}

absl::Status MoveAway::BeginMove() {
  if (settings_.tls.empty()) {
    return absl::FailedPreconditionError(
        "this cr-hostd moves no jobs to other hosts: it has no certificate (cr-hostd --tls-cert)");
  }
  if (host_.empty()) return absl::InvalidArgumentError("no host is named (--to-host)");
  CR_ASSIGN_OR_RETURN(job_, checkpoint::ReadJob(job_folder_));
  if (job_.terminal()) {
    return absl::UnimplementedError(
        "the job has a terminal, which cannot go to another host; start it without one (cr-run ... < /dev/null | cat)");
  }
  if (server_.empty() && job_.server().compare(0, 5, "unix:") == 0) {
    return absl::InvalidArgumentError("the job uses the GPU server " + job_.server() +
                                      " of this host; name one for it there with --to");
  }
  if (server_.empty()) server_ = job_.server();
  user_output_ = fcntl(fds_[1], F_DUPFD_CLOEXEC, 3);
  for (const int fd : fds_) close(fd);
  return OpenStreams();
}

std::vector<ckptfmt::DeviceFacts> DevicesOf(const HostGpus& gpus) {
  std::vector<ckptfmt::DeviceFacts> devices;
  for (const HostGpu& gpu : gpus.gpus()) {
    ckptfmt::DeviceFacts& device = devices.emplace_back();
    device.name = gpu.name();
    device.uuid = gpu.uuid();
    device.compute_major = gpu.compute_major();
    device.compute_minor = gpu.compute_minor();
    device.total_memory = gpu.total_memory();
  }
  return devices;
}

// Says what the job needs, before anything is sent.
absl::Status MoveAway::AnnounceMove(const std::string& image) {
  checkpoint::SavedSummary saved;
  CR_ASSIGN_OR_RETURN(const std::unique_ptr<ckptfmt::ImageReader> opened, ReadFacts(image, &saved));
  const ckptfmt::ImageInfo& info = opened->info();
  MoveBegin begin;
  begin.set_version(kVersion);
  std::string id(16, '\0');
  if (getrandom(&id[0], id.size(), 0) != ssize_t(id.size())) return ErrnoStatus("no random numbers");
  begin.set_id(id);
  begin.set_host(info.host);
  begin.set_job(request_.job());
  CR_ASSIGN_OR_RETURN(const checkpoint::Account named, checkpoint::FindAccount(std::to_string(peer_.account.user)));
  begin.mutable_user()->set_id(peer_.account.user);
  begin.mutable_user()->set_name(named.name);
  begin.mutable_user()->set_group(job_.user().group());
  *begin.mutable_user()->mutable_groups() = job_.user().groups();
  begin.set_bytes(opened->sizes().total_bytes);
  begin.set_about_job(job_.SerializeAsString());
  begin.set_kernel(info.needs.kernel);
  begin.set_engine_version(info.needs.engine_version);
  for (const std::string& name : saved.instruction_sets) begin.add_instruction_sets(name);
  for (const std::string& name : saved.kernel_features) begin.add_kernel_features(name);
  std::set<std::string> replaced;
  for (const checkpoint::SavedSummary::Stream& stream : saved.streams) {
    const std::string& other = stream.fd == 1 ? output_ : error_output_;
    if (stream.fd != 0 && !other.empty()) {
      replaced.insert(stream.target);
      continue;
    }
    if (stream.fd == 0 || !stream.stays) continue;
    // As 2>&1 has it.
    if (stream.fd == 2 && replaced.count(stream.target)) continue;
    const char* const option = stream.fd == 1 ? "--output" : "--error";
    return absl::InvalidArgumentError("the job's descriptor " + std::to_string(stream.fd) +
                                      " is a pipe or a terminal, which stays here; name a file of " + host_ +
                                      " for it with " + option);
  }
  for (const ckptfmt::NeededFile& file : info.needs.files) {
    if (!file.kept.empty() || replaced.count(file.path)) continue;
    MovedNeed* const need = begin.add_needs();
    need->set_path(file.path);
    need->set_bytes(file.bytes);
    need->set_build_id(file.build_id);
    need->set_written(file.written);
  }
  begin.set_uses_gpus(!info.processes.empty());
  begin.set_server(server_);
  begin.set_gpu(gpu_);
  *begin.mutable_environment() = request_.environment();
  CR_ASSIGN_OR_RETURN(const MoveChecked checked, move_->Begin(begin));
  std::vector<std::string> missing(checked.missing().begin(), checked.missing().end());
  if (checked.has_gpus()) {
    CR_ASSIGN_OR_RETURN(const std::vector<std::string> refusals,
                        checkpoint::ListRefusals(*opened, DevicesOf(checked.gpus()), host_));
    missing.insert(missing.end(), refusals.begin(), refusals.end());
  }
  for (const std::string& note : checked.notes()) {
    if (!quiet_) Tell(Reply::NOTE, 0, note);
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      host_ + " lacks what the job needs, and nothing was sent: " + absl::StrJoin(missing, "; "));
}

// What has become of the job is not known: then it must not go on here, too. Nothing is lost: the image stays.
void MoveAway::KeepDoubtful() {
  doubtful_ = true;
  const std::string kept = settings_.spool.substr(0, settings_.spool.rfind('/')) + "/doubtful-" +
                           std::to_string(peer_.account.user) + "-" + request_.job() + "-" +
                           spool_.substr(spool_.rfind('-') + 1);
  const bool stays = rename(spool_.c_str(), kept.c_str()) == 0;
  spool_.clear();  // in no case to be removed
  Tell(Reply::NOTE, 0,
       host_ + " was asked to resume the job, and has not answered since. The job has ended on this host. Check on " +
           host_ + " whether it runs (cr-ps). If it does not, root can restart it on this host: cr-restart " +
           (stays ? kept : settings_.spool) + kImages);
}

absl::Status MoveAway::MoveImage() {
  const std::string image = ckptfmt::NewestImageIn(spool_ + kImages);
  CR_ASSIGN_OR_RETURN(const ckptfmt::OpenedFolder folder, ckptfmt::OpenedFolder::Open(image));
  CR_RETURN_IF_ERROR(SignImage(folder, key_, peer_.account.user, PartOf()));
  if (!move_) {
    CR_ASSIGN_OR_RETURN(move_, MoveSource::Open(host_, settings_.tls));
  }
  const uint64_t before = move_->sent_bytes();
  CR_RETURN_IF_ERROR(WatchFor([&] {
    if (rounds_.empty()) CR_RETURN_IF_ERROR(AnnounceMove(image));
    return move_->SendImage(folder);
  }));
  if (!last_) {
    rounds_.Add(move_->sent_bytes() - before);
    return absl::OkStatus();
  }
  MoveRestore restore;
  restore.set_umask(request_.umask());
  restore.set_output(output_);
  restore.set_error(error_output_);
  CR_RETURN_IF_ERROR(WatchFor([&] { return move_->Restore(restore); }));
  // The tool holds the job. Without it, the job may run.
  siginfo_t tool = {};
  if (waitid(P_PID, id_t(child_), &tool, WEXITED | WNOHANG | WNOWAIT) != 0 || tool.si_pid != 0)
    return absl::UnavailableError(kToolHasDied);
  const absl::Status runs = move_->GoOn();
  if (absl::IsUnavailable(runs)) {
    KeepDoubtful();
    return absl::OkStatus();
  }
  moved_ = runs.ok();
  return runs;
}

absl::StatusOr<std::string> MoveAway::Do(checkpoint::Step step) {
  // So the user's cr-run says where the job is.
  if (step == checkpoint::IMAGE_BEGINS) return last_ ? checkpoint::kMovedTo + host_ : std::string();
  if (step != checkpoint::IMAGE_COMPLETE) return HostRequest::Do(step);
  const absl::Status moved = MoveImage();
  if (!moved.ok()) move_problem_ = std::string(moved.message());
  CR_RETURN_IF_ERROR(moved);
  return std::string();
}

void MoveAway::Report() const {
  const std::string said = Said(tool_output_), name = "\"paused_seconds\": ";
  const size_t at = said.find(name);
  const double paused = at == std::string::npos ? 0 : atof(said.c_str() + at + name.size());
  const double seconds = SecondsSince(begun_);
  const uint64_t before = rounds_.total();
  const size_t rounds = rounds_.bytes().size();
  const uint64_t after = move_->sent_bytes() - before;
  settings_.counters->bytes_before += before;
  settings_.counters->bytes_in_pause += after;
  settings_.counters->paused_us += uint64_t(paused * 1e6);
  if (json_) {
    JsonWriter json(JsonWriter::kSpaced);
    json.BeginOutput();
    json.Member("host", host_);
    json.RealMember("seconds", seconds, 3);
    json.RealMember("paused_seconds", paused, 3);
    json.Member("rounds", rounds);
    json.Begin("bytes_before", '[');
    for (const uint64_t bytes : rounds_.bytes()) json.Value(bytes);
    json.End(']');
    json.Member("bytes_in_pause", after);
    json.End('}');
    Print(user_output_, json.text());
  } else if (!quiet_) {
    char text[512];
    snprintf(text, sizeof(text),
             "moved to %s in %.1f s (the job stood still for %.1f s): %s sent while it ran, in %zu round%s, and %s "
             "while it stood still",
             host_.c_str(), seconds, paused, ByteText(double(before)).c_str(), rounds, rounds == 1 ? "" : "s",
             ByteText(double(after)).c_str());
    Tell(Reply::NOTE, 0, text);
  }
}

// After the tool's first run: the others, of which the last one ends the job here, and the report. The exit code for
// the user's tool.
int MoveAway::FinishMove(int code) {
  std::string error = move_problem_;
  while (code == 0 && !cancelled_ && !last_) {
    last_ = !rounds_.NeedsAnother();
    if (last_) arguments_.insert(arguments_.begin() + 1, "--stop");
    // What BecomeTool has added was the child's.
    absl::Status started = OpenStreams();
    if (started.ok()) started = StartTool();
    if (!started.ok()) error = std::string(started.message());
    code = started.ok() ? FollowTool() : 1;
  }
  if (moved_ || doubtful_) {
    // Whatever has become of the tool.
    if (checkpoint::JobIsAlive(job_)) kill(job_.init_pid(), SIGKILL);
    if (doubtful_) {
      Log(host_ + " does not say whether the job has moved there");
      return 1;
    }
    Log("moved to " + host_);
    Report();
    return 0;
  }
  if (error.empty() && move_problem_.empty()) error = cancelled_ ? "interrupted" : Said(tool_errors_);
  if (!move_problem_.empty()) error = move_problem_;
  while (!error.empty() && error.back() == '\n') error.pop_back();
  Log("was not moved to " + host_ + ": " + error);
  Tell(Reply::NOTE, 0,
       request_.job() + " was not moved: " + error +
           (checkpoint::JobIsAlive(job_) ? "; the job continues where it was" : ""));
  return 1;
}

}  // namespace

std::unique_ptr<HostRequest> NewMove(Asked asked) { return std::make_unique<MoveAway>(std::move(asked)); }

}  // namespace cuda_remote::host
