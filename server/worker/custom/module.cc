// Modules and libraries, and their variables.

#include <cuda.h>

#include <algorithm>
#include <string>
#include <vector>

#include "proto/codec/library.gen.h"
#include "proto/codec/module.gen.h"
#include "server/dispatch/custom.gen.h"
#include "server/dispatch/malformed.h"
#include "server/worker/worker_session.h"

namespace cuda_remote::server {
namespace {

// Longest compiler log that is made for a client; it must fit a reply.
constexpr uint64_t kMaxLog = 256 << 10;
constexpr size_t kMaxOptions = 64;

// The client's JIT options with buffers of our own in place of its pointers.
struct JitOptions {
  std::vector<CUjit_option> names;
  std::vector<void*> values;
  std::string info_log, error_log;

  // False if no correct client sends this.
  bool Read(const std::vector<uint32_t>& options, const std::vector<uint64_t>& wire_values) {
    if (options.size() != wire_values.size() || options.size() > kMaxOptions) return false;
    uint64_t info_bytes = 0, error_bytes = 0;
    for (size_t i = 0; i < options.size(); ++i) {
      if (options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES) info_bytes = std::min(wire_values[i], kMaxLog);
      if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) error_bytes = std::min(wire_values[i], kMaxLog);
    }
    info_log.assign(info_bytes + 1, 0);
    error_log.assign(error_bytes + 1, 0);
    for (size_t i = 0; i < options.size(); ++i) {
      uint64_t value = wire_values[i];
      switch (options[i]) {
        case CU_JIT_INFO_LOG_BUFFER:
          value = reinterpret_cast<uint64_t>(&info_log[0]);
          break;
        case CU_JIT_ERROR_LOG_BUFFER:
          value = reinterpret_cast<uint64_t>(&error_log[0]);
          break;
        case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
          value = info_bytes;
          break;
        case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
          value = error_bytes;
          break;
        case CU_JIT_GLOBAL_SYMBOL_NAMES:
        case CU_JIT_GLOBAL_SYMBOL_ADDRESSES:
        case CU_JIT_REFERENCED_KERNEL_NAMES:
        case CU_JIT_REFERENCED_VARIABLE_NAMES:
          return false;  // pointers
        default:
          if (options[i] >= CU_JIT_NUM_OPTIONS) return false;
      }
      names.push_back(CUjit_option(options[i]));
      values.push_back(reinterpret_cast<void*>(value));
    }
    return true;
  }

  // What the driver wrote into the values; addresses of buffers stay here.
  std::vector<uint64_t> Outputs() const {
    std::vector<uint64_t> out;
    for (size_t i = 0; i < names.size(); ++i) {
      const bool pointer = names[i] == CU_JIT_INFO_LOG_BUFFER || names[i] == CU_JIT_ERROR_LOG_BUFFER;
      out.push_back(pointer ? 0 : reinterpret_cast<uint64_t>(values[i]));
    }
    return out;
  }
  std::string_view info() const { return info_log.c_str(); }
  std::string_view error() const { return error_log.c_str(); }
};

// The driver takes images by address alone: a copy that cannot change, and zeros behind it where text would end.
std::string PrivateImage(const Request& request) {
  std::string image;
  image.reserve(request.payload.size() + 8);
  image.assign(request.payload);
  image.append(8, '\0');
  return image;
}

// Whether a module's image says that this variable is a managed one.
bool IsManaged(WorkerSession& worker, uint64_t owner, const std::string& name) {
  const auto module = worker.modules().find(owner);
  if (module == worker.modules().end()) return false;
  const auto& symbols = module->second.symbols;
  return std::any_of(symbols.begin(), symbols.end(),
                     [&name](const replay::DataSymbol& symbol) { return symbol.managed && symbol.name == name; });
}

// Returns whether the host may use the variable as well.
bool NoteSymbol(WorkerSession& worker, uint64_t owner, const std::string& name, CUdeviceptr address, size_t bytes) {
  if (address == 0 || bytes == 0) return false;
  DeviceRange range;
  range.kind = DeviceRange::kSymbol;
  range.bytes = bytes;
  range.context = worker.CurrentContext();
  range.owner = owner;
  if (const ContextInfo* const context = worker.FindContext(range.context)) range.device = context->device;
  range.managed = IsManaged(worker, owner, name);
  worker.ranges().Insert(address, range);
  return range.managed;
}

}  // namespace

CUresult Custom_cuModuleLoadData(Session& session, const Request& request, const wire::cuModuleLoadData_Request& in,
                                 wire::cuModuleLoadData_Reply* out, ReplyBuilder* reply) {
  WorkerSession& worker = Worker(session);
  JitOptions options;
  if (!session.MayBind(Kind::kModule, in.module) || !options.Read(in.options, in.option_values)) {
    return kMalformedRequest;
  }
  if (request.payload.empty()) return CUDA_ERROR_INVALID_IMAGE;
  const std::string image = PrivateImage(request);
  CUmodule module = nullptr;
  const CUresult result =
      options.names.empty()
          ? session.driver().cuModuleLoadData(&module, image.data())
          : session.driver().cuModuleLoadDataEx(&module, image.data(), unsigned(options.names.size()),
                                                options.names.data(), options.values.data());
  out->option_values = options.Outputs();
  out->info_log = options.info();
  out->error_log = options.error();
  out->Encode(&reply->message);
  if (result != CUDA_SUCCESS) return result;
  session.Bind(Kind::kModule, in.module, reinterpret_cast<uint64_t>(module), session.CurrentContext());
  worker.NoteModule(in.module, false, {image.data(), request.payload.size()});
  return CUDA_SUCCESS;
}

CUresult Custom_cuLibraryLoadData(Session& session, const Request& request, const wire::cuLibraryLoadData_Request& in,
                                  wire::cuLibraryLoadData_Reply* out, ReplyBuilder* reply) {
  WorkerSession& worker = Worker(session);
  JitOptions options;
  if (!session.MayBind(Kind::kLibrary, in.library) || !options.Read(in.jit_options, in.jit_option_values)) {
    return kMalformedRequest;
  }
  if (request.payload.empty()) return CUDA_ERROR_INVALID_IMAGE;
  const std::string image = PrivateImage(request);
  CUlibrary library = nullptr;
  const unsigned count = unsigned(options.names.size());
  const CUresult result = session.driver().cuLibraryLoadData(&library, image.data(), count ? options.names.data() : nullptr,
                                                             count ? options.values.data() : nullptr, count, nullptr,
                                                             nullptr, 0);
  out->jit_option_values = options.Outputs();
  out->info_log = options.info();
  out->error_log = options.error();
  out->Encode(&reply->message);
  if (result != CUDA_SUCCESS) return result;
  session.Bind(Kind::kLibrary, in.library, reinterpret_cast<uint64_t>(library), 0);
  worker.NoteModule(in.library, true, {image.data(), request.payload.size()});
  return CUDA_SUCCESS;
}

CUresult Custom_cuModuleGetGlobal_v2(Session& session, const Request&, const wire::cuModuleGetGlobal_v2_Request& in,
                                     wire::cuModuleGetGlobal_v2_Reply* out, ReplyBuilder*) {
  CUmodule module;
  if (!session.Real(Kind::kModule, in.hmod, &module)) return CUDA_ERROR_INVALID_HANDLE;
  CUdeviceptr address = 0;
  size_t bytes = 0;
  const std::string name(in.name);
  const CUresult result = session.driver().cuModuleGetGlobal_v2(&address, &bytes, module, name.c_str());
  if (result != CUDA_SUCCESS) return result;
  out->managed = NoteSymbol(Worker(session), in.hmod, name, address, bytes);
  out->dptr = address;
  out->bytes = bytes;
  return CUDA_SUCCESS;
}

CUresult Custom_cuLibraryGetGlobal(Session& session, const Request&, const wire::cuLibraryGetGlobal_Request& in,
                                   wire::cuLibraryGetGlobal_Reply* out, ReplyBuilder*) {
  CUlibrary library;
  if (!session.Real(Kind::kLibrary, in.library, &library)) return CUDA_ERROR_INVALID_HANDLE;
  CUdeviceptr address = 0;
  size_t bytes = 0;
  const std::string name(in.name);
  const CUresult result = session.driver().cuLibraryGetGlobal(&address, &bytes, library, name.c_str());
  if (result != CUDA_SUCCESS) return result;
  WorkerSession& worker = Worker(session);
  out->managed = NoteSymbol(worker, in.library, name, address, bytes);
  out->dptr = address;
  out->bytes = bytes;
  return CUDA_SUCCESS;
}

CUresult Custom_cuLibraryGetManaged(Session& session, const Request&, const wire::cuLibraryGetManaged_Request& in,
                                    wire::cuLibraryGetManaged_Reply* out, ReplyBuilder*) {
  CUlibrary library;
  if (!session.Real(Kind::kLibrary, in.library, &library)) return CUDA_ERROR_INVALID_HANDLE;
  CUdeviceptr address = 0;
  size_t bytes = 0;
  const std::string name(in.name);
  const CUresult result = session.driver().cuLibraryGetManaged(&address, &bytes, library, name.c_str());
  if (result != CUDA_SUCCESS) return result;
  WorkerSession& worker = Worker(session);
  out->managed = NoteSymbol(worker, in.library, name, address, bytes);
  // The driver says that it is one; an image that does not cannot be understood well enough.
  if (!out->managed) return CUDA_ERROR_NOT_SUPPORTED;
  out->dptr = address;
  out->bytes = bytes;
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
