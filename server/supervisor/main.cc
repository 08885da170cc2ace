// SPDX-License-Identifier: Apache-2.0
// cr-server: the GPU node's daemon. See --help.

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/base/clock.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"
#include "proto/channel/handshake.h"
#include "proto/cli/help.h"
#include "proto/cli/wrong_use.h"
#include "proto/control/buffer_memory.h"
#include "proto/control/credentials.h"
#include "proto/control/eager_poll.h"
#include "proto/control/listener.h"
#include "proto/control/log_limit.h"
#include "proto/errors/annotate.h"
#include "proto/folder/private_folder.h"
#include "proto/logging/log.h"
#include "proto/threads/mutex.h"
#include "server/supervisor/control_service.h"
#include "server/supervisor/identity.h"
#include "server/supervisor/init_tls.h"
#include "server/supervisor/metrics.h"
#include "server/supervisor/restrict.h"
#include "server/supervisor/server_poller.h"
#include "server/supervisor/spawn.h"
#include "server/supervisor/supervisor.h"
#include "server/supervisor/tokens.h"
#include "server/supervisor/tunnel_service.h"

namespace cuda_remote::server {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
constexpr int kExitCannotListen = 3;

constexpr char kExamples[] = R"(
Examples:
  cr-server                                  local jobs of this user; prints the address for cr-run --server
  cr-server --dir /run/user/1000/gpu --workers 2
  cr-server --listen 0.0.0.0:7070 --tls-cert server.pem --tls-key server.key --tls-ca clients.pem
  cr-server --init-tls /etc/cuda-remote/tls --tls-client alice,bob     certificates
  cr-server --new-token carol --tokens /etc/cuda-remote/tokens         a token, for --tokens
  cr-server --listen 0.0.0.0:7070 --insecure-tcp 10.1.2.0/24
  cr-server --dir /run/cuda-remote --allow-group gpu-users --session-user cuda-remote
  cr-server --config /etc/cuda-remote/server.conf
  cr-server --metrics 127.0.0.1:9400
  cr-server --driver /opt/cuda-remote/libsoftgpu.so --workers 0

Sockets: DIR/session.sock for jobs and cr-ps, DIR/control.sock for gRPC. They serve the same user only; the first one
also serves users that --allow-user and --allow-group admit.

A session belongs to who opened it: a user (uid:1000), a client certificate (cert:CN=alice,O=lab), a token
(token:carol), or a host of --insecure-tcp (address:10.1.2.3). Only the owner and operators can see or end it.

SIGHUP reads the --config file, the certificates and the tokens again; sessions continue. These options are read again:
--operator, --insecure-tcp, --allow-user, --allow-group, --log-level, and the limits of sessions, memory and GPUs.

Exit codes: 0 ended by SIGTERM or SIGINT, 1 failure while running, 2 wrong use,
3 cannot listen (folder or address in use).
)";

// Options that are lists of texts.
struct Lists {
  std::vector<std::string> operators, insecure, users, groups;
  std::string session_user;
};

// What cr-server makes instead of serving.
struct Preparations {
  TlsPlan tls;
  std::string new_token;
};

// More are never needed, and some programs take long with more.
constexpr rlim_t kWantedDescriptors = 65536;
// The part of the descriptors that TCP connections may take; sessions, workers and local clients have the rest.
constexpr size_t kConnectionShare = 4;

// gRPC has a thread for each stream of a session, and some for calls.
int MostThreads(const Policy& policy) {
  constexpr int kOther = 512, kEverySession = 1 + int(control::TunnelEnd::kMostLanes), kMost = 16384;
  if (policy.max_sessions == 0 || policy.max_sessions > kMost / kEverySession) return kMost;
  return kOther + policy.max_sessions * kEverySession;
}

// What gRPC said last, for a message of our own.
class LastGrpcError {
 public:
  void Set(const char* line) {
    MutexLock lock(&mutex_);
    line_ = line;
  }
  std::string Get() {
    MutexLock lock(&mutex_);
    return line_;
  }
  // Whether a line may be written.
  bool Allow(std::string* more) {
    MutexLock lock(&mutex_);
    return limit_.Allow(more);
  }

 private:
  Mutex mutex_;
  std::string line_ CR_GUARDED_BY(mutex_) = "gRPC does not say why";
  control::LogLimit limit_ CR_GUARDED_BY(mutex_);
};
LastGrpcError g_last_grpc_error;

// Strangers at the port make gRPC talk.
void LogForGrpc(bool error, const char* line) {
  if (error) g_last_grpc_error.Set(line);
  std::string more;
  if (error && g_last_grpc_error.Allow(&more)) {
    logging::Warn("gRPC: {}{}", line, more);
  } else {
    logging::Trace("gRPC: {}", line);
  }
}

void AddPreparations(CLI::App* app, Preparations* preparations) {
  app->add_option("--init-tls", preparations->tls.directory,
                  "make an authority, a certificate for this server and one for a client in this folder, and exit")
      ->type_name("DIR");
  app->add_option("--tls-name", preparations->tls.names,
                  "with --init-tls: names and addresses by which clients reach this server, besides its host name")
      ->type_name("NAME,...")
      ->delimiter(',');
  app->add_option("--tls-client", preparations->tls.clients,
                  "with --init-tls: names of the clients' certificates (default: client)")
      ->type_name("NAME,...")
      ->delimiter(',');
  app->add_option("--tls-days", preparations->tls.days, "with --init-tls: how long certificates are valid")
      ->type_name("DAYS")
      ->capture_default_str()
      ->check(CLI::Range(kRenewDays + 1, kAuthorityDays));
  app->add_option("--new-token", preparations->new_token,
                  "add a token of this name to the file of --tokens, print the token, and exit")
      ->type_name("NAME");
}

int PrintFailure(const absl::Status& status) {
  fprintf(stderr, "cr-server: %s\n", std::string(status.message()).c_str());
  return kExitFailure;
}

int PrintInitTls(TlsPlan plan) {
  std::vector<std::string> names = OwnNames();
  names.insert(names.begin() + (names.size() > 3 ? 1 : 0), plan.names.begin(), plan.names.end());
  plan.names = names;
  if (plan.clients.empty()) plan.clients = {"client"};
  if (plan.directory[0] != '/') {
    char folder[4096];
    if (getcwd(folder, sizeof(folder))) plan.directory = std::string(folder) + "/" + plan.directory;
  }
  while (plan.directory.size() > 1 && plan.directory.back() == '/') plan.directory.pop_back();
  const absl::StatusOr<std::vector<MadeCertificate>> certificates = InitTls(plan);
  if (!certificates.ok()) return PrintFailure(certificates.status());
  for (const MadeCertificate& one : *certificates) {
    printf("%-8s %s (%s), valid until %s, %d days\n", one.made ? "made" : "is there", one.path.c_str(),
           one.subject.c_str(), one.expires.c_str(), one.days_left);
  }
  const std::string& dir = plan.directory;
  const std::string client = dir + "/" + plan.clients[0];
  printf(
      "\nThe server:  cr-server --listen 0.0.0.0:7070 --tls-cert %s/server.pem --tls-key %s/server.key --tls-ca "
      "%s/ca.pem\n"
      "A client has %s.pem, %s.key and %s/ca.pem (no other file of these), and\n"
      "             CUDA_REMOTE_TLS_CERT, CUDA_REMOTE_TLS_KEY and CUDA_REMOTE_TLS_CA, which name them.\n"
      "Run this command again to renew what ends within %d days; SIGHUP makes cr-server read it.\n",
      dir.c_str(), dir.c_str(), dir.c_str(), client.c_str(), client.c_str(), dir.c_str(), kRenewDays);
  return 0;
}

int PrintNewToken(const std::string& path, const std::string& name) {
  if (path.empty()) {
    fprintf(stderr, "cr-server: --new-token needs --tokens FILE, the file that it adds the token to\n");
    return kExitUsage;
  }
  const absl::StatusOr<std::string> token = MakeToken(path, name);
  if (!token.ok()) return PrintFailure(token.status());
  puts(token->c_str());
  fprintf(stderr,
          "cr-server: this is the token of token:%s; %s has its hash only. The client keeps it in a file with mode "
          "0600 that CUDA_REMOTE_TOKEN_FILE names, and the authority in CUDA_REMOTE_TLS_CA.\n",
          name.c_str(), path.c_str());
  return 0;
}

void AddOptions(CLI::App* app, Options* options, Lists* lists) {
  Policy* const policy = &options->policy;
  app->footer(kExamples);
  app->set_config("--config", "", "file with options, one a line, as in: operator = \"CN=ops,O=lab\"")
      ->type_name("FILE");
  // A misspelled option must not be left out silently: it may be a limit.
  app->allow_config_extras(CLI::config_extras_mode::error);
  app->add_option("--dir", options->directory,
                  "folder for the sockets (default: $XDG_RUNTIME_DIR/cuda-remote, /run/cuda-remote (root), "
                  "/run/user/UID/cuda-remote or /tmp/cuda-remote-UID)")
      ->type_name("DIR");
  app->add_option("--listen", options->listen, "also serve other hosts, at HOST:PORT (port 0: any free one)")
      ->type_name("ADDR");
  app->add_option("--tls-cert", options->tls.cert, "this server's certificate, PEM (or CUDA_REMOTE_TLS_CERT)")
      ->type_name("FILE");
  app->add_option("--tls-key", options->tls.key, "its key (or CUDA_REMOTE_TLS_KEY)")->type_name("FILE");
  app->add_option("--tls-ca", options->tls.ca,
                  "authority that signed the clients' certificates, PEM (or CUDA_REMOTE_TLS_CA)")
      ->type_name("FILE");
  app->add_option("--tokens", options->tokens,
                  "file of tokens that clients may show instead of a certificate (--new-token adds one)")
      ->type_name("FILE");
  app->add_option("--insecure-tcp", lists->insecure,
                  "serve these hosts, addresses or networks as in 10.1.2.0/24,10.1.3.7, without encryption and "
                  "authentication: any user of such a host can use the GPU")
      ->type_name("NETWORK,...")
      ->delimiter(',');
  app->add_option("--operator", lists->operators,
                  "who may see and end all sessions, besides root and the server's own user: the subject of a client "
                  "certificate, or uid:USER (may be given several times)")
      ->type_name("IDENTITY");
  app->add_option(
         "--allow-user", lists->users,
         "local users who are served besides the server's own (names or numbers; needs root and --session-user)")
      ->type_name("USER,...")
      ->delimiter(',');
  app->add_option("--allow-group", lists->groups,
                  "serve the members of these local groups (needs root and --session-user)")
      ->type_name("GROUP,...")
      ->delimiter(',');
  app->add_option("--session-user", lists->session_user,
                  "run the workers of other users' sessions as this user, so that they cannot read the server's files "
                  "(needs root; the user must have access to the GPU's device files)")
      ->type_name("USER");
  app->add_flag("!--unrestricted", options->restrict_workers,
                "workers keep their capabilities and may make all system calls; only to find out whether a driver "
                "needs one of them");
  app->add_flag("--randomize-addresses", options->random_addresses,
                "workers keep address space randomisation, which makes errors in the driver harder to exploit. Jobs of "
                "this server cannot be saved or moved");
  app->add_flag("--userfaultfd", options->give_userfaultfd,
                "pass /dev/userfaultfd, which ordinary users may not open, to programs of this machine, so that their "
                "managed memory can be on the GPU. This gives them what vm.unprivileged_userfaultfd=1 would give all "
                "users: some errors of the kernel are easier to exploit");
  app->add_option("--metrics", options->metrics,
                  "answer Prometheus at HOST:PORT/metrics. Anybody who can connect may read it: choose 127.0.0.1 or a "
                  "network of operators")
      ->type_name("ADDR");
  app->add_option("--workers", options->workers, "workers kept ready for new sessions")
      ->capture_default_str()
      ->check(CLI::Range(0, 64));
  app->add_option("--gpu", options->gpu, "serve this GPU only (ordinal)")->check(CLI::Range(0, 255));
  app->add_option("--driver", options->driver,
                  "driver library (default: libcuda.so.1 if it finds a GPU, else the software GPU)")
      ->type_name("FILE")
      ->envname("CUDA_REMOTE_DRIVER");
  app->add_option("--memory-limit", policy->memory_limit, "device memory that one session may hold, as in 8GB")
      ->type_name("SIZE")
      ->transform(CLI::AsSizeValue(false));
  app->add_option("--user-memory-limit", policy->user_memory_limit,
                  "device memory that all sessions of one identity other than the server's own user may hold together")
      ->type_name("SIZE")
      ->transform(CLI::AsSizeValue(false));
  app->add_option("--max-sessions", policy->max_sessions, "sessions at a time; 0: no limit")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app->add_option("--user-sessions", policy->user_sessions,
                  "sessions at a time of one identity other than the server's own user; 0: no limit")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app->add_option("--session-gpus", policy->session_gpus,
                  "GPUs that one session sees, unless it asks for one; 0: no limit")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app->add_option("--user-gpus", policy->user_gpus,
                  "GPUs that all sessions of one identity other than the server's own user see; 0: no limit")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app->add_option("--max-connections", options->max_connections,
                  "TCP connections at a time (default: a quarter of the descriptors that the process may have)")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--grace", options->grace_seconds,
                  "how long a session of another host waits for its broken connection to come back, if its user "
                  "does not choose a time (CUDA_REMOTE_GRACE)")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(CLI::Range(0, 86400));
  app->add_option("--worker", options->worker, "path of cr-worker (default: beside cr-server)")->type_name("FILE");
  app->add_option("--log-level", policy->log_level, "log lines of this level and above")
      ->capture_default_str()
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error"}));
  app->add_option("--ready-fd", options->ready_fd, "write the address to this descriptor and close it once ready")
      ->type_name("FD");
}

// Takes apart what the command line has as texts. Fails if one of them is wrong.
absl::Status ReadLists(const Lists& lists, const std::string& tokens, Policy* policy) {
  if (!tokens.empty()) {
    absl::StatusOr<TokenNames> names = ReadTokens(tokens);
    if (!names.ok()) return Annotate("--tokens: ", names.status());
    policy->tokens = *std::move(names);
  }
  for (const std::string& text : lists.operators) {
    const absl::StatusOr<std::string> identity = ParseIdentity(text);
    if (!identity.ok()) return Annotate("--operator: ", identity.status());
    policy->operators.insert(*identity);
  }
  for (const std::string& text : lists.users) {
    const absl::StatusOr<Account> account = FindAccount(text);
    if (!account.ok()) return Annotate("--allow-user: ", account.status());
    policy->users.insert(account->uid);
  }
  for (const std::string& text : lists.groups) {
    const bool number = !text.empty() && text.size() < 10 && text.find_first_not_of("0123456789") == std::string::npos;
    const group* const found = number ? nullptr : getgrnam(text.c_str());
    if (!number && !found) return absl::NotFoundError("--allow-group: there is no group " + text + " on this machine");
    policy->groups.insert(number ? gid_t(std::stoul(text)) : found->gr_gid);
  }
  for (const std::string& text : lists.insecure) {
    CR_RETURN_IF_ERROR(Annotate("--insecure-tcp: ", policy->insecure.Add(text)));
  }
  return absl::OkStatus();
}

// The command line once more, with the configuration file as it is now. Fails if something is wrong with that file.
absl::StatusOr<Options> ReadAgain(int argc, char** argv) {
  Options options;
  Lists lists;
  CLI::App app;
  AddOptions(&app, &options, &lists);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& failure) {
    return absl::InvalidArgumentError(Mistake(app, failure));
  }
  CR_RETURN_IF_ERROR(ReadLists(lists, options.tokens, &options.policy));
  return options;
}

// What SIGHUP does: the policy, the certificates and the log level are read again; nothing that runs is touched.
void Reload(int argc, char** argv, const Options& running, control::ServerTls* tls, control::Listener* listener,
            Supervisor* supervisor) {
  const absl::StatusOr<Options> read = ReadAgain(argc, argv);
  if (!read.ok()) {
    logging::Error("SIGHUP: the configuration stays as it was: {}", std::string(read.status().message()));
  } else {
    const Policy& policy = read->policy;
    logging::SetLevel(policy.log_level);
    supervisor->SetPolicy(policy);
    if (!running.policy.insecure.empty() && !policy.insecure.empty()) listener->SetAllowed(policy.insecure);
    if ((!policy.users.empty() || !policy.groups.empty()) && !running.serves_others)
      logging::Warn(
          "SIGHUP: other local users are served once cr-server was started with --allow-user or --allow-group");
    if (running.policy.insecure.empty() != policy.insecure.empty() || read->listen != running.listen)
      logging::Warn("SIGHUP: whether and where to listen is only read when cr-server starts");
    logging::Info("SIGHUP: the configuration was read again");
  }
  if (!tls) return;
  if (const absl::Status reloaded = tls->Reload(running.tls); reloaded.ok()) {
    logging::Info("SIGHUP: new connections use the certificates that {} and {} hold now", running.tls.cert,
                  running.tls.ca);
  } else {
    logging::Error("SIGHUP: the certificates stay as they were: {}", std::string(reloaded.message()));
  }
}

// Descriptors are what sessions and connections take first.
size_t RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  limit.rlim_cur = std::max<rlim_t>(limit.rlim_cur, std::min<rlim_t>(limit.rlim_max, kWantedDescriptors));
  setrlimit(RLIMIT_NOFILE, &limit);
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? size_t(limit.rlim_cur) : 1024;
}

// The limit of file sizes is for the files of whoever started this server, perhaps with a program of a job. Here and in
// the workers "files" are shared memory. Beyond the limit a call is to fail, not to end the process.
void RaiseFileSizeLimit() {
  signal(SIGXFSZ, SIG_IGN);
  rlimit limit{RLIM_INFINITY, RLIM_INFINITY};
  if (setrlimit(RLIMIT_FSIZE, &limit) == 0 || getrlimit(RLIMIT_FSIZE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_FSIZE, &limit);
}

// Whether this process could still find its own programs and libraries without capabilities, by the owners and modes
// of the folders on the way: not where root runs a build in somebody's closed home.
bool ReachesOwnFolder() {
  std::string path = ReadLink("/proc/self/exe");
  while (path.find('/', 1) != std::string::npos) {
    path.resize(path.rfind('/'));
    struct stat folder;
    if (stat(path.c_str(), &folder) != 0) return false;
    const mode_t search = folder.st_uid == geteuid() ? S_IXUSR : folder.st_gid == getegid() ? S_IXGRP : S_IXOTH;
    if ((folder.st_mode & search) == 0) return false;
  }
  return true;
}

// Tells systemd that the server is ready, where systemd started it with Type=notify and waits for that.
void NotifyServiceManager() {
  const char* const path = getenv("NOTIFY_SOCKET");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t length = path ? strlen(path) : 0;
  if (length < 2 || length >= sizeof(address.sun_path)) return;
  memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // an abstract socket
  constexpr char kReady[] = "READY=1";
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const auto size = socklen_t(offsetof(sockaddr_un, sun_path) + length);
  if (fd < 0 || sendto(fd, kReady, strlen(kReady), MSG_NOSIGNAL, reinterpret_cast<sockaddr*>(&address), size) < 0)
    logging::Warn("cannot tell systemd at {} that the server is ready: {}", path, strerror(errno));
  if (fd >= 0) close(fd);
}

// Gives the exit code, for what cannot start.
int LogFailure(const absl::Status& status, int exit_code) {
  logging::Critical("{}", std::string(status.message()));
  return exit_code;
}

int Main(int argc, char** argv) {
  control::KeepBufferMemory();
  control::PollEagerly();
  Supervisor::BlockSignals();
  Options options;
  Lists lists;
  Preparations preparations;
  CLI::App app("Serves this machine's GPU to CUDA programs that run under cr-run.", "cr-server");
  SetUpProgram(&app);
  AddOptions(&app, &options, &lists);
  AddPreparations(&app, &preparations);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (!preparations.tls.directory.empty()) return PrintInitTls(preparations.tls);
  if (!preparations.new_token.empty()) return PrintNewToken(options.tokens, preparations.new_token);
  logging::SetUp("cr-server", "%Y-%m-%d %H:%M:%S.%e %l %n: %v", options.policy.log_level);
  control::SendGrpcLogTo(LogForGrpc);
  const size_t descriptors = RaiseDescriptorLimit();
  RaiseFileSizeLimit();

  if (options.directory.empty()) options.directory = RuntimeFolders().front();
  if (options.directory[0] != '/') {
    char folder[4096];
    if (getcwd(folder, sizeof(folder))) options.directory = std::string(folder) + "/" + options.directory;
  }
  while (options.directory.size() > 1 && options.directory.back() == '/') options.directory.pop_back();
  if (options.worker.empty()) options.worker = FindCompanion("cr-worker", {"", "../worker/", "../libexec/"});
  if (options.worker.empty()) {
    logging::Critical("cr-worker is not beside cr-server; name it with --worker");
    return kExitUsage;
  }
  options.monitor = FindCompanion("cr-nvml", {"", "../nvml/", "../libexec/"});
  if (const absl::Status lists_read = ReadLists(lists, options.tokens, &options.policy); !lists_read.ok())
    return LogFailure(lists_read, kExitUsage);
  options.serves_others = !options.policy.users.empty() || !options.policy.groups.empty();
  if (!lists.session_user.empty()) {
    absl::StatusOr<Account> account = FindAccount(lists.session_user);
    if (!account.ok()) return LogFailure(Annotate("--session-user: ", account.status()), kExitUsage);
    options.session_user = *std::move(account);
  }
  if ((options.serves_others || options.session_user) && geteuid() != 0) {
    logging::Critical(
        "--allow-user, --allow-group and --session-user need root: only root can run workers as another user");
    return kExitUsage;
  }
  if (options.serves_others && !options.session_user) {
    logging::Critical(
        "--allow-user and --allow-group need --session-user, so that a worker that serves somebody else does "
        "not run as root");
    return kExitUsage;
  }
  if (options.session_user && options.session_user->uid == 0) {
    logging::Critical("--session-user must not be root");
    return kExitUsage;
  }
  if (options.give_userfaultfd) {
    const int device = OpenFaultDevice();
    if (device < 0) {
      logging::Critical(
          "--userfaultfd: cannot open /dev/userfaultfd: {}; it needs Linux 6.1 and root, or access to the "
          "device for the server's user",
          strerror(errno));
      return kExitUsage;
    }
    close(device);
  }
  const bool insecure = !options.policy.insecure.empty();
  if (options.listen.empty() && (insecure || !options.tls.empty() || !options.tokens.empty())) {
    logging::Critical("--tls-*, --tokens and --insecure-tcp are about --listen, which is missing");
    return kExitUsage;
  }
  std::unique_ptr<control::ServerTls> tls;
  control::Listener listener([](bool error, const std::string& line) {
    if (error) {
      logging::Error("{}", line);
    } else {
      logging::Warn("{}", line);
    }
  });
  if (!options.listen.empty()) {
    if (insecure) {
      if (!options.tls.empty() || !options.tokens.empty()) {
        logging::Critical("--insecure-tcp excludes --tls-* and --tokens: without TLS, anybody on the way sees a token");
        return kExitUsage;
      }
      listener.SetAllowed(options.policy.insecure);
    } else {
      control::FillFromEnvironment(&options.tls);
      options.tls.token.clear();  // a client's
      auto created = control::ServerTls::Create(options.tls);
      if (!created.ok()) {
        logging::Critical("{}{}", std::string(created.status().message()),
                          options.tls.empty() ? "; without TLS, --listen needs --insecure-tcp with the hosts that may "
                                                "connect"
                                              : "");
        return kExitUsage;
      }
      tls = *std::move(created);
    }
    if (const absl::Status listens = listener.Listen(options.listen); !listens.ok())
      return LogFailure(listens, kExitCannotListen);
  }

  if (options.restrict_workers && !ReachesOwnFolder()) {
    logging::Warn(
        "cr-server lies below a folder that is closed to root without capabilities; it and its workers keep "
        "their capabilities and system calls, as with --unrestricted");
    options.restrict_workers = false;
  }
  if (options.driver.empty()) MakeDeviceFiles();
  Supervisor supervisor(options);
  if (const absl::Status started = supervisor.Start(); !started.ok()) return LogFailure(started, kExitCannotListen);
  // Before the first thread of gRPC's: each would keep what it has.
  if (options.restrict_workers) {
    if (const absl::Status restricted = RestrictServer(); !restricted.ok()) {
      logging::Critical("{} (cr-server --unrestricted starts without this restriction)",
                        std::string(restricted.message()));
      return kExitCannotListen;
    }
  }
  grpc::ServerBuilder builder;
  ServerPoller poller(&builder);
  ControlService control_service(&supervisor);
  TunnelService tunnel_service(&supervisor, &poller);
  const std::string control_path = ControlSocketPath(options.directory);
  unlink(control_path.c_str());  // the folder is ours alone (server.lock)
  control::SetServerArguments(&builder);
  grpc::ResourceQuota quota("cr-server");
  quota.SetMaxThreads(MostThreads(options.policy));
  builder.SetResourceQuota(quota);
  builder.AddListeningPort("unix:" + control_path, grpc::InsecureServerCredentials());
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
  if (!options.listen.empty()) {
    acceptor = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        tls ? tls->Credentials(!options.tokens.empty()) : grpc::InsecureServerCredentials());
  }
  builder.RegisterService(&control_service);
  builder.RegisterService(&tunnel_service);
  const mode_t before = umask(0177);
  std::unique_ptr<grpc::Server> grpc_server = builder.BuildAndStart();
  umask(before);
  if (!grpc_server) {
    logging::Critical("cannot listen on {}: {}", control_path, g_last_grpc_error.Get());
    unlink(SessionSocketPath(options.directory).c_str());
    unlink(control_path.c_str());
    return kExitCannotListen;
  }
  poller.Start();
  if (acceptor) {
    supervisor.SetProven(
        [&listener](const control::IpAddress& address, uint16_t port) { listener.Proven(address, port); },
        [&listener](const control::IpAddress& address, uint16_t port) { listener.Refused(address, port); });
    const size_t most = options.max_connections > 0 ? size_t(options.max_connections) : descriptors / kConnectionShare;
    listener.Start(most, [&acceptor](int fd) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.fd = fd;
      acceptor->HandleNewConnection(&connection);
    });
  }
  std::unique_ptr<metrics::Exporter> metrics;
  if (!options.metrics.empty()) {
    absl::StatusOr<std::unique_ptr<metrics::Exporter>> exporter = ServeMetrics(options.metrics, &supervisor);
    if (!exporter.ok()) {
      const int failure = LogFailure(exporter.status(), kExitCannotListen);
      listener.Stop();
      grpc_server->Shutdown();
      grpc_server->Wait();
      poller.Stop();
      unlink(SessionSocketPath(options.directory).c_str());
      unlink(control_path.c_str());
      return failure;
    }
    metrics = *std::move(exporter);
  }
  std::string ready = "cr-server ready: unix:" + SessionSocketPath(options.directory);
  if (acceptor) {
    ready += " tcp:" + options.listen.substr(0, options.listen.rfind(':')) + ":" + std::to_string(listener.port());
    if (insecure) {
      logging::Warn(
          "--insecure-tcp: every user of a listed host can use the GPU at port {}, and whoever is on the way "
          "can read and change what is sent",
          listener.port());
    }
  }
  if (metrics) {
    const std::string& address = options.metrics;
    ready += " metrics:" + address.substr(0, address.rfind(':')) + ":" + std::to_string(metrics->port());
  }
  logging::Info("serving {}", ready.substr(strlen("cr-server ready: ")));
  ready += "\n";
  fputs(ready.c_str(), stdout);
  fflush(stdout);
  if (options.ready_fd >= 0) {
    if (write(options.ready_fd, ready.data(), ready.size()) < 0) logging::Warn("--ready-fd: {}", strerror(errno));
    close(options.ready_fd);
  }

  NotifyServiceManager();

  supervisor.Run([&] { Reload(argc, argv, options, tls.get(), &listener, &supervisor); });

  metrics.reset();
  listener.Stop();
  tunnel_service.Shutdown();
  grpc_server->Shutdown(WallNow() + std::chrono::seconds(2));
  grpc_server->Wait();
  poller.Stop();
  unlink(control_path.c_str());
  logging::Info("ended");
  return 0;
}

}  // namespace
}  // namespace cuda_remote::server

int main(int argc, char** argv) {
  try {
    return cuda_remote::server::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-server: %s\n", error.what());
    return 1;
  }
}
