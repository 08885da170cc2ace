// cr-worker: serves one session on a GPU, then exits. Started by cr-server, which talks to it over a socket pair
// (server/worker_link/worker_link.h).

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "CLI/CLI.hpp"
#include "proto/channel/server_channel.h"
#include "server/worker/address_layout.h"
#include "server/worker/device_arena.h"
#include "server/worker/executor.h"
#include "server/worker/loaded_driver.h"
#include "server/worker/output_capture.h"
#include "server/worker/staging.h"
#include "server/worker/worker_session.h"
#include "server/worker_link/worker_link.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace cuda_remote::server {
namespace {

// How often cr-server hears about the session, and how long device output may wait for a call that brings it along.
constexpr auto kStatsPeriod = std::chrono::milliseconds(500);
// Buffers that are registered with the driver ahead of need.
constexpr size_t kPreparedBuffers = 4;

struct Options {
  int link_fd = kWorkerLinkFd;
  std::string log_level = "info";
  std::string driver;
  int gpu = -1;
  uint64_t memory_limit = 0;
};

// All that is made ready before a client comes.
struct Warm {
  LoadedDriver driver;
  std::unique_ptr<DeviceArena> arena;
  std::unique_ptr<StagingPool> staging;
  CUcontext context = nullptr;
};

// The GPU that is made ready; the only one, if the worker was given one.
constexpr int kWarmGpu = 0;

// Makes the driver, which is not loaded yet, have one GPU alone: the one that it would number so.
void ShowOneGpu(int gpu) {
  std::string value = std::to_string(gpu);
  const char* const present = getenv("CUDA_VISIBLE_DEVICES");
  if (present) {
    // The server's own choice goes first; its list is taken apart.
    std::string list = present;
    for (int i = 0; i < gpu && !list.empty(); ++i) {
      const size_t comma = list.find(',');
      list = comma == std::string::npos ? "" : list.substr(comma + 1);
    }
    value = list.substr(0, list.find(','));
  }
  setenv("CUDA_VISIBLE_DEVICES", value.c_str(), 1);
}

bool WarmUp(const Options& options, Warm* warm, std::string* error) {
  PreloadCompiler();
  if (options.gpu >= 0) ShowOneGpu(options.gpu);
  if (!ChooseDriver(options.driver, &warm->driver, error)) {
    if (options.gpu >= 0) *error = "there is no GPU " + std::to_string(options.gpu) + " (" + *error + ")";
    return false;
  }
  const DriverTable& driver = warm->driver.table;
  const int devices = int(warm->driver.devices.size());
  if (options.gpu >= 0 && devices != 1) {
    *error = "the driver does not show GPU " + std::to_string(options.gpu) + " alone";
    return false;
  }
  warm->arena = DeviceArena::Create(driver, devices, options.memory_limit, error);
  if (!warm->arena) return false;
  const CUresult result = driver.cuDevicePrimaryCtxRetain(&warm->context, kWarmGpu);
  if (result != CUDA_SUCCESS) {
    *error = "GPU " + std::to_string(std::max(options.gpu, 0)) + " gives no context (CUDA error " +
             std::to_string(int(result)) + ")";
    return false;
  }
  warm->staging = std::make_unique<StagingPool>(warm->driver.table);
  driver.cuCtxSetCurrent(warm->context);
  if (!warm->driver.software) TakeFirstVariableBlock(driver);
  warm->staging->Prepare(kPreparedBuffers);
  driver.cuCtxSetCurrent(nullptr);
  return true;
}

int Serve(const Options& options) {
  // Threads of libraries must not die of a closed socket.
  signal(SIGPIPE, SIG_IGN);
  std::string error;
  std::unique_ptr<WorkerLink> link = WorkerLink::Open(options.link_fd, &error);
  if (!link) {
    spdlog::error("{}", error);
    return 2;
  }
  OutputCapture output;
  Warm warm;
  WorkerReady ready;
  ready.gpu = kWarmGpu;
  if (!output.Install(&error) || !WarmUp(options, &warm, &error)) {
    spdlog::error("{}", error);
    ready.error = error;
    link->SendReady(ready);
    return 1;
  }
  ready.driver = warm.driver.Describe();
  ready.devices = uint32_t(warm.driver.devices.size());
  ready.software = warm.driver.software;
  WorkerAssign assign;
  if (!link->SendReady(ready) || !link->WaitAssign(&assign)) _exit(0);

  // The process's memory, threads and GPU contexts go with it: ending at once is the clean way and the fast one.
  WorkerLink* const plink = link.get();
  auto channel = ServerChannel::Create(
      assign.client_socket, WorkerLink::MakeWelcome(assign),
      [plink](const std::string& reason) {
        plink->SendEnded(reason);
        _exit(0);
      },
      &error);
  if (!channel) {
    link->SendEnded(error);
    _exit(0);
  }
  ServerChannel* const pchannel = channel.get();
  link->Watch([plink, pchannel](const std::string& reason) {
    if (!reason.empty()) {
      pchannel->End(reason);
      plink->SendEnded(reason);
    }
    _exit(0);
  });

  WorkerSession::Parts parts;
  parts.driver = &warm.driver;
  parts.arena = warm.arena.get();
  parts.channel = pchannel;
  parts.output = &output;
  parts.staging = warm.staging.get();
  parts.warm_gpu = kWarmGpu;
  parts.warm_context = warm.context;
  WorkerSession session(parts);
  Executor executor(&session, pchannel);
  std::thread([&] {
    while (true) {
      std::this_thread::sleep_for(kStatsPeriod);
      session.FlushOutput();
      WorkerStats stats;
      stats.device_bytes = warm.arena->used_bytes();
      stats.gpu_bytes = warm.arena->used_by_device();
      stats.calls = executor.calls();
      stats.bytes_in = executor.bytes_in();
      stats.bytes_out = session.payload_bytes_out();
      if (!plink->SendStats(stats)) _exit(0);
    }
  }).detach();
  const std::string reason = executor.Run();
  spdlog::info("session {} ends: {}", assign.session, reason);
  pchannel->End(reason);
  link->SendEnded(reason);
  _exit(0);
}

}  // namespace
}  // namespace cuda_remote::server

int main(int argc, char** argv) {
  using cuda_remote::server::Options;
  Options options;
  CLI::App app("cr-worker: serves one cuda-remote session. Started by cr-server, not by hand.");
  app.add_option("--link-fd", options.link_fd, "socket to cr-server");
  app.add_option("--log-level", options.log_level, "trace, debug, info, warn, error or off");
  app.add_option("--driver", options.driver, "CUDA driver library (default: the machine's own, else the software GPU)");
  app.add_option("--gpu", options.gpu, "the only GPU of the session (default: all)");
  app.add_option("--memory-limit", options.memory_limit, "most bytes of device memory for the session (default: all)");
  CLI11_PARSE(app, argc, argv);
  // Standard output belongs to the GPU's printf.
  auto logger = spdlog::stderr_logger_mt("worker");
  logger->set_pattern("cr-worker[%P] %l: %v");
  spdlog::set_default_logger(logger);
  spdlog::set_level(spdlog::level::from_str(options.log_level));
  cuda_remote::server::FixAddressLayout(argv);
  return cuda_remote::server::Serve(options);
}
