// SPDX-License-Identifier: Apache-2.0
// Error checks for the small driver-API programs of the fault tests.
#ifndef CUDA_REMOTE_TESTS_FAULTS_DRIVER_H_
#define CUDA_REMOTE_TESTS_FAULTS_DRIVER_H_

#include <cuda.h>

#include <cstdio>
#include <cstdlib>

namespace cuda_remote::faults {

inline const char* NameOf(CUresult result) {
  const char* name = nullptr;
  return cuGetErrorName(result, &name) == CUDA_SUCCESS && name ? name : "an error without a name";
}

// Ends the program with exit code 1 if `result` is not CUDA_SUCCESS.
#define CU_CHECK(call)                                                                                             \
  do {                                                                                                             \
    CUresult cu_check_result = (call);                                                                             \
    if (cu_check_result != CUDA_SUCCESS) {                                                                         \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cuda_remote::faults::NameOf(cu_check_result)); \
      exit(1);                                                                                                     \
    }                                                                                                              \
  } while (0)

#define EXPECT(condition)                                                       \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                  \
    }                                                                           \
  } while (0)

}  // namespace cuda_remote::faults

#endif  // CUDA_REMOTE_TESTS_FAULTS_DRIVER_H_
