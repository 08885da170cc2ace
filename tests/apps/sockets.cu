// SPDX-License-Identifier: Apache-2.0
// A program with internet sockets: what the GPU has computed goes through a TCP connection that the program has with
// itself, as those of frameworks whose processes meet at a server in one of them, and is in the kernel's queues when
// the hook is called. A UDP socket and two that listen are open as well, and connections to one of those have just
// ended.
//
// CR_TEST_CONNECT=PORT: also a connection with somebody else on this machine, who hears of every step; once that is
// lost, it is opened again.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <vector>

#include "tests/apps/support/app.h"

constexpr int kBlock = 64;

__global__ void Advance(unsigned* state, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) state[i] = state[i] * 1664525u + 1013904223u;
}

__global__ void Add(unsigned* sums, const unsigned* arrived, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) sums[i] += arrived[i] ^ unsigned(i);
}

static sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(uint16_t(port));
  return address;
}

static int Connect(int port) {
  const sockaddr_in address = Loopback(port);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  APP_CHECK(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  return fd;
}

// A socket of this type that is bound to a free port.
static int Bind(int type, int* port, bool reuse = true) {
  int fd = socket(AF_INET, type, 0), on = reuse;
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof(address);
  APP_CHECK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0);
  APP_CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0);
  APP_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  *port = ntohs(address.sin_port);
  return fd;
}

// Somebody else, who may be gone at any time.
class Other {
 public:
  explicit Other(const char* port) : port_(port ? atoi(port) : 0) {
    if (port_) fd_ = Connect(port_);
  }
  void Tell(int step) {
    if (!port_ || send(fd_, &step, sizeof(step), MSG_NOSIGNAL) == sizeof(step)) return;
    close(fd_);
    fd_ = Connect(port_);
    APP_CHECK(send(fd_, &step, sizeof(step), MSG_NOSIGNAL) == sizeof(step));
  }

 private:
  int port_, fd_ = -1;
};

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {30, 2048});
  const int n = options.size, blocks = (n + kBlock - 1) / kBlock, bytes = n * int(sizeof(unsigned));
  int port, udp_port;
  int listener = Bind(SOCK_STREAM, &port), datagrams = Bind(SOCK_DGRAM, &udp_port);
  APP_CHECK(listen(listener, 1) == 0);
  // One that is bound without SO_REUSEADDR, whose connections end at this side first: their ports stay taken.
  int strict_port, strict = Bind(SOCK_STREAM, &strict_port, false);
  APP_CHECK(listen(strict, 1) == 0);
  Other other(getenv("CR_TEST_CONNECT"));
  int near = Connect(port), far = accept(listener, nullptr, nullptr);
  APP_CHECK(far >= 0);

  std::vector<unsigned> state(n), sums(n, 0), host(n);
  for (int i = 0; i < n; ++i) host[i] = state[i] = 40503u * unsigned(i);
  unsigned *on_gpu, *arrived, *sums_on_gpu;
  CUDA_CHECK(cudaMalloc(&on_gpu, bytes));
  CUDA_CHECK(cudaMalloc(&arrived, bytes));
  CUDA_CHECK(cudaMalloc(&sums_on_gpu, bytes));
  CUDA_CHECK(cudaMemcpy(on_gpu, state.data(), bytes, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemset(sums_on_gpu, 0, bytes));

  for (int step = 1; step <= options.steps; ++step) {
    Advance<<<blocks, kBlock>>>(on_gpu, n);
    CUDA_CHECK(cudaMemcpy(state.data(), on_gpu, bytes, cudaMemcpyDeviceToHost));
    APP_CHECK(send(near, state.data(), bytes, MSG_NOSIGNAL) == bytes);
    const sockaddr_in address = Loopback(udp_port);
    APP_CHECK(sendto(datagrams, &step, sizeof(step), 0, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) ==
              sizeof(step));
    int heard = 0;
    APP_CHECK(recv(datagrams, &heard, sizeof(heard), 0) == sizeof(heard) && heard == step);
    const int visitor = Connect(strict_port), host_side = accept(strict, nullptr, nullptr);
    APP_CHECK(host_side >= 0 && close(host_side) == 0 && recv(visitor, &heard, 1, 0) == 0 && close(visitor) == 0);
    app::Step(step);
    other.Tell(step);
    APP_CHECK(recv(far, state.data(), bytes, MSG_WAITALL) == bytes);
    CUDA_CHECK(cudaMemcpy(arrived, state.data(), bytes, cudaMemcpyHostToDevice));
    Add<<<blocks, kBlock>>>(sums_on_gpu, arrived, n);
    LAUNCH_CHECK();
    for (int i = 0; i < n; ++i) {
      host[i] = host[i] * 1664525u + 1013904223u;
      sums[i] += host[i] ^ unsigned(i);
    }
  }

  CUDA_CHECK(cudaMemcpy(state.data(), sums_on_gpu, bytes, cudaMemcpyDeviceToHost));
  APP_CHECK(state == sums);
  app::Digest digest;
  digest.Add(state.data(), bytes);
  printf("sockets n=%d steps=%d digest=%016" PRIx64 "\n", n, options.steps, digest.value());
  for (unsigned* memory : {on_gpu, arrived, sums_on_gpu}) CUDA_CHECK(cudaFree(memory));
  return 0;
}
