// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/stall_watch.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "proto/base/read_file.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr int kLookUs = 20'000;
// How long a killed process may take to end, in looks.
constexpr int kMostLooksAfterKill = 500;
constexpr int kDeepest = 8;
// Of proc(5): state, utime and stime, counted behind the name.
constexpr char kStopped = 'T';
constexpr int kUserTime = 11, kSystemTime = 12;

// Adds the numbers in the lines of a file that begin so.
uint64_t SumOf(const std::string& text, const char* name) {
  uint64_t sum = 0;
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1))
    sum += strtoull(text.c_str() + at + strlen(name), nullptr, 10);
  return sum;
}

// Adds what the process and those below it have done, and whether one of them is stopped.
void Look(pid_t process, int depth, uint64_t* progress, bool* stopped) {
  const std::string folder = "/proc/" + std::to_string(process) + "/";
  std::string stat, status, io, children;
  if (!ReadWholeFile(folder + "stat", &stat)) return;
  const size_t name_end = stat.rfind(") ");
  if (name_end == std::string::npos) return;
  const char* at = stat.c_str() + name_end + 2;
  *stopped = *stopped || *at == kStopped;
  for (int field = 0; *at; ++at) {
    if (*at != ' ') continue;
    ++field;
    if (field == kUserTime || field == kSystemTime) *progress += strtoull(at, nullptr, 10);
  }
  if (ReadWholeFile(folder + "status", &status)) *progress += SumOf(status, "ctxt_switches:");
  if (ReadWholeFile(folder + "io", &io)) *progress += SumOf(io, "char:") + SumOf(io, "_bytes:");
  *progress += 1;  // that it is there
  if (depth == kDeepest || !ReadWholeFile(folder + "task/" + std::to_string(process) + "/children", &children)) return;
  for (char* next = children.data(); *next;) {
    const pid_t child = pid_t(strtol(next, &next, 10));
    if (child > 0) Look(child, depth + 1, progress, stopped);
    while (*next && (*next < '0' || *next > '9')) ++next;
  }
}

}  // namespace

StallWatch::StallWatch(pid_t process, std::function<uint64_t()> more)
    : process_(process), more_(std::move(more)), since_(Now()) {}

bool StallWatch::IsStalled(const Limits& limits) {
  uint64_t progress = more_ ? more_() : 0;
  bool stopped = false;
  Look(process_, 0, &progress, &stopped);
  const Moment now = Now();
  if (progress != progress_) since_ = now;
  progress_ = progress;
  return now - since_ >= std::chrono::milliseconds(stopped ? limits.stopped_ms : limits.idle_ms);
}

int ReapWithoutStall(pid_t child, const StallWatch::Limits& limits) {
  StallWatch watch(child);
  int looks_after_kill = 0;
  for (bool killed = false;;) {
    int status = 0;
    const pid_t ended = waitpid(child, &status, WNOHANG);
    if (ended == child) return status;
    if (ended < 0 && errno != EINTR) return -1;
    if (!killed && watch.IsStalled(limits)) killed = kill(child, SIGKILL) == 0;
    if (killed && ++looks_after_kill > kMostLooksAfterKill) return -1;
    usleep(kLookUs);
  }
}

}  // namespace cuda_remote::checkpoint
