// SPDX-License-Identifier: Apache-2.0
#include "programs/slurm/gpu_node.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <vector>

#include "checkpoint/job/job.h"
#include "programs/slurm/child.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::client::slurm {
namespace {

constexpr char kClient[] = "job";  // the name of the client's certificate
// A client whose connection breaks waits so long for this server. If the node has failed, Slurm requeues the job only
// after its SlurmdTimeout (300 s by default): until then no call may fail.
constexpr char kGraceSeconds[] = "1800";
constexpr int kEndSeconds = 10;

// Up to the end of the line, which is left out. Empty: there was none.
std::string ReadLine(int fd) {
  std::string line;
  for (char byte; line.size() < 4096;) {
    const ssize_t got = read(fd, &byte, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got != 1) return "";
    if (byte == '\n') return line;
    line += byte;
  }
  return "";
}

int Fail(const std::string& text) {
  fprintf(stderr, "cr-slurm-run: %s\n", text.c_str());
  return 1;
}

// Its certificates, and one for the job. Nobody gets any more of them: the authority's key is removed.
bool MakeKeys(const std::string& server, const std::string& keys, const std::string& address, int null) {
  const pid_t child =
      StartChild({server, "--init-tls", keys, "--tls-name", address, "--tls-client", kClient}, SIGKILL, null, null);
  int status = 0;
  return child != 0 && waitpid(child, &status, 0) == child && status == 0 && unlink((keys + "/ca.key").c_str()) == 0;
}

}  // namespace

std::string OwnAddressTowards(const std::string& peer) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(peer.c_str(), "9", &hints, &found) != 0) return "";
  // Nothing is sent by that.
  const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  char text[NI_MAXHOST] = "";
  if (fd < 0 || connect(fd, found->ai_addr, found->ai_addrlen) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) {
    text[0] = '\0';
  }
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return text;
}

int ServeGpus(const std::string& keys) {
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  const char* const batch = getenv("SLURM_LAUNCH_NODE_IPADDR");
  const std::string address = batch ? OwnAddressTowards(batch) : "";
  if (address.empty()) return Fail("this is not a step of a Slurm job: SLURM_LAUNCH_NODE_IPADDR names no host");
  const std::string server = checkpoint::FindCompanion("cr-server");
  if (server.empty()) return Fail("cr-server is not beside cr-slurm-run on this node; install cuda-remote-server");
  char sockets[] = "/tmp/cr-gpus-XXXXXX";
  int ready[2];
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (null < 0 || pipe(ready) != 0 || fcntl(ready[0], F_SETFD, FD_CLOEXEC) != 0 || !mkdtemp(sockets)) {
    return Fail(std::string("cannot start cr-server: ") + strerror(errno));
  }
  int code = 1;
  if (!MakeKeys(server, keys, address, null)) {
    Fail("cannot make the keys of the GPU server in " + keys);
  } else {
    const std::string listen = (address.find(':') == std::string::npos ? address : "[" + address + "]") + ":0";
    const pid_t child =
        StartChild({server, "--dir", sockets, "--listen", listen, "--tls-cert", keys + "/server.pem", "--tls-key",
                    keys + "/server.key", "--tls-ca", keys + "/ca.pem", "--grace", kGraceSeconds, "--workers", "1",
                    "--log-level", "warn", "--ready-fd", std::to_string(ready[1])},
                   SIGKILL, null, null);
    close(ready[1]);
    const std::string said = child != 0 ? ReadLine(ready[0]) : "";
    const size_t begin = said.find(" tcp:");
    if (begin == std::string::npos) {
      Fail("cr-server does not start on this node");
    } else {
      const std::string serves = said.substr(begin + strlen(" tcp:"));
      printf("%s\n", serves.substr(0, serves.find(' ')).c_str());
      fflush(stdout);
      pollfd waiting[] = {{STDIN_FILENO, POLLIN, 0}, {int(syscall(SYS_pidfd_open, child, 0)), POLLIN, 0}};
      char rest[256];
      while (poll(waiting, 2, -1) < 0 || (waiting[1].revents == 0 && read(STDIN_FILENO, rest, sizeof(rest)) > 0)) {
      }
      code = waiting[1].revents == 0 ? 0 : Fail("cr-server has ended on this node");
    }
    if (child != 0) kill(child, SIGTERM);
    if (child != 0) EndChild(child, kEndSeconds);
  }
  std::error_code ignored;
  std::filesystem::remove_all(sockets, ignored);
  return code;
}

absl::StatusOr<std::unique_ptr<GpuNode>> GpuNode::Start(const std::string& keys) {
  std::unique_ptr<GpuNode> node(new GpuNode(keys));
  std::error_code ignored;
  std::filesystem::remove_all(keys, ignored);
  int input[2], output[2];
  if (mkdir(keys.c_str(), 0700) != 0 || pipe2(input, O_CLOEXEC) != 0 || pipe2(output, O_CLOEXEC) != 0) {
    return ErrnoStatus("cannot start a GPU server (" + keys + ")");
  }
  const std::string program = checkpoint::FindCompanion("cr-slurm-run");
  // Without a signal at the end of this process, which the server learns by the end of its input.
  node->process_ = StartChild({"srun", "--quiet", "--het-group=1", "--nodes=1", "--ntasks=1", "--mpi=none",
                               "--export=ALL", "--job-name=gpus", program, "--serve-gpus", keys},
                              0, input[0], output[1]);
  node->input_.Reset(input[1]);
  close(input[0]);
  close(output[1]);
  if (node->process_ != 0) node->address_ = ReadLine(output[0]);
  close(output[0]);
  if (!node->address_.empty()) return node;
  const char* const name = getenv("SLURM_JOB_NODELIST_HET_GROUP_1");
  return absl::UnavailableError(std::string("no GPU server has started on ") + (name ? name : "the GPU node") +
                                "; see its message above");
}

GpuNode::~GpuNode() {
  input_.Close();
  if (process_ != 0) EndChild(process_, 2 * kEndSeconds);
  std::error_code ignored;
  std::filesystem::remove_all(keys_, ignored);
}

void GpuNode::SetVariables() const {
  setenv("CUDA_REMOTE_SERVER", address_.c_str(), 1);
  setenv("CUDA_REMOTE_TLS_CERT", (keys_ + "/" + kClient + ".pem").c_str(), 1);
  setenv("CUDA_REMOTE_TLS_KEY", (keys_ + "/" + kClient + ".key").c_str(), 1);
  setenv("CUDA_REMOTE_TLS_CA", (keys_ + "/ca.pem").c_str(), 1);
  unsetenv("CUDA_REMOTE_TOKEN_FILE");
  // What Slurm says of GPUs is about this node's.
  unsetenv("CUDA_VISIBLE_DEVICES");
}

}  // namespace cuda_remote::client::slurm
