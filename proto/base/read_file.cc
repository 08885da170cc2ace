// SPDX-License-Identifier: Apache-2.0
#include "proto/base/read_file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "proto/base/unique_fd.h"

namespace cuda_remote {

bool ReadWholeFile(const std::string& path, std::string* bytes) {
  bytes->clear();
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.ok()) return false;
  char part[1 << 14];
  while (true) {
    const ssize_t got = read(file.get(), part, sizeof(part));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got == 0;
    bytes->append(part, size_t(got));
  }
}

}  // namespace cuda_remote
