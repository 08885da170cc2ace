// SPDX-License-Identifier: Apache-2.0
// cuGetProcAddress in both versions: answers with this library's own entry points, as the driver of the server's
// version would.
#define __CUDA_API_VERSION_INTERNAL  // no macros over the exported names
#include <cuda.h>
#include <cudaProfiler.h>

#include "client/calls/bodies.gen.h"
#include "client/entry/export.h"
#include "proto/api/entry_points.gen.h"

extern "C" {
// The exported symbols, by address only.
#define DECLARE(symbol) CR_EXPORT CUresult CUDAAPI symbol();
CUDA_REMOTE_UNDOCUMENTED_ENTRY_POINTS(DECLARE)
#undef DECLARE
#define DECLARE(symbol, type, parameters, arguments) CR_EXPORT type CUDAAPI symbol parameters;
CUDA_REMOTE_ENTRY_POINTS(DECLARE)
#undef DECLARE
}

namespace cuda_remote::client {
namespace {

#define ENTRY(name, since, per_thread, symbol) {name, since, per_thread != 0, reinterpret_cast<void*>(&symbol)},
const ProcEntry kProcTable[] = {CUDA_REMOTE_PROC_ADDRESSES(ENTRY)};
#undef ENTRY

// The driver's version bounds what may be asked for. Before a session exists the headers' version stands in.
int DriverVersion() {
  int version = 0;
  return Custom_cuDriverGetVersion(&version) == CUDA_SUCCESS && version > 0 ? version : CUDA_VERSION;
}

}  // namespace

CUresult Custom_cuGetProcAddress_v2(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult* symbolStatus) {
  return FindProc(kProcTable, sizeof kProcTable / sizeof *kProcTable, symbol, cudaVersion, flags, DriverVersion(), pfn,
                  symbolStatus);
}

CUresult Custom_cuGetProcAddress(const char* symbol, void** pfn, int driverVersion, cuuint64_t flags) {
  return FindProcFirstVersion(kProcTable, sizeof kProcTable / sizeof *kProcTable, symbol, driverVersion, flags,
                              DriverVersion(), pfn);
}

}  // namespace cuda_remote::client
