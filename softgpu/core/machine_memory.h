// SPDX-License-Identifier: Apache-2.0
// How much of each GPU's memory all processes together hold that name the same file in SOFTGPU_MEMORY_FILE, as on a
// real machine. Without that setting each process has GPUs of its own.
//
// The file has a row for each thing that a process holds. Each process has a lock of its own in the file; the rows of
// one whose lock is gone count no more. Memory that several processes have, since one of them exported it, counts once.
//
// Thread-safe.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_MACHINE_MEMORY_H_
#define CUDA_REMOTE_SOFTGPU_CORE_MACHINE_MEMORY_H_

#include <cstdint>
#include <set>

#include "proto/threads/mutex.h"

namespace cuda_remote::softgpu {

class MachineMemory {
 public:
  // Null without the setting, or if the file is of no use; then it says so.
  static MachineMemory* Get();

  // `gpu`: its number on the machine. `thing`: what names the memory in all processes; 0: it is this process's alone.
  // False if all processes would have more than `total`.
  bool Take(int gpu, uint64_t thing, uint64_t bytes, uint64_t total);
  void Give(int gpu, uint64_t thing, uint64_t bytes);
  // Of all processes.
  uint64_t Used(int gpu);

 private:
  struct Row {
    uint64_t process;  // the number of its lock, from 1; 0: no row
    uint64_t gpu, thing, bytes;
  };
  static constexpr uint64_t kRows = 8192, kProcesses = 512;

  MachineMemory(int fd, Row* rows, uint64_t own) : fd_(fd), rows_(rows), own_(own) {}
  static MachineMemory* Open(const char* path);
  // Forgets what dead processes had.
  void Reap() CR_REQUIRES(mutex_);
  uint64_t SumLocked(int gpu, uint64_t thing, bool* known) CR_REQUIRES(mutex_);

  const int fd_;
  Row* const rows_ CR_PT_GUARDED_BY(mutex_);
  const uint64_t own_;
  Mutex mutex_;  // the file's lock is one for all threads
};

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_MACHINE_MEMORY_H_
