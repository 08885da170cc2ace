// SPDX-License-Identifier: Apache-2.0
// Ranks that wait for each other on the host alone: at a barrier in shared memory in every step, and at a small TCP
// store over 127.0.0.1 in every third, as processes of frameworks meet. Between the waits each rank has a kernel
// running, and what it computes depends on what all the others have computed in the step before.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "tests/apps/support/ranks.h"

constexpr int kBlock = 64;
constexpr int kStoreEvery = 3;

__global__ void Advance(unsigned* state, unsigned* sum, int n, unsigned add) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  state[i] = app::Advance(state[i], add + unsigned(i));
  atomicAdd(sum, state[i]);
}

struct Shared {
  app::Barrier barrier;
  int port;
  unsigned sums[app::kMaxRanks];
  uint64_t digests[app::kMaxRanks];
};

// Keys with numbers. Add returns at once, Await when the value has reached a bound.
struct Request {
  enum Kind : int { kAdd, kAwait } kind;
  int key;
  unsigned value;
};

// In rank 0: a thread for each connection.
class Store {
 public:
  explicit Store(int listener) : acceptor_([this, listener] { Accept(listener); }) { acceptor_.detach(); }

 private:
  void Accept(int listener) {
    while (true) {
      const int fd = accept(listener, nullptr, nullptr);
      APP_CHECK(fd >= 0);
      std::thread([this, fd] { Serve(fd); }).detach();
    }
  }
  void Serve(int fd) {
    Request request;
    while (recv(fd, &request, sizeof(request), MSG_WAITALL) == sizeof(request)) {
      std::unique_lock<std::mutex> lock(mutex_);
      unsigned& value = values_[request.key];
      if (request.kind == Request::kAdd) {
        value += request.value;
        changed_.notify_all();
      } else {
        changed_.wait(lock, [&] { return value >= request.value; });
      }
      const unsigned answer = value;
      lock.unlock();
      APP_CHECK(send(fd, &answer, sizeof(answer), MSG_NOSIGNAL) == sizeof(answer));
    }
    close(fd);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, unsigned> values_;
  std::thread acceptor_;
};

static int Socket() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  APP_CHECK(fd >= 0 && setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
  return fd;
}

static int Listen(int* port) {
  const int fd = Socket(), on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  APP_CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(fd, app::kMaxRanks) == 0);
  APP_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  *port = ntohs(address.sin_port);
  return fd;
}

static int Connect(int port) {
  const int fd = Socket();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(uint16_t(port));
  APP_CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  return fd;
}

static unsigned Ask(int store, Request::Kind kind, int key, unsigned value) {
  const Request request{kind, key, value};
  unsigned answer = 0;
  APP_CHECK(send(store, &request, sizeof(request), MSG_NOSIGNAL) == sizeof(request));
  APP_CHECK(recv(store, &answer, sizeof(answer), MSG_WAITALL) == sizeof(answer));
  return answer;
}

static unsigned Seed(int rank, int i) { return 2654435761u * unsigned(rank * 100003 + i + 1); }

static unsigned Total(const unsigned* sums, int ranks) {
  unsigned total = 0;
  for (int r = 0; r < ranks; ++r) total = total * 31u + sums[r];
  return total;
}

static void RunRank(int rank, int ranks, const app::Options& options, Shared* shared) {
  const int n = options.size, blocks = (n + kBlock - 1) / kBlock;
  if (rank == 0) new Store(Listen(&shared->port));
  shared->barrier.Wait();
  const int store = Connect(shared->port);

  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  CUDA_CHECK(cudaSetDevice(rank % devices));
  std::vector<unsigned> state(n);
  for (int i = 0; i < n; ++i) state[i] = Seed(rank, i);
  unsigned *on_gpu, *sum;
  CUDA_CHECK(cudaMalloc(&on_gpu, n * sizeof(unsigned)));
  CUDA_CHECK(cudaMalloc(&sum, sizeof(unsigned)));
  CUDA_CHECK(cudaMemcpy(on_gpu, state.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));

  unsigned add = 0;
  for (int step = 1; step <= options.steps; ++step) {
    CUDA_CHECK(cudaMemset(sum, 0, sizeof(unsigned)));
    Advance<<<blocks, kBlock>>>(on_gpu, sum, n, add);
    LAUNCH_CHECK();
    if (step % kStoreEvery == 0) {
      // The kernel may still run while this rank waits for the others.
      Ask(store, Request::kAdd, step, 1);
      APP_CHECK(Ask(store, Request::kAwait, step, unsigned(ranks)) == unsigned(ranks));
    }
    CUDA_CHECK(cudaMemcpy(&shared->sums[rank], sum, sizeof(unsigned), cudaMemcpyDeviceToHost));
    shared->barrier.Wait();
    add = Total(shared->sums, ranks);
    if (rank == 0) app::Step(step);
    shared->barrier.Wait();
  }

  CUDA_CHECK(cudaMemcpy(state.data(), on_gpu, n * sizeof(unsigned), cudaMemcpyDeviceToHost));
  app::Digest digest;
  digest.Add(state.data(), n * sizeof(unsigned));
  shared->digests[rank] = digest.value();
  CUDA_CHECK(cudaFree(on_gpu));
  CUDA_CHECK(cudaFree(sum));
  shared->barrier.Wait();
}

int main(int argc, char** argv) {
  const int ranks = app::TakeRanks(&argc, argv, 4);
  const app::Options options = app::Parse(argc, argv, {24, 1024});
  Shared* const shared = app::Share<Shared>();
  shared->barrier.Init(ranks);
  app::RunRanks(ranks, [&](int rank) { RunRank(rank, ranks, options, shared); });

  std::vector<std::vector<unsigned>> state(ranks, std::vector<unsigned>(options.size));
  for (int r = 0; r < ranks; ++r) {
    for (int i = 0; i < options.size; ++i) state[r][i] = Seed(r, i);
  }
  unsigned sums[app::kMaxRanks], add = 0;
  for (int step = 0; step < options.steps; ++step) {
    for (int r = 0; r < ranks; ++r) {
      sums[r] = 0;
      for (int i = 0; i < options.size; ++i) sums[r] += state[r][i] = app::Advance(state[r][i], add + unsigned(i));
    }
    add = Total(sums, ranks);
  }
  app::Digest all;
  for (int r = 0; r < ranks; ++r) {
    app::Digest digest;
    digest.Add(state[r].data(), options.size * sizeof(unsigned));
    APP_CHECK(digest.value() == shared->digests[r]);
    all.Add(shared->digests[r]);
  }
  printf("host_barrier ranks=%d n=%d steps=%d total=%u digest=%016" PRIx64 "\n", ranks, options.size, options.steps,
         add, all.value());
  return 0;
}
