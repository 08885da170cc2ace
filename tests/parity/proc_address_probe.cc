// SPDX-License-Identifier: Apache-2.0
// Compares our cuGetProcAddress logic with a real driver, entry by entry.
//
// Usage: proc_address_probe [LIBRARY]   (default libcuda.so.1; needs the vendor's driver, so it is run by hand or by
// tests/gpu). Prints every difference and ends with 1 if there is one. Entries newer than the driver are left out.
#define __CUDA_API_VERSION_INTERNAL  // no macros over the symbols' names
#include <cuda.h>
#include <cudaProfiler.h>
#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <set>
#include <string>

#include "proto/api/entry_points.gen.h"

namespace {

using cuda_remote::FindProc;
using cuda_remote::ProcEntry;

// The table with the symbols' names in place of addresses.
#define ENTRY(name, since, per_thread, symbol) {name, since, per_thread != 0, const_cast<char*>(#symbol)},
const ProcEntry kTable[] = {CUDA_REMOTE_PROC_ADDRESSES(ENTRY)};
constexpr size_t kEntries = sizeof kTable / sizeof *kTable;

using GetProcAddress = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const char* path = argc > 1 ? argv[1] : "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  auto init = reinterpret_cast<CUresult (*)(unsigned)>(dlsym(library, "cuInit"));
  auto get_version = reinterpret_cast<CUresult (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  auto ask = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  int driver = 0;
  if (init(0) != CUDA_SUCCESS || get_version(&driver) != CUDA_SUCCESS || ask == nullptr) return 2;
  std::set<int> versions = {driver, 13000, 12000, 11030, 7000, 6000, 1000};
  for (const ProcEntry& entry : kTable) versions.insert({entry.since, entry.since - 10});
  std::set<std::string> names = {"cuNoSuchCall", "cuMemAlloc_v2", "cuLaunchKernel_ptsz", "",
                                 "cudbgGetAPI",  "cuEGLApiInit"};
  for (const ProcEntry& entry : kTable) names.insert(entry.name);
  int differences = 0;
  int printed = 0;
  std::map<std::string, int> by_name;
  long asked = 0;
  for (const std::string& name : names) {
    for (int version : versions) {
      for (cuuint64_t flags : {0, 1, 2, 3, 4}) {
        void* real = reinterpret_cast<void*>(1);
        void* predicted = nullptr;
        auto real_status = static_cast<CUdriverProcAddressQueryResult>(77);
        auto our_status = static_cast<CUdriverProcAddressQueryResult>(77);
        const CUresult real_result = ask(name.c_str(), &real, version, flags, &real_status);
        const CUresult our_result =
            FindProc(kTable, kEntries, name.c_str(), version, flags, driver, &predicted, &our_status);
        void* expected = predicted == nullptr ? nullptr : dlsym(library, static_cast<char*>(predicted));
        ++asked;
        if (real_result == our_result && real_status == our_status &&
            (real == expected || our_result != CUDA_SUCCESS)) {
          continue;
        }
        ++differences;
        if (++by_name[name] <= 3 && printed < 400) {
          ++printed;
          Dl_info found = {};
          const bool known = real != nullptr && real != reinterpret_cast<void*>(1) && dladdr(real, &found) != 0;
          std::printf("%s @%d flags %d: driver %d status %d %p %s; ours %d status %d %s\n", name.c_str(), version,
                      int(flags), int(real_result), int(real_status), real,
                      known && found.dli_sname != nullptr ? found.dli_sname : "-", int(our_result), int(our_status),
                      predicted == nullptr ? "-" : static_cast<char*>(predicted));
        }
      }
    }
  }
  // The first version of the call: what it answers where there is no function.
  auto ask_v1 =
      reinterpret_cast<CUresult (*)(const char*, void**, int, cuuint64_t)>(dlsym(library, "cuGetProcAddress"));
  for (const char* name : {"cuInit", "cuNoSuchCall", "cuLibraryLoadData", "cuGetProcAddress"}) {
    for (int version : {2000, 11030, driver, driver + 10}) {
      void* address = reinterpret_cast<void*>(1);
      const CUresult result = ask_v1(name, &address, version, 0);
      std::printf("first version: %s @%d: %d %p\n", name, version, int(result), address);
    }
  }
  std::printf("%ld questions to driver %d, %d answers differ\n", asked, driver, differences);
  return differences == 0 ? 0 : 1;
}
