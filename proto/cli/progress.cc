// SPDX-License-Identifier: Apache-2.0
#include "proto/cli/progress.h"

#include <stdio.h>
#include <unistd.h>

#include "proto/base/text.h"

namespace cuda_remote::cli {
namespace {

constexpr double kBarEvery = 0.1, kLineEvery = 10;  // seconds
constexpr int kBarWidth = 30;

}  // namespace

Progress::Progress(std::string what, bool quiet)
    : what_(std::move(what)), quiet_(quiet), terminal_(isatty(2) != 0), shown_(start_) {}

Progress::~Progress() {
  if (line_open_) fputs("\n", stderr);
}

void Progress::Update(uint64_t done, uint64_t total) {
  if (quiet_) return;
  const Moment now = Now();
  const double since = std::chrono::duration<double>(now - shown_).count();
  if (since < (terminal_ ? kBarEvery : kLineEvery) && !(line_open_ && done >= total)) return;
  shown_ = now;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double rate = seconds > 0 ? double(done) / seconds : 0;
  const double share = total > 0 ? double(done) / double(total) : 1;
  const double left = rate > 0 && done < total ? double(total - done) / rate : 0;
  const std::string facts = ByteText(double(done)) + " of " + ByteText(double(total)) + ", " + ByteText(rate) + "/s";
  if (!terminal_) {
    fprintf(stderr, "%s: %s, %.0f s left\n", what_.c_str(), facts.c_str(), left);
    return;
  }
  std::string bar(size_t(share * kBarWidth), '#');
  bar.resize(kBarWidth, '.');
  fprintf(stderr, "\r%s [%s] %s, %.0f s left \x1b[K", what_.c_str(), bar.c_str(), facts.c_str(), left);
  line_open_ = true;
}

}  // namespace cuda_remote::cli
