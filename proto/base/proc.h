// SPDX-License-Identifier: Apache-2.0
// What the kernel says of processes in /proc, and small readers for it.
//
// A process may end while it is looked at: what is not there is empty, 0 or left out. Thread-safe.
#ifndef CUDA_REMOTE_PROTO_BASE_PROC_H_
#define CUDA_REMOTE_PROTO_BASE_PROC_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_remote {

// Where a symbolic link leads, not followed further; empty if there is none, or it cannot be read.
std::string ReadLink(const std::string& path);

// The folder of this program's file, with a slash behind it; "./" if the system does not say.
std::string OwnFolder();

// Whether the text is one or more decimal digits, and few enough for an int.
bool IsNumber(std::string_view text);

// All bytes of a file from its beginning, wherever its descriptor stands. False if it cannot be read.
bool ReadAll(int fd, std::string* bytes);

// The numbers of all processes that this process sees in /proc, in the order of the kernel.
std::vector<int> AllProcesses();
// The numbers of a process's threads or open descriptors. `what`: "task" or "fd".
std::vector<int> NumbersIn(int pid, const char* what);

// Fields of /proc/PID/stat. They stand behind the process's name, which may have anything in it.
struct ProcessStat {
  char state = 0;  // as ps shows it; 0: there is no such process
  int parent = 0, group = 0, session = 0;
  int terminal = 0;    // its device; 0: none
  int foreground = 0;  // the terminal's foreground group
  bool exits = false;  // its first thread has begun to end
  uint64_t start = 0;  // in clock ticks since the machine began
  uint64_t stack = 0;  // where the stack begins: another number for each program that the process executes
  uint64_t arguments = 0, arguments_end = 0;  // where its arguments lie
};
ProcessStat StatOf(int pid);
// The same of the text of such a file.
ProcessStat ParseStat(const std::string& text);

// The name of the process's first thread, as ps shows it: of the program, unless that changed it.
std::string CommOf(int pid);

// What is behind `name` and a colon in /proc/PID/status, without the space before it; empty if there is no such line.
std::string StatusField(int pid, const std::string& name);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_PROC_H_
