// SPDX-License-Identifier: Apache-2.0
// Streams that are being captured, and the requests that a capture consists of.
//
// A captured graph has no other description on this side than what was captured: the requests sent for the capture's
// streams and graph between begin and end. They are kept here while the capture runs and become the graph's record when
// it ends (by the trait `capture` of proto/api). Streams join a capture as in the driver: by waiting for an event
// that was recorded in it.
//
// Thread-safe. Requests that concurrent threads make in one capture are kept in some order that each thread could have
// seen, which is all that the driver promises too.
#ifndef CUDA_REMOTE_CLIENT_GRAPHS_CAPTURES_H_
#define CUDA_REMOTE_CLIENT_GRAPHS_CAPTURES_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "client/graphs/disguised_nodes.h"
#include "client/memory/memory.h"
#include "proto/codec/operations.gen.h"
#include "proto/frame/frame.h"
#include "proto/threads/mutex.h"
#include "replay/log/log.h"

namespace cuda_remote::client {

// One capture.
struct CaptureRecord {
  uint64_t origin = 0;            // the stream in which it was begun
  uint64_t graph = 0;             // virtual handle, 0: has none yet
  bool own_graph = true;          // else it adds to a graph of the application's
  bool edits = false;             // it has done something else to its graph than to add nodes
  std::vector<uint64_t> streams;  // the origin first
  std::vector<uint64_t> events;   // by which streams joined it
  // Those of them that were destroyed while it was in progress, as they were.
  std::vector<wire::CapturedStream> gone_streams;
  std::vector<wire::CapturedEvent> gone_events;
  std::vector<replay::ObjectKey> needs;  // without which the record cannot be replayed; each once
  std::vector<uint64_t> retains;         // graphs and executables that became part of the graph as they were then
  std::string frames;                    // header, message, padding to 8 bytes, and so on
  std::vector<uint64_t> children;        // graphs to destroy once it has its record, which names them
  std::string obstacle;                  // name of a call that cannot be sent again; empty: none
};

class Captures {
 public:
  // `memory`: the session's, which outlives this.
  explicit Captures(Memory* memory) : memory_(memory) {}

  // Whether a capture is in progress.
  bool active() const { return count_.load(std::memory_order_acquire) != 0; }
  // Whether one is in progress, or an event may be in the state in which a capture has left it.
  bool concern_events() const { return concerns_.load(std::memory_order_acquire) != 0; }

  // Notes a request that was sent (and, if it was waited for, succeeded) on `stream` (0: on none that can be captured).
  // `context` is the virtual handle of the thread's context, `name` the application's call. Called for every request
  // while a capture is in progress, and for every request that begins one. Locks KnownMemory for look-ups.
  void Note(const FrameHeader& header, std::string_view message, bool has_payload, uint64_t stream, uint64_t context,
            const char* name);

  // A request that is about to be sent while no capture is in progress: whether it waits for an event that may last
  // have been recorded in a capture. The driver refuses that at once. Asked if concern_events().
  bool WaitsForCaptured(uint32_t call, std::string_view message);
  void ForgetEvent(uint64_t event);

  // Adds a request about the graph of a capture in progress, or one of its nodes. False if it is none.
  bool NoteGraph(uint64_t graph, const FrameHeader& header, std::string_view message, uint64_t context,
                 const std::vector<replay::ObjectKey>& needs, const std::vector<uint64_t>& retains);

  // The capture's graph got a virtual handle, by a request on one of its streams, which is part of the record.
  void Named(uint64_t stream, uint64_t graph, const FrameHeader& header, std::string_view message, uint64_t context);

  // A stream or an event is about to be destroyed.
  void Goes(const wire::CapturedStream& stream);
  void Goes(const wire::CapturedEvent& event);

  // The streams of the capture that was begun in `stream`.
  std::vector<uint64_t> StreamsOf(uint64_t stream) const;

  // A capture that ended has added to `graph`, which is part of the graph of one that goes on: neither can be made
  // again. False if `graph` is none of a capture in progress.
  bool EndedInside(uint64_t graph);

  // Whether `graph` is that of a capture in progress.
  bool IsGraphOfOne(uint64_t graph) const;

  // Leaves the destruction of a graph that `graph` was given as a child to the end of its capture. False if `graph` is
  // none of a capture in progress.
  bool DestroyLater(uint64_t graph, uint64_t child);

  // Whether what is put into `stream` now is captured instead of run.
  bool IsCaptured(uint64_t stream) const;

  // The driver has refused a call because of a capture, and a capture may have come to nothing by that.
  void NoteRefused();
  // While a capture is in progress: whether the driver may refuse, at once, what is put into `stream` now. That is so
  // after NoteRefused, and for streams that are not captured.
  bool MayRefuse(uint64_t stream) const;

  // The graph of the capture of `stream`; 0 if it has no handle yet, or there is no capture.
  uint64_t GraphOf(uint64_t stream) const;
  // The same, and 0 too if the capture adds to a graph of the application's.
  uint64_t OwnGraphOf(uint64_t stream) const;

  // Whether the capture of `stream` adds to a graph of the application's, and so far has only added nodes.
  bool OnlyAddsNodes(uint64_t stream) const;

  // The stream in which the capture of `stream` was begun; 0 if there is no capture.
  uint64_t OriginOf(uint64_t stream) const;

  // The capture that was begun in `stream` is over. Null if there is none.
  std::unique_ptr<CaptureRecord> End(uint64_t stream);

 private:
  CaptureRecord* OfStreamLocked(uint64_t stream) const CR_REQUIRES(mutex_);
  void BeginLocked(uint64_t stream, uint64_t graph) CR_REQUIRES(mutex_);
  void CountLocked() CR_REQUIRES(mutex_);

  Memory* const memory_;
  mutable Mutex mutex_ CR_ACQUIRED_AFTER(&RecordedObjects::mutex_, &DisguisedNodes::mutex_);
  std::atomic<int> count_{0};
  std::atomic<size_t> concerns_{0};             // captures in progress, and captured_events_
  bool refused_ CR_GUARDED_BY(mutex_) = false;  // since there last was no capture
  std::vector<std::unique_ptr<CaptureRecord>> captures_ CR_GUARDED_BY(mutex_);
  // The capture in which an event was recorded last.
  std::unordered_map<uint64_t, CaptureRecord*> of_event_ CR_GUARDED_BY(mutex_);
  // Events of which no later record than one in a capture is known, also of captures that are over.
  std::unordered_set<uint64_t> captured_events_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_GRAPHS_CAPTURES_H_
