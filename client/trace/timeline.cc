#include "client/trace/timeline.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <unordered_set>

#include "proto/codec/text.h"

namespace cuda_remote::client::trace {
namespace {

// Process numbers in the file: two real PIDs may be equal, as the processes may be in different PID namespaces.
constexpr int kClient = 1;
constexpr int kWorker = 2;

template <typename... Values>
void Print(std::string* out, const char* format, Values... values) {
  char line[512];
  const int length = snprintf(line, sizeof(line), format, values...);
  if (length > 0) out->append(line, std::min(size_t(length), sizeof(line) - 1));
}

// Microseconds with all digits of the nanoseconds.
void PrintTime(std::string* out, const char* key, uint64_t ns) {
  Print(out, "\"%s\":%" PRIu64 ".%03u", key, ns / 1000, unsigned(ns % 1000));
}

void NameProcess(std::string* out, int process, const std::string& name) {
  Print(out, "{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_name\",\"args\":{\"name\":", process);
  *out += JsonQuoted(name) + "}},\n";
  Print(out, "{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}},\n",
        process, process);
}

void NameThread(std::string* out, int process, uint32_t thread, const std::string& name) {
  Print(out, "{\"ph\":\"M\",\"pid\":%d,\"tid\":%u,\"name\":\"thread_name\",\"args\":{\"name\":", process, thread);
  *out += JsonQuoted(name) + "}},\n";
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

void Arrow(std::string* out, char phase, int process, uint32_t thread, uint64_t ns, uint64_t sequence) {
  Print(out, "{\"ph\":\"%c\",%s\"cat\":\"request\",\"name\":\"request\",\"id\":%" PRIu64 ",\"pid\":%d,\"tid\":%u,",
        phase, phase == 'f' ? "\"bp\":\"e\"," : "", sequence, process, thread);
  PrintTime(out, "ts", ns);
  *out += "},\n";
}

}  // namespace

uint64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

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
  const auto flush = [&written, fd](std::string* text, size_t limit) {
    if (text->size() <= limit) return;
    written = written && WriteAll(fd, text->data(), text->size());
    text->clear();
  };
  constexpr size_t kPiece = 1 << 20;
  std::string out = "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"program\":" + JsonQuoted(timeline.program) + ",";
  Print(&out, "\"pid\":%u,\"worker_pid\":%u,\"seconds\":%.6f,", timeline.pid, timeline.worker.pid,
        (timeline.end_ns - timeline.begin_ns) / 1e9);
  Print(&out, "\"dropped_calls\":%" PRIu64 ",\"dropped_requests\":%" PRIu64 ",\"server_clock_error_us\":%.3f",
        timeline.dropped, timeline.worker.dropped, timeline.worker.clock_error_ns / 1e3);
  if (!timeline.worker.problem.empty()) out += ",\"problem\":" + JsonQuoted(timeline.worker.problem);
  out += "},\n\"traceEvents\":[\n";
  NameProcess(&out, kClient, timeline.program + " (process " + std::to_string(timeline.pid) + ")");
  std::unordered_set<uint32_t> threads;
  for (const ClientEvent& event : timeline.client) {
    if (threads.insert(event.thread).second) {
      NameThread(&out, kClient, event.thread, ThreadName(event.thread, timeline.pid));
    }
  }
  std::unordered_set<uint64_t> executed;
  if (!timeline.worker.events.empty()) {
    NameProcess(&out, kWorker, "cr-worker (process " + std::to_string(timeline.worker.pid) + ")");
    threads.clear();
    for (const WorkerEvent& event : timeline.worker.events) {
      if (threads.insert(event.thread).second) {
        const bool executor = event.thread == timeline.worker.pid;
        NameThread(&out, kWorker, event.thread, executor ? "executor" : "waits " + std::to_string(event.thread));
      }
    }
  }
  std::unordered_set<uint64_t> sent;
  for (const ClientEvent& event : timeline.client) sent.insert(event.sequence);
  for (const WorkerEvent& event : timeline.worker.events) {
    const auto name = timeline.worker.names.find(event.call);
    out += "{\"ph\":\"X\",\"cat\":\"worker\",\"name\":";
    out += JsonQuoted(name != timeline.worker.names.end() ? name->second : "call " + std::to_string(event.call));
    Print(&out, ",\"pid\":%d,\"tid\":%u,", kWorker, event.thread);
    PrintTime(&out, "ts", event.start_ns);
    out += ",";
    PrintTime(&out, "dur", event.end_ns - event.start_ns);
    Print(&out, ",\"args\":{\"result\":%u,\"sequence\":%" PRIu64 "}},\n", event.result, event.sequence);
    // A request that is waited for has two slices; the arrow ends at the first, which is the executor's.
    if (sent.count(event.sequence) && executed.insert(event.sequence).second)
      Arrow(&out, 'f', kWorker, event.thread, event.start_ns, event.sequence);
    flush(&out, kPiece);
  }
  for (const ClientEvent& event : timeline.client) {
    out += "{\"ph\":\"X\",\"cat\":\"client\",\"name\":";
    out += JsonQuoted(event.number < timeline.names.size() ? timeline.names[event.number] : "?");
    Print(&out, ",\"pid\":%d,\"tid\":%u,", kClient, event.thread);
    PrintTime(&out, "ts", event.start_ns);
    out += ",";
    PrintTime(&out, "dur", event.end_ns - event.start_ns);
    Print(&out, ",\"args\":{\"result\":%u,\"sent\":%u,\"received\":%u,\"sequence\":%" PRIu64 "}},\n", event.result,
          event.sent, event.received, event.sequence);
    if (executed.count(event.sequence)) Arrow(&out, 's', kClient, event.thread, event.start_ns, event.sequence);
    flush(&out, kPiece);
  }
  // The slice itself, so that the file is a trace also when nothing happened; and no comma after it.
  Print(&out, "{\"ph\":\"I\",\"s\":\"g\",\"pid\":%d,\"tid\":0,\"name\":\"end of the recording\",", kClient);
  PrintTime(&out, "ts", timeline.end_ns);
  out += "}\n]}\n";
  flush(&out, 0);
  return written;
}

}  // namespace cuda_remote::client::trace
