// SPDX-License-Identifier: Apache-2.0
// Both libraries are used header-only: Debian ships only shared ones, and our binaries should travel.
#define SPDLOG_FMT_EXTERNAL
#define FMT_HEADER_ONLY

#include "proto/logging/log.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <exception>
#include <memory>
#include <mutex>

namespace cuda_remote::logging {
namespace {

spdlog::level::level_enum Of(Level level) {
  switch (level) {
    case Level::kTrace:
      return spdlog::level::trace;
    case Level::kDebug:
      return spdlog::level::debug;
    case Level::kInfo:
      return spdlog::level::info;
    case Level::kWarn:
      return spdlog::level::warn;
    case Level::kError:
      return spdlog::level::err;
    case Level::kCritical:
      return spdlog::level::critical;
  }
  return spdlog::level::critical;
}

// Writes lines to a descriptor.
class FdSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit FdSink(int fd) : fd_(fd) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    size_t done = 0;
    while (done < line.size()) {
      const ssize_t n = write(fd_, line.data() + done, line.size() - done);
      if (n <= 0) break;
      done += size_t(n);
    }
  }
  void flush_() override {}

 private:
  const int fd_;
};

}  // namespace

void SetUp(const std::string& name, const std::string& pattern, const std::string& level, int fd) {
  const auto logger = std::make_shared<spdlog::logger>(name, std::make_shared<FdSink>(fd));
  logger->set_pattern(pattern);
  spdlog::set_default_logger(logger);
  SetLevel(level);
}

void SetLevel(const std::string& level) { spdlog::set_level(spdlog::level::from_str(level)); }

bool Enabled(Level level) { return spdlog::should_log(Of(level)); }

void Write(Level level, fmt::string_view format, fmt::format_args args) {
  try {
    spdlog::log(Of(level), fmt::vformat(format, args));
  } catch (const std::exception& error) {
    spdlog::error("a line of the log is lost: {}", error.what());
  }
}

}  // namespace cuda_remote::logging
