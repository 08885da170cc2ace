// SPDX-License-Identifier: Apache-2.0
// A program that runs out of device memory in every usual way, prints what it is told each time, and goes on working.
//
// It prints error names and the order of events, and no number that depends on how much memory a driver keeps for
// itself; how much was free and how much it got is compared here, within bounds. The card should have little free
// memory: with 4 GiB free, `--size 64`; with 64 MiB, `--size 4`.
//
// Usage: exhaust [--steps N] [--size MIB]     --size: of one piece; step 1 is made with memory nearly full
//        exhaust hold MIB                     takes memory until only that much is free, prints "holding", and waits
#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr int kCount = 4096;  // values in the buffer that kernels work on all the time

// What a driver may take for itself while a program runs: rounding, stacks, page tables.
size_t g_slack;
size_t g_piece;
unsigned* g_data;
unsigned g_rounds = 0;

__global__ void Mix(unsigned* data, int count, unsigned seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) data[i] = data[i] * 1664525u + 1013904223u + seed;
}

// Writes, or looks for, a value at the beginning, in the middle and at the end of a piece.
__global__ void Mark(unsigned* piece, size_t count, unsigned value, bool write, int* wrong) {
  const size_t places[] = {0, count / 2, count - 1};
  for (size_t place : places) {
    if (write) {
      piece[place] = value ^ unsigned(place);
    } else if (piece[place] != (value ^ unsigned(place))) {
      *wrong += 1;
    }
  }
}

// The device's heap, until it is empty.
__global__ void EmptyHeap(int* pieces) {
  void* all[64];
  int count = 0;
  while (count < 64 && (all[count] = malloc(1 << 20)) != nullptr) ++count;
  for (int i = 0; i < count; ++i) free(all[i]);
  *pieces = count;
}

constexpr int kLocal = 16384;

// Local memory for every thread that the GPU can run at once: 17 GiB on a large one.
__global__ void MuchLocal(int* out, int value) {
  volatile int local[kLocal];
  for (int i = 0; i < kLocal; ++i) local[i] = value;
  int sum = 0;
  for (int i = 0; i < kLocal; ++i) sum += local[i];
  *out = sum;
}

// What the runtime was told, and that it forgets the error when asked: it must not stick.
void Say(const char* what, cudaError_t error) {
  printf("%s: %s", what, cudaGetErrorName(error));
  if (error != cudaSuccess) {
    printf(", last %s", cudaGetErrorName(cudaPeekAtLastError()));
    cudaGetLastError();
    printf(", then %s", cudaGetErrorName(cudaGetLastError()));
  }
  printf("\n");
}

void Say(const char* what, CUresult result) {
  const char* name = nullptr;
  cuGetErrorName(result, &name);
  printf("%s: %s, last %s\n", what, name ? name : "?", cudaGetErrorName(cudaPeekAtLastError()));
}

// The kernel and the buffer that were there from the beginning still work.
void CheckKernel(const char* when) {
  static std::vector<unsigned> expected(kCount), got(kCount);
  Mix<<<(kCount + 255) / 256, 256>>>(g_data, kCount, g_rounds);
  LAUNCH_CHECK();
  for (unsigned& value : expected) value = value * 1664525u + 1013904223u + g_rounds;
  ++g_rounds;
  CUDA_CHECK(cudaMemcpy(got.data(), g_data, kCount * sizeof(unsigned), cudaMemcpyDeviceToHost));
  APP_CHECK(got == expected);
  app::Digest digest;
  digest.Add(got.data(), kCount * sizeof(unsigned));
  printf("%s: kernel right, %016" PRIx64 "\n", when, digest.value());
}

size_t Free() {
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  APP_CHECK(free <= total && total > 0);
  return free;
}

void MarkPiece(void* piece, size_t bytes, unsigned value, bool write) {
  static int* wrong = nullptr;
  if (!wrong) CUDA_CHECK(cudaMallocHost(&wrong, sizeof(int)));
  *wrong = 0;
  Mark<<<1, 1>>>(static_cast<unsigned*>(piece), bytes / sizeof(unsigned), value, write, wrong);
  LAUNCH_CHECK();
  CUDA_CHECK(cudaDeviceSynchronize());
  APP_CHECK(*wrong == 0);
}

CUmemAllocationProp PhysicalProps() {
  CUmemAllocationProp props = {};
  props.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  return props;
}

// A module whose variable has that many bytes.
CUresult LoadModule(size_t bytes, CUmodule* module) {
  char text[512];
  snprintf(text, sizeof(text),
           ".version 7.0\n.target sm_75\n.address_size 64\n.visible .global .align 8 .b8 big[%zu];\n"
           ".visible .entry touch()\n{\n.reg .b64 %%d<2>;\nmov.u64 %%d1, big;\nst.global.u64 [%%d1], %%d1;\nret;\n}\n",
           bytes);
  CUresult result = cuModuleLoadData(module, text);
  if (result != CUDA_SUCCESS) return result;
  // A driver may leave the variable's memory for when it is asked for it.
  CUdeviceptr address;
  size_t size;
  result = cuModuleGetGlobal(&address, &size, *module, "big");
  if (result != CUDA_SUCCESS) cuModuleUnload(*module);
  return result;
}

// Every kind of request, each for about `bytes`, which the card does not have.
void AskForTooMuch(const char* when, size_t bytes) {
  printf("-- %s\n", when);
  void* p = nullptr;
  size_t pitch = 0;
  CUdeviceptr d = 0;
  const size_t row = kMiB, rows = bytes / row;
  Say("cudaMalloc", cudaMalloc(&p, bytes));
  Say("cuMemAlloc", cuMemAlloc(&d, bytes));
  Say("cudaMallocPitch", cudaMallocPitch(&p, &pitch, row, rows));
  Say("cuMemAllocPitch", cuMemAllocPitch(&d, &pitch, row, rows, 16));
  cudaPitchedPtr pitched;
  Say("cudaMalloc3D", cudaMalloc3D(&pitched, make_cudaExtent(row, rows, 1)));
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  Say("cudaMallocAsync", cudaMallocAsync(&p, bytes, stream));
  Say("cudaStreamSynchronize", cudaStreamSynchronize(stream));
  cudaMemPoolProps pool_props = {};
  pool_props.allocType = cudaMemAllocationTypePinned;
  pool_props.location.type = cudaMemLocationTypeDevice;
  cudaMemPool_t pool;
  CUDA_CHECK(cudaMemPoolCreate(&pool, &pool_props));
  Say("cudaMallocFromPoolAsync", cudaMallocFromPoolAsync(&p, bytes, pool, stream));
  CUDA_CHECK(cudaMemPoolDestroy(pool));
  CUDA_CHECK(cudaStreamDestroy(stream));
  // Elements of 16 bytes, within the limits of arrays.
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<float4>();
  const size_t slice = size_t{4096} * 4096 * 16;
  cudaArray_t array;
  if (bytes >= slice) {
    const size_t slices = std::min<size_t>(bytes / slice, 2048);
    Say("cudaMalloc3DArray", cudaMalloc3DArray(&array, &format, make_cudaExtent(4096, 4096, slices)));
  } else {
    Say("cudaMalloc3DArray",
        cudaMalloc3DArray(&array, &format, make_cudaExtent(1024, 1024, (bytes + slice / 16 - 1) / (slice / 16))));
  }
  CUDA_ARRAY_DESCRIPTOR flat = {};
  flat.Width = 1024;
  flat.Height = std::min<size_t>((bytes + 16383) / 16384, 65536);
  flat.Format = CU_AD_FORMAT_FLOAT;
  flat.NumChannels = 4;
  if (flat.Height == 65536) flat.Width = std::min<size_t>(bytes / 65536 / 16, 131072);
  CUarray driver_array;
  Say("cuArrayCreate", cuArrayCreate(&driver_array, &flat));
  size_t granularity = 0;
  const CUmemAllocationProp props = PhysicalProps();
  cuMemGetAllocationGranularity(&granularity, &props, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  CUmemGenericAllocationHandle physical;
  Say("cuMemCreate", cuMemCreate(&physical, (bytes + granularity - 1) / granularity * granularity, &props, 0));
  CUmodule module;
  // More than that no variable may have.
  Say("cuModuleLoadData", LoadModule(std::min<size_t>(bytes, 0xf0000000), &module));
}

// Every kind of request, each for something that fits; all is given back.
void AskForWhatFits(const char* when, size_t bytes) {
  printf("-- %s\n", when);
  void* p = nullptr;
  size_t pitch = 0;
  Say("cudaMalloc", cudaMalloc(&p, bytes));
  MarkPiece(p, bytes, 1, true);
  MarkPiece(p, bytes, 1, false);
  Say("cudaFree", cudaFree(p));
  // Of the other kinds a little less: they round up more.
  bytes = bytes / 4 * 3;
  Say("cudaMallocPitch", cudaMallocPitch(&p, &pitch, kMiB, bytes / kMiB));
  Say("cudaFree", cudaFree(p));
  // A stream-ordered free makes room for the next one of the stream, for another stream, and then for everybody.
  cudaStream_t stream, other;
  CUDA_CHECK(cudaStreamCreate(&stream));
  CUDA_CHECK(cudaStreamCreate(&other));
  for (int i = 0; i < 3; ++i) {
    cudaStream_t const here = i == 2 ? other : stream;
    Say("cudaMallocAsync", cudaMallocAsync(&p, bytes, here));
    Say("cudaMemsetAsync", cudaMemsetAsync(p, i, bytes, here));
    Say("cudaFreeAsync", cudaFreeAsync(p, here));
    if (i == 1) Say("cudaStreamSynchronize", cudaStreamSynchronize(here));
  }
  Say("cudaStreamSynchronize", cudaStreamSynchronize(other));
  const size_t width = 1024, height = bytes / (width * 16);
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<float4>();
  cudaArray_t array;
  Say("cudaMallocArray", cudaMallocArray(&array, &format, width, height));
  Say("cudaFreeArray", cudaFreeArray(array));
  Say("cudaMallocAsync", cudaMallocAsync(&p, bytes, stream));
  Say("cudaFreeAsync", cudaFreeAsync(p, stream));
  Say("cudaStreamSynchronize", cudaStreamSynchronize(stream));
  CUmodule module;
  Say("cuModuleLoadData", LoadModule(bytes, &module));
  Say("cuModuleUnload", cuModuleUnload(module));
  Say("cudaMalloc", cudaMalloc(&p, bytes));
  Say("cudaFree", cudaFree(p));
  size_t granularity = 0;
  const CUmemAllocationProp props = PhysicalProps();
  cuMemGetAllocationGranularity(&granularity, &props, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  CUmemGenericAllocationHandle physical;
  Say("cuMemCreate", cuMemCreate(&physical, bytes / granularity * granularity, &props, 0));
  Say("cuMemRelease", cuMemRelease(physical));
  CUDA_CHECK(cudaStreamDestroy(stream));
  CUDA_CHECK(cudaStreamDestroy(other));
}

// A pool may have a limit of its own.
void LimitedPool() {
  printf("-- a pool with a limit\n");
  cudaMemPoolProps props = {};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  // Drivers have such limits in units of their own.
  const size_t most = std::max(g_piece, 32 * kMiB);
  props.maxSize = most;
  cudaMemPool_t pool;
  Say("cudaMemPoolCreate", cudaMemPoolCreate(&pool, &props));
  void *p = nullptr, *q = nullptr;
  Say("more than its limit", cudaMallocFromPoolAsync(&p, 2 * most, pool, nullptr));
  Say("half of it", cudaMallocFromPoolAsync(&p, most / 2, pool, nullptr));
  Say("more than is left", cudaMallocFromPoolAsync(&q, most, pool, nullptr));
  Say("free", cudaFreeAsync(p, nullptr));
  Say("synchronize", cudaStreamSynchronize(nullptr));
  Say("all of it", cudaMallocFromPoolAsync(&q, most, pool, nullptr));
  Say("free", cudaFreeAsync(q, nullptr));
  Say("synchronize", cudaStreamSynchronize(nullptr));
  Say("cudaMemPoolDestroy", cudaMemPoolDestroy(pool));
}

// Sizes that no machine has.
void AskForAbsurd() {
  printf("-- absurd\n");
  void* p = nullptr;
  for (int shift : {45, 50, 62}) Say("cudaMalloc", cudaMalloc(&p, size_t{1} << shift));
  Say("cudaMalloc", cudaMalloc(&p, SIZE_MAX));
  Say("cudaMallocAsync", cudaMallocAsync(&p, size_t{1} << 50, nullptr));
  for (int shift : {46, 62}) Say("cudaMallocHost", cudaMallocHost(&p, size_t{1} << shift));
  Say("cudaHostAlloc", cudaHostAlloc(&p, size_t{1} << 46, cudaHostAllocMapped));
  Say("cudaMallocManaged", cudaMallocManaged(&p, size_t{1} << 62));
}

struct Piece {
  void* address;
  size_t bytes;
};

// Takes all memory, in pieces and then in smaller ones.
std::vector<Piece> Fill() {
  const size_t before = Free();
  std::vector<Piece> pieces;
  size_t taken = 0;
  for (size_t bytes = g_piece; bytes >= g_piece / 2; bytes /= 2) {
    void* p = nullptr;
    while (true) {
      const cudaError_t error = cudaMalloc(&p, bytes);
      if (error != cudaSuccess) {
        Say("full", error);
        break;
      }
      MarkPiece(p, bytes, unsigned(pieces.size()), true);
      pieces.push_back({p, bytes});
      taken += bytes;
    }
  }
  APP_CHECK(pieces.size() >= 4);
  APP_CHECK(taken <= before + g_slack && taken + g_piece / 2 + g_slack >= before);
  APP_CHECK(Free() <= g_piece / 2 + g_slack);
  return pieces;
}

void CheckPieces(const std::vector<Piece>& pieces) {
  for (size_t i = 0; i < pieces.size(); ++i) MarkPiece(pieces[i].address, pieces[i].bytes, unsigned(i), false);
  printf("pieces right\n");
}

// Takes memory with plain allocations until only `left` bytes are free, and keeps it until the program is killed.
int Hold(size_t left) {
  size_t bytes = size_t{1} << 34;
  for (void* p = nullptr; bytes >= kMiB * 2;) {
    const size_t free = Free();
    if (free < left + bytes || cudaMalloc(&p, bytes) != cudaSuccess) bytes /= 2;
  }
  cudaGetLastError();
  printf("holding\n");
  fflush(stdout);
  while (true) pause();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && !strcmp(argv[1], "hold")) return Hold(size_t(atoi(argv[2])) * kMiB);
  const app::Options options = app::Parse(argc, argv, {2, 4});
  g_piece = g_slack = size_t(options.size) * kMiB;
  cudaDeviceProp device;
  CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
  CUDA_CHECK(cudaMalloc(&g_data, kCount * sizeof(unsigned)));
  CUDA_CHECK(cudaMemset(g_data, 0, kCount * sizeof(unsigned)));
  CheckKernel("at first");
  // All code is used once, since a driver may load it only then.
  int* number = nullptr;
  CUDA_CHECK(cudaMallocHost(&number, sizeof(int)));
  EmptyHeap<<<1, 1>>>(number);
  CUDA_CHECK(cudaDeviceSynchronize());
  APP_CHECK(*number > 0 && *number < 64);
  printf("the device's heap has an end\n");
  void* scratch = nullptr;
  CUDA_CHECK(cudaMalloc(&scratch, kMiB));
  MarkPiece(scratch, kMiB, 0, true);
  CUDA_CHECK(cudaFree(scratch));

  const size_t start = Free();
  const auto as_at_the_start = [start] { return Free() + g_slack >= start && Free() <= start + g_slack; };
  AskForAbsurd();
  AskForTooMuch("more than the card has", 2 * device.totalGlobalMem);
  CheckKernel("afterwards");
  APP_CHECK(as_at_the_start());
  LimitedPool();
  // Under cr-run, what was freed in a stream's order is given back when somebody asks how much is free, in that order,
  // too: the first answer may come a moment before.
  for (int tries = 0; tries < 500 && !as_at_the_start(); ++tries) usleep(10000);
  APP_CHECK(as_at_the_start());
  // More managed memory than the card has is no error. A large card's would be more than a test may take.
  const size_t managed_bytes = device.totalGlobalMem < 1024 * kMiB ? 3 * device.totalGlobalMem : kMiB;
  int* managed = nullptr;
  Say("cudaMallocManaged", cudaMallocManaged(&managed, managed_bytes));
  if (managed) managed[managed_bytes / sizeof(int) - 1] = 1;
  Say("cudaFree", cudaFree(managed));

  std::vector<Piece> pieces = Fill();
  AskForTooMuch("when it is full", g_piece);
  CheckKernel("when it is full");
  CheckPieces(pieces);
  MuchLocal<<<1, 1>>>(number, 77);
  const cudaError_t launched = cudaGetLastError(), waited = cudaDeviceSynchronize();
  Say("a kernel with much local memory", launched);
  Say("waited for", waited);
  if (launched == cudaSuccess && waited == cudaSuccess) APP_CHECK(*number == 77 * kLocal);
  Say("pinned memory", cudaMallocHost(&scratch, 65536));
  Say("cudaFreeHost", cudaFreeHost(scratch));

  CUDA_CHECK(cudaFree(pieces[1].address));
  AskForWhatFits("with one piece freed", g_piece);
  CUDA_CHECK(cudaMalloc(&pieces[1].address, pieces[1].bytes));
  MarkPiece(pieces[1].address, pieces[1].bytes, 1, true);
  if (pieces.back().bytes < g_piece) {
    CUDA_CHECK(cudaFree(pieces.back().address));
    pieces.pop_back();
  }
  CheckKernel("nearly full");
  fflush(stdout);
  app::Step(1);
  CheckPieces(pieces);
  CheckKernel("after the step");
  Say("cudaMalloc", cudaMalloc(&scratch, g_piece));
  for (const Piece& piece : pieces) CUDA_CHECK(cudaFree(piece.address));
  APP_CHECK(as_at_the_start());
  Say("most of it in one piece", cudaMalloc(&scratch, start / 4 * 3));
  MarkPiece(scratch, start / 4 * 3, 5, true);
  MarkPiece(scratch, start / 4 * 3, 5, false);
  Say("cudaFree", cudaFree(scratch));
  CheckKernel("at last");
  APP_CHECK(as_at_the_start());
  app::Step(2);
  return 0;
}
