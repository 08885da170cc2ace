// SPDX-License-Identifier: Apache-2.0
// Host and kernels that look at each other's writes in registered memory while a kernel runs, without a CUDA call in
// between: memory of malloc, registered in the middle of a page, and shared memory whose name is gone by then and whose
// size is no whole number of pages. NCCL's transport through shared memory works so. A forked child goes on with what
// was there at the fork.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "tests/apps/support/app.h"

// What the two pass to and fro. The host writes ball to a kernel, the kernel answers with reply.
struct Court {
  volatile unsigned ball;
  volatile unsigned reply;
  unsigned padding[62];
  unsigned data[192];
};

constexpr int kRounds = 6;

__global__ void Play(Court* court, unsigned first) {
  for (unsigned round = 0; round < kRounds; ++round) {
    while (court->ball != first + round) {
    }
    __threadfence_system();
    for (int i = 0; i < 192; ++i) court->data[i] = court->data[i] * 3 + first + round + i;
    __threadfence_system();
    court->reply = first + round;
  }
}

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {12, 2});
  char* const block = static_cast<char*>(malloc(64 << 10));
  Court* const own = reinterpret_cast<Court*>((reinterpret_cast<uintptr_t>(block) + 8191) / 4096 * 4096 + 1024);
  memset(static_cast<void*>(own), 0, sizeof(Court));
  // On the same page, in front.
  auto* const neighbour = reinterpret_cast<std::atomic<unsigned long>*>(own) - 1;
  neighbour->store(0);

  char name[64];
  snprintf(name, sizeof name, "/dev/shm/polling-%d-%p", int(getpid()), static_cast<void*>(block));
  const int fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
  APP_CHECK(fd >= 0 && ftruncate(fd, 4096 + sizeof(Court)) == 0);
  void* const mapping = mmap(nullptr, sizeof(Court), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 4096);
  APP_CHECK(mapping != MAP_FAILED);
  close(fd);
  unlink(name);
  Court* const shared = static_cast<Court*>(mapping);

  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Court* shared_device;
  CUDA_CHECK(cudaHostRegister(shared, sizeof(Court), cudaHostRegisterMapped | cudaHostRegisterPortable));
  CUDA_CHECK(cudaHostGetDevicePointer(&shared_device, shared, 0));

  unsigned expected[2][192] = {};
  app::Digest digest;
  unsigned ball = 0;
  for (int step = 1; step <= options.steps; ++step) {
    std::atomic<bool> stop{false};
    const unsigned long before = neighbour->load();
    unsigned long counted = 0;
    std::thread counter([&] {
      while (!stop.load()) {
        neighbour->store(neighbour->load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        ++counted;
      }
    });
    Court* own_device;
    CUDA_CHECK(cudaHostRegister(own, sizeof(Court), cudaHostRegisterMapped));
    CUDA_CHECK(cudaHostGetDevicePointer(&own_device, own, 0));
    for (int which = 0; which < 2; ++which) {
      Court* const court = which ? shared : own;
      Play<<<1, 1, 0, stream>>>(which ? shared_device : own_device, ball + 1);
      LAUNCH_CHECK();
      for (unsigned round = 0; round < kRounds; ++round) {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        court->ball = ++ball;
        while (court->reply != ball) sched_yield();
        std::atomic_thread_fence(std::memory_order_seq_cst);
        for (int i = 0; i < 192; ++i) {
          expected[which][i] = expected[which][i] * 3 + ball + i;
          APP_CHECK(court->data[i] == expected[which][i]);
        }
      }
      CUDA_CHECK(cudaStreamSynchronize(stream));
      digest.Add(court->data, sizeof court->data);
    }
    if (step % 4 == 0) {
      const unsigned reply = own->reply;
      const pid_t child = fork();
      if (child == 0) {
        own->reply = 7;  // the parent must not see it
        _exit(memcmp(own->data, expected[0], sizeof own->data) == 0 ? 0 : 1);
      }
      int status = 0;
      APP_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
      APP_CHECK(own->reply == reply);
    }
    CUDA_CHECK(cudaHostUnregister(own));
    stop = true;
    counter.join();
    APP_CHECK(neighbour->load() == before + counted);
    APP_CHECK(own->reply == ball - kRounds);
    app::Step(step);
  }
  printf("polling steps=%d balls=%u digest=%016" PRIx64 "\n", options.steps, ball, digest.value());
  CUDA_CHECK(cudaHostUnregister(shared));
  CUDA_CHECK(cudaStreamDestroy(stream));
  return 0;
}
