// SPDX-License-Identifier: Apache-2.0
#include "server/nvml/ask.h"

#include "proto/codec/wire.h"

namespace cuda_remote::server {
namespace {

bool DecodeSession(std::string_view bytes, AskedSession* session) {
  return wire::ReadMessage(bytes, [&](wire::Reader& reader) {
    switch (reader.field()) {
      case 1:
        return reader.Get(&session->pid);
      case 2:
        return reader.Get(&session->worker_pid);
      case 3:
        return reader.Get(&session->gpu);
      case 4:
        return reader.Get(&session->program);
      case 5:
        return reader.Add(&session->device_bytes);
      case 6:
        return reader.Get(&session->hidden);
      default:
        return reader.Skip();
    }
  });
}

}  // namespace

void EncodeAsk(const Ask& ask, std::string* out) {
  wire::PutBytes(out, 1, ask.question);
  wire::PutUint(out, 2, ask.remote);
  size_t count = 0;
  for (const AskedSession& session : ask.sessions) {
    if (++count > kMaxAskedSessions) break;
    std::string one;
    wire::PutUint(&one, 1, session.pid);
    wire::PutUint(&one, 2, session.worker_pid);
    wire::PutInt(&one, 3, session.gpu);
    const std::string& program = session.program;
    wire::PutBytes(&one, 4,
                   program.size() > kMaxAskedProgram ? program.substr(program.size() - kMaxAskedProgram) : program);
    wire::PutPackedUnsigned(&one, 5, session.device_bytes);
    wire::PutUint(&one, 6, session.hidden);
    wire::PutBytesAlways(out, 3, one);
  }
  wire::PutPackedUnsigned(out, 4, ask.gpus);
}

bool DecodeAsk(std::string_view bytes, Ask* ask) {
  *ask = Ask();
  return wire::ReadMessage(bytes, [&](wire::Reader& reader) {
    std::string_view text;
    switch (reader.field()) {
      case 1:
        return reader.Get(&ask->question);
      case 2:
        return reader.Get(&ask->remote);
      case 3:
        ask->sessions.emplace_back();
        return reader.Get(&text) && DecodeSession(text, &ask->sessions.back());
      case 4:
        return reader.Add(&ask->gpus);
      default:
        return reader.Skip();
    }
  });
}

}  // namespace cuda_remote::server
