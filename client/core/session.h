// SPDX-License-Identifier: Apache-2.0
// The application's session with a GPU server: the one object behind all driver calls of the process.
//
// It opens the channel, owns the parts, each of which has a header of its own and the locks that it needs, and wires
// them together. What stands here besides needs several parts. It is made at the first driver call that needs a server
// and never destroyed: the CUDA runtime still calls the driver from its exit handlers.
//
// Locking: the session has no lock. README.md lists those of its parts, and the order in which a thread takes them.
// What a function here locks, it says.
#ifndef CUDA_REMOTE_CLIENT_CORE_SESSION_H_
#define CUDA_REMOTE_CLIENT_CORE_SESSION_H_

#include <cuda.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "client/agent/agent.h"
#include "client/core/answers.h"
#include "client/core/checkpoint.h"
#include "client/core/completion.h"
#include "client/core/connection.h"
#include "client/core/event_times.h"
#include "client/core/gate.h"
#include "client/core/host_functions.h"
#include "client/core/recorded_objects.h"
#include "client/core/server_requests.h"
#include "client/core/settings.h"
#include "client/core/thread_state.h"
#include "client/graphs/graphs.h"
#include "client/memory/memory.h"
#include "client/trace/control.h"
#include "proto/channel/client_channel.h"
#include "replay/log/log.h"

namespace cuda_remote::client {

class Session final : public trace::Server {
 public:
  // The process's session. Null before the first Connect, and in a forked child.
  static Session* Get() { return g_session.load(std::memory_order_acquire); }

  // Connects if that has not happened yet. What cuInit and the calls that work before cuInit need.
  static CUresult Connect(Session** session);

  // A child made by fork from a process that had a session: every call returns what the native driver returns there.
  static bool InForkedChild();

  // A thread that used CUDA ends: its hidden streams are destroyed. Called by the thread's key destructor.
  static void ThreadEnds(ThreadState* thread);

  bool initialized() const { return initialized_.load(std::memory_order_acquire); }
  void set_initialized() { initialized_.store(true, std::memory_order_release); }

  // The channel to the server, and what became of it.
  Connection& connection() { return connection_; }
  CUresult lost() const { return connection_.lost(); }
  CUresult Lose(ChannelStatus status) { return connection_.Lose(status, settings_.server); }
  void SetPendingError(CUresult error) { connection_.SetPendingError(error); }
  CUresult TakePendingError() { return connection_.TakePendingError(); }

  const Settings& settings() const { return settings_; }
  const std::vector<Device>& devices() const { return devices_; }
  int driver_version() const { return driver_version_; }
  // How the process names its server from now on. The agent's thread, while the gate is closed.
  void set_server(const std::string& server) { settings_.server = server; }
  ClientChannel& channel() { return connection_.channel(); }
  // Whether the server shares memory with this process (ring), or only sees what is sent (relay).
  bool shared_memory() const { return connection_.shared_memory(); }

  Gate& gate() { return gate_; }
  // What the checkpoint agent talks to.
  Checkpoint& checkpoint() { return checkpoint_; }
  RecordedObjects& objects() { return objects_; }
  Memory& memory() { return memory_; }
  Graphs& graphs() { return graphs_; }

  EventTimes& event_times() { return event_times_; }

  Completions& completions() { return completions_; }
  Answers& answers() { return answers_; }
  // Which asynchronous calls wait until the server has executed them.
  enum class Waits : uint8_t {
    kNone,
    kEvents,  // those that record events or wait for them: another process has some of the events
    kAll,     // CUDA_REMOTE_SYNC
  };
  Waits waits() const { return waits_.load(std::memory_order_relaxed); }
  // From now on another process may record an event of this one, or wait for it. When a call returns here, a call that
  // the other process makes next must find it executed, as natively.
  void ShareEvents() {
    if (waits() == Waits::kNone) waits_.store(Waits::kEvents, std::memory_order_relaxed);
  }
  // Whether the application has ever made a stream, so that not everything is in the default stream's order.
  bool has_streams() const { return has_streams_.load(std::memory_order_relaxed); }
  void NoteStream() { has_streams_.store(true, std::memory_order_relaxed); }
  HostFunctions& host_functions() { return host_functions_; }

  // What the client library asks the server for itself.
  ServerRequests& requests() { return requests_; }

  // trace::Server. Any thread that is in no call.
  bool BeginTimeline(uint64_t capacity) override;
  void EndTimeline(trace::WorkerEvents* events) override;

 private:
  friend class Call;
  Session() = default;
  CUresult Open();
  // What the parts beside objects_ know of an object that goes. Under the lock of objects_.
  void ForgetGone(const replay::ObjectKey& dead) CR_REQUIRES_SHARED(objects().mutex());
  // Opens the session's channel. `visible_devices`: Hello's.
  CUresult OpenChannel(const std::string& path, const std::string& visible_devices);
  // Asks which GPUs there are.
  CUresult FetchDevices();

  static std::atomic<Session*> g_session;

  Settings settings_;
  Connection connection_;
  Checkpoint checkpoint_{this};
  Gate gate_;
  std::atomic<bool> initialized_{false};
  std::vector<Device> devices_;
  int visible_devices_ = -1;  // how many the program sees by CUDA_VISIBLE_DEVICES, -1: all
  int driver_version_ = 0;

  RecordedObjects objects_{[this](const replay::ObjectKey& dead)
                               CR_REQUIRES_SHARED(objects().mutex()) { ForgetGone(dead); }};
  Memory memory_{&connection_, &requests_, &settings_, &objects_};
  Graphs graphs_{&objects_, &memory_, &requests_};
  ServerRequests requests_{&connection_, &settings_, &memory_.managed_mirror()};
  std::atomic<Waits> waits_{Waits::kNone};
  std::atomic<bool> has_streams_{false};
  EventTimes event_times_;
  Completions completions_;
  Answers answers_;
  HostFunctions host_functions_{&objects_};
  std::unique_ptr<agent::Agent> agent_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_SESSION_H_
