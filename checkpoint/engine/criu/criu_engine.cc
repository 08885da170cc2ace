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
#include "checkpoint/job/stand_ins.h"
#include "ckptfmt/needs.h"
#include "proto/base/clock.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr size_t kMostMissing = 5;
// How long a restart waits for another program that uses a port of the job: its connection may be a short one.
constexpr std::chrono::seconds kBusyPort(10);
// The same for one that writes to a file of the job, which is ending or goes on for long; and how often to look.
constexpr std::chrono::seconds kBusyFile(5);
constexpr std::chrono::milliseconds kLookAgain(100);

constexpr char kUnreadable[] = "cannot read the image's description of the job's processes";

bool IsPipe(const Stdio& stream) { return stream.target().compare(0, 5, "pipe:") == 0; }

bool FactsFromJson(const std::string& text, ProcessFacts* facts) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  return google::protobuf::util::JsonStringToMessage(text, facts, options).ok();
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

  bool Check(const RestoreOptions& options, std::string* error) override {
    // Of a job that runs as another user: CRIU could not give it more, and nobody should have it try.
    const std::optional<Account> account = AccountOf(job_);
    return (!account || CheckSavedRights(image_, *account, error)) && GiveOutputs(options, error) &&
           (!options.needs || CheckNeeds(*options.needs, options, error)) && CheckFiles(options, error) &&
           CheckPorts(options, error);
  }

  std::vector<std::string> Exchanged() const override { return {replaced_.begin(), replaced_.end()}; }

  bool ChangesFiles() const override { return !longer_.empty(); }

  std::unique_ptr<ProcessRestore> Begin(const std::string& directory, std::vector<Mount> mounts, int network,
                                        std::string* error) override {
    {
      const ActAs user(AccountOf(job_));
      if (!CutBack(longer_, error)) return nullptr;
    }
    if (!PutKeptLibraries(image_, directory, error)) return nullptr;
    auto restore =
        std::make_unique<CriuRestore>(job_, facts_, directory, std::move(mounts), logs_, files_image_, network);
    return restore->Begin(image_, error) ? std::move(restore) : nullptr;
  }

 private:
  // Compares the job's open files with what is there.
  bool CheckFiles(const RestoreOptions& options, std::string* error) {
    std::string bytes;
    std::vector<SavedFile> files;
    // An image of a newer CRIU may look otherwise: then CRIU itself finds what differs.
    if (!ReadImageFile(image_ + "/files.img", &bytes) || !ParseFiles(bytes, facts_, &files)) return true;
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
        *error =
            "a process of the job has loaded " + file.path +
            ", in whose place it saw cuda-remote's library; there is no such file on this machine: restart the job "
            "where the same driver is installed";
        return false;
      }
      file.path = SeenByJob(job_, file.path);
    }
    if (!CheckAccess(files, error)) return false;
    longer_.clear();
    if (!CompareFiles(files, &longer_, error)) return false;
    const std::set<std::string> own(job_.outputs().begin(), job_.outputs().end());
    for (const SavedFile& file : longer_) {
      const bool is_own = own.count(file.path) != 0;
      const bool named = std::find(options.cut.begin(), options.cut.end(), file.path) != options.cut.end();
      if (named || (is_own && options.cut_back)) continue;
      struct stat now;
      *error = file.path + " has grown since the checkpoint, from " + std::to_string(file.bytes) + " bytes" +
               (stat(file.path.c_str(), &now) == 0 ? " to " + std::to_string(now.st_size) : std::string());
      *error += is_own ? ", by what the job wrote; --cut-back takes it back to its length then, --output gives the "
                         "restarted job another file"
                       : ", by the job or by others that write to it; if all of that may go, --cut " + file.path +
                             " takes it back to its length then";
      return false;
    }
    return true;
  }

  // CRIU opens them with the user's rights, and says less when it cannot.
  bool CheckAccess(const std::vector<SavedFile>& files, std::string* error) const {
    const std::optional<Account> account = AccountOf(job_);
    if (!account) return true;
    const ActAs user(account);
    for (const SavedFile& file : files) {
      if (faccessat(AT_FDCWD, file.path.c_str(), F_OK, AT_EACCESS) == 0 || errno != EACCES) continue;
      *error = "the image has " + file.path + " open, which " + NameOf(*account) + " may not reach";
      return false;
    }
    return true;
  }

  // The job's streams go to other files than those in the image.
  bool GiveOutputs(const RestoreOptions& options, std::string* error) {
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
        *error = "the job's descriptor " + std::to_string(output.fd) + " is " + stream->target() +
                 (stream->terminal() ? ", a terminal" : ", which it has opened itself") +
                 ", and cannot become a file; restart it without " + (output.fd == 1 ? "--output" : "--error");
        return false;
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
    if (positions.empty()) return true;
    const auto change = [&](std::string_view name, FileChange* wanted) {
      const auto found = positions.find(std::string(name));
      if (found == positions.end()) return false;
      wanted->other = true;
      wanted->position = found->second;
      return true;
    };
    if (ReadImageFile(image_ + "/files.img", &files_image_) && ChangeFiles(&files_image_, change)) return true;
    *error =
        "this image was made by a CRIU version whose files cr-restart cannot read; restart it without --output and "
        "--error";
    return false;
  }

  bool CheckNeeds(const ckptfmt::Needs& all, const RestoreOptions& options, std::string* error) {
    ckptfmt::Needs needs = all;
    needs.files.erase(std::remove_if(needs.files.begin(), needs.files.end(),
                                     [&](const ckptfmt::NeededFile& file) { return replaced_.count(file.path) != 0; }),
                      needs.files.end());
    const std::vector<std::string> missing =
        ckptfmt::MissingHere(needs, [&](const std::string& path) { return SeenByJob(job_, path); });
    if (!missing.empty()) {
      *error = "this machine lacks what the image needs: " + missing[0];
      for (size_t i = 1; i < missing.size() && i < kMostMissing; ++i) *error += "; " + missing[i];
      if (missing.size() > kMostMissing)
        *error += "; and " + std::to_string(missing.size() - kMostMissing) + " more (cr-inspect --files-here)";
      return false;
    }
    std::string criu;
    utsname system;
    if (options.say && FindCriu(&criu, error) && VersionOf(CriuVersion(criu)) < VersionOf(needs.engine_version)) {
      options.say("the image was made with CRIU " + needs.engine_version + "; here it is " + CriuVersion(criu) +
                  ", which may not be able to read it");
    }
    if (options.say && uname(&system) == 0 && VersionOf(system.release) < VersionOf(needs.kernel)) {
      options.say("the job was saved on Linux " + needs.kernel + "; here it is " + std::string(system.release) +
                  ", which may lack something that the job uses");
    }
    return CheckWriters(needs, options, error);
  }

  // Nobody else, such as a second copy of the job, may be writing to its files. A process that is ending, such as one
  // of a cr-restart that was killed a moment ago, gets a while.
  bool CheckWriters(const ckptfmt::Needs& needs, const RestoreOptions& options, std::string* error) {
    const auto give_up = Now() + kBusyFile;
    std::string said;
    for (const ckptfmt::NeededFile& file : needs.files) {
      if (!file.written) continue;
      for (std::string other = OtherWriter(file.path); !other.empty(); other = OtherWriter(file.path)) {
        const std::string what = other + " is writing to " + file.path + ", which this job would write to, too";
        const bool stream = std::any_of(facts_.stdio().begin(), facts_.stdio().end(),
                                        [&](const Stdio& one) { return one.fd() != 0 && one.target() == file.path; });
        *error =
            what + ": end that one first" + (stream ? ", or give this one another file with --output or --error" : "");
        if (Now() >= give_up) return false;
        if (options.cancelled && options.cancelled()) return false;
        if (what != said && options.say) options.say(what + "; waiting for its end");
        said = what;
        std::this_thread::sleep_for(kLookAgain);
      }
    }
    error->clear();
    return true;
  }

  // Sees to it that no connection that ended a moment ago, such as the stopped job's own, holds a port of the job, and
  // gives other programs a while to end. Whether a port can be had beside a socket that is in use is CRIU's to find
  // out.
  bool CheckPorts(const RestoreOptions& options, std::string* error) {
    std::string bytes;
    std::set<TcpEnd> ends;
    if (job_.has_network()) return true;  // where nobody else has a port
    if (!ReadImageFile(image_ + "/files.img", &bytes) || !SavedPorts(bytes, &ends)) return true;
    const auto give_up = Now() + kBusyPort;
    std::string said;
    bool cancelled = false;
    const auto waiting = [&](const HeldPort& held) {
      const std::string port = "TCP port " + std::to_string(held.port);
      const std::string why =
          held.ended ? port + " of the job is held by a connection that has ended; the kernel frees it within a minute"
                     : port + ", which the job needs, is used by " +
                           (held.holder.empty() ? "another program" : held.holder) + "; waiting for its end";
      if (why != said && options.say) options.say(why);
      said = why;
      cancelled = options.cancelled && options.cancelled();
      if (cancelled) *error = "interrupted while waiting for " + port;
      return !cancelled && (held.ended || Now() < give_up);
    };
    FreePorts(ends, waiting);
    return !cancelled;
  }

  const Job& job_;
  ProcessFacts facts_;
  const std::string image_, logs_;
  std::vector<SavedFile> longer_;
  std::set<std::string> replaced_;  // files of the image's that the job needs no more
  std::string files_image_;         // for CRIU instead of the image's; empty: that
};

}  // namespace

EngineCapabilities CriuEngine::Capabilities() const {
  EngineCapabilities can;
  can.needs_root = true;
  can.keeps_tcp = true;
  can.several_hosts = true;
  return can;
}

bool CriuEngine::CheckUsable(std::string* error) const {
  const AsRoot root;
  std::string criu;
  if (geteuid() == 0) return HasCapabilities(error) && FindCriu(&criu, error);
  *error = "saving and restoring processes needs root";
  return false;
}

std::string CriuEngine::Version() const {
  std::string criu, ignored;
  return FindCriu(&criu, &ignored) ? CriuVersion(criu) : std::string();
}

bool CriuEngine::PrepareStart(Plan* plan, std::string*) {
  // CRIU restores processes under the numbers that they had, and pseudo-terminals, too.
  plan->own_processes = plan->own_ptys = true;
  plan->first_pid = ChooseFirstPid();
  // It saves System V shared memory, semaphores and message queues as those of a whole namespace only.
  plan->own_ipc = true;
  plan->withhold_io_uring = true;  // it can save none
  return true;
}

bool CriuEngine::Describe(const Job& job, const SaveOptions& options, std::string* facts, std::string* error) {
  const AsRoot root;
  ProcessFacts found;
  if (!facts->empty()) FactsFromJson(*facts, &found);
  if (!DescribeProcesses(job, options.close_tcp, &found, error)) return false;
  google::protobuf::util::JsonPrintOptions print;
  print.preserve_proto_field_names = true;
  facts->clear();
  return google::protobuf::util::MessageToJsonString(found, facts, print).ok();
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

bool CriuEngine::Dump(const Job& job, const std::string& facts, const std::string& image, const std::string& work,
                      After after, std::string* error) {
  const AsRoot root;
  ProcessFacts known;
  if (!FactsFromJson(facts, &known)) {
    *error = "cannot read the description of the job's processes";
    return false;
  }
  const std::string kept = logs_ + "." + kKeptDumpLog;
  std::unique_ptr<PageReceiver> pages = std::move(prepared_);
  if (!pages) pages = std::make_unique<PageReceiver>(SavedBytes(job));
  if (DumpProcesses(job, known, image, work, after == After::kStop, still_, pages.get(), &last_, error)) {
    saved_ = std::move(pages);
    if (!logs_.empty()) unlink(kept.c_str());  // of an attempt that failed
    return true;
  }
  std::string log;
  if (!logs_.empty() && ReadImageFile(DumpLog(job, image, work), &log)) KeepCriuLog(log, kept, error);
  return false;
}

bool CriuEngine::FinishFiles(std::string* error) {
  const AsRoot root;
  if (saved_->Finish(error)) return true;
  *error = "the memory of the job's processes could not be saved: " + *error;
  return false;
}

void CriuEngine::AwaitDump(const Job& job, const std::string& work, After after) {
  AwaitDumpProcesses(work);
  // CRIU leaves such a job stopped in any case.
  if (after == After::kRun && job.has_network()) ContinueProcesses(job);
}

bool CriuEngine::ListNeeds(const Job& job, const std::string& facts, const std::string& image, ckptfmt::Needs* needs,
                           std::string* error) {
  const AsRoot root;
  ProcessFacts known;
  if (FactsFromJson(facts, &known)) return DescribeNeeds(job, known, image, needs, error);
  *error = "cannot read the description of the job's processes";
  return false;
}

bool CriuEngine::Resume(const Job& job, const std::string&) {
  const AsRoot root;
  return ContinueProcesses(job, last_.stopped_before);
}

bool CriuEngine::End(const Job& job, const std::string&) {
  const AsRoot root;
  return KillProcesses(job);
}

bool CriuEngine::Summarize(const std::string& facts, SavedSummary* summary, std::string* error) const {
  ProcessFacts known;
  if (!FactsFromJson(facts, &known)) {
    *error = kUnreadable;
    return false;
  }
  for (const Stdio& stream : known.stdio()) {
    summary->streams.push_back({stream.fd(), stream.target(), stream.terminal() || IsPipe(stream)});
  }
  summary->instruction_sets.assign(known.instruction_sets().begin(), known.instruction_sets().end());
  summary->kernel_features.assign(known.kernel_features().begin(), known.kernel_features().end());
  return true;
}

std::vector<std::string> CriuEngine::MissingFeatures(const std::vector<std::string>& wanted,
                                                     const Account& user) const {
  std::vector<std::string> missing = MissingKernelFeatures({wanted.begin(), wanted.end()}, user);
  const AsRoot root;
  std::string criu, ignored;
  const std::string problem = FindCriu(&criu, &ignored) ? CriuCheck(criu) : std::string();
  if (!problem.empty()) missing.push_back("a kernel on which CRIU works (criu check): " + problem);
  return missing;
}

std::unique_ptr<SavedProcesses> CriuEngine::Open(const Job& job, const std::string& facts, const std::string& image,
                                                 std::string* error) {
  ProcessFacts known;
  if (FactsFromJson(facts, &known)) return std::make_unique<CriuProcesses>(job, std::move(known), image, logs_);
  *error = kUnreadable;
  return nullptr;
}

std::shared_ptr<void> CriuEngine::BeginUpkeep() {
  const AsRoot root;
  return std::make_shared<CriuFacts>();
}

}  // namespace cuda_remote::checkpoint
