// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/criu_facts.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "checkpoint/engine/criu/criu.h"
#include "proto/base/hash.h"
#include "proto/base/proc.h"
#include "proto/base/read_file.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kFolder[] = "/run";
constexpr char kCriusName[] = "/run/criu.kdat";
constexpr char kOurNames[] = "criu-facts-";
// It is a structure of about 1 KiB.
constexpr size_t kMostBytes = 64 << 10;
constexpr unsigned kMostSeconds = 20;

std::string FirstLine(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// When process 1 started, in ticks after the system did: a container that is started again may have other privileges.
std::string StartOfFirstProcess() {
  const uint64_t start = StatOf(1).start;
  return start == 0 ? "" : std::to_string(start);
}

// A file with something in it that only root can have written.
bool IsKept(const std::string& path) {
  struct stat facts;
  return lstat(path.c_str(), &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_uid == 0 &&
         (facts.st_mode & 022) == 0 && facts.st_size > 0;
}

void RemoveOthers(const std::string& kept) {
  DIR* const list = opendir(kFolder);
  if (!list) return;
  while (const dirent* const entry = readdir(list)) {
    const std::string name = entry->d_name;
    if (name.compare(0, sizeof(kOurNames) - 1, kOurNames) == 0 && kept != std::string(kFolder) + "/" + name) {
      unlinkat(dirfd(list), entry->d_name, 0);
    }
  }
  closedir(list);
}

// Becomes `criu check`, which looks at everything first. What it says does not matter: features that it misses are
// facts, too.
int Look(const std::string& criu) {
  alarm(kMostSeconds);
  execl(criu.c_str(), criu.c_str(), "check", static_cast<char*>(nullptr));
  return 127;
}

// Lets CRIU look where /run is a tmpfs. Afterwards that is gone, with the namespace.
bool LetCriuLook(const std::string& criu, std::string* found) {
  if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("tmpfs", kFolder, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=1m,mode=0700") != 0) {
    return false;
  }
  const pid_t looking = fork();
  if (looking == 0) _exit(Look(criu));
  if (looking < 0 || waitpid(looking, nullptr, 0) != looking) return false;
  return ReadWholeFile(kCriusName, found) && !found->empty() && found->size() <= kMostBytes;
}

// In a process of its own. `folder`: /run, as it is outside. `name`: in it, empty where CRIU keeps the facts itself.
int Make(const std::string& criu, int folder, const std::string& name) {
  // The tool waits for this process, also while its own session gives way to others.
  setsid();
  // Nobody is to wait for this process: no end of a pipe, no lock.
  const int null = open("/dev/null", O_RDWR);
  for (int fd : {0, 1, 2}) dup2(null, fd);
  folder = dup2(folder, 3);
  syscall(SYS_close_range, 4u, ~0u, 0u);
  // The tools block the signal that ends whoever is stuck.
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (name.empty()) return Look(criu);
  alarm(kMostSeconds);
  std::string found;
  if (!LetCriuLook(criu, &found)) return 1;
  const std::string unfinished = name + "." + std::to_string(getpid());
  const int out = openat(folder, unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  const bool written = out >= 0 && write(out, found.data(), found.size()) == ssize_t(found.size());
  if (out >= 0) close(out);
  if (written && renameat(folder, unfinished.c_str(), folder, name.c_str()) == 0) return 0;
  unlinkat(folder, unfinished.c_str(), 0);
  return 1;
}

}  // namespace

std::string CriuFactsPath(const std::string& criu) {
  struct statfs system;
  struct stat program;
  if (statfs(kFolder, &system) != 0 || system.f_type == TMPFS_MAGIC || stat(criu.c_str(), &program) != 0) return {};
  const std::string boot = FirstLine("/proc/sys/kernel/random/boot_id"), start = StartOfFirstProcess();
  if (boot.empty() || start.empty()) return {};
  const std::string of = criu + " " + std::to_string(program.st_size) + " " + std::to_string(program.st_mtime);
  return std::string(kFolder) + "/" + kOurNames + boot + "-" + start + "-" + ToHex(HashOf(of));
}

void ShowCriuFacts(const std::string& path) {
  // Shown already, or CRIU's own.
  struct stat facts;
  if (path.empty() || !IsKept(path) || (lstat(kCriusName, &facts) == 0 && facts.st_size > 0)) return;
  // Something must be there that it can be seen at. Any other CRIU takes an empty file for an old one.
  const int place = open(kCriusName, O_RDONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (place < 0) return;
  close(place);
  mount(path.c_str(), kCriusName, nullptr, MS_BIND, nullptr);
}

CriuFacts::CriuFacts() {
  const absl::StatusOr<std::string> criu = FindCriu();
  if (geteuid() != 0 || !criu.ok()) return;
  const std::string path = CriuFactsPath(*criu);
  struct statfs system;
  const bool crius = path.empty() && statfs(kFolder, &system) == 0 && system.f_type == TMPFS_MAGIC;
  if (crius ? IsKept(kCriusName) : path.empty() || IsKept(path)) return;
  if (!crius) RemoveOthers(path);
  const int folder = open(kFolder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  fflush(nullptr);
  maker_ = fork();
  if (maker_ == 0) _exit(Make(*criu, folder, crius ? "" : path.substr(sizeof(kFolder))));
  close(folder);
}

CriuFacts::~CriuFacts() {
  if (maker_ > 0) waitpid(maker_, nullptr, 0);
}

}  // namespace cuda_remote::checkpoint
