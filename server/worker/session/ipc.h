// SPDX-License-Identifier: Apache-2.0
// Sharing between the sessions of one server: memory, events and pools that one worker shows to another one.
//
// What is shared has a key of 64 bytes, which the application carries from one process to the other. It names a home
// (128 random bits, of the session that shares) and a secret (128 more, of the thing). Both stay what they are when the
// session is replayed on another server: a key that the application has kept anywhere goes on opening what it opened.
//
// The worker that shares listens at an abstract Unix socket, whose name is a hash of its home, its scope and its
// sharing group. The other worker computes the same name, connects, shows the secret, and gets a descriptor of the
// memory, or the driver's own handle of the event. It keeps the connection for as long as it uses the thing, and the
// sharing worker for as long as it has it, so each knows of the other, and says who it is before a checkpoint
// (Refusals).
//
// - The scope keeps copies of a job apart that were restarted from one image: sessions that are replayed together get a
//   random one (OpShareIn); it is empty for all others. It cannot be guessed, so nobody can take a name of a session
//   that is about to be replayed.
//   Offers of a move have a scope of their own, whatever the sessions' are.
// - The sharing group is a secret that cr-server gives to all sessions of one owner; it is the same at all servers of
//   one user for this user's own sessions. Sessions of other owners compute other names and show another group, so a
//   key that leaked is of no use to them. The socket answers processes of the same user only.
//
// A thread answers at the sockets; it is started with the first thing shared. Thread-safe but for imports(), which is
// the executor's.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_IPC_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_IPC_H_

#include <cuda.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "proto/base/unique_fd.h"
#include "proto/threads/mutex.h"
#include "server/driver/driver_table.h"

namespace cuda_remote::server {

inline constexpr size_t kIpcKeyBytes = 64;
inline constexpr size_t kIpcScopeBytes = 16;

// kOffer: memory of a session that is about to move. No application has such a key, and it opens once.
enum class IpcKind : uint8_t { kMemory = 1, kEvent = 2, kPhysical = 3, kPool = 4, kPoolMemory = 5, kOffer = 6 };

// What is shared. Which members count follows from the kind.
struct IpcFacts {
  uint64_t mapping_bytes = 0;     // of the descriptor's memory
  uint64_t offset = 0;            // of the allocation in it
  uint64_t bytes = 0;             // of the allocation
  std::array<char, 16> device{};  // UUID
  std::array<char, 64> handle{};  // the driver's own, of an event
};

// A session that shares or opens. Session numbers are a server's own.
struct IpcPeer {
  uint64_t session = 0;
  int32_t server = 0;  // PID of the cr-server, seen from outside of jobs
  uint32_t pid = 0;    // of the client, as it knows itself
  std::array<char, 48> program{};
};

// Who this worker is to others.
struct IpcSelf {
  std::string group;
  IpcPeer peer;
};

// Something of another session that is in use here.
struct IpcUse {
  std::shared_ptr<UniqueFd> connection;  // ends when the other session has the thing no more
  IpcPeer peer;
};

// An offer of another worker that was taken, or not.
struct IpcOffered {
  bool taken = false;
  int fd = -1;  // of the memory
  IpcFacts facts;
  IpcPeer peer;
};

// Memory of another session that is mapped here.
struct IpcImport {
  uint64_t address = 0;  // what the client has
  uint64_t mapping = 0;
  uint64_t mapping_bytes = 0;
  uint64_t context = 0;  // virtual handle of the one that opened it, and that it dies with; 0: memory of a pool
  uint32_t references = 0;
  IpcUse use;
};

class Ipc {
 public:
  explicit Ipc(IpcSelf self);
  ~Ipc();
  Ipc(const Ipc&) = delete;
  Ipc& operator=(const Ipc&) = delete;

  // Whether this is a session of the same server.
  bool IsOfThisServer(const IpcPeer& peer) const { return peer.server == self_.peer.server; }

  // Before anything is shared or opened. False after that, or if it is no scope.
  bool SetScope(std::string_view scope);

  // The socket at which a home answers, without the first zero byte. Missing bytes of the group and the scope are zero.
  static std::string SocketName(std::string group, std::string scope, std::string_view home);

  // --- Sharing

  // The key under which `object` (an address or a virtual handle) is shared as `kind` already; false if it is not.
  bool Shared(IpcKind kind, uint64_t object, std::string* key);
  // Shares it, under *key if that is not empty (a replay). Takes `fd` (-1: none) over. CUDA_ERROR_INVALID_HANDLE if
  // *key is no key of this kind or in use; CUDA_ERROR_OPERATING_SYSTEM if there is no socket to be had.
  CUresult Share(IpcKind kind, uint64_t object, const IpcFacts& facts, int fd, std::string* key);
  // How many other sessions use it.
  size_t Users(uint64_t object);

  // Offers memory to the worker to which this session moves, in the place of an older offer of `object`. As Share, but
  // for scope and saving it never happened, and the first one who opens it ends it.
  CUresult Offer(uint64_t object, const IpcFacts& facts, int fd, std::string* key);
  // Ends all offers that nobody has taken: they keep memory alive. Costs nothing if there are none.
  void ForgetOffers();

  // The object is gone: nobody else can open it, and what was open in its name here is let go.
  void Forget(uint64_t object);

  // --- Opening

  // Asks the worker that shares. *fd (-1: none) is the caller's. CUDA_ERROR_INVALID_HANDLE if the
  // key is no key of this kind, or nobody shares it (any more); CUDA_ERROR_INVALID_CONTEXT if this worker itself does
  // and `other` is set; CUDA_ERROR_OPERATING_SYSTEM if the answer does not come. Waits for `patience` until it is
  // shared.
  CUresult Open(std::string_view key, IpcKind kind, bool other, std::chrono::milliseconds patience, IpcFacts* facts,
                int* fd, IpcUse* use);
  // Takes offers of another worker, as Open with kOffer and without patience would take each; faster for many. In the
  // order of the keys. The descriptors are the caller's.
  std::vector<IpcOffered> TakeOffers(const std::vector<std::string_view>& keys);
  // Keeps the connection until Forget(object).
  void Hold(uint64_t object, const IpcUse& use);
  bool Holds(uint64_t object);

  // Memory by key, the executor's own.
  std::map<std::string, IpcImport>& imports() { return imports_; }
  // Unmaps memory that is among them no more and that no work uses. Any thread.
  CUresult LetGo(const DriverTable& driver, const IpcImport& import);
  // An address range for mappings is free again. Any thread.
  void Return(uint64_t address, uint64_t bytes);
  // Address ranges that LetGo and Return have given back, for the executor to use again.
  std::vector<std::pair<uint64_t, uint64_t>> TakeReturned();

  // Adds what keeps this session from being saved together with `sessions` of the same server: what it shares with
  // others, and what it uses though its owner has it no more.
  void Refusals(const std::set<uint64_t>& sessions, std::vector<std::string>* refusals);

 private:
  struct Entry {
    IpcKind kind;
    uint64_t object;
    IpcFacts facts;
    UniqueFd fd;
  };
  struct User {
    std::string secret;  // what it uses; empty: it has not asked yet
    IpcPeer peer;
    UniqueFd connection;
  };

  // Makes the socket of a home, and the thread.
  bool ListenLocked(const std::string& home, const std::string& scope) CR_REQUIRES(mutex_);
  void Serve();
  void Accept(int listening);
  // Answers one request on a connection; false: close it.
  bool AnswerLocked(int connection, User* user) CR_REQUIRES(mutex_);
  void ForgetLocked(IpcKind kind, uint64_t object) CR_REQUIRES(mutex_);
  void CloseUsersLocked(const std::string& secret) CR_REQUIRES(mutex_);
  bool IsAmong(const IpcPeer& peer, const std::set<uint64_t>& sessions) const;
  // As which name the worker listens that shares what the key names, and the key's secret. Errors as Open's.
  CUresult FindOwner(std::string_view key, IpcKind kind, bool other, std::string* name, std::string* secret);
  // Sends a question to the worker that listens as `name`; the caller hears the answer on *connection, or closes it.
  CUresult Ask(const std::string& name, const std::string& secret, IpcKind kind, int* connection) const;
  // Takes the connection, also on failure.
  static CUresult Hear(int connection, IpcFacts* facts, int* fd, IpcUse* use);

  const IpcSelf self_;
  Mutex mutex_;
  std::string scope_ CR_GUARDED_BY(mutex_);                    // empty: that of sessions that were never replayed
  bool used_ CR_GUARDED_BY(mutex_) = false;                    // the scope stays what it is
  std::map<std::string, Entry> shared_ CR_GUARDED_BY(mutex_);  // by secret
  std::map<std::pair<int, uint64_t>, std::string> secrets_ CR_GUARDED_BY(mutex_);  // by kind and object
  std::map<std::string, std::string> homes_ CR_GUARDED_BY(mutex_);                 // by secret
  std::multimap<uint64_t, IpcUse> held_ CR_GUARDED_BY(mutex_);                     // by object
  std::vector<std::pair<uint64_t, uint64_t>> returned_ CR_GUARDED_BY(mutex_);
  std::string home_ CR_GUARDED_BY(mutex_);                           // of what is shared next; empty: none yet
  std::string offers_home_ CR_GUARDED_BY(mutex_);                    // of offers, likewise
  std::atomic<bool> has_offers_{false};                              // there may be some
  std::map<std::string, UniqueFd> listening_ CR_GUARDED_BY(mutex_);  // by home
  std::map<int, User> users_ CR_GUARDED_BY(mutex_);                  // by connection
  UniqueFd wake_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
  std::map<std::string, IpcImport> imports_;
};

// "process 123 (python, session 4)".
std::string NameOf(const IpcPeer& peer);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_IPC_H_
