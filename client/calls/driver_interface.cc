// SPDX-License-Identifier: Apache-2.0
// What the driver library answers about itself: error names, and the private export tables.

#include <cuda.h>

#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/log.h"
#include "client/core/session.h"
#include "client/trace/trace.h"
#include "proto/codec/codec.h"
#include "proto/driverabi/error_names.h"
#include "proto/driverabi/export_tables.h"

namespace cuda_remote::client {
namespace {

CUresult DeviceUuid(CUdevice device, CUuuid* uuid) { return Custom_cuDeviceGetUuid_v2(uuid, device); }

CUresult PrimaryContext(CUcontext* context, CUdevice device) {
  Session* const session = Session::Get();
  if (!session || !session->initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  if (device < 0 || size_t(device) >= session->devices().size()) return CUDA_ERROR_INVALID_DEVICE;
  WriterLock lock(&session->objects().mutex());
  *context = reinterpret_cast<CUcontext>(session->objects().PrimaryContextLocked(device));
  return CUDA_SUCCESS;
}

CUcontext CurrentContext() {
  CUcontext context = nullptr;
  return Custom_cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : nullptr;
}

CUresult ModuleFunctions(CUmodule module, std::vector<CUfunction>* functions) {
  unsigned count = 0;
  if (const CUresult result = Call_cuModuleGetFunctionCount(&count, module); result != CUDA_SUCCESS) return result;
  functions->resize(count);
  if (count == 0) return CUDA_SUCCESS;
  return Custom_cuModuleEnumerateFunctions(functions->data(), count, module);
}

// Asks one word of a table of the server's driver. `reply` views the call's reply.
CUresult AskTable(Call* call, const driverabi::TableId& table, uint32_t word, const uint64_t* stream,
                  wire::OpExportTable_Reply* reply) {
  wire::OpExportTable_Request request;
  request.table = std::string_view(reinterpret_cast<const char*>(table.data()), table.size());
  request.word = word;
  if (stream) request.arguments.push_back(*stream);
  request.Encode(&call->message());
  const CUresult result = call->Transact();
  if (result == CUDA_ERROR_NOT_SUPPORTED) {
    return Call::Unsupported(
        "cuGetExportTable",
        "the server's driver has a version of this private table (of cuBLASLt) that cuda-remote does not know");
  }
  if (result != CUDA_SUCCESS) return result;
  return reply->Decode(call->reply()) ? CUDA_SUCCESS : call->session().Lose(ChannelStatus::kProtocolError);
}

CUresult StreamValue(CUcontext, CUstream stream, uint64_t* value) {
  static constexpr CallInfo kInfo = Under(info::k_OpExportTable, "cuGetExportTable");
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t wire_stream;
  if (const CUresult result = call.StreamToWire(stream, false, &wire_stream); result != CUDA_SUCCESS) return result;
  wire::OpExportTable_Reply reply;
  if (const CUresult result = AskTable(&call, driverabi::kStreamTable, 39, &wire_stream, &reply);
      result != CUDA_SUCCESS)
    return result;
  if (reply.values.size() != 1) return call.session().Lose(ChannelStatus::kProtocolError);
  *value = reply.values[0];
  return CUDA_SUCCESS;
}

CUresult PairLayout(std::vector<uint8_t>* clusters, std::vector<uint8_t>* numbers) {
  static constexpr CallInfo kInfo = Under(info::k_OpExportTable, "cuGetExportTable");
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::OpExportTable_Reply reply;
  if (const CUresult result = AskTable(&call, driverabi::kLayoutTable, 4, nullptr, &reply); result != CUDA_SUCCESS)
    return result;
  const size_t pairs = reply.data.size() / 2;
  clusters->assign(reply.data.begin(), reply.data.begin() + pairs);
  numbers->assign(reply.data.begin() + pairs, reply.data.begin() + 2 * pairs);
  return CUDA_SUCCESS;
}

constexpr driverabi::RealTables kRealTables{&StreamValue, &PairLayout};

void Log(const char* line) { LogLine("%s", line); }

CUresult RunTraced(uint32_t number, CUresult (*body)(void*), void* argument) {
  trace::Span span(number);
  const CUresult result = body(argument);
  if (result == CUDA_ERROR_NOT_SUPPORTED) trace::Unsupported();
  return span.End(result);
}

constexpr driverabi::CallTrace kCallTrace{&trace::g_recording, &trace::Register, &RunTraced};

}  // namespace

CUresult Custom_cuGetErrorName(CUresult error, const char** pStr) {
  if (!pStr) return CUDA_ERROR_INVALID_VALUE;
  *pStr = driverabi::ErrorName(error);
  return *pStr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Custom_cuGetErrorString(CUresult error, const char** pStr) {
  if (!pStr) return CUDA_ERROR_INVALID_VALUE;
  *pStr = driverabi::ErrorString(error);
  return *pStr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Works before cuInit: the runtime fetches its tables first.
CUresult Custom_cuGetExportTable(const void** ppExportTable, const CUuuid* pExportTableId) {
  [[maybe_unused]] static const bool once = [] {
    driverabi::SetHost({&Custom_cuDriverGetVersion, &Custom_cuDeviceGetCount, &DeviceUuid, &Custom_cuDeviceGetAttribute,
                        &PrimaryContext, &CurrentContext, &ModuleFunctions, &Log, &kRealTables, &kCallTrace});
    return true;
  }();
  return driverabi::GetExportTable(ppExportTable, pExportTableId);
}

}  // namespace cuda_remote::client
