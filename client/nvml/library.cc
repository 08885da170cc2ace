// SPDX-License-Identifier: Apache-2.0
#include "client/nvml/library.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <set>

#include "client/nvml/job_server.h"
#include "proto/base/clock.h"
#include "proto/base/environment.h"
#include "proto/threads/mutex.h"

// Only the address of one counts.
struct nvmlDevice_st {
  char unused;
};

namespace cuda_remote::client {
namespace {

// How long an answer is used again. What changes is kept just long enough that one look at a GPU, which is often
// several calls for the same thing, costs one question.
constexpr int64_t kFreshMs = 5;
constexpr int64_t kStillMs = 5000;
constexpr size_t kMaxKept = 4096;

nvmlDevice_st g_devices[nvml::kMaxGpus];
std::atomic<int> g_initialized{0};

struct Kept {
  int64_t at_ms;
  nvml::Answer answer;
};

struct State {
  // Held while a question is open, and across fork.
  Mutex mutex;
  std::map<std::string, Kept> kept CR_GUARDED_BY(mutex);
  JobServer server CR_GUARDED_BY(mutex);   // whose answers these are
  std::string relay CR_GUARDED_BY(mutex);  // of `server`
  std::set<std::string> logged CR_GUARDED_BY(mutex);
  bool log = false;
};

State& GetState() {
  // Never destroyed: exit handlers of programs ask too.
  static State* const state = [] {
    State* const made = new State;
    const char* const log = TrustedVariable("CUDA_REMOTE_NVML_LOG");
    made->log = log && *log && strcmp(log, "0") != 0;
    // A child must not find the mutex held by a thread that it does not have, nor a question half asked.
    pthread_atfork([]() CR_UNGUARDED { GetState().mutex.lock(); }, []() CR_UNGUARDED { GetState().mutex.unlock(); },
                   []() CR_UNGUARDED { GetState().mutex.unlock(); });
    return made;
  }();
  return *state;
}

// Each text once.
void LogOnceLocked(State* state, const std::string& text) CR_REQUIRES(state->mutex) {
  if (!state->log || state->logged.size() > 1000 || !state->logged.insert(text).second) return;
  const std::string line = "cuda-remote NVML: " + text + "\n";
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

int AskLocked(State* state, nvml::Question question, nvml::Life life, std::string* output) CR_REQUIRES(state->mutex) {
  JobServer server = FindJobServer();
  if (!(server == state->server)) {
    state->kept.clear();
    state->relay.clear();
    state->server = server;
  }
  question.pid = uint32_t(getpid());
  question.gpu = server.gpu;
  std::string key = question.call;
  key += '\0';
  const uint32_t words[] = {question.device, question.a, question.b};
  key.append(reinterpret_cast<const char*>(words), sizeof(words));
  key += question.input;
  const int64_t now = NowMs();
  const auto found = state->kept.find(key);
  if (found != state->kept.end()) {
    // The clock of another machine, after a restart, may be earlier.
    const int64_t age = now - found->second.at_ms;
    if (age >= 0 && age < (life == nvml::Life::kStill ? kStillMs : kFreshMs)) {
      *output = found->second.answer.output;
      return found->second.answer.result;
    }
  }
  StatusOr<nvml::Answer> answer = AskServer(server, question, &state->relay);
  if (!answer.ok()) {
    LogOnceLocked(state, question.call + ": " + answer.status().message());
    return nvml::kDriverNotLoaded;
  }
  if (!answer->error.empty()) LogOnceLocked(state, question.call + ": " + answer->error);
  if (state->kept.size() >= kMaxKept) state->kept.clear();
  *output = answer->output;
  const int result = answer->result;
  state->kept[key] = Kept{now, *std::move(answer)};
  return result;
}

// NVML tells these before nvmlInit, too.
bool WorksUninitialized(const char* name) {
  return strcmp(name, "nvmlSystemGetNVMLVersion") == 0 || strncmp(name, "nvmlSystemGetCudaDriverVersion", 30) == 0;
}

}  // namespace

int Initialize() {
  uint32_t count;
  const int result = CountGpus(&count);
  if (result == nvml::kSuccess) g_initialized.fetch_add(1);
  return result;
}

int Shutdown() {
  int count = g_initialized.load();
  do {
    if (count <= 0) return nvml::kUninitialized;
  } while (!g_initialized.compare_exchange_weak(count, count - 1));
  return nvml::kSuccess;
}

bool Initialized() { return g_initialized.load() > 0; }

int IndexOf(NvmlDevice device, uint32_t* index) {
  if (!Initialized()) return nvml::kUninitialized;
  const uintptr_t first = reinterpret_cast<uintptr_t>(g_devices), at = reinterpret_cast<uintptr_t>(device);
  if (at < first || at - first >= sizeof(g_devices)) return nvml::kInvalidArgument;
  *index = uint32_t((at - first) / sizeof(g_devices[0]));
  return nvml::kSuccess;
}

NvmlDevice HandleOf(uint32_t index) { return &g_devices[index]; }

int CountGpus(uint32_t* count) {
  nvml::Question question;
  question.call = nvml::kCount;
  std::string output;
  const int result = Ask(question, nvml::Life::kStill, &output);
  if (result != nvml::kSuccess) return result;
  if (output.size() != sizeof(*count)) return nvml::kUnknownError;
  memcpy(count, output.data(), sizeof(*count));
  if (*count > nvml::kMaxGpus) *count = nvml::kMaxGpus;
  return nvml::kSuccess;
}

int Ask(const nvml::Question& question, nvml::Life life, std::string* output) {
  try {
    State& state = GetState();
    MutexLock lock(&state.mutex);
    const int result = AskLocked(&state, question, life, output);
    // Results come with success only.
    if (result != nvml::kSuccess) output->clear();
    return result;
  } catch (...) {
    return nvml::kMemoryError;
  }
}

int PlainCall(const char* name, NvmlDevice device, uint32_t a, uint32_t b, void* const* out) {
  try {
    const nvml::Call* const call = nvml::FindCall(name);
    if (!call) return nvml::kFunctionNotFound;
    nvml::Question question;
    question.call = name;
    question.a = a;
    question.b = b;
    if (!Initialized() && !WorksUninitialized(name)) return nvml::kUninitialized;
    if (!call->system) {
      if (const int result = IndexOf(device, &question.device); result != nvml::kSuccess) return result;
    }
    size_t bytes[4] = {};
    if (call->shape == nvml::Call::kStruct) {
      if (!out[0]) return nvml::kInvalidArgument;
      uint32_t word;
      memcpy(&word, out[0], sizeof(word));
      bytes[0] = call->StructBytes(word);
      if (bytes[0] == 0) return nvml::kArgumentVersionMismatch;
      question.input.assign(static_cast<const char*>(out[0]), bytes[0]);
    } else {
      for (int i = 0; i < 4; ++i) {
        bytes[i] = call->bytes[i];
        if (bytes[i] != 0 && !out[i]) return nvml::kInvalidArgument;
      }
    }
    std::string output;
    const int result = Ask(question, call->life, &output);
    if (result != nvml::kSuccess) return result;
    if (output.size() != bytes[0] + bytes[1] + bytes[2] + bytes[3]) return nvml::kUnknownError;
    size_t at = 0;
    for (int i = 0; i < 4; ++i) {
      if (bytes[i] == 0) continue;
      memcpy(out[i], output.data() + at, bytes[i]);
      at += bytes[i];
    }
    return nvml::kSuccess;
  } catch (...) {
    return nvml::kMemoryError;
  }
}

int PutText(const std::string& value, char* text, uint32_t length) {
  if (!text) return nvml::kInvalidArgument;
  // What comes after a zero would be lost; a server's text has none.
  const size_t bytes = strlen(value.c_str());
  if (bytes + 1 > length) return nvml::kInsufficientSize;
  memcpy(text, value.c_str(), bytes + 1);
  return nvml::kSuccess;
}

int TextCall(const char* name, NvmlDevice device, uint32_t a, char* text, uint32_t length) {
  try {
    const nvml::Call* const call = nvml::FindCall(name);
    if (!call) return nvml::kFunctionNotFound;
    nvml::Question question;
    question.call = name;
    question.a = a;
    if (!Initialized() && !WorksUninitialized(name)) return nvml::kUninitialized;
    if (!call->system) {
      if (const int result = IndexOf(device, &question.device); result != nvml::kSuccess) return result;
    }
    if (!text) return nvml::kInvalidArgument;
    std::string output;
    const int result = Ask(question, call->life, &output);
    return result == nvml::kSuccess ? PutText(output, text, length) : result;
  } catch (...) {
    return nvml::kMemoryError;
  }
}

int Unsupported(const char* name) {
  if (!Initialized()) return nvml::kUninitialized;
  try {
    State& state = GetState();
    MutexLock lock(&state.mutex);
    LogOnceLocked(&state, std::string(name) + " is not supported");
  } catch (...) {
    return nvml::kMemoryError;
  }
  return nvml::kNotSupported;
}

}  // namespace cuda_remote::client
