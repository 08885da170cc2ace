#include "server/nvml/ask.h"

#include "proto/codec/wire.h"

namespace cuda_remote::server {
namespace {

bool DecodeSession(std::string_view bytes, AskedSession* session) {
  wire::Reader reader(bytes);
  while (reader.Next()) {
    bool ok;
    std::string_view text;
    switch (reader.field()) {
      case 1:
        ok = reader.Get(&session->pid);
        break;
      case 2:
        ok = reader.Get(&session->worker_pid);
        break;
      case 3:
        ok = reader.Get(&session->gpu);
        break;
      case 4:
        ok = reader.Get(&text);
        session->program.assign(text);
        break;
      case 5:
        ok = reader.Add(&session->device_bytes);
        break;
      default:
        ok = reader.Skip();
    }
    if (!ok) return false;
  }
  return reader.ok();
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
    wire::PutBytesAlways(out, 3, one);
  }
}

bool DecodeAsk(std::string_view bytes, Ask* ask) {
  *ask = Ask();
  wire::Reader reader(bytes);
  while (reader.Next()) {
    bool ok;
    std::string_view text;
    switch (reader.field()) {
      case 1:
        ok = reader.Get(&text);
        ask->question.assign(text);
        break;
      case 2:
        ok = reader.Get(&ask->remote);
        break;
      case 3:
        ask->sessions.emplace_back();
        ok = reader.Get(&text) && DecodeSession(text, &ask->sessions.back());
        break;
      default:
        ok = reader.Skip();
    }
    if (!ok) return false;
  }
  return reader.ok();
}

}  // namespace cuda_remote::server
