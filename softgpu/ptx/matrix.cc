// SPDX-License-Identifier: Apache-2.0
#include "softgpu/ptx/matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "softgpu/ptx/number.h"

namespace cuda_remote::softgpu::ptx {
namespace {

struct ElementFacts {
  std::string_view name;
  Element element;
  uint32_t bits;
};
constexpr ElementFacts kElements[] = {
    {"f16", Element::kF16, 16}, {"bf16", Element::kBf16, 16}, {"tf32", Element::kTf32, 32}, {"f32", Element::kF32, 32},
    {"f64", Element::kF64, 64}, {"e4m3", Element::kE4m3, 8},  {"e5m2", Element::kE5m2, 8},  {"s8", Element::kS8, 8},
    {"u8", Element::kU8, 8},    {"s4", Element::kS4, 4},      {"u4", Element::kU4, 4},      {"b1", Element::kB1, 1},
    {"s32", Element::kS32, 32}};

constexpr int kKept = 25;  // bits below the largest exponent that take part in a sum

// Cut to f32; what is too large becomes infinite.
double CutToFloat(double value) {
  if (!std::isfinite(value) || std::fabs(value) >= 0x1p128) return std::copysign(INFINITY, value);
  int exponent;
  std::frexp(value, &exponent);
  const int last = std::max(exponent - 24, -149);
  return std::ldexp(std::trunc(std::ldexp(value, -last)), last);
}

// The sum of products and c before it is cut or rounded; exact in a double, as it has 30 bits.
double Sum(const double* a, const double* b, uint32_t k, double c) {
  int largest = -10000;
  for (uint32_t i = 0; i < k; ++i) {
    if (a[i] != 0 && b[i] != 0) largest = std::max(largest, std::ilogb(a[i]) + std::ilogb(b[i]));
  }
  if (c != 0) largest = std::max(largest, std::ilogb(c));
  if (largest == -10000) return 0;
  double sum = std::trunc(std::ldexp(c, kKept - largest));
  for (uint32_t i = 0; i < k; ++i) sum += std::trunc(std::ldexp(a[i] * b[i], kKept - largest));
  return std::ldexp(sum, largest - kKept);
}

}  // namespace

Element ParseElement(std::string_view name) {
  for (const auto& facts : kElements) {
    if (facts.name == name) return facts.element;
  }
  return Element::kNone;
}

uint32_t ElementBits(Element element) {
  for (const auto& facts : kElements) {
    if (facts.element == element) return facts.bits;
  }
  return 0;
}

bool IsInteger(Element element) { return element >= Element::kS8; }

bool ParseShape(std::string_view name, Shape* shape) {
  uint32_t* const parts[] = {&shape->m, &shape->n, &shape->k};
  for (int i = 0; i < 3; ++i) {
    if (name.empty() || name[0] != "mnk"[i]) return false;
    name.remove_prefix(1);
    *parts[i] = 0;
    while (!name.empty() && name[0] >= '0' && name[0] <= '9' && *parts[i] < 1000) {
      *parts[i] = *parts[i] * 10 + uint32_t(name[0] - '0');
      name.remove_prefix(1);
    }
    if (*parts[i] == 0) return false;
  }
  return name.empty();
}

uint32_t Tiles::packed() const {
  const uint32_t bits = ElementBits(element);
  return bits >= 32 ? 1 : 32 / bits;
}

Place Tiles::At(uint32_t lane, uint32_t index) const {
  Place place;
  if (quads()) {
    place.quad = lane % 16 / 4;
    const uint32_t high = lane >= 16 ? 4 : 0;
    if (use == Use::kC && element == Element::kF32) {
      place.row = (lane & 1) + (index & 2) + high;
      place.column = (index & 4) + (lane & 2) + (index & 1);
    } else if (use == Use::kC) {
      place.row = lane % 4 + high;
      place.column = index;
    } else {
      const bool across = (use == Use::kA) == row_major;  // a thread's elements lie along k
      const uint32_t other = across ? lane % 4 + high : index + high, along = across ? index : lane % 4;
      place.row = use == Use::kA ? other : along;
      place.column = use == Use::kA ? along : other;
    }
    return place;
  }
  const uint32_t group = lane / 4, in_group = lane % 4;
  if (use == Use::kC) {
    const uint32_t part = index / 2;
    // Eight rows by two columns for each part; m8n32 is m32n8 turned round.
    const uint32_t pair = 2 * in_group + index % 2;
    if (shape.n == 32) return {pair, group + 8 * part, 0};
    if (wmma && shape.m == 16 && shape.n == 16) return {group + 8 * (part % 2), pair + 8 * (part / 2), 0};
    return {group + 8 * part, pair, 0};
  }
  // Registers hold elements that follow each other along k; four lanes make up a block of k.
  const uint32_t run = ElementBits(element) >= 32 ? 1 : packed();
  const uint32_t part = index / run, blocks = std::max<uint32_t>(shape.k / (4 * run), 1);
  const uint32_t size = use == Use::kA ? shape.m : shape.n;
  uint32_t block = part, tile = 0;  // of k; of eight rows or columns
  if (size == 32 || (size == 16 && use == Use::kA)) {
    tile = part % 2 + 2 * (part / (2 * blocks));
    block = part / 2 % blocks;
  } else if (size == 16) {
    tile = part / blocks;
    block = part % blocks;
  }
  const uint32_t along = in_group * run + index % run + 4 * run * block, other = group + 8 * tile;
  return use == Use::kA ? Place{other, along, 0} : Place{along, other, 0};
}

double NumberOf(Element element, uint64_t bits) {
  switch (element) {
    case Element::kF16:
      return Unpack(uint32_t(bits & 0xffff), kHalf);
    case Element::kBf16:
      return Unpack(uint32_t(bits & 0xffff), kBfloat);
    case Element::kE4m3:
      return Unpack(uint32_t(bits & 0xff), kE4m3);
    case Element::kE5m2:
      return Unpack(uint32_t(bits & 0xff), kE5m2);
    case Element::kTf32:
      bits &= 0xffffe000;
      [[fallthrough]];
    case Element::kF32: {
      const uint32_t low = uint32_t(bits);
      float value;
      std::memcpy(&value, &low, sizeof(value));
      return double(value);
    }
    default: {
      double value;
      std::memcpy(&value, &bits, sizeof(value));
      return value;
    }
  }
}

uint32_t DotFloat(const double* a, const double* b, uint32_t k, double c, Element result, uint32_t together) {
  const bool half = result == Element::kF16;
  bool up = c == INFINITY, down = c == -INFINITY, none = std::isnan(c);
  for (uint32_t i = 0; i < k; ++i) {
    if (std::isfinite(a[i]) && std::isfinite(b[i])) continue;
    const double product = a[i] * b[i];
    none = none || std::isnan(product);
    (product > 0 ? up : down) = true;
  }
  if (none || (up && down)) return half ? 0x7fff : 0x7fffffff;
  if (up || down) return (half ? 0x7c00u : 0x7f800000u) | (down ? (half ? 0x8000u : 0x80000000u) : 0);
  double sum = c;
  for (uint32_t i = 0; i < k; i += together) {
    sum = Sum(a + i, b + i, std::min(together, k - i), sum);
    if (half && i + together >= k) return Pack(sum, kHalf, Round::kNearest, false);
    sum = CutToFloat(sum);
  }
  const float value = float(sum);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace cuda_remote::softgpu::ptx
