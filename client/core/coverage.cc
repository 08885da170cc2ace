// SPDX-License-Identifier: Apache-2.0
#include "client/core/coverage.h"

#include <atomic>
#include <map>
#include <string>

#include "client/core/log.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {
namespace {

Mutex g_mutex;
std::map<std::string, uint64_t>* g_counts CR_GUARDED_BY(g_mutex) = nullptr;  // never freed: used from exit handlers
std::atomic<uint64_t> g_total{0};

}  // namespace

void CountUnsupported(const char* name, const char* reason) {
  g_total.fetch_add(1, std::memory_order_relaxed);
  {
    MutexLock lock(&g_mutex);
    if (!g_counts) g_counts = new std::map<std::string, uint64_t>;
    if ((*g_counts)[name]++ > 0) return;
  }
  LogLine("unsupported call %s (%s): it returns CUDA_ERROR_NOT_SUPPORTED", name, reason);
}

uint64_t UnsupportedCalls() { return g_total.load(std::memory_order_relaxed); }

}  // namespace cuda_remote::client
