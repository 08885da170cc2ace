// SPDX-License-Identifier: Apache-2.0
// What generated handlers use besides Session: copying hostile bytes into driver types, and nothing else.
//
// Errors: kMalformedRequest means that no correct client can have sent the request; the executor ends that session with
// a logged reason and touches no other (docs/architecture.md, Security).
#ifndef CUDA_REMOTE_SERVER_DISPATCH_RUNTIME_H_
#define CUDA_REMOTE_SERVER_DISPATCH_RUNTIME_H_

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "proto/api/attribute_sizes.h"
#include "proto/frame/frame.h"
#include "server/dispatch/malformed.h"
#include "server/dispatch/session.h"

namespace cuda_remote::server {

// Copies a struct that came as bytes. False if the length is not exactly the struct's.
inline bool CopyExactly(std::string_view bytes, void* to, size_t size) {
  if (bytes.size() != size) return false;
  std::memcpy(to, bytes.data(), size);
  return true;
}

// Copies an array of `count` plain elements. False if the length does not fit. An array without elements has an
// address, too: the driver refuses null where the application gave one.
template <typename T>
bool CopyArray(std::string_view bytes, uint64_t count, std::vector<T>* to) {
  if (count > bytes.size() / sizeof(T) || bytes.size() != count * sizeof(T)) return false;
  to->reserve(count + 1);
  to->resize(count);
  if (count != 0) std::memcpy(to->data(), bytes.data(), bytes.size());
  return true;
}

// Translates an array of `count` virtual handles. False if one is unknown or the length does not fit.
template <typename T>
bool CopyHandles(const Session& session, Kind kind, std::string_view bytes, uint64_t count, std::vector<T>* to) {
  if (count > bytes.size() / 8 || bytes.size() != count * 8) return false;
  to->resize(count);
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t handle;
    std::memcpy(&handle, bytes.data() + 8 * i, 8);
    if (!session.Real(kind, handle, &(*to)[i])) return false;
  }
  return true;
}

// Makes room for `count` results. False if they could not fit into a reply.
template <typename T>
bool Room(uint64_t count, std::vector<T>* to) {
  if (count > kMaxMessageBytes / sizeof(T) / 2) return false;
  to->resize(count + 1);
  return true;
}

// The bytes of the first `count` results that the driver filled in.
template <typename T>
std::string_view Filled(const std::vector<T>& values, uint64_t count) {
  if (count > values.size()) count = values.size();
  return {reinterpret_cast<const char*>(values.data()), count * sizeof(T)};
}

// Translates the first `count` real handles back. False if the client knows one of them not.
template <typename T>
bool VirtualHandles(const Session& session, Kind kind, const std::vector<T>& values, uint64_t count, std::string* out) {
  for (uint64_t i = 0; i < count && i < values.size(); ++i) {
    const uint64_t handle = session.Virtual(kind, uint64_t(values[i]));
    if (handle == 0 && values[i] != nullptr) return false;
    out->append(reinterpret_cast<const char*>(&handle), 8);
  }
  return true;
}

// Logs that a call's result names an object that the client has never seen; returns CUDA_ERROR_NOT_SUPPORTED.
CUresult UnknownHandle(const Request& request);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_DISPATCH_RUNTIME_H_
