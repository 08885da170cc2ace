// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/held_mutexes.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "checkpoint/job/job.h"
#include "proto/base/mappings.h"

namespace cuda_remote::checkpoint {
namespace {

// The kernel looks at no more of one thread.
constexpr int kMostMutexes = 2048;
// Pointers to mutexes with priority inheritance have this bit.
constexpr uint64_t kInherits = 1;
constexpr off_t kPageBytes = 4096;

template <typename T>
bool Read(int pid, uint64_t address, T* value) {
  iovec here{value, sizeof(*value)}, there{reinterpret_cast<void*>(address), sizeof(*value)};
  return process_vm_readv(pid, &here, 1, &there, 1, 0) == ssize_t(sizeof(*value));
}

}  // namespace

HeldMutexes::HeldMutexes(const std::vector<int>& pids) {
  for (const int pid : pids) {
    for (const int thread : ThreadsOf(pid)) LookAtThread(pid, thread);
  }
}

// The list begins at an address that each thread has told the kernel (get_robust_list(2)).
void HeldMutexes::LookAtThread(int pid, int thread) {
  robust_list_head* begin = nullptr;
  size_t bytes = 0;
  robust_list_head head;
  if (syscall(SYS_get_robust_list, thread, &begin, &bytes) != 0 || bytes != sizeof(head)) return;
  const auto first = reinterpret_cast<uint64_t>(begin);
  if (first == 0 || !Read(pid, first, &head)) return;
  const auto offset = uint64_t(head.futex_offset);
  // One that is being locked or unlocked.
  const auto pending = reinterpret_cast<uint64_t>(head.list_op_pending) & ~kInherits;
  if (pending != 0) LookAtMutex(pid, pending + offset);
  auto at = reinterpret_cast<uint64_t>(head.list.next) & ~kInherits;
  for (int i = 0; i < kMostMutexes && at != first && at != 0; ++i) {
    robust_list entry;
    LookAtMutex(pid, at + offset);
    if (!Read(pid, at, &entry)) return;
    at = reinterpret_cast<uint64_t>(entry.next) & ~kInherits;
  }
}

void HeldMutexes::LookAtMutex(int pid, uint64_t address) {
  const std::string process = "/proc/" + std::to_string(pid);
  const auto look = [&](const Mapping& mapping) {
    if (mapping.begin > address) return false;
    Mutex mutex;
    if (mapping.shared && mapping.inode != 0 && Read(pid, address, &mutex.value)) {
      mutex.file.Reset(open(MapFile(process, mapping).c_str(), O_RDWR | O_CLOEXEC));
      mutex.offset = off_t(address - mapping.begin + mapping.offset);
      if (mutex.file.ok()) mutexes_.push_back(std::move(mutex));
    }
    return false;
  };
  ForEachMapping(process, look, address);
}

void HeldMutexes::PutBack() {
  for (const Mutex& mutex : mutexes_) {
    const off_t page = mutex.offset / kPageBytes * kPageBytes;
    void* const memory = mmap(nullptr, size_t(kPageBytes), PROT_READ | PROT_WRITE, MAP_SHARED, mutex.file.get(), page);
    if (memory == MAP_FAILED) continue;
    auto* const word = reinterpret_cast<uint32_t*>(static_cast<char*>(memory) + (mutex.offset - page));
    uint32_t marked = (mutex.value & FUTEX_WAITERS) | FUTEX_OWNER_DIED;
    __atomic_compare_exchange_n(word, &marked, mutex.value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    munmap(memory, size_t(kPageBytes));
  }
  mutexes_.clear();
}

}  // namespace cuda_remote::checkpoint
