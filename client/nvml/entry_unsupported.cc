// SPDX-License-Identifier: Apache-2.0
// Every other function that NVML documents, so that no program fails when it looks one up.
#include "client/nvml/library.h"

#define NVML_UNSUPPORTED(name) \
  extern "C" __attribute__((visibility("default"))) int name() { return cuda_remote::client::Unsupported(#name); }

#include "client/nvml/unsupported.inc"
