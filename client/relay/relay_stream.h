// SPDX-License-Identifier: Apache-2.0
// A tunnel's stream as the relay sees it.
#ifndef CUDA_REMOTE_CLIENT_RELAY_RELAY_STREAM_H_
#define CUDA_REMOTE_CLIENT_RELAY_RELAY_STREAM_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/support/sync_stream.h>

#include <memory>

#include "proto/control/tunnel_end.h"
#include "proto/control/tunnel_message.h"

namespace cuda_remote::client {

// One thread reads, one at a time writes; Cancel from any. Finish: when nobody reads or writes any more, exactly once.
class RelayStream final : public control::TunnelStream {
 public:
  explicit RelayStream(grpc::Channel* channel) {
    const grpc::internal::RpcMethod method(control::kTunnelMethod, grpc::internal::RpcMethod::BIDI_STREAMING);
    stream_.reset(grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(channel, method,
                                                                                                        &context_));
  }
  bool Read(grpc::ByteBuffer* buffer) override { return stream_->Read(buffer); }
  bool Write(const grpc::ByteBuffer& buffer) override { return stream_->Write(buffer); }
  void Cancel() override { context_.TryCancel(); }
  grpc::ClientContext* context() { return &context_; }
  grpc::Status Finish() { return stream_->Finish(); }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_RELAY_RELAY_STREAM_H_
