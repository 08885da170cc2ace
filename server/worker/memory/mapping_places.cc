// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/mapping_places.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "proto/threads/mutex.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace cuda_remote::server {
namespace {

constexpr uint64_t kPage = 4096;
// The kernel backs parts of this length and alignment with one page, where it can.
constexpr uint64_t kLargePage = 2 << 20;
// Flags that say where a mapping has to be, or what its address has to be a multiple of.
constexpr int kPlacedOtherwise = MAP_FIXED | MAP_FIXED_NOREPLACE | MAP_32BIT | MAP_HUGETLB | MAP_GROWSDOWN;
// How many places in turn may turn out to be taken by somebody who does not come here.
constexpr int kAttempts = 16;

// Null: the kernel places all mappings.
std::atomic<MappingPlaces*> g_places{nullptr};
// Whether this thread is in a function of this file: a malloc that calls mmap must not come here again.
thread_local bool t_inside = false;

struct Inside {
  Inside() { t_inside = true; }
  ~Inside() { t_inside = false; }
};

void* KernelMap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, bytes, protection, flags, fd, offset));
}

int KernelUnmap(void* address, size_t bytes) { return int(syscall(SYS_munmap, address, bytes)); }

}  // namespace

MappingPlaces::Part::Part(AddressRange range) : range(range), free(kPage) { free.Give(range.begin, range.bytes); }

MappingPlaces::MappingPlaces(AddressRange mappings, AddressRange reservations)
    : mappings_(mappings), reservations_(reservations) {}

uint64_t MappingPlaces::Take(Part* part, size_t bytes) {
  MutexLock lock(&part->mutex);
  return part->free.Take(bytes, bytes >= kLargePage ? kLargePage : kPage);
}

void MappingPlaces::Give(Part* part, uint64_t address, uint64_t bytes) {
  const uint64_t begin = std::max(address, part->range.begin);
  const uint64_t end = std::min(address + bytes, part->range.begin + part->range.bytes);
  if (begin >= end) return;
  MutexLock lock(&part->mutex);
  part->free.GiveRest(begin, end - begin);
}

void* MappingPlaces::Map(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  const int before = errno;
  const bool placed_here = address == nullptr && (flags & kPlacedOtherwise) == 0;
  Part* const part = protection == PROT_NONE ? &reservations_ : &mappings_;
  for (int attempt = 0; placed_here && attempt < kAttempts; ++attempt) {
    const uint64_t place = Take(part, bytes);
    if (place == 0) break;
    void* const wanted = reinterpret_cast<void*>(place);
    void* const got = KernelMap(wanted, bytes, protection, flags | MAP_FIXED_NOREPLACE, fd, offset);
    if (got == wanted) {
      errno = before;
      return got;
    }
    if (got != MAP_FAILED) {
      KernelUnmap(got, bytes);  // a kernel that does not know the flag
    } else if (errno != EEXIST) {
      Give(part, place, bytes);
      break;
    }
    // Somebody chose this address. It is not given back: it stays taken.
  }
  errno = before;
  return KernelMap(address, bytes, protection, flags, fd, offset);
}

int MappingPlaces::Unmap(void* address, size_t bytes) {
  const int result = KernelUnmap(address, bytes);
  if (result != 0) return result;
  Give(&mappings_, reinterpret_cast<uint64_t>(address), bytes);
  Give(&reservations_, reinterpret_cast<uint64_t>(address), bytes);
  return 0;
}

void MappingPlaces::LockAll() {
  mappings_.mutex.lock();
  reservations_.mutex.lock();
}

void MappingPlaces::UnlockAll() {
  reservations_.mutex.unlock();
  mappings_.mutex.unlock();
}

void KeepMappingsApart() {
  static MappingPlaces* const places = new MappingPlaces(kMappingPlaces, kReservationPlaces);
  pthread_atfork([] { places->LockAll(); }, [] { places->UnlockAll(); }, [] { places->UnlockAll(); });
  g_places.store(places, std::memory_order_release);
}

}  // namespace cuda_remote::server

extern "C" {

void* mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  using namespace cuda_remote::server;
  MappingPlaces* const places = g_places.load(std::memory_order_acquire);
  if (places == nullptr || t_inside) return KernelMap(address, bytes, protection, flags, fd, offset);
  const Inside inside;
  return places->Map(address, bytes, protection, flags, fd, offset);
}

void* mmap64(void* address, size_t bytes, int protection, int flags, int fd, off64_t offset) noexcept {
  return mmap(address, bytes, protection, flags, fd, offset);
}

int munmap(void* address, size_t bytes) noexcept {
  using namespace cuda_remote::server;
  MappingPlaces* const places = g_places.load(std::memory_order_acquire);
  if (places == nullptr || t_inside) return KernelUnmap(address, bytes);
  const Inside inside;
  return places->Unmap(address, bytes);
}

}  // extern "C"
