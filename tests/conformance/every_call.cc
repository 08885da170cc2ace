// SPDX-License-Identifier: Apache-2.0
// Makes every handled driver call, each with valid arguments and with wrong ones, and prints a line for each case:
// NUMBER CALL VARIATION<tab>what the call answered and did. every_call.py compares the lines of a native run with those
// under cr-run.
//
// Usage: every_call --list                              the calls by families, and how many cases each has
//        every_call [--skip PATTERN]... FAMILY FROM TO  the cases of that family, from number FROM to before number TO,
//                                                       but those whose name fits a pattern
//
// One process and one context serve many cases, since both cost a real driver much time; a call that changes the
// context leaves the next one a new one. A line begins before its call, so a crash names it. Exit codes: 0 done; 3 the
// context was of no use after the last case: start again with the next one.
#include <cuda.h>
#include <fnmatch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/conformance/fixture.h"

namespace cuda_remote::conformance {
namespace {

constexpr int kStartAgain = 3;
constexpr unsigned kSecondsPerCase = 15;

int List() {
  for (const auto* family : kAllCases) {
    for (const CallCases& call : *family) printf("%s %s %zu\n", call.family, call.symbol, call.variations.size() + 1);
  }
  return 0;
}

// One case; false: the context is of no use any more. `*gone`: the case has destroyed it.
bool RunCase(const CallCases& call, int variation, CUcontext context, CUdevice device, CUdevice other, bool* gone) {
  // Only what follows is the case's: its objects are left to the context's end, since destroying what a call has
  // destroyed is not for drivers.
  Case c(context, device, other, variation);
  std::string text;
  bool good = true;
  try {
    call.run(c);
    good = c.Finish(&text);
  } catch (const NoFixture& missing) {
    text = "no " + missing.call + ": " + NameOf(missing.result);
    good = cuCtxSetCurrent(context) == CUDA_SUCCESS && (c.current_is_gone() || cuCtxSynchronize() == CUDA_SUCCESS);
  }
  *gone = c.current_is_gone();
  printf("%s\n", text.c_str());
  return good;
}

int RunFamily(const char* name, int from, int to, const std::vector<const char*>& skip) {
  if (cuInit(0) != CUDA_SUCCESS) return fprintf(stderr, "every_call: no driver\n"), 2;
  int devices = 0;
  cuDeviceGetCount(&devices);
  CUdevice device = 0, other = 0;
  cuDeviceGet(&device, 0);
  cuDeviceGet(&other, devices > 1 ? 1 : 0);
  int number = 0;
  CUcontext context = nullptr;
  for (const auto* family : kAllCases) {
    for (const CallCases& call : *family) {
      if (strcmp(call.family, name) != 0) break;
      for (int variation = 0; variation <= int(call.variations.size()); ++variation, ++number) {
        if (number < from || number >= to) continue;
        const std::string title =
            std::string(call.symbol) + " " + (variation == 0 ? "valid" : call.variations[variation - 1]);
        const auto fits = [&](const char* pattern) { return fnmatch(pattern, title.c_str(), 0) == 0; };
        if (std::any_of(skip.begin(), skip.end(), fits)) continue;
        printf("%d %s\t", number, title.c_str());
        fflush(stdout);
        alarm(kSecondsPerCase);
        if (context == nullptr) {
          const CUresult created = cuCtxCreate(&context, nullptr, 0, device);
          if (created != CUDA_SUCCESS) {
            printf("no context: %s\n", NameOf(created).c_str());
            return kStartAgain;
          }
        } else {
          cuCtxSetCurrent(context);
        }
        bool gone = false;
        const bool good = RunCase(call, variation, context, device, other, &gone);
        fflush(stdout);
        if (gone) context = nullptr;
        if (!good) _exit(kStartAgain);
      }
      if (context != nullptr && call.changes_context) {
        cuCtxDestroy(context);
        context = nullptr;
      }
    }
  }
  fflush(stdout);
  _exit(0);  // whatever the cases left behind
}

}  // namespace
}  // namespace cuda_remote::conformance

int main(int argc, char** argv) {
  if (argc == 2 && strcmp(argv[1], "--list") == 0) return cuda_remote::conformance::List();
  std::vector<const char*> skip;
  int at = 1;
  for (; at + 1 < argc && strcmp(argv[at], "--skip") == 0; at += 2) skip.push_back(argv[at + 1]);
  if (argc - at != 3) {
    fprintf(stderr, "usage: every_call --list | [--skip PATTERN]... FAMILY FROM TO\n");
    return 2;
  }
  return cuda_remote::conformance::RunFamily(argv[at], atoi(argv[at + 1]), atoi(argv[at + 2]), skip);
}
