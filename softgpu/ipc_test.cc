// SPDX-License-Identifier: Apache-2.0
// Device memory and events between processes. The other process is this program again, with the handles as arguments.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "proto/base/text.h"
#include "softgpu/testing/fixture.h"

namespace cuda_remote::softgpu {
namespace {

template <class T>
std::string Hex(const T& value) {
  return HexBytes({reinterpret_cast<const char*>(&value), sizeof value});
}

template <class T>
T FromHex(const std::string& text) {
  T value{};
  std::string bytes;
  if (BytesOfHex(text, &bytes) && bytes.size() == sizeof value) std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

constexpr unsigned kLazy = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
// data[i] = data[i] * 3 + i, in the other process.
constexpr unsigned kFactor = 3;

// The other process's part; it says by its exit code what went wrong.
int Import(char** arguments) {
  CUcontext context;
  CUmodule module;
  CUfunction scale;
  CUdevice device;
  if (Cu().cuInit(0) || Cu().cuDeviceGet(&device, 0) || Cu().cuCtxCreate_v2(&context, 0, 0)) return 10;
  if (Cu().cuModuleLoadData(&module, kPtx) || Cu().cuModuleGetFunction(&scale, module, "scale")) return 11;
  CUevent event;
  if (Cu().cuIpcOpenEventHandle(&event, FromHex<CUipcEventHandle>(arguments[0]))) return 12;
  if (Cu().cuStreamWaitEvent(nullptr, event, 0)) return 13;
  for (int i = 1; arguments[i] != nullptr; i += 2) {
    const auto handle = FromHex<CUipcMemHandle>(arguments[i]);
    unsigned count = unsigned(std::stoul(arguments[i + 1]));
    CUdeviceptr memory, again, base;
    size_t size;
    if (Cu().cuIpcOpenMemHandle_v2(&memory, handle, 0) != CUDA_ERROR_INVALID_VALUE) return 20;
    if (Cu().cuIpcOpenMemHandle_v2(&memory, handle, kLazy)) return 21;
    if (Cu().cuIpcOpenMemHandle_v2(&again, handle, kLazy) || again != memory) return 22;
    if (Cu().cuMemGetAddressRange_v2(&base, &size, memory + 4) || base != memory || size != 4 * count) return 23;
    void* params[] = {&memory, &count, const_cast<unsigned*>(&kFactor)};
    if (Cu().cuLaunchKernel(scale, (count + 63) / 64, 1, 1, 64, 1, 1, 0, nullptr, params, nullptr)) return 24;
    if (Cu().cuCtxSynchronize()) return 25;
    if (Cu().cuMemFree_v2(memory) != CUDA_ERROR_INVALID_VALUE) return 26;
    if (Cu().cuIpcCloseMemHandle(memory)) return 27;
    unsigned first = 0;
    if (Cu().cuMemcpyDtoH_v2(&first, memory, 4)) return 28;  // opened twice, closed once
    if (Cu().cuIpcCloseMemHandle(memory)) return 29;
    if (Cu().cuIpcCloseMemHandle(memory) != CUDA_ERROR_INVALID_VALUE) return 30;
    if (Cu().cuMemcpyDtoH_v2(&first, memory, 4) == CUDA_SUCCESS) return 31;
  }
  return 0;
}

class Between : public SoftGpuTest {
 protected:
  // Runs the other process; its exit code.
  int Other(const std::vector<std::string>& arguments) {
    std::vector<char*> list = {const_cast<char*>("other"), const_cast<char*>("--import")};
    for (const std::string& argument : arguments) list.push_back(const_cast<char*>(argument.c_str()));
    list.push_back(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      execv("/proc/self/exe", list.data());
      _exit(1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -status;
  }
};

TEST_F(Between, MemoryAndEvents) {
  CUevent event;
  CUipcEventHandle event_handle;
  CU_OK(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
  std::vector<std::string> arguments(1);
  // Small pieces share pages; the last is mapped by itself.
  const unsigned counts[] = {5, 1000, 3000, 1 << 20};
  std::vector<CUdeviceptr> memory;
  for (const unsigned count : counts) {
    CUdeviceptr address;
    CU_OK(cuMemAlloc_v2(&address, 4 * count));
    CU_OK(cuMemsetD32_v2(address, count, count));
    CUipcMemHandle handle;
    CU_OK(cuIpcGetMemHandle(&handle, address));
    arguments.push_back(Hex(handle));
    arguments.push_back(std::to_string(count));
    memory.push_back(address);
    CUdeviceptr own;
    CU_IS(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenMemHandle_v2(&own, handle, kLazy));
  }
  CU_OK(cuEventRecord(event, nullptr));
  CU_OK(cuIpcGetEventHandle(&event_handle, event));
  arguments[0] = Hex(event_handle);
  EXPECT_EQ(0, Other(arguments));
  for (size_t k = 0; k < memory.size(); ++k) {
    std::vector<unsigned> host(counts[k]);
    CU_OK(cuMemcpyDtoH_v2(host.data(), memory[k], 4 * counts[k]));
    for (unsigned i = 0; i < counts[k]; ++i) ASSERT_EQ(counts[k] * kFactor + i, host[i]) << k;
    CU_OK(cuMemFree_v2(memory[k]));
  }
}

TEST_F(Between, OnlyPlainDeviceMemory) {
  CUipcMemHandle handle;
  CUdeviceptr managed, pooled;
  void* pinned;
  CU_OK(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
  CU_OK(cuMemHostAlloc(&pinned, 4096, 0));
  CU_OK(cuMemAllocAsync(&pooled, 4096, nullptr));
  for (const CUdeviceptr address : {managed, CUdeviceptr(pinned), pooled, CUdeviceptr{0}, CUdeviceptr{4096}}) {
    CU_IS(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&handle, address));
  }
  handle = {};
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle_v2(&managed, handle, kLazy));
}

// A handle of a process that is gone.
TEST_F(Between, TheOtherHasEnded) {
  CUdeviceptr memory, opened;
  CUipcMemHandle handle;
  CU_OK(cuMemAlloc_v2(&memory, 4096));
  CU_OK(cuIpcGetMemHandle(&handle, memory));
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  std::memcpy(reinterpret_cast<char*>(&handle) + 8, &child, sizeof child);  // its process
  CU_IS(CUDA_ERROR_MAP_FAILED, cuIpcOpenMemHandle_v2(&opened, handle, kLazy));
  CU_OK(cuMemFree_v2(memory));
}

// Pieces of all sizes do not overlap, and what is freed serves again.
TEST_F(Between, SmallPiecesOfMemory) {
  std::vector<std::pair<CUdeviceptr, size_t>> pieces;
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < 200; ++i) {
      const size_t bytes = 1 + i * i * 37 % 60000;
      CUdeviceptr address;
      CU_OK(cuMemAlloc_v2(&address, bytes));
      EXPECT_EQ(0u, address % 256);
      CU_OK(cuMemsetD8_v2(address, static_cast<unsigned char>(pieces.size()), bytes));
      pieces.emplace_back(address, bytes);
    }
    for (size_t i = 0; i < pieces.size(); ++i) {
      std::vector<unsigned char> host(pieces[i].second);
      CU_OK(cuMemcpyDtoH_v2(host.data(), pieces[i].first, host.size()));
      for (const unsigned char byte : host) ASSERT_EQ(static_cast<unsigned char>(i), byte);
    }
    for (size_t i = 0; i < pieces.size(); ++i) CU_OK(cuMemFree_v2(pieces[(i * 7 + 3) % pieces.size()].first));
    pieces.clear();
  }
}

}  // namespace
}  // namespace cuda_remote::softgpu

int main(int argc, char** argv) {
  if (argc > 2 && std::strcmp(argv[1], "--import") == 0) return cuda_remote::softgpu::Import(argv + 2);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
