// SPDX-License-Identifier: Apache-2.0
// cr-worker: serves one session on a GPU, then exits. Started by cr-server, which talks to it over a socket pair
// (server/worker_link/worker_link.h).

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/base/descriptor_limit.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"
#include "proto/channel/server_channel.h"
#include "proto/cli/help.h"
#include "proto/driverabi/driver_settings.h"
#include "proto/driverabi/error_names.h"
#include "proto/driverabi/visible_devices.h"
#include "proto/logging/log.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/memory/address_layout.h"
#include "server/worker/memory/device_arena.h"
#include "server/worker/memory/mapping_places.h"
#include "server/worker/memory/snapshot_memory.h"
#include "server/worker/memory/staging.h"
#include "server/worker/session/executor.h"
#include "server/worker/session/loaded_driver.h"
#include "server/worker/session/output_capture.h"
#include "server/worker/session/worker_session.h"
#include "server/worker_link/memory_budget.h"
#include "server/worker_link/worker_link.h"

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
  std::vector<int> gpus;  // empty: all
  uint64_t memory_limit = 0;
  bool secret = false;
  bool random_addresses = false;
  // A second start of this process for a session with GPUs or settings of its own (Restart).
  int assigned_fd = -1;
  int client_fd = -1;
  int budget_fd = -1;
};

// `fd`: where this process's standard error went before the driver's output was captured.
void LogTo(int fd, const std::string& level) { logging::SetUp("worker", "cr-worker[%P] %l: %v", level, fd); }

// All that is made ready before a client comes.
struct Warm {
  LoadedDriver driver;
  std::unique_ptr<DeviceArena> arena;
  std::unique_ptr<StagingPool> staging;
  CUcontext context = nullptr;
};

// The GPU that is made ready; the only one, if the worker was given one.
constexpr int kWarmGpu = 0;

// Makes the driver, which is not loaded yet, have these GPUs alone: those that it would number so.
void ShowOnly(const std::vector<int>& gpus) {
  const char* const present = getenv("CUDA_VISIBLE_DEVICES");
  std::string value;
  for (const int gpu : gpus) {
    std::string one = std::to_string(gpu);
    if (present) {
      // The server's own choice goes first; its list is taken apart.
      std::string list = present;
      for (int i = 0; i < gpu && !list.empty(); ++i) {
        const size_t comma = list.find(',');
        list = comma == std::string::npos ? "" : list.substr(comma + 1);
      }
      one = list.substr(0, list.find(','));
    }
    value += (value.empty() ? "" : ",") + one;
  }
  setenv("CUDA_VISIBLE_DEVICES", value.c_str(), 1);
}

std::string Numbers(const std::vector<int>& gpus) {
  std::string text;
  for (const int gpu : gpus) text += (text.empty() ? "" : ",") + std::to_string(gpu);
  return text;
}

// The driver reads its environment before anything else, so a process with another one is this one started again.
// `visible_devices` empty: as now. Returns only if that is impossible.
void Restart(const std::string& visible_devices, const driverabi::DriverSettings& settings,
             const std::vector<std::string>& more_arguments, int log_fd, char** argv) {
  if (!visible_devices.empty()) setenv("CUDA_VISIBLE_DEVICES", visible_devices.c_str(), 1);
  for (const auto& [name, value] : settings) setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> arguments;
  for (char** argument = argv; *argument != nullptr; ++argument) arguments.push_back(*argument);
  for (const std::string& argument : more_arguments) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  if (log_fd != 2) dup2(log_fd, 2);  // the new start captures it again
  execv("/proc/self/exe", arguments.data());
  logging::Error("cannot start again for this session: {}", strerror(errno));
}

bool KeepOpen(int fd) { return fcntl(fd, F_SETFD, 0) == 0; }

std::string NameOf(const DeviceFacts& device) {
  std::string name = UuidName(device.uuid);
  if (device.name.find(" MIG ") != std::string::npos) name.replace(0, 3, "MIG");
  return name;
}

// Which of the GPUs the session is to see, as CUDA_VISIBLE_DEVICES; empty: those that are shown now, in this order.
// Fails if it asks for one that is not there.
absl::StatusOr<std::string> WantedDevices(const Hello& hello, const driverabi::DriverSettings& settings,
                                          const std::vector<DeviceFacts>& devices) {
  std::vector<std::string> uuids, places;
  for (const DeviceFacts& device : devices) {
    uuids.push_back(device.uuid);
    places.push_back(device.pci_bus_id);
  }
  std::vector<int> wanted;
  if (driverabi::OrdersByBus(settings)) wanted = driverabi::OrderByBus(places);
  if (!hello.visible_devices.empty()) {
    wanted = driverabi::VisibleDevices(hello.visible_devices, uuids);
    const auto asked = size_t(std::count(hello.visible_devices.begin(), hello.visible_devices.end(), ',')) + 1;
    if (wanted.size() != asked) {
      return absl::NotFoundError("the session asks for GPUs that this server does not have: " + hello.visible_devices);
    }
  }
  std::string names;
  bool all_in_order = wanted.empty() || wanted.size() == devices.size();
  for (size_t i = 0; all_in_order && i < wanted.size(); ++i) all_in_order = wanted[i] == int(i);
  if (all_in_order) return names;
  for (const int index : wanted) names += (names.empty() ? "" : ",") + NameOf(devices[size_t(index)]);
  return names;
}

// Those of the program's settings that this process's driver has not started with. The devices' order is none of them:
// it is put into the list of devices, since a list of ordinals would change its meaning with it.
driverabi::DriverSettings OtherSettings(const driverabi::DriverSettings& settings) {
  driverabi::DriverSettings others;
  for (const auto& [name, value] : settings) {
    if (name != driverabi::kDeviceOrder && !driverabi::HasDriverSetting(name, value)) others.emplace_back(name, value);
  }
  return others;
}

// Tells a client that was assigned to this worker already that there will be no session.
void Refuse(const WorkerAssign& assign, WorkerLink* link, const absl::Status& why) {
  const std::string error(why.message());
  Welcome welcome = WorkerLink::MakeWelcome(assign);
  welcome.error = error;
  std::string body;
  EncodeWelcome(welcome, &body);
  SendPacket(assign.client_socket, PacketType::kWelcome, body, -1);
  link->SendEnded(error);
}

// The assignment of the process that this one was before.
bool ReadAssign(const Options& options, WorkerAssign* assign) {
  std::string body(kMaxPacketBytes, 0);
  const ssize_t bytes = pread(options.assigned_fd, &body[0], body.size(), 0);
  close(options.assigned_fd);
  if (bytes < 0 || !DecodeWorkerAssignment(std::string_view(body).substr(0, size_t(bytes)), assign)) return false;
  assign->client_socket = options.client_fd;
  assign->budget_fd = options.budget_fd;
  if (options.budget_fd >= 0) fcntl(options.budget_fd, F_SETFD, FD_CLOEXEC);
  return fcntl(options.client_fd, F_SETFD, FD_CLOEXEC) == 0;
}

// Starts again with the session's GPUs only and its settings. Returns if that is impossible.
void RestartFor(const WorkerAssign& assign, const std::string& visible_devices,
                const driverabi::DriverSettings& settings, const Options& options, int log_fd, char** argv) {
  std::string body;
  EncodeWorkerAssignment(assign, &body);
  const int fd = memfd_create("assign", 0);
  if (fd < 0 || write(fd, body.data(), body.size()) != ssize_t(body.size())) return;
  if (!KeepOpen(options.link_fd) || !KeepOpen(assign.client_socket)) return;
  if (assign.budget_fd >= 0 && !KeepOpen(assign.budget_fd)) return;
  Restart(visible_devices, settings,
          {"--assigned-fd", std::to_string(fd), "--client-fd", std::to_string(assign.client_socket), "--budget-fd",
           std::to_string(assign.budget_fd)},
          log_fd, argv);
}

absl::Status WarmUp(const Options& options, Warm* warm) {
  PreloadCompiler();
  // A second start for a session has its list already.
  const bool assigned = options.assigned_fd >= 0;
  if (!options.gpus.empty() && !assigned) ShowOnly(options.gpus);
  absl::StatusOr<LoadedDriver> chosen = ChooseDriver(options.driver);
  if (!options.gpus.empty() && absl::IsNotFound(chosen.status())) {
    // The driver counts from 0 what it shows, and was told to show these.
    logging::Debug("{}", std::string(chosen.status().message()));
    return absl::NotFoundError("there is no GPU " + Numbers(options.gpus) + " (GPUs are numbered from 0)");
  }
  CR_ASSIGN_OR_RETURN(warm->driver, std::move(chosen));
  GuardUnmapping(&warm->driver.table);
  SnapshotMemory::Get().GiveWayIn(&warm->driver.table);
  const DriverTable& driver = warm->driver.table;
  const int devices = int(warm->driver.devices.size());
  if (!options.gpus.empty() && !assigned && devices != int(options.gpus.size())) {
    return absl::FailedPreconditionError("the driver does not show GPU " + Numbers(options.gpus) + " alone");
  }
  CR_ASSIGN_OR_RETURN(warm->arena, DeviceArena::Create(driver, devices, options.memory_limit));
  const CUresult result = driver.cuDevicePrimaryCtxRetain(&warm->context, kWarmGpu);
  if (result != CUDA_SUCCESS) {
    return absl::FailedPreconditionError("GPU " + std::to_string(options.gpus.empty() ? 0 : options.gpus[0]) +
                                         " gives no context: " + driverabi::DescribeError(result));
  }
  warm->staging = std::make_unique<StagingPool>(warm->driver.table);
  driver.cuCtxSetCurrent(warm->context);
  if (!warm->driver.software) TakeFirstVariableBlock(driver);
  warm->staging->Prepare(kPreparedBuffers);
  driver.cuCtxSetCurrent(nullptr);
  return absl::OkStatus();
}

// Makes this process one that suits the session, by starting again if need be.
absl::Status Suit(const WorkerAssign& assign, const Warm& warm, const Options& options, int log_fd, char** argv) {
  driverabi::DriverSettings settings;
  if (!driverabi::ParseDriverSettings(assign.hello.driver_settings, &settings))
    return absl::InvalidArgumentError("the session's settings of the driver are malformed");
  CR_ASSIGN_OR_RETURN(const std::string names, WantedDevices(assign.hello, settings, warm.driver.devices));
  settings = OtherSettings(settings);
  if (names.empty() && settings.empty()) return absl::OkStatus();
  RestartFor(assign, names, settings, options, log_fd, argv);
  return absl::InternalError("cannot start again with the session's GPUs and settings");
}

int Serve(const Options& options, char** argv) {
  // Threads of libraries must not die of a closed socket.
  signal(SIGPIPE, SIG_IGN);
  // What the limit of file sizes does not allow fails.
  signal(SIGXFSZ, SIG_IGN);
  absl::StatusOr<std::unique_ptr<WorkerLink>> opened = WorkerLink::Open(options.link_fd);
  if (!opened.ok()) {
    logging::Error("{}", std::string(opened.status().message()));
    return 2;
  }
  const std::unique_ptr<WorkerLink> link = *std::move(opened);
  OutputCapture output;
  Warm warm;
  WorkerReady ready;
  ready.gpu = kWarmGpu;
  WorkerAssign assign;
  const bool assigned = options.assigned_fd >= 0;
  if (assigned && !ReadAssign(options, &assign)) {
    logging::Error("the session's assignment is lost");
    return 1;
  }
  KeepMappingsApart();
  absl::Status prepared = output.Install();
  if (prepared.ok()) {
    LogTo(output.log_fd(), options.log_level);
    prepared = WarmUp(options, &warm);
  }
  if (!prepared.ok()) {
    // cr-server says so in its log.
    if (assigned) {
      Refuse(assign, link.get(), prepared);
    } else {
      ready.error = std::string(prepared.message());
      link->SendReady(ready);
    }
    return 1;
  }
  ready.driver = warm.driver.Describe();
  ready.devices = uint32_t(warm.driver.devices.size());
  ready.software = warm.driver.software;
  if (!assigned) {
    if (!link->SendReady(ready) || !link->WaitAssign(&assign)) _exit(0);
    if (const absl::Status suits = Suit(assign, warm, options, output.log_fd(), argv); !suits.ok()) {
      Refuse(assign, link.get(), suits);
      _exit(0);
    }
  }

  if (assign.budget_limit != 0) {
    auto budget = MemoryBudget::Open(assign.budget_fd, assign.budget_slot, assign.budget_limit);
    if (!budget.ok()) {
      Refuse(assign, link.get(), budget.status());
      _exit(0);
    }
    warm.arena->SetBudget(*std::move(budget));
  }
  // The process's memory, threads and GPU contexts go with it: ending at once is the clean way and the fast one.
  WorkerLink* const plink = link.get();
  auto created = ServerChannel::Create(UniqueFd(assign.client_socket), WorkerLink::MakeWelcome(assign),
                                       [plink](const std::string& reason) {
                                         plink->SendEnded(reason);
                                         _exit(0);
                                       });
  if (!created.ok()) {
    link->SendEnded(created.status().message());
    _exit(0);
  }
  const std::unique_ptr<ServerChannel> channel = *std::move(created);
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
  parts.calls = CallsOf;
  parts.arena = warm.arena.get();
  parts.channel = pchannel;
  parts.output = &output;
  parts.staging = warm.staging.get();
  parts.warm_gpu = kWarmGpu;
  parts.warm_context = warm.context;
  parts.sharing.group = assign.sharing_group;
  parts.sharing.peer.session = assign.session;
  parts.sharing.peer.server = getppid();
  parts.sharing.peer.pid = assign.hello.pid;
  const std::string program = assign.hello.program.substr(assign.hello.program.rfind('/') + 1);
  program.copy(parts.sharing.peer.program.data(), parts.sharing.peer.program.size());
  WorkerSession session(parts);
  Executor executor(&session, pchannel);
  std::thread([&] {
    while (true) {
      std::this_thread::sleep_for(kStatsPeriod);
      session.answers().FlushOutput();
      WorkerStats stats;
      stats.device_bytes = warm.arena->used_bytes();
      stats.gpu_bytes = warm.arena->used_by_device();
      stats.calls = executor.calls();
      stats.bytes_in = executor.bytes_in();
      stats.bytes_out = session.answers().payload_bytes_out();
      if (!plink->SendStats(stats)) _exit(0);
    }
  }).detach();
  const std::string reason = executor.Run();
  logging::Info("session {} ends: {}", assign.session, reason);
  pchannel->End(reason);
  link->SendEnded(reason);
  _exit(0);
}

}  // namespace
}  // namespace cuda_remote::server

int main(int argc, char** argv) {
  using cuda_remote::server::Options;
  Options options;
  CLI::App app("Serves one cuda-remote session. Started by cr-server, not by hand.", "cr-worker");
  cuda_remote::SetUpProgram(&app);
  app.add_option("--link-fd", options.link_fd, "socket to cr-server");
  app.add_option("--log-level", options.log_level, "trace, debug, info, warn, error or off");
  app.add_option("--driver", options.driver, "CUDA driver library (default: the machine's own, else the software GPU)");
  app.add_option("--gpu", options.gpus, "serve these GPUs only (ordinals, with commas; default: all)")->delimiter(',');
  app.add_flag("--secret", options.secret, "other processes of the same user cannot look into this one");
  app.add_flag("--randomize-addresses", options.random_addresses,
               "keep address space randomisation; the session cannot be saved or moved");
  app.add_option("--assigned-fd", options.assigned_fd, "of cr-worker itself: the session that it was given");
  app.add_option("--client-fd", options.client_fd, "of cr-worker itself: that session's client");
  app.add_option("--budget-fd", options.budget_fd, "of cr-worker itself: the memory budget of that session's owner");
  app.add_option("--memory-limit", options.memory_limit, "most bytes of device memory for the session (default: all)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  // Standard output belongs to the GPU's printf.
  cuda_remote::server::LogTo(2, options.log_level);
  cuda_remote::server::FixAddressLayout(argv, options.random_addresses);
  // Memory that can be shared takes a descriptor for each allocation of some drivers.
  cuda_remote::RaiseDescriptorLimit();
  if (options.secret) prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
  return cuda_remote::server::Serve(options, argv);
}
