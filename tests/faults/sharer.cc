// SPDX-License-Identifier: Apache-2.0
// Two processes that share memory, an event, a pool and physical memory, as MPI libraries and data loaders do.
//
// Usage: sharer SOCKET export|import [ROUNDS]
//
// The exporter listens on the Unix socket SOCKET and sends handles; the importer opens them, doubles what it finds, and
// answers. Both print what they see, so the bytes are the same in every run. CR_TEST_SYNC_FILE and its companions
// (tests/apps/support/app.h) let a test stop the exporter while everything is shared.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "tests/apps/support/app.h"
#include "tests/faults/driver.h"

namespace {

constexpr unsigned kWords = 1 << 20;  // 4 MiB: pages of its own
constexpr unsigned kFew = 1000;       // shares a page with others

struct Message {
  CUipcMemHandle large, small;
  CUipcEventHandle event;
  CUmemPoolPtrExportData pooled;
  size_t physical_bytes;
};

int Listen(const char* path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
  EXPECT(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 && listen(fd, 1) == 0);
  const int peer = accept(fd, nullptr, nullptr);
  EXPECT(peer >= 0);
  close(fd);
  return peer;
}

int Connect(const char* path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  for (int attempt = 0; attempt < 3000; ++attempt) {
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
    usleep(10000);
  }
  EXPECT(!"nobody listens");
  return -1;
}

void SendFds(int socket, const void* data, size_t bytes, const int* fds, int count) {
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(size_t(count) * sizeof(int));
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(size_t(count) * sizeof(int));
  memcpy(CMSG_DATA(head), fds, size_t(count) * sizeof(int));
  EXPECT(sendmsg(socket, &message, 0) == ssize_t(bytes));
}

void ReceiveFds(int socket, void* data, size_t bytes, int* fds, int count) {
  iovec part{data, bytes};
  msghdr message{};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  EXPECT(recvmsg(socket, &message, MSG_WAITALL) == ssize_t(bytes));
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  EXPECT(head && head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(size_t(count) * sizeof(int)));
  memcpy(fds, CMSG_DATA(head), size_t(count) * sizeof(int));
}

void Tell(int socket) { EXPECT(write(socket, "x", 1) == 1); }
void Hear(int socket) {
  char byte;
  EXPECT(read(socket, &byte, 1) == 1);
}

uint64_t Digest(CUdeviceptr address, unsigned words) {
  std::vector<unsigned> values(words);
  CU_CHECK(cuMemcpyDtoH(values.data(), address, words * sizeof(unsigned)));
  app::Digest digest;
  digest.Add(values.data(), words * sizeof(unsigned));
  return digest.value();
}

// Each word: twice what it was, plus one.
void Change(CUdeviceptr address, unsigned words, CUstream stream) {
  std::vector<unsigned> values(words);
  CU_CHECK(cuStreamSynchronize(stream));
  CU_CHECK(cuMemcpyDtoH(values.data(), address, words * sizeof(unsigned)));
  for (unsigned& value : values) value = 2 * value + 1;
  CU_CHECK(cuMemcpyHtoDAsync(address, values.data(), words * sizeof(unsigned), stream));
  CU_CHECK(cuStreamSynchronize(stream));
}

void Fill(CUdeviceptr address, unsigned words, unsigned seed) {
  std::vector<unsigned> values(words);
  for (unsigned i = 0; i < words; ++i) values[i] = i * 2654435761u + seed;
  CU_CHECK(cuMemcpyHtoD(address, values.data(), words * sizeof(unsigned)));
}

struct Mapped {
  CUdeviceptr address = 0;
  size_t bytes = 0;
};

Mapped Map(CUmemGenericAllocationHandle handle, size_t bytes, CUdevice device) {
  Mapped mapped;
  mapped.bytes = bytes;
  CU_CHECK(cuMemAddressReserve(&mapped.address, bytes, 0, 0, 0));
  CU_CHECK(cuMemMap(mapped.address, bytes, 0, handle, 0));
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CU_CHECK(cuMemSetAccess(mapped.address, bytes, &access, 1));
  return mapped;
}

void Unmap(const Mapped& mapped) {
  CU_CHECK(cuMemUnmap(mapped.address, mapped.bytes));
  CU_CHECK(cuMemAddressFree(mapped.address, mapped.bytes));
}

void Export(int socket, CUdevice device, int rounds) {
  CUdeviceptr large, spacer, small, pooled;
  CU_CHECK(cuMemAlloc(&large, kWords * sizeof(unsigned)));
  CU_CHECK(cuMemAlloc(&spacer, 4096));
  CU_CHECK(cuMemAlloc(&small, kFew * sizeof(unsigned)));
  CUstream stream;
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUmemPoolProps props{};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  props.location.id = device;
  CUmemoryPool pool;
  CU_CHECK(cuMemPoolCreate(&pool, &props));
  CU_CHECK(cuMemAllocFromPoolAsync(&pooled, kFew * sizeof(unsigned), pool, stream));
  CU_CHECK(cuStreamSynchronize(stream));
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  size_t granularity = 0;
  CU_CHECK(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  CUmemGenericAllocationHandle physical;
  CU_CHECK(cuMemCreate(&physical, granularity, &prop, 0));
  const Mapped mapped = Map(physical, granularity, device);
  // The handle can be had again from the address.
  CUmemGenericAllocationHandle again = 0;
  CU_CHECK(cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(mapped.address + 64)));
  EXPECT(again == physical);
  CU_CHECK(cuMemRelease(again));
  CUevent event;
  CU_CHECK(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));

  Fill(large, kWords, 1);
  Fill(small, kFew, 2);
  Fill(pooled, kFew, 3);
  Fill(mapped.address, kFew, 4);
  CU_CHECK(cuEventRecord(event, stream));

  Message message{};
  int fds[2] = {-1, -1};
  CU_CHECK(cuIpcGetMemHandle(&message.large, large));
  CU_CHECK(cuIpcGetMemHandle(&message.small, small));
  CUipcMemHandle same;
  CU_CHECK(cuIpcGetMemHandle(&same, large));
  EXPECT(!memcmp(&same, &message.large, sizeof(same)));
  CUdeviceptr own;
  EXPECT(cuIpcOpenMemHandle(&own, same, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == CUDA_ERROR_INVALID_CONTEXT);
  CU_CHECK(cuIpcGetEventHandle(&message.event, event));
  CU_CHECK(cuMemPoolExportPointer(&message.pooled, pooled));
  CU_CHECK(cuMemPoolExportToShareableHandle(&fds[0], pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  CU_CHECK(cuMemExportToShareableHandle(&fds[1], physical, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  message.physical_bytes = granularity;
  SendFds(socket, &message, sizeof(message), fds, 2);
  close(fds[0]);
  close(fds[1]);

  for (int round = 1; round <= rounds; ++round) {
    Hear(socket);  // the other one has recorded its event
    CU_CHECK(cuStreamWaitEvent(stream, event, 0));
    Change(large, kWords, stream);
    Change(small, kFew, stream);
    printf("exporter %d: %016" PRIx64 " %016" PRIx64 " %016" PRIx64 " %016" PRIx64 "\n", round, Digest(large, kWords),
           Digest(small, kFew), Digest(pooled, kFew), Digest(mapped.address, kFew));
    CU_CHECK(cuEventRecord(event, stream));
    app::Step(round);  // everything is shared here
    Tell(socket);
  }
  Hear(socket);  // all is closed
  // A handle of memory that is gone opens nothing.
  CU_CHECK(cuMemFree(large));
  CUdeviceptr next;
  CU_CHECK(cuMemAlloc(&next, kWords * sizeof(unsigned)));
  CU_CHECK(cuIpcGetMemHandle(&same, next));
  EXPECT(memcmp(&same, &message.large, sizeof(same)) != 0);
  Tell(socket);
  Hear(socket);
  close(socket);
  app::Step(rounds + 1);  // nothing is shared any more
  CU_CHECK(cuMemFree(next));
  CU_CHECK(cuMemFree(spacer));
  CU_CHECK(cuMemFree(small));
  CU_CHECK(cuMemFreeAsync(pooled, stream));
  CU_CHECK(cuStreamSynchronize(stream));
  CU_CHECK(cuMemPoolDestroy(pool));
  CU_CHECK(cuEventDestroy(event));
  Unmap(mapped);
  CU_CHECK(cuMemRelease(physical));
}

void Import(int socket, CUdevice device, int rounds) {
  Message message{};
  int fds[2];
  ReceiveFds(socket, &message, sizeof(message), fds, 2);
  CUdeviceptr large, twice, small, pooled;
  CU_CHECK(cuIpcOpenMemHandle(&large, message.large, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  CU_CHECK(cuIpcOpenMemHandle(&twice, message.large, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  EXPECT(twice == large);
  CU_CHECK(cuIpcOpenMemHandle(&small, message.small, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  CUipcMemHandle wrong = message.small;
  wrong.reserved[40] = char(wrong.reserved[40] ^ 1);
  CUdeviceptr none;
  EXPECT(cuIpcOpenMemHandle(&none, wrong, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == CUDA_ERROR_INVALID_HANDLE);
  CUdeviceptr base;
  size_t bytes;
  CU_CHECK(cuMemGetAddressRange(&base, &bytes, small + 100));
  EXPECT(base == small && bytes == kFew * sizeof(unsigned));
  CUevent event;
  CU_CHECK(cuIpcOpenEventHandle(&event, message.event));
  CUmemoryPool pool;
  CU_CHECK(cuMemPoolImportFromShareableHandle(&pool, reinterpret_cast<void*>(intptr_t(fds[0])),
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  CU_CHECK(cuMemPoolImportPointer(&pooled, pool, &message.pooled));
  CUmemGenericAllocationHandle physical;
  CU_CHECK(cuMemImportFromShareableHandle(&physical, reinterpret_cast<void*>(intptr_t(fds[1])),
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  close(fds[0]);
  close(fds[1]);
  const Mapped mapped = Map(physical, message.physical_bytes, device);
  CU_CHECK(cuMemRelease(physical));
  CUstream stream;
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  EXPECT(cuMemAllocFromPoolAsync(&none, 64, pool, stream) == CUDA_ERROR_INVALID_VALUE);
  // Of another process's pool the figures are about what is open here.
  const auto used = [pool] {
    cuuint64_t bytes = ~cuuint64_t{0};
    CU_CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &bytes));
    return bytes;
  };
  EXPECT(used() == kFew * sizeof(unsigned));

  for (int round = 1; round <= rounds; ++round) {
    CU_CHECK(cuStreamWaitEvent(stream, event, 0));
    Change(large, kWords, stream);
    Change(small, kFew, stream);
    Change(pooled, kFew, stream);
    Change(mapped.address, kFew, stream);
    printf("importer %d: %016" PRIx64 " %016" PRIx64 " %016" PRIx64 " %016" PRIx64 "\n", round, Digest(large, kWords),
           Digest(small, kFew), Digest(pooled, kFew), Digest(mapped.address, kFew));
    CU_CHECK(cuEventRecord(event, stream));
    Tell(socket);
    Hear(socket);
    CU_CHECK(cuEventSynchronize(event));
    CU_CHECK(cuEventQuery(event));
  }
  CU_CHECK(cuIpcCloseMemHandle(large));
  EXPECT(Digest(large, 16) != 0);  // opened twice
  CU_CHECK(cuIpcCloseMemHandle(twice));
  EXPECT(cuIpcCloseMemHandle(large) == CUDA_ERROR_INVALID_VALUE);
  CU_CHECK(cuIpcCloseMemHandle(small));
  CU_CHECK(cuEventDestroy(event));
  CU_CHECK(cuMemFreeAsync(pooled, stream));
  CU_CHECK(cuStreamSynchronize(stream));
  EXPECT(used() == 0);
  CU_CHECK(cuMemPoolDestroy(pool));
  Unmap(mapped);
  Tell(socket);
  Hear(socket);
  EXPECT(cuIpcOpenMemHandle(&none, message.large, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == CUDA_ERROR_INVALID_HANDLE);
  Tell(socket);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: %s SOCKET export|import [ROUNDS]\n", argv[0]);
    return 2;
  }
  const int rounds = argc > 3 ? atoi(argv[3]) : 3;
  const bool exports = !strcmp(argv[2], "export");
  CU_CHECK(cuInit(0));
  CUdevice device;
  CUcontext context;
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CU_CHECK(cuCtxSetCurrent(context));
  const int socket = exports ? Listen(argv[1]) : Connect(argv[1]);
  if (exports) {
    Export(socket, device, rounds);
  } else {
    Import(socket, device, rounds);
  }
  printf("done\n");
  return 0;
}
