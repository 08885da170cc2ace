// SPDX-License-Identifier: Apache-2.0
// GPU functions that have other addresses on the new server than before, and the places in memory that hold these
// addresses.
//
// Loading a module writes addresses of functions into words of variables. These words are translated: an old address
// becomes the same function's new address. At any other place an old address stops the restart or the move, since
// nobody can tell an address from another number, or knows who else has it. docs/context-state.md says what that
// covers.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_MOVED_CODE_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_MOVED_CODE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "ckptfmt/types.h"
#include "proto/driverabi/address_search.h"

namespace cuda_remote::checkpoint {

class MovedCode {
 public:
  struct Word {
    uint64_t offset = 0;           // in its variable
    uint64_t before = 0, now = 0;  // addresses
  };

  // The words of a variable of a module or library. In any order of variables; the words with rising offsets.
  void Add(uint64_t module, uint64_t context, const std::string& symbol, const std::vector<Word>& words);

  // No function lies elsewhere.
  bool empty() const { return search_.empty(); }

  // Translates `count` bytes of a region that begin at `offset` of it, in place, on their way to the new server. Fails
  // if they hold an address that cannot be translated. Any thread.
  absl::Status Translate(const ckptfmt::Region& region, uint64_t offset, char* bytes, size_t count) const;

 private:
  // Module or library, context, variable.
  using Variable = std::tuple<uint64_t, uint64_t, std::string>;

  std::map<Variable, std::vector<Word>> variables_;
  // By module and context: functions that lie elsewhere. An address says nothing outside of its context.
  std::map<std::pair<uint64_t, uint64_t>, std::map<uint64_t, uint64_t>> moved_;
  std::map<uint64_t, std::string> names_;  // by address: a variable that held it
  driverabi::AddressSearch search_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_MOVED_CODE_H_
