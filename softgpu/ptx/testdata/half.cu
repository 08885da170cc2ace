// SPDX-License-Identifier: Apache-2.0
// 16-bit floats.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T, class T2>
__device__ void Work(T a, T b, T c, T2 pa, T2 pb, T* out, T2* pairs) {
  out[0] = a + b;
  out[1] = a - b;
  out[2] = a * b;
  out[3] = __hfma(a, b, c);
  out[4] = -a;
  out[5] = __habs(a);
  out[6] = __hmax(a, b);
  out[7] = __hmin(a, b);
  out[8] = a / b;
  out[9] = hsqrt(__habs(a));
  out[10] = T(float(a) * 3.0f);
  out[11] = a < b ? T(1.0f) : T(0.0f);
  out[12] = hexp(c);
  out[13] = hlog(__habs(a));
  out[14] = T(int(7));
  out[15] = hfloor(a);
  pairs[0] = pa + pb;
  pairs[1] = pa * pb;
  pairs[2] = __hfma2(pa, pb, pa);
  pairs[3] = __hmax2(pa, pb);
}
extern "C" __global__ void half_work(const __half* in, __half* out, __half2* pairs) {
  int i = threadIdx.x;
  Work<__half, __half2>(in[3 * i], in[3 * i + 1], in[3 * i + 2], __halves2half2(in[3 * i], in[3 * i + 1]),
                        __halves2half2(in[3 * i + 1], in[3 * i + 2]), out + 16 * i, pairs + 4 * i);
}
extern "C" __global__ void bf_work(const __nv_bfloat16* in, __nv_bfloat16* out, __nv_bfloat162* pairs) {
  int i = threadIdx.x;
  Work<__nv_bfloat16, __nv_bfloat162>(in[3 * i], in[3 * i + 1], in[3 * i + 2],
                                      __halves2bfloat162(in[3 * i], in[3 * i + 1]),
                                      __halves2bfloat162(in[3 * i + 1], in[3 * i + 2]), out + 16 * i, pairs + 4 * i);
}
extern "C" __global__ void half_round(const float* in, unsigned short* out) {
  float f = in[threadIdx.x];
  unsigned short* o = out + 8 * threadIdx.x;
  o[0] = __half_as_ushort(__float2half_rn(f));
  o[1] = __half_as_ushort(__float2half_rz(f));
  o[2] = __half_as_ushort(__float2half_rd(f));
  o[3] = __half_as_ushort(__float2half_ru(f));
  o[4] = __bfloat16_as_ushort(__float2bfloat16_rn(f));
  o[5] = __bfloat16_as_ushort(__float2bfloat16_rz(f));
  o[6] = (unsigned short)__half2int_rn(__float2half_rn(f));
  o[7] = __half_as_ushort(__int2half_rn((int)f));
}
extern "C" __global__ void half_atomics(__half* h, __half2* h2, __nv_bfloat16* b) {
  atomicAdd(h, __float2half(0.5f));
  atomicAdd(h2, __floats2half2_rn(1.0f, 0.25f));
  atomicAdd(b, __float2bfloat16(1.0f));
}
