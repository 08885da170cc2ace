// SPDX-License-Identifier: Apache-2.0
// The shape of an inference engine whose workers pass GPU memory on: a scheduler without CUDA, a worker that fills
// blocks ("prefill"), and workers that go on with them ("decode"). Each worker is this program, executed anew. Requests
// and results go through queues in a nameless shared memory file; blocks go from worker to worker over Unix sockets, as
// torch.multiprocessing sends tensors: the memory's and an event's key, an offset, and a counter in shared memory by
// which the receiver gives the block back. The receiver's stream waits for the event, and nobody synchronizes before.
// Receivers keep some blocks across steps, and close and reopen the memory from time to time. The scheduler calls the
// hook, and compares every result with a model on the host.
//
//   engine [--steps N] [--size N] [--ranks N (4)]      (N - 1 decode workers)
#include <fcntl.h>
#include <semaphore.h>

#include <atomic>
#include <deque>
#include <string>
#include <vector>

#include "tests/apps/support/ranks.h"

constexpr int kThreads = 64;
constexpr int kSlabs = 2;
constexpr int kBlocksOfSlab = 12;
constexpr int kBlocks = kSlabs * kBlocksOfSlab;
constexpr int kKept = 2;         // blocks that a receiver keeps
constexpr int kReopenAfter = 5;  // uses of a slab until it is closed
constexpr int kEntries = 64;
constexpr int kRequestsOfWorker = 2;
constexpr unsigned kVocabulary = 50021;

__host__ __device__ inline unsigned Value(unsigned seed, int i) {
  return app::Advance(seed + unsigned(i) * 2654435761u, 11);
}
__host__ __device__ inline unsigned Follow(unsigned state, unsigned value) {
  return app::Advance(state, value ^ state >> 5);
}

__global__ void Fill(unsigned* block, int n, unsigned seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) block[i] = Value(seed, i);
}

// Also writes into the sender's memory.
__global__ void Use(unsigned* state, unsigned* block, int n, unsigned* sum) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  state[i] = Follow(state[i], block[i]);
  block[i] = 0;
  atomicAdd(sum, state[i] >> 7);
}

struct Request {
  int number, worker;
  unsigned seed;
  bool last;
};

struct Result {
  int number;
  unsigned token;
};

// For processes that share memory. Any number of writers, one reader.
template <typename T>
struct Queue {
  sem_t filled, empty, writer;
  unsigned put, taken;
  T entries[kEntries];

  void Init() {
    APP_CHECK(sem_init(&filled, 1, 0) == 0 && sem_init(&empty, 1, kEntries) == 0 && sem_init(&writer, 1, 1) == 0);
  }
  static void Wait(sem_t* semaphore) {
    while (sem_wait(semaphore) != 0) APP_CHECK(errno == EINTR);
  }
  void Put(const T& entry) {
    Wait(&empty);
    Wait(&writer);
    entries[put++ % kEntries] = entry;
    APP_CHECK(sem_post(&writer) == 0 && sem_post(&filled) == 0);
  }
  T Take() {
    Wait(&filled);
    const T entry = entries[taken++ % kEntries];
    APP_CHECK(sem_post(&empty) == 0);
    return entry;
  }
};

struct Board {
  Queue<Request> requests;
  Queue<Result> results;
  std::atomic<int> uses[kBlocks];
};

// A block on its way to another process.
struct Message {
  int number;  // -1: there are no more
  int block;
  size_t offset;
  cudaIpcMemHandle_t memory;
  cudaIpcEventHandle_t event;
};

static Board* MapBoard(int fd) {
  void* const memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  APP_CHECK(memory != MAP_FAILED);
  return static_cast<Board*>(memory);
}

// Fills blocks and sends them to `sockets`, one for each decode worker.
static void RunPrefill(Board* board, int n, const std::vector<int>& sockets) {
  unsigned* slabs[kSlabs];
  cudaEvent_t events[kBlocks];
  Message messages[kBlocks];
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int block = 0; block < kBlocks; ++block) {
    const int slab = block / kBlocksOfSlab;
    if (block % kBlocksOfSlab == 0) CUDA_CHECK(cudaMalloc(&slabs[slab], size_t(n) * kBlocksOfSlab * sizeof(unsigned)));
    Message& message = messages[block];
    message.block = block;
    message.offset = size_t(block % kBlocksOfSlab) * size_t(n);
    CUDA_CHECK(cudaEventCreateWithFlags(&events[block], cudaEventDisableTiming | cudaEventInterprocess));
    CUDA_CHECK(cudaIpcGetMemHandle(&message.memory, slabs[slab]));
    CUDA_CHECK(cudaIpcGetEventHandle(&message.event, events[block]));
  }
  int next = 0;
  while (true) {
    const Request request = board->requests.Take();
    if (request.last) break;
    // As an allocator does: whatever block is free.
    while (board->uses[next] != 0) {
      next = (next + 1) % kBlocks;
      if (next == 0) usleep(200);
    }
    Message& message = messages[next];
    unsigned* const block = slabs[next / kBlocksOfSlab] + message.offset;
    board->uses[next] = 1;
    Fill<<<(n + kThreads - 1) / kThreads, kThreads, 0, stream>>>(block, n, request.seed);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaEventRecord(events[next], stream));
    message.number = request.number;
    APP_CHECK(send(sockets[size_t(request.worker)], &message, sizeof(message), MSG_NOSIGNAL) == sizeof(message));
    next = (next + 1) % kBlocks;
  }
  Message end = {};
  end.number = -1;
  for (const int socket : sockets) APP_CHECK(send(socket, &end, sizeof(end), MSG_NOSIGNAL) == sizeof(end));
  for (int block = 0; block < kBlocks; ++block) {
    while (board->uses[block] != 0) usleep(200);
    CUDA_CHECK(cudaEventDestroy(events[block]));
  }
  for (unsigned* slab : slabs) CUDA_CHECK(cudaFree(slab));
}

class Decode {
 public:
  Decode(Board* board, int n, int socket) : board_(board), n_(n), socket_(socket) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMalloc(&state_, size_t(n) * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc(&sum_, sizeof(unsigned)));
    CUDA_CHECK(cudaMallocHost(&host_sum_, sizeof(unsigned)));
    CUDA_CHECK(cudaMemsetAsync(state_, 0, size_t(n) * sizeof(unsigned), stream_));
  }

  void Run() {
    Message message;
    while (true) {
      APP_CHECK(recv(socket_, &message, sizeof(message), MSG_WAITALL) == sizeof(message));
      if (message.number < 0) break;
      Slab* const slab = Open(message.memory);
      cudaEvent_t filled;
      CUDA_CHECK(cudaIpcOpenEventHandle(&filled, message.event));
      CUDA_CHECK(cudaStreamWaitEvent(stream_, filled, 0));
      CUDA_CHECK(cudaMemsetAsync(sum_, 0, sizeof(unsigned), stream_));
      Use<<<(n_ + kThreads - 1) / kThreads, kThreads, 0, stream_>>>(state_, slab->memory + message.offset, n_, sum_);
      LAUNCH_CHECK();
      CUDA_CHECK(cudaEventDestroy(filled));
      CUDA_CHECK(cudaMemcpyAsync(host_sum_, sum_, sizeof(unsigned), cudaMemcpyDeviceToHost, stream_));
      CUDA_CHECK(cudaStreamSynchronize(stream_));
      ++slab->references;
      ++slab->uses;
      kept_.push_back({slab, message.block});
      if (kept_.size() > kKept) GiveBackOne();
      board_->results.Put({message.number, *host_sum_ % kVocabulary});
    }
    while (!kept_.empty()) GiveBackOne();
    for (Slab& slab : slabs_) Close(&slab);
  }

 private:
  struct Slab {
    cudaIpcMemHandle_t key;
    unsigned* memory = nullptr;  // null: closed
    int references = 0, uses = 0;
  };
  struct Kept {
    Slab* slab;
    int block;
  };

  Slab* Open(const cudaIpcMemHandle_t& key) {
    Slab* found = nullptr;
    for (Slab& slab : slabs_) {
      if (memcmp(&slab.key, &key, sizeof(key)) == 0) found = &slab;
    }
    if (!found) {
      slabs_.emplace_back();
      found = &slabs_.back();
      found->key = key;
    }
    if (found->memory) return found;
    CUDA_CHECK(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&found->memory), key, cudaIpcMemLazyEnablePeerAccess));
    found->uses = 0;
    return found;
  }

  static void Close(Slab* slab) {
    if (!slab->memory) return;
    CUDA_CHECK(cudaIpcCloseMemHandle(slab->memory));
    slab->memory = nullptr;
  }

  void GiveBackOne() {
    const Kept oldest = kept_.front();
    kept_.pop_front();
    --oldest.slab->references;
    if (oldest.slab->references == 0 && oldest.slab->uses >= kReopenAfter) Close(oldest.slab);
    board_->uses[oldest.block] = 0;
  }

  Board* const board_;
  const int n_, socket_;
  cudaStream_t stream_;
  unsigned *state_, *sum_, *host_sum_;
  std::deque<Slab> slabs_;  // its elements stay where they are
  std::deque<Kept> kept_;
};

// --worker BOARD SIZE prefill|decode SOCKET...
static int RunWorker(int argc, char** argv) {
  Board* const board = MapBoard(atoi(argv[2]));
  const int n = atoi(argv[3]);
  const bool prefill = !strcmp(argv[4], "prefill");
  std::vector<int> sockets;
  for (int i = 5; i < argc; ++i) sockets.push_back(atoi(argv[i]));
  if (prefill) {
    RunPrefill(board, n, sockets);
  } else {
    Decode(board, n, sockets[0]).Run();
  }
  return 0;
}

static pid_t Spawn(int board, int size, const char* role, const std::vector<int>& sockets) {
  std::vector<std::string> words = {"engine", "--worker", std::to_string(board), std::to_string(size), role};
  for (const int socket : sockets) words.push_back(std::to_string(socket));
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(&word[0]);
  arguments.push_back(nullptr);
  fflush(nullptr);
  const pid_t child = fork();
  APP_CHECK(child >= 0);
  if (child > 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // Only what is its own survives the execution.
  fcntl(board, F_SETFD, 0);
  for (const int socket : sockets) fcntl(socket, F_SETFD, 0);
  execv("/proc/self/exe", arguments.data());
  _exit(127);
}

int main(int argc, char** argv) {
  if (argc > 5 && !strcmp(argv[1], "--worker")) return RunWorker(argc, argv);
  const int decoders = app::TakeRanks(&argc, argv, 4) - 1;
  const app::Options options = app::Parse(argc, argv, {24, 512});
  const int fd = memfd_create("engine", MFD_CLOEXEC);
  APP_CHECK(fd >= 0 && ftruncate(fd, sizeof(Board)) == 0);
  Board* const board = MapBoard(fd);
  board->requests.Init();
  board->results.Init();
  std::vector<pid_t> children;
  std::vector<int> senders;
  for (int i = 0; i < decoders; ++i) {
    int ends[2];
    APP_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    senders.push_back(ends[0]);
    children.push_back(Spawn(fd, options.size, "decode", {ends[1]}));
    close(ends[1]);
  }
  children.push_back(Spawn(fd, options.size, "prefill", senders));
  for (const int sender : senders) close(sender);

  std::vector<std::vector<unsigned>> models(size_t(decoders), std::vector<unsigned>(size_t(options.size), 0));
  const int count = decoders * kRequestsOfWorker;
  app::Digest digest;
  for (int step = 1; step <= options.steps; ++step) {
    std::vector<unsigned> wanted;
    for (int i = 0; i < count; ++i) {
      const int worker = i % decoders;
      const unsigned seed = unsigned(step * 977 + i) * 2654435761u;
      board->requests.Put({i, worker, seed, false});
      unsigned sum = 0;
      for (int k = 0; k < options.size; ++k) {
        unsigned& state = models[size_t(worker)][size_t(k)];
        state = Follow(state, Value(seed, k));
        sum += state >> 7;
      }
      wanted.push_back(sum % kVocabulary);
    }
    // A part is on its way when the hook may stop this process.
    std::vector<unsigned> got(size_t(count), kVocabulary);
    app::Step(step);
    for (int i = 0; i < count; ++i) {
      const Result result = board->results.Take();
      APP_CHECK(result.number >= 0 && result.number < count && got[size_t(result.number)] == kVocabulary);
      got[size_t(result.number)] = result.token;
    }
    APP_CHECK(got == wanted);
    digest.Add(got.data(), got.size() * sizeof(unsigned));
    printf("step %d %016" PRIx64 "\n", step, digest.value());
  }
  board->requests.Put({0, 0, 0, true});
  app::AwaitRanks(children);
  return 0;
}
