// SPDX-License-Identifier: Apache-2.0
// The engines that there are. What uses one knows it as a SnapshotEngine.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_ENGINES_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_ENGINES_H_

#include <memory>
#include <string>

#include "checkpoint/engine/snapshot_engine.h"
#include "ckptfmt/types.h"

namespace cuda_remote::checkpoint {

// The engine that saves jobs.
std::unique_ptr<SnapshotEngine> NewEngine();

// The engine that saved an image's processes, and its facts of them (SnapshotEngine::Describe). Null if this version
// has no such engine, or the image no facts.
std::unique_ptr<SnapshotEngine> EngineOf(const ckptfmt::ImageInfo& info, std::string* facts);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_ENGINES_H_
