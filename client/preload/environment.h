// SPDX-License-Identifier: Apache-2.0
// What a program's environment needs, so that the program finds our libraries and has the preloaded one, too.
//
// Everything here may be called in a child between fork or vfork and exec, and in a signal handler: it allocates
// nothing, takes no lock and changes nothing. libc only, without the C++ runtime.
#ifndef CUDA_REMOTE_CLIENT_PRELOAD_ENVIRONMENT_H_
#define CUDA_REMOTE_CLIENT_PRELOAD_ENVIRONMENT_H_

#include <stddef.h>
#include <string.h>

namespace cuda_remote::preload {

// The variables that are changed, with the "=" of an environment's text.
inline constexpr char kPreload[] = "LD_PRELOAD=", kPath[] = "LD_LIBRARY_PATH=";

// The value of `variable` if it begins with `name`, which ends with "="; else null.
template <size_t kLength>
const char* ValueOf(const char* variable, const char (&name)[kLength]) {
  return strncmp(variable, name, kLength - 1) == 0 ? variable + kLength - 1 : nullptr;
}

// Text that is written behind `at`, or only counted if that is null.
struct Text {
  char* at = nullptr;
  size_t bytes = 0;

  void Add(const char* text, size_t length);
  void Add(const char* text);
};

// `variables` (NAME=VALUE, ends with a null; null: none) with `library`, a path, in LD_PRELOAD, and its folder first in
// LD_LIBRARY_PATH. They stay as they are if they name another job's folder (CUDA_REMOTE_JOB_DIR). If this user may not
// read the library, it is taken out of LD_PRELOAD: the loader would complain in each program.
class Environment {
 public:
  // Both must outlive this object.
  Environment(char* const* variables, const char* library);

  // Whether anything has to be changed.
  bool changes() const { return changes_; }
  // How many bytes Fill writes.
  size_t bytes() const { return bytes_; }
  // Writes the new environment to `space`, which is aligned for pointers, and returns it. It points into `space` and to
  // the texts of `variables`.
  char** Fill(char* space) const;

 private:
  // Whether the library's folder is the first one of this LD_LIBRARY_PATH (null: none).
  bool IsFirst(const char* path) const;
  // The values of the two variables, which were `value` (null: none).
  void PutPreload(const char* value, Text* text) const;
  void PutPath(const char* value, Text* text) const;

  char* const* const variables_;
  const char* const library_;
  const size_t folder_length_;
  size_t count_ = 0, bytes_ = 0;
  bool readable_ = false, changes_ = false;
};

}  // namespace cuda_remote::preload

#endif  // CUDA_REMOTE_CLIENT_PRELOAD_ENVIRONMENT_H_
