// SPDX-License-Identifier: Apache-2.0
// What graphs have besides nodes: user objects of the application, and a drawing of themselves.

#include <cuda.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>

#include "proto/codec/graph.gen.h"
#include "proto/codec/operations.gen.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// A piece of a drawing, well below the longest message.
constexpr size_t kPiece = 512 << 10;

// What the driver gives back when nothing refers to the object any more.
struct Owned {
  std::shared_ptr<WorkerSession::GoneObjects> gone;
  uint64_t handle;
};

}  // namespace

// The driver counts the references, those of graphs and executables among them; its destructor tells the client.
CUresult Custom_cuUserObjectCreate(WorkerSession& session, const Request&, const wire::cuUserObjectCreate_Request& in,
                                   wire::cuUserObjectCreate_Reply*, ReplyBuilder*) {
  if (!session.MayBind(Kind::kUserObject, in.object)) return kMalformedRequest;
  auto owned = std::make_unique<Owned>(Owned{session.gone_objects(), in.object});
  CUuserObject object = nullptr;
  const CUresult result = session.driver().cuUserObjectCreate(
      &object, owned.get(),
      [](void* data) {
        const std::unique_ptr<Owned> owned(static_cast<Owned*>(data));
        owned->gone->Announce(owned->handle);
      },
      in.count, in.flags);
  if (result != CUDA_SUCCESS) return result;
  static_cast<void>(owned.release());  // the user object's
  session.Bind(Kind::kUserObject, in.object, reinterpret_cast<uint64_t>(object), 0);
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphDebugDotPrint(WorkerSession& session, const Request&,
                                     const wire::cuGraphDebugDotPrint_Request& in,
                                     wire::cuGraphDebugDotPrint_Reply* out, ReplyBuilder* reply) {
  CUgraph graph;
  if (!session.Real(Kind::kGraph, in.graph, &graph)) return CUDA_ERROR_INVALID_VALUE;
  const int fd = memfd_create("graph", MFD_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  CUresult result = session.driver().cuGraphDebugDotPrint(graph, path.c_str(), in.flags);
  struct stat facts = {};
  std::string text;
  if (result == CUDA_SUCCESS && fstat(fd, &facts) == 0) {
    out->total = uint64_t(facts.st_size);
    if (in.offset < out->total) {
      text.resize(std::min<uint64_t>(kPiece, out->total - in.offset));
      const ssize_t got = pread(fd, text.data(), text.size(), off_t(in.offset));
      text.resize(got > 0 ? size_t(got) : 0);
    }
  }
  close(fd);
  out->text = text;
  out->Encode(&reply->message);  // the view points to a local
  return result;
}

}  // namespace cuda_remote::server
