// SPDX-License-Identifier: Apache-2.0
// Objects and memory that the cases ask for, and their ends.
#include <sys/mman.h>

#include "tests/conformance/fixture.h"

namespace cuda_remote::conformance {

#define MAKE CONFORMANCE_MAKE

namespace {

// k adds to its words, one for each thread; n does nothing.
const char kCode[] = R"(
.version 7.0
.target sm_52
.address_size 64
.visible .global .align 4 .u32 v = 7;
.visible .entry add(.param .u64 words, .param .u32 by)
{
  .reg .b32 %r<4>;
  .reg .b64 %d<4>;
  ld.param.u64 %d1, [words];
  ld.param.u32 %r1, [by];
  mov.u32 %r2, %tid.x;
  mul.wide.u32 %d2, %r2, 4;
  add.u64 %d3, %d1, %d2;
  ld.global.u32 %r3, [%d3];
  add.u32 %r3, %r3, %r1;
  st.global.u32 [%d3], %r3;
  ret;
}
.visible .entry nothing_at_all()
{
  ret;
}
)";

const char kManagedCode[] = R"(
.version 7.0
.target sm_52
.address_size 64
.visible .global .attribute(.managed) .align 4 .u32 m = 9;
.visible .entry add()
{
  ret;
}
)";

const char kTextureCode[] = R"(
.version 7.0
.target sm_52
.address_size 64
.visible .global .texref t;
.visible .global .surfref s;
.visible .entry add()
{
  ret;
}
)";

char* Anonymous() {
  void* pages = mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return static_cast<char*>(pages);
}

}  // namespace

const char* Case::Code() const { return kCode; }
size_t Case::CodeBytes() const { return sizeof kCode; }

// ------------------------------------------------------------------------------------------------------------- memory

CUdeviceptr Case::Memory() {
  return Once<CUdeviceptr>("memory", [&] {
    CUdeviceptr p;
    MAKE(cuMemAlloc(&p, kRegionBytes));
    AddRegion("memory", p, kRegionBytes, true, true);
    return p;
  });
}

CUdeviceptr Case::Managed() {
  return Once<CUdeviceptr>("managed", [&] {
    CUdeviceptr p;
    MAKE(cuMemAllocManaged(&p, kRegionBytes, CU_MEM_ATTACH_GLOBAL));
    AddRegion("managed", p, kRegionBytes, true, false);
    return p;
  });
}

char* Case::Pinned() {
  return Once<char*>("pinned", [&] {
    void* p;
    MAKE(cuMemHostAlloc(&p, kRegionBytes, CU_MEMHOSTALLOC_DEVICEMAP));
    AddRegion("pinned", uint64_t(p), kRegionBytes, true, false);
    return static_cast<char*>(p);
  });
}

char* Case::Pages() {
  return Once<char*>("pages", [&] {
    char* p = Anonymous();
    AddRegion("pages", uint64_t(p), kRegionBytes, true, false);
    return p;
  });
}

char* Case::RegisteredPages() {
  return Once<char*>("registered", [&] {
    char* p = Anonymous();
    MAKE(cuMemHostRegister(p, kRegionBytes, CU_MEMHOSTREGISTER_DEVICEMAP));
    AddRegion("registered", uint64_t(p), kRegionBytes, true, false);
    return p;
  });
}

CUdeviceptr Case::Freed() {
  return Once<CUdeviceptr>("freed", [&] {
    CUdeviceptr p;
    MAKE(cuMemAlloc(&p, 48 << 20));  // of blocks that nothing else lies in
    MAKE(cuMemFree(p));
    return p;
  });
}

CUdeviceptr Case::Five() {
  return Once<CUdeviceptr>("five", [&] {
    CUdeviceptr p;
    MAKE(cuMemAlloc(&p, 8));
    const uint64_t five = 5;
    MAKE(cuMemcpyHtoD(p, &five, sizeof five));
    MAKE(cuStreamSynchronize(CU_STREAM_LEGACY));
    return p;
  });
}

CUdeviceptr Case::StreamMemory() {
  return Once<CUdeviceptr>("stream memory", [&] {
    CUdeviceptr p;
    MAKE(cuMemAllocAsync(&p, kRegionBytes, Stream()));
    MAKE(cuStreamSynchronize(Stream()));
    return p;
  });
}

CUdeviceptr Case::SharedPoolMemory() {
  return Once<CUdeviceptr>("pool memory", [&] {
    CUdeviceptr p;
    MAKE(cuMemAllocFromPoolAsync(&p, kRegionBytes, SharedPool(), Stream()));
    MAKE(cuStreamSynchronize(Stream()));
    return p;
  });
}

CUmemoryPool Case::MemoryPool() {
  return Once<CUmemoryPool>("pool", [&] {
    CUmemoryPool pool;
    MAKE(cuMemPoolCreate(&pool, PoolProps()));
    return pool;
  });
}

CUmemoryPool Case::SharedPool() {
  return Once<CUmemoryPool>("shared pool", [&] {
    CUmemoryPool pool;
    MAKE(cuMemPoolCreate(&pool, PoolProps(true)));
    return pool;
  });
}

void* Case::PoolDescriptor() {
  return Once<void*>("pool descriptor", [&] {
    int descriptor = -1;
    MAKE(cuMemPoolExportToShareableHandle(&descriptor, SharedPool(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return reinterpret_cast<void*>(intptr_t(descriptor));
  });
}

CUmemoryPool Case::ImportedPool() {
  return Once<CUmemoryPool>("imported pool", [&] {
    CUmemoryPool pool;
    MAKE(cuMemPoolImportFromShareableHandle(&pool, PoolDescriptor(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return pool;
  });
}

size_t Case::Granularity() {
  size_t bytes = 0;
  MAKE(cuMemGetAllocationGranularity(&bytes, PhysicalProps(), CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  return bytes;
}

CUmemGenericAllocationHandle Case::PhysicalMemory() {
  return Once<CUmemGenericAllocationHandle>("physical memory", [&] {
    CUmemGenericAllocationHandle handle;
    MAKE(cuMemCreate(&handle, Granularity(), PhysicalProps(), 0));
    return handle;
  });
}

CUmemGenericAllocationHandle Case::SharedPhysicalMemory() {
  return Once<CUmemGenericAllocationHandle>("shared physical memory", [&] {
    CUmemGenericAllocationHandle handle;
    MAKE(cuMemCreate(&handle, Granularity(), PhysicalProps(-1, true), 0));
    return handle;
  });
}

void* Case::PhysicalDescriptor() {
  return Once<void*>("physical descriptor", [&] {
    int descriptor = -1;
    MAKE(
        cuMemExportToShareableHandle(&descriptor, SharedPhysicalMemory(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return reinterpret_cast<void*>(intptr_t(descriptor));
  });
}

CUdeviceptr Case::Reservation() {
  return Once<CUdeviceptr>("reservation", [&] {
    CUdeviceptr p;
    MAKE(cuMemAddressReserve(&p, Granularity(), 0, 0, 0));
    AddRegion("reservation", p, Granularity(), false, true);
    return p;
  });
}

CUdeviceptr Case::Mapped() {
  return Once<CUdeviceptr>("mapped", [&] {
    const size_t bytes = Granularity();
    CUdeviceptr p;
    CUmemGenericAllocationHandle handle;
    MAKE(cuMemAddressReserve(&p, bytes, 0, 0, 0));
    MAKE(cuMemCreate(&handle, bytes, PhysicalProps(), 0));
    MAKE(cuMemMap(p, bytes, 0, handle, 0));
    MAKE(cuMemSetAccess(p, bytes, Access(), 1));
    AddRegion("mapped", p, bytes, false, true);
    return p;
  });
}

CUmemGenericAllocationHandle Case::MulticastObject() {
  return Once<CUmemGenericAllocationHandle>("multicast object", [&] {
    CUmemGenericAllocationHandle handle;
    MAKE(cuMulticastCreate(&handle, MulticastProps()));
    return handle;
  });
}

CUarray Case::SurfaceArray() {
  return Once<CUarray>("surface array", [&] {
    CUarray array;
    MAKE(cuArray3DCreate(&array, ArrayDescriptor3D()));
    return array;
  });
}

CUarray Case::Array(int i) {
  return Once<CUarray>("array" + std::to_string(i), [&] {
    CUarray array;
    MAKE(cuArrayCreate(&array, ArrayDescriptor()));
    std::vector<char> contents(16 * 4 * 4);
    for (size_t k = 0; k < contents.size(); ++k) contents[k] = char(k + 100 * i);
    CUDA_MEMCPY2D copy{};
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = contents.data();
    copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.dstArray = array;
    copy.WidthInBytes = 64;
    copy.Height = 4;
    MAKE(cuMemcpy2D(&copy));
    return array;
  });
}

CUmipmappedArray Case::MipmappedArray() {
  return Once<CUmipmappedArray>("mipmapped array", [&] {
    CUmipmappedArray array;
    MAKE(cuMipmappedArrayCreate(&array, ArrayDescriptor3D(), 2));
    return array;
  });
}

// --------------------------------------------------------------------------------- contexts, streams, events, green
// ones

CUcontext Case::Context() {
  return Once<CUcontext>("other context", [&] {
    CUcontext context, popped;
    MAKE(cuCtxCreate(&context, nullptr, 0, device_));
    MAKE(cuCtxPopCurrent(&popped));
    return context;
  });
}

CUcontext Case::Attached() {
  return Once<CUcontext>("attached context", [&] {
    CUcontext context;
    MAKE(cuCtxAttach(&context, 0));
    return context;
  });
}

CUcontext Case::PeerContext() {
  return Once<CUcontext>("peer context", [&] {
    CUcontext context, popped;
    MAKE(cuCtxCreate(&context, nullptr, 0, other_));
    MAKE(cuCtxPopCurrent(&popped));
    return context;
  });
}

void Case::EnablePeer() { MAKE(cuCtxEnablePeerAccess(PeerContext(), 0)); }

void Case::Primary() {
  CUcontext context;
  MAKE(cuDevicePrimaryCtxRetain(&context, device_));
  names_.emplace(uint64_t(context), "primary context");
}

CUstream Case::Stream(int i) {
  return Once<CUstream>("stream" + std::to_string(i), [&] {
    CUstream stream;
    MAKE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
  });
}

CUstream Case::CapturingStream() {
  return Once<CUstream>("capturing stream", [&] {
    Memory();
    CUstream stream;
    MAKE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    MAKE(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    capturing_.push_back(stream);
    MAKE(cuMemsetD8Async(Memory(), 0x33, 8, stream));
    CapturedNode();
    return stream;
  });
}

CUgraphNode Case::CapturedNode() {
  return Once<CUgraphNode>("captured node", [&]() -> CUgraphNode {
    if (capturing_.empty()) CapturingStream();
    CUstreamCaptureStatus status;
    const CUgraphNode* nodes = nullptr;
    size_t count = 0;
    MAKE(cuStreamGetCaptureInfo(capturing_[0], &status, nullptr, nullptr, &nodes, nullptr, &count));
    return count > 0 ? nodes[0] : nullptr;
  });
}

CUevent Case::Event(int i) {
  return Once<CUevent>("event" + std::to_string(i), [&] {
    CUevent event;
    MAKE(cuEventCreate(&event, 0));
    return event;
  });
}

CUevent Case::RecordedEvent(int i) {
  return Once<CUevent>("recorded event" + std::to_string(i), [&] {
    CUevent event;
    MAKE(cuEventCreate(&event, 0));
    MAKE(cuEventRecord(event, Stream()));
    MAKE(cuEventSynchronize(event));
    return event;
  });
}

CUevent Case::UntimedEvent() {
  return Once<CUevent>("untimed event", [&] {
    CUevent event;
    MAKE(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    MAKE(cuEventRecord(event, Stream()));
    MAKE(cuEventSynchronize(event));
    return event;
  });
}

CUevent Case::SharedEvent() {
  return Once<CUevent>("shared event", [&] {
    CUevent event;
    MAKE(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
    return event;
  });
}

CUdevResourceDesc Case::DevResourceDesc() {
  return Once<CUdevResourceDesc>("resources", [&] {
    CUdevResourceDesc described;
    MAKE(cuDevResourceGenerateDesc(&described, Resources(), 1));
    return described;
  });
}

CUgreenCtx Case::GreenContext() {
  return Once<CUgreenCtx>("green context", [&] {
    CUgreenCtx green;
    MAKE(cuGreenCtxCreate(&green, DevResourceDesc(), device_, CU_GREEN_CTX_DEFAULT_STREAM));
    return green;
  });
}

// --------------------------------------------------------------------------------------------------------------- code

CUmodule Case::Module() {
  return Once<CUmodule>("module", [&] {
    CUmodule module;
    MAKE(cuModuleLoadData(&module, kCode));
    return module;
  });
}

CUmodule Case::TextureModule() {
  return Once<CUmodule>("texture module", [&] {
    CUmodule module;
    MAKE(cuModuleLoadData(&module, kTextureCode));
    return module;
  });
}

CUfunction Case::Function() {
  return Once<CUfunction>("function", [&] {
    CUfunction function;
    MAKE(cuModuleGetFunction(&function, Module(), "add"));
    return function;
  });
}

CUfunction Case::PreparedFunction() {
  const CUfunction function = Function();
  CUdeviceptr words = Memory();
  MAKE(cuFuncSetBlockShape(function, 8, 1, 1));
  MAKE(cuParamSetSize(function, 12));
  MAKE(cuParamSetv(function, 0, &words, sizeof words));
  MAKE(cuParamSeti(function, 8, 3));
  return function;
}

CUlibrary Case::Library() {
  return Once<CUlibrary>("library", [&] {
    CUlibrary library;
    MAKE(cuLibraryLoadData(&library, kCode, nullptr, nullptr, 0, nullptr, nullptr, 0));
    return library;
  });
}

CUlibrary Case::ManagedLibrary() {
  return Once<CUlibrary>("managed library", [&] {
    CUlibrary library;
    MAKE(cuLibraryLoadData(&library, kManagedCode, nullptr, nullptr, 0, nullptr, nullptr, 0));
    return library;
  });
}

CUkernel Case::Kernel() {
  return Once<CUkernel>("kernel", [&] {
    CUkernel kernel;
    MAKE(cuLibraryGetKernel(&kernel, Library(), "add"));
    return kernel;
  });
}

CUlinkState Case::LinkState() {
  return Once<CUlinkState>("link state", [&] {
    CUlinkState state;
    MAKE(cuLinkCreate(0, nullptr, nullptr, &state));
    return state;
  });
}

CUlinkState Case::FullLinkState() {
  MAKE(cuLinkAddData(LinkState(), CU_JIT_INPUT_PTX, InCode(), sizeof kCode, "input", 0, nullptr, nullptr));
  return LinkState();
}

// ----------------------------------------------------------------------------------------------- textures and surfaces

CUtexref Case::TextureReference() {
  return Once<CUtexref>("texture reference", [&] {
    CUtexref reference;
    MAKE(cuTexRefCreate(&reference));
    return reference;
  });
}

CUtexref Case::BoundTextureReference() {
  MAKE(cuTexRefSetArray(TextureReference(), Array(), CU_TRSA_OVERRIDE_FORMAT));
  return TextureReference();
}

CUtexref Case::MipmappedTextureReference() {
  MAKE(cuTexRefSetMipmappedArray(TextureReference(), MipmappedArray(), CU_TRSA_OVERRIDE_FORMAT));
  return TextureReference();
}

CUtexref Case::LinearTextureReference() {
  size_t offset;
  MAKE(cuTexRefSetAddress(&offset, TextureReference(), Memory(), 1024));
  return TextureReference();
}

CUsurfref Case::SurfaceReference() {
  return Once<CUsurfref>("surface reference", [&] {
    CUsurfref reference;
    MAKE(cuModuleGetSurfRef(&reference, TextureModule(), "s"));
    return reference;
  });
}

CUsurfref Case::BoundSurfaceReference() {
  MAKE(cuSurfRefSetArray(SurfaceReference(), SurfaceArray(), 0));
  return SurfaceReference();
}

CUtexObject Case::TextureObject() {
  return Once<CUtexObject>("texture object", [&] {
    CUtexObject object;
    MAKE(cuTexObjectCreate(&object, Resource(), Sampling(), nullptr));
    return object;
  });
}

CUsurfObject Case::SurfaceObject() {
  return Once<CUsurfObject>("surface object", [&] {
    CUsurfObject object;
    MAKE(cuSurfObjectCreate(&object, Resource()));
    return object;
  });
}

// -------------------------------------------------------------------------------------------------------------- graphs

CUgraph Case::Graph(int i) {
  return Once<CUgraph>("graph" + std::to_string(i), [&] {
    CUgraph graph;
    MAKE(cuGraphCreate(&graph, 0));
    CUgraphNode node;
    if (i > 0) MAKE(cuGraphAddEmptyNode(&node, graph, nullptr, 0));
    return graph;
  });
}

CUgraph Case::Chain() {
  return Once<CUgraph>("chain", [&] {
    CUgraph graph;
    MAKE(cuGraphCreate(&graph, 0));
    CUgraphNode node = nullptr;
    for (int i = 0; i < 3; ++i) {
      const CUgraphNode before = node;
      MAKE(cuGraphAddEmptyNode(&node, graph, &before, i > 0 ? 1 : 0));
      const std::string name = "chain node" + std::to_string(i);
      made_[name] = uint64_t(node);
      names_.emplace(uint64_t(node), name);
    }
    return graph;
  });
}

CUgraphNode Case::ChainNode(int i) {
  Chain();
  return CUgraphNode(made_["chain node" + std::to_string(i)]);
}

CUgraph Case::Clone() {
  return Once<CUgraph>("clone", [&] {
    GraphNode();
    CUgraph clone;
    MAKE(cuGraphClone(&clone, Graph()));
    return clone;
  });
}

CUgraph Case::GraphWithUserObject() {
  MAKE(cuGraphRetainUserObject(Graph(), UserObject(), 1, 0));
  return Graph();
}

CUuserObject Case::UserObject() {
  return Once<CUuserObject>("user object", [&] {
    CUuserObject object;
    MAKE(cuUserObjectCreate(&object, counter_, Destructor(), 2, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
    return object;
  });
}

// One node of the case's graph.
#define NODE(name, call)               \
  return Once<CUgraphNode>(name, [&] { \
    CUgraphNode node;                  \
    MAKE(call);                        \
    return node;                       \
  })

CUgraphNode Case::GraphNode(int i) {
  NODE("node" + std::to_string(i), cuGraphAddEmptyNode(&node, Graph(), nullptr, 0));
}
CUgraphNode Case::KernelNode(int i) {
  const CUDA_KERNEL_NODE_PARAMS_v2* params = KernelNodeParamsNew();
  NODE("kernel node" + std::to_string(i), cuGraphAddKernelNode(&node, Graph(), nullptr, 0, params));
}
CUgraphNode Case::MemcpyNode() {
  const CUDA_MEMCPY3D* params = CopyRow();
  NODE("memcpy node", cuGraphAddMemcpyNode(&node, Graph(), nullptr, 0, params, current_));
}
CUgraphNode Case::MemsetNode() {
  const CUDA_MEMSET_NODE_PARAMS* params = MemsetNodeParams();
  NODE("memset node", cuGraphAddMemsetNode(&node, Graph(), nullptr, 0, params, current_));
}
CUgraphNode Case::HostNode() { NODE("host node", cuGraphAddHostNode(&node, Graph(), nullptr, 0, HostNodeParams())); }
CUgraphNode Case::ChildNode() { NODE("child node", cuGraphAddChildGraphNode(&node, Graph(), nullptr, 0, Graph(1))); }
CUgraphNode Case::EventRecordNode() {
  NODE("record node", cuGraphAddEventRecordNode(&node, Graph(), nullptr, 0, Event()));
}
CUgraphNode Case::EventWaitNode() { NODE("wait node", cuGraphAddEventWaitNode(&node, Graph(), nullptr, 0, Event())); }
CUgraphNode Case::BatchNode() {
  NODE("batch node", cuGraphAddBatchMemOpNode(&node, Graph(), nullptr, 0, BatchNodeParams()));
}
CUgraphNode Case::MemAllocNode() {
  NODE("allocation node", cuGraphAddMemAllocNode(&node, Graph(), nullptr, 0, MemAllocNodeParams()));
}
CUdeviceptr Case::GraphMemory() {
  CUDA_MEM_ALLOC_NODE_PARAMS params{};
  const CUgraphNode node = MemAllocNode();
  MAKE(cuGraphMemAllocNodeGetParams(node, &params));
  return params.dptr;
}
CUgraphNode Case::MemFreeNode() { NODE("free node", cuGraphAddMemFreeNode(&node, Graph(), nullptr, 0, GraphMemory())); }

CUgraphExec Case::ExecWith(CUgraphNode) {
  return Once<CUgraphExec>("exec", [&] {
    CUgraphExec exec;
    MAKE(cuGraphInstantiate(&exec, Graph(), 0));
    return exec;
  });
}
CUgraphExec Case::GraphExec() { return ExecWith(GraphNode()); }

// --------------------------------------------------------------------------------------------------------------- ends
// What the case destroys itself is what calls are to refuse; a function goes with its module.

void Case::DestroyContext(CUcontext context) {
  MAKE(cuCtxDestroy(context));
  if (context != current_) return;
  current_is_gone_ = true;
  for (Region& region : regions_) {
    if (region.device) region.before.clear();
  }
}
void Case::DestroyStream(CUstream stream) {
  MAKE(cuStreamDestroy(stream));
  capturing_.clear();
}
void Case::DestroyEvent(CUevent event) { MAKE(cuEventDestroy(event)); }
void Case::DestroyModule(CUmodule module) { MAKE(cuModuleUnload(module)); }
void Case::DestroyFunction(CUfunction) { MAKE(cuModuleUnload(Module())); }
void Case::DestroyLibrary(CUlibrary library) { MAKE(cuLibraryUnload(library)); }
void Case::DestroyKernel(CUkernel) { MAKE(cuLibraryUnload(Library())); }
void Case::DestroyMemoryPool(CUmemoryPool pool) { MAKE(cuMemPoolDestroy(pool)); }
void Case::DestroyGraph(CUgraph graph) { MAKE(cuGraphDestroy(graph)); }
void Case::DestroyGraphNode(CUgraphNode node) { MAKE(cuGraphDestroyNode(node)); }
void Case::DestroyGraphExec(CUgraphExec exec) { MAKE(cuGraphExecDestroy(exec)); }
void Case::DestroyArray(CUarray array) { MAKE(cuArrayDestroy(array)); }
void Case::DestroyMipmappedArray(CUmipmappedArray array) { MAKE(cuMipmappedArrayDestroy(array)); }
void Case::DestroyTextureReference(CUtexref reference) { MAKE(cuTexRefDestroy(reference)); }
void Case::DestroySurfaceReference(CUsurfref) { MAKE(cuModuleUnload(TextureModule())); }
void Case::DestroyLinkState(CUlinkState state) { MAKE(cuLinkDestroy(state)); }
void Case::DestroyPhysicalMemory(CUmemGenericAllocationHandle memory) { MAKE(cuMemRelease(memory)); }
void Case::DestroyGreenContext(CUgreenCtx green) { MAKE(cuGreenCtxDestroy(green)); }
void Case::DestroyUserObject(CUuserObject object) { MAKE(cuUserObjectRelease(object, 2)); }

CUasyncCallbackHandle Case::AsyncNotification() {
  return Once<CUasyncCallbackHandle>("notification", [&] {
    CUasyncCallbackHandle handle;
    MAKE(cuDeviceRegisterAsyncNotification(device_, AsyncCallback(), nullptr, &handle));
    return handle;
  });
}

CUlogsCallbackHandle Case::LogsRegistration() {
  return Once<CUlogsCallbackHandle>("registration", [&] {
    CUlogsCallbackHandle handle;
    MAKE(cuLogsRegisterCallback(LogsCallback(), nullptr, &handle));
    return handle;
  });
}

}  // namespace cuda_remote::conformance
