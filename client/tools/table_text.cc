// SPDX-License-Identifier: Apache-2.0
#include "client/tools/table_text.h"

#include "proto/base/clock.h"
#include "proto/base/text.h"

namespace cuda_remote::client::tools {

std::string Ago(uint64_t unix_ms) { return unix_ms == 0 ? "-" : Age(unix_ms) + " ago"; }

std::string Age(uint64_t unix_ms) {
  if (unix_ms == 0) return "-";
  return AgeText(UnixMs() - int64_t(unix_ms));
}

}  // namespace cuda_remote::client::tools
