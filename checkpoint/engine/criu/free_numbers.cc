// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/free_numbers.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <set>

#include "absl/status/status.h"
#include "checkpoint/engine/criu/criu_image.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr uint32_t kTreeMagic = 0x50273030;
// Of a PstreeEntry (CRIU's images/pstree.proto).
constexpr protozero::pbf_tag_type kProcessField = 1, kGroupField = 3, kSessionField = 4, kThreadField = 5;
// Below this one, the kernel gives no number a second time.
constexpr int64_t kLowest = 300;
// What is left free behind a number of the job's, besides the helpers for ended leaders of sessions: CRIU makes at most
// one for each process, with the first free numbers.
constexpr int64_t kGap = 100;
// How many numbers CRIU's own processes have then, if possible and at least. It makes some dozens.
constexpr int64_t kRoom = 1000, kLeastRoom = 100;

struct Numbers {
  std::set<int64_t> used;
  int64_t processes = 0;
};

// False if `image` is no pstree.img.
bool ReadTree(std::string_view image, Numbers* numbers) {
  bool complete = true;
  const bool read = ReadEntries(image, kTreeMagic, [&](protozero::pbf_reader process) {
    ++numbers->processes;
    bool numbered = false;
    while (process.next()) {
      const protozero::pbf_tag_type tag = process.tag();
      if (tag != kProcessField && tag != kGroupField && tag != kSessionField && tag != kThreadField) {
        process.skip();
        continue;
      }
      for (const uint64_t number : NumbersIn(&process)) {
        numbers->used.insert(int64_t(uint32_t(number)));
        numbered = numbered || (tag == kProcessField && number != 0);
      }
    }
    complete = complete && numbered;
  });
  return read && complete && numbers->processes > 0;
}

}  // namespace

absl::StatusOr<int> FreeNumber(std::string_view image, int limit) {
  Numbers numbers;
  if (!ReadTree(image, &numbers)) {
    return absl::DataLossError(
        "cannot read from the image which numbers its processes have (pstree.img): the image is damaged; restart "
        "another one");
  }
  const int64_t gap = kGap + numbers.processes;
  numbers.used.insert(kLowest - 1);
  int64_t best = 0, most = 0, next = limit;
  for (auto number = numbers.used.rbegin(); number != numbers.used.rend() && *number >= kLowest - 1; ++number) {
    const int64_t first = *number + gap, room = next - first;
    if (room > most) {
      best = first;
      most = room;
    }
    // Above all others.
    if (number == numbers.used.rbegin() && room >= kRoom) break;
    next = std::min<int64_t>(*number, limit);
  }
  if (most >= kLeastRoom) return int(best);
  return absl::ResourceExhaustedError(
      "the job's processes leave no " + std::to_string(kLeastRoom) +
      " process numbers in a row free, which their restore needs: raise the sysctl kernel.pid_max, which is " +
      std::to_string(limit) + " here");
}

absl::StatusOr<int> FreeNumberBeside(const std::string& folder) {
  std::string image;
  ReadImageFile(folder + "/pstree.img", &image);  // nothing, if there is none
  int limit = 32768;
  std::ifstream("/proc/sys/kernel/pid_max") >> limit;
  return FreeNumber(image, limit);
}

}  // namespace cuda_remote::checkpoint
