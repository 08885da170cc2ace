// SPDX-License-Identifier: Apache-2.0
// Several PTX texts as one: what a linker does, on text.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_MERGE_H_
#define CUDA_REMOTE_SOFTGPU_PTX_MERGE_H_

#include <string>
#include <vector>

#include "proto/base/status.h"

namespace cuda_remote::softgpu::ptx {

// Puts the texts after one another under one header (the newest version, the highest target). Names that are local to a
// text and that an earlier one has too get a suffix. A failure names what is declared and nowhere defined. What is
// defined twice, parsing the result finds. Thread-safe; any text is safe.
StatusOr<std::string> Merge(const std::vector<std::string>& texts);

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_MERGE_H_
