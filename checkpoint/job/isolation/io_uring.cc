// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/isolation/io_uring.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace cuda_remote::checkpoint {
namespace {

// The same number on every architecture that CUDA runs on, also for 32-bit programs; x32 programs add a bit.
constexpr unsigned kIoUringSetup = 425;
constexpr unsigned kX32Bit = 0x40000000;

}  // namespace

bool WithholdIoUring() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kIoUringSetup, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kIoUringSetup | kX32Bit, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {sizeof(code) / sizeof(code[0]), code};
  // This is no sandbox: without the flag, kernels before 5.16 slow all of the job's memory accesses down.
  return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program) == 0;
}

}  // namespace cuda_remote::checkpoint
