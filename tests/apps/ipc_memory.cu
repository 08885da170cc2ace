// SPDX-License-Identifier: Apache-2.0
// Ranks, one process each, that share memory by descriptors: physical memory (cuMemCreate) and memory pools, whose
// descriptors go to a neighbour over a Unix socket. Owner and neighbour write the memory in turn, and both compare it
// with a reference. One descriptor is on its way in its socket for half of the run, another one is kept open and
// imported only then. The owner has released its handles by that time, while its mappings stay. The neighbour maps one
// import at two addresses, unmaps it and maps it again.
//
//   ipc_memory [--steps N] [--size N] [--ranks N (3)]
//
// Where the driver cannot share pools, plain memory by cuIpc* takes their place.
#include <cuda.h>
#include <sys/socket.h>

#include <vector>

#include "tests/apps/support/driver.h"
#include "tests/apps/support/ranks.h"

struct Board {
  app::Barrier barrier;
  CUmemPoolPtrExportData pointers[app::kMaxRanks];
  CUipcMemHandle plain[app::kMaxRanks];
  bool pools;
  unsigned long long digests[app::kMaxRanks];
};

__host__ __device__ inline unsigned Next(unsigned value, unsigned i, unsigned step, unsigned who) {
  return value * 1664525u + (i ^ step * 2654435761u) + who;
}

// The words at both ends of the memory.
__global__ void Work(unsigned* memory, size_t words, int n, unsigned step, unsigned who) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) memory[i] = Next(memory[i], unsigned(i), step, who);
  if (i < n) memory[words - 1 - i] = Next(memory[words - 1 - i], unsigned(i), step + 7, who);
}

// What Work makes of memory that is zero at first.
struct Model {
  explicit Model(int n) : front(n), back(n) {}
  void Step(unsigned step, unsigned who) {
    for (size_t i = 0; i < front.size(); ++i) {
      front[i] = Next(front[i], unsigned(i), step, who);
      back[i] = Next(back[i], unsigned(i), step + 7, who);
    }
  }
  std::vector<unsigned> front, back;
};

CUmemAllocationProp Properties(int device) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

// Memory of the next rank's or of this one's own, at an address of this process.
struct Mapping {
  CUdeviceptr at = 0;
  size_t bytes = 0;

  void Map(CUmemGenericAllocationHandle handle, size_t size, int device) {
    bytes = size;
    if (at == 0) CU_CHECK(cuMemAddressReserve(&at, bytes, 0, 0, 0));
    CU_CHECK(cuMemMap(at, bytes, 0, handle, 0));
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CU_CHECK(cuMemSetAccess(at, bytes, &access, 1));
  }
  void Unmap() { CU_CHECK(cuMemUnmap(at, bytes)); }
  void End() {
    Unmap();
    CU_CHECK(cuMemAddressFree(at, bytes));
  }
  unsigned* words() const { return reinterpret_cast<unsigned*>(at); }
  size_t count() const { return bytes / sizeof(unsigned); }
};

int Export(CUmemGenericAllocationHandle handle) {
  int fd = -1;
  CU_CHECK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  return fd;
}

// Takes the descriptor over.
CUmemGenericAllocationHandle Import(int fd) {
  CUmemGenericAllocationHandle handle;
  CU_CHECK(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(intptr_t(fd)),
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  close(fd);
  return handle;
}

// `sockets`: from each rank to the one before it, which opens what it shares.
void Run(const app::Options& options, int count, int rank, int (*sockets)[2], Board& board) {
  const int n = options.size, blocks = (n + 127) / 128;
  const int next = (rank + 1) % count, previous = (rank + count - 1) % count;
  const int out = sockets[rank][0], in = sockets[next][1];
  for (int r = 0; r < count; ++r) {
    if (r != rank) close(sockets[r][0]);
    if (r != next) close(sockets[r][1]);
  }

  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  const int device = rank % devices;
  CUDA_CHECK(cudaSetDevice(device));
  CUDA_CHECK(cudaFree(nullptr));
  const CUmemAllocationProp prop = Properties(device);
  size_t bytes;
  CU_CHECK(cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  APP_CHECK(size_t(n) * 2 * sizeof(unsigned) <= bytes);

  // Three pieces: shared at once, with its descriptor in a socket until half way, and with its descriptor kept open.
  constexpr int kPieces = 3;
  Mapping own[kPieces], theirs[kPieces], alias;
  for (Mapping& piece : own) {
    CUmemGenericAllocationHandle handle;
    CU_CHECK(cuMemCreate(&handle, bytes, &prop, 0));
    piece.Map(handle, bytes, device);
    CU_CHECK(cuMemsetD8(piece.at, 0, bytes));
    const int fd = Export(handle);
    app::SendDescriptor(out, fd);
    close(fd);
    CU_CHECK(cuMemRelease(handle));
  }
  CUmemGenericAllocationHandle first = Import(app::ReceiveDescriptor(in));
  theirs[0].Map(first, bytes, device);
  const int kept = app::ReceiveDescriptor(in);

  // A pool, with memory of its own and of the next rank's.
  CUmemoryPool pool, their_pool = nullptr;
  CUmemPoolProps pool_props = {};
  pool_props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  pool_props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  pool_props.location = prop.location;
  CU_CHECK(cuMemPoolCreate(&pool, &pool_props));
  int pool_fd = -1;
  const bool pools =
      cuMemPoolExportToShareableHandle(&pool_fd, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS;
  Mapping pooled, their_pooled;
  pooled.bytes = their_pooled.bytes = size_t(n) * 2 * sizeof(unsigned) + 4096;
  if (pools) {
    CU_CHECK(cuMemAllocFromPoolAsync(&pooled.at, pooled.bytes, pool, nullptr));
    CU_CHECK(cuMemsetD8Async(pooled.at, 0, pooled.bytes, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    CU_CHECK(cuMemPoolExportPointer(&board.pointers[rank], pooled.at));
    board.pools = true;
  } else {
    CU_CHECK(cuMemAlloc(&pooled.at, pooled.bytes));
    CU_CHECK(cuMemsetD8(pooled.at, 0, pooled.bytes));
    CU_CHECK(cuIpcGetMemHandle(&board.plain[rank], pooled.at));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  board.barrier.Wait();
  APP_CHECK(board.pools == pools);
  // One descriptor is still in the sockets, so the pools' go the other way: each rank opens that of the one before it.
  if (pools) {
    app::SendDescriptor(in, pool_fd);
    close(pool_fd);
    const int fd = app::ReceiveDescriptor(out);
    CU_CHECK(cuMemPoolImportFromShareableHandle(&their_pool, reinterpret_cast<void*>(intptr_t(fd)),
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    close(fd);
    // An imported pool is at first accessible from the GPU alone on which its memory lies.
    if (previous % devices != device) {
      CUmemAccessDesc access = {};
      access.location = prop.location;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      CU_CHECK(cuMemPoolSetAccess(their_pool, &access, 1));
    }
    CU_CHECK(cuMemPoolImportPointer(&their_pooled.at, their_pool, &board.pointers[previous]));
  } else {
    CU_CHECK(cuIpcOpenMemHandle(&their_pooled.at, board.plain[previous], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  }

  Model piece(n), piece_next(n), late(n), late_next(n), pool_own(n), pool_theirs(n);
  std::vector<unsigned> host(n);
  const auto work = [&](const Mapping& memory, int step, int who) {
    Work<<<blocks, 128>>>(memory.words(), memory.count(), n, unsigned(step), unsigned(who));
    LAUNCH_CHECK();
  };
  const auto verify = [&](const Mapping& memory, const Model& model, app::Digest* digest) {
    CUDA_CHECK(cudaMemcpy(host.data(), memory.words(), n * sizeof(unsigned), cudaMemcpyDeviceToHost));
    APP_CHECK(!memcmp(host.data(), model.front.data(), n * sizeof(unsigned)));
    digest->Add(host.data(), n * sizeof(unsigned));
    CUDA_CHECK(
        cudaMemcpy(host.data(), memory.words() + memory.count() - n, n * sizeof(unsigned), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; ++i) APP_CHECK(host[n - 1 - i] == model.back[i]);
  };

  const int half = (options.steps + 1) / 2;
  for (int step = 1; step <= options.steps; ++step) {
    const bool owner = step % 2 != 0;
    const unsigned before = unsigned(previous), me = unsigned(rank), after = unsigned(next);
    if (step == half) {
      // The descriptors that have waited: the one kept open, and the one in the socket.
      for (int i = 1; i < kPieces; ++i) {
        const CUmemGenericAllocationHandle handle = Import(i == 1 ? kept : app::ReceiveDescriptor(in));
        theirs[i].Map(handle, bytes, device);
        CU_CHECK(cuMemRelease(handle));
      }
      alias.Map(first, bytes, device);
      CU_CHECK(cuMemRelease(first));
    }
    // Who writes which memory in this step: its owner, or the other rank that has it.
    const Mapping& mine = step > half && step % 4 == 0 ? alias : theirs[0];
    work(owner ? own[0] : mine, step, rank);
    work(owner ? pooled : their_pooled, step, rank);
    if (step >= half) {
      for (int i = 1; i < kPieces; ++i) work(owner ? own[i] : theirs[i], step, rank);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    // own[] is written by the rank before, theirs[] is the next rank's; the pool's memory by the next rank.
    piece.Step(unsigned(step), owner ? me : before);
    piece_next.Step(unsigned(step), owner ? after : me);
    pool_own.Step(unsigned(step), owner ? me : after);
    pool_theirs.Step(unsigned(step), owner ? before : me);
    if (step >= half) {
      late.Step(unsigned(step), owner ? me : before);
      late_next.Step(unsigned(step), owner ? after : me);
    }
    board.barrier.Wait();
    app::Digest digest;
    verify(own[0], piece, &digest);
    verify(theirs[0], piece_next, &digest);
    verify(pooled, pool_own, &digest);
    verify(their_pooled, pool_theirs, &digest);
    if (step >= half) {
      for (int i = 1; i < kPieces; ++i) {
        verify(own[i], late, &digest);
        verify(theirs[i], late_next, &digest);
      }
      verify(alias, piece_next, &digest);
      if (step % 5 == 0) {
        // The last mapping but one goes, and comes back from the handle that is behind the other one.
        CUmemGenericAllocationHandle handle;
        theirs[0].Unmap();
        CU_CHECK(cuMemRetainAllocationHandle(&handle, alias.words()));
        theirs[0].Map(handle, bytes, device);
        CU_CHECK(cuMemRelease(handle));
      }
    }
    board.digests[rank] = digest.value();
    board.barrier.Wait();
    if (rank == 0) {
      app::Digest all;
      for (int r = 0; r < count; ++r) all.Add(board.digests[r]);
      printf("step %d: %016" PRIx64 "\n", step, all.value());
      fflush(stdout);
      app::Step(step);
    }
  }

  board.barrier.Wait();
  if (pools) {
    CU_CHECK(cuMemFreeAsync(their_pooled.at, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    CU_CHECK(cuMemPoolDestroy(their_pool));
  } else {
    CU_CHECK(cuIpcCloseMemHandle(their_pooled.at));
  }
  for (Mapping& mapping : theirs) mapping.End();
  alias.End();
  board.barrier.Wait();  // nobody uses the others' memory any more
  if (pools) {
    CU_CHECK(cuMemFreeAsync(pooled.at, nullptr));
  } else {
    CU_CHECK(cuMemFree(pooled.at));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  CU_CHECK(cuMemPoolDestroy(pool));
  for (Mapping& mapping : own) mapping.End();
}

int main(int argc, char** argv) {
  const int count = app::TakeRanks(&argc, argv, 3);
  const app::Options options = app::Parse(argc, argv, {24, 1024});
  int sockets[app::kMaxRanks][2];
  for (int r = 0; r < count; ++r) APP_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets[r]) == 0);
  Board* const board = app::Share<Board>();
  board->barrier.Init(count);
  app::RunRanks(count, [&](int rank) { Run(options, count, rank, sockets, *board); });
  printf("%d ranks, %d steps: every value as expected\n", count, options.steps);
  return 0;
}
