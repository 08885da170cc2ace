// SPDX-License-Identifier: Apache-2.0
// Does nothing, and prints when it began to: what starting a program costs that is linked with the driver and never
// uses it.
#include <stdio.h>
#include <time.h>

int main() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  printf("{\"main_ns\": %lld}\n", static_cast<long long>(now.tv_sec) * 1000000000 + now.tv_nsec);
  return 0;
}
