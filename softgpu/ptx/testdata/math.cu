// SPDX-License-Identifier: Apache-2.0
// The CUDA math library on many inputs; the test compares with the host's.
#define ONE_F(name)                                                         \
  extern "C" __global__ void f_##name(const float* in, float* out, int n) { \
    int i = blockIdx.x * blockDim.x + threadIdx.x;                          \
    if (i < n) out[i] = name(in[i]);                                        \
  }
#define ONE_D(name)                                                           \
  extern "C" __global__ void d_##name(const double* in, double* out, int n) { \
    int i = blockIdx.x * blockDim.x + threadIdx.x;                            \
    if (i < n) out[i] = name(in[i]);                                          \
  }
#define TWO_F(name)                                                                        \
  extern "C" __global__ void f_##name(const float* a, const float* b, float* out, int n) { \
    int i = blockIdx.x * blockDim.x + threadIdx.x;                                         \
    if (i < n) out[i] = name(a[i], b[i]);                                                  \
  }
#define TWO_D(name)                                                                           \
  extern "C" __global__ void d_##name(const double* a, const double* b, double* out, int n) { \
    int i = blockIdx.x * blockDim.x + threadIdx.x;                                            \
    if (i < n) out[i] = name(a[i], b[i]);                                                     \
  }

// clang-format off
ONE_F(sinf) ONE_F(cosf) ONE_F(tanf) ONE_F(expf) ONE_F(exp2f) ONE_F(expm1f) ONE_F(logf) ONE_F(log2f) ONE_F(log10f)
ONE_F(log1pf) ONE_F(sqrtf) ONE_F(rsqrtf) ONE_F(cbrtf) ONE_F(erff) ONE_F(erfcf) ONE_F(tgammaf) ONE_F(lgammaf)
ONE_F(sinhf) ONE_F(coshf) ONE_F(tanhf) ONE_F(asinf) ONE_F(acosf) ONE_F(atanf) ONE_F(floorf) ONE_F(ceilf) ONE_F(roundf)
ONE_F(rintf) ONE_F(truncf) ONE_F(j0f) ONE_F(__sinf) ONE_F(__cosf) ONE_F(__expf) ONE_F(__logf)
ONE_D(sin) ONE_D(cos) ONE_D(tan) ONE_D(exp) ONE_D(exp2) ONE_D(expm1) ONE_D(log) ONE_D(log2) ONE_D(log10) ONE_D(log1p)
ONE_D(sqrt) ONE_D(rsqrt) ONE_D(cbrt) ONE_D(erf) ONE_D(erfc) ONE_D(tgamma) ONE_D(lgamma) ONE_D(sinh) ONE_D(cosh) ONE_D(tanh)
ONE_D(asin) ONE_D(acos) ONE_D(atan) ONE_D(floor) ONE_D(ceil) ONE_D(round) ONE_D(rint) ONE_D(trunc)
TWO_F(powf) TWO_F(fmodf) TWO_F(atan2f) TWO_F(hypotf) TWO_F(remainderf) TWO_F(fmaxf) TWO_F(fminf) TWO_F(copysignf)
TWO_F(nextafterf) TWO_F(__fdividef)
TWO_D(pow) TWO_D(fmod) TWO_D(atan2) TWO_D(hypot) TWO_D(remainder) TWO_D(fmax) TWO_D(fmin) TWO_D(copysign) TWO_D(nextafter)
static __device__ double div(double a, double b) { return a / b; }
static __device__ float divf(float a, float b) { return a / b; }
TWO_F(divf) TWO_D(div)
    // clang-format on
