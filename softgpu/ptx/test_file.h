// SPDX-License-Identifier: Apache-2.0
// For tests: files that nvcc made.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_TEST_FILE_H_
#define CUDA_REMOTE_SOFTGPU_PTX_TEST_FILE_H_

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace cuda_remote::softgpu::ptx {

// A file of this package; PTX_TEST_DIR says where without Bazel.
inline std::string ReadTestFile(const std::string& name) {
  const char* given = std::getenv("PTX_TEST_DIR");
  std::ifstream file((given != nullptr ? std::string(given) : std::string("softgpu/ptx")) + "/" + name);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_TEST_FILE_H_
