// SPDX-License-Identifier: Apache-2.0
// The shape of an inference engine: a scheduler without CUDA and GPU workers. Requests go through queues in POSIX
// shared memory with semaphores, results through another one with a futex, whose name is gone while it is used; a
// worker gets its descriptor over a Unix socket. Workers report to a listening Unix socket, write a byte into one pipe
// for each batch, and count in an eventfd. The scheduler calls the hook while the workers compute. A model on the host
// computes the same sequences.
#include <fcntl.h>
#include <linux/futex.h>
#include <semaphore.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <atomic>
#include <random>
#include <vector>

#include "tests/apps/support/ranks.h"

constexpr int kBlock = 64;
constexpr int kSlots = 4;  // sequences of a worker
constexpr int kVocabulary = 50021;

// One token of one sequence: its state goes on, and the next token follows from all of the state.
__global__ void Decode(const unsigned* weights, unsigned* state, int n, unsigned token, bool first, unsigned* sum) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const unsigned before = first ? 0 : state[i];
  state[i] = app::Advance(before, token ^ weights[i]);
  atomicAdd(sum, state[i] >> 7);
}

struct Request {
  int sequence, slot;
  unsigned token;
  bool first, last;
};

struct RequestQueue {
  sem_t filled, empty;
  unsigned taken, put;
  Request entries[kSlots];
};

struct Requests {
  RequestQueue of_worker[app::kMaxRanks];
};

struct Result {
  int sequence;
  unsigned token;
};

// Written by all workers; the scheduler waits on `count` until all results of a step are there.
struct Results {
  std::atomic<unsigned> count;
  Result entries[app::kMaxRanks * kSlots];
};

static void Await(std::atomic<unsigned>* word, unsigned value) {
  unsigned seen;
  while ((seen = word->load()) != value) syscall(SYS_futex, word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
}

static void Wait(sem_t* semaphore) {
  while (sem_wait(semaphore) != 0) APP_CHECK(errno == EINTR);
}

static unsigned Weight(int worker, int i) { return 2654435761u * unsigned(worker * 977 + i + 1); }
static unsigned FirstToken(int sequence) { return unsigned(sequence * 7919 + 13) % kVocabulary; }
static int Length(int sequence) { return 3 + sequence * 5 % 7; }

template <typename T>
static T* Map(int fd) {
  void* const memory = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  APP_CHECK(memory != MAP_FAILED);
  return static_cast<T*>(memory);
}

static int MakeShared(const std::string& name, size_t bytes) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  APP_CHECK(fd >= 0 && ftruncate(fd, off_t(bytes)) == 0);
  return fd;
}

static sockaddr_un Address(const std::string& name, socklen_t* length) {
  // An abstract name, so that no file stays.
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const int bytes = snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "%s", name.c_str());
  *length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + size_t(bytes));
  return address;
}

// What every worker has from the scheduler.
struct Inherited {
  std::string name;  // of the listening socket, and the beginning of the shared memory's
  int control, batches, done;
};

static void RunWorker(int worker, const app::Options& options, const Inherited& inherited) {
  const int n = options.size, blocks = (n + kBlock - 1) / kBlock;
  const int fd = shm_open((inherited.name + "-requests").c_str(), O_RDWR, 0);
  APP_CHECK(fd >= 0);
  RequestQueue* const queue = &Map<Requests>(fd)->of_worker[worker];
  close(fd);
  Results* const results = Map<Results>(app::ReceiveDescriptor(inherited.control));  // the descriptor stays open
  const int report = socket(AF_UNIX, SOCK_STREAM, 0);
  socklen_t length;
  const sockaddr_un address = Address(inherited.name, &length);
  APP_CHECK(connect(report, reinterpret_cast<const sockaddr*>(&address), length) == 0);

  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  CUDA_CHECK(cudaSetDevice(worker % devices));
  std::vector<unsigned> host(n);
  for (int i = 0; i < n; ++i) host[i] = Weight(worker, i);
  unsigned *weights, *state, *sum;
  CUDA_CHECK(cudaMalloc(&weights, n * sizeof(unsigned)));
  CUDA_CHECK(cudaMalloc(&state, kSlots * n * sizeof(unsigned)));
  CUDA_CHECK(cudaMallocHost(&sum, sizeof(unsigned)));
  unsigned* sum_on_gpu;
  CUDA_CHECK(cudaMalloc(&sum_on_gpu, sizeof(unsigned)));
  CUDA_CHECK(cudaMemcpy(weights, host.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));
  APP_CHECK(send(report, &worker, sizeof(worker), MSG_NOSIGNAL) == sizeof(worker));

  uint64_t served = 0;
  while (true) {
    Wait(&queue->filled);
    const Request request = queue->entries[queue->taken++ % kSlots];
    APP_CHECK(sem_post(&queue->empty) == 0);
    if (request.last) break;
    CUDA_CHECK(cudaMemset(sum_on_gpu, 0, sizeof(unsigned)));
    Decode<<<blocks, kBlock>>>(weights, state + request.slot * n, n, request.token, request.first, sum_on_gpu);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemcpyAsync(sum, sum_on_gpu, sizeof(unsigned), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaDeviceSynchronize());
    results->entries[worker * kSlots + request.slot] = {request.sequence, *sum % kVocabulary};
    const uint64_t one = 1;
    APP_CHECK(write(inherited.done, &one, sizeof(one)) == sizeof(one));
    if (request.slot == kSlots - 1) {
      const char byte = char('a' + worker);
      APP_CHECK(write(inherited.batches, &byte, 1) == 1);
    }
    ++served;
    results->count.fetch_add(1);
    syscall(SYS_futex, &results->count, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
  APP_CHECK(send(report, &served, sizeof(served), MSG_NOSIGNAL) == sizeof(served));
  for (unsigned* memory : {weights, state, sum_on_gpu}) CUDA_CHECK(cudaFree(memory));
  CUDA_CHECK(cudaFreeHost(sum));
}

// The same on the host, of one sequence.
class Model {
 public:
  Model(int worker, int n) : worker_(worker), state_(n) {}
  unsigned Decode(unsigned token, bool first) {
    unsigned sum = 0;
    for (size_t i = 0; i < state_.size(); ++i) {
      state_[i] = app::Advance(first ? 0 : state_[i], token ^ Weight(worker_, int(i)));
      sum += state_[i] >> 7;
    }
    return sum % kVocabulary;
  }

 private:
  int worker_;
  std::vector<unsigned> state_;
};

struct Sequence {
  int number, made = 0;
  unsigned token;
  Model model;
};

int main(int argc, char** argv) {
  const int workers = app::TakeRanks(&argc, argv, 3);
  const app::Options options = app::Parse(argc, argv, {24, 512});
  // The process number alone is the same in every PID namespace.
  const std::string name = "/cr-test-serving-" + std::to_string(std::random_device()());
  const int requests_fd = MakeShared(name + "-requests", sizeof(Requests));
  const int results_fd = MakeShared(name + "-results", sizeof(Results));
  Requests* const requests = Map<Requests>(requests_fd);
  Results* const results = Map<Results>(results_fd);
  APP_CHECK(shm_unlink((name + "-results").c_str()) == 0);
  int batches[2];
  const int done = eventfd(0, EFD_NONBLOCK);
  APP_CHECK(pipe(batches) == 0 && done >= 0);
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  socklen_t length;
  const sockaddr_un address = Address(name, &length);
  APP_CHECK(bind(listener, reinterpret_cast<const sockaddr*>(&address), length) == 0 && listen(listener, workers) == 0);

  std::vector<pid_t> children;
  fflush(nullptr);
  for (int worker = 0; worker < workers; ++worker) {
    RequestQueue* const queue = &requests->of_worker[worker];
    APP_CHECK(sem_init(&queue->filled, 1, 0) == 0 && sem_init(&queue->empty, 1, kSlots) == 0);
    int control[2];
    APP_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, control) == 0);
    const pid_t child = fork();
    APP_CHECK(child >= 0);
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(listener);
      RunWorker(worker, options, {name, control[1], batches[1], done});
      fflush(nullptr);
      _exit(0);
    }
    children.push_back(child);
    close(control[1]);
    app::SendDescriptor(control[0], results_fd);
  }
  std::vector<int> reports(workers, -1);
  for (int k = 0; k < workers; ++k) {
    const int fd = accept(listener, nullptr, nullptr);
    int worker = -1;
    APP_CHECK(fd >= 0 && recv(fd, &worker, sizeof(worker), MSG_WAITALL) == sizeof(worker));
    APP_CHECK(worker >= 0 && worker < workers && reports[worker] < 0);
    reports[worker] = fd;
  }

  const auto put = [&](int worker, const Request& request) {
    RequestQueue* const queue = &requests->of_worker[worker];
    Wait(&queue->empty);
    queue->entries[queue->put++ % kSlots] = request;
    APP_CHECK(sem_post(&queue->filled) == 0);
  };
  std::vector<Sequence> running;  // that of slot s of worker w is number w * kSlots + s
  int next = 0;
  for (int place = 0; place < workers * kSlots; ++place, ++next) {
    running.push_back({next, 0, FirstToken(next), Model(place / kSlots, options.size)});
  }
  const unsigned expected = unsigned(workers * kSlots);
  app::Digest digest;
  for (int step = 1; step <= options.steps; ++step) {
    results->count = 0;
    for (int slot = 0; slot < kSlots; ++slot) {
      for (int worker = 0; worker < workers; ++worker) {
        const Sequence& sequence = running[worker * kSlots + slot];
        put(worker, {sequence.number, slot, sequence.token, sequence.made == 0, false});
      }
    }
    app::Step(step);
    Await(&results->count, expected);
    uint64_t counted = 0;
    APP_CHECK(read(done, &counted, sizeof(counted)) == sizeof(counted) && counted == expected);
    for (int k = 0; k < workers; ++k) {
      char byte;
      APP_CHECK(read(batches[0], &byte, 1) == 1 && byte >= 'a' && byte < 'a' + workers);
    }
    for (unsigned place = 0; place < expected; ++place) {
      Sequence& sequence = running[place];
      const Result& result = results->entries[place];
      APP_CHECK(result.sequence == sequence.number);
      APP_CHECK(result.token == sequence.model.Decode(sequence.token, sequence.made == 0));
      digest.Add(result.token);
      sequence.token = result.token;
      if (++sequence.made < Length(sequence.number)) continue;
      sequence.number = next++;
      sequence.made = 0;
      sequence.token = FirstToken(sequence.number);
    }
  }
  for (int worker = 0; worker < workers; ++worker) {
    put(worker, {0, 0, 0, false, true});
    uint64_t served = 0;
    APP_CHECK(recv(reports[worker], &served, sizeof(served), MSG_WAITALL) == sizeof(served));
    APP_CHECK(served == uint64_t(options.steps) * kSlots);
  }
  app::AwaitRanks(children);
  APP_CHECK(shm_unlink((name + "-requests").c_str()) == 0);
  printf("serving workers=%d n=%d steps=%d sequences=%d digest=%016" PRIx64 "\n", workers, options.size, options.steps,
         next, digest.value());
  return 0;
}
