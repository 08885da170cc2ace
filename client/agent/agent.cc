// SPDX-License-Identifier: Apache-2.0
#include "client/agent/agent.h"

#include <errno.h>
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

// What a forked child closes: it has no agent, and must not keep the parent's connections open.
std::atomic<int> g_inherited[3] = {{-1}, {-1}, {-1}};

void CloseInChild() {
  for (std::atomic<int>& fd : g_inherited) {
    const int open = fd.exchange(-1);
    if (open >= 0) close(open);
  }
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
  }

  bool Open(std::string* error) {
    static const int registered = pthread_atfork(nullptr, nullptr, CloseInChild);
    (void)registered;
    wake_.Reset(eventfd(0, EFD_CLOEXEC));
    if (!wake_.ok()) {
      *error = std::string("eventfd: ") + strerror(errno);
      return false;
    }
    if (!Listen(error)) return false;
    g_inherited[0].store(wake_.get());
    // The application's signals are none of the agent's business.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int result = pthread_create(&thread_, nullptr, &Main, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (result != 0) {
      *error = std::string("cannot start the agent's thread: ") + strerror(result);
      return false;
    }
    started_ = true;
    return true;
  }

 private:
  enum class State { kRunning, kClosed, kLocked, kTaken, kReleased };

  static void* Main(void* self) {
    prctl(PR_SET_NAME, "cr-agent");
    static_cast<AgentThread*>(self)->Run();
    return nullptr;
  }

  bool Listen(std::string* error) {
    listen_.Reset(ListenUnix(path_, error));
    if (!listen_.ok()) return false;
    struct stat made;
    if (stat(path_.c_str(), &made) == 0) inode_ = made.st_ino;
    g_inherited[1].store(listen_.get());
    return true;
  }

  // After a restore, or when somebody cleaned up the folder: the path may be gone, or be another one's.
  void CheckPath() {
    struct stat now;
    if (stat(path_.c_str(), &now) == 0) {
      inode_ = now.st_ino;
      return;
    }
    // If this fails, the old socket may still be reached by whoever has it under another path.
    std::string ignored;
    UniqueFd old = std::move(listen_);
    if (!Listen(&ignored)) listen_ = std::move(old);
  }

  void Run() {
    while (true) {
      pollfd waiting[3] = {{wake_.get(), POLLIN, 0}, {listen_.get(), POLLIN, 0}, {tool_.get(), POLLIN, 0}};
      const int ready = poll(waiting, 3, kPathCheckMs);
      if (ready < 0 && errno != EINTR) return;
      if (ready == 0) CheckPath();
      if (ready <= 0) continue;
      if (waiting[0].revents) break;
      if (waiting[2].revents) ServeTool();
      if (waiting[1].revents) Accept();
    }
    DropTool();
  }

  void Accept() {
    const int socket = accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) return;
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
      case ReceiveStatus::kMalformed:
        DropTool();
        return;
      case ReceiveStatus::kOk:
        break;
    }
    std::string error;
    Message reply;
    reply.type = Type::kOk;
    const bool ok = Handle(&request, &reply, &error);
    for (int fd : request.fds) close(fd);
    if (!ok) {
      Refuse(tool_.get(), error);
      return;
    }
    const bool sent = SendMessage(tool_.get(), reply);
    for (int fd : reply.fds) close(fd);
    // After the answer: a job that goes on may end, and this thread with it, before the tool is told.
    if (request.type == Type::kUnlock) host_->Unlock();
    // Released: no connection may stay open, or the process could not be snapshotted. The tool waits for this.
    if (!sent || request.type == Type::kRelease) DropTool();
  }

  bool Handle(Message* request, Message* reply, std::string* error) {
    switch (request->type) {
      case Type::kInfo: {
        Info info = host_->GetInfo();
        info.released = state_ == State::kReleased;
        info.has_driver_settings = info.has_address_layout = true;
        EncodeInfo(info, &reply->body);
        return true;
      }
      case Type::kClose:
        if (state_ != State::kRunning && state_ != State::kLocked) return Refused("Close", error);
        if (!host_->Close(error)) return false;
        state_ = State::kClosed;
        EndAsking();
        return true;
      case Type::kLook: {
        if (state_ != State::kRunning && state_ != State::kClosed && state_ != State::kLocked) {
          return Refused("Look", error);
        }
        Activity activity;
        if (!host_->Look(&activity, error)) return false;
        EncodeActivity(activity, &reply->body);
        return true;
      }
      case Type::kAdmit: {
        if (state_ != State::kClosed) return Refused("Admit", error);
        Admission which;
        if (!DecodeAdmission(request->body, &which)) return Malformed(error);
        EncodeYes({host_->Admit(which)}, &reply->body);
        return true;
      }
      case Type::kSettle: {
        if (state_ != State::kClosed) return Refused("Settle", error);
        Timeout timeout;
        if (!DecodeTimeout(request->body, &timeout) || timeout.milliseconds > INT32_MAX) return Malformed(error);
        bool settled = false;
        if (!host_->Settle(
                int(timeout.milliseconds), [this] { return ToolIsGone(); }, &settled, error))
          return false;
        if (settled) state_ = State::kLocked;
        EncodeYes({settled}, &reply->body);
        return true;
      }
      case Type::kUnlock:
        if (!Holds()) return Refused("Unlock", error);
        state_ = State::kRunning;  // ServeTool has the rest
        return true;
      case Type::kTake: {
        if (state_ != State::kLocked) return Refused("Take", error);
        TakeRequest which;
        if (!request->body.empty() && !DecodeTakeRequest(request->body, &which)) return Malformed(error);
        Taken taken;
        if (!host_->Take(which.images, &taken, error)) return false;
        EncodeTaken(taken, reply);
        state_ = State::kTaken;
        return true;
      }
      case Type::kRelease:
        if (state_ != State::kTaken) return Refused("Release", error);
        host_->Release();
        state_ = State::kReleased;
        return true;
      case Type::kGive: {
        // In kLocked: instead of the channel that was given before.
        if (state_ != State::kTaken && state_ != State::kReleased && state_ != State::kLocked) {
          return Refused("Give", error);
        }
        Given given;
        if (!DecodeGiven(*request, &given)) return Malformed(error);
        request->fds.clear();  // the host's now
        if (!host_->Give(std::move(given), error)) return false;
        state_ = State::kLocked;
        return true;
      }
      case Type::kAbandon:
        if (state_ != State::kReleased) return Refused("Abandon", error);
        host_->Abandon();
        state_ = State::kRunning;
        return true;
      case Type::kImages: {
        if (state_ != State::kRunning) return Refused("Images", error);
        GivenImages given;
        int fd = -1;
        if (!host_->GiveImages(&given.number, &fd, error)) return false;
        EncodeGivenImages(given, &reply->body);
        reply->fds = {fd};
        return true;
      }
      case Type::kAsk:
        if (state_ != State::kRunning) return Refused("Ask", error);
        return Ask(*request, reply, error);
      case Type::kAnswer:
        if (state_ != State::kRunning) return Refused("Answer", error);
        return Answer(*request, reply, error);
      case Type::kBeginTrace: {
        if (state_ != State::kRunning) return Refused("BeginTrace", error);
        TraceLimits limits;
        if (!DecodeTraceLimits(request->body, &limits) || limits.events == 0 || limits.events > kMaxTraceEvents ||
            limits.milliseconds > INT32_MAX) {
          return Malformed(error);
        }
        return host_->BeginTrace(limits.events, double(limits.milliseconds) / 1000, error);
      }
      case Type::kEndTrace: {
        if (state_ != State::kRunning) return Refused("EndTrace", error);
        Table table;
        if (!DecodeTable(request->body, &table) || request->fds.size() != 2) return Malformed(error);
        return host_->EndTrace(request->fds[0], request->fds[1], table.json, error);
      }
      case Type::kTraceTotals: {
        Table table;
        if (!DecodeTable(request->body, &table) || request->fds.size() != 1) return Malformed(error);
        return host_->TraceTotals(request->fds[0], table.json, error);
      }
      default:
        *error = kUnknownRequest;
        return false;
    }
  }

  bool Ask(const Message& request, Message* reply, std::string* error) {
    AskRequest body;
    if (!DecodeAskRequest(request.body, &body) || body.payload_bytes > kMaxPayloadBytes ||
        request.fds.size() != (body.tag != 0)) {
      return Malformed(error);
    }
    SideRequest asked;
    asked.operation = body.operation;
    asked.tag = body.tag;
    asked.payload_bytes = size_t(body.payload_bytes);
    asked.message = std::move(body.message);
    if (asked_.size() >= kMostAsked) {
      *error = "too many requests are open";
      return false;
    }
    if (asked.tag != 0) asked.fd = request.fds[0];
    std::unique_ptr<char[]> out(new (std::nothrow) char[asked.payload_bytes]);
    uint64_t sequence = 0;
    if (!out) {
      *error = "out of memory";
      return false;
    }
    asking_ = true;
    if (!host_->Ask(asked, out.get(), &sequence, error)) return false;
    asked_[sequence] = std::move(out);
    EncodeAskReply({sequence}, &reply->body);
    return true;
  }

  bool Answer(const Message& request, Message* reply, std::string* error) {
    AnswerRequest wanted;
    if (!DecodeAnswerRequest(request.body, &wanted) || wanted.milliseconds > kMostAnswerMs) return Malformed(error);
    const auto asked = asked_.find(wanted.number);
    if (asked == asked_.end()) return Malformed(error);
    SideAnswer answer;
    size_t bytes = 0;
    AnswerReply body;
    const bool ok = host_->Answer(wanted.number, int(wanted.milliseconds), &body.answered, &answer, &bytes, error);
    if (ok && !body.answered) {
      EncodeAnswerReply(body, &reply->body);
      return true;
    }
    const std::unique_ptr<char[]> payload = std::move(asked->second);
    asked_.erase(asked);
    if (!ok) return false;
    body.has_result = true;
    body.result.result = answer.result;
    body.result.message_bytes = answer.message.size();
    body.result.payload_bytes = bytes;
    std::string all = std::move(answer.message);
    all.append(payload.get(), bytes);
    const bool fits = all.size() <= kMaxInlineAnswer;
    if (fits) body.result.both = all;
    EncodeAnswerReply(body, &reply->body);
    if (fits) return true;
    const int file = memfd_create("cuda-remote-answer", MFD_CLOEXEC);
    if (file >= 0 && pwrite(file, all.data(), all.size(), 0) == ssize_t(all.size())) {
      reply->fds = {file};
      return true;
    }
    *error = std::string("an answer cannot be written to memory: ") + strerror(errno);
    if (file >= 0) close(file);
    return false;
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
      std::string error;
      if (!host_->Answer(sequence, kMostAnswerMs, &answered, &ignored, &bytes, &error) || answered) continue;
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

  bool Malformed(std::string* error) {
    *error = "the tool's request is malformed";
    return false;
  }

  bool Refused(const char* what, std::string* error) {
    static constexpr const char* kNames[] = {"running", "closed", "locked", "taken", "released"};
    *error = std::string(what) + " is not possible while the job is " + kNames[int(state_)];
    return false;
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

std::unique_ptr<Agent> Agent::Start(const std::string& directory, AgentHost* host, std::string* error) {
  if (!CheckFolder(directory, FolderUse::kServe, error)) return nullptr;
  std::unique_ptr<AgentThread> agent(new (std::nothrow)
                                         AgentThread(directory + "/" + SocketName(uint32_t(getpid())), host));
  if (!agent) {
    *error = "out of memory";
    return nullptr;
  }
  if (!agent->Open(error)) return nullptr;
  return agent;
}

}  // namespace cuda_remote::agent
