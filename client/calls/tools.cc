// SPDX-License-Identifier: Apache-2.0
// What the driver offers to tools: settings of GPU core dumps, its log, and notifications that it makes by itself.
//
// GPU core dumps are never written, so they cannot be switched on; the settings about them are kept and answered. The
// log is this library's own. Notifications tell that memory is over the budget of another operating system's display
// driver; on this one none is ever made, with or without a server.

#include <cuda.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/log_buffer.h"
#include "client/core/session.h"

namespace cuda_remote::client {
namespace {

constexpr size_t kCoredumpNameBytes = 1024;

Mutex g_mutex;

// Settings by context (0: for all) and attribute.
using Settings = std::map<std::pair<uint64_t, int>, std::string>;
Settings& CoredumpSettingsLocked() CR_REQUIRES(g_mutex) {
  static auto* const settings = new Settings;
  return *settings;
}

struct Notifications {
  uint64_t last = 0;
  std::set<std::pair<CUdevice, uint64_t>> registered;
};
Notifications& AsyncNotificationsLocked() CR_REQUIRES(g_mutex) {
  static auto* const notifications = new Notifications;
  return *notifications;
}

bool IsFlag(int attribute) {
  return attribute >= CU_COREDUMP_ENABLE_ON_EXCEPTION && attribute <= CU_COREDUMP_ENABLE_USER_TRIGGER;
}
bool IsName(int attribute) { return attribute == CU_COREDUMP_FILE || attribute == CU_COREDUMP_PIPE; }

size_t CoredumpBytes(int attribute) {
  if (IsFlag(attribute)) return sizeof(bool);
  if (IsName(attribute)) return kCoredumpNameBytes;
  return attribute == CU_COREDUMP_GENERATION_FLAGS ? sizeof(int) : 0;
}

// The value of an attribute that nobody has set, as the driver documents it.
std::string CoredumpDefault(int attribute) {
  if (IsFlag(attribute)) return std::string(1, char(attribute == CU_COREDUMP_TRIGGER_HOST));
  if (!IsName(attribute)) return std::string(sizeof(int), 0);
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  return std::string(attribute == CU_COREDUMP_FILE ? "core" : "corepipe") + ".cuda." + host + "." +
         std::to_string(getpid());
}

// The context whose settings are meant. `name` is the application's call.
CUresult CoredumpScope(const char* name, bool global, uint64_t* context) {
  *context = 0;
  if (global) return CUDA_SUCCESS;
  const CallInfo info{0, name, ContextOf::kThread};
  Call call(info);
  const CUresult result = call.Enter();
  if (result == CUDA_SUCCESS) *context = call.thread().current_context();
  return result;
}

CUresult GetCoredump(const char* name, bool global, CUcoredumpSettings attribute, void* value, size_t* size) {
  const size_t bytes = CoredumpBytes(attribute);
  if (!size || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  uint64_t context;
  if (const CUresult result = CoredumpScope(name, global, &context); result != CUDA_SUCCESS) return result;
  if (!value) {
    *size = bytes;
    return CUDA_SUCCESS;
  }
  std::string found;
  {
    MutexLock lock(&g_mutex);
    const Settings& settings = CoredumpSettingsLocked();
    auto it = settings.find({context, attribute});
    if (it == settings.end()) it = settings.find({0, attribute});
    found = it != settings.end() ? it->second : CoredumpDefault(attribute);
  }
  const size_t needed = IsName(attribute) ? found.size() + 1 : bytes;
  if (*size < needed) return CUDA_ERROR_INVALID_VALUE;
  memcpy(value, found.c_str(), needed);
  *size = needed;
  return CUDA_SUCCESS;
}

CUresult SetCoredump(const char* name, bool global, CUcoredumpSettings attribute, const void* value, size_t* size) {
  const size_t bytes = CoredumpBytes(attribute);
  if (!size || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  uint64_t context;
  if (const CUresult result = CoredumpScope(name, global, &context); result != CUDA_SUCCESS) return result;
  if (!value) {
    *size = bytes;
    return CUDA_SUCCESS;
  }
  std::string wanted;
  if (IsName(attribute)) {
    const auto* const text = static_cast<const char*>(value);
    const size_t length = strnlen(text, *size);
    if (length >= kCoredumpNameBytes) return CUDA_ERROR_INVALID_VALUE;
    wanted.assign(text, length);
  } else {
    if (*size < bytes) return CUDA_ERROR_INVALID_VALUE;
    wanted.assign(static_cast<const char*>(value), bytes);
    const bool dumps = attribute == CU_COREDUMP_ENABLE_ON_EXCEPTION || attribute == CU_COREDUMP_ENABLE_USER_TRIGGER;
    if (dumps && wanted[0] != 0) {
      return Call::Unsupported(name, "the GPU is the server's, and no core dump of it would reach this machine");
    }
  }
  MutexLock lock(&g_mutex);
  CoredumpSettingsLocked()[{context, attribute}] = std::move(wanted);
  return CUDA_SUCCESS;
}

constexpr char kCut[] = "[older messages are gone]\n";

CUresult CheckDevice(CUdevice device) {
  Session* const session = Session::Get();
  if (!session || !session->initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  return device >= 0 && size_t(device) < session->devices().size() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

}  // namespace

CUresult Custom_cuCoredumpGetAttribute(CUcoredumpSettings attrib, void* value, size_t* size) {
  return GetCoredump("cuCoredumpGetAttribute", false, attrib, value, size);
}

CUresult Custom_cuCoredumpGetAttributeGlobal(CUcoredumpSettings attrib, void* value, size_t* size) {
  return GetCoredump("cuCoredumpGetAttributeGlobal", true, attrib, value, size);
}

CUresult Custom_cuCoredumpSetAttribute(CUcoredumpSettings attrib, void* value, size_t* size) {
  return SetCoredump("cuCoredumpSetAttribute", false, attrib, value, size);
}

CUresult Custom_cuCoredumpSetAttributeGlobal(CUcoredumpSettings attrib, void* value, size_t* size) {
  return SetCoredump("cuCoredumpSetAttributeGlobal", true, attrib, value, size);
}

CUresult Custom_cuLogsRegisterCallback(CUlogsCallback callbackFunc, void* userData,
                                       CUlogsCallbackHandle* callback_out) {
  if (!callbackFunc) return CUDA_ERROR_INVALID_VALUE;
  static_assert(sizeof(CUlogLevel) == sizeof(int), "the level is passed as an int");
  const uint64_t handle = LogBuffer::Register(reinterpret_cast<LogBuffer::Callback>(callbackFunc), userData);
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  if (callback_out) *callback_out = reinterpret_cast<CUlogsCallbackHandle>(handle);
  return CUDA_SUCCESS;
}

CUresult Custom_cuLogsUnregisterCallback(CUlogsCallbackHandle callback) {
  return LogBuffer::Unregister(reinterpret_cast<uint64_t>(callback)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Custom_cuLogsCurrent(CUlogIterator* iterator_out, unsigned int flags) {
  if (!iterator_out) return CUDA_ERROR_INVALID_VALUE;
  *iterator_out = LogBuffer::Next();
  return CUDA_SUCCESS;
}

CUresult Custom_cuLogsDumpToFile(CUlogIterator* iterator, const char* pathToFile, unsigned int flags) {
  if (!pathToFile) return CUDA_ERROR_INVALID_VALUE;
  bool lost;
  uint32_t next;
  const std::vector<std::string> messages = LogBuffer::Since(iterator ? *iterator : 0, &lost, &next);
  FILE* const file = fopen(pathToFile, "we");
  if (!file) return CUDA_ERROR_INVALID_VALUE;
  bool good = !lost || fputs(kCut, file) >= 0;
  for (const std::string& message : messages) good = good && fputs(message.c_str(), file) >= 0;
  good = fclose(file) == 0 && good;
  if (good && iterator) *iterator = next;
  return good ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

// The newest messages that fit; a line at the head says if some are missing.
CUresult Custom_cuLogsDumpToMemory(CUlogIterator* iterator, char* buffer, size_t* size, unsigned int flags) {
  if (!buffer || !size) return CUDA_ERROR_INVALID_VALUE;
  bool lost;
  uint32_t next;
  const std::vector<std::string> messages = LogBuffer::Since(iterator ? *iterator : 0, &lost, &next);
  const size_t room = *size;
  *size = 0;
  if (room == 0) return CUDA_ERROR_INVALID_VALUE;
  buffer[0] = 0;
  if (messages.empty()) {
    if (iterator) *iterator = next;
    return CUDA_SUCCESS;
  }
  size_t total = 1 + (lost ? strlen(kCut) : 0);
  for (const std::string& message : messages) total += message.size();
  size_t first = 0;
  if (total > room) {
    if (!lost) total += strlen(kCut);
    lost = true;
    while (first < messages.size() && total > room) total -= messages[first++].size();
    if (first == messages.size()) return CUDA_ERROR_INVALID_VALUE;
  }
  std::string text = lost ? kCut : "";
  for (size_t i = first; i < messages.size(); ++i) text += messages[i];
  memcpy(buffer, text.c_str(), text.size() + 1);
  *size = text.size();
  if (iterator) *iterator = next;
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceRegisterAsyncNotification(CUdevice device, CUasyncCallback callbackFunc, void* userData,
                                                  CUasyncCallbackHandle* callback) {
  (void)userData;  // for calls that are never made
  if (!callbackFunc || !callback) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckDevice(device); result != CUDA_SUCCESS) return result;
  MutexLock lock(&g_mutex);
  Notifications& notifications = AsyncNotificationsLocked();
  notifications.registered.insert({device, ++notifications.last});
  *callback = reinterpret_cast<CUasyncCallbackHandle>(notifications.last);
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceUnregisterAsyncNotification(CUdevice device, CUasyncCallbackHandle callback) {
  if (const CUresult result = CheckDevice(device); result != CUDA_SUCCESS) return result;
  MutexLock lock(&g_mutex);
  const bool known = AsyncNotificationsLocked().registered.erase({device, reinterpret_cast<uint64_t>(callback)}) != 0;
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace cuda_remote::client
