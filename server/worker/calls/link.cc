// SPDX-License-Identifier: Apache-2.0
// The JIT linker. Its state keeps the client's options, with buffers of our own for the logs, for as long as it lives:
// the driver writes into them at every step, and every answer brings along what is in them.

#include <cuda.h>

#include <memory>
#include <string>

#include "proto/codec/module.gen.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/modules/jit_options.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

LinkFacts* Find(WorkerSession& session, uint64_t handle, CUlinkState* state) {
  if (!session.Real(Kind::kLinkState, handle, state)) return nullptr;
  auto& links = session.links();
  const auto it = links.find(handle);
  return it == links.end() ? nullptr : &it->second;
}

}  // namespace

CUresult Custom_cuLinkCreate_v2(WorkerSession& session, const Request&, const wire::cuLinkCreate_v2_Request& in,
                                wire::cuLinkCreate_v2_Reply*, ReplyBuilder*) {
  auto options = std::make_unique<JitOptions>();
  if (!session.MayBind(Kind::kLinkState, in.state) || !options->Read(in.options, in.option_values)) {
    return kMalformedRequest;
  }
  CUlinkState state = nullptr;
  const CUresult result =
      session.driver().cuLinkCreate_v2(options->count(), options->name_array(), options->value_array(), &state);
  if (result != CUDA_SUCCESS) return result;
  session.Bind(Kind::kLinkState, in.state, reinterpret_cast<uint64_t>(state), session.CurrentContext());
  session.links()[in.state].options = std::move(options);
  return CUDA_SUCCESS;
}

CUresult Custom_cuLinkAddData_v2(WorkerSession& session, const Request& request,
                                 const wire::cuLinkAddData_v2_Request& in, wire::cuLinkAddData_v2_Reply* out,
                                 ReplyBuilder* reply) {
  CUlinkState state;
  LinkFacts* const link = Find(session, in.state, &state);
  if (link == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  JitOptions options;
  if (!options.Read(in.options, in.option_values)) return kMalformedRequest;
  if (request.payload.empty() || in.type < 0 || in.type >= CU_JIT_NUM_INPUT_TYPES) return CUDA_ERROR_INVALID_VALUE;
  // The client can still write to the channel's memory: a copy that cannot change, with zeros behind it for text.
  std::string data;
  data.reserve(request.payload.size() + 8);
  request.payload.AppendTo(&data);
  data.append(8, '\0');
  // Text counts its ending zero or not, as the caller had it.
  const std::string name(in.name);
  const CUresult result = session.driver().cuLinkAddData_v2(
      state, CUjitInputType(in.type), &data[0], request.payload.size(), in.has_name ? name.c_str() : nullptr,
      options.count(), options.name_array(), options.value_array());
  out->info_log = options.info();
  out->error_log = options.error();
  out->option_values = options.Outputs();
  out->state_info_log = link->options->info();
  out->state_error_log = link->options->error();
  out->state_option_values = link->options->Outputs();
  out->Encode(&reply->message);
  return result;
}

CUresult Custom_cuLinkComplete(WorkerSession& session, const Request&, const wire::cuLinkComplete_Request& in,
                               wire::cuLinkComplete_Reply* out, ReplyBuilder* reply) {
  CUlinkState state;
  LinkFacts* const link = Find(session, in.state, &state);
  if (link == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (in.fetch) {
    if (link->image.empty()) return CUDA_ERROR_INVALID_VALUE;
    reply->payload.swap(link->image);  // fetched once
    return CUDA_SUCCESS;
  }
  void* image = nullptr;
  size_t bytes = 0;
  CUresult result = session.driver().cuLinkComplete(state, &image, &bytes);
  if (result == CUDA_SUCCESS && (image == nullptr || bytes == 0)) result = CUDA_ERROR_UNKNOWN;
  if (result == CUDA_SUCCESS) {
    link->image.assign(static_cast<const char*>(image), bytes);
    out->bytes = bytes;
  }
  out->info_log = link->options->info();
  out->error_log = link->options->error();
  out->option_values = link->options->Outputs();
  out->Encode(&reply->message);
  return result;
}

CUresult Custom_cuLinkDestroy(WorkerSession& session, const Request&, const wire::cuLinkDestroy_Request& in,
                              wire::cuLinkDestroy_Reply*, ReplyBuilder*) {
  CUlinkState state;
  if (!session.Real(Kind::kLinkState, in.state, &state)) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult result = session.driver().cuLinkDestroy(state);
  if (result == CUDA_SUCCESS) session.Unbind(in.state);  // takes the facts along
  return result;
}

}  // namespace cuda_remote::server
