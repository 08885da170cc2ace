// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/current_context.h"

namespace cuda_remote::server {
namespace {

constexpr uint64_t kUnknown = ~uint64_t(0);
thread_local uint64_t t_current = 0;

}  // namespace

CUresult MakeCurrent(const DriverTable& driver, ContextRef context) {
  if (context.id == t_current) return CUDA_SUCCESS;
  const CUresult result = driver.cuCtxSetCurrent(context.id != 0 ? context.real : nullptr);
  t_current = result == CUDA_SUCCESS ? context.id : kUnknown;
  return result;
}

void ForgetCurrent() { t_current = kUnknown; }

}  // namespace cuda_remote::server
