// SPDX-License-Identifier: Apache-2.0
// Modules and libraries, and their variables.

#include <cuda.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "proto/codec/library.gen.h"
#include "proto/codec/module.gen.h"
#include "proto/codec/operations.gen.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/modules/jit_options.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// The driver takes images by address alone: a copy that cannot change, and zeros behind it where text would end.
std::string PrivateImage(const Request& request) {
  std::string image;
  image.reserve(request.payload.size() + 8);
  request.payload.AppendTo(&image);
  image.append(8, '\0');
  return image;
}

// Whether a module's image says that this variable is a managed one.
bool IsManaged(WorkerSession& session, uint64_t owner, const std::string& name) {
  const ModuleFacts* const module = session.modules().Find(owner);
  if (module == nullptr) return false;
  const auto& symbols = module->symbols;
  return std::any_of(symbols.begin(), symbols.end(),
                     [&name](const replay::DataSymbol& symbol) { return symbol.managed && symbol.name == name; });
}

// Returns whether the host may use the variable as well.
bool NoteSymbol(WorkerSession& session, uint64_t owner, const std::string& name, CUdeviceptr address, size_t bytes) {
  if (address == 0 || bytes == 0) return false;
  DeviceRange range;
  range.kind = DeviceRange::kSymbol;
  range.bytes = bytes;
  range.context = session.CurrentContext();
  range.owner = owner;
  if (const ContextInfo* const context = session.contexts().Find(range.context)) range.device = context->device;
  range.managed = IsManaged(session, owner, name);
  session.ranges().Insert(address, range);
  return range.managed;
}

// Words of modules in one answer, well below the longest message.
constexpr size_t kCodeReplyBytes = 256 << 10;

std::vector<VariablePart> PartsAt(const std::vector<uint64_t>& places, size_t first, size_t count) {
  std::vector<VariablePart> parts;
  for (size_t i = first; i < first + count; ++i) parts.push_back({places[i], 0});
  return parts;
}
void AddParts(const VariablePlace& place, std::vector<uint64_t>* places) {
  for (const VariablePart& part : place.parts) places->push_back(part.lowest);
}

// Where the log says that variables were: in a module's own context.
std::vector<VariablePlace> WantedPlaces(const WorkerSession& session, const wire::cuModuleLoadData_Request& in) {
  if (in.places.empty()) return {};
  return {{session.CurrentContext(), PartsAt(in.places, 0, in.places.size())}};
}

// The same of a library, in those of its contexts that exist: after a reset, one is gone.
std::vector<VariablePlace> WantedPlaces(const WorkerSession& session, const wire::cuLibraryLoadData_Request& in) {
  const size_t count = in.places.size();
  std::vector<VariablePlace> wanted;
  if (count == 0) return wanted;
  const std::vector<uint64_t>& contexts = in.place_contexts;
  for (size_t i = 0; i < contexts.size() && i <= in.other_places.size() / count; ++i) {
    if (session.contexts().Find(contexts[i]) == nullptr) continue;
    wanted.push_back(
        {contexts[i], i == 0 ? PartsAt(in.places, 0, count) : PartsAt(in.other_places, (i - 1) * count, count)});
  }
  return wanted;
}

void PutPlaces(const VariablePlaces& placed, wire::cuModuleLoadData_Reply* out) {
  for (const VariablePlace& place : placed.contexts) AddParts(place, &out->places);
}

void PutPlaces(const VariablePlaces& placed, wire::cuLibraryLoadData_Reply* out) {
  for (const VariablePlace& place : placed.contexts) {
    out->place_contexts.push_back(place.context);
    AddParts(place, out->places.empty() ? &out->places : &out->other_places);
  }
}

// Notes a module that was loaded. In a replay its variables belong where they were.
template <typename In, typename Out>
CUresult Settle(WorkerSession& session, const Request& request, uint64_t handle, bool library, std::string_view image,
                const In& in, Out* out, const std::function<uint64_t()>& load) {
  VariablePlaces placed;
  if (!session.modules().Note(handle, library, image, &placed)) {
    session.modules().Unload(handle, library);
    session.Unbind(handle);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (request.replay()) {
    const std::vector<VariablePlace> wanted = WantedPlaces(session, in);
    CUresult result = session.modules().MoveVariables(handle, &placed, wanted, load);
    if (result == CUDA_SUCCESS && !in.code.empty()) {
      std::vector<uint64_t> code = in.code;
      for (uint64_t& word : code) word = ~word;  // complemented on the wire
      result = session.modules().MoveCode(handle, &placed, in.code_contexts, code, load);
      // Its variables may have gone elsewhere meanwhile.
      if (result == CUDA_SUCCESS) result = session.modules().MoveVariables(handle, &placed, wanted, load);
    }
    if (result != CUDA_SUCCESS) {
      if (placed.loaded) session.modules().Unload(handle, library);
      session.Unbind(handle);
      return result;
    }
  }
  PutPlaces(placed, out);
  for (const auto& [context, words] : session.modules().Find(handle)->code) {
    // Another GPU's code in the same image may have other variables.
    if (!out->code_contexts.empty() && words.size() * out->code_contexts.size() != out->code.size()) continue;
    out->code_contexts.push_back(context);
    for (const uint64_t word : words) out->code.push_back(~word);
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuModuleLoadData(WorkerSession& session, const Request& request,
                                 const wire::cuModuleLoadData_Request& in, wire::cuModuleLoadData_Reply* out,
                                 ReplyBuilder* reply) {
  JitOptions options;
  if (!session.MayBind(Kind::kModule, in.module) || !options.Read(in.options, in.option_values)) {
    return kMalformedRequest;
  }
  if (request.payload.empty()) return CUDA_ERROR_INVALID_IMAGE;
  const std::string image = PrivateImage(request);
  CUmodule module = nullptr;
  const auto load = [&] {
    return options.names.empty() ? session.driver().cuModuleLoadData(&module, image.data())
                                 : session.driver().cuModuleLoadDataEx(&module, image.data(), options.count(),
                                                                       options.name_array(), options.value_array());
  };
  CUresult result = load();
  if (result == CUDA_SUCCESS) {
    session.Bind(Kind::kModule, in.module, reinterpret_cast<uint64_t>(module), session.CurrentContext());
    result = Settle(session, request, in.module, false, {image.data(), request.payload.size()}, in, out,
                    [&]() -> uint64_t { return load() == CUDA_SUCCESS ? reinterpret_cast<uint64_t>(module) : 0; });
  }
  out->option_values = options.Outputs();
  out->info_log = options.info();
  out->error_log = options.error();
  out->Encode(&reply->message);
  return result;
}

CUresult Custom_cuLibraryLoadData(WorkerSession& session, const Request& request,
                                  const wire::cuLibraryLoadData_Request& in, wire::cuLibraryLoadData_Reply* out,
                                  ReplyBuilder* reply) {
  JitOptions options;
  if (!session.MayBind(Kind::kLibrary, in.library) || !options.Read(in.jit_options, in.jit_option_values)) {
    return kMalformedRequest;
  }
  if (request.payload.empty()) return CUDA_ERROR_INVALID_IMAGE;
  const std::string image = PrivateImage(request);
  CUlibrary library = nullptr;
  const auto load = [&] {
    return session.driver().cuLibraryLoadData(&library, image.data(), options.name_array(), options.value_array(),
                                              options.count(), nullptr, nullptr, 0);
  };
  CUresult result = load();
  if (result == CUDA_SUCCESS) {
    session.Bind(Kind::kLibrary, in.library, reinterpret_cast<uint64_t>(library), 0);
    result = Settle(session, request, in.library, true, {image.data(), request.payload.size()}, in, out,
                    [&]() -> uint64_t { return load() == CUDA_SUCCESS ? reinterpret_cast<uint64_t>(library) : 0; });
  }
  out->jit_option_values = options.Outputs();
  out->info_log = options.info();
  out->error_log = options.error();
  out->Encode(&reply->message);
  return result;
}

CUresult Custom_cuModuleGetGlobal_v2(WorkerSession& session, const Request&,
                                     const wire::cuModuleGetGlobal_v2_Request& in,
                                     wire::cuModuleGetGlobal_v2_Reply* out, ReplyBuilder*) {
  CUmodule module;
  if (!session.Real(Kind::kModule, in.hmod, &module)) return CUDA_ERROR_INVALID_HANDLE;
  CUdeviceptr address = 0;
  size_t bytes = 0;
  const std::string name(in.name);
  const CUresult result = session.driver().cuModuleGetGlobal_v2(&address, &bytes, module, name.c_str());
  if (result != CUDA_SUCCESS) return result;
  out->managed = NoteSymbol(session, in.hmod, name, address, bytes);
  out->dptr = address;
  out->bytes = bytes;
  return CUDA_SUCCESS;
}

CUresult Custom_cuLibraryGetGlobal(WorkerSession& session, const Request&, const wire::cuLibraryGetGlobal_Request& in,
                                   wire::cuLibraryGetGlobal_Reply* out, ReplyBuilder*) {
  CUlibrary library;
  if (!session.Real(Kind::kLibrary, in.library, &library)) return CUDA_ERROR_INVALID_HANDLE;
  CUdeviceptr address = 0;
  size_t bytes = 0;
  const std::string name(in.name);
  const CUresult result = session.driver().cuLibraryGetGlobal(&address, &bytes, library, name.c_str());
  if (result != CUDA_SUCCESS) return result;
  out->managed = NoteSymbol(session, in.library, name, address, bytes);
  out->dptr = address;
  out->bytes = bytes;
  return CUDA_SUCCESS;
}

CUresult Custom_cuLibraryGetManaged(WorkerSession& session, const Request&, const wire::cuLibraryGetManaged_Request& in,
                                    wire::cuLibraryGetManaged_Reply* out, ReplyBuilder*) {
  CUlibrary library;
  if (!session.Real(Kind::kLibrary, in.library, &library)) return CUDA_ERROR_INVALID_HANDLE;
  CUdeviceptr address = 0;
  size_t bytes = 0;
  const std::string name(in.name);
  const CUresult result = session.driver().cuLibraryGetManaged(&address, &bytes, library, name.c_str());
  if (result != CUDA_SUCCESS) return result;
  out->managed = NoteSymbol(session, in.library, name, address, bytes);
  // The driver says that it is one; an image that does not cannot be understood well enough.
  if (!out->managed) return CUDA_ERROR_NOT_SUPPORTED;
  out->dptr = address;
  out->bytes = bytes;
  return CUDA_SUCCESS;
}

namespace {

// Bytes of names in one reply; well below the longest message.
constexpr size_t kNameBytes = 512 << 10;
// A driver that counts wrong must not keep us here.
constexpr unsigned kMaxFunctions = 1 << 20;

// The part of `names` that one reply holds, beginning after the first `after`.
template <typename Reply>
void AnswerNames(const std::vector<std::string>& names, uint32_t after, Reply* out, ReplyBuilder* reply) {
  size_t bytes = 0;
  for (size_t i = after; i < names.size(); ++i) {
    bytes += names[i].size() + 8;
    if (bytes > kNameBytes && i != after) {
      out->more = true;
      break;
    }
    out->names.push_back(names[i]);
  }
  out->Encode(&reply->message);
}

}  // namespace

CUresult Custom_cuModuleEnumerateFunctions(WorkerSession& session, const Request&,
                                           const wire::cuModuleEnumerateFunctions_Request& in,
                                           wire::cuModuleEnumerateFunctions_Reply* out, ReplyBuilder* reply) {
  CUmodule module;
  if (!session.Real(Kind::kModule, in.owner, &module)) return CUDA_ERROR_INVALID_HANDLE;
  const DriverTable& driver = session.driver();
  unsigned count = 0;
  CUresult result = driver.cuModuleGetFunctionCount(&count, module);
  if (result != CUDA_SUCCESS) return result;
  std::vector<CUfunction> functions(std::min(count, kMaxFunctions));
  if (!functions.empty())
    result = driver.cuModuleEnumerateFunctions(functions.data(), unsigned(functions.size()), module);
  std::vector<std::string> names;
  for (size_t i = 0; result == CUDA_SUCCESS && i < functions.size(); ++i) {
    const char* name = nullptr;
    result = driver.cuFuncGetName(&name, functions[i]);
    if (result == CUDA_SUCCESS && name != nullptr) names.push_back(name);
  }
  if (result == CUDA_SUCCESS) AnswerNames(names, in.after, out, reply);
  return result;
}

CUresult Custom_cuLibraryEnumerateKernels(WorkerSession& session, const Request&,
                                          const wire::cuLibraryEnumerateKernels_Request& in,
                                          wire::cuLibraryEnumerateKernels_Reply* out, ReplyBuilder* reply) {
  CUlibrary library;
  if (!session.Real(Kind::kLibrary, in.owner, &library)) return CUDA_ERROR_INVALID_HANDLE;
  const DriverTable& driver = session.driver();
  unsigned count = 0;
  CUresult result = driver.cuLibraryGetKernelCount(&count, library);
  if (result != CUDA_SUCCESS) return result;
  std::vector<CUkernel> kernels(std::min(count, kMaxFunctions));
  if (!kernels.empty()) result = driver.cuLibraryEnumerateKernels(kernels.data(), unsigned(kernels.size()), library);
  std::vector<std::string> names;
  for (size_t i = 0; result == CUDA_SUCCESS && i < kernels.size(); ++i) {
    const char* name = nullptr;
    result = driver.cuKernelGetName(&name, kernels[i]);
    if (result == CUDA_SUCCESS && name != nullptr) names.push_back(name);
  }
  if (result == CUDA_SUCCESS) AnswerNames(names, in.after, out, reply);
  return result;
}

CUresult OpCodeWords(WorkerSession& session, const Request&, const wire::OpCodeWords_Request& in,
                     wire::OpCodeWords_Reply* out, ReplyBuilder* reply) {
  uint64_t passed = 0;
  size_t bytes = 0;
  for (const auto& [handle, module] : session.modules().all()) {
    if (module.code.empty() || passed++ < in.after) continue;
    if (bytes > kCodeReplyBytes) {
      out->more = true;
      break;
    }
    // All contexts of a module go in one answer.
    for (const auto& [context, now] : module.code) {
      const auto places = module.code_places.find(context);
      if (now.empty() || places == module.code_places.end()) continue;
      const auto before = module.code_before.find(context);
      wire::ModuleCode one;
      one.module = handle;
      one.context = context;
      for (size_t i = 0; i < now.size(); ++i) {
        const CodePlace& place = places->second[i];
        if (i == 0 || places->second[i - 1].symbol != place.symbol) {
          one.symbols.push_back(module.symbols[place.symbol].name);
          one.counts.push_back(0);
          bytes += one.symbols.back().size() + 16;
        }
        ++one.counts.back();
        one.offsets.push_back(place.offset);
        one.now.push_back(~now[i]);
        bytes += 32;
      }
      for (const uint64_t word : before != module.code_before.end() ? before->second : now) one.before.push_back(~word);
      out->modules.push_back(std::move(one));
    }
  }
  out->Encode(&reply->message);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
