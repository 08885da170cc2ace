// SPDX-License-Identifier: Apache-2.0
#include "client/custom/function_info.h"

#include <algorithm>

#include "client/session/log.h"
#include "client/session/session.h"
#include "proto/codec/operations.gen.h"

namespace cuda_remote::client {
namespace {

// Largest parameter block that CUDA allows.
constexpr uint64_t kMaxParameterBytes = 32764;

Object* FindLocked(Session& session, uint64_t function) CR_REQUIRES_SHARED(session.mutex()) {
  const Kind kind = KindOf(function);
  if (kind != Kind::kFunction && kind != Kind::kKernel) return nullptr;
  return session.handles().Find(kind, function);
}

}  // namespace

CUresult FindFunctionInfo(Call& call, uint64_t function, std::shared_ptr<FunctionInfo>* info, int device) {
  Session& session = call.session();
  call.Borrow(function);
  if (call.WithoutContext()) return CUDA_ERROR_INVALID_CONTEXT;
  {
    ReaderLock lock(&session.mutex());
    const Object* object = FindLocked(session, function);
    if (!object) return CUDA_ERROR_INVALID_HANDLE;
    if (object->info) {
      *info = object->info;
      return CUDA_SUCCESS;
    }
  }
  // A kernel is of no context, but loading it lazily needs one.
  uint64_t context = call.thread().current_context();
  if (context) {
    device = std::max(0, session.DeviceOf(context));
  } else {
    context = session.SomeContextOn(device);
  }
  wire::OpFunctionInfo_Request request;
  request.function = function;
  request.device = device;
  std::string message;
  request.Encode(&message);
  Reply reply;
  const CUresult result = session.Operate(kOpFunctionInfo, message, &reply, SlotOf(context));
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
  WriterLock lock(&session.mutex());
  Object* object = FindLocked(session, function);
  if (!object) return CUDA_ERROR_INVALID_HANDLE;
  if (!object->info) {
    object->info = std::move(fresh);
    session.FunctionsChangedLocked();
  }
  *info = object->info;
  return CUDA_SUCCESS;
}

CUresult FindFunctionInfo(Call& call, uint64_t function, const FunctionInfo** info) {
  Session& session = call.session();
  ThreadState::Function& known = call.thread().functions[SlotOf(function) % ThreadState::kFunctions];
  // First the number, then what it stands for: a change in between is noticed the next time.
  const uint64_t epoch = session.function_epoch();
  if (known.handle != function || known.epoch != epoch || !session.Usable(KindOf(function), function)) {
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
  ThreadState& thread = call.thread();
  const uint64_t context = thread.current_context();
  if (thread.device_context != context) {
    const int device = call.session().DeviceOf(context);
    if (device < 0) return call.session().devices()[0];  // it is gone
    thread.device = device;
    thread.device_context = context;
  }
  return call.session().devices()[thread.device];
}

}  // namespace cuda_remote::client
