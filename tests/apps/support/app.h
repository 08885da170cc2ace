// SPDX-License-Identifier: Apache-2.0
// What all test programs share: arguments, error checks, digests and the hook for checkpoint tests.
//
// The programs stay ordinary CUDA programs: nothing here knows of cuda-remote. A program calls app::Step(n) after step
// n; the environment then decides what happens there:
//
//   CR_TEST_SYNC_FILE=FILE   every hook appends a line to FILE: "step N" (or "paused N", see below)
//   CR_TEST_PAUSE_AT=3,9     after these steps the program appends "paused N" and waits until FILE.go.N exists
//   CR_TEST_STEP_MS=20       sleep that long after every step, so that a checkpoint at a random time finds it running;
//                            no more once FILE.fast exists
//
// Without CR_TEST_SYNC_FILE the hook does nothing but the sleep. FILE is opened, written and closed at each line, so a
// snapshot of the process never finds it open.
//
// Thread-safety: Step may be called by one thread at a time. Errors: a failed check prints the call, the error's name
// and the source line to stderr and ends the program with exit code 1.
#ifndef CUDA_REMOTE_TESTS_APPS_SUPPORT_APP_H_
#define CUDA_REMOTE_TESTS_APPS_SUPPORT_APP_H_

#include <fcntl.h>
#include <unistd.h>

#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace app {

// Command line: [--steps N] [--size N].
struct Options {
  int steps;
  int size;
};

inline Options Parse(int argc, char** argv, Options defaults) {
  Options options = defaults;
  for (int i = 1; i < argc; ++i) {
    int* target = nullptr;
    if (!strcmp(argv[i], "--steps")) target = &options.steps;
    if (!strcmp(argv[i], "--size")) target = &options.size;
    if (!target || i + 1 == argc || atoi(argv[i + 1]) <= 0) {
      fprintf(stderr, "usage: %s [--steps N (%d)] [--size N (%d)]\n", argv[0], defaults.steps, defaults.size);
      exit(2);
    }
    *target = atoi(argv[++i]);
  }
  return options;
}

[[noreturn]] inline void Fail(const char* file, int line, const char* what, const char* why) {
  fflush(stdout);
  fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, why);
  exit(1);
}

#define APP_CHECK(condition)                                                 \
  do {                                                                       \
    if (!(condition)) app::Fail(__FILE__, __LINE__, #condition, "not true"); \
  } while (0)

#ifdef __CUDACC__
#define CUDA_CHECK(call)                                                                                           \
  do {                                                                                                             \
    cudaError_t cuda_check_error = (call);                                                                         \
    if (cuda_check_error != cudaSuccess) app::Fail(__FILE__, __LINE__, #call, cudaGetErrorName(cuda_check_error)); \
  } while (0)
#define LAUNCH_CHECK() CUDA_CHECK(cudaGetLastError())
#endif

// FNV-1a, 64 bits: one changed bit anywhere changes the printed line.
class Digest {
 public:
  void Add(const void* data, size_t bytes) {
    const unsigned char* p = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) value_ = (value_ ^ p[i]) * 0x100000001b3ull;
  }
  template <typename T>
  void Add(const T& value) {
    Add(&value, sizeof(value));
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325ull;
};

// Whether a and b agree to `tolerance`, relative to the larger of them and 1.
inline bool Near(double a, double b, double tolerance) {
  double scale = std::fmax(1.0, std::fmax(std::fabs(a), std::fabs(b)));
  return std::fabs(a - b) <= tolerance * scale;
}

inline void AppendLine(const char* path, const char* word, int step) {
  int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) Fail(__FILE__, __LINE__, path, "cannot be opened for writing");
  char line[64];
  int length = snprintf(line, sizeof(line), "%s %d\n", word, step);
  if (write(fd, line, length) != length) Fail(__FILE__, __LINE__, path, "cannot be written");
  close(fd);
}

inline bool PausesAt(int step) {
  const char* list = getenv("CR_TEST_PAUSE_AT");
  while (list && *list) {
    char* end;
    long value = strtol(list, &end, 10);
    if (end == list) return false;
    if (value == step) return true;
    list = *end == ',' ? end + 1 : end;
  }
  return false;
}

// The hook; see the top of this file.
inline void Step(int step) {
  const char* const file = getenv("CR_TEST_SYNC_FILE");
  if (file) {
    if (PausesAt(step)) {
      AppendLine(file, "paused", step);
      std::string go = std::string(file) + ".go." + std::to_string(step);
      while (access(go.c_str(), F_OK) != 0) usleep(5000);
    } else {
      AppendLine(file, "step", step);
    }
  }
  const char* const ms = getenv("CR_TEST_STEP_MS");
  if (ms && !(file && access((std::string(file) + ".fast").c_str(), F_OK) == 0)) usleep(1000 * atoi(ms));
}

}  // namespace app

#endif  // CUDA_REMOTE_TESTS_APPS_SUPPORT_APP_H_
