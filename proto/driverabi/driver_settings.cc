// SPDX-License-Identifier: Apache-2.0
#include "proto/driverabi/driver_settings.h"

#include <stdlib.h>

#include <algorithm>
#include <numeric>

#include "proto/base/environment.h"

namespace cuda_remote::driverabi {
namespace {

constexpr char kLaunchBlocking[] = "CUDA_LAUNCH_BLOCKING";

// `standard`: what the driver takes where the variable is not set; null: not documented, or not one value.
constexpr struct {
  const char* name;
  const char* standard;
} kKnown[] = {
    {"CUDA_AUTO_BOOST", nullptr},
    {"CUDA_BINARY_LOADER_THREAD_COUNT", nullptr},
    {"CUDA_CACHE_DISABLE", "0"},
    {"CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT", "0"},
    {"CUDA_DEVICE_MAX_CONNECTIONS", "8"},
    {"CUDA_DEVICE_MAX_COPY_CONNECTIONS", "8"},
    {kDeviceOrder, "FASTEST_FIRST"},
    {"CUDA_DISABLE_JIT", "0"},
    {"CUDA_DISABLE_PERF_BOOST", "0"},
    {"CUDA_DISABLE_PTX_JIT", "0"},
    {"CUDA_FORCE_JIT", "0"},
    {"CUDA_FORCE_PTX_JIT", "0"},
    {"CUDA_GRAPHS_USE_NODE_PRIORITY", "0"},
    {kLaunchBlocking, "0"},
    {"CUDA_MANAGED_FORCE_DEVICE_ALLOC", "0"},
    {"CUDA_MODULE_DATA_LOADING", nullptr},
    {"CUDA_MODULE_LOADING", "LAZY"},  // since CUDA 12.2
    {"CUDA_SCALE_LAUNCH_QUEUES", "1x"},
};
constexpr size_t kMostBytes = 32;

bool IsValue(std::string_view value) {
  return value.size() <= kMostBytes && std::all_of(value.begin(), value.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' ||
                  c == '_';
         });
}

bool IsName(std::string_view name) {
  return std::any_of(std::begin(kKnown), std::end(kKnown), [&](const auto& one) { return name == one.name; });
}

std::string_view ValueOf(const DriverSettings& settings, std::string_view name) {
  for (const auto& [one, value] : settings) {
    if (one == name) return value;
  }
  return {};
}

}  // namespace

DriverSettings OwnDriverSettings() {
  DriverSettings settings;
  for (const auto& known : kKnown) {
    const char* const value = TrustedVariable(known.name);
    if (value && IsValue(value)) settings.emplace_back(known.name, value);
  }
  return settings;
}

std::string DriverSettingsText(const DriverSettings& settings) {
  std::string text;
  for (const auto& [name, value] : settings) text += (text.empty() ? "" : " ") + name + "=" + value;
  return text;
}

bool ParseDriverSettings(std::string_view text, DriverSettings* settings) {
  settings->clear();
  while (!text.empty()) {
    const std::string_view one = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(one.size() + 1, text.size()));
    const size_t equals = one.find('=');
    if (equals == std::string_view::npos) return false;
    const std::string_view name = one.substr(0, equals), value = one.substr(equals + 1);
    if (!IsName(name) || !IsValue(value)) return false;
    for (const auto& other : *settings) {
      if (other.first == name) return false;
    }
    settings->emplace_back(name, value);
  }
  return true;
}

bool HasDriverSetting(const std::string& name, const std::string& value) {
  const char* const own = TrustedVariable(name.c_str());
  if (own) return value == own;
  return std::any_of(std::begin(kKnown), std::end(kKnown), [&](const auto& known) {
    return name == known.name && known.standard && value == known.standard;
  });
}

bool OrdersByBus(const DriverSettings& settings) { return ValueOf(settings, kDeviceOrder) == "PCI_BUS_ID"; }

bool LaunchesBlock(const DriverSettings& settings) {
  const std::string_view value = ValueOf(settings, kLaunchBlocking);
  return !value.empty() && value != "0";
}

std::vector<int> OrderByBus(const std::vector<std::string>& places) {
  std::vector<int> order(places.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return places[size_t(a)] < places[size_t(b)]; });
  return order;
}

}  // namespace cuda_remote::driverabi
