// SPDX-License-Identifier: Apache-2.0
// Where the answers come from: NVIDIA's NVML, or what the driver API says where there is none.
//
// Devices are the driver's ordinals (the order in which CUDA has them). Single-threaded.
#ifndef CUDA_REMOTE_SERVER_NVML_SOURCE_H_
#define CUDA_REMOTE_SERVER_NVML_SOURCE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/nvml/query.h"
#include "server/nvml/ask.gen.h"
#include "server/worker/session/loaded_driver.h"

namespace cuda_remote::server {

class NvmlSource {
 public:
  virtual ~NvmlSource() = default;

  // Answers a call of calls.inc. `device` exists; `question.input` has the size that the call wants.
  virtual void Answer(const nvml::Call& call, int device, const nvml::Question& question,
                      const std::vector<AskedSession>& sessions, nvml::Answer* answer) = 0;
  // Relation of two devices: kCommonAncestor, kP2PStatus or kOnSameBoard.
  virtual void AnswerPair(const nvml::Question& question, int first, int second, nvml::Answer* answer) = 0;
  // `values` are FieldValue with field and scope set; each gets its result.
  virtual int Fields(int device, std::vector<nvml::FieldValue>* values) = 0;
  // CPU or memory affinity: `question.b` words.
  virtual void Affinity(const nvml::Question& question, int device, nvml::Answer* answer) = 0;
  // Processes that use the device, as the kernel driver numbers them. False if that cannot be told.
  virtual bool Processes(int device, const std::string& call, std::vector<nvml::ProcessInfo>* processes) = 0;
  // For a log line.
  virtual std::string Describe() const = 0;
};

// The machine's own NVML; fails where there is none that fits `driver`.
absl::StatusOr<std::unique_ptr<NvmlSource>> OpenRealNvml(const LoadedDriver& driver, const std::string& library);

// What the driver API says.
std::unique_ptr<NvmlSource> MakeDriverFacts(const LoadedDriver& driver);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_NVML_SOURCE_H_
