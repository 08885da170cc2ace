// SPDX-License-Identifier: Apache-2.0
#include "client/trace/control.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "client/trace/recorder.h"
#include "client/trace/trace.h"
#include "proto/base/environment.h"
#include "proto/base/status_macros.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client::trace {
namespace {

constexpr uint64_t kSecond = 1000000000;
// How old the table of a killed process may be: little at first, so that short ones leave one too.
constexpr uint64_t kFirstWriteNs = kSecond / 100;
constexpr uint64_t kLastWriteNs = kSecond / 2;
constexpr double kDefaultSeconds = 10;
constexpr uint64_t kDefaultEvents = 1000000;

// What the environment asks for. Never freed: the process's exit handlers use it.
struct Wanted {
  std::string totals, timeline;  // patterns of paths
  std::string directory;         // in which the process began
  std::string job;
  double start = 0;
  double seconds = kDefaultSeconds;
  uint64_t events = kDefaultEvents;
};
Wanted* g_wanted = nullptr;

std::atomic<Server*> g_server{nullptr};

// Guards what follows: who writes files, and the slice.
Mutex g_output;
bool g_paused CR_GUARDED_BY(g_output) = false;
bool g_complained CR_GUARDED_BY(g_output) = false;
bool g_slice CR_GUARDED_BY(g_output) = false;         // begun and not ended
bool g_server_slice CR_GUARDED_BY(g_output) = false;  // the worker records too
uint64_t g_slice_capacity CR_GUARDED_BY(g_output) = 0;
uint64_t g_slice_begin CR_GUARDED_BY(g_output) = 0;
uint64_t g_slice_deadline CR_GUARDED_BY(g_output) = 0;
std::vector<Row> g_before CR_GUARDED_BY(g_output);     // totals at the slice's begin
bool g_timeline_done CR_GUARDED_BY(g_output) = false;  // the environment's
uint64_t g_written_calls CR_GUARDED_BY(g_output) = 0;

std::string Variable(const char* name) {
  const char* const value = TrustedVariable(name);
  return value ? value : "";
}

double NumberOr(const char* name, double otherwise, double most) {
  const std::string text = Variable(name);
  if (text.empty()) return otherwise;
  char* end;
  const double value = strtod(text.c_str(), &end);
  if (*end == '\0' && value >= 0) return std::min(value, most);
  dprintf(STDERR_FILENO, "cuda-remote: %s=%s is not a number; %g it is\n", name, text.c_str(), otherwise);
  return otherwise;
}

bool IsJson(const std::string& path) { return path.size() > 5 && path.compare(path.size() - 5, 5, ".json") == 0; }

// The command line, as far as it helps to tell processes apart.
std::string Program() {
  char text[200];
  const int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  const ssize_t length = fd >= 0 ? read(fd, text, sizeof(text)) : 0;
  if (fd >= 0) close(fd);
  std::string program(text, size_t(std::max<ssize_t>(length, 0)));
  while (!program.empty() && program.back() == '\0') program.pop_back();
  for (char& c : program) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return program.empty() ? "?" : program;
}

std::vector<Row> Used(std::vector<Row> rows) {
  rows.erase(std::remove_if(rows.begin(), rows.end(), [](const Row& row) { return row.count == 0; }), rows.end());
  return rows;
}

Report MakeReport(bool finished) {
  Report report;
  report.pid = uint32_t(getpid());
  report.program = Program();
  report.seconds = FirstCallNs() ? double(uint64_t(NowNs()) - FirstCallNs()) / kSecond : 0;
  report.finished = finished;
  report.rows = Used(Totals());
  return report;
}

void ComplainLocked(const std::string& path) CR_REQUIRES(g_output) {
  if (g_complained) return;
  g_complained = true;
  const char* const why =
      errno == EEXIST ? "something that this user cannot replace has this name; choose another name" : strerror(errno);
  dprintf(STDERR_FILENO, "cuda-remote: cannot write %s: %s\n", path.c_str(), why);
}

// Whether nothing is at `path`, or what this user has put there: a plain file or a link. Else errno says why not.
bool IsOwnOrMissing(const std::string& path, uid_t user) {
  struct stat there;
  if (lstat(path.c_str(), &there) != 0) return errno == ENOENT;
  if (there.st_uid == user && (S_ISREG(there.st_mode) || S_ISLNK(there.st_mode))) return true;
  errno = EEXIST;
  return false;
}

// A new file at `path`, whole or not at all, for this user alone; `write` fills it. Nothing of another user's is
// replaced, as in a folder that others may write to.
template <typename Write>
void ReplaceFileLocked(const std::string& path, Write write) CR_REQUIRES(g_output) {
  // The number of another process of this user's may be in the name, too. Others' files and links stay there.
  std::string temporary = path + ".XXXXXX";
  const int fd = mkostemp(temporary.data(), O_CLOEXEC);  // mode 0600; never through a link
  if (fd < 0) {
    ComplainLocked(path);
    return;
  }
  // Some file servers give root's files to another user.
  struct stat made;
  const bool written = write(fd) && fstat(fd, &made) == 0 && IsOwnOrMissing(path, made.st_uid) &&
                       rename(temporary.c_str(), path.c_str()) == 0;
  if (!written) {
    ComplainLocked(path);
    unlink(temporary.c_str());
  }
  close(fd);
}

// Makes the name that the user gave, if it is not the file's own, lead to the file last begun. A file of that name that
// is not ours stays.
void Point(const std::string& pattern, const std::string& path) {
  std::string plain = pattern;
  if (plain.find('%') != std::string::npos) return;
  if (plain[0] != '/') plain = g_wanted->directory + "/" + plain;
  struct stat file, there;
  if (lstat(path.c_str(), &file) != 0 || !IsOwnOrMissing(plain, file.st_uid)) return;
  if (lstat(plain.c_str(), &there) == 0 && !S_ISLNK(there.st_mode)) return;
  const std::string temporary = path + ".link";
  if (!IsOwnOrMissing(temporary, file.st_uid)) return;
  unlink(temporary.c_str());
  if (symlink(path.substr(path.rfind('/') + 1).c_str(), temporary.c_str()) != 0) return;
  if (rename(temporary.c_str(), plain.c_str()) != 0) unlink(temporary.c_str());
}

std::string PathOf(const std::string& pattern) {
  return ExpandPath(pattern, g_wanted->directory, g_wanted->job, uint32_t(getpid()));
}

void WriteTotalsFileLocked(bool finished) CR_REQUIRES(g_output) {
  const uint64_t calls = TotalCalls();
  if (g_paused || !g_wanted || g_wanted->totals.empty() || calls == 0 || (calls == g_written_calls && !finished))
    return;
  const std::string path = PathOf(g_wanted->totals);
  ReplaceFileLocked(path, [finished, &path](int fd) {
    const Report report = MakeReport(finished);
    const std::string text = IsJson(path) ? JsonReport(report) : TextReport(report);
    return WriteAll(fd, text.data(), text.size());
  });
  if (g_written_calls == 0) Point(g_wanted->totals, path);
  g_written_calls = calls;
}

// The lock is held across a fork.
void ForkPrepare() CR_UNGUARDED { g_output.lock(); }
void ForkParent() CR_UNGUARDED { g_output.unlock(); }
void ForkChild();

// Before anything is recorded: a forked child starts with nothing.
void WatchForks() {
  static const int registered = pthread_atfork(ForkPrepare, ForkParent, ForkChild);
  (void)registered;
}

Status BeginSliceLocked(uint64_t capacity, double max_seconds) CR_REQUIRES(g_output) {
  const uint64_t now = uint64_t(NowNs());
  if (g_slice && now < g_slice_deadline) return Error("another recording of this process is in progress");
  if (!Events().Begin(capacity)) return Error("no memory for " + std::to_string(capacity) + " calls");
  WatchForks();
  g_slice = true;
  g_slice_capacity = capacity;
  g_before = Totals();
  Server* const server = g_server.load();
  g_server_slice = server && server->BeginTimeline(capacity);
  g_slice_begin = uint64_t(NowNs());
  g_slice_deadline = g_slice_begin + uint64_t(max_seconds * kSecond);
  SetDeadline(g_slice_deadline);
  g_recording.fetch_or(kTotals | kTimeline);
  return OkStatus();
}

// The table of a slice: differences of the totals, but for the longest times, which come from the single calls.
Report SliceReportLocked(const Timeline& timeline) CR_REQUIRES(g_output) {
  Report report;
  report.pid = timeline.pid;
  report.program = timeline.program;
  report.seconds = double(timeline.end_ns - timeline.begin_ns) / kSecond;
  report.finished = true;
  std::vector<Row> rows = Totals();
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    if (i < g_before.size()) {
      const Row& before = g_before[i];
      row.count -= before.count;
      row.errors -= before.errors;
      row.unsupported -= before.unsupported;
      row.sent -= before.sent;
      row.received -= before.received;
      row.total_ns -= before.total_ns;
    }
    row.max_ns = 0;
  }
  for (const ClientEvent& event : timeline.client) {
    if (event.number < rows.size()) {
      rows[event.number].max_ns = std::max(rows[event.number].max_ns, event.end_ns - event.start_ns);
    }
  }
  report.rows = Used(std::move(rows));
  return report;
}

StatusOr<Timeline> TakeSliceLocked() CR_REQUIRES(g_output) {
  if (!g_slice) return Error("nothing is being recorded");
  Timeline timeline;
  timeline.end_ns = std::min(uint64_t(NowNs()), g_slice_deadline);
  g_recording.fetch_and(~kTimeline);
  if (!g_wanted || g_wanted->totals.empty()) g_recording.fetch_and(~kTotals);
  timeline.pid = uint32_t(getpid());
  timeline.program = Program();
  timeline.begin_ns = g_slice_begin;
  timeline.names = Names();
  timeline.client = Events().Take(&timeline.dropped);
  Server* const server = g_server.load();
  if (server && g_server_slice) {
    server->EndTimeline(&timeline.worker);
  } else {
    timeline.worker.problem =
        server ? "the GPU server did not begin to record" : "there was no session with a GPU server";
  }
  g_slice = g_server_slice = false;
  return timeline;
}

// Ends the environment's timeline.
void WriteTimelineFileLocked() CR_REQUIRES(g_output) {
  if (g_paused || !g_slice || g_timeline_done) return;
  g_timeline_done = true;
  const StatusOr<Timeline> timeline = TakeSliceLocked();
  if (!timeline.ok()) return;
  const std::string path = PathOf(g_wanted->timeline);
  ReplaceFileLocked(path, [&timeline](int fd) { return WriteChromeTrace(*timeline, fd); });
  Point(g_wanted->timeline, path);
}

void SleepUntil(uint64_t ns) {
  const timespec until{time_t(ns / kSecond), long(ns % kSecond)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

void* WriterThread(void*) {
  prctl(PR_SET_NAME, "cr-trace");
  uint64_t pause = kFirstWriteNs;
  const uint64_t begin = uint64_t(NowNs());
  const uint64_t timeline_begin = begin + uint64_t(g_wanted->start * kSecond);
  const uint64_t timeline_end = timeline_begin + uint64_t(g_wanted->seconds * kSecond);
  bool to_begin = !g_wanted->timeline.empty() && g_wanted->start > 0, to_end = !g_wanted->timeline.empty();
  while (to_begin || to_end || !g_wanted->totals.empty()) {
    uint64_t next = g_wanted->totals.empty() ? UINT64_MAX : uint64_t(NowNs()) + pause;
    if (to_begin) {
      next = std::min(next, timeline_begin);
    } else if (to_end) {
      next = std::min(next, timeline_end);
    }
    SleepUntil(next);
    pause = std::min(pause * 2, kLastWriteNs);
    MutexLock lock(&g_output);
    WriteTotalsFileLocked(false);
    if (to_begin && uint64_t(NowNs()) >= timeline_begin) {
      to_begin = false;
      const Status begun = BeginSliceLocked(g_wanted->events, g_wanted->seconds);
      to_end = begun.ok();
      if (!to_end) dprintf(STDERR_FILENO, "cuda-remote: no timeline: %s\n", begun.message().c_str());
    } else if (!to_begin && to_end && uint64_t(NowNs()) >= timeline_end && !g_paused) {
      to_end = false;
      WriteTimelineFileLocked();
    }
  }
  return nullptr;
}

// The first traced call of the process, or of a forked child.
void StartWriter() {
  // The application's signals are none of this thread's business.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  if (pthread_create(&thread, &attributes, WriterThread, nullptr) != 0) {
    dprintf(STDERR_FILENO, "cuda-remote: no thread for traces; they are written at the end of the process only\n");
  }
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void WriteLate() {
  MutexLock lock(&g_output);
  WriteTotalsFileLocked(true);
}

void WriteAtExit() {
  if (!g_wanted || g_recording.load() == 0) return;
  for (int i = 0; i < 600; ++i) {
    {
      MutexLock lock(&g_output);
      if (!g_paused) {
        if (!g_wanted->timeline.empty()) WriteTimelineFileLocked();
        WriteTotalsFileLocked(true);
        break;
      }
    }
    // A checkpoint is being made; what is open now would be in it.
    usleep(100000);
  }
  // Other libraries' exit handlers may still make calls.
  if (!g_wanted->totals.empty()) SetLateCallHook(&WriteLate);
}

// The child has the parent's numbers and no thread of ours.
void ForkChild() CR_UNGUARDED {
  ForgetAfterFork();
  g_server.store(nullptr);
  g_paused = g_slice = g_server_slice = false;
  g_written_calls = 0;
  g_recording.fetch_and(~kTimeline);
  g_timeline_done = true;
  if (g_wanted && !g_wanted->totals.empty()) {
    SetFirstCallHook(&StartWriter);
  } else {
    g_recording.store(0);
  }
  g_output.unlock();
}

// Reads the environment when the library is loaded, so that the very first call is traced already.
__attribute__((constructor)) void ReadEnvironment() {
  const std::string totals = Variable("CUDA_REMOTE_TRACE"), timeline = Variable("CUDA_REMOTE_TIMELINE");
  if (totals.empty() && timeline.empty()) return;
  g_wanted = new (std::nothrow) Wanted;
  if (!g_wanted) return;
  g_wanted->totals = totals;
  g_wanted->timeline = timeline;
  char directory[4096];
  g_wanted->directory = getcwd(directory, sizeof(directory)) ? directory : "";
  const std::string job_directory = Variable("CUDA_REMOTE_JOB_DIR");
  g_wanted->job = job_directory.substr(job_directory.rfind('/') + 1);
  g_wanted->start = NumberOr("CUDA_REMOTE_TIMELINE_START", 0, 1e6);
  g_wanted->seconds = NumberOr("CUDA_REMOTE_TIMELINE_SECONDS", kDefaultSeconds, 1e6);
  g_wanted->events = uint64_t(std::max(1.0, NumberOr("CUDA_REMOTE_TIMELINE_EVENTS", double(kDefaultEvents), 1e8)));
  SetFirstCallHook(&StartWriter);
  WatchForks();
  at_quick_exit(WriteAtExit);
  g_recording.fetch_or(kTotals);
  if (!timeline.empty() && g_wanted->start == 0) {
    MutexLock lock(&g_output);
    (void)BeginSliceLocked(g_wanted->events, g_wanted->seconds);  // without memory there is no timeline
  }
}

__attribute__((destructor)) void AtExit() { WriteAtExit(); }

}  // namespace

void SetServer(Server* server) {
  MutexLock lock(&g_output);
  g_server.store(server);
  if (g_slice && !g_server_slice) g_server_slice = server->BeginTimeline(g_slice_capacity);
}

Status BeginSlice(uint64_t capacity, double max_seconds) {
  MutexLock lock(&g_output);
  return BeginSliceLocked(capacity, max_seconds);
}

Status EndSlice(int timeline_fd, int table_fd, bool json) {
  MutexLock lock(&g_output);
  CR_ASSIGN_OR_RETURN(const Timeline timeline, TakeSliceLocked());
  const Report report = SliceReportLocked(timeline);
  const std::string table = json ? JsonReport(report) : TextReport(report);
  if (WriteChromeTrace(timeline, timeline_fd) && WriteAll(table_fd, table.data(), table.size())) return OkStatus();
  return ErrnoError("cannot write the recording");
}

Status WriteTotals(int fd, bool json) {
  if (!g_wanted || g_wanted->totals.empty()) return Error("the job was not started with CUDA_REMOTE_TRACE");
  const Report report = MakeReport(false);
  const std::string text = json ? JsonReport(report) : TextReport(report);
  if (WriteAll(fd, text.data(), text.size())) return OkStatus();
  return ErrnoError("cannot write the table");
}

void Pause() {
  MutexLock lock(&g_output);
  WriteTotalsFileLocked(false);
  g_paused = true;
}

void Resume() {
  MutexLock lock(&g_output);
  g_paused = false;
}

}  // namespace cuda_remote::client::trace
