// SPDX-License-Identifier: Apache-2.0
// Fuzz target: questions from any client, and answers from any server.

#include "proto/nvml/query.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote;  // NOLINT: a test program

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  // What is read once is within its limits, and comes back as it was.
  nvml::Question question, same_question;
  if (nvml::DecodeQuestion(bytes, &question)) {
    if (question.call.empty() || question.call.size() > nvml::kMaxNameBytes) __builtin_trap();
    if (question.input.size() > nvml::kMaxInputBytes) __builtin_trap();
    std::string again;
    nvml::EncodeQuestion(question, &again);
    if (!nvml::DecodeQuestion(again, &same_question) || same_question.input != question.input) __builtin_trap();
    if (same_question.gpu != question.gpu || same_question.b != question.b) __builtin_trap();
  }
  nvml::Answer answer, same_answer;
  if (nvml::DecodeAnswer(bytes, &answer)) {
    if (answer.output.size() > nvml::kMaxOutputBytes || answer.error.size() > nvml::kMaxErrorBytes) __builtin_trap();
    std::string again;
    nvml::EncodeAnswer(answer, &again);
    if (!nvml::DecodeAnswer(again, &same_answer) || same_answer.result != answer.result) __builtin_trap();
  }
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds(2);
  nvml::Question question;
  question.pid = 1234;
  question.call = nvml::kFieldValues;
  question.device = 1;
  question.input = std::string(64, '\x02');
  nvml::EncodeQuestion(question, &seeds[0]);
  nvml::Answer answer;
  answer.output = std::string(16, '\x01');
  answer.error = "why";
  nvml::EncodeAnswer(answer, &seeds[1]);
  return seeds;
}
