// SPDX-License-Identifier: Apache-2.0
#include "programs/mpi/part_shell.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>

#include "proto/base/clock.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::client::mpi {
namespace {

constexpr size_t kKeySize = 32, kNonceSize = 32, kTagSize = 32;
constexpr uint32_t kMostCommand = 1 << 20;
constexpr int kAskSeconds = 10;  // for the command to come
constexpr int kExitFailed = 125;

bool WriteAll(int fd, const void* bytes, size_t size) {
  const char* at = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t wrote = write(fd, at, size);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    at += wrote;
    size -= size_t(wrote);
  }
  return true;
}

bool ReadAll(int fd, void* bytes, size_t size) {
  char* at = static_cast<char*>(bytes);
  while (size > 0) {
    const ssize_t got = read(fd, at, size);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    size -= size_t(got);
  }
  return true;
}

bool WriteNumber(int fd, uint32_t number) {
  const uint32_t bytes = htonl(number);
  return WriteAll(fd, &bytes, sizeof(bytes));
}

bool ReadNumber(int fd, uint32_t* number) {
  uint32_t bytes;
  if (!ReadAll(fd, &bytes, sizeof(bytes))) return false;
  *number = ntohl(bytes);
  return true;
}

// Of a command that answers these random bytes.
void Tag(const std::string& key, const unsigned char* nonce, const std::string& command, unsigned char* tag) {
  const std::string text = std::string(reinterpret_cast<const char*>(nonce), kNonceSize) + command;
  HMAC(EVP_sha256(), key.data(), int(key.size()), reinterpret_cast<const unsigned char*>(text.data()), text.size(), tag,
       nullptr);
}

bool Address(const std::string& ip, int port, sockaddr_in* address) {
  *address = {};
  address->sin_family = AF_INET;
  address->sin_port = htons(uint16_t(port));
  return inet_pton(AF_INET, ip.c_str(), &address->sin_addr) == 1;
}

// What somebody asks for; false: he does not know the key, or asks for nothing.
bool TakeCommand(int asker, const std::string& key, std::string* command) {
  const timeval limit{kAskSeconds, 0};
  setsockopt(asker, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  unsigned char nonce[kNonceSize], tag[kTagSize], wanted[kTagSize];
  uint32_t size = 0;
  if (getrandom(nonce, sizeof(nonce), 0) != ssize_t(sizeof(nonce)) || !WriteAll(asker, nonce, sizeof(nonce)) ||
      !ReadAll(asker, tag, sizeof(tag)) || !ReadNumber(asker, &size) || size > kMostCommand) {
    return false;
  }
  command->resize(size);
  if (!ReadAll(asker, &(*command)[0], size)) return false;
  Tag(key, nonce, *command, wanted);
  const timeval none{};
  setsockopt(asker, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof(none));
  return CRYPTO_memcmp(tag, wanted, sizeof(tag)) == 0;
}

// In a process of its own. What the command prints goes back in pieces, then its exit code behind an empty one.
int Serve(int asker, const std::string& key) {
  std::string command;
  int ends[2];
  if (!TakeCommand(asker, key, &command) || pipe2(ends, O_CLOEXEC) != 0) return kExitFailed;
  signal(SIGCHLD, SIG_DFL);
  signal(SIGPIPE, SIG_IGN);
  const pid_t child = fork();
  if (child < 0) return kExitFailed;
  if (child == 0) {
    setpgid(0, 0);
    signal(SIGPIPE, SIG_DFL);
    const int null = open("/dev/null", O_RDONLY);
    if (null < 0 || dup2(null, 0) < 0 || dup2(ends[1], 1) < 0 || dup2(ends[1], 2) < 0) _exit(kExitFailed);
    if (null > 2) close(null);
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(kExitFailed);
  }
  setpgid(child, child);
  close(ends[1]);
  bool asked = true;
  char bytes[4096];
  while (true) {
    pollfd waiting[] = {{ends[0], POLLIN, 0}, {asked ? asker : -1, POLLIN, 0}};
    if (poll(waiting, 2, -1) < 0) continue;
    if (waiting[1].revents != 0) {
      // Nothing more comes from there but the end.
      asked = false;
      kill(-child, SIGTERM);
    }
    if (waiting[0].revents == 0) continue;
    const ssize_t got = read(ends[0], bytes, sizeof(bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    if (asked && (!WriteNumber(asker, uint32_t(got)) || !WriteAll(asker, bytes, size_t(got)))) {
      asked = false;
      kill(-child, SIGTERM);
    }
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  if (asked && WriteNumber(asker, 0)) WriteNumber(asker, uint32_t(code));
  return 0;
}

// -1, with errno; EAGAIN: it may serve later.
int Connect(const sockaddr_in& address) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
  const int why = errno;
  close(fd);
  const bool later = why == ECONNREFUSED || why == EHOSTUNREACH || why == ENETUNREACH || why == ETIMEDOUT ||
                     why == ECONNRESET || why == EINTR;
  errno = later ? EAGAIN : why;
  return -1;
}

}  // namespace

absl::Status MakePartsKey(const std::string& path) {
  char bytes[kKeySize];
  unlink(path.c_str());
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (file.ok() && getrandom(bytes, sizeof(bytes), 0) == ssize_t(sizeof(bytes)) &&
      WriteAll(file.get(), bytes, sizeof(bytes)) && fsync(file.get()) == 0) {
    return absl::OkStatus();
  }
  return ErrnoStatus("cannot make the job's key " + path);
}

absl::StatusOr<std::string> ReadPartsKey(const std::string& path) {
  std::string key(kKeySize, '\0');
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.ok()) return ErrnoStatus("cannot use the job's key " + path);
  struct stat facts;
  if (fstat(file.get(), &facts) == 0 && (facts.st_mode & 077) == 0 && facts.st_size == kKeySize &&
      ReadAll(file.get(), &key[0], kKeySize)) {
    return key;
  }
  return absl::FailedPreconditionError("cannot use the job's key " + path);
}

absl::StatusOr<UniqueFd> ListenForParts(const std::string& ip, int* port) {
  sockaddr_in address;
  socklen_t size = sizeof(address);
  const int on = 1;
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (fd.ok()) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (fd.ok() && Address(ip, *port, &address) && bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0 &&
      listen(fd.get(), SOMAXCONN) == 0 && getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0) {
    *port = ntohs(address.sin_port);
    return fd;
  }
  return ErrnoStatus("cannot listen at " + ip + ":" + std::to_string(*port));
}

void ServeParts(int listening, const std::string& key) {
  signal(SIGCHLD, SIG_IGN);
  while (true) {
    const int asker = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    if (asker < 0) {
      if (errno != EINTR && errno != ECONNABORTED) usleep(100000);
      continue;
    }
    if (fork() == 0) {
      close(listening);
      _exit(Serve(asker, key));
    }
    close(asker);
  }
}

absl::StatusOr<int> RunInPart(const std::string& ip, int port, const std::string& key, const std::string& command,
                              int seconds, int output) {
  sockaddr_in address;
  if (!Address(ip, port, &address)) return absl::InvalidArgumentError(ip + " is not the address of a part of this job");
  int fd = -1;
  const auto limit = Now() + std::chrono::seconds(seconds);
  while ((fd = Connect(address)) < 0 && errno == EAGAIN && Now() < limit) usleep(100000);
  if (fd < 0) {
    const int why = errno;
    return absl::UnavailableError("the part at " + ip + " does not answer" +
                                  (why == EAGAIN ? "" : std::string(": ") + strerror(why)));
  }
  unsigned char nonce[kNonceSize], tag[kTagSize];
  bool ok = ReadAll(fd, nonce, sizeof(nonce));
  if (ok) Tag(key, nonce, command, tag);
  ok = ok && WriteAll(fd, tag, sizeof(tag)) && WriteNumber(fd, uint32_t(command.size())) &&
       WriteAll(fd, command.data(), command.size());
  std::string bytes;
  uint32_t size = 0, status = 0;
  while (ok && (ok = ReadNumber(fd, &size)) && size > 0) {
    bytes.resize(size > kMostCommand ? 0 : size);
    ok = !bytes.empty() && ReadAll(fd, &bytes[0], size);
    // If nobody listens any more, the command goes on.
    if (ok) (void)!WriteAll(output, bytes.data(), bytes.size());
  }
  ok = ok && ReadNumber(fd, &status);
  close(fd);
  if (!ok) return absl::UnavailableError("the part at " + ip + " has ended the connection");
  return int(status);
}

}  // namespace cuda_remote::client::mpi
