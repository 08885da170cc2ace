// SPDX-License-Identifier: Apache-2.0
// cr-nvml: answers NVML's questions about a cr-server's GPUs. Started by cr-server when the first question comes,
// because cr-server itself loads no driver library; ends with it. Packets: server/nvml/ask.proto.

#include <fcntl.h>
#include <signal.h>

#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "proto/base/short_waits.h"
#include "proto/channel/handshake.h"
#include "proto/cli/help.h"
#include "proto/logging/log.h"
#include "server/nvml/answerer.h"
#include "server/nvml/ask.gen.h"
#include "server/nvml/source.h"
#include "server/worker/session/loaded_driver.h"
#include "server/worker_link/worker_link.h"

namespace cuda_remote::server {
namespace {

struct Options {
  int link_fd = kWorkerLinkFd;
  std::string log_level = "info";
  std::string driver;
  std::string nvml = "libnvidia-ml.so.1";
  int gpu = -1;
};

// NVML where there is one that can be used.
std::unique_ptr<NvmlSource> BestSource(const LoadedDriver& driver, const std::string& nvml) {
  if (driver.software) return MakeDriverFacts(driver);
  absl::StatusOr<std::unique_ptr<NvmlSource>> real = OpenRealNvml(driver, nvml);
  if (real.ok()) return *std::move(real);
  logging::Warn("no NVML ({}): questions are answered from the driver API", std::string(real.status().message()));
  return MakeDriverFacts(driver);
}

int Serve(const Options& options) {
  signal(SIGPIPE, SIG_IGN);
  fcntl(options.link_fd, F_SETFD, FD_CLOEXEC);
  const absl::StatusOr<LoadedDriver> driver = ChooseDriver(options.driver);
  const std::string error(driver.status().message());
  std::unique_ptr<NvmlSource> source;
  if (driver.ok()) {
    source = BestSource(*driver, options.nvml);
    logging::Debug("answers come from {}", source->Describe());
  } else {
    logging::Error("{}", error);
  }
  Answerer answerer(source.get(), driver.ok() ? int(driver->devices.size()) : 0, options.gpu);
  while (true) {
    Packet packet;
    const ChannelStatus status = ReceivePacket(options.link_fd, &packet, -1);
    if (status == ChannelStatus::kClosed || status == ChannelStatus::kSystemError) return 0;
    Ask ask;
    nvml::Answer answer;
    if (status == ChannelStatus::kOk && packet.type == PacketType::kAsk && DecodeAsk(packet.body, &ask)) {
      if (source) {
        answer = answerer.Answer(ask);
      } else {
        answer.result = nvml::kDriverNotLoaded;
        answer.error = error;
      }
    }
    if (packet.fd.ok()) {
      std::string body;
      EncodeAnswer(answer, &body);
      // A client that does not read its answer is no reason to wait.
      fcntl(packet.fd.get(), F_SETFL, O_NONBLOCK);
      SendPacket(packet.fd.get(), PacketType::kAnswer, body, -1);
      CloseWithoutWaiting(packet.fd.Release());
    }
    if (SendPacket(options.link_fd, PacketType::kAsked, "", -1) != ChannelStatus::kOk) return 0;
  }
}

}  // namespace
}  // namespace cuda_remote::server

int main(int argc, char** argv) {
  using cuda_remote::server::Options;
  Options options;
  CLI::App app("Answers questions about a cr-server's GPUs. Started by cr-server, not by hand.", "cr-nvml");
  cuda_remote::SetUpProgram(&app);
  app.add_option("--link-fd", options.link_fd, "socket to cr-server");
  app.add_option("--log-level", options.log_level, "trace, debug, info, warn, error or off");
  app.add_option("--driver", options.driver, "CUDA driver library (default: the machine's own, else the software GPU)");
  app.add_option("--nvml", options.nvml, "NVML library");
  app.add_option("--gpu", options.gpu, "the only GPU that is served");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  cuda_remote::logging::SetUp("nvml", "cr-nvml[%P] %l: %v", options.log_level);
  return cuda_remote::server::Serve(options);
}
