// SPDX-License-Identifier: Apache-2.0
// The hot driver calls, for counting their instructions in the client library under callgrind (count.py).
//
// Counts must be the same in every run, so nobody may be waited for. First the program makes each call many times with
// a real worker, and keeps the replies that came: they stay in the shared ring for a while. Then count.py stops the
// worker for good, and the program makes the same calls again, with the kept replies put into the ring beforehand under
// their new sequence numbers: each call finds its reply at once, whatever it sends and however often. Only that second
// pass is counted.
//
// Usage: hot_calls, with CUDA_REMOTE_SERVER at a cr-server on this machine. Prints "ready" when the worker is to be
// stopped, goes on after a line on standard input, and prints one JSON object. A count is one callgrind dump, named
// after its call.
#include <cuda.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/instructions/own_ring.h"
#include "proto/frame/frame.h"
#include "proto/ring/memory.h"
#include "proto/ring/ring.h"
#include "proto/ring/ring_abi.h"

namespace cuda_remote::bench {
namespace {

// Calls in one counted block.
constexpr int kBlock = 64;
// Blocks made before, so that all buffers have their size.
constexpr int kWarmUp = 3;

void Require(bool condition, const std::string& what) {
  if (condition) return;
  fprintf(stderr, "hot_calls: %s\n", what.c_str());
  _exit(1);
}

constexpr char kModule[] = R"(.version 7.0
.target sm_52
.address_size 64
.visible .entry nothing() { ret; }
.visible .entry eight(.param .u64 a, .param .u32 b, .param .f32 c, .param .f64 d, .param .u64 e, .param .u32 f,
                      .param .u32 g, .param .u32 h) { ret; }
)";

struct Call {
  std::string name;
  std::function<void()> make;
  // What one block sends and gets; quiet ones are requests that nothing has published after the block.
  uint64_t requests = 0;
  uint64_t quiet = 0;
  std::vector<std::string> replies;  // whole frames
  std::vector<uint64_t> answers;     // for each: which request of the block it answers
};

// The session's shared memory, as its worker has it.
class Server {
 public:
  Server() {
    StatusOr<std::unique_ptr<ring::RingMemory>> memory = MapOwnRing();
    Require(memory.ok(), memory.status().message());
    memory_ = *std::move(memory);
  }

  // Makes a block of calls and keeps its replies.
  void Learn(Call* call) {
    const uint64_t requests_from = Tail(ring::kRequestRing), replies_from = Tail(ring::kReplyRing);
    for (int i = 0; i < kBlock; ++i) call->make();
    uint64_t first = 0;
    call->requests = 0;
    ForEach(ring::kRequestRing, requests_from, [&](const FrameHeader& header, const std::string&) {
      if (call->requests++ == 0) first = header.sequence;
      last_sequence_ = header.sequence;
    });
    call->replies.clear();
    call->answers.clear();
    ForEach(ring::kReplyRing, replies_from, [&](const FrameHeader& header, const std::string& frame) {
      Require(header.sequence >= first && (header.flags & kFlagReply), call->name + ": a reply to another call");
      call->answers.push_back(header.sequence - first);
      call->replies.push_back(frame);
    });
  }

  // From here on this process is its own server.
  void TakeOver() {
    writer_ = std::make_unique<ring::RingWriter>(memory_.get(), ring::kReplyRing);
    // The worker sleeps now, and would be woken at each request.
    memory_->control(ring::kRequestRing)->consumer_parked.store(0);
  }

  // Puts the block's replies into the ring.
  void Answer(const Call& call) {
    for (size_t i = 0; i < call.replies.size(); ++i) {
      std::string frame = call.replies[i];
      FrameHeader header;
      memcpy(&header, frame.data(), sizeof(header));
      header.sequence = last_sequence_ + 1 + call.answers[i];
      memcpy(&frame[0], &header, sizeof(header));
      char* where;
      Require(writer_->Reserve(frame.size(), &where) == ring::RingStatus::kOk, "the reply ring is full");
      memcpy(where, frame.data(), frame.size());
      writer_->Commit(frame.size());
    }
    requests_from_ = Tail(ring::kRequestRing);
  }

  // After a block: it must have sent and read exactly what it did before. Empties the request ring.
  void Verify(Call* made) {
    const Call& call = *made;
    made->quiet = 0;
    const uint64_t published = memory_->control(ring::kRequestRing)->tail.load();
    if (published < Tail(ring::kRequestRing)) {
      ForEach(ring::kRequestRing, std::max(published, requests_from_),
              [&](const FrameHeader&, const std::string&) { ++made->quiet; });
    }
    uint64_t requests = 0;
    ForEach(ring::kRequestRing, requests_from_, [&](const FrameHeader& header, const std::string&) {
      ++requests;
      last_sequence_ = header.sequence;
    });
    Require(requests == call.requests, call.name + " sends " + std::to_string(requests) + " requests, with a worker " +
                                           std::to_string(call.requests));
    ring::RingControl* const replies = memory_->control(ring::kReplyRing);
    Require(replies->head.load() == replies->tail.load(), call.name + " has not read its replies");
    memory_->control(ring::kRequestRing)->head.store(Tail(ring::kRequestRing));
  }

 private:
  uint64_t Tail(ring::RingIndex index) const { return ring::WrittenUntil(*memory_->control(index)); }

  // All frames from a position to the ring's end; their bytes are still there when they have been read.
  template <typename Visit>
  void ForEach(ring::RingIndex index, uint64_t at, Visit visit) const {
    for (const uint64_t end = Tail(index); at != end;) {
      const char* const frame = memory_->data(index) + (at & (memory_->capacity(index) - 1));
      FrameHeader header;
      memcpy(&header, frame, sizeof(header));
      const uint64_t bytes = ring::FrameBytes(header.message_bytes, header.payload_bytes);
      visit(header, std::string(frame, bytes));
      at += bytes;
    }
  }

  std::unique_ptr<ring::RingMemory> memory_;
  std::unique_ptr<ring::RingWriter> writer_;
  uint64_t last_sequence_ = 0;
  uint64_t requests_from_ = 0;
};

// An event that nobody records again: once it is known to be done, a query needs no server.
CUevent g_done;

std::vector<Call> TheCalls() {
  CUdevice device;
  CUcontext context;
  CUmodule module;
  static CUfunction nothing, eight;
  static CUstream stream;
  static CUevent event, timed;
  static CUdeviceptr memory;
  static CUgraphExec graph;
  static char host[4096];
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuModuleLoadData(&module, kModule));
  CHECK(cuModuleGetFunction(&nothing, module, "nothing"));
  CHECK(cuModuleGetFunction(&eight, module, "eight"));
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CHECK(cuEventCreate(&timed, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&g_done, CU_EVENT_DISABLE_TIMING));
  CHECK(cuMemAlloc(&memory, 1 << 20));
  CUgraph captured;
  CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  CHECK(cuLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr));
  CHECK(cuStreamEndCapture(stream, &captured));
  CHECK(cuGraphInstantiate(&graph, captured, 0));
  const auto launch = [] { CHECK(cuLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr)); };
  std::vector<Call> calls;
  const auto add = [&calls](const char* name, std::function<void()> make) {
    Call call;
    call.name = name;
    call.make = std::move(make);
    calls.push_back(std::move(call));
  };
  add("launch, no arguments", launch);
  add("launch, 8 arguments", [] {
    uint64_t a = 0, e = 4;
    uint32_t b = 1, f = 5, g = 6, h = 7;
    float c = 2;
    double d = 3;
    void* arguments[] = {&a, &b, &c, &d, &e, &f, &g, &h};
    CHECK(cuLaunchKernel(eight, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
  });
  add("launch + stream synchronize", [launch] {
    launch();
    CHECK(cuStreamSynchronize(stream));
  });
  add("memcpy 4 B host to device", [] { CHECK(cuMemcpyHtoD(memory, host, 4)); });
  add("memcpy 4 B device to host", [] { CHECK(cuMemcpyDtoH(host, memory, 4)); });
  add("memset 4 B", [] { CHECK(cuMemsetD8Async(memory, 0, 4, stream)); });
  add("event record", [] { CHECK(cuEventRecord(event, stream)); });
  add("event record, with timing", [] { CHECK(cuEventRecord(timed, stream)); });
  add("stream wait event", [] { CHECK(cuStreamWaitEvent(stream, event, 0)); });
  add("event query", [] { CHECK(cuEventQuery(g_done)); });
  add("event record + synchronize", [] {
    CHECK(cuEventRecord(event, stream));
    CHECK(cuEventSynchronize(event));
  });
  add("current context", [] {
    CUcontext current;
    CHECK(cuCtxGetCurrent(&current));
  });
  add("current device", [] {
    CUdevice current;
    CHECK(cuCtxGetDevice(&current));
  });
  // What the runtime asks at each of its calls: the context's storage, in a private table.
  static const unsigned char kStorage[16] = {0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11,
                                             0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93};
  CUuuid id;
  memcpy(id.bytes, kStorage, sizeof(kStorage));
  static void* const* storage = nullptr;
  CHECK(cuGetExportTable(reinterpret_cast<const void**>(&storage), &id));
  static char key;
  CHECK(reinterpret_cast<CUresult (*)(CUcontext, void*, void*, void*)>(storage[0])(nullptr, &key, &key, nullptr));
  add("context storage", [] {
    void* value = nullptr;
    CHECK(reinterpret_cast<CUresult (*)(void**, CUcontext, void*)>(storage[2])(&value, nullptr, &key));
  });
  add("pointer attributes", [] {
    CUcontext of = nullptr;
    unsigned type = 0, managed = 0;
    int ordinal = 0;
    CUdeviceptr pointer = 0;
    CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    void* values[] = {&of, &type, &pointer, &managed, &ordinal};
    CHECK(cuPointerGetAttributes(5, wanted, values, memory + 4096));
  });
  // Before the others: the client keeps this memory, and their recorded replies must not name it.
  add("mallocAsync+freeAsync 1 KB", [] {
    CUdeviceptr made;
    CHECK(cuMemAllocAsync(&made, 1024, stream));
    CHECK(cuMemFreeAsync(made, stream));
  });
  add("malloc+free 1 KB", [] {
    CUdeviceptr made;
    CHECK(cuMemAlloc(&made, 1024));
    CHECK(cuMemFree(made));
  });
  add("malloc+free 2 MB", [] {
    CUdeviceptr made;
    CHECK(cuMemAlloc(&made, 2 << 20));
    CHECK(cuMemFree(made));
  });
  add("event create+destroy", [] {
    CUevent made;
    CHECK(cuEventCreate(&made, CU_EVENT_DISABLE_TIMING));
    CHECK(cuEventDestroy(made));
  });
  add("stream create+destroy", [] {
    CUstream made;
    CHECK(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamDestroy(made));
  });
  add("graph launch", [] { CHECK(cuGraphLaunch(graph, stream)); });
  return calls;
}

int Main() {
  std::vector<Call> calls = TheCalls();
  Server server;
  for (Call& call : calls) {
    // What was made before must be over, as it will be when there is no worker.
    CHECK(cuCtxSynchronize());
    for (int i = 0; i < kWarmUp; ++i) server.Learn(&call);
  }
  // The graph's launches may have recorded it, for all that the client knows.
  CHECK(cuEventQuery(g_done));
  CHECK(cuCtxSynchronize());
  // That synchronisation was the last request.
  Call last;
  last.name = "the last one";
  last.make = [] {};
  server.Learn(&last);
  printf("ready\n");
  fflush(stdout);
  if (getchar() == EOF) return 1;
  server.TakeOver();
  // A call that waits for something else than its replies would wait for ever.
  alarm(120);
  std::string out;
  for (Call& call : calls) {
    for (int block = 0; block <= kWarmUp; ++block) {
      server.Answer(call);
      if (block == kWarmUp) CALLGRIND_TOGGLE_COLLECT;
      for (int i = 0; i < kBlock; ++i) call.make();
      if (block == kWarmUp) {
        CALLGRIND_TOGGLE_COLLECT;
        CALLGRIND_DUMP_STATS_AT(call.name.c_str());
      }
      server.Verify(&call);
    }
    out += (out.empty() ? "" : ", ") + ("\"" + call.name + "\": [" + std::to_string(call.requests) + ", ") +
           std::to_string(call.replies.size()) + ", " + std::to_string(call.quiet) + "]";
  }
  printf("{\"block\": %d, \"requests_replies_quiet\": {%s}}\n", kBlock, out.c_str());
  fflush(stdout);
  _exit(0);  // exit handlers would ask the worker
}

}  // namespace
}  // namespace cuda_remote::bench

int main() { return cuda_remote::bench::Main(); }
