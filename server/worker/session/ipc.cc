// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/ipc.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "proto/base/clock.h"
#include "proto/base/hash.h"
#include "proto/base/short_waits.h"
#include "proto/frame/handle.h"
#include "proto/logging/log.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"
#include "server/worker/session/ipc_messages.h"

namespace cuda_remote::server {
namespace {

constexpr size_t kMaxConnections = 4096;
// Questions to another worker whose answers are open: fewer than a listening socket keeps waiting (64).
constexpr size_t kMostWaiting = 32;
// Of all offers: 16 bytes that no session gets by chance.
const std::string kOfferScope = "offers of a move";
// How long the other worker may take to answer. Its thread has nothing else to do.
constexpr int kAnswerSeconds = 10;
// How often one that is waited for is looked for.
constexpr auto kAgain = std::chrono::milliseconds(2);
// How long a connection that cannot be accepted is left alone.
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

std::string RandomBytes() {
  std::string bytes(kIpcRandomBytes, 0);
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = getrandom(&bytes[done], bytes.size() - done, 0);
    if (n > 0) done += size_t(n);
  }
  return bytes;
}

socklen_t Abstract(const std::string& name, sockaddr_un* address) {
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

std::string MakeKey(IpcKind kind, const std::string& home, const std::string& secret) {
  IpcKey key{};
  memcpy(key.magic, kIpcMagic, sizeof(kIpcMagic));
  key.kind = uint8_t(kind);
  memcpy(key.home, home.data(), kIpcRandomBytes);
  memcpy(key.secret, secret.data(), kIpcRandomBytes);
  return std::string(reinterpret_cast<const char*>(&key), sizeof(key));
}

bool ReadKey(std::string_view bytes, IpcKind kind, std::string* home, std::string* secret) {
  IpcKey key;
  if (bytes.size() != sizeof(key)) return false;
  memcpy(&key, bytes.data(), sizeof(key));
  if (memcmp(key.magic, kIpcMagic, sizeof(kIpcMagic)) != 0 || key.kind != uint8_t(kind)) return false;
  home->assign(key.home, kIpcRandomBytes);
  secret->assign(key.secret, kIpcRandomBytes);
  return true;
}

// Whether the other end has let go.
bool HasEnded(int connection) {
  pollfd look{connection, POLLIN, 0};
  return poll(&look, 1, 0) > 0;
}

void CloseIfOpen(int* fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

bool SendReply(int socket, const IpcReply& reply, int fd) {
  iovec part{const_cast<IpcReply*>(&reply), sizeof(reply)};
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

bool ReceiveReply(int socket, IpcReply* reply, int* fd) {
  *fd = -1;
  iovec part{reply, sizeof(*reply)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  // Room for more descriptors than one: the padding behind one has it anyway, and what came is to be closed.
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  size_t descriptors = 0;
  ssize_t n;
  do {
    n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int one;
      memcpy(&one, CMSG_DATA(head) + i * sizeof(int), sizeof(one));
      if (descriptors++ == 0) {
        *fd = one;
      } else {
        close(one);
      }
    }
  }
  const bool good = n == ssize_t(sizeof(*reply)) && (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0 &&
                    memcmp(reply->magic, kIpcMagic, sizeof(kIpcMagic)) == 0 &&
                    descriptors == size_t(reply->has_fd != 0);
  if (!good && *fd >= 0) {
    close(*fd);
    *fd = -1;
  }
  return good;
}

}  // namespace

std::string NameOf(const IpcPeer& peer) {
  std::string program(peer.program.data(), strnlen(peer.program.data(), peer.program.size()));
  for (char& c : program) {
    if (c < ' ' || c > '~') c = '?';
  }
  return "process " + std::to_string(peer.pid) + " (" + (program.empty() ? "" : program + ", ") + "session " +
         std::to_string(peer.session) + ")";
}

Ipc::Ipc(IpcSelf self)
    : self_([&] {
        self.group.resize(kIpcRandomBytes);
        return std::move(self);
      }()) {}

Ipc::~Ipc() {
  if (thread_.joinable()) {
    stop_ = true;
    const uint64_t one = 1;
    if (write(wake_.get(), &one, sizeof(one)) < 0) logging::Warn("cannot wake the sharing thread: {}", strerror(errno));
    thread_.join();
  }
}

bool Ipc::SetScope(std::string_view scope) {
  MutexLock lock(&mutex_);
  if (used_ || scope.size() != kIpcScopeBytes) return false;
  scope_ = scope;
  return true;
}

std::string Ipc::SocketName(std::string group, std::string scope, std::string_view home) {
  group.resize(kIpcRandomBytes);
  scope.resize(kIpcScopeBytes);
  return "cuda-remote-ipc-" + ToHex(HashOf(group + scope + std::string(home)));
}

bool Ipc::ListenLocked(const std::string& home, const std::string& scope) {
  if (listening_.count(home) != 0) return true;
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!wake_.ok()) wake_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  sockaddr_un address;
  const socklen_t length = Abstract(SocketName(self_.group, scope, home), &address);
  if (!fd.ok() || !wake_.ok() || bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(fd.get(), 64) != 0) {
    logging::Error("cannot share with other sessions: {}", strerror(errno));
    return false;
  }
  listening_[home] = std::move(fd);
  if (thread_.joinable()) {
    const uint64_t one = 1;
    return write(wake_.get(), &one, sizeof(one)) == sizeof(one);
  }
  thread_ = StartThread([this] { Serve(); });
  if (thread_.joinable()) return true;
  logging::Error("cannot share with other sessions: the system gives no thread");
  listening_.erase(home);
  return false;
}

void Ipc::Serve() {
  std::vector<pollfd> polls;
  while (true) {
    size_t first_user = 0;
    {
      MutexLock lock(&mutex_);
      polls.assign({{wake_.get(), POLLIN, 0}});
      for (const auto& [home, fd] : listening_) polls.push_back({fd.get(), POLLIN, 0});
      first_user = polls.size();
      for (const auto& [connection, user] : users_) polls.push_back({connection, POLLIN, 0});
    }
    if (poll(polls.data(), polls.size(), -1) < 0 && errno != EINTR) return;
    if (stop_) return;
    // Any user of the machine can connect and fill a socket that is then closed.
    const ShortWaits waits;
    uint64_t count;
    if (polls[0].revents != 0 && read(wake_.get(), &count, sizeof(count)) < 0 && errno != EAGAIN) return;
    {
      MutexLock lock(&mutex_);
      for (size_t i = first_user; i < polls.size(); ++i) {
        const auto it = polls[i].revents != 0 ? users_.find(polls[i].fd) : users_.end();
        if (it == users_.end()) continue;
        // After its answer a connection has nothing to say any more but its end.
        if (it->second.secret.empty() && AnswerLocked(it->first, &it->second)) continue;
        users_.erase(it);
      }
    }
    // New ones last: they may get the numbers of connections that were closed meanwhile.
    for (size_t i = 1; i < first_user; ++i) {
      if (polls[i].revents != 0) Accept(polls[i].fd);
    }
  }
}

void Ipc::Accept(int listening) {
  UniqueFd fd(accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.ok()) {
    // Without descriptors or memory it stays where it is; to look again at once would only take the processor.
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) std::this_thread::sleep_for(kAcceptPause);
    return;
  }
  MutexLock lock(&mutex_);
  if (users_.size() >= kMaxConnections || !SameUser(fd.get())) return;
  users_[fd.get()].connection = std::move(fd);
}

bool Ipc::AnswerLocked(int connection, User* user) {
  IpcQuestion question;
  if (recv(connection, &question, sizeof(question), 0) != ssize_t(sizeof(question)) ||
      memcmp(question.magic, kIpcMagic, sizeof(kIpcMagic)) != 0) {
    return false;
  }
  IpcReply reply{};
  memcpy(reply.magic, kIpcMagic, sizeof(kIpcMagic));
  const auto it = shared_.find(std::string(question.secret, kIpcRandomBytes));
  if (it == shared_.end() || uint8_t(it->second.kind) != question.kind || !SameBytes(question.group, self_.group)) {
    SendReply(connection, reply, -1);
    return false;
  }
  reply.found = 1;
  reply.facts = it->second.facts;
  reply.peer = self_.peer;
  reply.has_fd = it->second.fd.ok();
  if (!SendReply(connection, reply, it->second.fd.get())) return false;
  if (it->second.kind == IpcKind::kOffer) {
    ForgetLocked(IpcKind::kOffer, it->second.object);
    return false;
  }
  user->secret = it->first;
  user->peer = question.peer;
  return true;
}

bool Ipc::Shared(IpcKind kind, uint64_t object, std::string* key) {
  MutexLock lock(&mutex_);
  const auto it = secrets_.find({int(kind), object});
  if (it == secrets_.end()) return false;
  *key = MakeKey(kind, homes_[it->second], it->second);
  return true;
}

CUresult Ipc::Share(IpcKind kind, uint64_t object, const IpcFacts& facts, int fd, std::string* key) {
  MutexLock lock(&mutex_);
  CUresult result = CUDA_SUCCESS;
  std::string home, secret;
  if (key->empty()) {
    home = home_.empty() ? RandomBytes() : home_;
    secret = RandomBytes();
  } else if (!ReadKey(*key, kind, &home, &secret) || shared_.count(secret) != 0) {
    result = CUDA_ERROR_INVALID_HANDLE;
  }
  used_ = true;
  if (result == CUDA_SUCCESS && !ListenLocked(home, scope_)) result = CUDA_ERROR_OPERATING_SYSTEM;
  if (result != CUDA_SUCCESS) {
    CloseIfOpen(&fd);
    return result;
  }
  if (home_.empty()) home_ = home;
  shared_[secret] = {kind, object, facts, UniqueFd(fd)};
  secrets_[{int(kind), object}] = secret;
  homes_[secret] = home;
  *key = MakeKey(kind, home, secret);
  return CUDA_SUCCESS;
}

CUresult Ipc::Offer(uint64_t object, const IpcFacts& facts, int fd, std::string* key) {
  MutexLock lock(&mutex_);
  ForgetLocked(IpcKind::kOffer, object);
  if (offers_home_.empty()) offers_home_ = RandomBytes();
  if (!ListenLocked(offers_home_, kOfferScope)) {
    CloseIfOpen(&fd);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  const std::string secret = RandomBytes();
  has_offers_ = true;
  shared_[secret] = {IpcKind::kOffer, object, facts, UniqueFd(fd)};
  secrets_[{int(IpcKind::kOffer), object}] = secret;
  homes_[secret] = offers_home_;
  *key = MakeKey(IpcKind::kOffer, offers_home_, secret);
  return CUDA_SUCCESS;
}

void Ipc::ForgetOffers() {
  if (!has_offers_.load(std::memory_order_relaxed)) return;
  MutexLock lock(&mutex_);
  const std::pair<int, uint64_t> first{int(IpcKind::kOffer), 0};
  for (auto it = secrets_.lower_bound(first); it != secrets_.end() && it->first.first == first.first;) {
    const uint64_t object = (it++)->first.second;
    ForgetLocked(IpcKind::kOffer, object);
  }
  has_offers_ = false;
}

size_t Ipc::Users(uint64_t object) {
  MutexLock lock(&mutex_);
  size_t count = 0;
  for (const auto& [connection, user] : users_) {
    const auto it = shared_.find(user.secret);
    if (it != shared_.end() && it->second.object == object) ++count;
  }
  return count;
}

void Ipc::CloseUsersLocked(const std::string& secret) {
  for (auto it = users_.begin(); it != users_.end();) {
    if (it->second.secret != secret) {
      ++it;
      continue;
    }
    shutdown(it->first, SHUT_RDWR);  // the other thread may be waiting for it, which keeps it open
    it = users_.erase(it);
  }
}

void Ipc::ForgetLocked(IpcKind kind, uint64_t object) {
  const auto it = secrets_.find({int(kind), object});
  if (it == secrets_.end()) return;
  const auto entry = shared_.find(it->second);
  CloseUsersLocked(it->second);
  homes_.erase(it->second);
  shared_.erase(entry);
  secrets_.erase(it);
}

void Ipc::Forget(uint64_t object) {
  MutexLock lock(&mutex_);
  if (!secrets_.empty()) {
    for (int kind = int(IpcKind::kMemory); kind <= int(IpcKind::kOffer); ++kind) ForgetLocked(IpcKind(kind), object);
  }
  const auto range = held_.equal_range(object);
  held_.erase(range.first, range.second);
}

CUresult Ipc::FindOwner(std::string_view key, IpcKind kind, bool other, std::string* name, std::string* secret) {
  std::string home;
  if (!ReadKey(key, kind, &home, secret)) return CUDA_ERROR_INVALID_HANDLE;
  MutexLock lock(&mutex_);
  if (other && listening_.count(home) != 0) return CUDA_ERROR_INVALID_CONTEXT;
  used_ = used_ || kind != IpcKind::kOffer;
  const std::string& scope = kind == IpcKind::kOffer ? kOfferScope : scope_;
  *name = SocketName(self_.group, scope, home);
  return CUDA_SUCCESS;
}

CUresult Ipc::Ask(const std::string& name, const std::string& secret, IpcKind kind, int* connection) const {
  UniqueFd peer(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!peer.ok()) return CUDA_ERROR_OPERATING_SYSTEM;
  const timeval limit{kAnswerSeconds, 0};
  setsockopt(peer.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(peer.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  sockaddr_un address;
  const socklen_t length = Abstract(name, &address);
  // Nobody there: the sharing session has ended, or it is on another machine.
  if (connect(peer.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 || !SameUser(peer.get()))
    return CUDA_ERROR_INVALID_HANDLE;
  IpcQuestion question{};
  memcpy(question.magic, kIpcMagic, sizeof(kIpcMagic));
  memcpy(question.secret, secret.data(), kIpcRandomBytes);
  memcpy(question.group, self_.group.data(), kIpcRandomBytes);
  question.peer = self_.peer;
  question.kind = uint8_t(kind);
  if (send(peer.get(), &question, sizeof(question), MSG_NOSIGNAL) != ssize_t(sizeof(question)))
    return CUDA_ERROR_OPERATING_SYSTEM;
  *connection = peer.Release();
  return CUDA_SUCCESS;
}

CUresult Ipc::Hear(int connection, IpcFacts* facts, int* fd, IpcUse* use) {
  IpcReply reply{};
  CUresult result = CUDA_SUCCESS;
  if (!ReceiveReply(connection, &reply, fd)) {
    result = CUDA_ERROR_OPERATING_SYSTEM;
  } else if (reply.found == 0) {
    result = CUDA_ERROR_INVALID_HANDLE;
  }
  if (result != CUDA_SUCCESS) {
    CloseIfOpen(fd);
    close(connection);
    return result;
  }
  *facts = reply.facts;
  use->connection = std::make_shared<UniqueFd>(connection);
  use->peer = reply.peer;
  return CUDA_SUCCESS;
}

std::vector<IpcOffered> Ipc::TakeOffers(const std::vector<std::string_view>& keys) {
  std::vector<IpcOffered> taken(keys.size());
  std::vector<int> connections(keys.size(), -1);
  // The other worker's thread answers them one after the other: that it is asked again is not waited for.
  for (size_t first = 0; first < keys.size(); first += kMostWaiting) {
    const size_t end = std::min(keys.size(), first + kMostWaiting);
    for (size_t i = first; i < end; ++i) {
      std::string name, secret;
      if (FindOwner(keys[i], IpcKind::kOffer, true, &name, &secret) != CUDA_SUCCESS) continue;
      Ask(name, secret, IpcKind::kOffer, &connections[i]);
    }
    for (size_t i = first; i < end; ++i) {
      IpcUse use;
      IpcOffered& one = taken[i];
      if (connections[i] < 0) continue;
      one.taken = Hear(connections[i], &one.facts, &one.fd, &use) == CUDA_SUCCESS;
      if (!one.taken) continue;
      one.peer = use.peer;
    }
  }
  return taken;
}

CUresult Ipc::Open(std::string_view key, IpcKind kind, bool other, std::chrono::milliseconds patience, IpcFacts* facts,
                   int* fd, IpcUse* use) {
  std::string name, secret;
  const CUresult found = FindOwner(key, kind, other, &name, &secret);
  if (found != CUDA_SUCCESS) return found;
  const auto end = Now() + patience;
  while (true) {
    int connection = -1;
    CUresult result = Ask(name, secret, kind, &connection);
    if (result == CUDA_SUCCESS) result = Hear(connection, facts, fd, use);
    if (result != CUDA_ERROR_INVALID_HANDLE || Now() >= end) return result;
    std::this_thread::sleep_for(kAgain);
  }
}

void Ipc::Hold(uint64_t object, const IpcUse& use) {
  MutexLock lock(&mutex_);
  held_.emplace(object, use);
}

bool Ipc::Holds(uint64_t object) {
  MutexLock lock(&mutex_);
  return held_.count(object) != 0;
}

CUresult Ipc::LetGo(const DriverTable& driver, const IpcImport& import) {
  const CUresult result = driver.cuMemUnmap(import.mapping, import.mapping_bytes);
  import.use.connection->Close();
  if (result == CUDA_SUCCESS) Return(import.mapping, import.mapping_bytes);
  return result;
}

void Ipc::Return(uint64_t address, uint64_t bytes) {
  MutexLock lock(&mutex_);
  returned_.emplace_back(address, bytes);
}

std::vector<std::pair<uint64_t, uint64_t>> Ipc::TakeReturned() {
  MutexLock lock(&mutex_);
  return std::exchange(returned_, {});
}

bool Ipc::IsAmong(const IpcPeer& peer, const std::set<uint64_t>& sessions) const {
  return peer.server == self_.peer.server && (peer.session == self_.peer.session || sessions.count(peer.session) != 0);
}

void Ipc::Refusals(const std::set<uint64_t>& sessions, std::vector<std::string>* refusals) {
  // By the sentence, how often it applies.
  std::map<std::string, size_t> found;
  MutexLock lock(&mutex_);
  const auto look = [&](const IpcUse& use) {
    if (HasEnded(use.connection->get())) {
      ++found["what " + NameOf(use.peer) + " shared and no longer has is still in use (cuIpcOpen*, cuMem*Import*)"];
    } else if (!IsAmong(use.peer, sessions)) {
      ++found["what " + NameOf(use.peer) +
              ", which is not saved with it, shares is in use (cuIpcOpen*, cuMem*Import*)"];
    }
  };
  for (const auto& [object, use] : held_) look(use);
  for (const auto& [key, import] : imports_) look(import.use);
  for (const auto& [connection, user] : users_) {
    if (user.secret.empty() || IsAmong(user.peer, sessions)) continue;
    ++found[NameOf(user.peer) + ", which is not saved with it, uses what it shares (cuIpcGet*, cuMem*Export*)"];
  }
  for (const auto& [sentence, times] : found) {
    refusals->push_back(sentence + (times == 1 ? "" : ", " + std::to_string(times) + " things"));
  }
}

}  // namespace cuda_remote::server
