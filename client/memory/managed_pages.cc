// SPDX-License-Identifier: Apache-2.0
#include "client/memory/managed_pages.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "client/core/log.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/requests.h"
#include "proto/mirror/fetched.h"
#include "proto/mirror/mirror.h"

namespace cuda_remote::client {
namespace {

// Pages that are fetched at the first access somewhere, and at most, if accesses go on from one to the next.
constexpr uint64_t kFirstRead = 16;
constexpr uint64_t kMostRead = 1024;
constexpr uint64_t kReadGrowth = 4;
// From so many pages at a time on, the next ones are fetched while the program uses those that came last.
constexpr uint64_t kWorthAhead = 256;
// Pages whose protection is taken away at a time, at most. Those that are not written then are sent for nothing.
constexpr uint64_t kMostWrite = 512;
// So often the host must have used the same pages, and not more than so many, for them to be fetched ahead.
constexpr uint64_t kHabit = 3;
constexpr uint64_t kMostAhead = 64;
// Sometimes they are not fetched ahead, to learn whether the host still uses them: a probe. It costs the host several
// faults. So the distance between two probes doubles, from the first number to the second. If the host has stopped, no
// more fetches are wasted than were useful before.
constexpr uint64_t kFirstProbe = 16, kRarestProbe = 256;
// Runs of one message, two numbers each.
constexpr size_t kMostRuns = 32 << 10;
// What is handed over at a time of a segment that was not watched before; of it, units with a page that was used.
constexpr uint64_t kHandOverPiece = uint64_t{64} << 20;
constexpr uint64_t kGranule = 64 << 10;
// What is handed over at a time of one that was, in pages.
constexpr uint64_t kUnmapPiece = 2048;
// What Settle fetches at a time, from a server that has the file and from one that has not.
constexpr uint64_t kSettlePiece = uint64_t{32} << 20;
constexpr uint64_t kCarriedSettlePiece = 4 << 20;
// Bytes of one run in the channel.
constexpr uint64_t kCarriedPiece = 256 << 10;

using driverabi::kAtOnce, driverabi::kForAll, driverabi::kForStream, driverabi::kUnlessBusy,
    driverabi::kUnlessStreamBusy;

// Puts [first, last) into `ranges`, first -> last, or takes it out.
void SetPreferred(uint64_t first, uint64_t last, bool preferred, std::map<uint64_t, uint64_t>* ranges) {
  // What is left of a range on either side stays.
  auto at = ranges->upper_bound(first);
  if (at != ranges->begin()) --at;
  while (at != ranges->end() && at->first < last) {
    const auto [begin, end] = *at;
    if (end <= first) {
      ++at;
      continue;
    }
    at = ranges->erase(at);
    if (begin < first) (*ranges)[begin] = first;
    if (end > last) (*ranges)[last] = end;
  }
  if (!preferred) return;
  // With ranges beside it, it becomes one: a fetch goes up to a range's end.
  if (const auto after = ranges->find(last); after != ranges->end()) {
    last = after->second;
    ranges->erase(after);
  }
  const auto next = ranges->lower_bound(first);
  if (next != ranges->begin() && std::prev(next)->second == first) {
    std::prev(next)->second = last;
  } else {
    (*ranges)[first] = last;
  }
}

// Whether the `ahead`th time at which a segment's pages would be fetched ahead is a probe.
bool IsProbe(uint64_t ahead) {
  return ahead % kRarestProbe == 0 || (ahead >= kFirstProbe && (ahead & (ahead - 1)) == 0);
}

}  // namespace

void ManagedPages::Set(std::vector<uint64_t>* bits, uint64_t first, uint64_t last, bool value) {
  while (first < last) {
    const uint64_t word = first / 64, from = first % 64, to = std::min<uint64_t>(64, from + (last - first));
    const uint64_t mask = (to == 64 ? ~uint64_t{0} : (uint64_t{1} << to) - 1) & ~((uint64_t{1} << from) - 1);
    if (value) {
      (*bits)[word] |= mask;
    } else {
      (*bits)[word] &= ~mask;
    }
    first += to - from;
  }
}

template <typename Use>
void ManagedPages::ForEachRun(const std::vector<uint64_t>& bits, uint64_t from, uint64_t to, bool value,
                              const Use& use) {
  const uint64_t flip = value ? 0 : ~uint64_t{0};
  uint64_t begin = to;  // of the run that goes on; `to`: there is none
  for (uint64_t page = from; page < to;) {
    const uint64_t word = (bits[page / 64] ^ flip) >> (page % 64);
    const uint64_t left = std::min(to - page, 64 - page % 64);
    if (begin == to) {
      const uint64_t skip = word == 0 ? left : std::min<uint64_t>(left, uint64_t(__builtin_ctzll(word)));
      page += skip;
      if (skip < left) begin = page;
    } else {
      const uint64_t same = ~word == 0 ? left : std::min<uint64_t>(left, uint64_t(__builtin_ctzll(~word)));
      page += same;
      if (same < left) {
        use(begin, page);
        begin = to;
      }
    }
  }
  if (begin != to) use(begin, to);
}

ManagedPages::Segments::iterator ManagedPages::FindLocked(uint64_t address) {
  auto it = segments_.upper_bound(address);
  if (it == segments_.begin()) return segments_.end();
  --it;
  return address - it->first < it->second.bytes ? it : segments_.end();
}

void ManagedPages::TouchLocked(Segment* segment, bool touched) {
  if (segment->touched == touched) return;
  segment->touched = touched;
  touched_count_.fetch_add(touched ? 1 : size_t(-1), std::memory_order_acq_rel);
}

void ManagedPages::Add(uint64_t address, uint64_t bytes) {
  MutexLock lock(&mutex_);
  Segment segment;
  segment.bytes = bytes;
  segments_[address] = std::move(segment);
  touched_count_.fetch_add(1, std::memory_order_acq_rel);
  end_.store(std::prev(segments_.end())->first + std::prev(segments_.end())->second.bytes, std::memory_order_release);
  active_.store(true, std::memory_order_release);
}

void ManagedPages::Leave(uint64_t address) {
  MutexLock lock(&mutex_);
  if (const auto it = segments_.find(address); it != segments_.end()) TouchLocked(&it->second, false);
}

bool ManagedPages::WasInPlace(uint64_t address) {
  MutexLock lock(&mutex_);
  const auto it = segments_.find(address);
  return it != segments_.end() && it->second.was_in_place;
}

void ManagedPages::Remove(uint64_t address) {
  MutexLock lock(&mutex_);
  const auto it = segments_.find(address);
  if (it == segments_.end()) return;
  if (it->second.watched) faults_.Unregister(address, it->second.bytes);
  TouchLocked(&it->second, false);
  SetHabitLocked(&it->second, false);
  segments_.erase(it);
  active_.store(!segments_.empty(), std::memory_order_release);
}

void ManagedPages::Clear(uint64_t address, uint64_t bytes) {
  MutexLock lock(&mutex_);
  const auto it = FindLocked(address);
  if (it == segments_.end()) return;
  Segment& segment = it->second;
  // Through the file: the server may have its pages registered with the driver, so they stay. Those that the file does
  // not have are zero.
  static const char kZeroes[64 << 10] = {};
  const uint64_t begin = address - base_, end = begin + bytes;
  for (uint64_t at = begin; at < end;) {
    const off_t data = segment.watched ? off_t(at) : lseek(file_, off_t(at), SEEK_DATA);
    if (data < 0 || uint64_t(data) >= end) break;
    at = uint64_t(data);
    const ssize_t wrote = pwrite(file_, kZeroes, std::min<uint64_t>(sizeof kZeroes, end - at), off_t(at));
    if (wrote <= 0) break;
    at += uint64_t(wrote);
  }
  const uint64_t first = (address - it->first) / kPage, last = first + (bytes + kPage - 1) / kPage;
  segment.attached.erase(first);
  SetPreferred(first, last, false, &segment.preferred);
  if (!segment.watched) return;
  // The host has them from now on. They may be mapped, protected: nobody waits for them.
  faults_.Unprotect(address, (last - first) * kPage);
  Set(&segment.host, first, last, true);
  Set(&segment.dirty, first, last, true);
  segment.first = segment.touched ? std::min(segment.first, first) : first;
  segment.last = segment.touched ? std::max(segment.last, last) : last;
  TouchLocked(&segment, true);
}

void ManagedPages::Attach(uint64_t address, uint64_t bytes, uint64_t stream) {
  MutexLock lock(&mutex_);
  const auto it = FindLocked(address);
  if (it == segments_.end()) return;
  SetHabitLocked(&it->second, false);
  const uint64_t first = (address - it->first) / kPage;
  if (stream == kGlobal) {
    it->second.attached.erase(first);
  } else {
    it->second.attached[first] = {first + (bytes + kPage - 1) / kPage, stream};
  }
}

bool ManagedPages::StartLocked() {
  if (faults_.open()) return true;
  if (!faults_.Open()) return false;
  // The application's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    server_ = std::thread([this] { Serve(); });
  } catch (...) {
    faults_.Close();
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

bool ManagedPages::WatchLocked(uint64_t start, Segment* segment) {
  const uint64_t words = (segment->bytes / kPage + 63) / 64;
  segment->host.assign(words, 0);
  segment->dirty.assign(words, 0);
  if (!StartLocked() || !faults_.Register(start, segment->bytes)) return false;
  segment->watched = true;
  segment->reads = segment->writes = 0;
  segment->marker = kNoPage;
  return true;
}

void ManagedPages::AddRunLocked(uint64_t start, uint64_t first, uint64_t last) {
  runs_.push_back(start + first * kPage);
  runs_.push_back((last - first) * kPage);
}

void ManagedPages::AddFileRunsLocked(uint64_t start, uint64_t from, uint64_t to) {
  const uint64_t begin = start - base_, end = begin + to;
  uint64_t first = begin + from, last = first;  // of the run that goes on
  for (uint64_t at = first; at < end;) {
    const off_t found = lseek(file_, off_t(at), SEEK_DATA);
    if (found < 0 || uint64_t(found) >= end) break;
    // With what is between its pages: to look for each hole takes longer than to copy zeroes.
    const uint64_t data = std::max(at, uint64_t(found) / kGranule * kGranule);
    if (data != last) {
      if (first != last) AddRunLocked(start, (first - begin) / kPage, (last - begin) / kPage);
      first = data;
    }
    at = last = std::min(end, (data / kGranule + 1) * kGranule);
  }
  if (first != last) AddRunLocked(start, (first - begin) / kPage, (last - begin) / kPage);
}

CUresult ManagedPages::SendBytesLocked(ClientChannel* channel) {
  FrameHeader header;
  header.call = kOpManagedFlush;
  header.flags = kFlagNoReply;
  std::string message;
  for (size_t i = 0; i < runs_.size(); i += 2) {
    for (uint64_t at = runs_[i], end = at + runs_[i + 1]; at < end;) {
      const uint64_t bytes = std::min(kCarriedPiece, end - at);
      carry_.resize(bytes);
      // By the file: the pages are not mapped.
      if (pread(file_, &carry_[0], bytes, off_t(at - base_)) != ssize_t(bytes)) return CUDA_ERROR_OPERATING_SYSTEM;
      mirror::AppendRun(at, carry_.data(), bytes, &message);
      at += bytes;
      if (message.size() + kCarriedPiece < mirror::kMostRuns && (at < end || i + 2 < runs_.size())) continue;
      if (channel->Send(header, {}, message) != ChannelStatus::kOk) return CUDA_ERROR_DEVICE_UNAVAILABLE;
      message.clear();
    }
  }
  runs_.clear();
  return CUDA_SUCCESS;
}

CUresult ManagedPages::SendRunsLocked(ClientChannel* channel) {
  if (carried_) return SendBytesLocked(channel);
  for (size_t at = 0; at < runs_.size(); at += 2 * kMostRuns) {
    const size_t count = std::min(runs_.size() - at, 2 * kMostRuns);
    FrameHeader header;
    header.call = kOpManagedFlush;
    const std::string_view payload(reinterpret_cast<const char*>(&runs_[at]), count * sizeof(uint64_t));
    if (channel->Send(header, {}, payload) != ChannelStatus::kOk) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  }
  runs_.clear();
  return CUDA_SUCCESS;
}

CUresult ManagedPages::HandOverLocked(ClientChannel* channel, uint64_t start, Segment* segment, bool ends_later) {
  if (!segment->touched) return CUDA_SUCCESS;
  const bool leave = std::exchange(segment->in_place, false) && ends_later;
  hand_overs_.fetch_add(1, std::memory_order_acq_rel);
  if (!segment->watched) {
    if (!WatchLocked(start, segment)) return CUDA_ERROR_OUT_OF_MEMORY;
    // Piece by piece, so that the server copies one while the next is taken. Whoever touches it from then on waits for
    // this lock, and the file is what counts.
    for (uint64_t at = 0; at < segment->bytes; at += kHandOverPiece) {
      const uint64_t bytes = std::min(kHandOverPiece, segment->bytes - at);
      PageFaults::Unmap(start + at, bytes);
      AddFileRunsLocked(start, at, at + bytes);
      if (const CUresult sent = SendRunsLocked(channel); sent != CUDA_SUCCESS) return sent;
    }
  } else {
    uint64_t had = 0, written = 0;
    CUresult sent = CUDA_SUCCESS;
    // Likewise piece by piece.
    for (uint64_t from = segment->first; from < segment->last; from += kUnmapPiece) {
      const uint64_t to = std::min(segment->last, from + kUnmapPiece);
      ForEachRun(segment->host, from, to, true, [&](uint64_t first, uint64_t last) {
        mutex_.AssertHeld();
        if (leave) {
          left_.emplace_back(start + first * kPage, (last - first) * kPage);
          ending_.store(true, std::memory_order_release);
        } else {
          PageFaults::Unmap(start + first * kPage, (last - first) * kPage);
        }
        had += last - first;
      });
      ForEachRun(segment->dirty, from, to, true, [&](uint64_t first, uint64_t last) {
        mutex_.AssertHeld();
        AddRunLocked(start, first, last);
        written += last - first;
      });
      if (to < segment->last && sent == CUDA_SUCCESS) sent = SendRunsLocked(channel);
    }
    segment->mostly_written = written * 8 >= had * 7;
    const bool same = segment->first == segment->had_first && segment->last == segment->had_last;
    segment->repeats = same ? segment->repeats + 1 : 0;
    if (!same) segment->ahead = 0;
    segment->had_first = segment->first;
    segment->had_last = segment->last;
    SetHabitLocked(segment, segment->repeats >= kHabit && segment->last - segment->first <= kMostAhead &&
                                segment->attached.empty() && !IsProbe(++segment->ahead));
    Set(&segment->host, segment->first, segment->last, false);
    Set(&segment->dirty, segment->first, segment->last, false);
    segment->marker = kNoPage;
    if (sent != CUDA_SUCCESS) return sent;
  }
  segment->first = segment->last = 0;
  segment->wanted_first = segment->wanted_last = 0;
  const CUresult result = SendRunsLocked(channel);
  // Only now: a thread that finds nothing to hand over may send its work at once.
  TouchLocked(segment, false);
  return result;
}

CUresult ManagedPages::HandOver(ClientChannel* channel, bool ends_later) {
  if (!touched()) return CUDA_SUCCESS;
  MutexLock lock(&mutex_);
  channel_ = channel;
  for (auto& [start, segment] : segments_) {
    const CUresult result = HandOverLocked(channel, start, &segment, ends_later);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

void ManagedPages::UnmapLeft() {
  MutexLock lock(&mutex_);
  for (const auto& [address, bytes] : left_) PageFaults::Unmap(address, bytes);
  left_.clear();
  ending_.store(false, std::memory_order_release);
}

CUresult ManagedPages::HandOver(ClientChannel* channel, const std::vector<uint64_t>& addresses) {
  if (!touched()) return CUDA_SUCCESS;
  MutexLock lock(&mutex_);
  channel_ = channel;
  for (const uint64_t address : addresses) {
    const auto it = FindLocked(address);
    if (it == segments_.end()) continue;
    const CUresult result = HandOverLocked(channel, it->first, &it->second, false);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

uint64_t ManagedPages::BeginFetchLocked(ClientChannel* channel, uint64_t address, uint64_t bytes, uint32_t wait,
                                        uint64_t stream) {
  wire::OpManagedFetch_Request request;
  request.address = address;
  request.bytes = bytes;
  request.wait = wait;
  request.stream = stream;
  std::string message;
  request.Encode(&message);
  FrameHeader header;
  header.call = kOpManagedFetch;
  if (carried_) carry_.resize(bytes);
  return channel->Begin(header, message, {}, carried_ ? &carry_[0] : nullptr, carried_ ? bytes : 0);
}

CUresult ManagedPages::EndFetchLocked(ClientChannel* channel, uint64_t sequence, uint64_t address, uint64_t bytes,
                                      bool* busy) {
  Reply reply;
  if (sequence == 0 || channel->Wait(sequence, &reply) != ChannelStatus::kOk) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  wire::OpManagedFetch_Reply answer;
  if (!answer.Decode(reply.message)) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  *busy = answer.busy;
  if (!carried_ || answer.busy || reply.result != CUDA_SUCCESS) return CUresult(reply.result);
  if (reply.payload_bytes != bytes) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  const ssize_t wrote = pwrite(file_, carry_.data(), bytes, off_t(address - base_));
  return wrote == ssize_t(bytes) ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult ManagedPages::FetchLocked(ClientChannel* channel, uint64_t address, uint64_t bytes, uint32_t wait,
                                   uint64_t stream, bool* busy) {
  return EndFetchLocked(channel, BeginFetchLocked(channel, address, bytes, wait, stream), address, bytes, busy);
}

void ManagedPages::PreferHost(uint64_t address, uint64_t bytes, bool preferred) {
  MutexLock lock(&mutex_);
  const auto it = FindLocked(address);
  if (it == segments_.end()) return;
  SetPreferred((address - it->first) / kPage, (address - it->first + bytes + kPage - 1) / kPage, preferred,
               &it->second.preferred);
}

void ManagedPages::WillUse(uint64_t address, uint64_t bytes) {
  MutexLock lock(&mutex_);
  const auto it = FindLocked(address);
  if (it == segments_.end()) return;
  it->second.wanted_first = (address - it->first) / kPage;
  it->second.wanted_last = (address - it->first + bytes + kPage - 1) / kPage;
}

void ManagedPages::SetHabitLocked(Segment* segment, bool habit) {
  if (segment->habit == habit) return;
  segment->habit = habit;
  habits_.fetch_add(habit ? 1 : size_t(-1), std::memory_order_acq_rel);
}

void ManagedPages::TakeLocked(Segment* segment, uint64_t first, uint64_t last) {
  Set(&segment->host, first, last, true);
  segment->first = segment->touched ? std::min(segment->first, first) : first;
  segment->last = segment->touched ? std::max(segment->last, last) : last;
  TouchLocked(segment, true);
}

void ManagedPages::ShowLocked(uint64_t start, Segment* segment) {
  const uint64_t first = segment->had_first, last = segment->had_last;
  TakeLocked(segment, first, last);
  if (segment->mostly_written) Set(&segment->dirty, first, last, true);
  if (!faults_.Map(start + first * kPage, (last - first) * kPage, !segment->mostly_written)) LoseLocked();
}

std::unique_lock<Mutex> ManagedPages::Expect(std::unique_ptr<Expected>* expected) {
  expected->reset();
  if (carried_ || habits_.load(std::memory_order_acquire) == 0) return {};
  // Whoever has it may be waiting for what this call waits for.
  std::unique_lock<Mutex> lock(mutex_, std::try_to_lock);
  if (!lock) return lock;
  uint64_t pages = 0;
  for (auto& [start, segment] : segments_) {
    if (!segment.habit || !segment.watched || segment.touched || segment.expected) continue;
    const uint64_t first = segment.had_first, last = segment.had_last;
    if (pages + (last - first) > kMostAhead) continue;
    pages += last - first;
    if (!*expected) *expected = std::make_unique<Expected>(this);
    segment.expected = expected->get();
    (*expected)->runs.push_back(start + first * kPage);
    (*expected)->runs.push_back((last - first) * kPage);
  }
  return *expected ? std::move(lock) : std::unique_lock<Mutex>();
}

void ManagedPages::ForgetExpected(const Expected& expected) {
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < expected.runs.size(); i += 2) {
    const auto it = FindLocked(expected.runs[i]);
    if (it != segments_.end() && it->second.expected == &expected) it->second.expected = nullptr;
  }
}

void ManagedPages::Arrived(ClientChannel* channel, const Expected& expected, uint64_t sequence) {
  std::lock_guard<std::shared_mutex> sending(sending_);
  // What was sent since then may be changing them.
  if (channel->last_marked() > sequence) return;
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < expected.runs.size(); i += 2) {
    const auto it = FindLocked(expected.runs[i]);
    if (it == segments_.end()) continue;
    Segment& segment = it->second;
    const bool same = expected.runs[i] == it->first + segment.had_first * kPage &&
                      expected.runs[i + 1] == (segment.had_last - segment.had_first) * kPage;
    if (!same || !segment.habit || !segment.watched || segment.touched) continue;
    ShowLocked(it->first, &segment);
    segment.in_place = expected.answer == mirror::kFetchedInPlace;
    segment.was_in_place = segment.was_in_place || segment.in_place;
  }
}

void ManagedPages::AnticipateAll(ClientChannel* channel) {
  std::lock_guard<std::shared_mutex> sending(sending_);
  MutexLock lock(&mutex_);
  for (auto& [start, segment] : segments_) {
    if (!segment.habit || !segment.watched || segment.touched) continue;
    const uint64_t first = segment.had_first, last = segment.had_last;
    bool busy = false;
    if (FetchLocked(channel, start + first * kPage, (last - first) * kPage, kUnlessBusy, 0, &busy) != CUDA_SUCCESS ||
        busy) {
      // Other work goes on, and perhaps always does.
      segment.repeats = 0;
      SetHabitLocked(&segment, false);
      continue;
    }
    ShowLocked(start, &segment);
  }
}

ManagedPages::Reach ManagedPages::ReachOfLocked(const Segment& segment, uint64_t page) const {
  if (host_functions_.load(std::memory_order_acquire) != 0) return {page, page + 1, kAtOnce, 0};
  // Memory that other work may be writing just now must stay where it is.
  if (auto it = segment.attached.upper_bound(page); it != segment.attached.begin()) {
    --it;
    const auto [last, stream] = it->second;
    if (page < last) return {it->first, last, stream == kHost ? kAtOnce : kForStream, stream};
  }
  return {0, segment.bytes / kPage, kForAll, 0};
}

void ManagedPages::FetchForLocked(uint64_t start, Segment* segment, uint64_t page, bool is_write) {
  const auto [from, to, wait, stream] = ReachOfLocked(*segment, page);
  const bool goes_on = segment->reads != 0 && page == segment->next_read;
  uint64_t count = goes_on ? std::min(segment->reads * kReadGrowth, kMostRead) : kFirstRead;
  const bool wanted = page >= segment->wanted_first && page < segment->wanted_last;
  if (wanted) {
    count = std::max(count, std::min(kMostRead, segment->wanted_last - page));
  }
  if (auto it = segment->preferred.upper_bound(page); it != segment->preferred.begin()) {
    --it;
    if (page < it->second) count = std::max(count, std::min(kMostRead, it->second - page));
  }
  // The first ones around it, aligned; the later ones behind those that came before. Up to what the host has already.
  uint64_t first = std::max(from, goes_on ? page : page / kFirstRead * kFirstRead);
  uint64_t last = std::min(to, std::max(page + 1, first + count));
  for (uint64_t at = page; at > first; --at) {
    if (Get(segment->host, at - 1)) {
      first = at;
      break;
    }
  }
  ForEachRun(segment->host, page, last, true, [&](uint64_t begin, uint64_t) { last = std::min(last, begin); });
  count = last - first;

  const uint64_t address = start + first * kPage, bytes = count * kPage;
  bool busy = false;
  const uint32_t careful = wait == kForAll ? kUnlessBusy : wait == kForStream ? kUnlessStreamBusy : kAtOnce;
  CUresult result = FetchLocked(channel_, address, bytes, careful, stream, &busy);
  if (result == CUDA_SUCCESS && busy) {
    if (!said_.exchange(true)) {
      LogLine(
          "the host used managed memory while the GPU was at work, which devices without concurrentManagedAccess do "
          "not allow; each such access waits until the GPU has finished, and a kernel that waits for the host would "
          "wait forever");
    }
    result = FetchLocked(channel_, address, bytes, wait, stream, &busy);
  }
  if (result != CUDA_SUCCESS) {
    // The calls themselves say what is wrong with the GPU or the server. The program goes on with what is here.
    if (!lost_.exchange(true)) {
      LogLine("managed memory could not be fetched from the GPU server (CUDA error %d)", int(result));
    }
    fallocate(file_, FALLOC_FL_KEEP_SIZE, off_t(address - base_), off_t(bytes));
  }
  // Before the thread that waits goes on: it may start work at once, and HandOver must find the pages.
  TakeLocked(segment, first, last);
  const bool all_writable = is_write && segment->mostly_written;
  if (is_write) Set(&segment->dirty, all_writable ? first : page, all_writable ? last : page + 1, true);
  segment->next_read = last;
  segment->reads = count;
  const auto map = [&] {
    mutex_.AssertHeld();
    bool mapped;
    if (all_writable) {
      mapped = faults_.Map(address, bytes, false);
    } else if (is_write) {
      segment->next_write = page + 1;
      segment->writes = 1;
      mapped = (page == first || faults_.Map(address, (page - first) * kPage, true)) &&
               (page + 1 == last || faults_.Map(start + (page + 1) * kPage, (last - page - 1) * kPage, true)) &&
               faults_.Map(start + page * kPage, kPage, false);
    } else {
      mapped = faults_.Map(address, bytes, true);
    }
    if (!mapped) LoseLocked();
  };
  if (result == CUDA_SUCCESS && (goes_on || wanted)) {
    FetchAheadLocked(start, segment, is_write, map);
  } else {
    map();
  }
}

void ManagedPages::FetchAheadLocked(uint64_t start, Segment* segment, bool is_write, const std::function<void()>& map) {
  const uint64_t first = segment->next_read;
  if (carried_ || segment->reads < kWorthAhead || first >= segment->bytes / kPage) return map();
  const auto [from, to, wait, stream] = ReachOfLocked(*segment, first);
  uint64_t last = std::min(to, first + std::min(segment->reads * kReadGrowth, kMostRead));
  ForEachRun(segment->host, first, last, true, [&](uint64_t begin, uint64_t) { last = std::min(last, begin); });
  if (from > first || last < first + 2) return map();
  const uint64_t address = start + first * kPage, bytes = (last - first) * kPage;
  const uint32_t careful = wait == kForAll ? kUnlessBusy : wait == kForStream ? kUnlessStreamBusy : kAtOnce;
  const uint64_t sequence = BeginFetchLocked(channel_, address, bytes, careful, stream);
  map();
  bool busy = false;
  // An error is for the access to see that asks for the pages.
  if (EndFetchLocked(channel_, sequence, address, bytes, &busy) != CUDA_SUCCESS || busy || !segment->watched) return;
  TakeLocked(segment, first, last);
  const bool all_writable = is_write && segment->mostly_written;
  if (all_writable) Set(&segment->dirty, first, last, true);
  segment->next_read = last;
  segment->reads = last - first;
  segment->marker = first;
  if (!faults_.Map(address + kPage, bytes - kPage, !all_writable)) LoseLocked();
}

void ManagedPages::ResolveLocked(const PageFaults::Fault& fault) {
  const auto it = FindLocked(fault.page);
  if (it == segments_.end() || !it->second.watched) {
    faults_.Wake(fault.page, kPage);
    return;
  }
  const uint64_t start = it->first;
  Segment& segment = it->second;
  const uint64_t page = (fault.page - start) / kPage;
  if (!Get(segment.host, page)) {
    FetchForLocked(start, &segment, page, fault.is_write);
    return;
  }
  if (fault.protect) {
    uint64_t count = page == segment.next_write && segment.writes != 0 ? std::min(segment.writes * 2, kMostWrite) : 1;
    uint64_t last = std::min(segment.last, page + count);
    ForEachRun(segment.host, page, last, false, [&](uint64_t from, uint64_t) { last = std::min(last, from); });
    Set(&segment.dirty, page, last, true);
    segment.next_write = last;
    segment.writes = last - page;
    faults_.Unprotect(fault.page, (last - page) * kPage);
    return;
  }
  // It is the host's, but not mapped: it is the marker, it was swapped out, or Clear has made it the host's. Or another
  // thread's access has brought it meanwhile.
  if (!faults_.Map(fault.page, kPage, !Get(segment.dirty, page))) {
    fallocate(file_, FALLOC_FL_KEEP_SIZE, off_t(fault.page - base_), off_t(kPage));
    if (!faults_.Map(fault.page, kPage, !Get(segment.dirty, page))) return LoseLocked();
  }
  if (page != segment.marker) return;
  segment.marker = kNoPage;
  FetchAheadLocked(start, &segment, fault.is_write, [] {});
}

void ManagedPages::LoseLocked() {
  LogLine("managed memory cannot be watched any more; what the GPU has written to it is lost");
  for (auto& [start, segment] : segments_) {
    if (!segment.watched) continue;
    faults_.Unregister(start, segment.bytes);
    segment.watched = segment.in_place = false;
    SetHabitLocked(&segment, false);
    TouchLocked(&segment, true);
  }
}

void ManagedPages::Serve() {
  PageFaults::Fault fault;
  uint64_t before = 0;
  // Before the fault is taken: this thread may be held up right after that, and the program go on meanwhile.
  while (faults_.Next(&fault, [&] { before = hand_overs_.load(std::memory_order_acquire); })) {
    std::lock_guard<std::shared_mutex> sending(sending_);
    MutexLock lock(&mutex_);
    if (hand_overs_.load(std::memory_order_acquire) == before) {
      ResolveLocked(fault);
    } else {
      // Who waited may have gone on with a page that came with a neighbour's, and has lost it since. If not, it will
      // come again.
      faults_.Wake(fault.page, kPage);
    }
  }
}

CUresult ManagedPages::Settle(ClientChannel* channel) {
  std::thread server;
  {
    MutexLock lock(&mutex_);
    if (const CUresult result = TakeBackLocked(channel); result != CUDA_SUCCESS || !faults_.open()) return result;
    faults_.Interrupt();
    server = std::move(server_);
  }
  server.join();  // it may wait for the lock
  MutexLock lock(&mutex_);
  faults_.Close();
  channel_ = nullptr;
  return CUDA_SUCCESS;
}

CUresult ManagedPages::TakeBackLocked(ClientChannel* channel) {
  CUresult first_error = CUDA_SUCCESS;
  for (auto& [start, segment] : segments_) {
    if (!segment.watched || !channel) continue;
    // Pages of the file change under nobody's eyes: the host does not have them.
    ForEachRun(segment.host, 0, segment.bytes / kPage, false, [&, begin = start](uint64_t first, uint64_t last) {
      mutex_.AssertHeld();
      for (uint64_t at = begin + first * kPage, end = begin + last * kPage; at < end && first_error == CUDA_SUCCESS;) {
        const uint64_t bytes = std::min(carried_ ? kCarriedSettlePiece : kSettlePiece, end - at);
        bool busy;
        first_error = FetchLocked(channel, at, bytes, kAtOnce, 0, &busy);
        at += bytes;
      }
    });
    // As before: whoever waits for a page gets it.
    if (first_error != CUDA_SUCCESS) return first_error;
  }
  for (auto& [start, segment] : segments_) {
    if (!segment.watched) continue;
    faults_.Unregister(start, segment.bytes);
    segment.watched = segment.in_place = false;
    SetHabitLocked(&segment, false);
    segment.host.clear();
    segment.dirty.clear();
    TouchLocked(&segment, true);
  }
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
