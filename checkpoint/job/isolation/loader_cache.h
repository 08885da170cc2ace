// SPDX-License-Identifier: Apache-2.0
// The loader's cache, /etc/ld.so.cache: which libraries it names, and a copy of it that names more.
//
// Pure functions on the file's bytes. They know the format that glibc writes since 2.32, and the one before it, which
// has the same part behind an older one; false for anything else.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_LOADER_CACHE_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_LOADER_CACHE_H_

#include <string>
#include <string_view>
#include <vector>

namespace cuda_remote::checkpoint {

struct CachedLibrary {
  std::string name;  // as programs ask for it: libcuda.so.1
  std::string path;
};

// The libraries for programs of this machine's kind (x86-64, 64 bits), in the file's order.
bool ReadLoaderCache(std::string_view bytes, std::vector<CachedLibrary>* libraries);

// `bytes` with `more` in it, each found before any other library of its name.
bool AddToLoaderCache(std::string_view bytes, const std::vector<CachedLibrary>& more, std::string* result);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_LOADER_CACHE_H_
