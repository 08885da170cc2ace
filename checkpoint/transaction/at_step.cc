// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/at_step.h"

#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <string>

namespace cuda_remote::checkpoint {
namespace {

constexpr int kPauseUs = 2000;
constexpr int kMostPauses = 30000;

void Note(const std::string& name) {
  static int number = 0;
  const char* const path = getenv("CR_TEST_STEPS");
  if (!path) return;
  ++number;
  std::ofstream(path, std::ios::app) << number << " " << name << std::endl;
  const char* const stop = getenv("CR_TEST_STOP_AT");
  if (!stop || (atoi(stop) != number && name != stop)) return;
  const std::string go = std::string(path) + ".go";
  for (int pause = 0; pause < kMostPauses && access(go.c_str(), F_OK) != 0; ++pause) usleep(kPauseUs);
}

}  // namespace

void AtStep(const char* name) { Note(name); }

void AtStep(const char* name, size_t index, size_t count) {
  Note(std::string(name) + " " + std::to_string(index + 1) + "/" + std::to_string(count));
}

}  // namespace cuda_remote::checkpoint
