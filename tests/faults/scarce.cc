// SPDX-License-Identifier: Apache-2.0
// A program that has come to a limit of its own.
//
// Usage: scarce pinned BYTES      asks for so much pinned memory, and goes on without it
//        scarce descriptors FILE  has no descriptor left while it waits until the file is there
//        scarce threads           has no thread left for its first host function and user object
// Prints what each call returned, and "scarce ok" at the end.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/faults/driver.h"

namespace {

void Say(const char* what, CUresult result) {
  printf("%s: %s\n", what, cuda_remote::faults::NameOf(result));
  fflush(stdout);
}

// Some work of every program, and whether it was right.
void Work(CUstream stream) {
  constexpr size_t kWords = 100000;
  std::vector<uint32_t> words(kWords);
  CUdeviceptr memory;
  CU_CHECK(cuMemAlloc(&memory, kWords * sizeof(uint32_t)));
  CU_CHECK(cuMemsetD32Async(memory, 0x1234567, kWords, stream));
  CU_CHECK(cuMemcpyDtoHAsync(words.data(), memory, kWords * sizeof(uint32_t), stream));
  CU_CHECK(cuStreamSynchronize(stream));
  for (const uint32_t word : words) EXPECT(word == 0x1234567);
  CU_CHECK(cuMemFree(memory));
}

void Pinned(size_t bytes) {
  void* memory = nullptr;
  const CUresult result = cuMemHostAlloc(&memory, bytes, 0);
  Say("pinned", result);
  if (result == CUDA_SUCCESS) memset(memory, 1, bytes);
  CUdeviceptr managed = 0;
  const CUresult shared = cuMemAllocManaged(&managed, bytes, CU_MEM_ATTACH_GLOBAL);
  Say("managed", shared);
  if (shared == CUDA_SUCCESS) memset(reinterpret_cast<void*>(managed), 1, bytes);
}

void Descriptors(const char* file, CUstream stream) {
  CUdeviceptr memory;
  CU_CHECK(cuMemAlloc(&memory, 4096));
  CU_CHECK(cuMemsetD32(memory, 77, 1024));
  const rlimit few{64, 64};
  EXPECT(setrlimit(RLIMIT_NOFILE, &few) == 0);
  std::vector<int> all;
  for (int fd; (fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)) >= 0;) all.push_back(fd);
  void* pinned = nullptr;
  Say("pinned", cuMemHostAlloc(&pinned, 1 << 20, CU_MEMHOSTALLOC_DEVICEMAP));
  puts("full");
  fflush(stdout);
  while (access(file, F_OK) != 0) usleep(10000);
  Work(stream);
  for (const int fd : all) close(fd);
  uint32_t word = 0;
  CU_CHECK(cuMemcpyDtoH(&word, memory, sizeof(word)));
  EXPECT(word == 77);
}

void Threads(CUstream stream) {
  // Root gets any number of them.
  const rlimit none{0, 0};
  EXPECT(geteuid() != 0 || setresuid(65534, 65534, 65534) == 0);
  EXPECT(setrlimit(RLIMIT_NPROC, &none) == 0);
  CUuserObject object;
  const auto nothing = [](void*) {};
  Say("host function", cuLaunchHostFunc(stream, nothing, nullptr));
  Say("user object", cuUserObjectCreate(&object, nullptr, nothing, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
}

}  // namespace

int main(int argc, char** argv) {
  EXPECT(argc >= 2);
  const std::string kind = argv[1];
  CUdevice device;
  CUcontext context;
  CUstream stream;
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuCtxCreate(&context, nullptr, 0, device));
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  Work(stream);
  if (kind == "pinned") Pinned(size_t(atoll(argv[2])));
  if (kind == "descriptors") Descriptors(argv[2], stream);
  if (kind == "threads") Threads(stream);
  Work(stream);
  puts("scarce ok");
  return 0;
}
