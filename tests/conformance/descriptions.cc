// SPDX-License-Identifier: Apache-2.0
// Arguments that are structs, lists and functions.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <string_view>

#include "tests/conformance/fixture.h"

namespace cuda_remote::conformance {

#define MAKE CONFORMANCE_MAKE

CUmemLocation Case::Here(int id) const {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = id < 0 ? device_ : id;
  return location;
}

namespace {

// An empty file that no other process has: under cr-run each is process 2 of a PID namespace, so its id makes no name.
std::string NewFile() {
  const char* folder = getenv("TMPDIR");
  std::string path = std::string(folder ? folder : "/tmp") + "/every_call-XXXXXX";
  const int fd = mkstemp(path.data());
  if (fd < 0) {
    perror(path.c_str());
    exit(1);
  }
  close(fd);
  return path;
}

}  // namespace

const char* Case::CodeFile() {
  static std::string path;
  if (path.empty()) {
    path = NewFile();
    FILE* file = fopen(path.c_str(), "w");
    fputs(Code(), file);
    fclose(file);
    atexit([] { unlink(path.c_str()); });
  }
  return path.c_str();
}

const char* Case::ScratchFile(bool fresh) {
  static std::string path;
  if (path.empty()) {
    path = NewFile();
    atexit([] { unlink(path.c_str()); });
  }
  if (fresh) unlink(path.c_str());
  return path.c_str();
}

const CUuuid* Case::TableId() {
  // What every CUDA runtime asks for.
  static const unsigned char kRuntimeTable[16] = {0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a,
                                                  0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9};
  CUuuid* id = List<CUuuid>({CUuuid{}});
  memcpy(id, kRuntimeTable, sizeof kRuntimeTable);
  return id;
}

const char* Case::BusId() {
  char* id = static_cast<char*>(Storage(64, false));
  MAKE(cuDeviceGetPCIBusId(id, 64, device_));
  return id;
}

CUatomicOperation* Case::AtomicOperations() {
  return List<CUatomicOperation>({CU_ATOMIC_OPERATION_INTEGER_ADD, CU_ATOMIC_OPERATION_CAS});
}

CUjit_option* Case::JitOptions() { return List<CUjit_option>({CU_JIT_MAX_REGISTERS, CU_JIT_OPTIMIZATION_LEVEL}); }
void** Case::JitValues() { return List<void*>({reinterpret_cast<void*>(32), reinterpret_cast<void*>(2)}); }

CUpointer_attribute* Case::PointerAttributes() {
  return List<CUpointer_attribute>(
      {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_IS_MANAGED});
}

CUmem_range_attribute* Case::RangeAttributes() {
  return List<CUmem_range_attribute>({CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION});
}

CUdevResource* Case::Resources() {
  CUdevResource* all = List<CUdevResource>({CUdevResource{}});
  MAKE(cuDeviceGetDevResource(device_, all, CU_DEV_RESOURCE_TYPE_SM));
  return all;
}

CUlaunchConfig* Case::LaunchConfig() {
  CUlaunchConfig shape{};
  shape.gridDimX = shape.gridDimY = shape.gridDimZ = 1;
  shape.blockDimX = 8;
  shape.blockDimY = shape.blockDimZ = 1;
  shape.hStream = Stream();
  return List<CUlaunchConfig>({shape});
}

void** Case::KernelParams(unsigned by) { return List<void*>({List<CUdeviceptr>({Memory()}), List<unsigned>({by})}); }

CUmemcpyAttributes* Case::CopyAttributes() {
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  return List<CUmemcpyAttributes>({attributes});
}

CUDA_MEMCPY3D_BATCH_OP* Case::CopyOperations() {
  CUDA_MEMCPY3D_BATCH_OP copy{};
  copy.src.type = copy.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
  copy.src.op.ptr.ptr = Memory();
  copy.dst.op.ptr.ptr = Memory() + 2048;
  copy.src.op.ptr.rowLength = copy.dst.op.ptr.rowLength = 64;
  copy.src.op.ptr.layerHeight = copy.dst.op.ptr.layerHeight = 4;
  copy.extent = {16, 3, 1};
  copy.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  return List<CUDA_MEMCPY3D_BATCH_OP>({copy});
}

// Copies of 3 rows of `width` bytes. The sides: (d)evice, (h)ost, (p)inned, (a)rray, (u)nified, an unknown type, NULL.
template <class Copy>
Copy* Case::FillCopy(Copy copy, char from, char to, size_t width) {
  const auto type = [](char side) {
    switch (side) {
      case 'd':
      case '0':
        return CU_MEMORYTYPE_DEVICE;
      case 'h':
      case 'p':
        return CU_MEMORYTYPE_HOST;
      case 'a':
        return CU_MEMORYTYPE_ARRAY;
      case 'u':
        return CU_MEMORYTYPE_UNIFIED;
      default:
        return CUmemorytype(77);
    }
  };
  copy.WidthInBytes = width;
  copy.Height = 3;
  copy.srcMemoryType = type(from);
  copy.dstMemoryType = type(to);
  copy.srcPitch = copy.dstPitch = 64;
  if (from == 'h') copy.srcHost = Pages();
  if (to == 'h') copy.dstHost = Pages();
  if (from == 'p') copy.srcHost = Pinned();
  if (to == 'p') copy.dstHost = Pinned();
  if (from == 'a') copy.srcArray = Array(0);
  if (to == 'a') copy.dstArray = Array(1);
  if (from == 'd' || from == 'u' || from == '?') copy.srcDevice = Memory();
  if (to == 'd' || to == 'u' || to == '?') copy.dstDevice = Memory() + 2048;
  return List<Copy>({copy});
}

CUDA_MEMCPY2D* Case::Copy2D(char from, char to, size_t width) { return FillCopy(CUDA_MEMCPY2D{}, from, to, width); }

CUDA_MEMCPY3D* Case::Copy3D(char from, char to, size_t width) {
  CUDA_MEMCPY3D copy{};
  copy.Depth = 1;
  copy.srcHeight = copy.dstHeight = 4;
  return FillCopy(copy, from, to, width);
}

CUDA_MEMCPY3D* Case::CopyRow() {
  CUDA_MEMCPY3D copy = *Copy3D('d', 'd');
  copy.Height = 1;
  return List<CUDA_MEMCPY3D>({copy});
}

// A copy of one row from and to mapped memory but for one side, the (s)ource or (d)estination, that is wrong: `how`.
CUDA_MEMCPY3D* Case::WrongCopy3D(char side, const char* how) {
  const std::string_view wrong = how;
  const bool ends = wrong.size() > 4 && wrong.substr(wrong.size() - 4) == "long";
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = copy.dstDevice = Mapped();
  copy.WidthInBytes = wrong == "mapped long" ? Granularity() + 1 : ends || wrong == "long" ? kRegionBytes + 1 : 16;
  copy.Height = copy.Depth = 1;
  CUmemorytype* const type = side == 's' ? &copy.srcMemoryType : &copy.dstMemoryType;
  CUdeviceptr* const device = side == 's' ? &copy.srcDevice : &copy.dstDevice;
  const auto host = [&](char* p) {
    *type = CU_MEMORYTYPE_HOST;
    (side == 's' ? const_cast<void*&>(copy.srcHost) : copy.dstHost) = p;
  };
  *device = Memory();
  if (wrong == "null") *device = 0;
  if (wrong == "host null") host(nullptr);
  if (wrong == "array null") *type = CU_MEMORYTYPE_ARRAY;
  if (wrong == "last") *device = Memory() + kRegionBytes - 8;
  if (wrong == "freed") *device = Freed();
  if (wrong == "pageable as device") *device = CUdeviceptr(Pages());
  if (wrong == "mapped long" || wrong == "same") *device = Mapped();
  if (wrong == "managed long") *device = Managed();
  if (wrong == "pinned long") host(Pinned());
  if (wrong == "pinned as device long") *device = CUdeviceptr(Pinned());
  if (wrong == "registered long") host(RegisteredPages());
  if (wrong == "no width") copy.WidthInBytes = 0;
  if (wrong == "no height") copy.Height = 0;
  if (wrong == "no depth") copy.Depth = 0;
  if (wrong == "narrow pitch" || wrong == "few rows") {
    copy.Height = 3;
    copy.Depth = 2;
    copy.srcPitch = copy.dstPitch = 64;
    copy.srcHeight = copy.dstHeight = 4;
    if (wrong == "narrow pitch") (side == 's' ? copy.srcPitch : copy.dstPitch) = 8;
    if (wrong == "few rows") (side == 's' ? copy.srcHeight : copy.dstHeight) = 2;
  }
  return List<CUDA_MEMCPY3D>({copy});
}

CUDA_MEMCPY3D_PEER* Case::Copy3DPeer(char from, char to, size_t width) {
  CUDA_MEMCPY3D_PEER copy{};
  copy.Depth = 1;
  copy.srcHeight = copy.dstHeight = 4;
  copy.srcContext = copy.dstContext = current_;
  return FillCopy(copy, from, to, width);
}

CUmemAccessDesc* Case::Access(int id) {
  CUmemAccessDesc access{};
  access.location = Here(id);
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return List<CUmemAccessDesc>({access});
}

CUmemPoolProps* Case::PoolProps(bool shared) {
  CUmemPoolProps properties{};
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = Here();
  if (shared) properties.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return List<CUmemPoolProps>({properties});
}

CUmemAllocationProp* Case::PhysicalProps(int id, bool shared) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = Here(id);
  if (shared) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return List<CUmemAllocationProp>({properties});
}

CUmulticastObjectProp* Case::MulticastProps() {
  CUmulticastObjectProp properties{};
  properties.numDevices = 1;
  properties.size = 2 << 20;
  return List<CUmulticastObjectProp>({properties});
}

CUstreamBatchMemOpParams* Case::MemoryOperations() {
  CUstreamBatchMemOpParams write{}, wait{};
  write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  write.writeValue.address = Memory() + 64;
  write.writeValue.value = 11;
  wait.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  wait.waitValue.address = Memory() + 64;
  wait.waitValue.value = 11;
  wait.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  return List<CUstreamBatchMemOpParams>({write, wait});
}

CUlaunchAttributeValue* Case::StreamAttribute() {
  CUlaunchAttributeValue value{};
  value.syncPolicy = CU_SYNC_POLICY_YIELD;
  return List<CUlaunchAttributeValue>({value});
}

CUlaunchAttributeValue* Case::KernelNodeAttribute() {
  CUlaunchAttributeValue value{};
  value.priority = -1;
  return List<CUlaunchAttributeValue>({value});
}

namespace {
template <class Params>
Params Shape(CUfunction function, unsigned threads, void** arguments) {
  Params params{};
  params.func = function;
  params.gridDimX = params.gridDimY = params.gridDimZ = 1;
  params.blockDimX = threads;
  params.blockDimY = params.blockDimZ = 1;
  params.kernelParams = arguments;
  return params;
}
}  // namespace

CUDA_KERNEL_NODE_PARAMS_v1* Case::KernelNodeParams(unsigned threads) {
  return List<CUDA_KERNEL_NODE_PARAMS_v1>({Shape<CUDA_KERNEL_NODE_PARAMS_v1>(Function(), threads, KernelParams(4))});
}

CUDA_KERNEL_NODE_PARAMS_v2* Case::KernelNodeParamsNew(unsigned threads) {
  return List<CUDA_KERNEL_NODE_PARAMS_v2>({Shape<CUDA_KERNEL_NODE_PARAMS_v2>(Function(), threads, KernelParams(5))});
}

CUDA_MEMSET_NODE_PARAMS_v1* Case::MemsetNodeParams(unsigned element) {
  CUDA_MEMSET_NODE_PARAMS_v1 params{};
  params.dst = Memory() + 128;
  params.value = 0x44;
  params.elementSize = element;
  params.width = 8;
  params.height = 1;
  return List<CUDA_MEMSET_NODE_PARAMS_v1>({params});
}

CUDA_KERNEL_NODE_PARAMS_v1* Case::WrongKernel(const char* how) {
  const std::string_view wrong = how;
  CUDA_KERNEL_NODE_PARAMS_v1 params = *KernelNodeParams();
  if (wrong == "no function") params.func = nullptr;
  if (wrong == "no grid") params.gridDimY = 0;
  if (wrong == "no block") params.blockDimX = 0;
  if (wrong == "wide block") params.blockDimY = 1024;
  if (wrong == "deep block") params.blockDimZ = 65;
  if (wrong == "tall grid") params.gridDimY = 65536;
  if (wrong == "much shared") params.sharedMemBytes = 1 << 30;
  return List<CUDA_KERNEL_NODE_PARAMS_v1>({params});
}

CUDA_MEMSET_NODE_PARAMS_v1* Case::WrongFill(const char* how) {
  const std::string_view wrong = how;
  CUDA_MEMSET_NODE_PARAMS_v1 params = *MemsetNodeParams(4);
  params.dst = Memory();
  if (wrong == "null") params.dst = 0;
  if (wrong == "freed") params.dst = Freed();
  if (wrong == "pageable") params.dst = CUdeviceptr(Pages());
  if (wrong == "odd") params.dst = Memory() + 2;
  if (wrong == "last") params.dst = Memory() + kRegionBytes - 8;
  if (wrong == "mapped long") params.dst = Mapped();
  if (wrong == "managed long") params.dst = Managed();
  if (wrong == "long" || wrong == "managed long") params.width = kRegionBytes / 4 + 1;
  if (wrong == "mapped long") params.width = Granularity() / 4 + 1;
  if (wrong == "no width") params.width = 0;
  if (wrong == "no height") params.height = 0;
  if (wrong == "narrow pitch" || wrong == "odd pitch" || wrong == "long rows") {
    params.height = wrong == "long rows" ? kRegionBytes / 64 + 1 : 3;
    params.pitch = wrong == "narrow pitch" ? 28 : wrong == "odd pitch" ? 34 : 64;
  }
  return List<CUDA_MEMSET_NODE_PARAMS_v1>({params});
}

CUDA_MEM_ALLOC_NODE_PARAMS* Case::WrongAllocation(const char* how) {
  const std::string_view wrong = how;
  CUDA_MEM_ALLOC_NODE_PARAMS params = *MemAllocNodeParams();
  CUmemAccessDesc* const access = List<CUmemAccessDesc>({*Access(), *Access()});
  params.accessDescs = access;
  if (wrong == "no type") params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_INVALID;
  if (wrong == "no place") params.poolProps.location.type = CU_MEM_LOCATION_TYPE_INVALID;
  if (wrong == "device 99") params.poolProps.location.id = 99;
  if (wrong == "access to read") access[0].flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
  if (wrong == "access of device 99") access[0].location.id = 99;
  if (wrong.substr(0, 6) == "access") params.accessDescCount = wrong == "access twice" ? 2 : 1;
  return List<CUDA_MEM_ALLOC_NODE_PARAMS>({params});
}

CUDA_HOST_NODE_PARAMS_v1* Case::HostNodeParams() {
  return List<CUDA_HOST_NODE_PARAMS_v1>({CUDA_HOST_NODE_PARAMS_v1{HostFunction(), counter_}});
}

CUDA_MEM_ALLOC_NODE_PARAMS* Case::MemAllocNodeParams(size_t bytes, CUmemAllocationHandleType handles) {
  CUDA_MEM_ALLOC_NODE_PARAMS params{};
  params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  params.poolProps.handleTypes = handles;
  params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  params.poolProps.location.id = device();
  params.bytesize = bytes;
  return List<CUDA_MEM_ALLOC_NODE_PARAMS>({params});
}

CUDA_BATCH_MEM_OP_NODE_PARAMS* Case::BatchNodeParams() {
  CUDA_BATCH_MEM_OP_NODE_PARAMS params{};
  params.ctx = current_;
  params.count = 1;
  params.paramArray = MemoryOperations();
  return List<CUDA_BATCH_MEM_OP_NODE_PARAMS>({params});
}

CUgraphNodeParams* Case::NodeParams(CUgraphNodeType type) {
  CUgraphNodeParams params{};
  params.type = type;
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      params.kernel = Shape<CUDA_KERNEL_NODE_PARAMS_v3>(Function(), 8, KernelParams(6));
      break;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      params.memcpy.copyCtx = current_;
      params.memcpy.copyParams = *Copy3D('d', 'd');
      break;
    case CU_GRAPH_NODE_TYPE_MEMSET:
      params.memset.dst = Memory() + 256;
      params.memset.value = 0x66;
      params.memset.elementSize = 1;
      params.memset.width = 4;
      params.memset.height = 1;
      params.memset.ctx = current_;
      break;
    case CU_GRAPH_NODE_TYPE_HOST:
      params.host.fn = HostFunction();
      params.host.userData = counter_;
      break;
    case CU_GRAPH_NODE_TYPE_GRAPH:
      params.graph.graph = Graph(1);
      break;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      params.eventWait.event = Event();
      break;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      params.eventRecord.event = Event();
      break;
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      params.memOp.ctx = current_;
      params.memOp.count = 1;
      params.memOp.paramArray = MemoryOperations();
      break;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
      const CUDA_MEM_ALLOC_NODE_PARAMS* allocation = MemAllocNodeParams();
      params.alloc.poolProps = allocation->poolProps;
      params.alloc.bytesize = allocation->bytesize;
      break;
    }
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      params.free.dptr = GraphMemory();
      break;
    default:
      break;
  }
  return List<CUgraphNodeParams>({params});
}

namespace {
template <class Descriptor>
Descriptor Floats(unsigned channels) {
  Descriptor array{};
  array.Width = 16;
  array.Height = 4;
  array.Format = CU_AD_FORMAT_FLOAT;
  array.NumChannels = channels;
  return array;
}
}  // namespace

CUDA_ARRAY_DESCRIPTOR* Case::ArrayDescriptor(unsigned channels) {
  return List<CUDA_ARRAY_DESCRIPTOR>({Floats<CUDA_ARRAY_DESCRIPTOR>(channels)});
}

CUDA_ARRAY3D_DESCRIPTOR* Case::ArrayDescriptor3D(unsigned channels) {
  auto array = Floats<CUDA_ARRAY3D_DESCRIPTOR>(channels);
  array.Flags = CUDA_ARRAY3D_SURFACE_LDST;
  return List<CUDA_ARRAY3D_DESCRIPTOR>({array});
}

// (a)rray, (l)inear, (p)itched, (m)ipmapped, no array, an unknown type.
CUDA_RESOURCE_DESC* Case::Resource(char kind) {
  CUDA_RESOURCE_DESC resource{};
  switch (kind) {
    case 'a':
    case '0':
      resource.resType = CU_RESOURCE_TYPE_ARRAY;
      if (kind == 'a') {
        resource.res.array.hArray = Once<CUarray>("surface array", [&] {
          CUarray array;
          MAKE(cuArray3DCreate(&array, ArrayDescriptor3D()));
          return array;
        });
      }
      break;
    case 'm':
      resource.resType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
      resource.res.mipmap.hMipmappedArray = MipmappedArray();
      break;
    case 'l':
      resource.resType = CU_RESOURCE_TYPE_LINEAR;
      resource.res.linear.devPtr = Memory();
      resource.res.linear.format = CU_AD_FORMAT_FLOAT;
      resource.res.linear.numChannels = 1;
      resource.res.linear.sizeInBytes = 1024;
      break;
    case 'p':
      resource.resType = CU_RESOURCE_TYPE_PITCH2D;
      resource.res.pitch2D.devPtr = Memory();
      resource.res.pitch2D.format = CU_AD_FORMAT_FLOAT;
      resource.res.pitch2D.numChannels = 1;
      resource.res.pitch2D.width = 16;
      resource.res.pitch2D.height = 4;
      resource.res.pitch2D.pitchInBytes = 512;
      break;
    default:
      resource.resType = CUresourcetype(77);
  }
  return List<CUDA_RESOURCE_DESC>({resource});
}

CUDA_TEXTURE_DESC* Case::Sampling() { return List<CUDA_TEXTURE_DESC>({CUDA_TEXTURE_DESC{}}); }

CUtensorMap* Case::EncodedTensorMap(const char* name) {
  CUtensorMap* map = TensorMap(name);
  const cuuint64_t sizes[] = {8, 8}, strides[] = {32};
  const cuuint32_t box[] = {4, 4}, steps[] = {1, 1};
  MAKE(cuTensorMapEncodeTiled(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, reinterpret_cast<void*>(Memory() + 1024), sizes,
                              strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                              CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return map;
}

CUDA_GRAPH_INSTANTIATE_PARAMS* Case::InstantiateParams() {
  CUDA_GRAPH_INSTANTIATE_PARAMS* params = Out<CUDA_GRAPH_INSTANTIATE_PARAMS>("instantiateParams");
  params->flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
  params->hUploadStream = Stream();
  return params;
}

CUipcMemHandle Case::MemHandle() {
  CUipcMemHandle handle;
  MAKE(cuIpcGetMemHandle(&handle, Memory()));
  return handle;
}

CUipcEventHandle Case::EventHandle() {
  CUipcEventHandle handle;
  MAKE(cuIpcGetEventHandle(&handle, SharedEvent()));
  return handle;
}

CUmemPoolPtrExportData* Case::PointerExport() {
  CUmemPoolPtrExportData* data = List<CUmemPoolPtrExportData>({CUmemPoolPtrExportData{}});
  MAKE(cuMemPoolExportPointer(data, SharedPoolMemory()));
  return data;
}

CUlogIterator* Case::LogsIterator() {
  CUlogIterator* iterator = List<CUlogIterator>({0});
  MAKE(cuLogsCurrent(iterator, 0));
  return iterator;
}

CUhostFn Case::HostFunction() const {
  return [](void* counter) { ++*static_cast<int*>(counter); };
}
CUhostFn Case::Destructor() const {
  return [](void*) {};
}
CUstreamCallback Case::StreamCallback() const {
  return
      [](CUstream, CUresult result, void* counter) { *static_cast<int*>(counter) += result == CUDA_SUCCESS ? 1 : 100; };
}
CUoccupancyB2DSize Case::DynamicBytes() const {
  return [](int threads) { return size_t(threads) * 4; };
}
CUasyncCallback Case::AsyncCallback() const {
  return [](CUasyncNotificationInfo*, void*, CUasyncCallbackHandle) {};
}
CUlogsCallback Case::LogsCallback() const {
  return [](void*, CUlogLevel, char*, size_t) {};
}

}  // namespace cuda_remote::conformance
