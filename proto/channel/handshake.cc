// SPDX-License-Identifier: Apache-2.0
#include "proto/channel/handshake.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/folder/private_folder.h"
#include "proto/folder/this_job.h"

namespace cuda_remote {
namespace {

// Between two tries to connect to a listener that has no room.
constexpr int kConnectLookMs = 5;
constexpr char kUnix[] = "unix:";
constexpr char kServerRefused[] = "the server refused: ";

struct PacketHead {
  uint32_t magic;
  uint32_t type;
};

Status FillAddress(const std::string& path, sockaddr_un* address) {
  memset(address, 0, sizeof(*address));
  address->sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address->sun_path)) {
    return Error("the socket path " + path + " is " + (path.empty() ? "empty" : "longer than 107 bytes"));
  }
  memcpy(address->sun_path, path.data(), path.size());
  return OkStatus();
}

}  // namespace

const char* ChannelStatusName(ChannelStatus status) {
  switch (status) {
    case ChannelStatus::kOk:
      return "ok";
    case ChannelStatus::kClosed:
      return "closed";
    case ChannelStatus::kProtocolError:
      return "protocol error";
    case ChannelStatus::kTooLarge:
      return "too large";
    case ChannelStatus::kTimeout:
      return "timeout";
    case ChannelStatus::kSystemError:
      return "system error";
  }
  return "?";
}

void EncodeTag(uint64_t tag, std::string* out) { EncodeTag(Tag{tag}, out); }

bool DecodeTag(std::string_view bytes, uint64_t* tag) {
  Tag message;
  const bool read = DecodeTag(bytes, &message);
  *tag = message.tag;
  return read;
}

void EncodeEnd(std::string_view reason, std::string* out) { EncodeEnd(End{std::string(reason)}, out); }

bool DecodeEnd(std::string_view bytes, std::string* reason) {
  End message;
  const bool read = DecodeEnd(bytes, &message);
  *reason = std::move(message.reason);
  return read;
}

bool ParsePacket(std::string_view bytes, PacketType* type, std::string_view* body) {
  PacketHead head;
  if (bytes.size() < sizeof(head) || bytes.size() > kMaxPacketBytes) return false;
  memcpy(&head, bytes.data(), sizeof(head));
  if (head.magic != kPacketMagic) return false;
  if (!IsPacketType(head.type)) return false;
  *type = PacketType(head.type);
  *body = bytes.substr(sizeof(head));
  return true;
}

std::string CheckWireVersion(uint32_t version, const char* who) {
  if (version == kWireVersion) return "";
  return "the client speaks wire version " + std::to_string(version) + ", " + who + " " + std::to_string(kWireVersion) +
         "; install the same release of cuda-remote on both sides";
}

ChannelStatus SendPacket(int socket, PacketType type, std::string_view body, int fd) {
  PacketHead head{kPacketMagic, uint32_t(type)};
  if (body.size() > kMaxPacketBytes - sizeof(head)) return ChannelStatus::kTooLarge;
  iovec pieces[2] = {{&head, sizeof(head)}, {const_cast<char*>(body.data()), body.size()}};
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = 2;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(rights), &fd, sizeof(int));
  }
  while (sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    return errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN ? ChannelStatus::kClosed
                                                                      : ChannelStatus::kSystemError;
  }
  return ChannelStatus::kOk;
}

ChannelStatus ReceivePacket(int socket, Packet* packet, int timeout_ms, bool may_have_fd) {
  packet->body.clear();
  packet->fd.Close();
  const int64_t deadline = timeout_ms < 0 ? 0 : NowMs() + timeout_ms;
  while (true) {
    pollfd waiting{socket, POLLIN, 0};
    int left = -1;
    if (timeout_ms >= 0) {
      const int64_t now = NowMs();
      left = now < deadline ? int(deadline - now) : 0;
    }
    const int ready = poll(&waiting, 1, left);
    if (ready > 0) break;
    if (ready == 0) return ChannelStatus::kTimeout;
    if (errno != EINTR) return ChannelStatus::kSystemError;
  }
  std::string buffer;
  try {
    buffer.resize(kMaxPacketBytes);
  } catch (...) {
    return ChannelStatus::kSystemError;
  }
  iovec piece{&buffer[0], buffer.size()};
  // Room for more descriptors than allowed, so that all can be counted and closed.
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 8)];
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  const auto give_room = [&] {
    message.msg_control = may_have_fd ? control : nullptr;
    message.msg_controllen = may_have_fd ? sizeof(control) : 0;
  };
  give_room();
  ssize_t received;
  bool reset = false;
  while ((received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0) {
    if (errno == EINTR) continue;
    // The peer closed the socket without reading all that was sent to it. What it sent before, such as a refusal, is
    // still there, behind this error.
    if (errno == ECONNRESET && !reset) {
      reset = true;
      give_room();
      continue;
    }
    return errno == ECONNRESET || errno == ENOTCONN ? ChannelStatus::kClosed : ChannelStatus::kSystemError;
  }
  UniqueFd fd;
  int descriptors = 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int one;
      memcpy(&one, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      if (descriptors++ == 0) {
        fd.Reset(one);
      } else {
        close(one);
      }
    }
  }
  if (received == 0 && descriptors == 0) return ChannelStatus::kClosed;
  std::string_view body;
  if (descriptors > 1 || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) ||
      !ParsePacket({buffer.data(), size_t(received)}, &packet->type, &body)) {
    return ChannelStatus::kProtocolError;
  }
  packet->body.assign(body);
  packet->fd = std::move(fd);
  return ChannelStatus::kOk;
}

std::optional<std::string> SocketPathOf(const std::string& address) {
  if (address.compare(0, sizeof(kUnix) - 1, kUnix) != 0) return std::nullopt;
  const std::string path = address.substr(sizeof(kUnix) - 1);
  struct stat facts;
  return stat(path.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode) ? path + "/session.sock" : path;
}

StatusOr<UniqueFd> ConnectUnix(const std::string& path, int* failure, int timeout_ms) {
  int ignored;
  int& code = failure ? *failure : ignored;
  code = ENAMETOOLONG;
  sockaddr_un address;
  CR_RETURN_IF_ERROR(FillAddress(path, &address));
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | (timeout_ms < 0 ? 0 : SOCK_NONBLOCK), 0));
  if (!fd.ok()) {
    code = errno;
    return ErrnoError("cannot make a socket");
  }
  const int64_t deadline = NowMs() + timeout_ms;
  while (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    code = errno;
    if (code == EINTR) continue;
    if (code != EAGAIN) return ErrnoError("cannot connect to " + path, code);
    // There is nothing to poll: the kernel keeps no connection that could become ready.
    if (NowMs() >= deadline) return Error("cannot connect to " + path + ": nobody accepts connections there");
    poll(nullptr, 0, kConnectLookMs);
  }
  if (timeout_ms >= 0) fcntl(fd.get(), F_SETFL, 0);
  return fd;
}

StatusOr<UniqueFd> ConnectServer(const std::string& path) {
  int failure = 0;
  StatusOr<UniqueFd> fd = ConnectUnix(path, &failure);
  if (!fd.ok()) {
    if (failure == ENOENT || failure == ECONNREFUSED) {
      if (const std::string name = NamedServer(kUnix + path); name != kUnix + path) {
        return Error("cr-relay, which connected this machine with " + name + ", has ended: nothing serves " + path);
      }
      return Error(fd.status().message() + "; is cr-server running, with this --dir?");
    }
    if (failure == EACCES) {
      return Error(fd.status().message() + "; it serves the user who started it, and this process runs as user " +
                   std::to_string(geteuid()));
    }
    return fd;
  }
  uint32_t user = 0, pid = 0;
  if (PeerUser(fd->get(), &user, &pid) && IsTrustedUser(user, path)) return fd;
  if (IsUnmapped(user)) {
    return Error("the server at " + path +
                 " belongs to another user, and nobody can tell here whether that is root: this process is in a user "
                 "namespace, in which root has no number, and other users can put sockets into a folder above that "
                 "path, such as /tmp. Let the server use a folder that only root can change (cr-server --dir "
                 "/run/cuda-remote), or start the program with cr-run --plain");
  }
  return Error("the server at " + path + " runs as user " + std::to_string(user) +
               ", who would see all that the program does; name a server that runs as root or as user " +
               std::to_string(geteuid()));
}

StatusOr<UniqueFd> ListenUnix(const std::string& path) {
  sockaddr_un address;
  CR_RETURN_IF_ERROR(FillAddress(path, &address));
  int failure = 0;
  if (ConnectUnix(path, &failure, kMostConnectMs).ok() || failure == EAGAIN)
    return Error("another process is listening on " + path);
  struct stat facts;
  if (lstat(path.c_str(), &facts) == 0) {
    if (!S_ISSOCK(facts.st_mode)) return Error(path + " exists and is not a socket");
    unlink(path.c_str());
  }
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.ok()) return ErrnoError("cannot make a socket");
  // The socket file takes this mode over, so it is right from the first moment.
  fchmod(fd.get(), 0600);
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || listen(fd.get(), 128) != 0) {
    return ErrnoError("cannot listen on " + path);
  }
  return fd;
}

bool PeerUser(int socket, uint32_t* uid, uint32_t* pid) {
  ucred credentials;
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0 || length != sizeof(credentials))
    return false;
  *uid = credentials.uid;
  *pid = uint32_t(credentials.pid);
  return true;
}

bool SocketPair(int sockets[2]) { return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0; }

StatusOr<UniqueFd> ClientHandshake(int socket, const Hello& hello, int timeout_ms, Welcome* welcome) {
  std::string body;
  EncodeHello(hello, &body);
  if (SendPacket(socket, PacketType::kHello, body, -1) == ChannelStatus::kSystemError) {
    return ErrnoError("cannot send to the server");
  }
  // Also if sending failed: a server that refuses at once may have said why.
  Packet packet;
  const ChannelStatus status = ReceivePacket(socket, &packet, timeout_ms);
  if (status == ChannelStatus::kTimeout) {
    return Error("the server did not answer within " + std::to_string(timeout_ms / 1000) + " s");
  }
  if (status == ChannelStatus::kClosed) {
    return Error("the server closed the connection without an answer; its log says why");
  }
  if (status != ChannelStatus::kOk) {
    return Error(std::string("the server's answer is not a Welcome (") + ChannelStatusName(status) + ")");
  }
  if (packet.type == PacketType::kEnd) {
    std::string reason;
    DecodeEnd(packet.body, &reason);
    return Error(kServerRefused + reason);
  }
  if (packet.type != PacketType::kWelcome || !DecodeWelcome(packet.body, welcome)) {
    return Error("the server's answer is not a Welcome");
  }
  if (!welcome->error.empty()) return Error((welcome->of_relay ? "" : kServerRefused) + welcome->error);
  if (welcome->wire_version != kWireVersion) {
    return Error("the server speaks wire version " + std::to_string(welcome->wire_version) + ", this client " +
                 std::to_string(kWireVersion) + "; install the same release of cuda-remote on both sides");
  }
  if (!packet.fd.ok()) return Error("the server's Welcome came without shared memory");
  return std::move(packet.fd);
}

}  // namespace cuda_remote
