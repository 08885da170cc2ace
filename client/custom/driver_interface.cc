// What the driver library answers about itself: error names, and the private export tables.

#include <cuda.h>

#include <mutex>
#include <vector>

#include "client/entry/custom.gen.h"
#include "client/session/log.h"
#include "client/session/session.h"
#include "proto/driverabi/error_names.h"
#include "proto/driverabi/export_tables.h"

namespace cuda_remote::client {
namespace {

CUresult DeviceUuid(CUdevice device, CUuuid* uuid) { return cuDeviceGetUuid(uuid, device); }

CUresult PrimaryContext(CUcontext* context, CUdevice device) {
  Session* const session = Session::Get();
  if (!session || !session->initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  if (device < 0 || size_t(device) >= session->devices().size()) return CUDA_ERROR_INVALID_DEVICE;
  std::unique_lock<std::shared_mutex> lock(session->mutex());
  *context = reinterpret_cast<CUcontext>(session->primary_context(device));
  return CUDA_SUCCESS;
}

CUcontext CurrentContext() {
  CUcontext context = nullptr;
  return cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : nullptr;
}

CUresult ModuleFunctions(CUmodule module, std::vector<CUfunction>* functions) {
  unsigned count = 0;
  if (const CUresult result = cuModuleGetFunctionCount(&count, module); result != CUDA_SUCCESS) return result;
  functions->resize(count);
  return cuModuleEnumerateFunctions(functions->data(), count, module);
}

void Log(const char* line) { LogLine("%s", line); }

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
    driverabi::SetHost({&cuDriverGetVersion, &cuDeviceGetCount, &DeviceUuid, &cuDeviceGetAttribute, &PrimaryContext,
                        &CurrentContext, &ModuleFunctions, &Log});
    return true;
  }();
  return driverabi::GetExportTable(ppExportTable, pExportTableId);
}

}  // namespace cuda_remote::client
