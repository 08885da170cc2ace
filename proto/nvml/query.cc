#include "proto/nvml/query.h"

#include "proto/codec/wire.h"

namespace cuda_remote::nvml {
namespace {

bool GetText(wire::Reader* reader, size_t most, std::string* out) {
  std::string_view value;
  if (!reader->Get(&value) || value.size() > most) return false;
  out->assign(value);
  return true;
}

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
  wire::Reader reader(bytes);
  while (reader.Next()) {
    bool ok;
    switch (reader.field()) {
      case 1:
        ok = reader.Get(&question->wire_version);
        break;
      case 2:
        ok = reader.Get(&question->pid);
        break;
      case 3:
        ok = reader.Get(&question->gpu);
        break;
      case 4:
        ok = GetText(&reader, kMaxNameBytes, &question->call);
        break;
      case 5:
        ok = reader.Get(&question->device);
        break;
      case 6:
        ok = reader.Get(&question->a);
        break;
      case 7:
        ok = reader.Get(&question->b);
        break;
      case 8:
        ok = GetText(&reader, kMaxInputBytes, &question->input);
        break;
      default:
        ok = reader.Skip();
    }
    if (!ok) return false;
  }
  return reader.ok() && !question->call.empty();
}

void EncodeAnswer(const Answer& answer, std::string* out) {
  wire::PutInt(out, 1, answer.result);
  wire::PutBytes(out, 2, answer.output);
  wire::PutBytes(out, 3, std::string_view(answer.error).substr(0, kMaxErrorBytes));
}

bool DecodeAnswer(std::string_view bytes, Answer* answer) {
  *answer = Answer();
  answer->result = kSuccess;
  wire::Reader reader(bytes);
  while (reader.Next()) {
    bool ok;
    switch (reader.field()) {
      case 1:
        ok = reader.Get(&answer->result);
        break;
      case 2:
        ok = GetText(&reader, kMaxOutputBytes, &answer->output);
        break;
      case 3:
        ok = GetText(&reader, kMaxErrorBytes, &answer->error);
        break;
      default:
        ok = reader.Skip();
    }
    if (!ok) return false;
  }
  return reader.ok();
}

}  // namespace cuda_remote::nvml
