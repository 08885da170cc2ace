// SPDX-License-Identifier: Apache-2.0
// A job of several CUDA processes ("ranks") that do not need each other, so that one can be killed and the others must
// go on with the right results. Each rank compares its GPU memory with its own calculation after every step: all of
// what it changes, and a part of what stands still, so that kStillParts steps in a row compare all of that.
//
// Usage: apart [--still N] [--ranks N] [--size N]     (FILE below is CR_TEST_SYNC_FILE)
//   size, still    KiB of GPU memory of each rank that it changes in each step, and that stand still (0)
//   FILE.rank.R    rank R writes "STEP PID" here after every step, always as long
//   FILE.add.K     once it exists, one more rank is started (K: 0, 1, ...)
//   FILE.hold.R    while it exists, rank R has a kernel on the GPU that does not end
//   FILE.rest.R    once it exists, rank R uses CUDA no more, says so by FILE.rests.R, and waits for one of these:
//   FILE.leave.R   once it exists, rank R ends
//   FILE.exec.R    once it exists, and rank R rests: it executes this program again, which begins anew as rank R, and
//                  removes these files of it
//   FILE.end       all ranks end
// Each rank that ends well prints "rank R right"; of each other one, how it ended is printed to stderr. Exit code 0.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/apps/support/ranks.h"

namespace {

constexpr int kThreads = 128;
// steps.py knows this number. To read all of it in each step would be most of the work, above all over a network.
constexpr size_t kStillParts = 4;

__host__ __device__ unsigned Next(unsigned value, unsigned step) { return app::Advance(value, step); }

__global__ void Mix(unsigned* data, int count, unsigned step) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) data[i] = Next(data[i], step);
}

__global__ void Await(volatile unsigned* flag) {
  while (*flag == 0) {
  }
}

std::string File(const std::string& what) {
  const char* const file = getenv("CR_TEST_SYNC_FILE");
  APP_CHECK(file);
  return std::string(file) + "." + what;
}

bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

void Report(const std::string& path, unsigned step) {
  char line[32];
  const int length = snprintf(line, sizeof(line), "%010u %010d\n", step, int(getpid()));
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  APP_CHECK(fd >= 0 && pwrite(fd, line, size_t(length), 0) == length);
  close(fd);
}

// What no other rank has, and what no compression makes small.
std::vector<unsigned> Begin(int rank, int count) {
  std::vector<unsigned> values(static_cast<size_t>(count));
  unsigned state = unsigned(rank) * 2654435761u + 1;
  for (unsigned& value : values) value = state = app::Advance(state, 7);
  return values;
}

class Rank {
 public:
  Rank(int rank, int size, int still)
      : rank_(rank),
        count_(size * 256),
        model_(Begin(rank, count_)),
        seen_(model_),
        still_model_(Begin(~rank, still * 256)),
        still_seen_(still_model_.size() / kStillParts + 1) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMalloc(&data_, bytes()));
    CUDA_CHECK(cudaMemcpyAsync(data_, model_.data(), bytes(), cudaMemcpyHostToDevice, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    if (still > 0) {
      CUDA_CHECK(cudaMalloc(&still_, still_bytes()));
      CUDA_CHECK(cudaMemcpy(still_, still_model_.data(), still_bytes(), cudaMemcpyHostToDevice));
    }
    CUDA_CHECK(cudaHostAlloc(&flag_, sizeof(unsigned), cudaHostAllocMapped));
  }

  void Run() {
    const std::string steps = File("rank." + std::to_string(rank_)), hold = File("hold." + std::to_string(rank_));
    const std::string rest = File("rest." + std::to_string(rank_)), leave = File("leave." + std::to_string(rank_));
    const std::string exec = File("exec." + std::to_string(rank_)), end = File("end");
    for (unsigned step = 1; !Exists(end) && !Exists(leave); ++step) {
      if (Exists(rest)) {
        Report(File("rests." + std::to_string(rank_)), step);
        while (!Exists(end) && !Exists(leave)) {
          if (Exists(exec)) BeginAnew();
          usleep(500);
        }
        break;
      }
      if (Exists(hold)) Hold(hold);
      Step(step);
      Report(steps, step);
      usleep(20000);
    }
    printf("rank %d right\n", rank_);
  }

 private:
  void BeginAnew() {
    const std::string rank = std::to_string(rank_), still = std::to_string(still_model_.size() / 256);
    for (const char* name : {"rest.", "rests.", "exec."}) unlink(File(name + rank).c_str());
    execl("/proc/self/exe", "apart", "--still", still.c_str(), "--rank", rank.c_str(), "--size",
          std::to_string(count_ / 256).c_str(), nullptr);
    APP_CHECK(false);
  }
  size_t bytes() const { return size_t(count_) * sizeof(unsigned); }
  size_t still_bytes() const { return still_model_.size() * sizeof(unsigned); }

  void Step(unsigned step) {
    Mix<<<(count_ + kThreads - 1) / kThreads, kThreads, 0, stream_>>>(data_, count_, step);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemcpyAsync(seen_.data(), data_, bytes(), cudaMemcpyDeviceToHost, stream_));
    const size_t all = still_model_.size(), part = step % kStillParts;
    const size_t from = all * part / kStillParts, count = all * (part + 1) / kStillParts - from;
    if (count > 0) {
      CUDA_CHECK(cudaMemcpyAsync(still_seen_.data(), still_ + from, count * sizeof(unsigned), cudaMemcpyDeviceToHost,
                                 stream_));
    }
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    for (unsigned& value : model_) value = Next(value, step);
    if (seen_ == model_ && std::equal(still_seen_.begin(), still_seen_.begin() + ptrdiff_t(count),
                                      still_model_.begin() + ptrdiff_t(from))) {
      return;
    }
    fprintf(stderr, "rank %d is wrong at step %u\n", rank_, step);
    exit(3);
  }

  void Hold(const std::string& path) {
    unsigned* device;
    *const_cast<unsigned*>(flag_) = 0;
    CUDA_CHECK(cudaHostGetDevicePointer(&device, const_cast<unsigned*>(flag_), 0));
    Await<<<1, 1, 0, stream_>>>(device);
    LAUNCH_CHECK();
    Report(File("held." + std::to_string(rank_)), 0);
    while (Exists(path)) usleep(1000);
    *flag_ = 1;
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

  const int rank_, count_;
  std::vector<unsigned> model_, seen_, still_model_, still_seen_;
  cudaStream_t stream_;
  unsigned *data_, *still_ = nullptr;
  volatile unsigned* flag_;
};

void Start(int rank, int size, int still) {
  const pid_t child = fork();
  APP_CHECK(child >= 0);
  if (child > 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Rank(rank, size, still).Run();
  fflush(nullptr);
  _exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  int still = 0;
  if (argc > 2 && !strcmp(argv[1], "--still")) {
    still = atoi(argv[2]);
    argc -= 2;
    argv += 2;
  }
  int only = -1;
  if (argc > 2 && !strcmp(argv[1], "--rank")) {
    only = atoi(argv[2]);
    argc -= 2;
    argv += 2;
  }
  const int count = app::TakeRanks(&argc, argv, 8);
  const app::Options options = app::Parse(argc, argv, {1, 16});
  if (only >= 0) {
    Rank(only, options.size, still).Run();
    return 0;
  }
  int ranks = 0;
  while (ranks < count) Start(ranks++, options.size, still);
  // It makes no CUDA call itself, so that it can go on starting ranks.
  for (int left = ranks, added = 0; left > 0;) {
    if (Exists(File("add." + std::to_string(added)))) {
      ++added, ++left;
      Start(ranks++, options.size, still);
    }
    int status = 0;
    const pid_t ended = waitpid(-1, &status, WNOHANG);
    if (ended <= 0) {
      usleep(2000);
      continue;
    }
    --left;
    if (status != 0) fprintf(stderr, "the rank with PID %d ended with status %#x\n", int(ended), unsigned(status));
  }
  return 0;
}
