// SPDX-License-Identifier: Apache-2.0
// Has a process run on that SIGSTOP has stopped, so that the program does not notice.
//
// Only SIGCONT ends such a stop, and a program may catch it: Open MPI's mpirun passes it on to all ranks, which makes
// it lose their output while it starts them. So the signal is taken from the program by ptrace, before it is delivered.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CONTINUE_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CONTINUE_H_

namespace cuda_remote::checkpoint {

// `process`: a descriptor of process `pid` (pidfd_open). False if the process cannot be sent a signal; true if it has
// ended. The program notices if this thread may not trace the process, or if the process is not stopped. Any thread.
bool ContinueUnnoticed(int pid, int process);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CONTINUE_H_
