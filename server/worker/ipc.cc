#include "server/worker/ipc.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "spdlog/spdlog.h"

namespace cuda_remote::server {
namespace {

constexpr char kMagic[8] = {'C', 'R', 'I', 'P', 'C', '1', 0, 0};
constexpr size_t kRandomBytes = 16;
constexpr size_t kMaxConnections = 4096;
// How long the other worker may take to answer. Its thread has nothing else to do.
constexpr int kAnswerSeconds = 10;

// A key: magic, kind, zeros up to 16, socket, secret, zeros.
struct Key {
  char magic[8];
  uint8_t kind;
  char zero[7];
  char socket[kRandomBytes];
  char secret[kRandomBytes];
  char reserved[16];
};
static_assert(sizeof(Key) == kIpcKeyBytes);

struct Question {
  char secret[kRandomBytes];
  char group[kRandomBytes];
  uint8_t kind;
};

struct Reply {
  char magic[8];
  uint32_t found;
  uint32_t has_fd;
  IpcFacts facts;
};

std::string RandomBytes() {
  std::string bytes(kRandomBytes, 0);
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = getrandom(&bytes[done], bytes.size() - done, 0);
    if (n > 0) done += size_t(n);
  }
  return bytes;
}

// An abstract address: it is gone with the process, and needs no folder that both workers see.
socklen_t SocketAddress(std::string_view id, sockaddr_un* address) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string name = "cuda-remote-ipc-";
  for (const char c : id) {
    name += kDigits[uint8_t(c) >> 4];
    name += kDigits[uint8_t(c) & 15];
  }
  *address = {};
  address->sun_family = AF_UNIX;
  memcpy(address->sun_path + 1, name.data(), name.size());
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// Takes the same time wherever they differ.
bool SameBytes(const char* bytes, const std::string& expected) {
  unsigned char difference = 0;
  for (size_t i = 0; i < expected.size(); ++i) difference |= (unsigned char)(bytes[i] ^ expected[i]);
  return difference == 0;
}

bool SameUser(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

std::string MakeKey(IpcKind kind, const std::string& socket, const std::string& secret) {
  Key key{};
  memcpy(key.magic, kMagic, sizeof(kMagic));
  key.kind = uint8_t(kind);
  memcpy(key.socket, socket.data(), kRandomBytes);
  memcpy(key.secret, secret.data(), kRandomBytes);
  return std::string(reinterpret_cast<const char*>(&key), sizeof(key));
}

bool SendReply(int socket, const Reply& reply, int fd) {
  iovec part{const_cast<Reply*>(&reply), sizeof(reply)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &fd, sizeof(fd));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == ssize_t(sizeof(reply));
}

bool ReceiveReply(int socket, Reply* reply, int* fd) {
  *fd = -1;
  iovec part{reply, sizeof(*reply)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t n;
  do {
    n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(sizeof(int))) {
      memcpy(fd, CMSG_DATA(head), sizeof(*fd));
    }
  }
  const bool good = n == ssize_t(sizeof(*reply)) && (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0 &&
                    memcmp(reply->magic, kMagic, sizeof(kMagic)) == 0 && (reply->has_fd != 0) == (*fd >= 0);
  if (!good && *fd >= 0) {
    close(*fd);
    *fd = -1;
  }
  return good;
}

}  // namespace

Ipc::Ipc(std::string sharing_group) : group_([&] {
        sharing_group.resize(kRandomBytes);
        return std::move(sharing_group);
      }()) {}

Ipc::~Ipc() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    if (write(wake_, &one, sizeof(one)) < 0) spdlog::warn("cannot wake the sharing thread: {}", strerror(errno));
    thread_.join();
  }
  for (const auto& [secret, entry] : shared_) {
    if (entry.fd >= 0) close(entry.fd);
  }
  for (const auto& [object, connection] : held_) close(connection);
  for (const auto& [key, import] : imports_) close(import.connection);
  if (listen_ >= 0) close(listen_);
  if (wake_ >= 0) close(wake_);
}

bool Ipc::StartUnlocked() {
  if (listen_ >= 0) return true;
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  wake_ = wake_ >= 0 ? wake_ : eventfd(0, EFD_CLOEXEC);
  const std::string id = RandomBytes();
  sockaddr_un address;
  const socklen_t length = SocketAddress(id, &address);
  if (fd < 0 || wake_ < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(fd, 64) != 0) {
    spdlog::error("cannot share with other sessions: {}", strerror(errno));
    if (fd >= 0) close(fd);
    return false;
  }
  socket_id_ = id;
  listen_ = fd;
  thread_ = std::thread([this] { Serve(); });
  return true;
}

void Ipc::Serve() {
  struct Connection {
    int fd;
    bool answered;
  };
  std::vector<Connection> connections;
  std::vector<pollfd> polls;
  while (true) {
    polls.assign({{wake_, POLLIN, 0}, {listen_, POLLIN, 0}});
    for (const Connection& connection : connections) polls.push_back({connection.fd, POLLIN, 0});
    if (poll(polls.data(), polls.size(), -1) < 0 && errno != EINTR) break;
    if (polls[0].revents != 0) break;
    for (size_t i = connections.size(); i-- > 0;) {
      if (polls[i + 2].revents == 0) continue;
      // After its answer a connection has nothing to say any more but its end.
      if (!connections[i].answered && Answer(connections[i].fd)) {
        connections[i].answered = true;
        continue;
      }
      if (connections[i].answered) {
        std::lock_guard<std::mutex> lock(mutex_);
        --users_;
      }
      close(connections[i].fd);
      connections.erase(connections.begin() + ptrdiff_t(i));
    }
    if (polls[1].revents == 0) continue;
    const int fd = accept4(listen_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) continue;
    if (connections.size() >= kMaxConnections || !SameUser(fd)) {
      close(fd);
      continue;
    }
    connections.push_back({fd, false});
  }
  for (const Connection& connection : connections) close(connection.fd);
}

bool Ipc::Answer(int connection) {
  Question question;
  if (recv(connection, &question, sizeof(question), 0) != ssize_t(sizeof(question))) return false;
  Reply reply{};
  memcpy(reply.magic, kMagic, sizeof(kMagic));
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = shared_.find(std::string(question.secret, kRandomBytes));
  if (it == shared_.end() || uint8_t(it->second.kind) != question.kind || !SameBytes(question.group, group_)) {
    SendReply(connection, reply, -1);
    return false;
  }
  reply.found = 1;
  reply.facts = it->second.facts;
  reply.has_fd = it->second.fd >= 0;
  if (!SendReply(connection, reply, it->second.fd)) return false;
  ++users_;
  return true;
}

bool Ipc::Shared(IpcKind kind, uint64_t object, std::string* key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = secrets_.find({int(kind), object});
  if (it == secrets_.end()) return false;
  *key = MakeKey(kind, socket_id_, it->second);
  return true;
}

bool Ipc::Share(IpcKind kind, uint64_t object, const IpcFacts& facts, int fd, std::string* key) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!StartUnlocked()) {
    if (fd >= 0) close(fd);
    return false;
  }
  const std::string secret = RandomBytes();
  shared_[secret] = {kind, object, facts, fd};
  secrets_[{int(kind), object}] = secret;
  *key = MakeKey(kind, socket_id_, secret);
  return true;
}

void Ipc::Forget(uint64_t object) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!secrets_.empty()) {
    for (int kind = int(IpcKind::kMemory); kind <= int(IpcKind::kPoolMemory); ++kind) {
      const auto it = secrets_.find({kind, object});
      if (it == secrets_.end()) continue;
      const auto entry = shared_.find(it->second);
      if (entry->second.fd >= 0) close(entry->second.fd);
      shared_.erase(entry);
      secrets_.erase(it);
    }
  }
  const auto range = held_.equal_range(object);
  for (auto it = range.first; it != range.second; ++it) close(it->second);
  held_.erase(range.first, range.second);
}

CUresult Ipc::Open(std::string_view bytes, IpcKind kind, bool other, IpcFacts* facts, int* fd, int* connection) {
  Key key;
  if (bytes.size() != sizeof(key)) return CUDA_ERROR_INVALID_HANDLE;
  memcpy(&key, bytes.data(), sizeof(key));
  if (memcmp(key.magic, kMagic, sizeof(kMagic)) != 0 || key.kind != uint8_t(kind)) return CUDA_ERROR_INVALID_HANDLE;
  const std::string_view id(key.socket, kRandomBytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (other && id == socket_id_) return CUDA_ERROR_INVALID_CONTEXT;
  }
  const int peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (peer < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  const timeval limit{kAnswerSeconds, 0};
  setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  sockaddr_un address;
  const socklen_t length = SocketAddress(id, &address);
  // Nobody there: the sharing session has ended, or it is on another machine.
  if (connect(peer, reinterpret_cast<sockaddr*>(&address), length) != 0 || !SameUser(peer)) {
    close(peer);
    return CUDA_ERROR_INVALID_HANDLE;
  }
  Question question{};
  memcpy(question.secret, key.secret, kRandomBytes);
  memcpy(question.group, group_.data(), kRandomBytes);
  question.kind = key.kind;
  Reply reply{};
  if (send(peer, &question, sizeof(question), MSG_NOSIGNAL) != ssize_t(sizeof(question)) ||
      !ReceiveReply(peer, &reply, fd)) {
    close(peer);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  if (reply.found == 0) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
    close(peer);
    return CUDA_ERROR_INVALID_HANDLE;
  }
  *facts = reply.facts;
  *connection = peer;
  return CUDA_SUCCESS;
}

void Ipc::Hold(uint64_t object, int connection) {
  std::lock_guard<std::mutex> lock(mutex_);
  held_.emplace(object, connection);
}

bool Ipc::Holds(uint64_t object) {
  std::lock_guard<std::mutex> lock(mutex_);
  return held_.count(object) != 0;
}

void Ipc::Returned(uint64_t address, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  returned_.emplace_back(address, bytes);
}

std::vector<std::pair<uint64_t, uint64_t>> Ipc::TakeReturned() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(returned_, {});
}

void Ipc::Refusals(std::vector<std::string>* refusals) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t opened = held_.size() + imports_.size();
  if (opened != 0) {
    refusals->push_back(std::to_string(opened) + " things of another process are open (cuIpcOpen*, cuMem*Import*)");
  }
  if (users_ != 0) {
    refusals->push_back("other processes have " + std::to_string(users_) +
                        " things of this job open (cuIpcGet*, cuMem*Export*)");
  }
}

}  // namespace cuda_remote::server
