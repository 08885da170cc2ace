// Sharing between the sessions of one server: memory, events and pools that one worker shows to another one.
//
// What is shared has a key of 64 bytes, which the application carries from one process to the other. It names the
// worker that shares (an abstract Unix socket of its own) and a secret of 128 random bits. The other worker connects,
// shows the secret, and gets a descriptor of the memory, or the driver's own handle of the event. It keeps the
// connection for as long as it uses the thing, so the sharing worker always knows whether somebody does: then neither
// side can be checkpointed, and Refusals says so before a checkpoint starts.
//
// The socket answers processes of the same user only, from a thread of its own that is started with the first thing
// shared. Of these it answers workers whose session belongs to the same owner: cr-server gives the sessions of each
// owner a secret of their own, the sharing group, so that a key that leaked is of no use to anybody else.
// Thread-safe but for Imports, which is the executor's.
#ifndef CUDA_REMOTE_SERVER_WORKER_IPC_H_
#define CUDA_REMOTE_SERVER_WORKER_IPC_H_

#include <cuda.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace cuda_remote::server {

inline constexpr size_t kIpcKeyBytes = 64;

enum class IpcKind : uint8_t { kMemory = 1, kEvent = 2, kPhysical = 3, kPool = 4, kPoolMemory = 5 };

// What is shared. Which members count follows from the kind.
struct IpcFacts {
  uint64_t mapping_bytes = 0;     // of the descriptor's memory
  uint64_t offset = 0;            // of the allocation in it
  uint64_t bytes = 0;             // of the allocation
  std::array<char, 16> device{};  // UUID
  std::array<char, 64> handle{};  // the driver's own, of an event
};

// Memory of another session that is mapped here.
struct IpcImport {
  uint64_t address = 0;  // what the client has
  uint64_t mapping = 0;
  uint64_t mapping_bytes = 0;
  uint64_t context = 0;  // virtual handle of the one that opened it
  uint32_t references = 0;
  int connection = -1;
};

class Ipc {
 public:
  explicit Ipc(std::string sharing_group);
  ~Ipc();
  Ipc(const Ipc&) = delete;
  Ipc& operator=(const Ipc&) = delete;

  // --- Sharing

  // The key under which `object` (an address or a virtual handle) is shared as `kind` already; false if it is not.
  bool Shared(IpcKind kind, uint64_t object, std::string* key);
  // Shares it. Takes `fd` (-1: none) over. False if there is no socket to be had.
  bool Share(IpcKind kind, uint64_t object, const IpcFacts& facts, int fd, std::string* key);

  // The object is gone: nobody else can open it, and what was open in its name here is let go.
  void Forget(uint64_t object);

  // --- Opening

  // Asks the worker that shares. *fd (-1: none) and *connection are the caller's. CUDA_ERROR_INVALID_HANDLE if the key
  // is no key of this kind, or nobody shares it any more; CUDA_ERROR_INVALID_CONTEXT if this worker itself does and
  // `other` is set; CUDA_ERROR_OPERATING_SYSTEM if the answer does not come.
  CUresult Open(std::string_view key, IpcKind kind, bool other, IpcFacts* facts, int* fd, int* connection);
  // Keeps the connection until Forget(object).
  void Hold(uint64_t object, int connection);
  bool Holds(uint64_t object);

  // Memory by key, the executor's own.
  std::map<std::string, IpcImport>& imports() { return imports_; }
  // Address ranges that a waiter has unmapped, for the executor to use again.
  void Returned(uint64_t address, uint64_t bytes);
  std::vector<std::pair<uint64_t, uint64_t>> TakeReturned();

  // Adds what keeps this session from being saved.
  void Refusals(std::vector<std::string>* refusals);

 private:
  struct Entry {
    IpcKind kind;
    uint64_t object;
    IpcFacts facts;
    int fd;
  };

  bool StartUnlocked();
  void Serve();
  // Answers one request on a connection; false: close it.
  bool Answer(int connection);

  const std::string group_;
  std::mutex mutex_;
  std::map<std::string, Entry> shared_;                      // by secret
  std::map<std::pair<int, uint64_t>, std::string> secrets_;  // by kind and object
  std::multimap<uint64_t, int> held_;                        // connections by object
  std::vector<std::pair<uint64_t, uint64_t>> returned_;
  std::string socket_id_;  // 16 random bytes
  int listen_ = -1;
  int wake_ = -1;
  size_t users_ = 0;  // connections of other workers that use something of this one
  std::thread thread_;
  std::map<std::string, IpcImport> imports_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_IPC_H_
