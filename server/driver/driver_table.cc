// SPDX-License-Identifier: Apache-2.0
#include "server/driver/driver_table.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "absl/status/status.h"

namespace cuda_remote::server {
namespace {

void* g_library = nullptr;
int g_missing = 0;
std::atomic<bool> g_reported[kDriverFunctions];

}  // namespace

CUresult ReportMissingFunction(size_t index) {
  if (!g_reported[index].exchange(true)) {
    std::fprintf(stderr, "cr-worker: the driver library does not export %s; answering CUDA_ERROR_NOT_SUPPORTED\n",
                 kDriverFunctionTable[index].symbol);
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}

absl::StatusOr<DriverTable> LoadDriver(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return absl::FailedPreconditionError("cannot load the driver library " + path + ": " +
                                         (why != nullptr ? why : "unknown reason"));
  }
  if (dlsym(library, "cuInit") == nullptr) {
    dlclose(library);
    return absl::FailedPreconditionError(path + " is not a CUDA driver library: it does not export cuInit");
  }
  g_library = library;
  g_missing = 0;
  DriverTable table = {};
  for (const DriverFunction& function : kDriverFunctionTable) {
    void* address = dlsym(library, function.symbol);
    if (address == nullptr) {
      address = function.missing;
      ++g_missing;
    }
    std::memcpy(reinterpret_cast<char*>(&table) + function.offset, &address, sizeof address);
  }
  return table;
}

int MissingFunctions() { return g_missing; }

void* DriverSymbol(const char* symbol) { return g_library == nullptr ? nullptr : dlsym(g_library, symbol); }

}  // namespace cuda_remote::server
