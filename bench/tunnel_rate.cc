// SPDX-License-Identifier: Apache-2.0
// What the channel carries, without a GPU: a client of cr-relay (or cr-server) whose worker is
// server/supervisor:test_worker. tunnel.py starts all of it.
//
// Usage: tunnel_rate SOCKET SECONDS PIECE_KB [up|down|round...]. Prints one JSON line for each row: what it is, and
//   up    GB/s of payloads of PIECE_KB that nobody waits for, with an answered request every 64 MiB
//   down  GB/s of answers of PIECE_KB, 16 under way
//   round us from a request to its answer: empty, and with 64 KiB and 1 MiB in either direction (up in pieces of
//         PIECE_KB, down in answers of PIECE_KB)
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "proto/channel/client_channel.h"

namespace cuda_remote {
namespace {

// Calls of the test worker.
constexpr uint32_t kSwallow = 8;
constexpr uint32_t kBytes = 9;
constexpr size_t kWindow = 16;
// Memory that is copied from and to: more than the processor's caches hold.
constexpr size_t kMemory = 256 << 20;
constexpr size_t kBetweenAnswers = 64 << 20;

double Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + double(now.tv_nsec) / 1e9;
}

void Check(bool good, const char* what) {
  if (good) return;
  fprintf(stderr, "tunnel_rate: %s failed\n", what);
  exit(1);
}

class Client {
 public:
  Client(ClientChannel* channel, size_t piece) : channel_(channel), piece_(piece), memory_(kMemory, 1) {}

  // Sends `bytes`, nobody waiting for any of it.
  void Send(size_t bytes) {
    FrameHeader header;
    header.call = kSwallow;
    for (size_t done = 0; done < bytes;) {
      const size_t n = std::min(piece_, bytes - done);
      Check(channel_->Send(header, {}, {At(n), n}) == ChannelStatus::kOk, "Send");
      done += n;
    }
  }

  void Ask() {
    FrameHeader header;
    header.call = kSwallow;
    Reply reply;
    Check(channel_->Call(header, {}, {}, nullptr, 0, &reply) == ChannelStatus::kOk, "Call");
  }

  void Fetch(size_t bytes) {
    std::deque<uint64_t> under_way;
    FrameHeader header;
    header.call = kBytes;
    for (size_t done = 0; done < bytes || !under_way.empty();) {
      if (done < bytes && under_way.size() < kWindow) {
        const uint64_t n = std::min(piece_, bytes - done);
        under_way.push_back(channel_->Begin(header, {reinterpret_cast<const char*>(&n), sizeof(n)}, {}, At(n), n));
        Check(under_way.back() != 0, "Begin");
        done += n;
        continue;
      }
      Reply reply;
      Check(channel_->Wait(under_way.front(), &reply) == ChannelStatus::kOk, "Wait");
      under_way.pop_front();
    }
  }

 private:
  char* At(size_t bytes) {
    if (at_ + bytes > memory_.size()) at_ = 0;
    at_ += bytes;
    return memory_.data() + at_ - bytes;
  }
  ClientChannel* const channel_;
  const size_t piece_;
  std::vector<char> memory_;
  size_t at_ = 0;
};

double Rate(double seconds, const std::function<size_t()>& some) {
  some();
  const double start = Now();
  size_t bytes = 0;
  while (Now() - start < seconds) bytes += some();
  return double(bytes) / (Now() - start) / 1e9;
}

double Median(double seconds, const std::function<void()>& one) {
  for (int i = 0; i < 20; ++i) one();
  std::vector<double> times;
  for (const double start = Now(); Now() - start < seconds;) {
    const double before = Now();
    one();
    times.push_back((Now() - before) * 1e6);
  }
  std::nth_element(times.begin(), times.begin() + long(times.size() / 2), times.end());
  return times[times.size() / 2];
}

int Main(int argc, char** argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: %s SOCKET SECONDS PIECE_KB [up|down|round...]\n", argv[0]);
    return 2;
  }
  const double seconds = atof(argv[2]);
  const size_t piece = size_t(std::max(1, std::min(1024, atoi(argv[3])))) << 10;
  Hello hello;
  hello.pid = uint32_t(getpid());
  hello.program = "tunnel_rate";
  Welcome welcome;
  StatusOr<std::unique_ptr<ClientChannel>> connected = ClientChannel::Connect(argv[1], hello, &welcome);
  if (!connected.ok()) {
    fprintf(stderr, "tunnel_rate: %s\n", connected.status().message().c_str());
    return 1;
  }
  const std::unique_ptr<ClientChannel> channel = *std::move(connected);
  channel->SetEager(true);
  Client client(channel.get(), piece);
  const auto wanted = [&](const char* what) {
    return argc == 4 || std::any_of(argv + 4, argv + argc, [&](const char* one) { return !strcmp(one, what); });
  };
  const auto row = [&](const char* name, const char* unit, double value) {
    printf("{\"row\": \"%s\", \"piece_kb\": %zu, \"%s\": %.2f}\n", name, piece >> 10, unit, value);
    fflush(stdout);
  };
  if (wanted("up")) {
    row("up", "gb_per_s", Rate(seconds, [&] {
          client.Send(kBetweenAnswers);
          client.Ask();
          return kBetweenAnswers;
        }));
  }
  if (wanted("down")) {
    row("down", "gb_per_s", Rate(seconds, [&] {
          client.Fetch(kBetweenAnswers);
          return kBetweenAnswers;
        }));
  }
  if (wanted("round")) {
    row("empty", "us", Median(seconds / 4, [&] { client.Ask(); }));
    for (const size_t bytes : {size_t(64) << 10, size_t(1) << 20}) {
      const std::string size = bytes == size_t(64) << 10 ? "64 KB" : "1 MB";
      row((size + " up").c_str(), "us", Median(seconds / 4, [&] {
            client.Send(bytes);
            client.Ask();
          }));
      row((size + " down").c_str(), "us", Median(seconds / 4, [&] { client.Fetch(bytes); }));
    }
  }
  return 0;
}

}  // namespace
}  // namespace cuda_remote

int main(int argc, char** argv) { return cuda_remote::Main(argc, argv); }
