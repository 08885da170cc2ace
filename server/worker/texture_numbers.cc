#include "server/worker/texture_numbers.h"

namespace cuda_remote::server {
namespace {

// More than the driver was seen to make for itself (6).
constexpr int kNumbers = 64;

}  // namespace

void TextureNumbers::Reserve(const DriverTable& driver, uint64_t context, CUdeviceptr memory) {
  CUDA_RESOURCE_DESC resource{};
  resource.resType = CU_RESOURCE_TYPE_LINEAR;
  resource.res.linear.devPtr = memory;
  resource.res.linear.format = CU_AD_FORMAT_UNSIGNED_INT8;
  resource.res.linear.numChannels = 1;
  resource.res.linear.sizeInBytes = kBytes;
  const CUDA_TEXTURE_DESC texture{};
  std::set<uint64_t>& numbers = reserved_[context];
  for (int i = 0; i < kNumbers; ++i) {
    CUtexObject object = 0;
    if (driver.cuTexObjectCreate(&object, &resource, &texture, nullptr) != CUDA_SUCCESS) break;
    numbers.insert(object);
  }
}

void TextureNumbers::Release(const DriverTable& driver, uint64_t context, uint64_t number) {
  const auto found = reserved_.find(context);
  if (found != reserved_.end() && found->second.erase(number) != 0) driver.cuTexObjectDestroy(number);
}

std::vector<uint64_t> TextureNumbers::contexts() const {
  std::vector<uint64_t> ids;
  for (const auto& [context, numbers] : reserved_) ids.push_back(context);
  return ids;
}

void TextureNumbers::ReleaseAll(const DriverTable& driver, uint64_t context, bool gone) {
  const auto found = reserved_.find(context);
  if (found == reserved_.end()) return;
  if (!gone) {
    for (const uint64_t number : found->second) driver.cuTexObjectDestroy(number);
  }
  reserved_.erase(found);
}

}  // namespace cuda_remote::server
