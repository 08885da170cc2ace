// SPDX-License-Identifier: Apache-2.0
// The program's settings of the driver: environment variables that a driver reads when it starts, and that change what
// a program sees of it. The driver runs in a worker of the GPU server, which has another environment, so the program's
// settings go there with the session. (CUDA C++ Programming Guide, "CUDA Environment Variables".)
//
// CUDA_VISIBLE_DEVICES is not one of them (visible_devices.h). Those that name files or folders are not either: they
// would have the server's user read and write files that a client names.
//
// Part of the client library: no exceptions of its own but std::bad_alloc, no logging. Thread-safe.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_DRIVER_SETTINGS_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_DRIVER_SETTINGS_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cuda_remote::driverabi {

// Names and values, in the order of the table in driver_settings.cc.
using DriverSettings = std::vector<std::pair<std::string, std::string>>;

inline constexpr char kDeviceOrder[] = "CUDA_DEVICE_ORDER";

// This process's. A value that no driver would take (longer than 32 bytes, or with other characters than letters,
// digits, '.', '-' and '_') is left out.
DriverSettings OwnDriverSettings();

// Whether a driver of this process takes this value anyway, by its environment or because that is the value of a driver
// that is told nothing. (PyTorch sets CUDA_MODULE_LOADING=LAZY, which is one.)
bool HasDriverSetting(const std::string& name, const std::string& value);

// "NAME=VALUE NAME=VALUE"; empty if there are none.
std::string DriverSettingsText(const DriverSettings& settings);

// The other way. False if the text is not such a one: another name, a value as above, a name that comes twice. Any
// input is safe.
bool ParseDriverSettings(std::string_view text, DriverSettings* settings);

// CUDA_DEVICE_ORDER=PCI_BUS_ID: devices are numbered by their place on the bus, and not the fastest first.
bool OrdersByBus(const DriverSettings& settings);

// CUDA_LAUNCH_BLOCKING, set to other than 0: a launch returns when its kernel has ended.
bool LaunchesBlock(const DriverSettings& settings);

// The devices in the order of their places on the bus ("0000:0F:00.0"), as indices.
std::vector<int> OrderByBus(const std::vector<std::string>& places);

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_DRIVER_SETTINGS_H_
