// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/criu_restore.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/criu_facts.h"
#include "checkpoint/engine/criu/hold.h"

extern char** environ;

namespace cuda_remote::checkpoint {
namespace {

constexpr char kHoldName[] = "restore-hold";

}  // namespace

CriuRestore::~CriuRestore() {
  if (begun_) EndIsolated(&isolated_);
  CloseOpened();
}

void CriuRestore::CloseOpened() {
  for (int fd : opened_) close(fd);
  opened_.clear();
  if (copy_.terminal >= 0) close(copy_.terminal);
  copy_.terminal = -1;
  if (terminal_) terminal_->CloseJobEnd();
  if (output_) fclose(output_);
  output_ = nullptr;
  if (hold_ >= 0) {
    close(hold_);
    unlink((directory_ + "/" + kHoldName).c_str());
  }
  hold_ = -1;
}

bool CriuRestore::MakeHold(std::string* error) {
  const std::string path = directory_ + "/" + kHoldName;
  unlink(path.c_str());
  // For reading, too: then opening waits for nobody, and what is written is there for whoever comes later.
  if (mkfifo(path.c_str(), 0600) == 0) hold_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (hold_ < 0) *error = "cannot make the pipe " + path + ": " + strerror(errno);
  return hold_ >= 0;
}

bool CriuRestore::Begin(const std::string& image_folder, std::string* error) {
  Plan plan;
  plan.restored_pid = job_.inner_pid();
  plan.first_pid = FreePid(facts_);
  if (directory_ != job_.directory()) {
    plan.folder = directory_;
    plan.seen_as = job_.directory();
  }
  for (char** variable = environ; *variable; ++variable) plan.environment.push_back(*variable);
  plan.environment.push_back(std::string(kHoldVariable) + "=" + job_.directory() + "/" + kHoldName);
  plan.mounts = mounts_;
  if (job_.terminal()) {
    terminal_ = JobTerminal::Open(error);
    if (!terminal_ && !error->empty()) return false;
  }
  int terminal = terminal_ ? terminal_->job_end() : OwnTerminal();
  if ((terminal < 0 || (job_.terminal() && !terminal_)) && (job_.terminal() || NeedsTerminal(facts_))) {
    if (!CopyTerminal(&copy_, error)) return false;
    terminal = copy_.terminal;
  }
  if (job_.terminal()) plan.terminal = terminal;
  plan.terminal_group = facts_.terminal_group();
  const std::string hold = FindCompanion("cr-hold");
  if (hold.empty()) {
    *error = "cr-hold is not beside cr-restart: the installation is incomplete";
    return false;
  }
  unlink(LogPath().c_str());
  // By descriptor: what was verified is what CRIU reads. Other paths as the restorer sees them.
  const int image = open(image_folder.c_str(), O_RDONLY | O_DIRECTORY);
  if (image < 0) {
    *error = "cannot open the saved processes' files: " + std::string(strerror(errno));
    return false;
  }
  opened_.push_back(image);
  if (!MakeHold(error) || !RestoreCommand(job_, facts_, "/proc/self/fd/" + std::to_string(image), job_.directory(), terminal,
                                          &plan.command, &opened_, error)) {
    return false;
  }
  const std::string facts = CriuFactsPath(plan.command[0]);
  plan.prepare = [facts] { ShowCriuFacts(facts); };
  plan.command.insert(plan.command.end(), {"--action-script", hold});
  output_ = tmpfile();
  plan.restorer_output = output_ ? fileno(output_) : 2;
  begun_ = BeginIsolated(plan, &isolated_, error);
  return begun_;
}

bool CriuRestore::Finish(Isolated* isolated, std::string* error) {
  if (write(hold_, kHoldGo, strlen(kHoldGo)) != ssize_t(strlen(kHoldGo))) {
    *error = std::string("the restored processes cannot be told to go on: ") + strerror(errno);
    return false;
  }
  int code = 0;
  begun_ = false;
  const bool ok = AwaitIsolated(&isolated_, error, &code);
  if (!ok && error->empty()) {
    *error = "CRIU could not restore the job's processes: " + CriuErrors(LogPath());
    if (!logs_.empty()) KeepCriuLog(LogPath(), logs_ + "." + kRestoreLog, error);
  }
  CloseOpened();
  unlink((directory_ + "/stats-restore").c_str());
  if (ok) unlink(LogPath().c_str());
  *isolated = isolated_;
  return ok;
}

}  // namespace cuda_remote::checkpoint
