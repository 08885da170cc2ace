// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/shared_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/hold.h"
#include "proto/base/mappings.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kSharedMemory[] = "/dev/shm/";
// Where programs put what nobody keeps. Mapped files elsewhere are data, which a restart finds as they are.
constexpr const char* kTemporary[] = {kSharedMemory, "/tmp/", "/var/tmp/", "/run/"};
// Of a session of Open MPI: /tmp/ompi.HOST.USER/pid.NUMBER where mpirun is, jf.NUMBER where its daemons are.
constexpr char kOpenMpi[] = "/ompi.";
constexpr const char* kSessions[] = {"/pid.", "/jf."};
constexpr char kSocket[] = "socket:[";
constexpr int kInodeColumn = 6;  // of /proc/PID/net/unix; the path is the last one
// How /proc ends the name of a file that has it no more.
constexpr char kDeleted[] = " (deleted)";
// CRIU's link to a file that has lost the name under which it was opened; and ours, which has the number of the shared
// file and a random one behind it.
constexpr char kLink[] = "link_remap.", kOwnLink[] = "link_remap.cr";
constexpr protozero::pbf_tag_type kNameField = 6;  // of a RegFileEntry (images/regfile.proto)
constexpr size_t kCopyBytes = size_t{1} << 20;
// How long one dump waits for another one that makes links in the same folder. Anybody may lock /dev/shm, and the job
// stands still meanwhile, so it must end.
constexpr int kLinkWaitMs = 30000, kLinkPollMs = 5;

bool BeginsWith(const std::string& text, const std::string& begin) { return text.compare(0, begin.size(), begin) == 0; }

bool IsTemporary(const std::string& path) {
  const char* const own = getenv("TMPDIR");
  if (own && own[0] == '/' && BeginsWith(path, own + std::string("/"))) return true;
  return std::any_of(std::begin(kTemporary), std::end(kTemporary),
                     [&](const char* folder) { return BeginsWith(path, folder); });
}

// The folder of the Open MPI session that `path` is in; empty if it is in none.
std::string SessionOf(const std::string& path) {
  const size_t at = path.find(kOpenMpi);
  if (at == std::string::npos) return "";
  for (const char* const begin : kSessions) {
    const size_t session = path.find(begin, at + 1);
    const size_t end = session == std::string::npos ? session : path.find('/', session + 1);
    if (end != std::string::npos) return path.substr(0, end);
  }
  return "";
}

void ForEachEntry(const std::string& folder, const std::function<void(const std::string&)>& body) {
  DIR* const list = opendir(folder.c_str());
  if (!list) return;
  while (const dirent* const entry = readdir(list)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") body(name);
  }
  closedir(list);
}

void AddTree(const std::string& folder, std::map<std::string, struct stat>* found) {
  ForEachEntry(folder, [&](const std::string& name) {
    const std::string path = folder + "/" + name;
    struct stat facts;
    if (lstat(path.c_str(), &facts) != 0) return;
    if (S_ISREG(facts.st_mode) || S_ISFIFO(facts.st_mode) || S_ISDIR(facts.st_mode)) (*found)[path] = facts;
    if (S_ISDIR(facts.st_mode)) AddTree(path, found);
  });
}

// The name of a file that /proc gives is `path` only if the file there is still the same.
bool IsAt(const std::string& path, uint64_t inode, struct stat* facts) {
  return lstat(path.c_str(), facts) == 0 && (S_ISREG(facts->st_mode) || S_ISFIFO(facts->st_mode)) &&
         facts->st_ino == inode;
}

std::string FolderOf(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }
std::string LeafOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// A link of CRIU's, not one of ours.
bool IsCriuLink(const std::string& leaf) {
  return BeginsWith(leaf, kLink) && leaf.size() > strlen(kLink) &&
         leaf.find_first_not_of("0123456789", strlen(kLink)) == std::string::npos;
}

// `path`, or if that is the name of a deleted file, another one that the file has in the same folder. Empty: none. A
// link of CRIU's is none: the dump that made it takes it away.
std::string PresentName(const std::string& path, uint64_t inode) {
  if (path.size() <= strlen(kDeleted) || path.substr(path.size() - strlen(kDeleted)) != kDeleted) return path;
  const std::string folder = FolderOf(path);
  std::string found;
  struct stat facts;
  ForEachEntry(folder, [&](const std::string& name) {
    if (found.empty() && !IsCriuLink(name) && IsAt(folder + name, inode, &facts)) found = folder + name;
  });
  return found;
}

// The number of the shared file that a link of ours is to; -1: it is none.
int LinkedFile(const std::string& path) {
  const std::string leaf = LeafOf(path);
  if (!BeginsWith(leaf, kOwnLink)) return -1;
  char* end;
  const long number = strtol(leaf.c_str() + strlen(kOwnLink), &end, 10);
  return *end == '.' && number >= 0 && number <= INT32_MAX ? int(number) : -1;
}

// Our links among the open files in CRIU's files.img.
std::set<std::string> LinksIn(std::string_view image) {
  std::set<std::string> links;
  ReadFilesImage(image, FileKind::kRegular, [&](protozero::pbf_reader file) {
    while (file.next(kNameField)) {
      const std::string path = file.get_string();
      if (LinkedFile(path) >= 0) links.insert(path);
    }
  });
  return links;
}

// The mapped files of a process: the path, the inode, whether it is shared and may be written, and a link of /proc's to
// it.
void ForEachMappedFile(
    const std::string& process, const std::vector<Mapping>& mappings,
    const std::function<void(const std::string& path, uint64_t inode, bool shared, const std::string& link)>& body) {
  for (const Mapping& mapping : mappings) {
    if (mapping.inode == 0 || mapping.name.empty() || mapping.name[0] != '/') continue;
    body(mapping.name, mapping.inode, mapping.shared && mapping.writable, MapFile(process, mapping));
  }
}

// Likewise its open files.
void ForEachDescriptor(
    const std::string& process,
    const std::function<void(const std::string& path, uint64_t inode, const std::string& link)>& body) {
  ForEachEntry(process + "/fd", [&](const std::string& name) {
    const std::string path = process + "/fd/" + name, target = ReadLink(path);
    struct stat facts;
    if (BeginsWith(target, "/") && stat(path.c_str(), &facts) == 0) body(target, facts.st_ino, path);
  });
}

// The paths of the processes' Unix sockets in folders for temporary files. CRIU makes the sockets again, not the
// folders.
std::set<std::string> SocketsOf(const std::map<int, std::vector<Mapping>>& processes) {
  std::set<std::string> inodes, paths;
  for (const auto& [pid, mappings] : processes) {
    const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
    ForEachEntry(folder, [&](const std::string& name) {
      const std::string text = ReadLink(folder + "/" + name);
      if (BeginsWith(text, kSocket)) inodes.insert(text.substr(strlen(kSocket), text.size() - strlen(kSocket) - 1));
    });
  }
  if (inodes.empty()) return paths;
  // All of them are in the job's network.
  std::ifstream list("/proc/" + std::to_string(processes.begin()->first) + "/net/unix");
  for (std::string line; std::getline(list, line);) {
    std::istringstream words(line);
    std::string word, inode, path;
    for (int i = 0; i < kInodeColumn; ++i) words >> word;
    if (words >> inode && std::getline(words >> std::ws, path) && IsTemporary(path) && inodes.count(inode) != 0)
      paths.insert(path);
  }
  return paths;
}

// Whether a link of /proc's leads to another file system, where other files have the same numbers: that of a
// container's own /dev/shm, for instance.
bool IsElsewhere(const std::string& link, const struct stat& facts) {
  struct stat other;
  return stat(link.c_str(), &other) == 0 && other.st_dev != facts.st_dev;
}

// A process that has the file open or mapped; 0 if there is none.
int UserOf(const std::string& path, const struct stat& facts) {
  int user = 0;
  for (const int pid : AllProcesses()) {
    const auto look = [&](const std::string& used, uint64_t number, const std::string& link) {
      if (used == path && number == facts.st_ino && !IsElsewhere(link, facts)) user = pid;
    };
    const std::string process = "/proc/" + std::to_string(pid);
    ForEachMappedFile(
        process, MappingsOf(process),
        [&](const std::string& used, uint64_t number, bool, const std::string& link) { look(used, number, link); });
    ForEachDescriptor(process, look);
    if (user != 0) break;
  }
  return user;
}

void Describe(const std::string& path, const struct stat& facts, FileFacts* out) {
  out->set_path(path);
  out->set_mode(facts.st_mode);
  out->set_user(facts.st_uid);
  out->set_group(facts.st_gid);
}

bool Restore(const FileFacts& facts, int (*make)(const char*, mode_t)) {
  const char* const path = facts.path().c_str();
  return make(path, 0700) == 0 && lchown(path, facts.user(), facts.group()) == 0 &&
         chmod(path, facts.mode() & 07777) == 0;
}

ssize_t ReadFully(int fd, std::string* buffer) {
  size_t got = 0;
  while (got < buffer->size()) {
    const ssize_t now = read(fd, &(*buffer)[got], buffer->size() - got);
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) return -1;
    if (now == 0) break;
    got += size_t(now);
  }
  return ssize_t(got);
}

bool SameContents(int a, int b) {
  std::string one(kCopyBytes, 0), other(kCopyBytes, 0);
  while (true) {
    const ssize_t got = ReadFully(a, &one);
    if (got < 0 || got != ReadFully(b, &other) || memcmp(one.data(), other.data(), size_t(got)) != 0) return false;
    if (got == 0) return true;
  }
}

// Leaves holes where there are only zeros.
bool CopyContents(int from, int to) {
  std::string buffer(kCopyBytes, 0);
  off_t at = 0;
  while (true) {
    const ssize_t got = ReadFully(from, &buffer);
    if (got < 0) return false;
    if (got == 0) return ftruncate(to, at) == 0;
    const bool zeros = std::all_of(buffer.begin(), buffer.begin() + got, [](char byte) { return byte == 0; });
    if (!zeros && pwrite(to, buffer.data(), size_t(got), at) != got) return false;
    at += got;
  }
}

// What is there is of the kind and of the user that it was. Anybody may make something in /tmp and /dev/shm.
bool IsAsSaved(const FileFacts& facts, mode_t kind, const struct stat& now) {
  return (now.st_mode & S_IFMT) == kind && now.st_uid == facts.user();
}

absl::Status NotAsSaved(const FileFacts& facts, const struct stat& now) {
  return absl::FailedPreconditionError(facts.path() +
                                       ", through which the job shares memory, is now another one, of user " +
                                       std::to_string(now.st_uid) + ": remove it");
}

// One that has contents.
absl::Status RestoreFile(const FileFacts& facts, int saved) {
  const std::string& path = facts.path();
  struct stat now;
  if (lstat(path.c_str(), &now) == 0) {
    const int there = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    const bool same = there >= 0 && IsAsSaved(facts, S_IFREG, now) && (now.st_mode & 07777) == (facts.mode() & 07777) &&
                      SameContents(saved, there);
    if (there >= 0) close(there);
    if (same) return absl::OkStatus();
    if (const int user = UserOf(path, now); user != 0) {
      return absl::FailedPreconditionError("the job shares memory through " + path +
                                           ", which has changed and is used by process " + std::to_string(user) +
                                           ": end that process first");
    }
    if (unlink(path.c_str()) != 0 || lseek(saved, 0, SEEK_SET) != 0) return ErrnoStatus("cannot replace " + path);
  }
  const int made = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  const bool ok = made >= 0 && CopyContents(saved, made) && fchown(made, facts.user(), facts.group()) == 0 &&
                  fchmod(made, facts.mode() & 07777) == 0;
  const absl::Status status =
      ok ? absl::OkStatus() : ErrnoStatus("cannot make " + path + ", through which the job shares memory");
  if (made >= 0) close(made);
  return status;
}

}  // namespace

void FindSharedFiles(const std::map<int, std::vector<Mapping>>& processes, const std::string& own_folder,
                     ProcessFacts* facts) {
  std::map<std::string, struct stat> found;
  std::map<std::string, std::set<std::string>> former;
  std::vector<std::string> sessions;
  struct stat file;
  for (const auto& [pid, mappings] : processes) {
    const std::string process = "/proc/" + std::to_string(pid);
    const auto add = [&](const std::string& opened, uint64_t inode, bool wanted) {
      if (!IsTemporary(opened)) return;
      const std::string path = PresentName(opened, inode);
      const std::string session = SessionOf(path);
      if (!IsTemporary(path) || (!own_folder.empty() && BeginsWith(path, own_folder + "/"))) return;
      if ((!wanted && session.empty()) || !IsAt(path, inode, &file)) return;
      found[path] = file;
      if (path != opened) former[path].insert(opened.substr(0, opened.size() - strlen(kDeleted)));
      if (!session.empty()) sessions.push_back(session);
    };
    ForEachMappedFile(process, mappings, [&](const std::string& path, uint64_t inode, bool shared, const std::string&) {
      add(path, inode, shared);
    });
    ForEachDescriptor(process, [&](const std::string& path, uint64_t inode, const std::string&) {
      add(path, inode, BeginsWith(path, kSharedMemory));
    });
  }
  for (const std::string& session : std::set<std::string>(sessions.begin(), sessions.end())) AddTree(session, &found);
  std::set<std::string> known;
  for (const FileFacts& one : facts->shared_files()) known.insert(one.path());
  for (const FileFacts& one : facts->shared_folders()) known.insert(one.path());
  // What others have as well is not the job's to bring back. Looking at all processes takes time, and nobody has it
  // while the job stands still.
  if (std::any_of(found.begin(), found.end(), [&](const auto& one) { return known.count(one.first) == 0; })) {
    for (const int pid : AllProcesses()) {
      if (processes.count(pid) != 0) continue;
      const auto leave_out = [&](const std::string& opened, uint64_t inode, const std::string& link) {
        const std::string path = IsTemporary(opened) ? PresentName(opened, inode) : opened;
        const auto at = found.find(path);
        if (at != found.end() && at->second.st_ino == inode && !IsElsewhere(link, at->second)) found.erase(at);
      };
      const std::string process = "/proc/" + std::to_string(pid);
      ForEachMappedFile(process, MappingsOf(process),
                        [&](const std::string& path, uint64_t inode, bool, const std::string& link) {
                          leave_out(path, inode, link);
                        });
      ForEachDescriptor(process, leave_out);
    }
  }
  // The folders in which they are, first those further up. Temporary folders themselves are everywhere.
  std::map<std::string, struct stat> folders;
  std::set<std::string> paths = SocketsOf(processes);
  for (const auto& [path, ignored] : found) paths.insert(path);
  for (const std::string& path : paths) {
    if (!own_folder.empty() && BeginsWith(path, own_folder + "/")) continue;
    for (size_t slash = path.rfind('/'); slash > 0 && slash != std::string::npos; slash = path.rfind('/', slash - 1)) {
      const std::string folder = path.substr(0, slash);
      if (!IsTemporary(folder) || !folders.emplace(folder, (struct stat){}).second) continue;
      if (lstat(folder.c_str(), &folders[folder]) != 0) folders.erase(folder);
    }
  }
  facts->clear_shared_folders();
  facts->clear_shared_files();
  for (const auto& [path, status] : found) {
    if (S_ISDIR(status.st_mode)) folders[path] = status;
  }
  for (const auto& [path, status] : folders) Describe(path, status, facts->add_shared_folders());
  for (const auto& [path, status] : found) {
    // A line for each, for cr-hold.
    if (S_ISDIR(status.st_mode) || path.find('\n') != std::string::npos) continue;
    FileFacts* const shared = facts->add_shared_files();
    Describe(path, status, shared);
    for (const std::string& name : former[path]) shared->add_former(name);
  }
}

std::string SharedFilesToCopy(const ProcessFacts& facts, int image) {
  std::string text = std::to_string(image) + "\n";
  for (const FileFacts& file : facts.shared_files()) {
    text += (S_ISREG(file.mode()) ? file.path() : "") + "\n";
  }
  return text;
}

void RemoveGhosts(const std::vector<std::string>& paths) {
  constexpr char kGhost[] = ".ghost";
  std::map<std::string, std::set<std::string>> names;  // by folder
  for (const std::string& path : paths) {
    const size_t slash = path.rfind('/');
    if (slash != std::string::npos) names[path.substr(0, slash + 1)].insert(path.substr(slash + 1));
  }
  for (const auto& [folder, known] : names) {
    ForEachEntry(folder, [&, &folder = folder, &known = known](const std::string& name) {
      const size_t mark = name.rfind(".cr.");
      const size_t end = name.size() - std::min(name.size(), strlen(kGhost));
      if (mark == std::string::npos || end <= mark || name.substr(end) != kGhost) return;
      const std::string number = name.substr(mark + 4, end - mark - 4);
      if (number.find_first_not_of("0123456789abcdef") != std::string::npos) return;
      struct stat facts;
      if (known.count(name.substr(0, mark)) == 0 || lstat((folder + name).c_str(), &facts) != 0) return;
      if (UserOf(folder + name, facts) == 0) unlink((folder + name).c_str());
    });
  }
}

LinkLocks::LinkLocks(const ProcessFacts& facts) {
  std::map<std::string, std::set<std::pair<dev_t, ino_t>>> folders;  // in order, so that no two wait for each other
  for (const FileFacts& file : facts.shared_files()) {
    struct stat now;
    if (file.former_size() == 0 || lstat(file.path().c_str(), &now) != 0) continue;
    for (const std::string& name : file.former()) folders[FolderOf(name)].emplace(now.st_dev, now.st_ino);
  }
  for (const auto& [folder, files] : folders) {
    const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) continue;  // CRIU says so
    locks_.emplace_back(fd);
    for (int waited = 0; flock(fd, LOCK_EX | LOCK_NB) != 0 && waited < kLinkWaitMs; waited += kLinkPollMs) {
      usleep(kLinkPollMs * 1000);
    }
    ForEachEntry(folder, [&, &folder = folder, &files = files](const std::string& name) {
      struct stat link;
      if (!IsCriuLink(name) || lstat((folder + name).c_str(), &link) != 0) return;
      if (files.count({link.st_dev, link.st_ino}) != 0) unlink((folder + name).c_str());
    });
  }
}

absl::Status SettleLinks(const ProcessFacts& facts, const std::string& image_folder) {
  const std::string path = image_folder + "/files.img";
  std::string image, links;
  // What is there and cannot be read is CRIU's matter.
  if (!ReadImageFile(image_folder + "/remap-fpath.img", &links) || !ReadImageFile(path, &image))
    return absl::OkStatus();
  std::map<uint32_t, std::string> names;  // of open files, by CRIU's numbers
  ReadFilesImage(image, FileKind::kRegular, [&](protozero::pbf_reader file) {
    uint32_t number = 0;
    std::string name;
    while (file.next()) {
      if (file.tag() == 1 && file.wire_type() == protozero::pbf_wire_type::varint) {
        number = file.get_uint32();
      } else if (file.tag() == kNameField && file.wire_type() == protozero::pbf_wire_type::length_delimited) {
        name = file.get_string();
      } else {
        file.skip();
      }
    }
    names[number] = name;
  });
  std::map<std::string, int> former;  // the number of a shared file, by a name that it had
  for (int i = 0; i < facts.shared_files_size(); ++i) {
    for (const std::string& name : facts.shared_files(i).former()) former[name] = i;
  }
  std::random_device random;
  std::map<std::string, std::string> changes;
  std::string unknown;
  ReadLinks(links, [&](uint32_t file, uint32_t link) {
    const std::string& name = names[link];
    if (!BeginsWith(LeafOf(name), kLink)) return;
    unlink(name.c_str());  // CRIU leaves it where the job is to be stopped
    const auto shared = former.find(names[file]);
    if (shared == former.end()) {
      unknown = names[file];
    } else {
      changes[name] = FolderOf(name) + kOwnLink + std::to_string(shared->second) + "." + std::to_string(random());
    }
  });
  if (!unknown.empty()) {
    return absl::FailedPreconditionError("the job uses " + unknown +
                                         ", which was deleted and still has another name, so that it cannot be "
                                         "restored; close it before the checkpoint");
  }
  if (changes.empty()) return absl::OkStatus();
  const bool changed = ChangeFiles(&image, [&](std::string_view name, FileChange* change) {
    const auto found = changes.find(std::string(name));
    if (found != changes.end()) change->path = found->second;
    return found != changes.end();
  });
  return changed ? WriteImageFile(path, image) : absl::OkStatus();
}

absl::Status RestoreSharedFiles(const ProcessFacts& facts, int image, std::string_view files) {
  struct stat now;
  for (const FileFacts& folder : facts.shared_folders()) {
    const bool there = lstat(folder.path().c_str(), &now) == 0;
    if (there ? IsAsSaved(folder, S_IFDIR, now) : Restore(folder, mkdir)) continue;
    return there ? NotAsSaved(folder, now) : ErrnoStatus("cannot make the folder " + folder.path());
  }
  for (int i = 0; i < facts.shared_files_size(); ++i) {
    const FileFacts& file = facts.shared_files(i);
    if (S_ISFIFO(file.mode())) {
      const bool there = lstat(file.path().c_str(), &now) == 0;
      if (there ? IsAsSaved(file, S_IFIFO, now) : Restore(file, mkfifo)) continue;
      return there ? NotAsSaved(file, now) : ErrnoStatus("cannot make " + file.path());
    }
    const UniqueFd saved(openat(image, (kSharedFileName + std::to_string(i)).c_str(), O_RDONLY | O_CLOEXEC));
    // It was gone when the processes stood still: then none of them needs it.
    if (!saved.ok() && errno == ENOENT) continue;
    if (!saved.ok()) return ErrnoStatus("cannot read the saved contents of " + file.path());
    CR_RETURN_IF_ERROR(RestoreFile(file, saved.get()));
  }
  for (const std::string& path : LinksIn(files)) {
    const int number = LinkedFile(path);
    unlink(path.c_str());  // what a restore that was killed has left
    if (number < facts.shared_files_size() && link(facts.shared_files(number).path().c_str(), path.c_str()) == 0)
      continue;
    return ErrnoStatus("cannot make " + path + ", by which CRIU finds a file of the job");
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::checkpoint
