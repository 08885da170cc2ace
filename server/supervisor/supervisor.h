// SPDX-License-Identifier: Apache-2.0
// The supervisor: listens, keeps workers warm, gives each session a worker, and cleans up after it.
//
// It never touches CUDA, and it reads nothing of a local session but its Hello: the client's socket goes to the worker.
// One thread runs the event loop (Run) and does everything that concerns processes; the gRPC services call in from
// their own threads through the functions marked so.
//
//     session:  waiting for a worker -> served -> ended      worker:  starting -> ready -> serving -> gone
//
// Each worker is a process group of its own with a link (server/worker_link). It is killed with its group when its
// session ends, when the supervisor ends (also by SIGKILL: parent-death signal and end of file on the link), or when it
// does not follow a Stop in time. A worker's crash ends its session and nothing else.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_SUPERVISOR_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_SUPERVISOR_H_

#include <sys/types.h>

#include <array>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/base/clock.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/channel_types.h"
#include "proto/control/log_limit.h"
#include "proto/nvml/query.h"
#include "proto/threads/mutex.h"
#include "server/supervisor/identity.h"
#include "server/supervisor/monitor.h"
#include "server/supervisor/options.h"
#include "server/supervisor/restrict.h"
#include "server/worker_link/memory_budget.h"
#include "server/worker_link/worker_link.h"

namespace cuda_remote::control {
class NoteSavedRequest;
}

namespace cuda_remote::server {

// A session as cr-ps shows it.
struct SessionInfo {
  uint64_t id = 0;
  Hello hello;
  std::string transport;  // "ring", "grpc"
  std::string peer;       // address of a remote client
  std::string owner;      // identity that it belongs to (identity.h)
  pid_t worker_pid = 0;   // 0: waits for a worker
  int gpu = -1;           // the one that its worker was warm on
  std::vector<int> gpus;  // those that it sees; empty: all
  std::string driver;
  double seconds = 0;
  WorkerStats stats;
  double calls_per_second = 0;
  double bytes_per_second = 0;
  uint64_t saved_unix_ms = 0;  // when the job's last image was complete; 0: none, as far as is known
  uint64_t saved_bytes = 0;
};

// What the sessions of one identity have together.
struct Usage {
  std::string identity;
  bool limited = false;  // the limits for one identity count: it is not the server's own user
  int sessions = 0;
  uint64_t device_bytes = 0;
  std::vector<int> gpus;  // in ascending order; empty: all
};

// What has happened since the server began.
struct Totals {
  // Upper bounds, in seconds, of how long sessions wait for a worker.
  static constexpr std::array<double, 8> kWaitBounds = {0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30};
  uint64_t refused = 0;         // sessions
  uint64_t failed = 0;          // sessions, by a fault that was not the client's
  uint64_t start_failures = 0;  // of workers
  uint64_t calls = 0, bytes_in = 0, bytes_out = 0;
  uint64_t checkpoints = 0, checkpoint_bytes = 0;
  uint64_t waits = 0;  // sessions that got a worker
  double wait_seconds = 0;
  std::array<uint64_t, kWaitBounds.size()> waits_below = {};  // cumulative, by bound
};

struct ServerFacts {
  std::string name;
  pid_t pid = 0;
  int warm_workers = 0;
  int sessions = 0;
  uint64_t sessions_ever = 0;
  double seconds = 0;
  std::string driver;
  bool software = false;
  std::string worker_error;  // why the last worker could not start, if so
  Policy policy;
  std::vector<Usage> usage;  // of who asks; for an operator, of all that have sessions
};

// What --metrics shows.
struct MeasuredFacts {
  ServerFacts server;
  Totals totals;
  std::vector<SessionInfo> sessions;
  int waiting = 0;  // sessions without a worker
  int gpus = 0;     // 0: not known yet
};

// Who makes a call.
struct Caller {
  std::string identity;
  bool is_operator = false;
  bool unprotected = false;  // over TCP without TLS
  std::string refusal;       // not empty: nobody; why
  // Whether it may see, end and go on with a session of this owner.
  bool MayTouch(const std::string& owner) const { return is_operator || identity == owner; }
};

// Which sessions a worker suits.
struct WorkerKind {
  std::vector<int> gpus;  // that it is given, in the machine's numbers; empty: all
  bool guest = false;     // it runs as the user of foreign sessions (--session-user)
  bool operator==(const WorkerKind& other) const { return gpus == other.gpus && guest == other.guest; }
  bool operator<(const WorkerKind& other) const { return gpus != other.gpus ? gpus < other.gpus : guest < other.guest; }
};

class Supervisor {
 public:
  explicit Supervisor(Options options);

  // Blocks the signals that the event loop reads. First thing in main: every thread, gRPC's too, must inherit it.
  static void BlockSignals();
  // Makes the folder and the sockets.
  absl::Status Start();
  // Runs until SIGTERM, SIGINT or Shutdown. SIGHUP calls `reload`, from this thread.
  void Run(const std::function<void()>& reload);

  const Options& options() const { return options_; }
  const std::string& name() const { return name_; }

  // From any thread.
  // What counts from now on.
  void SetPolicy(const Policy& policy);
  // Who is at the other end of a gRPC call. A call by somebody is reported to `proven`, one that is
  // refused to `refused` (SetProven).
  Caller CallerOf(const grpc::ServerContext& context);
  using AtAddress = std::function<void(const control::IpAddress&, uint16_t)>;
  void SetProven(AtAddress proven, AtAddress refused) {
    proven_ = std::move(proven);
    refused_ = std::move(refused);
  }
  // A client whose Hello has arrived some other way: gets a worker, which answers on `socket` (taken over).
  uint64_t SubmitClient(int socket, const Hello& hello, const std::string& transport, const std::string& peer,
                        const std::string& owner);
  // A question about the GPUs (proto/nvml) from another host; the answer comes on `socket` (taken over).
  void SubmitQuestion(int socket, const std::string& question, const Caller& caller);
  // Ends a session; false if there is none of this number, or none that the caller may touch.
  bool EndSession(uint64_t id, const std::string& reason, const Caller& caller);
  // Likewise, for reasons of the server's own.
  bool EndSessionItself(uint64_t id, const std::string& reason);
  // Notes that a session's job was saved; false as for EndSession.
  bool NoteSaved(const control::NoteSavedRequest& note, const Caller& caller);
  // Those that the caller may touch.
  std::vector<SessionInfo> Sessions(const Caller& caller);
  ServerFacts Facts(const Caller& caller);
  MeasuredFacts Measure();
  void Shutdown();

 private:
  struct Worker {
    enum State { kStarting, kReady, kServing, kEnding };
    pid_t pid = 0;
    int link = -1;
    WorkerKind kind;
    State state = kStarting;
    Moment since;
    Moment kill_at = Moment::max();
    WorkerReady ready;
    uint64_t session = 0;
    std::string budget_owner;  // not empty: it has a slot in that identity's memory budget
    uint32_t budget_slot = 0;
    std::string end_reason;
  };
  struct Budget {
    std::unique_ptr<MemoryBudget> page;
    std::set<uint32_t> slots;  // in use
  };
  struct Session {
    SessionInfo info;
    Moment started;
    Moment stats_at;
    int socket = -1;  // until a worker has it
    bool waiting = true;
    bool placed = false;  // info.gpus is what it will be
    std::string end;      // for the log: what kind of end its client's leaving is, and why; empty: the program's own
  };
  // The GPUs that a process was given last, so that its next session and its questions find the same ones.
  struct Placed {
    std::vector<int> gpus;
    Moment since;
  };
  struct NewClient {
    int socket;
    Moment since;
    uint32_t pid;
    uint32_t uid;
  };

  absl::Status MakeDirectory();
  // Whether a local user is served at all.
  bool Admits(int socket, uint32_t uid) const CR_REQUIRES(mutex_);
  Caller LocalCaller(uint32_t uid) const CR_REQUIRES(mutex_);
  bool IsLimited(const std::string& owner) const CR_REQUIRES(mutex_);
  bool EndOwn(uint64_t id, const std::string& reason, const Caller& caller) CR_REQUIRES(mutex_);
  bool NoteSavedLocked(const control::NoteSavedRequest& note, const Caller& caller) CR_REQUIRES(mutex_);
  std::vector<SessionInfo> SessionsOf(const Caller& caller) CR_REQUIRES(mutex_);
  ServerFacts FactsFor(const Caller& caller) CR_REQUIRES(mutex_);
  Usage UsageOf(const std::string& owner) const CR_REQUIRES(mutex_);
  // Event loop only.
  void AcceptClients() CR_REQUIRES(mutex_);
  void ReadHello(const NewClient& client) CR_REQUIRES(mutex_);
  // /dev/userfaultfd for a process of this machine, if it is given away; `socket` is taken over.
  void GiveFaultDevice(int socket) CR_REQUIRES(mutex_);
  // A call of the Control service (control.proto); the answer goes to `socket` (taken over).
  void AnswerControl(int socket, const std::string& call, const Caller& caller) CR_REQUIRES(mutex_);
  // Answers a question for cr-nvml; `socket` is taken over.
  void AskMonitor(int socket, const std::string& question, bool remote, const Caller& caller) CR_REQUIRES(mutex_);
  uint64_t Admit(int socket, const Hello& hello, const std::string& transport, const std::string& peer,
                 const std::string& owner) CR_REQUIRES(mutex_);
  // GPUs. The only ones that the server has, in the machine's numbers; empty: all.
  std::vector<int> ServedGpus() const CR_REQUIRES(mutex_);
  // Decides which GPUs a session sees, if that can be said already: not before a worker has counted them.
  void Place(Session* session) CR_REQUIRES(mutex_);
  // Which GPUs a session of this process would see if it asked for `wanted` (-1: any); empty: all. False: that cannot
  // be said yet.
  bool ChooseGpus(const std::string& owner, uint32_t pid, int wanted, std::vector<int>* gpus) CR_REQUIRES(mutex_);
  void ForgetPlaces() CR_REQUIRES(mutex_);
  // Sessions that wait for a worker, and whose client has left.
  void DropGoneClients() CR_REQUIRES(mutex_);
  // What the sessions of one owner may share with each other (server/worker/session/ipc.h).
  const std::string& SharingGroup(const std::string& owner) CR_REQUIRES(mutex_);
  // Gives the worker a place in its owner's memory budget, if that is limited. Fails if there is none.
  absl::Status JoinBudget(const std::string& owner, Worker* worker, WorkerAssign* assign) CR_REQUIRES(mutex_);
  void LeaveBudget(Worker* worker) CR_REQUIRES(mutex_);
  bool EndSessionLocked(uint64_t id, const std::string& reason) CR_REQUIRES(mutex_);
  void AssignWaiting() CR_REQUIRES(mutex_);
  void KeepWarm() CR_REQUIRES(mutex_);
  void StartWorker(const WorkerKind& kind) CR_REQUIRES(mutex_);
  // No worker could be started: whoever waits for it is told.
  void StartFailed(const WorkerKind& kind, const std::string& why) CR_REQUIRES(mutex_);
  // The worker that a session needs.
  WorkerKind WantedKind(const Session& session) const CR_REQUIRES(mutex_);
  // Those that are kept warm.
  std::vector<WorkerKind> WarmKinds() const CR_REQUIRES(mutex_);
  // The waiting session that such a worker would serve next; waiting_.end() if there is none.
  std::deque<uint64_t>::iterator WaitingFor(const WorkerKind& kind) CR_REQUIRES(mutex_);
  void ReadLink(Worker* worker) CR_REQUIRES(mutex_);
  void Reap() CR_REQUIRES(mutex_);
  void WorkerGone(Worker* worker, int status) CR_REQUIRES(mutex_);
  void EndOfSession(uint64_t id, const std::string& reason, bool crashed) CR_REQUIRES(mutex_);
  void Refuse(int socket, const std::string& why) CR_REQUIRES(mutex_);
  void StopWorker(Worker* worker, const std::string& reason) CR_REQUIRES(mutex_);
  void KillOverdue() CR_REQUIRES(mutex_);
  void BeginShutdown() CR_REQUIRES(mutex_);
  void Wake();

  const Options options_;
  AtAddress proven_, refused_;
  std::string name_;
  Moment started_;
  UniqueFd lock_fd_;
  UniqueFd listen_fd_;
  UniqueFd wake_fd_;
  UniqueFd signal_fd_;

  Mutex mutex_;
  Policy policy_ CR_GUARDED_BY(mutex_);
  std::list<NewClient> new_clients_ CR_GUARDED_BY(mutex_);
  size_t most_new_clients_ CR_GUARDED_BY(mutex_) = 0;
  Moment accept_again_ CR_GUARDED_BY(mutex_){};  // no descriptors until then
  control::LogLimit accept_log_ CR_GUARDED_BY(mutex_), refused_log_ CR_GUARDED_BY(mutex_),
      hello_log_ CR_GUARDED_BY(mutex_), start_log_ CR_GUARDED_BY(mutex_), stranger_log_ CR_GUARDED_BY(mutex_);
  std::map<std::string, std::string> groups_ CR_GUARDED_BY(mutex_);  // by owner
  std::map<std::string, Budget> budgets_ CR_GUARDED_BY(mutex_);      // by owner, too
  std::map<std::pair<std::string, uint32_t>, Placed> places_
      CR_GUARDED_BY(mutex_);                 // by owner and the process's number there
  int gpu_count_ CR_GUARDED_BY(mutex_) = 0;  // as a worker that has all says; 0: none has yet
  std::list<Worker> workers_ CR_GUARDED_BY(mutex_);
  Restrictions own_limits_ CR_GUARDED_BY(mutex_), guest_limits_
      CR_GUARDED_BY(mutex_);  // of workers for the server's own user, and for others
  Monitor monitor_ CR_GUARDED_BY(mutex_);
  std::map<uint64_t, Session> sessions_ CR_GUARDED_BY(mutex_);
  std::deque<uint64_t> waiting_ CR_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> posted_ CR_GUARDED_BY(mutex_);  // called with the mutex held
  uint64_t next_session_ CR_GUARDED_BY(mutex_) = 1;
  Totals totals_ CR_GUARDED_BY(mutex_);                   // but for calls and bytes of sessions that are there
  int ends_ CR_GUARDED_BY(mutex_) = 0;                    // of sessions
  Moment trim_at_ CR_GUARDED_BY(mutex_) = Moment::max();  // when memory goes back to the system
  Moment last_end_ CR_GUARDED_BY(mutex_);                 // when a session last ended
  int start_failures_ CR_GUARDED_BY(mutex_) = 0;
  Moment start_again_ CR_GUARDED_BY(mutex_);
  std::string worker_error_ CR_GUARDED_BY(mutex_);
  std::string last_start_error_ CR_GUARDED_BY(mutex_);  // logged already
  WorkerReady last_ready_ CR_GUARDED_BY(mutex_);
  bool stopping_ CR_GUARDED_BY(mutex_) = false;
  Moment stop_deadline_ CR_GUARDED_BY(mutex_);
};

// A socket path within the server's folder.
std::string SessionSocketPath(const std::string& directory);
std::string ControlSocketPath(const std::string& directory);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_SUPERVISOR_H_
