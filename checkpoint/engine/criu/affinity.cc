// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/affinity.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace cuda_remote::checkpoint {
namespace {

// A bit for each processor, as the kernel has them. More than any kernel has (CONFIG_NR_CPUS).
constexpr size_t kWords = 256, kWordBits = 64;
using Mask = std::vector<uint64_t>;

// Empty if there is no such thread.
Mask MaskOf(pid_t thread) {
  Mask mask(kWords);
  const long bytes = syscall(SYS_sched_getaffinity, thread, mask.size() * sizeof(mask[0]), mask.data());
  mask.resize(bytes > 0 ? size_t(bytes) / sizeof(mask[0]) : 0);
  return mask;
}

bool Has(const Mask& mask, size_t processor) {
  return processor / kWordBits < mask.size() && (mask[processor / kWordBits] >> processor % kWordBits & 1) != 0;
}

}  // namespace

void FindAffinities(const Job& job, ProcessFacts* facts) {
  facts->clear_affinities();
  const Mask usual = MaskOf(job.init_pid() > 0 ? job.init_pid() : job.runner_pid());
  std::map<Mask, std::vector<int>> threads;
  for (const int pid : ProcessesOf(job)) {
    for (const int thread : ThreadsOf(pid)) {
      Mask mask = MaskOf(thread);
      const int number = mask.empty() || mask == usual ? 0 : InnerPid(thread);
      if (number > 0) threads[std::move(mask)].push_back(number);
    }
  }
  for (const auto& [mask, numbers] : threads) {
    Affinity* const affinity = facts->add_affinities();
    affinity->mutable_threads()->Add(numbers.begin(), numbers.end());
    for (size_t processor = 0; processor < mask.size() * kWordBits; ++processor) {
      if (Has(mask, processor)) affinity->add_processors(uint32_t(processor));
    }
  }
}

void RestoreAffinities(const ProcessFacts& facts, pid_t init) {
  const Mask usable = MaskOf(init);
  std::map<int, Mask> wanted;  // by thread, as the job numbers it
  for (const Affinity& affinity : facts.affinities()) {
    Mask mask(usable.size());
    const bool is_usable =
        std::all_of(affinity.processors().begin(), affinity.processors().end(), [&](uint32_t processor) {
          if (!Has(usable, processor)) return false;
          mask[processor / kWordBits] |= uint64_t{1} << processor % kWordBits;
          return true;
        });
    for (const int thread : affinity.threads()) {
      if (is_usable && affinity.processors_size() > 0) wanted[thread] = mask;
    }
  }
  if (wanted.empty()) return;
  Job job;
  job.set_init_pid(init);
  job.set_pid_namespace(PidNamespace(init));
  for (const int pid : ProcessesOf(job)) {
    for (const int thread : ThreadsOf(pid)) {
      const auto mask = wanted.find(InnerPid(thread));
      if (mask == wanted.end()) continue;
      // If the control group does not allow it, the thread keeps what it has.
      syscall(SYS_sched_setaffinity, thread, mask->second.size() * sizeof(mask->second[0]), mask->second.data());
    }
  }
}

}  // namespace cuda_remote::checkpoint
