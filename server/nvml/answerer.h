// SPDX-License-Identifier: Apache-2.0
// Turns a question that arrived into an answer: checks it, finds the device that it means, and asks the source.
//
// The question comes from a client and is not trusted: what is not in the tables, or has the wrong size, is refused
// here and never reaches a driver library. Single-threaded.
#ifndef CUDA_REMOTE_SERVER_NVML_ANSWERER_H_
#define CUDA_REMOTE_SERVER_NVML_ANSWERER_H_

#include <string>
#include <vector>

#include "proto/nvml/query.h"
#include "server/nvml/ask.gen.h"
#include "server/nvml/source.h"

namespace cuda_remote::server {

class Answerer {
 public:
  // `devices`: how many the source has. `only`: the one GPU that the server serves, -1: all.
  Answerer(NvmlSource* source, int devices, int only) : source_(source), devices_(devices), only_(only) {}

  nvml::Answer Answer(const Ask& ask);

 private:
  // The driver's ordinal of the GPU that the asking job calls `index`; -1: there is none.
  int Ordinal(const nvml::Question& question, uint32_t index) const;
  uint32_t Count(const nvml::Question& question) const;
  void AnswerCall(const nvml::Call& call, const nvml::Question& question, const Ask& ask, nvml::Answer* answer);
  void AnswerProcesses(const nvml::Question& question, int device, const Ask& ask, nvml::Answer* answer);
  void AnswerProcessName(const nvml::Question& question, const Ask& ask, nvml::Answer* answer);
  void AnswerFields(const nvml::Question& question, int device, nvml::Answer* answer);

  NvmlSource* const source_;
  const int devices_;
  const int only_;
  std::vector<uint64_t> visible_;  // of the question that is being answered: Ask::gpus
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_NVML_ANSWERER_H_
