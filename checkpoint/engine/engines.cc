// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/engines.h"

#include "checkpoint/engine/criu/criu_engine.h"

namespace cuda_remote::checkpoint {

std::unique_ptr<SnapshotEngine> NewEngine() { return std::make_unique<CriuEngine>(); }

std::unique_ptr<SnapshotEngine> EngineOf(const ckptfmt::ImageInfo& info, std::string* facts) {
  std::unique_ptr<SnapshotEngine> engine = NewEngine();
  if (info.engine != engine->Name()) return nullptr;
  const auto found = info.client_info.find(info.engine);
  if (found == info.client_info.end()) return nullptr;
  *facts = found->second;
  return engine;
}

}  // namespace cuda_remote::checkpoint
