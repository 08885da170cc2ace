// SPDX-License-Identifier: Apache-2.0
// Fuzz target: what a worker that shares reads from its peers (server/worker/session/ipc.h). First byte of the input: a
// key that an application has changed, a question to a worker that shares, or the answer of a hostile one, with up to
// three descriptors. Whatever comes, no descriptor is left open, and nothing is opened that was not shared.

#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <thread>

#include "server/worker/session/ipc_messages.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote::server;  // NOLINT: a test program

namespace {

using std::chrono::milliseconds;

constexpr size_t kHomeAt = offsetof(IpcKey, home), kSecretAt = offsetof(IpcKey, secret);
constexpr IpcKind kKind = IpcKind::kMemory;
const std::string kGroup(kIpcRandomBytes, 'g');

IpcSelf Self(uint64_t session) {
  IpcSelf self;
  self.group = kGroup;
  self.peer.session = session;
  return self;
}

socklen_t AddressOf(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  memcpy(address->sun_path + 1, name.data(), name.size());
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

std::string NameOfKey(const std::string& key) {
  return Ipc::SocketName(kGroup, "", key.substr(kHomeAt, kIpcRandomBytes));
}

std::string BytesOf(const void* from, size_t size) { return std::string(static_cast<const char*>(from), size); }

// A worker that shares one thing, for all inputs.
struct Sharer {
  Sharer() : ipc(Self(1)) {
    if (ipc.Share(kKind, 0x1000, IpcFacts(), open("/dev/null", O_RDONLY | O_CLOEXEC), &key) != CUDA_SUCCESS) abort();
  }
  Ipc ipc;
  std::string key;
};
Sharer& TheSharer() {
  static Sharer sharer;
  return sharer;
}

void TryKey(const std::string& bytes) {
  const Sharer& sharer = TheSharer();
  const std::string scope(kIpcScopeBytes, 's');
  Ipc ipc(Self(2));
  if (!ipc.SetScope(scope)) __builtin_trap();
  IpcFacts facts;
  IpcUse use;
  int fd = -1;
  // Sessions of another scope find nobody, whatever the key.
  for (int kind = 0; kind < 8; ++kind) {
    if (ipc.Open(bytes, IpcKind(kind), false, milliseconds(0), &facts, &fd, &use) == CUDA_SUCCESS) __builtin_trap();
  }
  Ipc same(Self(3));
  if (same.Open(bytes, kKind, false, milliseconds(0), &facts, &fd, &use) != CUDA_SUCCESS) return;
  if (bytes.substr(kHomeAt, 2 * kIpcRandomBytes) != sharer.key.substr(kHomeAt, 2 * kIpcRandomBytes)) __builtin_trap();
  if (fd < 0) __builtin_trap();
  close(fd);
}

void TryQuestion(const std::string& bytes) {
  const Sharer& sharer = TheSharer();
  sockaddr_un address;
  const socklen_t length = AddressOf(NameOfKey(sharer.key), &address);
  const int peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (connect(peer, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      send(peer, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) {
    __builtin_trap();
  }
  if (bytes.empty()) {  // the end of a connection
    close(peer);
    return;
  }
  IpcReply reply{};
  const ssize_t got = recv(peer, &reply, sizeof(reply), 0);
  IpcQuestion question{};
  memcpy(&question, bytes.data(), std::min(bytes.size(), sizeof(question)));
  // A descriptor would have come with it, and is dropped here.
  const bool knows = memcmp(question.secret, sharer.key.data() + kSecretAt, kIpcRandomBytes) == 0 &&
                     memcmp(question.group, kGroup.data(), kIpcRandomBytes) == 0;
  if (got == ssize_t(sizeof(reply)) && reply.found != 0 && !knows) __builtin_trap();
  close(peer);
}

void TryReply(const std::string& bytes, int descriptors) {
  static const std::string key = [] {
    std::string text = BytesOf(kIpcMagic, sizeof(kIpcMagic));
    text += char(kKind);
    text.resize(kHomeAt);
    text += std::string(kIpcRandomBytes, 'h') + std::string(kIpcRandomBytes, 's');
    text.resize(kIpcKeyBytes);
    return text;
  }();
  static const int listener = [] {
    sockaddr_un address;
    const socklen_t length = AddressOf(NameOfKey(key), &address);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(fd, 8) != 0) abort();
    return fd;
  }();
  // Its reading end is at its end once nobody has the writing end open any more.
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) abort();
  std::thread hostile([&] {
    const int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    char question[sizeof(IpcQuestion)];
    if (recv(connection, question, sizeof(question), 0) <= 0) abort();
    iovec part{const_cast<char*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(3 * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (descriptors > 0) {
      const size_t size = size_t(descriptors) * sizeof(int);
      const int three[3] = {ends[1], ends[1], ends[1]};
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(size);
      cmsghdr* const head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(size);
      memcpy(CMSG_DATA(head), three, size);
    }
    sendmsg(connection, &message, MSG_NOSIGNAL);
    close(connection);
    close(ends[1]);
  });
  Ipc ipc(Self(2));
  IpcFacts facts;
  IpcUse use;
  int fd = -1;
  const CUresult result = ipc.Open(key, kKind, false, milliseconds(0), &facts, &fd, &use);
  hostile.join();
  IpcReply reply{};
  memcpy(&reply, bytes.data(), std::min(bytes.size(), sizeof(reply)));
  if (result == CUDA_SUCCESS) {
    const bool right = bytes.size() == sizeof(reply) && memcmp(reply.magic, kIpcMagic, sizeof(kIpcMagic)) == 0 &&
                       reply.found != 0 && descriptors == int(reply.has_fd != 0);
    if (!right || (fd >= 0) != (reply.has_fd != 0)) __builtin_trap();
    if (cuda_remote::server::NameOf(use.peer).empty()) __builtin_trap();
    if (fd >= 0) close(fd);
  } else if (fd >= 0) {
    __builtin_trap();
  }
  char byte;
  if (read(ends[0], &byte, 1) != 0) __builtin_trap();  // a descriptor stays open
  close(ends[0]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string bytes = BytesOf(data + 1, size - 1);
  const int mode = data[0] % 8;
  if (mode < 2) {
    // The right home and secret are random: the seed's stand for them.
    const std::string own(2 * kIpcRandomBytes, '*');
    const size_t at = bytes.find(own);
    if (at != std::string::npos) bytes.replace(at, own.size(), TheSharer().key, kHomeAt, own.size());
    TryKey(bytes);
  } else if (mode < 4) {
    const std::string secret(kIpcRandomBytes, '*');
    const size_t at = bytes.find(secret);
    if (at != std::string::npos) bytes.replace(at, secret.size(), TheSharer().key, kSecretAt, secret.size());
    TryQuestion(bytes);
  } else {
    TryReply(bytes, mode - 4);
  }
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  std::string key = BytesOf(kIpcMagic, sizeof(kIpcMagic));
  key += char(kKind);
  key.resize(kHomeAt);
  key += std::string(2 * kIpcRandomBytes, '*');
  key.resize(kIpcKeyBytes);
  IpcQuestion question{};
  memcpy(question.magic, kIpcMagic, sizeof(kIpcMagic));
  memset(question.secret, '*', kIpcRandomBytes);
  memcpy(question.group, kGroup.data(), kIpcRandomBytes);
  question.kind = uint8_t(kKind);
  IpcReply reply{};
  memcpy(reply.magic, kIpcMagic, sizeof(kIpcMagic));
  reply.found = 1;
  std::vector<std::string> seeds = {'\0' + key, '\2' + BytesOf(&question, sizeof(question))};
  for (const char mode : {'\4', '\5', '\6', '\7'}) {
    reply.has_fd = mode == '\4' ? 0 : 1;
    seeds.push_back(mode + BytesOf(&reply, sizeof(reply)));
  }
  return seeds;
}
