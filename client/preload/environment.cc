// SPDX-License-Identifier: Apache-2.0
#include "client/preload/environment.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

namespace cuda_remote::preload {
namespace {

constexpr char kJob[] = "CUDA_REMOTE_JOB_DIR=";
constexpr char kInJob[] = "/lib";
constexpr char kNone[] = "";

bool Is(const char* text, size_t length, const char* wanted) {
  return strlen(wanted) == length && strncmp(text, wanted, length) == 0;
}

// Calls `entry` with each entry of LD_PRELOAD's value.
template <typename Entry>
void ForEachEntry(const char* value, Entry entry) {
  while (*value) {
    const size_t length = strcspn(value, ": ");
    if (length > 0) entry(value, length);
    value += length;
    if (*value) ++value;
  }
}

}  // namespace

void Text::Add(const char* text, size_t length) {
  if (at) memcpy(at + bytes, text, length);
  bytes += length;
}

void Text::Add(const char* text) { Add(text, strlen(text)); }

Environment::Environment(char* const* variables, const char* library)
    : variables_(variables), library_(library), folder_length_(size_t(strrchr(library, '/') - library)) {
  readable_ = faccessat(AT_FDCWD, library, R_OK, AT_EACCESS) == 0;
  const char *preload = nullptr, *path = nullptr;
  for (; variables && variables[count_]; ++count_) {
    const char* const variable = variables[count_];
    if (const char* const value = ValueOf(variable, kPreload)) preload = value;
    if (const char* const value = ValueOf(variable, kPath)) path = value;
    const char* const job = ValueOf(variable, kJob);
    const size_t length = job ? strlen(job) : 0;
    const bool this_job = length + strlen(kInJob) == folder_length_ && strncmp(library, job, length) == 0;
    if (length > 0 && !this_job) return;
  }
  bool preloaded = false;
  ForEachEntry(preload ? preload : kNone,
               [&](const char* entry, size_t length) { preloaded = preloaded || Is(entry, length, library_); });
  changes_ = preloaded != readable_ || (readable_ && !IsFirst(path));
  if (!changes_) return;
  Text counted;
  PutPreload(preload, &counted);
  PutPath(path, &counted);
  bytes_ = (count_ + 3) * sizeof(char*) + sizeof(kPreload) + sizeof(kPath) + counted.bytes;
}

void Environment::PutPreload(const char* value, Text* text) const {
  const size_t before = text->bytes;
  const auto add = [&](const char* entry, size_t length) {
    if (text->bytes > before) text->Add(":", 1);
    text->Add(entry, length);
  };
  // At the end: some libraries must be the first ones (AddressSanitizer's).
  ForEachEntry(value ? value : kNone, [&](const char* entry, size_t length) {
    if (!Is(entry, length, library_)) add(entry, length);
  });
  if (readable_) add(library_, strlen(library_));
}

bool Environment::IsFirst(const char* path) const {
  return path && strncmp(path, library_, folder_length_) == 0 && strchr(":;", path[folder_length_]);
}

void Environment::PutPath(const char* value, Text* text) const {
  const bool add = readable_ && !IsFirst(value);
  if (add) text->Add(library_, folder_length_);
  if (add && value && *value) text->Add(":", 1);
  if (value) text->Add(value);
}

char** Environment::Fill(char* space) const {
  char** const variables = reinterpret_cast<char**>(space);
  Text text{space + (count_ + 3) * sizeof(char*)};
  const char *preload = nullptr, *path = nullptr;
  size_t kept = 0;
  for (size_t i = 0; i < count_; ++i) {
    const char* const before_preload = preload;
    const char* const before_path = path;
    if (const char* const value = ValueOf(variables_[i], kPreload)) preload = value;
    if (const char* const value = ValueOf(variables_[i], kPath)) path = value;
    if (preload == before_preload && path == before_path) variables[kept++] = variables_[i];
  }
  const auto begin = [&](const char* name) {
    variables[kept++] = text.at + text.bytes;
    text.Add(name);
  };
  if (readable_ || preload) {
    begin(kPreload);
    PutPreload(preload, &text);
    text.Add(kNone, 1);
  }
  if (readable_ || path) {
    begin(kPath);
    PutPath(path, &text);
    text.Add(kNone, 1);
  }
  variables[kept] = nullptr;
  return variables;
}

}  // namespace cuda_remote::preload
