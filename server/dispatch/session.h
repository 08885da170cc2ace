// SPDX-License-Identifier: Apache-2.0
// What a handler needs of the session that it serves: one client's contexts, handles and device memory on this server.
//
// server/worker implements it; nothing in this folder knows how. All handlers run on the executor thread unless they
// defer (Session::Defer), so implementations need no lock for their own state. Everything that came from the client is
// checked here or in the handler before the driver sees it.
#ifndef CUDA_REMOTE_SERVER_DISPATCH_SESSION_H_
#define CUDA_REMOTE_SERVER_DISPATCH_SESSION_H_

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "proto/frame/frame.h"
#include "proto/frame/handle.h"
#include "server/driver/driver_table.h"

namespace cuda_remote::server {

class CustomCalls;

// A request's payload. It may lie in the channel's memory, which the client can write to at any time and fills again
// once the handler has returned. So there are copies of it, but no pointer that could reach the driver (uploads.h).
class Payload {
 public:
  Payload() = default;
  explicit Payload(std::string_view bytes) : bytes_(bytes) {}

  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  void CopyTo(void* memory) const {
    if (!bytes_.empty()) std::memcpy(memory, bytes_.data(), bytes_.size());
  }
  void AppendTo(std::string* text) const { text->append(bytes_); }
  // For readers that copy each byte before they look at it, while the handler runs.
  std::string_view unstable() const { return bytes_; }

 private:
  std::string_view bytes_;
};

// The request being executed. The views are valid until the handler returns.
struct Request {
  FrameHeader header;
  std::string_view message;
  Payload payload;
  bool replay() const { return header.flags & kFlagReplay; }
};

// What a handler fills in besides the CUresult it returns.
struct ReplyBuilder {
  std::string message;    // encoded reply message
  std::string payload;    // bytes for the client's buffer
  bool deferred = false;  // set by Session::Defer: the reply is sent later
};

class Session {
 public:
  virtual ~Session() = default;

  // The real driver's functions. Never null for functions that the loaded driver exports; a missing one is a stub that
  // returns CUDA_ERROR_NOT_SUPPORTED after logging its name.
  virtual const DriverTable& driver() const = 0;

  // The hand-written handlers (custom_calls.gen.h).
  CustomCalls& custom() const { return *custom_; }

  // Real handle of a live virtual handle of `kind`. False if there is none: answer CUDA_ERROR_INVALID_HANDLE.
  virtual bool Real(Kind kind, uint64_t handle, uint64_t* real) const = 0;
  template <typename T>
  bool Real(Kind kind, uint64_t handle, T* real) const {
    uint64_t value;
    if (!Real(kind, handle, &value)) return false;
    *real = (T)value;
    return true;
  }

  // Real stream for a value from the wire: 0, 1 (legacy) and 2 (per thread) pass, others must be live streams.
  virtual bool RealStream(uint64_t wire, CUstream* real) const = 0;

  // Virtual handle of a real one that the client knows; 0 if it does not.
  virtual uint64_t Virtual(Kind kind, uint64_t real) const = 0;

  // Whether the client may bind this virtual handle: right kind, sane slot, not in use. Check before the driver
  // creates.
  virtual bool MayBind(Kind kind, uint64_t handle) const = 0;
  // Binds a virtual handle that MayBind accepted. `parent` is the virtual handle (0: none) that it dies with.
  virtual void Bind(Kind kind, uint64_t handle, uint64_t real, uint64_t parent) = 0;
  // Forgets the handle and all its descendants. The driver has destroyed them already.
  virtual void Unbind(uint64_t handle) = 0;
  // Whether `handle` is `ancestor` or dies with it; a bound handle that dies with `parent` from now on, which must not
  // be under it.
  virtual bool IsUnder(uint64_t handle, uint64_t ancestor) const = 0;
  virtual void SetParent(Kind kind, uint64_t handle, uint64_t parent) = 0;

  // Whether [address, address + bytes) lies inside one live device allocation or module global of this session.
  virtual bool OwnsDeviceRange(CUdeviceptr address, uint64_t bytes) const = 0;
  // The same, or inside one piece of pinned memory.
  virtual bool MayUse(CUdeviceptr address, uint64_t bytes) const = 0;

  // Virtual handle of the context that the request names; 0 for none.
  virtual uint64_t CurrentContext() const = 0;

  // Virtual handle of the kernel whose function in some context this is; 0 if it is none's.
  virtual uint64_t KernelOfFunction(CUfunction function) const {
    (void)function;
    return 0;
  }

  // What a graph's host node calls, with which data, for the client's function `id`: null if there can be no such
  // function.
  virtual CUhostFn HostFunction(uint64_t id, void** data) {
    (void)id, (void)data;
    return nullptr;
  }
  // The id of what HostFunction gave; 0 for anything else.
  virtual uint64_t HostFunctionId(CUhostFn function, void* data) const {
    (void)function, (void)data;
    return 0;
  }

  // Runs `wait` on a waiter thread with the request's context current and replies with what it returns; the executor
  // goes on. `wait` may block on the GPU; it must not touch the Session. The request's views are not valid inside.
  virtual void Defer(ReplyBuilder* reply, std::function<CUresult(std::string* message, std::string* payload)> wait) = 0;

 protected:
  CustomCalls* custom_ = nullptr;  // set by the implementation's constructor
};

// A handler executes one call. It decodes and checks, calls the driver, fills `reply`, and returns the call's result.
using Handler = CUresult (*)(Session& session, const Request& request, ReplyBuilder* reply);

// The handler of a call id or operation; null if the server does not know it. Generated.
Handler FindHandler(uint32_t call);
// The name of a call id or operation, "?" if unknown. Generated.
const char* CallName(uint32_t call);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_DISPATCH_SESSION_H_
