// SPDX-License-Identifier: Apache-2.0
// For tests: a module with memory for its variables, and launches in one line.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_TEST_DEVICE_H_
#define CUDA_REMOTE_SOFTGPU_PTX_TEST_DEVICE_H_

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "proto/threads/mutex.h"
#include "softgpu/ptx/ptx.h"

namespace cuda_remote::softgpu::ptx {

class TestDevice : public MemoryMap {
 public:
  ~TestDevice() override {
    for (const auto& [begin, bytes] : blocks_) std::free(reinterpret_cast<void*>(begin));
  }

  // Parses and binds; the test fails if that fails.
  bool Load(const std::string& text) {
    auto parsed = Module::Parse(text);
    if (!parsed.ok()) {
      ADD_FAILURE() << parsed.status().message();
      return false;
    }
    module_ = *std::move(parsed);
    SymbolAddresses addresses;
    for (const auto& global : module_->globals()) addresses[global.name] = Allocate(global.size);
    if (const Status bound = module_->Bind(addresses); !bound.ok()) {
      ADD_FAILURE() << bound.message();
      return false;
    }
    for (const auto& global : module_->globals()) {
      const std::string image = module_->Image(global);
      std::memcpy(reinterpret_cast<void*>(addresses[global.name]), image.data(), image.size());
    }
    symbols_ = addresses;
    return true;
  }

  uint64_t Allocate(uint64_t bytes) {
    MutexLock lock(&mutex_);
    const uint64_t size = (bytes + 255) / 256 * 256 + 256;
    void* memory = std::aligned_alloc(256, size);
    std::memset(memory, 0, size);
    blocks_[uint64_t(memory)] = bytes;
    return uint64_t(memory);
  }

  bool Lookup(uint64_t address, Interval* interval) override {
    MutexLock lock(&mutex_);
    auto it = blocks_.upper_bound(address);
    if (it == blocks_.begin()) return false;
    --it;
    if (address >= it->first + it->second) return false;
    interval->begin = it->first;
    interval->end = it->first + it->second;
    interval->writable = it->first != read_only;
    return true;
  }

  template <class T>
  T* Array(size_t count) {
    return reinterpret_cast<T*>(Allocate(count * sizeof(T)));
  }
  template <class T>
  T* Symbol(const std::string& name) {
    return reinterpret_cast<T*>(symbols_.at(name));
  }

  // Packs arguments as a kernel's parameters.
  template <class... A>
  LaunchResult Run(const std::string& kernel, Dim3 grid, Dim3 block, A... args) {
    const KernelInfo* info = module_->FindKernel(kernel);
    if (info == nullptr) {
      ADD_FAILURE() << "no kernel " << kernel;
      return {};
    }
    std::string params(info->param_bytes, '\0');
    size_t index = 0;
    [[maybe_unused]] auto put = [&](const auto& value) {
      if (index >= info->params.size()) {
        ADD_FAILURE() << "too many arguments";
        return;
      }
      const auto& param = info->params[index++];
      std::memcpy(&params[param.offset], &value, std::min<size_t>(param.size, sizeof value));
    };
    (put(args), ...);
    LaunchOptions launch = options;
    launch.grid = grid;
    launch.block = block;
    launch.params = params;
    launch.memory = this;
    launch.print = [this](std::string_view text) { printed.append(text); };
    launch.device_malloc = [this](uint64_t bytes) { return Allocate(bytes); };
    return module_->Launch(kernel, launch);
  }

  const Module& module() const { return *module_; }
  LaunchOptions options;
  std::string printed;
  uint64_t read_only = 0;

 private:
  std::unique_ptr<Module> module_;
  SymbolAddresses symbols_;
  Mutex mutex_;
  std::map<uint64_t, uint64_t> blocks_ CR_GUARDED_BY(mutex_);
};

// A module around a kernel body: parameters "out" and "in" (pointers, in %rd1 and %rd2), registers declared.
inline std::string Kernel(const std::string& body, const std::string& before = "") {
  return ".version 8.5\n.target sm_90\n.address_size 64\n" + before +
         "\n.visible .entry test(.param .u64 out, .param .u64 in)\n{\n"
         ".reg .pred %p<8>;\n.reg .b16 %h<16>;\n.reg .b32 %r<32>;\n.reg .f32 %f<16>;\n.reg .b64 %rd<32>;\n"
         ".reg .f64 %fd<16>;\n"
         "ld.param.u64 %rd1, [out];\nld.param.u64 %rd2, [in];\n" +
         body + "\nret;\n}\n";
}

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_TEST_DEVICE_H_
