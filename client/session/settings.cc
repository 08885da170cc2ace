#include "client/session/settings.h"

#include <stdlib.h>
#include <string.h>

namespace cuda_remote::client {
namespace {

std::string Variable(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

// CUDA_VISIBLE_DEVICES, as far as it names the first GPUs in order. The driver's rules: the list ends at the first
// entry that is no device, so an empty value and "-1" mean none.
void ReadVisibleDevices(Settings* settings) {
  const char* const value = getenv("CUDA_VISIBLE_DEVICES");
  if (!value) return;
  int count = 0;
  for (const char* at = value; *at >= '0' && *at <= '9';) {
    char* end;
    const long ordinal = strtol(at, &end, 10);
    if (ordinal != count) {
      settings->error = std::string("CUDA_VISIBLE_DEVICES=") + value +
                        " picks GPUs out of order, which a remote session cannot do; unset it and choose the GPU with "
                        "CUDA_REMOTE_GPU or cr-run --gpu";
      return;
    }
    ++count;
    at = *end == ',' ? end + 1 : end;
  }
  if (strncmp(value, "GPU-", 4) == 0 || strncmp(value, "MIG-", 4) == 0) {
    settings->error = std::string("CUDA_VISIBLE_DEVICES=") + value +
                      " names a GPU of this machine, which is not the server's; unset it and choose the GPU with "
                      "CUDA_REMOTE_GPU or cr-run --gpu";
    return;
  }
  settings->visible_devices = count;
}

}  // namespace

Settings ReadSettings() {
  Settings settings;
  settings.server = Variable("CUDA_REMOTE_SERVER");
  const std::string gpu = Variable("CUDA_REMOTE_GPU");
  if (!gpu.empty()) settings.gpu = atoi(gpu.c_str());
  const std::string sync = Variable("CUDA_REMOTE_SYNC");
  settings.sync = !sync.empty() && sync != "0";
  settings.copy_threads = atoi(Variable("CUDA_REMOTE_COPY_THREADS").c_str());
  settings.job = Variable("CUDA_REMOTE_JOB");
  settings.job_dir = Variable("CUDA_REMOTE_JOB_DIR");
  ReadVisibleDevices(&settings);
  return settings;
}

}  // namespace cuda_remote::client
