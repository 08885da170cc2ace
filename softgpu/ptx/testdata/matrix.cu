// SPDX-License-Identifier: Apache-2.0
// Matrix instructions: fragments of wmma as they are loaded, products of mma with registers as given, and whole
// products of wmma.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

// ---- Fragments: every thread writes the bytes of its own.

template <class F, class T>
__device__ void Load(const T* in, unsigned ld, unsigned char* out) {
  F fragment;
  wmma::load_matrix_sync(fragment, in, ld);
  memcpy(out + threadIdx.x * sizeof(fragment.x), fragment.x, sizeof(fragment.x));
}
template <class F, class T>
__device__ void LoadSum(const T* in, unsigned ld, unsigned char* out, bool row) {
  F fragment;
  wmma::load_matrix_sync(fragment, in, ld, row ? wmma::mem_row_major : wmma::mem_col_major);
  memcpy(out + threadIdx.x * sizeof(fragment.x), fragment.x, sizeof(fragment.x));
}

#define LOAD(use, order, name, type, memory, M, N, K)                                                        \
  extern "C" __global__ void load_##use##_##order##_##name##_m##M##n##N##k##K(const memory* in, unsigned ld, \
                                                                              unsigned char* out) {          \
    Load<wmma::fragment<wmma::matrix_##use, M, N, K, type, wmma::order##_major>, memory>(in, ld, out);       \
  }
#define LOADS(name, type, memory, M, N, K)  \
  LOAD(a, row, name, type, memory, M, N, K) \
  LOAD(a, col, name, type, memory, M, N, K) \
  LOAD(b, row, name, type, memory, M, N, K) \
  LOAD(b, col, name, type, memory, M, N, K)
#define SHAPES(name, type)            \
  LOADS(name, type, type, 16, 16, 16) \
  LOADS(name, type, type, 32, 8, 16)  \
  LOADS(name, type, type, 8, 32, 16)
SHAPES(f16, __half)
SHAPES(u8, unsigned char)
#if __CUDA_ARCH__ >= 800
SHAPES(bf16, __nv_bfloat16)
LOADS(f64, double, double, 8, 8, 4)
LOADS(tf32, wmma::precision::tf32, float, 16, 16, 8)
#endif

#define LOAD_SUM(name, type, M, N, K)                                                                                \
  extern "C" __global__ void load_c_row_##name##_m##M##n##N##k##K(const type* in, unsigned ld, unsigned char* out) { \
    LoadSum<wmma::fragment<wmma::accumulator, M, N, K, type>, type>(in, ld, out, true);                              \
  }                                                                                                                  \
  extern "C" __global__ void load_c_col_##name##_m##M##n##N##k##K(const type* in, unsigned ld, unsigned char* out) { \
    LoadSum<wmma::fragment<wmma::accumulator, M, N, K, type>, type>(in, ld, out, false);                             \
  }
#define SUMS(name, type)           \
  LOAD_SUM(name, type, 16, 16, 16) \
  LOAD_SUM(name, type, 32, 8, 16)  \
  LOAD_SUM(name, type, 8, 32, 16)
SUMS(f16, __half)
SUMS(f32, float)
SUMS(s32, int)
LOAD_SUM(s32, int, 8, 8, 32)
LOAD_SUM(s32, int, 8, 8, 128)
#if __CUDA_ARCH__ >= 800
LOAD_SUM(f64, double, 8, 8, 4)
LOAD_SUM(f32, float, 16, 16, 8)
#endif

// ---- Whole products: d = a * b + c, all row by row.

template <int M, int N, int K, class T, class Memory, class Sum>
__device__ void Multiply(const Memory* a, const Memory* b, const Sum* c, Sum* d, bool saturate) {
  wmma::fragment<wmma::matrix_a, M, N, K, T, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, M, N, K, T, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, M, N, K, Sum> fc;
  wmma::load_matrix_sync(fa, a, K);
  wmma::load_matrix_sync(fb, b, N);
  wmma::load_matrix_sync(fc, c, N, wmma::mem_row_major);
  if constexpr (std::is_same<Sum, int>::value) {
    wmma::mma_sync(fc, fa, fb, fc, saturate);
  } else {
    wmma::mma_sync(fc, fa, fb, fc);
  }
  wmma::store_matrix_sync(d, fc, N, wmma::mem_row_major);
}
#define PRODUCT(name, type, memory, sum, M, N, K)                                                                      \
  extern "C" __global__ void product_##name##_m##M##n##N##k##K(const memory* a, const memory* b, const sum* c, sum* d, \
                                                               bool saturate) {                                        \
    Multiply<M, N, K, type, memory, sum>(a, b, c, d, saturate);                                                        \
  }
#define PRODUCTS(name, type, sum)            \
  PRODUCT(name, type, type, sum, 16, 16, 16) \
  PRODUCT(name, type, type, sum, 32, 8, 16)  \
  PRODUCT(name, type, type, sum, 8, 32, 16)
PRODUCTS(f16_f32, __half, float)
PRODUCTS(f16_f16, __half, __half)
PRODUCTS(u8, unsigned char, int)
PRODUCTS(s8, signed char, int)
#if __CUDA_ARCH__ >= 800
PRODUCTS(bf16_f32, __nv_bfloat16, float)
PRODUCT(f64, double, double, double, 8, 8, 4)
PRODUCT(tf32, wmma::precision::tf32, float, float, 16, 16, 8)
#endif

// Rows of 16-bit elements through shared memory: eight rows of eight for each of four matrices, and back.
extern "C" __global__ void rows(const unsigned short* in, unsigned* out, unsigned short* back) {
  __shared__ alignas(16) unsigned short tile[256];
  for (int i = threadIdx.x; i < 256; i += 32) tile[i] = in[i];
  const unsigned at = unsigned(__cvta_generic_to_shared(tile + threadIdx.x * 8));
  unsigned r[4], t[2], one;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(t[0]), "=r"(t[1]) : "r"(at));
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(one) : "r"(r[0]));
  unsigned* mine = out + threadIdx.x * 8;
  for (int i = 0; i < 4; ++i) mine[i] = r[i];
  mine[4] = t[0], mine[5] = t[1], mine[6] = one, mine[7] = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
  __syncwarp();
#endif
  for (int i = threadIdx.x; i < 256; i += 32) back[i] = tile[i];
}

// ---- mma with registers as they are; eight words for each thread and operand.

#define R(x, i) "r"(x[i])
#define W(i) "=r"(d[i])
#define MMA(name, text, ...)                                                                                    \
  extern "C" __global__ void mma_##name(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* d) { \
    a += threadIdx.x * 8, b += threadIdx.x * 8, c += threadIdx.x * 8, d += threadIdx.x * 8;                     \
    asm volatile("mma.sync.aligned." text ";" : __VA_ARGS__);                                                   \
  }
#define FOUR W(0), W(1), W(2), W(3)
#define A4B2C4 R(a, 0), R(a, 1), R(a, 2), R(a, 3), R(b, 0), R(b, 1), R(c, 0), R(c, 1), R(c, 2), R(c, 3)
#define A2B1C4 R(a, 0), R(a, 1), R(b, 0), R(c, 0), R(c, 1), R(c, 2), R(c, 3)
#define T424 "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13}"
#define T214 "{%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10}"
#if __CUDA_ARCH__ >= 800
MMA(f32_f16_k16, "m16n8k16.row.col.f32.f16.f16.f32 " T424, FOUR : A4B2C4)
MMA(f32_f16_k8, "m16n8k8.row.col.f32.f16.f16.f32 " T214, FOUR : A2B1C4)
MMA(f16_f16_k16, "m16n8k16.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3,%4,%5},{%6,%7},{%8,%9}", W(0), W(1)
    : R(a, 0), R(a, 1), R(a, 2), R(a, 3), R(b, 0), R(b, 1), R(c, 0), R(c, 1))
MMA(f32_bf16_k16, "m16n8k16.row.col.f32.bf16.bf16.f32 " T424, FOUR : A4B2C4)
MMA(f32_tf32_k8, "m16n8k8.row.col.f32.tf32.tf32.f32 " T424, FOUR : A4B2C4)
MMA(f32_tf32_k4, "m16n8k4.row.col.f32.tf32.tf32.f32 " T214, FOUR : A2B1C4)
MMA(s8_k16_sat, "m16n8k16.row.col.satfinite.s32.s8.s8.s32 " T214, FOUR : A2B1C4)
MMA(s8u8_k32, "m16n8k32.row.col.s32.s8.u8.s32 " T424, FOUR : A4B2C4)
MMA(s4u4_k64, "m16n8k64.row.col.s32.s4.u4.s32 " T424, FOUR : A4B2C4)
MMA(b1_k256_and, "m16n8k256.row.col.s32.b1.b1.s32.and.popc " T424, FOUR : A4B2C4)
#endif
MMA(b1_k128_xor, "m8n8k128.row.col.s32.b1.b1.s32.xor.popc {%0,%1},{%2},{%3},{%4,%5}", W(0), W(1)
    : R(a, 0), R(b, 0), R(c, 0), R(c, 1))
#if __CUDA_ARCH__ >= 800
#define D(x, i) "d"(((const double*)x)[i])
#define DW(i) "=d"(((double*)d)[i])
MMA(f64_k4, "m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%3},{%4,%5}", DW(0), DW(1)
    : D(a, 0), D(b, 0), D(c, 0), D(c, 1))
#endif
#if __CUDA_ARCH__ >= 900
MMA(f64_m16n8k8, "m16n8k8.row.col.f64.f64.f64.f64 " T424, DW(0), DW(1), DW(2), DW(3)
    : D(a, 0), D(a, 1), D(a, 2), D(a, 3), D(b, 0), D(b, 1), D(c, 0), D(c, 1), D(c, 2), D(c, 3))
MMA(e4m3_e5m2_k32, "m16n8k32.row.col.f32.e4m3.e5m2.f32 " T424, FOUR : A4B2C4)
#endif
