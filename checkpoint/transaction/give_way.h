// SPDX-License-Identifier: Apache-2.0
// Work of a tool beside a running job: it takes only processor time that nobody else wants (SCHED_IDLE).
//
// Nothing changes where that could not be taken back: without CAP_SYS_NICE or a limit RLIMIT_NICE that allows it. Nor
// where the kernel does not tell how long threads wait for a processor (/proc/PID/schedstat), or if the user has
// started the tool with another policy than the usual one. Nice values stay as they are.
//
// Some kernels divide time among sessions first (autogroup), where policies of other sessions do not count. There the
// tool's own session gets the least share, if no other process is in it.
//
// On a machine without idle processors, threads of this policy hardly run. So nothing changes where more threads want
// to run than there are processors. Where this comes later, a thread of the usual policy compares how long the others
// run and wait, and gives all of them the usual policy back if they starve.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_GIVE_WAY_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_GIVE_WAY_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "proto/base/clock.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {

// Whether threads starve that have run and waited for a processor so long altogether, in the last `seconds`: they got
// less than a tenth of the time that they asked for, which was half a processor's at least.
bool Starve(double ran, double waited, double seconds);

// Whether more threads of this machine want to run than it has processors, as far as a few looks within 10 ms tell.
bool ProcessorsAreBusy();

// For one thread; starts another. One at a time in a process.
class GiveWay {
 public:
  // `look_every`: how often to look whether threads starve. They give way for four times this time at least. `busy`:
  // whether Begin is to change nothing.
  explicit GiveWay(std::chrono::milliseconds look_every = std::chrono::milliseconds(100),
                   std::function<bool()> busy = ProcessorsAreBusy);
  // Ends it.
  ~GiveWay();
  GiveWay(const GiveWay&) = delete;
  GiveWay& operator=(const GiveWay&) = delete;

  // From now on all threads of this process give way to others, also threads that start meanwhile. Children made by
  // fork have the usual policy. `helpers`: processes that work for this tool, and whose threads give way, too, also in
  // later calls. If this process is killed, they stay so: they must be of no use to anybody else before End.
  void Begin(const std::vector<pid_t>& helpers = {});
  // All threads have the usual policy when it returns. One that a helper was just starting gets it soon, or in the next
  // End: call it again before others depend on a helper.
  void End();

  // Whether the threads give way now: Begin was not in vain, and they do not starve.
  bool active() const;

 private:
  class Process;
  // Of one thread, in nanoseconds.
  struct Times {
    uint64_t ran = 0, waited = 0;
    uint64_t begun = 0;  // how often it got a processor
  };

  bool IsPossible() const;
  void Ask(bool give_way, const std::vector<pid_t>& helpers);
  // Of the thread that watches.
  void Watch();
  void Change(bool gives_way);
  void Look(Moment now);
  bool Starved(Moment now);

  const std::chrono::milliseconds look_every_;
  const std::function<bool()> busy_;
  std::thread watcher_;

  // The watcher's.
  std::list<Process> processes_;   // this one, and the helpers
  std::map<pid_t, Times> last_;    // at `looked_`
  uint64_t ran_ = 0, waited_ = 0;  // since `since_`
  int looks_ = 0;
  Moment since_, looked_;

  mutable Mutex mutex_;
  Condition changed_;
  bool wanted_ CR_GUARDED_BY(mutex_) = false, over_ CR_GUARDED_BY(mutex_) = false;
  std::vector<pid_t> new_ CR_GUARDED_BY(mutex_);  // helpers
  uint64_t asked_ CR_GUARDED_BY(mutex_) = 0, answered_ CR_GUARDED_BY(mutex_) = 0;
  bool active_ CR_GUARDED_BY(mutex_) = false;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_GIVE_WAY_H_
