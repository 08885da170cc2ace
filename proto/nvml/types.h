// SPDX-License-Identifier: Apache-2.0
// What we use of NVML's binary interface: return codes, constants and struct layouts, as NVIDIA documents them.
//
// Written by hand from the documentation, because no toolkit or driver package brings NVML's own header to machines
// without a GPU. The layouts are x86-64's and checked below: programs pass these structs to our library as they would
// to NVML, and the server passes them to NVML itself.
//
// A struct that carries its version in its first word has size | version << 24 there (VersionWord).
#ifndef CUDA_REMOTE_PROTO_NVML_TYPES_H_
#define CUDA_REMOTE_PROTO_NVML_TYPES_H_

#include <cstddef>
#include <cstdint>

namespace cuda_remote::nvml {

enum Return : int32_t {
  kSuccess = 0,
  kUninitialized = 1,
  kInvalidArgument = 2,
  kNotSupported = 3,
  kNoPermission = 4,
  kAlreadyInitialized = 5,
  kNotFound = 6,
  kInsufficientSize = 7,
  kInsufficientPower = 8,
  kDriverNotLoaded = 9,
  kTimeout = 10,
  kIrqIssue = 11,
  kLibraryNotFound = 12,
  kFunctionNotFound = 13,
  kCorruptedInforom = 14,
  kGpuIsLost = 15,
  kResetRequired = 16,
  kOperatingSystem = 17,
  kLibraryVersionMismatch = 18,
  kInUse = 19,
  kMemoryError = 20,
  kNoData = 21,
  kVgpuEccNotSupported = 22,
  kInsufficientResources = 23,
  kFrequencyNotSupported = 24,
  kArgumentVersionMismatch = 25,
  kDeprecated = 26,
  kNotReady = 27,
  kGpuNotFound = 28,
  kInvalidState = 29,
  kResetTypeNotSupported = 30,
  kUnknownError = 999,
};

// Names and versions, with their terminating zero.
inline constexpr uint32_t kNameBytes = 96;
inline constexpr uint32_t kUuidBytes = 96;
inline constexpr uint32_t kVersionBytes = 80;
inline constexpr uint32_t kNoInstance = 0xffffffff;  // a process that is in no MIG instance
inline constexpr uint32_t kMaxLinks = 18;

enum Architecture : uint32_t {
  kKepler = 2,
  kMaxwell = 3,
  kPascal = 4,
  kVolta = 5,
  kTuring = 6,
  kAmpere = 7,
  kAda = 8,
  kHopper = 9,
  kBlackwell = 10,
  kUnknownArchitecture = 0xffffffff,
};

enum ClockType : uint32_t { kGraphicsClock = 0, kSmClock = 1, kMemoryClock = 2, kVideoClock = 3 };
enum P2PStatus : uint32_t { kP2POk = 0, kP2PNotSupported = 5 };
enum P2PIndex : uint32_t { kP2PRead = 0, kP2PWrite = 1, kP2PNvlink = 2, kP2PAtomics = 3, kP2PPci = 4 };
enum UuidType : uint32_t { kUuidAscii = 1, kUuidBinary = 2 };

constexpr uint32_t VersionWord(size_t bytes, uint32_t version) { return uint32_t(bytes) | version << 24; }

struct Memory {
  uint64_t total, free, used;
};
static_assert(sizeof(Memory) == 24);

struct MemoryV2 {
  uint32_t version;
  uint64_t total, reserved, free, used;
};
static_assert(sizeof(MemoryV2) == 40 && offsetof(MemoryV2, total) == 8 && offsetof(MemoryV2, used) == 32);

struct Utilization {
  uint32_t gpu, memory;
};
static_assert(sizeof(Utilization) == 8);

struct PciInfo {
  char bus_id_legacy[16];  // "0000:1B:00.0"
  uint32_t domain, bus, device;
  uint32_t pci_device_id;  // device << 16 | vendor
  uint32_t pci_subsystem_id;
  char bus_id[32];  // "00000000:1B:00.0"
};
static_assert(sizeof(PciInfo) == 68 && offsetof(PciInfo, domain) == 16 && offsetof(PciInfo, bus_id) == 36);
// What the two older calls have: no `bus_id`, the first one no `pci_subsystem_id` either.
inline constexpr size_t kPciInfoV1Bytes = offsetof(PciInfo, pci_subsystem_id);
inline constexpr size_t kPciInfoV2Bytes = offsetof(PciInfo, bus_id);

struct PciInfoExt {
  uint32_t version, domain, bus, device, pci_device_id, pci_subsystem_id, base_class, sub_class;
  char bus_id[32];
};
static_assert(sizeof(PciInfoExt) == 64);

struct ProcessInfoV1 {
  uint32_t pid;
  uint64_t used_bytes;
};
static_assert(sizeof(ProcessInfoV1) == 16);

// Of versions 2 and 3 of the calls.
struct ProcessInfo {
  uint32_t pid;
  uint64_t used_bytes;
  uint32_t gpu_instance, compute_instance;
};
static_assert(sizeof(ProcessInfo) == 24 && offsetof(ProcessInfo, gpu_instance) == 16);

struct FieldValue {
  uint32_t field, scope;
  int64_t timestamp_us, latency_us;
  uint32_t value_type;
  int32_t result;  // Return, of this field
  uint64_t value;  // a union of numbers of up to 8 bytes
};
static_assert(sizeof(FieldValue) == 40 && offsetof(FieldValue, value) == 32);

struct FabricInfo {
  uint8_t cluster[16];
  int32_t status;  // Return
  uint32_t clique;
  uint8_t state;
};
static_assert(sizeof(FabricInfo) == 28);

struct FabricInfoV2 {
  uint32_t version;
  uint8_t cluster[16];
  int32_t status;
  uint32_t clique;
  uint8_t state;
  uint32_t health_mask;
};
static_assert(sizeof(FabricInfoV2) == 36);

struct FabricInfoV3 {
  uint32_t version;
  uint8_t cluster[16];
  int32_t status;
  uint32_t clique;
  uint8_t state;
  uint32_t health_mask;
  uint8_t health_summary;
};
static_assert(sizeof(FabricInfoV3) == 40);

struct TemperatureV1 {
  uint32_t version, sensor;
  int32_t temperature;
};
static_assert(sizeof(TemperatureV1) == 12);

struct MarginTemperature {
  uint32_t version;
  int32_t margin;
};
static_assert(sizeof(MarginTemperature) == 8);

struct FanSpeedInfo {
  uint32_t version, fan, speed;
};
static_assert(sizeof(FanSpeedInfo) == 12);

struct CoolerInfo {
  uint32_t version, index, signal, target;
};
static_assert(sizeof(CoolerInfo) == 16);

// Both versions have the same layout, with other names.
struct PlatformInfo {
  uint32_t version;
  uint8_t ib_guid[16];
  uint8_t chassis[16];
  uint8_t slot, tray, host, peer_type, module;
};
static_assert(sizeof(PlatformInfo) == 44);

struct Capabilities {
  uint32_t version, mask;
};
static_assert(sizeof(Capabilities) == 8);

struct AddressingMode {
  uint32_t version, value;
};
static_assert(sizeof(AddressingMode) == 8);

struct ConfComputeState {
  uint32_t environment, feature, developer_mode;
};
static_assert(sizeof(ConfComputeState) == 12);

struct ConfComputeSettings {
  uint32_t version, environment, feature, developer_mode, multi_gpu_mode;
};
static_assert(sizeof(ConfComputeSettings) == 20);

struct ConfComputeCapabilities {
  uint32_t cpu, gpus;
};
static_assert(sizeof(ConfComputeCapabilities) == 8);

struct DeviceAttributes {
  uint32_t multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
  uint64_t memory_mib;
};
static_assert(sizeof(DeviceAttributes) == 40);

struct RowRemapperHistogram {
  uint32_t max, high, partial, low, none;
};
static_assert(sizeof(RowRemapperHistogram) == 20);

struct EccErrorCounts {
  uint64_t l1, l2, memory, registers;
};
static_assert(sizeof(EccErrorCounts) == 32);

struct ViolationTime {
  uint64_t reference_ns, violation_ns;
};
static_assert(sizeof(ViolationTime) == 16);

struct Bar1Memory {
  uint64_t total, free, used;
};
static_assert(sizeof(Bar1Memory) == 24);

struct Uuid {
  uint32_t version, type;
  union {
    char text[41];
    uint8_t bytes[16];
  };
};
static_assert(sizeof(Uuid) == 52 && offsetof(Uuid, text) == 8);

struct EventData {
  void* device;
  uint64_t type, data;
  uint32_t gpu_instance, compute_instance;
};
static_assert(sizeof(EventData) == 32);

}  // namespace cuda_remote::nvml

#endif  // CUDA_REMOTE_PROTO_NVML_TYPES_H_
