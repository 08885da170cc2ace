// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/ghost_locks.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <set>

#include "checkpoint/engine/criu/criu_image.h"
#include "proto/base/hash.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/private_folder.h"

namespace cuda_remote::checkpoint {
namespace {

// Names share these locks. Others than they would have to be removed again.
constexpr size_t kLocks = 1024;
constexpr unsigned kPauseUs = 20000;
constexpr protozero::pbf_tag_type kIdField = 1, kNameField = 6;  // of a RegFileEntry (images/regfile.proto)

}  // namespace

std::vector<std::string> GhostsIn(std::string_view files, std::string_view remaps) {
  std::map<uint32_t, std::string> names;
  ReadFilesImage(files, FileKind::kRegular, [&](protozero::pbf_reader file) {
    uint32_t id = 0;
    std::string name;
    while (file.next()) {
      if (file.tag() == kIdField && file.wire_type() == protozero::pbf_wire_type::varint) {
        id = file.get_uint32();
      } else if (file.tag() == kNameField && file.wire_type() == protozero::pbf_wire_type::length_delimited) {
        name = file.get_string();
      } else {
        file.skip();
      }
    }
    names[id] = name;
  });
  std::set<std::string> ghosts;
  ReadGhosts(remaps, [&](uint32_t file, uint32_t) {
    if (const auto named = names.find(file); named != names.end()) ghosts.insert(named->second);
  });
  return {ghosts.begin(), ghosts.end()};
}

absl::Status GhostLocks::Take(const std::vector<std::string>& ghosts, const std::function<bool()>& cancelled) {
  if (ghosts.empty()) return absl::OkStatus();
  CR_RETURN_IF_ERROR(ToAbsl(CheckFolder(folder_, FolderUse::kMake)));
  // In order: two that need the same ones never wait for each other.
  std::set<size_t> numbers;
  for (const std::string& path : ghosts) {
    const size_t slash = path.rfind('/');
    struct stat facts;
    // The same name in another file system, such as a container's own /dev/shm, is another file.
    const std::string folder = slash == std::string::npos || slash == 0 ? "/" : path.substr(0, slash);
    std::string key = path;
    if (stat(folder.c_str(), &facts) == 0) {
      key = std::to_string(facts.st_dev) + " " + std::to_string(facts.st_ino) + " " +
            path.substr(slash == std::string::npos ? 0 : slash + 1);
    }
    numbers.insert(Hash64Of(key) % kLocks);
  }
  for (const size_t number : numbers) {
    const std::string path = folder_ + "/" + std::to_string(number);
    const int lock = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (lock >= 0) locks_.emplace_back(lock);
    while (lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
      if (cancelled && cancelled()) return absl::CancelledError("interrupted");
      usleep(kPauseUs);
    }
    if (lock < 0) return ErrnoStatus("cannot make " + path + ", by which restores wait for each other");
  }
  return absl::OkStatus();
}

void GhostLocks::Release() { locks_.clear(); }

}  // namespace cuda_remote::checkpoint
