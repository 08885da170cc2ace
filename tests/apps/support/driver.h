// SPDX-License-Identifier: Apache-2.0
// For test programs that call the driver API: CU_CHECK ends the program, with the call and the error's name, if a call
// fails.
#ifndef CUDA_REMOTE_TESTS_APPS_SUPPORT_DRIVER_H_
#define CUDA_REMOTE_TESTS_APPS_SUPPORT_DRIVER_H_

#include <cuda.h>

#include "tests/apps/support/app.h"

#define CU_CHECK(call)                                                                 \
  do {                                                                                 \
    CUresult cu_check_result = (call);                                                 \
    if (cu_check_result != CUDA_SUCCESS) {                                             \
      const char* cu_check_name = nullptr;                                             \
      cuGetErrorName(cu_check_result, &cu_check_name);                                 \
      app::Fail(__FILE__, __LINE__, #call, cu_check_name ? cu_check_name : "unknown"); \
    }                                                                                  \
  } while (0)

#endif  // CUDA_REMOTE_TESTS_APPS_SUPPORT_DRIVER_H_
