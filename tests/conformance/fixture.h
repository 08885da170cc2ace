// SPDX-License-Identifier: Apache-2.0
// What the cases of proto/gen/emit_cases.py work with: live objects of every kind, made when a case first asks for
// them, and a line of text for what a call answered, in which nothing depends on the process: objects and addresses
// have the names that the case gave them.
//
// A case runs on one thread. An object that cannot be made ends the case (NoFixture): its line then says which call
// failed.
#ifndef CUDA_REMOTE_TESTS_CONFORMANCE_FIXTURE_H_
#define CUDA_REMOTE_TESTS_CONFORMANCE_FIXTURE_H_

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cuda_remote::conformance {

constexpr size_t kHuge = size_t(1) << 60;
constexpr size_t kRegionBytes = 4096;  // of every piece of memory below

class Case;

// The generated cases of one call: variation 0 is the valid one, the others have these names.
struct CallCases {
  const char* family;
  const char* symbol;
  bool changes_context;
  void (*run)(Case& c);
  std::vector<const char*> variations;
};
extern const std::vector<const std::vector<CallCases>*> kAllCases;

// Thrown where an object cannot be made.
struct NoFixture {
  std::string call;
  CUresult result;
};

// The name of a result.
std::string NameOf(CUresult result);

class Case {
 public:
  // The devices: the one that is used, and another one (the same one, if there is no other).
  Case(CUcontext current, CUdevice device, CUdevice other, int variation);
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  // --- for the generated code
  int variation() const { return variation_; }
  bool ok() const { return result_ == CUDA_SUCCESS; }
  // The call's error may come with the next call that waits.
  void ErrorsMayComeLater() { later_ = true; }
  void Called(CUresult result);

  // --- for the program
  // Waits for the GPU; the text of what the call answered and did. False: the context is of no use any more.
  bool Finish(std::string* text);
  bool current_is_gone() const { return current_is_gone_; }

  // --- results: memory that is shown after a call that succeeded. `name` is the parameter's.
  template <class T>
  T* Out(const char* name, int n = 1) {
    T* values = static_cast<T*>(Storage(sizeof(T) * n, !std::is_class_v<T> && !std::is_union_v<T>));
    shows_.push_back([=] {
      std::string text;
      for (int i = 0; i < n; ++i) text += (i > 0 ? "," : "") + Shown(values[i]);
      return std::string(name) + "=" + text;
    });
    return values;
  }
  template <class T>
  T* InOut(const char* name, T value) {
    T* out = Out<T>(name);
    *out = value;
    return out;
  }
  // A list of the driver's own; its first element is shown.
  template <class T>
  const T** OutList(const char* name) {
    const T** list = static_cast<const T**>(Storage(sizeof(T*), false));
    shows_.push_back([=] { return std::string(name) + "=" + (*list == nullptr ? "NULL" : Shown(**list)); });
    return list;
  }
  // What differs by nature: only whether something was written is shown.
  template <class T>
  T* OutSome(const char* name) {
    T* out = static_cast<T*>(Storage(sizeof(T), true));
    shows_.push_back([=] { return std::string(name) + (Untouched(out, sizeof(T)) ? "=untouched" : "=some"); });
    return out;
  }
  template <class T>
  T* Opaque(const char* name) {
    return OutSome<T>(name);
  }
  unsigned long long* OutId(const char* name);
  CUdeviceptr* OutAddress(const char* name);
  void** OutPointer(const char* name);
  unsigned long long* OutHandle(const char* name);
  unsigned long long* OutTexture(const char* name) { return OutHandle(name); }
  int* OutDescriptor(const char* name) { return OutSome<int>(name); }
  char* Text(const char* name, int bytes);
  char* Bytes(const char* name, int bytes);
  CUtensorMap* TensorMap(const char* name);
  CUtensorMap* EncodedTensorMap(const char* name);
  void** PointerData();
  void** RangeData();
  CUDA_GRAPH_INSTANTIATE_PARAMS* InstantiateParams();

  // --- arguments in memory
  template <class T>
  T* List(std::initializer_list<T> values) {
    T* list = static_cast<T*>(Storage(sizeof(T) * values.size(), false));
    std::copy(values.begin(), values.end(), list);
    return list;
  }
  void* Word(unsigned long long value) { return List<unsigned long long>({value}); }
  CUmemLocation Here(int id = -1) const;
  CUmemLocation Nowhere() const { return {CUmemLocationType(77), {}}; }
  CUmemLocation* InLocation(int id = -1) { return List<CUmemLocation>({Here(id)}); }
  const char* Code() const;
  void* InCode() const { return const_cast<char*>(Code()); }
  size_t CodeBytes() const;
  const char* CodeFile();
  const char* ScratchFile(bool fresh = true);
  const CUuuid* TableId();
  const char* BusId();
  CUatomicOperation* AtomicOperations();
  CUjit_option* JitOptions();
  void** JitValues();
  CUpointer_attribute* PointerAttributes();
  CUmem_range_attribute* RangeAttributes();
  size_t* RangeSizes() { return List<size_t>({4, 4}); }
  CUdevResource* Resources();
  CUlaunchConfig* LaunchConfig();
  void** KernelParams(unsigned by = 3);
  CUmemcpyAttributes* CopyAttributes();
  CUDA_MEMCPY3D_BATCH_OP* CopyOperations();
  CUDA_MEMCPY2D* Copy2D(char from, char to, size_t width = 16);
  CUDA_MEMCPY3D* Copy3D(char from, char to, size_t width = 16);
  CUDA_MEMCPY3D* CopyRow();  // the only shape that an executable's node can be given
  CUDA_MEMCPY3D* WrongCopy3D(char side, const char* how);
  CUDA_MEMCPY3D_PEER* Copy3DPeer(char from, char to, size_t width = 16);
  CUmemAccessDesc* Access(int id = -1);
  CUmemPoolProps* PoolProps(bool shared = false);
  CUmemAllocationProp* PhysicalProps(int id = -1, bool shared = false);
  CUmulticastObjectProp* MulticastProps();
  CUstreamBatchMemOpParams* MemoryOperations();
  CUlaunchAttributeValue* StreamAttribute();
  CUlaunchAttributeValue* KernelNodeAttribute();
  CUDA_KERNEL_NODE_PARAMS_v1* KernelNodeParams(unsigned threads = 8);
  CUDA_KERNEL_NODE_PARAMS_v2* KernelNodeParamsNew(unsigned threads = 8);
  CUDA_MEMSET_NODE_PARAMS_v1* MemsetNodeParams(unsigned element = 1);
  CUDA_KERNEL_NODE_PARAMS_v1* WrongKernel(const char* how);
  CUDA_MEMSET_NODE_PARAMS_v1* WrongFill(const char* how);
  CUDA_MEM_ALLOC_NODE_PARAMS* WrongAllocation(const char* how);
  CUDA_HOST_NODE_PARAMS_v1* HostNodeParams();
  CUDA_BATCH_MEM_OP_NODE_PARAMS* BatchNodeParams();
  CUDA_MEM_ALLOC_NODE_PARAMS* MemAllocNodeParams(size_t bytes = 4096,
                                                 CUmemAllocationHandleType handles = CU_MEM_HANDLE_TYPE_NONE);
  CUgraphNodeParams* NodeParams(CUgraphNodeType type);
  CUDA_ARRAY_DESCRIPTOR* ArrayDescriptor(unsigned channels = 1);
  CUDA_ARRAY3D_DESCRIPTOR* ArrayDescriptor3D(unsigned channels = 1);
  CUDA_RESOURCE_DESC* Resource(char kind = 'a');
  CUDA_TEXTURE_DESC* Sampling();
  CUipcMemHandle MemHandle();
  CUipcEventHandle EventHandle();
  CUmemPoolPtrExportData* PointerExport();
  CUlogIterator* LogsIterator();

  // --- functions for the driver to call
  CUhostFn HostFunction() const;
  CUhostFn Destructor() const;  // called at some time
  CUstreamCallback StreamCallback() const;
  CUoccupancyB2DSize DynamicBytes() const;
  CUasyncCallback AsyncCallback() const;
  CUlogsCallback LogsCallback() const;
  void* Counter() { return counter_; }

  // --- memory: kRegionBytes each, of known contents; Finish shows what has changed
  CUdeviceptr Memory();
  CUdeviceptr Managed();
  char* Pinned();
  char* Pages();            // pageable
  char* RegisteredPages();  // other ones, which cuMemHostRegister knows
  CUdeviceptr Five();       // a word that is 5
  CUdeviceptr Freed();      // an address of memory that is gone
  CUdeviceptr StreamMemory();
  CUdeviceptr SharedPoolMemory();
  template <class T>
  T Given(T memory) {  // the call is to free it
    Forget(uint64_t(memory));
    return memory;
  }

  // --- objects; asked for twice, the same one (of the same index)
  CUdevice device() const { return device_; }
  CUdevice other() const { return other_; }
  CUcontext Current() const { return current_; }
  CUcontext Context();
  CUcontext Attached();
  CUcontext PeerContext();
  void Primary();
  void EnablePeer();
  CUstream Stream(int i = 0);
  CUstream CapturingStream();
  CUgraphNode CapturedNode();
  void Capturing(CUstream stream) { capturing_.push_back(stream); }
  CUevent Event(int i = 0);
  CUevent RecordedEvent(int i);
  CUevent UntimedEvent();
  CUevent SharedEvent();
  CUmodule Module();
  CUmodule TextureModule();
  CUfunction Function();
  CUfunction PreparedFunction();
  CUlibrary Library();
  CUlibrary ManagedLibrary();
  CUkernel Kernel();
  CUlinkState LinkState();
  CUlinkState FullLinkState();
  CUmemoryPool MemoryPool();
  CUmemoryPool SharedPool();
  CUmemoryPool ImportedPool();
  void* PoolDescriptor();
  CUarray Array(int i = 0);
  CUarray SurfaceArray();
  CUmipmappedArray MipmappedArray();
  CUtexref TextureReference();
  CUtexref BoundTextureReference();
  CUtexref MipmappedTextureReference();
  CUtexref LinearTextureReference();
  CUsurfref SurfaceReference();
  CUsurfref BoundSurfaceReference();
  CUtexObject TextureObject();
  CUsurfObject SurfaceObject();
  CUgraph Graph(int i = 0);
  CUgraph Chain();
  CUgraphNode ChainNode(int i);
  CUgraph Clone();
  CUgraph GraphWithUserObject();
  CUgraphNode GraphNode(int i = 0);
  CUgraphNode KernelNode(int i = 0);
  CUgraphNode MemcpyNode();
  CUgraphNode MemsetNode();
  CUgraphNode HostNode();
  CUgraphNode ChildNode();
  CUgraphNode EventRecordNode();
  CUgraphNode EventWaitNode();
  CUgraphNode BatchNode();
  CUgraphNode MemAllocNode();
  CUgraphNode MemFreeNode();
  CUdeviceptr GraphMemory();
  CUgraphExec GraphExec();
  CUgraphExec ExecWith(CUgraphNode node);
  CUgreenCtx GreenContext();
  CUdevResourceDesc DevResourceDesc();
  CUuserObject UserObject();
  size_t Granularity();
  CUmemGenericAllocationHandle PhysicalMemory();
  CUmemGenericAllocationHandle SharedPhysicalMemory();
  void* PhysicalDescriptor();
  CUdeviceptr Reservation();
  CUdeviceptr Mapped();
  CUmemGenericAllocationHandle MulticastObject();
  CUasyncCallbackHandle AsyncNotification();
  CUlogsCallbackHandle LogsRegistration();

  void DestroyContext(CUcontext context);
  void DestroyStream(CUstream stream);
  void DestroyEvent(CUevent event);
  void DestroyModule(CUmodule module);
  void DestroyFunction(CUfunction function);
  void DestroyLibrary(CUlibrary library);
  void DestroyKernel(CUkernel kernel);
  void DestroyMemoryPool(CUmemoryPool pool);
  void DestroyGraph(CUgraph graph);
  void DestroyGraphNode(CUgraphNode node);
  void DestroyGraphExec(CUgraphExec exec);
  void DestroyArray(CUarray array);
  void DestroyMipmappedArray(CUmipmappedArray array);
  void DestroyTextureReference(CUtexref reference);
  void DestroySurfaceReference(CUsurfref reference);
  void DestroyLinkState(CUlinkState state);
  void DestroyPhysicalMemory(CUmemGenericAllocationHandle memory);
  void DestroyGreenContext(CUgreenCtx green);
  void DestroyUserObject(CUuserObject object);

  // --- what a call did, where its results do not say
  void Say(const std::string& text) { said_ += " | " + text; }
  void ShowContext(CUcontext context);
  void ShowLimits();
  void ShowPrimary();
  void ShowPool();
  void ShowScratchFile();
  void RunGraph();
  void Launch(CUgraphExec exec);
  void ResetCaptureMode();
  void ResetPools();
  void MappedHere(CUdeviceptr address);

 private:
  struct Region {
    uint64_t base;
    uint64_t bytes;
    std::string name;
    std::vector<char> before;  // empty: contents are not looked at
    bool device = false;       // to be read by a copy
  };

  // What Copy2D and its kind have in common, in descriptions.cc.
  template <class Copy>
  Copy* FillCopy(Copy copy, char from, char to, size_t width);

  // Runs `make` the first time that the name is asked for; names the object.
  template <class T, class F>
  T Once(const std::string& name, F make) {
    auto found = made_.find(name);
    if (found == made_.end()) {
      const T value = make();
      found = made_.emplace(name, uint64_t(value)).first;
      if (uint64_t(value) > 0xffff) names_.emplace(uint64_t(value), name);  // not descriptors
    }
    return T(found->second);
  }
  void* Storage(size_t bytes, bool filled);
  void AddRegion(const std::string& name, uint64_t base, uint64_t bytes, bool contents, bool device);
  void Forget(uint64_t base);
  std::string Changes();
  void BindSampling(CUtexref reference);

  static bool Untouched(const void* memory, size_t bytes);
  std::string Word(const void* memory, size_t bytes) const;
  std::string Word(uint64_t value) const;
  std::string Object(uint64_t handle, const std::string& probed) const;
  std::string Address(uint64_t address) const;
  template <class T>
  std::string Shown(const T& value) const {
    if constexpr (std::is_same_v<T, const char*>) {
      return value == nullptr ? "NULL" : Untouched(&value, sizeof value) ? "untouched" : "'" + std::string(value) + "'";
    } else if constexpr (std::is_pointer_v<T>) {
      const uint64_t handle = uint64_t(value);
      const bool fresh = handle != 0 && !Untouched(&value, sizeof value) && names_.count(handle) == 0;
      return Object(handle, fresh ? Probe(value) : "");
    } else if constexpr (std::is_class_v<T> || std::is_union_v<T>) {
      return Struct(value);
    } else {
      if (Untouched(&value, sizeof value)) return "untouched";
      return std::is_floating_point_v<T> ? std::to_string(value) : Word(uint64_t(value));
    }
  }
  template <class T>
  std::string Struct(const T& value) const {
    return Word(&value, sizeof value);
  }
  std::string Struct(const CUdevResource& value) const;
  std::string Struct(const CUDA_KERNEL_NODE_PARAMS_v1& value) const;
  std::string Struct(const CUDA_KERNEL_NODE_PARAMS_v2& value) const;
  std::string Struct(const CUDA_BATCH_MEM_OP_NODE_PARAMS& value) const;
  std::string Struct(const CUDA_HOST_NODE_PARAMS_v1& value) const;

  // What a new object says about itself.
  template <class T>
  std::string Probe(T) const {
    return "";
  }
  std::string Probe(CUstream stream) const;
  std::string Probe(CUevent event) const;
  std::string Probe(CUmodule module) const;
  std::string Probe(CUlibrary library) const;
  std::string Probe(CUfunction function) const;
  std::string Probe(CUkernel kernel) const;
  std::string Probe(CUgraph graph) const;
  std::string Probe(CUgraphNode node) const;
  std::string Probe(CUgraphExec exec) const;
  std::string Probe(CUarray array) const;

  CUcontext current_;
  const CUdevice device_, other_;
  const int variation_;
  bool current_is_gone_ = false;
  bool later_ = false;
  CUresult result_ = CUDA_ERROR_UNKNOWN;
  int* const counter_ = new int(0);  // never freed: who knows when it is used last
  std::string results_, said_;
  std::map<std::string, uint64_t> made_;
  std::map<uint64_t, std::string> names_;
  std::vector<Region> regions_;
  std::vector<CUstream> capturing_;
  std::vector<std::function<std::string()>> shows_;
  std::vector<std::unique_ptr<char[]>> storage_;
};

// Makes `call`, or ends the case.
#define CONFORMANCE_MAKE(call)                                                                          \
  do {                                                                                                  \
    const CUresult made = (call);                                                                       \
    if (made != CUDA_SUCCESS) throw NoFixture{std::string(#call).substr(0, strcspn(#call, "(")), made}; \
  } while (0)

}  // namespace cuda_remote::conformance

#endif  // CUDA_REMOTE_TESTS_CONFORMANCE_FIXTURE_H_
