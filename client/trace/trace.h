// SPDX-License-Identifier: Apache-2.0
// Tracing of driver calls: what every exported entry point asks before it does anything (On), and what it tells if
// somebody wants to know (Span).
//
// Two things can be recorded, each at any time: totals of every call (report.h), and the single calls of a slice of
// time (timeline.h). Both are off by default; a call then costs one load and one branch more. README.md has the
// settings.
//
// Thread-safe. Nothing throws; nothing here ends the process. Part of the client library: libc and libstdc++ only.
#ifndef CUDA_REMOTE_CLIENT_TRACE_TRACE_H_
#define CUDA_REMOTE_CLIENT_TRACE_TRACE_H_

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace cuda_remote::client::trace {

// What is being recorded, as bits.
inline constexpr uint32_t kTotals = 1;
inline constexpr uint32_t kTimeline = 2;
extern __attribute__((visibility("hidden"))) std::atomic<uint32_t> g_recording;

inline bool On() { return __builtin_expect(g_recording.load(std::memory_order_relaxed) != 0, 0); }

// Names of the entry points, in the order of their numbers in generated code (client/entry). Numbers from kNameCount on
// are given out by Register.
extern const char* const kNames[];
extern const uint32_t kNameCount;

// A number for a call that has no entry point, such as a word of a private table; the same for the same name. `name` is
// copied. When there are too many, they share one.
uint32_t Register(const char* name);

// The call that this thread is in. Made only while On(); a Span inside another one (the library calling itself) counts
// nothing. Lives on the stack of the calling thread.
class Span {
 public:
  explicit Span(uint32_t number);
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  // Records the call, which returns `result`, and returns `result`.
  CUresult End(CUresult result);

 private:
  friend void Sent(size_t bytes, uint64_t sequence);
  friend void Received(size_t bytes);
  friend void Unsupported();

  const uint32_t number_;
  bool nested_ = false;
  bool unsupported_ = false;
  uint64_t start_ns_ = 0;
  uint64_t sent_ = 0;
  uint64_t received_ = 0;
  uint64_t sequence_ = 0;
};

// What the calling thread's present call causes: bytes on their way to the server (frame headers included; `sequence`
// 0: unknown) and back, and that it is one that is not supported. Nothing happens outside a Span. Call them only if
// On().
void Sent(size_t bytes, uint64_t sequence);
void Received(size_t bytes);
void Unsupported();

// Evaluates `call`, a driver call's body, as entry point `number`, and returns its result from the enclosing function.
// The traced way is a function of its own, so that the other one has no stack frame to make.
#define CR_RETURN_TRACED(number, call)                             \
  do {                                                             \
    if (::cuda_remote::client::trace::On()) {                      \
      return [=]() __attribute__((noinline, cold))->CUresult {     \
        ::cuda_remote::client::trace::Span cr_traced_span(number); \
        return cr_traced_span.End(call);                           \
      }                                                            \
      ();                                                          \
    }                                                              \
    return call;                                                   \
  } while (0)

}  // namespace cuda_remote::client::trace

#endif  // CUDA_REMOTE_CLIENT_TRACE_TRACE_H_
