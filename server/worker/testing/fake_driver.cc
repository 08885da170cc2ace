// SPDX-License-Identifier: Apache-2.0
// A driver library for tests of the worker, with host memory for device memory and one thread for all streams. It does
// the few calls that the worker's handlers make and knows three kernels by name:
//
//   fill(u64 address, u32 value, u32 words)   writes `value` to `words` 32-bit words
//   say()                                     prints "hello from the GPU\n"
//   nap(u32 milliseconds)                     takes that long
//
// As with a real driver, at most kQueue operations may wait; the next call blocks. Modules have one variable,
// "counter".

#include <cuda.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace {

constexpr size_t kQueue = 16;
// A copy of so many bytes to the host stays in the driver's call until a stream has been made, or fails.
constexpr size_t kStaysInCall = 12345;
constexpr int kStaysAtMostMs = 30000;
std::atomic<bool> g_stream_made{false};
constexpr size_t kTotal = size_t(1) << 30;
constexpr size_t kPage = 2 << 20;

struct Event {
  bool timing = true;
  bool recorded = false;
  bool captured = false;
  uint64_t position = 0;
};
struct Stream {
  bool capturing = false;
};
struct Function {
  std::string name;
};
struct Module {
  alignas(512) char counter[512] = {};
  std::map<std::string, Function> functions;
  CUcontext context = nullptr;
  uint64_t pad = 0, pad_bytes = 0;  // cuda_remote_pad, if the image has it
};
// As a real driver does, each context places its variables in the first room that is free.
class VariableSpace {
 public:
  VariableSpace() : begin_(next_begin_ += uint64_t{1} << 32) {}
  uint64_t Take(uint64_t bytes) {
    uint64_t at = begin_;
    for (const auto& [address, end] : taken_) {
      if (address - at >= bytes) break;
      at = end;
    }
    taken_[at] = at + (bytes + 255) / 256 * 256;
    return at;
  }
  void Give(uint64_t address) { taken_.erase(address); }

 private:
  static inline uint64_t next_begin_ = uint64_t{1} << 40;
  const uint64_t begin_;
  std::map<uint64_t, uint64_t> taken_;  // address -> end
};
struct Library {
  std::map<CUcontext, uint64_t> counters;
};
struct Physical {
  int fd;
  size_t bytes;
  int uses;  // the handle, and mappings
};
struct Context {
  int device;
};

std::mutex g_mutex;
std::condition_variable g_changed;
std::deque<std::function<void()>> g_work;
uint64_t g_queued = 0, g_done = 0;
size_t g_used = 0;
std::map<uint64_t, Physical*> g_mapped;
std::map<uint64_t, size_t> g_mapped_bytes;
std::map<const char*, size_t> g_registered;
Context g_primary{0};
// A library's variable is placed when it is first asked for in a context; so are those of pads when they are loaded.
std::map<CUcontext, VariableSpace> g_variables;
thread_local std::deque<CUcontext> t_stack;

void Loop() {
  std::unique_lock<std::mutex> lock(g_mutex);
  while (true) {
    g_changed.wait(lock, [] { return !g_work.empty(); });
    std::function<void()> work = std::move(g_work.front());
    lock.unlock();
    work();
    lock.lock();
    g_work.pop_front();
    ++g_done;
    g_changed.notify_all();
  }
}

uint64_t Queue(std::function<void()> work) {
  static std::thread* const thread = new std::thread(Loop);
  (void)thread;
  std::unique_lock<std::mutex> lock(g_mutex);
  g_changed.wait(lock, [] { return g_work.size() < kQueue; });
  g_work.push_back(std::move(work));
  g_changed.notify_all();
  return ++g_queued;
}
void Wait(uint64_t position) {
  std::unique_lock<std::mutex> lock(g_mutex);
  g_changed.wait(lock, [position] { return g_done >= position; });
}
uint64_t Now() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_queued;
}
bool Reached(uint64_t position) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_done >= position;
}
CUresult NeedContext() { return t_stack.empty() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS; }
void Unuse(Physical* physical) {
  if (--physical->uses != 0) return;
  close(physical->fd);
  g_used -= physical->bytes;
  delete physical;
}
template <typename T>
T* As(const void* handle) {
  return static_cast<T*>(const_cast<void*>(handle));
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))
extern "C" {

// As a real driver, it has memory of its own in the process; /proc/PID/maps shows this piece under a name.
EXPORT CUresult cuInit(unsigned) {
  const int fd = memfd_create("fake-driver", MFD_CLOEXEC);
  const bool made = fd >= 0 && ftruncate(fd, sysconf(_SC_PAGESIZE)) == 0 &&
                    mmap(nullptr, size_t(sysconf(_SC_PAGESIZE)), PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED;
  if (fd >= 0) close(fd);
  return made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuDriverGetVersion(int* v) { return *v = 13000, CUDA_SUCCESS; }
// One GPU, if CUDA_VISIBLE_DEVICES lets it be seen.
EXPORT CUresult cuDeviceGetCount(int* n) {
  const char* const visible = getenv("CUDA_VISIBLE_DEVICES");
  return *n = visible && strcmp(visible, "0") != 0 ? 0 : 1, CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* d, int n) { return *d = n, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetName(char* name, int n, CUdevice) {
  snprintf(name, size_t(n), "Fake GPU");
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) { return *bytes = kTotal, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute a, CUdevice) {
  if (a > 100) return CUDA_ERROR_INVALID_VALUE;
  return *value = 1024, CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) {
  return *c = reinterpret_cast<CUcontext>(&g_primary), CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice) { return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxCreate_v2(CUcontext* c, unsigned, CUdevice device) {
  *c = reinterpret_cast<CUcontext>(new Context{device});
  t_stack.push_back(*c);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxDestroy_v2(CUcontext c) {
  delete As<Context>(c);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext c) {
  if (!t_stack.empty()) t_stack.pop_back();
  if (c) t_stack.push_back(c);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* c) { return *c = t_stack.empty() ? nullptr : t_stack.back(), CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext c) { return t_stack.push_back(c), CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* c) {
  if (t_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *c = t_stack.back();
  t_stack.pop_back();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice(CUdevice* d) { return *d = 0, NeedContext(); }
EXPORT CUresult cuCtxSynchronize() {
  if (const CUresult result = NeedContext()) return result;
  Wait(Now());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }

EXPORT CUresult cuMemAddressReserve(CUdeviceptr* p, size_t bytes, size_t, CUdeviceptr hint, unsigned long long) {
  if (bytes < (64 << 20)) hint = 0;  // as the real one does with small reservations
  void* const got = mmap(reinterpret_cast<void*>(hint), bytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (hint ? MAP_FIXED_NOREPLACE : 0), -1, 0);
  if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *p = reinterpret_cast<CUdeviceptr>(got);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) {
  return munmap(reinterpret_cast<void*>(p), bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* h, size_t bytes, const CUmemAllocationProp*,
                            unsigned long long) {
  if (bytes == 0 || bytes % kPage != 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (bytes > kTotal - g_used) return CUDA_ERROR_OUT_OF_MEMORY;
  const int fd = memfd_create("fake-device", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  g_used += bytes;
  *h = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{fd, bytes, 1});
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  std::lock_guard<std::mutex> lock(g_mutex);
  Unuse(reinterpret_cast<Physical*>(h));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle h,
                         unsigned long long) {
  Physical* const physical = reinterpret_cast<Physical*>(h);
  if (p % kPage != 0 || offset + bytes > physical->bytes) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(g_mutex);
  mmap(reinterpret_cast<void*>(p), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, off_t(offset));
  ++physical->uses;
  g_mapped[p] = physical;
  g_mapped_bytes[p] = bytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) {
  std::lock_guard<std::mutex> lock(g_mutex);
  for (auto it = g_mapped.lower_bound(p); it != g_mapped.end() && it->first < p + bytes;) {
    Unuse(it->second);
    g_mapped_bytes.erase(it->first);
    it = g_mapped.erase(it);
  }
  mmap(reinterpret_cast<void*>(p), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr p, size_t bytes, const CUmemAccessDesc*, size_t) {
  return mprotect(reinterpret_cast<void*>(p), bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS
                                                                                  : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation*, CUdeviceptr) {
  return *flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(g_mutex);
  *total = kTotal;
  *free = kTotal - g_used;
  return NeedContext();
}
EXPORT CUresult cuMemHostRegister_v2(void* p, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_registered[static_cast<char*>(p)] = bytes;
  return NeedContext();
}
EXPORT CUresult cuMemHostUnregister(void* p) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_registered.erase(static_cast<char*>(p)) == 1 ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

EXPORT CUresult cuStreamCreate(CUstream* s, unsigned) {
  *s = reinterpret_cast<CUstream>(new Stream);
  g_stream_made = true;
  return NeedContext();
}
// What the worker makes for itself.
EXPORT CUresult cuStreamCreateWithPriority(CUstream* s, unsigned, int) {
  *s = reinterpret_cast<CUstream>(new Stream);
  return NeedContext();
}
EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return NeedContext();
}
EXPORT CUresult cuStreamDestroy_v2(CUstream s) {
  delete As<Stream>(s);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamSynchronize(CUstream) {
  if (const CUresult result = NeedContext()) return result;
  Wait(Now());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamQuery(CUstream) { return Reached(Now()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }
EXPORT CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* status) {
  const bool capturing = reinterpret_cast<uint64_t>(s) > 2 && As<Stream>(s)->capturing;
  *status = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamBeginCapture_v2(CUstream s, CUstreamCaptureMode) {
  if (reinterpret_cast<uint64_t>(s) <= 2) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  As<Stream>(s)->capturing = true;
  return CUDA_SUCCESS;
}
// Its graphs have nothing in them.
EXPORT CUresult cuGraphGetNodes(CUgraph, CUgraphNode*, size_t* count) {
  *count = 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphGetEdges_v2(CUgraph, CUgraphNode*, CUgraphNode*, CUgraphEdgeData*, size_t* count) {
  *count = 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamEndCapture(CUstream s, CUgraph* graph) {
  if (reinterpret_cast<uint64_t>(s) <= 2) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  As<Stream>(s)->capturing = false;
  *graph = reinterpret_cast<CUgraph>(new int);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventCreate(CUevent* e, unsigned flags) {
  Event* const event = new Event;
  event->timing = !(flags & CU_EVENT_DISABLE_TIMING);
  *e = reinterpret_cast<CUevent>(event);
  return NeedContext();
}
EXPORT CUresult cuEventDestroy_v2(CUevent e) {
  delete As<Event>(e);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventRecord(CUevent e, CUstream s) {
  As<Event>(e)->captured = reinterpret_cast<uint64_t>(s) > 2 && As<Stream>(s)->capturing;
  As<Event>(e)->recorded = true;
  As<Event>(e)->position = Now();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventQuery(CUevent e) {
  if (As<Event>(e)->captured) return CUDA_ERROR_INVALID_VALUE;
  return Reached(As<Event>(e)->position) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
EXPORT CUresult cuEventSynchronize(CUevent e) {
  Wait(As<Event>(e)->position);
  return CUDA_SUCCESS;
}
#undef cuEventElapsedTime
EXPORT CUresult cuEventElapsedTime(float* ms, CUevent a, CUevent b) {
  if (!As<Event>(a)->timing || !As<Event>(b)->timing) return CUDA_ERROR_INVALID_HANDLE;
  if (!As<Event>(a)->recorded || !As<Event>(b)->recorded) return CUDA_ERROR_INVALID_HANDLE;
  *ms = float(As<Event>(b)->position) - float(As<Event>(a)->position);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t n, CUstream) {
  // Whether the source is pageable or not, CUDA allows that it is read in the copy's turn.
  Queue([=] { memcpy(reinterpret_cast<void*>(dst), src, n); });
  return NeedContext();
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t n, CUstream) {
  if (n == kStaysInCall) {
    for (int ms = 0; !g_stream_made && ms < kStaysAtMostMs; ++ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (!g_stream_made) return CUDA_ERROR_LAUNCH_TIMEOUT;
  }
  Queue([=] { memcpy(dst, reinterpret_cast<void*>(src), n); });
  return NeedContext();
}
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream) {
  Queue([=] { memmove(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), n); });
  return NeedContext();
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, size_t n) {
  // A thread may be held up before the driver hears of its copy: whoever does not wait for that is to be seen.
  if (n < 4096) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  Wait(Queue([=] { memcpy(reinterpret_cast<void*>(dst), src, n); }));
  return NeedContext();
}
EXPORT CUresult cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, size_t n) {
  Wait(Queue([=] { memcpy(dst, reinterpret_cast<void*>(src), n); }));
  return NeedContext();
}
EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* c, CUstream) {
  const CUDA_MEMCPY2D copy = *c;
  Queue([copy] {
    const char* from = copy.srcMemoryType == CU_MEMORYTYPE_HOST ? static_cast<const char*>(copy.srcHost)
                                                                : reinterpret_cast<const char*>(copy.srcDevice);
    char* to = copy.dstMemoryType == CU_MEMORYTYPE_HOST ? static_cast<char*>(copy.dstHost)
                                                        : reinterpret_cast<char*>(copy.dstDevice);
    for (size_t y = 0; y < copy.Height; ++y) {
      memcpy(to + (copy.dstY + y) * copy.dstPitch + copy.dstXInBytes,
             from + (copy.srcY + y) * copy.srcPitch + copy.srcXInBytes, copy.WidthInBytes);
    }
  });
  return NeedContext();
}
EXPORT CUresult cuLaunchHostFunc(CUstream s, CUhostFn fn, void* data) {
  if (reinterpret_cast<uint64_t>(s) > 2 && As<Stream>(s)->capturing) return CUDA_SUCCESS;
  Queue([=] { fn(data); });
  return NeedContext();
}
EXPORT CUresult cuStreamAddCallback(CUstream s, CUstreamCallback fn, void* data, unsigned) {
  Queue([=] { fn(s, CUDA_SUCCESS, data); });
  return NeedContext();
}

// Arrays are names only.
#undef cuArrayCreate
#undef cuArray3DCreate
EXPORT CUresult cuArrayCreate_v2(CUarray* array, const CUDA_ARRAY_DESCRIPTOR* descriptor) {
  if (descriptor->Width > 131072) return CUDA_ERROR_INVALID_VALUE;
  *array = reinterpret_cast<CUarray>(new char);
  return NeedContext();
}
EXPORT CUresult cuArray3DCreate_v2(CUarray* array, const CUDA_ARRAY3D_DESCRIPTOR*) {
  *array = reinterpret_cast<CUarray>(new char);
  return NeedContext();
}
EXPORT CUresult cuArrayDestroy(CUarray array) {
  delete As<char>(array);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray* array, const CUDA_ARRAY3D_DESCRIPTOR*, unsigned) {
  *array = reinterpret_cast<CUmipmappedArray>(new char);
  return NeedContext();
}
EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
  delete As<char>(array);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule* m, const void* image) {
  if (strncmp(static_cast<const char*>(image), "bad", 3) == 0) return CUDA_ERROR_INVALID_IMAGE;
  Module* const module = new Module;
  *m = reinterpret_cast<CUmodule>(module);
  static constexpr char kPad[] = "cuda_remote_pad[";
  const char* const pad = strstr(static_cast<const char*>(image), kPad);
  if (pad != nullptr && !t_stack.empty()) {
    module->context = t_stack.back();
    module->pad_bytes = strtoull(pad + strlen(kPad), nullptr, 10);
    module->pad = g_variables[module->context].Take(module->pad_bytes);
  }
  return NeedContext();
}
EXPORT CUresult cuModuleUnload(CUmodule m) {
  if (As<Module>(m)->pad != 0) g_variables[As<Module>(m)->context].Give(As<Module>(m)->pad);
  delete As<Module>(m);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  for (const char* known : {"fill", "say", "nap"}) {
    if (strcmp(known, name) != 0) continue;
    Function& function = As<Module>(m)->functions[name];
    function.name = name;
    *f = reinterpret_cast<CUfunction>(&function);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}
EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr* p, size_t* n, CUmodule m, const char* name) {
  if (strcmp(name, "cuda_remote_pad") == 0 && As<Module>(m)->pad != 0) {
    *p = As<Module>(m)->pad;
    *n = As<Module>(m)->pad_bytes;
    return CUDA_SUCCESS;
  }
  if (strcmp(name, "counter") != 0) return CUDA_ERROR_NOT_FOUND;
  *p = reinterpret_cast<CUdeviceptr>(As<Module>(m)->counter);
  *n = 4;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLibraryLoadData(CUlibrary* l, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**,
                                  unsigned) {
  return *l = reinterpret_cast<CUlibrary>(new Library), CUDA_SUCCESS;
}
// The two private tables that cuBLASLt needs: a stream's value is what it points to, pairs lie in clusters of four.
EXPORT CUresult cuGetExportTable(const void** table, const CUuuid* id) {
  static uint64_t streams[93] = {sizeof(streams)}, layout[17] = {sizeof(layout)};
  const auto set = [](uint64_t* word, auto function) { *word = reinterpret_cast<uint64_t>(function); };
  set(
      &streams[51], +[](CUcontext, CUstream s, void** object) { return *object = s, CUDA_SUCCESS; });
  set(
      &streams[39], +[](CUcontext, void* object, uint64_t* value) { return *value = object ? 7 : 9, CUDA_SUCCESS; });
  set(
      &layout[4], +[](uint8_t** clusters, uint8_t** numbers) {
        *clusters = static_cast<uint8_t*>(malloc(512));
        *numbers = static_cast<uint8_t*>(malloc(512));
        for (int i = 0; i < 512; ++i) (*clusters)[i] = uint8_t(i / 4), (*numbers)[i] = uint8_t(i % 4);
        return CUDA_SUCCESS;
      });
  set(
      &layout[13], +[](uint8_t* clusters, uint8_t* numbers) { return free(clusters), free(numbers), CUDA_SUCCESS; });
  const unsigned char first = static_cast<unsigned char>(id->bytes[0]);
  *table = first == 0x21 ? streams : first == 0x17 ? layout : nullptr;
  return *table ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
EXPORT CUresult cuLibraryUnload(CUlibrary l) {
  for (const auto& [context, address] : As<Library>(l)->counters) g_variables[context].Give(address);
  delete As<Library>(l);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr* p, size_t* n, CUlibrary l, const char* name) {
  if (t_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (strcmp(name, "counter") != 0) return CUDA_ERROR_NOT_FOUND;
  uint64_t& address = As<Library>(l)->counters[t_stack.back()];
  if (address == 0) address = g_variables[t_stack.back()].Take(4);
  *p = address;
  *n = 4;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetName(const char** name, CUfunction f) {
  return *name = As<Function>(f)->name.c_str(), CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetParamInfo(CUfunction f, size_t i, size_t* offset, size_t* size) {
  const std::string& name = As<Function>(f)->name;
  const size_t count = name == "fill" ? 3 : name == "nap" ? 1 : 0;
  if (i >= count) return CUDA_ERROR_INVALID_VALUE;
  *size = name == "fill" && i == 0 ? 8 : 4;
  *offset = i == 0 ? 0 : 4 + 4 * i;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute a, CUfunction) {
  if (a > CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_ERROR_INVALID_VALUE;
  return *value = 1024, CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned grid, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               CUstream, void**, void** extra) {
  if (grid == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::string name = As<Function>(f)->name;
  const std::string params =
      extra ? std::string(static_cast<char*>(extra[1]), *static_cast<size_t*>(extra[3])) : std::string();
  Queue([name, params] {
    struct Fill {
      uint64_t address;
      uint32_t value, words;
    } fill;
    if (name == "fill" && params.size() == sizeof fill) {
      memcpy(&fill, params.data(), sizeof fill);
      for (uint32_t i = 0; i < fill.words; ++i) reinterpret_cast<uint32_t*>(fill.address)[i] = fill.value;
    } else if (name == "say") {
      printf("hello from the GPU\n");
    } else if (name == "nap" && params.size() == 4) {
      uint32_t ms;
      memcpy(&ms, params.data(), 4);
      std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    }
  });
  return NeedContext();
}

}  // extern "C"
