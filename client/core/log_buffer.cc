// SPDX-License-Identifier: Apache-2.0
#include "client/core/log_buffer.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "proto/base/clock.h"

namespace cuda_remote::client {
namespace {

constexpr uint32_t kMessages = 64;
constexpr size_t kMessageBytes = 400;  // 64 of them are what the driver keeps too
constexpr int kCallbacks = 16;
constexpr int kAttempts = 1000;

struct Registered {
  LogBuffer::Callback callback = nullptr;
  void* data = nullptr;
  uint64_t handle = 0;
};

pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
char g_messages[kMessages][kMessageBytes];
uint32_t g_next = 0;
Registered g_callbacks[kCallbacks];
uint64_t g_last_handle = 0;

// For those who may wait.
struct Guard {
  Guard() { pthread_mutex_lock(&g_mutex); }
  ~Guard() { pthread_mutex_unlock(&g_mutex); }
};

}  // namespace

void LogBuffer::Add(const char* text, size_t length) {
  char line[kMessageBytes];
  const int64_t now = UnixMs();
  const time_t second = now / 1000;
  tm local;
  localtime_r(&second, &local);
  const int wanted = snprintf(line, sizeof(line), "[%02d:%02d:%02d.%03ld][%d][CUDA][E] %.*s", local.tm_hour,
                              local.tm_min, local.tm_sec, long(now % 1000), int(getpid()), int(length), text);
  if (wanted <= 0) return;
  int attempt = 0;
  while (pthread_mutex_trylock(&g_mutex) != 0) {
    if (++attempt == kAttempts) return;
  }
  memcpy(g_messages[g_next % kMessages], line, sizeof(line));
  ++g_next;
  Registered callbacks[kCallbacks];
  std::copy(std::begin(g_callbacks), std::end(g_callbacks), callbacks);
  pthread_mutex_unlock(&g_mutex);
  for (const Registered& one : callbacks) {
    if (one.callback) one.callback(one.data, 0, line, strlen(line));
  }
}

uint32_t LogBuffer::Next() {
  Guard guard;
  return g_next;
}

std::vector<std::string> LogBuffer::Since(uint32_t first, bool* lost, uint32_t* next) {
  Guard guard;
  std::vector<std::string> messages;
  const uint32_t oldest = g_next > kMessages ? g_next - kMessages : 0;
  *lost = first < oldest;
  *next = g_next;
  for (uint32_t i = std::max(first, oldest); i < g_next; ++i) {
    messages.push_back(std::string(g_messages[i % kMessages]) + "\n");
  }
  return messages;
}

uint64_t LogBuffer::Register(Callback callback, void* data) {
  Guard guard;
  for (Registered& one : g_callbacks) {
    if (one.callback) continue;
    one = {callback, data, ++g_last_handle};
    return one.handle;
  }
  return 0;
}

bool LogBuffer::Unregister(uint64_t handle) {
  Guard guard;
  for (Registered& one : g_callbacks) {
    if (!one.callback || one.handle != handle) continue;
    one = Registered();
    return true;
  }
  return false;
}

}  // namespace cuda_remote::client
