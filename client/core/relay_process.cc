// SPDX-License-Identifier: Apache-2.0
#include "client/core/relay_process.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

extern char** environ;

namespace cuda_remote::client {
namespace {

constexpr int kStartTimeoutMs = 10000;
constexpr int kPollMs = 10;

// The folder of the library that this code is in.
std::string OwnFolder() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&StartRelay), &info) || !info.dli_fname) return ".";
  char resolved[4096];
  const std::string path = realpath(info.dli_fname, resolved) ? resolved : info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

bool FindRelay(std::string* relay) {
  const std::string folder = OwnFolder();
  for (const char* place : {"/cr-relay", "/../bin/cr-relay", "/relay/cr-relay"}) {
    *relay = folder + place;
    if (access(relay->c_str(), X_OK) == 0) return true;
  }
  return false;
}

bool Accepts(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const bool ok = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return ok;
}

}  // namespace

StatusOr<std::string> StartRelay(const std::string& address) {
  std::string relay;
  if (!FindRelay(&relay)) {
    return Error("cr-relay was not found beside the client library; start the program with cr-run --server " + address);
  }
  char folder[] = "/tmp/cuda-remote-relay-XXXXXX";
  if (!mkdtemp(folder)) return ErrnoError("cannot make a folder for cr-relay's socket");
  const std::string socket_path = std::string(folder) + "/session.sock";
  // `sh -c '... &'` is the double fork: the shell ends at once and init inherits the relay, in a session of its own, so
  // that neither the program's signals nor a snapshot of its process tree reach it.
  const std::string script =
      "exec setsid \"$0\" --connect \"$1\" --socket \"$2\" --idle-exit 10 --remove-folder </dev/null >/dev/null &";
  std::vector<const char*> arguments = {"/bin/sh",           "-c",   script.c_str(), relay.c_str(), address.c_str(),
                                        socket_path.c_str(), nullptr};
  pid_t child = 0;
  const int spawned = posix_spawn(&child, "/bin/sh", nullptr, nullptr, const_cast<char**>(arguments.data()), environ);
  if (spawned != 0) {
    rmdir(folder);
    return Error(std::string("cannot start cr-relay: ") + strerror(spawned));
  }
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  for (int waited = 0; waited < kStartTimeoutMs; waited += kPollMs) {
    if (Accepts(socket_path)) return socket_path;
    usleep(kPollMs * 1000);
  }
  rmdir(folder);  // the relay removes it if it is there after all
  return Error("cr-relay did not accept sessions within 10 seconds; see its messages above");
}

}  // namespace cuda_remote::client
