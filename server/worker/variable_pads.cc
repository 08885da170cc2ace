#include "server/worker/variable_pads.h"

#include <string>

namespace cuda_remote::server {
namespace {

// Each attempt fills a hole, or empties one.
constexpr int kMostAttempts = 200;
// The driver's variables begin at multiples of it.
constexpr uint64_t kUnit = 256;

std::string PadImage(uint64_t bytes) {
  return ".version 6.3\n.target sm_75\n.address_size 64\n.visible .global .align 256 .b8 cuda_remote_pad[" +
         std::to_string(bytes) + "];\n";
}

}  // namespace

bool VariablePads::Fill(uint64_t bytes, uint64_t until) {
  CUcontext context = nullptr;
  if (driver_.cuCtxGetCurrent(&context) != CUDA_SUCCESS) return false;
  // Something alive may lie in between; then a smaller pad fits in front of it.
  for (; bytes >= kUnit; bytes = bytes / 2 / kUnit * kUnit) {
    CUmodule module = nullptr;
    if (driver_.cuModuleLoadData(&module, PadImage(bytes).c_str()) != CUDA_SUCCESS) return false;
    CUdeviceptr place = 0;
    size_t size = 0;
    driver_.cuModuleGetGlobal_v2(&place, &size, module, "cuda_remote_pad");
    // A smaller one may find a hole further in front that the module itself does not fit into.
    if (place != 0 && place < until) {
      pads_.emplace(place, Pad{module, bytes, context});
      return true;
    }
    driver_.cuModuleUnload(module);
  }
  return false;
}

bool VariablePads::Uncover(uint64_t from, uint64_t until) {
  CUcontext context = nullptr;
  if (driver_.cuCtxGetCurrent(&context) != CUDA_SUCCESS) return false;
  bool any = false;
  for (auto it = pads_.begin(); it != pads_.end();) {
    const bool there = it->second.context == context && it->first + it->second.bytes > from && it->first < until;
    if (there) driver_.cuModuleUnload(it->second.module);
    any = any || there;
    it = there ? pads_.erase(it) : std::next(it);
  }
  return any;
}

uint64_t VariablePads::Move(uint64_t lowest, uint64_t wanted, const std::function<void()>& unload,
                            const std::function<uint64_t()>& load) {
  for (int attempt = 0; attempt < kMostAttempts && lowest != 0 && lowest != wanted; ++attempt) {
    unload();
    const bool changed = lowest < wanted ? Fill(wanted - lowest, wanted) : Uncover(wanted, lowest);
    lowest = load();
    if (!changed) break;
  }
  return lowest;
}

}  // namespace cuda_remote::server
