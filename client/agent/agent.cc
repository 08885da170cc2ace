// SPDX-License-Identifier: Apache-2.0
#include "client/agent/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "proto/agent/message.h"
#include "proto/base/standard_descriptors.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"
#include "proto/folder/private_folder.h"
#include "proto/frame/frame.h"

namespace cuda_remote::agent {
namespace {

// How often the socket's path is looked at.
constexpr int kPathCheckMs = 5000;
// Longest wait for the answer to a tool's request: a tool that goes is noticed after it.
constexpr int kMostAnswerMs = 20;

// How long the thread leaves connections alone that it cannot accept.
constexpr int kAcceptPauseMs = 200;

// Descriptors that are put aside (KeepSpares): usually, and after the channel was released. How many of them are for a
// request, with the connection's.
constexpr int kSpares = 8, kSparesReleased = 3, kSparesOfRequest = 4;

// What a forked child closes: it has no agent, and must not keep the parent's connections open.
std::atomic<int> g_inherited[3] = {{-1}, {-1}, {-1}};
std::atomic<int> g_spares[kSpares] = {{-1}, {-1}, {-1}, {-1}, {-1}, {-1}, {-1}, {-1}};

void CloseInChild() {
  const auto leave = [](std::atomic<int>* fd) {
    const int open = fd->exchange(-1);
    if (open >= 0) close(open);
  };
  for (std::atomic<int>& fd : g_inherited) leave(&fd);
  for (std::atomic<int>& fd : g_spares) leave(&fd);
}

class AgentThread final : public Agent {
 public:
  AgentThread(std::string path, AgentHost* host) : path_(std::move(path)), host_(host) {}

  ~AgentThread() override {
    if (started_) {
      const uint64_t one = 1;
      while (write(wake_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
      }
      pthread_join(thread_, nullptr);
      unlink(path_.c_str());
    }
    for (std::atomic<int>& fd : g_inherited) fd.store(-1);
    for (std::atomic<int>& fd : g_spares) fd.store(-1);
  }

  Status Open() {
    static const int registered = pthread_atfork(nullptr, nullptr, CloseInChild);
    (void)registered;
    const StandardDescriptorsTaken taken;
    wake_.Reset(eventfd(0, EFD_CLOEXEC));
    if (!wake_.ok()) return ErrnoError("eventfd");
    CR_RETURN_IF_ERROR(Listen());
    g_inherited[0].store(wake_.get());
    KeepSpares();
    // The application's signals are none of the agent's business.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int result = pthread_create(&thread_, nullptr, &Main, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (result != 0) return Error(std::string("cannot start the agent's thread: ") + strerror(result));
    started_ = true;
    return OkStatus();
  }

 private:
  enum class State { kRunning, kClosed, kLocked, kTaken, kReleased };

  static void* Main(void* self) {
    prctl(PR_SET_NAME, "cr-agent");
    static_cast<AgentThread*>(self)->Run();
    return nullptr;
  }

  Status Listen() {
    CR_ASSIGN_OR_RETURN(UniqueFd socket, ListenUnix(path_));
    struct stat made;
    if (stat(path_.c_str(), &made) == 0) inode_ = made.st_ino;
    g_inherited[1].store(socket.get());
    listen_ = std::move(socket);
    return OkStatus();
  }

  // After a restore, or when somebody cleaned up the folder: the path may be gone, or be another one's.
  void CheckPath() {
    struct stat now;
    if (stat(path_.c_str(), &now) == 0) {
      inode_ = now.st_ino;
      return;
    }
    // If this fails, the old socket may still be reached by whoever has it under another path.
    (void)Listen();
  }

  void Run() {
    while (true) {
      const bool accepts = !accept_later_;
      pollfd waiting[3] = {
          {wake_.get(), POLLIN, 0}, {accepts ? listen_.get() : -1, POLLIN, 0}, {tool_.get(), POLLIN, 0}};
      const int ready = poll(waiting, 3, accepts ? kPathCheckMs : kAcceptPauseMs);
      accept_later_ = false;
      if (ready < 0 && errno != EINTR) return;
      if (ready == 0 && accepts) CheckPath();
      if (ready <= 0) continue;
      if (waiting[0].revents) break;
      if (waiting[2].revents) ServeTool();
      if (waiting[1].revents) Accept();
    }
    DropTool();
  }

  // For a program that has come to the limit of its descriptors, or gets there while it is saved. One is for a tool's
  // connection, three are for what a request makes (the log and the channel's). After the channel was released, two are
  // for the next one, and CRIU has the others for the code that it runs in the process.
  void KeepSpares() {
    const int wanted = state_ == State::kReleased ? kSparesReleased : kSpares;
    for (int i = 0; i < kSpares; ++i) {
      if (i < wanted && !spares_[i].ok()) spares_[i].Reset(fcntl(wake_.get(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
      if (i >= wanted) spares_[i].Close();
      g_spares[i].store(spares_[i].get());
    }
  }

  // Lets go of the first ones.
  void UseSpares(int count) {
    for (int i = 0; i < count; ++i) {
      g_spares[i].store(-1);
      spares_[i].Close();
    }
  }

  void Accept() {
    int socket = BesideStandard(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (socket < 0 && errno == EMFILE) {
      UseSpares(1);
      socket = BesideStandard(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    }
    if (socket < 0) {
      // The connection stays where it is; to look again at once would only take the processor.
      accept_later_ = errno != EINTR && errno != ECONNABORTED;
      return;
    }
    Greet(socket);
    KeepSpares();
  }

  void Greet(int socket) {
    uint32_t user = 0, pid = 0;
    if (!PeerUser(socket, &user, &pid) || (user != geteuid() && user != 0)) {
      close(socket);
      return;
    }
    // The tool that came first may be about to leave: its end must be seen before the next one is refused.
    if (tool_.ok()) {
      pollfd first{tool_.get(), POLLIN, 0};
      if (poll(&first, 1, 0) > 0) ServeTool();
    }
    if (tool_.ok()) {
      Refuse(socket, "another tool is working on this job; try again when it is done");
      close(socket);
      return;
    }
    tool_.Reset(socket);
    g_inherited[2].store(socket);
  }

  // One message of the connected tool, or its end.
  void ServeTool() {
    UseSpares(kSparesOfRequest);
    ServeRequest();
    KeepSpares();
  }

  void ServeRequest() {
    Message request;
    switch (ReceiveMessage(tool_.get(), 0, &request)) {
      case ReceiveStatus::kTimeout:
        return;
      case ReceiveStatus::kClosed:
        DropTool();
        return;
      case ReceiveStatus::kOtherVersion:
        Refuse(tool_.get(), "the job's client library is of another version than this tool");
        DropTool();
        return;
      case ReceiveStatus::kNoDescriptors:
        Refuse(tool_.get(), "the process has no descriptor left (ulimit -n)");
        return;
      case ReceiveStatus::kMalformed:
        DropTool();
        return;
      case ReceiveStatus::kOk:
        break;
    }
    Message reply;
    reply.type = Type::kOk;
    const Status handled = Handle(&request, &reply);
    for (int fd : request.fds) close(fd);
    if (!handled.ok()) {
      Refuse(tool_.get(), handled.message());
      return;
    }
    const bool sent = SendMessage(tool_.get(), reply);
    for (int fd : reply.fds) close(fd);
    // After the answer: a job that goes on may end, and this thread with it, before the tool is told.
    if (request.type == Type::kUnlock) host_->Unlock();
    // Released: no connection may stay open, or the process could not be snapshotted. The tool waits for this.
    if (!sent || request.type == Type::kRelease) DropTool();
  }

  Status Handle(Message* request, Message* reply) {
    switch (request->type) {
      case Type::kInfo: {
        Info info = host_->GetInfo();
        info.released = state_ == State::kReleased;
        EncodeInfo(info, &reply->body);
        return OkStatus();
      }
      case Type::kClose:
        if (state_ != State::kRunning && state_ != State::kLocked) return Refused("Close");
        CR_RETURN_IF_ERROR(host_->Close());
        state_ = State::kClosed;
        EndAsking();
        return OkStatus();
      case Type::kLook: {
        if (state_ != State::kRunning && state_ != State::kClosed && state_ != State::kLocked) return Refused("Look");
        CR_ASSIGN_OR_RETURN(const Activity activity, host_->Look());
        EncodeActivity(activity, &reply->body);
        return OkStatus();
      }
      case Type::kAdmit: {
        if (state_ != State::kClosed) return Refused("Admit");
        Admission which;
        if (!DecodeAdmission(request->body, &which)) return Malformed();
        EncodeYes({host_->Admit(which)}, &reply->body);
        return OkStatus();
      }
      case Type::kSettle: {
        if (state_ != State::kClosed) return Refused("Settle");
        Timeout timeout;
        if (!DecodeTimeout(request->body, &timeout) || timeout.milliseconds > INT32_MAX) return Malformed();
        CR_ASSIGN_OR_RETURN(const bool settled,
                            host_->Settle(int(timeout.milliseconds), [this] { return ToolIsGone(); }));
        if (settled) state_ = State::kLocked;
        EncodeYes({settled}, &reply->body);
        return OkStatus();
      }
      case Type::kUnlock:
        if (!Holds()) return Refused("Unlock");
        state_ = State::kRunning;  // ServeTool has the rest
        return OkStatus();
      case Type::kTake: {
        if (state_ != State::kLocked) return Refused("Take");
        TakeRequest which;
        if (!DecodeTakeRequest(request->body, &which)) return Malformed();
        CR_ASSIGN_OR_RETURN(const Taken taken, host_->Take(which.images));
        EncodeTaken(taken, reply);
        state_ = State::kTaken;
        return OkStatus();
      }
      case Type::kRelease:
        if (state_ != State::kTaken) return Refused("Release");
        host_->Release();
        state_ = State::kReleased;
        return OkStatus();
      case Type::kGive: {
        // In kLocked: instead of the channel that was given before.
        if (state_ != State::kTaken && state_ != State::kReleased && state_ != State::kLocked) return Refused("Give");
        Given given;
        if (!DecodeGiven(*request, &given)) return Malformed();
        request->fds.clear();  // the host's now
        CR_RETURN_IF_ERROR(host_->Give(std::move(given)));
        state_ = State::kLocked;
        return OkStatus();
      }
      case Type::kAbandon:
        if (state_ != State::kReleased) return Refused("Abandon");
        host_->Abandon();
        state_ = State::kRunning;
        return OkStatus();
      case Type::kImages: {
        if (state_ != State::kRunning) return Refused("Images");
        GivenImages given;
        CR_ASSIGN_OR_RETURN(UniqueFd images, host_->GiveImages(&given.number));
        EncodeGivenImages(given, &reply->body);
        reply->fds = {images.Release()};
        return OkStatus();
      }
      case Type::kAsk:
        if (state_ != State::kRunning) return Refused("Ask");
        return Ask(*request, reply);
      case Type::kAnswer:
        if (state_ != State::kRunning) return Refused("Answer");
        return Answer(*request, reply);
      case Type::kBeginTrace: {
        if (state_ != State::kRunning) return Refused("BeginTrace");
        TraceLimits limits;
        if (!DecodeTraceLimits(request->body, &limits) || limits.events == 0 || limits.events > kMaxTraceEvents ||
            limits.milliseconds > INT32_MAX) {
          return Malformed();
        }
        return host_->BeginTrace(limits.events, double(limits.milliseconds) / 1000);
      }
      case Type::kEndTrace: {
        if (state_ != State::kRunning) return Refused("EndTrace");
        Table table;
        if (!DecodeTable(request->body, &table) || request->fds.size() != 2) return Malformed();
        return host_->EndTrace(request->fds[0], request->fds[1], table.json);
      }
      case Type::kTraceTotals: {
        Table table;
        if (!DecodeTable(request->body, &table) || request->fds.size() != 1) return Malformed();
        return host_->TraceTotals(request->fds[0], table.json);
      }
      default:
        return Error("the job's client library does not know this request");
    }
  }

  Status Ask(const Message& request, Message* reply) {
    AskRequest body;
    if (!DecodeAskRequest(request.body, &body) || body.payload_bytes > kMaxPayloadBytes ||
        request.fds.size() != (body.tag != 0)) {
      return Malformed();
    }
    SideRequest asked;
    asked.operation = body.operation;
    asked.tag = body.tag;
    asked.payload_bytes = size_t(body.payload_bytes);
    asked.message = std::move(body.message);
    if (asked_.size() >= kMostAsked) return Error("too many requests are open");
    if (asked.tag != 0) asked.fd = request.fds[0];
    std::unique_ptr<char[]> out(new (std::nothrow) char[asked.payload_bytes]);
    if (!out) return Error("out of memory");
    asking_ = true;
    CR_ASSIGN_OR_RETURN(const uint64_t sequence, host_->Ask(asked, out.get()));
    asked_[sequence] = std::move(out);
    EncodeAskReply({sequence}, &reply->body);
    return OkStatus();
  }

  Status Answer(const Message& request, Message* reply) {
    AnswerRequest wanted;
    if (!DecodeAnswerRequest(request.body, &wanted) || wanted.milliseconds > kMostAnswerMs) return Malformed();
    const auto asked = asked_.find(wanted.number);
    if (asked == asked_.end()) return Malformed();
    SideAnswer answer;
    size_t bytes = 0;
    AnswerReply body;
    const Status status = host_->Answer(wanted.number, int(wanted.milliseconds), &body.answered, &answer, &bytes);
    if (status.ok() && !body.answered) {
      EncodeAnswerReply(body, &reply->body);
      return OkStatus();
    }
    const std::unique_ptr<char[]> payload = std::move(asked->second);
    asked_.erase(asked);
    CR_RETURN_IF_ERROR(status);
    body.has_result = true;
    body.result.result = answer.result;
    body.result.message_bytes = answer.message.size();
    body.result.payload_bytes = bytes;
    std::string all = std::move(answer.message);
    all.append(payload.get(), bytes);
    const bool fits = all.size() <= kMaxInlineAnswer;
    if (fits) body.result.both = all;
    EncodeAnswerReply(body, &reply->body);
    if (fits) return OkStatus();
    UniqueFd file(memfd_create("cuda-remote-answer", MFD_CLOEXEC));
    if (!file.ok() || pwrite(file.get(), all.data(), all.size(), 0) != ssize_t(all.size())) {
      return ErrnoError("an answer cannot be written to memory");
    }
    reply->fds = {file.Release()};
    return OkStatus();
  }

  // The tool has gone, or goes on with other things.
  void EndAsking() {
    if (!asking_) return;
    asking_ = false;
    std::vector<uint64_t> open;
    for (auto& [sequence, out] : asked_) {
      bool answered = false;
      SideAnswer ignored;
      size_t bytes = 0;
      if (!host_->Answer(sequence, kMostAnswerMs, &answered, &ignored, &bytes).ok() || answered) continue;
      open.push_back(sequence);
      late_.push_back(std::move(out));
    }
    asked_.clear();
    host_->EndAsking(open);
  }

  // The tool holds the process up, which goes on with the channel that it has when the tool goes.
  bool Holds() const { return state_ == State::kClosed || state_ == State::kLocked || state_ == State::kTaken; }

  // While a request is being served: nothing more can come from a tool that waits for the answer, but its end.
  bool ToolIsGone() const {
    pollfd waiting[2] = {{wake_.get(), POLLIN, 0}, {tool_.get(), POLLIN, 0}};
    return poll(waiting, 2, 0) > 0;
  }

  static Status Malformed() { return Error("the tool's request is malformed"); }

  Status Refused(const char* what) const {
    static constexpr const char* kNames[] = {"running", "closed", "locked", "taken", "released"};
    return Error(std::string(what) + " is not possible while the job is " + kNames[int(state_)]);
  }

  void Refuse(int socket, const std::string& why) {
    Message reply;
    reply.type = Type::kError;
    reply.body = why.substr(0, kMaxMessageBytes);
    SendMessage(socket, reply);
  }

  void DropTool() {
    EndAsking();
    if (Holds()) {
      host_->SettleMove();
      host_->Unlock();
      state_ = State::kRunning;
    }
    if (!tool_.ok()) return;
    g_inherited[2].store(-1);
    tool_.Close();
  }

  const std::string path_;
  AgentHost* const host_;
  pthread_t thread_{};
  bool started_ = false;
  UniqueFd wake_;
  // The thread's own.
  UniqueFd listen_;
  UniqueFd spares_[kSpares];
  bool accept_later_ = false;
  ino_t inode_ = 0;
  UniqueFd tool_;
  State state_ = State::kRunning;
  // A tool's requests beside the job's calls: since when EndAsking is needed, where the answers' payloads go, and those
  // of requests that were given up, which somebody may still write to.
  bool asking_ = false;
  std::map<uint64_t, std::unique_ptr<char[]>> asked_;
  std::vector<std::unique_ptr<char[]>> late_;
};

}  // namespace

StatusOr<std::unique_ptr<Agent>> Agent::Start(const std::string& directory, AgentHost* host) {
  CR_RETURN_IF_ERROR(CheckFolder(directory, FolderUse::kServe));
  const std::string path = directory + "/" + SocketName(uint32_t(getpid()));
  std::unique_ptr<AgentThread> agent(new (std::nothrow) AgentThread(path, host));
  if (!agent) return Error("out of memory");
  CR_RETURN_IF_ERROR(agent->Open());
  return std::unique_ptr<Agent>(std::move(agent));
}

}  // namespace cuda_remote::agent
