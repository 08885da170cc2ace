// SPDX-License-Identifier: Apache-2.0
// What graphs have besides nodes: user objects of the application, and a drawing of themselves.

#include <cuda.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {

// The server's driver counts the references; when there are none left, it has this process call the destructor.
CUresult Custom_cuUserObjectCreate(CUuserObject* object_out, void* ptr, CUhostFn destroy, unsigned int initialRefcount,
                                   unsigned int flags) {
  if (!object_out || !destroy || initialRefcount == 0) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuUserObjectCreate);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.session().host_functions().Start()) return CUDA_ERROR_OUT_OF_MEMORY;
  wire::cuUserObjectCreate_Request request;
  request.object = call.NewHandle(Kind::kUserObject, kNoParent);
  if (!request.object) return CUDA_ERROR_OUT_OF_MEMORY;
  request.count = initialRefcount;
  request.flags = flags;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.session().host_functions().RegisterObject(request.object, destroy, ptr);
  call.Created({Kind::kUserObject, request.object});
  *object_out = reinterpret_cast<CUuserObject>(request.object);
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphDebugDotPrint(CUgraph hGraph, const char* path, unsigned int flags) {
  if (!path) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuGraphDebugDotPrint);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphDebugDotPrint_Request request;
  request.graph = reinterpret_cast<uint64_t>(hGraph);
  if (!call.Valid(Kind::kGraph, request.graph)) return CUDA_ERROR_INVALID_VALUE;
  request.flags = flags;
  std::string text;
  wire::cuGraphDebugDotPrint_Reply reply;
  do {
    request.offset = text.size();
    call.message().clear();
    request.Encode(&call.message());
    if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
    if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
    text.append(reply.text);
  } while (!reply.text.empty() && text.size() < reply.total);
  const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  bool good = true;
  for (size_t written = 0; good && written < text.size();) {
    const ssize_t n = write(fd, text.data() + written, text.size() - written);
    if (n < 0 && errno == EINTR) continue;
    good = n > 0;
    if (good) written += size_t(n);
  }
  if (close(fd) != 0) good = false;
  return good ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

}  // namespace cuda_remote::client
