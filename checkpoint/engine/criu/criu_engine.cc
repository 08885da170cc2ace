// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/criu_engine.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <google/protobuf/util/json_util.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/criu_facts.h"
#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/criu_restore.h"
#include "checkpoint/engine/criu/needs.h"
#include "checkpoint/engine/criu/open_files.h"
#include "checkpoint/engine/criu/ports.h"
#include "checkpoint/engine/criu/saved_rights.h"
#include "checkpoint/engine/kernel_features.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/isolation/stand_ins.h"
#include "ckptfmt/needs.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/codec/text.h"
#include "proto/errors/annotate.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr size_t kMostMissing = 5;
// How long a restart waits for another program that uses a port of the job: its connection may be a short one.
constexpr std::chrono::seconds kBusyPort(10);
// The same for one that writes to a file of the job, which is ending or goes on for long; and how often to look.
constexpr std::chrono::seconds kBusyFile(5);
constexpr std::chrono::milliseconds kLookAgain(100);

constexpr char kUnreadable[] = "cannot read the image's description of the job's processes";
constexpr char kUnreadableFacts[] = "cannot read the description of the job's processes";

bool IsPipe(const Stdio& stream) { return stream.target().compare(0, 5, "pipe:") == 0; }

// Of a path in the facts: PathToUtf8, or back.
using ChangePath = std::string (*)(std::string_view path);

void ChangePaths(ProcessFacts* facts, ChangePath change) {
  for (Stdio& stream : *facts->mutable_stdio()) stream.set_target(change(stream.target()));
  for (InheritedFile& file : *facts->mutable_files()) file.set_path(change(file.path()));
  for (auto* const files : {facts->mutable_shared_files(), facts->mutable_shared_folders()}) {
    for (FileFacts& file : *files) {
      file.set_path(change(file.path()));
      for (std::string& name : *file.mutable_former()) name = change(name);
    }
  }
}

bool FactsToJson(ProcessFacts facts, std::string* text) {
  ChangePaths(&facts, &PathToUtf8);
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  text->clear();
  return google::protobuf::util::MessageToJsonString(facts, text, options).ok();
}

bool FactsFromJson(const std::string& text, ProcessFacts* facts) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  if (!google::protobuf::util::JsonStringToMessage(text, facts, options).ok()) return false;
  ChangePaths(facts, &PathFromUtf8);
  return true;
}

// Parts of a version as numbers: "6.1.0-amd64" as 6, 1, 0.
std::vector<int> VersionOf(const std::string& text) {
  std::vector<int> parts;
  for (size_t at = 0; at < text.size() && isdigit(static_cast<unsigned char>(text[at]));) {
    size_t length = 0;
    parts.push_back(std::stoi(text.substr(at, 9), &length));
    at += length;
    if (at < text.size() && text[at] == '.') ++at;
  }
  return parts;
}

class CriuProcesses final : public SavedProcesses {
 public:
  CriuProcesses(const Job& job, ProcessFacts facts, std::string image, std::string logs)
      : job_(job), facts_(std::move(facts)), image_(std::move(image)), logs_(std::move(logs)) {}

  absl::Status Check(const RestoreOptions& options) override {
    say_ = options.say;
    // Of a job that runs as another user: CRIU could not give it more, and nobody should have it try.
    const std::optional<Account> account = AccountOf(job_);
    if (account) CR_RETURN_IF_ERROR(CheckSavedRights(image_, *account));
    CR_RETURN_IF_ERROR(GiveOutputs(options));
    if (options.needs) CR_RETURN_IF_ERROR(CheckNeeds(*options.needs, options));
    CR_RETURN_IF_ERROR(CheckFiles(options));
    return CheckPorts(options);
  }

  std::vector<std::string> Exchanged() const override { return {replaced_.begin(), replaced_.end()}; }

  bool ChangesFiles() const override { return !longer_.empty(); }

  absl::StatusOr<std::unique_ptr<ProcessRestore>> Begin(const std::string& directory, std::vector<Mount> mounts,
                                                        int network) override {
    {
      const ActAs user(AccountOf(job_));
      CR_RETURN_IF_ERROR(CutBack(longer_));
    }
    CR_RETURN_IF_ERROR(PutKeptLibraries(image_, directory));
    auto restore =
        std::make_unique<CriuRestore>(job_, facts_, directory, std::move(mounts), logs_, files_image_, network, say_);
    CR_RETURN_IF_ERROR(restore->Begin(image_));
    return restore;
  }

 private:
  // Compares the job's open files with what is there.
  absl::Status CheckFiles(const RestoreOptions& options) {
    std::string bytes, remaps;
    std::vector<SavedFile> files;
    ReadImageFile(image_ + "/remap-fpath.img", &remaps);  // there is none where no file has lost its name
    // An image of a newer CRIU may look otherwise: then CRIU itself finds what differs.
    if (!ReadImageFile(image_ + "/files.img", &bytes) || !ParseFiles(bytes, remaps, facts_, &files))
      return absl::OkStatus();
    // Those that the job gets now are as they are, and its libraries are put there.
    const std::string libraries = job_.directory() + "/lib/";
    const auto is_new = [&](const SavedFile& file) {
      return file.path.compare(0, libraries.size(), libraries) == 0 ||
             std::any_of(options.outputs.begin(), options.outputs.end(),
                         [&](const RestoreOptions::Output& output) { return output.path == file.path; });
    };
    files.erase(std::remove_if(files.begin(), files.end(), is_new), files.end());
    for (SavedFile& file : files) {
      if (access(file.path.c_str(), F_OK) != 0 && SeenByJob(job_, file.path) != file.path) {
        return absl::FailedPreconditionError(
            "a process of the job has loaded " + file.path +
            ", in whose place it saw cuda-remote's library; there is no such file on this machine: restart the job "
            "where the same driver is installed");
      }
      file.path = SeenByJob(job_, file.path);
    }
    CR_RETURN_IF_ERROR(CheckAccess(files));
    CR_ASSIGN_OR_RETURN(longer_, CompareFiles(files));
    const std::set<std::string> own(job_.outputs().begin(), job_.outputs().end());
    for (const SavedFile& file : longer_) {
      const bool is_own = own.count(file.path) != 0;
      const bool named = std::find(options.cut.begin(), options.cut.end(), file.path) != options.cut.end();
      if (named || (is_own && options.cut_back)) continue;
      struct stat now;
      const std::string grown =
          file.path + " has grown since the checkpoint, from " + std::to_string(file.bytes) + " bytes" +
          (stat(file.path.c_str(), &now) == 0 ? " to " + std::to_string(now.st_size) : std::string());
      return absl::FailedPreconditionError(
          grown + (is_own ? ", by what the job wrote; --cut-back takes it back to its length then, --output gives the "
                            "restarted job another file"
                          : ", by the job or by others that write to it; if all of that may go, --cut " + file.path +
                                " takes it back to its length then"));
    }
    return absl::OkStatus();
  }

  // CRIU opens them with the user's rights, and says less when it cannot.
  absl::Status CheckAccess(const std::vector<SavedFile>& files) const {
    const std::optional<Account> account = AccountOf(job_);
    if (!account) return absl::OkStatus();
    const ActAs user(account);
    for (const SavedFile& file : files) {
      if (faccessat(AT_FDCWD, file.path.c_str(), F_OK, AT_EACCESS) == 0 || errno != EACCES) continue;
      return absl::PermissionDeniedError("the image has " + file.path + " open, which " + NameOf(*account) +
                                         " may not reach");
    }
    return absl::OkStatus();
  }

  // The job's streams go to other files than those in the image.
  absl::Status GiveOutputs(const RestoreOptions& options) {
    std::map<std::string, uint64_t> positions;  // by CRIU's name for the file
    std::map<std::string, std::string> paths;   // likewise
    for (const RestoreOptions::Output& output : options.outputs) {
      const auto stream = std::find_if(facts_.stdio().begin(), facts_.stdio().end(),
                                       [&](const Stdio& one) { return one.fd() == output.fd; });
      // A pipe is the tool's own stream from now on, whatever that is.
      if (stream == facts_.stdio().end() || IsPipe(*stream)) continue;
      const auto file = std::find_if(facts_.files().begin(), facts_.files().end(),
                                     [&](const InheritedFile& one) { return one.path() == stream->target(); });
      if (stream->terminal() || file == facts_.files().end()) {
        return absl::FailedPreconditionError(
            "the job's descriptor " + std::to_string(output.fd) + " is " + stream->target() +
            (stream->terminal() ? ", a terminal" : ", which it has opened itself") +
            ", and cannot become a file; restart it without " + (output.fd == 1 ? "--output" : "--error"));
      }
      // Where both streams had one file, the first that is named counts.
      replaced_.insert(file->path());
      positions.emplace(file->id(), output.position);
      paths.emplace(file->id(), output.path);
    }
    for (InheritedFile& file : *facts_.mutable_files()) {
      const auto found = paths.find(file.id());
      if (found != paths.end()) file.set_path(found->second);
    }
    if (positions.empty()) return absl::OkStatus();
    const auto change = [&](std::string_view name, FileChange* wanted) {
      const auto found = positions.find(std::string(name));
      if (found == positions.end()) return false;
      wanted->other = true;
      wanted->position = found->second;
      return true;
    };
    if (ReadImageFile(image_ + "/files.img", &files_image_) && ChangeFiles(&files_image_, change))
      return absl::OkStatus();
    return absl::UnimplementedError(
        "this image was made by a CRIU version whose files cr-restart cannot read; restart it without --output and "
        "--error");
  }

  absl::Status CheckNeeds(const ckptfmt::Needs& all, const RestoreOptions& options) {
    ckptfmt::Needs needs = all;
    needs.files.erase(std::remove_if(needs.files.begin(), needs.files.end(),
                                     [&](const ckptfmt::NeededFile& file) { return replaced_.count(file.path) != 0; }),
                      needs.files.end());
    const std::vector<std::string> missing =
        ckptfmt::MissingHere(needs, [&](const std::string& path) { return SeenByJob(job_, path); });
    if (!missing.empty()) {
      std::string text = "this machine lacks what the image needs: " + missing[0];
      for (size_t i = 1; i < missing.size() && i < kMostMissing; ++i) text += "; " + missing[i];
      if (missing.size() > kMostMissing)
        text += "; and " + std::to_string(missing.size() - kMostMissing) + " more (cr-inspect --files-here)";
      return absl::FailedPreconditionError(text);
    }
    const absl::StatusOr<std::string> criu = FindCriu();
    utsname system;
    if (options.say && criu.ok() && VersionOf(CriuVersion(*criu)) < VersionOf(needs.engine_version)) {
      options.say("the image was made with CRIU " + needs.engine_version + "; here it is " + CriuVersion(*criu) +
                  ", which may not be able to read it");
    }
    if (options.say && uname(&system) == 0 && VersionOf(system.release) < VersionOf(needs.kernel)) {
      options.say("the job was saved on Linux " + needs.kernel + "; here it is " + std::string(system.release) +
                  ", which may lack something that the job uses");
    }
    return CheckWriters(needs, options);
  }

  // Nobody else, such as a second copy of the job, may be writing to its files. A process that is ending, such as one
  // of a cr-restart that was killed a moment ago, gets a while.
  absl::Status CheckWriters(const ckptfmt::Needs& needs, const RestoreOptions& options) {
    const auto give_up = Now() + kBusyFile;
    std::string said;
    for (const ckptfmt::NeededFile& file : needs.files) {
      if (!file.written) continue;
      for (std::string other = OtherWriter(file.path); !other.empty(); other = OtherWriter(file.path)) {
        const std::string what = other + " is writing to " + file.path + ", which this job would write to, too";
        const bool stream = std::any_of(facts_.stdio().begin(), facts_.stdio().end(),
                                        [&](const Stdio& one) { return one.fd() != 0 && one.target() == file.path; });
        if (Now() >= give_up || (options.cancelled && options.cancelled())) {
          return absl::FailedPreconditionError(
              what + ": end that one first" +
              (stream ? ", or give this one another file with --output or --error" : ""));
        }
        if (what != said && options.say) options.say(what + "; waiting for its end");
        said = what;
        std::this_thread::sleep_for(kLookAgain);
      }
    }
    return absl::OkStatus();
  }

  // Sees to it that no connection that ended a moment ago, such as the stopped job's own, holds a port of the job, and
  // gives other programs a while to end. Whether a port can be had beside a socket that is in use is CRIU's to find
  // out.
  absl::Status CheckPorts(const RestoreOptions& options) {
    std::string bytes;
    std::set<TcpEnd> ends;
    if (job_.has_network()) return absl::OkStatus();  // where nobody else has a port
    if (!ReadImageFile(image_ + "/files.img", &bytes) || !SavedPorts(bytes, &ends)) return absl::OkStatus();
    const auto give_up = Now() + kBusyPort;
    std::string said;
    absl::Status status;
    const auto waiting = [&](const HeldPort& held) {
      const std::string port = "TCP port " + std::to_string(held.port);
      const std::string why =
          held.ended ? port + " of the job is held by a connection that has ended; the kernel frees it within a minute"
                     : port + ", which the job needs, is used by " +
                           (held.holder.empty() ? "another program" : held.holder) + "; waiting for its end";
      if (why != said && options.say) options.say(why);
      said = why;
      if (options.cancelled && options.cancelled())
        status = absl::CancelledError("interrupted while waiting for " + port);
      return status.ok() && (held.ended || Now() < give_up);
    };
    FreePorts(ends, waiting);
    return status;
  }

  const Job& job_;
  ProcessFacts facts_;
  const std::string image_, logs_;
  std::vector<SavedFile> longer_;
  std::set<std::string> replaced_;  // files of the image's that the job needs no more
  std::function<void(const std::string&)> say_;
  std::string files_image_;  // for CRIU instead of the image's; empty: that
};

}  // namespace

EngineCapabilities CriuEngine::Capabilities() const {
  EngineCapabilities can;
  can.needs_root = true;
  can.keeps_tcp = true;
  can.several_hosts = true;
  return can;
}

absl::Status CriuEngine::CheckUsable() const {
  const AsRoot root;
  if (geteuid() != 0) return absl::PermissionDeniedError("saving and restoring processes needs root");
  CR_RETURN_IF_ERROR(HasCapabilities());
  return FindCriu().status();
}

std::string CriuEngine::Version() const {
  const absl::StatusOr<std::string> criu = FindCriu();
  return criu.ok() ? CriuVersion(*criu) : std::string();
}

absl::Status CriuEngine::PrepareStart(Plan* plan) {
  // CRIU restores processes under the numbers that they had, and pseudo-terminals, too.
  plan->own_processes = plan->own_ptys = true;
  plan->first_pid = ChooseFirstPid();
  // It saves System V shared memory, semaphores and message queues as those of a whole namespace only.
  plan->own_ipc = true;
  plan->withhold_io_uring = plan->withhold_mptcp = true;  // it can save none
  return absl::OkStatus();
}

absl::Status CriuEngine::Describe(const Job& job, const SaveOptions& options, std::string* facts) {
  const AsRoot root;
  cancelled_ = options.cancelled;
  ProcessFacts found;
  if (!facts->empty()) FactsFromJson(*facts, &found);
  CR_RETURN_IF_ERROR(DescribeProcesses(job, options.close_tcp, &found));
  if (FactsToJson(std::move(found), facts)) return absl::OkStatus();
  return absl::InternalError("cannot write the description of the job's processes");
}

uint64_t CriuEngine::PreparedBytes(const Job& job) const {
  const AsRoot root;
  return PageReceiver::BytesFor(SavedBytes(job));
}

void CriuEngine::PrepareDump(const Job& job, uint64_t most_bytes) {
  const AsRoot root;
  const CriuFacts facts;
  prepared_ = std::make_unique<PageReceiver>(SavedBytes(job), most_bytes);
}

absl::Status CriuEngine::Dump(const Job& job, const std::string& facts, const std::string& image,
                              const std::string& work, After after) {
  const AsRoot root;
  ProcessFacts known;
  if (!FactsFromJson(facts, &known)) return absl::DataLossError(kUnreadableFacts);
  const std::string kept = logs_ + "." + kKeptDumpLog;
  std::unique_ptr<PageReceiver> pages = std::move(prepared_);
  if (!pages) pages = std::make_unique<PageReceiver>(SavedBytes(job));
  const absl::Status status =
      DumpProcesses(job, known, image, work, after == After::kStop, still_, pages.get(), &last_, cancelled_);
  if (status.ok()) {
    saved_ = std::move(pages);
    if (!logs_.empty()) unlink(kept.c_str());  // of an attempt that failed
    return status;
  }
  std::string log;
  if (logs_.empty() || !ReadImageFile(DumpLog(job, image, work), &log)) return status;
  return AnnotateBehind(status, KeepCriuLog(log, kept));
}

absl::Status CriuEngine::FinishFiles() {
  const AsRoot root;
  // The job could not wait for this.
  CR_RETURN_IF_ERROR(CopyKeptLibraries(std::exchange(kept_, {})));
  return Annotate("the memory of the job's processes could not be saved: ", saved_->Finish());
}

void CriuEngine::AwaitDump(const Job& job, const std::string& work, After after) {
  AwaitDumpProcesses(work);
  // CRIU leaves such a job stopped in any case.
  if (after == After::kRun && job.has_network()) ContinueProcesses(job);
}

absl::Status CriuEngine::ListNeeds(const Job& job, const std::string& facts, const std::string& image,
                                   ckptfmt::Needs* needs) {
  const AsRoot root;
  ProcessFacts known;
  if (!FactsFromJson(facts, &known)) return absl::DataLossError(kUnreadableFacts);
  kept_.clear();
  return DescribeNeeds(job, known, image, needs, &kept_);
}

bool CriuEngine::Resume(const Job& job, const std::string&) {
  const AsRoot root;
  return ContinueProcesses(job, last_.stopped_before);
}

bool CriuEngine::End(const Job& job, const std::string&) {
  const AsRoot root;
  return KillProcesses(job);
}

absl::StatusOr<SavedSummary> CriuEngine::Summarize(const std::string& facts) const {
  ProcessFacts known;
  if (!FactsFromJson(facts, &known)) return absl::DataLossError(kUnreadable);
  SavedSummary summary;
  for (const Stdio& stream : known.stdio()) {
    summary.streams.push_back({stream.fd(), stream.target(), stream.terminal() || IsPipe(stream)});
  }
  summary.instruction_sets.assign(known.instruction_sets().begin(), known.instruction_sets().end());
  summary.kernel_features.assign(known.kernel_features().begin(), known.kernel_features().end());
  return summary;
}

std::vector<std::string> CriuEngine::MissingFeatures(const std::vector<std::string>& wanted,
                                                     const Account& user) const {
  std::vector<std::string> missing = MissingKernelFeatures({wanted.begin(), wanted.end()}, user);
  const AsRoot root;
  const absl::StatusOr<std::string> criu = FindCriu();
  const std::string problem = criu.ok() ? CriuCheck(*criu) : std::string();
  if (!problem.empty()) missing.push_back("a kernel on which CRIU works (criu check): " + problem);
  return missing;
}

absl::StatusOr<std::unique_ptr<SavedProcesses>> CriuEngine::Open(const Job& job, const std::string& facts,
                                                                 const std::string& image) {
  ProcessFacts known;
  if (!FactsFromJson(facts, &known)) return absl::DataLossError(kUnreadable);
  return std::make_unique<CriuProcesses>(job, std::move(known), image, logs_);
}

std::shared_ptr<void> CriuEngine::BeginUpkeep() {
  const AsRoot root;
  return std::make_shared<CriuFacts>();
}

}  // namespace cuda_remote::checkpoint
