// SPDX-License-Identifier: Apache-2.0
// Lines of a program's log, with levels: logging::Info("session {} of {} started", id, owner). The format strings are
// those of fmt.
//
// The library behind it, spdlog, is only in log.cc: its headers take seconds to compile. Not part of the client
// library.
//
// Thread-safety: all of it, from any thread. Errors: a line that cannot be formatted or written is lost; nothing is
// thrown. Before SetUp lines of level info and above go to standard output.
#ifndef CUDA_REMOTE_PROTO_LOGGING_LOG_H_
#define CUDA_REMOTE_PROTO_LOGGING_LOG_H_

#include <fmt/core.h>

#include <string>

namespace cuda_remote::logging {

enum class Level : int { kTrace, kDebug, kInfo, kWarn, kError, kCritical };

// From now on lines go to `fd`, each with one write, as `pattern` says (spdlog's: %l is the level, %v the text, %P the
// PID, %n `name`). `level`: SetLevel's.
void SetUp(const std::string& name, const std::string& pattern, const std::string& level, int fd = 2);

// The least level that is written: trace, debug, info, warn, error, critical or off (as is any other word).
void SetLevel(const std::string& level);

// Whether lines of this level are written.
bool Enabled(Level level);

// What the functions below call.
void Write(Level level, fmt::string_view format, fmt::format_args args);

template <typename... Args>
void Trace(fmt::format_string<const Args&...> format, const Args&... args) {
  if (Enabled(Level::kTrace)) Write(Level::kTrace, format, fmt::make_format_args(args...));
}
template <typename... Args>
void Debug(fmt::format_string<const Args&...> format, const Args&... args) {
  if (Enabled(Level::kDebug)) Write(Level::kDebug, format, fmt::make_format_args(args...));
}
template <typename... Args>
void Info(fmt::format_string<const Args&...> format, const Args&... args) {
  if (Enabled(Level::kInfo)) Write(Level::kInfo, format, fmt::make_format_args(args...));
}
template <typename... Args>
void Warn(fmt::format_string<const Args&...> format, const Args&... args) {
  if (Enabled(Level::kWarn)) Write(Level::kWarn, format, fmt::make_format_args(args...));
}
template <typename... Args>
void Error(fmt::format_string<const Args&...> format, const Args&... args) {
  if (Enabled(Level::kError)) Write(Level::kError, format, fmt::make_format_args(args...));
}
template <typename... Args>
void Critical(fmt::format_string<const Args&...> format, const Args&... args) {
  if (Enabled(Level::kCritical)) Write(Level::kCritical, format, fmt::make_format_args(args...));
}

}  // namespace cuda_remote::logging

#endif  // CUDA_REMOTE_PROTO_LOGGING_LOG_H_
