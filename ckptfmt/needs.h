// SPDX-License-Identifier: Apache-2.0
// Whether this machine has the files that an image needs (types.h, Needs).
//
// A program or library is the same if its build id is: the linker's hash of its contents, an ELF note. Another file is
// the same if its size is. Thread-safe: no state.
#ifndef CUDA_REMOTE_CKPTFMT_NEEDS_H_
#define CUDA_REMOTE_CKPTFMT_NEEDS_H_

#include <functional>
#include <string>
#include <vector>

#include "ckptfmt/types.h"

namespace cuda_remote::ckptfmt {

// The bytes of the build id of the ELF file at `path`; empty if it is none, or has none.
std::string BuildIdOf(const std::string& path);

// The same as hexadecimal digits, as tools print it.
std::string PrintBuildId(const std::string& build_id);

// What is missing here, or is another file, a sentence each. Files of which the image has a copy are not looked for; a
// file that the job writes may have any size. `here`: the file that the job will see at that path.
std::vector<std::string> MissingHere(const Needs& needs,
                                     const std::function<std::string(const std::string& path)>& here = {});

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_NEEDS_H_
