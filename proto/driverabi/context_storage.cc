// SPDX-License-Identifier: Apache-2.0
#include "proto/driverabi/context_storage.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "proto/threads/mutex.h"

namespace cuda_remote::driverabi {
namespace {

struct Value {
  void* value;
  StorageDestructor destructor;
};

struct Storage {
  SharedMutex mutex;
  std::map<std::pair<CUcontext, void*>, Value, std::less<>> values CR_GUARDED_BY(mutex);
  // Changes with every Put, Delete and destroyed context; a thread's remembered answer is good while it stands still.
  std::atomic<uint64_t> generation{1};
};

// Never destroyed: the runtime asks from its exit handlers.
Storage& TheStorage() {
  static Storage* const storage = new Storage;
  return *storage;
}

struct Remembered {
  uint64_t generation = 0;
  CUcontext context = nullptr;
  void* key = nullptr;
  void* value = nullptr;
};
thread_local Remembered t_last;

}  // namespace

CUresult StoragePut(CUcontext context, void* key, void* value, StorageDestructor destructor) {
  Storage& storage = TheStorage();
  WriterLock lock(&storage.mutex);
  if (!storage.values.emplace(std::make_pair(context, key), Value{value, destructor}).second) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  storage.generation.fetch_add(1, std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult StorageGet(CUcontext context, void* key, void** value) {
  Storage& storage = TheStorage();
  Remembered& last = t_last;
  if (last.generation == storage.generation.load(std::memory_order_acquire) && last.context == context &&
      last.key == key) {
    *value = last.value;
    return CUDA_SUCCESS;
  }
  ReaderLock lock(&storage.mutex);
  const auto it = storage.values.find(std::make_pair(context, key));
  if (it == storage.values.end()) return CUDA_ERROR_INVALID_HANDLE;
  last = {storage.generation.load(std::memory_order_relaxed), context, key, it->second.value};
  *value = last.value;
  return CUDA_SUCCESS;
}

CUresult StorageDelete(CUcontext context, void* key) {
  Storage& storage = TheStorage();
  WriterLock lock(&storage.mutex);
  if (storage.values.erase(std::make_pair(context, key)) == 0) return CUDA_ERROR_INVALID_HANDLE;
  storage.generation.fetch_add(1, std::memory_order_release);
  return CUDA_SUCCESS;
}

void StorageContextDestroyed(CUcontext context) {
  Storage& storage = TheStorage();
  std::vector<std::pair<void*, Value>> doomed;
  {
    WriterLock lock(&storage.mutex);
    auto it = storage.values.lower_bound(std::make_pair(context, static_cast<void*>(nullptr)));
    while (it != storage.values.end() && it->first.first == context) {
      doomed.emplace_back(it->first.second, it->second);
      it = storage.values.erase(it);
    }
    storage.generation.fetch_add(1, std::memory_order_release);
  }
  for (const auto& [key, value] : doomed) {
    if (value.destructor) value.destructor(context, key, value.value);
  }
}

}  // namespace cuda_remote::driverabi
