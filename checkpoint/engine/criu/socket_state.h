// SPDX-License-Identifier: Apache-2.0
// What the library in CRIU has noted of a job's sockets and terminals (socket_facts.h): looked at after a dump, and set
// again in restored processes.
//
// Not thread-safe. Needs root.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SOCKET_STATE_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SOCKET_STATE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/engine/criu/socket_facts.h"
#include "checkpoint/job/account.h"

namespace cuda_remote::checkpoint {

struct NotedFact {
  SocketFact fact;
  std::string value;
};

// The facts in a file of the library's, by inode, each socket's in their order. False if `file` is no such file. Any
// input is safe.
bool ParseSocketFacts(std::string_view file, std::map<uint64_t, std::vector<NotedFact>>* facts);

// After a dump of these processes, which still have what was saved: fails if the library has found state that is not in
// the image, and names it, and a process that has it.
absl::Status CheckLosses(const std::string& image_folder, const std::vector<int>& pids);

// Likewise: whether CRIU can restore what the image has in the queues of Unix sockets.
absl::Status CheckQueues(const std::string& image_folder, const std::vector<int>& pids);

// CRIU's words for a socket that it could not save, in the user's words, with a process of these that has it. Empty:
// `errors` names none.
std::string NameRefusal(const std::string& errors, const std::vector<int>& pids);

// Has CRIU's image of queues say which datagrams are empty.
absl::Status SettleQueues(const std::string& image_folder);

// Sets the sockets of restored processes, which do not run yet, as the image has them, with the rights of `account`
// only (none: this program's). Returns a sentence for each setting that this machine does not allow.
std::vector<std::string> RestoreSockets(const std::string& image_folder, const std::vector<int>& pids,
                                        const std::optional<Account>& account);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SOCKET_STATE_H_
