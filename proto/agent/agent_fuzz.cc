// SPDX-License-Identifier: Apache-2.0
// Fuzz target: what a tool sends to an agent, and an agent to a tool.

#include "proto/agent/agent.gen.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote::agent;  // NOLINT: a test program

namespace {

// Fields in order have one form only: what was read is written as the same bytes, but for a truth that is not 0 or 1.
template <typename T>
void Check(std::string_view bytes, void (*encode)(const T&, std::string*), bool (*decode)(std::string_view, T*)) {
  T message, same;
  if (!decode(bytes, &message)) return;
  std::string once, twice;
  encode(message, &once);
  if (once.size() != bytes.size() || !decode(once, &same)) __builtin_trap();
  encode(same, &twice);
  if (once != twice) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  Check<Info>(bytes, &EncodeInfo, &DecodeInfo);
  Check<Activity>(bytes, &EncodeActivity, &DecodeActivity);
  Check<Admission>(bytes, &EncodeAdmission, &DecodeAdmission);
  Check<Timeout>(bytes, &EncodeTimeout, &DecodeTimeout);
  Check<TakenBody>(bytes, &EncodeTakenBody, &DecodeTakenBody);
  Check<GivenBody>(bytes, &EncodeGivenBody, &DecodeGivenBody);
  Check<AskRequest>(bytes, &EncodeAskRequest, &DecodeAskRequest);
  Check<AnswerReply>(bytes, &EncodeAnswerReply, &DecodeAnswerReply);
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds(5);
  Info info;
  info.server = "unix:/run/s";
  info.job = "job";
  info.driver_settings = "A=1";
  EncodeInfo(info, &seeds[0]);
  Activity activity;
  activity.contexts = {{1, 2, true, false}, {0, 1, false, true}};
  EncodeActivity(activity, &seeds[1]);
  EncodeGivenBody({77, true, "tcp:gpu7:1", {1, 5, true, "gpu7"}}, &seeds[2]);
  EncodeAskRequest({0x10001, 3, 4096, "message"}, &seeds[3]);
  AnswerReply reply;
  reply.answered = reply.has_result = true;
  reply.result = {700, 3, 4, "message"};
  EncodeAnswerReply(reply, &seeds[4]);
  return seeds;
}
