// SPDX-License-Identifier: Apache-2.0
// cr-hostd: saves and restores the jobs of ordinary users. See --help and README.md.

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/engines.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/isolation/network.h"
#include "host/hosts_server.h"
#include "host/move_source.h"
#include "host/move_state.h"
#include "host/peer.h"
#include "host/request.pb.h"
#include "host/signature.h"
#include "host/wire.h"
#include "host/worker.h"
#include "proto/base/short_waits.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/cli/help.h"
#include "proto/control/credentials.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/private_folder.h"
#include "proto/logging/log.h"

namespace cuda_remote::host {
namespace {

constexpr char kTool[] = "cr-hostd";
constexpr int kExitUsage = 2, kExitInUse = 3;

constexpr char kExamples[] = R"(
Examples:
  cr-hostd                              as its systemd unit starts it
  cr-hostd --listen 0.0.0.0:7071 --tls-cert C --tls-key K --tls-ca CA    jobs go to other hosts and come from them
  cr-hostd --allow-address 10.9.0.0/24@br0    users' jobs may have addresses of their own in this network
  cr-hostd --socket /tmp/lab/hostd.sock --state /tmp/lab/state    beside another one; users set CUDA_REMOTE_HOSTD

Users then start, save, restart and move jobs of their own with cr-run, cr-checkpoint, cr-restart and cr-migrate, which
need no root and no option for it. A job runs as its user, with that user's groups, limits and control group, and without
capabilities. An image belongs to its user, and is restored only if it is signed with this host's key, for the same user.

With a certificate, users move whole jobs to other hosts (cr-migrate --whole --to-host HOST), and with --listen jobs come
here. The authority of --tls-ca must sign hosts only, or --allow-host must name them: such a host can send a job as any user.
All hosts need the same --key, and the same users.

Runs in the foreground and writes what it does to standard error. SIGTERM and SIGINT end it; requests that are in progress
and jobs that run continue.

Exit codes: 0 ended by a signal, 1 failed, 2 wrong use, 3 another cr-hostd serves this socket.
)";

struct Options {
  std::string socket = checkpoint::HostdSocket(), state = "/var/lib/cuda-remote", key, listen;
  control::TlsFiles tls;
  std::vector<std::string> hosts, known_hosts, gpu_servers, addresses, operators;
  std::string user_cgroup, metrics;
  size_t requests = 64;
  int ready_fd = -1;
};

int Fail(const std::string& text, int code = 1) {
  fprintf(stderr, "%s: %s\n", kTool, text.c_str());
  return code;
}

int Fail(const absl::Status& status) { return Fail(std::string(status.message())); }

void Refuse(int socket, const std::string& text) {
  Reply reply;
  reply.set_kind(Reply::REFUSED);
  reply.set_text(text);
  Send(socket, reply);
}

// Waits for nobody: cr-hostd takes only the user's number from a connection, and its worker does the rest.
class Server {
 public:
  Server(const Options& options, const Settings& settings, const Key& key, int listener, int lock, pid_t network)
      : options_(options), settings_(settings), key_(key), listener_(listener), lock_(lock), network_(network) {}

  // Until a signal. False: what serves other hosts has died.
  bool Run() {
    sigset_t set;
    sigemptyset(&set);
    for (const int number : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&set, number);
    sigprocmask(SIG_BLOCK, &set, nullptr);
    signal(SIGHUP, SIG_IGN);
    const int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    for (bool ended = false; !ended;) {
      pollfd waiting[] = {{listener_, POLLIN, 0}, {signals, POLLIN, 0}};
      if (poll(waiting, 2, -1) < 0) continue;
      signalfd_siginfo info;
      while (read(signals, &info, sizeof(info)) == ssize_t(sizeof(info))) ended = ended || info.ssi_signo != SIGCHLD;
      pid_t worker;
      int status = 0;
      while ((worker = waitpid(-1, &status, WNOHANG)) > 0) {
        if (worker == network_) return false;
        if (workers_.erase(worker) != 0 && WIFSIGNALED(status)) CleanUp();
      }
      if (waiting[0].revents != 0 && !ended) Accept();
    }
    if (network_ > 0) kill(network_, SIGTERM);
    return true;
  }

 private:
  void Accept() {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) {
      // Without descriptors or memory: not at full speed.
      if (errno != ECONNABORTED && errno != EAGAIN) usleep(100000);
      return;
    }
    ucred peer = {};
    socklen_t size = sizeof(peer);
    size_t busy = 0;
    const bool known = getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
    for (const auto& [worker, user] : workers_) busy += user == peer.uid ? 1 : 0;
    // Root's are jobs that come from other hosts.
    if (peer.uid != 0 && busy >= options_.requests) {
      Refuse(socket,
             "this user has " + std::to_string(busy) + " jobs and requests with cr-hostd already (--user-requests)");
    } else if (known) {
      fflush(nullptr);
      const pid_t worker = fork();
      if (worker == 0) Work(socket);
      if (worker > 0) workers_[worker] = peer.uid;
      if (worker < 0) Refuse(socket, std::string("cr-hostd cannot start a process: ") + strerror(errno));
    }
    CloseWithoutWaiting(socket);
  }

  // After a worker that was killed, whose images may be large: in a process of its own.
  void CleanUp() {
    fflush(nullptr);
    if (fork() != 0) return;
    // The next cr-hostd need not wait for it, and nobody is to connect to a socket that nobody serves any more.
    close(listener_);
    close(lock_);
    CleanSpool(settings_);
    _exit(0);
  }

  [[noreturn]] void Work(int socket) {
    // Lives on when cr-hostd ends.
    setsid();
    close(listener_);
    close(lock_);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    try {
      // It starts processes of users.
      if (const absl::Status hidden = key_.HideFromChildren(); !hidden.ok()) _exit(Fail(hidden));
      ServeRequest(socket, settings_, key_);
    } catch (const std::exception& error) {
      logging::Error("{}", error.what());
    }
    _exit(0);
  }

  const Options& options_;
  const Settings& settings_;
  const Key& key_;
  const int listener_, lock_;
  const pid_t network_;  // 0: there is none
  std::map<pid_t, uid_t> workers_;
};

// The socket's folder is open to all, also if a tool of root's has made it for itself, and nobody but root may write to
// it.
absl::Status MakeOpenFolder(const std::string& path) {
  CR_RETURN_IF_ERROR(ToAbsl(CheckFolder(path, FolderUse::kServe)));
  if (chmod(path.c_str(), 0755) == 0) return absl::OkStatus();
  return ErrnoStatus("cannot open the folder " + path + " to users");
}

absl::StatusOr<UniqueFd> Listen(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError("the path " + path + " is too long for a socket");
  }
  memcpy(address.sun_path, path.c_str(), path.size());
  unlink(path.c_str());
  UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (listener.ok() && bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
      chmod(path.c_str(), 0666) == 0 && listen(listener.get(), 128) == 0) {
    return listener;
  }
  return ErrnoStatus("cannot serve " + path);
}

// Starts what serves other hosts and Prometheus. *port: where Prometheus asks.
absl::StatusOr<pid_t> StartNetwork(const Settings& settings, const Key& key, int lock, std::string* port) {
  int ready[2];
  if (pipe2(ready, O_CLOEXEC) != 0) return ErrnoStatus("pipe");
  fflush(nullptr);
  const pid_t parent = getpid(), child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    close(ready[0]);
    close(lock);
    int code = 1;
    try {
      const absl::Status hidden = key.HideFromChildren();
      if (!hidden.ok()) {
        Fail(hidden);
      } else if (getppid() == parent) {
        code = ServeHosts(settings, key, ready[1]);
      }
    } catch (const std::exception& problem) {
      logging::Critical("{}", problem.what());
    }
    _exit(code);
  }
  close(ready[1]);
  char text[1024];
  const ssize_t got = child > 0 ? read(ready[0], text, sizeof(text)) : -1;
  close(ready[0]);
  if (got <= 0) return absl::UnavailableError("the process that serves other hosts does not start");
  const std::string said(text, size_t(got)), listens = "ready";
  if (said.compare(0, listens.size(), listens) != 0) return absl::UnknownError(said);
  if (said.size() > listens.size()) *port = said.substr(listens.size() + 1);
  return child;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Saves and restores jobs of ordinary users, for their cr-run, cr-checkpoint, cr-restart and cr-migrate.",
               kTool);
  SetUpProgram(&app);
  app.footer("\nNeeds root and " + checkpoint::NewEngine()->Requirement() + ".\n" + kExamples);
  app.add_option("--socket", options.socket, "serve this socket; the folders of users' jobs are beside it")
      ->type_name("FILE")
      ->capture_default_str();
  app.add_option("--state", options.state,
                 "folder for the key, and for images on their way, which need free space there")
      ->type_name("DIR")
      ->capture_default_str();
  app.add_option("--key", options.key,
                 "file with the key that signs images, made if it is missing. Hosts that restore each other's images "
                 "need the same key (default: hostd.key in --state)")
      ->type_name("FILE");
  app.add_option("--user-requests", options.requests, "how many jobs and requests one user may have at a time")
      ->capture_default_str()
      ->check(CLI::Range(size_t{1}, size_t{100000}));
  app.add_option("--listen", options.listen,
                 "also accept jobs from other hosts: HOST:PORT, usually 0.0.0.0:" + std::string(kHostsPort))
      ->type_name("ADDR");
  app.add_option("--tls-cert", options.tls.cert,
                 "this host's certificate (PEM), with the name by which others reach it")
      ->type_name("FILE");
  app.add_option("--tls-key", options.tls.key, "its key (PEM)")->type_name("FILE");
  app.add_option("--tls-ca", options.tls.ca, "the authority that has signed the hosts' certificates (PEM)")
      ->type_name("FILE");
  app.add_option("--allow-host", options.hosts,
                 "subject of a host's certificate, as in CN=node7,O=lab: accept jobs from the hosts that are named so "
                 "only. May be given several times")
      ->type_name("SUBJECT")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--known-host", options.known_hosts,
                 "HOST or HOST:PORT of another cr-hostd, which cr-ps --hosts shows besides this one. May be given "
                 "several times")
      ->type_name("HOST")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--gpu-server", options.gpu_servers,
                 "unix:PATH or HOST:PORT of a cr-server of this host, for cr-ps --hosts (default: root's, if it runs). "
                 "May be given several times")
      ->type_name("ADDR")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--allow-address", options.addresses,
                 "ADDRESS/PREFIX[@INTERFACE], as in 10.9.0.0/24 or 10.9.0.0/24@br0: users may give their jobs "
                 "addresses of this network (cr-run --address). Without it there are none. May be given several times")
      ->type_name("NETWORK")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--metrics", options.metrics,
                 "answer Prometheus at HOST:PORT/metrics. Anybody who can connect may read it: choose 127.0.0.1 or a "
                 "network of operators")
      ->type_name("ADDR");
  app.add_option("--operator", options.operators,
                 "USER or @GROUP that may list and save other users' jobs, and drain this host (cr-ps --hosts, "
                 "cr-checkpoint --user, cr-drain); images belong to the jobs' owners. May be given several times")
      ->type_name("USER")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--user-cgroup", options.user_cgroup,
                 "control group for users' jobs that come from other hosts, as in jobs/user-%u, with the user's number "
                 "for %u; it must exist (default: the user's slice of systemd, if there is one)")
      ->type_name("PATH");
  app.add_option("--ready-fd", options.ready_fd, "write a line to this descriptor and close it once ready")
      ->type_name("FD");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (geteuid() != 0) return Fail("cr-hostd needs root");
  // Without these it could look at no process that asks, and start no job that can be saved.
  const std::string missing =
      checkpoint::MissingCapability({{CAP_SYS_ADMIN, "SYS_ADMIN"}, {CAP_SYS_PTRACE, "SYS_PTRACE"}});
  if (!missing.empty()) return Fail("cr-hostd needs " + missing);
  if (options.socket.empty() || options.socket[0] != '/' || options.state.empty() || options.state[0] != '/')
    return Fail("--socket and --state take absolute paths", kExitUsage);
  signal(SIGPIPE, SIG_IGN);
  umask(077);
  // What users send must not become a standard stream here.
  for (int fd = 0; fd >= 0 && fd < 3;) fd = open("/dev/null", O_RDWR);
  Settings settings;
  settings.socket = options.socket;
  settings.spool = options.state + "/spool";
  settings.moves = options.state + "/moves";
  settings.listen = options.listen;
  settings.tls = options.tls;
  settings.hosts = options.hosts;
  settings.known_hosts = options.known_hosts;
  settings.gpu_servers = options.gpu_servers;
  settings.addresses = options.addresses;
  settings.metrics = options.metrics;
  settings.counters = Counters::Make();
  settings.operators = options.operators;
  settings.user_cgroup = options.user_cgroup;
  for (const std::string& rule : options.operators) {
    const absl::Status checked = CheckOperatorRule(rule);
    if (!checked.ok()) return Fail("--operator: " + std::string(checked.message()), kExitUsage);
  }
  if (options.user_cgroup.find("..") != std::string::npos)
    return Fail("--user-cgroup takes the path of a control group below the root of its hierarchy", kExitUsage);
  for (const std::string& network : options.addresses) {
    const absl::Status checked = checkpoint::CheckNetworkRule(network);
    if (!checked.ok()) return Fail("--allow-address: " + std::string(checked.message()), kExitUsage);
  }
  if (!options.listen.empty() && options.tls.empty())
    return Fail("--listen needs --tls-cert, --tls-key and --tls-ca", kExitUsage);
  if (!options.tls.empty()) {
    const auto contents = control::ReadTls(options.tls);
    if (!contents.ok()) return Fail(contents.status());
  }
  const std::string folder = options.socket.substr(0, options.socket.rfind('/'));
  for (const std::string& one : {folder, folder + "/users"}) {
    if (const absl::Status made = MakeOpenFolder(one); !made.ok()) return Fail(made);
  }
  for (const std::string& one : {settings.spool, settings.moves}) {
    if (const Status made = CheckFolder(one, FolderUse::kMake); !made.ok()) return Fail(made.message());
  }
  const int lock = open((options.socket + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock < 0 || flock(lock, LOCK_EX | LOCK_NB) != 0)
    return Fail("another cr-hostd serves " + options.socket + " (--socket)", kExitInUse);
  Key key;
  const absl::Status loaded = key.Load(options.key.empty() ? options.state + "/hostd.key" : options.key);
  if (!loaded.ok()) return Fail(loaded);
  // What fails before this is the command's own answer; from here on there is a log.
  logging::SetUp(kTool, "%Y-%m-%d %H:%M:%S.%e %l %n: %v", "info");
  CleanSpool(settings);
  CleanMoveStates(settings.moves);
  const bool serves = !options.listen.empty() || !options.metrics.empty();
  std::string port;
  const absl::StatusOr<pid_t> network = serves ? StartNetwork(settings, key, lock, &port) : 0;
  if (!network.ok()) return Fail(network.status());
  const absl::StatusOr<UniqueFd> listener = Listen(options.socket);
  if (!listener.ok()) return Fail(listener.status());
  std::string serving = options.socket;
  if (!options.listen.empty()) serving += " and hosts at " + options.listen;
  if (!port.empty()) serving += " and metrics at " + options.metrics.substr(0, options.metrics.rfind(':')) + ":" + port;
  logging::Info("serving {}", serving);
  if (options.ready_fd >= 0) {
    const ssize_t ignored = write(options.ready_fd, "ready\n", 6);
    static_cast<void>(ignored);
    close(options.ready_fd);
  }
  const bool served = Server(options, settings, key, listener->get(), lock, *network).Run();
  unlink(options.socket.c_str());
  if (!served) logging::Critical("the process that serves other hosts has died");
  return served ? 0 : 1;
}

}  // namespace
}  // namespace cuda_remote::host

int main(int argc, char** argv) {
  try {
    return cuda_remote::host::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-hostd: %s\n", error.what());
    return 1;
  }
}
