// SPDX-License-Identifier: Apache-2.0
// The signals that a tool in the foreground passes on to its job, and that an ordinary user's tool passes on through
// cr-hostd.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_FORWARDED_SIGNALS_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_FORWARDED_SIGNALS_H_

#include <signal.h>

namespace cuda_remote::checkpoint {

inline constexpr int kForwardedSignals[] = {SIGHUP,  SIGINT,   SIGQUIT, SIGTERM,   SIGUSR1, SIGUSR2, SIGALRM,
                                            SIGCONT, SIGWINCH, SIGURG,  SIGVTALRM, SIGPROF, SIGTSTP};

// Goes with a signal that is passed on: a terminal has sent it.
inline constexpr int kOfTerminal = 0x7e12;

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_FORWARDED_SIGNALS_H_
