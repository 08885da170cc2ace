// SPDX-License-Identifier: Apache-2.0
// Advice, prefetches and questions about managed memory. Pages are remembered one by one.
#include "softgpu/core/advice.h"

#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/stream.h"

namespace cuda_remote::softgpu {
namespace {

constexpr uint64_t kPage = 4096;

struct Place {
  int type = CU_MEM_LOCATION_TYPE_INVALID;
  int id = 0;
  bool operator==(const Place& other) const { return type == other.type && id == other.id; }
  int device() const {
    if (type == CU_MEM_LOCATION_TYPE_INVALID) return CU_DEVICE_INVALID;
    return type == CU_MEM_LOCATION_TYPE_DEVICE ? id : CU_DEVICE_CPU;
  }
};

struct Advice {
  bool read_mostly = false;
  Place preferred, prefetched;
  std::set<int> accessed_by;
};

Mutex g_mutex;
std::map<uint64_t, Advice>& Pages() CR_REQUIRES(g_mutex) {
  static auto* pages = new std::map<uint64_t, Advice>;
  return *pages;
}

Place PlaceOf(const CUmemLocation& location) {
  return {int(location.type), location.type == CU_MEM_LOCATION_TYPE_HOST ? 0 : location.id};
}

CUmemLocation LocationOf(CUdevice device) {
  CUmemLocation location = {};
  location.type = device == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device == CU_DEVICE_CPU ? 0 : device;
  return location;
}

CUresult CheckLocation(const CUmemLocation& location) {
  if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
    return location.id >= 0 && location.id < DeviceCount() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
  }
  const bool host =
      location.type >= CU_MEM_LOCATION_TYPE_HOST && location.type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
  return host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CheckManaged(CUdeviceptr address, size_t bytes) {
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  const bool good =
      allocation && allocation->kind == MemoryKind::kManaged && bytes != 0 && bytes <= allocation->end() - address;
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

template <typename Change>
void Update(uint64_t address, uint64_t bytes, const Change& change) {
  MutexLock lock(&g_mutex);
  for (uint64_t page = address / kPage; page <= (address + bytes - 1) / kPage; ++page) change(Pages()[page]);
}

CUresult Prefetch(CUdeviceptr address, size_t bytes, const CUmemLocation& location) {
  if (CUresult result = CheckLocation(location); result != CUDA_SUCCESS) return result;
  if (CUresult result = CheckManaged(address, bytes); result != CUDA_SUCCESS) return result;
  Update(address, bytes, [&](Advice& advice) { advice.prefetched = PlaceOf(location); });
  return CUDA_SUCCESS;
}

}  // namespace

void ForgetAdvice(uint64_t address, uint64_t bytes) {
  MutexLock lock(&g_mutex);
  Pages().erase(Pages().lower_bound(address / kPage), Pages().upper_bound((address + bytes - 1) / kPage));
}

}  // namespace cuda_remote::softgpu

using namespace cuda_remote::softgpu;

SOFTGPU_API cuMemAdvise_v2(CUdeviceptr address, size_t bytes, CUmem_advise what, CUmemLocation location) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (CUresult result = CheckManaged(address, bytes); result != CUDA_SUCCESS) return result;
  // Other advice takes no place, but not every value for one either.
  const bool placed = what == CU_MEM_ADVISE_SET_PREFERRED_LOCATION || what == CU_MEM_ADVISE_SET_ACCESSED_BY ||
                      what == CU_MEM_ADVISE_UNSET_ACCESSED_BY;
  if (CUresult result = placed ? CheckLocation(location) : CUDA_SUCCESS; result != CUDA_SUCCESS) return result;
  if (unsigned(location.type) > CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) return CUDA_ERROR_INVALID_VALUE;
  const Place place = PlaceOf(location);
  switch (what) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
      Update(address, bytes, [what](Advice& a) { a.read_mostly = what == CU_MEM_ADVISE_SET_READ_MOSTLY; });
      return CUDA_SUCCESS;
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
      Update(address, bytes, [&place](Advice& a) { a.preferred = place; });
      return CUDA_SUCCESS;
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
      Update(address, bytes, [](Advice& a) { a.preferred = Place(); });
      return CUDA_SUCCESS;
    case CU_MEM_ADVISE_SET_ACCESSED_BY:
      Update(address, bytes, [&place](Advice& a) { a.accessed_by.insert(place.device()); });
      return CUDA_SUCCESS;
    case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
      Update(address, bytes, [&place](Advice& a) { a.accessed_by.erase(place.device()); });
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}
SOFTGPU_API cuMemAdvise(CUdeviceptr address, size_t bytes, CUmem_advise what, CUdevice device) {
  return cuMemAdvise_v2(address, bytes, what, LocationOf(device));
}

SOFTGPU_API cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation location, unsigned int flags,
                                  CUstream stream) {
  SOFTGPU_ENTER();
  ContextPtr context;
  StreamPtr resolved;
  if (CUresult result = ResolveStream(stream, &context, &resolved); result != CUDA_SUCCESS) return result;
  return flags != 0 ? CUDA_ERROR_INVALID_VALUE : Prefetch(address, bytes, location);
}
SOFTGPU_API cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream) {
  return cuMemPrefetchAsync_v2(address, bytes, LocationOf(device), 0, stream);
}

SOFTGPU_API cuMemPrefetchBatchAsync(CUdeviceptr* addresses, size_t* sizes, size_t count, CUmemLocation* locations,
                                    size_t* first, size_t location_count, unsigned long long flags, CUstream stream) {
  SOFTGPU_ENTER();
  ContextPtr context;
  StreamPtr resolved;
  if (stream == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult result = ResolveStream(stream, &context, &resolved); result != CUDA_SUCCESS) return result;
  const bool missing = addresses == nullptr || sizes == nullptr || locations == nullptr || first == nullptr;
  if (count == 0 || missing || location_count == 0 || first[0] != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  size_t location = 0;
  for (size_t i = 0; i < count; ++i) {
    while (location + 1 < location_count && first[location + 1] <= i) ++location;
    if (CUresult result = Prefetch(addresses[i], sizes[i], locations[location]); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

// What is discarded may hold anything, also what it held.
SOFTGPU_API cuMemDiscardBatchAsync(CUdeviceptr* addresses, size_t* sizes, size_t count, unsigned long long flags,
                                   CUstream stream) {
  SOFTGPU_ENTER();
  ContextPtr context;
  StreamPtr resolved;
  if (stream == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult result = ResolveStream(stream, &context, &resolved); result != CUDA_SUCCESS) return result;
  if (count == 0 || addresses == nullptr || sizes == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (CUresult result = CheckManaged(addresses[i], sizes[i]); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}
SOFTGPU_API cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr* addresses, size_t* sizes, size_t count,
                                              CUmemLocation* locations, size_t* first, size_t location_count,
                                              unsigned long long flags, CUstream stream) {
  return cuMemPrefetchBatchAsync(addresses, sizes, count, locations, first, location_count, flags, stream);
}

SOFTGPU_API cuMemRangeGetAttribute(void* data, size_t bytes, CUmem_range_attribute attribute, CUdeviceptr address,
                                   size_t count) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (CUresult result = CheckManaged(address, count); result != CUDA_SUCCESS) return result;
  if (data == nullptr || bytes == 0 || bytes % sizeof(int) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY && bytes != sizeof(int)) return CUDA_ERROR_INVALID_VALUE;
  // What holds for all pages.
  Advice all;
  {
    MutexLock lock(&g_mutex);
    const uint64_t first = address / kPage, last = (address + count - 1) / kPage;
    for (uint64_t page = first; page <= last; ++page) {
      auto it = Pages().find(page);
      const Advice here = it == Pages().end() ? Advice() : it->second;
      if (page == first) all = here;
      all.read_mostly = all.read_mostly && here.read_mostly;
      if (!(all.preferred == here.preferred)) all.preferred = Place();
      if (!(all.prefetched == here.prefetched)) all.prefetched = Place();
      for (auto one = all.accessed_by.begin(); one != all.accessed_by.end();) {
        one = here.accessed_by.count(*one) != 0 ? std::next(one) : all.accessed_by.erase(one);
      }
    }
  }
  int value = 0;
  switch (attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
      value = all.read_mostly;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
      value = all.preferred.device();
      break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
      value = all.prefetched.device();
      break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
      value = all.preferred.type;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID:
      value = all.preferred.type == CU_MEM_LOCATION_TYPE_INVALID ? CU_DEVICE_INVALID : all.preferred.id;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
      value = all.prefetched.type;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID:
      value = all.prefetched.type == CU_MEM_LOCATION_TYPE_INVALID ? CU_DEVICE_INVALID : all.prefetched.id;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: {
      std::vector<int> devices(all.accessed_by.begin(), all.accessed_by.end());
      devices.resize(bytes / sizeof(int), CU_DEVICE_INVALID);
      std::memcpy(data, devices.data(), bytes);
      return CUDA_SUCCESS;
    }
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(data, &value, sizeof value);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuMemRangeGetAttributes(void** data, size_t* sizes, CUmem_range_attribute* attributes, size_t count,
                                    CUdeviceptr address, size_t bytes) {
  SOFTGPU_ENTER();
  if (data == nullptr || sizes == nullptr || attributes == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    CUresult result = cuMemRangeGetAttribute(data[i], sizes[i], attributes[i], address, bytes);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}
