// SPDX-License-Identifier: Apache-2.0
// C++ of many kinds: structs by value, recursion, function pointers, virtual functions, switches, 64-bit arithmetic.
#include <cassert>
#include <cstdio>

struct Pair {
  int a;
  double b;
  char c[5];
};
struct Big {
  long long v[20];
};

__device__ __noinline__ Pair Twice(Pair p) {
  Pair q = p;
  q.a *= 2;
  q.b *= 2;
  q.c[4] += 1;
  return q;
}
__device__ __noinline__ long long Sum(Big big) {
  long long s = 0;
  for (int i = 0; i < 20; ++i) s += big.v[i];
  return s;
}
extern "C" __global__ void structs(Pair p, Big big, Pair* out, long long* sum) {
  out[threadIdx.x] = Twice(p);
  big.v[threadIdx.x % 20] += threadIdx.x;
  sum[threadIdx.x] = Sum(big);
}

__device__ __noinline__ int Fib(int n) { return n < 2 ? n : Fib(n - 1) + Fib(n - 2); }
__device__ __noinline__ int Ackermann(int m, int n) {
  return m == 0 ? n + 1 : n == 0 ? Ackermann(m - 1, 1) : Ackermann(m - 1, Ackermann(m, n - 1));
}
extern "C" __global__ void recursion(int* out) {
  out[2 * threadIdx.x] = Fib(threadIdx.x);
  out[2 * threadIdx.x + 1] = Ackermann(2, threadIdx.x);
}

__device__ int Add(int a, int b) { return a + b; }
__device__ int Sub(int a, int b) { return a - b; }
__device__ int Mul(int a, int b) { return a * b; }
typedef int (*Operation)(int, int);
__device__ Operation table[3] = {Add, Sub, Mul};
extern "C" __global__ void pointers(int* out, int which) {
  Operation op = table[(threadIdx.x + which) % 3];
  out[threadIdx.x] = op(threadIdx.x, 7);
}

struct Shape {
  __device__ virtual float Area() const = 0;
  __device__ virtual int Corners() const { return 0; }
  __device__ virtual ~Shape() {}
};
struct Square : Shape {
  float s;
  __device__ Square(float side) : s(side) {}
  __device__ float Area() const override { return s * s; }
  __device__ int Corners() const override { return 4; }
};
struct Circle : Shape {
  float r;
  __device__ Circle(float radius) : r(radius) {}
  __device__ float Area() const override { return 3.0f * r * r; }
};
extern "C" __global__ void virtuals(float* area, int* corners) {
  Shape* shape = threadIdx.x % 2 ? (Shape*)new Square(threadIdx.x) : (Shape*)new Circle(threadIdx.x);
  area[threadIdx.x] = shape->Area();
  corners[threadIdx.x] = shape->Corners();
  delete shape;
}

extern "C" __global__ void switches(const int* in, int* out) {
  int v = in[threadIdx.x], r = 0;
  switch (v) {
    case 0:
      r = v * 3 + 1;
      break;
    case 1:
      r = out[threadIdx.x] + 5;
      break;
    case 2:
      r = v << 4;
      break;
    case 3:
      r = v ^ 0x55;
      break;
    case 4:
      r = __popc(v * 77777);
      break;
    case 5:
      r = v / 3;
      break;
    case 6:
      r = v % 4 - 9;
      break;
    case 7:
      r = -v;
      break;
    case 8:
      r = v * v * v;
      break;
    default:
      r = 1000 + v;
  }
  out[threadIdx.x] = r;
}

template <class T>
__device__ void Integers(T a, T b, T* out) {
  out[0] = a + b;
  out[1] = a - b;
  out[2] = a * b;
  out[3] = a / b;
  out[4] = a % b;
  out[5] = a & b;
  out[6] = a | b;
  out[7] = a ^ b;
  out[8] = a << (b & 7);
  out[9] = a >> (b & 7);
  out[10] = a < b;
  out[11] = a <= b;
  out[12] = a == b;
  out[13] = ~a;
  out[14] = -a;
  out[15] = a > b ? a : b;
}
#define INTEGERS(name, T)                                                 \
  extern "C" __global__ void int_##name(const T* a, const T* b, T* out) { \
    Integers<T>(a[threadIdx.x], b[threadIdx.x], out + 16 * threadIdx.x);  \
  }
// clang-format off
INTEGERS(i8, signed char) INTEGERS(u8, unsigned char) INTEGERS(i16, short) INTEGERS(u16, unsigned short)
INTEGERS(i32, int) INTEGERS(u32, unsigned) INTEGERS(i64, long long) INTEGERS(u64, unsigned long long)
    // clang-format on

    extern "C" __global__ void bits(unsigned a, unsigned b, unsigned c, unsigned long long d, unsigned* out) {
  out[0] = __popc(a);
  out[1] = __clz(a);
  out[2] = __ffs(a);
  out[3] = __brev(a);
  out[4] = __byte_perm(a, b, 0x3715);
  out[5] = __funnelshift_l(a, b, 13);
  out[6] = __funnelshift_r(a, b, 45);
  out[7] = __umulhi(a, b);
  out[8] = __mulhi((int)a, (int)b);
  out[9] = __usad(a, b, c);
  out[10] = __sad((int)a, (int)b, c);
  out[11] = __popcll(d);
  out[12] = __clzll(d);
  out[13] = __ffsll(d);
  out[14] = (unsigned)__brevll(d);
  out[15] = (unsigned)(__umul64hi(d, 0x123456789abcdefull) >> 32);
  out[16] = __vadd4(a, b);
  out[17] = __vmaxs2(a, b);
  out[18] = __dp4a((int)a, (int)b, (int)c);
  out[19] = __hadd((int)a, (int)b);
  out[20] = __mul24((int)a, (int)b);
  out[21] = __fns(a, 3, 2);
  out[22] = (unsigned)((unsigned __int128)d * a >> 64);
  out[23] = (unsigned)((__int128)d / 1000003);
}

extern "C" __global__ void conversions(const double* in, long long* out) {
  double d = in[threadIdx.x];
  float f = (float)d;
  long long* o = out + 16 * threadIdx.x;
  o[0] = (int)d;
  o[1] = (long long)d;
  o[2] = (unsigned)d;
  o[3] = (int)f;
  o[4] = (long long)f;
  o[5] = (unsigned char)(int)f;
  o[6] = __double2int_rn(d);
  o[7] = __double2int_ru(d);
  o[8] = __float2int_rd(f);
  o[9] = __float2uint_rz(f);
  o[10] = __double_as_longlong((double)f);
  o[11] = __float_as_int(__double2float_rz(d));
  o[12] = __float_as_int(__double2float_ru(d));
  o[13] = __double_as_longlong(__dadd_rd(d, 0.1));
  o[14] = __float_as_int(__fmul_ru(f, 1.1f));
  o[15] = __double_as_longlong(__fma_rz(d, d, 1e-3));
}

extern "C" __global__ void prints(int n) {
  printf("int %d %5d|%-5d|%05d unsigned %u hex %x %#X\n", -n, n, n, n, 4000000000u, 255, 255);
  printf("long %ld %llu %lld %zu\n", -1234567890123L, 18446744073709551615ull, -5LL, (size_t)77);
  printf("float %f %.3f %10.2e %g %a\n", 1.5, 3.14159, 12345.678, 0.0001, 1.0);
  printf("text %s|%10s|%-10s|%.2s char %c percent %% star %*d %.*f\n", "abc", "right", "left", "cut", 'x', 6, 42, 2,
         2.71828);
  printf("%s none\n", (const char*)nullptr);
}
extern "C" __global__ void asserts(int n) { assert(threadIdx.x < n); }
extern "C" __global__ void traps() { __trap(); }

extern "C" __global__ void heap(int** out, int n) {
  int* p = (int*)malloc(n * sizeof(int));
  for (int i = 0; i < n; ++i) p[i] = i * threadIdx.x;
  int s = 0;
  for (int i = 0; i < n; ++i) s += p[i];
  p[0] = s;
  out[threadIdx.x] = p;
}

__constant__ int constants[8] = {3, 1, 4, 1, 5, 9, 2, 6};
__device__ int counter = 5;
struct Node {
  Node* next;
  int value;
};
__device__ Node second = {nullptr, 22};
__device__ Node first = {&second, 11};
__device__ int numbers[4] = {1, 2, 3, 4};
__device__ int* inside = numbers + 2;
extern "C" __global__ void variables(int* out) {
  out[0] = constants[threadIdx.x % 8] + counter;
  out[1] = first.next->value;
  out[2] = *inside;
}
extern "C" __global__ void locals(int* out, int n) {
  int values[64];
  for (int i = 0; i < 64; ++i) values[i] = i * n + threadIdx.x;
  for (int i = 0; i < 64; ++i) values[(i * 7) % 64] ^= values[(i * 13 + n) % 64];
  int s = 0;
  for (int i = 0; i < 64; ++i) s += values[(i + n) % 64] * (i + 1);
  out[threadIdx.x] = s;
}
extern "C" __global__ void printed(int* out) {
  out[0] = printf("%d and %s%%\n", 5, "six");
  out[1] = printf("plain\n");
}
