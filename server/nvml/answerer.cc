// SPDX-License-Identifier: Apache-2.0
#include "server/nvml/answerer.h"

#include <string.h>

#include <algorithm>
#include <map>

namespace cuda_remote::server {
namespace {

using nvml::Question;

nvml::Answer Refuse(int result, const std::string& why = {}) {
  nvml::Answer answer;
  answer.result = result;
  answer.error = why;
  return answer;
}

template <typename T>
void Put(nvml::Answer* answer, const T& value) {
  answer->output.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

int Answerer::Ordinal(const Question& question, uint32_t index) const {
  if (question.gpu < 0 && !visible_.empty()) {
    return index < visible_.size() && visible_[index] < uint64_t(devices_) ? int(visible_[index]) : -1;
  }
  // A job that sees one GPU only calls it 0.
  int first = 0, count = devices_;
  if (only_ >= 0) {
    first = only_;
    count = only_ < devices_ ? 1 : 0;
  }
  if (question.gpu >= 0) {
    if (question.gpu >= count) return -1;
    first += question.gpu;
    count = 1;
  }
  return index < uint32_t(count) ? first + int(index) : -1;
}

uint32_t Answerer::Count(const Question& question) const {
  uint32_t count = 0;
  while (Ordinal(question, count) >= 0) ++count;
  return count;
}

nvml::Answer Answerer::Answer(const Ask& ask) {
  Question question;
  if (!DecodeQuestion(ask.question, &question)) return Refuse(nvml::kInvalidArgument, "not a question");
  if (question.wire_version != kWireVersion) {
    return Refuse(nvml::kLibraryVersionMismatch,
                  "the client speaks wire version " + std::to_string(question.wire_version) + ", this server " +
                      std::to_string(kWireVersion) + "; install the same release of cuda-remote on both sides");
  }
  visible_ = ask.gpus;
  nvml::Answer answer;
  answer.result = nvml::kSuccess;
  const std::string& call = question.call;
  if (call == nvml::kCount) {
    Put(&answer, Count(question));
    return answer;
  }
  if (call == nvml::kProcessName) {
    AnswerProcessName(question, ask, &answer);
    return answer;
  }
  const nvml::Call* const plain = nvml::FindCall(call);
  if (plain && plain->system) {
    AnswerCall(*plain, question, ask, &answer);
    return answer;
  }
  const int device = Ordinal(question, question.device);
  // The server of before had more.
  if (device < 0) return Refuse(nvml::kGpuIsLost);
  if (plain) {
    AnswerCall(*plain, question, ask, &answer);
  } else if (call == nvml::kCommonAncestor || call == nvml::kP2PStatus || call == nvml::kOnSameBoard) {
    const int second = Ordinal(question, question.a);
    if (second < 0) return Refuse(nvml::kGpuIsLost);
    source_->AnswerPair(question, device, second, &answer);
    answer.output.resize(sizeof(uint32_t));
  } else if (call == nvml::kComputeProcesses || call == nvml::kGraphicsProcesses || call == nvml::kMpsProcesses) {
    AnswerProcesses(question, device, ask, &answer);
  } else if (call == nvml::kFieldValues) {
    AnswerFields(question, device, &answer);
  } else if (call == nvml::kCpuAffinity || call == nvml::kCpuAffinityScope || call == nvml::kMemoryAffinity) {
    if (question.b == 0 || question.b > nvml::kMaxAffinityWords) return Refuse(nvml::kInvalidArgument);
    // Processors of this host mean nothing on another one.
    if (ask.remote) return Refuse(nvml::kNotSupported);
    source_->Affinity(question, device, &answer);
  } else {
    return Refuse(nvml::kFunctionNotFound, "this server does not answer " + call);
  }
  if (answer.result != nvml::kSuccess) answer.output.clear();
  return answer;
}

void Answerer::AnswerCall(const nvml::Call& call, const Question& question, const Ask& ask, nvml::Answer* answer) {
  size_t expected = call.shape == nvml::Call::kResults ? call.output_bytes() : 0;
  if (call.shape == nvml::Call::kStruct) {
    uint32_t word = 0;
    if (question.input.size() >= sizeof(word)) memcpy(&word, question.input.data(), sizeof(word));
    expected = call.StructBytes(word);
    if (expected == 0 || question.input.size() != expected) {
      answer->result = nvml::kArgumentVersionMismatch;
      return;
    }
  }
  const int device = call.system ? 0 : Ordinal(question, question.device);
  source_->Answer(call, device, question, ask.sessions, answer);
  if (answer->result != nvml::kSuccess) {
    answer->output.clear();
  } else if (call.shape != nvml::Call::kText && answer->output.size() != expected) {
    // A source that knows a part of the results only.
    answer->result = nvml::kNotSupported;
    answer->output.clear();
  }
}

void Answerer::AnswerProcesses(const Question& question, int device, const Ask& ask, nvml::Answer* answer) {
  std::vector<nvml::ProcessInfo> on_gpu;
  std::map<uint32_t, nvml::ProcessInfo> by_pid;
  const bool told = source_->Processes(device, question.call, &on_gpu);
  for (const nvml::ProcessInfo& process : on_gpu) by_pid[process.pid] = process;
  const bool compute = question.call == nvml::kComputeProcesses;
  // In a container the kernel driver may number processes in another way than we see them: then what the workers say
  // of themselves is all that is known.
  const bool known = told && std::any_of(ask.sessions.begin(), ask.sessions.end(), [&](const AskedSession& session) {
                       return by_pid.count(session.worker_pid) != 0;
                     });
  for (const AskedSession& session : ask.sessions) {
    if (session.hidden) continue;
    if (answer->output.size() + sizeof(nvml::ProcessInfo) > nvml::kMaxOutputBytes) break;
    nvml::ProcessInfo info = {session.pid, 0, nvml::kNoInstance, nvml::kNoInstance};
    const auto found = by_pid.find(session.worker_pid);
    if (found != by_pid.end()) {
      info = found->second;
      info.pid = session.pid;
    } else if (known || !compute || session.worker_pid == 0) {
      continue;
    } else {
      const uint64_t bytes = size_t(device) < session.device_bytes.size() ? session.device_bytes[size_t(device)] : 0;
      // Its worker has a context on one GPU from the start.
      if (bytes == 0 && session.gpu != device) continue;
      info.used_bytes = bytes;
    }
    Put(answer, info);
  }
}

void Answerer::AnswerProcessName(const Question& question, const Ask& ask, nvml::Answer* answer) {
  for (const AskedSession& session : ask.sessions) {
    if (session.hidden || session.pid != question.a) continue;
    answer->output = session.program;
    return;
  }
  answer->result = nvml::kNotFound;
}

void Answerer::AnswerFields(const Question& question, int device, nvml::Answer* answer) {
  const size_t count = question.input.size() / sizeof(nvml::FieldValue);
  if (count == 0 || count > nvml::kMaxFields || question.input.size() % sizeof(nvml::FieldValue) != 0) {
    answer->result = nvml::kInvalidArgument;
    return;
  }
  std::vector<nvml::FieldValue> values(count);
  memcpy(values.data(), question.input.data(), question.input.size());
  for (nvml::FieldValue& value : values) value = nvml::FieldValue{value.field, value.scope, 0, 0, 0, 0, 0};
  answer->result = source_->Fields(device, &values);
  answer->output.assign(reinterpret_cast<const char*>(values.data()), question.input.size());
}

}  // namespace cuda_remote::server
