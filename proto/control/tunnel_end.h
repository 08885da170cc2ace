// SPDX-License-Identifier: Apache-2.0
// What both ends of a tunnelled session do: send the frames of local rings, write what arrives to local rings,
// acknowledge, and go on after a broken stream.
//
//     application <-ring-> cr-relay [TunnelEnd] <--gRPC--> [TunnelEnd] cr-server <-ring-> worker
//
// A ring on one host and its counterpart on the other carry the same bytes at the same positions. The sender's ring is
// also the store of what has not been acknowledged: room is given back to its producer only when the other end's
// consumer has taken the bytes. So
//   - nothing is copied for retransmission; after a broken stream the sender goes back to the receiver's position;
//   - the sender never has more under way than the receiver's ring has room for: a receiver never waits for its ring.
// Long messages are copied into their ring by a thread of their own, while the next one is read: either takes about as
// long, and one thread doing both would halve the bandwidth.
// Bulk also goes over lanes: further streams of the same session, each over a connection of its own, which carry
// nothing but batches of frames of the first ring. One connection carries what one processor can copy into it and
// another one out of it; several carry more. A batch has its place in the ring, whichever way it comes; what has come
// is published up to the first gap. The lanes belong to one run: with any of them the whole stream breaks, and is
// resumed as ever. The stream says how many messages each lane was given, and only as many are read from it: a thread
// that waited for more would take part in gRPC's polling, where it takes messages of the quiet stream away from the
// thread that they are for, and has to wake it up each time.
//
// The thread that reads a stream never writes to it: a writer may have to wait until the other end reads (the stream's
// flow control), and two ends whose readers wait behind their own writers would never move again.
//
// One TunnelEnd lives as long as the session; Run is called for each stream, one at a time, RunLane for its lanes.
// Frames that arrive are checked for their shape (whole, within limits); what they mean is for the ring's consumer to
// check.
//
// Thread-safe: End, Interrupt, outstanding, silence, since_sent, RunLane, AwaitBulk, WakeWaiting. Not part of the
// client library.
#ifndef CUDA_REMOTE_PROTO_CONTROL_TUNNEL_END_H_
#define CUDA_REMOTE_PROTO_CONTROL_TUNNEL_END_H_

#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "proto/control/tunnel_message.h"
#include "proto/ring/ring.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::control {

// A stream, whichever side of gRPC it is seen from. Read: one thread. Write: one thread at a time.
class TunnelStream {
 public:
  virtual ~TunnelStream() = default;
  virtual bool Read(grpc::ByteBuffer* buffer) = 0;
  virtual bool Write(const grpc::ByteBuffer& buffer) = 0;
  // Makes Read and Write fail soon; any thread.
  virtual void Cancel() = 0;
  // No Read will follow; the thread that reads.
  virtual void DoneReading() {}
};

class TunnelEnd {
 public:
  enum class Side { kRelay, kServer };
  enum class Outcome {
    kBroken,     // the stream ended without a word, or could not be served for lack of threads: resume
    kPeerEnded,  // the other end ended the session
    kEnded,      // this end did (End), and has said so
    kFailed,     // the other end, or the local ring, broke the rules; both sides are over
  };

  // `checked`: all messages carry a checksum, in both directions. One that arrives damaged breaks its stream, so that
  // it is sent again; if that keeps happening without progress, the session fails.
  TunnelEnd(Side side, std::shared_ptr<ring::RingMemory> memory, bool checked = false);

  // Serves one stream until it ends. `peer_positions` is where the other end is in the rings that this end sends
  // (request ring for the relay; reply and event ring for the server). *reason: one sentence; of kBroken only if this
  // end is the reason. `number` is what lanes of this stream call it, the same at both ends; 0: it has none.
  Outcome Run(TunnelStream* stream, const std::vector<uint64_t>& peer_positions, std::string* reason,
              uint64_t number = 0);

  // Serves a lane of the run `number`, which may be about to begin; returns when either has ended. False if there is no
  // such run. Each lane has a thread of its own, which calls this, and a number, below kMostLanes and the same at both
  // ends.
  bool RunLane(TunnelStream* stream, uint64_t number, uint32_t lane);
  static constexpr uint32_t kMostLanes = 8;

  // Waits until so much went through this end that lanes are worth their connections. False: *stop was set before, and
  // WakeWaiting called.
  bool AwaitBulk(const std::atomic<bool>* stop);
  void WakeWaiting();

  // Positions up to which the rings that this end receives have arrived: what the other end needs to resume.
  std::vector<uint64_t> received_positions() const;

  // Ends the session from this side: what is in the rings is still sent, then the reason. Any thread, once.
  void End(const std::string& reason);
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  std::string end_reason() const;

  // How many messages arrived damaged.
  uint64_t damaged() const { return damaged_.load(); }

  // Whether there is anything that the other end has not taken yet.
  bool outstanding() const;
  // For how many seconds nothing has arrived, while the other end has something outstanding; else 0.
  double silence() const;
  // For how many seconds nothing was sent.
  double since_sent() const;

 private:
  struct Out {
    ring::RingIndex index;
    std::unique_ptr<ring::RingReader> reader;
    std::atomic<uint64_t> sent{0};
  };
  struct In {
    ring::RingIndex index;
    std::unique_ptr<ring::RingWriter> writer;
    std::atomic<uint64_t> position{0};      // received and published
    std::atomic<uint64_t> acknowledged{0};  // told the other end
    // Pieces behind `position` that have come, or are being put in place, by where they begin. They do not overlap.
    struct Piece {
      uint64_t end;
      bool placed;
    };
    Mutex mutex;  // also for `writer`
    std::map<uint64_t, Piece> pieces CR_GUARDED_BY(mutex);
  };
  // Frames on their way to a lane.
  struct Batch {
    Out* out;
    uint64_t position;
    uint64_t bytes;
  };
  struct Lane {
    Lane(TunnelStream* lane_stream, uint32_t lane_index) : stream(lane_stream), index(lane_index) {}
    TunnelStream* const stream;
    const uint32_t index;
    Condition changed;               // with lanes_mutex_
    std::deque<Batch> waiting;       // lanes_mutex_
    size_t load = 0;                 // lanes_mutex_: batches that wait or are being written
    bool over = false;               // lanes_mutex_
    std::atomic<bool> awake{false};  // something waits, or it is over
    ring::SpinBudget spin;           // the writing thread's
    // The reading thread's.
    Condition arriving;  // with lanes_mutex_
    uint64_t read = 0;   // messages
    ring::SpinBudget arriving_spin;
    std::atomic<int64_t> since_ns{0};  // when the reading thread began to read a message that is there; 0: it does not
  };

  // The threads that write to one stream.
  struct Writers {
    std::atomic<bool> stop{false};
    std::atomic<int> sending;  // not yet through their ring
    std::atomic<int> present;
  };
  // Messages that were read, on their way into the rings.
  struct Arrivals {
    Mutex mutex;
    Condition changed;
    std::deque<grpc::ByteBuffer> waiting CR_GUARDED_BY(mutex);
    uint64_t waiting_bytes CR_GUARDED_BY(mutex) = 0;
    bool busy CR_GUARDED_BY(mutex) = false;   // one is being placed
    bool over CR_GUARDED_BY(mutex) = false;   // no more will come
    bool ended CR_GUARDED_BY(mutex) = false;  // placed the other end's last, or one that broke the rules
    Outcome outcome CR_GUARDED_BY(mutex) = Outcome::kBroken;
    std::string reason CR_GUARDED_BY(mutex);
  };
  void SendLoop(Out* out, TunnelStream* stream, Writers* writers);
  // Reads the stream, or the lane, to its end; what it was goes to `arrivals`.
  void ReadLoop(TunnelStream* stream, Arrivals* arrivals, Lane* lane);
  void PlaceLoop(TunnelStream* stream, Arrivals* arrivals, Lane* lane);
  // Takes one message. False if it is the last: the outcome is set.
  bool Place(const grpc::ByteBuffer& buffer, Arrivals* arrivals, bool lane);
  // Gives a batch to a lane that has little to do; false if there is none.
  bool Dispatch(const Batch& batch);
  void LaneLoop(Lane* lane);
  // Waits until there is something to read from a lane; false: it is over.
  bool AwaitArrival(Lane* lane);
  void EndLane(Lane* lane);
  // The counts for a message of the stream, if the other end does not know them yet; and what it sent of its own.
  std::string TakeCounts();
  bool LearnCounts(const std::string& counts);
  // Counts a message that arrived damaged.
  void Damaged();
  // Where messages are checked, damage may also have hit what gRPC puts around them, so that it waits for bytes that
  // never come. So something is sent now and then, and a stream on which nothing arrives is broken.
  void KeepAlive(TunnelStream* stream);
  grpc::ByteBuffer Encode(const TunnelMessage& message) const {
    return EncodeTunnelMessage(message, nullptr, checked_);
  }
  // The message for a batch; `message` may hold acknowledgements.
  grpc::ByteBuffer Encode(const Batch& batch, TunnelMessage message) const;
  // Ends the lanes of the run and waits until they have left.
  void EndLanes();
  // After the other end's goodbye, which says how far it has come: what it sent before may still be on the lanes.
  void AwaitLanes(uint64_t position);
  void CountBulk(uint64_t bytes);
  // After a message that arrived at that time was placed: waits for a moment for one that goes the other way.
  void AwaitAnswer(int64_t arrived_ns);
  void AcknowledgeLoop(TunnelStream* stream, Writers* writers);
  // Whether so much was consumed here that the other end should hear of it.
  bool AcknowledgementsDue() const;
  // Whether enough was received for acknowledgements to become due soon.
  bool Backlog() const;
  void WakeAcknowledgements();
  void FillAcknowledgements(TunnelMessage* message);
  // Does what the message says. What is wrong with it, or null.
  const char* Receive(const TunnelMessage& message, const ReceivedFrames& frames, bool lane);
  // Puts frames where they belong and publishes what is whole. What is wrong with them, or null.
  const char* PutInPlace(In* in, uint64_t position, const ReceivedFrames& frames);
  bool Acknowledge(Out* out, uint64_t position);
  // To the stream of Run, which has several writers.
  bool Write(TunnelStream* stream, const grpc::ByteBuffer& buffer);
  void Fail(const std::string& reason);
  void InterruptAll();

  const Side side_;
  const std::shared_ptr<ring::RingMemory> memory_;
  const bool checked_;
  std::atomic<uint64_t> damaged_{0};
  std::atomic<int64_t> heard_ns_{0};  // when the last message of the stream arrived
  Mutex damage_mutex_;
  // How far everything had come when a message was damaged last, and how many were damaged there.
  uint64_t damage_at_ CR_GUARDED_BY(damage_mutex_) = 0;
  unsigned damage_in_a_row_ CR_GUARDED_BY(damage_mutex_) = 0;
  std::vector<std::unique_ptr<Out>> out_;
  std::vector<std::unique_ptr<In>> in_;
  Mutex write_mutex_;
  std::atomic<int64_t> written_ns_{0};  // when the last message was written
  // The reading thread's.
  ring::SpinBudget answer_;
  int64_t answer_missed_ns_ = 0;
  Mutex acknowledge_mutex_;
  Condition acknowledge_wake_;
  // Something arrived since the acknowledging thread last looked.
  bool received_ CR_GUARDED_BY(acknowledge_mutex_) = false;
  Mutex lanes_mutex_;
  Condition lanes_changed_;
  uint64_t run_ CR_GUARDED_BY(lanes_mutex_) = 0;  // the number of the run that takes lanes; the following are its
  TunnelStream* main_ CR_GUARDED_BY(lanes_mutex_) = nullptr;
  std::vector<Lane*> lanes_ CR_GUARDED_BY(lanes_mutex_);
  uint64_t given_[kMostLanes] CR_GUARDED_BY(lanes_mutex_) = {};  // messages to each lane
  std::atomic<uint64_t> announced_[kMostLanes] = {};             // messages from each, by the other end's word
  std::atomic<bool> counts_due_{false};                          // the other end does not know all of given_
  std::atomic<int> lane_count_{0};                               // how many, for a look without the lock
  std::atomic<bool> takes_lanes_{false};
  std::atomic<uint64_t> bulk_bytes_{0};
  std::atomic<bool> ended_{false};
  std::atomic<bool> failed_{false};
  mutable Mutex reason_mutex_;
  std::string reason_ CR_GUARDED_BY(reason_mutex_);
};

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_TUNNEL_END_H_
