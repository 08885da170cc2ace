// SPDX-License-Identifier: Apache-2.0
#include "server/driver/driver_table.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace cuda_remote::server {
namespace {

// The toolkit's stub library exports every documented symbol; its functions answer CUDA_ERROR_STUB_LIBRARY.
const char kStub[] = "/usr/local/cuda/lib64/stubs/libcuda.so";

TEST(DriverTableTest, FindsEveryFunction) {
  const absl::StatusOr<DriverTable> table = LoadDriver(kStub);
  ASSERT_TRUE(table.ok()) << table.status().message();
  EXPECT_EQ(MissingFunctions(), 0);
  EXPECT_EQ(table->cuInit(0), CUDA_ERROR_STUB_LIBRARY);
  CUdeviceptr address;
  EXPECT_EQ(table->cuMemAlloc(&address, 1), CUDA_ERROR_STUB_LIBRARY);  // the macro of cuda.h finds the member
  EXPECT_NE(DriverSymbol("cuLaunchKernel_ptsz"), nullptr);
  EXPECT_EQ(DriverSymbol("cuNoSuchSymbol"), nullptr);
}

TEST(DriverTableTest, SaysWhyALibraryCannotBeUsed) {
  const auto why = [](const std::string& path) { return std::string(LoadDriver(path).status().message()); };
  const std::string nowhere = why("/nonexistent/libcuda.so.1"), other = why("libm.so.6");
  EXPECT_NE(nowhere.find("/nonexistent/libcuda.so.1"), std::string::npos) << nowhere;
  EXPECT_NE(other.find("not a CUDA driver"), std::string::npos) << other;
}

TEST(DriverTableTest, MissingFunctionsAnswerNotSupported) {
  // A driver of one function.
  const std::string folder = ::testing::TempDir();
  const std::string source = folder + "/tiny.c", library = folder + "/libtiny.so";
  FILE* f = std::fopen(source.c_str(), "w");
  ASSERT_NE(f, nullptr);
  std::fputs("int cuInit(unsigned flags) { return flags == 7 ? 0 : 1; }\n", f);
  std::fclose(f);
  ASSERT_EQ(std::system(("gcc -shared -fPIC -o " + library + " " + source).c_str()), 0);
  const absl::StatusOr<DriverTable> table = LoadDriver(library);
  ASSERT_TRUE(table.ok()) << table.status().message();
  EXPECT_EQ(MissingFunctions(), int(kDriverFunctions) - 1);
  EXPECT_EQ(table->cuInit(7), CUDA_SUCCESS);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(table->cuCtxSynchronize(), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(table->cuCtxSynchronize(), CUDA_ERROR_NOT_SUPPORTED);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("cuCtxSynchronize"), std::string::npos);
  EXPECT_EQ(log.find("cuCtxSynchronize"), log.rfind("cuCtxSynchronize"));  // once
}

}  // namespace
}  // namespace cuda_remote::server
