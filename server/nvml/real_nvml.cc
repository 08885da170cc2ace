// SPDX-License-Identifier: Apache-2.0
// Answers from NVIDIA's own library.
//
// All calls are made through one function type with six integer arguments: x86-64 passes those in registers, and a
// function takes as many as it has. What a call may write is given by calls.inc, and the buffers behind it are longer.

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include <map>

#include "absl/status/status.h"
#include "proto/base/status_macros.h"
#include "proto/errors/annotate.h"
#include "server/nvml/source.h"

namespace cuda_remote::server {
namespace {

using nvml::Question;
using Function = int (*)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t);

// Beyond what a struct of a newer NVML might add.
constexpr size_t kSlack = 4096;
constexpr size_t kTextBytes = 256;
constexpr uint32_t kMaxProcesses = 1024;

// A library of ours that the machine's search path leads to answers from a server: never from here.
bool IsOurs(void* symbol) {
  Dl_info info;
  if (!dladdr(symbol, &info) || !info.dli_fname) return false;
  char resolved[PATH_MAX];
  const char* const path = realpath(info.dli_fname, resolved) ? resolved : info.dli_fname;
  return strstr(path, "cuda-remote-nvml") != nullptr;
}

uintptr_t Address(void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

class RealNvml final : public NvmlSource {
 public:
  explicit RealNvml(void* library) : library_(library) {}

  absl::Status Start(const LoadedDriver& driver) {
    const Function init = Find("nvmlInit_v2");
    if (!init) return absl::FailedPreconditionError("it does not export nvmlInit_v2");
    if (IsOurs(reinterpret_cast<void*>(init))) return absl::FailedPreconditionError("it is cuda-remote's own");
    const int result = init(0, 0, 0, 0, 0, 0);
    if (result != nvml::kSuccess)
      return absl::FailedPreconditionError("nvmlInit_v2 fails with " + std::to_string(result));
    // By address on the bus: NVML and CUDA may number the GPUs in different orders.
    for (const DeviceFacts& facts : driver.devices) {
      void* handle = nullptr;
      std::string bus = facts.pci_bus_id;
      if (Invoke("nvmlDeviceGetHandleByPciBusId_v2", Address(&bus[0]), Address(&handle)) != nvml::kSuccess) {
        return absl::NotFoundError("it does not know the GPU at " + bus);
      }
      handles_.push_back(handle);
    }
    char version[nvml::kVersionBytes] = {};
    if (Invoke("nvmlSystemGetNVMLVersion", Address(version), sizeof(version)) == nvml::kSuccess) version_ = version;
    return absl::OkStatus();
  }

  void Answer(const nvml::Call& call, int device, const Question& question, const std::vector<AskedSession>&,
              nvml::Answer* answer) override {
    uintptr_t arguments[6] = {};
    int count = 0;
    if (!call.system) arguments[count++] = Address(handles_[device]);
    if (call.inputs > 0) arguments[count++] = question.a;
    if (call.inputs > 1) arguments[count++] = question.b;
    std::vector<std::string> results;
    switch (call.shape) {
      case nvml::Call::kText: {
        results.assign(1, std::string(kTextBytes + kSlack, 0));
        arguments[count++] = Address(&results[0][0]);
        arguments[count++] = kTextBytes;
        answer->result = Invoke(call.name, arguments);
        answer->output.assign(results[0].c_str());
        break;
      }
      case nvml::Call::kStruct: {
        results.assign(1, question.input + std::string(kSlack, 0));
        arguments[count++] = Address(&results[0][0]);
        answer->result = Invoke(call.name, arguments);
        answer->output = results[0].substr(0, question.input.size());
        break;
      }
      case nvml::Call::kResults: {
        for (const uint16_t bytes : call.bytes) {
          if (bytes != 0) results.emplace_back(bytes + kSlack, char(0));
        }
        for (std::string& result : results) arguments[count++] = Address(&result[0]);
        answer->result = Invoke(call.name, arguments);
        for (size_t i = 0; i < results.size(); ++i) answer->output += results[i].substr(0, call.bytes[i]);
        break;
      }
    }
  }

  void AnswerPair(const Question& question, int first, int second, nvml::Answer* answer) override {
    uint32_t value = 0;
    const uintptr_t a = Address(handles_[first]), b = Address(handles_[second]);
    if (question.call == nvml::kP2PStatus) {
      answer->result = Invoke(nvml::kP2PStatus, a, b, question.b, Address(&value));
    } else {
      answer->result = Invoke(question.call.c_str(), a, b, Address(&value));
    }
    answer->output.assign(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  int Fields(int device, std::vector<nvml::FieldValue>* values) override {
    return Invoke(nvml::kFieldValues, Address(handles_[device]), values->size(), Address(values->data()));
  }

  void Affinity(const Question& question, int device, nvml::Answer* answer) override {
    std::vector<uint64_t> words(question.b);
    const uintptr_t handle = Address(handles_[device]), set = Address(words.data());
    answer->result = question.call == nvml::kCpuAffinity
                         ? Invoke(nvml::kCpuAffinity, handle, question.b, set)
                         : Invoke(question.call.c_str(), handle, question.b, set, question.a);
    answer->output.assign(reinterpret_cast<const char*>(words.data()), words.size() * 8);
  }

  bool Processes(int device, const std::string& call, std::vector<nvml::ProcessInfo>* processes) override {
    uint32_t count = kMaxProcesses;
    processes->assign(count, nvml::ProcessInfo());
    int result = Invoke(call.c_str(), Address(handles_[device]), Address(&count), Address(processes->data()));
    // Older drivers have the second version only.
    if (result == nvml::kFunctionNotFound) {
      const std::string older = call.substr(0, call.size() - 1) + "2";
      result = Invoke(older.c_str(), Address(handles_[device]), Address(&count), Address(processes->data()));
    }
    if (result != nvml::kSuccess || count > kMaxProcesses) count = 0;
    processes->resize(count);
    return result == nvml::kSuccess;
  }

  std::string Describe() const override { return "NVML " + version_; }

 private:
  Function Find(const char* name) {
    const auto found = functions_.find(name);
    if (found != functions_.end()) return found->second;
    return functions_[name] = reinterpret_cast<Function>(dlsym(library_, name));
  }
  int Invoke(const char* name, const uintptr_t (&a)[6]) {
    const Function function = Find(name);
    return function ? function(a[0], a[1], a[2], a[3], a[4], a[5]) : int(nvml::kFunctionNotFound);
  }
  int Invoke(const char* name, uintptr_t a, uintptr_t b, uintptr_t c = 0, uintptr_t d = 0) {
    return Invoke(name, {a, b, c, d, 0, 0});
  }

  void* const library_;  // never unloaded
  std::map<std::string, Function> functions_;
  std::vector<void*> handles_;
  std::string version_ = "of unknown version";
};

}  // namespace

absl::StatusOr<std::unique_ptr<NvmlSource>> OpenRealNvml(const LoadedDriver& driver, const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* const why = dlerror();
    return absl::FailedPreconditionError(why ? why : "unknown reason");
  }
  auto source = std::make_unique<RealNvml>(library);
  CR_RETURN_IF_ERROR(Annotate(path + " cannot be used: ", source->Start(driver)));
  return source;
}

}  // namespace cuda_remote::server
