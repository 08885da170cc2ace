// SPDX-License-Identifier: Apache-2.0
#include "client/core/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/core/log_buffer.h"

namespace cuda_remote::client {

void LogLine(const char* format, ...) {
  const int saved_errno = errno;
  static constexpr char kPrefix[] = "cuda-remote: ";
  constexpr size_t kPrefixBytes = sizeof(kPrefix) - 1;
  char line[1024];
  memcpy(line, kPrefix, kPrefixBytes);
  va_list args;
  va_start(args, format);
  // One byte stays free for the newline.
  const size_t room = sizeof(line) - kPrefixBytes - 1;
  const int wanted = vsnprintf(line + kPrefixBytes, room, format, args);
  va_end(args);
  size_t length = kPrefixBytes;
  if (wanted > 0) length += size_t(wanted) < room ? size_t(wanted) : room - 1;
  LogBuffer::Add(line + kPrefixBytes, length - kPrefixBytes);
  line[length++] = '\n';
  for (size_t written = 0; written < length;) {
    const ssize_t n = write(STDERR_FILENO, line + written, length - written);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;  // nobody listens: there is no better place to say so
    written += size_t(n);
  }
  errno = saved_errno;
}

}  // namespace cuda_remote::client
