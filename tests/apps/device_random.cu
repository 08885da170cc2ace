// SPDX-License-Identifier: Apache-2.0
// What lives on the device, destroyed at random while earlier work of any of three contexts still uses it, and a part
// of it while a stream is captured: memory, memory of pools, arrays, textures, surfaces, events, streams, modules,
// pools. Another object of the same kind follows at once and has other contents. The work must have seen the first
// one's contents, and must not change the second one's. Each of the --steps steps is --size operations.
//
// docs/driver-notes.md ("Destroying what is in use") has what CUDA documents for each of them.
//
// CR_TEST_SEED=N chooses the operations (1 by default). A failure names the seed and the operation.
// CR_TEST_WITHOUT=NAME,... leaves kinds of operations out (their names are those of the functions below): a driver that
// crashes in one of them natively can still be compared in the others.
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/apps/support/driver.h"

namespace {

constexpr int kContexts = 3;
constexpr size_t kMostBytes = 1 << 20;
constexpr unsigned kKernelBytes = 2048;  // what a kernel looks at: the software GPU interprets it
constexpr size_t kMostPieces = 24;
constexpr size_t kMostSlots = 10;  // with work that nobody has waited for, in one stream

unsigned g_seed = 1;
long g_operation = 0;
const char* g_what = "";

#define CHECK_BYTES(condition, what)                                              \
  do {                                                                            \
    if (!(condition)) {                                                           \
      fprintf(stderr, "seed %u, operation %ld: %s\n", g_seed, g_operation, what); \
      app::Fail(__FILE__, __LINE__, #condition, "not true");                      \
    }                                                                             \
  } while (0)

// out[i] = bonus * (i + 1), with a variable of its own.
const char kGuest[] = R"(
.version 7.0
.target sm_52
.address_size 64
.visible .global .align 4 .u32 bonus = BONUS;
.visible .entry visit(.param .u64 p_out)
{
  .reg .b32 %r<6>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [p_out];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, %tid.x;
  add.u32 %r2, %r1, 1;
  ld.global.u32 %r3, [bonus];
  mul.lo.u32 %r4, %r2, %r3;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd2, %rd3;
  st.global.u32 [%rd4], %r4;
  ret;
}
)";
constexpr unsigned kGuestWords = 64;

using Bytes = std::vector<unsigned char>;

__global__ void Advance(unsigned char* bytes, unsigned count, unsigned salt) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) bytes[i] = (unsigned char)(bytes[i] * 5 + salt + i);
}

void AdvanceModel(unsigned char* bytes, unsigned count, unsigned salt) {
  for (unsigned i = 0; i < count; ++i) bytes[i] = (unsigned char)(bytes[i] * 5 + salt + i);
}

__global__ void ReadTexture(cudaTextureObject_t texture, unsigned char* out, unsigned count, bool linear) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    out[i] = linear ? tex1Dfetch<unsigned char>(texture, int(i)) : tex2D<unsigned char>(texture, float(i), 0.0f);
  }
}

__global__ void WriteSurface(cudaSurfaceObject_t surface, unsigned count, unsigned salt) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    surf2Dwrite((unsigned char)(salt + 3 * i), surface, int(i), 0);
  }
}

// Pinned memory that a stream's work reads or writes.
struct Slot {
  long operation = g_operation;  // that uses it
  const char* what = g_what;
  unsigned char* memory = nullptr;
  Bytes expected;  // once the stream is done; empty: a source
};

struct Lane {
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  std::vector<std::unique_ptr<Slot>> slots;
};

struct Piece {
  CUdeviceptr memory = 0;
  Bytes model;
  int context = 0;
};

class Random {
 public:
  Random() : numbers_(g_seed) {
    CU_CHECK(cuInit(0));
    CU_CHECK(cuDevicePrimaryCtxRetain(&contexts_[0], 0));
    for (int i = 1; i < kContexts; ++i) {
      CU_CHECK(cuCtxCreate(&contexts_[i], nullptr, 0, 0));
    }
    for (int i = 0; i < kContexts; ++i) {
      CU_CHECK(cuCtxSetCurrent(contexts_[i]));
      // One of them is a blocking stream: then the legacy stream cannot be looked at while it is captured.
      CU_CHECK(cuStreamCreate(&captured_[i], i == 0 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING));
      CU_CHECK(cuStreamCreate(&filling_[i], CU_STREAM_NON_BLOCKING));
      lanes_[i].context = contexts_[i];
      CU_CHECK(cuStreamCreate(&lanes_[i].stream, CU_STREAM_NON_BLOCKING));
      lanes_[kContexts + i].context = contexts_[i];  // the legacy stream
    }
    CU_CHECK(cuMemHostAlloc(reinterpret_cast<void**>(&staging_), kMostBytes, CU_MEMHOSTALLOC_PORTABLE));
  }

  void Operation() {
    ++g_operation;
    for (Lane& lane : lanes_) {
      if (lane.slots.size() >= kMostSlots) Settle(&lane);
    }
    static constexpr struct {
      const char* name;
      void (Random::*run)();
    } kKinds[] = {
        {"MemoryGoes", &Random::MemoryGoes},   {"MemoryGoes", &Random::MemoryGoes},
        {"MemoryGoes", &Random::MemoryGoes},   {"ArrayGoes", &Random::ArrayGoes},
        {"ArrayGoes", &Random::ArrayGoes},     {"TextureGoes", &Random::TextureGoes},
        {"EventGoes", &Random::EventGoes},     {"StreamGoes", &Random::StreamGoes},
        {"ModuleGoes", &Random::ModuleGoes},   {"PoolGoes", &Random::PoolGoes},
        {"GraphMemory", &Random::GraphMemory},
    };
    const unsigned kind = Pick(std::size(kKinds) + 1);
    if (kind < std::size(kKinds) && !IsLeftOut(kKinds[kind].name)) return (this->*kKinds[kind].run)();
    if (pieces_.size() < kMostPieces && Pick(2) == 0) {
      Keep();
    } else {
      DropOne();
    }
  }

  unsigned long long Digest() {
    for (Lane& lane : lanes_) Settle(&lane);
    app::Digest digest;
    for (const Piece& piece : pieces_) {
      Compare(piece);
      digest.Add(piece.model.data(), piece.model.size());
    }
    digest.Add(g_operation);
    return digest.value();
  }

 private:
  bool IsLeftOut(const char* kind) const { return left_out_.find("," + std::string(kind) + ",") != std::string::npos; }
  unsigned Pick(size_t most) { return unsigned(numbers_() % most); }
  size_t SomeBytes() { return Pick(4) == 0 ? 1 + Pick(kMostBytes) : 1 + Pick(size_t{64} << Pick(11)); }
  Bytes SomeContents(size_t bytes) {
    Bytes contents(bytes);
    const unsigned salt = unsigned(numbers_());
    for (size_t i = 0; i < bytes; ++i) contents[i] = (unsigned char)(salt + (salt >> 8) * i + i / 251);
    return contents;
  }
  void Enter(int context) { CU_CHECK(cuCtxSetCurrent(contexts_[context])); }

  // --- Streams with work that nobody has waited for ---

  // The legacy stream is not used while its context's blocking stream is captured.
  Lane* AnyLane(bool capturing = false) { return &lanes_[Pick(capturing ? kContexts : 2 * kContexts)]; }

  Slot* NewSlot(Lane* lane, size_t bytes) {
    auto slot = std::make_unique<Slot>();
    CU_CHECK(cuMemHostAlloc(reinterpret_cast<void**>(&slot->memory), bytes,
                            CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    memset(slot->memory, 0xee, bytes);
    lane->slots.push_back(std::move(slot));
    return lane->slots.back().get();
  }

  void Settle(Lane* lane) {
    CU_CHECK(cuCtxSetCurrent(lane->context));
    CU_CHECK(cuStreamSynchronize(lane->stream));
    for (const auto& slot : lane->slots) {
      if (memcmp(slot->memory, slot->expected.data(), slot->expected.size()) != 0) {
        fprintf(stderr, "work of operation %ld, %s: ", slot->operation, slot->what);
        CHECK_BYTES(false, "it saw other contents than those of what it was given");
      }
      CU_CHECK(cuMemFreeHost(slot->memory));
    }
    lane->slots.clear();
  }

  // --- Captures ---

  // In two thirds of the cases, something is destroyed while a stream of any context is captured.
  void BeginCapture(int context = -1) {
    capture_ = context >= 0 ? context : int(Pick(kContexts + 2));
    if (capture_ >= kContexts) return;
    Enter(capture_);
    CU_CHECK(cuStreamBeginCapture(captured_[capture_], CU_STREAM_CAPTURE_MODE_RELAXED));
  }
  void EndCapture() {
    if (capture_ >= kContexts) return;
    CUgraph graph = nullptr;
    Enter(capture_);
    CU_CHECK(cuStreamEndCapture(captured_[capture_], &graph));
    CU_CHECK(cuGraphDestroy(graph));
    capture_ = kContexts;
  }

  // --- Memory ---

  // Through a stream that has nothing else to do, so that no other work is waited for.
  void Fill(int context, CUdeviceptr memory, const Bytes& contents) {
    Enter(context);
    memcpy(staging_, contents.data(), contents.size());
    CU_CHECK(cuMemcpyHtoDAsync(memory, staging_, contents.size(), filling_[context]));
    CU_CHECK(cuStreamSynchronize(filling_[context]));
  }

  void Compare(const Piece& piece) {
    Enter(piece.context);
    CU_CHECK(cuMemcpyDtoHAsync(staging_, piece.memory, piece.model.size(), filling_[piece.context]));
    CU_CHECK(cuStreamSynchronize(filling_[piece.context]));
    CHECK_BYTES(memcmp(staging_, piece.model.data(), piece.model.size()) == 0, "device memory differs");
  }

  Piece Allocate(int context, size_t bytes, bool of_pool) {
    Piece piece;
    piece.context = context;
    piece.model = SomeContents(bytes);
    Enter(context);
    if (of_pool) {
      CU_CHECK(cuMemAllocAsync(&piece.memory, bytes, filling_[context]));
    } else {
      CU_CHECK(cuMemAlloc(&piece.memory, bytes));
    }
    Fill(context, piece.memory, piece.model);
    return piece;
  }

  // Work in `lane` that reads the memory of `owner` and then writes it.
  void Use(Lane* lane, int owner, CUdeviceptr memory, const Bytes& contents) {
    Slot* const read = NewSlot(lane, contents.size());
    Slot* const write = NewSlot(lane, contents.size());
    CU_CHECK(cuCtxSetCurrent(lane->context));
    const unsigned count = unsigned(std::min<size_t>(contents.size(), kKernelBytes));
    read->expected = contents;
    // Copies reach the memory of other contexts; whether kernels do, CUDA leaves open.
    if (lane->context == contexts_[owner] && Pick(2) == 0) {
      Advance<<<1, 64, 0, cudaStream_t(lane->stream)>>>(reinterpret_cast<unsigned char*>(memory), count,
                                                        unsigned(g_operation));
      LAUNCH_CHECK();
      AdvanceModel(read->expected.data(), count, unsigned(g_operation));
    }
    CU_CHECK(cuMemcpyDtoHAsync(read->memory, memory, contents.size(), lane->stream));
    CU_CHECK(cuMemcpyHtoDAsync(memory, write->memory, contents.size(), lane->stream));
  }

  void MemoryGoes() {
    g_what = "MemoryGoes";
    const int context = int(Pick(kContexts));
    const bool of_pool = Pick(2) == 0;
    Piece first = Allocate(context, SomeBytes(), of_pool);
    Lane* const lane = AnyLane();
    Use(lane, context, first.memory, first.model);
    BeginCapture();
    Piece second;
    if (of_pool) {
      // In the order of the stream that uses it. The stream cannot be the legacy one if that cannot be used now.
      if (capture_ == 0 && lane == &lanes_[kContexts]) EndCapture();
      CU_CHECK(cuCtxSetCurrent(lane->context));
      CU_CHECK(cuMemFreeAsync(first.memory, lane->stream));
    } else {
      // In its own context, or in another one.
      Enter(Pick(2) == 0 ? context : int(Pick(kContexts)));
      CU_CHECK(cuMemFree(first.memory));
    }
    second = Allocate(context, first.model.size(), of_pool);
    EndCapture();
    if (Pick(2) == 0) Settle(lane);
    Compare(second);
    Free(second);
  }

  void Free(const Piece& piece) {
    Enter(piece.context);
    CU_CHECK(cuMemFree(piece.memory));
  }

  void Keep() { pieces_.push_back(Allocate(int(Pick(kContexts)), SomeBytes() / 8 + 1, Pick(2) == 0)); }
  void DropOne() {
    if (pieces_.empty()) return;
    std::swap(pieces_[Pick(pieces_.size())], pieces_.back());
    Compare(pieces_.back());
    Free(pieces_.back());
    pieces_.pop_back();
  }

  // The pool is gone before its memory is.
  void PoolGoes() {
    g_what = "PoolGoes";
    const int context = int(Pick(kContexts));
    Enter(context);
    CUmemPoolProps props = {};
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemoryPool pool;
    CU_CHECK(cuMemPoolCreate(&pool, &props));
    const Bytes contents = SomeContents(SomeBytes());
    CUdeviceptr memory;
    CU_CHECK(cuMemAllocFromPoolAsync(&memory, contents.size(), pool, filling_[context]));
    Fill(context, memory, contents);
    Lane* const lane = AnyLane(true);
    Use(lane, context, memory, contents);
    BeginCapture();
    Enter(context);
    CU_CHECK(cuMemPoolDestroy(pool));
    CU_CHECK(cuCtxSetCurrent(lane->context));
    CU_CHECK(cuMemFreeAsync(memory, lane->stream));
    const Piece second = Allocate(context, contents.size(), true);
    EndCapture();
    Compare(second);
    Free(second);
  }

  // A graph that allocates and frees; its memory is used by the work that the graph does, in another context's stream.
  void GraphMemory() {
    g_what = "GraphMemory";
    const int context = int(Pick(kContexts));
    Lane* const lane = &lanes_[context];
    const Bytes contents = SomeContents(1 + Pick(kKernelBytes));
    Slot* const source = NewSlot(lane, contents.size());
    Slot* const target = NewSlot(lane, contents.size());
    memcpy(source->memory, contents.data(), contents.size());
    target->expected = contents;
    Enter(context);
    CUdeviceptr memory;
    CUgraph graph;
    CUgraphExec exec;
    CUstream stream = captured_[context];
    CU_CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    CU_CHECK(cuMemAllocAsync(&memory, contents.size(), stream));
    CU_CHECK(cuMemcpyHtoDAsync(memory, source->memory, contents.size(), stream));
    CU_CHECK(cuMemcpyDtoHAsync(target->memory, memory, contents.size(), stream));
    CU_CHECK(cuMemFreeAsync(memory, stream));
    CU_CHECK(cuStreamEndCapture(stream, &graph));
    CU_CHECK(cuGraphInstantiate(&exec, graph, 0));
    CU_CHECK(cuGraphLaunch(exec, lane->stream));
    // An executable graph may be destroyed while it runs. Whoever waits for its end to free the memory must not disturb
    // a capture that begins after that.
    const bool before = Pick(2) == 0;
    if (!before) BeginCapture();
    Enter(context);
    CU_CHECK(cuGraphExecDestroy(exec));
    CU_CHECK(cuGraphDestroy(graph));
    if (before) BeginCapture(context);
    const Piece second = Allocate(context, contents.size(), Pick(2) == 0);
    EndCapture();
    Settle(lane);
    Compare(second);
    Free(second);
  }

  // --- Arrays, textures, surfaces ---

  static constexpr size_t kRows = 4;

  CUarray NewArray(int context, const Bytes& contents) {
    Enter(context);
    CUDA_ARRAY3D_DESCRIPTOR facts = {};
    facts.Width = contents.size() / kRows;
    facts.Height = kRows;
    facts.Format = CU_AD_FORMAT_UNSIGNED_INT8;
    facts.NumChannels = 1;
    facts.Flags = CUDA_ARRAY3D_SURFACE_LDST;
    CUarray array;
    CU_CHECK(cuArray3DCreate(&array, &facts));
    memcpy(staging_, contents.data(), contents.size());
    CopyRows(array, staging_, contents.size(), true, filling_[context]);
    CU_CHECK(cuStreamSynchronize(filling_[context]));
    return array;
  }

  static void CopyRows(CUarray array, unsigned char* host, size_t bytes, bool in, CUstream stream) {
    CUDA_MEMCPY2D copy = {};
    copy.WidthInBytes = bytes / kRows;
    copy.Height = kRows;
    copy.srcMemoryType = in ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_ARRAY;
    copy.dstMemoryType = in ? CU_MEMORYTYPE_ARRAY : CU_MEMORYTYPE_HOST;
    copy.srcArray = copy.dstArray = array;
    copy.srcHost = copy.dstHost = host;
    copy.srcPitch = copy.dstPitch = copy.WidthInBytes;
    CU_CHECK(cuMemcpy2DAsync(&copy, stream));
  }

  void CheckArray(int context, CUarray array, const Bytes& contents) {
    Enter(context);
    CopyRows(array, staging_, contents.size(), false, filling_[context]);
    CU_CHECK(cuStreamSynchronize(filling_[context]));
    CHECK_BYTES(memcmp(staging_, contents.data(), contents.size()) == 0, "an array differs");
  }

  // Used in its own context. Written by a copy, or through a surface object, which goes before the array does.
  void ArrayGoes() {
    g_what = "ArrayGoes";
    const int context = int(Pick(kContexts));
    const size_t bytes = kRows * (1 + Pick(kMostBytes / kRows / 4));
    const Bytes contents = SomeContents(bytes);
    const CUarray array = NewArray(context, contents);
    const bool through_surface = Pick(3) == 0;
    Lane* const lane = &lanes_[through_surface || Pick(2) == 0 ? context : kContexts + context];
    Slot* const read = NewSlot(lane, bytes);
    Slot* const write = NewSlot(lane, bytes);
    read->expected = contents;
    CU_CHECK(cuCtxSetCurrent(lane->context));
    CUsurfObject surface = 0;
    CopyRows(array, read->memory, bytes, false, lane->stream);
    if (through_surface) {
      CUDA_RESOURCE_DESC resource = {};
      resource.resType = CU_RESOURCE_TYPE_ARRAY;
      resource.res.array.hArray = array;
      CU_CHECK(cuSurfObjectCreate(&surface, &resource));
      const unsigned count = unsigned(std::min<size_t>(bytes / kRows, kKernelBytes));
      WriteSurface<<<1, 64, 0, cudaStream_t(lane->stream)>>>(surface, count, unsigned(g_operation));
      LAUNCH_CHECK();
    } else {
      CopyRows(array, write->memory, bytes, true, lane->stream);
    }
    BeginCapture();
    Enter(context);
    if (surface) CU_CHECK(cuSurfObjectDestroy(surface));
    CU_CHECK(cuArrayDestroy(array));
    const Bytes later = SomeContents(bytes);
    const CUarray second = NewArray(context, later);
    EndCapture();
    if (Pick(2) == 0) Settle(lane);
    CheckArray(context, second, later);
    CU_CHECK(cuArrayDestroy(second));
  }

  // A texture object goes, with what it shows, and another one follows, perhaps with the same number.
  void TextureGoes() {
    g_what = "TextureGoes";
    const int context = int(Pick(kContexts));
    Lane* const lane = &lanes_[context];
    const bool linear = Pick(2) == 0;
    const unsigned count = 256 + Pick(kKernelBytes - 256);
    Shown first = Show(context, count, linear);
    const auto use = [&](const Shown& shown) {
      Slot* const slot = NewSlot(lane, count);
      slot->expected.assign(shown.contents.begin(), shown.contents.begin() + std::ptrdiff_t(count));
      Enter(context);
      ReadTexture<<<1, 64, 0, cudaStream_t(lane->stream)>>>(cudaTextureObject_t(shown.texture), slot->memory, count,
                                                            linear);
      LAUNCH_CHECK();
    };
    use(first);
    BeginCapture();
    Unshow(context, first);
    Shown second = Show(context, count, linear);
    EndCapture();
    use(second);
    Settle(lane);
    Unshow(context, second);
  }

  struct Shown {
    CUtexObject texture = 0;
    CUdeviceptr memory = 0;
    CUarray array = nullptr;
    Bytes contents;
  };
  Shown Show(int context, unsigned count, bool linear) {
    Shown shown;
    CUDA_RESOURCE_DESC resource = {};
    CUDA_TEXTURE_DESC how = {};
    how.flags = CU_TRSF_READ_AS_INTEGER;
    if (linear) {
      const Piece piece = Allocate(context, count, false);
      shown.memory = piece.memory;
      shown.contents = piece.model;
      resource.resType = CU_RESOURCE_TYPE_LINEAR;
      resource.res.linear.devPtr = shown.memory;
      resource.res.linear.format = CU_AD_FORMAT_UNSIGNED_INT8;
      resource.res.linear.numChannels = 1;
      resource.res.linear.sizeInBytes = count;
    } else {
      shown.contents = SomeContents(kRows * count);
      shown.array = NewArray(context, shown.contents);
      resource.resType = CU_RESOURCE_TYPE_ARRAY;
      resource.res.array.hArray = shown.array;
    }
    CU_CHECK(cuTexObjectCreate(&shown.texture, &resource, &how, nullptr));
    return shown;
  }
  void Unshow(int context, const Shown& shown) {
    Enter(context);
    CU_CHECK(cuTexObjectDestroy(shown.texture));
    if (shown.array) {
      CU_CHECK(cuArrayDestroy(shown.array));
    } else {
      CU_CHECK(cuMemFree(shown.memory));
    }
  }

  // --- Events, streams, modules ---

  // A stream waits for an event that is gone by the time that it happens.
  void EventGoes() {
    g_what = "EventGoes";
    const int context = int(Pick(kContexts));
    Lane* const lane = &lanes_[context];
    Lane* const other = &lanes_[Pick(kContexts)];
    const Piece piece = Allocate(context, 1 + Pick(kKernelBytes), false);
    Slot* const slot = NewSlot(other, piece.model.size());
    Slot* const again = NewSlot(lane, piece.model.size());
    slot->expected = piece.model;
    AdvanceModel(slot->expected.data(), unsigned(piece.model.size()), unsigned(g_operation));
    again->expected = slot->expected;
    CUevent event, later;
    Enter(context);
    Advance<<<1, 64, 0, cudaStream_t(lane->stream)>>>(reinterpret_cast<unsigned char*>(piece.memory),
                                                      unsigned(piece.model.size()), unsigned(g_operation));
    LAUNCH_CHECK();
    CU_CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CU_CHECK(cuEventRecord(event, lane->stream));
    BeginCapture();
    CU_CHECK(cuCtxSetCurrent(other->context));
    CU_CHECK(cuStreamWaitEvent(other->stream, event, 0));
    CU_CHECK(cuEventDestroy(event));
    // Another event, perhaps in its place, that has nothing to wait for.
    Enter(context);
    CU_CHECK(cuEventCreate(&later, CU_EVENT_DISABLE_TIMING));
    CU_CHECK(cuEventRecord(later, filling_[context]));
    EndCapture();
    CU_CHECK(cuCtxSetCurrent(other->context));
    CU_CHECK(cuMemcpyDtoHAsync(slot->memory, piece.memory, piece.model.size(), other->stream));
    Enter(context);
    CU_CHECK(cuMemcpyDtoHAsync(again->memory, piece.memory, piece.model.size(), lane->stream));
    CU_CHECK(cuEventDestroy(later));
    CU_CHECK(cuMemFree(piece.memory));
  }

  // A stream with work is destroyed; its work goes on.
  void StreamGoes() {
    g_what = "StreamGoes";
    const int context = int(Pick(kContexts));
    const Piece piece = Allocate(int(Pick(kContexts)), SomeBytes(), false);
    Lane lane;
    lane.context = contexts_[context];
    Enter(context);
    CU_CHECK(cuStreamCreate(&lane.stream, CU_STREAM_NON_BLOCKING));
    Use(&lane, piece.context, piece.memory, piece.model);
    CUevent done;
    Enter(context);
    CU_CHECK(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
    CU_CHECK(cuEventRecord(done, lane.stream));
    BeginCapture();
    Enter(context);
    CU_CHECK(cuStreamDestroy(lane.stream));
    CU_CHECK(cuStreamCreate(&lane.stream, CU_STREAM_NON_BLOCKING));  // perhaps in its place
    Free(piece);
    const Piece second = Allocate(piece.context, piece.model.size(), false);
    EndCapture();
    Enter(context);
    CU_CHECK(cuEventSynchronize(done));
    CU_CHECK(cuEventDestroy(done));
    Settle(&lane);
    CU_CHECK(cuStreamDestroy(lane.stream));
    Compare(second);
    Free(second);
  }

  // A module goes while its kernel runs, and while another context reads its variable.
  void ModuleGoes() {
    g_what = "ModuleGoes";
    const int context = int(Pick(kContexts));
    const unsigned bonus = 1 + Pick(1000000);
    const CUmodule first = UseModule(context, bonus);
    BeginCapture();
    Enter(context);
    CU_CHECK(cuModuleUnload(first));
    const CUmodule second = UseModule(context, bonus + 1);
    EndCapture();
    Settle(&lanes_[context]);
    Enter(context);
    CU_CHECK(cuModuleUnload(second));
  }

  CUmodule UseModule(int context, unsigned bonus) {
    Lane* const lane = &lanes_[context];
    Lane* const other = &lanes_[Pick(kContexts)];
    Slot* const slot = NewSlot(lane, kGuestWords * sizeof(unsigned));
    Slot* const variable = NewSlot(other, sizeof(bonus));
    Enter(context);
    std::string text = kGuest;
    text.replace(text.find("BONUS"), 5, std::to_string(bonus));
    CUmodule module;
    CUfunction visit;
    CUdeviceptr address;
    size_t bytes;
    CU_CHECK(cuModuleLoadData(&module, text.c_str()));
    CU_CHECK(cuModuleGetFunction(&visit, module, "visit"));
    CU_CHECK(cuModuleGetGlobal(&address, &bytes, module, "bonus"));
    CUdeviceptr out = reinterpret_cast<CUdeviceptr>(slot->memory);
    void* params[] = {&out};
    CU_CHECK(cuLaunchKernel(visit, 1, 1, 1, kGuestWords, 1, 1, 0, lane->stream, params, nullptr));
    std::vector<unsigned> words(kGuestWords);
    for (unsigned i = 0; i < kGuestWords; ++i) words[i] = bonus * (i + 1);
    const auto* const raw = reinterpret_cast<const unsigned char*>(words.data());
    slot->expected.assign(raw, raw + kGuestWords * sizeof(unsigned));
    CU_CHECK(cuCtxSetCurrent(other->context));
    CU_CHECK(cuMemcpyDtoHAsync(variable->memory, address, sizeof(bonus), other->stream));
    const auto* const value = reinterpret_cast<const unsigned char*>(&bonus);
    variable->expected.assign(value, value + sizeof(bonus));
    return module;
  }

  const std::string left_out_ = [] {
    const char* const kinds = getenv("CR_TEST_WITHOUT");
    return "," + std::string(kinds ? kinds : "") + ",";
  }();
  std::mt19937 numbers_;
  CUcontext contexts_[kContexts] = {};
  CUstream captured_[kContexts] = {};
  CUstream filling_[kContexts] = {};
  Lane lanes_[2 * kContexts];
  int capture_ = kContexts;
  unsigned char* staging_ = nullptr;
  std::vector<Piece> pieces_;
};

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {24, 30});
  if (const char* seed = getenv("CR_TEST_SEED")) g_seed = unsigned(strtoul(seed, nullptr, 10));
  Random random;
  for (int step = 1; step <= options.steps; ++step) {
    for (int i = 0; i < options.size; ++i) random.Operation();
    printf("step %d: %016llx\n", step, random.Digest());
    fflush(stdout);
    app::Step(step);
  }
}
