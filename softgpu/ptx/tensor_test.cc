// SPDX-License-Identifier: Apache-2.0
// Copies of boxes of tensors, against a reference that goes element by element.
#include <algorithm>
#include <cmath>
#include <random>

#include "softgpu/ptx/tensor_map.h"
#include "softgpu/ptx/test_device.h"

namespace cuda_remote::softgpu::ptx {
namespace {

constexpr const char* kShared = ".shared .align 1024 .b8 box[32768];\n.shared .align 8 .b64 bar;\n";

// Bytes to `out` from shared memory, or the other way.
std::string Move(uint64_t bytes, bool out) {
  const std::string move = out ? "ld.shared.v4.u32 {%r20,%r21,%r22,%r23}, [%r24];\nst.global.v4.u32 [%rd20], "
                                 "{%r20,%r21,%r22,%r23};\n"
                               : "ld.global.v4.u32 {%r20,%r21,%r22,%r23}, [%rd20];\nst.shared.v4.u32 [%r24], "
                                 "{%r20,%r21,%r22,%r23};\n";
  const std::string loop = out ? "take" : "give";
  return "mov.u32 %r24, box;\nmov.u64 %rd20, %rd1;\nmov.u32 %r25, 0;\n" + loop + ": " + move +
         "add.u32 %r24, %r24, 16;\nadd.u64 %rd20, %rd20, 16;\nadd.u32 %r25, %r25, 16;\nsetp.lt.u32 %p7, %r25, " +
         std::to_string(bytes) + ";\n@%p7 bra " + loop + ";\n";
}

std::string Coordinates(const std::vector<int>& at) {
  std::string text;
  for (const int c : at) text += (text.empty() ? "" : ", ") + std::to_string(c);
  return "{" + text + "}";
}

std::string Load(const std::vector<int>& at, uint64_t bytes) {
  return "mbarrier.init.shared.b64 [bar], 1;\nmbarrier.arrive.expect_tx.shared.b64 _, [bar], " + std::to_string(bytes) +
         ";\ncp.async.bulk.tensor." + std::to_string(at.size()) +
         "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%rd2, " + Coordinates(at) +
         "], [bar];\nmbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;\n@!%p1 trap;\n";
}

std::string Store(const std::vector<int>& at, const std::string& reduction = "") {
  return std::string(reduction.empty() ? "cp" : "cp.reduce") + ".async.bulk.tensor." + std::to_string(at.size()) +
         "d.global.shared::cta" + (reduction.empty() ? "" : "." + reduction) + ".tile.bulk_group [%rd2, " +
         Coordinates(at) + "], [box];\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n";
}

// A tensor of random bytes with gaps between its rows, and a map of it.
class Tensors : public ::testing::Test {
 protected:
  void Make(TensorType type, std::vector<uint64_t> dim, std::vector<uint16_t> box, std::vector<uint8_t> step,
            uint8_t span = 0) {
    map_ = TensorMap();
    map_.type = type;
    map_.rank = uint8_t(dim.size());
    map_.span = span;
    uint64_t size = TensorBytes(type);
    for (uint32_t i = 0; i < kTensorDimensions; ++i) {
      const bool used = i < map_.rank;
      if (used && i > 0) {
        size = (size + 15) / 16 * 16 + 16;
        map_.stride[i - 1] = size;
      }
      map_.dim[i] = used ? dim[i] : 1;
      map_.box[i] = used ? box[i] : 1;
      map_.step[i] = used ? step[i] : 1;
      size *= map_.dim[i];
    }
    bytes_ = (size + 15) / 16 * 16;
    data_ = device_.Array<uint8_t>(bytes_);
    map_.address = uint64_t(data_);
    for (uint64_t i = 0; i < bytes_; ++i) data_[i] = uint8_t(random_());
  }
  uint64_t BoxBytes() const {
    uint64_t bytes = TensorBytes(map_.type);
    for (uint32_t i = 0; i < kTensorDimensions; ++i) bytes *= Count(i);
    return bytes;
  }
  uint64_t Count(uint32_t i) const { return (map_.box[i] + map_.step[i] - 1u) / map_.step[i]; }
  // Calls visit(where in shared memory, where in global memory or null) for each element of a box.
  // `whole`: in dimension 0 the tensor counts as a multiple of so many elements.
  template <class F>
  void ForEach(const std::vector<int>& at, F visit, uint64_t whole = 1) const {
    uint64_t index[kTensorDimensions];
    for (uint64_t element = 0; element < BoxBytes() / TensorBytes(map_.type); ++element) {
      uint64_t rest = element, address = 0;
      bool inside = true;
      for (uint32_t i = 0; i < map_.rank; ++i) {
        index[i] = rest % Count(i);
        rest /= Count(i);
        const int64_t place = at[i] + int64_t(index[i]) * map_.step[i];
        inside &= place >= 0 && place < int64_t(i == 0 ? (map_.dim[i] + whole - 1) / whole * whole : map_.dim[i]);
        address += uint64_t(place) * (i == 0 ? TensorBytes(map_.type) : map_.stride[i - 1]);
      }
      // 16 bytes of a row change places with the row's number.
      uint64_t place = element * TensorBytes(map_.type);
      if (map_.span != 0) {
        const uint64_t row = place / map_.span, piece = place % map_.span / 16;
        const uint64_t every = 128 / map_.span;  // so many rows are swizzled alike
        place = row * map_.span + (piece ^ (row / every % (map_.span / 16))) * 16 + place % 16;
      }
      visit(place, inside ? data_ + address : nullptr);
    }
  }
  LaunchResult Run(const std::string& body) {
    if (!device_.Load(Kernel(body, kShared))) return {};
    auto* map = device_.Array<TensorMap>(1);
    *map = map_;
    return device_.Run("test", {1}, {1}, out_, map);
  }
  // The map's number of coordinates, partly outside.
  std::vector<int> Somewhere() {
    std::vector<int> at;
    for (uint32_t i = 0; i < map_.rank; ++i) {
      const int every = i == 0 ? int(16 / TensorBytes(map_.type)) : 1;  // 16 bytes in the first dimension
      const int least = int(map_.box[i]) - every, range = int(map_.dim[i]) + least;
      at.push_back(int(random_() % uint32_t(range / every + 1)) * every - least);
    }
    return at;
  }

  TestDevice device_;
  TensorMap map_;
  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
  uint8_t* out_ = device_.Array<uint8_t>(65536);
  std::mt19937 random_{7};
};

struct Shape {
  TensorType type;
  std::vector<uint64_t> dim;
  std::vector<uint16_t> box;
  std::vector<uint8_t> step;
  uint8_t span;
};
const Shape kShapes[] = {
    {TensorType::kU8, {300}, {64}, {1}, 0},
    {TensorType::kU16, {50, 20}, {16, 5}, {1, 1}, 0},
    {TensorType::kF32, {40, 30}, {32, 20}, {1, 1}, 128},
    {TensorType::kU32, {40, 30}, {16, 20}, {1, 1}, 64},
    {TensorType::kBf16, {40, 30}, {16, 20}, {1, 1}, 32},
    {TensorType::kF64, {20, 9, 5}, {4, 7, 3}, {1, 3, 2}, 0},
    {TensorType::kU8, {100, 9, 5}, {128, 7, 3}, {1, 2, 1}, 128},
    {TensorType::kF16, {30, 5, 4, 3}, {8, 2, 3, 2}, {1, 1, 2, 1}, 0},
    {TensorType::kS64, {9, 5, 4, 3, 2}, {2, 4, 2, 3, 2}, {1, 1, 1, 2, 1}, 0},
    {TensorType::kS32, {9, 5, 4, 3, 3}, {8, 3, 2, 2, 2}, {1, 2, 1, 1, 1}, 32},
};

TEST_F(Tensors, Loads) {
  for (const Shape& shape : kShapes) {
    Make(shape.type, shape.dim, shape.box, shape.step, shape.span);
    const uint32_t bytes = TensorBytes(map_.type);
    for (int round = 0; round < 12; ++round) {
      const std::vector<int> at = Somewhere();
      const auto result = Run(Load(at, BoxBytes()) + Move(BoxBytes(), true));
      ASSERT_TRUE(result.ok()) << result.message;
      const uint64_t zero = 0;
      ForEach(at, [&](uint64_t place, const uint8_t* element) {
        const void* expected = element != nullptr ? element : static_cast<const void*>(&zero);
        ASSERT_EQ(0, std::memcmp(expected, out_ + place, bytes)) << Coordinates(at) << " byte " << place;
      });
    }
  }
}

TEST_F(Tensors, Stores) {
  for (const Shape& shape : kShapes) {
    Make(shape.type, shape.dim, shape.box, shape.step, shape.span);
    const uint32_t bytes = TensorBytes(map_.type);
    for (int round = 0; round < 12; ++round) {
      std::vector<int> at = Somewhere();
      for (int& c : at) c = std::max(c, 0);  // stores never begin outside
      for (uint64_t i = 0; i < BoxBytes(); ++i) out_[i] = uint8_t(random_());
      // Every element of the box that is inside, and what shares 16 bytes with it; nothing else.
      std::vector<uint8_t> expected(data_, data_ + bytes_);
      ForEach(
          at,
          [&](uint64_t place, const uint8_t* element) {
            if (element != nullptr) std::memcpy(&expected[uint64_t(element - data_)], out_ + place, bytes);
          },
          16 / bytes);
      const auto result = Run(Move(BoxBytes(), false) + Store(at));
      ASSERT_TRUE(result.ok()) << result.message;
      ASSERT_EQ(0, std::memcmp(expected.data(), data_, bytes_)) << Coordinates(at);
    }
  }
}

template <class T, class F>
void CheckReduction(const std::vector<uint8_t>& before, const uint8_t* given, const uint8_t* data, F combine) {
  for (size_t i = 0; i < 16; ++i) {
    T a, b, got;
    std::memcpy(&a, &before[i * sizeof(T)], sizeof(T));
    std::memcpy(&b, given + i * sizeof(T), sizeof(T));
    std::memcpy(&got, data + i * sizeof(T), sizeof(T));
    EXPECT_EQ(T(combine(a, b)), got) << i;
  }
}

TEST_F(Tensors, Reductions) {
  const auto run = [&](TensorType type, const char* reduction, auto zero, auto combine) {
    using T = decltype(zero);
    Make(type, {16}, {16}, {1});
    for (int i = 0; i < 16; ++i) {  // small numbers, so that there are equal ones
      const T a = T(random_() % 20), b = T(random_() % 20);
      std::memcpy(data_ + i * sizeof(T), &a, sizeof(T));
      std::memcpy(out_ + i * sizeof(T), &b, sizeof(T));
    }
    const std::vector<uint8_t> before(data_, data_ + bytes_);
    const auto result = Run(Move(BoxBytes(), false) + Store({0}, reduction));
    ASSERT_TRUE(result.ok()) << result.message;
    CheckReduction<T>(before, out_, data_, combine);
  };
  run(TensorType::kU32, "add", uint32_t{}, [](uint32_t a, uint32_t b) { return a + b; });
  run(TensorType::kS32, "min", int32_t{}, [](int32_t a, int32_t b) { return std::min(a, b); });
  run(TensorType::kU64, "max", uint64_t{}, [](uint64_t a, uint64_t b) { return std::max(a, b); });
  run(TensorType::kU32, "inc", uint32_t{}, [](uint32_t a, uint32_t b) { return a >= b ? 0 : a + 1; });
  run(TensorType::kU32, "dec", uint32_t{}, [](uint32_t a, uint32_t b) { return a == 0 || a > b ? b : a - 1; });
  run(TensorType::kU32, "and", uint32_t{}, [](uint32_t a, uint32_t b) { return a & b; });
  run(TensorType::kS64, "or", int64_t{}, [](int64_t a, int64_t b) { return a | b; });
  run(TensorType::kU64, "xor", uint64_t{}, [](uint64_t a, uint64_t b) { return a ^ b; });
  run(TensorType::kF32, "add", float{}, [](float a, float b) { return a + b; });
  run(TensorType::kF64, "add", double{}, [](double a, double b) { return a + b; });
  // What there is not.
  Make(TensorType::kU16, {16}, {16}, {1});
  const auto result = Run(Store({0}, "add"));
  EXPECT_EQ(Fault::kUnsupported, result.fault);
  EXPECT_NE(std::string::npos, result.message.find("cp.reduce.async.bulk.tensor.1d")) << result.message;
}

TEST_F(Tensors, NansOutside) {
  Make(TensorType::kF32, {6, 8}, {4, 4}, {1, 1});
  map_.nan = 1;
  const auto result = Run(Load({4, -1}, BoxBytes()) + Move(BoxBytes(), true));
  ASSERT_TRUE(result.ok()) << result.message;
  ForEach({4, -1}, [&](uint64_t place, const uint8_t* element) {
    if (element != nullptr) {
      EXPECT_EQ(0, std::memcmp(element, out_ + place, 4));
    } else {
      float value;
      std::memcpy(&value, out_ + place, 4);
      EXPECT_TRUE(std::isnan(value));
    }
  });
}

// A map in a kernel's parameters, and a box that goes to two blocks of a cluster.
TEST_F(Tensors, ParametersAndMulticast) {
  Make(TensorType::kU32, {8, 8}, {4, 2}, {1, 1});
  for (int i = 0; i < 8; ++i) data_[map_.stride[0] * 3 + i * 4] = uint8_t(6 + i);
  ASSERT_TRUE(device_.Load(
      ".version 8.5\n.target sm_90\n.address_size 64\n" + std::string(kShared) +
      ".visible .entry test(.param .u64 out, .param .align 128 .b8 map[128])\n{\n.reg .pred %p<2>;\n.reg .b32 %r<8>;\n"
      ".reg .b64 %rd<8>;\n.reg .b16 %h<2>;\nld.param.u64 %rd1, [out];\nmov.b64 %rd2, map;\ncvta.param.u64 %rd3, %rd2;\n"
      "mov.u32 %r1, %cluster_ctarank;\nmbarrier.init.shared.b64 [bar], 1;\n"
      "mbarrier.arrive.expect_tx.shared.b64 _, [bar], 32;\n"
      "barrier.cluster.arrive;\nbarrier.cluster.wait;\nmov.u16 %h1, 6;\nmov.u32 %r2, 4;\nmov.u32 %r3, box;\n"
      "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra sent;\n"
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%r3], [%rd3, {%r2, 3}], [bar], %h1;\nsent:\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\n"
      "mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;\nselp.u32 %r4, 100, 0, %p1;\n"
      "ld.shared.u8 %r5, [box+4];\nadd.u32 %r4, %r4, %r5;\nmul.wide.u32 %rd4, %r1, 4;\nadd.u64 %rd4, %rd4, %rd1;\n"
      "st.global.u32 [%rd4], %r4;\nret;\n}\n"));
  device_.options.cluster = {4};
  auto* out = device_.Array<uint32_t>(4);
  const auto result = device_.Run("test", {4}, {1}, out, map_);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(0u, out[0]);
  EXPECT_EQ(111u, out[1]);
  EXPECT_EQ(111u, out[2]);
  EXPECT_EQ(0u, out[3]);
}

TEST_F(Tensors, WrongUseIsAFault) {
  const auto expect = [&](Fault fault, const char* message, const std::string& body) {
    const auto result = Run(body);
    EXPECT_EQ(fault, result.fault) << body;
    EXPECT_NE(std::string::npos, result.message.find(message)) << result.message;
  };
  Make(TensorType::kU32, {16, 16}, {4, 4}, {1, 1});
  const TensorMap good = map_;
  expect(Fault::kInvalidCode, "another number of dimensions", Load({0}, 64));
  map_.magic ^= 1;
  expect(Fault::kInvalidCode, "no tensor map", Load({0, 0}, 64));
  map_ = good;
  map_.address += bytes_;
  expect(Fault::kIllegalAddress, "illegal global access", Load({0, 0}, 64));
  expect(Fault::kIllegalAddress, "illegal global access", Store({0, 0}));
  map_ = good;
  expect(
      Fault::kMisaligned, "a multiple of 128",
      "mbarrier.init.shared.b64 [bar], 1;\ncp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[box+64], [%rd2, {0, 0}], [bar];\n");
  map_.box[0] = map_.box[1] = 256;
  expect(Fault::kIllegalAddress, "larger than the block's shared memory", Load({0, 0}, 64));
  expect(Fault::kIllegalInstruction, "a multiple of 16 bytes in the first dimension", Load({1, 0}, 64));
  map_ = good;
  expect(Fault::kIllegalInstruction, "before the tensor", Store({0, -1}));
  // Where there is nothing inside, nothing is touched.
  map_ = good;
  map_.address = 64;
  EXPECT_TRUE(Run(Load({16, -4}, 64) + Store({0, 16})).ok());
}

// Any bytes may stand where a map should: the kernel fails, or copies something of its own memory.
TEST_F(Tensors, HostileMaps) {
  Make(TensorType::kU32, {16, 16}, {4, 4}, {1, 1});
  const TensorMap good = map_;
  ASSERT_TRUE(device_.Load(Kernel(Load({-4, 2}, 64) + Store({0, 1}), kShared)));
  auto* map = device_.Array<TensorMap>(1);
  for (int round = 0; round < 3000; ++round) {
    TensorMap bad = good;
    auto* bytes = reinterpret_cast<uint8_t*>(&bad);
    for (int i = 0; i < 1 + round % 4; ++i) bytes[16 + random_() % (sizeof bad - 16)] = uint8_t(random_());
    std::memcpy(map, &bad, sizeof bad);
    device_.Run("test", {1}, {1}, out_, map);
  }
}

TEST_F(Tensors, WhatIsRefusedIsNamed) {
  for (const char* body :
       {"cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [box], [%rd2, {0, 0, 0}], "
        "[bar], {%h1};",
        "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%rd2, "
        "{0, "
        "0}], [bar];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%rd2, {0}], [bar];",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {0, 0}], [box];",
        "tensormap.replace.tile.global_address.global.b1024.b64 [%rd2], %rd1;"}) {
    ASSERT_TRUE(device_.Load(Kernel(body, kShared)));
    const std::string error = device_.module().Check("test").message();
    EXPECT_NE(std::string::npos, error.find(std::string(body).substr(0, 20))) << error;
  }
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
