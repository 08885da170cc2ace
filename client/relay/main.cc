// SPDX-License-Identifier: Apache-2.0
// cr-relay: brings a cr-server on another host to this one. See --help.

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "client/relay/relay_session.h"
#include "proto/base/clock.h"
#include "proto/base/descriptor_limit.h"
#include "proto/channel/handshake.h"
#include "proto/cli/help.h"
#include "proto/control/buffer_memory.h"
#include "proto/control/credentials.h"
#include "proto/control/eager_poll.h"
#include "proto/logging/log.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::client {
namespace {

constexpr int kExitUsage = 2;
constexpr int kExitCannotListen = 3;
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

constexpr char kExamples[] = R"(
Examples:
  cr-relay --connect gpu7:7070 --socket /run/user/1000/gpu7.sock --tls-cert me.pem --tls-key me.key --tls-ca ca.pem
  CUDA_REMOTE_SERVER=unix:/run/user/1000/gpu7.sock ./program

Usually cr-run --server gpu7:7070 starts it. Without --tls-* (or CUDA_REMOTE_TLS_CERT,
CUDA_REMOTE_TLS_KEY, CUDA_REMOTE_TLS_CA) nothing is encrypted, which a server accepts only
from hosts that it lists with --insecure-tcp.

Exit codes: 0 ended by a signal, --idle-exit or --watch-fd, 2 wrong use, 3 cannot listen.
)";

// What the program had open that started this one: nobody is to wait for this process instead of it.
void CloseInherited(int watch_fd, int ready_fd) {
  int first = 3;
  for (const int kept : {std::min(watch_fd, ready_fd), std::max(watch_fd, ready_fd)}) {
    if (kept < first) continue;
    if (kept > first) syscall(SYS_close_range, unsigned(first), unsigned(kept - 1), 0u);
    first = kept + 1;
  }
  syscall(SYS_close_range, unsigned(first), ~0u, 0u);
}

// Of the program that used this relay, which has ended: a reader of its output must see the end.
void LetGoOfStreams() {
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int stream : {0, 1, 2}) dup2(null, stream);
  close(null);
}

struct Served {
  std::unique_ptr<RelaySession> session;
  std::thread thread;
  std::atomic<bool> done{false};
};

int Main(int argc, char** argv) {
  control::KeepBufferMemory();
  control::PollEagerly();
  // First of all, so that every thread, gRPC's too, inherits it.
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT}) sigaddset(&signals, signal);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGHUP, SIG_IGN);  // as cr-server, it outlives the terminal
  std::string connect, path, log_level = "warn";
  control::TlsFiles tls;
  double idle_exit = 0;
  bool remove_folder = false;
  int watch_fd = -1, ready_fd = -1;
  uint32_t grace = 0;
  CLI::App app("Brings a cr-server on another host to this one: programs connect to a socket here.", "cr-relay");
  SetUpProgram(&app);
  app.footer(kExamples);
  app.add_option("--connect", connect, "the server, HOST:PORT")->type_name("ADDR")->required();
  app.add_option("--socket", path, "where programs connect")->type_name("FILE")->required();
  app.add_option("--tls-cert", tls.cert, "own certificate, PEM")->type_name("FILE");
  app.add_option("--tls-key", tls.key, "its key")->type_name("FILE");
  app.add_option("--tls-ca", tls.ca, "who signs the server's certificate")->type_name("FILE");
  app.add_option("--idle-exit", idle_exit, "exit after this many seconds without a session")
      ->type_name("SECONDS")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--grace", grace,
                 "how long a session waits for the server when that cannot be reached or is silent (or "
                 "CUDA_REMOTE_GRACE; default: as the server has it, usually 600)")
      ->type_name("SECONDS")
      ->envname("CUDA_REMOTE_GRACE")
      ->check(CLI::Range(1, 86400));
  app.add_flag("--remove-folder", remove_folder, "remove the socket's folder, too, at the end");
  app.add_option("--watch-fd", watch_fd, "exit when this descriptor is closed at its other end")->type_name("FD");
  app.add_option("--ready-fd", ready_fd, "write the address to this descriptor and close it once ready")
      ->type_name("FD");
  app.add_option("--log-level", log_level, "log lines of this level and above")
      ->capture_default_str()
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error"}));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  CloseInherited(watch_fd, ready_fd);
  RaiseDescriptorLimit();  // it is that of the program that started this relay
  logging::SetUp("cr-relay", "%Y-%m-%d %H:%M:%S.%e %l %n: %v", log_level);

  // What gRPC says of a connection stands in our own messages, too.
  control::SendGrpcLogTo([](bool, const char* line) { logging::Debug("gRPC: {}", line); });
  control::FillFromEnvironment(&tls);
  const auto credentials = control::ClientTls(tls);
  if (!credentials.ok()) {
    logging::Critical("{}", std::string(credentials.status().message()));
    return kExitUsage;
  }
  bool local;
  const std::string target = control::ControlTarget(connect, &local);
  if (tls.empty() && !local) logging::Info("the connection to {} is not encrypted", connect);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // rings are files in memory, and the limit of file sizes is the program's
  const int signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
  auto listener = ListenUnix(path);
  if (!listener.ok()) {
    logging::Critical("{}", listener.status().message());
    return kExitCannotListen;
  }
  const std::string ready = "cr-relay ready: unix:" + path + "\n";
  fputs(ready.c_str(), stdout);
  fflush(stdout);
  if (ready_fd >= 0) {
    if (write(ready_fd, ready.data(), ready.size()) < 0) logging::Warn("--ready-fd: {}", strerror(errno));
    close(ready_fd);
  }

  std::list<Served> sessions;
  const int done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  auto idle_since = Now();
  std::string why;
  while (why.empty()) {
    int timeout = -1;
    if (idle_exit > 0 && sessions.empty()) {
      const double idle = SecondsSince(idle_since);
      if (idle >= idle_exit) {
        why = "idle";
        break;
      }
      timeout = int((idle_exit - idle) * 1000) + 1;
    }
    pollfd waiting[4] = {{listener->get(), POLLIN, 0}, {signal_fd, POLLIN, 0}, {done_fd, POLLIN, 0}, {watch_fd, 0, 0}};
    if (poll(waiting, 4, timeout) < 0 && errno != EINTR) break;
    if (waiting[1].revents) why = "a signal";
    if (watch_fd >= 0 && waiting[3].revents) why = "the run that it served is over";
    if (waiting[2].revents) {
      uint64_t count;
      if (read(done_fd, &count, sizeof(count)) < 0) continue;
      for (auto served = sessions.begin(); served != sessions.end();) {
        if (!served->done.load()) {
          ++served;
          continue;
        }
        served->thread.join();
        served = sessions.erase(served);
      }
      if (sessions.empty()) idle_since = Now();
      // The client library has started it.
      if (sessions.empty() && remove_folder) LetGoOfStreams();
    }
    if (waiting[0].revents) {
      const int socket = accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC);
      uint32_t uid = 0, pid = 0;
      if (socket < 0) {
        // The client stays where it is; to look again at once would only take the processor.
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
          logging::Error("cannot accept a client: {}", strerror(errno));
          std::this_thread::sleep_for(kAcceptPause);
        }
        continue;
      }
      if (!PeerUser(socket, &uid, &pid) || uid != geteuid()) {
        logging::Warn("refused a client of user {} (pid {})", uid, pid);
        close(socket);
        continue;
      }
      sessions.emplace_back();
      Served* const served = &sessions.back();
      served->session = std::make_unique<RelaySession>(socket, target, *credentials, tls.empty() && !local, grace);
      served->thread = StartThread([served, done_fd] {
        served->session->Run();
        served->done.store(true);
        const uint64_t one = 1;
        if (write(done_fd, &one, sizeof(one)) < 0) logging::Debug("done");
      });
      if (served->thread.joinable()) continue;
      logging::Warn("refused a client (pid {}): the system gives cr-relay no more threads", pid);
      sessions.pop_back();
    }
  }
  logging::Info("ending: {}", why);
  listener->Close();
  unlink(path.c_str());
  if (remove_folder) rmdir(path.substr(0, path.rfind('/')).c_str());
  for (Served& served : sessions) served.session->Stop("cr-relay ends (" + why + ")");
  // A session ends within seconds; a connection that hangs is not waited for.
  for (int waited = 0; waited < 500; ++waited) {
    bool all = true;
    for (Served& served : sessions) all = all && served.done.load();
    if (all) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  for (Served& served : sessions) {
    if (!served.done.load()) _exit(0);
    served.thread.join();
  }
  return 0;
}

}  // namespace
}  // namespace cuda_remote::client

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-relay: %s\n", error.what());
    return 1;
  }
}
