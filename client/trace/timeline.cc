// SPDX-License-Identifier: Apache-2.0
#include "client/trace/timeline.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <unordered_set>

#include "proto/base/clock.h"
#include "proto/codec/json.h"

namespace cuda_remote::client::trace {
namespace {

// Process numbers in the file: two real PIDs may be equal, as the processes may be in different PID namespaces.
constexpr int kClient = 1;
constexpr int kWorker = 2;

// Microseconds with all digits of the nanoseconds.
void TimeMember(JsonWriter* json, std::string_view key, uint64_t ns) {
  json->Key(key);
  json->Thousandths(ns);
}

// A line that names a process or a thread.
void Name(JsonWriter* json, int process, uint32_t thread, const char* what, const std::string& name) {
  json->Line();
  json->Begin('{');
  json->Member("ph", "M");
  json->Member("pid", process);
  json->Member("tid", thread);
  json->Member("name", what);
  json->Begin("args", '{');
  json->Member("name", name);
  json->End('}');
  json->End('}');
}

void NameProcess(JsonWriter* json, int process, const std::string& name) {
  Name(json, process, 0, "process_name", name);
  json->Line();
  json->Begin('{');
  json->Member("ph", "M");
  json->Member("pid", process);
  json->Member("tid", 0);
  json->Member("name", "process_sort_index");
  json->Begin("args", '{');
  json->Member("sort_index", process);
  json->End('}');
  json->End('}');
}

void NameThread(JsonWriter* json, int process, uint32_t thread, const std::string& name) {
  Name(json, process, thread, "thread_name", name);
}

// A thread of this process, by the name that it has given itself, if it still lives.
std::string ThreadName(uint32_t thread, uint32_t pid) {
  std::string name = thread == pid ? "main thread" : "thread";
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/comm";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  char comm[32];
  const ssize_t length = fd >= 0 ? read(fd, comm, sizeof(comm)) : 0;
  if (fd >= 0) close(fd);
  if (length > 1 && thread != pid) name.assign(comm, size_t(length) - 1);
  return name + " " + std::to_string(thread);
}

void Arrow(JsonWriter* json, char phase, int process, uint32_t thread, uint64_t ns, uint64_t sequence) {
  json->Line();
  json->Begin('{');
  json->Member("ph", std::string_view(&phase, 1));
  if (phase == 'f') json->Member("bp", "e");
  json->Member("cat", "request");
  json->Member("name", "request");
  json->Member("id", sequence);
  json->Member("pid", process);
  json->Member("tid", thread);
  TimeMember(json, "ts", ns);
  json->End('}');
}

// Begins the line of a call or request, up to its arguments.
void BeginSlice(JsonWriter* json, const char* category, const std::string& name, int process, uint32_t thread,
                uint64_t start_ns, uint64_t end_ns) {
  json->Line();
  json->Begin('{');
  json->Member("ph", "X");
  json->Member("cat", category);
  json->Member("name", name);
  json->Member("pid", process);
  json->Member("tid", thread);
  TimeMember(json, "ts", start_ns);
  TimeMember(json, "dur", end_ns - start_ns);
  json->Begin("args", '{');
}

}  // namespace

bool EventBuffer::Begin(size_t capacity) {
  const size_t bytes = capacity * sizeof(Slot);
  Slot* slots = slots_.load();
  if (slots && bytes != mapped_bytes_) {
    // A call of the slice before may still be adding its event: what was mapped once stays mapped, and is only given
    // back to the system page by page.
    capacity = mapped_bytes_ / sizeof(Slot);
  } else if (!slots) {
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    slots = static_cast<Slot*>(memory);  // zeros: no event is whole
    mapped_bytes_ = bytes;
  }
  capacity_.store(0);
  madvise(slots, mapped_bytes_, MADV_DONTNEED);
  next_.store(0);
  slots_.store(slots);
  capacity_.store(capacity);
  return true;
}

void EventBuffer::Add(const ClientEvent& event) {
  const size_t place = next_.fetch_add(1, std::memory_order_relaxed);
  if (place >= capacity_.load(std::memory_order_acquire)) return;
  Slot* const slot = slots_.load(std::memory_order_acquire) + place;
  slot->event = event;
  slot->whole.store(1, std::memory_order_release);
}

std::vector<ClientEvent> EventBuffer::Take(uint64_t* dropped) {
  std::vector<ClientEvent> events;
  const size_t wanted = next_.load(), capacity = capacity_.load();
  *dropped = wanted > capacity ? wanted - capacity : 0;
  Slot* const slots = slots_.load();
  for (size_t i = 0; i < std::min(wanted, capacity); ++i) {
    if (slots[i].whole.load(std::memory_order_acquire)) events.push_back(slots[i].event);
  }
  capacity_.store(0);
  if (slots) madvise(slots, mapped_bytes_, MADV_DONTNEED);
  return events;
}

bool WriteAll(int fd, const char* bytes, size_t count) {
  while (count > 0) {
    const ssize_t written = write(fd, bytes, count);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes += written;
    count -= size_t(written);
  }
  return true;
}

bool WriteChromeTrace(const Timeline& timeline, int fd) {
  bool written = true;
  // The file may be much longer than what should be in memory.
  JsonWriter json;
  const auto flush = [&written, &json, fd](size_t limit) {
    if (json.text().size() <= limit) return;
    const std::string text = json.Take();
    written = written && WriteAll(fd, text.data(), text.size());
  };
  constexpr size_t kPiece = 1 << 20;
  json.Begin('{');
  json.Member("displayTimeUnit", "ns");
  json.Begin("otherData", '{');
  json.Member("program", timeline.program);
  json.Member("pid", timeline.pid);
  json.Member("worker_pid", timeline.worker.pid);
  json.RealMember("seconds", double(timeline.end_ns - timeline.begin_ns) / 1e9, 6);
  json.Member("dropped_calls", timeline.dropped);
  json.Member("dropped_requests", timeline.worker.dropped);
  json.RealMember("server_clock_error_us", double(timeline.worker.clock_error_ns) / 1e3, 3);
  if (!timeline.worker.problem.empty()) json.Member("problem", timeline.worker.problem);
  json.End('}');
  json.Line();
  json.Begin("traceEvents", '[');
  NameProcess(&json, kClient, timeline.program + " (process " + std::to_string(timeline.pid) + ")");
  std::unordered_set<uint32_t> threads;
  for (const ClientEvent& event : timeline.client) {
    if (threads.insert(event.thread).second) {
      NameThread(&json, kClient, event.thread, ThreadName(event.thread, timeline.pid));
    }
  }
  std::unordered_set<uint64_t> executed;
  if (!timeline.worker.events.empty()) {
    NameProcess(&json, kWorker, "cr-worker (process " + std::to_string(timeline.worker.pid) + ")");
    threads.clear();
    for (const WorkerEvent& event : timeline.worker.events) {
      if (threads.insert(event.thread).second) {
        const bool executor = event.thread == timeline.worker.pid;
        NameThread(&json, kWorker, event.thread, executor ? "executor" : "waits " + std::to_string(event.thread));
      }
    }
  }
  std::unordered_set<uint64_t> sent;
  for (const ClientEvent& event : timeline.client) sent.insert(event.sequence);
  for (const WorkerEvent& event : timeline.worker.events) {
    const auto name = timeline.worker.names.find(event.call);
    BeginSlice(&json, "worker",
               name != timeline.worker.names.end() ? name->second : "call " + std::to_string(event.call), kWorker,
               event.thread, event.start_ns, event.end_ns);
    json.Member("result", event.result);
    json.Member("sequence", event.sequence);
    json.End('}');
    json.End('}');
    // A request that is waited for has two slices; the arrow ends at the first, which is the executor's.
    if (sent.count(event.sequence) && executed.insert(event.sequence).second)
      Arrow(&json, 'f', kWorker, event.thread, event.start_ns, event.sequence);
    flush(kPiece);
  }
  for (const ClientEvent& event : timeline.client) {
    BeginSlice(&json, "client", event.number < timeline.names.size() ? timeline.names[event.number] : "?", kClient,
               event.thread, event.start_ns, event.end_ns);
    json.Member("result", event.result);
    json.Member("sent", event.sent);
    json.Member("received", event.received);
    json.Member("sequence", event.sequence);
    json.End('}');
    json.End('}');
    if (executed.count(event.sequence)) Arrow(&json, 's', kClient, event.thread, event.start_ns, event.sequence);
    flush(kPiece);
  }
  // The slice itself, so that the file is a trace also when nothing happened.
  json.Line();
  json.Begin('{');
  json.Member("ph", "I");
  json.Member("s", "g");
  json.Member("pid", kClient);
  json.Member("tid", 0);
  json.Member("name", "end of the recording");
  TimeMember(&json, "ts", timeline.end_ns);
  json.End('}');
  json.End(']');
  json.End('}');
  flush(0);
  return written && WriteAll(fd, "\n", 1);
}

}  // namespace cuda_remote::client::trace
