// SPDX-License-Identifier: Apache-2.0
#include "client/trace/trace.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "client/trace/recorder.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client::trace {
namespace {

// Entry points, and what Register gives out. A power of two well above both.
constexpr uint32_t kMaxNumbers = 2048;

// Written by one thread at a time, read by any.
struct Counter {
  std::atomic<uint64_t> count, errors, unsupported, sent, received, total_ns, max_ns;
};

// The counters of one thread. Blocks are never freed; one whose thread has ended goes on with the next new thread.
struct Block {
  Counter counters[kMaxNumbers];
  std::atomic<bool> used;
  Block* next;
};

std::atomic<Block*> g_blocks{nullptr};
std::atomic<uint64_t> g_first_call_ns{0};
std::atomic<uint64_t> g_deadline_ns{0};
std::atomic<void (*)()> g_first_call_hook{nullptr};
std::atomic<void (*)()> g_late_call_hook{nullptr};

Mutex g_names_mutex;
std::vector<std::string>* g_more_names CR_GUARDED_BY(g_names_mutex) = nullptr;  // never freed: used from exit handlers

EventBuffer g_events;

// Plain values have no destructors, so they stay valid through the exit handlers of the main thread.
thread_local Block* t_block = nullptr;
thread_local Span* t_span = nullptr;
thread_local uint32_t t_thread = 0;

void Add(std::atomic<uint64_t>* to, uint64_t value) {
  to->store(to->load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

void LeaveBlock(void* block) {
  t_block = nullptr;
  static_cast<Block*>(block)->used.store(false, std::memory_order_release);
}

Block* ThreadBlock() {
  if (t_block) return t_block;
  static const pthread_key_t key = [] {
    pthread_key_t made;
    pthread_key_create(&made, LeaveBlock);
    return made;
  }();
  for (Block* block = g_blocks.load(std::memory_order_acquire); block && !t_block; block = block->next) {
    bool free = false;
    if (block->used.compare_exchange_strong(free, true, std::memory_order_acquire)) t_block = block;
  }
  if (!t_block) {
    // Zeros, and only the pages that are used.
    Block* const block = static_cast<Block*>(calloc(1, sizeof(Block)));
    if (!block) return nullptr;
    block->used.store(true, std::memory_order_relaxed);
    block->next = g_blocks.load(std::memory_order_relaxed);
    while (!g_blocks.compare_exchange_weak(block->next, block, std::memory_order_release)) {
    }
    t_block = block;
  }
  pthread_setspecific(key, t_block);
  return t_block;
}

}  // namespace

std::atomic<uint32_t> g_recording{0};

uint32_t Register(const char* name) {
  MutexLock lock(&g_names_mutex);
  if (!g_more_names) g_more_names = new std::vector<std::string>;
  for (size_t i = 0; i < g_more_names->size(); ++i) {
    if ((*g_more_names)[i] == name) return kNameCount + uint32_t(i);
  }
  const uint32_t number = kNameCount + uint32_t(g_more_names->size());
  if (number + 1 >= kMaxNumbers) return kMaxNumbers - 1;
  g_more_names->push_back(name);
  return number;
}

Span::Span(uint32_t number) : number_(std::min(number, kMaxNumbers - 1)), nested_(t_span != nullptr) {
  if (nested_) return;
  if (void (*const hook)() = g_first_call_hook.load(std::memory_order_acquire)) {
    g_first_call_hook.store(nullptr, std::memory_order_release);
    hook();
  }
  t_span = this;
  start_ns_ = uint64_t(NowNs());
}

CUresult Span::End(CUresult result) {
  if (nested_) return result;
  t_span = nullptr;
  const uint64_t end = uint64_t(NowNs());
  if (g_first_call_ns.load(std::memory_order_relaxed) == 0) {
    uint64_t none = 0;
    g_first_call_ns.compare_exchange_strong(none, start_ns_);
  }
  if (Block* const block = ThreadBlock()) {
    Counter& counter = block->counters[number_];
    const uint64_t took = end - start_ns_;
    Add(&counter.count, 1);
    // Not ready is an answer.
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) Add(&counter.errors, 1);
    if (unsupported_) Add(&counter.unsupported, 1);
    if (sent_) Add(&counter.sent, sent_);
    if (received_) Add(&counter.received, received_);
    Add(&counter.total_ns, took);
    if (took > counter.max_ns.load(std::memory_order_relaxed)) counter.max_ns.store(took, std::memory_order_relaxed);
  }
  if (g_recording.load(std::memory_order_relaxed) & kTimeline) {
    if (end > g_deadline_ns.load(std::memory_order_relaxed)) {
      g_recording.fetch_and(~kTimeline);
    } else {
      if (t_thread == 0) t_thread = uint32_t(syscall(SYS_gettid));
      ClientEvent event;
      event.start_ns = start_ns_;
      event.end_ns = end;
      event.sequence = sequence_;
      event.number = number_;
      event.thread = t_thread;
      event.result = uint32_t(result);
      event.sent = uint32_t(std::min<uint64_t>(sent_, UINT32_MAX));
      event.received = uint32_t(std::min<uint64_t>(received_, UINT32_MAX));
      g_events.Add(event);
    }
  }
  if (void (*const hook)() = g_late_call_hook.load(std::memory_order_acquire)) hook();
  return result;
}

void Sent(size_t bytes, uint64_t sequence) {
  if (!t_span) return;
  t_span->sent_ += bytes;
  if (sequence) t_span->sequence_ = sequence;
}

void Received(size_t bytes) {
  if (t_span) t_span->received_ += bytes;
}

void Unsupported() {
  if (t_span) t_span->unsupported_ = true;
}

std::vector<std::string> Names() {
  std::vector<std::string> names(kNames, kNames + kNameCount);
  MutexLock lock(&g_names_mutex);
  if (g_more_names) names.insert(names.end(), g_more_names->begin(), g_more_names->end());
  names.resize(kMaxNumbers, "other functions of private tables");
  return names;
}

std::vector<Row> Totals() {
  std::vector<Row> rows(kMaxNumbers);
  const std::vector<std::string> names = Names();
  for (uint32_t i = 0; i < kMaxNumbers; ++i) rows[i].name = names[i];
  for (const Block* block = g_blocks.load(std::memory_order_acquire); block; block = block->next) {
    for (uint32_t i = 0; i < kMaxNumbers; ++i) {
      const Counter& counter = block->counters[i];
      const uint64_t count = counter.count.load(std::memory_order_relaxed);
      if (count == 0) continue;
      Row& row = rows[i];
      row.count += count;
      row.errors += counter.errors.load(std::memory_order_relaxed);
      row.unsupported += counter.unsupported.load(std::memory_order_relaxed);
      row.sent += counter.sent.load(std::memory_order_relaxed);
      row.received += counter.received.load(std::memory_order_relaxed);
      row.total_ns += counter.total_ns.load(std::memory_order_relaxed);
      row.max_ns = std::max(row.max_ns, counter.max_ns.load(std::memory_order_relaxed));
    }
  }
  return rows;
}

uint64_t TotalCalls() {
  uint64_t calls = 0;
  for (const Block* block = g_blocks.load(std::memory_order_acquire); block; block = block->next) {
    for (const Counter& counter : block->counters) calls += counter.count.load(std::memory_order_relaxed);
  }
  return calls;
}

uint64_t FirstCallNs() { return g_first_call_ns.load(); }

EventBuffer& Events() { return g_events; }

void SetDeadline(uint64_t ns) { g_deadline_ns.store(ns); }

void SetFirstCallHook(void (*hook)()) { g_first_call_hook.store(hook); }

void SetLateCallHook(void (*hook)()) { g_late_call_hook.store(hook); }

void ForgetAfterFork() {
  for (Block* block = g_blocks.load(); block; block = block->next) {
    for (Counter& counter : block->counters) {
      if (counter.count.load(std::memory_order_relaxed) == 0) continue;
      for (std::atomic<uint64_t>* value : {&counter.count, &counter.errors, &counter.unsupported, &counter.sent,
                                           &counter.received, &counter.total_ns, &counter.max_ns}) {
        value->store(0, std::memory_order_relaxed);
      }
    }
    block->used.store(block == t_block, std::memory_order_relaxed);
  }
  g_first_call_ns.store(0);
  t_thread = 0;
}

}  // namespace cuda_remote::client::trace
