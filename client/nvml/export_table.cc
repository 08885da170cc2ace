// SPDX-License-Identifier: Apache-2.0
// nvmlInternalGetExportTable: the table of private functions that NVIDIA's own nvidia-smi asks for.
//
// A table is an array of pointer-sized words: its size in bytes, itself included, then functions. README.md says what
// each one that is here does, and how that was found out. The others are not supported, by their number.

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "client/nvml/library.h"
#include "proto/base/text.h"

using namespace cuda_remote::nvml;    // NOLINT: this file is these names' user
using namespace cuda_remote::client;  // NOLINT

extern "C" {
int nvmlDeviceGetComputeRunningProcesses_v3(NvmlDevice device, uint32_t* count, ProcessInfo* infos);
int nvmlDeviceGetGraphicsRunningProcesses_v3(NvmlDevice device, uint32_t* count, ProcessInfo* infos);
int nvmlDeviceGetMPSComputeRunningProcesses_v3(NvmlDevice device, uint32_t* count, ProcessInfo* infos);
int nvmlSystemGetProcessName(uint32_t pid, char* name, uint32_t length);
}

namespace {

constexpr uint8_t kToolsTable[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
                                     0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};

// As far as nvidia-smi of branch 580 looks.
constexpr size_t kEntries = 263;

constexpr size_t kParseBusId = 12;
constexpr size_t kMessage = 26;
constexpr size_t kBusAddress = 75;
constexpr size_t kNumberText = 81;
constexpr size_t kListCompute = 213;
constexpr size_t kListGraphics = 214;
constexpr size_t kListMps = 215;

// A process with its name; what is between is zero.
struct NamedProcess {
  uint32_t pid;
  uint64_t used_bytes;
  uint32_t gpu_instance, compute_instance;
  uint64_t unknown;
  char name[4096];
};
static_assert(sizeof(NamedProcess) == 4128 && offsetof(NamedProcess, gpu_instance) == 16 &&
              offsetof(NamedProcess, name) == 32);

// Word 0: the table's bytes; word N: entry N.
using Table = std::array<uintptr_t, kEntries + 1>;

template <typename Function>
uintptr_t Word(Function function) {
  return reinterpret_cast<uintptr_t>(function);
}

template <size_t kNumber>
int Missing() {
  char name[64];
  snprintf(name, sizeof(name), "entry %zu of nvidia-smi's table", kNumber);
  return Unsupported(name);
}

template <size_t... kIndex>
Table AllMissing(std::index_sequence<kIndex...>) {
  return {sizeof(Table), Word(Missing<kIndex + 1>)...};
}

// "[DOMAIN:]BUS:DEVICE.FUNCTION", hexadecimal.
int ParseBusId(const char* text, uint32_t* domain, uint32_t* bus, uint32_t* device, uint32_t* function) {
  if (!text || !domain || !bus || !device || !function) return kInvalidArgument;
  int end = 0;
  if (sscanf(text, "%8x:%2x:%2x.%1x%n", domain, bus, device, function, &end) == 4 && text[end] == 0) return kSuccess;
  *domain = 0;
  end = 0;
  if (sscanf(text, "%2x:%2x.%1x%n", bus, device, function, &end) == 3 && text[end] == 0) return kSuccess;
  return kInvalidArgument;
}

int BusAddress(uint32_t index, uint32_t* domain, uint32_t* bus, uint32_t* device) {
  if (!Initialized()) return kUninitialized;
  uint32_t count;
  if (const int result = CountGpus(&count); result != kSuccess) return result;
  if (index >= count || !domain || !bus || !device) return kInvalidArgument;
  PciInfo info;
  void* const out[4] = {&info, nullptr, nullptr, nullptr};
  if (const int result = PlainCall("nvmlDeviceGetPciInfo_v3", HandleOf(index), 0, 0, out); result != kSuccess) {
    return result;
  }
  *domain = info.domain;
  *bus = info.bus;
  *device = info.device;
  return kSuccess;
}

// Lines for a log of NVIDIA's library that this one does not keep.
int Message(const char*, const char*, const char*) { return kSuccess; }

int NumberText(uint32_t index, char* text, uint32_t length) {
  char number[16];
  snprintf(number, sizeof(number), "%u", index);
  return PutText(number, text, length);
}

template <int (*kList)(NvmlDevice, uint32_t*, ProcessInfo*)>
int ListNamed(NvmlDevice device, uint32_t* count, NamedProcess* out) {
  if (!count || (*count > 0 && !out)) return kInvalidArgument;
  try {
    // No server answers with more.
    std::vector<ProcessInfo> infos(std::min<size_t>(*count, kMaxOutputBytes / sizeof(ProcessInfo)));
    uint32_t found = uint32_t(infos.size());
    const int result = kList(device, &found, infos.data());
    if (result == kSuccess || result == kInsufficientSize) *count = found;
    if (result != kSuccess) return result;
    for (uint32_t i = 0; i < found; ++i) {
      const ProcessInfo& info = infos[i];
      out[i] = NamedProcess{info.pid, info.used_bytes, info.gpu_instance, info.compute_instance, 0, {}};
      if (nvmlSystemGetProcessName(info.pid, out[i].name, sizeof(out[i].name)) != kSuccess) out[i].name[0] = 0;
    }
    return kSuccess;
  } catch (...) {
    return kMemoryError;
  }
}

const Table& ToolsTable() {
  static const Table table = [] {
    Table made = AllMissing(std::make_index_sequence<kEntries>());
    made[kParseBusId] = Word(ParseBusId);
    made[kMessage] = Word(Message);
    made[kBusAddress] = Word(BusAddress);
    made[kNumberText] = Word(NumberText);
    made[kListCompute] = Word(ListNamed<nvmlDeviceGetComputeRunningProcesses_v3>);
    made[kListGraphics] = Word(ListNamed<nvmlDeviceGetGraphicsRunningProcesses_v3>);
    made[kListMps] = Word(ListNamed<nvmlDeviceGetMPSComputeRunningProcesses_v3>);
    return made;
  }();
  return table;
}

}  // namespace

// The table whose identifier is the 16 bytes at `id`. It is never freed.
extern "C" __attribute__((visibility("default"))) int nvmlInternalGetExportTable(const void** table,
                                                                                 const uint8_t* id) {
  if (!table || !id) return kInvalidArgument;
  if (memcmp(id, kToolsTable, sizeof(kToolsTable)) == 0) {
    *table = ToolsTable().data();
    return kSuccess;
  }
  *table = nullptr;
  return Unsupported(("export table " + cuda_remote::HexBytes({reinterpret_cast<const char*>(id), 16})).c_str());
}
