// SPDX-License-Identifier: Apache-2.0
// The driver's private export tables, as far as the CUDA runtime and the CUDA libraries need them.
//
// cuGetExportTable hands out tables of functions that no header describes. README.md says what is known of them and how
// it was measured. The client library and the software GPU both answer from here; what differs between them is a Host.
//
// Part of the client library: libc and libstdc++ only. Thread-safe after SetHost.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_EXPORT_TABLES_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_EXPORT_TABLES_H_

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

namespace cuda_remote::driverabi {

using TableId = std::array<unsigned char, 16>;
// The two tables that RealTables is behind.
inline constexpr TableId kStreamTable = {0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48,
                                         0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2};
inline constexpr TableId kLayoutTable = {0x17, 0x34, 0xdc, 0x26, 0x80, 0x0d, 0x47, 0x45,
                                         0x87, 0x26, 0xc0, 0xf1, 0xe7, 0xdd, 0x8b, 0xca};

// What a table asks of the real driver: the two that cuBLASLt needs depend on the GPU.
struct RealTables {
  // The value that the driver keeps for a stream (table 21318c60, words 51 and 39).
  CUresult (*stream_value)(CUcontext context, CUstream stream, uint64_t* value);
  // For each pair of multiprocessors its cluster and its number therein (table 1734dc26, word 4): two arrays of the
  // same length, one byte for each pair.
  CUresult (*pair_layout)(std::vector<uint8_t>* clusters, std::vector<uint8_t>* numbers);
};

// Tells somebody of every call of a table's function. All three are set; the runtime asks a table at each
// of its own calls, so there is no function to call where nobody wants to know.
struct CallTrace {
  const std::atomic<uint32_t>* on;  // 0: at present nobody does
  // A number for the function of this name, "table d4082055[1]".
  uint32_t (*number)(const char* name);
  // Calls body(argument) and returns its result.
  CUresult (*run)(uint32_t number, CUresult (*body)(void* argument), void* argument);
};

// What the tables ask of the driver around them. All members but the last two must be set. The answers must be those
// that the program gets through the public calls, else the runtime's driver check fails.
struct Host {
  CUresult (*driver_version)(int* version);
  CUresult (*device_count)(int* count);
  CUresult (*device_uuid)(CUdevice device, CUuuid* uuid);
  CUresult (*device_attribute)(int* value, CUdevice_attribute attribute, CUdevice device);
  // The device's primary context, neither retained nor made current.
  CUresult (*primary_context)(CUcontext* context, CUdevice device);
  // Current context of the calling thread, null if none.
  CUcontext (*current_context)();
  CUresult (*module_functions)(CUmodule module, std::vector<CUfunction>* functions);
  // One line for a person, without a newline.
  void (*log)(const char* line);
  // Null where no real driver is behind: its two tables then do not exist.
  const RealTables* real = nullptr;
  // Null: nobody wants to know.
  const CallTrace* trace = nullptr;
};

// Once, before the first GetExportTable.
void SetHost(const Host& host);

// What cuGetExportTable does. An unknown table is CUDA_ERROR_NOT_FOUND with *table null, as natively.
CUresult GetExportTable(const void** table, const CUuuid* id);

// Runs the destructors of everything that was put into the context's storage, and forgets it. To be called when a
// context is destroyed and when a primary context is reset or released for the last time; without any lock held.
void ContextDestroyed(CUcontext context);

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_EXPORT_TABLES_H_
