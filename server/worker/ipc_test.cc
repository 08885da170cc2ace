// Two workers that share memory, and clients that want what is not theirs: wrong keys, keys of another kind, closing
// and freeing what they do not own, and strangers at the sharing worker's socket.

#include "server/worker/ipc.h"

#include <cuda.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "server/worker/testing/client.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote::server {
namespace {

constexpr char kDriver[] = "server/softgpu/libsoftgpu.so";
constexpr size_t kBytes = 3 << 20;
// Where a key has what (server/worker/ipc.cc).
constexpr size_t kKindAt = 8, kSocketAt = 16, kSecretAt = 32;

struct Side {
  explicit Side(const std::string& group = "")
      : worker({WorkerPath(), "--driver", kDriver, "--log-level", "off"}), client(worker.Connect(nullptr, group)) {
    client.OpenContext();
  }

  std::string Share(uint64_t address) {
    wire::cuIpcGetMemHandle_Request in;
    in.address = address;
    last = client.Call(kCall_cuIpcGetMemHandle, in);
    return last == CUDA_SUCCESS ? std::string(client.Decode<wire::cuIpcGetMemHandle_Reply>().key) : std::string();
  }
  uint64_t Open(const std::string& key) {
    wire::cuIpcOpenMemHandle_v2_Request in;
    in.key = key;
    in.flags = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
    last = client.Call(kCall_cuIpcOpenMemHandle_v2, in);
    return last == CUDA_SUCCESS ? client.Decode<wire::cuIpcOpenMemHandle_v2_Reply>().address : 0;
  }
  CUresult Close(uint64_t address) {
    wire::cuIpcCloseMemHandle_Request in;
    in.address = address;
    return last = client.Call(kCall_cuIpcCloseMemHandle, in);
  }

  WorkerProcess worker;
  TestClient client;
  CUresult last = CUDA_SUCCESS;
};

class IpcTest : public testing::Test {
 protected:
  IpcTest() : owner(), user() {
    memory = owner.client.Allocate(kBytes);
    EXPECT_EQ(owner.client.Write(memory, std::string(kBytes, 'a')), CUDA_SUCCESS);
    key = owner.Share(memory);
  }

  Side owner, user;
  uint64_t memory = 0;
  std::string key;
};

TEST_F(IpcTest, MemoryIsShared) {
  ASSERT_EQ(key.size(), kIpcKeyBytes);
  EXPECT_EQ(owner.Share(memory + 4096), key);  // any address in it
  const uint64_t seen = user.Open(key);
  ASSERT_NE(seen, 0u);
  EXPECT_EQ(user.client.Read(seen, kBytes), std::string(kBytes, 'a'));
  ASSERT_EQ(user.client.Write(seen, std::string(kBytes, 'b')), CUDA_SUCCESS);
  ASSERT_EQ(user.client.Synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(owner.client.Read(memory, kBytes), std::string(kBytes, 'b'));

  EXPECT_EQ(user.Open(key), seen);
  EXPECT_EQ(user.Close(seen), CUDA_SUCCESS);
  EXPECT_EQ(user.client.Read(seen, 4), "bbbb");  // open once still
  EXPECT_EQ(user.Close(seen), CUDA_SUCCESS);
  EXPECT_EQ(user.Close(seen), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(user.client.Read(seen, 4), "");
  EXPECT_NE(user.client.last, CUDA_SUCCESS);
}

TEST_F(IpcTest, TheOwnerEndsIt) {
  const uint64_t seen = user.Open(key);
  ASSERT_NE(seen, 0u);
  ASSERT_EQ(owner.client.Free(memory), CUDA_SUCCESS);
  // Who has it open keeps it; nobody else gets it.
  EXPECT_EQ(user.client.Read(seen, 4), "aaaa");
  Side third;
  EXPECT_EQ(third.Open(key), 0u);
  EXPECT_EQ(third.last, CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(IpcTest, OnlyTheKeyOpens) {
  for (const size_t at : {size_t(0), kKindAt, kSocketAt, kSecretAt, kSecretAt + 15}) {
    std::string wrong = key;
    wrong[at] ^= 4;
    EXPECT_EQ(user.Open(wrong), 0u);
    EXPECT_EQ(user.last, CUDA_ERROR_INVALID_HANDLE) << at;
  }
  for (const size_t bytes : {0, 1, 63}) {
    EXPECT_EQ(user.Open(key.substr(0, bytes)), 0u);
    EXPECT_EQ(user.last, CUDA_ERROR_INVALID_HANDLE);
  }
  EXPECT_EQ(user.Open(key + 'x'), 0u);
  EXPECT_EQ(owner.Open(key), 0u);
  EXPECT_EQ(owner.last, CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_NE(user.Open(key), 0u);
}

// A key that leaked is of no use to a session of another owner, whichever of the two has a group.
TEST_F(IpcTest, OtherOwnersCannotOpen) {
  Side stranger(std::string(16, 's'));
  EXPECT_EQ(stranger.Open(key), 0u);
  EXPECT_EQ(stranger.last, CUDA_ERROR_INVALID_HANDLE);
  const uint64_t secret = stranger.client.Allocate(kBytes);
  const std::string strangers_key = stranger.Share(secret);
  ASSERT_EQ(strangers_key.size(), kIpcKeyBytes);
  EXPECT_EQ(user.Open(strangers_key), 0u);
  EXPECT_EQ(user.last, CUDA_ERROR_INVALID_HANDLE);
  Side other(std::string(15, 's') + 't');
  EXPECT_EQ(other.Open(strangers_key), 0u);
  Side same(std::string(16, 's'));
  EXPECT_NE(same.Open(strangers_key), 0u);
  EXPECT_NE(user.Open(key), 0u);
}

// A key opens what it was made for, also if it says that it is for something else.
TEST_F(IpcTest, KindsAreNotMixed) {
  for (int kind = 0; kind < 8; ++kind) {
    if (kind == int(IpcKind::kMemory)) continue;
    std::string other = key;
    other[kKindAt] = char(kind);
    wire::cuIpcOpenEventHandle_Request event;
    event.event = user.client.NewHandle(Kind::kEvent);
    event.key = other;
    EXPECT_NE(user.client.Call(kCall_cuIpcOpenEventHandle, event), CUDA_SUCCESS) << kind;
    wire::cuMemImportFromShareableHandle_Request physical;
    physical.handle = user.client.NewHandle(Kind::kPhysicalMemory);
    physical.key = other;
    EXPECT_NE(user.client.Call(kCall_cuMemImportFromShareableHandle, physical), CUDA_SUCCESS) << kind;
    wire::cuMemPoolImportFromShareableHandle_Request pool;
    pool.pool = user.client.NewHandle(Kind::kMemoryPool);
    pool.key = other;
    EXPECT_NE(user.client.Call(kCall_cuMemPoolImportFromShareableHandle, pool), CUDA_SUCCESS) << kind;
  }
  EXPECT_EQ(user.client.status, ChannelStatus::kOk);
  EXPECT_NE(user.Open(key), 0u);
}

TEST_F(IpcTest, OpeningIsNotOwning) {
  const uint64_t seen = user.Open(key);
  ASSERT_NE(seen, 0u);
  EXPECT_EQ(user.client.Free(seen), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(user.Share(seen), "");  // what was opened is not passed on
  EXPECT_EQ(user.last, CUDA_ERROR_INVALID_VALUE);
  EXPECT_NE(user.client.Write(seen + kBytes - 2, "abcd"), CUDA_SUCCESS);
  EXPECT_EQ(user.Close(seen + 8), CUDA_ERROR_INVALID_VALUE);
  // Own memory was never opened, and is not closed.
  const uint64_t own = user.client.Allocate(4096);
  EXPECT_EQ(user.Close(own), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(user.Share(0), "");
  EXPECT_EQ(user.Share(own + 4096), "");
  EXPECT_EQ(user.client.Read(seen, 4), "aaaa");
}

int Connect(const std::string& key) {
  std::string name = "cuda-remote-ipc-";
  for (size_t i = kSocketAt; i < kSecretAt; ++i) {
    char digits[3];
    snprintf(digits, sizeof(digits), "%02x", (unsigned char)(key[i]));
    name += digits;
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path + 1, name.data(), name.size());
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), length) == 0) return fd;
  close(fd);
  return -1;
}

TEST_F(IpcTest, StrangersAtTheSocket) {
  std::vector<int> strangers;
  for (size_t bytes : {0, 1, 16, 17, 33, 34, 5000}) {
    const int fd = Connect(key);
    ASSERT_GE(fd, 0);
    // Some ask nonsense, one says nothing; all are answered with the end, or wait.
    if (bytes != 0) {
      EXPECT_EQ(send(fd, std::string(bytes, 'q').data(), bytes, MSG_NOSIGNAL), ssize_t(bytes));
    }
    strangers.push_back(fd);
  }
  const uint64_t seen = user.Open(key);
  ASSERT_NE(seen, 0u);
  EXPECT_EQ(user.client.Read(seen, 4), "aaaa");
  for (const int fd : strangers) close(fd);
  EXPECT_EQ(owner.client.Read(memory, 4), "aaaa");
}

}  // namespace
}  // namespace cuda_remote::server
