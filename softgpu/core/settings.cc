// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/settings.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "proto/base/clock.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::softgpu {
namespace {

struct Injection {
  std::string function;
  uint64_t nth;  // 1: the first call; 0: every call
  CUresult result;
  std::atomic<uint64_t> calls{0};
};

struct State {
  Settings settings;
  std::vector<Injection*> injections;  // never freed
  std::atomic<bool> initialized{false};
  Mutex mutex;
  std::set<std::string> logged CR_GUARDED_BY(mutex);
};

uint64_t ParseBytes(const char* text, uint64_t otherwise) {
  char* end = nullptr;
  unsigned long long value = std::strtoull(text, &end, 10);
  if (end == text || value == 0) return otherwise;
  switch (*end) {
    case 'k':
    case 'K':
      return value << 10;
    case 'm':
    case 'M':
      return value << 20;
    case 'g':
    case 'G':
      return value << 30;
    default:
      return value;
  }
}

// "cuMemAlloc_v2:3:2,cuLaunchKernel:1:700": the third call of cuMemAlloc_v2 fails with 2, ...
void ParseInjections(const char* text, std::vector<Injection*>* out) {
  std::string all = text;
  size_t begin = 0;
  while (begin < all.size()) {
    size_t end = all.find(',', begin);
    if (end == std::string::npos) end = all.size();
    std::string item = all.substr(begin, end - begin);
    begin = end + 1;
    size_t first = item.find(':');
    size_t second = first == std::string::npos ? first : item.find(':', first + 1);
    if (second == std::string::npos) {
      Log("SOFTGPU_FAIL: cannot read '" + item + "'; expected FUNCTION:NTH:CODE");
      continue;
    }
    auto* injection = new Injection;
    injection->function = item.substr(0, first);
    injection->nth = std::strtoull(item.c_str() + first + 1, nullptr, 10);
    injection->result = static_cast<CUresult>(std::atoi(item.c_str() + second + 1));
    out->push_back(injection);
  }
}

State& GetState() {
  // Never destroyed: worker threads may outlive the program's static objects.
  static State* state = [] {
    auto* s = new State;
    if (const char* v = std::getenv("SOFTGPU_DEVICES")) {
      int n = std::atoi(v);
      if (n >= 0 && n <= 64) s->settings.devices = n;
    }
    int major = 0, minor = 0;
    if (const char* v = std::getenv("SOFTGPU_CAPABILITY");
        v != nullptr && std::sscanf(v, "%d.%d", &major, &minor) == 2 && major > 0 && minor >= 0 && minor < 10) {
      s->settings.capability = major * 10 + minor;
      s->settings.strict_capability = true;
    }
    if (const char* v = std::getenv("SOFTGPU_MEMORY"))
      s->settings.memory_bytes = ParseBytes(v, s->settings.memory_bytes);
    if (const char* v = std::getenv("SOFTGPU_UUID")) s->settings.uuid = v;
    if (const char* v = std::getenv("SOFTGPU_THREADS")) s->settings.kernel_threads = std::atoi(v);
    if (const char* v = std::getenv("SOFTGPU_DELAY_US")) s->settings.delay_us = std::atoi(v);
    if (const char* v = std::getenv("SOFTGPU_PLACES")) {
      if (std::strcmp(v, "process") == 0) {
        // Another number in each process, whose lower bits count for little.
        s->settings.places_seed = (uint64_t(getpid()) * 0x9e3779b97f4a7c15 ^ uint64_t(UnixMs())) | 1 << 21;
      }
      s->settings.places_behind_streams = std::strcmp(v, "streams") == 0;
      s->settings.places_by_loads = std::strcmp(v, "loads") == 0;
    }
    if (const char* v = std::getenv("CUDA_MODULE_LOADING")) s->settings.eager_loading = std::strcmp(v, "EAGER") == 0;
    if (const char* v = std::getenv("SOFTGPU_LATE_MS")) s->settings.late_ms = std::atoi(v);
    if (const char* v = std::getenv("SOFTGPU_LAST_IS_FASTEST")) s->settings.last_is_fastest = std::atoi(v) != 0;
    if (const char* v = std::getenv("SOFTGPU_FAIL")) ParseInjections(v, &s->injections);
    return s;
  }();
  return *state;
}

}  // namespace

const Settings& GetSettings() { return GetState().settings; }

CUresult InjectedFailure(const char* function) {
  State& state = GetState();
  for (Injection* injection : state.injections) {
    if (injection->function != function) continue;
    uint64_t call = ++injection->calls;
    if (injection->nth == 0 || call == injection->nth) return injection->result;
  }
  return CUDA_SUCCESS;
}

CUresult Enter(const char* function) {
  State& state = GetState();
  if (!state.initialized.load(std::memory_order_acquire)) return CUDA_ERROR_NOT_INITIALIZED;
  return state.injections.empty() ? CUDA_SUCCESS : InjectedFailure(function);
}

void SetInitialized() { GetState().initialized.store(true, std::memory_order_release); }

void Delay() {
  uint32_t us = GetSettings().delay_us;
  if (us != 0) usleep(us);
}

void Log(const std::string& line) {
  std::string text = "softgpu: " + line + "\n";
  // One write, so that lines of several threads do not mix.
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

void LogOnce(const std::string& line) {
  State& state = GetState();
  {
    MutexLock lock(&state.mutex);
    if (state.logged.size() > 4096 || !state.logged.insert(line).second) return;
  }
  Log(line);
}

}  // namespace cuda_remote::softgpu
