// SPDX-License-Identifier: Apache-2.0
// Entry points with a shape of their own: start and end, finding devices, pairs of devices, processes, fields,
// affinity, events, and the older versions of calls.

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "client/nvml/library.h"
#include "proto/base/text.h"

using namespace cuda_remote::nvml;    // NOLINT: this file is these names' user
using namespace cuda_remote::client;  // NOLINT

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kNoLink = -1;
constexpr uint32_t kCpuSetWords = 16;

// The device's text for an identifying call, for finding it by that.
std::string IdentityOf(const char* call, uint32_t index) {
  Question question;
  question.call = call;
  question.device = index;
  std::string text;
  return Ask(question, Life::kStill, &text) == kSuccess ? text : std::string();
}

// The device for which `matches(index)` holds.
template <typename Matches>
int Find(NvmlDevice* device, const Matches& matches) {
  uint32_t count;
  if (const int result = CountGpus(&count); result != kSuccess) return result;
  for (uint32_t i = 0; i < count; ++i) {
    if (!matches(i)) continue;
    *device = HandleOf(i);
    return kSuccess;
  }
  return kNotFound;
}

int FindByText(const char* call, const char* text, NvmlDevice* device) {
  if (!Initialized()) return kUninitialized;
  if (!text || !device) return kInvalidArgument;
  try {
    return Find(device, [&](uint32_t i) { return strcasecmp(IdentityOf(call, i).c_str(), text) == 0; });
  } catch (...) {
    return kMemoryError;
  }
}

int GetPciInfo(NvmlDevice device, const char* call, int link, PciInfo* info) {
  void* const out[4] = {info, nullptr, nullptr, nullptr};
  return PlainCall(call, device, link == kNoLink ? 0 : uint32_t(link), 0, out);
}

// The first `bytes` of what the newest version says.
int GetOlderPciInfo(NvmlDevice device, const char* call, int link, void* out, size_t bytes) {
  if (!out) return kInvalidArgument;
  PciInfo info;
  const int result = GetPciInfo(device, call, link, &info);
  if (result == kSuccess) memcpy(out, &info, bytes);
  return result;
}

int AskPair(const char* call, NvmlDevice first, NvmlDevice second, uint32_t b, void* out) {
  Question question;
  question.b = b;
  if (int result = IndexOf(first, &question.device); result != kSuccess) return result;
  if (int result = IndexOf(second, &question.a); result != kSuccess) return result;
  if (!out) return kInvalidArgument;
  try {
    question.call = call;
    std::string output;
    const int result = Ask(question, Life::kStill, &output);
    if (result != kSuccess) return result;
    if (output.size() != sizeof(uint32_t)) return kUnknownError;
    memcpy(out, output.data(), output.size());
    return kSuccess;
  } catch (...) {
    return kMemoryError;
  }
}

// All processes of one kind, newest layout.
int GetProcesses(const char* call, NvmlDevice device, std::vector<ProcessInfo>* list) {
  Question question;
  if (int result = IndexOf(device, &question.device); result != kSuccess) return result;
  question.call = call;
  std::string output;
  const int result = Ask(question, Life::kFresh, &output);
  if (result != kSuccess) return result;
  if (output.size() % sizeof(ProcessInfo) != 0) return kUnknownError;
  list->resize(output.size() / sizeof(ProcessInfo));
  if (!output.empty()) memcpy(list->data(), output.data(), output.size());
  return kSuccess;
}

template <typename Info, typename Convert>
int CopyProcesses(const char* call, NvmlDevice device, uint32_t* count, Info* out, const Convert& convert) {
  if (!Initialized()) return kUninitialized;
  if (!count || (*count > 0 && !out)) return kInvalidArgument;
  try {
    std::vector<ProcessInfo> list;
    const int result = GetProcesses(call, device, &list);
    if (result != kSuccess) return result;
    const uint32_t room = *count;
    *count = uint32_t(list.size());
    if (list.size() > room) return kInsufficientSize;
    for (size_t i = 0; i < list.size(); ++i) out[i] = convert(list[i]);
    return kSuccess;
  } catch (...) {
    return kMemoryError;
  }
}

int CopyProcessesV1(const char* call, NvmlDevice device, uint32_t* count, ProcessInfoV1* out) {
  return CopyProcesses(call, device, count, out, [](const ProcessInfo& info) {
    return ProcessInfoV1{info.pid, info.used_bytes};
  });
}

int CopyProcessesV2(const char* call, NvmlDevice device, uint32_t* count, ProcessInfo* out) {
  return CopyProcesses(call, device, count, out, [](const ProcessInfo& info) { return info; });
}

int GetAffinity(const char* call, NvmlDevice device, uint32_t words, uint64_t* set, uint32_t scope) {
  Question question;
  if (int result = IndexOf(device, &question.device); result != kSuccess) return result;
  if (!set || words == 0) return kInvalidArgument;
  try {
    question.call = call;
    question.a = scope;
    question.b = std::min(words, kMaxAffinityWords);
    std::string output;
    const int result = Ask(question, Life::kStill, &output);
    if (result != kSuccess) return result;
    if (output.size() != size_t(question.b) * sizeof(*set)) return kUnknownError;
    memset(set, 0, size_t(words) * sizeof(*set));
    memcpy(set, output.data(), output.size());
    return kSuccess;
  } catch (...) {
    return kMemoryError;
  }
}

}  // namespace

// ------------------------------------------------------------------------------------------------------ start and end

EXPORT int nvmlInit_v2() { return Initialize(); }
EXPORT int nvmlInit() { return Initialize(); }
EXPORT int nvmlInitWithFlags(uint32_t) { return Initialize(); }
EXPORT int nvmlShutdown() { return Shutdown(); }

EXPORT const char* nvmlErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "Success";
    case kUninitialized:
      return "Uninitialized";
    case kInvalidArgument:
      return "Invalid Argument";
    case kNotSupported:
      return "Not Supported";
    case kNoPermission:
      return "Insufficient Permissions";
    case kAlreadyInitialized:
      return "Already Initialized";
    case kNotFound:
      return "Not Found";
    case kInsufficientSize:
      return "Insufficient Size";
    case kInsufficientPower:
      return "Insufficient External Power";
    case kDriverNotLoaded:
      return "Driver Not Loaded";
    case kTimeout:
      return "Timeout";
    case kIrqIssue:
      return "Interrupt Request Issue";
    case kLibraryNotFound:
      return "NVML Shared Library Not Found";
    case kFunctionNotFound:
      return "Function Not Found";
    case kCorruptedInforom:
      return "Corrupted infoROM";
    case kGpuIsLost:
      return "GPU is lost";
    case kResetRequired:
      return "GPU requires reset";
    case kOperatingSystem:
      return "The operating system has blocked the request.";
    case kLibraryVersionMismatch:
      return "RM has detected an NVML/RM version mismatch.";
    case kInUse:
      return "GPU in use";
    case kMemoryError:
      return "Insufficient Memory";
    case kNoData:
      return "No data";
    case kVgpuEccNotSupported:
      return "vGPU operation not supported because ECC is enabled";
    case kInsufficientResources:
      return "Insufficient Resources";
    case kFrequencyNotSupported:
      return "Frequency not supported";
    case kArgumentVersionMismatch:
      return "Argument version mismatch";
    case kDeprecated:
      return "Deprecated";
    case kNotReady:
      return "Not ready";
    case kGpuNotFound:
      return "GPU not found";
    case kInvalidState:
      return "Invalid state";
    case kResetTypeNotSupported:
      return "Reset type not supported";
  }
  return "Unknown Error";
}

// ---------------------------------------------------------------------------------------------------- finding devices

EXPORT int nvmlDeviceGetCount_v2(uint32_t* count) {
  if (!Initialized()) return kUninitialized;
  return count ? CountGpus(count) : int(kInvalidArgument);
}
EXPORT int nvmlDeviceGetCount(uint32_t* count) { return nvmlDeviceGetCount_v2(count); }

EXPORT int nvmlDeviceGetHandleByIndex_v2(uint32_t index, NvmlDevice* device) {
  if (!Initialized()) return kUninitialized;
  uint32_t count;
  if (const int result = CountGpus(&count); result != kSuccess) return result;
  if (!device || index >= count) return kInvalidArgument;
  *device = HandleOf(index);
  return kSuccess;
}
EXPORT int nvmlDeviceGetHandleByIndex(uint32_t index, NvmlDevice* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, NvmlDevice* device) {
  return FindByText("nvmlDeviceGetUUID", uuid, device);
}
EXPORT int nvmlDeviceGetHandleBySerial(const char* serial, NvmlDevice* device) {
  return serial && *serial ? FindByText("nvmlDeviceGetSerial", serial, device) : int(kInvalidArgument);
}

EXPORT int nvmlDeviceGetHandleByUUIDV(const Uuid* uuid, NvmlDevice* device) {
  if (!Initialized()) return kUninitialized;
  if (!uuid || !device) return kInvalidArgument;
  if (uuid->version != VersionWord(sizeof(Uuid), 1)) return kArgumentVersionMismatch;
  char text[sizeof(uuid->text) + 1] = {};
  if (uuid->type == kUuidAscii) {
    memcpy(text, uuid->text, sizeof(uuid->text));
  } else if (uuid->type == kUuidBinary) {
    const std::string name = cuda_remote::UuidName({reinterpret_cast<const char*>(uuid->bytes), 16});
    snprintf(text, sizeof(text), "%s", name.c_str());
  } else {
    return kInvalidArgument;
  }
  return FindByText("nvmlDeviceGetUUID", text, device);
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, NvmlDevice* device) {
  if (!Initialized()) return kUninitialized;
  if (!bus_id || !device) return kInvalidArgument;
  // The domain may be left out.
  uint32_t domain = 0, bus = 0, slot = 0;
  if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3) {
    domain = 0;
    if (sscanf(bus_id, "%x:%x", &bus, &slot) != 2) return kInvalidArgument;
  }
  return Find(device, [&](uint32_t i) {
    PciInfo info;
    return GetPciInfo(HandleOf(i), "nvmlDeviceGetPciInfo_v3", kNoLink, &info) == kSuccess && info.domain == domain &&
           info.bus == bus && info.device == slot;
  });
}
EXPORT int nvmlDeviceGetHandleByPciBusId(const char* bus_id, NvmlDevice* device) {
  return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

EXPORT int nvmlDeviceGetIndex(NvmlDevice device, uint32_t* index) {
  uint32_t found;
  if (const int result = IndexOf(device, &found); result != kSuccess) return result;
  if (!index) return kInvalidArgument;
  *index = found;
  return kSuccess;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(NvmlDevice device, NvmlDevice* parent) {
  uint32_t index;
  if (const int result = IndexOf(device, &index); result != kSuccess) return result;
  // No handle of ours is one of a MIG device.
  return parent ? int(kNotFound) : int(kInvalidArgument);
}

EXPORT int nvmlDeviceGetPciInfo(NvmlDevice device, void* info) {
  return GetOlderPciInfo(device, "nvmlDeviceGetPciInfo_v3", kNoLink, info, kPciInfoV1Bytes);
}
EXPORT int nvmlDeviceGetPciInfo_v2(NvmlDevice device, void* info) {
  return GetOlderPciInfo(device, "nvmlDeviceGetPciInfo_v3", kNoLink, info, kPciInfoV2Bytes);
}
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo(NvmlDevice device, uint32_t link, void* info) {
  if (link >= kMaxLinks) return Initialized() ? kInvalidArgument : kUninitialized;
  return GetOlderPciInfo(device, "nvmlDeviceGetNvLinkRemotePciInfo_v2", int(link), info, kPciInfoV2Bytes);
}

// What these list is not there for a job.
EXPORT int nvmlUnitGetCount(uint32_t* count) {
  if (!Initialized()) return kUninitialized;
  if (!count) return kInvalidArgument;
  *count = 0;
  return kSuccess;
}
EXPORT int nvmlGetExcludedDeviceCount(uint32_t* count) { return nvmlUnitGetCount(count); }
EXPORT int nvmlGetBlacklistDeviceCount(uint32_t* count) { return nvmlUnitGetCount(count); }

// --------------------------------------------------------------------------------------------------- pairs of devices

EXPORT int nvmlDeviceGetTopologyCommonAncestor(NvmlDevice first, NvmlDevice second, void* level) {
  return AskPair(kCommonAncestor, first, second, 0, level);
}
EXPORT int nvmlDeviceGetP2PStatus(NvmlDevice first, NvmlDevice second, uint32_t index, void* status) {
  return AskPair(kP2PStatus, first, second, index, status);
}
EXPORT int nvmlDeviceOnSameBoard(NvmlDevice first, NvmlDevice second, void* same) {
  return AskPair(kOnSameBoard, first, second, 0, same);
}

// ---------------------------------------------------------------------------------------------------------- processes

EXPORT int nvmlDeviceGetComputeRunningProcesses(NvmlDevice device, uint32_t* count, ProcessInfoV1* infos) {
  return CopyProcessesV1(kComputeProcesses, device, count, infos);
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(NvmlDevice device, uint32_t* count, ProcessInfo* infos) {
  return CopyProcessesV2(kComputeProcesses, device, count, infos);
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(NvmlDevice device, uint32_t* count, ProcessInfo* infos) {
  return CopyProcessesV2(kComputeProcesses, device, count, infos);
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses(NvmlDevice device, uint32_t* count, ProcessInfoV1* infos) {
  return CopyProcessesV1(kGraphicsProcesses, device, count, infos);
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v2(NvmlDevice device, uint32_t* count, ProcessInfo* infos) {
  return CopyProcessesV2(kGraphicsProcesses, device, count, infos);
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(NvmlDevice device, uint32_t* count, ProcessInfo* infos) {
  return CopyProcessesV2(kGraphicsProcesses, device, count, infos);
}
EXPORT int nvmlDeviceGetMPSComputeRunningProcesses(NvmlDevice device, uint32_t* count, ProcessInfoV1* infos) {
  return CopyProcessesV1(kMpsProcesses, device, count, infos);
}
EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v2(NvmlDevice device, uint32_t* count, ProcessInfo* infos) {
  return CopyProcessesV2(kMpsProcesses, device, count, infos);
}
EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(NvmlDevice device, uint32_t* count, ProcessInfo* infos) {
  return CopyProcessesV2(kMpsProcesses, device, count, infos);
}

EXPORT int nvmlSystemGetProcessName(uint32_t pid, char* name, uint32_t length) {
  if (!Initialized()) return kUninitialized;
  if (!name || length == 0) return kInvalidArgument;
  try {
    Question question;
    question.call = kProcessName;
    question.a = pid;
    std::string text;
    int result = Ask(question, Life::kFresh, &text);
    if (result == kNotFound) {
      // One that uses no GPU, on this machine: its command, up to the first argument.
      const int fd = open(("/proc/" + std::to_string(pid) + "/cmdline").c_str(), O_RDONLY | O_CLOEXEC);
      if (fd < 0) return kNotFound;
      char command[4096] = {};
      const ssize_t bytes = read(fd, command, sizeof(command) - 1);
      close(fd);
      if (bytes <= 0) return kNotFound;
      text = command;
      result = kSuccess;
    }
    return result == kSuccess ? PutText(text, name, length) : result;
  } catch (...) {
    return kMemoryError;
  }
}

// ------------------------------------------------------------------------------------------------------------- fields

EXPORT int nvmlDeviceGetFieldValues(NvmlDevice device, int count, FieldValue* values) {
  Question question;
  if (int result = IndexOf(device, &question.device); result != kSuccess) return result;
  if (count <= 0 || !values) return kInvalidArgument;
  try {
    question.call = kFieldValues;
    for (int done = 0; done < count;) {
      const int some = std::min(count - done, int(kMaxFields));
      // Only what is asked for goes out; the rest of the program's memory may be uninitialised.
      std::vector<FieldValue> ask(static_cast<size_t>(some));
      for (int i = 0; i < some; ++i) {
        ask[size_t(i)] = FieldValue{values[done + i].field, values[done + i].scope, 0, 0, 0, 0, 0};
      }
      question.input.assign(reinterpret_cast<const char*>(ask.data()), ask.size() * sizeof(FieldValue));
      std::string output;
      const int result = Ask(question, Life::kFresh, &output);
      if (result != kSuccess) return result;
      if (output.size() != question.input.size()) return kUnknownError;
      memcpy(values + done, output.data(), output.size());
      done += some;
    }
    return kSuccess;
  } catch (...) {
    return kMemoryError;
  }
}

// ----------------------------------------------------------------------------------------------------------- affinity

EXPORT int nvmlDeviceGetCpuAffinity(NvmlDevice device, uint32_t words, uint64_t* set) {
  return GetAffinity(kCpuAffinity, device, words, set, 0);
}
EXPORT int nvmlDeviceGetCpuAffinityWithinScope(NvmlDevice device, uint32_t words, uint64_t* set, uint32_t scope) {
  return GetAffinity(kCpuAffinityScope, device, words, set, scope);
}
EXPORT int nvmlDeviceGetMemoryAffinity(NvmlDevice device, uint32_t words, uint64_t* set, uint32_t scope) {
  return GetAffinity(kMemoryAffinity, device, words, set, scope);
}

// These two are about the calling thread, so they are done here.
EXPORT int nvmlDeviceSetCpuAffinity(NvmlDevice device) {
  uint64_t words[kCpuSetWords];
  const int result = GetAffinity(kCpuAffinity, device, kCpuSetWords, words, 0);
  if (result != kSuccess) return result;
  static_assert(sizeof(words) == sizeof(cpu_set_t));
  cpu_set_t set;
  memcpy(&set, words, sizeof(set));
  return sched_setaffinity(0, sizeof(set), &set) == 0 ? kSuccess : kUnknownError;
}
EXPORT int nvmlDeviceClearCpuAffinity(NvmlDevice device) {
  uint32_t index;
  if (const int result = IndexOf(device, &index); result != kSuccess) return result;
  cpu_set_t all;
  memset(&all, 0xff, sizeof(all));
  return sched_setaffinity(0, sizeof(all), &all) == 0 ? kSuccess : kUnknownError;
}

// ------------------------------------------------------------------------------------------------------------- events

// Events would need a connection that stays, so no type of event is supported; a set can be made and waited on, as on a
// GPU without any.
EXPORT int nvmlEventSetCreate(void** set) {
  if (!Initialized()) return kUninitialized;
  if (!set) return kInvalidArgument;
  *set = malloc(1);
  return *set ? kSuccess : kMemoryError;
}
EXPORT int nvmlEventSetFree(void* set) {
  if (!Initialized()) return kUninitialized;
  if (!set) return kInvalidArgument;
  free(set);
  return kSuccess;
}
EXPORT int nvmlDeviceGetSupportedEventTypes(NvmlDevice device, uint64_t* types) {
  uint32_t index;
  if (const int result = IndexOf(device, &index); result != kSuccess) return result;
  if (!types) return kInvalidArgument;
  *types = 0;
  return kSuccess;
}
EXPORT int nvmlDeviceRegisterEvents(NvmlDevice device, uint64_t types, void* set) {
  uint32_t index;
  if (const int result = IndexOf(device, &index); result != kSuccess) return result;
  if (!set) return kInvalidArgument;
  return types == 0 ? int(kSuccess) : Unsupported("nvmlDeviceRegisterEvents");
}
EXPORT int nvmlEventSetWait_v2(void* set, EventData* data, uint32_t timeout_ms) {
  if (!Initialized()) return kUninitialized;
  if (!set || !data) return kInvalidArgument;
  timespec left = {time_t(timeout_ms / 1000), long(timeout_ms % 1000) * 1000000};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
  return kTimeout;
}
EXPORT int nvmlEventSetWait(void* set, EventData* data, uint32_t timeout_ms) {
  return nvmlEventSetWait_v2(set, data, timeout_ms);
}
