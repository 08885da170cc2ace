// SPDX-License-Identifier: Apache-2.0
#include "softgpu/ptx/texture.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "softgpu/ptx/number.h"

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
  if (component >= texture.channels) return 0;
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

// A component outside of a texture with a border: what the texture's elements can hold of it.
uint32_t Border(const Texture& texture, uint32_t component) {
  if (component >= texture.channels) return 0;
  const float border = texture.border[component];
  const bool is_signed = texture.channel == Channel::kS8 || texture.channel == Channel::kS16;
  const uint32_t bytes = ChannelBytes(texture.channel);
  if (texture.channel == Channel::kFloat || texture.channel == Channel::kHalf || bytes == 4) return Bits(border);
  if (!texture.as_integer) return Bits(std::clamp(border, is_signed ? -1.0f : 0.0f, 1.0f));
  const uint32_t unused = 32 - 8 * bytes, bits = Bits(border) << unused;
  return is_signed ? uint32_t(int32_t(bits) >> unused) : bits >> unused;
}

// `slice`: the layer or face; it counts for textures that have such.
Texel ReadElement(const Texture& texture, const Image& image, const int64_t* index, int dimensions, uint32_t slice,
                  ElementAccess* access) {
  Texel texel;
  uint64_t offset = 0;
  if (texture.layered || texture.cube) offset = std::min<uint64_t>(slice, image.depth - 1) * image.slice_bytes;
  bool outside = false;
  for (int axis = 0; axis < dimensions; ++axis) {
    outside = outside || index[axis] == kOutside;
    const uint64_t step = axis == 0 ? texture.element_bytes() : axis == 1 ? image.row_bytes : image.slice_bytes;
    offset += uint64_t(index[axis]) * step;
  }
  if (!outside && texture.in_memory &&
      (access == nullptr || !access->MayRead(image.data + offset, texture.element_bytes()))) {
    return texel;
  }
  for (uint32_t c = 0; c < 4; ++c) {
    texel.word[c] = outside ? Border(texture, c) : Component(texture, image.data + offset, c);
  }
  return texel;
}

// A coordinate in elements. 2^40 is beyond any texture and far from overflow.
float InElements(const Texture& texture, float coordinate, uint64_t size) {
  const float scaled = texture.normalized_coordinates ? coordinate * float(size) : coordinate;
  if (std::isnan(scaled)) return 0;
  return std::clamp(scaled, -0x1p40f, 0x1p40f);
}

// The elements between which a coordinate lies, and the share of the second.
struct Between {
  int64_t first = 0;
  float weight = 0;
};
Between Neighbours(float elements) {
  const float at = elements - 0.5f;
  const float floor = std::floor(at);
  return {int64_t(floor), std::nearbyint((at - floor) * 256.0f) / 256.0f};
}

// Weighs the corners that `read(corner)` gives: bit i of the corner is the second neighbour along axis i.
template <class Read>
Texel Weigh(const Between* between, int dimensions, const Read& read) {
  float sum[4] = {0, 0, 0, 0};
  for (int corner = 0; corner < 1 << dimensions; ++corner) {
    float share = 1;
    for (int axis = 0; axis < dimensions; ++axis) {
      share *= (corner >> axis & 1) != 0 ? between[axis].weight : 1 - between[axis].weight;
    }
    if (share == 0) continue;
    const Texel texel = read(corner);
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

bool Filters(const Texture& texture) { return texture.linear_filter && texture.gives_floats(); }

Texel SampleLevel(const Texture& texture, const Image& image, int dimensions, const float* coordinate, uint32_t layer,
                  ElementAccess* access) {
  if (!Filters(texture)) {
    int64_t index[3] = {0, 0, 0};
    for (int axis = 0; axis < dimensions; ++axis) {
      const uint64_t size = SizeOf(image, axis);
      index[axis] =
          Place(int64_t(std::floor(InElements(texture, coordinate[axis], size))), int64_t(size), ModeOf(texture, axis));
    }
    return ReadElement(texture, image, index, dimensions, layer, access);
  }
  Between between[3];
  for (int axis = 0; axis < dimensions; ++axis) {
    between[axis] = Neighbours(InElements(texture, coordinate[axis], SizeOf(image, axis)));
  }
  return Weigh(between, dimensions, [&](int corner) {
    int64_t index[3] = {0, 0, 0};
    for (int axis = 0; axis < dimensions; ++axis) {
      index[axis] =
          Place(between[axis].first + (corner >> axis & 1), int64_t(SizeOf(image, axis)), ModeOf(texture, axis));
    }
    return ReadElement(texture, image, index, dimensions, layer, access);
  });
}

// Where a direction meets a cube: the face, and -1 to 1 along its axes.
struct OnCube {
  uint32_t face = 0;
  float s = 0, t = 0;
};
OnCube Meet(const float* direction) {
  const float x = direction[0], y = direction[1], z = direction[2];
  const float ax = std::fabs(x), ay = std::fabs(y), az = std::fabs(z);
  // Where two are the same the guide leaves open which one counts.
  if (az >= ax && az >= ay) return z >= 0 ? OnCube{4, x / az, -y / az} : OnCube{5, -x / az, -y / az};
  if (ay >= ax) return y >= 0 ? OnCube{2, x / ay, z / ay} : OnCube{3, x / ay, -z / ay};
  return x >= 0 ? OnCube{0, -z / ax, -y / ax} : OnCube{1, z / ax, -y / ax};
}

// The direction of a place on a face.
void DirectionOf(const OnCube& on, float* direction) {
  const float s = on.s, t = on.t;
  const float all[6][3] = {{1, -t, -s}, {-1, -t, s}, {s, 1, t}, {s, -1, -t}, {s, -t, 1}, {-s, -t, -1}};
  std::copy(all[on.face], all[on.face] + 3, direction);
}

// The element of a face; one beyond an edge is the neighbouring face's.
Texel ReadAcross(const Texture& texture, const Image& image, uint32_t face, uint32_t first_slice,
                 const int64_t* index) {
  const int64_t size = int64_t(image.width);
  const float step = 2.0f / float(size);
  OnCube on = {face, (float(index[0]) + 0.5f) * step - 1, (float(index[1]) + 0.5f) * step - 1};
  float direction[3];
  DirectionOf(on, direction);
  on = Meet(direction);
  const auto place = [&](float along) {
    return std::clamp<int64_t>(int64_t(std::floor((along + 1) / step)), 0, size - 1);
  };
  const int64_t there[2] = {place(on.s), place(on.t)};
  return ReadElement(texture, image, there, 2, first_slice + on.face, nullptr);
}

Texel SampleFace(const Texture& texture, const Image& image, const OnCube& on, uint32_t layer) {
  const int64_t size = int64_t(image.width);
  const float elements[2] = {(on.s + 1) / 2 * float(size), (on.t + 1) / 2 * float(size)};
  const uint32_t first_slice = layer * 6;
  const auto inside = [size](int64_t at) { return std::clamp<int64_t>(at, 0, size - 1); };
  if (!Filters(texture)) {
    const int64_t index[2] = {inside(int64_t(std::floor(elements[0]))), inside(int64_t(std::floor(elements[1])))};
    return ReadElement(texture, image, index, 2, first_slice + on.face, nullptr);
  }
  const Between between[2] = {Neighbours(elements[0]), Neighbours(elements[1])};
  return Weigh(between, 2, [&](int corner) {
    const int64_t index[2] = {between[0].first + (corner & 1), between[1].first + (corner >> 1)};
    const int64_t in[2] = {inside(index[0]), inside(index[1])};
    const bool over[2] = {index[0] != in[0], index[1] != in[1]};
    if (!texture.seamless || (!over[0] && !over[1])) {
      return ReadElement(texture, image, in, 2, first_slice + on.face, nullptr);
    }
    if (over[0] != over[1]) return ReadAcross(texture, image, on.face, first_slice, index);
    // Three faces meet at a corner: there is no fourth element, so the mean of the three stands in for it.
    const int64_t beside[2] = {index[0], in[1]}, above[2] = {in[0], index[1]};
    const Texel three[3] = {ReadElement(texture, image, in, 2, first_slice + on.face, nullptr),
                            ReadAcross(texture, image, on.face, first_slice, beside),
                            ReadAcross(texture, image, on.face, first_slice, above)};
    Texel mean;
    for (int c = 0; c < 4; ++c) {
      float sum = 0;
      for (const Texel& one : three) {
        float value;
        std::memcpy(&value, &one.word[c], sizeof value);
        sum += value;
      }
      mean.word[c] = Bits(sum / 3);
    }
    return mean;
  });
}

// Calls `sample(image)` for the level, or for two between which it lies.
template <class SampleOne>
Texel AtLevel(const Texture& texture, float level, const SampleOne& sample) {
  const size_t last = texture.levels.size() - 1;
  if (last == 0) return sample(texture.levels[0]);
  float at = std::clamp(level + texture.level_bias, texture.level_min, std::max(texture.level_min, texture.level_max));
  at = std::isnan(at) ? 0 : std::clamp(at, 0.0f, float(last));
  if (!texture.linear_mipmaps || !texture.gives_floats()) {
    return sample(texture.levels[size_t(std::ceil(at + 0.5f)) - 1]);
  }
  const size_t below = size_t(at);
  const float weight = std::nearbyint((at - float(below)) * 256.0f) / 256.0f;
  Texel texel = sample(texture.levels[below]);
  if (weight == 0) return texel;
  const Texel above = sample(texture.levels[std::min(below + 1, last)]);
  for (int c = 0; c < 4; ++c) {
    float a, b;
    std::memcpy(&a, &texel.word[c], sizeof a);
    std::memcpy(&b, &above.word[c], sizeof b);
    texel.word[c] = Bits(a * (1 - weight) + b * weight);
  }
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

Texel Sample(const Texture& texture, int dimensions, const float* coordinate, uint32_t layer, float level,
             ElementAccess* access) {
  if (texture.linear_memory) return Texel();  // only integer coordinates name its elements
  return AtLevel(texture, level, [&](const Image& image) {
    return SampleLevel(texture, image, dimensions, coordinate, layer, access);
  });
}

Texel SampleCube(const Texture& texture, const float* direction, uint32_t layer, float level) {
  const OnCube on = Meet(direction);
  return AtLevel(texture, level, [&](const Image& image) { return SampleFace(texture, image, on, layer); });
}

Texel Fetch(const Texture& texture, int dimensions, const int32_t* coordinate, uint32_t layer, uint32_t level,
            ElementAccess* access) {
  const Image& image = texture.levels[std::min<size_t>(level, texture.levels.size() - 1)];
  int64_t index[3] = {0, 0, 0};
  for (int axis = 0; axis < dimensions; ++axis) {
    const int64_t size = int64_t(SizeOf(image, axis));
    const bool inside = coordinate[axis] >= 0 && coordinate[axis] < size;
    if (!inside && texture.linear_memory) return Texel();
    index[axis] = inside ? coordinate[axis] : Place(coordinate[axis], size, ModeOf(texture, axis));
  }
  return ReadElement(texture, image, index, dimensions, layer, access);
}

Texel Gather(const Texture& texture, const float* coordinate, uint32_t component, ElementAccess* access) {
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
    texel.word[i] = ReadElement(texture, image, index, 2, 0, access).word[component];
  }
  return texel;
}

}  // namespace cuda_remote::softgpu::ptx
