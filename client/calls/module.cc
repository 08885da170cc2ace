// SPDX-License-Identifier: Apache-2.0
// Modules and libraries. Their images travel as payload, and the log keeps each image once, by content.

#include <cuda.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/image_file.h"
#include "client/calls/jit_options.h"
#include "client/calls/managed.h"
#include "client/core/call.h"
#include "client/core/log.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"
#include "replay/modimg/image_size.h"

namespace cuda_remote::client {
namespace {

constexpr const CallInfo& kLoadModule = info::k_cuModuleLoadData;
constexpr const CallInfo& kLoadLibrary = info::k_cuLibraryLoadData;

// Held from a load's request to its record, so that the log has loads of several threads in the server's order: where
// their variables lie depends on it.
std::mutex& LoadOrder() {
  static auto* const mutex = new std::mutex;  // outlives exit handlers
  return *mutex;
}

// The image's own bytes: a fat binary's wrapper struct is resolved to what it points to.
CUresult FindImage(const void* image, std::string_view* bytes) {
  const StatusOr<std::string_view> found = replay::LocateImage(image);
  if (!found.ok()) {
    LogLine("a module image is not one that this version knows: %s", found.status().message().c_str());
    return CUDA_ERROR_INVALID_IMAGE;
  }
  *bytes = *found;
  return CUDA_SUCCESS;
}

// What the server said to a module or library. Libraries hide this error behind one of their own, so the program's
// user is told; once, as they may try all of their modules.
CUresult Refused(CUresult result) {
  static std::atomic<bool> said{false};
  if (result == CUDA_ERROR_NO_BINARY_FOR_GPU && !said.exchange(true)) {
    LogLine(
        "the server's GPU cannot run the code of a module (CUDA_ERROR_NO_BINARY_FOR_GPU). The software GPU runs PTX "
        "only: "
        "most kernels of cuBLAS, cuDNN and similar libraries exist as machine code alone and need a real GPU");
  }
  return result;
}

CUresult LoadModule(CUmodule* module, const void* image, unsigned numOptions, CUjit_option* options,
                    void** optionValues) {
  if (!module || !image) return CUDA_ERROR_INVALID_VALUE;
  Call call(kLoadModule);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  std::string_view bytes;
  if (const CUresult result = FindImage(image, &bytes); result != CUDA_SUCCESS) return result;
  wire::cuModuleLoadData_Request request;
  if (const CUresult result = PackJitOptions("cuModuleLoadDataEx", numOptions, options, optionValues, &request.options,
                                             &request.option_values);
      result != CUDA_SUCCESS) {
    return result;
  }
  request.module = call.NewHandle(Kind::kModule, 0);
  if (!request.module) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  const std::lock_guard<std::mutex> in_order(LoadOrder());
  call.SetPayload(bytes);
  const CUresult result = call.Transact();
  wire::cuModuleLoadData_Reply reply;
  if (reply.Decode(call.reply())) {
    UnpackJitOptions(numOptions, options, optionValues, optionValues, reply.option_values, reply.info_log,
                     reply.error_log);
  }
  if (result != CUDA_SUCCESS) return Refused(result);
  request.places = reply.places;
  request.code_contexts = reply.code_contexts;
  request.code = reply.code;
  call.message().clear();
  request.Encode(&call.message());
  call.Created({Kind::kModule, request.module});
  *module = reinterpret_cast<CUmodule>(request.module);
  return CUDA_SUCCESS;
}

CUresult LoadLibrary(const char* name, CUlibrary* library, const void* code, CUjit_option* jitOptions,
                     void** jitOptionsValues, unsigned numJitOptions, CUlibraryOption* libraryOptions,
                     void** libraryOptionValues, unsigned numLibraryOptions) {
  if (!library || !code) return CUDA_ERROR_INVALID_VALUE;
  Call call(kLoadLibrary);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  std::string_view bytes;
  if (const CUresult result = FindImage(code, &bytes); result != CUDA_SUCCESS) return result;
  wire::cuLibraryLoadData_Request request;
  if (const CUresult result = PackJitOptions(name, numJitOptions, jitOptions, jitOptionsValues, &request.jit_options,
                                             &request.jit_option_values);
      result != CUDA_SUCCESS) {
    return result;
  }
  for (unsigned i = 0; i < numLibraryOptions; ++i) {
    // Both are about memory of this process: the table would let the GPU call host functions by address, and the other
    // one promises that the image stays where it is. The server has a copy of its own.
    if (libraryOptions[i] != CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE &&
        libraryOptions[i] != CU_LIBRARY_BINARY_IS_PRESERVED) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  request.library = call.NewHandle(Kind::kLibrary, kNoParent);
  if (!request.library) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  const std::lock_guard<std::mutex> in_order(LoadOrder());
  call.SetPayload(bytes);
  const CUresult result = call.Transact();
  wire::cuLibraryLoadData_Reply reply;
  if (reply.Decode(call.reply())) {
    UnpackJitOptions(numJitOptions, jitOptions, jitOptionsValues, jitOptionsValues, reply.jit_option_values,
                     reply.info_log, reply.error_log);
  }
  if (result != CUDA_SUCCESS) return Refused(result);
  request.places = reply.places;
  request.place_contexts = reply.place_contexts;
  request.other_places = reply.other_places;
  request.code_contexts = reply.code_contexts;
  request.code = reply.code;
  call.message().clear();
  request.Encode(&call.message());
  call.Created({Kind::kLibrary, request.library});
  *library = reinterpret_cast<CUlibrary>(request.library);
  return CUDA_SUCCESS;
}

// A variable's address is what the driver gave it. It is recorded with its address, so that a restart on a server that
// would put it elsewhere stops instead of leaving stale pointers behind.
template <typename Request, typename Reply>
CUresult GetGlobal(const CallInfo& info, Kind kind, uint64_t owner, const char* name, CUdeviceptr* dptr, size_t* bytes,
                   void (*fill)(Request*, uint64_t, const char*)) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(kind, owner)) return CUDA_ERROR_INVALID_HANDLE;
  Request request;
  fill(&request, owner, name);
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  if (reply.managed) {
    if (const CUresult result = ShareVariable(call, reply.dptr, reply.bytes, info.name); result != CUDA_SUCCESS)
      return result;
  }
  DeviceRange range;
  range.source = DeviceRange::kGlobal;
  range.managed = range.sync_memops = reply.managed;
  range.context = call.thread().current_context();
  range.device = std::max(0, call.device());
  {
    WriterLock lock(&call.session().memory().mutex());
    range.buffer_id = call.session().memory().NextBufferIdLocked();
    call.session().memory().device_ranges().Insert(reply.dptr, reply.bytes, range);
  }
  call.Created({Kind::kVariable, reply.dptr}, {{kind, owner}});
  if (dptr) *dptr = reply.dptr;
  if (bytes) *bytes = reply.bytes;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult ReadImageFile(const char* path, std::string* image) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_FILE_NOT_FOUND;
  struct stat facts;
  if (fstat(fd, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    close(fd);
    return CUDA_ERROR_FILE_NOT_FOUND;
  }
  image->resize(size_t(facts.st_size) + 1);
  size_t done = 0;
  while (done < size_t(facts.st_size)) {
    const ssize_t n = read(fd, &(*image)[done], size_t(facts.st_size) - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += size_t(n);
  }
  close(fd);
  return done == size_t(facts.st_size) ? CUDA_SUCCESS : CUDA_ERROR_FILE_NOT_FOUND;
}

CUresult Custom_cuModuleLoadData(CUmodule* module, const void* image) {
  return LoadModule(module, image, 0, nullptr, nullptr);
}

CUresult Custom_cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int numOptions, CUjit_option* options,
                                   void** optionValues) {
  return LoadModule(module, image, numOptions, options, optionValues);
}

CUresult Custom_cuModuleLoadFatBinary(CUmodule* module, const void* fatCubin) {
  return LoadModule(module, fatCubin, 0, nullptr, nullptr);
}

CUresult Custom_cuModuleLoad(CUmodule* module, const char* fname) {
  if (!module || !fname) return CUDA_ERROR_INVALID_VALUE;
  std::string image;
  if (const CUresult result = ReadImageFile(fname, &image); result != CUDA_SUCCESS) return result;
  return LoadModule(module, image.data(), 0, nullptr, nullptr);
}

CUresult Custom_cuModuleUnload(CUmodule hmod) {
  Call call(info::k_cuModuleUnload);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuModuleUnload_Request request;
  request.hmod = reinterpret_cast<uint64_t>(hmod);
  if (!call.Valid(Kind::kModule, request.hmod)) return CUDA_ERROR_INVALID_HANDLE;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  call.Destroyed({Kind::kModule, request.hmod});
  return CUDA_SUCCESS;
}

CUresult Custom_cuModuleGetGlobal_v2(CUdeviceptr* dptr, size_t* bytes, CUmodule hmod, const char* name) {
  using Request = wire::cuModuleGetGlobal_v2_Request;
  return GetGlobal<Request, wire::cuModuleGetGlobal_v2_Reply>(info::k_cuModuleGetGlobal_v2, Kind::kModule,
                                                              reinterpret_cast<uint64_t>(hmod), name, dptr, bytes,
                                                              [](Request* request, uint64_t owner, const char* symbol) {
                                                                request->hmod = owner;
                                                                request->name = symbol;
                                                              });
}

CUresult Custom_cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jitOptions,
                                  void** jitOptionsValues, unsigned int numJitOptions, CUlibraryOption* libraryOptions,
                                  void** libraryOptionValues, unsigned int numLibraryOptions) {
  return LoadLibrary("cuLibraryLoadData", library, code, jitOptions, jitOptionsValues, numJitOptions, libraryOptions,
                     libraryOptionValues, numLibraryOptions);
}

CUresult Custom_cuLibraryLoadFromFile(CUlibrary* library, const char* fileName, CUjit_option* jitOptions,
                                      void** jitOptionsValues, unsigned int numJitOptions,
                                      CUlibraryOption* libraryOptions, void** libraryOptionValues,
                                      unsigned int numLibraryOptions) {
  if (!library || !fileName) return CUDA_ERROR_INVALID_VALUE;
  std::string image;
  if (const CUresult result = ReadImageFile(fileName, &image); result != CUDA_SUCCESS) return result;
  return LoadLibrary("cuLibraryLoadFromFile", library, image.data(), jitOptions, jitOptionsValues, numJitOptions,
                     libraryOptions, libraryOptionValues, numLibraryOptions);
}

CUresult Custom_cuLibraryUnload(CUlibrary library) {
  Call call(info::k_cuLibraryUnload);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuLibraryUnload_Request request;
  request.library = reinterpret_cast<uint64_t>(library);
  if (!call.Valid(Kind::kLibrary, request.library)) return CUDA_ERROR_INVALID_HANDLE;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  call.Destroyed({Kind::kLibrary, request.library});
  return CUDA_SUCCESS;
}

CUresult Custom_cuLibraryGetManaged(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name) {
  using Request = wire::cuLibraryGetManaged_Request;
  return GetGlobal<Request, wire::cuLibraryGetManaged_Reply>(info::k_cuLibraryGetManaged, Kind::kLibrary,
                                                             reinterpret_cast<uint64_t>(library), name, dptr, bytes,
                                                             [](Request* request, uint64_t owner, const char* symbol) {
                                                               request->library = owner;
                                                               request->name = symbol;
                                                             });
}

CUresult Custom_cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name) {
  using Request = wire::cuLibraryGetGlobal_Request;
  return GetGlobal<Request, wire::cuLibraryGetGlobal_Reply>(info::k_cuLibraryGetGlobal, Kind::kLibrary,
                                                            reinterpret_cast<uint64_t>(library), name, dptr, bytes,
                                                            [](Request* request, uint64_t owner, const char* symbol) {
                                                              request->library = owner;
                                                              request->name = symbol;
                                                            });
}

}  // namespace cuda_remote::client
