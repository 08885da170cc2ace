// cr-server: the GPU node's daemon. See --help.

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "proto/channel/handshake.h"
#include "proto/control/buffer_memory.h"
#include "proto/control/credentials.h"
#include "proto/control/eager_poll.h"
#include "proto/folder/private_folder.h"
#include "proto/frame/version.h"
#include "server/supervisor/control_service.h"
#include "server/supervisor/server_poller.h"
#include "server/supervisor/spawn.h"
#include "server/supervisor/supervisor.h"
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
  cr-server --driver /opt/cuda-remote/libsoftgpu.so --workers 0

Sockets: DIR/session.sock for jobs, DIR/control.sock for cr-ps. Both serve the same user only.

Exit codes: 0 ended by SIGTERM or SIGINT, 1 failure while running, 2 wrong use,
3 cannot listen (folder or address in use).
)";

int Main(int argc, char** argv) {
  control::KeepBufferMemory();
  control::PollEagerly();
  Supervisor::BlockSignals();
  Options options;
  CLI::App app("Serves this machine's GPU to CUDA programs that run under cr-run.", "cr-server");
  app.footer(kExamples);
  app.set_version_flag("--version", VersionLine("cr-server"));
  app.add_option("--dir", options.directory,
                 "folder for the sockets (default: $XDG_RUNTIME_DIR/cuda-remote, /run/cuda-remote (root), "
                 "/run/user/UID/cuda-remote or /tmp/cuda-remote-UID)");
  app.add_option("--listen", options.listen, "also serve other hosts, at HOST:PORT (port 0: any free one)");
  app.add_option("--tls-cert", options.tls.cert, "this server's certificate, PEM (or CUDA_REMOTE_TLS_CERT)");
  app.add_option("--tls-key", options.tls.key, "its key (or CUDA_REMOTE_TLS_KEY)");
  app.add_option("--tls-ca", options.tls.ca, "who signs the clients' certificates (or CUDA_REMOTE_TLS_CA)");
  app.add_flag("--insecure-tcp", options.insecure_tcp,
               "listen without encryption and without asking who it is: anybody who reaches the port can use the GPU");
  app.add_option("--workers", options.workers, "workers kept ready for new sessions")
      ->capture_default_str()
      ->check(CLI::Range(0, 64));
  app.add_option("--gpu", options.gpu, "serve this GPU only (ordinal)")->check(CLI::Range(0, 255));
  app.add_option("--driver", options.driver,
                 "driver library (default: libcuda.so.1 if it finds a GPU, else the software GPU)")
      ->envname("CUDA_REMOTE_DRIVER");
  app.add_option("--memory-limit", options.memory_limit, "device memory that one session may hold, as in 8GB")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--max-sessions", options.max_sessions, "sessions at a time; 0: no limit")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--grace", options.grace_seconds,
                 "seconds that a remote session waits for its broken connection to come back")
      ->capture_default_str()
      ->check(CLI::Range(0, 86400));
  app.add_option("--worker", options.worker, "path of cr-worker (default: beside cr-server)");
  app.add_option("--log-level", options.log_level, "trace, debug, info, warn, error")
      ->capture_default_str()
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error"}));
  app.add_option("--ready-fd", options.ready_fd, "write the address to this descriptor and close it once ready");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  const auto logger = std::make_shared<spdlog::logger>("cr-server", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %l %n: %v");
  logger->set_level(spdlog::level::from_str(options.log_level));
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(logger);

  if (options.directory.empty()) options.directory = RuntimeFolders().front();
  if (options.directory[0] != '/') {
    char folder[4096];
    if (getcwd(folder, sizeof(folder))) options.directory = std::string(folder) + "/" + options.directory;
  }
  while (options.directory.size() > 1 && options.directory.back() == '/') options.directory.pop_back();
  if (options.worker.empty()) options.worker = FindCompanion("cr-worker", {"", "../worker/", "../libexec/"});
  if (options.worker.empty()) {
    spdlog::critical("cr-worker is not beside cr-server; name it with --worker");
    return kExitUsage;
  }
  options.monitor = FindCompanion("cr-nvml", {"", "../nvml/", "../libexec/"});
  if (options.listen.empty() && (options.insecure_tcp || !options.tls.empty())) {
    spdlog::critical("--tls-* and --insecure-tcp are about --listen, which is missing");
    return kExitUsage;
  }
  std::string error;
  std::shared_ptr<grpc::ServerCredentials> tcp_credentials;
  if (!options.listen.empty()) {
    if (options.insecure_tcp) {
      if (!options.tls.empty()) {
        spdlog::critical("--insecure-tcp and --tls-* exclude each other");
        return kExitUsage;
      }
      tcp_credentials = grpc::InsecureServerCredentials();
    } else {
      control::FillFromEnvironment(&options.tls);
      tcp_credentials = control::ServerTls(options.tls, &error);
      if (!tcp_credentials) {
        spdlog::critical("{}; without TLS, --listen needs --insecure-tcp", error);
        return kExitUsage;
      }
    }
  }

  Supervisor supervisor(options);
  if (!supervisor.Start(&error)) {
    spdlog::critical("{}", error);
    return kExitCannotListen;
  }
  grpc::ServerBuilder builder;
  ServerPoller poller(&builder);
  ControlService control_service(&supervisor);
  TunnelService tunnel_service(&supervisor, &poller);
  const std::string control_path = ControlSocketPath(options.directory);
  unlink(control_path.c_str());  // the folder is ours alone (server.lock)
  control::SetServerArguments(&builder);
  int port = 0;
  builder.AddListeningPort("unix:" + control_path, grpc::InsecureServerCredentials());
  if (tcp_credentials) builder.AddListeningPort(options.listen, tcp_credentials, &port);
  builder.RegisterService(&control_service);
  builder.RegisterService(&tunnel_service);
  const mode_t before = umask(0177);
  std::unique_ptr<grpc::Server> grpc_server = builder.BuildAndStart();
  umask(before);
  if (grpc_server) poller.Start();
  if (!grpc_server || (tcp_credentials && port == 0)) {
    spdlog::critical("cannot listen on {}{}", control_path, tcp_credentials ? " and " + options.listen : "");
    if (grpc_server) grpc_server->Shutdown();
    unlink(SessionSocketPath(options.directory).c_str());
    unlink(control_path.c_str());
    return kExitCannotListen;
  }
  std::string ready = "cr-server ready: unix:" + SessionSocketPath(options.directory);
  if (tcp_credentials) {
    ready += " tcp:" + options.listen.substr(0, options.listen.rfind(':')) + ":" + std::to_string(port);
    if (options.insecure_tcp)
      spdlog::warn("--insecure-tcp: anybody who reaches port {} can use the GPU, and read what is sent", port);
  }
  spdlog::info("serving {}", ready.substr(strlen("cr-server ready: ")));
  ready += "\n";
  fputs(ready.c_str(), stdout);
  fflush(stdout);
  if (options.ready_fd >= 0) {
    if (write(options.ready_fd, ready.data(), ready.size()) < 0) spdlog::warn("--ready-fd: {}", strerror(errno));
    close(options.ready_fd);
  }

  supervisor.Run();

  tunnel_service.Shutdown();
  grpc_server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
  grpc_server->Wait();
  poller.Stop();
  unlink(control_path.c_str());
  spdlog::info("ended");
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
