// SPDX-License-Identifier: Apache-2.0
// Matrices in the registers of a warp: which thread holds which element, and what a product of them is.
//
// A fragment is the part of a matrix that one thread holds. PTX documents the fragments of mma; those of wmma are as
// GPUs of compute capability 8.0 to 9.0 have them (compared with an H100), as programs that look into them expect.
// Pure functions.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_MATRIX_H_
#define CUDA_REMOTE_SOFTGPU_PTX_MATRIX_H_

#include <cstdint>
#include <string_view>

namespace cuda_remote::softgpu::ptx {

enum class Element : uint8_t { kNone, kF16, kBf16, kTf32, kF32, kF64, kE4m3, kE5m2, kS8, kU8, kS4, kU4, kB1, kS32 };
Element ParseElement(std::string_view name);
uint32_t ElementBits(Element element);
bool IsInteger(Element element);

struct Shape {
  uint32_t m = 0, n = 0, k = 0;
};
// "m16n8k16"; false for what is no shape.
bool ParseShape(std::string_view name, Shape* shape);

enum class Use : uint8_t { kA, kB, kC };  // kC also the result

// An element's place. mma.m8n8k4 of f16 works on four products at once, one for each quad of lanes; else quad is 0.
struct Place {
  uint32_t row = 0, column = 0, quad = 0;
};

// What matters of an instruction for the places of elements.
struct Tiles {
  Shape shape;
  Use use = Use::kA;
  Element element = Element::kNone;
  bool wmma = false;
  bool row_major = true;  // of kA and kB in mma.m8n8k4, whose fragments depend on it

  bool quads() const { return !wmma && shape.m == 8 && shape.n == 8 && shape.k == 4 && element != Element::kF64; }
  uint32_t rows() const { return use == Use::kB ? shape.k : shape.m; }
  uint32_t columns() const { return use == Use::kA ? shape.k : shape.n; }
  // Elements of a thread, without copies of the same.
  uint32_t count() const { return quads() ? (use == Use::kC ? 8 : 4) : rows() * columns() / 32; }
  // Elements in one register.
  uint32_t packed() const;
  uint32_t registers() const { return count() / packed(); }
  Place At(uint32_t lane, uint32_t index) const;
};

// The number that the bits of a floating-point element are, exactly. tf32 ignores the low bits of its word.
double NumberOf(Element element, uint64_t bits);

// One element of A * B + C: the sum of `k` products of a[i] and b[i], and c; as bits of `result` (kF16 or kF32).
// The exact products and c are cut to 25 bits below the largest's exponent and added, 16 products at a time; a sum is
// cut to f32, the last one rounded to the nearest f16 for kF16. That is what an H100 gives for f16, bf16 and tf32, bit
// by bit; with 8-bit elements the last bits may differ from a GPU's.
uint32_t DotFloat(const double* a, const double* b, uint32_t k, double c, Element result, uint32_t together);

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_MATRIX_H_
