// SPDX-License-Identifier: Apache-2.0
#include "host/client.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint/job/forwarded_signals.h"
#include "checkpoint/job/hostd_places.h"
#include "host/wire.h"
#include "proto/errors/absl_status.h"

extern char** environ;

namespace cuda_remote::host {
namespace {

// Descriptors that are closed here are closed there, too: a socket's end cannot be sent closed, so /dev/null takes
// their place.
int Stream(int fd, int null) { return fcntl(fd, F_GETFD) >= 0 ? fd : null; }

bool IsForeignPipe(int fd) {
  struct stat facts;
  struct statfs system;
  return fstat(fd, &facts) == 0 && S_ISFIFO(facts.st_mode) && facts.st_uid != geteuid() && fstatfs(fd, &system) == 0 &&
         system.f_type == PIPEFS_MAGIC;
}

// A process that copies between `fd` and a pipe of this user's, until its end; *ours is the pipe's end in place of
// `fd`. 0 on failure.
pid_t CopyThrough(int fd, int* ours) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return 0;
  const int from = fd == 0 ? 0 : ends[0], to = fd == 0 ? ends[1] : fd;
  *ours = fd == 0 ? ends[0] : ends[1];
  const pid_t child = fork();
  if (child == 0) {
    for (const int number : checkpoint::kForwardedSignals) signal(number, SIG_IGN);
    const int in = fcntl(from, F_DUPFD, 3), out = fcntl(to, F_DUPFD, 3);
    dup2(in, 0);
    dup2(out, 1);
    close_range(2, ~0U, 0);
    char bytes[65536];
    for (ssize_t got; (got = read(0, bytes, sizeof(bytes))) > 0;) {
      for (ssize_t done = 0; done < got;) {
        const ssize_t wrote = write(1, bytes + done, size_t(got - done));
        if (wrote <= 0) _exit(1);
        done += wrote;
      }
    }
    _exit(0);
  }
  close(fd == 0 ? ends[1] : ends[0]);
  return child > 0 ? child : 0;
}

}  // namespace

void AddOption(const std::string& name, const std::string& value, Request* request) {
  Option* const option = request->add_options();
  option->set_name(name);
  option->set_value(value);
}

Request RequestOf(const CLI::App& app, const std::string& tool) {
  Request request;
  request.set_tool(tool);
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() == 0 || option->get_lnames().empty()) continue;
    const std::string& name = option->get_lnames().front();
    // Stands in Request::job.
    if (name == "name" || name == "job-dir") continue;
    if (option->get_expected_max() == 0) {
      AddOption(name, "", &request);
      request.mutable_options(request.options_size() - 1)->set_flag(true);
      continue;
    }
    for (const std::string& value : option->results()) AddOption(name, value, &request);
  }
  return request;
}

absl::StatusOr<std::unique_ptr<Hostd>> Hostd::Connect() {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = checkpoint::HostdSocket();
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError("the path of cr-hostd's socket is too long: " + path);
  }
  memcpy(address.sun_path, path.c_str(), path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.ok() || connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    // A folder that this user cannot enter has nothing for her.
    if (errno == ENOENT || errno == ECONNREFUSED || errno == EACCES) return nullptr;
    return ErrnoStatus("cr-hostd cannot be reached at " + path);
  }
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == 0)
    return std::unique_ptr<Hostd>(new Hostd(std::move(socket)));
  return absl::PermissionDeniedError("what serves " + path + " does not belong to root, so it is not a cr-hostd");
}

absl::StatusOr<HostReports> Hostd::AskForHosts(const std::string& hosts) {
  Request request;
  request.set_version(kVersion);
  request.set_tool("hosts");
  if (!hosts.empty()) AddOption("hosts", hosts, &request);
  const int folder = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), null = open("/dev/null", O_RDWR | O_CLOEXEC);
  Reply reply;
  const bool answered = folder >= 0 && null >= 0 && Send(socket_.get(), request, {null, null, null, folder}) &&
                        Receive(socket_.get(), &reply);
  for (const int fd : {folder, null}) {
    if (fd >= 0) close(fd);
  }
  if (!answered) return absl::UnavailableError("cr-hostd does not answer");
  if (reply.kind() == Reply::HOSTS) return std::move(*reply.mutable_hosts());
  if (reply.text().empty()) return absl::DataLossError("cr-hostd sent an answer that this tool cannot read");
  return absl::FailedPreconditionError(reply.text());
}

int Hostd::Run(const char* name, Request request, int failed, std::string* elsewhere) {
  request.set_version(kVersion);
  for (char** variable = environ; *variable; ++variable) request.add_environment(*variable);
  const mode_t mask = umask(0);
  umask(mask);
  request.set_umask(mask);
  const int folder = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC), null = open("/dev/null", O_RDWR | O_CLOEXEC);
  // The engine opens a restarted job's pipes once more, which only works for the user's own.
  int streams[] = {Stream(0, null), Stream(1, null), Stream(2, null)};
  pid_t copiers[3] = {};
  for (int i = 0; request.tool() == "restart" && i < 3; ++i) {
    if (IsForeignPipe(streams[i])) copiers[i] = CopyThrough(i, &streams[i]);
  }
  const auto end_copying = [&copiers] {
    // What the job has written last is on its way; what it has not read is nobody's.
    if (copiers[0] > 0) kill(copiers[0], SIGKILL);
    for (const pid_t copier : copiers) {
      if (copier > 0) waitpid(copier, nullptr, 0);
    }
  };
  sigset_t set, before;
  sigemptyset(&set);
  for (const int signal : checkpoint::kForwardedSignals) sigaddset(&set, signal);
  sigprocmask(SIG_BLOCK, &set, &before);
  const int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  // Whoever is refused before all is read finds the answer below.
  const bool sent = folder >= 0 && Send(socket_.get(), request, {streams[0], streams[1], streams[2], folder});
  if (!sent && errno != EPIPE && errno != ECONNRESET) {
    fprintf(stderr, "%s: cannot ask cr-hostd: %s\n", name, strerror(errno));
    return failed;
  }
  close(folder);
  for (const int i : {0, 1, 2}) {
    if (copiers[i] > 0) close(streams[i]);
  }
  while (true) {
    pollfd waiting[] = {{socket_.get(), POLLIN, 0}, {signals, POLLIN, 0}};
    if (poll(waiting, 2, -1) < 0) continue;
    signalfd_siginfo info;
    while (read(signals, &info, sizeof(info)) == ssize_t(sizeof(info))) {
      Control control;
      control.set_signal(int(info.ssi_signo));
      control.set_terminal(info.ssi_code == SI_KERNEL);
      Send(socket_.get(), control);
    }
    if (waiting[0].revents == 0) continue;
    Reply reply;
    if (!Receive(socket_.get(), &reply)) {
      fprintf(stderr, "%s: the process of cr-hostd that did the work has died\n", name);
      if (copiers[0] > 0) kill(copiers[0], SIGKILL);
      return failed;
    }
    switch (reply.kind()) {
      case Reply::STARTED:
        // A pipe ends when the program closes it.
        dup2(null, 0);
        dup2(null, 1);
        close(null);
        break;
      case Reply::ELSEWHERE:
        if (elsewhere) {
          *elsewhere = reply.text();
          close(signals);
          close(null);
          sigprocmask(SIG_SETMASK, &before, nullptr);
          return failed;
        }
        [[fallthrough]];
      case Reply::REFUSED:
        end_copying();
        fprintf(stderr, "%s: %s\n", name, reply.text().c_str());
        return failed;
      case Reply::NOTE:
        fprintf(stderr, "%s: %s\n", name, reply.text().c_str());
        break;
      case Reply::STOPPED:
        // As the shell expects it of the job; SIGCONT is passed on.
        raise(SIGSTOP);
        break;
      case Reply::ENDED:
        end_copying();
        return reply.value();
      default:
        break;
    }
  }
}

}  // namespace cuda_remote::host
