#include "server/softgpu/ptx/texture.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "server/softgpu/ptx/number.h"

namespace cuda_remote::softgpu::ptx {
namespace {

constexpr int64_t kOutside = -1;

uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The component of an element as the texture gives it: a float's bits, or an integer extended to 32 bits.
uint32_t Component(const Texture& texture, const uint8_t* element, uint32_t component) {
  if (component >= texture.channels) return component == 3 ? (texture.gives_floats() ? Bits(1.0f) : 1) : 0;
  const uint8_t* at = element + component * ChannelBytes(texture.channel);
  const auto read = [at](auto value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (texture.channel) {
    case Channel::kU8: {
      const uint8_t value = read(uint8_t{});
      return texture.as_integer ? value : Bits(float(value) / 255.0f);
    }
    case Channel::kU16: {
      const uint16_t value = read(uint16_t{});
      return texture.as_integer ? value : Bits(float(value) / 65535.0f);
    }
    case Channel::kS8: {
      const int8_t value = read(int8_t{});
      return texture.as_integer ? uint32_t(int32_t(value)) : Bits(std::max(float(value) / 127.0f, -1.0f));
    }
    case Channel::kS16: {
      const int16_t value = read(int16_t{});
      return texture.as_integer ? uint32_t(int32_t(value)) : Bits(std::max(float(value) / 32767.0f, -1.0f));
    }
    case Channel::kHalf:
      return Bits(float(Unpack(read(uint16_t{}), kHalf)));
    default:
      return read(uint32_t{});
  }
}

// The element number that a coordinate means along an axis of `size` elements; kOutside for the border.
int64_t Place(int64_t index, int64_t size, AddressMode mode) {
  switch (mode) {
    case AddressMode::kWrap:
      return ((index % size) + size) % size;
    case AddressMode::kMirror: {
      const int64_t in = ((index % (2 * size)) + 2 * size) % (2 * size);
      return in < size ? in : 2 * size - 1 - in;
    }
    case AddressMode::kBorder:
      return index < 0 || index >= size ? kOutside : index;
    default:
      return std::clamp<int64_t>(index, 0, size - 1);
  }
}

uint64_t SizeOf(const Image& image, int axis) {
  return axis == 0 ? image.width : axis == 1 ? image.height : image.depth;
}

// Wrapping and mirroring need normalised coordinates; without them both mean clamping.
AddressMode ModeOf(const Texture& texture, int axis) {
  const AddressMode mode = texture.address[axis];
  const bool repeats = mode == AddressMode::kWrap || mode == AddressMode::kMirror;
  return repeats && !texture.normalized_coordinates ? AddressMode::kClamp : mode;
}

Texel ReadElement(const Texture& texture, const Image& image, const int64_t* index, int dimensions, uint32_t layer) {
  Texel texel;
  uint64_t offset = texture.layered ? std::min<uint64_t>(layer, image.depth - 1) * image.slice_bytes : 0;
  bool outside = false;
  for (int axis = 0; axis < dimensions; ++axis) {
    outside = outside || index[axis] == kOutside;
    const uint64_t step = axis == 0 ? texture.element_bytes() : axis == 1 ? image.row_bytes : image.slice_bytes;
    offset += uint64_t(index[axis]) * step;
  }
  for (uint32_t c = 0; c < 4; ++c) {
    if (!outside) {
      texel.word[c] = Component(texture, image.data + offset, c);
    } else if (texture.gives_floats()) {
      texel.word[c] = Bits(texture.border[c]);
    } else {
      texel.word[c] = uint32_t(int64_t(texture.border[c]));
    }
  }
  return texel;
}

// A coordinate in elements. 2^40 is beyond any texture and far from overflow.
float InElements(const Texture& texture, float coordinate, uint64_t size) {
  const float scaled = texture.normalized_coordinates ? coordinate * float(size) : coordinate;
  if (std::isnan(scaled)) return 0;
  return std::clamp(scaled, -0x1p40f, 0x1p40f);
}

Texel SampleLevel(const Texture& texture, const Image& image, int dimensions, const float* coordinate, uint32_t layer) {
  int64_t index[3] = {0, 0, 0};
  if (!texture.linear_filter || !texture.gives_floats()) {
    for (int axis = 0; axis < dimensions; ++axis) {
      const uint64_t size = SizeOf(image, axis);
      index[axis] =
          Place(int64_t(std::floor(InElements(texture, coordinate[axis], size))), int64_t(size), ModeOf(texture, axis));
    }
    return ReadElement(texture, image, index, dimensions, layer);
  }
  int64_t first[3] = {0, 0, 0};
  float weight[3] = {0, 0, 0};
  for (int axis = 0; axis < dimensions; ++axis) {
    const float at = InElements(texture, coordinate[axis], SizeOf(image, axis)) - 0.5f;
    const float floor = std::floor(at);
    first[axis] = int64_t(floor);
    weight[axis] = std::nearbyint((at - floor) * 256.0f) / 256.0f;
  }
  float sum[4] = {0, 0, 0, 0};
  for (int corner = 0; corner < 1 << dimensions; ++corner) {
    float share = 1;
    for (int axis = 0; axis < dimensions; ++axis) {
      const int up = corner >> axis & 1;
      share *= up ? weight[axis] : 1 - weight[axis];
      index[axis] = Place(first[axis] + up, int64_t(SizeOf(image, axis)), ModeOf(texture, axis));
    }
    if (share == 0) continue;
    const Texel texel = ReadElement(texture, image, index, dimensions, layer);
    for (int c = 0; c < 4; ++c) {
      float value;
      std::memcpy(&value, &texel.word[c], sizeof value);
      sum[c] += share * value;
    }
  }
  Texel texel;
  for (int c = 0; c < 4; ++c) texel.word[c] = Bits(sum[c]);
  return texel;
}

}  // namespace

uint32_t ChannelBytes(Channel channel) {
  switch (channel) {
    case Channel::kU8:
    case Channel::kS8:
      return 1;
    case Channel::kU16:
    case Channel::kS16:
    case Channel::kHalf:
      return 2;
    default:
      return 4;
  }
}

bool Texture::gives_floats() const {
  return channel == Channel::kFloat || channel == Channel::kHalf || (!as_integer && ChannelBytes(channel) < 4);
}

Texel Sample(const Texture& texture, int dimensions, const float* coordinate, uint32_t layer, float level) {
  const size_t last = texture.levels.size() - 1;
  if (last == 0) return SampleLevel(texture, texture.levels[0], dimensions, coordinate, layer);
  float at = std::clamp(level + texture.level_bias, texture.level_min, std::max(texture.level_min, texture.level_max));
  at = std::isnan(at) ? 0 : std::clamp(at, 0.0f, float(last));
  if (!texture.linear_mipmaps || !texture.gives_floats()) {
    return SampleLevel(texture, texture.levels[size_t(std::ceil(at + 0.5f)) - 1], dimensions, coordinate, layer);
  }
  const size_t below = size_t(at);
  const float weight = std::nearbyint((at - float(below)) * 256.0f) / 256.0f;
  Texel texel = SampleLevel(texture, texture.levels[below], dimensions, coordinate, layer);
  if (weight == 0) return texel;
  const Texel above = SampleLevel(texture, texture.levels[std::min(below + 1, last)], dimensions, coordinate, layer);
  for (int c = 0; c < 4; ++c) {
    float a, b;
    std::memcpy(&a, &texel.word[c], sizeof a);
    std::memcpy(&b, &above.word[c], sizeof b);
    texel.word[c] = Bits(a * (1 - weight) + b * weight);
  }
  return texel;
}

Texel Fetch(const Texture& texture, int dimensions, const int32_t* coordinate, uint32_t layer, uint32_t level) {
  const Image& image = texture.levels[std::min<size_t>(level, texture.levels.size() - 1)];
  int64_t index[3] = {0, 0, 0};
  for (int axis = 0; axis < dimensions; ++axis) {
    const int64_t size = int64_t(SizeOf(image, axis));
    const bool inside = coordinate[axis] >= 0 && coordinate[axis] < size;
    if (!inside && texture.linear_memory) return Texel();
    index[axis] = inside ? coordinate[axis] : Place(coordinate[axis], size, ModeOf(texture, axis));
  }
  return ReadElement(texture, image, index, dimensions, layer);
}

Texel Gather(const Texture& texture, const float* coordinate, uint32_t component) {
  const Image& image = texture.levels[0];
  int64_t low[2], high[2];
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t size = int64_t(SizeOf(image, axis));
    const int64_t first = int64_t(std::floor(InElements(texture, coordinate[axis], uint64_t(size)) - 0.5f));
    low[axis] = Place(first, size, ModeOf(texture, axis));
    high[axis] = Place(first + 1, size, ModeOf(texture, axis));
  }
  const int64_t corners[4][2] = {{low[0], high[1]}, {high[0], high[1]}, {high[0], low[1]}, {low[0], low[1]}};
  Texel texel;
  for (int i = 0; i < 4; ++i) {
    const int64_t index[3] = {corners[i][0], corners[i][1], 0};
    texel.word[i] = ReadElement(texture, image, index, 2, 0).word[component];
  }
  return texel;
}

}  // namespace cuda_remote::softgpu::ptx
