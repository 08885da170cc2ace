// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/kernel_heaps.h"

#include <cstring>

#include "absl/status/status.h"
#include "proto/driverabi/error_names.h"

namespace cuda_remote::server {
namespace {

constexpr uint64_t kBlock = 2 << 20;

// For the oldest GPUs that today's drivers know. The copies are in words of 8 bytes: heaps and pieces of them are
// multiples of that.
constexpr char kKernels[] = R"(.version 6.3
.target sm_75
.address_size 64
.extern .func (.param .b64 got) malloc(.param .b64 bytes);
.extern .func free(.param .b64 what);
.visible .entry cuda_remote_find_heap(.param .u64 answer) {
  .reg .pred %p<2>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [answer];
  mov.u64 %rd2, 16;
  {
    .param .b64 bytes;
    .param .b64 got;
    st.param.b64 [bytes], %rd2;
    call.uni (got), malloc, (bytes);
    ld.param.b64 %rd3, [got];
  }
  st.global.u64 [%rd1], %rd3;
  setp.eq.u64 %p1, %rd3, 0;
  @%p1 bra DONE;
  {
    .param .b64 what;
    st.param.b64 [what], %rd3;
    call.uni free, (what);
  }
DONE:
  ret;
}
.visible .entry cuda_remote_copy_heap(.param .u64 to, .param .u64 from, .param .u64 words) {
  .reg .pred %p<2>;
  .reg .b32 %r<5>;
  .reg .b64 %rd<9>;
  ld.param.u64 %rd1, [to];
  ld.param.u64 %rd2, [from];
  ld.param.u64 %rd3, [words];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mov.u32 %r4, %nctaid.x;
  mul.wide.u32 %rd4, %r1, %r2;
  cvt.u64.u32 %rd5, %r3;
  add.u64 %rd4, %rd4, %rd5;
  mul.wide.u32 %rd5, %r4, %r2;
MORE:
  setp.ge.u64 %p1, %rd4, %rd3;
  @%p1 bra DONE;
  shl.b64 %rd6, %rd4, 3;
  add.u64 %rd7, %rd2, %rd6;
  ld.u64 %rd8, [%rd7];
  add.u64 %rd7, %rd1, %rd6;
  st.u64 [%rd7], %rd8;
  add.u64 %rd4, %rd4, %rd5;
  bra MORE;
DONE:
  ret;
}
)";

constexpr unsigned kBlocks = 64, kThreads = 128;

}  // namespace

CUresult KernelHeaps::Search(Heap* heap) {
  CUfunction find = nullptr;
  CUresult result = driver_.cuModuleLoadData(&heap->module, kKernels);
  if (result == CUDA_SUCCESS) result = driver_.cuModuleGetFunction(&find, heap->module, "cuda_remote_find_heap");
  if (result == CUDA_SUCCESS) {
    result = driver_.cuModuleGetFunction(&heap->copier, heap->module, "cuda_remote_copy_heap");
  }
  if (result != CUDA_SUCCESS) return result;
  heap->answer = staging_->Take(sizeof(uint64_t));
  if (!heap->answer) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memset(heap->answer.get(), 0, sizeof(uint64_t));
  CUdeviceptr answer = 0;
  result = driver_.cuMemHostGetDevicePointer_v2(&answer, heap->answer.get(), 0);
  if (result == CUDA_SUCCESS) result = driver_.cuStreamCreate(&heap->stream, CU_STREAM_NON_BLOCKING);
  if (result != CUDA_SUCCESS) return result;
  void* parameters[] = {&answer};
  return driver_.cuLaunchKernel(find, 1, 1, 1, 1, 1, 1, 0, heap->stream, parameters, nullptr);
}

void KernelHeaps::Begin(uint64_t handle) {
  const auto [entry, is_new] = heaps_.try_emplace(handle);
  if (!is_new) return;
  Heap& heap = entry->second;
  if (const CUresult result = Search(&heap); result != CUDA_SUCCESS)
    heap.place = absl::FailedPreconditionError("a kernel that looks for it: " + driverabi::DescribeError(result));
}

absl::StatusOr<KernelHeaps::Place> KernelHeaps::Find(uint64_t handle) {
  const auto entry = heaps_.find(handle);
  if (entry == heaps_.end()) return absl::NotFoundError("it was not searched for");
  Heap& heap = entry->second;
  if (heap.stream != nullptr) {
    size_t limit = 0;
    CUresult result = driver_.cuStreamSynchronize(heap.stream);
    if (result == CUDA_SUCCESS) result = driver_.cuCtxGetLimit(&limit, CU_LIMIT_MALLOC_HEAP_SIZE);
    driver_.cuStreamDestroy_v2(heap.stream);
    heap.stream = nullptr;
    uint64_t first = 0;
    std::memcpy(&first, heap.answer.get(), sizeof(first));
    heap.answer.reset();
    const uint64_t end = (first + kBlock - 1) / kBlock * kBlock;
    if (result != CUDA_SUCCESS) {
      heap.place = absl::FailedPreconditionError(driverabi::DescribeError(result));
    } else if (first == 0) {
      heap.place = absl::ResourceExhaustedError("it is full");
    } else if (limit % kBlock != 0 || limit > end) {
      heap.place =
          absl::UnimplementedError("its size (" + std::to_string(limit) + " bytes) is not a multiple of 2 MiB");
    } else {
      heap.place = Place{end - limit, limit};
    }
  }
  return heap.place;
}

CUresult KernelHeaps::Copy(const DriverTable& driver, CUfunction copier, uint64_t heap, char* buffer, size_t bytes,
                           bool to_heap) {
  CUdeviceptr host = 0;
  CUresult result = driver.cuMemHostGetDevicePointer_v2(&host, buffer, 0);
  if (result != CUDA_SUCCESS) return result;
  uint64_t to = to_heap ? heap : host, from = to_heap ? host : heap, words = bytes / sizeof(uint64_t);
  void* parameters[] = {&to, &from, &words};
  result = driver.cuLaunchKernel(copier, kBlocks, 1, 1, kThreads, 1, 1, 0, nullptr, parameters, nullptr);
  return result == CUDA_SUCCESS ? driver.cuStreamSynchronize(nullptr) : result;
}

}  // namespace cuda_remote::server
