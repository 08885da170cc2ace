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

#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "proto/channel/channel_types.h"
#include "server/supervisor/monitor.h"
#include "server/supervisor/options.h"
#include "server/worker_link/worker_link.h"

namespace cuda_remote::server {

using Clock = std::chrono::steady_clock;

// A session as cr-ps shows it.
struct SessionInfo {
  uint64_t id = 0;
  Hello hello;
  std::string transport;  // "ring", "grpc"
  std::string peer;       // address of a remote client
  pid_t worker_pid = 0;   // 0: waits for a worker
  int gpu = -1;
  std::string driver;
  double seconds = 0;
  WorkerStats stats;
  double calls_per_second = 0;
  double bytes_per_second = 0;
  uint64_t saved_unix_ms = 0;  // when the job's last image was complete; 0: none, as far as is known
  uint64_t saved_bytes = 0;
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
};

class Supervisor {
 public:
  explicit Supervisor(Options options);
  ~Supervisor();

  // Blocks the signals that the event loop reads. First thing in main: every thread, gRPC's too, must inherit it.
  static void BlockSignals();
  // Makes the folder and the sockets. False and one sentence in *error on failure.
  bool Start(std::string* error);
  // Runs until SIGTERM, SIGINT, SIGHUP or Shutdown.
  void Run();

  const Options& options() const { return options_; }
  const std::string& name() const { return name_; }

  // From any thread.
  // A client whose Hello has arrived some other way: gets a worker, which answers on `socket` (taken over).
  uint64_t SubmitClient(int socket, const Hello& hello, const std::string& transport, const std::string& peer);
  // A question about the GPUs (proto/nvml) from another host; the answer comes on `socket` (taken over).
  void SubmitQuestion(int socket, const std::string& question);
  // Ends a session; false if there is none of this number.
  bool EndSession(uint64_t id, const std::string& reason);
  std::vector<SessionInfo> Sessions();
  ServerFacts Facts();
  void Shutdown();

 private:
  struct Worker {
    enum State { kStarting, kReady, kServing, kEnding };
    pid_t pid = 0;
    int link = -1;
    int only = -1;  // the one GPU that it was given, -1: all
    State state = kStarting;
    Clock::time_point since;
    Clock::time_point kill_at = Clock::time_point::max();
    WorkerReady ready;
    uint64_t session = 0;
    std::string end_reason;
  };
  struct Session {
    SessionInfo info;
    Clock::time_point started;
    Clock::time_point stats_at;
    int first_gpu = 0;  // the worker's GPU 0, in the machine's numbers
    int socket = -1;    // until a worker has it
    bool waiting = true;
  };
  struct NewClient {
    int socket;
    Clock::time_point since;
    uint32_t pid;
  };

  bool MakeDirectory(std::string* error);
  // Event loop only; all with mutex_ held.
  void AcceptClients();
  void ReadHello(const NewClient& client);
  // A question that is for the supervisor itself. False: it is cr-nvml's.
  bool AnswerItself(int socket, const std::string& question);
  void AskMonitor(int socket, const std::string& question, bool remote);
  uint64_t Admit(int socket, const Hello& hello, const std::string& transport, const std::string& peer);
  void AssignWaiting();
  void KeepWarm();
  void StartWorker(int only);
  // Which one GPU a session sees, -1: all; in the machine's numbers.
  int WantedGpu(const Hello& hello) const;
  // The waiting session that such a worker would serve next; waiting_.end() if there is none.
  std::deque<uint64_t>::iterator WaitingFor(int only);
  void ReadLink(Worker* worker);
  void Reap();
  void WorkerGone(Worker* worker, int status);
  void EndOfSession(uint64_t id, const std::string& reason, bool crashed);
  void Refuse(int socket, const std::string& why);
  void StopWorker(Worker* worker, const std::string& reason);
  void KillOverdue();
  void BeginShutdown();
  void Wake();

  const Options options_;
  std::string name_;
  Clock::time_point started_;
  int lock_fd_ = -1;
  int listen_fd_ = -1;
  int wake_fd_ = -1;
  int signal_fd_ = -1;

  std::mutex mutex_;
  std::list<NewClient> new_clients_;
  std::list<Worker> workers_;
  Monitor monitor_;
  std::map<uint64_t, Session> sessions_;
  std::deque<uint64_t> waiting_;
  std::vector<std::function<void()>> posted_;
  uint64_t next_session_ = 1;
  int start_failures_ = 0;
  Clock::time_point start_again_;
  std::string worker_error_;
  WorkerReady last_ready_;
  bool stopping_ = false;
  Clock::time_point stop_deadline_;
};

// A socket path within the server's folder.
std::string SessionSocketPath(const std::string& directory);
std::string ControlSocketPath(const std::string& directory);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_SUPERVISOR_H_
