// SPDX-License-Identifier: Apache-2.0
// The real driver behind a table of function pointers.
//
// The worker never links the driver: it loads the library that it was told to (the vendor's, or the software GPU) and
// calls it through DriverTable alone. Thread-safe once loaded: the table does not change.
#ifndef CUDA_REMOTE_SERVER_DRIVER_DRIVER_TABLE_H_
#define CUDA_REMOTE_SERVER_DRIVER_DRIVER_TABLE_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/driver/driver_table.gen.h"

namespace cuda_remote::server {

// Loads the driver library at `path` (a name without a slash is searched for as dlopen does). A function that the
// library does not export is replaced by a stub that logs its name once and returns CUDA_ERROR_NOT_SUPPORTED. The
// library stays loaded for good. Fails if it cannot be loaded or is no driver.
absl::StatusOr<DriverTable> LoadDriver(const std::string& path);

// How many functions of the table the loaded library lacks.
int MissingFunctions();

// The address of any other symbol of the loaded library; null if there is none.
void* DriverSymbol(const char* symbol);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_DRIVER_DRIVER_TABLE_H_
