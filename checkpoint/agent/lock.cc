// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/agent/lock.h"

#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <map>

#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/errors/annotate.h"

namespace cuda_remote::agent {
namespace {

constexpr int64_t kMs = 1000;
// Between two looks: short at first, since most jobs are idle soon.
constexpr int64_t kFirstPauseUs = 200, kMostPauseUs = 1 * kMs;
// Before any call is let through. Most work ends by itself.
constexpr int64_t kGraceUs = 20 * kMs;
constexpr int64_t kSlowUs = 1000 * kMs;
// How long a gate is open for a capture that has to come to its end.
constexpr int64_t kCaptureUs = 2 * kMs;
// A GPU that was idle is "soon" idle again if it takes no longer than this after a call was let through.
constexpr int64_t kSoonUs = 20 * kMs;
// If it took longer, nobody waits for the next call for more than this part of the time since the lock began.
constexpr int64_t kMostHeldPart = 8;
// The pause before a call of a thread whose GPU has work, at first; how long no other process may have had a call let
// through by then, unless the pause is over for so many times as long.
constexpr int64_t kFirstBusyUs = 100 * kMs, kNoOtherUs = 20 * kMs, kNoOtherPauses = 10;
// A host function that has run for this long is what the GPU waits for; the square of this long after that, in units of
// kFunctionUnitMs, is how many calls have been let through.
constexpr int64_t kLongFunctionMs = 50, kFunctionUnitMs = 20;

// A context of a process.
struct Context {
  int64_t busy_since_us = -1;  // -1: idle
  // Whether it was idle when a call was let through, and is not known to be idle again; when that was; how often it was
  // not idle again soon; until when no further one is let through.
  bool pending = false;
  int64_t admitted_us = 0;
  int long_ones = 0;
  int64_t hold_until_us = 0;
};

struct Process {
  Lockable* what = nullptr;
  bool closed = false;
  bool settled = false;
  int64_t closed_us = 0;
  Activity activity;
  // A host function that ends by itself tells how long such functions may take.
  int64_t long_function_ms = kLongFunctionMs;
  uint64_t function_ms = 0;
  int64_t function_calls = 0;
  std::map<uint64_t, Context> contexts;
  int64_t answered_us = 0;
  int64_t hidden_since_us = -1;  // there is work, and no context shows it (a stream was destroyed); -1: there is none
};

std::string Seconds(int64_t us) {
  char text[32];
  snprintf(text, sizeof(text), us < 10000 * kMs ? "%.1f s" : "%.0f s", double(us) / 1e6);
  return text;
}

std::string Count(uint64_t count, const char* one, const char* many) {
  return std::to_string(count) + " " + (count == 1 ? one : many);
}

// What keeps a process from being idle, for a person.
std::string Reasons(const Activity& activity) {
  std::string text;
  const auto add = [&text](const std::string& reason) { text += (text.empty() ? "" : ", ") + reason; };
  if (activity.capturing) add("a stream is being captured into a graph");
  if (activity.host_function_ms != 0) {
    add("a host function (cudaLaunchHostFunc) has been running for " +
        Seconds(int64_t(activity.host_function_ms) * kMs));
  }
  if (activity.busy_streams != 0) add(Count(activity.busy_streams, "stream has work", "streams have work"));
  if (activity.inside != 0) add(Count(activity.inside, "CUDA call has not returned", "CUDA calls have not returned"));
  if (!activity.answered) add("its GPU server does not answer");
  if (text.empty()) add("its GPU has work");
  return text;
}

class Locker {
 public:
  Locker(const std::vector<Lockable*>& processes, const LockOptions& options)
      : options_(options), start_(Now()), end_(start_ + int64_t(options.timeout_ms) * kMs) {
    for (Lockable* const process : processes) {
      processes_.emplace_back();
      processes_.back().what = process;
    }
    busy_gap_ = kFirstBusyUs;
    next_busy_ = start_ + busy_gap_;
  }

  absl::StatusOr<int64_t> Run() {
    if (const absl::Status locked = Loop(); !locked.ok()) {
      for (Process& process : processes_) {
        if (process.closed) process.what->Open();
      }
      return asked_ ? AnnotateOneOf(processes_.size(), asked_->what->Name(), locked) : locked;
    }
    int64_t closed_us = end_;
    for (const Process& process : processes_) closed_us = std::min(closed_us, process.closed_us);
    return closed_us;
  }

 private:
  int64_t Now() const { return options_.clock.now_us(); }
  void Sleep(int64_t us) const { options_.clock.sleep_us(us); }
  // The next request goes to this one; if it fails, the error is about it.
  Lockable* Ask(const Process& process) {
    asked_ = &process;
    return process.what;
  }
  int LeftMs() const { return int(std::max<int64_t>(0, end_ - Now()) / kMs); }

  absl::Status Loop() {
    for (Process& process : processes_) CR_RETURN_IF_ERROR(CloseOne(&process));
    int64_t pause = kFirstPauseUs;
    while (true) {
      bool all_quiet = true, capturing = false;
      for (Process& process : processes_) {
        CR_ASSIGN_OR_RETURN(process.activity, Ask(process)->Look());
        NoteContexts(&process);
        NoteFunction(&process);
        all_quiet = all_quiet && process.activity.quiet;
        capturing = capturing || process.activity.capturing;
      }
      if (all_quiet) {
        CR_ASSIGN_OR_RETURN(const bool settled, SettleAll());
        if (settled) return absl::OkStatus();
      }
      if (options_.cancelled && options_.cancelled()) {
        asked_ = nullptr;
        return absl::CancelledError("interrupted");
      }
      if (Now() >= end_) return TooLate();
      if (capturing) {
        CR_RETURN_IF_ERROR(LetCapture());
        continue;
      }
      if (!all_quiet && Now() - start_ >= kGraceUs) CR_RETURN_IF_ERROR(AdmitSome());
      // Many calls may have to follow each other.
      if (soon_) pause = kFirstPauseUs;
      soon_ = false;
      Sleep(pause);
      pause = std::min(pause * 2, kMostPauseUs);
    }
  }

  absl::Status CloseOne(Process* process) {
    process->closed_us = process->answered_us = Now();
    CR_RETURN_IF_ERROR(Ask(*process)->Close());
    process->closed = true;
    return absl::OkStatus();
  }

  // False if a process was not quiet after all: then all are as before.
  absl::StatusOr<bool> SettleAll() {
    bool settled = true;
    for (Process& process : processes_) {
      if (process.settled) continue;
      CR_ASSIGN_OR_RETURN(process.settled, Ask(process)->Settle(LeftMs()));
      settled = process.settled;
      if (!settled) break;
    }
    if (settled) return true;
    for (Process& process : processes_) {
      if (!process.settled) continue;
      process.settled = false;
      CR_RETURN_IF_ERROR(Ask(process)->Close());
    }
    return false;
  }

  absl::Status LetCapture() {
    for (Process& process : processes_) {
      if (process.activity.capturing) process.what->Open();
    }
    Sleep(kCaptureUs);
    for (Process& process : processes_) {
      if (process.activity.capturing) CR_RETURN_IF_ERROR(CloseOne(&process));
    }
    return absl::OkStatus();
  }

  void NoteContexts(Process* process) const {
    if (!process->activity.answered) return;
    process->answered_us = Now();
    if (!process->activity.has_work) {
      process->hidden_since_us = -1;
    } else if (process->activity.busy_streams == 0 && process->hidden_since_us < 0) {
      process->hidden_since_us = Now();
    }
    for (auto& [handle, context] : process->contexts) {
      const auto& now = process->activity.contexts;
      const bool busy = std::any_of(now.begin(), now.end(), [handle = handle](const Activity::Context& one) {
        return one.context == handle && one.has_work;
      });
      if (!busy) context.busy_since_us = -1;
    }
    for (const Activity::Context& one : process->activity.contexts) {
      Context& context = process->contexts[one.context];
      if (one.has_work && context.busy_since_us < 0) context.busy_since_us = Now();
    }
  }

  // Whether some work has not ended for a while, or a server has not answered.
  bool IsStuck(int64_t now) const {
    return std::any_of(processes_.begin(), processes_.end(), [now](const Process& process) {
      if (process.activity.quiet) return false;
      return now - process.answered_us >= kGraceUs ||
             (process.hidden_since_us >= 0 && now - process.hidden_since_us >= kGraceUs) ||
             std::any_of(process.contexts.begin(), process.contexts.end(), [now](const auto& one) {
               return one.second.busy_since_us >= 0 && now - one.second.busy_since_us >= kGraceUs;
             });
    });
  }

  static void NoteFunction(Process* process) {
    const uint64_t now = process->activity.host_function_ms;
    if (now < process->function_ms) {
      process->function_calls = 0;
      process->long_function_ms = std::max(process->long_function_ms, 4 * int64_t(process->function_ms));
    }
    process->function_ms = now;
  }

  absl::Status AdmitSome() {
    for (Process& process : processes_) {
      if (process.activity.asking != 0) CR_RETURN_IF_ERROR(Ask(process)->Admit({true, 0}).status());
    }
    const int64_t now = Now();
    // Once what somebody has waited for has come, nobody goes further ahead of the others.
    const bool stuck = IsStuck(now);
    for (Process& process : processes_) {
      for (const Activity::Context& one : process.activity.contexts) {
        Context& context = process.contexts[one.context];
        if (!stuck || one.has_work || one.calls == 0 || !MayAdmitIdle(&context, now)) continue;
        CR_ASSIGN_OR_RETURN(const bool admitted, Ask(process)->Admit({false, one.context}));
        if (!admitted) continue;
        context.pending = true;
        context.admitted_us = now;
        last_idle_ = now;
        soon_ = true;
      }
    }
    return AdmitBusy(now);
  }

  absl::Status AdmitBusy(int64_t now) {
    for (Process& process : processes_) {
      const int64_t beyond = int64_t(process.activity.host_function_ms) - process.long_function_ms;
      if (beyond < 0 || process.function_calls > beyond * beyond / (kFunctionUnitMs * kFunctionUnitMs)) continue;
      CR_ASSIGN_OR_RETURN(const bool admitted, AdmitBusyOne(&process));
      process.function_calls += admitted;
      soon_ = soon_ || admitted;
    }
    const bool others = now - last_idle_ < kNoOtherUs && now < next_busy_ + kNoOtherPauses * busy_gap_;
    if (now < next_busy_ && busy_pending_ && !IsAdding(processes_[busy_turn_])) next_busy_ = now;
    if (now < next_busy_ || others) return absl::OkStatus();
    // One call, of the next process that has one.
    if (busy_pending_ && IsAdding(processes_[busy_turn_])) busy_gap_ *= 2;
    busy_pending_ = false;
    for (size_t i = 0; i < processes_.size() && !busy_pending_; ++i) {
      busy_turn_ = (busy_turn_ + 1) % processes_.size();
      CR_ASSIGN_OR_RETURN(busy_pending_, AdmitBusyOne(&processes_[busy_turn_]));
    }
    next_busy_ = now + busy_gap_;
    return absl::OkStatus();
  }

  static bool IsAdding(const Process& process) {
    return std::any_of(process.activity.contexts.begin(), process.activity.contexts.end(),
                       [](const Activity::Context& one) { return one.adding; });
  }

  // Whether a call was let through.
  absl::StatusOr<bool> AdmitBusyOne(Process* process) {
    for (const Activity::Context& one : process->activity.contexts) {
      if (!one.has_work || one.calls == 0) continue;
      return Ask(*process)->Admit({false, one.context});
    }
    return false;
  }

  // With the context idle at `now`.
  bool MayAdmitIdle(Context* context, int64_t now) const {
    if (context->pending) {
      context->pending = false;
      const int64_t took = now - context->admitted_us;
      // What it waited for may have been work of its own. By the time that it may go on, others have come to an end. Or
      // it waited for a process that was held here: without a limit the two would hold each other ever longer.
      if (took > kSoonUs) {
        const int64_t wanted = std::max(took, took * ++context->long_ones / 2);
        context->hold_until_us = now + std::min(wanted, (now - start_) / kMostHeldPart);
      }
    }
    return now >= context->hold_until_us;
  }

  // Its server owes an answer, but has given one a moment ago: on a busy machine that says nothing.
  bool IsSlow(const Process& process) const {
    return !process.activity.answered && Now() - process.answered_us < kSlowUs;
  }

  absl::Status TooLate() {
    asked_ = nullptr;
    std::string who;
    const bool all_slow = std::all_of(processes_.begin(), processes_.end(), [this](const Process& process) {
      return process.activity.quiet || IsSlow(process);
    });
    for (const Process& process : processes_) {
      // What it said last still counts.
      const bool unknown = IsSlow(process) && process.activity.busy_streams == 0;
      if (process.activity.quiet || (!all_slow && unknown)) continue;
      who += (who.empty() ? "" : "; ") + process.what->Name() + " did not become idle in " +
             Seconds(int64_t(options_.timeout_ms) * kMs) + ": " + Reasons(process.activity);
    }
    if (who.empty()) who = "the processes were not idle at the same time in " + Seconds(Now() - start_);
    return absl::DeadlineExceededError(who + " (try again with a longer --timeout)");
  }

  const LockOptions& options_;
  const int64_t start_, end_;
  std::vector<Process> processes_;
  const Process* asked_ = nullptr;  // whom a failure is about; null: all
  bool soon_ = false;               // a call was let through
  // Calls of threads whose GPU has work.
  int64_t busy_gap_ = 0, next_busy_ = 0, last_idle_ = INT64_MIN / 2;
  size_t busy_turn_ = 0;       // the process whose call was let through last
  bool busy_pending_ = false;  // there is one
};

}  // namespace

LockClock RealClock() {
  LockClock clock;
  clock.now_us = [] { return NowNs() / 1000; };
  clock.sleep_us = [](int64_t us) { usleep(useconds_t(us)); };
  return clock;
}

absl::StatusOr<int64_t> LockAll(const std::vector<Lockable*>& processes, const LockOptions& options) {
  return Locker(processes, options).Run();
}

}  // namespace cuda_remote::agent
