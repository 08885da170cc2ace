// SPDX-License-Identifier: Apache-2.0
// The C library's functions that this library has in their place. Each does what the C library's does, with another
// environment or another name.
#include <alloca.h>
#include <dlfcn.h>
#include <limits.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "client/preload/environment.h"
#include "proto/base/environment.h"

extern "C" {
extern char** environ;
}

namespace cuda_remote::preload {
namespace {

// The function of this name that would be called without this library. Also works before this library's constructor
// has run, in that of another one.
class Next {
 public:
  constexpr explicit Next(const char* name) : name_(name) {}

  void* Get() {
    void* found = found_.load(std::memory_order_relaxed);
    if (found) return found;
    found = dlsym(RTLD_NEXT, name_);
    found_.store(found, std::memory_order_relaxed);
    return found;
  }

 private:
  const char* const name_;
  std::atomic<void*> found_ = nullptr;
};

Next next_execve("execve"), next_execvpe("execvpe"), next_fexecve("fexecve"), next_posix_spawn("posix_spawn"),
    next_posix_spawnp("posix_spawnp"), next_system("system"), next_popen("popen"), next_dlopen("dlopen"),
    next_dlmopen("dlmopen");
#define NEXT(function) reinterpret_cast<decltype(&(function))>(next_##function.Get())

// This library by the name that the loader was told, which is in the folder "lib" of the job's folder, and what is
// beside it there. Empty: that is not an absolute path, or the program has more rights than its caller; nothing is
// changed.
char g_library[PATH_MAX], g_driver[PATH_MAX], g_nvml[PATH_MAX];

const char* LibraryPath() {
  if (g_library[0]) return g_library;
  Dl_info facts;
  if (HasMoreRightsThanCaller()) return nullptr;
  if (dladdr(g_library, &facts) == 0 || facts.dli_fname[0] != '/') return nullptr;
  const size_t folder = size_t(strrchr(facts.dli_fname, '/') + 1 - facts.dli_fname), length = strlen(facts.dli_fname);
  constexpr char kDriver[] = "libcuda.so.1", kNvml[] = "libnvidia-ml.so.1";
  if (length >= sizeof(g_library) || folder + sizeof(kNvml) > sizeof(g_nvml)) return nullptr;
  memcpy(g_driver, facts.dli_fname, folder);
  memcpy(g_nvml, facts.dli_fname, folder);
  memcpy(g_driver + folder, kDriver, sizeof(kDriver));
  memcpy(g_nvml + folder, kNvml, sizeof(kNvml));
  memcpy(g_library, facts.dli_fname, length + 1);
  return g_library;
}

// What cannot be done in a child after vfork. The list is all of the above.
__attribute__((constructor)) void LookUp() {
  LibraryPath();
  Next* const all[] = {&next_execve, &next_execvpe, &next_fexecve, &next_posix_spawn, &next_posix_spawnp,
                       &next_system, &next_popen,   &next_dlopen,  &next_dlmopen};
  for (Next* const next : all) next->Get();
}

template <typename Call>
int WithEnvironment(char* const* variables, Call call) {
  const char* const library = LibraryPath();
  if (!library) return call(variables);
  const Environment environment(variables, library);
  if (!environment.changes()) return call(variables);
  return call(environment.Fill(static_cast<char*>(alloca(environment.bytes()))));
}

// Whether `name`, a path or not, is `library`, of any version: libcuda.so, libcuda.so.1, libcuda.so.580.65.06.
bool IsLibrary(const char* name, const char* library) {
  const char* const slash = strrchr(name, '/');
  const char* const file = slash ? slash + 1 : name;
  const size_t length = strlen(library);
  return strncmp(file, library, length) == 0 && (file[length] == '\0' || file[length] == '.');
}

const char* OursFor(const char* name) {
  if (!name || !LibraryPath()) return name;
  return IsLibrary(name, "libcuda.so") ? g_driver : IsLibrary(name, "libnvidia-ml.so") ? g_nvml : name;
}

// A shell's word for `value`.
void AddQuoted(const char* value, size_t length, Text* text) {
  text->Add("'");
  for (const char* const end = value + length; value < end; ++value) {
    if (*value == '\'') {
      text->Add("'\\''");
    } else {
      text->Add(value, 1);
    }
  }
  text->Add("'");
}

// system and popen give the shell this process's variables, which other threads may be reading: so the shell itself
// sets those that it needs. Null: none. For free().
char* WithVariables(const char* command) {
  const char* const library = LibraryPath();
  if (!library) return nullptr;
  const Environment environment(environ, library);
  if (!environment.changes()) return nullptr;
  char* const variables = static_cast<char*>(malloc(environment.bytes()));
  if (!variables) return nullptr;
  char** const filled = environment.Fill(variables);
  char* whole = nullptr;
  // First counted, then written.
  for (Text text;; text = {whole}) {
    for (char* const* variable = filled; *variable; ++variable) {
      const char* value = ValueOf(*variable, kPreload);
      if (!value) value = ValueOf(*variable, kPath);
      if (!value) continue;
      text.Add("export ");
      text.Add(*variable, size_t(value - *variable));
      AddQuoted(value, strlen(value), &text);
      text.Add("; ");
    }
    text.Add(command, strlen(command) + 1);
    if (whole) break;
    whole = static_cast<char*>(malloc(text.bytes));
    if (!whole) break;
  }
  free(variables);
  return whole;
}

// The arguments of execl and the like: `first` and what `list` has, with the null behind the last one.
size_t CountArguments(const char* first, va_list& list) {
  size_t count = 1;
  for (const char* argument = first; argument; argument = va_arg(list, const char*)) ++count;
  return count;
}

void FillArguments(const char* first, va_list& list, char** into) {
  *into = const_cast<char*>(first);
  while (*into) *++into = va_arg(list, char*);
}

}  // namespace
}  // namespace cuda_remote::preload

using namespace cuda_remote::preload;

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

// Arguments behind `first`, as an array that lives as long as the function that uses this. `list` is behind the null.
#define GATHER(list, first, arguments)                                                               \
  va_start(list, first);                                                                             \
  char** const arguments = static_cast<char**>(alloca(CountArguments(first, list) * sizeof(char*))); \
  va_end(list);                                                                                      \
  va_start(list, first);                                                                             \
  FillArguments(first, list, arguments)

// For FindThisJob (proto/folder/this_job.h): "lib/libcuda-remote-preload.so" in the job's folder. Null: unknown.
EXPORTED const char* cuda_remote_preloaded() { return LibraryPath(); }

EXPORTED int execve(const char* path, char* const arguments[], char* const variables[]) noexcept {
  return WithEnvironment(variables, [&](char* const* with) { return NEXT(execve)(path, arguments, with); });
}

EXPORTED int execvpe(const char* file, char* const arguments[], char* const variables[]) noexcept {
  return WithEnvironment(variables, [&](char* const* with) { return NEXT(execvpe)(file, arguments, with); });
}

EXPORTED int fexecve(int fd, char* const arguments[], char* const variables[]) noexcept {
  return WithEnvironment(variables, [&](char* const* with) { return NEXT(fexecve)(fd, arguments, with); });
}

// Older C libraries do not have it.
EXPORTED int execveat(int folder, const char* path, char* const arguments[], char* const variables[],
                      int flags) noexcept {
  return WithEnvironment(
      variables, [&](char* const* with) { return int(syscall(SYS_execveat, folder, path, arguments, with, flags)); });
}

EXPORTED int execv(const char* path, char* const arguments[]) noexcept { return execve(path, arguments, environ); }

EXPORTED int execvp(const char* file, char* const arguments[]) noexcept { return execvpe(file, arguments, environ); }

EXPORTED int execl(const char* path, const char* first, ...) noexcept {
  va_list list;
  GATHER(list, first, arguments);
  va_end(list);
  return execve(path, arguments, environ);
}

EXPORTED int execlp(const char* file, const char* first, ...) noexcept {
  va_list list;
  GATHER(list, first, arguments);
  va_end(list);
  return execvpe(file, arguments, environ);
}

EXPORTED int execle(const char* path, const char* first, ...) noexcept {
  va_list list;
  GATHER(list, first, arguments);
  char* const* const variables = va_arg(list, char* const*);
  va_end(list);
  return execve(path, arguments, variables);
}

EXPORTED int posix_spawn(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,
                         const posix_spawnattr_t* attributes, char* const arguments[], char* const variables[]) {
  return WithEnvironment(
      variables, [&](char* const* with) { return NEXT(posix_spawn)(pid, path, actions, attributes, arguments, with); });
}

EXPORTED int posix_spawnp(pid_t* pid, const char* file, const posix_spawn_file_actions_t* actions,
                          const posix_spawnattr_t* attributes, char* const arguments[], char* const variables[]) {
  return WithEnvironment(variables, [&](char* const* with) {
    return NEXT(posix_spawnp)(pid, file, actions, attributes, arguments, with);
  });
}

EXPORTED int system(const char* command) {
  char* const whole = command ? WithVariables(command) : nullptr;
  const int status = NEXT(system)(whole ? whole : command);
  free(whole);
  return status;
}

EXPORTED FILE* popen(const char* command, const char* mode) {
  char* const whole = WithVariables(command);
  FILE* const stream = NEXT(popen)(whole ? whole : command, mode);
  free(whole);
  return stream;
}

// These must end in a jump, so that the C library sees the caller: whose RUNPATH it searches, and in whose namespace it
// loads. The compiler makes one of a last call where it optimizes (BUILD.bazel), and preload_test sees to it.
EXPORTED void* dlopen(const char* name, int flags) noexcept { return NEXT(dlopen)(OursFor(name), flags); }

EXPORTED void* dlmopen(Lmid_t space, const char* name, int flags) noexcept {
  return NEXT(dlmopen)(space, OursFor(name), flags);
}

}  // extern "C"
