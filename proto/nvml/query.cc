// SPDX-License-Identifier: Apache-2.0
#include "proto/nvml/query.h"

#include "proto/codec/wire.h"

namespace cuda_remote::nvml {
namespace {

constexpr Life kStill = Life::kStill;
constexpr Life kFresh = Life::kFresh;

// A parameter pack cannot be sliced by a macro; this takes what there is and fills up with zeros.
constexpr std::array<uint16_t, 4> Sizes(size_t a, size_t b = 0, size_t c = 0, size_t d = 0) {
  return {uint16_t(a), uint16_t(b), uint16_t(c), uint16_t(d)};
}

#define NVML_OUT(name, life, ...) {#name, Call::kResults, false, 0, life, Sizes(__VA_ARGS__)},
#define NVML_IN1_OUT(name, life, ...) {#name, Call::kResults, false, 1, life, Sizes(__VA_ARGS__)},
#define NVML_IN2_OUT(name, life, ...) {#name, Call::kResults, false, 2, life, Sizes(__VA_ARGS__)},
#define NVML_TEXT(name, life) {#name, Call::kText, false, 0, life, Sizes(0)},
#define NVML_IN1_TEXT(name, life) {#name, Call::kText, false, 1, life, Sizes(0)},
#define NVML_STRUCT(name, life, v1, v2, v3) {#name, Call::kStruct, false, 0, life, Sizes(v1, v2, v3)},
#define NVML_SYSTEM_OUT(name, life, bytes) {#name, Call::kResults, true, 0, life, Sizes(bytes)},
#define NVML_SYSTEM_STRUCT(name, life, v1, v2, v3) {#name, Call::kStruct, true, 0, life, Sizes(v1, v2, v3)},
#define NVML_SYSTEM_TEXT(name, life) {#name, Call::kText, true, 0, life, Sizes(0)},

constexpr Call kCalls[] = {
#include "proto/nvml/calls.inc"
    {nullptr, Call::kResults, false, 0, kStill, {}},
};

}  // namespace

size_t Call::StructBytes(uint32_t word) const {
  for (uint32_t version = 1; version <= 3; ++version) {
    const size_t size = bytes[version - 1];
    if (size != 0 && VersionWord(size, version) == word) return size;
  }
  return 0;
}

const Call* AllCalls() { return kCalls; }

const Call* FindCall(std::string_view name) {
  for (const Call* call = kCalls; call->name; ++call) {
    if (name == call->name) return call;
  }
  return nullptr;
}

void EncodeQuestion(const Question& question, std::string* out) {
  wire::PutUint(out, 1, question.wire_version);
  wire::PutUint(out, 2, question.pid);
  wire::PutInt(out, 3, question.gpu);
  wire::PutBytes(out, 4, question.call);
  wire::PutUint(out, 5, question.device);
  wire::PutUint(out, 6, question.a);
  wire::PutUint(out, 7, question.b);
  wire::PutBytes(out, 8, question.input);
}

bool DecodeQuestion(std::string_view bytes, Question* question) {
  *question = Question();
  question->wire_version = 0;
  question->gpu = 0;
  const bool read = wire::ReadMessage(bytes, [&](wire::Reader& reader) {
    switch (reader.field()) {
      case 1:
        return reader.Get(&question->wire_version);
      case 2:
        return reader.Get(&question->pid);
      case 3:
        return reader.Get(&question->gpu);
      case 4:
        return reader.Get(&question->call, kMaxNameBytes);
      case 5:
        return reader.Get(&question->device);
      case 6:
        return reader.Get(&question->a);
      case 7:
        return reader.Get(&question->b);
      case 8:
        return reader.Get(&question->input, kMaxInputBytes);
      default:
        return reader.Skip();
    }
  });
  return read && !question->call.empty();
}

void EncodeAnswer(const Answer& answer, std::string* out) {
  wire::PutInt(out, 1, answer.result);
  wire::PutBytes(out, 2, answer.output);
  wire::PutBytes(out, 3, std::string_view(answer.error).substr(0, kMaxErrorBytes));
}

bool DecodeAnswer(std::string_view bytes, Answer* answer) {
  *answer = Answer();
  answer->result = kSuccess;
  return wire::ReadMessage(bytes, [&](wire::Reader& reader) {
    switch (reader.field()) {
      case 1:
        return reader.Get(&answer->result);
      case 2:
        return reader.Get(&answer->output, kMaxOutputBytes);
      case 3:
        return reader.Get(&answer->error, kMaxErrorBytes);
      default:
        return reader.Skip();
    }
  });
}

}  // namespace cuda_remote::nvml
