// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/thread_settings.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <string>

namespace cuda_remote::checkpoint {
namespace {

constexpr int kOneThread = 1;                // IOPRIO_WHO_PROCESS
constexpr uint32_t kDeadline = 6;            // SCHED_DEADLINE
constexpr uint64_t kClampUse = 0x20 | 0x40;  // SCHED_FLAG_UTIL_CLAMP_MIN, _MAX

// As the kernel has it (sched_setattr(2)).
struct SchedAttr {
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime, deadline, period;
  uint32_t least_use, most_use;
};

// Empty if there is no such file.
std::string ReadFile(int thread, const char* name) {
  std::ifstream in("/proc/" + std::to_string(thread) + "/" + name);
  std::string text;
  std::getline(in, text);
  return text;
}

void WriteFile(int thread, const char* name, const std::string& text) {
  std::ofstream("/proc/" + std::to_string(thread) + "/" + name) << text << std::flush;
}

constexpr char kSlack[] = "timerslack_ns", kDumped[] = "coredump_filter";

ThreadSettings SettingsOf(int thread) {
  ThreadSettings settings;
  SchedAttr attributes = {};
  if (syscall(SYS_sched_getattr, thread, &attributes, sizeof(attributes), 0) == 0) {
    // Of other policies it is a time slice, which depends on the machine.
    if (attributes.policy != kDeadline) attributes.runtime = 0;
    settings.set_scheduling(&attributes, sizeof(attributes));
  }
  const long io = syscall(SYS_ioprio_get, kOneThread, thread);
  if (io >= 0) settings.set_io_priority(uint32_t(io));
  settings.set_timer_slack(ReadFile(thread, kSlack));
  // Of the process.
  settings.set_dumped(ReadFile(thread, kDumped));
  return settings;
}

void Give(int thread, const ThreadSettings& wanted) {
  const ThreadSettings now = SettingsOf(thread);
  SchedAttr attributes = {};
  if (wanted.scheduling() != now.scheduling() && wanted.scheduling().size() == sizeof(attributes)) {
    memcpy(&attributes, wanted.scheduling().data(), sizeof(attributes));
    // Else the kernel leaves the two limits as they are. One that knows none refuses the flags.
    attributes.flags |= kClampUse;
    if (syscall(SYS_sched_setattr, thread, &attributes, 0) != 0) {
      attributes.flags &= ~kClampUse;
      syscall(SYS_sched_setattr, thread, &attributes, 0);
    }
  }
  if (wanted.io_priority() != now.io_priority()) syscall(SYS_ioprio_set, kOneThread, thread, wanted.io_priority());
  if (wanted.timer_slack() != now.timer_slack()) WriteFile(thread, kSlack, wanted.timer_slack());
  if (wanted.dumped() != now.dumped()) WriteFile(thread, kDumped, "0x" + wanted.dumped());
}

}  // namespace

void FindThreadSettings(const Job& job, ProcessFacts* facts) {
  facts->clear_thread_settings();
  std::map<std::string, ThreadSettings> found;  // by all but the threads
  for (const int pid : ProcessesOf(job)) {
    for (const int thread : ThreadsOf(pid)) {
      const int number = InnerPid(thread);
      if (number <= 0) continue;
      const ThreadSettings settings = SettingsOf(thread);
      found.emplace(settings.SerializeAsString(), settings).first->second.add_threads(number);
    }
  }
  for (const auto& [ignored, settings] : found) *facts->add_thread_settings() = settings;
}

void RestoreThreadSettings(const ProcessFacts& facts, pid_t init) {
  std::map<int, const ThreadSettings*> wanted;  // by thread, as the job numbers it
  for (const ThreadSettings& settings : facts.thread_settings()) {
    for (const int thread : settings.threads()) wanted[thread] = &settings;
  }
  if (wanted.empty()) return;
  Job job;
  job.set_init_pid(init);
  job.set_pid_namespace(PidNamespace(init));
  for (const int pid : ProcessesOf(job)) {
    for (const int thread : ThreadsOf(pid)) {
      const auto settings = wanted.find(InnerPid(thread));
      if (settings != wanted.end()) Give(thread, *settings->second);
    }
  }
}

}  // namespace cuda_remote::checkpoint
