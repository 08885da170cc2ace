// SPDX-License-Identifier: Apache-2.0
#include "client/calls/function_info.h"

#include <algorithm>

#include "client/calls/kernel_params.h"
#include "client/core/log.h"
#include "client/core/session.h"
#include "proto/codec/operations.gen.h"

namespace cuda_remote::client {
namespace {

Object* FindLocked(Session& session, uint64_t function) CR_REQUIRES_SHARED(session.objects().mutex()) {
  const Kind kind = KindOf(function);
  if (kind != Kind::kFunction && kind != Kind::kKernel) return nullptr;
  return session.objects().handles().Find(kind, function);
}

// The key in other_infos of a kernel on a device that its `info` is not of.
std::string OnDevice(const Object& kernel, int device) {
  return (kernel.settings ? kernel.settings->text : "") + "on " + std::to_string(device);
}

// What is known of it on the device, -1: on any. Null: it has to be asked.
std::shared_ptr<FunctionInfo> KnownLocked(const Object& object, int device) {
  if (!object.info || device < 0 || object.info->device == device) return object.info;
  if (!object.other_infos) return nullptr;
  const auto other = object.other_infos->find(OnDevice(object, device));
  return other == object.other_infos->end() ? nullptr : other->second;
}

}  // namespace

void KeepOtherInfo(Object* object, const std::string& key, std::shared_ptr<FunctionInfo> info) {
  constexpr size_t kMost = 64;
  if (!object->other_infos)
    object->other_infos = std::make_unique<std::map<std::string, std::shared_ptr<FunctionInfo>>>();
  if (object->other_infos->size() > kMost) object->other_infos->clear();
  (*object->other_infos)[key] = std::move(info);
}

CUresult FindFunctionInfo(Call& call, uint64_t function, std::shared_ptr<FunctionInfo>* info, int device) {
  Session& session = call.session();
  call.Borrow(function);
  if (call.WithoutContext()) return CUDA_ERROR_INVALID_CONTEXT;
  const bool any_device = device < 0 || KindOf(function) != Kind::kKernel;
  {
    ReaderLock lock(&session.objects().mutex());
    const Object* object = FindLocked(session, function);
    if (!object) return CUDA_ERROR_INVALID_HANDLE;
    if (const auto known = KnownLocked(*object, any_device ? -1 : device)) {
      *info = known;
      return CUDA_SUCCESS;
    }
  }
  // A kernel is of no context, but loading it lazily needs one.
  uint64_t context = call.thread().current_context();
  if (any_device && context) device = call.device();
  device = std::max(0, device);
  if (!context) context = session.objects().SomeContextOn(device);
  wire::OpFunctionInfo_Request request;
  request.function = function;
  request.device = device;
  std::string message;
  request.Encode(&message);
  Reply reply;
  const CUresult result = session.requests().Operate(kOpFunctionInfo, message, &reply, SlotOf(context));
  if (result != CUDA_SUCCESS) return result;
  wire::OpFunctionInfo_Reply answer;
  if (!answer.Decode(reply.message)) return session.Lose(ChannelStatus::kProtocolError);
  auto fresh = std::make_shared<FunctionInfo>();
  fresh->name = std::string(answer.name);
  uint64_t block = 0;
  for (const auto& parameter : answer.parameters) {
    const uint64_t end = uint64_t(parameter.offset) + parameter.size;
    if (end > kMaxParameterBytes) return session.Lose(ChannelStatus::kProtocolError);
    fresh->params.push_back({parameter.offset, parameter.size});
    if (end > block) block = end;
  }
  fresh->params_bytes = uint32_t(block);
  fresh->attributes.assign(answer.attributes.begin(), answer.attributes.end());
  fresh->device = device;
  WriterLock lock(&session.objects().mutex());
  Object* object = FindLocked(session, function);
  if (!object) return CUDA_ERROR_INVALID_HANDLE;
  *info = fresh;
  if (!object->info) {
    object->info = std::move(fresh);
    session.objects().FunctionsChangedLocked();
  } else if (any_device || object->info->device == device) {
    *info = object->info;  // another thread was faster
  } else {
    KeepOtherInfo(object, OnDevice(*object, device), std::move(fresh));
  }
  return CUDA_SUCCESS;
}

CUresult FindFunctionInfo(Call& call, uint64_t function, const FunctionInfo** info) {
  Session& session = call.session();
  ThreadState::Function& known = call.thread().functions[SlotOf(function) % ThreadState::kFunctions];
  // First the number, then what it stands for: a change in between is noticed the next time.
  const uint64_t epoch = session.objects().function_epoch();
  if (known.handle != function || known.epoch != epoch || !session.objects().Usable(KindOf(function), function)) {
    std::shared_ptr<FunctionInfo> found;
    if (const CUresult result = FindFunctionInfo(call, function, &found); result != CUDA_SUCCESS) return result;
    known = {function, epoch, std::move(found)};
  } else {
    call.Borrow(function);
    if (call.WithoutContext()) return CUDA_ERROR_INVALID_CONTEXT;
  }
  *info = known.info.get();
  return CUDA_SUCCESS;
}

const Device& CurrentDevice(Call& call) {
  // -1: it is gone.
  return call.session().devices()[size_t(std::max(0, call.device()))];
}

}  // namespace cuda_remote::client
