// SPDX-License-Identifier: Apache-2.0
#include "host/move_state.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/proc.h"
#include "proto/base/text.h"

namespace cuda_remote::host {
namespace {

constexpr time_t kKeptSeconds = 24 * 3600;

}  // namespace

std::string MoveName(const std::string& id) { return HexBytes(id); }

bool BeginMoveState(const std::string& folder, const std::string& id, const char* state) {
  return symlink(state, (folder + "/" + MoveName(id)).c_str()) == 0;
}

bool SetMoveState(const std::string& folder, const std::string& id, const char* state) {
  const std::string path = folder + "/" + MoveName(id), fresh = path + ".new";
  unlink(fresh.c_str());
  return symlink(state, fresh.c_str()) == 0 && rename(fresh.c_str(), path.c_str()) == 0;
}

std::string MoveStateOf(const std::string& folder, const std::string& id) {
  return ReadLink(folder + "/" + MoveName(id));
}

void CleanMoveStates(const std::string& folder) {
  DIR* const list = opendir(folder.c_str());
  while (const dirent* const entry = list ? readdir(list) : nullptr) {
    struct stat facts;
    if (entry->d_name[0] == '.' || fstatat(dirfd(list), entry->d_name, &facts, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (facts.st_mtime + kKeptSeconds < UnixMs() / 1000) unlinkat(dirfd(list), entry->d_name, 0);
  }
  if (list) closedir(list);
}

}  // namespace cuda_remote::host
