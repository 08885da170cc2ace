// SPDX-License-Identifier: Apache-2.0
// What launches and event records cost the threads that make them, one or many at a time, when nobody else is in the
// way: no GPU, no driver, no executor. The program becomes its own server (bench/instructions/alone.py); a thread reads
// the ring as the worker does, checks that every request is there once and in order, and takes a given time over each.
//
// Usage: producers CALLS WORK_NS THREADS...    CALLS in all for each number of THREADS; with CUDA_REMOTE_SERVER at a
//                                              cr-server on this machine
//
// Prints "ready" when the worker is to be stopped, goes on after a line on standard input, and prints one JSON object
// for each measurement: of the call, "issue_ns" is what one takes in its thread, "each_ns" the time of all divided by
// their number until the last one is in the ring, "cpu_ns" the processor time of the calling threads for one.
#include <cuda.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/instructions/own_ring.h"
#include "proto/frame/frame.h"
#include "proto/ring/ring.h"
#include "proto/ring/spin.h"

namespace cuda_remote::bench {
namespace {

constexpr int kRounds = 3;
// Made by each thread before it is measured.
constexpr int kWarmUp = 100;

constexpr char kModule[] = R"(.version 7.0
.target sm_52
.address_size 64
.visible .entry nothing() { ret; }
)";

int64_t NowNs(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// Reads requests in the worker's place.
class Reader {
 public:
  Reader(ring::RingMemory* memory, int64_t work_ns)
      : memory_(memory), work_ns_(work_ns), reader_(memory, ring::kRequestRing), thread_([this] { Run(); }) {}

  // Returns how many requests there were once all that were sent have been read.
  uint64_t Stop() {
    stop_ = true;
    reader_.Interrupt();
    thread_.join();
    return count_;
  }

 private:
  void Run() {
    FrameHeader header;
    const char* frame;
    std::string message;
    uint64_t last = 0;
    while (true) {
      const bool last_look = stop_;
      const ring::RingStatus status = reader_.Peek(&header, &frame);
      if (status == ring::RingStatus::kCorrupt) Fail("the ring holds something impossible");
      if (status == ring::RingStatus::kNotYet) {
        if (last_look && !reader_.ReadyAtAll()) return;
        reader_.Wait(10);
        continue;
      }
      message.assign(frame + sizeof(header), header.message_bytes);
      if (last != 0 && header.sequence != last + 1) Fail("a request is missing, or there twice");
      last = header.sequence;
      ++count_;
      reader_.Skip(header);
      if (work_ns_ > 0) {
        const int64_t until = NowNs(CLOCK_MONOTONIC) + work_ns_;
        while (NowNs(CLOCK_MONOTONIC) < until) {
        }
      }
      // As ServerChannel does.
      if (reader_.position() - reader_.freed() >= memory_->capacity(ring::kRequestRing) / 32 || !reader_.Ready()) {
        reader_.FreeUntil(reader_.position());
      }
    }
  }

  [[noreturn]] static void Fail(const char* what) {
    fprintf(stderr, "producers: %s\n", what);
    _exit(1);
  }

  ring::RingMemory* const memory_;
  const int64_t work_ns_;
  ring::RingReader reader_;
  uint64_t count_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

struct Times {
  double issue_ns = 0, each_ns = 0, cpu_ns = 0;
};

// `threads` threads make `calls` calls each; make(i) is one of thread i's.
Times Measure(CUcontext context, int threads, int calls, const std::function<void(int)>& make) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<double> issue(threads), cpu(threads);
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&, t] {
      CHECK(cuCtxSetCurrent(context));
      for (int i = 0; i < kWarmUp; ++i) make(t);
      ++ready;
      while (!go) std::this_thread::yield();
      const int64_t start = NowNs(CLOCK_MONOTONIC), used = NowNs(CLOCK_THREAD_CPUTIME_ID);
      for (int i = 0; i < calls; ++i) make(t);
      issue[t] = double(NowNs(CLOCK_MONOTONIC) - start) / calls;
      cpu[t] = double(NowNs(CLOCK_THREAD_CPUTIME_ID) - used) / calls;
    });
  }
  while (ready < threads) usleep(100);
  const int64_t start = NowNs(CLOCK_MONOTONIC);
  go = true;
  for (std::thread& thread : all) thread.join();
  Times times;
  times.each_ns = double(NowNs(CLOCK_MONOTONIC) - start) / (double(threads) * calls);
  std::sort(issue.begin(), issue.end());
  times.issue_ns = issue[threads / 2];
  for (const double one : cpu) times.cpu_ns += one / threads;
  return times;
}

int Main(int argc, char** argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: see the top of bench/producers/producers.cc\n");
    return 2;
  }
  const int calls = std::max(1, atoi(argv[1]));
  const int64_t work_ns = atoll(argv[2]);
  std::vector<int> counts;
  for (int i = 3; i < argc; ++i) counts.push_back(std::max(1, atoi(argv[i])));
  const int most = *std::max_element(counts.begin(), counts.end());
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction nothing;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuModuleLoadData(&module, kModule));
  CHECK(cuModuleGetFunction(&nothing, module, "nothing"));
  std::vector<CUstream> streams(most);
  std::vector<CUevent> events(most);
  for (int i = 0; i < most; ++i) {
    CHECK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&events[i], CU_EVENT_DISABLE_TIMING));
    CHECK(cuLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, streams[i], nullptr, nullptr));
  }
  CHECK(cuCtxSynchronize());
  printf("ready\n");
  fflush(stdout);
  if (getchar() == EOF) return 1;
  alarm(280);  // nobody waits for a reply, so nothing should take long
  StatusOr<std::unique_ptr<ring::RingMemory>> mapped = MapOwnRing();
  if (!mapped.ok()) {
    fprintf(stderr, "producers: %s\n", mapped.status().message().c_str());
    return 1;
  }
  const std::unique_ptr<ring::RingMemory> memory = *std::move(mapped);
  // The worker sleeps, and has read all.
  ring::RingControl* const control = memory->control(ring::kRequestRing);
  control->consumer_parked.store(0);
  control->head.store(ring::WrittenUntil(*control));
  const struct {
    const char* name;
    std::function<void(int)> make;
  } kinds[] = {
      {"launch", [&](int i) { CHECK(cuLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, streams[i], nullptr, nullptr)); }},
      {"event record", [&](int i) { CHECK(cuEventRecord(events[i], streams[i])); }},
  };
  for (const auto& kind : kinds) {
    for (const int threads : counts) {
      Times best;
      for (int round = 0; round < kRounds; ++round) {
        const int each = std::max(1, calls / threads);
        Reader reader(memory.get(), work_ns);
        const Times times = Measure(context, threads, each, kind.make);
        const uint64_t read = reader.Stop(), made = uint64_t(threads) * uint64_t(each + kWarmUp);
        if (read != made) {
          fprintf(stderr, "producers: %d threads made %llu calls, %llu requests came\n", threads,
                  static_cast<unsigned long long>(made), static_cast<unsigned long long>(read));
          _exit(1);
        }
        if (round == 0 || times.each_ns < best.each_ns) best = times;
      }
      printf("{\"call\": \"%s\", \"threads\": %d, \"issue_ns\": %.1f, \"each_ns\": %.1f, \"cpu_ns\": %.1f}\n",
             kind.name, threads, best.issue_ns, best.each_ns, best.cpu_ns);
    }
  }
  fflush(stdout);
  _exit(0);  // exit handlers would ask the worker
}

}  // namespace
}  // namespace cuda_remote::bench

int main(int argc, char** argv) { return cuda_remote::bench::Main(argc, argv); }
