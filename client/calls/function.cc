// SPDX-License-Identifier: Apache-2.0
// Functions and kernels: found by name once, attributes asked for once.

#include <cuda.h>

#include <atomic>
#include <string>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/function_info.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// What a library's modules are called among its children; no kernel's name begins so.
constexpr char kModulePrefix[] = "/module/";

// The name by which its library gave it. Empty: it is no kernel.
std::string NameOfKernelLocked(Session& session, uint64_t kernel) CR_REQUIRES_SHARED(session.objects().mutex()) {
  const Object* const object = session.objects().handles().Find(Kind::kKernel, kernel);
  const Object* const library = object ? session.objects().handles().Find(Kind::kLibrary, object->owner) : nullptr;
  return library && library->children ? RecordedObjects::NameOf(*library->children, kernel) : "";
}

// The child of `owner` under `name` if it was asked for before, as natively the same handle comes back; 0 if not. A
// function of a library's module is the one of the library's kernel in the module's context, whichever came first.
uint64_t FindChild(Session& session, Kind kind, uint64_t owner, const std::string& name) {
  ReaderLock lock(&session.objects().mutex());
  if (const uint64_t child = session.objects().ChildLocked(kind, owner, name)) return child;
  const Object* const object = session.objects().handles().Find(kind, owner);
  if (!object || KindOf(object->owner) != Kind::kLibrary) return 0;
  if (kind == Kind::kModule) {
    const uint64_t kernel = session.objects().ChildLocked(Kind::kLibrary, object->owner, name);
    return session.objects().ChildLocked(Kind::kKernel, kernel, std::to_string(object->context));
  }
  const uint64_t module = session.objects().ChildLocked(Kind::kLibrary, object->owner, kModulePrefix + name);
  return module ? session.objects().ChildLocked(Kind::kModule, module, NameOfKernelLocked(session, owner)) : 0;
}

void AddChild(Session& session, Kind kind, uint64_t owner, const std::string& name, Kind child_kind, uint64_t child,
              uint64_t context) {
  WriterLock lock(&session.objects().mutex());
  if (!session.objects().NameChildLocked(kind, owner, name, child)) return;
  Object* const made = session.objects().handles().Find(child_kind, child);
  made->owner = owner;
  made->context = context;
}

// A child that dies with its owner, and with the current context if it is `of_context`. The request has been filled in
// but for the new handle, whose place `handle` names.
template <typename Request>
CUresult MakeChild(Call& call, Kind owner_kind, uint64_t owner, const std::string& name, Kind child_kind,
                   Request& request, uint64_t Request::*handle, bool of_context, uint64_t* child) {
  if (!call.Valid(owner_kind, owner)) return CUDA_ERROR_INVALID_HANDLE;
  *child = FindChild(call.session(), owner_kind, owner, name);
  if (*child && call.Valid(child_kind, *child)) return CUDA_SUCCESS;
  *child = request.*handle = call.NewHandle(child_kind, owner);
  if (!*child) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  const uint64_t context = of_context ? call.thread().current_context() : 0;
  AddChild(call.session(), owner_kind, owner, name, child_kind, *child, context);
  if (of_context) {
    call.Created({child_kind, *child}, {{Kind::kContext, context}});
  } else {
    call.Created({child_kind, *child});
  }
  return CUDA_SUCCESS;
}

// `device`: of a kernel, -1: the current context's.
CUresult GetAttribute(const CallInfo& info, uint64_t function, int device, CUfunction_attribute attrib, int* pi) {
  if (!pi) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  std::shared_ptr<FunctionInfo> facts;
  if (device < 0) device = call.device();
  if (const CUresult result = FindFunctionInfo(call, function, &facts, device); result != CUDA_SUCCESS) return result;
  ReaderLock lock(&call.session().objects().mutex());
  if (int(attrib) < 0 || size_t(attrib) >= facts->attributes.size() || facts->attributes[attrib] == kRefused) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *pi = facts->attributes[attrib];
  return CUDA_SUCCESS;
}

std::string NameOfKernel(Session& session, uint64_t kernel) {
  ReaderLock lock(&session.objects().mutex());
  return NameOfKernelLocked(session, kernel);
}

// The name is the client's own copy: it lives as long as the process, which is at least as long as the driver promises.
CUresult GetName(const CallInfo& info, uint64_t function, const char** name) {
  if (!name || !function) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  // Kernels are of no context, and have names without one.
  if (const std::string known = NameOfKernel(call.session(), function); !known.empty()) {
    *name = call.session().objects().names().Intern(known);
    return CUDA_SUCCESS;
  }
  std::shared_ptr<FunctionInfo> facts;
  const CUresult result = FindFunctionInfo(call, function, &facts);
  if (result == CUDA_SUCCESS) *name = call.session().objects().names().Intern(facts->name);
  return result;
}

// The functions that take over a kernel's attributes: those that came from it, and those of its name in its library's
// modules.
std::vector<uint64_t> FunctionsOfLocked(Session& session, const Object& object, uint64_t kernel)
    CR_REQUIRES_SHARED(session.objects().mutex()) {
  std::vector<uint64_t> functions;
  if (object.children) {
    for (const auto& [name, function] : *object.children) functions.push_back(function);
  }
  const Object* const library = session.objects().handles().Find(Kind::kLibrary, object.owner);
  if (!library || !library->children) return functions;
  std::string own_name;
  for (auto it = library->children->lower_bound(kModulePrefix);
       it != library->children->end() && it->first.rfind(kModulePrefix, 0) == 0; ++it) {
    const Object* const module = session.objects().handles().Find(Kind::kModule, it->second);
    if (!module || !module->children) continue;
    if (own_name.empty()) own_name = NameOfKernelLocked(session, kernel);
    const auto function = module->children->find(own_name);
    if (function != module->children->end()) functions.push_back(function->second);
  }
  return functions;
}

// A function or kernel, and a kernel's functions.
std::vector<Object*> WithFunctionsLocked(Session& session, uint64_t function)
    CR_REQUIRES_SHARED(session.objects().mutex()) {
  std::vector<Object*> objects;
  Object* const object = session.objects().handles().Find(KindOf(function), function);
  if (!object) return objects;
  objects.push_back(object);
  if (KindOf(function) != Kind::kKernel) return objects;
  for (const uint64_t one : FunctionsOfLocked(session, *object, function)) {
    if (Object* const of_kernel = session.objects().handles().Find(Kind::kFunction, one)) objects.push_back(of_kernel);
  }
  return objects;
}

// After the driver has accepted a new value: what the client answers from must say the same. Other attributes may have
// changed with it (a larger dynamic shared size changes the carve-out), so they are asked for again.
void ForgetInfo(Session& session, uint64_t function) {
  WriterLock lock(&session.objects().mutex());
  for (Object* const object : WithFunctionsLocked(session, function)) {
    object->info.reset();
    object->other_infos.reset();
  }
  session.objects().FunctionsChangedLocked();
}

// In the place of a setting's key: what cuFuncSetAttribute has changed. All that was noted before may be another value
// by now.
constexpr uint64_t kForeign = ~uint64_t{0};

// After the driver has accepted a kernel's new value: from now on what is known under the new settings counts.
void NoteSetting(Session& session, uint64_t kernel, uint64_t key, int value) {
  WriterLock lock(&session.objects().mutex());
  const std::vector<Object*> objects = WithFunctionsLocked(session, kernel);
  if (objects.empty()) return;
  std::unique_ptr<KernelSettings>& settings = objects[0]->settings;
  if (!settings) settings = std::make_unique<KernelSettings>();
  const std::string before = settings->text;
  if (key == kForeign) settings->values.clear();
  settings->values[key] = value;
  settings->text.clear();
  for (const auto& [place, set] : settings->values) {
    settings->text.append(reinterpret_cast<const char*>(&place), sizeof(place));
    settings->text.append(reinterpret_cast<const char*>(&set), sizeof(set));
  }
  for (Object* const object : objects) {
    if (object->info) KeepOtherInfo(object, before, std::move(object->info));
    object->info = nullptr;
    if (!object->other_infos) continue;
    const auto known = object->other_infos->find(settings->text);
    if (known != object->other_infos->end()) object->info = known->second;
  }
  session.objects().FunctionsChangedLocked();
}

// The log's key for an attribute of a kernel on a device. A function is on one device: 0 there.
uint64_t SettingKey(int device, int attribute) { return uint64_t(uint32_t(device)) << 32 | uint32_t(attribute); }

// cuFuncSetAttribute has changed what the kernel of `function` shares with its functions: settings that were noted
// before are not those of now, even if they are noted again.
void NoteForeignSetting(Session& session, uint64_t function) {
  static std::atomic<int> next{0};
  uint64_t kernel = function;
  if (KindOf(function) == Kind::kFunction) {
    ReaderLock lock(&session.objects().mutex());
    kernel = session.objects().KernelOfLocked(function);
  }
  if (KindOf(kernel) != Kind::kKernel) return;
  NoteSetting(session, kernel, kForeign, next.fetch_add(1));
  ForgetInfo(session, kernel);
}

// Whether the kernel's attribute was set by this very message last. Libraries set the same before every launch. What
// cuFuncSetAttribute sets of one of its functions is another record.
bool IsSetAlready(Session& session, uint64_t kernel, int attribute, uint64_t key, const std::string& message) {
  ReaderLock lock(&session.objects().mutex());
  const Object* const object = session.objects().handles().Find(Kind::kKernel, kernel);
  if (!object) return false;
  for (const uint64_t function : FunctionsOfLocked(session, *object, kernel)) {
    if (session.objects().log().FindSetting({Kind::kFunction, function}, kCall_cuFuncSetAttribute,
                                            SettingKey(0, attribute))) {
      return false;
    }
  }
  const replay::Record* const last =
      session.objects().log().FindSetting({Kind::kKernel, kernel}, kCall_cuKernelSetAttribute, key);
  return last && last->message == message;
}

}  // namespace

CUresult Custom_cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name) {
  if (!hfunc || !name) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuModuleGetFunction);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuModuleGetFunction_Request request;
  request.hmod = reinterpret_cast<uint64_t>(hmod);
  request.name = name;
  uint64_t handle;
  const CUresult result = MakeChild(call, Kind::kModule, request.hmod, name, Kind::kFunction, request,
                                    &wire::cuModuleGetFunction_Request::hfunc, false, &handle);
  if (result == CUDA_SUCCESS) *hfunc = reinterpret_cast<CUfunction>(handle);
  return result;
}

CUresult Custom_cuLibraryGetKernel(CUkernel* pKernel, CUlibrary library, const char* name) {
  if (!pKernel || !name) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuLibraryGetKernel);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuLibraryGetKernel_Request request;
  request.library = reinterpret_cast<uint64_t>(library);
  request.name = name;
  uint64_t handle;
  const CUresult result = MakeChild(call, Kind::kLibrary, request.library, name, Kind::kKernel, request,
                                    &wire::cuLibraryGetKernel_Request::pKernel, false, &handle);
  if (result == CUDA_SUCCESS) *pKernel = reinterpret_cast<CUkernel>(handle);
  return result;
}

CUresult Custom_cuLibraryGetModule(CUmodule* pMod, CUlibrary library) {
  if (!pMod) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuLibraryGetModule);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuLibraryGetModule_Request request;
  request.library = reinterpret_cast<uint64_t>(library);
  uint64_t handle;
  // One module for each context.
  const std::string name = kModulePrefix + std::to_string(call.thread().current_context());
  const CUresult result = MakeChild(call, Kind::kLibrary, request.library, name, Kind::kModule, request,
                                    &wire::cuLibraryGetModule_Request::pMod, true, &handle);
  if (result == CUDA_SUCCESS) *pMod = reinterpret_cast<CUmodule>(handle);
  return result;
}

CUresult Custom_cuKernelGetFunction(CUfunction* pFunc, CUkernel kernel) {
  if (!pFunc) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuKernelGetFunction);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuKernelGetFunction_Request request;
  request.kernel = reinterpret_cast<uint64_t>(kernel);
  uint64_t handle;
  const std::string name = std::to_string(call.thread().current_context());
  const CUresult result = MakeChild(call, Kind::kKernel, request.kernel, name, Kind::kFunction, request,
                                    &wire::cuKernelGetFunction_Request::pFunc, true, &handle);
  if (result == CUDA_SUCCESS) *pFunc = reinterpret_cast<CUfunction>(handle);
  return result;
}

CUresult Custom_cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc) {
  return GetAttribute(info::k_cuFuncGetAttribute, reinterpret_cast<uint64_t>(hfunc), -1, attrib, pi);
}

CUresult Custom_cuKernelGetAttribute(int* pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev) {
  Session* const session = Session::Get();
  if (session && (dev < 0 || size_t(dev) >= session->devices().size())) return CUDA_ERROR_INVALID_DEVICE;
  return GetAttribute(info::k_cuKernelGetAttribute, reinterpret_cast<uint64_t>(kernel), dev, attrib, pi);
}

CUresult Custom_cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
  Call call(info::k_cuFuncSetAttribute);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuFuncSetAttribute_Request request;
  request.hfunc = reinterpret_cast<uint64_t>(hfunc);
  request.attrib = attrib;
  request.value = value;
  const Kind kind = KindOf(request.hfunc);  // the driver takes a kernel here too
  if ((kind != Kind::kFunction && kind != Kind::kKernel) || !call.Valid(kind, request.hfunc)) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  ForgetInfo(call.session(), request.hfunc);
  NoteForeignSetting(call.session(), request.hfunc);
  int device = 0;
  if (kind == Kind::kKernel) {
    // It stands for the function of the current context's device. The record says so in a call that needs no context,
    // since the setting outlives this one.
    device = call.device();
    wire::cuKernelSetAttribute_Request of_device;
    of_device.attrib = attrib;
    of_device.val = value;
    of_device.kernel = request.hfunc;
    of_device.dev = device;
    call.set_id(kCall_cuKernelSetAttribute);
    call.message().clear();
    of_device.Encode(&call.message());
    call.session().answers().Forget();
  }
  call.Modified({kind, request.hfunc}, SettingKey(device, attrib));
  return CUDA_SUCCESS;
}

CUresult Custom_cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev) {
  Call call(info::k_cuKernelSetAttribute);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuKernelSetAttribute_Request request;
  request.attrib = attrib;
  request.val = val;
  request.kernel = reinterpret_cast<uint64_t>(kernel);
  request.dev = dev;
  if (!call.Valid(Kind::kKernel, request.kernel)) return CUDA_ERROR_INVALID_HANDLE;
  request.Encode(&call.message());
  const uint64_t key = SettingKey(dev, attrib);
  Session& session = call.session();
  if (IsSetAlready(session, request.kernel, attrib, key, call.message())) return CUDA_SUCCESS;
  // A value that the driver has accepted once is accepted again.
  const std::string question = "set " + call.message();
  const uint64_t stamp = session.answers().stamp();
  const CUresult result = session.answers().Find(question, nullptr) ? call.Send() : call.Transact();
  if (result != CUDA_SUCCESS) return result;
  session.answers().Keep(stamp, question, "");
  NoteSetting(session, request.kernel, key, val);
  call.Modified({Kind::kKernel, request.kernel}, key);
  return CUDA_SUCCESS;
}

CUresult Custom_cuFuncGetName(const char** name, CUfunction hfunc) {
  return GetName(info::k_cuFuncGetName, reinterpret_cast<uint64_t>(hfunc), name);
}

CUresult Custom_cuKernelGetName(const char** name, CUkernel hfunc) {
  return GetName(info::k_cuKernelGetName, reinterpret_cast<uint64_t>(hfunc), name);
}

CUresult Custom_cuFuncGetModule(CUmodule* hmod, CUfunction hfunc) {
  if (!hmod || !hfunc) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuFuncGetModule);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t owner = 0;
  {
    ReaderLock lock(&call.session().objects().mutex());
    const Object* function =
        call.session().objects().handles().Find(Kind::kFunction, reinterpret_cast<uint64_t>(hfunc));
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    owner = function->owner;
    if (KindOf(owner) == Kind::kKernel) {
      const Object* kernel = call.session().objects().handles().Find(Kind::kKernel, owner);
      owner = kernel ? kernel->owner : 0;
    }
  }
  if (KindOf(owner) == Kind::kModule) {
    *hmod = reinterpret_cast<CUmodule>(owner);
    return CUDA_SUCCESS;
  }
  call.Borrow(reinterpret_cast<uint64_t>(hfunc));
  return Custom_cuLibraryGetModule(hmod, reinterpret_cast<CUlibrary>(owner));
}

namespace {

// The names of all functions of a module, or all kernels of a library, in the driver's order.
template <typename Request, typename Reply>
CUresult AskNames(const CallInfo& info, Kind kind, uint64_t owner, size_t most, std::vector<std::string>* names) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(kind, owner)) return CUDA_ERROR_INVALID_HANDLE;
  Request request;
  request.owner = owner;
  while (names->size() < most) {
    request.after = uint32_t(names->size());
    call.message().clear();
    request.Encode(&call.message());
    if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
    Reply reply;
    if (!reply.Decode(call.reply()) || (reply.more && reply.names.empty())) {
      return call.session().Lose(ChannelStatus::kProtocolError);
    }
    for (const std::string_view name : reply.names) names->emplace_back(name);
    if (!reply.more) break;
  }
  return CUDA_SUCCESS;
}

}  // namespace

// Each one is looked up by its name, so that it is the same handle, and the same record, as cuModuleGetFunction's.
CUresult Custom_cuModuleEnumerateFunctions(CUfunction* functions, unsigned int numFunctions, CUmodule mod) {
  if (!functions) return CUDA_ERROR_INVALID_VALUE;
  std::vector<std::string> names;
  CUresult result = AskNames<wire::cuModuleEnumerateFunctions_Request, wire::cuModuleEnumerateFunctions_Reply>(
      info::k_cuModuleEnumerateFunctions, Kind::kModule, reinterpret_cast<uint64_t>(mod), numFunctions, &names);
  for (size_t i = 0; result == CUDA_SUCCESS && i < names.size() && i < numFunctions; ++i) {
    result = Custom_cuModuleGetFunction(&functions[i], mod, names[i].c_str());
  }
  return result;
}

CUresult Custom_cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int numKernels, CUlibrary lib) {
  if (!kernels) return CUDA_ERROR_INVALID_VALUE;
  std::vector<std::string> names;
  CUresult result = AskNames<wire::cuLibraryEnumerateKernels_Request, wire::cuLibraryEnumerateKernels_Reply>(
      info::k_cuLibraryEnumerateKernels, Kind::kLibrary, reinterpret_cast<uint64_t>(lib), numKernels, &names);
  for (size_t i = 0; result == CUDA_SUCCESS && i < names.size() && i < numKernels; ++i) {
    result = Custom_cuLibraryGetKernel(&kernels[i], lib, names[i].c_str());
  }
  return result;
}

// Needs a GPU that can call host functions by address. There is none: CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS is
// 0.
CUresult Custom_cuLibraryGetUnifiedFunction(void** fptr, CUlibrary library, const char* symbol) {
  if (!fptr || !symbol) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuLibraryGetUnifiedFunction);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  return call.Valid(Kind::kLibrary, library) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace cuda_remote::client
