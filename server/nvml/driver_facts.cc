// SPDX-License-Identifier: Apache-2.0
// Answers from the driver API, for the software GPU and for machines without NVML. What the driver API does not say is
// not supported; nothing is made up.

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <fstream>

#include "proto/base/text.h"
#include "server/nvml/source.h"

namespace cuda_remote::server {
namespace {

using nvml::Question;

constexpr char kKernelDriver[] = "/proc/driver/nvidia/version";
// The software GPU has no kernel driver; it has the entry points of this driver branch.
constexpr char kSoftwareVersion[] = "580.0";

template <typename T>
void Put(nvml::Answer* answer, const T& value) {
  answer->result = nvml::kSuccess;
  answer->output.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void PutText(nvml::Answer* answer, const std::string& text) {
  answer->result = text.empty() ? nvml::kNotSupported : nvml::kSuccess;
  answer->output = text;
}

// The first word of digits and dots with a dot in it: "... Kernel Module  580.95.05  Tue ...".
std::string KernelDriverVersion() {
  std::ifstream in(kKernelDriver);
  std::string word;
  while (in >> word) {
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) return word;
  }
  return {};
}

uint32_t Architecture(int major, int minor) {
  switch (major) {
    case 3:
      return nvml::kKepler;
    case 5:
      return nvml::kMaxwell;
    case 6:
      return nvml::kPascal;
    case 7:
      return minor >= 5 ? nvml::kTuring : nvml::kVolta;
    case 8:
      return minor == 9 ? nvml::kAda : nvml::kAmpere;
    case 9:
      return nvml::kHopper;
    case 10:
    case 11:
    case 12:
      return nvml::kBlackwell;
  }
  return nvml::kUnknownArchitecture;
}

class FromDriver final : public NvmlSource {
 public:
  explicit FromDriver(const LoadedDriver& driver) : driver_(driver) {
    version_ = driver.software ? kSoftwareVersion : KernelDriverVersion();
  }

  void Answer(const nvml::Call& call, int device, const Question& question, const std::vector<AskedSession>& sessions,
              nvml::Answer* answer) override {
    const std::string name = call.name;
    answer->result = nvml::kNotSupported;
    if (call.system) return AnswerSystem(name, answer);
    const DeviceFacts& facts = driver_.devices[device];
    const auto put_attribute = [&](CUdevice_attribute attribute, int copies = 1) {
      if (!Known(facts, attribute)) return;
      for (int i = 0; i < copies; ++i) Put(answer, facts.attributes[attribute]);
    };
    if (name == "nvmlDeviceGetName") return PutText(answer, facts.name);
    if (name == "nvmlDeviceGetUUID") return PutText(answer, UuidName(facts.uuid));
    if (name == "nvmlDeviceGetMinorNumber") return Put(answer, uint32_t(device));
    if (name == "nvmlDeviceGetMemoryInfo") return PutMemory(facts, device, sessions, answer);
    if (name == "nvmlDeviceGetMemoryInfo_v2") return PutMemoryV2(facts, device, sessions, question, answer);
    if (name == "nvmlDeviceGetPciInfo_v3") return PutPci(facts, answer);
    if (name == "nvmlDeviceGetPciInfoExt") return PutPciExt(facts, question, answer);
    if (name == "nvmlDeviceGetCudaComputeCapability") {
      put_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
      return put_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    }
    if (name == "nvmlDeviceGetArchitecture") {
      return Put(answer, Architecture(facts.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR],
                                      facts.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR]));
    }
    if (name == "nvmlDeviceGetComputeMode") return put_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE);
    if (name == "nvmlDeviceGetEccMode") return put_attribute(CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 2);
    if (name == "nvmlDeviceGetMemoryBusWidth") return put_attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
    if (name == "nvmlDeviceGetMultiGpuBoard") return put_attribute(CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD);
    if (name == "nvmlDeviceIsMigDeviceHandle") return Put(answer, uint32_t{0});
    // A MIG device of the driver API is a GPU here.
    if (name == "nvmlDeviceGetMaxMigDeviceCount") return Put(answer, uint32_t{0});
    if (name == "nvmlDeviceGetMaxClockInfo") return PutMaxClock(facts, question.a, answer);
  }

  void AnswerPair(const Question& question, int first, int second, nvml::Answer* answer) override {
    answer->result = nvml::kNotSupported;
    if (question.call != nvml::kP2PStatus || question.b > nvml::kP2PPci) return;
    const std::vector<uint32_t>& peers = driver_.devices[first].peers;
    const bool can = size_t(second) < peers.size() && peers[second] != 0;
    // The driver API tells of access as a whole, and of no links.
    const bool access = question.b == nvml::kP2PRead || question.b == nvml::kP2PWrite;
    Put(answer, uint32_t(can && access ? nvml::kP2POk : nvml::kP2PNotSupported));
  }

  int Fields(int, std::vector<nvml::FieldValue>* values) override {
    for (nvml::FieldValue& value : *values) value.result = nvml::kNotSupported;
    return nvml::kSuccess;
  }

  void Affinity(const Question&, int, nvml::Answer* answer) override { answer->result = nvml::kNotSupported; }
  bool Processes(int, const std::string&, std::vector<nvml::ProcessInfo>*) override { return false; }
  std::string Describe() const override { return "the driver API, without NVML"; }

 private:
  static bool Known(const DeviceFacts& facts, CUdevice_attribute attribute) {
    return size_t(attribute) < facts.attributes.size() && facts.attributes[attribute] != kRefusedAttribute;
  }

  void AnswerSystem(const std::string& name, nvml::Answer* answer) const {
    if (name == "nvmlSystemGetDriverVersion") PutText(answer, version_);
    // There is no NVML; ours is as old as the driver.
    if (name == "nvmlSystemGetNVMLVersion" && !version_.empty())
      PutText(answer, std::to_string(driver_.version / 1000) + "." + version_);
    if (name == "nvmlSystemGetCudaDriverVersion" || name == "nvmlSystemGetCudaDriverVersion_v2")
      Put(answer, driver_.version);
  }

  static nvml::Memory Usage(const DeviceFacts& facts, int device, const std::vector<AskedSession>& sessions) {
    nvml::Memory memory{facts.total_memory, 0, 0};
    for (const AskedSession& session : sessions) {
      if (size_t(device) < session.device_bytes.size()) memory.used += session.device_bytes[device];
    }
    // Each worker of the software GPU has memory of its own, so together they may have more than there is.
    memory.used = std::min(memory.used, memory.total);
    memory.free = memory.total - memory.used;
    return memory;
  }

  static void PutMemory(const DeviceFacts& facts, int device, const std::vector<AskedSession>& sessions,
                        nvml::Answer* answer) {
    Put(answer, Usage(facts, device, sessions));
  }

  static void PutMemoryV2(const DeviceFacts& facts, int device, const std::vector<AskedSession>& sessions,
                          const Question& question, nvml::Answer* answer) {
    nvml::MemoryV2 out = {};
    memcpy(&out.version, question.input.data(), sizeof(out.version));
    const nvml::Memory memory = Usage(facts, device, sessions);
    out.total = memory.total;
    out.free = memory.free;
    out.used = memory.used;
    Put(answer, out);
  }

  // The driver API says where the device is, not what its identifiers and class are: those stay zero.
  static bool GetPci(const DeviceFacts& facts, nvml::PciInfo* out) {
    nvml::PciInfo pci = {};
    unsigned function = 0;
    if (sscanf(facts.pci_bus_id.c_str(), "%x:%x:%x.%x", &pci.domain, &pci.bus, &pci.device, &function) < 3)
      return false;
    snprintf(pci.bus_id_legacy, sizeof(pci.bus_id_legacy), "%04X:%02X:%02X.0", pci.domain & 0xffff, pci.bus & 0xff,
             pci.device & 0xff);
    snprintf(pci.bus_id, sizeof(pci.bus_id), "%08X:%02X:%02X.0", pci.domain, pci.bus & 0xff, pci.device & 0xff);
    *out = pci;
    return true;
  }

  static void PutPci(const DeviceFacts& facts, nvml::Answer* answer) {
    nvml::PciInfo pci;
    if (GetPci(facts, &pci)) Put(answer, pci);
  }

  static void PutPciExt(const DeviceFacts& facts, const Question& question, nvml::Answer* answer) {
    nvml::PciInfo pci;
    if (!GetPci(facts, &pci)) return;
    nvml::PciInfoExt out = {};
    memcpy(&out.version, question.input.data(), sizeof(out.version));
    out.domain = pci.domain;
    out.bus = pci.bus;
    out.device = pci.device;
    memcpy(out.bus_id, pci.bus_id, sizeof(out.bus_id));
    Put(answer, out);
  }

  static void PutMaxClock(const DeviceFacts& facts, uint32_t type, nvml::Answer* answer) {
    const bool memory = type == nvml::kMemoryClock;
    const CUdevice_attribute attribute =
        memory ? CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE : CU_DEVICE_ATTRIBUTE_CLOCK_RATE;
    if (type > nvml::kVideoClock) {
      answer->result = nvml::kInvalidArgument;
    } else if (type != nvml::kVideoClock && Known(facts, attribute)) {
      Put(answer, uint32_t(facts.attributes[attribute] / 1000));
    }
  }

  const LoadedDriver& driver_;
  std::string version_;
};

}  // namespace

std::unique_ptr<NvmlSource> MakeDriverFacts(const LoadedDriver& driver) { return std::make_unique<FromDriver>(driver); }

}  // namespace cuda_remote::server
