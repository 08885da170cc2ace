// SPDX-License-Identifier: Apache-2.0
// What the tools say of the snapshot engine, whichever it is.
#ifndef CUDA_REMOTE_PROGRAMS_TOOLS_ENGINE_HELP_H_
#define CUDA_REMOTE_PROGRAMS_TOOLS_ENGINE_HELP_H_

#include <string>

#include "checkpoint/engine/snapshot_engine.h"

namespace cuda_remote::client::tools {

// A paragraph for --help. `without_root`: sentences that say what ordinary users can do, for an engine that needs root.
inline std::string NeedsText(const checkpoint::SnapshotEngine& engine, const std::string& without_root) {
  const bool root = engine.Capabilities().needs_root;
  return "\nNeeds " + engine.Requirement() + (root ? " and root.\n" + without_root : ".") + "\n";
}

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_PROGRAMS_TOOLS_ENGINE_HELP_H_
