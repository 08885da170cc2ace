// SPDX-License-Identifier: Apache-2.0
// How results are shown, and what calls have done.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "tests/conformance/fixture.h"

namespace cuda_remote::conformance {

namespace {

constexpr char kFill = 0x5a;  // what results hold before the call
char Pattern(size_t i) { return char(i * 7 + 3); }

std::string Hex(uint64_t value) {
  char text[32];
  snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

std::string NameOf(CUresult result) {
  const char* name = nullptr;
  return cuGetErrorName(result, &name) == CUDA_SUCCESS && name != nullptr ? name : std::to_string(result);
}

Case::Case(CUcontext current, CUdevice device, CUdevice other, int variation)
    : current_(current), device_(device), other_(other), variation_(variation) {
  names_[uint64_t(current)] = "context";
}

void* Case::Storage(size_t bytes, bool filled) {
  // Aligned as tensor maps want it.
  storage_.emplace_back(new char[bytes + 256]);
  char* memory = reinterpret_cast<char*>((uint64_t(storage_.back().get()) + 127) & ~uint64_t{127});
  memset(memory, filled ? kFill : 0, bytes + 64);
  return memory;
}

bool Case::Untouched(const void* memory, size_t bytes) {
  const char* at = static_cast<const char*>(memory);
  return std::all_of(at, at + bytes, [](char c) { return c == kFill; });
}

void Case::AddRegion(const std::string& name, uint64_t base, uint64_t bytes, bool contents, bool device) {
  Region region{base, bytes, name, {}, device};
  if (contents) {
    region.before.resize(bytes);
    for (size_t i = 0; i < bytes; ++i) region.before[i] = Pattern(i);
    if (device) {
      CONFORMANCE_MAKE(cuMemcpyHtoD(base, region.before.data(), bytes));
      // A short copy may end after its call, and other streams do not wait for it.
      CONFORMANCE_MAKE(cuStreamSynchronize(CU_STREAM_LEGACY));
    } else {
      memcpy(reinterpret_cast<void*>(base), region.before.data(), bytes);
    }
  }
  regions_.push_back(std::move(region));
}

void Case::Forget(uint64_t base) {
  for (Region& region : regions_) {
    if (region.base == base) region.before.clear();
  }
}

// ------------------------------------------------------------------------------------------------------------- results

unsigned long long* Case::OutId(const char* name) { return OutSome<unsigned long long>(name); }

CUdeviceptr* Case::OutAddress(const char* name) {
  auto* out = static_cast<CUdeviceptr*>(Storage(sizeof(CUdeviceptr), true));
  shows_.push_back([=] { return std::string(name) + "=" + Address(*out); });
  return out;
}

void** Case::OutPointer(const char* name) {
  auto* out = static_cast<void**>(Storage(sizeof(void*), true));
  shows_.push_back([=] { return std::string(name) + "=" + Object(uint64_t(*out), ""); });
  return out;
}

unsigned long long* Case::OutHandle(const char* name) {
  auto* out = static_cast<unsigned long long*>(Storage(sizeof(unsigned long long), true));
  shows_.push_back([=] { return std::string(name) + "=" + Object(*out, ""); });
  return out;
}

char* Case::Text(const char* name, int bytes) {
  char* out = static_cast<char*>(Storage(bytes, true));
  shows_.push_back([=] {
    // With the bytes behind it, which the call must leave alone.
    const char* end = static_cast<const char*>(memchr(out, 0, bytes));
    const size_t length = end == nullptr ? bytes : end - out;
    return std::string(name) + "='" + (Untouched(out, 1) ? "" : std::string(out, length)) + "'" +
           (end == nullptr ? " without an end" : "");
  });
  return out;
}

char* Case::Bytes(const char* name, int bytes) {
  char* out = static_cast<char*>(Storage(bytes, true));
  shows_.push_back([=] { return std::string(name) + "=" + Word(out, bytes); });
  return out;
}

CUtensorMap* Case::TensorMap(const char* name) { return Out<CUtensorMap>(name); }

void** Case::PointerData() { return List<void*>({Bytes("data0", 8), Bytes("data1", 8), Bytes("data2", 8)}); }
void** Case::RangeData() { return List<void*>({Bytes("data0", 4), Bytes("data1", 4)}); }

// Memory as words, each as Word(uint64_t) shows it; repeated ones once.
std::string Case::Word(const void* memory, size_t bytes) const {
  std::string text;
  const char* at = static_cast<const char*>(memory);
  std::string last;
  int times = 0;
  const auto flush = [&] {
    if (times > 0) text += (text.empty() ? "" : ",") + last + (times > 1 ? "*" + std::to_string(times) : "");
    times = 0;
  };
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t value = 0;
    const size_t n = std::min<size_t>(8, bytes - i);
    memcpy(&value, at + i, n);
    std::string word;
    if (Untouched(at + i, n)) {
      word = "untouched";
    } else if (Untouched(at + i + 4, n > 4 ? n - 4 : 0) && n > 4) {
      uint32_t half;
      memcpy(&half, at + i, 4);
      word = Word(uint64_t(half)) + ":4";
    } else {
      word = Word(value);
    }
    if (word != last) flush();
    last = word;
    ++times;
  }
  flush();
  return "{" + text + "}";
}

// A number, or the name of the object or the memory that it stands for.
std::string Case::Word(uint64_t value) const {
  const auto found = names_.find(value);
  if (found != names_.end()) return found->second;
  for (const Region& region : regions_) {
    if (value - region.base < region.bytes) return region.name + "+" + std::to_string(value - region.base);
  }
  return value < 1000000 ? std::to_string(value) : Hex(value);
}

std::string Case::Object(uint64_t handle, const std::string& probed) const {
  if (handle == 0) return "NULL";
  if (Untouched(&handle, sizeof handle)) return "untouched";
  const auto found = names_.find(handle);
  if (found != names_.end()) return found->second;
  for (const Region& region : regions_) {
    if (handle - region.base < region.bytes) return region.name + "+" + std::to_string(handle - region.base);
  }
  return "new" + (probed.empty() ? "" : "(" + probed + ")");
}

// New memory: of what type, and whether it can be read.
std::string Case::Address(uint64_t address) const {
  std::string text = Object(address, "");
  if (text != "new") return text;
  CUmemorytype type{};
  if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != CUDA_SUCCESS)
    return "new, not to be read";
  char byte;
  return "new memory of type " + std::to_string(type) + ", read: " + NameOf(cuMemcpyDtoH(&byte, address, 1)) +
         (address % 256 == 0 ? ", aligned" : "");
}

std::string Case::Struct(const CUdevResource& value) const {
  return "{" + std::to_string(value.type) + "," + std::to_string(value.sm.smCount) + "}";
}

namespace {
template <class Params>
std::string Shape(const Params& p) {
  std::string text = std::to_string(p.gridDimX) + "," + std::to_string(p.gridDimY) + "," + std::to_string(p.gridDimZ) +
                     ";" + std::to_string(p.blockDimX) + "," + std::to_string(p.blockDimY) + "," +
                     std::to_string(p.blockDimZ) + ";" + std::to_string(p.sharedMemBytes);
  if (p.kernelParams == nullptr) return text + ";no parameters";
  unsigned by;
  memcpy(&by, p.kernelParams[1], sizeof by);
  return text + ";by " + std::to_string(by);
}
}  // namespace

std::string Case::Struct(const CUDA_KERNEL_NODE_PARAMS_v1& p) const {
  return "{" + Word(uint64_t(p.func)) + ";" + Shape(p) + "}";
}
std::string Case::Struct(const CUDA_KERNEL_NODE_PARAMS_v2& p) const {
  return "{" + Word(uint64_t(p.func)) + ";" + Shape(p) + ";" + Word(uint64_t(p.kern)) + ";" + Word(uint64_t(p.ctx)) +
         "}";
}
std::string Case::Struct(const CUDA_BATCH_MEM_OP_NODE_PARAMS& p) const {
  std::string text = "{" + Word(uint64_t(p.ctx)) + ";" + std::to_string(p.count) + ";" + std::to_string(p.flags);
  for (unsigned i = 0; i < p.count && i < 4; ++i) text += ";" + std::to_string(p.paramArray[i].operation);
  return text + "}";
}
std::string Case::Struct(const CUDA_HOST_NODE_PARAMS_v1& p) const {
  return std::string("{") + (p.fn == HostFunction() ? "the function" : "another function") + ";" +
         (p.userData == counter_ ? "the counter" : "something else") + "}";
}

std::string Case::Probe(CUstream stream) const {
  unsigned flags = 0;
  int priority = 0;
  const CUresult result = cuStreamGetFlags(stream, &flags);
  cuStreamGetPriority(stream, &priority);
  return NameOf(result) + " flags " + std::to_string(flags) + " priority " + std::to_string(priority);
}
std::string Case::Probe(CUevent event) const { return NameOf(cuEventQuery(event)); }
std::string Case::Probe(CUmodule module) const {
  unsigned count = 0;
  const CUresult result = cuModuleGetFunctionCount(&count, module);
  return NameOf(result) + " " + std::to_string(count);
}
std::string Case::Probe(CUlibrary library) const {
  unsigned count = 0;
  const CUresult result = cuLibraryGetKernelCount(&count, library);
  return NameOf(result) + " " + std::to_string(count);
}
std::string Case::Probe(CUfunction function) const {
  const char* name = nullptr;
  const CUresult result = cuFuncGetName(&name, function);
  return NameOf(result) + " " + (name == nullptr ? "?" : name);
}
std::string Case::Probe(CUkernel kernel) const {
  const char* name = nullptr;
  const CUresult result = cuKernelGetName(&name, kernel);
  return NameOf(result) + " " + (name == nullptr ? "?" : name);
}
std::string Case::Probe(CUgraph graph) const {
  size_t nodes = 0, edges = 0;
  const CUresult result = cuGraphGetNodes(graph, nullptr, &nodes);
  cuGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges);
  return NameOf(result) + " nodes " + std::to_string(nodes) + " edges " + std::to_string(edges);
}
std::string Case::Probe(CUgraphNode node) const {
  CUgraphNodeType type{};
  const CUresult result = cuGraphNodeGetType(node, &type);
  return NameOf(result) + " type " + std::to_string(type);
}
std::string Case::Probe(CUgraphExec exec) const {
  cuuint64_t flags = 0;
  const CUresult result = cuGraphExecGetFlags(exec, &flags);
  return NameOf(result) + " flags " + std::to_string(flags);
}
std::string Case::Probe(CUarray array) const {
  CUDA_ARRAY3D_DESCRIPTOR facts{};
  const CUresult result = cuArray3DGetDescriptor(&facts, array);
  return NameOf(result) + " " + Word(&facts, sizeof facts);
}

// ------------------------------------------------------------------------------------------------------- the call's
// end

void Case::Called(CUresult result) {
  result_ = result;
  if (result != CUDA_SUCCESS) return;
  for (const auto& show : shows_) results_ += " " + show();
}

bool Case::Finish(std::string* text) {
  for (CUstream stream : capturing_) {
    CUstreamCaptureStatus status{};
    if (cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS || status == CU_STREAM_CAPTURE_STATUS_NONE) continue;
    CUgraph graph = nullptr;
    const CUresult ended = cuStreamEndCapture(stream, &graph);
    Say("captured: " + (ended == CUDA_SUCCESS ? Probe(graph) : NameOf(ended)));
  }
  CUresult waited = CUDA_SUCCESS;
  if (!current_is_gone_) {
    CUresult set = cuCtxSetCurrent(current_);
    waited = set != CUDA_SUCCESS ? set : cuCtxSynchronize();
  }
  // Whether an error of work comes with the call or with the next one that waits is not what is compared.
  const bool later = later_ && result_ == CUDA_SUCCESS && waited != CUDA_SUCCESS;
  *text = NameOf(later ? waited : result_);
  if (!later) *text += results_ + said_;
  if (!later && waited != CUDA_SUCCESS) *text += " | then " + NameOf(waited);
  if (later) waited = cuCtxSynchronize();
  if (waited == CUDA_SUCCESS) *text += Changes();
  if (*counter_ > 0) *text += " | counted " + std::to_string(*counter_);
  return waited == CUDA_SUCCESS;
}

std::string Case::Changes() {
  std::string text;
  std::vector<char> now;
  const auto compare = [&](const std::string& name, const std::vector<char>& before) {
    size_t changed = 0, first = 0;
    uint64_t digest = 14695981039346656037u;
    for (size_t i = 0; i < before.size(); ++i) {
      if (now[i] != before[i] && changed++ == 0) first = i;
      digest = (digest ^ uint8_t(now[i])) * 1099511628211u;
    }
    if (changed > 0)
      text +=
          " | " + name + " changed: " + std::to_string(changed) + " from " + std::to_string(first) + " " + Hex(digest);
  };
  for (const Region& region : regions_) {
    if (region.before.empty()) continue;
    now.resize(region.bytes);
    if (region.device) {
      const CUresult read = cuMemcpyDtoH(now.data(), region.base, region.bytes);
      if (read != CUDA_SUCCESS) {
        text += " | " + region.name + ": " + NameOf(read);
        continue;
      }
    } else {
      memcpy(now.data(), reinterpret_cast<void*>(region.base), region.bytes);
    }
    compare(region.name, region.before);
  }
  return text;
}

void Case::ShowContext(CUcontext context) {
  if (context != nullptr) cuCtxSetCurrent(context);
  unsigned flags = 0;
  CUdevice device = -1;
  CUfunc_cache cache{};
  CUsharedconfig banks{};
  const CUresult result = cuCtxGetFlags(&flags);
  cuCtxGetDevice(&device);
  cuCtxGetCacheConfig(&cache);
  cuCtxGetSharedMemConfig(&banks);
  Say("context: " + NameOf(result) + " flags " + std::to_string(flags) + " device " + std::to_string(device) +
      " cache " + std::to_string(cache) + " banks " + std::to_string(banks));
}

void Case::ShowLimits() {
  size_t value = 0;
  const CUresult result = cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE);
  Say("stack: " + NameOf(result) + " " + std::to_string(value));
}

void Case::ShowPrimary() {
  unsigned flags = 0;
  int active = 0;
  const CUresult result = cuDevicePrimaryCtxGetState(device_, &flags, &active);
  Say("primary: " + NameOf(result) + " flags " + std::to_string(flags) + " active " + std::to_string(active));
}

void Case::ShowPool() {
  uint64_t threshold = 0;
  const CUresult result = cuMemPoolGetAttribute(MemoryPool(), CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold);
  Say("threshold: " + NameOf(result) + " " + std::to_string(threshold));
}

void Case::ShowScratchFile() {
  // How the driver names things inside is its own affair.
  std::ifstream file(ScratchFile(false));
  const std::string contents((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  Say(std::string("file: ") + (contents.empty() ? "empty" : "written"));
}

void Case::RunGraph() {
  if (made_.count("exec") > 0) return Launch(CUgraphExec(made_["exec"]));
  const CUgraph graph = made_.count("chain") > 0 ? Chain() : Graph();
  Say(Probe(graph));
  CUgraphExec exec = nullptr;
  const CUresult made = cuGraphInstantiate(&exec, graph, 0);
  if (made != CUDA_SUCCESS) return Say("instantiated: " + NameOf(made));
  Launch(exec);
}

void Case::Launch(CUgraphExec exec) { Say("launched: " + NameOf(cuGraphLaunch(exec, Stream()))); }

void Case::ResetCaptureMode() {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  const CUresult result = cuThreadExchangeStreamCaptureMode(&mode);
  Say("mode: " + NameOf(result) + " " + std::to_string(mode));
}

void Case::ResetPools() {
  CUmemoryPool now = nullptr, first = nullptr;
  CONFORMANCE_MAKE(cuDeviceGetMemPool(&now, device_));
  CONFORMANCE_MAKE(cuDeviceGetDefaultMemPool(&first, device_));
  Say("pool: " + Object(uint64_t(now), ""));
  CONFORMANCE_MAKE(cuDeviceSetMemPool(device_, first));
}

void Case::MappedHere(CUdeviceptr address) {
  const CUresult access = cuMemSetAccess(address, Granularity(), Access(), 1);
  Say("access: " + NameOf(access) + ", filled: " + NameOf(cuMemsetD8(address, 1, 64)));
}

}  // namespace cuda_remote::conformance
