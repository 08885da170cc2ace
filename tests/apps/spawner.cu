// SPDX-License-Identifier: Apache-2.0
// A program that starts others which use CUDA: by fork and exec, by posix_spawn and by shell scripts, one after another
// and at once. It has no CUDA of its own in the first half of its steps. One worker lives from the first step to the
// last and is asked in each; the others come and go, some across a step. A shell, and a process that only waits for its
// child, stand between some of them. What each worker prints is compared with the same computed on the host.
//
// The workers are this program with other arguments: --worker SEED ROUNDS [serve].
#include <spawn.h>

#include <vector>

#include "tests/apps/support/ranks.h"

extern char** environ;

constexpr int kBlock = 64;
constexpr int kLongLived = 7777;

__global__ void Advance(unsigned* state, int n, int rounds) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  for (int round = 0; round < rounds; ++round) state[i] = app::Advance(state[i], unsigned(i));
}

static std::vector<unsigned> Start(int seed, int n) {
  std::vector<unsigned> state(n);
  for (int i = 0; i < n; ++i) state[i] = 2654435761u * unsigned(seed * 10007 + i + 1);
  return state;
}

static uint64_t DigestOf(const std::vector<unsigned>& state) {
  app::Digest digest;
  digest.Add(state.data(), state.size() * sizeof(unsigned));
  return digest.value();
}

// State on the GPU.
class OnGpu {
 public:
  OnGpu(int seed, int n) : host_(Start(seed, n)) {
    CUDA_CHECK(cudaMalloc(&state_, n * sizeof(unsigned)));
    CUDA_CHECK(cudaMemcpy(state_, host_.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));
  }
  ~OnGpu() { CUDA_CHECK(cudaFree(state_)); }
  void Go(int rounds) {
    const int n = int(host_.size());
    Advance<<<(n + kBlock - 1) / kBlock, kBlock>>>(state_, n, rounds);
    LAUNCH_CHECK();
  }
  uint64_t Digest() {
    CUDA_CHECK(cudaMemcpy(host_.data(), state_, host_.size() * sizeof(unsigned), cudaMemcpyDeviceToHost));
    return DigestOf(host_);
  }

 private:
  std::vector<unsigned> host_;
  unsigned* state_;
};

// The same on the host.
class Model {
 public:
  Model(int seed, int n) : state_(Start(seed, n)) {}
  uint64_t Go(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < state_.size(); ++i) state_[i] = app::Advance(state_[i], unsigned(i));
    }
    return DigestOf(state_);
  }

 private:
  std::vector<unsigned> state_;
};

// A worker: prints one digest; with `serve`, one for each number of rounds that it reads.
static int Work(const app::Options& options, int seed, int rounds, bool serve) {
  OnGpu gpu(seed, options.size);
  do {
    gpu.Go(rounds);
    printf("%016" PRIx64 "\n", gpu.Digest());
    fflush(stdout);
  } while (serve && scanf("%d", &rounds) == 1);
  return 0;
}

// A program that was started, and the pipes to it.
struct Started {
  pid_t pid = 0;
  FILE* output = nullptr;
  FILE* input = nullptr;
  std::vector<uint64_t> expected;  // in this order
};

enum class Way { kForkExec, kSpawn, kShell, kBetween };

class Starter {
 public:
  explicit Starter(const app::Options& options) : options_(options) {}

  Started Start(Way way, int seed, int rounds, bool serve = false) {
    Started started;
    std::vector<std::string> words = {
        "/proc/self/exe",      "--size", std::to_string(options_.size), "--worker", std::to_string(seed),
        std::to_string(rounds)};
    if (serve) words.push_back("serve");
    if (!serve) started.expected.push_back(Model(seed, options_.size).Go(rounds));
    if (way == Way::kShell) {
      // Two workers, one after another.
      words = {"/bin/sh",
               "-c",
               "\"$0\" --size \"$1\" --worker \"$2\" \"$3\"; r=$?; \"$0\" --size \"$1\" --worker \"$4\" 1 && exit $r",
               Self(),
               std::to_string(options_.size),
               std::to_string(seed),
               std::to_string(rounds),
               std::to_string(seed + 1)};
      started.expected.push_back(Model(seed + 1, options_.size).Go(1));
    }
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(&word[0]);
    arguments.push_back(nullptr);
    int out[2], in[2];
    APP_CHECK(pipe2(out, O_CLOEXEC) == 0 && pipe2(in, O_CLOEXEC) == 0);
    if (way == Way::kSpawn) {
      posix_spawn_file_actions_t actions;
      posix_spawn_file_actions_init(&actions);
      posix_spawn_file_actions_adddup2(&actions, in[0], 0);
      posix_spawn_file_actions_adddup2(&actions, out[1], 1);
      APP_CHECK(posix_spawn(&started.pid, arguments[0], &actions, nullptr, arguments.data(), environ) == 0);
      posix_spawn_file_actions_destroy(&actions);
    } else {
      fflush(nullptr);
      started.pid = fork();
      APP_CHECK(started.pid >= 0);
      if (started.pid == 0) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        if (way == Way::kBetween) {
          // This process only waits.
          const pid_t child = fork();
          int status = 1;
          if (child != 0) {
            close(0), close(1), close(out[0]), close(out[1]), close(in[0]), close(in[1]);
            _exit(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 1);
          }
        }
        execv(arguments[0], arguments.data());
        _exit(127);
      }
    }
    close(in[0]);
    close(out[1]);
    started.output = fdopen(out[0], "r");
    started.input = fdopen(in[1], "w");
    APP_CHECK(started.output && started.input);
    return started;
  }

  // Its results must be the expected ones.
  void Finish(Started* started) {
    fclose(started->input);
    for (uint64_t expected : started->expected) Expect(started, expected);
    APP_CHECK(fgetc(started->output) == '\n' && fgetc(started->output) == EOF);
    fclose(started->output);
    int status = -1;
    APP_CHECK(waitpid(started->pid, &status, 0) == started->pid);
    APP_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }

  void Expect(Started* started, uint64_t expected) {
    uint64_t got = 0;
    APP_CHECK(fscanf(started->output, "%" SCNx64, &got) == 1);
    if (got != expected) {
      fprintf(stderr, "worker with PID %d: %016" PRIx64 " instead of %016" PRIx64 "\n", int(started->pid), got,
              expected);
      exit(1);
    }
    all_.Add(got);
    ++results_;
  }

  uint64_t digest() const { return all_.value(); }
  int results() const { return results_; }

 private:
  static std::string Self() {
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
    APP_CHECK(length > 0);
    return std::string(path, size_t(length));
  }

  const app::Options options_;
  app::Digest all_;
  int results_ = 0;
};

int main(int argc, char** argv) {
  if (argc >= 6 && !strcmp(argv[3], "--worker")) {
    return Work({1, atoi(argv[2])}, atoi(argv[4]), atoi(argv[5]), argc > 6 && !strcmp(argv[6], "serve"));
  }
  const app::Options options = app::Parse(argc, argv, {12, 512});
  Starter starter(options);
  Started asked = starter.Start(Way::kSpawn, kLongLived, 1, /*serve=*/true);
  Model asked_model(kLongLived, options.size);
  starter.Expect(&asked, asked_model.Go(1));
  OnGpu* own = nullptr;
  Model own_model(1, options.size);
  std::vector<Started> across;  // started in the step before

  for (int step = 1; step <= options.steps; ++step) {
    const int seed = 100 * step;
    if (step == options.steps / 2) own = new OnGpu(1, options.size);
    if (own) own->Go(step);
    // One after another, then two at once, which are waited for in the next step.
    Started alone = starter.Start(step % 2 ? Way::kForkExec : Way::kSpawn, seed, step);
    starter.Finish(&alone);
    for (Started& started : across) starter.Finish(&started);
    across.clear();
    const Way ways[] = {Way::kForkExec, Way::kSpawn, Way::kShell, Way::kBetween};
    for (int k = 0; k < 2 && step < options.steps; ++k) {
      across.push_back(starter.Start(ways[(step + 3 * k) % 4], seed + 10 * (k + 1), step));
    }
    fprintf(asked.input, "%d\n", step);
    fflush(asked.input);
    app::Step(step);
    starter.Expect(&asked, asked_model.Go(step));
    if (own) {
      const uint64_t expected = own_model.Go(step);
      APP_CHECK(own->Digest() == expected);
    }
  }
  starter.Finish(&asked);
  const uint64_t own_digest = own ? own->Digest() : 0;
  delete own;
  printf("spawner n=%d steps=%d results=%d own=%016" PRIx64 " digest=%016" PRIx64 "\n", options.size, options.steps,
         starter.results(), own_digest, starter.digest());
  return 0;
}
