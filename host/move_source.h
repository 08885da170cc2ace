// SPDX-License-Identifier: Apache-2.0
// The source's side of a move (move.proto): what a worker sends to another host's cr-hostd.
//
// Not thread-safe but for Cancel.
#ifndef CUDA_REMOTE_HOST_MOVE_SOURCE_H_
#define CUDA_REMOTE_HOST_MOVE_SOURCE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/file.h"
#include "host/move.grpc.pb.h"
#include "host/sent_pages.h"
#include "host/signature.pb.h"
#include "proto/control/credentials.h"

namespace cuda_remote::host {

// Where a cr-hostd listens for others if --listen does not say a port, and where it is looked for.
inline constexpr char kHostsPort[] = "7071";

// To the cr-hostd at `address` (HOST or HOST:PORT). Fails if the files for TLS are of no use. Nothing is connected yet.
absl::StatusOr<std::shared_ptr<grpc::Channel>> HostsChannel(const std::string& address, const control::TlsFiles& tls);
// The same with what control::ClientTls has made of the files, for callers with many hosts.
std::shared_ptr<grpc::Channel> HostsChannel(const std::string& address,
                                            const std::shared_ptr<grpc::ChannelCredentials>& credentials);

// Of a checkpoint over several hosts. kUnknown: the host that knows does not answer.
enum class SaveDecision { kCounts, kGivenUp, kUnknown };

// Asks how a move or a checkpoint stands, or decides the latter, until there is an answer; NONE after a minute without
// one.
SettleReply::State Settled(Hosts::Stub* stub, const std::string& id, bool decide);

// Likewise, whether the images of a checkpoint count.
SaveDecision AskDecision(const std::string& address, const std::string& id, const control::TlsFiles& tls);

class MoveSource {
 public:
  // `address`: HOST or HOST:PORT.
  static absl::StatusOr<std::unique_ptr<MoveSource>> Open(const std::string& address, const control::TlsFiles& tls);
  ~MoveSource();
  MoveSource(const MoveSource&) = delete;
  MoveSource& operator=(const MoveSource&) = delete;

  // Says what the job needs. Gives what the destination lacks of it, and what it has. If it lacks something, the move
  // ends there.
  absl::StatusOr<MoveChecked> Begin(const MoveBegin& begin);
  // Sends a signed image, but for the files and the pages of processes' memory that the image before has, too.
  absl::Status SendImage(const ckptfmt::OpenedFolder& folder);
  // Has the last one restored. Then the job is ready there, and does not run.
  absl::Status Restore(const MoveRestore& restore);

  // Lets the job go on there. kUnavailable: the destination does not answer any more, and whether the job runs there is
  // not known. Every other failure: nothing of it runs there or will run.
  absl::Status GoOn();

  // From any thread: what is going on fails, and so does all that follows. Not during GoOn.
  void Cancel() { context_.TryCancel(); }

  uint64_t sent_bytes() const { return sent_bytes_; }

 private:
  explicit MoveSource(std::string address) : address_(std::move(address)) {}
  absl::StatusOr<MoveDown> Await(MoveDown::KindCase wanted);
  absl::Status Write(const MoveUp& up);
  absl::Status SendFile(const ckptfmt::OpenedFolder& folder, const SignedFile& file, uint32_t number, SentPages* pages);
  absl::Status Explain();

  const std::string address_;
  std::string id_;
  std::unique_ptr<Hosts::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<MoveUp, MoveDown>> stream_;
  bool finished_ = false, failed_there_ = false;
  std::map<std::string, uint32_t> files_;  // of the last image: the number of the file with this hash
  uint32_t numbered_ = 0;                  // so many files have a number
  SentPages pages_;                        // of these files
  uint64_t sent_bytes_ = 0;
};

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_MOVE_SOURCE_H_
