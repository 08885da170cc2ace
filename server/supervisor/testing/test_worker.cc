// SPDX-License-Identifier: Apache-2.0
// A stand-in for cr-worker without CUDA: serves one session with a few calls of its own, for the tests of the
// supervisor, the tunnel and the relay. Takes the same command line.
//
//   call 1  echo: message and payload come back          call 5  event: the message comes as an event
//   call 2  count: the reply is how often it was called   call 6  die by SIGSEGV
//   call 3  bytes: as many payload bytes as the message says, a pattern
//   call 4  print: the message is device output           call 7  never answers
//   call 8  swallow: an empty answer, whatever came       call 9  as call 3, the same bytes each time, at once
//   call 11 the reply is the list of GPUs that it was given (--gpu), empty: all
//   call 12 stop, as by SIGSTOP
//   call 10 take as many bytes as the message says of the owner's memory budget; the reply is 1 if they were there

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>

#include "proto/base/unique_fd.h"
#include "proto/channel/server_channel.h"
#include "server/worker_link/memory_budget.h"
#include "server/worker_link/worker_link.h"

using namespace cuda_remote;          // NOLINT: a test program
using namespace cuda_remote::server;  // NOLINT

namespace {

// As a real crash, also where a sanitizer would catch the signal.
void Crash() {
  signal(SIGSEGV, SIG_DFL);
  kill(getpid(), SIGSEGV);
}

}  // namespace

int main(int argc, char** argv) {
  int link_fd = kWorkerLinkFd;
  std::string driver, gpus;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!strcmp(argv[i], "--link-fd")) link_fd = atoi(argv[i + 1]);
    if (!strcmp(argv[i], "--driver")) driver = argv[i + 1];
    if (!strcmp(argv[i], "--gpu")) gpus = argv[i + 1];
  }
  auto opened = WorkerLink::Open(link_fd);
  if (!opened.ok()) {
    fprintf(stderr, "%s\n", std::string(opened.status().message()).c_str());
    return 2;
  }
  const std::unique_ptr<WorkerLink> link = *std::move(opened);
  WorkerReady ready;
  ready.driver = "test driver";
  ready.devices = gpus.empty() ? 4 : uint32_t(std::count(gpus.begin(), gpus.end(), ',')) + 1;
  ready.software = true;
  if (driver == "broken") ready.error = "the driver is broken";
  if (driver == "crash") Crash();
  if (driver == "slow") usleep(300000);
  if (!link->SendReady(ready) || !ready.error.empty()) return 1;
  WorkerAssign assign;
  if (!link->WaitAssign(&assign)) return 0;
  auto created = ServerChannel::Create(UniqueFd(assign.client_socket), WorkerLink::MakeWelcome(assign),
                                       [&](const std::string& reason) {
                                         link->SendEnded(reason);
                                         _exit(0);
                                       });
  if (!created.ok()) {
    link->SendEnded(created.status().message());
    return 0;
  }
  const std::unique_ptr<ServerChannel> channel = *std::move(created);
  link->Watch([&](const std::string& reason) {
    if (!reason.empty()) {
      channel->End(reason);
      link->SendEnded(reason);
    }
    _exit(0);
  });
  std::unique_ptr<MemoryBudget> budget;
  if (assign.budget_limit != 0) budget = *MemoryBudget::Open(assign.budget_fd, assign.budget_slot, assign.budget_limit);
  FrameHeader header;
  std::string message;
  PayloadView payload;
  WorkerStats stats;
  uint64_t count = 0;
  std::string ready_bytes;
  while (channel->Next(&header, &message, &payload)) {
    ++stats.calls;
    stats.bytes_in += payload.bytes;
    std::string reply, out;
    uint64_t number = 0;
    memcpy(&number, message.data(), message.size() < 8 ? message.size() : 8);
    switch (header.call) {
      case 1:
        reply = message;
        out.assign(payload.data, payload.bytes);
        break;
      case 2:
        ++count;
        reply.assign(reinterpret_cast<char*>(&count), 8);
        break;
      case 3:
        out.resize(number);
        for (size_t i = 0; i < number; ++i) out[i] = char(i * 131 + (i >> 13));
        break;
      case 4:
        channel->Output(0x1000d, message);
        break;
      case 5:
        channel->Event(0x1000e, 0, message);
        break;
      case 6:
        Crash();
        break;
      case 7:
        continue;
      case 10:
        number = !budget || budget->Take(number);
        reply.assign(reinterpret_cast<char*>(&number), 8);
        break;
      case 11:
        reply = gpus;
        break;
      case 12:
        raise(SIGSTOP);
        break;
      case 9:
        if (number > ready_bytes.size()) ready_bytes.resize(number, 'r');
        break;
    }
    const std::string_view sent = header.call == 9 ? std::string_view(ready_bytes.data(), number) : out;
    stats.bytes_out += sent.size();
    if (!(header.flags & kFlagNoReply)) channel->Reply(header.sequence, header.call, 0, 0, reply, sent);
    if (stats.calls % 16 == 1) link->SendStats(stats);
  }
  link->SendEnded(channel->end_reason());
  _exit(0);
}
