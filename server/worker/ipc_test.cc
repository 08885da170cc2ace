// SPDX-License-Identifier: Apache-2.0
// Two workers that share memory, and clients that want what is not theirs: wrong keys, keys of another kind, closing
// and freeing what they do not own, and strangers at the sharing worker's socket. Then the same sessions replayed on
// other workers, and what a checkpoint is told of sharing.

#include "server/worker/session/ipc.h"

#include <cuda.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "proto/base/testing/lingering.h"
#include "server/worker/testing/client.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote::server {
namespace {

constexpr char kDriver[] = "softgpu/libsoftgpu.so";
constexpr size_t kBytes = 3 << 20;
// Where a key has what (server/worker/session/ipc.cc).
constexpr size_t kKindAt = 8, kHomeAt = 16, kSecretAt = 32;
const std::string kScope(kIpcScopeBytes, 'r');

struct Side {
  explicit Side(uint64_t session, const std::string& group = "")
      : worker({WorkerPath(), "--driver", kDriver, "--log-level", "off"}),
        client(worker.Connect(nullptr, group, session)) {
    client.OpenContext();
  }

  // As cr-restart does: from here on requests are replayed ones.
  void Replay(const std::string& scope) {
    EXPECT_EQ(ShareIn(scope), CUDA_SUCCESS);
    client.flags = kFlagReplay;
  }
  CUresult ShareIn(const std::string& scope) {
    wire::OpShareIn_Request in;
    in.scope = scope;
    return client.Call(kOpShareIn, in);
  }
  wire::OpRegions_Reply Regions(const std::vector<uint64_t>& sessions, bool replayed = false) {
    wire::OpRegions_Request in;
    in.sessions = sessions;
    in.replayed = replayed;
    EXPECT_EQ(client.Call(kOpRegions, in), CUDA_SUCCESS);
    return client.Decode<wire::OpRegions_Reply>();
  }
  std::string Refusals(const std::vector<uint64_t>& sessions, bool replayed = false) {
    std::string all;
    for (const std::string_view refusal : Regions(sessions, replayed).refusals) all += std::string(refusal) + "\n";
    return all;
  }

  // `key`: of a replay.
  std::string Share(uint64_t address, const std::string& key = "") {
    wire::cuIpcGetMemHandle_Request in;
    in.address = address;
    in.key = key;
    last = client.Call(kCall_cuIpcGetMemHandle, in);
    return last == CUDA_SUCCESS ? std::string(client.Decode<wire::cuIpcGetMemHandle_Reply>().key) : std::string();
  }
  uint64_t Open(const std::string& key, uint64_t at = 0) {
    wire::cuIpcOpenMemHandle_v2_Request in;
    in.key = key;
    in.at = at;
    in.flags = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
    last = client.Call(kCall_cuIpcOpenMemHandle_v2, in);
    return last == CUDA_SUCCESS ? client.Decode<wire::cuIpcOpenMemHandle_v2_Reply>().address : 0;
  }
  CUresult Close(uint64_t address) {
    wire::cuIpcCloseMemHandle_Request in;
    in.address = address;
    return last = client.Call(kCall_cuIpcCloseMemHandle, in);
  }

  // Physical memory: made here, or imported; mapped at `at`, or anywhere.
  uint64_t Map(uint64_t handle, uint64_t bytes, uint64_t at = 0) {
    wire::cuMemAddressReserve_Request reserve;
    reserve.size = bytes;
    reserve.address = at;
    EXPECT_EQ(client.Call(kCall_cuMemAddressReserve, reserve), CUDA_SUCCESS);
    wire::cuMemMap_Request map;
    map.ptr = client.Decode<wire::cuMemAddressReserve_Reply>().address;
    map.size = bytes;
    map.handle = handle;
    EXPECT_EQ(client.Call(kCall_cuMemMap, map), CUDA_SUCCESS);
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    wire::cuMemSetAccess_Request set;
    set.ptr = map.ptr;
    set.size = bytes;
    set.desc = {reinterpret_cast<const char*>(&access), sizeof(access)};
    set.count = 1;
    EXPECT_EQ(client.Call(kCall_cuMemSetAccess, set), CUDA_SUCCESS);
    return map.ptr;
  }
  wire::cuMemImportFromShareableHandle_Request import;
  CUresult Import(const std::string& physical_key) {
    import.handle = client.NewHandle(Kind::kPhysicalMemory);
    import.key = physical_key;
    last = client.Call(kCall_cuMemImportFromShareableHandle, import);
    if (last != CUDA_SUCCESS) return last;
    import.bytes = client.Decode<wire::cuMemImportFromShareableHandle_Reply>().bytes;
    return last;
  }

  WorkerProcess worker;
  TestClient client;
  CUresult last = CUDA_SUCCESS;
};

class IpcTest : public testing::Test {
 protected:
  IpcTest() : owner(1), user(2) {
    memory = owner.client.Allocate(kBytes);
    EXPECT_EQ(owner.client.Write(memory, std::string(kBytes, 'a')), CUDA_SUCCESS);
    EXPECT_EQ(owner.client.Synchronize(), CUDA_SUCCESS);
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
  Side third(3);
  EXPECT_EQ(third.Open(key), 0u);
  EXPECT_EQ(third.last, CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(IpcTest, OnlyTheKeyOpens) {
  for (const size_t at : {size_t(0), kKindAt, kHomeAt, kSecretAt, kSecretAt + 15}) {
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
  Side stranger(3, std::string(16, 's'));
  EXPECT_EQ(stranger.Open(key), 0u);
  EXPECT_EQ(stranger.last, CUDA_ERROR_INVALID_HANDLE);
  const uint64_t secret = stranger.client.Allocate(kBytes);
  const std::string strangers_key = stranger.Share(secret);
  ASSERT_EQ(strangers_key.size(), kIpcKeyBytes);
  EXPECT_EQ(user.Open(strangers_key), 0u);
  EXPECT_EQ(user.last, CUDA_ERROR_INVALID_HANDLE);
  Side other(4, std::string(15, 's') + 't');
  EXPECT_EQ(other.Open(strangers_key), 0u);
  Side same(5, std::string(16, 's'));
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
  const std::string name = Ipc::SocketName("", "", key.substr(kHomeAt, kSecretAt - kHomeAt));
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
  // One leaves a descriptor that is not closed easily.
  Lingering lingering;
  strangers.push_back(Connect(key));
  ASSERT_TRUE(lingering.SendOver(strangers.back(), "q"));
  const uint64_t seen = user.Open(key);
  ASSERT_NE(seen, 0u);
  EXPECT_EQ(user.client.Read(seen, 4), "aaaa");
  for (const int fd : strangers) close(fd);
  EXPECT_EQ(owner.client.Read(memory, 4), "aaaa");
}

// The application keeps its keys and addresses; the sessions are new, and the old ones are still there.
TEST_F(IpcTest, ReplayedUnderTheSameKeys) {
  const uint64_t seen = user.Open(key);
  ASSERT_NE(seen, 0u);
  EXPECT_EQ(user.Open(key), seen);
  const uint64_t late = owner.client.Allocate(4096);  // small: one of several in its page
  const std::string late_key = owner.Share(late);
  ASSERT_EQ(user.client.Write(seen, std::string(kBytes, 'b')), CUDA_SUCCESS);
  ASSERT_EQ(user.client.Synchronize(), CUDA_SUCCESS);

  Side new_user(3), new_owner(4);
  new_user.Replay(kScope);
  new_owner.Replay(kScope);
  // The user's replay comes first, and waits.
  uint64_t seen_again = 0;
  std::thread replay([&] { seen_again = new_user.Open(key, seen); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(new_owner.client.Allocate(kBytes, memory), memory);
  EXPECT_EQ(new_owner.Share(memory, key), key);
  replay.join();
  EXPECT_EQ(seen_again, seen);
  EXPECT_EQ(new_user.client.Decode<wire::cuIpcOpenMemHandle_v2_Reply>().opened, 1u);
  EXPECT_EQ(new_user.Open(key, seen), seen);
  EXPECT_EQ(new_user.client.Decode<wire::cuIpcOpenMemHandle_v2_Reply>().opened, 2u);
  EXPECT_EQ(new_owner.client.Allocate(4096, late), late);
  EXPECT_EQ(new_owner.Share(late, late_key), late_key);
  new_user.client.flags = new_owner.client.flags = 0;

  ASSERT_EQ(new_owner.client.Write(memory, std::string(kBytes, 'n')), CUDA_SUCCESS);
  ASSERT_EQ(new_owner.client.Write(late, std::string(4096, 'l')), CUDA_SUCCESS);
  ASSERT_EQ(new_owner.client.Synchronize(), CUDA_SUCCESS);
  EXPECT_TRUE(new_user.client.Read(seen, kBytes) == std::string(kBytes, 'n'));
  EXPECT_TRUE(user.client.Read(seen, kBytes) == std::string(kBytes, 'b'));
  // A key that nobody had opened before.
  const uint64_t late_seen = new_user.Open(late_key);
  ASSERT_NE(late_seen, 0u);
  EXPECT_EQ(new_user.client.Read(late_seen, 4), "llll");
  // Sharing goes on: the same key once more, and another one.
  EXPECT_EQ(new_owner.Share(memory), key);
  const uint64_t more = new_owner.client.Allocate(kBytes);
  EXPECT_NE(new_user.Open(new_owner.Share(more)), 0u);
  // It was open twice.
  EXPECT_EQ(new_user.Close(seen), CUDA_SUCCESS);
  EXPECT_EQ(new_user.client.Read(seen, 4), "nnnn");
  EXPECT_EQ(new_user.Close(seen), CUDA_SUCCESS);
  EXPECT_EQ(new_user.client.Read(seen, 4), "");
}

// Memory of a pool outlives the context in which it was opened, and a replay opens it before there is any.
TEST_F(IpcTest, MemoryOfAPoolOutlivesTheContextThatOpenedIt) {
  const auto allocate = [](Side& side, uint64_t at) {
    wire::OpMemAlloc_Request in;
    in.bytes = kBytes;
    in.flags = 1;  // stream-ordered
    in.at = at;
    EXPECT_EQ(side.client.Call(kOpMemAlloc, in), CUDA_SUCCESS);
    return side.client.Decode<wire::OpMemAlloc_Reply>().address;
  };
  const auto share = [](Side& side, uint64_t address, const std::string& again) {
    wire::cuMemPoolExportPointer_Request in;
    in.address = address;
    in.key = again;
    EXPECT_EQ(side.client.Call(kCall_cuMemPoolExportPointer, in), CUDA_SUCCESS);
    return std::string(side.client.Decode<wire::cuMemPoolExportPointer_Reply>().key);
  };
  const auto share_pool = [](Side& side, const std::string& again) {
    CUmemPoolProps props = {};
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wire::cuMemPoolCreate_Request pool;
    pool.pool = side.client.NewHandle(Kind::kMemoryPool);
    pool.poolProps = {reinterpret_cast<const char*>(&props), sizeof(props)};
    EXPECT_EQ(side.client.Call(kCall_cuMemPoolCreate, pool), CUDA_SUCCESS);
    wire::cuMemPoolExportToShareableHandle_Request in;
    in.pool = pool.pool;
    in.key = again;
    EXPECT_EQ(side.client.Call(kCall_cuMemPoolExportToShareableHandle, in), CUDA_SUCCESS);
    return std::string(side.client.Decode<wire::cuMemPoolExportToShareableHandle_Reply>().key);
  };
  const uint64_t pooled = allocate(owner, 0);
  ASSERT_EQ(owner.client.Write(pooled, std::string(kBytes, 'p')), CUDA_SUCCESS);
  ASSERT_EQ(owner.client.Synchronize(), CUDA_SUCCESS);
  const std::string pool_key = share_pool(owner, ""), pooled_key = share(owner, pooled, "");

  wire::cuMemPoolImportFromShareableHandle_Request pool;
  pool.pool = user.client.NewHandle(Kind::kMemoryPool);
  pool.key = pool_key;
  ASSERT_EQ(user.client.Call(kCall_cuMemPoolImportFromShareableHandle, pool), CUDA_SUCCESS);
  wire::cuMemPoolImportPointer_Request in;
  in.pool = pool.pool;
  in.key = pooled_key;
  const uint32_t primary = user.client.context_slot;
  wire::cuCtxCreate_v4_Request create;
  create.context = user.client.NewHandle(Kind::kContext);
  ASSERT_EQ(user.client.Call(kCall_cuCtxCreate_v4, create), CUDA_SUCCESS);
  user.client.context_slot = SlotOf(create.context);
  ASSERT_EQ(user.client.Call(kCall_cuMemPoolImportPointer, in), CUDA_SUCCESS);
  const uint64_t seen = user.client.Decode<wire::cuMemPoolImportPointer_Reply>().address;
  wire::cuCtxDestroy_v2_Request destroy;
  destroy.context = create.context;
  user.client.context_slot = primary;
  ASSERT_EQ(user.client.Call(kCall_cuCtxDestroy_v2, destroy), CUDA_SUCCESS);
  EXPECT_EQ(user.client.Read(seen, 4), "pppp");
  EXPECT_EQ(user.Close(seen), CUDA_SUCCESS);
  EXPECT_EQ(user.client.Read(seen, 4), "");

  Side new_owner(3), new_user(4);
  new_owner.Replay(kScope);
  new_user.Replay(kScope);
  EXPECT_EQ(allocate(new_owner, pooled), pooled);
  EXPECT_EQ(share(new_owner, pooled, pooled_key), pooled_key);
  in.at = seen;
  const uint32_t current = new_user.client.context_slot;
  new_user.client.context_slot = 0;
  EXPECT_EQ(new_user.client.Call(kCall_cuMemPoolImportPointer, in), CUDA_SUCCESS);
  new_user.client.context_slot = current;
  new_owner.client.flags = new_user.client.flags = 0;
  ASSERT_EQ(new_owner.client.Write(pooled, std::string(kBytes, 'q')), CUDA_SUCCESS);
  ASSERT_EQ(new_owner.client.Synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(new_user.client.Read(seen, 4), "qqqq");
  EXPECT_EQ(new_user.Close(seen), CUDA_SUCCESS);
}

// Two restarts of one image, and the job that goes on, all on one server.
TEST_F(IpcTest, CopiesDoNotMeet) {
  const uint64_t seen = user.Open(key);
  ASSERT_NE(seen, 0u);
  Side owners[2] = {Side(3), Side(4)}, users[2] = {Side(5), Side(6)};
  for (int i = 0; i < 2; ++i) {
    const std::string scope(kIpcScopeBytes, char('0' + i));
    owners[i].Replay(scope);
    users[i].Replay(scope);
    ASSERT_EQ(owners[i].client.Allocate(kBytes, memory), memory);
    ASSERT_EQ(owners[i].Share(memory, key), key);
    ASSERT_EQ(users[i].Open(key, seen), seen);
    ASSERT_EQ(owners[i].client.Write(memory, std::string(kBytes, char('0' + i))), CUDA_SUCCESS);
    ASSERT_EQ(owners[i].client.Synchronize(), CUDA_SUCCESS);
  }
  EXPECT_EQ(users[0].client.Read(seen, 4), "0000");
  EXPECT_EQ(users[1].client.Read(seen, 4), "1111");
  EXPECT_EQ(user.client.Read(seen, 4), "aaaa");
  // Nor does one find what only the other has.
  ASSERT_EQ(owners[0].client.Free(memory), CUDA_SUCCESS);
  Side joined(7);
  EXPECT_EQ(joined.ShareIn(std::string(kIpcScopeBytes, '0')), CUDA_SUCCESS);
  EXPECT_EQ(joined.Open(key), 0u);
  EXPECT_EQ(joined.last, CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(IpcTest, AReplayDoesNotWaitForEver) {
  const uint64_t seen = user.Open(key);
  setenv("CUDA_REMOTE_SHARING_PATIENCE", "1", 1);
  Side alone(3);
  unsetenv("CUDA_REMOTE_SHARING_PATIENCE");
  alone.Replay(kScope);
  EXPECT_EQ(alone.Open(key, seen), 0u);
  EXPECT_EQ(alone.last, CUDA_ERROR_TIMEOUT);
  EXPECT_NE(alone.client.reply.message.find("waited 1 s for the session that shared this memory"), std::string::npos)
      << alone.client.reply.message;
}

// Sessions of another owner that have come by a key, before its session is replayed and after.
TEST_F(IpcTest, OtherOwnersCannotTakeAHome) {
  const std::string theirs(16, 's');
  Side stranger(3, theirs);
  stranger.Replay(kScope);  // even if they knew the scope
  const uint64_t trap = stranger.client.Allocate(kBytes);
  EXPECT_EQ(stranger.Share(trap, key), key);
  Side new_owner(4), new_user(5);
  new_owner.Replay(kScope);
  new_user.Replay(kScope);
  ASSERT_EQ(new_owner.client.Allocate(kBytes, memory), memory);
  ASSERT_EQ(new_owner.Share(memory, key), key);
  ASSERT_EQ(new_owner.client.Write(memory, std::string(kBytes, 'n')), CUDA_SUCCESS);
  ASSERT_EQ(new_owner.client.Synchronize(), CUDA_SUCCESS);
  const uint64_t seen = new_user.Open(key);
  ASSERT_NE(seen, 0u);
  EXPECT_EQ(new_user.client.Read(seen, 4), "nnnn");
  Side other(6, theirs);
  EXPECT_EQ(other.ShareIn(kScope), CUDA_SUCCESS);
  const uint64_t found = other.Open(key);
  ASSERT_NE(found, 0u);  // the trap, which is their own
  EXPECT_NE(other.client.Read(found, 4), "nnnn");
}

// What a client may write into a replay's requests.
TEST_F(IpcTest, OddReplays) {
  EXPECT_EQ(owner.ShareIn(kScope), CUDA_ERROR_ILLEGAL_STATE);  // it has shared
  Side side(3);
  for (const size_t bytes : {0, 1, 15, 17, 4096}) {
    EXPECT_EQ(side.ShareIn(std::string(bytes, 's')), CUDA_ERROR_ILLEGAL_STATE) << bytes;
  }
  side.Replay(kScope);
  const uint64_t first = side.client.Allocate(kBytes), second = side.client.Allocate(kBytes);
  for (const std::string& wrong : {key.substr(1), key + 'x', std::string(kIpcKeyBytes, 'k')}) {
    EXPECT_EQ(side.Share(first, wrong), "");
    EXPECT_EQ(side.last, CUDA_ERROR_INVALID_HANDLE);
  }
  std::string event_key = key;
  event_key[kKindAt] = char(IpcKind::kEvent);
  EXPECT_EQ(side.Share(first, event_key), "");
  EXPECT_EQ(side.Share(first, key), key);
  EXPECT_EQ(side.Share(second, key), "");  // one key for two things
  EXPECT_EQ(side.last, CUDA_ERROR_INVALID_HANDLE);
  // Another session answers for that home already.
  Side twin(4);
  twin.Replay(kScope);
  const uint64_t third = twin.client.Allocate(kBytes);
  EXPECT_EQ(twin.Share(third, key), "");
  EXPECT_EQ(twin.last, CUDA_ERROR_OPERATING_SYSTEM);
  // Addresses where shared memory cannot be.
  Side reader(5);
  reader.Replay(kScope);
  for (const uint64_t at : {uint64_t(1), uint64_t(4096), memory, ~uint64_t(0), uint64_t(1) << 63}) {
    EXPECT_EQ(reader.Open(key, at), 0u) << at;
    EXPECT_NE(reader.last, CUDA_SUCCESS) << at;
  }
  EXPECT_EQ(reader.client.status, ChannelStatus::kOk);
  EXPECT_EQ(side.client.status, ChannelStatus::kOk);
}

// Nobody would save physical memory whose maker has ended.
TEST_F(IpcTest, MemoryWhoseMakerHasEndedIsRefused) {
  constexpr uint64_t kPage = 2 << 20;
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  auto maker = std::make_unique<Side>(3);
  wire::cuMemCreate_Request create;
  create.handle = maker->client.NewHandle(Kind::kPhysicalMemory);
  create.size = kPage;
  create.prop = {reinterpret_cast<const char*>(&prop), sizeof(prop)};
  ASSERT_EQ(maker->client.Call(kCall_cuMemCreate, create), CUDA_SUCCESS);
  wire::cuMemExportToShareableHandle_Request share;
  share.handle = create.handle;
  ASSERT_EQ(maker->client.Call(kCall_cuMemExportToShareableHandle, share), CUDA_SUCCESS);
  const std::string shared(maker->client.Decode<wire::cuMemExportToShareableHandle_Reply>().key);

  Side first(4), second(5);
  ASSERT_EQ(first.Import(shared), CUDA_SUCCESS);
  ASSERT_EQ(second.Import(shared), CUDA_SUCCESS);
  EXPECT_EQ(first.import.bytes, kPage);
  ASSERT_NE(first.Map(first.import.handle, kPage), 0u);
  EXPECT_TRUE(first.Regions({3, 4, 5}).regions.empty());
  // Only the others have it mapped, so nobody would save it.
  EXPECT_NE(maker->Refusals({3, 4, 5}).find("is not fully mapped in the process that made it"), std::string::npos);
  EXPECT_EQ(first.Refusals({3, 4, 5}), "");
  maker.reset();
  const char kGone[] = "process 1003 (program3, session 3) shared and no longer has";
  for (Side* side : {&first, &second}) {
    for (int i = 0; i < 3000 && side->Refusals({4, 5}).empty(); ++i) usleep(10000);
    EXPECT_NE(side->Refusals({4, 5}).find(kGone), std::string::npos) << side->Refusals({4, 5});
    EXPECT_TRUE(side->Regions({4, 5}).regions.empty());
  }
}

TEST_F(IpcTest, ACheckpointCoversAllOrNone) {
  const uint64_t seen = user.Open(key);
  ASSERT_NE(seen, 0u);
  // Alone, each names the other; together, nothing stands in the way. The memory is the owner's to save.
  EXPECT_NE(owner.Refusals({}).find("process 1002 (program2, session 2), which is not saved with it, uses"),
            std::string::npos)
      << owner.Refusals({});
  EXPECT_NE(user.Refusals({2}).find("process 1001 (program1, session 1), which is not saved with it, shares"),
            std::string::npos)
      << user.Refusals({2});
  EXPECT_EQ(owner.Refusals({1, 2}), "");
  EXPECT_EQ(user.Refusals({1, 2}), "");
  EXPECT_EQ(user.Refusals({}, true), "");
  ASSERT_EQ(owner.Regions({1, 2}).regions.size(), 1u);
  EXPECT_EQ(owner.Regions({1, 2}).regions[0].address, memory);
  EXPECT_TRUE(user.Regions({1, 2}).regions.empty());
  // Nobody has it but the user.
  ASSERT_EQ(owner.client.Free(memory), CUDA_SUCCESS);
  EXPECT_NE(user.Refusals({1, 2}).find("what process 1001 (program1, session 1) shared and no longer has"),
            std::string::npos)
      << user.Refusals({1, 2});
  EXPECT_EQ(owner.Refusals({}), "");
  ASSERT_EQ(user.Close(seen), CUDA_SUCCESS);
  EXPECT_EQ(user.Refusals({}), "");
}

}  // namespace
}  // namespace cuda_remote::server
