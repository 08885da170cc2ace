// SPDX-License-Identifier: Apache-2.0
#include "proto/driverabi/export_tables.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "proto/driverabi/context_storage.h"
#include "proto/driverabi/md2.h"

namespace cuda_remote::driverabi {
namespace {

Host g_host;

using Word = const void*;

// Order of kTables below.
enum TableIndex {
  kDriverCheck,
  kRuntime,
  kTools,
  kCurrentContext,
  kStorage,
  kContextChecks,
  kModules,
  kStreams,
  kLayout,
  kTableCount
};

constexpr const char* kTableNames[kTableCount] = {"d4082055", "6bd5fb6c", "a094798c", "42d85a81", "c693336e",
                                                  "263e8860", "6e163fbe", "21318c60", "1734dc26"};

// Every word that nothing was seen to call. Says so once, by table and word.
template <int table, int word>
CUresult Unused() {
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    char line[128];
    snprintf(line, sizeof(line), "unsupported call: word %d of private table %s", word, kTableNames[table]);
    g_host.log(line);
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}

// A table's function as the program sees it: the function itself, or in between who wants to know of the call.
template <int table, int word, auto function>
struct Traced;

template <int table, int word, typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Traced<table, word, function> {
  static Result Call(Arguments... arguments) {
    if (!g_host.trace || g_host.trace->on->load(std::memory_order_relaxed) == 0) return function(arguments...);
    static const uint32_t number = [] {
      char name[64];
      snprintf(name, sizeof(name), "private table %s[%d]", kTableNames[table], word);
      return g_host.trace->number(name);
    }();
    Result result{};
    auto body = [&]() -> CUresult {
      result = function(arguments...);
      // Not all functions return a CUresult; the others cannot fail in a way that shows.
      if constexpr (std::is_same_v<Result, CUresult>) return result;
      return CUDA_SUCCESS;
    };
    g_host.trace->run(
        number, [](void* call) { return (*static_cast<decltype(body)*>(call))(); }, &body);
    return result;
  }
};

template <int table, size_t words>
struct Table {
  Word word[words];
  Table() : Table(std::make_index_sequence<words>()) { word[0] = reinterpret_cast<Word>(words * sizeof(Word)); }
  template <int index, auto function>
  void Set() {
    word[index] = reinterpret_cast<Word>(&Traced<table, index, function>::Call);
  }

 private:
  template <size_t... index>
  explicit Table(std::index_sequence<index...>)
      : word{reinterpret_cast<Word>(&Traced<table, int(index), &Unused<table, int(index)>>::Call)...} {}
};

struct Tables {
  Table<kDriverCheck, 3> driver_check;
  Table<kRuntime, 13> runtime;
  Table<kTools, 7> tools;
  Table<kCurrentContext, 3> current_context;
  Table<kStorage, 4> storage;
  Table<kContextChecks, 15> context_checks;
  Table<kModules, 99> modules;
  Table<kStreams, 93> streams;
  Table<kLayout, 17> layout;
  Tables();
};

const Tables& TheTables() {
  static const Tables* const tables = new Tables;
  return *tables;
}

// Appends a value's bytes, little-endian as the machine has them.
template <typename T>
void Append(std::string* message, T value) {
  message->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// The runtime asks three times at its start, with its own version plus 0, 1 and 2, computes the answer itself, and
// refuses to work (error 103) if they differ.
CUresult DriverCheck(uint32_t version, uint64_t unix_seconds, uint64_t result[2]) {
  const uint32_t kind = version % 10;
  if (kind == 0 || kind == 1) {
    result[0] = kind == 0 ? 0x3341181C03CB675C : 0x1841181C03CB675C;
    result[1] = 0x8ED383AA1F4CD1E8;
    return CUDA_SUCCESS;
  }
  static constexpr unsigned char kKey[] = {0x14, 0x6A, 0xDD, 0xAE, 0x53, 0xA9, 0xA7, 0x52,
                                           0xAA, 0x08, 0x41, 0x36, 0x0B, 0xF5, 0x5A, 0x9F};
  int driver_version = 0, devices = 0;
  if (const CUresult error = g_host.driver_version(&driver_version); error != CUDA_SUCCESS) return error;
  if (const CUresult error = g_host.device_count(&devices); error != CUDA_SUCCESS) return error;
  std::string message;
  Append(&message, uint32_t(driver_version));
  Append(&message, version);
  Append(&message, uint32_t(getpid()));
  Append(&message, uint32_t(pthread_self()));
  Append(&message, reinterpret_cast<uint64_t>(TheTables().runtime.word));
  Append(&message, reinterpret_cast<uint64_t>(TheTables().driver_check.word));
  Append(&message,
         reinterpret_cast<uint64_t>(TheTables().driver_check.word[1]));  // this function, as the runtime sees it
  Append(&message, unix_seconds);
  for (CUdevice device = 0; device < devices; ++device) {
    CUuuid uuid{};
    if (const CUresult error = g_host.device_uuid(device, &uuid); error != CUDA_SUCCESS) return error;
    Append(&message, uuid);
    for (const CUdevice_attribute attribute :
         {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID}) {
      int value = 0;
      if (const CUresult error = g_host.device_attribute(&value, attribute, device); error != CUDA_SUCCESS)
        return error;
      Append(&message, int32_t(value));
    }
  }
  const Md2Digest digest = HmacMd2({reinterpret_cast<const char*>(kKey), sizeof(kKey)}, message);
  std::memcpy(result, digest.data(), digest.size());
  return CUDA_SUCCESS;
}

CUresult PrimaryContext(CUcontext* context, CUdevice device) { return g_host.primary_context(context, device); }

// Scratch memory of the tools' hooks: the runtime only checks that it is zero.
template <size_t bytes>
CUresult ScratchBuffer(void** buffer, size_t* size) {
  static unsigned char scratch[bytes];
  *buffer = scratch;
  *size = bytes;
  return CUDA_SUCCESS;
}

// Words of the tools' table that the runtime calls without looking at what they return: profilers and debuggers put
// something there. Refused as the other unused words, but not worth a line in every program's output.
CUresult NoTools() { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult CurrentContext(CUcontext* context) {
  *context = g_host.current_context();
  return CUDA_SUCCESS;
}

CUresult OrCurrent(CUcontext* context) {
  if (!*context) *context = g_host.current_context();
  return *context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult Put(CUcontext context, void* key, void* value, StorageDestructor destructor) {
  if (const CUresult error = OrCurrent(&context); error != CUDA_SUCCESS) return error;
  return StoragePut(context, key, value, destructor);
}

CUresult Delete(CUcontext context, void* key) {
  if (const CUresult error = OrCurrent(&context); error != CUDA_SUCCESS) return error;
  return StorageDelete(context, key);
}

CUresult Get(void** value, CUcontext context, void* key) {
  if (const CUresult error = OrCurrent(&context); error != CUDA_SUCCESS) return error;
  return StorageGet(context, key, value);
}

CUresult ContextCheck(CUcontext, uint32_t* out, void**) {
  *out = 0;
  return CUDA_SUCCESS;
}

CUresult NothingToCheck() { return CUDA_SUCCESS; }

// Returns 1 where the other tables return CUDA_SUCCESS; cuFFT takes it for success.
int VisitFunctions(CUcontext, CUmodule module, void (*visit)(void* user, CUfunction function), void* user) {
  std::vector<CUfunction> functions;
  if (g_host.module_functions(module, &functions) != CUDA_SUCCESS) return 0;
  for (CUfunction function : functions) visit(user, function);
  return 1;
}

CUresult IsLive(CUcontext context, uint64_t* live) {
  *live = context != nullptr;
  return CUDA_SUCCESS;
}

// The object behind a stream is opaque to its user; the stream itself does. The default stream needs something not
// null.
char g_default_stream;

CUresult StreamObject(CUcontext, CUstream stream, void** object) {
  *object = stream ? static_cast<void*>(stream) : &g_default_stream;
  return CUDA_SUCCESS;
}

CUresult StreamValue(CUcontext context, void* object, uint64_t* value) {
  const CUstream stream = object == &g_default_stream ? nullptr : static_cast<CUstream>(object);
  return g_host.real->stream_value(context, stream, value);
}

// The caller gives both arrays back with the function below.
CUresult PairLayout(uint8_t** clusters, uint8_t** numbers) {
  std::vector<uint8_t> from[2];
  if (const CUresult error = g_host.real->pair_layout(&from[0], &from[1]); error != CUDA_SUCCESS) return error;
  uint8_t** const to[2] = {clusters, numbers};
  for (int i = 0; i < 2; ++i) {
    *to[i] = static_cast<uint8_t*>(malloc(from[i].size() + 1));
    if (*to[i]) std::memcpy(*to[i], from[i].data(), from[i].size());
  }
  return *clusters && *numbers ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult FreePairLayout(uint8_t* clusters, uint8_t* numbers) {
  free(clusters);
  free(numbers);
  return CUDA_SUCCESS;
}

Tables::Tables() {
  driver_check.Set<1, &DriverCheck>();
  runtime.Set<2, &PrimaryContext>();
  tools.Set<1, &NoTools>();
  tools.Set<3, &NoTools>();
  tools.Set<4, &NoTools>();
  tools.Set<2, &ScratchBuffer<0x400>>();
  tools.Set<6, &ScratchBuffer<0x0E>>();
  current_context.Set<2, &CurrentContext>();
  // This table has no size word: its first word is a function already.
  storage.Set<0, &Put>();
  storage.Set<1, &Delete>();
  storage.Set<2, &Get>();
  context_checks.Set<2, &ContextCheck>();
  context_checks.Set<3, &NothingToCheck>();
  modules.Set<7, &VisitFunctions>();
  streams.Set<4, &IsLive>();
  streams.Set<51, &StreamObject>();
  streams.Set<39, &StreamValue>();
  layout.Set<4, &PairLayout>();
  layout.Set<13, &FreePairLayout>();
}

struct Entry {
  TableId id;
  Word (*table)();
};

constexpr Entry kTables[kTableCount] = {
    {{0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2},
     [] { return Word(TheTables().driver_check.word); }},
    {{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9},
     [] { return Word(TheTables().runtime.word); }},
    {{0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a, 0x66},
     [] { return Word(TheTables().tools.word); }},
    {{0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc},
     [] { return Word(TheTables().current_context.word); }},
    {{0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93},
     [] { return Word(TheTables().storage.word); }},
    {{0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa, 0x7e},
     [] { return Word(TheTables().context_checks.word); }},
    {{0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e},
     [] { return Word(TheTables().modules.word); }},
    {kStreamTable, [] { return g_host.real ? Word(TheTables().streams.word) : nullptr; }},
    {kLayoutTable, [] { return g_host.real ? Word(TheTables().layout.word) : nullptr; }},
};

}  // namespace

void SetHost(const Host& host) { g_host = host; }

CUresult GetExportTable(const void** table, const CUuuid* id) {
  if (!table || !id) return CUDA_ERROR_INVALID_VALUE;
  *table = nullptr;
  for (const Entry& entry : kTables) {
    if (std::memcmp(entry.id.data(), id->bytes, entry.id.size()) != 0) continue;
    *table = entry.table();
    return *table ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
  }
  return CUDA_ERROR_NOT_FOUND;
}

void ContextDestroyed(CUcontext context) { StorageContextDestroyed(context); }

}  // namespace cuda_remote::driverabi
