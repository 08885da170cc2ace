// SPDX-License-Identifier: Apache-2.0
// Tests of MD2, error names and the private export tables.

#include <cuda.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "proto/base/text.h"
#include "proto/driverabi/error_names.h"
#include "proto/driverabi/export_tables.h"
#include "proto/driverabi/md2.h"

namespace cuda_remote::driverabi {
namespace {

std::string Digits(const Md2Digest& digest) {
  return HexBytes({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

// RFC 1319, appendix A.5.
TEST(Md2, TestSuiteOfTheRfc) {
  EXPECT_EQ(Digits(Md2("")), "8350e5a3e24c153df2275c9f80692773");
  EXPECT_EQ(Digits(Md2("a")), "32ec01ec4a6dac72c0ab96fb34c0b5d1");
  EXPECT_EQ(Digits(Md2("abc")), "da853b0d3f88d99b30283a69e6ded6bb");
  EXPECT_EQ(Digits(Md2("message digest")), "ab4f496bfb2a530b219ff33031fe06b0");
  EXPECT_EQ(Digits(Md2("12345678901234567890123456789012345678901234567890123456789012345678901234567890")),
            "d5976f79d83d3a0dc9806c3c66f3efd8");
}

TEST(ErrorNames, KnownAndUnknown) {
  EXPECT_STREQ(ErrorName(CUDA_SUCCESS), "CUDA_SUCCESS");
  EXPECT_STREQ(ErrorString(CUDA_SUCCESS), "no error");
  EXPECT_STREQ(ErrorName(CUDA_ERROR_ILLEGAL_ADDRESS), "CUDA_ERROR_ILLEGAL_ADDRESS");
  EXPECT_STREQ(ErrorString(CUDA_ERROR_UNKNOWN), "unknown error");
  EXPECT_EQ(ErrorName(CUresult(3000)), nullptr);
  EXPECT_EQ(DescribeError(CUDA_ERROR_OUT_OF_MEMORY), "CUDA_ERROR_OUT_OF_MEMORY (2, out of memory)");
  EXPECT_EQ(DescribeError(3000), "CUDA error 3000");
  EXPECT_EQ(ErrorString(CUresult(-1)), nullptr);
}

thread_local CUcontext t_current = nullptr;
std::string g_logged;

class ExportTables : public testing::Test {
 protected:
  void SetUp() override {
    Host host;
    host.driver_version = [](int* version) { return *version = 13000, CUDA_SUCCESS; };
    host.device_count = [](int* count) { return *count = 1, CUDA_SUCCESS; };
    host.device_uuid = [](CUdevice, CUuuid* uuid) { return std::memset(uuid, 7, sizeof(*uuid)), CUDA_SUCCESS; };
    host.device_attribute = [](int* value, CUdevice_attribute attribute, CUdevice) {
      return *value = int(attribute), CUDA_SUCCESS;
    };
    host.primary_context = [](CUcontext* context, CUdevice) { return *context = CUcontext(0x10), CUDA_SUCCESS; };
    host.current_context = [] { return t_current; };
    host.module_functions = [](CUmodule, std::vector<CUfunction>* functions) {
      *functions = {CUfunction(0x1), CUfunction(0x2)};
      return CUDA_SUCCESS;
    };
    host.log = [](const char* line) { g_logged += line; };
    SetHost(host);
    t_current = nullptr;
  }

  // `id` as it is written: 32 hexadecimal digits.
  static const uint64_t* TableOf(const char* id) {
    CUuuid uuid;
    for (int i = 0; i < 16; ++i) uuid.bytes[i] = char(std::stoi(std::string(id + 2 * i, 2), nullptr, 16));
    const void* table = nullptr;
    EXPECT_EQ(GetExportTable(&table, &uuid), CUDA_SUCCESS) << id;
    return static_cast<const uint64_t*>(table);
  }
};

TEST_F(ExportTables, UnknownTableIsNotFound) {
  CUuuid id{};
  const void* table = &id;
  EXPECT_EQ(GetExportTable(&table, &id), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(table, nullptr);
}

TEST_F(ExportTables, DriverCheckIsTheKeyedDigestOfWhatTheRuntimeSees) {
  const uint64_t* const check = TableOf("d4082055bde6704b8d34ba123c66e1f2");
  const uint64_t* const runtime = TableOf("6bd5fb6c5bf4e74a8987d93912fd9df9");
  EXPECT_EQ(check[0], 3 * 8u);
  EXPECT_EQ(runtime[0], 13 * 8u);
  const auto call = reinterpret_cast<CUresult (*)(uint32_t, uint64_t, uint64_t*)>(check[1]);
  uint64_t result[2] = {};
  ASSERT_EQ(call(13000, 1, result), CUDA_SUCCESS);
  EXPECT_EQ(result[0], 0x3341181C03CB675Cu);
  ASSERT_EQ(call(13002, 1234567890, result), CUDA_SUCCESS);
  std::string message;
  auto add = [&message](const auto& value) { message.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  add(uint32_t(13000));
  add(uint32_t(13002));
  add(uint32_t(getpid()));
  add(uint32_t(pthread_self()));
  add(reinterpret_cast<uint64_t>(runtime));
  add(reinterpret_cast<uint64_t>(check));
  add(check[1]);
  add(uint64_t(1234567890));
  message.append(16, char(7));
  add(int32_t(50));
  add(int32_t(33));
  add(int32_t(34));
  const unsigned char key[] = {0x14, 0x6A, 0xDD, 0xAE, 0x53, 0xA9, 0xA7, 0x52,
                               0xAA, 0x08, 0x41, 0x36, 0x0B, 0xF5, 0x5A, 0x9F};
  const Md2Digest want = HmacMd2({reinterpret_cast<const char*>(key), sizeof(key)}, message);
  EXPECT_EQ(std::memcmp(want.data(), result, 16), 0);
}

TEST_F(ExportTables, UnusedWordsFailByName) {
  const uint64_t* const runtime = TableOf("6bd5fb6c5bf4e74a8987d93912fd9df9");
  g_logged.clear();
  EXPECT_EQ(reinterpret_cast<CUresult (*)()>(runtime[5])(), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(reinterpret_cast<CUresult (*)()>(runtime[5])(), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(g_logged, "unsupported call: word 5 of private table 6bd5fb6c");
}

TEST_F(ExportTables, StorageKeepsValuesForEachContext) {
  const uint64_t* const table = TableOf("c693336e1121df11a8c368f355d89593");
  const auto put = reinterpret_cast<CUresult (*)(CUcontext, void*, void*, void (*)(CUcontext, void*, void*))>(table[0]);
  const auto remove = reinterpret_cast<CUresult (*)(CUcontext, void*)>(table[1]);
  const auto get = reinterpret_cast<CUresult (*)(void**, CUcontext, void*)>(table[2]);
  static std::vector<void*> destroyed;
  const auto destructor = [](CUcontext, void*, void* value) { destroyed.push_back(value); };
  int a, b, key, other;
  void* value = &other;
  EXPECT_EQ(get(&value, nullptr, &key), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(put(nullptr, &key, &a, nullptr), CUDA_ERROR_INVALID_CONTEXT);
  t_current = CUcontext(0x10);
  EXPECT_EQ(get(&value, nullptr, &key), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(value, &other);
  ASSERT_EQ(put(nullptr, &key, &a, destructor), CUDA_SUCCESS);
  EXPECT_EQ(put(CUcontext(0x10), &key, &b, destructor), CUDA_ERROR_INVALID_HANDLE);
  ASSERT_EQ(put(CUcontext(0x20), &key, &b, destructor), CUDA_SUCCESS);
  ASSERT_EQ(get(&value, nullptr, &key), CUDA_SUCCESS);
  EXPECT_EQ(value, &a);
  ASSERT_EQ(get(&value, CUcontext(0x20), &key), CUDA_SUCCESS);
  EXPECT_EQ(value, &b);
  ContextDestroyed(CUcontext(0x20));
  EXPECT_EQ(destroyed, std::vector<void*>{&b});
  EXPECT_EQ(get(&value, CUcontext(0x20), &key), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(remove(nullptr, &key), CUDA_SUCCESS);
  EXPECT_EQ(remove(nullptr, &key), CUDA_ERROR_INVALID_HANDLE);
  ContextDestroyed(CUcontext(0x10));
  EXPECT_EQ(destroyed.size(), 1u);
}

// A thread's remembered answer must not outlive the value.
TEST_F(ExportTables, StorageChangesAreSeenByOtherThreads) {
  const uint64_t* const table = TableOf("c693336e1121df11a8c368f355d89593");
  const auto put = reinterpret_cast<CUresult (*)(CUcontext, void*, void*, void*)>(table[0]);
  const auto remove = reinterpret_cast<CUresult (*)(CUcontext, void*)>(table[1]);
  const auto get = reinterpret_cast<CUresult (*)(void**, CUcontext, void*)>(table[2]);
  int key;
  for (uintptr_t i = 1; i <= 100; ++i) {
    ASSERT_EQ(put(CUcontext(0x30), &key, reinterpret_cast<void*>(i), nullptr), CUDA_SUCCESS);
    void* value = nullptr;
    ASSERT_EQ(get(&value, CUcontext(0x30), &key), CUDA_SUCCESS);
    ASSERT_EQ(value, reinterpret_cast<void*>(i));
    std::thread([&] { ASSERT_EQ(remove(CUcontext(0x30), &key), CUDA_SUCCESS); }).join();
    ASSERT_EQ(get(&value, CUcontext(0x30), &key), CUDA_ERROR_INVALID_HANDLE);
  }
}

TEST_F(ExportTables, ModulesFunctionsAreVisited) {
  const uint64_t* const table = TableOf("6e163fbeb958444d835ce182aff1991e");
  const auto visit = reinterpret_cast<int (*)(CUcontext, CUmodule, void (*)(void*, CUfunction), void*)>(table[7]);
  std::vector<CUfunction> seen;
  EXPECT_EQ(visit(
                nullptr, nullptr,
                [](void* user, CUfunction f) { static_cast<std::vector<CUfunction>*>(user)->push_back(f); }, &seen),
            1);
  EXPECT_EQ(seen, (std::vector<CUfunction>{CUfunction(0x1), CUfunction(0x2)}));
}

}  // namespace
}  // namespace cuda_remote::driverabi
