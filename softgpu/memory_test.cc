// SPDX-License-Identifier: Apache-2.0
// Memory of all kinds: device, pinned, registered, pools, virtual memory, copies, fills, what is known of addresses.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "softgpu/testing/fixture.h"

namespace cuda_remote::softgpu {
namespace {

using MemoryTest = SoftGpuTest;

TEST_F(MemoryTest, BudgetIsKept) {
  size_t before, total, after;
  CU_OK(cuMemGetInfo_v2(&before, &total));
  EXPECT_EQ(size_t{2} << 30, total);
  CUdeviceptr p;
  CU_OK(cuMemAlloc_v2(&p, 1 << 20));
  CU_OK(cuMemGetInfo_v2(&after, &total));
  EXPECT_EQ(before - (1 << 20), after);
  CUdeviceptr huge;
  CU_IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&huge, total));
  CU_IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&huge, ~size_t{0}));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(&huge, 0));
  CU_OK(cuMemFree_v2(p));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(p));
  CU_IS(CUDA_SUCCESS, cuMemFree_v2(0));
  CU_OK(cuMemGetInfo_v2(&after, &total));
  EXPECT_EQ(before, after);
}

TEST_F(MemoryTest, CopiesInAllDirections) {
  std::vector<int> in(1000), out(1000);
  for (int i = 0; i < 1000; ++i) in[i] = i * 3;
  CUdeviceptr a, b;
  CU_OK(cuMemAlloc_v2(&a, 4000));
  CU_OK(cuMemAlloc_v2(&b, 4000));
  EXPECT_EQ(0u, a % 256);
  CU_OK(cuMemcpyHtoD_v2(a, in.data(), 4000));
  CU_OK(cuMemcpyDtoD_v2(b, a, 4000));
  CU_OK(cuMemcpyDtoH_v2(out.data(), b, 4000));
  EXPECT_EQ(in, out);
  // By address alone.
  std::fill(out.begin(), out.end(), 0);
  CU_OK(cuMemcpy(reinterpret_cast<CUdeviceptr>(out.data()), a, 4000));
  EXPECT_EQ(in, out);
  // Past the end, from nowhere.
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(a + 1, in.data(), 4000));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(out.data(), 0x1234, 4));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(reinterpret_cast<CUdeviceptr>(out.data()), in.data(), 4));
  CU_IS(CUDA_SUCCESS, cuMemcpyHtoD_v2(a, in.data(), 0));
}

TEST_F(MemoryTest, FillsOfAllWidths) {
  CUdeviceptr p;
  CU_OK(cuMemAlloc_v2(&p, 64));
  unsigned char bytes[64];
  CU_OK(cuMemsetD8_v2(p, 0xab, 64));
  CU_OK(cuMemsetD16_v2(p + 16, 0x1234, 8));
  CU_OK(cuMemsetD32_v2(p + 32, 0xdeadbeef, 2));
  CU_OK(cuMemsetD2D8_v2(p + 48, 8, 0x77, 2, 2));
  CU_OK(cuMemcpyDtoH_v2(bytes, p, 64));
  EXPECT_EQ(0xab, bytes[15]);
  EXPECT_EQ(0x34, bytes[16]);
  EXPECT_EQ(0x12, bytes[31]);
  EXPECT_EQ(0xef, bytes[32]);
  EXPECT_EQ(0xde, bytes[39]);
  EXPECT_EQ(0xab, bytes[40]);
  EXPECT_EQ(0x77, bytes[49]);
  EXPECT_EQ(0xab, bytes[50]);
  EXPECT_EQ(0x77, bytes[57]);
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD32_v2(p + 2, 0, 1));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(p, 0, 65));
}

TEST_F(MemoryTest, PitchedCopies) {
  CUdeviceptr p;
  size_t pitch;
  CU_OK(cuMemAllocPitch_v2(&p, &pitch, 30, 5, 4));
  EXPECT_EQ(0u, pitch % 256);
  std::vector<char> in(30 * 5), out(30 * 5);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<char>(i);
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = in.data();
  copy.srcPitch = 30;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = p;
  copy.dstPitch = pitch;
  copy.WidthInBytes = 30;
  copy.Height = 5;
  CU_OK(cuMemcpy2D_v2(&copy));
  CUDA_MEMCPY2D back = {};
  back.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  back.srcDevice = p;
  back.srcPitch = pitch;
  back.dstMemoryType = CU_MEMORYTYPE_HOST;
  back.dstHost = out.data();
  back.dstPitch = 30;
  back.WidthInBytes = 30;
  back.Height = 5;
  CU_OK(cuMemcpy2DAsync_v2(&back, nullptr));
  EXPECT_EQ(in, out);  // to pageable memory: done at return
  copy.Height = 6;
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpy2D_v2(&copy));
}

TEST_F(MemoryTest, ArraysCopyAndKeepTheirBounds) {
  CUDA_ARRAY_DESCRIPTOR facts = {};
  facts.Width = 5;
  facts.Height = 3;
  facts.Format = CU_AD_FORMAT_UNSIGNED_INT16;
  facts.NumChannels = 2;
  CUarray array;
  CU_OK(cuArrayCreate_v2(&array, &facts));
  std::vector<char> in(60), out(60);
  for (int i = 0; i < 60; ++i) in[i] = char(i * 3);
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = in.data();
  copy.srcPitch = 20;
  copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
  copy.dstArray = array;
  copy.WidthInBytes = 20;
  copy.Height = 3;
  CU_OK(cuMemcpy2D_v2(&copy));
  // A piece of the last row.
  CU_OK(cuMemcpyAtoH_v2(out.data(), array, 0, 20));
  EXPECT_EQ(std::vector<char>(in.begin(), in.begin() + 20), std::vector<char>(out.begin(), out.begin() + 20));
  CUDA_MEMCPY2D back = {};
  back.srcMemoryType = CU_MEMORYTYPE_ARRAY;
  back.srcArray = array;
  back.srcXInBytes = 8;
  back.srcY = 2;
  back.dstMemoryType = CU_MEMORYTYPE_HOST;
  back.dstHost = out.data();
  back.WidthInBytes = 12;
  back.Height = 1;
  CU_OK(cuMemcpy2D_v2(&back));
  EXPECT_EQ(std::vector<char>(in.begin() + 48, in.end()), std::vector<char>(out.begin(), out.begin() + 12));
  copy.Height = 4;
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpy2D_v2(&copy));
  copy.Height = 1;
  copy.dstXInBytes = 4;
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpy2D_v2(&copy));
  CU_OK(cuArrayDestroy(array));
  copy.dstXInBytes = 0;
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuMemcpy2D_v2(&copy));
}

TEST_F(MemoryTest, VolumesCopy) {
  CUdeviceptr p;
  CU_OK(cuMemAlloc_v2(&p, 4 * 4 * 4));
  CU_OK(cuMemsetD8_v2(p, 0, 64));
  char in[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  CUDA_MEMCPY3D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = in;
  copy.srcPitch = 2;
  copy.srcHeight = 2;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = p;
  copy.dstPitch = 4;
  copy.dstHeight = 4;
  copy.dstXInBytes = copy.dstY = copy.dstZ = 1;
  copy.WidthInBytes = copy.Height = copy.Depth = 2;
  CU_OK(cuMemcpy3D_v2(&copy));
  char out[64];
  CU_OK(cuMemcpyDtoH_v2(out, p, 64));
  EXPECT_EQ(1, out[16 + 4 + 1]);
  EXPECT_EQ(4, out[16 + 8 + 2]);
  EXPECT_EQ(8, out[32 + 8 + 2]);
  EXPECT_EQ(0, out[0]);
}

// A given pitch or height holds what is copied, also of one row and one slice; one that is not given is as small.
TEST_F(MemoryTest, PitchesAndHeightsHoldWhatIsCopied) {
  CUdeviceptr from, to;
  void* pinned;
  CU_OK(cuMemAlloc_v2(&from, 4096));
  CU_OK(cuMemAlloc_v2(&to, 64));
  CU_OK(cuMemHostAlloc(&pinned, 4096, 0));
  std::vector<char> host(4096);
  for (size_t i = 0; i < host.size(); ++i) host[i] = char(i % 251);
  memcpy(pinned, host.data(), host.size());
  CU_OK(cuMemcpyHtoD_v2(from, host.data(), host.size()));
  CUDA_MEMCPY3D good = {};
  good.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  good.dstDevice = to;
  good.srcXInBytes = 4;
  good.WidthInBytes = 8;
  good.Height = good.Depth = 1;
  for (const char kind : {'h', 'p', 'd'}) {
    SCOPED_TRACE(kind);
    good.srcMemoryType = kind == 'd' ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    good.srcHost = kind == 'p' ? pinned : host.data();
    good.srcDevice = from;
    good.srcY = 2;
    for (const size_t count : {1, 2}) {
      CUDA_MEMCPY3D box = good;
      box.Height = count;
      for (const size_t pitch : {4, 11}) {
        box.srcPitch = pitch;
        CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpy3D_v2(&box));
        CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpy3DAsync_v2(&box, nullptr));
      }
      box.srcPitch = 20;
      box.Height = 2;
      box.Depth = count;
      box.srcHeight = 3;
      CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpy3D_v2(&box));
      box.srcHeight = 4;
      CU_OK(cuMemcpy3D_v2(&box));
    }
    char first = 0;
    CU_OK(cuMemcpy3D_v2(&good));
    CU_OK(cuMemcpyDtoH_v2(&first, to, 1));
    EXPECT_EQ(2 * 12 + 4, first) << "no pitch: rows are as long as what is copied needs";
    CUDA_MEMCPY3D wide = good;
    wide.srcY = 0;
    wide.srcPitch = size_t{1} << 40;
    CU_OK(cuMemcpy3D_v2(&wide));
    CU_OK(cuMemcpyDtoH_v2(&first, to, 1));
    EXPECT_EQ(4, first);
  }
  CU_OK(cuMemFreeHost(pinned));
}

TEST_F(MemoryTest, AsyncCopyFromPageableMemoryTakesTheBytesAtTheCall) {
  CUdeviceptr p, flag;
  CU_OK(cuMemAlloc_v2(&p, 4));
  CU_OK(cuMemAlloc_v2(&flag, 4));
  CU_OK(cuMemsetD32_v2(flag, 0, 1));
  CU_OK(cuCtxSynchronize());
  CUstream stream;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU_OK(cuStreamWaitValue32_v2(stream, flag, 1, CU_STREAM_WAIT_VALUE_EQ));
  int value = 5, back = 0;
  CU_OK(cuMemcpyHtoDAsync_v2(p, &value, 4, stream));
  value = 6;
  __atomic_store_n(reinterpret_cast<int*>(flag), 1, __ATOMIC_RELEASE);  // device addresses are host addresses here
  CU_OK(cuStreamSynchronize(stream));
  CU_OK(cuMemcpyDtoH_v2(&back, p, 4));
  EXPECT_EQ(5, back);
}

TEST_F(MemoryTest, PinnedAndRegistered) {
  void* pinned;
  CU_OK(cuMemHostAlloc(&pinned, 4096, CU_MEMHOSTALLOC_PORTABLE));
  CUdeviceptr device;
  CU_OK(cuMemHostGetDevicePointer_v2(&device, pinned, 0));
  unsigned flags;
  CU_OK(cuMemHostGetFlags(&flags, pinned));
  EXPECT_EQ(unsigned{CU_MEMHOSTALLOC_DEVICEMAP}, flags);
  std::memset(pinned, 0, 4096);
  ASSERT_EQ(CUDA_SUCCESS, Bump(device, 10, nullptr));
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(10, *static_cast<int*>(pinned));
  CU_OK(cuMemFreeHost(pinned));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(pinned));

  int fd = memfd_create("registered", MFD_CLOEXEC);
  ASSERT_EQ(0, ftruncate(fd, 8192));
  void* file = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CU_OK(cuMemHostRegister_v2(file, 8192, CU_MEMHOSTREGISTER_DEVICEMAP));
  CU_IS(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister_v2(file, 4096, 0));
  ASSERT_EQ(CUDA_SUCCESS, Bump(reinterpret_cast<CUdeviceptr>(file) + 4096, 3, nullptr));
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(3, static_cast<int*>(file)[1024]);
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemHostUnregister(static_cast<char*>(file) + 4096));
  CU_IS(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(static_cast<char*>(file) + 8192));
  CU_OK(cuMemHostUnregister(file));
  CU_IS(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(file));
  munmap(file, 8192);
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister_v2(file, 8192, 0));
  close(fd);
}

TEST_F(MemoryTest, PointerAttributes) {
  CUdeviceptr p;
  CU_OK(cuMemAlloc_v2(&p, 1000));
  unsigned type;
  CU_OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p + 999));
  EXPECT_EQ(CU_MEMORYTYPE_DEVICE, static_cast<CUmemorytype>(type));
  CUcontext context;
  CU_OK(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, p));
  EXPECT_EQ(context_, context);
  CUdeviceptr base;
  size_t size;
  CU_OK(cuMemGetAddressRange_v2(&base, &size, p + 5));
  EXPECT_EQ(p, base);
  EXPECT_EQ(1000u, size);
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p + 1000));
  int local = 0, ordinal = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* data[] = {&type, &ordinal};
  CU_OK(cuPointerGetAttributes(2, attributes, data, reinterpret_cast<CUdeviceptr>(&local)));
  EXPECT_EQ(0u, type);
  EXPECT_EQ(-2, ordinal);
}

TEST_F(MemoryTest, StreamOrderedAllocation) {
  CUmemoryPool pool, current;
  CU_OK(cuDeviceGetDefaultMemPool(&pool, 0));
  CU_OK(cuDeviceGetMemPool(&current, 0));
  EXPECT_EQ(pool, current);
  CUstream stream;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUdeviceptr p;
  CU_OK(cuMemAllocAsync(&p, 5000, stream));
  CUmemoryPool of;
  CU_OK(cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, p));
  EXPECT_EQ(pool, of);
  cuuint64_t used;
  CU_OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
  EXPECT_EQ(5000u, used);
  CU_OK(cuMemsetD32Async(p, 1, 1250, stream));
  ASSERT_EQ(CUDA_SUCCESS, Scale(p, 1250, 2, stream));
  int last;
  CU_OK(cuMemcpyDtoHAsync_v2(&last, p + 4996, 4, stream));
  EXPECT_EQ(2 + 1249, last);
  CU_OK(cuMemFreeAsync(p, stream));
  CU_OK(cuStreamSynchronize(stream));
  CU_OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
  EXPECT_EQ(0u, used);
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync(p, stream));

  CUmemPoolProps props = {};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  CUmemoryPool own;
  CU_OK(cuMemPoolCreate(&own, &props));
  CU_OK(cuMemAllocFromPoolAsync(&p, 100, own, stream));
  CU_OK(cuMemFree_v2(p));
  CU_OK(cuMemPoolDestroy(own));
}

TEST_F(MemoryTest, PoolsSayWhatIsUsedAndReserved) {
  constexpr cuuint64_t kMiB = 1 << 20;
  CUmemPoolProps props = {};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  CUmemoryPool pool;
  CU_OK(cuMemPoolCreate(&pool, &props));
  const auto get = [pool](CUmemPool_attribute attribute) {
    cuuint64_t value = ~cuuint64_t{0};
    CU_IS(CUDA_SUCCESS, cuMemPoolGetAttribute(pool, attribute, &value));
    return value;
  };
  const auto set = [pool](CUmemPool_attribute attribute, cuuint64_t value) {
    return Cu().cuMemPoolSetAttribute(pool, attribute, &value);
  };
  CUstream stream;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUdeviceptr p, q;
  CU_OK(cuMemAllocFromPoolAsync(&p, 40 * kMiB, pool, stream));
  CU_OK(cuMemAllocFromPoolAsync(&q, 7, pool, stream));
  EXPECT_EQ(40 * kMiB + 7, get(CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
  EXPECT_LE(40 * kMiB + 7, get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
  size_t full, freed, waited, total;
  CU_OK(cuMemGetInfo_v2(&full, &total));
  // A free counts at once, in a stream that is busy.
  CUdeviceptr number;
  CU_OK(cuMemAlloc_v2(&number, 4));
  ASSERT_EQ(CUDA_SUCCESS, Bump(number, 300000, stream));
  CU_OK(cuMemFreeAsync(p, stream));
  EXPECT_EQ(7u, get(CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
  EXPECT_EQ(40 * kMiB + 7, get(CU_MEMPOOL_ATTR_USED_MEM_HIGH));
  EXPECT_LE(40 * kMiB, get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_GT(40 * kMiB, get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
  EXPECT_LE(40 * kMiB, get(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH));
  CU_OK(cuMemGetInfo_v2(&waited, &total));
  EXPECT_LT(full, waited);
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, set(CU_MEMPOOL_ATTR_USED_MEM_HIGH, 1));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, set(CU_MEMPOOL_ATTR_USED_MEM_CURRENT, 0));
  EXPECT_EQ(CUDA_SUCCESS, set(CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0));
  EXPECT_EQ(7u, get(CU_MEMPOOL_ATTR_USED_MEM_HIGH));
  EXPECT_EQ(CUDA_SUCCESS, set(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0));
  EXPECT_EQ(get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), get(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH));
  // With a threshold it stays, and is not free for others, until it is trimmed.
  EXPECT_EQ(CUDA_SUCCESS, set(CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, ~cuuint64_t{0}));
  CU_OK(cuMemAllocFromPoolAsync(&p, 100 * kMiB, pool, stream));
  CU_OK(cuMemFreeAsync(p, stream));
  CU_OK(cuCtxSynchronize());
  EXPECT_LE(100 * kMiB, get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
  CU_OK(cuMemGetInfo_v2(&freed, &total));
  EXPECT_GT(waited, freed + 60 * kMiB);
  CU_OK(cuMemPoolTrimTo(pool, 50 * kMiB));
  EXPECT_LE(50 * kMiB, get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
  EXPECT_GT(100 * kMiB, get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
  CU_OK(cuMemFree_v2(q));
  EXPECT_EQ(0u, get(CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
  CU_OK(cuMemPoolTrimTo(pool, 0));
  EXPECT_EQ(0u, get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
  CU_OK(cuMemPoolDestroy(pool));
}

// Takes pieces of the heap until there are none, and says how many it got; gives the first `back` of them back.
constexpr char kEat[] = R"(
.version 7.0
.target sm_75
.address_size 64
.extern .func (.param .b64 func_retval0) malloc(.param .b64 malloc_param_0);
.extern .func free(.param .b64 free_param_0);
.visible .entry eat(.param .u64 list, .param .u64 bytes, .param .u32 most, .param .u64 count, .param .u32 back)
{
  .reg .pred %p<4>;
  .reg .b32 %r<8>;
  .reg .b64 %rd<10>;
  ld.param.u64 %rd1, [list];
  ld.param.u64 %rd2, [bytes];
  ld.param.u32 %r1, [most];
  ld.param.u64 %rd3, [count];
  ld.param.u32 %r2, [back];
  mov.u32 %r3, 0;
  mov.u64 %rd4, %rd1;
TAKE:
  setp.ge.u32 %p1, %r3, %r1;
  @%p1 bra TAKEN;
  { .param .b64 size; .param .b64 got;
  st.param.b64 [size], %rd2;
  call.uni (got), malloc, (size);
  ld.param.b64 %rd5, [got]; }
  setp.eq.u64 %p2, %rd5, 0;
  @%p2 bra TAKEN;
  st.global.u64 [%rd4], %rd5;
  add.u64 %rd4, %rd4, 8;
  add.u32 %r3, %r3, 1;
  bra TAKE;
TAKEN:
  st.global.u32 [%rd3], %r3;
GIVE:
  setp.eq.u32 %p3, %r2, 0;
  @%p3 bra DONE;
  ld.global.u64 %rd6, [%rd1];
  { .param .b64 what;
  st.param.b64 [what], %rd6;
  call.uni free, (what); }
  add.u64 %rd1, %rd1, 8;
  sub.u32 %r2, %r2, 1;
  bra GIVE;
DONE:
  ret;
}
)";

TEST_F(MemoryTest, TheKernelsHeapHasAnEnd) {
  CUmodule module;
  CUfunction eat;
  CU_OK(cuModuleLoadData(&module, kEat));
  CU_OK(cuModuleGetFunction(&eat, module, "eat"));
  CUdeviceptr list, count;
  CU_OK(cuMemAlloc_v2(&list, 8 << 12));
  CU_OK(cuMemAlloc_v2(&count, 4));
  const auto take = [&](uint64_t bytes, unsigned back) {
    CUdeviceptr to = list, at = count;
    unsigned most = 1 << 12, got = ~0u;
    void* params[] = {&to, &bytes, &most, &at, &back};
    CU_IS(CUDA_SUCCESS, cuLaunchKernel(eat, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr));
    CU_IS(CUDA_SUCCESS, cuMemcpyDtoH_v2(&got, at, 4));
    return got;
  };
  size_t limit = 0;
  CU_OK(cuCtxGetLimit(&limit, CU_LIMIT_MALLOC_HEAP_SIZE));
  EXPECT_EQ(size_t{8} << 20, limit);
  CU_OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 1));
  CU_OK(cuCtxGetLimit(&limit, CU_LIMIT_MALLOC_HEAP_SIZE));
  EXPECT_EQ(size_t{4} << 20, limit);
  CU_OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, (16 << 20) + 1));
  CU_OK(cuCtxGetLimit(&limit, CU_LIMIT_MALLOC_HEAP_SIZE));
  EXPECT_EQ(size_t{16448} << 10, limit);

  EXPECT_EQ(0u, take(limit + 1, 0));
  // It is a heap now, and cannot change its size.
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 64 << 20));
  const unsigned all = take(1 << 20, 0);
  EXPECT_EQ(16u, all);
  EXPECT_EQ(0u, take(1 << 20, 0));
  const unsigned small = take(10000, 3);
  EXPECT_EQ(6u, small);  // of the last 64 KiB, each a multiple of 16 bytes and a head
  EXPECT_EQ(3u, take(10000, 3));
  // The driver's calls do not know this memory.
  CUdeviceptr piece = 0;
  CU_OK(cuMemcpyDtoH_v2(&piece, list, sizeof(piece)));
  char byte;
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(&byte, piece, 1));
  size_t size;
  CU_IS(CUDA_ERROR_NOT_FOUND, cuMemGetAddressRange_v2(nullptr, &size, piece));
  unsigned type;
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, piece));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(piece));
  // A reset context has a new one; here, another context has its own.
  CUcontext other;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  CU_OK(cuModuleLoadData(&module, kEat));
  CU_OK(cuModuleGetFunction(&eat, module, "eat"));
  EXPECT_EQ(7u, take(1 << 20, 7));  // each has a head
  EXPECT_EQ(7u, take(1 << 20, 7));  // each has a head
  CU_OK(cuCtxDestroy_v2(other));
}

class VirtualMemoryTest : public SoftGpuTest {
 protected:
  CUmemAllocationProp Prop() {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    return prop;
  }
  CUmemAccessDesc Access(CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    return {{CU_MEM_LOCATION_TYPE_DEVICE, {0}}, flags};
  }
};

TEST_F(VirtualMemoryTest, FixedArenaOfSixteenTebibytes) {
  constexpr uint64_t kPage = 2 << 20;
  CUmemAllocationProp prop = Prop();
  size_t granularity;
  CU_OK(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  EXPECT_EQ(kPage, granularity);
  CUdeviceptr arena;
#ifdef __SANITIZE_THREAD__
  constexpr uint64_t kArena = uint64_t{1} << 30;  // the sanitizer leaves less room, and elsewhere
  CU_OK(cuMemAddressReserve(&arena, kArena, 0, 0x100000000000, 0));
#else
  constexpr uint64_t kArena = uint64_t{16} << 40;
  CU_OK(cuMemAddressReserve(&arena, kArena, 0, 0x100000000000, 0));
  EXPECT_EQ(0x100000000000u, arena);
#endif
  CUmemGenericAllocationHandle first, second;
  CU_OK(cuMemCreate(&first, kPage, &prop, 0));
  CU_OK(cuMemCreate(&second, kPage, &prop, 0));
  CU_OK(cuMemMap(arena, kPage, 0, first, 0));
  CU_OK(cuMemMap(arena + kPage, kPage, 0, second, 0));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemMap(arena, kPage, 0, second, 0));
  // No access yet.
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(arena, 1, 4));
  CUmemAccessDesc access = Access();
  CU_OK(cuMemSetAccess(arena, 2 * kPage, &access, 1));
  // A copy across both pieces.
  std::vector<int> in(1024), out(1024);
  for (int i = 0; i < 1024; ++i) in[i] = i;
  CU_OK(cuMemcpyHtoD_v2(arena + kPage - 2048, in.data(), 4096));
  ASSERT_EQ(CUDA_SUCCESS, Scale(arena + kPage - 2048, 1024, 1, nullptr));
  CU_OK(cuMemcpyDtoH_v2(out.data(), arena + kPage - 2048, 4096));
  EXPECT_EQ(2 * 1023, out[1023]);
  // A read-only piece cannot be written by kernels.
  unsigned long long flags;
  CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  CU_OK(cuMemGetAccess(&flags, &location, arena));
  EXPECT_EQ(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, flags);
  // The memory outlives its handle while it is mapped.
  CU_OK(cuMemRelease(first));
  CU_OK(cuMemRelease(second));
  CUmemGenericAllocationHandle again;
  CU_OK(cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(arena + 100)));
  CU_OK(cuMemUnmap(arena, 2 * kPage));
  CU_OK(cuMemMap(arena + 8 * kPage, kPage, 0, again, 0));
  CU_OK(cuMemSetAccess(arena + 8 * kPage, kPage, &access, 1));
  CU_OK(cuMemcpyDtoH_v2(out.data(), arena + 9 * kPage - 2048, 2048));
  EXPECT_EQ(2, out[1]);
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(arena, kArena));
  CU_OK(cuMemUnmap(arena + 8 * kPage, kPage));
  CU_OK(cuMemRelease(again));
  CU_OK(cuMemAddressFree(arena, kArena));
}

TEST_F(VirtualMemoryTest, ThousandsOfPieces) {
  constexpr uint64_t kPage = 2 << 20;
  CUmemAllocationProp prop = Prop();
  CUmemAccessDesc access = Access();
  CUdeviceptr base;
  CU_OK(cuMemAddressReserve(&base, kPage * 512, 0, 0, 0));
  size_t before, after, total;
  CU_OK(cuMemGetInfo_v2(&before, &total));
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 512; ++i) {
      CUmemGenericAllocationHandle handle;
      CU_OK(cuMemCreate(&handle, kPage, &prop, 0));
      CU_OK(cuMemMap(base + i * kPage, kPage, 0, handle, 0));
      CU_OK(cuMemRelease(handle));
    }
    CU_OK(cuMemSetAccess(base, 512 * kPage, &access, 1));
    CU_OK(cuMemsetD8_v2(base + 511 * kPage, 1, 16));
    CU_OK(cuMemUnmap(base, 512 * kPage));
  }
  CU_OK(cuMemGetInfo_v2(&after, &total));
  EXPECT_EQ(before, after);
  CU_OK(cuMemAddressFree(base, kPage * 512));
}

TEST_F(VirtualMemoryTest, ExportAndImport) {
  constexpr uint64_t kPage = 2 << 20;
  CUmemAllocationProp prop = Prop();
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle handle, imported;
  CU_OK(cuMemCreate(&handle, kPage, &prop, 0));
  int fd = -1;
  CU_OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  CU_OK(cuMemImportFromShareableHandle(&imported, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  close(fd);
  CUdeviceptr base;
  CUmemAccessDesc access = Access();
  CU_OK(cuMemAddressReserve(&base, 2 * kPage, 0, 0, 0));
  CU_OK(cuMemMap(base, kPage, 0, handle, 0));
  CU_OK(cuMemMap(base + kPage, kPage, 0, imported, 0));
  CU_OK(cuMemSetAccess(base, 2 * kPage, &access, 1));
  CU_OK(cuMemsetD32_v2(base, 0x55, 4));
  int seen = 0;
  CU_OK(cuMemcpyDtoH_v2(&seen, base + kPage, 4));
  EXPECT_EQ(0x55, seen);
  CU_OK(cuMemUnmap(base, 2 * kPage));
  CU_OK(cuMemAddressFree(base, 2 * kPage));
  CU_OK(cuMemRelease(handle));
  CU_OK(cuMemRelease(imported));
}

}  // namespace
}  // namespace cuda_remote::softgpu
