// SPDX-License-Identifier: Apache-2.0
// The JIT linker: PTX texts put together into one, which is what cuLinkComplete gives back in a cubin's place.
#include <cstring>
#include <fstream>
#include <iterator>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/module.h"
#include "softgpu/ptx/merge.h"

using namespace cuda_remote::softgpu;

namespace {

struct Linker {
  Mutex mutex;
  JitOptions options CR_GUARDED_BY(mutex);
  std::vector<std::string> texts CR_GUARDED_BY(mutex);
  std::string image CR_GUARDED_BY(mutex);  // once linked; with a zero at the end

  explicit Linker(JitOptions given) : options(given) {}
  CUlinkState handle() { return reinterpret_cast<CUlinkState>(this); }
};

CUresult AddTextLocked(Linker& linker, CUjitInputType type, const char* data, size_t size, const char* name,
                       JitOptions options) CR_REQUIRES(linker.mutex) {
  std::string text, log;
  CUresult result = CUDA_SUCCESS;
  switch (type) {
    case CU_JIT_INPUT_PTX:
      text.assign(data, strnlen(data, size));
      break;
    case CU_JIT_INPUT_FATBINARY:
      result = PtxFromImage(data, &text, &log);
      break;
    default:
      log = "the software GPU links PTX, and fat binaries with PTX in them, alone";
      LogOnce(log);
      result = CUDA_ERROR_NO_BINARY_FOR_GPU;
      break;
  }
  while (!text.empty() && text.back() == 0) text.pop_back();
  if (result == CUDA_SUCCESS) {
    if (const auto parsed = ptx::Module::Parse(text).status(); !parsed.ok()) {
      log = parsed.message();
      result = CUDA_ERROR_INVALID_PTX;
    }
  }
  if (result != CUDA_SUCCESS) {
    if (name != nullptr) log = std::string(name) + ": " + log;
    linker.options.SetErrorLog(log);
    options.SetErrorLog(log);
    return result;
  }
  linker.texts.push_back(std::move(text));
  return CUDA_SUCCESS;
}

}  // namespace

SOFTGPU_API cuLinkCreate_v2(unsigned int count, CUjit_option* options, void** values, CUlinkState* out) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = Registry<Linker>::Get().Add(std::make_shared<Linker>(JitOptions(count, options, values)))->handle();
  return CUDA_SUCCESS;
}
SOFTGPU_API cuLinkCreate(unsigned int count, CUjit_option* options, void** values, CUlinkState* out) {
  return cuLinkCreate_v2(count, options, values, out);
}

SOFTGPU_API cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void* data, size_t size, const char* name,
                             unsigned int count, CUjit_option* options, void** values) {
  SOFTGPU_ENTER();
  std::shared_ptr<Linker> linker = Registry<Linker>::Get().Find(state);
  if (!linker) return CUDA_ERROR_INVALID_HANDLE;
  if (data == nullptr || size == 0) return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&linker->mutex);
  if (!linker->image.empty()) return CUDA_ERROR_INVALID_VALUE;
  return AddTextLocked(*linker, type, static_cast<const char*>(data), size, name, JitOptions(count, options, values));
}
SOFTGPU_API cuLinkAddData(CUlinkState state, CUjitInputType type, void* data, size_t size, const char* name,
                          unsigned int count, CUjit_option* options, void** values) {
  return cuLinkAddData_v2(state, type, data, size, name, count, options, values);
}

SOFTGPU_API cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char* path, unsigned int count,
                             CUjit_option* options, void** values) {
  SOFTGPU_ENTER();
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::ifstream file(path, std::ios::binary);
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  bytes.push_back(0);
  return cuLinkAddData_v2(state, type, bytes.data(), bytes.size(), path, count, options, values);
}
SOFTGPU_API cuLinkAddFile(CUlinkState state, CUjitInputType type, const char* path, unsigned int count,
                          CUjit_option* options, void** values) {
  return cuLinkAddFile_v2(state, type, path, count, options, values);
}

SOFTGPU_API cuLinkComplete(CUlinkState state, void** image, size_t* size) {
  SOFTGPU_ENTER();
  std::shared_ptr<Linker> linker = Registry<Linker>::Get().Find(state);
  if (!linker) return CUDA_ERROR_INVALID_HANDLE;
  if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&linker->mutex);
  if (linker->image.empty()) {
    auto merged = ptx::Merge(linker->texts);
    const auto linked = merged.ok() ? ptx::Module::Parse(*merged).status() : merged.status();
    if (!linked.ok()) {
      linker->options.SetErrorLog(linked.message());
      return CUDA_ERROR_INVALID_IMAGE;
    }
    linker->image = *std::move(merged);
    linker->image.push_back(0);
    linker->options.SetErrorLog("");
    linker->options.SetInfoLog("linked " + std::to_string(linker->texts.size()) + " PTX texts");
  }
  *image = &linker->image[0];
  if (size != nullptr) *size = linker->image.size();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuLinkDestroy(CUlinkState state) {
  SOFTGPU_ENTER();
  return Registry<Linker>::Get().Remove(state) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
