// SPDX-License-Identifier: Apache-2.0
// Fuzz target: entries of an address list.

#include <string>
#include <string_view>
#include <vector>

#include "proto/control/address_list.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote::control;  // NOLINT: a test program

namespace {
void Check(bool ok) {
  if (!ok) __builtin_trap();
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  AddressList list;
  if (const absl::Status added = list.Add(text); !added.ok()) {
    Check(list.empty() && !added.message().empty());
    return 0;
  }
  // It contains the address that it begins with, and that address is written as it is read.
  IpAddress first, again;
  Check(ParseIpAddress(text.substr(0, text.find('/')), &first));
  Check(list.Contains(first));
  Check(ParseIpAddress(IpAddressText(first), &again) && again == first);
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  return {"10.1.2.3", "10.1.2.0/24", "0.0.0.0/0", "fd00::/8", "::1", "::ffff:10.1.2.3/128", "10.1.2.3/33"};
}
