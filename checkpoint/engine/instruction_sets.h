// SPDX-License-Identifier: Apache-2.0
// The instruction sets of the processor, which programs choose functions by when they start: a memcpy for AVX-512 is
// the end of a process that goes on where there is none.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_INSTRUCTION_SETS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_INSTRUCTION_SETS_H_

#include <istream>
#include <set>
#include <string>

namespace cuda_remote::checkpoint {

// Of a processor, from a text as in /proc/cpuinfo; several processors' texts: what all of them have. Names are the
// kernel's ("avx512f"). What only the kernel uses, or only says how fast something is, is left out.
std::set<std::string> ParseInstructionSets(std::istream& cpuinfo);

// Of this machine. Empty if it does not say.
std::set<std::string> InstructionSetsHere();

// Those of `saved` that are not among `here`, as in "avx512f, avx512bw"; empty if all are there.
std::string MissingInstructionSets(const std::set<std::string>& saved, const std::set<std::string>& here);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_INSTRUCTION_SETS_H_
