// SPDX-License-Identifier: Apache-2.0
// What texture and surface instructions read and write: descriptions that the driver part makes, and how a texture is
// sampled.
//
// Pure data and functions; a launch only reads the descriptions. Filtering follows the CUDA programming guide: weights
// are rounded to 1/256, as the texture units of GPUs do. Borders and components that a texture does not have are as an
// H100 gives them.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_TEXTURE_H_
#define CUDA_REMOTE_SOFTGPU_PTX_TEXTURE_H_

#include <cstdint>
#include <vector>

namespace cuda_remote::softgpu::ptx {

enum class Channel : uint8_t { kU8, kU16, kU32, kS8, kS16, kS32, kHalf, kFloat };
uint32_t ChannelBytes(Channel channel);

// One level of an image in host memory. `depth` counts slices or layers.
struct Image {
  uint8_t* data = nullptr;
  uint64_t width = 0, height = 1, depth = 1;
  uint64_t row_bytes = 0, slice_bytes = 0;
};

enum class AddressMode : uint8_t { kWrap, kClamp, kMirror, kBorder };

struct Texture {
  std::vector<Image> levels;  // at least one
  Channel channel = Channel::kFloat;
  uint32_t channels = 1;
  bool linear_memory = false;  // coordinates are element numbers, outside of it are zeros
  bool in_memory = false;      // the elements lie in device memory, which may be gone, or end before the texture does
  bool layered = false;
  bool cube = false;      // six slices are the faces of a cube: +x, -x, +y, -y, +z, -z
  bool seamless = false;  // filtering goes across a cube's edges
  bool normalized_coordinates = false;
  bool linear_filter = false;
  bool linear_mipmaps = false;
  bool as_integer = true;  // 8- and 16-bit integers are not mapped to [0, 1] or [-1, 1]
  AddressMode address[3] = {AddressMode::kClamp, AddressMode::kClamp, AddressMode::kClamp};
  float border[4] = {0, 0, 0, 0};
  float level_bias = 0, level_min = 0, level_max = 0;

  uint32_t element_bytes() const { return ChannelBytes(channel) * channels; }
  // Whether values are floating-point numbers after the read mode has been applied.
  bool gives_floats() const;
};

struct Surface {
  Image image;
  uint32_t element_bytes = 0;
};

// What a launch asks for a handle's object. Called from several threads at a time; what it returns must stay valid
// until the launch has ended.
class TextureUnit {
 public:
  virtual ~TextureUnit() = default;
  virtual const Texture* FindTexture(uint64_t handle) = 0;  // null: none
  virtual const Surface* FindSurface(uint64_t handle) = 0;
};

// Four components as 32-bit words: floats or integers, as the texture gives them.
struct Texel {
  uint32_t word[4] = {0, 0, 0, 0};
};

// Asked before elements in device memory are read (Texture::in_memory); false: they are not there. Then the element
// counts as zeros.
class ElementAccess {
 public:
  virtual ~ElementAccess() = default;
  virtual bool MayRead(const uint8_t* element, uint32_t bytes) = 0;
};

// Samples a texture. `dimensions` of `coordinate` count (without the layer). `access` is for textures in memory.
Texel Sample(const Texture& texture, int dimensions, const float* coordinate, uint32_t layer, float level,
             ElementAccess* access = nullptr);
// The same with integer coordinates, which name elements.
Texel Fetch(const Texture& texture, int dimensions, const int32_t* coordinate, uint32_t layer, uint32_t level,
            ElementAccess* access = nullptr);
// One component of the four elements that linear filtering would use, in the order of tld4.
Texel Gather(const Texture& texture, const float* coordinate, uint32_t component, ElementAccess* access = nullptr);
// Samples a cube, or the layer-th of several, in a direction.
Texel SampleCube(const Texture& texture, const float* direction, uint32_t layer, float level);

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_TEXTURE_H_
