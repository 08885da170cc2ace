// SPDX-License-Identifier: Apache-2.0
// Fuzz target: what any client says of its driver: settings, and the GPUs that it wants to see.

#include <algorithm>
#include <set>

#include "proto/driverabi/driver_settings.h"
#include "proto/driverabi/visible_devices.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote;  // NOLINT: a test program

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  driverabi::DriverSettings settings, again;
  if (driverabi::ParseDriverSettings(text, &settings)) {
    // It goes into the worker's environment: nothing of it may be more than a name and a plain value.
    for (const auto& [name, value] : settings) {
      if (name.compare(0, 5, "CUDA_") != 0 || name.find('=') != std::string::npos) __builtin_trap();
      if (value.size() > 32 || value.find_first_of(std::string(" /=\0\n", 5)) != std::string::npos) __builtin_trap();
    }
    const std::string written = driverabi::DriverSettingsText(settings);
    if (!driverabi::ParseDriverSettings(written, &again) || again != settings) __builtin_trap();
    driverabi::OrdersByBus(settings);
    driverabi::LaunchesBlock(settings);
  }
  static const std::vector<std::string> uuids = {std::string(16, '\x11'), std::string(16, '\x12'),
                                                 std::string("\x11\x12", 2) + std::string(14, '\x13')};
  const std::vector<int> devices = driverabi::VisibleDevices(text, uuids);
  if (std::set<int>(devices.begin(), devices.end()).size() != devices.size()) __builtin_trap();
  const auto is_there = [](int device) { return device >= 0 && size_t(device) < uuids.size(); };
  if (!std::all_of(devices.begin(), devices.end(), is_there)) __builtin_trap();
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  return {"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_LAUNCH_BLOCKING=1",
          "CUDA_MODULE_LOADING=EAGER",
          "0,1,2",
          "GPU-11111111-1111-1111-1111-111111111111,GPU-12",
          " +1 , 2x,-1",
          "MIG-1112"};
}
