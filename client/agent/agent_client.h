// A tool's connection to the agent of a job. Blocking; not thread-safe. Errors are sentences for a person.
#ifndef CUDA_REMOTE_CLIENT_AGENT_AGENT_CLIENT_H_
#define CUDA_REMOTE_CLIENT_AGENT_AGENT_CLIENT_H_

#include <memory>
#include <string>

#include "client/agent/types.h"

namespace cuda_remote::client::agent {

struct Message;

class AgentClient {
 public:
  // Connects to the agent whose socket is in the folder `directory`. Null and *error if nobody is there.
  static std::unique_ptr<AgentClient> Connect(const std::string& directory, std::string* error);

  // Closes the connection. A job that is locked and was not released goes on then.
  ~AgentClient();
  AgentClient(const AgentClient&) = delete;
  AgentClient& operator=(const AgentClient&) = delete;

  bool GetInfo(Info* info, std::string* error);
  // Waits up to `timeout_ms` for the CUDA calls that are in progress and for the GPU.
  bool Lock(int timeout_ms, std::string* error);
  // True once the job has agreed; calls are let in right after that.
  bool Unlock(std::string* error);
  // The caller owns the descriptors in *taken.
  bool Take(Taken* taken, std::string* error);
  // On success the connection is closed, at the job's end too; connect again to give it a channel.
  bool Release(std::string* error);
  // The caller keeps the descriptors in `given`.
  bool Give(const Given& given, std::string* error);
  // Begins to record calls, at most `events` and `milliseconds`; another connection may end it.
  bool BeginTrace(uint64_t events, uint64_t milliseconds, std::string* error);
  // Ends that; the job writes the timeline and the table of calls into the descriptors, which the caller keeps.
  bool EndTrace(int timeline_fd, int table_fd, bool json, std::string* error);
  // The table of all calls so far, of a job that was started with CUDA_REMOTE_TRACE.
  bool TraceTotals(int table_fd, bool json, std::string* error);

 private:
  explicit AgentClient(int socket) : socket_(socket) {}
  bool Call(const Message& request, int timeout_ms, Message* reply, std::string* error);

  int socket_;
};

}  // namespace cuda_remote::client::agent

#endif  // CUDA_REMOTE_CLIENT_AGENT_AGENT_CLIENT_H_
