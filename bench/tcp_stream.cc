// SPDX-License-Identifier: Apache-2.0
// The raw rate of TCP over the loopback address, which bulk copies over gRPC are compared with.
//
// Usage: tcp_stream CONNECTIONS SECONDS. One process sends in pieces of 1 MiB, another receives; prints {"gb_per_s":
// ...}.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

namespace {

constexpr size_t kPiece = 1 << 20;

double Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + double(now.tv_nsec) / 1e9;
}

// Sends until `end`, then closes.
void Send(const sockaddr_in& address, double end) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) _exit(1);
  const std::vector<char> piece(kPiece, 1);
  while (Now() < end) {
    size_t sent = 0;
    while (sent < piece.size()) {
      const ssize_t n = send(fd, piece.data() + sent, piece.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) _exit(1);
      sent += size_t(n);
    }
  }
  close(fd);
}

size_t Receive(int fd) {
  std::vector<char> piece(kPiece);
  size_t total = 0;
  while (true) {
    const ssize_t n = recv(fd, piece.data(), piece.size(), 0);
    if (n <= 0) break;
    total += size_t(n);
  }
  close(fd);
  return total;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: %s CONNECTIONS SECONDS\n", argv[0]);
    return 2;
  }
  const int connections = atoi(argv[1]);
  const double seconds = atof(argv[2]);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener, connections) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    perror("tcp_stream");
    return 1;
  }
  const double start = Now();
  const pid_t child = fork();
  if (child == 0) {
    std::vector<std::thread> senders;
    for (int i = 0; i < connections; ++i) senders.emplace_back(Send, address, start + seconds);
    for (std::thread& sender : senders) sender.join();
    _exit(0);
  }
  std::atomic<size_t> total{0};
  std::vector<std::thread> receivers;
  for (int i = 0; i < connections; ++i) {
    const int fd = accept(listener, nullptr, nullptr);
    if (fd < 0) return 1;
    receivers.emplace_back([fd, &total] { total += Receive(fd); });
  }
  for (std::thread& receiver : receivers) receiver.join();
  const double took = Now() - start;
  int status = 1;
  waitpid(child, &status, 0);
  if (status != 0) return 1;
  printf("{\"gb_per_s\": %.4f}\n", double(total) / took / 1e9);
  return 0;
}
