// SPDX-License-Identifier: Apache-2.0
#include "proto/base/proc.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "proto/base/read_file.h"

namespace cuda_remote {
namespace {

std::vector<int> NumbersOf(const std::string& folder) {
  std::vector<int> numbers;
  DIR* const list = opendir(folder.c_str());
  while (const dirent* const entry = list ? readdir(list) : nullptr) {
    if (IsNumber(entry->d_name)) numbers.push_back(atoi(entry->d_name));
  }
  if (list) closedir(list);
  return numbers;
}

std::string FolderOf(int pid) { return "/proc/" + std::to_string(pid); }

}  // namespace

std::string ReadLink(const std::string& path) {
  char target[4096];
  const ssize_t length = readlink(path.c_str(), target, sizeof(target));
  return length > 0 ? std::string(target, size_t(length)) : std::string();
}

std::string OwnFolder() {
  const std::string program = ReadLink("/proc/self/exe");
  return program.empty() ? "./" : program.substr(0, program.rfind('/') + 1);
}

bool IsNumber(std::string_view text) {
  return !text.empty() && text.size() < 10 && text.find_first_not_of("0123456789") == std::string_view::npos;
}

bool ReadAll(int fd, std::string* bytes) {
  bytes->clear();
  char part[1 << 14];
  while (true) {
    const ssize_t got = pread(fd, part, sizeof(part), off_t(bytes->size()));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got == 0;
    bytes->append(part, size_t(got));
  }
}

std::vector<int> AllProcesses() { return NumbersOf("/proc"); }

std::vector<int> NumbersIn(int pid, const char* what) { return NumbersOf(FolderOf(pid) + "/" + what); }

ProcessStat StatOf(int pid) {
  std::string text;
  ReadWholeFile(FolderOf(pid) + "/stat", &text);
  return ParseStat(text);
}

ProcessStat ParseStat(const std::string& text) {
  ProcessStat stat;
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return stat;
  const size_t first = text.find_first_not_of(' ', name_end + 1);
  if (first == std::string::npos) return stat;
  const char* at = text.c_str() + first;
  stat.state = *at++;
  // By the numbers that proc(5) gives the fields: the state is the third.
  constexpr size_t kFields = 50;
  uint64_t fields[kFields] = {};
  for (size_t number = 4; number < kFields; ++number) {
    char* end = nullptr;
    fields[number] = strtoull(at, &end, 10);
    if (end == at) break;
    at = end;
  }
  stat.parent = int(fields[4]);
  stat.group = int(fields[5]);
  stat.session = int(fields[6]);
  stat.terminal = int(fields[7]);
  stat.foreground = int(fields[8]);
  constexpr uint64_t kExiting = 4;  // PF_EXITING of the kernel's flags
  stat.exits = (fields[9] & kExiting) != 0;
  stat.start = fields[22];
  stat.stack = fields[28];
  stat.arguments = fields[48];
  stat.arguments_end = fields[49];
  return stat;
}

std::string CommOf(int pid) {
  std::string name;
  ReadWholeFile(FolderOf(pid) + "/comm", &name);
  return name.substr(0, name.find('\n'));
}

std::string StatusField(int pid, const std::string& name) {
  std::string text;
  ReadWholeFile(FolderOf(pid) + "/status", &text);
  text = "\n" + text;
  const std::string begin = "\n" + name + ":";
  const size_t found = text.find(begin);
  const size_t at = found == std::string::npos ? found : text.find_first_not_of(" \t", found + begin.size());
  return at == std::string::npos ? std::string() : text.substr(at, text.find('\n', at) - at);
}

}  // namespace cuda_remote
