// SPDX-License-Identifier: Apache-2.0
// The two private tables that cuBLASLt asks for and only the real driver can answer (proto/driverabi/README.md).
//
// These functions have no names and no header: what they take was found by watching cuBLASLt with driver 580. A driver
// whose table is of another length may have other functions in it, so it is not called at all.

#include <cuda.h>

#include <cstring>
#include <string>

#include "proto/codec/operations.gen.h"
#include "proto/driverabi/export_tables.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

constexpr uint64_t kStreamTableWords = 93;
constexpr uint64_t kLayoutTableWords = 17;

// Null if the driver has no such table, or one that is not known.
const uint64_t* FindTable(const DriverTable& driver, const driverabi::TableId& id, uint64_t words) {
  CUuuid uuid;
  static_assert(sizeof(uuid) == sizeof(id));
  std::memcpy(&uuid, id.data(), id.size());
  const void* table = nullptr;
  if (driver.cuGetExportTable(&table, &uuid) != CUDA_SUCCESS || table == nullptr) return nullptr;
  const uint64_t* const from = static_cast<const uint64_t*>(table);
  return from[0] == words * sizeof(uint64_t) ? from : nullptr;
}

template <typename Function>
Function Word(const uint64_t* table, int index) {
  return reinterpret_cast<Function>(table[index]);
}

// What the driver keeps for a stream: word 51 gives an object, word 39 its value.
CUresult StreamValue(const DriverTable& driver, CUcontext context, CUstream stream, uint64_t* value) {
  const uint64_t* const table = FindTable(driver, driverabi::kStreamTable, kStreamTableWords);
  if (!table) return CUDA_ERROR_NOT_SUPPORTED;
  void* object = nullptr;
  const auto get_object = Word<CUresult (*)(CUcontext, CUstream, void**)>(table, 51);
  const auto get_value = Word<CUresult (*)(CUcontext, void*, uint64_t*)>(table, 39);
  const CUresult result = get_object(context, stream, &object);
  return result == CUDA_SUCCESS ? get_value(context, object, value) : result;
}

// Two arrays from the driver, one byte for each pair of multiprocessors, one behind the other in `out`.
CUresult PairLayout(const DriverTable& driver, size_t pairs, std::string* out) {
  const uint64_t* const table = FindTable(driver, driverabi::kLayoutTable, kLayoutTableWords);
  if (!table) return CUDA_ERROR_NOT_SUPPORTED;
  uint8_t* clusters = nullptr;
  uint8_t* numbers = nullptr;
  const CUresult result = Word<CUresult (*)(uint8_t**, uint8_t**)>(table, 4)(&clusters, &numbers);
  if (result != CUDA_SUCCESS) return result;
  if (!clusters || !numbers) return CUDA_ERROR_NOT_SUPPORTED;
  out->assign(reinterpret_cast<const char*>(clusters), pairs);
  out->append(reinterpret_cast<const char*>(numbers), pairs);
  Word<CUresult (*)(uint8_t*, uint8_t*)>(table, 13)(clusters, numbers);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult OpExportTable(WorkerSession& session, const Request&, const wire::OpExportTable_Request& in,
                       wire::OpExportTable_Reply* out, ReplyBuilder* reply) {
  const auto is = [&in](const driverabi::TableId& id, uint32_t word, size_t arguments) {
    return in.table == std::string_view(reinterpret_cast<const char*>(id.data()), id.size()) && in.word == word &&
           in.arguments.size() == arguments;
  };
  CUresult result = CUDA_SUCCESS;
  std::string layout;
  if (is(driverabi::kStreamTable, 39, 1)) {
    CUstream stream;
    uint64_t value = 0;
    if (!session.RealStream(in.arguments[0], &stream)) return CUDA_ERROR_INVALID_HANDLE;
    result = StreamValue(session.driver(), session.contexts().current_ref().real, stream, &value);
    out->values.push_back(value);
  } else if (is(driverabi::kLayoutTable, 4, 0)) {
    const ContextInfo* const context = session.contexts().Find(session.CurrentContext());
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    const DeviceFacts& facts = session.loaded().devices[size_t(context->device)];
    const int32_t multiprocessors = facts.attributes[CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT];
    if (multiprocessors <= 0) return CUDA_ERROR_NOT_SUPPORTED;
    result = PairLayout(session.driver(), size_t(multiprocessors) / 2, &layout);
    out->data = layout;
  } else {
    return kMalformedRequest;
  }
  if (result == CUDA_SUCCESS) out->Encode(&reply->message);
  return result;
}

}  // namespace cuda_remote::server
