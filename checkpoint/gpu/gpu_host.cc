// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/gpu_host.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/stall_watch.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"
#include "proto/control/control.pb.h"
#include "proto/control/socket_call.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr int kReadyMs = 30000;
// A little longer than a relay waits for its server's answer.
constexpr int kAskMs = 20500;

// Made anew, with the rights of `account`, in whose folder it is.
int OpenNew(const std::string& path, const std::optional<Account>& account) {
  const ActAs user(account);
  unlink(path.c_str());
  return open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
}

void ShowLog(int log) {
  char text[4000];
  const ssize_t got = pread(log, text, sizeof(text), 0);
  fwrite(text, 1, got > 0 ? size_t(got) : 0, stderr);
}

// Starts a server or relay and waits until it says that it listens. `log`: -1, or it is nobody's child, and has this
// file in place of standard error. A reader of this tool's output would wait for it otherwise.
absl::StatusOr<pid_t> StartDaemon(std::vector<std::string> command, int log, const GpuHostOptions& options) {
  const std::optional<Account>& account = options.account;
  const bool detached = log >= 0;
  int ready[2], number[2];
  if (pipe(ready) != 0 || pipe2(number, O_CLOEXEC) != 0) return ErrnoStatus("pipe");
  fcntl(ready[0], F_SETFD, FD_CLOEXEC);
  command.push_back("--ready-fd");
  command.push_back(std::to_string(ready[1]));
  fflush(nullptr);
  pid_t child = fork();
  if (child == 0) {
    if (detached) {
      setsid();
      const pid_t daemon = fork();
      if (daemon != 0) _exit(write(number[1], &daemon, sizeof(daemon)) == sizeof(daemon) ? 0 : 1);
    }
    if (account && !detached && !LeaveTerminal()) _exit(127);
    if (account && !Become(*account)) _exit(127);
    std::vector<char*> variables;
    if (account && options.environment) {
      for (const std::string& variable : *options.environment) variables.push_back(const_cast<char*>(variable.c_str()));
      variables.push_back(nullptr);
      environ = variables.data();
    }
    if (!detached) {
      prctl(PR_SET_PDEATHSIG, SIGTERM);  // after the change of the user, which forgets it
      setpgid(0, 0);                     // the terminal's signals are for the program
    }
    UnblockInChild();
    // It is about the machine's GPUs, and the program's session applies it: a server that did so too would do it twice.
    unsetenv("CUDA_VISIBLE_DEVICES");
    // A batch system may have given the job some of them only.
    if (const char* const own = getenv("CUDA_REMOTE_SERVER_GPUS"); own && *own) setenv("CUDA_VISIBLE_DEVICES", own, 1);
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    dup2(null, 0);
    dup2(null, 1);
    if (detached) {
      dup2(log, 2);
      // The descriptors of this tool's caller, too.
      syscall(SYS_close_range, 3u, ~0u, 4u /* CLOSE_RANGE_CLOEXEC */);
      fcntl(ready[1], F_SETFD, 0);
    }
    std::vector<char*> arguments;
    for (std::string& word : command) arguments.push_back(&word[0]);
    arguments.push_back(nullptr);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  close(ready[1]);
  close(number[1]);
  if (child > 0 && detached) {
    pid_t daemon = -1;
    if (read(number[0], &daemon, sizeof(daemon)) != sizeof(daemon)) daemon = -1;
    waitpid(child, nullptr, 0);
    child = daemon;
  }
  close(number[0]);
  pollfd waiting{ready[0], POLLIN, 0};
  char text[16];
  const bool ok = child > 0 && poll(&waiting, 1, kReadyMs) > 0 && read(ready[0], text, sizeof(text)) > 0;
  close(ready[0]);
  if (ok) return child;
  if (child > 0) {
    // It may be a user's, who may have stopped it.
    kill(child, detached ? SIGKILL : SIGTERM);
    if (!detached) ReapWithoutStall(child, StallWatch::kHurried);
  }
  if (detached) ShowLog(log);
  return absl::FailedPreconditionError(command[0] + " did not start; see its message above");
}

absl::Status CheckLength(const std::string& path) {
  if (path.size() < sizeof(sockaddr_un::sun_path)) return absl::OkStatus();
  return absl::InvalidArgumentError("the socket's path " + path + " is too long (at most " +
                                    std::to_string(sizeof(sockaddr_un::sun_path) - 1) +
                                    " characters): choose another job folder");
}

}  // namespace

absl::Status CheckServerAddress(const std::string& address) {
  if (SocketPathOf(address)) return absl::OkStatus();
  const size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool number = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == std::string::npos;
  if (colon != 0 && number && std::stoi(port) >= 1 && std::stoi(port) <= 65535) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "\"" + address + "\" is not a server address: write unix:PATH, or HOST:PORT with a port from 1 to 65535");
}

absl::StatusOr<std::unique_ptr<GpuHost>> GpuHost::Open(const std::string& address, int gpu,
                                                       const GpuHostOptions& options) {
  const std::string& folder = options.folder;
  std::unique_ptr<GpuHost> host(new GpuHost(options));
  if (const std::optional<std::string> path = SocketPathOf(address)) {
    host->path_ = Absolute(*path);
    return host;
  }
  std::vector<std::string> command;
  if (address.empty()) {
    const std::string server = FindCompanion("cr-server");
    if (server.empty()) {
      return absl::NotFoundError(
          "cr-server is not beside this program: the installation is incomplete (or name a server with --server)");
    }
    host->path_ = folder + "/server/session.sock";
    // Why no session could be opened, the program says itself, on the same stderr.
    command = {
        server, "--dir", folder + "/server", "--workers", "1", "--log-level", options.detached ? "warn" : "error"};
    if (gpu >= 0) command.insert(command.end(), {"--gpu", std::to_string(gpu)});
  } else {
    CR_RETURN_IF_ERROR(CheckServerAddress(address));
    const std::string relay = FindCompanion("cr-relay");
    if (relay.empty()) {
      return absl::NotFoundError("cr-relay is not beside this program: the installation is incomplete");
    }
    host->path_ = folder + "/relay.sock";
    // A job that moves may still use its first relay.
    for (int number = 2; access(host->path_.c_str(), F_OK) == 0 && number < 1000; ++number)
      host->path_ = folder + "/relay" + std::to_string(number) + ".sock";
    command = {relay, "--connect", address, "--socket", host->path_};
    if (options.detached) command.insert(command.end(), {"--idle-exit", "10"});
  }
  CR_RETURN_IF_ERROR(CheckLength(host->path_));
  if (!address.empty()) {
    const std::string path = ServerNameFile(host->path_), line = address + "\n";
    const UniqueFd file(OpenNew(path, options.account));
    if (!file.ok() || write(file.get(), line.data(), line.size()) != ssize_t(line.size()))
      return ErrnoStatus("cannot make " + path);
  }
  int log = -1;
  if (options.detached) {
    // relay2.log beside relay2.sock.
    const std::string path =
        address.empty() ? folder + "/server.log" : host->path_.substr(0, host->path_.rfind('.')) + ".log";
    log = OpenNew(path, options.account);
    if (log < 0) return ErrnoStatus("cannot make " + path);
  }
  const absl::StatusOr<pid_t> started = StartDaemon(std::move(command), log, options);
  if (log >= 0) close(log);
  CR_RETURN_IF_ERROR(started.status());
  host->process_ = *started;
  return host;
}

absl::Status GpuHost::Ask(const std::function<bool(int waited_ms)>& goes_on) const {
  control::ControlCall call;
  call.mutable_get_server_info();
  const ActAs user(options_.account);  // a relay serves nobody else, and a server may not either
  CR_ASSIGN_OR_RETURN(const control::ControlAnswer answer, control::CallOnSocket(path_, call, kAskMs, goes_on));
  const std::string& problem = answer.server_info().worker_error();
  return problem.empty() ? absl::OkStatus() : absl::UnavailableError("its workers cannot start: " + problem);
}

absl::StatusOr<GpuHost*> GpuHosts::Open(const std::string& address, int gpu) {
  for (const Entry& known : hosts_) {
    if (known.address == address) return known.host.get();
  }
  CR_ASSIGN_OR_RETURN(std::unique_ptr<GpuHost> host, GpuHost::Open(address, gpu, options_));
  // The same socket may have been named in another way.
  for (const Entry& known : hosts_) {
    if (known.host->socket_path() == host->socket_path()) return known.host.get();
  }
  hosts_.push_back({address, std::move(host)});
  return hosts_.back().host.get();
}

bool GpuHosts::Started(pid_t pid) const {
  return std::any_of(hosts_.begin(), hosts_.end(), [pid](const Entry& one) { return one.host->process() == pid; });
}

std::vector<pid_t> GpuHosts::Started() const {
  std::vector<pid_t> started;
  for (const Entry& one : hosts_) {
    if (one.host->process() != 0) started.push_back(one.host->process());
  }
  return started;
}

GpuHost::~GpuHost() {
  if (!process_ || options_.detached) return;
  // A server needs a moment for its workers.
  kill(process_, SIGTERM);
  ReapWithoutStall(process_, StallWatch::kHurried);
}

}  // namespace cuda_remote::checkpoint
