// SPDX-License-Identifier: Apache-2.0
// Where GPU functions lie, as far as memory may hold their addresses: docs/context-state.md, "Addresses of functions".

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "client/core/session.h"
#include "proto/base/mappings.h"
#include "proto/base/text.h"
#include "proto/base/unique_fd.h"
#include "proto/codec/decode_as.h"
#include "proto/codec/library.gen.h"
#include "proto/codec/module.gen.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/address_search.h"
#include "proto/driverabi/error_names.h"

namespace cuda_remote::client {
namespace {

constexpr size_t kPiece = 1 << 20;

struct OwnMapping {
  uint64_t begin = 0, end = 0;
  bool shared = false;
  bool swapped = false;  // its pages may be in the swap area
};

// The mappings in which the program can have put something, but for the host arena's: a look at one of its pages may
// have to fetch it from the GPU.
std::vector<OwnMapping> OwnMappings() {
  std::vector<OwnMapping> mappings;
  ForEachMapping("/proc/self", [&](const Mapping& mapping) {
    if (!mapping.readable) return true;
    const std::string_view name(mapping.name);
    // The kernel's own, and what goes to the GPU server and comes from it.
    if (name.substr(0, 2) == "[v" || name.substr(0, 23) == "/memfd:cuda-remote-ring") return true;
    // A file that nobody writes to.
    if (mapping.inode != 0 && !mapping.writable) return true;
    if (HostArena::Contains(mapping.begin)) return true;
    const bool in_memory =
        name.substr(0, 7) == "/memfd:" || name.substr(0, 5) == "/dev/" || name.substr(0, 5) == "/SYSV";
    mappings.push_back({mapping.begin, mapping.end, mapping.shared, mapping.shared && in_memory});
    return true;
  });
  return mappings;
}

// Which pages of [begin, end) have been used: nobody has written to others, and a look would take memory for them.
class UsedPages {
 public:
  UsedPages() : fd_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)), page_(uint64_t(sysconf(_SC_PAGESIZE))) {
    struct sysinfo memory;
    swapping_ = sysinfo(&memory) != 0 || memory.freeswap != memory.totalswap;
  }

  bool Read(const OwnMapping& mapping, uint64_t begin, uint64_t end, std::vector<char>* used) const {
    const size_t count = size_t((end - begin) / page_);
    // One that is in the swap area is nowhere to be seen in a shared mapping.
    used->assign(count, mapping.swapped && swapping_);
    std::vector<uint64_t> entries(count);
    const size_t bytes = count * sizeof(uint64_t);
    if (!fd_.ok() ||
        pread(fd_.get(), entries.data(), bytes, off_t(begin / page_ * sizeof(uint64_t))) != ssize_t(bytes)) {
      return false;
    }
    constexpr uint64_t kPresentOrSwapped = uint64_t{3} << 62;
    for (size_t i = 0; i < count; ++i) (*used)[i] = (*used)[i] || (entries[i] & kPresentOrSwapped) != 0;
    if (!mapping.shared) return true;
    // Of a file in memory, also pages that this process has not touched since it was restored.
    std::vector<unsigned char> resident(count);
    if (mincore(reinterpret_cast<void*>(begin), size_t(end - begin), resident.data()) != 0) return false;
    for (size_t i = 0; i < count; ++i) (*used)[i] = (*used)[i] || (resident[i] & 1) != 0;
    return true;
  }
  uint64_t page() const { return page_; }

 private:
  const UniqueFd fd_;
  const uint64_t page_;
  bool swapping_ = true;
};

// Where this process has memory that can be read.
class ReadableMemory {
 public:
  ReadableMemory() {
    ForEachMapping("/proc/self", [&](const Mapping& mapping) {
      if (mapping.readable) ranges_.emplace_back(mapping.end, mapping.begin);
      return true;
    });
  }
  bool Has(uint64_t place) const {
    const auto range = std::upper_bound(ranges_.begin(), ranges_.end(), std::make_pair(place, ~uint64_t{0}));
    return range != ranges_.end() && place >= range->second;
  }

 private:
  std::vector<std::pair<uint64_t, uint64_t>> ranges_;  // each one's end and begin, in order
};

constexpr size_t kOverlap = sizeof(uint64_t) - 1;
constexpr uint64_t kUnreadable = ~uint64_t{0};

// What is read comes into memory of its own, which is no part of what is searched.
class Buffer {
 public:
  Buffer() {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    bytes_ = (kOverlap + kPiece + page - 1) / page * page;
    // Between two pages that are no memory: the kernel makes one mapping of neighbours.
    memory_ = static_cast<char*>(mmap(nullptr, bytes_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    begin_ = memory_ == MAP_FAILED ? nullptr : memory_ + page;
    if (begin_ && mprotect(begin_, bytes_, PROT_READ | PROT_WRITE) != 0) begin_ = nullptr;
    mapped_ = bytes_ + 2 * page;
  }
  ~Buffer() {
    if (memory_ != MAP_FAILED) munmap(memory_, mapped_);
  }
  bool ok() const { return begin_ != nullptr; }
  bool Is(const OwnMapping& mapping) const { return mapping.begin == reinterpret_cast<uint64_t>(begin_); }
  char* carried() { return begin_; }           // kOverlap bytes
  char* piece() { return begin_ + kOverlap; }  // kPiece bytes

 private:
  char* memory_;
  char* begin_;
  size_t bytes_, mapped_;
};

// Searches bytes that come in pieces.
class PieceSearch {
 public:
  PieceSearch(const driverabi::AddressSearch& search, const ReadableMemory& readable, Buffer* buffer)
      : search_(search), readable_(readable), buffer_(buffer) {}

  // The next bytes of `file` do not follow the last ones.
  void Interrupt() { carried_ = 0; }
  // Reads at most kPiece bytes of `file`, and looks for an address in them and across the last piece's end. `place`:
  // what `offset` stands for. Returns the address of what it has found, or 0. *got: how many bytes there were.
  uint64_t Read(int file, uint64_t offset, size_t bytes, uint64_t place, size_t* got) {
    const ssize_t count = pread(file, buffer_->piece(), std::min(bytes, kPiece), off_t(offset));
    *got = count > 0 ? size_t(count) : 0;
    uint64_t found = 0;
    const char* const begin = buffer_->piece() - carried_;
    const size_t count_here = *got == 0 ? 0 : carried_ + *got;
    for (size_t from = 0; found == 0;) {
      const size_t at = search_.Find(begin, count_here, from);
      if (at == driverabi::AddressSearch::kNone) break;
      const uint64_t aligned = (offset - carried_ + at) / sizeof(uint64_t) * sizeof(uint64_t);
      uint64_t words[2];
      const bool whole = pread(file, words, sizeof(words), off_t(aligned)) == ssize_t(sizeof(words));
      const auto is_pointer = [this](uint64_t word) { return readable_.Has(word); };
      if (!whole || !driverabi::IsPartOfPointers(offset - carried_ + at - aligned, words, is_pointer)) {
        found = place - carried_ + at;
      }
      // What was found must not stay on the stack, where the search would find it.
      explicit_bzero(words, sizeof(words));
      from = at + 1;
    }
    const size_t all = carried_ + *got;
    const size_t keep = std::min(all, kOverlap);
    std::copy_n(buffer_->piece() + *got - keep, keep, buffer_->piece() - keep);
    carried_ = keep;
    return found;
  }

 private:
  const driverabi::AddressSearch& search_;
  const ReadableMemory& readable_;
  Buffer* const buffer_;
  size_t carried_ = 0;
};

// The address of an address of `search` in this process's memory; 0: there is none. kUnreadable: it cannot be read.
uint64_t FindInOwnMemory(const driverabi::AddressSearch& search, const ReadableMemory& readable, Buffer* buffer) {
  const UniqueFd memory(open("/proc/self/mem", O_RDONLY | O_CLOEXEC));
  if (!memory.ok()) return kUnreadable;
  const UsedPages pages;
  uint64_t found = 0;
  std::vector<char> used;
  for (const OwnMapping& mapping : OwnMappings()) {
    if (buffer->Is(mapping)) continue;
    PieceSearch pieces(search, readable, buffer);
    for (uint64_t begin = mapping.begin; begin < mapping.end && found == 0; begin += kPiece) {
      const uint64_t end = std::min(mapping.end, begin + kPiece);
      if (!pages.Read(mapping, begin, end, &used)) found = kUnreadable;
      for (size_t i = 0; i < used.size() && found == 0;) {
        size_t last = i;
        while (last < used.size() && used[last] == used[i]) ++last;
        const uint64_t at = begin + i * pages.page();
        const size_t bytes = (last - i) * pages.page();
        // What cannot be read has gone since the list was made, or lies behind a file's end.
        size_t got = 0;
        if (used[i]) found = pieces.Read(memory.get(), at, bytes, at, &got);
        if (got != bytes) pieces.Interrupt();
        i = last;
      }
    }
    if (found != 0) break;
  }
  return found;
}

// The same in a file of the host arena, whose first byte lies at `base`.
uint64_t FindInArena(const driverabi::AddressSearch& search, const ReadableMemory& readable, Buffer* buffer, int file,
                     uint64_t base) {
  if (file < 0) return 0;
  PieceSearch pieces(search, readable, buffer);
  for (off_t begin = 0, end = 0; (begin = lseek(file, end, SEEK_DATA)) >= 0;) {
    end = lseek(file, begin, SEEK_HOLE);
    if (end <= begin) return kUnreadable;
    pieces.Interrupt();
    for (uint64_t at = uint64_t(begin); at < uint64_t(end);) {
      size_t got = 0;
      const uint64_t found = pieces.Read(file, at, size_t(uint64_t(end) - at), base + at, &got);
      if (found != 0) return found;
      if (got == 0) return kUnreadable;
      at += got;
    }
  }
  return 0;
}

// Puts where the functions of a module lie into the request that loads it. False: it says so already, is malformed, or
// is another request.
template <typename Request>
bool PutCode(const replay::Record& record, const std::vector<const wire::ModuleCode*>& code, std::string* changed) {
  Request request;
  if (!wire::DecodeAs(record.header.call, record.message, &request)) return false;
  std::vector<uint64_t> contexts, words;
  for (const wire::ModuleCode* one : code) {
    // Another GPU's code in the same image may have other variables.
    if (!contexts.empty() && one->now.size() * contexts.size() != words.size()) continue;
    contexts.push_back(one->context);
    words.insert(words.end(), one->now.begin(), one->now.end());
  }
  if (request.code_contexts == contexts && request.code == words) return false;
  request.code_contexts = contexts;
  request.code = words;
  request.Encode(changed);
  return true;
}

}  // namespace

CUresult Checkpoint::AskCode(const std::function<void(const wire::OpCodeWords_Reply&)>& use) {
  wire::OpCodeWords_Request request;
  for (bool more = true; more;) {
    std::string message;
    request.Encode(&message);
    Reply reply;
    const CUresult result = session_->requests().Operate(kOpCodeWords, message, &reply);
    if (result != CUDA_SUCCESS) return result;
    wire::OpCodeWords_Reply found;
    if (!found.Decode(reply.message)) return session_->Lose(ChannelStatus::kProtocolError);
    use(found);
    more = found.more && !found.modules.empty();
    uint64_t last = 0;
    for (const wire::ModuleCode& one : found.modules) {
      if (one.module != last) ++request.after;
      last = one.module;
    }
  }
  return CUDA_SUCCESS;
}

Status Checkpoint::NoteCode() {
  const CUresult asked = AskCode([this](const wire::OpCodeWords_Reply& found) {
    std::map<uint64_t, std::vector<const wire::ModuleCode*>> modules;
    for (const wire::ModuleCode& one : found.modules) modules[one.module].push_back(&one);
    WriterLock lock(&session_->objects().mutex());
    for (const auto& [module, code] : modules) {
      const replay::ObjectKey object{KindOf(module), module};
      const replay::Record* const record = session_->objects().log().Find(object);
      std::string changed;
      if (record && (PutCode<wire::cuModuleLoadData_Request>(*record, code, &changed) ||
                     PutCode<wire::cuLibraryLoadData_Request>(*record, code, &changed))) {
        session_->objects().log().SetMessage(object, changed);
      }
    }
  });
  if (asked == CUDA_SUCCESS) return OkStatus();
  return Error("the GPU server does not tell where functions lie (" + driverabi::DescribeError(asked) + ")");
}

Status Checkpoint::FindOldCode() {
  driverabi::AddressSearch search;
  const CUresult asked = AskCode([&search](const wire::OpCodeWords_Reply& found) {
    for (const wire::ModuleCode& one : found.modules) {
      for (size_t i = 0; i < one.before.size(); ++i) {
        if (i >= one.now.size() || one.before[i] != one.now[i]) search.Add(one.before[i]);
      }
    }
  });
  if (asked != CUDA_SUCCESS) {
    return Error("the new server does not tell where functions lie (" + driverabi::DescribeError(asked) + ")");
  }
  if (search.empty()) return OkStatus();
  const ReadableMemory readable;
  Buffer buffer;
  uint64_t found = buffer.ok() ? FindInOwnMemory(search, readable, &buffer) : kUnreadable;
  if (found == 0)
    found = FindInArena(search, readable, &buffer, session_->memory().host_arena().fd(), HostArena::kBase);
  if (found == 0) {
    found = FindInArena(search, readable, &buffer, session_->memory().managed_arena().fd(), HostArena::kManagedBase);
  }
  if (found == 0) return OkStatus();
  if (found == kUnreadable) {
    return Error(
        "GPU functions lie elsewhere on this server than before, and the job's memory cannot be searched for their "
        "addresses");
  }
  return Error("the program's own memory at " + Hex(found) +
               " holds the address of a GPU function that lies elsewhere on this server than before");
}

}  // namespace cuda_remote::client
