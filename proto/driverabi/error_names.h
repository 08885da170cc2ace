// SPDX-License-Identifier: Apache-2.0
// Names and texts of CUresult values: what cuGetErrorName and cuGetErrorString answer without asking anybody.
//
// Part of the client library and of the software GPU. Thread-safe; the strings are static.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_ERROR_NAMES_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_ERROR_NAMES_H_

#include <cuda.h>

#include <cstdint>
#include <string>

namespace cuda_remote::driverabi {

// "CUDA_ERROR_INVALID_VALUE"; null for a number that is no result.
const char* ErrorName(CUresult result);

// "invalid argument", in driver 580's words; null for a number that is no result.
const char* ErrorString(CUresult result);

// For messages to people: "CUDA_ERROR_INVALID_VALUE (1, invalid argument)", or "CUDA error 12345".
std::string DescribeError(uint32_t result);

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_ERROR_NAMES_H_
