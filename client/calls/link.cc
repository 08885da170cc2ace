// SPDX-License-Identifier: Apache-2.0
// The JIT linker. Inputs go to the server as they are added, so an error comes from the call that natively gives it.
// What was linked is kept here: the application's pointer to it is good until cuLinkDestroy, also across a restart.
//
// In the log a state is an object, and each input one that depends on it; linking makes the inputs superfluous.

#include <cuda.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/image_file.h"
#include "client/calls/jit_options.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// A state's own facts. The option values stay the application's: the driver writes results there until the state is
// destroyed, so the caller has to keep the array, as natively.
struct Link {
  std::vector<CUjit_option> options;
  std::vector<void*> given;  // the values as they were, with the log buffers' room
  void** values = nullptr;
  std::string image;  // once linked
};

Mutex g_mutex;
std::unordered_map<uint64_t, std::shared_ptr<Link>>& LinksLocked() CR_REQUIRES(g_mutex) {
  static auto* const links = new std::unordered_map<uint64_t, std::shared_ptr<Link>>;
  return *links;
}

std::shared_ptr<Link> Find(Call& call, uint64_t state) {
  if (!call.Valid(Kind::kLinkState, state)) return nullptr;
  MutexLock lock(&g_mutex);
  const auto it = LinksLocked().find(state);
  return it == LinksLocked().end() ? nullptr : it->second;
}

// Puts what the driver wrote so far into the application's buffers and values.
void Deliver(const Link& link, const std::vector<uint64_t>& values, std::string_view info, std::string_view error) {
  if (!link.values) return;
  UnpackJitOptions(unsigned(link.options.size()), link.options.data(), link.given.data(), link.values, values, info,
                   error);
}

CUresult AddData(const CallInfo& info, CUlinkState state, CUjitInputType type, const void* data, size_t size,
                 const char* name, unsigned numOptions, CUjit_option* options, void** optionValues) {
  if (!data || size == 0) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuLinkAddData_v2_Request request;
  request.state = reinterpret_cast<uint64_t>(state);
  const std::shared_ptr<Link> link = Find(call, request.state);
  if (!link) return CUDA_ERROR_INVALID_HANDLE;
  if (!link->image.empty()) return CUDA_ERROR_INVALID_VALUE;  // linked already
  request.type = type;
  request.has_name = name != nullptr;
  if (name) request.name = name;
  if (const CUresult result =
          PackJitOptions(call.info().name, numOptions, options, optionValues, &request.options, &request.option_values);
      result != CUDA_SUCCESS) {
    return result;
  }
  const uint64_t input = call.NewHandle(Kind::kLinkState, request.state);
  if (!input) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  call.SetPayload({static_cast<const char*>(data), size});
  const CUresult result = call.Transact();
  wire::cuLinkAddData_v2_Reply reply;
  if (reply.Decode(call.reply())) {
    UnpackJitOptions(numOptions, options, optionValues, optionValues, reply.option_values, reply.info_log,
                     reply.error_log);
    Deliver(*link, reply.state_option_values, reply.state_info_log, reply.state_error_log);
  }
  if (result == CUDA_SUCCESS) call.Created({Kind::kLinkState, input});
  return result;
}

}  // namespace

CUresult Custom_cuLinkCreate_v2(unsigned int numOptions, CUjit_option* options, void** optionValues,
                                CUlinkState* stateOut) {
  if (!stateOut) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuLinkCreate_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuLinkCreate_v2_Request request;
  if (const CUresult result =
          PackJitOptions(call.info().name, numOptions, options, optionValues, &request.options, &request.option_values);
      result != CUDA_SUCCESS) {
    return result;
  }
  request.state = call.NewHandle(Kind::kLinkState, 0);
  if (!request.state) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Created({Kind::kLinkState, request.state});
  auto link = std::make_shared<Link>();
  if (numOptions) {
    link->options.assign(options, options + numOptions);
    link->given.assign(optionValues, optionValues + numOptions);
    link->values = optionValues;
  }
  MutexLock lock(&g_mutex);
  LinksLocked()[request.state] = std::move(link);
  *stateOut = reinterpret_cast<CUlinkState>(request.state);
  return CUDA_SUCCESS;
}

CUresult Custom_cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void* data, size_t size, const char* name,
                                 unsigned int numOptions, CUjit_option* options, void** optionValues) {
  return AddData(info::k_cuLinkAddData_v2, state, type, data, size, name, numOptions, options, optionValues);
}

// The file is the application's: it is read here.
CUresult Custom_cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char* path, unsigned int numOptions,
                                 CUjit_option* options, void** optionValues) {
  if (!path) return CUDA_ERROR_INVALID_VALUE;
  std::string bytes;
  if (const CUresult result = ReadImageFile(path, &bytes); result != CUDA_SUCCESS) return result;
  // The ending zero belongs to text only.
  const size_t size = type == CU_JIT_INPUT_PTX ? bytes.size() : bytes.size() - 1;
  return AddData(info::k_cuLinkAddFile_v2, state, type, bytes.data(), size, path, numOptions, options, optionValues);
}

CUresult Custom_cuLinkComplete(CUlinkState state, void** cubinOut, size_t* sizeOut) {
  if (!cubinOut) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuLinkComplete);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuLinkComplete_Request request;
  request.state = reinterpret_cast<uint64_t>(state);
  const std::shared_ptr<Link> link = Find(call, request.state);
  if (!link) return CUDA_ERROR_INVALID_HANDLE;
  if (link->image.empty()) {
    request.Encode(&call.message());
    const CUresult result = call.Transact();
    wire::cuLinkComplete_Reply reply;
    if (reply.Decode(call.reply())) Deliver(*link, reply.option_values, reply.info_log, reply.error_log);
    if (result != CUDA_SUCCESS) return result;
    std::string image;
    try {
      image.resize(reply.bytes);
    } catch (...) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    request.fetch = true;
    call.message().clear();
    request.Encode(&call.message());
    call.SetReplyPayload(&image[0], image.size());
    if (const CUresult fetched = call.Transact(); fetched != CUDA_SUCCESS) return fetched;
    if (image.empty() || call.reply_payload_bytes() != image.size()) {
      return call.session().Lose(ChannelStatus::kProtocolError);
    }
    link->image = std::move(image);
    // The inputs are not needed any more, nor what was answered about them.
    call.session().answers().Forget();
    WriterLock lock(&call.session().objects().mutex());
    call.session().objects().DropDependentsLocked({Kind::kLinkState, request.state});
  }
  *cubinOut = &link->image[0];
  if (sizeOut) *sizeOut = link->image.size();
  return CUDA_SUCCESS;
}

CUresult Custom_cuLinkDestroy(CUlinkState state) {
  Call call(info::k_cuLinkDestroy);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuLinkDestroy_Request request;
  request.state = reinterpret_cast<uint64_t>(state);
  if (!Find(call, request.state)) return CUDA_ERROR_INVALID_HANDLE;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  call.Destroyed({Kind::kLinkState, request.state});
  MutexLock lock(&g_mutex);
  LinksLocked().erase(request.state);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
