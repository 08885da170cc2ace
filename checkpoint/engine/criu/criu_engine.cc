// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/criu_engine.h"

#include <ctype.h>
#include <google/protobuf/util/json_util.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/criu_facts.h"
#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/criu_restore.h"
#include "checkpoint/engine/criu/needs.h"
#include "checkpoint/engine/criu/open_files.h"
#include "checkpoint/engine/criu/ports.h"
#include "checkpoint/job/stand_ins.h"
#include "ckptfmt/needs.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr size_t kMostMissing = 5;

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
    return (!options.needs || CheckNeeds(*options.needs, options, error)) && CheckFiles(options, error) &&
           CheckPorts(options, error);
  }

  bool ChangesFiles() const override { return !longer_.empty(); }

  std::unique_ptr<ProcessRestore> Begin(const std::string& directory, std::vector<Mount> mounts,
                                        std::string* error) override {
    if (!CutBack(longer_, error)) return nullptr;
    if (!PutKeptLibraries(image_, directory, error)) return nullptr;
    auto restore = std::make_unique<CriuRestore>(job_, facts_, directory, std::move(mounts), logs_);
    return restore->Begin(image_, error) ? std::move(restore) : nullptr;
  }

 private:
  // Compares the job's open files with what is there.
  bool CheckFiles(const RestoreOptions& options, std::string* error) {
    std::string bytes;
    std::vector<SavedFile> files;
    // An image of a newer CRIU may look otherwise: then CRIU itself finds what differs.
    if (!ReadImageFile(image_ + "/files.img", &bytes) || !ParseFiles(bytes, facts_, &files)) return true;
    // Its libraries are put there.
    const std::string libraries = job_.directory() + "/lib/";
    const auto is_library = [&](const SavedFile& file) { return file.path.compare(0, libraries.size(), libraries) == 0; };
    files.erase(std::remove_if(files.begin(), files.end(), is_library), files.end());
    for (SavedFile& file : files) {
      if (access(file.path.c_str(), F_OK) != 0 && SeenByJob(job_, file.path) != file.path) {
        *error = "a process of the job has loaded " + file.path +
                 ", in whose place it saw cuda-remote's library; there is no such file on this machine: restart the job "
                 "where the same driver is installed";
        return false;
      }
      file.path = SeenByJob(job_, file.path);
    }
    longer_.clear();
    if (!CompareFiles(files, &longer_, error)) return false;
    if (longer_.empty() || options.cut_back) return true;
    *error = "the job has gone on writing since the checkpoint; --cut-back takes these files back to their length then:";
    for (const SavedFile& file : longer_) *error += " " + file.path + " (" + std::to_string(file.bytes) + " bytes)";
    return false;
  }

  bool CheckNeeds(const ckptfmt::Needs& needs, const RestoreOptions& options, std::string* error) {
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
    return true;
  }

  // Sees to it that no connection that ended a moment ago, such as the stopped job's own, holds a port of the job.
  bool CheckPorts(const RestoreOptions& options, std::string* error) {
    std::string bytes;
    std::set<uint16_t> ports;
    if (!ReadImageFile(image_ + "/files.img", &bytes) || !SavedPorts(bytes, &ports)) return true;
    bool said = false;
    uint16_t last = 0;
    const auto waiting = [&](uint16_t port) {
      last = port;
      if (!said && options.say) {
        options.say("TCP port " + std::to_string(port) +
                    " of the job is held by a connection that has ended; the kernel frees it within a minute");
      }
      said = true;
      return !(options.cancelled && options.cancelled());
    };
    if (FreePorts(ports, waiting) || last == 0) return true;
    *error = "interrupted while waiting for TCP port " + std::to_string(last);
    return false;
  }

  const Job& job_;
  const ProcessFacts facts_;
  const std::string image_, logs_;
  std::vector<SavedFile> longer_;
};

}  // namespace

EngineCapabilities CriuEngine::Capabilities() const {
  EngineCapabilities can;
  can.needs_root = true;
  can.keeps_tcp = true;
  return can;
}

bool CriuEngine::CheckUsable(std::string* error) const {
  std::string criu;
  if (geteuid() == 0) return FindCriu(&criu, error);
  *error = "saving and restoring processes needs root";
  return false;
}

bool CriuEngine::Describe(const Job& job, const SaveOptions& options, std::string* facts, std::string* error) {
  ProcessFacts found;
  if (!facts->empty()) FactsFromJson(*facts, &found);
  if (!DescribeProcesses(job, options.close_tcp, &found, error)) return false;
  google::protobuf::util::JsonPrintOptions print;
  print.preserve_proto_field_names = true;
  facts->clear();
  return google::protobuf::util::MessageToJsonString(found, facts, print).ok();
}

bool CriuEngine::Dump(const Job& job, const std::string& facts, const std::string& image, const std::string& work,
                      After after, std::string* error) {
  ProcessFacts known;
  if (!FactsFromJson(facts, &known)) {
    *error = "what is known of the job's processes cannot be read";
    return false;
  }
  const std::string kept = logs_ + "." + kDumpLog;
  if (DumpProcesses(job, known, image, work, after == After::kStop, error)) {
    if (!logs_.empty()) unlink(kept.c_str());  // of an attempt that failed
    return true;
  }
  if (!logs_.empty()) KeepCriuLog(work + "/" + kDumpLog, kept, error);
  return false;
}

bool CriuEngine::ListNeeds(const Job& job, const std::string& facts, const std::string& image, ckptfmt::Needs* needs,
                           std::string* error) {
  ProcessFacts known;
  if (FactsFromJson(facts, &known)) return DescribeNeeds(job, known, image, needs, error);
  *error = "what is known of the job's processes cannot be read";
  return false;
}

bool CriuEngine::Resume(const Job& job, const std::string& facts) {
  ProcessFacts known;
  return FactsFromJson(facts, &known) && ContinueProcesses(job, known);
}

bool CriuEngine::End(const Job& job, const std::string& facts) {
  ProcessFacts known;
  return FactsFromJson(facts, &known) && KillProcesses(job, known);
}

std::unique_ptr<SavedProcesses> CriuEngine::Open(const Job& job, const std::string& facts, const std::string& image,
                                                 std::string* error) {
  ProcessFacts known;
  if (FactsFromJson(facts, &known)) return std::make_unique<CriuProcesses>(job, std::move(known), image, logs_);
  *error = "what the image says of the job's processes cannot be read";
  return nullptr;
}

std::shared_ptr<void> CriuEngine::BeginUpkeep() { return std::make_shared<CriuFacts>(); }

}  // namespace cuda_remote::checkpoint
