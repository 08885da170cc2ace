// SPDX-License-Identifier: Apache-2.0
// Sampling by itself, and the instructions as nvcc writes them; tests/apps/textures.cu compares whole programs.
#include "softgpu/ptx/texture.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "softgpu/ptx/test_device.h"

namespace cuda_remote::softgpu::ptx {
namespace {

float Float(uint32_t word) {
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// A picture of 4 x 2 floats: 0 1 2 3 / 10 11 12 13.
class TextureTest : public testing::Test, public TextureUnit {
 protected:
  TextureTest() {
    for (int i = 0; i < 8; ++i) pixels[size_t(i)] = float(i % 4 + i / 4 * 10);
    Image image;
    image.data = reinterpret_cast<uint8_t*>(pixels.data());
    image.width = 4;
    image.height = 2;
    image.row_bytes = 16;
    image.slice_bytes = 32;
    texture.levels.push_back(image);
    surface.image = image;
    surface.element_bytes = 4;
  }
  const Texture* FindTexture(uint64_t handle) override { return handle == 7 ? &texture : nullptr; }
  const Surface* FindSurface(uint64_t handle) override { return handle == 9 ? &surface : nullptr; }

  float At(float x, float y) {
    const float at[3] = {x, y, 0};
    return Float(Sample(texture, 2, at, 0, 0).word[0]);
  }

  std::vector<float> pixels = std::vector<float>(8);
  Texture texture;
  Surface surface;
};

TEST_F(TextureTest, PointsAndAddressModes) {
  EXPECT_EQ(At(1.9f, 1.0f), 11);
  EXPECT_EQ(At(-5, -5), 0);
  EXPECT_EQ(At(99, 99), 13);
  EXPECT_EQ(At(NAN, 0), 0);
  texture.address[0] = texture.address[1] = AddressMode::kBorder;
  texture.border[0] = -7;
  EXPECT_EQ(At(-0.1f, 0), -7);
  EXPECT_EQ(At(4, 0), -7);
  EXPECT_EQ(At(3.9f, 1.9f), 13);
  texture.normalized_coordinates = true;
  texture.address[0] = AddressMode::kWrap;
  texture.address[1] = AddressMode::kMirror;
  EXPECT_EQ(At(1.25f, 0), 1);   // element 5
  EXPECT_EQ(At(-0.25f, 0), 3);  // element -1
  EXPECT_EQ(At(0, 1.0f), 10);   // row 2 is row 1 again
  EXPECT_EQ(At(0, -0.5f), 0);   // row -1 is row 0
}

TEST_F(TextureTest, LinearFilteringWeighsNeighbours) {
  texture.linear_filter = true;
  EXPECT_EQ(At(0.5f, 0.5f), 0);
  EXPECT_EQ(At(1.0f, 0.5f), 0.5f);
  EXPECT_EQ(At(1.25f, 1.0f), 0.75f * 0.5f + 10.75f * 0.5f);
  EXPECT_EQ(At(0, 0), 0);  // clamped on both sides
  EXPECT_EQ(At(4, 2), 13);
}

TEST_F(TextureTest, IntegersBecomeFractionsOrStay) {
  uint8_t bytes[4] = {0, 51, 255, 128};
  texture.levels[0].data = bytes;
  texture.levels[0].width = 1;
  texture.levels[0].height = 1;
  texture.channel = Channel::kU8;
  texture.channels = 4;
  const float at[3] = {0, 0, 0};
  EXPECT_EQ(Sample(texture, 2, at, 0, 0).word[1], 51u);
  texture.as_integer = false;
  EXPECT_EQ(Float(Sample(texture, 2, at, 0, 0).word[1]), 51.0f / 255.0f);
  texture.channel = Channel::kS8;
  EXPECT_EQ(Float(Sample(texture, 2, at, 0, 0).word[3]), -1.0f);  // -128 as well as -127
}

TEST_F(TextureTest, LinearMemoryIsZeroOutside) {
  texture.linear_memory = true;
  texture.levels[0].width = 8;
  const int32_t inside[3] = {5, 0, 0}, below[3] = {-1, 0, 0}, above[3] = {8, 0, 0};
  EXPECT_EQ(Float(Fetch(texture, 1, inside, 0, 0).word[0]), 11);
  EXPECT_EQ(Fetch(texture, 1, below, 0, 0).word[0], 0u);
  EXPECT_EQ(Fetch(texture, 1, above, 0, 0).word[0], 0u);
}

TEST_F(TextureTest, MipmapsByLevel) {
  std::vector<float> half = {100, 101};
  Image image = texture.levels[0];
  image.data = reinterpret_cast<uint8_t*>(half.data());
  image.width = 2;
  image.height = 1;
  texture.levels.push_back(image);
  texture.level_max = 5;
  const float at[3] = {0, 0, 0};
  EXPECT_EQ(Float(Sample(texture, 2, at, 0, 0.4f).word[0]), 0);
  EXPECT_EQ(Float(Sample(texture, 2, at, 0, 0.6f).word[0]), 100);
  texture.linear_mipmaps = true;
  EXPECT_EQ(Float(Sample(texture, 2, at, 0, 0.25f).word[0]), 25);
  EXPECT_EQ(Float(Sample(texture, 2, at, 0, 9).word[0]), 100);
}

TEST_F(TextureTest, GatherGoesAround) {
  const float at[2] = {1, 1};
  const Texel texel = Gather(texture, at, 0);
  EXPECT_EQ(Float(texel.word[0]), 10);
  EXPECT_EQ(Float(texel.word[1]), 11);
  EXPECT_EQ(Float(texel.word[2]), 1);
  EXPECT_EQ(Float(texel.word[3]), 0);
}

TEST_F(TextureTest, ComponentsThatItDoesNotHaveAreZero) {
  const float at[3] = {1, 0, 0};
  const Texel texel = Sample(texture, 2, at, 0, 0);
  for (int c = 1; c < 4; ++c) EXPECT_EQ(texel.word[c], 0u);
}

TEST_F(TextureTest, BordersAreWhatTheElementsCanHold) {
  texture.address[0] = texture.address[1] = AddressMode::kBorder;
  texture.border[0] = 7;
  texture.border[1] = 3;
  const float at[3] = {-1, 0, 0};
  const auto border = [&](Channel channel, bool as_integer) {
    texture.channel = channel;
    texture.as_integer = as_integer;
    return Sample(texture, 2, at, 0, 0);
  };
  EXPECT_EQ(Float(border(Channel::kFloat, true).word[0]), 7);
  EXPECT_EQ(border(Channel::kFloat, true).word[1], 0u) << "the texture has one component";
  EXPECT_EQ(Float(border(Channel::kU8, false).word[0]), 1);
  texture.border[0] = -7;
  EXPECT_EQ(Float(border(Channel::kU8, false).word[0]), 0);
  EXPECT_EQ(Float(border(Channel::kS16, false).word[0]), -1);
  EXPECT_EQ(border(Channel::kU32, true).word[0], 0xc0e00000u);
  EXPECT_EQ(border(Channel::kU8, true).word[0], 0u);
}

TEST_F(TextureTest, LinearMemoryHasNoPlaces) {
  texture.linear_memory = true;
  const float at[3] = {1, 0, 0};
  EXPECT_EQ(Sample(texture, 1, at, 0, 0).word[0], 0u);
}

TEST_F(TextureTest, MemoryIsAskedFor) {
  struct Until : ElementAccess {
    bool MayRead(const uint8_t* element, uint32_t bytes) override {
      asked += bytes;
      return element < end;
    }
    const uint8_t* end = nullptr;
    uint32_t asked = 0;
  };
  texture.in_memory = true;
  Until access;
  access.end = texture.levels[0].data + 16;
  const float first[3] = {1, 0, 0}, second[3] = {1, 1, 0};
  EXPECT_EQ(Float(Sample(texture, 2, first, 0, 0, &access).word[0]), 1);
  EXPECT_EQ(Sample(texture, 2, second, 0, 0, &access).word[0], 0u);
  EXPECT_EQ(access.asked, 8u);
}

// Six faces of 2 x 2: face f has 10 f, 10 f + 1 / 10 f + 2, 10 f + 3.
class CubeTest : public testing::Test {
 protected:
  CubeTest() {
    for (int i = 0; i < 48; ++i) pixels[size_t(i)] = float(i / 4 * 10 + i % 4);
    Image image;
    image.data = reinterpret_cast<uint8_t*>(pixels.data());
    image.width = image.height = 2;
    image.depth = 12;
    image.row_bytes = 8;
    image.slice_bytes = 16;
    texture.levels.push_back(image);
    texture.cube = true;
  }
  float At(float x, float y, float z, uint32_t layer = 0) {
    const float direction[3] = {x, y, z};
    return Float(SampleCube(texture, direction, layer, 0).word[0]);
  }
  std::vector<float> pixels = std::vector<float>(48);
  Texture texture;
};

TEST_F(CubeTest, FacesAndTheirAxes) {
  // A direction a bit off the axis: the table of the CUDA programming guide.
  EXPECT_EQ(At(1, 0.5f, -0.5f), 1);     // +x: s = -z, t = -y
  EXPECT_EQ(At(-1, 0.5f, 0.5f), 11);    // -x: s = z, t = -y
  EXPECT_EQ(At(0.5f, 1, -0.5f), 21);    // +y: s = x, t = z
  EXPECT_EQ(At(0.5f, -1, -0.5f), 33);   // -y: s = x, t = -z
  EXPECT_EQ(At(-0.5f, -0.5f, 1), 42);   // +z: s = x, t = -y
  EXPECT_EQ(At(-0.5f, -0.5f, -1), 53);  // -z: s = -x, t = -y
  EXPECT_EQ(At(4, 2, -2, 1), 61);       // of any length; the second cube
}

TEST_F(CubeTest, FilteringStaysOnTheFaceUnlessItIsSeamless) {
  texture.linear_filter = true;
  EXPECT_EQ(At(0, 0, 1), 41.5f);
  EXPECT_EQ(At(0.999999f, 0.5f, 1), 41);  // the face's edge
  texture.seamless = true;
  // Beyond +z's right edge comes +x's left one: 41 and 0.
  EXPECT_EQ(At(1, 0.5f, 1.000001f), 20.5f);
}

TEST_F(CubeTest, CornersOfSeamlessCubes) {
  texture.linear_filter = texture.seamless = true;
  // +z's upper right, +x's upper left, +y's lower right; the fourth is their mean.
  EXPECT_NEAR(At(1, 1, 1.000001f), (41 + 0 + 23) / 3.0f, 0.2f);
}

constexpr char kCode[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry look(.param .u64 out, .param .u64 tex, .param .u64 surf, .param .u32 x) {
  .reg .b64 %rd<4>;
  .reg .b32 %r<8>;
  .reg .f32 %f<8>;
  ld.param.u64 %rd1, [out];
  ld.param.u64 %rd2, [tex];
  ld.param.u64 %rd3, [surf];
  ld.param.u32 %r1, [x];
  cvt.rn.f32.s32 %f1, %r1;
  tex.2d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [%rd2, {%f1, %f1}];
  st.global.f32 [%rd1], %f2;
  shl.b32 %r2, %r1, 2;
  mov.u32 %r3, 0;
  suld.b.2d.b32.trap {%r4}, [%rd3, {%r2, %r3}];
  st.global.u32 [%rd1+4], %r4;
  sust.b.2d.b32.zero [%rd3, {%r2, %r1}], {%r1};
  txq.width.b32 %r5, [%rd2];
  st.global.u32 [%rd1+8], %r5;
  ret;
}
)";

TEST_F(TextureTest, Instructions) {
  TestDevice device;
  ASSERT_TRUE(device.Load(kCode));
  device.options.textures = this;
  uint32_t* out = device.Array<uint32_t>(4);
  ASSERT_TRUE(device.Run("look", {}, {}, uint64_t(out), uint64_t(7), uint64_t(9), uint32_t(1)).ok());
  EXPECT_EQ(Float(out[0]), 11);
  EXPECT_EQ(Float(out[1]), 1);
  EXPECT_EQ(out[2], 4u);
  uint32_t written;
  std::memcpy(&written, &pixels[5], sizeof written);
  EXPECT_EQ(written, 1u);
  // A wrong handle, and a place outside of the surface.
  EXPECT_EQ(device.Run("look", {}, {}, uint64_t(out), uint64_t(8), uint64_t(9), uint32_t(1)).fault,
            Fault::kIllegalAddress);
  EXPECT_EQ(device.Run("look", {}, {}, uint64_t(out), uint64_t(7), uint64_t(9), uint32_t(4)).fault, Fault::kTrap);
}

TEST_F(TextureTest, CubeInstructions) {
  TestDevice device;
  ASSERT_TRUE(
      device.Load(Kernel("mov.f32 %f1, 0f3F800000;\nmov.f32 %f2, 0f3F000000;\nmov.u32 %r1, 1;\n"
                         "tex.cube.v4.f32.f32 {%f4, %f5, %f6, %f7}, [%rd2, {%f1, %f2, %f2, %f2}];\n"
                         "st.global.f32 [%rd1], %f4;\n")));
  device.options.textures = this;
  std::vector<float> faces(6);
  for (size_t i = 0; i < 6; ++i) faces[i] = float(i + 40);
  Image& image = texture.levels[0];
  image.data = reinterpret_cast<uint8_t*>(faces.data());
  image.width = image.height = 1;
  image.depth = 6;
  image.row_bytes = image.slice_bytes = 4;
  float* out = device.Array<float>(1);
  // A plain texture is none.
  EXPECT_EQ(device.Run("test", {}, {}, uint64_t(out), uint64_t(7)).fault, Fault::kIllegalAddress);
  texture.cube = true;
  ASSERT_TRUE(device.Run("test", {}, {}, uint64_t(out), uint64_t(7)).ok());
  EXPECT_EQ(*out, 40);
  ASSERT_TRUE(
      device.Load(Kernel("mov.f32 %f1, 0fBF800000;\nmov.f32 %f2, 0f3F000000;\nmov.u32 %r1, 0;\n"
                         "tex.acube.v4.f32.f32 {%f4, %f5, %f6, %f7}, [%rd2, {%r1, %f1, %f2, %f2}];\n"
                         "st.global.f32 [%rd1], %f4;\n")));
  ASSERT_TRUE(device.Run("test", {}, {}, uint64_t(out), uint64_t(7)).ok());
  EXPECT_EQ(*out, 41);
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
